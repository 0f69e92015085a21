"""Numbers and revisions: which replicas go, what a new revision does, what stays when everything goes."""

from __future__ import annotations

from tests.node.snapshot import Make, answer, names, report, starts
from tests.nodeview import NodeView
from tests.system import System, condition
from vllmsnapshot.api import constants as c
from vllmsnapshot.kube import CONTENTS, SNAPSHOTS


async def test_scale_down_takes_the_cold_one_then_the_newest(make: Make) -> None:
    snap = await make("down")
    await snap.seeded()
    snap.scale(2)
    seed, older = await snap.ready(2)
    snap.scale(3)
    pods = await snap.ready(3)
    (newest,) = [pod for pod in pods if pod["metadata"]["name"] not in names([seed, older])]
    assert report(newest).start == c.START_RESTORE

    snap.scale(2)
    assert names(await snap.ready(2)) == names([older, newest])
    snap.scale(1)
    assert names(await snap.ready(1)) == names([older])


async def test_zero_keeps_the_artifact_and_one_is_restored(make: Make, node: NodeView) -> None:
    snap = await make("zero")
    seed, content = await snap.seeded()
    snap.scale(0)
    await snap.ready(0)
    assert node.artifact(content)
    snap.scale(1)
    (pod,) = await snap.ready(1)
    assert pod["metadata"]["uid"] != seed["metadata"]["uid"]
    assert (report(pod).start, report(pod).content) == (c.START_RESTORE, content)
    assert await snap.ask(pod) == answer()


async def test_a_new_revision_is_captured_then_restored(make: Make, system: System, node: NodeView) -> None:
    snap = await make("roll")
    _, old_content = await snap.seeded()
    snap.scale(2)
    old = await snap.ready(2)
    revision = old[0]["metadata"]["labels"][c.LABEL_REVISION]
    snap.seen.mark()
    snap.apply(args=["--memory-mib=3"])

    async def rolled() -> bool:
        found = await snap.get()
        return condition(found, c.READY) == "True" and found["status"].get("revision") != revision

    await system.until("the rollout to end", rolled, 90)
    new = await snap.ready(2)
    assert not names(new) & names(old)
    assert starts(new) == [c.START_COLD, c.START_RESTORE]
    assert [await snap.ask(pod) for pod in new] == [answer(mib=3)] * 2
    assert report(new[1]).content != old_content
    assert snap.seen.fewest >= 2, "maxUnavailable is 0"
    for uid, answers in snap.seen.answers.items():
        new_ones = {pod["metadata"]["uid"] for pod in new}
        assert answers <= {answer(mib=3) if uid in new_ones else answer()}

    async def one_left() -> bool:
        return [o["metadata"]["name"] for o in await snap.contents()] == [report(new[1]).content] and not node.artifact(
            old_content
        )

    await system.until("the artifact of the old revision to be removed", one_left, 30)


async def test_another_port_rolls_and_restores_from_the_same_artifact(make: Make, system: System) -> None:
    snap = await make("port")
    seed, content = await snap.seeded()
    snap.apply(serving={"port": 8123})

    async def moved() -> bool:
        pods = await snap.pods()
        return len(pods) == 1 and pods[0]["metadata"]["annotations"][c.ANNOTATION_PORT] == "8123"

    await system.until("the replica to move", moved, 60)
    (pod,) = await snap.ready(1)
    assert names([pod]) != names([seed])
    assert (report(pod).start, report(pod).content) == (c.START_RESTORE, content)
    reply = await snap.respond(pod)
    assert reply
    assert (reply["port"], reply["choices"][0]["text"]) == (8123, answer())
    assert len(snap.seen.contents) == 1, "nothing new was captured"


async def test_deletion_removes_the_files(make: Make, system: System, node: NodeView) -> None:
    snap = await make("delete")
    _, content = await snap.seeded()
    assert node.artifact(content)
    system.delete(snap.name)
    await system.wait_gone(snap.name, timeout_s=60)
    assert node.artifact(content) is None
    assert [path for path in node.cluster.store_dir.rglob("*") if content in str(path)] == []


async def test_retained_artifacts_outlive_the_snapshot(make: Make, system: System, node: NodeView) -> None:
    snap = await make("retain", artifact={"deletionPolicy": "Retain"})
    _, content = await snap.seeded()
    system.delete(snap.name)

    async def gone() -> bool:
        return await system.kube.get(SNAPSHOTS, snap.name, snap.namespace) is None and not await snap.pods()

    await system.until("the snapshot to go", gone, 60)
    kept = await system.kube.get(CONTENTS, content)
    assert kept is not None
    assert condition(kept, c.CAPTURED) == "True"
    assert node.artifact(content)
    await system.kube.delete(CONTENTS, content)

    async def removed() -> bool:
        return await system.kube.get(CONTENTS, content) is None and node.artifact(content) is None

    await system.until("the retained artifact to be removed", removed, 30)


async def test_a_successor_of_the_same_name_starts_from_nothing(make: Make, system: System) -> None:
    snap = await make("again", artifact={"deletionPolicy": "Retain"})
    _, content = await snap.seeded()
    system.delete(snap.name)

    async def gone() -> bool:
        return await system.kube.get(SNAPSHOTS, snap.name, snap.namespace) is None and not await snap.pods()

    await system.until("the snapshot to go", gone, 60)
    try:
        system.apply(snap.manifest)
        (pod,) = await snap.ready(1)
        assert (report(pod).start, report(pod).reason) == (c.START_COLD, c.Reason.NO_ARTIFACT)
    finally:
        await system.kube.delete(CONTENTS, content)
