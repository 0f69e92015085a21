"""The main job on GPUs: two fake ones (tests/cluster/gpus.py), scheduled by the real kubelet, moved by the agent's real code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import Cluster, ClusterError
from tests.cluster.gpus import RESOURCE, Gpus
from tests.node.snapshot import Make, Snapshot, answer, names, report, restarts, starts
from tests.nodeview import NodeView
from tests.system import System, condition
from vllmsnapshot.api import constants as c
from vllmsnapshot.kube import SNAPSHOT_NODES, Object

R = c.Reason
ON_GPU: dict[str, Any] = {"resources": {"limits": {RESOURCE: 1}}, "args": ["--gpu"]}
ANSWER = answer(gpu=True)
NO_GPU = f"Insufficient {RESOURCE}"


@pytest.fixture
def gpus(cluster: Cluster) -> Iterator[Gpus]:
    """The node's GPUs and their driver; what a test does to them is undone."""
    yield cluster.gpus
    cluster.gpus.inject()
    cluster.gpus.offer()


def uid(pod: Object) -> str:
    return str(pod["metadata"]["uid"])


def gpu_of(node: NodeView, pod: Object) -> int:
    """The GPU that the kubelet has given to a replica; the engine has it open, and no other."""
    (number,) = node.gpus(uid(pod))
    assert node.environment(uid(pod))["NVIDIA_VISIBLE_DEVICES"] == Gpus.uuid(number)
    return number


async def pending(snap: Snapshot, pod: Object) -> Object:
    """Wait until the status says that there is no GPU for this replica; the VLLMSnapshot."""
    name = pod["metadata"]["name"]

    async def told() -> Object | None:
        found = await snap.get()
        messages = [condition(found, kind, "message") or "" for kind in (c.READY, c.PROGRESSING, c.DEGRADED)]
        return found if all(f"replica {name} is not scheduled: " in text and NO_GPU in text for text in messages) else None

    found = await snap.system.until(f"the status to tell that {name} has no GPU", told, 30)
    assert (condition(found, c.READY), condition(found, c.PROGRESSING), condition(found, c.DEGRADED)) == ("False", "True", "True")
    assert condition(found, c.PROGRESSING, "reason") == condition(found, c.DEGRADED, "reason") == R.POD_UNSCHEDULABLE
    return found


async def well(snap: Snapshot) -> Object:
    """Wait until the status says that nothing is amiss."""

    async def probe() -> Object | None:
        found = await snap.get()
        state = [condition(found, kind) for kind in (c.READY, c.PROGRESSING, c.DEGRADED)]
        return found if state == ["True", "False", "False"] else None

    return await snap.system.until(f"{snap.name} to be well", probe, 30)


async def test_two_gpus_three_replicas(make: Make, system: System, node: NodeView, gpus: Gpus) -> None:
    """Two serve, one waits and the status says why; when a GPU becomes free, it is restored there: on another than captured."""
    other = await make("gpu-other", capture={"policy": "Disabled"}, **ON_GPU)
    (holder,) = await other.ready(1)
    snap = await make("gpu", **ON_GPU)
    seed, content = await snap.seeded()
    assert await snap.ask(seed) == await other.ask(holder) == ANSWER
    assert {gpu_of(node, holder), gpu_of(node, seed)} == {0, 1}

    snap.scale(2)
    third = await snap.newcomer([seed])
    status = (await pending(snap, third))["status"]
    assert (status["ready"], status["readyReplicas"], status["replicas"]) == ("1/2", 1, 2)
    for told in (system.backend.kubectl("get", "vsnap", "gpu", "-o", "wide"), system.backend.kubectl("describe", "vsnap", "gpu")):
        assert third["metadata"]["name"] in told
        assert NO_GPU in told

    free = gpu_of(node, holder)
    before = len(gpus.calls())
    other.scale(0)
    pods = await snap.ready(2)
    assert names(pods) == names([seed, third]), "the one that waited, no other"
    assert starts(pods) == [c.START_COLD, c.START_RESTORE]
    assert report(pods[1]).content == content
    assert [gpu_of(node, pod) for pod in pods] == [1 - free, free]
    assert [await snap.ask(pod) for pod in pods] == [ANSWER, ANSWER]
    # The driver was told of the other GPU.
    (restore,) = [line.split() for line in gpus.calls()[before:] if line.startswith("Restore ")]
    assert restore[2:] == [Gpus.uuid(n).removeprefix("GPU-").replace("-", "") for n in (1 - free, free)]
    await well(snap)

    snap.scale(3)
    await pending(snap, await snap.newcomer(pods))
    snap.scale(2)
    await well(snap)
    assert names(await snap.pods()) == names(pods), "the one that waited goes first"
    snap.never_wrong(ANSWER)
    other.never_wrong(ANSWER)
    facts = await system.kube.get(SNAPSHOT_NODES, pods[0]["spec"]["nodeName"])
    assert facts is not None
    assert facts["status"]["environment"]["gpuProduct"] == "Fake H200"


async def test_a_rollout_on_a_full_node(make: Make, system: System, node: NodeView, gpus: Gpus) -> None:
    """Nobody may be missing, so it stands still and says what would let it go on; allowed that, it ends by itself."""
    snap = await make("gpu-roll", **ON_GPU)
    await snap.seeded()
    snap.scale(2)
    old = await snap.ready(2)
    snap.seen.mark()
    snap.apply(args=["--gpu", "--memory-mib=3"])
    newcomer = await snap.newcomer(old)
    stuck = await pending(snap, newcomer)
    assert "rollout.maxUnavailable 0" in (condition(stuck, c.DEGRADED, "message") or "")
    assert snap.seen.fewest == 2

    snap.apply(rollout={"maxUnavailable": 1})

    async def rolled() -> bool:
        return not names(await snap.pods()) & names(old) and condition(await snap.get(), c.READY) == "True"

    await system.until("the rollout to end", rolled, 90)
    new = await snap.ready(2)
    assert starts(new) == [c.START_COLD, c.START_RESTORE]
    assert {gpu_of(node, pod) for pod in new} == {0, 1}
    assert [await snap.ask(pod) for pod in new] == [answer(gpu=True, mib=3)] * 2
    assert snap.seen.fewest == 1
    snap.never_wrong(ANSWER, answer(gpu=True, mib=3))


async def test_a_crashed_engine_is_restored_on_its_own_gpu(make: Make, node: NodeView, gpus: Gpus) -> None:
    snap = await make("gpu-crash", **ON_GPU)
    seed, content = await snap.seeded()
    number, allocated = gpu_of(node, seed), len(gpus.allocations())
    assert node.kill(uid(seed), "vllmsnapshot_child.server")

    async def back() -> Object | None:
        pod = await snap.pod(seed["metadata"]["name"])
        told = (report(pod).restarts, report(pod).state) == (1, "Serving")
        return pod if told and condition(pod, "Ready") == "True" else None

    pod = await snap.system.until("the pod to be ready again", back, 60)
    assert (report(pod).start, report(pod).content) == (c.START_RESTORE, content)
    assert gpu_of(node, pod) == number
    assert len(gpus.allocations()) == allocated, "a container that is started again keeps its GPU"
    assert await snap.ask(pod) == ANSWER
    snap.never_wrong(ANSWER)


@pytest.mark.parametrize(
    ("fault", "reason", "ended"),
    [
        ("Lock 0 error 600", R.GPU_CHECKPOINT_FAILED, 0),
        ("Checkpoint 0 late 999", R.GPU_CHECKPOINT_FAILED, 0),
        ("Restore 0 error 999", R.GPU_STATE_LOST, 1),
    ],
    ids=["lock-fails", "checkpoint-fails-when-done", "the-way-back-fails"],
)
async def test_a_failed_capture_leaves_a_serving_replica(
    fault: str, reason: str, ended: int, make: Make, system: System, node: NodeView, gpus: Gpus
) -> None:
    gpus.inject(fault)
    snap = await make(f"gpu-{fault.split()[0].lower()}", capture={"retries": 0}, **ON_GPU)
    (pod,) = await snap.ready(1)
    assert await snap.ask(pod) == ANSWER
    assert (restarts(pod), report(pod).start) == (ended, c.START_COLD)

    async def told() -> str | None:
        found = await snap.get()
        text = condition(found, c.SNAPSHOT_READY, "message")
        return text if condition(found, c.SNAPSHOT_READY, "reason") == R.CAPTURE_FAILED else None

    text = await system.until("the status to tell of the failed capture", told, 30)
    call, _, _, code = fault.split()
    assert reason in text
    assert f"cuCheckpointProcess{call}" in text
    assert f"({code})" in text
    (content,) = await snap.contents()
    assert node.artifact(content["metadata"]["name"]) is None
    snap.never_wrong(ANSWER)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("Restore 1 error 999", R.GPU_RESTORE_FAILED),
        ("Unlock 1 late 999", R.GPU_RESTORE_FAILED),
        ("Restore 1 lose", R.CANARY_MISMATCH),
    ],
    ids=["restore-fails", "unlock-fails-when-done", "a-byte-of-the-gpu-is-lost"],
)
async def test_a_failed_restore_starts_cold_in_the_same_pod(
    fault: str, reason: str, make: Make, system: System, node: NodeView, gpus: Gpus
) -> None:
    case = "-".join(fault.lower().split())
    snap = await make(f"gpu-{case}", restore={"failureBudget": 1}, **ON_GPU)
    seed, content = await snap.seeded()
    gpus.inject(fault)
    snap.scale(2)
    second = await snap.newcomer([seed])
    pods = await snap.ready(2)
    assert names(pods) == names([seed, second])
    pod = await snap.pod(second["metadata"]["name"])
    assert (report(pod).start, restarts(pod)) == (c.START_COLD, 0)
    assert reason in f"{report(pod).reason}: {report(pod).message}"
    assert gpu_of(node, pod) != gpu_of(node, seed)
    assert [await snap.ask(p) for p in pods] == [ANSWER, ANSWER]
    snap.never_wrong(ANSWER)

    async def judged() -> bool:
        return c.QUARANTINED in snap.seen.content_conditions(content)

    await system.until("the artifact to be quarantined", judged, 30)


async def test_after_running_out_of_memory_the_pod_is_replaced(make: Make, gpus: Gpus) -> None:
    """What the driver has left of it is not trusted; the artifact is (so far), and so the next pod is restored."""
    snap = await make("gpu-oom", **ON_GPU)
    seed, content = await snap.seeded()
    gpus.inject("Restore 1 error 2")
    snap.scale(2)
    second = await snap.newcomer([seed])
    third = await snap.newcomer([seed, second])
    pods = await snap.ready(2)
    assert names(pods) == names([seed, third])
    assert starts(pods) == [c.START_COLD, c.START_RESTORE]
    assert R.GPU_OUT_OF_MEMORY in {said.reason for said in snap.seen.reports(uid(second))}
    assert c.QUARANTINED not in snap.seen.content_conditions(content)
    assert [await snap.ask(pod) for pod in pods] == [ANSWER, ANSWER]
    snap.never_wrong(ANSWER)


async def test_a_gpu_that_falls_ill_is_given_to_nobody(cluster: Cluster, make: Make, system: System, gpus: Gpus) -> None:
    gpus.offer(ill=[1])

    async def one() -> bool:
        return cluster.allocatable_gpus() == 1

    await system.until("the kubelet to see it", one, 30)
    snap = await make("gpu-ill", **ON_GPU)
    seed, _ = await snap.seeded()
    snap.scale(2)
    second = await snap.newcomer([seed])
    await pending(snap, second)
    gpus.offer()
    assert names(await snap.ready(2)) == names([seed, second])


async def test_a_kubelet_that_restarts_knows_the_gpus_again(
    cluster: Cluster, make: Make, system: System, node: NodeView, gpus: Gpus
) -> None:
    snap = await make("gpu-kubelet", **ON_GPU)
    seed, _ = await snap.seeded()
    log = cluster.logs_dir / "deviceplugin.log"
    registered = log.read_text().count("registered with the kubelet")
    cluster.stop_daemon("kubelet")
    cluster.start_daemon("kubelet")

    async def again() -> bool:
        if log.read_text().count("registered with the kubelet") == registered:
            return False
        try:
            # Known again: before, GPUs of pods that are long gone count as taken, and the kubelet refuses a new pod.
            return bool(snap.log(seed))
        except ClusterError:
            return False

    await system.until("the kubelet to know devices and pods again", again, 60)
    snap.scale(2)
    pods = await snap.ready(2)
    assert [restarts(pod) for pod in pods] == [0, 0]
    assert {gpu_of(node, pod) for pod in pods} == {0, 1}
    assert starts(pods) == [c.START_COLD, c.START_RESTORE]
    snap.never_wrong(ANSWER)
