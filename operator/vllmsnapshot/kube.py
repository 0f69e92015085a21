"""The one place that talks to the API server: a thin layer over the official asyncio client, on plain JSON objects.

Why not the generated classes: custom resources have none, and two shapes of the same object (models and dicts) breed
conversion bugs. The client's own part is kept: configuration, credentials and their refresh, TLS, connection pool.

Every write names its field manager. Errors are one type, `ApiError`; "not found" on read and delete is a value, not an error.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio import config as kube_config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from .api import constants as c

Object = dict[str, Any]
Objects = list[Object]
"""Named, because inside `Kube` the word list is a method."""

REQUEST_TIMEOUT_S = 30.0
"""Limit of one request (seconds); longer than the API server's own 15 s webhook limit, shorter than our resync."""
WATCH_TIMEOUT_S = 290
"""The server ends a watch after this time, so that a silently dead connection is noticed in bounded time."""
PAGE_SIZE = 500
FIRST_RETRY_S, LAST_RETRY_S = 0.2, 30.0
"""Of a watch that failed."""
MAX_RETRY_AFTER_S = 120.0
"""The API server asks for a second; what stands in front of it might ask for a day."""
MAX_EVENT_BYTES = 16 << 20
"""Of a watch. The API server's own limit of an object is a tenth of it."""


@dataclass(frozen=True)
class Resource:
    """A kind as a path: `group` is empty for core/v1."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """`group/version`, or `version` for the core group."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """The URL path of the collection, the object or its subresource."""
        parts = ["/apis", self.group, self.version] if self.group else ["/api", self.version]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        if name is not None:
            parts.append(quote(name, safe=""))
        if subresource is not None:
            parts.append(subresource)
        return "/".join(parts)


PODS = Resource("", "v1", "pods", "Pod")
SERVICES = Resource("", "v1", "services", "Service")
NODES = Resource("", "v1", "nodes", "Node", namespaced=False)
EVENTS = Resource("events.k8s.io", "v1", "events", "Event")
SNAPSHOTS = Resource(c.GROUP, c.VERSION, "vllmsnapshots", "VLLMSnapshot")
CONTENTS = Resource(c.GROUP, c.VERSION, "vllmsnapshotcontents", "VLLMSnapshotContent", namespaced=False)
SNAPSHOT_NODES = Resource(c.GROUP, c.VERSION, "vllmsnapshotnodes", "VLLMSnapshotNode", namespaced=False)


class ApiError(Exception):
    """The API server refused or could not be reached (`status` 0). `reason` and `message` are those of its Status object."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s

    @property
    def conflict(self) -> bool:
        """The object changed, exists already or has another UID: read again and decide again."""
        return self.status == 409

    @property
    def gone(self) -> bool:
        """The resource version of a watch or of a list page is too old: list again."""
        return self.status == 410

    @property
    def refused(self) -> bool:
        """The request itself is wrong for the server (invalid, forbidden, quota): repeating it at once does not help."""
        return self.status in (400, 403, 422)


@dataclass(frozen=True)
class WatchEvent:
    """A change, or with `type` SYNC the complete list at one moment (after every (re)connection)."""

    type: str
    object: Object
    items: tuple[Object, ...] = ()


@dataclass(frozen=True)
class Call:
    """A request that was made, in the words of RBAC. `status` is 0 where no answer came; `seconds` until it began."""

    verb: str
    group: str
    resource: str
    """With its subresource after a slash; empty for a path that is no resource."""
    status: int
    seconds: float

    @classmethod
    def of(cls, method: str, path: str, query: Mapping[str, Any], status: int, seconds: float) -> Call:
        """From what was sent."""
        parts = path.strip("/").split("/")
        group, parts = (parts[1], parts[3:]) if parts[0] == "apis" else ("", parts[2:])
        if parts[:1] == ["namespaces"] and len(parts) > 2:
            parts = parts[2:]
        named = len(parts) > 1
        verb = {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete" if named else "deletecollection"}.get(
            method, "watch" if query.get("watch") else "get" if named else "list"
        )
        return cls(verb, group, "/".join(parts[:1] + parts[2:]), status, seconds)


JSON_DEPTH: Final = 10_000
"""How deep objects may be nested: what the API server's own decoder takes (Go's encoding/json). A schema that preserves unknown
fields (podTemplate.spec) does not limit it, and Python's decoder gives up at the recursion limit, 1000 by default: one such object
would take the list of all from us, and from kopf. A level takes less than 500 bytes of a stack of 8 MiB."""


class Kube:
    """An API client. Use as an async context manager, or call `close`. `observe` is told of every request."""

    def __init__(self, client: ApiClient) -> None:
        sys.setrecursionlimit(max(sys.getrecursionlimit(), JSON_DEPTH + 2_000))
        self._client = client
        self.observe: Callable[[Call], None] = lambda _: None
        self.refused_since: float | None = None
        """Since when (monotonic seconds) every answer has been a 401; None: the last one was another."""

    @classmethod
    async def connect(cls, kubeconfig: str | None = None, context: str | None = None) -> Kube:
        """From a kubeconfig file where one is given (or found by $KUBECONFIG), else from the pod's service account."""
        configuration = Configuration()
        if kubeconfig is None:
            try:
                kube_config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
                return cls(ApiClient(configuration))
            except kube_config.ConfigException:
                pass
        await kube_config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=kubeconfig, context=context, client_configuration=configuration
        )
        return cls(ApiClient(configuration))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # --- requests ----------------------------------------------------------------------------------------------------

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> Object:
        """One request, one JSON answer. Raises ApiError for every status from 400 on and for every transport error.

        After a transport error (status 0) nobody knows whether a write was committed: the caller looks again.
        """
        response = await self._send(method, path, query, body, content_type, aiohttp.ClientTimeout(total=timeout_s))
        try:
            raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise ApiError(0, "TransportError", f"{method} {path}: {type(e).__name__}: {e}") from e
        try:
            result = json.loads(raw) if raw else {}
        except (ValueError, RecursionError) as e:
            # Something between us and the server has answered in its place.
            raise ApiError(0, "TransportError", f"{method} {path}: the answer is no JSON: {raw[:200]!r}") from e
        if not isinstance(result, dict):
            raise ApiError(0, "TransportError", f"{method} {path}: the answer is no object")
        return result

    async def _send(
        self, method: str, path: str, query: Mapping[str, Any] | None, body: Any, content_type: str, limit: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        url = self._client.configuration.host + path
        params = {k: v for k, v in (query or {}).items() if v is not None}
        if params:
            url += "?" + urlencode(params)
        headers = {"Accept": "application/json", "Content-Type": content_type, "User-Agent": "vllmsnapshot"}
        began, status = time.monotonic(), 0
        try:
            # Refreshes the service account's token, which expires within the hour.
            await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
            answer = await self._client.rest_client.request(  # type: ignore[no-untyped-call]
                method, url, headers=headers, body=body, _request_timeout=limit
            )
            response: aiohttp.ClientResponse = answer.response
            status = response.status
            if response.status < 400:
                return response
            raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError, kube_config.ConfigException) as e:
            # The last: the token's file, which is read again each minute, is empty.
            raise ApiError(0, "TransportError", f"{method} {path}: {type(e).__name__}: {e}") from e
        finally:
            if status and status != 401:
                self.refused_since = None
            elif status and self.refused_since is None:
                self.refused_since = time.monotonic()
            self.observe(Call.of(method, path, params, status, time.monotonic() - began))
        raise _error(response.status, raw, response.headers.get("Retry-After"))

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Object | None:
        """The object, or None if there is none of that name."""
        try:
            return await self.request("GET", resource.path(namespace, name))
        except ApiError as e:
            if e.status == 404:
                return None
            raise

    async def list(
        self, resource: Resource, namespace: str | None = None, *, labels: str | None = None, fields: str | None = None
    ) -> Objects:
        """All objects, live from etcd (not from the watch cache: a stale list has made operators act twice)."""
        items, _ = await self.list_with_version(resource, namespace, labels=labels, fields=fields)
        return items

    async def list_with_version(
        self, resource: Resource, namespace: str | None = None, *, labels: str | None = None, fields: str | None = None
    ) -> tuple[Objects, str]:
        """As `list`, with the resource version from which a watch continues."""
        items: Objects = []
        token: str | None = None
        while True:
            page = await self.request(
                "GET",
                resource.path(namespace),
                query={"labelSelector": labels, "fieldSelector": fields, "limit": PAGE_SIZE, "continue": token},
            )
            for item in page.get("items") or []:
                # Items of a list carry no type.
                items.append({"apiVersion": resource.api_version, "kind": resource.kind, **item})
            meta = page.get("metadata")
            if not isinstance(meta, dict) or "resourceVersion" not in meta:
                raise ApiError(0, "TransportError", f"list {resource.plural}: the answer is no list")
            token = meta.get("continue") or None
            if token is None:
                return items, meta["resourceVersion"]

    async def create(self, resource: Resource, obj: Object, manager: str) -> Object | None:
        """Create; None if an object of that name exists already (whose, the caller must look)."""
        try:
            return await self.request(
                "POST", resource.path(obj["metadata"].get("namespace")), query={"fieldManager": manager}, body=obj
            )
        except ApiError as e:
            if e.status == 409 and e.reason == "AlreadyExists":
                return None
            raise

    async def apply(self, resource: Resource, obj: Object, manager: str, *, subresource: str | None = None) -> Object:
        """Server-side apply of the fields in `obj`, taking them over from any other manager.

        Give metadata.uid to keep a same-named successor from being changed. Fields that an earlier apply of this manager
        held and `obj` does not are removed: always apply the manager's whole intent.
        """
        meta = obj["metadata"]
        body = {"apiVersion": resource.api_version, "kind": resource.kind, **obj}
        return await self.request(
            "PATCH",
            resource.path(meta.get("namespace"), meta["name"], subresource),
            query={"fieldManager": manager, "force": "true"},
            body=body,
            content_type="application/apply-patch+yaml",
        )

    async def patch(
        self, resource: Resource, name: str, namespace: str | None, operations: Objects, manager: str
    ) -> Object | None:
        """JSON patch, all or nothing (`test` operations guard it: 422 when one fails); None if the object is gone."""
        try:
            return await self.request(
                "PATCH",
                resource.path(namespace, name),
                query={"fieldManager": manager},
                body=operations,
                content_type="application/json-patch+json",
            )
        except ApiError as e:
            if e.status == 404:
                return None
            raise

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        grace_period_s: int | None = None,
    ) -> bool:
        """Delete the object of this name and UID; False if there is none (any more): a successor is never touched."""
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        if grace_period_s is not None:
            body["gracePeriodSeconds"] = grace_period_s
        try:
            await self.request("DELETE", resource.path(namespace, name), body=body)
        except ApiError as e:
            if e.status == 404 or (e.conflict and uid is not None):
                return False
            raise
        return True

    async def watch(
        self, resource: Resource, namespace: str | None = None, *, labels: str | None = None, fields: str | None = None
    ) -> AsyncIterator[WatchEvent]:
        """List, then follow changes, for ever; after every interruption list again and yield SYNC with all that is there.

        A consumer compares SYNC with what it knows: deletions that happened while the watch was down have no event of
        their own. Transport errors are retried with a capped, jittered back-off; errors of the request are raised.
        """
        delay = FIRST_RETRY_S
        while True:
            try:
                items, version = await self.list_with_version(resource, namespace, labels=labels, fields=fields)
                yield WatchEvent("SYNC", {}, tuple(items))
                while True:
                    quiet = True
                    started = time.monotonic()
                    async for event in self._watch_once(resource, namespace, labels, fields, version):
                        # Only now it is known to work: a list that succeeds beside a watch that fails must not be repeated
                        # several times a second by every agent of the cluster.
                        quiet, delay = False, FIRST_RETRY_S
                        version = event.object["metadata"]["resourceVersion"]
                        if event.type != "BOOKMARK":
                            yield event
                    if quiet and time.monotonic() - started < 1.0:
                        raise ApiError(0, "TransportError", f"watch {resource.plural}: ended at once")
            except ApiError as e:
                if e.refused or e.status in (401, 404):
                    raise
                await asyncio.sleep(e.retry_after_s or delay * random.uniform(0.5, 1.5))  # noqa: S311
                delay = min(delay * 2, LAST_RETRY_S)

    async def _watch_once(
        self, resource: Resource, namespace: str | None, labels: str | None, fields: str | None, version: str
    ) -> AsyncIterator[WatchEvent]:
        query = {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": WATCH_TIMEOUT_S,
            "labelSelector": labels,
            "fieldSelector": fields,
        }
        # Bookmarks come about once a minute: longer silence means a dead connection.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=WATCH_TIMEOUT_S + 15)
        response = await self._send("GET", resource.path(namespace), query, None, "application/json", timeout)
        try:
            async for line in _lines(response.content):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise ApiError(status.get("code", 0), status.get("reason", ""), status.get("message", ""))
                event["object"]["metadata"]["resourceVersion"]  # or it is no event
                yield WatchEvent(event["type"], event["object"])
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError, RecursionError) as e:
            raise ApiError(0, "TransportError", f"watch {resource.plural}: {type(e).__name__}: {e}") from e
        finally:
            response.close()


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a watch. Iterating over the reader itself fails at 128 KiB, and annotations alone may have twice that."""
    rest = bytearray()
    async for chunk in content.iter_any():
        first, newline, more = chunk.partition(b"\n")
        rest += first
        if len(rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        while newline:
            if rest:
                yield bytes(rest)
            first, newline, more = more.partition(b"\n")
            rest = bytearray(first)


def _error(status: int, raw: bytes, retry_after: str | None) -> ApiError:
    try:
        body = json.loads(raw)
        reason, message = str(body.get("reason") or ""), str(body.get("message") or "")
        details = (body.get("details") or {}).get("retryAfterSeconds")
    except (ValueError, AttributeError, RecursionError):
        reason, message, details = "", raw[:512].decode(errors="replace"), None
    wait = float(retry_after) if retry_after and retry_after.isascii() and retry_after.isdigit() else None
    if wait is None and isinstance(details, (int, float)):
        wait = float(details)
    return ApiError(status, reason, message, min(wait, MAX_RETRY_AFTER_S) if wait else None)
