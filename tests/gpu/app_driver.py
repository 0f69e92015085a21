"""A process that uses nothing but the driver: much memory, all of it different, and a kernel that works on a part of it.

`bandwidth BYTES` measures the GPU's copies and ends; `memory BYTES CONTROL` stays (see loop.py).
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator

from tests.gpu.device import Device, mixed
from tests.gpu.loop import attend, say

PIECE = 16 << 20
"""Bytes that are copied at once."""

WORKED_ON = 16 << 20
"""Bytes, at most, that the kernel works on in every round; the CPU does the same for comparison."""

SMALL = 64
"""Further allocations of a few bytes: the driver keeps several of them in one page."""

REPEATS = 5


def bandwidth(size: int) -> None:
    """Bytes per second between pinned memory and the GPU, each way, the best of a few."""
    gpu = Device()
    there, here = gpu.allocate(size), gpu.pinned(size)

    def best(copy: Callable[[], None]) -> float:
        seconds = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            copy()
            gpu.synchronize()
            seconds.append(time.perf_counter() - began)
        return size / min(seconds)

    to_device = best(lambda: gpu.copy_in(there, here, size))
    to_host = best(lambda: gpu.copy_out(here, there, size))
    gpu.unpin(here)
    gpu.free(there)
    say({"up": {"name": gpu.name(), "toDevice": to_device, "toHost": to_host, "bytes": size}})


def memory(size: int, control: str) -> None:
    """Fill the memory, then work and tell digests."""
    gpu = Device()
    sizes = [min(size // 8 & ~3, WORKED_ON)]
    rest = size - sizes[0]
    # Of several sizes, so that not all begin at the same place of a large page.
    while rest > 0:
        sizes.append(min(rest, 256 << 20, max(PIECE, rest // 2)))
        rest -= sizes[-1]
    sizes += [100 + n for n in range(SMALL)]
    allocations = [(gpu.allocate(n), n) for n in sizes]
    pattern = os.urandom(PIECE)
    word = 0
    for at, length in allocations:
        for offset, part in pieces(length):
            gpu.write(at + offset, pattern[:part])
            # Every word depends on its place: no part can stand for another.
            gpu.mix(at + offset, part // 4, key=0, first=word & 0xFFFFFFFF)
            word += part // 4
    worked = allocations[0]
    expected = gpu.read(*worked)

    def digest() -> str:
        total = hashlib.sha256()
        for at, length in allocations:
            for offset, part in pieces(length):
                total.update(gpu.read(at + offset, part))
        return total.hexdigest()

    def step(number: int) -> dict[str, object]:
        nonlocal expected
        before = digest()
        gpu.mix(worked[0], worked[1] // 4, key=number)
        expected = bytearray(mixed(expected, key=number))
        return {"before": before, "correct": gpu.read(*worked) == expected, "after": digest()}

    attend(control, {"bytes": sum(sizes), "device": gpu.name(), "computeCapability": gpu.capability()}, step)


def pieces(length: int) -> Iterator[tuple[int, int]]:
    """Offsets and lengths of at most PIECE."""
    return ((offset, min(PIECE, length - offset)) for offset in range(0, length, PIECE))


if __name__ == "__main__":
    if sys.argv[1] == "bandwidth":
        bandwidth(int(sys.argv[2]))
    else:
        memory(int(sys.argv[2]), sys.argv[3])
