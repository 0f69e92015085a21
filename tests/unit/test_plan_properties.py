"""The plan as a protocol: a world of pods, nodes, agents and a user who keeps changing his mind, explored at random.

Safety is checked at every single action, also when the operator dies between two of them; convergence is checked at the end
of every run, in a world that has calmed down.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllmsnapshot.api import constants as c
from vllmsnapshot.api.types import PodReport, VLLMSnapshotContentStatus, VLLMSnapshotSpec, VLLMSnapshotStatus
from vllmsnapshot.controller import plan as p
from vllmsnapshot.controller import pods, status, tries
from vllmsnapshot.world import Claim, Content, Observed, Replica, ServiceView

NODES = ("n1", "n2", "n3")
replace = dataclasses.replace


class Sim:
    """An API server with scheduler, kubelet, agents and user, as values."""

    def __init__(self, **spec: Any) -> None:
        self.now = 1_000_000.0
        self.number = itertools.count()
        self.raw: dict[str, Any] = {"model": "m", "image": "i1", **spec}
        self.claim = Claim(namespace="ns", name="smol", uid="u0", spec=self.spec())
        self.pods: dict[str, Replica] = {}
        self.contents: dict[str, Content] = {}
        self.nodes = set(NODES)
        self.agents = set(NODES)
        self.environments: dict[str, dict[str, str]] = {node: {"gpuDriver": "1"} for node in NODES}
        self.incapable: set[str] = set()
        self.places: int | None = None
        """GPUs in the cluster, each for one pod; None: enough."""
        self.service: ServiceView | None = None
        self.recapture = ""
        self.gone = False

    def spec(self) -> VLLMSnapshotSpec:
        return VLLMSnapshotSpec.model_validate(self.raw)

    def edit(self, **spec: Any) -> None:
        self.raw = {**self.raw, **spec}
        self.claim = replace(self.claim, spec=self.spec(), generation=self.claim.generation + 1)
        if self.service is not None:
            self.service = replace(self.service, current=False)

    def observed(self) -> Observed:
        return Observed(
            pods=tuple(self.pods.values()),
            contents=tuple(self.contents.values()),
            agents=frozenset(self.agents),
            nodes=frozenset(self.nodes),
            environments=self.environments,
            incapable=frozenset(self.incapable),
            service=self.service,
            recapture=self.recapture,
        )

    def plan(self) -> p.Plan:
        return p.plan(self.claim, self.observed(), self.now)

    def suits(self, item: Content, identity: str, node: str) -> bool:
        """Whether a new pod of this identity could be restored from it on this node."""
        good = item.captured and not item.quarantined and not item.deleting
        return good and (item.identity, item.node) == (identity, node) and item.status.environment == self.environments[node]

    # --- the operator's actions, checked ---

    def execute(self, action: p.Action) -> None:
        spec = self.claim.spec
        assert spec is not None
        live = sum(pod.live for pod in self.pods.values())
        available = sum(pod.available for pod in self.pods.values())
        match action:
            case p.AddFinalizer():
                assert not self.claim.deleting
                self.claim = replace(self.claim, finalizer=True)
            case p.RemoveFinalizer():
                assert self.claim.deleting
                left = [item for item in self.contents.values() if not item.deleting]
                assert not left or spec.artifact.deletion_policy == "Retain", "contents would be left behind"
                self.gone = True
            case p.CreatePod(slot, prefer, recapture, only):
                hashes = pods.template(spec)
                name = pods.pod_name(self.claim.name, hashes.revision, slot)
                if name in self.pods:
                    return  # 409
                assert live + 1 <= spec.replicas + spec.rollout.max_surge, "more than replicas + maxSurge"
                for node in prefer:
                    assert node in self.agents
                    assert node not in self.incapable
                    assert any(self.suits(item, hashes.identity, node) for item in self.contents.values()), (
                        "nothing to restore there"
                    )
                uid = f"p{next(self.number)}"
                assert bool(recapture) == bool(only)
                assert not any(pod.recapture == recapture != "" and self.working(pod) for pod in self.pods.values()), (
                    "one at a time"
                )
                self.pods[name] = Replica(
                    name=name,
                    uid=uid,
                    revision=hashes.revision,
                    identity=hashes.identity,
                    created=self.now,
                    recapture=recapture,
                    only=frozenset(only),
                )
            case p.DeletePod(pod):
                current = self.pods.get(pod.name)
                if current is None or current.uid != pod.uid or current.deleting:
                    return
                if current.available and not self.claim.deleting:
                    floor = spec.replicas - spec.rollout.max_unavailable
                    assert available - 1 >= floor, "fewer than replicas - maxUnavailable are left"
                if current.node is None or current.finished:
                    del self.pods[pod.name]
                else:
                    self.pods[pod.name] = replace(current, deleting=True, ready=False)
            case p.VerifyUnattended(pod):
                assert pod.node not in self.agents
                if pod.name in self.pods:
                    self.pods[pod.name] = replace(self.pods[pod.name], verified="True", verified_reason=c.Reason.UNATTENDED)
            case p.CreateContent(source, node, recapture, attempt):
                assert not tries.paused(spec, self.observed(), source.identity, node, self.now), "ordered in a pause"
                assert self.claim.finalizer, "a content without the finalizer that would clean it up"
                name = pods.content_name(self.claim.name, self.claim.uid, source.uid)
                if name in self.contents:
                    return
                open_orders = [i for i in self.contents.values() if (i.identity, i.node) == (source.identity, node) and i.pending]
                assert not open_orders, "two open orders for one node and identity"
                self.contents[name] = Content(
                    name=name,
                    uid=name,
                    identity=source.identity,
                    node=node,
                    source_uid=source.uid,
                    source=source.name,
                    created=self.now,
                    recapture=recapture,
                    attempt=attempt,
                )
            case p.DeleteContent(content):
                if not self.claim.deleting:
                    identity = pods.template(spec).identity
                    usable = [
                        i.name
                        for i in self.contents.values()
                        if (i.identity, i.node) == (identity, content.node) and self.observed().usable(i)
                    ]
                    assert usable != [content.name], "the only usable artifact of the current identity"
                    assert not content.pending, "an open order"
                if content.name in self.contents:
                    self.contents[content.name] = replace(self.contents[content.name], deleting=True)
            case p.CreateService() | p.UpdateService():
                self.service = ServiceView(uid="s", ours=True, current=True)
            case p.DeleteService():
                self.service = None

    # --- the world's moves ---

    def set(self, name: str, **changes: Any) -> None:
        self.pods[name] = replace(self.pods[name], **changes)

    def advance(self, name: str, *, capture: bool = True) -> bool:
        """The next thing that happens to a pod by itself; whether anything does."""
        pod = self.pods[name]
        report = pod.report
        if pod.deleting:
            del self.pods[name]
        elif pod.finished:
            return False
        elif pod.node is None:
            nodes = sorted(self.nodes & (pod.only or self.nodes))
            if not nodes or sum(item.node is not None for item in self.pods.values()) >= (self.places or len(self.pods)):
                self.set(name, unschedulable="Insufficient nvidia.com/gpu")
                return not pod.unschedulable
            self.set(name, node=nodes[sum(map(ord, pod.uid)) % len(nodes)], unschedulable="")
        elif pod.node not in self.nodes:
            del self.pods[name]  # the pod garbage collector
        elif pod.node not in self.agents:
            if not pod.containers_ready:
                self.set(name, containers_ready=True)
            elif pod.verified == "True" and not pod.ready:
                self.set(name, ready=True)
            else:
                return False
        elif not report.start:
            usable = [
                i
                for i in self.contents.values()
                if (i.identity, i.node) == (pod.identity, pod.node) and self.observed().usable(i)
            ]
            if pod.recapture and self.order_is_open(pod):
                made = PodReport(start="cold", state="AtBarrier", reason=c.Reason.RECAPTURE)
            elif usable:
                made = PodReport(start="restore", state="Restoring", content=usable[0].name)
            else:
                made = PodReport(start="cold", state="AtBarrier", reason=c.Reason.NO_ARTIFACT)
            self.set(name, report=made, start_mode=made.start)
        elif report.state == "AtBarrier":
            order = next((i for i in self.contents.values() if i.source_uid == pod.uid), None)
            if order is not None and order.pending:
                self.answer(order.name, captured=capture)
            self.set(name, report=report.model_copy(update={"state": "Released"}))
        elif report.state in ("Restoring", "Released"):
            self.set(name, report=report.model_copy(update={"state": "Serving"}), containers_ready=True)
        elif not pod.ready:
            self.set(name, verified="True", containers_ready=True, ready=True)
        else:
            return False
        return True

    def order_is_open(self, pod: Replica) -> bool:
        """No order of this pod has been answered."""
        return all(item.pending for item in self.contents.values() if item.source_uid == pod.uid)

    def working(self, pod: Replica) -> bool:
        """It may still be captured."""
        in_time = self.now < pod.created + self.spec().capture.seed_timeout_seconds
        return pod.live and in_time and pod.node in self.agents and self.order_is_open(pod) and not pod.released

    def answer(self, name: str, *, captured: bool) -> None:
        item = self.contents[name]
        found = VLLMSnapshotContentStatus(environment=dict(self.environments.get(item.node, {})))
        self.contents[name] = replace(
            item, captured=captured, failed=not captured, captured_at=self.now, ended=self.now, status=found
        )

    def agents_act(self) -> bool:
        """Agents answer orders whose source is gone or serves, and remove files; the housekeeping buries the rest."""
        moved = False
        for name, item in list(self.contents.items()):
            if item.node not in self.nodes or (item.deleting and item.node in self.agents):
                del self.contents[name]
                moved = True
            elif item.pending and item.node in self.agents:
                source = next((pod for pod in self.pods.values() if pod.uid == item.source_uid), None)
                if source is None or not source.live or source.released:
                    self.answer(name, captured=False)
                    moved = True
        return moved

    def settle(self, *, capture: bool = True, rounds: int = 400) -> None:
        """A calm world and a working operator, until nothing moves."""
        for _ in range(rounds):
            todo = self.plan()
            for action in todo.actions:
                self.execute(action)
            moved = [self.advance(name, capture=capture) for name in list(self.pods)]
            moved.append(self.agents_act())
            if not todo.actions and not any(moved):
                if todo.requeue_after is None:
                    return
                self.now += todo.requeue_after
            self.now += 0.5
        raise AssertionError(f"never at rest: {todo.actions}")


class PlanMachine(RuleBasedStateMachine):
    """Random lives of one claim."""

    @initialize(
        replicas=st.integers(0, 4),
        surge=st.integers(0, 2),
        unavailable=st.integers(0, 2),
        retain=st.integers(1, 2),
        retries=st.integers(0, 2),
        restore=st.sampled_from(["Prefer", "Require", "Disabled"]),
    )
    def start(self, replicas: int, surge: int, unavailable: int, retain: int, retries: int, restore: str) -> None:
        self.sim = Sim(
            replicas=replicas,
            rollout={"maxSurge": surge, "maxUnavailable": unavailable if surge else max(1, unavailable)},
            artifact={"retain": retain},
            capture={"retries": retries, "seedTimeoutSeconds": 100},
            restore={"policy": restore},
        )

    def _pod(self, pick: int) -> str | None:
        names = sorted(self.sim.pods)
        return names[pick % len(names)] if names else None

    picks = st.integers(0, 1000)

    @rule()
    def operator_pass(self) -> None:
        for action in self.sim.plan().actions:
            self.sim.execute(action)

    @rule(stop=st.integers(0, 4))
    def operator_dies_within_a_pass(self, stop: int) -> None:
        for action in self.sim.plan().actions[:stop]:
            self.sim.execute(action)

    @rule(pick=picks, steps=st.integers(1, 4), capture=st.booleans())
    def pod_advances(self, pick: int, steps: int, capture: bool) -> None:
        for _ in range(steps):
            if (name := self._pod(pick)) is not None:
                self.sim.advance(name, capture=capture)

    @rule(pick=picks)
    def pod_finishes(self, pick: int) -> None:
        if (name := self._pod(pick)) is not None and not self.sim.pods[name].deleting:
            self.sim.set(name, finished=True, ready=False)

    @rule(pick=picks)
    def a_gpu_is_out_of_memory(self, pick: int) -> None:
        """A restore fails in a way that must not be tried again in the same pod; it starts cold there if nobody replaces it."""
        name = self._pod(pick)
        if name is not None and self.sim.pods[name].report.state == "Restoring":
            made = PodReport(start="cold", state="Released", reason=c.Reason.GPU_OUT_OF_MEMORY)
            self.sim.set(name, report=made, start_mode="cold")

    @rule(pick=picks)
    def engine_breaks(self, pick: int) -> None:
        if (name := self._pod(pick)) is not None:
            self.sim.set(name, ready=False, containers_ready=False)

    @rule(pick=picks)
    def pod_is_deleted_by_hand(self, pick: int) -> None:
        if (name := self._pod(pick)) is not None:
            self.sim.set(name, deleting=True, ready=False)

    @rule(pick=picks, how=st.sampled_from(["quarantined", "deleting"]))
    def artifact_is_lost(self, pick: int, how: str) -> None:
        names = sorted(self.sim.contents)
        if names:
            name = names[pick % len(names)]
            self.sim.contents[name] = replace(self.sim.contents[name], **{how: True})

    @rule(replicas=st.integers(0, 4))
    def user_scales(self, replicas: int) -> None:
        self.sim.edit(replicas=replicas)

    @rule(image=st.sampled_from(["i1", "i2", "i3"]))
    def user_changes_the_image(self, image: str) -> None:
        self.sim.edit(image=image)

    @rule(port=st.sampled_from([8000, 8001]))
    def user_changes_the_port(self, port: int) -> None:
        self.sim.edit(serving={"port": port})

    @rule(policy=st.sampled_from(["Enabled", "Disabled"]))
    def user_toggles_capture(self, policy: str) -> None:
        self.sim.edit(capture={**self.sim.raw["capture"], "policy": policy})

    @rule(node=st.sampled_from(NODES), up=st.booleans())
    def agent_comes_or_goes(self, node: str, up: bool) -> None:
        (self.sim.agents.add if up and node in self.sim.nodes else self.sim.agents.discard)(node)

    @rule(node=st.sampled_from(NODES), up=st.booleans())
    def node_comes_or_goes(self, node: str, up: bool) -> None:
        (self.sim.nodes.add if up else self.sim.nodes.discard)(node)
        if not up:
            self.sim.agents.discard(node)

    @rule(node=st.sampled_from(NODES), driver=st.sampled_from("123"))
    def node_is_upgraded(self, node: str, driver: str) -> None:
        self.sim.environments[node] = {"gpuDriver": driver}

    @rule(node=st.sampled_from(NODES))
    def node_loses_its_gpu(self, node: str) -> None:
        self.sim.environments[node] = {"kernel": "1"}

    @rule(node=st.sampled_from(NODES), incapable=st.booleans())
    def doctor_finds_something(self, node: str, incapable: bool) -> None:
        (self.sim.incapable.add if incapable else self.sim.incapable.discard)(node)

    @rule(places=st.none() | st.integers(1, 4))
    def gpus_come_and_go(self, places: int | None) -> None:
        self.sim.places = places

    @rule(request=st.sampled_from(["", "r1", "r2"]))
    def user_asks_for_a_recapture(self, request: str) -> None:
        self.sim.recapture = request

    @rule(seconds=st.sampled_from([1.0, 35.0, 150.0]))
    def time_passes(self, seconds: float) -> None:
        self.sim.now += seconds

    @rule()
    def agents_act(self) -> None:
        self.sim.agents_act()

    @rule(capture=st.booleans())
    def world_calms_down(self, capture: bool) -> None:
        """Changes that meet a world at rest are the common ones."""
        self.sim.settle(capture=capture)

    @precondition(lambda self: hasattr(self, "sim"))
    @invariant()
    def status_is_computable_and_a_fixpoint(self) -> None:
        """Status is total, and computing it again from what was written changes nothing."""
        sim = self.sim
        todo = sim.plan()
        report = status.compute(sim.claim, sim.observed(), todo, [], sim.now)
        written = replace(sim.claim, status=report, raw_status=report.dump())
        again = status.compute(written, sim.observed(), todo, [], sim.now + 77)
        assert not status.changed(written, again)

    def _recaptured(self, report: VLLMSnapshotStatus, spec: VLLMSnapshotSpec) -> None:
        """Whoever asked has it, or was told that every try on some node came to nothing; at 0 replicas it waits."""
        sim, told = self.sim, report.recapture
        assert (told is not None) == bool(sim.recapture)
        if told is None:
            return
        identity = pods.template(spec).identity
        usable = [item for item in sim.contents.values() if item.identity == identity and sim.observed().usable(item)]
        nodes = {item.node for item in usable if item.recapture == sim.recapture}
        left = {item.node for item in usable} - nodes
        spent = {node for node in NODES if tries.spent(sim.observed(), identity, node) > spec.capture.retries}
        if told.phase == "Done":
            assert nodes
            assert not left
        elif told.phase == "Failed":
            assert spent >= (left or set(NODES))
        else:
            assert (told.phase, spec.replicas) == ("Waiting", 0)

    def teardown(self) -> None:
        """Whatever happened: once the world is calm, everything the user asked for is there, and nothing moves any more."""
        if not hasattr(self, "sim"):
            return
        sim = self.sim
        sim.nodes = set(NODES)
        sim.agents = set(NODES)
        sim.places = None
        sim.edit(capture={**sim.raw["capture"], "policy": "Enabled"})
        sim.settle()
        spec = sim.spec()
        hashes = pods.template(spec)
        live = [pod for pod in sim.pods.values() if pod.live]
        assert len(live) == spec.replicas
        assert all(pod.available and pod.revision == hashes.revision for pod in live)
        assert not any(pod.discard for pod in live)
        assert sim.plan().actions == ()
        report = status.compute(sim.claim, sim.observed(), sim.plan(), [], sim.now)
        conditions = {item.type: item for item in report.conditions or []}
        assert conditions[c.READY].status == "True", conditions[c.READY]
        assert conditions[c.PROGRESSING].status == "False", conditions[c.PROGRESSING]
        self._recaptured(report, spec)
        # And it can be deleted from any state.
        sim.claim = replace(sim.claim, deleting=True)
        for _ in range(10):
            for action in sim.plan().actions:
                sim.execute(action)
            for name in [name for name, pod in sim.pods.items() if pod.deleting]:
                sim.advance(name)
            sim.agents_act()
        assert sim.gone or not sim.claim.finalizer
        assert not sim.contents


def replicas_of(sim: Sim) -> tuple[list[Replica], list[Replica]]:
    """The live pods of the present revision, and the others."""
    hashes = pods.template(sim.spec())
    live = [pod for pod in sim.pods.values() if pod.live]
    return [pod for pod in live if pod.revision == hashes.revision], [pod for pod in live if pod.revision != hashes.revision]


@pytest.mark.parametrize("edit", [{"image": "i2"}, {"serving": {"port": 8001}}], ids=["new-artifact", "same-artifact"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("rollout", [(0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (1, 2)])
def test_a_rollout_without_a_free_gpu_ends_or_says_why_not(rollout: tuple[int, int], replicas: int, edit: dict[str, Any]) -> None:
    surge, unavailable = rollout
    sim = Sim(replicas=replicas, rollout={"maxSurge": surge, "maxUnavailable": unavailable})
    sim.places = replicas
    sim.settle()
    sim.edit(**edit)
    sim.settle()
    new, old = replicas_of(sim)
    report = status.compute(sim.claim, sim.observed(), sim.plan(), [], sim.now)
    shown = {item.type: item for item in report.conditions or []}
    if unavailable:
        assert not old
        assert sum(pod.available for pod in new) == replicas
        assert shown[c.READY].status == "True"
    else:
        assert sum(pod.available for pod in old) == replicas, "nobody may be missing"
        for kind in (c.READY, c.PROGRESSING, c.DEGRADED):
            assert "Insufficient nvidia.com/gpu" in shown[kind].message
            assert "rollout.maxUnavailable" in shown[kind].message
            assert new[0].name in shown[kind].message
        assert shown[c.DEGRADED].reason == c.Reason.POD_UNSCHEDULABLE
        # What the message advises is enough.
        sim.edit(rollout={"maxSurge": surge, "maxUnavailable": 1})
        sim.settle()
        new, old = replicas_of(sim)
        assert not old
        assert sum(pod.available for pod in new) == replicas


def test_a_broken_revision_does_not_keep_the_gpus_from_the_one_that_mends_it() -> None:
    sim = Sim(replicas=2, capture={"policy": "Disabled"})
    sim.places = 2
    for _ in range(8):
        for action in sim.plan().actions:
            sim.execute(action)
        for name, pod in list(sim.pods.items()):
            if pod.node is None:
                sim.advance(name)
    for name in sim.pods:
        sim.set(name, waiting="CrashLoopBackOff")
    broken = set(sim.pods)
    sim.edit(image="mended")
    for _ in range(100):
        for action in sim.plan().actions:
            sim.execute(action)
        for name in list(sim.pods):
            if name not in broken or sim.pods[name].deleting:
                sim.advance(name)
    new, old = replicas_of(sim)
    assert not old
    assert [pod.available for pod in new] == [True, True]


TestPlan = PlanMachine.TestCase
TestPlan.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_a_seed_then_the_rest() -> None:
    sim = Sim(replicas=4)
    most = 0
    for _ in range(200):
        todo = sim.plan()
        for action in todo.actions:
            sim.execute(action)
        if not any(item.captured for item in sim.contents.values()):
            most = max(most, len(sim.pods))
        if not todo.actions and not sum(sim.advance(name) for name in list(sim.pods)):
            break
    assert most == 1
    assert sorted(pod.start_mode for pod in sim.pods.values()) != ["cold"] * 4
    assert sum(pod.available for pod in sim.pods.values()) == 4


def test_without_any_agent_all_start_at_once() -> None:
    sim = Sim(replicas=4)
    sim.agents = set()
    for action in sim.plan().actions:
        sim.execute(action)
    assert len(sim.pods) == 4
    assert not sim.contents
    sim.settle()
    assert all(pod.available for pod in sim.pods.values())


def test_failing_captures_end_and_all_replicas_serve() -> None:
    sim = Sim(replicas=4, capture={"retries": 1})
    sim.settle(capture=False)
    assert sum(pod.available for pod in sim.pods.values()) == 4
    assert sim.contents
    assert all(item.failed for item in sim.contents.values())
