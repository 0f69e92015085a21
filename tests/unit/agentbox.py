"""A node for tests of the agent's reconcile loop: real control volumes and ledger, an API server and node operations in memory.

What a crash of the agent leaves (files, ledger, API objects, the store, the processes) is in `Box`; what it takes along is in
`Box.start`, which makes a fresh agent. `Box.kill_at` ends the agent right after the n-th thing it did.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from vllmsnapshot import objects
from vllmsnapshot.agent import facts
from vllmsnapshot.agent.cache import Cache
from vllmsnapshot.agent.contents import Contents
from vllmsnapshot.agent.control import Files, control_path, read_files
from vllmsnapshot.agent.ledger import Ledger
from vllmsnapshot.agent.node import Node
from vllmsnapshot.agent.nodeops import Digested, Health, Order, PodRef, Revived, Shelf, Stored
from vllmsnapshot.agent.outbox import Outbox
from vllmsnapshot.agent.pods import Pods
from vllmsnapshot.agent.removal import Removal
from vllmsnapshot.agent.space import Usage
from vllmsnapshot.api import constants as c
from vllmsnapshot.api.types import PodReport, PodSettings
from vllmsnapshot.kube import CONTENTS, PODS, ApiError, Kube, Resource
from vllmsnapshot_child import protocol
from vllmsnapshot_child.protocol import Failed, Hello, Message, Oracle, Ready, Serving

NODE = "node-1"
PARIS = Oracle(token_ids=[7042], text=" Paris", sampled_token_logprob=-0.24)
ROME = Oracle(token_ids=[9999], text=" Rome", sampled_token_logprob=-0.9)
T0 = time.time()
"""About now: control files that the agent writes have real modification times."""


class Killed(BaseException):
    """The agent process ends here."""


class NodeError(Exception):
    """As the node operations raise them."""

    def __init__(self, reason: str, message: str = "because") -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class FakeKube:
    """The calls that the agent makes, on objects in memory. Not an API server: the real one is in tests/controlplane."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.down = False
        self.writes: list[str] = []
        self._version = 0

    def _key(self, resource: Resource, name: str, namespace: str | None) -> tuple[str, str, str]:
        return resource.plural, namespace or "" if resource.namespaced else "", name

    def _store(self, resource: Resource, obj: dict[str, Any]) -> dict[str, Any]:
        meta = self.touch(obj)["metadata"]
        self.objects[self._key(resource, meta["name"], meta.get("namespace"))] = obj
        return copy.deepcopy(obj)

    def add(self, resource: Resource, obj: dict[str, Any]) -> dict[str, Any]:
        return self._store(resource, copy.deepcopy(obj))

    def touch(self, obj: dict[str, Any]) -> dict[str, Any]:
        """Give an object a new version."""
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        return obj

    def _up(self) -> None:
        if self.down:
            raise ApiError(0, "TransportError", "connection refused")

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> dict[str, Any] | None:
        self._up()
        return copy.deepcopy(self.objects.get(self._key(resource, name, namespace)))

    async def list(self, resource: Resource, namespace: str | None = None, **_: Any) -> Sequence[dict[str, Any]]:
        self._up()
        return [copy.deepcopy(x) for (plural, *_), x in self.objects.items() if plural == resource.plural]

    async def create(self, resource: Resource, obj: dict[str, Any], _manager: str) -> dict[str, Any] | None:
        self._up()
        key = self._key(resource, obj["metadata"]["name"], obj["metadata"].get("namespace"))
        if key in self.objects:
            return None
        self.writes.append(f"create {resource.plural}")
        return self._store(resource, copy.deepcopy(obj))

    async def apply(
        self, resource: Resource, obj: dict[str, Any], _manager: str, *, subresource: str | None = None
    ) -> dict[str, Any]:
        self._up()
        meta = obj["metadata"]
        live = self.objects.get(self._key(resource, meta["name"], meta.get("namespace")))
        if live is None or ("uid" in meta and meta["uid"] != live["metadata"]["uid"]):
            raise ApiError(404 if live is None else 409, "Conflict", "another object")
        self.writes.append(f"apply {resource.plural}/{subresource or ''} {meta['name']}")
        live = copy.deepcopy(live)
        if subresource == "status":
            if resource is PODS:
                old = {x["type"]: x for x in live.setdefault("status", {}).get("conditions") or []}
                old |= {x["type"]: x for x in obj["status"]["conditions"]}
                live["status"]["conditions"] = list(old.values())
            else:
                live["status"] = copy.deepcopy(obj["status"])
        else:
            for kind in ("labels", "annotations"):
                live["metadata"].setdefault(kind, {}).update(meta.get(kind) or {})
        return self._store(resource, live)

    async def patch(
        self, resource: Resource, name: str, namespace: str | None, operations: Sequence[dict[str, Any]], _manager: str
    ) -> dict[str, Any] | None:
        self._up()
        key = self._key(resource, name, namespace)
        live = self.objects.get(key)
        if live is None:
            return None
        self.writes.append(f"patch {resource.plural} {name}")
        index = int(operations[-1]["path"].rpartition("/")[2])
        live["metadata"]["finalizers"].pop(index)
        if not live["metadata"]["finalizers"] and "deletionTimestamp" in live["metadata"]:
            del self.objects[key]
        return live


class ScriptedOps:
    """Node operations that do what the test says. `did` lists the calls; the store outlives the agent."""

    def __init__(self, tick: Callable[[str], None]) -> None:
        self.tick = tick
        self.did: list[str] = []
        self.orders: list[Order] = []
        self.store: dict[str, Stored] = {}
        self.unreadable: set[str] = set()
        self.end_ages: list[float] = []
        self.broken: dict[str, Exception] = {}
        self.before: dict[str, Callable[[], None]] = {}
        self.resumed_first = True
        self.health = Health(capable=True)
        self.space = Usage(free=1 << 40)
        self.sizes: list[int] = [1_000_000, 1_000_000]
        """Of the next captures: what is expected, and what it comes to."""

    def _call(self, what: str, name: str) -> None:
        self.tick(f"before {what}")
        self.did.append(f"{what} {name}".strip())
        if what in self.before:
            self.before[what]()
        if what in self.broken:
            raise self.broken[what]

    def doctor(self) -> Health:
        return self.health

    def shelf(self) -> Shelf:
        return Shelf(artifacts=list(self.store.values()), usage=self.usage())

    def usage(self) -> Usage:
        return replace(
            self.space, artifacts={x.content: x.bytes for x in self.store.values()} | dict.fromkeys(self.unreadable, 1)
        )

    def artifact(self, content: str) -> Stored | None:
        return self.store.get(content)

    def verify(self, content: str) -> Digested:
        self._call("verify", content)
        return Digested(files=3, bytes=1_000_000)

    def delete_artifact(self, content: str) -> None:
        self._call("delete", content)
        self.store.pop(content, None)
        self.unreadable.discard(content)
        self.tick("deleted")

    def raise_pids(self, pod: PodRef) -> None:
        self._call("raise_pids", pod.name)

    def held(self) -> Sequence[str]:
        return [*self.store, *self.unreadable]

    def sweep(self) -> None:
        pass

    def restore(self, pod: PodRef, content: str, timeout_s: float, wanted: Callable[[], None]) -> Revived:
        assert timeout_s > 0
        wanted()
        self._call("restore", f"{pod.name} {content}")
        wanted()
        self.tick("restored")
        return Revived(pid=1001, bytes=1 << 30, phases={"verify": 0.5, "stage": 0.1, "criu": 1.2, "restore": 2.5})

    def clear(self, pod: PodRef) -> None:
        self._call("clear", pod.name)

    def end(self, pod: PodRef, older_than_s: float) -> None:
        assert older_than_s >= 0
        self.end_ages.append(older_than_s)
        self._call("end", pod.name)

    def retire(self, pod: PodRef, timeout_s: float, wanted: Callable[[], None]) -> None:
        assert timeout_s > 0
        wanted()
        self._call("retire", pod.name)

    def capture(self, pod: PodRef, order: Order, room: Callable[[int], None], on_resumed: Callable[[], None]) -> Stored:
        self._call("capture", f"{pod.name} {order.content}")
        self.orders.append(order)
        try:
            room(self.sizes[0])
        finally:
            self.before.get("resumed", lambda: None)()
            on_resumed()
        room(self.sizes[1])
        if "publish" in self.broken:
            raise self.broken["publish"]
        self.tick("before publish")
        made = artifact(order.content, order.content_uid, oracle=order.oracle, foreign=order.foreign)
        made = replace(made, weights=order.weights, weights_reason=order.weights_reason, cold_s=order.cold_s)
        self.store[order.content] = made
        self.tick("published")
        return made

    def resume(self, pod: PodRef) -> None:
        self._call("resume", pod.name)


def artifact(content: str, uid: str, *, oracle: Oracle | None = PARIS, foreign: bool = False) -> Stored:
    """A stored artifact."""
    return Stored(
        content=content,
        content_uid=uid,
        bytes=1_000_000,
        digest="sha256:abc",
        captured_at="2027-01-15T08:00:00Z",
        oracle=oracle,
        phases={"freeze_s": 1.5, "capture_s": 4.0},
        environment={"kernel": "6.18"},
        foreign=foreign,
    )


def pod_object(name: str, *, settings: PodSettings | None = None, identity: str = "id-1", **meta: Any) -> dict[str, Any]:
    """A replica as the operator makes it, scheduled to the node."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "creationTimestamp": objects.rfc3339(T0 - 3),
            "labels": {
                c.LABEL_MANAGED_BY: c.MANAGED_BY,
                c.LABEL_ROLE: c.ROLE_REPLICA,
                c.LABEL_IDENTITY: identity,
            },
            "annotations": {
                c.ANNOTATION_PORT: "8123",
                c.ANNOTATION_SETTINGS: (settings or PodSettings()).model_dump_json(by_alias=True),
            },
            "ownerReferences": [
                {"apiVersion": c.API_VERSION, "kind": "VLLMSnapshot", "name": "smol", "uid": "snap-1", "controller": True}
            ],
            **meta,
        },
        "spec": {
            "nodeName": NODE,
            "containers": [{"name": c.CONTAINER, "image": "x", "env": [{"name": c.ENV_HOST, "value": "0.0.0.0"}]}],
        },
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.7",
            "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": objects.rfc3339(T0 - 2)}],
        },
    }


def content_object(name: str, source: str, *, identity: str = "id-1", captured: bool = False, budget: int = 3) -> dict[str, Any]:
    """An order, or with `captured` an artifact."""
    conditions = [
        {
            "type": c.CAPTURED,
            "status": "True",
            "reason": "Captured",
            "message": "1000000 bytes",
            "lastTransitionTime": objects.rfc3339(T0 - 100),
        }
    ]
    return {
        "apiVersion": c.API_VERSION,
        "kind": "VLLMSnapshotContent",
        "metadata": {"name": name, "uid": f"uid-{name}", "finalizers": [c.FINALIZER_CONTENT]},
        "spec": {
            "snapshotRef": {"namespace": "default", "name": "smol", "uid": "snap-1"},
            "sourcePod": {"name": source, "uid": f"uid-{source}"},
            "nodeName": NODE,
            "identity": identity,
            "failureBudget": budget,
        },
        "status": {"conditions": conditions} if captured else {},
    }


class Box:
    """The node, its API server, and at most one agent."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.kubelet = str(root / "kubelet")
        self.kube = FakeKube()
        self.done: list[str] = []
        self.kill_at: int | None = None
        self.answers: dict[int, Oracle] = {}
        self.wall, self.steady = 0.0, 0.0  # how far the clocks are ahead of the real ones
        self.ops = ScriptedOps(self.tick)
        self.woken: set[str] = set()
        self.start()

    def start(self) -> None:
        """A fresh agent: everything it knows, it reads."""
        ledger = Ledger(str(self.root / "ledger"))
        ledger.load()
        self.node = Node(
            name=NODE,
            kubelet_dir=self.kubelet,
            ops=self.ops,
            kube=cast(Kube, self.kube),
            ledger=ledger,
            pods=Cache(PODS, lambda x: str(x["metadata"]["uid"]), lambda _: None),
            contents=Cache(CONTENTS, lambda x: str(x["metadata"]["name"]), lambda _: None),
            outbox=Outbox(retry_s=0.001),
            ask=self.ask,
            clock=lambda: time.time() + self.wall,
            steady=lambda: time.monotonic() + self.steady,
            wrote=self.tick,
            health=self.ops.health,
            wake_pod=self.woken.add,
        )
        ledger.wrote = self.tick
        self.pods = Pods(self.node)
        self.removal = Removal(self.node)
        self.contents = Contents(self.node, self.removal)
        self.sync()

    async def ask(self, _address: str, port: int) -> Oracle | None:
        return self.answers.get(port)

    def tick(self, what: str) -> None:
        """Called after everything that the agent does to the world."""
        self.done.append(what)
        if self.kill_at is not None and len(self.done) >= self.kill_at:
            raise Killed(what)

    def content(self, name: str) -> dict[str, Any]:
        """The content in the API, about to be changed by somebody."""
        obj = self.kube.objects["vllmsnapshotcontents", "", name]
        return self.kube.touch(obj)

    def sync(self) -> None:
        """The watches catch up."""
        for cache, plural in ((self.node.pods, "pods"), (self.node.contents, "vllmsnapshotcontents")):
            cache._sync([copy.deepcopy(x) for (kind, *_), x in self.kube.objects.items() if kind == plural])
        self.node.stored = dict(self.ops.store)

    async def settle(self) -> None:
        """Until nothing changes any more. Raises Killed."""
        for _ in range(20):
            before = (len(self.done), len(self.kube.writes))
            for uid in list(self.node.pods):
                await self.pods.settle(uid)
                self._check()
            for name in list(self.node.contents):
                await self.contents.settle(name)
                self._check()
            await self.contents.checks.drain()
            self._check()
            if not self.kube.down:
                await self.node.outbox.drain()
                self._check()
                self.sync()
            if (len(self.done), len(self.kube.writes)) == before:
                return
        raise AssertionError(f"does not come to rest: {self.done[-10:]}")

    def _check(self) -> None:
        """Killed in a task or a thread is Killed."""
        if self.kill_at is not None and len(self.done) >= self.kill_at:
            raise Killed

    async def settle_with_kill(self, n: int) -> bool:
        """Kill the agent after its n-th deed, start another and let it finish. False if there were fewer deeds."""
        self.done.clear()
        self.kill_at = n
        try:
            await self.settle()
            killed = False
        except Killed:
            killed = True
        self.kill_at = None
        self.node.outbox.stop()
        if killed:
            self.done.clear()
            self.start()
            await self.settle()
        return killed

    # --- the other actors ---

    def add_pod(self, name: str, **kwargs: Any) -> str:
        """The kubelet has made the pod's volumes."""
        obj = self.kube.add(PODS, pod_object(name, **kwargs))
        uid: str = obj["metadata"]["uid"]
        os.makedirs(control_path(self.kubelet, uid), exist_ok=True)
        self.sync()
        return uid

    def add_content(self, name: str, source: str, *, stored: bool | None = None, **kwargs: Any) -> None:
        """The operator has made a content; a captured one has its files."""
        obj = self.kube.add(CONTENTS, content_object(name, source, **kwargs))
        if kwargs.get("captured") if stored is None else stored:
            self.ops.store[name] = artifact(name, obj["metadata"]["uid"])
        self.sync()

    def advance(self, uid: str, seconds: float) -> None:
        """Time passes in a pod: its control files get older."""
        path = control_path(self.kubelet, uid)
        for name in os.listdir(path):
            file = os.path.join(path, name)
            at = os.stat(file).st_mtime - seconds
            os.utime(file, (at, at))

    def put(self, uid: str, message: Message) -> None:
        """Init or the server writes a file."""
        with protocol.open_dir(control_path(self.kubelet, uid)) as fd:
            message.save(fd)

    def hello(self, uid: str, word: str = "i1", **kwargs: Any) -> None:
        """A container starts: its init clears the control volume and says hello."""
        path = control_path(self.kubelet, uid)
        for name in protocol.ALL_FILES:
            Path(path, name).unlink(missing_ok=True)
        self.put(uid, Hello(incarnation=word, **kwargs))

    def ready(self, uid: str, word: str = "i1", *, oracle: Oracle = PARIS, protocol_version: int | None = 1) -> None:
        """The server stands at the barrier."""
        self.put(
            uid,
            Ready(
                incarnation=word,
                token_ids=oracle.token_ids,
                text=oracle.text,
                sampled_token_logprob=oracle.sampled_token_logprob,
                protocol=protocol_version,
                phases={"load_s": 20.0},
                weights="Keep",
                weights_reason="as it was measured",
            ),
        )

    def serving(self, uid: str, word: str = "i1", *, oracle: Oracle = PARIS) -> None:
        """The server serves."""
        self.put(uid, Serving(incarnation=word, host="0.0.0.0", port=8123, oracle=oracle.to_dict(), phases={"reload_s": 1.5}))

    def failed(self, uid: str, word: str = "i1", reason: str = "EngineFailed") -> None:
        """The server gave up."""
        self.put(uid, Failed(incarnation=word, reason=reason, message="no memory"))

    # --- lives ---

    async def at_barrier(self) -> str:
        """Replica `a` starts cold, stands at its barrier and is captured as `art`; its UID."""
        uid = self.add_pod("a")
        self.add_content("art", "a")
        self.hello(uid)
        await self.settle()
        self.ready(uid)
        await self.settle()
        return uid

    async def cold_and_captured(self) -> str:
        """The same, and it serves."""
        uid = await self.at_barrier()
        self.serving(uid)
        await self.settle()
        return uid

    async def restored(self, name: str = "b") -> str:
        """A replica that came up from the artifact `art` and serves; its UID."""
        uid = self.add_pod(name)
        self.hello(uid)
        await self.settle()
        self.serving(uid)
        await self.settle()
        return uid

    # --- what there is to see ---

    def files(self, uid: str) -> Files:
        """The control volume."""
        found = read_files(control_path(self.kubelet, uid))
        assert found is not None
        return found

    def pod(self, name: str) -> dict[str, Any]:
        """The pod in the API."""
        return self.kube.objects["pods", "default", name]

    def report(self, name: str) -> PodReport:
        """What the agent says of the pod."""
        return facts.report_of(self.pod(name))

    def verified(self, name: str) -> tuple[str, str]:
        """Status and reason of the readiness gate's condition."""
        found = objects.condition(self.pod(name), c.CONDITION_VERIFIED)
        return found.get("status", ""), found.get("reason", "")

    def conditions(self, name: str) -> dict[str, str]:
        """The content's conditions that are True, with their reasons."""
        obj = self.kube.objects["vllmsnapshotcontents", "", name]
        return {x["type"]: x["reason"] for x in obj.get("status", {}).get("conditions") or [] if x["status"] == "True"}

    def events(self) -> set[str]:
        """Reasons of all events."""
        return {x["reason"] for (kind, *_), x in self.kube.objects.items() if kind == "events"}
