"""Facts of a node, recorded with an artifact: which of them void it where they differ. Pure.

One rule for both who ask: the agent before a restore, which has the last word and knows more (CPU flags, image layers), and the
operator, which says `Stale` before anybody tries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

KERNEL: Final = "kernelRelease"
MACHINE: Final = "machine"
CPU: Final = "cpuModel"
CPU_FLAGS: Final = "cpuFlags"
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

NOT_COMPARED: Final = frozenset({BOOT, CPU, CPU_FLAGS, LAYERS}) | RECORDED
"""Recorded; compared otherwise (flags, layers, the accelerator's) or not at all (for people)."""


def of_device(recorded: Mapping[str, str]) -> bool:
    """Whether the processes had a GPU. Facts of GPUs are none of those that had none, whatever GPUs their node has or gets."""
    return any(name.startswith(DEVICE) for name in recorded)


def differences(recorded: Mapping[str, str], here: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Name, then and now of every fact that forbids a restore. One that only one side has is a difference: a GPU that is gone."""
    pairs = ((name, recorded.get(name, "none"), here.get(name, "none")) for name in sorted({*recorded, *here} - NOT_COMPARED))
    return [(name, then, now) for name, then, now in pairs if then != now]
