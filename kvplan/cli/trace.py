"""kvplan trace: inspect, convert or generate request traces."""

from __future__ import annotations

import gzip
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvplan.cli import render
from kvplan.cli.options import Flag
from kvplan.cli.render import Column, Format, Terminal
from kvplan.errors import InputError

if TYPE_CHECKING:
    from kvplan.trace.schema import Trace

HELP_FLAGS = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, context_settings=HELP_FLAGS
)

TraceArgument = Annotated[str, typer.Argument(metavar="TRACE", help="Trace file, .gz too; - is stdin")]
TraceFormat = Annotated[
    str | None, typer.Option("--trace-format", metavar="NAME", help="Reader to use [recognised by content]")
]
RequestRate = Annotated[
    str | None,
    typer.Option("--request-rate", metavar="R", help="Draw arrivals: R a second, Poisson; inf = at once"),
]
Burstiness = Annotated[
    str, typer.Option("--burstiness", metavar="G", help="Shape of the gaps; 1 = Poisson, below 1 burstier")
]
Seed = Annotated[str, typer.Option("--seed", metavar="N", help="Of all that is drawn")]
Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FILE", help="Write here, gzipped if it ends in .gz [stdout]"),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No notes on stderr")]
SHOWN_PROBLEMS = 20


@app.callback()
def _root() -> None:
    """Inspect, convert or generate request traces."""


@app.command("inspect", context_settings=HELP_FLAGS)
def inspect_command(
    trace: TraceArgument,
    trace_format: TraceFormat = None,
    format: Annotated[Format, typer.Option(help="table, json, csv or markdown")] = Format.TABLE,
) -> None:
    """What a trace is: lengths, arrivals, sharing, and what is odd. Lists every bad row of a bad file.

    Exit code 2: some rows are bad.
    """
    from kvplan.trace.profile import profile
    from kvplan.trace.readers import MAX_PROBLEMS, read_trace

    problems: list[str] = []
    read = read_trace(trace, trace_format, problems)
    facts: dict[str, Any] = profile(read) if len(read) else {"source": read.provenance.source, "requests": 0}
    if format != Format.TABLE:
        render.emit(facts | {"bad_rows": problems}, format)
    elif len(read):
        render.write(*inspect_view(facts, render.terminal()))
    if problems:
        more = "at least " if len(problems) >= MAX_PROBLEMS else ""
        lines = [f"  {problem}" for problem in problems]
        if sys.stderr.isatty() and len(lines) > SHOWN_PROBLEMS:
            lines = [
                *lines[:SHOWN_PROBLEMS],
                f"  and {len(problems) - SHOWN_PROBLEMS} more: pipe stderr to see all",
            ]
        rows = "row is" if len(problems) == 1 else "rows are"
        raise InputError(
            "\n".join([f"{more}{len(problems):,} {rows} bad; good ones: {len(read):,}.", *lines])
        )


@app.command("convert", context_settings=HELP_FLAGS)
def convert_command(
    trace: TraceArgument,
    output: Output = None,
    trace_format: TraceFormat = None,
    request_rate: RequestRate = None,
    burstiness: Burstiness = "1",
    seed: Seed = "0",
    speed_up: Annotated[
        str, typer.Option("--speed-up", metavar="X", help="Divide the trace's times by X")
    ] = "1",
    quiet: Quiet = False,
) -> None:
    """Write any known trace as our JSONL, a superset of Mooncake's."""
    from dataclasses import replace

    from kvplan.trace import generate
    from kvplan.trace.readers import read_trace

    read = read_trace(trace, trace_format)
    for line in read.notes:
        render.note(f"note: {line}", quiet)
    rate = _rate(request_rate)
    if rate is not None:
        read = generate.with_arrivals(read, rate, _number("burstiness", burstiness, 1e-3, 1e6), _seed(seed))
        # Times that were drawn make it a constructed load, whatever its lengths are.
        read = replace(read, provenance=replace(read.provenance, kind="constructed"))
    factor = _number("speed_up", speed_up, 1e-9, 1e9)
    _write(generate.speed_up(read, factor) if factor != 1.0 else read, output, quiet)


@app.command("generate", context_settings=HELP_FLAGS)
def generate_command(
    output: Output = None,
    random_input_len: Annotated[str, typer.Option(metavar="N", help="Input tokens")] = "1024",
    random_output_len: Annotated[str, typer.Option(metavar="N", help="Output tokens")] = "128",
    num_prompts: Annotated[str, typer.Option(metavar="N", help="Requests")] = "1000",
    random_range_ratio: Annotated[
        str | None, typer.Option(metavar="R", help="Lengths uniform in [L(1-R), L(1+R)]")
    ] = None,
    random_len_range: Annotated[
        str | None, typer.Option(metavar="LO,HI", help="Lengths uniform in [LO L, HI L]")
    ] = None,
    request_rate: RequestRate = "4",
    burstiness: Burstiness = "1",
    seed: Seed = "0",
    quiet: Quiet = False,
) -> None:
    """Construct requests: lengths and arrivals drawn as vllm bench does, marked with the seed."""
    from kvplan.trace.generate import random_trace

    if random_range_ratio is not None and random_len_range is not None:
        raise InputError("--random-range-ratio and --random-len-range both set the lengths: use one.")
    made = random_trace(
        int(_number("num_prompts", num_prompts, 1, 100_000_000, int)),
        int(_number("random_input_len", random_input_len, 1, 1 << 28, int)),
        int(_number("random_output_len", random_output_len, 1, 1 << 28, int)),
        seed=_seed(seed),
        range_ratio=_number("random_range_ratio", random_range_ratio or "0", 0.0, 1.0),
        len_range=_len_range(random_len_range),
        request_rate=_rate(request_rate),
        burstiness=_number("burstiness", burstiness, 1e-3, 1e6),
    )
    _write(made, output, quiet)


# ---- flags ------------------------------------------------------------------------------------------


def _number(name: str, text: str, low: float, high: float, kind: type = float) -> float:
    return Flag(name, kind, "", low=low, high=high).parse(text)


def _seed(text: str) -> int:
    return int(_number("seed", text, 0, 2**53, int))


def _rate(text: str | None) -> float | None:
    if text is None:
        return None
    return float("inf") if text.strip().lower() == "inf" else _number("request_rate", text, 1e-9, 1e9)


def _len_range(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        low = high = float("nan")
    if not 0 <= low <= high <= 1e6:
        raise InputError(f"--random-len-range is {text}; must be LO,HI such as 0.8,1.")
    return low, high


# ---- output -----------------------------------------------------------------------------------------


def _write(trace: Trace, output: Path | None, quiet: bool) -> None:
    from kvplan.trace.write import native_lines

    lines: Iterable[str] = native_lines(trace)
    if output is None:
        sys.stdout.writelines(lines)
        return
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        with _create(partial, output.suffix == ".gz") as stream:
            stream.writelines(lines)
        os.replace(partial, output)
    except OSError as error:
        raise InputError(f"-o {output} cannot be written: {error.strerror or error}.") from None
    finally:
        partial.unlink(missing_ok=True)
    render.wrote(output, (), quiet)


def _create(path: Path, zipped: bool) -> Any:
    # No time stamp in the gzip header, so that equal traces are equal files.
    if zipped:
        import io

        return io.TextIOWrapper(gzip.GzipFile(path, "wb", mtime=0), encoding="utf-8", newline="\n")
    return path.open("w", encoding="utf-8", newline="\n")


# ---- inspect ----------------------------------------------------------------------------------------


def inspect_view(facts: dict[str, Any], term: Terminal) -> list[str]:
    """Lines for one trace: the verdict, lengths, arrivals, sharing, utilisation, oddities."""
    from kvplan.trace.readers import FORMATS

    known = FORMATS.get(facts["format"])
    title = known.title if known else facts["format"]
    if facts["format"] == "native" and not facts["id_tokens"]:
        title = "native JSONL"
    arrivals, sharing = facts["arrivals"], facts["sharing"]
    span = f" in {duration(arrivals['span_s'])}" if arrivals and arrivals["span_s"] else ""
    ids = f", ids of {render.count(facts['id_tokens'])} tokens" if facts["id_tokens"] else ""
    number = "1 request" if facts["requests"] == 1 else f"{render.count(facts['requests'])} requests"
    lines = [render.verdict(facts["kind"], f"{number}{span}, {title}{ids}", None, term), ""]
    statistics = ("mean", "p50", "p90", "p99", "max", "total")
    rows = [
        [name, *(render.count(facts[f"{name}_tokens"][key]) for key in statistics)]
        for name in ("input", "output")
    ]
    lines += [render.table([Column("tokens", "left"), *(Column(key) for key in statistics)], rows, term), ""]
    if arrivals:
        lines += _labelled("arrivals", arrival_text(arrivals, term))
    else:
        lines += _labelled("arrivals", "no times: simulate needs --request-rate R or --max-concurrency C")
    if facts["sessions"]:
        lines += _labelled("sessions", f"{render.count(facts['sessions'])}")
    if facts["tenants"] > 1:
        lines += _labelled("tenants", f"{render.count(facts['tenants'])}")
    if sharing:
        lines += _labelled("sharing", *sharing_text(sharing, bool(facts["id_tokens"])))
    elif facts["id_tokens"] == 0:
        lines += _labelled("sharing", "unknown: the trace says nothing of content")
    shown = [
        f"{size} = {facts['utilization'][size]:.5f}"
        for size in ("16", "64", "256")
        if facts["utilization"][size]
    ]
    if shown:
        lines += _labelled("blocks", f"U at {', '.join(shown)}")
    odd = [render.wrap(f"  {render.escape(line)}", term.width, "    ") for line in facts["odd"]]
    lines += ["", "Odd, kept as they are" if facts["odd"] else "Nothing odd", *odd]
    seed = "" if facts["seed"] is None else f"seed {facts['seed']}, "
    return [*lines, f"  {seed}sha256 {facts['sha256'][:12]}..."]


def _labelled(label: str, *lines: str) -> list[str]:
    return [f"  {label if k == 0 else '':<10}  {line}" for k, line in enumerate(lines)]


def arrival_text(arrivals: dict[str, Any], term: Terminal) -> str:
    if not arrivals["span_s"]:
        return "all at once"
    text = f"{arrivals['rate']:.2f} req/s"
    if arrivals["busiest_minute_rate"] is not None:
        text += f", busiest minute {arrivals['busiest_minute_rate']:.2f}"
    width = min(30, term.width - len(text) - 18)
    return f"{text}   {render.sparkline(arrivals['course'], term, width)}" if width >= 8 else text


def sharing_text(sharing: dict[str, Any], by_id: bool) -> list[str]:
    size = "" if by_id else f" of {sharing['block_tokens']} tokens"
    lines = [f"{100 * sharing['unlimited']:.1f} % of blocks{size} seen before (cache without limit)"]
    shown = [f"{int(blocks) // 1000}k {100 * share:.1f} %" for blocks, share in sharing["lru"].items()]
    if shown:
        first, *rest = shown
        head, value = first.split(" ", 1)
        lines.append(", ".join([f"LRU of {head} blocks {value}", *rest]))
    return lines


def duration(seconds: float) -> str:
    """Two units, the larger one first: 58 min 57 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for name, size, smaller, unit in (
        ("d", 86_400, "h", 3_600),
        ("h", 3_600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if whole >= size:
            return f"{whole // size:,} {name} {whole % size // unit} {smaller}"
    return f"{whole} s"
