"""The parts of the chaos run that decide something: what is done when, which request may fail, which log lines are errors."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chaos.audit import Size, grown
from tests.chaos.blame import LINGER_S, Blame
from tests.chaos.faults import AGENT, OPERATOR
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
from tests.chaos.traffic import Failure, Subject, Traffic, size_argument
from tests.cluster import Cluster
from tests.node.snapshot import answer
from tests.nodeview import NodeView, destinations
from tests.system import System
from vllmsnapshot.api import constants as c
from vllmsnapshot.kube import Object, WatchEvent

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


def test_a_kubelet_that_was_restarted_explains_an_outage_for_a_while(blame: Blame, clock: Clock) -> None:
    blame.unsettle(60)
    clock.now = 150
    blame.nobody("a", wanted=1)
    assert blame.outages == []
    blame.somebody("a")
    clock.now = 161
    blame.nobody("a", wanted=1)
    assert len(blame.outages) == 1


def test_scaled_to_zero_is_no_outage(blame: Blame) -> None:
    blame.nobody("a", wanted=0)
    assert blame.outages == []
    assert blame.excuse("a", 101, 102) == "no replica is ready"


def test_an_outage_that_nobody_made_is_told_and_excuses_nothing(blame: Blame) -> None:
    blame.nobody("a", wanted=1)
    assert [window.snapshot for window in blame.outages] == ["a"]
    assert blame.excuse("a", 101, 102) is None


def test_the_time_in_which_failures_are_excused_is_told(blame: Blame, clock: Clock) -> None:
    for began, ended in ((110, 120), (115, 118), (150, 160)):
        clock.now = began
        blame.strike("a", f"uid-{began}", "killed")
        clock.now = ended
        blame.over(f"uid-{began}")
    blame.strike("a", "uid", "ended", gentle=True)
    assert blame.excusable_s("a", 100, 200) == 20 + 2 * LINGER_S
    assert blame.excusable_s("a", 112, 155) == 8 + LINGER_S + 5
    assert blame.excusable_s("b", 100, 200) == 0


# --- the judge ---


def pod(name: str, mib: int, *, ready: bool = True, restarts: int = 0, runs: bool = True, **meta: str) -> Object:
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": {c.LABEL_IDENTITY: f"id-{mib}"}, **meta},
        "spec": {"containers": [{"name": c.CONTAINER, "args": [size_argument(mib)]}]},
        "status": {
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [
                {"name": c.CONTAINER, "restartCount": restarts, "state": {"running" if runs else "terminated": {}}}
            ],
        },
    }


@pytest.fixture
def subject(blame: Blame) -> Subject:
    """A snapshot that nobody watches: tests say what is there."""
    return Subject(cast("System", None), cast("NodeView", None), {"metadata": {"name": "a"}}, Traffic(blame))


def there(subject: Subject, *pods: Object) -> None:
    subject.seen._present = {item["metadata"]["uid"]: item for item in pods}
    subject._told(WatchEvent("SYNC", {}, pods))


def plain(text: str, name: str = "a-0") -> str:
    return json.dumps({"choices": [{"text": text}], "hostname": name})


def stream(text: str) -> str:
    words = [f" {word}" for word in text.split()]
    return "".join(f"data: {json.dumps({'choices': [{'text': word}]})}\n\n" for word in words) + "data: [DONE]\n\n"


def test_right_answers_are_counted(subject: Subject) -> None:
    there(subject, pod("a-0", 2), pod("a-1", 3))
    for raw in (plain(answer(mib=2)), plain(answer(mib=3), "a-1"), stream(answer(mib=2)), stream(answer(mib=3))):
        subject.judge(raw)
    assert subject.traffic.answered["service"] == 4
    assert subject.traffic.wrong == []
    assert not subject.traffic.alarm.is_set()


@pytest.mark.parametrize(
    "raw",
    [plain("nonsense"), plain(answer(mib=3)), plain(answer(mib=4), "node"), stream(answer(mib=4)), stream("")],
    ids=["nonsense", "another-replica's", "nobody's", "streamed", "nothing"],
)
def test_a_wrong_answer_ends_the_run(subject: Subject, raw: str) -> None:
    there(subject, pod("a-0", 2), pod("a-1", 3))
    subject.judge(raw)
    assert len(subject.traffic.wrong) == 1
    assert subject.traffic.alarm.is_set()


def test_a_pod_that_is_gone_from_the_api_may_still_answer_as_it_should(subject: Subject) -> None:
    """Deleted without a grace period while the kubelet was away, and asked over a connection that was kept."""
    there(subject, pod("a-0", 2))
    there(subject)
    subject.judge(plain(answer(mib=2)))
    assert subject.traffic.wrong == []
    subject.judge(plain(answer(mib=3)))
    assert len(subject.traffic.wrong) == 1


def test_a_port_may_still_be_anothers_until_the_replica_is_ready(subject: Subject) -> None:
    """The one before was deleted without a grace period, and the kubelet has not got to it."""
    there(subject, routed("a-0", 2, "10.0.0.1:80"), routed("b-0", 4, "10.0.0.1:81"))
    new = routed("a-1", 3, "10.0.0.1:80", ready=False)
    there(subject, new)
    subject.heard(new, answer(mib=2), ready=False, asked=0)
    subject.heard(new, answer(mib=3), ready=True, asked=0)
    assert subject.traffic.wrong == []
    subject.heard(new, answer(mib=4), ready=False, asked=0)
    subject.heard(new, answer(mib=2), ready=True, asked=0)
    assert len(subject.traffic.wrong) == 2


def test_a_killed_replica_is_blamed_until_it_is_known_to_be_out_of_service(subject: Subject, blame: Blame, clock: Clock) -> None:
    there(subject, pod("a-0", 2), pod("a-1", 2))
    blame.strike("a", "uid-a-0", "killed", kill=True)
    there(subject, pod("a-0", 2), pod("a-1", 2))  # nobody knows yet
    clock.now = 130
    assert blame.excuse("a", 129, 130) == "killed"
    there(subject, pod("a-0", 2, ready=False, runs=False), pod("a-1", 2))
    assert blame.excuse("a", 130 + LINGER_S + 1, 140) is None


def test_a_kubelet_that_starts_does_not_end_the_blame(subject: Subject, blame: Blame, clock: Clock) -> None:
    """It calls every pod not ready, and then ready as before, until it comes to look at the one that was killed."""
    there(subject, pod("a-0", 2), pod("a-1", 2))
    blame.strike("a", "uid-a-0", "killed", kill=True)
    there(subject, pod("a-0", 2, ready=False), pod("a-1", 2))
    there(subject, pod("a-0", 2), pod("a-1", 2))
    clock.now = 150
    assert blame.excuse("a", 140, 150) == "killed"


def test_what_was_not_done_excuses_nothing_and_ends_nothing(blame: Blame, clock: Clock) -> None:
    blame.strike("a", "uid", "killed")
    clock.now = 110
    blame.withdraw(blame.strike("a", "uid", "killed again"))
    assert blame.excuse("a", 150, 151) == "killed"
    blame.withdraw(blame.strike("b", "other", "killed"))
    assert blame.excuse("b", 109, 111) is None


def test_old_news_does_not_end_the_blame(subject: Subject, blame: Blame, clock: Clock) -> None:
    """The kubelet tells late that a replica had become ready, when it has been killed already."""
    there(subject, pod("a-0", 2, ready=False))
    blame.strike("a", "uid-a-0", "killed", kill=True)
    there(subject, pod("a-0", 2, ready=False))
    there(subject, pod("a-0", 2))
    clock.now = 150
    assert blame.excuse("a", 140, 150) == "killed"
    there(subject, pod("a-0", 2, restarts=1))
    assert blame.windows[0].ended == 150


def test_a_restart_that_nobody_saw_unready_ends_the_blame_too(subject: Subject, blame: Blame) -> None:
    there(subject, pod("a-0", 2))
    blame.strike("a", "uid-a-0", "killed", kill=True)
    there(subject, pod("a-0", 2, restarts=1))
    assert [window.ended for window in blame.windows] == [100.0]


def test_the_last_replica_that_goes_by_itself_is_an_outage(subject: Subject, blame: Blame) -> None:
    there(subject, pod("a-0", 2))
    there(subject, pod("a-0", 2, ready=False))
    assert len(blame.outages) == 1


def routed(name: str, mib: int, address: str, **more: Any) -> Object:
    """A pod that listens there."""
    host, _, port = address.partition(":")
    found = pod(name, mib, **more)
    found["metadata"]["annotations"] = {c.ANNOTATION_PORT: port}
    found["status"]["podIP"] = host
    return found


def test_a_killed_replica_is_blamed_while_kube_proxy_still_routes_to_it(subject: Subject, blame: Blame, clock: Clock) -> None:
    there(subject, routed("a-0", 2, "10.0.0.1:80"), routed("a-1", 2, "10.0.0.2:80"))
    blame.strike("a", "uid-a-0", "killed", kill=True)
    there(subject, routed("a-1", 2, "10.0.0.2:80"))
    for _ in range(10):
        subject.routed({"10.0.0.1:80", "10.0.0.2:80"})
        clock.now += 2
    assert blame.excuse("a", 118, 118) == "killed"
    subject.routed({"10.0.0.2:80"})
    assert blame.excuse("a", 118 + LINGER_S + 0.1, 130) is None


def test_news_of_one_kill_is_none_of_the_next(subject: Subject, blame: Blame, clock: Clock) -> None:
    """Both came while the API server was away; the first is told when it is back."""
    there(subject, pod("a-0", 2, restarts=1))
    one = blame.strike("a", "uid-a-0", "killed", kill=True)
    blame.answered("uid-a-0", clock.now + 1)
    other = blame.strike("a", "uid-a-0", "killed", kill=True)
    there(subject, pod("a-0", 2, restarts=2))
    assert (one.ended, other.ended) == (100, math.inf)
    there(subject, pod("a-0", 2, restarts=2, ready=False, runs=False))
    assert other.ended == 100


def test_a_killed_replica_that_answers_again_is_blamed_no_more(blame: Blame, clock: Clock) -> None:
    """The kubelet counts no restart of a container that it had not yet told of, or whose remains are gone."""
    killed = blame.strike("a", "uid", "killed", kill=True)
    deleted = blame.strike("a", "uid", "deleted")
    clock.now = 130
    blame.answered("uid", 99)
    assert killed.ended == math.inf, "asked before"
    blame.answered("uid", 129)
    assert (killed.ended, deleted.ended) == (130, math.inf)


def test_an_address_that_is_another_replicas_by_now_blames_nobody(subject: Subject, blame: Blame, clock: Clock) -> None:
    there(subject, routed("a-0", 2, "10.0.0.1:80"))
    blame.strike("a", "uid-a-0", "killed", kill=True)
    there(subject)
    clock.now = 102
    there(subject, routed("a-1", 2, "10.0.0.1:80"))
    subject.routed({"10.0.0.1:80"})
    assert blame.windows[0].ended == 100
    there(subject, routed("a-1", 2, "10.0.0.1:80", ready=False))
    clock.now = 100 + LINGER_S + 1
    subject.routed({"10.0.0.1:80"})
    assert blame.windows[0].ended == 100, "long over"


def test_a_graceful_end_excuses_the_service_only_where_kube_proxy_could_not_be_told(
    subject: Subject, blame: Blame, clock: Clock
) -> None:
    there(subject, routed("a-0", 2, "10.0.0.1:80"), routed("a-1", 2, "10.0.0.2:80"))
    there(subject, routed("a-0", 2, "10.0.0.1:80", deletionTimestamp="now"), routed("a-1", 2, "10.0.0.2:80"))
    subject.routed({"10.0.0.1:80", "10.0.0.2:80"})
    assert blame.excuse("a", 100, 101) is None, "slow without a reason"
    blame.blind(60)
    for _ in range(40):
        clock.now += 1
        subject.routed({"10.0.0.1:80", "10.0.0.2:80"})
    assert blame.excuse("a", 139, 140) == "it ended before kube-proxy was told"
    assert len(blame.windows) == 2
    subject.routed({"10.0.0.2:80"})
    assert blame.excuse("a", 140 + LINGER_S + 0.1, 150) is None


def test_that_no_replica_is_ready_excuses_until_one_is_routed_to(subject: Subject, blame: Blame, clock: Clock) -> None:
    there(subject, routed("a-0", 2, "10.0.0.1:80"))
    subject.routed({"10.0.0.1:80"})
    blame.strike("a", "uid-a-0", "killed", kill=True)
    there(subject, routed("a-0", 2, "10.0.0.1:80", ready=False, runs=False))
    subject.routed(frozenset())
    clock.now = 120
    there(subject, routed("a-0", 2, "10.0.0.1:80", restarts=1))
    clock.now = 140
    assert blame.excuse("a", 138, 139) == "no replica is ready"
    subject.routed({"10.0.0.1:80"})
    assert blame.excuse("a", 140 + LINGER_S + 0.1, 150) is None


def test_a_roll_is_no_outage(subject: Subject, blame: Blame) -> None:
    """The rules are looked at now and then, and may still lead to the old replica when the new one is ready."""
    there(subject, routed("a-0", 2, "10.0.0.1:80"))
    subject.routed({"10.0.0.1:80"})
    there(subject, routed("a-0", 2, "10.0.0.1:80", deletionTimestamp="now"), routed("a-1", 2, "10.0.0.2:80"))
    subject.routed({"10.0.0.1:80"})
    assert blame.outages == []


def test_an_address_that_was_ones_long_ago_excuses_nothing(subject: Subject, blame: Blame, clock: Clock) -> None:
    there(subject, routed("a-0", 2, "10.0.0.1:80", deletionTimestamp="now"), routed("a-1", 2, "10.0.0.2:80"))
    there(subject, routed("a-1", 2, "10.0.0.2:80"))
    clock.now = 200
    blame.blind(60)
    there(subject, routed("a-1", 2, "10.0.0.2:80"), routed("a-2", 2, "10.0.0.1:80", ready=False))
    subject.routed({"10.0.0.1:80", "10.0.0.2:80"})
    assert blame.excuse("a", 199, 201) is None


def test_rules_that_lead_nowhere_are_an_outage_where_nothing_was_done(subject: Subject, blame: Blame, clock: Clock) -> None:
    there(subject, routed("a-0", 2, "10.0.0.1:80"))
    subject.routed({"10.0.0.1:80"})
    blame.blind(60)
    clock.now = 110
    subject.routed(frozenset())
    assert (blame.outages, blame.excuse("a", 110, 111)) == ([], "no replica is ready")
    subject.routed({"10.0.0.1:80"})
    clock.now = 200
    subject.routed(frozenset())
    assert len(blame.outages) == 1


def test_failures_are_sorted_into_excused_and_not(subject: Subject, blame: Blame) -> None:
    blame.strike("a", "uid-a-0", "killed", kill=True)
    excused, guilty = Failure("a", "new", 100, 101, "cut"), Failure("a", "new", 90, 91, "cut")
    subject.traffic.failures = [excused, guilty]
    assert subject.traffic.judged() == ({"killed": 1}, [guilty])


def test_failures_without_an_excuse_are_told_with_what_led_to_them(subject: Subject, clock: Clock) -> None:
    there(subject, pod("a-0", 2))
    said = subject.traffic.history[0][0]
    there(subject, pod("a-0", 2))
    there(subject)
    there(subject)
    first, second, late = (Failure("a", "new", said + at, said + at + 0.5, "cut") for at in (1, 2, 100))
    subject.traffic.failures = [late, first, second]
    one, other = subject.traffic.episodes()
    assert (one.failures, one.began, one.ended) == ([first, second], said + 1, said + 2.5)
    assert [text for _, text in one.before] == ["a-0 (None:None) ready, running", "a-0 gone"]
    assert (other.failures, other.before) == ([late], [])


# --- the node ---


def test_routes_are_read_out_of_kube_proxys_rules() -> None:
    rules = """
-A KUBE-SEP-5 -s 10.244.0.9/32 -m comment --comment "default/a:http" -j KUBE-MARK-MASQ
-A KUBE-SEP-5 -p tcp -m comment --comment "default/a:http" -m tcp -j DNAT --to-destination 10.244.0.9:8000
-A KUBE-SEP-6 -p tcp -m comment --comment "default/a:http" -m tcp -j DNAT --to-destination 10.244.0.10:8000
-A KUBE-SEP-7 -p tcp -m comment --comment default/b -m tcp -j DNAT --to-destination 192.0.2.1:21100
-A KUBE-SVC-1 -m comment --comment "default/a:http -> 10.244.0.9:8000" -m statistic --mode random -j KUBE-SEP-5
"""
    assert destinations(rules) == {
        "default/a": frozenset({"10.244.0.9:8000", "10.244.0.10:8000"}),
        "default/b": frozenset({"192.0.2.1:21100"}),
    }


def test_processes_of_the_cluster_are_those_that_descend_from_its_init() -> None:
    """Where they have no parent left, init is it; here we are init."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "some-word"])
    try:
        node = NodeView(cast("Cluster", SimpleNamespace(pid=os.getpid())))
        assert [process.pid for process in node.running("some-word")] == [child.pid]
        assert os.getpid() not in node.everything()
        assert os.getppid() not in node.everything()
        alien = NodeView(cast("Cluster", SimpleNamespace(pid=child.pid)))
        assert alien.running("some-word") == []
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (Size(100, 20, 10), 0),
        (Size(400, 20, 10), 1),
        (Size(100, 200, 10), 1),
        (Size(100, 20, 200), 1),
    ],
)
def test_growth_beyond_reason_is_told(after: Size, told: int) -> None:
    before = Size(90, 20, 8)
    assert len(grown({OPERATOR: before, AGENT: before}, {OPERATOR: before, AGENT: after})) == told


def test_a_part_that_does_not_run_is_told() -> None:
    assert grown({OPERATOR: Size(1, 1, 1), AGENT: Size(1, 1, 1)}, {OPERATOR: Size(1, 1, 1)}) == [f"{AGENT} does not run"]


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
