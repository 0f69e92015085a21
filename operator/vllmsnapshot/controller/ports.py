"""Ports of hostNetwork replicas: each gets one of its own in the whole cluster, since nobody knows yet where it will land."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..api import constants as c
from ..api.types import PortRange


def in_use(pods: Iterable[Mapping[str, Any]]) -> frozenset[int]:
    """The ports that these pods hold on their nodes. Terminating pods count (they hold it to the end), finished ones do not."""
    ports: set[int] = set()
    for pod in pods:
        if (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded"):
            continue
        for container in (pod.get("spec") or {}).get("containers") or []:
            ports.update(port["hostPort"] for port in container.get("ports") or [] if port.get("hostPort"))
        text = str((pod["metadata"].get("annotations") or {}).get(c.ANNOTATION_PORT, ""))
        if (pod.get("spec") or {}).get("hostNetwork") and text.isdigit():
            ports.add(int(text))
    return frozenset(ports)


def assign(span: PortRange, used: Iterable[int], last: int | None = None) -> int | None:
    """The next port of `span` (both ends included) that is not used, or None if all are.

    The next after `last`, the one that was assigned last, in a circle; without it after the highest that is used. Not the lowest free
    one: who held that may be a pod that was just deleted without a grace period, which the kubelet has not ended yet. It would answer
    for its successor, to the kubelet's probes too.
    """
    taken = frozenset(used)
    ports = range(span.start, span.end + 1)
    if last is None:
        last = max((port for port in taken if port in ports), default=span.end)
    after = last - span.start + 1 if last in ports else 0
    return next((port for port in (*ports[after:], *ports[:after]) if port not in taken), None)
