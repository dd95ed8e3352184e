"""Pictures of a run: the pool over time, the queue, and latency as cumulative curves. Needs matplotlib.

Columns are those of `schema.TIMELINE` and `schema.REQUESTS` as numpy arrays. Patterns tell areas apart in
black and white as well; every axis says its unit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvplan.errors import InputError
from kvplan.results.metrics import RequestTimes, Slo, Status

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
# What the blocks of the pool hold, bottom to top: name, colour, hatch.
POOL_PARTS = (
    ("live", "#1b6ca8", ""),
    ("tail waste", "#e07b39", "xx"),
    ("cached", "#a9cfe8", "//"),
    ("free", "#f2f2f2", ""),
)


def check_plot_path(path: str | os.PathLike[str]) -> Path:
    """Fail before the run, not after it: matplotlib is there and the file's kind is one it can write."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise InputError(f"--plot {path}: a picture ends in {', '.join(SUFFIXES)}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install 'kvplan[plot]'") from None
    return Path(path)


def plot_run(
    path: str | os.PathLike[str],
    timeline: Mapping[str, NDArray[Any]],
    requests: RequestTimes,
    block_size: int,
    title: str,
    slos: Sequence[Slo] = (),
    max_num_seqs: int | None = None,
) -> Path:
    """Draw one run into ``path`` (png, svg or pdf) through a temporary sibling; return the path."""
    target = check_plot_path(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 10), layout="constrained")
    pool, queue, latency = figure.subplots(3, 1)
    figure.suptitle(title, fontsize=11)
    draw_pool(pool, timeline, block_size)
    draw_queue(queue, timeline, max_num_seqs)
    queue.sharex(pool)
    for axes in (pool, queue):
        axes.xaxis.set_major_formatter("{x:,.10g}")
    draw_latency(latency, requests, slos)
    return save(figure, target)


def draw_pool(axes: Axes, timeline: Mapping[str, NDArray[Any]], block_size: int) -> None:
    """Stacked share of the pool in %: live, tail waste, cached, free; ticks where requests were preempted."""
    time_s = timeline["time_s"]
    whole = timeline["used_blocks"] + timeline["cached_blocks"] + timeline["free_blocks"]
    live = np.minimum(timeline["live_tokens"] / block_size, timeline["used_blocks"])
    parts = (live, timeline["used_blocks"] - live, timeline["cached_blocks"], timeline["free_blocks"])
    bottom = np.zeros(len(time_s))
    for part, (name, colour, hatch) in zip(parts, POOL_PARTS, strict=True):
        top = bottom + 100 * part / np.maximum(whole, 1)
        axes.fill_between(
            time_s,
            bottom,
            top,
            step="post",
            label=name,
            facecolor=colour,
            hatch=hatch,
            edgecolor="#888888",
            lw=0,
        )
        bottom = top
    preempted = time_s[np.diff(timeline["preemptions"], prepend=0) > 0]
    if len(preempted):
        axes.plot(preempted, np.full(len(preempted), 100), "kv", ms=4, label="preemption", clip_on=False)
    axes.set(xlabel="time, s", ylabel="KV pool, %", ylim=(0, 100))
    axes.margins(x=0)
    _legend(axes)


def draw_queue(axes: Axes, timeline: Mapping[str, NDArray[Any]], max_num_seqs: int | None) -> None:
    """Requests running and waiting over time, and the limit on running ones when it is in sight."""
    from matplotlib.ticker import MaxNLocator

    axes.step(timeline["time_s"], timeline["running"], where="post", color="#1b6ca8", label="running")
    axes.step(
        timeline["time_s"], timeline["waiting"], where="post", color="#c0392b", ls="--", label="waiting"
    )
    highest = max(timeline["running"].max(initial=0), timeline["waiting"].max(initial=0))
    if max_num_seqs is not None and max_num_seqs <= 2 * highest:
        axes.axhline(max_num_seqs, color="#555555", ls=":", label="max_num_seqs")
    axes.set(xlabel="time, s", ylabel="requests")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    _legend(axes)


def draw_latency(axes: Axes, requests: RequestTimes, slos: Sequence[Slo]) -> None:
    """Cumulative share of requests in % by TTFT and TPOT; a cross marks a target; failures never arrive."""
    done = requests.status == Status.FINISHED
    served = int((requests.status != Status.CANCELLED).sum())
    for name, style, colour in (("ttft", "-", "#1b6ca8"), ("tpot", "--", "#e07b39")):
        values = getattr(requests, f"{name}_s")[done]
        values = np.sort(values[~np.isnan(values)]) * 1e3
        # A one-token answer has no TPOT: that curve is of the requests that have one and those that failed.
        of = len(values) + served - int(done.sum())
        if len(values):
            share = 100 * np.arange(1, len(values) + 1) / of
            axes.step(values, share, where="post", ls=style, color=colour, label=name.upper())
        for slo in slos:
            if slo.metric == name and slo.percentile is not None:
                axes.plot(slo.limit_s * 1e3, slo.percentile, "x", ms=10, mew=2, color=colour, label=str(slo))
    axes.set(xlabel="time, ms (log)", ylabel="requests served so fast, %", xscale="log", ylim=(0, 101))
    _plain_numbers(axes.xaxis)
    axes.grid(alpha=0.3)
    _legend(axes)


def _plain_numbers(axis: Axis) -> None:
    """Ticks of a log axis as people read them: 5, 20, 1,000, not powers of ten; between decades while few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    decades = np.log10(high / low)
    steps: tuple[float, ...] = (1.0, 2.0, 5.0) if decades <= 3 else (1.0,)
    if decades <= 0.7:
        steps = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
    axis.set_major_locator(LogLocator(10, steps, numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)


def save(figure: Figure, target: Path) -> Path:
    """Write ``figure`` whole or not at all. Raises InputError (flag --plot) when that is not possible."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial{target.suffix}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            figure.savefig(partial, dpi=150)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"--plot {target} cannot be written: {error.strerror or error}.") from error
    return target
