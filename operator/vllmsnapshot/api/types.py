"""The custom resources as pydantic models. `api/crd.py` turns them into deploy/crds; what is refused, and why, is here.

Conventions (Kubernetes API conventions and kube-api-linter): no floats (durations in status are strings like `4.31s`, as
metav1.Duration), no booleans in spec (enums grow, booleans do not), every string and list is bounded so that the cost of the
CEL rules can be estimated, `*Seconds` are integers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from . import constants as c


def camel(name: str) -> str:
    """snake_case to the camelCase of Kubernetes fields."""
    head, *tail = name.split("_")
    return head + "".join(word.capitalize() for word in tail)


class Model(BaseModel):
    """Base of all API models: camelCase on the wire, unknown fields ignored (the API server prunes them)."""

    model_config = ConfigDict(alias_generator=camel, populate_by_name=True, extra="ignore", frozen=True)

    def dump(self) -> dict[str, Any]:
        """As a Kubernetes JSON object: wire names, no unset optional fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


@dataclass(frozen=True)
class CEL:
    """A validation rule of the CRD (x-kubernetes-validations), put in the metadata of a field or in `RULES` of a model."""

    rule: str
    message: str
    reason: Literal["FieldValueInvalid", "FieldValueForbidden", "FieldValueRequired"] = "FieldValueInvalid"
    field_path: str | None = None


@dataclass(frozen=True)
class ListMap:
    """x-kubernetes-list-type: map with this key, so that server-side apply merges entries instead of replacing the list."""

    key: str


@dataclass(frozen=True)
class PreserveUnknown:
    """Marks an object that the schema does not describe (x-kubernetes-preserve-unknown-fields).

    `properties` (name to type) are described nevertheless: a CEL rule cannot look at fields that are not.
    """

    properties: tuple[tuple[str, Literal["boolean", "string", "array"]], ...] = ()


class IntOrString:
    """Marks x-kubernetes-int-or-string (a resource quantity)."""


Name = Annotated[str, StringConstraints(min_length=1, max_length=253)]
ShortText = Annotated[str, StringConstraints(max_length=1024)]
Message = Annotated[str, StringConstraints(max_length=4096)]
Fact = Annotated[str, StringConstraints(max_length=c.FACT_LENGTH)]
Duration = Annotated[str, StringConstraints(max_length=32, pattern=r"^[0-9]+(\.[0-9]+)?s$")]
Port = Annotated[int, Field(ge=1, le=65535)]


def duration(seconds: float) -> str:
    """Seconds as the string that status fields hold, with two decimals (`4.31s`)."""
    return f"{max(0.0, seconds):.2f}s"


def seconds(text: str) -> float:
    """Back from `duration`. Raises ValueError if the text is not such a string."""
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?s", text):
        raise ValueError(f"not a duration in seconds: {text!r}")
    return float(text[:-1])


class Toggle(StrEnum):
    """On or off."""

    ENABLED = "Enabled"
    DISABLED = "Disabled"


class RestorePolicy(StrEnum):
    """What a replica may do: restore if it can (Prefer), only restore once an artifact exists (Require), never (Disabled)."""

    PREFER = "Prefer"
    REQUIRE = "Require"
    DISABLED = "Disabled"


class DeletionPolicy(StrEnum):
    """What happens to artifacts when the VLLMSnapshot is deleted."""

    DELETE = "Delete"
    RETAIN = "Retain"


class Weights(StrEnum):
    """Whether the weights are in the artifact.

    Discard: released before the dump, read again from the model after a restore. Keep: part of the artifact. Auto: one of the two,
    by what was measured (the rule is in `vllmsnapshot_child/weights.py`).
    """

    DISCARD = "Discard"
    KEEP = "Keep"
    AUTO = "Auto"


class ArtifactWeights(StrEnum):
    """As Weights, for an artifact that is there."""

    DISCARD = "Discard"
    KEEP = "Keep"


class EnvVar(Model):
    """An environment variable of the engine container, as in a Pod."""

    RULES: ClassVar[list[CEL]] = [
        CEL("!(has(self.value) && has(self.valueFrom))", "value and valueFrom exclude each other"),
        CEL(
            f"!self.name.startsWith('{c.ENV_RESERVED_PREFIX}') || self.name in ['VLLMSNAPSHOT_ENGINE', 'VLLMSNAPSHOT_SERVER']",
            f"names that start with {c.ENV_RESERVED_PREFIX} are set by the operator",
            "FieldValueForbidden",
            ".name",
        ),
        CEL(
            "self.name != 'VLLM_API_KEY'",
            "an API key would be frozen into the artifact; authenticate in front of the Service",
            "FieldValueForbidden",
            ".name",
        ),
        CEL(
            f"!(self.name in {list(c.ENV_GPU_CHOICE)})",
            "the device plugin chooses the GPU, and this would override it; use spec.resources",
            "FieldValueForbidden",
            ".name",
        ),
        CEL(
            "!(self.name in ['LD_PRELOAD', 'LD_LIBRARY_PATH'] && has(self.valueFrom))",
            "must be a literal value: it shapes the process image",
            "FieldValueForbidden",
            ".valueFrom",
        ),
    ]
    name: Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")]
    value: Annotated[str, StringConstraints(max_length=4096)] | None = None
    value_from: Annotated[dict[str, Any] | None, PreserveUnknown()] = None


Quantity = Annotated[int | str, IntOrString]


class Resources(Model):
    """Requests and limits of the engine container, as in a Pod."""

    RULES: ClassVar[list[CEL]] = [
        CEL(
            f"!has(self.limits) || !('{c.GPU}' in self.limits) || string(self.limits['{c.GPU}']) in ['0', '1']",
            f"a process image of more than one GPU cannot be captured: at most 1 {c.GPU}",
            field_path=".limits",
        ),
        CEL(
            f"!has(self.requests) || !('{c.GPU}' in self.requests) || has(self.limits) && '{c.GPU}' in self.limits "
            f"&& string(self.limits['{c.GPU}']) == string(self.requests['{c.GPU}'])",
            f"{c.GPU} must be the same in limits and requests (or in limits alone): a GPU is not shared",
            field_path=".requests",
        ),
    ]
    limits: Annotated[dict[str, Quantity] | None, Field(max_length=32)] = None
    requests: Annotated[dict[str, Quantity] | None, Field(max_length=32)] = None


class PortRange(Model):
    """Ports that hostNetwork replicas may get, both ends included."""

    RULES: ClassVar[list[CEL]] = [
        CEL("self.start <= self.end", "start must not be greater than end"),
    ]
    start: Annotated[int, Field(ge=1024, le=65535)]
    end: Annotated[int, Field(ge=1024, le=65535)]


class Serving(Model):
    """Where replicas listen."""

    RULES: ClassVar[list[CEL]] = [
        CEL(
            "self.hostNetwork != 'Enabled' || has(self.portRange)",
            "portRange is required with hostNetwork: each replica gets a port of its own",
            "FieldValueRequired",
            ".portRange",
        ),
        CEL(
            "self.hostNetwork == 'Enabled' || !has(self.portRange)",
            "portRange has no meaning without hostNetwork: every pod serves on serving.port",
            "FieldValueForbidden",
            ".portRange",
        ),
    ]
    port: Annotated[Port, Field(description="Port of the Service and, on the pod network, of every replica.")] = 8000
    host_network: Annotated[
        Toggle, Field(description="Enabled: replicas use the node's network, each on a port assigned out of portRange.")
    ] = Toggle.DISABLED
    port_range: PortRange | None = None
    service: Annotated[
        Toggle, Field(description="Enabled: a Service with the snapshot's name in front of the ready replicas.")
    ] = Toggle.ENABLED


class Capture(Model):
    """How the artifact is taken."""

    policy: Annotated[Toggle, Field(description="Disabled: no artifact is taken; every replica starts cold.")] = Toggle.ENABLED
    timeout_seconds: Annotated[
        int, Field(ge=10, le=3600, description="Limit of one capture at the barrier. When it has passed, the replica serves.")
    ] = 300
    retries: Annotated[
        int,
        Field(
            ge=0,
            le=10,
            description="Captures tried again at once, per node and identity, after a failed one: with the next cold start there. Further "
            "ones follow after pauses that double, from 10 minutes to 6 hours.",
        ),
    ] = 2
    max_artifact_bytes: Annotated[
        int | None,
        Field(ge=1 << 20, description="A larger artifact is refused before it is written. Unset: only disk space limits."),
    ] = None
    weights: Annotated[
        Weights,
        Field(
            description="Discard: weights are read from the model again after a restore. Keep: they are part of the artifact, which "
            "is larger by them. Auto: kept where restores on the node are quicker with them, by what was measured there."
        ),
    ] = Weights.DISCARD
    seed_timeout_seconds: Annotated[
        int,
        Field(
            ge=0,
            le=7200,
            description="How long further replicas of a new revision wait for the first one's capture before they start "
            "cold too.",
        ),
    ] = 600


class Restore(Model):
    """How replicas are restored."""

    policy: RestorePolicy = RestorePolicy.PREFER
    timeout_seconds: Annotated[
        int, Field(ge=5, le=3600, description="From the decision to serving. When it has passed, the replica starts cold.")
    ] = 120
    failure_budget: Annotated[
        int, Field(ge=1, le=100, description="Consecutive failed restores of an artifact after which it is not used any more.")
    ] = 3
    max_concurrent_per_node: Annotated[int, Field(ge=1, le=64, description="Restores at the same time on one node.")] = 2


class Artifact(Model):
    """What happens to artifacts."""

    retain: Annotated[int, Field(ge=1, le=10, description="Artifacts kept per node, counting the current identity's.")] = 1
    deletion_policy: DeletionPolicy = DeletionPolicy.DELETE


class Rollout(Model):
    """Limits of a rolling update, as in a Deployment (absolute numbers)."""

    RULES: ClassVar[list[CEL]] = [
        CEL("self.maxSurge + self.maxUnavailable > 0", "maxSurge and maxUnavailable must not both be 0"),
    ]
    max_surge: Annotated[int, Field(ge=0, le=100)] = 1
    max_unavailable: Annotated[int, Field(ge=0, le=100)] = 0


class PodMetadata(Model):
    """Labels and annotations added to every replica."""

    RULES: ClassVar[list[CEL]] = [
        CEL(
            f"!has(self.{kind}) || self.{kind}.all(k, !k.startsWith('{c.GROUP}/') && k != '{c.LABEL_MANAGED_BY}')",
            f"keys of {c.GROUP}/ and {c.LABEL_MANAGED_BY} belong to the operator",
            "FieldValueForbidden",
            f".{kind}",
        )
        for kind in ("labels", "annotations")
    ]
    labels: Annotated[dict[str, Annotated[str, StringConstraints(max_length=63)]] | None, Field(max_length=64)] = None
    annotations: Annotated[dict[str, Annotated[str, StringConstraints(max_length=4096)]] | None, Field(max_length=64)] = None


_POD_FORBIDDEN: dict[str, tuple[Literal["boolean", "string", "array"], str]] = {
    "hostPID": ("boolean", "host PIDs cannot be restored"),
    "hostIPC": ("boolean", "host IPC objects are not part of a process image"),
    "hostNetwork": ("boolean", "use serving.hostNetwork"),
    "shareProcessNamespace": ("boolean", "the engine must be PID 1's child in a namespace of its own"),
    "restartPolicy": ("string", "the operator needs Always"),
    "readinessGates": ("array", "the operator sets its own"),
    "enableServiceLinks": ("boolean", "service variables would be frozen into the artifact"),
    "ephemeralContainers": ("array", "not part of a template"),
}


class PodTemplate(Model):
    """Overlay on the replica's pod: volumes, mounts, placement, service account, sidecars. Container `engine` is merged by name."""

    RULES: ClassVar[list[CEL]] = [
        CEL(f"!has(self.spec) || !has(self.spec.{name})", f"spec.{name}: {why}", "FieldValueForbidden", ".spec")
        for name, (_, why) in _POD_FORBIDDEN.items()
    ]
    metadata: PodMetadata | None = None
    spec: Annotated[dict[str, Any] | None, PreserveUnknown(tuple((name, kind) for name, (kind, _) in _POD_FORBIDDEN.items()))] = (
        None
    )


def _no_resource(pattern: str, message: str) -> CEL:
    """A rule of VLLMSnapshotSpec: resources of such names cannot be captured. (Extended resources have limits in any case.)"""
    return CEL(
        "self.capture.policy == 'Disabled' || !has(self.resources) || !has(self.resources.limits) "
        f"|| self.resources.limits.all(name, !name.matches('{pattern}'))",
        f"{message}, or capture.policy: Disabled, which lets every replica start cold",
        field_path=".resources.limits",
    )


def _flag(*names: str) -> str:
    """Regular expression of a flag in args joined by newlines: either spelling of `-`, `=value` or a following item."""
    return "(" + "|".join(name.lstrip("-").replace("-", "[-_]") for name in names) + ")"


_ARGS = "self.join('\\n')"


def _no_flag(names: list[str], message: str) -> CEL:
    return CEL(f"!{_ARGS}.matches(r'(^|\\n)--?{_flag(*names)}([=.\\n]|$)')", message, "FieldValueForbidden")


def _only_one(names: list[str], what: str) -> CEL:
    return CEL(
        f"!{_ARGS}.matches(r'(^|\\n)--?{_flag(*names)}[=\\n]([^1]|1[^\\n])')",
        f"{what} greater than 1 cannot be captured: a snapshot holds one rank",
    )


ARGS_RULES: list[CEL] = [
    _only_one(["tensor-parallel-size", "tp"], "tensor parallel size"),
    _only_one(["pipeline-parallel-size", "pp"], "pipeline parallel size"),
    _only_one(["data-parallel-size", "dp", "data-parallel-size-local", "dpl"], "data parallel size"),
    _only_one(["prefill-context-parallel-size", "pcp", "decode-context-parallel-size", "dcp"], "context parallel size"),
    _only_one(["api-server-count", "asc"], "API server count"),
    _only_one(["nnodes", "n"], "number of nodes"),
    _no_flag(
        ["enable-expert-parallel", "ep", "enable-eplb", "enable-elastic-ep"],
        "--enable-expert-parallel, --enable-eplb and --enable-elastic-ep need several ranks: a snapshot holds one",
    ),
    _no_flag(
        ["distributed-executor-backend"],
        "--distributed-executor-backend: one rank needs no other executor than vLLM's own choice, and Ray's workers cannot be captured",
    ),
    _no_flag(["device", "device-ids"], "--device-ids: the device plugin chooses the GPU; use spec.resources"),
    _no_flag(
        ["kv-transfer-config", "kv-events-config", "ec-transfer-config", "weight-transfer-config", "otlp-traces-endpoint"],
        "--kv-transfer-config, --kv-events-config, --ec-transfer-config, --weight-transfer-config and --otlp-traces-endpoint open "
        "connections to others, which cannot be captured",
    ),
    _no_flag(
        ["kv-offloading-size", "kv-offloading-backend"],
        "--kv-offloading-*: KV cache in the host's memory is neither released before the capture nor registered with the GPU after it",
    ),
    _no_flag(
        [
            "cpu-offload-gb",
            "cpu-offload-params",
            "offload-backend",
            "offload-group-size",
            "offload-num-in-group",
            "offload-params",
        ],
        "--cpu-offload-* and --offload-*: weights in the host's memory are not released before the capture; use a GPU that holds them",
    ),
    CEL(
        f"!{_ARGS}.matches(r'(^|\\n)--{_flag('mm-tensor-ipc')}[=\\n]torch_shm(\\n|$)')",
        "--mm-tensor-ipc=torch_shm shares memory between processes (CUDA IPC), which cannot be captured",
    ),
    _no_flag(
        ["speculative-config", "sc", "spec-method", "spec-model", "spec-tokens"],
        "speculative decoding cannot be captured: its drafter is not released and reloaded",
    ),
    _no_flag(
        ["enable-lora", "lora-modules", "max-loras", "max-lora-rank"],
        "LoRA adapters are not reloaded with the weights; serve a merged model",
    ),
    _no_flag(["api-key"], "an API key would be frozen into the artifact; authenticate in front of the Service"),
    _no_flag(["host", "port", "uds"], "--host, --port and --uds are set at release; use spec.serving"),
    _no_flag(["grpc", "grpc-port", "headless"], "only the HTTP server waits at the barrier"),
    _no_flag(
        ["ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs", "ssl-ciphers", "enable-ssl-refresh"],
        "terminate TLS in front of the Service",
    ),
    _no_flag(["middleware"], "middleware is loaded before the barrier and cannot be proven by the canary"),
    _no_flag(["model", "revision"], "use spec.model and spec.revision"),
    _no_flag(["config"], "a config file hides settings that this API checks; write them as args"),
    _no_flag(["enable-sleep-mode", "no-enable-sleep-mode"], "sleep mode is set by the snapshot child where the platform has it"),
    _no_flag(["worker-extension-cls"], "the snapshot child needs the worker extension for itself"),
    CEL(
        f"!{_ARGS}.matches(r'(^|\\n)--{_flag('logprobs-mode')}[=\\n](raw_logits|processed_logits)(\\n|$)')",
        "the canary compares log-probabilities: raw_logprobs or processed_logprobs",
    ),
]

Arg = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class VLLMSnapshotSpec(Model):
    """What the user wants: a model served by replicas that start from a snapshot."""

    RULES: ClassVar[list[CEL]] = [
        CEL("self.model == oldSelf.model", "model is immutable: create another VLLMSnapshot", "FieldValueForbidden", ".model"),
        CEL(
            "!has(self.args) || size(self.args) == 0 || self.args[0].startsWith('-')",
            "args must start with a flag: the model is spec.model",
            field_path=".args",
        ),
        _no_resource("^nvidia[.]com/mig-", f"a MIG device (nvidia.com/mig-*) cannot be captured: request {c.GPU}"),
        _no_resource(
            "^nvidia[.]com/.*[.]shared$", f"a time-sliced GPU (nvidia.com/gpu.shared) cannot be captured: request {c.GPU}"
        ),
        _no_resource(
            "^(amd[.]com/|google[.]com/tpu|gpu[.]intel[.]com/|habana[.]ai/|aws[.]amazon[.]com/neuron|huawei[.]com/Ascend)",
            f"only GPUs of NVIDIA can be captured (amd.com/gpu, google.com/tpu and others cannot): request {c.GPU}",
        ),
        CEL(
            "self.capture.policy == 'Disabled' || self.serving.hostNetwork != 'Enabled' || !has(self.resources) "
            f"|| !has(self.resources.limits) || !('{c.GPU}' in self.resources.limits) "
            f"|| string(self.resources.limits['{c.GPU}']) == '0'",
            "hostNetwork with a GPU cannot be captured: CUDA's abstract unix sockets of two replicas would collide; use the pod network, "
            "or capture.policy: Disabled, which lets every replica start cold",
            field_path=".serving.hostNetwork",
        ),
    ]
    model: Annotated[
        str, StringConstraints(min_length=1, max_length=512), Field(description="Model name or path, as `vllm serve`.")
    ]
    revision: Annotated[
        str | None, StringConstraints(min_length=1, max_length=128), Field(description="Revision of the model, as `--revision`.")
    ] = None
    image: Annotated[
        str, StringConstraints(min_length=1, max_length=512), Field(description="Image with vLLM and the snapshot child.")
    ]
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    args: Annotated[list[Arg] | None, Field(max_length=128, description="Arguments of `vllm serve`."), tuple(ARGS_RULES)] = None
    env: Annotated[list[EnvVar] | None, Field(max_length=128), ListMap("name")] = None
    resources: Resources | None = None
    replicas: Annotated[
        int, Field(ge=0, le=10000, description="Wanted replicas. 0 keeps the artifact and frees everything else.")
    ] = 1
    serving: Serving = Serving()
    capture: Capture = Capture()
    restore: Restore = Restore()
    artifact: Artifact = Artifact()
    rollout: Rollout = Rollout()
    pod_template: PodTemplate | None = None


class Condition(Model):
    """metav1.Condition."""

    type: Annotated[str, StringConstraints(min_length=1, max_length=316)]
    status: Literal["True", "False", "Unknown"]
    observed_generation: Annotated[int | None, Field(ge=0)] = None
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    reason: Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    message: Annotated[str, StringConstraints(max_length=32768)]


Conditions = Annotated[list[Condition] | None, Field(max_length=16), ListMap("type")]


class SnapshotRecord(Model):
    """The artifact that new replicas are restored from."""

    content: Name | None = None
    identity: Annotated[str, StringConstraints(max_length=64)] | None = None
    bytes: Annotated[int | None, Field(ge=0)] = None
    captured_at: Annotated[str | None, Field(json_schema_extra={"format": "date-time"})] = None
    node: Name | None = None


class Timings(Model):
    """How long things took, for the newest replica of each kind. Cold and restored starts count from pod creation to serving."""

    cold_start: Duration | None = None
    capture: Duration | None = None
    freeze: Duration | None = None
    restored_start: Duration | None = None
    restore: Duration | None = None
    release: Duration | None = None
    speedup: Annotated[str, StringConstraints(max_length=16)] | None = None


class RecapturePhase(StrEnum):
    """Where a request to take the artifacts again stands: not begun, under way, fulfilled, or given up."""

    WAITING = "Waiting"
    RUNNING = "Running"
    DONE = "Done"
    FAILED = "Failed"


class RecaptureStatus(Model):
    """The last request to take the artifacts again."""

    request: Annotated[
        str, StringConstraints(min_length=1, max_length=128), Field(description=f"The value of {c.ANNOTATION_RECAPTURE}.")
    ]
    phase: RecapturePhase
    message: Message = ""


class VLLMSnapshotStatus(Model):
    """What is, as the operator last saw it."""

    observed_generation: Annotated[int | None, Field(ge=0)] = None
    conditions: Conditions = None
    replicas: Annotated[int, Field(ge=0)] = 0
    ready_replicas: Annotated[int, Field(ge=0)] = 0
    restored_replicas: Annotated[int, Field(ge=0)] = 0
    cold_replicas: Annotated[int, Field(ge=0)] = 0
    updated_replicas: Annotated[int, Field(ge=0)] = 0
    ready: Annotated[str, StringConstraints(max_length=32)] | None = None
    selector: Annotated[str, StringConstraints(max_length=1024)] | None = None
    revision: Annotated[str, StringConstraints(max_length=64)] | None = None
    identity: Annotated[
        str | None, StringConstraints(max_length=64), Field(description="Key of the artifacts that fit the spec.")
    ] = None
    snapshot: SnapshotRecord | None = None
    timings: Timings | None = None
    recapture: RecaptureStatus | None = None
    cold_start_reason: Annotated[Message | None, Field(description="Why the newest replica that started cold did so.")] = None


class VLLMSnapshot(Model):
    """The claim: see VLLMSnapshotSpec."""

    KIND: ClassVar[str] = "VLLMSnapshot"
    PLURAL: ClassVar[str] = "vllmsnapshots"
    metadata: dict[str, Any]
    spec: VLLMSnapshotSpec
    status: VLLMSnapshotStatus | None = None


class SnapshotRef(Model):
    """The VLLMSnapshot that an artifact belongs to, pinned by UID."""

    namespace: Name
    name: Name
    uid: Annotated[str, StringConstraints(min_length=1, max_length=64)]


class SourcePod(Model):
    """The pod whose engine is captured, pinned by UID."""

    name: Name
    uid: Annotated[str, StringConstraints(min_length=1, max_length=64)]


class VLLMSnapshotContentSpec(Model):
    """The work order to the agent of one node. Immutable."""

    RULES: ClassVar[list[CEL]] = [CEL("self == oldSelf", "spec is immutable", "FieldValueForbidden")]
    snapshot_ref: SnapshotRef
    source_pod: SourcePod
    node_name: Name
    identity: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    timeout_seconds: Annotated[int, Field(ge=10, le=3600)] = 300
    max_artifact_bytes: Annotated[int | None, Field(ge=1 << 20)] = None
    failure_budget: Annotated[int, Field(ge=1, le=100)] = 3
    attempt: Annotated[
        int, Field(ge=0, description="Captures of this identity on this node that came to nothing in a row before this one.")
    ] = 0
    protocol: Annotated[int, Field(ge=1, description="Of the operator that ordered it. An agent of another one refuses.")] = 1


class ArtifactRecord(Model):
    """The files on the node."""

    bytes: Annotated[int, Field(ge=0)]
    digest: Annotated[
        str, StringConstraints(max_length=128), Field(description="sha256 of the manifest, which lists a digest per file.")
    ]
    captured_at: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    weights: Annotated[ArtifactWeights | None, Field(description="Whether the weights are in it.")] = None
    weights_reason: Annotated[ShortText | None, Field(description="Why, with the figures that decided.")] = None
    cold_start: Annotated[
        Duration | None,
        Field(
            description="What a cold start takes from the agent's decision on, by that of the captured replica. Restores must be quicker."
        ),
    ] = None


class RestoreCounts(Model):
    """Restores from this artifact."""

    succeeded: Annotated[int, Field(ge=0)] = 0
    failed: Annotated[int, Field(ge=0)] = 0
    consecutive_failures: Annotated[int, Field(ge=0)] = 0
    last_failure: Message | None = None
    last_succeeded_at: Annotated[
        str | None,
        Field(json_schema_extra={"format": "date-time"}, description="Which artifact goes first when the store is full."),
    ] = None


class VerificationOutcome(StrEnum):
    """What a verification found: every digest is right (Intact), one is not (Corrupt), there are no files (Missing), or it could
    not be finished and proves nothing (Failed)."""

    INTACT = "Intact"
    CORRUPT = "Corrupt"
    MISSING = "Missing"
    FAILED = "Failed"


class Verification(Model):
    """The last verification that a user asked for."""

    request: Annotated[
        str, StringConstraints(min_length=1, max_length=128), Field(description=f"The value of {c.ANNOTATION_VERIFY} it answers.")
    ]
    outcome: VerificationOutcome
    message: Message = ""
    files: Annotated[int, Field(ge=0)] = 0
    bytes: Annotated[int, Field(ge=0)] = 0
    took: Duration
    finished_at: Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class VLLMSnapshotContentStatus(Model):
    """What the agent made of the order: exactly one of Captured and Failed becomes True, and stays so."""

    conditions: Conditions = None
    artifact: ArtifactRecord | None = None
    phases: Annotated[dict[str, Duration] | None, Field(max_length=32)] = None
    environment: Annotated[
        dict[str, Fact] | None,
        Field(max_length=64, description="Facts of the node and image that a restore compares."),
    ] = None
    restores: RestoreCounts | None = None
    verification: Verification | None = None


class VLLMSnapshotContent(Model):
    """One artifact on one node: order and record."""

    KIND: ClassVar[str] = "VLLMSnapshotContent"
    PLURAL: ClassVar[str] = "vllmsnapshotcontents"
    metadata: dict[str, Any]
    spec: VLLMSnapshotContentSpec
    status: VLLMSnapshotContentStatus | None = None


class Check(Model):
    """One finding of the node doctor."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=63)]
    status: Literal["Pass", "Warn", "Fail"]
    message: Message = ""
    remedy: Message | None = None


class HeldArtifact(Model):
    """An artifact in this node's store."""

    content: Name
    bytes: Annotated[int, Field(ge=0)]


class VLLMSnapshotNodeStatus(Model):
    """What the agent knows of its node."""

    conditions: Conditions = None
    agent_version: ShortText | None = None
    protocol_version: Annotated[
        int | None, Field(ge=0, description="What the agent speaks. An operator of another one orders nothing from it.")
    ] = None
    boot_id: Annotated[str, StringConstraints(max_length=64)] | None = None
    checks: Annotated[list[Check] | None, Field(max_length=64), ListMap("name")] = None
    environment: Annotated[dict[str, Fact] | None, Field(max_length=64)] = None
    store_bytes_used: Annotated[int | None, Field(ge=0)] = None
    store_bytes_free: Annotated[int | None, Field(ge=0)] = None
    store_bytes_quota: Annotated[
        int | None, Field(ge=0, description="What all artifacts together may take; absent where there is no quota.")
    ] = None
    artifacts: Annotated[list[HeldArtifact] | None, Field(max_length=1024), ListMap("content")] = None
    restores_in_flight: Annotated[int, Field(ge=0)] = 0


class VLLMSnapshotNode(Model):
    """Doctor report and inventory of one node; named like the node."""

    KIND: ClassVar[str] = "VLLMSnapshotNode"
    PLURAL: ClassVar[str] = "vllmsnapshotnodes"
    metadata: dict[str, Any]
    status: VLLMSnapshotNodeStatus | None = None


# --- what travels in annotations -------------------------------------------------------------------------------------


class PodSettings(Model):
    """ANNOTATION_SETTINGS: the policy of the snapshot, for the agent (operator -> agent)."""

    restore_policy: RestorePolicy = RestorePolicy.PREFER
    restore_timeout_seconds: int = 120
    max_concurrent_per_node: int = 2
    capture: Toggle = Toggle.ENABLED
    recapture: str | None = None
    """The replica starts cold, whatever artifact there is, until its own order has been answered."""


class PodReport(Model):
    """ANNOTATION_REPORT: what happened in a pod (agent -> operator). Seconds are floats: an annotation is not a CRD field."""

    incarnation: str = ""
    start: Literal["", "cold", "restore"] = ""
    reason: str = ""
    message: str = ""
    content: str | None = None
    state: Literal["Deciding", "Restoring", "Starting", "AtBarrier", "Capturing", "Released", "Serving", "Failed"] = "Deciding"
    phases: dict[str, float] = {}
    serving_at: str | None = None
    restarts: int = 0
