"""A VLLMSnapshot of the small engine in a test's hands, and the answer that its replicas must give."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, Protocol, Self

import aiohttp

from tests.load import Load
from tests.node.engine.small import WORDS, pattern
from tests.nodeview import NodeView
from tests.observer import Observer
from tests.system import PROMPT, System, condition
from vllmsnapshot.api import constants as c
from vllmsnapshot.api.types import PodReport
from vllmsnapshot.kube import CONTENTS, PODS, SERVICES, SNAPSHOTS, Object

IMAGE = "vllmsnapshot.local/engine:dev"
TOKENS = 8
MIB = 1 << 20


@functools.cache
def answer(*, mib: int = 2, seed: int = 1, gpu: bool = False, words: Sequence[str] = WORDS) -> str:
    """What an intact engine completes PROMPT with: computed here, not learned from an engine."""
    size = mib * MIB
    number = zlib.crc32(pattern(seed, size), zlib.crc32(pattern(2, size), zlib.crc32(PROMPT.encode())))
    if gpu:
        number = zlib.crc32(pattern(6, size), zlib.crc32(pattern(5, size), number))
    number = zlib.crc32(pattern(4, size), zlib.crc32(pattern(3, size), zlib.crc32(b"%d" % number)))
    return "".join(words[(number >> (3 * i)) % len(words)] for i in range(TOKENS))


def report(pod: Object) -> PodReport:
    """What the agent says of a pod."""
    return PodReport.model_validate_json(pod["metadata"].get("annotations", {}).get(c.ANNOTATION_REPORT, "{}"))


def starts(pods: Sequence[Object]) -> list[str]:
    """How they came up, the oldest first."""
    return [report(pod).start for pod in sorted(pods, key=lambda p: (p["metadata"]["creationTimestamp"], p["metadata"]["name"]))]


def names(pods: Sequence[Object]) -> set[str]:
    """The pods' names."""
    return {pod["metadata"]["name"] for pod in pods}


def restarts(pod: Object) -> int:
    """How often the kubelet has restarted the engine's container."""
    return sum(s["restartCount"] for s in pod["status"]["containerStatuses"] if s["name"] == c.CONTAINER)


class Make(Protocol):
    """The fixture `make`."""

    def __call__(self, name: str, **spec: Any) -> Awaitable[Snapshot]: ...


class Snapshot:
    """An applied VLLMSnapshot under observation."""

    def __init__(self, system: System, node: NodeView, manifest: Object) -> None:
        self.system = system
        self.node = node
        self.manifest = manifest
        self.name = str(manifest["metadata"]["name"])
        self.namespace = "default"
        self.seen = Observer(system, self.name, self.namespace, self.ask)

    @classmethod
    @contextlib.asynccontextmanager
    async def applied(cls, system: System, node: NodeView, name: str, **spec: Any) -> AsyncIterator[Self]:
        """Apply it and observe it for the length of a block."""
        manifest = {
            "apiVersion": c.API_VERSION,
            "kind": SNAPSHOTS.kind,
            "metadata": {"name": name, "namespace": "default"},
            "spec": {
                "model": "small",
                "image": IMAGE,
                "imagePullPolicy": "Never",
                "env": [{"name": "VLLMSNAPSHOT_ENGINE", "value": "small:create"}],
                **spec,
            },
        }
        snapshot = cls(system, node, manifest)
        async with snapshot.seen:
            system.apply(manifest)
            yield snapshot

    # --- acting ---

    def apply(self, **spec: Any) -> None:
        """kubectl apply with changed fields (`replicas` is not in the manifest: it belongs to kubectl scale)."""
        self.manifest["spec"] = {**self.manifest["spec"], **spec}
        self.system.apply(self.manifest)

    def scale(self, replicas: int) -> None:
        """kubectl scale."""
        self.system.scale(self.name, replicas, self.namespace)

    async def remove(self) -> None:
        """Delete it and whatever it retains; the cluster finishes this in the background."""
        await self.system.kube.delete(SNAPSHOTS, self.name, self.namespace)
        for content in await self.contents():
            await self.system.kube.delete(CONTENTS, content["metadata"]["name"])

    # --- looking ---

    async def get(self) -> Object:
        """The VLLMSnapshot as it is now."""
        return await self.system.snapshot(self.name, self.namespace)

    async def pods(self) -> list[Object]:
        """Its pods that are not being deleted, the oldest first."""
        pods = await self.system.replicas(self.name, self.namespace)
        return sorted(pods, key=lambda p: (p["metadata"]["creationTimestamp"], p["metadata"]["name"]))

    async def pod(self, name: str) -> Object:
        """One of its pods; LookupError if it is gone."""
        found = await self.system.kube.get(PODS, name, self.namespace)
        if found is None:
            raise LookupError(name)
        return found

    async def contents(self) -> list[Object]:
        """Its contents that are not being deleted."""
        return [o for o in await self.system.contents(self.name) if "deletionTimestamp" not in o["metadata"]]

    async def ready(self, replicas: int, timeout_s: float = 60.0) -> list[Object]:
        """Wait until so many pods, and no more, are there and Ready; the oldest first."""
        await self.system.wait_ready(self.name, replicas, self.namespace, timeout_s)
        return await self.pods()

    async def captured(self, timeout_s: float = 60.0) -> str:
        """Wait for an artifact; its name."""
        content = await self.system.wait_captured(self.name, timeout_s)
        return str(content["metadata"]["name"])

    async def seeded(self) -> tuple[Object, str]:
        """Wait until the first replica serves and is captured: the pod and the content."""
        content = await self.captured()
        return (await self.ready(1))[0], content

    async def first_pod(self) -> Object:
        """Wait for the first pod, in whatever state."""

        async def probe() -> Object | None:
            pods = await self.pods()
            return pods[0] if pods else None

        return await self.system.until(f"a pod of {self.name}", probe, 30)

    async def newcomer(self, known: Sequence[Object], timeout_s: float = 30.0) -> Object:
        """Wait for a pod that is not among these."""

        async def probe() -> Object | None:
            return next((p for p in await self.pods() if p["metadata"]["name"] not in names(known)), None)

        return await self.system.until(f"a new pod of {self.name}", probe, timeout_s)

    # --- asking ---

    async def respond(self, pod: Object) -> Object | None:
        """The whole answer of a replica; None while it does not serve."""
        address, port = pod.get("status", {}).get("podIP"), pod["metadata"].get("annotations", {}).get(c.ANNOTATION_PORT)
        if not address or not port:
            return None
        body = {"model": "small", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        return await self.system.post(address, int(port), "/v1/completions", body, timeout_s=5)

    async def ask(self, pod: Object) -> str | None:
        """What it completes PROMPT with; None while it does not serve."""
        reply = await self.respond(pod)
        return None if reply is None else str(reply["choices"][0]["text"])

    async def endpoint(self) -> tuple[str, int]:
        """Cluster address and port of its Service."""
        service = await self.system.kube.get(SERVICES, self.name, self.namespace)
        assert service is not None
        return service["spec"]["clusterIP"], service["spec"]["ports"][0]["port"]

    async def load(self) -> Load:
        """Clients of its Service, by the cluster address."""
        address, port = await self.endpoint()
        return Load(address, port, {"model": "small", "prompt": PROMPT, "max_tokens": TOKENS})

    async def crash(self, pod: Object, how: str = "exit") -> None:
        """Let the engine end itself: with an error, with code 0 (`finish`), or by taking all the memory that it can get (`memory`)."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            port = int(pod["metadata"]["annotations"][c.ANNOTATION_PORT])
            await self.system.post(pod["status"]["podIP"], port, "/crash", {"how": how}, timeout_s=30)

    def log(self, pod: Object, *options: str) -> str:
        """kubectl logs."""
        return self.system.backend.kubectl("-n", self.namespace, "logs", pod["metadata"]["name"], "-c", c.CONTAINER, *options)

    def ticks(self, pod: Object, *options: str) -> list[int]:
        """The numbers that the engine has counted in its log."""
        return [int(line.split()[1]) for line in self.log(pod, *options).splitlines() if line.startswith("tick ")]

    # --- judging ---

    def never_wrong(self, *allowed: str) -> None:
        """Assert that no replica ever answered anything else."""
        wrong = {uid: answers - set(allowed) for uid, answers in self.seen.answers.items() if answers - set(allowed)}
        assert not wrong, f"wrong answers: {wrong}, allowed: {allowed}"

    async def verified_reason(self, name: str) -> str | None:
        """The reason of the readiness gate."""
        return condition(await self.pod(name), c.CONDITION_VERIFIED, "reason")
