"""Time that passes only when nobody has anything to do: a minute of waiting costs nothing, and every run is the same."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Never sleeps: the time that it was to sleep has passed when it returns."""

    slept = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("everybody waits for ever")
            self.slept += max(0.0, timeout)
        return ready


class Loop(asyncio.SelectorEventLoop):
    """An event loop on virtual time, which starts at 0."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Seconds since the loop was made, in its own time. Each look costs a little: nothing is done in no time."""
        self._virtual.slept += 1e-6
        return self._virtual.slept


class Inline(Executor):
    """Does the work at once, in the caller's thread: with real threads nothing would be reproducible."""

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as e:
            future.set_exception(e)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing is under way."""


def run(main: Callable[[], Any]) -> Any:
    """Run a coroutine function in a loop of its own."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(main())
