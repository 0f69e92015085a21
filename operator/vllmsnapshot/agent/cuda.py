"""The CUDA accelerator: moves the state of the GPU into the memory of its processes before a dump, and back.

The driver does the work (`cuCheckpointProcess*`), on behalf of a process that it is told the PID of. It is called from a helper
process that stays: initialising the driver costs seconds, once instead of once per call. A helper that hangs or dies is replaced;
the agent itself never loads the driver, so no driver can hang or crash it. One operation has a helper for itself: a second one is
started only while two operations overlap.

    RUNNING --lock--> LOCKED --checkpoint--> CHECKPOINTED --restore--> LOCKED --unlock--> RUNNING

What has been done is never remembered: every step, forward or back, asks the driver for the state first or afterwards, since a
helper that was killed tells nobody how far it got.

The helper and the driver's interface are in `driver.py`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ..api.constants import Reason
from ..environment import MEMORY_USED, PIDS, UUID
from . import namespaces
from .accelerator import Accelerator
from .driver import DRIVER_MINIMUM, NOT_INITIALIZED, VGPU
from .driver import LIBCUDA as LIBCUDA
from .driver import LIBNVML as LIBNVML
from .driver import OUT_OF_MEMORY as OUT_OF_MEMORY
from .driver import DriverError as DriverError
from .errors import AgentError, CaptureError, RestoreError

if TYPE_CHECKING:
    from .containers import Container, Process

log = logging.getLogger(__name__)

_T = TypeVar("_T")

API_MINIMUM: Final = 13000

MEMORY_MARGIN: Final = 128 << 20
"""Bytes of GPU memory to be free beside what the captured processes used."""

RUNNING, LOCKED, CHECKPOINTED, FAILED = 0, 1, 2, 3
STATES: Final = ("RUNNING", "LOCKED", "CHECKPOINTED", "FAILED", "CHECKPOINTING", "RESTORING")
"""CUprocessState; the last two occur with custom storage only, which is not used here."""

DRIVER_VERSION: Final = "gpuDriver"
CUDA_API: Final = "gpuCudaApi"
PRODUCT: Final = "gpuProduct"
COMPUTE_CAPABILITY: Final = "gpuComputeCapability"
MEMORY: Final = "gpuMemoryBytes"
MIG: Final = "gpuMig"
"""Facts of the node, compared for equality."""

_DEVICE: Final = re.compile(r"/dev/nvidia(\d+)")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds within which the driver must answer; then its helper is killed."""

    start: float = 60.0
    query: float = 15.0
    lock: float = 20.0
    """Told to the driver too, which then leaves the process running."""
    lock_grace: float = 5.0
    move: float = 300.0
    """Checkpoint and restore: up to all of the GPU's memory is copied."""
    unlock: float = 20.0
    end: float = 5.0


class UnusableError(DriverError):
    """No helper can be started: there is no driver, or it does not initialise."""


class LateError(DriverError):
    """The driver did not answer within the limit of the call."""


class OutOfTimeError(DriverError):
    """The time of the whole operation is up."""


# --- the agent's side of the helper ----------------------------------------------------------------------------------


Wait = Callable[[socket.socket, float], bool]
"""Wait until there is something to read, at most so many seconds; False if there is not."""


def _readable(connection: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class _Helper:
    """One helper process. After any DriverError without a code it must be ended."""

    def __init__(self, env: Mapping[str, str], wait: Wait) -> None:
        self._wait = wait
        ours, theirs = socket.socketpair()
        package = str(Path(__file__).parents[2])
        with theirs:
            self._process = subprocess.Popen(
                # -S: no site-packages, hence no third-party code.
                [sys.executable, "-S", "-m", "vllmsnapshot.agent.driver", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**env, "PYTHONPATH": package, "PYTHONDONTWRITEBYTECODE": "1"},
            )
        self._socket = ours

    def call(self, op: str, limit_s: float, **args: Any) -> Any:
        """One call of the driver. Raises DriverError."""
        deadline = time.monotonic() + limit_s
        what = f"{op} of process {args['pid']}" if "pid" in args else op
        try:
            self._socket.sendall(json.dumps({"op": op, **args}).encode() + b"\n")
            answer = self._receive(deadline)
        except OSError as e:
            answer, error = b"", f": {e.strerror}"
        else:
            error = ""
        if answer is None:
            raise LateError(f"{what} took longer than {limit_s:.3g} s")
        if not answer:
            raise DriverError(f"{what}: the helper of the driver died{error}")
        message = json.loads(answer)
        if "error" in message:
            raise DriverError(f"{what}: {message['error']}", message.get("code"))
        return message["result"]

    def _receive(self, deadline: float) -> bytes | None:
        """A line; empty if the helper has died, None if the time has ended."""
        data = b""
        while not data.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not self._wait(self._socket, left):
                return None
            piece = self._socket.recv(1 << 16)
            if not piece:
                return b""
            data += piece
        return data

    def end(self, limit_s: float) -> bool:
        """Kill it; False if it does not die in time, as a process does that is stuck inside the driver."""
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def gone(self) -> bool:
        """Whether it has died by itself; reaps it."""
        return self._process.poll() is not None


class _Session:
    """The driver for one operation: a helper, and another one after that has hung or died."""

    def __init__(self, owner: Cuda, timeout_s: float) -> None:
        self._owner = owner
        self._helper: _Helper | None = None
        self._deadline = time.monotonic() + timeout_s

    def left(self) -> float:
        """Seconds that the operation still has."""
        return self._deadline - time.monotonic()

    def no_deadline(self) -> None:
        """From now on only the calls' own limits count: the way back must not be cut short by what was spent on the way there."""
        self._deadline = math.inf

    def call(self, op: str, limit_s: float, **args: Any) -> Any:
        """One call, within its own limit and what the operation has left. Raises DriverError."""
        left = self.left()
        if left <= 0:
            raise OutOfTimeError(f"no time is left for {op}")
        if self._helper is None:
            self._helper = self._owner._take(left)
            left = max(0.0, self.left())
        try:
            return self._helper.call(op, min(limit_s, left), **args)
        except DriverError as e:
            if e.code is None:
                self._drop()
            if isinstance(e, LateError) and left < limit_s:
                raise OutOfTimeError(f"{e}, which was all that was left") from e
            raise
        except BaseException:
            # An answer may still be on its way: the next call would take it for its own.
            self._drop()
            raise

    def _drop(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            self._owner._end(helper)

    def close(self) -> None:
        """Leave the helper to the next operation."""
        helper, self._helper = self._helper, None
        if helper is not None:
            self._owner._give(helper)


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
        wait: Wait = _readable,
        same_file: Callable[[int, int, int, int], bool] = namespaces.same_open_file,
    ) -> None:
        """`env` is the helper's environment, by default the agent's. Starts nothing."""
        self._wait = wait
        self._same_file = same_file
        self._limits = limits or Limits()
        self._proc = proc
        self._env = dict(os.environ if env is None else env)
        self._mutex = threading.Lock()
        self._idle: list[_Helper] = []
        self._undead: list[_Helper] = []
        self._moved: set[tuple[int, int]] = set()
        self._lost: dict[tuple[int, int], str] = {}
        self.started = 0
        """Helpers started so far."""

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _take(self, left_s: float) -> _Helper:
        with self._mutex:
            self._undead = [h for h in self._undead if not h.gone()]
            while self._idle:
                helper = self._idle.pop()
                if not helper.gone():
                    return helper
                helper.end(0)
            self.started += 1
        helper = _Helper(self._env, self._wait)
        try:
            helper.call("Init", min(self._limits.start, left_s))
        except DriverError as e:
            self._end(helper)
            raise UnusableError(f"the driver cannot be used: {e}") from e
        except BaseException:
            self._end(helper)
            raise
        return helper

    def _give(self, helper: _Helper) -> None:
        with self._mutex:
            self._idle.append(helper)

    def _end(self, helper: _Helper) -> None:
        if not helper.end(self._limits.end):
            log.error("a helper of the GPU driver does not die; it is left behind")
            with self._mutex:
                self._undead.append(helper)

    def close(self) -> None:
        """End the helpers that wait for work."""
        with self._mutex:
            idle, self._idle = self._idle, []
        for helper in idle:
            self._end(helper)

    @contextlib.contextmanager
    def _session(self, timeout_s: float = math.inf) -> Iterator[_Session]:
        session = _Session(self, timeout_s)
        try:
            yield session
        finally:
            session.close()

    # --- facts -------------------------------------------------------------------------------------------------------

    def examine(self) -> Mapping[str, Any]:
        """Driver and GPUs as `Driver.Facts` tells them. Raises DriverError if the driver cannot be used."""
        with self._session() as session:
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
            with self._session(timeout_s) as session:
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
        with self._session(timeout_s) as session:
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
        with self._session() as session:
            try:
                users = _twice(lambda: self._users(session, processes))
            except DriverError as e:
                # Of processes that nobody has moved, it is what it was.
                moved = any((p.pid, p.start_time) in self._moved for p in processes)
                reason = Reason.GPU_STATE_LOST if moved else _reason(e, Reason.GPU_CHECKPOINT_FAILED, Reason.CAPTURE_TIMEOUT)
                raise CaptureError(reason, f"the state of the engine on the GPU is not known: {e}") from e
            self._resume(session, users)

    def _resume(self, session: _Session, users: Sequence[Process]) -> None:
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

    def _undo(self, session: _Session, users: Sequence[Process]) -> None:
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
            with self._session(timeout_s) as session:
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
            with self._session(timeout_s) as session:
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

    def _pairs(self, session: _Session, container: Container, old: str) -> list[list[str]]:
        """Old and new UUID if the container has another GPU than the captured one. Complete, as there is one GPU."""
        facts = session.call("Facts", self._limits.query, pids=[])
        new = self._supported(facts, _visible(container), RestoreError)["uuid"]
        return [] if new == old else [[old, new]]

    def before_terminate(self, processes: Sequence[Process], *, timeout_s: float = math.inf) -> None:
        """Lock and checkpoint: killed while its context lives, a restored process can take the host down (cuda-checkpoint#53).

        Every process is tried, each twice. Raises AgentError with what failed.
        """
        failed = []
        with self._session(timeout_s) as session:
            for p in processes:
                try:
                    _twice(lambda p=p: self._suspend(session, p))  # type: ignore[misc]
                except DriverError as e:
                    failed.append(str(e))
                    if isinstance(e, UnusableError | OutOfTimeError):
                        break
        if failed:
            raise AgentError(Reason.GPU_STATE_LOST, f"not checkpointed before its end: {'; '.join(failed)}")

    def _suspend(self, session: _Session, p: Process) -> None:
        # Without a descriptor of the driver there is nothing on the GPU. A half-made process would not even answer.
        state = self._state(session, p) if self._descriptors(p) else None
        if state == RUNNING:
            self._step(session, p, "Lock", LOCKED)
        if state in (RUNNING, LOCKED):
            self._step(session, p, "Checkpoint", CHECKPOINTED)

    # --- parts -------------------------------------------------------------------------------------------------------

    def _users(self, session: _Session, processes: Sequence[Process]) -> list[Process]:
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

    def _state(self, session: _Session, p: Process) -> int | None:
        """The process's state; None if it does not use CUDA."""
        try:
            return int(session.call("GetState", self._limits.query, pid=p.pid))
        except DriverError as e:
            if e.code == NOT_INITIALIZED:
                return None
            raise

    def _expect(self, session: _Session, p: Process, wanted: int) -> None:
        state = self._state(session, p)
        if state != wanted:
            raise DriverError(f"process {p.ns_pid} ({p.comm}) is {_name(state)} instead of {STATES[wanted]}")

    def _step(self, session: _Session, p: Process, op: str, wanted: int, **args: Any) -> None:
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
        return {int(m[1]) for _, path in self._descriptors(p) if (m := _DEVICE.fullmatch(path))}

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
                reason, f"more than one GPU in the replica: {names}; set nvidia.com/gpu: 1 and unset NVIDIA_VISIBLE_DEVICES"
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


def describe(facts: Mapping[str, Any]) -> Mapping[str, str]:
    """What of the driver's answer (`Driver.Facts`) identifies a node."""

    def of_all(name: str) -> str:
        # A node has GPUs of one kind; where it has several, an artifact is bound to the same mixture.
        return ", ".join(sorted({str(d[name]) for d in facts["devices"]})) or "none"

    return {
        DRIVER_VERSION: facts["driver"],
        CUDA_API: str(facts["api"]),
        PRODUCT: of_all("name"),
        COMPUTE_CAPABILITY: of_all("capability"),
        MEMORY: of_all("total"),
        MIG: of_all("mig"),
    }


def too_old(facts: Mapping[str, Any]) -> bool:
    """Whether the driver lacks what is needed."""
    major = int(re.match(r"\d*", facts["driver"])[0] or 0)  # type: ignore[index]
    return major < DRIVER_MINIMUM or facts["api"] < API_MINIMUM


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
            return {int(m[1]) for name in os.listdir(fd) if (m := _DEVICE.fullmatch(f"/dev/{name}"))}


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What can be seen of the node's GPUs from the agent's container."""

    wanted: str
    """The setting: auto, cpu or cuda."""
    files: bool = False
    """Whether there is a /dev/nvidia0 (any number)."""
    module: str = ""
    """Version of the kernel's driver, empty if none is loaded. Seen without any library and without device files."""
    facts: Mapping[str, Any] | None = None
    """As the driver tells them (`Driver.Facts`); None if it was not asked, or did not answer."""
    error: str = ""
    """Why it did not answer."""


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
    return any(_DEVICE.fullmatch(f"/dev/{f.name}") for f in dev.glob("nvidia*"))


def _module(proc: Path) -> str:
    """Version of the kernel's driver, empty if there is none."""
    with contextlib.suppress(OSError):
        first = (proc / "driver/nvidia/version").read_text(errors="replace").partition("\n")[0]
        if match := re.search(r"\b(\d+\.\d[\d.]*)\b", first):
            return match[1]
    return ""
