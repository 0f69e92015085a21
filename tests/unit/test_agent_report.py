"""What the agent writes into the API: phases, conditions, statuses, events; facts read from objects of any shape."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.agentbox import artifact, content_object, pod_object
from vllmsnapshot import objects
from vllmsnapshot.agent import facts, report
from vllmsnapshot.agent.control import Files
from vllmsnapshot.agent.decide import View
from vllmsnapshot.agent.ledger import Attempt, Entry, Why
from vllmsnapshot.agent.nodeops import Health, PodRef
from vllmsnapshot.agent.space import Usage
from vllmsnapshot.api import constants as c
from vllmsnapshot.api.constants import Reason
from vllmsnapshot.api.types import Check, Condition, PodReport, PodSettings, VLLMSnapshotContentStatus, VLLMSnapshotNodeStatus
from vllmsnapshot_child.protocol import Hello, Ready, Release, Restored, Serving, Start

NOW = 1_800_000_000.0
REF = PodRef(namespace="default", name="a", uid="uid-a")


def cold_view(**at: float) -> View:
    obj = pod_object("a")
    obj["metadata"]["creationTimestamp"] = objects.rfc3339(NOW)
    obj["status"]["conditions"][0]["lastTransitionTime"] = objects.rfc3339(NOW + 1)
    oracle = {"token_ids": [1], "text": "x", "sampled_token_logprob": -1.0}
    files = Files(
        hello=Hello(incarnation="i"),
        start=Start(incarnation="i", mode="cold", reason=Reason.NO_ARTIFACT, message="none", attended=True),
        ready=Ready(incarnation="i", token_ids=[1], text="x", sampled_token_logprob=-1.0, phases={"load": 20.0}, protocol=1),
        release=Release(incarnation="i", host=None, port=1),
        serving=Serving(incarnation="i", host=None, port=1, oracle=oracle, phases={"reload_s": 1.5, "bad": 1e300}),
        at={
            "hello.json": NOW + 3,
            "start.json": NOW + 3.01,
            "ready.json": NOW + 63,
            "release.json": NOW + 65,
            "serving.json": NOW + 68,
        },
    )
    return View(now=NOW + 70, node="node-1", pod=facts.pod_facts(obj), files=files)


def test_phases_of_a_cold_start() -> None:
    said = report.say(cold_view(), PodReport())
    assert said is not None
    assert said.report.phases == {
        "schedule_s": 1.0,
        "container_s": 2.0,
        "decide_s": 0.01,
        "ready_s": 59.99,
        "load_s": 20.0,
        "barrier_s": 2.0,
        "reload_s": 1.5,
        "release_to_serving_s": 3.0,
        "total_s": 68.0,
    }
    assert said.report.serving_at == objects.rfc3339(NOW + 68)


def test_a_restored_process_does_not_report_the_phases_of_its_capture() -> None:
    view = cold_view()
    oracle = view.files.serving.oracle if view.files.serving else {}
    files = replace(
        view.files,
        ready=None,
        restored=Restored(incarnation="i", pid=1000, content="art"),
        serving=Serving(incarnation="i", host=None, port=1, oracle=oracle, phases={"engine_s": 50.0, "reload_s": 1.5}),
        restore_phases={"criu": 1.25},
    )
    said = report.say(replace(view, files=files), PodReport())
    assert said is not None
    assert (said.report.phases["criu_s"], said.report.phases["reload_s"]) == (1.25, 1.5)
    assert "engine_s" not in said.report.phases


def test_a_later_incarnation_counts_from_its_own_start() -> None:
    said = report.say(cold_view(), PodReport(incarnation="before", restarts=1, phases={"criu_s": 1.0}))
    assert said is not None
    assert said.report.restarts == 2
    assert said.report.phases["total_s"] == 65.0
    assert "criu_s" not in said.report.phases


def test_phases_of_an_earlier_report_of_the_same_incarnation_are_kept() -> None:
    said = report.say(cold_view(), PodReport(incarnation="i", phases={"criu_s": 1.0}))
    assert said is not None
    assert said.report.phases["criu_s"] == 1.0


def test_a_container_between_two_lives_is_not_verified() -> None:
    view = cold_view()
    between = View(now=view.now, node=view.node, pod=view.pod, files=Files())
    assert report.say(between, PodReport()) is None
    said = report.say(between, PodReport(incarnation="i", state="Serving", start="restore"))
    assert said is not None
    assert (said.verified.status, said.verified.reason, said.report.state) == ("False", Reason.STARTING, "Starting")


def test_the_transition_time_moves_with_the_status_only() -> None:
    verified = report.Verified(status="True", reason=Reason.VERIFIED, message="m")
    old = {"status": "True", "lastTransitionTime": "2020-01-01T00:00:00Z"}
    assert (
        report.pod_condition(REF, verified, old, NOW)["status"]["conditions"][0]["lastTransitionTime"]
        == old["lastTransitionTime"]
    )
    old["status"] = "False"
    assert report.pod_condition(REF, verified, old, NOW)["status"]["conditions"][0]["lastTransitionTime"] == objects.rfc3339(NOW)


# --- content ---------------------------------------------------------------------------------------------------------


def status(old: VLLMSnapshotContentStatus, **changes: Any) -> VLLMSnapshotContentStatus:
    arguments = {"stored": None, "entry": Entry(uid="u"), "failed": None, "lost": False, "now": NOW, **changes}
    return report.content_status(old, arguments.pop("stored"), arguments.pop("entry"), **arguments)


def true(found: VLLMSnapshotContentStatus) -> dict[str, str]:
    return {x.type: x.reason for x in found.conditions or [] if x.status == "True"}


def test_captured_and_failed_are_decided_once() -> None:
    captured = status(VLLMSnapshotContentStatus(), stored=artifact("art", "u"))
    assert true(captured) == {c.CAPTURED: Reason.CAPTURED}
    assert true(status(captured, failed=("X", "y"))) == {c.CAPTURED: Reason.CAPTURED}
    failed = status(VLLMSnapshotContentStatus(), failed=(Reason.DUMP_FAILED, "y"))
    assert true(failed) == {c.FAILED: Reason.DUMP_FAILED}
    assert true(status(failed, stored=artifact("art", "u"))) == {c.FAILED: Reason.DUMP_FAILED}


@pytest.mark.parametrize(
    ("said", "written"), [("Keep", "Keep"), ("Discard", "Discard"), ("", None), ("Auto", None), ("x" * 9999, None)]
)
def test_only_what_the_schema_knows_of_the_weights_is_written(said: str, written: str | None) -> None:
    """The word comes from the workload: another one would make the API server refuse the whole status."""
    made = replace(artifact("art", "u"), weights=said, weights_reason=said)
    found = status(VLLMSnapshotContentStatus(), stored=made).dump()["artifact"]
    assert found.get("weights") == written
    assert len(found.get("weightsReason", "")) <= 1024


def test_writing_the_status_again_changes_nothing() -> None:
    first = status(VLLMSnapshotContentStatus(), stored=artifact("art", "u"), entry=Entry(uid="u", failed=1, last_failure="x"))
    assert status(first, stored=artifact("art", "u"), entry=Entry(uid="u", failed=1, last_failure="x"), now=NOW + 9) == first
    assert VLLMSnapshotContentStatus.model_validate(first.dump()) == first


def test_slower_than_a_cold_start_has_the_last_figures_and_the_time_of_the_flip() -> None:
    def after(old: VLLMSnapshotContentStatus, *seconds: float, now: float) -> VLLMSnapshotContentStatus:
        took = tuple(Attempt(pod="p", incarnation="i", outcome="succeeded", at=1.0, seconds=x, alone=True) for x in seconds)
        return status(old, stored=replace(artifact("art", "u"), cold_s=80.0), entry=Entry(uid="u", attempts=took), now=now)

    def told(found: VLLMSnapshotContentStatus) -> list[tuple[str, str, str, str]]:
        return [(x.status, x.reason, x.message, x.last_transition_time) for x in found.conditions or [] if x.type == c.SLOWER]

    quick = after(VLLMSnapshotContentStatus(), 99.0, 99.0, 2.0, now=NOW)
    assert told(quick) == [], "not worth a word"
    assert quick.artifact is not None
    assert quick.artifact.cold_start == "80.00s"
    slow = after(quick, 99.0, 99.0, 99.0, now=NOW)
    slower = after(slow, 99.0, 99.0, 99.5, now=NOW + 9)
    [(first, reason, _, since)], [(second, _, message, still)] = told(slow), told(slower)
    assert (first, second, reason) == ("True", "True", Reason.RESTORE_SLOWER)
    assert "99.5 s until they served" in message
    assert since == still == objects.rfc3339(NOW)
    over = after(slower, 99.0, 99.5, 2.0, now=NOW + 20)
    assert [(x[0], x[1], x[3]) for x in told(over)] == [("False", Reason.AS_EXPECTED, objects.rfc3339(NOW + 20))]
    assert after(over, 99.0, 99.5, 2.0, now=NOW + 30) == over, "nothing is written at rest"


def test_quarantine_keeps_its_first_reason() -> None:
    first = status(VLLMSnapshotContentStatus(), lost=True)
    assert true(first) == {c.QUARANTINED: Reason.ARTIFACT_MISSING}
    again = status(first, entry=Entry(uid="u", quarantined=Why(reason=Reason.CANARY_MISMATCH, message="m")))
    assert true(again) == {c.QUARANTINED: Reason.ARTIFACT_MISSING}


@pytest.mark.parametrize(
    ("given_reason", "written"), [("DumpFailed", "DumpFailed"), ("not a word", "Error"), ("", "Error"), ("9x", "Error")]
)
def test_a_reason_is_a_word(given_reason: str, written: str) -> None:
    assert true(status(VLLMSnapshotContentStatus(), failed=(given_reason, "m"))) == {c.FAILED: written}


# --- node, events ----------------------------------------------------------------------------------------------------


def test_the_nodes_status_is_written_on_news_only() -> None:
    health = Health(capable=True, checks=[Check(name="criu", status="Pass")], boot_id="b")
    usage = Usage(artifacts={"art": 5}, free=10 << 30, quota=20 << 30)
    old = report.node_status(health, usage, [artifact("art", "u")], 0, VLLMSnapshotNodeStatus(), NOW)
    assert VLLMSnapshotNodeStatus.model_validate(old.dump()) == old
    assert (old.store_bytes_used, old.store_bytes_free, old.store_bytes_quota) == (5, 10 << 30, 20 << 30)

    def again(health: Health = health, usage: Usage = usage, held: int = 1, in_flight: int = 0) -> VLLMSnapshotNodeStatus:
        return report.node_status(health, usage, [artifact("art", "u")][:held], in_flight, old, NOW + 60)

    assert not report.node_changed(old, again())
    assert not report.node_changed(old, again(usage=replace(usage, free=usage.free - 5)))
    assert report.node_changed(old, again(usage=replace(usage, free=8 << 30)))
    assert report.node_changed(old, again(usage=replace(usage, quota=None)))
    assert report.node_changed(old, again(health=replace(health, capable=False, message="no CRIU")))
    assert report.node_changed(old, again(held=0))
    assert report.node_changed(old, again(in_flight=1))


def test_a_node_says_of_its_gpus_apart_from_all_else() -> None:
    def conditions(old: VLLMSnapshotNodeStatus, now: float, **health: Any) -> tuple[VLLMSnapshotNodeStatus, dict[str, Condition]]:
        new = report.node_status(Health(capable=True, **health), Usage(), [], 0, old, now)
        return new, {x.type: x for x in new.conditions or []}

    old, found = conditions(VLLMSnapshotNodeStatus(), NOW)
    assert found.keys() == {c.READY}, "a node without GPU says nothing of any"
    old, found = conditions(old, NOW + 1, gpu="gpu-driver: too old")
    assert (found[c.READY].status, found[c.READY].last_transition_time) == ("True", objects.rfc3339(NOW))
    assert found[c.READY].message == "all checks but those of the GPU passed"
    gpu = found[c.GPU_READY]
    assert (gpu.status, gpu.reason, gpu.message) == ("False", Reason.GPU_UNAVAILABLE, "gpu-driver: too old")
    _, found = conditions(old, NOW + 2, gpu="")
    assert (found[c.GPU_READY].status, found[c.GPU_READY].last_transition_time) == ("True", objects.rfc3339(NOW + 2))


def test_an_event_written_twice_is_one_event() -> None:
    event = report.Event(
        pod=REF,
        namespace="default",
        snapshot="s" * 253,
        snapshot_uid="u",
        reason="Restored",
        action="Restore",
        note="n" * 5000,
        key="i1",
    )
    first, again = report.events(event, "node-1", NOW), report.events(event, "node-1", NOW + 5)
    names = [x["metadata"]["name"] for x in first]
    assert names == [x["metadata"]["name"] for x in again]
    assert len(set(names)) == 2
    assert all(len(x) <= 253 for x in names)
    assert {x["regarding"]["kind"] for x in first} == {"Pod", "VLLMSnapshot"}
    assert all(len(x["note"]) <= 1024 for x in first)
    (alone,) = report.events(replace(event, pod=None), "node-1", NOW)
    assert (alone["regarding"]["kind"], "related" in alone) == ("VLLMSnapshot", False)


# --- facts -----------------------------------------------------------------------------------------------------------


def test_the_environment_of_a_restored_process_is_this_pods() -> None:
    obj = pod_object("a")
    obj["spec"]["containers"][0]["env"] += [
        {"name": "FIXED", "value": "same in every pod"},
        {"name": c.ENV_TERM_GRACE, "value": "595"},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "MY_LABEL", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{c.LABEL_ROLE}']"}}},
        {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
    ]
    assert facts.pod_facts(obj).env == {
        "HOSTNAME": "a",
        "POD_IP": "10.0.0.7",
        "MY_LABEL": c.ROLE_REPLICA,
        c.ENV_HOST: "0.0.0.0",
        c.ENV_TERM_GRACE: "595",
    }


@pytest.mark.parametrize(
    ("annotation", "port"), [("8123", 8123), ("0", 9000), ("65536", 9000), ("x", 9000), (None, 9000), ("٣", 9000)]
)
def test_the_port_is_believed_only_if_it_is_one(annotation: str | None, port: int) -> None:
    obj = pod_object("a")
    obj["metadata"]["annotations"][c.ANNOTATION_PORT] = annotation
    obj["spec"]["containers"][0]["ports"] = [{"name": c.PORT_NAME, "containerPort": 9000}]
    assert facts.pod_facts(obj).port == port


@given(st.text() | st.none())
def test_nonsense_in_annotations_is_as_good_as_nothing(text: str | None) -> None:
    obj = pod_object("a")
    obj["metadata"]["annotations"] = {c.ANNOTATION_SETTINGS: text, c.ANNOTATION_REPORT: text, c.ANNOTATION_PORT: text}
    pod = facts.pod_facts(obj)
    report_read = facts.report_of(obj)
    try:
        fine = isinstance(json.loads(text or "{}"), dict)
    except ValueError:
        fine = False
    if not fine:
        assert (pod.settings, report_read) == (PodSettings(), PodReport())


def test_a_content_that_cannot_be_read_is_none() -> None:
    obj = content_object("art", "a")
    del obj["spec"]["identity"]
    assert facts.candidate(obj, None, Entry(uid="u"), {}) is None


@pytest.mark.parametrize(
    "change",
    [
        {"apiVersion": "other.io/v1"},
        {"kind": "ReplicaSet"},
        {"controller": False},
        {"uid": ""},
    ],
)
def test_only_the_controller_reference_makes_a_pod_ours(change: dict[str, Any]) -> None:
    obj = pod_object("a")
    assert facts.ours(obj, "node-1")
    assert not facts.ours(obj, "node-2")
    obj["metadata"]["ownerReferences"][0] |= change
    assert not facts.ours(obj, "node-1")
