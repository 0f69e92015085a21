"""The operator's own HTTP: `/healthz` (restart me), `/readyz` (I see the cluster), `/metrics`.

kopf's liveness endpoint only says that its HTTP task runs. Here a check fails when the operator has stopped doing its work:
the watch ended, the queue does not move, the resync does not get through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiohttp import web

Check = Callable[[], str | None]
"""What is wrong, or None."""


class Health:
    """Named checks. Live checks fail `/healthz`, ready checks only `/readyz` (which fails with either)."""

    def __init__(self) -> None:
        self.live: dict[str, Check] = {}
        self.ready: dict[str, Check] = {}
        self.exposition: Callable[[str], tuple[bytes, str]] | None = None
        """Answer and content type of `/metrics` for an Accept header; None: there is no such page."""
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, port: int) -> None:
        """Listen on all addresses; port 0 takes a free one of the loopback interface, shown in `port`."""
        app = web.Application()
        app.add_routes([web.get("/healthz", self._healthz), web.get("/readyz", self._readyz), web.get("/metrics", self._metrics)])
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host=None if port else "127.0.0.1", port=port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        return _answer(self.live)

    async def _readyz(self, _: web.Request) -> web.Response:
        return _answer({**self.live, **self.ready})

    async def _metrics(self, request: web.Request) -> web.Response:
        if self.exposition is None:
            raise web.HTTPNotFound
        body, content_type = self.exposition(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})


def _answer(checks: Mapping[str, Check]) -> web.Response:
    failed = {name: trouble for name, check in checks.items() if (trouble := check()) is not None}
    text = "\n".join(f"[-] {name}: {failed[name]}" if name in failed else f"[+] {name}" for name in checks)
    return web.Response(text=(text or "ok") + "\n", status=503 if failed else 200)
