"""Autoscaling by vLLM's own metrics: as in `make demo-autoscale`."""

from __future__ import annotations

import pytest

from tests import autoscale
from tests.cluster import Cluster, monitoring
from tests.cluster.progress import Progress
from tests.system import connect


@pytest.fixture
def monitored(cluster: Cluster) -> Cluster:
    """The cluster with Prometheus and its adapter; they stay, for they disturb nobody."""
    monitoring.install(cluster, Progress())
    return cluster


async def test_load_scales_up_and_down_and_no_request_fails(monitored: Cluster) -> None:
    with monitored.enter_network():
        result = await autoscale.run(monitored)
        async with connect(monitored) as system:
            system.delete(autoscale.NAME)
            await system.wait_gone(autoscale.NAME)
    autoscale.show(result)
    assert autoscale.verdict(result) == []
    assert all(count > 0 for count in result["requests"].values())
