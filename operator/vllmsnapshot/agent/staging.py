"""Copies of the files that CRIU leaves out: /dev/shm, scratch, and what the workload changed in its root file system.

Both directions cross a trust boundary, so no path of a workload is ever resolved: directories are walked by descriptor, links
are copied and never followed, devices, FIFOs and sockets are left out, and depth, bytes and time are bounded.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from . import namespaces

if TYPE_CHECKING:
    # Imported by `nsrun`, which starts for every dump and restore: what it does not need costs 50 ms there.
    from .containers import Container, Mount

MAX_DEPTH: Final = 100
"""Directories deeper than this are an attack or a mistake; each level costs a descriptor."""

MAX_ENTRIES: Final = 500_000
"""Files and directories in all: more would not be copied in the seconds that a server may stand still."""

CRIU_FILE: Final = re.compile(r"link_remap\.\d+|.*\.cr\.[0-9a-f]+\.ghost")
"""CRIU's names for files whose own name is gone: of one that another name keeps alive (a semaphore, usually) while it dumps and
restores, and of a deleted one while it restores."""

_DIR: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class StagingError(Exception):
    """A copy was given up: too large, too deep, too slow, or the disk is full."""


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A directory that travels with the image: `path` in the container, `name` in the artifact."""

    name: str
    path: str


SHM: Final = Staged(name="shm", path="/dev/shm")  # noqa: S108
SCRATCH: Final = Staged(name="scratch", path="/tmp")  # noqa: S108
UPPER: Final = Staged(name="upper", path="/")
"""Changed files of the root file system (overlay)."""


def mounted_below(path: str, mounts: Iterable[Mount]) -> frozenset[str]:
    """What is mounted below a directory, relative to it. Neither copied out nor written to: /etc/hosts, a model cache in /tmp.

    The device numbers of an overlay do not tell: files of another layer have another one.
    """
    prefix = f"{path.rstrip('/')}/"
    return frozenset(m.point[len(prefix) :] for m in mounts if m.point.startswith(prefix) and m.point != prefix)


@dataclass(kw_only=True)
class Copy:
    """One copy of a tree: its limits, what it met, and the hard links it must keep.

    `skip` holds relative paths of the source that are left out with everything below them. `deadline` counts in time.monotonic().
    """

    max_bytes: int | None = None
    deadline: float | None = None
    skip: Collection[str] = ()
    skip_names: Collection[str] = ()
    bytes: int = 0
    entries: int = 0
    criu_files: dict[str, tuple[int, int]] = field(default_factory=dict)
    """CRIU's files met in the source, by relative path: device and inode."""
    _linked: dict[tuple[int, int], str] = field(default_factory=dict)

    def tree(self, source: int, target: int) -> None:
        """Copy what is in directory `source` into directory `target` (both descriptors).

        Existing files of the target are replaced, existing directories kept. Owner, mode and modification time are kept, and so
        are holes and hard links. Raises StagingError, or OSError where source or target fail.
        """
        self._linked.clear()
        self._directory(source, target, target, "", 0)

    def _directory(self, source: int, target: int, top: int, at: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise StagingError(f"{at} is nested deeper than {MAX_DEPTH} directories")
        for name in sorted(os.listdir(source)):
            where = f"{at}{name}"
            if where in self.skip or name in self.skip_names:
                continue
            self._check()
            try:
                info = os.stat(name, dir_fd=source, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(info.st_mode):
                self._file(source, target, top, name, where)
            elif stat.S_ISDIR(info.st_mode):
                self._subdirectory(source, target, top, name, where, depth)
            elif stat.S_ISLNK(info.st_mode):
                link = os.readlink(name, dir_fd=source)
                _remove(name, target)
                os.symlink(link, name, dir_fd=target)
                os.chown(name, info.st_uid, info.st_gid, dir_fd=target, follow_symlinks=False)

    def _check(self) -> None:
        self.entries += 1
        if self.entries > MAX_ENTRIES:
            raise StagingError(f"more than {MAX_ENTRIES} files")
        if self.max_bytes is not None and self.bytes > self.max_bytes:
            raise StagingError(f"more than {self.max_bytes} bytes")
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise StagingError("the time is up")

    def _subdirectory(self, source: int, target: int, top: int, name: str, where: str, depth: int) -> None:
        try:
            inner = os.open(name, _DIR, dir_fd=source)
        except FileNotFoundError:
            return
        try:
            info = os.fstat(inner)
            try:
                os.mkdir(name, 0o700, dir_fd=target)
            except FileExistsError:
                if not stat.S_ISDIR(os.stat(name, dir_fd=target, follow_symlinks=False).st_mode):
                    _remove(name, target)
                    os.mkdir(name, 0o700, dir_fd=target)
            outer = os.open(name, _DIR, dir_fd=target)
            try:
                self._directory(inner, outer, top, f"{where}/", depth + 1)
                _attributes(outer, info)
            finally:
                os.close(outer)
        finally:
            os.close(inner)

    def _file(self, source: int, target: int, top: int, name: str, where: str) -> None:
        try:
            # O_NONBLOCK: a FIFO put in the file's place would hang the open.
            inner = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=source)
        except FileNotFoundError:
            return
        except OSError as e:
            if e.errno in (errno.ELOOP, errno.ENXIO):
                return
            raise
        try:
            info = os.fstat(inner)
            if not stat.S_ISREG(info.st_mode):
                return
            key = (info.st_dev, info.st_ino)
            if CRIU_FILE.fullmatch(name):
                self.criu_files[where] = key
            _remove(name, target)
            first = self._linked.get(key)
            if first is not None:
                os.link(first, name, src_dir_fd=top, dst_dir_fd=target, follow_symlinks=False)
                return
            outer = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=target)
            try:
                self._data(inner, outer, info.st_size)
                _attributes(outer, info)
            finally:
                os.close(outer)
            if info.st_nlink > 1:
                self._linked[key] = where
        finally:
            os.close(inner)

    def _data(self, source: int, target: int, size: int) -> None:
        """Copy what is no hole."""
        os.truncate(target, size)
        at = 0
        while at < size:
            try:
                start = os.lseek(source, at, os.SEEK_DATA)
            except OSError as e:
                if e.errno == errno.ENXIO:
                    return
                raise
            end = min(size, os.lseek(source, start, os.SEEK_HOLE))
            os.lseek(target, start, os.SEEK_SET)
            while start < end:
                count = os.sendfile(target, source, start, min(end - start, 64 << 20))
                if not count:
                    return  # the file shrank
                start += count
                self.bytes += count
                if self.max_bytes is not None and self.bytes > self.max_bytes:
                    raise StagingError(f"more than {self.max_bytes} bytes")
                if self.deadline is not None and time.monotonic() > self.deadline:
                    raise StagingError("the time is up")
            at = end


def _remove(name: str, target: int) -> None:
    """Make room for a file; a directory in its place must be empty."""
    try:
        os.unlink(name, dir_fd=target)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        os.rmdir(name, dir_fd=target)


def _attributes(target: int, info: os.stat_result) -> None:
    """Owner before mode: chown clears the set-id bits."""
    os.fchown(target, info.st_uid, info.st_gid)
    os.fchmod(target, stat.S_IMODE(info.st_mode))
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a copy would write (bytes on disk, not counting holes), and CRIU's files among them."""

    bytes: int
    criu_files: Mapping[str, tuple[int, int]]


def measure(source: int, *, skip: Collection[str] = (), skip_names: Collection[str] = ()) -> Size:
    """Size up a tree by descriptor, without opening a file. Raises StagingError where `Copy.tree` would."""
    total, count = 0, 0
    theirs: dict[str, tuple[int, int]] = {}

    def walk(directory: int, at: str, depth: int) -> None:
        nonlocal total, count
        if depth > MAX_DEPTH:
            raise StagingError(f"{at} is nested deeper than {MAX_DEPTH} directories")
        with os.scandir(directory) as entries:
            for entry in entries:
                where = f"{at}{entry.name}"
                if where in skip or entry.name in skip_names:
                    continue
                count += 1
                if count > MAX_ENTRIES:
                    raise StagingError(f"more than {MAX_ENTRIES} files")
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    info = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(info.st_mode):
                        total += info.st_blocks * 512
                        if CRIU_FILE.fullmatch(entry.name):
                            theirs[where] = (info.st_dev, info.st_ino)
                    elif stat.S_ISDIR(info.st_mode):
                        inner = os.open(entry.name, _DIR, dir_fd=directory)
                        try:
                            walk(inner, f"{where}/", depth + 1)
                        finally:
                            os.close(inner)

    walk(source, "", 0)
    return Size(bytes=total, criu_files=theirs)


def remove_criu_files(source: int, found: Mapping[str, tuple[int, int]], *, before: Collection[str] = ()) -> int:
    """Remove files that CRIU made, by relative path; returns how many. One that is another file by now is left alone."""
    count = 0
    for where, key in found.items():
        if where in before:
            continue
        *directories, name = where.split("/")
        directory = os.dup(source)
        try:
            for part in directories:
                inner = os.open(part, _DIR, dir_fd=directory)
                os.close(directory)
                directory = inner
            info = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISREG(info.st_mode) and (info.st_dev, info.st_ino) == key:
                os.unlink(name, dir_fd=directory)
                count += 1
        except OSError:
            continue
        finally:
            os.close(directory)
    return count


def sweep(container: Container, staged: Sequence[Staged]) -> None:
    """Remove what an interrupted dump or restore of CRIU left in these directories. Raises OSError if the container is gone."""
    with namespaces.opened(container.open_root()) as root:
        for item in staged:
            with (
                contextlib.suppress(OSError, StagingError),
                namespaces.opened(namespaces.open_in_root(root, item.path, os.O_RDONLY | os.O_DIRECTORY)) as fd,
            ):
                remove_criu_files(fd, measure(fd).criu_files)
