"""Memory and descriptors of this very process, made small and portable before CRIU writes them down. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import socket

MADV_DONTNEED = 4


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
        try:
            copy = socket.socket(fileno=os.dup(fd))
        except OSError:
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


def resident_anonymous() -> int:
    """Bytes of this process that would go into an image (RssAnon)."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as f:
        for line in f:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def fresh_entropy() -> None:
    """New state for the random generators that live in user space; clones of one image would share them.

    `secrets`, `uuid4` and `os.urandom` ask the kernel each time and need nothing. Python's hash seed cannot change. What the
    user seeded (a request's `seed`, vLLM's `--seed`) is not touched here.
    """
    import random
    import sys

    random.seed(os.urandom(32))
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(list(os.urandom(32)))
    with contextlib.suppress(ImportError):
        import ssl

        ssl.RAND_add(os.urandom(32), 32.0)
