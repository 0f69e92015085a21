"""The parts of the chaos run that decide something: what is done when, which request may fail, which log lines are errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chaos.blame import LINGER_S, Blame
from tests.chaos.logs import LogKeeper
from tests.chaos.schedule import (
    DECK,
    LEFT_BYTES,
    MAX_REPLICAS,
    PAUSE_S,
    SIZES,
    SNAPSHOTS,
    UNDONE_BY,
    Kind,
    one_round,
    schedule,
)

SEEDS = st.integers(0, (1 << 32) - 1)
SECONDS = st.floats(0, 2000)


@given(SEEDS, SECONDS)
@settings(max_examples=60, deadline=None)
def test_a_seed_gives_the_same_actions_again(seed: int, seconds: float) -> None:
    assert schedule(seed, seconds) == schedule(seed, seconds)


@given(SEEDS, SECONDS, SECONDS)
@settings(max_examples=60, deadline=None)
def test_a_longer_run_begins_as_a_shorter_one(seed: int, one: float, other: float) -> None:
    short, long = sorted((one, other))
    # What undoes something comes earlier where the run ends before its time.
    undoing = set(UNDONE_BY.values())
    begin = [action for action in schedule(seed, short) if action.kind not in undoing]
    assert begin == [a for a in schedule(seed, long) if a.kind not in undoing][: len(begin)]


def test_seeds_differ() -> None:
    assert len({str(schedule(seed, 120)) for seed in range(50)}) == 50


@given(SEEDS)
@settings(max_examples=60, deadline=None)
def test_a_round_has_every_kind(seed: int) -> None:
    assert {action.kind for action in one_round(seed)} == set(Kind)
    long_enough = len(DECK) * PAUSE_S[1]
    assert {action.kind for action in schedule(seed, long_enough)} == set(Kind)


@given(SEEDS, SECONDS)
@settings(max_examples=60, deadline=None)
def test_actions_are_in_order_and_within_the_run_and_undone(seed: int, seconds: float) -> None:
    actions = schedule(seed, seconds)
    assert [a.at for a in actions] == sorted(a.at for a in actions)
    for index, action in enumerate(actions):
        assert 0 <= action.at <= seconds + 0.1  # rounded
        if action.kind in UNDONE_BY:
            later = [a for a in actions[index + 1 :] if a.number == action.number]
            assert [a.kind for a in later] == [UNDONE_BY[action.kind]]


@given(SEEDS)
@settings(max_examples=60, deadline=None)
def test_parameters_are_ones_that_the_system_allows(seed: int) -> None:
    for action in schedule(seed, 600):
        assert 0 <= action.snapshot < SNAPSHOTS
        assert 0 <= action.pick < 1
        allowed = {
            Kind.SCALE: range(MAX_REPLICAS + 1),
            Kind.NEW_IDENTITY: SIZES,
            Kind.KILL_AGENT_CAPTURING: SIZES,
            Kind.FILL_DISK: LEFT_BYTES,
        }.get(action.kind, (0,))
        assert action.value in allowed


# --- blame ---


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def blame(clock: Clock) -> Blame:
    return Blame(clock)


def test_nothing_excuses_a_failure_when_nothing_was_done(blame: Blame) -> None:
    assert blame.excuse("a", 0, 1000) is None


def test_a_kill_excuses_what_was_under_way_and_what_is_still_routed_there(blame: Blame, clock: Clock) -> None:
    blame.strike("a", "uid", "killed")
    clock.now = 110
    blame.over("uid")
    assert blame.excuse("a", 99, 101) == "killed"
    assert blame.excuse("a", 110 + LINGER_S - 1, 120) == "killed"
    assert blame.excuse("a", 98, 99) is None
    assert blame.excuse("a", 110 + LINGER_S + 1, 120) is None
    assert blame.excuse("b", 99, 101) is None, "another snapshot's"


def test_a_kill_excuses_direct_requests_to_that_replica_alone(blame: Blame) -> None:
    blame.strike("a", "uid", "killed")
    assert blame.excuse("a", 101, 102, "uid") == "killed"
    assert blame.excuse("a", 101, 102, "other") is None


def test_a_graceful_end_does_not_excuse_the_service(blame: Blame) -> None:
    blame.strike("a", "uid", "ended", gentle=True)
    assert blame.excuse("a", 101, 102) is None
    assert blame.excuse("a", 101, 102, "uid") == "ended"


def test_without_a_ready_replica_requests_may_fail_if_it_was_us(blame: Blame, clock: Clock) -> None:
    blame.strike("a", "uid", "killed")
    blame.over("uid")
    clock.now += 1
    blame.nobody("a", wanted=1)
    clock.now = 200
    assert blame.excuse("a", 150, 151) == "no replica is ready"
    blame.somebody("a")
    assert blame.excuse("a", 200 + LINGER_S + 1, 300) is None
    assert blame.outages == []


def test_scaled_to_zero_is_no_outage(blame: Blame) -> None:
    blame.nobody("a", wanted=0)
    assert blame.outages == []
    assert blame.excuse("a", 101, 102) == "no replica is ready"


def test_an_outage_that_nobody_made_is_told_and_excuses_nothing(blame: Blame) -> None:
    blame.nobody("a", wanted=1)
    assert [window.snapshot for window in blame.outages] == ["a"]
    assert blame.excuse("a", 101, 102) is None


# --- logs ---


async def test_logs_of_containers_that_are_gone_are_kept_and_judged(tmp_path: Path) -> None:
    pods = tmp_path / "pods"
    directory = pods / "vllmsnapshot-system_agent-x_uid" / "agent"
    directory.mkdir(parents=True)
    file = directory / "0.log"
    prefix = "2026-01-01T00:00:00.0Z stderr F "
    lines = [
        "2026-01-01 00:00:00,001 INFO    vllmsnapshot.agent fine",
        "2026-01-01 00:00:00,002 WARNING vllmsnapshot.agent pod 1234: slow",
        "Traceback (most recent call last):",
        "2026-01-01 00:00:00,002 INFO    vllmsnapshot.agent fine",
        "2026-01-01 00:00:00,003 ERROR   vllmsnapshot.agent pod 77 broke",
        "2026-01-01 00:00:00,003 ERROR   vllmsnapshot.agent pod 78 broke",
        "2026-01-01 00:00:00,004 INFO    vllmsnapshot.agent fine",
        "Traceback (most recent call last):",
    ]
    async with LogKeeper(pods, tmp_path / "copy.log") as keeper:
        file.write_text("".join(f"{prefix}{line}\n" for line in lines[:3]))
        keeper.copy_new()
        with file.open("a") as f:
            f.writelines(f"{prefix}{line}\n" for line in lines[3:])
        file.unlink()
    assert (tmp_path / "copy.log").read_text().splitlines() == [f"agent-x/0 {line}" for line in lines]
    bad, told = keeper.verdict()
    assert bad == ["ERROR vllmsnapshot.agent pod N broke (2 times)", "a traceback of no record (1 times)"]
    assert told == {"WARNING vllmsnapshot.agent pod N: slow": 1}
