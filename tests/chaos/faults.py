"""Carries out the actions of a schedule, as whoever or whatever does such things: users by the API, the kernel by SIGKILL, a disk that
is full. None waits for the system to recover: the next ones come on top.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from tests.chaos.schedule import MAX_REPLICAS, SIZES, Action, Kind
from tests.chaos.traffic import Subject, serves, size_argument
from tests.cluster import ClusterError
from tests.node.engine.small import pattern
from tests.node.snapshot import MIB
from tests.nodeview import NodeView, Process, flip
from tests.system import SYSTEM_NAMESPACE, System, condition
from vllmsnapshot.api import constants as c
from vllmsnapshot.controller import pods as builder
from vllmsnapshot.kube import CONTENTS, PODS, SNAPSHOTS, ApiError, Object
from vllmsnapshot_child.protocol import HOLD, RESTORED, START

OPERATOR, AGENT = "vllmsnapshot-operator", "vllmsnapshot-agent"
"""Words in the command lines."""
ENGINE: Final = "vllmsnapshot_child.server"
FOREIGN: Final = "foreign"
"""Label of pods that take names away."""
PORT_RANGES: Final = ((21100, 21119), (21120, 21139))
PATIENCE_S: Final = 60.0
"""How long an action waits for what it is to interrupt."""
KUBELET_S: Final = 60.0
"""How long a kubelet that was started may take until it has probed every pod; fifteen seconds on a busy machine."""
WATCH_AGAIN_S: Final = 60.0
"""How long a client of an API server that was away may wait until it asks again: client-go's reflectors double their pause up to 30
seconds, and draw as much again."""
API_S: Final = 180.0
"""How long it waits for an API server."""

T = TypeVar("T")


class Missed(Exception):  # noqa: N818 - no error: the system has moved on
    """What the action is about is not there; nothing was done."""


class Faults:
    """Does one action after another, or several at once."""

    def __init__(self, system: System, node: NodeView, subjects: list[Subject]) -> None:
        self.system = system
        self.node = node
        self.subjects = subjects
        self.blame = subjects[0].blame
        self._killed: set[str] = set()
        """UIDs of pods of the system whose process was killed once."""
        self._daemons = asyncio.Lock()
        self._away: set[str] = set()
        self.revived: list[str] = []
        """Daemons that ended by themselves and were started again."""

    async def supervise(self) -> None:
        """Start Kubernetes' daemons again when they end by themselves, as systemd or the kubelet would, for ever.

        The scheduler for one exits when it finds, after an API server was away, that a pod is another one than it remembers.
        """
        while True:
            for name, state in self.node.cluster.daemons().items():
                if state != "running" and name not in self._away:
                    self.revived.append(name)
                    with contextlib.suppress(ClusterError):
                        await asyncio.to_thread(self.node.cluster.start_daemon, name)
            await asyncio.sleep(1.0)

    async def do(self, action: Action) -> str:
        """Do it; what was done. Raises Missed."""
        subject = self.subjects[action.snapshot]
        match action.kind:
            case Kind.KILL_OPERATOR:
                return await self._kill_part(OPERATOR)
            case Kind.KILL_AGENT:
                return await self._kill_part(AGENT)
            case Kind.KILL_AGENT_CAPTURING:
                return await self._kill_capturing(subject, action)
            case Kind.KILL_AGENT_RESTORING:
                return await self._kill_restoring(subject, action)
            case Kind.DELETE_OPERATOR:
                return await self._delete_part(c.COMPONENT_OPERATOR, action)
            case Kind.DELETE_AGENT:
                return await self._delete_part(c.COMPONENT_AGENT, action)
            case Kind.KILL_ENGINE:
                return self._kill_engine(subject, _choose(subject.seen.present, action.pick))
            case Kind.KILL_INIT:
                return self._kill_init(subject, _choose(subject.seen.present, action.pick))
            case Kind.DELETE_POD | Kind.DELETE_POD_NOW:
                return await self._delete_pod(subject, action)
            case Kind.SCALE:
                return await self.scale(subject, action.value)
            case Kind.NEW_IDENTITY:
                return await self._resize(subject, action.value)
            case Kind.NEW_REVISION:
                return await self._roll(subject, action)
            case Kind.RECAPTURE:
                return await self.recapture(subject, str(action.number))
            case Kind.FILL_DISK:
                return await asyncio.to_thread(self._fill, action)
            case Kind.FREE_DISK:
                return self._free(action.number)
            case Kind.CORRUPT_ARTIFACT:
                return await self._corrupt(subject, action)
            case Kind.DELETE_CONTENT:
                return await self._delete_content(subject, action)
            case Kind.RESTART_APISERVER:
                return await self._restart_daemon("kube-apiserver", action)
            case Kind.RESTART_KUBELET:
                return await self._restart_daemon("kubelet", action)
            case Kind.FOREIGN_POD:
                return await self._squat(subject, action)
            case Kind.REMOVE_FOREIGN_POD:
                return await self._unsquat(action.number)

    async def insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Ask the API until it answers, as a person would whose kubectl has failed."""
        end = time.monotonic() + API_S
        while True:
            try:
                return await call()
            except ApiError as e:
                # After its start it does not know its roles and CRDs for a moment: 403, 404.
                if time.monotonic() > end or not (e.status in (0, 403, 404, 429) or e.status >= 500):
                    raise
            await asyncio.sleep(0.2)

    # --- operator and agent ---

    async def _kill_part(self, word: str) -> str:
        doomed = [process for process in self.node.running(word) if process.pod]
        if not doomed:
            raise Missed(f"no {word} runs")
        pod = doomed[0].pod
        for process in doomed:
            _kill(process.pid)
        if pod not in self._killed:
            self._killed.add(pod)
            return f"{word}, PID {doomed[0].pid}"
        # The kubelet waits longer each time; it must not spend the run waiting.
        await self._replace(pod)
        return f"{word}, PID {doomed[0].pid}, and its pod deleted"

    async def _replace(self, uid: str) -> None:
        pods = await self.insist(lambda: self.system.kube.list(PODS, SYSTEM_NAMESPACE))
        for name in [pod["metadata"]["name"] for pod in pods if pod["metadata"]["uid"] == uid]:
            await self.insist(functools.partial(self.system.kube.delete, PODS, name, SYSTEM_NAMESPACE, uid=uid))

    async def _delete_part(self, component: str, action: Action) -> str:
        labels = f"{c.LABEL_COMPONENT}={component}"
        pods = await self.insist(lambda: self.system.kube.list(PODS, SYSTEM_NAMESPACE, labels=labels))
        pod = _choose(pods, action.pick)
        name, grace = pod["metadata"]["name"], None if action.pick < 0.5 else 0
        await self.insist(lambda: self.system.kube.delete(PODS, name, SYSTEM_NAMESPACE, grace_period_s=grace))
        return name if grace is None else f"{name} at once"

    async def _kill_capturing(self, subject: Subject, action: Action) -> str:
        since = time.time()
        done = await self._resize(subject, action.value)
        await self._fresh(subject, HOLD, "", since)
        return f"{done}; {await self._kill_part(AGENT)} while it captured"

    async def _kill_restoring(self, subject: Subject, action: Action) -> str:
        since = time.time()
        if subject.wanted < MAX_REPLICAS:
            done = await self.scale(subject, subject.wanted + 1)
        else:
            done = await self._delete_pod(subject, action)
        file, text = (START, '"restore"') if action.pick < 0.5 else (RESTORED, "")
        await self._fresh(subject, file, text, since)
        return f"{done}; {await self._kill_part(AGENT)} at {file}"

    async def _fresh(self, subject: Subject, name: str, text: str, since: float) -> None:
        """Wait for a control file that was written after `since` in any pod of the snapshot."""

        def look() -> bool:
            for pod in subject.seen.present:
                path = self.node.control(pod["metadata"]["uid"]) / name
                with contextlib.suppress(OSError):
                    if path.stat().st_mtime >= since and text in path.read_text():
                        return True
            return False

        try:
            await self.node.when(f"{name} in a pod of {subject.name}", look, PATIENCE_S)
        except TimeoutError as e:
            raise Missed(str(e)) from e

    # --- replicas ---

    def _kill_engine(self, subject: Subject, pod: Object) -> str:
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        window = self.blame.strike(subject.name, uid, "its engine was killed", kill=True)
        if not self.node.kill(uid, ENGINE):
            self.blame.withdraw(window)
            raise Missed(f"no engine runs in {name}")
        return f"engine of {name}"

    def _kill_init(self, subject: Subject, pod: Object) -> str:
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        window = self.blame.strike(subject.name, uid, "its container was killed", kill=True)
        try:
            _kill(self.node.init(uid))
        except LookupError as e:
            self.blame.withdraw(window)
            raise Missed(str(e)) from e
        return f"PID 1 of {name}"

    async def _delete_pod(self, subject: Subject, action: Action) -> str:
        pod = _choose(subject.seen.present, action.pick)
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        now = action.kind == Kind.DELETE_POD_NOW
        if now:
            # Not blamed while there is no API server to ask.
            await self.insist(functools.partial(self.system.kube.get, PODS, name, subject.namespace))
            self.blame.strike(subject.name, uid, "it was deleted without a grace period")
        grace = 0 if now else None
        await self.insist(lambda: self.system.kube.delete(PODS, name, subject.namespace, uid=uid, grace_period_s=grace))
        return f"{name} deleted"

    # --- what users do ---

    async def _merge(self, subject: Subject, body: Object, subresource: str | None = None) -> None:
        path = SNAPSHOTS.path(subject.namespace, subject.name, subresource)
        kind = "application/merge-patch+json"
        await self.insist(lambda: self.system.kube.request("PATCH", path, body=body, content_type=kind))

    async def scale(self, subject: Subject, replicas: int) -> str:
        """As an autoscaler does."""
        subject.wanted = replicas
        await self._merge(subject, {"spec": {"replicas": replicas}}, "scale")
        return f"{subject.name} to {replicas}"

    async def recapture(self, subject: Subject, request: str) -> str:
        """Ask for new artifacts."""
        await self._merge(subject, {"metadata": {"annotations": {c.ANNOTATION_RECAPTURE: request}}})
        return f"{subject.name}: request {request}"

    async def _resize(self, subject: Subject, mib: int) -> str:
        if subject.wanted == 0:
            await self.scale(subject, 1)
        if (await self.insist(subject.get))["spec"]["args"] == [size_argument(mib)]:
            mib = SIZES[(SIZES.index(mib) + 1) % len(SIZES)]
        await self._merge(subject, {"spec": {"args": [size_argument(mib)]}})
        return f"{subject.name}: {mib} MiB"

    async def _roll(self, subject: Subject, action: Action) -> str:
        """A change for which replicas are replaced, and restored from the artifact that is there."""
        found = await self.insist(subject.get)
        if "portRange" in found["spec"]["serving"]:
            start, end = next(x for x in PORT_RANGES if x[0] != found["spec"]["serving"]["portRange"]["start"])
            await self._merge(subject, {"spec": {"serving": {"portRange": {"start": start, "end": end}}}})
            return f"{subject.name}: ports {start}-{end}"
        note = {"metadata": {"annotations": {"chaos": str(action.number)}}}
        await self._merge(subject, {"spec": {"podTemplate": note}})
        return f"{subject.name}: annotation {action.number}"

    async def _squat(self, subject: Subject, action: Action) -> str:
        """Take the names that the next replicas would get, and make the operator want them."""
        pods = sorted(subject.seen.present, key=lambda p: str(p["metadata"]["creationTimestamp"]))
        if not pods:
            raise Missed("no pod to tell the revision by")
        revision, taken = pods[-1]["metadata"]["labels"][c.LABEL_REVISION], {p["metadata"]["name"] for p in pods}
        names = [name for slot in range(6) if (name := builder.pod_name(subject.name, revision, slot)) not in taken][:2]
        for name in names:
            body = {
                "metadata": {"name": name, "namespace": subject.namespace, "labels": {FOREIGN: str(action.number)}},
                "spec": {
                    "nodeSelector": {"chaos/nowhere": "x"},
                    "containers": [{"name": "foreign", "image": "vllmsnapshot.local/engine:dev", "command": ["sleep", "3600"]}],
                },
            }
            await self.insist(functools.partial(self.system.kube.create, PODS, body, FOREIGN))
        return f"{', '.join(names)}; {await self.scale(subject, min(MAX_REPLICAS, subject.wanted + 1))}"

    async def _unsquat(self, number: int | None = None) -> str:
        labels = FOREIGN if number is None else f"{FOREIGN}={number}"
        pods = await self.insist(lambda: self.system.kube.list(PODS, "default", labels=labels))
        for pod in pods:
            name = pod["metadata"]["name"]
            await self.insist(functools.partial(self.system.kube.delete, PODS, name, "default", grace_period_s=0))
        return f"{len(pods)} pods"

    # --- artifacts ---

    async def _captured(self, subject: Subject, action: Action) -> Object:
        contents = await self.insist(subject.contents)
        return _choose([x for x in contents if condition(x, c.CAPTURED) == "True"], action.pick)

    async def _corrupt(self, subject: Subject, action: Action) -> str:
        """A byte of the engine's memory in the files: the digest or the canary finds it, for every answer depends on it."""
        content = await self._captured(subject, action)
        name, size = content["metadata"]["name"], subject.sizes[content["spec"]["identity"]] * MIB
        at = int(action.pick * (size - 64))

        def damage() -> None:
            flip(self.node.pages(name), pattern(2, size)[at : at + 64], keep_time=action.pick < 0.5)

        try:
            await asyncio.to_thread(damage)
        except (AssertionError, OSError, ValueError) as e:
            raise Missed(f"the files of {name} are not there: {e}") from e
        return f"{name}, byte {at} of its memory"

    async def _delete_content(self, subject: Subject, action: Action) -> str:
        name = str((await self._captured(subject, action))["metadata"]["name"])
        await self.insist(lambda: self.system.kube.delete(CONTENTS, name))
        return name

    # --- the node ---

    def _fill(self, action: Action) -> str:
        path = self.node.store / f"ballast-{action.number}"
        space = os.statvfs(self.node.store)
        size = max(space.f_bavail * space.f_frsize - action.value, 4096)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with contextlib.suppress(OSError):  # somebody was quicker, and it is full already
                os.posix_fallocate(fd, 0, size)
        finally:
            os.close(fd)
        return f"{size} bytes, {action.value} left"

    def _free(self, number: int) -> str:
        (self.node.store / f"ballast-{number}").unlink(missing_ok=True)
        return f"what #{number} took"

    async def _restart_daemon(self, name: str, action: Action) -> str:
        cluster = self.node.cluster
        async with self._daemons:
            if name == "kube-apiserver":
                # While nobody can be told of it, requests go to replicas that are ending.
                for subject in self.subjects:
                    for pod in subject.seen.present:
                        if "deletionTimestamp" in pod["metadata"]:
                            self.blame.strike(subject.name, pod["metadata"]["uid"], "it ended while the API server was away")
            self._away.add(name)
            try:
                # An API server that is told to end goes on for a minute, because of those who watch.
                await asyncio.to_thread(cluster.stop_daemon, name, signal.SIGKILL)
                await asyncio.sleep(action.seconds)
                if name == "kubelet":
                    self.blame.unsettle(KUBELET_S)
                await asyncio.to_thread(cluster.start_daemon, name)
                if name == "kube-apiserver":
                    self.blame.blind(WATCH_AGAIN_S)
            finally:
                self._away.discard(name)
        return f"away for {action.seconds:.1f} s"

    # --- the end ---

    async def stop(self) -> None:
        """Undo what lasts."""
        for path in self.node.store.glob("ballast-*"):
            path.unlink()
        await self._unsquat()


def part(node: NodeView, word: str) -> Process | None:
    """The process of operator or agent."""
    return next((process for process in node.running(word) if process.pod), None)


def _choose(objects: list[Object], pick: float) -> Object:
    if not objects:
        raise Missed("there is none")
    ordered = sorted(objects, key=lambda x: (not serves(x), str(x["metadata"]["name"])))
    return ordered[int(pick * len(ordered))]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
