"""Facts of a node, recorded with an artifact: which of them void it where they differ. Pure.

One rule for both who ask: the agent before a restore, which has the last word and knows more (the container's image and files), and
the operator, which says `Stale` before anybody tries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

KERNEL: Final = "kernelRelease"
MACHINE: Final = "machine"
CPU: Final = "cpuModel"
CPU_FLAGS: Final = "cpuFlags"
"""Flags that every CPU of the node has, sorted, with blanks between. More of them than at the capture are welcome: code that was
compiled or chosen for a CPU runs on one that can do more."""
CRIU: Final = "criu"
LAYERS: Final = "imageLayers"
BOOT: Final = "bootId"

UUID: Final = "gpuUuid"
MEMORY_USED: Final = "gpuMemoryUsedBytes"
PIDS: Final = "gpuPids"
RECORDED: Final = frozenset({UUID, MEMORY_USED, PIDS})
"""Names of what `Accelerator.record` may return: facts of the processes, not of the node."""

DEVICE: Final = "gpu"
"""How the names of all facts about GPUs begin."""

NOT_COMPARED: Final = frozenset({BOOT, CPU, LAYERS}) | RECORDED
"""Recorded; compared otherwise (layers, the accelerator's) or not at all (for people)."""

FLAGS_NAMED: Final = 8
"""Missing CPU flags that are named."""


class Difference(NamedTuple):
    """A fact that forbids a restore."""

    name: str
    then: str
    now: str

    def __str__(self) -> str:
        """Names the fact."""
        return f"{self.name}: {self.now} instead of {self.then}"


def of_device(recorded: Mapping[str, str]) -> bool:
    """Whether the processes had a GPU. Facts of GPUs are none of those that had none, whatever GPUs their node has or gets."""
    return any(name.startswith(DEVICE) for name in recorded)


def differences(recorded: Mapping[str, str], here: Mapping[str, str]) -> list[Difference]:
    """Every fact that forbids a restore. One that only one side has is a difference (a GPU that is gone), but for CPU flags: a
    side that does not tell them says nothing of them."""
    if not of_device(recorded):
        here = {name: fact for name, fact in here.items() if not name.startswith(DEVICE)}
    names = sorted({*recorded, *here} - NOT_COMPARED - {CPU_FLAGS})
    found = [Difference(name, recorded.get(name, "none"), here.get(name, "none")) for name in names]
    found = [item for item in found if item.then != item.now]
    if CPU_FLAGS in recorded and CPU_FLAGS in here:
        missing = sorted({*recorded[CPU_FLAGS].split()} - {*here[CPU_FLAGS].split()})
        if missing:
            more = " ..." if len(missing) > FLAGS_NAMED else ""
            found.append(Difference(CPU_FLAGS, " ".join(missing[:FLAGS_NAMED]) + more, "none of them"))
    return found
