"""One chaos run: warm-up, faults under requests, convergence, audit."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from tests.chaos import audit as audits
from tests.chaos.blame import Blame
from tests.chaos.faults import PORT_RANGES, Faults, Missed
from tests.chaos.logs import LogKeeper
from tests.chaos.schedule import SIZES, Action, Kind
from tests.chaos.traffic import Say, Subject, Traffic, serves, size_argument
from tests.cluster import Cluster, ClusterError
from tests.node.snapshot import IMAGE
from tests.nodeview import NodeView
from tests.system import System, condition, connect
from vllmsnapshot.api import constants as c
from vllmsnapshot.kube import SNAPSHOTS, ApiError, Object

STORE_MIB: Final = 1536
"""Size of the disk of the artifacts, which is the cluster's own (a tmpfs): filling it fills nothing else. Each takes about 20, and the
agent calls a node with less than 1024 free not capable."""
ROUTES_S: Final = 0.5
"""Between two looks at kube-proxy's rules."""
CONVERGE_S: Final = 600.0
"""How long the system may take to come to rest: the kubelet's back-off of a container that was killed often is minutes."""


def own_disk(cluster: Cluster) -> None:
    """Give the artifacts a file system of their own; before the chart is installed, or its agents would see the old one."""
    cluster.exec(["mount", "-t", "tmpfs", "-o", f"size={STORE_MIB}m,mode=700", "chaos-store", str(cluster.store_dir)])


def manifests() -> list[Object]:
    """Two snapshots: one on the pod network, one on the node's with a port for each replica."""
    serving = [{}, {"hostNetwork": "Enabled", "portRange": {"start": PORT_RANGES[0][0], "end": PORT_RANGES[0][1]}}]
    return [
        {
            "apiVersion": c.API_VERSION,
            "kind": SNAPSHOTS.kind,
            "metadata": {"name": f"chaos-{number}", "namespace": "default"},
            "spec": {
                "model": "small",
                "image": IMAGE,
                "imagePullPolicy": "Never",
                "args": [size_argument(SIZES[number])],
                "env": [{"name": "VLLMSNAPSHOT_ENGINE", "value": "small:create"}],
                "serving": serving[number],
                # As often as the API allows: here captures fail because somebody fills the disk, and that ends.
                "capture": {"retries": 10},
                "restore": {"timeoutSeconds": 60},
            },
        }
        for number in range(len(serving))
    ]


class Run:
    """The state of a run, for the report: also of one that was cut off."""

    def __init__(self, seed: int, actions: Sequence[Action], say: Say) -> None:
        self.seed = seed
        self.actions = actions
        self.say = say
        self.done: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.log: list[str] = []
        self.faults: list[str] = []
        """What is wrong with the system."""
        self.unexplained: list[str] = []
        """Failed requests and outages that nothing done here explains. The explanations are drawn from what a watch tells, seconds late
        after an API server was away, so that a busy machine may leave one without."""
        self.facts: dict[str, Any] = {}
        self._began = time.monotonic()

    def note(self, text: str) -> None:
        """A line of the action log."""
        line = f"{time.monotonic() - self._began:7.1f}  {text}"
        self.log.append(line)
        self.say(line)

    def summary(self) -> dict[str, Any]:
        """For build/chaos.json."""
        return {
            "seed": self.seed,
            "passed": not self.faults and not self.unexplained,
            "faults": self.faults,
            "unexplained": self.unexplained,
            "seconds": round(time.monotonic() - self._began, 1),
            "actions": {
                kind.value: {"done": self.done[kind], "missed": self.missed[kind]}
                for kind in Kind
                if self.done[kind] or self.missed[kind]
            },
            **self.facts,
            "log": self.log,
        }

    async def play(self, cluster: Cluster, logs: Path) -> None:
        """Play it on a cluster with the chart installed; call within its network. What is wrong is in `faults` afterwards."""
        # Actions that wait for their moment take a thread each, and must not keep others from being done.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=32))
        blame = Blame(time.monotonic)
        traffic = Traffic(blame)
        node = NodeView(cluster)
        async with contextlib.AsyncExitStack() as stack:
            kept = await stack.enter_async_context(LogKeeper(cluster.pod_logs_dir, logs))
            system = await stack.enter_async_context(connect(cluster))
            subjects = [await stack.enter_async_context(Subject.under(system, node, m, traffic)) for m in manifests()]
            for subject in subjects:
                await subject.seeded()
                subject.scale(2)
                subject.wanted = 2
            for subject in subjects:
                await subject.ready(2, timeout_s=120)
            audit = audits.Audit(system, node, subjects)
            before = audits.sizes(node)
            faults = Faults(system, node, subjects)
            for task in (faults.supervise(), self._follow_routes(node, subjects)):
                stack.callback(asyncio.create_task(task).cancel)
            self.note(f"warm: {len(subjects)} snapshots, 2 replicas each; seed {self.seed}, {len(self.actions)} actions")
            asked = time.monotonic()
            async with contextlib.AsyncExitStack() as asking:
                loads = [await asking.enter_async_context(subject.asked()) for subject in subjects]
                await self._act(faults, traffic)
                self.note("no more faults")
                if not traffic.wrong:
                    await self._converge(system, faults, subjects)
            self._requests(traffic, sum(len(load.outcomes) for load in loads))
            now = time.monotonic()
            self.facts["excusable_share"] = {
                subject.name: round(blame.excusable_s(subject.name, asked, now) / (now - asked), 2) for subject in subjects
            }
            hard = sorted((w for w in blame.windows if not w.gentle), key=lambda w: min(w.ended, now) - w.began, reverse=True)
            self.facts["longest_excuses"] = [
                f"{w.snapshot} {w.uid}: {w.why}, {w.began - self._began:.1f} to {w.ended - self._began:.1f}" for w in hard[:5]
            ]
            if not self.faults:
                found = await audit.all()
                self.facts["left"] = found
                self.faults += [f"{name}: {item}" for name, items in found.items() for item in items]
                # Who writes at every resync does so in every such time; one late change of a report does not.
                writes = await audits.settled(audit.writes_at_rest)
                self.facts["writes_at_rest"] = len(writes)
                self.faults += [f"written at rest: {write}" for write in writes]
                after = audits.sizes(node)
                self.faults += audits.grown(before, after)
                self.facts["sizes"] = {
                    word: {"before": before[word].as_json(), "after": after[word].as_json()}
                    for word in before.keys() & after.keys()
                }
            self.facts["daemons_revived"] = faults.revived
            self._history(subjects)
        bad, told = kept.verdict()
        self.faults += [f"logged: {line}" for line in bad]
        self.facts["warnings"] = told

    async def _follow_routes(self, node: NodeView, subjects: list[Subject]) -> None:
        """Tell each snapshot for ever where requests to its Service go."""
        while True:
            with contextlib.suppress(ClusterError):
                routes = await asyncio.to_thread(node.routes)
                for subject in subjects:
                    subject.routed(routes.get(f"{subject.namespace}/{subject.name}", frozenset()))
            await asyncio.sleep(ROUTES_S)

    # --- acts ---

    async def _act(self, faults: Faults, traffic: Traffic) -> None:
        """Begin each action at its time, whatever the ones before are doing; stop at the first wrong answer."""
        start = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for action in self.actions:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(traffic.alarm.wait(), max(0.0, start + action.at - time.monotonic()))
                if traffic.alarm.is_set():
                    break
                tasks.create_task(self._one(faults, action))

    async def _one(self, faults: Faults, action: Action) -> None:
        try:
            told = await faults.do(action)
        except Missed as e:
            self.missed[action.kind] += 1
            self.note(f"#{action.number} {action.kind}: missed: {str(e).splitlines()[0]}")
        except (ApiError, ClusterError, LookupError, OSError, TimeoutError) as e:
            # The harness, not the system, failed to do something: it counts as not done, and is told.
            self.missed[action.kind] += 1
            self.note(f"#{action.number} {action.kind}: not done: {type(e).__name__}: {str(e)[:300]}")
        else:
            self.done[action.kind] += 1
            self.note(f"#{action.number} {action.kind}: {told}")

    async def _converge(self, system: System, faults: Faults, subjects: list[Subject]) -> None:
        """Everything that is wanted is there and says so; then each snapshot is asked for one replica more, and has an artifact."""
        began = time.monotonic()
        await faults.stop()
        try:
            for subject in subjects:
                await self._rests(system, subject)
            self.facts["converged_s"] = round(time.monotonic() - began, 1)
            self.note(f"at rest after {self.facts['converged_s']} s")
            for subject in subjects:
                # If its artifact was deleted while all replicas served, the next one that starts cold is captured.
                await faults.scale(subject, subject.wanted + 1)
            for subject in subjects:
                await self._rests(system, subject, artifact=True)
            self.note("one replica more each, and an artifact")
        except (TimeoutError, ApiError) as e:
            self.faults.append(f"does not come to rest: {str(e).splitlines()[0]}")
            for subject in subjects:
                with contextlib.suppress(LookupError, ApiError):
                    self.note(f"{subject.name}: {_conditions(await subject.get())}")

    async def _rests(self, system: System, subject: Subject, *, artifact: bool = False) -> None:
        wanted = {c.READY: "True", c.PROGRESSING: "False", c.DEGRADED: "False", c.STALE: "False"}
        if artifact:
            wanted[c.SNAPSHOT_READY] = "True"

        async def probe() -> bool:
            try:
                found = await subject.get()
                pods = await subject.pods()
            except ApiError:
                return False
            generation = found["metadata"]["generation"]
            true = all(condition(found, kind) == value for kind, value in wanted.items())
            now = condition(found, c.READY, "observedGeneration") == str(generation)
            there = len(pods) == subject.wanted == len(subject.seen.present) and all(serves(pod) for pod in pods)
            return true and now and there

        await system.until(f"{subject.name} to come to rest with {subject.wanted} replicas", probe, CONVERGE_S)

    # --- figures ---

    def _requests(self, traffic: Traffic, to_services: int) -> None:
        excused, guilty = traffic.judged()
        self.facts["requests"] = {
            "to_services": to_services,
            "answered": dict(traffic.answered),
            "wrong": len(traffic.wrong),
            "failed_excused": dict(excused.most_common()),
            "failed_unexcused": len(guilty),
        }
        self.faults += [f"wrong answer: {text}" for text in traffic.wrong]
        for episode in traffic.episodes():
            counted = Counter(f"{f.kind}{' ' + f.uid if f.uid else ''}: {f.error}" for f in episode.failures)
            said = "; ".join(f"{at - self._began:.1f} {text}" for at, text in episode.before)
            self.unexplained.append(
                f"{len(episode.failures)} requests to {episode.snapshot} failed without excuse from {episode.began - self._began:.1f} "
                f"to {episode.ended - self._began:.1f}: {dict(counted.most_common(5))}; before: {said}"
            )
        self.unexplained += [
            f"no ready replica of {w.snapshot} from {w.began - self._began:.1f} to {w.ended - self._began:.1f}, and nothing was done to it"
            for w in traffic.blame.outages
        ]

    def _history(self, subjects: list[Subject]) -> None:
        starts: Counter[str] = Counter()
        contents: Counter[str] = Counter()
        for subject in subjects:
            for uid in subject.seen.pods:
                for report in {(r.start, r.restarts): r for r in subject.seen.reports(uid) if r.start}.values():
                    starts[report.start] += 1
            for name in subject.seen.contents:
                found = subject.seen.content_conditions(name)
                contents.update(kind for kind in (c.CAPTURED, c.FAILED, c.QUARANTINED) if kind in found)
        self.facts["starts"] = dict(starts)
        self.facts["contents"] = dict(contents)
        self.facts["pods"] = sum(len(subject.seen.pods) for subject in subjects)


def _conditions(snapshot: Object) -> str:
    return "; ".join(
        f"{x['type']}={x['status']} {x['reason']}: {x['message']}" for x in snapshot.get("status", {}).get("conditions") or []
    )
