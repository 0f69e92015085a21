"""When a capture is tried again after failures: at once, then after pauses that double, whatever is done to the clocks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllmsnapshot.api.types import RestoreCounts, VLLMSnapshotContentStatus
from vllmsnapshot.controller.pods import template
from vllmsnapshot.controller.tries import FIRST_PAUSE_S, LONGEST_PAUSE_S, again_at, pause_s, paused, spent
from vllmsnapshot.world import Content, Observed

from .test_plan import NEW, content, spec
from .test_plan_properties import Sim

NOW = 1_000_000.0
RETRIES = 2
USEFUL = VLLMSnapshotContentStatus(restores=RestoreCounts(succeeded=1))


def see(*contents: Content, **fields: Any) -> Observed:
    return Observed(contents=contents, agents=frozenset({"node"}), nodes=frozenset({"node"}), **fields)


def failure(attempt: int, *, ended: float = NOW, after: float = 60.0, **fields: Any) -> Content:
    """The order of this number, which came to nothing so long after it was made."""
    base = {"failed": True, "attempt": attempt, "created": ended - after, "ended": ended}
    return content(fields.pop("name", f"c{attempt}"), **{**base, **fields})


@pytest.mark.parametrize(
    ("why", "contents", "number"),
    [
        ("nothing yet", (), 0),
        ("the first", (failure(0),), 1),
        ("only the last of many is kept", (failure(7),), 8),
        ("those of an older operator do not say", (failure(0, name="a"), failure(0, name="b")), 2),
        ("quarantined before it was of use", (failure(3, failed=False, captured=True, quarantined=True),), 4),
        ("quarantined after it was", (failure(3, failed=False, captured=True, quarantined=True, status=USEFUL),), 1),
        ("on another node", (failure(3, node="n2"),), 0),
        ("of another identity", (failure(3, identity="x"),), 0),
        ("before somebody asked", (failure(3, recapture="r"),), 0),
        ("on its way out", (failure(3, deleting=True),), 0),
        ("under way", (failure(3, failed=False),), 0),
    ],
)
def test_tries_in_a_row(why: str, contents: tuple[Content, ...], number: int) -> None:
    assert spent(see(*contents), NEW.identity, "node") == number, why


def told(*contents: Content, now: float = NOW) -> tuple[float | None, bool]:
    made, seen = spec(capture={"retries": RETRIES}), see(*contents)
    return again_at(made, seen, NEW.identity, "node", now), paused(made, seen, NEW.identity, "node", now)


def test_pauses_double_from_the_first_after_the_retries_to_the_longest() -> None:
    assert told(failure(RETRIES - 1)) == (None, False), "at once"
    assert told(failure(RETRIES)) == (NOW + FIRST_PAUSE_S, True)
    assert told(failure(RETRIES + 1)) == (NOW + 2 * FIRST_PAUSE_S, True)
    assert told(failure(RETRIES + 2)) == (NOW + 4 * FIRST_PAUSE_S, True)
    assert told(failure(RETRIES + 90)) == (NOW + LONGEST_PAUSE_S, True)
    assert told(failure(10_000)) == (NOW + LONGEST_PAUSE_S, True)


def test_the_moment_stays_the_same_when_it_has_passed() -> None:
    """Or the status would have to be written without anything having happened."""
    after = NOW + FIRST_PAUSE_S
    assert told(failure(RETRIES), now=after - 1) == (after, True)
    assert told(failure(RETRIES), now=after) == (after, False)
    assert told(failure(RETRIES), now=after + 1e6) == (after, False)


@pytest.mark.parametrize(
    ("why", "ended", "counts_from"),
    [
        ("the node's clock is ahead", NOW + 5000, NOW - 60),
        ("the node's clock is behind", NOW - 5000, NOW - 60),
        ("an artifact of last week is quarantined now", NOW - 5, NOW - 5),
    ],
)
def test_which_clock_is_believed(why: str, ended: float, counts_from: float) -> None:
    assert told(failure(RETRIES, created=NOW - 60, ended=ended))[0] == counts_from + FIRST_PAUSE_S, why


times = st.floats(0, 1e10)


@given(created=times, ended=times, now=times, attempt=st.integers(0, 200))
@example(created=0.0, ended=1.0, now=0.0, attempt=8)
def test_no_clock_makes_more_than_two_pauses_of_one(created: float, ended: float, now: float, attempt: int) -> None:
    """Two, where the node's clock is ahead: it is believed, too, once that time has come."""
    tried = content("c", failed=True, attempt=attempt, created=created, ended=ended)
    for _ in range(2):
        moment, pausing = told(tried, now=now)
        if not pausing:
            break
        assert moment is not None
        assert moment - now <= LONGEST_PAUSE_S
        now = moment
    assert not told(tried, now=now)[1]
    assert 0 < pause_s(attempt + 1) <= LONGEST_PAUSE_S
    assert pause_s(attempt + 1) <= pause_s(attempt + 2)


def test_a_node_that_cannot_be_captured_is_left_alone_for_longer_and_longer() -> None:
    """A replica is deleted and made anew every minute for three days: with each one a capture could be tried."""
    sim = Sim(replicas=1, capture={"retries": RETRIES, "seedTimeoutSeconds": 100})
    sim.nodes = sim.agents = {"n1"}
    orders: dict[str, float] = {}
    while sim.now < NOW + 3 * 86400:
        sim.settle(capture=False)
        for item in sim.contents.values():
            orders.setdefault(item.uid, item.created)
        for name in list(sim.pods):
            sim.set(name, deleting=True, ready=False)
        sim.now += 60.0
    made = sorted(orders.values())
    gaps = [after - before for before, after in itertools.pairwise(made)]
    assert all(gap < 120 for gap in gaps[:RETRIES])
    for number, gap in enumerate(gaps[RETRIES:], start=1):
        assert pause_s(number) <= gap < pause_s(number) + 180
    assert len(gaps) > RETRIES + 8, "it goes on"
    assert len(sim.contents) <= RETRIES + 1, "what nobody counts is removed"
    # One that succeeds and is of use ends it: what fails after that is tried again at once.
    sim.now += LONGEST_PAUSE_S
    sim.settle()
    identity = template(sim.spec()).identity
    [good] = sim.contents.values()
    assert (good.captured, spent(sim.observed(), identity, "n1")) == (True, 0)
    sim.contents[good.name] = replace(good, quarantined=True, ended=sim.now, status=USEFUL)
    assert spent(sim.observed(), identity, "n1") == 1
    sim.contents[good.name] = replace(good, quarantined=True, ended=sim.now)
    assert spent(sim.observed(), identity, "n1") > RETRIES + 8, "one that was of no use to anybody is a failure like the others"
