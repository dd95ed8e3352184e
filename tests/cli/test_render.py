"""The look of results as UX.md asks for it: sums that add up, tables that keep numbers whole at any width."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.cli import render
from kvplan.cli.render import GIB, Column, Progress, Terminal

PART_SIZES = st.lists(st.integers(0, 80 * GIB), min_size=1, max_size=8)


@given(PART_SIZES)
def test_shown_gib_parts_sum_to_the_shown_total(parts: list[int]) -> None:
    """UX principle 4: round the parts, then sum; with and without a total given from outside."""
    for total in (None, sum(parts)):
        shown, whole = render.gib_parts(parts, total)
        assert round(sum(float(s) for s in shown), 2) == float(whole)
    assert abs(float(whole) - sum(parts) / GIB) <= 0.005 + 1e-9


@given(PART_SIZES.filter(any), st.integers(0, 2))
def test_shown_percents_sum_to_100(parts: list[int], digits: int) -> None:
    assert round(sum(float(s) for s in render.percents(parts, digits)), digits) == 100


def test_budget_bar_of_ux_has_its_cells() -> None:
    """The first bar of UX.md, 76 cells at 80 columns: 32 + 6 + 32 + 6 from 33.83, 5.92, 33.10, 6.34 GiB."""
    parts = [(0, 33.83), (1, 5.92), (3, 33.10), (4, 6.34)]
    assert render.bar(parts, Terminal(80)) == "█" * 32 + "▓" * 6 + "░" * 32 + "·" * 6
    assert render.bar(parts, Terminal(80, unicode=False)) == "#" * 32 + "+" * 6 + "-" * 32 + "." * 6
    assert len(render.bar(parts, Terminal(120))) == 116, "bars grow with the terminal"


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=5), st.integers(10, 200))
def test_bar_fills_its_width_and_shows_every_part(sizes: list[float], width: int) -> None:
    text = render.bar(list(enumerate(sizes)), Terminal(), width)
    assert len(text) == width
    for i, size in enumerate(sizes):
        if size > 0:
            assert render.BARS[i] in text


COLUMNS = [
    Column("part", "left"),
    Column("GiB"),
    Column("of card %", optional=1),
    Column("tokens", optional=2),
    Column("why", "left", shrinks=True, min_width=12),
]
ROWS = [
    ["weights", "33.83", "43", "1,234,567", "67.67 / TP 2"],
    ["activation peak", "1.96", "2", "89", "sampler: 4 x 1,024 seqs x 128,256 vocab x 4 B"],
]


def test_table_narrows_text_first_then_optional_columns_and_never_a_number() -> None:
    wide = render.table(COLUMNS, ROWS, Terminal(120))
    assert "128,256 vocab x 4 B" in wide, "why runs on at 120"

    at_80 = render.table(COLUMNS, ROWS, Terminal(80))
    assert max(map(len, at_80.splitlines())) <= 80
    assert "1,234,567" in at_80
    assert "…" in at_80

    narrow = render.table(COLUMNS, ROWS, Terminal(44))
    assert max(map(len, narrow.splitlines())) <= 44
    assert "1,234,567" not in narrow, "the highest optional column goes whole"
    assert "33.83" in narrow
    tiny = render.table(COLUMNS, ROWS, Terminal(20))
    assert "33.83" in tiny, "too narrow for everything: a number is still whole"


@given(st.integers(20, 160))
def test_table_fits_whenever_its_required_columns_do(width: int) -> None:
    required = 2 + len("activation peak") + 2 + len("33.83") + 2 + 12
    lines = render.table(COLUMNS, ROWS, Terminal(width)).splitlines()
    assert max(map(len, lines)) <= max(width, required)
    numbers_end = {
        line.index(number) + len(number) for line, number in zip(lines[1:], ["33.83", "1.96"], strict=True)
    }
    assert len(numbers_end) == 1, "numbers of a column end in one place"


def test_wide_characters_keep_columns_aligned() -> None:
    lines = render.table([Column("name", "left"), Column("n")], [["模型", "1"], ["abcd", "2"]]).splitlines()
    assert lines[1:] == ["  模型  1", "  abcd  2"]


def test_escape_shows_control_characters_and_keeps_brackets() -> None:
    assert render.escape("[bold]a\x1b[31m\nb\u202e") == "[bold]a\\x1b[31m\\nb\\u202e"
    assert render.escape("模型 é") == "模型 é"


@pytest.mark.parametrize(
    ("values_s", "unit", "shown"),
    [
        ([0.117, 0.068, 0.699], "ms", ["117", "68", "699"]),
        ([0.0499, 0.0498], "ms", ["49.9", "49.8"]),
        ([0.991, 2.085], "ms", ["991", "2,085"]),
        ([6.72, 43.98, None], "s", ["6.72", "43.98", "-"]),
        ([0.0021, float("nan")], "ms", ["2.10", "-"]),
    ],
)
def test_times_take_one_unit_and_the_digits_known(values_s: list, unit: str, shown: list[str]) -> None:
    """Figures as UX.md prints them in its simulate and block-size tables."""
    assert render.time_unit(values_s) == unit
    assert render.times(values_s, render.time_unit(values_s)) == shown


def test_numbers() -> None:
    assert render.count(216944.0) == "216,944"
    assert render.fixed(-0.001) == "0.00"
    assert render.byte_size(163_840) == "160 KiB"
    assert render.byte_size(2_621_440) == "2.50 MiB"
    assert render.byte_size(512) == "512 B"


def test_sparkline_runs_from_zero_to_the_peak() -> None:
    line = render.sparkline([0, 1, 2, 3, 4, 5, 6, 7, 8], Terminal(), 9)
    assert (line[0], line[-1], len(line)) == ("▁", "█", 9)
    assert render.sparkline([0.0, 0.0], Terminal()) == "▁▁"
    assert render.sparkline([], Terminal()) == ""
    assert len(render.sparkline(list(range(1000)), Terminal(unicode=False), 38)) == 38


class Screen(io.StringIO):
    """A terminal to write on."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_colour_only_on_a_terminal_and_never_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert render.verdict("fits", "x", True, render.terminal(Screen())).startswith("\x1b[1;32mFITS\x1b[0m")
    assert render.verdict("fits", "x", True, render.terminal(io.StringIO())) == "FITS  x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert render.verdict("does not fit", "x", False, render.terminal(Screen())) == "DOES NOT FIT  x"


def test_progress_is_one_redrawn_line_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of UX.md: 6,978 of 12,031 requests after 2 s leave 0:01."""
    monkeypatch.setenv("COLUMNS", "80")
    screen = Screen()
    with Progress("simulate", 12_031, "req", stream=screen) as progress:
        expected = "simulate  ████████████░░░░░░░░  58 %   6,978 / 12,031 req  KV 34 %    0:01 left"
        assert progress.line(6978, "KV 34 %", 2.0) == expected
        progress.update(6978, "KV 34 %")
        progress.update(6979, "KV 34 %")
    drawn = screen.getvalue()
    assert drawn.count("6,978") == 1
    assert "6,979" not in drawn, "not redrawn more than ten times a second"
    assert drawn.endswith("\r\x1b[K")
    assert "\n" not in drawn


def test_progress_is_silent_in_a_pipe() -> None:
    pipe = io.StringIO()
    with Progress("simulate", 10, stream=pipe) as progress:
        progress.update(5)
    assert pipe.getvalue() == ""


def test_machine_formats(capsys: pytest.CaptureFixture[str]) -> None:
    """NaN is null in JSON (RFC 8259 has no NaN); nested keys are dotted; '|' does not break a table."""
    row = {"a": 1, "b": {"c": float("nan"), "d": [1, 2]}, "s": "x|y", "t": True}
    render.emit(row, "json")
    assert json.loads(capsys.readouterr().out) == {**row, "b": {"c": None, "d": [1, 2]}}
    render.emit([row], "csv")
    assert capsys.readouterr().out == 'a,b.c,b.d,s,t\n1,,"[1, 2]",x|y,true\n'
    render.emit([row], "markdown")
    assert capsys.readouterr().out.splitlines()[2] == "| 1 |  | [1, 2] | x\\|y | true |"
