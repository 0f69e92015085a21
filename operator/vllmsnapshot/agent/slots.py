"""Admission: so many restores at once on this node, first come first served."""

from __future__ import annotations

from collections.abc import Callable


class Slots:
    """Who restores and who waits. `freed` is called with every pod that may get a slot now. Belongs to one event loop."""

    def __init__(self, freed: Callable[[str], None]) -> None:
        self._freed = freed
        self._running: set[str] = set()
        self._queue: dict[str, None] = {}

    def __len__(self) -> int:
        """Restores in flight."""
        return len(self._running)

    def take(self, uid: str, limit: int) -> bool:
        """A slot for this pod, or its place in the queue. `limit` is the pod's own idea of how many there are."""
        self._queue.setdefault(uid)
        if list(self._queue).index(uid) >= limit - len(self._running):
            return False
        del self._queue[uid]
        self._running.add(uid)
        return True

    def leave(self, uid: str) -> None:
        """Give back the slot or the place in the queue."""
        if uid in self._running or uid in self._queue:
            self._running.discard(uid)
            self._queue.pop(uid, None)
            for waiting in list(self._queue):
                self._freed(waiting)
