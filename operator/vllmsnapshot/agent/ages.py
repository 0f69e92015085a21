"""How old control files are, whatever is done to the node's clock."""

from __future__ import annotations

from collections.abc import Callable

from .control import Files


class Ages:
    """Of the control files of each pod.

    Time counts from the moment a file was first seen here; only its age at that moment comes from the wall clock. A clock that is
    set (at boot, typically, while every replica is being restored) would otherwise make a decision look given up while init still
    waits for it, or still waited for when init has long started another engine.
    """

    def __init__(self, clock: Callable[[], float], steady: Callable[[], float]) -> None:
        self._clock, self._steady = clock, steady
        self._seen: dict[str, dict[str, tuple[tuple[str, float], float, float]]] = {}

    def look(self, uid: str, files: Files) -> dict[str, float]:
        """The age of every file (seconds)."""
        now, steady = self._clock(), self._steady()
        before = self._seen.get(uid, {})
        seen = self._seen[uid] = {}
        for name, at in files.at.items():
            key = (files.incarnation, at)
            first = before.get(name)
            seen[name] = first if first is not None and first[0] == key else (key, max(0.0, now - at), steady)
        return {name: age + steady - since for name, (_, age, since) in seen.items()}

    def seen_for(self, uid: str, name: str) -> float:
        """For how long (seconds) this file has been seen here; 0 for one that has not."""
        first = self._seen.get(uid, {}).get(name)
        return 0.0 if first is None else self._steady() - first[2]

    def forget(self, uid: str) -> None:
        """The pod is gone."""
        self._seen.pop(uid, None)
