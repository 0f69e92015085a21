"""One real cluster for the suite: kubelet, containerd, CRIU, operator and agents from the chart; only vLLM is replaced by the
small engine of tests/node/engine, which is up in a second and whose every answer depends on every byte of its memory. The node has
two fake GPUs (tests/cluster/gpus.py), which replicas without nvidia.com/gpu never see."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.node.snapshot import Make, Snapshot
from tests.nodeview import NodeView
from tests.system import System, suite_cluster


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """The cluster, taken down whatever happens."""
    with suite_cluster("node-tests", ["engine"], gpus=2) as made:
        yield made


@pytest.fixture
async def make(system: System, node: NodeView) -> AsyncIterator[Make]:
    """Apply a VLLMSnapshot of the small engine; it is deleted after the test."""
    async with contextlib.AsyncExitStack() as stack:
        made: list[Snapshot] = []

        async def apply(name: str, **spec: Any) -> Snapshot:
            snapshot = await stack.enter_async_context(Snapshot.applied(system, node, name, **spec))
            made.append(snapshot)
            return snapshot

        yield apply
        for snapshot in made:
            await snapshot.remove()
