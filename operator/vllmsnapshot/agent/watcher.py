"""Inotify on control volumes, by ctypes: a pod's `hello.json` is answered within milliseconds instead of a poll interval.

The directory of a pod does not exist when the pod is first heard of. The watch then sits on its deepest existing ancestor and
moves down as the kubelet makes the rest. Wake-ups are hints: too many or too few of them change when something is done, never what.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Callable

from .namespaces import checked, libc

IN_CLOSE_WRITE, IN_MOVED_TO, IN_CREATE, IN_DELETE = 0x8, 0x80, 0x100, 0x200
IN_DELETE_SELF, IN_MOVE_SELF = 0x400, 0x800
IN_Q_OVERFLOW, IN_IGNORED = 0x4000, 0x8000
IN_ONLYDIR, IN_DONT_FOLLOW = 0x1000000, 0x2000000
IN_NONBLOCK, IN_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC

MASK = IN_CLOSE_WRITE | IN_MOVED_TO | IN_CREATE | IN_DELETE | IN_DELETE_SELF | IN_MOVE_SELF | IN_ONLYDIR | IN_DONT_FOLLOW

_EVENT = struct.Struct("iIII")
_READ_BYTES = 64 << 10


class Watcher:
    """Calls `wake(uid)` when something changes in the control volume of a watched pod. Belongs to one event loop."""

    def __init__(self, wake: Callable[[str], None]) -> None:
        self._wake = wake
        self._fd = -1
        self._targets: dict[str, str] = {}  # pod UID -> control directory
        self._place: dict[str, int] = {}  # pod UID -> watch descriptor it hangs on
        self._deep: set[str] = set()  # pods whose watch is on the control directory itself
        self._users: dict[int, set[str]] = {}  # watch descriptor -> pod UIDs

    def start(self) -> None:
        """Open inotify and follow it from the running loop. Raises OSError if the node allows no instance more."""
        self._fd = checked(libc.inotify_init1(IN_NONBLOCK | IN_CLOEXEC), "inotify_init1")
        asyncio.get_running_loop().add_reader(self._fd, self._drain)

    def stop(self) -> None:
        """Close it."""
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def add(self, uid: str, path: str) -> None:
        """Watch the control directory `path` of a pod, which need not exist yet."""
        if self._fd >= 0 and uid not in self._targets:
            self._targets[uid] = path
            self._settle(uid)

    def remove(self, uid: str) -> None:
        """Stop watching a pod."""
        if self._targets.pop(uid, None) is not None:
            self._leave(uid)

    def settled(self, uid: str) -> bool:
        """Whether the watch is on the control directory itself."""
        return uid in self._deep

    def refresh(self) -> None:
        """Try again for every pod (after an overflow, or when a watch could not be had)."""
        for uid in list(self._targets):
            self._settle(uid)

    def _settle(self, uid: str) -> None:
        """Hang the pod's watch on the deepest directory there is on the way to its control volume."""
        target = self._targets[uid]
        for _ in range(32):
            path = target
            while (wd := self._watch(path)) < 0 and path != "/":
                path = os.path.dirname(path)
            if wd < 0:
                self._leave(uid)
                return
            if self._place.get(uid) != wd:
                self._leave(uid)
                self._place[uid] = wd
                self._users.setdefault(wd, set()).add(uid)
            if path == target:
                self._deep.add(uid)
                return
            # The next component may have been made between the failed and the successful watch: then nobody told us.
            child = os.path.join(path, os.path.relpath(target, path).split(os.sep)[0])
            if not os.path.isdir(child) or os.path.islink(child):
                return

    def _watch(self, path: str) -> int:
        return int(libc.inotify_add_watch(self._fd, os.fsencode(path), MASK))

    def _leave(self, uid: str) -> None:
        self._deep.discard(uid)
        wd = self._place.pop(uid, None)
        if wd is None:
            return
        users = self._users.get(wd, set())
        users.discard(uid)
        if not users:
            self._users.pop(wd, None)
            libc.inotify_rm_watch(self._fd, wd)

    def _drain(self) -> None:
        try:
            data = os.read(self._fd, _READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        touched: set[str] = set()
        moved: set[str] = set()
        offset = 0
        while offset + _EVENT.size <= len(data):
            wd, mask, _, length = _EVENT.unpack_from(data, offset)
            name = data[offset + _EVENT.size : offset + _EVENT.size + length].rstrip(b"\0")
            offset += _EVENT.size + length
            if mask & IN_Q_OVERFLOW:
                touched.update(self._targets)
                moved.update(self._targets)
                continue
            users = self._users.get(wd, set())
            if mask & IN_IGNORED:
                # The kernel dropped the watch (directory gone): its number must not be removed again, it may be given out anew.
                for uid in users:
                    self._place.pop(uid, None)
                    self._deep.discard(uid)
                self._users.pop(wd, None)
                moved |= users
            if mask & (IN_CREATE | IN_MOVED_TO | IN_DELETE_SELF | IN_MOVE_SELF):
                moved |= users - self._deep
            if mask & (IN_DELETE_SELF | IN_MOVE_SELF):
                moved |= users
            if not name.startswith(b"."):  # temporary files of the protocol
                touched |= users & self._deep
        for uid in moved & self._targets.keys():
            before = self._place.get(uid)
            self._settle(uid)
            if self._place.get(uid) != before:
                touched.add(uid)
        for uid in touched & self._targets.keys():
            self._wake(uid)
