"""The chart's dashboard as a page: its own queries, answered by a real Prometheus, drawn by an established chart library.

This is not Grafana, of which no package is to be had without its own registry. What a panel asks, its title, unit, thresholds,
legends, stacking and place come from the dashboard's JSON; frame and fonts are this page's.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.system import System

Panel = Mapping[str, Any]
Values = list[float | None]

SCRAPE_S: Final = 5
"""Scrape interval of the data source: the shortest step that Grafana then asks for."""
CELL_PX: Final = 38
"""Height of a row of a dashboard's grid (Grafana's 30 px and their gap of 8)."""
WIDTH_PX: Final = 1000
COLOURS: Final = (
    "#3b7dd8",
    "#2f9e63",
    "#d9822b",
    "#8e5bd0",
    "#c23030",
    "#0e8a9e",
    "#a17a00",
    "#7b8794",
    "#d45c9b",
    "#5c7a29",
    "#b08968",
    "#4c5f8a",
)
NAMED: Final = {
    "green": "#2f9e63",
    "blue": "#3b7dd8",
    "red": "#c23030",
    "orange": "#d9822b",
    "yellow": "#d6b11a",
    "purple": "#8e5bd0",
}
"""Grafana's names of colours."""


@dataclass
class Answers:
    """What Prometheus said. Times are Unix seconds."""

    began: float
    ended: float
    series: dict[str, list[dict[str, Any]]]
    """By panel id: legend, and values by time (Unix seconds)."""


# --- asking ----------------------------------------------------------------------------------------------------------


def step_of(panel: Panel, length_s: float) -> int:
    """Seconds between two points: the panel's minimum, and no more points than there are pixels."""
    least = re.fullmatch(r"(\d+)([sm])", panel.get("interval", f"{SCRAPE_S}s"))
    assert least is not None
    seconds: int = int(least[1]) * {"s": 1, "m": 60}[least[2]]
    pixels: float = WIDTH_PX * panel["gridPos"]["w"] / 24
    return max(seconds, math.ceil(length_s / pixels))


def expression(text: str, step: int) -> str:
    """A query with Grafana's variables filled in as Grafana does: all namespaces and snapshots, and for the rate four scrapes at least."""
    rate = max(step + SCRAPE_S, 4 * SCRAPE_S)
    for name, value in (("$__rate_interval", f"{rate}s"), ("$namespace", ".*"), ("$snapshot", ".*")):
        text = text.replace(name, value)
    assert "$" not in text, text
    return text


def legend(form: str, labels: Mapping[str, str]) -> str:
    """The name of a series."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), form)


async def ask(system: System, prometheus: str, board: Mapping[str, Any], began: float, ended: float) -> Answers:
    """Ask every query of the dashboard. AssertionError if Prometheus refuses one."""
    series: dict[str, list[dict[str, Any]]] = {}
    for panel in board["panels"]:
        step = step_of(panel, ended - began)
        # Steps are whole multiples, so that panels drawn again have the same points.
        span = {"start": str(int(began) // step * step), "end": str(int(ended) // step * step), "step": str(step)}
        for target in panel.get("targets", []):
            query = {"query": expression(target["expr"], step), **span}
            async with system.http.get(f"{prometheus}/api/v1/query_range", params=query) as response:
                answer = await response.json()
            assert answer["status"] == "success", f"{panel['title']}: {answer}"
            series.setdefault(str(panel["id"]), []).extend(
                {"legend": legend(target["legendFormat"], item["metric"]), "values": dict(item["values"])}
                for item in answer["data"]["result"]
            )
    return Answers(began, ended, series)


async def known(system: System, prometheus: str, metric: str) -> bool:
    """Whether Prometheus has a sample of a metric."""
    async with system.http.get(f"{prometheus}/api/v1/query", params={"query": metric}) as response:
        return bool((await response.json())["data"]["result"])


# --- drawing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """A scale for a panel's values."""

    factor: float
    suffix: str

    def say(self, value: float, decimals: int | None = None) -> str:
        """A value for people: three digits, unless the panel says how many decimals."""
        scaled = value * self.factor
        text = f"{scaled:.{decimals}f}" if decimals is not None else f"{scaled:.3g}"
        return text + self.suffix


def unit_of(name: str, largest: float) -> Unit:
    """The scale for values up to `largest`. ValueError for a unit that no panel has had so far."""
    if name == "bytes":
        power = min(4, int(math.log(largest, 1024))) if largest >= 1 else 0
        return Unit(1024.0**-power, " " + ("B", "KiB", "MiB", "GiB", "TiB")[power])
    if name == "s":
        return Unit(1000, " ms") if largest < 1 else Unit(1, " s") if largest < 300 else Unit(1 / 60, " min")
    if name.startswith("suffix:"):
        return Unit(1, name.removeprefix("suffix:"))
    known = {"short": Unit(1, ""), "percentunit": Unit(100, " %"), "ops": Unit(1, " ops/s"), "reqps": Unit(1, " req/s")}
    if name not in known:
        raise ValueError(f"unit {name} is not known")
    return known[name]


def values_of(item: Mapping[str, Any], grid: Sequence[int]) -> Values:
    """A series at every step; None where it has no value, or none that is a number."""
    found = {int(float(at)): float(value) for at, value in item["values"].items()}
    return [value if (value := found.get(at)) is not None and math.isfinite(value) else None for at in grid]


def grid_of(panel: Panel, answers: Answers) -> list[int]:
    """The times of a panel's points."""
    step = step_of(panel, answers.ended - answers.began)
    return list(range(int(answers.began) // step * step, int(answers.ended) // step * step + 1, step))


def figure(panel: Panel, answers: Answers) -> dict[str, Any] | None:
    """Traces, layout and legend of a graph; None if it has no data."""
    grid = grid_of(panel, answers)
    named = [(item["legend"], values_of(item, grid)) for item in answers.series.get(str(panel["id"]), [])]
    named = [(name, values) for name, values in named if any(value is not None for value in values)]
    if not named:
        return None
    defaults = panel["fieldConfig"]["defaults"]
    custom = defaults["custom"]
    stacked = custom["stacking"]["mode"] == "normal"
    sums = [
        sum(abs(v[i] or 0.0) for _, v in named) if stacked else max(abs(v[i] or 0.0) for _, v in named) for i in range(len(grid))
    ]
    unit = unit_of(defaults["unit"], max(sums))
    minutes = [(at - answers.began) / 60 for at in grid]
    fixed = {
        each["matcher"]["options"]: NAMED[each["properties"][0]["value"]["fixedColor"]]
        for each in panel["fieldConfig"]["overrides"]
    }
    traces = []
    for number, (name, values) in enumerate(named):
        colour = fixed.get(name, COLOURS[number % len(COLOURS)])
        scaled = [None if value is None else value * unit.factor for value in values]
        trace: dict[str, Any] = {"name": name, "x": minutes, "y": scaled}
        if custom.get("drawStyle") == "bars":
            trace |= {"type": "bar", "marker": {"color": colour}}
        else:
            trace |= {
                "type": "scatter",
                "mode": "lines+markers",
                "line": {
                    "color": colour,
                    "width": custom.get("lineWidth", 1.6),
                    "shape": {"stepAfter": "hv"}.get(custom.get("lineInterpolation"), "linear"),
                },
                "marker": {"color": colour, "size": markers(values, always=custom.get("showPoints") == "always"), "opacity": 1},
                "connectgaps": custom.get("spanNulls", False),
                "fill": "tonexty" if stacked else "tozeroy",
                "fillcolor": f"{colour}{round(custom['fillOpacity'] * 2.55):02x}",
            }
            if stacked:
                trace |= {"stackgroup": "all", "mode": "lines"}
        traces.append(trace)
    length = (answers.ended - answers.began) / 60
    axis = {
        "gridcolor": "#e4e7eb",
        "zerolinecolor": "#cbd2d9",
        "tickfont": {"size": 11, "color": "#52606d"},
        "ticks": "outside",
        "ticklen": 5,
        "tickcolor": "#ffffff",
    }
    # In minutes, so few that their figures do not touch.
    marks = list(range(0, math.floor(length) + 1, max(1, math.ceil(length / (0.7 * panel["gridPos"]["w"])))))
    layout: dict[str, Any] = {
        "margin": {"l": 58, "r": 10, "t": 6, "b": 22},
        "showlegend": False,
        "barmode": "relative",
        "bargap": 0.3,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "xaxis": {**axis, "range": [0, length], "tickvals": marks, "ticktext": [f"{mark}:00" for mark in marks]},
        "yaxis": {**axis, "ticksuffix": unit.suffix, "nticks": 6, "exponentformat": "none", "rangemode": "normal"},
    }
    if defaults.get("min") is not None:
        layout["yaxis"]["range"] = [defaults["min"], max(max(sums) * unit.factor * 1.08, 1e-9)]
        # Numbers of things have no halves.
        whole = all(float(value).is_integer() for _, values in named for value in values if value is not None)
        if defaults["unit"] == "short" and max(sums) <= 5 and (whole or defaults.get("decimals") == 0):
            layout["yaxis"]["dtick"] = 1
    return {"data": traces, "layout": layout, "legend": [(t["name"], t["marker"]["color"]) for t in traces]}


def markers(values: Values, *, always: bool) -> list[int]:
    """Sizes of the points. As in Grafana, one that no line joins is shown as a point."""
    around = [None, *values, None]
    lone = [before is None and after is None for before, after in zip(around, around[2:], strict=False)]
    return [7 if always else 4 if alone else 0 for alone in lone]


def number(panel: Panel, answers: Answers) -> tuple[str, str]:
    """Text and colour of a stat panel: the last value that is a number."""
    defaults = panel["fieldConfig"]["defaults"]
    for item in answers.series.get(str(panel["id"]), []):
        values = [value for value in values_of(item, grid_of(panel, answers)) if value is not None]
        if values:
            steps = defaults["thresholds"]["steps"]
            (*_, colour) = (step["color"] for step in steps if step["value"] is None or values[-1] >= step["value"])
            return unit_of(defaults["unit"], abs(values[-1])).say(values[-1], defaults.get("decimals")), NAMED[colour]
    return "No data", "#7b8794"


def page(board: Mapping[str, Any], answers: Answers, rows: Sequence[str], library: Path) -> tuple[str, int]:
    """The rows with these titles as a document that draws itself with the chart library, and its height in pixels."""
    panels = list(_chosen(board["panels"], rows))
    top = min(panel["gridPos"]["y"] for panel in panels)
    figures: dict[str, Any] = {}
    body = []
    for panel in panels:
        at = panel["gridPos"]
        place = f"grid-column:{at['x'] + 1}/span {at['w']};grid-row:{at['y'] - top + 1}/span {at['h']}"
        title = html.escape(panel["title"])
        if panel["type"] == "row":
            body.append(f'<h2 style="{place}">{title}</h2>')
        elif panel["type"] == "stat":
            text, colour = number(panel, answers)
            body.append(f'<section style="{place}"><h3>{title}</h3><b style="color:{colour}">{html.escape(text)}</b></section>')
        else:
            drawn = figure(panel, answers)
            if drawn is None:
                empty = panel["fieldConfig"]["defaults"].get("noValue", "No data")
                body.append(f'<section style="{place}"><h3>{title}</h3><i>{html.escape(empty)}</i></section>')
                continue
            figures[str(panel["id"])] = {key: drawn[key] for key in ("data", "layout")}
            names = "".join(f'<span style="--c:{colour}">{html.escape(name)}</span>' for name, colour in drawn["legend"])
            graph = f'<div class="graph" id="p{panel["id"]}"></div>'
            body.append(f'<section style="{place}"><h3>{title}</h3>{graph}<footer>{names}</footer></section>')
    height = CELL_PX * max(panel["gridPos"]["y"] + panel["gridPos"]["h"] - top for panel in panels)
    text = Path(__file__).with_name("board.html").read_text()
    for name, value in (
        ("WIDTH", str(WIDTH_PX)),
        ("CELL", str(CELL_PX)),
        ("PANELS", "\n".join(body)),
        ("LIBRARY", library.as_uri()),
        # "</" would end the script.
        ("FIGURES", json.dumps(figures).replace("</", "<\\/")),
    ):
        text = text.replace(f"@{name}@", value)
    return text, height + 2 * 12


def _chosen(panels: Sequence[Panel], rows: Sequence[str]) -> Iterator[Panel]:
    current = ""
    for panel in panels:
        current = panel["title"] if panel["type"] == "row" else current
        if current in rows:
            yield panel
