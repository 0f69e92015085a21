"""The life of the Helm release on a cluster that serves: upgraded, rolled back, removed and installed again without a request lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.cluster import Cluster
from tests.load import KINDS, Load
from tests.node.snapshot import Make, Snapshot, answer, report, restarts
from tests.system import RELEASE, SYSTEM_NAMESPACE, System, install, local_values
from vllmsnapshot.api import constants as c
from vllmsnapshot.kube import PODS, Object

REPOSITORY = "vllmsnapshot.local/operator"
NEXT = "next"


@pytest.fixture
def released(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with the image under a second tag, and afterwards with the release as it was."""
    cluster.exec(["ctr", "-n", "k8s.io", "images", "tag", "--force", f"{REPOSITORY}:dev", f"{REPOSITORY}:{NEXT}"])
    yield cluster
    install(cluster, local_values(cluster))


async def parts(system: System) -> dict[str, str]:
    """UIDs and images of operator and agents."""
    pods = await system.kube.list(PODS, SYSTEM_NAMESPACE)
    return {pod["metadata"]["uid"]: pod["spec"]["containers"][0]["image"] for pod in pods}


async def unharmed(snap: Snapshot, before: list[Object], load: Load) -> None:
    """The same pods as before, never restarted, all Ready, and every answer right."""
    now = await snap.ready(len(before))
    assert [pod["metadata"]["uid"] for pod in now] == [pod["metadata"]["uid"] for pod in before]
    assert [restarts(pod) for pod in now] == [0] * len(before)
    await load.more()
    assert load.failures == []
    snap.never_wrong(answer())


async def test_replicas_serve_through_the_life_of_the_release(make: Make, system: System, released: Cluster) -> None:
    snap = await make("release")
    await snap.seeded()
    snap.scale(2)
    pods = await snap.ready(2)
    first = await parts(system)
    # Helm runs in threads: it takes seconds, in which the clients must go on.
    options = (RELEASE, "--namespace", SYSTEM_NAMESPACE, "--wait", "--timeout=180s")
    async with await snap.load() as load:
        load.start(*KINDS)
        await load.more()

        changed = {"image.tag": NEXT, "operator.logLevel": "INFO", "agent.logLevel": "INFO"}
        await asyncio.to_thread(install, released, {**local_values(released), **changed})
        upgraded = await parts(system)
        assert not first.keys() & upgraded.keys(), "operator and agent were replaced"
        assert set(upgraded.values()) == {f"{REPOSITORY}:{NEXT}"}
        await unharmed(snap, pods, load)
        # The new parts work with what the old ones have left.
        snap.scale(3)
        grown = await snap.ready(3)
        assert report(grown[-1]).start == c.START_RESTORE
        snap.scale(2)
        pods = await snap.ready(2)

        await asyncio.to_thread(released.helm, "rollback", *options)
        back = await parts(system)
        assert not upgraded.keys() & back.keys()
        assert set(back.values()) == {f"{REPOSITORY}:dev"}
        await unharmed(snap, pods, load)

        await asyncio.to_thread(released.helm, "uninstall", *options)

        async def removed() -> bool:
            return not await parts(system)

        await system.until("operator and agents to be gone", removed, 60)
        await unharmed(snap, pods, load)
        assert await snap.contents(), "the artifacts' records are kept with the CRDs"

        await asyncio.to_thread(install, released, local_values(released))
        await unharmed(snap, pods, load)
        snap.scale(3)
        again = await snap.ready(3)
        assert report(again[-1]).start == c.START_RESTORE
        await load.more()
        assert load.failures == []
