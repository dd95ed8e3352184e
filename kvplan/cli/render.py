"""How results look: tables, bars, sparklines, the verdict, and the machine formats.

Functions are pure: they take values and a `Terminal` (or a width) and return text. Only `write`, `note`,
`emit` and `Progress` touch a stream. Nothing here imports Rich, so that a command starts at once.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TextIO

# Commands take number formats from here too: one import for how things look.
from kvplan.cli.numbers import (  # noqa: F401
    GIB,
    byte_size,
    count,
    fixed,
    gib,
    gib_parts,
    percents,
    round_parts,
    time_unit,
    times,
)

INDENT = "  "
BARS = "█▓▒░·"
ASCII_BARS = "#+=-."
SPARKS = "▁▂▃▄▅▆▇█"
ASCII_SPARKS = "_.-:=+*#"


class Format(StrEnum):
    """What `--format` accepts."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    MARKDOWN = "markdown"


@dataclass(frozen=True)
class Terminal:
    """What a stream can show: columns, whether block glyphs survive its encoding, whether to colour."""

    width: int = 80
    unicode: bool = True
    colour: bool = False

    @property
    def bar_width(self) -> int:
        """Cells of a bar: the whole line but two columns on either side, so bars grow with the terminal."""
        return max(10, self.width - 2 * len(INDENT))


def terminal(stream: TextIO | None = None) -> Terminal:
    """Describe ``stream`` (stdout by default). A pipe is 80 columns, or $COLUMNS, and has no colour."""
    stream = stream or sys.stdout
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "")
    tty = stream.isatty()
    colour = tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Terminal(shutil.get_terminal_size((80, 24)).columns, encoding.startswith("utf"), colour)


# ---- strings ----------------------------------------------------------------------------------------


def escape(text: object) -> str:
    """Make a string from a file harmless: control and formatting characters are shown, not obeyed."""
    return "".join(
        char if char == " " or unicodedata.category(char)[0] not in "CZ" else ascii(char)[1:-1]
        for char in str(text)
    )


def cells(text: str) -> int:
    """Columns that ``text`` takes on a terminal; East Asian wide characters take two."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def shorten(text: str, width: int, unicode: bool = True) -> str:
    """Cut ``text`` to ``width`` columns, saying so with an ellipsis."""
    if cells(text) <= width:
        return text
    mark = "…" if unicode else "..."
    while text and cells(text) > width - len(mark):
        text = text[:-1]
    return text.rstrip() + mark


def wrap(text: str, width: int = 80, hanging: str = INDENT) -> str:
    """Wrap prose at spaces only; later lines are indented, long words are left whole."""
    import textwrap

    return textwrap.fill(
        text, max(20, width - 1), subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
    )


# ---- tables -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """One column. Numbers stand right; the one ``shrinks`` column is text and gives way first.

    ``optional`` > 0 marks a column that may be left out of a narrow terminal, the highest first.
    """

    head: str = ""
    align: Literal["right", "left"] = "right"
    shrinks: bool = False
    min_width: int = 12
    optional: int = 0


def table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    term: Terminal | None = None,
    indent: str = INDENT,
) -> str:
    """A borderless table that fits ``term``: text shrinks, then optional columns go, numbers never."""
    term = term or Terminal()
    kept = list(range(len(columns)))
    widths = [max([cells(column.head), *(cells(row[i]) for row in rows)]) for i, column in enumerate(columns)]

    def excess() -> int:
        return len(indent) + sum(widths[i] for i in kept) + 2 * (len(kept) - 1) - term.width

    while excess() > 0:
        text = next((i for i in kept if columns[i].shrinks), None)
        floor = 0 if text is None else max(columns[text].min_width, cells(columns[text].head))
        if text is not None and widths[text] - excess() >= floor:
            widths[text] -= excess()
            break
        droppable = max(
            (i for i in kept if columns[i].optional), key=lambda i: columns[i].optional, default=-1
        )
        if droppable < 0:
            if text is not None:
                widths[text] = min(widths[text], floor)
            break
        kept.remove(droppable)

    def line(row: Sequence[str]) -> str:
        parts = []
        for i in kept:
            cell = shorten(row[i], widths[i], term.unicode) if columns[i].shrinks else row[i]
            pad = " " * (widths[i] - cells(cell))
            parts.append(pad + cell if columns[i].align == "right" else cell + pad)
        return (indent + "  ".join(parts)).rstrip()

    heads = [line([column.head for column in columns])] if any(c.head for c in columns) else []
    return "\n".join(heads + [line(row) for row in rows])


# ---- bars -------------------------------------------------------------------------------------------


def glyphs(term: Terminal) -> str:
    """The five bar glyphs, darkest first, that ``term`` can show."""
    return BARS if term.unicode else ASCII_BARS


def bar(parts: Sequence[tuple[int, float]], term: Terminal, width: int | None = None) -> str:
    """One bar of ``width`` cells from (index into `glyphs`, size) pairs; sizes share one unit.

    Cells go by largest remainder, and a part that is there at all gets at least one.
    """
    width = width or term.bar_width
    sizes = [max(0.0, size) for _, size in parts]
    whole = sum(sizes)
    if whole <= 0:
        return glyphs(term)[-1] * width
    lengths = [int(n) for n in round_parts([width * size / whole for size in sizes], 0, width)]
    for i, size in enumerate(sizes):
        if size > 0 and lengths[i] == 0 and width >= len(sizes):
            lengths[lengths.index(max(lengths))] -= 1
            lengths[i] = 1
    return "".join(glyphs(term)[g] * n for (g, _), n in zip(parts, lengths, strict=True))


def sparkline(values: Sequence[float], term: Terminal, width: int = 38) -> str:
    """``values`` over their course in at most ``width`` cells (means of equal bins), from 0 to the peak."""
    if not len(values):
        return ""
    n = min(width, len(values))
    edges = [i * len(values) // n for i in range(n + 1)]
    binned = [float(sum(values[a:b])) / (b - a) for a, b in pairwise(edges)]
    top = max(binned)
    marks = SPARKS if term.unicode else ASCII_SPARKS
    return "".join(marks[min(7, int(8 * max(0.0, v) / top))] if top > 0 else marks[0] for v in binned)


# ---- colour and streams -----------------------------------------------------------------------------


def paint(text: str, code: str, term: Terminal) -> str:
    """Wrap ``text`` in an ANSI style on terminals that show colour."""
    return f"\x1b[{code}m{text}\x1b[0m" if term.colour else text


def verdict(word: str, figure: str, good: bool | None, term: Terminal) -> str:
    """The first line: the answer in capitals (green, red, or plain when neither), then its figure."""
    colour = {True: "1;32", False: "1;31", None: "1"}[good]
    return f"{paint(word.upper(), colour, term)}  {figure}"


def dim(text: str, term: Terminal) -> str:
    """Notes and assumptions: said, but not loudly."""
    return paint(text, "2", term)


def write(*blocks: str) -> None:
    """Print blocks of lines to stdout; characters the encoding lacks are replaced, never fatal."""
    _put(sys.stdout, "\n".join(blocks) + "\n")


def note(text: str, quiet: bool = False) -> None:
    """One line to stderr, dim on a terminal; nothing under `--quiet`."""
    if not quiet:
        _put(sys.stderr, dim(text, terminal(sys.stderr)) + "\n")


def wrote(path: str | os.PathLike[str], tables: Sequence[str] = (), quiet: bool = False) -> None:
    """Say on stderr what was written: 'wrote out/conv: summary, requests (4.1 MB)'."""
    target = Path(path)
    files = [target / f"{name}.parquet" for name in tables] if target.is_dir() else [target]
    size = sum(file.stat().st_size for file in files if file.exists())
    shown = f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"
    names = f": {', '.join(tables)}" if tables else ""
    note(f"wrote {escape(path)}{names} ({shown})", quiet)


def _put(stream: TextIO, text: str) -> None:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))


class Progress:
    """One line on stderr, redrawn at most ten times a second, gone when done; silent off a terminal.

    ``with Progress("simulate", total, "req") as progress: progress.update(done, "KV 34 %")``
    """

    def __init__(
        self, label: str, total: int, unit: str = "", quiet: bool = False, stream: TextIO | None = None
    ) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.stream = stream or sys.stderr
        self.term = terminal(self.stream)
        self.active = not quiet and self.stream.isatty()
        self.started = time.monotonic()
        self.drawn = float("-inf")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.active and self.drawn > float("-inf"):
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    def update(self, done: int, text: str = "") -> None:
        """Show ``done`` of the total and one word of news."""
        now = time.monotonic()
        if not self.active or now - self.drawn < 0.1:
            return
        self.drawn = now
        _put(self.stream, "\r" + self.line(done, text, now - self.started) + "\x1b[K")
        self.stream.flush()

    def line(self, done: int, text: str, elapsed_s: float) -> str:
        """The line itself; the time left is a straight projection of the pace so far."""
        share = min(1.0, done / self.total) if self.total else 1.0
        full, empty = (BARS[0], BARS[3]) if self.term.unicode else (ASCII_BARS[0], ASCII_BARS[3])
        left_s = elapsed_s * (1 - share) / share if share > 0 else None
        left = "" if left_s is None else f"{int(left_s) // 60}:{int(left_s) % 60:02d} left"
        progress = f"{done:,} / {self.total:,} {self.unit}".rstrip()
        said = f" {100 * share:3.0f} %   {progress}  {text:<9}  {left}".rstrip()
        width = min(20, max(4, self.term.width - 1 - cells(f"{self.label:<8}  {said}")))
        drawn = full * round(width * share) + empty * (width - round(width * share))
        return shorten(f"{self.label:<8}  {drawn}{said}", self.term.width - 1, self.term.unicode)


# ---- machine formats --------------------------------------------------------------------------------


def emit(value: Mapping[str, Any] | Sequence[Mapping[str, Any]], format: str) -> None:
    """Write a result object, or a list of rows, to stdout as json, csv or markdown.

    NaN becomes null in JSON and an empty cell elsewhere. Nested objects become dotted columns in csv and
    markdown; lists in a cell become JSON.
    """
    import json

    if format == Format.JSON:
        _put(sys.stdout, json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        return
    rows = [_flatten(_plain(row)) for row in ([value] if isinstance(value, Mapping) else value)]
    heads = list(dict.fromkeys(key for row in rows for key in row))
    body = [[_cell(row.get(head)) for head in heads] for row in rows]
    if format == Format.CSV:
        import csv

        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerows([heads, *body])
        return
    if format != Format.MARKDOWN:
        raise ValueError(f"no machine format {format!r}")
    for row in (heads, ["---"] * len(heads), *body):
        _put(sys.stdout, "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n")


def _plain(value: Any) -> Any:
    """Plain JSON types from dataclass fields, numpy scalars and enums; NaN and infinities become None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "tolist"):  # a numpy scalar or array, without importing numpy
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if value - value == 0 else None
    return str(value)


def _flatten(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in row.items():
        name = f"{prefix}{key}"
        flat.update(_flatten(item, name + ".") if isinstance(item, Mapping) else {name: item})
    return flat


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        import json

        return json.dumps(value, ensure_ascii=False)
    return escape(value) if isinstance(value, str) else repr(value)
