"""Chart and plain manifests on the real API server: accepted for all values, installed, upgraded, removed; and the rights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import yaml

from tests.apiserver import Api, Object
from tests.chart import CHART, MATRIX, NAMESPACE, ROOT, template
from tests.cluster import Cluster, ClusterError, build
from tests.cluster.progress import Progress
from vllmsnapshot.api import constants as c
from vllmsnapshot.controller.selftest import examine
from vllmsnapshot.kube import CONTENTS, PODS, SNAPSHOT_NODES, SNAPSHOTS, ApiError, Kube, Resource


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster("install-tests", mode="controlplane") as cluster:
        cluster.kubectl("create", "namespace", NAMESPACE)
        for crd in build.monitoring_crds(Progress(quiet=True)):
            cluster.kubectl("apply", "--server-side", "-f", crd)
        cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
        yield cluster


@pytest.mark.parametrize("case", sorted(MATRIX))
def test_the_server_accepts_the_rendered_chart(cluster: Cluster, case: str) -> None:
    documents = [document for document in yaml.safe_load_all(template(MATRIX[case]).stdout) if document]
    # Without the pod of `helm test`: it needs its service account, which a dry run does not make.
    documents = [document for document in documents if document["kind"] != "Pod"]
    rendered = yaml.safe_dump_all(documents)
    out = cluster.kubectl("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-", input=rendered)
    assert out.count("serverside-applied") == len(documents)


def test_the_server_accepts_the_plain_manifests(cluster: Cluster) -> None:
    path = ROOT / "deploy" / "manifests" / "install.yaml"
    out = cluster.kubectl("apply", "--server-side", "--dry-run=server", "--validate=strict", "--force-conflicts", "-f", path)
    assert f"namespace/{NAMESPACE} serverside-applied" in out


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Api:
    """The chart, installed by Helm."""
    notes = cluster.helm("install", "vllmsnapshot", CHART, "--namespace", NAMESPACE)
    assert "kubectl get vsnapnode" in notes
    cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    return Api(cluster)


def pods_of_the_chart() -> dict[str, Object]:
    """The pods that the chart makes with its default values, by component."""
    found: dict[str, Object] = {}
    for document in yaml.safe_load_all(template({}).stdout):
        if document and document["kind"] in ("Deployment", "DaemonSet", "Pod"):
            pod = document if document["kind"] == "Pod" else document["spec"]["template"]
            labels = pod["metadata"]["labels"]
            spec = {**pod["spec"], "serviceAccountName": "default"}
            spec.pop("priorityClassName", None)  # which kube-system and a quota have to allow
            found[labels[c.LABEL_COMPONENT]] = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "x", "namespace": "restricted", "labels": labels},
                "spec": spec,
            }
    return found


def test_all_but_the_agent_pass_the_restricted_level(cluster: Cluster) -> None:
    """Pod Security admission itself says so."""
    cluster.kubectl("create", "namespace", "restricted")
    cluster.kubectl("label", "namespace", "restricted", "pod-security.kubernetes.io/enforce=restricted")
    cluster.kubectl("wait", "--for=create", "serviceaccount/default", "-n", "restricted", "--timeout=30s")
    refused = {}
    for component, pod in pods_of_the_chart().items():
        try:
            cluster.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", input=yaml.safe_dump(pod))
        except ClusterError as e:
            refused[component] = str(e)
    assert refused.keys() == {"agent"}
    assert 'violates PodSecurity "restricted' in refused["agent"]


SECRETS = Resource("", "v1", "secrets", "Secret")
ALLOWED = {
    "operator": [("create", PODS, ""), ("delete", PODS, ""), ("patch", SNAPSHOTS, "status"), ("create", CONTENTS, "")],
    "agent": [("patch", PODS, "status"), ("patch", CONTENTS, "status"), ("create", SNAPSHOT_NODES, "")],
}
FORBIDDEN = {
    "operator": [
        ("patch", PODS, ""),
        ("create", PODS, "exec"),
        ("delete", SNAPSHOTS, ""),
        ("patch", SNAPSHOTS, "scale"),
        ("patch", CONTENTS, "status"),
        ("patch", SNAPSHOT_NODES, ""),
        ("get", SECRETS, ""),
    ],
    "agent": [
        ("create", PODS, ""),
        ("create", PODS, "exec"),
        ("delete", PODS, ""),
        ("create", CONTENTS, ""),
        ("delete", CONTENTS, ""),
        ("patch", SNAPSHOTS, ""),
        ("patch", SNAPSHOTS, "status"),
        ("get", SECRETS, ""),
    ],
}


def may(api: Api, component: str, right: tuple[str, Resource, str]) -> bool:
    """Whether the service account of a component may do this, in the authorizer's view."""
    verb, resource, sub = right
    attributes = {"namespace": "default", "verb": verb, "group": resource.group, "resource": resource.plural, "subresource": sub}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": f"system:serviceaccount:{NAMESPACE}:vllmsnapshot-{component}",
            "groups": ["system:serviceaccounts", "system:authenticated"],
            "resourceAttributes": attributes,
        },
    }
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    return bool(api.call(lambda kube: kube.request("POST", path, body=review))["status"].get("allowed", False))


@pytest.mark.parametrize("component", ["operator", "agent"])
def test_rights(installed: Api, component: str) -> None:
    assert [right for right in ALLOWED[component] if not may(installed, component, right)] == []
    assert [right for right in FORBIDDEN[component] if may(installed, component, right)] == []


@pytest.mark.parametrize(
    ("role", "verbs"), [("view", {"get", "list", "watch"}), ("edit", {"create", "delete", "patch", "update"})]
)
def test_users_rights_come_with_the_built_in_roles(installed: Api, role: str, verbs: set[str]) -> None:
    path = f"/apis/rbac.authorization.k8s.io/v1/clusterroles/{role}"
    # A controller aggregates the rules.
    deadline = time.monotonic() + 30
    granted: set[str] = set()
    while not verbs <= granted:
        assert time.monotonic() < deadline, granted
        rules = installed.call(lambda kube: kube.request("GET", path))["rules"]
        granted = {v for r in rules if c.GROUP in r["apiGroups"] and "vllmsnapshots" in r["resources"] for v in r["verbs"]}


# --- an agent writes to its own node's objects only ------------------------------------------------------------------


def pod(name: str, node: str, namespace: str = "default", account: str = "default") -> Object:
    container = {"name": "main", "image": "registry.example/none"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"nodeName": node, "serviceAccountName": account, "containers": [container]},
    }


def content(name: str, node: str) -> Object:
    return {
        "apiVersion": c.API_VERSION,
        "kind": "VLLMSnapshotContent",
        "metadata": {"name": name, "finalizers": [c.FINALIZER_CONTENT]},
        "spec": {
            "snapshotRef": {"namespace": "default", "name": "x", "uid": "1"},
            "sourcePod": {"name": "x-0", "uid": "2"},
            "nodeName": node,
            "identity": "3",
        },
    }


@pytest.fixture(scope="module")
def agent(installed: Api) -> Api:
    """The API as the agent on `here` sees it, with the token that its pod would have."""
    for node in ("here", "there"):
        installed.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
        installed.create(pod(f"replica-{node}", node))
        installed.create(content(f"content-{node}", node))
    bound = installed.create(pod("agent", "here", NAMESPACE, "vllmsnapshot-agent"))
    token = installed.cluster.kubectl(
        *("create", "token", "vllmsnapshot-agent", "-n", NAMESPACE, "--bound-object-kind=Pod", "--bound-object-name=agent"),
        f"--bound-object-uid={bound['metadata']['uid']}",
    ).strip()
    api = Api(installed.cluster, token)
    # The API server learns of a new policy by a watch: it is in force when it has refused something.
    deadline = time.monotonic() + 30
    while not refused(api):
        assert time.monotonic() < deadline, "the policy does not come into force"
    return api


def refused(api: Api) -> bool:
    """Whether a write to another node's content is refused."""
    return forbidden(lambda: write_content(api, "there", dry_run=True))


def write_pod(api: Api, node: str) -> Object:
    """What the agent writes to a pod: label and annotation, then the condition."""
    meta = {"namespace": "default", "name": f"replica-{node}"}
    labelled = meta | {"labels": {c.LABEL_START_MODE: c.START_COLD}, "annotations": {c.ANNOTATION_REPORT: "{}"}}
    api.call(lambda kube: kube.apply(PODS, {"metadata": labelled}, c.MANAGER_AGENT))
    return write_condition(api, node)


def write_condition(api: Api, node: str) -> Object:
    meta = {"namespace": "default", "name": f"replica-{node}"}
    status = {"conditions": [{"type": c.CONDITION_VERIFIED, "status": "True"}]}
    return api.call(lambda kube: kube.apply(PODS, {"metadata": meta, "status": status}, c.MANAGER_AGENT, subresource="status"))


def write_content(api: Api, node: str, *, dry_run: bool = False) -> Object:
    body = {
        "apiVersion": c.API_VERSION,
        "kind": "VLLMSnapshotContent",
        "metadata": {"name": f"content-{node}"},
        "status": {"phases": {"dump": "1.00s"}},
    }
    path = CONTENTS.path(None, f"content-{node}", "status")
    query = {"fieldManager": c.MANAGER_AGENT, "force": "true", "dryRun": "All" if dry_run else None}
    kind = "application/apply-patch+yaml"
    return api.call(lambda kube: kube.request("PATCH", path, query=query, body=body, content_type=kind))


def write_node(api: Api, node: str) -> Object:
    made = api.call(lambda kube: kube.apply(SNAPSHOT_NODES, {"metadata": {"name": node}}, c.MANAGER_AGENT))
    status = {"metadata": made["metadata"] | {"managedFields": None}, "status": {"restoresInFlight": 0}}
    return api.call(lambda kube: kube.apply(SNAPSHOT_NODES, status, c.MANAGER_AGENT, subresource="status"))


def test_an_agent_writes_to_its_own_node(agent: Api) -> None:
    assert write_pod(agent, "here")["status"]["conditions"][-1]["type"] == c.CONDITION_VERIFIED
    assert write_content(agent, "here")["status"]["phases"] == {"dump": "1.00s"}
    assert write_node(agent, "here")["status"]["restoresInFlight"] == 0


@pytest.mark.parametrize("write", [write_pod, write_condition, write_content, write_node])
def test_an_agent_cannot_write_to_another_node(agent: Api, write: Callable[[Api, str], Object]) -> None:
    with pytest.raises(ApiError) as error:
        write(agent, "there")
    assert error.value.status == 403
    assert "an agent on node here may not write to objects of other nodes" in error.value.message


def test_an_agent_lets_its_content_go(agent: Api, installed: Api) -> None:
    """Removing the finalizer is a write too: its own, and not another's."""
    removal = [{"op": "remove", "path": "/metadata/finalizers/0"}]
    for node in ("here", "there"):
        installed.call(lambda kube, node=node: kube.delete(CONTENTS, f"content-{node}"))  # type: ignore[misc]
    with pytest.raises(ApiError, match="other nodes"):
        agent.call(lambda kube: kube.patch(CONTENTS, "content-there", None, removal, c.MANAGER_AGENT))
    agent.call(lambda kube: kube.patch(CONTENTS, "content-here", None, removal, c.MANAGER_AGENT))
    assert installed.call(lambda kube: kube.get(CONTENTS, "content-here")) is None
    assert installed.call(lambda kube: kube.get(CONTENTS, "content-there")) is not None


def test_a_token_without_a_node_writes_nothing(agent: Api, installed: Api) -> None:
    token = installed.cluster.kubectl("create", "token", "vllmsnapshot-agent", "-n", NAMESPACE).strip()
    with pytest.raises(ApiError, match="names no node"):
        write_pod(Api(installed.cluster, token), "here")


def test_the_policy_binds_nobody_else(agent: Api, installed: Api) -> None:
    """The administrator still writes anywhere."""
    assert write_condition(installed, "there")["status"]["conditions"]


async def test_the_self_test_tells_what_is_missing(installed: Api) -> None:
    """No kubelet here: the CRDs are served, and no pod of the operator runs."""
    with installed.cluster.enter_network():
        async with await Kube.connect(str(installed.cluster.kubeconfig)) as kube:
            found = await examine(kube, NAMESPACE)
    assert {name for name, trouble in found.items() if trouble} == {"operator"}


# --- nobody else says what a pod is ----------------------------------------------------------------------------------

LABELS = {c.LABEL_ROLE: c.ROLE_REPLICA, c.LABEL_IDENTITY: "i"}
ANNOTATIONS = {c.ANNOTATION_PORT: "8000"}


@pytest.fixture(scope="module")
def replica(agent: Api, installed: Api) -> str:
    """A pod as the operator makes it, and the policy in force."""
    token = installed.cluster.kubectl("create", "token", "vllmsnapshot-operator", "-n", NAMESPACE).strip()
    body = pod("ours", "here")
    body["metadata"] |= {"labels": {**LABELS, "app": "mine"}, "annotations": ANNOTATIONS}
    Api(installed.cluster, token).create(body)
    forged = pod("forged", "here")
    forged["metadata"]["labels"] = LABELS
    deadline = time.monotonic() + 30
    while not forbidden(lambda: installed.create(forged, dry_run=True)):
        assert time.monotonic() < deadline, "the policy does not come into force"
    return "ours"


def forbidden(write: Callable[[], object]) -> bool:
    """Whether a write is refused."""
    try:
        write()
    except ApiError as error:
        return error.status == 403
    return False


def merge(api: Api, name: str, meta: Object, subresource: str = "") -> Object:
    """As kubectl label and annotate do it."""
    path, kind = PODS.path("default", name, subresource or None), "application/merge-patch+json"
    return api.call(lambda kube: kube.request("PATCH", path, body={"metadata": meta}, content_type=kind))


@pytest.mark.parametrize(
    "meta",
    [
        {"labels": {c.LABEL_ROLE: c.ROLE_REPLICA}},
        {"labels": {c.LABEL_IDENTITY: "i", "app": "x"}},
        {"annotations": {c.ANNOTATION_REPORT: "{}"}},
        {"annotations": {c.ANNOTATION_SETTINGS: "{}"}},
    ],
)
def test_nobody_else_makes_a_pod_that_looks_like_a_replica(replica: str, installed: Api, meta: Object) -> None:
    forged = pod("forged", "here")
    forged["metadata"] |= meta
    with pytest.raises(ApiError, match="belong to the operator"):
        installed.create(forged)


@pytest.mark.parametrize("subresource", ["", "status"])
@pytest.mark.parametrize(
    "meta",
    [
        {"labels": {c.LABEL_IDENTITY: "another"}},
        {"labels": {c.LABEL_ROLE: None}},
        {"labels": {c.LABEL_SNAPSHOT: "added"}},
        {"annotations": {c.ANNOTATION_PORT: "1"}},
        {"annotations": {c.ANNOTATION_PORT: None}},
    ],
)
def test_nobody_else_changes_what_a_replica_is(replica: str, installed: Api, meta: Object, subresource: str) -> None:
    with pytest.raises(ApiError, match="belong to the operator"):
        merge(installed, replica, meta, subresource)


def test_a_binding_brings_nothing_along(replica: str, installed: Api) -> None:
    waiting = pod("waiting", "here")
    del waiting["spec"]["nodeName"]
    installed.create(waiting)
    path = PODS.path("default", "waiting", "binding")

    def bind(meta: Object) -> Object:
        target = {"apiVersion": "v1", "kind": "Node", "name": "here"}
        meta = {"name": "waiting", "namespace": "default", **meta}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": meta, "target": target}
        return installed.call(lambda kube: kube.request("POST", path, body=body))

    with pytest.raises(ApiError, match="belong to the operator"):
        bind({"annotations": {c.ANNOTATION_SETTINGS: "{}"}})
    bind({})


def test_everything_else_of_a_pod_is_anybodys(replica: str, installed: Api, agent: Api) -> None:
    assert merge(installed, replica, {"labels": {"app": "other", "more": "x"}})["metadata"]["labels"]["app"] == "other"
    merge(installed, replica, {"labels": {"app": None}, "annotations": {"example.com/x": "y"}})
    merge(installed, "replica-there", {"labels": {"vllmsnapshot": "x"}})
    # And the agent still reports.
    meta = {"namespace": "default", "name": replica, "annotations": {c.ANNOTATION_REPORT: "{}"}}
    agent.call(lambda kube: kube.apply(PODS, {"metadata": meta}, c.MANAGER_AGENT))
    installed.call(lambda kube: kube.delete(PODS, replica, "default", grace_period_s=0))


# --- upgrade, uninstall ----------------------------------------------------------------------------------------------


def test_upgrade_and_uninstall_keep_the_users_objects(installed: Api) -> None:
    cluster = installed.cluster
    spec = {"model": "m", "image": "i"}
    meta = {"name": "kept", "namespace": "default"}
    kept = installed.create({"apiVersion": c.API_VERSION, "kind": "VLLMSnapshot", "metadata": meta, "spec": spec})
    cluster.helm("upgrade", "vllmsnapshot", CHART, "--namespace", NAMESPACE, "--set", "agent.storeDir=/mnt/other")
    path = cluster.kubectl(
        *("-n", NAMESPACE, "get", "daemonset", "vllmsnapshot-agent"),
        *("-o", "jsonpath={.spec.template.spec.volumes[?(@.name=='store')].hostPath.path}"),
    )
    assert path == "/mnt/other"
    cluster.helm("uninstall", "vllmsnapshot", "--namespace", NAMESPACE)
    left = cluster.kubectl("-n", NAMESPACE, "get", "deploy,daemonset", "-o", "name")
    assert left == ""
    after = installed.call(lambda kube: kube.get(SNAPSHOTS, "kept", "default"))
    assert after is not None
    assert after["metadata"]["uid"] == kept["metadata"]["uid"]
    # And a new release takes the kept CRDs over.
    cluster.helm("install", "vllmsnapshot", CHART, "--namespace", NAMESPACE)
