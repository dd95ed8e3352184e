"""Statistics of timings and how often data is copied, without a device."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.bench import timing

SECONDS = st.floats(1e-6, 10, allow_nan=False)


@given(st.lists(SECONDS, min_size=1, max_size=50))
def test_median_p20_p80_are_those_of_numpy(samples: list[float]) -> None:
    found = timing.summarise(samples)
    expected = np.quantile(samples, [0.2, 0.5, 0.8])
    np.testing.assert_allclose([found.p20_s, found.median_s, found.p80_s], expected, rtol=1e-12)
    assert found.repeats == len(samples)


def test_no_samples_is_an_error_not_a_zero() -> None:
    with pytest.raises(ValueError, match="no samples"):
        timing.summarise([])


@pytest.mark.parametrize(
    ("data_mb", "cache_mb", "copies"),
    [
        (268, 50, 1),  # 8 x 4,096 tokens fp32 against H200's L2: already more than 4 x 50
        (200, 50, 1),
        (199, 50, 2),
        (10, 50, 20),
        (1, 50, 64),  # capped
        (10, 0, 1),  # cache size unknown
    ],
)
def test_copies_together_are_four_times_the_cache(data_mb: int, cache_mb: int, copies: int) -> None:
    """KERNELS.md section 4: cells whose KV is under 4 x L2 are marked and buffers rotated."""
    assert timing.copies_needed(data_mb << 20, cache_mb << 20) == copies


def test_cpu_time_is_the_time_a_run_takes_and_runs_take_turns() -> None:
    """Given two runs that sleep 4 ms, expected at least that as every statistic, and both used alike."""
    calls = [0, 0]

    def run(i: int) -> None:
        calls[i] += 1
        time.sleep(0.004)

    found = timing.time_cpu([lambda: run(0), lambda: run(1)], budget_s=0.05, low=6, high=6)
    assert 0.004 <= found.p20_s <= found.median_s <= found.p80_s < 0.1
    assert calls == [4, 4]  # one untimed and three timed calls each


def test_repeats_fill_the_budget_within_bounds() -> None:
    assert timing.repeats_for(0.01, budget_s=0.5, low=7, high=101) == 50
    assert timing.repeats_for(10.0, budget_s=0.5, low=7, high=101) == 7
    assert timing.repeats_for(0.0, budget_s=0.5, low=7, high=101) == 101
