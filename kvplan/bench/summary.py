"""What a sweep's rows say by block size, and the rows as the tables that go to disk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from kvplan.bench.ceilings import Ceilings
from kvplan.bench.device import Device

AS_GOOD = 0.02  # block sizes whose share is within this of the best count as equally good

# Null where a row has no number; named here so that a column's type never depends on the run.
FLOAT_COLUMNS = (
    "max_error",
    "tolerance",
    "median_ms",
    "p20_ms",
    "p80_ms",
    "eager_median_ms",
    "kv_gb_per_s",
    "share_of_read",
    "share_of_copy",
    "slowdown_vs_one_block",
    "slowdown_vs_sdpa",
    "block_size",
    "repeats",
    "copies",
)
WHOLE_COLUMNS = ("block_size", "repeats", "copies")


@dataclass(frozen=True)
class BlockSizeShares:
    """Our kernel by block size, ``{block size: median share of the read ceiling}``, over the set-ups in
    which every block size has a number; ``best`` are those within 2 % of the highest share."""

    shares: dict[int, float]
    best: tuple[int, ...]
    setups: int


def shares_by_block_size(rows: Sequence[Mapping[str, Any]]) -> BlockSizeShares | None:
    """Summarise the first of our kernels in ``rows``; None when no set-up is complete."""
    kernels = [row for row in rows if row["role"] == "kernel"]
    if not kernels:
        return None
    backend = kernels[0]["backend"]
    by_setup: dict[str, dict[int, float]] = {}
    for row in kernels:
        if row["backend"] == backend and row["share_of_read"] is not None:
            by_setup.setdefault(row["setup"], {})[row["block_size"]] = row["share_of_read"]
    swept = {row["block_size"] for row in kernels if row["backend"] == backend}
    complete = [shares for shares in by_setup.values() if set(shares) == swept]
    if not complete:
        return None
    shares = {block: median(setup[block] for setup in complete) for block in sorted(swept)}
    top = max(shares.values())
    best = tuple(block for block, share in shares.items() if share >= top * (1 - AS_GOOD))
    return BlockSizeShares(shares, best, len(complete))


def summary_rows(
    rows: Sequence[Mapping[str, Any]], ceilings: Ceilings, device: Device
) -> list[dict[str, Any]]:
    """A row for each backend and block size: cells by status, and medians over the cells that are right."""
    groups: dict[tuple[str, int | None], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["backend"], row["block_size"]), []).append(row)
    out = []
    for (backend, block_size), cells in groups.items():
        measured = [cell for cell in cells if cell["status"] == "ok"]
        out.append(
            {
                "backend": backend,
                "role": cells[0]["role"],
                "block_size": block_size,
                "cells": len(cells),
                **{
                    status: sum(cell["status"] == status for cell in cells)
                    for status in ("ok", "failed", "error", "unsupported", "skipped")
                },
                **{
                    f"median_{column}": _median([cell[column] for cell in measured])
                    for column in (
                        "kv_gb_per_s",
                        "share_of_read",
                        "slowdown_vs_one_block",
                        "slowdown_vs_sdpa",
                    )
                },
                "read_ceiling_gb_per_s": ceilings.read_gb_per_s,
                "copy_ceiling_gb_per_s": ceilings.copy_gb_per_s,
                "device": device.name,
                "device_label": device.label,
            }
        )
    return out


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def typed(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Columns for a table on disk: numbers without a value are null of their own type, not text."""
    import pyarrow as pa

    from kvplan.results.schema import rows_table

    floats = [name for name in rows[0] if name in FLOAT_COLUMNS or name.startswith("median_")]
    table = rows_table(
        [{k: math.nan if v is None and k in floats else v for k, v in row.items()} for row in rows]
    )
    for name in WHOLE_COLUMNS:
        if name in rows[0]:
            at = table.schema.get_field_index(name)
            table = table.set_column(at, name, table[name].cast(pa.int64()))
    return table
