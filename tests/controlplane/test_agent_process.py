"""The agent's process against the real API server: watches, server-side apply, finalizers, events, inotify, health, restarts.

The kubelet, init and the server are played by the test, the node's operations are scripted. Nothing sleeps: a wait is a watch
on the API or on the control volume.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cluster import Cluster
from tests.controlplane.scripted_agent import delete_all
from tests.unit.agentbox import NODE, PARIS, ROME, ScriptedOps, artifact, content_object, pod_object
from vllmsnapshot import objects
from vllmsnapshot.agent import app, facts
from vllmsnapshot.agent.app import Agent
from vllmsnapshot.agent.config import Config
from vllmsnapshot.agent.control import control_path, read_files
from vllmsnapshot.agent.watcher import Watcher
from vllmsnapshot.api import constants as c
from vllmsnapshot.api.constants import Reason
from vllmsnapshot.kube import CONTENTS, EVENTS, NODES, PODS, SNAPSHOT_NODES, SNAPSHOTS, ApiError, Kube, Object, Resource
from vllmsnapshot_child import protocol
from vllmsnapshot_child.protocol import Hello, Message, Oracle, Ready, Serving

ROOT = Path(__file__).parents[2]
SNAPSHOT = {"apiVersion": c.API_VERSION, "kind": "VLLMSnapshot", "metadata": {"name": "smol", "namespace": "default"}}
LIMIT_S = 60.0
"""Only so that a hang fails instead of hanging; nothing is measured."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster("agent-proc", mode="controlplane") as cluster:
        cluster.kubectl("apply", "--server-side", "-f", ROOT / "deploy" / "crds")
        cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
        with cluster.enter_network():
            yield cluster


class Bench:
    """A node made of a directory, and the agent on it, with a client of its own where one is given."""

    def __init__(self, kube: Kube, root: Path, port: int = 0, *, agent: Kube | None = None) -> None:
        self.kube = kube
        self.agent_kube = agent or kube
        self.kubelet = str(root / "kubelet")
        os.makedirs(os.path.join(self.kubelet, "pods"))
        self.ops = ScriptedOps(lambda _: None)
        self.answers: dict[int, Oracle] = {}
        self.config = Config(
            node_name=NODE,
            kubelet_dir=self.kubelet,
            store_dir=str(root / "store"),
            port=port,
            host="127.0.0.1",
            resync_seconds=3600.0,
        )
        self.agent: Agent | None = None
        self._task: asyncio.Task[None] | None = None
        self.snapshot_uid = ""

    async def start(self) -> Agent:
        """An agent that knows nothing but what is written."""

        async def ask(_address: str, port: int) -> Oracle | None:
            return self.answers.get(port)

        self.agent = Agent(self.config, self.ops, self.agent_kube, ask)
        self._task = asyncio.create_task(self.agent.run())
        return self.agent

    async def stop(self) -> None:
        """SIGTERM."""
        if self.agent is not None and self._task is not None:
            self.agent.stop()
            await self._task
            self.agent = self._task = None

    async def kill(self) -> None:
        """SIGKILL: nothing is finished."""
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self.agent = self._task = None

    # --- the other actors ---

    async def pod(self, name: str, *, volumes: bool = True, **kwargs: Any) -> str:
        """The scheduler has bound a pod and the kubelet has made its volumes."""
        obj = pod_object(name, **kwargs)
        del obj["metadata"]["uid"], obj["metadata"]["creationTimestamp"]
        obj["metadata"]["ownerReferences"][0]["uid"] = self.snapshot_uid
        status = obj.pop("status")
        obj["spec"] |= {"automountServiceAccountToken": False, "terminationGracePeriodSeconds": 0}
        made = await self.kube.create(PODS, obj, "test")
        assert made is not None
        uid: str = made["metadata"]["uid"]
        body = {"metadata": {"name": name, "namespace": "default", "uid": uid}, "status": status}
        await self.kube.apply(PODS, body, "kubelet", subresource="status")
        if volumes:
            self.volumes(uid)
        return uid

    def volumes(self, uid: str) -> None:
        """The kubelet makes the pod's volumes, directory by directory."""
        os.makedirs(control_path(self.kubelet, uid))

    async def content(self, name: str, source: str, source_uid: str, *, captured: bool = False) -> Object:
        """The operator has ordered a capture; or somebody has taken one."""
        obj = content_object(name, source)
        del obj["metadata"]["uid"]
        obj["metadata"]["labels"] = {c.LABEL_NODE: NODE}
        obj["spec"]["sourcePod"]["uid"] = source_uid
        obj["spec"]["snapshotRef"]["uid"] = self.snapshot_uid
        obj.pop("status")
        if captured:
            # The files are there before the agent can see the object and miss them.
            self.ops.store[name] = artifact(name, "")
            if self.agent is not None:
                await self.agent.node.refresh()
        made = await self.kube.create(CONTENTS, obj, "test")
        assert made is not None
        return made

    def put(self, uid: str, message: Message) -> None:
        """Init or the server writes a file."""
        with protocol.open_dir(control_path(self.kubelet, uid)) as fd:
            message.save(fd)

    def hello(self, uid: str, word: str = "i1", **kwargs: Any) -> None:
        """A container starts."""
        for name in protocol.ALL_FILES:
            Path(control_path(self.kubelet, uid), name).unlink(missing_ok=True)
        self.put(uid, Hello(incarnation=word, **kwargs))

    def ready(self, uid: str, word: str = "i1", version: int | None = 1) -> None:
        """The server stands at the barrier."""
        self.put(
            uid,
            Ready(
                incarnation=word,
                token_ids=PARIS.token_ids,
                text=PARIS.text,
                sampled_token_logprob=PARIS.sampled_token_logprob,
                protocol=version,
            ),
        )

    def serving(self, uid: str, word: str = "i1", oracle: Oracle = PARIS) -> None:
        """The server serves."""
        self.put(uid, Serving(incarnation=word, host=None, port=8123, oracle=oracle.to_dict()))

    # --- waiting ---

    async def file(self, uid: str, name: str) -> Any:
        """The message in a control file, as soon as it is there."""
        changed = asyncio.Event()
        watcher = Watcher(lambda _: changed.set())
        watcher.start()
        try:
            watcher.add(uid, control_path(self.kubelet, uid))
            async with asyncio.timeout(LIMIT_S):
                while True:
                    changed.clear()
                    files = read_files(control_path(self.kubelet, uid))
                    message = getattr(files, name) if files is not None else None
                    if message is not None:
                        return message
                    await changed.wait()
        finally:
            watcher.stop()

    async def seen(self, resource: Resource, name: str, check: Callable[[Object], bool], namespace: str | None = None) -> Object:
        """The object of that name, as soon as it is as `check` wants it."""
        async with asyncio.timeout(LIMIT_S):
            async with contextlib.aclosing(self.kube.watch(resource, namespace)) as events:  # type: ignore[type-var]
                async for event in events:
                    for obj in event.items if event.type == "SYNC" else (event.object,):
                        if obj["metadata"]["name"] == name and event.type != "DELETED" and check(obj):
                            return obj
        raise AssertionError

    async def verified(self, name: str, status: str, reason: str) -> Object:
        """The pod, as soon as its readiness gate says so."""

        def check(obj: Object) -> bool:
            found = objects.condition(obj, c.CONDITION_VERIFIED)
            return (found.get("status"), found.get("reason")) == (status, reason)

        return await self.seen(PODS, name, check, "default")

    async def condition(self, name: str, kind: str) -> Object:
        """The content, as soon as the condition is True."""
        return await self.seen(CONTENTS, name, lambda obj: objects.is_true(obj, kind))

    async def gone(self, resource: Resource, name: str) -> None:
        """Until there is no object of that name."""
        async with asyncio.timeout(LIMIT_S):
            async with contextlib.aclosing(self.kube.watch(resource)) as events:  # type: ignore[type-var]
                async for event in events:
                    if event.type == "DELETED" and event.object["metadata"]["name"] == name:
                        return
                    if event.type == "SYNC" and name not in {x["metadata"]["name"] for x in event.items}:
                        return


@pytest.fixture
async def bench(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Bench]:
    async with await Kube.connect(str(cluster.kubeconfig)) as kube:
        await kube.create(NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}, "test")
        bench = Bench(kube, tmp_path)
        # The pods' owner must exist: the garbage collector of the test cluster is a real one.
        spec = {"model": "m", "image": "i"}
        snapshot = await kube.create(SNAPSHOTS, {**SNAPSHOT, "spec": spec}, "test")
        assert snapshot is not None
        bench.snapshot_uid = snapshot["metadata"]["uid"]
        yield bench
        await bench.stop()
        for resource, namespace in (
            (PODS, "default"),
            (SNAPSHOTS, "default"),
            (CONTENTS, None),
            (EVENTS, "default"),
            (SNAPSHOT_NODES, None),
            (NODES, None),
        ):
            await delete_all(kube, resource, namespace)


async def test_cold_capture_then_restore(bench: Bench) -> None:
    await bench.start()
    first = await bench.pod("a", volumes=False)
    order = await bench.content("art", "a", first)
    bench.volumes(first)
    bench.hello(first)
    start = await bench.file(first, "start")
    assert (start.mode, start.attended, start.reason) == ("cold", True, Reason.NO_ARTIFACT)
    bench.ready(first)
    release = await bench.file(first, "release")
    assert release.port == 8123
    content = await bench.condition("art", c.CAPTURED)
    assert content["status"]["artifact"]["bytes"] == 1_000_000
    assert content["status"]["phases"] == {"freeze_s": "1.50s", "capture_s": "4.00s"}
    assert bench.ops.store["art"].content_uid == order["metadata"]["uid"]
    bench.serving(first)
    await bench.verified("a", "True", Reason.VERIFIED)

    second = await bench.pod("b")
    bench.hello(second)
    restored = await bench.file(second, "restored")
    assert (restored.pid, restored.content) == (1001, "art")
    assert (await bench.file(second, "release")).env["VLLMSNAPSHOT_PORT"] == "8123"
    bench.serving(second)
    await bench.verified("b", "True", Reason.VERIFIED)
    pod = await bench.seen(PODS, "b", lambda x: facts.report_of(x).state == "Serving", "default")
    assert pod["metadata"]["labels"][c.LABEL_START_MODE] == c.START_RESTORE
    assert facts.report_of(pod).content == "art"
    content = await bench.seen(CONTENTS, "art", lambda x: bool(x["status"].get("restores")))
    assert content["status"]["restores"]["succeeded"] == 1
    assert bench.agent is not None
    await bench.agent.node.outbox.drain()
    events = await bench.kube.list(EVENTS, "default")
    assert {x["reason"] for x in events} == {"ColdStarted", "CaptureStarted", Reason.CAPTURED, Reason.RESTORED}
    assert {x["regarding"]["kind"] for x in events} == {"Pod", "VLLMSnapshot"}


async def test_the_agent_holds_only_its_own_fields(bench: Bench) -> None:
    await bench.start()
    uid = await bench.pod("a")
    bench.hello(uid)
    bench.serving(uid)
    await bench.verified("a", "True", Reason.VERIFIED)
    pod = await bench.seen(PODS, "a", lambda x: facts.report_of(x).state == "Serving", "default")
    held = {
        (entry.get("subresource", ""), path)
        for entry in pod["metadata"]["managedFields"]
        if entry["manager"] == c.MANAGER_AGENT
        for path in _leaves(entry["fieldsV1"])
    }
    kinds = {path.split("/")[1] if subresource else path for subresource, path in held}
    assert kinds == {
        f"f:metadata/f:annotations/f:{c.ANNOTATION_REPORT}",
        f"f:metadata/f:labels/f:{c.LABEL_START_MODE}",
        "f:conditions",
    }
    assert objects.condition(pod, "PodScheduled")["status"] == "True"


def _leaves(fields: dict[str, Any], path: str = "") -> Iterator[str]:
    for key, value in fields.items():
        # Keys hold slashes themselves (vllmsnapshot.io/report), but only in leaves.
        here = f"{path}/{key}".lstrip("/")
        if value and not key.startswith("k:"):
            yield from _leaves(value, here)
        else:
            yield here


async def test_deletion_removes_files_then_the_finalizer(bench: Bench) -> None:
    await bench.start()
    await bench.content("art", "gone", "uid-gone", captured=True)
    await bench.condition("art", c.CAPTURED)
    await bench.kube.delete(CONTENTS, "art")
    await bench.gone(CONTENTS, "art")
    assert bench.ops.store == {}


async def test_an_order_whose_pod_never_was_fails(bench: Bench) -> None:
    await bench.start()
    await bench.content("art", "nobody", "uid-nobody")
    content = await bench.condition("art", c.FAILED)
    assert objects.condition(content, c.FAILED)["reason"] == Reason.SOURCE_GONE


async def test_a_wrong_answer_is_reported_and_quarantines(bench: Bench) -> None:
    await bench.start()
    await bench.content("art", "gone", "uid-gone", captured=True)
    await bench.condition("art", c.CAPTURED)
    uid = await bench.pod("b")
    bench.hello(uid)
    await bench.file(uid, "release")
    bench.serving(uid, oracle=ROME)
    await bench.verified("b", "False", Reason.CANARY_MISMATCH)
    content = await bench.condition("art", c.QUARANTINED)
    assert objects.condition(content, c.QUARANTINED)["reason"] == Reason.CANARY_MISMATCH
    bench.hello(uid, "i2")
    start = await bench.file(uid, "start")
    assert (start.mode, start.reason) == ("cold", Reason.ARTIFACT_QUARANTINED)


async def test_a_killed_agent_is_followed_by_one_that_goes_on(bench: Bench) -> None:
    await bench.start()
    uid = await bench.pod("a")
    await bench.content("art", "a", uid)
    bench.hello(uid)
    await bench.file(uid, "start")
    await bench.kill()
    bench.ready(uid)
    await bench.start()
    await bench.file(uid, "release")
    await bench.condition("art", c.CAPTURED)
    await bench.kill()
    bench.serving(uid)
    await bench.start()
    await bench.verified("a", "True", Reason.VERIFIED)


async def test_the_api_server_goes_away_and_comes_back(bench: Bench, cluster: Cluster) -> None:
    await bench.start()
    await bench.content("art", "gone", "uid-gone", captured=True)
    await bench.condition("art", c.CAPTURED)
    uid = await bench.pod("b")
    bench.hello(uid)
    await bench.file(uid, "release")
    await bench.seen(PODS, "b", lambda x: facts.report_of(x).state == "Released", "default")
    await asyncio.to_thread(cluster.stop_daemon, "kube-apiserver", signal.SIGKILL)
    # The container crashes and comes back while nobody can be asked or told.
    bench.hello(uid, "i2", failed_restores={})
    assert (await bench.file(uid, "start")).mode == "cold"
    bench.serving(uid, "i2")
    await asyncio.to_thread(cluster.start_daemon, "kube-apiserver")
    pod = await bench.verified("b", "True", Reason.VERIFIED)
    assert pod["metadata"]["uid"] == uid


async def test_the_node_is_described_and_owned(bench: Bench) -> None:
    await bench.start()
    node = await bench.seen(SNAPSHOT_NODES, NODE, lambda x: objects.is_true(x, c.READY))
    assert [x["kind"] for x in node["metadata"]["ownerReferences"]] == ["Node"]
    assert node["status"]["protocolVersion"] == c.NODE_PROTOCOL
    await bench.content("art", "gone", "uid-gone", captured=True)
    await bench.seen(SNAPSHOT_NODES, NODE, lambda x: bool((x.get("status") or {}).get("artifacts")))


async def test_health(bench: Bench) -> None:
    bench.config = Config(**{**vars(bench.config), "port": 18081})
    agent = await bench.start()
    await bench.seen(SNAPSHOT_NODES, NODE, lambda x: objects.is_true(x, c.READY))
    async with asyncio.timeout(LIMIT_S):
        await agent.node.pods.synced.wait()
        await agent.node.contents.synced.wait()
    async with aiohttp.ClientSession() as session:
        for path, status in (("healthz", 200), ("readyz", 200), ("metrics", 200)):
            async with session.get(f"http://127.0.0.1:18081/{path}") as response:
                assert response.status == status
                text = await response.text()
    assert "vllmsnapshot_agent_node_capable 1" in text


async def test_a_foreign_pod_of_the_same_name_is_not_written_to(bench: Bench) -> None:
    # The pod is replaced while a report is under way: the write carries the UID and is refused.
    agent = await bench.start()
    uid = await bench.pod("a")
    obj = await bench.seen(PODS, "a", lambda _: True, "default")
    await bench.kube.delete(PODS, "a", "default", grace_period_s=0)
    await bench.pod("a")
    with pytest.raises(ApiError) as refused:
        await agent.node.kube.apply(
            PODS, {"metadata": {"name": "a", "namespace": "default", "uid": uid, "labels": {"x": "y"}}}, c.MANAGER_AGENT
        )
    assert refused.value.status in (409, 422)
    assert obj["metadata"]["uid"] == uid


async def blocked_restore(bench: Bench) -> tuple[str, threading.Event]:
    """A replica whose restore runs, and what lets it end."""
    gate, entered, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()

    def block() -> None:
        loop.call_soon_threadsafe(entered.set)
        gate.wait(LIMIT_S)

    bench.ops.before["restore"] = block
    await bench.content("art", "gone", "uid-gone", captured=True)
    await bench.condition("art", c.CAPTURED)
    uid = await bench.pod("b")
    bench.hello(uid)
    async with asyncio.timeout(LIMIT_S):
        await entered.wait()
    return uid, gate


async def test_a_stop_waits_for_the_restore_that_runs(bench: Bench) -> None:
    await bench.start()
    uid, gate = await blocked_restore(bench)
    stop = asyncio.create_task(bench.stop())
    await asyncio.sleep(0)
    gate.set()
    await stop
    files = read_files(control_path(bench.kubelet, uid))
    assert files is not None
    assert files.restored is not None
    assert files.release is not None


async def test_a_stop_does_not_wait_for_ever_and_the_next_agent_cleans_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "STOP_S", 0.01)
    await bench.start()
    uid, gate = await blocked_restore(bench)
    await bench.stop()
    await bench.start()
    pod = await bench.seen(PODS, "b", lambda x: facts.report_of(x).start == "cold", "default")
    assert facts.report_of(pod).reason == Reason.AGENT_RESTARTED
    assert "clear b" in bench.ops.did
    assert (await bench.file(uid, "start")).mode == "cold"
    gate.set()


async def test_the_process_starts_says_what_its_node_lacks_and_ends_on_sigterm(
    bench: Bench, cluster: Cluster, tmp_path: Path
) -> None:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(["operator", "child"]),
        "NODE_NAME": NODE,
        "VLLMSNAPSHOT_KUBELET_DIR": bench.kubelet,
        "VLLMSNAPSHOT_STORE_DIR": str(tmp_path / "store"),
        "VLLMSNAPSHOT_CRIU_PREFIX": str(tmp_path / "no-criu"),
        "VLLMSNAPSHOT_KUBECONFIG": str(cluster.kubeconfig),
        "VLLMSNAPSHOT_HEALTH_PORT": "0",
    }
    code = "from vllmsnapshot.agent.app import main; main()"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=env, cwd=ROOT)
    try:
        node = await bench.seen(SNAPSHOT_NODES, NODE, lambda x: bool(objects.condition(x, c.READY)))
        assert objects.condition(node, c.READY)["reason"] == Reason.NODE_NOT_CAPABLE
        uid = await bench.pod("a")
        bench.hello(uid)
        start = await bench.file(uid, "start")
        assert (start.mode, start.attended, start.reason) == ("cold", False, Reason.NODE_NOT_CAPABLE)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(LIMIT_S):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_verification_is_answered_once(bench: Bench) -> None:
    await bench.start()
    content = await bench.content("art", "gone", "uid-gone", captured=True)
    bench.ops.store["art"] = artifact("art", content["metadata"]["uid"])
    done = {"type": c.CAPTURED, "status": "True", "reason": Reason.CAPTURED, "message": ""}
    status = {"conditions": [{**done, "lastTransitionTime": "2027-01-01T00:00:00Z"}]}
    await bench.kube.apply(CONTENTS, {"metadata": {"name": "art"}, "status": status}, c.MANAGER_AGENT, subresource="status")
    asked = {"name": "art", "uid": content["metadata"]["uid"], "annotations": {c.ANNOTATION_VERIFY: "r1"}}
    await bench.kube.apply(CONTENTS, {"metadata": asked}, c.MANAGER_CLI)
    found = await bench.seen(CONTENTS, "art", lambda obj: bool(obj.get("status", {}).get("verification")))
    assert found["status"]["verification"]["outcome"] == "Intact"
    assert objects.is_true(found, c.CAPTURED)
    assert bench.ops.did.count("verify art") == 1
