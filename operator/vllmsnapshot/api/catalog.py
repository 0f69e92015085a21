"""What every condition, reason and event means. docs/reference is generated from here; tests hold it against the code."""

from __future__ import annotations

from dataclasses import dataclass

from . import constants as c

R = c.Reason

REASONS: dict[str, str] = {
    R.RESTORED: "The replica came up from an artifact.",
    R.NO_ARTIFACT: "There is no artifact of this snapshot and identity on the node.",
    R.CAPTURE_IN_PROGRESS: "An artifact is ordered or being captured, and cannot be used yet.",
    R.RESTORE_DISABLED: "`restore.policy` is Disabled.",
    R.RESTORE_REQUIRED: "`restore.policy` is Require, an artifact exists, and it cannot be used: the start is refused.",
    R.IDENTITY_MISMATCH: "Files, image or node are not what they were at the capture; the message names the difference.",
    R.ARTIFACT_QUARANTINED: "Nothing is restored from the artifact any more; the message says since what.",
    R.ARTIFACT_MISSING: "The files of the artifact are not in the node's store.",
    R.ARTIFACT_CORRUPT: "A file of the artifact has another size or digest than recorded.",
    R.NODE_NOT_CAPABLE: "The node can neither capture nor restore; its VLLMSnapshotNode names the failed check and the remedy.",
    R.INSUFFICIENT_MEMORY: "The pod's limit or the node has no room for the memory of the artifact.",
    R.INSUFFICIENT_DISK: "The disk of the store or of the pod has no room.",
    R.RESTORE_FAILED: "CRIU, or a step around it, failed; the message says which.",
    R.RESTORE_TIMEOUT: "The restore took longer than `restore.timeoutSeconds`.",
    R.RESTORE_DIED: "A restored process ended before it served.",
    R.RESTORE_SLOWER: "Restores from the artifact take longer on its node than a cold start; the message has the figures. Once an hour "
    "one is tried.",
    R.ENGINE_RUNNING: "An engine runs in the container already: nothing is restored beside it.",
    R.FAILURE_BUDGET_SPENT: "`restore.failureBudget` restores in a row failed.",
    R.PROTOCOL_VERSION: "Child and agent, or agent and operator, are of versions that do not understand each other.",
    R.UNATTENDED: "No agent was ready on the node: the replica started by itself and proved its own answer.",
    R.AGENT_RESTARTED: "The agent ended in the midst of it; nobody's failure.",
    R.RECAPTURE: "A new artifact was asked for, so this replica starts cold.",
    R.POD_DELETED: "The pod is being deleted: nothing is started in it any more.",
    R.STARTING: "The replica has not answered the canary prompt yet.",
    R.CANARY_MISMATCH: "The answer to the canary prompt is not the recorded one: the replica was ended before it served.",
    R.ENGINE_FAILED: "The engine gave up; the message has its reason.",
    R.VERIFIED: "The answer after the start equals the recorded one.",
    R.CAPTURED: "The artifact is complete and durable.",
    R.WAITING_FOR_BARRIER: "The replica to be captured is still coming up.",
    R.SOURCE_GONE: "The replica to be captured is gone.",
    R.SOURCE_RELEASED: "The replica to be captured serves already, or never stood at a barrier.",
    R.PREFLIGHT_INET_SOCKET: "A process has a network socket open, which no other pod could have.",
    R.PREFLIGHT_ABSTRACT_SOCKET: "A process has an abstract unix socket on the node's network, of which there can be only one.",
    R.PREFLIGHT_IO_URING: "A process uses io_uring, which CRIU cannot save.",
    R.PREFLIGHT_SESSION: "A process outside of the engine's session is in the container (kubectl exec, an exec probe).",
    R.PREFLIGHT_SIZE: "The artifact would be larger than `capture.maxArtifactBytes`.",
    R.DUMP_FAILED: "CRIU, or a step around it, failed; the message says which.",
    R.CAPTURE_TIMEOUT: "The capture took longer than `capture.timeoutSeconds`.",
    R.STORE_FAILED: "The node's store cannot be written.",
    R.EVICTED: "The store of the node was full, and this artifact was the one that is missed least; the operator deletes the content.",
    R.ALL_REPLICAS_READY: "All replicas that are wanted are ready and of the present revision.",
    R.REPLICAS_NOT_READY: "Replicas are missing or not ready; the message says what the oldest one waits for.",
    R.SCALED_TO_ZERO: "No replicas are wanted, and none is there.",
    R.WAITING_FOR_SNAPSHOT: "The other replicas start when the first one has been captured.",
    R.ROLLING_UPDATE: "Replicas of an old revision are being replaced.",
    R.RECAPTURING: "A replica is started cold, to be captured anew.",
    R.STABLE: "There is nothing to do.",
    R.CAPTURE_DISABLED: "`capture.policy` is Disabled.",
    R.CAPTURE_FAILED: "The capture failed; the message says why and whether it is tried again.",
    R.NO_PORT_LEFT: "All ports of `serving.portRange` are in use.",
    R.NAME_CONFLICT: "A pod, content or Service of the wanted name belongs to somebody else, or its labels were changed; it is left alone.",
    R.POD_UNSCHEDULABLE: "No node takes the replica; the message is the scheduler's.",
    R.POD_REJECTED: "The API server refuses the replica's pod (quota, admission); the message is its.",
    R.SERVICE_REJECTED: "The API server refuses the Service; the message is its.",
    R.DELETION_REFUSED: "The API server (an admission webhook, usually) refuses to delete what is to go; the message is its.",
    R.WRITE_REFUSED: "The API server refuses to change a finalizer or a readiness gate; the message is its.",
    R.INVALID_SPEC: "The spec cannot be read by this version of the operator. Nothing is changed until it is corrected.",
    R.AS_EXPECTED: "All is well.",
    R.ENVIRONMENT_CHANGED: "The node of an artifact has changed since the capture; the message names the fact.",
    R.GPU_UNAVAILABLE: "The GPU or its driver cannot be used for captures and restores.",
    R.GPU_NOT_SUPPORTED: "The driver cannot save the memory of this GPU or process.",
    R.GPU_CHECKPOINT_FAILED: "The driver failed to save the memory of the GPU.",
    R.GPU_STATE_LOST: "The driver saved the memory of the GPU and could not put it back: the engine is of no use, and starts anew.",
    R.GPU_RESTORE_FAILED: "The driver failed to put the memory of the GPU back.",
    R.INSUFFICIENT_GPU_MEMORY: "The GPU has too little free memory.",
    R.GPU_OUT_OF_MEMORY: "The driver ran out of memory in the midst of a restore: the operator replaces the pod.",
    R.COLD_STARTED: "The agent has told the replica to start cold.",
    R.CAPTURE_STARTED: "The agent takes the artifact; the replica stands still for the time of the freeze.",
}
"""Every reason and its meaning."""


@dataclass(frozen=True, kw_only=True)
class ConditionDoc:
    """A condition. `good` is the status in which nobody has to look; None: neither is better."""

    kind: str
    type: str
    good: str | None
    true: str
    false: str
    reasons: tuple[str, ...]


_CAPTURE_FAILURES = (
    R.SOURCE_GONE,
    R.SOURCE_RELEASED,
    R.AGENT_RESTARTED,
    R.PROTOCOL_VERSION,
    R.NODE_NOT_CAPABLE,
    R.PREFLIGHT_INET_SOCKET,
    R.PREFLIGHT_ABSTRACT_SOCKET,
    R.PREFLIGHT_IO_URING,
    R.PREFLIGHT_SESSION,
    R.PREFLIGHT_SIZE,
    R.INSUFFICIENT_DISK,
    R.INSUFFICIENT_MEMORY,
    R.DUMP_FAILED,
    R.CAPTURE_TIMEOUT,
    R.STORE_FAILED,
    R.GPU_UNAVAILABLE,
    R.GPU_NOT_SUPPORTED,
    R.GPU_CHECKPOINT_FAILED,
    R.GPU_STATE_LOST,
)

CONDITIONS: tuple[ConditionDoc, ...] = (
    ConditionDoc(
        kind="VLLMSnapshot",
        type=c.READY,
        good="True",
        true="All that the spec asks for is there. kstatus, and with it Helm, Argo CD and Flux, wait for it.",
        false="Replicas are missing, not ready, or of an old revision.",
        reasons=(
            R.ALL_REPLICAS_READY,
            R.SCALED_TO_ZERO,
            R.REPLICAS_NOT_READY,
            R.WAITING_FOR_SNAPSHOT,
            R.ROLLING_UPDATE,
            R.INVALID_SPEC,
        ),
    ),
    ConditionDoc(
        kind="VLLMSnapshot",
        type=c.SNAPSHOT_READY,
        good="True",
        true="New replicas can be restored on the nodes that the message names.",
        false="The next replica starts cold.",
        reasons=(
            R.CAPTURED,
            R.CAPTURE_DISABLED,
            R.WAITING_FOR_BARRIER,
            R.CAPTURE_FAILED,
            R.ARTIFACT_QUARANTINED,
            R.RESTORE_SLOWER,
            R.UNATTENDED,
            R.PROTOCOL_VERSION,
            R.NO_ARTIFACT,
        ),
    ),
    ConditionDoc(
        kind="VLLMSnapshot",
        type=c.PROGRESSING,
        good=None,
        true="Something is being done.",
        false="Nothing is being done.",
        reasons=(
            R.STABLE,
            R.REPLICAS_NOT_READY,
            R.WAITING_FOR_SNAPSHOT,
            R.ROLLING_UPDATE,
            R.RECAPTURING,
            R.POD_UNSCHEDULABLE,
            R.INVALID_SPEC,
        ),
    ),
    ConditionDoc(
        kind="VLLMSnapshot",
        type=c.DEGRADED,
        good="False",
        true="Somebody should look. Of several troubles the most pressing one is the reason.",
        false="There is no trouble.",
        reasons=(
            R.AS_EXPECTED,
            R.INVALID_SPEC,
            R.NAME_CONFLICT,
            R.NO_PORT_LEFT,
            R.POD_REJECTED,
            R.SERVICE_REJECTED,
            R.DELETION_REFUSED,
            R.WRITE_REFUSED,
            R.POD_UNSCHEDULABLE,
            R.CANARY_MISMATCH,
            R.ENGINE_FAILED,
            R.RESTORE_REQUIRED,
            R.ARTIFACT_QUARANTINED,
            R.CAPTURE_FAILED,
            R.RESTORE_SLOWER,
        ),
    ),
    ConditionDoc(
        kind="VLLMSnapshot",
        type=c.STALE,
        good="False",
        true="An artifact no longer fits its node or its image. It is taken again with the next cold start there.",
        false="Every artifact fits its node.",
        reasons=(R.AS_EXPECTED, R.ENVIRONMENT_CHANGED, R.IDENTITY_MISMATCH),
    ),
    ConditionDoc(
        kind="VLLMSnapshotContent",
        type=c.CAPTURED,
        good="True",
        true="The artifact is durable. It stays so: exactly one of Captured and Failed becomes True.",
        false="Never written.",
        reasons=(R.CAPTURED,),
    ),
    ConditionDoc(
        kind="VLLMSnapshotContent",
        type=c.FAILED,
        good=None,
        true="The order was not fulfilled, and will not be.",
        false="Never written.",
        reasons=_CAPTURE_FAILURES,
    ),
    ConditionDoc(
        kind="VLLMSnapshotContent",
        type=c.QUARANTINED,
        good=None,
        true="The breaker is open: nothing is restored from the artifact any more.",
        false="Never written.",
        reasons=(
            R.CANARY_MISMATCH,
            R.ARTIFACT_CORRUPT,
            R.IDENTITY_MISMATCH,
            R.FAILURE_BUDGET_SPENT,
            R.ARTIFACT_MISSING,
            R.EVICTED,
        ),
    ),
    ConditionDoc(
        kind="VLLMSnapshotContent",
        type=c.SLOWER,
        good="False",
        true="Restores take longer than a cold start: replicas start cold on the node, and once an hour one is restored all the same. "
        "With `restore.policy: Require` they are restored nevertheless.",
        false="Restores have become quicker than a cold start again. Never written before they were slower.",
        reasons=(R.RESTORE_SLOWER, R.AS_EXPECTED),
    ),
    ConditionDoc(
        kind="VLLMSnapshotNode",
        type=c.READY,
        good="True",
        true="Replicas can be captured and restored on the node.",
        false="Replicas start cold there. The checks in the status say why, and what helps.",
        reasons=(R.AS_EXPECTED, R.NODE_NOT_CAPABLE),
    ),
    ConditionDoc(
        kind="VLLMSnapshotNode",
        type=c.GPU_READY,
        good="True",
        true="Replicas with a GPU can be captured and restored there. Only on nodes with GPUs.",
        false="Replicas with a GPU start cold there.",
        reasons=(R.AS_EXPECTED, R.GPU_UNAVAILABLE),
    ),
    ConditionDoc(
        kind="Pod",
        type=c.CONDITION_VERIFIED,
        good="True",
        true="The replica's answer after it came up equals the recorded one. A readiness gate: without it no traffic comes.",
        false="The replica has not proved itself (yet).",
        reasons=(
            R.VERIFIED,
            R.UNATTENDED,
            R.STARTING,
            R.CANARY_MISMATCH,
            R.ENGINE_FAILED,
            R.RESTORE_REQUIRED,
            *sorted(c.DISCARD),
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class EventDoc:
    """An event of the agent; those of the operator follow from the conditions."""

    reason: str
    action: str
    warning: bool
    when: str


AGENT_EVENTS: tuple[EventDoc, ...] = (
    EventDoc(
        reason=R.COLD_STARTED, action="Start", warning=False, when="a container is told to start cold; the note has the reason"
    ),
    EventDoc(
        reason=R.RESTORE_REQUIRED,
        action="Start",
        warning=True,
        when="a container is told to end: its policy forbids a cold start",
    ),
    EventDoc(reason=R.GPU_OUT_OF_MEMORY, action="Start", warning=True, when="the same, and the operator replaces the pod"),
    EventDoc(reason=R.RESTORED, action="Restore", warning=False, when="a restored replica serves"),
    EventDoc(reason=R.RESTORE_FAILED, action="Restore", warning=True, when="a restore failed; the note has the reason"),
    EventDoc(reason=R.CAPTURE_STARTED, action="Capture", warning=False, when="a capture begins"),
    EventDoc(reason=R.CAPTURED, action="Capture", warning=False, when="an artifact is durable"),
    EventDoc(reason=R.CAPTURE_FAILED, action="Capture", warning=True, when="an order was not fulfilled; the note has the reason"),
    EventDoc(
        reason=R.EVICTED,
        action="Evict",
        warning=False,
        when="an artifact was removed from a full store (on the VLLMSnapshot alone: it has no replica there); the note says for what",
    ),
    EventDoc(reason=R.CANARY_MISMATCH, action="Verify", warning=True, when="a replica gave a wrong answer and was ended"),
)
"""Written on the pod and on its VLLMSnapshot, once per container or content: the name of an event follows from what it says."""
