"""kvplan calibrate: fit the modelled clock to one machine from a bench result."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvplan.cli import render
from kvplan.cli.options import Flags, resolve_target, shared_flags
from kvplan.cli.render import Format
from kvplan.errors import InputError

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
@shared_flags()
def calibrate_command(
    flags: Flags,
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="vllm bench serve JSON, or a results folder of ours"),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="CAL", help="Where the factors go, for --calibration"),
    ] = None,
    fit: Annotated[
        str, typer.Option(metavar="NAME,...", help="Factors: time, bus, kv, flops, small, weights")
    ] = "time",
    format: Annotated[Format, typer.Option(help="table, json, csv or markdown")] = Format.TABLE,
    quiet: Annotated[bool, typer.Option("--quiet", help="No notes on stderr")] = False,
) -> None:
    """Fit one to six factors of the modelled clock so that simulated latencies meet measured ones.

    The model, GPU and engine flags must be those of the measured run. One factor serves one machine and load;
    two or more need runs at several loads (--fit time,kv).
    """
    from kvplan.memory.capacity import pool_for
    from kvplan.sim.calibrate import fit_runs, save
    from kvplan.sim.measured import read_measured
    from kvplan.sim.rules import rules_for
    from kvplan.sim.steptime import clock_for

    names = tuple(name.strip() for name in fit.split(",") if name.strip())
    if not names:
        raise InputError("--fit names no factor; use for example --fit time.")
    target = resolve_target(flags)
    plan = pool_for(target.model, target.gpu, target.settings)
    if plan.verdict.fits is False and target.settings.num_gpu_blocks_override is None:
        raise InputError(f"{target.model.name} does not start with these flags: {plan.verdict.reason}")
    engine = plan.engine
    settings = engine.filled
    runs = []
    for file in files:
        measured = read_measured(file)
        rules = rules_for(
            engine, plan.num_gpu_blocks, plan.block_size, max_concurrency=measured.max_concurrency
        )
        runs.append((measured, rules))
    result = fit_runs(runs, lambda c: clock_for(target.model, target.gpu, settings, c), names)
    if output is not None:
        about = {"model": target.model.name, "gpu": target.gpu.name, "files": [str(file) for file in files]}
        save(output, result, about)
        render.note(f"wrote {output}", quiet)
    row: dict[str, Any] = {
        **{name: getattr(result.calibration, name) for name in names},
        **{k: v for k, v in asdict(result).items() if k != "calibration"},
    }
    if format is not Format.TABLE:
        render.emit([row], format)
        return
    factors = "  ".join(f"{name} x {getattr(result.calibration, name):.3f}" for name in names)
    render.write(
        f"CALIBRATED  {factors}",
        f"error of TTFT and TPOT (median, mean, p90): {result.before:.1%} before, {result.after:.1%} after",
        f"on the last third, not used: {result.held_out_before:.1%} before, {result.held_out:.1%} after",
    )
