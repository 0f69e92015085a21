"""Every name that operator, agent, child, chart and tests share: groups, labels, annotations, conditions, reasons, env."""

from __future__ import annotations

from typing import Final

GROUP: Final = "vllmsnapshot.io"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

# --- labels (selectable, short) --------------------------------------------------------------------------------------
LABEL_SNAPSHOT: Final = f"{GROUP}/snapshot"
"""Name of the VLLMSnapshot. With LABEL_ROLE it is the selector of the Service and of the scale subresource."""
LABEL_SNAPSHOT_UID: Final = f"{GROUP}/snapshot-uid"
"""UID of the VLLMSnapshot: a recreated one of the same name owns nothing of its predecessor."""
LABEL_ROLE: Final = f"{GROUP}/role"
ROLE_REPLICA: Final = "replica"
LABEL_REVISION: Final = f"{GROUP}/revision"
"""Hash of the pod template; a change rolls the pods."""
LABEL_IDENTITY: Final = f"{GROUP}/identity"
"""Key of the artifact: hash of all that shapes the process image (see controller/pods.py). Not the port, not the pod's place."""
LABEL_NODE: Final = f"{GROUP}/node"
"""Node of a VLLMSnapshotContent, for the agents' selector (hashed where the node name does not fit a label)."""
LABEL_START_MODE: Final = f"{GROUP}/start-mode"
"""How the replica came up: START_COLD or START_RESTORE. Written by the agent."""
LABEL_BENCH: Final = f"{GROUP}/bench-of"
"""On the temporary copy that `kubectl vsnap bench` measures: the name of the snapshot that it is a copy of."""
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "vllmsnapshot"
LABEL_COMPONENT: Final = "app.kubernetes.io/component"
COMPONENT_AGENT: Final = "agent"
COMPONENT_OPERATOR: Final = "operator"

START_COLD: Final = "cold"
START_RESTORE: Final = "restore"

# --- annotations -----------------------------------------------------------------------------------------------------
ANNOTATION_PORT: Final = f"{GROUP}/port"
"""The port that the operator assigned to this pod; the agent writes it into the release marker."""
ANNOTATION_SETTINGS: Final = f"{GROUP}/settings"
"""JSON of api.types.PodSettings: the policy of the snapshot as the agent needs it, frozen at pod creation."""
ANNOTATION_REPORT: Final = f"{GROUP}/report"
"""JSON of api.types.PodReport: what the agent saw and did in this pod."""

ANNOTATION_RECAPTURE: Final = f"{GROUP}/recapture"
"""On a VLLMSnapshot, by a user: a new value asks to take its artifacts again. Only compared for equality. On a
VLLMSnapshotContent, by the operator at creation: the request under which it was ordered."""
ANNOTATION_VERIFY: Final = f"{GROUP}/verify"
"""On a VLLMSnapshotContent, by a user: a new value asks the agent to compute every digest again. `status.verification` answers
with the same value. Only compared for equality."""

# --- finalizers, field managers --------------------------------------------------------------------------------------
FINALIZER_SNAPSHOT: Final = f"{GROUP}/contents"
"""On a VLLMSnapshot, held by the operator until its contents are deleted or retained (cluster-scoped objects cannot have a
namespaced owner, so the garbage collector does not do it)."""
FINALIZER_CONTENT: Final = f"{GROUP}/artifact"
"""On a VLLMSnapshotContent, held by the agent of its node until the files are gone."""
MANAGER_OPERATOR: Final = "vllmsnapshot-operator"
MANAGER_OPERATOR_UNATTENDED: Final = "vllmsnapshot-operator-unattended"
MANAGER_AGENT: Final = "vllmsnapshot-agent"
MANAGER_CLI: Final = "kubectl-vsnap"

# --- limits ----------------------------------------------------------------------------------------------------------
FACT_LENGTH: Final = 4096
"""Of a fact about a node. The longest, the list of CPU flags, has 1500 characters on servers of 2025."""

# --- pod -------------------------------------------------------------------------------------------------------------
CONTAINER: Final = "engine"
CONTROL_VOLUME: Final = "vllmsnapshot-control"
SCRATCH_VOLUME: Final = "vllmsnapshot-scratch"
SHM_VOLUME: Final = "vllmsnapshot-shm"
PORT_NAME: Final = "http"
CONDITION_VERIFIED: Final = f"{GROUP}/Verified"
"""Readiness gate: the replica's answer after it came up equals the recorded one."""

ENV_PORT: Final = "VLLMSNAPSHOT_PORT"
ENV_HOST: Final = "VLLMSNAPSHOT_HOST"
ENV_MODEL: Final = "VLLMSNAPSHOT_MODEL"
ENV_REVISION: Final = "VLLMSNAPSHOT_REVISION"
ENV_WEIGHTS: Final = "VLLMSNAPSHOT_WEIGHTS"
ENV_TERM_GRACE: Final = "VLLMSNAPSHOT_TERM_GRACE_S"
ENV_GPU_CHOICE: Final = ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Which GPUs a container gets and a process sees. The device plugin's to set: what a pod says itself would override it."""
GPU: Final = "nvidia.com/gpu"
"""Resource of the device plugin: one whole GPU each."""
ENV_RESERVED_PREFIX: Final = "VLLMSNAPSHOT_"

# --- conditions ------------------------------------------------------------------------------------------------------
READY: Final = "Ready"
GPU_READY: Final = "GpuReady"
"""Of a VLLMSnapshotNode with GPUs: whether replicas with a GPU can be captured and restored there. Ready is about all others."""
SNAPSHOT_READY: Final = "SnapshotReady"
PROGRESSING: Final = "Progressing"
DEGRADED: Final = "Degraded"
STALE: Final = "Stale"
CAPTURED: Final = "Captured"
FAILED: Final = "Failed"
QUARANTINED: Final = "Quarantined"
SLOWER: Final = "Slower"


NODE_PROTOCOL: Final = 1
"""What operator and agent mean by orders, reports and statuses. To be raised when either of an older version would act wrongly on what
the other writes; a field that the older one may ignore is no reason. (What child and agent mean is `protocol.PROTOCOL_VERSION`.)"""


class Reason:
    """Reasons of conditions, events and start decisions. Part of the API: listed in docs, never reworded."""

    # why a replica started as it did (PodReport.reason, Start.reason)
    RESTORED: Final = "Restored"
    NO_ARTIFACT: Final = "NoArtifact"
    CAPTURE_IN_PROGRESS: Final = "CaptureInProgress"
    RESTORE_DISABLED: Final = "RestoreDisabled"
    RESTORE_REQUIRED: Final = "RestoreRequired"
    IDENTITY_MISMATCH: Final = "IdentityMismatch"
    ARTIFACT_QUARANTINED: Final = "ArtifactQuarantined"
    ARTIFACT_MISSING: Final = "ArtifactMissing"
    ARTIFACT_CORRUPT: Final = "ArtifactCorrupt"
    NODE_NOT_CAPABLE: Final = "NodeNotCapable"
    INSUFFICIENT_MEMORY: Final = "InsufficientMemory"
    INSUFFICIENT_DISK: Final = "InsufficientDisk"
    RESTORE_FAILED: Final = "RestoreFailed"
    RESTORE_TIMEOUT: Final = "RestoreTimeout"
    RESTORE_DIED: Final = "RestoreDied"
    RESTORE_SLOWER: Final = "RestoreSlower"
    ENGINE_RUNNING: Final = "EngineRunning"
    FAILURE_BUDGET_SPENT: Final = "FailureBudgetSpent"
    PROTOCOL_VERSION: Final = "ProtocolVersion"
    UNATTENDED: Final = "Unattended"
    AGENT_RESTARTED: Final = "AgentRestarted"
    RECAPTURE: Final = "Recapture"
    POD_DELETED: Final = "PodDeleted"

    # why a replica is not (yet) verified
    STARTING: Final = "Starting"
    CANARY_MISMATCH: Final = "CanaryMismatch"
    ENGINE_FAILED: Final = "EngineFailed"
    VERIFIED: Final = "Verified"

    # capture
    CAPTURED: Final = "Captured"
    WAITING_FOR_BARRIER: Final = "WaitingForBarrier"
    SOURCE_GONE: Final = "SourceGone"
    SOURCE_RELEASED: Final = "SourceAlreadyReleased"
    PREFLIGHT_INET_SOCKET: Final = "InetSocketLeft"
    PREFLIGHT_ABSTRACT_SOCKET: Final = "AbstractSocketOnHostNetwork"
    PREFLIGHT_IO_URING: Final = "IoUringInUse"
    PREFLIGHT_SESSION: Final = "ProcessOutsideSession"
    PREFLIGHT_SIZE: Final = "ArtifactTooLarge"
    DUMP_FAILED: Final = "DumpFailed"
    CAPTURE_TIMEOUT: Final = "CaptureTimeout"
    STORE_FAILED: Final = "StoreFailed"
    EVICTED: Final = "Evicted"

    # events only
    COLD_STARTED: Final = "ColdStarted"
    CAPTURE_STARTED: Final = "CaptureStarted"

    # snapshot
    ALL_REPLICAS_READY: Final = "AllReplicasReady"
    REPLICAS_NOT_READY: Final = "ReplicasNotReady"
    SCALED_TO_ZERO: Final = "ScaledToZero"
    WAITING_FOR_SNAPSHOT: Final = "WaitingForSnapshot"
    ROLLING_UPDATE: Final = "RollingUpdate"
    RECAPTURING: Final = "Recapturing"
    STABLE: Final = "Stable"
    CAPTURE_DISABLED: Final = "CaptureDisabled"
    CAPTURE_FAILED: Final = "CaptureFailed"
    NO_PORT_LEFT: Final = "NoPortLeft"
    NAME_CONFLICT: Final = "NameConflict"
    POD_UNSCHEDULABLE: Final = "PodUnschedulable"
    POD_REJECTED: Final = "PodRejected"
    SERVICE_REJECTED: Final = "ServiceRejected"
    DELETION_REFUSED: Final = "DeletionRefused"
    WRITE_REFUSED: Final = "WriteRefused"
    INVALID_SPEC: Final = "InvalidSpec"
    AS_EXPECTED: Final = "AsExpected"
    ENVIRONMENT_CHANGED: Final = "EnvironmentChanged"

    # GPU (captures and restores)
    GPU_UNAVAILABLE: Final = "GpuUnavailable"
    GPU_NOT_SUPPORTED: Final = "GpuNotSupported"
    GPU_CHECKPOINT_FAILED: Final = "GpuCheckpointFailed"
    GPU_STATE_LOST: Final = "GpuStateLost"
    GPU_RESTORE_FAILED: Final = "GpuRestoreFailed"
    INSUFFICIENT_GPU_MEMORY: Final = "InsufficientGpuMemory"
    GPU_OUT_OF_MEMORY: Final = "GpuOutOfMemory"
    """The driver itself ran out in the midst of a restore. The operator replaces the pod."""


DISCARD: Final = frozenset({Reason.GPU_OUT_OF_MEMORY})
"""Reasons of a start (PodReport.reason) for which the operator replaces the pod unless it serves: what failed must not be tried
again in its place. Until then, and where there is no operator, the replica starts cold there."""
