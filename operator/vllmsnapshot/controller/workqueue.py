"""A work queue of keys: the one place that decides when a key is reconciled, and that never does it twice at once.

Guarantees: a key that is added while it waits is handled once; added while it is handled, it is handled once more after;
one key is never handled by two workers; of several delayed adds the earliest counts; failures back off exponentially,
capped and with jitter, and an add without delay cuts the wait short (something changed: try now). An error with an attribute
`retry_after_s` (seconds, or None) is a server's answer, or that there was none: it is logged in a line, and where it names a time
it asks for at least that long a wait, and this one nothing cuts short.
Not guaranteed: order between keys, and survival of the process: the resync timer brings every key back.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

log = logging.getLogger(__name__)


class Wait(Exception):  # noqa: N818 - not an error
    """Expected pending work: try again with back-off, without calling it a failure. `str()` says what is awaited."""


@dataclass
class Backoff:
    """Delays after the n-th failure in a row: `base_s * 2**n`, at most `cap_s` (seconds), less up to half of it at random."""

    base_s: float = 0.25
    cap_s: float = 60.0

    def delay(self, failures: int, random_unit: float) -> float:
        """Seconds to wait after `failures` (from 1 on) failures; `random_unit` in [0, 1) spreads keys that failed together."""
        # The exponent is clamped first: 2**failures of a key that has failed for a week is not a float.
        full = min(self.cap_s, self.base_s * 2.0 ** min(failures - 1, 32))
        return full * (1.0 - 0.5 * random_unit)


class WorkQueue(Generic[K]):
    """See the module's docstring. `clock` gives monotonic seconds; all calls must come from one event loop."""

    def __init__(
        self,
        *,
        backoff: Backoff | None = None,
        clock: Callable[[], float] | None = None,
        random_unit: Callable[[], float] = random.random,
    ) -> None:
        self._backoff = backoff or Backoff()
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._random = random_unit
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._number = 0
        self._running: dict[K, float] = {}
        self._again: dict[K, float] = {}
        self._failures: dict[K, int] = {}
        self._not_before: dict[K, float] = {}
        self._changed = asyncio.Event()

    # --- producers ---------------------------------------------------------------------------------------------------

    def add(self, key: K, delay_s: float = 0.0) -> None:
        """Handle `key` no later than `delay_s` seconds from now."""
        self._schedule(key, self._clock() + max(0.0, delay_s))

    def _schedule(self, key: K, when: float) -> None:
        when = max(when, self._not_before.get(key, when))
        if key in self._running:
            self._again[key] = min(when, self._again.get(key, when))
            return
        if key in self._due and self._due[key] <= when:
            return
        self._due[key] = when
        self._number += 1
        # An earlier entry of the same key stays in the heap and is skipped when popped: its time is not the due one.
        heapq.heappush(self._heap, (when, self._number, key))
        self._changed.set()

    # --- consumers ---------------------------------------------------------------------------------------------------

    async def take(self) -> K:
        """The next due key, now marked as running; the caller must call `done` with it."""
        while True:
            now = self._clock()
            while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
                heapq.heappop(self._heap)
            if self._heap and self._heap[0][0] <= now:
                _, _, key = heapq.heappop(self._heap)
                del self._due[key]
                self._running[key] = now
                if self._heap:
                    self._changed.set()  # another worker may have something to do as well
                return key
            self._changed.clear()
            timeout = self._heap[0][0] - now if self._heap else None
            try:
                await asyncio.wait_for(self._changed.wait(), timeout)
            except TimeoutError:
                continue

    def done(self, key: K, *, ok: bool = True, requeue_after_s: float | None = None, not_before_s: float | None = None) -> None:
        """`key` was handled. Not ok: it comes back with back-off. `requeue_after_s`: it comes back after these seconds.

        `not_before_s`: for so many seconds it does not come back, whatever happens.
        """
        now = self._clock()
        del self._running[key]
        self._not_before.pop(key, None)
        if not_before_s is not None:
            self._not_before[key] = now + not_before_s
        when = self._again.pop(key, None)
        if when is not None:
            self._schedule(key, when)
        if ok:
            self._failures.pop(key, None)
            if requeue_after_s is not None:
                self._schedule(key, now + max(0.0, requeue_after_s))
        else:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            self._schedule(key, now + self._backoff.delay(failures, self._random()))

    async def work(self, handle: Callable[[K], Awaitable[float | None]]) -> None:
        """One worker, for ever: `handle(key)` returns the seconds until it wants the key back, or None; see `Wait`."""
        while True:
            key = await self.take()
            ok, again, pause = False, None, None
            try:
                again = await handle(key)
                ok = True
            except Wait as e:
                log.info("%s: waiting: %s", key, e)
            except Exception as e:
                if hasattr(e, "retry_after_s"):
                    log.warning("%s: will be tried again: %s", key, e)
                    pause = e.retry_after_s
                else:
                    log.exception("%s: will be tried again", key)
            finally:
                # Cancellation comes through here too; the key is then due again for whoever works next.
                self.done(key, ok=ok, requeue_after_s=again, not_before_s=pause)

    # --- health ------------------------------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """Keys that are due now and wait for a worker."""
        now = self._clock()
        return sum(1 for when in self._due.values() if when <= now)

    def stuck_s(self) -> float:
        """For how many seconds the longest-running key has been handled or the longest-due key has waited."""
        now = self._clock()
        started = min(self._running.values(), default=now)
        due = min(self._due.values(), default=now)
        return max(0.0, now - min(started, due))
