"""`doctor`: is everything there that captures and restores need, and if not, what to do about it.

`examine` asks the API server; the checks themselves are pure functions of what it said.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.text import Text

from .. import __version__
from ..api import constants as c
from ..api.crd import all_crds
from ..kube import CONTENTS, NODES, PODS, SNAPSHOT_NODES, SNAPSHOTS, ApiError, Kube, Object, Resource
from ..objects import condition, is_true
from .output import BAD, DOUBT, FAINT, GOOD, HEAD, plain

Level = Literal["Pass", "Warn", "Fail"]

MINIMUM = (1, 30)
"""Oldest Kubernetes: docs/install.md says why."""

CRDS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False)
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
DAEMONSETS = Resource("apps", "v1", "daemonsets", "DaemonSet")
REVIEWS = Resource("authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", namespaced=False)
OWN_REVIEWS = Resource("authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview", namespaced=False)

PART = "app.kubernetes.io/part-of=vllmsnapshot"
INSTALL = "install the chart: docs/install.md"
UPGRADE = "helm upgrade, or kubectl apply --server-side -f deploy/crds"


@dataclass(frozen=True)
class Finding:
    """One check. `area` is `cluster` or `node NAME` or `snapshot NAMESPACE/NAME`."""

    area: str
    name: str
    level: Level
    message: str
    remedy: str = ""


Right = tuple[str, Resource, str]
"""Verb, resource, subresource."""

SERVICE_RIGHTS: dict[str, tuple[Right, ...]] = {
    c.COMPONENT_OPERATOR: (
        ("create", PODS, ""),
        ("delete", PODS, ""),
        ("patch", SNAPSHOTS, "status"),
        ("create", CONTENTS, ""),
        ("list", NODES, ""),
    ),
    c.COMPONENT_AGENT: (("patch", PODS, "status"), ("patch", CONTENTS, "status"), ("patch", SNAPSHOT_NODES, "status")),
}
"""Without these nothing works; the chart's roles have more."""

OWN_RIGHTS: tuple[tuple[Right, str], ...] = (
    (("list", SNAPSHOTS, ""), "status"),
    (("list", PODS, ""), "describe"),
    (("patch", SNAPSHOTS, ""), "recapture"),
    (("list", CONTENTS, ""), "artifacts list"),
    (("patch", CONTENTS, ""), "artifacts verify"),
    (("delete", CONTENTS, ""), "artifacts gc"),
)
"""What the caller's commands need."""


# --- checks: pure ----------------------------------------------------------------------------------------------------


def version(info: Mapping[str, Any]) -> Finding:
    """The API server's version."""
    text = str(info.get("gitVersion") or f"{info.get('major')}.{info.get('minor')}")
    match = re.match(r"v?(\d+)\.(\d+)", text)
    if match and (int(match[1]), int(match[2])) < MINIMUM:
        remedy = f"upgrade the cluster to {MINIMUM[0]}.{MINIMUM[1]} or newer"
        return Finding("cluster", "kubernetes", "Fail", text, remedy)
    return Finding("cluster", "kubernetes", "Pass", text)


def crds(found: Sequence[Object]) -> list[Finding]:
    """Whether the CRDs are there, established, and those of this version."""
    there = {item["metadata"]["name"]: item for item in found}
    made = []
    for wanted in all_crds().values():
        name = wanted["metadata"]["name"]
        short = f"crd {name.partition('.')[0]}"
        item = there.get(name)
        if item is None:
            made.append(Finding("cluster", short, "Fail", "is not there", INSTALL))
        elif not is_true(item, "Established"):
            why = condition(item, "NamesAccepted").get("message") or "is not established"
            made.append(Finding("cluster", short, "Fail", str(why), "remove the CRD that takes its name, and install again"))
        elif (missing := _missing(wanted, item)) is not None:
            made.append(Finding("cluster", short, "Warn", f"is not that of {__version__}: {missing}", UPGRADE))
        else:
            made.append(Finding("cluster", short, "Pass", f"{c.VERSION} is served"))
    return made


def _missing(wanted: Object, item: Object) -> str | None:
    """The first field of our schema that the installed one does not have."""
    served = {v["name"]: v for v in item["spec"]["versions"] if v.get("served")}
    here = served.get(c.VERSION)
    if here is None:
        return f"{c.VERSION} is not served"
    ours = set(_paths(wanted["spec"]["versions"][0]["schema"]["openAPIV3Schema"]))
    gone = sorted(ours - set(_paths(here["schema"]["openAPIV3Schema"])))
    return f"it does not know {gone[0]}" if gone else None


def _paths(schema: Any, prefix: str = "") -> Iterable[str]:
    for name, value in (schema.get("properties") or {}).items():
        yield f"{prefix}.{name}"
        yield from _paths(value, f"{prefix}.{name}")
    if isinstance(schema.get("items"), dict):
        yield from _paths(schema["items"], prefix + "[]")


def operator(deployments: Sequence[Object]) -> Finding:
    """One operator, available."""
    name = "operator"
    if not deployments:
        return Finding("cluster", name, "Fail", "no Deployment is there", INSTALL)
    if len(deployments) > 1:
        names = ", ".join(sorted(_name(item) for item in deployments))
        return Finding(
            "cluster", name, "Fail", f"{names}: two operators act against each other", "uninstall all releases but one"
        )
    item = deployments[0]
    replicas = item["spec"].get("replicas", 1)
    if not (item.get("status") or {}).get("availableReplicas"):
        remedy = f"kubectl -n {item['metadata']['namespace']} describe deployment {item['metadata']['name']}; and its pod's log"
        if replicas == 0:
            remedy = f"kubectl -n {item['metadata']['namespace']} scale deployment {item['metadata']['name']} --replicas=1"
        return Finding("cluster", name, "Fail", f"{_name(item)} has no available pod: nothing is scaled or captured", remedy)
    if replicas > 1:
        return Finding("cluster", name, "Fail", f"{replicas} replicas act twice", "set its replicas to 1")
    return Finding("cluster", name, "Pass", f"{_name(item)} is available")


def agents(daemonsets: Sequence[Object]) -> Finding:
    """Agents where they are wanted."""
    if not daemonsets:
        return Finding("cluster", "agents", "Fail", "no DaemonSet is there: every replica starts cold", INSTALL)
    item, status = daemonsets[0], daemonsets[0].get("status") or {}
    wanted, ready = status.get("desiredNumberScheduled") or 0, status.get("numberReady") or 0
    where = f"kubectl -n {item['metadata']['namespace']}"
    if wanted == 0:
        remedy = "look at agent.nodeSelector and agent.tolerations of the chart"
        return Finding("cluster", "agents", "Fail", f"{_name(item)} wants no node: every replica starts cold", remedy)
    if ready < wanted:
        level: Level = "Fail" if ready == 0 else "Warn"
        remedy = f"{where} get pods -o wide -l {c.LABEL_COMPONENT}={c.COMPONENT_AGENT}; and the log of those that are not ready"
        return Finding(
            "cluster", "agents", level, f"{ready} of {wanted} are ready: replicas start cold on the other nodes", remedy
        )
    return Finding("cluster", "agents", "Pass", f"{ready} of {wanted} are ready")


def _name(item: Object) -> str:
    return f"{item['metadata']['namespace']}/{item['metadata']['name']}"


def images(workloads: Sequence[Object]) -> list[Finding]:
    """Operator, agents and this program should be of one version."""
    tags = {item["kind"]: str(item["metadata"].get("labels", {}).get("app.kubernetes.io/version") or "") for item in workloads}
    other = {kind: tag for kind, tag in tags.items() if tag and tag != __version__}
    if not other:
        return []
    text = ", ".join(f"{kind} {tag}" for kind, tag in sorted(other.items()))
    remedy = "use the plugin of the installed version, or helm upgrade"
    return [Finding("cluster", "versions", "Warn", f"{text}; this plugin is {__version__}", remedy)]


def node(obj: Object, agent_nodes: frozenset[str] | None) -> list[Finding]:
    """What the agent says of its node: one line if all is well, else one per trouble."""
    name, status = obj["metadata"]["name"], obj.get("status") or {}
    area = f"node {name}"
    made = [
        Finding(area, item["name"], item["status"], item.get("message") or "", item.get("remedy") or "")
        for item in status.get("checks") or []
        if item["status"] != "Pass"
    ]
    found = condition(obj, c.READY)
    if agent_nodes is not None and name not in agent_nodes:
        made.insert(
            0, Finding(area, "agent", "Fail", "its agent is not ready; what it said last is shown", "see the agent's log")
        )
    elif not found:
        made.insert(0, Finding(area, "agent", "Warn", "has not examined the node yet", "wait a minute, then see its log"))
    elif found.get("status") != "True" and not any(item.level == "Fail" for item in made):
        made.insert(0, Finding(area, "agent", "Fail", str(found.get("message")), "see the agent's log"))
    if not made:
        checks = len(status.get("checks") or [])
        held = len(status.get("artifacts") or [])
        free = (status.get("storeBytesFree") or 0) / 1e9
        quota = status.get("storeBytesQuota")
        used = f", {(status.get('storeBytesUsed') or 0) / 1e9:.0f} of {quota / 1e9:.0f} GB quota" if quota is not None else ""
        made.append(Finding(area, "ready", "Pass", f"{checks} checks passed; {held} artifacts{used}, {free:.0f} GB free"))
    return made


def nodes(reports: Sequence[Object], agent_nodes: frozenset[str] | None) -> list[Finding]:
    """All nodes with an agent, by name."""
    made = []
    known = {item["metadata"]["name"] for item in reports}
    for obj in sorted(reports, key=lambda item: str(item["metadata"]["name"])):
        made += node(obj, agent_nodes)
    for name in sorted((agent_nodes or frozenset()) - known):
        made.append(Finding(f"node {name}", "agent", "Fail", "its agent has written no report", "see the agent's log"))
    return made


def snapshots(found: Sequence[Object]) -> list[Finding]:
    """Those that are in trouble."""
    made = []
    for obj in sorted(found, key=lambda item: (item["metadata"]["namespace"], item["metadata"]["name"])):
        area = f"snapshot {_name(obj)}"
        for kind, level in ((c.DEGRADED, "Fail"), (c.STALE, "Warn")):
            seen = condition(obj, kind)
            if seen.get("status") == "True":
                remedy = f"kubectl vsnap describe {obj['metadata']['name']} -n {obj['metadata']['namespace']}"
                made.append(Finding(area, str(seen.get("reason")), level, str(seen.get("message")), remedy))  # type: ignore[arg-type]
    return made


def rights(component: str, denied: Sequence[Right]) -> Finding:
    """Rights of operator or agent."""
    name = f"rights of the {component}"
    if not denied:
        return Finding("cluster", name, "Pass", "all that were asked for")
    return Finding(
        "cluster", name, "Fail", f"it may not {'; '.join(_say(right) for right in denied)}", "set rbac.create, and helm upgrade"
    )


def own_rights(denied: Sequence[tuple[Right, str]]) -> Finding:
    """Rights of the caller: a limit, no fault."""
    if not denied:
        return Finding("cluster", "your rights", "Pass", "every command")
    text = "; ".join(f"{command} needs to {_say(right)}" for right, command in denied)
    return Finding("cluster", "your rights", "Warn", text, "ask for the roles that docs/cli.md names")


def _say(right: Right) -> str:
    verb, resource, sub = right
    return f"{verb} {resource.plural}{'/' + sub if sub else ''}"


# --- asking ----------------------------------------------------------------------------------------------------------


async def examine(kube: Kube, namespace: str) -> list[Finding]:
    """All checks. Raises ApiError only where the API server itself cannot be asked."""
    made = [version(await kube.request("GET", "/version"))]
    definitions = await _try(kube.list(CRDS))
    made += [_unseen("crds", "list customresourcedefinitions")] if definitions is None else crds(definitions)
    labels = f"{PART},{c.LABEL_COMPONENT}"
    deployments, daemonsets, reports, claims = await asyncio.gather(
        _try(kube.list(DEPLOYMENTS, labels=f"{labels}={c.COMPONENT_OPERATOR}")),
        _try(kube.list(DAEMONSETS, labels=f"{labels}={c.COMPONENT_AGENT}")),
        _try(kube.list(SNAPSHOT_NODES)),
        _try(kube.list(SNAPSHOTS)),
    )
    made.append(_unseen("operator", "list deployments") if deployments is None else operator(deployments))
    made.append(_unseen("agents", "list daemonsets") if daemonsets is None else agents(daemonsets))
    made += images([*(deployments or []), *(daemonsets or [])])
    for component, workloads in ((c.COMPONENT_OPERATOR, deployments), (c.COMPONENT_AGENT, daemonsets)):
        for item in workloads or []:
            denied = await _denied(kube, item, SERVICE_RIGHTS[component])
            name = f"rights of the {component}"
            made.append(_unseen(name, "create subjectaccessreviews") if denied is None else rights(component, denied))
    made.append(own_rights([(right, command) for right, command in OWN_RIGHTS if not await _may(kube, right, namespace)]))
    ready = await _attended(kube, daemonsets or [])
    made += [_unseen("nodes", "list vllmsnapshotnodes")] if reports is None else nodes(reports, ready)
    if claims is None:
        claims = await _try(kube.list(SNAPSHOTS, namespace))
    return made + snapshots(claims or [])


async def _attended(kube: Kube, daemonsets: Sequence[Object]) -> frozenset[str] | None:
    """Nodes with a Ready agent; None where that cannot be seen."""
    found: set[str] = set()
    for item in daemonsets:
        selector = ",".join(f"{k}={v}" for k, v in sorted(item["spec"]["selector"]["matchLabels"].items()))
        pods = await _try(kube.list(PODS, item["metadata"]["namespace"], labels=selector))
        if pods is None:
            return None
        found |= {pod["spec"]["nodeName"] for pod in pods if is_true(pod, "Ready") and pod["spec"].get("nodeName")}
    return frozenset(found) if daemonsets else None


async def _try(doing: Any) -> list[Object] | None:
    """A list; None where it may not be read. A kind that does not exist has no objects."""
    try:
        found: list[Object] = await doing
        return found
    except ApiError as e:
        if e.status == 404:
            return []
        if e.status == 403:
            return None
        raise


def _unseen(name: str, right: str) -> Finding:
    return Finding("cluster", name, "Warn", f"not checked: you may not {right}", "let a cluster administrator run this")


async def _denied(kube: Kube, workload: Object, wanted: Sequence[Right]) -> list[Right] | None:
    account = workload["spec"]["template"]["spec"].get("serviceAccountName", "default")
    user = f"system:serviceaccount:{workload['metadata']['namespace']}:{account}"
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{workload['metadata']['namespace']}", "system:authenticated"]
    denied = []
    for right in wanted:
        spec = {"user": user, "groups": groups, "resourceAttributes": _attributes(right, "default")}
        try:
            if not await _review(kube, REVIEWS, spec):
                denied.append(right)
        except ApiError as e:
            if e.status == 403:
                return None
            raise
    return denied


async def _may(kube: Kube, right: Right, namespace: str) -> bool:
    return await _review(kube, OWN_REVIEWS, {"resourceAttributes": _attributes(right, namespace)})


async def _review(kube: Kube, resource: Resource, spec: Object) -> bool:
    body = {"apiVersion": resource.api_version, "kind": resource.kind, "spec": spec}
    answer = await kube.request("POST", resource.path(), body=body)
    return bool((answer.get("status") or {}).get("allowed"))


def _attributes(right: Right, namespace: str) -> Object:
    verb, resource, sub = right
    where = namespace if resource.namespaced else ""
    return {"namespace": where, "verb": verb, "group": resource.group, "resource": resource.plural, "subresource": sub}


# --- telling ---------------------------------------------------------------------------------------------------------

MARKS: dict[Level, tuple[str, str]] = {"Pass": ("ok", GOOD), "Warn": ("warn", DOUBT), "Fail": ("FAIL", BAD)}


def structured(found: Sequence[Finding]) -> list[Object]:
    """For -o json and yaml."""
    return [asdict(item) for item in found]


def lines(found: Sequence[Finding]) -> list[Text]:
    """By area, each trouble with its remedy, and a sum at the end."""
    made: list[Text] = []
    area = ""
    for item in found:
        if item.area != area:
            made += [*([Text()] if made else []), Text(item.area[:1].upper() + item.area[1:], style=HEAD)]
            area = item.area
        mark, style = MARKS[item.level]
        line = Text("  ")
        line.append(f"{mark:<6}", style=style)
        line.append(plain(f"{item.name}: {item.message}"))
        made.append(line)
        if item.remedy and item.level != "Pass":
            made.append(Text(plain(f"        → {item.remedy}"), style=FAINT))
    bad, doubtful = (sum(item.level == level for item in found) for level in ("Fail", "Warn"))
    made += [Text(), Text(f"{len(found)} checks: {bad} failed, {doubtful} with a warning", style=BAD if bad else GOOD)]
    return made
