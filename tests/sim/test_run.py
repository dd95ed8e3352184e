"""Runs end to end: the seed's examples, conservation, arrivals, refusals, cancel, known simulator bugs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvplan.sched import core
from kvplan.sched.core import Rules
from kvplan.sim.run import Run, reserved_tokens, simulate, steps_clock, stop_lengths
from kvplan.sim.tables import decision_columns, request_columns, request_times, summary, timeline_columns
from kvplan.trace.generate import random_trace, with_arrivals
from kvplan.trace.readers import read_trace
from kvplan.trace.schema import Trace
from tests.conftest import shared_path

RULES = Rules(
    num_blocks=1001, block_size=16, max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=1 << 20,
    chunked_prefill=True, long_prefill_token_threshold=0, lone_request_exempt=True, prefix_caching=True,
    priority=False, watermark_blocks=0, reserve_full_isl=True, unhashed_to_front=True, shift_by_position=True,
    asynchronous=False, max_concurrency=0, record=True,
)  # fmt: skip


def trace_of(prompts: list[int], answers: list[int], arrivals: list[float] | None = None) -> Trace:
    n = len(prompts)
    base = random_trace(n, 1, 1, seed=0, request_rate=float("inf"))
    return replace(
        base,
        input_tokens=np.asarray(prompts, np.int64),
        output_tokens=np.asarray(answers, np.int64),
        arrival_s=np.asarray(arrivals or [0.0] * n),
    )


def statuses(run: Run) -> list[int]:
    return [int(s) for s in run.requests.status]


def assert_conserved(run: Run, trace: Trace) -> None:
    ended = np.isin(
        run.requests.status,
        [core.DONE, core.TOO_LONG, core.NO_ROOM, core.EMPTY, core.CANCELLED, core.TIMED_OUT],
    )
    assert ended.all(), "each request ends in exactly one status"
    assert int(run.count["free"]) == run.rules.num_blocks - 1, "all blocks return"
    assert int(run.count["live_tokens"]) == int(run.count["table_blocks"]) == int(run.count["shared"]) == 0
    done = run.requests.status == core.DONE
    stop = stop_lengths(trace, run.rules.max_model_len)
    assert (run.requests.prompt + run.requests.outputs)[done].tolist() == stop[done].tolist()


# ---------------------------------------------------------------------------------------- the seed's examples


@pytest.mark.parametrize(
    ("allocation", "block_size", "positions", "percent"),
    [("reserve-max:512", 16, 2560, 37.81), ("paged", 16, 992, 97.58), ("paged", 32, 1024, 94.53)],
)
def test_five_lengths(allocation: str, block_size: int, positions: int, percent: float) -> None:
    """37, 91, 128, 201, 511 tokens: sum 968 (TRACE_FORMATS.md, the seed example)."""
    lengths = [37, 91, 128, 201, 511]
    trace = trace_of([n - 1 for n in lengths], [1] * 5)
    rules = RULES._replace(block_size=block_size)
    reserve = reserved_tokens(trace, stop_lengths(trace, 512), allocation, 512)

    result = summary(simulate(trace, rules, steps_clock(), reserve=reserve), trace, 1, (), allocation)

    assert 100 * result["position_utilization"] == pytest.approx(percent, abs=0.005)
    assert round(968 / result["position_utilization"]) == positions


def test_batching_reuses_the_blocks_of_the_one_that_left() -> None:
    """A, B, C run; D joins; B ends; E takes B's blocks; A and C never move (the seed's batching example)."""
    a, b, c, d, e = range(5)
    trace = trace_of([40, 40, 40, 40, 40], [60, 4, 60, 40, 20], [0.0, 0.0, 0.0, 2.0, 6.0])
    run = simulate(trace, RULES._replace(num_blocks=40, prefix_caching=False), steps_clock())

    columns = decision_columns(run)

    def at(name: str, k: int) -> list[int]:
        offsets, values = columns[name]
        return values[offsets[k] : offsets[k + 1]].tolist()

    steps = columns["step"].tolist()
    first = at("alloc_block_ids", 0)  # three tables of three blocks: A, B, C
    assert first == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert at("new", steps.index(2)) == [d]
    assert b in at("finished", steps.index(3))
    joined = steps.index(6)
    assert at("new", joined) == [e]
    assert set(at("alloc_block_ids", joined)[:3]) & {4, 5, 6}, "E gets blocks that B gave back"
    moved = [k for k in range(1, len(steps)) if {a, c} & set(at("preempted", k) + at("resumed", k))]
    assert moved == [], "A and C keep their blocks to the end"
    assert_conserved(run, trace)


# ------------------------------------------------------------------------------------------------ real traces


AZURE, MOONCAKE = "AzureLLMInferenceTrace_conv_2023.csv", "mooncake_conversation_trace.jsonl"
U_AZURE = [0.99745, 0.99456, 0.98878, 0.97794, 0.95624, 0.91983]
U_MOONCAKE = [0.99972, 0.99940, 0.99876, 0.99746, 0.99488, 0.98986]


@pytest.mark.parametrize(
    ("name", "expected", "pow2", "longest"),
    [(AZURE, U_AZURE, 0.65423, 0.09694), (MOONCAKE, U_MOONCAKE, 0.69640, 0.09783)],
)
def test_utilization_of_public_traces(name: str, expected: list[float], pow2: float, longest: float) -> None:
    """U_B at 8 to 256 and the two reservations: TRACE_FORMATS.md, computed independently."""
    from kvplan.results.metrics import position_utilization

    trace = read_trace(str(shared_path("traces", name)))
    tokens = trace.input_tokens + trace.output_tokens

    got = [position_utilization(tokens, size) for size in (8, 16, 32, 64, 128, 256)]
    reserved = [
        reserved_tokens(trace, tokens, kind, 1 << 20).sum()
        for kind in ("reserve-pow2", "reserve-max:longest")
    ]

    assert got == pytest.approx(expected, abs=5e-6)
    assert [tokens.sum() / total for total in reserved] == pytest.approx([pow2, longest], abs=5e-6)


def test_whole_mooncake_trace_is_conserved() -> None:
    """All 12,031 requests end, all blocks return; token totals are those of TRACE_FORMATS.md."""
    trace = read_trace(str(shared_path("traces", "mooncake_conversation_trace.jsonl")))
    assert (int(trace.input_tokens.sum()), int(trace.output_tokens.sum())) == (144_793_823, 4_122_048)

    run = simulate(trace, RULES._replace(num_blocks=60_000, max_num_seqs=256, record=False), steps_clock())

    assert_conserved(run, trace)
    assert int(run.requests.outputs.sum()) == 4_122_048
    assert 0 < run.count["hits"] < 0.3664 * run.count["queries"], "below the rate of a cache without limit"


# ------------------------------------------------------------------------------------- refusals and endings


def test_a_request_that_can_never_fit_is_rejected_with_its_reason() -> None:
    trace = trace_of([100, 5000, 100], [10, 10, 10])
    run = simulate(trace, RULES._replace(num_blocks=101, prefix_caching=False), steps_clock())

    columns = request_columns(run, trace)

    assert columns["status"] == ["finished", "rejected_oom", "finished"]
    assert columns["reason"] == [None, "needs 314 blocks of 16 tokens, the pool has 100", None]
    assert_conserved(run, trace)


def test_a_prompt_of_max_model_len_is_rejected() -> None:
    run = simulate(trace_of([64, 63], [5, 5]), RULES._replace(max_model_len=64), steps_clock())
    assert statuses(run) == [core.TOO_LONG, core.DONE]
    assert int(run.requests.outputs[1]) == 1, "prompt and output together reach max_model_len, not more"


def test_without_chunked_prefill_a_prompt_above_the_budget_does_not_hang() -> None:
    rules = RULES._replace(chunked_prefill=False, max_num_batched_tokens=64)
    run = simulate(trace_of([200, 50], [5, 5]), rules, steps_clock())
    assert statuses(run) == [core.NO_ROOM, core.DONE]


def test_cancel_and_deadline_free_blocks_and_are_told_apart() -> None:
    base = trace_of([100] * 3, [50] * 3)
    nan = np.nan
    trace = replace(
        base, cancel_after_s=np.asarray([10.0, nan, nan]), deadline_s=np.asarray([nan, 20.0, nan])
    )

    for asynchronous in (False, True):
        run = simulate(trace, RULES._replace(asynchronous=asynchronous), steps_clock())

        assert statuses(run) == [core.CANCELLED, core.TIMED_OUT, core.DONE]
        assert 0 < run.requests.outputs[0] < run.requests.outputs[1] < 50
        assert_conserved(run, trace)


def test_cancel_while_waiting() -> None:
    base = trace_of([100] * 3, [50] * 3)
    trace = replace(base, cancel_after_s=np.asarray([np.nan, 5.0, np.nan]))
    for priority in (False, True):
        run = simulate(trace, RULES._replace(max_num_seqs=1, priority=priority), steps_clock())
        assert statuses(run) == [core.DONE, core.CANCELLED, core.DONE]
        assert_conserved(run, trace)


# -------------------------------------------------------------------------------------- arrivals and clocks


def test_closed_loop_never_exceeds_its_concurrency() -> None:
    trace = random_trace(200, 300, 40, seed=3, range_ratio=0.5, request_rate=float("inf"))
    run = simulate(trace, RULES._replace(max_concurrency=7), steps_clock())

    rows = {name: run.rows[:, i] for i, name in enumerate(core.STEP_COLUMNS)}
    assert (rows["running"] + rows["waiting"]).max() == 7
    assert (np.diff(run.requests.arrived_s) >= 0).all()
    assert_conserved(run, trace)


def test_poisson_arrivals_have_the_asked_rate_and_burstiness() -> None:
    trace = random_trace(100_000, 10, 10, seed=1)
    for shape in (1.0, 0.25):
        gaps = np.diff(with_arrivals(trace, 30.0, shape, seed=1).arrival_s)
        assert gaps.mean() == pytest.approx(1 / 30, rel=0.02)
        assert gaps.std() / gaps.mean() == pytest.approx(shape**-0.5, rel=0.03)  # gamma: cv = shape^-1/2


def test_the_timeline_sums_to_the_pool() -> None:
    trace = random_trace(300, 400, 60, seed=2, range_ratio=0.9, request_rate=2.0)
    run = simulate(trace, RULES._replace(num_blocks=301), steps_clock())

    t = timeline_columns(run)

    assert (t["used_blocks"] + t["cached_blocks"] + t["free_blocks"] == 300).all()
    assert (t["live_tokens"] <= t["used_blocks"] * 16).all()
    assert t["preemptions"][-1] == run.count["preemptions"]
    s = summary(run, trace, 160)
    parts = ("kv_effective_bytes", "tail_waste_bytes", "kv_cached_bytes", "free_bytes")
    assert sum(s[key] for key in parts) == pytest.approx(s["pool_bytes"])


def test_one_token_gap_per_output_after_the_first() -> None:
    """ITL counts every gap once: answers of k tokens have k - 1, preempted ones too."""
    trace = random_trace(60, 200, 80, seed=5, request_rate=1.0)
    for asynchronous in (False, True):
        run = simulate(trace, RULES._replace(num_blocks=61, asynchronous=asynchronous), steps_clock())
        assert int(run.count["preemptions"]) > 0
        assert int(run.itl.sum()) == int((run.requests.outputs - 1).sum())
        t = request_times(run)
        assert run.count["itl_sum"] == pytest.approx(float((t.finish_s - t.first_token_s).sum()))


def test_a_run_in_small_pieces_is_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = random_trace(100, 300, 50, seed=4, range_ratio=0.9, request_rate=1.0)
    rules = RULES._replace(num_blocks=121)
    whole = simulate(trace, rules, steps_clock())
    monkeypatch.setattr("kvplan.sim.run.STEPS_PER_CALL", 7)

    pieces = simulate(trace, rules, steps_clock())

    assert np.array_equal(whole.rows, pieces.rows)
    assert whole.requests.tobytes() == pieces.requests.tobytes()


def test_a_pause_of_two_days_is_empty_in_the_timeline() -> None:
    """Steps alone would show the last request running for two days; all blocks are back by then."""
    day_s = 86_400.0
    trace = trace_of([1000, 1000], [10, 10], [0.0, 2 * day_s])
    for asynchronous in (False, True):
        run = simulate(trace, RULES._replace(record=False, asynchronous=asynchronous), steps_clock())
        t = timeline_columns(run)
        at = int(np.searchsorted(t["time_s"], day_s, side="right")) - 1
        assert (t["running"][at], t["waiting"][at], t["used_blocks"][at], t["live_tokens"][at]) == (
            0,
            0,
            0,
            0,
        )
        # 1,000 + 10 tokens, the last one never computed: 63 full blocks of 16
        assert t["cached_blocks"][at] == 63
        assert t["time_s"][at + 1] == 2 * day_s
        assert (t["used_blocks"][-1], t["cached_blocks"][-1]) == (0, 126)
        off = simulate(trace, RULES._replace(record=False, prefix_caching=False), steps_clock())
        assert timeline_columns(off)["cached_blocks"].max() == 0


def test_a_long_run_keeps_its_pauses_when_rows_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplan.sim.run.MAX_TIMELINE_ROWS", 300)
    monkeypatch.setattr("kvplan.sim.run.STEPS_PER_CALL", 50)
    trace = trace_of([100] * 20, [200] * 20, [1000.0 * i for i in range(20)])
    run = simulate(trace, RULES._replace(record=False), steps_clock())
    t = timeline_columns(run)
    assert run.row_stride > 1
    assert len(t["time_s"]) <= 400
    busy = float((t["running"][:-1] * np.diff(t["time_s"])).sum())
    assert busy == pytest.approx(20 * 200, rel=0.1), "20 requests of 200 steps, 800 s apart"


def test_means_are_from_the_first_arrival() -> None:
    """One request that arrives at 0.9 s: it runs during the whole run, not during a part of a second."""
    trace = trace_of([100], [50], [0.9])
    clock = steps_clock()._replace(fixed_step_s=0.0, linear_s=np.full(3000, 1e-3))
    run = simulate(trace, RULES._replace(record=False), clock)
    assert summary(run, trace, 1)["mean_running"] == pytest.approx(1.0)


def test_stop_ends_a_run_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplan.sim.run.STEPS_PER_CALL", 100)
    trace = trace_of([100] * 50, [60] * 50, [10.0 * i for i in range(50)])
    run = simulate(trace, RULES._replace(record=False), steps_clock(), stop=lambda: True)
    s = summary(run, trace, 1)
    assert s["interrupted"] is True
    assert 0 < s["completed"] < 50
    assert s["completed"] + s["unfinished"] == 50


# --------------------------------------------------- bugs of other simulators (USERS_ASK.md, ten bugs, 1-10)


def constrained(n: int, prompt: int, answer: int, blocks: int, **rules: Any) -> tuple[Run, Trace]:
    trace = trace_of([prompt] * n, [answer] * n)
    run = simulate(trace, RULES._replace(num_blocks=blocks, record=False, **rules), steps_clock())
    assert_conserved(run, trace)
    return run, trace


def test_preemption_never_raises_throughput() -> None:
    """inference-sim#1121: freed blocks of preempted requests stayed hits, and a small pool was faster."""
    scarce, _ = constrained(256, 500, 200, 1 + 68 * 44, max_num_seqs=256)
    ample, _ = constrained(256, 500, 200, 1 + 256 * 44, max_num_seqs=256)
    assert int(scarce.count["preemptions"]) > 0 == int(ample.count["preemptions"])
    assert scarce.count["now"] > ample.count["now"]


def test_tiny_pool_ends() -> None:
    """inference-sim#297: under 1,000 blocks, 512-token requests, 200 at once: never ended."""
    run, _ = constrained(200, 512, 64, 999)
    assert (run.requests.status == core.DONE).all()


def test_a_long_chunked_prompt_does_not_evict_itself_for_ever() -> None:
    """inference-sim#1057: a chunked request of about 554 blocks evicted itself 597 times."""
    trace = trace_of([100] * 50 + [8850], [300] * 50 + [10])
    run = simulate(
        trace, RULES._replace(num_blocks=601, max_num_batched_tokens=512, record=False), steps_clock()
    )
    assert_conserved(run, trace)
    assert int(run.requests.preemptions[-1]) <= 3


def test_a_full_pool_with_long_answers_goes_on() -> None:
    """inference-sim#529: multi-turn and long output, pool completely full: the second phase never ran."""
    run, _ = constrained(8, 16, 1500, 101, max_num_seqs=8)
    assert (run.requests.status == core.DONE).all()
    assert int(run.count["peak_used"]) == 100


def test_the_first_pass_computes_both_prompts() -> None:
    """aisimulate#285: prompts of 4 and 8 under a budget of 8: the first pass must compute 8 tokens, not 4."""
    run = simulate(trace_of([4, 8], [2, 2]), RULES._replace(max_num_batched_tokens=8), steps_clock())
    offsets, tokens = decision_columns(run)["sched_tok"]
    assert tokens[: offsets[1]].tolist() == [4, 4]


def test_caching_off_keeps_a_request_across_preemption() -> None:
    """dynamo PR 8451: with prefix caching off a preempted request lost its identity."""
    run, _ = constrained(20, 200, 200, 151, prefix_caching=False)
    assert int(run.count["preemptions"]) > 0
    assert int(run.count["resumed_hits"]) == 0


def test_a_fully_cached_prompt_computes_one_block_and_does_not_stall() -> None:
    """dynamo PR 10919: the last block is always computed anew (rule 5.6)."""
    base = trace_of([160, 160], [4, 4], [0.0, 10.0])
    trace = replace(
        base,
        segment_offsets=np.asarray([0, 1, 2]),
        segment_stream=np.asarray([7, 7]),
        segment_start=np.zeros(2, np.int64),
        segment_length=np.full(2, 160),
    )
    run = simulate(trace, RULES, steps_clock())
    assert int(run.requests.hit[1]) == 144
    assert_conserved(run, trace)


def test_an_empty_prompt_is_rejected_and_does_not_hang() -> None:
    """7.9 % of BurstGPT's rows are failures with 0 tokens (TRACE_FORMATS.md): kept, counted, not run."""
    for asynchronous in (False, True):
        trace = trace_of([4, 0, 5], [2, 0, 2])
        run = simulate(trace, RULES._replace(asynchronous=asynchronous), steps_clock())
        assert request_columns(run, trace)["status"] == ["finished", "rejected_empty", "finished"]
        assert int(run.count["rejected"]) == 1
