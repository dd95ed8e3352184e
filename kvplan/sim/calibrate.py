"""Fit a clock to one machine: one to six factors that make simulated latencies meet measured ones.

The model stays; only its constants are scaled (`Calibration`). Residuals are logarithms of simulated over
measured, with a loss that forgives outliers and priors as wide as constants were seen to differ between
machines. A saturated run pins the sum of weight and KV reading, not each: vary the load, or fit one factor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.errors import InputError
from kvplan.sched.core import Clock, Rules
from kvplan.sim.run import simulate
from kvplan.sim.steptime import Calibration
from kvplan.sim.tables import request_times
from kvplan.trace.schema import Trace

Array = NDArray[np.float64]

PRIOR_SD = {"time": 0.3, "bus": 0.7, "kv": 0.25, "flops": 0.2, "small": 0.7, "weights": 0.12}
"""Spread of the logarithm of each factor between machines (STEP_MODEL of the design notes, section 5)."""
ORDER = ("time", "bus", "kv", "flops", "small")
"""Which factors to free first; ``bus`` only where ranks talk over PCIe."""
NOISE = 0.05  # spread of a measured figure round the model, as a logarithm
LOWEST, HIGHEST = 0.2, 5.0


@dataclass(frozen=True)
class Measured:
    """Latencies of a recorded run, one row a request, as the client saw them (NaN = unknown)."""

    trace: Trace
    ttft_s: Array
    tpot_s: Array
    max_concurrency: int = 0
    source: str = ""

    def figures(self, ttft_s: Array, tpot_s: Array, rows: NDArray[np.intp]) -> Array:
        """What is compared: median, mean and 90th percentile of TTFT and TPOT over ``rows``, in seconds."""
        out = []
        for values in (ttft_s[rows], tpot_s[rows]):
            known = values[~np.isnan(values)]
            if len(known):
                out += [np.median(known), known.mean(), np.percentile(known, 90)]
        return np.array(out)


@dataclass(frozen=True)
class Fit:
    """A calibration with its mean absolute relative errors: on what it saw before and after, and held out."""

    calibration: Calibration
    before: float
    after: float
    held_out_before: float
    held_out: float
    evaluations: int


def fit_time(simulate_end: Callable[[float], Any], measured_end_s: Any, arrival_s: Any) -> float:
    """The one factor on step time at which simulated end-to-end times meet measured ones in the mean log.

    ``simulate_end(factor)`` gives finish times in seconds; secant steps on the logarithm, about five runs.
    """

    def miss(log_factor: float) -> float:
        took = np.asarray(simulate_end(float(np.exp(log_factor)))) - arrival_s
        return float(np.mean(np.log(took / (measured_end_s - arrival_s))))

    x0, f0 = 0.0, miss(0.0)
    x1 = -f0
    for _ in range(8):
        f1 = miss(x1)
        if abs(f1) < 1e-3 or f1 == f0:
            break
        x0, x1, f0 = x1, x1 - f1 * (x1 - x0) / (f1 - f0), f1
        x1 = float(np.clip(x1, np.log(LOWEST), np.log(HIGHEST)))
    return float(np.exp(x1))


def fit_run(
    measured: Measured,
    rules: Rules,
    clock: Callable[[Calibration], Clock],
    names: Sequence[str] = ("time",),
    start: Calibration | None = None,
) -> Fit:
    """Fit ``names`` to one measured run and judge on the requests that arrived last (one third).

    ``clock`` builds the clock of a calibration (`clock_for` with its model, GPU and settings). Raises
    `InputError` for an unknown factor or a run without latencies.
    """
    unknown = [name for name in names if name not in PRIOR_SD]
    if unknown:
        raise InputError(f"factor '{unknown[0]}' is unknown; use one of {', '.join(PRIOR_SD)}.")
    n = len(measured.trace)
    order = np.argsort(measured.trace.arrival_s, kind="stable")
    seen, held = order[1 : max(2, 2 * n // 3)], order[max(2, 2 * n // 3) :]  # the first is a cold start
    targets = {id(rows): measured.figures(measured.ttft_s, measured.tpot_s, rows) for rows in (seen, held)}
    if not len(targets[id(seen)]):
        raise InputError(f"{measured.source}: no request has a time to first token or per output token.")
    runs = 0

    def ratios(calibration: Calibration, rows: NDArray[np.intp]) -> Array:
        nonlocal runs
        runs += 1
        times = request_times(simulate(measured.trace, rules, clock(calibration)))
        simulated = measured.figures(
            np.where(np.isnan(measured.ttft_s), np.nan, times.ttft_s),
            np.where(np.isnan(measured.tpot_s), np.nan, times.tpot_s),
            rows,
        )
        return np.asarray(np.log(simulated / targets[id(rows)]))

    first = start or Calibration()
    found = minimise(lambda c: ratios(c, seen), first, names)

    def error(calibration: Calibration, rows: NDArray[np.intp]) -> float:
        return float(np.mean(np.abs(np.expm1(ratios(calibration, rows))))) if len(rows) else float("nan")

    return Fit(found, error(first, seen), error(found, seen), error(first, held), error(found, held), runs)


def minimise(
    residual: Callable[[Calibration], Array], start: Calibration, names: Sequence[str], steps: int = 12
) -> Calibration:
    """Gauss-Newton with soft-L1 weights on the logarithms of the factors, priors as extra residuals."""
    sd = np.array([PRIOR_SD[name] for name in names])

    def at(x: Array) -> Calibration:
        return replace(start, **{k: float(np.exp(v)) for k, v in zip(names, x, strict=True)})

    def whole(x: Array) -> Array:
        r = residual(at(x)) / NOISE
        weighted = np.sqrt(2.0 * (np.sqrt(1.0 + r * r) - 1.0)) * np.sign(r)
        return np.concatenate([weighted, x / sd])

    x = np.log([getattr(start, name) for name in names])
    r = whole(x)
    damping = 1e-3
    for _ in range(steps):
        jacobian = np.stack([(whole(x + h) - r) / 0.02 for h in np.eye(len(x)) * 0.02], axis=1)
        normal = jacobian.T @ jacobian
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), jacobian.T @ r)
        trial = np.clip(x - step, np.log(LOWEST), np.log(HIGHEST))
        trial_r = whole(trial)
        if trial_r @ trial_r < r @ r:
            small = np.abs(trial - x).max() < 1e-3
            x, r, damping = trial, trial_r, damping / 3
            if small:
                break
        else:
            damping *= 10
            if damping > 1e4:
                break
    return at(x)


# ---------------------------------------------------------------------------------------------------- files


def save(path: Path, fit: Fit, about: dict[str, Any]) -> None:
    """Write the factors with their errors and what they were fitted on (model, GPU, source)."""
    errors = {f.name: getattr(fit, f.name) for f in fields(fit) if f.name != "calibration"}
    data = {"calibration": asdict(fit.calibration), "errors": errors, "about": about}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> tuple[Calibration, dict[str, Any]]:
    """The factors in a file that `save` wrote, and what they were fitted on."""
    try:
        data = json.loads(path.read_text("utf-8"))
        factors = {name: float(value) for name, value in data["calibration"].items()}
    except OSError as error:
        raise InputError(f"--calibration {path}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            f"--calibration {path} is not a calibration.\n  kvplan calibrate writes one from a bench result."
        ) from None
    known = {f.name for f in fields(Calibration)}
    for name, value in factors.items():
        if name not in known:
            raise InputError(
                f"--calibration {path}: factor '{name}' is unknown; use {', '.join(sorted(known))}."
            )
        if not 0.01 <= value <= 100:
            raise InputError(f"--calibration {path}: {name} is {value:g}; must lie between 0.01 and 100.")
    return Calibration(**factors), dict(data.get("about") or {})
