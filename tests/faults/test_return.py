"""What ends by itself: an artifact that is stale, damaged or useless is replaced, and the conditions say first that, then that all is well."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from vllmsnapshot.agent.breakeven import PROBE_AFTER_S, SAMPLES
from vllmsnapshot.agent.config import Config
from vllmsnapshot.api import constants as c
from vllmsnapshot.api.constants import Reason
from vllmsnapshot.api.types import PodReport
from vllmsnapshot.controller.tries import FIRST_PAUSE_S
from vllmsnapshot.kube import CONTENTS, PODS, SNAPSHOTS, Object
from vllmsnapshot.objects import timestamp

from .cases import Cases, chosen
from .points import Points
from .world import LOAD_S, NAME, NAMESPACE, RELOAD_S, Live, Plan, World


def claim(x: World) -> Object:
    found = x.server.get(SNAPSHOTS, NAME, NAMESPACE)
    assert found is not None
    return found


def shown(x: World, kind: str) -> tuple[str, str]:
    """Status and reason of a condition of the claim."""
    found = next(item for item in claim(x)["status"]["conditions"] if item["type"] == kind)
    return found["status"], found["reason"]


def reports(x: World) -> list[PodReport]:
    """Of the replicas, oldest first."""
    pods = [pod for pod in x.server.all(PODS) if pod["metadata"]["namespace"] == NAMESPACE]
    pods.sort(key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]))
    return [PodReport.model_validate_json(pod["metadata"]["annotations"][c.ANNOTATION_REPORT]) for pod in pods]


def started(x: World) -> list[tuple[str, str]]:
    """How the replicas started, and why so."""
    assert all(report.state == "Serving" for report in reports(x))
    return [(report.start, report.reason) for report in reports(x)]


def contents(x: World) -> list[dict[str, Any]]:
    """As they are."""
    return [dict(item) for item in x.server.all(CONTENTS)]


def damage(x: World) -> None:
    """The memory of the artifact has another size."""
    [page] = Path(x.store_dir("node-a")).rglob("pages-1.img")
    page.write_text(page.read_text() + " ")


DOCTOR_S = 2.0 * Config.doctor_seconds
"""The agent has examined its node again."""
RESTORED = (c.START_RESTORE, Reason.RESTORED)


def test_a_node_that_changed_is_told_before_anybody_is_restored_and_the_artifact_is_replaced(live: Live) -> None:
    async def scenario(x: World) -> None:
        x.apply(replicas=1)
        await x.rest()
        [old] = contents(x)
        x.kernel = "7.0"
        await x.rest(quiet_s=DOCTOR_S)
        assert (shown(x, c.STALE), shown(x, c.DEGRADED)[0]) == (("True", Reason.ENVIRONMENT_CHANGED), "False")
        x.apply(replicas=2)
        await x.rest()
        assert started(x)[-1] == (c.START_COLD, Reason.IDENTITY_MISMATCH)
        [new] = contents(x)
        assert new["metadata"]["uid"] != old["metadata"]["uid"]
        assert (shown(x, c.STALE)[0], shown(x, c.SNAPSHOT_READY)[0], shown(x, c.DEGRADED)[0]) == ("False", "True", "False")
        x.apply(replicas=3)
        await x.rest()
        assert started(x)[-1] == RESTORED

    live(scenario)


def test_a_node_that_is_well_again_is_used_again_within_a_minute(live: Live) -> None:
    """The disk was full when the agent was started, say."""

    async def scenario(x: World) -> None:
        x.ailment = "disk: full"
        x.apply(replicas=1)
        await x.rest()
        assert started(x) == [(c.START_COLD, Reason.NODE_NOT_CAPABLE)]
        x.ailment = ""
        await x.rest(quiet_s=60.0)
        x.apply(replicas=2)
        await x.rest()
        assert started(x)[1] == (c.START_COLD, Reason.NO_ARTIFACT)
        assert shown(x, c.SNAPSHOT_READY)[0] == "True"

    live(scenario)


async def restarted(x: World, times: int = 1) -> None:
    """Every engine dies, and each replica starts again where it is."""
    for _ in range(times):
        x.crash()
        await x.rest(quiet_s=100.0)


def test_restores_that_are_slower_than_a_cold_start_end_until_a_probe_is_quick(live: Live) -> None:
    async def scenario(x: World) -> None:
        x.apply(replicas=1)
        await x.rest()
        [first] = contents(x)
        assert first["status"]["artifact"]["coldStart"].startswith("40.")
        x.reload_s = LOAD_S + 20.0  # the model's volume has become slow, and an engine that starts cold has its files cached
        await restarted(x, SAMPLES)
        assert started(x) == [RESTORED], "the third slow one is the proof"
        assert (shown(x, c.SNAPSHOT_READY), shown(x, c.DEGRADED)) == (
            ("False", Reason.RESTORE_SLOWER),
            ("True", Reason.RESTORE_SLOWER),
        )
        await restarted(x)
        assert started(x) == [(c.START_COLD, Reason.RESTORE_SLOWER)]
        x.apply(replicas=2)
        await x.rest()
        assert started(x) == [(c.START_COLD, Reason.RESTORE_SLOWER)] * 2
        [same] = contents(x)
        assert same["metadata"]["uid"] == first["metadata"]["uid"], "there is nothing to be captured"
        x.apply(replicas=1)
        await x.rest()

        await asyncio.sleep(PROBE_AFTER_S)
        await restarted(x)
        assert started(x) == [RESTORED], "a probe"
        await restarted(x)
        assert started(x) == [(c.START_COLD, Reason.RESTORE_SLOWER)], "it was slow"

        x.reload_s = RELOAD_S
        await asyncio.sleep(PROBE_AFTER_S)
        await restarted(x, 2)
        assert started(x) == [RESTORED]
        assert (shown(x, c.SNAPSHOT_READY)[0], shown(x, c.DEGRADED)[0]) == ("True", "False")

    live(scenario)


@pytest.mark.parametrize("who", ["agent-node-a", "operator"])
def test_what_restores_took_survives_the_end_of_a_process_at_any_point(live: Live, who: str, cases: Cases) -> None:
    """A restore that was cut off is not counted, so one more may be needed; then the verdict is the same."""

    async def scenario(x: World) -> None:
        x.spared = True
        x.apply(replicas=1)
        await x.rest()
        x.spared = False
        x.reload_s = LOAD_S + 20.0
        for _ in range(SAMPLES + 2):
            await restarted(x)
            if shown(x, c.DEGRADED) == ("True", Reason.RESTORE_SLOWER):
                break
        x.spared = True
        assert shown(x, c.DEGRADED) == ("True", Reason.RESTORE_SLOWER)
        await restarted(x)
        assert started(x) == [(c.START_COLD, Reason.RESTORE_SLOWER)]

    calm = live(scenario, Plan(who=who)).first
    assert calm is not None

    def ended(n: int) -> str:
        x = live(scenario, Plan(who=who, points=lambda _: Points(stop_at=n)))
        assert x.deaths == 1
        assert x.first is not None
        return x.first.hit

    name = f"points of {who} while restores prove slow"
    cases.each(name, chosen(calm.names, name), ended)


def message(x: World, kind: str) -> str:
    return next(str(item["message"]) for item in claim(x)["status"]["conditions"] if item["type"] == kind)


def test_captures_that_fail_are_left_alone_for_a_while_and_tried_again_by_themselves(live: Live) -> None:
    async def replaced(x: World) -> int:
        """Its pod is deleted, and made anew; how many captures of it were ordered."""
        before = {item["metadata"]["uid"] for item in contents(x)}
        x.delete_pods()
        await x.rest()
        return len({item["metadata"]["uid"] for item in contents(x)} - before)

    async def scenario(x: World) -> None:
        x.undumpable = True
        x.apply(replicas=1, capture={"retries": 1})
        await x.rest()
        assert [await replaced(x), await replaced(x)] == [1, 0], "one more at once, then a pause"
        assert shown(x, c.DEGRADED) == ("True", Reason.CAPTURE_FAILED)
        [said] = re.findall(r"after (\S+Z)", message(x, c.SNAPSHOT_READY))
        assert said in message(x, c.DEGRADED)
        due = timestamp(said)
        assert x.now() < due <= x.now() + FIRST_PAUSE_S
        await asyncio.sleep(due - x.now() + 1)
        assert [await replaced(x), await replaced(x)] == [1, 0]
        await asyncio.sleep(FIRST_PAUSE_S)
        assert await replaced(x) == 0, "twice as long"
        x.undumpable = False
        await asyncio.sleep(FIRST_PAUSE_S)
        assert await replaced(x) == 1
        assert (shown(x, c.SNAPSHOT_READY)[0], shown(x, c.DEGRADED)[0], len(contents(x))) == ("True", "False", 1)
        await replaced(x)
        assert started(x) == [RESTORED]

    live(scenario)


def test_a_new_artifact_is_judged_anew(live: Live) -> None:
    async def scenario(x: World) -> None:
        x.apply(replicas=1)
        await x.rest()
        x.reload_s = LOAD_S + 20.0
        await restarted(x, SAMPLES)
        assert shown(x, c.DEGRADED) == ("True", Reason.RESTORE_SLOWER)
        x.server.edit(SNAPSHOTS, NAME, NAMESPACE, lambda obj: obj["metadata"].update(annotations={c.ANNOTATION_RECAPTURE: "1"}))
        await x.rest(quiet_s=100.0)
        assert shown(x, c.DEGRADED)[0] == "False"
        await restarted(x)
        assert started(x) == [RESTORED]

    live(scenario)


def test_a_tag_that_moved_on_costs_one_cold_start(live: Live) -> None:
    async def scenario(x: World) -> None:
        x.apply(replicas=1)
        await x.rest()
        x.moved = {"one": "one as it is now"}
        x.apply(replicas=2)
        await x.rest()
        assert started(x)[-1] == (c.START_COLD, Reason.IDENTITY_MISMATCH)
        x.apply(replicas=3)
        await x.rest()
        assert started(x)[-1] == RESTORED
        assert len(contents(x)) == 1
        assert (shown(x, c.STALE)[0], shown(x, c.SNAPSHOT_READY)[0], shown(x, c.DEGRADED)[0]) == ("False", "True", "False")

    live(scenario)


def test_a_quarantine_ends_with_the_artifact_that_proves_itself(live: Live) -> None:
    async def scenario(x: World) -> None:
        x.apply(replicas=1)
        await x.rest()
        [old] = contents(x)
        damage(x)
        seen: set[tuple[str, str]] = set()
        x.server.listeners.append(lambda _: seen.add(shown(x, c.DEGRADED)))
        x.apply(replicas=2)
        await x.rest()
        assert ("True", Reason.ARTIFACT_QUARANTINED) in seen
        assert started(x)[-1] == (c.START_COLD, Reason.ARTIFACT_CORRUPT)
        [new] = contents(x)
        assert new["metadata"]["uid"] != old["metadata"]["uid"]
        assert (shown(x, c.SNAPSHOT_READY)[0], shown(x, c.DEGRADED)[0]) == ("True", "False")
        x.apply(replicas=3)
        await x.rest()
        assert started(x)[-1] == RESTORED

    live(scenario)
