"""What operator and agent tell of a real snapshot by their metrics, and `helm test` on a real installation."""

from __future__ import annotations

from tests.cluster import Cluster
from tests.node.snapshot import Make
from tests.scrape import Samples, by, counted, samples, total
from tests.system import RELEASE, SYSTEM_NAMESPACE, System
from vllmsnapshot.api import constants as c
from vllmsnapshot.kube import PODS


async def scrape(system: System, component: str) -> Samples:
    """The metrics of the operator or of the node's agent."""
    pods = await system.kube.list(PODS, SYSTEM_NAMESPACE, labels=f"{c.LABEL_COMPONENT}={component}")
    (pod,) = (pod for pod in pods if "deletionTimestamp" not in pod["metadata"])
    port = pod["spec"]["containers"][0]["ports"][0]["containerPort"]
    async with system.http.get(f"http://{pod['status']['podIP']}:{port}/metrics") as response:
        assert response.status == 200
        return samples(await response.text())


def of(found: Samples, name: str) -> Samples:
    """The operator's series of one snapshot."""
    return {key: value for key, value in found.items() if ("snapshot", name) in key[1]}


async def test_starts_restores_and_captures_are_counted_once(make: Make, system: System) -> None:
    before = await scrape(system, c.COMPONENT_AGENT)
    snap = await make("measured")
    await snap.seeded()
    snap.scale(3)
    await snap.ready(3)

    async def told() -> Samples | None:
        found = await scrape(system, c.COMPONENT_AGENT)
        rise = total(found, "vllmsnapshot_starts_total") - total(before, "vllmsnapshot_starts_total")
        return found if rise == 3 else None

    after = await system.until("three starts in the agent's metrics", told, 30)

    def rise(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    assert rise("vllmsnapshot_starts_total", mode="cold", reason=c.Reason.NO_ARTIFACT) == 1
    assert rise("vllmsnapshot_starts_total", mode="restore", reason=c.Reason.RESTORED) == 2
    assert rise("vllmsnapshot_start_seconds_count", mode="restore") == 2
    assert rise("vllmsnapshot_captures_total", result="succeeded") == 1
    assert rise("vllmsnapshot_captures_total", result="failed") == 0
    assert rise("vllmsnapshot_artifact_bytes_count") == 1
    assert rise("vllmsnapshot_restores_total", result="succeeded") == 2
    assert rise("vllmsnapshot_restores_total", result="failed") == 0
    for phase in ("schedule", "container", "decide", "stage", "criu", "release", "reload", "canary", "http"):
        assert rise("vllmsnapshot_start_phase_seconds_count", mode="restore", phase=phase) == 2, phase
    for phase in ("preflight", "criu", "copy", "freeze", "digest", "total"):
        assert rise("vllmsnapshot_capture_phase_seconds_count", phase=phase) == 1, phase
    assert total(after, "vllmsnapshot_agent_node_capable") == 1
    assert total(after, "vllmsnapshot_agent_store_used_bytes") > 0
    assert total(after, "vllmsnapshot_build_info", component="agent") == 1


async def test_the_state_of_a_snapshot_is_told_and_goes_with_it(make: Make, system: System) -> None:
    snap = await make("stated")
    await snap.seeded()
    snap.scale(2)
    await snap.ready(2)

    async def seen() -> Samples | None:
        found = of(await scrape(system, c.COMPONENT_OPERATOR), "stated")
        return found if total(found, "vllmsnapshot_snapshot_replicas_ready") == 2 else None

    found = await system.until("the state in the operator's metrics", seen, 30)
    assert by(found, "vllmsnapshot_snapshot_replicas", "start_mode") == {"cold": 1, "restore": 1, "undecided": 0}
    assert counted(found, "vllmsnapshot_snapshot_artifacts", "state") == {"usable": 1}
    assert by(found, "vllmsnapshot_snapshot_condition", "condition")[c.READY] == 1
    assert set(by(found, "vllmsnapshot_snapshot_last_start_seconds", "start_mode")) == {"cold", "restore"}
    await snap.remove()

    async def silent() -> bool:
        return not of(await scrape(system, c.COMPONENT_OPERATOR), "stated")

    await system.until("no series of a snapshot that is gone", silent, 60)


async def test_a_start_from_zero_is_measured(make: Make, system: System) -> None:
    snap = await make("asleep")
    await snap.seeded()
    snap.scale(0)

    async def sleeps() -> bool:
        status = (await snap.get())["status"]
        return any(x["reason"] == c.Reason.SCALED_TO_ZERO for x in status["conditions"])

    await system.until("the snapshot to sleep", sleeps, 60)
    before = total(await scrape(system, c.COMPONENT_OPERATOR), "vllmsnapshot_scale_from_zero_seconds_count")
    snap.scale(1)
    await snap.ready(1)

    async def measured() -> bool:
        now = total(await scrape(system, c.COMPONENT_OPERATOR), "vllmsnapshot_scale_from_zero_seconds_count")
        return now == before + 1

    await system.until("the time from zero", measured, 30)


def test_helm_test(cluster: Cluster) -> None:
    said = cluster.helm("test", RELEASE, "--namespace", SYSTEM_NAMESPACE, "--logs")
    assert "Succeeded" in said
    for name in ("vllmsnapshots", "operator", "agent"):
        assert f"ok    {name}\n" in said
