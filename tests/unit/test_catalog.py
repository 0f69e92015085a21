"""The catalog of conditions, reasons and events says what the code does."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import reference
from vllmsnapshot.api import catalog
from vllmsnapshot.api import constants as c
from vllmsnapshot.api.types import Condition
from vllmsnapshot.controller import events

OPERATOR = Path(__file__).parents[2] / "operator" / "vllmsnapshot"
REASONS = {name: value for name, value in vars(c.Reason).items() if name.isupper()}
CONDITIONS = {(doc.kind, doc.type): doc for doc in catalog.CONDITIONS}


def test_every_reason_has_a_meaning() -> None:
    assert set(catalog.REASONS) == set(REASONS.values()), "describe it in api/catalog.py"
    assert all(meaning.endswith(".") for meaning in catalog.REASONS.values())


def test_every_condition_is_described_and_names_reasons_that_exist() -> None:
    assert len(CONDITIONS) == len(catalog.CONDITIONS)
    kinds = {
        c.READY,
        c.GPU_READY,
        c.SNAPSHOT_READY,
        c.PROGRESSING,
        c.DEGRADED,
        c.STALE,
        c.CAPTURED,
        c.FAILED,
        c.QUARANTINED,
        c.SLOWER,
    }
    assert {doc.type for doc in catalog.CONDITIONS} == kinds | {c.CONDITION_VERIFIED}
    for doc in catalog.CONDITIONS:
        assert len(doc.reasons) == len(set(doc.reasons))
        assert set(doc.reasons) <= set(catalog.REASONS)


def functions(path: str) -> dict[str, ast.AST]:
    tree = ast.parse((OPERATOR / path).read_text())
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def reasons(node: ast.AST) -> set[str]:
    """Every `R.X`, `Reason.X`, `c.Reason.X` within."""
    found = set()
    for item in ast.walk(node):
        if isinstance(item, ast.Attribute) and item.attr in REASONS:
            value = item.value
            name = value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else ""
            if name in ("R", "Reason"):
                found.add(REASONS[item.attr])
    return found


@pytest.mark.parametrize(
    ("path", "names", "kind", "condition"),
    [
        ("controller/status.py", ("_ready", "_invalid"), "VLLMSnapshot", c.READY),
        ("controller/status.py", ("_snapshot_ready",), "VLLMSnapshot", c.SNAPSHOT_READY),
        ("controller/status.py", ("_progressing", "_invalid"), "VLLMSnapshot", c.PROGRESSING),
        ("controller/status.py", ("_stale",), "VLLMSnapshot", c.STALE),
        ("agent/report.py", ("node_status",), "VLLMSnapshotNode", ""),
    ],
)
def test_conditions_have_the_reasons_that_the_code_gives_them(
    path: str, names: tuple[str, ...], kind: str, condition: str
) -> None:
    found = {reason for name in names for reason in reasons(functions(path)[name])}
    listed = {reason for doc in catalog.CONDITIONS if doc.kind == kind and condition in ("", doc.type) for reason in doc.reasons}
    assert found == listed


def test_degraded_has_the_reasons_of_the_status_and_of_refused_actions() -> None:
    status, execute = functions("controller/status.py"), functions("controller/execute.py")
    found = reasons(status["_degraded"]) | reasons(status["_invalid"])
    for name in ("_refusal", "_create_pod", "_post_pod"):
        found |= reasons(execute[name])
    assert found == set(CONDITIONS["VLLMSnapshot", c.DEGRADED].reasons)


def told() -> Iterator[tuple[str, str, bool]]:
    """Reason, action and whether it warns, of every event that the agent's code writes; a reason that is no constant is empty."""
    trees = [ast.parse(path.read_text()) for path in sorted((OPERATOR / "agent").glob("*.py"))]
    for node in itertools.chain.from_iterable(map(ast.walk, trees)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "tell":
            _, reason, action, *_ = node.args
            assert isinstance(action, ast.Constant)
            found = reasons(reason)
            yield found.pop() if found else "", str(action.value), any(k.arg == "warning" for k in node.keywords)


def test_the_agents_events_are_those_that_its_code_writes() -> None:
    listed = {(doc.reason, doc.action, doc.warning) for doc in catalog.AGENT_EVENTS}
    # The reason of a refused start is the decision's.
    refused = {(reason, "Start", True) for reason in (c.Reason.RESTORE_REQUIRED, *c.DISCARD)}
    written = {event for event in told() if event[0]}
    assert [event for event in told() if not event[0]] == [("", "Start", True)]
    assert listed == written | refused


@pytest.mark.parametrize("kind", sorted(events.GOOD))
def test_the_page_says_which_events_warn(kind: str) -> None:
    doc = CONDITIONS["VLLMSnapshot", kind]
    for reason in doc.reasons:
        good = reason == c.Reason.AS_EXPECTED
        status = events.GOOD[kind] if good else "False" if events.GOOD[kind] == "True" else "True"
        before = Condition(type=kind, status="Unknown", last_transition_time="2027-01-15T08:00:00Z", reason="Before", message="")
        after = before.model_copy(update={"status": status, "reason": reason, "message": "text"})
        (note,) = events.transitions([before], [after])
        assert note.warning == (reason in reference.warnings(doc)), reason
        assert note.reason == reason
