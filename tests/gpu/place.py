"""The machine that the proof runs on: device files, the driver's libraries, and what a container must see of them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.fakes import build_libcuda, make_gpus
from vllmsnapshot.agent import driver
from vllmsnapshot.agent.containers import parse_mountinfo

ROOT: Final = Path(__file__).resolve().parents[2]

CONTROL_DEVICES: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")

HIDDEN: Final = ("/dev", "/proc", "/run", "/tmp")
"""Where a bare container has mounts of its own."""

LIBRARIES: Final = "/usr/local/nvidia/lib64"
"""Where a container has the fake driver."""

FAKE_GPU: Final = "VLLMSNAPSHOT_FAKE_GPU"


class UnusableError(Exception):
    """Nothing can be proved on this machine; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """`mounts`: paths of a container, and what of the machine is there. `agent`, `application`: environment of the two sides."""

    mounts: Mapping[str, Path]
    agent: Mapping[str, str]
    application: Mapping[str, str] = field(default_factory=dict)
    fake: bool = False


def real(minor: int | None, paths: Sequence[Path]) -> Place:
    """The machine's own driver, and the GPU /dev/nvidiaMINOR, by default the first. `paths`: what containers must see besides.

    Raises UnusableError.
    """
    minors = sorted(int(m[1]) for f in Path("/dev").glob("nvidia*") if (m := re.fullmatch(r"nvidia(\d+)", f.name)))
    if not minors:
        raise UnusableError("there is no /dev/nvidia0: no GPU, or no driver of NVIDIA (to try the script without: --fake)")
    chosen = minors[0] if minor is None else minor
    if chosen not in minors:
        raise UnusableError(f"there is no /dev/nvidia{chosen}")
    mounts = {f"/dev/{n}": Path("/dev") / n for n in (f"nvidia{chosen}", *CONTROL_DEVICES) if (Path("/dev") / n).exists()}
    libraries = [_library(driver.LIBCUDA, "libcuda.so.1"), _library(driver.LIBNVML, "libnvidia-ml.so.1")]
    seen = [*paths, ROOT, Path(sys.prefix), Path(sys.base_prefix), *(p.parent for p in libraries)]
    mounts |= {str(p): p for p in _not_on_root(seen)}
    # What a library loads itself, such as the compiler of PTX, is beside it.
    search = ":".join(dict.fromkeys([*(str(p.parent) for p in libraries), *os.environ.get("LD_LIBRARY_PATH", "").split(":")]))
    return Place(
        mounts=mounts, agent=dict(os.environ), application={"LD_LIBRARY_PATH": search.strip(":"), "PYTHONPATH": _python_path()}
    )


@contextlib.contextmanager
def fake(megabytes: int, control: Sequence[str], paths: Sequence[Path]) -> Iterator[Place]:
    """The fake driver and a GPU of so much memory. `control`: what goes wrong, as tests/fakes/libcuda.c says."""
    # Not below /tmp, which a container has of its own; memory that is mapped shared belongs on a tmpfs.
    base = Path(tempfile.mkdtemp(prefix="vllmsnapshot-gpu-", dir="/dev/shm"))
    try:
        gpus, libraries = base / "gpus", base / "lib"
        gpus.mkdir()
        libraries.mkdir()
        make_gpus(gpus, 1, megabytes)
        (gpus / "control").write_text("".join(f"{line}\n" for line in control))
        library = build_libcuda(libraries)
        (libraries / "libnvidia-ml.so.1").symlink_to(library.name)
        devices = {"nvidia0": gpus / "gpu0", "nvidiactl": gpus / "nvidiactl", "nvidia-uvm": gpus / "nvidia-uvm"}
        seen = [*paths, ROOT, Path(sys.prefix), Path(sys.base_prefix)]
        yield Place(
            mounts={
                **{f"/dev/{name}": file for name, file in devices.items()},
                **{str(p): p for p in _not_on_root(seen)},
                LIBRARIES: libraries,
            },
            agent={**os.environ, driver.LIBCUDA: str(library), driver.LIBNVML: str(library), FAKE_GPU: str(gpus)},
            application={"LD_LIBRARY_PATH": LIBRARIES, "PYTHONPATH": _python_path()},
            fake=True,
        )
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _python_path() -> str:
    """For a process whose working directory is another one."""
    inherited = [p for p in os.environ.get("PYTHONPATH", "").split(":") if p.startswith("/")]
    return ":".join([str(ROOT), str(ROOT / "child"), *inherited])


def _library(variable: str, name: str) -> Path:
    """Where the dynamic loader finds a library of the driver. In a process of its own: this one loads no driver."""
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(open('/proc/self/maps').read())"
    wanted = os.environ.get(variable) or name
    done = subprocess.run([sys.executable, "-c", code, wanted], capture_output=True, text=True, check=False, timeout=60)
    stem = re.escape(name.partition(".so")[0])
    found = re.search(rf" (/\S*/{stem}\.so\S*)$", done.stdout, re.MULTILINE)
    if done.returncode or not found:
        raise UnusableError(f"{wanted} cannot be loaded: {done.stderr.strip().splitlines()[-1:]}")
    return Path(found[1])


def _not_on_root(paths: Sequence[Path]) -> list[Path]:
    """Those that a container does not see: its root is an overlay on the machine's root file system, and no other."""
    points = {m.point for m in parse_mountinfo(Path("/proc/self/mountinfo").read_text())} - {"/"}
    found: list[Path] = []
    for path in dict.fromkeys(p for given in paths for p in (given.absolute(), given.resolve())):
        parents = {str(p) for p in (path, *path.parents)}
        if parents & points or parents & set(HIDDEN):
            found.append(path)
    return [p for p in found if not any(q in p.parents for q in found)]
