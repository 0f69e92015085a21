"""From an artifact to a running tree in a container that holds nothing but its PID 1; or back to that state."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .. import environment
from ..api.constants import Reason
from . import identity, namespaces, staging
from .accelerator import Accelerator
from .containers import Container, kill_all, memory_limit
from .criu import Criu, CriuError
from .errors import AgentError, RestoreError, is_full
from .staging import Staged, sweep
from .store import Artifact, Manifest, Store

log = logging.getLogger(__name__)

MEMORY_MARGIN: Final = 64 << 20
"""Bytes of the memory limit beside the image: PID 1, page tables, CRIU itself."""

LOGGED: Final = 16 << 10
"""Bytes of CRIU's log that the agent's log takes after a failure."""

CLEAR_TIMEOUT_S: Final = 15.0


@dataclass(frozen=True, kw_only=True)
class RestoreRequest:
    """What to restore, and within which time (seconds)."""

    content: str
    timeout_s: float
    wanted: Callable[[], None] = lambda: None
    """Raises if nobody waits for the tree any more: then it is taken away again."""


@dataclass(frozen=True, kw_only=True)
class RestoreResult:
    """A running tree: its root's PID in the container's namespace, and seconds per phase (verify, stage, criu, accelerator, restore in all)."""

    pid: int
    manifest: Manifest
    phases: Mapping[str, float] = field(default_factory=dict)


def restore(container: Container, request: RestoreRequest, store: Store, criu: Criu, accelerator: Accelerator) -> RestoreResult:
    """Bring the captured tree up in the container, with the container's own output and cgroup.

    Raises RestoreError or StoreError; then no process is left that was not there before.
    """
    started = time.monotonic()
    deadline = started + request.timeout_s
    with store.open(request.content) as artifact:
        there = container.descendants()
        if there:
            # Two engines in one container would share its memory and its port. Nothing is touched: this one may serve.
            raise RestoreError(
                Reason.ENGINE_RUNNING, f"another engine runs in the container: {there[0].ns_pid} ({there[0].comm})"
            )
        try:
            request.wanted()
            phases = _restore(container, artifact, store, criu, accelerator, deadline)
            request.wanted()
        except BaseException as e:
            _roll_back(container, artifact.manifest, accelerator)
            raise _explained(e, container) from e
        phases["restore"] = time.monotonic() - started
        return RestoreResult(pid=artifact.manifest.root_pid, manifest=artifact.manifest, phases=phases)


def clear(container: Container, staged: Sequence[Staged] = (staging.SHM, staging.SCRATCH)) -> None:
    """Kill everything in the container but PID 1 (and shells from outside), and wait until the PIDs are free.

    Removes CRIU's files too: a later restore into this container would trip over them.

    Raises RestoreError if something does not die in time, ProcessLookupError if PID 1 does.
    """
    left = kill_all(container, timeout_s=CLEAR_TIMEOUT_S)
    if left:
        names = ", ".join(f"{p.ns_pid} ({p.comm}, {p.state})" for p in left[:8])
        raise RestoreError(Reason.RESTORE_FAILED, f"processes that do not end: {names}")
    # The root file system is not swept: too large, and CRIU's files are where deleted files were, in the volumes.
    with contextlib.suppress(OSError):
        sweep(container, [s for s in staged if s.path != "/"])


def _restore(
    container: Container,
    artifact: Artifact,
    store: Store,
    criu: Criu,
    accelerator: Accelerator,
    deadline: float,
) -> dict[str, float]:
    manifest = artifact.manifest
    started = time.monotonic()
    _check_place(container, manifest, criu, accelerator, deadline)
    artifact.verify()
    phases = {"verify": time.monotonic() - started}
    with contextlib.ExitStack() as stack:
        stage = []
        for name, path in manifest.staged.items():
            fd = artifact.directory(name)
            stack.callback(os.close, fd)
            stage.append((Staged(name=name, path=path), fd))
        images = artifact.directory("images")
        stack.callback(os.close, images)
        work = stack.enter_context(store.work_dir())
        inherit = _stdio(container, manifest, stack)
        outcome = criu.restore(
            container,
            images,
            work,
            timeout_s=_left(deadline),
            last_pid=_last_pid(manifest, container.proc),
            stage=stage,
            inherit=inherit,
        )
    phases |= outcome.phases
    tree = container.descendants()
    lost = set(manifest.pids) - {p.ns_pid for p in tree if not p.zombie}
    if lost:
        raise RestoreError(Reason.RESTORE_DIED, f"processes {sorted(lost)} of the tree were not there after the restore")
    began = time.monotonic()
    tree.sort(key=lambda p: p.ns_pid != manifest.root_pid)
    accelerator.after_restore(container, manifest.environment, tree, timeout_s=_left(deadline))
    return phases | {"accelerator": time.monotonic() - began}


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())


def _check_place(container: Container, manifest: Manifest, criu: Criu, accelerator: Accelerator, deadline: float) -> None:
    """Insist that the image fits this node and container. Raises RestoreError."""
    if container.namespace("user") != os.readlink(container.proc / "self/ns/user"):
        raise RestoreError(
            Reason.RESTORE_FAILED, "the container has a user namespace of its own (hostUsers: false), which is not supported"
        )
    device = accelerator.facts() if environment.of_device(manifest.environment) else {}
    here = identity.node_facts(criu.version(), criu.program, accelerator=device)
    differences = identity.compare_node(manifest.environment, here)
    if not differences:
        differences = identity.compare_image(manifest.environment, container)
    if not differences:
        differences = identity.compare_files(manifest.mapped, container)
    if differences:
        more = f" and {len(differences) - 4} more" if len(differences) > 4 else ""
        raise RestoreError(Reason.IDENTITY_MISMATCH, "; ".join(differences[:4]) + more)
    taken = {p.ns_pid: p for p in container.processes()}
    for pid in manifest.pids:
        if pid in taken:
            raise RestoreError(Reason.RESTORE_FAILED, f"PID {pid} is taken by {taken[pid].comm} ({taken[pid].state})")
    accelerator.before_restore(container, manifest.environment, timeout_s=_left(deadline))
    limit = memory_limit(container, criu.cgroup_root)
    needed = manifest.memory_bytes + MEMORY_MARGIN
    if limit is not None and needed > limit:
        raise RestoreError(
            Reason.INSUFFICIENT_MEMORY, f"the tree takes {needed} bytes at once; the container's memory limit is {limit}"
        )


def _last_pid(manifest: Manifest, proc: Path) -> int:
    """A PID above all of the tree, so that neither CRIU nor a shell takes one of them while they are put back."""
    highest = max(manifest.pids)
    limit = int((proc / "sys/kernel/pid_max").read_text())
    # The threads of a process have PIDs too, which the manifest does not list; they were made one after the other.
    wanted = highest + 10_000
    return wanted if wanted < limit - 1000 else max(highest + 1, limit - 1000)


def _stdio(container: Container, manifest: Manifest, stack: contextlib.ExitStack) -> dict[str, int]:
    """The container's own output in the place of the pipes of the image: logs go on where the kubelet reads them."""
    inherit = {}
    for name, number in manifest.stdio.items():
        try:
            fd = namespaces.pidfd_getfd(container.pidfd, number)
        except OSError as e:
            raise RestoreError(Reason.RESTORE_FAILED, f"PID 1 has no descriptor {number}: {e.strerror}") from e
        stack.callback(os.close, fd)
        if not namespaces.is_pipe(fd):
            raise RestoreError(
                Reason.RESTORE_FAILED, f"descriptor {number} of PID 1 is no pipe, as it was in the captured container"
            )
        inherit[name] = fd
    return inherit


def _roll_back(container: Container, manifest: Manifest, accelerator: Accelerator) -> None:
    """Kill what a failed restore made. Must not hide the error that brought us here."""
    try:
        accelerator.before_terminate(container.descendants())
    except (OSError, AgentError):
        if container.alive():  # else the kernel has ended everything with it
            log.exception("before the end of a failed restore")
    try:
        clear(container, [Staged(name=n, path=p) for n, p in manifest.staged.items()])
    except OSError:
        if container.alive():
            log.exception("after a failed restore")
    except AgentError as e:
        log.error("after a failed restore: %s", e)  # noqa: TRY400


def _explained(error: BaseException, container: Container) -> BaseException:
    if isinstance(error, CriuError):
        log.warning("restore: %s\n%s", error, error.log[-LOGGED:])
        if is_full(error):
            # The disk of the node (scratch, CRIU's work), or the size limit of a volume: no fault of the artifact.
            return RestoreError(Reason.INSUFFICIENT_DISK, str(error))
        return RestoreError(Reason.RESTORE_TIMEOUT if error.timed_out else Reason.RESTORE_FAILED, str(error))
    if isinstance(error, AgentError) or not isinstance(error, Exception):
        return error
    if isinstance(error, OSError) and is_full(error):
        return RestoreError(Reason.INSUFFICIENT_DISK, f"the restore needs space: {error}")
    if not container.alive():
        return RestoreError(Reason.RESTORE_DIED, "the container ended during the restore")
    return RestoreError(Reason.RESTORE_FAILED, f"{type(error).__name__}: {error}")
