"""What error to expect of a modelled latency: figures measured on recorded runs, by kind of case.

Sources: errors of this model on published serving points (`make fidelity`) and of its predecessors on a
recorded run; see the fidelity table in the README. An error is a share: 0.10 is 10 %.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvplan.sim.constants import kernels_for
from kvplan.sim.formats import formats_for
from kvplan.sim.steptime import Calibration
from kvplan.spec.engine import EngineSettings
from kvplan.spec.gpu import GPU
from kvplan.spec.model import LayerKind, ModelSpec

TTFT_ELASTICITY = 1.3
"""Percent of TTFT per percent of step time deep in saturation; 2 to 2.7 in a run that queues for a while,
3.4 to 5.5 in the tail just below saturation. A band is better had by running the ends (`stretched`)."""


@dataclass(frozen=True)
class Envelope:
    """Expected errors of TPOT and TTFT: half the cases lie within ``*_median``, nine in ten in ``*_p90``.

    ``basis`` says in one line where they come from; ``warnings`` name what is outside the evidence.
    """

    tpot_median: float
    tpot_p90: float
    ttft_median: float
    ttft_p90: float
    basis: str
    warnings: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """One line for a table's foot."""
        return (
            f"expected error: TPOT {self.tpot_median:.0%} (9 of 10 within {self.tpot_p90:.0%}), "
            f"TTFT {self.ttft_median:.0%} (9 of 10 within {self.ttft_p90:.0%}); {self.basis}"
        )


def envelope_for(
    model: ModelSpec, gpu: GPU, settings: EngineSettings, calibration: Calibration | None = None
) -> Envelope:
    """The envelope of ``model`` on ``gpu`` under ``settings``; a calibrated clock has a narrow one."""
    kernels = kernels_for(gpu)
    formats = formats_for(model, settings, kernels)
    warnings = [*kernels.notes, *formats.notes]
    # Closed-loop points of vLLM on H100, H200 and B200, as `make fidelity` prints them (rounded up).
    tpot, tpot90, ttft, ttft90 = (0.07, 0.20, 0.20, 0.46) if model.moe else (0.05, 0.10, 0.15, 0.40)
    basis = "kernel tables of this GPU, no serving run fitted"

    def widen(median: float, p90: float, ttft_median: float, ttft_p90: float, why: str) -> None:
        nonlocal tpot, tpot90, ttft, ttft90, basis
        if median > tpot:
            basis = why
        tpot, tpot90 = max(tpot, median), max(tpot90, p90)
        ttft, ttft90 = max(ttft, ttft_median), max(ttft90, ttft_p90)

    if settings.engine != "vllm":
        widen(0.10, 0.35, 0.50, 0.85, f"{settings.engine} is timed with vLLM's kernels")
    if kernels.evidence == "class":
        widen(0.15, 0.25, 0.25, 0.60, f"no kernel tables of {gpu.name}: constants of its class")
    elif kernels.evidence == "sheet":
        widen(0.25, 0.40, 0.35, 0.80, f"data-sheet figures of {gpu.name} only")
    world = settings.tensor_parallel_size * settings.pipeline_parallel_size * settings.data_parallel_size
    if world > 1 and not gpu.has_nvlink:
        widen(0.20, 0.35, 0.35, 0.80, "collectives over PCIe, which differ 1.3 to 2.5 times between machines")
        warnings.append("PCIe collectives: one measured run pins the bus (kvplan calibrate)")
    if model.moe:
        shape = (
            model.hidden_size,
            model.moe.intermediate_size,
            model.moe.experts_per_token,
            model.moe.experts,
        )
        ep = (
            settings.tensor_parallel_size * settings.data_parallel_size
            if settings.enable_expert_parallel
            else 1
        )
        experts_tp = settings.tensor_parallel_size * settings.data_parallel_size // ep
        if kernels.moe_curve(formats.quantised.moe, shape, experts_tp, ep) is None:
            widen(0.25, 0.45, 0.30, 0.70, "expert GEMMs of this shape were never measured")
    if formats.quantised.gemm == "bf16" and formats.quantised.weight_bytes < 2 and not model.moe:
        widen(0.20, 0.35, 0.25, 0.60, "weight-only formats have no kernel table")
    if settings.pipeline_parallel_size > 1:
        widen(0.30, 0.60, 0.40, 0.80, "pipeline stages are taken one after another, without overlap")
        warnings.append("pipeline parallel: no run with it was ever compared; throughput is a lower bound")
    if settings.data_parallel_size > 1:
        warnings.append("data parallel: ranks are taken as equally loaded")
    if any(layer.kind is LayerKind.STATE for layer in model.layers):
        widen(0.30, 0.50, 0.40, 0.80, "linear-attention and Mamba layers have no kernel table")
    if settings.num_speculative_tokens:
        widen(0.30, 0.60, 0.30, 0.60, "speculative decoding was never compared with a run")
    if calibration is not None and calibration != Calibration():
        tpot, tpot90, ttft, ttft90 = 0.03, 0.05, 0.05, 0.10
        basis = "calibrated; holds on the machine and near the load it was calibrated at"
    return Envelope(tpot, tpot90, ttft, ttft90, basis, tuple(warnings))
