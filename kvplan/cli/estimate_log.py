"""`estimate --from-log`: what an engine printed at start-up beside what kvplan predicts, term by term."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvplan.cli import render
from kvplan.cli.estimate_view import assumed, subject
from kvplan.cli.numbers import GIB, count, fixed
from kvplan.cli.options import VALUE_FLAGS, Flags, Target, make_flags, resolve_target
from kvplan.cli.render import Column, Format
from kvplan.errors import InputError
from kvplan.memory.capacity import Estimate, estimate
from kvplan.memory.startup_log import StartupLog, read_startup_log


@dataclass(frozen=True)
class Compared:
    """One printed figure and its prediction; None where the log or the estimate has none."""

    term: str
    unit: str
    printed: float | None
    predicted: float | None


def from_log(flags: Flags, path: Path, format: Format) -> bool:
    """Print the comparison; flags given by hand replace those of the log. True: the engine starts."""
    log = read_startup_log(path)
    merged = make_flags({**_usable(log), **flags.given})
    if merged.model is None and not merged.shape:
        raise InputError(f"--from-log {path} names no model; give MODEL.")
    target = resolve_target(merged)
    e = estimate(target.model, target.gpu, target.settings)
    rows = compare(log, e)
    if format is not Format.TABLE:
        render.emit(_as_json(e, target, log, rows), format)
    else:
        render.write(*_view(e, target, log, rows))
    return e.verdict.fits is not False


def _usable(log: StartupLog) -> dict[str, Any]:
    """The log's flags that kvplan has, and its total memory; words it does not know are an error by name."""
    values = dict(log.flags)
    if "total_gib" in log.figures:
        values["gpu_memory_gib"] = log.figures["total_gib"]
    for name, value in values.items():
        flag = VALUE_FLAGS.get(name)
        if flag is not None:
            flag.parse(str(value))
    return values


def compare(log: StartupLog, e: Estimate) -> list[Compared]:
    """Every figure that log or estimate has, in the order of the budget."""
    b, printed = e.budget, log.figures
    graphs = None if b is None else b.cuda_graphs.bytes + b.graphs_outside_bytes
    sizes = [
        ("weights", "weights_gib", None if b is None else b.weights.bytes),
        ("activation peak", "activation_gib", None if b is None else b.activation.bytes),
        ("non-torch", "non_torch_gib", None if b is None else b.non_torch.bytes),
        ("CUDA graphs", "cuda_graph_gib", graphs),
        ("KV pool", "available_kv_gib", e.available_kv_bytes),
    ]
    rows = [
        Compared(term, "GiB", printed.get(key), None if size is None else size / GIB)
        for term, key, size in sizes
    ]
    rows.append(Compared("blocks", "", printed.get("num_gpu_blocks"), e.num_gpu_blocks))
    rows.append(Compared("tokens", "", printed.get("kv_cache_tokens"), e.kv_cache_tokens))
    length = int(printed.get("max_concurrency_tokens", e.engine.max_model_len))
    requests = e.layout.max_concurrency(e.num_gpu_blocks, length)
    rows.append(Compared(f"requests of {length:,}", "", printed.get("max_concurrency"), requests))
    if "available_kv_gib" in printed:
        blocks = e.layout.num_blocks(round(printed["available_kv_gib"] * GIB))
        tokens = e.layout.cache_tokens(blocks)
        rows.append(Compared("tokens of that pool", "", printed.get("kv_cache_tokens"), tokens))
    return rows


def _view(e: Estimate, target: Target, log: StartupLog, rows: list[Compared]) -> list[str]:
    term = render.terminal()
    pool = next(row for row in rows if row.term == "KV pool")
    if pool.printed is None or pool.predicted is None or e.budget is None:
        figure = "the log prints no KV pool to compare"
    else:
        share = 100 * (pool.predicted - pool.printed) / (e.budget.budget_bytes / GIB)
        figure = f"KV pool {fixed(pool.printed)} GiB printed, {fixed(pool.predicted)} predicted: "
        figure += f"{abs(share):.2f} % of the budget off"
    columns = [
        Column("", "left"),
        Column("unit", "left"),
        Column("printed"),
        Column("predicted"),
        Column("difference"),
    ]
    body = [
        [row.term, row.unit, _number(row.printed, row), _number(row.predicted, row), _difference(row)]
        for row in rows
    ]
    given = ", ".join(f"{name} {value}" for name, value in log.flags.items())
    return [
        render.verdict("log", figure, None, term),
        "",
        subject(e),
        "",
        render.table(columns, body, term),
        "",
        render.wrap(f"From the log: {render.escape(given) or 'no flags'}", term.width),
        *assumed(e, target.notes, term),
    ]


def _number(value: float | None, row: Compared) -> str:
    if value is None:
        return "-"
    return fixed(value) if row.unit or row.term.startswith("requests") else count(value)


def _difference(row: Compared) -> str:
    if row.printed is None or row.predicted is None:
        return "-"
    off = row.predicted - row.printed
    digits = 2 if row.unit or row.term.startswith("requests") else 0
    return fixed(0, digits) if round(off, digits) == 0 else f"{off:+,.{digits}f}"


def _as_json(e: Estimate, target: Target, log: StartupLog, rows: list[Compared]) -> dict[str, Any]:
    return {
        "model": e.model.name,
        "gpu": e.gpu.name,
        "flags": dict(log.flags),
        "terms": [
            {"term": r.term, "unit": r.unit, "printed": r.printed, "predicted": r.predicted} for r in rows
        ],
        "assumptions": [*target.notes, *e.assumptions],
    }
