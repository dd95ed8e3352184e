"""Checks on single fields, and the columns that every reader fills row by row."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvplan.errors import InputError
from kvplan.trace.schema import NO_STREAM, Provenance, Trace

MAX_TOKENS = 1 << 30
"""Longest prompt or answer that is believed; more is a wrong column or unit."""
MAX_ID = (1 << 62) - 1
MAX_SPAN_S = 366 * 24 * 3600.0
"""Longest trace that is believed: a span of years is a wrong unit."""


@dataclass(frozen=True)
class Place:
    """Where a value stands, for the error that names it."""

    file: str
    line: int

    def error(self, name: str, value: Any, must: str) -> InputError:
        shown = "missing" if value is MISSING else repr(value)
        if len(shown) > 60:
            shown = shown[:57] + "..."
        return InputError(f"{self.file}:{self.line}: {name} is {shown}; must be {must}.")


MISSING = object()


def whole(place: Place, name: str, value: Any, low: int = 0, high: int = MAX_TOKENS) -> int:
    """A whole number from low to high; 12.0 is one, true and '12' are not."""
    number = value
    if isinstance(value, float) and value.is_integer():
        number = int(value)
    if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
        limit = f">= {low}" if isinstance(number, bool) or not isinstance(number, int) or number < low else ""
        raise place.error(name, value, f"a whole number {limit or f'<= {high}'}")
    return number


def seconds(place: Place, name: str, value: Any, unit_s: float, low: float = 0.0) -> float:
    """A finite number of at least ``low``, converted from units of ``unit_s`` seconds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < low:
        raise place.error(name, value, f"a number >= {low:g}")
    return float(value) * unit_s


def text(place: Place, name: str, value: Any) -> str:
    """A string or a whole number, as a string."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise place.error(name, value, "text")
    return str(value)


@dataclass
class Columns:
    """One list a column; `trace` turns them into arrays."""

    file: str
    dated: bool = False  # times count from a date: shift them to the first arrival
    lines: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    arrival_s: list[float] = field(default_factory=list)
    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    segment_counts: list[int] = field(default_factory=list)
    segments: list[tuple[int, int, int]] = field(default_factory=list)
    output_stream: list[int] = field(default_factory=list)
    tenant: list[str] = field(default_factory=list)
    priority: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    cancel_after_s: list[float] = field(default_factory=list)
    deadline_s: list[float] = field(default_factory=list)
    session: list[str] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    think_s: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(
        self,
        line: int,
        arrival_s: float,
        input_tokens: int,
        output_tokens: int,
        *,
        request_id: str | None = None,
        segments: list[tuple[int, int, int]] | None = None,
        output_stream: int = NO_STREAM,
        tenant: str = "",
        priority: int = 0,
        samples: int = 1,
        cancel_after_s: float = math.nan,
        deadline_s: float = math.nan,
        session: str = "",
        turn: int = 0,
        think_s: float = 0.0,
    ) -> None:
        """One request; ``arrival_s`` is on the file's own clock (NaN = the format has no times)."""
        self.lines.append(line)
        self.ids.append(request_id if request_id is not None else f"r{len(self.ids)}")
        self.arrival_s.append(arrival_s)
        self.input_tokens.append(input_tokens)
        self.output_tokens.append(output_tokens)
        self.segment_counts.append(len(segments) if segments else 0)
        if segments:
            self.segments.extend(segments)
        self.output_stream.append(output_stream)
        self.tenant.append(tenant)
        self.priority.append(priority)
        self.samples.append(samples)
        self.cancel_after_s.append(cancel_after_s)
        self.deadline_s.append(deadline_s)
        self.session.append(session)
        self.turn.append(turn)
        self.think_s.append(think_s)

    def trace(self, provenance: Provenance) -> Trace:
        """Arrays in order of arrival, times from the first one. Raises InputError for duplicate ids."""
        self._check_ids()
        arrival = np.asarray(self.arrival_s, np.float64)
        notes = list(self.notes)
        order = np.arange(len(arrival))
        if len(arrival) and not np.isnan(arrival).any():
            if (np.diff(arrival) < 0).any():
                order = np.argsort(arrival, kind="stable")
                first = int(np.flatnonzero(np.diff(arrival) < 0)[0]) + 1
                notes.append(f"times go back (first at line {self.lines[first]}): sorted, ties in file order")
            if self.dated or arrival.min() > MAX_SPAN_S:
                arrival = arrival - arrival.min()
            late = int(np.argmax(arrival > MAX_SPAN_S))
            if arrival[late] > MAX_SPAN_S:
                days = arrival[late] / 86400
                raise InputError(
                    f"{self.file}:{self.lines[late]}: the arrival time lies {days:,.0f} days after the first; "
                    "must be within a year: is the unit right?"
                )
        zeros = int((np.asarray(self.output_tokens, np.int64) == 0).sum())
        if zeros:
            notes.append(f"{zeros:,} requests with an answer of 0 tokens: run as 1, an engine always samples one")
        tenants = {name: i for i, name in enumerate(dict.fromkeys(self.tenant))} or {"": 0}
        sessions = {name: i for i, name in enumerate(dict.fromkeys(s for s in self.session if s))}
        counts = np.asarray(self.segment_counts, np.int64)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        pieces = np.asarray(self.segments, np.int64).reshape(-1, 3)
        if len(order) and (order != np.arange(len(order))).any():
            pieces = np.concatenate([pieces[offsets[i] : offsets[i + 1]] for i in order])
            offsets = np.concatenate([[0], np.cumsum(counts[order])]).astype(np.int64)

        def ints(values: list[int]) -> Any:
            return np.asarray(values, np.int64)[order]

        return Trace(
            request_id=[self.ids[i] for i in order],
            arrival_s=arrival[order],
            input_tokens=ints(self.input_tokens),
            output_tokens=ints(self.output_tokens),
            segment_offsets=offsets,
            segment_stream=np.ascontiguousarray(pieces[:, 0]),
            segment_start=np.ascontiguousarray(pieces[:, 1]),
            segment_length=np.ascontiguousarray(pieces[:, 2]),
            output_stream=ints(self.output_stream),
            tenant_id=ints([tenants[name] for name in self.tenant]),
            tenant_names=list(tenants),
            priority=ints(self.priority),
            samples=ints(self.samples),
            cancel_after_s=np.asarray(self.cancel_after_s, np.float64)[order],
            deadline_s=np.asarray(self.deadline_s, np.float64)[order],
            session_id=ints([sessions.get(name, -1) for name in self.session]),
            turn=ints(self.turn),
            think_s=np.asarray(self.think_s, np.float64)[order],
            provenance=provenance,
            notes=tuple(notes),
        )

    def _check_ids(self) -> None:
        seen: dict[str, int] = {}
        for line, name in zip(self.lines, self.ids, strict=True):
            if name in seen:
                raise InputError(
                    f"{self.file}:{line}: id is {name!r}, as in line {seen[name]}; must be different for each request."
                )
            seen[name] = line
