"""`describe NAME`: the snapshot, a timeline of each replica, why a replica is cold, and the artifacts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from ..api import constants as c
from ..api.constants import Reason
from ..objects import condition, timestamp
from ..world import Content, Replica
from . import artifacts, timeline
from .output import BAD, DOUBT, FAINT, GOOD, HEAD, age, plain, size, took

Object = dict[str, Any]

WIDTH = 100
"""Of a file or pipe."""

HINTS = {
    Reason.NO_ARTIFACT: "the first replica on a node is captured; the next ones there are restored",
    Reason.CAPTURE_IN_PROGRESS: "the capture was not over yet; the next replica on this node is restored",
    Reason.RESTORE_DISABLED: "set spec.restore.policy to Prefer",
    Reason.IDENTITY_MISMATCH: "image, files or node differ from those at capture; this replica's own capture replaces the artifact",
    Reason.ARTIFACT_QUARANTINED: "kubectl vsnap artifacts list tells why; the next cold start is captured",
    Reason.ARTIFACT_MISSING: "the files are gone from the node; the next cold start is captured",
    Reason.ARTIFACT_CORRUPT: "the disk returned other bytes than were written; look at the node's disk",
    Reason.NODE_NOT_CAPABLE: "kubectl vsnap doctor names the check that failed",
    Reason.INSUFFICIENT_MEMORY: "raise spec.resources.limits.memory, or free memory on the node",
    Reason.INSUFFICIENT_DISK: "free disk space on the node, or lower spec.artifact.retain",
    Reason.RESTORE_TIMEOUT: "raise spec.restore.timeoutSeconds, or use a faster disk for agent.storeDir",
    Reason.RESTORE_SLOWER: "a faster disk for agent.storeDir or the model; kubectl vsnap recapture judges anew",
    Reason.FAILURE_BUDGET_SPENT: "the log of the agent on that node tells what CRIU met",
    Reason.PROTOCOL_VERSION: "rebuild the image with the child of the installed version",
    Reason.UNATTENDED: "no agent answered on that node: kubectl vsnap doctor",
    Reason.RESTORE_REQUIRED: "spec.restore.policy is Require: remove the artifact or set Prefer to let it start cold",
    Reason.RECAPTURE: "somebody asked for a new artifact (kubectl vsnap recapture)",
    Reason.GPU_UNAVAILABLE: "docs/gpu.md tells how to give the agent the driver",
}
"""What may be done about a cold start, by its reason."""


@dataclass(frozen=True)
class Facts:
    """What `describe` shows. `contents` is None where the caller may not read them (they are cluster-scoped)."""

    snapshot: Object
    pods: Sequence[Object]
    contents: Sequence[Object] | None


def structured(facts: Facts) -> Object:
    """For -o json and yaml: the objects, and each replica's report as an object instead of a string in an annotation."""
    return {
        "snapshot": facts.snapshot,
        "replicas": [{**_brief(pod), "report": Replica.parse(pod).report.model_dump(by_alias=True)} for pod in facts.pods],
        "artifacts": None if facts.contents is None else list(facts.contents),
    }


def _brief(pod: Object) -> Object:
    replica = Replica.parse(pod)
    return {"name": replica.name, "node": replica.node, "ready": replica.ready, "created": pod["metadata"]["creationTimestamp"]}


def lines(facts: Facts, now: float, *, width: int | None = None) -> list[Text]:
    """All of it, `width` cells wide."""
    obj, limit = facts.snapshot, width or WIDTH
    replicas = sorted((Replica.parse(pod) for pod in facts.pods), key=lambda item: (item.created, item.name))
    made = [*_head(obj, now), Text()]
    totals = [timeline.total(item.report.phases) or 0.0 for item in replicas]
    sums = [
        sum(span.seconds for span in timeline.spans(item.start_mode, item.report.phases) if not span.depth) for item in replicas
    ]
    scale = max([*totals, *sums, 0.0])
    made.append(Text("Replicas" + ("" if replicas else ": none"), style=HEAD))
    for replica in replicas:
        made += _replica(replica, scale, limit, now)
    made += [Text(), Text("Artifacts", style=HEAD)]
    if facts.contents is None:
        made.append(Text("  not shown: they are cluster-scoped, and you may not list vllmsnapshotcontents", style=FAINT))
    elif not facts.contents:
        made.append(Text("  none"))
    else:
        rows = artifacts.lines([Content.parse(item) for item in facts.contents], now, snapshot=False, width=limit - 2)
        made += [Text("  ").append_text(line) for line in rows]
    return made


def _head(obj: Object, now: float) -> list[Text]:
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    timings, record = status.get("timings") or {}, status.get("snapshot") or {}
    made = [
        _field(
            "Name", f"{meta['name']} (namespace {meta['namespace']}, {age(timestamp(meta.get('creationTimestamp')), now)} old)"
        ),
        _field("Model", str(spec.get("model", "-"))),
        _field("Image", str(spec.get("image", "-"))),
        _field(
            "Replicas",
            f"{status.get('readyReplicas') or 0} of {spec.get('replicas', 1)} ready: "
            f"{status.get('restoredReplicas') or 0} restored, {status.get('coldReplicas') or 0} cold",
        ),
    ]
    if record.get("content"):
        captured = f"captured {age(timestamp(record.get('capturedAt')), now)} ago"
        made.append(
            _field("Artifact", f"{record['content']} on node {record.get('node')}, {size(record.get('bytes'))}, {captured}")
        )
    if timings:
        words = (
            ("cold", timings.get("coldStart")),
            ("restored", timings.get("restoredStart")),
            ("faster", timings.get("speedup")),
            ("frozen for the capture", timings.get("freeze")),
        )
        made.append(_field("Timings", ", ".join(f"{name} {value}" for name, value in words if value)))
    again = status.get("recapture")
    if again:
        made.append(_field("Recapture", f"{again.get('phase')}: {again.get('message')}"))
    made.append(_field("Conditions", ""))
    good = {c.READY: "True", c.SNAPSHOT_READY: "True", c.PROGRESSING: "False", c.DEGRADED: "False", c.STALE: "False"}
    for kind, wanted in good.items():
        found = condition(obj, kind)
        if found:
            style = GOOD if found.get("status") == wanted else DOUBT if kind != c.DEGRADED else BAD
            line = Text(f"  {kind:<15}")
            line.append(f"{found.get('status'):<8}", style=style)
            line.append(plain(f"{found.get('reason')}: {found.get('message')}"))
            made.append(line)
    return made


def _field(name: str, value: str) -> Text:
    line = Text(f"{name + ':':<14}", style=HEAD)
    line.append(plain(value), style="not bold")
    line.rstrip()
    return line


def _replica(replica: Replica, scale: float, width: int, now: float) -> list[Text]:
    report = replica.report
    how = {c.START_RESTORE: "restored", c.START_COLD: "cold"}.get(replica.start_mode, "starting")
    line = Text("  ")
    line.append(replica.name, style=HEAD)
    line.append(f"  {how}", style=GOOD if how == "restored" else DOUBT)
    whole = timeline.total(report.phases)
    if whole is not None:
        line.append(f" in {took(whole)}")
    line.append(f"  {'ready' if replica.ready else 'leaving' if replica.deleting else report.state}")
    line.append(f"  on {replica.node or 'no node yet'}, {age(replica.created, now)} old", style=FAINT)
    if report.restarts:
        line.append(f", {report.restarts} restarts", style=DOUBT)
    made = [line]
    why = ": ".join(filter(None, (report.reason, report.message)))
    if how == "restored":
        made.append(Text(f"    from {report.content}"))
    elif why:
        made.append(Text(plain(f"    {why}")))
        if report.reason in HINTS:
            made.append(Text(f"    → {HINTS[report.reason]}", style=FAINT))
    for trouble in (replica.unschedulable, replica.waiting, replica.finished_message):
        if trouble:
            made.append(Text(plain(f"    {trouble}"), style=BAD))
    if replica.verified == "False" and replica.verified_reason != Reason.STARTING:
        made.append(Text(plain(f"    not verified: {replica.verified_reason}: {replica.verified_message}"), style=BAD))
    made += [
        Text("  ").append_text(line)
        for line in timeline.lines(timeline.spans(replica.start_mode, report.phases), scale, width - 2)
    ]
    return made
