"""GPUs of a cluster that has none: files in the place of the hardware, the fake driver of tests/fakes, and a device plugin that
offers them to the real kubelet as `nvidia.com/gpu`.

What a container gets is what NVIDIA's device plugin and container toolkit give it: the files of its GPU under the names of the
driver's (minor number included), the driver's library, and the UUIDs in NVIDIA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests import fakes
from tests.cluster import cache, host
from tests.cluster.config import Daemon
from tests.cluster.progress import Progress

RESOURCE: Final = "nvidia.com/gpu"
MEBIBYTES: Final = 256
"""Memory of each GPU."""
LIBRARY: Final = "libcuda.so.1"
LIBRARIES: Final = "/usr/local/nvidia/lib64"
"""Where a container finds the driver's libraries, as in NVIDIA's base images."""
SHARED: Final = ("nvidiactl", "nvidia-uvm")
"""Device files that every container with a GPU gets."""

_AGENT: Final = "/run/fake-gpu"
"""The hardware in the agent's container."""


class Gpus:
    """The GPUs in the directory of a run."""

    def __init__(self, directory: Path, count: int) -> None:
        self.directory = directory
        self.count = count

    @property
    def hardware(self) -> Path:
        """The GPUs' memory, and the files that steer the driver (see tests/fakes/libcuda.c)."""
        return self.directory / "hardware"

    @property
    def settings(self) -> Path:
        """What the device plugin offers."""
        return self.directory / "plugin" / "devices.json"

    @staticmethod
    def uuid(number: int) -> str:
        """The UUID by which the driver calls the GPU."""
        return f"GPU-00000000-0000-0000-0000-{number:012x}"

    # Life.

    def create(self, progress: Progress) -> None:
        """Make them, healthy, with empty memory."""
        self.hardware.mkdir(parents=True)
        self.settings.parent.mkdir()
        fakes.make_gpus(self.hardware, self.count, MEBIBYTES)
        self.offer(progress=progress)

    def offer(self, *, ill: Sequence[int] = (), progress: Progress | None = None) -> None:
        """Offer them all to the kubelet, these as unhealthy."""
        libraries = _libraries(progress or Progress(quiet=True))
        cache.write_atomic(self.settings, json.dumps(offer(self.hardware, libraries, self.count, frozenset(ill)), indent=1))

    def plugin(self) -> Daemon:
        """The device plugin."""
        return Daemon(
            "deviceplugin",
            ("deviceplugin", f"-config={self.settings}", f"-allocations={self.directory / 'allocations'}"),
        )

    # Use.

    def allocations(self) -> list[list[str]]:
        """The UUIDs of every allocation so far, a list for each container."""
        try:
            return [line.split() for line in (self.directory / "allocations").read_text().splitlines()]
        except FileNotFoundError:
            return []

    def inject(self, *orders: str) -> None:
        """What the driver is to do wrong from now on ("CALL NTH KIND [NUMBER]"); nothing: it works. Calls are counted anew."""
        for file in self.hardware.glob("count.*"):
            file.unlink()
        cache.write_atomic(self.hardware / "control", "".join(f"{order}\n" for order in orders))

    def calls(self) -> list[str]:
        """Every call of the driver that changes a process, "NAME PID [OLD NEW]"."""
        try:
            return (self.hardware / "calls").read_text().splitlines()
        except FileNotFoundError:
            return []

    def agent_values(self) -> dict[str, Any]:
        """Values of the chart with which an agent finds driver and GPUs, as the container toolkit would bring them."""
        libraries = _libraries(Progress(quiet=True))
        files = {
            _AGENT: (self.hardware, "Directory"),
            LIBRARIES: (libraries, "Directory"),
            **{f"/dev/nvidia{n}": (self.hardware / f"gpu{n}", "File") for n in range(self.count)},
        }
        environment = {
            "VLLMSNAPSHOT_FAKE_GPU": _AGENT,
            "VLLMSNAPSHOT_LIBCUDA": f"{LIBRARIES}/{LIBRARY}",
            "VLLMSNAPSHOT_LIBNVML": f"{LIBRARIES}/{LIBRARY}",
        }
        return {
            "agent.extraEnv": [{"name": name, "value": value} for name, value in environment.items()],
            "agent.extraVolumes": [
                {"name": f"gpu-{i}", "hostPath": {"path": str(path), "type": kind}}
                for i, (path, kind) in enumerate(files.values())
            ],
            "agent.extraVolumeMounts": [{"name": f"gpu-{i}", "mountPath": target} for i, target in enumerate(files)],
        }


def offer(hardware: Path, libraries: Path, count: int, ill: frozenset[int] = frozenset()) -> dict[str, Any]:
    """The device plugin's settings."""

    def mount(source: Path, target: str, *, read_only: bool = False) -> dict[str, Any]:
        return {"host": str(source), "container": target, "readOnly": read_only}

    return {
        "resource": RESOURCE,
        "variable": "NVIDIA_VISIBLE_DEVICES",
        "env": {"LD_LIBRARY_PATH": LIBRARIES},
        "mounts": [*(mount(hardware / n, f"/dev/{n}") for n in SHARED), mount(libraries, LIBRARIES, read_only=True)],
        "devices": [
            {
                "id": Gpus.uuid(number),
                "healthy": number not in ill,
                "mounts": [mount(hardware / f"gpu{number}", f"/dev/nvidia{number}")],
            }
            for number in range(count)
        ],
    }


def _libraries(progress: Progress) -> Path:
    """The directory of the fake driver's libraries."""

    def build(directory: Path) -> None:
        host.ensure(("gcc",), progress)
        fakes.build_libcuda(directory)
        (directory / "libnvidia-ml.so.1").symlink_to(LIBRARY)

    return cache.publish("fake-gpu", cache.digest(Path(fakes.__file__).parent), build)
