"""The main job in front of your eyes: `make demo` (see README.md). Prints a timeline and a table, writes build/demo.json."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.cluster import Cluster
from tests.cluster.progress import Progress
from tests.kind import Kind, kind_cluster
from tests.system import ROOT, Backend, Replica, System, condition, connect, diagnose, example, local_cluster
from vllmsnapshot.api import constants as c
from vllmsnapshot.api.types import seconds

NAME = MODEL = "smollm2"
ANSWER = " Paris"
MINIMUM_SPEEDUP = 8.0
"""What the project promises of a restored replica against the cold one of the same run."""

console = Console(highlight=False, width=150)


class Timeline:
    """Lines with the seconds since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def say(self, text: str, at: float | None = None) -> None:
        """Print a line, stamped now or with a moment measured earlier."""
        console.print(f"[bold]{(at or time.monotonic()) - self._start:7.2f}s[/bold]  {text}")


async def run(backend: Backend) -> dict[str, Any]:
    """Play the main job and return the figures of build/demo.json."""
    timeline = Timeline()
    seen: dict[str, Replica] = {}
    async with connect(backend) as system:
        watcher = asyncio.create_task(system.watch_replicas(NAME, MODEL, seen))
        try:
            system.apply(example(NAME))
            timeline.say("kubectl apply -f deploy/examples/smollm2.yaml: one replica, no snapshot yet: it starts cold")
            first = await _serving(system, seen, 1, timeline, 600)
            content = await system.wait_captured(NAME)
            status = content["status"]
            phases = {k: seconds(v) for k, v in status["phases"].items()}
            size = status["artifact"]["bytes"] / 1e9
            timeline.say(f"snapshot captured: {size:.2f} GB, engine frozen for {phases.get('freeze', 0):.2f} s")
            await system.wait_ready(NAME, 1)

            system.scale(NAME, 3)
            timeline.say("kubectl scale vsnap/smollm2 --replicas=3")
            await _serving(system, seen, 3, timeline, 300)
            for pod in await system.wait_ready(NAME, 3):
                seen[pod["metadata"]["uid"]].pod = pod  # the watch may be behind
            timeline.say("all replicas Ready")

            ordered = sorted(seen.values(), key=lambda r: r.created)
            # Before the crash: afterwards the first replica's report is about its second container, a restored one.
            replicas = [await _figures(system, replica) for replica in ordered]
            console.print(backend.kubectl("get", "vsnap", NAME))

            crash_s = await crash(system, first, timeline)
            await system.wait_ready(NAME, 3)
            timeline.say("all replicas Ready")
            for replica, figures in zip(ordered, replicas, strict=True):
                figures["equal"] = figures["equal"] and await system.complete(replica.pod, MODEL) == ANSWER
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
        console.print(backend.kubectl("get", "vsnap", NAME))
        console.print(backend.kubectl("describe", "vsnap", NAME), markup=False)
    cold = next(r["first_token_s"] for r in replicas if r["start"] == c.START_COLD)
    restored = [r["first_token_s"] for r in replicas if r["start"] == c.START_RESTORE]
    return {
        "cold_first_token_s": cold,
        "capture": {
            "bytes": status["artifact"]["bytes"],
            "freeze_s": phases.get("freeze"),
            "total_s": phases.get("total"),
        },
        "replicas": replicas,
        "crash_recovery_s": round(crash_s, 2),
        # Of the slowest: two replicas restore at once on this node.
        "speedup": round(cold / max(restored), 1) if restored else None,
    }


async def _serving(system: System, seen: dict[str, Replica], count: int, timeline: Timeline, timeout_s: float) -> Replica:
    """Wait until `count` replicas have answered; tell about each as it does."""
    told = {uid for uid, r in seen.items() if r.first_token}

    async def probe() -> Replica | None:
        for uid, replica in seen.items():
            if replica.first_token and uid not in told:
                told.add(uid)
                took = replica.first_token - replica.created
                timeline.say(f"{replica.name} answers {replica.answer!r}, {took:.2f} s after pod creation", replica.first_token)
        return replica if len(told) >= count else None

    return await system.until(f"{count} replicas to answer", probe, timeout_s)


async def crash(system: System, replica: Replica, timeline: Timeline) -> float:
    """Kill the engine of a replica as a fault would (SIGKILL) and return the seconds until it answers again."""
    script = (
        "import os, signal\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    if open(f'/proc/{pid}/stat').read().rsplit(')', 1)[1].split()[1] == '1': os.kill(int(pid), signal.SIGKILL)\n"
    )
    system.backend.kubectl("exec", replica.name, "-c", c.CONTAINER, "--", "python3", "-c", script)
    start = time.monotonic()
    timeline.say(f"engine of {replica.name} killed (SIGKILL)")

    async def gone() -> bool:
        return await system.complete(replica.pod, MODEL) is None

    async def back() -> bool:
        return await system.complete(replica.pod, MODEL) == ANSWER

    await system.until("the killed engine to stop answering", gone, 30)
    await system.until("the killed engine to answer again", back, 300)
    took = time.monotonic() - start
    timeline.say(f"{replica.name} answers again after {took:.2f} s: same pod, new container, restored from the snapshot")
    return took


async def _figures(system: System, replica: Replica) -> dict[str, Any]:
    """What build/demo.json says of one replica: the agent's phases, the client's clock, and an answer asked just now."""
    assert replica.first_token is not None
    answer = await system.complete(replica.pod, MODEL)
    phases = replica.report.phases
    return {
        "pod": replica.name,
        "start": replica.report.start,
        "port": replica.port,
        "first_token_s": round(replica.first_token - replica.created, 2),
        "schedule_s": phases.get("schedule_s"),
        "restore_s": phases.get("restore_s"),
        "release_to_token_s": phases.get("release_to_serving_s"),
        "phases": phases,
        "answer": answer,
        "equal": answer == replica.answer == ANSWER and condition(replica.pod, c.CONDITION_VERIFIED) == "True",
    }


def show(result: dict[str, Any]) -> None:
    """Print the table and the speed-up."""
    table = Table(title="first token after pod creation")
    for column in ("pod", "start", "port", "schedule", "restore", "release → token", "first token", "answer", "equal"):
        table.add_column(column, justify="left" if column in ("pod", "start", "answer") else "right")
    for r in result["replicas"]:
        cells = [r["schedule_s"], r["restore_s"], r["release_to_token_s"], r["first_token_s"]]
        times = ["-" if v is None else f"{v:.2f} s" for v in cells]
        table.add_row(r["pod"], r["start"], str(r["port"]), *times, repr(r["answer"]), "yes" if r["equal"] else "NO")
    console.print(table)
    console.print(
        f"cold {result['cold_first_token_s']:.1f} s, slowest restored one {result['speedup']} times faster; "
        f"crash recovery {result['crash_recovery_s']:.1f} s"
    )


def verdict(result: dict[str, Any]) -> list[str]:
    """What the run failed to show; empty if it showed the main job."""
    replicas = result["replicas"]
    faults = [f"{r['pod']} answered {r['answer']!r}" for r in replicas if not r["equal"]]
    if [r["start"] for r in replicas] != [c.START_COLD, c.START_RESTORE, c.START_RESTORE]:
        faults.append(f"starts were {[r['start'] for r in replicas]}, wanted one cold and two restored")
    if not result["speedup"] or result["speedup"] < MINIMUM_SPEEDUP:
        faults.append(f"speed-up {result['speedup']} is below {MINIMUM_SPEEDUP}")
    return faults


def _cluster(kind: str, name: str, progress: Progress) -> Cluster | Kind:
    if kind == "kind":
        return kind_cluster(name, progress)
    return local_cluster(name, ["child"], progress, model=True)


def perform(
    cluster: Cluster | Kind,
    play: Callable[[], Coroutine[Any, Any, dict[str, Any]]],
    show: Callable[[dict[str, Any]], None],
    verdict: Callable[[dict[str, Any]], list[str]],
    output: Path,
    *,
    keep: bool,
) -> int:
    """Play a demo on a cluster, take that down unless it is to be kept, write the figures; the exit status."""
    try:
        with cluster.enter_network():
            try:
                result = asyncio.run(play())
            except BaseException:
                diagnose(cluster)
                raise
    finally:
        if keep:
            console.print('the cluster stays up: make kubectl ARGS="get vsnap -o wide", make down', markup=False)
        else:
            cluster.down()
    show(result)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"figures: {output.relative_to(ROOT)}")
    faults = verdict(result)
    for fault in faults:
        console.print(f"[red]not shown:[/red] {fault}")
    return 1 if faults else 0


def main() -> int:
    """Run the demo; exit status 1 if it did not show what it should."""
    parser = argparse.ArgumentParser(prog="python -m tests.demo", description=__doc__)
    parser.add_argument("--cluster", choices=("local", "kind"), default="local")
    parser.add_argument("--name", default="dev", help="name of the cluster")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    parser.add_argument("--output", type=Path, default=ROOT / "build/demo.json")
    options = parser.parse_args()
    progress = Progress()
    cluster = _cluster(options.cluster, options.name, progress)
    return perform(cluster, lambda: run(cluster), show, verdict, options.output, keep=options.keep)


if __name__ == "__main__":
    sys.exit(main())
