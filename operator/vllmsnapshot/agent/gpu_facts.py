"""What the driver tells of a node and its GPUs, and what of it is compared."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from .driver import DRIVER_MINIMUM

DEVICE: Final = re.compile(r"/dev/nvidia(\d+)")

API_MINIMUM: Final = 13000

DRIVER_VERSION: Final = "gpuDriver"
CUDA_API: Final = "gpuCudaApi"
PRODUCT: Final = "gpuProduct"
COMPUTE_CAPABILITY: Final = "gpuComputeCapability"
MEMORY: Final = "gpuMemoryBytes"
MIG: Final = "gpuMig"
"""Facts of the node, compared for equality."""


def describe(facts: Mapping[str, Any]) -> Mapping[str, str]:
    """What of the driver's answer (`Driver.Facts`) identifies a node."""

    def of_all(name: str) -> str:
        # A node has GPUs of one kind; where it has several, an artifact is bound to the same mixture.
        return ", ".join(sorted({str(d[name]) for d in facts["devices"]})) or "none"

    return {
        DRIVER_VERSION: facts["driver"],
        CUDA_API: str(facts["api"]),
        PRODUCT: of_all("name"),
        COMPUTE_CAPABILITY: of_all("capability"),
        MEMORY: of_all("total"),
        MIG: of_all("mig"),
    }


def too_old(facts: Mapping[str, Any]) -> bool:
    """Whether the driver lacks what is needed."""
    major = int(re.match(r"\d*", facts["driver"])[0] or 0)  # type: ignore[index]
    return major < DRIVER_MINIMUM or facts["api"] < API_MINIMUM


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What can be seen of the node's GPUs from the agent's container."""

    wanted: str
    """The setting: auto, cpu or cuda."""
    files: bool = False
    """Whether there is a /dev/nvidia0 (any number)."""
    module: str = ""
    """Version of the kernel's driver, empty if none is loaded. Seen without any library and without device files."""
    facts: Mapping[str, Any] | None = None
    """As the driver tells them (`Driver.Facts`); None if it was not asked, or did not answer."""
    error: str = ""
    """Why it did not answer."""
