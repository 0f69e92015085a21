"""The points at which a process touches the world, found by hooks and not by a list: requests that write, and files.

API writes are met in `memory_api.Client.request`, through which everything goes that `Kube` does. Files are met by an audit hook
of the interpreter (open for writing, rename, link, unlink, mkdir, rmdir, chmod, truncate, symlink) and by wrappers around fsync,
write and sendfile, which raise no audit event. So code that is written tomorrow is cut as well.

One `Points` belongs to one process. `stop_at` n: it dies before its n-th point. From then on every further point raises too, which
is why clean-up code that a killed process would not run has no effect here either. `lose_at` n: the answer to the n-th point, if it
is an API write, is lost, whether that was committed or refused. `refuse_at` n: the n-th point, if it is a file's, fails with `errno`,
and the process lives. `do_at` n: something else happens just before the n-th point, e.g. the container dies.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


class Stopped(BaseException):
    """The process ends here. Not an Exception: no handler may survive it."""


@dataclass
class Points:
    """See the module's docstring."""

    stop_at: int | None = None
    lose_at: int | None = None
    refuse_at: int | None = None
    errno: int = 28
    for_good: bool = False
    """`refuse_at`: not once, but from then on, until `mend` is called."""
    refused: Callable[[], None] = lambda: None
    """Called when a file operation is refused for the first time."""
    do_at: int | None = None
    do: Callable[[], None] = lambda: None
    spared: Callable[[], bool] = lambda: False
    """Whether nothing is to happen now: what comes after the faults is looked at."""
    dead: bool = False
    died: Callable[[], None] = lambda: None
    names: list[str] = field(default_factory=list)
    hit: str = ""
    """The point that was cut, lost or refused."""

    def meet(self, what: str, *, file: bool = False) -> int:
        """A point is about to happen; its number. Raises Stopped or OSError."""
        if self.dead:
            raise Stopped(what)
        if self.spared():
            return 0
        self.names.append(what)
        number = len(self.names)
        if number == self.do_at:
            self.hit = what
            token = _active.set(None)
            try:
                self.do()
            finally:
                _active.reset(token)
        if number == self.stop_at:
            self.hit = what
            self.die()
            raise Stopped(what)
        if file and self.refuse_at is not None and (number >= self.refuse_at if self.for_good else number == self.refuse_at):
            if not self.hit:
                self.hit = what
                self.refused()
            raise OSError(self.errno, os.strerror(self.errno), what)
        return number

    def loses(self, number: int) -> bool:
        """Whether the answer of this write is lost."""
        if number == self.lose_at:
            self.hit = self.names[number - 1]
            return True
        return False

    def die(self) -> None:
        """Nothing of this process has any effect from now on."""
        self.dead = True
        self.died()

    def mend(self) -> None:
        """The disk works again."""
        self.refuse_at = None


# --- files -----------------------------------------------------------------------------------------------------------

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATHS = {
    "os.chmod": 0,
    "os.link": 1,
    "os.mkdir": 0,
    "os.remove": 0,
    "os.rename": 1,
    "os.rmdir": 0,
    "os.symlink": 1,
    "os.truncate": 0,
}

_active: ContextVar[Points | None] = ContextVar("points", default=None)
"""Whose code runs: tasks and callbacks inherit it from the process that made them."""
_root: str = ""
_busy = False


def _inside(path: object) -> bool:
    """Relative names are relative to a descriptor that the process opened itself."""
    if isinstance(path, int):
        return True
    text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
    return not text.startswith("/") or text.startswith(_root)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    global _busy
    if _busy or (event != "open" and event not in _PATHS):
        return
    active = _active.get()
    if active is None:
        return
    if event == "open":
        path, _, flags = args
        if not (isinstance(flags, int) and flags & _WRITES and not flags & os.O_PATH and _inside(path)):
            return
    else:
        path = args[_PATHS[event]]
        if not _inside(path):
            return
    _busy = True
    try:
        name = os.path.basename(os.fsdecode(path)) if not isinstance(path, int) else f"fd {path}"
        active.meet(f"{event} {name}", file=True)
    finally:
        _busy = False


_installed = False


def _wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        active = _active.get()
        if active is not None and not _busy and _on_disk(args[0]):
            active.meet(f"os.{name}", file=True)
        if name == "fsync":
            # The disk itself is not waited for: what would be lost is decided by `lose_unsynced`.
            info = os.fstat(args[0])
            _synced[_key(info)] = info.st_size
            return None
        return real(*args, **kwargs)

    return call


_synced: dict[tuple[int, int], int] = {}
"""Size of each file (device and inode) when it was synced last."""


def _key(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino


def lose_unsynced(root: str) -> int:
    """The power fails: what was written and not synced is not there, though the name of the file is. Returns how many files.

    (A rename before a sync is what this finds; that directories are synced is not checked here.)
    """
    count = 0
    for top, _, names in os.walk(root):
        for name in names:
            path = os.path.join(top, name)
            info = os.lstat(path)
            if stat.S_ISREG(info.st_mode) and info.st_size and _synced.get(_key(info), 0) != info.st_size:
                os.truncate(path, 0)
                count += 1
    return count


def _on_disk(fd: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith(_root)
    except OSError:
        return False


@contextlib.contextmanager
def patched(root: str) -> Iterator[None]:
    """Have the hooks in place; only files below `root` count."""
    global _installed, _root
    if not _installed:
        sys.addaudithook(_audit)  # for good: there is no way to remove one
        _installed = True
    _root = root
    _synced.clear()
    real = {name: getattr(os, name) for name in ("fsync", "write", "sendfile")}
    for name, function in real.items():
        setattr(os, name, _wrapped(name, function))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


@contextlib.contextmanager
def acting(points: Points | None) -> Iterator[None]:
    """What happens to files in this block is done by the process of these points; None: by nobody who is cut."""
    token = _active.set(points)
    try:
        yield
    finally:
        _active.reset(token)


def actor() -> Points | None:
    """Whose code runs."""
    return _active.get()
