"""Scheduler, kubelet and node agents as scripts, for an API server without nodes: what the operator's counterparts write.

`World.step` moves everything one step further and says whether anything moved; nothing runs by itself. How captures and
restores end is set by the test (`capture`, `restore`), and any part can be stopped (`schedule`, `kubelet`, agents by node).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from vllmsnapshot.api import constants as c
from vllmsnapshot.api.types import PodReport, PodSettings, Toggle
from vllmsnapshot.kube import CONTENTS, NODES, PODS, SNAPSHOT_NODES, ApiError, Kube, Object, Resource

R = c.Reason
BINDINGS = "binding"


def rfc3339(seconds: float) -> str:
    """API time."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def condition(obj: Object, kind: str) -> str:
    """The status of a condition, or an empty string."""
    found = [item["status"] for item in obj.get("status", {}).get("conditions") or [] if item["type"] == kind]
    return found[0] if found else ""


def report_of(pod: Object) -> PodReport:
    """The agent's report in a pod."""
    return PodReport.model_validate_json(pod["metadata"].get("annotations", {}).get(c.ANNOTATION_REPORT, "{}"))


@dataclass
class World:
    """The cluster around the operator, stepped by the test."""

    kube: Kube
    system: str = "vllmsnapshot-system"
    namespace: str = "default"
    schedule: bool = True
    kubelet: bool = True
    capture: Literal["succeed", "fail", "hang"] = "succeed"
    restore: Literal["succeed", "fail"] = "succeed"
    verify: Literal["intact", "corrupt", "hang"] = "intact"
    environment: dict[str, str] = field(default_factory=lambda: {"kernel": "6.18"})
    patient: bool = False
    """Replicas wait at the barrier for an order that the operator has not written yet (it will)."""
    port_closed: set[str] = field(default_factory=set)
    """Pods (by name) whose engine never serves."""

    # --- nodes and agents --------------------------------------------------------------------------------------------

    async def add_node(self, name: str, *, agent: bool = True) -> None:
        """A Node, and unless told otherwise a Ready agent on it."""
        await self.kube.create(NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}, "test")
        if agent:
            await self.add_agent(name)

    async def add_agent(self, node: str, *, ready: bool = True) -> None:
        """The agent's pod on a node, and its VLLMSnapshotNode."""
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"agent-{node}", "namespace": self.system, "labels": {c.LABEL_COMPONENT: c.COMPONENT_AGENT}},
            "spec": {
                "nodeName": node,
                "terminationGracePeriodSeconds": 0,
                "containers": [{"name": "agent", "image": "agent"}],
                "tolerations": [{"operator": "Exists"}],
            },
        }
        await self.kube.create(PODS, body, "test")
        await self._conditions(self.system, f"agent-{node}", {"Ready": "True" if ready else "False"}, "kubelet")
        await self.describe_node(node)

    async def describe_node(self, node: str) -> None:
        """The agent's report on its node."""
        body: Object = {"metadata": {"name": node}}
        await self.kube.apply(SNAPSHOT_NODES, body, c.MANAGER_AGENT)
        await self.kube.apply(
            SNAPSHOT_NODES, {**body, "status": {"environment": self.environment}}, c.MANAGER_AGENT, subresource="status"
        )

    async def remove_agent(self, node: str) -> None:
        """The agent's pod is gone."""
        await self.kube.delete(PODS, f"agent-{node}", self.system, grace_period_s=0)

    async def agents(self) -> set[str]:
        """Nodes with a Ready agent."""
        found = await self.kube.list(PODS, self.system, labels=f"{c.LABEL_COMPONENT}={c.COMPONENT_AGENT}")
        return {pod["spec"]["nodeName"] for pod in found if condition(pod, "Ready") == "True"}

    # --- one step ----------------------------------------------------------------------------------------------------

    async def pods(self) -> list[Object]:
        """All replicas."""
        return await self.kube.list(PODS, self.namespace, labels=f"{c.LABEL_ROLE}={c.ROLE_REPLICA}")

    async def step(self) -> bool:
        """Every actor does the next thing it has to do; whether anybody did something."""
        moved = False
        agents = await self.agents()
        nodes = sorted(node["metadata"]["name"] for node in await self.kube.list(NODES))
        pods = await self.pods()
        contents = await self.kube.list(CONTENTS)
        for pod in pods:
            if "deletionTimestamp" in pod["metadata"]:
                if self.kubelet:
                    moved |= await self.kube.delete(
                        PODS, pod["metadata"]["name"], self.namespace, uid=pod["metadata"]["uid"], grace_period_s=0
                    )
            elif not pod["spec"].get("nodeName"):
                if self.schedule and nodes:
                    await self._bind(pod, nodes, pods)
                    moved = True
            elif pod.get("status", {}).get("phase") in ("Failed", "Succeeded"):
                continue
            elif pod["spec"]["nodeName"] in agents:
                moved |= await self._attend(pod, contents)
            elif self.kubelet and condition(pod, "ContainersReady") != "True":
                await self._serve(pod)
                moved = True
            elif self.kubelet:
                moved |= await self._gate(pod)
        for item in contents:
            if item["spec"]["nodeName"] in agents:
                moved |= await self._order(item, pods)
        return moved

    async def _bind(self, pod: Object, nodes: list[str], pods: list[Object]) -> None:
        wanted = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
        terms = wanted.get("preferredDuringSchedulingIgnoredDuringExecution") or []
        liked = {term["preference"]["matchFields"][0]["values"][0] for term in terms if "matchFields" in term["preference"]}
        load = {node: sum(other["spec"].get("nodeName") == node for other in pods) for node in nodes}
        node = min(nodes, key=lambda name: (name not in liked, load[name], name))
        meta = pod["metadata"]
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": meta["name"], "namespace": self.namespace, "uid": meta["uid"]},
            "target": {"kind": "Node", "name": node},
        }
        await self.kube.request("POST", PODS.path(self.namespace, meta["name"], BINDINGS), body=body)

    async def _attend(self, pod: Object, contents: list[Object]) -> bool:
        """What the agent of the pod's node does next."""
        report, meta = report_of(pod), pod["metadata"]
        uid = meta["labels"][c.LABEL_SNAPSHOT_UID]
        contents = [item for item in contents if item["spec"]["snapshotRef"]["uid"] == uid]
        fitting = [
            item
            for item in contents
            if condition(item, c.CAPTURED) == "True"
            and condition(item, c.QUARANTINED) != "True"
            and "deletionTimestamp" not in item["metadata"]
            and item["spec"]["identity"] == meta["labels"][c.LABEL_IDENTITY]
            and item["spec"]["nodeName"] == pod["spec"]["nodeName"]
        ]
        settings = PodSettings.model_validate_json(meta["annotations"].get(c.ANNOTATION_SETTINGS, "{}"))
        mine = [item for item in contents if item["spec"]["sourcePod"]["uid"] == meta["uid"]]
        match report.state:
            case "Deciding" if settings.recapture and not any(_answered(item) for item in mine):
                await self._report(pod, start="cold", reason=R.RECAPTURE, message="to be captured", state="Starting")
            case "Deciding" if fitting and self.restore == "succeed":
                name = fitting[0]["metadata"]["name"]
                await self._report(pod, start="restore", reason=R.RESTORED, content=name, state="Restoring")
            case "Deciding":
                reason = R.RESTORE_FAILED if fitting else R.NO_ARTIFACT
                await self._report(pod, start="cold", reason=reason, message="no artifact fits", state="Starting")
            case "Restoring":
                await self._report(pod, report, state="Released", phases={"restore_s": 1.25})
            case "Starting":
                await self._report(pod, report, state="AtBarrier")
            case "AtBarrier":
                orders = [item for item in contents if item["spec"]["sourcePod"]["uid"] == meta["uid"]]
                if any(not _answered(item) and "deletionTimestamp" not in item["metadata"] for item in orders):
                    return False
                if self.patient and not orders and settings.capture == Toggle.ENABLED:
                    return False
                await self._report(pod, report, state="Released")
            case "Released" if meta["name"] not in self.port_closed:
                await self._report(
                    pod,
                    report,
                    state="Serving",
                    serving_at=rfc3339(time.time() + 4),
                    phases={
                        "restore_s": 1.25,
                        "release_to_serving_s": 2.5,
                        "total_s": 4.0 if report.start == "restore" else 40.0,
                    },
                )
            case "Serving" if condition(pod, "ContainersReady") != "True" and self.kubelet:
                await self._serve(pod)
            case "Serving" if condition(pod, c.CONDITION_VERIFIED) != "True":
                await self._conditions(self.namespace, meta["name"], {c.CONDITION_VERIFIED: "True"}, c.MANAGER_AGENT, R.VERIFIED)
            case _:
                return await self._gate(pod) if self.kubelet else False
        return True

    async def _order(self, item: Object, pods: list[Object]) -> bool:
        """What the agent of the content's node does next."""
        name = item["metadata"]["name"]
        if "deletionTimestamp" in item["metadata"]:
            if not item["metadata"].get("finalizers"):
                return False
            await self.kube.patch(CONTENTS, name, None, [{"op": "replace", "path": "/metadata/finalizers", "value": []}], "agent")
            return True
        if _answered(item):
            return await self._verify(item)
        source = next((pod for pod in pods if pod["metadata"]["uid"] == item["spec"]["sourcePod"]["uid"]), None)
        if source is None or "deletionTimestamp" in source["metadata"]:
            await self.answer(item, c.FAILED, R.SOURCE_GONE)
            return True
        if report_of(source).state in ("Released", "Serving"):
            await self.answer(item, c.FAILED, R.SOURCE_RELEASED)
            return True
        if report_of(source).state != "AtBarrier" or self.capture == "hang":
            return False
        await self.answer(item, *((c.CAPTURED, R.CAPTURED) if self.capture == "succeed" else (c.FAILED, R.DUMP_FAILED)))
        return True

    async def _verify(self, item: Object) -> bool:
        """The verification that a user asks for."""
        request = item["metadata"].get("annotations", {}).get(c.ANNOTATION_VERIFY)
        status = item.get("status", {})
        if not request or self.verify == "hang" or status.get("verification", {}).get("request") == request:
            return False
        now = rfc3339(time.time())
        corrupt = self.verify == "corrupt"
        found = {"request": request, "outcome": "Corrupt" if corrupt else "Intact", "files": 3, "bytes": 1 << 30}
        found |= {"took": "1.00s", "finishedAt": now, "message": "pages-1.img has changed" if corrupt else ""}
        conditions = list(status["conditions"])
        if corrupt:
            conditions.append(
                {
                    "type": c.QUARANTINED,
                    "status": "True",
                    "reason": R.ARTIFACT_CORRUPT,
                    "message": "pages-1.img has changed",
                    "lastTransitionTime": now,
                }
            )
        body = {"metadata": {"name": item["metadata"]["name"], "uid": item["metadata"]["uid"]}}
        new = {**status, "verification": found, "conditions": conditions}
        await self.kube.apply(CONTENTS, {**body, "status": new}, c.MANAGER_AGENT, subresource="status")
        return True

    async def answer(self, item: Object, kind: str, reason: str, message: str = "scripted") -> None:
        """Set the outcome of a content."""
        now = rfc3339(time.time())
        status: Object = {
            "conditions": [{"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now}],
            "environment": dict(self.environment),
        }
        if kind == c.CAPTURED:
            status["artifact"] = {"bytes": 1 << 30, "digest": "sha256:00", "capturedAt": now}
            status["phases"] = {"total": "2.40s", "freeze": "1.60s"}
        if kind == c.QUARANTINED:
            captured = [condition for condition in item["status"]["conditions"] if condition["type"] == c.CAPTURED]
            status = {**item["status"], "conditions": captured + status["conditions"]}
        body = {"metadata": {"name": item["metadata"]["name"], "uid": item["metadata"]["uid"]}, "status": status}
        await self.kube.apply(CONTENTS, body, c.MANAGER_AGENT, subresource="status")

    # --- writes ------------------------------------------------------------------------------------------------------

    async def _report(self, pod: Object, base: PodReport | None = None, **changes: Any) -> None:
        report = (base or PodReport(incarnation="scripted")).model_copy(update=changes)
        meta: Object = {
            "name": pod["metadata"]["name"],
            "namespace": self.namespace,
            "uid": pod["metadata"]["uid"],
            "annotations": {c.ANNOTATION_REPORT: report.model_dump_json(by_alias=True)},
        }
        if report.start:
            meta["labels"] = {c.LABEL_START_MODE: report.start}
        await self.kube.apply(PODS, {"metadata": meta}, c.MANAGER_AGENT)

    async def _serve(self, pod: Object) -> None:
        """The HTTP probes pass."""
        if pod["metadata"]["name"] not in self.port_closed:
            await self._conditions(self.namespace, pod["metadata"]["name"], {"ContainersReady": "True"}, "kubelet")

    async def _gate(self, pod: Object) -> bool:
        """The kubelet derives Ready from the probes and the readiness gates."""
        ready = condition(pod, "ContainersReady") == "True" and condition(pod, c.CONDITION_VERIFIED) == "True"
        if ready == (condition(pod, "Ready") == "True"):
            return False
        both = {"ContainersReady": condition(pod, "ContainersReady") or "False", "Ready": "True" if ready else "False"}
        await self._conditions(self.namespace, pod["metadata"]["name"], both, "kubelet")
        return True

    async def finish(self, name: str, reason: str = "Evicted") -> None:
        """The kubelet ends a pod."""
        body = {"metadata": {"name": name, "namespace": self.namespace}, "status": {"phase": "Failed", "reason": reason}}
        await self.kube.apply(PODS, body, "kubelet-phase", subresource="status")

    async def _conditions(
        self, namespace: str, name: str, values: dict[str, str], manager: str, reason: str = "Scripted"
    ) -> None:
        now = rfc3339(time.time())
        conditions = [
            {"type": kind, "status": status, "reason": reason, "message": "", "lastTransitionTime": now}
            for kind, status in values.items()
        ]
        body = {"metadata": {"name": name, "namespace": namespace}, "status": {"conditions": conditions}}
        await self.kube.apply(PODS, body, manager, subresource="status")


def _answered(item: Object) -> bool:
    return "True" in (condition(item, c.CAPTURED), condition(item, c.FAILED))


class Stopped(BaseException):
    """The operator process ends here. Not an Exception: no handler may survive it."""


class CountingKube(Kube):
    """A client that counts writes and can be made to stop at one of them, as a killed process would.

    `stop_at` n: the process ends before the n-th write (from 1 on), which is after the one before it was committed.
    `lose_at` n: the n-th write is committed, but its answer is lost, and the process lives.
    """

    stop_at: int | None = None
    lose_at: int | None = None
    writes: list[str]

    @classmethod
    def of(cls, kube: Kube) -> CountingKube:
        """Count the writes of this client from now on; the connection is shared."""
        counting = cls(kube._client)
        counting.writes = []
        return counting

    async def request(self, method: str, path: str, **kwargs: Any) -> Object:
        """See the class."""
        if method == "GET":
            return await super().request(method, path, **kwargs)
        self.writes.append(f"{method} {path}")
        if self.stop_at is not None and len(self.writes) >= self.stop_at:
            raise Stopped
        answer = await super().request(method, path, **kwargs)
        if len(self.writes) == self.lose_at:
            raise ApiError(0, "TransportError", "scripted: the answer was lost")
        return answer


async def delete_all(kube: Kube, resource: Resource, namespace: str | None = None) -> None:
    """Delete every object of a kind, finalizers and all."""
    for item in await kube.list(resource, namespace):
        meta = item["metadata"]
        try:
            if meta.get("finalizers"):
                drop = [{"op": "replace", "path": "/metadata/finalizers", "value": []}]
                await kube.patch(resource, meta["name"], meta.get("namespace"), drop, "test")
            await kube.delete(resource, meta["name"], meta.get("namespace"), grace_period_s=0)
        except ApiError as e:
            if e.status != 404:
                raise
