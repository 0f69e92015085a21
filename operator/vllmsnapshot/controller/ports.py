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


def assign(span: PortRange, used: Iterable[int]) -> int | None:
    """The lowest port of `span` (both ends included) that is not used, or None if all are."""
    taken = frozenset(used)
    return next((port for port in range(span.start, span.end + 1) if port not in taken), None)
