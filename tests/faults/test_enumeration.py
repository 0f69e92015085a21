"""The operator and the agent end at every point of a life, every answer is lost once, every file operation fails once.

For each: the cluster comes to rest in the state of the undisturbed life. Nothing is lost, nothing is left over, and what may never be
(`World.check`, `Container._add`) is checked at every step on the way. Which points are tried is said in `cases`.
Each life takes half a second, on virtual time.
"""

from __future__ import annotations

import asyncio
import errno
import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllmsnapshot.api.constants import Reason
from vllmsnapshot.controller.reconcile import Reconciler
from vllmsnapshot.kube import PODS, ApiError

from .cases import CASES, Cases, chosen
from .memory_api import Call, Client, Faults, Server, WatchFaults
from .points import Points
from .world import Live, Plan, World, lived

AGENT = "agent-node-a"
OPERATOR = "operator"

Outcome = list[dict[str, Any]]


async def life(x: World) -> Outcome:
    """Cold, captured, crashed, restored, scaled up, rolled, deleted; each state is looked at after some more starts.

    A capture or a restore that is cut off is made up for by the next start, so by then nothing may be left of what happened.
    """
    x.apply(replicas=1)
    await x.rest()
    x.crash()
    await x.rest()
    x.apply(replicas=2)
    await x.rest()
    before = await recovered(x, "one")
    x.apply(replicas=1, image="two")
    await x.rest()
    after = await recovered(x, "two")
    x.delete()
    await x.rest(quiet_s=QUIET_S)
    return [before, after, x.outcome()]


QUIET_S = 130.0
"""Longer than two collections of orphans by the agent."""


async def recovered(x: World, image: str) -> dict[str, Any]:
    """The state after three starts from nothing, of which nothing disturbs the last two."""
    for _ in range(3):
        for replicas in (0, 1):
            x.apply(replicas=replicas, image=image)
            await x.rest()
        x.spared = True
    await x.rest(quiet_s=QUIET_S)
    outcome = x.outcome()
    x.spared = False
    return outcome


def difference(outcome: Outcome, wanted: Outcome) -> str:
    """What is not as it should be; empty if all is."""
    names = ("first image", "second image", "deleted")
    return "; ".join(
        f"{name}: {key}: {have[key]} instead of {want[key]}"
        for name, have, want in zip(names, outcome, wanted, strict=True)
        for key in want
        if have[key] != want[key]
    )


def one_life(root: Path, plan: Plan | None = None) -> tuple[Outcome, Points, World]:
    """`life` in a directory of its own."""
    outcome: Outcome = []

    async def scenario(x: World) -> None:
        outcome.extend(await life(x))

    x = lived(root, scenario, plan)
    assert x.first is not None or not (plan and plan.who)
    return outcome, x.first or Points(), x


Calm = Callable[[str], tuple[Outcome, list[str]]]
CALLS: dict[str, list[tuple[float, Call]]] = {}
"""What a process asks of the API server in the undisturbed life, and at which second."""


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """The undisturbed life, and the points that a process has in it."""

    @functools.cache
    def undisturbed(who: str) -> tuple[Outcome, list[str]]:
        calls: list[tuple[float, Call]] = []

        def note(call: Call, number: int) -> None:
            if number > 0:
                calls.append((asyncio.get_running_loop().time(), call))

        faults = Faults(before=note)
        outcome, points, _ = one_life(tmp_path_factory.mktemp("calm") / "w", Plan(who=who, faults=lambda _: faults))
        CALLS[who] = calls
        CASES.points[who] = len(points.names)
        return outcome, points.names

    return undisturbed


def is_request(point: str) -> bool:
    """As opposed to a file operation, a signal or a start of CRIU."""
    return ": " in point


def is_file(point: str) -> bool:
    """An operation that a disk can refuse."""
    return point.startswith(("open ", "os."))


def test_the_undisturbed_life_is_what_it_should_be(calm: Calm) -> None:
    (before, after, gone), points = calm(AGENT)
    for outcome, image in ((before, "one"), (after, "two")):
        assert outcome["pods"] == [(image, "restore", "Serving", "True", "True")]
        assert outcome["contents"] == [("Captured",)]
        assert outcome["engines"] == [(1, True, False)]
        assert outcome["disk"].count("node-a artifacts") == 1
        assert "node-a tmp" not in outcome["disk"]
        assert outcome["conditions"]["Ready"] == ("True", Reason.ALL_REPLICAS_READY)
    assert gone == {
        "claims": False,
        "conditions": {},
        "contents": [],
        "disk": [],
        "engines": [],
        "pods": [],
        "ready": None,
        "services": 0,
    }
    assert len(points) > 150
    assert len(calm(OPERATOR)[1]) > 30


def test_every_life_is_the_same(tmp_path: Path) -> None:
    assert one_life(tmp_path / "a")[0] == one_life(tmp_path / "b")[0]


def test_what_a_process_survives_with_a_traceback_fails_the_life(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_self: Reconciler, key: object) -> None:
        raise KeyError(key)

    async def scenario(x: World) -> None:
        x.apply(replicas=1)
        await x.rest()

    monkeypatch.setattr(Reconciler, "reconcile", broken)
    with pytest.raises(AssertionError, match="will be tried again: KeyError"):
        live(scenario)


def test_a_case_that_fails_keeps_no_other_from_being_tried() -> None:
    cases = Cases()
    with pytest.raises(AssertionError, match=r"2 of 3 failed\n1: ZeroDivisionError: .*\n2: AssertionError: nothing was hit"):
        cases.each("suite", [1, 2, 3], lambda n: "hit"[: 3 * (n - 2)] if n > 1 else str(n // 0))
    assert cases.lines() == ["     3  suite; failures: 2", "     3  cases in all; failures: 2"]


async def test_a_refusal_can_be_lost_as_any_answer() -> None:
    def lose(_call: Call, _number: int) -> None:
        raise REFUSALS["timeout"]

    for points, faults in ((Points(lose_at=1), Faults()), (Points(), Faults(after=lose))):
        with pytest.raises(ApiError) as e:
            await Client(Server(lambda: 0.0), "x", points, faults).delete(PODS, "none", "default", uid="u")
        assert e.value.status == 0


def at(**what: int) -> Callable[[World], Points]:
    """The same points in any world."""
    return lambda _: Points(**what)  # type: ignore[arg-type]


def doing(n: int, do: Callable[[World], None]) -> Callable[[World], Points]:
    """Points at the n-th of which something happens to the world."""
    return lambda x: Points(do_at=n, do=lambda: do(x))


def always(faults: Faults) -> Callable[[World], Faults]:
    """The same faults in any world."""
    return lambda _: faults


@pytest.mark.parametrize("who", [AGENT, OPERATOR])
def test_it_ends_at_any_point(who: str, tmp_path: Path, calm: Calm, cases: Cases) -> None:
    wanted, points = calm(who)

    def ended(n: int) -> str:
        outcome, found, x = one_life(tmp_path / "w", Plan(who=who, points=at(stop_at=n)))
        assert x.deaths == 1, f"{x.deaths} deaths at {found.hit}"
        assert not difference(outcome, wanted), f"ended before {found.hit}: {difference(outcome, wanted)}"
        return found.hit

    cases.each(f"points at which {who} ended", chosen(points, f"stop {who}"), ended)


@pytest.mark.parametrize("who", [AGENT, OPERATOR])
def test_any_answer_is_lost(who: str, tmp_path: Path, calm: Calm, cases: Cases) -> None:
    wanted, points = calm(who)

    def lost(n: int) -> str:
        outcome, found, _ = one_life(tmp_path / "w", Plan(who=who, points=at(lose_at=n)))
        assert not difference(outcome, wanted), f"lost of {found.hit}: {difference(outcome, wanted)}"
        return found.hit

    cases.each(f"writes of {who} whose answer was lost", chosen(points, f"lose {who}", is_request), lost)


def test_the_power_fails_at_any_point(tmp_path: Path, calm: Calm, cases: Cases) -> None:
    wanted, points = calm(AGENT)

    def failed(n: int) -> str:
        outcome, found, _ = one_life(tmp_path / "w", Plan(who=AGENT, points=at(stop_at=n), power=True))
        assert not difference(outcome, wanted), f"before {found.hit}: {difference(outcome, wanted)}"
        return found.hit

    cases.each("points at which the node lost its power", chosen(points, "power"), failed)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for a minute"])
def test_any_file_operation_is_refused(number: int, for_good: bool, tmp_path: Path, calm: Calm, cases: Cases) -> None:
    wanted, points = calm(AGENT)
    name = f"file operations refused with {errno.errorcode[number]} {'for a minute' if for_good else 'once'}"

    def refused(n: int) -> str:
        def make(x: World) -> Points:
            made = Points(refuse_at=n, errno=number, for_good=for_good)

            def later() -> None:
                x.loop.call_later(60.0, made.mend)

            made.refused = later
            return made

        outcome, found, _ = one_life(tmp_path / "w", Plan(who=AGENT, points=make))
        assert not difference(outcome, wanted), f"{found.hit}: {difference(outcome, wanted)}"
        return found.hit

    cases.each(name, chosen(points, name, is_file), refused)


def test_a_deletion_that_the_disk_refuses_is_a_line_in_the_log_and_is_done_later(tmp_path: Path, calm: Calm) -> None:
    wanted, points = calm(AGENT)
    n = next(n for n, name in enumerate(points, start=1) if name.startswith("os.rename deleted-"))
    outcome, found, _ = one_life(tmp_path / "w", Plan(who=AGENT, points=at(refuse_at=n, errno=errno.EIO)))
    assert found.hit.startswith("os.rename deleted-")
    assert not difference(outcome, wanted)


@pytest.mark.parametrize(
    ("what", "do"),
    [
        ("every container dies", lambda x: x.kill_containers("node-a")),
        ("every engine dies", lambda x: x.crash()),
        ("every pod is deleted", lambda x: x.delete_pods()),
        ("every content is deleted", lambda x: x.delete_contents()),
        ("the clock is set ahead", lambda x: setattr(x, "wall", 7200.0)),
        ("the clock is set back", lambda x: setattr(x, "wall", -7200.0)),
    ],
    ids=lambda x: x.replace(" ", "-") if isinstance(x, str) else "",
)
@pytest.mark.parametrize("who", [AGENT, OPERATOR])
def test_something_happens_at_any_point(
    who: str, what: str, do: Callable[[World], None], tmp_path: Path, calm: Calm, cases: Cases
) -> None:
    wanted, points = calm(who)

    def happened(n: int) -> str:
        outcome, found, _ = one_life(tmp_path / "w", Plan(who=who, points=doing(n, do)))
        assert not difference(outcome, wanted), f"before {found.hit}: {difference(outcome, wanted)}"
        return found.hit

    name = f"points of {who} at which {what}"
    cases.each(name, chosen(points, name), happened)


# --- requests --------------------------------------------------------------------------------------------------------

REFUSALS = {
    "409": ApiError(409, "Conflict", "scripted"),
    "422": ApiError(422, "Invalid", "scripted"),
    "403": ApiError(403, "Forbidden", "scripted"),
    "429": ApiError(429, "TooManyRequests", "scripted", 5.0),
    "500": ApiError(500, "InternalError", "scripted"),
    "503": ApiError(503, "ServiceUnavailable", "scripted"),
    "timeout": ApiError(0, "TransportError", "scripted"),
}


def kind(call: Call) -> str:
    """Calls of one kind are handled by the same code."""
    what = call.subresource or ("one" if call.name else "all")
    return f"{call.user}: {call.method} {call.resource.plural} {what}"


@pytest.mark.parametrize("fault", [*REFUSALS, "timeout after commit"])
@pytest.mark.parametrize("who", [AGENT, OPERATOR])
def test_any_kind_of_request_fails(who: str, fault: str, tmp_path: Path, calm: Calm, cases: Cases) -> None:
    """Each kind of request, at its first, its second and its last time."""
    wanted, _ = calm(who)
    times = Counter(kind(call) for _, call in CALLS[who])
    every = [(which, n) for which, total in sorted(times.items()) for n in sorted({1, 2, total}) if n <= total]
    name = f"requests of {who} answered with {fault}"

    def failed(index: int) -> str:
        which, at = every[index - 1]
        seen: Counter[str] = Counter()

        def hurt(call: Call, _number: int) -> None:
            seen[kind(call)] += 1
            if kind(call) == which and seen[which] == at:
                raise REFUSALS.get(fault, REFUSALS["timeout"])

        faults = Faults(after=hurt) if fault == "timeout after commit" else Faults(before=hurt)
        outcome, _, _ = one_life(tmp_path / "w", Plan(who=who, faults=always(faults)))
        assert not difference(outcome, wanted), f"{which}, time {at}: {difference(outcome, wanted)}"
        return which if seen[which] >= at else ""

    cases.each(name, chosen([which for which, _ in every], name), failed)


@pytest.mark.parametrize("fault", ["timeout", "403", "500"])
@pytest.mark.parametrize("who", [AGENT, OPERATOR])
def test_the_api_server_is_away_for_a_minute(who: str, fault: str, tmp_path: Path, calm: Calm, cases: Cases) -> None:
    """From every twentieth second on; the minutes that are spared are left out."""
    wanted, _ = calm(who)
    starts = sorted({second for at, _ in CALLS[who] for second in range(0, int(at) + 1, 20) if at < second + 60})
    name = f"minutes in which {who} was answered with {fault} only"

    def away(index: int) -> str:
        start, hit = starts[index - 1], ""

        def faults(x: World) -> Faults:
            def hurt(call: Call, _number: int) -> None:
                nonlocal hit
                if start <= x.loop.time() < start + 60:
                    hit = str(call)
                    raise REFUSALS[fault]

            return Faults(before=hurt)

        outcome, _, _ = one_life(tmp_path / "w", Plan(who=who, faults=faults))
        assert not difference(outcome, wanted), f"from second {start} on: {difference(outcome, wanted)}"
        return hit

    cases.each(name, chosen([str(start) for start in starts], name), away)


@pytest.mark.parametrize(
    ("what", "faults"),
    [
        # An agent that hears of a pod later than that answers too late: init decides alone after ten seconds.
        ("late by 5 s", WatchFaults(lag_s=5.0)),
        ("all twice", WatchFaults(twice=lambda _: True)),
        ("every second one lost", WatchFaults(drop=lambda n: n % 2 == 0, gone_every=7)),
        ("all lost", WatchFaults(drop=lambda _: True)),
        ("410 after each", WatchFaults(gone_every=1)),
    ],
    ids=lambda x: x.replace(" ", "-") if isinstance(x, str) else "",
)
@pytest.mark.parametrize("who", [AGENT, OPERATOR])
def test_events_of_a_watch(who: str, what: str, faults: WatchFaults, tmp_path: Path, calm: Calm, cases: Cases) -> None:
    if who == AGENT and what == "all lost":
        # A watch that loses events and never breaks is a broken client: it is made anew after five minutes.
        faults = WatchFaults(drop=lambda n: n % 3 != 0, gone_every=2)
    wanted, _ = calm(who)

    def hurt(_number: int) -> str:
        outcome, _, _ = one_life(tmp_path / "w", Plan(who=who, faults=always(Faults(watch=faults))))
        assert not difference(outcome, wanted), difference(outcome, wanted)
        return what

    cases.each(f"watches of {who} with events {what}", [1], hurt)
