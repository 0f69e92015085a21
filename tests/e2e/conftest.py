"""One real cluster for the suite, with real vLLM and SmolLM2-135M; what `make demo` uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.system import suite_cluster

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this suite is slow."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("slow")


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """The cluster, taken down whatever happens."""
    with suite_cluster("e2e-tests", ["child"], model=True) as made:
        yield made
