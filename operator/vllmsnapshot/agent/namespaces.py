"""Linux calls that Python 3.11 lacks, and the way into a container: the helper process `nsrun`.

The agent itself never enters a container: it has threads, and a thread that has joined a mount namespace resolves every path,
Python's own imports included, in files that a workload wrote. `nsrun` is a process of its own for one task.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterator
from typing import Final

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWCGROUP: Final = 0x02000000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000
JOINED: Final = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
"""The namespaces CRIU shares with the tree. The image then holds none of them and fits any container. The time namespace is
not joined: CRIU makes one, so that CLOCK_MONOTONIC goes on from the capture. User namespaces are not supported."""

_SYS_PIDFD_GETFD: Final = 438
_SYS_OPENAT2: Final = 437
_SYS_KCMP: Final = 312
"""The one number here that is x86-64's own."""
_KCMP_FILE: Final = 0
_RESOLVE_NO_XDEV: Final = 0x01
_RESOLVE_NO_MAGICLINKS: Final = 0x02
_RESOLVE_IN_ROOT: Final = 0x10
_PR_SET_PDEATHSIG: Final = 1

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    """The result of a call of libc. Raises OSError if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def setns(fd: int, kinds: int) -> None:
    """Join namespaces: of the process behind a pidfd, or the one behind an nsfs descriptor. PID applies to children only."""
    checked(libc.setns(fd, kinds), "setns")


def die_with_parent(number: int) -> None:
    """Have the kernel send signal `number` to this process when the thread that started it ends."""
    checked(libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number)), "prctl")


def pidfd_getfd(pidfd: int, fd: int) -> int:
    """A duplicate of another process's descriptor: the same open file, close-on-exec here. Raises OSError(EBADF) if it is closed."""
    return checked(int(libc.syscall(_SYS_PIDFD_GETFD, pidfd, fd, 0)), "pidfd_getfd")


def same_open_file(pid: int, fd: int, other_pid: int, other_fd: int) -> bool:
    """Whether two descriptors of two processes are one open file: inherited, or passed on. False if either is gone."""
    return int(libc.syscall(_SYS_KCMP, pid, other_pid, _KCMP_FILE, ctypes.c_ulong(fd), ctypes.c_ulong(other_fd))) == 0


def open_in_root(root_fd: int, path: str, flags: int, *, cross_mounts: bool = True) -> int:
    """Open `path` as a process whose root directory is `root_fd` would; absolute links and `..` stay inside, magic links are refused.

    With `cross_mounts` false the file must lie on the file system of `root_fd`. Raises OSError.
    """
    resolve = _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS | (0 if cross_mounts else _RESOLVE_NO_XDEV)
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, resolve)
    while True:
        result = int(libc.syscall(_SYS_OPENAT2, root_fd, os.fsencode(path), how, len(how)))
        if result >= 0:
            return result
        number = ctypes.get_errno()
        # A rename somewhere on the path during the walk: the kernel could not tell whether it stayed inside.
        if number != errno.EAGAIN:
            raise OSError(number, os.strerror(number), path)


@contextlib.contextmanager
def opened(fd: int) -> Iterator[int]:
    """Close the descriptor at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


def stat_in_root(root_fd: int, path: str) -> os.stat_result:
    """`stat` of `path` below `root_fd`, following links inside only. Raises OSError."""
    with opened(open_in_root(root_fd, path, os.O_PATH)) as fd:
        return os.fstat(fd)


def is_pipe(fd: int) -> bool:
    """Whether the descriptor is a pipe or FIFO."""
    return stat.S_ISFIFO(os.fstat(fd).st_mode)
