"""The operator as a process: kopf as event source, queue, resync and health, against the real API server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.cluster import Cluster
from tests.controlplane.front import Front
from tests.controlplane.scripted_agent import World, delete_all
from vllmsnapshot import logs
from vllmsnapshot.controller.app import Operator, Options
from vllmsnapshot.kube import CONTENTS, NODES, PODS, SERVICES, SNAPSHOT_NODES, SNAPSHOTS, Kube, Object

ROOT = Path(__file__).parents[2]
SYSTEM = "vllmsnapshot-system"
LIMIT_S = 120.0
"""Only so that a hang fails instead of hanging; nothing is measured."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster("operator-proc", mode="controlplane") as cluster:
        cluster.kubectl("create", "namespace", SYSTEM)
        with cluster.enter_network():
            yield cluster


def install_crds(cluster: Cluster) -> None:
    cluster.kubectl("apply", "--server-side", "-f", ROOT / "deploy" / "crds")
    cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    cluster.kubectl("get", "vsnap,vsnapcontent,vsnapnode", "-A")  # retries while the new storage is set up


@pytest.fixture
async def world(cluster: Cluster) -> AsyncIterator[World]:
    """The world, stepping by itself."""
    install_crds(cluster)
    async with await Kube.connect(str(cluster.kubeconfig)) as kube:
        world = World(kube, SYSTEM)
        await world.add_node("node-a")

        async def live() -> None:
            while True:
                moved = await world.step()
                await asyncio.sleep(0 if moved else 0.05)  # the pace of the outside world, nothing waits for it

        task = asyncio.create_task(live())
        yield world
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        install_crds(cluster)
        await delete_all(kube, SNAPSHOTS, "default")
        for resource, namespace in ((PODS, "default"), (SERVICES, "default"), (PODS, SYSTEM), (CONTENTS, None), (NODES, None)):
            await delete_all(kube, resource, namespace)
        await delete_all(kube, SNAPSHOT_NODES)


async def until(kube: Kube, name: str, what: Callable[[Object], bool]) -> Object:
    """Follow the claim until the predicate holds."""
    async with asyncio.timeout(LIMIT_S):
        async for event in kube.watch(SNAPSHOTS, "default", fields=f"metadata.name={name}"):
            for item in event.items or ((event.object,) if event.type != "SYNC" else ()):
                if what(item):
                    return item
    raise AssertionError("unreachable")


def ready(text: str) -> Callable[[Object], bool]:
    return lambda item: item.get("status", {}).get("ready") == text


async def apply(kube: Kube, name: str = "smol", **spec: object) -> None:
    full = {"model": "/models/smol", "image": "vllm:1", **spec}
    await kube.apply(SNAPSHOTS, {"metadata": {"namespace": "default", "name": name}, "spec": full}, "user")


@contextlib.asynccontextmanager
async def running(cluster: Cluster, kube: Kube, monkeypatch: pytest.MonkeyPatch, **options: object) -> AsyncIterator[Operator]:
    """An operator in this process."""
    settings = {"agent_namespace": SYSTEM, "health_port": 0, "resync_s": 600.0, "kubeconfig": str(cluster.kubeconfig), **options}
    monkeypatch.setenv("KUBECONFIG", str(settings["kubeconfig"]))
    operator = Operator(kube, Options(**settings))  # type: ignore[arg-type]
    stop = asyncio.Event()
    task = asyncio.create_task(operator.run(stop))
    while not operator.health.port and not task.done():  # noqa: ASYNC110 - two turns of the loop
        await asyncio.sleep(0)
    try:
        yield operator
    finally:
        stop.set()
        async with asyncio.timeout(LIMIT_S):
            await task


async def get(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as response:
        return response.status, await response.text()


async def test_events_alone_drive_a_claim_through_its_life(
    cluster: Cluster, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resync is off (600 s): every step must be woken by an event."""
    kube = world.kube
    async with running(cluster, kube, monkeypatch) as operator:
        await apply(kube, replicas=2)
        await until(kube, "smol", ready("2/2"))
        assert (await get(operator.health.port, "/healthz"))[0] == 200
        assert (await get(operator.health.port, "/readyz"))[0] == 200
        assert "vllmsnapshot_reconcile_total" in (await get(operator.health.port, "/metrics"))[1]
        scale = {"metadata": {"namespace": "default", "name": "smol"}, "spec": {"replicas": 3}}
        await kube.request(
            "PATCH",
            SNAPSHOTS.path("default", "smol", "scale"),
            body={"spec": scale["spec"]},
            content_type="application/merge-patch+json",
        )
        await until(kube, "smol", ready("3/3"))
        annotations = (await kube.get(SNAPSHOTS, "smol", "default") or {})["metadata"].get("annotations", {})
        assert not [name for name in annotations if "kopf" in name]


async def test_an_object_as_deep_as_the_server_takes_stops_nobody(
    cluster: Cluster, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may create a VLLMSnapshot may nest its podTemplate thousands of levels deep; a parser that gives up there would
    take the list, and with it the operator, away from everybody."""
    deep = '{"x":' * 9_000 + "1" + "}" * 9_000
    head = '{"apiVersion":"vllmsnapshot.io/v1alpha1","kind":"VLLMSnapshot","metadata":{"name":"deep","namespace":"default"},'
    body = head + '"spec":{"model":"m","image":"i","podTemplate":{"spec":' + deep + "}}}"
    path = "/apis/vllmsnapshot.io/v1alpha1/namespaces/default/vllmsnapshots"
    cluster.kubectl("create", "--raw", path, "-f", "-", input=body)
    async with running(cluster, world.kube, monkeypatch):
        await apply(world.kube, "other")
        await until(world.kube, "other", ready("1/1"))
        await until(world.kube, "deep", lambda item: "InvalidSpec" in json.dumps(item.get("status", {})))


async def test_it_waits_for_its_crds_and_only_then_is_ready(
    cluster: Cluster, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    kube = world.kube
    for name in ("vllmsnapshots", "vllmsnapshotcontents", "vllmsnapshotnodes"):
        cluster.kubectl("delete", "crd", f"{name}.vllmsnapshot.io", "--wait=true", timeout=60.0)
    async with running(cluster, kube, monkeypatch) as operator:
        status, text = await get(operator.health.port, "/readyz")
        assert status == 503
        assert "CRDs" in text
        assert (await get(operator.health.port, "/healthz"))[0] == 200, "waiting is no reason to be restarted"
        install_crds(cluster)
        await world.describe_node("node-a")
        await apply(kube, replicas=1)
        await until(kube, "smol", ready("1/1"))
        assert (await get(operator.health.port, "/readyz"))[0] == 200


async def test_events_that_nobody_saw_are_made_up_for(cluster: Cluster, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods deleted and claims changed while no operator ran; the claim deleted while none ran."""
    kube = world.kube
    async with running(cluster, kube, monkeypatch):
        await apply(kube, replicas=2)
        await until(kube, "smol", ready("2/2"))
    for pod in await world.pods():
        await kube.delete(PODS, pod["metadata"]["name"], "default", grace_period_s=0)
    await apply(kube, replicas=3)
    async with running(cluster, kube, monkeypatch):
        await until(kube, "smol", ready("3/3"))
    await kube.delete(SNAPSHOTS, "smol", "default")
    async with running(cluster, kube, monkeypatch), asyncio.timeout(LIMIT_S):
        async for event in kube.watch(SNAPSHOTS, "default"):
            if event.type == "DELETED" or (event.type == "SYNC" and not event.items):
                break
    async with asyncio.timeout(LIMIT_S):
        async for event in kube.watch(CONTENTS):
            if event.type == "DELETED" or (event.type == "SYNC" and not event.items):
                break


async def test_an_api_server_that_answers_401_for_a_while_ends_nothing(
    cluster: Cluster, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """As one does that has just been started. The credentials are good all the time: nobody replaces them."""
    async with Front().listening(cluster.kubeconfig) as front:
        kubeconfig = front.kubeconfig(tmp_path / "kubeconfig", "good")
        async with (
            await Kube.connect(str(kubeconfig)) as kube,
            running(cluster, kube, monkeypatch, kubeconfig=str(kubeconfig)) as operator,
        ):
            await apply(world.kube, replicas=1)
            await until(world.kube, "smol", ready("1/1"))
            async with asyncio.timeout(LIMIT_S):
                began = asyncio.get_running_loop().time()
                await front.refuse()
                # Each of the four watches is refused with each of three logins.
                await front.refusals("kopf", 12)
                asked = front.count("kopf")
                lasted = asyncio.get_running_loop().time() - began
            status, text = await get(operator.health.port, "/readyz")
            assert status == 503
            assert "401" in text
            assert (await get(operator.health.port, "/healthz"))[0] == 200, "a restart has no better credentials"
            assert [r for r in caplog.records if r.levelname == "WARNING" and "refuses our credentials (401)" in r.message]
            # No busy loop: no more logins than the pauses between them leave room for, however slow this machine is.
            logins = next(n for n in range(1, 100) if sum(min(30.0, 2.0**x) for x in range(n)) > lasted)
            assert asked <= 4 * logins
            await apply(world.kube, "late", replicas=1)
            front.accept()
            # The resync is off (600 s): it is kopf that has come back, and has heard of what nobody told it meanwhile.
            await until(world.kube, "late", ready("1/1"))
            # And it can be ended in the middle of another one.
            seen = front.count("kopf")
            async with asyncio.timeout(LIMIT_S):
                await front.refuse()
                await front.refusals("kopf", seen + 4)
    assert not [r for r in caplog.records if "valid credentials" in r.getMessage()]


async def test_a_watch_that_dies_ends_the_process(cluster: Cluster, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather none than a blind one: the kubelet starts another."""
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    operator = Operator(world.kube, Options(agent_namespace=SYSTEM, health_port=0, kubeconfig=str(cluster.kubeconfig)))

    async def dies(**_: object) -> None:
        """kopf's own end, as when one of its watchers fails."""

    monkeypatch.setattr("vllmsnapshot.controller.app.kopf.operator", dies)
    async with asyncio.timeout(LIMIT_S):
        await operator.run(asyncio.Event())
    assert operator.health.live["watch"]() is not None


async def test_liveness_fails_when_a_pass_hangs_or_the_resync_does_not_come_through(world: World) -> None:
    operator = Operator(world.kube, Options(agent_namespace=SYSTEM, health_port=0))
    operator._watching = True
    assert all(check() is None for check in operator.health.live.values())
    monkeyed = {"now": 0.0}
    operator.queue._clock = lambda: monkeyed["now"]
    operator.queue.add(("default", "smol"))
    await operator.queue.take()
    monkeyed["now"] = 299.0
    assert operator.health.live["queue"]() is None
    monkeyed["now"] = 301.0
    assert "301 s" in str(operator.health.live["queue"]())
    operator._resynced -= 1000.0
    assert operator.health.live["resync"]() is not None


def children_of(pid: int) -> list[int]:
    """nsenter waits in front of what it has started in the cluster's PID namespace."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_the_command_ends_with_sigterm_and_exit_status_0(cluster: Cluster, world: World) -> None:
    flags = [
        "--kubeconfig",
        str(cluster.kubeconfig),
        "--agent-namespace",
        SYSTEM,
        "--health-port",
        "18080",
        "--log-format",
        "json",
        "--log-level",
        "DEBUG",
    ]
    command = cluster.exec_command(
        ["env", f"PYTHONPATH={ROOT}/operator:{ROOT}/child", sys.executable, "-m", "vllmsnapshot.controller.app", *flags]
    )
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL)
    assert process.stderr is not None
    await apply(world.kube, replicas=1, env=[{"name": "TOKEN", "value": "not-for-logs"}])
    await until(world.kube, "smol", ready("1/1"))
    for pid in children_of(process.pid) or [process.pid]:
        os.kill(pid, signal.SIGTERM)
    async with asyncio.timeout(LIMIT_S):
        log = (await process.stderr.read()).decode()
        assert await process.wait() == 0, log
    lines = [json.loads(line) for line in log.splitlines()]
    assert all({"ts", "level", "logger", "msg", "component"} <= line.keys() <= logs.KEYS.keys() for line in lines)
    (made,) = (line for line in lines if "create pod smol-" in line["msg"])
    assert made["snapshot"] == "default/smol"
    assert "not-for-logs" not in log
    assert not [line for line in lines if line["level"] in ("error", "critical")]
