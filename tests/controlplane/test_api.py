"""The API as the real API server enforces it: samples accepted and refused, defaults, scale, columns, immutability, pruning."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.apiserver import HPAS, Api, Object
from tests.cluster import Cluster
from vllmsnapshot.api import constants as c
from vllmsnapshot.api.crd import all_crds
from vllmsnapshot.api.types import VLLMSnapshotSpec
from vllmsnapshot.kube import SNAPSHOTS, ApiError
from vllmsnapshot_child.vllm_engine import REFUSED

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "deploy" / "examples"
REJECTED = ROOT / "tests" / "samples" / "rejected"

FOREIGN = {"keda.sh/v1alpha1"}
"""Groups of examples that the test cluster does not serve: such documents are only parsed."""


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with Cluster("api-tests", mode="controlplane") as cluster:
        cluster.kubectl("apply", "--server-side", "-f", ROOT / "deploy" / "crds")
        cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
        yield Api(cluster)


def documents(path: Path) -> list[Object]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def snapshot(name: str = "sample", **spec: Any) -> Object:
    """A valid VLLMSnapshot with these fields of the spec."""
    return {
        "apiVersion": c.API_VERSION,
        "kind": "VLLMSnapshot",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"model": "Qwen/Qwen3-0.6B", "image": "ghcr.io/vllmsnapshot/vllm:v0.32.0", **spec},
    }


def content(name: str = "sample") -> Object:
    return documents(REJECTED / "content-changed.yaml")[0] | {"metadata": {"name": name}}


# --- samples ---------------------------------------------------------------------------------------------------------


def contains(whole: Any, part: Any) -> bool:
    """Whether everything in `part` is in `whole` too (quantities of built-in kinds may be rewritten; none here are)."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(k in whole and contains(whole[k], v) for k, v in part.items())
    if isinstance(part, list):
        return isinstance(whole, list) and len(whole) == len(part) and all(map(contains, whole, part))
    return bool(whole == part)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_example_is_accepted(api: Api, path: Path) -> None:
    found = documents(path)
    assert found
    for document in found:
        if document["apiVersion"] in FOREIGN:
            assert document["kind"]
            assert document["metadata"]["name"]
            continue
        created = api.create(document, dry_run=True)
        assert contains(created["spec"], document["spec"]), "something was dropped or changed"
        if document["kind"] == "VLLMSnapshot":
            # What the API server accepts, the operator reads.
            VLLMSnapshotSpec.model_validate(created["spec"])


def test_the_complete_example_names_every_field() -> None:
    (example,) = documents(EXAMPLES / "complete.yaml")
    schema = spec_schema("VLLMSnapshot")
    missing = [path for path in leaves(schema, "") if not path.startswith("podTemplate.spec.") and not has(example["spec"], path)]
    assert not missing


def test_the_scaled_examples_scale_an_example() -> None:
    names = {d["metadata"]["name"] for p in EXAMPLES.glob("*.yaml") for d in documents(p) if d["kind"] == "VLLMSnapshot"}
    for path in (EXAMPLES / "hpa.yaml", EXAMPLES / "keda.yaml"):
        (document,) = documents(path)
        target = document["spec"]["scaleTargetRef"]
        assert (target["apiVersion"], target["kind"]) == (c.API_VERSION, "VLLMSnapshot")
        assert target["name"] in names


def expectation(path: Path) -> tuple[str, str]:
    """Field and message that a rejected sample names in its first line."""
    match = re.fullmatch(r"# Refused: (\S+): (.+)", path.read_text().splitlines()[0])
    assert match, f"{path}: the first line must be `# Refused: FIELD: MESSAGE`"
    return match[1], match[2]


@pytest.mark.parametrize("path", sorted(REJECTED.glob("*.yaml")), ids=lambda path: path.stem)
def test_sample_is_rejected(api: Api, path: Path) -> None:
    """The last document is refused for exactly the reason given; one before it is what it changes."""
    field, message = expectation(path)
    *before, refused = documents(path)
    if not before:
        with pytest.raises(ApiError) as error:
            api.create(refused, dry_run=True)
    else:
        created = api.create(before[0])
        try:
            with pytest.raises(ApiError) as error:
                api.update({**created, "spec": refused["spec"]})
        finally:
            api.delete(before[0])
    assert error.value.status == 422
    # One cause: more would be a list in brackets.
    name = refused["metadata"]["name"]
    pattern = (
        rf'{refused["kind"]}\.{re.escape(c.GROUP)} "{name}" is invalid: {re.escape(field)}: [A-Z][a-z ]+: {re.escape(message)}'
    )
    assert re.fullmatch(pattern, error.value.message), error.value.message


def rules(schema: Object, path: str = "") -> Iterator[tuple[str, str]]:
    """Field and message of every validation rule; list items as [0]."""
    for rule in schema.get("x-kubernetes-validations", []):
        yield (path + rule.get("fieldPath", "")).lstrip(".") or "<nil>", rule["message"]
    for name, sub in schema.get("properties", {}).items():
        yield from rules(sub, f"{path}.{name}")
    for key, suffix in (("items", "[0]"), ("additionalProperties", "[key]")):
        if isinstance(schema.get(key), dict):
            yield from rules(schema[key], path + suffix)


def root_schema(kind: str) -> Object:
    (schema,) = (
        crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        for crd in all_crds().values()
        if crd["spec"]["names"]["kind"] == kind
    )
    assert isinstance(schema, dict)
    return schema


def spec_schema(kind: str) -> Object:
    schema: Object = root_schema(kind)["properties"]["spec"]
    return schema


def test_every_rule_has_a_rejected_sample() -> None:
    wanted = {
        (kind, field, message)
        for kind in ("VLLMSnapshot", "VLLMSnapshotContent", "VLLMSnapshotNode")
        for field, message in rules(root_schema(kind))
    }
    sampled = {
        (documents(path)[-1]["kind"], re.sub(r"\[\d+]", "[0]", field), message)
        for path in REJECTED.glob("*.yaml")
        for field, message in [expectation(path)]
    }
    assert wanted == sampled


# --- bounds ----------------------------------------------------------------------------------------------------------


def leaves(schema: Object, path: str) -> Iterator[str]:
    """Paths of all fields that have no described fields below them."""
    properties = schema.get("properties", {})
    if not properties and path:
        yield path
    for name, sub in properties.items():
        yield from leaves(sub, f"{path}.{name}".lstrip("."))


def has(value: Any, path: str) -> bool:
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return True


def put(obj: Object, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for part in parents:
        obj = obj.setdefault(part, {})
    obj[last] = value


def out_of_bounds() -> Iterator[tuple[str, Any]]:
    """For every bound of the spec a value just outside."""
    schema = spec_schema("VLLMSnapshot")
    for path in leaves(schema, ""):
        if path.startswith("podTemplate.spec."):
            continue  # described only so that rules can forbid them
        node = schema
        for part in path.split("."):
            node = node["properties"][part]
        if "minimum" in node:
            yield path, node["minimum"] - 1
        if "maximum" in node:
            yield path, node["maximum"] + 1
        if "enum" in node:
            yield path, "Sometimes"
        if "minLength" in node:
            yield path, ""
        if node.get("type") == "string" and "maxLength" in node:
            yield path, "x" * (node["maxLength"] + 1)
        if node.get("type") == "integer":
            yield path, "1"
            yield path, 1.5
        if node.get("type") == "array":
            item = {"name": "NAME", "value": "x"} if node["items"]["type"] == "object" else "--x"
            yield path, [dict(item, name=f"N{i}") if isinstance(item, dict) else item for i in range(node["maxItems"] + 1)]
        if "maxProperties" in node:
            yield path, {f"key-{i}": "1" for i in range(node["maxProperties"] + 1)}


@pytest.mark.parametrize(
    ("path", "value"), list(out_of_bounds()), ids=lambda v: v if isinstance(v, str) and len(v) < 60 else "value"
)
def test_value_out_of_bounds_is_refused(api: Api, path: str, value: Any) -> None:
    obj = snapshot()
    if path.startswith("serving.portRange"):
        put(obj["spec"], "serving", {"hostNetwork": "Enabled", "portRange": {"start": 1024, "end": 65535}})
    put(obj["spec"], path, value)
    with pytest.raises(ApiError) as error:
        api.create(obj, dry_run=True)
    assert error.value.status == 422
    assert f"spec.{path}" in error.value.message


@pytest.mark.parametrize("field", ["model", "image"])
def test_required_field(api: Api, field: str) -> None:
    obj = snapshot()
    del obj["spec"][field]
    with pytest.raises(ApiError, match=f"spec.{field}: Required value"):
        api.create(obj, dry_run=True)


@pytest.mark.parametrize("name", ["Upper", "1st", "a.b", "-a", "a" * 53])
def test_name_that_pods_cannot_have_is_refused(api: Api, name: str) -> None:
    with pytest.raises(ApiError) as error:
        api.create(snapshot(name), dry_run=True)
    assert error.value.status == 422


# --- arguments -------------------------------------------------------------------------------------------------------

UNACCEPTABLE = {"logprobs-mode": "raw_logits", "port": "9000", "mm-tensor-ipc": "torch_shm"}
"""A value that the child refuses, where not just any will do."""
ALIASES = {
    "tensor-parallel-size": "tp",
    "pipeline-parallel-size": "pp",
    "data-parallel-size": "dp",
    "prefill-context-parallel-size": "pcp",
    "decode-context-parallel-size": "dcp",
    "api-server-count": "asc",
    "speculative-config": "sc",
    "enable-expert-parallel": "ep",
    "nnodes": "n",
}


def spellings(flag: str, value: str) -> Iterator[list[str]]:
    for name in {flag, flag.replace("-", "_")}:
        yield [f"--{name}={value}"]
        yield [f"--{name}", value]
        yield ["--enforce-eager", f"--{name}", value, "--max-model-len=512"]
    if flag in ALIASES:
        yield [f"-{ALIASES[flag]}", value]
        yield [f"-{ALIASES[flag]}={value}"]


@pytest.mark.parametrize("flag", sorted(REFUSED.keys() | ALIASES.keys()))
def test_what_the_child_would_refuse_is_refused_at_once(api: Api, flag: str) -> None:
    for args in spellings(flag, UNACCEPTABLE.get(flag, "2")):
        with pytest.raises(ApiError) as error:
            api.create(snapshot(args=args), dry_run=True)
        assert error.value.status == 422, args
        assert "spec.args" in error.value.message


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--tensor-parallel-size=1"],
        ["--tensor_parallel_size", "1", "-pp", "1", "-dp=1"],
        ["--api-server-count=1"],
        ["--model-impl=vllm", "--config-format=hf", "--tokenizer-revision=main", "--code-revision", "main"],
        ["--served-model-name", "port", "host"],
        ["--logprobs-mode=processed_logprobs"],
        ["--hf-overrides", '{"config": 1}'],
        ["--compilation-config.cudagraph_mode=PIECEWISE"],
        ["--chat-template", "two\nlines --port 1"],
        ["--enforce-eager", "--nnodes=1", "--mm-tensor-ipc=direct_rpc", "--num-gpu-blocks-override", "20"],
        ["--device-memory-utilization=0.8", "--sleep-mode-offload-cudagraph", "--kv-cache-memory-bytes=1"],
    ],
    ids=" ".join,
)
def test_arguments_that_only_look_alike_are_accepted(api: Api, args: list[str]) -> None:
    assert api.create(snapshot(args=args), dry_run=True)["spec"]["args"] == args


@pytest.mark.parametrize("amount", [0, 1, "0", "1"])
def test_one_gpu_is_accepted(api: Api, amount: int | str) -> None:
    resources = {"limits": {"nvidia.com/gpu": amount}, "requests": {"cpu": "500m", "memory": "1Gi"}}
    assert api.create(snapshot(resources=resources), dry_run=True)["spec"]["resources"] == resources


OTHER_DEVICES = [
    "nvidia.com/mig-1g.10gb",
    "nvidia.com/gpu.shared",
    "nvidia.com/mig-1g.10gb.shared",
    "amd.com/gpu",
    "google.com/tpu",
    "gpu.intel.com/i915",
    "habana.ai/gaudi",
    "aws.amazon.com/neuroncore",
]


@pytest.mark.parametrize("name", OTHER_DEVICES)
def test_a_device_that_cannot_be_captured_serves_without_captures(api: Api, name: str) -> None:
    resources = {"limits": {name: 1}}
    with pytest.raises(ApiError, match=r"capture.policy: Disabled, which lets every replica start cold"):
        api.create(snapshot(resources=resources), dry_run=True)
    accepted = api.create(snapshot(resources=resources, capture={"policy": "Disabled"}), dry_run=True)
    assert accepted["spec"]["resources"] == resources


@pytest.mark.parametrize("name", ["cpu", "memory", "ephemeral-storage", "rdma/hca_shared_devices", "nvidia.com/gpu"])
def test_other_resources_are_accepted(api: Api, name: str) -> None:
    assert api.create(snapshot(resources={"limits": {name: 1}}), dry_run=True)


@pytest.mark.parametrize("requests", [{"nvidia.com/gpu": 1}, {"nvidia.com/gpu": "1"}, {"cpu": 1}])
def test_a_gpu_may_be_repeated_in_the_requests(api: Api, requests: Object) -> None:
    assert api.create(snapshot(resources={"limits": {"nvidia.com/gpu": 1}, "requests": requests}), dry_run=True)


@pytest.mark.parametrize("amount", [2, "2", "1000m", "1e1", -1, "10"])
def test_other_amounts_of_gpus_are_refused(api: Api, amount: int | str) -> None:
    with pytest.raises(ApiError, match="more than one GPU"):
        api.create(snapshot(resources={"limits": {"nvidia.com/gpu": amount}}), dry_run=True)


# --- behaviour -------------------------------------------------------------------------------------------------------


@pytest.fixture
def live(api: Api) -> Iterator[Object]:
    """A VLLMSnapshot with nothing but the required fields."""
    created = api.create(snapshot("live"))
    yield created
    api.delete(created)


def status(api: Api, obj: Object, value: Object, manager: str = c.MANAGER_OPERATOR) -> Object:
    """Write the status as the operator does."""
    meta = {k: obj["metadata"][k] for k in ("name", "namespace", "uid")}
    return api.call(lambda kube: kube.apply(SNAPSHOTS, {"metadata": meta, "status": value}, manager, subresource="status"))


def condition(kind: str, value: str, reason: str) -> Object:
    return {"type": kind, "status": value, "reason": reason, "message": "", "lastTransitionTime": "2026-11-30T08:00:00Z"}


def test_defaults(live: Object) -> None:
    assert live["spec"] == VLLMSnapshotSpec(model=live["spec"]["model"], image=live["spec"]["image"]).dump()


@pytest.mark.parametrize("section", ["serving", "capture", "restore", "artifact", "rollout"])
def test_defaults_of_a_section_that_is_given_empty(api: Api, live: Object, section: str) -> None:
    obj = snapshot()
    obj["spec"][section] = {}
    assert api.create(obj, dry_run=True)["spec"][section] == live["spec"][section]


def test_status_is_written_only_through_its_subresource(api: Api, live: Object) -> None:
    assert "status" not in api.create(snapshot("other") | {"status": {"replicas": 7}}, dry_run=True)
    written = status(api, live, {"replicas": 2})
    assert written["status"]["replicas"] == 2
    assert written["metadata"]["generation"] == live["metadata"]["generation"]
    kept = api.update(written | {"status": {"replicas": 9}}, dry_run=True)
    assert kept["status"]["replicas"] == 2


def test_scale(api: Api, live: Object) -> None:
    status(api, live, {"replicas": 1, "selector": f"{c.LABEL_SNAPSHOT}=live"})
    path = SNAPSHOTS.path("default", "live", "scale")
    scale = api.call(lambda kube: kube.request("GET", path))
    assert scale["kind"] == "Scale"
    assert scale["spec"] == {"replicas": 1}
    assert scale["status"] == {"replicas": 1, "selector": f"{c.LABEL_SNAPSHOT}=live"}
    api.call(lambda kube: kube.request("PUT", path, body=scale | {"spec": {"replicas": 3}}))
    after = api.call(lambda kube: kube.get(SNAPSHOTS, "live", "default"))
    assert after is not None
    assert after["spec"] == live["spec"] | {"replicas": 3}
    assert after["metadata"]["generation"] == live["metadata"]["generation"] + 1
    for wrong in (-1, 10001):
        with pytest.raises(ApiError):
            api.call(lambda kube, n=wrong: kube.request("PUT", path, body=scale | {"spec": {"replicas": n}}))  # type: ignore[misc]


def test_scale_with_kubectl_to_zero_and_back(api: Api, live: Object) -> None:
    for wanted in ("0", "4"):
        api.cluster.kubectl("scale", "vsnap/live", f"--replicas={wanted}")
        assert api.cluster.kubectl("get", "vsnap", "live", "-o", "jsonpath={.spec.replicas}") == wanted


def test_an_autoscaler_reads_scale_and_selector(api: Api, live: Object) -> None:
    """Without a metrics server it gets no further than that, and says so."""
    status(api, live, {"replicas": 1, "selector": f"{c.LABEL_ROLE}={c.ROLE_REPLICA},{c.LABEL_SNAPSHOT}=live"})
    (hpa,) = documents(EXAMPLES / "hpa.yaml")
    hpa["spec"]["scaleTargetRef"]["name"] = "live"
    api.create(hpa)
    try:
        api.cluster.kubectl("wait", "--for=condition=ScalingActive=False", "hpa/qwen3", "--timeout=60s")
        found = api.call(lambda kube: kube.get(HPAS, "qwen3", "default"))
        assert found is not None
        conditions = {item["type"]: item for item in found["status"]["conditions"]}
        assert conditions["AbleToScale"]["status"] == "True"
        assert conditions["ScalingActive"]["reason"] == "FailedGetPodsMetric"
    finally:
        api.delete(hpa)


def test_columns(api: Api, live: Object) -> None:
    status(
        api,
        live,
        {
            "ready": "3/3",
            "restoredReplicas": 2,
            "conditions": [
                condition(c.READY, "True", c.Reason.ALL_REPLICAS_READY),
                condition(c.SNAPSHOT_READY, "True", "Captured"),
            ],
            "timings": {"coldStart": "81.20s", "restoredStart": "4.31s"},
            "snapshot": {"node": "node-1", "bytes": 1003356160},
        },
    )
    header, line = api.cluster.kubectl("get", "vsnap", "live").splitlines()
    assert header.split() == ["NAME", "READY", "REPLICAS", "RESTORED", "SNAPSHOT", "COLD", "RESTORE", "AGE"]
    assert line.split()[:-1] == ["live", "True", "3/3", "2", "Captured", "81.20s", "4.31s"]
    header, line = api.cluster.kubectl("get", "vllmsnapshots.vllmsnapshot.io", "live", "-o", "wide").splitlines()
    assert header.split()[8:] == ["REASON", "NODE", "BYTES", "IMAGE", "MESSAGE"]
    assert line.split()[8:] == ["AllReplicasReady", "node-1", "1003356160", live["spec"]["image"]]


def test_columns_of_the_cluster_scoped_kinds(api: Api) -> None:
    order = api.create(content("columns"))
    node: Object = {"apiVersion": c.API_VERSION, "kind": "VLLMSnapshotNode", "metadata": {"name": "node-1"}}
    api.create(node)
    try:
        header, line = api.cluster.kubectl("get", "vsnapcontent", "columns").splitlines()
        assert header.split() == ["NAME", "CAPTURED", "QUARANTINED", "SNAPSHOT", "NAMESPACE", "NODE", "BYTES", "RESTORES", "AGE"]
        assert line.split()[:4] == ["columns", "qwen3", "default", "node-1"]
        header, line = api.cluster.kubectl("get", "vsnapnode", "node-1").splitlines()
        assert header.split() == ["NAME", "READY", "REASON", "USED", "FREE", "RESTORING", "AGE"]
        assert line.split()[0] == "node-1"
    finally:
        api.delete(order)
        api.delete(node)


def test_category_lists_all_kinds(api: Api, live: Object) -> None:
    order = api.create(content("category"))
    try:
        listed = api.cluster.kubectl("get", "vllm", "-o", "name").split()
        assert f"vllmsnapshot.{c.GROUP}/live" in listed
        assert f"vllmsnapshotcontent.{c.GROUP}/category" in listed
    finally:
        api.delete(order)


def test_unknown_fields_are_pruned_or_refused(api: Api) -> None:
    unknown = snapshot(typo=1, serving={"port": 9000, "prot": 1}, podTemplate={"spec": {"volumes": [{"anything": 1}]}})
    with pytest.raises(ApiError, match=r'unknown field "spec\.serving\.prot", unknown field "spec\.typo"'):
        api.create(unknown, dry_run=True)
    spec = api.create(unknown, dry_run=True, validation="Ignore")["spec"]
    assert "typo" not in spec
    assert "prot" not in spec["serving"]
    # The overlay is a pod's spec, which changes with Kubernetes: nothing in it is dropped.
    assert spec["podTemplate"]["spec"] == {"volumes": [{"anything": 1}]}


def test_all_but_the_model_can_be_changed(api: Api, live: Object) -> None:
    (example,) = documents(EXAMPLES / "complete.yaml")
    changed = copy.deepcopy(live)
    changed["spec"] = example["spec"] | {"model": live["spec"]["model"]}
    assert contains(api.update(changed, dry_run=True)["spec"], changed["spec"])


def test_environment_is_merged_by_name(api: Api, live: Object) -> None:
    """Two appliers each own their variable, as in a Deployment."""
    meta = {"name": "live", "namespace": "default"}
    for manager, name in (("one", "FIRST"), ("two", "SECOND")):
        body = {"metadata": meta, "spec": {"env": [{"name": name, "value": manager}]}}
        after = api.call(lambda kube, body=body, manager=manager: kube.apply(SNAPSHOTS, body, manager))  # type: ignore[misc]
    assert after["spec"]["env"] == [{"name": "FIRST", "value": "one"}, {"name": "SECOND", "value": "two"}]
    with pytest.raises(ApiError, match="Duplicate value"):
        api.create(snapshot(env=[{"name": "SAME", "value": "1"}, {"name": "SAME", "value": "2"}]), dry_run=True)


def test_conditions_have_one_writer_per_type(api: Api, live: Object) -> None:
    status(api, live, {"conditions": [condition(c.READY, "False", "Starting")]})
    after = status(api, live, {"conditions": [condition("Foreign", "True", "Foreign")]}, manager="somebody-else")
    assert [item["type"] for item in after["status"]["conditions"]] == [c.READY, "Foreign"]


def test_explain_describes_every_field(api: Api) -> None:
    """Models and fields whose meaning is not in their name carry a description."""
    text = api.cluster.kubectl("explain", "vsnap.spec", "--recursive")
    for field in spec_schema("VLLMSnapshot")["properties"]:
        assert re.search(rf"^  {field}\t", text, re.MULTILINE), field


def test_checked_in_crds_are_what_the_server_has(api: Api) -> None:
    """The server's own defaulting adds nothing that a later apply would fight over."""
    for name, crd in all_crds().items():
        assert yaml.safe_load((ROOT / "deploy" / "crds" / name).read_text()) == crd, "run `make generate`"
        raw = api.cluster.kubectl("get", "crd", crd["metadata"]["name"], "-o", "json")
        assert contains(json.loads(raw)["spec"]["versions"][0]["schema"], crd["spec"]["versions"][0]["schema"])
