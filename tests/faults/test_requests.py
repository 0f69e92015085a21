"""What the server refuses for good, what is there already, and what somebody has edited: said, got round, and never adopted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from vllmsnapshot.api import constants as c
from vllmsnapshot.api.constants import Reason
from vllmsnapshot.controller import pods
from vllmsnapshot.controller.reconcile import Reconciler
from vllmsnapshot.controller.workqueue import Wait
from vllmsnapshot.kube import CONTENTS, NODES, PODS, SERVICES, SNAPSHOTS, ApiError, Object

from .memory_api import Call, Client, Faults, Server

KEY = ("default", "smol")
NODE = "node-a"


class Lab:
    """An operator whose passes the test makes, with one node and a Ready agent."""

    def __init__(self) -> None:
        self.time = 1_800_000_000.0
        self.server = Server(lambda: self.time)
        self.refuse: Callable[[Call], ApiError | None] = lambda _: None
        self.client = Client(self.server, "operator", faults=Faults(before=self._before, latency_s=0.0))
        self.reconciler = Reconciler(self.client, "system", clock=lambda: self.time, share_s=0.0)
        self.server.add(NODES, {"metadata": {"name": NODE}})
        agent = {"metadata": {"name": "agent", "namespace": "system", "labels": {c.LABEL_COMPONENT: c.COMPONENT_AGENT}}}
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        self.server.add(PODS, {**agent, "spec": {"nodeName": NODE}, "status": ready})

    def _before(self, call: Call, _number: int) -> None:
        error = self.refuse(call)
        if error is not None:
            raise error

    def apply(self, **spec: Any) -> None:
        """Create the claim, or change it."""
        full = {"model": "/m", "image": "one", "replicas": 1, **spec}
        if self.server.edit(SNAPSHOTS, KEY[1], KEY[0], lambda x: x.update(spec=full)) is None:
            self.server.add(SNAPSHOTS, {"metadata": {"name": KEY[1], "namespace": KEY[0]}, "spec": full})

    async def step(self, passes: int = 1) -> int:
        """Passes; how many writes the last one asked for."""
        before = 0
        for _ in range(passes):
            before = len([x for x in self.client.calls if x.writes])
            with contextlib.suppress(Wait):
                await self.reconciler.reconcile(KEY)
            await self.reconciler.housekeep()
        return len([x for x in self.client.calls if x.writes]) - before

    @property
    def pods(self) -> list[Object]:
        """The replicas."""
        return [x for x in self.server.all(PODS) if x["metadata"]["namespace"] == KEY[0]]

    def bind(self) -> None:
        """The scheduler."""
        for pod in self.pods:
            self.server.edit(PODS, pod["metadata"]["name"], KEY[0], lambda x: x["spec"].update(nodeName=NODE))

    def degraded(self) -> tuple[str, str]:
        """Reason and message of the condition; empty where all is well."""
        claim = self.server.get(SNAPSHOTS, KEY[1], KEY[0])
        assert claim is not None
        found = next(x for x in claim["status"]["conditions"] if x["type"] == c.DEGRADED)
        return (found["reason"], found["message"]) if found["status"] == "True" else ("", "")


@pytest.fixture
def lab() -> Lab:
    return Lab()


@pytest.mark.parametrize("successor", [False, True])
async def test_a_claim_that_vanishes_during_a_pass_is_no_failure(successor: bool) -> None:
    """Whichever write meets it, with or without a successor of its name: pending work, which the next pass finds done or new."""
    writes = await _pass_in_which_it_vanishes(Lab(), None, successor)
    assert writes > 2
    for at in range(writes):
        lab = Lab()
        await _pass_in_which_it_vanishes(lab, at, successor)
        await lab.step(2)
        assert len(lab.pods) == successor


async def _pass_in_which_it_vanishes(lab: Lab, at: int | None, successor: bool) -> int:
    """The first pass over a claim, which goes, forced, before write number `at`; how many writes were asked for."""
    lab.apply()
    writes = 0

    def vanish(call: Call) -> None:
        nonlocal writes
        if call.writes:
            if writes == at:
                lab.server.edit(SNAPSHOTS, KEY[1], KEY[0], lambda x: x["metadata"].update(finalizers=[]))
                lab.server.delete(SNAPSHOTS, KEY[1], KEY[0])
                if successor:
                    lab.apply()
            writes += 1

    lab.refuse = vanish
    await lab.step()
    lab.refuse = lambda _: None
    return writes


def denied(method: str, plural: str, status: int = 403, message: str = 'admission webhook "x" denied the request') -> Any:
    """Refuses one kind of request."""

    def refuse(call: Call) -> ApiError | None:
        same = (call.method, call.resource.plural) == (method, plural)
        return ApiError(status, "Forbidden", message) if same and not call.subresource else None

    return refuse


@pytest.mark.parametrize(
    ("refuse", "reason"),
    [
        (denied("POST", "pods"), Reason.POD_REJECTED),
        (denied("POST", "pods", 422, "spec.x: Invalid value"), Reason.POD_REJECTED),
        (denied("POST", "pods", 403, "exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1"), Reason.POD_REJECTED),
        (denied("POST", "pods", 403, "namespace default is being terminated"), Reason.POD_REJECTED),
        (denied("POST", "pods", 500, 'failed calling webhook "x": timeout'), Reason.POD_REJECTED),
        (denied("POST", "services"), Reason.SERVICE_REJECTED),
    ],
)
async def test_a_refused_creation_is_said_and_made_when_it_may(lab: Lab, refuse: Any, reason: str) -> None:
    lab.apply()
    lab.refuse = refuse
    await lab.step(2)
    said, message = lab.degraded()
    assert said == reason
    assert message
    lab.refuse = lambda _: None
    await lab.step(2)
    assert lab.degraded() == ("", "")
    assert len(lab.pods) == 1
    assert lab.server.get(SERVICES, *reversed(KEY)) is not None


async def test_a_refused_deletion_is_said_and_keeps_nothing_else_from_happening(lab: Lab) -> None:
    lab.apply(replicas=2, capture={"policy": "Disabled"})
    await lab.step(2)
    assert len(lab.pods) == 2
    lab.refuse = denied("DELETE", "pods")
    lab.server.delete(SERVICES, KEY[1], KEY[0])
    lab.apply(replicas=1, capture={"policy": "Disabled"})
    await lab.step(2)
    reason, message = lab.degraded()
    assert reason == Reason.DELETION_REFUSED
    assert "admission webhook" in message
    assert lab.pods[1]["metadata"]["name"] in message or lab.pods[0]["metadata"]["name"] in message
    assert lab.server.get(SERVICES, *reversed(KEY)) is not None, "the rest of the plan is carried out"
    lab.refuse = lambda _: None
    await lab.step(2)
    assert len(lab.pods) == 1
    assert lab.degraded() == ("", "")


async def test_a_claim_whose_pods_may_not_be_deleted_says_so_while_it_goes(lab: Lab) -> None:
    lab.apply()
    await lab.step(2)
    lab.bind()
    await lab.step(2)
    lab.refuse = denied("DELETE", "pods")
    lab.server.delete(SNAPSHOTS, KEY[1], KEY[0])
    await lab.step(2)
    assert lab.degraded()[0] == Reason.DELETION_REFUSED
    lab.refuse = lambda _: None
    for _ in range(3):
        await lab.step()
        for pod in lab.pods:
            lab.server.delete(PODS, pod["metadata"]["name"], KEY[0], grace=0)
    assert lab.server.get(SNAPSHOTS, *reversed(KEY)) is None


async def test_no_content_without_the_finalizer_that_takes_it_along(lab: Lab) -> None:
    lab.apply()
    await lab.step(2)
    lab.bind()
    lab.refuse = denied("PATCH", "vllmsnapshots")
    await lab.step(2)
    assert lab.degraded()[0] == Reason.WRITE_REFUSED
    assert lab.server.all(CONTENTS) == []
    lab.refuse = lambda _: None
    await lab.step(2)
    assert len(lab.server.all(CONTENTS)) == 1
    assert lab.degraded() == ("", "")


async def test_a_foreign_content_of_our_name_is_not_adopted(lab: Lab) -> None:
    lab.apply()
    await lab.step(2)
    lab.bind()
    claim = lab.server.get(SNAPSHOTS, *reversed(KEY))
    assert claim is not None
    name = pods.content_name(KEY[1], claim["metadata"]["uid"], lab.pods[0]["metadata"]["uid"])
    theirs = {"snapshotRef": {"namespace": "other", "name": "x", "uid": "u"}, "sourcePod": {"name": "y", "uid": "v"}}
    lab.server.add(CONTENTS, {"metadata": {"name": name}, "spec": {**theirs, "nodeName": NODE, "identity": "i"}})
    before = lab.server.get(CONTENTS, name)
    await lab.step(3)
    assert lab.degraded()[0] == Reason.NAME_CONFLICT
    assert name in lab.degraded()[1]
    assert lab.server.get(CONTENTS, name) == before
    lab.server.delete(CONTENTS, name)
    await lab.step(2)
    assert lab.degraded() == ("", "")


async def test_a_foreign_pod_of_our_name_is_not_adopted(lab: Lab) -> None:
    lab.apply()
    await lab.step(2)
    (pod,) = lab.pods
    name = pod["metadata"]["name"]
    lab.server.delete(PODS, name, KEY[0], grace=0)
    lab.server.add(PODS, {"metadata": {"name": name, "namespace": KEY[0]}, "spec": {}})
    await lab.step(3)
    assert lab.degraded()[0] == Reason.NAME_CONFLICT
    assert len(lab.pods) == 1


async def test_a_pod_that_lost_its_labels_is_spoken_of(lab: Lab) -> None:
    # Somebody took it out of the Service to look at it. It is not counted any more, and its name is taken.
    lab.apply()
    await lab.step(2)
    (pod,) = lab.pods
    lab.server.edit(PODS, pod["metadata"]["name"], KEY[0], lambda x: x["metadata"].update(labels={}))
    await lab.step(2)
    reason, message = lab.degraded()
    assert reason == Reason.NAME_CONFLICT
    assert "labels were changed" in message
    lab.server.delete(PODS, pod["metadata"]["name"], KEY[0], grace=0)
    await lab.step(2)
    assert lab.degraded() == ("", "")
    assert len(lab.pods) == 1


@pytest.mark.parametrize("label", [c.LABEL_SNAPSHOT_UID, c.LABEL_NODE])
async def test_a_content_that_lost_its_labels_gets_them_back(lab: Lab, label: str) -> None:
    lab.apply()
    await lab.step(2)
    lab.bind()
    await lab.step(2)
    (content,) = lab.server.all(CONTENTS)
    lab.server.edit(CONTENTS, content["metadata"]["name"], "", lambda x: x["metadata"]["labels"].pop(label))
    await lab.step(3)
    (after,) = lab.server.all(CONTENTS)
    assert after["metadata"]["labels"] == content["metadata"]["labels"]
    assert after["metadata"]["uid"] == content["metadata"]["uid"]
    assert lab.degraded() == ("", "")


async def test_a_content_that_may_not_be_buried_keeps_nobody_from_being_looked_at(lab: Lab) -> None:
    lab.apply()
    await lab.step(2)
    lab.bind()
    await lab.step(2)
    lab.server.delete(NODES, NODE)
    lab.refuse = denied("DELETE", "vllmsnapshotcontents")
    await lab.reconciler.housekeep()
    assert len(lab.server.all(CONTENTS)) == 1
    lab.refuse = lambda _: None
    await lab.reconciler.housekeep()
    assert lab.server.all(CONTENTS) == []


async def test_at_rest_nothing_is_asked_to_be_written(lab: Lab) -> None:
    lab.apply(replicas=1)
    await lab.step(2)
    lab.bind()
    await lab.step(3)
    for _ in range(5):
        lab.time += 30.0
        assert await lab.step() == 0


async def test_a_transient_error_ends_the_pass_and_the_next_one_goes_on(lab: Lab) -> None:
    lab.apply(replicas=3, capture={"policy": "Disabled"})
    lab.refuse = lambda call: ApiError(429, "TooManyRequests", "later", 5.0) if call.method == "POST" else None
    with pytest.raises(ApiError) as e:
        await lab.reconciler.reconcile(KEY)
    assert e.value.retry_after_s == 5.0
    assert len([x for x in lab.client.calls if x.writes]) == 1, "one is enough to know"
    lab.refuse = lambda _: None
    await lab.step(2)
    assert len(lab.pods) == 3
