"""The agent's process: watches, one task per pod, timers, the health endpoint. What is done is in `pods.py` and `contents.py`."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any

from aiohttp import web
from prometheus_client.metrics_core import Metric

from .. import logs
from ..api import constants as c
from ..api.types import VLLMSnapshotNodeStatus
from ..kube import CONTENTS, NODES, PODS, SNAPSHOT_NODES, ApiError, Kube, Object
from ..objects import label_value
from . import facts, report
from .cache import Cache
from .canary import Canary
from .config import Config, from_process
from .contents import Contents
from .errors import AgentError
from .ledger import Ledger
from .metrics import node_state
from .node import Ask, Node
from .nodeops import Health, NodeOps
from .outbox import Outbox
from .pods import Pods
from .removal import Removal
from .watcher import Watcher

log = logging.getLogger("vllmsnapshot.agent")

RETRY_S = 1.0
"""After an error in a pass (a full disk, the API server away where it is needed)."""
MIN_PAUSE_S = 0.005
"""Between two passes over one pod: a workload that scribbles in its control volume must not occupy the agent."""
COLLECT_S = 60.0
"""Between two searches for artifacts that no content stands for."""
AILING_S = 20.0
"""Between two examinations of a node that is not capable, which costs every start there: a disk that is full is often freed soon."""
NODE_PAUSE_S = 2.0
"""Least time between two writes of the node's status."""
NODE_RETRY_S = 10.0
"""After a refused one: nobody waits for it."""
REFUSED_S = 30.0
"""For how long every answer is a 401 before we are no longer ready. An API server that has just been started refuses for less; then all
starts of the node would be cold for nothing."""
STOP_S = 10.0
"""How long a stop waits for what is being done: most restores and freezes are over by then. Longer work is taken up by the next
agent from what is written; it cannot start before this one has ended."""

LABELS = f"{c.LABEL_MANAGED_BY}={c.MANAGED_BY}"


class Loop:
    """One task per key: `wake` runs `settle` once more, never twice at the same time. It returns when to run again (seconds)."""

    def __init__(self, settle: Callable[[str], Awaitable[float | None]], resync_s: float, alive: Callable[[str], bool]) -> None:
        self._settle = settle
        self._resync_s = resync_s
        self._alive = alive
        self._events: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.stopping = False

    def wake(self, key: str) -> None:
        """Look at `key` soon."""
        if self.stopping:
            return
        if key not in self._tasks:
            if not self._alive(key):
                return
            self._events[key] = asyncio.Event()
            self._tasks[key] = asyncio.create_task(self._run(key), name=key)
        self._events[key].set()

    async def _run(self, key: str) -> None:
        event = self._events[key]
        try:
            while self._alive(key) and not self.stopping:
                event.clear()
                try:
                    delay = await self._settle(key)
                except ApiError as e:
                    log.warning("%s: %s", key, e)
                    delay = e.retry_after_s or RETRY_S
                except (OSError, AgentError) as e:
                    # A disk that is full or broken stays so for a while: a line each time, and no more.
                    log.warning("%s: %s", key, e)
                    delay = RETRY_S
                except Exception:
                    log.exception("%s", key)
                    delay = RETRY_S
                since = time.monotonic()
                with contextlib.suppress(TimeoutError):
                    limit = self._resync_s if delay is None else min(delay, self._resync_s)
                    await asyncio.wait_for(event.wait(), max(limit, MIN_PAUSE_S))
                await asyncio.sleep(max(0.0, since + MIN_PAUSE_S - time.monotonic()))
        finally:
            self._tasks.pop(key, None)
            self._events.pop(key, None)

    async def stop(self, grace_s: float) -> None:
        """Take no new work; wait for what is being done, but not for long."""
        self.stopping = True
        for event in self._events.values():
            event.set()
        if self._tasks:
            _, late = await asyncio.wait(list(self._tasks.values()), timeout=grace_s)
            for task in late:
                log.warning("not finished: %s", task.get_name())
                task.cancel()


class Agent:
    """Everything put together. `run` until cancelled or told to `stop`."""

    def __init__(
        self,
        config: Config,
        ops: NodeOps,
        kube: Kube,
        ask: Ask,
        *,
        clock: Callable[[], float] = time.time,
        stop: asyncio.Event | None = None,
    ) -> None:
        """`stop`: what ends `run`, where the caller has it already."""
        self.config = config
        self.node = Node(
            name=config.node_name,
            kubelet_dir=config.kubelet_dir,
            ops=ops,
            kube=kube,
            ledger=Ledger(os.path.join(config.store_dir, "agent", "ledger")),
            pods=Cache(PODS, lambda x: str(x["metadata"]["uid"]), self._pod_changed),
            contents=Cache(CONTENTS, lambda x: str(x["metadata"]["name"]), self._content_changed),
            outbox=Outbox(),
            ask=ask,
            clock=clock,
        )
        self.metrics = self.node.metrics
        self.metrics.attach(kube)
        self.metrics.show(self._state)
        self.pods = Pods(self.node)
        self.removal = Removal(self.node)
        self.contents = Contents(self.node, self.removal)
        settle_pod = self.metrics.timed(lambda _: "pod", self._settle_pod)
        settle_content = self.metrics.timed(lambda _: "content", self._settle_content)
        self.pod_loop = Loop(settle_pod, config.resync_seconds, lambda uid: self.node.pods.get(uid) is not None)
        self.content_loop = Loop(settle_content, 60.0, lambda name: self.node.contents.get(name) is not None)
        self.node.wake_pod = self.pod_loop.wake
        self.node.wake_content = self.content_loop.wake
        self.node.wake_node = self._wake_node
        self.watcher = Watcher(self.pod_loop.wake)
        self._node_changed = asyncio.Event()
        self._stop = stop or asyncio.Event()
        self._examined = False
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself holds tasks weakly

    @property
    def ready(self) -> bool:
        """Whether pods of this node are answered: lists are in, the node is examined, nobody refuses us, no stop is under way."""
        synced = self.node.pods.synced.is_set() and self.node.contents.synced.is_set()
        # Without the kubelet's directory we see no container: better the operator answers for the node's replicas.
        seen = os.path.isdir(os.path.join(self.config.kubelet_dir, "pods"))
        return self._examined and synced and seen and not self.refused and not self._stop.is_set()

    @property
    def refused(self) -> bool:
        """Whether the API server has known us no more for too long: we hear of no new pod, and cannot report one."""
        since = self.node.kube.refused_since
        return since is not None and time.monotonic() - since > REFUSED_S

    def stop(self) -> None:
        """Begin the end of `run`."""
        self._stop.set()

    async def run(self) -> None:
        """Until `stop`. Raises OSError where the node lacks what nothing works without (the store, inotify)."""
        await self.node.thread(self.node.ledger.load)
        self.watcher.start()
        background = [
            asyncio.create_task(work, name=name)
            for name, work in (
                ("doctor", self._examine_for_ever()),
                ("pods", self._follow_pods()),
                ("contents", self._follow_contents()),
                ("collect", self._collect_for_ever()),
                ("node", self._report_node_for_ever()),
                ("store", self._every(self.config.resync_seconds, self._resync)),
            )
        ]
        try:
            async with health(self.config, self._handlers()):
                stop = asyncio.create_task(self._stop.wait())
                done, _ = await asyncio.wait([stop, *background], return_when=asyncio.FIRST_COMPLETED)
                for task in done - {stop}:
                    # None of these returns: what is left is a bug, and a restart is better than half an agent.
                    task.result()
        finally:
            self._stop.set()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await self.pod_loop.stop(STOP_S)
            await self.content_loop.stop(0.5)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.node.outbox.drain(), 1.0)
            self.node.outbox.stop()
            self.watcher.stop()
            self.node.pool.shutdown(wait=False, cancel_futures=True)

    # --- pods ---

    def _pod_changed(self, uid: str) -> None:
        obj = self.node.pods.get(uid)
        if obj is None:
            self.watcher.remove(uid)
            self.node.outbox.forget(f"pod/{uid}")
            self.pods.slots.leave(uid)
            self.metrics.forget(uid)
            self.pods.ages.forget(uid)
            self._later(self._pod_gone(uid))
            return
        if facts.ours(obj, self.node.name):
            self.metrics.reported(obj)
            self.watcher.add(uid, self.node.volumes.path(uid))
            self.pod_loop.wake(uid)

    async def _pod_gone(self, uid: str) -> None:
        await self.node.thread(self.node.ledger.drop_pod, uid)
        for obj in self.node.contents.all():
            spec = facts.content_spec(obj)
            if spec is not None and spec.source_pod.uid == uid:
                self.content_loop.wake(obj["metadata"]["name"])

    async def _settle_pod(self, uid: str) -> float | None:
        # Before the store and the node are known, every answer would be "cold": init waits ten seconds for a better one.
        if not (self._examined and self.node.contents.synced.is_set()):
            return 0.05
        obj = self.node.pods.get(uid)
        with logs.about(pod=f"{obj['metadata']['namespace']}/{obj['metadata']['name']}" if obj is not None else uid):
            return await self.pods.settle(uid)

    async def _settle_content(self, name: str) -> float | None:
        with logs.about(content=name):
            return await self.contents.settle(name)

    async def _resync(self) -> None:
        self.watcher.refresh()
        for uid in list(self.node.pods):
            self.pod_loop.wake(uid)

    # --- contents ---

    def _content_changed(self, name: str) -> None:
        obj = self.node.contents.get(name)
        if obj is None:
            self.node.outbox.forget(f"content/{name}")
            self.metrics.forget(name)
            return
        self.metrics.answered(obj)
        spec = facts.content_spec(obj)
        if spec is not None:
            self.pod_loop.wake(spec.source_pod.uid)
        if self._examined:
            self.content_loop.wake(name)

    async def _collect_for_ever(self) -> None:
        # Restores that an agent before us began in pods that are gone by now are nobody's failure.
        await self.node.pods.synced.wait()
        await self.node.contents.synced.wait()
        for name in self.node.ledger.contents():
            for attempt in self.node.ledger.entry(name, self._uid(name)).attempts:
                if attempt.outcome == "pending" and self.node.pods.get(attempt.pod) is None:
                    await self.node.thread(self.node.ledger.drop_pod, attempt.pod)
        await self._every(COLLECT_S, self.removal.collect)

    def _uid(self, content: str) -> str:
        obj = self.node.contents.get(content)
        return str(obj["metadata"]["uid"]) if obj is not None else ""

    # --- node ---

    def _wake_node(self) -> None:
        self._node_changed.set()

    async def _examine_for_ever(self) -> None:
        while True:
            try:
                self.node.health = await self.node.thread(self.node.ops.doctor)
                await self.node.refresh()
            except Exception as e:
                log.exception("the doctor failed")
                self.node.health = Health(capable=False, message=f"the examination of the node failed: {e}")
            if not self._examined:
                self._examined = True
                for name in list(self.node.contents):
                    self.content_loop.wake(name)
                for uid in list(self.node.pods):
                    self.pod_loop.wake(uid)
            self._wake_node()
            pause = self.config.doctor_seconds
            await asyncio.sleep(pause if self.node.health.capable else min(pause, AILING_S))

    async def _report_node_for_ever(self) -> None:
        while True:
            await self._node_changed.wait()
            self._node_changed.clear()
            try:
                await self._report_node()
            except ApiError as e:
                log.warning("the node's status is not written: %s", e)
                self._node_changed.set()
                await asyncio.sleep(NODE_RETRY_S)
            await asyncio.sleep(NODE_PAUSE_S)

    async def _report_node(self) -> None:
        n = self.node
        live = await n.kube.get(SNAPSHOT_NODES, n.name)
        if live is None or not live["metadata"].get("ownerReferences"):
            meta: Object = {"name": n.name, "labels": {c.LABEL_MANAGED_BY: c.MANAGED_BY}}
            owner = await n.kube.get(NODES, n.name)
            if owner is not None:
                # So that it goes with the node.
                meta["ownerReferences"] = [{"apiVersion": "v1", "kind": "Node", "name": n.name, "uid": owner["metadata"]["uid"]}]
            live = await n.kube.apply(SNAPSHOT_NODES, {"metadata": meta}, c.MANAGER_AGENT)
        try:
            old = VLLMSnapshotNodeStatus.model_validate(live.get("status") or {})
        except ValueError:
            old = VLLMSnapshotNodeStatus()
        new = report.node_status(n.health, n.usage, n.stored.values(), len(self.pods.slots), old, n.clock())
        if report.node_changed(old, new):
            body = {"metadata": {"name": n.name, "uid": live["metadata"]["uid"]}, "status": new.dump()}
            await n.kube.apply(SNAPSHOT_NODES, body, c.MANAGER_AGENT, subresource="status")

    # --- small parts ---

    async def _follow_pods(self) -> None:
        await self.node.pods.follow(self.node.kube, labels=LABELS, fields=f"spec.nodeName={self.node.name}")

    async def _follow_contents(self) -> None:
        await self.node.contents.follow(self.node.kube, labels=f"{c.LABEL_NODE}={label_value(self.node.name)}")

    async def _every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except (ApiError, OSError, AgentError) as e:
                log.warning("%s: %s", work.__name__, e)
            except Exception:
                log.exception("%s", work.__name__)
            await asyncio.sleep(seconds)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- health ---

    def _handlers(self) -> dict[str, Handler]:
        """/readyz: pods are answered; /metrics."""
        handlers: dict[str, Handler] = {"/readyz": self._readyz}
        if self.config.metrics == "on":
            handlers["/metrics"] = self._metrics
        return handlers

    async def _readyz(self, _request: web.Request) -> web.Response:
        if self.ready:
            return web.Response(text="ok\n")
        why = ": the API server refuses our credentials (401)" if self.refused else ""
        return web.Response(status=503, text=f"not ready{why}\n")

    async def _metrics(self, request: web.Request) -> web.Response:
        body, content_type = self.metrics.exposition(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    def _state(self) -> Iterable[Metric]:
        n = self.node
        candidates = n.candidates()
        return node_state(
            in_flight=len(self.pods.slots),
            artifacts={x.content: x.bytes for x in n.stored.values()},
            quarantined=[x.name for x in candidates if x.quarantined],
            slower=[x.name for x in candidates if x.slower is not None],
            capable=n.health.capable,
            usage=n.usage,
            room=n.room.left(n.usage),
            checks=n.health.checks,
            outbox=n.outbox.depth,
        )


class Hold:
    """The node, held against other agents: a lock on a file of the store, which the kernel lets go of when the process ends.

    Two agents meet when the kubelet was told to forget a pod whose process still ends (force deletion), or during a rollout.
    Taken before anything of the node is touched: what one writes looks to the other like the leftovers of a dead one.
    """

    def __init__(self, store_dir: str) -> None:
        """Raises OSError where the store cannot be written."""
        directory = os.path.join(store_dir, "agent")
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self._fd = os.open(os.path.join(directory, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def take(self) -> bool:
        """Whether the node is ours now."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._sign()
        return True

    def wait(self) -> None:
        """Until it is ours."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self._sign()

    def holder(self) -> str:
        """Who has it, as far as it has said so. For people."""
        with contextlib.suppress(OSError, ValueError):
            return f"another agent works on this node (process {int(os.pread(self._fd, 20, 0))}): waiting for its end"
        return "another agent works on this node: waiting for its end"

    def _sign(self) -> None:
        # Of no weight, and a full disk refuses it.
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)


async def hold_node(config: Config, stop: asyncio.Event) -> Hold | None:
    """The node for ourselves, or None if `stop` comes first. Until then we are alive and not ready, and touch nothing.

    Not ready: the other one may hang in its end for good, and the operator must then answer for the node's replicas.
    """
    held = Hold(config.store_dir)
    if held.take():
        return held
    reason = held.holder()
    log.warning("%s", reason)
    # A thread that is nobody's to wait for: it may hang as long as the other one does.
    ours = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait() -> None:
        held.wait()
        loop.call_soon_threadsafe(ours.set)

    threading.Thread(target=wait, name="hold", daemon=True).start()

    async def not_ready(_request: web.Request) -> web.Response:
        return web.Response(status=503, text=f"{reason}\n")

    ends = [asyncio.create_task(event.wait()) for event in (ours, stop)]
    async with health(config, {"/readyz": not_ready}):
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for task in ends:
        task.cancel()
    return held if ours.is_set() else None


Handler = Callable[[web.Request], Awaitable[web.Response]]


@contextlib.asynccontextmanager
async def health(config: Config, handlers: Mapping[str, Handler]) -> AsyncIterator[None]:
    """/healthz, which tells that the loop runs, and these. Unlike exec, an HTTP probe takes no process."""
    if not config.port:
        yield
        return

    async def healthz(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application()
    for path, handler in {"/healthz": healthz, **handlers}.items():
        app.router.add_get(path, handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, config.host or None, config.port).start()
        yield
    finally:
        await runner.cleanup()


async def run(config: Config, make: Callable[[Config], NodeOps]) -> None:
    """Wait for the node, connect, run, end on SIGTERM or SIGINT. `make` may touch the node."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if await hold_node(config, stop) is None:
        return
    ops = make(config)
    canary = Canary()
    async with await Kube.connect(config.kubeconfig or None) as kube:
        agent = Agent(config, ops, kube, canary.ask, stop=stop)
        try:
            await agent.run()
        finally:
            await canary.close()


def main() -> None:
    """Entry point of `vllmsnapshot-agent`."""
    from .local import LocalOps

    config = from_process()
    logs.configure(config.log_level, config.log_format, component="agent", node=config.node_name)
    code = 1
    try:
        asyncio.run(run(config, LocalOps))
        code = 0
    except Exception:
        log.exception("the agent ends")
    finally:
        logging.shutdown()
        # Threads may still wait for CRIU: what they do is either finished or taken up by the next agent.
        os._exit(code)
