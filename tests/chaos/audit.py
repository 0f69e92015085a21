"""What is left when a run is over: every check returns what is wrong, in words; nothing wrong is an empty list.

Kubernetes tidies up some of it only after a while (dead containers, cgroups), so `settled` asks until a check finds nothing. What it
still finds at the end of its patience is a leak.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.chaos.faults import AGENT, OPERATOR, PORT_RANGES, part
from tests.chaos.traffic import Subject
from tests.nodeview import NodeView
from tests.system import SYSTEM_NAMESPACE, System, condition
from vllmsnapshot.api import constants as c
from vllmsnapshot.kube import CONTENTS, PODS, SERVICES, Object

Check = Callable[[], Awaitable[list[str]]]

REST_S: Final = 40.0
"""How long writes are counted at rest: longer than a resync of operator (30 s) and agent (10 s)."""
WRITES: Final = frozenset({"create", "update", "patch", "delete", "deletecollection"})
CHILD: Final = "vllmsnapshot_child"
_SHIM: Final = "containerd-shim"


async def settled(check: Check, patience_s: float = 180.0) -> list[str]:
    """The findings of a check that do not go away."""
    end = time.monotonic() + patience_s
    while True:
        found = await check()
        if not found or time.monotonic() > end:
            return found
        await asyncio.sleep(0.5)


class Audit:
    """The checks. Made after the warm-up, when nothing has happened yet: what is there then is what should be there again."""

    def __init__(self, system: System, node: NodeView, subjects: list[Subject]) -> None:
        self.system = system
        self.node = node
        self.subjects = subjects
        self.mounts = self._mounts(node.cluster.pid, set())
        self.replica_mounts = {
            subject.name: self._mount_points(node.init(pod["metadata"]["uid"]))
            for subject in subjects
            for pod in subject.seen.present[:1]
        }

    async def all(self) -> dict[str, list[str]]:
        """Every check by name."""
        checks: dict[str, Check] = {
            "processes": self.processes,
            "mounts": self.mounts_left,
            "mounts in replicas": self.mounts_in_replicas,
            "network namespaces": self.network_namespaces,
            "cgroups": self.cgroups,
            "artifacts": self.artifacts,
            "temporary files": self.temporary_files,
            "ports": self.ports,
            "objects": self.objects,
        }
        # At the same time: each waits for the kubelet's or the agent's own rounds.
        found = await asyncio.gather(*(settled(check) for check in checks.values()))
        return dict(zip(checks, found, strict=True))

    async def _pods(self) -> dict[str, Object]:
        return {pod["metadata"]["uid"]: pod for pod in await self.system.kube.list(PODS)}

    # --- the node ---

    async def processes(self) -> list[str]:
        """Nothing runs that no pod stands for; in each pod only what belongs there."""
        pods = await self._pods()
        found = []
        count: Counter[str] = Counter()
        there: dict[str, list[str]] = defaultdict(list)
        shims = 0
        everything = self.node.everything()
        busy = {process.parent for process in everything.values() if process.argv[1:2] != ("init",)}
        daemons = self.node.cluster.daemons()
        for process in everything.values():
            if process.zombie:
                parent = everything.get(process.parent)
                if parent is not None and any(CHILD in part or AGENT in part or OPERATOR in part for part in parent.argv):
                    found.append(f"zombie {process.pid}, child of {' '.join(parent.argv)[:120]}")
                continue
            name = " ".join(process.argv)[:160]
            if not process.pod:
                if process.argv and _SHIM in process.argv[0]:
                    # One without a container is what containerd leaves behind of a start that the kubelet's end cut off.
                    shims += process.pid in busy
                elif not process.argv or Path(process.argv[0]).name not in daemons:
                    found.append(f"process {process.pid} outside of pods: {name or '(no command line)'}")
            elif process.pod not in pods:
                found.append(f"process {process.pid} of pod {process.pod}, which is gone: {name}")
            elif process.argv[:1] != ("/pause",) and process.argv[1:2] != ("init",):
                # `runc init`: containerd leaves it behind where the kubelet was killed while it started a container.
                count[process.pod] += 1
                there[process.pod].append(name)
        for uid, pod in pods.items():
            replica = pod["metadata"].get("labels", {}).get(c.LABEL_ROLE) == c.ROLE_REPLICA
            wanted = 3 if replica else 1
            if count[uid] != wanted:
                found.append(
                    f"{count[uid]} processes in pod {pod['metadata']['name']}, should be {wanted}: {'; '.join(there[uid])}"
                )
        if shims != len(pods):
            found.append(f"{shims} containers' shims for {len(pods)} pods")
        return found

    def _mounts(self, pid: int, uids: Iterable[str]) -> Counter[str]:
        """Mount points of a process's namespace, without those of these pods and of containerd's tasks."""
        known = set(uids)
        points = self._mount_points(pid)
        return Counter(
            point
            for point in points.elements()
            if not any(uid in point for uid in known) and "/io.containerd." not in point and "/netns/" not in point
        )

    @staticmethod
    def _mount_points(pid: int) -> Counter[str]:
        lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
        return Counter(re.sub(r"/sandboxes/[0-9a-f]{64}", "/sandboxes/…", line.split()[4]) for line in lines)

    async def mounts_left(self) -> list[str]:
        """The node has the mounts that it had, and those of the pods that are there. The same for the agent."""
        pods = await self._pods()
        now = self._mounts(self.node.cluster.pid, pods)
        found = [f"{point} ({number} more than before)" for point, number in (now - self.mounts).items() if "/pods/" not in point]
        found += [f"{point} of a pod that is gone" for point in now if "/pods/" in point]
        roots = sum(point.endswith("/rootfs") for point in self._mount_points(self.node.cluster.pid).elements())
        if roots != 2 * len(pods):
            found.append(f"{roots} root file systems for {len(pods)} pods with a sandbox and a container each")
        agent = part(self.node, AGENT)
        if agent is None:
            return [*found, "no agent runs"]
        foreign = [point for point in self._mounts(agent.pid, pods) if "/pods/" in point]
        return found + [f"{point} in the agent, of a pod that is gone" for point in foreign]

    async def mounts_in_replicas(self) -> list[str]:
        """Captures and restores leave no mount in a container."""
        found = []
        for subject in self.subjects:
            for pod in subject.seen.present:
                name = pod["metadata"]["name"]
                try:
                    now = self._mount_points(self.node.init(pod["metadata"]["uid"]))
                except (LookupError, OSError) as e:
                    found.append(f"{name}: {e}")
                    continue
                before = self.replica_mounts[subject.name]
                found += [f"{point} in {name}" for point in (now - before)]
        return found

    async def network_namespaces(self) -> list[str]:
        """One for each pod with a network of its own."""
        there = len(list((Path(f"/proc/{self.node.cluster.pid}/root") / "run/netns").glob("*")))
        wanted = sum(not pod["spec"].get("hostNetwork") for pod in (await self._pods()).values())
        return [] if there == wanted else [f"{there} network namespaces for {wanted} pods"]

    async def cgroups(self) -> list[str]:
        """No cgroup of a pod that is gone."""
        pods = await self._pods()
        found = set()
        for root in self.node.cluster.cgroup_dirs:
            for directory in root.glob("**/pod*"):
                uid = directory.name.removeprefix("pod")
                if len(uid) == 36 and uid not in pods:
                    found.add(f"cgroup of pod {uid}, which is gone")
        return sorted(found)

    # --- artifacts ---

    async def artifacts(self) -> list[str]:
        """What is on the disk is what the API says is there."""
        contents = {x["metadata"]["name"]: x for x in await self.system.kube.list(CONTENTS)}
        there = set(os.listdir(self.node.store / "artifacts"))
        found = [f"{name} is on the disk and not in the API" for name in sorted(there - contents.keys())]
        for name, content in sorted(contents.items()):
            if "deletionTimestamp" in content["metadata"]:
                found.append(f"content {name} is still being deleted")
            if condition(content, c.CAPTURED) == "True" and name not in there:
                found.append(f"{name} is captured and not on the disk")
            if not any(condition(content, kind) == "True" for kind in (c.CAPTURED, c.FAILED)):
                found.append(f"the order {name} was never answered")
        return found

    async def temporary_files(self) -> list[str]:
        """No half-written artifact, none of CRIU's by-products, nothing in the agent's /tmp."""
        found = [f"tmp/{name} in the store" for name in os.listdir(self.node.store / "tmp")]
        known = {"artifacts", "tmp", "agent"}
        found += [f"{name} in the store" for name in os.listdir(self.node.store) if name not in known]
        found += [f"agent/{path.name}" for path in (self.node.store / "agent").rglob("*") if "tmp" in path.name]
        agent = part(self.node, AGENT)
        if agent is None:
            return [*found, "no agent runs"]
        found += [f"/tmp/{name} of the agent" for name in os.listdir(f"/proc/{agent.pid}/root/tmp")]
        for subject in self.subjects:
            for pod in subject.seen.present:
                for place in ("dev/shm", "tmp"):
                    with_root = Path(f"/proc/{self.node.init(pod['metadata']['uid'])}/root") / place
                    found += [f"/{place}/{x.name} in {pod['metadata']['name']}" for x in with_root.glob("*link_remap*")]
        return found

    # --- the API ---

    async def ports(self) -> list[str]:
        """Every hostNetwork replica has a port of its own and listens there; nobody listens on another."""
        assigned: Counter[int] = Counter()
        for pod in (await self._pods()).values():
            if pod["spec"].get("hostNetwork") and (text := pod["metadata"].get("annotations", {}).get(c.ANNOTATION_PORT)):
                assigned[int(text)] += 1
        found = [f"port {port} is assigned {number} times" for port, number in assigned.items() if number > 1]
        listening = self._listening()
        span = {port for start, end in PORT_RANGES for port in range(start, end + 1)}
        found += [f"nobody listens on port {port}" for port in assigned if port not in listening]
        found += [f"a process listens on port {port}, which no pod has" for port in sorted(listening & span - set(assigned))]
        return found

    def _listening(self) -> set[int]:
        ports = set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.node.cluster.pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    ports.add(int(fields[1].rpartition(":")[2], 16))
        return ports

    async def objects(self) -> list[str]:
        """The pods that are wanted and no others, their contents, one Service each."""
        found = []
        pods = await self._pods()
        names = {subject.name: subject for subject in self.subjects}
        for pod in pods.values():
            meta = pod["metadata"]
            if meta["namespace"] == SYSTEM_NAMESPACE:
                continue
            if meta.get("labels", {}).get(c.LABEL_SNAPSHOT) not in names:
                found.append(f"pod {meta['name']} belongs to nobody")
            if "deletionTimestamp" in meta:
                found.append(f"pod {meta['name']} is still being deleted")
        for subject in self.subjects:
            mine = [p for p in pods.values() if p["metadata"].get("labels", {}).get(c.LABEL_SNAPSHOT) == subject.name]
            if len(mine) != subject.wanted:
                found.append(f"{len(mine)} pods of {subject.name}, wanted {subject.wanted}")
        found += [
            f"content {x['metadata']['name']} belongs to nobody"
            for x in await self.system.kube.list(CONTENTS)
            if x["spec"]["snapshotRef"]["name"] not in names
        ]
        services = {x["metadata"]["name"] for x in await self.system.kube.list(SERVICES, "default")} - {"kubernetes"}
        if services != set(names):
            found.append(f"Services {sorted(services)}")
        return found

    # --- at rest ---

    def writes(self) -> list[str]:
        """What operator and agents have written so far, by the API server's audit log."""
        return [
            f"{name}: {event['verb']} {event['requestURI']}"
            for name in (c.COMPONENT_OPERATOR, c.COMPONENT_AGENT)
            for event in self.node.cluster.audited(f"system:serviceaccount:{SYSTEM_NAMESPACE}:vllmsnapshot-{name}")
            if event["verb"] in WRITES
        ]

    async def writes_at_rest(self) -> list[str]:
        """What is written when there is nothing to do."""
        before = len(self.writes())
        await asyncio.sleep(REST_S)
        return self.writes()[before:]


@dataclass(frozen=True)
class Size:
    """What a process takes."""

    resident_mib: float
    descriptors: int
    threads: int

    def as_json(self) -> dict[str, Any]:
        """For the summary."""
        return {"resident_mib": round(self.resident_mib, 1), "descriptors": self.descriptors, "threads": self.threads}


def sizes(node: NodeView) -> dict[str, Size]:
    """Of operator and agent."""
    found = {}
    for word in (OPERATOR, AGENT):
        process = part(node, word)
        if process is not None:
            status = dict(
                line.split(":\t", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if ":\t" in line
            )
            number = len(os.listdir(f"/proc/{process.pid}/fd"))
            found[word] = Size(int(status["VmRSS"].split()[0]) / 1024, number, int(status["Threads"]))
    return found


def grown(before: dict[str, Size], after: dict[str, Size]) -> list[str]:
    """What takes much more than after the warm-up: descriptors and threads that leak, memory that is never given back."""
    found = []
    for word in (OPERATOR, AGENT):
        if word not in before or word not in after:
            found.append(f"{word} does not run")
            continue
        old, new = before[word], after[word]
        if new.descriptors > old.descriptors + 24:
            found.append(f"{word}: {new.descriptors} descriptors, {old.descriptors} before")
        # The agent's pool of threads grows to what was ever needed at once (64 of the node's, asyncio's own, digests).
        if new.threads > old.threads + 80:
            found.append(f"{word}: {new.threads} threads, {old.threads} before")
        if new.resident_mib > 2 * old.resident_mib + 64:
            found.append(f"{word}: {new.resident_mib:.0f} MiB, {old.resident_mib:.0f} before")
    return found
