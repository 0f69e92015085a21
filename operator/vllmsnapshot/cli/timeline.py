"""The phases of a start as bars, out of what the agent reported of a pod (`PodReport.phases`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.text import Text

from ..api import constants as c
from .output import FAINT, took

BLOCKS = " ▏▎▍▌▋▊▉█"
EIGHTHS = len(BLOCKS) - 1
LABEL = 20
FIGURE = 9
SHORTEST = 10
"""Cells of a bar below which it says nothing."""


@dataclass(frozen=True)
class Span:
    """A phase: begins `at` seconds after the pod's creation, lasts `seconds`; `depth` 1 is part of the one before at 0."""

    name: str
    at: float
    seconds: float
    depth: int = 0


COLD = (
    ("schedule", "schedule_s", ()),
    ("container", "container_s", ()),
    ("decide", "decide_s", ()),
    (
        "to barrier",
        "ready_s",
        (
            ("import", "import_s"),
            ("engine", "engine_s"),
            ("canary", "canary_s"),
            ("release memory", "release_s"),
            ("rehearse reload", "rehearsal_s"),
            ("prebuild", "prebuild_s"),
            ("release again", "release_again_s"),
        ),
    ),
    ("capture", "barrier_s", ()),
)
RESTORED = (
    ("schedule", "schedule_s", ()),
    ("container", "container_s", ()),
    ("decide", "decide_s", ()),
    ("queue", "queue_s", ()),
    (
        "restore",
        "restore_s",
        (("check artifact", "verify_s"), ("stage files", "stage_s"), ("criu", "criu_s"), ("accelerator", "accelerator_s")),
    ),
)
SERVING = (
    "to serving",
    "release_to_serving_s",
    (("renew", "renew_s"), ("reload weights", "reload_s"), ("canary", "canary_after_s"), ("bind", "bind_s")),
)
"""The order in which things happen, by the agent's and the child's own names (agent/report.py, child server.py)."""


def spans(start: str, phases: Mapping[str, float]) -> list[Span]:
    """The phases in order, one after another. What the agent did not report is left out; of a whole that it did not report (a
    start without a barrier) the parts stand for themselves."""
    found: list[Span] = []
    at = 0.0
    for name, key, parts in (*(RESTORED if start == c.START_RESTORE else COLD), SERVING):
        if key not in phases:
            for part, part_key in parts:
                if part_key in phases:
                    found.append(Span(part, at, phases[part_key]))
                    at += phases[part_key]
            continue
        found.append(Span(name, at, phases[key]))
        inner = at
        for part, part_key in parts:
            if part_key in phases:
                found.append(Span(part, inner, phases[part_key], depth=1))
                inner += phases[part_key]
        at += phases[key]
    return found


def total(phases: Mapping[str, float]) -> float | None:
    """Pod creation to serving."""
    return phases.get("total_s")


def bar(at: float, seconds: float, scale: float, cells: int) -> str:
    """A bar of `cells` for `scale` seconds, in eighths of a cell; what took any time is never invisible."""
    if scale <= 0:
        return ""
    begin = min(cells - 1, int(at / scale * cells))
    eighths = max(1, round(seconds / scale * cells * EIGHTHS))
    full, part = divmod(min(eighths, (cells - begin) * EIGHTHS), EIGHTHS)
    return " " * begin + BLOCKS[-1] * full + (BLOCKS[part] if part else "")


def lines(found: list[Span], scale: float, width: int) -> list[Text]:
    """A line per phase; `scale` seconds fill the bar. Where there is no room for bars the figures stand alone."""
    cells = width - LABEL - FIGURE - 4
    made = []
    for span in found:
        line = Text("  ")
        line.append(("  " * span.depth + span.name)[: LABEL - 1].ljust(LABEL), style=FAINT if span.depth else "")
        line.append(took(span.seconds).rjust(FIGURE), style=FAINT if span.depth else "")
        if cells >= SHORTEST:
            line.append("  " + bar(span.at, span.seconds, scale, cells), style=FAINT if span.depth else "cyan")
        line.rstrip()
        made.append(line)
    return made
