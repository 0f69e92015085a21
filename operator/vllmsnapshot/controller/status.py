"""The status of a claim, from what was observed and what the last actions met. Pure.

Conditions follow kstatus: Ready is True exactly when all that the spec asks for is there (so `helm --wait` and Argo wait for
a rollout), Degraded and Stale are True when somebody should look. A condition's time moves only when its status flips, and
everything else is a function of the input, so that at rest a pass computes what is written already and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..api import constants as c
from ..api.types import (
    Condition,
    RecapturePhase,
    RecaptureStatus,
    SnapshotRecord,
    Timings,
    Toggle,
    VLLMSnapshotSpec,
    VLLMSnapshotStatus,
    duration,
    seconds,
)
from ..objects import rfc3339, timestamp
from ..world import Claim, Content, Observed, Replica, newest
from . import pods
from .plan import Gate, Plan
from .recapture import Recapture
from .tries import again_at, spent

R = c.Reason
MESSAGE_LIMIT = 1024


@dataclass(frozen=True)
class Problem:
    """Something that an action met and that a user can remedy."""

    reason: str
    message: str


@dataclass(frozen=True)
class Verdict:
    """A condition without its times."""

    status: bool
    reason: str
    message: str


def compute(claim: Claim, observed: Observed, todo: Plan, problems: Sequence[Problem], now: float) -> VLLMSnapshotStatus:
    """The whole status. `now` is used only for transition times."""
    if claim.spec is None:
        return _invalid(claim, observed, now)
    spec, hashes = claim.spec, pods.template(claim.spec)
    live = [replica for replica in observed.pods if replica.live]
    extra = _extra(spec, live)
    wanted = [replica for replica in live if replica not in extra]
    updated = [replica for replica in wanted if replica.revision == hashes.revision]
    ready = [replica for replica in wanted if replica.ready]
    recapture = _recapture(spec, todo.again, observed)
    best = newest(item for item in observed.contents if item.identity == hashes.identity and observed.usable(item))
    cold = [replica for replica in live if replica.start_mode == c.START_COLD]
    verdicts = {
        c.READY: _ready(spec, wanted, updated, todo.gate, observed),
        c.SNAPSHOT_READY: _snapshot_ready(spec, hashes.identity, live, best, observed, now),
        c.PROGRESSING: _progressing(spec, wanted, updated, todo.gate, recapture, observed),
        c.DEGRADED: _degraded(claim, spec, hashes.identity, wanted, observed, problems, now),
        c.STALE: _stale(hashes.identity, best, observed),
    }
    return VLLMSnapshotStatus(
        observed_generation=claim.generation,
        conditions=_conditions(claim, verdicts, now),
        replicas=len(live),
        ready_replicas=len(ready),
        restored_replicas=sum(replica.restored for replica in live),
        cold_replicas=len(cold),
        updated_replicas=len(updated),
        ready=f"{len(ready)}/{spec.replicas}",
        selector=pods.selector_text(pods.selector(claim.name)),
        revision=hashes.revision,
        identity=hashes.identity,
        snapshot=_record(best),
        timings=_timings(claim, observed),
        recapture=recapture,
        cold_start_reason=_cold_start_reason(cold),
    )


def _extra(spec: VLLMSnapshotSpec, live: list[Replica]) -> list[Replica]:
    """Replicas that are there on top, to be captured again. They serve nobody, and nobody waits for them."""
    made = sorted((replica for replica in live if replica.recapture), key=lambda item: (item.ready, item.name))
    return made[: max(0, len(live) - spec.replicas)]


def _invalid(claim: Claim, observed: Observed, now: float) -> VLLMSnapshotStatus:
    """The spec cannot be read: pods are left as they are, and only conditions and counts are reported."""
    live = [replica for replica in observed.pods if replica.live]
    message = _short(f"nothing is changed until the spec is corrected: {claim.invalid}")
    verdicts = {
        c.READY: Verdict(False, R.INVALID_SPEC, message),
        c.PROGRESSING: Verdict(False, R.INVALID_SPEC, message),
        c.DEGRADED: Verdict(True, R.INVALID_SPEC, message),
    }
    last = claim.status or VLLMSnapshotStatus()
    return last.model_copy(
        update={
            "observed_generation": claim.generation,
            "conditions": _conditions(claim, verdicts, now),
            "replicas": len(live),
            "ready_replicas": sum(replica.ready for replica in live),
            "restored_replicas": sum(replica.restored for replica in live),
            "cold_replicas": sum(replica.start_mode == c.START_COLD for replica in live),
            "updated_replicas": 0,
            "selector": pods.selector_text(pods.selector(claim.name)),
        }
    )


def changed(claim: Claim, status: VLLMSnapshotStatus) -> bool:
    """Whether this status differs from the written one."""
    return _comparable(status.dump()) != _comparable(claim.raw_status)


def _comparable(status: Mapping[str, object]) -> dict[str, object]:
    conditions = status.get("conditions") or []
    assert isinstance(conditions, list)
    return {**status, "conditions": {item["type"]: item for item in conditions}}


def _conditions(claim: Claim, verdicts: Mapping[str, Verdict], now: float) -> list[Condition]:
    before = {item.type: item for item in claim.conditions}
    result = []
    for kind, verdict in verdicts.items():
        status = "True" if verdict.status else "False"
        last = before.get(kind)
        since = last.last_transition_time if last and last.status == status else rfc3339(now)
        result.append(
            Condition(
                type=kind,
                status="True" if verdict.status else "False",
                observed_generation=claim.generation,
                last_transition_time=since,
                reason=verdict.reason,
                message=_short(verdict.message),
            )
        )
    return result


def _short(text: str) -> str:
    """At most MESSAGE_LIMIT characters: an admission webhook may answer with pages."""
    return text if len(text) <= MESSAGE_LIMIT else text[: MESSAGE_LIMIT - 1] + "…"


# --- conditions --------------------------------------------------------------------------------------------------------


def _ready(spec: VLLMSnapshotSpec, live: list[Replica], updated: list[Replica], gate: Gate, observed: Observed) -> Verdict:
    up = sum(replica.ready for replica in updated)
    if spec.replicas == 0 and not live:
        return Verdict(True, R.SCALED_TO_ZERO, "0 replicas are wanted; the artifacts are kept for the next start")
    old = len(live) - len(updated)
    if up == spec.replicas and not old and len(updated) == spec.replicas:
        return Verdict(True, R.ALL_REPLICAS_READY, f"all {up} replicas are ready")
    if old:
        text = f"{len(updated)} of {spec.replicas} replicas are updated, {up} of them ready; {old} of the old revision left"
        reason = R.ROLLING_UPDATE
    elif not gate.open and len(updated) < spec.replicas:
        text = f"{up} of {spec.replicas} replicas are ready; the others start when the first one has been captured"
        reason = R.WAITING_FOR_SNAPSHOT
    else:
        text, reason = f"{up} of {spec.replicas} replicas are ready", R.REPLICAS_NOT_READY
    waiting = next((replica for replica in sorted(updated, key=lambda item: item.created) if not replica.ready), None)
    if waiting is not None:
        text += "; " + _tell(spec, waiting, observed)
    return Verdict(False, reason, text)


def _homeless(spec: VLLMSnapshotSpec, replica: Replica, observed: Observed) -> str:
    """Why a replica has no node, in the scheduler's words, and what would end a rollout that stands still for it."""
    text = f"replica {replica.name} is not scheduled: {replica.unschedulable}"
    live = [item for item in observed.pods if item.live]
    old = any(item.revision != replica.revision and item.node and item.created <= replica.created for item in live)
    if old and sum(item.available for item in live) <= spec.replicas - spec.rollout.max_unavailable:
        text += (
            f"; with rollout.maxUnavailable {spec.rollout.max_unavailable} no old replica may make room for it: "
            "raise it, lower replicas, or add a node"
        )
    return text


def _tell(spec: VLLMSnapshotSpec, replica: Replica, observed: Observed) -> str:
    """What happens with a replica that is not ready yet, for somebody who sees this for the first time."""
    name, report = f"replica {replica.name}", replica.report
    if replica.unschedulable:
        return _homeless(spec, replica, observed)
    if replica.node is None:
        return f"{name} waits for the scheduler"
    if replica.waiting:
        return f"{name} does not start: {replica.waiting}"
    if replica.verified == "False" and replica.verified_reason in (R.CANARY_MISMATCH, R.ENGINE_FAILED):
        return f"{name} is not verified: {replica.verified_reason}: {replica.verified_message}"
    if replica.report.state == "Serving":
        return f"{name} serves on node {replica.node} and waits for its readiness probe"
    if replica.restored:
        return f"{name} is restored from {report.content or 'an artifact'} on node {replica.node} ({report.state})"
    if replica.start_mode == c.START_COLD:
        order = next((item for item in observed.contents if item.source_uid == replica.uid and item.pending), None)
        follows = "; capture follows" if order and report.state in ("Deciding", "Starting", "AtBarrier") else ""
        why = ": ".join(filter(None, (report.reason, report.message)))
        return f"{name} starts cold on node {replica.node} ({report.state}): {why or 'no reason was reported'}{follows}"
    if replica.node not in observed.agents:
        return f"{name} starts cold on node {replica.node}, where no agent is ready"
    return f"{name} is starting on node {replica.node}"


def _snapshot_ready(
    spec: VLLMSnapshotSpec, identity: str, live: list[Replica], best: Content | None, observed: Observed, now: float
) -> Verdict:
    mine = [item for item in observed.contents if item.identity == identity and not item.deleting]
    if best is not None:
        nodes = sorted({item.node for item in mine if observed.worthwhile(item, spec.restore.policy)})
        if not nodes:
            return Verdict(False, R.RESTORE_SLOWER, f"{best.name} on node {best.node}: {best.slower}")
        return Verdict(True, R.CAPTURED, f"new replicas are restored on {_count(len(nodes), 'node')}: {_few(nodes)}")
    if spec.capture.policy == Toggle.DISABLED:
        return Verdict(False, R.CAPTURE_DISABLED, "capture.policy is Disabled: every replica starts cold")
    pending = newest(item for item in mine if item.pending)
    if pending is not None:
        return Verdict(
            False,
            pending.reason or R.WAITING_FOR_BARRIER,
            f"{pending.name}: {pending.message or f'replica {pending.source} on node {pending.node} is captured when it is up'}",
        )
    lost = newest(item for item in mine if item.failed or item.quarantined)
    if lost is not None:
        reason = R.CAPTURE_FAILED if lost.failed else R.ARTIFACT_QUARANTINED
        more = _tried_again(spec, identity, lost.node, observed, now)
        return Verdict(False, reason, f"{lost.name} on node {lost.node}: {lost.reason}: {lost.message} ({more})")
    if not observed.agents:
        return Verdict(False, R.UNATTENDED, "no agent is ready on any node: every replica starts cold")
    if observed.agents <= observed.strangers:
        where = _few(sorted(observed.agents))
        return Verdict(
            False, R.PROTOCOL_VERSION, f"nothing is ordered from the agents on {where}: they are not of the operator's version"
        )
    if any(replica.released for replica in live):
        return Verdict(False, R.NO_ARTIFACT, "the replicas serve already; the next one that starts cold is captured")
    return Verdict(False, R.NO_ARTIFACT, "the first replica is captured when it is up")


def _tried_again(spec: VLLMSnapshotSpec, identity: str, node: str, observed: Observed, now: float) -> str:
    """When a capture is tried again. Says the same before and after that moment, so that nobody has to write it anew."""
    moment = again_at(spec, observed, identity, node, now)
    if moment is None:
        return "the next cold start tries again"
    return f"the first cold start after {rfc3339(moment)} tries again; recapture to do so now"


def _progressing(
    spec: VLLMSnapshotSpec,
    live: list[Replica],
    updated: list[Replica],
    gate: Gate,
    recapture: RecaptureStatus | None,
    observed: Observed,
) -> Verdict:
    """True while something that is wanted is not there yet, also where nobody but the cluster's owner can bring it on: a node
    that an autoscaler adds ends the wait. What has no place is named here and, as somebody should look, under Degraded."""
    homeless = next((replica for replica in sorted(updated, key=lambda item: item.name) if replica.unschedulable), None)
    if homeless is not None:
        counts = f"{len(updated)} of {spec.replicas} replicas are updated" if len(updated) < len(live) else _counts(spec, live)
        return Verdict(True, R.POD_UNSCHEDULABLE, f"{counts}; {_homeless(spec, homeless, observed)}")
    if len(updated) < len(live):
        return Verdict(True, R.ROLLING_UPDATE, f"{len(updated)} of {spec.replicas} replicas are updated")
    if not gate.open and len(live) < spec.replicas:
        seed = f"replica {gate.seed.name}" if gate.seed else "the first replica"
        return Verdict(True, R.WAITING_FOR_SNAPSHOT, f"{spec.replicas - len(live)} replicas wait for the capture of {seed}")
    if len(live) != spec.replicas or any(not replica.ready for replica in live):
        return Verdict(True, R.REPLICAS_NOT_READY, _counts(spec, live))
    if recapture is not None and recapture.phase == RecapturePhase.RUNNING:
        return Verdict(True, R.RECAPTURING, recapture.message)
    return Verdict(False, R.STABLE, "nothing to do")


def _counts(spec: VLLMSnapshotSpec, live: list[Replica]) -> str:
    return f"{sum(replica.ready for replica in live)} of {spec.replicas} replicas are ready"


def _recapture(spec: VLLMSnapshotSpec, again: Recapture, observed: Observed) -> RecaptureStatus | None:
    """Where the user's request to take the artifacts again stands."""
    if not again.request:
        return None

    def tell(phase: RecapturePhase, message: str) -> RecaptureStatus:
        return RecaptureStatus(request=again.request, phase=phase, message=_short(message))

    if again.done:
        return tell(RecapturePhase.DONE, f"taken again on {_count(len(again.new), 'node')}: {_few(sorted(again.new))}")
    if spec.capture.policy == Toggle.DISABLED:
        return tell(RecapturePhase.WAITING, "capture.policy is Disabled")
    if again.seed is not None:
        return tell(RecapturePhase.RUNNING, _tell(spec, again.seed, observed))
    if again.ordered:
        return tell(RecapturePhase.RUNNING, "a replica is being captured")
    if spec.replicas == 0:
        return tell(RecapturePhase.WAITING, "0 replicas are wanted: scale up to have a replica captured")
    if again.nodes:
        room = "" if spec.rollout.max_surge else ", in place of one that rollout.maxUnavailable spares"
        return tell(RecapturePhase.WAITING, f"a replica is to start cold on {_few(list(again.nodes))}{room}")
    done = f"taken again on {_few(sorted(again.new))}; " if again.new else ""
    if again.failure is not None:
        lost = again.failure
        kept = "; the artifact from before stays in use" if again.old else ""
        return tell(RecapturePhase.FAILED, f"{done}{lost.name} on node {lost.node} failed: {lost.reason}: {lost.message}{kept}")
    where = f"on {_few(sorted(again.old))}" if again.old else "on any node"
    return tell(RecapturePhase.WAITING, f"{done}no agent is ready {where}")


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _degraded(
    claim: Claim,
    spec: VLLMSnapshotSpec,
    identity: str,
    live: list[Replica],
    observed: Observed,
    problems: Sequence[Problem],
    now: float,
) -> Verdict:
    """The most pressing trouble: what keeps replicas from existing, then from running, then from being restored."""
    found = list(problems)
    if spec.serving.service == Toggle.ENABLED:
        if observed.service is not None and not observed.service.ours:
            text = f"Service {claim.name} belongs to somebody else and is left alone; rename it or disable serving.service"
            found.append(Problem(R.NAME_CONFLICT, text))
        elif observed.service is None and not pods.service_name_valid(claim.name):
            text = f"a Service cannot be called {claim.name}; set serving.service to Disabled or choose another name"
            found.append(Problem(R.NAME_CONFLICT, text))
    for replica in sorted(live, key=lambda item: item.name):
        if replica.unschedulable:
            found.append(Problem(R.POD_UNSCHEDULABLE, _homeless(spec, replica, observed)))
        elif replica.verified == "False" and replica.verified_reason in (R.CANARY_MISMATCH, R.ENGINE_FAILED):
            found.append(Problem(replica.verified_reason, f"replica {replica.name}: {replica.verified_message}"))
        elif replica.waiting and not replica.ready:
            found.append(Problem(R.ENGINE_FAILED, f"replica {replica.name}: {replica.waiting}"))
        elif replica.report.reason == R.RESTORE_REQUIRED and not replica.ready:
            found.append(Problem(R.RESTORE_REQUIRED, f"replica {replica.name}: {replica.report.message}"))
    mine = [item for item in observed.contents if item.identity == identity and not item.deleting]
    for item in sorted(mine, key=lambda item: item.name):
        # What merely does not fit any more is Stale, until a replacement has been tried in vain.
        if item.quarantined and not (outdated(item) and spent(observed, identity, item.node) <= spec.capture.retries):
            found.append(Problem(R.ARTIFACT_QUARANTINED, f"{item.name} on node {item.node}: {item.message}"))
    if spec.capture.policy == Toggle.ENABLED:
        for node in sorted({item.node for item in mine if item.failed}):
            usable = any(observed.usable(item) for item in mine if item.node == node)
            if spent(observed, identity, node) > spec.capture.retries and not usable:
                last = newest(item for item in mine if item.failed and item.node == node)
                assert last is not None
                more = f"replicas start cold there, and {_tried_again(spec, identity, node, observed, now)}"
                found.append(Problem(R.CAPTURE_FAILED, f"node {node}: {last.reason}: {last.message}; {more}"))
    for item in sorted(mine, key=lambda item: item.name):
        if observed.usable(item) and not observed.worthwhile(item, spec.restore.policy):
            found.append(Problem(R.RESTORE_SLOWER, f"node {item.node}: {item.slower}; replicas start cold there"))
    if not found:
        return Verdict(False, R.AS_EXPECTED, "no trouble")
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return Verdict(True, found[0].reason, _short(found[0].message)[: MESSAGE_LIMIT - 20] + more)


def _stale(identity: str, best: Content | None, observed: Observed) -> Verdict:
    """Artifacts that node or image have moved away from. They are taken again with the next cold start there."""
    mine = [item for item in observed.contents if item.identity == identity and item.captured and not item.deleting]
    reasons = [
        f"{item.name}: {why}" for item in sorted(mine, key=lambda item: item.name) if (why := observed.stale(item)) is not None
    ]
    if reasons:
        return Verdict(True, R.ENVIRONMENT_CHANGED, "; ".join(reasons[:3]))
    refused = [f"{item.name}: {item.message}" for item in sorted(mine, key=lambda item: item.name) if outdated(item)]
    if refused:
        return Verdict(True, R.IDENTITY_MISMATCH, "; ".join(refused[:3]))
    return Verdict(False, R.AS_EXPECTED, "every artifact fits its node")


def outdated(item: Content) -> bool:
    """The agent found, when it was to restore it, that image or files are others now."""
    return item.quarantined and item.reason == R.IDENTITY_MISMATCH


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


# --- the rest ----------------------------------------------------------------------------------------------------------


def _record(best: Content | None) -> SnapshotRecord | None:
    if best is None:
        return None
    artifact = best.status.artifact
    return SnapshotRecord(
        content=best.name,
        identity=best.identity,
        node=best.node,
        bytes=artifact.bytes if artifact else None,
        captured_at=artifact.captured_at if artifact else None,
    )


def _cold_start_reason(cold: list[Replica]) -> str | None:
    last = max(cold, key=lambda item: (item.created, item.name), default=None)
    if last is None or not last.report.reason:
        return None
    return _short(": ".join(filter(None, (last.report.reason, last.report.message))))


def _phase(phases: Mapping[str, float] | None, name: str) -> str | None:
    """A phase as a duration, if it is reported."""
    value = (phases or {}).get(name)
    return None if value is None else duration(value)


def _timings(claim: Claim, observed: Observed) -> Timings | None:
    """Of the newest replica of each kind and the newest artifact. What nobody can tell any more stays as it was written."""
    before = (claim.status.timings if claim.status else None) or Timings()
    first = [replica for replica in observed.pods if replica.report.restarts == 0]
    cold = _last_served(replica for replica in first if replica.start_mode == c.START_COLD)
    restored = _last_served(replica for replica in first if replica.restored)
    artifact = newest(item for item in observed.contents if item.captured)
    phases = (artifact.status.phases if artifact else None) or {}
    values = {
        "cold_start": _served_after(cold) or before.cold_start,
        "capture": phases.get("total") or before.capture,
        "freeze": phases.get("freeze") or before.freeze,
        "restored_start": _served_after(restored) or before.restored_start,
        "restore": _phase(restored.report.phases if restored else None, "restore_s") or before.restore,
        "release": _phase(restored.report.phases if restored else None, "release_to_serving_s") or before.release,
    }
    timings = Timings(**values, speedup=_speedup(values["cold_start"], values["restored_start"]))
    return timings if timings != Timings() else None


def _last_served(replicas: Iterable[Replica]) -> Replica | None:
    """The newest of these that has come to serve (a restarted container's time would count from the pod's creation)."""
    return max((item for item in replicas if item.report.serving_at), key=lambda item: (item.created, item.name), default=None)


def _served_after(replica: Replica | None) -> str | None:
    """From pod creation to serving. The agent's own figure is the finer one: timestamps of the API are whole seconds."""
    if replica and (told := _phase(replica.report.phases, "total_s")):
        return told
    served = timestamp(replica.report.serving_at) if replica else 0.0
    return duration(served - replica.created) if replica and served >= replica.created > 0 else None


def _speedup(cold: str | None, restored: str | None) -> str | None:
    if cold is None or restored is None or seconds(restored) <= 0:
        return None
    return f"{seconds(cold) / seconds(restored):.1f}x"
