"""Rules that the records do not notice, each from the text (SCHEDULER_RULES.md), older releases included."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from kvplan.sched.core import Rules
from kvplan.sim.rules import rules_for
from kvplan.sim.run import Run, simulate, steps_clock
from kvplan.sim.tables import decision_columns
from kvplan.spec.catalogue import DEFAULT_GPU, DEFAULT_MODEL, find_gpu, find_model
from kvplan.spec.engine import EngineSettings, resolve
from kvplan.trace.schema import Trace
from tests.sim.test_run import RULES, trace_of


def lists(run: Run, name: str) -> list[list[int]]:
    offsets, values = decision_columns(run)[name]
    return [values[a:b].tolist() for a, b in pairwise(offsets)]


def with_priorities(trace: Trace, priorities: list[int]) -> Trace:
    return replace(trace, priority=np.asarray(priorities, np.int64))


# ------------------------------------------------------------------------------------- 6.2: the free queue


def test_unhashed_blocks_go_to_the_front_since_0_26_and_to_the_end_before() -> None:
    """One request of 3 blocks, the last one partial, in a pool of 6: where its tail block stands."""
    trace = trace_of([40], [2])
    rules = RULES._replace(num_blocks=7)

    new = lists(simulate(trace, rules, steps_clock()), "free_head8")[-1]
    old = lists(simulate(trace, rules._replace(unhashed_to_front=False), steps_clock()), "free_head8")[-1]

    assert new == [3, 4, 5, 6, 2, 1], "tail block first, then never used ones, then hashed ones tail first"
    assert old == [4, 5, 6, 3, 2, 1], "everything appended, tail first"


# ---------------------------------------------------------------------- 2.3: the threshold and a lone request


@pytest.mark.parametrize(("exempt", "chunks"), [(True, [100]), (False, [30, 30, 30, 10])])
def test_a_lone_request_may_pass_the_threshold_in_0_32_only(exempt: bool, chunks: list[int]) -> None:
    rules = RULES._replace(long_prefill_token_threshold=30, lone_request_exempt=exempt)
    run = simulate(trace_of([100], [1]), rules, steps_clock())
    assert lists(run, "sched_tok") == [[n] for n in chunks]


def test_the_threshold_caps_every_prompt_as_soon_as_there_are_two() -> None:
    rules = RULES._replace(long_prefill_token_threshold=30)
    run = simulate(trace_of([100, 50], [1, 1]), rules, steps_clock())
    assert lists(run, "sched_tok")[:2] == [[30, 30], [30, 20]]


# -------------------------------------------------------------------- 3: whole-prompt check and the watermark


@pytest.mark.parametrize(("reserve", "admitted"), [(True, [0]), (False, [0, 1])])
def test_the_whole_prompt_must_fit_at_admission(reserve: bool, admitted: list[int]) -> None:
    """Two prompts of 10 blocks, a pool of 11, chunks of 32: the second fits by its first chunk only."""
    rules = RULES._replace(
        num_blocks=12, max_num_batched_tokens=64, long_prefill_token_threshold=32, reserve_full_isl=reserve
    )
    run = simulate(trace_of([160, 160], [1, 1]), rules, steps_clock())
    assert lists(run, "running")[0] == admitted


def test_the_check_reserves_nothing() -> None:
    """Several prefills may pass the check on the same free blocks (3.1): 3 x 10 blocks in a pool of 20."""
    rules = RULES._replace(num_blocks=21, max_num_batched_tokens=64, long_prefill_token_threshold=16)
    run = simulate(trace_of([160] * 3, [1] * 3), rules, steps_clock())
    assert lists(run, "running")[0] == [0, 1, 2]


@pytest.mark.parametrize(("watermark", "admitted"), [(0, [0, 1]), (3, [0])])
def test_the_watermark_holds_back_admissions_beside_others_only(watermark: int, admitted: list[int]) -> None:
    """Two prompts of 4 blocks in a pool of 10: 2 would be left."""
    run = simulate(
        trace_of([64, 64], [5, 5]), RULES._replace(num_blocks=11, watermark_blocks=watermark), steps_clock()
    )
    assert lists(run, "running")[0] == admitted


def test_the_watermark_does_not_apply_when_nothing_runs() -> None:
    run = simulate(trace_of([150], [2]), RULES._replace(num_blocks=11, watermark_blocks=5), steps_clock())
    assert lists(run, "new")[0] == [0]


# ------------------------------------------------------------------------- 4: victims under priority and FCFS


def test_no_admission_in_a_step_with_a_preemption() -> None:
    run = simulate(trace_of([30] * 6, [60] * 6), RULES._replace(num_blocks=14), steps_clock())
    new, resumed, preempted = (lists(run, name) for name in ("new", "resumed", "preempted"))
    assert any(preempted)
    for k, victims in enumerate(preempted):
        assert not (victims and (new[k] or resumed[k]))


def test_a_scheduled_victim_gives_its_tokens_back() -> None:
    """Priority: the worst request, first in the list, was scheduled and loses its place again (4.3)."""
    trace = with_priorities(trace_of([16, 16, 16], [40, 40, 40]), [2, 1, 0])
    run = simulate(trace, RULES._replace(num_blocks=8, priority=True), steps_clock())
    preempted, scheduled = lists(run, "preempted"), lists(run, "sched_req")
    first = next(k for k, victims in enumerate(preempted) if victims)
    assert preempted[first] == [0]
    assert 0 not in scheduled[first]


def test_the_index_moves_back_for_any_earlier_victim_since_0_29() -> None:
    """4.3 by release. Request 0 (worst) is passed over, its last output in flight, when the pool runs out.

    It stands before the current index and is not scheduled: since 0.29 the index moves back by one, and
    request 2 runs in this step too; up to 0.26 it is skipped over.
    """
    trace = with_priorities(trace_of([4, 1, 3], [4, 5, 5], [1.0, 4.0, 4.0]), [2, 1, 0])
    rules = RULES._replace(
        num_blocks=12, block_size=1, max_num_seqs=4, max_num_batched_tokens=16, priority=True,
        asynchronous=True, prefix_caching=False,
    )  # fmt: skip

    new = simulate(trace, rules, steps_clock())
    old = simulate(trace, rules._replace(shift_by_position=False), steps_clock())

    k = next(k for k, victims in enumerate(lists(new, "preempted")) if victims)
    assert lists(new, "preempted")[k] == lists(old, "preempted")[k] == [0]
    assert len(lists(new, "sched_req")[k]) == len(lists(old, "sched_req")[k]) + 1


# ----------------------------------------------------------------------------------------- 1.3: two in flight


def test_async_returns_blocks_one_step_later_and_wastes_no_step() -> None:
    sync = simulate(trace_of([20], [5]), RULES, steps_clock())
    two = simulate(trace_of([20], [5]), RULES._replace(asynchronous=True), steps_clock())
    assert [len(x) for x in lists(sync, "sched_req")] == [1] * 5
    assert [len(x) for x in lists(two, "sched_req")] == [1] * 5 + [0], "the last call only delivers"
    assert lists(two, "finished")[-1] == [0]


# --------------------------------------------------------------------------------------- 9: releases are data


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.11.2", (False, False, False, False, False, 0)),
        ("0.19.0", (False, False, False, True, True, 0)),
        ("0.22.1", (False, False, False, True, True, 0)),
        ("0.26.0", (False, True, False, True, True, 10)),
        ("0.29.0", (False, True, True, True, True, 10)),
        ("0.32.0", (True, True, True, True, True, 10)),
    ],
)
def test_rules_by_release(version: str, expected: tuple[bool | int, ...]) -> None:
    """Section 9: lone exemption, front of the queue, index shift, whole-prompt check, async, watermark."""
    watermark = 0.01 if expected[-1] else 0.0
    settings = EngineSettings(engine_version=version, watermark=watermark)
    engine = resolve(settings, find_model(DEFAULT_MODEL).spec, find_gpu(DEFAULT_GPU))
    rules: Rules = rules_for(engine, 1000, 16)
    assert (
        rules.lone_request_exempt,
        rules.unhashed_to_front,
        rules.shift_by_position,
        rules.reserve_full_isl,
        rules.asynchronous,
        rules.watermark_blocks,
    ) == expected
