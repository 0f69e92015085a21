"""The chart without a cluster: what it renders for many values, what it refuses, and that rights match what the code does."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart import CHART, MATRIX, NAMESPACE, ROOT, UNSEEN, Object, Right, helm, render, template
from vllmsnapshot import kube
from vllmsnapshot.agent import config as agent_config
from vllmsnapshot.api import constants as c
from vllmsnapshot.controller import app as operator_app

CLUSTER_SCOPED = {
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}


@pytest.fixture(scope="module", params=sorted(MATRIX))
def case(request: pytest.FixtureRequest) -> tuple[Object, list[Object]]:
    """Values and what they render to."""
    values = MATRIX[request.param]
    return values, render(values)


@pytest.fixture(scope="module")
def default() -> list[Object]:
    return render({})


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [o for o in objects if o["kind"] == kind]


def only(objects: list[Object], kind: str, suffix: str = "") -> Object:
    (found,) = (o for o in of_kind(objects, kind) if o["metadata"]["name"].endswith(suffix))
    return found


def workloads(objects: list[Object]) -> dict[str, Object]:
    return {"operator": only(objects, "Deployment"), "agent": only(objects, "DaemonSet")}


# --- every rendering -------------------------------------------------------------------------------------------------


def test_objects_are_unique_and_in_their_namespace(case: tuple[Object, list[Object]]) -> None:
    _, objects = case
    keys = [(o["apiVersion"], o["kind"], o["metadata"]["name"]) for o in objects]
    assert len(keys) == len(set(keys))
    for o in objects:
        expected = None if o["kind"] in CLUSTER_SCOPED else NAMESPACE
        assert o["metadata"].get("namespace") == expected, keys
        assert len(o["metadata"]["name"]) <= 63


def test_labels(case: tuple[Object, list[Object]]) -> None:
    values, objects = case
    for o in objects:
        if o["kind"] == "CustomResourceDefinition":
            continue
        labels = o["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == "vllmsnapshot"
        assert labels.items() >= values.get("commonLabels", {}).items()
    for component, workload in workloads(objects).items():
        selector = workload["spec"]["selector"]["matchLabels"]
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert labels.items() >= selector.items()
        # What may change in an upgrade must not be in a selector, which cannot.
        assert set(selector) == {"app.kubernetes.io/name", "app.kubernetes.io/instance", c.LABEL_COMPONENT}
        assert labels[c.LABEL_COMPONENT] == {"operator": c.COMPONENT_OPERATOR, "agent": c.COMPONENT_AGENT}[component]


def test_references_resolve(case: tuple[Object, list[Object]]) -> None:
    values, objects = case
    accounts = {o["metadata"]["name"] for o in of_kind(objects, "ServiceAccount")}
    roles = {o["metadata"]["name"] for o in of_kind(objects, "ClusterRole")}
    used = {w["spec"]["template"]["spec"]["serviceAccountName"] for w in workloads(objects).values()}
    foreign = {values.get(part, {}).get("serviceAccount", {}).get("name") for part in ("operator", "agent")}
    assert accounts <= used <= accounts | foreign
    for binding in of_kind(objects, "ClusterRoleBinding"):
        assert binding["roleRef"]["name"] in roles
        assert [s["name"] in used and s["namespace"] == NAMESPACE for s in binding["subjects"]] == [True]
    for binding in of_kind(objects, "ValidatingAdmissionPolicyBinding"):
        assert binding["spec"]["policyName"] in {o["metadata"]["name"] for o in of_kind(objects, "ValidatingAdmissionPolicy")}


def test_pods_are_complete(case: tuple[Object, list[Object]]) -> None:
    _, objects = case
    for workload in workloads(objects).values():
        pod = workload["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
        assert container["resources"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        (port,) = container["ports"]
        found = environment(container)
        assert len(found) == len(container["env"])
        (health,) = (value for name, value in found.items() if name.endswith("HEALTH_PORT"))
        assert health == str(port["containerPort"])
        for probe, path in (("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
            assert container[probe]["httpGet"] == {"path": path, "port": port["name"]}
        for volume in pod["volumes"]:
            # Without a type the kubelet does not check, and a missing directory would be made as a root-owned one.
            assert volume.get("hostPath", {"type": ""}).get("type") is not None
        assert all(value is not None for value in [*pod.values(), *container.values()])


def test_one_image(case: tuple[Object, list[Object]]) -> None:
    values, objects = case
    image = values.get("image", {})
    name = image.get("repository", "ghcr.io/vllmsnapshot/operator")
    expected = f"{name}@{image['digest']}" if "digest" in image else f"{name}:{image.get('tag', '0.1.0')}"
    for workload in workloads(objects).values():
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        assert container["image"] == expected
        assert container["imagePullPolicy"] == image.get("pullPolicy", "IfNotPresent")


def test_switches(case: tuple[Object, list[Object]]) -> None:
    values, objects = case
    crds = of_kind(objects, "CustomResourceDefinition")
    assert len(crds) == (3 if values.get("crds", {}).get("enabled", True) else 0)
    for crd in crds:
        kept = crd["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
        assert kept is values.get("crds", {}).get("keep", True)
    rbac = values.get("rbac", {})
    aggregated = [r for r in of_kind(objects, "ClusterRole") if any("aggregate-to" in k for k in r["metadata"]["labels"])]
    assert bool(of_kind(objects, "ClusterRoleBinding")) is rbac.get("create", True)
    assert len(aggregated) == (4 if rbac.get("create", True) and rbac.get("aggregate", True) else 0)
    policies = {o["metadata"]["name"].rpartition("-")[2]: o for o in of_kind(objects, "ValidatingAdmissionPolicy")}
    assert ("agent" in policies) is values.get("agent", {}).get("admissionPolicy", {}).get("enabled", True)
    assert ("pods" in policies) is values.get("podAdmissionPolicy", {}).get("enabled", True)
    accounts = {k: w["spec"]["template"]["spec"]["serviceAccountName"] for k, w in workloads(objects).items()}
    for name, named in (("agent", ("agent",)), ("pods", ("operator", "agent"))):
        if name in policies:
            expression = policies[name]["spec"]["matchConditions"][0]["expression"]
            for component in named:
                assert f"'system:serviceaccount:{NAMESPACE}:{accounts[component]}'" in expression


def test_release_name_is_the_prefix() -> None:
    names = {o["metadata"]["name"] for o in render({}, release="prod") if o["kind"] != "CustomResourceDefinition"}
    assert all(name.startswith("prod-vllmsnapshot-") for name in names)


# --- privileges ------------------------------------------------------------------------------------------------------


def test_the_operator_has_no_privileges(default: list[Object]) -> None:
    workload = workloads(default)["operator"]
    assert workload["spec"]["replicas"] == 1
    assert workload["spec"]["strategy"] == {"type": "Recreate"}
    pod = workload["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not {"hostPID", "hostIPC", "hostNetwork"} & pod.keys()
    assert all("hostPath" not in volume for volume in pod["volumes"])
    assert container["command"][-1] == "vllmsnapshot-operator"


def test_the_agent_has_those_it_needs(default: list[Object]) -> None:
    pod = workloads(default)["agent"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["vllmsnapshot-agent"]
    assert container["securityContext"]["privileged"] is True
    assert container["securityContext"]["runAsUser"] == 0
    assert pod["hostPID"] is True
    assert not {"hostIPC", "hostNetwork"} & pod.keys()
    paths = {v["name"]: v["hostPath"] for v in pod["volumes"] if "hostPath" in v}
    assert paths["kubelet"] == {"path": "/var/lib/kubelet", "type": "Directory"}
    assert paths["store"] == {"path": "/var/lib/vllmsnapshot", "type": "DirectoryOrCreate"}
    assert paths["cgroup"] == {"path": "/sys/fs/cgroup", "type": "Directory"}
    mounts = {m["name"]: m for m in container["volumeMounts"]}
    # Pods that start after the agent must show up in its mount namespace.
    assert mounts["kubelet"]["mountPropagation"] == "HostToContainer"
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


def test_the_agent_takes_its_paths_from_the_values() -> None:
    pod = workloads(render(MATRIX["everything"]))["agent"]["spec"]["template"]["spec"]
    paths = {v["name"]: v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v}
    assert paths["kubelet"] == "/data/k0s/kubelet"
    assert paths["store"] == "/mnt/nvme/vllmsnapshot"
    assert paths["driver"] == "/opt/nvidia"
    assert {"name": "driver", "mountPath": "/usr/local/nvidia", "readOnly": True} in pod["containers"][0]["volumeMounts"]
    assert pod["runtimeClassName"] == "nvidia"
    assert "tolerations" not in pod
    assert "priorityClassName" not in pod


def test_the_test_pod_has_no_privileges_and_no_image_of_its_own(default: list[Object]) -> None:
    pod = only(default, "Pod", "-test")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    operator = workloads(default)["operator"]["spec"]["template"]["spec"]
    spec = pod["spec"]
    assert spec["serviceAccountName"] == operator["serviceAccountName"]
    assert spec["securityContext"] == operator["securityContext"]
    (mine,), (other,) = spec["containers"], operator["containers"]
    assert (mine["image"], mine["securityContext"]) == (other["image"], other["securityContext"])
    module = mine["command"][-1]
    assert mine["command"] == ["python", "-m", module]
    assert (ROOT / "operator" / Path(*module.split("."))).with_suffix(".py").exists()
    # Nothing that chooses the operator's or the agents' pods chooses this one.
    labels = pod["metadata"]["labels"].items()
    assert not any(labels >= w["spec"]["selector"]["matchLabels"].items() for w in workloads(default).values())


def test_plain_manifests_have_no_test_pod() -> None:
    documents = yaml.safe_load_all((ROOT / "deploy" / "manifests" / "install.yaml").read_text())
    assert "Pod" not in {document["kind"] for document in documents if document}


@pytest.mark.parametrize("peers", [[], [{"namespaceSelector": {}}]])
def test_network_policies(peers: list[Object]) -> None:
    objects = render({"networkPolicy": {"enabled": True, "metricsFrom": peers}})
    policies = of_kind(objects, "NetworkPolicy")
    for component, workload in workloads(objects).items():
        template = workload["spec"]["template"]
        (policy,) = (
            p for p in policies if template["metadata"]["labels"].items() >= p["spec"]["podSelector"]["matchLabels"].items()
        )
        ports = {port["name"] for container in template["spec"]["containers"] for port in container["ports"]}
        assert sorted(policy["spec"]["policyTypes"]) == ["Egress", "Ingress"]
        allowed = policy["spec"]["ingress"]
        assert [rule["from"] for rule in allowed] == ([peers] if peers else [])
        assert {port["port"] for rule in allowed for port in rule["ports"]} <= ports
        api, *more = policy["spec"]["egress"]
        assert {port["port"] for port in api["ports"]} == {443, 6443}
        selected = [rule["to"][0]["podSelector"]["matchLabels"] for rule in more]
        assert selected == ([{c.LABEL_ROLE: c.ROLE_REPLICA}] if component == "agent" else [])


def test_the_disruption_budget_is_the_operators() -> None:
    objects = render(MATRIX["never-evict"])
    budget = only(objects, "PodDisruptionBudget")
    labels = {name: w["spec"]["template"]["metadata"]["labels"].items() for name, w in workloads(objects).items()}
    chosen = budget["spec"]["selector"]["matchLabels"].items()
    assert [name for name, found in labels.items() if found >= chosen] == ["operator"]
    assert budget["spec"]["maxUnavailable"] == 0


def test_what_is_off_is_not_there(default: list[Object]) -> None:
    kinds = {o["kind"] for o in default}
    assert not kinds & {
        "ServiceMonitor",
        "PodMonitor",
        "PrometheusRule",
        "ConfigMap",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Service",
    }


def environment(container: Object) -> dict[str, str]:
    """The container's environment as its process sees it (values of the downward API by a made-up text)."""
    return {e["name"]: e.get("value") or e["valueFrom"]["fieldRef"]["fieldPath"] for e in container["env"]}


def test_the_agent_understands_its_environment() -> None:
    values = {"agent": {"healthPort": 18081, "logLevel": "WARNING"}, "logging": {"format": "json"}, "metrics": {"enabled": False}}
    pod = workloads(render(values))["agent"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    config = agent_config.parse([], environment(container))
    assert config.node_name == "spec.nodeName"
    assert (config.port, config.log_level, config.log_format, config.metrics) == (18081, "WARNING", "json", "off")
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    assert (config.kubelet_dir, config.store_dir, config.cgroup_root) == (mounts["kubelet"], mounts["store"], mounts["cgroup"])
    assert f"/{config.criu_prefix.strip('/')} " in (ROOT / "Dockerfile.operator").read_text()
    # Every variable that the chart sets is one that the agent reads.
    known = {f.metadata["env"] for f in dataclasses.fields(agent_config.Config)}
    assert set(environment(container)) <= known


def test_the_operator_understands_its_environment() -> None:
    values = {
        "operator": {"healthPort": 18080, "logLevel": "WARNING"},
        "logging": {"format": "json"},
        "metrics": {"enabled": False},
    }
    (container,) = workloads(render(values))["operator"]["spec"]["template"]["spec"]["containers"]
    found = operator_app.parse([], environment(container))
    assert found.agent_namespace == "metadata.namespace"
    assert (found.health_port, found.log_level, found.log_json, found.metrics) == (18080, "WARNING", True, False)


def test_commands_are_entry_points(default: list[Object]) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for workload in workloads(default).values():
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        assert container["command"][-1] in scripts


VERBS = {
    "get": ("get",),
    "list": ("list",),
    "list_with_version": ("list",),
    "watch": ("list", "watch"),
    "create": ("create",),
    "apply": ("patch",),
    "patch": ("patch",),
    "delete": ("delete",),
}
"""Methods of kube.Kube to the verbs that the API server checks."""

RESOURCES = {name: value for name, value in vars(kube).items() if isinstance(value, kube.Resource)}


def constant(node: ast.expr | None) -> kube.Resource | None:
    """The resource that an expression `PODS`, `kube.PODS` or `PODS.plural` names."""
    if isinstance(node, ast.Attribute) and node.attr == "plural":
        node = node.value
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return RESOURCES.get(name)


def verbs(call: ast.Call) -> tuple[kube.Resource | None, tuple[str, ...]]:
    """What a call asks of the API server, if anything."""
    match call.func:
        case ast.Attribute(attr="event"):  # kopf.on.event(group, version, PODS.plural)
            return constant(call.args[-1] if call.args else None), ("list", "watch")
        case ast.Name(id="Cache"):  # the agent's; it watches the resource that it is given
            return constant(call.args[0] if call.args else None), ("list", "watch")
        case ast.Attribute(attr=attr) if attr in VERBS:
            return constant(call.args[0] if call.args else None), VERBS[attr]
    return None, ()


def calls(package: str) -> Iterator[Right]:
    """Every right that a call in the package uses, read from the source."""
    for path in sorted((ROOT / "operator" / "vllmsnapshot" / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            resource, used = verbs(node)
            if resource is None:
                continue
            name = resource.plural
            for keyword in node.keywords:
                if keyword.arg == "subresource":
                    literal = keyword.value
                    assert isinstance(literal, ast.Constant), f"{path}:{node.lineno}: write the subresource as a literal"
                    name += f"/{literal.value!s}"
            for verb in used:
                yield resource.group, name, verb


@pytest.mark.parametrize(("package", "component"), [("controller", "operator"), ("agent", "agent")])
def test_rights_are_those_that_the_code_uses(default: list[Object], package: str, component: str) -> None:
    role = only(default, "ClusterRole", f"-{component}")
    granted = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    used = set(calls(package)) | UNSEEN[component]
    assert granted - used == set(), "granted but not used"
    assert used - granted == set(), "used but not granted"


def test_no_role_reaches_secrets_or_wildcards(default: list[Object]) -> None:
    for role in of_kind(default, "ClusterRole"):
        for rule in role["rules"]:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert not {"secrets", "nodes/proxy", "pods/exec", "serviceaccounts/token"} & set(rule["resources"])


# --- values ----------------------------------------------------------------------------------------------------------


def at(path: tuple[str, ...], value: Any) -> Object:
    """Values with this one set."""
    for name in reversed(path):
        value = {name: value}
    made: Object = value
    return made


VALUES_SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def resolved(schema: Object) -> Object:
    """A schema in place of a reference to it."""
    return resolved(VALUES_SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]) if "$ref" in schema else schema


def violations(schema: Object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Object, str]]:
    """For every rule of the schema: its name, values that break it and nothing else, and what the refusal must name."""
    schema = resolved(schema)
    where = "/" + "/".join(path)
    name = ".".join(path)
    if "enum" in schema:
        yield f"{name} enum", at(path, "surely-none-of-these"), where
        return
    kinds = schema.get("type", ())
    if path and kinds:
        wrong: Any = 7 if "string" in kinds or "object" in kinds or "array" in kinds else "7"
        if not ({"integer", "number"} & set(kinds if isinstance(kinds, list) else [kinds]) and wrong == 7):
            yield f"{name} type", at(path, wrong), where
    if "minimum" in schema:
        yield f"{name} minimum", at(path, schema["minimum"] - 1), where
    if "maximum" in schema:
        yield f"{name} maximum", at(path, schema["maximum"] + 1), where
    if "maxLength" in schema:
        yield f"{name} maxLength", at(path, "a" * (schema["maxLength"] + 1)), where
    if schema.get("minLength"):
        yield f"{name} minLength", at(path, ""), where
    if "pattern" in schema:
        yield f"{name} pattern", at(path, "!! !!"), where
    if "minItems" in schema:
        yield f"{name} minItems", at(path, []), where
    if "items" in schema:
        for inner, broken, _ in violations(schema["items"], ("X",)):
            yield f"{name}[{inner.removeprefix('X')}]", at(path, [broken["X"]]), where
        for missing in resolved(schema["items"]).get("required", []):
            yield f"{name}[] without {missing}", at(path, [{}]), where
    if schema.get("additionalProperties") is False:
        yield f"{name} unknown", at((*path, "unknownName"), 1), "additional properties 'unknownName' not allowed"
    elif isinstance(schema.get("additionalProperties"), dict):
        yield f"{name} values", at((*path, "key"), ["list"]), f"{where}/key"
    for key, sub in schema.get("properties", {}).items():
        yield from violations(sub, (*path, key))
    for key in schema.get("required", ()) if path else ():
        # A null takes a default away.
        yield f"{name} without {key}", at((*path, key), None), where


VIOLATIONS = {name: (values, message) for name, values, message in violations(VALUES_SCHEMA) if not name.startswith("global")}


def test_there_is_a_sample_for_every_rule() -> None:
    kinds = {name.rpartition(" ")[2] for name in VIOLATIONS}
    assert {"enum", "type", "minimum", "maximum", "maxLength", "minLength", "pattern", "minItems", "unknown", "values"} <= kinds
    assert len(VIOLATIONS) > 100


@pytest.mark.parametrize("rule", sorted(VIOLATIONS))
def test_values_that_break_a_rule_are_refused(rule: str) -> None:
    values, message = VIOLATIONS[rule]
    result = template(values)
    assert result.returncode != 0
    assert message in result.stderr


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"agent": {"kubeletDir": "relative"}}, "/agent/kubeletDir"),
        ({"agent": {"updateStrategy": {"rollingUpdate": {"maxSurge": 1}}}}, "/agent/updateStrategy/rollingUpdate"),
        ({"agent": {"storeDir": "/"}}, "/agent/storeDir"),
        ({"agent": {"storeQuota": "many"}}, "/agent/storeQuota"),
        ({"agent": {"storeMinFree": ""}}, "/agent/storeMinFree"),
        ({"agent": {"storeDir": "/a/../etc"}}, "/agent/storeDir"),
        ({"image": {"digest": "sha256:short"}}, "/image/digest"),
        ({"image": {"repository": "x@sha256:0"}}, "/image/repository"),
        ({"monitoring": {"podMonitor": {"interval": "15"}}}, "/monitoring/podMonitor/interval"),
        ({"operator": {"replicas": 2}}, "additional properties 'replicas' not allowed"),
        ({"agent": {"serviceAccount": {"create": False}}}, "agent.serviceAccount.name is required"),
        ({"metrics": {"enabled": False}, "monitoring": {"serviceMonitor": {"enabled": True}}}, "needs metrics.enabled"),
    ],
)
def test_wrong_values_are_refused(values: Object, message: str) -> None:
    result = template(values)
    assert result.returncode != 0
    assert message in result.stderr


def paths(value: Any, prefix: str = "") -> Iterator[str]:
    """Paths of a values file; an empty map is a leaf."""
    if isinstance(value, dict) and value:
        for key, sub in value.items():
            yield from paths(sub, f"{prefix}.{key}".lstrip("."))
    else:
        yield prefix


def schema_paths(schema: Object, root: Object, prefix: str = "") -> Iterator[str]:
    if "$ref" in schema:
        schema = root["definitions"][schema["$ref"].rpartition("/")[2]]
    if "properties" in schema:
        for key, sub in schema["properties"].items():
            yield from schema_paths(sub, root, f"{prefix}.{key}".lstrip("."))
    else:
        yield prefix


def test_schema_and_values_name_the_same() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    open_maps = ("operator.resources", "agent.resources", "agent.updateStrategy", "monitoring.dashboard.labels")

    def folded(found: Iterator[str]) -> set[str]:
        return {next((m for m in open_maps if path.startswith(m)), path) for path in found}

    assert folded(paths(values)) == folded(schema_paths(VALUES_SCHEMA, VALUES_SCHEMA)) - {"global"}


def test_every_value_is_documented() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    for number, line in enumerate(lines):
        match = re.match(r"( *)([a-zA-Z]+):", line)
        if not match or line.rstrip().endswith(":"):
            continue
        previous = lines[number - 1].strip()
        inside_documented = len(match[1]) > 2
        assert previous.startswith("#") or inside_documented, f"values.yaml:{number + 1}: {line.strip()} has no `# --` comment"


# --- generated files -------------------------------------------------------------------------------------------------


def test_manifests_are_the_rendered_chart() -> None:
    script = ROOT / "deploy" / "manifests" / "generate.py"
    result = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False, env={**os.environ, "HELM": helm()}
    )
    assert result.returncode == 0, f"run `make generate`:\n{result.stdout}{result.stderr}"


def test_the_chart_carries_the_crds(default: list[Object]) -> None:
    wanted = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / "deploy" / "crds").glob("*.yaml")}
    for crd in of_kind(default, "CustomResourceDefinition"):
        assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert sorted(map(json.dumps, of_kind(default, "CustomResourceDefinition"))) == sorted(map(json.dumps, wanted.values()))


@pytest.mark.parametrize("case", sorted(MATRIX))
def test_lint(case: str) -> None:
    command = [helm(), "lint", "--strict", str(CHART), "--values", "-"]
    result = subprocess.run(command, input=yaml.safe_dump(MATRIX[case]), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_chart_and_package_have_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["version"] == chart["appVersion"] == project["version"]


def test_notes_name_what_is_there(default: list[Object]) -> None:
    notes = (CHART / "templates" / "NOTES.txt").read_text()
    for path in re.findall(r"deploy/[\w./-]+", notes):
        assert (ROOT / path).exists() or Path(ROOT / path).is_dir()
