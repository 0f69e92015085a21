"""PID 1's decisions: every path of "Life of a container", and that no sequence of events leads off them."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllmsnapshot_child import machine, protocol
from vllmsnapshot_child.machine import (
    ADOPT,
    CLAIM,
    EXIT,
    FORWARD,
    HELLO,
    KILL_ALL,
    LOG,
    RELEASE,
    SERVER,
    Act,
    Hold,
    Look,
    Machine,
    Policy,
)
from vllmsnapshot_child.protocol import Reason

POLICY = Policy(decision_timeout_s=10, term_grace_s=25, self_release_s=60)
COLD = protocol.Start(incarnation="a", mode="cold", reason="NoContent")
ATTENDED = replace(COLD, attended=True)
RESTORE = protocol.Start(incarnation="a", mode="restore", reason="Usable", content="c1", timeout_s=120)
REFUSE = protocol.Start(incarnation="a", mode="refuse", reason="RestoreRequired")
RESTORED = protocol.Restored(incarnation="a", pid=1001, content="c1")


class Life:
    """A machine with a clock; `see` gives the acts without the log."""

    def __init__(self, policy: Policy = POLICY, *, control: bool = True) -> None:
        self.machine = Machine(policy)
        self.now = 1000.0
        self.log: list[str] = []
        self.first = self.sort(self.machine.begin(self.now, control=control))

    def sort(self, acts: list[Act]) -> list[Act]:
        self.log += [a.message for a in acts if a.verb == LOG]
        return [a for a in acts if a.verb != LOG]

    def see(self, after: float = 0.0, **what: Any) -> list[Act]:
        self.now += after
        return self.sort(self.machine.step(Look(now=self.now, **what)))

    def verbs(self, after: float = 0.0, **what: Any) -> list[str]:
        return [a.verb for a in self.see(after, **what)]


def serving_restored() -> Life:
    life = Life()
    life.see(start=RESTORE)
    life.see(restored=RESTORED)
    life.see(released=True)
    life.see(serving=True)
    return life


def only(acts: list[Act]) -> Act:
    assert len(acts) == 1, acts
    return acts[0]


# --- deciding ---


def test_it_says_hello_first_and_waits() -> None:
    life = Life()
    assert [a.verb for a in life.first] == [HELLO]
    assert life.see(9.9) == []


def test_nobody_answers_so_it_starts_cold_without_a_barrier() -> None:
    life = Life()
    assert life.verbs(10) == [CLAIM]
    assert life.machine.pause(life.now) == 0
    acts = life.see(start=replace(COLD, reason="Unattended", message="nobody decided"))
    assert [(a.verb, a.attended) for a in acts] == [(KILL_ALL, False), (SERVER, False)]
    assert "nobody decided" in life.log[-1]


def test_an_answer_in_the_last_moment_is_obeyed() -> None:
    life = Life()
    assert life.verbs(10) == [CLAIM]
    assert life.see(start=RESTORE) == []
    assert life.verbs(restored=RESTORED) == [ADOPT]


def test_a_decision_that_cannot_be_written_down_is_taken_all_the_same() -> None:
    life = Life()
    assert life.verbs(10) == [CLAIM]
    act = only(life.see())
    assert (act.verb, act.attended) == (SERVER, False)


def test_without_a_control_volume_it_starts_cold_at_once() -> None:
    life = Life(control=False)
    act = only(life.first)
    assert (act.verb, act.attended) == (SERVER, False)
    assert life.machine.wants() == ()
    assert life.machine.pause(life.now) is None


@pytest.mark.parametrize("attended", [True, False])
def test_told_cold(attended: bool) -> None:
    acts = Life().see(start=replace(COLD, attended=attended))
    assert [(a.verb, a.attended) for a in acts] == [(KILL_ALL, False), (SERVER, attended)]


def test_told_to_refuse_it_exits_and_says_why() -> None:
    act = only(Life().see(start=REFUSE))
    assert (act.verb, act.number) == (EXIT, 78)
    assert "RestoreRequired" in act.message


def test_a_restore_without_a_content_is_a_cold_start() -> None:
    assert Life().verbs(start=replace(RESTORE, content=None)) == [KILL_ALL, SERVER]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_deciding_ends_it_at_once(number: int) -> None:
    act = only(Life().see(signals=(number,)))
    assert (act.verb, act.number) == (EXIT, 128 + number)


def test_another_signal_while_deciding_changes_nothing() -> None:
    assert Life().see(signals=(signal.SIGHUP,)) == []


# --- restoring ---


def test_a_restored_tree_is_adopted() -> None:
    life = Life()
    assert life.see(start=RESTORE) == []
    assert life.see(5, start=RESTORE) == []
    act = only(life.see(1, start=RESTORE, restored=RESTORED))
    assert (act.verb, act.pid) == (ADOPT, 1001)


def test_a_restore_that_never_comes_is_killed_and_a_cold_start_follows() -> None:
    life = Life()
    life.see(start=RESTORE)
    assert life.see(119.9, start=RESTORE) == []
    acts = life.see(0.1, start=RESTORE)
    assert [a.verb for a in acts] == [KILL_ALL, SERVER]
    assert not acts[1].attended


@pytest.mark.parametrize("attended", [True, False])
def test_a_second_decision_while_restoring_replaces_the_first(attended: bool) -> None:
    life = Life()
    life.see(start=RESTORE)
    acts = life.see(start=replace(COLD, attended=attended, reason="RestoreFailed"))
    assert [a.verb for a in acts] == [KILL_ALL, SERVER]
    assert acts[1].attended == attended


def test_refused_while_restoring() -> None:
    life = Life()
    life.see(start=RESTORE)
    assert life.verbs(start=REFUSE) == [KILL_ALL, EXIT]


def test_stopped_while_restoring_leaves_nothing_behind() -> None:
    life = Life()
    life.see(start=RESTORE)
    assert life.verbs(signals=(signal.SIGTERM,)) == [KILL_ALL, EXIT]


def test_a_restored_tree_that_dies_before_serving_leads_to_a_new_incarnation_that_says_so() -> None:
    life = Life()
    life.see(start=RESTORE)
    life.see(restored=RESTORED)
    acts = life.see(exited=75, failure=(Reason.CANARY_MISMATCH, "other text"))
    assert [a.verb for a in acts] == [KILL_ALL, HELLO]
    assert life.machine.failed_restores == {"c1": "CanaryMismatch: other text"}
    assert life.verbs(10) == [CLAIM]  # and nobody answers the new hello
    assert life.verbs() == [SERVER]


@pytest.mark.parametrize(("code", "says"), [(139, "exit code 139"), (73, "ReleaseTimeout: exit code 73")])
def test_without_a_failed_file_the_exit_code_is_the_reason(code: int, says: str) -> None:
    life = Life()
    life.see(start=RESTORE)
    life.see(restored=RESTORED)
    life.see(exited=code)
    assert life.machine.failed_restores == {"c1": says}


def test_a_restored_tree_that_does_not_serve_in_time_has_failed() -> None:
    life = Life()
    life.see(start=RESTORE)
    life.see(restored=RESTORED)
    life.see(3, released=True)
    assert life.see(119.9, released=True) == []
    assert life.verbs(0.1, released=True) == [KILL_ALL, HELLO]
    assert "NotServing" in life.machine.failed_restores["c1"]


def test_after_three_failed_restores_nobody_is_asked() -> None:
    life = Life()
    for n in range(3):
        content = f"c{n}"
        life.see(start=replace(RESTORE, content=content))
        life.see(restored=replace(RESTORED, content=content))
        acts = life.see(exited=1)
    assert [a.verb for a in acts] == [KILL_ALL, HELLO, SERVER]
    assert not acts[-1].attended
    assert sorted(life.machine.failed_restores) == ["c0", "c1", "c2"]


def test_a_restored_tree_that_has_served_ends_the_container() -> None:
    acts = serving_restored().see(exited=17)
    assert [a.verb for a in acts] == [KILL_ALL, EXIT]
    assert acts[1].number == 17


def test_serving_and_dying_between_two_looks_counts_as_served() -> None:
    life = Life()
    life.see(start=RESTORE)
    life.see(restored=RESTORED)
    assert life.verbs(released=True, serving=True, exited=17) == [KILL_ALL, EXIT]


# --- the barrier ---


def attended() -> Life:
    life = Life()
    life.see(start=ATTENDED)
    return life


def test_nothing_is_released_before_it_is_ready() -> None:
    assert attended().see(10_000) == []


def test_ready_and_forgotten_it_is_released_once_a_minute_has_passed() -> None:
    life = attended()
    life.see(300, ready=True)
    assert life.see(59.9, ready=True) == []
    assert life.verbs(0.1, ready=True) == [RELEASE]
    assert life.verbs(0.2, ready=True) == [RELEASE]  # until the file is there
    assert len([line for line in life.log if "releasing" in line]) == 1
    assert life.see(0.2, ready=True, released=True) == []
    assert life.machine.pause(life.now) is None


def test_a_hold_postpones_the_release_by_its_own_time() -> None:
    life = attended()
    life.see(ready=True)
    hold = Hold("1", 300)
    life.see(50, ready=True, hold=hold)
    assert life.see(299.9, ready=True, hold=hold) == []
    assert life.verbs(0.1, ready=True, hold=hold) == [RELEASE]


def test_a_renewed_hold_starts_again() -> None:
    life = attended()
    life.see(ready=True, hold=Hold("1", 100))
    life.see(90, ready=True, hold=Hold("2", 100))
    assert life.see(99.9, ready=True, hold=Hold("2", 100)) == []
    assert life.verbs(0.1, ready=True, hold=Hold("2", 100)) == [RELEASE]


def test_a_hold_that_was_taken_back_leaves_the_minute() -> None:
    life = attended()
    life.see(ready=True, hold=Hold("1", 1000))
    assert life.verbs(60, ready=True) == [RELEASE]


def test_a_restored_tree_is_at_the_barrier_from_the_start() -> None:
    life = Life()
    life.see(start=RESTORE)
    life.see(restored=RESTORED)
    assert life.see(59.9) == []
    assert life.verbs(0.1) == [RELEASE]


@pytest.mark.parametrize("reason", [Reason.REHEARSAL_MISMATCH, Reason.RELOAD_FAILED, Reason.CANARY_FAILED])
def test_an_engine_that_only_fails_its_rehearsal_is_started_without_barrier(reason: str) -> None:
    acts = attended().see(exited=72, failure=(reason, "m"))
    assert [a.verb for a in acts] == [KILL_ALL, SERVER]
    assert not acts[1].attended


@pytest.mark.parametrize("looked", [True, False])
def test_an_engine_that_fails_after_the_barrier_ends_the_container(looked: bool) -> None:
    life = attended()
    if looked:
        life.see(ready=True)
    assert life.verbs(ready=True, exited=74, failure=(Reason.RELOAD_FAILED, "m")) == [KILL_ALL, EXIT]


def test_an_engine_that_does_not_start_ends_the_container() -> None:
    acts = attended().see(exited=70, failure=(Reason.ENGINE_FAILED, "out of memory"))
    assert [(a.verb, a.number) for a in acts] == [(KILL_ALL, 0), (EXIT, 70)]
    assert "out of memory" in acts[1].message


def test_an_engine_without_barrier_is_never_released() -> None:
    life = Life()
    life.see(start=COLD)
    assert life.machine.wants() == ()
    assert life.see(10_000, ready=True) == []


def test_a_foreign_server_has_only_the_barrier_so_it_is_released_as_soon_as_it_is_ready() -> None:
    life = Life(POLICY._replace(foreign_server=True))
    life.see(start=COLD)
    assert life.see(30) == []
    assert life.verbs(1, ready=True) == [RELEASE]


# --- ending ---


def test_a_stop_is_passed_on_and_the_servers_exit_code_is_ours() -> None:
    life = attended()
    act = only(life.see(signals=(signal.SIGTERM,)))
    assert (act.verb, act.number) == (FORWARD, signal.SIGTERM)
    assert life.machine.pause(life.now) == 25
    acts = life.see(3, exited=0)
    assert [(a.verb, a.number) for a in acts] == [(KILL_ALL, 0), (EXIT, 0)]


def test_a_server_that_ignores_the_stop_is_killed_after_the_grace() -> None:
    life = attended()
    life.see(signals=(signal.SIGTERM,))
    assert life.see(24.9) == []
    acts = life.see(0.1)
    assert [(a.verb, a.number) for a in acts] == [(KILL_ALL, 0), (EXIT, 137)]


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_stop_ends_everything_at_once(second: signal.Signals) -> None:
    life = attended()
    life.see(signals=(signal.SIGTERM,))
    acts = life.see(20, signals=(second,))
    assert [(a.verb, a.number) for a in acts] == [(KILL_ALL, 0), (EXIT, 128 + second)]


def test_another_signal_after_the_stop_is_passed_on() -> None:
    life = attended()
    life.see(signals=(signal.SIGTERM,))
    assert life.verbs(signals=(signal.SIGUSR1,)) == [FORWARD]


def test_a_second_stop_does_not_kill_what_only_the_agent_may_end_nor_extend_the_grace() -> None:
    life = serving_restored()
    life.see(signals=(signal.SIGTERM,), attends_end=True)
    assert life.verbs(20, signals=(signal.SIGTERM,), attends_end=True) == [FORWARD]
    assert life.verbs(5) == [KILL_ALL, EXIT]


ENDING = protocol.Ending(incarnation="a", exit_code=0, timeout_s=7.5)


@pytest.mark.parametrize(("exited", "after"), [(137, 3.0), (0, 9.0), (70, 9.0)])
def test_a_server_that_is_ended_by_the_agent_ends_as_it_would_have(exited: int, after: float) -> None:
    life = serving_restored()
    act = only(life.see(signals=(signal.SIGTERM,), attends_end=True))
    assert (act.verb, act.number) == (FORWARD, signal.SIGTERM)
    assert life.machine.stopping
    acts = life.see(after, exited=exited, ending=ENDING)
    assert [(a.verb, a.number) for a in acts] == [(KILL_ALL, 0), (EXIT, 0)]


def test_an_end_that_is_attended_takes_no_longer_than_any_other() -> None:
    life = serving_restored()
    life.see(signals=(signal.SIGTERM,), attends_end=True)
    assert life.see(24.9, ending=ENDING) == []
    acts = life.see(0.1, ending=ENDING)
    assert [(a.verb, a.number) for a in acts] == [(KILL_ALL, 0), (EXIT, 0)]


def test_an_end_that_nobody_asked_for_is_an_end_of_its_own() -> None:
    life = Life()
    life.see(start=ATTENDED)
    acts = life.see(exited=17, ending=ENDING)
    assert [(a.verb, a.number) for a in acts] == [(KILL_ALL, 0), (EXIT, 17)]


def test_a_restored_tree_that_is_stopped_before_it_serves_is_not_started_again() -> None:
    life = Life()
    life.see(start=RESTORE)
    life.see(restored=RESTORED)
    life.see(signals=(signal.SIGTERM,))
    assert life.verbs(exited=143) == [KILL_ALL, EXIT]


def test_other_signals_are_passed_on_and_that_is_all() -> None:
    life = serving_restored()
    acts = life.see(signals=(signal.SIGUSR1, signal.SIGHUP))
    assert [(a.verb, a.number) for a in acts] == [(FORWARD, signal.SIGUSR1), (FORWARD, signal.SIGHUP)]
    assert life.machine.pause(life.now) is None


def test_once_it_serves_only_signals_matter() -> None:
    life = serving_restored()
    assert life.machine.wants() == ()
    assert life.machine.pause(life.now) is None


# --- any sequence ---

looks = st.fixed_dictionaries(
    {"after": st.sampled_from([0.0, 0.02, 1.0, 11.0, 61.0, 130.0])},
    optional={
        "start": st.sampled_from([COLD, ATTENDED, RESTORE, REFUSE, replace(RESTORE, content="c2")]),
        "restored": st.sampled_from([RESTORED, replace(RESTORED, content="c2", pid=5)]),
        "hold": st.sampled_from([Hold("1", 30), Hold("2", 300)]),
        "ready": st.booleans(),
        "released": st.booleans(),
        "serving": st.booleans(),
        "exited": st.sampled_from([0, 1, 72, 137]),
        "failure": st.sampled_from([(Reason.REHEARSAL_MISMATCH, "m"), (Reason.BIND_FAILED, "m")]),
        "signals": st.sampled_from([(signal.SIGTERM,), (signal.SIGHUP,), (signal.SIGINT, signal.SIGTERM)]),
        "attends_end": st.booleans(),
        "ending": st.just(ENDING),
    },
)


@settings(max_examples=500, deadline=None)
@given(st.lists(looks, max_size=12), st.booleans(), st.booleans())
def test_no_sequence_of_events_leads_to_two_servers_or_to_none(
    events: list[dict[str, Any]], foreign: bool, control: bool
) -> None:
    life = Life(POLICY._replace(foreign_server=foreign), control=control)
    running, clean, done, incarnations = False, True, False, 0

    def check(acts: list[Act]) -> None:
        nonlocal running, clean, done, incarnations
        for act in acts:
            assert not done, f"{act} after the exit"
            if act.verb == HELLO:
                assert clean, "a new incarnation while something of the old one lives"
                incarnations += 1
            elif act.verb in (SERVER, ADOPT):
                assert not running, "two servers"
                assert clean or act.verb == ADOPT, "a cold start beside what a restore left"
                running, clean = True, False
            elif act.verb == KILL_ALL:
                running, clean = False, True
            elif act.verb in (FORWARD, RELEASE):
                assert running, f"{act.verb} without a server"
            elif act.verb == EXIT:
                assert not running or act.number == machine.REFUSED_EXIT
                done = True

    check(life.first)
    for event in events:
        if not running:
            event = {k: v for k, v in event.items() if k != "exited"}  # only a server can end
        if life.machine.phase == machine.RESTORING:
            clean = False  # CRIU may have begun
        check(life.see(**event))
        assert len(life.machine.failed_restores) <= machine.MAX_RESTORES
        assert incarnations <= machine.MAX_RESTORES + 1
    if done:
        return
    # Whatever happened: if nothing happens any more, a server runs (or has been told to end) before long.
    for _ in range(3):
        check(life.see(1000))
    assert running or done
