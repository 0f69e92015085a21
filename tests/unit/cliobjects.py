"""Objects as the API server gives them to the CLI: a snapshot with a cold and a restored replica, and two artifacts."""

from __future__ import annotations

from typing import Any

from vllmsnapshot.api import constants as c
from vllmsnapshot.api.types import PodReport
from vllmsnapshot.objects import rfc3339

NOW = 1_800_000_000.0
Object = dict[str, Any]


def condition(kind: str, status: bool, reason: str, message: str = "") -> Object:
    return {
        "type": kind,
        "status": "True" if status else "False",
        "reason": reason,
        "message": message,
        "lastTransitionTime": rfc3339(NOW - 60),
    }


def snapshot(name: str = "smol", *, namespace: str = "default", degraded: str = "", **status: Any) -> Object:
    conditions = [
        condition(c.READY, True, "AllReplicasReady", "all 2 replicas are ready"),
        condition(c.SNAPSHOT_READY, True, "Captured", "new replicas are restored on 1 node: node-a"),
        condition(c.PROGRESSING, False, "Stable", "nothing to do"),
        condition(c.DEGRADED, bool(degraded), degraded or "AsExpected", "no trouble" if not degraded else "boom"),
        condition(c.STALE, False, "AsExpected", "every artifact fits its node"),
    ]
    return {
        "apiVersion": c.API_VERSION,
        "kind": "VLLMSnapshot",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{name}",
            "generation": 2,
            "resourceVersion": "7",
            "creationTimestamp": rfc3339(NOW - 7500),
        },
        "spec": {"model": "/models/smollm2", "image": "vllm:0.32", "replicas": 2},
        "status": {
            "observedGeneration": 2,
            "conditions": conditions,
            "replicas": 2,
            "readyReplicas": 2,
            "restoredReplicas": 1,
            "coldReplicas": 1,
            "identity": "id-1",
            "snapshot": {
                "content": "smol-5d7bed9722afb019",
                "node": "node-a",
                "bytes": 1_340_000_000,
                "capturedAt": rfc3339(NOW - 3700),
            },
            "timings": {"coldStart": "40.90s", "restoredStart": "2.60s", "speedup": "15.7x", "freeze": "0.80s"},
            **status,
        },
    }


COLD = PodReport(
    start="cold",
    reason="NoArtifact",
    message="no artifact on this node",
    state="Serving",
    phases={
        "schedule_s": 0.4,
        "container_s": 0.9,
        "decide_s": 0.02,
        "ready_s": 36.0,
        "engine_s": 30.0,
        "canary_s": 0.5,
        "rehearsal_s": 3.0,
        "barrier_s": 2.4,
        "release_to_serving_s": 1.0,
        "reload_s": 0.7,
        "total_s": 40.9,
    },
)
RESTORED = PodReport(
    start="restore",
    reason="Restored",
    content="smol-5d7bed9722afb019",
    state="Serving",
    phases={
        "schedule_s": 0.1,
        "container_s": 0.9,
        "decide_s": 0.01,
        "restore_s": 1.2,
        "verify_s": 0.1,
        "criu_s": 0.9,
        "release_to_serving_s": 0.4,
        "total_s": 2.6,
    },
)


def pod(name: str, report: PodReport, *, age: float = 3800.0, ready: bool = True, owner: str = "uid-smol") -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "creationTimestamp": rfc3339(NOW - age),
            "labels": {c.LABEL_IDENTITY: "id-1", c.LABEL_REVISION: "rev-1"},
            "annotations": {c.ANNOTATION_REPORT: report.model_dump_json(by_alias=True)},
            "ownerReferences": [{"kind": "VLLMSnapshot", "uid": owner, "controller": True, "name": "smol"}],
        },
        "spec": {"nodeName": "node-a"},
        "status": {
            "phase": "Running",
            "conditions": [
                {"type": "Ready", "status": "True" if ready else "False"},
                {"type": c.CONDITION_VERIFIED, "status": "True", "reason": "Verified"},
            ],
        },
    }


def content(
    name: str = "smol-5d7bed9722afb019",
    *,
    node: str = "node-a",
    identity: str = "id-1",
    owner: str = "uid-smol",
    kind: str = c.CAPTURED,
    reason: str = "Captured",
    message: str = "1340000000 bytes",
    age: float = 3700.0,
    **status: Any,
) -> Object:
    captured = kind == c.CAPTURED
    return {
        "apiVersion": c.API_VERSION,
        "kind": "VLLMSnapshotContent",
        "metadata": {"name": name, "uid": f"uid-{name}", "creationTimestamp": rfc3339(NOW - age)},
        "spec": {
            "snapshotRef": {"namespace": "default", "name": "smol", "uid": owner},
            "sourcePod": {"name": "smol-6366c-0", "uid": "uid-source"},
            "nodeName": node,
            "identity": identity,
            "failureBudget": 3,
        },
        "status": {
            "conditions": [condition(kind, True, reason, message)],
            **(
                {
                    "artifact": {"bytes": 1_340_000_000, "digest": "sha256:abc", "capturedAt": rfc3339(NOW - age)},
                    "phases": {"freeze": "0.80s", "criu": "0.60s", "digest": "1.10s", "total": "2.40s"},
                    "environment": {"kernelRelease": "6.18.0", "criuVersion": "4.2.1"},
                    "restores": {"succeeded": 4, "failed": 1, "consecutiveFailures": 0, "lastFailure": "RestoreDied: x"},
                }
                if captured
                else {}
            ),
            **status,
        },
    }
