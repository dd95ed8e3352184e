"""kvplan validate: our error against public start-up logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer

from kvplan.cli import render
from kvplan.cli.numbers import count, fixed
from kvplan.cli.render import Column, Format, Terminal
from kvplan.memory.validate import Group, Outcome, check, log_rows, pool_errors, quantile, summarise

app = typer.Typer(add_completion=False, rich_markup_mode=None)

FEW = 5  # a percentile of fewer rows says little
MUCH = 5.0  # % of the budget


class By(StrEnum):
    """What rows are grouped by."""

    KIND = "kind"
    ENGINE_VERSION = "engine_version"
    GPU = "gpu"


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def validate_command(
    rows: Annotated[bool, typer.Option("--rows", help="Every log, printed beside predicted")] = False,
    by: Annotated[By, typer.Option(help="Group by kind, engine_version or gpu")] = By.KIND,
    format: Annotated[Format, typer.Option(help="table, json, csv or markdown")] = Format.TABLE,
) -> None:
    """Our error against public engine logs.

    Right: given the KV memory that a log prints, blocks and tokens (of a refused start: the memory needed)
    come out within the rounding of its last digit. The error of the KV pool itself is in % of the budget.
    """
    outcomes = [check(row) for row in log_rows()]
    groups = summarise(outcomes, by.value)
    if format is Format.JSON:
        render.emit(_as_json(outcomes, groups, by.value, rows), format)
    elif format is not Format.TABLE:
        render.emit([_row_json(o) for o in outcomes] if rows else [asdict(g) for g in groups], format)
    else:
        term = render.terminal()
        render.write(
            *_head(outcomes, term), *(_rows_view(outcomes, term) if rows else _view(groups, by, term))
        )
        if not rows:
            render.write(*_notes(outcomes, term))


def _head(outcomes: Sequence[Outcome], term: Terminal) -> list[str]:
    covered = [o for o in outcomes if o.right is not None]
    right = sum(bool(o.right) for o in covered)
    figure = "public start-up logs: blocks or tokens right within their rounding"
    return [render.verdict(f"{right} of {len(covered)}", figure, None, term), ""]


def _view(groups: Sequence[Group], by: By, term: Terminal) -> list[str]:
    columns = [
        Column("", "left", shrinks=True, min_width=14),
        Column("rows"),
        Column("right"),
        Column("KV pool: n"),
        Column("median %"),
        Column("p90 %"),
        Column("bias %"),
        Column("", "left"),
    ]
    shown = [group for group in groups if group.rows or group.pool_rows]
    body = [
        [
            render.escape(g.name),
            count(g.rows),
            count(g.right),
            count(g.pool_rows),
            fixed(g.median_percent),
            fixed(g.p90_percent) if g.pool_rows >= FEW else "-",
            f"{g.bias_percent:+.2f}" if g.bias_percent is not None else "-",
            _mark(g),
        ]
        for g in shown
    ]
    blocks = [render.table(columns, body, term)]
    rest = [group for group in groups if group not in shown]
    if rest and by is not By.KIND:
        names = ", ".join(f"{render.escape(g.name)} ({g.not_covered})" for g in rest)
        blocks.append(render.wrap(f"No row covered: {names}.", term.width))
    return [*blocks, ""]


def _mark(group: Group) -> str:
    if group.worst_percent is not None and group.worst_percent > MUCH:
        return f"over {MUCH:g}"
    return "few" if 0 < group.pool_rows < FEW else ""


def _notes(outcomes: Sequence[Outcome], term: Terminal) -> list[str]:
    lines = []
    for text, errors in (
        ("version and utilisation stated", pool_errors(outcomes)),
        ("max_num_seqs and max_num_batched_tokens too", pool_errors(outcomes, all_flags=True)),
    ):
        lines.append(
            f"KV pool, {text}: {len(errors)} rows, median {fixed(quantile(errors, 0.5))} %, "
            f"p90 {fixed(quantile(errors, 0.9))}, worst {fixed(errors[-1])}."
        )
    wrong = [f"{o.row.id} ({o.row.remark})" for o in outcomes if o.right is False]
    lines.append("Wrong: " + ("; ".join(wrong) or "none") + ".")
    reasons = Counter(o.row.not_covered for o in outcomes if o.right is None)
    parts = [f"{reason} ({n})" for reason, n in reasons.most_common()]
    lines.append(f"Not covered, {sum(reasons.values())} more: {'; '.join(parts)}.")
    lines.append(
        "Constants of the KV pool (not of the layout) were fitted on such logs, among them some of these."
    )
    lines.append("Every row: --rows. By version or GPU: --by engine_version, --by gpu.")
    return [render.wrap(render.escape(line), term.width) for line in lines]


def _rows_view(outcomes: Sequence[Outcome], term: Terminal) -> list[str]:
    columns = [
        Column("model", "left", shrinks=True, min_width=16),
        Column("engine", "left", optional=3),
        Column("GPU", "left", optional=2),
        Column("figure", "left"),
        Column("printed"),
        Column("predicted"),
        Column("", "left"),
        Column("pool %"),
        Column("source", "left", optional=1),
    ]
    body = []
    for o in outcomes:
        figure, printed, predicted = _figure(o)
        word = "-" if o.right is None else "right" if o.right else "wrong"
        error = f"{o.pool_error_percent:+.2f}" if o.pool_error_percent is not None else "-"
        model = (o.row.model or "not named").rsplit("/", 1)[-1]
        version = o.row.version_label.replace(", not stated", "")
        cells = [model, version, o.row.gpu or "-", figure, printed, predicted, word, error]
        cells.append(o.row.source.split(",")[0])
        body.append([render.escape(cell) for cell in cells])
    return [
        render.table(columns, body, term),
        "",
        "-: not covered. Reasons and sources: --format json --rows.",
    ]


def _figure(o: Outcome) -> tuple[str, str, str]:
    """(what, printed, predicted): tokens, else blocks, else the memory a refused start needed."""
    for name, word, digits in (
        ("kv_cache_tokens", "tokens", 0),
        ("num_gpu_blocks", "blocks", 0),
        ("needed_kv_gib", "need GiB", 2),
    ):
        if name in o.row.printed:
            predicted = o.predicted.get(name)
            return word, fixed(o.row.printed[name], digits), fixed(predicted, digits)
    return "-", "-", "-"


def _as_json(outcomes: Sequence[Outcome], groups: Sequence[Group], by: str, rows: bool) -> dict[str, Any]:
    covered = [o for o in outcomes if o.right is not None]
    result: dict[str, Any] = {
        "rows": len(covered),
        "right": sum(bool(o.right) for o in covered),
        "not_covered": len(outcomes) - len(covered),
        "by": by,
        "groups": [asdict(group) for group in groups],
        "kv_pool_error_percent": {
            name: {
                "rows": len(errors),
                "median": quantile(errors, 0.5),
                "p90": quantile(errors, 0.9),
                "worst": errors[-1],
            }
            for name, errors in (
                ("version_and_utilization_stated", pool_errors(outcomes)),
                ("all_flags_stated", pool_errors(outcomes, all_flags=True)),
            )
        },
    }
    if rows:
        result["results"] = [_row_json(o) for o in outcomes]
    return result


def _row_json(o: Outcome) -> dict[str, Any]:
    row = o.row
    return {
        "id": row.id,
        "kind": row.kind,
        "engine": row.engine,
        "engine_version": row.engine_version,
        "model": row.model,
        "gpu": row.gpu,
        "flags": dict(row.flags),
        "inferred": list(row.inferred),
        "printed": dict(row.printed),
        "predicted": dict(o.predicted),
        "right": o.right,
        "pool_error_percent": o.pool_error_percent,
        "reason": row.not_covered or row.remark,
        "source": row.source,
    }
