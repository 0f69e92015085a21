"""Scaling down under load: every request is answered, whoever is asked, over whatever connection."""

from __future__ import annotations

import pytest

from tests.load import KINDS
from tests.node.snapshot import Make
from tests.system import System
from vllmsnapshot.api import constants as c
from vllmsnapshot.kube import PODS


@pytest.mark.parametrize("leaving", ["scaled", "rolled"])
async def test_no_request_is_cut(make: Make, system: System, leaving: str) -> None:
    snap = await make(f"drain-{leaving}", args=["--token-s=0.05"])
    await snap.seeded()
    snap.scale(3)
    before = await snap.ready(3)
    async with await snap.load() as load:
        load.start(*KINDS, *KINDS)
        await load.more()
        if leaving == "scaled":
            snap.scale(1)
        else:
            snap.apply(podTemplate={"metadata": {"annotations": {"changed": "yes"}}})

        async def gone() -> bool:
            kept = 1 if leaving == "scaled" else 0
            names = {pod["metadata"]["name"] for pod in before}
            pods = await system.kube.list(PODS, snap.namespace, labels=f"{c.LABEL_SNAPSHOT}={snap.name}")
            return len(names & {pod["metadata"]["name"] for pod in pods}) == kept

        await system.until("the pods to end", gone, 120)
        await load.more()
    assert load.failures == []
