"""Keeps a pod's condition, label and annotation in line with what is seen of it."""

from __future__ import annotations

from vllmsnapshot_child.protocol import HELLO

from ..api import constants as c
from ..api.constants import Reason
from ..kube import PODS, Object
from ..objects import condition
from . import facts, report
from .decide import View
from .node import Node


class PodStatus:
    """The one writer of the agent's fields of pods."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def say(self, v: View) -> None:
        """Bring the pod's condition, label and annotation in line with what is seen, if they are not."""
        obj = self.node.pods.get(v.pod.ref.uid)
        if obj is None or v.pod.deleting:
            return
        before = facts.report_of(obj)
        if HELLO in v.files.problems and before.incarnation:
            # A volume that cannot be read (any more) is no news of the container.
            return
        said = report.say(v, before)
        if said is None:
            return
        key = f"pod/{v.pod.ref.uid}"
        if not (self._condition_differs(obj, said) or self._metadata_differs(obj, said) or self.node.outbox.waits(key)):
            return
        self.node.metrics.will_report(v.pod.ref.uid, before, said.report)

        async def send() -> None:
            current = self.node.pods.get(v.pod.ref.uid)
            # The condition first: it is what readiness waits for.
            if current is not None and self._condition_differs(current, said):
                have = condition(current, c.CONDITION_VERIFIED)
                body = report.pod_condition(v.pod.ref, said.verified, have, self.node.clock())
                self.node.pods.put(await self.node.kube.apply(PODS, body, c.MANAGER_AGENT, subresource="status"))
                self.node.wrote("pod status")
            current = self.node.pods.get(v.pod.ref.uid)
            if current is not None and self._metadata_differs(current, said):
                body = report.pod_metadata(v.pod.ref, said)
                now = await self.node.kube.apply(PODS, body, c.MANAGER_AGENT)
                self.node.pods.put(now)
                self.node.metrics.reported(now)
                self.node.wrote("pod metadata")

        self.node.outbox.post(key, send)

    @staticmethod
    def _condition_differs(obj: Object, said: report.Said) -> bool:
        have = condition(obj, c.CONDITION_VERIFIED)
        if not have:
            # A gate without condition is closed as well: "not yet" need not be written before anything else was.
            return not (said.verified.status == "False" and said.verified.reason == Reason.STARTING)
        return any(have.get(k) != getattr(said.verified, k) for k in ("status", "reason", "message"))

    @staticmethod
    def _metadata_differs(obj: Object, said: report.Said) -> bool:
        meta = obj["metadata"]
        label = (meta.get("labels") or {}).get(c.LABEL_START_MODE)
        text = (meta.get("annotations") or {}).get(c.ANNOTATION_REPORT)
        return label != said.start_mode or text != report.report_json(said.report)
