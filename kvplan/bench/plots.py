"""The picture of a sweep: share of the read ceiling over block size, a panel a set-up. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvplan.bench.device import CPU_LABEL, Device
from kvplan.results.plots import check_plot_path, save

MARKERS = "osD^vP"
MAX_PANELS = 12


def plot_kernel(path: str | Path, rows: Sequence[Mapping[str, Any]], device: Device) -> Path:
    """Draw ``rows`` (kernel suite) into ``path``; what has no block size is a level line. Returns the path.

    Raises InputError (flag --plot) without matplotlib or for a place that cannot be written.
    """
    target = check_plot_path(path)
    from matplotlib.figure import Figure

    setups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        setups.setdefault(row["setup"], []).append(row)
    shown = list(setups.items())[:MAX_PANELS]
    columns = min(3, len(shown))
    lines = -(-len(shown) // columns)
    figure = Figure(figsize=(5.2 * columns + 1, 3.6 * lines + 0.8), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    label = f"{device.label}: {device.name}" if device.label == CPU_LABEL else device.name
    more = "" if len(shown) == len(setups) else f" (first {len(shown)} of {len(setups)} set-ups)"
    figure.suptitle(f"Paged decode on {label}{more}", fontsize=11)
    for ax in axes.flat[len(shown) :]:
        ax.set_visible(False)
    for ax, (setup, cells) in zip(axes.flat, shown, strict=False):
        _draw_setup(ax, setup, cells)
    return save(figure, target)


def _draw_setup(ax: Any, setup: str, cells: Sequence[Mapping[str, Any]]) -> None:
    series: dict[str, list[tuple[int, float]]] = {}
    for cell in cells:
        if cell["share_of_read"] is None:
            continue
        share = 100 * cell["share_of_read"]
        if cell["role"] == "baseline":
            ax.axhline(share, linestyle="--", linewidth=1, color="0.5")
            ax.annotate(
                cell["backend"],
                (0.99, share),
                xycoords=("axes fraction", "data"),
                fontsize=7,
                ha="right",
                va="bottom",
            )
        else:
            series.setdefault(cell["backend"], []).append((cell["block_size"], share))
    for (name, points), marker in zip(series.items(), MARKERS, strict=False):
        xs, ys = zip(*sorted(points), strict=True)
        ax.plot(xs, ys, marker=marker, label=name)
    if series:
        ax.set_xscale("log", base=2)
        swept = sorted({block for points in series.values() for block, _ in points})
        ax.set_xticks(swept, [str(block) for block in swept])
        ax.legend(fontsize=8, loc="center right")
    ax.set_ylim(bottom=0)
    ax.set_title(setup, fontsize=8)
    ax.set_xlabel("block size (tokens)")
    ax.set_ylabel("share of the read ceiling (%)")
