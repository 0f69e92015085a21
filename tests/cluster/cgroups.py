"""The cluster's cgroups: one subtree of a fixed name in every hierarchy, v1, v2 or both."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.errors import ClusterError


def hierarchies() -> list[Path]:
    """The mount points of every cgroup hierarchy."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if right.split()[0] in {"cgroup", "cgroup2"}:
            found.append(Path(left.split()[4]))
    return found


def create(name: str) -> None:
    """Make the (empty) subtree in every hierarchy; the kubelet wants its root to exist."""
    for hierarchy in hierarchies():
        (hierarchy / name).mkdir(exist_ok=True)


def _subtree(name: str) -> Iterator[Path]:
    """Every cgroup of the subtree, children before parents."""
    for hierarchy in hierarchies():
        for directory, _, _ in os.walk(hierarchy / name, topdown=False):
            yield Path(directory)


def processes(name: str) -> set[int]:
    """The PIDs of everything in the subtree."""
    found: set[int] = set()
    for directory in _subtree(name):
        # A cgroup may go between the walk and the read; a threaded one (v2) refuses to list processes.
        with contextlib.suppress(OSError):
            found.update(int(pid) for pid in (directory / "cgroup.procs").read_text().split())
    found.discard(0)
    return found


def thaw(name: str) -> None:
    """Thaw every cgroup of the subtree: a frozen process (v1) does not even die of SIGKILL."""
    for directory in _subtree(name):
        for file, value in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
            with contextlib.suppress(OSError):
                if (directory / file).exists():
                    (directory / file).write_text(value)


def remove(name: str, *, timeout: float = 20.0) -> None:
    """Kill what is in the subtree and remove it."""
    deadline = time.monotonic() + timeout
    while True:
        thaw(name)
        for pid in processes(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        left = None
        for directory in _subtree(name):
            try:
                directory.rmdir()
            except FileNotFoundError:
                continue
            except OSError as error:
                # Busy: a process is still on its way out.
                left = f"{directory}: {error.strerror}"
        if left is None:
            return
        if time.monotonic() > deadline:
            raise ClusterError(f"cgroup not removed within {timeout:.0f} s: {left}")
        time.sleep(0.05)
