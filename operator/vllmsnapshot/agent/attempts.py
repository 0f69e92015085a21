"""One restore into a pod: announced in the ledger, done, and how it ended noted there and told."""

from __future__ import annotations

import logging
from collections.abc import Callable

from vllmsnapshot_child.protocol import START, Restored

from ..api.constants import Reason
from . import decide, facts
from .decide import Candidate, View
from .errors import StoreError, disk_reason
from .ledger import QUARANTINE_AT_ONCE
from .node import AGAIN_S, Node
from .nodeops import Revived, explain
from .slots import Slots

log = logging.getLogger(__name__)


class Attempts:
    """The restores of this node; `slots` says how many may run."""

    def __init__(self, node: Node, slots: Slots) -> None:
        self.node = node
        self.slots = slots

    async def restore(self, v: View, step: decide.Restore) -> float | None:
        """Bring the content up in the pod, or note why not. Seconds after which to look again where there is no slot."""
        n, ref, word = self.node, v.pod.ref, v.files.incarnation
        content = v.candidate(step.content)
        assert content is not None
        if not self.slots.take(ref.uid, v.pod.settings.max_concurrent_per_node):
            return AGAIN_S
        try:
            with n.using(step.content):
                try:
                    await n.thread(self._announce, content, v)
                    revived = await n.thread(n.ops.restore, ref, step.content, step.timeout_s, self._wanted(v))
                except Exception as e:  # whatever the node did: the replica starts cold
                    await self._failed(v, content, e)
                    return None
            message = Restored(incarnation=word, pid=revived.pid, content=step.content)
            await n.thread(n.volumes.write_restored, ref.uid, message, revived.phases, content.oracle)
            await n.best_effort(n.thread(self._moved, revived), "note the throughput of the restore")
            return None
        finally:
            self.slots.leave(ref.uid)

    async def settle(self, v: View, step: decide.Settle) -> None:
        """Note how a restore ended, and tell it if that is news."""
        n = self.node
        if await n.thread(self._note, v, step, self._budget(step.content)):
            note = f"{step.content}: {step.reason}: {step.message}"
            if step.outcome == "succeeded":
                seconds = v.now - v.files.at.get(START, v.now)
                note = f"Serves, restored from {step.content}, {seconds:.1f} s after the decision"
                n.tell(v.pod, Reason.RESTORED, "Restore", note, step.incarnation)
            elif step.outcome == "failed":
                n.tell(v.pod, Reason.RESTORE_FAILED, "Restore", note, step.incarnation, warning=True)
        n.wake_content(step.content)

    # --- small parts ---

    def _announce(self, content: Candidate, v: View) -> None:
        """Before anything is done in the container, or an agent after us would not know what it finds there."""
        try:
            self.node.ledger.begin(content.name, content.uid, v.pod.ref.uid, v.files.incarnation, self.node.clock())
        except OSError as e:
            raise StoreError(disk_reason(e), f"the ledger cannot be written: {e}") from e

    def _wanted(self, v: View) -> Callable[[], None]:
        """Raises if init may have started another engine in the meantime."""
        n, start = self.node, v.files.start
        assert start is not None
        deadline = n.steady() + start.timeout_s - 0.5 - v.age(START)

        def check() -> None:
            if n.steady() >= deadline:
                raise TimeoutError("init no longer waits for the tree")
            n.volumes.insist(v.pod.ref.uid, v.files.incarnation)

        return check

    def _moved(self, revived: Revived) -> None:
        # Without the digests, which are compared once per boot.
        seconds = revived.phases.get("restore", 0.0) - revived.phases.get("verify", 0.0)
        self.node.ledger.moved(revived.bytes, seconds)

    async def _failed(self, v: View, content: Candidate, error: Exception) -> None:
        n = self.node
        default = Reason.RESTORE_TIMEOUT if isinstance(error, TimeoutError) else Reason.RESTORE_FAILED
        reason, message = explain(error, default)
        pod = n.pods.get(v.pod.ref.uid)
        if (pod is None or "deletionTimestamp" in pod["metadata"]) and reason not in QUARANTINE_AT_ONCE:
            # Its PID 1 was told to end, and took CRIU along.
            reason, message = Reason.SOURCE_GONE, f"the pod was deleted during the restore: {message}"
        log.warning("%s/%s: restore from %s: %s", v.pod.ref.namespace, v.pod.ref.name, content.name, message, exc_info=error)
        await self.settle(
            v,
            decide.Settle(
                content=content.name, incarnation=v.files.incarnation, outcome="failed", reason=reason, message=message
            ),
        )
        if reason in (Reason.ARTIFACT_MISSING, Reason.ARTIFACT_CORRUPT):
            await n.best_effort(n.refresh(), "look into the store")

    def _note(self, v: View, step: decide.Settle, budget: int) -> bool:
        """Whether it is news. A disk that is full must not keep the replica from starting cold."""
        with self.node.remembering(step.content):
            return self.node.ledger.settle(
                step.content,
                v.pod.ref.uid,
                step.incarnation,
                step.outcome,
                step.reason,
                step.message,
                budget=budget,
                seconds=step.seconds,
            )
        return True

    def _budget(self, content: str) -> int:
        obj = self.node.contents.get(content)
        spec = facts.content_spec(obj) if obj is not None else None
        return spec.failure_budget if spec is not None else 3
