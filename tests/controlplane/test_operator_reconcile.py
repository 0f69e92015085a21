"""The operator's passes against the real API server, with scheduler, kubelet and agents scripted. No kopf here: the tests
call `reconcile` themselves, so that every interleaving is theirs to choose (test_operator_process.py has the process)."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.controlplane.scripted_agent import CountingKube, Stopped, World, condition, delete_all, report_of
from vllmsnapshot.api import constants as c
from vllmsnapshot.controller.observe import Observer
from vllmsnapshot.controller.reconcile import Reconciler
from vllmsnapshot.controller.workqueue import Wait
from vllmsnapshot.kube import CONTENTS, EVENTS, NODES, PODS, SERVICES, SNAPSHOT_NODES, SNAPSHOTS, ApiError, Kube, Object, Resource

ROOT = Path(__file__).parents[2]
SYSTEM = "vllmsnapshot-system"
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota")
HPAS = Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
KEY = ("default", "smol")
R = c.Reason


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster("operator-tests", mode="controlplane") as cluster:
        cluster.kubectl("apply", "--server-side", "-f", ROOT / "deploy" / "crds")
        cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
        cluster.kubectl("get", "vsnap,vsnapcontent,vsnapnode", "-A")  # retries while the new storage is set up
        cluster.kubectl("create", "namespace", SYSTEM)
        with cluster.enter_network():
            yield cluster


@dataclass
class Lab:
    """One claim's world and the operator beside it."""

    kube: Kube
    counting: CountingKube
    world: World
    reconciler: Reconciler

    def restart(self, **stop: Any) -> None:
        """A new operator process."""
        self.counting = CountingKube.of(self.kube)
        for name, value in stop.items():
            setattr(self.counting, name, value)
        self.reconciler = Reconciler(self.counting, SYSTEM, share_s=0.0)

    async def apply(self, name: str = KEY[1], **spec: Any) -> Object:
        """Create the claim, or change its spec as a user would."""
        full = {"model": "/models/smol", "image": "vllm:1", **spec}
        body = {"metadata": {"namespace": "default", "name": name}, "spec": full}
        return await self.kube.apply(SNAPSHOTS, body, "user")

    async def once(self, key: tuple[str, str] = KEY) -> int:
        """One pass and the housekeeping; how many writes it made."""
        before = len(self.counting.writes)
        with contextlib.suppress(Wait):
            await self.reconciler.reconcile(key)
        await self.reconciler.housekeep()
        return len(self.counting.writes) - before

    async def settle(self, *names: str, rounds: int = 300) -> None:
        """Operator and world in turn until neither writes any more, or for so many rounds."""
        for _ in range(rounds):
            writes = sum([await self.once(("default", name)) for name in names or (KEY[1],)])
            moved = await self.world.step()
            if not writes and not moved:
                return
        if rounds < 300:
            return
        raise AssertionError(f"never at rest; last writes {self.counting.writes[-10:]}")

    async def claim(self, name: str = KEY[1]) -> Object:
        """The claim as it is."""
        found = await self.kube.get(SNAPSHOTS, name, "default")
        assert found is not None
        return found

    async def status(self) -> Object:
        """Its status."""
        return dict((await self.claim()).get("status") or {})

    async def condition(self, kind: str) -> tuple[str, str, str]:
        """Status, reason, message."""
        found = next(item for item in (await self.status())["conditions"] if item["type"] == kind)
        return found["status"], found["reason"], found["message"]

    async def pods(self) -> list[Object]:
        """Its pods by name."""
        return sorted(await self.world.pods(), key=lambda pod: pod["metadata"]["name"])

    async def contents(self) -> list[Object]:
        """All contents."""
        return await self.kube.list(CONTENTS)

    async def scale(self, replicas: int) -> Object:
        """As kubectl scale and an HPA do it."""
        path = SNAPSHOTS.path(*KEY, "scale")
        body = {"spec": {"replicas": replicas}}
        return await self.kube.request("PATCH", path, body=body, content_type="application/merge-patch+json")

    async def delete(self, name: str = KEY[1]) -> None:
        """Delete the claim."""
        await self.kube.delete(SNAPSHOTS, name, "default")

    async def starts(self) -> list[str]:
        """How the replicas came up."""
        return sorted(report_of(pod).start for pod in await self.pods())


@pytest.fixture
async def lab(cluster: Cluster) -> AsyncIterator[Lab]:
    async with await Kube.connect(str(cluster.kubeconfig)) as kube:
        counting = CountingKube.of(kube)
        lab = Lab(kube, counting, World(kube, SYSTEM), Reconciler(counting, SYSTEM, share_s=0.0))
        await lab.world.add_node("node-a")
        await lab.world.add_node("node-b")
        yield lab
        for resource in (SNAPSHOTS, PODS, SERVICES, EVENTS, QUOTAS, HPAS):
            await delete_all(kube, resource, "default")
        await delete_all(kube, PODS, SYSTEM)
        for resource in (CONTENTS, SNAPSHOT_NODES, NODES):
            await delete_all(kube, resource)


async def test_first_replica_starts_cold_is_captured_and_the_others_are_restored(lab: Lab) -> None:
    await lab.apply(replicas=3)
    await lab.once()
    await lab.once()
    assert len(await lab.pods()) == 1, "only the seed exists before the capture"
    status, reason, message = await lab.condition(c.READY)
    assert (status, reason) == ("False", R.WAITING_FOR_SNAPSHOT)
    assert "captured" in message
    await lab.settle()
    assert await lab.starts() == ["cold", "restore", "restore"]
    status_now = await lab.status()
    assert status_now["ready"] == "3/3"
    assert (status_now["restoredReplicas"], status_now["coldReplicas"], status_now["updatedReplicas"]) == (2, 1, 3)
    assert (await lab.condition(c.READY))[:2] == ("True", R.ALL_REPLICAS_READY)
    assert (await lab.condition(c.SNAPSHOT_READY))[:2] == ("True", R.CAPTURED)
    assert (await lab.condition(c.DEGRADED))[:2] == ("False", R.AS_EXPECTED)
    assert status_now["timings"]["capture"] == "2.40s"
    assert status_now["timings"]["restore"] == "1.25s"
    assert re.fullmatch(r"\d+\.\dx", status_now["timings"]["speedup"])
    [content] = await lab.contents()
    assert status_now["snapshot"]["content"] == content["metadata"]["name"]
    assert {pod["spec"]["nodeName"] for pod in await lab.pods()} == {content["spec"]["nodeName"]}, "placed at the artifact"


async def test_nothing_is_written_at_rest(lab: Lab) -> None:
    await lab.apply(replicas=2)
    await lab.settle()
    lab.restart()
    for _ in range(5):
        assert await lab.once() == 0, lab.counting.writes


async def test_events_on_transitions_only(lab: Lab) -> None:
    await lab.apply(replicas=2)
    await lab.settle()
    found = await lab.kube.list(EVENTS, "default")
    mine = [item for item in found if item["regarding"]["kind"] == "VLLMSnapshot"]
    reasons = [item["reason"] for item in sorted(mine, key=lambda item: item["eventTime"])]
    assert R.CAPTURED in reasons
    assert reasons[-1] == R.ALL_REPLICAS_READY
    assert len(reasons) == len(set(reasons)), "each said once"
    assert {item["type"] for item in mine} == {"Normal"}


# --- scaling -----------------------------------------------------------------------------------------------------------


async def test_scale_subresource_up_down_and_to_zero(lab: Lab) -> None:
    await lab.apply(replicas=1)
    await lab.settle()
    await lab.scale(4)
    await lab.settle()
    assert await lab.starts() == ["cold", "restore", "restore", "restore"]
    await lab.scale(2)
    await lab.settle()
    assert await lab.starts() == ["restore", "restore"], "the cold one went first"
    await lab.scale(0)
    await lab.settle()
    assert await lab.pods() == []
    assert (await lab.condition(c.READY))[:2] == ("True", R.SCALED_TO_ZERO)
    assert len(await lab.contents()) == 1, "the artifact is what makes the next start quick"
    await lab.scale(1)
    await lab.settle()
    assert await lab.starts() == ["restore"]


async def test_an_autoscaler_finds_what_it_needs(lab: Lab) -> None:
    await lab.apply(replicas=2)
    await lab.settle()
    scale = await lab.kube.request("GET", SNAPSHOTS.path(*KEY, "scale"))
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (2, 2)
    stray = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "stray", "namespace": "default", "labels": {c.LABEL_SNAPSHOT: "smol"}},
        "spec": {"containers": [{"name": "x", "image": "x"}]},
    }
    await lab.kube.create(PODS, stray, "test")
    matched = await lab.kube.list(PODS, "default", labels=scale["status"]["selector"])
    assert sorted(pod["metadata"]["name"] for pod in matched) == [pod["metadata"]["name"] for pod in await lab.pods()]
    target = {"apiVersion": c.API_VERSION, "kind": "VLLMSnapshot", "name": "smol"}
    hpa = {
        "metadata": {"name": "smol", "namespace": "default"},
        "spec": {"scaleTargetRef": target, "minReplicas": 1, "maxReplicas": 5},
    }
    assert (
        await lab.kube.create(HPAS, {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", **hpa}, "test")
        is not None
    )


async def test_the_operator_does_not_own_replicas(lab: Lab) -> None:
    """Else its next apply would undo what an autoscaler has set."""
    await lab.apply(replicas=1)
    await lab.settle()
    fields = (await lab.claim())["metadata"]["managedFields"]
    mine = [item for item in fields if item["manager"] == c.MANAGER_OPERATOR]
    assert mine
    assert all("f:spec" not in item["fieldsV1"] for item in mine)


# --- rollout -----------------------------------------------------------------------------------------------------------


async def test_a_new_image_rolls_through_a_seed(lab: Lab) -> None:
    await lab.apply(replicas=3)
    await lab.settle()
    [before] = await lab.contents()
    await lab.apply(replicas=3, image="vllm:2")
    for _ in range(200):
        writes = await lab.once()
        pods = [pod for pod in await lab.pods() if "deletionTimestamp" not in pod["metadata"]]
        assert len(pods) <= 4
        assert sum(condition(pod, "Ready") == "True" for pod in pods) >= 3
        if not await lab.world.step() and not writes:
            break
    pods = await lab.pods()
    assert {pod["spec"]["containers"][0]["image"] for pod in pods} == {"vllm:2"}
    assert await lab.starts() == ["cold", "restore", "restore"]
    [after] = await lab.contents()
    assert after["spec"]["identity"] != before["spec"]["identity"], "the old artifact is gone once nobody needs it"
    assert (await lab.condition(c.READY))[:2] == ("True", R.ALL_REPLICAS_READY)


async def test_a_new_port_rolls_pods_that_restore_from_the_same_artifact(lab: Lab) -> None:
    await lab.apply(replicas=2)
    await lab.settle()
    [before] = await lab.contents()
    await lab.apply(replicas=2, serving={"port": 9000})
    await lab.settle()
    assert await lab.starts() == ["restore", "restore"]
    assert [item["metadata"]["uid"] for item in await lab.contents()] == [before["metadata"]["uid"]]
    assert {pod["metadata"]["annotations"][c.ANNOTATION_PORT] for pod in await lab.pods()} == {"9000"}
    service = await lab.kube.get(SERVICES, "smol", "default")
    assert service is not None
    assert [port["port"] for port in service["spec"]["ports"]] == [9000], "and the old port is not left beside it"


async def test_two_artifacts_are_kept_where_the_user_wants_them_for_going_back(lab: Lab) -> None:
    await lab.world.remove_agent("node-b")
    await lab.kube.delete(NODES, "node-b")
    await lab.apply(replicas=1, artifact={"retain": 2})
    await lab.settle()
    for image in ("vllm:2", "vllm:3"):
        await lab.apply(replicas=1, artifact={"retain": 2}, image=image)
        await lab.settle()
    assert len(await lab.contents()) == 2
    await lab.apply(replicas=1, artifact={"retain": 2}, image="vllm:2")
    await lab.settle()
    assert await lab.starts() == ["restore"]


# --- captures that fail ------------------------------------------------------------------------------------------------


async def test_failing_captures_end_with_cold_replicas_and_a_reason(lab: Lab) -> None:
    lab.world.capture = "fail"
    await lab.apply(replicas=2, capture={"retries": 0})
    await lab.settle()
    assert await lab.starts() == ["cold", "cold"]
    assert (await lab.status())["ready"] == "2/2"
    status, reason, message = await lab.condition(c.DEGRADED)
    assert (status, reason) == ("True", R.CAPTURE_FAILED)
    assert R.DUMP_FAILED in message
    assert (await lab.condition(c.SNAPSHOT_READY))[:2] == ("False", R.CAPTURE_FAILED)
    # What the message says helps: delete the failed content, start another replica.
    lab.world.capture = "succeed"
    for item in await lab.contents():
        await lab.kube.delete(CONTENTS, item["metadata"]["name"])
    await lab.settle()
    await lab.scale(4)
    await lab.settle()
    assert (await lab.condition(c.SNAPSHOT_READY))[:2] == ("True", R.CAPTURED)
    assert await lab.starts() == ["cold", "cold", "cold", "restore"]


async def test_a_quarantined_artifact_is_replaced_by_the_next_cold_start(lab: Lab) -> None:
    await lab.apply(replicas=1)
    await lab.settle()
    [bad] = await lab.contents()
    await lab.world.answer(bad, c.QUARANTINED, R.CANARY_MISMATCH)
    await lab.settle()
    assert (await lab.condition(c.SNAPSHOT_READY))[:2] == ("False", R.ARTIFACT_QUARANTINED)
    assert (await lab.condition(c.DEGRADED))[:2] == ("True", R.ARTIFACT_QUARANTINED)
    await lab.world.finish((await lab.pods())[0]["metadata"]["name"])
    await lab.kube.delete(PODS, (await lab.pods())[0]["metadata"]["name"], "default", grace_period_s=0)
    await lab.settle()
    assert await lab.starts() == ["cold"]
    [good] = await lab.contents()
    assert good["metadata"]["uid"] != bad["metadata"]["uid"]
    assert (await lab.condition(c.DEGRADED))[0] == "False"


async def test_a_changed_node_is_reported_before_anybody_restores(lab: Lab) -> None:
    await lab.apply(replicas=1)
    await lab.settle()
    [content] = await lab.contents()
    lab.world.environment = {"kernel": "7.0"}
    await lab.world.describe_node(content["spec"]["nodeName"])
    await lab.settle()
    status, reason, message = await lab.condition(c.STALE)
    assert (status, reason) == ("True", R.ENVIRONMENT_CHANGED)
    assert "kernel was '6.18' at capture and is '7.0'" in message


# --- without agents ----------------------------------------------------------------------------------------------------


async def test_without_agents_replicas_start_and_serve(lab: Lab) -> None:
    for node in ("node-a", "node-b"):
        await lab.world.remove_agent(node)
    await lab.apply(replicas=2)
    await lab.settle()
    assert (await lab.status())["ready"] == "2/2"
    [verified] = {
        item["reason"] for pod in await lab.pods() for item in pod["status"]["conditions"] if item["type"] == c.CONDITION_VERIFIED
    }
    assert verified == R.UNATTENDED
    assert await lab.contents() == []
    assert (await lab.condition(c.SNAPSHOT_READY))[:2] == ("False", R.UNATTENDED)
    # The agent comes back and takes the condition over.
    for node in ("node-a", "node-b"):
        await lab.world.add_agent(node)
    await lab.settle()
    assert (await lab.status())["ready"] == "2/2"


async def test_an_agent_that_is_not_ready_is_none(lab: Lab) -> None:
    for node in ("node-a", "node-b"):
        await lab.world.remove_agent(node)
        await lab.world.add_agent(node, ready=False)
    await lab.apply(replicas=1)
    await lab.settle()
    assert (await lab.status())["ready"] == "1/1"


# --- what belongs to others --------------------------------------------------------------------------------------------


async def test_a_foreign_service_is_left_alone(lab: Lab) -> None:
    theirs = {"metadata": {"name": "smol", "namespace": "default"}, "spec": {"ports": [{"port": 1}], "selector": {"a": "b"}}}
    await lab.kube.create(SERVICES, {"apiVersion": "v1", "kind": "Service", **theirs}, "test")
    await lab.apply(replicas=1)
    await lab.settle()
    there = await lab.kube.get(SERVICES, "smol", "default")
    assert there is not None
    assert there["spec"]["selector"] == {"a": "b"}
    assert "ownerReferences" not in there["metadata"]
    assert (await lab.condition(c.DEGRADED))[:2] == ("True", R.NAME_CONFLICT)
    assert (await lab.status())["ready"] == "1/1", "the replicas do not suffer"
    warnings = [item["reason"] for item in await lab.kube.list(EVENTS, "default") if item["type"] == "Warning"]
    assert warnings == [R.NAME_CONFLICT]
    await lab.delete()
    await lab.settle()
    assert await lab.kube.get(SERVICES, "smol", "default") is not None
    await lab.kube.delete(SERVICES, "smol", "default")


async def test_service_is_removed_when_it_is_not_wanted(lab: Lab) -> None:
    await lab.apply(replicas=0)
    await lab.settle()
    assert await lab.kube.get(SERVICES, "smol", "default") is not None
    await lab.apply(replicas=0, serving={"service": "Disabled"})
    await lab.settle()
    assert await lab.kube.get(SERVICES, "smol", "default") is None


async def test_a_recreated_claim_owns_nothing_of_its_predecessor(lab: Lab) -> None:
    await lab.apply(replicas=1)
    await lab.settle()
    [old] = await lab.pods()
    lab.world.kubelet = False  # its pod hangs in termination
    await lab.kube.delete(PODS, old["metadata"]["name"], "default")
    await lab.delete()
    await lab.settle()
    assert await lab.kube.get(SNAPSHOTS, "smol", "default") is None
    await lab.apply(replicas=1)
    lab.world.schedule = False
    await lab.settle()
    names = [pod["metadata"]["name"] for pod in await lab.pods()]
    assert old["metadata"]["name"] in names
    assert len(names) == 2, "the name that is still taken is not waited for"
    assert (await lab.status())["replicas"] == 1


async def test_a_foreign_pod_of_our_name_is_not_adopted(lab: Lab) -> None:
    await lab.apply(replicas=1)
    await lab.settle()
    [pod] = await lab.pods()
    name = pod["metadata"]["name"]
    await lab.kube.delete(PODS, name, "default", grace_period_s=0)
    body = {"metadata": {"name": name, "namespace": "default"}, "spec": {"containers": [{"name": "x", "image": "x"}]}}
    await lab.kube.create(PODS, {"apiVersion": "v1", "kind": "Pod", **body}, "test")
    await lab.settle(rounds=5)
    assert (await lab.condition(c.DEGRADED))[:2] == ("True", R.NAME_CONFLICT)
    await lab.kube.delete(PODS, name, "default", grace_period_s=0)
    await lab.settle()
    assert (await lab.status())["ready"] == "1/1"


async def test_refused_pods_are_reported_and_come_when_they_may(lab: Lab) -> None:
    quota = {"metadata": {"name": "none", "namespace": "default"}, "spec": {"hard": {"pods": "0"}}}
    await lab.kube.create(QUOTAS, {"apiVersion": "v1", "kind": "ResourceQuota", **quota}, "test")
    body = {"metadata": {"name": "none", "namespace": "default"}, "status": {"hard": {"pods": "0"}, "used": {"pods": "0"}}}
    await lab.kube.apply(QUOTAS, body, "test", subresource="status")
    await lab.apply(replicas=2, capture={"policy": "Disabled"})
    await lab.once()
    status, reason, message = await lab.condition(c.DEGRADED)
    assert (status, reason) == ("True", R.POD_REJECTED)
    assert "quota" in message
    with pytest.raises(Wait, match="quota"):
        await lab.reconciler.reconcile(KEY)
    await lab.kube.delete(QUOTAS, "none", "default")
    for _ in range(100):
        await lab.settle()
        if (await lab.status())["ready"] == "2/2":
            break
    assert (await lab.condition(c.DEGRADED))[0] == "False"


async def test_unschedulable_pods_are_reported_with_the_schedulers_words(lab: Lab) -> None:
    lab.world.schedule = False
    await lab.apply(replicas=1)
    await lab.once()
    [pod] = await lab.pods()
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: no GPU left"}
    body = {"metadata": {"name": pod["metadata"]["name"], "namespace": "default"}, "status": {"conditions": [unschedulable]}}
    await lab.kube.apply(PODS, body, "scheduler", subresource="status")
    await lab.once()
    status, reason, message = await lab.condition(c.DEGRADED)
    assert (status, reason) == ("True", R.POD_UNSCHEDULABLE)
    assert "no GPU left" in message
    assert "no GPU left" in (await lab.condition(c.READY))[2]


async def test_an_overlay_that_cannot_be_merged_is_reported_and_changes_nothing(lab: Lab) -> None:
    await lab.apply(replicas=1)
    await lab.settle()
    await lab.apply(replicas=3, podTemplate={"spec": {"containers": [{"name": "engine", "image": "other"}]}})
    await lab.settle()
    status, reason, message = await lab.condition(c.DEGRADED)
    assert (status, reason) == ("True", R.INVALID_SPEC)
    assert "use spec.image" in message
    assert (await lab.condition(c.READY))[:2] == ("False", R.INVALID_SPEC)
    assert len(await lab.pods()) == 1
    await lab.apply(replicas=3)
    await lab.settle()
    assert (await lab.status())["ready"] == "3/3"
    assert (await lab.condition(c.DEGRADED))[0] == "False"


# --- hostNetwork -------------------------------------------------------------------------------------------------------


async def test_host_network_replicas_get_ports_of_their_own_in_the_whole_cluster(lab: Lab) -> None:
    serving = {"hostNetwork": "Enabled", "portRange": {"start": 20000, "end": 20003}}
    await lab.apply("smol", replicas=2, serving=serving, capture={"policy": "Disabled"})
    await lab.apply("other", replicas=3, serving=serving, capture={"policy": "Disabled"})
    # Both at once, as two workers would.
    await asyncio.gather(*(lab.reconciler.reconcile(("default", name)) for name in ("smol", "other")), return_exceptions=True)
    ports = sorted(pod["spec"]["containers"][0]["ports"][0]["hostPort"] for pod in await lab.pods())
    assert ports == [20000, 20001, 20002, 20003]
    await lab.settle("smol", "other")
    conditions = [item for name in ("smol", "other") for item in (await lab.claim(name))["status"]["conditions"]]
    assert [item["reason"] for item in conditions if item["type"] == c.DEGRADED and item["status"] == "True"] == [R.NO_PORT_LEFT]
    wider = {**serving, "portRange": {"start": 20000, "end": 20010}}
    await lab.apply("other", replicas=3, serving=wider, capture={"policy": "Disabled"})
    await lab.settle("smol", "other")
    ports = [pod["spec"]["containers"][0]["ports"][0]["hostPort"] for pod in await lab.pods()]
    assert len(set(ports)) == len(ports) == 5
    assert all(
        pod["metadata"]["annotations"][c.ANNOTATION_PORT] == str(port) for pod, port in zip(await lab.pods(), ports, strict=True)
    )


# --- nodes -------------------------------------------------------------------------------------------------------------


async def test_contents_of_a_vanished_node_are_buried(lab: Lab) -> None:
    await lab.apply(replicas=1)
    await lab.settle()
    [content] = await lab.contents()
    node = content["spec"]["nodeName"]
    await lab.world.remove_agent(node)
    await lab.kube.delete(NODES, node)
    [pod] = await lab.pods()
    await lab.kube.delete(PODS, pod["metadata"]["name"], "default", grace_period_s=0)
    await lab.settle()
    [after] = await lab.contents()
    assert after["spec"]["nodeName"] != node
    assert (await lab.status())["ready"] == "1/1"


async def test_retained_contents_of_a_deleted_claim_stay_until_their_node_goes(lab: Lab) -> None:
    await lab.apply(replicas=1, artifact={"deletionPolicy": "Retain"})
    await lab.settle()
    await lab.delete()
    await lab.settle()
    assert await lab.kube.get(SNAPSHOTS, "smol", "default") is None
    [content] = await lab.contents()
    assert content["metadata"]["labels"][c.LABEL_SNAPSHOT_UID] == content["spec"]["snapshotRef"]["uid"]
    assert "deletionTimestamp" not in content["metadata"]
    await lab.world.remove_agent(content["spec"]["nodeName"])
    await lab.kube.delete(NODES, content["spec"]["nodeName"])
    await lab.settle()
    assert await lab.contents() == []


async def test_an_evicted_pod_is_replaced_and_its_replacement_restored(lab: Lab) -> None:
    await lab.apply(replicas=1)
    await lab.settle()
    [pod] = await lab.pods()
    await lab.world.finish(pod["metadata"]["name"])
    seen = await lab.reconciler.observer.claim(KEY)
    assert seen is not None
    assert seen[1].pods[0].finished
    later = Reconciler(lab.counting, SYSTEM, share_s=0.0, clock=lambda: 4e9)  # past the pause for pods that finish at once
    await later.reconcile(KEY)
    await lab.settle()
    assert await lab.starts() == ["restore"]
    assert [item["metadata"]["uid"] for item in await lab.pods()] != [pod["metadata"]["uid"]]


# --- deletion, crashes -------------------------------------------------------------------------------------------------


async def test_deletion_in_every_phase_leaves_nothing(lab: Lab) -> None:
    phase = 0
    while True:
        await lab.apply(replicas=2)
        await lab.settle(rounds=phase)
        at_rest = (await lab.status()).get("ready") == "2/2"
        await lab.delete()
        await lab.settle()
        assert await lab.kube.get(SNAPSHOTS, "smol", "default") is None, phase
        assert await lab.contents() == [], phase
        # Without our finalizer the pods are the garbage collector's, which need not run here.
        await delete_all(lab.kube, PODS, "default")
        await delete_all(lab.kube, SERVICES, "default")
        if at_rest:
            break
        phase += 1
    assert phase > 5


async def test_deletion_does_not_wait_for_a_node_that_is_down(lab: Lab) -> None:
    await lab.apply(replicas=1)
    await lab.settle()
    [content] = await lab.contents()
    await lab.world.remove_agent(content["spec"]["nodeName"])
    await lab.delete()
    await lab.settle()
    assert await lab.kube.get(SNAPSHOTS, "smol", "default") is None
    [content] = await lab.contents()
    assert "deletionTimestamp" in content["metadata"], "its agent removes the files when it is back"
    await lab.world.add_agent(content["spec"]["nodeName"])
    await lab.settle()
    assert await lab.contents() == []


@dataclass
class Life:
    """One of many claims that live at the same time in one world, each with an operator that fails at another write."""

    lab: Lab
    name: str
    observer: Observer
    stop_at: int | None = None
    lose_at: int | None = None
    failed: bool = False

    def __post_init__(self) -> None:
        self.start()
        self.kube.stop_at, self.kube.lose_at = self.stop_at, self.lose_at

    def start(self) -> None:
        """A new operator process for this claim."""
        self.kube = CountingKube.of(self.lab.kube)
        self.reconciler = Reconciler(self.kube, SYSTEM)
        self.reconciler.observer = self.observer

    async def once(self) -> int:
        """One pass; how many writes it made. If the process dies in it, there is a new one afterwards."""
        before = len(self.kube.writes)
        try:
            await self.reconciler.reconcile(("default", self.name))
        except Stopped:
            self.failed = True
            self.start()
            return 1
        except ApiError as e:
            if "answer was lost" not in e.message:
                raise
            self.failed = True
        return len(self.kube.writes) - before

    async def outcome(self) -> Any:
        """What must be the same, however often the operator died on the way."""
        claim = await self.lab.claim(self.name)
        mine = f"{c.LABEL_SNAPSHOT_UID}={claim['metadata']['uid']}"
        pods = await self.lab.kube.list(PODS, "default", labels=mine)
        return (
            {item["type"]: (item["status"], item["reason"]) for item in claim["status"]["conditions"]},
            sorted((pod["spec"]["containers"][0]["image"], report_of(pod).start) for pod in pods),
            claim["status"]["ready"],
            len(await self.lab.kube.list(CONTENTS, labels=mine)),
            len(await self.lab.kube.list(SERVICES, "default", labels=mine)),
        )


async def live(lab: Lab, lives: list[Life]) -> None:
    """Create, roll and scale up, scale down."""
    for spec in ({"replicas": 1}, {"replicas": 2, "image": "vllm:2"}, {"replicas": 1, "image": "vllm:2"}):
        for one in lives:
            await lab.apply(one.name, **spec)
        for _ in range(100):
            writes = sum([await one.once() for one in lives])
            moved = False
            while await lab.world.step():
                moved = True
            if not writes and not moved:
                break
        else:
            raise AssertionError("never at rest")


async def test_the_operator_may_die_and_any_answer_may_be_lost_at_any_write(lab: Lab) -> None:
    """For every n: a process ends before the n-th write of a claim's life and the next one carries on; in another life the
    n-th write is committed and its answer lost. Every life ends as the undisturbed one does, and then nothing is written."""
    lab.world.patient = True
    observer = Observer(lab.kube, SYSTEM, share_s=3600.0)  # nodes and agents stay as they are here
    calm = Life(lab, "calm", observer)
    await live(lab, [calm])
    wanted, total = await calm.outcome(), len(calm.kube.writes)
    assert wanted[1:] == ([("vllm:2", "restore")], "1/1", 1, 1)
    assert total > 15
    lives = [Life(lab, f"dies{n}", observer, stop_at=n) for n in range(1, total + 1)]
    lives += [Life(lab, f"loses{n}", observer, lose_at=n) for n in range(1, total + 1)]
    await live(lab, lives)
    for one in lives:
        assert await one.outcome() == wanted, one.name
        assert await one.once() == 0, one.name
    # A life among many is paced otherwise and may be shorter; and a lost answer to an event is nobody's failure.
    assert sum(one.failed for one in lives) > len(lives) / 2
    # And in the end, all go.
    for one in lives:
        await lab.delete(one.name)
        await one.once()
        await one.once()
        assert await lab.kube.get(SNAPSHOTS, one.name, "default") is None


async def test_two_operators_at_once_do_no_harm(lab: Lab) -> None:
    """It must not happen (Recreate), and if it does there are no more pods than wanted and one artifact."""
    await lab.apply(replicas=3)
    other = Reconciler(CountingKube.of(lab.kube), SYSTEM, share_s=0.0)
    for _ in range(100):
        await asyncio.gather(lab.reconciler.reconcile(KEY), other.reconcile(KEY), return_exceptions=True)
        assert len(await lab.pods()) <= 3
        if not await lab.world.step():
            break
    await lab.settle()
    assert (await lab.status())["ready"] == "3/3"
    assert len(await lab.contents()) == 1
    assert await lab.once() == 0
