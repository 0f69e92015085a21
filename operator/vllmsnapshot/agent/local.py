"""`nodeops.NodeOps` on the real node: pods become containers, orders become captures."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from vllmsnapshot_child.protocol import Oracle, ProtocolError

from ..api import constants as c
from ..api.constants import Reason
from . import breakeven, capture, cuda, doctor, gpu_doctor, gpu_facts, identity, restore, seccomp
from .accelerator import Accelerator, Cpu
from .config import Config
from .containers import Container, find, kill_all
from .criu import Criu, CriuError
from .errors import AgentError, CaptureError, RestoreError, StoreError
from .nodeops import Digested, Health, Order, PodRef, Revived, Shelf, Stored
from .space import Usage
from .store import Manifest, Store, boot_id

log = logging.getLogger(__name__)

LAST_PID = 999
"""A tree that starts above it never meets the few processes that another container has by then."""


class LocalOps:
    """Node operations on this node."""

    def __init__(self, config: Config, *, accelerator: Accelerator | None = None, proc: Path = Path("/proc")) -> None:
        """Raises StoreError if the store cannot be used. The caller must be the only agent of the node: see `app.hold_node`."""
        self._kubelet_dir = Path(config.kubelet_dir)
        self._criu = Criu(prefix=Path(config.criu_prefix), cgroup_root=Path(config.cgroup_root))
        self._wanted = config.accelerator
        self._seccomp = config.seccomp_profile == "install"
        self._accelerator = accelerator or (cuda.Cuda() if config.accelerator == "cuda" else Cpu())
        self._gpu_said = ""
        self._proc = proc
        self.store = Store(Path(config.store_dir), quota=config.quota_bytes, min_free=config.min_free_bytes)
        self.store.recover()

    # --- node --------------------------------------------------------------------------------------------------------

    def doctor(self) -> Health:
        """Examine the node. A driver that has come since the last time is used from now on."""
        self._accelerator, seen = cuda.survey(self._accelerator, self._wanted, proc=self._proc)
        more = [
            ("seccomp", lambda: seccomp.check(self._kubelet_dir, wanted=self._seccomp)),
            *gpu_doctor.checks(seen),
        ]
        checks = doctor.examine(self._criu, self.store.root, self._kubelet_dir, proc=self._proc, more=more)
        message, gpu = doctor.trouble(checks), doctor.trouble(checks, gpu=True)
        if gpu not in ("", self._gpu_said):
            log.warning("replicas with a GPU start cold: %s", gpu)
        self._gpu_said = gpu
        health = Health(capable=not message, message=message, checks=checks, gpu=gpu if gpu_doctor.present(seen) else None)
        try:
            version = self._criu.version()
            accelerator = gpu_facts.describe(seen.facts) if seen.facts is not None else {}
            facts = identity.node_facts(version, self._criu.program, accelerator=accelerator, proc=self._proc)
        except (OSError, CriuError, StoreError) as e:
            return replace(health, capable=False, message=message or str(e))
        return replace(
            health,
            environment=facts,
            boot_id=boot_id(),
        )

    # --- artifacts ---------------------------------------------------------------------------------------------------

    def shelf(self) -> Shelf:
        """Look through the store. Raises StoreError."""
        found = self.store.read()
        for name, error in found.unreadable.items():
            log.warning("artifact %s: %s", name, error)
        return Shelf(artifacts=[_stored(m) for m in found.manifests], usage=found.usage)

    def usage(self) -> Usage:
        """What the store takes, and what there is. Raises StoreError."""
        return self.store.usage()

    def artifact(self, content: str) -> Stored | None:
        """The complete artifact of that content, or None."""
        try:
            return _stored(self.store.manifest(content))
        except StoreError as e:
            if e.reason != Reason.ARTIFACT_MISSING:
                log.warning("artifact %s: %s", content, e)
            return None

    def verify(self, content: str) -> Digested:
        """Compute every digest of the artifact again. Raises StoreError."""
        with self.store.open(content) as artifact:
            files = artifact.verify(full=True, background=True)
            return Digested(files=files, bytes=sum(file.size for file in artifact.manifest.files.values()))

    def held(self) -> Sequence[str]:
        """Contents that have files in the store, readable or not."""
        return self.store.names()

    def sweep(self) -> None:
        """Remove what failed removals have left in the store."""
        self.store.sweep()

    def delete_artifact(self, content: str) -> None:
        """Remove the files of a content. Waits for restores that read them."""
        self.store.delete(content)

    # --- containers --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _container(self, pod: PodRef, error: type[AgentError], reason: str) -> Iterator[Container]:
        directory = self._kubelet_dir / "pods" / pod.uid / "volumes" / "kubernetes.io~empty-dir" / c.CONTROL_VOLUME
        container = find(pod.uid, directory, proc=self._proc)
        if container is None:
            raise error(reason, f"pod {pod.namespace}/{pod.name} has no running {c.CONTAINER} container")
        with container:
            yield container

    def raise_pids(self, pod: PodRef) -> None:
        """Let the next process of the container get a high PID."""
        with self._container(pod, RestoreError, Reason.RESTORE_FAILED) as container:
            self._criu.raise_pids(container, LAST_PID)

    def restore(self, pod: PodRef, content: str, timeout_s: float, wanted: Callable[[], None]) -> Revived:
        """Bring the captured tree up in the pod's container."""
        with self._container(pod, RestoreError, Reason.RESTORE_DIED) as container:
            # Asked with the container pinned: what `wanted` finds true of it stays true of this one.
            request = restore.RestoreRequest(content=content, timeout_s=timeout_s, wanted=wanted)
            result = restore.restore(container, request, self.store, self._criu, self._accelerator)
            return Revived(pid=result.pid, bytes=result.manifest.memory_bytes, phases=result.phases)

    def clear(self, pod: PodRef) -> None:
        """Kill everything in the container but PID 1 and wait until it is gone."""
        with self._container(pod, RestoreError, Reason.RESTORE_DIED) as container, contextlib.suppress(ProcessLookupError):
            self._before_end(container)
            restore.clear(container)

    def _before_end(self, container: Container) -> None:
        """Make the tree safe to kill; it is killed in any case."""
        try:
            self._accelerator.before_terminate(container.descendants())
        except ProcessLookupError:
            pass  # it has ended by itself
        except (OSError, AgentError):
            log.exception("before the end of process %d", container.pid)

    def end(self, pod: PodRef, older_than_s: float) -> None:
        """Kill PID 1 of the container if it has run for longer than that. By the clock since boot, which nobody sets."""
        with contextlib.suppress(RestoreError), self._container(pod, RestoreError, Reason.RESTORE_DIED) as container:
            started = container.init.start_time / os.sysconf("SC_CLK_TCK")
            if time.clock_gettime(time.CLOCK_BOOTTIME) - started > older_than_s:
                self._before_end(container)
                signal.pidfd_send_signal(container.pidfd, signal.SIGKILL)

    def retire(self, pod: PodRef, timeout_s: float, wanted: Callable[[], None]) -> None:
        """Let go of the GPU, then kill everything in the container but PID 1. Raises AgentError if the GPU is not let go."""
        with contextlib.suppress(ProcessLookupError), self._container(pod, RestoreError, Reason.RESTORE_DIED) as container:
            wanted()
            self._accelerator.before_terminate(container.descendants(), timeout_s=timeout_s)
            wanted()
            kill_all(container)

    def capture(self, pod: PodRef, order: Order, room: Callable[[int], None], on_resumed: Callable[[], None]) -> Stored:
        """Dump the tree at the barrier."""
        with self._container(pod, CaptureError, Reason.SOURCE_GONE) as container:
            request = capture.CaptureRequest(
                content=order.content,
                timeout_s=order.timeout_s,
                max_bytes=order.max_bytes,
                # vLLM's own snapshot server leaves gloo's listeners open, on the loopback address of the pod's network.
                allow_loopback_listeners=order.foreign and not order.host_network,
                host_network=order.host_network,
                extra={
                    "content_uid": order.content_uid,
                    "identity": order.identity,
                    "snapshot_uid": order.snapshot_uid,
                    "oracle": order.oracle.to_dict(),
                    "foreign": order.foreign,
                    "weights": order.weights,
                    "weights_reason": order.weights_reason,
                    "cold_s": order.cold_s,
                },
            )
            with self._ended_if_lost(container):
                result = capture.capture(
                    container, request, self.store, self._criu, self._accelerator, room=room, on_resumed=on_resumed
                )
            return _stored(result.manifest)

    @contextlib.contextmanager
    def _ended_if_lost(self, container: Container) -> Iterator[None]:
        """End a replica that lost its state on the GPU: it would wait for ever. The kubelet restarts the container."""
        try:
            yield
        except CaptureError as e:
            if e.reason == Reason.GPU_STATE_LOST:
                log.error("the replica is ended: %s", e)  # noqa: TRY400
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(container.pidfd, signal.SIGKILL)
            raise

    def resume(self, pod: PodRef) -> None:
        """Let a tree run on that an interrupted capture left stopped."""
        with self._container(pod, CaptureError, Reason.SOURCE_GONE) as container, contextlib.suppress(ProcessLookupError):
            capture.resume(container)
            with self._ended_if_lost(container):
                self._accelerator.after_dump(container.descendants())


def _stored(manifest: Manifest) -> Stored:
    """The manifest as deciders want it."""
    extra = manifest.extra
    oracle = None
    with contextlib.suppress(ProtocolError):
        oracle = Oracle.from_dict(extra.get("oracle"), "manifest: oracle")
    cold = extra.get("cold_s")
    return Stored(
        content=manifest.content,
        content_uid=str(extra.get("content_uid", "")),
        bytes=manifest.disk_bytes,
        digest=manifest.digest,
        captured_at=manifest.captured_at,
        oracle=oracle,
        phases=manifest.phases,
        environment=manifest.environment,
        foreign=extra.get("foreign") is True,
        weights=str(extra.get("weights", "")),
        weights_reason=str(extra.get("weights_reason", "")),
        cold_s=breakeven.plausible(cold) if isinstance(cold, int | float) else None,
    )
