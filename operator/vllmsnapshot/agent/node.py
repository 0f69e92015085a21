"""What the parts of the agent share: what is known of the node, and the ways to act on it and to speak of it.

Nothing is remembered here that matters. Files and ledger are written before the API is told, and the API is told through the
outbox, so an API server that is away delays what is reported and never what is done.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from vllmsnapshot_child.protocol import Oracle

from ..api import constants as c
from ..api.types import SnapshotRef
from ..kube import EVENTS, Kube, Object
from . import facts, report
from .cache import Cache
from .decide import Candidate, Pod
from .ledger import Ledger
from .metrics import Metrics
from .nodeops import Health, NodeOps, Stored, explain
from .outbox import Outbox
from .room import Room
from .space import Usage
from .volumes import Volumes

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

AGAIN_S = 1.0
"""What waits for something that wakes nobody, or whose time may be up, looks again this often."""

Ask = Callable[[str, int], Awaitable[Oracle | None]]
"""Asks a server (address, port) the canary prompt; None while it does not answer."""


async def _ask_nobody(_address: str, _port: int) -> Oracle | None:
    return None


@dataclass
class Node:
    """What the parts of the agent share."""

    name: str
    kubelet_dir: str
    ops: NodeOps
    kube: Kube
    ledger: Ledger
    pods: Cache
    contents: Cache
    outbox: Outbox
    ask: Ask = _ask_nobody
    clock: Callable[[], float] = time.time
    steady: Callable[[], float] = time.monotonic
    wrote: Callable[[str], None] = lambda _: None  # called after every durable write
    wake_pod: Callable[[str], None] = lambda _: None
    wake_content: Callable[[str], None] = lambda _: None
    wake_node: Callable[[], None] = lambda: None
    health: Health = field(default_factory=lambda: Health(capable=False, message="the node has not been examined yet"))
    usage: Usage = field(default_factory=Usage)
    stored: dict[str, Stored] = field(default_factory=dict)  # a copy of what the store holds; the store itself decides
    busy: Counter[str] = field(default_factory=Counter)  # contents whose files are in use
    told: dict[str, None] = field(default_factory=dict)  # names of events that were written
    metrics: Metrics = field(default_factory=Metrics)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=64, thread_name_prefix="node"))

    def __post_init__(self) -> None:
        self.ledger.settled = self.metrics.settled
        self.room = Room(self)
        self.volumes = Volumes(self.kubelet_dir, self.wrote)

    # --- acting ---

    async def thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run something slow in a thread of our own (asyncio's pool is as small as the machine)."""
        context = contextvars.copy_context()  # what log lines are about
        return await asyncio.get_running_loop().run_in_executor(self.pool, lambda: context.run(function, *args, **kwargs))

    async def best_effort(self, doing: Awaitable[Any], what: str) -> None:
        """Do what is not worth failing for; an error is logged."""
        try:
            await doing
        except Exception as e:
            log.warning("cannot %s: %s", what, explain(e, "Error")[1], exc_info=e)

    @contextmanager
    def remembering(self, content: str) -> Iterator[None]:
        """Write to the ledger of a content what is true all the same if the disk refuses it: the memory of the ledger has it then."""
        try:
            yield
        except OSError:
            log.exception("the ledger of %s cannot be written", content)

    async def quarantine(self, content: str, uid: str, reason: str, message: str) -> None:
        """Let nothing be restored from a content any more."""
        with self.remembering(content):
            await self.thread(self.ledger.quarantine, content, uid, reason, message)

    @contextmanager
    def using(self, content: str) -> Iterator[None]:
        """Keep the files of a content from being deleted."""
        self.busy[content] += 1
        try:
            yield
        finally:
            self.busy[content] -= 1
            if not self.busy[content]:
                del self.busy[content]
            self.wake_content(content)
            self.wake_node()

    # --- knowing ---

    async def refresh(self) -> None:
        """Look into the store again."""
        shelf = await self.thread(self.ops.shelf)
        self.stored = {x.content: x for x in shelf.artifacts}
        self.usage = shelf.usage
        self.wake_node()

    async def measure(self) -> None:
        """See how much room there is."""
        self.usage = await self.thread(self.ops.usage)
        self.wake_node()

    def candidates(self) -> tuple[Candidate, ...]:
        """The contents of this node as decisions see them."""
        found = []
        for obj in self.contents.all():
            meta = obj["metadata"]
            entry = self.ledger.entry(meta["name"], meta["uid"])
            item = facts.candidate(obj, self.stored.get(meta["name"]), entry, self.health.environment)
            if item is not None and item.node == self.name:
                found.append(item)
        return tuple(found)

    # --- speaking ---

    def tell(self, who: Pod | SnapshotRef, reason: str, action: str, note: str, key: str, *, warning: bool = False) -> None:
        """Write an event, if it has not been written before."""
        pod = who if isinstance(who, Pod) else None
        event = report.Event(
            pod=pod.ref if pod is not None else None,
            namespace=who.ref.namespace if isinstance(who, Pod) else who.namespace,
            snapshot=who.snapshot if isinstance(who, Pod) else who.name,
            snapshot_uid=who.snapshot_uid if isinstance(who, Pod) else who.uid,
            reason=report.word(reason),
            action=action,
            note=note,
            key=key,
            warning=warning,
        )
        for obj in report.events(event, self.name, self.clock()):
            name = obj["metadata"]["name"]
            if name in self.told:
                continue
            self.told[name] = None
            while len(self.told) > 10_000:
                self.told.pop(next(iter(self.told)))

            async def send(obj: Object = obj) -> None:
                await self.kube.create(EVENTS, obj, c.MANAGER_AGENT)

            self.outbox.post(f"event/{name}", send, tries=5)
