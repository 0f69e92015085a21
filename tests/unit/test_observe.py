"""What the operator makes of the lists that all claims share."""

from __future__ import annotations

from typing import Any

import pytest

from vllmsnapshot.api import constants as c
from vllmsnapshot.controller.observe import _view


def agent(node: str | None, ready: str = "True", **meta: Any) -> dict[str, Any]:
    spec = {"nodeName": node} if node else {}
    return {"metadata": {"name": "agent", **meta}, "spec": spec, "status": {"conditions": [{"type": "Ready", "status": ready}]}}


def report(name: str, status: dict[str, Any] | None) -> dict[str, Any]:
    return {"metadata": {"name": name}, **({"status": status} if status is not None else {})}


def test_an_agent_counts_where_it_runs_is_ready_and_stays() -> None:
    agents = [agent("a"), agent("b", "False"), agent("c", deletionTimestamp="2026-01-01T00:00:00Z"), agent(None)]
    assert _view(agents, [], []).agents == {"a"}


@pytest.mark.parametrize(
    ("status", "incapable"),
    [
        (None, False),
        ({}, False),
        ({"conditions": [{"type": "Ready", "status": "True"}]}, False),
        ({"conditions": [{"type": "Ready", "status": "Unknown"}]}, False),
        ({"conditions": [{"type": "Ready", "status": "False", "reason": "NodeNotCapable"}]}, True),
    ],
)
def test_a_node_is_incapable_by_its_agents_word_only(status: dict[str, Any] | None, incapable: bool) -> None:
    assert _view([], [], [report("a", status)]).incapable == ({"a"} if incapable else set())


@pytest.mark.parametrize(
    ("status", "strange"),
    [
        (None, False),
        ({}, False),
        ({"protocolVersion": c.NODE_PROTOCOL}, False),
        ({"protocolVersion": c.NODE_PROTOCOL + 1}, True),
        ({"protocolVersion": 0}, True),
    ],
)
def test_an_agent_of_another_protocol_is_a_stranger(status: dict[str, Any] | None, strange: bool) -> None:
    assert _view([], [], [report("a", status)]).strangers == ({"a"} if strange else set())


def test_facts_that_were_not_reported_are_none() -> None:
    seen = _view([], [{"metadata": {"name": "a"}}], [report("a", {"environment": {"gpuDriver": "580"}}), report("b", None)])
    assert seen.nodes == {"a"}
    assert seen.environments == {"a": {"gpuDriver": "580"}, "b": {}}
