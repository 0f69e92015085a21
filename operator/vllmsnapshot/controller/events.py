"""Events of the claim: one per transition of a condition, written after the status that shows it.

An event may be lost (a crash between the two writes) and is never the only place where something is said.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..api import constants as c
from ..api.types import Condition
from ..objects import digest, micro_time
from ..world import Claim

REPORTER = f"{c.GROUP}/operator"
WINDOW_S = 300.0
"""The same said again within this time (seconds) is one event: a condition that flaps must not fill the cluster with events."""
NOTE_LIMIT = 1024
"""Limit of the API server (bytes, as it counts runes: characters)."""

GOOD = {c.READY: "True", c.SNAPSHOT_READY: "True", c.DEGRADED: "False", c.STALE: "False"}
ACTION = {c.READY: "Scale", c.SNAPSHOT_READY: "Capture", c.DEGRADED: "Reconcile", c.STALE: "Capture"}
WARN = {c.Reason.CAPTURE_FAILED, c.Reason.ARTIFACT_QUARANTINED, c.Reason.INVALID_SPEC}


@dataclass(frozen=True)
class Note:
    """What an event says."""

    warning: bool
    action: str
    reason: str
    text: str


def transitions(before: Iterable[Condition], after: Iterable[Condition]) -> list[Note]:
    """What changed between two statuses: a condition's status or reason. A message alone is no transition.

    Good conditions that are new, and reasons of being well that change, say nothing that anybody waits for.
    """
    last = {item.type: item for item in before}
    notes = []
    for item in after:
        if item.type not in GOOD:
            continue
        was = last.get(item.type)
        good = item.status == GOOD[item.type]
        if was is None:
            if item.type in (c.DEGRADED, c.STALE) and good:
                continue
        elif (was.status, was.reason) == (item.status, item.reason):
            continue
        warning = (item.type in (c.DEGRADED, c.STALE) and not good) or item.reason in WARN
        text = item.message or f"{item.type} is {item.status} again"
        notes.append(Note(warning, ACTION[item.type], item.reason, text))
    return list(dict.fromkeys(notes))


def build(claim: Claim, note: Note, now: float, instance: str) -> dict[str, Any]:
    """The events.k8s.io/v1 object. Its name is a function of what it says and in which window, so that written twice it is one."""
    moment = micro_time(now)
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {
            "name": f"{claim.name[:200].rstrip('-.')}.{digest([claim.uid, note.reason, note.text, str(int(now // WINDOW_S))])[:16]}",
            "namespace": claim.namespace,
        },
        "eventTime": moment,
        "reportingController": REPORTER,
        "reportingInstance": instance[:128] or "unknown",
        "action": note.action,
        "reason": note.reason,
        "type": "Warning" if note.warning else "Normal",
        "note": note.text[:NOTE_LIMIT],
        "regarding": {
            "apiVersion": c.API_VERSION,
            "kind": "VLLMSnapshot",
            "namespace": claim.namespace,
            "name": claim.name,
            "uid": claim.uid,
        },
    }
