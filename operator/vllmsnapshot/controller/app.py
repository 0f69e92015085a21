"""The operator process: wiring and `main()`.

kopf is the event source and nothing more: its handlers put keys on the work queue. It adds no finalizers, writes no
annotations and posts no events. If one of its watches dies, it ends, and so does the process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import kopf

from .. import __version__, logs
from ..api import constants as c
from ..kube import CONTENTS, NODES, PODS, SNAPSHOT_NODES, SNAPSHOTS, ApiError, Kube
from .health import Health
from .login import Login, source
from .metrics import Metrics
from .observe import Key
from .reconcile import Reconciler
from .workqueue import Wait, WorkQueue

log = logging.getLogger("vllmsnapshot.operator")

RESYNC: Key = ("", "")
"""The key that stands for: look at every claim, and at what belongs to none."""

STUCK_S = 300.0
"""A pass takes seconds; a queue that has not moved for this long is stuck (a request has a limit of 30 s)."""


@dataclass(frozen=True)
class Options:
    """Settings of the process."""

    agent_namespace: str
    namespaces: tuple[str, ...] = ()
    health_port: int = 8080
    resync_s: float = 30.0
    workers: int = 4
    metrics: bool = True
    kubeconfig: str | None = None
    log_level: str = "INFO"
    log_json: bool = False


class Operator:
    """The running operator: queue, workers, resync, health and the event source."""

    def __init__(self, kube: Kube, options: Options, *, reconciler: Reconciler | None = None) -> None:
        self.options = options
        self.queue: WorkQueue[Key] = WorkQueue()
        self.health = Health()
        self.metrics = Metrics()
        self.metrics.attach(kube)
        self.metrics.watch(self.queue, lambda: time.monotonic() - self._resynced)
        self.reconciler = reconciler or Reconciler(kube, options.agent_namespace, metrics=self.metrics)
        self._kube = kube
        self._login = Login(source(options.kubeconfig))
        self._awaited = "it is not asked yet"
        self._watching = False
        self._ended = False
        self._resynced = time.monotonic()
        self.health.live = {"watch": self._check_watch, "queue": self._check_queue, "resync": self._check_resync}
        self.health.ready = {"started": self._check_started, "credentials": self._check_credentials}
        self.health.exposition = self.metrics.exposition if options.metrics else None

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set or the watch ends, whatever ended it: never go on blind. Raises what made a part fail."""
        await self.health.start(self.options.health_port)
        try:
            if not await self._wait_for_api(stop):
                return
            async with asyncio.TaskGroup() as group:
                handle = self.metrics.timed(lambda key: "resync" if key == RESYNC else "snapshot", self.handle, Wait)
                background = [group.create_task(self.queue.work(handle)) for _ in range(self.options.workers)]
                background.append(group.create_task(self._resync()))
                self._watching = True
                try:
                    await self._watch(stop)
                finally:
                    self._ended = True
                    for task in background:
                        task.cancel()
        finally:
            await self.health.stop()

    async def handle(self, key: Key) -> float | None:
        """What a worker does with a key."""
        if key != RESYNC:
            with logs.about(snapshot="/".join(key)):
                return await self.reconciler.reconcile(key)
        found = await self.reconciler.observer.keys(self.options.namespaces)
        for item in found:
            self.queue.add(item)
        self.metrics.keep(found)
        await self.reconciler.housekeep()
        self._resynced = time.monotonic()
        return None

    async def _resync(self) -> None:
        while True:
            self.queue.add(RESYNC)
            await asyncio.sleep(self.options.resync_s)

    async def _wait_for_api(self, stop: asyncio.Event) -> bool:
        """Wait until everything that is watched can be listed: kopf would go on for ever without a resource it does not find."""
        while not stop.is_set():
            try:
                for resource in (SNAPSHOTS, CONTENTS, SNAPSHOT_NODES, NODES, PODS):
                    namespace = self.options.namespaces[0] if self.options.namespaces and resource.namespaced else None
                    await self._kube.request("GET", resource.path(namespace), query={"limit": 1})
                return True
            except ApiError as e:
                log.warning("waiting for the API: %s", e)
                self._awaited = str(e)
                self._resynced = time.monotonic()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), 2.0)
        return False

    # --- event source ------------------------------------------------------------------------------------------------

    async def _watch(self, stop: asyncio.Event) -> None:
        """kopf, until `stop` is set or SIGTERM or SIGINT come (it takes their handlers over). Raises what killed a watcher."""
        flag = asyncio.Event()
        async with _forward(stop, flag):
            await kopf.operator(
                registry=self._registry(),
                settings=_settings(),
                standalone=True,
                clusterwide=not self.options.namespaces,
                namespaces=list(self.options.namespaces),
                stop_flag=flag,
            )
        log.info("the watch has ended")

    def _registry(self) -> kopf.OperatorRegistry:
        """Hints only: each handler puts a key on the queue. A hint that is lost is made up for by the resync."""
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        async def login(**kwargs: Any) -> kopf.ConnectionInfo:
            return await self._login(**kwargs)

        @kopf.on.event(c.GROUP, c.VERSION, SNAPSHOTS.plural, registry=registry)
        async def snapshot_changed(namespace: str | None, name: str | None, **_: Any) -> None:
            self.queue.add((namespace or "", name or ""))

        @kopf.on.event("", "v1", PODS.plural, registry=registry)
        async def pod_changed(body: Mapping[str, Any], **_: Any) -> None:
            self.queue.add(self.key_of_pod(body) or RESYNC)

        @kopf.on.event(c.GROUP, c.VERSION, CONTENTS.plural, registry=registry)
        async def content_changed(spec: Mapping[str, Any], **_: Any) -> None:
            ref = spec.get("snapshotRef") or {}
            self.queue.add((ref.get("namespace", ""), ref.get("name", "")))

        @kopf.on.event("", "v1", NODES.plural, registry=registry)
        async def node_changed(event: Mapping[str, Any], **_: Any) -> None:
            if event["type"] in ("ADDED", "DELETED"):  # a node's heartbeat changes nothing for us
                self.queue.add(RESYNC)

        return registry

    def key_of_pod(self, pod: Mapping[str, Any]) -> Key | None:
        """The claim that controls this pod; None for an agent's pod, which concerns all of them."""
        meta = pod.get("metadata") or {}
        for ref in meta.get("ownerReferences") or []:
            if ref.get("controller") and ref.get("kind") == SNAPSHOTS.kind and ref.get("apiVersion") == c.API_VERSION:
                return (meta.get("namespace", ""), ref.get("name", ""))
        return None

    # --- health ------------------------------------------------------------------------------------------------------

    def _check_started(self) -> str | None:
        return None if self._watching else f"the API is not reachable yet, or the CRDs are missing: {self._awaited}"

    def _check_credentials(self) -> str | None:
        # No reason to be restarted while it may be a matter of seconds. If it lasts, the resync does not get through either.
        return self._login.trouble() if self._kube.refused_since is None else "the API server answers 401 to our requests"

    def _check_watch(self) -> str | None:
        return "kopf has ended" if self._ended else None

    def _check_queue(self) -> str | None:
        stuck = self.queue.stuck_s() if self._watching else 0.0
        return f"a key has been waiting or running for {stuck:.0f} s" if stuck > STUCK_S else None

    def _check_resync(self) -> str | None:
        age = time.monotonic() - self._resynced
        return f"the last complete resync was {age:.0f} s ago" if age > STUCK_S + 5 * self.options.resync_s else None


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    # The kinds are known and checked before; no right to list CRDs and namespaces is needed.
    settings.scanning.disabled = True
    settings.watching.server_timeout = 300
    settings.networking.request_timeout = 30
    # Only pods that may concern us cross the wire: our replicas, and agents (where another component of that name exists
    # beside them, its events merely cause a resync).
    roles = f"{c.ROLE_REPLICA},{c.COMPONENT_AGENT}"
    settings.watching.label_selectors["pods"] = f"{c.LABEL_COMPONENT} in ({roles})"
    return settings


@contextlib.asynccontextmanager
async def _forward(source: asyncio.Event, target: asyncio.Event) -> AsyncIterator[None]:
    """Set `target` when `source` is set."""

    async def wait() -> None:
        await source.wait()
        target.set()

    task = asyncio.create_task(wait())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


# --- process -----------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None, env: Mapping[str, str] = os.environ) -> Options:
    """Options from flags; what is not given comes from the environment, then from the default."""
    parser = argparse.ArgumentParser("vllmsnapshot-operator", description="Starts vLLM replicas from a process snapshot.")
    parser.add_argument("--version", action="version", version=__version__)
    add = parser.add_argument
    add(
        "--agent-namespace",
        default=env.get("POD_NAMESPACE", "vllmsnapshot-system"),
        help="namespace of the agent pods [$POD_NAMESPACE]",
    )
    add(
        "--namespace",
        action="append",
        default=[item for item in env.get("WATCH_NAMESPACES", "").split(",") if item],
        help="watch only this namespace; may be repeated; all by default [$WATCH_NAMESPACES, comma-separated]",
    )
    add("--health-port", type=int, default=int(env.get("HEALTH_PORT", "8080")), help="/healthz, /readyz, /metrics [$HEALTH_PORT]")
    add("--metrics", default=env.get("METRICS", "on"), choices=["on", "off"], help="whether /metrics is served [$METRICS]")
    add("--resync", type=float, default=float(env.get("RESYNC_SECONDS", "30")), help="seconds between passes [$RESYNC_SECONDS]")
    add("--workers", type=int, default=int(env.get("WORKERS", "4")), help="claims reconciled at the same time [$WORKERS]")
    add("--kubeconfig", default=None, help="outside of a cluster; $KUBECONFIG by default")
    add("--log-level", default=env.get("LOG_LEVEL", "INFO"), choices=["DEBUG", "INFO", "WARNING", "ERROR"], help="[$LOG_LEVEL]")
    add("--log-format", default=env.get("LOG_FORMAT", "text"), choices=["text", "json"], help="[$LOG_FORMAT]")
    args = parser.parse_args(argv)
    if args.resync <= 0 or args.workers <= 0:
        parser.error("--resync and --workers must be positive")
    return Options(
        agent_namespace=args.agent_namespace,
        namespaces=tuple(args.namespace),
        health_port=args.health_port,
        resync_s=args.resync,
        workers=args.workers,
        metrics=args.metrics == "on",
        kubeconfig=args.kubeconfig,
        log_level=args.log_level,
        log_json=args.log_format == "json",
    )


async def serve(options: Options) -> None:
    """Run until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    # A pod starts this process with both blocked, lest one be lost until now (chart, operator.yaml).
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    if options.kubeconfig:
        os.environ["KUBECONFIG"] = options.kubeconfig
    # kopf names itself by the user's login name otherwise, and the image's user has none.
    os.environ.setdefault("POD_ID", socket.gethostname())
    async with await Kube.connect(options.kubeconfig) as kube:
        await Operator(kube, options).run(stop)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit status 1 when a part that must not end has ended."""
    options = parse(argv)
    logs.configure(options.log_level, "json" if options.log_json else "text", component="operator")
    log.info("vllmsnapshot-operator %s, agents in namespace %s", __version__, options.agent_namespace)
    try:
        asyncio.run(serve(options))
    except Exception:
        log.exception("the operator ends")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
