"""The status of a claim."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from vllmsnapshot import environment
from vllmsnapshot.api import constants as c
from vllmsnapshot.api.types import (
    ArtifactRecord,
    Condition,
    PodReport,
    VLLMSnapshotContentStatus,
    VLLMSnapshotSpec,
    VLLMSnapshotStatus,
)
from vllmsnapshot.controller import events, pods, status
from vllmsnapshot.controller.plan import Gate, Plan
from vllmsnapshot.controller.recapture import NOT_ASKED, Recapture
from vllmsnapshot.controller.status import Problem
from vllmsnapshot.objects import rfc3339, timestamp
from vllmsnapshot.world import Claim, Content, Observed, Replica, ServiceView

R = c.Reason
NOW = 1_800_000_000.0
SPEC = VLLMSnapshotSpec.model_validate({"model": "m", "image": "i", "replicas": 2})
NEW = pods.template(SPEC)
OURS = ServiceView(uid="s", ours=True, current=True)


def claim(**spec: Any) -> Claim:
    made = VLLMSnapshotSpec.model_validate({**SPEC.dump(), **spec})
    return Claim(namespace="ns", name="smol", uid="u", generation=3, spec=made)


def pod(name: str, *, state: str = "Serving", mode: str = c.START_COLD, **fields: Any) -> Replica:
    report = PodReport(start=mode, state=state, reason=R.NO_ARTIFACT if mode == c.START_COLD else R.RESTORED)
    base: dict[str, Any] = {
        "name": name,
        "uid": f"uid-{name}",
        "revision": NEW.revision,
        "identity": NEW.identity,
        "created": NOW - 100,
        "node": "node",
        "ready": state == "Serving",
        "start_mode": mode,
        "report": report,
    }
    return Replica(**{**base, **fields})


def captured(name: str = "c", **fields: Any) -> Content:
    record = ArtifactRecord(bytes=7, digest="sha256:0", captured_at=rfc3339(NOW - 50))
    found = VLLMSnapshotContentStatus(artifact=record, phases={"total": "2.40s", "freeze": "1.60s"})
    base: dict[str, Any] = {
        "identity": NEW.identity,
        "node": "node",
        "source_uid": "x",
        "captured": True,
        "captured_at": NOW - 50,
    }
    return Content(**{"name": name, "uid": name, "status": found, **base, **fields})


def see(*replicas: Replica, contents: tuple[Content, ...] = (), **fields: Any) -> Observed:
    base: dict[str, Any] = {"agents": frozenset({"node"}), "nodes": frozenset({"node"}), "service": OURS}
    return Observed(pods=replicas, contents=contents, **{**base, **fields})


def compute(
    seen: Observed, problems: tuple[Problem, ...] = (), gate: Gate | None = None, again: Recapture = NOT_ASKED, **spec: Any
) -> VLLMSnapshotStatus:
    return status.compute(claim(**spec), seen, Plan(gate=gate or Gate(open=True), again=again), problems, NOW)


def conditions(made: VLLMSnapshotStatus) -> dict[str, Condition]:
    return {item.type: item for item in made.conditions or []}


def shown(made: VLLMSnapshotStatus, kind: str) -> tuple[str, str]:
    found = conditions(made)[kind]
    return found.status, found.reason


def test_counts_and_record() -> None:
    seen = see(pod("a"), pod("b", mode=c.START_RESTORE), pod("d", deleting=True), pod("f", finished=True), contents=(captured(),))
    made = compute(seen)
    assert (made.replicas, made.ready_replicas, made.restored_replicas, made.cold_replicas, made.updated_replicas) == (
        2,
        2,
        1,
        1,
        2,
    )
    assert made.ready == "2/2"
    assert made.observed_generation == 3
    assert made.selector == f"{c.LABEL_ROLE}=replica,{c.LABEL_SNAPSHOT}=smol"
    assert made.revision == NEW.revision
    assert made.identity == NEW.identity
    assert made.snapshot is not None
    assert (made.snapshot.content, made.snapshot.node, made.snapshot.bytes) == ("c", "node", 7)
    assert made.cold_start_reason == R.NO_ARTIFACT
    assert {kind: shown(made, kind) for kind in conditions(made)} == {
        c.READY: ("True", R.ALL_REPLICAS_READY),
        c.SNAPSHOT_READY: ("True", R.CAPTURED),
        c.PROGRESSING: ("False", R.STABLE),
        c.DEGRADED: ("False", R.AS_EXPECTED),
        c.STALE: ("False", R.AS_EXPECTED),
    }
    assert all(item.observed_generation == 3 and item.message for item in made.conditions or [])


@pytest.mark.parametrize(
    ("why", "seen", "gate", "expected", "says"),
    [
        ("nothing yet", see(), Gate(open=False), R.WAITING_FOR_SNAPSHOT, "the others start when the first one has been captured"),
        ("too few", see(pod("a")), None, R.REPLICAS_NOT_READY, "1 of 2 replicas are ready"),
        (
            "a cold start",
            see(pod("a"), pod("b", state="Starting")),
            None,
            R.REPLICAS_NOT_READY,
            "replica b starts cold on node node",
        ),
        (
            "a restore",
            see(pod("a"), pod("b", state="Restoring", mode=c.START_RESTORE)),
            None,
            R.REPLICAS_NOT_READY,
            "b is restored from",
        ),
        ("no scheduler", see(pod("a", node=None, ready=False)), None, R.REPLICAS_NOT_READY, "a waits for the scheduler"),
        ("no room", see(pod("a", node=None, ready=False, unschedulable="no GPU")), None, R.REPLICAS_NOT_READY, "no GPU"),
        ("no image", see(pod("a", ready=False, waiting="ImagePullBackOff: x")), None, R.REPLICAS_NOT_READY, "ImagePullBackOff"),
        (
            "no agent",
            see(pod("a", ready=False, start_mode="", state="Deciding"), agents=frozenset()),
            None,
            R.REPLICAS_NOT_READY,
            "no agent",
        ),
        ("rollout", see(pod("a"), pod("b"), pod("o", revision="old")), None, R.ROLLING_UPDATE, "1 of the old revision left"),
        (
            "a wrong answer",
            see(pod("a", ready=False, verified="False", verified_reason=R.CANARY_MISMATCH, verified_message="Lyon")),
            None,
            R.REPLICAS_NOT_READY,
            "CanaryMismatch: Lyon",
        ),
    ],
)
def test_not_ready_says_why(why: str, seen: Observed, gate: Gate | None, expected: str, says: str) -> None:
    made = compute(seen, gate=gate)
    assert shown(made, c.READY) == ("False", expected), why
    assert says in conditions(made)[c.READY].message
    assert shown(made, c.PROGRESSING)[0] == "True"


SCHEDULER = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."


def homeless(name: str, **fields: Any) -> Replica:
    return pod(name, **{"node": None, "ready": False, "unschedulable": SCHEDULER, "state": "Deciding", "mode": "", **fields})


def test_a_replica_without_a_place_is_named_with_the_schedulers_reason() -> None:
    made = compute(see(pod("a"), pod("b"), homeless("c")), replicas=3)
    assert shown(made, c.READY) == ("False", R.REPLICAS_NOT_READY)
    assert shown(made, c.PROGRESSING) == ("True", R.POD_UNSCHEDULABLE)
    assert shown(made, c.DEGRADED) == ("True", R.POD_UNSCHEDULABLE)
    for kind in (c.READY, c.PROGRESSING, c.DEGRADED):
        assert conditions(made)[kind].message.endswith(f"replica c is not scheduled: {SCHEDULER}")
    assert conditions(made)[c.PROGRESSING].message.startswith("2 of 3 replicas are ready; ")
    assert made.ready == "2/3"


@pytest.mark.parametrize(
    ("why", "replicas", "unavailable", "advises"),
    [
        ("none may be missing", (pod("o1", revision="old"), pod("o2", revision="old")), 0, True),
        ("as many are missing as may be", (pod("o1", revision="old"), pod("o2", revision="old", ready=False)), 1, True),
        ("one may go, and will", (pod("o1", revision="old"), pod("o2", revision="old")), 1, False),
        ("there is no rollout", (pod("a"),), 0, False),
        ("the others have no place either", (pod("o1", revision="old", node=None, ready=False),), 0, False),
    ],
)
def test_a_rollout_that_cannot_go_on_says_what_to_do(
    why: str, replicas: tuple[Replica, ...], unavailable: int, advises: bool
) -> None:
    rollout = {"maxSurge": 1, "maxUnavailable": unavailable}
    made = compute(see(*replicas, homeless("new", created=NOW)), rollout=rollout)
    for kind in (c.READY, c.PROGRESSING, c.DEGRADED):
        message = conditions(made)[kind].message
        assert f"replica new is not scheduled: {SCHEDULER}" in message, (kind, why)
        assert (f"rollout.maxUnavailable {unavailable}" in message) == advises, (kind, why)


def test_a_newcomer_learns_that_the_capture_follows() -> None:
    order = captured(captured=False, source_uid="uid-a", source="a")
    made = compute(see(pod("a", state="Starting"), contents=(order,)), replicas=1)
    assert conditions(made)[c.READY].message.endswith(
        "replica a starts cold on node node (Starting): NoArtifact; capture follows"
    )
    assert shown(made, c.SNAPSHOT_READY) == ("False", R.WAITING_FOR_BARRIER)


def test_scaled_to_zero_is_ready() -> None:
    assert shown(compute(see(), replicas=0), c.READY) == ("True", R.SCALED_TO_ZERO)
    assert shown(compute(see(pod("a")), replicas=0), c.READY)[0] == "False", "not while pods are left"


@pytest.mark.parametrize(
    ("why", "seen", "spec", "expected"),
    [
        ("usable", see(contents=(captured(),)), {}, ("True", R.CAPTURED)),
        ("of another identity", see(contents=(captured(identity="old"),)), {}, ("False", R.NO_ARTIFACT)),
        ("disabled", see(), {"capture": {"policy": "Disabled"}}, ("False", R.CAPTURE_DISABLED)),
        ("no agent", see(agents=frozenset()), {}, ("False", R.UNATTENDED)),
        ("agents of another version", see(strangers=see().agents), {}, ("False", R.PROTOCOL_VERSION)),
        ("ordered", see(contents=(captured(captured=False),)), {}, ("False", R.WAITING_FOR_BARRIER)),
        ("failed", see(contents=(captured(captured=False, failed=True),)), {}, ("False", R.CAPTURE_FAILED)),
        ("quarantined", see(contents=(captured(quarantined=True),)), {}, ("False", R.ARTIFACT_QUARANTINED)),
        ("node gone", see(contents=(captured(node="gone"),)), {}, ("False", R.NO_ARTIFACT)),
    ],
)
def test_snapshot_ready(why: str, seen: Observed, spec: dict[str, Any], expected: tuple[str, str]) -> None:
    assert shown(compute(seen, **spec), c.SNAPSHOT_READY) == expected, why


@pytest.mark.parametrize(
    ("why", "seen", "problems", "spec", "reason"),
    [
        ("an action met it", see(), (Problem(R.POD_REJECTED, "quota"),), {}, R.POD_REJECTED),
        ("foreign Service", see(service=ServiceView(uid="f", ours=False, current=False)), (), {}, R.NAME_CONFLICT),
        ("unschedulable", see(pod("a", node=None, ready=False, unschedulable="x")), (), {}, R.POD_UNSCHEDULABLE),
        ("wrong answer", see(pod("a", verified="False", verified_reason=R.CANARY_MISMATCH)), (), {}, R.CANARY_MISMATCH),
        ("crash loop", see(pod("a", ready=False, waiting="CrashLoopBackOff")), (), {}, R.ENGINE_FAILED),
        ("quarantine", see(contents=(captured(quarantined=True),)), (), {}, R.ARTIFACT_QUARANTINED),
        (
            "no tries left",
            see(contents=(captured(captured=False, failed=True),)),
            (),
            {"capture": {"retries": 0}},
            R.CAPTURE_FAILED,
        ),
    ],
)
def test_degraded(why: str, seen: Observed, problems: tuple[Problem, ...], spec: dict[str, Any], reason: str) -> None:
    assert shown(compute(seen, problems, **spec), c.DEGRADED) == ("True", reason), why


@pytest.mark.parametrize(
    ("why", "seen", "spec"),
    [
        (
            "a foreign Service of our name, if none is wanted",
            see(service=ServiceView(uid="f", ours=False, current=False)),
            {"serving": {"service": "Disabled"}},
        ),
        ("a failure with tries left", see(contents=(captured(captured=False, failed=True),)), {"capture": {"retries": 1}}),
        (
            "failures of another identity",
            see(contents=(captured(captured=False, failed=True, identity="old"),)),
            {"capture": {"retries": 0}},
        ),
    ],
)
def test_not_degraded(why: str, seen: Observed, spec: dict[str, Any]) -> None:
    assert shown(compute(seen, **spec), c.DEGRADED)[0] == "False", why


def test_the_next_try_of_a_capture_is_named_and_the_words_do_not_change_when_it_is_due() -> None:
    lost = captured(captured=False, failed=True, created=NOW - 120, ended=NOW - 60)
    made = compute(see(contents=(lost,)), capture={"retries": 0})
    said = f"the first cold start after {rfc3339(NOW - 60 + 600)} tries again"
    assert said in conditions(made)[c.SNAPSHOT_READY].message
    assert said in conditions(made)[c.DEGRADED].message
    written = dataclasses.replace(claim(capture={"retries": 0}), status=made, raw_status=made.dump())
    assert not status.changed(written, status.compute(written, see(contents=(lost,)), Plan(), [], NOW + 7200))
    soon = compute(see(contents=(lost,)), capture={"retries": 1})
    assert "the next cold start tries again" in conditions(soon)[c.SNAPSHOT_READY].message


def test_several_problems_are_counted_and_long_ones_cut() -> None:
    made = compute(see(), (Problem(R.POD_REJECTED, "x" * 9000), Problem(R.NO_PORT_LEFT, "y")))
    message = conditions(made)[c.DEGRADED].message
    assert len(message) <= status.MESSAGE_LIMIT
    assert message.endswith("(and 1 more)")


def test_stale_names_the_fact() -> None:
    old = captured(status=VLLMSnapshotContentStatus(environment={"driver": "570"}))
    made = compute(see(contents=(old,), environments={"node": {"driver": "580"}}))
    assert shown(made, c.STALE) == ("True", R.ENVIRONMENT_CHANGED)
    assert shown(compute(see(contents=(old,), environments={"node": {}})), c.STALE)[0] == "False", "the node tells nothing"
    assert "driver was '570' at capture and is '580'" in conditions(made)[c.STALE].message
    assert shown(made, c.SNAPSHOT_READY)[0] == "False"


@pytest.mark.parametrize(
    ("then", "now", "stale"),
    [
        ({}, {"gpuDriver": "580.1"}, False),
        ({"gpuDriver": "580.1"}, {"gpuDriver": "580.1"}, False),
        ({"gpuDriver": "580.1"}, {"gpuDriver": "590.2"}, True),
        ({"gpuDriver": "580.1"}, {}, True),
    ],
    ids=["of a process without GPU on a node with one", "the same", "another driver", "the GPU is gone"],
)
def test_gpus_matter_to_what_was_captured_from_one(then: dict[str, str], now: dict[str, str], stale: bool) -> None:
    kernel = {"kernelRelease": "6.18"}
    old = captured(status=VLLMSnapshotContentStatus(environment=kernel | then))
    made = compute(see(contents=(old,), environments={"node": kernel | now}))
    assert shown(made, c.STALE)[0] == ("True" if stale else "False")


def test_a_cpu_that_can_less_voids_what_one_that_can_more_made() -> None:
    old = captured(status=VLLMSnapshotContentStatus(environment={"cpuFlags": "amx_tile avx512f sse"}))

    def stale(flags: str) -> tuple[str, str]:
        made = compute(see(contents=(old,), environments={"node": {"cpuFlags": flags}}))
        return conditions(made)[c.STALE].status, conditions(made)[c.STALE].message

    assert stale("amx_tile avx512f avx10 sse")[0] == "False"
    found, message = stale("avx512f sse")
    assert found == "True"
    assert "cpuFlags was 'amx_tile' at capture and is 'none of them' on node" in message


def test_an_image_that_moved_on_is_stale_until_replacing_the_artifact_was_in_vain() -> None:
    def old(n: int) -> Content:
        return captured(f"c{n}", quarantined=True, reason=R.IDENTITY_MISMATCH, message="imageLayers: b instead of a")

    made = compute(see(contents=(old(0),)))
    assert shown(made, c.STALE) == ("True", R.IDENTITY_MISMATCH)
    assert "imageLayers" in conditions(made)[c.STALE].message
    assert shown(made, c.DEGRADED)[0] == "False"
    made = compute(see(contents=(old(0), old(1), old(2))), capture={"retries": 2})
    assert shown(made, c.DEGRADED) == ("True", R.ARTIFACT_QUARANTINED)


def test_restores_that_are_slower_than_a_cold_start_are_said_unless_they_are_required() -> None:
    seen = see(contents=(captured(slower="the last 3 restores took 9.0, 9.0 and 9.0 s until they served, a cold start 8.0 s"),))
    made = compute(seen)
    assert (shown(made, c.SNAPSHOT_READY), shown(made, c.DEGRADED)) == (("False", R.RESTORE_SLOWER), ("True", R.RESTORE_SLOWER))
    assert "a cold start 8.0 s" in conditions(made)[c.DEGRADED].message
    required = compute(seen, restore={"policy": "Require"})
    assert (shown(required, c.SNAPSHOT_READY)[0], shown(required, c.DEGRADED)[0]) == ("True", "False")
    # A node on which they are quicker is the one that is named.
    two = dataclasses.replace(seen, contents=(*seen.contents, captured("d", node="other")), nodes=frozenset({"node", "other"}))
    assert conditions(compute(two))[c.SNAPSHOT_READY].message == "new replicas are restored on 1 node: other"


def test_a_reboot_voids_nothing() -> None:
    old = captured(status=VLLMSnapshotContentStatus(environment={"bootId": "1", "kernelRelease": "6.18"}))
    made = compute(see(contents=(old,), environments={"node": {"bootId": "2", "kernelRelease": "6.18"}}))
    assert shown(made, c.STALE)[0] == "False"
    assert shown(made, c.SNAPSHOT_READY)[0] == "True"


def test_operator_and_agent_compare_the_same_facts() -> None:
    """What the operator calls stale is what the agent refuses, fact by fact (which asks no driver where there was no GPU)."""
    from vllmsnapshot.agent import gpu_facts, identity

    of_gpus = (
        gpu_facts.DRIVER_VERSION,
        gpu_facts.CUDA_API,
        gpu_facts.PRODUCT,
        gpu_facts.COMPUTE_CAPABILITY,
        gpu_facts.MEMORY,
        gpu_facts.MIG,
    )
    assert all(name.startswith(environment.DEVICE) for name in of_gpus)
    then = dict.fromkeys(
        (*of_gpus, *environment.NOT_COMPARED, environment.CPU_FLAGS, environment.KERNEL, environment.CRIU, environment.MACHINE),
        "1",
    )
    old = captured(status=VLLMSnapshotContentStatus(environment=then))
    for name in then:
        now = then | {name: "2"}
        refused = identity.compare_node(then, now)
        stale = see(contents=(old,), environments={"node": now}).stale(old)
        assert (stale is not None) == bool(refused) == (name not in environment.NOT_COMPARED)


def test_times_move_only_on_flips() -> None:
    first = compute(see(pod("a")))
    before = dataclasses.replace(claim(), status=first, raw_status=first.dump())
    same = status.compute(before, see(pod("a"), pod("b", state="Starting")), Plan(), [], NOW + 60)
    flipped = status.compute(before, see(pod("a"), pod("b")), Plan(), [], NOW + 60)
    assert conditions(same)[c.READY].message != conditions(first)[c.READY].message
    assert conditions(same)[c.READY].last_transition_time == rfc3339(NOW)
    assert conditions(flipped)[c.READY].last_transition_time == rfc3339(NOW + 60)
    assert conditions(flipped)[c.STALE].last_transition_time == rfc3339(NOW)


def test_unchanged_whatever_the_order_of_conditions() -> None:
    made = compute(see())
    raw = made.dump()
    raw["conditions"] = list(reversed(raw["conditions"]))
    assert not status.changed(dataclasses.replace(claim(), raw_status=raw), made)
    assert status.changed(dataclasses.replace(claim(), raw_status={**raw, "replicas": 9}), made)
    assert status.changed(claim(), made)


def test_timings() -> None:
    cold = pod("a", report=PodReport(start="cold", state="Serving", phases={"total_s": 81.0}, serving_at=rfc3339(NOW - 19)))
    restored = pod(
        "b",
        mode=c.START_RESTORE,
        report=PodReport(
            start="restore",
            state="Serving",
            serving_at=rfc3339(NOW - 95),
            phases={"restore_s": 1.234, "release_to_serving_s": 2.5, "total_s": 4.5},
        ),
    )
    made = compute(see(cold, restored, contents=(captured(),)))
    assert made.timings is not None
    assert made.timings.dump() == {
        "coldStart": "81.00s",
        "capture": "2.40s",
        "freeze": "1.60s",
        "restoredStart": "4.50s",
        "restore": "1.23s",
        "release": "2.50s",
        "speedup": "18.0x",
    }
    # When the replicas are gone, the figures stay; a restarted container's do not count from the pod's creation.
    before = dataclasses.replace(claim(), status=made, raw_status=made.dump())
    again = pod("c", report=PodReport(start="cold", state="Serving", serving_at=rfc3339(NOW), restarts=1))
    assert status.compute(before, see(again), Plan(), [], NOW).timings == made.timings
    assert compute(see()).timings is None


def test_without_the_agents_figure_the_timestamps_count() -> None:
    cold = pod("a", report=PodReport(start="cold", state="Serving", serving_at=rfc3339(NOW - 20)))
    made = compute(see(cold))
    assert made.timings is not None
    assert made.timings.cold_start == "80.00s"


def test_an_invalid_spec_keeps_the_counts_and_says_what_is_wrong() -> None:
    broken = dataclasses.replace(claim(), spec=None, invalid="podTemplate.spec.hostPID is set by the operator; remove it")
    made = status.compute(broken, see(pod("a")), Plan(), [], NOW)
    assert made.replicas == made.ready_replicas == 1
    assert shown(made, c.READY) == ("False", R.INVALID_SPEC)
    assert shown(made, c.DEGRADED) == ("True", R.INVALID_SPEC)
    assert "hostPID" in conditions(made)[c.DEGRADED].message


def test_parsing_is_total() -> None:
    meta = {"name": "smol", "namespace": "ns", "uid": "u", "annotations": {c.ANNOTATION_REPORT: "{not json"}}
    odd = {
        "metadata": meta,
        "spec": {"model": "m", "image": "i", "replicas": "many"},
        "status": {"replicas": "x", "conditions": None},
    }
    parsed = Claim.parse(odd)
    assert parsed.spec is None
    assert "replicas" in parsed.invalid
    assert Replica.parse({"metadata": meta}).report == PodReport()
    assert Replica.parse({"metadata": meta}).live
    assert not Content.parse({"metadata": meta, "status": {"artifact": "x"}}).captured
    assert timestamp("yesterday") == 0.0
    assert timestamp(rfc3339(NOW)) == NOW


# --- events ------------------------------------------------------------------------------------------------------------


def test_events_follow_transitions_not_messages() -> None:
    first = compute(see(pod("a")))
    assert [note.reason for note in events.transitions((), first.conditions or ())] == [R.REPLICAS_NOT_READY, R.NO_ARTIFACT]
    message = compute(see(pod("a"), pod("b", state="Starting")))
    assert events.transitions(first.conditions or (), message.conditions or ()) == []
    bad = compute(see(pod("a")), (Problem(R.POD_REJECTED, "quota"),))
    [note] = events.transitions(first.conditions or (), bad.conditions or ())
    assert (note.warning, note.reason, note.text) == (True, R.POD_REJECTED, "quota")
    [note] = events.transitions(bad.conditions or (), first.conditions or ())
    assert (note.warning, note.reason) == (False, R.AS_EXPECTED)


def test_an_event_written_twice_is_one() -> None:
    note = events.Note(True, "Reconcile", R.POD_REJECTED, "x" * 5000)
    one, two = (events.build(claim(), note, NOW, "host") for _ in range(2))
    assert one == two
    assert len(one["note"]) <= events.NOTE_LIMIT
    # Said again at once it is the same event, later another one.
    assert one["metadata"]["name"] == events.build(claim(), note, NOW + 1, "host")["metadata"]["name"]
    assert one["metadata"]["name"] != events.build(claim(), note, NOW + events.WINDOW_S, "host")["metadata"]["name"]
