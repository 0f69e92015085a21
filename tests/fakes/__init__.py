"""Stand-ins for what the machine of a test does not have. `libcuda.c` is the driver of a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path


def build_libcuda(directory: Path) -> Path:
    """Compile the fake driver; the library serves as libcuda and as libnvidia-ml."""
    library = directory / "libcuda.so.1"
    source = Path(__file__).parent / "libcuda.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(library), str(source)], check=True)
    return library
