"""Azure's LLM inference traces: CSV of 2023 (naive times) and 2024 (with an offset), lengths only."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from kvplan.trace.columns import MISSING, Columns, Place, whole

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:?\d\d)?")


def add_row(columns: Columns, place: Place, row: dict[str, str]) -> None:
    """Check one row (cells as text) and add its request. Raises InputError naming line and field."""
    columns.dated = True
    context = _number(place, "ContextTokens", row, low=1)
    columns.add(place.line, _time_s(place, row.get("TIMESTAMP", "")), context, _number(place, "GeneratedTokens", row))


def _number(place: Place, name: str, row: dict[str, str], low: int = 0) -> int:
    cell = row.get(name)
    if cell is None:
        raise place.error(name, MISSING, f"a whole number >= {low}")
    try:
        number = int(cell)
    except ValueError:
        raise place.error(name, cell, f"a whole number >= {low}") from None
    return whole(place, name, number, low)


def _time_s(place: Place, cell: str) -> float:
    """Seconds since 1970 with all the digits the cell has (2023 rows have seven)."""
    match = _TIME.fullmatch(cell.strip())
    try:
        if match is None:
            raise ValueError
        offset = match[4] or "+00:00"
        moment = datetime.fromisoformat(f"{match[1]}T{match[2]}{'+00:00' if offset == 'Z' else offset}")
    except ValueError:
        raise place.error("TIMESTAMP", cell, "a time like 2023-11-16 18:15:46.6805900") from None
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() + float(match[3] or 0.0)
