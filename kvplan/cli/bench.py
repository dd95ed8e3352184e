"""``kvplan bench``: parse, run the kernel suite, show. Torch is imported only once a run begins."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvplan.cli import render
from kvplan.errors import InputError

app = typer.Typer(rich_markup_mode=None)

HELP = """\
Measure paged attention on this machine, beside contiguous attention and the memory's own speed.

Without a GPU the run says so on its first line and in every file. No cell gets a number before its output
equals a float64 reference. Exit code 1: a result of ours was wrong.
"""


@app.command(help=HELP)
def bench(
    block_size: Annotated[
        list[int] | None, typer.Option("--block-size", help="Tokens a block; repeatable.", metavar="TOKENS")
    ] = None,
    suite: Annotated[
        str, typer.Option(help="kernel: paged decode, a cell a row.", metavar="kernel")
    ] = "kernel",
    device: Annotated[str, typer.Option(help="Where to run.", metavar="auto|cuda|cpu")] = "auto",
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="triton, triton plan (skewed lengths), numba, reference, flashinfer or flash-attn; "
            "repeatable. Default: ours for the device and each peer that is installed.",
            metavar="NAME",
        ),
    ] = None,
    preset: Annotated[
        str,
        typer.Option(help="How many cells; a flag below replaces its axis.", metavar="quick|standard|full"),
    ] = "quick",
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Sequences a step; repeatable.", metavar="N")
    ] = None,
    context_len: Annotated[
        list[int] | None,
        typer.Option(help="Tokens a sequence has in the cache; repeatable.", metavar="TOKENS"),
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads.", metavar="N")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads.", metavar="N")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Numbers a head.", metavar="N")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Type of the queries.", metavar="bfloat16|float16|float32")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="Type that KV is stored in.", metavar="auto|bfloat16|fp8|...")
    ] = None,
    table: Annotated[
        str | None, typer.Option(help="Order of blocks in the pool.", metavar="random|contiguous")
    ] = None,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Also the GPU kernel with one tuning changed at a time.")
    ] = False,
    max_seconds: Annotated[
        float | None, typer.Option(help="Begin no further cell after this long.", metavar="S")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write kernel.parquet and summary.parquet.", metavar="DIR"),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw share of the ceiling by block size.", metavar="FILE")
    ] = None,
    format: Annotated[
        render.Format, typer.Option(help="How to print.", metavar="table|json|csv|markdown")
    ] = render.Format.TABLE,
    quiet: Annotated[bool, typer.Option("--quiet", help="No notes or progress on stderr.")] = False,
) -> int:
    if suite != "kernel":
        raise InputError(f"--suite is {suite!r}; this version has the suite kernel.")
    if max_seconds is not None and not max_seconds > 0:
        raise InputError(f"--max-seconds is {max_seconds}; must be more than 0.")
    if output is not None and output.exists() and not output.is_dir():
        raise InputError(f"-o {output} is a file; name a directory.")
    if plot is not None:
        from kvplan.results.plots import check_plot_path

        check_plot_path(plot)

    from kvplan.bench.cells import make_sweep
    from kvplan.bench.cells import preset as preset_sweep
    from kvplan.bench.device import detect

    where = detect(device)
    sweep = make_sweep(
        preset_sweep(preset, where.kind),
        block_sizes=block_size or (),
        batch_sizes=batch_size or (),
        context_lens=context_len or (),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        table=table,
    )
    from kvplan.bench import backends, ceilings, kernel

    chosen = backends.choose(backend or [], where.kind)
    chosen += backends.variants(where.kind) if ablate else []
    before = ceilings.measure_ceilings(where)
    with render.Progress("bench", 0, "cells", quiet) as progress:

        def show(done: int, total: int, text: str) -> None:
            progress.total = total
            progress.update(done, text)

        result = kernel.run_suite(sweep, where, chosen, max_seconds=max_seconds, progress=show)
    measured = ceilings.higher(before, ceilings.measure_ceilings(where))
    kernel.add_shares(result.rows, measured)

    if format == render.Format.TABLE:
        from kvplan.cli.bench_view import bench_text

        render.write(bench_text(result.rows, where, measured, render.terminal()))
    elif format == render.Format.JSON:
        found = {
            "device": where.as_dict(),
            "ceilings": measured.as_dict(),
            "kernel": result.rows,
            "serve": [],
            "checks": result.checks,
        }
        render.emit(found, format)
    else:
        render.emit(result.rows, format)
    settings = {
        "suite": suite,
        "preset": preset,
        "block_sizes": list(sweep.block_sizes),
        "setups": [shape.text for shape in sweep.shapes],
        "backends": [each.name for each in chosen],
        "ceilings": measured.as_dict(),
    }
    if output is not None:
        _write(output, result.rows, measured, where, settings, quiet)
    if plot is not None:
        from kvplan.bench.plots import plot_kernel

        render.wrote(plot_kernel(plot, result.rows, where), quiet=quiet)
    return 1 if result.wrong else 0


def _write(
    output: Path, rows: list[dict[str, Any]], measured: Any, where: Any, settings: dict[str, Any], quiet: bool
) -> None:
    from kvplan.bench.summary import summary_rows, typed
    from kvplan.results.store import run_metadata, write_tables

    metadata = run_metadata(
        shlex.join(["kvplan", *sys.argv[1:]]),
        settings,
        provenance={"kind": "constructed", "seed": 0},
        device=where.described,
    )
    metadata["device_details"] = where.as_dict()
    tables = {"kernel": typed(rows), "summary": typed(summary_rows(rows, measured, where))}
    write_tables(output, tables, metadata)
    render.wrote(output, list(tables), quiet)
