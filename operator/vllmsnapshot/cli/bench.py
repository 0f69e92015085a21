"""`bench NAME`: cold against restored on the user's own cluster.

Measured on a temporary copy of the snapshot: the snapshot itself, its replica count and its artifacts are never touched, and
an autoscaler of it sees nothing. The copy has one replica at a time: cold without a barrier (`capture.policy: Disabled`), cold
and captured, then restored from that artifact. It is deleted on every exit; should the program be killed outright, it is found
by its label, and goes with the snapshot that owns it. The seconds are the agent's own: pod creation to serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import secrets
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.text import Text

from ..api import constants as c
from ..kube import PODS, SNAPSHOTS, Kube, Object
from ..world import Replica
from . import timeline
from .cluster import until
from .errors import CliError, Exit
from .output import FAINT, GOOD, HEAD, Cell, Column, plain, table, took

COLD, CAPTURED, RESTORED = "cold", "cold, captured", "restored"
KINDS = (COLD, CAPTURED, RESTORED)


@dataclass(frozen=True)
class Run:
    """One start of the copy's replica."""

    kind: str
    seconds: float
    node: str
    phases: dict[str, float] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class Options:
    """How often, and how long to wait for one start (seconds)."""

    runs: int = 3
    cold_runs: int = 1
    timeout_s: float = 1800.0


def manifest(obj: Object, suffix: str) -> Object:
    """The copy: the same process image, no Service, no labels by which somebody else's Service would find its pods."""
    meta, spec = obj["metadata"], copy.deepcopy(obj["spec"])
    spec |= {
        "replicas": 0,
        "serving": {**(spec.get("serving") or {}), "service": "Disabled"},
        "capture": {**(spec.get("capture") or {}), "policy": "Disabled"},
        "restore": {**(spec.get("restore") or {}), "policy": "Prefer"},
        "artifact": {"retain": 1, "deletionPolicy": "Delete"},
    }
    template = spec.get("podTemplate") or {}
    if (template.get("metadata") or {}).get("labels"):
        spec["podTemplate"] = {**template, "metadata": {k: v for k, v in template["metadata"].items() if k != "labels"}}
    return {
        "apiVersion": c.API_VERSION,
        "kind": SNAPSHOTS.kind,
        "metadata": {
            "name": f"{meta['name'][:40].rstrip('-')}-bench-{suffix}",
            "namespace": meta["namespace"],
            "labels": {c.LABEL_BENCH: meta["name"]},
            "ownerReferences": [
                {
                    "apiVersion": c.API_VERSION,
                    "kind": SNAPSHOTS.kind,
                    "name": meta["name"],
                    "uid": meta["uid"],
                    "controller": False,
                }
            ],
        },
        "spec": spec,
    }


async def run(kube: Kube, obj: Object, options: Options, say: Callable[[str], None]) -> list[Run]:
    """All starts in turn. `say` is told what happens. Raises CliError and ApiError; the copy is gone in any case."""
    namespace, name = obj["metadata"]["namespace"], obj["metadata"]["name"]
    left = await kube.list(SNAPSHOTS, namespace, labels=f"{c.LABEL_BENCH}={name}")
    if left:
        other = left[0]["metadata"]["name"]
        raise CliError(
            Exit.PROBLEM, f"{other} is there: another bench runs, or was killed; then kubectl -n {namespace} delete vsnap {other}"
        )
    async with _copy(kube, obj) as made:
        bench = _Bench(kube, namespace, made["metadata"]["name"], options.timeout_s, say)
        runs = [await bench.start(COLD) for _ in range(options.cold_runs)]
        await bench.enable_capture()
        runs.append(await bench.start(CAPTURED))
        return runs + await bench.restored(options.runs)


@contextlib.asynccontextmanager
async def _copy(kube: Kube, obj: Object) -> AsyncIterator[Object]:
    body = manifest(obj, secrets.token_hex(2))
    namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
    ours = True
    try:
        made = await kube.create(SNAPSHOTS, body, c.MANAGER_CLI)
        if made is None:
            ours = False
            raise CliError(Exit.PROBLEM, f"{name} exists already; try again")
        yield made
    finally:
        # Also when the creation was cut off: the server may have made it.
        if ours:
            await asyncio.shield(kube.delete(SNAPSHOTS, name, namespace))


class _Slower(CliError):  # noqa: N818 - an answer, and no failure
    """The node restores no more: it takes longer than a cold start."""


class _Bench:
    def __init__(self, kube: Kube, namespace: str, name: str, timeout_s: float, say: Callable[[str], None]) -> None:
        self.kube, self.namespace, self.name, self.timeout_s, self.say = kube, namespace, name, timeout_s, say

    async def restored(self, runs: int) -> list[Run]:
        """So many restored starts; fewer where they prove slower than a cold one, which answers what the bench is to tell."""
        made: list[Run] = []
        with contextlib.suppress(_Slower):
            while len(made) < runs:
                made.append(await self.start(RESTORED))
        return made

    async def start(self, kind: str) -> Run:
        """Scale to one, wait until it serves (and is captured), scale to none, wait until it is gone."""
        self.say(f"{kind}: starting")
        await self._scale(1)
        replica = await self._wait("the replica to serve", _serving)
        if kind == CAPTURED:
            await self._captured()
        report = replica.report
        made = Run(kind, report.phases["total_s"], replica.node or "", report.phases, f"{report.reason}: {report.message}")
        expected = c.START_RESTORE if kind == RESTORED else c.START_COLD
        if kind == RESTORED and report.reason == c.Reason.RESTORE_SLOWER:
            self.say(f"no more is restored: {report.message}")
            raise _Slower(Exit.PROBLEM, report.message)
        if report.start != expected:
            raise CliError(Exit.PROBLEM, f"the replica came up {report.start} instead of {expected}: {made.reason}")
        self.say(f"{kind}: {took(made.seconds)} on node {made.node}")
        await self._scale(0)
        await self._wait("the replica to end", lambda pods: None if pods else True)
        return made

    async def enable_capture(self) -> None:
        """From here on a cold start is captured."""
        change: list[Object] = [{"op": "replace", "path": "/spec/capture/policy", "value": "Enabled"}]
        await self.kube.patch(SNAPSHOTS, self.name, self.namespace, change, c.MANAGER_CLI)

    async def _scale(self, replicas: int) -> None:
        await self.kube.request(
            "PATCH",
            SNAPSHOTS.path(self.namespace, self.name, "scale"),
            query={"fieldManager": c.MANAGER_CLI},
            body={"spec": {"replicas": replicas}},
            content_type="application/merge-patch+json",
        )

    async def _captured(self) -> None:
        """Until the operator shows the artifact: it is written to the disk after the replica serves."""

        def check(obj: Object) -> bool | None:
            status = obj.get("status") or {}
            for item in status.get("conditions") or []:
                if item["type"] == c.SNAPSHOT_READY and item["reason"] in (
                    c.Reason.CAPTURE_FAILED,
                    c.Reason.ARTIFACT_QUARANTINED,
                ):
                    raise CliError(Exit.PROBLEM, f"the capture failed: {item['message']}")
            return True if (status.get("snapshot") or {}).get("content") else None

        if await until(self.kube, SNAPSHOTS, self.name, self.namespace, check, self.timeout_s) is None:
            raise CliError(Exit.TIMEOUT, f"no artifact within {self.timeout_s:.0f} s")

    async def _wait(self, what: str, check: Callable[[Sequence[Object]], Any]) -> Any:
        labels = f"{c.LABEL_SNAPSHOT}={self.name},{c.LABEL_ROLE}={c.ROLE_REPLICA}"
        pods: dict[str, Object] = {}
        told = ""
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                contextlib.aclosing(self.kube.watch(PODS, self.namespace, labels=labels)) as events,  # type: ignore[type-var]
            ):
                async for event in events:
                    if event.type == "SYNC":
                        pods = {item["metadata"]["uid"]: item for item in event.items}
                    elif event.type == "DELETED":
                        pods.pop(event.object["metadata"]["uid"], None)
                    else:
                        pods[event.object["metadata"]["uid"]] = event.object
                    found = check(list(pods.values()))
                    if found is not None:
                        return found
                    trouble = _trouble(list(pods.values()))
                    if trouble and trouble != told:
                        told = trouble
                        self.say(f"  waits: {trouble}")
        except TimeoutError:
            raise CliError(Exit.TIMEOUT, f"waited {self.timeout_s:.0f} s for {what}" + (f": {told}" if told else "")) from None


def _serving(pods: Sequence[Object]) -> Replica | None:
    for pod in pods:
        replica = Replica.parse(pod)
        if (
            replica.live
            and replica.report.state == "Serving"
            and "total_s" in replica.report.phases
            and replica.verified == "True"
        ):
            return replica
    return None


def _trouble(pods: Sequence[Object]) -> str:
    for pod in pods:
        replica = Replica.parse(pod)
        if replica.unschedulable or replica.waiting:
            return plain(replica.unschedulable or replica.waiting)
    return ""


# --- telling ---------------------------------------------------------------------------------------------------------


def median(runs: Sequence[Run], kind: str) -> float | None:
    """Of one kind; None where it was not measured."""
    found = [item.seconds for item in runs if item.kind == kind]
    return statistics.median(found) if found else None


def speedup(runs: Sequence[Run]) -> float | None:
    """Cold over restored; the cold start that was captured stands in where no other was measured."""
    cold, restored = median(runs, COLD) or median(runs, CAPTURED), median(runs, RESTORED)
    return cold / restored if cold and restored else None


def structured(name: str, runs: Sequence[Run]) -> Object:
    """For -o json and yaml."""
    return {
        "snapshot": name,
        "medians": {kind: value for kind in KINDS if (value := median(runs, kind)) is not None},
        "speedup": speedup(runs),
        "runs": [asdict(item) for item in runs],
    }


COLUMNS = (
    Column("START"),
    Column("RUNS", 4),
    Column("MEDIAN"),
    Column("FASTEST", 3),
    Column("SLOWEST", 3),
    Column("SCHEDULE", 2),
    Column("CONTAINER", 2),
    Column("ENGINE OR RESTORE", 2),
    Column("TO SERVING", 2),
)


def lines(runs: Sequence[Run], *, width: int | None = None) -> list[Text]:
    """A line per kind; phases are medians."""
    rows = []
    for kind in KINDS:
        mine = [item for item in runs if item.kind == kind]
        if not mine:
            continue

        def middle(*names: str, mine: Sequence[Run] = mine) -> str:
            found = [next((item.phases[name] for name in names if name in item.phases), None) for item in mine]
            known = [value for value in found if value is not None]
            return took(statistics.median(known)) if known else "-"

        times = [item.seconds for item in mine]
        rows.append(
            (
                Cell(kind, GOOD if kind == RESTORED else ""),
                str(len(mine)),
                took(statistics.median(times)),
                took(min(times)),
                took(max(times)),
                middle("schedule_s"),
                middle("container_s"),
                middle("restore_s", "ready_s", "engine_s"),
                middle("release_to_serving_s"),
            )
        )
    made = table(COLUMNS, rows, width=width)
    factor = speedup(runs)
    if factor is not None:
        made += [Text(), Text(f"Restored {factor:.1f} times faster than cold.", style=HEAD)]
    made.append(
        Text(
            "Pod creation to serving, as the agent measured it. After the first run the node has the files in its page",
            style=FAINT,
        )
    )
    made.append(Text("cache, for both kinds.", style=FAINT))
    return made


def spans(item: Run) -> list[timeline.Span]:
    """The phases of a run at the top level."""
    start = c.START_RESTORE if item.kind == RESTORED else c.START_COLD
    return [span for span in timeline.spans(start, item.phases) if not span.depth]
