"""Writes to the API server, apart from the work: what a pod or content shall say is handed over here and written when it can be.

Only the newest message of a key matters; one that is overtaken while the API server is away is never written. What is lost with
the process is derived again from files and ledger by the next one.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from ..kube import ApiError

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.2
LAST_RETRY_S = 30.0
AT_ONCE = 8
"""Writes in flight at the same time."""

Send = Callable[[], Awaitable[None]]


class Outbox:
    """One writer per key at a time, newest message last."""

    def __init__(self, *, retry_s: float = FIRST_RETRY_S) -> None:
        self._retry_s = retry_s
        self._next: dict[str, Send] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._limit = asyncio.Semaphore(AT_ONCE)

    def post(self, key: str, send: Send, *, tries: int | None = None) -> None:
        """Write this instead of whatever waits under `key`. `send` raises ApiError to be called again, `tries` times at most."""
        self._next[key] = send
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._run(key, tries), name=f"outbox {key}")

    @property
    def depth(self) -> int:
        """How many keys have something that is still to be written."""
        return len(self._next)

    def waits(self, key: str) -> bool:
        """Whether something is still to be written, or being written, under `key`."""
        return key in self._next

    def forget(self, key: str) -> None:
        """Nothing is to be written under `key` any more."""
        self._next.pop(key, None)
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    async def drain(self) -> None:
        """Wait until nothing is left to write."""
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    def stop(self) -> None:
        """Cancel what is being written."""
        for key in list(self._tasks):
            self.forget(key)

    async def _run(self, key: str, tries: int | None) -> None:
        delay = self._retry_s
        tried = 0
        try:
            while (send := self._next.get(key)) is not None:
                try:
                    async with self._limit:
                        await send()
                except ApiError as e:
                    tried += 1
                    if e.status == 404 or (tries is not None and (tried >= tries or e.refused)):
                        log.info("not written, %s: %s", key, e)
                    else:
                        log.warning("will write %s again: %s", key, e)
                        await asyncio.sleep(e.retry_after_s or delay * random.uniform(0.5, 1.5))  # noqa: S311
                        delay = min(delay * 2, LAST_RETRY_S)
                        continue
                except Exception:
                    log.exception("cannot write %s", key)
                delay = self._retry_s
                if self._next.get(key) is send:
                    del self._next[key]
        finally:
            if self._tasks.get(key) is asyncio.current_task():
                del self._tasks[key]
