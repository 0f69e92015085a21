"""A store that has room for one artifact: what is missed least makes room, whoever ends on the way, and nobody starts worse than cold."""

from __future__ import annotations

from pathlib import Path

from vllmsnapshot.api import constants as c
from vllmsnapshot.api.constants import Reason
from vllmsnapshot.controller.tries import FIRST_PAUSE_S
from vllmsnapshot.kube import EVENTS, SNAPSHOTS
from vllmsnapshot.objects import condition

from .cases import Cases, chosen
from .test_enumeration import AGENT, QUIET_S, at
from .test_return import RESTORED, contents, reports, shown, started
from .world import EXPECTED_BYTES, Live, Plan, World

KEEP_BOTH = {"retain": 2}
"""The operator would keep the artifact of the spec before, too."""


def for_one(x: World) -> None:
    """A capture finds room in an empty store, and in no other."""
    x.quota = EXPECTED_BYTES + 1


async def taking_turns(x: World) -> None:
    """Two specs, one after the other, with nothing between."""
    for_one(x)
    x.apply(replicas=1, artifact=KEEP_BOTH)
    await x.rest()
    x.apply(replicas=0, artifact=KEEP_BOTH)
    await x.rest()
    x.apply(replicas=1, image="two", artifact=KEEP_BOTH)
    await x.rest()
    # What a death of the agent may have cost is made up for by the next starts, which nothing disturbs.
    x.spared = True
    for _ in range(2):
        for replicas in (0, 1):
            x.apply(replicas=replicas, image="two", artifact=KEEP_BOTH)
            await x.rest()
    await x.rest(quiet_s=QUIET_S)


def check(x: World) -> None:
    """One artifact, of the second spec, in use; nothing of the first one."""
    assert started(x) == [RESTORED]
    [content] = contents(x)
    assert content["spec"]["identity"] == x.server.all(SNAPSHOTS)[0]["status"]["identity"]
    assert [p.name for p in (Path(x.store_dir("node-a")) / "artifacts").iterdir()] == [content["metadata"]["name"]]
    assert not list((Path(x.store_dir("node-a")) / "tmp").iterdir())
    assert (shown(x, c.SNAPSHOT_READY)[0], shown(x, c.DEGRADED)[0]) == ("True", "False")


def test_what_lies_idle_makes_room(live: Live) -> None:
    async def scenario(x: World) -> None:
        await taking_turns(x)
        check(x)
        evicted = [item for item in x.server.all(EVENTS) if item["reason"] == Reason.EVICTED]
        assert {item["regarding"]["kind"] for item in evicted} == {"VLLMSnapshot"}
        assert len(evicted) == 1

    live(scenario)


def test_the_agent_ends_anywhere_while_one_makes_room_for_the_other(live: Live, cases: Cases) -> None:
    async def scenario(x: World) -> None:
        await taking_turns(x)
        check(x)

    def ended(n: int) -> str:
        first = live(scenario, Plan(who=AGENT, points=at(stop_at=n))).first
        return first.hit if first else ""

    calm = live(scenario, Plan(who=AGENT)).first
    assert calm is not None
    cases.each("points at which the agent ended on a full store", chosen(calm.names, "full store"), ended)


def test_what_replicas_would_restart_from_stays_and_the_capture_waits_for_its_time(live: Live) -> None:
    """In a rollout the old replica serves until the new one does: both artifacts are needed, and there is room for one."""

    async def scenario(x: World) -> None:
        for_one(x)
        x.apply(replicas=1)
        await x.rest()
        x.apply(replicas=1, image="two", capture={"retries": 0})
        await x.rest()
        assert [report.start for report in reports(x)] == [c.START_COLD], "it serves"
        kept = {condition(item, c.FAILED).get("reason") for item in contents(x)}
        assert kept == {None, Reason.INSUFFICIENT_DISK}
        assert shown(x, c.SNAPSHOT_READY) == ("False", Reason.CAPTURE_FAILED)
        await x.rest(quiet_s=FIRST_PAUSE_S)
        x.apply(replicas=2, image="two", capture={"retries": 0})
        await x.rest()
        # The old one is nobody's any more.
        assert shown(x, c.SNAPSHOT_READY)[0] == "True"
        x.apply(replicas=3, image="two", capture={"retries": 0})
        await x.rest()
        assert started(x)[-1] == RESTORED

    live(scenario)


def test_at_rest_a_store_beyond_its_quota_writes_nothing(live: Live) -> None:
    async def scenario(x: World) -> None:
        x.apply(replicas=1)
        await x.rest()
        x.quota = 1  # the artifact is needed, so it stays
        await x.rest(quiet_s=QUIET_S)
        before = x.server.version
        await x.rest(quiet_s=10 * QUIET_S)
        assert x.server.version == before
        assert len(contents(x)) == 1
        x.crash()
        await x.rest()
        assert started(x)[-1][0] == c.START_RESTORE

    live(scenario)
