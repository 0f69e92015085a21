"""The store: an artifact is there as a whole or not at all, and a changed byte does not go unnoticed."""

from __future__ import annotations

import errno
import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agentbox import NODE, Box
from vllmsnapshot.agent import store as module
from vllmsnapshot.agent.config import Config
from vllmsnapshot.agent.errors import StoreError
from vllmsnapshot.agent.identity import FileFact
from vllmsnapshot.agent.local import LocalOps
from vllmsnapshot.agent.store import MANIFEST, VERIFIED, Draft, Manifest, Store
from vllmsnapshot.api.constants import Reason


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    made.recover()
    return made


def manifest(draft: Draft, content: str, **changes: Any) -> Manifest:
    files, size = draft.digest()
    made = Manifest(
        content=content,
        captured_at="2026-11-30T00:00:00Z",
        root_pid=1000,
        pids=[1000, 1001],
        stdio={"pipe:[1]": 1},
        staged={"shm": "/dev/shm"},
        memory_bytes=5,
        disk_bytes=size,
        environment={"kernelRelease": "6.1"},
        mapped=[FileFact(path="/lib/a.so", size=1, mtime_ns=2, image=True)],
        files=files,
        extra={"oracle": {"text": " Paris"}},
    )
    return replace(made, **changes)


def put(store: Store, content: str = "c1", data: bytes = b"pages") -> Manifest:
    with store.draft(content) as draft:
        os.close(draft.directory("images"))
        (draft.path / "images/pages-1.img").write_bytes(data)
        (draft.path / "images/empty").write_bytes(b"")
        os.close(draft.directory("shm"))
        (draft.path / "shm/dangling").symlink_to("/nowhere")
        return draft.publish(manifest(draft, content))


def test_published_is_read_back_as_it_was(store: Store) -> None:
    published = put(store)
    with store.open("c1") as artifact:
        assert artifact.manifest == published
        assert artifact.manifest.digest == published.digest
        assert published.digest.startswith("sha256:")
        assert set(published.files) == {"images/pages-1.img", "images/empty"}
        assert artifact.verify() == 0, "taken from these bytes in this boot"
        assert artifact.verify(full=True) == 2
    assert [m.content for m in store.read().manifests] == ["c1"]
    assert store.usage().used == published.disk_bytes > 0
    assert store.usage().free > 0


def test_nothing_appears_before_it_is_complete(store: Store) -> None:
    with store.draft("c1") as draft:
        os.close(draft.directory("images"))
        assert store.read().manifests == []
        assert not draft.published
    assert store.read().manifests == []
    assert list(store.tmp_dir.iterdir()) == []


def test_every_byte_is_synced_before_the_name_appears(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def record(fd: int) -> None:
        assert not (store.artifacts_dir / "c1").exists() or len(synced) >= 7
        synced.append(os.fstat(fd).st_ino)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", record)
    put(store)
    base = store.artifacts_dir / "c1"
    wanted = {p.lstat().st_ino for p in [base, *base.rglob("*")] if not p.is_symlink()} | {store.artifacts_dir.stat().st_ino}
    assert wanted <= set(synced)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, Reason.INSUFFICIENT_DISK),
        (errno.EDQUOT, Reason.INSUFFICIENT_DISK),
        (errno.EIO, Reason.STORE_FAILED),
        (errno.EROFS, Reason.STORE_FAILED),
    ],
)
def test_a_failing_disk_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch, number: int, reason: str) -> None:
    def full(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError) as error:
        put(store)
    assert error.value.reason == reason
    assert store.read().manifests == []
    assert list(store.tmp_dir.iterdir()) == []


def test_leftovers_are_removed_at_the_start_and_the_ledger_is_not(store: Store) -> None:
    put(store)
    (store.tmp_dir / "half").mkdir()
    (store.tmp_dir / "half/file").write_text("x")
    (store.root / "agent").mkdir()
    (store.root / "agent/ledger.json").write_text("{}")
    store.recover()
    assert list(store.tmp_dir.iterdir()) == []
    assert (store.root / "agent/ledger.json").exists()
    assert [m.content for m in store.read().manifests] == ["c1"]


def test_what_could_not_be_removed_is_swept_up_and_nothing_that_is_written(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_remove_tree", lambda _: None)  # the disk refuses
        store.delete("c1")
    (left,) = store.tmp_dir.iterdir()
    with store.draft("c2") as draft, store.work_dir():
        assert store.sweep() == 1
        assert draft.path.exists()
        assert not left.exists()
        assert len(list(store.tmp_dir.iterdir())) == 2
    assert list(store.tmp_dir.iterdir()) == []


def test_a_deletion_under_way_is_not_swept_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that remove the same files warn of what the other was quicker with."""
    put(store)
    remove, swept = module._remove_tree, []

    def removing(path: Path) -> None:
        monkeypatch.setattr(module, "_remove_tree", remove)
        swept.append(store.sweep())
        remove(path)

    monkeypatch.setattr(module, "_remove_tree", removing)
    assert store.delete("c1")
    assert swept == [0]
    assert list(store.tmp_dir.iterdir()) == []


def test_only_root_may_look(store: Store) -> None:
    put(store)
    for path in (store.artifacts_dir, store.tmp_dir, store.artifacts_dir / "c1"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for name in (MANIFEST, VERIFIED):
        assert stat.S_IMODE((store.artifacts_dir / "c1" / name).stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["../c1", "", ".", "..", "A", "a/b", "-a", "a" * 254, "a\0"])
def test_a_name_cannot_leave_the_store(store: Store, name: str) -> None:
    with pytest.raises(StoreError, match="is no name"):
        store.open(name)
    with pytest.raises(StoreError, match="is no name"):
        store.delete(name)


@pytest.mark.parametrize("damage", ["short", "changed", "missing", "link", "manifest", "no-manifest", "other"])
def test_damage_is_named(store: Store, damage: str) -> None:
    put(store)
    base = store.artifacts_dir / "c1"
    pages = base / "images/pages-1.img"
    if damage == "short":
        pages.write_bytes(b"page")
    elif damage == "changed":
        info = pages.stat()
        pages.write_bytes(b"Pages")
        os.utime(pages, ns=(info.st_atime_ns, info.st_mtime_ns))  # ctime tells
    elif damage == "missing":
        pages.unlink()
    elif damage == "link":
        pages.rename(base / "elsewhere")
        pages.symlink_to(base / "elsewhere")
    elif damage == "manifest":
        (base / MANIFEST).write_bytes((base / MANIFEST).read_bytes()[:-10])
    elif damage == "no-manifest":
        (base / MANIFEST).unlink()
    elif damage == "other":
        base.rename(store.artifacts_dir / "c2")
    with pytest.raises(StoreError) as error, store.open("c2" if damage == "other" else "c1") as artifact:
        artifact.verify()
    assert error.value.reason == Reason.ARTIFACT_CORRUPT


def test_digests_are_taken_once_a_boot(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store)
    monkeypatch.setattr(module, "boot_id", lambda: "another boot")
    with store.open("c1") as artifact:
        assert artifact.verify() == 2
        assert artifact.verify() == 0
        os.utime(store.artifacts_dir / "c1/images/empty")
        assert artifact.verify() == 1


@pytest.mark.parametrize("text", ["", "null", "[]", '{"boot_id": 5}', '{"files": {}}'])
def test_a_damaged_sidecar_only_costs_time(store: Store, text: str) -> None:
    put(store)
    (store.artifacts_dir / "c1" / VERIFIED).write_text(text)
    with store.open("c1") as artifact:
        assert artifact.verify() == 2


@pytest.mark.parametrize("change", [{"version": 99}, {"files": {"x": 5}}, {"files": None}, {"mapped": [{"path": "/x"}]}])
def test_a_manifest_of_another_kind_is_refused(store: Store, change: dict[str, Any]) -> None:
    put(store)
    file = store.artifacts_dir / "c1" / MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(StoreError) as error:
        store.open("c1")
    assert error.value.reason == Reason.ARTIFACT_CORRUPT
    assert store.read().manifests == []


def test_unknown_manifest_keys_are_ignored(store: Store) -> None:
    put(store)
    file = store.artifacts_dir / "c1" / MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), "later": 1}))
    assert store.manifest("c1").root_pid == 1000


@pytest.mark.parametrize(("number", "reason"), [(errno.EIO, Reason.ARTIFACT_CORRUPT), (errno.EMFILE, Reason.STORE_FAILED)])
def test_what_the_agent_is_short_of_says_nothing_against_an_artifact(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    put(store)

    def fails(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    with store.open("c1") as artifact:
        monkeypatch.setattr(os, "open", fails)
        with pytest.raises(StoreError) as error:
            artifact.verify(full=True)
        monkeypatch.undo()
    assert error.value.reason == reason
    monkeypatch.setattr(os, "open", fails)
    with pytest.raises(StoreError) as error:
        store.open("c1")
    monkeypatch.undo()
    assert error.value.reason == reason


def test_an_artifact_that_cannot_be_read_is_still_listed(store: Store) -> None:
    put(store)
    (store.artifacts_dir / "c1/manifest.json").write_text("torn")
    (store.artifacts_dir / "not a content").mkdir()
    found = store.read()
    assert found.manifests == []
    assert found.unreadable["c1"].reason == Reason.ARTIFACT_CORRUPT
    assert found.usage.artifacts["c1"] > 0, "it takes room all the same"
    assert store.names() == ["c1"]


async def test_a_look_into_the_store_parses_every_manifest_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest lists every file of its artifact, and the agent looks every minute."""
    box = Box(tmp_path / "box")
    ops = LocalOps(Config(node_name=NODE, kubelet_dir=box.kubelet, store_dir=str(tmp_path / "store"), criu_prefix="/none"))
    published = [put(ops.store, name) for name in ("c1", "c2")]
    put(ops.store, "torn")
    (ops.store.artifacts_dir / "torn/manifest.json").write_text("torn")
    parsed: list[bytes] = []
    parse = Manifest.from_json

    def counted(raw: bytes) -> Manifest:
        parsed.append(raw)
        return parse(raw)

    monkeypatch.setattr(Manifest, "from_json", counted)
    box.node.ops = ops
    await box.node.refresh()
    assert len(parsed) == 3
    assert {name: stored.digest for name, stored in box.node.stored.items()} == {m.content: m.digest for m in published}
    assert box.node.usage.artifacts.keys() == {"c1", "c2", "torn"}


def test_a_new_capture_replaces_an_old_one(store: Store) -> None:
    put(store, data=b"old")
    put(store, data=b"newer")
    assert store.manifest("c1").files["images/pages-1.img"].size == 5
    assert list(store.tmp_dir.iterdir()) == []


def test_deletion_waits_for_readers(store: Store) -> None:
    put(store)
    with store.open("c1"), store.open("c1"), pytest.raises(StoreError, match="being read"):
        store.delete("c1", timeout_s=0)
    assert store.delete("c1")
    assert not store.delete("c1")
    with pytest.raises(StoreError) as error:
        store.open("c1")
    assert error.value.reason == Reason.ARTIFACT_MISSING
    assert list(store.tmp_dir.iterdir()) == []


def test_a_large_file_is_digested_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 1000)
    (tmp_path / "a").write_bytes(bytes(range(256)) * 10)
    swapped = bytearray((tmp_path / "a").read_bytes())
    swapped[:1000], swapped[1000:2000] = swapped[1000:2000], swapped[:1000]
    (tmp_path / "b").write_bytes(swapped)
    with module._pool() as pool:
        digests = module.digest_files(tmp_path, ["a", "b"], pool)
        assert digests == module.digest_files(tmp_path, ["a", "b"], pool)
    assert digests["a"] != digests["b"]
