"""The local node behind the cluster's back: processes of a pod, control files, files of an artifact. For tests that break things.

All of it is seen from outside: the cluster's processes are in this machine's /proc, and the kubelet's directory is on its disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.cluster import Cluster
from vllmsnapshot.api import constants as c

T = TypeVar("T")


_POD = re.compile(r"/pod([0-9a-f-]{36})")


@dataclass(frozen=True)
class Process:
    """A process of the cluster, seen from outside."""

    pid: int
    parent: int
    zombie: bool
    argv: tuple[str, ...]
    pod: str
    """UID of the pod in whose cgroup it is; empty outside of pods."""


class NodeView:
    """The node of a local cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    # --- processes ---

    def processes(self, pod_uid: str) -> dict[int, list[str]]:
        """PIDs (of this machine) and command lines of what runs in the pod's cgroups, the sandbox aside."""
        found = {}
        for pid, cgroups in _cgroups():
            if pod_uid in cgroups:
                with contextlib.suppress(OSError):
                    argv = [part.decode(errors="replace") for part in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]
                    if argv and argv[0] != "/pause":
                        found[pid] = argv
        return found

    def everything(self) -> dict[int, Process]:
        """All processes of the cluster by PID: daemons, containers and whatever else descends from its init."""
        found: dict[int, Process] = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    stat = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                    argv = Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
                    pod = _POD.search(Path(f"/proc/{entry}/cgroup").read_text())
                    found[int(entry)] = Process(int(entry), int(stat[1]), stat[0] in "ZX", tuple(argv), pod[1] if pod else "")
        init = self.cluster.pid

        def inside(pid: int) -> bool:
            while pid in found and pid != init:
                pid = found[pid].parent
            return pid == init

        return {pid: process for pid, process in found.items() if pid != init and inside(pid)}

    def running(self, word: str) -> list[Process]:
        """The cluster's processes that have this word in their command line."""
        return [p for p in self.everything().values() if not p.zombie and any(word in part for part in p.argv)]

    def tree(self, pod_uid: str) -> list[int]:
        """The engine's processes: all but PID 1 of the container."""
        return [pid for pid in self.processes(pod_uid) if _pid_inside(pid) not in (None, 1)]

    def gpus(self, pod_uid: str) -> set[int]:
        """Minor numbers of the GPUs that the engine's processes have open."""
        found = set()
        for pid in self.tree(pod_uid):
            with contextlib.suppress(OSError):
                for name in os.listdir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):
                        if match := re.fullmatch(r"/dev/nvidia(\d+)", os.readlink(f"/proc/{pid}/fd/{name}")):
                            found.add(int(match[1]))
        return found

    def init(self, pod_uid: str) -> int:
        """PID 1 of the pod's container; LookupError while there is none."""
        for pid in self.processes(pod_uid):
            if _pid_inside(pid) == 1:
                return pid
        raise LookupError(f"no container runs in pod {pod_uid}")

    def environment(self, pod_uid: str) -> dict[str, str]:
        """The environment of PID 1 of the container, as the kubelet made it."""
        init = self.init(pod_uid)
        items = Path(f"/proc/{init}/environ").read_bytes().decode(errors="replace").split("\0")
        return dict(item.split("=", 1) for item in items if "=" in item)

    def kill(self, pod_uid: str, word: str) -> int:
        """SIGKILL the pod's processes with this word in their command line; returns how many."""
        doomed = [pid for pid, argv in self.processes(pod_uid).items() if any(word in part for part in argv)]
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(doomed)

    # --- network ---

    def routes(self) -> dict[str, frozenset[str]]:
        """Where kube-proxy's rules lead requests: addresses with ports by namespace and name of the Service."""
        return destinations(self.cluster.exec(["iptables-save", "-t", "nat"], timeout=60))

    # --- control files ---

    def control(self, pod_uid: str) -> Path:
        """The pod's control directory."""
        return self.cluster.kubelet_dir / "pods" / pod_uid / "volumes/kubernetes.io~empty-dir" / c.CONTROL_VOLUME

    async def when(self, what: str, probe: Callable[[], T | None], timeout_s: float = 60.0) -> T:
        """Look every millisecond until the probe gives something: for acting in the middle of what takes milliseconds."""

        def look() -> T:
            end = time.monotonic() + timeout_s
            while not (value := probe()):
                if time.monotonic() > end:
                    raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
                time.sleep(0.001)
            return value

        return await asyncio.to_thread(look)

    async def control_file(self, pod_uid: str, name: str, text: str = "", timeout_s: float = 60.0) -> str:
        """Wait for a control file (that holds this text); returns what is in it."""
        path = self.control(pod_uid) / name

        def look() -> str | None:
            try:
                found = path.read_text()
            except OSError:
                return None
            return found if text in found else None

        return await self.when(f"{path}", look, timeout_s)

    # --- artifacts ---

    @property
    def store(self) -> Path:
        """The directory of the artifacts as the node sees it: a disk of its own may be mounted there."""
        return Path(f"/proc/{self.cluster.pid}/root") / self.cluster.store_dir.relative_to("/")

    def artifact(self, content: str) -> Path | None:
        """The directory of a content in the store, None if there is no such directory."""
        found = [p for p in self.store.rglob(f"{content}*") if p.is_dir()]
        return min(found, key=lambda p: len(p.parts)) if found else None

    def pages(self, content: str) -> list[Path]:
        """The files that hold the memory of the captured tree."""
        directory = self.artifact(content)
        assert directory is not None, f"{content} is not in {self.store}"
        found = sorted(directory.rglob("pages-*.img"), key=lambda p: p.stat().st_size)
        assert found, f"no pages in {directory}: {sorted(str(p) for p in directory.rglob('*'))}"
        return found


def destinations(rules: str) -> dict[str, frozenset[str]]:
    """Addresses with ports by NAMESPACE/NAME of a Service, out of what iptables-save prints of kube-proxy's rules."""
    found = defaultdict(set)
    for line in rules.splitlines():
        if line.startswith("-A KUBE-SEP-") and (match := re.search(r'--comment "?([^\s":]+).* --to-destination (\S+)', line)):
            found[match[1]].add(match[2])
    return {service: frozenset(addresses) for service, addresses in found.items()}


def flip(files: list[Path], needle: bytes, *, keep_time: bool = False) -> Path:
    """Invert a byte in the middle of `needle`, in each place where it stands; returns the last file that had it.

    `keep_time` gives the file its old modification time back, so that only its content tells.
    """
    last = None
    for path in files:
        before = path.stat()
        with path.open("r+b") as f, mmap.mmap(f.fileno(), 0) as content:
            at = content.find(needle)
            while at >= 0:
                content[at + len(needle) // 2] ^= 0xFF
                last = path
                at = content.find(needle, at + 1)
        if keep_time:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert last is not None, "the bytes are in none of the files"
    return last


def _cgroups() -> Iterator[tuple[int, str]]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                yield int(entry), Path(f"/proc/{entry}/cgroup").read_text()


def _pid_inside(pid: int) -> int | None:
    """The PID in the innermost namespace; None for a process that is gone or a zombie."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    return None if fields["State"].startswith(("Z", "X")) else int(fields["NSpid"].split()[-1])
