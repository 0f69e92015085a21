"""Real disks that run full at any page of an artifact, turn read-only, or lose files: nothing half-written stays, what is there is told."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.disks import PAGE, Disk, on_a_disk
from tests.unit.test_agent_staging import copy
from tests.unit.test_agent_store import manifest
from vllmsnapshot.agent import doctor
from vllmsnapshot.agent.capture import check_room
from vllmsnapshot.agent.errors import StoreError, disk_reason
from vllmsnapshot.agent.ledger import Ledger
from vllmsnapshot.agent.store import MANIFEST, VERIFIED, Store
from vllmsnapshot.api.constants import Reason

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

ROOM = 8 << 20


def workload(root: Path) -> Path:
    """Files as a capture copies them: of several sizes, with holes, two names of one, links, in directories."""
    rng = random.Random(1)
    (root / "deep/er").mkdir(parents=True)
    for i, size in enumerate((0, 1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE + 3)):
        (root / f"file{i}").write_bytes(rng.randbytes(size))
    with (root / "deep/sparse").open("wb") as f:
        f.write(b"head")
        f.seek(64 * PAGE)
        f.write(b"tail")
    os.link(root / "file5", root / "deep/er/same")
    (root / "deep/link").symlink_to("sparse")
    return root


def write(store: Store, source: Path, content: str = "c1") -> None:
    """As `capture.capture` does it, with pages where CRIU would write them. Raises StoreError."""
    try:
        with store.draft(content) as draft, store.work_dir():
            os.close(draft.directory("images"))
            with (draft.path / "images/pages-1.img").open("wb", buffering=0) as f:
                # A disk takes what it can: the writer sees a short count first, and the error with the next byte.
                left = memoryview(bytes(range(256)) * (12 * PAGE // 256))
                while left:
                    left = left[f.write(left) or 0 :]
            os.close(draft.directory("scratch"))
            copy(source, draft.path / "scratch")
            made = manifest(draft, content)
            check_room(store, made.disk_bytes)
            draft.publish(made)
    except OSError as e:
        raise StoreError(disk_reason(e), str(e)) from e


def test_a_disk_that_is_full_at_any_page_of_an_artifact(tmp_path: Path) -> None:
    source = workload(tmp_path / "source")

    def every(disk: Disk) -> int:
        store = Store(disk.path, min_free=0)
        store.recover()
        write(store, source, "old")
        empty = disk.used()
        write(store, source)
        needed = disk.used()
        store.delete("c1")
        cases = 0
        for size in range(empty, needed, PAGE):
            disk.resize(size)
            with pytest.raises(StoreError) as error:
                write(store, source)
            assert error.value.reason == Reason.INSUFFICIENT_DISK, size
            assert store.names() == ["old"]
            assert list(store.tmp_dir.iterdir()) == []
            assert disk.used() == empty, "no page is lost"
            cases += 1
        with store.open("old") as artifact:
            assert artifact.verify(full=True) == len(artifact.manifest.files)
        disk.resize(needed)
        write(store, source)
        with store.open("c1") as artifact:
            artifact.verify(full=True)
        return cases

    cases = on_a_disk(tmp_path / "disk", ROOM, every)
    print(f"{cases} sizes")
    assert cases > 20


def test_a_disk_that_is_full_at_any_page_of_the_ledger(tmp_path: Path) -> None:
    def every(disk: Disk) -> None:
        ledger = Ledger(str(disk.path / "ledger"))
        ledger.load()
        ledger.quarantine("c1", "u", Reason.CANARY_MISMATCH, "x" * 900)
        for pages in range(1, 4):
            disk.resize(disk.used() + pages * PAGE)
            for n in range(20):
                try:
                    ledger.capture_failed(f"f{n}", "u", Reason.DUMP_FAILED, "y" * 900)
                except OSError as e:
                    assert e.errno == errno.ENOSPC  # noqa: PT017
            assert not [x for x in os.listdir(ledger.directory) if not x.endswith(".json")], "nothing piles up"
            again = Ledger(ledger.directory)
            again.load()
            found = again.entry("c1", "u").quarantined
            assert found is not None, "what was written stays"
            assert found.reason == Reason.CANARY_MISMATCH
        disk.resize(ROOM)
        ledger.save()
        last = Ledger(ledger.directory)
        last.load()
        assert all(last.entry(f"f{n}", "u").capture_failed is not None for n in range(20)), "memory had it"

    on_a_disk(tmp_path / "disk", ROOM, every)


def test_a_store_that_turned_read_only(tmp_path: Path) -> None:
    """What is there can be read and proven; nothing can be written, and the node says so."""
    source = workload(tmp_path / "source")

    def broken(disk: Disk) -> None:
        store = Store(disk.path, min_free=0)
        store.recover()
        write(store, source)
        assert doctor.store_writable(disk.path)[0] == "Pass"
        disk.read_only(True)
        status, message, remedy = doctor.store_writable(disk.path)
        assert (status, "Read-only" in message, bool(remedy)) == ("Fail", True, True)
        with store.open("c1") as artifact:
            assert artifact.verify(full=True)
        assert store.usage().artifacts.keys() == {"c1"}
        for attempt in (lambda: write(store, source, "c2"), lambda: store.delete("c1"), lambda: Store(disk.path).recover()):
            with pytest.raises(StoreError) as error:
                attempt()
            assert error.value.reason == Reason.STORE_FAILED
        assert store.sweep() == 0
        assert store.names() == ["c1"]
        disk.read_only(False)
        write(store, source, "c2")
        assert store.names() == ["c1", "c2"]

    on_a_disk(tmp_path / "disk", ROOM, broken)


def test_room_is_asked_of_the_disk_itself(tmp_path: Path) -> None:
    source = workload(tmp_path / "source")

    def measured(disk: Disk) -> None:
        store = Store(disk.path, quota=6 << 20, min_free=1 << 20)
        store.recover()
        assert store.usage().room() == pytest.approx(6 << 20, abs=16 * PAGE)
        write(store, source)
        usage = store.usage()
        assert usage.room() == usage.quota - usage.used  # type: ignore[operator]
        disk.resize(3 << 20)
        usage = store.usage()
        assert usage.room() == usage.free - (1 << 20) < (2 << 20)
        with store.draft("c2") as draft:
            (draft.path / "half").write_bytes(b"x" * 50 * PAGE)
            assert store.usage().writing == 50 * PAGE
            assert store.usage().room(60 * PAGE) == pytest.approx(usage.room() - 60 * PAGE, abs=2 * PAGE), "not counted twice"
        with pytest.raises(StoreError, match="must stay"):
            check_room(store, 3 << 20)

    on_a_disk(tmp_path / "disk", ROOM, measured)


def lost(path: Path) -> None:
    path.unlink()


def torn(path: Path) -> None:
    os.truncate(path, max(0, path.stat().st_size - 1))


def longer(path: Path) -> None:
    with path.open("ab") as f:
        f.write(b"x")


def changed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [lost, torn, longer, changed])
def test_any_file_of_an_artifact_may_be_lost_or_torn(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Found before anything is restored, whichever file it is."""
    source, cases = workload(tmp_path / "source"), 0
    store = Store(tmp_path / "store")
    store.recover()
    write(store, source, "c0")
    base = store.artifacts_dir / "c0"
    names = sorted(str(p.relative_to(base)) for p in base.rglob("*") if p.is_file() and not p.is_symlink())
    assert {MANIFEST, VERIFIED, "images/pages-1.img", "scratch/deep/sparse"} <= set(names)
    for n, name in enumerate(names, start=1):
        content = f"c{n}"
        write(store, source, content)
        path, digest = store.artifacts_dir / content / name, store.manifest(content).digest
        if name == VERIFIED or (damage in (torn, changed) and not path.stat().st_size):
            continue  # without the note of what was verified, all of it is again
        damage(path)
        cases += 1
        if (name, damage) == (MANIFEST, changed):
            # It may still be a manifest. Then its own digest is not that of the content's status, with which it is compared.
            with contextlib.suppress(StoreError):
                assert store.manifest(content).digest != digest
            continue
        with pytest.raises(StoreError) as error, store.open(content) as artifact:
            artifact.verify()
        assert error.value.reason == Reason.ARTIFACT_CORRUPT, name
    assert cases > 5
