"""Keeps the status of this node's contents in line with store and ledger, and says so in events."""

from __future__ import annotations

from ..api import constants as c
from ..api.constants import Reason
from ..api.types import Verification, VerificationOutcome, VLLMSnapshotContentStatus
from ..kube import CONTENTS, PODS, Object
from ..objects import condition, is_true
from . import facts, report
from .node import Node
from .nodeops import Digested
from .removal import Removal
from .verify import Checks


class Contents:
    """One content after another. `settle` of one content must not run twice at the same time."""

    def __init__(self, node: Node, removal: Removal) -> None:
        self.node = node
        self._removal = removal
        self.checks = Checks(self._digest, lambda name: self.node.wake_content(name), node.clock)

    async def settle(self, name: str) -> float | None:
        """One content. Seconds after which to look again, None: only when something changes. Raises ApiError."""
        n = self.node
        obj = n.contents.get(name)
        spec = facts.content_spec(obj) if obj is not None else None
        if obj is None or spec is None or spec.node_name != n.name:
            return None
        if "deletionTimestamp" in obj["metadata"]:
            return await self._removal.finalize(obj)
        uid = obj["metadata"]["uid"]
        old = facts.content_status(obj)
        counts = old.restores
        if counts is not None and not n.ledger.known(name, uid):
            await n.thread(
                n.ledger.adopt,
                name,
                uid,
                succeeded=counts.succeeded,
                failed=counts.failed,
                consecutive=counts.consecutive_failures,
                last_failure=counts.last_failure or "",
            )
        settled = is_true(obj, c.CAPTURED) or is_true(obj, c.FAILED)
        verification = await self._verification(obj, old) if settled else None
        entry = n.ledger.entry(name, uid)
        stored = n.stored.get(name)
        if stored is not None and stored.content_uid not in ("", uid):
            stored = None
        if stored is not None and is_true(obj, c.CAPTURED) and not facts.recorded(obj, stored):
            message = f"the manifest is not the recorded one: its digest is {stored.digest}"
            await n.quarantine(name, uid, Reason.ARTIFACT_CORRUPT, message)
            entry = n.ledger.entry(name, uid)
        failed: tuple[str, str] | None = None
        delay: float | None = None
        if entry.capture_failed is not None:
            failed = (entry.capture_failed.reason, entry.capture_failed.message)
        elif not settled and facts.strange(spec):
            failed = (Reason.PROTOCOL_VERSION, facts.strange(spec))
        elif not settled and stored is None:
            failed, delay = await self._source_gone(spec.snapshot_ref.namespace, spec.source_pod.name, spec.source_pod.uid)
        lost = False
        if is_true(obj, c.CAPTURED) and stored is None:
            lost = await n.thread(n.ops.artifact, name) is None
        if stored is not None and (failed is not None or is_true(obj, c.FAILED)) and not is_true(obj, c.CAPTURED):
            # Failed is what everybody was told: files that turned up nevertheless are nobody's.
            await self._removal.drop(name)
            stored = None
        new = report.content_status(old, stored, entry, failed=failed, lost=lost, now=n.clock(), verification=verification)
        if new != old or n.outbox.waits(f"content/{name}"):
            self._write(obj, new)
        return delay

    async def _verification(self, obj: Object, old: VLLMSnapshotContentStatus) -> Verification | None:
        """The outcome of the verification that is asked for, once it is there; the ledger knows first of what it means."""
        name, uid = obj["metadata"]["name"], obj["metadata"]["uid"]
        request = str((obj["metadata"].get("annotations") or {}).get(c.ANNOTATION_VERIFY) or "")[:128]
        if not request or (old.verification is not None and old.verification.request == request):
            self.checks.forget(name)
            return None
        found = self.checks.answer(name, uid, request)
        if found is not None and found.outcome == VerificationOutcome.CORRUPT:
            await self.node.quarantine(name, uid, Reason.ARTIFACT_CORRUPT, found.message)
        return found

    async def _digest(self, name: str) -> Digested:
        with self.node.using(name):
            return await self.node.thread(self.node.ops.verify, name)

    def _write(self, obj: Object, status: VLLMSnapshotContentStatus) -> None:
        n, name, uid = self.node, obj["metadata"]["name"], obj["metadata"]["uid"]
        body = {"metadata": {"name": name, "uid": uid}, "status": status.dump()}
        n.metrics.will_answer(name, obj, status)

        async def send() -> None:
            current = n.contents.get(name)
            if current is None or facts.content_status(current) == status:
                return
            now = await n.kube.apply(CONTENTS, body, c.MANAGER_AGENT, subresource="status")
            news = n.contents.put(now)
            n.metrics.answered(now)
            n.wrote("content status")
            self._tell(now)
            if news:  # else the server dropped what is new to it (an older CRD), and would do so again
                n.wake_content(name)
            n.wake_node()

        n.outbox.post(f"content/{name}", send)

    def _tell(self, obj: Object) -> None:
        spec = facts.content_spec(obj)
        evicted = condition(obj, c.QUARANTINED)
        if spec is not None and evicted.get("reason") == Reason.EVICTED:
            note = f"{obj['metadata']['name']} on node {self.node.name}: {evicted.get('message')}"
            self.node.tell(spec.snapshot_ref, Reason.EVICTED, "Evict", note, obj["metadata"]["uid"])
            return
        pod = self.node.pods.get(spec.source_pod.uid) if spec is not None else None
        if spec is None or pod is None:
            return
        name, pod_facts = obj["metadata"]["name"], facts.pod_facts(pod)
        captured, failed = condition(obj, c.CAPTURED), condition(obj, c.FAILED)
        if captured.get("status") == "True":
            self.node.tell(pod_facts, Reason.CAPTURED, "Capture", f"Captured {name}, {captured.get('message')}", name)
        elif failed.get("status") == "True":
            note = f"{name}: {failed.get('reason')}: {failed.get('message')}"
            self.node.tell(pod_facts, Reason.CAPTURE_FAILED, "Capture", note, name, warning=True)

    async def _source_gone(self, namespace: str, name: str, uid: str) -> tuple[tuple[str, str] | None, float | None]:
        """Why the source of an open order can never be captured, if so. Only a live answer of the API server counts."""
        n = self.node
        if n.pods.get(uid) is not None:
            return None, None
        pod = await n.kube.get(PODS, name, namespace)
        if pod is None or pod["metadata"]["uid"] != uid:
            return (Reason.SOURCE_GONE, f"pod {namespace}/{name} is gone"), None
        if not facts.ours(pod, n.name):
            return (Reason.SOURCE_GONE, f"pod {namespace}/{name} is no replica on this node"), None
        n.pods.put(pod)
        n.wake_pod(uid)
        return None, None
