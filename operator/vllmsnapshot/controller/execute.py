"""Carries out a plan. Every action is idempotent: names are functions of their purpose, deletions name a UID, and what exists
already was created by an earlier run of the same plan. So a pass may be cut off anywhere and made again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..api import constants as c
from ..api.types import Toggle, VLLMSnapshotSpec
from ..kube import CONTENTS, PODS, SERVICES, SNAPSHOTS, ApiError, Kube, Object
from ..objects import rfc3339
from ..world import Claim, Content, controlled_by
from . import plan as p
from . import pods, ports
from .status import Problem

log = logging.getLogger(__name__)

PODS_OF_ALL = pods.selector_text({c.LABEL_MANAGED_BY: c.MANAGED_BY, c.LABEL_ROLE: c.ROLE_REPLICA})


@dataclass
class Outcome:
    """What came of a plan. `error`: the pass was cut off by this transient failure; the rest was not tried."""

    problems: list[Problem] = field(default_factory=list)
    error: ApiError | None = None


class Executor:
    """Executes plans through one API client. `clock` gives seconds since the epoch."""

    def __init__(self, kube: Kube, clock: Callable[[], float] = time.time) -> None:
        self._kube = kube
        self._clock = clock
        # Held over list, choice and creation: two snapshots that scale at once must not choose the same port.
        self._port_lock = asyncio.Lock()
        self._last_port: int | None = None

    async def run(self, claim: Claim, actions: tuple[p.Action, ...]) -> Outcome:
        """Execute in order. What the server refuses is reported and does not keep the rest from happening."""
        outcome = Outcome()
        unguarded = False
        for action in actions:
            if unguarded and isinstance(action, p.CreateContent):
                continue  # without the finalizer nobody would remove it
            try:
                problem = await self._one(claim, action, outcome)
            except ApiError as e:
                log.warning("%s/%s: %s: %s", claim.namespace, claim.name, type(action).__name__, e)
                problem = _refusal(action, e)
                if problem is None:
                    outcome.error = e
                    return outcome
                unguarded |= isinstance(action, p.AddFinalizer)
            if problem is not None and problem not in outcome.problems:
                outcome.problems.append(problem)
        return outcome

    async def _one(self, claim: Claim, action: p.Action, outcome: Outcome) -> Problem | None:
        kube, where = self._kube, claim.namespace
        match action:
            case p.AddFinalizer():
                await self._finalizers(claim, [c.FINALIZER_SNAPSHOT])
            case p.RemoveFinalizer():
                await self._finalizers(claim, [])
            case p.CreatePod():
                # One refusal is the answer for all pods of this pass: they are alike.
                if any(problem.reason in (c.Reason.POD_REJECTED, c.Reason.NO_PORT_LEFT) for problem in outcome.problems):
                    return None
                return await self._create_pod(claim, _spec(claim), action)
            case p.DeletePod():
                _say(claim, "delete pod %s: %s", action.pod.name, action.why)
                await kube.delete(PODS, action.pod.name, where, uid=action.pod.uid)
            case p.VerifyUnattended():
                await self._verify(claim, action)
            case p.CreateContent():
                body = pods.content(claim, _spec(claim), action.source, action.node, action.recapture, action.attempt)
                _say(claim, "order capture %s of pod %s on node %s", body["metadata"]["name"], action.source.name, action.node)
                return await self._post_content(claim, body)
            case p.DeleteContent():
                _say(claim, "delete content %s: %s", action.content.name, action.why)
                await kube.delete(CONTENTS, action.content.name, uid=action.content.uid)
            case p.RestoreLabels():
                await self._label(claim, action.content.name, action.content.uid, action.content.identity, action.content.node)
            case p.CreateService():
                # Created, not applied: an apply would take over what somebody else has just made. If so, the next pass sees it.
                await kube.create(SERVICES, pods.service(claim, _spec(claim)), c.MANAGER_OPERATOR)
            case p.UpdateService():
                await self._update_service(claim, action.uid)
            case p.DeleteService():
                await kube.delete(SERVICES, claim.name, where, uid=action.uid)
        return None

    async def _finalizers(self, claim: Claim, finalizers: list[str]) -> None:
        """Our finalizers and no others: server-side apply merges them into the list. The UID keeps a successor out of it."""
        meta = {"namespace": claim.namespace, "name": claim.name, "uid": claim.uid, "finalizers": finalizers}
        try:
            await self._kube.apply(SNAPSHOTS, {"metadata": meta}, c.MANAGER_OPERATOR)
        except ApiError as e:
            # Removing from what is gone: the server takes the apply for a creation and refuses it for its UID.
            if finalizers or not (e.conflict or e.status == 404):
                raise

    async def _create_pod(self, claim: Claim, spec: VLLMSnapshotSpec, action: p.CreatePod) -> Problem | None:
        if spec.serving.host_network == Toggle.DISABLED or spec.serving.port_range is None:
            return await self._post_pod(claim, _pod(claim, spec, action, spec.serving.port))
        async with self._port_lock:
            span = spec.serving.port_range
            port = ports.assign(span, ports.in_use(await self._kube.list(PODS, labels=PODS_OF_ALL)), self._last_port)
            if port is None:
                text = f"all ports of serving.portRange {span.start}-{span.end} are in use by replicas of this cluster; widen it"
                return Problem(c.Reason.NO_PORT_LEFT, text)
            self._last_port = port
            return await self._post_pod(claim, _pod(claim, spec, action, port))

    async def _post_pod(self, claim: Claim, body: dict[str, Any]) -> Problem | None:
        name = body["metadata"]["name"]
        _say(claim, "create pod %s", name)
        if await self._kube.create(PODS, body, c.MANAGER_OPERATOR) is not None:
            return None
        there = await self._kube.get(PODS, name, claim.namespace)
        if there is None:
            return None  # just gone: the next pass sees it
        if not controlled_by(there, claim.uid):
            return Problem(c.Reason.NAME_CONFLICT, f"pod {name} exists and belongs to somebody else")
        labels = there["metadata"].get("labels") or {}
        if pods.selector(claim.name).items() <= labels.items():
            return None  # decided twice from the same observation: the next pass sees it
        text = f"pod {name} is a replica whose labels were changed, so it is not counted; restore them or delete the pod"
        return Problem(c.Reason.NAME_CONFLICT, text)

    async def _post_content(self, claim: Claim, body: Object) -> Problem | None:
        if await self._kube.create(CONTENTS, body, c.MANAGER_OPERATOR) is not None:
            return None
        name = body["metadata"]["name"]
        for there in await self._kube.list(CONTENTS, fields=f"metadata.name={name}"):
            if (there.get("spec") or {}).get("snapshotRef", {}).get("uid") != claim.uid:
                return Problem(c.Reason.NAME_CONFLICT, f"content {name} exists and belongs to somebody else; delete it")
            labels = there["metadata"].get("labels") or {}
            if not body["metadata"]["labels"].items() <= labels.items():
                spec = body["spec"]
                await self._label(claim, name, there["metadata"]["uid"], spec["identity"], spec["nodeName"])
        return None

    async def _label(self, claim: Claim, name: str, uid: str, identity: str, node: str) -> None:
        """Give a content its labels back: by them the operator and the agent find it. What it is is in its spec, which stays."""
        _say(claim, "the labels of content %s were changed: restoring them", name)
        meta = {"name": name, "uid": uid, "labels": pods.content_labels(claim, identity, node)}
        try:
            await self._kube.apply(CONTENTS, {"metadata": meta}, c.MANAGER_OPERATOR)
        except ApiError as e:
            if not (e.conflict or e.status == 404):  # gone meanwhile
                raise

    async def _update_service(self, claim: Claim, uid: str) -> None:
        """Replace what we set. Not by apply: it would keep the old port, which the creation owns, beside the new one."""
        wanted = pods.service(claim, _spec(claim))
        operations = [
            {"op": "test", "path": "/metadata/uid", "value": uid},
            {"op": "add", "path": "/spec/ports", "value": wanted["spec"]["ports"]},
            {"op": "add", "path": "/spec/selector", "value": wanted["spec"]["selector"]},
        ]
        await self._kube.patch(SERVICES, claim.name, claim.namespace, operations, c.MANAGER_OPERATOR)

    async def _verify(self, claim: Claim, action: p.VerifyUnattended) -> None:
        _say(claim, "pod %s serves without an agent on node %s: verified by its own child", action.pod.name, action.pod.node)
        condition = {
            "type": c.CONDITION_VERIFIED,
            "status": "True",
            "reason": c.Reason.UNATTENDED,
            "message": f"no agent is ready on node {action.pod.node}; the engine's own canary and the HTTP probe passed",
            "lastTransitionTime": rfc3339(self._clock()),
        }
        body = {
            "metadata": {"namespace": claim.namespace, "name": action.pod.name, "uid": action.pod.uid},
            "status": {"conditions": [condition]},
        }
        try:
            await self._kube.apply(PODS, body, c.MANAGER_OPERATOR_UNATTENDED, subresource="status")
        except ApiError as e:
            if not (e.conflict or e.status == 404):
                raise

    async def bury(self, content: Content) -> None:
        """Remove a content whose node is gone, finalizer first asked, then dropped: nobody is left who would drop it."""
        log.info("content %s: node %s does not exist any more", content.name, content.node)
        if not content.deleting and not await self._kube.delete(CONTENTS, content.name, uid=content.uid):
            return
        operations: list[Object] = [
            {"op": "test", "path": "/metadata/uid", "value": content.uid},
            {"op": "replace", "path": "/metadata/finalizers", "value": []},
        ]
        try:
            await self._kube.patch(CONTENTS, content.name, None, operations, c.MANAGER_OPERATOR)
        except ApiError as e:
            if e.status != 422:  # no finalizers, or a successor: nothing to do
                raise


def _pod(claim: Claim, spec: VLLMSnapshotSpec, action: p.CreatePod, port: int) -> Object:
    return pods.pod(claim, spec, action.slot, port, action.prefer, recapture=action.recapture, only=action.nodes)


def _spec(claim: Claim) -> VLLMSnapshotSpec:
    assert claim.spec is not None, "plans create nothing without a spec"
    return claim.spec


def _refusal(action: p.Action, e: ApiError) -> Problem | None:
    """The finding, where the server refused what it was asked for (quota, admission, validation, rights).

    A user can remedy it; repeating at once does not help. A webhook that cannot be reached comes as 500; for whoever waits
    for the pod it is a refusal all the same. Everything else is an error, and is retried.
    """
    if not (e.refused or (e.status == 500 and "webhook" in e.message)):
        return None
    text = e.message or str(e)
    match action:
        case p.CreatePod():
            return Problem(c.Reason.POD_REJECTED, text)
        case p.CreateContent():
            return Problem(c.Reason.CAPTURE_FAILED, f"the capture of pod {action.source.name} was refused: {text}")
        case p.CreateService() | p.UpdateService():
            return Problem(c.Reason.SERVICE_REJECTED, text)
        case p.DeletePod():
            return Problem(c.Reason.DELETION_REFUSED, f"pod {action.pod.name} ({action.why}) cannot be deleted: {text}")
        case p.DeleteContent():
            return Problem(c.Reason.DELETION_REFUSED, f"content {action.content.name} ({action.why}) cannot be deleted: {text}")
        case p.DeleteService():
            return Problem(c.Reason.DELETION_REFUSED, f"the Service cannot be deleted: {text}")
        case p.AddFinalizer() | p.RemoveFinalizer():
            return Problem(c.Reason.WRITE_REFUSED, f"the finalizer of the VLLMSnapshot cannot be changed: {text}")
        case p.RestoreLabels():
            return Problem(c.Reason.WRITE_REFUSED, f"the labels of content {action.content.name} cannot be restored: {text}")
        case p.VerifyUnattended():
            return Problem(c.Reason.WRITE_REFUSED, f"the readiness gate of pod {action.pod.name} cannot be set: {text}")


def _say(claim: Claim, text: str, *args: object) -> None:
    log.info("%s/%s: " + text, claim.namespace, claim.name, *args)
