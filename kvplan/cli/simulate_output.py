"""What a simulation leaves behind: Parquet tables and pictures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvplan.cli import render
from kvplan.cli.render import Format

if TYPE_CHECKING:
    from kvplan.cli.options import Target
    from kvplan.cli.simulate import Case
    from kvplan.results.metrics import Slo
    from kvplan.trace.schema import Trace


def report(
    target: Target,
    cases: Sequence[Case],
    requests: Trace,
    assumptions: list[str],
    allocation: str,
    steps: bool,
    format: Format,
) -> None:
    """The result on stdout. ``steps``: times count steps."""
    from kvplan.cli.simulate_view import many_view, one_view

    if format is not Format.TABLE:
        rows = [{**case.summary, "assumptions": assumptions, "verdict": verdict_of(case)} for case in cases]
        render.emit(rows, format)
        return
    term = render.terminal()
    view = one_view if len(cases) == 1 else many_view
    render.write(*view(target, cases, requests, assumptions, allocation, steps, term))


def verdict_of(case: Case) -> dict[str, Any]:
    return {
        "meets": all(result.met for result in case.targets) if case.targets else None,
        "targets": [
            {"target": str(result.slo), "value_ms": result.value_s * 1e3, "met": result.met}
            for result in case.targets
        ],
    }


def write_run(
    output: Path,
    cases: Sequence[Case],
    requests: Trace,
    target: Target,
    assumptions: list[str],
    record: bool,
    quiet: bool,
) -> None:
    """One run: its tables in DIR. Several: the summary in DIR, the rest in DIR/block-N."""
    from kvplan.results.schema import make_table, summary_table
    from kvplan.results.store import run_metadata, write_tables
    from kvplan.sim.tables import decision_columns, request_columns, timeline_columns

    def tables(case: Case) -> dict[str, Any]:
        made = {
            "requests": make_table("requests", request_columns(case.run, requests)),
            "timeline": make_table("timeline", timeline_columns(case.run)),
        }
        if record:
            made["decisions"] = make_table("decisions", decision_columns(case.run))
        return made

    def metadata(case: Case) -> dict[str, Any]:
        settings = {
            "model": target.model.name,
            "gpu": target.gpu.name,
            **asdict(case.plan.engine.settings),
            **case.run.rules._asdict(),
            "assumptions": assumptions,
        }
        return run_metadata(sys.argv, settings, asdict(requests.provenance))

    rows = [{**case.summary, "verdict": verdict_of(case)} for case in cases]
    if len(cases) == 1:
        made = {"summary": summary_table(rows), **tables(cases[0])}
        write_tables(output, made, metadata(cases[0]))
        render.wrote(output, list(made), quiet)
        return
    write_tables(output, {"summary": summary_table(rows)}, metadata(cases[0]))
    for case in cases:
        folder = output / f"block-{case.run.rules.block_size}"
        write_tables(folder, tables(case), metadata(case))
    folders = ", ".join(f"block-{case.run.rules.block_size}" for case in cases)
    render.wrote(output, ["summary"], quiet)
    render.note(f"wrote the other tables of each size beside it: {folders}", quiet)


def plot_runs(path: Path, cases: Sequence[Case], requests: Trace, slos: tuple[Slo, ...], quiet: bool) -> None:
    """One picture a run; of several sizes each has the size in its name."""
    from kvplan.results import plots
    from kvplan.sim.tables import request_times, timeline_columns

    for case in cases:
        rules = case.run.rules
        several = f"-block-{rules.block_size}" if len(cases) > 1 else ""
        target = path.with_name(f"{path.stem}{several}{path.suffix}")
        plots.plot_run(
            target,
            timeline_columns(case.run),
            request_times(case.run),
            rules.block_size,
            f"{requests.provenance.source}, blocks of {rules.block_size}",
            slos,
            rules.max_num_seqs,
        )
        render.wrote(target, (), quiet)
