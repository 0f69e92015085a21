"""The bench as an SVG: a stacked bar per start. Written by hand, so that a plot needs no other package."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from . import bench
from .output import took

COLOURS = {
    "schedule": "#9aa5b1",
    "container": "#c9b458",
    "decide": "#7b8794",
    "queue": "#b44d12",
    "import": "#1d4f91",
    "engine": "#5b9be6",
    "canary": "#86c5da",
    "to barrier": "#3b7dd8",
    "capture": "#8e5bd0",
    "restore": "#2f9e63",
    "to serving": "#d9822b",
    "bind": "#8a5a00",
    "other": "#d5dbe1",
}
"""Told apart in grey and by the colour-blind as far as so many can be; the legend has the same order as the bars."""

WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 900, 150, 90, 60, 30, 18
TICKS = 8
"""At most so many lines for round numbers of seconds, beside that of 0."""
SEEN = 1.0
"""A piece narrower than this is not explained in the legend."""


def svg(title: str, runs: Sequence[bench.Run]) -> str:
    """A complete document."""
    longest = max((item.seconds for item in runs), default=1.0) or 1.0
    room = WIDTH - LEFT - RIGHT
    bottom = TOP + ROW * len(runs)
    body = []
    step = tick(longest)
    for i in range(int(longest / step + 1e-9) + 1):
        x = LEFT + room * i * step / longest
        body.append(f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#e4e7eb"/>')
        body.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#52606d">{i * step:g} s</text>')
    used: dict[str, None] = {}
    for i, item in enumerate(runs):
        y = TOP + ROW * i
        body.append(f'<text x="{LEFT - 10}" y="{y + 14}" text-anchor="end">{escape(item.kind)}</text>')
        at = 0.0
        pieces = [(span.name, span.seconds) for span in bench.spans(item)]
        rest = item.seconds - sum(length for _, length in pieces)
        for name, length in [*pieces, *([("other", rest)] if rest > 0.01 else [])]:
            length = min(length, item.seconds - at)
            if length <= 0:
                continue
            x, wide = LEFT + room * at / longest, max(room * length / longest, 0.5)
            if wide >= SEEN:
                used[name] = None
            body.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{BAR}" fill="{COLOURS.get(name, "#d5dbe1")}">'
                f"<title>{escape(name)}: {took(length)}</title></rect>"
            )
            at += length
        body.append(f'<text x="{LEFT + room * item.seconds / longest + 8:.1f}" y="{y + 14}">{took(item.seconds)}</text>')
    x, y = LEFT, bottom + 36
    for name in [name for name in COLOURS if name in used]:
        wide = 30 + 8 * len(name)
        if x + wide > WIDTH - 10:
            x, y = LEFT, y + 22
        body.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[name]}"/>')
        body.append(f'<text x="{x + 17}" y="{y + 11}">{escape(name)}</text>')
        x += wide
    height = y + 34
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="28" font-size="16" font-weight="bold">{escape(title)}</text>',
    ]
    return "\n".join([*head, *body, "</svg>"]) + "\n"


def tick(longest: float) -> float:
    """Seconds between the lines: 1, 2 or 5 of a power of ten."""
    power = 10.0 ** math.floor(math.log10(longest / TICKS))
    return next(power * digit for digit in (1, 2, 5, 10) if longest <= TICKS * power * digit)
