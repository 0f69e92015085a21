"""A cluster in one thread: the real operator, a real agent per node, the real PID 1; scheduler, kubelet, engines and CRIU in few lines.

Everything runs on virtual time, on real control volumes, ledgers and artifact stores below a temporary directory, and against the API
server in memory. Operator and agents are processes that can end at any point (`points.Points`) and are started again a moment
later, as the kubelet would. What must never be true is checked while it runs: two engines in one container, a Ready replica that
answers wrongly, more replicas than wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import shutil
import signal
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from vllmsnapshot.agent import store
from vllmsnapshot.agent.app import Agent
from vllmsnapshot.agent.config import Config
from vllmsnapshot.agent.control import control_path
from vllmsnapshot.agent.errors import AgentError, CaptureError, RestoreError
from vllmsnapshot.agent.local import LocalOps, _stored
from vllmsnapshot.agent.nodeops import Health, Order, PodRef, Revived, Shelf, Stored
from vllmsnapshot.agent.space import Usage
from vllmsnapshot.agent.store import Manifest, Store
from vllmsnapshot.api import constants as c
from vllmsnapshot.api.constants import Reason
from vllmsnapshot.api.types import PodReport
from vllmsnapshot.controller.app import RESYNC, Operator, Options
from vllmsnapshot.controller.reconcile import Reconciler
from vllmsnapshot.environment import LAYERS
from vllmsnapshot.kube import CONTENTS, NODES, PODS, SERVICES, SNAPSHOTS, Object
from vllmsnapshot.objects import is_true, rfc3339
from vllmsnapshot_child import init, machine, procs, protocol
from vllmsnapshot_child.machine import Act, Look
from vllmsnapshot_child.protocol import Oracle, Ready, Release, Serving

from .memory_api import Change, Client, Faults, Server
from .points import Points, Stopped, acting, actor, lose_unsynced, patched
from .virtual import Inline, run

SYSTEM = "vllmsnapshot-system"
NAMESPACE = "default"
NAME = "smol"
T0 = 1_800_000_000.0
EXPECTED_BYTES = 1 << 20
"""What a capture asks room for beforehand. It comes to a few pages."""
LOAD_S, RELOAD_S = 40.0, 0.5
"""Of an engine: a resync of the operator takes place before it is up, as in life."""


def answer(image: str) -> Oracle:
    """What an engine of this image answers when it is well."""
    return Oracle(token_ids=[len(image), *image.encode()[:8]], text=f" {image}", sampled_token_logprob=-0.25)


class Leave(Exception):  # noqa: N818 - not an error
    """PID 1 exits with this code."""


# --- engines and containers ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Engine:
    """A server: started cold, or put back by CRIU."""

    oracle: Oracle
    expected: Oracle
    pid: int
    serving: bool = False
    alive: bool = True
    task: asyncio.Task[None] | None = None
    exit_code: int = 0
    running: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.running.set()

    @property
    def stopped(self) -> bool:
        """By SIGSTOP."""
        return not self.running.is_set()


class PidOne(init.Init):
    """The real init, its processes simulated. `look` and the acts on processes are all that differs."""

    def __init__(self, container: Container) -> None:
        super().__init__([])
        self.container = container
        self.control = container.control
        self.dir_fd = os.open(self.control, os.O_RDONLY | os.O_DIRECTORY)

    def look(self, signals: tuple[int, ...]) -> Look:
        """Whether the main process has ended is asked of the container."""
        if self.main:
            engine = self.container.find(self.main)
            if engine is None or not engine.alive:
                self.dead[self.main] = engine.exit_code if engine is not None else 1
        return super().look(signals)

    def act(self, acts: list[Act]) -> None:
        """Do them in order."""
        for one in acts:
            if one.verb == machine.EXIT:
                raise Leave(one.number)
            super().act([one])

    def start_server(self, *, attended: bool) -> None:
        """A cold start."""
        self.main = self.session = self.container.start_cold(attended=attended, incarnation=self.incarnation)

    def adopt(self, pid: int, content: str) -> None:
        """The restored tree is the main process now."""
        self.main = self.session = pid

    def kill_all(self) -> None:
        """SIGKILL everything but us."""
        self.container.kill_all(137)

    def forward(self, number: int) -> None:
        """To the server."""
        if number in machine.STOP_SIGNALS:
            self.container.kill_all(0)

    def release(self) -> None:
        """Release the server ourselves."""
        for engine in self.container.engines:
            engine.running.set()
        self.publish(Release(incarnation=self.incarnation, host=None, port=8000))


class Container:
    """One life of a pod's engine container."""

    def __init__(self, world: World, pod: Object) -> None:
        self.world = world
        self.pod = pod
        self.uid: str = pod["metadata"]["uid"]
        image: str = pod["spec"]["containers"][0]["image"]
        self.image = world.moved.get(image, image)
        self.control = control_path(world.kubelet_dir(pod["spec"]["nodeName"]), self.uid)
        self.engines: list[Engine] = []
        self.signals: list[int] = []
        self.code: int | None = None
        self.since = world.loop.time()
        self._pid = 1
        self.changed = asyncio.Event()
        self.task = asyncio.create_task(self._run(), name=f"init {pod['metadata']['name']}")

    @property
    def live(self) -> list[Engine]:
        """Engines that run."""
        return [x for x in self.engines if x.alive]

    def find(self, pid: int) -> Engine | None:
        """By PID."""
        return next((x for x in self.engines if x.pid == pid), None)

    @property
    def serving(self) -> bool:
        """The port is open."""
        return any(x.serving and not x.stopped for x in self.live)

    async def _run(self) -> None:
        one = PidOne(self)
        try:
            one.act(one.machine.begin(self.world.loop.time()))
            while True:
                pause = one.machine.pause(self.world.loop.time())
                self.changed.clear()
                with contextlib.suppress(TimeoutError):
                    # The files are looked at less often than in life.
                    await asyncio.wait_for(self.changed.wait(), None if pause is None else max(pause, 0.1))
                signals, self.signals = tuple(self.signals), []
                one.act(one.machine.step(one.look(signals)))
        except Leave as e:
            self.code = e.args[0]
        finally:
            self.kill_all(137)
            assert one.dir_fd is not None
            os.close(one.dir_fd)
            if self.code is None:
                self.code = 137

    def send(self, number: int) -> None:
        """A signal to PID 1."""
        self.signals.append(number)
        self.changed.set()

    def end(self) -> None:
        """SIGKILL to PID 1."""
        self.task.cancel()

    def kill_all(self, code: int) -> None:
        """SIGKILL to everything else."""
        for engine in self.live:
            engine.alive, engine.serving, engine.exit_code = False, False, code
            if engine.task is not None:
                engine.task.cancel()
        self.changed.set()

    def _add(self, engine: Engine) -> Engine:
        if self.live:
            self.world.broken.append(f"two engines in one container: {self.pod['metadata']['name']}")
        self.engines = [*self.engines[-4:], engine]
        return engine

    def start_cold(self, *, attended: bool, incarnation: str) -> int:
        """PID 1 starts the server."""
        self._pid = max(self._pid, 1) + 1
        oracle = answer(self.image)
        engine = self._add(Engine(oracle=oracle, expected=oracle, pid=self._pid))
        engine.task = self._task(self._cold(engine, attended, incarnation))
        return engine.pid

    def put_back(self, memory: dict[str, Any]) -> Engine:
        """CRIU has restored the tree."""
        oracle, expected = (Oracle.from_dict(memory[k], k) for k in ("oracle", "expected"))
        engine = self._add(Engine(oracle=oracle, expected=expected, pid=1001))
        engine.task = self._task(self._released(engine))
        return engine

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """What an engine does, the agent that made it does not do."""
        with acting(None):
            return asyncio.create_task(work)

    async def _sleep(self, engine: Engine, seconds: float) -> None:
        """Time of the engine, which stands still while it is stopped."""
        await asyncio.sleep(seconds)
        await engine.running.wait()

    async def _cold(self, engine: Engine, attended: bool, incarnation: str) -> None:
        await self._sleep(engine, LOAD_S)
        if attended:
            o = engine.oracle
            self._put(
                Ready(
                    incarnation=incarnation,
                    token_ids=o.token_ids,
                    text=o.text,
                    sampled_token_logprob=o.sampled_token_logprob,
                    protocol=1,
                )
            )
            await self._released(engine)
        else:
            self._serve(engine, incarnation)

    async def _released(self, engine: Engine) -> None:
        with protocol.open_dir(self.control) as fd:
            while (release := Release.load(fd)) is None:
                await self._sleep(engine, 0.25)
        await self._sleep(engine, self.world.reload_s)
        if engine.expected.differs(engine.oracle):
            # Its own canary: it never binds.
            engine.alive, engine.exit_code = False, protocol.EXIT_CODES[protocol.Reason.CANARY_MISMATCH]
            self.changed.set()
            return
        self._serve(engine, release.incarnation)

    def _serve(self, engine: Engine, incarnation: str) -> None:
        engine.serving = True
        self._put(Serving(incarnation=incarnation, host=None, port=8000, oracle=engine.oracle.to_dict()))
        self.changed.set()

    def _put(self, message: protocol.Message) -> None:
        with protocol.open_dir(self.control) as fd:
            message.save(fd)


# --- node operations -------------------------------------------------------------------------------------------------


class SimOps(LocalOps):
    """The real store; containers and CRIU are the simulation's."""

    def __init__(self, world: World, node: str, points: Points) -> None:
        self.world, self.node, self.points = world, node, points
        self.store = Store(Path(world.store_dir(node)))
        self.store.recover()

    def doctor(self) -> Health:
        """A capable node, unless something ails it."""
        return Health(
            capable=not self.world.ailment,
            message=self.world.ailment,
            environment={"kernelRelease": self.world.kernel},
            boot_id=f"boot-{self.world.boot}",
        )

    def shelf(self) -> Shelf:
        """With a disk of its own."""
        found = super().shelf()
        return replace(found, usage=self._alone(found.usage))

    def usage(self) -> Usage:
        """With a disk of its own."""
        return self._alone(super().usage())

    def _alone(self, usage: Usage) -> Usage:
        """On a disk on which nobody else writes."""
        return replace(usage, free=1 << 40, quota=self.world.quota)

    def _here(self, pod: PodRef, error: type[CaptureError] | type[RestoreError], reason: str) -> Container:
        container = self.world.containers.get(pod.uid)
        if container is None or container.code is not None:
            raise error(reason, "no running container")
        return container

    def raise_pids(self, pod: PodRef) -> None:
        """The next process gets a high PID."""
        self.points.meet("ns_last_pid")
        self._here(pod, RestoreError, Reason.RESTORE_FAILED)._pid = 1000

    def clear(self, pod: PodRef) -> None:
        """Kill everything but PID 1."""
        self.points.meet("kill tree")
        self._here(pod, RestoreError, Reason.RESTORE_DIED).kill_all(137)

    def end(self, pod: PodRef, older_than_s: float) -> None:
        """Kill PID 1."""
        container = self._here(pod, RestoreError, Reason.RESTORE_DIED)
        if self.world.loop.time() - container.since > older_than_s:
            self.points.meet("kill PID 1")
            container.end()

    def resume(self, pod: PodRef) -> None:
        """SIGCONT."""
        self.points.meet("SIGCONT")
        for engine in self._here(pod, CaptureError, Reason.SOURCE_GONE).live:
            engine.running.set()

    def restore(self, pod: PodRef, content: str, timeout_s: float, wanted: Callable[[], None]) -> Revived:
        """As `restore.restore`: verify, make a work directory, run CRIU, look again."""
        container = self._here(pod, RestoreError, Reason.RESTORE_DIED)
        with self.store.open(content) as artifact:
            if container.live:
                raise RestoreError(Reason.ENGINE_RUNNING, "another engine runs in the container")
            try:
                wanted()
                if artifact.manifest.environment[LAYERS] != container.image:
                    raise RestoreError(Reason.IDENTITY_MISMATCH, f"{LAYERS}: another image")
                artifact.verify()
                with self.store.work_dir():
                    self.points.meet("criu restore")
                    memory = json.loads((self.store.artifacts_dir / content / "images/pages-1.img").read_text())
                    engine = container.put_back(memory)
                wanted()
            except Exception:
                self.points.meet("kill tree")
                container.kill_all(137)
                raise
            return Revived(pid=engine.pid, phases={"criu": 0.1})

    def capture(self, pod: PodRef, order: Order, room: Callable[[int], None], on_resumed: Callable[[], None]) -> Stored:
        """As `capture.capture`: freeze, dump, copy, thaw, digest, publish."""
        container = self._here(pod, CaptureError, Reason.SOURCE_GONE)
        if self.world.undumpable:
            raise CaptureError(Reason.DUMP_FAILED, "criu: no")
        engine = container.live[0]
        try:
            room(EXPECTED_BYTES)
        except AgentError:
            on_resumed()
            raise
        with self.store.draft(order.content) as draft, self.store.work_dir():
            try:
                os.close(draft.directory("images"))
                self.points.meet("criu dump")
                engine.running.clear()
                memory = {"oracle": engine.oracle.to_dict(), "expected": engine.oracle.to_dict()}
                (draft.path / "images/pages-1.img").write_text(json.dumps(memory))
                os.close(draft.directory("scratch"))
                (draft.path / "scratch/lock").write_text("")
            finally:
                self.points.meet("SIGCONT")
                engine.running.set()
                on_resumed()
            files, size = draft.digest()
            room(size)
            manifest = Manifest(
                content=order.content,
                captured_at=rfc3339(self.world.now()),
                root_pid=1001,
                pids=[1001],
                stdio={},
                staged={"scratch": "/tmp"},
                memory_bytes=size,
                disk_bytes=size,
                environment={"kernelRelease": self.world.kernel, LAYERS: container.image},
                mapped=[],
                files=files,
                phases={"total": 1.0},
                extra={
                    "content_uid": order.content_uid,
                    "identity": order.identity,
                    "oracle": order.oracle.to_dict(),
                    "cold_s": order.cold_s,
                },
            )
            return _stored(draft.publish(manifest))


# --- processes that may end --------------------------------------------------------------------------------------------


class Process:
    """A process of ours: runs, may end at a point, and is started again by somebody."""

    def __init__(self, world: World, name: str, points: Points, faults: Faults) -> None:
        self.world, self.name, self.points, self.faults = world, name, points, faults
        self.client = Client(world.server, name, points, faults)
        self.tasks: set[asyncio.Task[Any]] = set()

    async def main(self) -> None:
        """What it does until it is stopped."""
        raise NotImplementedError

    async def live(self) -> None:
        """Run until the process dies; then nothing of it is left. Raises what it should not have died of."""
        with acting(self.points):
            task = asyncio.create_task(self.main(), name=self.name)
        over = asyncio.Event()
        self.points.died = over.set
        task.add_done_callback(lambda _: over.set())
        if not self.points.dead:
            await over.wait()
        try:
            if task.done() and not self.points.dead:
                task.result()
        except (Stopped, OSError, AgentError):
            pass  # a disk that refuses everything at the start ends the process, as in `app.main`
        finally:
            # No clean-up has any effect: every further point raises.
            self.points.dead = True
            for left in [*self.world.tasks_of(self.points), task]:
                left.cancel()
            await asyncio.gather(*self.world.tasks_of(self.points), task, return_exceptions=True)
            self.world.forget(self.points)


class OperatorProcess(Process):
    """The operator, with hints of what changed from the server instead of kopf."""

    async def main(self) -> None:
        """Queue, workers, resync."""
        world = self.world
        reconciler = Reconciler(self.client, SYSTEM, clock=world.now, share_s=0.0)
        operator = Operator(self.client, Options(agent_namespace=SYSTEM, health_port=0, resync_s=30.0), reconciler=reconciler)
        numbers = iter(range(1, 1 << 30))

        def hint(change: Change) -> None:
            number = next(numbers)
            if self.points.dead or self.faults.watch.drop(number):
                return
            if key := _hint(operator, change):
                for _ in range(2 if self.faults.watch.twice(number) else 1):
                    operator.queue.add(key, self.faults.watch.lag_s)

        world.server.listeners.append(hint)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(operator.queue.work(operator.handle))
                group.create_task(operator.queue.work(operator.handle))
                group.create_task(operator._resync())
        finally:
            world.server.listeners.remove(hint)


def _hint(operator: Operator, change: Change) -> tuple[str, str] | None:
    meta = change.object["metadata"]
    match change.key[0]:
        case SNAPSHOTS.plural:
            return (meta["namespace"], meta["name"])
        case PODS.plural:
            return operator.key_of_pod(change.object) or RESYNC
        case CONTENTS.plural:
            ref = change.object["spec"]["snapshotRef"]
            return (ref["namespace"], ref["name"])
        case NODES.plural if change.type != "MODIFIED":
            return RESYNC
    return None


class AgentProcess(Process):
    """The agent of a node."""

    def __init__(self, world: World, node: str, points: Points, faults: Faults) -> None:
        super().__init__(world, f"agent-{node}", points, faults)
        self.node = node
        self.agent: Agent | None = None

    async def main(self) -> None:
        """The whole agent, but for its process."""
        world = self.world
        config = Config(
            node_name=self.node,
            kubelet_dir=world.kubelet_dir(self.node),
            store_dir=world.store_dir(self.node),
            port=0,
        )
        os.makedirs(os.path.join(config.store_dir, "agent"), exist_ok=True)
        ops = SimOps(world, self.node, self.points)
        self.agent = Agent(config, ops, self.client, _ask_nobody, clock=world.now)
        self.agent.node.pool = Inline()  # type: ignore[assignment]
        self.agent.node.steady = self.agent.pods.ages._steady = world.loop.time
        await self.agent.run()


async def _ask_nobody(_address: str, _port: int) -> Oracle | None:
    return None


# --- the cluster -----------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """Which process is hurt, and how: the points of its first life, and what happens to its requests. Later lives are whole."""

    who: str = ""
    points: Callable[[World], Points] = lambda _: Points()
    faults: Callable[[World], Faults] = lambda _: Faults()
    power: bool = False
    """When the process ends, so does its node: every container, and what was not synced to the disk."""


@dataclass
class World:
    """See the module's docstring."""

    root: Path
    plan: Plan = field(default_factory=Plan)
    nodes: Sequence[str] = ("node-a",)
    kernel: str = "6.18"
    ailment: str = ""
    """What every examination of a node finds wrong."""

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.server = Server(self.now)
        self.server.invariant = self.check
        self.broken: list[str] = []
        """What must never be true and was, and what nobody should have raised. Kept, as operator and agent survive any exception."""
        self.containers: dict[str, Container] = {}
        self.first: Points | None = None
        self.agents: dict[str, AgentProcess] = {}
        self.deaths = 0
        self.wanted = 0
        self._tasks: dict[int, set[asyncio.Task[Any]]] = {}
        self._background: list[asyncio.Task[None]] = []
        self.spared = False
        """Nothing is cut, lost or refused now."""
        self.wall = 0.0
        """How far somebody has set the clock."""
        self.boot = 1
        self.reload_s = RELOAD_S
        self.undumpable = False
        """Captures fail."""
        self.moved: dict[str, str] = {}
        """What stands behind a tag, where that is not what it says."""
        self.quota: int | None = None
        """Of the store of each node (bytes)."""
        self.loop.set_task_factory(self._make_task)

    # --- time, places ---

    def now(self) -> float:
        """Seconds since the epoch."""
        return T0 + self.loop.time() + self.wall

    def kubelet_dir(self, node: str) -> str:
        """Of a node."""
        return str(self.root / node / "kubelet")

    def store_dir(self, node: str) -> str:
        """Of a node."""
        return str(self.root / node / "store")

    # --- tasks of a process ---

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **kwargs)
        owner = actor()
        if owner is not None:
            mine = self._tasks.setdefault(id(owner), set())
            mine.add(task)
            task.add_done_callback(mine.discard)
        return task

    def tasks_of(self, points: Points) -> list[asyncio.Task[Any]]:
        """Everything that a process still does."""
        return list(self._tasks.get(id(points), ()))

    def forget(self, points: Points) -> None:
        """It is gone."""
        self._tasks.pop(id(points), None)

    # --- life ---

    async def start(self) -> None:
        """Nodes, agents, operator."""
        for node in self.nodes:
            os.makedirs(os.path.join(self.kubelet_dir(node), "pods"), exist_ok=True)
            self.server.add(NODES, {"metadata": {"name": node}})
            body = {
                "metadata": {"name": f"agent-{node}", "namespace": SYSTEM, "labels": {c.LABEL_COMPONENT: c.COMPONENT_AGENT}},
                "spec": {"nodeName": node, "containers": []},
            }
            self.server.add(PODS, body)
            self._go(self._supervise(f"agent-{node}", functools.partial(AgentProcess, self, node)))
            self._go(self._kubelet(node))
        self._go(self._scheduler())
        self._go(self._supervise("operator", functools.partial(OperatorProcess, self, "operator")))

    def _go(self, work: Coroutine[Any, Any, None]) -> None:
        self._background.append(asyncio.create_task(work))

    async def _supervise(self, name: str, make: Callable[[Points, Faults], Process]) -> None:
        first = True
        while True:
            hurt = name == self.plan.who
            points = self.plan.points(self) if hurt and first else Points()
            points.spared = lambda: self.spared
            # Trouble with requests outlives a process.
            faults = self.plan.faults(self) if hurt else Faults()
            if hurt and first:
                self.first = points
            first = False
            process = make(points, faults)
            if isinstance(process, AgentProcess):
                self.agents[process.node] = process
            await process.live()
            self.deaths += 1
            if self.plan.power and isinstance(process, AgentProcess):
                self.reboot(process.node)
            await asyncio.sleep(1.0)

    async def stop(self) -> None:
        """The end of everything."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for container in self.containers.values():
            container.end()
        await asyncio.gather(*(x.task for x in self.containers.values()), return_exceptions=True)
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for left in rest:
            left.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def raise_failures(self) -> None:
        """A part of the simulation that has failed fails the test, and so does what must never be."""
        assert not self.broken, self.broken[0]
        for task in self._background:
            if task.done() and not task.cancelled():
                task.result()
        for container in self.containers.values():
            if container.task.done() and not container.task.cancelled():
                container.task.result()
            for engine in container.engines:
                if engine.task is not None and engine.task.done() and not engine.task.cancelled():
                    engine.task.result()

    # --- scheduler, kubelet ---

    async def _scheduler(self) -> None:
        while True:
            moved = self.server.moved
            for pod in self.server.seen(PODS):
                if not pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"]:
                    self._bind(pod)
            if moved is self.server.moved:
                await moved.wait()

    def _bind(self, pod: Object) -> None:
        wanted = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
        terms = wanted.get("preferredDuringSchedulingIgnoredDuringExecution") or []
        liked = {term["preference"]["matchFields"][0]["values"][0] for term in terms if "matchFields" in term["preference"]}
        there: list[str] = [x["metadata"]["name"] for x in self.server.all(NODES)]
        node = min(there, key=lambda name: (name not in liked, name))

        def change(obj: Object) -> None:
            obj["spec"]["nodeName"] = node
            self._condition(obj, "PodScheduled", "True")

        self.server.edit(PODS, pod["metadata"]["name"], pod["metadata"]["namespace"], change)

    def _condition(self, obj: Object, kind: str, status: str) -> None:
        found = obj.setdefault("status", {}).setdefault("conditions", [])
        for item in found:
            if item["type"] == kind:
                if item["status"] != status:
                    item.update(status=status, lastTransitionTime=rfc3339(self.now()))
                return
        found.append({"type": kind, "status": status, "lastTransitionTime": rfc3339(self.now())})

    async def _kubelet(self, node: str) -> None:
        while True:
            for pod in self.server.seen(PODS):
                if pod["spec"].get("nodeName") == node:
                    self._sync_pod(pod, node)
            await asyncio.sleep(0.5)

    def _sync_pod(self, pod: Object, node: str) -> None:
        meta, uid = pod["metadata"], pod["metadata"]["uid"]
        if meta["namespace"] == SYSTEM:
            agent = self.agents.get(node)
            ready = agent is not None and not agent.points.dead and agent.agent is not None and agent.agent.ready
            if is_true(pod, "Ready") != ready:
                self.server.edit(PODS, meta["name"], SYSTEM, lambda x: self._condition(x, "Ready", "True" if ready else "False"))
            return
        container = self.containers.get(uid)
        if "deletionTimestamp" in meta:
            if container is not None and container.code is None:
                container.send(signal.SIGTERM)
                return
            self.containers.pop(uid, None)
            shutil.rmtree(os.path.join(self.kubelet_dir(node), "pods", uid), ignore_errors=True)
            with contextlib.suppress(Exception):
                self.server.delete(PODS, meta["name"], meta["namespace"], uid=uid, grace=0)
            return
        if container is None or container.code is not None:
            os.makedirs(control_path(self.kubelet_dir(node), uid), exist_ok=True)
            container = self.containers[uid] = Container(self, pod)

        gate = is_true(pod, c.CONDITION_VERIFIED)
        self._says(pod, {"ContainersReady": container.serving, "Ready": container.serving and gate})

    def _says(self, pod: Object, conditions: dict[str, bool]) -> None:
        """The kubelet writes what has changed."""
        if all(is_true(pod, k) == v for k, v in conditions.items()) and pod["status"]["phase"] == "Running":
            return

        def change(obj: Object) -> None:
            obj["status"] |= {"phase": "Running", "podIP": "10.0.0.1"}
            for kind, status in conditions.items():
                self._condition(obj, kind, "True" if status else "False")

        self.server.edit(PODS, pod["metadata"]["name"], pod["metadata"]["namespace"], change)

    # --- what must never be true ---

    def check(self) -> None:
        """Called at every change of the API."""
        live = 0
        for (plural, _, _), pod in self.server.objects.items():
            if plural != PODS.plural or pod["metadata"].get("namespace") != NAMESPACE:
                continue
            if "deletionTimestamp" not in pod["metadata"]:
                live += 1
            if not is_true(pod, "Ready"):
                continue
            container = self.containers.get(pod["metadata"]["uid"])
            for engine in container.live if container is not None else ():
                if engine.serving and engine.oracle != answer(container.image):  # type: ignore[union-attr]
                    self.broken.append(f"a Ready replica answers wrongly: {pod['metadata']['name']}")
        if live > self.wanted:
            self.broken.append(f"{live} replicas, {self.wanted} at most")

    # --- the user ---

    def apply(self, **spec: Any) -> None:
        """Create the claim, or change it."""
        full = {"model": "/m", "image": "one", "replicas": 1, **spec}
        surge = (full.get("rollout") or {}).get("maxSurge", 1)
        self.wanted = max(self.wanted, full["replicas"] + surge)
        if self.server.edit(SNAPSHOTS, NAME, NAMESPACE, lambda x: x.update(spec=full)) is None:
            self.server.add(SNAPSHOTS, {"metadata": {"name": NAME, "namespace": NAMESPACE}, "spec": full})

    def delete(self) -> None:
        """Delete the claim."""
        self.server.delete(SNAPSHOTS, NAME, NAMESPACE)

    def crash(self) -> None:
        """Every engine dies."""
        for container in self.containers.values():
            for engine in container.live:
                engine.alive, engine.serving, engine.exit_code = False, False, 1
                container.changed.set()

    def reboot(self, node: str) -> None:
        """The node loses its power, and comes back."""
        self.boot += 1
        self.kill_containers(node)
        lose_unsynced(str(self.root / node))

    def kill_containers(self, node: str) -> None:
        """SIGKILL to PID 1 of every container of a node; the kubelet starts them again."""
        for container in self.containers.values():
            if container.pod["spec"]["nodeName"] == node and container.code is None:
                container.kill_all(137)
                container.end()

    def delete_pods(self) -> None:
        """By hand."""
        for pod in self.server.all(PODS):
            if pod["metadata"]["namespace"] == NAMESPACE:
                self.server.delete(PODS, pod["metadata"]["name"], NAMESPACE)

    def delete_contents(self) -> None:
        """By hand."""
        for content in self.server.all(CONTENTS):
            self.server.delete(CONTENTS, content["metadata"]["name"])

    async def rest(self, *, quiet_s: float = 45.0, limit_s: float = 3000.0) -> None:
        """Until nothing has been written for so long: longer than a resync and a cold start."""
        until = self.loop.time() + limit_s
        while True:
            before = self.server.version
            await asyncio.sleep(quiet_s)
            self.raise_failures()
            if self.server.version == before:
                return
            assert self.loop.time() < until, f"never at rest: {self.server.writes[-12:]}"

    # --- what there is in the end ---

    def outcome(self) -> dict[str, Any]:
        """Everything that must be the same, whoever died on the way. Names that are random are left out."""
        claim = self.server.get(SNAPSHOTS, NAME, NAMESPACE)
        pods = [x for x in self.server.all(PODS) if x["metadata"]["namespace"] == NAMESPACE]
        status = (claim or {}).get("status") or {}
        return {
            "conditions": {x["type"]: (x["status"], x["reason"]) for x in status.get("conditions") or []},
            "ready": status.get("ready"),
            "pods": sorted(_pod(x) for x in pods),
            "engines": sorted((len(x.live), x.serving, any(e.stopped for e in x.live)) for x in self.containers.values()),
            "contents": sorted(_contents(x) for x in self.server.all(CONTENTS)),
            "services": len(self.server.all(SERVICES)),
            "disk": sorted(self._disk()),
            "claims": claim is not None,
        }

    def _disk(self) -> Iterator[str]:
        """What lies on the nodes' disks, random parts left out."""
        for node in self.nodes:
            store = Path(self.store_dir(node))
            for directory in ("artifacts", "tmp"):
                yield from (f"{node} {directory}" for _ in (store / directory).iterdir())
            yield from (f"{node} ledger{x.suffix}" for x in (store / "agent" / "ledger").iterdir())
            pods = Path(self.kubelet_dir(node)) / "pods"
            yield from (f"{node} control {x.name}" for x in pods.rglob("*.json") if x.name != protocol.HOLD)
            yield from (f"{node} control litter" for _ in pods.rglob("*.tmp"))


def _pod(pod: Object) -> tuple[Any, ...]:
    report = PodReport.model_validate_json(pod["metadata"]["annotations"].get(c.ANNOTATION_REPORT, "{}"))
    conditions = {x["type"]: x["status"] for x in pod["status"]["conditions"]}
    image = pod["spec"]["containers"][0]["image"]
    return image, report.start, report.state, conditions.get("Ready"), conditions.get(c.CONDITION_VERIFIED)


def _contents(content: Object) -> tuple[str, ...]:
    found = (content.get("status") or {}).get("conditions") or []
    return tuple(sorted(x["type"] for x in found if x["status"] == "True"))


# --- running one -----------------------------------------------------------------------------------------------------

Scenario = Callable[[World], Awaitable[None]]


class Live(Protocol):
    """See `lived`; the place is chosen already."""

    def __call__(self, scenario: Scenario, plan: Plan | None = None) -> World: ...


def lived(root: Path, scenario: Scenario, plan: Plan | None = None) -> World:
    """The scenario in a cluster of its own, in a directory that is gone afterwards. Raises what failed in any part."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    made: list[World] = []

    async def main() -> None:
        x = World(root, plan or Plan())
        made.append(x)
        await x.start()
        try:
            await scenario(x)
            x.raise_failures()
        finally:
            await x.stop()

    with environment(root, lambda: made[0]):
        run(main)
    shutil.rmtree(root, ignore_errors=True)
    return made[0]


class _Tracebacks(logging.Handler):
    """Whatever operator and agent survive although they do not know what it is, is a fault of theirs: each logs it with a traceback."""

    def __init__(self, world: Callable[[], World]) -> None:
        super().__init__(logging.ERROR)
        self.world = world

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, OSError):
            last = traceback.extract_tb(error.__traceback__)[-1]
            self.world().broken.append(f"{record.getMessage()}: {error!r} at {os.path.basename(last.filename)}:{last.lineno}")


@contextlib.contextmanager
def environment(root: Path, world: Callable[[], World]) -> Iterator[None]:
    """The hooks, and control files whose times are those of the world."""
    with pytest.MonkeyPatch.context() as patch, patched(str(root)), contextlib.ExitStack() as at_end:
        tracebacks = _Tracebacks(world)
        logging.getLogger().addHandler(tracebacks)
        at_end.callback(logging.getLogger().removeHandler, tracebacks)
        real = protocol.write

        def write(dir_fd: int, name: str, value: Any, **kwargs: Any) -> bool:
            try:
                return real(dir_fd, name, value, **kwargs)
            finally:
                now = world().now()
                with acting(None), contextlib.suppress(FileNotFoundError):
                    os.utime(name, (now, now), dir_fd=dir_fd)

        patch.setattr(protocol, "write", write)
        patch.setattr(procs, "find", lambda _: object())  # processes are the containers' business (`PidOne.look`)
        patch.setattr(store, "boot_id", lambda: f"boot-{world().boot}")
        # The real one belongs to the real clock: passes would look stuck, or never old enough.
        patch.setattr(time, "monotonic", lambda: asyncio.get_running_loop().time() if _running() else 0.0)
        yield


def _running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
