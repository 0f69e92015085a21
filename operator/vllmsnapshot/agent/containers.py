"""The engine container as the node sees it: found without asking anybody, pinned, and listed.

The API's container status lags by seconds, so a container is found in /proc: PID 1 of a PID namespace, in a cgroup of the pod,
that has the pod's control volume at its place. A sidecar or the pause container has not, and none of the three can be forged
from inside the container.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from vllmsnapshot_child.protocol import CONTROL_DIR

from . import namespaces

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process. `pid`, `ppid` count in the agent's PID namespace, `ns_pid`, `ns_session` in the container's."""

    pid: int
    ppid: int
    ns_pid: int
    ns_session: int
    uid: int
    gid: int
    state: str
    comm: str
    start_time: int
    """Clock ticks since boot: with `pid` it names a process for ever."""
    rss_bytes: int
    """Memory that a dump would write: private and shared anonymous pages, resident or swapped out."""
    traced: bool

    @property
    def zombie(self) -> bool:
        """Dead; its PID is taken until its parent reaps it."""
        return self.state in "ZX"


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A line of mountinfo: where it is seen, its type, and the options of the file system."""

    point: str
    root: str
    """The directory of the file system that is mounted; not `/` for a bind mount."""
    kind: str
    device: str
    options: dict[str, str]


def lines(text: str) -> list[str]:
    """The lines of a file of /proc. Only a line feed ends one: workloads choose names in them, and `str.splitlines` splits at ten
    other characters too.
    """
    return [line for line in text.split("\n") if line]


def read_process(proc: Path, pid: int) -> Process:
    """A process from /proc. Raises OSError if there is none, ValueError if it went away half-way."""
    stat = _read(f"{proc}/{pid}/stat")
    # comm may hold blanks and parentheses; the last one closes it.
    head, _, tail = stat.rpartition(") ")
    rest = tail.split()
    fields: dict[str, str] = {}
    for line in lines(_read(f"{proc}/{pid}/status")):
        name, _, value = line.partition(":")
        fields[name] = value.strip()

    def kib(name: str) -> int:
        return int(fields.get(name, "0 kB").split()[0]) << 10

    try:
        return Process(
            pid=pid,
            ppid=int(rest[1]),
            ns_pid=int(fields["NSpid"].split()[-1]),
            ns_session=int(fields["NSsid"].split()[-1]),
            uid=int(fields["Uid"].split()[0]),
            gid=int(fields["Gid"].split()[0]),
            state=rest[0],
            # The workload chooses it, and it ends in messages.
            comm="".join(x if x.isprintable() else "?" for x in head.partition("(")[2]),
            start_time=int(rest[19]),
            rss_bytes=kib("RssAnon") + kib("RssShmem") + kib("VmSwap"),
            traced=fields.get("TracerPid", "0") != "0",
        )
    except (IndexError, KeyError) as e:
        raise ValueError(f"process {pid} ended while it was read") from e


def _read(path: str) -> str:
    # Twice as fast as pathlib, and this is read for every process of the node.
    with open(path, "rb") as f:
        return f.read().decode(errors="replace")


class Container:
    """A container's PID 1, pinned: after it has died every method raises ProcessLookupError or says so, whoever has its PID then."""

    def __init__(self, pid: int, *, proc: Path = Path("/proc")) -> None:
        """Pin the process. Raises OSError if there is none."""
        self.proc = proc
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        try:
            # Reads below this descriptor fail once the process is gone, even if its number is taken again.
            self.proc_fd = os.open(proc / str(pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except BaseException:
            os.close(self.pidfd)
            raise
        try:
            self.init = read_process(proc, pid)
            self._namespace = self.namespace("pid")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Container:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the process."""
        for fd in (self.pidfd, self.proc_fd):
            with contextlib.suppress(OSError):
                os.close(fd)

    def alive(self) -> bool:
        """Whether PID 1 has not died."""
        return not wait_dead([self.pidfd], 0)

    def text(self, name: str) -> str:
        """A file of /proc/PID. Raises OSError."""
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.proc_fd)
        with open(fd, errors="surrogateescape", newline="\n") as f:
            return f.read()

    def namespace(self, kind: str) -> str:
        """The identity of a namespace, as `pid:[4026531836]`. Raises OSError."""
        return os.readlink(f"ns/{kind}", dir_fd=self.proc_fd)

    def open_root(self) -> int:
        """A descriptor of the container's root directory, for `namespaces.open_in_root`. Raises OSError."""
        return os.open("root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.proc_fd)

    def mounts(self) -> list[Mount]:
        """The container's mounts, a later one of the same point hiding the earlier. Raises OSError."""
        return parse_mountinfo(self.text("mountinfo"))

    def processes(self) -> list[Process]:
        """All processes of the container's PID namespace but PID 1, by PID in it. Raises ProcessLookupError if PID 1 is gone."""
        found = []
        for pid in _pids(self.proc):
            with contextlib.suppress(OSError, ValueError):
                # Zombies have one too: their PIDs are taken until they are reaped.
                if pid != self.pid and os.readlink(f"{self.proc}/{pid}/ns/pid") == self._namespace:
                    found.append(read_process(self.proc, pid))
        if not self.alive():
            raise ProcessLookupError(f"PID 1 of the container (process {self.pid}) has died")
        return sorted(found, key=lambda p: p.ns_pid)

    def descendants(self) -> list[Process]:
        """The processes that descend from PID 1: the workload. A shell of `kubectl exec` has its parent outside and is not listed."""
        return descendants(self.processes(), self.pid)


def descendants(processes: Iterable[Process], root: int) -> list[Process]:
    """The processes below `root`, without it."""
    listed = list(processes)
    inside = {root}
    grown = True
    while grown:
        more = {p.pid for p in listed if p.ppid in inside} - inside
        inside |= more
        grown = bool(more)
    return [p for p in listed if p.pid in inside and p.pid != root]


def parse_mountinfo(text: str) -> list[Mount]:
    """Mounts in the order of mountinfo. Names in it are a workload's (`subPath`): only a line feed ends a line, as the kernel
    means it, and a line that is none says nothing.
    """
    mounts = []
    for line in lines(text):
        left, _, right = line.partition(" - ")
        one, two = left.split(" "), right.split(" ")
        if len(one) < 6 or len(two) < 3:
            continue
        options: dict[str, str] = {}
        for item in " ".join(two[2:]).split(","):
            name, _, value = item.partition("=")
            # With the new mount API every layer has an option of its own.
            key = name.rstrip("+")
            options[key] = f"{options[key]}:{value}" if key in options and name.endswith("+") else value
        mounts.append(Mount(point=_unescape(one[4]), root=_unescape(one[3]), kind=two[0], device=one[2], options=options))
    return mounts


def _unescape(text: str) -> str:
    """mountinfo writes blanks and backslashes in octal."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text


def _pids(proc: Path) -> Iterator[int]:
    for name in os.listdir(proc):
        if name.isdigit():
            yield int(name)


def in_pod(cgroups: str, pod_uid: str) -> bool:
    """Whether the text of /proc/PID/cgroup names the pod: `pod<uid>` (cgroupfs) or `...-pod<uid with _>.slice` (systemd).

    Compared by path component, so that a UID that is the beginning of another one does not match.
    """
    names = (f"pod{pod_uid}", f"pod{pod_uid.replace('-', '_')}.slice")
    for line in lines(cgroups):
        path = line.split(":", 2)[-1]
        for component in path.split("/"):
            if component in names or component.endswith(f"-{names[1]}"):
                return True
    return False


def find(pod_uid: str, control_dir: Path, *, proc: Path = Path("/proc")) -> Container | None:
    """The running engine container of a pod, or None. `control_dir` is the pod's control volume as the agent sees it.

    The caller closes it. If a workload has made PID namespaces of its own, the outermost PID 1 counts; two of the same depth
    (the control volume is mounted in a second container) are refused with a warning.
    """
    try:
        wanted = os.stat(control_dir, follow_symlinks=False)
    except OSError:
        return None
    found: list[tuple[int, Container]] = []
    for pid in _pids(proc):
        depth = _depth(proc, pid, pod_uid)
        if not depth:
            continue
        try:
            container = Container(pid, proc=proc)
        except (OSError, ValueError):
            continue
        # Looked at again through the pinned process: the number may have changed hands since.
        if _depth(proc, pid, pod_uid) and container.alive() and _has_control(container, wanted):
            found.append((depth, container))
        else:
            container.close()
    found.sort(key=lambda item: item[0])
    for _, container in found[1:]:
        container.close()
    if not found:
        return None
    if len(found) > 1 and found[1][0] == found[0][0]:
        log.warning("pod %s: processes %d and %d both have the control volume", pod_uid, found[0][1].pid, found[1][1].pid)
        found[0][1].close()
        return None
    return found[0][1]


def _depth(proc: Path, pid: int, pod_uid: str) -> int:
    """How many PID namespaces deep this PID 1 of the pod is; 0 for anything else."""
    try:
        if not in_pod(_read(f"{proc}/{pid}/cgroup"), pod_uid):
            return 0
        for line in lines(_read(f"{proc}/{pid}/status")):
            if line.startswith("NSpid:"):
                pids = line.split()[1:]
                return len(pids) if len(pids) > 1 and pids[-1] == "1" else 0
    except OSError:
        pass
    return 0


def _has_control(container: Container, wanted: os.stat_result) -> bool:
    try:
        with namespaces.opened(container.open_root()) as root:
            seen = namespaces.stat_in_root(root, CONTROL_DIR)
    except OSError:
        return False
    return (seen.st_dev, seen.st_ino) == (wanted.st_dev, wanted.st_ino)


def wait_dead(pidfds: Iterable[int], timeout_s: float) -> bool:
    """Wait until every process behind the descriptors has died, at most so long. True if they all have."""
    deadline = time.monotonic() + timeout_s
    waiting = set(pidfds)
    poll = select.poll()
    for fd in waiting:
        poll.register(fd, select.POLLIN)
    while waiting:
        left = max(0.0, deadline - time.monotonic())
        ready = poll.poll(left * 1000)
        for fd, _ in ready:
            poll.unregister(fd)
            waiting.discard(fd)
        if not ready and left <= 0:
            return False
    return True


def send(process: Process, number: signal.Signals, *, proc: Path = Path("/proc")) -> bool:
    """Signal exactly this process; False if it is gone. The start time tells it from a later owner of its PID."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    with namespaces.opened(pidfd):
        try:
            if read_process(proc, process.pid).start_time != process.start_time:
                return False
            signal.pidfd_send_signal(pidfd, number)
        except (OSError, ValueError):
            return False
    return True


def is_criu(proc: Path, process: Process) -> bool:
    """Whether it runs the agent's CRIU (see `nsrun`), or was forked by it and is not yet made into what it will be."""
    try:
        return os.readlink(f"{proc}/{process.pid}/exe").startswith("/memfd:criu")
    except OSError:
        return False


def kill_all(container: Container, *, timeout_s: float = 10.0) -> list[Process]:
    """SIGKILL every descendant of PID 1, and CRIU; wait until they are reaped and their PIDs free.

    Returns what is left after the time (seconds). Raises ProcessLookupError if PID 1 dies.
    """
    deadline = time.monotonic() + timeout_s
    pause = 0.005
    while True:
        processes = container.processes()
        # A CRIU whose agent was killed has its parent outside, as a shell has, and half-made processes below it.
        roots = [container.pid, *(p.pid for p in processes if is_criu(container.proc, p))]
        doomed = {p.pid for root in roots for p in descendants(processes, root)} | set(roots)
        left = [p for p in processes if p.pid in doomed]
        # Again in every round: a process may have forked before it died, and CRIU's helpers stop and trace each other.
        for process in left:
            if not process.zombie:
                send(process, signal.SIGKILL, proc=container.proc)
        if not left or time.monotonic() >= deadline:
            return left
        # The kernel tells nobody but PID 1 that a zombie is reaped.
        time.sleep(pause)
        pause = min(0.1, pause * 2)


def resume_all(container: Container) -> int:
    """SIGCONT to every descendant of PID 1; returns how many were stopped. Raises ProcessLookupError if PID 1 is gone.

    To those that run, too: CRIU leaves by sending SIGSTOP, and a process that has not got to it yet would stop when we are gone.
    """
    count = 0
    for process in container.descendants():
        if not process.zombie and send(process, signal.SIGCONT, proc=container.proc):
            count += process.state in "tT"
    return count


def memory_limit(container: Container, cgroup_root: Path) -> int | None:
    """The container's memory limit (bytes), or None if it has none or it cannot be read."""
    mounts = [
        m for m in parse_mountinfo((container.proc / "self/mountinfo").read_text()) if Path(m.point).is_relative_to(cgroup_root)
    ]
    limits = []
    for line in lines(container.text("cgroup")):
        _, names, path = line.split(":", 2)
        for mount in mounts:
            if mount.kind == "cgroup2" and not names:
                file = "memory.max"
            elif mount.kind == "cgroup" and "memory" in names.split(",") and "memory" in mount.options:
                file = "memory.limit_in_bytes"
            else:
                continue
            with contextlib.suppress(OSError, ValueError):
                inside = path[len(mount.root) :] if mount.root != "/" and path.startswith(mount.root) else path
                limits.append(int((Path(mount.point) / inside.lstrip("/") / file).read_text()))
    # v1 says "no limit" as the largest multiple of the page size.
    return min((x for x in limits if x < 1 << 60), default=None)


def set_last_pid(pidfd: int, last_pid: int, *, timeout_s: float) -> None:
    """Have the next process of a PID namespace (that of `pidfd`) get a PID above this. Raises OSError, TimeoutError.

    A child writes it, since a process never changes its own PID namespace; a thread of its own starts the child, since what
    `setns` changes is the thread's. The file is the agent's: the container's own /proc/sys is read-only.
    """
    errors: list[Exception] = []

    def write() -> None:
        try:
            namespaces.setns(pidfd, namespaces.CLONE_NEWPID)
            subprocess.run(
                ["/bin/sh", "-c", f"echo {int(last_pid)} > /proc/sys/kernel/ns_last_pid"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={},
                timeout=timeout_s,
                check=True,
            )
        except Exception as e:
            errors.append(e)

    thread = threading.Thread(target=write, name="set-last-pid", daemon=True)
    thread.start()
    thread.join()
    if not errors:
        return
    if isinstance(errors[0], subprocess.TimeoutExpired):
        raise TimeoutError(f"not written within {timeout_s} s") from errors[0]
    if isinstance(errors[0], subprocess.CalledProcessError):
        raise OSError(errno.EPERM, errors[0].stderr.decode(errors="replace").strip()) from errors[0]
    raise errors[0]
