"""Copies across the trust boundary: what travels, what does not, and what is never followed."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vllmsnapshot.agent import staging
from vllmsnapshot.agent.containers import Mount
from vllmsnapshot.agent.staging import Copy, StagingError


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def copy(source: Path, target: Path, work: Copy | None = None) -> Copy:
    work = work or Copy()
    with opened(source) as a, opened(target) as b:
        work.tree(a, b)
    return work


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return tmp_path / "a", tmp_path / "b"


def test_files_directories_and_links_keep_content_mode_and_time(trees: tuple[Path, Path]) -> None:
    a, b = trees
    (a / "dir/inner").mkdir(parents=True, mode=0o755)
    (a / "dir").chmod(0o711)
    (a / "dir/inner/file").write_bytes(b"content")
    (a / "dir/inner/file").chmod(0o4755)
    os.utime(a / "dir/inner/file", ns=(1, 1_234_567_890_123_456_789))
    (a / "link").symlink_to("/etc/passwd")
    copy(a, b)
    info = (b / "dir/inner/file").stat()
    assert (b / "dir/inner/file").read_bytes() == b"content"
    assert stat.S_IMODE(info.st_mode) == 0o4755
    assert info.st_mtime_ns == 1_234_567_890_123_456_789
    assert stat.S_IMODE((b / "dir").stat().st_mode) == 0o711
    assert os.readlink(b / "link") == "/etc/passwd"


def test_holes_stay_holes(trees: tuple[Path, Path]) -> None:
    a, b = trees
    with (a / "sparse").open("wb") as f:
        f.truncate(1 << 30)
        f.seek(512 << 20)
        f.write(b"x" * 4096)
    work = copy(a, b)
    assert (b / "sparse").stat().st_size == 1 << 30
    assert (b / "sparse").stat().st_blocks * 512 <= 1 << 20
    assert work.bytes <= 1 << 20
    with (b / "sparse").open("rb") as f:
        f.seek(512 << 20)
        assert f.read(4097) == b"x" * 4096 + b"\0"


def test_two_names_of_one_file_stay_one_file(trees: tuple[Path, Path]) -> None:
    """A semaphore has two names while CRIU dumps: two files would be two semaphores."""
    a, b = trees
    (a / "link_remap.7").write_bytes(b"sem")
    (a / "x").mkdir()
    os.link(a / "link_remap.7", a / "x/sem.mp-1")
    work = copy(a, b)
    assert (b / "link_remap.7").stat().st_ino == (b / "x/sem.mp-1").stat().st_ino
    assert list(work.criu_files) == ["link_remap.7"]


def test_what_would_act_on_opening_is_left_out(trees: tuple[Path, Path]) -> None:
    a, b = trees
    os.mkfifo(a / "fifo")
    import socket

    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(a / "socket"))
        copy(a, b)
    assert os.listdir(b) == []


def test_a_link_in_the_way_is_replaced_not_followed(trees: tuple[Path, Path], tmp_path: Path) -> None:
    """A workload that expects the restore cannot have it write somewhere else."""
    a, b = trees
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("mine")
    (a / "dir").mkdir()
    (a / "dir/file").write_text("theirs")
    (a / "file").write_text("theirs")
    (b / "dir").symlink_to(victim)
    (b / "file").symlink_to(victim / "file")
    copy(a, b)
    assert (victim / "file").read_text() == "mine"
    assert (b / "dir/file").read_text() == "theirs"
    assert not (b / "dir").is_symlink()


def test_existing_directories_are_kept_and_files_replaced(trees: tuple[Path, Path]) -> None:
    a, b = trees
    (a / "dir").mkdir()
    (a / "dir/file").write_text("new")
    (b / "dir").mkdir()
    (b / "dir/file").write_text("a longer old one")
    (b / "dir/other").write_text("stays")
    copy(a, b)
    assert (b / "dir/file").read_text() == "new"
    assert (b / "dir/other").read_text() == "stays"


def test_skipped_paths_and_names(trees: tuple[Path, Path]) -> None:
    a, b = trees
    for name in ("etc/hosts", "etc/other", "x/__pycache__/m.pyc", "tmp/file"):
        (a / name).parent.mkdir(parents=True, exist_ok=True)
        (a / name).write_text(name)
    copy(a, b, Copy(skip={"etc/hosts", "tmp"}, skip_names={"__pycache__"}))
    assert sorted(str(p.relative_to(b)) for p in b.rglob("*") if p.is_file()) == ["etc/other"]


def test_limits_of_bytes_depth_and_time(trees: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = trees
    (a / "file").write_bytes(b"x" * 10_000)
    with pytest.raises(StagingError, match="more than 5000 bytes"):
        copy(a, b, Copy(max_bytes=5000))
    with pytest.raises(StagingError, match="time is up"):
        copy(a, b, Copy(deadline=time.monotonic() - 1))
    deep = a
    for _ in range(staging.MAX_DEPTH + 1):
        deep = deep / "d"
    deep.mkdir(parents=True)
    with pytest.raises(StagingError, match="deeper"):
        copy(a, b)
    with opened(a) as fd, pytest.raises(StagingError, match="deeper"):
        staging.measure(fd)
    monkeypatch.setattr(staging, "MAX_ENTRIES", 0)
    with pytest.raises(StagingError, match="files"):
        copy(a, b)


def test_measure_counts_what_is_on_disk(trees: tuple[Path, Path]) -> None:
    a, _ = trees
    with (a / "sparse").open("wb") as f:
        f.truncate(1 << 30)
    (a / "dir").mkdir()
    (a / "dir/file").write_bytes(b"x" * 100_000)
    (a / "dir/deleted.cr.1a.ghost").write_bytes(b"")
    with opened(a) as fd:
        size = staging.measure(fd)
        skipped = staging.measure(fd, skip={"dir"})
    assert 100_000 <= size.bytes < 200_000
    assert list(size.criu_files) == ["dir/deleted.cr.1a.ghost"]
    assert skipped.bytes == 0


def test_only_crius_own_files_are_removed(trees: tuple[Path, Path], tmp_path: Path) -> None:
    a, _ = trees
    (a / "dir").mkdir()
    for name in ("dir/link_remap.1", "link_remap.2", "link_remap.3"):
        (a / name).write_text("x")
    with opened(a) as fd:
        found = staging.measure(fd).criu_files
        # Meanwhile one becomes another file, one was there before, and one lies behind a link now.
        (a / "other").write_text("y")
        (a / "other").rename(a / "link_remap.2")
        removed = staging.remove_criu_files(fd, found, before={"link_remap.3"})
    assert removed == 1
    assert sorted(os.listdir(a)) == ["dir", "link_remap.2", "link_remap.3"]
    assert os.listdir(a / "dir") == []


def test_what_is_mounted_below() -> None:
    points = ["/", "/tmp", "/tmp/models", "/tmpfs", "/etc/hosts", "/tmp/a/b"]
    mounts = [Mount(point=p, root="/", kind="tmpfs", device="0:1", options={}) for p in points]
    assert staging.mounted_below("/tmp", mounts) == {"models", "a/b"}
    assert staging.mounted_below("/", mounts) == {"tmp", "tmp/models", "tmpfs", "etc/hosts", "tmp/a/b"}
