"""kvplan simulate: replay a trace through the scheduler and the block pool on a modelled clock."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvplan.cli import render
from kvplan.cli.options import Flag, Flags, Target, resolve_target, shared_flags
from kvplan.cli.render import Format
from kvplan.errors import InputError

if TYPE_CHECKING:
    from kvplan.memory.capacity import PoolPlan
    from kvplan.results.metrics import Slo, SloResult
    from kvplan.sched.groups import Group
    from kvplan.sim.run import Run
    from kvplan.sim.steptime import Calibration
    from kvplan.trace.schema import Trace

app = typer.Typer(add_completion=False, rich_markup_mode=None)
warmup_app = typer.Typer(add_completion=False, rich_markup_mode=None)

DEFAULT_INPUT_LEN, DEFAULT_OUTPUT_LEN, DEFAULT_PROMPTS, DEFAULT_RATE = 1024, 128, 1000, 4.0
MAX_UNLIMITED_BLOCKS = 60_000_000
NEAR_SATURATION = 0.05
"""Share of the time with a queue above which TTFT is shown as a band (its elasticity is 1.2 to 5.5)."""
MAX_BAND_REQUESTS = 200_000
"""Above it the two further runs of a band would take longer than the answer is worth."""


class ClockKind(StrEnum):
    MODELLED = "modelled"
    STEPS = "steps"


@dataclass(frozen=True)
class Case:
    """One run: a pool, its rules' source, and what came out."""

    plan: PoolPlan
    num_blocks: int
    run: Run
    summary: dict[str, Any]
    targets: list[SloResult]
    band: Band | None = None


@dataclass(frozen=True)
class Band:
    """TTFT when every step is ``share`` faster or slower than modelled: near saturation it moves far more."""

    share: float
    fast: dict[str, float]  # summary keys of TTFT, in milliseconds
    slow: dict[str, float]


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
@shared_flags(omit=("block_size",))
def simulate_command(
    flags: Flags,
    trace: Annotated[
        str | None, typer.Argument(metavar="[TRACE]", help="Trace file, .gz too; - is stdin")
    ] = None,
    trace_format: Annotated[
        str | None, typer.Option(metavar="NAME", help="Reader to use [recognised by content]")
    ] = None,
    block_size: Annotated[
        list[str] | None, typer.Option(metavar="N", help="Tokens a block; repeatable, one run each [16]")
    ] = None,
    random_input_len: Annotated[
        str | None, typer.Option(metavar="N", help="Constructed load: input tokens")
    ] = None,
    random_output_len: Annotated[
        str | None, typer.Option(metavar="N", help="Constructed load: output tokens")
    ] = None,
    num_prompts: Annotated[str | None, typer.Option(metavar="N", help="Constructed load: requests")] = None,
    random_range_ratio: Annotated[
        str | None, typer.Option(metavar="R", help="Lengths uniform in [L(1-R), L(1+R)]")
    ] = None,
    random_len_range: Annotated[
        str | None, typer.Option(metavar="LO,HI", help="Lengths uniform in [LO L, HI L]")
    ] = None,
    seed: Annotated[str, typer.Option(metavar="N", help="Of all that is drawn")] = "0",
    request_rate: Annotated[
        str | None, typer.Option(metavar="R", help="Arrivals a second, Poisson; inf = all at once")
    ] = None,
    burstiness: Annotated[
        str | None, typer.Option(metavar="G", help="Shape of the gaps; 1 = Poisson, below 1 burstier")
    ] = None,
    max_concurrency: Annotated[
        str | None, typer.Option(metavar="C", help="Closed loop of C requests")
    ] = None,
    speed_up: Annotated[str | None, typer.Option(metavar="X", help="Divide the trace's times by X")] = None,
    kv_groups: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="full, swa:W:N, chunk:SIZE:N, mamba:N, swaonly:W [by model]"),
    ] = None,
    unlimited: Annotated[bool, typer.Option("--unlimited", help="A pool that never runs out")] = False,
    clock: Annotated[ClockKind, typer.Option(help="What a step lasts")] = ClockKind.MODELLED,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Factors from kvplan calibrate")
    ] = None,
    allocation: Annotated[
        str,
        typer.Option(metavar="KIND", help="paged, reserve-max[:LEN|longest], reserve-pow2, reserve-oracle"),
    ] = "paged",
    slo: Annotated[
        list[str] | None, typer.Option(metavar="ttft=1s,p99", help="Latency target; repeatable")
    ] = None,
    record_decisions: Annotated[
        bool, typer.Option("--record-decisions", help="Write every scheduling decision (with -o)")
    ] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw pool, queue and latency")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Write Parquet tables")
    ] = None,
    format: Annotated[Format, typer.Option(help="table, json, csv or markdown")] = Format.TABLE,
    quiet: Annotated[bool, typer.Option("--quiet", help="No notes on stderr")] = False,
) -> None:
    """Replay a trace: KV use, sharing, preemption, latency.

    Exit code 1: the model does not start, or a target is missed.
    """
    from kvplan.results.metrics import parse_slo

    slos = tuple(parse_slo(text) for text in slo or ())
    if plot is not None:
        from kvplan.results.plots import check_plot_path

        check_plot_path(plot)
    if record_decisions and output is None:
        raise InputError("--record-decisions needs -o DIR to write to.")
    load = Load(
        trace, trace_format, random_input_len, random_output_len, num_prompts, random_range_ratio,
        random_len_range, seed, request_rate, burstiness, max_concurrency, speed_up,
    )  # fmt: skip
    adjust, fitted_on = _calibration(calibration, clock)
    target = resolve_target(flags)
    _refuse_unmodelled(target, clock)
    sizes = [Flag("block_size", int, "", high=1 << 20).parse(text) for text in block_size or ()]
    plans = _plans(target, sizes or [target.settings.block_size], allocation, unlimited, quiet)
    groups = _groups(target, plans, kv_groups, allocation)
    by_hand = unlimited or flags.settings.num_gpu_blocks_override is not None or kv_groups is not None
    refused = next((plan for plan in plans if _is_refused(plan, by_hand)), None)
    if refused is not None:
        render.write(f"DOES NOT START  {refused.verdict.reason}")
        render.note("  Why, and what would fit: kvplan estimate with the same flags", quiet)
        raise typer.Exit(1)
    requests, concurrency = load.read(quiet)
    if slos and len(requests) > 1 and _all_at_once(requests) and not concurrency:
        render.note("note: all requests arrive at once: this is a batch, not a service load.", quiet)
    cases = _run_all(
        target,
        plans,
        groups,
        requests,
        concurrency,
        clock,
        adjust,
        allocation,
        unlimited,
        slos,
        record_decisions,
        quiet,
    )
    assumptions = _assumptions(target, plans[0], groups[0], load, clock, adjust, fitted_on)
    _report(target, cases, requests, clock, assumptions, allocation, format)
    if output is not None:
        _write(output, cases, requests, target, assumptions, record_decisions, quiet)
    if plot is not None:
        _plot(plot, cases, requests, slos, quiet)
    if any(case.run.interrupted for case in cases):
        raise KeyboardInterrupt
    if any(not result.met for case in cases for result in case.targets):
        raise typer.Exit(1)


@warmup_app.command(context_settings={"help_option_names": ["-h", "--help"]})
def warmup_command() -> None:
    """Compile the scheduler now and keep it on disk, so that the first simulate starts at once."""
    from time import perf_counter

    from kvplan.sim.rules import rules_for
    from kvplan.sim.run import simulate, steps_clock
    from kvplan.spec.catalogue import DEFAULT_GPU, DEFAULT_MODEL, find_gpu, find_model
    from kvplan.spec.engine import EngineSettings, resolve
    from kvplan.trace.generate import random_trace

    began = perf_counter()
    engine = resolve(EngineSettings(), find_model(DEFAULT_MODEL).spec, find_gpu(DEFAULT_GPU))
    simulate(random_trace(2, 32, 4, seed=0, request_rate=1.0), rules_for(engine, 64, 16), steps_clock())
    render.write(f"COMPILED  in {perf_counter() - began:.1f} s")


# ------------------------------------------------------------------------------------------------- the load


@dataclass(frozen=True)
class Load:
    """The flags that say which requests arrive, and when."""

    trace: str | None
    trace_format: str | None
    random_input_len: str | None
    random_output_len: str | None
    num_prompts: str | None
    random_range_ratio: str | None
    random_len_range: str | None
    seed: str
    request_rate: str | None
    burstiness: str | None
    max_concurrency: str | None
    speed_up: str | None

    @property
    def is_default(self) -> bool:
        """Nothing was said: a small constructed load, named among the assumptions."""
        return self.trace is None and self.random_input_len is None and self.random_output_len is None

    def number(self, name: str, kind: type, default: Any, low: float, high: float) -> Any:
        text = getattr(self, name)
        return default if text is None else Flag(name, kind, "", low=low, high=high).parse(text)

    def read(self, quiet: bool) -> tuple[Trace, int]:
        """The trace with its arrivals, and the closed loop's concurrency (0 = open)."""
        from kvplan.trace.generate import random_trace, speed_up, with_arrivals

        seed = self.number("seed", int, 0, 0, 2**63 - 1)
        rate = self._rate()
        burstiness = self.number("burstiness", float, 1.0, 1e-3, 1e6)
        concurrency = self.number("max_concurrency", int, 0, 1, 1 << 20)
        factor = self.number("speed_up", float, 1.0, 1e-9, 1e9)
        random = (
            "random_input_len",
            "random_output_len",
            "num_prompts",
            "random_range_ratio",
            "random_len_range",
        )
        if self.trace is not None:
            said = [f"--{name.replace('_', '-')}" for name in random if getattr(self, name) is not None]
            if said:
                raise InputError(f"TRACE {self.trace} and {said[0]} both give the load: use one.")
            from kvplan.trace.readers import read_trace

            requests = read_trace(self.trace, self.trace_format)
            for line in requests.notes:
                render.note(f"note: {line}", quiet)
        else:
            if self.trace_format is not None:
                raise InputError("--trace-format needs a TRACE.")
            if self.random_range_ratio is not None and self.random_len_range is not None:
                raise InputError("--random-range-ratio and --random-len-range both set the lengths: use one.")
            if rate is None and not concurrency:
                rate = DEFAULT_RATE if self.is_default else float("inf")
            requests = random_trace(
                self.number("num_prompts", int, DEFAULT_PROMPTS, 1, 100_000_000),
                self.number("random_input_len", int, DEFAULT_INPUT_LEN, 1, 1 << 28),
                self.number("random_output_len", int, DEFAULT_OUTPUT_LEN, 1, 1 << 28),
                seed=seed,
                range_ratio=self.number("random_range_ratio", float, 0.0, 0.0, 1.0),
                len_range=self._len_range(),
            )
        if len(requests) == 0:
            raise InputError(f"{requests.provenance.source} has no requests to simulate.")
        if int(requests.samples.max()) > 1:
            i = int(requests.samples.argmax())
            raise InputError(
                f"request {requests.request_id[i]}: n is {requests.samples[i]}; "
                "parallel samples are not simulated yet, only n = 1."
            )
        if rate is not None:
            requests = with_arrivals(requests, rate, burstiness, seed)
        elif concurrency and not requests.has_times:
            requests = with_arrivals(requests, float("inf"), 1.0, seed)
        elif not requests.has_times:
            raise InputError(
                f"{requests.provenance.source} has no arrival times.\n"
                "  Give --request-rate R (Poisson) or --max-concurrency C (closed loop)."
            )
        if burstiness != 1.0 and rate is None:
            raise InputError("--burstiness needs --request-rate.")
        return (speed_up(requests, factor) if factor != 1.0 else requests), concurrency

    def _rate(self) -> float | None:
        if self.request_rate is None:
            return None
        if self.request_rate.strip().lower() == "inf":
            return float("inf")
        return float(Flag("request_rate", float, "", low=1e-9, high=1e9).parse(self.request_rate))

    def _len_range(self) -> tuple[float, float] | None:
        if self.random_len_range is None:
            return None
        try:
            low, high = (float(part) for part in self.random_len_range.split(","))
        except ValueError:
            low = high = float("nan")
        if not 0 <= low <= high <= 1e6:
            raise InputError(f"--random-len-range is {self.random_len_range}; must be LO,HI such as 0.8,1.")
        return low, high


def _all_at_once(requests: Trace) -> bool:
    return bool(requests.arrival_s[0] == requests.arrival_s[-1])


# ------------------------------------------------------------------------------------------------- the runs


def _refuse_unmodelled(target: Target, clock: ClockKind) -> None:
    """Flags that would change the run and are not simulated are refused, never ignored."""
    s = target.settings
    if s.engine != "vllm":
        raise InputError(f"--engine {s.engine}: simulate follows vLLM's scheduler only; use --engine vllm.")
    if target.bare and clock is ClockKind.MODELLED:
        raise InputError("--layers ... give no weights to time a step with: name a model, or --clock steps.")
    for said, flag, what in (
        (s.num_speculative_tokens > 0, "--num-speculative-tokens", "speculative decoding is"),
        (s.kv_offload_gib > 0, "--kv-offload-gib", "offloading is"),
        (s.pipeline_parallel_size > 1, "--pipeline-parallel-size", "pipeline stages are"),
        (s.data_parallel_size > 1, "--data-parallel-size", "several replicas are"),
        (s.max_loras > 0, "--max-loras", "adapters are"),
    ):
        if said:
            raise InputError(f"{flag}: {what} not simulated yet; kvplan estimate knows its memory.")


def _plans(
    target: Target, sizes: Sequence[int | None], allocation: str, unlimited: bool, quiet: bool
) -> list[PoolPlan]:
    from kvplan.memory.capacity import pool_for

    plans = []
    for size in sizes:
        settings = replace(target.settings, block_size=size)
        if allocation != "paged":  # contiguous space cannot be shared
            settings = replace(settings, enable_prefix_caching=False)
        plan = pool_for(target.model, target.gpu, settings)
        if target.bare and plan.num_gpu_blocks < 2 and not unlimited:
            raise InputError(
                "--layers ... give no weights, so no pool: add --num-gpu-blocks-override or "
                "--kv-cache-memory-bytes."
            )
        plans.append(plan)
    return plans


def _groups(
    target: Target, plans: Sequence[PoolPlan], kv_groups: str | None, allocation: str
) -> list[tuple[Group, ...]]:
    """The KV groups of each plan: the model's, or those of `--kv-groups`."""
    from kvplan.sched.groups import describe, is_hybrid, parse_groups
    from kvplan.sim.rules import check_retention, groups_for

    if kv_groups is not None:
        by_hand = parse_groups(kv_groups)
        check_retention(plans[0].engine, by_hand)
        groups = [by_hand] * len(plans)
    else:
        groups = [groups_for(target.model.name, plan.engine, plan.groups) for plan in plans]
    if allocation != "paged" and is_hybrid(groups[0]):
        raise InputError(
            f"--allocation {allocation} needs one KV group of full attention, not {describe(groups[0])}.\n"
            "  --kv-groups full or --disable-hybrid-kv-cache-manager keeps every token of every layer."
        )
    return groups


def _is_refused(plan: PoolPlan, by_hand: bool) -> bool:
    if plan.verdict.fits is not False:
        return False
    if by_hand:
        render.note(f"note: as an engine this would not start: {plan.verdict.reason}")
    return not by_hand


def _run_all(
    target: Target,
    plans: Sequence[PoolPlan],
    groups: Sequence[tuple[Group, ...]],
    requests: Trace,
    concurrency: int,
    clock: ClockKind,
    adjust: Calibration | None,
    allocation: str,
    unlimited: bool,
    slos: tuple[Slo, ...],
    record: bool,
    quiet: bool,
) -> list[Case]:
    """One run a plan; several share the machine's cores (the core runs without the interpreter lock)."""
    from concurrent.futures import ThreadPoolExecutor

    from kvplan.results.metrics import check_slos
    from kvplan.sched import core
    from kvplan.sched.jit import is_compiled
    from kvplan.sim import run as sim
    from kvplan.sim.envelope import envelope_for
    from kvplan.sim.rules import rules_for
    from kvplan.sim.steptime import stretched
    from kvplan.sim.tables import inter_token_latencies, request_times, summary

    if not is_compiled(core.run):
        render.note("compiling the scheduler, once for this machine (about 20 s)", quiet)
    done = [0] * len(plans)

    def simulate(i: int, progress: render.Progress) -> Case:
        plan = plans[i]
        blocks = plan.num_gpu_blocks
        stop = sim.stop_lengths(requests, plan.engine.max_model_len)
        if unlimited:
            blocks = len(groups[i]) * int((-(-stop // plan.block_size)).sum()) + 2
            if blocks > MAX_UNLIMITED_BLOCKS:
                raise InputError(
                    f"--unlimited would need {blocks:,} blocks here; use --num-gpu-blocks-override."
                )
        rules = rules_for(plan.engine, blocks, plan.block_size, max_concurrency=concurrency, record=record)
        reserve = sim.reserved_tokens(requests, stop, allocation, plan.engine.max_model_len)

        def report(c: Any) -> None:
            done[i] = int(c["done"])
            used = 100 * (rules.num_blocks - 1 - int(c["free"])) // max(1, rules.num_blocks - 1)
            progress.update(sum(done), f"KV {used} %")

        seconds = _clock(target, plan, clock, adjust)
        keys = sim.keys_for(requests, rules)
        pool: dict[str, Any] = {
            "groups": groups[i],
            "in_flight_tokens": plan.engine.max_in_flight_tokens,
            "dense_retention": plan.engine.prefix_cache_retention_interval is None,
        }
        run = sim.simulate(requests, rules, seconds, keys=keys, reserve=reserve, progress=report, **pool)
        itl_s, weights = inter_token_latencies(run)
        result = summary(run, requests, plan.bytes_per_block, slos, allocation)
        band = None
        near = result["queued_share"] > NEAR_SATURATION or result["saturated"]
        if clock is ClockKind.MODELLED and near and len(plans) == 1 and len(requests) <= MAX_BAND_REQUESTS:
            share = envelope_for(target.model, target.gpu, _resolved_settings(plan), adjust).tpot_median

            def ttft(factor: float) -> dict[str, float]:
                slower = stretched(seconds, factor)
                end = sim.simulate(requests, rules, slower, keys=keys, reserve=reserve, **pool)
                ends = summary(end, requests, plan.bytes_per_block, (), allocation)
                return {key: value for key, value in ends.items() if key.endswith("_ttft_ms")}

            band = Band(share, ttft(1 - share), ttft(1 + share))
            result["ttft_band"] = {
                key: [band.fast[key], band.slow[key]]
                for key in ("mean_ttft_ms", "median_ttft_ms", "p95_ttft_ms", "p99_ttft_ms")
            }
        return Case(
            plan,
            blocks,
            run,
            result,
            check_slos(request_times(run), slos, itl_s, weights),
            band,
        )

    with render.Progress("simulate", len(requests) * len(plans), "req", quiet) as progress:
        if len(plans) == 1:
            return [simulate(0, progress)]
        with ThreadPoolExecutor(max_workers=2) as pool:
            return list(pool.map(lambda i: simulate(i, progress), range(len(plans))))


def _clock(target: Target, plan: PoolPlan, clock: ClockKind, adjust: Calibration | None) -> Any:
    from kvplan.sim.run import steps_clock
    from kvplan.sim.steptime import clock_for

    if clock is ClockKind.STEPS:
        return steps_clock()
    return clock_for(target.model, target.gpu, _resolved_settings(plan), adjust)


def _calibration(path: Path | None, clock: ClockKind) -> tuple[Calibration | None, dict[str, Any]]:
    """The factors of `--calibration`, and what they were fitted on."""
    if path is None:
        return None, {}
    if clock is ClockKind.STEPS:
        raise InputError("--calibration has no effect on --clock steps: use one.")
    from kvplan.sim.calibrate import load

    return load(path)


def _resolved_settings(plan: PoolPlan) -> Any:
    """The settings with the numbers that the engine would run with."""
    e = plan.engine
    return replace(
        e.settings,
        max_num_batched_tokens=e.max_num_batched_tokens,
        max_num_seqs=e.max_num_seqs,
        max_model_len=e.max_model_len,
        kv_cache_dtype=e.kv_cache_dtype,
        dtype=e.dtype,
        async_scheduling=e.async_scheduling,
    )


# ---------------------------------------------------------------------------------------------- the results


def _assumptions(
    target: Target,
    plan: PoolPlan,
    groups: tuple[Group, ...],
    load: Load,
    clock: ClockKind,
    adjust: Calibration | None,
    fitted_on: dict[str, Any],
) -> list[str]:
    said = [*target.notes, *plan.assumptions]
    if len(groups) > 1 or groups[0].kind != "full":
        from kvplan.sched.groups import describe

        said.append(f"KV groups: {describe(groups)}")
    if any(group.kind == "state" for group in groups) and plan.engine.version < (0, 32):
        said.append(
            "states are cached at block boundaries as in vLLM 0.32; earlier releases differ in detail"
        )
    if load.is_default:
        said.append(
            f"no TRACE: constructed requests of {DEFAULT_INPUT_LEN} + {DEFAULT_OUTPUT_LEN} tokens"
            + ("" if load.request_rate or load.max_concurrency else f", {DEFAULT_RATE:g} a second")
        )
    if clock is ClockKind.MODELLED:
        from kvplan.sim.envelope import envelope_for

        envelope = envelope_for(target.model, target.gpu, _resolved_settings(plan), adjust)
        said += [envelope.text, *envelope.warnings]
        for name, ours in (("model", target.model.name), ("gpu", target.gpu.name)):
            if fitted_on.get(name, ours) != ours:
                said.append(f"the calibration was fitted on {name} {fitted_on[name]}, this is {ours}")
    else:
        said.append("every step lasts one second: times count steps")
    return said


def _report(
    target: Target,
    cases: Sequence[Case],
    requests: Trace,
    clock: ClockKind,
    assumptions: list[str],
    allocation: str,
    format: Format,
) -> None:
    from kvplan.cli.simulate_view import many_view, one_view

    if format is not Format.TABLE:
        rows = [{**case.summary, "assumptions": assumptions, "verdict": _verdict(case)} for case in cases]
        render.emit(rows, format)
        return
    term = render.terminal()
    view = one_view if len(cases) == 1 else many_view
    steps = clock is ClockKind.STEPS
    render.write(*view(target, cases, requests, assumptions, allocation, steps, term))


def _verdict(case: Case) -> dict[str, Any]:
    return {
        "meets": all(result.met for result in case.targets) if case.targets else None,
        "targets": [
            {"target": str(result.slo), "value_ms": result.value_s * 1e3, "met": result.met}
            for result in case.targets
        ],
    }


def _write(
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

    rows = [{**case.summary, "verdict": _verdict(case)} for case in cases]
    if len(cases) == 1:
        made = {"summary": summary_table(rows), **tables(cases[0])}
        write_tables(output, made, metadata(cases[0]))
        render.wrote(output, list(made), quiet)
        return
    write_tables(output, {"summary": summary_table(rows)}, metadata(cases[0]))
    for case in cases:
        folder = output / f"block-{case.run.rules.block_size}"
        write_tables(folder, tables(case), metadata(case))
    render.wrote(output, ["summary"], quiet)


def _plot(path: Path, cases: Sequence[Case], requests: Trace, slos: tuple[Slo, ...], quiet: bool) -> None:
    from kvplan.results import plots
    from kvplan.sim.tables import request_times, timeline_columns

    case = cases[0]
    rules = case.run.rules
    plots.plot_run(
        path,
        timeline_columns(case.run),
        request_times(case.run),
        rules.block_size,
        f"{requests.provenance.source}, blocks of {rules.block_size}",
        slos,
        rules.max_num_seqs,
    )
    render.wrote(path, (), quiet)
