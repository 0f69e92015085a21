"""Autoscaling in front of your eyes: `make demo-autoscale` (docs/autoscaling.md). Prints a timeline and a table, writes
build/demo-autoscale.json.

vLLM's own metrics, scraped by Prometheus, come to a HorizontalPodAutoscaler by way of prometheus-adapter. All requests go to the
Service of the VLLMSnapshot, whose address kube-proxy maps to the replicas that are ready. Some clients ask all the time, over new
and kept connections and in streams, so that something runs on every replica that is taken away; not one request may fail.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import sys
import time
from collections.abc import AsyncIterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml
from rich.table import Table

from tests.cluster import Cluster, monitoring
from tests.cluster.progress import Progress
from tests.demo import MODEL, Timeline, console, perform
from tests.load import KINDS, Load
from tests.system import ROOT, Replica, System, connect, example, local_cluster
from vllmsnapshot.api import constants as c
from vllmsnapshot.kube import PODS, SERVICES, SNAPSHOTS, ApiError, Object, Resource

NAME: Final = "autoscaled"
HPAS: Final = Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
METRIC: Final = "vllm_num_requests"
WAITING: Final = "vllm_num_requests_waiting"

MAX_REPLICAS: Final = 3
SEQUENCES: Final = 2
"""Requests that a replica answers at once (--max-num-seqs): so few that some wait."""
TARGET: Final = 3
"""Requests that a replica may have. The clients that ask all the time (one of each kind) are as many: enough for one replica."""
BURST: Final = 6
TOKENS: Final = 16
ENOUGH: Final = 3
"""Requests of the burst that a new replica must have answered to count as taking part."""
WINDOW_S: Final = 10
"""Stabilization window of the scale-down; what an example for users has (minutes) nobody would watch."""


@dataclass
class Seen:
    """What happened when, in seconds of the monotonic clock."""

    replicas: dict[str, Replica] = field(default_factory=dict)
    ready: dict[str, float] = field(default_factory=dict)
    """By pod UID, when it was first Ready."""
    wanted: list[tuple[float, int]] = field(default_factory=list)
    """Changes of the VLLMSnapshot's spec.replicas."""
    over: float | None = None
    """When the metrics API first gave more than the target per replica."""
    most_waiting: float = 0.0

    def wanted_at(self, replicas: int, since: float) -> float:
        """When that many replicas were first wanted."""
        return next(at for at, number in self.wanted if at >= since and number >= replicas)


def manifests() -> tuple[Object, Object]:
    """VLLMSnapshot and HorizontalPodAutoscaler: the examples for users with the numbers of a small machine."""
    snapshot = example("smollm2")
    snapshot["metadata"]["name"] = NAME
    # Without statistics vLLM has no metrics.
    args = [argument for argument in snapshot["spec"]["args"] if argument != "--disable-log-stats"]
    snapshot["spec"]["args"] = [*args, f"--max-num-seqs={SEQUENCES}"]
    hpa: Object = yaml.safe_load((ROOT / "deploy/examples/hpa.yaml").read_text())
    hpa["metadata"] = {"name": NAME, "namespace": "default"}
    spec = hpa["spec"]
    spec["scaleTargetRef"]["name"] = NAME
    spec["maxReplicas"] = MAX_REPLICAS
    (metric,) = spec["metrics"]
    metric["pods"]["target"]["averageValue"] = str(TARGET)
    spec["behavior"]["scaleDown"] |= {
        "stabilizationWindowSeconds": WINDOW_S,
        "policies": [{"type": "Pods", "value": 1, "periodSeconds": 3}],
    }
    return snapshot, hpa


async def run(cluster: Cluster) -> dict[str, Any]:
    """Play it and return the figures of build/demo-autoscale.json. Prometheus and adapter are installed already."""
    timeline = Timeline()
    async with connect(cluster) as system, _watching(system) as seen:
        snapshot, hpa = manifests()
        system.apply(snapshot)
        timeline.say("kubectl apply: one replica, which starts cold and is captured")
        await system.wait_captured(NAME)
        (first,) = await system.wait_ready(NAME, 1)
        system.apply(hpa)
        await _reads_the_metric(system)
        timeline.say(f"the autoscaler reads {METRIC}; target {TARGET} per replica")
        address, port = await _service(system)
        body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        async with Load(address, port, body) as base, Load(address, port, body) as burst:
            base.start(*KINDS)
            timeline.say(f"{len(KINDS)} clients ask all the time: new connections, a kept one, streams")
            began = time.monotonic()
            burst.start(*(KINDS[number % len(KINDS)] for number in range(BURST)))
            timeline.say(f"burst: {BURST} more clients")
            new = await _scaled_up(system, seen, timeline, first)
            await burst.stop()
            eased = time.monotonic()
            timeline.say(f"the burst is over: {len(burst.outcomes)} requests, {len(burst.failures)} failed")
            await _scaled_down(system)
            settled = time.monotonic()
            timeline.say("one replica is left, the others have ended")
        timeline.say(f"clients end: {len(base.outcomes)} requests, {len(base.failures)} failed")
        up = [_figures(seen, replica, began, seen.wanted_at(n, began)) for n, replica in enumerate(new, 2)]
        woken = await _from_zero(system, seen, timeline)
    outcomes, failures = base.outcomes + burst.outcomes, base.failures + burst.failures
    return {
        "target_per_replica": TARGET,
        "most_waiting": seen.most_waiting,
        "metric_s": round(seen.over - began, 2) if seen.over else None,
        "replicas": up,
        "scale_down_s": round(settled - eased, 2),
        "requests": {kind: sum(o.kind == kind for o in outcomes) for kind in KINDS},
        "slowest_s": round(max(o.ended - o.began for o in outcomes), 2),
        "failed": [f"{o.kind}: {o.error}" for o in failures],
        "zero_to_one": woken,
    }


# --- looking ---------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _watching(system: System) -> AsyncIterator[Seen]:
    seen = Seen()
    watchers = (
        system.watch_replicas(NAME, MODEL, seen.replicas),
        _watch_ready(system, seen),
        _watch_wanted(system, seen),
        _watch_metrics(system, seen),
    )
    tasks = [asyncio.create_task(watcher) for watcher in watchers]
    try:
        yield seen
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _watch_ready(system: System, seen: Seen) -> None:
    while True:
        for uid, replica in seen.replicas.items():
            if replica.ready:
                seen.ready.setdefault(uid, time.monotonic())
        await asyncio.sleep(0.02)


async def _watch_wanted(system: System, seen: Seen) -> None:
    async for event in system.kube.watch(SNAPSHOTS, "default", fields=f"metadata.name={NAME}"):
        for item in event.items if event.type == "SYNC" else (event.object,):
            wanted = item["spec"]["replicas"]
            if not seen.wanted or seen.wanted[-1][1] != wanted:
                seen.wanted.append((time.monotonic(), wanted))


async def _watch_metrics(system: System, seen: Seen) -> None:
    while True:
        values = await _metric(system, METRIC)
        if seen.over is None and values and sum(values) / len(values) > TARGET:
            seen.over = time.monotonic()
        seen.most_waiting = max([seen.most_waiting, *await _metric(system, WAITING)])
        await asyncio.sleep(0.1)


async def _metric(system: System, name: str) -> list[float]:
    """A metric of every replica, as the autoscaler asks for it; empty while there is none."""
    path = f"/apis/custom.metrics.k8s.io/v1beta1/namespaces/default/pods/*/{name}"
    try:
        answer = await system.kube.request("GET", path, query={"labelSelector": f"{c.LABEL_SNAPSHOT}={NAME}"})
    except ApiError:
        return []
    return [_quantity(item["value"]) for item in answer["items"]]


def _quantity(text: str) -> float:
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


async def _reads_the_metric(system: System) -> None:
    async def probe() -> bool:
        hpa = await system.kube.get(HPAS, NAME, "default")
        conditions = {item["type"]: item["status"] for item in (hpa or {}).get("status", {}).get("conditions") or []}
        return conditions.get("ScalingActive") == "True"

    await system.until("the autoscaler to read the metric", probe, 90)


async def _service(system: System) -> tuple[str, int]:
    service = await system.kube.get(SERVICES, NAME, "default")
    assert service is not None
    return service["spec"]["clusterIP"], service["spec"]["ports"][0]["port"]


async def _answered(system: System, replica: Replica) -> float:
    """How many requests a replica has answered, by its own metrics."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with system.http.get(f"http://{replica.address}:{replica.port}/metrics") as response:
            text = await response.text()
            return sum(float(value) for value in re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", text, re.MULTILINE))
    return 0.0


# --- acting ----------------------------------------------------------------------------------------------------------


async def _scaled_up(system: System, seen: Seen, timeline: Timeline, first: Object) -> list[Replica]:
    """Wait until all replicas are Ready and the new ones have answered requests; the new ones, the oldest first."""
    new = await _up(system, seen, MAX_REPLICAS, {first["metadata"]["uid"]}, 300)
    timeline.say(f"{MAX_REPLICAS} replicas are Ready")
    before = {replica.uid: await _answered(system, replica) for replica in new}

    async def taking_part() -> bool:
        return all([await _answered(system, replica) >= before[replica.uid] + ENOUGH for replica in new])

    await system.until("the new replicas to answer requests", taking_part, 120)
    timeline.say(f"each new replica has answered {ENOUGH} requests or more that came to the Service")
    return new


async def _up(system: System, seen: Seen, replicas: int, known: Set[str], limit_s: float) -> list[Replica]:
    """Wait until so many are Ready, and the watchers, each of which lags as it will, have written down all that the figures
    are made of; those of them that are not `known`, the oldest first."""

    async def probe() -> list[Replica] | None:
        pods = await system.replicas(NAME)
        up = [seen.replicas[uid] for pod in pods if (uid := pod["metadata"]["uid"]) in seen.ready]
        if len(up) != len(pods) or len(up) != replicas or any(r.first_token is None for r in up):
            return None
        if not seen.wanted or seen.wanted[-1][1] != replicas:
            return None
        return sorted((r for r in up if r.uid not in known), key=lambda r: r.created)

    return await system.until(f"{replicas} replicas to be Ready and to answer", probe, limit_s)


async def _scaled_down(system: System) -> None:
    """Wait until one replica is left and the others are gone, not just told to go."""

    async def probe() -> bool:
        return len(await system.kube.list(PODS, "default", labels=f"{c.LABEL_SNAPSHOT}={NAME}")) == 1

    await system.until("the scale-down to one replica", probe, 180)


async def _from_zero(system: System, seen: Seen, timeline: Timeline) -> dict[str, Any]:
    """Scale to 0 and back, as KEDA would when the first request comes."""
    system.backend.kubectl("delete", "hpa", NAME)
    system.scale(NAME, 0)
    await system.until("the last replica to end", lambda: _none(system), 60)
    known = set(seen.replicas)
    began = time.monotonic()
    system.scale(NAME, 1)

    (replica,) = await _up(system, seen, 1, known, 120)
    figures = _figures(seen, replica, began, seen.wanted_at(1, began))
    timeline.say(f"0 → 1: {figures['serving_s']:.2f} s from kubectl scale to the first token, {figures['start']}")
    return figures


async def _none(system: System) -> bool:
    return not await system.kube.list(PODS, "default", labels=f"{c.LABEL_SNAPSHOT}={NAME}")


# --- figures ---------------------------------------------------------------------------------------------------------


def _figures(seen: Seen, replica: Replica, began: float, wanted: float) -> dict[str, Any]:
    """One new replica: seconds since `began`, and how many of them this project answers for: all but what passed before it was
    wanted, and what Kubernetes took to schedule the pod and to start its container."""
    phases = replica.report.phases
    assert replica.first_token is not None
    kubernetes = phases.get("schedule_s", 0.0) + phases.get("container_s", 0.0)
    ours = (replica.created - wanted) + max(0.0, replica.first_token - replica.created - kubernetes)
    serving = replica.first_token - began
    return {
        "pod": replica.name,
        "start": replica.report.start,
        "wanted_s": round(wanted - began, 2),
        "created_s": round(replica.created - began, 2),
        "container_s": round(replica.created - began + kubernetes, 2),
        "serving_s": round(serving, 2),
        "ready_s": round(seen.ready[replica.uid] - began, 2),
        "ours_s": round(ours, 2),
        "ours_share": round(ours / serving, 2),
        "phases": phases,
    }


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    table = Table(title="seconds after the burst began (last line: after kubectl scale --replicas=1)")
    columns = (
        "pod",
        "start",
        "metric over target",
        "wanted",
        "pod created",
        "container",
        "first token",
        "Ready",
        "ours",
        "share",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("pod", "start") else "right")
    for figures, metric in [*((f, result["metric_s"]) for f in result["replicas"]), (result["zero_to_one"], None)]:
        keys = ("wanted_s", "created_s", "container_s", "serving_s", "ready_s", "ours_s")
        cells = ["-" if metric is None else f"{metric:.2f}", *(f"{figures[key]:.2f}" for key in keys)]
        table.add_row(figures["pod"], figures["start"], *cells, f"{figures['ours_share']:.0%}")
    console.print(table)
    total = sum(result["requests"].values())
    console.print(
        f"{total} requests ({', '.join(f'{n} {kind}' for kind, n in result['requests'].items())}), {len(result['failed'])} failed, "
        f"slowest {result['slowest_s']:.1f} s; at most {result['most_waiting']:g} waited in one replica; "
        f"scaled down {result['scale_down_s']:.1f} s after the burst"
    )


def verdict(result: dict[str, Any]) -> list[str]:
    """What the run failed to show; empty if it showed everything."""
    faults = [f"a request failed: {failure}" for failure in result["failed"]]
    started = [*result["replicas"], result["zero_to_one"]]
    faults += [f"{figures['pod']} started {figures['start']}" for figures in started if figures["start"] != c.START_RESTORE]
    if len(result["replicas"]) != MAX_REPLICAS - 1:
        faults.append(f"{len(result['replicas'])} replicas were added, wanted {MAX_REPLICAS - 1}")
    if result["metric_s"] is None or not result["most_waiting"]:
        faults.append("no request ever waited: the burst was no load")
    return faults


def main() -> int:
    """Run the demo; exit status 1 if it did not show what it should."""
    parser = argparse.ArgumentParser(prog="python -m tests.autoscale", description=__doc__)
    parser.add_argument("--name", default="dev", help="name of the cluster")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    parser.add_argument("--output", type=Path, default=ROOT / "build/demo-autoscale.json")
    options = parser.parse_args()
    progress = Progress()
    monitoring.prepare(progress)
    cluster = local_cluster(options.name, ["child"], progress, model=True)

    async def play() -> dict[str, Any]:
        monitoring.install(cluster, progress)
        return await run(cluster)

    return perform(cluster, play, show, verdict, options.output, keep=options.keep)


if __name__ == "__main__":
    sys.exit(main())
