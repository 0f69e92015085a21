"""The suites' lives, and at the end the table of what they tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from .cases import CASES, Cases
from .world import Live, Plan, Scenario, World, lived


@pytest.fixture
def cases() -> Cases:
    """Of the whole run."""
    return CASES


@pytest.fixture
def live(tmp_path: Path) -> Live:
    """Runs a scenario in a cluster of its own."""

    def one(scenario: Scenario, plan: Plan | None = None) -> World:
        return lived(tmp_path / "w", scenario, plan)

    return one


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table."""
    if CASES.tried:
        terminalreporter.section("faults")
        for line in CASES.lines():
            terminalreporter.write_line(line)
