"""Making room in the store: asks `eviction.py` what is missed least, and removes it.

Runs in the thread of the capture that needs the room: everything here may be called from any thread. The agent owns its disk and
the operator the contents, so an eviction is said in the status of the content (condition Quarantined, reason Evicted, by way of the
ledger as every quarantine), and the operator deletes the content. The ledger is written before the files go: an agent that ends in
between leaves an artifact that nobody uses any more, and that goes with its content.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from .. import eviction
from ..api import constants as c
from ..api.constants import Reason
from ..eviction import Artifact, Standing
from ..objects import is_true, timestamp
from .errors import StoreError
from .space import Usage

if TYPE_CHECKING:
    from .node import Node

log = logging.getLogger(__name__)


class Room:
    """The room that is left on a node, and what is promised of it to captures under way."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._promised: dict[str, int] = {}

    def take(self, content: str, size: int) -> list[str]:
        """Promise room for so much (bytes) to the capture of a content, in place of what it had; returns what was evicted for it.

        Raises StoreError if everything that may go would not be enough. Then nothing was evicted, and nothing is promised.
        """
        with self._lock:
            usage, promised = self._node.ops.usage(), {**self._promised, content: size}
            total = sum(promised.values())
            victims = self._evictable(usage)
            freed = sum(item.bytes for item, _ in victims)
            if usage.room(total) + freed < 0:
                raise usage.refusal(size, freed)
            self._promised = promised
            return self._evict(usage, victims, total, f"to make room for {content}")

    def give_back(self, content: str) -> None:
        """The capture has ended, one way or the other."""
        with self._lock:
            self._promised.pop(content, None)

    def relieve(self) -> list[str]:
        """Evict while the store takes more than its quota, or its disk has less free than it must; returns what was evicted."""
        with self._lock:
            usage, total = self._node.ops.usage(), sum(self._promised.values())
            if usage.room(total) >= 0:
                return []
            return self._evict(usage, self._evictable(usage), total, "as the disk or the quota of the store is exceeded")

    def left(self, usage: Usage) -> int:
        """What the next capture could have (bytes), with what would be evicted for it."""
        return max(0, usage.room(sum(self._promised.values())) + sum(item.bytes for item, _ in self._evictable(usage)))

    # --- what there is ---

    def _evictable(self, usage: Usage) -> list[tuple[Artifact, Standing]]:
        n = self._node
        return eviction.evictable(
            [self._artifact(*item) for item in usage.artifacts.items()], eviction.uses(n.pods.all(), n.name)
        )

    def _artifact(self, name: str, size: int) -> Artifact:
        n, obj, stored = self._node, self._node.contents.get(name), self._node.stored.get(name)
        uid = stored.content_uid if stored is not None else ""
        busy = n.busy[name] > 0
        if obj is None or uid not in ("", obj["metadata"]["uid"]):
            used = timestamp(stored.captured_at) if stored is not None else 0.0
            return Artifact(content=name, uid=uid, bytes=size, used=used, broken="no content stands for it", busy=busy)
        entry = n.ledger.entry(name, obj["metadata"]["uid"])
        made = eviction.artifact(obj, n.health.environment, size=size, used=entry.last_succeeded_at)
        wrong = "its files cannot be read" if stored is None else "quarantined" if entry.quarantined else ""
        return replace(made, broken=made.broken or wrong, busy=made.busy or busy)

    # --- removing ---

    def _evict(self, usage: Usage, victims: list[tuple[Artifact, Standing]], promised: int, what_for: str) -> list[str]:
        """Remove one after the other until there is room. What the disk does not let go of is passed over."""
        gone = []
        for item, rank in victims:
            if usage.room(promised) >= 0:
                break
            why = f"{eviction.why(item, rank)}; removed {what_for}"
            log.warning("evicting %s (%d bytes): %s", item.content, item.bytes, why)
            self._note(item, why)
            gone.append(item.content)
            try:
                self._node.ops.delete_artifact(item.content)
            except (StoreError, OSError) as e:
                log.warning("%s is not removed: %s", item.content, e)
                continue
            with contextlib.suppress(OSError):  # else with the next collection
                self._node.ledger.save()
            self._node.stored.pop(item.content, None)
            self._node.metrics.evicted(rank)
            self._node.wrote("artifact evicted")
            usage = self._node.ops.usage()
        return gone

    def _note(self, item: Artifact, why: str) -> None:
        """That nothing is to be restored from it any more, if nobody has said so: files that are gone would look lost."""
        obj = self._node.contents.get(item.content)
        if obj is None or any(is_true(obj, kind) for kind in (c.FAILED, c.QUARANTINED)):
            return
        try:
            self._node.ledger.quarantine(item.content, item.uid, Reason.EVICTED, why)
        except OSError as e:
            # Of a full disk, most likely: memory has it, and it is written as soon as the files are gone.
            log.warning("the ledger of %s cannot be written yet: %s", item.content, e)
