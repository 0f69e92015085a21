"""What the API server last said: pods and contents of this node, kept by watches.

Decisions are taken from here, because the path from hello.json to start.json must not wait for an API server. An object that we
wrote is put in at once (`put`), so that the next pass does not take the lag of the watch for a difference.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from ..kube import ApiError, Kube, Object, Resource

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""Wait after a refused watch (CRDs not installed yet, permissions): the agent keeps serving its node meanwhile."""


def version(obj: Object) -> int:
    """The resource version as a number (the API server's are comparable); -1 for one that is none."""
    text = str(obj["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdigit() else -1


class Cache:
    """Objects by `key`. `changed(key)` is called on each change, `synced` is set once the first list is in."""

    def __init__(self, resource: Resource, key: Callable[[Object], str], changed: Callable[[str], None]) -> None:
        self.resource = resource
        self.synced = asyncio.Event()
        self._key = key
        self._changed = changed
        self._objects: dict[str, Object] = {}

    def get(self, key: str) -> Object | None:
        """The object, or None."""
        return self._objects.get(key)

    def all(self) -> list[Object]:
        """All objects."""
        return list(self._objects.values())

    def __iter__(self) -> Iterator[str]:
        """All keys."""
        return iter(self._objects)

    def put(self, obj: Object) -> bool:
        """Take in an object unless a newer one of the same UID is known. Returns whether it is news."""
        key = self._key(obj)
        known = self._objects.get(key)
        if known is not None and known["metadata"]["uid"] == obj["metadata"]["uid"] and version(known) >= version(obj) >= 0:
            return False
        self._objects[key] = obj
        return True

    def drop(self, key: str) -> None:
        """The object is gone."""
        self._objects.pop(key, None)

    async def follow(self, kube: Kube, *, labels: str, fields: str | None = None) -> None:
        """Watch for ever."""
        while True:
            try:
                async for event in kube.watch(self.resource, labels=labels, fields=fields):
                    if event.type == "SYNC":
                        self._sync(list(event.items))
                    elif event.type == "DELETED":
                        key = self._key(event.object)
                        known = self._objects.get(key)
                        if known is not None and known["metadata"]["uid"] == event.object["metadata"]["uid"]:
                            self.drop(key)
                            self._changed(key)
                    elif self.put(event.object):
                        self._changed(self._key(event.object))
            except ApiError as e:
                log.warning("watch of %s: %s", self.resource.plural, e)
            await asyncio.sleep(RETRY_S)

    def _sync(self, items: list[Object]) -> None:
        """A complete list: what it does not hold is gone (a deletion while the watch was down has no event of its own)."""
        keys = {self._key(x) for x in items}
        gone = [key for key in self._objects if key not in keys]
        for key in gone:
            self.drop(key)
        news = []
        for obj in items:
            known = self._objects.get(self._key(obj))
            # Even an older version: a list is the truth, also of an etcd that was restored from a backup.
            if known is None or known["metadata"]["uid"] != obj["metadata"]["uid"] or version(known) != version(obj):
                self._objects[self._key(obj)] = obj
                news.append(self._key(obj))
        self.synced.set()
        for key in [*gone, *news]:
            self._changed(key)
