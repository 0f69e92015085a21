"""An API server in memory, as far as operator and agent use one, below `Kube.request`: all of the client's own code runs.

It has resource versions, UIDs and generations, 409 and 422, server-side apply with field managers, the status
subresource, finalizers, graceful deletion of pods, garbage collection by owner, label and field selectors, and watches with
a bounded history. What it lacks (validation, defaults, admission) is tested against the real one in tests/controlplane.
"""

from __future__ import annotations

import asyncio
import itertools
import marshal
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from vllmsnapshot.kube import (
    CONTENTS,
    EVENTS,
    NODES,
    PODS,
    SERVICES,
    SNAPSHOT_NODES,
    SNAPSHOTS,
    ApiError,
    Kube,
    Object,
    Resource,
    WatchEvent,
)
from vllmsnapshot.objects import rfc3339

from .points import Points

ALL = (CONTENTS, EVENTS, NODES, PODS, SERVICES, SNAPSHOT_NODES, SNAPSHOTS)
CUSTOM = (CONTENTS, SNAPSHOT_NODES, SNAPSHOTS)
Key = tuple[str, str, str]
"""Plural, namespace, name."""

LISTS_BY_KEY = {"conditions": "type", "ownerReferences": "uid"}
SETS = {"finalizers"}
HISTORY = 400


T = TypeVar("T")


def clone(value: T) -> T:
    """A copy of a JSON value. Half of a life is copies; this is the fastest way, many times as fast as copy.deepcopy."""
    return cast(T, marshal.loads(marshal.dumps(cast(Any, value))))


@dataclass
class Change:
    """An event of a watch, or with `object` None nothing."""

    version: int
    type: str
    key: Key
    object: Object
    at: float
    """When it happened, by the server's clock."""


@dataclass
class Call:
    """One request, as a fault sees it."""

    method: str
    resource: Resource
    namespace: str
    name: str
    subresource: str
    user: str

    def __str__(self) -> str:
        return (
            f"{self.user}: {self.method} {self.resource.plural}{'/' + self.subresource if self.subresource else ''} {self.name}"
        )

    @property
    def writes(self) -> bool:
        """Whether it changes anything."""
        return self.method != "GET"


class Server:
    """The objects, and who watches them. `clock` gives seconds since the epoch."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.objects: dict[Key, Object] = {}
        self.version = 0
        self.history: deque[Change] = deque(maxlen=HISTORY)
        self.compacted = 0
        """Watches from versions up to this one are answered 410."""
        self.writes: list[str] = []
        self.fields: dict[tuple[Key, str, str], Object] = {}
        """What a manager has applied last, by object, manager and subresource."""
        self._uids = itertools.count(1)
        self.moved = asyncio.Event()
        self.listeners: list[Callable[[Change], None]] = []
        self.invariant: Callable[[], None] = lambda: None

    # --- state -------------------------------------------------------------------------------------------------------

    def seen(self, resource: Resource) -> list[Object]:
        """All objects of a kind, in order of creation, not to be changed."""
        return [x for (plural, _, _), x in self.objects.items() if plural == resource.plural]

    def all(self, resource: Resource) -> list[Object]:
        """As `seen`, but copies."""
        return [clone(x) for (plural, _, _), x in self.objects.items() if plural == resource.plural]

    def get(self, resource: Resource, name: str, namespace: str = "") -> Object | None:
        """One object."""
        return clone(self.objects.get((resource.plural, namespace if resource.namespaced else "", name)))

    def edit(self, resource: Resource, name: str, namespace: str, change: Callable[[Object], None]) -> Object | None:
        """As somebody who reads and replaces."""
        key = (resource.plural, namespace if resource.namespaced else "", name)
        old = self.objects.get(key)
        if old is None:
            return None
        new = clone(old)
        change(new)
        return self._commit(key, new, "edit")

    def add(self, resource: Resource, obj: Object) -> Object:
        """As somebody who creates."""
        return self.post(resource, obj)

    def post(self, resource: Resource, obj: Object) -> Object:
        """Create. Raises ApiError."""
        obj = clone(obj)
        meta = obj.setdefault("metadata", {})
        key = (resource.plural, meta.get("namespace", "") if resource.namespaced else "", meta["name"])
        if key in self.objects:
            raise ApiError(409, "AlreadyExists", f'{resource.plural} "{meta["name"]}" already exists')
        for ref in meta.get("ownerReferences") or []:
            assert ref["uid"], "an owner without UID"
        obj = {"apiVersion": resource.api_version, "kind": resource.kind, **obj}
        meta |= {"uid": f"uid-{next(self._uids)}", "generation": 1, "creationTimestamp": rfc3339(self.clock())}
        if resource in CUSTOM:
            obj.pop("status", None)
        if resource == PODS:
            obj.setdefault("status", {}).setdefault("phase", "Pending")
        made = self._commit(key, obj, "create")
        for ref in meta.get("ownerReferences") or []:
            self._collect(ref["uid"])  # created for an owner that has gone: the collector finds it as well
        return made

    def delete(
        self, resource: Resource, name: str, namespace: str = "", *, uid: str | None = None, grace: int | None = None
    ) -> None:
        """Delete, or mark as being deleted. Raises ApiError."""
        key = (resource.plural, namespace if resource.namespaced else "", name)
        old = self.objects.get(key)
        if old is None:
            raise ApiError(404, "NotFound", f"{resource.plural} {name}")
        if uid is not None and old["metadata"]["uid"] != uid:
            raise ApiError(409, "Conflict", f"the UID in the precondition is not that of {name}")
        graceful = resource == PODS and grace != 0 and (old.get("spec") or {}).get("nodeName")
        if graceful or old["metadata"].get("finalizers"):
            if "deletionTimestamp" not in old["metadata"]:
                new = clone(old)
                new["metadata"]["deletionTimestamp"] = rfc3339(self.clock())
                self._commit(key, new, "delete")
            return
        self._remove(key)

    def _remove(self, key: Key) -> None:
        gone = self.objects.pop(key)
        for owned in [k for k in self.fields if k[0] == key]:
            del self.fields[owned]
        self.version += 1
        self.writes.append(f"remove {'/'.join(filter(None, key))}")
        gone = clone(gone)
        gone["metadata"]["resourceVersion"] = str(self.version)
        self._publish(Change(self.version, "DELETED", key, gone, self.clock()))
        self._collect(gone["metadata"]["uid"])

    def _collect(self, uid: str) -> None:
        """The garbage collector: what has no owner any more goes."""
        alive = {x["metadata"]["uid"] for x in self.objects.values()}
        for key, obj in list(self.objects.items()):
            owners = [ref["uid"] for ref in obj["metadata"].get("ownerReferences") or []]
            if uid in owners and not alive.intersection(owners) and key in self.objects:
                resource = next(r for r in ALL if r.plural == key[0])
                self.delete(resource, key[2], key[1])

    def _commit(self, key: Key, obj: Object, how: str) -> Object:
        old = self.objects.get(key)
        if old is not None:
            same = {**obj, "metadata": {**obj["metadata"], "resourceVersion": old["metadata"]["resourceVersion"]}}
            if same == old:
                return clone(old)
            if obj.get("spec") != old.get("spec"):
                obj["metadata"]["generation"] = old["metadata"].get("generation", 1) + 1
            if "deletionTimestamp" in obj["metadata"] and not obj["metadata"].get("finalizers") and key[0] != PODS.plural:
                self.objects[key] = obj
                self._remove(key)
                return clone(obj)
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        self.objects[key] = obj
        self.writes.append(f"{how} {'/'.join(filter(None, key))}")
        self._publish(Change(self.version, "ADDED" if old is None else "MODIFIED", key, clone(obj), self.clock()))
        return clone(obj)

    def _publish(self, change: Change) -> None:
        if len(self.history) == HISTORY:
            self.compacted = self.history[0].version
        self.history.append(change)
        self.invariant()
        for listener in self.listeners:
            listener(change)
        self.moved.set()
        self.moved = asyncio.Event()

    # --- requests ----------------------------------------------------------------------------------------------------

    def answer(self, call: Call, query: Mapping[str, Any], body: Any, content_type: str) -> Object:
        """What the server makes of a request. Raises ApiError."""
        key = (call.resource.plural, call.namespace, call.name)
        match call.method:
            case "GET" if call.name:
                if key not in self.objects:
                    raise ApiError(404, "NotFound", str(call))
                return clone(self.objects[key])
            case "GET":
                return self.listed(call.resource, call.namespace, query.get("labelSelector"), query.get("fieldSelector"))
            case "POST":
                return self.post(call.resource, body)
            case "DELETE":
                uid = (body.get("preconditions") or {}).get("uid")
                self.delete(call.resource, call.name, call.namespace, uid=uid, grace=body.get("gracePeriodSeconds"))
                return {}
            case "PATCH" if content_type == "application/apply-patch+yaml":
                return self.apply(call, body, str(query["fieldManager"]))
            case "PATCH" if content_type == "application/json-patch+json":
                return self.patch(call, body)
        raise AssertionError(f"not made for {call} {content_type}")

    def listed(self, resource: Resource, namespace: str, labels: str | None, fields: str | None) -> Object:
        """A complete list."""
        items = [
            clone(obj)
            for (plural, where, _), obj in self.objects.items()
            if plural == resource.plural and namespace in ("", where) and matches(obj, labels, fields)
        ]
        return {"items": items, "metadata": {"resourceVersion": str(self.version)}}

    def apply(self, call: Call, body: Object, manager: str) -> Object:
        """Server-side apply, forced: what this manager held and does not hold any more goes, unless somebody else holds it."""
        key = (call.resource.plural, call.namespace, call.name)
        live = self.objects.get(key)
        uid = body["metadata"].get("uid")
        if live is None:
            if call.subresource or uid is not None:
                raise (
                    ApiError(404, "NotFound", str(call))
                    if call.subresource
                    else ApiError(409, "Conflict", f"{call}: uid mismatch")
                )
            made = clone(body)
            made["metadata"].setdefault("namespace", call.namespace) if call.resource.namespaced else None
            made = self.post(call.resource, made)
            self.fields[key, manager, ""] = _applied(body, "")
            return made
        if uid is not None and uid != live["metadata"]["uid"]:
            raise ApiError(409, "Conflict", f"{call}: uid mismatch")
        mine = _applied(body, call.subresource)
        before = self.fields.get((key, manager, call.subresource), {})
        others = [held for (k, m, s), held in self.fields.items() if k == key and (m, s) != (manager, call.subresource)]
        new = clone(live)
        for path in sorted(set(_leaves(before)) - set(_leaves(mine)), key=len, reverse=True):
            if not any(path in set(_leaves(held)) for held in others):
                _remove(new, path)
        _merge(new, mine)
        self.fields[key, manager, call.subresource] = mine
        return self._commit(key, new, f"apply {manager}")

    def patch(self, call: Call, operations: list[Object]) -> Object:
        """JSON patch, all or nothing."""
        key = (call.resource.plural, call.namespace, call.name)
        live = self.objects.get(key)
        if live is None:
            raise ApiError(404, "NotFound", str(call))
        new = clone(live)
        for operation in operations:
            *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
            at: Any = new
            try:
                for part in parents:
                    at = at[int(part)] if isinstance(at, list) else at[part]
                index: Any = int(last) if isinstance(at, list) else last
                match operation["op"]:
                    case "test":
                        if at[index] != operation["value"]:
                            raise KeyError(last)
                    case "remove":
                        del at[index]
                    case "add" if isinstance(at, list):
                        at.insert(index, operation["value"])
                    case "replace":
                        at[index]
                        at[index] = operation["value"]
                    case _:
                        at[index] = operation["value"]
            except (KeyError, IndexError) as e:
                raise ApiError(422, "Invalid", f"{call}: {operation['op']} {operation['path']} failed") from e
        return self._commit(key, new, "patch")


def matches(obj: Object, labels: str | None, fields: str | None) -> bool:
    """Equality and `in` on labels; equality on fields."""
    have = obj["metadata"].get("labels") or {}
    for term in re.findall(r"[^,(]+(?:\([^)]*\))?", labels or ""):
        if " in " in term:
            name, _, values = term.partition(" in ")
            if have.get(name.strip()) not in values.strip("() ").split(","):
                return False
        else:
            name, _, value = term.partition("=")
            if have.get(name) != value:
                return False
    for term in filter(None, (fields or "").split(",")):
        path, _, value = term.partition("=")
        at: Any = obj
        for part in path.split("."):
            at = (at or {}).get(part)
        if at != value:
            return False
    return True


# --- server-side apply -----------------------------------------------------------------------------------------------


def _applied(body: Object, subresource: str) -> Object:
    """The part of an applied body that counts."""
    if subresource:
        return {"status": clone(body.get("status") or {})}
    meta = {k: v for k, v in body["metadata"].items() if k in ("labels", "annotations", "finalizers", "ownerReferences")}
    rest = {k: v for k, v in body.items() if k not in ("apiVersion", "kind", "metadata", "status")}
    return clone({**rest, "metadata": meta})


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all that is held."""
    name = path[-1] if path else ""
    if isinstance(value, dict) and value:
        for k, v in value.items():
            yield from _leaves(v, (*path, k))
    elif isinstance(value, list) and name in LISTS_BY_KEY:
        for item in value:
            yield (*path, f"[{item[LISTS_BY_KEY[name]]}]")
    elif isinstance(value, list) and name in SETS:
        for item in value:
            yield (*path, f"[{item}]")
    elif path:
        yield path


def _remove(obj: Object, path: tuple[str, ...]) -> None:
    at: Any = obj
    for part in path[:-1]:
        if not isinstance(at, dict) or part not in at:
            return
        at = at[part]
    last = path[-1]
    if last.startswith("[") and isinstance(at, list):
        name = path[-2]
        word = last[1:-1]
        at[:] = [x for x in at if (x[LISTS_BY_KEY[name]] if name in LISTS_BY_KEY else x) != word]
        if not at:
            _remove(obj, path[:-1])
    elif isinstance(at, dict):
        at.pop(last, None)


def _merge(live: Object, applied: Object) -> None:
    for name, value in applied.items():
        if isinstance(value, dict):
            _merge(live.setdefault(name, {}), value)
        elif name in LISTS_BY_KEY and isinstance(value, list):
            items = {x[LISTS_BY_KEY[name]]: x for x in live.get(name) or []}
            for item in value:
                items[item[LISTS_BY_KEY[name]]] = {**items.get(item[LISTS_BY_KEY[name]], {}), **item}
            if items:
                live[name] = list(items.values())
        elif name in SETS and isinstance(value, list):
            merged = list(dict.fromkeys([*(live.get(name) or []), *value]))
            if merged:
                live[name] = merged
        else:
            live[name] = clone(value)


# --- client ----------------------------------------------------------------------------------------------------------


@dataclass
class WatchFaults:
    """What happens to the events of one client's watches."""

    lag_s: float = 0.0
    drop: Callable[[int], bool] = lambda _: False
    """By number of the event: it never arrives."""
    twice: Callable[[int], bool] = lambda _: False
    gone_every: int = 0
    """After so many events the watch ends with 410."""


@dataclass
class Faults:
    """What happens to requests: `before` and `after` may raise ApiError, `after` in place of what the server answers.

    `number` counts this client's requests, reads too.
    """

    before: Callable[[Call, int], None] = lambda _call, _number: None
    after: Callable[[Call, int], None] = lambda _call, _number: None
    latency_s: float = 0.001
    watch: WatchFaults = field(default_factory=WatchFaults)


class Client(Kube):
    """A client of the server in memory, which belongs to one process."""

    def __init__(self, server: Server, user: str, points: Points | None = None, faults: Faults | None = None) -> None:
        super().__init__(cast(Any, None))
        self.server = server
        self.user = user
        self.points = points or Points()
        self.faults = faults or Faults()
        self.calls: list[Call] = []
        self._events = itertools.count(1)

    async def close(self) -> None:
        """Nothing is open."""

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        timeout_s: float = 30.0,
    ) -> Object:
        """See `Kube.request`."""
        call = _call(method, path, self.user)
        if self.points.dead:
            # A process that is gone asks nothing more.
            self.points.meet(str(call))
        await asyncio.sleep(self.faults.latency_s)
        self.calls.append(call)
        number = len(self.calls)
        if not self.points.spared():
            self.faults.before(call, number)
        point = self.points.meet(str(call)) if call.writes else 0
        try:
            return self.server.answer(call, query or {}, body, content_type)
        finally:
            # Also where that was refused.
            if self.points.loses(point):
                raise ApiError(0, "TransportError", "the answer was lost")
            if not self.points.spared():
                self.faults.after(call, number)

    async def _watch_once(
        self, resource: Resource, namespace: str | None, labels: str | None, fields: str | None, version: str
    ) -> AsyncIterator[WatchEvent]:
        since = int(version)
        server, faults = self.server, self.faults.watch
        seen = 0
        call = _call("GET", resource.path(namespace), self.user)
        while True:
            if not self.points.spared():
                self.faults.before(call, -1)
            if since < server.compacted:
                raise ApiError(410, "Expired", "too old resource version")
            moved = server.moved
            for change in [x for x in server.history if x.version > since and x.key[0] == resource.plural]:
                if faults.lag_s:
                    await asyncio.sleep(max(0.0, change.at + faults.lag_s - server.clock()))
                since = change.version
                if not matches(change.object, labels, fields):
                    continue
                number = next(self._events)
                if faults.drop(number):
                    # A watch loses nothing without breaking; what was lost has no event of its own after that.
                    raise ApiError(0, "TransportError", "scripted: the watch broke")
                for _ in range(2 if faults.twice(number) else 1):
                    yield WatchEvent(change.type, clone(change.object))
                seen += 1
                if faults.gone_every and seen % faults.gone_every == 0:
                    raise ApiError(410, "Expired", "too old resource version")
            if self.points.dead:
                self.points.meet("watch")
            if moved is server.moved:
                try:
                    await asyncio.wait_for(moved.wait(), 60.0)
                except TimeoutError:
                    yield WatchEvent("BOOKMARK", {"metadata": {"resourceVersion": str(since)}})


def _call(method: str, path: str, user: str) -> Call:
    parts = path.strip("/").split("/")
    rest = parts[3:] if parts[0] == "apis" else parts[2:]
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    resource = next(r for r in ALL if r.plural == rest[0])
    return Call(
        method=method,
        resource=resource,
        namespace=namespace,
        name=rest[1] if len(rest) > 1 else "",
        subresource=rest[2] if len(rest) > 2 else "",
        user=user,
    )
