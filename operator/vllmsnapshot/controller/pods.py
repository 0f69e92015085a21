"""Builders of the objects that the operator creates: pods, contents, the Service. Pure: values in, complete objects out.

Two hashes come from a spec. The *revision* covers all that a running pod must be replaced for; the *identity* only what shapes
the process image. So a changed port, probe or node selector rolls the pods, and the new ones restore from the same artifact.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from vllmsnapshot_child.environment import DEFAULTS
from vllmsnapshot_child.protocol import CONTROL_DIR, PROTOCOL_VERSION

from ..api import constants as c
from ..api.types import PodMetadata, PodSettings, Toggle, VLLMSnapshotSpec
from ..objects import digest, label_value
from ..world import Claim, Replica

Object = dict[str, Any]

IDENTITY_SCHEMA = 1
"""Raised when the meaning of an identity changes, so that no artifact taken before is mistaken for a match."""
REVISION_SCHEMA = 1
"""As IDENTITY_SCHEMA; raising it rolls every replica of every snapshot, so don't, short of a broken template."""

SCRATCH_DIR = "/tmp"  # noqa: S108 - where the pod mounts a volume of its own
SHM_DIR = "/dev/shm"  # noqa: S108
ALL_ADDRESSES = "0.0.0.0"  # noqa: S104 - of the pod
SHM_LIMIT = "2Gi"
"""Limit of /dev/shm. What is written there counts as the container's memory; one rank needs little of it."""

TERMINATION_GRACE_S = 120
"""How long a replica that is told to end may take to finish what it has begun (`vllmsnapshot_child.drain`): its notice of 5 s
and the longest answer, which at 30 tokens a second has 3000 tokens. One without requests ends after the notice."""
TERMINATION_MARGIN_S = 5
"""Of it, left for PID 1 to end in order and say so, before the kubelet kills it."""

MAX_PREFERRED_NODES = 32
"""Node preferences put into a pod: enough to find an artifact, few enough to keep the object small."""

FIXED_ENV: Mapping[str, str] = {
    # Everything that is written lands in the scratch volume, which travels with the artifact.
    "HOME": SCRATCH_DIR,
    "TMPDIR": SCRATCH_DIR,
    "XDG_CACHE_HOME": f"{SCRATCH_DIR}/.cache",
    "XDG_CONFIG_HOME": f"{SCRATCH_DIR}/.config",
    "VLLM_CACHE_ROOT": f"{SCRATCH_DIR}/.cache/vllm",
    "VLLM_CONFIG_ROOT": f"{SCRATCH_DIR}/.config/vllm",
    "TRITON_CACHE_DIR": f"{SCRATCH_DIR}/.cache/triton",
    "TORCHINDUCTOR_CACHE_DIR": f"{SCRATCH_DIR}/.cache/inductor",
    **DEFAULTS,
}
"""Environment of every engine; spec.env and the overlay win. HF_HUB_OFFLINE is not among it: a model that is named by its hub
name could never be downloaded then. Whoever mounts the model sets it."""

ENV_ALLOWED = frozenset({"VLLMSNAPSHOT_ENGINE", "VLLMSNAPSHOT_SERVER"})
"""Names of the reserved prefix that users may set."""

_ENGINE_FORBIDDEN = {
    "args": "use spec.args, which is checked",
    "image": "use spec.image",
    "imagePullPolicy": "use spec.imagePullPolicy",
    "resources": "use spec.resources",
}
_ENGINE_NOT_SHAPING = frozenset({"env", "startupProbe", "livenessProbe", "readinessProbe", "lifecycle", "ports"})
"""How it is probed and stopped and which ports are declared does not touch the process; env is hashed apart."""
_POD_OURS = frozenset(
    {
        "hostPID",
        "hostIPC",
        "hostNetwork",
        "shareProcessNamespace",
        "restartPolicy",
        "readinessGates",
        "enableServiceLinks",
        "ephemeralContainers",
    }
)
_POD_LISTS = ("tolerations", "imagePullSecrets", "initContainers")


class OverlayError(ValueError):
    """spec.podTemplate cannot be merged; the text names the field and the remedy."""


@dataclass(frozen=True)
class Template:
    """The hashes of a spec."""

    revision: str
    identity: str


def template(spec: VLLMSnapshotSpec) -> Template:
    """Revision and identity of a spec. Raises OverlayError where the overlay cannot be merged."""
    overlay = _overlay(spec)
    engine = _engine_overlay(overlay)
    raw = spec.dump()
    # An overlay that gives the container a probe or a hook, and nothing else, is as good as none.
    shaping = {k: v for k, v in engine.items() if k not in _ENGINE_NOT_SHAPING}
    common = {
        "image": spec.image,
        "model": spec.model,
        "modelRevision": spec.revision,
        "args": spec.args or [],
        "resources": _quantities(raw.get("resources") or {}),
        "weights": spec.capture.weights,
    }
    mounted = {mount["name"] for mount in engine.get("volumeMounts") or []} | {c.CONTROL_VOLUME, c.SCRATCH_VOLUME, c.SHM_VOLUME}
    identity = {
        **common,
        "schema": IDENTITY_SCHEMA,
        "protocol": PROTOCOL_VERSION,
        "env": [item for item in environment(spec, port=0) if item["name"] not in (c.ENV_PORT, c.ENV_TERM_GRACE)],
        "engine": shaping if shaping.keys() - {"name"} else {},
        "volumes": [volume for volume in overlay.get("volumes") or [] if volume.get("name") in mounted],
        "pod": {k: overlay[k] for k in ("securityContext", "runtimeClassName", "hostUsers") if k in overlay},
    }
    revision = {
        **common,
        "schema": REVISION_SCHEMA,
        "imagePullPolicy": spec.image_pull_policy,
        "env": raw.get("env") or [],
        "port": spec.serving.port,
        "hostNetwork": spec.serving.host_network,
        "portRange": raw["serving"].get("portRange"),
        "podTemplate": raw.get("podTemplate") or {},
    }
    return Template(revision=digest(revision), identity=digest(identity))


def _quantities(resources: Mapping[str, Any]) -> Object:
    """Resources with every quantity as a string: `1` and `"1"` are the same."""
    return {side: {name: str(amount) for name, amount in (values or {}).items()} for side, values in resources.items()}


# --- names -----------------------------------------------------------------------------------------------------------


def pod_name(snapshot: str, revision: str, slot: int) -> str:
    """The name of a replica. Short enough to be its hostname too, whatever the snapshot is called."""
    tail = f"-{revision[:5]}-{slot}"
    head = snapshot if len(snapshot) + len(tail) <= 63 else f"{snapshot[:40].rstrip('-.')}-{digest(snapshot)[:8]}"
    return head + tail


def content_name(snapshot: str, snapshot_uid: str, pod_uid: str) -> str:
    """The name of the content of one source pod: asked for twice it is the same object. Cluster-scoped, hence the hash."""
    return f"{snapshot[:40].rstrip('-.')}-{digest([snapshot_uid, pod_uid])[:16]}"


def selector(snapshot: str) -> dict[str, str]:
    """Labels that exactly the replicas of this snapshot carry."""
    return {c.LABEL_ROLE: c.ROLE_REPLICA, c.LABEL_SNAPSHOT: label_value(snapshot)}


def selector_text(labels: Mapping[str, str]) -> str:
    """Equality selector as the API writes it."""
    return ",".join(f"{k}={v}" for k, v in sorted(labels.items()))


def owner(claim: Claim) -> Object:
    """The controller reference of everything that lives and dies with the claim."""
    return {
        "apiVersion": c.API_VERSION,
        "kind": "VLLMSnapshot",
        "name": claim.name,
        "uid": claim.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _common_labels(claim: Claim, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "vllm",
        "app.kubernetes.io/instance": label_value(claim.name),
        c.LABEL_COMPONENT: component,
        c.LABEL_MANAGED_BY: c.MANAGED_BY,
        c.LABEL_SNAPSHOT: label_value(claim.name),
        c.LABEL_SNAPSHOT_UID: claim.uid,
    }


# --- pod -------------------------------------------------------------------------------------------------------------


def environment(spec: VLLMSnapshotSpec, port: int) -> list[Object]:
    """The engine's environment: the operator's own names, the fixed ones, spec.env, the overlay's; the last of a name wins."""
    own: Object = {
        c.ENV_MODEL: spec.model,
        c.ENV_PORT: str(port),
        c.ENV_HOST: ALL_ADDRESSES,
        c.ENV_WEIGHTS: spec.capture.weights.value,
        c.ENV_TERM_GRACE: str(_term_grace(_overlay(spec))),
    }
    if spec.revision:
        own[c.ENV_REVISION] = spec.revision
    if not _asks_for(spec, "nvidia.com/"):
        # CUDA images say `all`: where NVIDIA's runtime is the default one, a replica that asked for no GPU would get every GPU.
        own[c.ENV_GPU_CHOICE[0]] = "void"
    merged: dict[str, Object] = {name: {"name": name, "value": value} for name, value in {**own, **FIXED_ENV}.items()}
    user = [item.dump() for item in spec.env or []]
    extra = _named(_engine_overlay(_overlay(spec)).get("env"), f"{_ENGINE}.env")
    for item in extra:
        _check_env(item)
    for item in (*user, *extra):
        # Placed last, so that $(NAME) in a value may refer to anything before it.
        merged.pop(item["name"], None)
        merged[item["name"]] = item
    return list(merged.values())


def _term_grace(overlay: Object) -> int:
    """Seconds from SIGTERM on that PID 1 and the server are told they have. What is nonsense, the API server refuses."""
    period = overlay.get("terminationGracePeriodSeconds")
    left = period if type(period) is int and period >= 0 else TERMINATION_GRACE_S
    with contextlib.suppress(KeyError, TypeError, ValueError):
        # A hook before the SIGTERM has its time out of the same period.
        left = max(0, left - int(_engine_overlay(overlay)["lifecycle"]["preStop"]["sleep"]["seconds"]))
    return max(left - TERMINATION_MARGIN_S, left // 2)


def pod(
    claim: Claim,
    spec: VLLMSnapshotSpec,
    slot: int,
    port: int,
    prefer: Iterable[str] = (),
    *,
    recapture: str = "",
    only: Iterable[str] = (),
) -> Object:
    """The replica of this slot, serving on `port`, preferably on one of the nodes `prefer`; on one of `only` if any are given.

    With `recapture` it is made to be captured for that request. Raises OverlayError.
    """
    hashes = template(spec)
    overlay = _overlay(spec)
    metadata = (spec.pod_template.metadata if spec.pod_template else None) or PodMetadata()
    settings = PodSettings(
        restore_policy=spec.restore.policy,
        restore_timeout_seconds=spec.restore.timeout_seconds,
        max_concurrent_per_node=spec.restore.max_concurrent_per_node,
        capture=spec.capture.policy,
        recapture=recapture or None,
    )
    labels = {
        **(metadata.labels or {}),
        **_common_labels(claim, c.ROLE_REPLICA),
        c.LABEL_ROLE: c.ROLE_REPLICA,
        c.LABEL_REVISION: hashes.revision,
        c.LABEL_IDENTITY: hashes.identity,
    }
    annotations = {
        "kubectl.kubernetes.io/default-container": c.CONTAINER,
        **(metadata.annotations or {}),
        c.ANNOTATION_PORT: str(port),
        c.ANNOTATION_SETTINGS: json.dumps(settings.dump(), sort_keys=True),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(claim.name, hashes.revision, slot),
            "namespace": claim.namespace,
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": [owner(claim)],
        },
        "spec": _only_on(_pod_spec(spec, overlay, port, list(prefer)), sorted(only)[:MAX_PREFERRED_NODES]),
    }


def _pod_spec(spec: VLLMSnapshotSpec, overlay: Object, port: int, prefer: list[str]) -> Object:
    host_network = spec.serving.host_network == Toggle.ENABLED
    result: Object = {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": TERMINATION_GRACE_S,
        # Service variables and the token belong to this pod and would be frozen into an artifact that others wake up with.
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "readinessGates": [{"conditionType": c.CONDITION_VERIFIED}],
        "containers": [_engine(spec, overlay, port)],
        "volumes": [
            {"name": c.CONTROL_VOLUME, "emptyDir": {}},
            {"name": c.SCRATCH_VOLUME, "emptyDir": {}},
            {"name": c.SHM_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": SHM_LIMIT}},
        ],
    }
    if host_network:
        result |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if _asks_for(spec, c.GPU):
        result["tolerations"] = [{"key": c.GPU, "operator": "Exists", "effect": "NoSchedule"}]
    if prefer:
        # By field, not by label: kubernetes.io/hostname may differ from the node's name. One value per field is allowed.
        result["affinity"] = {
            "nodeAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {"weight": 100, "preference": {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}}
                    for node in sorted(prefer)[:MAX_PREFERRED_NODES]
                ]
            }
        }
    return _merge_pod(result, overlay)


def _only_on(spec: Object, nodes: list[str]) -> Object:
    """The pod's spec, bound to these nodes (if any) beside what its affinity requires already: terms are alternatives, so each
    of them gets each node. One value per field is allowed."""
    if not nodes:
        return spec
    affinity = dict(spec.get("affinity") or {})
    node = dict(affinity.get("nodeAffinity") or {})
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = (node.get(required) or {}).get("nodeSelectorTerms") or [{}]
    node[required] = {
        "nodeSelectorTerms": [
            {
                **term,
                "matchFields": [*(term.get("matchFields") or []), {"key": "metadata.name", "operator": "In", "values": [name]}],
            }
            for term in terms
            for name in nodes
        ]
    }
    return {**spec, "affinity": {**affinity, "nodeAffinity": node}}


def _asks_for(spec: VLLMSnapshotSpec, prefix: str) -> bool:
    """Whether a resource whose name begins so is asked for."""
    sides = (spec.resources.limits, spec.resources.requests) if spec.resources else ()
    return any(name.startswith(prefix) and str(amount) != "0" for side in sides for name, amount in (side or {}).items())


def _engine(spec: VLLMSnapshotSpec, overlay: Object, port: int) -> Object:
    http = {"httpGet": {"path": "/health", "port": c.PORT_NAME, "scheme": "HTTP"}}
    ports: Object = {"name": c.PORT_NAME, "containerPort": port, "protocol": "TCP"}
    if spec.serving.host_network == Toggle.ENABLED:
        ports["hostPort"] = port
    container: Object = {
        "name": c.CONTAINER,
        "image": spec.image,
        "env": environment(spec, port),
        "ports": [ports],
        "volumeMounts": [
            {"name": c.CONTROL_VOLUME, "mountPath": CONTROL_DIR},
            {"name": c.SCRATCH_VOLUME, "mountPath": SCRATCH_DIR},
            {"name": c.SHM_VOLUME, "mountPath": SHM_DIR},
        ],
        # HTTP only: an exec probe would take PIDs in the namespace that the restored tree needs. The port stays closed until
        # the release, so the startup probe must outlast a cold start with a download; asking every second costs nothing
        # and is what lets a restored replica become ready in the second it serves.
        "startupProbe": {**http, "periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 7200},
        "readinessProbe": {**http, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3},
        "livenessProbe": {**http, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    if spec.image_pull_policy:
        container["imagePullPolicy"] = spec.image_pull_policy
    if spec.args:
        container["args"] = list(spec.args)
    if spec.resources:
        container["resources"] = spec.resources.dump()
    return _merge_engine(container, _engine_overlay(overlay))


# --- overlay ---------------------------------------------------------------------------------------------------------

_ENGINE = f"podTemplate.spec.containers[{c.CONTAINER}]"


def _overlay(spec: VLLMSnapshotSpec) -> Object:
    overlay = (spec.pod_template.spec if spec.pod_template else None) or {}
    ours = sorted(_POD_OURS & overlay.keys())
    if ours:
        raise OverlayError(f"podTemplate.spec.{ours[0]} is set by the operator; remove it")
    for name in ("containers", "volumes", *_POD_LISTS):
        _objects(overlay.get(name), f"podTemplate.spec.{name}")
    for name in ("nodeSelector", "affinity", "securityContext"):
        if not isinstance(overlay.get(name) or {}, dict):
            raise OverlayError(f"podTemplate.spec.{name} must be an object")
    return overlay


def _objects(value: Any, where: str) -> list[Object]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise OverlayError(f"{where} must be a list of objects")
    return value


def _named(value: Any, where: str) -> list[Object]:
    items = _objects(value, where)
    for item in items:
        if not isinstance(item.get("name"), str) or not item["name"]:
            raise OverlayError(f"{where}: every item needs a name")
    return items


def _engine_overlay(overlay: Object) -> Object:
    containers = _named(overlay.get("containers"), "podTemplate.spec.containers")
    engine = next((item for item in containers if item["name"] == c.CONTAINER), {})
    for name, remedy in _ENGINE_FORBIDDEN.items():
        if name in engine:
            raise OverlayError(f"{_ENGINE}.{name}: {remedy}")
    _named(engine.get("volumeMounts"), f"{_ENGINE}.volumeMounts")
    _objects(engine.get("ports"), f"{_ENGINE}.ports")
    _named(engine.get("env"), f"{_ENGINE}.env")
    if not isinstance(engine.get("securityContext") or {}, dict):
        raise OverlayError(f"{_ENGINE}.securityContext must be an object")
    return engine


def _check_env(item: Object) -> None:
    """The CRD cannot check what is inside the overlay; the rules are those of spec.env."""
    name = item["name"]
    if name.startswith(c.ENV_RESERVED_PREFIX) and name not in ENV_ALLOWED:
        raise OverlayError(f"{_ENGINE}.env: {name}: names that start with {c.ENV_RESERVED_PREFIX} are set by the operator")
    if name in c.ENV_GPU_CHOICE:
        raise OverlayError(f"{_ENGINE}.env: {name}: the device plugin chooses the GPU; use spec.resources")
    if name == "VLLM_API_KEY":
        raise OverlayError(f"{_ENGINE}.env: {name} would be frozen into the artifact; authenticate in front of the Service")


def _merge_engine(container: Object, overlay: Object) -> Object:
    """Shares parts with both; `_merge_pod` copies the whole."""
    result = dict(container)
    for key, value in overlay.items():
        if key in ("name", "env"):
            continue  # env is merged in `environment`, since the identity needs it too
        if key == "volumeMounts":
            taken = {mount.get("mountPath") for mount in value}
            result[key] = [mount for mount in result[key] if mount["mountPath"] not in taken] + value
        elif key == "ports":
            result[key] = result[key] + [item for item in value if item.get("name") != c.PORT_NAME]
        elif key == "securityContext":
            result[key] = {**result[key], **value}
        else:
            result[key] = value
    return result


def _merge_pod(base: Object, overlay: Object) -> Object:
    result = dict(base)
    for key, value in overlay.items():
        if value is None:
            continue
        if key == "containers":
            result[key] = result[key] + [item for item in value if item.get("name") != c.CONTAINER]
        elif key == "volumes":
            taken = {item.get("name") for item in value}
            result[key] = [item for item in result[key] if item["name"] not in taken] + value
        elif key in _POD_LISTS:
            result[key] = result.get(key, []) + [item for item in value if item not in result.get(key, [])]
        elif key in ("nodeSelector", "securityContext"):
            result[key] = {**result.get(key, {}), **value}
        elif key == "affinity":
            result[key] = _merge_affinity(result.get(key, {}), value)
        elif key == "automountServiceAccountToken":
            # The default account's token serves nobody; a named account is asked for on purpose.
            result[key] = bool(value) and bool(overlay.get("serviceAccountName"))
        else:
            result[key] = value
    return deepcopy(result)


def _merge_affinity(ours: Object, theirs: Object) -> Object:
    """Their affinity with our node preferences appended: preferences add up, their requirements stay requirements."""
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    result = {**ours, **theirs}
    node = dict(theirs.get("nodeAffinity") or {})
    terms = [*(node.get(preferred) or []), *((ours.get("nodeAffinity") or {}).get(preferred) or [])]
    if terms:
        result["nodeAffinity"] = {**node, preferred: terms}
    return result


# --- content, service ------------------------------------------------------------------------------------------------


def content_labels(claim: Claim, identity: str, node: str) -> dict[str, str]:
    """The labels by which operator and agent find a content; what they say is in its spec, too."""
    return {**_common_labels(claim, "artifact"), c.LABEL_IDENTITY: identity, c.LABEL_NODE: label_value(node)}


def content(claim: Claim, spec: VLLMSnapshotSpec, source: Replica, node: str, recapture: str = "", attempt: int = 0) -> Object:
    """The order to the agent of `node` to capture `source`, under the request `recapture` if there is one, after `attempt` failures."""
    body: Object = {
        "snapshotRef": {"namespace": claim.namespace, "name": claim.name, "uid": claim.uid},
        "sourcePod": {"name": source.name, "uid": source.uid},
        "nodeName": node,
        "identity": source.identity,
        "timeoutSeconds": spec.capture.timeout_seconds,
        "failureBudget": spec.restore.failure_budget,
        "protocol": c.NODE_PROTOCOL,
    }
    if attempt:
        body["attempt"] = attempt
    if spec.capture.max_artifact_bytes is not None:
        body["maxArtifactBytes"] = spec.capture.max_artifact_bytes
    return {
        "apiVersion": c.API_VERSION,
        "kind": "VLLMSnapshotContent",
        "metadata": {
            "name": content_name(claim.name, claim.uid, source.uid),
            "labels": content_labels(claim, source.identity, node),
            **({"annotations": {c.ANNOTATION_RECAPTURE: recapture}} if recapture else {}),
            # Held by the agent from the start: files may exist as soon as it has seen the order.
            "finalizers": [c.FINALIZER_CONTENT],
        },
        "spec": body,
    }


def service(claim: Claim, spec: VLLMSnapshotSpec) -> Object:
    """The Service in front of the ready replicas. By the port's name: hostNetwork replicas listen on different numbers."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": claim.name,
            "namespace": claim.namespace,
            "labels": _common_labels(claim, "service"),
            "ownerReferences": [owner(claim)],
        },
        "spec": {
            "type": "ClusterIP",
            "selector": selector(claim.name),
            "ports": [{"name": c.PORT_NAME, "port": spec.serving.port, "targetPort": c.PORT_NAME, "protocol": "TCP"}],
        },
    }


def service_is_current(live: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether the live Service does what the wanted one says. Fields that we do not set are the cluster's or the user's."""
    have, want = live.get("spec") or {}, wanted["spec"]
    ports = [{k: port.get(k) for k in want["ports"][0]} for port in have.get("ports") or []]
    return bool(have.get("selector") == want["selector"] and ports == want["ports"])


_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


def service_name_valid(name: str) -> bool:
    """Whether a Service may be called so (RFC 1035 label); a VLLMSnapshot may have a longer name, with dots."""
    return _DNS_LABEL.fullmatch(name) is not None


def problem(claim: Claim, spec: VLLMSnapshotSpec) -> str | None:
    """Why no pod can be built from this spec, or None. What is merely refused by the API server shows when it is created."""
    try:
        pod(claim, spec, 0, spec.serving.port, ("node",))
    except OverlayError as e:
        return str(e)
    except (TypeError, ValueError, AttributeError, KeyError, RecursionError) as e:
        # The overlay is not described by the CRD's schema: anything may be in it.
        return f"podTemplate.spec cannot be merged: {type(e).__name__}: {e}"
    return None
