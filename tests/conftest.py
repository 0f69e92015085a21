"""What all suites share: access to the cluster of the suite (its fixture `cluster`), and a failed test with a cluster tells what
a person would look at first."""

from __future__ import annotations

import contextlib
import io
from collections.abc import AsyncIterator, Generator

import pytest

from tests.cluster import Cluster
from tests.nodeview import NodeView
from tests.system import System, connect, diagnose


@pytest.fixture
def node(cluster: Cluster) -> NodeView:
    """The node from outside."""
    return NodeView(cluster)


@pytest.fixture
async def system(cluster: Cluster) -> AsyncIterator[System]:
    """API and HTTP access, from within the cluster's network."""
    with cluster.enter_network():
        async with connect(cluster) as connected:
            yield connected


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
