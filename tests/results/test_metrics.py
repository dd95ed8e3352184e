"""Latency metrics under vLLM bench's definitions, targets, and saturation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.errors import InputError
from kvplan.results.metrics import (
    RequestTimes,
    Slo,
    Status,
    check_slos,
    good_requests,
    is_saturated,
    latency_summary,
    parse_slo,
    percentile,
    position_utilization,
    summarize,
)


def requests(
    arrival: list[float],
    scheduled: list[float],
    first: list[float],
    finish: list[float],
    generated: list[int],
    status: list[Status] | None = None,
    inputs: list[int] | None = None,
) -> RequestTimes:
    n = len(arrival)
    return RequestTimes(
        status=np.array(status or [Status.FINISHED] * n, dtype=np.int8),
        arrival_s=np.array(arrival, dtype=float),
        first_scheduled_s=np.array(scheduled, dtype=float),
        first_token_s=np.array(first, dtype=float),
        finish_s=np.array(finish, dtype=float),
        input_tokens=np.array(inputs or [100] * n),
        generated_tokens=np.array(generated),
    )


NAN = math.nan


def test_summary_of_three_requests_worked_by_hand() -> None:
    """TTFT 0.2, 0.4 s; TPOT (1.2-0.2)/10 and none for the single token; the rejected one counts nowhere.

    Duration 0 to 2 s; definitions: vllm/benchmarks/serve.py, calculate_metrics.
    """
    run = requests(
        arrival=[0.0, 1.6, 0.5],
        scheduled=[0.1, 1.7, NAN],
        first=[0.2, 2.0, NAN],
        finish=[1.2, 2.0, NAN],
        generated=[11, 1, 0],
        status=[Status.FINISHED, Status.FINISHED, Status.REJECTED_OOM],
    )
    summary = summarize(run, itl_s=[0.1], itl_weights=[10], slos=[parse_slo("ttft=300ms,p99")])
    assert summary["completed"] == 2
    assert summary["rejected"] == 1
    assert summary["duration_s"] == pytest.approx(2.0)
    assert summary["request_throughput"] == pytest.approx(1.0)
    assert summary["output_throughput"] == pytest.approx(6.0)
    assert summary["total_token_throughput"] == pytest.approx((12 + 200) / 2)
    assert summary["mean_ttft_ms"] == pytest.approx(300)
    assert summary["p95_ttft_ms"] == pytest.approx(390)
    assert summary["std_ttft_ms"] == pytest.approx(100)
    assert summary["mean_tpot_ms"] == summary["p99_tpot_ms"] == pytest.approx(100)
    assert summary["median_itl_ms"] == pytest.approx(100)
    assert summary["mean_e2el_ms"] == pytest.approx(800)
    assert summary["request_goodput"] == pytest.approx(0.5), "one of two requests met 300 ms, in 2 s"


def test_empty_and_all_failed_runs_have_no_latency_and_do_not_crash() -> None:
    for run in (
        requests([], [], [], [], []),
        requests([0.0], [NAN], [NAN], [NAN], [0], [Status.REJECTED_TOO_LONG]),
    ):
        summary = summarize(run)
        assert summary["completed"] == 0
        assert math.isnan(summary["mean_ttft_ms"])
        assert summary["saturated"] is False


@given(
    st.lists(st.tuples(st.floats(0, 1e3), st.integers(0, 5)), min_size=1, max_size=20),
    st.floats(0, 100),
)
def test_weighted_percentile_is_that_of_repeated_values(pairs: list[tuple[float, int]], q: float) -> None:
    """numpy.percentile of the expanded list is the definition."""
    values, weights = (np.array(column) for column in zip(*pairs, strict=True))
    expanded = np.repeat(values, weights)
    got = percentile(values, q, weights)
    if not len(expanded):
        assert math.isnan(got)
    else:
        assert got == pytest.approx(float(np.percentile(expanded, q)), rel=1e-9, abs=1e-9)
        summary = latency_summary("x", values, weights)
        assert summary["mean_x_ms"] == pytest.approx(1e3 * expanded.mean())
        assert summary["std_x_ms"] == pytest.approx(1e3 * expanded.std(), rel=1e-6, abs=1e-6)


def test_position_utilization_of_the_seed_example() -> None:
    """37, 91, 128, 201, 511: 97.58 % at 16, 94.53 % at 32 (TRACE_FORMATS.md)."""
    lengths = [37, 91, 128, 201, 511]
    assert position_utilization(lengths, 16) == 968 / 992
    assert position_utilization(lengths, 32) == 968 / 1024
    assert math.isnan(position_utilization([0], 16))


# ---- targets


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ttft=1s,p99", Slo("ttft", 1.0, 99.0)),
        ("tpot=50ms,p95", Slo("tpot", 0.05, 95.0)),
        ("e2el=2.5s,mean", Slo("e2el", 2.5, None)),
        ("E2E = 30 s , P99.9", Slo("e2el", 30.0, 99.9)),
        ("itl=100ms", Slo("itl", 0.1, 99.0)),
        ("ttft=1s,median", Slo("ttft", 1.0, 50.0)),
    ],
)
def test_slo_reads(text: str, expected: Slo) -> None:
    assert parse_slo(text) == expected


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", "METRIC=LIMIT"),
        ("ttft", "METRIC=LIMIT"),
        ("ttft=1", "METRIC=LIMIT"),
        ("ttft=1us", "METRIC=LIMIT"),
        ("ttft=-1s", "METRIC=LIMIT"),
        ("ttft=1s,p99,p95", "METRIC=LIMIT"),
        ("ttft=0s,p99", "above 0"),
        ("ttft=1.2.3s", "1.2.3"),
        ("ttft=.s", "not a number"),
        ("tbt=1s,p99", "tbt"),
        ("ttft=1s,p100", "p100"),
        ("ttft=1s,p49", "p49"),
        ("ttft=1s,p9.9.9", "p9.9.9"),
        ("ttft=1s,max", "METRIC=LIMIT"),
    ],
)
def test_bad_slo_is_one_line_that_names_it(text: str, names: str) -> None:
    with pytest.raises(InputError) as error:
        parse_slo(text)
    message = str(error.value)
    assert message.startswith(f"--slo {text!r}")
    assert names in message
    assert "\n" not in message


def test_slo_text() -> None:
    assert str(parse_slo("ttft=1s,p99")) == "TTFT p99 <= 1 s"
    assert str(parse_slo("e2el=250ms,mean")) == "E2E mean <= 250 ms"


def test_failed_requests_are_infinitely_late_and_cancelled_ones_are_left_out() -> None:
    """UX.md, Latency: failed requests count as never. 98 of 100 in time meets p95 and misses p99."""
    status = [Status.FINISHED] * 98 + [Status.REJECTED_OOM, Status.TIMED_OUT, Status.CANCELLED]
    nothing = [NAN] * 3
    run = requests(
        arrival=[float(i) for i in range(101)],
        scheduled=[float(i) for i in range(98)] + nothing,
        first=[i + 0.5 for i in range(98)] + nothing,
        finish=[i + 0.9 for i in range(98)] + nothing,
        generated=[5] * 98 + [0] * 3,
        status=status,
    )
    p95, p99, mean = check_slos(run, [parse_slo(f"ttft=1s,{s}") for s in ("p95", "p99", "mean")])
    assert (p95.value_s, p95.met) == (pytest.approx(0.5), True)
    assert (p99.value_s, p99.met) == (math.inf, False)
    assert (mean.value_s, mean.met) == (math.inf, False)
    assert good_requests(run, [parse_slo("ttft=1s,p99")]).sum() == 98


def test_a_target_on_nothing_measured_is_not_missed() -> None:
    """One-token answers have no TPOT; vLLM's goodput counts it as 0."""
    run = requests([0.0], [0.0], [0.1], [0.1], [1])
    (result,) = check_slos(run, [parse_slo("tpot=1ms,p99")])
    assert result.met
    assert good_requests(run, [parse_slo("tpot=1ms,p99")]).all()


# ---- saturation


def served(n: int, interval_s: float, service_s: float) -> RequestTimes:
    """One server, first come first served: request i arrives at i * interval and takes service_s."""
    arrival = np.arange(n) * interval_s
    start = np.zeros(n)
    for i in range(n):
        start[i] = max(arrival[i], start[i - 1] + service_s if i else 0.0)
    finish = start + service_s
    return requests(list(arrival), list(start), list(finish), list(finish), [2] * n)


@pytest.mark.parametrize(
    ("service_s", "saturated"),
    [
        (0.5, False),  # half loaded
        (0.99, False),  # just under the rate of 1 a second: no queue ever
        (1.03, True),  # 3 % over: rate .971 >= .95, but the queue grows
        (1.2, True),
        (5.0, True),
    ],
)
def test_saturated_is_load_above_capacity(service_s: float, saturated: bool) -> None:
    """Arrivals of 1 a second to a server of 1 / service_s a second, for 500 requests (CLI.md's rule)."""
    assert is_saturated(served(500, 1.0, service_s)) is saturated


def test_draining_does_not_saturate_a_short_trace() -> None:
    """10 requests a second apart that each take 20 s at once: the rate out equals the rate in."""
    arrival = [float(i) for i in range(10)]
    finish = [a + 20 for a in arrival]
    assert is_saturated(requests(arrival, arrival, [a + 1 for a in arrival], finish, [9] * 10)) is False


def test_all_at_once_is_saturation_and_one_request_is_not() -> None:
    assert is_saturated(served(10, 0.0, 0.1)) is True
    assert is_saturated(served(1, 1.0, 9.0)) is False
