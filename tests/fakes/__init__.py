"""Stand-ins for what the machine of a test does not have. `libcuda.c` is the driver of a GPU, `application.c` the side of its users."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

GPU_TABLE = 65536
"""Bytes of a GPU's file before its memory; TABLE in gpu.h."""


def build_libcuda(directory: Path) -> Path:
    """Compile the fake driver; the library serves as libcuda and as libnvidia-ml."""
    library = directory / "libcuda.so.1"
    sources = [str(Path(__file__).parent / name) for name in ("libcuda.c", "application.c")]
    warnings = ["-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-pthread", *warnings, "-o", str(library), *sources], check=True)
    return library


def make_gpus(directory: Path, count: int = 1, megabytes: int = 256) -> None:
    """Make GPUs with empty memory, and the other device files; any user may open them."""
    for name in ("nvidiactl", "nvidia-uvm", *(f"gpu{n}" for n in range(count))):
        (directory / name).touch()
        (directory / name).chmod(0o666)
    for n in range(count):
        os.truncate(directory / f"gpu{n}", GPU_TABLE + (megabytes << 20))
