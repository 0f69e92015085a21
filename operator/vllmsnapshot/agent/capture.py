"""From a tree that waits at the barrier to an artifact on disk.

preflight            nothing that CRIU cannot bring back, or only wrongly, may be in the tree
criu dump            leaves the tree stopped: the files below must not change against the memory
copy                 /dev/shm, scratch, changed files of the root file system
resume               whatever happened before; the caller may release the server from here on
digest, publish      the artifact appears, durable, or nothing does
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from ..api.constants import Reason
from ..environment import LAYERS, MEMORY_USED
from . import identity, namespaces, staging
from .accelerator import Accelerator
from .containers import Container, Mount, Process, descendants, lines, memory_limit, resume_all
from .criu import Criu, CriuError
from .errors import AgentError, CaptureError, StoreError, disk_reason, is_full
from .staging import Copy, Staged, StagingError
from .store import Draft, Manifest, Store

log = logging.getLogger(__name__)

MEMORY_MARGIN: Final = 128 << 20
"""Bytes of the memory limit to leave beside what comes from a GPU: page tables, and what the driver needs for the copy."""

SKIP_NAMES: Final = frozenset({"__pycache__"})
"""Of changed files of the root file system: Python makes them again, and nobody maps them."""

LOGGED: Final = 16 << 10
"""Bytes of CRIU's log that the agent's log takes after a failure."""

CAP_SYS_RESOURCE: Final = 24


@dataclass(frozen=True, kw_only=True)
class CaptureRequest:
    """What to capture and within which limits."""

    content: str
    timeout_s: float
    """From the start until the tree runs again; the rest may take as long again."""
    max_bytes: int | None = None
    allow_loopback_listeners: bool = False
    """In a pod network every pod has a loopback address of its own; vLLM's own snapshot child leaves listeners there."""
    host_network: bool = False
    """The replica is on the node's network, which its copies will share with it."""
    staged: tuple[Staged, ...] = (staging.SHM, staging.SCRATCH)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Kept in the manifest for the caller."""


@dataclass(frozen=True, kw_only=True)
class CaptureResult:
    """A durable artifact."""

    manifest: Manifest

    @property
    def phases(self) -> Mapping[str, float]:
        """Seconds: preflight, criu, copy, freeze (stopped in all), digest, publish, total."""
        return self.manifest.phases


@dataclass(frozen=True, kw_only=True)
class Tree:
    """What preflight found: the root, all processes (root first), and the directories to copy with their sizes."""

    root: Process
    processes: Sequence[Process]
    sources: Sequence[Source]
    estimate: int


@dataclass(frozen=True, kw_only=True)
class Source:
    """A directory to copy. `litter`: CRIU's files that were there before this dump."""

    staged: Staged
    fd: int
    skip: frozenset[str]
    skip_names: frozenset[str]
    litter: Mapping[str, tuple[int, int]]
    bytes: int


def capture(
    container: Container,
    request: CaptureRequest,
    store: Store,
    criu: Criu,
    accelerator: Accelerator,
    *,
    room: Callable[[int], None] | None = None,
    on_resumed: Callable[[], None] = lambda: None,
) -> CaptureResult:
    """Capture the container's tree. Blocks for seconds; on return the artifact is durable.

    `room` is asked before anything is written, with the bytes that are expected, and again with those that it came to; it raises
    StoreError where the store has none, and may make some first. Without it the store is asked, which makes none.
    The tree runs again whatever happens. `on_resumed` is called as soon as it does, also after a failure of the dump; what it
    raises is logged. Raises CaptureError or StoreError; with reason GPU_STATE_LOST the tree cannot go on and `on_resumed` was
    not called: the caller ends the replica.
    """
    started = time.monotonic()
    deadline = started + request.timeout_s
    phases: dict[str, float] = {}
    ask = room or functools.partial(check_room, store)
    resumed = False
    try:
        with contextlib.ExitStack() as stack:
            # Whatever an interrupted capture left; a stopped tree cannot be dumped.
            resume(container, request.staged)
            tree = preflight(container, request, stack, accelerator)
            recorded = accelerator.record(tree.processes, timeout_s=_left(deadline))
            # What is on the device moves into the memory of the processes.
            on_device = int(recorded.get(MEMORY_USED, 0))
            check_memory(sum(p.rss_bytes for p in tree.processes), on_device, memory_limit(container, criu.cgroup_root))
            expected = tree.estimate + on_device
            if request.max_bytes is not None and expected > request.max_bytes:
                raise CaptureError(
                    Reason.PREFLIGHT_SIZE,
                    f"the artifact would have about {expected} bytes; maxArtifactBytes is {request.max_bytes}",
                )
            ask(expected)
            draft = stack.enter_context(store.draft(request.content))
            work = stack.enter_context(store.work_dir())
            mounts = container.mounts()
            # A tree that uses no device does not depend on the node's.
            facts = identity.node_facts(criu.version(), criu.program, accelerator=accelerator.facts() if recorded else {})
            stdio = stdio_names(container)
            phases["preflight"] = time.monotonic() - started
            try:
                upper = _freeze(container, request, tree, draft, work, criu, accelerator, deadline, phases)
                # While it stands still, nothing is unmapped under the listing.
                mapped = identity.file_facts(
                    container, tree.processes, staged=[s.path for s in request.staged], upper=upper, mounts=mounts
                )
            finally:
                resumed = True
                _thaw(container, tree, accelerator, phases)
                _notify(on_resumed)
            manifest = _manifest(container, request, tree, facts, recorded, stdio, mapped, draft, phases, started)
            ask(manifest.disk_bytes)
            before = time.monotonic()
            published = draft.publish(manifest)
            log.info(
                "captured %s: %d bytes, %s, publish %.2f s",
                request.content,
                published.disk_bytes,
                ", ".join(f"{k} {v:.2f} s" for k, v in phases.items()),
                time.monotonic() - before,
            )
            return CaptureResult(manifest=published)
    except (ProcessLookupError, FileNotFoundError) as e:
        if not container.alive():
            raise CaptureError(Reason.SOURCE_GONE, "the container ended during the capture") from e
        raise CaptureError(Reason.DUMP_FAILED, f"{e}") from e
    except AgentError:
        raise
    except CriuError as e:
        log.warning("capture of %s: %s\n%s", request.content, e, e.log[-LOGGED:])
        if not container.alive():
            raise CaptureError(Reason.SOURCE_GONE, f"the container ended during the capture: {e}") from e
        if is_full(e):
            raise StoreError(Reason.INSUFFICIENT_DISK, str(e)) from e
        raise CaptureError(Reason.CAPTURE_TIMEOUT if e.timed_out else Reason.DUMP_FAILED, str(e)) from e
    except StagingError as e:
        raise CaptureError(_staging_reason(e, deadline), f"files of the container cannot be copied: {e}") from e
    except OSError as e:
        raise StoreError(disk_reason(e), f"the capture cannot be written: {e}") from e
    finally:
        if not resumed:
            _notify(on_resumed)


def resume(container: Container, staged: Sequence[Staged] = (staging.SHM, staging.SCRATCH)) -> int:
    """Undo what a capture that was cut off left behind: stopped processes and CRIU's link_remap files. Idempotent.

    Not while a restore runs into this container: it needs those files. Returns how many processes were stopped.
    Raises ProcessLookupError if the container is gone.
    """
    count = resume_all(container)
    staging.sweep(container, staged)
    return count


# --- before ----------------------------------------------------------------------------------------------------------


def preflight(container: Container, request: CaptureRequest, stack: contextlib.ExitStack, accelerator: Accelerator) -> Tree:
    """Insist that the tree can be captured. `stack` takes the descriptors of the sources. Raises CaptureError."""
    if container.namespace("user") != os.readlink(container.proc / "self/ns/user"):
        raise CaptureError(
            Reason.DUMP_FAILED, "the container has a user namespace of its own (hostUsers: false), which is not supported"
        )
    root, processes = find_tree(container.processes(), container.pid)
    others = [p for p in processes if p.uid != 0]
    if others and not has_capability(CAP_SYS_RESOURCE, container.proc):
        raise CaptureError(
            Reason.DUMP_FAILED,
            f"process {others[0].ns_pid} ({others[0].comm}) runs as user {others[0].uid}: "
            "the agent needs CAP_SYS_RESOURCE to read its limits",
        )
    for process in processes:
        check_descriptors(container, process, request, accelerator)
    if request.host_network:
        check_abstract_sockets(container, processes)
    mounts = container.mounts()
    sources = []
    root_fd = container.open_root()
    stack.callback(os.close, root_fd)
    for item in request.staged:
        try:
            fd = _open(root_fd, item.path)
        except OSError as e:
            raise CaptureError(Reason.DUMP_FAILED, f"{item.path} of the container cannot be opened: {e.strerror}") from e
        stack.callback(os.close, fd)
        sources.append(_source(item, fd, staging.mounted_below(item.path, mounts), frozenset()))
    upper = open_upper(container, mounts)
    if upper is not None:
        stack.callback(os.close, upper)
        # Files below a mount point cannot be put back there, and the staged directories travel on their own.
        skip = staging.mounted_below("/", mounts) | {s.path.lstrip("/") for s in request.staged}
        sources.append(_source(staging.UPPER, upper, skip, SKIP_NAMES))
    return Tree(
        root=root,
        processes=processes,
        sources=sources,
        estimate=sum(p.rss_bytes for p in processes) + sum(s.bytes for s in sources),
    )


def check_memory(in_memory: int, on_device: int, limit: int | None) -> None:
    """Insist that what is on a device fits into the container's memory (all in bytes). Raises CaptureError.

    Beyond its limit the kernel would end the engine in the midst of the checkpoint, which plain vLLM would not have done to it.
    """
    if on_device and limit is not None and in_memory + on_device + MEMORY_MARGIN > limit:
        raise CaptureError(
            Reason.INSUFFICIENT_MEMORY,
            f"{on_device} bytes on the GPU move into the memory of the engine, which takes {in_memory} bytes; the container's memory "
            f"limit is {limit}: raise it, or leave the weights out (capture.weights: Discard)",
        )


def has_capability(number: int, proc: Path = Path("/proc")) -> bool:
    """Whether this process has the capability."""
    for line in lines((proc / "self/status").read_text()):
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def find_tree(listed: Sequence[Process], init: int) -> tuple[Process, list[Process]]:
    """The root of the tree and its processes, root first. Raises CaptureError(PREFLIGHT_SESSION).

    The root is the child of PID 1 that leads its session. Every other process that descends from PID 1 must descend from it and
    be in its session: CRIU would leave an orphan behind, and nobody could end a second session with the first.
    """
    workload = [p for p in descendants(listed, init) if not p.zombie]
    roots = [p for p in workload if p.ppid == init and p.ns_pid == p.ns_session]
    if not roots:
        raise CaptureError(Reason.PREFLIGHT_SESSION, "PID 1 has no child that leads a session: the engine does not run")
    root = roots[0]
    below = descendants(workload, root.pid)
    inside = {p.pid for p in below} | {root.pid}
    for process in workload:
        if process.pid not in inside or process.ns_session != root.ns_session:
            what = f"in session {process.ns_session}" if process.pid in inside else "no descendant of the engine"
            raise CaptureError(
                Reason.PREFLIGHT_SESSION,
                f"process {process.ns_pid} ({process.comm}) is {what}; the engine is {root.ns_pid} ({root.comm}), "
                f"which leads session {root.ns_session}",
            )
    return root, [root, *(p for p in below if not p.zombie)]


def check_descriptors(container: Container, process: Process, request: CaptureRequest, accelerator: Accelerator) -> None:
    """Refuse descriptors that cannot travel. Raises CaptureError that names the process and the descriptor."""
    base = container.proc / str(process.pid) / "fd"
    who = f"process {process.ns_pid} ({process.comm})"
    pidfd = os.pidfd_open(process.pid)
    with namespaces.opened(pidfd):
        for name in os.listdir(base):
            try:
                link = os.readlink(base / name)
            except OSError:
                continue
            if link == "anon_inode:[io_uring]":
                raise CaptureError(
                    Reason.PREFLIGHT_IO_URING,
                    f"{who}: descriptor {name} is an io_uring ring, which CRIU cannot dump; "
                    "use seccompProfile RuntimeDefault, where that allows it Localhost vllmsnapshot/no-io-uring.json, "
                    "or sysctl kernel.io_uring_disabled=2",
                )
            if link.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/infiniband")) and not accelerator.claims(link):
                raise CaptureError(Reason.DUMP_FAILED, f"{who}: descriptor {name} is {link}, which this agent cannot capture")
            if link.startswith("socket:"):
                _check_socket(pidfd, int(name), who, loopback=request.allow_loopback_listeners)


def check_abstract_sockets(container: Container, processes: Sequence[Process]) -> None:
    """Refuse abstract unix sockets, for a replica on the node's network. Raises CaptureError.

    Their names are as unique in a network namespace as ports are. In a pod network each copy has names of its own; with
    hostNetwork the second replica could not bind them (CUDA makes one in each process: `cuda-uvmfd-…`).
    """
    owners: dict[str, tuple[Process, str]] = {}
    for process in processes:
        base = container.proc / str(process.pid) / "fd"
        for name in os.listdir(base):
            with contextlib.suppress(OSError):
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(base / name)):
                    owners[match[1]] = (process, name)
    for line in lines(container.text("net/unix")):
        # Num RefCount Protocol Flags Type St Inode [Path]; the NUL in front of an abstract name is shown as @.
        fields = line.split(None, 7)
        if len(fields) == 8 and fields[7].startswith("@") and fields[6] in owners:
            process, name = owners[fields[6]]
            raise CaptureError(
                Reason.PREFLIGHT_ABSTRACT_SOCKET,
                f"process {process.ns_pid} ({process.comm}): descriptor {name} is the abstract unix socket {fields[7][:100]!a}, "
                "which two replicas on the node's network cannot both have; set serving.hostNetwork: Disabled",
            )


def _check_socket(pidfd: int, number: int, who: str, *, loopback: bool) -> None:
    """Asked of the socket itself: /proc/net does not list one that is not bound, nor every protocol."""
    try:
        fd = namespaces.pidfd_getfd(pidfd, number)
    except OSError:
        return  # closed meanwhile
    sock = socket.socket(fileno=fd)
    try:
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return
        host, port = sock.getsockname()[:2]
        try:
            peer: Any = sock.getpeername()[:2]
        except OSError:
            peer = None
        if not port and peer is None and sock.type in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            return  # neither bound nor connected: it names no address
        listens = bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return
    finally:
        sock.close()
    if loopback and listens and (host.startswith("127.") or host in ("::1", "::ffff:127.0.0.1")):
        return
    kind = {socket.SOCK_STREAM: "TCP", socket.SOCK_DGRAM: "UDP"}.get(socket.SocketKind(sock.type), "raw")
    state = "listens on" if listens else "is connected to" if peer else "is bound to"
    address, at = peer if peer else (host, port)
    raise CaptureError(
        Reason.PREFLIGHT_INET_SOCKET,
        f"{who}: descriptor {number} is a {kind} socket that {state} {address} port {at}; another pod has another address",
    )


def stdio_names(container: Container) -> dict[str, int]:
    """What the image will call the pipes of PID 1's output, and their descriptor; a restore puts those of its own PID 1 there."""
    names: dict[str, int] = {}
    for number in (1, 2):
        with contextlib.suppress(OSError):
            link = os.readlink(f"fd/{number}", dir_fd=container.proc_fd)
            if re.fullmatch(r"pipe:\[\d+\]", link):
                names.setdefault(link, number)
    return names


def open_upper(container: Container, mounts: Sequence[Mount]) -> int | None:
    """The directory that holds the changed files of an overlay root, or None where there is none or it cannot be reached.

    It is no path of the agent's but of the container runtime's.
    """
    overlays = [m for m in mounts if m.point == "/" and m.kind == "overlay" and m.options.get("upperdir", "").startswith("/")]
    if not overlays:
        return None
    path = overlays[-1].options["upperdir"]
    runtime = identity.runtime_root(container)
    if runtime is not None:
        with namespaces.opened(runtime), contextlib.suppress(OSError):
            return _open(runtime, path)
    log.warning("the overlay directory %s cannot be opened: changed files of the container are not captured", path)
    return None


def _open(root: int, path: str) -> int:
    return namespaces.open_in_root(root, path, os.O_RDONLY | os.O_DIRECTORY)


def _source(item: Staged, fd: int, skip: frozenset[str], skip_names: frozenset[str]) -> Source:
    try:
        size = staging.measure(fd, skip=skip, skip_names=skip_names)
    except StagingError as e:
        raise CaptureError(Reason.PREFLIGHT_SIZE, f"{item.path}: {e}") from e
    return Source(staged=item, fd=fd, skip=skip, skip_names=skip_names, litter=size.criu_files, bytes=size.bytes)


def check_room(store: Store, size: int) -> None:
    """Insist that the store has room for so much. Raises StoreError."""
    usage = store.usage()
    if usage.room(size) < 0:
        raise usage.refusal(size)


# --- stopped ---------------------------------------------------------------------------------------------------------


def _freeze(
    container: Container,
    request: CaptureRequest,
    tree: Tree,
    draft: Draft,
    work: int,
    criu: Criu,
    accelerator: Accelerator,
    deadline: float,
    phases: dict[str, float],
) -> set[str]:
    """Dump and copy; the tree is stopped when this returns or raises. Returns the captured files of the root file system."""
    before = time.monotonic()
    accelerator.before_dump(tree.processes, timeout_s=_left(deadline))
    by_accelerator = phases["accelerator"] = time.monotonic() - before
    with namespaces.opened(draft.directory("images")) as images:
        outcome = criu.dump(container, tree.root.ns_pid, images, work, timeout_s=_left(deadline))
    phases["criu"] = outcome.phases["criu"]
    started = time.monotonic()
    # From CRIU's start, not from that of its helper. `_thaw` makes it a duration.
    phases["freeze"] = by_accelerator + phases["criu"] - started
    upper: set[str] = set()
    left = request.max_bytes
    for source in tree.sources:
        copy = Copy(max_bytes=left, deadline=deadline, skip=source.skip, skip_names=source.skip_names)
        with namespaces.opened(draft.directory(source.staged.name)) as target:
            try:
                copy.tree(source.fd, target)
            finally:
                # Made by the dump for the image; in the running container they are litter. Those of a failed copy too.
                staging.remove_criu_files(source.fd, copy.criu_files, before=source.litter)
        left = None if left is None else left - copy.bytes
    directory = draft.path / staging.UPPER.name
    for top, _, leaves in os.walk(directory):
        upper.update(str((Path(top) / n).relative_to(directory)) for n in leaves)
    phases["copy"] = time.monotonic() - started
    return upper


def _thaw(container: Container, tree: Tree, accelerator: Accelerator, phases: dict[str, float]) -> None:
    """Let the tree run on. Nothing here may hide the error that brought us here, but one that leaves a tree of no use."""
    with contextlib.suppress(ProcessLookupError):
        resume_all(container)
    if "freeze" in phases:
        phases["freeze"] += time.monotonic()
    try:
        # A dump that was cut off leaves CRIU's link_remap files in directories that were not copied.
        if "copy" not in phases:
            for source in tree.sources:
                found = staging.measure(source.fd, skip=source.skip, skip_names=source.skip_names).criu_files
                staging.remove_criu_files(source.fd, found, before=source.litter)
    except (OSError, StagingError, AgentError):
        log.exception("after the dump")
    try:
        accelerator.after_dump(tree.processes)
    except AgentError as e:
        if e.reason == Reason.GPU_STATE_LOST:
            raise
        log.exception("after the dump")


def _notify(on_resumed: Callable[[], None]) -> None:
    try:
        on_resumed()
    except Exception:
        log.exception("the release after a capture failed")


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())


def _staging_reason(error: StagingError, deadline: float) -> str:
    return Reason.CAPTURE_TIMEOUT if time.monotonic() > deadline else Reason.PREFLIGHT_SIZE


# --- after -----------------------------------------------------------------------------------------------------------


def _manifest(
    container: Container,
    request: CaptureRequest,
    tree: Tree,
    facts: Mapping[str, str],
    recorded: Mapping[str, str],
    stdio: dict[str, int],
    mapped: list[identity.FileFact],
    draft: Draft,
    phases: dict[str, float],
    started: float,
) -> Manifest:
    """The record of what is in the draft. The tree runs again meanwhile; files of the image do not change."""
    before = time.monotonic()
    files, size = draft.digest()
    if request.max_bytes is not None and size > request.max_bytes:
        raise CaptureError(Reason.PREFLIGHT_SIZE, f"the artifact has {size} bytes; maxArtifactBytes is {request.max_bytes}")
    mapped = identity.with_digests(container, mapped)
    phases["digest"] = time.monotonic() - before
    phases["total"] = time.monotonic() - started
    in_memory = ("images/pages-", "shm/")
    return Manifest(
        content=request.content,
        captured_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        root_pid=tree.root.ns_pid,
        pids=[p.ns_pid for p in tree.processes],
        stdio=stdio,
        staged={s.staged.name: s.staged.path for s in tree.sources},
        memory_bytes=sum((draft.path / n).lstat().st_blocks * 512 for n in files if n.startswith(in_memory)),
        disk_bytes=size,
        environment={**facts, **recorded, LAYERS: identity.image_layers(container)},
        mapped=mapped,
        files=files,
        phases={k: round(v, 4) for k, v in phases.items()},
        extra=dict(request.extra),
    )
