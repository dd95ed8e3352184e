"""Constructed requests and arrival times, drawn as vLLM's bench does; all seeded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvplan.errors import InputError
from kvplan.trace.schema import NO_STREAM, Floats, Ints, Provenance, Trace


def random_trace(
    num_prompts: int,
    input_len: int,
    output_len: int,
    seed: int,
    range_ratio: float = 0.0,
    len_range: tuple[float, float] | None = None,
    request_rate: float | None = None,
    burstiness: float = 1.0,
) -> Trace:
    """Requests with content of their own and uniform lengths.

    ``range_ratio`` R draws whole lengths from [L(1-R), L(1+R)] (`vllm bench serve`, RandomDataset), at least
    1; ``len_range`` (LO, HI) from [LO·L, HI·L] (the InferenceX protocol with 0.8,1). Without
    ``request_rate`` the trace has no times; infinity is all at once.
    """
    rng = np.random.default_rng(seed)
    n = num_prompts

    def lengths(mean: int) -> Ints:
        low, high = (1 - range_ratio, 1 + range_ratio) if len_range is None else len_range
        a, b = max(1, int(np.floor(mean * low))), max(1, int(np.ceil(mean * high)))
        return rng.integers(a, b + 1, n, dtype=np.int64)

    flags = f"--random-input-len {input_len} --random-output-len {output_len} --num-prompts {n} --seed {seed}"
    if len_range is not None:
        flags += f" --random-len-range {len_range[0]:g},{len_range[1]:g}"
    elif range_ratio:
        flags += f" --random-range-ratio {range_ratio:g}"
    trace = Trace(
        request_id=[f"r{i}" for i in range(n)],
        arrival_s=np.full(n, np.nan),
        input_tokens=lengths(input_len),
        output_tokens=lengths(output_len),
        segment_offsets=np.zeros(n + 1, np.int64),
        segment_stream=np.zeros(0, np.int64),
        segment_start=np.zeros(0, np.int64),
        segment_length=np.zeros(0, np.int64),
        output_stream=np.full(n, NO_STREAM, np.int64),
        tenant_id=np.zeros(n, np.int64),
        tenant_names=[""],
        priority=np.zeros(n, np.int64),
        samples=np.ones(n, np.int64),
        cancel_after_s=np.full(n, np.nan),
        deadline_s=np.full(n, np.nan),
        session_id=np.full(n, -1, np.int64),
        turn=np.zeros(n, np.int64),
        think_s=np.zeros(n),
        provenance=Provenance("constructed", flags, "random", seed=seed),
    )
    return trace if request_rate is None else with_arrivals(trace, request_rate, burstiness, seed)


def with_arrivals(trace: Trace, request_rate: float, burstiness: float, seed: int) -> Trace:
    """Replace the arrival times: gamma gaps of mean 1 / rate and shape ``burstiness`` (1 = Poisson).

    As in `vllm bench serve`: smaller shapes are burstier; an infinite rate is everything at once.
    """
    n = len(trace)
    times: Floats = np.zeros(n)
    if np.isfinite(request_rate):
        rng = np.random.default_rng([seed, 1])  # apart from the lengths, so that a rate can be swept
        gaps = rng.gamma(burstiness, 1.0 / (request_rate * burstiness), n)
        times = np.cumsum(gaps) - gaps[:1]
    note = "; all at once"
    if np.isfinite(request_rate):
        note = f"; arrivals drawn at {request_rate:g}/s, burstiness {burstiness:g}, seed {seed}"
    provenance = replace(trace.provenance, source=trace.provenance.source + note, seed=seed)
    return replace(trace, arrival_s=times, provenance=provenance)


def speed_up(trace: Trace, factor: float) -> Trace:
    """Divide all arrival times by ``factor``. Raises InputError for a trace without times."""
    if not trace.has_times:
        raise InputError(f"--speed-up: {trace.provenance.source} has no arrival times to divide.")
    return replace(trace, arrival_s=trace.arrival_s / factor)
