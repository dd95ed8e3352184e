"""Checks on single fields, and the columns that every reader fills row by row."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvplan.errors import InputError
from kvplan.trace.schema import NO_STREAM, Ints, Provenance, Trace

MAX_TOKENS = 1 << 30
"""Longest prompt or answer that is believed; more is a wrong column or unit."""
MAX_ID = (1 << 62) - 1
MAX_SPAN_S = 366 * 24 * 3600.0
"""Longest trace that is believed: a span of years is a wrong unit."""
MISSING = object()


class Place:
    """Where the row in hand stands, for the error that names it; one object serves a whole file."""

    def __init__(self, file: str, line: int = 0) -> None:
        self.file = file
        self.line = line

    def error(self, name: str, value: Any, must: str) -> InputError:
        found = "missing" if value is MISSING else f"is {shown(value)}"
        return InputError(f"{self.file}:{self.line}: {harmless(name[:60])} {found}; must be {must}.")


def shown(value: Any) -> str:
    """A value from a file as JSON on one short line, harmless to a terminal."""
    text = value if isinstance(value, Phrase) else json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


class Phrase(str):
    """Our own words in the place of a value: shown without quotes."""


def harmless(text: str) -> str:
    """A file's name with what is not printable spelt out."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


# ------------------------------------------------------------------------------- values from JSON


def whole(place: Place, name: str, value: Any, low: int = 0, high: int = MAX_TOKENS) -> int:
    """A whole number from low to high; 12.0 is one, true and "12" are not."""
    if type(value) is int and low <= value <= high:
        return value
    if isinstance(value, float) and value.is_integer() and low <= value <= high:
        return int(value)
    if type(value) is int and value > high:
        raise place.error(
            name, value if value < 10**50 else Phrase("beyond 10^50"), f"a whole number <= {high:,}"
        )
    raise place.error(name, value, f"a whole number >= {low:,}")


def seconds(place: Place, name: str, value: Any, unit_s: float) -> float:
    """A finite number of at least 0 in units of ``unit_s`` seconds, as seconds."""
    if type(value) is float or type(value) is int:
        if value < 0 or not value < 1e300:
            shortened = Phrase("beyond 10^300") if type(value) is int and value > 0 else value
            raise place.error(name, shortened, "a finite number >= 0")
        return value * unit_s
    raise place.error(name, value, "a number >= 0")


def text(place: Place, name: str, value: Any) -> str:
    """A string or a whole number, as a string that can be printed and stored."""
    if type(value) is str and (value.isascii() or value.encode("utf-8", "replace").decode() == value):
        return value
    if type(value) is int and abs(value) < 10**50:
        return str(value)
    raise place.error(name, value, "text")


def items(place: Place, name: str, value: Any) -> list[Any]:
    if type(value) is not list:
        raise place.error(name, value, "a list")
    return value


def block_ids(place: Place, name: str, ids: Any, high: int = MAX_ID) -> list[int]:
    """A list of whole numbers from 0 to ``high``, checked as a whole first: this is where the time goes."""
    if type(ids) is not list:
        raise place.error(name, ids, "a list of whole numbers")
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > high):
        for k, block in enumerate(ids):
            whole(place, f"{name}[{k}]", block if type(block) is not float else repr(block), high=high)
    return ids


# ------------------------------------------------------------------------------ values from cells


def whole_cell(place: Place, name: str, cell: str | None, low: int = 0) -> int:
    """A whole number written in decimal digits and nothing else."""
    if cell is None:
        raise place.error(name, MISSING, f"a whole number >= {low}")
    digits = cell.strip()
    if not (digits.isdigit() and digits.isascii()):
        try:
            number = float(digits) if len(digits) < 30 else math.nan
        except ValueError:
            number = math.nan
        if not (number.is_integer() and digits.isascii()) or "_" in digits or number < low:
            raise place.error(name, cell, f"a whole number >= {low}")
        return whole(place, name, number, low)
    if len(digits) > 18:
        raise place.error(name, cell, f"a whole number <= {MAX_TOKENS:,}")
    return whole(place, name, int(digits), low)


def seconds_cell(place: Place, name: str, cell: str | None, unit_s: float) -> float:
    """A finite decimal number of at least 0 in units of ``unit_s`` seconds, as seconds."""
    if cell is None:
        raise place.error(name, MISSING, "a number >= 0")
    try:
        number = float(cell) if "_" not in cell and cell.isascii() else math.nan
    except ValueError:
        number = math.nan
    if not 0 <= number < 1e300:
        raise place.error(name, cell, "a number >= 0")
    return number * unit_s


# ---------------------------------------------------------------------------------------- columns


class Columns:
    """One array a column, filled row by row; `trace` orders them by time."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.dated = False  # times count from a date: shift them to the first arrival
        self.constructed = False
        self.seed: int | None = None
        self.notes: list[str] = []
        self.counted: dict[str, int] = {}  # oddities by their sentence, counted
        self.lines = array("q")
        self.ids: list[str | None] = []
        self.arrival_s = array("d")
        self.input_tokens = array("q")
        self.output_tokens = array("q")
        self.pieces = array("q")  # segments of each request
        self.stream = array("q")
        self.start = array("q")
        self.length = array("q")
        self.extras: dict[int, dict[str, Any]] = {}  # row: what few files have
        self.sessions: dict[str, int] = {}
        self.session = array("q")
        self.turn = array("q")

    def add(
        self,
        line: int,
        arrival_s: float,
        input_tokens: int,
        output_tokens: int,
        *,
        request_id: str | None = None,
        session: str | None = None,
        turn: int = 0,
        **extras: Any,
    ) -> None:
        """One request, after its segments; ``arrival_s`` is on the file's own clock (NaN = no times).

        ``extras``: output_stream, tenant, priority, samples, cancel_after_s, deadline_s, think_s.
        """
        if extras:
            self.extras[len(self.lines)] = extras
        self.lines.append(line)
        self.ids.append(request_id)
        self.arrival_s.append(arrival_s)
        self.input_tokens.append(input_tokens)
        self.output_tokens.append(output_tokens)
        self.pieces.append(len(self.stream) - self._pieces_before)
        self._pieces_before = len(self.stream)
        self.session.append(-1 if session is None else self.sessions.setdefault(session, len(self.sessions)))
        self.turn.append(turn)

    _pieces_before = 0

    def blocks(self, ids: Sequence[int], size: int, tokens: int, base: int = 0) -> None:
        """Content of the next request: blocks of ``size`` tokens, the last one up to ``tokens`` in all.

        Their streams are ``base`` + id.
        """
        n = len(ids)
        if n:
            if base:
                self.stream.frombytes((np.array(ids, np.int64) + base).tobytes())
            else:
                self.stream.extend(ids)
            self.start.frombytes(bytes(8 * n))
            self.length.extend(array("q", [size]) * n)
            self.length[-1] = tokens - (n - 1) * size

    def segment(self, stream: int, start: int, length: int) -> None:
        """One more piece of the next request's content."""
        self.stream.append(stream)
        self.start.append(start)
        self.length.append(length)

    def drop_pending(self) -> None:
        """Forget the content of a row that turned out bad."""
        for column in (self.stream, self.start, self.length):
            del column[self._pieces_before :]

    def count(self, sentence: str) -> None:
        """One more row with an oddity; the note reads '12 ' + sentence."""
        self.counted[sentence] = self.counted.get(sentence, 0) + 1

    def trace(self, provenance: Provenance) -> Trace:
        """Arrays in order of arrival. Raises InputError for duplicate ids and times years apart."""
        ids = self._request_ids()
        n = len(ids)
        arrival = np.array(self.arrival_s)
        notes = [*self.notes, *(f"{count:,} {sentence}" for sentence, count in self.counted.items())]
        order = np.arange(n)
        if n and not np.isnan(arrival).any():
            back = np.flatnonzero(np.diff(arrival) < 0)
            if len(back):
                order = np.argsort(arrival, kind="stable")
                line = self.lines[int(back[0]) + 1]
                notes.append(f"times go back (first at line {line}): sorted, ties in file order")
            if self.dated or arrival.min() > MAX_SPAN_S:
                arrival = arrival - arrival.min()
            late = int(np.argmax(arrival > MAX_SPAN_S))
            if arrival[late] > MAX_SPAN_S:
                days = f"{arrival[late] / 86400:,.0f}" if arrival[late] < 1e12 else "millions of"
                raise InputError(
                    f"{self.file}:{self.lines[late]}: the arrival time lies {days} days after the first; "
                    "must be within a year: is the unit right?"
                )
        zeros = int((np.array(self.output_tokens) == 0).sum())
        if zeros:
            notes.append(
                f"{zeros:,} requests with an answer of 0 tokens: run as 1, an engine always samples one"
            )
        counts = np.array(self.pieces, np.int64)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        take: Any = slice(None)
        if not (order == np.arange(n)).all():
            moved = np.repeat(offsets[order], counts[order])
            offsets = np.concatenate([[0], np.cumsum(counts[order])]).astype(np.int64)
            take = moved + np.arange(len(moved)) - np.repeat(offsets[:-1], counts[order])
            ids = [ids[i] for i in order]

        def ints(name: str, default: int) -> Ints:
            return self._extra(name, default, np.dtype(np.int64))[order]

        def floats(name: str, default: float) -> Any:
            return self._extra(name, default, np.dtype(np.float64))[order]

        tenants: dict[str, int] = {"": 0} if len(self.extras) < n or n == 0 else {}
        for extras in self.extras.values():
            extras["tenant_id"] = tenants.setdefault(extras.get("tenant", ""), len(tenants))
        return Trace(
            request_id=ids,
            arrival_s=arrival[order],
            input_tokens=np.array(self.input_tokens)[order],
            output_tokens=np.array(self.output_tokens)[order],
            segment_offsets=offsets,
            segment_stream=np.array(self.stream, np.int64)[take],
            segment_start=np.array(self.start, np.int64)[take],
            segment_length=np.array(self.length, np.int64)[take],
            output_stream=ints("output_stream", NO_STREAM),
            tenant_id=ints("tenant_id", 0),
            tenant_names=list(tenants),
            priority=ints("priority", 0),
            samples=ints("samples", 1),
            cancel_after_s=floats("cancel_after_s", math.nan),
            deadline_s=floats("deadline_s", math.nan),
            session_id=np.array(self.session, np.int64)[order],
            turn=np.array(self.turn, np.int64)[order],
            think_s=floats("think_s", 0.0),
            provenance=provenance,
            notes=tuple(notes),
        )

    def _extra(self, name: str, default: float, dtype: np.dtype[Any]) -> Any:
        column = np.full(len(self.lines), default, dtype)
        given = [(i, extras[name]) for i, extras in self.extras.items() if name in extras]
        if given:
            rows, values = zip(*given, strict=True)
            column[list(rows)] = values
        return column

    def _request_ids(self) -> list[str]:
        ids = [f"r{i}" if name is None else name for i, name in enumerate(self.ids)]
        if len(set(ids)) < len(ids):
            seen: dict[str, int] = {}
            for line, name in zip(self.lines, ids, strict=True):
                if name in seen:
                    raise InputError(
                        f"{self.file}:{line}: id is {shown(name)}, as in line {seen[name]}; "
                        "must be different for each request."
                    )
                seen[name] = line
        return ids
