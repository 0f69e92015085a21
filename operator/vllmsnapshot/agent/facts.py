"""API objects as the values that decisions rest on. Total: what somebody else wrote badly counts as absent, and never raises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ..api import constants as c
from ..api.types import PodReport, PodSettings, VLLMSnapshotContentSpec, VLLMSnapshotContentStatus
from ..environment import differences
from ..objects import Object, condition, is_true, timestamp
from . import breakeven
from .decide import INIT_DECISION_TIMEOUT_S, Candidate, Pod
from .ledger import Entry
from .nodeops import PodRef, Stored

OUR_SERVER = "vllmsnapshot_child.server"
"""The child that writes serving.json; another one named by VLLMSNAPSHOT_SERVER is asked over HTTP."""


def owner(obj: Object) -> Mapping[str, Any] | None:
    """The controller reference to a VLLMSnapshot."""
    for ref in obj["metadata"].get("ownerReferences") or []:
        group = str(ref.get("apiVersion", "")).partition("/")[0]
        if ref.get("controller") is True and ref.get("kind") == "VLLMSnapshot" and group == c.GROUP and ref.get("uid"):
            return dict(ref)
    return None


def ours(obj: Object, node: str) -> bool:
    """Whether a pod is a replica on this node: by labels, node and its controller."""
    labels = obj["metadata"].get("labels") or {}
    return (
        labels.get(c.LABEL_MANAGED_BY) == c.MANAGED_BY
        and labels.get(c.LABEL_ROLE) == c.ROLE_REPLICA
        and (obj.get("spec") or {}).get("nodeName") == node
        and owner(obj) is not None
    )


def pod_facts(obj: Object) -> Pod:
    """What matters of a replica. It must be `ours`."""
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    annotations = meta.get("annotations") or {}
    ref = owner(obj) or {}
    engine: Mapping[str, Any] = next((x for x in spec.get("containers") or [] if x.get("name") == c.CONTAINER), {})
    env = {item.get("name", ""): item for item in engine.get("env") or []}
    try:
        settings = PodSettings.model_validate_json(annotations.get(c.ANNOTATION_SETTINGS) or "{}")
    except ValidationError:
        settings = PodSettings()
    scheduled, healthy = condition(obj, "PodScheduled"), condition(obj, "ContainersReady")
    address = status.get("hostIP") if spec.get("hostNetwork") else status.get("podIP")
    server = (env.get("VLLMSNAPSHOT_SERVER") or {}).get("value") or OUR_SERVER
    try:
        decision = float((env.get("VLLMSNAPSHOT_DECISION_TIMEOUT_S") or {}).get("value") or INIT_DECISION_TIMEOUT_S)
    except ValueError:
        decision = INIT_DECISION_TIMEOUT_S
    return Pod(
        ref=PodRef(namespace=meta["namespace"], name=meta["name"], uid=meta["uid"]),
        snapshot=ref.get("name", ""),
        snapshot_uid=ref.get("uid", ""),
        identity=(meta.get("labels") or {}).get(c.LABEL_IDENTITY, ""),
        settings=settings,
        port=_port(annotations.get(c.ANNOTATION_PORT), engine),
        host=(env.get(c.ENV_HOST) or {}).get("value") or None,
        address=address or "",
        env=release_env(obj, engine),
        deleting="deletionTimestamp" in meta,
        finished=status.get("phase") in ("Succeeded", "Failed"),
        foreign=server != OUR_SERVER,
        gpu=_wants_gpu(engine),
        host_network=spec.get("hostNetwork") is True,
        decision_timeout_s=decision,
        created=timestamp(meta.get("creationTimestamp")),
        scheduled=(timestamp(scheduled.get("lastTransitionTime")) or None) if scheduled.get("status") == "True" else None,
        healthy_since=(timestamp(healthy.get("lastTransitionTime")) or None) if healthy.get("status") == "True" else None,
    )


def _wants_gpu(engine: Mapping[str, Any]) -> bool:
    """Whether the container asks for a GPU: by an extended resource of NVIDIA's, or by a claim (which may be for another device)."""
    resources = engine.get("resources") or {}
    asked = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    return bool(resources.get("claims")) or any(k.startswith("nvidia.com/") and str(v) != "0" for k, v in asked.items())


def _port(annotation: Any, engine: Mapping[str, Any]) -> int:
    """The assigned port; without the annotation the declared one, and 8000 as the last resort."""
    text = str(annotation or "")
    if text.isascii() and text.isdigit() and 1 <= int(text) <= 65535:
        return int(text)
    for item in engine.get("ports") or []:
        port = item.get("containerPort")
        if item.get("name") == c.PORT_NAME and type(port) is int and 1 <= port <= 65535:
            return port
    return 8000


def release_env(obj: Object, engine: Mapping[str, Any]) -> dict[str, str]:
    """The environment that is this pod's own: a restored process still has that of the pod it was captured in.

    Literal values are part of the identity or listed here (port, host, grace time); the downward API is resolved as the kubelet does.
    Values from Secrets and ConfigMaps are not known to the agent, which reads neither.
    """
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    known = {
        "metadata.name": meta.get("name"),
        "metadata.namespace": meta.get("namespace"),
        "metadata.uid": meta.get("uid"),
        "spec.nodeName": spec.get("nodeName"),
        "spec.serviceAccountName": spec.get("serviceAccountName"),
        "status.podIP": status.get("podIP"),
        "status.hostIP": status.get("hostIP"),
    }
    for kind in ("labels", "annotations"):
        known |= {f"metadata.{kind}['{k}']": v for k, v in (meta.get(kind) or {}).items()}
    env = {"HOSTNAME": str(spec.get("nodeName") if spec.get("hostNetwork") else spec.get("hostname") or meta.get("name"))}
    for item in engine.get("env") or []:
        name, value = item.get("name"), item.get("value")
        field = ((item.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath")
        if field is not None:
            value = known.get(field)
        elif name not in (c.ENV_PORT, c.ENV_HOST, c.ENV_TERM_GRACE):
            continue
        if name and value:
            env[name] = str(value)
    return env


def report_of(obj: Object) -> PodReport:
    """What the agent last wrote into the pod."""
    try:
        return PodReport.model_validate_json((obj["metadata"].get("annotations") or {}).get(c.ANNOTATION_REPORT) or "{}")
    except ValidationError:
        return PodReport()


def content_spec(obj: Object) -> VLLMSnapshotContentSpec | None:
    """The order; None where this version cannot read it."""
    try:
        return VLLMSnapshotContentSpec.model_validate(obj.get("spec") or {})
    except ValidationError:
        return None


def strange(spec: VLLMSnapshotContentSpec) -> str:
    """Why an order may mean something else than this agent reads in it; empty if it does not."""
    if spec.protocol == c.NODE_PROTOCOL:
        return ""
    return f"the operator speaks protocol {spec.protocol}, the agent {c.NODE_PROTOCOL}"


def content_status(obj: Object) -> VLLMSnapshotContentStatus:
    """The status, empty where this version cannot read it."""
    try:
        return VLLMSnapshotContentStatus.model_validate(obj.get("status") or {})
    except ValidationError:
        return VLLMSnapshotContentStatus()


def recorded(obj: Object, stored: Stored) -> bool:
    """Whether the stored artifact is the one that the status tells of, by the digest of its manifest.

    The manifest has the digests of all other files, and nothing on the node has its own.
    """
    artifact = content_status(obj).artifact
    return artifact is None or artifact.digest == stored.digest


def candidate(obj: Object, stored: Stored | None, entry: Entry, here: Mapping[str, str]) -> Candidate | None:
    """A content as API, store and ledger describe it; None where its spec cannot be read. `here`: facts of this node, empty where
    they are not known.

    The files count only if they are those of this very object: a recreated content of the same name has none.
    """
    spec = content_spec(obj)
    if spec is None:
        return None
    meta = obj["metadata"]
    mine = stored if stored is not None and stored.content_uid in ("", meta["uid"]) and recorded(obj, stored) else None
    moved = differences(mine.environment, here) if mine is not None and mine.environment and here else []
    quarantined = condition(obj, c.QUARANTINED)
    why = f"{quarantined.get('reason')}: {quarantined.get('message')}" if quarantined.get("status") == "True" else ""
    if not why and entry.quarantined is not None:
        why = f"{entry.quarantined.reason}: {entry.quarantined.message}"
    return Candidate(
        name=meta["name"],
        uid=meta["uid"],
        namespace=spec.snapshot_ref.namespace,
        snapshot_uid=spec.snapshot_ref.uid,
        identity=spec.identity,
        node=spec.node_name,
        source_uid=spec.source_pod.uid,
        captured=is_true(obj, c.CAPTURED),
        failed=is_true(obj, c.FAILED),
        quarantined=why,
        deleting="deletionTimestamp" in meta,
        present=mine is not None,
        stale=str(moved[0]) if moved else "",
        capture_failed=entry.capture_failed is not None or bool(strange(spec)),
        foreign=mine is not None and mine.foreign,
        captured_at=mine.captured_at if mine is not None else "",
        oracle=mine.oracle if mine is not None else None,
        slower=breakeven.look(entry, mine.cold_s) if mine is not None else None,
    )
