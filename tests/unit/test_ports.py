"""Ports of hostNetwork replicas."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from vllmsnapshot.api import constants as c
from vllmsnapshot.api.types import PortRange
from vllmsnapshot.controller import ports


def pod(port: int, *, host_network: bool = True, phase: str = "Running", declared: bool = False) -> dict[str, Any]:
    listed = [{"containerPort": port, "hostPort": port}] if declared else []
    return {
        "metadata": {"annotations": {c.ANNOTATION_PORT: str(port)}},
        "spec": {"hostNetwork": host_network, "containers": [{"ports": listed}]},
        "status": {"phase": phase},
    }


def test_in_use() -> None:
    terminating = pod(4)
    terminating["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    seen = [pod(1), pod(2, host_network=False), pod(3, phase="Failed"), terminating, pod(5, host_network=False, declared=True)]
    assert ports.in_use(seen) == {1, 4, 5}
    assert ports.in_use([{"metadata": {"annotations": {c.ANNOTATION_PORT: "x"}}, "spec": {"hostNetwork": True}}]) == set()


@given(
    span=st.tuples(st.integers(1024, 65535), st.integers(0, 20)).map(
        lambda t: PortRange(start=t[0], end=min(65535, t[0] + t[1]))
    ),
    used=st.sets(st.integers(1024, 65535), max_size=30),
)
def test_assign_is_the_lowest_free_one_or_none(span: PortRange, used: set[int]) -> None:
    free = sorted(set(range(span.start, span.end + 1)) - used)
    assert ports.assign(span, used) == (free[0] if free else None)


def test_both_ends_belong_to_the_range() -> None:
    span = PortRange(start=2000, end=2001)
    assert ports.assign(span, []) == 2000
    assert ports.assign(span, [2000]) == 2001
    assert ports.assign(span, [2000, 2001]) is None
