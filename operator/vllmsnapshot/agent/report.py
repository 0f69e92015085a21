"""What the agent says through the API: reports, conditions, statuses and events, built as plain objects. Pure.

The times of a report are the modification times of the control files, so an agent that was restarted reports the same numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vllmsnapshot_child.protocol import HELLO, READY, RELEASE, RESTORED, SERVING, START

from .. import __version__
from ..api import constants as c
from ..api.constants import Reason
from ..api.types import (
    ArtifactRecord,
    ArtifactWeights,
    Condition,
    HeldArtifact,
    PodReport,
    RestoreCounts,
    Verification,
    VLLMSnapshotContentStatus,
    VLLMSnapshotNodeStatus,
    duration,
)
from ..environment import CPU_FLAGS
from ..objects import micro_time, rfc3339
from . import breakeven
from .decide import View, on_trust, restoring, verdict
from .ledger import Entry
from .nodeops import Health, PodRef, Stored
from .space import Usage

Object = dict[str, Any]
State = Literal["Deciding", "Restoring", "Starting", "AtBarrier", "Capturing", "Released", "Serving", "Failed"]

MAX_PHASES = 40

BEFORE_BARRIER = frozenset(
    {"import_s", "engine_s", "canary_s", "release_s", "rehearsal_s", "prebuild_s", "release_again_s", "barrier_s"}
)
"""Phases of the child up to the barrier: a restored process remembers them of the pod that it was captured in."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The pod condition of the readiness gate."""

    status: Literal["True", "False"]
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Said:
    """All that the pod shall say of itself now."""

    report: PodReport
    start_mode: str | None
    verified: Verified


# --- pod -------------------------------------------------------------------------------------------------------------


def say(v: View, before: PodReport) -> Said | None:
    """Report and condition for what is seen; `before` is the last report. None while there is no container to speak of."""
    f = v.files
    if f.hello is None:
        if not before.incarnation:
            return _silent(v) if on_trust(v) else None
        # The container is between two lives: what was verified is gone, and nothing else is known yet.
        return Said(
            report=before.model_copy(update={"state": "Starting"}) if before.state != "Failed" else before,
            start_mode=before.start or None,
            verified=Verified(status="False", reason=Reason.STARTING, message="the container is being restarted"),
        )
    same = before.incarnation == f.incarnation
    start, reason, message, content = _start(v)
    state, verified = _state(v)
    if state == "Failed" and f.failed is not None and f.serving is None:
        message = f"{message}; {f.failed.reason}: {f.failed.message}" if message else f"{f.failed.reason}: {f.failed.message}"
    restarts = before.restarts if same or not before.incarnation else before.restarts + 1
    report = PodReport(
        incarnation=f.incarnation,
        start=start,
        reason=reason,
        message=message[:2000],
        content=content,
        state=state,
        phases=_phases(v, dict(before.phases) if same else {}, restarts),
        serving_at=rfc3339(f.at.get(SERVING) or v.pod.healthy_since or v.now) if state == "Serving" else None,
        restarts=restarts,
    )
    return Said(report=report, start_mode=start or None, verified=verified)


_TRUST = Verified(
    status="True", reason=Reason.VERIFIED, message="started cold; does not report, but the kubelet finds it healthy"
)


def _silent(v: View) -> Said:
    """A container that never said hello, and serves."""
    report = PodReport(
        start="cold",
        reason=Reason.UNATTENDED,
        message="; ".join(v.files.problems.values())[:2000] or "no container has said hello",
        state="Serving",
        serving_at=rfc3339(v.pod.healthy_since or v.now),
    )
    return Said(report=report, start_mode="cold", verified=_TRUST)


def _start(v: View) -> tuple[Literal["", "cold", "restore"], str, str, str | None]:
    """How this incarnation started: mode, reason, message, content."""
    f = v.files
    start = f.start
    if f.restored is not None:
        return "restore", Reason.RESTORED, "", f.restored.content
    if start is None:
        late = v.age(HELLO) >= v.pod.decision_timeout_s or f.serving is not None or f.ready is not None
        return ("cold", Reason.UNATTENDED, "no agent answered in time", None) if late else ("", "", "", None)
    if start.mode == "restore":
        if restoring(v):
            return "", start.reason, start.message, start.content
        return "cold", Reason.RESTORE_TIMEOUT, f"{start.content} was not restored in {start.timeout_s:g} s", None
    if start.mode == "refuse":
        return "", start.reason, start.message, None
    return "cold", start.reason, start.message, None


def _state(v: View) -> tuple[State, Verified]:
    f = v.files
    starting = Verified(status="False", reason=Reason.STARTING, message="has not answered the canary prompt yet")
    if f.serving is not None:
        result, difference = verdict(v)
        if result == "wrong":
            return "Failed", Verified(status="False", reason=Reason.CANARY_MISMATCH, message=difference[:1000])
        how = "restored" if f.restored is not None else "started cold"
        proof = "the answer equals the recorded one" if result == "same" else "there is no answer to compare with"
        return "Serving", Verified(status="True", reason=Reason.VERIFIED, message=f"{how}; {proof}")
    if on_trust(v):
        return "Serving", _TRUST
    if f.failed is not None:
        why = f"{f.failed.reason}: {f.failed.message}"[:1000]
        return "Failed", Verified(status="False", reason=Reason.ENGINE_FAILED, message=why)
    if f.start is not None and f.start.mode == "refuse":
        return "Failed", Verified(status="False", reason=f.start.reason, message=f.start.message[:1000])
    if f.release is not None:
        return "Released", starting
    if f.restored is not None or restoring(v):
        return "Restoring", starting
    if f.hold is not None:
        return "Capturing", starting
    if f.ready is not None:
        return "AtBarrier", starting
    if f.start is None and v.age(HELLO) < v.pod.decision_timeout_s:
        return "Deciding", starting
    return "Starting", starting


def _phases(v: View, phases: dict[str, float], restarts: int) -> dict[str, float]:
    """Seconds by phase. What an earlier report of this incarnation had is kept: a cold start after a restore erases nothing."""
    f, at = v.files, v.files.at

    def span(name: str, since: float | None, until: float | None) -> None:
        if since and until:
            phases[name] = max(0.0, until - since)

    if restarts == 0:
        span("schedule_s", v.pod.created, v.pod.scheduled)
        span("container_s", v.pod.scheduled, at.get(HELLO))
    if f.start is not None:
        span("decide_s", at.get(HELLO), at.get(START))
    phases |= {_phase(k): x for k, x in f.restore_phases.items()}
    found = v.attempt()
    if found is not None and f.restored is not None:
        span("queue_s", at.get(START), found[1].at)
        span("restore_s", found[1].at, at.get(RESTORED))
    if f.ready is not None:
        span("ready_s", at.get(START) or at.get(HELLO), at.get(READY))
        phases |= {_phase(k): x for k, x in f.ready.phases.items()}
        span("barrier_s", at.get(READY), at.get(RELEASE))
    if f.serving is not None:
        stale = BEFORE_BARRIER if f.restored is not None else frozenset()
        phases |= {_phase(k): x for k, x in f.serving.phases.items() if _phase(k) not in stale}
        span("release_to_serving_s", at.get(RELEASE), at.get(SERVING))
        span("total_s", (v.pod.created if restarts == 0 else None) or at.get(HELLO), at.get(SERVING))
    return {k: round(x, 3) for k, x in list(phases.items())[:MAX_PHASES] if math.isfinite(x) and -1e9 < x < 1e9}


def _phase(name: str) -> str:
    return name if name.endswith("_s") else f"{name}_s"


def report_json(report: PodReport) -> str:
    """As the annotation holds it: the same report is the same text."""
    return report.model_dump_json(by_alias=True, exclude_none=True)


def pod_metadata(ref: PodRef, said: Said) -> Object:
    """The whole of what the agent holds in a pod's metadata, for one server-side apply."""
    meta: Object = {
        "name": ref.name,
        "namespace": ref.namespace,
        "uid": ref.uid,
        "annotations": {c.ANNOTATION_REPORT: report_json(said.report)},
    }
    if said.start_mode:
        meta["labels"] = {c.LABEL_START_MODE: said.start_mode}
    return {"metadata": meta}


def pod_condition(ref: PodRef, verified: Verified, current: Mapping[str, Any], now: float) -> Object:
    """The condition, for one server-side apply of pods/status. The transition time moves only with the status."""
    kept = current.get("lastTransitionTime") if current.get("status") == verified.status else None
    return {
        "metadata": {"name": ref.name, "namespace": ref.namespace, "uid": ref.uid},
        "status": {
            "conditions": [
                {
                    "type": c.CONDITION_VERIFIED,
                    "status": verified.status,
                    "reason": verified.reason,
                    "message": verified.message,
                    "lastTransitionTime": kept or rfc3339(now),
                }
            ]
        },
    }


# --- content ---------------------------------------------------------------------------------------------------------


def content_status(
    old: VLLMSnapshotContentStatus,
    stored: Stored | None,
    entry: Entry,
    *,
    failed: tuple[str, str] | None,
    lost: bool,
    now: float,
    verification: Verification | None = None,
) -> VLLMSnapshotContentStatus:
    """The whole status of a content out of store and ledger.

    Captured and Failed are decided once: what `old` says of them stays. `failed` is why the order cannot be fulfilled,
    `lost` that a captured artifact is no longer in the store, `verification` a newer one than `old` tells of.
    """
    conditions = {x.type: x for x in old.conditions or []}
    artifact, phases, environment = old.artifact, old.phases, old.environment
    settled = any(x.status == "True" for x in (conditions.get(c.CAPTURED), conditions.get(c.FAILED)) if x is not None)
    if not settled and failed is not None:
        _set(conditions, c.FAILED, failed[0], failed[1], now)
    elif not settled and stored is not None:
        _set(conditions, c.CAPTURED, Reason.CAPTURED, f"{stored.bytes} bytes", now)
        artifact = ArtifactRecord(
            bytes=stored.bytes,
            digest=stored.digest[:128],
            captured_at=stored.captured_at,
            # The engine's own words: what is none of the two would make the whole status unacceptable.
            weights=ArtifactWeights(stored.weights) if stored.weights in list(ArtifactWeights) else None,
            weights_reason=stored.weights_reason[:1024] or None,
            cold_start=duration(stored.cold_s) if stored.cold_s is not None else None,
        )
        phases = {str(k)[:63]: duration(x) for k, x in list(stored.phases.items())[:32]}
        environment = _facts(stored.environment)
    if entry.quarantined is not None:
        _set(conditions, c.QUARANTINED, entry.quarantined.reason, entry.quarantined.message, now)
    elif lost:
        _set(conditions, c.QUARANTINED, Reason.ARTIFACT_MISSING, "the files are not in the store of the node", now)
    slower = breakeven.look(entry, stored.cold_s) if stored is not None else None
    if slower is not None:
        _set(conditions, c.SLOWER, Reason.RESTORE_SLOWER, slower.why, now, again=True)
    elif stored is not None and c.SLOWER in conditions:
        _set(conditions, c.SLOWER, Reason.AS_EXPECTED, "restores are quicker than a cold start again", now, status="False")
    restores = old.restores
    if entry.succeeded or entry.failed:
        restores = RestoreCounts(
            succeeded=entry.succeeded,
            failed=entry.failed,
            consecutive_failures=entry.consecutive,
            last_failure=entry.last_failure[:4096] or None,
            last_succeeded_at=rfc3339(last) if (last := entry.last_succeeded_at) else restores and restores.last_succeeded_at,
        )
    return VLLMSnapshotContentStatus(
        conditions=list(conditions.values()) or None,
        artifact=artifact,
        phases=phases,
        environment=environment,
        restores=restores,
        verification=verification or old.verification,
    )


def _facts(found: Mapping[str, str]) -> dict[str, str]:
    """Facts as the API takes them. A list of CPU flags that is too long is left out: half of it would be that of another CPU."""
    told = {k: x for k, x in found.items() if k != CPU_FLAGS or len(x) <= c.FACT_LENGTH}
    return {str(k)[:63]: str(x)[: c.FACT_LENGTH] for k, x in list(told.items())[:64]}


def _set(
    conditions: dict[str, Condition],
    kind: str,
    reason: str,
    message: str,
    now: float,
    *,
    status: Literal["True", "False"] = "True",
    again: bool = False,
) -> None:
    """Give a condition this status. One that has it already keeps its time and its first reason; with `again` only its time."""
    old = conditions.get(kind)
    same = old is not None and old.status == status
    if not same or again:
        since = old.last_transition_time if old is not None and same else rfc3339(now)
        conditions[kind] = Condition(
            type=kind, status=status, last_transition_time=since, reason=word(reason), message=message[:32768]
        )


def word(reason: str) -> str:
    """A reason that the API accepts (a word); one from elsewhere that is none becomes `Error`."""
    ok = reason[:1].isalpha() and reason.isascii() and reason.replace("_", "a").isalnum() and len(reason) <= 128
    return reason if ok else "Error"


# --- node ------------------------------------------------------------------------------------------------------------


def node_status(
    health: Health, usage: Usage, artifacts: Iterable[Stored], in_flight: int, old: VLLMSnapshotNodeStatus, now: float
) -> VLLMSnapshotNodeStatus:
    """What the agent knows of its node."""

    def condition(kind: str, good: bool, wrong: str, message: str) -> Condition:
        status: Literal["True", "False"] = "True" if good else "False"
        kept = next((x for x in old.conditions or [] if x.type == kind and x.status == status), None)
        return Condition(
            type=kind,
            status=status,
            last_transition_time=kept.last_transition_time if kept is not None else rfc3339(now),
            reason=Reason.AS_EXPECTED if good else wrong,
            message=message[:32768],
        )

    fine = "all checks passed" if not health.gpu else "all checks but those of the GPU passed"
    conditions = [condition(c.READY, health.capable, Reason.NODE_NOT_CAPABLE, health.message or (fine if health.capable else ""))]
    if health.gpu is not None:
        message = health.gpu or "replicas with a GPU can be captured and restored"
        conditions.append(condition(c.GPU_READY, not health.gpu, Reason.GPU_UNAVAILABLE, message))
    return VLLMSnapshotNodeStatus(
        conditions=conditions,
        agent_version=__version__,
        protocol_version=c.NODE_PROTOCOL,
        boot_id=health.boot_id[:64] or None,
        checks=list(health.checks)[:64] or None,
        environment=_facts(health.environment) or None,
        store_bytes_used=usage.used,
        store_bytes_free=usage.free,
        store_bytes_quota=usage.quota,
        artifacts=[HeldArtifact(content=x.content, bytes=x.bytes) for x in sorted(artifacts, key=lambda x: x.content)[:1024]]
        or None,
        restores_in_flight=in_flight,
    )


FREE_STEP = 1 << 30
"""The free space of the store moves all the time: only a change of a GiB is news."""


def node_changed(old: VLLMSnapshotNodeStatus, new: VLLMSnapshotNodeStatus) -> bool:
    """Whether the status is worth a write."""
    a, b = ({k: x for k, x in s.dump().items() if k not in ("storeBytesFree", "storeBytesUsed")} for s in (old, new))
    free = abs((new.store_bytes_free or 0) - (old.store_bytes_free or 0))
    used = abs((new.store_bytes_used or 0) - (old.store_bytes_used or 0))
    return a != b or free >= FREE_STEP or used >= FREE_STEP


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event on a pod and on its snapshot, or on the snapshot alone. `key` tells apart what happens more than once (an incarnation, a content)."""

    pod: PodRef | None
    namespace: str
    snapshot: str
    snapshot_uid: str
    reason: str
    action: str
    note: str
    key: str
    warning: bool = False


def events(event: Event, node: str, now: float) -> list[Object]:
    """The objects to create. Their names follow from what happened: written twice, it is one event."""
    snapshot = {
        "apiVersion": c.API_VERSION,
        "kind": "VLLMSnapshot",
        "namespace": event.namespace,
        "name": event.snapshot,
        "uid": event.snapshot_uid,
    }
    pairs: list[tuple[Object, Object | None]] = [(snapshot, None)]
    uid = ""
    if event.pod is not None:
        uid = event.pod.uid
        pod = {"apiVersion": "v1", "kind": "Pod", "namespace": event.namespace, "name": event.pod.name, "uid": uid}
        pairs = [(pod, snapshot), (snapshot, pod)]
    made = []
    for regarding, related in pairs:
        digest = hashlib.sha256(f"{regarding['uid']} {uid} {event.reason} {event.key}".encode()).hexdigest()[:16]
        made.append(
            {
                "apiVersion": "events.k8s.io/v1",
                "kind": "Event",
                "metadata": {"namespace": event.namespace, "name": f"{str(regarding['name'])[:200]}.{digest}"},
                "eventTime": micro_time(now),
                "reportingController": f"{c.GROUP}/agent",
                "reportingInstance": node[:128],
                "action": event.action,
                "reason": event.reason,
                "type": "Warning" if event.warning else "Normal",
                "note": event.note[:1000],
                "regarding": regarding,
                **({"related": related} if related is not None else {}),
            }
        )
    return made
