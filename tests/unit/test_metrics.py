"""Metrics: what is declared is what is exposed, what happened is counted once, and what is gone is not shown."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.scrape import Samples, by, counted, samples, total
from tests.unit.agentbox import ROME, Box, NodeError
from tests.unit.test_status import captured, claim, compute, pod, see
from vllmsnapshot import metrics as common
from vllmsnapshot.agent import metrics as agent_metrics
from vllmsnapshot.agent.metrics import start_phases
from vllmsnapshot.agent.space import Usage
from vllmsnapshot.api import constants as c
from vllmsnapshot.api.constants import Reason
from vllmsnapshot.api.types import Check, PodReport, RestoreCounts, Timings, VLLMSnapshotContentStatus
from vllmsnapshot.controller import metrics as operator_metrics
from vllmsnapshot.controller.health import Health
from vllmsnapshot.controller.workqueue import Wait, WorkQueue
from vllmsnapshot.kube import Call
from vllmsnapshot.metrics import Family, Once

DECLARED = (*common.COMMON, *operator_metrics.FAMILIES, *agent_metrics.FAMILIES)


def scrape(process: common.Common) -> Samples:
    return samples(process.exposition("")[0].decode())


# --- declarations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", DECLARED, ids=lambda family: family.name)
def test_names_and_labels_follow_the_conventions(family: Family) -> None:
    assert family.name.startswith("vllmsnapshot_")
    assert family.name.endswith("_total") == (family.kind == "counter")
    assert family.help.endswith(".")
    # Nothing that grows with the number of pods.
    assert not set(family.labels) & {"pod", "uid", "container", "node", "instance", "content", "incarnation", "job"}
    assert all(family.labels.values())
    if family.kind == "histogram":
        assert family.name.endswith(("_seconds", "_bytes"))
        assert family.buckets is not None
        assert list(family.buckets.bounds) == sorted(set(family.buckets.bounds))
        assert family.buckets.why
    else:
        assert family.buckets is None


def test_names_are_unique() -> None:
    names = [family.name for family in DECLARED]
    assert len(names) == len(set(names))


def exposed(process: common.Common) -> set[str]:
    """Names of our families in a scrape (a family without samples shows its type)."""
    lines = process.exposition("")[0].decode().splitlines()
    return {line.split()[2] for line in lines if line.startswith("# TYPE vllmsnapshot_")}


def test_each_process_exposes_what_is_declared_and_nothing_else(tmp_path: Path) -> None:
    operator = operator_metrics.Metrics()
    operator.watch(WorkQueue(clock=lambda: 0.0), lambda: 1.5)
    assert exposed(operator) == {family.name for family in (*common.COMMON, *operator_metrics.FAMILIES)}
    agent = Box(tmp_path).node.metrics
    agent.show(lambda: node_state())
    assert exposed(agent) == {family.name for family in (*common.COMMON, *agent_metrics.FAMILIES)}


def node_state(**changed: Any) -> Iterator[Any]:
    state = {
        "in_flight": 0,
        "artifacts": {},
        "quarantined": [],
        "slower": [],
        "capable": True,
        "usage": Usage(),
        "room": 0,
        "checks": [],
        "outbox": 0,
    }
    return agent_metrics.node_state(**{**state, **changed})


def test_the_answer_is_in_the_format_that_was_asked_for() -> None:
    process = operator_metrics.Metrics()
    assert process.exposition("")[1].startswith("text/plain; version=0.0.4")
    body, content_type = process.exposition("application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith(b"# EOF\n")


@pytest.mark.parametrize("on", [True, False])
async def test_metrics_are_served_unless_they_are_off(on: bool) -> None:
    process = operator_metrics.Metrics()
    health = Health()
    health.exposition = process.exposition if on else None
    await health.start(0)
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{health.port}/metrics", headers={"Accept": "text/plain"}) as response:
                assert response.status == (200 if on else 404)
                assert ("vllmsnapshot_build_info" in await response.text()) is on
            async with session.get(f"http://127.0.0.1:{health.port}/healthz") as response:
                assert response.status == 200
    finally:
        await health.stop()


def test_build_info_and_process_metrics() -> None:
    found = scrape(operator_metrics.Metrics())
    assert total(found, "vllmsnapshot_build_info", component="operator") == 1
    assert total(found, "process_resident_memory_bytes") > 0
    assert not [name for name, _ in found if name.endswith("_created")]


# --- requests and passes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "query", "verb", "group", "resource"),
    [
        ("GET", "/api/v1/namespaces/ns/pods/a", {}, "get", "", "pods"),
        ("GET", "/api/v1/namespaces/ns/pods", {}, "list", "", "pods"),
        ("GET", "/api/v1/pods", {"watch": "true"}, "watch", "", "pods"),
        ("GET", "/api/v1/nodes", {"limit": 1}, "list", "", "nodes"),
        ("GET", "/api/v1/nodes/n", {}, "get", "", "nodes"),
        ("PATCH", "/api/v1/namespaces/ns/pods/a/status", {}, "patch", "", "pods/status"),
        ("POST", "/apis/events.k8s.io/v1/namespaces/ns/events", {}, "create", "events.k8s.io", "events"),
        ("PATCH", f"/apis/{c.GROUP}/v1alpha1/namespaces/ns/vllmsnapshots/s/scale", {}, "patch", c.GROUP, "vllmsnapshots/scale"),
        ("DELETE", f"/apis/{c.GROUP}/v1alpha1/vllmsnapshotcontents/x", {}, "delete", c.GROUP, "vllmsnapshotcontents"),
        ("DELETE", "/api/v1/namespaces/ns/pods", {}, "deletecollection", "", "pods"),
        ("GET", "/version", {}, "list", "", ""),
    ],
)
def test_a_request_in_the_words_of_rbac(
    method: str, path: str, query: dict[str, Any], verb: str, group: str, resource: str
) -> None:
    call = Call.of(method, path, query, 200, 0.1)
    assert (call.verb, call.group, call.resource) == (verb, group, resource)


def test_requests_are_counted_by_verb_resource_and_code() -> None:
    process = operator_metrics.Metrics()
    for status, seconds in ((200, 0.02), (200, 0.3), (409, 0.02), (0, 30.0)):
        process._called(Call("patch", "", "pods/status", status, seconds))
    process._called(Call("watch", "", "pods", 200, 0.1))
    found = scrape(process)
    assert total(found, "vllmsnapshot_api_requests_total", verb="patch", resource="pods/status", code="200") == 2
    assert total(found, "vllmsnapshot_api_requests_total", code="409") == 1
    assert total(found, "vllmsnapshot_api_requests_total", code="error") == 1
    assert total(found, "vllmsnapshot_api_request_seconds_count", verb="patch") == 4
    assert total(found, "vllmsnapshot_api_request_seconds_count", verb="watch") == 0


async def test_passes_are_counted_by_how_they_ended() -> None:
    process = operator_metrics.Metrics()

    async def settle(key: str) -> float | None:
        match key:
            case "later":
                return 5.0
            case "refused":
                raise Wait("quota")
            case "broken":
                raise RuntimeError("transient")
            case "cut off":
                raise asyncio.CancelledError
        return None

    measured = process.timed(lambda _: "snapshot", settle, Wait)
    for key in ("done", "later", "refused", "broken", "cut off"):
        try:
            await measured(key)
        except (Wait, RuntimeError, asyncio.CancelledError):
            continue
    assert by(scrape(process), "vllmsnapshot_reconcile_total", "result") == {"success": 1, "requeue": 1, "wait": 1, "error": 1}
    assert total(scrape(process), "vllmsnapshot_reconcile_seconds_count", controller="snapshot") == 4


# --- the operator's state --------------------------------------------------------------------------------------------


def restores(failures: int) -> VLLMSnapshotContentStatus:
    return VLLMSnapshotContentStatus(restores=RestoreCounts(succeeded=1, failed=failures, consecutive_failures=failures))


def test_the_state_of_a_snapshot() -> None:
    process = operator_metrics.Metrics()
    seen = see(
        pod("a"),
        pod("b", mode=c.START_RESTORE),
        pod("d", mode="", state="Deciding"),
        contents=(
            captured("good"),
            captured("moved", node="elsewhere"),
            captured("slow", slower="than a cold start"),
            captured("bad", quarantined=True, status=restores(3)),
            captured("never", captured=False, failed=True),
            captured("ordered", captured=False),
        ),
    )
    status = compute(seen, replicas=4).model_copy(update={"timings": Timings(cold_start="40.90s", restored_start="2.60s")})
    process.saw(claim(replicas=4), seen, status)
    found = scrape(process)
    mine = {"namespace": "ns", "snapshot": "smol"}
    assert total(found, "vllmsnapshot_snapshot_replicas_wanted", **mine) == 4
    assert by(found, "vllmsnapshot_snapshot_replicas", "start_mode") == {"restore": 1, "cold": 1, "undecided": 1}
    assert total(found, "vllmsnapshot_snapshot_replicas_ready", **mine) == 2
    assert by(found, "vllmsnapshot_snapshot_artifacts", "state") == {
        "usable": 1,
        "slower": 1,
        "unusable": 1,
        "quarantined": 1,
        "failed": 1,
        "ordered": 1,
    }
    assert total(found, "vllmsnapshot_snapshot_artifact_bytes", **mine) == 21
    assert total(found, "vllmsnapshot_snapshot_consecutive_restore_failures", **mine) == 3
    assert by(found, "vllmsnapshot_snapshot_last_start_seconds", "start_mode") == {"restore": 2.6, "cold": 40.9}
    assert by(found, "vllmsnapshot_snapshot_condition", "condition") == {
        c.READY: 0,
        c.SNAPSHOT_READY: 1,
        c.PROGRESSING: 1,
        c.DEGRADED: 1,
        c.STALE: 0,
    }
    assert total(found, "vllmsnapshot_snapshot_condition", condition=c.DEGRADED, reason=Reason.ARTIFACT_QUARANTINED) == 1


def of_snapshots(process: common.Common) -> Samples:
    return {key: value for key, value in scrape(process).items() if key[0].startswith("vllmsnapshot_snapshot_")}


def test_a_snapshot_that_is_gone_has_no_series() -> None:
    process = operator_metrics.Metrics()
    process.saw(claim(), see(), compute(see()))
    assert of_snapshots(process)
    process.gone(("ns", "smol"))
    assert not of_snapshots(process)
    # Nor has one whose deletion nobody told: the next complete list does not name it.
    process.saw(claim(), see(), compute(see()))
    process.keep([("ns", "other")])
    assert not of_snapshots(process)


def test_a_condition_has_one_series_whatever_reasons_it_had() -> None:
    process = operator_metrics.Metrics()
    for replicas in (see(), see(pod("a"), pod("b"))):
        process.saw(claim(), replicas, compute(replicas))
    ready = [dict(labels)["reason"] for (_, labels), _ in of_snapshots(process).items() if ("condition", c.READY) in labels]
    assert ready == [Reason.ALL_REPLICAS_READY]


def test_the_time_from_zero_is_observed_once() -> None:
    now = 100.0
    process = operator_metrics.Metrics(clock=lambda: now)

    def passes(replicas: int, *pods: Any, before: Any = None) -> Any:
        made = claim(replicas=replicas)
        made = dataclasses.replace(made, status=before) if before else made
        status = compute(see(*pods), replicas=replicas)
        process.saw(made, see(*pods), status)
        return status

    asleep = passes(0)
    woken = passes(1, pod("a", state="Starting"), before=asleep)
    now += 2.5
    passes(1, pod("a", state="Starting"), before=woken)
    now += 0.5
    serving = passes(1, pod("a"), before=woken)
    passes(1, pod("a"), before=serving)
    found = scrape(process)
    assert total(found, "vllmsnapshot_scale_from_zero_seconds_count") == 1
    assert total(found, "vllmsnapshot_scale_from_zero_seconds_sum") == 3.0


def test_a_snapshot_that_is_put_to_sleep_again_before_it_served_is_not_observed() -> None:
    now = 100.0
    process = operator_metrics.Metrics(clock=lambda: now)
    asleep = compute(see(), replicas=0)
    process.saw(dataclasses.replace(claim(replicas=1), status=asleep), see(), compute(see(), replicas=1))
    process.saw(claim(replicas=0), see(), asleep)
    now += 1000
    process.saw(claim(replicas=1), see(pod("a")), compute(see(pod("a")), replicas=1))
    assert total(scrape(process), "vllmsnapshot_scale_from_zero_seconds_count") == 0


# --- the agent: each thing once --------------------------------------------------------------------------------------


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


async def test_a_cold_start_a_capture_and_a_restore_are_counted_once(box: Box) -> None:
    await box.cold_and_captured()
    await box.restored()
    for _ in range(3):
        await box.settle()  # as a resync does
    found = scrape(box.node.metrics)
    assert total(found, "vllmsnapshot_decisions_total") == 2
    assert total(found, "vllmsnapshot_decisions_total", mode="cold", reason=Reason.NO_ARTIFACT) == 1
    assert total(found, "vllmsnapshot_decisions_total", mode="restore") == 1
    assert total(found, "vllmsnapshot_starts_total") == 2
    assert total(found, "vllmsnapshot_starts_total", mode="cold", reason=Reason.NO_ARTIFACT) == 1
    assert total(found, "vllmsnapshot_starts_total", mode="restore", reason=Reason.RESTORED) == 1
    assert total(found, "vllmsnapshot_start_seconds_count", mode="cold") == 1
    assert total(found, "vllmsnapshot_start_seconds_count", mode="restore") == 1
    assert total(found, "vllmsnapshot_restart_seconds_count") == 0
    assert total(found, "vllmsnapshot_captures_total") == 1
    assert total(found, "vllmsnapshot_captures_total", result="succeeded", reason=Reason.CAPTURED) == 1
    assert total(found, "vllmsnapshot_artifact_bytes_sum") == 1_000_000
    assert total(found, "vllmsnapshot_restores_total") == 1
    assert total(found, "vllmsnapshot_restores_total", result="succeeded", reason=Reason.RESTORED) == 1
    assert total(found, "vllmsnapshot_start_phase_seconds_count", mode="restore", phase="criu") == 1
    assert total(found, "vllmsnapshot_start_phase_seconds_sum", mode="restore", phase="reload") == 1.5


async def test_what_is_drawn_is_there_before_its_first_event(box: Box) -> None:
    """Prometheus sees no increase of a series that begins at 1: the first start of a new node would never be in a graph."""
    before = scrape(box.node.metrics)
    await box.cold_and_captured()
    await box.restored()
    after = scrape(box.node.metrics)
    drawn = ("decisions_total", "starts_total", "captures_total", "restores_total", "_seconds_count", "artifact_bytes_count")
    happened = {
        key
        for key, value in after.items()
        if value and key[0].endswith(drawn) and "reconcile" not in key[0] and "api" not in key[0]
    }
    assert len(happened) > 10
    assert happened - before.keys() == set()


async def test_another_agent_counts_nothing_that_was_counted_before(box: Box) -> None:
    await box.cold_and_captured()
    await box.restored()
    box.start()
    await box.settle()
    found = scrape(box.node.metrics)
    for name in ("decisions", "starts", "captures", "restores"):
        assert total(found, f"vllmsnapshot_{name}_total") == 0, name


async def test_a_crashed_engine_that_is_restored_again_is_another_start(box: Box) -> None:
    await box.cold_and_captured()
    uid = await box.restored()
    box.hello(uid, "i2")
    await box.settle()
    box.serving(uid, "i2")
    await box.settle()
    found = scrape(box.node.metrics)
    assert total(found, "vllmsnapshot_starts_total", mode="restore") == 2
    assert total(found, "vllmsnapshot_start_seconds_count", mode="restore") == 1
    assert total(found, "vllmsnapshot_restart_seconds_count", mode="restore") == 1


async def test_failures_are_counted_with_their_reason(box: Box) -> None:
    uid = box.add_pod("a")
    box.add_content("art", "a")
    box.ops.broken["capture"] = NodeError(Reason.PREFLIGHT_INET_SOCKET)
    box.hello(uid)
    await box.settle()
    box.ready(uid)
    await box.settle()
    box.add_content("good", "gone", captured=True)
    box.ops.broken["restore"] = NodeError(Reason.RESTORE_FAILED)
    uid = box.add_pod("b")
    box.hello(uid)
    await box.settle()
    await box.settle()
    found = scrape(box.node.metrics)
    assert counted(found, "vllmsnapshot_captures_total", "reason") == {Reason.PREFLIGHT_INET_SOCKET: 1}
    assert total(found, "vllmsnapshot_captures_total", result="failed") == 1
    assert counted(found, "vllmsnapshot_restores_total", "reason") == {Reason.RESTORE_FAILED: 1}
    assert total(found, "vllmsnapshot_decisions_total", mode="restore") == 1
    assert total(found, "vllmsnapshot_decisions_total", mode="cold", reason=Reason.RESTORE_FAILED) == 1
    assert total(found, "vllmsnapshot_capture_phase_seconds_count") == 0


async def test_a_wrong_answer_is_a_failed_restore(box: Box) -> None:
    await box.cold_and_captured()
    uid = box.add_pod("b")
    box.hello(uid)
    await box.settle()
    box.serving(uid, oracle=ROME)
    await box.pods.settle(uid)
    found = scrape(box.node.metrics)
    assert total(found, "vllmsnapshot_restores_total", result="failed", reason=Reason.CANARY_MISMATCH) == 1
    assert total(found, "vllmsnapshot_starts_total", mode="restore") == 0


async def test_a_pod_deleted_during_its_restore_is_nobodys_failure(box: Box) -> None:
    await box.cold_and_captured()
    uid = box.add_pod("b")
    box.hello(uid)
    await box.settle()
    for _ in range(2):
        box.node.ledger.drop_pod(uid)
    assert counted(scrape(box.node.metrics), "vllmsnapshot_restores_total", "result") == {"aborted": 1}


async def test_an_api_server_that_is_away_makes_nothing_count_twice(box: Box) -> None:
    uid = box.add_pod("a")
    box.add_content("art", "a")
    box.hello(uid)
    await box.settle()
    box.kube.down = True
    box.ready(uid)
    await box.settle()
    box.serving(uid)
    for _ in range(5):
        await box.settle()
    assert total(scrape(box.node.metrics), "vllmsnapshot_starts_total") == 0, "not on record yet"
    box.kube.down = False
    await box.settle()
    found = scrape(box.node.metrics)
    assert total(found, "vllmsnapshot_starts_total") == 1
    assert total(found, "vllmsnapshot_captures_total") == 1


async def test_a_write_whose_answer_was_lost_counts_once(box: Box) -> None:
    """The write is on record, and its writer does not know it: the watch tells."""
    uid = box.add_pod("a")
    box.hello(uid)
    await box.settle()
    process = box.node.metrics
    before = box.report("a")
    after = PodReport(incarnation="i1", start="cold", reason=Reason.NO_ARTIFACT, state="Serving", phases={"total_s": 40.0})
    for _ in range(2):
        process.will_report(uid, before, after)
    pod = box.pod("a")
    pod["metadata"]["annotations"][c.ANNOTATION_REPORT] = after.model_dump_json(by_alias=True)
    for _ in range(3):
        process.reported(pod)
    assert total(scrape(process), "vllmsnapshot_starts_total") == 1


@pytest.mark.parametrize("n", range(1, 40))
async def test_an_agent_killed_after_any_deed_counts_nothing_twice(tmp_path: Path, n: int) -> None:
    """Both processes' counters together are what Prometheus adds up."""
    box = Box(tmp_path)
    uid = box.add_pod("a")
    box.add_content("art", "a")
    box.hello(uid)
    await box.settle()
    box.ready(uid)
    box.serving(uid)
    first = box.node.metrics
    await box.settle_with_kill(n)
    processes = [first] if box.node.metrics is first else [first, box.node.metrics]
    found = [scrape(process) for process in processes]
    for name in ("starts", "captures"):
        number = sum(total(x, f"vllmsnapshot_{name}_total") for x in found)
        assert number <= 1, name
        if len(processes) == 1:
            assert number == 1, name


def test_what_is_alerted_on_is_there_before_it_happens_first() -> None:
    """Prometheus sees no increase in a series that begins with 1."""
    found = scrape(agent_metrics.Metrics())
    for name, result, reason in (
        ("restores", "failed", Reason.CANARY_MISMATCH),
        ("restores", "failed", Reason.RESTORE_FAILED),
        ("restores", "succeeded", Reason.RESTORED),
        ("captures", "failed", Reason.DUMP_FAILED),
        ("captures", "succeeded", Reason.CAPTURED),
    ):
        labels = frozenset({("result", result), ("reason", reason)})
        assert found[f"vllmsnapshot_{name}_total", labels] == 0
    assert total(found, "vllmsnapshot_start_seconds_count", mode="restore") == 0


def test_once() -> None:
    once = Once()
    assert not once.confirm("a", "x"), "nothing was expected: it was on record before"
    once.expect("a", "x")
    once.expect("a", "x")
    assert not once.confirm("a", "w")
    assert once.confirm("a", "x")
    assert not once.confirm("a", "x")
    once.expect("a", "y")
    once.forget("a")
    assert not once.confirm("a", "y")


# --- the agent: what a workload writes -------------------------------------------------------------------------------


def test_a_workload_cannot_make_series() -> None:
    phases = {f"phase{i}_s": 1.0 for i in range(40)} | {"criu_s": 1.2, "reload_s": float("nan"), "barrier_s": -3.0}
    assert dict(start_phases(phases)) == {"criu": 1.2, "barrier": 0.0}
    assert common.known_reason("MadeUp") == "Other"
    assert common.known_reason(Reason.NO_ARTIFACT) == Reason.NO_ARTIFACT


def test_what_is_left_of_the_release_is_http() -> None:
    phases = {"release_to_serving_s": 2.0, "renew_s": 0.1, "reload_s": 1.2, "canary_after_s": 0.3}
    assert dict(start_phases(phases))["http"] == pytest.approx(0.4)
    assert "http" not in dict(start_phases({"reload_s": 1.2}))


def test_the_gauges_of_a_node(box: Box) -> None:
    process = box.node.metrics
    checks = [Check(name="kernel", status="Pass"), Check(name="disk", status="Warn"), Check(name="criu", status="Fail")]
    process.show(
        lambda: node_state(
            in_flight=2,
            artifacts={"a": 10, "b": 29, "s": 1},
            quarantined=["b", "of-another-store"],
            slower=["b", "s", "of-another-store"],
            capable=False,
            usage=Usage(free=5),
            room=4,
            checks=checks,
            outbox=3,
        )
    )
    found = scrape(process)
    assert by(found, "vllmsnapshot_agent_artifacts", "state") == {"usable": 1, "quarantined": 1, "slower": 1}
    assert by(found, "vllmsnapshot_agent_node_check", "check") == {"kernel": 1, "disk": 0.5, "criu": 0}
    for name, value in {
        "restores_in_flight": 2,
        "store_used_bytes": 40,
        "store_free_bytes": 5,
        "store_quota_bytes": math.inf,
        "store_room_bytes": 4,
        "store_largest_artifact_bytes": 29,
        "node_capable": 0,
        "outbox_depth": 3,
    }.items():
        assert total(found, f"vllmsnapshot_agent_{name}") == value, name
