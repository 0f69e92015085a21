"""Tables and words: what fits a terminal, what a pipe gets, and that nobody's message drives the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from vllmsnapshot.cli.output import Cell, Column, Format, Row, age, plain, render, show, size, table, took, width_of

COLUMNS = (Column("NAME"), Column("A", 1), Column("B", 2), Column("LAST", 3), Column("WIDE", 9, wide=True))
ROWS: list[Row] = [("one", "aa", Cell("bb", "red"), "last", "wide"), ("three", "a", "b", "l" * 20, "w")]


def text(width: int | None = None, *, wide: bool = False) -> list[str]:
    return [line.plain for line in table(COLUMNS, ROWS, width=width, wide=wide)]


def test_a_pipe_gets_everything_aligned_and_without_trailing_blanks() -> None:
    assert text() == [
        "NAME    A    B    LAST",
        "one     aa   bb   last",
        "three   a    b    llllllllllllllllllll",
    ]
    assert text(wide=True)[1] == "one     aa   bb   last                   wide"


def test_on_a_narrow_terminal_the_least_important_columns_give_way() -> None:
    assert text(38)[2] == "three   a    b    llllllllllllllllllll"
    assert text(37)[0] == "NAME    A    B"
    assert text(13)[0] == "NAME    A"
    assert text(6) == ["NAME", "one", "three"]
    assert text(4)[2] == "three", "and a name is never cut beyond recognition"


def test_what_cannot_give_way_is_cut_with_an_ellipsis() -> None:
    found = [line.plain for line in table((Column("A"), Column("B")), [("x", "y" * 30)], width=20)]
    assert found[1] == "x   " + "y" * 15 + "…"
    assert all(len(line) <= 20 for line in found)


def test_wide_characters_are_counted_in_cells() -> None:
    found = [line.plain for line in table((Column("A"), Column("B")), [("モデル", "x"), ("m", "y")])]
    assert found == ["A        B", "モデル   x", "m        y"]


def test_no_control_character_of_anybody_reaches_the_terminal() -> None:
    assert plain("a\x1b[31mb\nc\td\u202e") == "a [31mb c d "
    assert "\x1b" not in "".join(line.plain for line in table((Column("A"),), [("\x1b]0;title\x07",)]))


def test_no_colours_where_there_is_no_terminal() -> None:
    def printed(*, terminal: bool, env: dict[str, str]) -> str:
        out = Console(file=io.StringIO(), force_terminal=terminal, _environ={"TERM": "xterm-256color", **env}, soft_wrap=True)
        show(out, table(COLUMNS, ROWS))
        assert isinstance(out.file, io.StringIO)
        return out.file.getvalue()

    assert "\x1b" not in printed(terminal=False, env={})
    assert "\x1b[31m" in printed(terminal=True, env={})
    assert "\x1b[31m" not in printed(terminal=True, env={"NO_COLOR": "1"})
    assert width_of(Console(file=io.StringIO())) is None


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0s"),
        (119, "119s"),
        (120, "2m"),
        (125, "2m5s"),
        (660, "11m"),
        (7200, "2h"),
        (7500, "2h5m"),
        (36000, "10h"),
        (100_000, "27h"),
        (200_000, "2d7h"),
        (1_000_000, "11d"),
    ],
)
def test_age(seconds: int, expected: str) -> None:
    assert age(1000.0, 1000.0 + seconds) == expected


def test_words() -> None:
    assert age(0.0, 100.0) == "-"
    assert age(200.0, 100.0) == "0s", "a clock that is behind the server's"
    assert [size(x) for x in (None, 0, 999, 1000, 1_340_000_000, 12_000_000_000_000)] == [
        "-",
        "0 B",
        "999 B",
        "1 kB",
        "1.34 GB",
        "12 TB",
    ]
    assert [took(x) for x in (None, 0.123, 9.99, 40.94)] == ["-", "0.12 s", "9.99 s", "40.9 s"]


def test_structured() -> None:
    assert render({"a": "ü"}, Format.JSON) == '{\n  "a": "ü"\n}\n'
    assert render({"b": 1, "a": "ü"}, Format.YAML) == "b: 1\na: ü\n"
