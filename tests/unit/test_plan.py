"""One decision of the plan per test."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from vllmsnapshot.api import constants as c
from vllmsnapshot.api.types import PodReport, VLLMSnapshotContentStatus, VLLMSnapshotSpec
from vllmsnapshot.controller import plan as p
from vllmsnapshot.controller import pods
from vllmsnapshot.world import Claim, Content, Observed, Replica, ServiceView

NOW = 10_000.0
SERVICE = ServiceView(uid="s", ours=True, current=True)
HOME = ("node",)


def spec(**fields: Any) -> VLLMSnapshotSpec:
    return VLLMSnapshotSpec.model_validate({"model": "m", "image": "new", **fields})


def claim(made: VLLMSnapshotSpec | None = None, **fields: Any) -> Claim:
    return Claim(**{"namespace": "ns", "name": "smol", "uid": "u", "finalizer": True, "spec": made or spec(), **fields})


NEW = pods.template(spec())
OLD = pods.Template(revision="0" * 40, identity="1" * 40)


def pod(name: str, hashes: pods.Template = NEW, **fields: Any) -> Replica:
    base: dict[str, Any] = {
        "name": name,
        "uid": f"uid-{name}",
        "revision": hashes.revision,
        "identity": hashes.identity,
        "created": NOW - 50,
        "node": "node",
    }
    return Replica(**{**base, **fields})


def serving(name: str, hashes: pods.Template = NEW, *, mode: str = c.START_COLD, **fields: Any) -> Replica:
    report = PodReport(start=mode, state="Serving")
    ready: dict[str, Any] = {"ready": True, "containers_ready": True, "verified": "True", "start_mode": mode, "report": report}
    return pod(name, hashes, **{**ready, **fields})


def homeless(name: str, hashes: pods.Template = NEW, **fields: Any) -> Replica:
    return pod(
        name, hashes, **{"node": None, "unschedulable": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", **fields}
    )


def broken(name: str, hashes: pods.Template = NEW, **fields: Any) -> Replica:
    return pod(name, hashes, **{"waiting": "CrashLoopBackOff: back-off 5m0s restarting failed container", **fields})


def content(name: str, hashes: pods.Template = NEW, *, node: str = "node", source: str = "gone", **fields: Any) -> Content:
    return Content(
        **{"name": name, "uid": f"uid-{name}", "identity": hashes.identity, "node": node, "source_uid": f"uid-{source}", **fields}
    )


def captured(name: str, hashes: pods.Template = NEW, *, at: float = NOW - 100, **fields: Any) -> Content:
    return content(name, hashes, captured=True, captured_at=at, **fields)


def see(
    *replicas: Replica,
    contents: tuple[Content, ...] = (),
    agents: tuple[str, ...] = HOME,
    nodes: tuple[str, ...] = HOME,
    **fields: Any,
) -> Observed:
    base: dict[str, Any] = {"service": SERVICE}
    return Observed(pods=replicas, contents=contents, agents=frozenset(agents), nodes=frozenset(nodes), **{**base, **fields})


def do(seen: Observed, **fields: Any) -> list[p.Action]:
    return list(p.plan(claim(spec(**fields)), seen, NOW).actions)


def names(actions: list[p.Action], kind: type) -> list[str]:
    found: list[str] = []
    for action in actions:
        if isinstance(action, kind):
            if isinstance(action, p.DeletePod | p.VerifyUnattended):
                found.append(action.pod.name)
            elif isinstance(action, p.DeleteContent):
                found.append(action.content.name)
            elif isinstance(action, p.CreateContent):
                found.append(action.source.name)
            elif isinstance(action, p.CreatePod):
                found.append(str(action.slot))
    return found


# --- the seed gate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("why", "seen", "fields", "created"),
    [
        ("nothing yet: the seed", see(), {}, 1),
        ("no agent anywhere: all", see(agents=()), {}, 3),
        ("an agent on a node that is gone is none: all", see(nodes=()), {}, 3),
        ("capture disabled: all", see(), {"capture": {"policy": "Disabled"}}, 3),
        ("restore disabled: all", see(), {"restore": {"policy": "Disabled"}}, 3),
        ("an artifact is there: all", see(contents=(captured("a"),)), {}, 3),
        ("an artifact of another identity does not count", see(contents=(captured("a", OLD),)), {}, 1),
        ("one on a vanished node does not count", see(contents=(captured("a", node="gone"),)), {}, 1),
        ("a quarantined one does not count", see(contents=(captured("a", quarantined=True),)), {}, 1),
        ("one that is being deleted does not count", see(contents=(captured("a", deleting=True),)), {}, 1),
        ("tries left after a failure: a new seed", see(contents=(content("a", failed=True),)), {}, 1),
        ("no tries left: all", see(contents=(content("a", failed=True),)), {"capture": {"retries": 0}}, 3),
        ("quarantined counts as a try", see(contents=(captured("a", quarantined=True),)), {"capture": {"retries": 0}}, 3),
        ("a seed is starting: nobody", see(pod("s")), {}, 0),
        ("a seed is captured: nobody", see(pod("s"), contents=(content("a", source="s"),)), {}, 0),
        ("the seed's capture failed: the rest", see(pod("s"), contents=(content("a", source="s", failed=True),)), {}, 2),
        ("the seed took too long: the rest", see(pod("s", created=NOW - 600)), {}, 2),
        ("so did its capture", see(pod("s", created=NOW - 600), contents=(content("a", source="s"),)), {}, 2),
        ("the seed is not scheduled yet: nobody", see(pod("s", node=None)), {}, 0),
        ("the seed cannot be scheduled: the rest", see(pod("s", node=None, created=NOW - 61)), {}, 2),
        ("a replica that serves already is no seed", see(serving("s")), {}, 1),
        ("one on a node without agent is none", see(pod("s", node="b"), nodes=("node", "b")), {}, 1),
        (
            "nor one whose agent went away during the capture",
            see(pod("s", node="b"), contents=(content("a", node="b", source="s"),), nodes=("node", "b")),
            {},
            1,
        ),
        ("one that is being deleted is none", see(pod("s", deleting=True)), {}, 1),
        ("one of another identity is none", see(), {}, 1),
        (
            "a released seed whose files are still being written is waited for",
            see(serving("s"), contents=(content("a", source="s"),)),
            {},
            0,
        ),
    ],
)
def test_seed_gate(why: str, seen: Observed, fields: dict[str, Any], created: int) -> None:
    assert len(names(do(seen, replicas=3, **fields), p.CreatePod)) == created, why


def test_the_gate_opens_by_itself_in_time() -> None:
    made = p.plan(claim(spec(replicas=3)), see(pod("s", created=NOW - 100)), NOW)
    assert made.gate.seed is not None
    assert made.requeue_after == pytest.approx(500.1)
    assert p.plan(claim(spec(replicas=3)), see(pod("s", created=NOW - 100)), NOW + 500.1).gate.open


# --- captures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("why", "seen", "ordered"),
    [
        ("as soon as it is scheduled", see(pod("s")), ["s"]),
        ("not before", see(pod("s", node=None)), []),
        ("of two on a node the older", see(pod("a", created=2.0), pod("b", created=1.0)), ["b"]),
        ("one per node", see(pod("a"), pod("b", node="n2"), agents=("node", "n2"), nodes=("node", "n2")), ["b", "a"]),
        ("not where no agent is ready", see(pod("s"), agents=("n2",)), []),
        ("not where an artifact is", see(pod("s"), contents=(captured("c"),)), []),
        ("but where it is on another node", see(pod("s"), contents=(captured("c", node="n2"),), nodes=("node", "n2")), ["s"]),
        ("not where an order is open", see(pod("s"), contents=(content("c", source="x"),)), []),
        ("where the artifact was quarantined", see(pod("s"), contents=(captured("c", quarantined=True),)), ["s"]),
        ("not twice from the same pod", see(pod("s"), contents=(content("c", source="s", failed=True),)), []),
        ("not from one that was restored", see(pod("s", start_mode=c.START_RESTORE)), []),
        ("not from one that serves", see(serving("s")), []),
        ("not from another identity", see(pod("s", OLD)), []),
        ("not from one that leaves", see(pod("s", deleting=True)), []),
        ("not from one that finished", see(pod("s", finished=True)), []),
        (
            "not at once after three failures",
            see(pod("s"), contents=tuple(content(f"c{i}", failed=True, created=NOW - 300) for i in range(3))),
            [],
        ),
        (
            "but after a while",
            see(pod("s"), contents=tuple(content(f"c{i}", failed=True, created=NOW - 700) for i in range(3))),
            ["s"],
        ),
        ("after two", see(pod("s"), contents=tuple(content(f"c{i}", failed=True) for i in range(2))), ["s"]),
        (
            "three on another node do not count",
            see(pod("s"), contents=tuple(content(f"c{i}", node="n2", failed=True) for i in range(3))),
            ["s"],
        ),
    ],
)
def test_capture_orders(why: str, seen: Observed, ordered: list[str]) -> None:
    assert sorted(names(do(seen, replicas=len(seen.pods)), p.CreateContent)) == sorted(ordered), why


def test_the_finalizer_comes_before_the_first_content() -> None:
    actions = p.plan(claim(finalizer=False), see(pod("s")), NOW).actions
    kinds = [type(action) for action in actions]
    assert kinds.index(p.AddFinalizer) < kinds.index(p.CreateContent)
    assert p.AddFinalizer not in [type(a) for a in p.plan(claim(finalizer=False), see(), NOW).actions], "not before it is needed"


def test_a_changed_node_makes_an_artifact_unusable_and_the_next_cold_pod_replaces_it() -> None:
    old = captured("c", status=VLLMSnapshotContentStatus(environment={"kernel": "1", "cpu": "x"}))
    same = see(pod("s"), contents=(old,), environments={"node": {"kernel": "1", "cpu": "x", "bootId": "2"}})
    other = see(pod("s"), contents=(old,), environments={"node": {"kernel": "2"}})
    assert names(do(same), p.CreateContent) == []
    assert names(do(other), p.CreateContent) == ["s"]


# --- replicas ----------------------------------------------------------------------------------------------------------

ARTIFACT = (captured("c"),)


def test_slots_are_the_lowest_free_names() -> None:
    def name(slot: int) -> str:
        return pods.pod_name("smol", NEW.revision, slot)

    seen = see(serving(name(0)), pod(name(2), deleting=True), contents=ARTIFACT, taken=frozenset({name(1)}))
    assert names(do(seen, replicas=3), p.CreatePod) == ["3", "4"]


def test_pods_prefer_nodes_with_a_usable_artifact_and_an_agent() -> None:
    contents = (captured("a"), captured("b", node="n2"), captured("d", node="n3", quarantined=True))
    seen = see(contents=contents, nodes=("node", "n2", "n3"), agents=("node", "n3"))
    [action] = [action for action in do(seen) if isinstance(action, p.CreatePod)]
    assert action.prefer == ("node",)


H200 = {"gpuProduct": "NVIDIA H200", "gpuDriver": "580.95.05", "kernelRelease": "6.18"}


@pytest.mark.parametrize(
    ("why", "here", "preferred"),
    [
        ("the same node as at capture", H200, True),
        ("it does not tell (yet)", {}, True),
        ("another GPU of the same kind, after a reboot", {**H200, "gpuUuid": "GPU-1", "bootId": "2"}, True),
        ("another product", {**H200, "gpuProduct": "NVIDIA H100"}, False),
        ("another driver", {**H200, "gpuDriver": "580.105.08"}, False),
        ("another kernel", {**H200, "kernelRelease": "6.19"}, False),
        ("no GPU any more", {"kernelRelease": "6.18"}, False),
        ("a fact that was not known at capture", {**H200, "gpuMig": "True"}, False),
    ],
)
def test_an_artifact_is_a_reason_to_prefer_its_node_while_it_fits_there(why: str, here: dict[str, str], preferred: bool) -> None:
    there = captured("a", node="gpu", status=VLLMSnapshotContentStatus(environment={**H200, "gpuUuid": "GPU-0", "bootId": "1"}))
    seen = see(
        serving("s", node="gpu"),
        contents=(there, captured("c", node="n2")),
        nodes=("gpu", "n2"),
        agents=("gpu", "n2"),
        environments={"gpu": here},
    )
    [action] = [action for action in do(seen, replicas=2) if isinstance(action, p.CreatePod)]
    assert action.prefer == (("gpu", "n2") if preferred else ("n2",)), why


def test_nothing_is_ordered_from_an_agent_of_another_protocol_nor_expected_of_its_artifacts() -> None:
    seen = see(pod("a"), contents=(captured("b", node="n2"),), nodes=("node", "n2"), agents=("node", "n2"))
    assert [action for action in do(seen) if isinstance(action, p.CreateContent)]
    new = dataclasses.replace(seen, strangers=frozenset({"node", "n2"}))
    made = do(new, replicas=3)
    assert not [action for action in made if isinstance(action, p.CreateContent)]
    pods = [action for action in made if isinstance(action, p.CreatePod)]
    assert [action.prefer for action in pods] == [(), ()], "nobody waits for a capture that is not ordered"
    assert not [action for action in made if isinstance(action, p.DeleteContent)], "it is used again after the upgrade"


def test_a_node_that_can_restore_nothing_is_not_preferred() -> None:
    seen = see(
        contents=(captured("a"), captured("b", node="n2")),
        nodes=("node", "n2"),
        agents=("node", "n2"),
        incapable=frozenset({"node"}),
    )
    [action] = [action for action in do(seen) if isinstance(action, p.CreatePod)]
    assert action.prefer == ("n2",)


@pytest.mark.parametrize(
    ("why", "replicas", "removed"),
    [
        (4, "nobody", []),
        (3, "not ready first", ["starting"]),
        (2, "then cold", ["starting", "cold"]),
        (1, "then the newest", ["starting", "cold", "young"]),
        (0, "to zero", ["starting", "cold", "young", "aged"]),
    ],
)
def test_scale_down_order(why: int, replicas: str, removed: list[str]) -> None:
    seen = see(
        serving("aged", mode=c.START_RESTORE, created=1.0),
        serving("cold", created=1.0),
        serving("young", mode=c.START_RESTORE, created=2.0),
        pod("starting"),
        contents=ARTIFACT,
    )
    actions = do(seen, replicas=why)
    assert names(actions, p.DeletePod) == removed, replicas
    assert not names(actions, p.DeleteContent), "artifacts stay, whatever is scaled"


def test_finished_pods_are_replaced() -> None:
    seen = see(pod("f", finished=True), contents=ARTIFACT)
    actions = do(seen)
    assert names(actions, p.DeletePod) == ["f"]
    assert names(actions, p.CreatePod) == ["0"]


def test_a_pod_whose_gpu_ran_out_of_memory_in_a_restore_is_replaced_unless_it_serves() -> None:
    out = PodReport(start="cold", state="Starting", reason=c.Reason.GPU_OUT_OF_MEMORY)
    seen = see(pod("d", report=out), contents=ARTIFACT)
    actions = do(seen)
    assert names(actions, p.DeletePod) == ["d"]
    assert names(actions, p.CreatePod) == [], "in the next pass, when its place is free"
    assert names(do(see(pod("d", report=out, deleting=True), contents=ARTIFACT)), p.CreatePod) == ["0"]
    # It came up by itself, as nobody was there to replace it; that it is unready for a moment is another matter.
    serves = out.model_copy(update={"state": "Serving"})
    assert do(see(serving("d", report=serves), contents=ARTIFACT)) == []
    assert do(see(pod("d", report=serves), contents=ARTIFACT)) == []
    assert names(do(seen, replicas=0), p.DeletePod) == ["d"], "once"


def test_a_pod_that_finished_at_once_is_replaced_later() -> None:
    seen = see(pod("f", finished=True, created=NOW - 5), contents=ARTIFACT)
    made = p.plan(claim(), seen, NOW)
    assert made.actions == ()
    assert made.requeue_after == pytest.approx(25.1)
    assert names(list(p.plan(claim(), seen, NOW + 25.1).actions), p.DeletePod) == ["f"]


@pytest.mark.parametrize(
    ("why", "replicas", "fields", "removed", "created"),
    [
        ("surge: one new beside the old", [serving("o1", OLD), serving("o2", OLD)], {}, [], 1),
        ("it starts: wait", [serving("o1", OLD), serving("o2", OLD), pod("n1")], {}, [], 0),
        ("it serves: an old one goes", [serving("o1", OLD), serving("o2", OLD), serving("n1")], {}, ["o2"], 0),
        ("the next", [serving("o1", OLD), serving("n1")], {}, [], 1),
        ("the last old one goes", [serving("o1", OLD), serving("n1"), serving("n2")], {}, ["o1"], 0),
        (
            "no surge: an old one makes room",
            [serving("o1", OLD), serving("o2", OLD)],
            {"maxSurge": 0, "maxUnavailable": 1},
            ["o2"],
            0,
        ),
        ("and is replaced", [serving("o1", OLD)], {"maxSurge": 0, "maxUnavailable": 1}, [], 1),
        ("a broken old one is no loss", [serving("o1", OLD), pod("o2", OLD), serving("n1")], {}, ["o2"], 0),
        ("both broken: new ones only as far as hope goes", [pod("o1", OLD), pod("o2", OLD), pod("n1")], {}, [], 0),
        ("starting ones wait for one without a place too", [pod("o1", OLD), pod("o2", OLD), homeless("n1")], {}, [], 0),
        ("a broken one makes room for it", [pod("o1", OLD), broken("o2", OLD), homeless("n1")], {}, ["o2"], 0),
        ("one of two: the rest when it has moved in", [broken("o1", OLD), broken("o2", OLD), homeless("n1")], {}, ["o2"], 0),
        ("nobody, while it moves in", [broken("o1", OLD), pod("n1")], {}, [], 1),
        ("no place, and none may be missing: wait", [serving("o1", OLD), serving("o2", OLD), homeless("n1")], {}, [], 0),
        (
            "no place, but one may be missing: it makes room",
            [serving("o1", OLD), serving("o2", OLD), homeless("n1")],
            {"maxUnavailable": 1},
            ["o2"],
            0,
        ),
        (
            "two may be missing: both old ones go",
            [serving("o1", OLD), serving("o2", OLD)],
            {"maxUnavailable": 2},
            ["o2", "o1"],
            1,
        ),
    ],
)
def test_rolling_update(why: str, replicas: list[Replica], fields: dict[str, int], removed: list[str], created: int) -> None:
    seen = see(*[dataclasses.replace(item, created=float(i)) for i, item in enumerate(replicas)], contents=ARTIFACT)
    actions = do(seen, replicas=2, rollout=fields)
    assert names(actions, p.DeletePod) == removed, why
    assert len(names(actions, p.CreatePod)) == created, why


def test_a_scale_down_in_a_rollout_spares_the_old_pods_that_serve() -> None:
    seen = see(serving("o1", OLD), serving("o2", OLD), pod("n1", created=1.0), pod("n2", created=2.0), contents=ARTIFACT)
    assert names(do(seen, replicas=2), p.DeletePod) == ["n2"]


def test_no_more_old_pods_are_given_up_than_the_seed_needs() -> None:
    old = [serving(f"o{i}", OLD) for i in range(3)]
    with_surge = do(see(*old), replicas=3, rollout={"maxSurge": 1, "maxUnavailable": 3})
    assert names(with_surge, p.DeletePod) == []
    assert len(names(with_surge, p.CreatePod)) == 1
    without = do(see(*old), replicas=3, rollout={"maxSurge": 0, "maxUnavailable": 3})
    assert len(names(without, p.DeletePod)) == 1


def test_one_old_pod_makes_room_for_a_seed_that_finds_no_place() -> None:
    old = [serving(f"o{i}", OLD) for i in range(3)]
    waits = see(*old, pod("seed", node=None))
    full = see(*old, homeless("seed"))
    assert names(do(waits, replicas=3, rollout={"maxUnavailable": 3}), p.DeletePod) == [], "the scheduler has not said no"
    assert len(names(do(full, replicas=3, rollout={"maxUnavailable": 3}), p.DeletePod)) == 1
    assert names(do(full, replicas=3, rollout={"maxUnavailable": 0}), p.DeletePod) == []
    left = see(*old[:2], homeless("seed"))
    assert names(do(left, replicas=3, rollout={"maxUnavailable": 3}), p.DeletePod) == [], "no second one while it moves in"


# --- unattended --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("why", "replica", "agents", "verified"),
    [
        ("it serves and nobody is there", pod("s", containers_ready=True), (), True),
        ("the agent is there: its business", pod("s", containers_ready=True), HOME, False),
        ("an agent elsewhere is not there", pod("s", containers_ready=True), ("n2",), True),
        ("it does not serve yet", pod("s"), (), False),
        ("it is verified already", pod("s", containers_ready=True, verified="True"), (), False),
        ("the agent had only begun", pod("s", containers_ready=True, verified="False", verified_reason="Starting"), (), True),
        (
            "the agent found a wrong answer: never",
            pod("s", containers_ready=True, verified="False", verified_reason=c.Reason.CANARY_MISMATCH),
            (),
            False,
        ),
        ("it leaves", pod("s", containers_ready=True, deleting=True), (), False),
    ],
)
def test_unattended_verification(why: str, replica: Replica, agents: tuple[str, ...], verified: bool) -> None:
    actions = do(see(replica, agents=agents, nodes=("node", "n2"), contents=ARTIFACT))
    assert names(actions, p.VerifyUnattended) == (["s"] if verified else []), why


# --- service -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "wanted", "action"),
    [
        (None, "Enabled", p.CreateService()),
        (SERVICE, "Enabled", None),
        (ServiceView(uid="s", ours=True, current=False), "Enabled", p.UpdateService("s")),
        (ServiceView(uid="f", ours=False, current=False), "Enabled", None),
        (None, "Disabled", None),
        (SERVICE, "Disabled", p.DeleteService("s")),
        (ServiceView(uid="f", ours=False, current=False), "Disabled", None),
    ],
)
def test_service(there: ServiceView | None, wanted: str, action: p.Action | None) -> None:
    actions = do(see(serving("s"), contents=ARTIFACT, service=there), serving={"service": wanted})
    assert actions == ([action] if action else [])


def test_a_name_that_no_service_can_have_is_not_tried() -> None:
    actions = p.plan(claim(name="smol.v1"), see(serving("s"), contents=ARTIFACT, service=None), NOW).actions
    assert actions == ()


# --- retention ---------------------------------------------------------------------------------------------------------

OLDER = pods.Template(revision="2" * 40, identity="3" * 40)


@pytest.mark.parametrize(
    ("why", "contents", "replicas", "retain", "removed"),
    [
        ("the only one", [captured("a")], [], 1, []),
        ("the one before, once there is a newer", [captured("a"), captured("o", OLD)], [], 1, ["o"]),
        ("two are kept if two are wanted", [captured("a"), captured("o", OLD), captured("p", OLDER, at=1)], [], 2, ["p"]),
        ("the current one, even if older", [captured("a", at=1), captured("o", OLD, at=2)], [], 1, ["o"]),
        ("one on another node counts", [captured("a", node="n2"), captured("o", OLD)], [], 1, ["o"]),
        ("without a current one the newest stays", [captured("o", OLD, at=2), captured("p", OLDER, at=1)], [], 1, ["p"]),
        ("what a replica may restart from", [captured("a"), captured("o", OLD)], [serving("s", OLD)], 1, []),
        ("per node", [captured("a"), captured("o", OLD, node="n2"), captured("p", OLDER)], [], 2, []),
        ("an open order", [captured("a"), content("o", OLD)], [], 1, []),
        ("superseded", [captured("a", at=2), captured("b", at=1)], [], 1, ["b"]),
        ("superseded, but a starting pod may be reading it", [captured("a", at=2), captured("b", at=1)], [pod("s")], 1, []),
        ("failed, and replaced by a good one", [captured("a"), content("f", failed=True)], [], 1, ["f"]),
        ("quarantined, and replaced by a good one", [captured("a", at=2), captured("q", at=1, quarantined=True)], [], 1, ["q"]),
        ("failures that are counted", [content(f"f{i}", failed=True, captured_at=i) for i in range(3)], [], 1, []),
        ("failures beyond those", [content(f"f{i}", failed=True, captured_at=i) for i in range(5)], [], 1, ["f1", "f0"]),
        ("failures of another identity", [content("f", OLD, failed=True)], [], 1, ["f"]),
        ("already on its way", [captured("a", at=2), captured("b", at=1, deleting=True)], [], 1, []),
        ("contents of vanished nodes are left to the housekeeping", [captured("a"), captured("o", OLD, node="gone")], [], 1, []),
    ],
)
def test_retention(why: str, contents: list[Content], replicas: list[Replica], retain: int, removed: list[str]) -> None:
    seen = see(*replicas, contents=tuple(contents), nodes=("node", "n2"))
    actions = do(seen, replicas=0, artifact={"retain": retain}, rollout={"maxSurge": 1, "maxUnavailable": 0})
    assert sorted(names(actions, p.DeleteContent)) == sorted(removed), why


def test_orphans_are_the_contents_of_vanished_nodes() -> None:
    here, gone = captured("a"), captured("b", node="gone")
    assert p.plan_orphans([here, gone], frozenset(HOME)) == [gone]


# --- deletion ----------------------------------------------------------------------------------------------------------


def test_deletion_removes_pods_and_contents_then_the_finalizer() -> None:
    leaving = claim(deleting=True)
    first = p.plan(leaving, see(pod("s"), contents=(captured("a"), content("b"))), NOW).actions
    assert names(list(first), p.DeletePod) == ["s"]
    assert sorted(names(list(first), p.DeleteContent)) == ["a", "b"]
    assert p.RemoveFinalizer() not in first
    asked = see(pod("s", deleting=True), contents=(captured("a", deleting=True),))
    assert p.plan(leaving, asked, NOW).actions == (p.RemoveFinalizer(),), (
        "recorded deletions are enough: agents hold finalizers of their own"
    )


def test_deletion_with_retain_leaves_contents_alone() -> None:
    from vllmsnapshot.api.types import DeletionPolicy

    leaving = claim(deleting=True, deletion_policy=DeletionPolicy.RETAIN)
    assert p.plan(leaving, see(contents=(captured("a"),)), NOW).actions == (p.RemoveFinalizer(),)


def test_deletion_without_our_finalizer_is_not_our_business() -> None:
    assert p.plan(claim(deleting=True, finalizer=False), see(pod("s")), NOW).actions == ()


def test_an_unreadable_spec_changes_nothing_but_can_be_deleted() -> None:
    broken = claim(invalid="spec.image: Field required")
    broken = dataclasses.replace(broken, spec=None)
    assert p.plan(broken, see(pod("s")), NOW).actions == ()
    leaving = dataclasses.replace(broken, deleting=True)
    assert names(list(p.plan(leaving, see(pod("s")), NOW).actions), p.DeletePod) == ["s"]
