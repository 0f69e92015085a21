"""The main job with real vLLM, and the promises that matter most: what is broken, changed or missing never gives a wrong answer.

Each cold start of vLLM takes more than a minute here, so the tests go on with what the one before has left; they run in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests import demo
from tests.cluster import Cluster
from tests.cluster import model as models
from tests.cluster.progress import Progress
from tests.node.snapshot import names, report, restarts, starts
from tests.nodeview import NodeView
from tests.observer import Observer
from tests.system import MODELS, ROOT, SYSTEM_NAMESPACE, System, condition, example, install, local_values
from vllmsnapshot.api import constants as c
from vllmsnapshot.kube import PODS, SNAPSHOTS, Object
from vllmsnapshot_child.protocol import EXIT_CODES, READY, Reason

R = c.Reason
MAIN = demo.NAME
COLD_S = 300.0
"""More than a cold start can take on a busy machine."""


@contextlib.asynccontextmanager
async def observed(system: System, name: str) -> AsyncIterator[Observer]:
    """Watch a snapshot and ask its replicas all the time; whatever they answer must be right."""

    async def ask(pod: Object) -> str | None:
        return await system.complete(pod, demo.MODEL)

    async with Observer(system, name, "default", ask, pause_s=0.5) as seen:
        yield seen
        assert seen.all_answers <= {demo.ANSWER}


async def remove(system: System, name: str) -> None:
    """Delete a snapshot and wait until its pods have given their memory back."""
    system.delete(name)
    await system.wait_gone(name)


async def usable(system: System, name: str) -> str:
    """The name of the artifact that new replicas are restored from; waits for one."""

    async def probe() -> str | None:
        record = (await system.snapshot(name)).get("status", {}).get("snapshot") or {}
        return str(record["content"]) if "content" in record else None

    return await system.until(f"an artifact of {name}", probe, COLD_S)


async def newcomer(system: System, name: str, known: set[str]) -> Object:
    """The pod that is not among these."""

    async def probe() -> Object | None:
        return next((p for p in await system.replicas(name) if p["metadata"]["name"] not in known), None)

    return await system.until(f"a new pod of {name}", probe, 30)


async def started(system: System, pod: Object, mode: str) -> Object:
    """Wait until the agent says that the pod comes up in this way; the pod then."""

    async def probe() -> Object | None:
        found = await system.kube.get(PODS, pod["metadata"]["name"], "default")
        return found if found is not None and report(found).start == mode else None

    return await system.until(f"{pod['metadata']['name']} to start {mode}", probe, 60)


async def test_main_job(cluster: Cluster) -> None:
    """As in `make demo`: one cold replica, a snapshot, two restored, a crash. Times are the demo's to judge."""
    with cluster.enter_network():
        result = await demo.run(cluster)
    demo.show(result)
    assert [fault for fault in demo.verdict(result) if not fault.startswith("speed-up")] == []
    assert [r["answer"] for r in result["replicas"]] == [demo.ANSWER] * 3
    assert result["capture"]["bytes"] > 100e6
    assert all(result[key] is not None for key in ("cold_first_token_s", "crash_recovery_s", "speedup"))
    assert all(result["capture"][key] is not None for key in ("freeze_s", "total_s"))
    restored = [r for r in result["replicas"] if r["start"] == c.START_RESTORE]
    assert all(r[key] is not None for r in restored for key in ("schedule_s", "restore_s", "release_to_token_s"))


async def test_restored_replicas_draw_their_own_samples_and_ids(system: System) -> None:
    """Asked the same without a seed they do not answer alike; with a seed they do."""
    pods = [pod for pod in await system.replicas(MAIN) if report(pod).start == c.START_RESTORE]
    assert len(pods) >= 2

    async def ask(**sampling: int) -> list[Object]:
        body = {"model": demo.MODEL, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 1, **sampling}
        to = [(pod["status"]["podIP"], int(pod["metadata"]["annotations"][c.ANNOTATION_PORT])) for pod in pods]
        replies = await asyncio.gather(*(system.post(address, port, "/v1/completions", body) for address, port in to))
        assert all(replies), replies
        return [reply for reply in replies if reply]

    free = await ask()
    for different in ("id", "text"):
        values = {reply["id"] if different == "id" else reply["choices"][0]["text"] for reply in free}
        assert len(values) == len(pods), (different, values)
    assert len({reply["choices"][0]["text"] for reply in await ask(seed=7)}) == 1


async def test_without_its_engine_process_the_api_server_does_not_go_on(system: System, node: NodeView) -> None:
    """vLLM ends its HTTP server then. The container ends with the reason, not with code 0, and the replica is restored in its pod."""
    pod = next(p for p in await system.replicas(MAIN) if report(p).start == c.START_RESTORE and restarts(p) == 0)
    uid = pod["metadata"]["uid"]
    async with observed(system, MAIN):
        assert node.kill(uid, "VLLM::EngineCore") == 1

        async def back() -> Object | None:
            found = await system.kube.get(PODS, pod["metadata"]["name"], "default") or {}
            again = restarts(found) == 1 and report(found).restarts == 1 and report(found).state == "Serving"
            return found if again and condition(found, "Ready") == "True" else None

        found = await system.until("the replica to serve again", back, COLD_S)
        (status,) = found["status"]["containerStatuses"]
        assert status["lastState"]["terminated"]["exitCode"] == EXIT_CODES[Reason.ENGINE_FAILED]
        assert found["metadata"]["uid"] == uid
        assert report(found).start == c.START_RESTORE
        assert await system.complete(found, demo.MODEL) == demo.ANSWER


def test_the_commands_of_the_quickstart_do_what_the_page_says(cluster: Cluster) -> None:
    """Every block marked `<!-- run -->`, on what the main job has left; a wait that is not fulfilled in time fails."""
    page = (ROOT / "docs/quickstart.md").read_text()
    lines = [line for block in re.findall(r"<!-- run -->\n```sh\n(.*?)```", page, re.S) for line in block.splitlines()]
    assert len(lines) > 10
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "kubectl", line
        assert cluster.kubectl(*arguments, timeout=180).strip(), line


async def test_kept_weights(system: System) -> None:
    """The weights are in the artifact: larger by them, and nothing is read from the model between release and serving."""
    name = "kept"
    manifest = example("smollm2", capture={"weights": "Keep"})
    manifest["metadata"]["name"] = name
    async with observed(system, name):
        system.apply(manifest)
        kept = (await system.wait_captured(name, timeout_s=COLD_S))["status"]["artifact"]
        (seed,) = await system.wait_ready(name, 1)
        discarded = (await system.wait_captured(MAIN))["status"]["artifact"]
        assert (kept["weights"], discarded["weights"]) == ("Keep", "Discard")
        # At least the embedding: matrices that vLLM packs for a CPU kernel are in either artifact.
        assert kept["bytes"] - discarded["bytes"] > 40e6
        system.scale(name, 2)
        pod = await newcomer(system, name, names([seed]))
        await system.wait_ready(name, 2)
        pod = await started(system, pod, c.START_RESTORE)
        assert [await system.complete(p, demo.MODEL) for p in (seed, pod)] == [demo.ANSWER] * 2
        longer = [await system.complete(p, demo.MODEL, max_tokens=16, prompt="Once upon a time") for p in (seed, pod)]
        assert longer[0]
        assert longer[0] == longer[1]
    await remove(system, name)


async def test_corrupt_artifact_never_serves(system: System, node: NodeView) -> None:
    """4 MiB of the memory image overwritten: the next replica starts cold, serves, and is captured anew."""
    content = await usable(system, MAIN)
    known = names(await system.replicas(MAIN))
    pages = node.pages(content)[-1]
    before = pages.stat()
    with pages.open("r+b") as f:
        f.seek(before.st_size // 2 & ~4095)
        f.write(os.urandom(4 << 20))
    os.utime(pages, ns=(before.st_atime_ns, before.st_mtime_ns))
    async with observed(system, MAIN) as seen:
        system.scale(MAIN, len(known) + 1)
        pod = await newcomer(system, MAIN, known)
        await system.wait_ready(MAIN, len(known) + 1, timeout_s=COLD_S)
        pod = await started(system, pod, c.START_COLD)
        said = f"{report(pod).reason}: {report(pod).message}"
        assert any(reason in said for reason in (R.ARTIFACT_CORRUPT, R.CANARY_MISMATCH, R.RESTORE_DIED)), said
        assert await system.complete(pod, demo.MODEL) == demo.ANSWER
        assert c.QUARANTINED in seen.content_conditions(content)

        async def replaced() -> str | None:
            found = await usable(system, MAIN)
            return found if found != content else None

        fresh = await system.until("another artifact", replaced, COLD_S)
        known = names(await system.replicas(MAIN))
        system.scale(MAIN, len(known) + 1)
        pod = await newcomer(system, MAIN, known)
        await system.wait_ready(MAIN, len(known) + 1)
        pod = await started(system, pod, c.START_RESTORE)
        assert report(pod).content == fresh
        assert await system.complete(pod, demo.MODEL) == demo.ANSWER


@pytest.fixture
def other_model(cluster: Cluster) -> Iterator[None]:
    """Other weights of the same shape, size and time under the model's path, for containers that start now."""
    target, copy = f"{MODELS}/smollm2", cluster.node_root / "other-model"
    shutil.copytree(models.smollm2(Progress(quiet=True)).resolve(), copy)
    for weights in copy.glob("*.safetensors"):
        times = weights.stat()
        disturb(weights)
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    cluster.exec(["mount", "--bind", copy, target])
    yield
    cluster.exec(["umount", target])
    shutil.rmtree(copy)


def disturb(path: Path) -> None:
    """Exchange the halves of every matrix of a safetensors file."""
    with path.open("r+b") as f:
        length = int.from_bytes(f.read(8), "little")
        for tensor in json.loads(f.read(length)).values():
            if len(tensor.get("shape", ())) == 2:
                start, end = (8 + length + offset for offset in tensor["data_offsets"])
                f.seek(start)
                data = f.read(end - start)
                f.seek(start)
                f.write(data[len(data) // 2 :] + data[: len(data) // 2])


@pytest.mark.usefixtures("other_model")
async def test_other_weights_never_serve(system: System) -> None:
    """The model was replaced under its path: the canary finds it, and the replica starts cold (with the new model)."""
    content = await usable(system, MAIN)
    known = names(await system.replicas(MAIN))
    async with observed(system, MAIN) as seen:
        system.scale(MAIN, len(known) + 1)
        pod = await newcomer(system, MAIN, known)
        pod = await started(system, pod, c.START_COLD)
        said = f"{report(pod).reason}: {report(pod).message}"
        assert any(reason in said for reason in (R.CANARY_MISMATCH, R.IDENTITY_MISMATCH)), said
        assert not seen.answers.get(pod["metadata"]["uid"]), "a restored engine answered with weights that are not its own"
        if R.CANARY_MISMATCH in said:

            async def quarantined() -> bool:
                return seen.content_conditions(content).get(c.QUARANTINED, {}).get("reason") == R.CANARY_MISMATCH

            await system.until(f"{content} to be quarantined", quarantined, 30)
        system.scale(MAIN, 1)
        (left,) = await system.wait_ready(MAIN, 1)
        assert left["metadata"]["name"] in known
        assert await system.complete(left, demo.MODEL) == demo.ANSWER


async def test_host_network_replicas_share_a_node(system: System) -> None:
    """Three engines at once on the node's own address, one cold and two restored, each on the port it was given."""
    manifest = example("hostnetwork", replicas=3)
    name = manifest["metadata"]["name"]
    ports = manifest["spec"]["serving"]["portRange"]
    async with observed(system, name):
        system.apply(manifest)
        pods = await system.wait_ready(name, 3, timeout_s=COLD_S)
        assert sorted(starts(pods)) == [c.START_COLD, c.START_RESTORE, c.START_RESTORE]
        given = [int(pod["metadata"]["annotations"][c.ANNOTATION_PORT]) for pod in pods]
        assert len(set(given)) == 3
        assert all(ports["start"] <= port <= ports["end"] for port in given)
        assert len({pod["status"]["podIP"] for pod in pods}) == 1
        answers = await asyncio.gather(*(system.complete(pod, demo.MODEL) for pod in pods))
        assert answers == [demo.ANSWER] * 3
    await remove(system, name)


async def test_vllms_own_snapshot_child(system: System, node: NodeView) -> None:
    """`vllm.snapshot.server` in the place of ours: it writes the same ready file and takes the same release."""
    name = "upstream"
    code = {"upstream.py": (Path(__file__).parent / "upstream.py").read_text()}
    system.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": "default"}, "data": code})
    manifest = example("smollm2")
    manifest["metadata"]["name"] = name
    manifest["spec"]["env"] = [
        {"name": "VLLMSNAPSHOT_SERVER", "value": name},
        {"name": "PYTHONPATH", "value": "/opt/upstream:/opt/vllmsnapshot"},
    ]
    template = manifest["spec"]["podTemplate"]["spec"]
    template["containers"][0]["volumeMounts"].append({"name": "code", "mountPath": "/opt/upstream", "readOnly": True})
    template["volumes"].append({"name": "code", "configMap": {"name": name}})
    async with observed(system, name):
        system.apply(manifest)
        content = await system.wait_captured(name, timeout_s=COLD_S)
        (seed,) = await system.wait_ready(name, 1)
        ready = json.loads((node.control(seed["metadata"]["uid"]) / READY).read_text())
        assert ready.keys() == {"token_ids", "text", "sampled_token_logprob"}
        assert ready["text"] == demo.ANSWER
        system.scale(name, 2)
        pod = await newcomer(system, name, names([seed]))
        await system.wait_ready(name, 2)
        pod = await started(system, pod, c.START_RESTORE)
        assert report(pod).content == content["metadata"]["name"]
        assert condition(pod, c.CONDITION_VERIFIED) == "True"
        assert [await system.complete(p, demo.MODEL) for p in (seed, pod)] == [demo.ANSWER] * 2
    await remove(system, name)


async def test_without_agents_a_new_replica_starts_cold_and_serves(cluster: Cluster, system: System) -> None:
    """The DaemonSet is deleted; what serves goes on, and what comes new needs nobody."""
    agents = f"{c.LABEL_COMPONENT}={c.COMPONENT_AGENT}"
    cluster.kubectl("-n", SYSTEM_NAMESPACE, "delete", "daemonset", "-l", agents)
    try:

        async def gone() -> bool:
            return not await system.kube.list(PODS, SYSTEM_NAMESPACE, labels=agents)

        await system.until("the agents to go", gone, 60)
        known = names(await system.replicas(MAIN))
        async with observed(system, MAIN):
            system.scale(MAIN, len(known) + 1)
            pod = await newcomer(system, MAIN, known)
            await system.wait_ready(MAIN, len(known) + 1, timeout_s=COLD_S)
            pod = await system.kube.get(PODS, pod["metadata"]["name"], "default") or {}
            assert condition(pod, c.CONDITION_VERIFIED, "reason") == R.UNATTENDED
            for replica in await system.replicas(MAIN):
                assert await system.complete(replica, demo.MODEL) == demo.ANSWER
    finally:
        install(cluster, local_values(cluster))
    # The agents take over what they find, and everything can be deleted.
    await remove(system, MAIN)
    assert await system.kube.get(SNAPSHOTS, MAIN, "default") is None
