"""A real HorizontalPodAutoscaler on the scale subresource, with metrics from a script: what it asks for, and where it stops.

And the examples whose kinds Kubernetes does not have itself, against the schemas that their projects publish.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from tests.apiserver import HPAS, Object
from tests.cluster import Cluster, build, config, pki
from tests.cluster.progress import Progress
from tests.controlplane.scripted_agent import CountingKube, World, delete_all
from tests.controlplane.test_operator_reconcile import SYSTEM, Lab
from vllmsnapshot.controller.reconcile import Reconciler
from vllmsnapshot.kube import CONTENTS, EVENTS, NODES, PODS, SERVICES, SNAPSHOT_NODES, SNAPSHOTS, Kube

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "deploy" / "examples"
METRICS_API = "/apis/custom.metrics.k8s.io/v1beta1"
TARGET = 3
ROUNDS = 3
"""Passes of the autoscaler after which what it wants has settled."""


class Metrics:
    """custom.metrics.k8s.io as a script. `values`: of which pods the metric is known; the others have none, as while they start."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.selectors: set[str] = set()
        self.asked = 0

    async def discover(self, _request: web.Request) -> web.Response:
        resource = {
            "name": "pods/vllm_num_requests",
            "singularName": "",
            "namespaced": True,
            "kind": "MetricValueList",
            "verbs": ["get"],
        }
        group = METRICS_API.removeprefix("/apis/")
        return web.json_response({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": [resource]})

    async def answer(self, request: web.Request) -> web.Response:
        self.asked += 1
        self.selectors.add(request.query["labelSelector"])
        name, namespace = request.match_info["metric"], request.match_info["namespace"]
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        items = [
            {
                "describedObject": {"kind": "Pod", "namespace": namespace, "name": pod, "apiVersion": "/v1"},
                "metricName": name,
                "timestamp": now,
                "value": str(value),
                "selector": None,
            }
            for pod, value in self.values.items()
        ]
        group = METRICS_API.removeprefix("/apis/")
        return web.json_response({"kind": "MetricValueList", "apiVersion": group, "metadata": {}, "items": items})


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Before the tests enter the cluster's network, from which there is no way to a module proxy.
    build.keda(Progress())
    build.monitoring_crds(Progress())
    with Cluster("scaling-tests", mode="controlplane") as cluster:
        cluster.kubectl("apply", "--server-side", "-f", ROOT / "deploy" / "crds")
        cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
        cluster.kubectl("get", "vsnap,vsnapcontent,vsnapnode", "-A")  # retries while the new storage is set up
        cluster.kubectl("create", "namespace", SYSTEM)
        cluster.kubectl("create", "clusterrole", "metrics", "--verb=get,list", "--resource=*.custom.metrics.k8s.io")
        autoscaler = "--serviceaccount=kube-system:horizontal-pod-autoscaler"
        cluster.kubectl("create", "clusterrolebinding", "metrics", "--clusterrole=metrics", autoscaler)
        with cluster.enter_network():
            yield cluster


@pytest.fixture
async def metrics(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Metrics]:
    """The script, registered with the API server."""
    pki.Authority(tmp_path).issue("metrics", pki.Identity("metrics", addresses=(config.ADDRESS,)))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "metrics.crt", tmp_path / "metrics.key")
    script = Metrics()
    app = web.Application()
    app.router.add_get(METRICS_API, script.discover)
    app.router.add_get(f"{METRICS_API}/namespaces/{{namespace}}/pods/*/{{metric}}", script.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, config.ADDRESS, 0, ssl_context=context)
    await site.start()
    port = runner.addresses[0][1]
    # A Service without pods: the API server goes to its external name as it is.
    service = {"type": "ExternalName", "externalName": config.ADDRESS}
    registration = {
        "group": "custom.metrics.k8s.io",
        "version": "v1beta1",
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
        "insecureSkipTLSVerify": True,
        "service": {"namespace": "default", "name": "metrics", "port": port},
    }
    items = [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "metrics", "namespace": "default"}, "spec": service},
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": "v1beta1.custom.metrics.k8s.io"},
            "spec": registration,
        },
    ]
    # Not blocking: kubectl waits for the API server, and that for the script, which runs in this loop.
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    await asyncio.to_thread(cluster.kubectl, "apply", "-f", "-", input=text)
    available = ("wait", "--for=condition=Available", "apiservice/v1beta1.custom.metrics.k8s.io", "--timeout=60s")
    await asyncio.to_thread(cluster.kubectl, *available)
    yield script
    await asyncio.to_thread(cluster.kubectl, "delete", "apiservice", "v1beta1.custom.metrics.k8s.io")
    await runner.cleanup()


@pytest.fixture
async def lab(cluster: Cluster, metrics: Metrics) -> AsyncIterator[Lab]:
    """A claim `smol` with one replica that is Ready, and the example autoscaler on it."""
    async with await Kube.connect(str(cluster.kubeconfig)) as kube:
        counting = CountingKube.of(kube)
        lab = Lab(kube, counting, World(kube, SYSTEM), Reconciler(counting, SYSTEM, share_s=0.0))
        await lab.world.add_node("node-a")
        yield lab
        for resource in (HPAS, SNAPSHOTS, PODS, SERVICES, EVENTS):
            await delete_all(kube, resource, "default")
        await delete_all(kube, PODS, SYSTEM)
        for resource in (CONTENTS, SNAPSHOT_NODES, NODES):
            await delete_all(kube, resource)


async def in_phase(lab: Lab, phase: str, *names: str) -> None:
    """What the kubelet says of pods. For an autoscaler Pending ones are not ready; Running ones are, whatever their conditions."""
    for name in names:
        body = {"metadata": {"name": name, "namespace": "default"}, "status": {"phase": phase}}
        await lab.kube.apply(PODS, body, "kubelet-phase", subresource="status")


async def one_replica(lab: Lab) -> str:
    """A claim with one replica that runs; the pod's name."""
    await lab.apply()
    await lab.scale(1)
    await lab.settle()
    (pod,) = await lab.pods()
    await in_phase(lab, "Running", pod["metadata"]["name"])
    return str(pod["metadata"]["name"])


async def autoscaled(lab: Lab) -> None:
    """Put the example on the claim."""
    hpa: Object = yaml.safe_load((EXAMPLES / "hpa.yaml").read_text())
    hpa["metadata"] = {"name": "smol", "namespace": "default"}
    spec = hpa["spec"]
    spec["scaleTargetRef"]["name"] = "smol"
    spec["metrics"][0]["pods"]["target"]["averageValue"] = str(TARGET)
    spec["behavior"]["scaleUp"]["policies"] = [{"type": "Pods", "value": 100, "periodSeconds": 15}]
    spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] = 0
    await lab.kube.create(HPAS, hpa, "test")


async def until(what: str, probe: Callable[[], Awaitable[bool]]) -> None:
    """Wait for something that the autoscaler does by itself."""
    end = time.monotonic() + 90
    while not await probe():
        assert time.monotonic() < end, f"never: {what}"
        await asyncio.sleep(0.1)


async def wanted(lab: Lab, replicas: int) -> None:
    """Wait until the autoscaler wants so many."""

    async def probe() -> bool:
        return bool((await lab.claim())["spec"]["replicas"] == replicas)

    await until(f"{replicas} replicas wanted", probe)


async def settled(lab: Lab, metrics: Metrics) -> int:
    """What the autoscaler wants after some more passes."""
    before = metrics.asked

    async def probe() -> bool:
        return metrics.asked >= before + ROUNDS

    await until("the autoscaler to look again", probe)
    return int((await lab.claim())["spec"]["replicas"])


async def test_it_asks_for_the_replicas_and_for_nothing_else(lab: Lab, metrics: Metrics) -> None:
    name = await one_replica(lab)
    metrics.values = {name: 10}
    await autoscaled(lab)
    await wanted(lab, 4)
    assert metrics.selectors == {(await lab.status())["selector"]}
    scale = await lab.kube.request("GET", SNAPSHOTS.path("default", "smol", "scale"))
    assert scale["status"]["selector"] in metrics.selectors


@pytest.mark.parametrize("phase", ["Pending", "Running"])
async def test_replicas_that_start_count_so_that_no_more_are_started(lab: Lab, metrics: Metrics, phase: str) -> None:
    """They have no metric yet. Were they not there for the autoscaler, it would add more in each of its passes."""
    name = await one_replica(lab)
    metrics.values = {name: 10}
    await autoscaled(lab)
    await wanted(lab, 4)
    await lab.once()
    starting = [pod["metadata"]["name"] for pod in await lab.pods() if pod["metadata"]["name"] != name]
    assert len(starting) == 3
    lab.world.port_closed |= set(starting)
    await in_phase(lab, phase, *starting)
    await lab.settle()
    assert (await lab.status())["replicas"] == 4
    assert await settled(lab, metrics) == 4
    # Even a load that grows meanwhile is divided among all of them.
    metrics.values = {name: 15}
    assert await settled(lab, metrics) == 5


async def test_replicas_that_wait_for_the_first_capture_are_not_asked_for_twice(lab: Lab, metrics: Metrics) -> None:
    """The seed gate holds them back: what the autoscaler wants grows with the load, not with its passes."""
    lab.world.capture = "hang"
    name = await one_replica(lab)
    metrics.values = {name: 10}
    await autoscaled(lab)
    await wanted(lab, 4)
    await lab.settle()
    assert len(await lab.pods()) == 1
    assert await settled(lab, metrics) == 4


async def test_it_leaves_a_snapshot_at_zero_alone(lab: Lab, metrics: Metrics) -> None:
    await lab.apply()
    await lab.scale(0)
    await lab.settle()
    await autoscaled(lab)

    async def disabled() -> bool:
        hpa = await lab.kube.get(HPAS, "smol", "default")
        assert hpa is not None
        reasons = {item["type"]: item["reason"] for item in hpa.get("status", {}).get("conditions") or []}
        return reasons.get("ScalingActive") == "ScalingDisabled"

    await until("the autoscaler to say that it is disabled", disabled)
    assert (await lab.claim())["spec"]["replicas"] == 0
    assert metrics.asked == 0


# --- examples of foreign kinds ---------------------------------------------------------------------------------------


def schema(example: str) -> Path:
    """The CRD of the kind that an example is of."""
    if example == "keda.yaml":
        return build.keda(Progress()) / "config/crd/bases/keda.sh_scaledobjects.yaml"
    return next(path for path in build.monitoring_crds(Progress()) if "podmonitors" in path.name)


@pytest.mark.parametrize("example", ["keda.yaml", "autoscale/podmonitor.yaml"])
def test_examples_of_foreign_kinds_are_accepted(cluster: Cluster, example: str) -> None:
    cluster.kubectl("apply", "--server-side", "-f", schema(example))
    cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    arguments = ("apply", "--dry-run=server", "--validate=strict", "-f", EXAMPLES / example)
    assert "created (server dry run)" in cluster.kubectl(*arguments)


def test_kedas_trigger_has_no_unknown_parameters() -> None:
    """The schema takes anything as metadata of a trigger: the names are in the scaler's source."""
    source = build.keda(Progress()) / "pkg/scalers/prometheus_scaler.go"
    known = set(re.findall(r'keda:"name=(\w+),', source.read_text()))
    example = yaml.safe_load((EXAMPLES / "keda.yaml").read_text())
    triggers = [trigger for trigger in example["spec"]["triggers"] if trigger["type"] == "prometheus"]
    assert len(triggers) == 2
    for trigger in triggers:
        assert {"serverAddress", "query", "threshold"} <= set(trigger["metadata"]) <= known
