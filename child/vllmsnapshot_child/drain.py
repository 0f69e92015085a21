"""How a serving replica ends without cutting a request: what server and HTTP side of an engine have to know of each other.

When a pod is deleted, SIGTERM reaches it at the same moment as the news reaches those who route requests to it, and clients
keep the connections that they have. So the port is not closed at once:

    SIGTERM ─▶ notice: serves on, every response says "Connection: close", so that the next request goes elsewhere
            ─▶ stops listening; what runs (a stream, say) goes on, and so does a connection that was never told to close
            ─▶ no connection is left, or none has carried a request for IDLE_S ─▶ the engine ends

`Server.end` goes through these steps, within the grace time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

NOTICE = "VLLMSNAPSHOT_NOTICE_S"
NOTICE_S = 5.0
"""Environment and default: seconds of notice. kube-proxy and gateways stop sending within about two seconds of a pod's deletion
(two watches and one sync of the rules); 5 s is also vLLM's keep-alive timeout, so that a connection which is idle at the SIGTERM
is used and told to close, or timed out, before the notice is over."""

IDLE_S = 5.0
"""A connection that stays open without a request for so long is given up; vLLM's own keep-alive timeout is the same."""

POLL_S = 0.05


@dataclass
class Traffic:
    """The requests of an engine."""

    running: int = 0
    """Requests that are being answered."""
    last: bool = False
    """Every response that begins now ends its connection."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Held while a request is answered, by whatever thread."""
        with self._lock:
            self.running += 1
        try:
            yield
        finally:
            with self._lock:
                self.running -= 1


async def answered(traffic: Traffic, connections: Callable[[], int], limit_s: float) -> bool:
    """Wait, after the port was closed, until every request is answered; False if some were not within the limit.

    `connections`: how many are open. One may carry another request yet: its last response began before the notice.
    """
    began = used = time.monotonic()
    while connections():
        now = time.monotonic()
        if traffic.running:
            used = now
        elif now - used >= IDLE_S:
            break
        if now - began >= limit_s:
            break
        await asyncio.sleep(POLL_S)
    return not traffic.running


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class TrafficMiddleware:
    """ASGI middleware that keeps `traffic`: counts requests, and ends the connections of the last ones."""

    def __init__(self, app: App, traffic: Traffic) -> None:
        self.app = app
        self.traffic = traffic

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request; the application's start and stop (`lifespan`) is none."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self.traffic.last:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        with self.traffic.request():
            await self.app(scope, receive, closing)
