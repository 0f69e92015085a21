"""The screens in the documentation: none is missing or left over, and the board is drawn as the dashboard says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.screens import __main__ as screens
from tests.screens import board, terminal
from tools import dashboard

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "docs/assets"
PAGES = (*(ROOT / "docs").rglob("*.md"), ROOT / "README.md")
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")


def images() -> list[tuple[Path, str, Path]]:
    """Page, alternative text and file of every image in the documentation."""
    return [(page, alt, (page.parent / to).resolve()) for page in PAGES for alt, to in IMAGE.findall(page.read_text())]


# --- files -----------------------------------------------------------------------------------------------------------


def test_every_image_is_there_and_is_described() -> None:
    found = images()
    assert found
    for page, alt, file in found:
        assert file.is_file(), f"{page}: {file}"
        assert len(alt) > 20, f"{page}: {file.name} has no alternative text"


def test_every_file_of_the_assets_is_shown() -> None:
    shown = {file for _, _, file in images()}
    assert [file for file in ASSETS.rglob("*") if file.is_file() and file not in shown] == []


def test_the_screens_are_those_that_the_script_makes() -> None:
    assert {file.name for file in screens.DIRECTORY.iterdir()} == screens.files()


def test_the_screens_are_small() -> None:
    sizes = {file.name: file.stat().st_size for file in screens.DIRECTORY.iterdir()}
    assert max(sizes.values()) < 200_000, sizes
    assert sum(sizes.values()) < 1_000_000, sizes


def test_a_vector_screen_fetches_nothing() -> None:
    for file in screens.DIRECTORY.glob("*.svg"):
        text = file.read_text()
        assert set(re.findall(r"https?://[^\"\s)]+", text)) == {"http://www.w3.org/2000/svg"}, file
        assert "<script" not in text


def test_every_row_of_the_dashboard_is_in_one_picture() -> None:
    pictured = [row for rows in screens.BOARDS.values() for row in rows]
    assert pictured == [panel["title"] for panel in dashboard.dashboard()["panels"] if panel["type"] == "row"]


# --- terminal --------------------------------------------------------------------------------------------------------


def test_a_terminal_has_the_command_its_output_and_the_colours() -> None:
    shown = [("kubectl get vsnap", "NAME   READY\nsmol   \x1b[32m3/3\x1b[0m   \n"), ("kubectl get pods", "none\n")]
    made = terminal.svg(shown)
    text = re.sub(r"<[^>]+>", " ", made).replace("&#160;", " ")
    assert "$ kubectl get vsnap" in text
    assert "3/3" in text
    assert "$ kubectl get pods" in text
    assert "\x1b" not in made
    assert "#89ca78" in made
    assert "@font-face" not in made
    assert made == terminal.svg(shown)


def test_a_long_line_is_not_broken() -> None:
    made = terminal.svg([("x", "a" * 300)])
    assert made.count("a" * 300) == 1


# --- board -----------------------------------------------------------------------------------------------------------


def panel(**changed: Any) -> dict[str, Any]:
    made = dashboard.panel("Title", "What.", [("up", "{{a}}, {{b}}")], **changed)
    return {"id": 1, "gridPos": {"x": 0, "y": 0, "w": 12, "h": 8}, **made}


def answers(*series: tuple[str, dict[int, str]], ended: float = 20.0) -> board.Answers:
    found = [{"legend": name, "values": {str(at): value for at, value in values.items()}} for name, values in series]
    return board.Answers(0.0, ended, {"1": found})


def test_every_query_of_the_dashboard_can_be_asked() -> None:
    for each in dashboard.dashboard()["panels"]:
        for target in each.get("targets", []):
            board.expression(target["expr"], board.step_of(each, 600))


def test_a_rate_looks_back_over_four_scrapes_or_a_step() -> None:
    assert board.expression("rate(x[$__rate_interval])", 5) == "rate(x[20s])"
    assert board.expression("rate(x[$__rate_interval])", 60) == "rate(x[65s])"


def test_steps_obey_the_panel_and_the_pixels() -> None:
    assert board.step_of(panel(), 60) == board.SCRAPE_S
    assert board.step_of(panel(bars=True), 60) == 60
    assert board.step_of(panel(), board.WIDTH_PX / 2 * 600) == 600


def test_a_series_is_called_by_its_labels() -> None:
    assert board.legend("{{a}} of {{ b }}, {{c}}", {"a": "x", "b": "y"}) == "x of y, "


def test_every_unit_of_the_dashboard_is_known() -> None:
    for each in dashboard.dashboard()["panels"]:
        if each["type"] != "row":
            board.unit_of(each["fieldConfig"]["defaults"]["unit"], 1.0)


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("s", 0.25, "250 ms"),
        ("s", 2.5, "2.5 s"),
        ("s", 600, "10 min"),
        ("bytes", 3 * 1024**3, "3 GiB"),
        ("percentunit", 1, "100 %"),
    ],
)
def test_numbers_are_said_as_people_do(unit: str, value: float, text: str) -> None:
    assert board.unit_of(unit, value).say(value) == text


def test_what_is_no_number_is_a_gap() -> None:
    drawn = board.figure(panel(), answers(("a", {0: "1", 5: "NaN", 15: "2", 20: "+Inf"})))
    assert drawn is not None
    assert drawn["data"][0]["y"] == [1.0, None, None, 2.0, None]


def test_a_point_that_no_line_joins_is_seen() -> None:
    assert board.markers([1, None, 2, 3, None, 4], always=False) == [4, 0, 0, 0, 0, 4]
    assert board.markers([1, 2], always=True) == [7, 7]


def test_a_panel_without_a_number_says_so() -> None:
    assert board.figure(panel(), answers()) is None
    assert board.figure(panel(), answers(("a", {0: "NaN"}))) is None
    text, _ = board.page(
        {"panels": [{"type": "row", "title": "Row", "gridPos": {"x": 0, "y": 0, "w": 24, "h": 1}}, panel()]},
        answers(),
        ["Row"],
        Path("/x.js"),
    )
    assert "No data" in text


def test_a_stat_shows_its_last_number_in_the_colour_of_its_threshold() -> None:
    made = {**dashboard.stat("T", "W.", "up", bad_above=1), "id": 1, "gridPos": {"x": 0, "y": 0, "w": 4, "h": 4}}
    assert board.number(made, answers(("", {0: "0", 5: "2", 10: "NaN"}))) == ("2", board.NAMED["red"])
    assert board.number(made, answers(("", {0: "2", 5: "0"}))) == ("0", board.NAMED["green"])
    assert board.number(made, answers())[0] == "No data"


def test_the_picture_has_every_panel_of_its_rows() -> None:
    whole = dashboard.dashboard()
    for rows in screens.BOARDS.values():
        text, height = board.page(whole, board.Answers(0, 60, {}), rows, Path("/x.js"))
        assert height > 0
        for row, content in dashboard.rows():
            for _, _, made in content:
                assert (f"<h3>{made['title']}</h3>" in text) == (row in rows), made["title"]


def test_a_legend_cannot_end_the_script() -> None:
    evil = panel() | {"title": "<b>"}
    row = {"type": "row", "title": "Row", "gridPos": {"x": 0, "y": 0, "w": 24, "h": 1}}
    text, _ = board.page({"panels": [row, evil]}, answers(("</script><script>x", {0: "1"})), ["Row"], Path("/x.js"))
    assert "</script><script>x" not in text
    assert "<h3><b>" not in text
