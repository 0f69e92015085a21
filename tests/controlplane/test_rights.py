"""Operator and agent with the chart's roles on the real API server, which records who asks for what: they do all their work, and
what they use is what they were granted.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart import CHART, NAMESPACE, UNSEEN, Right
from tests.cluster import Cluster
from tests.controlplane.scripted_agent import World
from tests.controlplane.test_agent_process import SNAPSHOT, Bench
from tests.unit.agentbox import NODE
from vllmsnapshot.agent.app import Agent
from vllmsnapshot.api import constants as c
from vllmsnapshot.controller.app import Operator, Options
from vllmsnapshot.kube import CONTENTS, EVENTS, NODES, PODS, SERVICES, SNAPSHOT_NODES, SNAPSHOTS, Kube, Object, Resource


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster("rights-tests", mode="controlplane") as cluster:
        cluster.kubectl("create", "namespace", NAMESPACE)
        # The scripted world writes what kubelet and agents do to pods as one administrator, which the policy on pods refuses.
        values = ("--set", "podAdmissionPolicy.enabled=false")
        cluster.helm("install", "vllmsnapshot", CHART, "--namespace", NAMESPACE, *values)
        cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
        with cluster.enter_network():
            yield cluster


def account(cluster: Cluster, component: str, path: Path, *flags: str) -> str:
    """Write a kubeconfig with the token of a component's service account; its path."""
    token = cluster.kubectl("create", "token", f"vllmsnapshot-{component}", "-n", NAMESPACE, *flags).strip()
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    path.write_text(yaml.safe_dump(config))
    return str(path)


def granted(cluster: Cluster, component: str) -> set[Right]:
    """What the component's role allows, as it is on the server."""
    role = yaml.safe_load(cluster.kubectl("get", "clusterrole", f"vllmsnapshot-{component}", "-o", "yaml"))
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def recorded(cluster: Cluster, component: str) -> tuple[set[Right], list[str]]:
    """What the component asked for, and what of it was refused for want of a right."""
    used, refused = set(), []
    for event in cluster.audited(f"system:serviceaccount:{NAMESPACE}:vllmsnapshot-{component}"):
        target = event.get("objectRef") or {}
        if "resource" not in target:
            continue  # discovery
        name = "/".join(filter(None, (target["resource"], target.get("subresource"))))
        used.add((target.get("apiGroup", ""), name, event["verb"]))
        if event.get("annotations", {}).get("authorization.k8s.io/decision") == "forbid":
            refused.append(f"{event['verb']} {event['requestURI']}")
    return used, refused


def compare(cluster: Cluster, component: str) -> None:
    used, refused = recorded(cluster, component)
    assert refused == []
    have = granted(cluster, component)
    assert used - have == set(), "used, though no role grants it"
    assert have - used == UNSEEN[component], "granted, though nobody uses it"


# --- the operator ----------------------------------------------------------------------------------------------------


async def test_the_operator_uses_its_rights_and_no_more(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A claim's whole life, with all that can come up in it."""
    path = account(cluster, "operator", tmp_path / "operator.kubeconfig")
    monkeypatch.setenv("KUBECONFIG", path)
    async with await Kube.connect(str(cluster.kubeconfig)) as admin, await Kube.connect(path) as mine:
        world = World(admin, NAMESPACE, schedule=True)
        await world.add_node("node-a")
        stop = asyncio.Event()
        options = Options(agent_namespace=NAMESPACE, health_port=0, kubeconfig=path)
        async with asyncio.timeout(90), asyncio.TaskGroup() as group:
            outside = group.create_task(live(world))
            operator = group.create_task(Operator(mine, options).run(stop))
            await claim(admin, replicas=3, serving={"port": 8000})
            await until(admin, complete)
            # A rollout and a changed Service, while there is no agent: the operator verifies the replicas. Then no Service.
            await world.remove_agent("node-a")
            await claim(admin, replicas=1, serving={"port": 9000})
            await until(admin, complete)
            await world.add_agent("node-a")
            await claim(admin, replicas=1, serving={"port": 9000, "service": "Disabled"})
            await gone(admin, SERVICES, "rights", "default")
            # Somebody else's pod has the name of the next replica.
            await occupy(admin)
            await claim(admin, replicas=2, serving={"port": 9000, "service": "Disabled"})
            await until(admin, lambda o: reason(o, c.DEGRADED) == c.Reason.NAME_CONFLICT)
            # A node goes, and with it whoever would let its artifact go.
            await abandon(admin)
            await gone(admin, CONTENTS, "abandoned")
            assert await admin.list(EVENTS, "default")
            await admin.delete(SNAPSHOTS, "rights", "default")
            await gone(admin, SNAPSHOTS, "rights", "default")
            stop.set()
            await operator
            outside.cancel()
    denied = [r.getMessage() for r in caplog.records if re.search(r"\b403\b|forbidden", r.getMessage(), re.IGNORECASE)]
    assert denied == []
    compare(cluster, "operator")


async def live(world: World) -> None:
    """Let scheduler, kubelet and agent move by themselves."""
    while True:
        moved = await world.step()
        await asyncio.sleep(0 if moved else 0.05)


async def claim(kube: Kube, **spec: object) -> None:
    body = {"metadata": {"namespace": "default", "name": "rights"}, "spec": {"model": "m", "image": "i", **spec}}
    await kube.apply(SNAPSHOTS, body, "user")


async def occupy(kube: Kube) -> None:
    """Pods of somebody else in the places of all replicas that are not there."""
    mine = await kube.list(PODS, "default", labels=f"{c.LABEL_SNAPSHOT}=rights")
    (name,) = (pod["metadata"]["name"] for pod in mine if "deletionTimestamp" not in pod["metadata"])
    prefix = name.rpartition("-")[0]
    body: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": {"containers": [{"name": "main", "image": "registry.example/none"}]},
    }
    for slot in range(4):
        await kube.create(PODS, {**body, "metadata": {"namespace": "default", "name": f"{prefix}-{slot}"}}, "test")


async def abandon(kube: Kube) -> None:
    """A content whose node is deleted, and its claim before it."""
    await kube.create(NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-z"}}, "test")
    body = {
        "apiVersion": c.API_VERSION,
        "kind": CONTENTS.kind,
        "metadata": {"name": "abandoned", "finalizers": [c.FINALIZER_CONTENT], "labels": {c.LABEL_MANAGED_BY: c.MANAGED_BY}},
        "spec": {
            "snapshotRef": {"namespace": "default", "name": "other", "uid": "1"},
            "sourcePod": {"name": "other-0", "uid": "2"},
            "nodeName": "node-z",
            "identity": "3",
        },
    }
    await kube.create(CONTENTS, body, "test")
    await kube.delete(NODES, "node-z")


def reason(obj: Object, kind: str) -> str:
    """The reason of a condition."""
    return next((str(x["reason"]) for x in obj.get("status", {}).get("conditions") or [] if x["type"] == kind), "")


def complete(obj: Object) -> bool:
    """Whether all that the present spec asks for is there."""
    status = obj["status"]
    return (
        status.get("observedGeneration") == obj["metadata"]["generation"] and reason(obj, c.READY) == c.Reason.ALL_REPLICAS_READY
    )


async def until(kube: Kube, what: Callable[[Object], bool]) -> None:
    """Follow the claim until the predicate holds of it."""
    async for event in kube.watch(SNAPSHOTS, "default", fields="metadata.name=rights"):
        seen = event.items if event.type == "SYNC" else (event.object,)
        if any("status" in item and what(item) for item in seen):
            return


async def gone(kube: Kube, resource: Resource, name: str, namespace: str | None = None) -> None:
    """Wait until there is no object of that name."""
    async for event in kube.watch(resource, namespace, fields=f"metadata.name={name}"):
        if event.type == "DELETED" or (event.type == "SYNC" and not event.items):
            return


# --- the agent -------------------------------------------------------------------------------------------------------


async def test_an_agent_uses_its_rights_and_no_more(cluster: Cluster, tmp_path: Path) -> None:
    """Capture, restore, an order that cannot be fulfilled and a deletion, with the token that its pod would have."""
    async with await Kube.connect(str(cluster.kubeconfig)) as admin:
        await admin.create(NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}, "test")
        snapshot = await admin.create(SNAPSHOTS, {**SNAPSHOT, "spec": {"model": "m", "image": "i"}}, "test")
        assert snapshot is not None
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "agent", "namespace": NAMESPACE},
            "spec": {
                "nodeName": NODE,
                "serviceAccountName": "vllmsnapshot-agent",
                "containers": [{"name": "agent", "image": "registry.example/none"}],
            },
        }
        bound = await admin.create(PODS, body, "test")
        assert bound is not None
        flags = ("--bound-object-kind=Pod", "--bound-object-name=agent", f"--bound-object-uid={bound['metadata']['uid']}")
        async with await Kube.connect(account(cluster, "agent", tmp_path / "agent.kubeconfig", *flags)) as mine:
            bench = Bench(admin, tmp_path, agent=mine)
            bench.snapshot_uid = snapshot["metadata"]["uid"]
            await work(bench, await bench.start())
            await bench.stop()
    compare(cluster, "agent")


async def work(bench: Bench, agent: Agent) -> None:
    first = await bench.pod("a")
    await bench.content("art", "a", first)
    bench.hello(first)
    await bench.file(first, "start")
    bench.ready(first)
    await bench.condition("art", c.CAPTURED)
    bench.serving(first)
    await bench.verified("a", "True", c.Reason.VERIFIED)
    second = await bench.pod("b")
    bench.hello(second)
    await bench.file(second, "restored")
    bench.serving(second)
    await bench.verified("b", "True", c.Reason.VERIFIED)
    await bench.content("never", "nobody", "uid-nobody")
    await bench.condition("never", c.FAILED)
    await bench.kube.delete(CONTENTS, "art")
    await bench.gone(CONTENTS, "art")
    await bench.seen(SNAPSHOT_NODES, NODE, lambda x: bool(x.get("status")))
    await agent.node.outbox.drain()
