"""Constructed loads follow the definitions of `vllm bench serve` and repeat with their seed."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan.errors import InputError
from kvplan.trace.generate import random_trace, speed_up, with_arrivals
from kvplan.trace.readers import read_trace


@pytest.mark.parametrize(("ratio", "low", "high"), [(0.0, 1000, 1000), (0.3, 700, 1300), (1.0, 1, 2000)])
def test_range_ratio_draws_every_length_between(ratio: float, low: int, high: int) -> None:
    """R draws whole numbers from [L(1-R), L(1+R)], at least 1 (RandomDataset of vLLM's bench)."""
    trace = random_trace(60_000, 1000, 1000, seed=1, range_ratio=ratio)
    for lengths in (trace.input_tokens, trace.output_tokens):
        assert (lengths.min(), lengths.max()) == (low, high)
        assert lengths.mean() == pytest.approx(1000, rel=0.01)


def test_len_range_is_a_share_of_the_length() -> None:
    trace = random_trace(20_000, 1000, 100, seed=1, len_range=(0.8, 1.0))
    assert (trace.input_tokens.min(), trace.input_tokens.max()) == (800, 1000)
    assert (trace.output_tokens.min(), trace.output_tokens.max()) == (80, 100)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_with_the_asked_rate(burstiness: float) -> None:
    """Mean gap 1 / rate; the coefficient of variation of a gamma of shape g is 1 / sqrt(g)."""
    gaps = np.diff(random_trace(200_000, 10, 10, seed=3, request_rate=5.0, burstiness=burstiness).arrival_s)
    assert gaps.mean() == pytest.approx(0.2, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.03)


def test_infinite_rate_is_all_at_once() -> None:
    assert not random_trace(10, 10, 10, seed=0, request_rate=float("inf")).arrival_s.any()


def test_same_seed_same_trace_and_rate_does_not_change_lengths() -> None:
    one, two, other = (random_trace(100, 500, 100, seed=s, range_ratio=0.5) for s in (7, 7, 8))
    assert one.input_tokens.tolist() == two.input_tokens.tolist() != other.input_tokens.tolist()
    rated = random_trace(100, 500, 100, seed=7, range_ratio=0.5, request_rate=2.0)
    assert rated.input_tokens.tolist() == one.input_tokens.tolist()
    assert one.provenance.kind == "constructed"
    assert one.provenance.seed == 7
    assert one.output_stream.tolist() == [-1] * 100


def test_speed_up_divides_times_and_needs_some() -> None:
    trace = with_arrivals(random_trace(50, 10, 10, seed=0), 2.0, 1.0, seed=0)
    assert speed_up(trace, 4.0).arrival_s == pytest.approx(trace.arrival_s / 4)
    with pytest.raises(InputError, match="--speed-up"):
        speed_up(random_trace(5, 10, 10, seed=0), 2.0)


def test_drawn_arrivals_on_a_recorded_trace_say_so(tmp_path) -> None:
    path = tmp_path / "v.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n5,3,8,1.66\n7,2,9,3.5\n")
    trace = with_arrivals(read_trace(str(path)), 2.0, 1.0, seed=5)
    assert trace.has_times
    assert "drawn at 2/s" in trace.provenance.source
    assert trace.arrival_s[0] == 0
