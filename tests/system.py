"""The whole system on a cluster: images loaded, chart installed by Helm, snapshots applied, replicas asked over HTTP.

The demo, the node tests and the e2e tests drive the system through this module only, as a user would: kubectl, Helm, HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import aiohttp
import yaml

from tests.cluster import Cluster, ClusterError
from tests.cluster.progress import Progress
from vllmsnapshot.api import constants as c
from vllmsnapshot.api.types import PodReport
from vllmsnapshot.kube import CONTENTS, PODS, SNAPSHOTS, Kube, Object

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy/helm/vllmsnapshot"
RELEASE = "vllmsnapshot"
SYSTEM_NAMESPACE = "vllmsnapshot-system"
MODELS = "/var/lib/vllmsnapshot-models"
"""Where deploy/examples expects models on the node."""

T = TypeVar("T")

PROMPT = "The capital of France is"
POLL_S = 0.05


class Backend(Protocol):
    """What the system needs of a cluster; `tests.cluster.Cluster` and `tests.kind.Kind` have it."""

    @property
    def kubeconfig(self) -> Path: ...
    def kubectl(self, *arguments: str, input: str | None = None, timeout: float = 120.0) -> str: ...  # noqa: A002
    def helm(self, *arguments: str, input: str | None = None, timeout: float = 600.0) -> str: ...  # noqa: A002


@dataclass
class Replica:
    """A replica as the client sees it. Times are seconds of the monotonic clock."""

    name: str
    uid: str
    created: float
    first_token: float | None = None
    answer: str = ""
    pod: Object = field(default_factory=dict)

    @property
    def port(self) -> int | None:
        """The port that the operator assigned."""
        text = self.pod.get("metadata", {}).get("annotations", {}).get(c.ANNOTATION_PORT)
        return int(text) if text else None

    @property
    def address(self) -> str | None:
        """The pod's IP."""
        return self.pod.get("status", {}).get("podIP") or None

    @property
    def report(self) -> PodReport:
        """What the agent says about it."""
        text = self.pod.get("metadata", {}).get("annotations", {}).get(c.ANNOTATION_REPORT, "{}")
        return PodReport.model_validate_json(text)

    @property
    def ready(self) -> bool:
        """The pod's Ready condition."""
        return condition(self.pod, "Ready") == "True"


def condition(obj: Object, kind: str, key: str = "status") -> str | None:
    """A field of a condition, or None if the object has no such condition."""
    for item in obj.get("status", {}).get("conditions") or []:
        if item["type"] == kind:
            return str(item.get(key))
    return None


class System:
    """An installed system; `kube` and HTTP work in the calling thread only (it has entered the cluster's network)."""

    def __init__(self, backend: Backend, kube: Kube, http: aiohttp.ClientSession) -> None:
        self.backend = backend
        self.kube = kube
        self.http = http

    # --- waiting -----------------------------------------------------------------------------------------------------

    async def until(self, what: str, probe: Callable[[], Awaitable[T | None]], timeout_s: float = 120.0) -> T:
        """Poll until the probe gives something; TimeoutError says what was waited for, and the state of the pods."""
        end = time.monotonic() + timeout_s
        while True:
            value = await probe()
            if value is not None and value is not False:
                return value
            if time.monotonic() > end:
                pods = self.backend.kubectl("get", "vsnap,vsnapcontent,pods", "-A", "-o", "wide")
                raise TimeoutError(f"waited {timeout_s:.0f} s for {what}\n{pods}")
            await asyncio.sleep(POLL_S)

    async def snapshot(self, name: str, namespace: str = "default") -> Object:
        """The VLLMSnapshot; LookupError if it is not there."""
        found = await self.kube.get(SNAPSHOTS, name, namespace)
        if found is None:
            raise LookupError(name)
        return found

    async def replicas(self, name: str, namespace: str = "default") -> list[Object]:
        """The snapshot's pods that are not being deleted, by name."""
        pods = await self.kube.list(PODS, namespace, labels=f"{c.LABEL_SNAPSHOT}={name},{c.LABEL_ROLE}={c.ROLE_REPLICA}")
        return sorted((p for p in pods if "deletionTimestamp" not in p["metadata"]), key=lambda p: str(p["metadata"]["name"]))

    async def contents(self, name: str) -> list[Object]:
        """The contents whose snapshotRef has this name."""
        return [o for o in await self.kube.list(CONTENTS) if o["spec"]["snapshotRef"]["name"] == name]

    async def wait_ready(self, name: str, replicas: int, namespace: str = "default", timeout_s: float = 300.0) -> list[Object]:
        """Wait until exactly `replicas` pods are there and all are Ready; returns them."""

        async def probe() -> list[Object] | None:
            pods = await self.replicas(name, namespace)
            return pods if len(pods) == replicas and all(condition(p, "Ready") == "True" for p in pods) else None

        return await self.until(f"{replicas} ready replicas of {name}", probe, timeout_s)

    async def wait_captured(self, name: str, timeout_s: float = 300.0, *, after: str = "") -> Object:
        """Wait until a content of the snapshot is Captured; returns it. A failed one raises at once, but not the one named `after`."""

        async def probe() -> Object | None:
            for content in await self.contents(name):
                if condition(content, c.CAPTURED) == "True":
                    return content
                if condition(content, c.FAILED) == "True" and content["metadata"]["name"] != after:
                    raise AssertionError(f"capture failed: {content['status']['conditions']}")
            return None

        return await self.until(f"a captured content of {name}", probe, timeout_s)

    async def wait_gone(self, name: str, namespace: str = "default", timeout_s: float = 120.0) -> None:
        """Wait until neither the snapshot nor a pod nor a content of it is left."""

        async def probe() -> bool:
            pods = await self.kube.list(PODS, namespace, labels=f"{c.LABEL_SNAPSHOT}={name}")
            return not (await self.kube.get(SNAPSHOTS, name, namespace) or pods or await self.contents(name))

        await self.until(f"everything of {name} to be gone", probe, timeout_s)

    # --- acting ------------------------------------------------------------------------------------------------------

    def apply(self, manifest: Object) -> None:
        """kubectl apply."""
        self.backend.kubectl("apply", "-f", "-", input=json.dumps(manifest))

    def scale(self, name: str, replicas: int, namespace: str = "default") -> None:
        """kubectl scale, on the scale subresource as an HPA does."""
        self.backend.kubectl("-n", namespace, "scale", f"vsnap/{name}", f"--replicas={replicas}")

    def delete(self, name: str, namespace: str = "default") -> None:
        """kubectl delete, without waiting."""
        self.backend.kubectl("-n", namespace, "delete", "vsnap", name, "--wait=false")

    # --- asking ------------------------------------------------------------------------------------------------------

    async def post(self, address: str, port: int, path: str, body: Object, timeout_s: float = 30.0) -> Object | None:
        """POST JSON to a pod; None while nobody listens or the answer is not a 200."""
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s, connect=2)
            async with self.http.post(f"http://{address}:{port}{path}", json=body, timeout=timeout) as response:
                return await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    async def complete(self, pod: Object, model: str, *, max_tokens: int = 1, prompt: str = PROMPT) -> str | None:
        """The text that a replica completes greedily; None while it does not serve."""
        address, port = pod.get("status", {}).get("podIP"), pod["metadata"].get("annotations", {}).get(c.ANNOTATION_PORT)
        if not address or not port:
            return None
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        answer = await self.post(address, int(port), "/v1/completions", body)
        return None if answer is None else str(answer["choices"][0]["text"])

    async def watch_replicas(self, name: str, model: str, into: dict[str, Replica], namespace: str = "default") -> None:
        """Follow the snapshot's pods for ever; ask each for its first token from the moment it has an address."""
        async with asyncio.TaskGroup() as tasks:
            async for event in self.kube.watch(PODS, namespace, labels=f"{c.LABEL_SNAPSHOT}={name}"):
                now = time.monotonic()
                for pod in event.items if event.type == "SYNC" else (event.object,):
                    uid = pod["metadata"]["uid"]
                    if uid not in into:
                        into[uid] = Replica(pod["metadata"]["name"], uid, now)
                        tasks.create_task(self._first_token(into[uid], model))
                    into[uid].pod = pod

    async def _first_token(self, replica: Replica, model: str) -> None:
        while replica.first_token is None:
            answer = await self.complete(replica.pod, model) if replica.pod else None
            if answer is not None:
                replica.first_token, replica.answer = time.monotonic(), answer
                return
            await asyncio.sleep(0.02)


# --- installing ------------------------------------------------------------------------------------------------------


def example(name: str, **changes: Any) -> Object:
    """A manifest of deploy/examples with fields of its spec replaced."""
    manifest: Object = yaml.safe_load((ROOT / f"deploy/examples/{name}.yaml").read_text())
    manifest["spec"] |= changes
    return manifest


def install(backend: Backend, values: Mapping[str, Any] | None = None) -> None:
    """Install or upgrade the chart, with these values by their path, and wait until operator and agents are ready."""
    backend.helm(
        "upgrade",
        "--install",
        RELEASE,
        str(CHART),
        "--namespace",
        SYSTEM_NAMESPACE,
        "--create-namespace",
        "--values",
        str(ROOT / "tests/e2e/values.yaml"),
        *(f"--set-json={name}={json.dumps(value)}" for name, value in (values or {}).items()),
        "--wait",
        "--timeout=180s",
    )


def local_values(cluster: Cluster) -> dict[str, Any]:
    """Values of the chart that only this run of the local cluster can tell."""
    places = {"agent.kubeletDir": str(cluster.kubelet_dir), "agent.storeDir": str(cluster.store_dir)}
    return {**places, **(cluster.gpus.agent_values() if cluster.gpus.count else {})}


def local_cluster(
    name: str,
    images: Sequence[str],
    progress: Progress,
    *,
    model: bool = False,
    gpus: int = 0,
    fresh: bool = True,
    prepared: Callable[[Cluster], None] = lambda _: None,
) -> Cluster:
    """A running local cluster with these images and fake GPUs on its node and, if wanted, the model where the examples expect it.

    Not `fresh`: one that is up is taken over as it is, with the present images and chart. `prepared`: what is to be done with a new
    cluster before the chart is installed.
    """
    from tests.cluster import images as builds
    from tests.cluster import model as models

    built = builds.build_all(["operator", *images], progress)
    weights = models.smollm2(progress) if model else None
    cluster = Cluster(name, gpus=gpus, progress=progress)
    used = not fresh and cluster.suits()
    cluster.up(fresh=fresh)
    try:
        for image in built:
            cluster.load_image(image)
        if weights is not None and not used:
            target = f"{MODELS}/smollm2"
            cluster.exec(["mkdir", "-p", target])
            cluster.exec(["mount", "--bind", "-o", "ro", str(weights.resolve()), target])
        if not used:
            prepared(cluster)
        with progress.step("installing the chart with Helm"):
            if used:  # the tag of the image is the same, so Helm would not start its pods again
                cluster.kubectl("-n", SYSTEM_NAMESPACE, "delete", "pods", "--all", "--grace-period=1")
            install(cluster, local_values(cluster))
    except BaseException:
        diagnose(cluster)
        if fresh:
            cluster.down()
        raise
    return cluster


@contextlib.contextmanager
def suite_cluster(
    name: str,
    images: Sequence[str],
    *,
    model: bool = False,
    gpus: int = 0,
    prepared: Callable[[Cluster], None] = lambda _: None,
) -> Iterator[Cluster]:
    """`local_cluster` for a test suite, taken down whatever happens. With VLLMSNAPSHOT_KEEP set it is kept for the next run.

    Two runs of a suite at the same time would take each other's cluster down: the second one waits.
    """
    from tests.cluster import cache

    keep = bool(os.environ.get("VLLMSNAPSHOT_KEEP"))
    progress = Progress()
    with cache.lock(f"suite-{name}", on_wait=lambda: progress.note(f"another run uses cluster {name}; waiting for it")):
        cluster = local_cluster(name, images, progress, model=model, gpus=gpus, fresh=not keep, prepared=prepared)
        try:
            yield cluster
        finally:
            if not keep:
                cluster.down()


def diagnose(backend: Backend) -> None:
    """Print what a person would look at first; used when something did not come up."""
    commands: list[list[str]] = [
        ["get", "pods,vsnap,vsnapcontent,vsnapnode", "-A", "-o", "wide"],
        ["get", "events", "-A", "--sort-by=.lastTimestamp"],
        *(["-n", SYSTEM_NAMESPACE, "logs", "-l", f"{c.LABEL_COMPONENT}={part}", "--tail=60"] for part in ("operator", "agent")),
    ]
    for command in commands:
        with contextlib.suppress(ClusterError, subprocess.SubprocessError, OSError):
            print(f"--- kubectl {' '.join(command)}\n{backend.kubectl(*command, timeout=20)}", flush=True)


@contextlib.asynccontextmanager
async def connect(backend: Backend) -> AsyncIterator[System]:
    """A `System` on a cluster that `local_cluster` has made; call inside `cluster.enter_network()`."""
    kube = await Kube.connect(str(backend.kubeconfig))
    # A connection per request: pods come and go on the same addresses.
    connector = aiohttp.TCPConnector(force_close=True)
    async with kube, aiohttp.ClientSession(connector=connector) as http:
        yield System(backend, kube, http)
