"""Clients that send one request after the other and remember what became of each: nobody may be cut off.

Each kind of client would notice another fault. A new connection per request meets a pod that is still routed to and does not
listen any more; a kept connection meets a server that closes it under a request; a stream is what is running when a server ends.
None of them tries anything again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Literal, Self

import aiohttp

from vllmsnapshot.kube import Object

Kind = Literal["new", "kept", "stream"]
KINDS: tuple[Kind, ...] = ("new", "kept", "stream")

KEPT_S = 2.0
"""How long a client keeps an idle connection: less than the server (5 s), as any well-behaved client; else the two could meet."""


@dataclass(frozen=True)
class Outcome:
    """One request. Times are seconds of the monotonic clock."""

    kind: Kind
    began: float
    ended: float
    error: str | None


class Load:
    """Clients of one OpenAI-compatible endpoint. Works in the event loop and the network namespace that it is entered in.

    `judge` is given every whole answer as it came. `pause_s`: between two requests of a client.
    """

    def __init__(
        self, address: str, port: int, body: Object, *, judge: Callable[[str], None] = lambda _: None, pause_s: float = 0.0
    ) -> None:
        self.url = f"http://{address}:{port}/v1/completions"
        self.body = body
        self.judge = judge
        self.pause_s = pause_s
        self.outcomes: list[Outcome] = []
        self._clients: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self._news = asyncio.Condition()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def start(self, *kinds: Kind) -> None:
        """One more client of each of these kinds."""
        self._clients += [asyncio.create_task(self._client(kind)) for kind in kinds]

    async def stop(self) -> None:
        """Let every client finish its request, and end it."""
        self._stop.set()
        clients, self._clients = self._clients, []
        await asyncio.gather(*clients)
        self._stop.clear()

    async def more(self, requests: int = 20, timeout_s: float = 60.0) -> None:
        """Wait until each kind of client has had so many more requests answered (or failed)."""
        wanted = {kind: self.count(kind) + requests for kind in KINDS}
        async with asyncio.timeout(timeout_s), self._news:
            await self._news.wait_for(lambda: all(self.count(kind) >= number for kind, number in wanted.items()))

    @property
    def failures(self) -> list[Outcome]:
        """Requests that got no whole answer."""
        return [outcome for outcome in self.outcomes if outcome.error is not None]

    def count(self, kind: Kind) -> int:
        """How many requests of this kind have ended."""
        return sum(outcome.kind == kind for outcome in self.outcomes)

    async def _client(self, kind: Kind) -> None:
        async with self._session(kind) as session:
            while not self._stop.is_set():
                began, error = time.monotonic(), None
                try:
                    await self._request(session, stream=kind == "stream")
                except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as e:
                    error = f"{type(e).__name__}: {e}"
                    await asyncio.sleep(0.1)  # a server that refuses at once would be asked thousands of times
                self.outcomes.append(Outcome(kind, began, time.monotonic(), error))
                async with self._news:
                    self._news.notify_all()
                if self.pause_s:
                    await asyncio.sleep(self.pause_s)

    @contextlib.asynccontextmanager
    async def _session(self, kind: Kind) -> AsyncIterator[aiohttp.ClientSession]:
        keeping = {"force_close": True} if kind == "new" else {"keepalive_timeout": KEPT_S}
        timeout = aiohttp.ClientTimeout(total=120, connect=10)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(**keeping), timeout=timeout) as session:
            yield session

    async def _request(self, session: aiohttp.ClientSession, *, stream: bool) -> None:
        """Raise unless the answer is whole."""
        async with session.post(self.url, json={**self.body, "stream": stream}) as response:
            text = await response.text()
            if response.status != 200:
                raise ValueError(f"status {response.status}: {text[:200]}")
            # vLLM says `abort` of a request whose engine was ended.
            if '"finish_reason":"abort"' in text or (stream and not text.endswith("data: [DONE]\n\n")):
                raise ValueError(f"cut off: …{text[-200:]}")
        self.judge(text)
