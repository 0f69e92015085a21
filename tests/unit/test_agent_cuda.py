"""The CUDA accelerator against a fake driver (tests/fakes/libcuda.c) that its real binding loads.

Every call of the driver fails in every way, at every step of a capture and of a restore: either all processes run on, or the
error says that the replica must be ended, or that it comes up cold.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace as Box
from typing import Any, cast

import pytest

from tests.fakes import build_libcuda
from vllmsnapshot.agent import capture as capturing
from vllmsnapshot.agent import config, cuda, doctor, driver, gpu_doctor
from vllmsnapshot.agent import restore as restoring
from vllmsnapshot.agent.accelerator import Accelerator, Cpu
from vllmsnapshot.agent.capture import Tree
from vllmsnapshot.agent.containers import Container, Process
from vllmsnapshot.agent.criu import Criu
from vllmsnapshot.agent.cuda import CHECKPOINTED, FAILED, LOCKED, RUNNING, Cuda
from vllmsnapshot.agent.driver_pool import Limits, readable
from vllmsnapshot.agent.errors import AgentError, CaptureError, RestoreError
from vllmsnapshot.agent.identity import compare_node
from vllmsnapshot.agent.local import LocalOps
from vllmsnapshot.agent.store import Manifest
from vllmsnapshot.api.constants import Reason
from vllmsnapshot.environment import MEMORY_USED, PIDS, UUID

OLD = "GPU-00000000-0000-0000-0000-000000000000"
OTHER = "GPU-00000000-0000-0000-0000-000000000001"

ROOT, CORE, WORKER, IMPORTER = 5000, 5001, 5002, 5003
"""An API server, its engine core and a worker, which use CUDA, and a process that has the library mapped and no more."""

USERS = (CORE, WORKER)
PARENTS = {ROOT: 4999, CORE: ROOT, WORKER: CORE, IMPORTER: ROOT}


def process(pid: int) -> Process:
    return Process(
        pid=pid,
        ppid=PARENTS[pid],
        ns_pid=pid - 4000,
        ns_session=1000,
        uid=0,
        gid=0,
        state="S",
        comm=f"p{pid}",
        start_time=1,
        rss_bytes=1,
        traced=False,
    )


TREE = [process(pid) for pid in PARENTS]


class Gpu:
    """The fake driver's directory, and the accelerator above it."""

    def __init__(self, directory: Path, library: Path) -> None:
        self.directory = directory
        directory.mkdir()
        os.mkfifo(directory / "hangs")
        self._hangs = os.open(directory / "hangs", os.O_RDWR | os.O_NONBLOCK)
        self.env = {
            **os.environ,
            driver.LIBCUDA: str(library),
            driver.LIBNVML: str(library),
            "VLLMSNAPSHOT_FAKE_GPU": str(directory),
        }
        self.cuda = self.accelerator()

    def accelerator(self, **changes: Any) -> Cuda:
        settings: dict[str, Any] = {"proc": self.directory / "proc", "env": self.env, "wait": self.wait, **changes}
        return Cuda(**settings)

    def wait(self, connection: socket.socket, seconds: float) -> bool:
        """Time ends when the driver says that it hangs, and not before."""
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        poll.register(self._hangs, select.POLLIN)
        ready = dict(poll.poll(seconds * 1000))
        if self._hangs in ready:
            os.read(self._hangs, 1)
            return False
        return bool(ready)

    def reset(self, state: int = RUNNING, **config: Any) -> None:
        for name in ("state", "used", "proc", "calls", "control", "config", *(f.name for f in self.directory.glob("count.*"))):
            path = self.directory / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for pid in PARENTS:
            base = self.directory / "proc" / str(pid)
            (base / "fd").mkdir(parents=True)
            (base / "kept").mkdir()
            os.symlink("/dev/null", base / "fd" / "0")
            (base / "maps").write_text("" if pid == ROOT else "7f00-7f01 r-xp 0 08:01 77   /usr/lib/libcuda.so.580.95.05\n")
        for kind in ("state", "used"):
            (self.directory / kind).mkdir()
        for pid in USERS:
            self.set(pid, state)
            (self.directory / "used" / str(pid)).write_text("1000")
            where = self.directory / "proc" / str(pid) / ("kept" if state == CHECKPOINTED else "fd")
            os.symlink("/dev/nvidia0", where / "9")
            os.symlink("/dev/nvidiactl", where / "8")
        (self.directory / "config").write_text("".join(f"{k}={v}\n" for k, v in config.items()))
        with contextlib.suppress(BlockingIOError):
            os.read(self._hangs, 64)
        self.cuda._lost.clear()
        self.cuda._moved.clear()

    def set(self, pid: int, state: int) -> None:
        (self.directory / "state" / str(pid)).write_text(str(state))

    def states(self) -> list[int]:
        return [int((self.directory / "state" / str(pid)).read_text()) for pid in USERS]

    def running(self) -> bool:
        return self.states() == [RUNNING, RUNNING]

    def inject(self, *lines: str) -> None:
        (self.directory / "control").write_text("".join(f"{x}\n" for x in lines))

    def calls(self) -> list[str]:
        file = self.directory / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def count(self, call: str) -> int:
        file = self.directory / f"count.{call}"
        return int(file.read_text()) if file.exists() else 0

    def close(self) -> None:
        self.cuda.close()
        os.close(self._hangs)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_libcuda(tmp_path_factory.mktemp("libcuda"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, library: Path) -> Iterator[Gpu]:
    """One for the module: a helper is started only after one has hung or died."""
    with contextlib.closing(Gpu(tmp_path_factory.mktemp("gpu") / "fake", library)) as gpu:
        yield gpu


@pytest.fixture
def gpu(shared: Gpu) -> Gpu:
    shared.reset()
    return shared


class FakeContainer:
    """A root directory with device files."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def open_root(self) -> int:
        return os.open(self.root, os.O_PATH | os.O_DIRECTORY)


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return with_devices(tmp_path, "nvidia0", "nvidiactl", "nvidia-uvm", "null")


def with_devices(tmp_path: Path, *names: str) -> Container:
    dev = tmp_path / "root" / "dev"
    dev.mkdir(parents=True)
    for name in names:
        (dev / name).touch()
    return cast(Container, FakeContainer(tmp_path / "root"))


RECORDED = {UUID: OLD, PIDS: "1001 1002", MEMORY_USED: "2000"}


# --- what goes well --------------------------------------------------------------------------------------------------


def test_a_capture_moves_every_cuda_process_and_no_other(gpu: Gpu) -> None:
    assert gpu.cuda.record(TREE) == RECORDED
    gpu.cuda.before_dump(TREE)
    assert gpu.states() == [CHECKPOINTED, CHECKPOINTED]
    gpu.cuda.after_dump(TREE)
    assert gpu.running()
    assert gpu.calls() == [
        f"Lock {WORKER}",
        f"Lock {CORE}",
        f"Checkpoint {WORKER}",
        f"Checkpoint {CORE}",
        f"Restore {CORE}",
        f"Restore {WORKER}",
        f"Unlock {CORE}",
        f"Unlock {WORKER}",
    ]


def test_a_replica_on_cpu_never_meets_the_driver(tmp_path: Path, gpu: Gpu, container: Container) -> None:
    plain = gpu.accelerator(env={**gpu.env, driver.LIBCUDA: "/nonexistent"})
    tree = [process(ROOT)]
    assert plain.record(tree) == {}
    plain.before_dump(tree)
    plain.after_dump(tree)
    plain.before_restore(container, {})
    plain.after_restore(container, {}, tree)
    plain.before_terminate(tree)
    assert plain.helpers.started == 0


def test_a_restore_on_the_same_gpu(gpu: Gpu, container: Container) -> None:
    gpu.reset(CHECKPOINTED)
    gpu.cuda.before_restore(container, RECORDED)
    gpu.cuda.after_restore(container, RECORDED, TREE)
    assert gpu.running()
    assert gpu.calls() == [f"{op} {pid}" for op in ("Restore", "Unlock") for pid in (WORKER, CORE)]


def test_a_restore_on_another_gpu_says_which(gpu: Gpu, tmp_path: Path) -> None:
    gpu.reset(CHECKPOINTED, count=2)
    container = with_devices(tmp_path, "nvidia1", "nvidiactl")
    gpu.cuda.before_restore(container, RECORDED)
    gpu.cuda.after_restore(container, RECORDED, TREE)
    assert gpu.running()
    assert gpu.calls()[0] == f"Restore {WORKER} {'0' * 32} {'0' * 31}1"


def test_a_capture_takes_up_what_another_one_left(gpu: Gpu) -> None:
    gpu.set(CORE, LOCKED)
    gpu.set(WORKER, CHECKPOINTED)
    gpu.cuda.before_dump(TREE)
    assert gpu.states() == [CHECKPOINTED, CHECKPOINTED]


def test_before_the_end_the_gpu_is_let_go(gpu: Gpu) -> None:
    gpu.set(CORE, LOCKED)
    gpu.cuda.before_terminate(TREE)
    assert gpu.states() == [CHECKPOINTED, CHECKPOINTED]
    before = gpu.calls()
    gpu.cuda.before_terminate(TREE)
    assert gpu.calls() == before


def test_one_helper_serves_all(gpu: Gpu) -> None:
    gpu.cuda.facts()
    before = gpu.cuda.helpers.started
    gpu.cuda.before_dump(TREE)
    gpu.cuda.after_dump(TREE)
    gpu.cuda.facts()
    assert gpu.cuda.helpers.started == before


def test_facts(gpu: Gpu) -> None:
    gpu.reset(count=2)
    facts = gpu.cuda.facts()
    assert facts == {
        "gpuDriver": "580.95.05",
        "gpuCudaApi": "13000",
        "gpuProduct": "Fake H200",
        "gpuComputeCapability": "9.0",
        "gpuMemoryBytes": str(1 << 37),
        "gpuMig": "False",
    }
    # The UUID is a preference: a different one forbids nothing.
    assert compare_node({**facts, **RECORDED}, facts) == []
    assert compare_node({**facts, "gpuDriver": "590"}, facts) == ["gpuDriver: 580.95.05 instead of 590"]


# --- every call, every failure ---------------------------------------------------------------------------------------

FAULTS = ("error 999", "late 999", "stay", f"state {RUNNING}", f"state {LOCKED}", f"state {CHECKPOINTED}", f"state {FAILED}")
CUT = ("hang", "hung", "die")
# What is asked tells nothing when it hangs or its helper dies: both are the same to the one who asks.
QUERY_CUT = ("die", "hang")
QUERY_FAULTS = ("error 999", "error 3", f"state {RUNNING}", f"state {LOCKED}", f"state {CHECKPOINTED}", f"state {FAILED}")

# How often each is called: asserted below, so that no call is left out.
CAPTURE_CALLS = {"Lock": 2, "Checkpoint": 2, "Restore": 2, "Unlock": 2, "GetState": 24}
RESTORE_CALLS = {"Restore": 2, "Unlock": 2, "GetState": 11}
END_CALLS = {"Lock": 2, "Checkpoint": 2, "GetState": 6}


def cases(calls: Mapping[str, int]) -> list[str]:
    found = []
    for call, times in calls.items():
        for nth in range(1, times + 1):
            faults = (*QUERY_FAULTS, QUERY_CUT[nth % 2]) if call == "GetState" else (*FAULTS, *CUT)
            found += [f"{call} {nth} {fault}" for fault in faults]
    return found


def captured(gpu: Gpu) -> AgentError | None:
    """A capture as `capture.capture` does it: whatever the first half says, the second follows."""
    first = None
    try:
        gpu.cuda.before_dump(TREE)
        assert gpu.states() == [CHECKPOINTED, CHECKPOINTED]
    except CaptureError as e:
        first = e
    if first is not None and first.reason != Reason.GPU_STATE_LOST:
        assert gpu.running(), "the source runs as soon as before_dump has failed"
    try:
        gpu.cuda.after_dump(TREE)
    except CaptureError as e:
        return e
    return first


def test_the_counts_above_are_complete(gpu: Gpu, container: Container) -> None:
    assert captured(gpu) is None
    assert {call: gpu.count(call) for call in CAPTURE_CALLS} == CAPTURE_CALLS
    gpu.reset(CHECKPOINTED)
    gpu.cuda.after_restore(container, RECORDED, TREE)
    assert {call: gpu.count(call) for call in RESTORE_CALLS} == RESTORE_CALLS
    gpu.reset()
    gpu.cuda.before_terminate(TREE)
    assert {call: gpu.count(call) for call in END_CALLS} == END_CALLS


@pytest.mark.parametrize("fault", cases(CAPTURE_CALLS))
def test_one_fault_during_a_capture(gpu: Gpu, fault: str) -> None:
    gpu.inject(fault)
    error = captured(gpu)
    if error is not None and error.reason == Reason.GPU_STATE_LOST:
        # The driver itself has given a process up: nothing brings it back.
        assert FAILED in gpu.states()
    else:
        assert gpu.running()
        assert error is None or error.reason == Reason.GPU_CHECKPOINT_FAILED
    if fault.split()[0] in ("Lock", "Checkpoint") and not fault.endswith(
        {"Lock": f"state {LOCKED}", "Checkpoint": f"state {CHECKPOINTED}"}[fault.split()[0]]
    ):
        assert error is not None


@pytest.mark.parametrize("fault", cases(RESTORE_CALLS))
def test_one_fault_during_a_restore(gpu: Gpu, container: Container, fault: str) -> None:
    gpu.reset(CHECKPOINTED)
    gpu.inject(fault)
    error = None
    try:
        gpu.cuda.after_restore(container, RECORDED, TREE)
    except RestoreError as e:
        error = e
    if error is not None:
        assert error.reason == Reason.GPU_RESTORE_FAILED
        # What `restore` does next: the tree is made safe to kill.
        gpu.cuda.before_terminate(TREE)
        assert set(gpu.states()) <= {CHECKPOINTED, FAILED}
    else:
        assert gpu.running()
    assert all(gpu.calls().count(f"Restore {pid}") <= 1 for pid in USERS), "nothing is tried twice"


@pytest.mark.parametrize("fault", cases(END_CALLS))
def test_one_fault_before_the_end(gpu: Gpu, fault: str) -> None:
    gpu.inject(fault)
    with contextlib.suppress(AgentError):
        gpu.cuda.before_terminate(TREE)
    if fault.startswith("GetState") and ("state" in fault or "error 3" in fault):
        return  # the driver said that there is nothing to do
    assert [s for s in gpu.states() if s not in (CHECKPOINTED, FAILED)] == []


def test_a_process_that_cannot_be_moved_does_not_keep_others_from_it(gpu: Gpu) -> None:
    gpu.inject("Lock 1 error 999", "Lock 2 error 999")
    with pytest.raises(AgentError):
        gpu.cuda.before_terminate(TREE)
    assert sorted(gpu.states()) == [RUNNING, CHECKPOINTED]


@pytest.mark.parametrize("call", ["Lock", "Checkpoint"])
@pytest.mark.parametrize("fault", ["error 999", "stay", *CUT])
def test_a_step_that_never_works_leaves_a_serving_source(gpu: Gpu, call: str, fault: str) -> None:
    gpu.inject(f"{call} 0 {fault}")
    error = captured(gpu)
    assert error is not None
    assert error.reason == Reason.GPU_CHECKPOINT_FAILED
    assert gpu.running()


@pytest.mark.parametrize("call", ["Restore", "Unlock"])
@pytest.mark.parametrize("fault", ["error 999", "stay", "hang", "die"])
def test_a_way_back_that_never_works_loses_the_source(gpu: Gpu, call: str, fault: str) -> None:
    gpu.inject(f"{call} 0 {fault}")
    error = captured(gpu)
    assert error is not None
    assert error.reason == Reason.GPU_STATE_LOST
    assert call in error.message


def test_a_roll_back_that_fails_is_told_at_once(gpu: Gpu) -> None:
    gpu.inject("Checkpoint 2 error 999", "Restore 0 error 304")
    with pytest.raises(CaptureError) as error:
        gpu.cuda.before_dump(TREE)
    assert error.value.reason == Reason.GPU_STATE_LOST
    with pytest.raises(CaptureError) as error:
        gpu.cuda.after_dump(TREE)
    assert error.value.reason == Reason.GPU_STATE_LOST
    assert sum(x.startswith("Restore") for x in gpu.calls()) == 2, "not again by after_dump"


def test_for_want_of_memory_nothing_is_tried_again(gpu: Gpu, container: Container) -> None:
    gpu.inject("Restore 1 error 2")
    error = captured(gpu)
    assert error is not None
    assert error.reason == Reason.GPU_STATE_LOST
    assert sum(x.startswith("Restore") for x in gpu.calls()) == 1
    gpu.reset(CHECKPOINTED)
    gpu.inject("Restore 1 error 2")
    with pytest.raises(RestoreError) as lost:
        gpu.cuda.after_restore(container, RECORDED, TREE)
    assert lost.value.reason == Reason.GPU_OUT_OF_MEMORY
    assert "CUDA_ERROR_OUT_OF_MEMORY" in lost.value.message


def test_a_driver_that_knows_nothing_does_not_condemn_a_source_that_was_not_moved(gpu: Gpu) -> None:
    gpu.inject("GetState 0 error 999")
    error = captured(gpu)
    assert error is not None
    assert error.reason == Reason.GPU_CHECKPOINT_FAILED
    assert gpu.calls() == []


@pytest.mark.parametrize("call", ["Lock", "Checkpoint", "GetState"])
def test_the_gpus_steps_end_with_the_time_of_the_capture(gpu: Gpu, call: str) -> None:
    # Far below the limits of the calls, far above what they take; the hang itself ends the wait.
    gpu.inject(f"{call} 3 hang" if call == "GetState" else f"{call} 2 hang")
    with pytest.raises(CaptureError) as error:
        gpu.cuda.before_dump(TREE, timeout_s=14.0)
    assert error.value.reason == Reason.CAPTURE_TIMEOUT
    assert f"{call} of process" in error.value.message
    assert "which was all that was left" in error.value.message
    assert gpu.running(), "the way back is not part of that time"


def test_a_lock_that_has_no_time_is_not_begun(gpu: Gpu) -> None:
    with pytest.raises(CaptureError) as error:
        gpu.cuda.before_dump(TREE, timeout_s=Limits().lock_grace / 2)
    assert error.value.reason == Reason.CAPTURE_TIMEOUT
    assert "no time is left for Lock" in error.value.message
    assert gpu.calls() == []
    with pytest.raises(CaptureError) as late:
        gpu.cuda.before_dump(TREE, timeout_s=0)
    assert late.value.reason == Reason.CAPTURE_TIMEOUT
    assert gpu.running()


@pytest.mark.parametrize("call", ["Restore", "Unlock"])
def test_the_gpus_steps_end_with_the_time_of_the_restore(gpu: Gpu, container: Container, call: str) -> None:
    gpu.reset(CHECKPOINTED)
    gpu.inject(f"{call} 1 hang")
    with pytest.raises(RestoreError) as error:
        gpu.cuda.after_restore(container, RECORDED, TREE, timeout_s=14.0)
    assert error.value.reason == Reason.RESTORE_TIMEOUT
    gpu.inject("")
    with pytest.raises(RestoreError) as late:
        gpu.cuda.before_restore(container, RECORDED, timeout_s=0)
    assert late.value.reason == Reason.RESTORE_TIMEOUT


def test_before_the_end_no_more_time_is_taken_than_there_is(gpu: Gpu) -> None:
    gpu.inject("Lock 1 hang")
    with pytest.raises(AgentError) as error:
        gpu.cuda.before_terminate(TREE, timeout_s=14.0)
    assert "all that was left" in error.value.message
    assert gpu.count("Lock") == 1, "neither again nor for the next process"


def test_a_process_that_ended_needs_no_resuming(gpu: Gpu) -> None:
    gpu.cuda.before_dump(TREE)
    shutil.rmtree(gpu.directory / "proc" / str(WORKER))
    gpu.cuda.after_dump(TREE)
    assert gpu.states() == [RUNNING, CHECKPOINTED]


def test_time_limits_are_real(gpu: Gpu) -> None:
    gpu.inject("Lock 0 hang")
    quick = gpu.accelerator(limits=Limits(lock=0.05, lock_grace=0.05), wait=readable)
    with contextlib.closing(quick), pytest.raises(CaptureError) as error:
        quick.before_dump(TREE)
    assert "took longer than" in error.value.message
    assert gpu.running()


@pytest.mark.parametrize("pid", [CORE, ROOT])
def test_a_descriptor_that_the_checkpoint_leaves_is_named(gpu: Gpu, pid: int) -> None:
    os.symlink("/dev/nvidiactl", gpu.directory / "proc" / str(pid) / "fd" / "77")
    with pytest.raises(CaptureError) as error:
        gpu.cuda.before_dump(TREE)
    assert error.value.reason == Reason.GPU_CHECKPOINT_FAILED
    assert "descriptor 77, /dev/nvidiactl" in error.value.message
    assert gpu.running()


# --- the driver cannot be used ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["Init 0 error 100", "Init 0 die", "Init 0 hang", "nvmlInit 0 error 9"])
def test_a_driver_that_does_not_start(gpu: Gpu, container: Container, fault: str) -> None:
    gpu.inject(fault)
    with contextlib.closing(gpu.accelerator()) as fresh:
        for operation in (fresh.facts, lambda: fresh.record(TREE), lambda: fresh.before_dump(TREE)):
            with pytest.raises(AgentError) as error:
                operation()
            assert error.value.reason == Reason.GPU_UNAVAILABLE
        for operation in (
            lambda: fresh.before_restore(container, RECORDED),
            lambda: fresh.after_restore(container, RECORDED, TREE),
        ):
            with pytest.raises(RestoreError) as failed:
                operation()
            assert failed.value.reason == Reason.GPU_UNAVAILABLE
    assert gpu.running()


def test_a_driver_that_is_not_there(gpu: Gpu) -> None:
    with pytest.raises(AgentError) as error:
        gpu.accelerator(env={**gpu.env, driver.LIBCUDA: "/nonexistent/libcuda.so.1"}).facts()
    assert error.value.reason == Reason.GPU_UNAVAILABLE
    assert "/nonexistent/libcuda.so.1" in error.value.message


def test_a_driver_without_the_calls(gpu: Gpu, library: Path) -> None:
    # Any library that loads; it has no cuInit.
    libc = "libc.so.6"
    with pytest.raises(AgentError) as error:
        gpu.accelerator(env={**gpu.env, driver.LIBCUDA: libc}).facts()
    assert "install driver 580" in error.value.message


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"driver": "570.124.06", "api": 12080}, "driver 570.124.06 (CUDA API 12080) is too old: install driver 580"),
        ({"mig": 1}, "MIG on: turn it off (nvidia.com/mig.config: all-disabled)"),
        ({"virtual": 2}, "is a vGPU"),
        ({"count": 0}, "/dev/nvidia0) is none of the node's"),
    ],
)
def test_what_is_refused(gpu: Gpu, container: Container, config: Mapping[str, Any], words: str) -> None:
    gpu.reset(**config)
    with pytest.raises(CaptureError) as error:
        gpu.cuda.record(TREE)
    assert error.value.reason == Reason.GPU_NOT_SUPPORTED
    assert words in error.value.message
    with pytest.raises(RestoreError) as failed:
        gpu.cuda.before_restore(container, RECORDED)
    assert failed.value.reason == Reason.GPU_NOT_SUPPORTED
    assert words in failed.value.message
    assert gpu.calls() == []


def test_more_than_one_gpu_is_refused(gpu: Gpu, tmp_path: Path) -> None:
    gpu.reset(count=2)
    os.symlink("/dev/nvidia1", gpu.directory / "proc" / str(CORE) / "fd" / "10")
    with pytest.raises(CaptureError) as error:
        gpu.cuda.record(TREE)
    assert "/dev/nvidia0, /dev/nvidia1; set nvidia.com/gpu: 1" in error.value.message
    with pytest.raises(RestoreError) as failed:
        gpu.cuda.before_restore(with_devices(tmp_path, "nvidia0", "nvidia1"), RECORDED)
    assert failed.value.reason == Reason.GPU_NOT_SUPPORTED


def test_memory_that_two_processes_share_is_refused(gpu: Gpu) -> None:
    for pid in (ROOT, CORE, WORKER):
        os.symlink("/dev/nvidia-uvm", gpu.directory / "proc" / str(pid) / "fd" / "7")
    asked = []

    def same(pid: int, fd: int, other: int, other_fd: int) -> bool:
        asked.append((pid, fd, other, other_fd))
        return {pid, other} == {CORE, WORKER} and fd == other_fd == 7

    with contextlib.closing(gpu.accelerator(same_file=same)) as cuda_, pytest.raises(CaptureError) as error:
        cuda_.record(TREE)
    assert error.value.reason == Reason.GPU_NOT_SUPPORTED
    assert "processes 1001 (p5001) and 1002 (p5002) share /dev/nvidia-uvm" in error.value.message
    assert "CUDA IPC" in error.value.message
    assert gpu.calls() == []
    with contextlib.closing(gpu.accelerator(same_file=lambda *_: False)) as cuda_:
        assert cuda_.record(TREE) == RECORDED


def test_free_memory_is_looked_at_first(gpu: Gpu, container: Container) -> None:
    gpu.reset(CHECKPOINTED, free=2000 + cuda.MEMORY_MARGIN - 1)
    with pytest.raises(RestoreError) as error:
        gpu.cuda.before_restore(container, RECORDED)
    assert error.value.reason == Reason.INSUFFICIENT_GPU_MEMORY
    gpu.reset(CHECKPOINTED, free=2000 + cuda.MEMORY_MARGIN)
    gpu.cuda.before_restore(container, RECORDED)


def test_a_restored_process_that_the_driver_does_not_know(gpu: Gpu, container: Container) -> None:
    gpu.reset(CHECKPOINTED)
    (gpu.directory / "state" / str(WORKER)).unlink()
    with pytest.raises(RestoreError) as error:
        gpu.cuda.after_restore(container, RECORDED, TREE)
    assert error.value.reason == Reason.GPU_RESTORE_FAILED
    assert "[1002]" in error.value.message


# --- around it -------------------------------------------------------------------------------------------------------


class Host:
    """The places where a node tells of its GPUs, and the fake driver."""

    def __init__(self, directory: Path, gpu: Gpu) -> None:
        self.dev, self.proc, self.gpu = directory / "dev", directory / "proc", gpu
        self.dev.mkdir()
        self.proc.mkdir()
        self.env = dict(gpu.env)

    def add(self, *devices: str) -> Host:
        for name in devices:
            (self.dev / name).touch()
        return self

    def load_module(self) -> Host:
        (self.proc / "driver/nvidia").mkdir(parents=True)
        text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12.2.0\n"
        (self.proc / "driver/nvidia/version").write_text(text)
        return self

    def look(self, wanted: str = "auto", current: Accelerator | None = None) -> tuple[Accelerator, dict[str, tuple[str, str]]]:
        """The accelerator after an examination, and status and text of each finding."""
        before = Cpu() if current is None else current
        accelerator, seen = cuda.survey(before, wanted, dev=self.dev, proc=self.proc, env=self.env)
        checks = gpu_doctor.checks(seen)
        found = {name: check() for name, check in checks}
        assert all(remedy for status, _, remedy in found.values() if status != "Pass")
        assert all(name.startswith(doctor.GPU) for name in found)
        if accelerator is not before and isinstance(accelerator, Cuda):
            accelerator.close()
        return accelerator, {name: (status, f"{message} | {remedy}") for name, (status, message, remedy) in found.items()}


@pytest.fixture
def node(tmp_path: Path, gpu: Gpu) -> Host:
    return Host(tmp_path, gpu)


def test_a_node_without_gpu_passes(node: Host) -> None:
    # As with the toolkit installed and no driver.
    accelerator, found = node.add("nvidiactl").look()
    assert isinstance(accelerator, Cpu)
    assert found == {"gpu-driver": ("Pass", "no GPU | None")}
    assert node.gpu.count("Init") == 0
    assert not gpu_doctor.present(cuda.survey(Cpu(), "auto", dev=node.dev, proc=node.proc)[1])


def test_gpus_that_are_not_to_be_used_are_not_looked_at(node: Host) -> None:
    accelerator, found = node.add("nvidia0").load_module().look("cpu")
    assert isinstance(accelerator, Cpu)
    assert found["gpu-driver"][0] == "Pass"
    assert node.gpu.count("Init") == 0


def test_a_gpu_that_can_be_used_is(node: Host) -> None:
    accelerator, found = node.add("nvidia0").load_module().look()
    assert isinstance(accelerator, Cuda)
    assert {name: status for name, (status, _) in found.items()} == {
        "gpu-driver": "Pass",
        "gpu-mode": "Pass",
        "gpu-memory": "Pass",
    }
    # Again with the same one.
    assert node.look(current=accelerator)[0] is accelerator
    accelerator.close()


def test_a_driver_that_comes_later_is_taken_up(node: Host) -> None:
    node.env[driver.LIBCUDA] = "/nonexistent/libcuda.so.1"
    accelerator, found = node.add("nvidia0").look()
    assert isinstance(accelerator, Cpu)
    status, text = found["gpu-driver"]
    assert status == "Fail"
    assert "/nonexistent/libcuda.so.1: cannot open shared object file" in text
    assert "agent.runtimeClassName: nvidia" in text
    node.env = node.gpu.env
    assert isinstance(node.look(current=accelerator)[0], Cuda)


def test_a_driver_that_does_not_reach_the_agent(node: Host) -> None:
    accelerator, found = node.load_module().look()
    assert isinstance(accelerator, Cpu)
    status, text = found["gpu-driver"]
    assert status == "Fail"
    assert "580.95.05, but no /dev/nvidia0" in text
    assert "delete the agent's pod" in text


def test_a_driver_that_went_away_is_found_out(node: Host) -> None:
    accelerator, _ = node.add("nvidia0").look()
    node.gpu.inject("Facts 0 error 999")
    again, found = node.look(current=accelerator)
    assert again is accelerator
    assert found["gpu-driver"][0] == "Fail"
    assert isinstance(accelerator, Cuda)
    accelerator.close()


@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize("fault", ["", "Init 0 error 100", "Init 0 die", "Init 0 hang", "nvmlInit 0 error 9", "no library"])
def test_an_unusable_driver_fails_where_it_is_asked_for(node: Host, fault: str, files: bool) -> None:
    node.gpu.reset(**({} if fault else {"count": 0}))
    if fault == "no library":
        node.env[driver.LIBNVML] = "/nonexistent"
    elif fault:
        node.gpu.inject(fault)
    if files:
        node.add("nvidia0")
    accelerator = node.gpu.accelerator(env=node.env)
    with contextlib.closing(accelerator):
        again, found = node.look("cuda", current=accelerator)
    # What is asked for stays: captures fail with the reason instead of being made without the GPU.
    assert again is accelerator
    assert found["gpu-driver"][0] == "Fail"


@pytest.mark.parametrize(
    ("config", "check", "status", "words"),
    [
        (
            {"driver": "570.124.06", "api": 12080},
            "gpu-driver",
            "Fail",
            "570.124.06, CUDA API 12080: too old | install driver 580",
        ),
        ({"driver": "580.95.05", "api": 12080}, "gpu-driver", "Fail", "too old"),
        ({"mig": 1}, "gpu-mode", "Fail", "MIG is on | turn MIG off (nvidia.com/mig.config: all-disabled)"),
        ({"virtual": 2}, "gpu-mode", "Fail", "a vGPU | pass the whole GPU"),
        ({"virtual": 1}, "gpu-mode", "Pass", "Fake H200 (1)"),
        ({"compute": 2}, "gpu-mode", "Fail", "Prohibited | set the compute mode to Default"),
        ({"compute": 3}, "gpu-mode", "Warn", "Exclusive"),
        ({"free": 1 << 30}, "gpu-memory", "Pass", ""),
        ({"free": (1 << 37) - (20 << 30), "idle": 1}, "gpu-memory", "Warn", "20.0 GiB are in use, by no process"),
        ({"free": (1 << 37) - (1 << 30), "idle": 1}, "gpu-memory", "Pass", ""),
    ],
)
def test_settings_of_gpus(node: Host, config: Mapping[str, Any], check: str, status: str, words: str) -> None:
    node.gpu.reset(**{k: v for k, v in config.items() if k != "idle"})
    if "idle" in config:
        shutil.rmtree(node.gpu.directory / "used")
    _, found = node.add("nvidia0").look()
    assert found[check][0] == status
    assert words in found[check][1]


def test_one_gpu_with_mig_among_others_is_a_warning() -> None:
    good = {"uuid": "a", "mig": False, "virtual": 0, "compute": 0, "name": "x"}
    bad = {**good, "uuid": "b", "mig": True}
    assert gpu_doctor.mode([good, bad])[0] == "Warn"
    assert gpu_doctor.mode([bad, bad])[0] == "Fail"


def test_the_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert config.parse(["--node-name", "n"], {}).accelerator == "auto"
    assert config.parse(["--node-name", "n"], {"VLLMSNAPSHOT_ACCELERATOR": "cpu"}).accelerator == "cpu"
    with pytest.raises(SystemExit):
        config.parse(["--node-name", "n", "--accelerator", "tpu"], {})
    assert "--accelerator tpu" in capsys.readouterr().err


def test_devices_of_nvidia_are_claimed(gpu: Gpu) -> None:
    assert gpu.cuda.claims("/dev/nvidia0")
    assert gpu.cuda.claims("/dev/nvidia-uvm")
    assert not gpu.cuda.claims("/dev/kfd")


@pytest.mark.parametrize("recorded", [{}, {UUID: OLD}])
def test_a_tree_without_gpu_is_restored_whatever_the_driver_says(
    monkeypatch: pytest.MonkeyPatch, recorded: dict[str, str]
) -> None:
    class Unusable(Cpu):
        def facts(self) -> Mapping[str, str]:
            raise AgentError(Reason.GPU_UNAVAILABLE, "no driver")

    def node_facts(*_: object, accelerator: Mapping[str, str]) -> None:
        assert accelerator == {}
        raise RestoreError(Reason.IDENTITY_MISMATCH, "as far as this")

    monkeypatch.setattr("vllmsnapshot.agent.identity.node_facts", node_facts)
    container = cast(Container, Box(namespace=lambda _: os.readlink("/proc/self/ns/user"), proc=Path("/proc")))
    criu = cast(Criu, Box(version=lambda: "4.2.1", program=Path("criu")))
    with pytest.raises(AgentError) as error:
        restoring._check_place(container, cast(Manifest, Box(environment=recorded)), criu, Unusable(), time.monotonic() + 60)
    assert error.value.reason == (Reason.GPU_UNAVAILABLE if recorded else Reason.IDENTITY_MISMATCH)


def test_a_driver_that_fails_is_no_fault_of_the_node(tmp_path: Path, gpu: Gpu) -> None:
    flags = [
        "--node-name=n",
        f"--store-dir={tmp_path}",
        f"--kubelet-dir={tmp_path}",
        f"--criu-prefix={tmp_path}",
        "--accelerator",
    ]
    broken = gpu.accelerator(env={**gpu.env, driver.LIBCUDA: "/nonexistent/libcuda.so.1"})
    health = LocalOps(config.parse([*flags, "cuda"], {}), accelerator=broken).doctor()
    assert health.gpu is not None
    assert "/nonexistent/libcuda.so.1" in health.gpu
    assert "gpu" not in health.message
    health = LocalOps(config.parse([*flags, "cuda"], {}), accelerator=gpu.cuda).doctor()
    assert health.gpu == ""
    assert LocalOps(config.parse([*flags, "cpu"], {})).doctor().gpu is None


class _Broken(Cpu):
    def __init__(self, reason: str) -> None:
        self.reason = reason

    def after_dump(self, processes: Any) -> None:
        raise CaptureError(self.reason, "no")


def test_the_end_of_a_capture_hides_no_lost_replica(monkeypatch: pytest.MonkeyPatch, container: Container) -> None:
    monkeypatch.setattr(capturing, "resume_all", lambda _: 0)
    tree = Tree(root=TREE[0], processes=TREE, sources=[], estimate=0)
    capturing._thaw(container, tree, _Broken(Reason.GPU_UNAVAILABLE), {"copy": 1.0})
    with pytest.raises(CaptureError):
        capturing._thaw(container, tree, _Broken(Reason.GPU_STATE_LOST), {"copy": 1.0})


@pytest.mark.parametrize(("reason", "ended"), [(Reason.GPU_STATE_LOST, True), (Reason.GPU_CHECKPOINT_FAILED, False)])
def test_a_lost_replica_is_ended(reason: str, ended: bool) -> None:
    ops = object.__new__(LocalOps)
    with subprocess.Popen(["sleep", "600"]) as init, Container(init.pid) as container:
        with pytest.raises(CaptureError), ops._ended_if_lost(container):
            raise CaptureError(reason, "no")
        if not ended:
            assert init.poll() is None
            init.kill()
        assert init.wait() == -signal.SIGKILL
