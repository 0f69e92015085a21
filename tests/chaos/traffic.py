"""Requests all the time, through the Service and to each replica, and a judgement on every answer.

The right answer is computed here from the arguments of the replica that gave it (tests/node/snapshot.py). Another one ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Set
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from tests.chaos.blame import LINGER_S, Blame
from tests.load import KINDS, Load
from tests.node.snapshot import TOKENS, Snapshot, answer
from tests.nodeview import NodeView
from tests.observer import Observer
from tests.system import PROMPT, System, condition
from vllmsnapshot.api import constants as c
from vllmsnapshot.kube import PODS, ApiError, Object, WatchEvent

PAUSE_S: Final = 0.2
"""Between two requests of a client: two snapshots have six clients of their Services and one of each replica."""
ORPHANED_S: Final = 60.0
"""How long a pod that is gone from the API may still answer over a connection that was kept: one that was deleted without a grace period
goes on until the kubelet, which may be away, gets to it."""
LOOK_BACK_S: Final = 30.0
"""How much of what came before a failure is told with it."""
_SIZE: Final = "--memory-mib="


def size_argument(mib: int) -> str:
    """The engine's argument for this size."""
    return f"{_SIZE}{mib}"


def size_of(pod: Object) -> int:
    """Mebibytes of each kind of memory of a replica's engine, by its arguments."""
    (engine,) = [x for x in pod["spec"]["containers"] if x["name"] == c.CONTAINER]
    (size,) = [x.removeprefix(_SIZE) for x in engine["args"] if x.startswith(_SIZE)]
    return int(size)


def serves(pod: Object) -> bool:
    """Whether requests are routed to it."""
    return condition(pod, "Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


@dataclass
class Failure:
    """A request without a whole answer; `uid` of the replica where it was asked directly."""

    snapshot: str
    kind: str
    began: float
    ended: float
    error: str
    uid: str | None = None


@dataclass
class Traffic:
    """What became of the requests of a run."""

    blame: Blame
    wrong: list[str] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    history: list[tuple[float, str, str]] = field(default_factory=list)
    """What the API said when about which snapshot's replicas."""
    alarm: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the first wrong answer."""

    def accuse(self, text: str) -> None:
        """A wrong answer."""
        self.wrong.append(text)
        self.alarm.set()

    def judged(self) -> tuple[Counter[str], list[Failure]]:
        """Failed requests by what excuses them, and those that nothing excuses."""
        excused: Counter[str] = Counter()
        guilty = []
        for failure in self.failures:
            why = self.blame.excuse(failure.snapshot, failure.began, failure.ended, failure.uid)
            if why is None:
                guilty.append(failure)
            else:
                excused[why] += 1
        return excused, guilty

    def episodes(self) -> list[Episode]:
        """Failures that nothing excuses, those of a snapshot that follow each other closely together, with what led to them."""
        found: list[Episode] = []
        for failure in sorted(self.judged()[1], key=lambda f: (f.snapshot, f.began)):
            if not found or found[-1].snapshot != failure.snapshot or failure.began > found[-1].ended + LINGER_S:
                found.append(Episode(failure.snapshot, failure.began))
            found[-1].failures.append(failure)
        for episode in found:
            episode.before = [
                (at, text)
                for at, name, text in self.history
                if name == episode.snapshot and episode.began - LOOK_BACK_S <= at <= episode.ended
            ]
        return found


@dataclass
class Episode:
    """Requests that failed one after the other without an excuse."""

    snapshot: str
    began: float
    failures: list[Failure] = field(default_factory=list)
    before: list[tuple[float, str]] = field(default_factory=list)
    """What the API said of its replicas until its end."""

    @property
    def ended(self) -> float:
        """When the last one failed."""
        return max((failure.ended for failure in self.failures), default=self.began)


class Subject(Snapshot):
    """A snapshot under chaos: its replicas are asked, judged, and watched for who may be routed to."""

    def __init__(self, system: System, node: NodeView, manifest: Object, traffic: Traffic) -> None:
        super().__init__(system, node, manifest)
        self.traffic = traffic
        self.blame = traffic.blame
        self.wanted = 1
        self.seen = Observer(system, self.name, self.namespace, self.ask, PAUSE_S, self._told)
        self.sizes: dict[str, int] = {}
        """By identity."""
        self._pods: dict[str, tuple[Object, float]] = {}
        """By UID, with the time at which each was last there."""
        self._gone: set[str] = set()
        self._serving = False
        self._destinations: Set[str] | None = None
        """Where kube-proxy's rules lead; None before the first look at them."""

    # --- who is there ---

    @classmethod
    @contextlib.asynccontextmanager
    async def under(cls, system: System, node: NodeView, manifest: Object, traffic: Traffic) -> AsyncIterator[Subject]:
        """Apply it and observe it for the length of a block."""
        subject = cls(system, node, manifest, traffic)
        async with subject.seen:
            system.apply(manifest)
            yield subject

    def _told(self, event: WatchEvent) -> None:
        present = {pod["metadata"]["uid"]: pod for pod in self.seen.present}
        now = time.monotonic()
        for uid in self._pods.keys() - present.keys():
            if not (event.type == "DELETED" and event.object["metadata"]["uid"] != uid):
                self.blame.over(uid)
                if uid not in self._gone:
                    self._gone.add(uid)
                    self.traffic.history.append((now, self.name, f"{self._pods[uid][0]['metadata']['name']} gone"))
        for uid, pod in present.items():
            before = self._pods.get(uid, ({}, 0.0))[0]
            self.sizes[pod["metadata"]["labels"][c.LABEL_IDENTITY]] = size_of(pod)
            if "deletionTimestamp" in pod["metadata"] and "deletionTimestamp" not in before.get("metadata", {}):
                self.blame.strike(self.name, uid, "ended gracefully", gentle=True)
            # Not that it is not ready any more: a kubelet that has started calls every pod so for a moment, and goes on without a look at it.
            self.blame.died(uid, _deaths(_engine(pod)))
            if (state := _state(pod)) != (_state(before) if before else ""):
                self.traffic.history.append((now, self.name, f"{pod['metadata']['name']} ({_address(pod)}) {state}"))
            self._pods[uid] = pod, now
        self._reach()

    def _reach(self) -> None:
        """Whether requests to the Service go to a replica. Rules that lead nowhere are nearer to the truth than a watch, which may be late."""
        reached = any(serves(pod) for pod in self.seen.present) and self._destinations != set()
        if reached and not self._serving:
            self.blame.somebody(self.name)
        elif self._serving and not reached:
            self.blame.nobody(self.name, wanted=self.wanted)
        self._serving = reached

    def routed(self, destinations: Set[str]) -> None:
        """kube-proxy's rules lead requests to the Service to these addresses now."""
        serving = {_address(pod) for pod in self.seen.present if serves(pod)}
        for uid, (pod, _) in self._pods.items():
            if _address(pod) in destinations - serving:
                self.blame.still_routed(uid)
        if destinations != self._destinations:
            self._destinations = destinations
            told = ", ".join(sorted(destinations)) or "nowhere"
            self.traffic.history.append((time.monotonic(), self.name, f"routed to {told}"))
            self._reach()

    def _recent(self) -> list[Object]:
        """Pods that a request may have gone to."""
        present = {pod["metadata"]["uid"] for pod in self.seen.present}
        limit = time.monotonic() - ORPHANED_S
        return [pod for uid, (pod, at) in self._pods.items() if uid in present or at > limit]

    # --- asking ---

    async def ask(self, pod: Object) -> str | None:
        """One request to one replica, judged; it counts as failed if the replica was ready when it was asked."""
        address, port = pod.get("status", {}).get("podIP"), pod["metadata"].get("annotations", {}).get(c.ANNOTATION_PORT)
        if not address or not port:
            return None
        ready, began = serves(pod), time.monotonic()
        body = {"model": "small", "prompt": PROMPT, "max_tokens": TOKENS}
        limit = aiohttp.ClientTimeout(total=60, connect=10)
        try:
            async with self.system.http.post(f"http://{address}:{port}/v1/completions", json=body, timeout=limit) as response:
                raw = await response.text()
                if response.status != 200:
                    raise ValueError(f"status {response.status}: {raw[:200]}")
            text = str(json.loads(raw)["choices"][0]["text"])
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError) as e:
            ended = time.monotonic()
            if ready and not await self._leaving(pod):
                self.traffic.failures.append(
                    Failure(self.name, "direct", began, ended, f"{type(e).__name__}: {e}", pod["metadata"]["uid"])
                )
            return None
        self.traffic.answered["direct"] += 1
        self.heard(pod, text, ready=ready, asked=began)
        return text

    async def _leaving(self, pod: Object) -> bool:
        """Whether it has been deleted, by the API itself: a watch may be late with that."""
        while True:
            try:
                now = await self.system.kube.get(PODS, pod["metadata"]["name"], self.namespace)
            except ApiError:  # it is away; it will say when it is back
                await asyncio.sleep(PAUSE_S)
                continue
            return now is None or now["metadata"]["uid"] != pod["metadata"]["uid"] or "deletionTimestamp" in now["metadata"]

    def heard(self, pod: Object, text: str, *, ready: bool, asked: float) -> None:
        """An answer from where the replica listens or is to listen; `ready`: the API called it so when it was `asked`."""
        right = {answer(mib=size_of(pod))}
        if text in right:
            self.blame.answered(pod["metadata"]["uid"], asked)
        if not ready:
            # On the node's network the port may be still held by one that was deleted without a grace period. Who is ready has it.
            right |= {answer(mib=size_of(other)) for other in self._recent() if _address(other) == _address(pod)}
        if text not in right:
            self.traffic.accuse(f"{pod['metadata']['name']}: {text!r} instead of one of {sorted(right)}")

    def judge(self, raw: str) -> None:
        """An answer that came by the Service."""
        if raw.startswith("data: "):
            events = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: {")]
            text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
            givers = self._recent()
        else:
            reply = json.loads(raw)
            text = reply["choices"][0]["text"]
            recent = self._recent()
            # On the node's network the host's name is the node's.
            givers = [pod for pod in recent if pod["metadata"]["name"] == reply["hostname"]] or recent
        right = {answer(mib=size_of(pod)) for pod in givers}
        self.traffic.answered["service"] += 1
        if text not in right:
            names = ", ".join(pod["metadata"]["name"] for pod in givers)
            self.traffic.accuse(f"Service {self.name}: {text!r} instead of one of {sorted(right)} ({names})")

    @contextlib.asynccontextmanager
    async def asked(self) -> AsyncIterator[Load]:
        """Clients of each kind at its Service for the length of a block; then their failures are known to `traffic`."""
        address, port = await self.endpoint()
        body = {"model": "small", "prompt": PROMPT, "max_tokens": TOKENS}
        async with Load(address, port, body, judge=self.judge, pause_s=PAUSE_S) as load:
            load.start(*KINDS)
            try:
                yield load
            finally:
                await load.stop()
                failed = [(o, o.error) for o in load.outcomes if o.error is not None]
                self.traffic.failures += [Failure(self.name, o.kind, o.began, o.ended, error) for o, error in failed]


def _address(pod: Object) -> str:
    """Where its engine listens or is to listen, as in kube-proxy's rules."""
    return f"{pod.get('status', {}).get('podIP')}:{pod['metadata'].get('annotations', {}).get(c.ANNOTATION_PORT)}"


def _engine(pod: Object) -> Object:
    """What the API tells of the engine's container; nothing before the kubelet has told of it."""
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return next((status for status in statuses if status["name"] == c.CONTAINER), {})


def _deaths(engine: Object) -> int:
    """How often the container has ended, as far as the API tells."""
    state = engine.get("state", {})
    ended = "terminated" in state or ("waiting" in state and "terminated" in engine.get("lastState", {}))
    return int(engine.get("restartCount", 0)) + ended


def _state(pod: Object) -> str:
    """What a request's fate depends on, in words."""
    engine = _engine(pod)
    words = ["ready" if condition(pod, "Ready") == "True" else "not ready"]
    words.append("running" if "running" in engine.get("state", {}) else "not running")
    if count := engine.get("restartCount"):
        words.append(f"{count} restarts")
    if "deletionTimestamp" in pod["metadata"]:
        words.append("being deleted")
    return ", ".join(words)


Say = Callable[[str], None]
