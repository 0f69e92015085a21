"""The API client against a server that misbehaves: every fault is an ApiError that says what it was, or is got over."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config.incluster_config import InClusterConfigLoader

from vllmsnapshot import kube as module
from vllmsnapshot.kube import MAX_RETRY_AFTER_S, PODS, ApiError, Kube, WatchEvent

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Lab:
    """A server that does what the test says, and a client of it."""

    def __init__(self) -> None:
        self.handler: Handler | None = None
        self.requests: list[str] = []
        self.kube: Kube

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path_qs}")
        assert self.handler is not None
        return await self.handler(request)


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    lab = Lab()
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", lab.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    configuration = Configuration()
    configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    lab.kube = Kube(ApiClient(configuration))
    yield lab
    await lab.kube.close()
    await runner.cleanup()


CALLS: dict[str, Callable[[Kube], Awaitable[Any]]] = {
    "get": lambda k: k.get(PODS, "a", "ns"),
    "list": lambda k: k.list(PODS, "ns"),
    "create": lambda k: k.create(PODS, {"metadata": {"name": "a", "namespace": "ns"}}, "m"),
    "apply": lambda k: k.apply(PODS, {"metadata": {"name": "a", "namespace": "ns"}}, "m"),
    "patch": lambda k: k.patch(PODS, "a", "ns", [], "m"),
    "delete": lambda k: k.delete(PODS, "a", "ns"),
    "delete by UID": lambda k: k.delete(PODS, "a", "ns", uid="u"),
}
VALUES = {
    ("get", 404): None,
    ("patch", 404): None,
    ("delete", 404): False,
    ("delete by UID", 404): False,
    ("delete by UID", 409): False,
}
"""Statuses that are an answer and no error."""


def status(code: int, reason: str = "Scripted", **headers: str) -> Handler:
    async def handler(_: web.Request) -> web.Response:
        body = {"kind": "Status", "reason": reason, "message": "because"}
        return web.json_response(body, status=code, headers=headers)

    return handler


@pytest.mark.parametrize("code", [400, 401, 403, 404, 409, 410, 422, 429, 500, 503])
@pytest.mark.parametrize("call", CALLS)
async def test_every_status_of_every_call(lab: Lab, call: str, code: int) -> None:
    lab.handler = status(code)
    if (call, code) in VALUES:
        assert await CALLS[call](lab.kube) == VALUES[call, code]
        return
    with pytest.raises(ApiError) as e:
        await CALLS[call](lab.kube)
    assert (e.value.status, e.value.reason, e.value.message) == (code, "Scripted", "because")
    assert e.value.refused == (code in (400, 403, 422))
    assert len(lab.requests) == 1, "whoever called decides whether to try again"


async def test_an_object_that_exists_already_is_an_answer_to_its_creation(lab: Lab) -> None:
    lab.handler = status(409, "AlreadyExists")
    assert await CALLS["create"](lab.kube) is None


@pytest.mark.parametrize(
    ("headers", "body", "seconds"),
    [
        ({"Retry-After": "7"}, {}, 7.0),
        ({}, {"details": {"retryAfterSeconds": 3}}, 3.0),
        ({"Retry-After": "86400"}, {}, MAX_RETRY_AFTER_S),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, {}, None),
        ({"Retry-After": "\u00b2"}, {}, None),
        ({}, {"details": {"retryAfterSeconds": "soon"}}, None),
        ({}, {"details": "none"}, None),
        ({}, {}, None),
    ],
)
async def test_how_long_the_server_asks_to_wait(lab: Lab, headers: Any, body: Any, seconds: float | None) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response(body, status=429, headers=headers)

    lab.handler = handler
    with pytest.raises(ApiError) as e:
        await lab.kube.get(PODS, "a", "ns")
    assert e.value.retry_after_s == seconds


@pytest.mark.parametrize(
    "raw", [b"<html>busy</html>", b"[]", b'"x"', b"null", b"[" * 200_000, b'{"a":'], ids=lambda x: repr(x[:8])
)
@pytest.mark.parametrize("code", [200, 500])
@pytest.mark.parametrize("call", CALLS)
async def test_something_else_answers_in_the_servers_place(lab: Lab, call: str, code: int, raw: bytes) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(body=raw, status=code)

    lab.handler = handler
    with pytest.raises(ApiError) as e:
        await CALLS[call](lab.kube)
    assert e.value.status == (0 if code == 200 else 500)
    assert len(str(e.value)) < 2000


async def test_a_list_that_is_none(lab: Lab) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"kind": "Status"})

    lab.handler = handler
    with pytest.raises(ApiError, match="no list"):
        await lab.kube.list(PODS)


@pytest.mark.parametrize("call", CALLS)
async def test_the_connection_breaks_in_the_answer(lab: Lab, call: str) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"metadata"')
        assert request.transport is not None
        request.transport.close()
        return response

    lab.handler = handler
    with pytest.raises(ApiError) as e:
        await CALLS[call](lab.kube)
    assert e.value.status == 0


async def test_nobody_answers(lab: Lab) -> None:
    over = asyncio.Event()

    async def handler(_: web.Request) -> web.Response:
        await over.wait()
        return web.Response()

    lab.handler = handler
    with pytest.raises(ApiError) as e:
        await lab.kube.request("GET", PODS.path(), timeout_s=0.05)
    assert e.value.status == 0
    over.set()


# --- watches ---------------------------------------------------------------------------------------------------------


def pod(version: int, size: int = 0) -> dict[str, Any]:
    return {"metadata": {"name": f"p{version}", "resourceVersion": str(version), "annotations": {"x": "y" * size}}}


class Stream:
    """A collection whose watches are scripts: each is a list of pieces, and the last one stays open."""

    def __init__(self, *watches: list[bytes] | int) -> None:
        self.watches = list(watches)
        self.lists = 0
        self.from_versions: list[str] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            self.lists += 1
            return web.json_response({"items": [pod(1)], "metadata": {"resourceVersion": "1"}})
        self.from_versions.append(request.query["resourceVersion"])
        script = self.watches.pop(0) if self.watches else []
        if isinstance(script, int):
            return web.json_response({"message": "no"}, status=script)
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in script:
            await response.write(piece)
            await asyncio.sleep(0)
        if not self.watches:
            await asyncio.Event().wait()
        return response


def line(kind: str, obj: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"


async def events(kube: Kube, count: int) -> list[WatchEvent]:
    found: list[WatchEvent] = []
    async with asyncio.timeout(30):
        async for event in kube.watch(PODS):
            found.append(event)
            if len(found) == count:
                break
    return found


def names(found: list[WatchEvent]) -> list[str]:
    return [event.type if event.type == "SYNC" else event.object["metadata"]["name"] for event in found]


async def test_a_watch_follows_and_bookmarks_move_it_on(lab: Lab, quick: None) -> None:
    stream = lab.handler = Stream([line("ADDED", pod(2)), line("BOOKMARK", pod(9))], [line("ADDED", pod(10))])
    assert names(await events(lab.kube, 3)) == ["SYNC", "p2", "p10"]
    assert stream.from_versions == ["1", "9"]
    assert stream.lists == 1


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without a wait worth mentioning."""
    monkeypatch.setattr(module, "FIRST_RETRY_S", 0.001)
    monkeypatch.setattr(module, "LAST_RETRY_S", 0.002)


async def test_an_event_may_be_as_large_as_an_object_may_be(lab: Lab, quick: None) -> None:
    # Annotations alone may have 256 KiB; a reader of lines gives up at 128.
    stream = lab.handler = Stream([line("ADDED", pod(2, 900_000)), line("ADDED", pod(3))])
    assert names(await events(lab.kube, 3)) == ["SYNC", "p2", "p3"]
    assert stream.lists == 1


async def test_an_event_in_pieces_and_several_in_one(lab: Lab, quick: None) -> None:
    text = line("ADDED", pod(2)) + b"\n" + line("ADDED", pod(3)) + line("ADDED", pod(4))
    pieces = [text[:10], text[10:11], text[11:-5], text[-5:]]
    lab.handler = Stream(pieces)
    assert names(await events(lab.kube, 4)) == ["SYNC", "p2", "p3", "p4"]


@pytest.mark.parametrize(
    "script",
    [
        410,
        500,
        429,
        [],
        [line("ERROR", {"code": 410, "reason": "Expired", "message": "too old"})],
        [line("ERROR", {"code": 500})],
        [b"garbage\n"],
        [b'{"type": "ADDED"}\n'],
        [b'{"type": "ADDED", "object": {}}\n'],
        [b'{"type": "ADDED", "object": [1]}\n'],
        [b"[1]\n"],
        [b'{"type": "ADDED", "ob'],
    ],
    ids=str,
)
async def test_a_watch_that_breaks_lists_again(lab: Lab, quick: None, script: list[bytes] | int) -> None:
    stream = lab.handler = Stream(script, [line("ADDED", pod(2))])
    found = await events(lab.kube, 3)
    assert names(found) == ["SYNC", "SYNC", "p2"]
    assert [item["metadata"]["name"] for item in found[1].items] == ["p1"]
    assert stream.lists == 2


async def test_a_client_knows_whether_it_is_refused(lab: Lab) -> None:
    assert lab.kube.refused_since is None
    for code, refused in ((401, True), (500, False), (401, True), (404, False)):
        lab.handler = status(code)
        with contextlib.suppress(ApiError):
            await lab.kube.get(PODS, "a", "ns")
        assert (lab.kube.refused_since is not None) is refused


async def test_a_rotated_token_is_read_again_and_an_empty_one_is_waited_for(lab: Lab, tmp_path: Path) -> None:
    """The token of a service account is a file that the kubelet replaces."""
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        return web.json_response({})

    lab.handler = handler
    token, authority = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("one")
    authority.write_text("-")
    environ = {"KUBERNETES_SERVICE_HOST": "x", "KUBERNETES_SERVICE_PORT": "1"}
    loader = InClusterConfigLoader(str(token), str(authority), environ=environ)  # type: ignore[no-untyped-call]
    configuration = lab.kube._client.configuration
    host = configuration.host
    loader.load_and_set(configuration)  # type: ignore[no-untyped-call]

    async def ask() -> None:
        configuration.host = host
        loader.token_expires_at -= datetime.timedelta(minutes=2)  # the client's own time between two looks is one minute
        await lab.kube.get(PODS, "a", "ns")

    await ask()
    token.write_text("")
    with pytest.raises(ApiError) as e:
        await ask()
    assert e.value.status == 0
    token.write_text("two")
    await ask()
    assert seen == ["bearer one", "bearer two"]


@pytest.mark.parametrize("code", [401, 403, 404])
async def test_a_watch_that_is_refused_says_so(lab: Lab, quick: None, code: int) -> None:
    lab.handler = Stream(code, [])
    with pytest.raises(ApiError) as e:
        await events(lab.kube, 5)
    assert e.value.status == code


@pytest.mark.parametrize("script", [[], 410, 500], ids=str)
async def test_a_list_that_works_beside_a_watch_that_does_not_is_no_storm(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, script: list[bytes] | int
) -> None:
    waits: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await real(0)

    monkeypatch.setattr(random, "uniform", lambda *_: 1.0)
    stream = lab.handler = Stream(*[script] * 10, [line("ADDED", pod(2))])
    monkeypatch.setattr(asyncio, "sleep", sleep)
    await events(lab.kube, 12)
    pauses = [x for x in waits if x > 0]
    assert stream.lists == 11
    assert pauses == sorted(pauses)
    assert sum(pauses) > 100.0
