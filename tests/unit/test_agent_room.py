"""A full store: what is missed least makes room, never what is in use; where that is not enough the capture fails, and nothing else."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agentbox import Box, NodeError, artifact, content_object, pod_object
from vllmsnapshot import objects
from vllmsnapshot.agent import config
from vllmsnapshot.agent.errors import StoreError
from vllmsnapshot.agent.ledger import Entry
from vllmsnapshot.agent.space import Usage
from vllmsnapshot.api import constants as c
from vllmsnapshot.api.constants import Reason
from vllmsnapshot.kube import CONTENTS, PODS
from vllmsnapshot.retention import doomed
from vllmsnapshot.world import Content, Observed

MB = 1_000_000
"""Of every artifact here."""


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


def idle(box: Box, name: str, *, snapshot: str = "other", age_s: float = 1000.0, identity: str = "id-9", **changes: Any) -> None:
    """An artifact of another snapshot, which has no replica here."""
    obj = content_object(name, f"source-{name}", identity=identity, captured=True)
    obj["spec"]["snapshotRef"] = {"namespace": "default", "name": snapshot, "uid": f"snap-{snapshot}"}
    at = objects.rfc3339(box.node.clock() - age_s)
    obj["metadata"]["creationTimestamp"] = at
    obj["status"]["artifact"] = {"bytes": MB, "digest": "sha256:abc", "capturedAt": at}
    box.kube.add(CONTENTS, obj)
    box.ops.store[name] = replace(artifact(name, obj["metadata"]["uid"]), captured_at=at, **changes)
    box.sync()


async def captured(box: Box) -> str:
    """A replica that is captured as `art`, and serves whatever becomes of that."""
    uid = await box.cold_and_captured()
    assert box.verified("a") == ("True", Reason.VERIFIED)
    return uid


# --- how much there is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usage", "promised", "room"),
    [
        (Usage(free=100), 0, 100),
        (Usage(free=100, min_free=30), 0, 70),
        (Usage(free=100, min_free=30), 50, 20),
        # What has been written of what was promised is not free any more.
        (Usage(free=60, min_free=30, writing=40), 50, 20),
        (Usage(free=60, min_free=30, writing=60), 50, 30),
        (Usage(free=1000, artifacts={"a": 40}, quota=100), 0, 60),
        (Usage(free=1000, artifacts={"a": 40}, quota=100), 70, -10),
        (Usage(free=10, artifacts={"a": 40}, quota=100, min_free=30), 0, -20),
    ],
)
def test_the_room_is_what_quota_and_disk_both_leave(usage: Usage, promised: int, room: int) -> None:
    assert usage.room(promised) == room


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("1000", 1000), ("1k", 1000), ("2Ki", 2048), ("1.5Gi", 3 << 29), ("500G", 500 * 10**9), ("0.1", 1)],
)
def test_a_quantity_is_that_of_kubernetes(text: str, value: int) -> None:
    assert config.quantity(text) == value


@pytest.mark.parametrize("text", ["", "-1", "1gb", "1KI", "x", "1 Gi", "1e3", "1_000", "٣"])
def test_what_is_no_quantity_is_refused_with_its_flag(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config.parse([f"--store-min-free={text}"], {"NODE_NAME": "n"})
    assert "--store-min-free" in capsys.readouterr().err


def test_without_a_word_there_is_no_quota_and_a_gibibyte_stays_free() -> None:
    made = config.parse([], {"NODE_NAME": "n", "VLLMSNAPSHOT_STORE_QUOTA": ""})
    assert (made.quota_bytes, made.min_free_bytes) == (None, 1 << 30)
    assert config.parse([], {"NODE_NAME": "n", "VLLMSNAPSHOT_STORE_QUOTA": "2Ti"}).quota_bytes == 2 << 40


# --- before a capture ------------------------------------------------------------------------------------------------


async def test_with_room_nothing_is_evicted(box: Box) -> None:
    idle(box, "lies")
    box.ops.space = replace(box.ops.space, quota=2 * MB)
    await captured(box)
    assert box.conditions("art") == {c.CAPTURED: Reason.CAPTURED}
    assert "lies" in box.ops.store


async def test_the_least_useful_makes_room(box: Box) -> None:
    idle(box, "lately", age_s=10)
    idle(box, "long-ago", snapshot="third")
    box.ops.space = replace(box.ops.space, quota=2 * MB)
    await captured(box)
    assert set(box.ops.store) == {"art", "lately"}
    assert box.conditions("art") == {c.CAPTURED: Reason.CAPTURED}
    assert box.conditions("long-ago") == {c.CAPTURED: Reason.CAPTURED, c.QUARANTINED: Reason.EVICTED}
    assert Reason.EVICTED in box.events()
    assert box.ops.did.index("delete long-ago") > box.ops.did.index("capture a art")
    assert not box.node.room._promised


async def test_the_operator_deletes_what_was_evicted_and_counts_no_failure(box: Box) -> None:
    from vllmsnapshot.api.types import VLLMSnapshotSpec

    idle(box, "lies")
    box.ops.space = replace(box.ops.space, quota=MB)
    await captured(box)
    item = Content.parse(box.content("lies"))
    assert (item.evicted, item.quarantined, item.failed, item.pending) == (True, False, False, False)
    observed = Observed(contents=(item,), nodes=frozenset({item.node}))
    assert not observed.usable(item)
    spec = VLLMSnapshotSpec.model_validate({"model": "/m", "image": "x"})
    assert doomed(spec, item.identity, observed) == [(item, "evicted from a full store")]
    # And then the files, which are gone already, and the finalizer.
    box.content("lies")["metadata"]["deletionTimestamp"] = objects.rfc3339(box.node.clock())
    box.sync()
    await box.settle()
    assert ("vllmsnapshotcontents", "", "lies") not in box.kube.objects


async def test_what_a_replica_here_would_restart_from_is_not_evicted(box: Box) -> None:
    await captured(box)  # replica `a` of snap-1
    idle(box, "theirs")
    other = pod_object("b", identity="id-9")
    other["metadata"]["ownerReferences"][0] |= {"name": "other", "uid": "snap-other"}
    box.kube.add(PODS, other)
    box.sync()
    box.ops.space = replace(box.ops.space, quota=2 * MB)
    with pytest.raises(StoreError) as error:
        box.node.room.take("new", MB)
    assert error.value.reason == Reason.INSUFFICIENT_DISK
    assert set(box.ops.store) == {"art", "theirs"}


async def test_a_capture_that_finds_no_room_fails_with_the_figures_and_the_replica_serves(box: Box) -> None:
    idle(box, "lies")
    box.ops.space = Usage(free=100, min_free=50)
    box.ops.sizes = [2 * MB, 2 * MB]
    await captured(box)
    assert box.conditions("art") == {c.FAILED: Reason.INSUFFICIENT_DISK}
    (found,) = [x for x in box.content("art")["status"]["conditions"] if x["type"] == c.FAILED]
    for figure in (f"needs {2 * MB} bytes", f"has {MB} (quota none)", "disk 100 free", "50 must stay", f"would give {MB}"):
        assert figure in found["message"]
    assert set(box.ops.store) == {"lies"}, "what would not have been enough was not evicted either"
    assert not box.node.room._promised


async def test_what_it_came_to_counts_too(box: Box) -> None:
    """The estimate was too low: the artifact is on the disk, and must not get its name beyond the quota."""
    idle(box, "lies")
    box.ops.space = replace(box.ops.space, quota=3 * MB)
    box.ops.sizes = [MB, 3 * MB]
    await captured(box)
    assert set(box.ops.store) == {"art"}
    box.ops.sizes = [MB, 4 * MB]
    with pytest.raises(StoreError):
        box.node.room.take("next", 4 * MB)


def test_two_captures_at_once_do_not_get_the_same_room(box: Box) -> None:
    box.ops.space = replace(box.ops.space, quota=3 * MB)
    assert box.node.room.take("one", 2 * MB) == []
    with pytest.raises(StoreError, match="quota"):
        box.node.room.take("two", 2 * MB)
    assert box.node.room.take("one", 3 * MB) == [], "in place of what it had"
    box.node.room.give_back("one")
    assert box.node.room.take("two", 2 * MB) == []


# --- what may go -----------------------------------------------------------------------------------------------------


def damaged(box: Box) -> None:
    box.node.ledger.quarantine("bad", "uid-bad", Reason.CANARY_MISMATCH, "another answer")


def unreadable(box: Box) -> None:
    del box.ops.store["bad"]
    box.ops.unreadable.add("bad")
    box.sync()


def moved(box: Box) -> None:
    box.content("bad")["status"]["environment"] = {"kernelRelease": "6.1"}
    box.node.health = replace(box.node.health, environment={"kernelRelease": "6.2"})
    box.sync()


def nobodys(box: Box) -> None:
    del box.kube.objects["vllmsnapshotcontents", "", "bad"]
    box.sync()


@pytest.mark.parametrize("how", [damaged, unreadable, moved, nobodys])
def test_what_cannot_be_used_goes_first(box: Box, how: Callable[[Box], None]) -> None:
    idle(box, "good", age_s=5000)
    idle(box, "bad", age_s=10, snapshot="third")
    how(box)
    used = sum(box.ops.usage().artifacts.values())
    box.ops.space = replace(box.ops.space, quota=used)
    assert box.node.room.take("new", 1) == ["bad"]
    assert set(box.ops.store) == {"good"}
    # What was said of it stays; of what was only unusable nobody shall think that it was lost.
    known = box.node.ledger.entry("bad", "uid-bad").quarantined
    wanted = Reason.CANARY_MISMATCH if how is damaged else "" if how is nobodys else Reason.EVICTED
    assert (known.reason if known else "") == wanted


def test_last_used_is_the_last_restore(box: Box) -> None:
    idle(box, "older", age_s=5000)
    idle(box, "newer", age_s=1000, snapshot="third")
    box.node.ledger.begin("older", "uid-older", "uid-p", "i", box.node.clock() - 60)
    box.node.ledger.settle("older", "uid-p", "i", "succeeded")
    box.ops.space = replace(box.ops.space, quota=2 * MB)
    assert box.node.room.take("new", MB) == ["newer"]


def test_files_that_are_read_are_not_evicted(box: Box) -> None:
    idle(box, "read")
    box.ops.space = replace(box.ops.space, quota=MB)
    with box.node.using("read"), pytest.raises(StoreError):
        box.node.room.take("new", MB)
    assert box.node.room.take("new", MB) == ["read"]


def test_what_the_disk_does_not_let_go_of_is_passed_over(box: Box) -> None:
    idle(box, "stuck", age_s=5000)
    idle(box, "loose", snapshot="third")
    box.ops.space = replace(box.ops.space, quota=2 * MB)

    def delete(content: str, real: Callable[[str], None] = box.ops.delete_artifact) -> None:
        if content == "stuck":
            raise StoreError(Reason.STORE_FAILED, "cannot be deleted")
        real(content)

    box.ops.delete_artifact = delete  # type: ignore[method-assign]
    assert box.node.room.take("new", MB) == ["stuck", "loose"]
    assert set(box.ops.store) == {"stuck"}
    quarantined = box.node.ledger.entry("stuck", "uid-stuck").quarantined
    assert quarantined is not None, "nothing is restored from what may be half gone"
    assert quarantined.reason == Reason.EVICTED


def test_a_ledger_that_cannot_be_written_does_not_keep_a_full_disk_full(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    idle(box, "lies")
    box.ops.space = replace(box.ops.space, quota=MB)

    real = box.node.ledger._write

    def full(content: str, entry: Entry) -> None:
        if box.ops.store:
            raise OSError(errno.ENOSPC, "full")
        real(content, entry)

    monkeypatch.setattr(box.node.ledger, "_write", full)
    assert box.node.room.take("new", MB) == ["lies"]
    assert not box.ops.store
    box.start()
    quarantined = box.node.ledger.entry("lies", "uid-lies").quarantined
    assert quarantined is not None, "written as soon as there was room for it"
    assert quarantined.reason == Reason.EVICTED


# --- without a capture -----------------------------------------------------------------------------------------------


async def test_a_quota_that_was_lowered_and_a_disk_that_others_fill_are_met_in_time(box: Box) -> None:
    await captured(box)
    for name, age in (("old", 5000.0), ("new", 10.0)):
        idle(box, name, age_s=age, snapshot=name)
    await box.removal.collect()
    assert len(box.ops.store) == 3
    box.ops.space = replace(box.ops.space, quota=2 * MB)
    await box.removal.collect()
    assert set(box.ops.store) == {"art", "new"}
    # However little there is, what the replica would restart from stays.
    box.ops.space = Usage(free=0, min_free=MB)
    await box.removal.collect()
    await box.removal.collect()
    assert set(box.ops.store) == {"art"}
    await box.settle()
    assert box.conditions("art") == {c.CAPTURED: Reason.CAPTURED}
    assert box.conditions("new")[c.QUARANTINED] == Reason.EVICTED


async def test_a_full_store_at_rest_writes_nothing(box: Box) -> None:
    await captured(box)
    box.ops.space = Usage(free=0, min_free=MB)
    await box.removal.collect()
    await box.settle()
    done, writes = len(box.done), len(box.kube.writes)
    for _ in range(3):
        await box.removal.collect()
        await box.settle()
    assert (len(box.done), len(box.kube.writes)) == (done, writes)


async def test_the_agent_may_end_anywhere_in_an_eviction(tmp_path: Path) -> None:
    """The artifact is whole and in use, or evicted; whoever comes next tells it, and captures."""
    from tests.unit.agentbox import Killed

    for n in range(1, 200):
        box = Box(tmp_path / str(n))
        idle(box, "lies")
        box.ops.space = replace(box.ops.space, quota=MB)
        before = len(box.done)
        box.kill_at = before + n
        try:
            await captured(box)
        except Killed:
            box.kill_at = None
            box.start()
            await box.settle()
            assert not box.node.room._promised
            evicted = box.conditions("lies").get(c.QUARANTINED) == Reason.EVICTED
            assert evicted or "lies" in box.ops.store, f"killed at {n}: {box.done[before + n - 1]}"
            assert sum(box.ops.usage().artifacts.values()) <= 2 * MB
            continue
        assert n > 10
        return
    raise AssertionError("does not come to an end")


async def test_a_capture_that_fails_gives_its_room_back(box: Box) -> None:
    box.ops.broken["publish"] = NodeError(Reason.STORE_FAILED)
    await captured(box)
    assert box.conditions("art") == {c.FAILED: Reason.STORE_FAILED}
    assert not box.node.room._promised
