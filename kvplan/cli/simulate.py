"""kvplan simulate: replay a trace through the scheduler and the block pool on a modelled clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvplan.cli import render
from kvplan.cli.interrupt import stopping_on_interrupt
from kvplan.cli.load import DEFAULT_INPUT_LEN, DEFAULT_OUTPUT_LEN, DEFAULT_RATE, Load, all_at_once
from kvplan.cli.options import Flag, Flags, Target, resolve_target, shared_flags
from kvplan.cli.render import Format
from kvplan.cli.simulate_output import plot_runs, report, write_run
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
    sizes = list(dict.fromkeys(sizes))  # the same size twice is one run
    plans = _plans(target, sizes or [target.settings.block_size], allocation, unlimited, quiet)
    groups = _groups(target, plans, kv_groups, allocation)
    refused = next((plan for plan in plans if plan.verdict.fits is False), None)
    if refused is not None:
        by_hand = flags.settings.num_gpu_blocks_override is not None or kv_groups is not None
        if not unlimited and not by_hand:
            render.write(f"DOES NOT START  {refused.verdict.reason}")
            render.note("  Why, and what would fit: kvplan estimate with the same flags", quiet)
            raise typer.Exit(1)
        render.note(f"note: as an engine this would not start: {refused.verdict.reason}", quiet)
    requests, concurrency = load.read(quiet)
    if slos and len(requests) > 1 and all_at_once(requests) and not concurrency:
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
    report(target, cases, requests, assumptions, allocation, clock is ClockKind.STEPS, format)
    if output is not None:
        write_run(output, cases, requests, target, assumptions, record_decisions, quiet)
    if plot is not None:
        plot_runs(plot, cases, requests, slos, allocation, quiet)
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
        render.note("compiling the scheduler, once for this machine (about 30 s)", quiet)
    done = [0] * len(plans)

    def simulate(i: int, progress: render.Progress, stop: Callable[[], bool]) -> Case:
        plan = plans[i]
        blocks = plan.num_gpu_blocks
        lengths = sim.stop_lengths(requests, plan.engine.max_model_len)
        if unlimited:
            blocks = len(groups[i]) * int((-(-lengths // plan.block_size)).sum()) + 2
            if blocks > MAX_UNLIMITED_BLOCKS:
                raise InputError(
                    f"--unlimited would need {blocks:,} blocks here; use --num-gpu-blocks-override."
                )
        rules = rules_for(plan.engine, blocks, plan.block_size, max_concurrency=concurrency, record=record)
        reserve = sim.reserved_tokens(requests, lengths, allocation, plan.engine.max_model_len)

        def show(c: Any) -> None:
            done[i] = int(c["done"])
            used = 100 * (rules.num_blocks - 1 - int(c["free"])) // max(1, rules.num_blocks - 1)
            progress.update(sum(done), f"KV {used} %")

        seconds = _clock(target, plan, clock, adjust)
        keys = sim.keys_for(requests, rules)
        pool: dict[str, Any] = {
            "groups": groups[i],
            "in_flight_tokens": plan.engine.max_in_flight_tokens,
            "dense_retention": plan.engine.prefix_cache_retention_interval is None,
            "reserve": reserve,
            "keys": keys,
            "stop": stop,
        }
        run = sim.simulate(requests, rules, seconds, progress=show, **pool)
        itl_s, weights = inter_token_latencies(run)
        result = summary(run, requests, plan.bytes_per_block, slos, allocation)
        band = None
        near = result["queued_share"] > NEAR_SATURATION or result["saturated"]
        short = len(plans) == 1 and len(requests) <= MAX_BAND_REQUESTS and not run.interrupted
        if clock is ClockKind.MODELLED and near and short and result["completed"]:
            share = envelope_for(target.model, target.gpu, plan.engine.filled, adjust).tpot_median

            def ttft(factor: float) -> dict[str, float]:
                end = sim.simulate(requests, rules, stretched(seconds, factor), **pool)
                ends = summary(end, requests, plan.bytes_per_block, (), allocation)
                return {key: value for key, value in ends.items() if key.endswith("_ttft_ms")}

            band = Band(share, ttft(1 - share), ttft(1 + share))
        if band is not None and not stop():
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

    bar = render.Progress("simulate", len(requests) * len(plans), "req", quiet)
    with stopping_on_interrupt() as stop, bar as progress:
        if len(plans) == 1:
            return [simulate(0, progress, stop)]
        with ThreadPoolExecutor(max_workers=2) as pool:
            return list(pool.map(lambda i: simulate(i, progress, stop), range(len(plans))))


def _clock(target: Target, plan: PoolPlan, clock: ClockKind, adjust: Calibration | None) -> Any:
    from kvplan.sim.run import steps_clock
    from kvplan.sim.steptime import clock_for

    if clock is ClockKind.STEPS:
        return steps_clock()
    return clock_for(target.model, target.gpu, plan.engine.filled, adjust)


def _calibration(path: Path | None, clock: ClockKind) -> tuple[Calibration | None, dict[str, Any]]:
    """The factors of `--calibration`, and what they were fitted on."""
    if path is None:
        return None, {}
    if clock is ClockKind.STEPS:
        raise InputError("--calibration has no effect on --clock steps: use one.")
    from kvplan.sim.calibrate import load

    return load(path)


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

        envelope = envelope_for(target.model, target.gpu, plan.engine.filled, adjust)
        said += [envelope.text, *envelope.warnings]
        for name, ours in (("model", target.model.name), ("gpu", target.gpu.name)):
            if fitted_on.get(name, ours) != ours:
                said.append(f"the calibration was fitted on {name} {fitted_on[name]}, this is {ours}")
    else:
        said.append("every step lasts one second: times count steps")
    return said
