"""`kubectl vsnap artifacts verify` at the agent's end: an annotation is answered in the status, once, whatever happens between."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agentbox import Box, NodeError
from vllmsnapshot.agent.errors import StoreError
from vllmsnapshot.agent.nodeops import Digested
from vllmsnapshot.agent.verify import Checks
from vllmsnapshot.api import constants as c
from vllmsnapshot.api.constants import Reason


@pytest.fixture
def box(tmp_path: Path) -> Box:
    made = Box(tmp_path)
    made.add_content("art", "gone", captured=True)
    return made


def ask(box: Box, request: str, name: str = "art") -> None:
    """A user sets the annotation."""
    box.content(name)["metadata"]["annotations"] = {c.ANNOTATION_VERIFY: request}
    box.sync()


def answer(box: Box, name: str = "art") -> dict[str, Any]:
    found: dict[str, Any] = box.kube.objects["vllmsnapshotcontents", "", name]["status"].get("verification") or {}
    return found


async def test_an_intact_artifact(box: Box) -> None:
    await box.settle()
    assert "verify art" not in box.ops.did, "nobody asked"
    ask(box, "r1")
    await box.settle()
    assert (answer(box)["request"], answer(box)["outcome"]) == ("r1", "Intact")
    assert (answer(box)["files"], answer(box)["bytes"]) == (3, 1_000_000)
    assert box.conditions("art") == {c.CAPTURED: Reason.CAPTURED}
    await box.settle()
    box.start()
    await box.settle()
    assert box.ops.did.count("verify art") == 1, "answered once, also across a restart of the agent"
    ask(box, "r2")
    await box.settle()
    assert (answer(box)["request"], box.ops.did.count("verify art")) == ("r2", 2)


async def test_a_corrupt_artifact_is_quarantined(box: Box) -> None:
    box.ops.broken["verify"] = StoreError(Reason.ARTIFACT_CORRUPT, "pages-1.img has changed")
    ask(box, "r1")
    await box.settle()
    assert (answer(box)["outcome"], answer(box)["message"]) == ("Corrupt", "pages-1.img has changed")
    assert box.conditions("art")[c.QUARANTINED] == Reason.ARTIFACT_CORRUPT
    assert box.node.ledger.entry("art", "uid-art").quarantined is not None


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (StoreError(Reason.ARTIFACT_MISSING, "gone"), "Missing"),
        (StoreError(Reason.STORE_FAILED, "too many open files"), "Failed"),
        (NodeError("", "what is this"), "Failed"),
    ],
)
async def test_what_proves_nothing_quarantines_nothing(box: Box, error: Exception, outcome: str) -> None:
    box.ops.broken["verify"] = error
    ask(box, "r1")
    await box.settle()
    assert answer(box)["outcome"] == outcome
    assert c.QUARANTINED not in box.conditions("art")


async def test_an_order_is_verified_when_it_has_become_an_artifact(box: Box) -> None:
    uid = box.add_pod("a", identity="id-2")
    box.add_content("new", "a", identity="id-2")
    ask(box, "r1", "new")
    box.hello(uid)
    await box.settle()
    assert "verify new" not in box.ops.did
    box.ready(uid)
    await box.settle()
    assert answer(box, "new")["outcome"] == "Intact"


async def test_a_request_that_changes_meanwhile_is_answered_too(box: Box) -> None:
    ask(box, "r1")
    box.ops.before["verify"] = lambda: ask(box, "r2") if answer(box) == {} and box.ops.did.count("verify art") == 1 else None
    await box.settle()
    assert answer(box)["request"] == "r2"


async def test_a_content_is_not_deleted_under_a_verification(box: Box) -> None:
    deletable: list[bool] = []

    def delete() -> None:
        box.content("art")["metadata"]["deletionTimestamp"] = "2027-01-01T00:00:00Z"
        deletable.append(not box.node.busy["art"])

    box.ops.before["verify"] = delete
    ask(box, "r1")
    await box.settle()
    assert deletable == [False]
    assert ("vllmsnapshotcontents", "", "art") not in box.kube.objects, "but after it"


async def test_killed_after_any_deed(tmp_path: Path) -> None:
    n, killed = 0, True
    while killed:
        n += 1
        box = Box(tmp_path / str(n))
        box.add_content("art", "gone", captured=True)
        box.ops.broken["verify"] = StoreError(Reason.ARTIFACT_CORRUPT, "changed")
        ask(box, "r1")
        killed = await box.settle_with_kill(n)
        assert answer(box)["outcome"] == "Corrupt", n
        assert c.QUARANTINED in box.conditions("art"), n
    assert n > 2


async def test_one_artifact_at_a_time() -> None:
    running, most = 0, 0
    go = asyncio.Event()

    async def digest(_content: str) -> Digested:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go.wait()
        running -= 1
        return Digested(files=1, bytes=1)

    checks = Checks(digest, lambda _: None, lambda: 0.0)
    for name in ("a", "b", "c"):
        assert checks.answer(name, "uid", "r") is None
    go.set()
    await checks.drain()
    assert most == 1
    assert all(checks.answer(name, "uid", "r") is not None for name in ("a", "b", "c"))
    assert checks.answer("a", "another", "r") is None, "a recreated content has an outcome of its own"
    await checks.drain()
