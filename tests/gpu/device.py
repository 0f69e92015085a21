"""A GPU through the driver's own library: memory, copies, one kernel. Standard library only, and no other file of this project,
so that it can be copied to where it is used."""

from __future__ import annotations

import array
import ctypes
import os
import sys
from typing import Any, Final

KERNEL: Final = b"vllmsnapshot_mix"

PTX: Final = rb"""
.version 6.0
.target sm_50
.address_size 64

.visible .entry vllmsnapshot_mix(
	.param .u64 data,
	.param .u32 count,
	.param .u32 first,
	.param .u32 key
)
{
	.reg .pred %out;
	.reg .b32 %index, %size, %thread, %total, %start, %secret, %word, %high, %low;
	.reg .b64 %at, %offset;

	mov.u32 %index, %ctaid.x;
	mov.u32 %size, %ntid.x;
	mov.u32 %thread, %tid.x;
	mad.lo.u32 %index, %index, %size, %thread;
	ld.param.u32 %total, [count];
	setp.ge.u32 %out, %index, %total;
	@%out bra DONE;
	ld.param.u64 %at, [data];
	cvta.to.global.u64 %at, %at;
	mul.wide.u32 %offset, %index, 4;
	add.u64 %at, %at, %offset;
	ld.param.u32 %start, [first];
	ld.param.u32 %secret, [key];
	ld.global.u32 %word, [%at];
	shl.b32 %high, %word, 5;
	shr.u32 %low, %word, 27;
	or.b32 %word, %high, %low;
	add.u32 %start, %start, %index;
	xor.b32 %word, %word, %start;
	xor.b32 %word, %word, %secret;
	st.global.u32 [%at], %word;
DONE:
	ret;
}
"""
"""word[i] = rotate_left(word[i], 5) ^ (first + i) ^ key, for words of 32 bits. Every GPU since Maxwell takes it."""

THREADS: Final = 256
"""Per block."""

COMPUTE_CAPABILITY: Final = (75, 76)
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""


class CudaError(Exception):
    """A call of the driver failed with `code`; 2 is out of memory."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Device:
    """One GPU, its primary context current in the thread that made it."""

    def __init__(self, ordinal: int = 0, library: str | None = None) -> None:
        """Take the GPU with this number of those the process sees. Raises CudaError, OSError if there is no driver."""
        self._cuda = ctypes.CDLL(library or os.environ.get("VLLMSNAPSHOT_LIBCUDA") or "libcuda.so.1")
        self._call("cuInit", ctypes.c_uint(0))
        self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(ordinal))
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self.use()
        module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(PTX))
        self._kernel = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(self._kernel), module, ctypes.c_char_p(KERNEL))

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._cuda, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'unknown error').decode()} ({code})", code)

    def use(self) -> None:
        """Make the context current in the calling thread."""
        self._call("cuCtxSetCurrent", self._context)

    def name(self) -> str:
        """As `NVIDIA H200`."""
        text = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", text, ctypes.c_int(len(text)), self._device)
        return text.value.decode(errors="replace")

    def capability(self) -> str:
        """As `9.0`."""
        values = []
        for attribute in COMPUTE_CAPABILITY:
            value = ctypes.c_int()
            self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), self._device)
            values.append(value.value)
        return ".".join(map(str, values))

    def memory(self) -> tuple[int, int]:
        """Bytes free and in all."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, size: int) -> int:
        """The address, on the GPU, of so many bytes."""
        at = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size))
        return at.value

    def free(self, at: int) -> None:
        """Give an allocation back."""
        self._call("cuMemFree_v2", ctypes.c_uint64(at))

    def write(self, at: int, data: bytes | bytearray | memoryview) -> None:
        """Copy to the GPU."""
        view = memoryview(data)
        if view.readonly:
            source: Any = ctypes.c_char_p(bytes(view))
        else:
            source = (ctypes.c_char * view.nbytes).from_buffer(view)
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(at), source, ctypes.c_size_t(view.nbytes))

    def read(self, at: int, size: int) -> bytearray:
        """Copy from the GPU."""
        data = bytearray(size)
        self._call("cuMemcpyDtoH_v2", (ctypes.c_char * size).from_buffer(data), ctypes.c_uint64(at), ctypes.c_size_t(size))
        return data

    def mix(self, at: int, words: int, key: int, first: int = 0) -> None:
        """Run the kernel on so many words, and wait for it."""
        values = (ctypes.c_uint64(at), ctypes.c_uint32(words), ctypes.c_uint32(first), ctypes.c_uint32(key))
        arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        blocks = -(-words // THREADS)
        self._call(
            "cuLaunchKernel",
            self._kernel,
            *(ctypes.c_uint(n) for n in (blocks, 1, 1, THREADS, 1, 1, 0)),
            ctypes.c_void_p(),
            arguments,
            ctypes.c_void_p(),
        )
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until the GPU has done everything."""
        self._call("cuCtxSynchronize")

    def pinned(self, size: int) -> int:
        """The address, on the host, of so many bytes that the GPU reads and writes at full speed."""
        at = ctypes.c_void_p()
        self._call("cuMemAllocHost_v2", ctypes.byref(at), ctypes.c_size_t(size))
        return at.value or 0

    def unpin(self, at: int) -> None:
        """Give pinned memory back."""
        self._call("cuMemFreeHost", ctypes.c_void_p(at))

    def copy_in(self, at: int, host: int, size: int) -> None:
        """From an address on the host to one on the GPU."""
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(at), ctypes.c_void_p(host), ctypes.c_size_t(size))

    def copy_out(self, host: int, at: int, size: int) -> None:
        """From an address on the GPU to one on the host."""
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(host), ctypes.c_uint64(at), ctypes.c_size_t(size))


def mixed(data: bytes | bytearray, key: int, first: int = 0) -> bytes:
    """What the kernel makes of the data. Arithmetic on one large number, hence quick enough for all of the memory."""
    words = len(data) // 4
    ones = int.from_bytes(b"\1\0\0\0" * words, "little")
    low = ones * 0x1F
    number = int.from_bytes(data, "little")
    rotated = (number & ~(low << 27)) << 5 | (number >> 27) & low
    # Little-endian as the GPU is; a machine that is not has no NVIDIA driver.
    assert sys.byteorder == "little"
    index = array.array("I", (n & 0xFFFFFFFF for n in range(first, first + words)))
    return (rotated ^ int.from_bytes(index.tobytes(), "little") ^ ones * (key & 0xFFFFFFFF)).to_bytes(len(data), "little")
