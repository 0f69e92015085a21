"""CRIU: its command lines, its time limit, its bounded log. It always runs inside the container's namespaces, through `nsrun`."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from . import nsrun
from .containers import Container, lines, parse_mountinfo, set_last_pid, wait_dead
from .staging import Staged, mounted_below

DEFAULT_PREFIX: Final = Path("/opt/criu")
MINIMUM: Final = (4, 2, 1)
"""4.1.1 fails on vLLM: `Can't get 1:16 opt` for TCP sockets on current kernels."""

LOG_LEVEL: Final = "-v3"
IMAGES: Final = f"/proc/self/fd/{nsrun.IMAGES_FD}"

COMMON: Final = [
    # Files of the container that would steer a root process: configuration, plugins.
    "--no-default-config",
    "-L",
    f"/proc/self/fd/{nsrun.PREFIX_FD}/usr/sbin",  # must exist, and holds no plugin
    "-D",
    IMAGES,
    "-W",
    f"/proc/self/fd/{nsrun.WORK_FD}",
    LOG_LEVEL,
    # The tree has no connections; without this CRIU would run iptables.
    "--network-lock",
    "skip",
    # The launcher has joined the container's cgroups; the image must not carry those of another pod.
    "--manage-cgroups=ignore",
    # A semaphore whose first name is gone is reachable only through a name that CRIU makes.
    "--link-remap",
    "--file-locks",
]


HARMLESS: Final = (b"setup RLIMIT_NOFILE", b"cgroupd: recv req error", b"kdat cache", b"Can't get hugetlb")
"""Errors and warnings of its log that say nothing about why it failed."""


_versions: dict[tuple[str, int, int, int], str] = {}


class CriuError(Exception):
    """CRIU failed or was stopped. `timed_out` tells which; the message ends with the errors of its log."""

    def __init__(self, message: str, *, timed_out: bool, log: str = "") -> None:
        super().__init__(message)
        self.timed_out = timed_out
        self.log = log


class Log:
    """CRIU's log as much as anybody wants to read: the beginning, the end, and the last errors and warnings.

    A damaged image makes CRIU write gigabytes (2.5 GB in 210 s), so nothing of it goes to a file.
    """

    def __init__(self, head: int = 16 << 10, tail: int = 64 << 10, notable: int = 20) -> None:
        """Sizes in bytes; `notable` in lines."""
        self._head_size, self._tail_size = head, tail
        self._head, self._tail = bytearray(), bytearray()
        self._notable: deque[str] = deque(maxlen=notable)
        self._line = b""
        self.bytes = 0

    def feed(self, data: bytes) -> None:
        """Take a piece of the log."""
        self.bytes += len(data)
        room = self._head_size - len(self._head)
        if room > 0:
            self._head += data[:room]
            rest = data[room:]
        else:
            rest = data
        self._tail += rest
        if len(self._tail) > 2 * self._tail_size:
            del self._tail[: -self._tail_size]
        *lines, last = (self._line + data).split(b"\n")
        self._line = last[:4096]
        self._notable.extend(line[:500].decode(errors="replace").strip() for line in lines if self._matters(line))

    @staticmethod
    def _matters(line: bytes) -> bool:
        return (b"Error" in line or b"Warn" in line) and not any(word in line for word in HARMLESS)

    @property
    def text(self) -> str:
        """Beginning and end."""
        tail = self._tail[-self._tail_size :]
        cut = self.bytes - len(self._head) - len(tail)
        middle = f"\n... {cut} bytes left out ...\n".encode() if cut else b""
        return bytes(self._head + middle + tail).decode(errors="replace")

    def errors(self, count: int = 6) -> str:
        """The last errors and warnings, or the last lines where there are none."""
        if self._matters(self._line):
            self.feed(b"\n")
        notable = [line for line in self._notable if "Error" in line] or list(self._notable)
        if not notable:
            notable = [line for line in self.text.splitlines() if line.strip()]
        return "; ".join(notable[-count:])


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A finished run: seconds of staging (`stage`) and of CRIU itself (`criu`), and the log."""

    phases: Mapping[str, float]
    log: str = ""


@dataclass(kw_only=True)
class _Progress:
    criu_pidfd: int | None = None
    status: int | None = None
    error: str = ""
    criu_started: float | None = None
    criu_ended: float | None = None
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Criu:
    """One installation of CRIU, run through its own dynamic loader, so that neither the agent's nor the workload's image matters."""

    prefix: Path = DEFAULT_PREFIX
    cgroup_root: Path = Path("/sys/fs/cgroup")

    @property
    def program(self) -> Path:
        """The executable."""
        return self.prefix / nsrun.PROGRAM

    # --- on the node itself ------------------------------------------------------------------------------------------

    def _plain(self, *args: str) -> subprocess.CompletedProcess[str]:
        command = [
            str(self.prefix / nsrun.LOADER),
            "--inhibit-cache",
            "--library-path",
            str(self.prefix / nsrun.LIBRARIES),
            str(self.program),
            *args,
        ]
        try:
            return subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=30,
                env=nsrun.ENVIRONMENT,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            raise CriuError(
                f"criu cannot be run from {self.prefix}: {e}", timed_out=isinstance(e, subprocess.TimeoutExpired)
            ) from e

    def version(self) -> str:
        """As `4.2.1`. Asked once per installed file. Raises CriuError if it cannot be run."""
        try:
            info = self.program.stat()
        except OSError as e:
            raise CriuError(f"there is no criu at {self.program}: {e.strerror}", timed_out=False) from e
        key = (str(self.program), info.st_ino, info.st_size, info.st_mtime_ns)
        if key not in _versions:
            _versions[key] = self._version()
        return _versions[key]

    def _version(self) -> str:
        done = self._plain("--version")
        for line in done.stdout.splitlines():
            name, _, value = line.partition(":")
            if name == "Version":
                return value.strip()
        raise CriuError(f"criu --version says nothing: {done.stderr[-500:]}", timed_out=False)

    def check(self) -> str:
        """Ask CRIU whether this kernel has what it needs; returns its verdict. Raises CriuError with what is missing."""
        done = self._plain("check", "--no-default-config")
        if done.returncode:
            log = Log()
            log.feed((done.stdout + done.stderr).encode() + b"\n")
            raise CriuError(f"criu check: {log.errors()}", timed_out=False, log=log.text)
        return done.stdout.strip() or "Looks good."

    # --- in a container ----------------------------------------------------------------------------------------------

    def dump(
        self,
        container: Container,
        root_pid: int,
        images: int,
        work: int,
        *,
        timeout_s: float,
    ) -> Outcome:
        """Write the tree below `root_pid` (a PID of the container) into directory `images`, and leave its processes stopped.

        Not `--leave-running`: CRIU would delete the link_remap files that a restore needs. Raises CriuError.
        """
        argv = [
            "dump",
            *COMMON,
            "-t",
            str(root_pid),
            "--leave-stopped",
            # Deleted files that are still open go into the image up to this size; the budget of the artifact is checked elsewhere.
            "--ghost-limit",
            str(1 << 40),
        ]
        return self._enter(container, argv, images=(images, work), timeout_s=timeout_s, gentle=True)

    def restore(
        self,
        container: Container,
        images: int,
        work: int,
        *,
        timeout_s: float,
        last_pid: int,
        stage: Sequence[tuple[Staged, int]] = (),
        inherit: Mapping[str, int] | None = None,
    ) -> Outcome:
        """Bring the tree of directory `images` up in the container, in its namespaces and cgroups; it runs on return.

        `stage`: directories copied to their places first, with a descriptor of each. `inherit`: what the image calls
        `pipe:[123]` is replaced by this descriptor. `last_pid` must be above every PID of the image, or CRIU's own might take
        one of them. Raises CriuError; half-made processes may be left.
        """
        argv = ["restore", *COMMON, "--restore-detached"]
        numbered: dict[int, int] = {}
        for number, (name, fd) in enumerate((inherit or {}).items(), start=60):
            argv += ["--inherit-fd", f"fd[{number}]:{name}"]
            numbered[number] = fd
        return self._enter(
            container,
            argv,
            images=(images, work),
            timeout_s=timeout_s,
            last_pid=last_pid,
            stage=stage,
            inherit=numbered,
            join_cgroups=True,
        )

    def raise_pids(self, container: Container, last_pid: int, *, timeout_s: float = 10.0) -> None:
        """Let the container's next process get a PID above `last_pid`. Takes milliseconds. Raises CriuError."""
        try:
            set_last_pid(container.pidfd, last_pid, timeout_s=timeout_s)
        except OSError as e:
            raise CriuError(f"ns_last_pid of the container cannot be written: {e}", timed_out=isinstance(e, TimeoutError)) from e

    def _enter(
        self,
        container: Container,
        argv: list[str],
        *,
        images: tuple[int, int],
        timeout_s: float,
        last_pid: int = 0,
        stage: Sequence[tuple[Staged, int]] = (),
        inherit: Mapping[int, int] | None = None,
        join_cgroups: bool = False,
        gentle: bool = False,
    ) -> Outcome:
        """Run the helper; wait for it, at most so long. Kills it and CRIU at the end of the time, and waits until both are dead."""
        log = Log()
        progress = _Progress()
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            task_fd = os.memfd_create("task")
            stack.callback(os.close, task_fd)
            log_read, log_write = _pipe(stack)
            status_read, status_write = _pipe(stack)
            prefix = os.open(self.prefix, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, prefix)
            cgroups = cgroup_files(container, self.cgroup_root) if join_cgroups else []
            # An end of the agent's container kills all that is in its cgroup; see `nsrun` why a dump must not be killed.
            leave = root_cgroup_files(container.proc, self.cgroup_root) if gentle else []
            for fd in (*cgroups, *leave):
                stack.callback(os.close, fd)
            mounts = container.mounts() if stage else []
            task: dict[str, Any] = {
                "parent": os.getpid(),
                "status": status_write,
                "pidfd": container.pidfd,
                "prefix": prefix,
                "images": images[0],
                "work": images[1],
                "cgroups": cgroups,
                "leave": leave,
                "gentle": gentle,
                "last_pid": last_pid,
                "stage": [{"fd": fd, "path": s.path, "skip": sorted(mounted_below(s.path, mounts))} for s, fd in stage],
                "inherit": {str(k): v for k, v in (inherit or {}).items()},
                "argv": argv,
                "timeout_s": timeout_s,
            }
            os.write(task_fd, json.dumps(task).encode())
            os.lseek(task_fd, 0, os.SEEK_SET)
            passed = [
                task_fd,
                status_write,
                container.pidfd,
                prefix,
                *images,
                *cgroups,
                *leave,
                *(fd for _, fd in stage),
                *(inherit or {}).values(),
            ]
            package = Path(__file__).parents[2]
            helper = subprocess.Popen(
                # -S: no site-packages, hence no third-party code and 20 ms less.
                [sys.executable, "-S", "-m", "vllmsnapshot.agent.nsrun", str(task_fd)],
                stdin=subprocess.DEVNULL,
                stdout=log_write,
                stderr=log_write,
                pass_fds=sorted(set(passed)),
                start_new_session=True,
                env={**nsrun.ENVIRONMENT, "PYTHONPATH": _python_path(package), "PYTHONDONTWRITEBYTECODE": "1"},
            )
            for fd in (log_write, status_write):
                os.close(fd)
            try:
                finished = _attend(helper, log_read, status_read, log, progress, started + timeout_s)
            finally:
                _end(helper, progress, gentle=gentle)
            _drain(log_read, log)
        phases = dict(progress.phases)
        if progress.criu_started is not None:
            phases["criu"] = (progress.criu_ended or time.monotonic()) - progress.criu_started
        what = f"criu {argv[0]}"
        if not finished:
            # The errors of a dump that was made to fail would only mislead.
            errors = "" if gentle else f": {log.errors()}"
            raise CriuError(f"{what} took longer than {timeout_s:.1f} s{errors}", timed_out=True, log=log.text)
        if progress.error:
            raise CriuError(f"{what}: {progress.error}", timed_out=False, log=log.text)
        if progress.status != 0:
            raise CriuError(f"{what} ended with status {progress.status}: {log.errors()}", timed_out=False, log=log.text)
        return Outcome(phases=phases, log=log.text)


def _python_path(package: Path) -> str:
    """Where both import packages are: one place when installed, two in a checkout."""
    import vllmsnapshot_child

    other = Path(vllmsnapshot_child.__file__).parents[1]
    return os.pathsep.join(dict.fromkeys([str(package), str(other)]))


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe whose reading end is closed by the stack; the writing end goes to a child and is closed by the caller."""
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read, False)
    stack.callback(os.close, read)
    return read, write


def _attend(helper: subprocess.Popen[bytes], log_fd: int, status_fd: int, log: Log, progress: _Progress, deadline: float) -> bool:
    """Read log and status until the helper ends; False if the time ends first.

    The end is the helper's, not that of the pipe: half-made processes may hold the log for ever.
    """
    buffer = b""
    pidfd = os.pidfd_open(helper.pid)
    try:
        poll = select.poll()
        for fd in (log_fd, status_fd, pidfd):
            poll.register(fd, select.POLLIN)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            ready = dict(poll.poll(left * 1000))
            if log_fd in ready:
                data = _read(log_fd)
                log.feed(data)
                if not data:
                    poll.unregister(log_fd)
            if status_fd in ready or pidfd in ready:
                data = _read(status_fd)
                if status_fd in ready and not data:
                    poll.unregister(status_fd)
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    _note(json.loads(line), progress)
            if pidfd in ready:
                return True
    finally:
        os.close(pidfd)


def _note(message: Mapping[str, Any], progress: _Progress) -> None:
    if "phase" in message:
        progress.phases[message["phase"]] = message["seconds"]
    if "criu" in message:
        progress.criu_started = time.monotonic()
        # Gone already: then there is nothing to wait for.
        with contextlib.suppress(ProcessLookupError):
            progress.criu_pidfd = os.pidfd_open(message["criu"])
    if "status" in message:
        progress.criu_ended = time.monotonic()
        progress.status = message["status"]
    if "error" in message:
        progress.error = message["error"]


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 20)
    except BlockingIOError:
        return b""


def _drain(fd: int, log: Log) -> None:
    """What is still in the pipe; bounded, because a half-made process may go on writing."""
    for _ in range(64):
        data = _read(fd)
        if not data:
            return
        log.feed(data)


def _end(helper: subprocess.Popen[bytes], progress: _Progress, *, gentle: bool) -> None:
    """Kill CRIU and its helper if they still run, and wait until both are dead. `gentle`: let CRIU clean up first."""
    if helper.poll() is None and gentle:
        helper.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            helper.wait(nsrun.ABORT_GRACE_S + 5.0)
    if helper.poll() is None and progress.criu_pidfd is not None:
        # CRIU alone first: its helper then reaps it and ends. An orphan would keep its PID until somebody else does.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(progress.criu_pidfd, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            helper.wait(10.0)
    if helper.poll() is None:
        # The whole process group: CRIU may have been started a moment ago.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(helper.pid, signal.SIGKILL)
    helper.wait()
    if progress.criu_pidfd is not None:
        # No child of ours; it may need a moment to give its memory back.
        wait_dead([progress.criu_pidfd], 30.0)
        os.close(progress.criu_pidfd)


def cgroup_files(container: Container, cgroup_root: Path) -> list[int]:
    """Descriptors of the `cgroup.procs` of every cgroup the container is in: one per v1 hierarchy, one for v2.

    A hierarchy where the agent is in the same cgroup is left out. Raises CriuError if one is not mounted below `cgroup_root`:
    a tree outside its pod's cgroup would escape its limits.
    """
    mine = set(lines((container.proc / "self/cgroup").read_text()))
    mounts = [m for m in parse_mountinfo((container.proc / "self/mountinfo").read_text()) if m.kind in ("cgroup", "cgroup2")]
    mounts = [m for m in mounts if Path(m.point).is_relative_to(cgroup_root)] or mounts
    files: list[int] = []
    try:
        for line in lines(container.text("cgroup")):
            if line in mine:
                continue
            _, names, path = line.split(":", 2)
            for mount in mounts:
                if (
                    (mount.kind == "cgroup2")
                    if not names
                    else (mount.kind == "cgroup" and set(names.split(",")) <= _controllers(mount.options))
                ):
                    break
            else:
                raise CriuError(f"the cgroup hierarchy {names or 'v2'} is not mounted below {cgroup_root}", timed_out=False)
            inside = path[len(mount.root) :] if mount.root != "/" and path.startswith(mount.root) else path
            file = Path(mount.point) / inside.lstrip("/") / "cgroup.procs"
            try:
                files.append(os.open(file, os.O_WRONLY | os.O_CLOEXEC))
            except OSError as e:
                raise CriuError(f"the container's cgroup cannot be joined: {file}: {e.strerror}", timed_out=False) from e
    except BaseException:
        for fd in files:
            os.close(fd)
        raise
    return files


def root_cgroup_files(proc: Path, cgroup_root: Path) -> list[int]:
    """Descriptors of the `cgroup.procs` of the root of every hierarchy, as far as they can be opened."""
    files = []
    for mount in parse_mountinfo((proc / "self/mountinfo").read_text()):
        if mount.kind in ("cgroup", "cgroup2") and Path(mount.point).is_relative_to(cgroup_root):
            with contextlib.suppress(OSError):
                files.append(os.open(Path(mount.point) / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
    return files


def _controllers(options: Mapping[str, str]) -> set[str]:
    return {f"{name}={value}" if value else name for name, value in options.items()}
