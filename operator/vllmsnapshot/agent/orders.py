"""An order to capture a pod at its barrier: carried out, or noted as failed. The status that answers it is written by `contents.py`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from vllmsnapshot_child.protocol import Hold, Ready

from ..api.constants import Reason
from ..api.types import VLLMSnapshotContentSpec
from . import breakeven, decide, facts
from .decide import View
from .node import Node
from .nodeops import Order, explain

log = logging.getLogger(__name__)

HOLD_MARGIN_S = 30.0
"""Init releases by itself this long after the capture's own limit."""


class Orders:
    """The captures of this node; `report` brings what is said of a pod up to date."""

    def __init__(self, node: Node, report: Callable[[str], None]) -> None:
        self.node = node
        self._report = report

    async def capture(self, v: View, step: decide.Capture) -> None:
        """Make the artifact, or note why there is none."""
        n, ref = self.node, v.pod.ref
        obj = n.contents.get(step.content)
        spec = facts.content_spec(obj) if obj is not None else None
        ready = v.files.ready
        if obj is None or spec is None or ready is None:
            return
        uid = obj["metadata"]["uid"]
        hold = Hold(incarnation=v.files.incarnation, timeout_s=spec.timeout_seconds + HOLD_MARGIN_S)
        await n.thread(n.volumes.write, ref.uid, hold)
        n.tell(v.pod, Reason.CAPTURE_STARTED, "Capture", f"Captures {step.content}", step.content)
        self._report(ref.uid)
        order = _order(v, step.content, uid, spec, ready)
        marker = decide.marker(v, moved=True, gpu_fine=n.health.gpu == "")
        loop = asyncio.get_running_loop()

        def resumed() -> None:
            # In the thread of the capture: the replica serves while its artifact is still being written to the disk.
            n.volumes.write(ref.uid, marker, exclusive=True)
            loop.call_soon_threadsafe(self._report, ref.uid)

        def room(size: int) -> None:
            for name in n.room.take(step.content, size):
                loop.call_soon_threadsafe(n.wake_content, name)

        with n.using(step.content):
            try:
                stored = await n.thread(n.ops.capture, ref, order, room, resumed)
            except Exception as e:
                reason, message = explain(e, Reason.DUMP_FAILED)
                log.warning("%s/%s: capture %s: %s: %s", ref.namespace, ref.name, step.content, reason, message, exc_info=e)
                await self._note_failed(step.content, uid, reason, message)
            else:
                n.stored[step.content] = stored
            finally:
                n.room.give_back(step.content)
        n.wake_content(step.content)
        await n.best_effort(n.measure(), "measure the store")

    async def fail(self, v: View, step: decide.FailOrder) -> None:
        """Note that it cannot be carried out."""
        content = v.candidate(step.content)
        assert content is not None
        await self._note_failed(step.content, content.uid, step.reason, step.message)
        self.node.wake_content(step.content)

    async def _note_failed(self, content: str, uid: str, reason: str, message: str) -> None:
        with self.node.remembering(content):
            await self.node.thread(self.node.ledger.capture_failed, content, uid, reason, message)


def _order(v: View, content: str, uid: str, spec: VLLMSnapshotContentSpec, ready: Ready) -> Order:
    """What the API orders, with what the server says at the barrier."""
    return Order(
        content=content,
        content_uid=uid,
        identity=spec.identity,
        snapshot_uid=spec.snapshot_ref.uid,
        timeout_s=float(spec.timeout_seconds),
        oracle=ready.oracle,
        max_bytes=spec.max_artifact_bytes,
        host_network=v.pod.host_network,
        foreign=ready.protocol is None,
        weights=ready.weights,
        weights_reason=ready.weights_reason[:1000],
        cold_s=breakeven.cold_s(v.files),
    )
