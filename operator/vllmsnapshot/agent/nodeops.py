"""The boundary between deciding and doing: what the rest of the agent asks of the node, as one Protocol.

Everything behind it is synchronous, may take seconds, and runs in a thread. `local.py` is the real one; tests script another.
Errors are exceptions that carry `reason` (a constant of the API) and `message`; see `explain`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllmsnapshot_child.protocol import Oracle

from ..api.types import Check
from .space import Usage


@dataclass(frozen=True, kw_only=True)
class PodRef:
    """A pod on this node, pinned by UID."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to capture, and for which content: the order of the API, and what the replica at the barrier says of itself."""

    content: str
    content_uid: str
    identity: str
    snapshot_uid: str
    timeout_s: float
    """Until the tree runs again; the rest may take as long again."""
    oracle: Oracle
    """What the server answered at the barrier: the answer that a restored engine must give."""
    max_bytes: int | None = None
    """What the artifact may take; None: as much as there is room for."""
    host_network: bool = False
    """The replica is on the node's network."""
    foreign: bool = False
    """The server is vLLM's own, which writes no serving.json, and leaves listeners open on the loopback address."""
    weights: str = ""
    """Discard or Keep, as the engine says."""
    weights_reason: str = ""
    cold_s: float | None = None
    """What a cold start takes, by that of the replica (see `breakeven`)."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A complete artifact in the store of this node. `oracle` is the answer that a restored engine must give."""

    content: str
    content_uid: str
    bytes: int
    digest: str
    captured_at: str
    oracle: Oracle | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    foreign: bool = False  # the captured server is vLLM's own, which writes no serving.json
    weights: str = ""
    weights_reason: str = ""
    cold_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Shelf:
    """What the store of this node holds, seen in one pass: reading an artifact means parsing its manifest, which may be large."""

    artifacts: Sequence[Stored]
    """All complete ones that can be read."""
    usage: Usage
    """What they take, with those that cannot be read, and what there is."""


@dataclass(frozen=True, kw_only=True)
class Revived:
    """A tree that CRIU has put back: its root in the container's PID namespace, the memory it takes, and seconds per phase."""

    pid: int
    bytes: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Health:
    """What the doctor found. `capable`: captures and restores can work here; if not, `message` says what is in the way.

    What is wrong with the GPUs concerns replicas with a GPU alone, and is in `gpu`.
    """

    capable: bool
    message: str = ""
    gpu: str | None = None
    """Why replicas with a GPU can be neither captured nor restored here, empty if they can; None: there is no GPU."""
    checks: Sequence[Check] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    boot_id: str = ""

    def obstacle(self, *, gpu: bool) -> str:
        """What keeps a replica, with or without a GPU, from being captured and restored here; empty if nothing does."""
        if not self.capable:
            return self.message or "the node cannot capture"
        return (self.gpu or "") if gpu else ""


@dataclass(frozen=True, kw_only=True)
class Digested:
    """How much of an artifact was read and found right."""

    files: int = 0
    bytes: int = 0


class NodeOps(Protocol):
    """What the agent can do to its node. Every call is idempotent; none follows a path that a workload wrote."""

    def doctor(self) -> Health:
        """Examine the node."""

    def shelf(self) -> Shelf:
        """Look through the store."""

    def usage(self) -> Usage:
        """What the store takes, and what there is: as in the shelf, for those who need no artifact."""

    def artifact(self, content: str) -> Stored | None:
        """The complete artifact of that content, or None. Reads the manifest only."""

    def verify(self, content: str) -> Digested:
        """Compute every digest of the artifact again, whatever was verified before, yielding to other work."""

    def delete_artifact(self, content: str) -> None:
        """Remove the files of a content, complete or not."""

    def raise_pids(self, pod: PodRef) -> None:
        """Let the next process of the container get a high PID, so that a capture of it can be restored anywhere."""

    def held(self) -> Sequence[str]:
        """Contents that have files in the store, readable or not."""

    def sweep(self) -> None:
        """Remove what failed removals have left in the store."""

    def restore(self, pod: PodRef, content: str, timeout_s: float, wanted: Callable[[], None]) -> Revived:
        """Bring the captured tree up in the pod's container. After an error nothing but PID 1 is left there.

        `wanted` raises if nobody waits for the tree any more; it is asked before the tree is made and again once it runs.
        """

    def clear(self, pod: PodRef) -> None:
        """Kill everything in the container but PID 1 and wait until it is gone."""

    def end(self, pod: PodRef, older_than_s: float) -> None:
        """Kill PID 1 of the container, and with it everything else, if it has run for longer than that (seconds)."""

    def retire(self, pod: PodRef, timeout_s: float, wanted: Callable[[], None]) -> None:
        """Let go of the GPU, then kill everything in the container but PID 1. If the first fails, nothing is killed.

        `wanted` raises if it is another container by now. It is called before each of the two.
        """

    def capture(self, pod: PodRef, order: Order, room: Callable[[int], None], on_resumed: Callable[[], None]) -> Stored:
        """Dump the tree at the barrier. Calls `on_resumed` once the tree runs again; on return the artifact is durable.

        `room` is called before anything is written, with the bytes that are expected, and before the artifact gets its name, with
        those that it takes. It raises if there is no room for them.
        """

    def resume(self, pod: PodRef) -> None:
        """Let a tree run on that an interrupted capture left stopped."""


def explain(error: BaseException, default: str) -> tuple[str, str]:
    """Reason and message of an error of the node; `default` is the reason of one that names none."""
    reason = getattr(error, "reason", None)
    message = getattr(error, "message", None) or str(error) or type(error).__name__
    if not isinstance(reason, str) or not reason:
        reason, message = default, f"{type(error).__name__}: {message}"
    return reason, str(message)[:2000]
