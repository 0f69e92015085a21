"""Memory and descriptors of this very process, made small and portable before CRIU writes them down. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import socket

MADV_DONTNEED = 4

NVML_USERS = 1000
"""More than can have initialised NVML in one process; after that the library is believed to count wrongly."""


def drop_pages(address: int, size: int) -> int:
    """Give the whole pages within [address, address + size) back to the kernel; bytes freed.

    Addresses stay valid and read as zeros. The ends, which share a page with something else, are left alone.
    """
    page = mmap.PAGESIZE
    first = -(-address // page) * page
    last = (address + size) // page * page
    if last <= first:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_DONTNEED):
        number = ctypes.get_errno()
        raise OSError(number, f"madvise: {os.strerror(number)}")
    return last - first


def trim_heap() -> None:
    """Collect garbage, return free heap to the kernel, and freeze what is left.

    Frozen objects are skipped by later collections: they would touch (and so fetch) every restored page, and vLLM runs three
    full collections when its HTTP application starts.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    libc = ctypes.CDLL(None)
    # glibc, or tcmalloc where it is preloaded (vLLM's CPU images do).
    for name, args in (("malloc_trim", (0,)), ("MallocExtension_ReleaseFreeMemory", ())):
        with contextlib.suppress(AttributeError):
            getattr(libc, name)(*args)


def park_listeners() -> list[str]:
    """Put an inert descriptor in the place of every listening inet socket of this process; what they were.

    With one rank nobody ever connects to the engine's own listeners (gloo opens 13). Left open they would tie the image to
    an address and to ports; a socket that is neither bound nor connected ties it to nothing.
    """
    parked = []
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        copy = _socket(fd)
        if copy is None:
            continue
        with copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                where = "{}:{}".format(*copy.getsockname()[:2])
            except OSError:
                continue
            inheritable = os.get_inheritable(fd)
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inert:
                os.dup2(inert.fileno(), fd, inheritable)
            parked.append(where)
    return parked


def _socket(fd: int) -> socket.socket | None:
    """The socket behind a descriptor, by a descriptor of its own; None if it is none. Leaves no descriptor behind: that of a GPU
    would keep the GPU from being let go."""
    try:
        own = os.dup(fd)
    except OSError:
        return None
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        return None


def resident_anonymous() -> int:
    """Bytes of this process that would go into an image (RssAnon)."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as f:
        for line in f:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def room(root: str = "/sys/fs/cgroup") -> int | None:
    """Bytes that the memory limit of this container leaves; None without a limit, or where it cannot be read.

    Page cache counts as free: the kernel gives it up before it runs into the limit.
    """
    for limit, used, stat, cache in (
        ("memory.max", "memory.current", "memory.stat", "file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_cache"),
    ):
        try:
            total = int(_text(root, limit))
            taken = int(_text(root, used))
            lines = (line.split() for line in _text(root, stat).splitlines())
            values = {fields[0]: int(fields[1]) for fields in lines if len(fields) == 2}
        except (OSError, ValueError):  # another version of cgroups; "max" is no number either
            continue
        # tmpfs is in the cache's figure, and does not go away.
        kept = values.get("total_shmem" if cache == "total_cache" else "shmem", 0)
        # v1 says "no limit" as the largest multiple of the page size.
        return None if total >= 1 << 60 else total - taken + max(0, values.get(cache, 0) - kept)
    return None


def _text(root: str, name: str) -> str:
    with open(os.path.join(root, name), encoding="ascii") as f:
        return f.read()


def close_nvml() -> int:
    """Shut NVML down as often as it was initialised in this process; how often that was.

    torch asks NVML whether there is a GPU (vLLM makes it do so, PYTORCH_NVML_BASED_CUDA_CHECK) and leaves it initialised: with
    descriptors of /dev/nvidiactl that no driver's checkpoint closes and CRIU cannot dump. Who needs NVML initialises it again.
    """
    try:
        # Only where it is loaded already.
        library = ctypes.CDLL("libnvidia-ml.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        shut = library.nvmlShutdown
    except (OSError, AttributeError):
        return 0
    times = 0
    while times < NVML_USERS and shut() == 0:
        times += 1
    return times
