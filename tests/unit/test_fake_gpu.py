"""The fake driver proves what a real one would only if a GPU's memory is outside of its processes until they are checkpointed.

Here an application and the driver's side, without CRIU and without device files in /dev.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import GPU_TABLE, build_libcuda, make_gpus
from tests.gpu import device
from vllmsnapshot.agent import driver
from vllmsnapshot.agent.cuda import CHECKPOINTED, FAILED, LOCKED, RUNNING, Cuda
from vllmsnapshot.agent.driver import DriverError

MIB = 1 << 20
PATTERN = b"a pattern that is nowhere else: "
"""32 bytes."""

APPLICATION = f"""
import json, os, sys
sys.path.insert(0, {str(Path(device.__file__).parent)!r})
from device import CudaError, Device
gpu = Device()
print(json.dumps({{"pid": os.getpid()}}), flush=True)
for line in sys.stdin:
    name, *args = json.loads(line)
    try:
        if name == "fork":
            child = os.fork()
            if child == 0:
                os.read(0, 1)
                os._exit(0)
            answer = child
        elif name == "write":
            answer = gpu.write(args[0], args[1].encode())
        elif name == "read":
            answer = gpu.read(*args).decode("latin-1")
        elif name == "memory":
            answer = gpu.memory()
        else:
            answer = getattr(gpu, name)(*args)
    except CudaError as e:
        answer = {{"code": e.code}}
    print(json.dumps(answer), flush=True)
"""


class Application:
    """A process that uses the GPU; calls are those of device.Device."""

    def __init__(self, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", APPLICATION], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.answer()["pid"]

    def post(self, *call: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the application has died"
        return json.loads(line)

    def call(self, *call: Any) -> Any:
        self.post(*call)
        return self.answer()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Machine:
    """Two GPUs of 4 MiB, the driver's side, and applications."""

    def __init__(self, base: Path, library: Path, stack: contextlib.ExitStack) -> None:
        self.gpus = base / "gpus"
        self.gpus.mkdir()
        make_gpus(self.gpus, 2, 4)
        self._dev = base / "dev"
        self._dev.mkdir()
        for name in ("nvidiactl", "nvidia-uvm"):
            (self._dev / name).symlink_to(self.gpus / name)
        self.plug(0)
        self._libraries = {driver.LIBCUDA: str(library), driver.LIBNVML: str(library)}
        self._stack = stack
        self.cuda = Cuda(env={**os.environ, **self._libraries, "VLLMSNAPSHOT_FAKE_GPU": str(self.gpus)})
        stack.callback(self.cuda.close)

    def plug(self, minor: int) -> None:
        (self._dev / f"nvidia{minor}").symlink_to(self.gpus / f"gpu{minor}")

    def application(self) -> Application:
        app = Application({**os.environ, **self._libraries, "VLLMSNAPSHOT_FAKE_DEV": str(self._dev)})
        self._stack.callback(app.close)
        return app

    def driver(self, op: str, app: Application, **args: Any) -> Any:
        with self.cuda.helpers.session() as session:
            return session.call(op, 60, pid=app.pid, **args)

    def lock(self, app: Application) -> None:
        self.driver("Lock", app, timeout_ms=1000)

    def restore(self, app: Application, *pairs: list[str]) -> None:
        self.driver("Restore", app, pairs=list(pairs))

    def state(self, app: Application) -> int:
        return int(self.driver("GetState", app))

    def content(self, minor: int) -> bytes:
        return (self.gpus / f"gpu{minor}").read_bytes()[GPU_TABLE:]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_libcuda(tmp_path_factory.mktemp("libcuda"))


@pytest.fixture
def machine(tmp_path: Path, library: Path) -> Iterator[Machine]:
    with contextlib.ExitStack() as stack:
        yield Machine(tmp_path, library, stack)


def test_memory_is_on_the_gpu_until_a_checkpoint_and_nowhere_else_then(machine: Machine) -> None:
    app = machine.application()
    at = app.call("allocate", MIB)
    app.call("write", at, PATTERN.decode())
    assert PATTERN in machine.content(0)
    machine.lock(app)
    machine.driver("Checkpoint", app)
    assert machine.content(0) == bytes(4 * MIB), "given back, and nothing stays there"
    assert not [x for x in os.listdir(f"/proc/{app.pid}/fd") if "gpu" in os.readlink(f"/proc/{app.pid}/fd/{x}")]
    assert str(machine.gpus) not in Path(f"/proc/{app.pid}/maps").read_text()
    machine.restore(app)
    machine.driver("Unlock", app)
    assert PATTERN in machine.content(0)
    assert app.call("read", at, len(PATTERN)) == PATTERN.decode(), "at the same address"


def test_calls_wait_until_the_memory_is_back(machine: Machine) -> None:
    app = machine.application()
    at = app.call("allocate", MIB)
    app.call("write", at, PATTERN.decode())
    machine.lock(app)
    app.post("read", at, len(PATTERN))
    machine.driver("Checkpoint", app)
    # Read now, the memory would be gone: the process would die.
    machine.restore(app)
    machine.driver("Unlock", app)
    assert app.answer() == PATTERN.decode()


def test_the_order_of_steps_is_the_drivers(machine: Machine) -> None:
    app = machine.application()
    for op in ("Checkpoint", "Unlock"):
        with pytest.raises(DriverError, match="ILLEGAL_STATE"):
            machine.driver(op, app)
    with pytest.raises(DriverError, match="ILLEGAL_STATE"):
        machine.restore(app)
    assert machine.state(app) == RUNNING
    machine.lock(app)
    assert machine.state(app) == LOCKED
    machine.driver("Unlock", app)
    assert machine.state(app) == RUNNING


def test_a_restore_needs_room_and_may_be_tried_again(machine: Machine) -> None:
    app = machine.application()
    at = app.call("allocate", 2 * MIB)
    app.call("write", at, PATTERN.decode())
    machine.lock(app)
    machine.driver("Checkpoint", app)
    other = machine.application()
    other.call("allocate", 3 * MIB)
    with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
        machine.restore(app)
    assert machine.state(app) == CHECKPOINTED
    other.close()
    machine.restore(app)
    machine.driver("Unlock", app)
    assert app.call("read", at, len(PATTERN)) == PATTERN.decode()


def test_memory_is_counted_and_comes_back_from_the_dead(machine: Machine) -> None:
    one, two = machine.application(), machine.application()
    at = one.call("allocate", MIB)
    one.call("write", at, PATTERN.decode())
    two.call("allocate", 2 * MIB)
    assert one.call("memory") == [MIB, 4 * MIB]
    assert two.call("allocate", 2 * MIB) == {"code": driver.OUT_OF_MEMORY}
    with machine.cuda.helpers.session() as session:
        facts = session.call("Facts", 60, pids=[one.pid, two.pid])
        assert [(d["free"], d["used"]) for d in facts["devices"]] == [(MIB, 3 * MIB), (4 * MIB, None)]
        one.close()
        facts = session.call("Facts", 60, pids=[])
        assert facts["devices"][0]["free"] == 2 * MIB
    two.call("allocate", MIB)
    assert PATTERN not in machine.content(0)


def test_a_restore_on_another_gpu(machine: Machine) -> None:
    app = machine.application()
    at = app.call("allocate", MIB)
    app.call("write", at, PATTERN.decode())
    machine.lock(app)
    machine.driver("Checkpoint", app)
    uuids = [f"GPU-00000000-0000-0000-0000-00000000000{n}" for n in range(2)]
    with pytest.raises(DriverError, match="INVALID_VALUE"):
        machine.restore(app, [uuids[1], uuids[0]])
    with pytest.raises(DriverError, match="NO_DEVICE"):
        machine.restore(app, uuids)
    machine.plug(1)
    machine.restore(app, uuids)
    machine.driver("Unlock", app)
    assert app.call("read", at, len(PATTERN)) == PATTERN.decode()
    assert machine.content(0) == bytes(4 * MIB)
    assert PATTERN in machine.content(1)


@pytest.mark.parametrize("op", ["Checkpoint", "Restore"])
def test_a_driver_that_loses_a_byte_can_be_had(machine: Machine, op: str) -> None:
    (machine.gpus / "control").write_text(f"{op} 1 lose\n")
    app = machine.application()
    at = app.call("allocate", 1)
    machine.lock(app)
    machine.driver("Checkpoint", app)
    machine.restore(app)
    machine.driver("Unlock", app)
    assert sum(app.call("read", at, 1 << 16).encode("latin-1")) == 1


def test_a_process_that_the_driver_gives_up_gets_errors(machine: Machine) -> None:
    (machine.gpus / "control").write_text(f"Lock 1 state {FAILED}\n")
    app = machine.application()
    machine.lock(app)
    assert machine.state(app) == FAILED
    assert app.call("allocate", MIB) == {"code": 999}


def test_faults_leave_an_application_as_they_say(machine: Machine) -> None:
    (machine.gpus / "control").write_text("Lock 1 error 999\nLock 2 stay\nLock 3 late 999\n")
    app = machine.application()
    with pytest.raises(DriverError):
        machine.lock(app)
    assert machine.state(app) == RUNNING
    machine.lock(app)
    assert machine.state(app) == RUNNING
    with pytest.raises(DriverError):
        machine.lock(app)
    assert machine.state(app) == LOCKED


def test_a_forked_child_and_other_processes_do_not_use_the_gpu(machine: Machine) -> None:
    app = machine.application()
    child = app.call("fork")
    with machine.cuda.helpers.session() as session:
        for pid in (child, os.getpid(), 1 << 22):
            with pytest.raises(DriverError, match="NOT_INITIALIZED"):
                session.call("GetState", 60, pid=pid)


def test_the_kernel_is_what_the_expectation_says(machine: Machine) -> None:
    app = machine.application()
    at = app.call("allocate", MIB)
    data = PATTERN * 32
    app.call("write", at, data.decode())
    app.call("mix", at, len(data) // 4 - 1, 0xDEADBEEF, 0xFFFFFFF0)
    expected = device.mixed(data[:-4], 0xDEADBEEF, 0xFFFFFFF0) + data[-4:]
    assert app.call("read", at, len(data)).encode("latin-1") == expected


def test_what_nvml_keeps_open_stays_until_it_is_closed(tmp_path: Path, library: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "libnvidia-ml.so.1").symlink_to(library)
    code = """
import ctypes, os
from vllmsnapshot_child.memory import close_nvml
def held():
    return sum("nvidiactl" in os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}"))
print(close_nvml(), held())
library = ctypes.CDLL("libnvidia-ml.so.1")
assert library.nvmlInit_v2() == library.nvmlInit_v2() == 0
print(held(), close_nvml(), held(), close_nvml())
"""
    env = {
        **os.environ,
        "LD_LIBRARY_PATH": str(tmp_path),
        "VLLMSNAPSHOT_FAKE_DEV": str(tmp_path),
        "PYTHONPATH": ":".join(sys.path),
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "0", "1", "2", "0", "0"]
