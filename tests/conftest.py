"""What all suites share: a failed test with a cluster tells what a person would look at first."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Generator

import pytest

from tests.cluster import Cluster
from tests.system import diagnose


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print the state of the cluster under a failed test, before its fixtures clean it away."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.when == "call" and report.failed and isinstance(cluster, Cluster):
        with contextlib.redirect_stdout(io.StringIO()) as text:
            diagnose(cluster)
        report.sections.append(("cluster", text.getvalue()))
    return report
