"""The CUDA accelerator: moves the state of the GPU into the memory of its processes before a dump, and back.

The driver does the work (`cuCheckpointProcess*`), on behalf of a process that it is told the PID of. It is called from a helper
process that stays: initialising the driver costs seconds, once instead of once per call. A helper that hangs or dies is replaced;
the agent itself never loads the driver, so no driver can hang or crash it. One operation has a helper for itself: a second one is
started only while two operations overlap.

    RUNNING --lock--> LOCKED --checkpoint--> CHECKPOINTED --restore--> LOCKED --unlock--> RUNNING

What has been done is never remembered: every step, forward or back, asks the driver for the state first or afterwards, since a
helper that was killed tells nobody how far it got.

The helpers are kept in `driver_pool.py`; what runs in one, and the driver's interface, is in `driver.py`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ..api.constants import Reason
from ..environment import MEMORY_USED, PIDS, UUID
from . import namespaces
from .accelerator import Accelerator
from .driver import DRIVER_MINIMUM, NOT_INITIALIZED, OUT_OF_MEMORY, VGPU, DriverError
from .driver_pool import Helpers, Limits, OutOfTimeError, Session, UnusableError, Wait, readable
from .errors import AgentError, CaptureError, RestoreError
from .gpu_facts import DEVICE, Survey, describe, too_old

if TYPE_CHECKING:
    from .containers import Container, Process

log = logging.getLogger(__name__)

_T = TypeVar("_T")

MEMORY_MARGIN: Final = 128 << 20
"""Bytes of GPU memory to be free beside what the captured processes used."""

RUNNING, LOCKED, CHECKPOINTED, FAILED = 0, 1, 2, 3
STATES: Final = ("RUNNING", "LOCKED", "CHECKPOINTED", "FAILED", "CHECKPOINTING", "RESTORING")
"""CUprocessState; the last two occur with custom storage only, which is not used here."""


# --- the accelerator -------------------------------------------------------------------------------------------------


class Cuda:
    """GPUs of NVIDIA. One for the whole agent; its methods may be called from several threads."""

    name = "cuda"

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        proc: Path = Path("/proc"),
        env: Mapping[str, str] | None = None,
        wait: Wait = readable,
        same_file: Callable[[int, int, int, int], bool] = namespaces.same_open_file,
    ) -> None:
        """`env` is the helpers' environment, by default the agent's. Starts nothing."""
        self.helpers = Helpers(dict(os.environ if env is None else env), limits or Limits(), wait)
        self._same_file = same_file
        self._limits = limits or Limits()
        self._proc = proc
        self._mutex = threading.Lock()
        self._moved: set[tuple[int, int]] = set()
        self._lost: dict[tuple[int, int], str] = {}

    def close(self) -> None:
        """End the helpers that wait for work."""
        self.helpers.close()

    # --- facts -------------------------------------------------------------------------------------------------------

    def examine(self) -> Mapping[str, Any]:
        """Driver and GPUs as `Driver.Facts` tells them. Raises DriverError if the driver cannot be used."""
        with self.helpers.session() as session:
            facts: Mapping[str, Any] = session.call("Facts", self._limits.query)
            return facts

    def facts(self) -> Mapping[str, str]:
        """Driver and GPUs of the node. Raises AgentError."""
        try:
            return describe(self.examine())
        except DriverError as e:
            raise AgentError(Reason.GPU_UNAVAILABLE, str(e)) from e

    def claims(self, device: str) -> bool:
        """The GPUs, and the driver's control devices."""
        return device.startswith("/dev/nvidia")

    # --- capture -----------------------------------------------------------------------------------------------------

    def record(self, processes: Sequence[Process], *, timeout_s: float = math.inf) -> Mapping[str, str]:
        """The GPU of the processes and the memory they use there. Raises CaptureError where they cannot be captured."""
        try:
            with self.helpers.session(timeout_s) as session:
                users = self._users(session, processes)
                if not users:
                    return {}
                facts = session.call("Facts", self._limits.query, pids=[p.pid for p in users])
        except DriverError as e:
            raise CaptureError(_reason(e, Reason.GPU_CHECKPOINT_FAILED, Reason.CAPTURE_TIMEOUT), str(e)) from e
        self._alone(processes)
        device = self._supported(facts, {n for p in users for n in self._held(p)}, CaptureError)
        used = device["used"]
        pids = " ".join(str(n) for n in sorted(p.ns_pid for p in users))
        return {UUID: device["uuid"], PIDS: pids, **({} if used is None else {MEMORY_USED: str(used)})}

    def _alone(self, processes: Sequence[Process]) -> None:
        """Insist that no two processes have the driver open through one file. Raises CaptureError.

        Memory that is shared by CUDA IPC shows in this way: the one process hands its /dev/nvidia-uvm to the other over a socket.
        A child that was forked after its parent had initialised CUDA has all of the parent's descriptors. What one process alone
        has, such as managed memory, cannot be seen from outside; the driver takes it or refuses it.
        """
        held = [(p, int(number), path) for p in processes for number, path in self._descriptors(p)]
        for i, (a, x, path) in enumerate(held):
            for b, y, other in held[i + 1 :]:
                if path == other and a.pid != b.pid and self._same_file(a.pid, x, b.pid, y):
                    raise CaptureError(
                        Reason.GPU_NOT_SUPPORTED,
                        f"processes {a.ns_pid} ({a.comm}) and {b.ns_pid} ({b.comm}) share {path}: memory of the GPU is shared between "
                        "processes (CUDA IPC), or one was forked after the other had initialised CUDA; let one process use the GPU "
                        "(no CUDA IPC, VLLM_WORKER_MULTIPROC_METHOD=spawn)",
                    )

    def before_dump(self, processes: Sequence[Process], *, timeout_s: float = math.inf) -> None:
        """Lock and checkpoint every CUDA process; after a failure they all run again. Raises CaptureError.

        With reason GPU_STATE_LOST they do not: the replica must be ended. The time is that of the way there; the way back takes
        as long as it takes, within the limits of its calls.
        """
        with self.helpers.session(timeout_s) as session:
            try:
                users = self._users(session, processes)
                if any(self._state(session, p) != RUNNING for p in users):
                    # Left by a capture that was cut off.
                    self._resume(session, users)
            except DriverError as e:
                reason = _reason(e, Reason.GPU_CHECKPOINT_FAILED, Reason.CAPTURE_TIMEOUT)
                raise CaptureError(reason, f"before the checkpoint: {e}") from e
            with self._mutex:
                self._moved = {k for k in self._moved if (self._proc / str(k[0])).exists()}
                self._moved |= {(p.pid, p.start_time) for p in users}
            try:
                for p in users:
                    self._step(session, p, "Lock", LOCKED)
                for p in users:
                    self._step(session, p, "Checkpoint", CHECKPOINTED)
                for p in users:
                    self._expect(session, p, CHECKPOINTED)
                self._let_go(processes)
            except DriverError as e:
                log.warning("GPU: %s; the processes are resumed", e)
                self._resume(session, users)
                reason = _reason(e, Reason.GPU_CHECKPOINT_FAILED, Reason.CAPTURE_TIMEOUT)
                raise CaptureError(reason, f"{e}; the engine runs on") from e

    def after_dump(self, processes: Sequence[Process]) -> None:
        """Let every CUDA process run again, whatever state it is in. Raises CaptureError(GPU_STATE_LOST) if one cannot."""
        with self.helpers.session() as session:
            try:
                users = _twice(lambda: self._users(session, processes))
            except DriverError as e:
                # Of processes that nobody has moved, it is what it was.
                moved = any((p.pid, p.start_time) in self._moved for p in processes)
                reason = Reason.GPU_STATE_LOST if moved else _reason(e, Reason.GPU_CHECKPOINT_FAILED, Reason.CAPTURE_TIMEOUT)
                raise CaptureError(reason, f"the state of the engine on the GPU is not known: {e}") from e
            self._resume(session, users)

    def _resume(self, session: Session, users: Sequence[Process]) -> None:
        """Restore, then unlock, the last one first; all of it once more after a failure, but for want of memory.

        Raises CaptureError(GPU_STATE_LOST).
        """
        session.no_deadline()
        try:
            _twice(lambda: self._undo(session, users))
        except DriverError as e:
            with self._mutex:
                self._lost = {k: v for k, v in self._lost.items() if (self._proc / str(k[0])).exists()}
                self._lost |= {(p.pid, p.start_time): str(e) for p in users}
            raise CaptureError(Reason.GPU_STATE_LOST, f"the engine cannot be resumed on the GPU: {e}") from e
        with self._mutex:
            self._moved -= {(p.pid, p.start_time) for p in users}

    def _undo(self, session: Session, users: Sequence[Process]) -> None:
        """Take every process out of the state that it is in. Raises DriverError."""
        for op, state, then in (("Restore", CHECKPOINTED, LOCKED), ("Unlock", LOCKED, RUNNING)):
            for p in reversed(users):
                if (p.pid, p.start_time) in self._lost:
                    # A second restore after one that failed finds the driver confused (cuda-checkpoint#44).
                    raise DriverError(self._lost[p.pid, p.start_time])
                if self._alive(p) and self._state(session, p) == state:
                    self._step(session, p, op, then)
        for p in reversed(users):
            if self._alive(p):
                self._expect(session, p, RUNNING)

    def _let_go(self, processes: Sequence[Process]) -> None:
        """Insist that no descriptor of the driver is left: CRIU cannot dump one, and does not say which library has it."""
        for p in processes:
            for number, path in self._descriptors(p):
                raise DriverError(
                    f"process {p.ns_pid} ({p.comm}) still has descriptor {number}, {path}, after the checkpoint (NVML keeps such)"
                )

    # --- restore -----------------------------------------------------------------------------------------------------

    def before_restore(self, container: Container, recorded: Mapping[str, str], *, timeout_s: float = math.inf) -> None:
        """Insist that the container's GPU can take what is in the artifact. Raises RestoreError."""
        if UUID not in recorded:
            return
        try:
            with self.helpers.session(timeout_s) as session:
                facts = session.call("Facts", self._limits.query, pids=[])
        except DriverError as e:
            raise RestoreError(_reason(e, Reason.GPU_UNAVAILABLE, Reason.RESTORE_TIMEOUT), str(e)) from e
        device = self._supported(facts, _visible(container), RestoreError)
        needed = int(recorded.get(MEMORY_USED, 0)) + MEMORY_MARGIN
        if MEMORY_USED in recorded and device["free"] < needed:
            raise RestoreError(
                Reason.INSUFFICIENT_GPU_MEMORY,
                f"GPU {device['uuid']} has {device['free']} bytes free; the captured processes need {needed}",
            )

    def after_restore(
        self, container: Container, recorded: Mapping[str, str], processes: Sequence[Process], *, timeout_s: float = math.inf
    ) -> None:
        """Restore and unlock every CUDA process of a new tree. Nothing is tried twice. Raises RestoreError."""
        if UUID not in recorded:
            return
        try:
            with self.helpers.session(timeout_s) as session:
                users = self._users(session, processes)
                missing = {int(n) for n in recorded.get(PIDS, "").split()} - {p.ns_pid for p in users}
                if missing:
                    raise DriverError(f"the driver does not know the restored processes {sorted(missing)}")
                for p in users:
                    self._expect(session, p, CHECKPOINTED)
                pairs = self._pairs(session, container, recorded[UUID])
                for p in users:
                    self._step(session, p, "Restore", LOCKED, pairs=pairs)
                for p in users:
                    self._step(session, p, "Unlock", RUNNING)
                for p in users:
                    self._expect(session, p, RUNNING)
        except DriverError as e:
            failed = _reason(e, Reason.GPU_RESTORE_FAILED, Reason.RESTORE_TIMEOUT)
            # The driver does not recover from it: what is tried after it fails in other ways (cuda-checkpoint#44).
            raise RestoreError(Reason.GPU_OUT_OF_MEMORY if e.code == OUT_OF_MEMORY else failed, str(e)) from e

    def _pairs(self, session: Session, container: Container, old: str) -> list[list[str]]:
        """Old and new UUID if the container has another GPU than the captured one. Complete, as there is one GPU."""
        facts = session.call("Facts", self._limits.query, pids=[])
        new = self._supported(facts, _visible(container), RestoreError)["uuid"]
        return [] if new == old else [[old, new]]

    def before_terminate(self, processes: Sequence[Process], *, timeout_s: float = math.inf) -> None:
        """Lock and checkpoint: killed while its context lives, a restored process can take the host down (cuda-checkpoint#53).

        Every process is tried, each twice. Raises AgentError with what failed.
        """
        failed = []
        with self.helpers.session(timeout_s) as session:
            for p in processes:
                try:
                    _twice(lambda p=p: self._suspend(session, p))  # type: ignore[misc]
                except DriverError as e:
                    failed.append(str(e))
                    if isinstance(e, UnusableError | OutOfTimeError):
                        break
        if failed:
            raise AgentError(Reason.GPU_STATE_LOST, f"not checkpointed before its end: {'; '.join(failed)}")

    def _suspend(self, session: Session, p: Process) -> None:
        # Without a descriptor of the driver there is nothing on the GPU. A half-made process would not even answer.
        state = self._state(session, p) if self._descriptors(p) else None
        if state == RUNNING:
            self._step(session, p, "Lock", LOCKED)
        if state in (RUNNING, LOCKED):
            self._step(session, p, "Checkpoint", CHECKPOINTED)

    # --- parts -------------------------------------------------------------------------------------------------------

    def _users(self, session: Session, processes: Sequence[Process]) -> list[Process]:
        """Those that use CUDA, in a stable order, a child before its parent. Raises DriverError."""
        parents = {p.pid: p.ppid for p in processes}

        def depth(pid: int) -> int:
            count = 0
            while pid in parents and count <= len(parents):
                pid, count = parents[pid], count + 1
            return count

        users = []
        for p in sorted(processes, key=lambda p: (-depth(p.pid), p.ns_pid)):
            if not self._alive(p) or not self._may_use(p):
                continue
            if self._state(session, p) is not None:
                users.append(p)
            elif self._held(p) or (p.pid, p.start_time) in self._moved:
                raise DriverError(f"process {p.ns_pid} ({p.comm}) uses a GPU, but the driver does not know it")
        return users

    def _may_use(self, p: Process) -> bool:
        """Without the driver's library there is no CUDA: a replica on CPU never depends on a driver."""
        try:
            with open(self._proc / str(p.pid) / "maps", errors="surrogateescape") as f:
                return any("/libcuda.so" in line for line in f) or bool(self._descriptors(p))
        except OSError:
            return self._alive(p)

    def _state(self, session: Session, p: Process) -> int | None:
        """The process's state; None if it does not use CUDA."""
        try:
            return int(session.call("GetState", self._limits.query, pid=p.pid))
        except DriverError as e:
            if e.code == NOT_INITIALIZED:
                return None
            raise

    def _expect(self, session: Session, p: Process, wanted: int) -> None:
        state = self._state(session, p)
        if state != wanted:
            raise DriverError(f"process {p.ns_pid} ({p.comm}) is {_name(state)} instead of {STATES[wanted]}")

    def _step(self, session: Session, p: Process, op: str, wanted: int, **args: Any) -> None:
        """One call, and the state it must lead to."""
        limits = self._limits
        if op == "Lock":
            # The driver must give up before we do: it then leaves the process running.
            lock = min(limits.lock, session.left() - limits.lock_grace)
            if lock <= 0:
                raise OutOfTimeError(f"no time is left for Lock of process {p.ns_pid} ({p.comm})")
            session.call(op, lock + limits.lock_grace, pid=p.pid, timeout_ms=max(1, round(lock * 1000)))
        else:
            session.call(op, limits.unlock if op == "Unlock" else limits.move, pid=p.pid, **args)
        state = self._state(session, p)
        if state != wanted:
            raise DriverError(f"{op}: process {p.ns_pid} ({p.comm}) is {_name(state)} instead of {STATES[wanted]}")

    def _alive(self, p: Process) -> bool:
        return (self._proc / str(p.pid)).exists()

    def _descriptors(self, p: Process) -> list[tuple[str, str]]:
        found = []
        base = self._proc / str(p.pid) / "fd"
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(base)):
                with contextlib.suppress(OSError):
                    link = os.readlink(base / name)
                    if self.claims(link):
                        found.append((name, link))
        return found

    def _held(self, p: Process) -> set[int]:
        """Minor numbers of the GPUs that the process has open; the toolkit keeps them in the names of the device files."""
        return {int(m[1]) for _, path in self._descriptors(p) if (m := DEVICE.fullmatch(path))}

    def _supported(self, facts: Mapping[str, Any], minors: set[int], error: type[AgentError]) -> Mapping[str, Any]:
        """The one GPU of these minor numbers. Raises `error` where it cannot be captured or restored, naming the setting."""
        reason = Reason.GPU_NOT_SUPPORTED
        if too_old(facts):
            raise error(
                reason,
                f"NVIDIA driver {facts['driver']} (CUDA API {facts['api']}) is too old: "
                f"install driver {DRIVER_MINIMUM} (CUDA 13.0) or newer on the node",
            )
        if len(minors) > 1:
            names = ", ".join(f"/dev/nvidia{n}" for n in sorted(minors))
            raise error(
                reason, f"more than one GPU in the replica: {names}; set nvidia.com/gpu: 1 and unset NVIDIA_VISIBLEDEVICES"
            )
        found = [d for d in facts["devices"] if d["minor"] in minors]
        if not found:
            raise error(reason, f"the replica's GPU (/dev/nvidia{'*' if not minors else min(minors)}) is none of the node's")
        device: Mapping[str, Any] = found[0]
        if device["mig"]:
            raise error(reason, f"GPU {device['uuid']} has MIG on: turn it off (nvidia.com/mig.config: all-disabled)")
        if device["virtual"] >= VGPU:
            raise error(reason, f"GPU {device['uuid']} is a vGPU: pass the whole GPU through to the machine")
        return device


def _twice(operation: Callable[[], _T]) -> _T:
    """Try again after a failure, but not after one for want of memory or time. Raises DriverError."""
    try:
        return operation()
    except DriverError as e:
        if e.code == OUT_OF_MEMORY or isinstance(e, OutOfTimeError):
            raise
        log.warning("GPU: %s; tried again", e)
    return operation()


def _name(state: int | None) -> str:
    if state is None:
        return "no CUDA process"
    return STATES[state] if 0 <= state < len(STATES) else f"in state {state}"


def _reason(error: DriverError, reason: str, late: str) -> str:
    """The API's reason: of its own for a driver that cannot be used, `late` if the operation's time was up."""
    if isinstance(error, OutOfTimeError):
        return late
    return Reason.GPU_UNAVAILABLE if isinstance(error, UnusableError) else reason


def _visible(container: Container) -> set[int]:
    """Minor numbers of the GPUs that a container has device files of."""
    with namespaces.opened(container.open_root()) as root:
        try:
            fd = namespaces.open_in_root(root, "/dev", os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return set()
        with namespaces.opened(fd):
            return {int(m[1]) for name in os.listdir(fd) if (m := DEVICE.fullmatch(f"/dev/{name}"))}


def survey(
    current: Accelerator,
    wanted: str,
    *,
    dev: Path = Path("/dev"),
    proc: Path = Path("/proc"),
    env: Mapping[str, str] | None = None,
) -> tuple[Accelerator, Survey]:
    """Look at the GPUs; returns the accelerator to use from now on too, which is another one than `current` when a driver was found.

    Does not fail: a GPU that cannot be used is one that no replica is captured on.
    """
    seen = Survey(wanted=wanted, files=_device_files(dev), module=_module(proc))
    if wanted == "cpu" or (wanted == "auto" and not seen.files and not isinstance(current, Cuda)):
        return current, seen
    cuda = current if isinstance(current, Cuda) else Cuda(env=env)
    try:
        facts = cuda.examine()
    except DriverError as e:
        seen = replace(seen, error=str(e))
    else:
        seen = replace(seen, facts=facts, error="" if facts["devices"] else "the driver knows no GPU")
    if cuda is not current and wanted == "auto" and seen.error:
        cuda.close()
        return current, seen
    return cuda, seen


def _device_files(dev: Path) -> bool:
    return any(DEVICE.fullmatch(f"/dev/{f.name}") for f in dev.glob("nvidia*"))


def _module(proc: Path) -> str:
    """Version of the kernel's driver, empty if there is none."""
    with contextlib.suppress(OSError):
        first = (proc / "driver/nvidia/version").read_text(errors="replace").partition("\n")[0]
        if match := re.search(r"\b(\d+\.\d[\d.]*)\b", first):
            return match[1]
    return ""
