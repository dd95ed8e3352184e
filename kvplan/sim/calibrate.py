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


def fit_runs(
    runs: Sequence[tuple[Measured, Rules]],
    clock: Callable[[Calibration], Clock],
    names: Sequence[str] = ("time",),
    start: Calibration | None = None,
) -> Fit:
    """Fit ``names`` to measured runs of one set-up and judge on each run's last third of arrivals.

    ``clock`` builds the clock of a calibration (`clock_for` with its model, GPU and settings); each run has
    the rules of its own closed loop or none. Raises `InputError` for an unknown factor or no latencies.
    """
    unknown = [name for name in names if name not in PRIOR_SD]
    if unknown:
        raise InputError(f"factor '{unknown[0]}' is unknown; use one of {', '.join(PRIOR_SD)}.")
    cases = [_Case(measured, rules, *_thirds(measured)) for measured, rules in runs]
    evaluations = 0

    def ratios(calibration: Calibration, held: bool) -> Array:
        nonlocal evaluations
        evaluations += 1
        made = clock(calibration)
        return np.concatenate([case.ratios(made, held) for case in cases])

    first = start or Calibration()
    found = minimise(lambda c: ratios(c, False), first, names)

    def error(calibration: Calibration, held: bool) -> float:
        r = ratios(calibration, held)
        return float(np.mean(np.abs(np.expm1(r)))) if len(r) else float("nan")

    return Fit(
        found, error(first, False), error(found, False), error(first, True), error(found, True), evaluations
    )


@dataclass(frozen=True)
class _Case:
    measured: Measured
    rules: Rules
    seen: NDArray[np.intp]
    held: NDArray[np.intp]

    def ratios(self, clock: Clock, held: bool) -> Array:
        """log(simulated / measured) of the figures that are known."""
        m, rows = self.measured, self.held if held else self.seen
        times = request_times(simulate(m.trace, self.rules, clock))
        simulated = m.figures(
            np.where(np.isnan(m.ttft_s), np.nan, times.ttft_s),
            np.where(np.isnan(m.tpot_s), np.nan, times.tpot_s),
            rows,
        )
        return np.asarray(np.log(simulated / m.figures(m.ttft_s, m.tpot_s, rows)))


def _thirds(measured: Measured) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows to fit on and rows to judge on, by arrival; the very first, a cold start, is in neither."""
    order = np.argsort(measured.trace.arrival_s, kind="stable")
    cut = max(2, 2 * len(order) // 3)
    if not len(measured.figures(measured.ttft_s, measured.tpot_s, order[1:cut])):
        raise InputError(f"{measured.source}: no request has a time to first token or per output token.")
    return order[1:cut], order[cut:]


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
