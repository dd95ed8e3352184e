"""How near the simulator comes to recorded serving: ``python -m kvplan.bench.fidelity EVIDENCE [-o FILE]``.

Prints Markdown tables by group with the number of points, the mean, median and ninth decile of the absolute
relative error, and the bias. Nothing is fitted to these points; nothing is left out without a line that says
so. ``make fidelity`` runs it on ../shared/evidence.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvplan.bench.recorded_run import compare, read_recorded, simulate_recorded
from kvplan.bench.reported_runs import reported_rows
from kvplan.bench.served_points import Point, Predicted, group_of, predict, read_points
from kvplan.errors import InputError
from kvplan.sim.calibrate import fit_time
from kvplan.sim.steptime import Calibration


@dataclass(frozen=True)
class Case:
    """One point with one assumed precision, simulated."""

    point: Point
    kind: str
    label: str
    predicted: Predicted

    @property
    def tpot_error(self) -> float:
        return self.predicted.tpot_s / self.point.tpot_s - 1.0

    @property
    def ttft_error(self) -> float:
        return self.predicted.ttft_s / self.point.ttft_s - 1.0


def simulate_points(points: Iterable[Point], jobs: int = 1) -> tuple[list[Case], list[str]]:
    """Simulate every point; those that cannot be are returned as lines that say why."""
    tasks = [
        (p, precision) for p in points for precision in ([p.precision] if p.precision else ["bf16", "fp8"])
    ]

    def one(task: tuple[Point, str]) -> Case | str:
        point, precision = task
        try:
            predicted = predict(point, precision)
        except InputError as error:
            return f"{point.row}: {str(error).splitlines()[0]}"
        if np.isnan(predicted.tpot_s):
            return f"{point.row}: not one request fits the pool"
        return Case(point, *group_of(point, precision, predicted.room), predicted)

    with ThreadPoolExecutor(jobs) as pool:
        done = list(pool.map(one, tasks))
    return [c for c in done if isinstance(c, Case)], [c for c in done if isinstance(c, str)]


def table(cases: Iterable[Case], key: str) -> str:
    """A Markdown table of errors in percent, a row a value of ``key`` (kind or label), worst TPOT first."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        groups[getattr(case, key)].append(case)
    lines = [
        "| group | n | TPOT mean | median | p90 | bias | TTFT mean | median | p90 | bias |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = []
    for name, members in groups.items():
        tpot, ttft = (np.array([getattr(c, e) for c in members]) for e in ("tpot_error", "ttft_error"))
        rows.append(
            (float(np.abs(tpot).mean()), f"| {name} | {len(members)} | {_row(tpot)} | {_row(ttft)} |")
        )
    return "\n".join(lines + [line for _, line in sorted(rows, reverse=True)])


def _row(errors: Any) -> str:
    size = np.abs(errors)
    figures = (size.mean(), np.median(size), np.quantile(size, 0.9))
    return " | ".join(f"{100 * x:.1f}" for x in figures) + f" | {100 * errors.mean():+.1f}"


def one_point_each(cases: list[Case]) -> str:
    """Errors after one point of each set-up fixed its global factor (the others are judged)."""
    setups: dict[tuple[object, ...], list[Case]] = defaultdict(list)
    for case in cases:
        setups[case.point.setup].append(case)
    errors: dict[str, list[float]] = defaultdict(list)
    for members in setups.values():
        if len(members) < 3:
            continue
        members = sorted(members, key=lambda c: (c.point.concurrency, c.point.row))
        known = members[len(members) // 2]
        for case in members:
            if case is not known:  # TPOT is proportional to step time
                errors[case.kind].append((1 + case.tpot_error) / (1 + known.tpot_error) - 1)
    lines = ["| group | n | TPOT mean | median | p90 | bias |", "|---|---|---|---|---|---|"]
    return "\n".join(lines + [f"| {kind} | {len(e)} | {_row(np.array(e))} |" for kind, e in errors.items()])


def recorded_table(folder: Path) -> str:
    """The recorded RTX 4090 run, as it is and after one coefficient fitted on its first third."""
    recorded = read_recorded(folder)
    third = len(recorded.trace) // 3
    factor = fit_time(
        lambda time: simulate_recorded(recorded, Calibration(time=time)).requests.finish_s[:third],
        recorded.last_token_s[:third],
        recorded.trace.arrival_s[:third],
    )
    plain = compare(recorded, simulate_recorded(recorded))
    fitted = compare(recorded, simulate_recorded(recorded, Calibration(time=factor)), first=third)
    lines = [
        f"| figure | uncalibrated | step time x {factor:.3f}, other two thirds |",
        "|---|---|---|",
    ]
    for name, error in plain.items():
        show = (
            (lambda v: f"{v:.1f}")
            if "mean abs" in name and "KV" not in name
            else (lambda v: f"{100 * v:+.1f} %")
        )
        lines.append(f"| {name} | {show(error)} | {show(fitted[name])} |")
    return "\n".join(lines)


def report(evidence: Path, every: int = 1, jobs: int = 1) -> str:
    """The whole report; ``every`` takes only each so-manieth point."""
    cases, failed = simulate_points(read_points(evidence / "serving/measured_points.csv")[::every], jobs)
    judged = [c for c in cases if not c.kind.startswith("apart")]
    apart = [c for c in cases if c.kind.startswith("apart")]
    parts = [
        "### Recorded run: vLLM 0.19, Llama-3.1-8B, RTX 4090, 300 requests",
        recorded_table(evidence / "runs"),
        "### Closed-loop points, errors in percent", table(judged, "kind"),
        "### The same by model, GPU, engine and precision", table(judged, "label"),
        "### With one point of each set-up known", one_point_each(judged),
        "### Reported apart", table(apart, "kind"), table(apart, "label"),
        "### Reported runs: throughput", reported_rows(evidence / "serving/reported_runs.jsonl"),
    ]  # fmt: skip
    if failed:
        parts += [
            f"### Not simulated ({len(failed)})",
            "\n".join(f"- {line}" for line in sorted(set(failed))),
        ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Command line of the harness."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("evidence", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="also write the report there")
    parser.add_argument("--every", type=int, default=1, help="take each so-manieth point")
    parser.add_argument("--jobs", type=int, default=2)
    a = parser.parse_args()
    text = report(a.evidence, a.every, a.jobs)
    if a.output:
        a.output.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
