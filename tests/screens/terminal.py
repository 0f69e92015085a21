"""What a command printed, as a picture of a terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

FONT: Final = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
_COLOURS: Final = [
    (40, 44, 52),
    (240, 113, 120),
    (137, 202, 120),
    (229, 192, 123),
    (97, 175, 239),
    (198, 146, 233),
    (86, 190, 200),
    (220, 223, 228),
]
SCALE: Final = 0.65
"""Of rich's letters of 20 px."""
THEME: Final = TerminalTheme((33, 37, 43), (220, 223, 228), _COLOURS, _COLOURS)
"""Light on dark, so that it stands out from the page."""


def svg(shown: Sequence[tuple[str, str]]) -> str:
    """Commands after a prompt, and what each printed (with escape sequences for colours); as wide as the longest line."""
    lines: list[Text] = []
    for command, printed in shown:
        lines += [Text()] if lines else []
        lines.append(Text(f"$ {command}", style="bold"))
        lines += [Text.from_ansi(line) for line in printed.rstrip("\n").split("\n")]
    for line in lines:
        line.rstrip()
    widest = max(line.cell_len for line in lines)
    console = Console(record=True, width=widest, file=io.StringIO(), legacy_windows=False, highlight=False)
    for line in lines:
        console.print(line, soft_wrap=True)
    made = console.export_svg(title="", theme=THEME, unique_id="screen")
    # Its own format fetches a font from elsewhere, which no page shows that embeds the picture.
    made = re.sub(r"\s*<!--.*?-->", "", made, flags=re.DOTALL)
    made = re.sub(r"\s*@font-face \{.*?\}\n", "\n", made, flags=re.DOTALL)
    made = made.replace("font-family: Fira Code, monospace", f"font-family: {FONT}")
    # Without a size of its own every picture is as wide as the page, and letters are as large as it has few columns.
    return re.sub(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', _sized, made, count=1)


def _sized(box: re.Match[str]) -> str:
    width, height = (round(float(value) * SCALE) for value in box.groups())
    return f'{box[0]} width="{width}" height="{height}"'
