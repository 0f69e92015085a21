"""Weights in the artifact or not, and the decision by what was measured on the node."""

from __future__ import annotations

from tests.node.snapshot import MIB, Make, Snapshot, answer, starts
from tests.system import System, condition
from vllmsnapshot.api import constants as c
from vllmsnapshot.kube import Object

SIZE = 32
"""MiB of weights; random, so no tool on the way makes less of them."""


async def artifact(snap: Snapshot) -> Object:
    """What the status says of the captured artifact."""
    (content,) = [x for x in await snap.contents() if condition(x, c.CAPTURED) == "True"]
    record: Object = content["status"]["artifact"]
    return record


async def test_kept_weights_travel_and_discarded_ones_do_not(make: Make, system: System) -> None:
    """Both come up with the same answer. Afterwards restores have been measured, and Auto decides by the figures."""
    sizes = {}
    for weights in ("Discard", "Keep"):
        snap = await make(f"weights-{weights.lower()}", args=[f"--memory-mib={SIZE}"], capture={"weights": weights})
        await snap.seeded()
        record = await artifact(snap)
        assert record["weights"] == weights
        assert weights in record["weightsReason"]
        sizes[weights] = record["bytes"]
        snap.scale(2)
        pods = await snap.ready(2)
        assert starts(pods) == [c.START_COLD, c.START_RESTORE]
        replies = [await snap.respond(pod) for pod in pods]
        assert [reply and reply["choices"][0]["text"] for reply in replies] == [answer(mib=SIZE)] * 2
        snap.never_wrong(answer(mib=SIZE))
        snap.scale(0)
    assert sizes["Keep"] - sizes["Discard"] > 0.9 * SIZE * MIB

    snap = await make("weights-auto", args=[f"--memory-mib={SIZE}"], capture={"weights": "Auto"})
    _, content = await snap.seeded()
    record = await artifact(snap)
    assert record["weights"] in ("Discard", "Keep")
    assert "MB/s, as restores on this node did" in record["weightsReason"]
    told = system.backend.kubectl("describe", "vsnapcontent", content)
    assert record["weightsReason"] in " ".join(told.split())
