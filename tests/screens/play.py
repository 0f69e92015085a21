"""What the screens show: the main job with real vLLM, some load, a crash, to zero and back, and a bench. Nothing is drawn here."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.cluster import Cluster, monitoring
from tests.demo import MODEL, NAME, Timeline, crash
from tests.load import KINDS, Load
from tests.screens import board
from tests.system import Replica, System, connect, example
from tools import dashboard
from vllmsnapshot.agent import metrics as agent
from vllmsnapshot.api import constants as c
from vllmsnapshot.kube import PODS, SERVICES

RUNS: Final = 3
"""Restored starts of the bench."""
SEQUENCES: Final = 2
"""Requests that a replica answers at once, so few that some wait."""
REQUESTS: Final = 12
"""Of each kind of client, at each number of replicas: enough for every panel to have several samples."""
PATIENCE_S: Final = 300.0
"""For these requests; nothing is measured by it."""
COLUMNS: Final = 110
"""Width of the terminal: what a reader's page still shows at a legible size."""

KUBECTL: Final = {
    "get": (("get", "vsnap"),),
    "get-wide": (("get", "vsnap", "-o", "wide"),),
    "get-others": (("get", "vsnapcontent"), ("get", "vsnapnode")),
}
VSNAP: Final = {"status": ("status",), "describe": ("describe", NAME)}
BENCH: Final = ("bench", NAME, f"--runs={RUNS}", "--plot=bench.svg")
"""Commands by the name of their screen."""
PARTS: Final = ("system", "bench")
"""Of a run: the main job with load and dashboard; the bench."""


@dataclasses.dataclass
class Recording:
    """All that the drawing needs; a file between the two, so that a drawing can be changed without another run. Each part of a
    run replaces what it has recorded; what was not recorded yet is empty."""

    terminals: dict[str, list[tuple[str, str]]] = dataclasses.field(default_factory=dict)
    """By screen: commands, and what each printed, with the terminal's colours."""
    plot: str = ""
    """The SVG that `kubectl vsnap bench --plot` wrote."""
    board: board.Answers | None = None

    def save(self, path: Path) -> None:
        """Write it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read it; an empty one if no run has written one."""
        if not path.exists():
            return cls()
        found = json.loads(path.read_text())
        return cls(**{**found, "board": found["board"] and board.Answers(**found["board"])})


async def run(cluster: Cluster, parts: Sequence[str], path: Path) -> None:
    """Play these parts and record each as soon as it is over. System and Prometheus are installed already."""
    recording, timeline = Recording.load(path), Timeline()
    async with connect(cluster) as system:
        # An increase is seen only of a series that is there before.
        prometheus = await _prometheus(system)
        await system.until("Prometheus to scrape the agent", lambda: board.known(system, prometheus, agent.CAPABLE.name))
        began = time.time()
        manifest = example(NAME)
        # Without statistics vLLM has no metrics.
        args = [argument for argument in manifest["spec"]["args"] if argument != "--disable-log-stats"]
        manifest["spec"]["args"] = [*args, f"--max-num-seqs={SEQUENCES}"]
        system.apply(manifest)
        timeline.say("applied: one replica, which starts cold and is captured")
        await system.wait_captured(NAME)
        await system.wait_ready(NAME, 1)
        if "system" in parts:
            await _live(cluster, system, timeline, began, prometheus, recording)
            recording.save(path)
            system.scale(NAME, 1)
            await system.wait_ready(NAME, 1)
        if "bench" in parts:
            with tempfile.TemporaryDirectory() as directory:
                printed = _vsnap(cluster, *BENCH, directory=directory)
                recording.terminals["bench"] = [(" ".join(("kubectl vsnap", *BENCH)), printed)]
                recording.plot = (Path(directory) / "bench.svg").read_text()
            recording.save(path)
            timeline.say("the bench is over")


async def _live(
    cluster: Cluster, system: System, timeline: Timeline, began: float, prometheus: str, recording: Recording
) -> None:
    """Load, more replicas, a crash, to zero and back: what terminals and dashboard show of it."""
    service = await system.kube.get(SERVICES, NAME, "default")
    assert service is not None
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    async with Load(service["spec"]["clusterIP"], service["spec"]["ports"][0]["port"], body) as load:
        load.start(*KINDS, *KINDS)
        await load.more(REQUESTS, PATIENCE_S)
        system.scale(NAME, 3)
        await system.wait_ready(NAME, 3)
        timeline.say("three replicas under load")
        await load.more(2 * REQUESTS, PATIENCE_S)
        await load.stop()
        failed = "".join(f"; {each.kind}: {each.error}" for each in load.failures)
        timeline.say(f"{len(load.outcomes)} requests, {len(load.failures)} failed{failed}")
        recording.terminals |= _terminals(cluster)
        pod = (await system.replicas(NAME))[0]
        await crash(system, Replica(pod["metadata"]["name"], pod["metadata"]["uid"], 0.0, pod=pod), timeline)
        await system.wait_ready(NAME, 3)
        load.start(*KINDS)
        await load.more(REQUESTS, PATIENCE_S)
        await load.stop()
        system.scale(NAME, 0)
        await system.until("the replicas to end", lambda: _none(system))
        system.scale(NAME, 1)
        await system.wait_ready(NAME, 1)
        timeline.say("to zero and back")
        load.start(*KINDS)
        await load.more(REQUESTS, PATIENCE_S)
        system.scale(NAME, 3)
        await system.wait_ready(NAME, 3)
        await load.more(REQUESTS, PATIENCE_S)
        # What happens is drawn by the minute: the present one goes on under load until it is over.
        await asyncio.sleep(60 - time.time() % 60 + board.SCRAPE_S)
        recording.board = await board.ask(system, prometheus, dashboard.dashboard(), began, time.time())
    timeline.say("Prometheus has answered the dashboard")


def _terminals(cluster: Cluster) -> dict[str, list[tuple[str, str]]]:
    kubectl = {
        name: [(" ".join(("kubectl", *args)), cluster.kubectl(*args)) for args in commands] for name, commands in KUBECTL.items()
    }
    vsnap = {name: [(" ".join(("kubectl vsnap", *args)), _vsnap(cluster, *args))] for name, args in VSNAP.items()}
    return {**kubectl, **vsnap}


def _vsnap(cluster: Cluster, *arguments: str, directory: str | None = None) -> str:
    """The plugin in a process of its own, as on a terminal: with colours, and its lines as wide as that."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "NO_COLOR"},
        "PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in paths),
        "KUBECONFIG": str(cluster.kubeconfig),
        "FORCE_COLOR": "1",
        "TERM": "xterm-256color",
        "COLUMNS": str(COLUMNS),
    }
    command = [sys.executable, "-m", "vllmsnapshot.cli.app", *arguments]
    stdin, stdout = subprocess.DEVNULL, subprocess.PIPE
    return subprocess.run(command, env=environment, cwd=directory, stdin=stdin, stdout=stdout, text=True, check=True).stdout


async def _none(system: System) -> bool:
    return not await system.kube.list(PODS, "default", labels=f"{c.LABEL_SNAPSHOT}={NAME}")


async def _prometheus(system: System) -> str:
    service = await system.kube.get(SERVICES, "prometheus", monitoring.NAMESPACE)
    assert service is not None
    return f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"
