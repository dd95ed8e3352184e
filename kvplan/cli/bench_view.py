"""How a bench looks: the label or the answer first, then the table that proves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from kvplan.bench.ceilings import Ceilings
from kvplan.bench.cells import SHORT_NAMES
from kvplan.bench.device import Device
from kvplan.bench.summary import shares_by_block_size
from kvplan.cli import render
from kvplan.cli.numbers import byte_size, count, fixed
from kvplan.cli.render import Column, Terminal, escape

MAX_FULL_SETUPS = 3  # more set-ups than this get a line each instead of a table each
Row = Mapping[str, Any]


def bench_text(rows: Sequence[Row], device: Device, ceilings: Ceilings, term: Terminal) -> str:
    """The whole output for a person."""
    setups = [list(group) for _, group in groupby(rows, key=lambda row: row["setup"])]
    lines = [*first_lines(rows, device, term), "", *_head(setups, device, ceilings, term), ""]
    if len(setups) > MAX_FULL_SETUPS:
        lines += [_shares_table(setups, term), ""]
    else:
        for setup in setups:
            if len(setups) > 1:
                lines += [render.wrap(setup[0]["setup"], term.width)]
            lines += [_setup_table(setup, device, term), ""]
    lines += _notes(rows, device, term)
    return "\n".join(lines)


def first_lines(rows: Sequence[Row], device: Device, term: Terminal) -> list[str]:
    """The answer. On a CPU it is that these are CPU figures; a wrong result comes before any share."""
    lines = []
    own = next((row["backend"] for row in rows if row["role"] == "kernel"), "no")
    if device.kind == "cpu":
        cores = f"{device.cores} core{'s' if device.cores != 1 else ''}"
        figure = f"not a GPU figure: {own} kernel, {cores}, {device.why}"
        lines.append(render.verdict("CPU run", figure, None, term))
    failed, raised = (
        sum(row["status"] == status and row["role"] != "peer" for row in rows)
        for status in ("failed", "error")
    )
    if failed:
        found = f"{_cells(failed)} no number: the check before timing failed"
        lines.append(render.verdict("Wrong result", found, False, term))
    elif raised:
        found = f"{_cells(raised)} no number: the kernel stopped with an error"
        lines.append(render.verdict("Kernel failed", found, False, term))
    elif device.kind != "cpu":
        lines.append(_answer(rows, term))
    return lines


def _cells(number: int) -> str:
    return "1 cell has" if number == 1 else f"{number} cells have"


def _answer(rows: Sequence[Row], term: Terminal) -> str:
    found = shares_by_block_size(rows)
    if found is None:
        return render.verdict("No figure", "no set-up was measured at every block size", False, term)
    best = " or ".join(str(block) for block in found.best[:3])
    if len(found.best) > 3:
        best = f"{found.best[0]} to {found.best[-1]}"
    figure = f"{_percent(max(found.shares.values()))} of the read ceiling"
    if found.setups > 1:
        figure += f", median of {found.setups}"
    others = [block for block in found.shares if block not in found.best]
    if others:
        worst = min(others, key=lambda block: found.shares[block])
        figure += f"; block size {worst}: {_percent(found.shares[worst])}"
    return render.verdict(f"block size {best}", figure, True, term)


def _head(setups: list[list[Row]], device: Device, ceilings: Ceilings, term: Terminal) -> list[str]:
    """What was measured against what."""
    alone = setups[0][0]["setup"] if len(setups) == 1 else f"{len(setups)} set-ups"
    if device.kind == "cpu":
        setup = alone.removesuffix(f", {setups[0][0]['table']} table") if len(setups) == 1 else alone
        read = f"Read ceiling {fixed(ceilings.read_gb_per_s, 1)} GB/s, measured now."
        return [render.wrap(f"{read} {setup}.", term.width)]
    timings = sorted({row["timing"] for setup in setups for row in setup if row["timing"]})
    rates = f"read {count(ceilings.read_gb_per_s)}, copy {count(ceilings.copy_gb_per_s)} GB/s"
    triton = device.versions.get("triton", "absent")
    first = f"{escape(device.name)}, Triton {triton}. Ceilings measured now: {rates}."
    second = f"{alone}{', ' if timings else ''}{', '.join(timings)}."
    return [render.wrap(first, term.width), render.wrap(second, term.width)]


def _setup_table(rows: Sequence[Row], device: Device, term: Terminal) -> str:
    cpu = device.kind == "cpu"
    columns = [
        Column("block", align="left"),
        *([Column("table", align="left", optional=1)] if cpu else []),
        Column("ms" if cpu else "us"),
        *([] if cpu else [Column("eager us", optional=1)]),
        Column("KV GB/s"),
        Column("of ceiling"),
        Column("vs contiguous" if cpu else "time/contig."),
        Column("check", align="left"),
    ]
    kernels = {row["backend"] for row in rows if row["role"] == "kernel" and row["status"] != "unsupported"}
    several = len(kernels) > 1
    body = []
    for row in rows:
        if row["status"] == "unsupported":
            continue
        scale = 1 if cpu else 1e3
        ms = row["median_ms"]
        digits = 0 if ms is None or ms * scale >= 99.95 else 1 if ms * scale >= 9.95 else 2
        eager = row["eager_median_ms"]
        ratio = row["slowdown_vs_sdpa" if cpu else "slowdown_vs_one_block"]
        body.append(
            [
                _label(row, several),
                *([row["table"] if row["role"] == "kernel" else ""] if cpu else []),
                fixed(None if ms is None else ms * scale, digits),
                *([] if cpu else [fixed(None if eager is None else eager * 1e3, 0)]),
                fixed(row["kv_gb_per_s"], 1 if cpu else 0),
                "-" if row["share_of_read"] is None else _percent(row["share_of_read"]),
                _against(ratio) if cpu else ("-" if ratio is None else f"{ratio:.2f} x"),
                _check(row, cpu),
            ]
        )
    return render.table(columns, body, term)


def _shares_table(setups: list[list[Row]], term: Terminal) -> str:
    """A line a set-up: share of the read ceiling in % by block size, then of what it stands beside."""
    first = next((row["backend"] for row in setups[0] if row["role"] == "kernel"), "")
    heads = list(dict.fromkeys(_short(row, first) for setup in setups for row in setup if _in_shares(row)))
    columns = [Column("% of read ceiling", align="left", shrinks=True, min_width=30)]
    columns += [Column(head, optional=0 if head.isdigit() else 1) for head in heads]
    body = []
    for setup in setups:
        shares = {_short(row, first): row["share_of_read"] for row in setup if _in_shares(row)}
        shown = ["-" if shares.get(head) is None else f"{100 * shares[head]:.0f}" for head in heads]
        body.append([_setup_words(setup[0]), *shown])
    return render.table(columns, body, term)


def _setup_words(row: Row) -> str:
    """A set-up in few words, from the row of one of our kernels: '32 x 8,192, 32/8 x 128, bf16, KV fp8'."""
    words = [f"{row['batch_size']} x {row['context_len']:,}"]
    words[0] += " lognormal" if row["lengths"] == "lognormal" else ""
    words += [f"{row['heads']}/{row['kv_heads']} x {row['head_dim']}", SHORT_NAMES[row["dtype"]]]
    words += [f"KV {SHORT_NAMES[row['kv_cache_dtype']]}"] if row["kv_cache_dtype"] != row["dtype"] else []
    words += ["contiguous"] if row["table"] == "contiguous" else []
    return ", ".join(words)


def _in_shares(row: Row) -> bool:
    return bool(row["status"] != "unsupported")


def _short(row: Row, first_kernel: str) -> str:
    if row["backend"] == first_kernel:
        return str(row["block_size"])
    if row["role"] == "variant":
        return str(row["backend"])
    if row["role"] == "baseline":
        return {"contiguous SDPA": "SDPA", "gather + SDPA": "gather"}.get(row["backend"], "1 block")
    return f"{row['backend']} {row['block_size']}"


def _label(row: Row, several_kernels: bool) -> str:
    if row["role"] == "peer":
        return f"{row['backend']}, page {row['block_size']}"
    if row["role"] == "variant":
        return f"{row['block_size']}, {row['backend']}"
    if row["role"] == "baseline":
        own = row["backend"].removesuffix(", one block a row")
        if own == row["backend"]:
            return str(row["backend"])
        return f"{own}, contiguous" if several_kernels else "own, contiguous"
    return f"{row['backend']}, {row['block_size']}" if several_kernels else str(row["block_size"])


def _against(ratio: float | None) -> str:
    """'1.6 x slower', '2.1 x faster', or 1.0 when there is no difference to speak of."""
    if ratio is None:
        return "-"
    if 0.95 < ratio < 1.05:
        return "1.0"
    return f"{ratio:.1f} x slower" if ratio > 1 else f"{1 / ratio:.1f} x faster"


def _check(row: Row, with_error: bool) -> str:
    words = {"failed": "WRONG", "error": "error", "skipped": "skipped"}
    if row["status"] != "ok":
        return words[row["status"]]
    if not with_error:
        return "ok"
    if row["role"] == "baseline" and not row["backend"].endswith("one block a row"):
        return "baseline"
    return f"{_error(row['max_error'])} ok"


def _error(error: float) -> str:
    """'4e-7', as short as it can be said."""
    mantissa, exponent = f"{error:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _notes(rows: Sequence[Row], device: Device, term: Terminal) -> list[str]:
    """Why rows have no number, what is marked, and what the figures do not say."""
    lines = []
    reasons: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["status"] != "ok":
            reasons.setdefault((row["backend"], row["reason"] or row["status"]), []).append(row)
    for (backend, reason), cells in reasons.items():
        blocks = sorted({row["block_size"] for row in cells if row["block_size"] is not None})
        at = (
            f" at block size {', '.join(map(str, blocks))}"
            if blocks and cells[0]["role"] != "baseline"
            else ""
        )
        lines.append(render.wrap(f"No number for {backend}{at}: {escape(reason)}", term.width))
    if any((row["share_of_read"] or 0) > 1.02 for row in rows):
        lines.append("Over 100 %: the ceiling was disturbed, or the data was cached; run again.")
    small = [row for row in rows if row["status"] == "ok" and row["kv_under_4x_cache"]]
    if small:
        cache = "L2" if device.kind == "cuda" else "last-level cache"
        setups, all_setups = len({row["setup"] for row in small}), len({row["setup"] for row in rows})
        where = f" in {setups} of {all_setups} set-ups" if setups < all_setups else ""
        size = byte_size(device.cache_bytes)
        lines.append(f"KV under 4 x {cache} ({size}){where}: copies of it were read in turn.")
    if lines:
        lines.append("")
    if device.kind == "cpu":
        lines.append("These figures say nothing of a GPU; for one, run this on it.")
    else:
        lines.append("Checked before timing: output = float64 reference.")
    return lines
