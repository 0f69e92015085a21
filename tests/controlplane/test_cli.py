"""`kubectl vsnap` as a program against the real API server, with the operator's passes and scripted agents behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart import render
from tests.cluster import Cluster
from tests.controlplane.scripted_agent import CountingKube, World, condition, delete_all
from tests.controlplane.test_operator_reconcile import Lab
from vllmsnapshot import __version__
from vllmsnapshot.api import constants as c
from vllmsnapshot.cli.errors import Exit
from vllmsnapshot.controller.reconcile import Reconciler
from vllmsnapshot.kube import CONTENTS, EVENTS, NODES, PODS, SERVICES, SNAPSHOT_NODES, SNAPSHOTS, Kube, Object, Resource

ROOT = Path(__file__).parents[2]
SYSTEM = "vllmsnapshot-system"
LIMIT_S = 120.0
"""Only so that a hang fails instead of hanging; nothing is measured."""
CRDS = ("vllmsnapshots", "vllmsnapshotcontents", "vllmsnapshotnodes")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster("cli-tests", mode="controlplane") as cluster:
        cluster.kubectl("create", "namespace", SYSTEM)
        with cluster.enter_network():
            yield cluster


class Cli:
    """The program in a process of its own, as a user runs it."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig

    async def start(self, *args: str) -> asyncio.subprocess.Process:
        """Begin."""
        env = {**os.environ, "KUBECONFIG": str(self.kubeconfig), "TERM": "dumb"}
        command = [sys.executable, "-m", "vllmsnapshot.cli.app", *args]
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(*command, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe)

    async def __call__(self, *args: str) -> tuple[int | None, str, str]:
        """Exit status, stdout, stderr."""
        process = await self.start(*args)
        try:
            async with asyncio.timeout(LIMIT_S):
                out, err = await process.communicate()
        except TimeoutError:
            process.kill()
            out, err = await process.communicate()
            raise AssertionError(f"{args} does not end:\n{out.decode()}{err.decode()}") from None
        assert b"Traceback" not in err, err.decode()
        return process.returncode, out.decode(), err.decode()


@pytest.fixture
def cli(cluster: Cluster) -> Cli:
    return Cli(cluster.kubeconfig)


@pytest.fixture
async def lab(cluster: Cluster) -> AsyncIterator[Lab]:
    """Operator and world, going on by themselves."""
    cluster.kubectl("apply", "--server-side", "-f", ROOT / "deploy" / "crds")
    cluster.kubectl("wait", "--for=condition=Established", *(f"crd/{name}.{c.GROUP}" for name in CRDS), "--timeout=30s")
    cluster.kubectl("get", "vsnap,vsnapcontent,vsnapnode", "-A")  # retries while the new storage is set up
    async with await Kube.connect(str(cluster.kubeconfig)) as kube:
        counting = CountingKube.of(kube)
        lab = Lab(kube, counting, World(kube, SYSTEM, patient=True), Reconciler(counting, SYSTEM, share_s=0.0))
        await lab.world.add_node("node-a")

        async def live() -> None:
            while True:
                moved = bool(await lab.world.step())
                for key in await lab.reconciler.observer.keys():
                    moved |= bool(await lab.once(key))
                await asyncio.sleep(0 if moved else 0.05)  # the pace of the outside world, nothing waits for it

        task = asyncio.create_task(live())
        yield lab
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        for resource in (SNAPSHOTS, PODS, SERVICES, EVENTS):
            await delete_all(kube, resource, "default")
        await delete_all(kube, PODS, SYSTEM)
        for resource in (CONTENTS, SNAPSHOT_NODES, NODES):
            await delete_all(kube, resource)


async def until(lab: Lab, check: Callable[[Object], bool], name: str = "smol") -> Object:
    """Follow the claim until the predicate holds."""
    async with asyncio.timeout(LIMIT_S):
        async with contextlib.aclosing(lab.kube.watch(SNAPSHOTS, "default", fields=f"metadata.name={name}")) as events:  # type: ignore[type-var]
            async for event in events:
                for item in event.items if event.type == "SYNC" else (event.object,):
                    if event.type != "DELETED" and check(item):
                        return item
    raise AssertionError("unreachable")


async def when(check: Callable[[], Awaitable[bool]]) -> None:
    """Look again until it is so."""
    async with asyncio.timeout(LIMIT_S):
        while not await check():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def _left(lab: Lab, resource: Resource, number: int) -> bool:
    return len(await lab.kube.list(resource, "default" if resource.namespaced else None)) == number


async def _gone(lab: Lab, obj: Object) -> bool:
    return obj["metadata"]["uid"] not in uids(await lab.contents())


def ready(text: str) -> Callable[[Object], bool]:
    return lambda item: item.get("status", {}).get("ready") == text and condition(item, c.READY) == "True"


async def serving(lab: Lab, **spec: Any) -> None:
    """A snapshot with two replicas: the first captured, the second restored."""
    await lab.apply(replicas=2, **spec)
    await until(lab, ready("2/2"))


def uids(items: list[Object]) -> set[str]:
    return {item["metadata"]["uid"] for item in items}


# --- without anything ------------------------------------------------------------------------------------------------


async def test_a_cluster_without_the_crds(cluster: Cluster, cli: Cli) -> None:
    cluster.kubectl("delete", "crd", *(f"{name}.{c.GROUP}" for name in CRDS), "--ignore-not-found", "--wait=true", timeout=60.0)
    for command in (["status"], ["describe", "x"], ["artifacts", "list"], ["recapture", "x"], ["bench", "x"]):
        status, out, err = await cli(*command)
        assert (status, out) == (Exit.NOT_FOUND, ""), (command, err)
        assert "install the chart" in err
    status, out, _ = await cli("doctor")
    assert status == Exit.PROBLEM
    assert out.count("is not there") == 3
    assert "no Deployment is there" in out


# --- looking ---------------------------------------------------------------------------------------------------------


async def test_status_describe_and_artifacts(lab: Lab, cli: Cli) -> None:
    await serving(lab)
    status, out, err = await cli("status")
    assert (status, err) == (Exit.OK, "")
    head, line = out.splitlines()
    assert head.split()[:4] == ["NAME", "READY", "RESTORED", "COLD"]
    assert line.split()[:4] == ["smol", "2/2", "1", "1"]
    assert "\x1b" not in out
    assert (await cli("status", "-A"))[1].splitlines()[1].split()[0] == "default"
    assert (await cli("status", "-n", SYSTEM))[2] == f"no VLLMSnapshots in namespace {SYSTEM}\n"
    found = json.loads((await cli("status", "-o", "json"))[1])
    assert [item["metadata"]["name"] for item in found["items"]] == ["smol"]

    status, out, _ = await cli("describe", "smol")
    assert status == Exit.OK
    assert "cold in 40.0 s  ready" in out
    assert "restored in 4.00 s  ready" in out
    assert "NoArtifact: no artifact fits" in out
    assert out.count("to serving") == 2
    [content] = await lab.contents()
    name = content["metadata"]["name"]
    assert f"from {name}" in out
    made = yaml.safe_load((await cli("describe", "smol", "-o", "yaml"))[1])
    assert {item["report"]["start"] for item in made["replicas"]} == {"cold", "restore"}

    status, out, _ = await cli("artifacts", "list")
    assert (status, out.splitlines()[1].split()[:4]) == (Exit.OK, [name, "default/smol", content["spec"]["nodeName"], "Captured"])
    assert "kernel" in (await cli("artifacts", "inspect", name))[1]
    assert (await cli("artifacts", "gc", "--dry-run"))[2] == "nothing to remove\n"
    assert (await cli("describe", "missing"))[0] == Exit.NOT_FOUND


async def test_watch_writes_a_line_for_each_change_until_it_is_interrupted(lab: Lab, cli: Cli) -> None:
    await serving(lab)
    process = await cli.start("status", "--watch")
    assert process.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        assert b"NAME" in await process.stdout.readline()
        assert b"2/2" in await process.stdout.readline()
        await lab.scale(3)
        while b"3/3" not in (await process.stdout.readline()):
            pass
        process.send_signal(signal.SIGINT)
        await process.communicate()
    assert process.returncode == Exit.INTERRUPTED


# --- recapture -------------------------------------------------------------------------------------------------------


async def test_recapture_replaces_the_artifact_and_disturbs_nobody(lab: Lab, cli: Cli) -> None:
    await serving(lab)
    [before], replicas = await lab.contents(), await lab.pods()
    never_without: list[bool] = []

    async def look() -> None:
        async with contextlib.aclosing(lab.kube.watch(SNAPSHOTS, "default")) as events:  # type: ignore[type-var]
            async for event in events:
                for item in event.items if event.type == "SYNC" else (event.object,):
                    never_without.append(condition(item, c.SNAPSHOT_READY) == condition(item, c.READY) == "True")

    task = asyncio.create_task(look())
    status, _, err = await cli("recapture", "smol")
    assert status == Exit.OK, err
    assert "Running: replica" in err
    assert "Done: taken again on 1 node" in err
    await until(lab, lambda item: item["status"]["replicas"] == 2)
    task.cancel()
    assert never_without
    assert all(never_without), "the snapshot is Ready and has an artifact at every moment"
    assert uids(await lab.pods()) == uids(replicas), "whoever served serves on"
    await when(lambda: _gone(lab, before))
    [after] = await lab.contents()
    assert condition(after, c.CAPTURED) == "True"
    assert after["spec"]["identity"] == before["spec"]["identity"]
    await lab.scale(3)
    await until(lab, ready("3/3"))
    reports = [yaml.safe_load(pod["metadata"]["annotations"][c.ANNOTATION_REPORT]) for pod in await lab.pods()]
    assert after["metadata"]["name"] in [report["content"] for report in reports]


async def test_a_recapture_that_fails_keeps_the_artifact_and_says_why(lab: Lab, cli: Cli) -> None:
    await serving(lab, capture={"retries": 1})
    [before] = await lab.contents()
    lab.world.capture = "fail"
    status, _, err = await cli("recapture", "smol")
    assert status == Exit.PROBLEM, err
    assert c.Reason.DUMP_FAILED in err
    assert "the artifact from before stays in use" in err
    await until(lab, ready("2/2"))
    found = {item["metadata"]["name"]: item for item in await lab.contents()}
    assert condition(found.pop(before["metadata"]["name"]), c.CAPTURED) == "True"
    assert len(found) == 2, "two tries, each remembered"
    # Another request begins to count anew.
    lab.world.capture = "succeed"
    status, _, err = await cli("recapture", "smol")
    assert status == Exit.OK, err


async def test_recapture_without_surge_takes_the_place_of_a_replica(lab: Lab, cli: Cli) -> None:
    await serving(lab, rollout={"maxSurge": 0, "maxUnavailable": 1})
    [before] = await lab.contents()
    status, _, err = await cli("recapture", "smol")
    assert status == Exit.OK, err
    await until(lab, ready("2/2"))
    assert before["metadata"]["uid"] not in uids([x for x in await lab.contents() if "deletionTimestamp" not in x["metadata"]])


async def test_recapture_without_an_operator_times_out(lab: Lab, cli: Cli) -> None:
    await serving(lab)

    async def nothing(*_: Any) -> None:
        """The operator is away."""

    lab.reconciler.reconcile = nothing  # type: ignore[assignment, method-assign]
    status, _, err = await cli("recapture", "smol", "--timeout", "1")
    assert status == Exit.TIMEOUT
    assert "the operator took no notice" in err


# --- verify, gc ------------------------------------------------------------------------------------------------------


async def test_verify(lab: Lab, cli: Cli) -> None:
    await serving(lab)
    [content] = await lab.contents()
    status, out, err = await cli("artifacts", "verify", "smol")
    assert status == Exit.OK, err
    assert out == f"{content['metadata']['name']} on node node-a: Intact, 3 files, 1.07 GB in 1.00s\n"
    lab.world.verify = "corrupt"
    status, out, _ = await cli("artifacts", "verify", content["metadata"]["name"], "-o", "json")
    assert status == Exit.PROBLEM
    assert json.loads(out)[0]["outcome"] == "Corrupt"
    await until(lab, lambda item: condition(item, c.DEGRADED) == "True")
    lab.world.verify = "hang"
    status, _, err = await cli("artifacts", "verify", content["metadata"]["name"], "--timeout", "1")
    assert status == Exit.TIMEOUT
    assert "no answer from the agent on node node-a" in err
    assert (await cli("artifacts", "verify", "missing"))[0] == Exit.NOT_FOUND


async def test_gc_removes_what_a_deleted_snapshot_left(lab: Lab, cli: Cli) -> None:
    await serving(lab, artifact={"deletionPolicy": "Retain"})
    await lab.delete()
    await when(lambda: _left(lab, SNAPSHOTS, 0))
    [content] = await lab.contents()
    assert "--retained" in (await cli("artifacts", "gc", "--dry-run"))[1]
    assert (await cli("artifacts", "gc", "--yes"))[0] == Exit.OK
    assert uids(await lab.contents()) == uids([content]), "kept on purpose"
    assert (await cli("artifacts", "gc", "--retained", "--yes"))[0] == Exit.OK
    await when(lambda: _left(lab, CONTENTS, 0))


# --- doctor ----------------------------------------------------------------------------------------------------------


async def test_doctor(lab: Lab, cli: Cli, cluster: Cluster) -> None:
    await serving(lab)
    status, out, _ = await cli("doctor")
    assert status == Exit.PROBLEM
    assert "FAIL  operator: no Deployment is there" in out
    assert "crd vllmsnapshots: v1alpha1 is served" in out
    objects = [
        o for o in render({}) if o["kind"] in ("Deployment", "DaemonSet", "ClusterRole", "ClusterRoleBinding", "ServiceAccount")
    ]
    cluster.kubectl("apply", "--server-side", "-f", "-", input=yaml.safe_dump_all(objects))
    try:
        # Nobody runs their pods here: their controllers' counts are written by hand, after the controllers have looked.
        for item in objects:
            where = [
                "-n",
                SYSTEM,
                "patch",
                item["kind"].lower(),
                item["metadata"]["name"],
                "--subresource=status",
                "--type=merge",
            ]
            if item["kind"] in ("Deployment", "DaemonSet"):
                cluster.kubectl("-n", SYSTEM, "annotate", item["kind"].lower(), item["metadata"]["name"], "x=y", "--overwrite")
            if item["kind"] == "Deployment":
                cluster.kubectl(*where, "-p", '{"status": {"replicas": 1, "readyReplicas": 1, "availableReplicas": 1}}')
        status, out, _ = await cli("doctor", "-o", "json")
        found = {item["name"]: item for item in json.loads(out)}
        assert found["rights of the operator"]["level"] == "Pass", found
        assert found["rights of the agent"]["level"] == "Pass"
        assert found["your rights"]["level"] == "Pass"
        assert "versions" not in found, __version__
        assert (found["agent"]["area"], found["agent"]["level"]) == ("node node-a", "Fail"), "no pod of the DaemonSet is there"
    finally:
        names = [f"{o['kind'].lower()}/{o['metadata']['name']}" for o in objects if o["kind"] in ("Deployment", "DaemonSet")]
        cluster.kubectl("-n", SYSTEM, "delete", *names, "--wait=false")


async def test_a_user_of_one_namespace(lab: Lab, cluster: Cluster, tmp_path: Path) -> None:
    """What the rights of `edit` in a namespace allow works; what is cluster-scoped is refused in one line."""
    await serving(lab)
    roles = [o for o in render({}) if o["kind"] == "ClusterRole" and o["metadata"]["labels"][c.LABEL_COMPONENT] == "user"]
    cluster.kubectl("apply", "--server-side", "-f", "-", input=yaml.safe_dump_all(roles))
    cluster.kubectl("create", "serviceaccount", "dev")
    cluster.kubectl("create", "rolebinding", "dev", "--clusterrole=edit", "--serviceaccount=default:dev")

    async def aggregated() -> bool:
        return "vllmsnapshots/scale" in cluster.kubectl("get", "clusterrole", "edit", "-o", "yaml")

    await when(aggregated)
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": cluster.kubectl("create", "token", "dev").strip()}
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    dev = Cli(tmp_path / "config")
    assert (await dev("status"))[0] == Exit.OK
    status, out, _ = await dev("describe", "smol")
    assert status == Exit.OK
    assert "you may not list vllmsnapshotcontents" in out
    status, _, err = await dev("artifacts", "list")
    assert status == Exit.DENIED
    assert err.startswith("error: not permitted: vllmsnapshotcontents")
    assert (await dev("status", "-A"))[0] == Exit.DENIED
    assert (await dev("recapture", "smol"))[0] == Exit.OK
    status, out, _ = await dev("doctor")
    assert "not checked: you may not" in out
    config["users"][0]["user"] = {"token": "wrong"}
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    status, _, err = await dev("status")
    assert (status, "log in again" in err) == (Exit.DENIED, True)


# --- bench -----------------------------------------------------------------------------------------------------------


async def test_bench_measures_a_copy_and_leaves_nothing_behind(lab: Lab, cli: Cli, tmp_path: Path) -> None:
    await serving(lab)
    before = await lab.claim()
    contents, replicas = uids(await lab.contents()), uids(await lab.pods())
    plot = tmp_path / "bench.svg"
    status, out, err = await cli("bench", "smol", "--runs", "2", "--plot", str(plot), "-o", "json")
    assert status == Exit.OK, err
    made = json.loads(out)
    assert [item["kind"] for item in made["runs"]] == ["cold", "cold, captured", "restored", "restored"]
    assert made["medians"] == {"cold": 40.0, "cold, captured": 40.0, "restored": 4.0}
    assert made["speedup"] == 10.0
    assert plot.read_text().startswith("<svg")
    await when(lambda: _left(lab, SNAPSHOTS, 1))
    after = await lab.claim()
    assert (after["metadata"]["generation"], after["spec"]) == (before["metadata"]["generation"], before["spec"])
    assert contents <= uids(await lab.contents())
    assert replicas <= uids(await lab.pods())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_an_interrupted_bench_removes_its_copy(lab: Lab, cli: Cli, number: signal.Signals) -> None:
    await serving(lab)
    lab.world.kubelet = False  # the copy's replica never serves
    process = await cli.start("bench", "smol")
    await when(lambda: _left(lab, SNAPSHOTS, 2))
    again = await cli("bench", "smol")
    assert again[0] == Exit.PROBLEM
    assert "another bench runs, or was killed" in again[2]
    process.send_signal(number)
    async with asyncio.timeout(LIMIT_S):
        await process.communicate()
    assert process.returncode == Exit.INTERRUPTED
    lab.world.kubelet = True
    await when(lambda: _left(lab, SNAPSHOTS, 1))
    await until(lab, ready("2/2"))


async def test_a_bench_that_cannot_go_on_removes_its_copy_too(lab: Lab, cli: Cli) -> None:
    await serving(lab)
    lab.world.capture = "fail"
    status, _, err = await cli("bench", "smol", "--cold-runs", "0")
    assert status == Exit.PROBLEM
    assert "the capture failed" in err
    await when(lambda: _left(lab, SNAPSHOTS, 1))
