"""How a simulation looks in the terminal: the answer, latency beside its target, where the pool went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvplan.cli import render
from kvplan.cli.render import Column, Terminal
from kvplan.sched import core

if TYPE_CHECKING:
    from kvplan.cli.options import Target
    from kvplan.cli.simulate import Case
    from kvplan.trace.schema import Trace

LATENCIES = (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2el", "E2E"))
STATISTICS = ("mean", "median", "p90", "p95", "p99")


def one_view(
    target: Target,
    cases: Sequence[Case],
    requests: Trace,
    assumptions: Sequence[str],
    allocation: str,
    steps: bool,
    term: Terminal,
) -> list[str]:
    """Blocks of lines for one run."""
    case = cases[0]
    lines = [*verdict_lines(case, requests, steps, term), "", subject(target, case, requests, term), ""]
    if case.summary["completed"]:
        lines += [latency_table(case, steps, term), *band_lines(case, term), ""]
    lines += [*pool_lines(case, allocation, term), "", *counters(case, steps), *failures(case, term)]
    return [*lines, "", assumed(assumptions, term)]


def assumed(assumptions: Sequence[str], term: Terminal) -> str:
    return render.wrap("Assumed: " + "; ".join(render.escape(line) for line in assumptions), term.width)


def verdict_lines(case: Case, requests: Trace, steps: bool, term: Terminal) -> list[str]:
    """The answer: targets met or missed, else how many requests were served and how fast."""
    s, lines = case.summary, []
    served = f"{render.count(s['completed'])} of {_requests(len(requests))}"
    if case.run.interrupted:
        lines.append(render.verdict("INTERRUPTED", f"{served} finished so far", False, term))
    missed = [result for result in case.targets if not result.met]
    if case.targets:
        shown = ", ".join(_target_value(result) for result in (missed or case.targets))
        word = "MISSES TARGET" if missed else "MEETS TARGET"
        lines.append(render.verdict(word, shown, not missed, term))
        good = s["request_goodput"] * s["duration_s"] / len(requests)
        good = 0.0 if good != good else good
        lines.append(f"{100 * good:.1f} % of {_requests(len(requests))} meet all targets.")
    elif not s["completed"] and not lines:
        lines.append(render.verdict("NONE SERVED", f"of {_requests(len(requests))}", False, term))
    elif not lines:
        unit = "steps" if steps else "s"
        rate = f"{render.fixed(s['output_throughput'], 1)} output tokens a {'step' if steps else 'second'}"
        lines.append(render.verdict("SERVED", f"{served} in {_duration(s, unit)}, {rate}", None, term))
    if s["saturated"]:
        lines.append("Saturated: the load outran the server; tails only measure the trace's length.")
    return lines


def _requests(n: int) -> str:
    return f"{render.count(n)} request{'' if n == 1 else 's'}"


def _duration(s: dict[str, Any], unit: str) -> str:
    return f"{s['duration_s']:,.0f} {unit}" if s["duration_s"] >= 100 else f"{s['duration_s']:.2f} {unit}"


def _target_value(result: Any) -> str:
    slo = result.slo
    name = "E2E" if slo.metric == "e2el" else slo.metric.upper()
    scale, unit = (1e3, "ms") if slo.limit_s < 1 else (1.0, "s")
    if result.value_s != result.value_s:
        return f"{name} {slo.statistic} has no value (target {slo.limit_s * scale:g} {unit})"
    value = "never" if result.value_s == float("inf") else f"{result.value_s * scale:,.4g} {unit}"
    return f"{name} {slo.statistic} {value} (target {slo.limit_s * scale:g})"


def subject(target: Target, case: Case, requests: Trace, term: Terminal) -> str:
    s = target.settings
    version = case.plan.engine.version
    gpus = s.tensor_parallel_size
    tp = f" (TP {gpus})" if gpus > 1 else ""
    load = (
        f"{requests.provenance.kind}, {_requests(len(requests))}, "
        f"{render.count(int(requests.input_tokens.sum()))} + "
        f"{render.count(int(requests.output_tokens.sum()))} tokens"
    )
    source = render.escape(requests.provenance.source)
    if case.run.rules.max_concurrency:
        source += f"; closed loop of {render.count(case.run.rules.max_concurrency)}"
    return (
        f"{target.model.name.split('/')[-1]} on {gpus} x {target.gpu.name}{tp}, rules of vLLM "
        f"{version[0]}.{version[1]}\n{render.wrap(f'{source}: {load}', term.width)}"
    )


def latency_table(case: Case, steps: bool, term: Terminal) -> str:
    """One row a metric; in seconds or milliseconds by size, in steps on the step clock."""
    s = case.summary
    heads = ["latency", "", "mean", "p50", "p90", "p95", "p99"]
    columns = [Column(heads[0], "left"), Column(heads[1], "left"), *(Column(h) for h in heads[2:])]
    targets = {result.slo.metric: result for result in case.targets}
    if targets:
        columns.append(Column("target", "left", optional=1))
    rows = []
    for key, name in LATENCIES:
        values = [s[f"{statistic}_{key}_ms"] / 1e3 for statistic in STATISTICS]
        if all(value != value for value in values):
            continue
        if steps:
            shown, unit = [f"{value:,.1f}" for value in values], "steps"
        else:
            unit = render.time_unit(values)
            shown = render.times(values, unit)
        row = [name, unit, *shown]
        if targets:
            result = targets.get(key)
            row.append(
                "" if result is None
                else f"{result.slo.statistic} <= {result.slo.limit}{'' if result.met else '  missed'}"
            )  # fmt: skip
        rows.append(row)
    return render.table(columns, rows, term)


def band_lines(case: Case, term: Terminal) -> list[str]:
    """Near saturation: what TTFT becomes when the step-time model is off by its usual error."""
    band = case.band
    if band is None:
        return []
    parts = []
    for key, name in (("median_ttft_ms", "p50"), ("p95_ttft_ms", "p95"), ("p99_ttft_ms", "p99")):
        ends = [band.fast[key] / 1e3, band.slow[key] / 1e3]
        unit = render.time_unit(ends)
        low, high = (shown.strip() for shown in render.times(ends, unit))
        parts.append(f"{name} {low} to {high} {unit}")
    sign = "±" if term.unicode else "+-"
    line = f"  TTFT band  {', '.join(parts)} (steps {sign}{100 * band.share:.0f} %)"
    return [render.wrap(line, term.width, " " * 13)]


def pool_lines(case: Case, allocation: str, term: Terminal) -> list[str]:
    """One bar for the pool that sums to it, means over time, and its course."""
    s, run = case.summary, case.run
    pool = s["pool_bytes"]
    usable = run.rules.num_blocks - 1
    waste = s["reserved_unused_bytes"] if allocation != "paged" else s["tail_waste_bytes"]
    names = ("live", "shared", "tail waste" if allocation == "paged" else "reserved", "cached", "free")
    shared, cached = s["kv_shared_bytes"], s["kv_cached_bytes"]
    sizes = [s["kv_effective_bytes"] - shared, shared, waste, cached, s["free_bytes"]]
    if not pool or any(size != size for size in sizes):
        return [f"KV pool, {render.count(usable)} blocks of {run.rules.block_size} tokens: never used"]
    shares = render.round_parts([100 * size / pool for size in sizes], 2, 100.0)
    marks = render.glyphs(term)
    legend = "  ".join(f"{marks[i]} {names[i]} {shares[i]:.2f}" for i in range(5))
    lines = [
        f"KV pool, {render.count(usable)} blocks of {run.rules.block_size} = {render.gib(pool)} GiB per GPU, "
        "mean over time",
        f"  {render.bar(list(enumerate(sizes)), term)}",
        f"  {legend} %",
    ]
    at = {name: run.rows[:, i] for i, name in enumerate(core.STEP_COLUMNS)}
    if len(run.rows) > 1:
        used = _over_time(at["start_s"], at["end_s"], at["used_blocks"] / usable)
        waiting = _over_time(at["start_s"], at["end_s"], at["waiting"])
        peak = 100 * s["peak_blocks"] / usable
        lines += [
            f"  in use over time  {render.sparkline(used, term)}  max {peak:.{0 if peak >= 10 else 1}f} %",
            f"  waiting           {render.sparkline(waiting, term)}  max {render.count(at['waiting'].max())}",
        ]
    return lines


def _over_time(start_s: Any, end_s: Any, values: Any, bins: int = 38) -> list[float]:
    """Time-weighted means of a step function in equal bins of time; idle time counts as zero."""
    edges = np.linspace(start_s[0], max(end_s[-1], start_s[0] + 1e-9), bins + 1)
    area = np.concatenate([[0.0], np.cumsum(values * np.maximum(end_s - start_s, 0.0))])
    times = np.concatenate([start_s[:1], end_s])
    return list(np.diff(np.interp(edges, times, area)) / np.diff(edges))


def counters(case: Case, steps: bool) -> list[str]:
    s = case.summary
    hits = (
        f"{_hit_percent(s):.1f} % of prompt tokens" if case.run.rules.prefix_caching else "no prefix caching"
    )
    preempted = int((case.run.requests.preemptions > 0).sum())
    share = 100 * s["recomputed_tokens"] / max(1.0, case.run.count["scheduled"])
    lines = [f"  prefix hits  {hits}"]
    if preempted:
        lines.append(
            f"  preempted    {_requests(preempted)}, {render.count(s['preemptions'])} times; "
            f"{render.count(s['recomputed_tokens'])} tokens recomputed ({share:.2f} %)"
        )
    else:
        lines.append("  preempted    none")
    if s["mean_running"] == s["mean_running"]:
        lines.append(
            f"  running      mean {s['mean_running']:.1f}, peak {render.count(s['peak_running'])}; "
            f"queue non-empty {100 * s['queued_share']:.0f} % of the time"
        )
    per = "step" if steps else "s"
    rate = (
        f"{s['request_throughput']:.4g} req/{per}, {s['output_throughput']:,.1f} output tok/{per}; "
        if s["completed"] else ""
    )  # fmt: skip
    return [*lines, f"  throughput   {rate}utilization U = {s['position_utilization']:.5f}"]


def _hit_percent(s: dict[str, Any]) -> float:
    return 100 * s["prefix_hit_tokens"] / s["prefix_query_tokens"] if s["prefix_query_tokens"] else 0.0


def failures(case: Case, term: Terminal) -> list[str]:
    """How many requests were not served, by cause."""
    rules, status = case.run.rules, case.run.requests.status
    causes = (
        (core.TOO_LONG, f"rejected (prompt not below max_model_len {render.count(rules.max_model_len)})"),
        (core.NO_ROOM, "rejected (pool or step budget too small)"),
        (core.CANCELLED, "cancelled"),
        (core.TIMED_OUT, "timed out"),
    )
    counts = [(int((status == code).sum()), words) for code, words in causes]
    parts = [f"{render.count(n)} {words}" for n, words in counts if n]
    if not parts:
        return []
    line = f"  not served   {', '.join(parts)}; each with its reason: -o DIR"
    return [render.wrap(line, term.width, " " * 15)]


def many_view(
    target: Target,
    cases: Sequence[Case],
    requests: Trace,
    assumptions: Sequence[str],
    allocation: str,
    steps: bool,
    term: Terminal,
) -> list[str]:
    """One row a block size; `missed` is a word."""
    unit = "steps" if steps else "ms"
    asked = [(r.slo.metric, r.slo.statistic) for r in cases[0].targets] or [("ttft", "p95"), ("tpot", "p95")]
    columns = [
        Column("block"), Column("blocks"), Column("U %"), Column("KV use %", optional=1),
        Column("hits %", optional=2), Column("preempted"), Column("recomputed", optional=3),
        *(Column(f"{'E2E' if m == 'e2el' else m.upper()} {stat} {unit}") for m, stat in asked),
        Column("", "left"),
    ]  # fmt: skip
    rows = []
    for case in cases:
        s = case.summary
        words = [word for word in ("saturated", "interrupted") if s.get(word)]
        words += ["missed"] if not all(result.met for result in case.targets) else []
        values = [r.value_s * 1e3 for r in case.targets] or [s["p95_ttft_ms"], s["p95_tpot_ms"]]
        rows.append(
            [
                render.count(s["block_size"]),
                render.count(case.run.rules.num_blocks - 1),
                f"{100 * s['position_utilization']:.2f}",
                f"{100 * s['kv_utilization']:.1f}",
                f"{_hit_percent(s):.1f}",
                render.count(s["preemptions"]),
                render.count(s["recomputed_tokens"]),
                *(_late(value * (1e-3 if steps else 1.0)) for value in values),
                ", ".join(words),
            ]
        )
    best = _best(cases)
    lines = [best_line(best, cases, term), "", subject(target, cases[0], requests, term), ""]
    lines += [render.table(columns, rows, term), ""]
    lost = [line for case in cases[:1] for line in failures(case, term)]
    return [*lines, *lost, *([""] if lost else []), assumed(assumptions, term)]


def _late(value: float) -> str:
    """A latency cell: 'never' when a failed request reaches the percentile, '-' when there is none."""
    if value != value:
        return "-"
    return "never" if value == float("inf") else f"{value:,.1f}"


def _best(cases: Sequence[Case]) -> list[Case]:
    meeting = [case for case in cases if all(result.met for result in case.targets)]
    return meeting if cases[0].targets else []


def best_line(best: Sequence[Case], cases: Sequence[Case], term: Terminal) -> str:
    if any(case.run.interrupted for case in cases):
        return render.verdict("INTERRUPTED", "figures are of what had finished", False, term)
    if not cases[0].targets:
        lowest = min(cases, key=lambda case: _sort_key(case.summary["p95_ttft_ms"]))
        size = lowest.summary["block_size"]
        return render.verdict(f"{len(cases)} BLOCK SIZES", f"lowest TTFT p95 at {size}", None, term)
    targets = ", ".join(str(result.slo) for result in cases[0].targets)
    if not best:
        return render.verdict("MISSES TARGET", f"no block size meets {targets}", False, term)
    sizes = " OR ".join(str(case.summary["block_size"]) for case in best)
    return render.verdict(f"BLOCK SIZE {sizes}", f"meets {targets}", True, term)


def _sort_key(value: float) -> float:
    return float("inf") if value != value else value
