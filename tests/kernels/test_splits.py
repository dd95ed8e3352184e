"""How decode work is cut: properties of the split rule and of work plans. No torch needed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.kernels.splits import (
    CANDIDATES,
    MAX_SPLITS,
    MIN_PART_TOKENS,
    choose_num_splits,
    plan_work,
    split_cost_tokens,
)

H200_SMS = 132


def test_a_full_grid_of_equal_rows_is_not_split() -> None:
    """Given 33 rows x 8 KV heads on 132 SMs x 2 programs, exactly one wave, expected: 1 split."""
    assert choose_num_splits(33, 8, 8192, H200_SMS) == 1


def test_one_long_sequence_fills_the_gpu() -> None:
    """Given 1 row x 8 KV heads of 32k tokens, expected: enough programs for every SM."""
    assert choose_num_splits(1, 8, 32768, H200_SMS) * 8 >= H200_SMS


def test_short_sequences_are_not_split() -> None:
    """Given at most MIN_PART_TOKENS tokens, expected: 1, however empty the GPU."""
    assert choose_num_splits(1, 1, MIN_PART_TOKENS, H200_SMS) == 1


@pytest.mark.parametrize("batch", [12, 16, 24, 32])
def test_mid_batches_of_long_context_are_split(batch: int) -> None:
    """Given 12 to 32 rows of 32k and 2 KV heads (a TP4 share), expected: more than 1 split.

    A rule that looks only at batch x KV heads stops splitting from batch 12 on (vLLM issue 48076) and leaves
    most SMs idle.
    """
    assert choose_num_splits(batch, 2, 32768, H200_SMS) * batch * 2 >= H200_SMS


@given(st.integers(1, 300), st.integers(1, 16), st.integers(1, 200_000), st.integers(1, 200))
def test_choice_is_cheapest_within_tolerance(batch: int, kv_heads: int, longest: int, sms: int) -> None:
    """Given any shape, expected: 1 to 128 splits whose cost is within 2 % of the best that was allowed."""
    chosen = choose_num_splits(batch, kv_heads, longest, sms)
    assert 1 <= chosen <= MAX_SPLITS
    most = max(1, min(MAX_SPLITS, longest // MIN_PART_TOKENS))
    costs = {
        n: split_cost_tokens(n, longest, batch * longest, kv_heads, 2 * sms) for n in CANDIDATES if n <= most
    }
    if longest > MIN_PART_TOKENS:
        assert costs[chosen] <= min(costs.values()) * 1.02


LENGTHS = st.lists(st.one_of(st.just(0), st.integers(1, 200), st.integers(1, 40_000)), max_size=40)


@given(LENGTHS, st.sampled_from([1, 2, 8]), st.sampled_from([4, 132]), st.sampled_from([0, 1, 1000]))
def test_plan_covers_every_visible_tile_once(lens: list[int], kv_heads: int, sms: int, window: int) -> None:
    """Given any lengths, expected: each row's visible tiles in order, once; parts numbered and counted."""
    tile = 64
    plan = plan_work(lens, kv_heads, sms, tile=tile, window=window)
    items = plan.items.tolist()
    starts = plan.packed[: plan.workers + 1].tolist()
    assert starts[0] == 0
    assert starts[-1] == len(items)
    assert starts == sorted(starts)
    part_start = plan.packed[plan.workers + 1 : plan.workers + 2 + len(lens)].tolist()
    parts = 0
    for row, n in enumerate(lens):
        mine = [item for item in items if item[0] == row]
        first = max(n - window, 0) // tile if window else 0
        edges = [first, *(item[2] for item in mine)]
        assert [item[1] for item in mine] == edges[:-1]
        assert edges[-1] == -(-n // tile)
        if len(mine) == 1:
            assert mine[0][3] == -1
        else:
            assert [item[3] for item in mine] == list(range(parts, parts + len(mine)))
            assert min(item[2] - item[1] for item in mine) >= MIN_PART_TOKENS // tile
            parts += len(mine)
        assert part_start[row + 1] == parts
    assert len(items) <= plan.capacity


@given(st.lists(st.integers(1, 60_000), min_size=1, max_size=64))
def test_plan_shares_are_equal(lens: list[int]) -> None:
    """Given skewed lengths, expected: no worker has more than an equal share and one smallest part extra."""
    plan = plan_work(lens, 8, H200_SMS)
    starts = plan.packed[: plan.workers + 1].tolist()
    loads = [
        sum(int(item[2] - item[1]) for item in plan.items[begin:end])
        for begin, end in itertools.pairwise(starts)
    ]
    least = MIN_PART_TOKENS // plan.tile
    fair = max(-(-sum(loads) // plan.workers), least)
    assert max(loads) <= fair + 2 * least
