"""What happened to a snapshot while a test ran: every version of its objects, every answer of its replicas.

States that last milliseconds (a quarantined content that is soon replaced) and promises about all times (never a wrong
answer, never fewer replicas than allowed) cannot be checked by looking now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from tests.system import System, condition
from vllmsnapshot.api import constants as c
from vllmsnapshot.api.types import PodReport
from vllmsnapshot.kube import CONTENTS, PODS, ApiError, Object, Resource, WatchEvent

Ask = Callable[[Object], Awaitable[str | None]]


class Observer:
    """Watches one snapshot's pods and contents, and asks its replicas all the time."""

    def __init__(
        self,
        system: System,
        name: str,
        namespace: str,
        ask: Ask,
        pause_s: float = 0.1,
        told: Callable[[WatchEvent], None] = lambda _: None,
    ) -> None:
        self.pods: dict[str, list[Object]] = defaultdict(list)
        self.contents: dict[str, list[Object]] = defaultdict(list)
        self.answers: dict[str, set[str]] = defaultdict(set)
        """By pod UID."""
        self.fewest = 0
        """The smallest number of ready pods since `mark`."""
        self._system, self._name, self._namespace, self._ask, self._pause_s = system, name, namespace, ask, pause_s
        self._told = told
        """Called with every event about a pod."""
        self._present: dict[str, Object] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._watch_pods()), asyncio.create_task(self._watch_contents())]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks)

    def mark(self) -> None:
        """Begin to count `fewest` anew."""
        self.fewest = self._available()

    def reports(self, uid: str) -> list[PodReport]:
        """The agent's reports on a pod, each once, in order."""
        texts = [pod["metadata"].get("annotations", {}).get(c.ANNOTATION_REPORT) for pod in self.pods[uid]]
        return [PodReport.model_validate_json(text) for text in dict.fromkeys(filter(None, texts))]

    def content_conditions(self, name: str) -> dict[str, dict[str, Any]]:
        """All conditions that a content ever had as True, by type."""
        found = {}
        for version in self.contents[name]:
            for item in version.get("status", {}).get("conditions") or []:
                if item["status"] == "True":
                    found[item["type"]] = item
        return found

    @property
    def present(self) -> list[Object]:
        """The pods that are there now, those that are being deleted too."""
        return list(self._present.values())

    @property
    def all_answers(self) -> set[str]:
        """What anybody ever answered."""
        return set().union(*self.answers.values())

    def _available(self) -> int:
        return sum(condition(p, "Ready") == "True" and "deletionTimestamp" not in p["metadata"] for p in self._present.values())

    async def _watch_pods(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            selector = f"{c.LABEL_SNAPSHOT}={self._name},{c.LABEL_ROLE}={c.ROLE_REPLICA}"
            async for event in self._watch(PODS, self._namespace, labels=selector):
                items = event.items if event.type == "SYNC" else (event.object,)
                if event.type == "SYNC":
                    self._present.clear()
                for pod in items:
                    uid = pod["metadata"]["uid"]
                    if uid not in self.pods:
                        tasks.create_task(self._question(uid))
                    self.pods[uid].append(pod)
                    if event.type == "DELETED":
                        self._present.pop(uid, None)
                    else:
                        self._present[uid] = pod
                self.fewest = min(self.fewest, self._available())
                self._told(event)

    async def _question(self, uid: str) -> None:
        while uid in self._present or len(self.pods[uid]) <= 1:
            answer = await self._ask(self.pods[uid][-1])
            if answer is not None:
                self.answers[uid].add(answer)
            await asyncio.sleep(self._pause_s)

    async def _watch(
        self, resource: Resource, namespace: str | None = None, *, labels: str | None = None
    ) -> AsyncIterator[WatchEvent]:
        while True:
            # An API server that has just been started refuses for a moment what it will allow: its roles and CRDs come later.
            with contextlib.suppress(ApiError):
                async for event in self._system.kube.watch(resource, namespace, labels=labels):
                    yield event
            await asyncio.sleep(self._pause_s)

    async def _watch_contents(self) -> None:
        async for event in self._watch(CONTENTS):
            for content in event.items if event.type == "SYNC" else (event.object,):
                if content["spec"]["snapshotRef"]["name"] == self._name:
                    self.contents[content["metadata"]["name"]].append(content)
