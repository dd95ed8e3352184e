"""How a number is written: commas, GiB, percent, s or ms; shown parts that add up to the shown total."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

GIB = 1 << 30


def count(value: float) -> str:
    """A whole number with thousands commas."""
    return f"{round(value):,}"


def fixed(value: float | None, digits: int = 2) -> str:
    """A number with commas and ``digits`` decimals; '-' when there is none (None, NaN)."""
    if value is None or value != value:
        return "-"
    text = f"{value:,.{digits}f}"
    return text[1:] if text.startswith("-") and not text.strip("-0.,") else text


def gib(size_bytes: float, digits: int = 2) -> str:
    """Bytes in GiB (2^30), two decimals."""
    return fixed(size_bytes / GIB, digits)


def byte_size(size_bytes: float) -> str:
    """A small size in the largest binary unit that keeps it >= 1: '160 KiB', '2.50 MiB'."""
    for unit, scale in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            value = size_bytes / scale
            return f"{value:,.0f} {unit}" if value == int(value) else f"{value:,.2f} {unit}"
    return f"{size_bytes:,.0f} B"


def round_parts(parts: Sequence[float], digits: int = 2, total: float | None = None) -> list[float]:
    """Round ``parts`` to ``digits`` so that what is shown adds up.

    With ``total`` the rounded parts sum to the rounded total (largest remainders are rounded up); without
    it each part is rounded on its own and the caller shows the sum of what is returned.
    """
    scale = 10**digits
    if total is None:
        return [round(part * scale) / scale for part in parts]
    floors = [int(part * scale // 1) for part in parts]
    missing = round(total * scale) - sum(floors)
    by_remainder = sorted(range(len(parts)), key=lambda i: parts[i] * scale - floors[i], reverse=True)
    for i in by_remainder[: max(0, missing)]:
        floors[i] += 1
    return [floor / scale for floor in floors]


def gib_parts(parts_bytes: Sequence[float], total_bytes: float | None = None) -> tuple[list[str], str]:
    """(each part in GiB, the total in GiB), with shown parts that sum to the shown total."""
    total = None if total_bytes is None else total_bytes / GIB
    rounded = round_parts([part / GIB for part in parts_bytes], 2, total)
    return [fixed(part) for part in rounded], fixed(sum(rounded))


def percents(parts: Sequence[float], digits: int = 0) -> list[str]:
    """Shares of the sum of ``parts`` in %, which add up to 100 as shown."""
    whole = sum(parts)
    if whole <= 0:
        return [fixed(0.0, digits) for _ in parts]
    return [fixed(p, digits) for p in round_parts([100 * part / whole for part in parts], digits, 100.0)]


def time_unit(values_s: Iterable[float | None]) -> Literal["s", "ms"]:
    """The unit for a row or column of times: seconds once any reaches 10 s, else milliseconds."""
    known = [v for v in values_s if v is not None and v == v]
    return "s" if known and max(known) >= 10 else "ms"


def times(values_s: Sequence[float | None], unit: Literal["s", "ms"]) -> list[str]:
    """Times in one unit with one number of decimals: s has 2; ms keeps three figures of the largest."""
    if unit == "s":
        return [fixed(v, 2) for v in values_s]
    in_ms = [None if v is None else v * 1e3 for v in values_s]
    largest = max((v for v in in_ms if v is not None and v == v), default=0.0)
    digits = 0 if largest >= 99.95 else 1 if largest >= 9.995 else 2
    return [fixed(v, digits) for v in in_ms]
