"""Entering the cluster's namespaces from outside."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

CLONE_NEWNET: Final = 0x40000000


def set_namespace(fd: int, kind: int) -> None:
    """Move the calling thread into the namespace behind *fd*."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, kind) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


@contextlib.contextmanager
def network_namespace(pid: int) -> Iterator[None]:
    """Run the calling thread in the network namespace of *pid*, and come back afterwards.

    Threads and processes started meanwhile inherit it and keep it; sockets belong to the namespace they were made in.
    """
    # thread-self, not self: the namespace belongs to the thread, and another thread may be elsewhere.
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        target = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            set_namespace(target, CLONE_NEWNET)
        finally:
            os.close(target)
        try:
            yield
        finally:
            set_namespace(home, CLONE_NEWNET)
    finally:
        os.close(home)


def enter_command(pid: int, command: Sequence[str | Path], *, network_only: bool = False) -> list[str]:
    """The command line that runs *command* in the namespaces of *pid*.

    With *network_only* files and working directory stay those of the caller. Otherwise the command also gets the
    cluster's mounts and PID namespace, so it ends with the cluster, and starts in the same directory by name.
    """
    argv = [str(part) for part in command]
    if network_only:
        return ["nsenter", f"--net=/proc/{pid}/ns/net", "--", *argv]
    # Joining a mount namespace moves the working directory to its root.
    shell = 'cd "$0" 2>/dev/null || cd /; exec "$@"'
    directory = os.getcwd()
    return [
        "nsenter",
        "--target",
        str(pid),
        "--mount",
        "--net",
        "--pid",
        "--uts",
        "--",
        "sh",
        "-c",
        shell,
        directory,
        *argv,
    ]


def inode(pid: int | str, kind: str) -> str | None:
    """The identity of a namespace of *pid* (``net:[4026531840]``), or None if it cannot be told."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return None
