"""Taking an artifact again: one extra replica starts cold and is captured; the old artifact is there until the new one is.

The walks through whole worlds are in test_plan_properties.py; here is one decision per test.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.unit.test_plan import HOME, NEW, NOW, OLD, captured, claim, content, names, pod, see, serving, spec
from vllmsnapshot.api import constants as c
from vllmsnapshot.api.types import PodReport, VLLMSnapshotStatus
from vllmsnapshot.controller import plan as p
from vllmsnapshot.controller import status
from vllmsnapshot.world import Observed, Replica

ASKED: dict[str, Any] = {"recapture": "r1"}
BEFORE = (captured("before"),)
R = c.Reason


def seed(name: str = "seed", **fields: Any) -> Replica:
    """The replica that was made for the request."""
    report = PodReport(start=c.START_COLD, state="AtBarrier", reason=R.RECAPTURE)
    return pod(
        name,
        **{
            "recapture": "r1",
            "only": frozenset(HOME),
            "created": NOW - 5,
            "start_mode": c.START_COLD,
            "report": report,
            **fields,
        },
    )


def after(name: str = "after", **fields: Any) -> Any:
    """An artifact, or an order, made under the request."""
    return content(name, **{"source": "seed", "recapture": "r1", "created": NOW - 5, "captured_at": NOW - 1, **fields})


def made(actions: tuple[p.Action, ...]) -> list[p.CreatePod]:
    return [action for action in actions if isinstance(action, p.CreatePod)]


def tell(seen: Observed, **fields: Any) -> VLLMSnapshotStatus:
    whose = claim(spec(**fields))
    return status.compute(whose, seen, p.plan(whose, seen, NOW), [], NOW)


def phase(seen: Observed, **fields: Any) -> tuple[str, str]:
    found = tell(seen, **fields).recapture
    assert found is not None
    assert found.request == "r1"
    return found.phase, found.message


@pytest.mark.parametrize(
    ("why", "seen", "fields", "nodes"),
    [
        ("an artifact from before: one more replica, there", see(serving("a"), contents=BEFORE, **ASKED), {}, [HOME]),
        ("nobody asked", see(serving("a"), contents=BEFORE), {}, []),
        ("it has been done", see(serving("a"), contents=(*BEFORE, after(captured=True)), **ASKED), {}, []),
        ("another request: done again", see(serving("a"), contents=(after(captured=True),), recapture="r2"), {}, [HOME]),
        ("under way", see(serving("a"), seed(), contents=(*BEFORE, after()), **ASKED), {}, []),
        ("under way, not ordered yet", see(serving("a"), seed(), contents=BEFORE, **ASKED), {}, []),
        ("a replica is missing: that one first, restored", see(contents=BEFORE, **ASKED), {}, [()]),
        ("0 replicas: later", see(contents=BEFORE, **ASKED), {"replicas": 0}, []),
        ("capture disabled", see(serving("a"), contents=BEFORE, **ASKED), {"capture": {"policy": "Disabled"}}, []),
        ("no agent", see(serving("a"), contents=BEFORE, agents=(), **ASKED), {}, []),
        ("a rollout goes first", see(serving("a"), serving("o", OLD), contents=BEFORE, **ASKED), {}, []),
        ("it failed, and may be tried again", see(serving("a"), contents=(*BEFORE, after(failed=True)), **ASKED), {}, [HOME]),
        (
            "every try failed",
            see(serving("a"), contents=(*BEFORE, after(failed=True)), **ASKED),
            {"capture": {"retries": 0}},
            [],
        ),
        (
            "failures from before the request do not count",
            see(serving("a"), contents=(*BEFORE, content("f", failed=True)), **ASKED),
            {"capture": {"retries": 0}},
            [HOME],
        ),
        ("no artifact at all: anywhere", see(serving("a"), contents=(), **ASKED), {}, [HOME]),
        ("an ordinary capture is under way: wait for it", see(serving("a"), contents=(content("x"),), **ASKED), {}, []),
        (
            "one node is done, the other is next",
            see(
                serving("a"),
                contents=(*BEFORE, captured("b", node="n2"), after(captured=True)),
                nodes=("node", "n2"),
                agents=("node", "n2"),
                **ASKED,
            ),
            {},
            [("n2",)],
        ),
    ],
)
def test_who_starts(why: str, seen: Observed, fields: dict[str, Any], nodes: list[tuple[str, ...]]) -> None:
    actions = p.plan(claim(spec(**fields)), seen, NOW).actions
    assert [action.nodes for action in made(actions)] == nodes, why
    assert all(bool(action.recapture) == bool(action.nodes) for action in made(actions))


def test_the_order_comes_though_an_artifact_is_there_and_even_if_the_replica_has_left_the_barrier() -> None:
    late = PodReport(start=c.START_COLD, state="Serving", reason=R.RECAPTURE)
    for replica in (seed(), seed(report=late, ready=True)):
        [order] = p.plan(claim(), see(serving("a"), replica, contents=BEFORE, **ASKED), NOW).actions
        assert order == p.CreateContent(replica, "node", "r1")
    other = seed(recapture="r0")
    assert not names(list(p.plan(claim(), see(other, contents=BEFORE, **ASKED), NOW).actions), p.CreateContent)


def test_ordinary_orders_carry_the_request_too() -> None:
    """Else an artifact that was taken after the request would be taken once more."""
    [order] = [a for a in p.plan(claim(), see(pod("s"), **ASKED), NOW).actions if isinstance(a, p.CreateContent)]
    assert order.recapture == "r1"


@pytest.mark.parametrize(
    ("why", "replica", "contents", "gone"),
    [
        ("captured", seed(), (*BEFORE, after(captured=True)), True),
        ("failed", seed(), (*BEFORE, after(failed=True)), True),
        ("under way", seed(), (*BEFORE, after()), False),
        ("it took too long", seed(created=NOW - 600), (*BEFORE, after()), True),
        ("not scheduled: patience", seed(node=None, created=NOW - 9000), BEFORE, False),
        ("bound to a node where nothing is to be done", seed(node=None, only=frozenset({"n2"})), BEFORE, True),
        ("another request", seed(recapture="r0"), BEFORE, True),
        ("its agent has gone", seed(node="n2"), BEFORE, True),
    ],
)
def test_the_extra_replica_goes_when_it_has_done_its_part(why: str, replica: Replica, contents: Any, gone: bool) -> None:
    seen = see(serving("a", mode=c.START_RESTORE), replica, contents=contents, nodes=("node", "n2"), **ASKED)
    assert names(list(p.plan(claim(), seen, NOW).actions), p.DeletePod) == (["seed"] if gone else []), why


def test_its_time_is_up_without_an_event() -> None:
    seen = see(serving("a"), seed(created=NOW - 100), contents=(*BEFORE, after()), **ASKED)
    assert p.plan(claim(), seen, NOW).requeue_after == pytest.approx(500.1)


@pytest.mark.parametrize(
    ("why", "replicas", "unavailable", "removed", "created"),
    [
        ("one makes room", [serving("a"), serving("b")], 1, ["b"], []),
        ("one is gone: the seed comes in its place", [serving("a")], 1, [], [HOME]),
        ("it starts: nobody else goes", [serving("a"), seed()], 1, [], []),
        ("one that does not serve is no loss", [serving("a"), pod("b")], 1, ["b"], []),
        ("none can be spared now", [serving("a"), pod("b"), serving("c")], 1, ["b"], []),
    ],
)
def test_without_surge_it_takes_the_place_of_a_replica(
    why: str, replicas: list[Replica], unavailable: int, removed: list[str], created: list[tuple[str, ...]]
) -> None:
    there = [dataclasses.replace(item, created=NOW - 50 + i) for i, item in enumerate(replicas)]
    wanted = {"replicas": max(2, len(there)), "rollout": {"maxSurge": 0, "maxUnavailable": unavailable}}
    contents = (*BEFORE, after()) if any(item.recapture for item in there) else BEFORE
    actions = p.plan(claim(spec(**wanted)), see(*there, contents=contents, **ASKED), NOW).actions
    assert names(list(actions), p.DeletePod) == removed, why
    assert [action.nodes for action in made(actions)] == created, why


def test_the_old_artifact_goes_when_the_new_one_is_there_and_not_before() -> None:
    def removed(*contents: Any, **fields: Any) -> list[str]:
        seen = see(serving("a"), contents=contents, **ASKED)
        return names(list(p.plan(claim(spec(**fields)), seen, NOW).actions), p.DeleteContent)

    assert removed(*BEFORE, after()) == []
    assert removed(*BEFORE, after(captured=True)) == ["before"]
    back = after(captured=True, captured_at=NOW - 9000)
    assert removed(*BEFORE, back) == ["before"], "though the node's clock was set back"
    assert removed(*BEFORE, after(failed=True)) == [], "the memory of the try"
    many = [after(f"f{i}", failed=True, captured_at=NOW - i) for i in range(3)]
    assert removed(*BEFORE, *many, capture={"retries": 1}) == ["f2"]
    assert removed(*BEFORE, *many, after(captured=True), capture={"retries": 1}) == ["f0", "f1", "f2", "before"]


@pytest.mark.parametrize(
    ("seen", "fields", "expected"),
    [
        (see(serving("a"), contents=BEFORE, **ASKED), {}, ("Waiting", "a replica is to start cold on node")),
        (
            see(serving("a"), seed(), contents=(*BEFORE, after()), **ASKED),
            {},
            ("Running", "replica seed starts cold on node node"),
        ),
        (
            see(serving("a"), seed(node=None, unschedulable="no GPU"), contents=BEFORE, **ASKED),
            {},
            ("Running", "not scheduled: no GPU"),
        ),
        (see(serving("a"), contents=(after(captured=True),), **ASKED), {}, ("Done", "taken again on 1 node: node")),
        (
            see(serving("a"), contents=(*BEFORE, after(failed=True, reason=R.DUMP_FAILED, message="boom")), **ASKED),
            {"capture": {"retries": 0}},
            ("Failed", "after on node node failed: DumpFailed: boom; the artifact from before stays in use"),
        ),
        (see(contents=BEFORE, **ASKED), {"replicas": 0}, ("Waiting", "0 replicas are wanted")),
        (see(serving("a"), contents=BEFORE, agents=(), **ASKED), {}, ("Waiting", "no agent is ready on node")),
        (
            see(serving("a"), contents=BEFORE, **ASKED),
            {"capture": {"policy": "Disabled"}},
            ("Waiting", "capture.policy is Disabled"),
        ),
        (see(serving("a"), contents=(content("x"),), **ASKED), {}, ("Running", "a replica is being captured")),
    ],
)
def test_status_tells_where_it_stands(seen: Observed, fields: dict[str, Any], expected: tuple[str, str]) -> None:
    found, message = phase(seen, **fields)
    assert found == expected[0]
    assert expected[1] in message


@pytest.mark.parametrize("replica", [seed(), seed(ready=True), seed(node=None, unschedulable="no GPU")])
def test_the_snapshot_stays_ready_meanwhile(replica: Replica) -> None:
    made = tell(see(serving("a"), replica, contents=(*BEFORE, after()) if replica.node else BEFORE, **ASKED))
    conditions = {item.type: (item.status, item.reason) for item in made.conditions or []}
    assert conditions[c.READY] == ("True", R.ALL_REPLICAS_READY)
    assert conditions[c.PROGRESSING] == ("True", R.RECAPTURING)
    assert conditions[c.DEGRADED] == ("False", R.AS_EXPECTED)
    assert (made.ready, made.replicas) == ("1/1", 2)


def test_without_a_request_there_is_nothing_to_tell() -> None:
    assert tell(see(serving("a"), contents=BEFORE)).recapture is None
    assert NEW.identity == BEFORE[0].identity
