"""How long a call takes: medians with p20 and p80, on a CPU's clock or by CUDA events.

A timed call must find its KV in memory, not in a cache that the call before it filled. So callers pass a
list of *runs*, the same work on separate copies of the data, which are taken in turn; `copies_needed` says
how many it takes for the copies together to be four times the cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Run = Callable[[], Any]

CACHE_MULTIPLE = 4  # KV under this many times the cache is marked and rotated
MAX_COPIES = 64


@dataclass(frozen=True)
class Timing:
    """Seconds of one run: the median over ``repeats`` samples and the 20th and 80th percentile."""

    median_s: float
    p20_s: float
    p80_s: float
    repeats: int


def quantile(sorted_values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics, as numpy.quantile does by default."""
    position = share * (len(sorted_values) - 1)
    low = math.floor(position)
    high = min(low + 1, len(sorted_values) - 1)
    return sorted_values[low] + (position - low) * (sorted_values[high] - sorted_values[low])


def summarise(samples_s: Sequence[float]) -> Timing:
    """Median, p20 and p80 of samples. Raises ValueError when there is none."""
    if not samples_s:
        raise ValueError("no samples to summarise")
    ordered = sorted(samples_s)
    return Timing(quantile(ordered, 0.5), quantile(ordered, 0.2), quantile(ordered, 0.8), len(ordered))


def copies_needed(data_bytes: int, cache_bytes: int) -> int:
    """Copies of ``data_bytes`` that together are at least four times the cache, at most `MAX_COPIES`."""
    if data_bytes <= 0 or cache_bytes <= 0:
        return 1
    return min(MAX_COPIES, max(1, math.ceil(CACHE_MULTIPLE * cache_bytes / data_bytes)))


def repeats_for(first_s: float, budget_s: float, low: int, high: int) -> int:
    """How many samples of about ``first_s`` fit the budget, between ``low`` and ``high``."""
    return max(low, min(high, int(budget_s / max(first_s, 1e-9))))


def time_cpu(runs: Sequence[Run], budget_s: float = 0.6, low: int = 7, high: int = 101) -> Timing:
    """Wall time of one run by the clock, each run once untimed first, then in turn."""
    first_s = min(_wall_s(run) for run in runs for _ in range(2 if len(runs) == 1 else 1))
    samples = [_wall_s(runs[i % len(runs)]) for i in range(repeats_for(first_s, budget_s, low, high))]
    return summarise(samples)


def _wall_s(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def time_cuda_eager(runs: Sequence[Run], budget_s: float = 0.15, low: int = 11, high: int = 101) -> Timing:
    """Device time of one launch from the host, which includes what the host adds when it is the slower."""
    import torch

    for run in runs:
        run()
    torch.cuda.synchronize()
    first_s = _wall_and_sync_s(runs[0])
    pairs = []
    for i in range(repeats_for(first_s, budget_s, low, high)):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        runs[i % len(runs)]()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return summarise([start.elapsed_time(end) / 1e3 for start, end in pairs])


def time_cuda_graph(
    runs: Sequence[Run],
    budget_s: float = 0.15,
    low: int = 11,
    high: int = 101,
    replay_s: float = 500e-6,
    eager_s: float = 100e-6,
) -> Timing:
    """Device time of one run inside a CUDA graph that holds every run, several times over if short.

    A replay is made about ``replay_s`` long, so that the few microseconds of a graph's launch do not count
    as the kernel's. Raises what capture raises when a run cannot be captured (it syncs or allocates).
    """
    import torch

    rounds = max(1, min(16, math.ceil(replay_s / max(eager_s * len(runs), 1e-9))))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for run in runs:
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for run in runs:
                run()
    calls = rounds * len(runs)
    graph.replay()
    torch.cuda.synchronize()
    first_s = _wall_and_sync_s(graph.replay)
    pairs = []
    for _ in range(repeats_for(first_s, budget_s, low, high)):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    timing = summarise([start.elapsed_time(end) / 1e3 / calls for start, end in pairs])
    del graph
    return timing


def _wall_and_sync_s(run: Run) -> float:
    import torch

    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start
