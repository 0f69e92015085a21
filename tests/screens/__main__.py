"""`make screens`: play, draw, write docs/assets/screens."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Final

from tests.cluster import monitoring
from tests.cluster.progress import Progress
from tests.demo import console
from tests.screens import board, browser, play, terminal
from tests.system import ROOT, diagnose, local_cluster
from tools import dashboard

RECORDING: Final = ROOT / "build/screens.json"
DIRECTORY: Final = ROOT / "docs/assets/screens"
BOARDS: Final = {
    "dashboard": ("Now", "Starts"),
    "dashboard-restores": ("Captures and restores", "Nodes"),
    "dashboard-engines": ("vLLM", "Operator and agents"),
}
"""Rows of the dashboard by picture."""


def files() -> set[str]:
    """Names of all pictures."""
    return {*(f"{name}.svg" for name in (*play.KUBECTL, *play.VSNAP, "bench", "bench-plot")), *(f"{name}.png" for name in BOARDS)}


def record(name: str, parts: Sequence[str], progress: Progress, *, keep: bool) -> None:
    """Run the system, write the recording, and take the cluster down, unless it is to be kept."""
    monitoring.prepare(progress)
    cluster = local_cluster(name, ["child"], progress, model=True)
    try:
        with cluster.enter_network():
            try:
                monitoring.install(cluster, progress)
                asyncio.run(play.run(cluster, parts, RECORDING))
            except BaseException:
                diagnose(cluster)
                raise
    finally:
        if not keep:
            cluster.down()


def draw(recording: play.Recording, progress: Progress) -> None:
    """Write every picture of what was recorded. One that is not made any more goes."""
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for old in DIRECTORY.iterdir():
        if old.name not in files():
            old.unlink()
    for name, shown in recording.terminals.items():
        (DIRECTORY / f"{name}.svg").write_text(terminal.svg(shown))
    if recording.plot:
        (DIRECTORY / "bench-plot.svg").write_text(recording.plot)
    if recording.board is not None:
        library = browser.chart_library(progress)
        for name, rows in BOARDS.items():
            page, height = board.page(dashboard.dashboard(), recording.board, rows, library)
            browser.screenshot(page, (board.WIDTH_PX, height), DIRECTORY / f"{name}.png", progress)


def main() -> int:
    """Make the screens."""
    parser = argparse.ArgumentParser(prog="python -m tests.screens", description=__doc__)
    parser.add_argument("--name", default="dev", help="name of the cluster")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    parser.add_argument("--only", choices=play.PARTS, help="play only this part; the other one stays as it was recorded")
    parser.add_argument("--draw", action="store_true", help="play nothing, draw what was recorded")
    options = parser.parse_args()
    progress = Progress()
    if not options.draw:
        record(options.name, [options.only] if options.only else play.PARTS, progress, keep=options.keep)
    draw(play.Recording.load(RECORDING), progress)
    for path in sorted(DIRECTORY.iterdir()):
        console.print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
