"""The end of a serving replica: who is still answered, who is told to go elsewhere, and when it is over."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.child_harness import until
from tests.unit.test_server import Process
from vllmsnapshot_child import drain as drains
from vllmsnapshot_child.drain import Message, Traffic, TrafficMiddleware


class Http:
    """An HTTP side that the tests play by hand."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.connections = 1

    def wait(self, limit_s: float = 1000.0) -> asyncio.Task[bool]:
        return asyncio.create_task(drains.answered(self.traffic, lambda: self.connections, limit_s))


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Http:
    monkeypatch.setattr(drains, "POLL_S", 0.001)
    return Http()


async def rounds(number: int = 20) -> None:
    """Let it look that often, and more."""
    for _ in range(number):
        await asyncio.sleep(drains.POLL_S)


# --- when everything is answered ---


async def test_without_connections_it_is_over_at_once(side: Http) -> None:
    side.connections = 0
    assert await side.wait()


async def test_a_request_that_runs_is_waited_for_however_long_it_takes(side: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drains, "IDLE_S", 0.0)
    with side.traffic.request():
        task = side.wait()
        await rounds()
        assert not task.done()
    assert await task


async def test_but_for_no_longer_than_the_limit(side: Http) -> None:
    with side.traffic.request():
        assert not await side.wait(limit_s=0.01)


async def test_a_connection_may_carry_another_request(side: Http) -> None:
    """Its last response may have begun before the notice, and so have said nothing of closing."""
    task = side.wait()
    await rounds()
    assert not task.done()
    side.connections = 0
    assert await task


async def test_a_connection_that_stays_idle_is_given_up(side: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drains, "IDLE_S", 0.01)
    assert await side.wait()


# --- the middleware ---


class Exchange:
    """One request through the middleware, to an application that answers when it is told."""

    def __init__(self, traffic: Traffic, kind: str = "http") -> None:
        self.answer = asyncio.Event()
        self.sent: list[Message] = []
        self.task = asyncio.ensure_future(TrafficMiddleware(self.app, traffic)({"type": kind}, self.receive, self.send))

    async def app(self, _scope: Message, _receive: Any, send: Any) -> None:
        await self.answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b"x"})

    async def receive(self) -> Message:
        raise AssertionError

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def finish(self) -> list[tuple[bytes, bytes]]:
        self.answer.set()
        await self.task
        headers: list[tuple[bytes, bytes]] = self.sent[0]["headers"]
        return headers


async def test_requests_are_counted_while_they_run() -> None:
    traffic = Traffic()
    one, two = Exchange(traffic), Exchange(traffic)
    await asyncio.sleep(0)
    assert traffic.running == 2
    await one.finish()
    assert traffic.running == 1
    two.task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await two.task
    assert traffic.running == 0


async def test_the_life_of_the_application_is_no_request() -> None:
    traffic = Traffic()
    exchange = Exchange(traffic, "lifespan")
    await asyncio.sleep(0)
    assert traffic.running == 0
    await exchange.finish()


async def test_responses_end_their_connection_from_the_signal_on() -> None:
    traffic = Traffic()
    assert await Exchange(traffic).finish() == [(b"a", b"b")]
    early = Exchange(traffic)
    await asyncio.sleep(0)
    traffic.last = True
    assert await early.finish() == [(b"a", b"b"), (b"connection", b"close")]
    assert early.sent[1] == {"type": "http.response.body", "body": b"x"}


# --- a real server ---


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    with contextlib.closing(Process(tmp_path)) as it:
        yield it


BODY = json.dumps({"prompt": "x", "max_tokens": 20, "stream": True})


def connect(process: Process) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", process.port, timeout=30)


def log(process: Process) -> str:
    return (process.directory / "log").read_text()


def serving(process: Process, *args: str, notice_s: float) -> None:
    process.release()
    process.start(*args, notice_s=notice_s)
    process.file("serving.json")


def test_a_stream_that_runs_at_the_signal_is_sent_to_its_end(process: Process) -> None:
    serving(process, "--token-s=0.05", notice_s=0)
    running = connect(process)
    running.request("POST", "/v1/completions", BODY)
    reply = running.getresponse()
    first = reply.readline()
    process.stop()
    until(lambda: "not listening any more: 1 requests run" in log(process), "the end of the notice")
    with pytest.raises(ConnectionRefusedError):
        connect(process).connect()
    rest = reply.read()
    assert (first + rest).count(b"data: ") == 21
    assert rest.endswith(b"data: [DONE]\n\n")
    running.close()
    process.ends(0)


def test_during_the_notice_new_and_kept_connections_are_served_and_told_to_close(process: Process) -> None:
    serving(process, notice_s=1000)
    kept = connect(process)
    kept.request("GET", "/health")
    before = kept.getresponse()
    before.read()
    assert before.headers.get("connection") is None
    process.stop()
    until(lambda: "told to end" in log(process), "the signal")
    for connection in (kept, connect(process)):
        connection.request("GET", "/health")
        reply = connection.getresponse()
        reply.read()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        connection.close()


def test_a_kept_connection_that_was_never_told_is_still_answered(process: Process) -> None:
    """Its stream began before the signal and ends after the port is closed: the client does not know, and sends on."""
    serving(process, "--token-s=0.05", notice_s=0)
    kept = connect(process)
    kept.request("POST", "/v1/completions", BODY)
    reply = kept.getresponse()
    process.stop()
    until(lambda: "not listening any more" in log(process), "the end of the notice")
    assert reply.read().endswith(b"data: [DONE]\n\n")
    kept.request("GET", "/health")
    reply = kept.getresponse()
    reply.read()
    assert (reply.status, reply.headers["connection"]) == (200, "close")
    kept.close()
    process.ends(0)


def test_sigint_is_the_same(process: Process) -> None:
    serving(process, notice_s=0)
    process.stop(signal.SIGINT)
    process.ends(0)
