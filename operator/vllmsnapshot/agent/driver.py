"""The driver's two libraries, libcuda and libnvidia-ml, by ctypes, and the process that calls them for the agent (`cuda.py`).

    python -S -m vllmsnapshot.agent.driver DESCRIPTOR

answers requests on a socket, a line of JSON each: {"op": "Lock", "pid": 7, …} → {"result": …} or {"error": text, "code": number}.
It imports the standard library only.

`cuda-bindings` would bring generated signatures for these few functions, and with them a package of 10 MB whose version must suit the
node's driver; libcuda keeps this ABI since CUDA 12.8, argument blocks of 64 bytes, zero by default.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

LIBCUDA: Final = "VLLMSNAPSHOT_LIBCUDA"
LIBNVML: Final = "VLLMSNAPSHOT_LIBNVML"
"""Environment: other paths of the two libraries of the driver."""

DRIVER_MINIMUM: Final = 580
"""The calls exist since 570 (CUDA 12.8); with 570 PyTorch gets "operation not supported" (cuda-checkpoint#34), and GPU pairs,
needed where a replica gets another GPU of the same kind, came with 580 (CUDA 13.0)."""

OUT_OF_MEMORY: Final = 2
NOT_INITIALIZED: Final = 3
"""CUresult: what GetState says of a process that does not use CUDA."""

VGPU: Final = 2
"""NVML_GPU_VIRTUALIZATION_MODE_VGPU; above it, modes of a hypervisor's host. Below: none (0), passed through (1)."""

NVML_NOT_SUPPORTED: Final = 3
NVML_INSUFFICIENT_SIZE: Final = 7
UNKNOWN_BYTES: Final = (1 << 64) - 1


class DriverError(Exception):
    """A call of the driver failed (`code`), or its helper hung or died (`code` is None)."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class _LockArgs(ctypes.Structure):
    _fields_ = [("timeoutMs", ctypes.c_uint), ("reserved", ctypes.c_char * 60)]


class _Pair(ctypes.Structure):
    _fields_ = [("old", ctypes.c_char * 16), ("new", ctypes.c_char * 16)]


class _RestoreArgs(ctypes.Structure):
    _fields_ = [("pairs", ctypes.c_void_p), ("count", ctypes.c_uint), ("reserved", ctypes.c_char * 52)]


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _ProcessInfo(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpuInstance", ctypes.c_uint),
        ("computeInstance", ctypes.c_uint),
    ]


class Driver:
    """The two libraries. A call that fails raises DriverError with the driver's code."""

    def __init__(self) -> None:
        self._cuda: Any = None
        self._nvml: Any = None

    def Init(self) -> None:  # noqa: N802 - operations have the driver's names
        """Load and initialise. A restore needs cuInit, or persistence mode."""
        try:
            self._cuda = ctypes.CDLL(os.environ.get(LIBCUDA) or "libcuda.so.1")
            self._nvml = ctypes.CDLL(os.environ.get(LIBNVML) or "libnvidia-ml.so.1")
        except OSError as e:
            raise DriverError(str(e)) from e
        self._call("cuInit", ctypes.c_uint(0))
        self._ask("nvmlInit_v2")

    def GetState(self, pid: int) -> int:  # noqa: N802
        """CUprocessState."""
        state = ctypes.c_int(-1)
        self._call("cuCheckpointProcessGetState", ctypes.c_int(pid), ctypes.byref(state))
        return state.value

    def Lock(self, pid: int, timeout_ms: int) -> None:  # noqa: N802
        """Let further calls of CUDA wait, and wait for those that run."""
        self._call("cuCheckpointProcessLock", ctypes.c_int(pid), ctypes.byref(_LockArgs(timeoutMs=timeout_ms)))

    def Checkpoint(self, pid: int) -> None:  # noqa: N802
        """Copy the GPU's memory to the host and let go of the GPU."""
        self._call("cuCheckpointProcessCheckpoint", ctypes.c_int(pid), None)

    def Restore(self, pid: int, pairs: Sequence[Sequence[str]] = ()) -> None:  # noqa: N802
        """The way back. Without pairs on the same GPU."""
        if not pairs:
            self._call("cuCheckpointProcessRestore", ctypes.c_int(pid), None)
            return
        array = (_Pair * len(pairs))()
        for item, (old, new) in zip(array, pairs, strict=True):
            ctypes.memmove(ctypes.addressof(item), _uuid_bytes(old) + _uuid_bytes(new), 32)
        args = _RestoreArgs(pairs=ctypes.addressof(array), count=len(pairs))
        self._call("cuCheckpointProcessRestore", ctypes.c_int(pid), ctypes.byref(args))

    def Unlock(self, pid: int) -> None:  # noqa: N802
        """Let it call CUDA again."""
        self._call("cuCheckpointProcessUnlock", ctypes.c_int(pid), None)

    def Facts(self, pids: Sequence[int] = ()) -> dict[str, Any]:  # noqa: N802
        """Driver and devices; `used` is what these processes use of each, None if it cannot be told."""
        text = ctypes.create_string_buffer(96)
        self._ask("nvmlSystemGetDriverVersion", text, ctypes.c_uint(len(text)))
        api = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(api))
        count = ctypes.c_uint()
        self._ask("nvmlDeviceGetCount_v2", ctypes.byref(count))
        devices = [self._device(i, set(pids)) for i in range(count.value)]
        return {"driver": text.value.decode(errors="replace"), "api": api.value, "devices": devices}

    def _device(self, index: int, pids: set[int]) -> dict[str, Any]:
        handle = ctypes.c_void_p()
        self._ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        name, uuid = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
        self._ask("nvmlDeviceGetName", handle, name, ctypes.c_uint(len(name)))
        self._ask("nvmlDeviceGetUUID", handle, uuid, ctypes.c_uint(len(uuid)))
        minor, major_cc, minor_cc = ctypes.c_uint(), ctypes.c_int(), ctypes.c_int()
        self._ask("nvmlDeviceGetMinorNumber", handle, ctypes.byref(minor))
        self._ask("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major_cc), ctypes.byref(minor_cc))
        memory = _Memory()
        self._ask("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        mig, pending, virtual, compute = ctypes.c_uint(0), ctypes.c_uint(0), ctypes.c_int(0), ctypes.c_uint(0)
        # Not supported by GPUs that have no MIG, and where nothing is virtual.
        self._ask("nvmlDeviceGetMigMode", handle, ctypes.byref(mig), ctypes.byref(pending), may=NVML_NOT_SUPPORTED)
        self._ask("nvmlDeviceGetVirtualizationMode", handle, ctypes.byref(virtual), may=NVML_NOT_SUPPORTED)
        self._ask("nvmlDeviceGetComputeMode", handle, ctypes.byref(compute), may=NVML_NOT_SUPPORTED)
        running = self._running(handle)
        return {
            "name": name.value.decode(errors="replace"),
            "uuid": uuid.value.decode(errors="replace"),
            "minor": minor.value,
            "capability": f"{major_cc.value}.{minor_cc.value}",
            "total": memory.total,
            "free": memory.free,
            "mig": bool(mig.value),
            "virtual": virtual.value,
            "compute": compute.value,
            "processes": None if running is None else len(running),
            "used": _sum(n for pid, n in running or () if pid in pids),
        }

    def _running(self, handle: ctypes.c_void_p) -> list[tuple[int, int]] | None:
        """Processes with a context on the device and their bytes; None if it cannot be told."""
        infos = (_ProcessInfo * 256)()
        count = ctypes.c_uint(len(infos))
        may = (NVML_NOT_SUPPORTED, NVML_INSUFFICIENT_SIZE)
        if self._ask("nvmlDeviceGetComputeRunningProcesses_v3", handle, ctypes.byref(count), infos, may=may):
            return None
        return [(int(i.pid), int(i.used)) for i in infos[: count.value]]

    def _call(self, name: str, *args: Any) -> None:
        try:
            function = getattr(self._cuda, name)
        except AttributeError as e:
            raise DriverError(f"libcuda has no {name}: install driver {DRIVER_MINIMUM} or newer on the node") from e
        code = function(*args)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({code})", code)

    def _ask(self, name: str, *args: Any, may: int | tuple[int, ...] = 0) -> int:
        """A call of NVML that succeeds or answers what it `may`. Raises DriverError."""
        try:
            function = getattr(self._nvml, name)
        except AttributeError as e:
            raise DriverError(f"libnvidia-ml has no {name}") from e
        code = int(function(*args))
        if code and code not in (may if isinstance(may, tuple) else (may,)):
            raise DriverError(f"{name}: NVML error {code}", -code)
        return code


def _sum(values: Iterable[int]) -> int | None:
    """The sum; None of nothing, or where one of them is not known."""
    found = list(values)
    return None if UNKNOWN_BYTES in found or not found else sum(found)


def _uuid_bytes(text: str) -> bytes:
    return bytes.fromhex(text.removeprefix("GPU-").replace("-", ""))


def main() -> None:
    """Answer requests, a line of JSON each, until the agent closes the socket."""
    driver = Driver()
    connection = socket.socket(fileno=int(sys.argv[1]))
    with connection, connection.makefile("rw", encoding="utf-8") as stream:
        for line in stream:
            request = json.loads(line)
            operation = getattr(driver, request.pop("op"))
            try:
                answer = {"result": operation(**request)}
            except DriverError as e:
                answer = {"error": str(e), "code": 0 if e.code is None else e.code}
            stream.write(json.dumps(answer) + "\n")
            stream.flush()


if __name__ == "__main__":
    main()
