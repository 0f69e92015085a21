"""The decision for every view: total, safe, and coming to rest. The paths of whole replicas are in test_agent_reconcile.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllmsnapshot.agent import decide, report
from vllmsnapshot.agent.breakeven import PROBE_AFTER_S, Slower
from vllmsnapshot.agent.control import Files
from vllmsnapshot.agent.decide import Candidate, Pod, View, choose, next_step, verdict
from vllmsnapshot.agent.ledger import Attempt
from vllmsnapshot.agent.nodeops import PodRef
from vllmsnapshot.api.constants import Reason
from vllmsnapshot.api.types import PodReport, PodSettings, RestorePolicy, Toggle
from vllmsnapshot_child.protocol import Ending, Failed, Hello, Hold, Oracle, Ready, Release, Restored, Serving, Start

NOW = 1_800_000_000.0
PARIS = Oracle(token_ids=[7042], text=" Paris", sampled_token_logprob=-0.24)
ROME = Oracle(token_ids=[9999], text=" Rome", sampled_token_logprob=-0.9)
WORD = "i1"

POD = Pod(
    ref=PodRef(namespace="default", name="b", uid="uid-b"),
    snapshot="smol",
    snapshot_uid="snap-1",
    identity="id-1",
    settings=PodSettings(),
    port=8000,
)
ART = Candidate(
    name="art",
    uid="uid-art",
    namespace="default",
    snapshot_uid="snap-1",
    identity="id-1",
    node="n",
    source_uid="uid-a",
    captured=True,
    present=True,
    captured_at="2027-01-01T00:00:00Z",
    oracle=PARIS,
)
ORDER = replace(ART, name="order", uid="uid-order", source_uid="uid-b", captured=False, present=False, oracle=None)
COLD = Start(incarnation=WORD, mode="cold", reason=Reason.NO_ARTIFACT, attended=True)
RESTORE = Start(incarnation=WORD, mode="restore", reason=Reason.RESTORED, content="art", timeout_s=120.0)
READY = Ready(incarnation=WORD, token_ids=[7042], text=" Paris", sampled_token_logprob=-0.24, protocol=1)
RELEASE = Release(incarnation=WORD, host=None, port=8000)
RESTORED = Restored(incarnation=WORD, pid=1000, content="art")


ENDING = Ending(incarnation=WORD, exit_code=0, timeout_s=7.5)


def serving(oracle: Oracle = PARIS) -> Serving:
    return Serving(incarnation=WORD, host=None, port=8000, oracle=oracle.to_dict())


def view(*messages: Any, age: float = 1.0, **changes: Any) -> View:
    """A view in which these files exist, all of them `age` seconds old; hello among them unless `hello` says otherwise."""
    hello = changes.pop("hello", Hello(incarnation=WORD))
    files = {type(m).__name__.lower(): m for m in (hello, *messages) if m is not None}
    at = {m.FILE: NOW - age for m in (hello, *messages) if m is not None}
    pod = replace(POD, **{k: changes.pop(k) for k in list(changes) if hasattr(POD, k)})
    return View(now=NOW, node="n", pod=pod, files=Files(**files, at=at), **changes)


def attempt(outcome: Any = "pending", word: str = WORD, content: str = "art") -> tuple[str, Attempt]:
    return content, Attempt(pod="uid-b", incarnation=word, outcome=outcome, reason="R", message="m", at=1.0)


# --- cold or restore -------------------------------------------------------------------------------------------------


def test_the_newest_usable_artifact_is_taken() -> None:
    newer = replace(ART, name="newer", captured_at="2027-01-02T00:00:00Z")
    newest = replace(ART, name="newest", captured_at="2027-01-03T00:00:00Z", quarantined="x")
    assert choose(view(candidates=(ART, newest, newer))).content == "newer"


@pytest.mark.parametrize(
    ("candidates", "reason"),
    [
        ((), Reason.NO_ARTIFACT),
        ((ORDER,), Reason.NO_ARTIFACT),
        ((replace(ORDER, source_uid="uid-c"),), Reason.CAPTURE_IN_PROGRESS),
        ((replace(ORDER, source_uid="uid-c", failed=True),), Reason.NO_ARTIFACT),
        ((replace(ORDER, source_uid="uid-c", capture_failed=True),), Reason.NO_ARTIFACT),
        ((replace(ART, failed=True),), Reason.NO_ARTIFACT),
        ((replace(ART, quarantined="bad"), replace(ORDER, source_uid="uid-c")), Reason.ARTIFACT_QUARANTINED),
        ((replace(ART, present=False),), Reason.ARTIFACT_MISSING),
        ((replace(ART, stale="kernelRelease: 7.0 instead of 6.18"),), Reason.IDENTITY_MISMATCH),
        ((replace(ART, deleting=True),), Reason.NO_ARTIFACT),
        ((replace(ART, node="elsewhere"),), Reason.NO_ARTIFACT),
    ],
)
def test_the_reason_for_a_cold_start_is_precise(candidates: tuple[Candidate, ...], reason: str) -> None:
    start = choose(view(candidates=candidates))
    assert (start.mode, start.attended, start.reason) == ("cold", True, reason)


@pytest.mark.parametrize(
    ("why", "candidates", "mode"),
    [
        ("an artifact is there: to be replaced", (ART,), "cold"),
        ("its order is there", (ART, ORDER), "cold"),
        (
            "its own artifact is there: a crash is no recapture",
            (ART, replace(ORDER, captured=True, present=True, oracle=PARIS)),
            "restore",
        ),
        ("nothing came of it: the one from before is good", (ART, replace(ORDER, failed=True)), "restore"),
        ("so does the ledger know", (ART, replace(ORDER, capture_failed=True)), "restore"),
    ],
)
def test_a_replica_made_for_a_recapture_starts_cold_until_its_order_is_answered(
    why: str, candidates: tuple[Candidate, ...], mode: str
) -> None:
    for policy in (RestorePolicy.PREFER, RestorePolicy.REQUIRE):
        start = choose(view(candidates=candidates, settings=PodSettings(recapture="r1", restore_policy=policy)))
        assert start.mode == mode, why
        if mode == "cold":
            assert (start.attended, start.reason) == (True, Reason.RECAPTURE), why


def test_a_pod_without_identity_matches_nothing() -> None:
    assert choose(view(candidates=(replace(ART, identity=""),), identity="")).mode == "cold"


def test_an_artifact_whose_status_is_not_written_yet_is_good() -> None:
    assert choose(view(candidates=(replace(ART, captured=False),))).mode == "restore"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("EngineFailed: boom", Reason.RESTORE_DIED),
        ("NotServing: 120 s", Reason.RESTORE_TIMEOUT),
        ("CanaryMismatch: x", Reason.CANARY_MISMATCH),
        ("", Reason.RESTORE_DIED),
    ],
)
def test_what_failed_in_this_container_is_not_tried_again(said: str, reason: str) -> None:
    v = view(candidates=(ART,), hello=Hello(incarnation=WORD, failed_restores={"art": said}))
    assert (choose(v).mode, choose(v).reason) == ("cold", reason)


def test_another_artifact_is_tried_instead_but_not_for_ever() -> None:
    other = replace(ART, name="other")
    hello = Hello(incarnation=WORD, failed_restores={"art": "x"})
    assert choose(view(candidates=(ART, other), hello=hello)).content == "other"
    hello = Hello(incarnation=WORD, failed_restores={"art": "x", "old": "y", "older": "z"})
    assert choose(view(candidates=(ART, other), hello=hello)).mode == "cold"


@pytest.mark.parametrize(
    ("candidate", "hello", "mode"),
    [
        (None, {}, "cold"),
        (ART, {}, "restore"),
        (ART, {"art": "x"}, "refuse"),
        (replace(ART, quarantined="q"), {}, "cold"),
        (replace(ART, present=False), {}, "cold"),
    ],
)
def test_require(candidate: Candidate | None, hello: dict[str, str], mode: str) -> None:
    v = view(
        settings=PodSettings(restore_policy=RestorePolicy.REQUIRE),
        candidates=(candidate,) if candidate else (),
        hello=Hello(incarnation=WORD, failed_restores=hello),
    )
    assert choose(v).mode == mode


def test_require_lets_a_replica_start_cold_where_the_node_has_moved_away_from_the_artifact() -> None:
    """It would never come up: nothing is tried, so nothing fails, so nothing is captured anew."""
    v = view(
        candidates=(replace(ART, stale="gpuDriver: 2 instead of 1"),), settings=PodSettings(restore_policy=RestorePolicy.REQUIRE)
    )
    start = choose(v)
    assert (start.mode, start.attended, start.reason) == ("cold", True, Reason.IDENTITY_MISMATCH)
    assert "gpuDriver" in start.message


@pytest.mark.parametrize(
    ("why", "slower", "policy", "started"),
    [
        ("just seen", Slower(why="w", busy=False, last=NOW - 60), RestorePolicy.PREFER, ("cold", Reason.RESTORE_SLOWER)),
        (
            "a probe is due",
            Slower(why="w", busy=False, last=NOW - PROBE_AFTER_S),
            RestorePolicy.PREFER,
            ("restore", Reason.RESTORED),
        ),
        ("a probe is under way", Slower(why="w", busy=True, last=0.0), RestorePolicy.PREFER, ("cold", Reason.RESTORE_SLOWER)),
        ("it is wanted", Slower(why="w", busy=False, last=NOW - 60), RestorePolicy.REQUIRE, ("restore", Reason.RESTORED)),
    ],
)
def test_an_artifact_that_is_slower_than_a_cold_start(
    why: str, slower: Slower, policy: RestorePolicy, started: tuple[str, str]
) -> None:
    start = choose(view(candidates=(replace(ART, slower=slower),), settings=PodSettings(restore_policy=policy)))
    assert (start.mode, start.reason) == started, why
    assert not start.attended, "no capture comes of it"
    # What was decided goes on: the verdict is no reason to stop in the middle.
    assert isinstance(next_step(view(RESTORE, candidates=(replace(ART, slower=slower),))), decide.Restore)


def test_another_artifact_is_taken_where_the_newest_is_slower() -> None:
    newest = replace(ART, name="newest", captured_at="2027-01-03T00:00:00Z", slower=Slower(why="w", busy=False, last=NOW))
    assert choose(view(candidates=(ART, newest))).content == "art"


def test_a_good_restore_is_measured_from_its_beginning() -> None:
    begun = ("art", Attempt(pod="uid-b", incarnation=WORD, at=NOW - 8.5))
    step = next_step(view(RESTORE, RESTORED, RELEASE, serving(), age=1.0, candidates=(ART,), attempts=(begun,)))
    assert isinstance(step, decide.Settle)
    assert (step.outcome, step.seconds) == ("succeeded", 7.5)


def test_an_incapable_node_starts_cold_without_a_barrier() -> None:
    start = choose(view(candidates=(ART,), capable=False, incapable="no CRIU"))
    assert (start.mode, start.attended, start.reason, start.message) == ("cold", False, Reason.NODE_NOT_CAPABLE, "no CRIU")


# --- steps -----------------------------------------------------------------------------------------------------------

STEPS: list[tuple[str, View, type]] = [
    ("no hello", view(hello=None), decide.Wait),
    ("terminating", view(COLD, deleting=True), decide.Wait),
    ("terminating, serves", view(serving(), deleting=True), decide.Wait),
    ("terminating, hello, too late", view(age=8.6, deleting=True), decide.Wait),
    ("terminating, no hello", view(hello=None, deleting=True), decide.Wait),
    ("ended", view(finished=True), decide.Wait),
    ("ended, order", view(finished=True, candidates=(ORDER,)), decide.FailOrder),
    ("hello", view(), decide.Answer),
    ("hello, too late", view(age=8.6), decide.Wait),
    ("hello, too late, order", view(age=8.6, candidates=(ORDER,)), decide.FailOrder),
    ("refused", view(Start(incarnation=WORD, mode="refuse", reason="x")), decide.Wait),
    ("restore", view(RESTORE, candidates=(ART,)), decide.Restore),
    ("restore, content gone", view(RESTORE), decide.GiveUpRestore),
    ("restore, content quarantined", view(RESTORE, candidates=(replace(ART, quarantined="q"),)), decide.GiveUpRestore),
    ("restore, queued too long", view(RESTORE, age=70, candidates=(ART,)), decide.GiveUpRestore),
    ("restore, init gave up", view(RESTORE, age=121, candidates=(ART,)), decide.Wait),
    ("restore, init gave up while it ran", view(RESTORE, age=121, candidates=(ART,), attempts=(attempt(),)), decide.Settle),
    ("restore, interrupted", view(RESTORE, candidates=(ART,), attempts=(attempt(),)), decide.Settle),
    ("restore, interrupted and noted", view(RESTORE, candidates=(ART,), attempts=(attempt("aborted"),)), decide.GiveUpRestore),
    ("restore, failed and noted", view(RESTORE, candidates=(ART,), attempts=(attempt("failed"),)), decide.GiveUpRestore),
    ("restored", view(RESTORE, RESTORED, attempts=(attempt(),)), decide.Release),
    ("restored and released", view(RESTORE, RESTORED, RELEASE, attempts=(attempt(),)), decide.Wait),
    ("restored, order", view(RESTORE, RESTORED, RELEASE, candidates=(ORDER,)), decide.FailOrder),
    (
        "restored and serving",
        view(RESTORE, RESTORED, RELEASE, serving(), candidates=(ART,), attempts=(attempt(),)),
        decide.Settle,
    ),
    (
        "restored, settled",
        view(RESTORE, RESTORED, RELEASE, serving(), candidates=(ART,), attempts=(attempt("succeeded"),)),
        decide.Wait,
    ),
    ("restored, wrong", view(RESTORE, RESTORED, RELEASE, serving(ROME), candidates=(ART,)), decide.Condemn),
    ("restored, nothing recorded", view(RESTORE, RESTORED, RELEASE, serving()), decide.Condemn),
    ("previous incarnation died", view(attempts=(attempt(word="i0"),)), decide.Settle),
    ("starting", view(COLD), decide.Wait),
    ("starting unattended, order", view(replace(COLD, attended=False), candidates=(ORDER,)), decide.FailOrder),
    ("starting, order", view(COLD, candidates=(ORDER,)), decide.Wait),
    ("barrier", view(COLD, READY), decide.Wait),
    ("barrier, order", view(COLD, READY, candidates=(ORDER,)), decide.Capture),
    ("barrier, order, node unfit", view(COLD, READY, candidates=(ORDER,), capable=False), decide.FailOrder),
    ("barrier, order failed", view(COLD, READY, candidates=(replace(ORDER, failed=True),)), decide.Release),
    ("barrier, failure noted", view(COLD, READY, candidates=(replace(ORDER, capture_failed=True),)), decide.Release),
    ("barrier, captured", view(COLD, READY, candidates=(replace(ORDER, captured=True),)), decide.Release),
    ("barrier, published", view(COLD, READY, candidates=(replace(ORDER, present=True),)), decide.Release),
    ("barrier, order deleted", view(COLD, READY, candidates=(replace(ORDER, deleting=True),)), decide.Wait),
    ("barrier, no capture wanted", view(COLD, READY, settings=PodSettings(capture=Toggle.DISABLED)), decide.Release),
    ("barrier, grace over", view(COLD, READY, age=5), decide.Release),
    ("barrier, nobody asked for it", view(READY), decide.Release),
    ("capture interrupted, order", view(COLD, READY, Hold(incarnation=WORD, timeout_s=9), candidates=(ORDER,)), decide.FailOrder),
    ("capture interrupted", view(COLD, READY, Hold(incarnation=WORD, timeout_s=9)), decide.Release),
    ("released, order", view(COLD, READY, RELEASE, candidates=(ORDER,)), decide.FailOrder),
    ("released", view(COLD, READY, RELEASE), decide.Wait),
    ("released, foreign", view(COLD, replace(READY, protocol=None), RELEASE), decide.Probe),
    (
        "released, foreign, failed",
        view(COLD, replace(READY, protocol=None), RELEASE, Failed(incarnation=WORD, reason="x")),
        decide.Wait,
    ),
    ("serving", view(COLD, READY, RELEASE, serving()), decide.Wait),
    ("serving unattended", view(serving(ROME)), decide.Wait),
    ("serving, other answer", view(COLD, READY, RELEASE, serving(ROME)), decide.Condemn),
]


@pytest.mark.parametrize(("v", "kind"), [x[1:] for x in STEPS], ids=[x[0] for x in STEPS])
def test_step(v: View, kind: type) -> None:
    assert isinstance(next_step(v), kind)


def test_an_interrupted_capture_resumes_before_it_releases() -> None:
    assert next_step(view(COLD, READY, Hold(incarnation=WORD, timeout_s=9))) == decide.Release(resume=True)


def test_the_limit_of_a_restore_ends_before_init_stops_waiting() -> None:
    step = next_step(view(RESTORE, age=10, candidates=(ART,)))
    assert isinstance(step, decide.Restore)
    assert step.timeout_s == 120 - 10 - 5
    step = next_step(view(replace(RESTORE, timeout_s=5.0), age=0, candidates=(ART,)))
    assert isinstance(step, decide.Restore)
    assert step.timeout_s == 4


def test_the_answer_recorded_beside_the_restore_is_enough() -> None:
    v = view(RESTORE, RESTORED, RELEASE, serving())
    v = replace(v, files=replace(v.files, restore_oracle=PARIS))
    assert verdict(v) == ("same", "")


# --- every view ------------------------------------------------------------------------------------------------------


def maybe(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from((None, *values))


candidates = st.builds(
    replace,
    st.sampled_from([ART, ORDER]),
    name=st.sampled_from(["art", "order", "third"]),
    snapshot_uid=st.sampled_from(["snap-1", "snap-2"]),
    namespace=st.sampled_from(["default", "other"]),
    identity=st.sampled_from(["id-1", "id-2", ""]),
    node=st.sampled_from(["n", "m"]),
    source_uid=st.sampled_from(["uid-a", "uid-b"]),
    captured=st.booleans(),
    failed=st.booleans(),
    quarantined=st.sampled_from(["", "x"]),
    deleting=st.booleans(),
    present=st.booleans(),
    capture_failed=st.booleans(),
    oracle=maybe(PARIS),
)


@st.composite
def views(draw: st.DrawFn) -> View:
    files = [
        draw(maybe(COLD, replace(COLD, attended=False), RESTORE, replace(COLD, mode="refuse"))),
        draw(maybe(Hold(incarnation=WORD, timeout_s=30.0))),
        draw(maybe(READY, replace(READY, protocol=None))),
        draw(maybe(RELEASE)),
        draw(maybe(RESTORED)),
        draw(maybe(serving(), serving(ROME))),
        draw(maybe(Failed(incarnation=WORD, reason="x"))),
        draw(maybe(None, ENDING)),
    ]
    hello = draw(
        maybe(
            Hello(incarnation=WORD),
            Hello(incarnation=WORD),
            Hello(incarnation=WORD, protocol=7),
            Hello(incarnation=WORD, failed_restores={"art": "CanaryMismatch: x"}),
        )
    )
    return view(
        *files,
        hello=hello,
        age=draw(st.sampled_from([0.0, 1.0, 6.0, 9.0, 70.0, 500.0])),
        candidates=tuple({x.name: x for x in draw(st.lists(candidates, max_size=3))}.values()),
        capable=draw(st.booleans()),
        attempts=tuple(
            draw(
                st.lists(
                    st.builds(
                        attempt,
                        outcome=st.sampled_from(["pending", "succeeded", "failed", "aborted"]),
                        word=st.sampled_from([WORD, "i0"]),
                        content=st.sampled_from(["art", "third"]),
                    ),
                    max_size=2,
                )
            )
        ),
        blocked=draw(st.sampled_from([{}, {"art": "RestoreFailed: x"}])),
        identity=draw(st.sampled_from(["id-1", ""])),
        settings=PodSettings(
            restore_policy=draw(st.sampled_from(list(RestorePolicy))),
            capture=draw(st.sampled_from(list(Toggle))),
            recapture=draw(maybe("r1")),
        ),
        deleting=draw(st.sampled_from([False, False, False, True])),
        healthy_since=draw(maybe(NOW - 3, NOW - 100)),
        foreign=draw(st.booleans()),
    )


def usable(v: View, name: str | None) -> bool:
    """What promise 1 asks of a restore, said independently of the code."""
    x = v.candidate(name)
    return (
        x is not None
        and (x.snapshot_uid, x.namespace, x.identity, x.node) == ("snap-1", "default", "id-1", "n")
        and v.pod.identity == "id-1"
        and x.present
        and not (x.quarantined or x.deleting or x.failed)
        and x.oracle is not None
        and v.capable
        and v.files.hello is not None
        and x.name not in v.files.hello.failed_restores
    )


@given(views())
@settings(max_examples=300, deadline=None)
def test_every_view_has_a_safe_step(v: View) -> None:
    step = next_step(v)
    if isinstance(step, decide.End):
        assert v.files.ending is not None
        assert 0 < step.timeout_s <= v.files.ending.timeout_s
    elif v.files.hello is None:
        assert isinstance(step, decide.Wait)
    elif v.pod.deleting:
        told = isinstance(step, decide.Answer) and (step.start.mode, step.start.reason) == ("refuse", Reason.POD_DELETED)
        assert told or isinstance(step, decide.Wait)
    if isinstance(step, decide.Answer):
        assert v.files.start is None
        assert v.age("hello.json") < 8.5
        assert step.start.incarnation == WORD
        if step.start.mode == "restore":
            assert usable(v, step.start.content)
            assert v.pod.settings.restore_policy != RestorePolicy.DISABLED
        if step.start.mode == "refuse" and not v.pod.deleting:
            assert v.pod.settings.restore_policy == RestorePolicy.REQUIRE
    if isinstance(step, decide.Restore):
        assert usable(v, step.content)
        assert v.attempt() is None
        assert v.files.restored is None
        assert v.files.start is not None
        assert 0 < step.timeout_s < v.files.start.timeout_s - v.age("start.json")
    if isinstance(step, decide.GiveUpRestore):
        assert decide.restoring(v)
        assert step.start.mode != "restore"
    if isinstance(step, decide.Capture):
        order = v.candidate(step.content)
        assert order is not None
        assert order.source_uid == v.pod.ref.uid
        assert order.open
        assert v.files.ready is not None
        assert v.files.release is None
        assert v.files.hold is None
    if isinstance(step, decide.Release):
        assert v.files.release is None
        assert v.files.ready is not None or v.files.restored is not None
    if isinstance(step, decide.FailOrder):
        order = v.candidate(step.content)
        assert order is not None
        assert order.open
    if isinstance(step, decide.Condemn):
        assert verdict(v)[0] == "wrong"
    if isinstance(step, decide.Settle) and step.outcome == "succeeded":
        assert verdict(v)[0] == "same"


@given(views())
@settings(max_examples=300, deadline=None)
def test_every_view_has_a_truthful_report(v: View) -> None:
    said = report.say(v, PodReport())
    if said is None:
        assert v.files.hello is None
        return
    assert (said.verified.status == "True") == (said.report.state == "Serving")
    if said.verified.status == "True":
        assert verdict(v)[0] in ("same", "unknown") or decide.on_trust(v)
        if v.files.restored is not None:
            assert verdict(v)[0] == "same"
    elif v.files.serving is not None:
        assert verdict(v)[0] == "wrong"
    # What was said is what is said again: a report never leads to another one.
    again = report.say(v, said.report)
    assert again == said
    assert PodReport.model_validate_json(report.report_json(said.report)) == said.report


def after(v: View, step: decide.Step) -> View:
    """The view once the step is done; steps whose end is open end in the way given here."""
    f = v.files
    at = dict(f.at)

    def put(name: str, file: str, value: Any) -> View:
        return replace(v, files=replace(f, **{name: value}, at={**at, file: v.now}))

    def mark(name: str, **changes: Any) -> View:
        return replace(v, candidates=tuple(replace(x, **changes) if x.name == name else x for x in v.candidates))

    match step:
        case decide.Answer(start=start) | decide.GiveUpRestore(start=start):
            return put("start", "start.json", start)
        case decide.Restore(content=content):
            v = replace(v, attempts=(*v.attempts, attempt(content=content)))
            return replace(v, files=replace(f, restored=replace(RESTORED, content=content), at={**at, "restored.json": v.now}))
        case decide.Settle():
            done = [
                (n, replace(a, outcome=step.outcome))
                if (n, a.incarnation, a.outcome) == (step.content, step.incarnation, "pending")
                else (n, a)
                for n, a in v.attempts
            ]
            return replace(v, attempts=tuple(done))
        case decide.Release():
            return put("release", "release.json", RELEASE)
        case decide.Capture(content=content):
            return replace(mark(content, present=True), files=replace(f, release=RELEASE, at={**at, "release.json": v.now}))
        case decide.FailOrder(content=content):
            return mark(content, capture_failed=True)
        case decide.Probe():
            return put("serving", "serving.json", serving())
        case _:
            return v


@given(views())
@settings(max_examples=300, deadline=None)
def test_every_view_comes_to_rest(v: View) -> None:
    for _ in range(20):
        step = next_step(v)
        if isinstance(step, decide.Wait | decide.Condemn | decide.End):
            return
        v = after(v, step)
    raise AssertionError(step)
