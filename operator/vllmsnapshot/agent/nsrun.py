"""The helper process that enters a container and runs CRIU there: `python -m vllmsnapshot.agent.nsrun FD`, FD = JSON task.

Order matters. Everything the helper needs is opened by the agent and inherited, and every module is imported before it joins the
container's mount namespace: from then on each path it resolves is a path of the workload. Nothing is mounted into the container;
CRIU, its libraries and the image directory are reached through inherited descriptors (`/proc/self/fd/N/...`), which need no
place in the container's mounts and cannot be seen or held by its processes.

CRIU starts under its own dynamic loader, out of an anonymous copy in memory whose `/etc/ld.so.preload` is blanked: the loader
would read that file from the container and run what it names as root.

Reports on the status descriptor, one JSON object a line: `{"phase": ..., "seconds": ...}`, `{"criu": PID}`, at the end
`{"status": exit status}` or `{"error": text}`.
"""

from __future__ import annotations

import contextlib
import encodings.ascii
import encodings.latin_1
import encodings.utf_8  # noqa: F401
import fcntl
import json
import os
import resource
import signal
import sys
import time
from typing import Any, Final

from . import namespaces, staging

PREFIX_FD: Final = 3
IMAGES_FD: Final = 4
WORK_FD: Final = 5
ABORT_GRACE_S: Final = 10
"""Seconds that CRIU has to let a tree go after its dump was given up."""

LIBRARIES: Final = "usr/lib/x86_64-linux-gnu"
LOADER: Final = "usr/lib64/ld-linux-x86-64.so.2"
PROGRAM: Final = "usr/sbin/criu"

ENVIRONMENT: Final = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/nonexistent",  # CRIU reads ~/.criu
    "LC_ALL": "C",
    "GNUTLS_NO_IMPLICIT_INIT": "1",  # it would read /etc/gnutls of the container; CRIU uses TLS for page servers only
}


def _report(fd: int, **values: Any) -> None:
    # The agent may be dead, and there is still a dump to end.
    with contextlib.suppress(BrokenPipeError):
        os.write(fd, json.dumps(values).encode() + b"\n")


def _loader(prefix: int) -> int:
    """A descriptor of the dynamic loader without ld.so.preload, in memory."""
    fd = os.open(LOADER, os.O_RDONLY | os.O_CLOEXEC, dir_fd=prefix)
    with open(fd, "rb") as f:
        code = f.read()
    name = b"/etc/ld.so.preload\0"
    if name not in code:
        raise RuntimeError(f"{LOADER} does not look like glibc's loader: no {name!r} in it")
    # An empty path cannot exist.
    code = code.replace(name, b"\0" * len(name))
    exec_flag = 0x10  # MFD_EXEC, Linux 6.3: says that this one is to be executed; older kernels refuse the flag
    try:
        copy = os.memfd_create("criu", os.MFD_CLOEXEC | exec_flag)
    except OSError:
        copy = os.memfd_create("criu", os.MFD_CLOEXEC)
    view = memoryview(code)
    while view:
        view = view[os.write(copy, view) :]
    return copy


def _join_cgroups(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.write(fd, b"0")  # 0: the writer
        os.close(fd)


def _raise_pids(last_pid: int) -> None:
    """Have the next process of the joined PID namespace get a PID above this. A child writes it: only children are in it yet.

    Through the agent's /proc: the container's own /proc/sys is read-only.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with open("/proc/sys/kernel/ns_last_pid", "w") as f:
                f.write(str(last_pid))
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("/proc/sys/kernel/ns_last_pid cannot be written")


def _stage(tasks: list[dict[str, Any]], deadline: float) -> None:
    """Copy the staged directories to their places. Runs inside the mount namespace, so that no path leads out of it."""
    for task in tasks:
        copy = staging.Copy(deadline=deadline, skip=frozenset(task["skip"]))
        root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        target = namespaces.open_in_root(root, task["path"], os.O_RDONLY | os.O_DIRECTORY)
        try:
            copy.tree(task["fd"], target)
        finally:
            os.close(target)
            os.close(root)
            os.close(task["fd"])


class _Abort:
    """Ends a dump without harm to the tree, on SIGTERM: the time is up, or the agent has died.

    A CRIU that is killed may leave a process in the middle of code that it injected, and that process dies. One that fails lets
    every process go as it was. So it is made to fail: from now on it can write no file.
    """

    def __init__(self) -> None:
        self.pid: int | None = None
        signal.signal(signal.SIGTERM, self._fail)
        signal.signal(signal.SIGALRM, self._kill)

    def _fail(self, *_: object) -> None:
        if self.pid is None:
            os._exit(1)
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (0, 0))
        signal.alarm(ABORT_GRACE_S)

    def _kill(self, *_: object) -> None:
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)


def _criu(task: dict[str, Any], loader: int) -> None:
    """Become CRIU. Descriptors: 0 to 2, the three of this module, and those to inherit under the numbers of the command line."""
    namespaces.die_with_parent(signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A write beyond the limit of `_Abort` is to fail, not to kill. (SIGPIPE is ignored already: Python does that.)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    moves = {
        PREFIX_FD: task["prefix"],
        IMAGES_FD: task["images"],
        WORK_FD: task["work"],
        **{int(k): v for k, v in task["inherit"].items()},
    }
    # First out of the way of each other, then to their places.
    high = {number: _dup_above(fd, 900) for number, fd in moves.items()}
    loader = _dup_above(loader, 900)
    os.closerange(3, 900)
    for number, fd in high.items():
        os.dup2(fd, number, inheritable=True)
        os.close(fd)
    prefix = f"/proc/self/fd/{PREFIX_FD}"
    command = [
        "criu",
        "--inhibit-cache",
        "--argv0",
        "criu",
        "--library-path",
        f"{prefix}/{LIBRARIES}",
        f"{prefix}/{PROGRAM}",
        *task["argv"],
    ]
    os.execve(loader, command, ENVIRONMENT)  # noqa: S606


def _dup_above(fd: int, least: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least)


def run(task: dict[str, Any]) -> int:
    """Do the task; returns CRIU's exit status."""
    status: int = task["status"]
    abort = _Abort() if task["gentle"] else None
    namespaces.die_with_parent(signal.SIGTERM if abort else signal.SIGKILL)
    if os.getppid() != task["parent"]:
        return 1  # the agent died before the line above
    os.umask(0o077)
    _join_cgroups(task["cgroups"])
    for fd in task["leave"]:
        # Some may refuse: best effort.
        with contextlib.suppress(OSError):
            os.write(fd, b"0")
        os.close(fd)
    loader = _loader(task["prefix"])
    namespaces.setns(task["pidfd"], namespaces.CLONE_NEWPID)
    if task["last_pid"]:
        _raise_pids(task["last_pid"])
    namespaces.setns(task["pidfd"], namespaces.JOINED)
    os.chdir("/")
    started = time.monotonic()
    _stage(task["stage"], started + task["timeout_s"])
    _report(status, phase="stage", seconds=time.monotonic() - started)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    pid = os.fork()
    if pid == 0:
        try:
            _criu(task, loader)
        except BaseException as e:
            os.write(2, f"Error: criu was not started: {e}\n".encode())
        finally:
            os._exit(127)
    if abort:
        abort.pid = pid
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    _report(status, criu=pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    """Read the task, do it, report."""
    with open(int(sys.argv[1]), "rb") as f:
        task = json.load(f)
    # From here on nothing may be imported: sys.path would be searched in the container.
    sys.path.clear()
    sys.meta_path.clear()
    sys.path_hooks.clear()
    try:
        result = run(task)
        _report(task["status"], status=result)
    except BaseException as e:
        _report(task["status"], error=f"{type(e).__name__}: {e}")
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
