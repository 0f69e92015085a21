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


PORTS = st.integers(1024, 65535)
SPANS = st.tuples(PORTS, st.integers(0, 20)).map(lambda t: PortRange(start=t[0], end=min(65535, t[0] + t[1])))


@given(span=SPANS, data=st.data())
def test_assign_gives_a_free_one_while_there_is_one(span: PortRange, data: st.DataObject) -> None:
    every = set(range(span.start, span.end + 1))
    used = data.draw(st.sets(st.sampled_from(sorted(every)))) | data.draw(st.sets(PORTS, max_size=5))
    last = data.draw(st.none() | PORTS | st.sampled_from(sorted(every)))
    port = ports.assign(span, used, last)
    assert port in every - used if every - used else port is None


@given(span=SPANS)
def test_a_port_comes_again_only_when_all_others_had_their_turn(span: PortRange) -> None:
    """Its last holder may have been deleted without a grace period, and still answer."""
    size, last, given = span.end - span.start + 1, None, []
    for _ in range(2 * size):
        last = ports.assign(span, (), last)
        given.append(last)
    assert given[:size] == given[size:] == list(range(span.start, span.end + 1))


def test_without_a_memory_it_goes_on_after_the_highest() -> None:
    span = PortRange(start=2000, end=2003)
    assert ports.assign(span, [2001]) == 2002
    assert ports.assign(span, [2003]) == 2000
    assert ports.assign(span, [2003], 2000) == 2001
    assert ports.assign(span, [9000]) == 2000
    assert ports.assign(span, [], 9000) == 2000, "of another snapshot's range"


def test_both_ends_belong_to_the_range() -> None:
    span = PortRange(start=2000, end=2001)
    assert ports.assign(span, []) == 2000
    assert ports.assign(span, [2000]) == 2001
    assert ports.assign(span, [2000, 2001]) is None
