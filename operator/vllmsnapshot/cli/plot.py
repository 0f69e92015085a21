"""The bench as an SVG: a stacked bar per start. Written by hand, so that a plot needs no other package."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from . import bench
from .output import took

COLOURS = {
    "schedule": "#9aa5b1",
    "container": "#c9b458",
    "decide": "#7b8794",
    "queue": "#b44d12",
    "to barrier": "#3b7dd8",
    "capture": "#8e5bd0",
    "restore": "#2f9e63",
    "to serving": "#d9822b",
    "other": "#d5dbe1",
}
"""Told apart in grey and by the colour-blind as far as eight can be; the legend has the same order as the bars."""

WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 900, 150, 90, 60, 30, 18
TICKS = 5


def svg(title: str, runs: Sequence[bench.Run]) -> str:
    """A complete document."""
    longest = max((item.seconds for item in runs), default=1.0) or 1.0
    room = WIDTH - LEFT - RIGHT
    bottom = TOP + ROW * len(runs)
    height = bottom + 70
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="28" font-size="16" font-weight="bold">{escape(title)}</text>',
    ]
    for i in range(TICKS + 1):
        x, value = LEFT + room * i / TICKS, longest * i / TICKS
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#e4e7eb"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#52606d">{value:.3g} s</text>')
    used: dict[str, None] = {}
    for i, item in enumerate(runs):
        y = TOP + ROW * i
        parts.append(f'<text x="{LEFT - 10}" y="{y + 14}" text-anchor="end">{escape(item.kind)}</text>')
        at = 0.0
        pieces = [(span.name, span.seconds) for span in bench.spans(item)]
        rest = item.seconds - sum(length for _, length in pieces)
        for name, length in [*pieces, *([("other", rest)] if rest > 0.01 else [])]:
            length = min(length, item.seconds - at)
            if length <= 0:
                continue
            used[name] = None
            x, wide = LEFT + room * at / longest, max(room * length / longest, 0.5)
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{BAR}" fill="{COLOURS.get(name, "#d5dbe1")}">'
                f"<title>{escape(name)}: {took(length)}</title></rect>"
            )
            at += length
        parts.append(f'<text x="{LEFT + room * item.seconds / longest + 8:.1f}" y="{y + 14}">{took(item.seconds)}</text>')
    x = LEFT
    for name in [name for name in COLOURS if name in used]:
        parts.append(f'<rect x="{x}" y="{bottom + 36}" width="12" height="12" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{x + 17}" y="{bottom + 47}">{escape(name)}</text>')
        x += 30 + 8 * len(name)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"
