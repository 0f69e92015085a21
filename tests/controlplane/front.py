"""What stands between a component and the API server: it passes everything on, or answers 401 in its place."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import aiohttp
import yaml
from aiohttp import web

from vllmsnapshot.kube import Kube

_HOP: Final = (
    "host",
    "authorization",
    "connection",
    "content-length",
    "transfer-encoding",
    "content-encoding",
    "accept-encoding",
)
"""Headers that belong to one connection, or to one user."""
UNAUTHORIZED: Final = {
    "kind": "Status",
    "apiVersion": "v1",
    "status": "Failure",
    "message": "Unauthorized",
    "reason": "Unauthorized",
    "code": 401,
}
"""What an API server says to credentials that it does not know."""


class Front:
    """An address of the API server for plain HTTP; who asks there is the administrator, whatever token it shows."""

    def __init__(self) -> None:
        self.refused: list[tuple[str, str]] = []
        """User agent and token of every request that was answered 401, in order."""
        self.url = ""
        self._refusing = False
        self._open: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()

    async def refuse(self) -> None:
        """From now on every answer is 401, as from an API server that has just been started: the watches are cut."""
        self._refusing = True
        for task in list(self._open):
            task.cancel()

    def accept(self) -> None:
        """All is well again."""
        self._refusing = False

    async def refusals(self, agent: str, number: int) -> None:
        """Wait until so many requests of this client have been answered 401."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.count(agent) >= number)

    def count(self, agent: str) -> int:
        """How many requests of this client have been answered 401."""
        return sum(name.startswith(agent) for name, _ in self.refused)

    def kubeconfig(self, path: Path, token: str) -> Path:
        """Write a kubeconfig of this address."""
        config = {
            "current-context": "front",
            "contexts": [{"name": "front", "context": {"cluster": "front", "user": "front"}}],
            "clusters": [{"name": "front", "cluster": {"server": self.url}}],
            "users": [{"name": "front", "user": {"token": token}}],
        }
        path.write_text(yaml.safe_dump(config))
        return path

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self._refusing:
            async with self._changed:
                token = request.headers.get("Authorization", "").partition(" ")[2]
                self.refused.append((request.headers.get("User-Agent", ""), token))
                self._changed.notify_all()
            return web.json_response(UNAUTHORIZED, status=401)
        response = web.StreamResponse()
        task = asyncio.create_task(self._pass_on(request, response))
        self._open.add(task)
        try:
            await task
        except (asyncio.CancelledError, aiohttp.ClientError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._open.discard(task)
        return response

    async def _pass_on(self, request: web.Request, response: web.StreamResponse) -> None:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        body = await request.read()
        url = self._server + request.path_qs
        async with self._session.request(
            request.method, url, headers=headers, data=body or None, skip_auto_headers=["Content-Type"]
        ) as answer:
            response.set_status(answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()

    @contextlib.asynccontextmanager
    async def listening(self, kubeconfig: Path) -> AsyncIterator[Front]:
        """Stand in front of the server of this kubeconfig, which has a client certificate."""
        async with await Kube.connect(str(kubeconfig)) as kube:
            upstream = kube._client.configuration
            context = ssl.create_default_context(cafile=upstream.ssl_ca_cert)
            context.load_cert_chain(upstream.cert_file, upstream.key_file)
            self._server = upstream.host
        app = web.Application(client_max_size=16 << 20)
        app.router.add_route("*", "/{tail:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=context), timeout=aiohttp.ClientTimeout(total=None)
            ) as self._session:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
                yield self
                for task in list(self._open):
                    task.cancel()
        finally:
            await runner.cleanup()
