"""The verdict on whether restores are worth it: from enough samples, of the same kind, and never for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmsnapshot.agent import breakeven
from vllmsnapshot.agent.breakeven import LOSS_S, MARGIN, PROBE_AFTER_S, SAMPLES, Slower, cold_s, declined, look
from vllmsnapshot.agent.control import Files
from vllmsnapshot.agent.ledger import Attempt, Entry, Ledger
from vllmsnapshot_child.protocol import READY, START, Hello, Ready

COLD = 100.0
SLOW, QUICK = COLD * MARGIN + 1, COLD * MARGIN


def took(*seconds: float, alone: bool = True) -> tuple[Attempt, ...]:
    return tuple(
        Attempt(pod=f"p{n}", incarnation="i", outcome="succeeded", at=1000.0 * n, seconds=x, alone=alone)
        for n, x in enumerate(seconds, start=1)
    )


def entry(*attempts: Attempt) -> Entry:
    return Entry(uid="u", attempts=attempts)


def test_three_slow_restores_are_a_verdict_and_it_has_the_figures() -> None:
    found = look(entry(*took(112.0, 113.04, 114.0)), COLD)
    assert found == Slower(
        why="the last 3 restores took 112.0, 113.0 and 114.0 s until they served, a cold start 100.0 s", busy=False, last=3000.0
    )


@pytest.mark.parametrize(
    ("why", "attempts", "cold"),
    [
        ("none", (), COLD),
        ("too few", took(*[SLOW] * (SAMPLES - 1)), COLD),
        ("the last one was quick", took(SLOW, SLOW, SLOW, QUICK), COLD),
        ("one of the last ones was quick", took(SLOW, QUICK, SLOW, SLOW), COLD),
        ("what a cold start takes is not known", took(SLOW, SLOW, SLOW), None),
        ("they were made at once", took(SLOW, SLOW, SLOW, alone=False), COLD),
        ("they failed", tuple(replace(x, outcome="failed") for x in took(SLOW, SLOW, SLOW)), COLD),
        ("they were not measured", took(0.0, 0.0, 0.0), COLD),
    ],
)
def test_no_verdict(why: str, attempts: tuple[Attempt, ...], cold: float | None) -> None:
    assert look(entry(*attempts), cold) is None, why


def test_old_quick_restores_do_not_count() -> None:
    assert look(entry(*took(QUICK, QUICK, *[SLOW] * SAMPLES)), COLD) is not None


def test_a_second_more_or_less_is_none() -> None:
    """Of an engine that is up at once, where a tenth is nothing."""
    assert look(entry(*took(*[0.5 + LOSS_S] * SAMPLES)), 0.5) is None
    assert look(entry(*took(*[0.6 + LOSS_S] * SAMPLES)), 0.5) is not None


times = st.floats(0.1, 1000)


@given(st.lists(times, max_size=8), times, st.floats(1.0, 10.0))
def test_what_is_slow_is_slow_a_fortiori_and_quick_alike(seconds: list[float], cold: float, more: float) -> None:
    found = look(entry(*took(*seconds)), cold)
    if found is not None:
        assert all(x > cold for x in seconds[-SAMPLES:])
        assert look(entry(*took(*[x * more for x in seconds])), cold) is not None
        assert all(x > cold + LOSS_S for x in seconds[-SAMPLES:])
    # One quick restore ends it, whatever was before.
    assert look(entry(*took(*seconds, cold)), cold) is None


@given(st.floats(-1e9, 1e10), st.floats(-1e9, 1e10))
def test_nothing_is_declined_for_longer_than_an_hour_whatever_is_done_to_the_clock(last: float, now: float) -> None:
    found = Slower(why="", busy=False, last=last)
    assert not declined(None, now)
    if declined(found, now):
        assert not declined(found, now + PROBE_AFTER_S)
    assert declined(found, last) or not declined(found, last - 1)
    assert declined(Slower(why="", busy=True, last=last), now), "one probe at a time"


def test_a_failed_probe_is_one() -> None:
    failed = Attempt(pod="q", incarnation="i", outcome="failed", at=9000.0)
    found = look(entry(*took(SLOW, SLOW, SLOW), failed), COLD)
    assert found is not None
    assert declined(found, 9001.0)


# --- what is measured ------------------------------------------------------------------------------------------------


def at_the_barrier(reached: float, **phases: float) -> Files:
    ready = Ready(incarnation="i", token_ids=[1], text="x", sampled_token_logprob=0.0, phases=phases)
    return Files(hello=Hello(incarnation="i"), ready=ready, at={START: 1000.0, READY: 1000.0 + reached})


@pytest.mark.parametrize(
    ("files", "seconds"),
    [
        (at_the_barrier(40.0), 40.0),
        (at_the_barrier(40.0, engine_s=30.0, release_s=1.0, rehearsal_s=5.0, release_again_s=0.5), 33.5),
        (at_the_barrier(40.0, rehearsal_s=-5.0), 40.0),
        (at_the_barrier(40.0, rehearsal_s=50.0), None),
        (at_the_barrier(-1.0), None),
        (at_the_barrier(1e6), None),
        (Files(hello=Hello(incarnation="i"), at={START: 1000.0}), None),
    ],
)
def test_a_cold_start_is_measured_without_what_only_a_capture_needs(files: Files, seconds: float | None) -> None:
    assert cold_s(files) == seconds


@pytest.fixture
def ledger(tmp_path: object) -> Ledger:
    made = Ledger(str(tmp_path))
    made.load()
    return made


def settled(ledger: Ledger, pod: str, seconds: float, content: str = "a") -> None:
    assert ledger.settle(content, pod, "i", "succeeded", seconds=seconds)


def test_a_restore_that_another_overlapped_does_not_count(ledger: Ledger) -> None:
    ledger.begin("a", "u", "p1", "i", 100.0)
    ledger.begin("b", "v", "p2", "i", 101.0)  # of another content, on the same disk
    settled(ledger, "p1", 5.0)
    settled(ledger, "p2", 5.0, "b")
    ledger.begin("a", "u", "p3", "i", 110.0)
    settled(ledger, "p3", 6.0)
    again = Ledger(ledger.directory)
    again.load()
    for x in (ledger, again):
        assert [(a.seconds, a.alone) for a in x.entry("a", "u").attempts] == [(5.0, False), (6.0, True)]
        assert [(a.seconds, a.alone) for a in x.entry("b", "v").attempts] == [(5.0, False)]


def test_what_an_older_agent_wrote_counts_for_nothing(ledger: Ledger) -> None:
    ledger.begin("a", "u", "p1", "i", 100.0)
    assert ledger.settle("a", "p1", "i", "succeeded")
    assert breakeven.look(ledger.entry("a", "u"), 0.001) is None
