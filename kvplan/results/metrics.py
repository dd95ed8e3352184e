"""Latency, throughput and targets from per-request times: one definition for simulate and bench.

Names and definitions are those of `vllm bench serve` (vllm/benchmarks/serve.py, `calculate_metrics`):
percentiles interpolate linearly, TPOT leaves out requests of one token, throughput counts finished requests
only and divides by the time from the first arrival to the last finish.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvplan.errors import InputError

Floats = NDArray[np.float64]
PERCENTILES = (90, 95, 99)
LATENCIES = ("ttft", "tpot", "itl", "e2el")
DEFAULT_PERCENTILE = 99.0


class Status(IntEnum):
    """How a request ended; every request ends in exactly one."""

    FINISHED = 0
    REJECTED_OOM = 1  # can never fit the pool
    REJECTED_TOO_LONG = 2  # longer than max_model_len
    CANCELLED = 3
    TIMED_OUT = 4
    UNFINISHED = 5  # the run stopped first
    REJECTED_EMPTY = 6  # a prompt of 0 tokens

    @property
    def label(self) -> str:
        return self.name.lower()


REJECTED = (Status.REJECTED_OOM, Status.REJECTED_TOO_LONG, Status.REJECTED_EMPTY)


@dataclass(frozen=True)
class RequestTimes:
    """One run's requests, one row each: seconds on one clock (NaN = never happened) and token counts."""

    status: NDArray[np.int8]  # values of `Status`
    arrival_s: Floats
    first_scheduled_s: Floats
    first_token_s: Floats
    finish_s: Floats
    input_tokens: NDArray[np.int64]
    generated_tokens: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.status)

    @property
    def ttft_s(self) -> Floats:
        """Time to first token, from arrival."""
        return self.first_token_s - self.arrival_s

    @property
    def e2el_s(self) -> Floats:
        """End-to-end latency; NaN unless finished."""
        return np.where(self.status == Status.FINISHED, self.finish_s - self.arrival_s, np.nan)

    @property
    def tpot_s(self) -> Floats:
        """Time per output token after the first: (E2E - TTFT) / (tokens - 1); NaN for a single token."""
        later = self.generated_tokens - 1
        return np.where(later > 0, (self.e2el_s - self.ttft_s) / np.maximum(later, 1), np.nan)


def percentile(values: ArrayLike, q: float, weights: ArrayLike | None = None) -> float:
    """The ``q``-th percentile, interpolated linearly; NaN of nothing.

    With integer ``weights`` the result is that of ``np.repeat(values, weights)`` without building it.
    """
    x = np.asarray(values, dtype=np.float64)
    if weights is None:
        return float(np.percentile(x, q)) if len(x) else float("nan")
    w = np.asarray(weights, dtype=np.int64)
    order = np.argsort(x, kind="stable")
    ends = np.cumsum(w[order])
    if not len(ends) or ends[-1] == 0:
        return float("nan")
    position = q / 100 * (int(ends[-1]) - 1)
    below = int(position)
    low, high = x[order][np.searchsorted(ends, [below, min(below + 1, int(ends[-1]) - 1)], side="right")]
    return float(low + (high - low) * (position - below))


def latency_summary(name: str, values_s: ArrayLike, weights: ArrayLike | None = None) -> dict[str, float]:
    """``{mean,median,std,p90,p95,p99}_{name}_ms`` of latencies in seconds; NaN values are left out."""
    x = np.asarray(values_s, dtype=np.float64)
    known = ~np.isnan(x)
    x = x[known]
    w = None if weights is None else np.asarray(weights, dtype=np.int64)[known]
    total = len(x) if w is None else int(w.sum())
    if total == 0:
        mean = std = float("nan")
    else:
        mean = float(np.average(x, weights=w))
        std = float(np.sqrt(np.average((x - mean) ** 2, weights=w)))
    summary = {
        f"mean_{name}_ms": mean * 1e3,
        f"median_{name}_ms": percentile(x, 50, w) * 1e3,
        f"std_{name}_ms": std * 1e3,
    }
    for q in PERCENTILES:
        summary[f"p{q}_{name}_ms"] = percentile(x, q, w) * 1e3
    return summary


def summarize(
    requests: RequestTimes,
    itl_s: ArrayLike = (),
    itl_weights: ArrayLike | None = None,
    slos: Sequence[Slo] = (),
) -> dict[str, Any]:
    """The latency, throughput and outcome keys of a run's summary (CLI.md), keyed as vLLM bench does.

    ``itl_s`` are inter-token latencies in seconds, one each or, with ``itl_weights``, one value for so many
    tokens (a step that gave 30 requests a token is one value of weight 30). Without ``slos``,
    ``request_goodput`` is NaN.
    """
    done = requests.status == Status.FINISHED
    completed = int(done.sum())
    duration_s = _duration_s(requests)
    rate = 1 / duration_s if duration_s > 0 else float("nan")
    output = int(requests.generated_tokens[done].sum())
    total = output + int(requests.input_tokens[done].sum())
    count = {status: int((requests.status == status).sum()) for status in Status}
    return {
        "completed": completed,
        "duration_s": duration_s,
        "request_throughput": completed * rate,
        "output_throughput": output * rate,
        "total_token_throughput": total * rate,
        "request_goodput": int(good_requests(requests, slos).sum()) * rate if slos else float("nan"),
        **latency_summary("ttft", requests.ttft_s[done]),
        **latency_summary("tpot", requests.tpot_s[done]),
        **latency_summary("itl", itl_s, itl_weights),
        **latency_summary("e2el", requests.e2el_s[done]),
        "rejected": sum(count[status] for status in REJECTED),
        "timed_out": count[Status.TIMED_OUT],
        "cancelled": count[Status.CANCELLED],
        "unfinished": count[Status.UNFINISHED],
        "saturated": is_saturated(requests),
    }


def _duration_s(requests: RequestTimes) -> float:
    """First arrival to last finish."""
    if not len(requests) or np.all(np.isnan(requests.finish_s)):
        return 0.0
    return float(np.nanmax(requests.finish_s) - np.min(requests.arrival_s))


def position_utilization(tokens: ArrayLike, block_size: int) -> float:
    """``sum n / sum A_B(n)`` with ``A_B(n) = B * ceil(n / B)``, n = input + output tokens of a request.

    Blocks are counted as if nothing were shared. NaN when there is no token.
    """
    n = np.asarray(tokens, dtype=np.int64)
    positions = block_size * int((-(-n // block_size)).sum())
    return int(n.sum()) / positions if positions else float("nan")


# ---- saturation -------------------------------------------------------------------------------------


def is_saturated(requests: RequestTimes) -> bool:
    """Whether the load outran the server, so that latency tails only measure the length of the trace.

    True when the queue just before the last arrival exceeds twice its time mean over the first half of the
    arrivals' span, or the completed rate stays under 0.95 of the arrival rate (CLI.md). As read here: a
    queue of at most one request, or 1 % of all, is noise; both rates run from their first event to their
    last, so that the time the last request needs to drain does not count against a short trace; requests
    rejected, cancelled or timed out are in neither rate. All arriving at one instant is saturation.
    """
    owed = np.isin(requests.status, (Status.FINISHED, Status.UNFINISHED))
    arrival = np.sort(requests.arrival_s[owed])
    n = len(arrival)
    if n < 2:
        return False
    span_s = float(arrival[-1] - arrival[0])
    if span_s <= 0:
        return True

    finish = requests.finish_s[owed & (requests.status == Status.FINISHED)]
    busy_s = float(finish.max() - finish.min()) if len(finish) > 1 else float("inf")
    if busy_s > 0 and (len(finish) - 1) / busy_s < 0.95 * (n - 1) / span_s:
        return True

    # A request queues from its arrival until it is first scheduled (never: until the end).
    start = requests.arrival_s[owed]
    stop = np.where(np.isnan(requests.first_scheduled_s[owed]), np.inf, requests.first_scheduled_s[owed])
    last, middle = float(arrival[-1]), float(arrival[0]) + span_s / 2
    queue_at_last = int(((start < last) & (stop > last)).sum())
    waited_s = np.clip(np.minimum(stop, middle) - start, 0, None).sum()
    return bool(queue_at_last > max(1.0, 0.01 * n, 2 * waited_s / (span_s / 2)))


# ---- targets ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slo:
    """One latency target: ``metric`` at ``percentile`` (None = mean) must be at most ``limit_s``."""

    metric: str
    limit_s: float
    percentile: float | None = DEFAULT_PERCENTILE

    @property
    def statistic(self) -> str:
        return "mean" if self.percentile is None else f"p{self.percentile:g}"

    @property
    def limit(self) -> str:
        """The limit as a person writes it: '100 ms', '1 s'."""
        return f"{self.limit_s * 1e3:g} ms" if self.limit_s < 1 else f"{self.limit_s:g} s"

    def __str__(self) -> str:
        name = "E2E" if self.metric == "e2el" else self.metric.upper()
        return f"{name} {self.statistic} <= {self.limit}"


@dataclass(frozen=True)
class SloResult:
    """A target beside the run's figure; ``value_s`` is infinite when failed requests reach the percentile."""

    slo: Slo
    value_s: float
    met: bool


_SLO = re.compile(r"(?P<metric>[a-z0-9]+)=(?P<value>[0-9.]+)(?P<unit>ms|s)(,(?P<stat>p[0-9.]+|mean|median))?")


def parse_slo(text: str) -> Slo:
    """Parse one ``--slo``: ``METRIC=LIMIT[,STATISTIC]``, e.g. ``ttft=1s,p99`` or ``tpot=50ms,mean``.

    METRIC is ttft, tpot, itl or e2el; LIMIT has a unit, ms or s; STATISTIC is p50 to p99.9, median or mean,
    p99 if left out. Raises InputError, one line naming what was found.
    """
    found = _SLO.fullmatch(text.strip().lower().replace(" ", ""))
    if found is None:
        raise InputError(f"--slo {text!r} is not METRIC=LIMIT[,STATISTIC]; write for example ttft=1s,p99.")
    metric = {"e2e": "e2el"}.get(found["metric"], found["metric"])
    if metric not in LATENCIES:
        raise InputError(f"--slo {text!r}: no metric {found['metric']!r}; use {', '.join(LATENCIES)}.")
    try:
        limit_s = float(found["value"]) * (1e-3 if found["unit"] == "ms" else 1.0)
    except ValueError:
        raise InputError(f"--slo {text!r}: {found['value']!r} is not a number.") from None
    if limit_s <= 0:
        raise InputError(f"--slo {text!r}: the limit must be above 0.")
    stat = found["stat"] or f"p{DEFAULT_PERCENTILE:g}"
    if stat == "mean":
        return Slo(metric, limit_s, None)
    try:
        q = 50.0 if stat == "median" else float(stat[1:])
    except ValueError:
        raise InputError(f"--slo {text!r}: {stat!r} is not a percentile; use p50 to p99.9 or mean.") from None
    if not 50 <= q <= 99.9:
        raise InputError(f"--slo {text!r}: {stat} is outside p50 to p99.9.")
    return Slo(metric, limit_s, q)


def check_slos(
    requests: RequestTimes,
    slos: Sequence[Slo],
    itl_s: ArrayLike = (),
    itl_weights: ArrayLike | None = None,
) -> list[SloResult]:
    """Each target beside its figure. A request that failed to be served counts as infinitely late.

    Cancelled requests are left out: the user stopped waiting for reasons of their own.
    """
    done = requests.status == Status.FINISHED
    failed = int((~done & (requests.status != Status.CANCELLED)).sum())
    values: Mapping[str, Floats] = {
        "ttft": requests.ttft_s[done],
        "tpot": requests.tpot_s[done],
        "e2el": requests.e2el_s[done],
        "itl": np.asarray(itl_s, dtype=np.float64),
    }
    results = []
    for slo in slos:
        x = values[slo.metric]
        known = ~np.isnan(x)
        weights = np.ones(len(x), np.int64)
        if slo.metric == "itl" and itl_weights is not None:
            weights = np.asarray(itl_weights, dtype=np.int64)
        x, weights = np.append(x[known], [np.inf] * (failed > 0)), weights[known]
        if failed:
            weights = np.append(weights, failed)
        if weights.sum() == 0:
            value = float("nan")  # nothing to measure, such as TPOT of one-token answers
        elif slo.percentile is None:
            value = float("inf") if failed else float(np.average(x, weights=weights))
        else:
            with np.errstate(invalid="ignore"):
                value = percentile(x, slo.percentile, weights)
            value = float("inf") if value != value else value  # inf - inf while interpolating
        results.append(SloResult(slo, value, not value > slo.limit_s))
    return results


def good_requests(requests: RequestTimes, slos: Sequence[Slo]) -> NDArray[np.bool_]:
    """Which requests finished within every limit, whatever the percentile (vLLM's goodput).

    As in vLLM bench a single-token answer has TPOT 0. A request's ITL is its mean, which is its TPOT.
    """
    good = requests.status == Status.FINISHED
    tpot = np.nan_to_num(requests.tpot_s, nan=0.0)
    values = {"ttft": requests.ttft_s, "tpot": tpot, "itl": tpot, "e2el": requests.e2el_s}
    for slo in slos:
        good = good & (values[slo.metric] <= slo.limit_s)
    return good
