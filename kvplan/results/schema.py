"""The tables of a run: their columns, types and units. Parquet is built here without pandas.

| table | a row is | |
|---|---|---|
| summary | a run (one block size) | metrics under vLLM bench's names, and our own (CLI.md) |
| requests | a request | in trace order, failures too |
| timeline | a moment | counts and blocks after a step, sampled evenly when there are many steps |
| decisions | a scheduler step | `--record-decisions`; request numbers are positions in the trace |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvplan.results.metrics import LATENCIES, PERCENTILES

if TYPE_CHECKING:
    import pyarrow as pa

# Column: kind. Kinds: int, float, bool, str, ints (a list of int a row). NaN and None are stored as null.
REQUESTS: dict[str, str] = {
    "request": "int",  # position in the trace
    "id": "str",
    # finished, rejected_oom, rejected_too_long, rejected_empty, cancelled, timed_out, unfinished
    "status": "str",
    "reason": "str",  # why it was rejected; null otherwise
    "arrival_s": "float",
    "first_scheduled_s": "float",
    "first_token_s": "float",
    "finish_s": "float",
    "input_tokens": "int",
    "output_tokens": "int",  # asked for
    "generated_tokens": "int",  # got
    "ttft_s": "float",
    "tpot_s": "float",
    "e2el_s": "float",
    "preemptions": "int",
    "prefix_hit_tokens": "int",  # at first admission
    "priority": "int",
    "tenant": "str",
    "session_id": "int",
    "turn": "int",
}

TIMELINE: dict[str, str] = {
    "time_s": "float",
    "step": "int",
    "running": "int",
    "waiting": "int",
    "used_blocks": "int",  # named by a block table
    "cached_blocks": "int",  # content kept, named by no table: evictable
    "free_blocks": "int",  # nothing kept; used + cached + free = the pool without the null block
    "live_tokens": "int",  # positions written in used blocks
    "scheduled_tokens": "int",  # in this step
    "preemptions": "int",  # so far
}

DECISIONS: dict[str, str] = {
    "step": "int",
    "sched_req": "ints",
    "sched_tok": "ints",
    "new": "ints",
    "resumed": "ints",
    "preempted": "ints",
    "finished": "ints",
    "first_token": "ints",
    "running": "ints",
    "n_waiting": "int",
    "waiting_head": "ints",
    "free_before": "int",
    "free_after_schedule": "int",
    "free_after_update": "int",
    "used_after_schedule": "int",
    "cache_query_tokens": "int",  # first admissions
    "cache_hit_tokens": "int",
    "preempt_cache_query_tokens": "int",  # resumes
    "preempt_cache_hit_tokens": "int",
    "alloc_block_ids": "ints",
    "free_head8": "ints",
}

SUMMARY: dict[str, str] = {
    "block_size": "int",
    "completed": "int",
    "duration_s": "float",
    "request_throughput": "float",  # requests a second
    "output_throughput": "float",  # tokens a second
    "total_token_throughput": "float",
    **{
        f"{statistic}_{name}_ms": "float"
        for name in LATENCIES
        for statistic in ("mean", "median", "std", *(f"p{q}" for q in PERCENTILES))
    },
    "request_goodput": "float",  # requests a second that met every --slo; null without one
    "position_utilization": "float",
    "preemptions": "int",
    "recomputed_tokens": "int",
    "prefix_hit_tokens": "int",
    "prefix_query_tokens": "int",
    "kv_utilization": "float",
    "kv_effective_bytes": "float",  # these bytes: means over time
    "kv_shared_bytes": "float",
    "kv_cached_bytes": "float",
    "tail_waste_bytes": "float",
    "reserved_unused_bytes": "float",
    "external_fragmentation_bytes": "float",
    "block_table_bytes": "float",
    "free_bytes": "float",
    "copied_bytes": "float",
    "peak_running": "int",
    "peak_blocks": "int",
    "rejected": "int",
    "timed_out": "int",
    "cancelled": "int",
    "unfinished": "int",
    "saturated": "bool",
}

TABLES: dict[str, dict[str, str]] = {
    "summary": SUMMARY,
    "requests": REQUESTS,
    "timeline": TIMELINE,
    "decisions": DECISIONS,
}


def make_table(name: str, columns: Mapping[str, Any]) -> pa.Table:
    """Build table ``name`` from its columns: arrays or lists of one length, all of the schema and no other.

    A list column takes a list of lists or a pair (offsets [n + 1], values).
    Raises ValueError naming columns that are missing, unknown or of another length.
    """
    schema = TABLES[name]
    if set(columns) != set(schema):
        missing, unknown = sorted(set(schema) - set(columns)), sorted(set(columns) - set(schema))
        raise ValueError(f"table {name}: missing columns {missing}, unknown columns {unknown}")
    return _table({column: (columns[column], kind) for column, kind in schema.items()}, name)


def summary_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """One row a run. Keys of `SUMMARY` that a run lacks are null; further keys become columns of their own.

    Nested values (lists, objects such as ``verdict``) are stored as JSON text.
    """
    import json

    kinds = dict(SUMMARY)
    for row in rows:
        for key, value in row.items():
            if key not in kinds and value is not None:
                kinds[key] = _kind(value)
    columns = {}
    for key, kind in kinds.items():
        values = [row.get(key) for row in rows]
        if kind == "str":
            values = [json.dumps(v) if v is not None and not isinstance(v, str) else v for v in values]
        columns[key] = (values, kind)
    return _table(columns, "summary")


def rows_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """A table with a column for each key of ``rows``, typed by its values (kernel and estimate rows)."""
    import json

    keys = list(dict.fromkeys(key for row in rows for key in row))
    columns = {}
    for key in keys:
        values = [row.get(key) for row in rows]
        kinds = {_kind(value) for value in values if value is not None}
        kind = "float" if kinds == {"int", "float"} else kinds.pop() if len(kinds) == 1 else "str"
        if kind == "str":
            values = [json.dumps(v) if v is not None and not isinstance(v, str) else v for v in values]
        columns[key] = (values, kind)
    return _table(columns, "rows")


def _kind(value: Any) -> str:
    if isinstance(value, (bool, np.bool_)):
        return "bool"
    if isinstance(value, (int, np.integer)):
        return "int"
    return "float" if isinstance(value, (float, np.floating)) else "str"


def _table(columns: Mapping[str, tuple[Any, str]], name: str) -> pa.Table:
    import pyarrow as pa

    arrays = {key: _array(values, kind) for key, (values, kind) in columns.items()}
    lengths = {key: len(array) for key, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"table {name}: columns differ in length: {lengths}")
    return pa.table(arrays)


def _array(values: Any, kind: str) -> pa.Array:
    """An Arrow array from buffers: `pyarrow.array` imports pandas (0.6 s) to look at what it is given."""
    import pyarrow as pa

    if kind == "str":
        return _strings(values)
    if kind == "ints":
        offsets, flat = values if isinstance(values, tuple) else _flatten(values)
        inner = _array(np.asarray(flat, dtype=np.int64), "int")
        edges = pa.py_buffer(np.ascontiguousarray(offsets, dtype=np.int32))
        return pa.ListArray.from_buffers(
            pa.list_(pa.int64()), len(offsets) - 1, [None, edges], children=[inner]
        )

    numpy_type, arrow_type = {
        "int": (np.int64, pa.int64()),
        "float": (np.float64, pa.float64()),
        "bool": (np.bool_, pa.bool_()),
    }[kind]
    if isinstance(values, np.ndarray):
        valid = ~np.isnan(values) if values.dtype.kind == "f" else None
        data = values if valid is None or kind == "float" else np.where(valid, values, 0)
    else:
        known = [v is not None and v == v for v in values]
        valid = np.asarray(known, dtype=np.bool_)
        data = np.asarray([v if k else 0 for v, k in zip(values, known, strict=True)])
    data = np.ascontiguousarray(data, dtype=numpy_type)
    if valid is not None and valid.all():
        valid = None
    if kind == "bool":
        data = np.packbits(data, bitorder="little")
    bitmap = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(arrow_type, len(values), [bitmap, pa.py_buffer(data)])


def _strings(values: Sequence[str | None]) -> pa.Array:
    import pyarrow as pa

    encoded = [b"" if v is None else str(v).encode("utf-8", "replace") for v in values]
    offsets = np.zeros(len(encoded) + 1, dtype=np.int32)
    np.cumsum([len(text) for text in encoded], out=offsets[1:])
    buffers = [pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    bitmap = None
    if any(v is None for v in values):
        bitmap = pa.py_buffer(np.packbits([v is not None for v in values], bitorder="little"))
    return pa.Array.from_buffers(pa.utf8(), len(encoded), [bitmap, *buffers])


def _flatten(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return offsets, np.asarray([item for row in rows for item in row], dtype=np.int64)
