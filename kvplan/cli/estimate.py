"""kvplan estimate: does it fit, how many tokens and requests, and what to change."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from kvplan.cli import render
from kvplan.cli.estimate_refused import next_command, refused_view
from kvplan.cli.estimate_view import assumed, fits_view, verdict_line
from kvplan.cli.options import SWITCHES, VALUE_FLAGS, Flags, Target, resolve_target, shared_flags
from kvplan.cli.render import Format
from kvplan.errors import InputError
from kvplan.memory.capacity import Estimate, estimate
from kvplan.memory.fixes import Fix, find_fixes

app = typer.Typer(add_completion=False, rich_markup_mode=None)

MAX_SWEEP = 10_000


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
@shared_flags(model_argument=True)
def estimate_command(
    flags: Flags,
    input_len: Annotated[
        str | None, typer.Option(metavar="N", help="Input tokens of a typical request")
    ] = None,
    output_len: Annotated[str | None, typer.Option(metavar="N", help="Its output tokens")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Concurrency at its real lengths")
    ] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(metavar="FLAG=V1,V2", help="A row a value; repeatable")
    ] = None,
    log: Annotated[
        Path | None, typer.Option("--from-log", metavar="FILE", help="A start-up log beside the prediction")
    ] = None,
    emit: Annotated[
        str | None, typer.Option(metavar="vllm", help="The launch line; nothing where it does not fit")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Every figure with its formula")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE.parquet", help="Write a row a result")
    ] = None,
    format: Annotated[Format, typer.Option(help="table, json, csv or markdown")] = Format.TABLE,
    quiet: Annotated[bool, typer.Option("--quiet", help="No notes on stderr")] = False,
) -> None:
    """Does it fit, how many tokens and requests, and what to change.

    Bytes are per GPU. Exit code 1: it does not fit.
    """
    if emit is not None:
        if sweep or explain or log is not None or output is not None or format is not Format.TABLE:
            raise InputError(
                "--emit prints one launch line: it goes with MODEL, --gpu and engine flags only."
            )
        if not _emit(flags, emit, quiet):
            raise typer.Exit(1)
        return
    lengths, source = _lengths(input_len, output_len, trace)
    if log is not None:
        if sweep or explain or output is not None or lengths is not None:
            raise InputError("--from-log goes with MODEL, --gpu and engine flags only.")
        from kvplan.cli.estimate_log import from_log

        fits = from_log(flags, log, format)
    elif sweep:
        if explain:
            raise InputError("--explain and --sweep: a sweep has no single answer to explain; use one.")
        fits = _sweep(flags, sweep, lengths, source, format, output, quiet)
    else:
        fits = _single(flags, lengths, source, explain, format, output, quiet)
    if not fits:
        raise typer.Exit(1)


def _single(
    flags: Flags,
    lengths: Sequence[int] | None,
    source: str,
    explain: bool,
    format: Format,
    output: Path | None,
    quiet: bool,
) -> bool:
    target = resolve_target(flags)
    e = estimate(target.model, target.gpu, target.settings, lengths, source)
    refused = e.verdict.fits is False
    enough, short = find_fixes(e) if refused else ([], [])
    result = as_json(e, target, [*enough, *short])
    if output is not None:
        _write_parquet(output, [result], quiet)
    if format is not Format.TABLE:
        render.emit(result, format)
        return not refused
    term = render.terminal()
    blocks = [verdict_line(e, term)]
    if explain:
        from kvplan.cli.estimate_explain import explained

        blocks += ["", *explained(e, term)]
    else:
        blocks += ["", *(refused_view(e, enough, short, term) if refused else fits_view(e, term))]
    blocks += assumed(e, target.notes, term)
    following = next_command(_words(flags), enough) if refused else None
    render.write(*blocks, *([following] if following else []))
    return not refused


def _emit(flags: Flags, engine: str, quiet: bool) -> bool:
    """The launch line on stdout, the verdict on stderr; no line where the engine would not start."""
    from kvplan.cli.estimate_emit import launch_line

    if engine != "vllm":
        raise InputError(f"--emit {engine!r}: only vllm; no other engine's flags by version are known here.")
    target = resolve_target(flags)
    e = estimate(target.model, target.gpu, target.settings)
    line = launch_line(e, target, flags)
    render.note(verdict_line(e, render.terminal(sys.stderr)), quiet)
    if e.verdict.fits is False:
        return False
    render.write(line)
    return True


def _words(flags: Flags) -> list[str]:
    """The arguments that were given, to be repeated in a suggestion."""
    words: list[str] = []
    for name, value in flags.given.items():
        if name == "model":
            words.append(str(value))
        elif name in SWITCHES:
            option = SWITCHES[name].option
            words.append(option if value else f"--no-{option[2:]}")
        else:
            flag = VALUE_FLAGS[name]
            words += [flag.short or flag.option, str(value)]
    return words


def _lengths(
    input_len: str | None, output_len: str | None, trace: Path | None
) -> tuple[Sequence[int] | None, str]:
    """(tokens of each request or None, what they come from)."""
    given = [
        (name, _whole(name, text))
        for name, text in (("--input-len", input_len), ("--output-len", output_len))
        if text is not None
    ]
    if trace is not None:
        if given:
            raise InputError(f"--trace and {given[0][0]} both give the lengths: use one.")
        from kvplan.trace.readers import read_trace

        found = read_trace(str(trace))
        if not len(found):
            raise InputError(f"--trace {trace} has no request.")
        return (found.input_tokens + found.output_tokens).tolist(), str(trace)
    if not given:
        return None, ""
    total = sum(tokens for _, tokens in given)
    return [total], f"{total:,} tokens"


def _whole(name: str, text: str) -> int:
    from kvplan.cli.options import MAX_TOKENS, Flag

    return int(Flag(name[2:].replace("-", "_"), int, "", high=MAX_TOKENS).parse(text))


# ---- sweep ------------------------------------------------------------------------------------------


def _sweep(
    flags: Flags,
    sweep: Sequence[str],
    lengths: Sequence[int] | None,
    source: str,
    format: Format,
    output: Path | None,
    quiet: bool,
) -> bool:
    axes = [_axis(text) for text in sweep]
    names = [name for name, _ in axes]
    if len(set(names)) < len(names):
        raise InputError("--sweep names the same flag twice; give all its values at once.")
    cells = list(product(*(values for _, values in axes)))
    if len(cells) > MAX_SWEEP:
        raise InputError(f"--sweep has {len(cells):,} cells; at most {MAX_SWEEP:,}.")
    rows: list[tuple[dict[str, Any], Estimate | None, str]] = []
    results: list[dict[str, Any]] = []
    for values in cells:
        changed = dict(zip(names, values, strict=True))
        target = resolve_target(flags.with_values(changed))
        try:
            e: Estimate | None = estimate(target.model, target.gpu, target.settings, lengths, source)
            reason = ""
        except InputError as error:  # a cell that the engine refuses is a row, not the end
            e, reason = None, str(error).splitlines()[0]
        rows.append((changed, e, reason))
        results.append({**changed, **(as_json(e, target, []) if e else _refused_json(target, reason))})
    if output is not None:
        _write_parquet(output, results, quiet)
    if format is not Format.TABLE:
        render.emit(results, format)
    else:
        from kvplan.cli.estimate_sweep import sweep_view

        render.write(*sweep_view(rows, render.terminal()))
    return any(e is not None and e.verdict.fits for _, e, _ in rows)


def _axis(text: str) -> tuple[str, list[Any]]:
    """('tensor_parallel_size', [1, 2]) of 'tensor-parallel-size=1,2' or 'tp=1,2'."""
    name, equals, values = text.partition("=")
    key = name.strip().lstrip("-").replace("-", "_")
    key = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size"}.get(
        key, key
    )
    if not equals or not values.strip():
        raise InputError(f"--sweep {text!r} must look like FLAG=V1,V2, e.g. tensor-parallel-size=1,2,4.")
    words = [word.strip() for word in values.split(",") if word.strip()]
    if key == "model":
        return key, words
    if key in SWITCHES:
        known = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
        wrong = [word for word in words if word.lower() not in known]
        if wrong:
            raise InputError(f"--sweep {name}: {wrong[0]!r} must be on or off.")
        return key, [known[word.lower()] for word in words]
    if key not in VALUE_FLAGS:
        import difflib

        near = difflib.get_close_matches(key, [*VALUE_FLAGS, *SWITCHES], n=2)
        hint = f"  Nearest: {', '.join(n.replace('_', '-') for n in near)}." if near else ""
        raise InputError(f"--sweep: {name!r} is not an engine flag.\n{hint}".rstrip())
    return key, [VALUE_FLAGS[key].parse(word) for word in words]


# ---- machine formats --------------------------------------------------------------------------------


def as_json(e: Estimate, target: Target, fixes: Sequence[Fix]) -> dict[str, Any]:
    """The object of CLI.md; bytes per rank, of the rank that decides."""
    engine, layout, budget = e.engine, e.layout, e.budget
    length = engine.max_model_len
    settings = {f.name: getattr(engine.settings, f.name) for f in fields(engine.settings)}
    resolved = {f.name: getattr(engine, f.name) for f in fields(engine) if f.name in settings}
    flags = {**settings, **resolved}
    known = e.verdict.fits is not None
    return {
        "model": e.model.name,
        "resolved_from": target.resolved_from,
        "gpu": e.gpu.name,
        "engine": {
            "name": flags.pop("engine"),
            "version": flags.pop("engine_version"),
            **flags,
            "block_size": layout.block_size,
            "hybrid_kv_cache_manager": engine.hybrid_kv_cache_manager,
        },
        "kv": {
            "bytes_per_token": layout.bytes_per_token,
            "fixed_bytes_per_request": layout.fixed_bytes_per_request,
            "block_size": layout.block_size,
            "bytes_per_block": layout.bytes_per_block,
            "groups": [
                {
                    "kind": group.kind.value,
                    "layers": group.layers,
                    "block_size": group.block_size,
                    "page_bytes": group.page_bytes,
                    "blocks_per_request_at_max_len": group.admitted_blocks(length, layout.in_flight_tokens),
                }
                for group in layout.groups
            ],
        },
        "memory": {
            "total_bytes": e.gpu.total_bytes,
            "budget_bytes": budget.budget_bytes if budget else None,
            "weights_bytes": budget.weights.bytes if budget else None,
            "activation_bytes": budget.activation.bytes if budget else None,
            "non_torch_bytes": budget.non_torch.bytes if budget else None,
            "cuda_graph_bytes": budget.cuda_graphs.bytes if budget else None,
            "available_kv_bytes": e.available_kv_bytes if known else None,
            "band_bytes": budget.band_bytes if budget else None,
        },
        "capacity": {
            "num_gpu_blocks": e.num_gpu_blocks if known else None,
            "kv_cache_tokens": e.kv_cache_tokens if known else None,
            "max_concurrency": e.max_concurrency if known else None,
            "max_model_len": length,
            "needed_bytes_one_request": e.needed_bytes_one_request,
            "estimated_max_model_len": e.estimated_max_model_len if known else None,
        },
        "workload": _workload_json(e),
        "verdict": {
            "fits": e.verdict.fits,
            "reason": e.verdict.reason,
            "fixes": [
                {
                    "change": fix.label,
                    "gains_bytes": fix.gains_bytes,
                    "fits": fix.fits,
                    "gpus": fix.gpus,
                    "alters_answers": fix.alters_answers,
                }
                for fix in fixes
            ],
        },
        "assumptions": [*target.notes, *e.assumptions],
        "sources": _sources(e),
    }


def _workload_json(e: Estimate) -> dict[str, Any] | None:
    w = e.workload
    if w is None:
        return None
    return {
        "source": w.source,
        "requests": w.requests,
        "mean_tokens": w.mean_tokens,
        "mean_blocks": w.mean_blocks,
        "concurrency": w.concurrency,
        "concurrency_p5": w.low,
        "concurrency_p95": w.high,
        "longer_than_max_model_len": w.too_long,
    }


def _sources(e: Estimate) -> dict[str, str]:
    sources = {"model": e.model.source, "gpu": e.gpu.source}
    if e.budget is not None:
        sources["weights"] = f"{e.budget.weights.source}: {e.budget.weights.formula}"
        for name in ("activation", "non_torch", "cuda_graphs"):
            term = getattr(e.budget, name)
            sources[name] = f"{term.source}: {term.why}"
    return sources


def _refused_json(target: Target, reason: str) -> dict[str, Any]:
    return {
        "model": target.model.name,
        "resolved_from": target.resolved_from,
        "gpu": target.gpu.name,
        "verdict": {"fits": False, "reason": reason, "fixes": []},
    }


def _write_parquet(path: Path, results: Sequence[Mapping[str, Any]], quiet: bool) -> None:
    """One row a result, nested objects as columns; the file appears whole or not at all."""
    if path.suffix != ".parquet":
        raise InputError(f"-o {path} must end in .parquet; an estimate writes one file.")
    import json

    import pyarrow as pa

    from kvplan.results.store import run_metadata, write_file

    rows = [render._flatten(render._plain(result)) for result in results]
    heads = list(dict.fromkeys(head for row in rows for head in row))
    columns = {}
    for head in heads:
        values = [row.get(head) for row in rows]
        plain = [json.dumps(v) if isinstance(v, list) else v for v in values]
        mixed = len({type(v) for v in plain if v is not None} - {int, float}) > 1
        columns[head] = [None if v is None else str(v) for v in plain] if mixed else plain
    metadata = run_metadata(["kvplan", *sys.argv[1:]], {}, device="none (estimate)")
    write_file(path, pa.table(columns), metadata)
    render.wrote(path, quiet=quiet)
