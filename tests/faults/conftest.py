"""Counts what the suites cut, and says it at the end: an enumeration that found nothing to cut would pass too."""

from __future__ import annotations

from collections import Counter

import pytest

COUNTS: Counter[str] = Counter()


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> Counter[str]:
    """The number of cases by suite; a test adds to its own."""
    return COUNTS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table."""
    if COUNTS:
        failed = len(terminalreporter.stats.get("failed", []))
        terminalreporter.section("faults")
        for name, count in sorted(COUNTS.items()):
            terminalreporter.write_line(f"{count:6d}  {name}")
        terminalreporter.write_line(f"{sum(COUNTS.values()):6d}  in all; failures: {failed}")
