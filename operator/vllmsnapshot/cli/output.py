"""How things are printed: tables as kubectl's, colours only on a terminal, columns that give way on a narrow one."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import yaml
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

GAP = 3
"""Blanks between columns, as kubectl."""
NARROWEST = 8
"""A column is not made narrower than this; the rest of the line is left to the terminal."""

GOOD, BAD, DOUBT, FAINT, HEAD = "green", "red", "yellow", "dim", "bold"


class Format(StrEnum):
    """-o."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"

    @property
    def structured(self) -> bool:
        """For machines."""
        return self in (Format.JSON, Format.YAML)


@dataclass(frozen=True)
class Cell:
    """A text with a style of rich."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Column:
    """`rank`: the highest gives way first on a narrow terminal, 0 never. `wide`: only with -o wide."""

    name: str
    rank: int = 0
    wide: bool = False


Row = Sequence[Cell | str]


def console(*, stderr: bool = False) -> Console:
    """The terminal or file behind stdout or stderr. rich honours NO_COLOR and TERM=dumb."""
    return Console(stderr=stderr, soft_wrap=True, highlight=False, markup=False, emoji=False)


def width_of(to: Console) -> int | None:
    """Columns of a terminal; None for a file or pipe, where nothing is cut."""
    return to.width if to.is_terminal else None


def table(columns: Sequence[Column], rows: Sequence[Row], *, width: int | None = None, wide: bool = False) -> list[Text]:
    """The lines of a table with a head, at most `width` cells wide."""
    shown = [i for i, column in enumerate(columns) if wide or not column.wide]
    cells = [[_cell(item) for item in row] for row in rows]
    natural = [max([cell_len(column.name), *(cell_len(row[i].text) for row in cells)]) for i, column in enumerate(columns)]
    while width is not None and _total(shown, natural) > width:
        rank = max(columns[i].rank for i in shown)
        if rank == 0:
            break
        shown = [i for i in shown if columns[i].rank < rank]
    if width is not None and (over := _total(shown, natural) - width) > 0:
        natural[shown[-1]] = max(NARROWEST, natural[shown[-1]] - over)
    head = _line([Cell(column.name, HEAD) for column in columns], shown, natural)
    return [head, *(_line(row, shown, natural) for row in cells)]


def _total(shown: Sequence[int], widths: Sequence[int]) -> int:
    return sum(widths[i] for i in shown) + GAP * (len(shown) - 1)


def _cell(item: Cell | str) -> Cell:
    cell = item if isinstance(item, Cell) else Cell(item)
    # A message of somebody else may hold anything; a table has one line per row.
    return Cell(plain(cell.text), cell.style)


def plain(text: str) -> str:
    """One line without control characters: what a workload or webhook wrote must not drive the terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def _line(row: Sequence[Cell], shown: Sequence[int], widths: Sequence[int]) -> Text:
    line = Text()
    for i in shown:
        text = row[i].text
        if cell_len(text) > widths[i]:
            text = set_cell_size(text, widths[i] - 1).rstrip() + "…"
        line.append(text, style=row[i].style)
        if i != shown[-1]:
            line.append(" " * (widths[i] - cell_len(text) + GAP))
    line.rstrip()
    return line


def show(to: Console, lines: Sequence[Text | str]) -> None:
    """Print lines as they are."""
    for line in lines:
        to.print(line)


def dump(value: Any, form: Format) -> None:
    """JSON or YAML on stdout."""
    sys.stdout.write(render(value, form))
    sys.stdout.flush()


def render(value: Any, form: Format) -> str:
    """JSON or YAML."""
    if form is Format.YAML:
        return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120)
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


# --- words for values ------------------------------------------------------------------------------------------------


def size(value: int | None) -> str:
    """Bytes for people: powers of 1000, as disks are sold and `status` prints."""
    if value is None:
        return "-"
    number = float(value)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def age(since: float, now: float) -> str:
    """How long ago, as kubectl prints it: the two largest units where the first is small."""
    seconds = int(max(0.0, now - since)) if since else -1
    if seconds < 0:
        return "-"
    for unit, length, lower, below in (("d", 86400, "h", 8), ("h", 3600, "m", 8), ("m", 60, "s", 10)):
        if seconds >= 2 * length:
            whole, rest = divmod(seconds, length)
            minor = rest // {"h": 3600, "m": 60, "s": 1}[lower]
            return f"{whole}{unit}{minor}{lower}" if minor and whole < below else f"{whole}{unit}"
    return f"{seconds}s"


def took(seconds: float | None) -> str:
    """Seconds with one decimal; two below ten."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
