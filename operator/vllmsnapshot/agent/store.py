"""The artifacts of this node.

    root/artifacts/<content>/{images,shm,scratch,upper}/...   the files
                             manifest.json                    what they are; written last
                             verified.json                    which files were digested since the node booted
    root/tmp/<name>                                           being written, or being deleted
    root/agent/                                               not ours: the agent's ledger

An artifact appears by rename, when every byte of it is on disk: present means complete. It disappears by rename too.
A reader holds a shared lock on the directory, a deletion needs it exclusively, so nothing is deleted under a restore.
Everything is root's alone: the files are memory of somebody's process, and may hold set-id programs a workload made.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from ..api.constants import Reason
from .errors import StoreError, disk_reason
from .identity import FileFact
from .space import Usage

log = logging.getLogger(__name__)

MANIFEST: Final = "manifest.json"
VERIFIED: Final = "verified.json"
MANIFEST_VERSION: Final = 1
MAX_MANIFEST_BYTES: Final = 256 << 20
CHUNK: Final = 64 << 20
"""A file's digest is the sha256 of the sha256 of each piece of this size, so that one large file uses every core."""

MIN_FREE: Final = 256 << 20
"""Bytes to leave free beside the artifacts, where nobody says otherwise: a full disk evicts pods."""

_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A regular file of an artifact."""

    size: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What an artifact holds and what a restore needs to know. JSON with these keys, sorted."""

    content: str
    captured_at: str
    root_pid: int
    """Root of the tree, in the PID namespace of the container."""
    pids: list[int]
    stdio: dict[str, int]
    """What the image calls `pipe:[123]`, and which descriptor (1 or 2) of the container's PID 1 takes its place."""
    staged: dict[str, str]
    """Name in the artifact → path in the container."""
    memory_bytes: int
    """What a restored tree takes at once: pages of the image and files in /dev/shm."""
    disk_bytes: int
    """What all files take on disk."""
    environment: dict[str, str]
    mapped: list[FileFact]
    files: dict[str, StoredFile]
    phases: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    """What the caller wants to find again."""
    version: int = MANIFEST_VERSION
    digest: str = field(default="", compare=False)
    """sha256 of the file; not in it."""

    def to_json(self) -> bytes:
        """As the file's bytes: the same value gives the same bytes."""
        value = asdict(self)
        del value["digest"]
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

    def _check(self) -> None:
        """Raises ValueError for a field of the wrong kind: one damaged manifest must not keep the others from being read."""

        def count(value: object) -> bool:
            return type(value) is int and 0 <= value < 1 << 63

        def strings(value: object) -> bool:
            items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            return isinstance(items, list) and all(isinstance(x, str) for x in items)

        fine = {
            "content": isinstance(self.content, str) and isinstance(self.captured_at, str),
            "pids": isinstance(self.pids, list) and all(count(x) and x for x in self.pids) and self.root_pid in self.pids,
            "root_pid": count(self.root_pid),
            "stdio": isinstance(self.stdio, dict) and all(count(x) for x in self.stdio.values()),
            "staged": isinstance(self.staged, dict) and strings(self.staged),
            "bytes": count(self.memory_bytes) and count(self.disk_bytes),
            "environment": isinstance(self.environment, dict) and strings(self.environment),
            "files": all(count(x.size) and isinstance(x.digest, str) for x in self.files.values()),
            "mapped": all(isinstance(x.path, str) and count(x.size) and type(x.mtime_ns) is int for x in self.mapped),
            "phases": isinstance(self.phases, dict)
            and all(type(x) in (int, float) and abs(x) < 1e9 for x in self.phases.values()),  # not a NaN
            "extra": isinstance(self.extra, dict),
        }
        wrong = [name for name, ok in fine.items() if not ok]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} of the wrong kind")

    @classmethod
    def from_json(cls, raw: bytes) -> Manifest:
        """Raises StoreError(ARTIFACT_CORRUPT) for anything that is not a manifest of this version."""
        try:
            value = json.loads(raw)
            if value.get("version") != MANIFEST_VERSION:
                raise ValueError(f"version {value.get('version')} instead of {MANIFEST_VERSION}")
            known = {f.name for f in fields(cls)} - {"digest"}
            value = {k: v for k, v in value.items() if k in known}
            value["files"] = {str(k): StoredFile(**v) for k, v in value["files"].items()}
            value["mapped"] = [FileFact(**v) for v in value["mapped"]]
            made = cls(**value, digest=f"sha256:{hashlib.sha256(raw).hexdigest()}")
            made._check()
            return made
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise StoreError(Reason.ARTIFACT_CORRUPT, f"the manifest cannot be read: {e}") from e


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Everything that is in the store, seen in one pass over the manifests."""

    manifests: Sequence[Manifest]
    """Of all readable artifacts, by content name."""
    unreadable: Mapping[str, StoreError]
    """By content: why the manifest of an artifact that takes room cannot be read."""
    usage: Usage


class Store:
    """The directory tree. Usable from several threads; from one process at a time."""

    def __init__(self, root: Path, *, quota: int | None = None, min_free: int = MIN_FREE) -> None:
        """`root` need not exist yet. `quota` and `min_free`: see `space.Usage`, which has them; nothing is refused here."""
        self.root = root
        self.quota, self.min_free = quota, min_free
        self.artifacts_dir = root / "artifacts"
        self.tmp_dir = root / "tmp"
        self._writing: set[str] = set()  # names in tmp that are in use

    def recover(self) -> None:
        """Make the directories and remove what an earlier agent left half-written or half-deleted. Raises StoreError."""
        try:
            for directory in (self.root, self.artifacts_dir, self.tmp_dir):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for directory in (self.artifacts_dir, self.tmp_dir):
                directory.chmod(0o700)
            for item in self.tmp_dir.iterdir():
                log.info("removing %s, left by an earlier agent", item)
                _remove_tree(item)
        except OSError as e:
            raise StoreError(Reason.STORE_FAILED, f"the store {self.root} cannot be used: {e}") from e

    def sweep(self) -> int:
        """Remove what a failed removal has left in tmp; returns how much of it there was. Nothing that is being written."""
        with contextlib.suppress(OSError):
            # Listed first: what is made after that is not among it.
            left = [item for item in self.tmp_dir.iterdir() if item.name not in self._writing]
            for item in left:
                _remove_tree(item)
            return len(left)
        return 0

    @contextlib.contextmanager
    def _in_use(self, path: Path) -> Iterator[None]:
        self._writing.add(path.name)
        try:
            yield
        finally:
            self._writing.discard(path.name)

    def usage(self) -> Usage:
        """What the store takes, and what there is. Raises StoreError."""
        return self.read().usage

    def read(self) -> Reading:
        """Read every manifest, once. Raises StoreError if the file system cannot be asked; a bad artifact is in the answer."""
        try:
            space = os.statvfs(self.root)
        except OSError as e:
            raise StoreError(Reason.STORE_FAILED, f"the store {self.root} cannot be read: {e}") from e
        found: list[Manifest] = []
        unreadable: dict[str, StoreError] = {}
        sizes: dict[str, int] = {}
        for name in self.names():
            try:
                manifest = self.manifest(name)
            except StoreError as e:
                unreadable[name] = e
                sizes[name] = _disk_bytes(self.artifacts_dir / name)  # it takes room all the same
            else:
                found.append(manifest)
                sizes[name] = manifest.disk_bytes
        usage = Usage(
            artifacts=sizes,
            writing=sum(_disk_bytes(self.tmp_dir / name) for name in list(self._writing)),
            free=space.f_bavail * space.f_frsize,
            quota=self.quota,
            min_free=self.min_free,
        )
        return Reading(manifests=found, unreadable=unreadable, usage=usage)

    def names(self) -> list[str]:
        """Contents that have a directory here, readable or not."""
        with contextlib.suppress(OSError):
            return sorted(name for name in os.listdir(self.artifacts_dir) if _NAME.fullmatch(name))
        return []

    def manifest(self, content: str) -> Manifest:
        """Of one artifact. Raises StoreError(ARTIFACT_MISSING, ARTIFACT_CORRUPT)."""
        with self.open(content) as artifact:
            return artifact.manifest

    def open(self, content: str) -> Artifact:
        """The artifact, safe from deletion until closed. Raises StoreError(ARTIFACT_MISSING, ARTIFACT_CORRUPT)."""
        path = self._path(content)
        while True:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                raise StoreError(Reason.ARTIFACT_MISSING, f"this node has no artifact of {content}") from None
            except OSError as e:
                raise StoreError(_read_reason(e), f"the artifact of {content} cannot be opened: {e}") from e
            try:
                fcntl.flock(fd, fcntl.LOCK_SH)
                # Deleted, and perhaps captured anew, before we had the lock?
                if _same(path, fd):
                    return Artifact(content, fd)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def delete(self, content: str, *, timeout_s: float = 60.0) -> bool:
        """Delete the artifact; False if there is none. Waits for its readers, at most so long. Raises StoreError."""
        path = self._path(content)
        deadline = time.monotonic() + timeout_s
        trash = self.tmp_dir / f"deleted-{content}-{secrets.token_hex(4)}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        with self._in_use(trash):
            if not self._discard(content, path, fd, trash, deadline):
                return False
            _remove_tree(trash)
        return True

    def _discard(self, content: str, path: Path, fd: int, trash: Path, deadline: float) -> bool:
        """Take the artifact's name away as soon as nobody reads it. Closes `fd`. Raises StoreError."""
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise StoreError(Reason.STORE_FAILED, f"the artifact of {content} is being read by a restore") from None
                    time.sleep(0.05)
            if not _same(path, fd):
                return False
            path.rename(trash)
            _sync(self.artifacts_dir)
        except OSError as e:
            raise StoreError(Reason.STORE_FAILED, f"the artifact of {content} cannot be deleted: {e}") from e
        finally:
            os.close(fd)
        return True

    @contextlib.contextmanager
    def draft(self, content: str) -> Iterator[Draft]:
        """A new artifact to be written; removed at the end unless published. Raises StoreError."""
        self._path(content)
        path = self.tmp_dir / f"{content}-{secrets.token_hex(4)}"
        with self._in_use(path):
            self._make(path)
            draft = Draft(self, content, path)
            try:
                yield draft
            finally:
                if not draft.published:
                    _remove_tree(path)

    @contextlib.contextmanager
    def work_dir(self) -> Iterator[int]:
        """A directory for CRIU's by-products. Raises StoreError."""
        path = self.tmp_dir / f"work-{secrets.token_hex(4)}"
        with self._in_use(path):
            self._make(path)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    yield fd
                finally:
                    os.close(fd)
            finally:
                _remove_tree(path)

    def _make(self, path: Path) -> None:
        try:
            path.mkdir(mode=0o700)
        except OSError as e:
            raise StoreError(disk_reason(e), f"the store {self.root} cannot be written: {e}") from e

    def _path(self, content: str) -> Path:
        if not _NAME.fullmatch(content):
            raise StoreError(Reason.STORE_FAILED, f"{content!r} is no name of a content")
        return self.artifacts_dir / content


class Draft:
    """An artifact being written."""

    def __init__(self, store: Store, content: str, path: Path) -> None:
        """Made by Store.draft."""
        self._store, self._content = store, content
        self.path = path
        self.published = False

    def directory(self, name: str) -> int:
        """Make a directory of the artifact; the caller closes the descriptor."""
        (self.path / name).mkdir(mode=0o700)
        return os.open(self.path / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def digest(self) -> tuple[dict[str, StoredFile], int]:
        """Every file's size and digest, and the bytes on disk in all."""
        names = sorted(_walk(self.path))
        # The captured server reloads at this moment and wants every core.
        with _pool(background=True) as pool:
            digests = digest_files(self.path, names, pool)
            files = {n: StoredFile(size=(self.path / n).lstat().st_size, digest=digests[n]) for n in names}
        return files, sum((self.path / n).lstat().st_blocks * 512 for n in names)

    def publish(self, manifest: Manifest) -> Manifest:
        """Write the manifest, put everything on disk, and give the artifact its name. Raises StoreError; nothing is visible then.

        The digests of the manifest count as verified: they were taken from these very bytes, in this boot.
        """
        raw = manifest.to_json()
        target = self._store._path(self._content)
        try:
            _write(self.path / MANIFEST, raw)
            _write_verified(self.path, {n: _stamp((self.path / n).lstat()) for n in manifest.files})
            directories = [self.path]
            files = []
            for top, names, leaves in os.walk(self.path):
                directories += [Path(top) / n for n in names if not (Path(top) / n).is_symlink()]
                files += [Path(top) / n for n in leaves]
            with _pool() as pool:
                list(pool.map(_sync, files))
            # From the leaves up: a directory's entry is worth nothing before what it names.
            for directory in reversed(directories):
                _sync(directory)
            if target.exists():
                # A capture of the same content that was thought lost; the newer one counts.
                self._store.delete(self._content)
            self.path.rename(target)
            self.published = True
            _sync(self._store.artifacts_dir)
        except OSError as e:
            raise StoreError(disk_reason(e), f"the artifact of {self._content} cannot be written: {e}") from e
        return Manifest.from_json(raw)


class Artifact:
    """A published artifact, locked against deletion until closed."""

    def __init__(self, content: str, fd: int) -> None:
        """Takes `fd` over. Raises StoreError(ARTIFACT_CORRUPT)."""
        self.content = content
        self.fd = fd
        try:
            raw_fd = os.open(MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            with open(raw_fd, "rb") as f:
                raw = f.read(MAX_MANIFEST_BYTES + 1)
        except OSError as e:
            raise StoreError(_read_reason(e), f"the manifest of {content} cannot be read: {e}") from e
        self.manifest = Manifest.from_json(raw)
        if self.manifest.content != content:
            raise StoreError(Reason.ARTIFACT_CORRUPT, f"the manifest of {content} is that of {self.manifest.content}")

    def __enter__(self) -> Artifact:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unlock."""
        os.close(self.fd)

    def directory(self, name: str) -> int:
        """A directory of the artifact; the caller closes the descriptor. Raises StoreError(ARTIFACT_CORRUPT)."""
        try:
            return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
        except OSError as e:
            raise StoreError(_read_reason(e), f"{self.content}: directory {name} cannot be opened: {e.strerror}") from e

    def verify(self, *, full: bool = False, background: bool = False) -> int:
        """Check that every file is there, has its size, and, unless that was done since the node booted, its digest.

        `full` digests what was digested before as well; `background` yields the processor to others.

        Returns how many files were digested. Raises StoreError(ARTIFACT_CORRUPT) that names the first bad file. CRIU itself
        would spin for ever on a short file, and would restore changed pages without a word.
        """
        stamps: dict[str, list[int]] = {}
        for name, wanted in self.manifest.files.items():
            try:
                info = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
            except OSError as e:
                raise StoreError(_read_reason(e), f"{self.content}: {name}: {e.strerror}") from e
            if not stat.S_ISREG(info.st_mode) or info.st_size != wanted.size:
                raise StoreError(
                    Reason.ARTIFACT_CORRUPT, f"{self.content}: {name} has {info.st_size} bytes instead of {wanted.size}"
                )
            stamps[name] = _stamp(info)
        known = {} if full else self._verified()
        doubtful = [name for name, stamp in stamps.items() if known.get(name) != stamp]
        if not doubtful:
            return 0
        base = Path(f"/proc/self/fd/{self.fd}")
        with _pool(background=background) as pool:
            try:
                digests = digest_files(base, doubtful, pool)
            except OSError as e:
                raise StoreError(_read_reason(e), f"{self.content}: {e}") from e
        for name in doubtful:
            if digests[name] != self.manifest.files[name].digest:
                raise StoreError(Reason.ARTIFACT_CORRUPT, f"{self.content}: {name} has changed: its digest is {digests[name]}")
        # Only a hint for the next time.
        with contextlib.suppress(OSError):
            _write_verified(base, stamps)
        return len(doubtful)

    def _verified(self) -> Mapping[str, list[int]]:
        try:
            fd = os.open(VERIFIED, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
            with open(fd, "rb") as f:
                value = json.load(f)
            if value["boot_id"] == boot_id():
                return dict(value["files"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return {}


# --- files -----------------------------------------------------------------------------------------------------------

_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)


def _read_reason(error: OSError) -> str:
    """The reason of a file that cannot be read: what the agent is short of says nothing against the artifact."""
    return Reason.STORE_FAILED if error.errno in _SHORT_OF else Reason.ARTIFACT_CORRUPT


def boot_id() -> str:
    """Of the running kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def digest_files(base: Path, names: Iterable[str], pool: concurrent.futures.Executor) -> dict[str, str]:
    """The digest of each file below `base`. Raises OSError."""
    pieces: dict[str, list[concurrent.futures.Future[bytes]]] = {}
    for name in names:
        size = (base / name).lstat().st_size
        pieces[name] = [pool.submit(_digest_piece, base / name, at) for at in range(0, max(size, 1), CHUNK)]
    digests = {}
    for name, parts in pieces.items():
        total = hashlib.sha256()
        for part in parts:
            total.update(part.result())
        digests[name] = total.hexdigest()
    return digests


def _digest_piece(path: Path, at: int) -> bytes:
    digest = hashlib.sha256()
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        end = at + CHUNK
        while at < end:
            data = os.pread(fd, min(4 << 20, end - at), at)
            if not data:
                break
            digest.update(data)
            at += len(data)
    finally:
        os.close(fd)
    return digest.digest()


def _pool(*, background: bool = False) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(
        max_workers=min(8, os.cpu_count() or 1), thread_name_prefix="store", initializer=_yield_to_others if background else None
    )


def _yield_to_others() -> None:
    """Lowest priority, for this thread only: Linux keeps one per thread."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _walk(base: Path) -> Iterator[str]:
    """Relative names of the regular files."""
    for top, _, leaves in os.walk(base):
        for name in leaves:
            path = Path(top) / name
            if stat.S_ISREG(path.lstat().st_mode) and path.parent != base:
                yield str(path.relative_to(base))


def _disk_bytes(base: Path) -> int:
    """Of everything below; what vanishes meanwhile counts as nothing."""
    total = 0
    for top, _, leaves in os.walk(base):
        for name in leaves:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(top, name)).st_blocks * 512
    return total


def _stamp(info: os.stat_result) -> list[int]:
    """Changes with every change of the file: nobody can set ctime."""
    return [info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns]


def _write(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as f:
        f.write(data)


def _write_verified(base: Path, stamps: Mapping[str, list[int]]) -> None:
    tmp = base / f".{VERIFIED}.{secrets.token_hex(4)}"
    _write(tmp, json.dumps({"boot_id": boot_id(), "files": stamps}).encode())
    os.replace(tmp, base / VERIFIED)


def _sync(path: Path) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        if path.is_symlink():
            return  # its directory holds it
        raise
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _same(path: Path, fd: int) -> bool:
    try:
        here, there = path.lstat(), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _remove_tree(path: Path) -> None:
    """Remove as much as can be; the rest is logged and taken up at the next start."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, onerror=lambda _, name, error: log.warning("%s was not removed: %s", name, error[1]))
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
