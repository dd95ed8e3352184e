"""How a sweep looks: a row a set-up, those that do not fit included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvplan.cli import render
from kvplan.cli.numbers import count, fixed, gib
from kvplan.cli.render import Column, Terminal
from kvplan.memory.capacity import Estimate

HEADS = {
    "tensor_parallel_size": "TP",
    "pipeline_parallel_size": "PP",
    "data_parallel_size": "DP",
    "kv_cache_dtype": "KV dtype",
    "max_model_len": "max len",
    "gpu_memory_utilization": "util",
    "block_size": "block",
    "max_num_batched_tokens": "batched",
    "max_num_seqs": "seqs",
    "gpu": "GPU",
    "engine_version": "version",
}

MAX_REASONS = 6  # refusals spelt out below the table

Row = tuple[dict[str, Any], Estimate | None, str]


def sweep_view(rows: Sequence[Row], term: Terminal) -> list[str]:
    """The verdict, the table, and what its units are. Rows hold (swept values, result or None, reason)."""
    names = list(rows[0][0])
    has_mix = any(e is not None and e.workload is not None for _, e, _ in rows)
    columns = [Column(_head(name), "right" if _is_number(rows, name) else "left") for name in names]
    columns += [Column(head) for head in ("weights GiB", "KV pool GiB", "tokens", "tokens/GPU", "requests")]
    if has_mix:
        columns.append(Column("at this mix"))
    columns.append(Column("", "left"))
    body = [_cells(row, has_mix) for row in rows]
    lengths = {e.engine.max_model_len for _, e, _ in rows if e is not None}
    of_length = f" (of {count(lengths.pop())})" if len(lengths) == 1 else " (of max_model_len)"
    replicas = any(e is not None and e.engine.settings.data_parallel_size > 1 for _, e, _ in rows)
    units = f"GiB are per GPU; tokens and requests{of_length} are the engine's."
    if replicas:
        units += "\nTokens and requests are those of all data-parallel replicas together."
    refused = [
        render.wrap(f"{_in_words(values)}: {render.escape(reason)}", term.width)
        for values, e, reason in rows
        if e is None
    ]
    more = [f"{len(refused) - MAX_REASONS} more are refused; --format json has each reason."]
    shown = [*refused[:MAX_REASONS], *(more if len(refused) > MAX_REASONS else [])]
    return [*_verdict(rows, term), "", render.table(columns, body, term), "", *shown, units]


def tokens(e: Estimate) -> int:
    """KV tokens of all data-parallel replicas together."""
    return e.kv_cache_tokens * e.engine.settings.data_parallel_size


def tokens_per_gpu(e: Estimate) -> int:
    """What a GPU buys: KV tokens over all GPUs."""
    return tokens(e) // e.engine.ranks


def _verdict(rows: Sequence[Row], term: Terminal) -> list[str]:
    fitting = [(values, e) for values, e, _ in rows if e is not None and e.verdict.fits]
    word = f"{len(fitting)} of {len(rows)} fit"
    if not fitting:
        return [render.verdict(word, "nothing here starts", False, term)]
    fewest = min(fitting, key=lambda row: (row[1].engine.ranks, -row[1].kv_cache_tokens))
    most = max(fitting, key=lambda row: tokens_per_gpu(row[1]))
    parts = []
    if len({e.engine.ranks for _, e in fitting}) > 1:
        parts.append(f"fewest GPUs: {_in_words(fewest[0])}")
    parts.append(f"most KV tokens per GPU: {_in_words(most[0])}")
    whole = "; ".join(parts)
    if len(word) + 2 + len(whole) <= term.width:
        return [render.verdict(word, whole, True, term)]
    return [render.verdict(word, parts[0], True, term), *parts[1:]]


def _in_words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{_head(name)} {_value(value)}" for name, value in values.items())


def _cells(row: Row, has_mix: bool) -> list[str]:
    values, e, _ = row
    cells = [_value(value) for value in values.values()]
    if e is None:
        return [*cells, *["-"] * (6 if has_mix else 5), "no"]
    cells += [
        gib(e.budget.weights.bytes) if e.budget else "-",
        gib(e.available_kv_bytes),
        count(tokens(e)),
        count(tokens_per_gpu(e)),
        fixed(e.max_concurrency * e.engine.settings.data_parallel_size),
    ]
    if has_mix:
        cells.append(fixed(e.workload.concurrency, 1) if e.workload else "-")
    return [*cells, "" if e.verdict.fits is not False else "no"]


def _head(name: str) -> str:
    return HEADS.get(name, name.replace("_", " "))


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return count(value)
    return f"{value:g}" if isinstance(value, float) else render.escape(value)


def _is_number(rows: Sequence[Row], name: str) -> bool:
    return all(isinstance(values[name], (int, float)) for values, _, _ in rows)
