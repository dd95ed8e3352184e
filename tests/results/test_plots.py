"""The picture of a run shows the tables: areas that fill the pool, ticks at preemptions, curves in %."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvplan.errors import InputError
from kvplan.results import plots
from kvplan.results.metrics import RequestTimes, Status, parse_slo

TIMELINE = {
    "time_s": np.array([0.0, 1.0, 2.0, 3.0]),
    "used_blocks": np.array([10, 40, 90, 0]),
    "cached_blocks": np.array([0, 10, 10, 50]),
    "free_blocks": np.array([90, 50, 0, 50]),
    "live_tokens": np.array([80, 640, 1400, 0]),
    "running": np.array([1, 4, 9, 0]),
    "waiting": np.array([0, 0, 3, 0]),
    "preemptions": np.array([0, 0, 2, 2]),
}
NAN = float("nan")
REQUESTS = RequestTimes(
    status=np.array([Status.FINISHED, Status.FINISHED, Status.REJECTED_OOM, Status.CANCELLED], dtype=np.int8),
    arrival_s=np.zeros(4),
    first_scheduled_s=np.array([0.0, 0.0, NAN, NAN]),
    first_token_s=np.array([0.1, 0.3, NAN, NAN]),
    finish_s=np.array([1.1, 0.3, NAN, NAN]),
    input_tokens=np.array([10, 10, 10, 10]),
    generated_tokens=np.array([11, 1, 0, 0]),
)


def test_areas_fill_the_pool_and_preemptions_are_marked() -> None:
    """100 blocks of 16: at 2 s 1,400 live tokens are 87.5 % of the pool, 90 blocks are in use."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    plots.draw_pool(axes, TIMELINE, 16)
    live, tail, cached, free = (area.get_paths()[0].vertices[:, 1].max() for area in axes.collections)
    assert live == pytest.approx(87.5)
    assert tail == pytest.approx(90)
    assert cached == free == pytest.approx(100)
    (marks,) = axes.lines
    assert list(marks.get_xdata()) == [2.0]
    assert axes.get_xlabel() == "time, s"
    assert axes.get_ylabel() == "KV pool, %"


def test_latency_curves_count_failures_as_never_and_mark_the_target() -> None:
    """Two of three served (the cancelled one is left out): TTFT ends at 66.7 %, TPOT (one of two) at 50 %."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    plots.draw_latency(axes, REQUESTS, [parse_slo("ttft=200ms,p95")])
    ttft, cross, tpot = axes.lines
    assert list(ttft.get_xdata()) == pytest.approx([100, 300])
    assert list(ttft.get_ydata()) == pytest.approx([100 / 3, 200 / 3])
    assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (pytest.approx(200), 95)
    assert list(tpot.get_ydata()) == [50]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_run_is_drawn_to_a_file(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = plots.plot_run(
        tmp_path / "deep" / f"run.{suffix}", TIMELINE, REQUESTS, 16, "a run", max_num_seqs=9
    )
    head = path.read_bytes()[:400]
    assert (b"PNG" if suffix == "png" else b"<svg") in head or b"<?xml" in head
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_an_empty_run_is_drawn_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    nothing = np.zeros(0)
    ints = nothing.astype(np.int64)
    empty = RequestTimes(ints.astype(np.int8), nothing, nothing, nothing, nothing, ints, ints)
    plots.plot_run(tmp_path / "run.png", dict.fromkeys(TIMELINE, nothing), empty, 16, "nothing")
    assert (tmp_path / "run.png").stat().st_size > 0


def test_plot_errors_are_one_line_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"--plot x\.bmp: a picture ends in"):
        plots.check_plot_path("x.bmp")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install 'kvplan\[plot\]'"):
        plots.check_plot_path(tmp_path / "x.png")


def test_importing_plots_imports_no_matplotlib() -> None:
    code = "import sys, kvplan.results.plots; print('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_a_log_axis_has_plain_numbers() -> None:
    """5, 20, 1,000: no powers of ten, also within one decade."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    plots.draw_latency(axes, REQUESTS, [])
    figure.canvas.draw()
    shown = [label.get_text() for label in axes.get_xticklabels() + axes.get_xticklabels(minor=True)]
    assert [text for text in shown if text]
    assert not [text for text in shown if "10^" in text or "times" in text]
