"""The cache of everything that is built once: content keys, one builder at a time, all-or-nothing publication."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

#: Part of every key: raise it when the layout of cached things changes.
_FORMAT: Final = "1"


def cache_root() -> Path:
    """The cache directory: ``$XDG_CACHE_HOME/vllmsnapshot``, by default under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    root = Path(base).resolve() / "vllmsnapshot"
    # The cluster lays an overlay over /var/lib (see box.py), under which a cache would be hidden from its own daemons.
    if root.is_relative_to("/run") or root.is_relative_to("/var/lib"):
        raise ValueError(f"the cache must not be under /run or /var/lib: {root} (set XDG_CACHE_HOME)")
    return root


def scoped(name: str) -> str:
    """A name for something that is the machine's (a cgroup) and must not be shared by two caches on it."""
    root = cache_root()
    if root == Path.home() / ".cache" / "vllmsnapshot":
        return name
    return f"{name}.{hashlib.sha256(str(root).encode()).hexdigest()[:8]}"


def digest(*parts: str | bytes | Path) -> str:
    """Hash strings, bytes and the *contents* of files and directory trees, unambiguously, to 64 hex digits."""
    total = hashlib.sha256()
    _feed(total, _FORMAT.encode())
    for part in parts:
        if isinstance(part, Path):
            _feed_path(total, part)
        else:
            _feed(total, part.encode() if isinstance(part, str) else part)
    return total.hexdigest()


def _feed(total: hashlib._Hash, data: bytes) -> None:
    # The length in front keeps ("ab", "c") and ("a", "bc") apart.
    total.update(len(data).to_bytes(8, "big"))
    total.update(data)


def _feed_path(total: hashlib._Hash, path: Path) -> None:
    if path.is_symlink():
        _feed(total, b"link")
        _feed(total, os.readlink(path).encode())
    elif path.is_dir():
        _feed(total, b"dir")
        for child in sorted(path.iterdir()):
            # Byte code and editor droppings change without the source changing.
            if child.name == "__pycache__" or child.suffix in {".pyc", ".swp"}:
                continue
            _feed(total, child.name.encode())
            _feed_path(total, child)
    elif path.exists():
        _feed(total, b"exec" if os.access(path, os.X_OK) else b"file")
        _feed(total, path.read_bytes())
    else:
        _feed(total, b"absent")


@contextlib.contextmanager
def lock(name: str, root: Path | None = None, *, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the inter-process lock *name*; a holder that dies, however it dies, gives it up."""
    directory = (root or cache_root()) / "locks"
    directory.mkdir(parents=True, exist_ok=True)
    # Lock files are never deleted: unlinking one would let two processes hold "the same" lock on two inodes.
    with (directory / f"{name}.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is not None:
                on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def publish(
    name: str,
    key: str,
    build: Callable[[Path], None],
    *,
    root: Path | None = None,
    on_wait: Callable[[], None] | None = None,
) -> Path:
    """Return the directory ``NAME-KEY``, made by *build* if it is not there yet.

    *build* fills an empty temporary directory, which becomes visible under its final name by one rename: whoever
    sees the final name sees all of it, and an interrupted build leaves only a temporary that the next one removes.
    """
    base = root or cache_root()
    final = base / f"{name}-{key[:16]}"
    if final.is_dir():
        return final
    base.mkdir(parents=True, exist_ok=True)
    with lock(name, base, on_wait=on_wait):
        if final.is_dir():
            return final
        prefix = f".tmp-{name}-"
        for stale in base.glob(f"{prefix}*"):
            # We hold the lock, so whoever wrote this is gone.
            shutil.rmtree(stale)
        # With the PID, so that a command which outlives a killed builder writes to a place that is nobody's.
        temporary = base / f"{prefix}{key[:16]}-{os.getpid()}"
        temporary.mkdir()
        try:
            build(temporary)
            temporary.rename(final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return final


def write_atomic(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Replace the file *path* by *text* so that a reader never sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w") as handle:
        os.fchmod(handle.fileno(), mode)
        handle.write(text)
    temporary.replace(path)
