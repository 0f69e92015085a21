"""What is done to a process before it becomes an image."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.child_harness import PATH
from vllmsnapshot_child import memory, vllm_worker
from vllmsnapshot_child.engine import EngineError
from vllmsnapshot_child.protocol import Reason
from vllmsnapshot_child.vllm_engine import REFUSED, check_arguments

PAGE = mmap.PAGESIZE


class Tensor:
    """As much of a torch tensor as the worker extension looks at."""

    def __init__(self, size: int, storage: mmap.mmap | None = None) -> None:
        self.map = storage or mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if storage is None:
            self.map[:] = b"\xaa" * size
        self.size = size

    def untyped_storage(self) -> Tensor:
        return self

    def data_ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def nbytes(self) -> int:
        return self.size


def test_only_whole_pages_are_dropped() -> None:
    tensor = Tensor(8 * PAGE)
    assert memory.drop_pages(tensor.data_ptr() + 100, 3 * PAGE) == 2 * PAGE
    assert tensor.map[:PAGE] == b"\xaa" * PAGE
    assert tensor.map[PAGE : 3 * PAGE] == bytes(2 * PAGE)
    assert tensor.map[3 * PAGE :] == b"\xaa" * 5 * PAGE


@pytest.mark.parametrize("size", [0, 1, PAGE - 1])
def test_less_than_a_page_is_left_alone(size: int) -> None:
    tensor = Tensor(PAGE)
    assert memory.drop_pages(tensor.data_ptr() + 1, size) == 0
    assert tensor.map[:] == b"\xaa" * PAGE


def test_what_is_not_mapped_is_an_error() -> None:
    gone = mmap.mmap(-1, PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(gone))
    gc.collect()
    with pytest.raises(OSError, match="madvise"):
        memory.drop_pages((1 << 62) + address, PAGE)


def test_trimming_leaves_the_collector_at_work() -> None:
    memory.trim_heap()
    frozen = gc.get_freeze_count()
    assert frozen > 0
    memory.trim_heap()  # a second time thaws, or what died in between would stay for ever
    assert gc.isenabled()
    gc.unfreeze()


def test_listeners_are_parked_and_everything_else_stays() -> None:
    script = """
import os, socket
from vllmsnapshot_child import memory
listeners = [socket.create_server(("127.0.0.1", 0)), socket.create_server(("::1", 0), family=socket.AF_INET6)]
bound = socket.socket(); bound.bind(("127.0.0.1", 0))
local = socket.socket(socket.AF_UNIX); local.bind("\\0vllmsnapshot-test-%d" % os.getpid()); local.listen()
fds = [s.fileno() for s in listeners]
ports = [s.getsockname()[1] for s in listeners]
device = open("/dev/null")
held = lambda: [os.path.realpath("/proc/self/fd/" + fd) for fd in os.listdir("/proc/self/fd")].count("/dev/null")
before = held()
parked = memory.park_listeners()
assert held() == before, "a second descriptor would keep a GPU from being let go"
assert sorted(parked) == sorted(["127.0.0.1:%d" % ports[0], "::1:%d" % ports[1]]), parked
assert [socket.socket(fileno=os.dup(fd)).family for fd in fds] == [socket.AF_UNIX] * 2
assert bound.getsockname()[1] and local.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
assert not any(os.get_inheritable(fd) for fd in fds)
assert memory.park_listeners() == []
for port in ports:
    try: socket.create_connection(("localhost", port)); raise SystemExit("still listening")
    except ConnectionRefusedError: pass
"""
    subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": PATH}, check=True)


def test_resident_memory_is_known() -> None:
    assert memory.resident_anonymous() > 1 << 20


@pytest.mark.parametrize(
    ("files", "room"),
    [
        ({}, None),
        ({"memory.max": "max\n", "memory.current": "5", "memory.stat": ""}, None),
        ({"memory.max": "1000\n", "memory.current": "600\n", "memory.stat": "anon 300\nfile 250\nshmem 50\n"}, 600),
        ({"memory.max": "1000", "memory.current": "600", "memory.stat": "what is this\n"}, 400),
        ({"memory.max": "1000", "memory.current": "", "memory.stat": ""}, None),
        (
            {
                "memory/memory.limit_in_bytes": "1000\n",
                "memory/memory.usage_in_bytes": "600\n",
                "memory/memory.stat": "cache 7\ntotal_cache 250\ntotal_shmem 50\n",
            },
            600,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/memory.usage_in_bytes": "600\n",
                "memory/memory.stat": "",
            },
            None,
        ),
    ],
)
def test_room_below_the_memory_limit(tmp_path: Path, files: dict[str, str], room: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory.room(str(tmp_path)) == room


def test_nvml_is_shut_down_as_often_as_it_was_initialised(tmp_path: Path) -> None:
    """By a stand-in for the library, with the descriptor that keeps a process from being dumped."""
    source = """
#include <fcntl.h>
#include <unistd.h>
static int users, device = -1;
int nvmlInit_v2(void) { if (!users++) device = open("/dev/null", O_RDONLY); return 0; }
int nvmlShutdown(void) { if (!users) return 1; if (!--users) { close(device); device = -1; } return 0; }
int held(void) { return device; }
"""
    library = tmp_path / "libnvidia-ml.so.1"
    (tmp_path / "nvml.c").write_text(source)
    gcc = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(library), str(tmp_path / "nvml.c")]
    subprocess.run(gcc, check=True)
    script = f"""
import ctypes
from vllmsnapshot_child import memory
assert memory.close_nvml() == 0, "it is loaded by nobody, and not by us"
assert "libnvidia-ml" not in open("/proc/self/maps").read()
nvml = ctypes.CDLL({str(library)!r})
for _ in range(3): nvml.nvmlInit_v2()
assert nvml.held() >= 0
assert memory.close_nvml() == 3
assert nvml.held() == -1
assert memory.close_nvml() == 0
"""
    subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": PATH}, check=True)


# --- the worker extension ---


class Model:
    def __init__(self, parameters: list[Any]) -> None:
        self._parameters = parameters
        self.loaded: list[Any] = []

    def parameters(self) -> list[Any]:
        return self._parameters


class Runner:
    def __init__(self, model: Model, kv_caches: list[Any]) -> None:
        self.model = model
        self.kv_caches = kv_caches

    def get_model(self) -> Model:
        return self.model


class Worker(vllm_worker.SnapshotExtension):
    def __init__(self, parameters: list[Any], kv_caches: list[Any]) -> None:
        self.model_runner = Runner(Model(parameters), kv_caches)


SMALL, LARGE = PAGE, vllm_worker.SMALLEST_DROPPED


def test_large_parameters_and_the_kv_cache_are_dropped_once_each() -> None:
    large, small, key, value = Tensor(LARGE), Tensor(SMALL), Tensor(LARGE), Tensor(SMALL)
    tied = Tensor(LARGE, large.map)
    worker = Worker([large, tied, small], [(key, value)])
    assert worker.vllmsnapshot_drop(True) == (LARGE, LARGE + SMALL)
    assert worker.vllmsnapshot_weight_bytes() == LARGE + SMALL
    assert large.map[:] == bytes(LARGE)
    assert key.map[:] == bytes(LARGE)
    assert value.map[:] == bytes(SMALL)
    assert small.map[:] == b"\xaa" * SMALL, "it may come from no checkpoint"


def test_weights_can_be_kept() -> None:
    large, key = Tensor(LARGE), Tensor(LARGE)
    assert Worker([large], [key]).vllmsnapshot_drop(False) == (0, LARGE)
    assert large.map[:] == b"\xaa" * LARGE


def test_a_users_own_extension_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm_worker.USER_EXTENSION, f"{__name__}.Theirs")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    extension = vllm_worker._compose()
    assert issubclass(extension, vllm_worker.SnapshotExtension)
    assert issubclass(extension, Theirs)
    monkeypatch.setenv(vllm_worker.USER_EXTENSION, "NoModule")
    with pytest.raises(ImportError, match="NoModule"):
        vllm_worker._compose()
    monkeypatch.delenv(vllm_worker.USER_EXTENSION)
    assert vllm_worker._compose() is vllm_worker.SnapshotExtension


class Theirs:
    def their_method(self) -> int:
        return 1


def test_no_name_of_the_extension_can_collide() -> None:
    """vLLM refuses to start if a public or private name is taken by its worker."""
    names = [n for n in dir(vllm_worker.SnapshotExtension) if not n.startswith("__")]
    assert all(n.startswith("vllmsnapshot_") for n in names), names


# --- arguments that cannot work ---


class Namespace:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("host", "0.0.0.0"),
        ("port", 9000),
        ("uds", "/s"),
        ("grpc", True),
        ("headless", True),
        ("api-server-count", 2),
        ("api-key", ["k"]),
        ("ssl-keyfile", "/k"),
        ("middleware", ["m"]),
        ("tensor-parallel-size", 2),
        ("pipeline-parallel-size", 2),
        ("data-parallel-size", 2),
        ("nnodes", 2),
        ("enable-expert-parallel", True),
        ("enable-eplb", True),
        ("enable-elastic-ep", True),
        ("distributed-executor-backend", "mp"),
        ("device-ids", [0]),
        ("kv-transfer-config", {"kv_connector": "NixlConnector"}),
        ("kv-events-config", {"publisher": "zmq"}),
        ("ec-transfer-config", {"ec_connector": "x"}),
        ("weight-transfer-config", {"backend": "nccl"}),
        ("otlp-traces-endpoint", "http://collector:4317"),
        ("kv-offloading-size", 4.0),
        ("cpu-offload-gb", 4.0),
        ("offload-group-size", 2),
        ("mm-tensor-ipc", "torch_shm"),
        ("enable-lora", True),
        ("lora-modules", ["l"]),
        ("speculative-config", {"method": "ngram"}),
        ("logprobs-mode", "raw_logits"),
    ],
)
def test_an_argument_that_cannot_work_is_named(flag: str, value: Any) -> None:
    assert flag in REFUSED
    with pytest.raises(EngineError, match=f"--{flag} is not supported") as e:
        check_arguments(Namespace(**{flag.replace("-", "_"): value}))  # type: ignore[arg-type]
    assert e.value.reason == Reason.BAD_ARGUMENTS


def test_defaults_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    defaults = {
        "host": None,
        "port": 8000,
        "api_server_count": 1,
        "tensor_parallel_size": 1,
        "logprobs_mode": "raw_logprobs",
        "nnodes": 1,
        "distributed_executor_backend": None,
        "device_ids": None,
        "cpu_offload_gb": 0,
        "offload_group_size": 0,
        "mm_tensor_ipc": "direct_rpc",
    }
    check_arguments(Namespace(**defaults))  # type: ignore[arg-type]


def test_an_api_key_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "k")
    with pytest.raises(EngineError, match="VLLM_API_KEY"):
        check_arguments(Namespace())  # type: ignore[arg-type]


def test_the_parked_socket_is_of_no_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fd = listener.fileno()
        memory.park_listeners()
        with socket.socket(fileno=os.dup(fd)) as inert:
            assert inert.family == socket.AF_UNIX
            assert inert.getsockname() == ""
