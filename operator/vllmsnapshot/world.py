"""What is there: a claim, its pods, its contents and the cluster around them, as plain values for whoever decides or tells.

Parsing is total: an object written by somebody else (a report by a newer agent, a hand-edited condition) never raises here;
what cannot be read counts as absent. Times are seconds since the epoch, as the API server's clock gave them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from . import environment
from .api import constants as c
from .api.types import (
    Condition,
    DeletionPolicy,
    PodReport,
    PodSettings,
    RestorePolicy,
    VLLMSnapshotContentStatus,
    VLLMSnapshotSpec,
    VLLMSnapshotStatus,
)
from .objects import Object, condition, is_true, timestamp


def recapture(obj: Object) -> str:
    """The request in the annotation `recapture`; empty if there is none."""
    return str((obj["metadata"].get("annotations") or {}).get(c.ANNOTATION_RECAPTURE) or "")[:128]


def controlled_by(obj: Object, uid: str) -> bool:
    """Whether the object's controller is the one with this UID: the only proof of ownership (labels can be copied)."""
    return any(ref.get("controller") and ref.get("uid") == uid for ref in obj["metadata"].get("ownerReferences") or [])


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A VLLMSnapshot. `spec` is None where this version cannot read it; `invalid` then says why."""

    namespace: str
    name: str
    uid: str
    generation: int = 1
    deleting: bool = False
    finalizer: bool = False
    deletion_policy: DeletionPolicy = DeletionPolicy.DELETE
    spec: VLLMSnapshotSpec | None = None
    invalid: str = ""
    status: VLLMSnapshotStatus | None = None
    raw_status: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, obj: Object) -> Claim:
        """From the API object."""
        meta, raw = obj["metadata"], obj.get("spec") or {}
        spec, invalid = None, ""
        try:
            spec = VLLMSnapshotSpec.model_validate(raw)
        except ValidationError as e:
            first = e.errors(include_url=False, include_input=False)[0]
            invalid = f"spec.{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
        status = None
        with contextlib.suppress(ValidationError):
            status = VLLMSnapshotStatus.model_validate(obj.get("status") or {})
        policy = (raw.get("artifact") or {}).get("deletionPolicy")
        return cls(
            namespace=meta["namespace"],
            name=meta["name"],
            uid=meta["uid"],
            generation=meta.get("generation", 1),
            deleting="deletionTimestamp" in meta,
            finalizer=c.FINALIZER_SNAPSHOT in (meta.get("finalizers") or []),
            deletion_policy=DeletionPolicy.RETAIN if policy == DeletionPolicy.RETAIN else DeletionPolicy.DELETE,
            spec=spec,
            invalid=invalid,
            status=status,
            raw_status=obj.get("status") or {},
        )

    @property
    def conditions(self) -> list[Condition]:
        """The conditions as they were written last."""
        return (self.status.conditions if self.status else None) or []


@dataclass(frozen=True, kw_only=True)
class Replica:
    """A pod that this claim controls."""

    name: str
    uid: str
    revision: str
    identity: str
    created: float
    node: str | None = None
    deleting: bool = False
    finished: bool = False
    finished_message: str = ""
    ready: bool = False
    containers_ready: bool = False
    verified: str = ""
    verified_reason: str = ""
    verified_message: str = ""
    start_mode: str = ""
    unschedulable: str = ""
    waiting: str = ""
    recapture: str = ""
    """The request that this replica was made for, if it was."""
    only: frozenset[str] = frozenset()
    """The nodes that its affinity names as the only ones."""
    report: PodReport = field(default_factory=PodReport)

    @classmethod
    def parse(cls, obj: Object) -> Replica:
        """From the API object."""
        meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
        labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
        try:
            report = PodReport.model_validate_json(annotations.get(c.ANNOTATION_REPORT) or "{}")
        except ValidationError:
            report = PodReport()
        try:
            settings = PodSettings.model_validate_json(annotations.get(c.ANNOTATION_SETTINGS) or "{}")
        except ValidationError:
            settings = PodSettings()
        scheduled, verified = condition(obj, "PodScheduled"), condition(obj, c.CONDITION_VERIFIED)
        unschedulable = scheduled.get("message") or "" if scheduled.get("status") == "False" else ""
        return cls(
            name=meta["name"],
            uid=meta["uid"],
            revision=labels.get(c.LABEL_REVISION, ""),
            identity=labels.get(c.LABEL_IDENTITY, ""),
            created=timestamp(meta.get("creationTimestamp")),
            node=spec.get("nodeName") or None,
            deleting="deletionTimestamp" in meta,
            finished=status.get("phase") in ("Failed", "Succeeded"),
            finished_message=": ".join(filter(None, (status.get("reason"), status.get("message")))),
            ready=is_true(obj, "Ready"),
            containers_ready=is_true(obj, "ContainersReady"),
            verified=verified.get("status") or "",
            verified_reason=verified.get("reason") or "",
            verified_message=verified.get("message") or "",
            start_mode=report.start or labels.get(c.LABEL_START_MODE, ""),
            unschedulable=unschedulable,
            waiting=_waiting(status),
            recapture=settings.recapture or "",
            only=_only(spec),
            report=report,
        )

    @property
    def live(self) -> bool:
        """It counts as a replica: neither finished nor on its way out."""
        return not self.deleting and not self.finished

    @property
    def available(self) -> bool:
        """It serves verified answers now."""
        return self.live and self.ready

    @property
    def discard(self) -> bool:
        """It is to be replaced by another pod, rather than to be mended where it is."""
        return self.live and not self.available and self.report.state != "Serving" and self.report.reason in c.DISCARD

    @property
    def restored(self) -> bool:
        """It came up from an artifact."""
        return self.start_mode == c.START_RESTORE

    @property
    def released(self) -> bool:
        """Past the barrier: nothing can be captured from it any more."""
        return self.ready or self.containers_ready or self.report.state in ("Released", "Serving")


def _only(spec: Mapping[str, Any]) -> frozenset[str]:
    """The nodes that a pod is bound to by name, as `controller.pods` writes it; empty where it is not."""
    node = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (node.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or []
    fields = [item for term in terms for item in term.get("matchFields") or []]
    named = [item for item in fields if (item.get("key"), item.get("operator")) == ("metadata.name", "In")]
    return frozenset(name for item in named for name in item.get("values") or [])


def _waiting(status: Mapping[str, Any]) -> str:
    """Why a container of the pod does not run (image pull, configuration, crash loop), as the kubelet says it."""
    for item in (*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])):
        state = (item.get("state") or {}).get("waiting") or {}
        if state.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return ": ".join(filter(None, (state["reason"], state.get("message"))))
    return ""


@dataclass(frozen=True, kw_only=True)
class Content:
    """An artifact on a node, ordered or taken."""

    name: str
    uid: str
    identity: str
    node: str
    source_uid: str
    source: str = ""
    created: float = 0.0
    deleting: bool = False
    """It is to be deleted, or evicted, which is the same to everybody but `retention`."""
    evicted: bool = False
    """The agent has removed its files from a full store; the operator is to delete it."""
    captured: bool = False
    failed: bool = False
    quarantined: bool = False
    slower: str = ""
    """Why it is not worth being restored from: what restores took, and a cold start. Empty if it is."""
    reason: str = ""
    message: str = ""
    captured_at: float = 0.0
    ended: float = 0.0
    """When the condition that `reason` and `message` are of became what it is, by the node's clock."""
    attempt: int = 0
    """How many orders in a row before this one came to nothing."""
    recapture: str = ""
    """The request under which it was ordered, if there was one."""
    node_label: str | None = None
    """LABEL_NODE as it is; None: not known."""
    status: VLLMSnapshotContentStatus = field(default_factory=VLLMSnapshotContentStatus)

    @classmethod
    def parse(cls, obj: Object) -> Content:
        """From the API object."""
        meta, spec = obj["metadata"], obj.get("spec") or {}
        try:
            status = VLLMSnapshotContentStatus.model_validate(obj.get("status") or {})
        except ValidationError:
            status = VLLMSnapshotContentStatus()
        captured, failed, quarantined = (is_true(obj, kind) for kind in (c.CAPTURED, c.FAILED, c.QUARANTINED))
        shown = condition(obj, c.QUARANTINED if quarantined else c.FAILED if failed else c.CAPTURED)
        source = spec.get("sourcePod") or {}
        created = timestamp(meta.get("creationTimestamp"))
        deleting = "deletionTimestamp" in meta
        evicted = quarantined and not deleting and shown.get("reason") == c.Reason.EVICTED
        return cls(
            name=meta["name"],
            uid=meta["uid"],
            identity=spec.get("identity") or "",
            node=spec.get("nodeName") or "",
            source_uid=source.get("uid") or "",
            source=source.get("name") or "",
            created=created,
            deleting=deleting or evicted,
            evicted=evicted,
            captured=captured and not failed,
            failed=failed,
            quarantined=quarantined and not evicted,
            slower=(condition(obj, c.SLOWER).get("message") or c.SLOWER) if is_true(obj, c.SLOWER) else "",
            reason=shown.get("reason") or "",
            message=shown.get("message") or "",
            captured_at=timestamp(status.artifact.captured_at) if status.artifact else created,
            ended=timestamp(shown.get("lastTransitionTime")),
            attempt=attempt if type(attempt := spec.get("attempt")) is int and attempt > 0 else 0,
            recapture=recapture(obj),
            node_label=(meta.get("labels") or {}).get(c.LABEL_NODE, ""),
            status=status,
        )

    @property
    def pending(self) -> bool:
        """Ordered, and the agent has not answered yet."""
        return not (self.captured or self.failed or self.deleting)


@dataclass(frozen=True, kw_only=True)
class ServiceView:
    """The Service of the claim's name: whether it is ours, and whether it is as it should be."""

    uid: str
    ours: bool
    current: bool


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Everything a plan may depend on, besides the claim and the time."""

    pods: tuple[Replica, ...] = ()
    taken: frozenset[str] = frozenset()
    """Names of pods that carry the claim's labels without being its own (a predecessor's, still terminating)."""
    contents: tuple[Content, ...] = ()
    agents: frozenset[str] = frozenset()
    """Nodes with a Ready agent."""
    nodes: frozenset[str] = frozenset()
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """What the agents say of their nodes (VLLMSnapshotNode)."""
    incapable: frozenset[str] = frozenset()
    """Nodes of which their agent says that it can restore nothing there."""
    strangers: frozenset[str] = frozenset()
    """Nodes whose agent speaks another protocol than this operator: an upgrade is under way, or was left half done."""
    service: ServiceView | None = None
    recapture: str = ""
    """The user's last request to take the artifacts again."""

    def stale(self, content: Content) -> str | None:
        """Which fact of the node is not what it was at capture, or None, also where the node has not told its facts.

        An artifact that the agent keeps refusing is quarantined by it; this is to say it before anybody tries.
        """
        then, now = content.status.environment or {}, self.environments.get(content.node) or {}
        if not then or not now:
            return None
        if not (found := environment.differences(then, now)):
            return None
        name, before, after = found[0]
        return f"{name} was {before!r} at capture and is {after!r} on node {content.node} now"

    def usable(self, content: Content) -> bool:
        """A replica of its identity on its node may be restored from it."""
        return (
            content.captured
            and not content.quarantined
            and not content.deleting
            and content.node in self.nodes - self.strangers
            and self.stale(content) is None
        )

    def worthwhile(self, content: Content, policy: RestorePolicy) -> bool:
        """A replica of its identity on its node is restored from it, but for a probe."""
        return self.usable(content) and (not content.slower or policy == RestorePolicy.REQUIRE)


def age(content: Content) -> tuple[float, str]:
    """Orders contents by when they were captured (by name where the second is the same)."""
    return content.captured_at, content.name


def newest(contents: Iterable[Content]) -> Content | None:
    """The one captured last."""
    return max(contents, key=age, default=None)
