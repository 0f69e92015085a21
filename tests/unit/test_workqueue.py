"""The work queue, on virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from vllmsnapshot.controller.workqueue import Backoff, Wait, WorkQueue


class Clock:
    """Monotonic seconds, set by the test."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def queue(clock: Clock | None = None, **backoff: float) -> WorkQueue[str]:
    return WorkQueue(clock=clock, backoff=Backoff(**backoff), random_unit=lambda: 0.0)


async def available(work: WorkQueue[str]) -> list[str]:
    """The keys that can be taken now, taken."""
    keys: list[str] = []
    while True:
        task = asyncio.ensure_future(work.take())
        for _ in range(3):
            await asyncio.sleep(0)
        if not task.done():
            task.cancel()
            return keys
        keys.append(task.result())


async def test_a_waiting_key_is_handled_once() -> None:
    work = queue(Clock())
    for key in "abab":
        work.add(key)
    assert await available(work) == ["a", "b"]


async def test_a_running_key_is_given_to_nobody_else_and_comes_once_more() -> None:
    work = queue(Clock())
    work.add("a")
    assert await work.take() == "a"
    work.add("a")
    work.add("a")
    assert await available(work) == []
    work.done("a")
    assert await available(work) == ["a"]
    work.done("a")
    assert await available(work) == []


async def test_of_two_delays_the_earlier_counts() -> None:
    clock = Clock()
    work = queue(clock)
    work.add("a", 10.0)
    work.add("a", 5.0)
    work.add("a", 20.0)
    assert await available(work) == []
    clock.now = 5.0
    assert await available(work) == ["a"]
    work.done("a")
    clock.now = 30.0
    assert await available(work) == [], "the later ones are the same wish"


async def test_failures_back_off_and_success_forgets() -> None:
    clock = Clock()
    work = queue(clock, base_s=1.0, cap_s=5.0)
    work.add("a")
    assert await available(work) == ["a"]
    for expected in (1.0, 2.0, 4.0, 5.0, 5.0):
        work.done("a", ok=False)
        clock.now += expected - 0.01
        assert await available(work) == []
        clock.now += 0.02
        assert await available(work) == ["a"]
    work.done("a")
    work.add("a")
    assert await available(work) == ["a"]
    work.done("a", ok=False)
    clock.now += 1.0
    assert await available(work) == ["a"], "it starts from the beginning"


async def test_an_event_cuts_a_backoff_short() -> None:
    clock = Clock()
    work = queue(clock, base_s=50.0)
    work.add("a")
    await available(work)
    work.done("a", ok=False)
    work.add("a")
    assert await available(work) == ["a"]


def test_backoff_never_overflows_and_is_jittered_downwards() -> None:
    backoff = Backoff(base_s=0.25, cap_s=60.0)
    assert backoff.delay(10_000, 0.0) == 60.0
    assert backoff.delay(10_000, 0.999) == pytest.approx(30.0, abs=0.1)
    assert backoff.delay(1, 0.0) == 0.25


async def test_requeue_after() -> None:
    clock = Clock()
    work = queue(clock)
    work.add("a")
    await available(work)
    work.done("a", requeue_after_s=7.0)
    clock.now = 6.9
    assert await available(work) == []
    clock.now = 7.0
    assert await available(work) == ["a"]


async def test_stuck_is_the_oldest_of_running_and_due() -> None:
    clock = Clock()
    work = queue(clock)
    assert work.stuck_s() == 0.0
    work.add("later", 100.0)
    clock.now = 50.0
    assert work.stuck_s() == 0.0, "what is not due is not stuck"
    work.add("a")
    assert await work.take() == "a"
    clock.now = 80.0
    assert work.stuck_s() == 30.0
    work.add("b")
    clock.now = 130.0
    assert work.stuck_s() == 80.0
    assert work.depth == 2
    work.done("a")
    assert work.stuck_s() == 50.0


async def test_workers_never_share_a_key_and_survive_errors() -> None:
    work = WorkQueue[str](backoff=Backoff(base_s=0.001, cap_s=0.001))
    running: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    everything = asyncio.Event()

    async def handle(key: str) -> float | None:
        running[key] += 1
        assert running[key] == 1
        await asyncio.sleep(0)
        running[key] -= 1
        seen[key] += 1
        if seen[key] == 1:
            raise Wait("for the second time")
        if seen[key] == 2:
            raise RuntimeError("transient")
        if len(seen) == 20 and min(seen.values()) >= 3:
            everything.set()
        return None

    workers = [asyncio.create_task(work.work(handle)) for _ in range(4)]
    for number in range(200):
        work.add(f"k{number % 20}")
    await asyncio.wait_for(everything.wait(), 30)
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    assert len(seen) == 20


async def test_a_server_that_asks_for_time_gets_it() -> None:
    clock = Clock()
    work = queue(clock)
    work.add("a")
    assert await work.take() == "a"
    work.done("a", ok=False, not_before_s=5.0)
    # Neither the back-off nor an event cuts this wait short.
    work.add("a")
    clock.now = 4.9
    assert await available(work) == []
    clock.now = 5.1
    assert await available(work) == ["a"]
    work.done("a")
    work.add("a")
    assert await available(work) == ["a"]


@pytest.mark.parametrize("server", [True, False])
async def test_what_a_server_refuses_is_a_line_and_a_bug_a_traceback(server: bool, caplog: pytest.LogCaptureFixture) -> None:
    """An API server that is away for a minute must not fill the log with tracebacks of every key."""

    class AwayError(Exception):
        retry_after_s = None

    work = queue(Clock())

    async def handle(_: str) -> None:
        raise AwayError("away") if server else KeyError("bug")

    work.add("a")
    task = asyncio.ensure_future(work.work(handle))
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    (record,) = caplog.records
    assert (record.levelname, bool(record.exc_info)) == (("WARNING", False) if server else ("ERROR", True))
    assert not server or "away" in record.getMessage()


async def test_a_worker_takes_the_time_from_the_error() -> None:
    class BusyError(Exception):
        retry_after_s = 7.0

    clock = Clock()
    work = queue(clock)
    calls = 0

    async def handle(key: str) -> None:
        nonlocal calls
        if key != "a":
            return  # it only has the worker look at the clock
        calls += 1
        raise BusyError

    work.add("a")
    task = asyncio.ensure_future(work.work(handle))
    for now in (0.0, 1.0, 6.9, 7.1):
        clock.now = now
        work.add("a")
        work.add("b")
        for _ in range(5):
            await asyncio.sleep(0)
    task.cancel()
    assert calls == 2
