"""A disk of any size for a test: a tmpfs in a mount namespace of one thread, which is gone with the thread whatever happens."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PAGE = os.sysconf("SC_PAGE_SIZE")
_CLONE_NEWNS, _CLONE_FS = 0x00020000, 0x00000200
_MS_RDONLY, _MS_REMOUNT, _MS_REC, _MS_PRIVATE = 1, 32, 16384, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def _do(name: str, *args: object) -> None:
    if getattr(_libc, name)(*args):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


class Disk:
    """It holds so many bytes, in whole pages."""

    def __init__(self, path: Path, size: int) -> None:
        """Mounted at `path`, in the namespace of the calling thread."""
        self.path = path
        self._size = size
        self._mount(0)

    def resize(self, size: int) -> None:
        """Make it larger or smaller; what is on it stays, so it may be full at once."""
        self._size = size
        self._mount(_MS_REMOUNT)

    def read_only(self, wanted: bool) -> None:
        """As the kernel does after an error of the disk."""
        self._mount(_MS_REMOUNT | (_MS_RDONLY if wanted else 0))

    def used(self) -> int:
        """Bytes."""
        space = os.statvfs(self.path)
        return (space.f_blocks - space.f_bfree) * space.f_frsize

    def _mount(self, flags: int) -> None:
        _do("mount", b"tmpfs", os.fsencode(self.path), b"tmpfs", flags, f"size={max(self._size, PAGE)}".encode())


def on_a_disk(path: Path, size: int, work: Callable[[Disk], T]) -> T:
    """What `work` returns or raises, given a disk of that size at `path`. It runs in a thread of its own, with the threads it makes."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            _do("unshare", _CLONE_NEWNS | _CLONE_FS)
            _do("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
            done.append(work(Disk(path, size)))
        except BaseException as e:
            failed.append(e)

    path.mkdir(parents=True, exist_ok=True)
    thread = threading.Thread(target=run, name="disk")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]
