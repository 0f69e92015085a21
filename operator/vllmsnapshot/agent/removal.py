"""Artifacts that go: with their content, or because no content stands for them."""

from __future__ import annotations

import logging

from ..api import constants as c
from ..kube import CONTENTS, ApiError, Object
from .node import AGAIN_S, Node

log = logging.getLogger(__name__)


class Removal:
    """Deletes files, ledger entries and finalizers, in this order. What is in use waits."""

    def __init__(self, node: Node) -> None:
        self.node = node

    async def drop(self, name: str) -> None:
        """Delete the files of a content."""
        n = self.node
        await n.thread(n.ops.delete_artifact, name)
        n.stored.pop(name, None)
        n.wrote("artifact deleted")
        await n.measure()

    async def finalize(self, obj: Object) -> float | None:
        """Of a content that is being deleted. Files first, then the finalizer: an object that is gone has no files left.

        Seconds after which to try again. Raises ApiError.
        """
        n, meta = self.node, obj["metadata"]
        finalizers = meta.get("finalizers") or []
        if c.FINALIZER_CONTENT not in finalizers:
            return None
        if n.busy[meta["name"]]:
            return AGAIN_S
        await self.drop(meta["name"])
        await n.thread(n.ledger.forget, meta["name"])
        i = finalizers.index(c.FINALIZER_CONTENT)
        operations: list[Object] = [
            {"op": "test", "path": "/metadata/uid", "value": meta["uid"]},
            {"op": "test", "path": f"/metadata/finalizers/{i}", "value": c.FINALIZER_CONTENT},
            {"op": "remove", "path": f"/metadata/finalizers/{i}"},
        ]
        try:
            await n.kube.patch(CONTENTS, meta["name"], None, operations, c.MANAGER_AGENT)
        except ApiError as e:
            if e.status != 422:
                raise
            # The list of finalizers moved: the watch tells, and we come again.
            return AGAIN_S
        n.wrote("finalizer")
        return None

    async def collect(self) -> None:
        """Delete artifacts and ledger entries that no content object stands for. Raises ApiError.

        The store is read before the API server: an artifact that is there now had its content before.
        """
        n = self.node
        await n.refresh()
        await self._save_ledger()
        await n.thread(n.ops.sweep)
        for name in await n.thread(n.room.relieve):
            n.wake_content(name)
        # Also those whose manifest cannot be read.
        held, remembered = await n.thread(n.ops.held), n.ledger.contents()
        live = {x["metadata"]["name"]: x["metadata"]["uid"] for x in await n.kube.list(CONTENTS)}
        for name in held:
            stored = n.stored.get(name)
            other = stored is not None and stored.content_uid not in ("", live.get(name))
            if (name not in live or other) and not n.busy[name]:
                log.warning("deleting artifact %s: no content stands for it", name)
                await self.drop(name)
        for name in remembered:
            if name not in live and not n.busy[name]:
                await n.thread(n.ledger.forget, name)

    async def _save_ledger(self) -> None:
        try:
            await self.node.thread(self.node.ledger.save)
        except OSError as e:
            log.warning("the ledger cannot be written: %s", e)
