"""The objects that the operator builds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmsnapshot.api import constants as c
from vllmsnapshot.api.types import PodSettings, VLLMSnapshotSpec
from vllmsnapshot.controller import pods
from vllmsnapshot.objects import label_value
from vllmsnapshot.world import Claim, Replica
from vllmsnapshot_child import drain, protocol

CLAIM = Claim(namespace="ns", name="smol", uid="u-1")


def parse(**fields: Any) -> VLLMSnapshotSpec:
    return VLLMSnapshotSpec.model_validate({"model": "m", "image": "i", **fields})


def build(port: int = 8000, slot: int = 0, prefer: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return pods.pod(CLAIM, parse(**fields), slot, port, prefer)


def overlay(**spec: Any) -> dict[str, Any]:
    return {"podTemplate": {"spec": spec}}


def engine(pod: dict[str, Any]) -> dict[str, Any]:
    return dict(next(item for item in pod["spec"]["containers"] if item["name"] == c.CONTAINER))


def env(pod: dict[str, Any]) -> dict[str, str]:
    items = engine(pod)["env"]
    assert len({item["name"] for item in items}) == len(items)
    return {item["name"]: item.get("value", "") for item in items}


def test_plain_pod() -> None:
    pod = build(args=["--max-model-len", "64"], revision="r1", resources={"limits": {"cpu": 2}}, imagePullPolicy="Never")
    meta, spec = pod["metadata"], pod["spec"]
    hashes = pods.template(
        VLLMSnapshotSpec.model_validate(
            {
                "model": "m",
                "image": "i",
                "args": ["--max-model-len", "64"],
                "revision": "r1",
                "resources": {"limits": {"cpu": 2}},
                "imagePullPolicy": "Never",
            }
        )
    )
    assert meta["name"] == f"smol-{hashes.revision[:5]}-0"
    assert meta["labels"] == {
        c.LABEL_SNAPSHOT: "smol",
        c.LABEL_SNAPSHOT_UID: "u-1",
        c.LABEL_ROLE: c.ROLE_REPLICA,
        c.LABEL_REVISION: hashes.revision,
        c.LABEL_IDENTITY: hashes.identity,
        c.LABEL_MANAGED_BY: c.MANAGED_BY,
        c.LABEL_COMPONENT: "replica",
        "app.kubernetes.io/name": "vllm",
        "app.kubernetes.io/instance": "smol",
    }
    assert pods.selector("smol").items() <= meta["labels"].items()
    assert meta["ownerReferences"] == [
        {
            "apiVersion": c.API_VERSION,
            "kind": "VLLMSnapshot",
            "name": "smol",
            "uid": "u-1",
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]
    assert meta["annotations"][c.ANNOTATION_PORT] == "8000"
    assert PodSettings.model_validate_json(meta["annotations"][c.ANNOTATION_SETTINGS]) == PodSettings()
    assert spec["enableServiceLinks"] is False
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    assert spec["readinessGates"] == [{"conditionType": c.CONDITION_VERIFIED}]
    assert "hostNetwork" not in spec
    assert "affinity" not in spec
    assert "tolerations" not in spec
    container = engine(pod)
    assert "command" not in container
    assert container["args"] == ["--max-model-len", "64"]
    assert container["resources"] == {"limits": {"cpu": 2}}
    assert container["imagePullPolicy"] == "Never"
    assert container["ports"] == [{"name": "http", "containerPort": 8000, "protocol": "TCP"}]
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/run/vllmsnapshot", "/tmp", "/dev/shm"}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http", "scheme": "HTTP"}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert (env(pod)[c.ENV_MODEL], env(pod)[c.ENV_REVISION], env(pod)[c.ENV_PORT], env(pod)[c.ENV_HOST]) == (
        "m",
        "r1",
        "8000",
        "0.0.0.0",
    )
    assert env(pod)["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize("weights", ["Discard", "Keep", "Auto"])
def test_the_engine_is_told_what_to_do_with_the_weights(weights: str) -> None:
    assert env(build(capture={"weights": weights}))[c.ENV_WEIGHTS] == weights


GPUS = {"limits": {"nvidia.com/gpu": 1}}


def test_a_replica_without_a_gpu_sees_none() -> None:
    """CUDA images ask for all of them, and NVIDIA's runtime gives them where nobody says otherwise."""
    assert env(build())["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert env(build(resources={"limits": {"nvidia.com/gpu": 0}}))["NVIDIA_VISIBLE_DEVICES"] == "void"


@pytest.mark.parametrize(
    "resources", [GPUS, {"limits": {"nvidia.com/mig-1g.10gb": 1}}, {"limits": {"nvidia.com/gpu.shared": "1"}}]
)
def test_which_gpu_a_replica_gets_is_the_device_plugins_to_say(resources: dict[str, Any]) -> None:
    assert not env(build(resources=resources)).keys() & set(c.ENV_GPU_CHOICE)


def test_a_pod_with_a_gpu() -> None:
    pod = build(resources=GPUS, **overlay(runtimeClassName="nvidia"))
    assert pod["spec"]["runtimeClassName"] == "nvidia"
    assert pod["spec"]["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert engine(pod)["resources"] == GPUS
    assert "hostIPC" not in pod["spec"]
    # A dump that takes longer must not end the engine.
    assert env(pod)["TORCH_NCCL_ENABLE_MONITORING"] == "0"


def test_a_seccomp_profile_of_ones_own() -> None:
    profile = {"type": "Localhost", "localhostProfile": "vllmsnapshot/no-io-uring.json"}
    pod = build(**overlay(securityContext={"seccompProfile": profile}))
    assert pod["spec"]["securityContext"] == {"seccompProfile": profile}


def test_a_replica_has_time_to_finish_what_it_has_begun() -> None:
    pod = build()
    grace = pod["spec"]["terminationGracePeriodSeconds"]
    assert grace >= 60 + drain.NOTICE_S
    # The child gives the notice itself; a preStop would make a pod that serves nobody wait too.
    assert "lifecycle" not in engine(pod)
    assert c.ENV_TERM_GRACE == protocol.TERM_GRACE
    assert drain.NOTICE_S < int(env(pod)[c.ENV_TERM_GRACE]) < grace, "PID 1 ends before the kubelet kills it"


HOOK = {"preStop": {"sleep": {"seconds": 30}}}


@pytest.mark.parametrize(
    ("period", "hook", "told"), [(600, None, 595), (600, HOOK, 565), (30, None, 25), (4, None, 2), (0, None, 0), (20, HOOK, 0)]
)
def test_another_grace_period_or_hook_is_told_to_the_child_and_voids_no_artifact(period: int, hook: Any, told: int) -> None:
    containers = [{"name": "engine", "lifecycle": hook}] if hook else []
    pod = build(**overlay(terminationGracePeriodSeconds=period, containers=containers))
    assert pod["spec"]["terminationGracePeriodSeconds"] == period
    assert engine(pod).get("lifecycle") == hook
    assert env(pod)[c.ENV_TERM_GRACE] == str(told)
    assert pod["metadata"]["labels"][c.LABEL_IDENTITY] == build()["metadata"]["labels"][c.LABEL_IDENTITY]
    assert pod["metadata"]["labels"][c.LABEL_REVISION] != build()["metadata"]["labels"][c.LABEL_REVISION]


def test_settings_carry_the_policy() -> None:
    pod = build(restore={"policy": "Require", "timeoutSeconds": 33, "maxConcurrentPerNode": 5}, capture={"policy": "Disabled"})
    assert json.loads(pod["metadata"]["annotations"][c.ANNOTATION_SETTINGS]) == {
        "restorePolicy": "Require",
        "restoreTimeoutSeconds": 33,
        "maxConcurrentPerNode": 5,
        "capture": "Disabled",
    }


def test_a_replica_made_for_a_recapture_is_bound_to_its_nodes_beside_what_the_user_requires() -> None:
    def build_for(nodes: list[str], **fields: Any) -> tuple[PodSettings, Any]:
        made = pods.pod(CLAIM, parse(**fields), 0, 8000, recapture="r1", only=nodes)
        settings = PodSettings.model_validate_json(made["metadata"]["annotations"][c.ANNOTATION_SETTINGS])
        required = made["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        return settings, required["nodeSelectorTerms"]

    def on(name: str) -> dict[str, Any]:
        return {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]}

    made = pods.pod(CLAIM, parse(), 0, 8000, recapture="r1", only=["b", "a"])
    seen = Replica.parse({**made, "metadata": {**made["metadata"], "uid": "u"}})
    assert (seen.recapture, seen.only) == ("r1", frozenset({"a", "b"})), "and it is read back"
    assert build_for(["b", "a"]) == (PodSettings(recapture="r1"), [on("a"), on("b")])
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["z"]}]}
    here = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["c"]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [zone, here]}}}
    _, terms = build_for(["a"], **overlay(affinity=affinity))
    assert terms == [{**zone, **on("a")}, {"matchFields": here["matchFields"] + on("a")["matchFields"]}]


def test_an_order_carries_the_request_that_it_was_made_under() -> None:
    source = Replica(name="s", uid="u", revision="r", identity="i", created=0.0)
    assert "annotations" not in pods.content(CLAIM, parse(), source, "node")["metadata"]
    made = pods.content(CLAIM, parse(), source, "node", "r1")
    assert made["metadata"]["annotations"] == {c.ANNOTATION_RECAPTURE: "r1"}


def test_user_environment_wins_and_comes_last() -> None:
    given = [
        {"name": "HOME", "value": "/data"},
        {"name": "X", "value": "$(HOME)/x"},
        {"name": "K", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
    ]
    pod = build(env=given, **overlay(containers=[{"name": "engine", "env": [{"name": "X", "value": "y"}]}]))
    assert env(pod)["HOME"] == "/data"
    assert env(pod)["X"] == "y"
    assert [item["name"] for item in engine(pod)["env"]][-3:] == ["HOME", "K", "X"]
    assert next(item for item in engine(pod)["env"] if item["name"] == "K") == given[2]


def test_host_network() -> None:
    pod = build(port=20003, serving={"hostNetwork": "Enabled", "portRange": {"start": 20000, "end": 20010}})
    assert pod["spec"]["hostNetwork"] is True
    assert pod["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert engine(pod)["ports"] == [{"name": "http", "containerPort": 20003, "hostPort": 20003, "protocol": "TCP"}]
    assert env(pod)[c.ENV_PORT] == pod["metadata"]["annotations"][c.ANNOTATION_PORT] == "20003"


def test_preferred_nodes_join_the_users_affinity() -> None:
    theirs: dict[str, Any] = {
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []},
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": []}]},
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {"matchExpressions": []}}],
        },
    }
    merged = build(prefer=("b", "a"), **overlay(affinity=theirs))["spec"]["affinity"]
    assert merged["podAntiAffinity"] == theirs["podAntiAffinity"]
    node = merged["nodeAffinity"]
    assert (
        node["requiredDuringSchedulingIgnoredDuringExecution"]
        == theirs["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    )
    preferred = node["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [term["weight"] for term in preferred] == [1, 100, 100]
    assert [term["preference"]["matchFields"][0]["values"] for term in preferred[1:]] == [["a"], ["b"]]
    assert build(**overlay(affinity=theirs))["spec"]["affinity"] == theirs
    many = build(prefer=tuple(f"n{i}" for i in range(100)))["spec"]["affinity"]["nodeAffinity"]
    assert len(many["preferredDuringSchedulingIgnoredDuringExecution"]) == pods.MAX_PREFERRED_NODES


def test_overlay() -> None:
    pod = build(
        resources={"limits": {"nvidia.com/gpu": "1"}},
        podTemplate={
            "metadata": {"labels": {"team": "x"}, "annotations": {"note": "y"}},
            "spec": {
                "containers": [
                    {
                        "name": "engine",
                        "volumeMounts": [
                            {"name": "models", "mountPath": "/models", "readOnly": True},
                            {"name": "fast", "mountPath": "/tmp"},
                        ],
                        "livenessProbe": {"httpGet": {"path": "/x", "port": "http"}},
                        "ports": [{"name": "metrics", "containerPort": 9}],
                        "securityContext": {"runAsUser": 7},
                    },
                    {"name": "sidecar", "image": "s"},
                ],
                "initContainers": [{"name": "fetch", "image": "f"}],
                "volumes": [
                    {"name": "models", "emptyDir": {}},
                    {"name": "fast", "emptyDir": {}},
                    {"name": c.SHM_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
                ],
                "tolerations": [{"key": "dedicated", "operator": "Exists"}],
                "imagePullSecrets": [{"name": "reg"}],
                "nodeSelector": {"gpu": "yes"},
                "securityContext": {"fsGroup": 5},
                "terminationGracePeriodSeconds": 99,
                "runtimeClassName": "nvidia",
                "schedulerName": None,
            },
        },
    )
    meta, spec, container = pod["metadata"], pod["spec"], engine(pod)
    assert meta["labels"]["team"] == "x"
    assert meta["annotations"]["note"] == "y"
    assert [item["name"] for item in spec["containers"]] == ["engine", "sidecar"]
    assert spec["initContainers"] == [{"name": "fetch", "image": "f"}]
    assert [item["name"] for item in spec["volumes"]] == [c.CONTROL_VOLUME, c.SCRATCH_VOLUME, "models", "fast", c.SHM_VOLUME]
    assert spec["volumes"][-1]["emptyDir"]["sizeLimit"] == "16Gi"
    assert [item["key"] for item in spec["tolerations"]] == [c.GPU, "dedicated"]
    assert spec["imagePullSecrets"] == [{"name": "reg"}]
    assert spec["nodeSelector"] == {"gpu": "yes"}
    assert spec["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}, "fsGroup": 5}
    assert spec["terminationGracePeriodSeconds"] == 99
    assert spec["runtimeClassName"] == "nvidia"
    assert "schedulerName" not in spec
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {"/run/vllmsnapshot": c.CONTROL_VOLUME, "/dev/shm": c.SHM_VOLUME, "/models": "models", "/tmp": "fast"}
    assert container["livenessProbe"] == {"httpGet": {"path": "/x", "port": "http"}}
    assert [port["name"] for port in container["ports"]] == ["http", "metrics"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsUser": 7}


@pytest.mark.parametrize(
    ("account", "token", "mounted"), [(None, True, False), ("mine", True, True), ("mine", False, False), ("mine", None, False)]
)
def test_a_token_only_for_an_account_that_is_named_and_asks(account: str | None, token: bool | None, mounted: bool) -> None:
    spec = build(**overlay(serviceAccountName=account, automountServiceAccountToken=token))["spec"]
    assert spec["automountServiceAccountToken"] is mounted


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"hostPID": True}, "hostPID"),
        ({"restartPolicy": "Never"}, "restartPolicy"),
        ({"containers": [{"name": "engine", "args": ["x"]}]}, "use spec.args"),
        ({"containers": [{"name": "engine", "image": "x"}]}, "use spec.image"),
        ({"containers": [{"name": "engine", "resources": {}}]}, "use spec.resources"),
        ({"containers": [{"name": "engine", "env": [{"name": "VLLMSNAPSHOT_PORT", "value": "1"}]}]}, "set by the operator"),
        ({"containers": [{"name": "engine", "env": [{"name": "VLLM_API_KEY", "value": "1"}]}]}, "frozen"),
        ({"containers": [{"name": "engine", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}]}, "the device plugin"),
        ({"containers": [{"name": "engine", "env": [{"name": "CUDA_VISIBLE_DEVICES", "value": "0"}]}]}, "the device plugin"),
        ({"containers": [{"name": "engine", "env": [{"value": "1"}]}]}, "needs a name"),
        ({"containers": [{"image": "x"}]}, "needs a name"),
        ({"containers": "x"}, "list of objects"),
        ({"volumes": {"a": 1}}, "list of objects"),
        ({"tolerations": ["x"]}, "list of objects"),
        ({"nodeSelector": ["x"]}, "must be an object"),
        ({"affinity": {"nodeAffinity": ["x"]}}, "cannot be merged"),
        ({"containers": [{"name": "engine", "securityContext": "x"}]}, "must be an object"),
    ],
)
def test_overlays_that_cannot_be_merged_are_refused_with_a_reason(spec: dict[str, Any], text: str) -> None:
    made = VLLMSnapshotSpec.model_validate({"model": "m", "image": "i", **overlay(**spec)})
    assert text in (pods.problem(CLAIM, made) or ""), "and never an exception"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "engine", c.SHM_VOLUME, "name", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "env", "mountPath", "nodeAffinity", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = [
    "containers",
    "volumes",
    "tolerations",
    "initContainers",
    "affinity",
    "nodeSelector",
    "securityContext",
    "serviceAccountName",
    "x",
]


@given(
    overlay_spec=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
    engine_fields=st.none()
    | st.dictionaries(
        st.text(max_size=9) | st.sampled_from(["env", "volumeMounts", "ports", "securityContext"]), JSON, max_size=3
    ),
)
def test_any_overlay_is_merged_or_refused(overlay_spec: dict[str, Any], engine_fields: dict[str, Any] | None) -> None:
    """The CRD lets anything through; nothing of it may raise elsewhere."""
    if engine_fields is not None:
        overlay_spec = {**overlay_spec, "containers": [{**engine_fields, "name": "engine"}]}
    made = VLLMSnapshotSpec.model_validate({"model": "m", "image": "i", **overlay(**overlay_spec)})
    if pods.problem(CLAIM, made) is None:
        pod = pods.pod(CLAIM, made, 0, 8000)
        assert engine(pod)["image"] == "i"
        json.dumps(pod)


def test_the_two_reserved_names_for_users() -> None:
    wanted = [{"name": name, "value": "x"} for name in sorted(pods.ENV_ALLOWED)]
    assert env(build(env=wanted)).keys() >= pods.ENV_ALLOWED
    assert env(build(**overlay(containers=[{"name": "engine", "env": wanted}]))).keys() >= pods.ENV_ALLOWED


@pytest.mark.parametrize("name", ["smol", "a" * 63, "a" * 64, "long.name." * 20 + "end"])
def test_names_fit(name: str) -> None:
    for slot in (0, 9999):
        pod = pods.pod_name(name, "0123456789", slot)
        assert len(pod) <= 63
        assert pod.endswith(f"-01234-{slot}")
    assert len(label_value(name)) <= 63
    assert len(pods.content_name(name, "u", "p")) <= 63


def test_long_names_stay_apart() -> None:
    one, two = "a" * 100 + "1", "a" * 100 + "2"
    assert pods.pod_name(one, "0" * 40, 0) != pods.pod_name(two, "0" * 40, 0)
    assert label_value(one) != label_value(two)
    assert pods.content_name(one, "u1", "p") != pods.content_name(one, "u2", "p")


def test_content() -> None:
    source = Replica(name="smol-01234-0", uid="p-1", revision="r", identity="i" * 40, created=1.0, node="n" * 100)
    spec = VLLMSnapshotSpec.model_validate(
        {
            "model": "m",
            "image": "i",
            "capture": {"timeoutSeconds": 77, "maxArtifactBytes": 1 << 30},
            "restore": {"failureBudget": 4},
        }
    )
    made = pods.content(CLAIM, spec, source, "n" * 100)
    assert made["spec"] == {
        "snapshotRef": {"namespace": "ns", "name": "smol", "uid": "u-1"},
        "sourcePod": {"name": "smol-01234-0", "uid": "p-1"},
        "nodeName": "n" * 100,
        "identity": "i" * 40,
        "timeoutSeconds": 77,
        "maxArtifactBytes": 1 << 30,
        "failureBudget": 4,
        "protocol": c.NODE_PROTOCOL,
    }
    labels = made["metadata"]["labels"]
    assert all(len(value) <= 63 for value in labels.values())
    assert labels[c.LABEL_NODE] == label_value("n" * 100)
    assert made["metadata"]["finalizers"] == [c.FINALIZER_CONTENT]
    assert made["metadata"]["name"] == pods.content_name("smol", "u-1", "p-1")


def test_service_and_its_drift() -> None:
    spec = VLLMSnapshotSpec.model_validate({"model": "m", "image": "i", "serving": {"port": 80}})
    made = pods.service(CLAIM, spec)
    assert made["spec"]["ports"] == [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}]
    assert made["spec"]["selector"] == pods.selector("smol")
    live = {"spec": {**made["spec"], "clusterIP": "10.0.0.1", "ports": [{**made["spec"]["ports"][0], "nodePort": 30000}]}}
    assert pods.service_is_current(live, made)
    assert not pods.service_is_current({"spec": {**live["spec"], "selector": {}}}, made)
    assert not pods.service_is_current({"spec": {**live["spec"], "ports": live["spec"]["ports"] * 2}}, made)
    assert not pods.service_is_current({"spec": {}}, made)


@pytest.mark.parametrize(("name", "valid"), [("smol", True), ("a" * 63, True), ("a" * 64, False), ("a.b", False), ("1a", False)])
def test_service_names(name: str, valid: bool) -> None:
    assert pods.service_name_valid(name) is valid
