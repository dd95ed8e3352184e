"""Any configuration on any load comes to an end: nothing hangs, is lost or is left behind.

Coarser and larger than tests/sched/test_core_reference.py: whole runs through `simulate`, on the modelled
clock too, closed loops, cancels and deadlines, reservations, both loops. What must hold is counted from the
requests and the timeline, independently of the core's own sums.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from kvplan.sched import core
from kvplan.sched.core import Clock, Rules
from kvplan.sim.run import Run, reserved_tokens, simulate, steps_clock, stop_lengths
from kvplan.sim.tables import request_columns, request_times, summary, timeline_columns
from kvplan.trace.schema import NO_STREAM, Provenance, Trace

EXAMPLES = int(os.environ.get("KVPLAN_RUNS", "240"))


def modelled(rng: np.random.Generator) -> Clock:
    """Step times of a plausible size: milliseconds, growing with tokens, rows and context."""
    return steps_clock()._replace(
        linear_s=2e-3 + 1e-5 * np.arange(4097), head_s=1e-4 + 1e-6 * np.arange(257), fixed_step_s=0.0,
        decode_kv_s=1e-8, prefill_pair_s=1e-10, cpu_s=1e-3, cpu_per_request_s=1e-5, update_s=2e-4,
        update_per_request_s=1e-6, launch_s=3e-4, ttft_s=float(rng.choice([0.0, 0.01])),
    )  # fmt: skip


def random_load(rng: np.random.Generator) -> Trace:
    """Up to 400 requests: bursts and long pauses, shared prefixes, tenants, priorities, impatience."""
    n = int(rng.integers(1, 400))
    longest = int(rng.choice([8, 100, 1000]))
    prompts = rng.integers(1, longest + 1, n)
    gaps = (
        rng.exponential(1.0, n)
        * (rng.random(n) < rng.choice([0.0, 0.3, 1.0]))
        * rng.choice([0.01, 0.01, 1, 5000])
    )
    shared = rng.random(n) < rng.choice([0.0, 0.7])
    has = np.flatnonzero(shared)
    impatient = rng.choice([0.0, 0.4])

    def patience() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.where(rng.random(n) < impatient, rng.exponential(3.0, n), np.nan)

    return Trace(
        request_id=[f"r{i}" for i in range(n)],
        arrival_s=np.cumsum(gaps) + rng.random(),
        input_tokens=prompts,
        output_tokens=rng.integers(0, int(rng.choice([2, 60, 300, 300])), n),
        segment_offsets=np.concatenate([[0], np.cumsum(shared)]),
        segment_stream=rng.integers(0, 4, len(has)),
        segment_start=np.zeros(len(has), np.int64),
        segment_length=prompts[has],
        output_stream=np.full(n, NO_STREAM, np.int64),
        tenant_id=rng.integers(0, 2, n),
        tenant_names=["a", "b"],
        priority=rng.integers(0, 3, n),
        samples=np.ones(n, np.int64),
        cancel_after_s=patience(),
        deadline_s=patience(),
        session_id=np.full(n, -1, np.int64),
        turn=np.zeros(n, np.int64),
        think_s=np.zeros(n),
        provenance=Provenance("constructed", "random", "random"),
    )


def random_rules(rng: np.random.Generator, trace: Trace, allocation: str) -> Rules:
    """Pools from one block to many times the longest request; most are scarce."""
    seqs = int(rng.choice([1, 8, 16, 128]))
    chunked = bool(rng.random() < 0.8)
    block_size = int(rng.choice([1, 4, 16, 64]))
    longest = -(-int((trace.input_tokens + trace.output_tokens).max()) // block_size)
    return Rules(
        num_blocks=1 + int(longest * rng.choice([0.0, 0.6, 1, 1.2, 1.5, 2, 3, 5, 100])),
        block_size=block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=int(max(seqs, rng.choice([1, 16, 300, 2048]))),
        max_model_len=int(rng.choice([50, 700, 1 << 20, 1 << 20])),
        chunked_prefill=chunked,
        long_prefill_token_threshold=int(rng.choice([0, 0, 40])) if chunked else 0,
        lone_request_exempt=bool(rng.random() < 0.5),
        prefix_caching=allocation == "paged" and bool(rng.random() < 0.7),
        priority=bool(rng.random() < 0.4),
        watermark_blocks=int(rng.choice([0, 0, 1, 3])),
        reserve_full_isl=bool(rng.random() < 0.5),
        unhashed_to_front=bool(rng.random() < 0.5),
        shift_by_position=bool(rng.random() < 0.5),
        asynchronous=bool(rng.random() < 0.5),
        max_concurrency=int(rng.choice([0, 0, 0, 0, 1, 20])),
        record=False,
    )


def check(run: Run, trace: Trace, allocation: str) -> None:
    rules, r = run.rules, run.requests
    done = r.status == core.DONE
    ends = [core.DONE, core.TOO_LONG, core.NO_ROOM, core.CANCELLED, core.TIMED_OUT]

    assert np.isin(r.status, ends).all(), "each request ends in exactly one status"
    assert int(run.count["free"]) == rules.num_blocks - 1, "all blocks return"
    for left in ("live", "running", "n_waiting", "flights", "table_blocks", "shared", "live_tokens"):
        assert int(run.count[left]) == 0, left
    stop = stop_lengths(trace, rules.max_model_len)
    assert ((r.prompt + r.outputs)[done] == stop[done]).all(), "whole answers"
    assert (r.outputs[~done] < np.maximum(1, stop - r.prompt)[~done]).all()
    assert (np.isnan(r.first_token_s) == (r.outputs == 0)).all()
    impatient = np.isin(r.status, [core.CANCELLED, core.TIMED_OUT])
    assert not impatient[np.isinf(r.patience_s)].any(), "only who had a limit gives up"

    # Times are in order, and nothing is faster than its steps.
    t = request_times(run)
    assert (t.arrival_s >= trace.arrival_s).all()
    assert (t.first_scheduled_s >= t.arrival_s)[done].all()
    assert (t.first_token_s > t.first_scheduled_s)[done].all()
    assert (t.finish_s >= t.first_token_s)[done].all()

    # The timeline: a whole pool in every row, limits kept, and its means are the summary's.
    line = timeline_columns(run)
    usable = rules.num_blocks - 1
    assert (line["used_blocks"] + line["cached_blocks"] + line["free_blocks"] == usable).all()
    assert min(line[name].min(initial=0) for name in ("used_blocks", "cached_blocks", "free_blocks")) >= 0
    assert line["running"].max(initial=0) <= rules.max_num_seqs
    assert line["scheduled_tokens"].max(initial=0) <= rules.max_num_batched_tokens
    assert (np.diff(line["time_s"]) >= 0).all()
    if rules.max_concurrency:
        assert (line["running"] + line["waiting"]).max(initial=0) <= rules.max_concurrency
    s = summary(run, trace, 64, (), allocation)
    assert s["completed"] + s["rejected"] + s["cancelled"] + s["timed_out"] == len(trace)
    assert s["preemptions"] == int(r.preemptions.sum())
    assert s["peak_blocks"] == line["used_blocks"].max(initial=0)
    if len(line["time_s"]) > 1 and run.count["time_total"] > 0:
        dt = np.diff(line["time_s"])
        for name, key in (("running", "mean_running"), ("waiting", "mean_waiting")):
            area = float((line[name][:-1] * dt).sum())
            assert area == pytest.approx(s[key] * run.count["time_total"], rel=1e-6, abs=1e-6), key
        parts = (
            "kv_effective_bytes",
            "tail_waste_bytes",
            "reserved_unused_bytes",
            "kv_cached_bytes",
            "free_bytes",
        )
        assert sum(s[part] for part in parts) == pytest.approx(s["pool_bytes"])
    columns = request_columns(run, trace)
    rejected = np.isin(r.status, [core.TOO_LONG, core.NO_ROOM])
    assert [reason is not None for reason in columns["reason"]] == rejected.tolist()


def test_no_configuration_hangs_or_loses_a_request_or_a_block() -> None:
    scarce = 0
    for seed in range(EXAMPLES):
        rng = np.random.default_rng(seed)
        trace = random_load(rng)
        allocation = str(rng.choice(["paged"] * 5 + ["reserve-max:300", "reserve-pow2", "reserve-oracle"]))
        rules = random_rules(rng, trace, allocation)
        clock = modelled(rng) if rng.random() < 0.6 else steps_clock()
        reserve = reserved_tokens(trace, stop_lengths(trace, rules.max_model_len), allocation, 300)
        calls = 0

        def too_long() -> bool:
            nonlocal calls
            calls += 1
            return calls > 200  # 819,200 steps; the longest of these loads has 120,000 tokens

        run = simulate(trace, rules, clock, reserve=reserve, stop=too_long)

        try:
            assert not run.interrupted, "it ends"
            check(run, trace, allocation)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {allocation}, {rules}: {error}") from error
        scarce += run.count["preemptions"] > 0
    assert scarce > EXAMPLES / 10, "the loads do strain the pools"


def test_a_larger_pool_is_never_slower_on_its_own_load() -> None:
    """All at once, first come first served, no sharing: the makespan falls as blocks are added."""
    rng = np.random.default_rng(11)
    trace = replace(random_load(rng), arrival_s=np.zeros(1), provenance=Provenance("constructed", "x", "x"))
    n = 200
    base = replace(
        trace, request_id=[str(i) for i in range(n)], arrival_s=np.zeros(n),
        input_tokens=rng.integers(1, 600, n), output_tokens=rng.integers(1, 200, n),
        segment_offsets=np.zeros(n + 1, np.int64), segment_stream=np.zeros(0, np.int64),
        segment_start=np.zeros(0, np.int64), segment_length=np.zeros(0, np.int64),
        output_stream=np.full(n, NO_STREAM, np.int64), tenant_id=np.zeros(n, np.int64),
        priority=np.zeros(n, np.int64), samples=np.ones(n, np.int64), cancel_after_s=np.full(n, np.nan),
        deadline_s=np.full(n, np.nan), session_id=np.full(n, -1, np.int64), turn=np.zeros(n, np.int64),
        think_s=np.zeros(n),
    )  # fmt: skip
    rules = random_rules(rng, base, "reserve")._replace(
        block_size=16, max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=1 << 20, priority=False,
        watermark_blocks=0, max_concurrency=0, chunked_prefill=True, long_prefill_token_threshold=0,
        asynchronous=False,
    )  # fmt: skip
    runs = [simulate(base, rules._replace(num_blocks=b), modelled(rng)) for b in (101, 400, 1600, 12_801)]
    times = [run.count["now"] for run in runs]
    assert times == sorted(times, reverse=True)
    assert runs[0].count["preemptions"] > runs[-1].count["preemptions"] == 0
