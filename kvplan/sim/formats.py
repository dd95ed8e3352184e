"""Number formats of a served model: bytes moved and units used by each kind of GEMM."""

from __future__ import annotations

from dataclasses import dataclass

from kvplan.sim.constants import Kernels
from kvplan.spec.engine import EngineSettings
from kvplan.spec.model import ModelSpec, Quantization
from kvplan.spec.weights import effective_quantization

FP8_METHODS = ("fp8", "modelopt", "compressed-tensors")  # those whose 8-bit form is fp8 arithmetic


@dataclass(frozen=True)
class Format:
    """``gemm`` and ``moe`` name the fitted constants; bytes are per element, scales included."""

    weight_bytes: float
    activation_bytes: float
    gemm: str
    moe: str
    peak: str  # dtype of the arithmetic


BF16 = Format(2.0, 2.0, "bf16", "bf16", "bf16")


@dataclass(frozen=True)
class Formats:
    """``quantised`` is the format of the matrices that quantisation covers; the others have 16 bit."""

    quantised: Format
    kv_bytes: float
    kv_dtype: str  # bf16 or fp8, as the attention constants are named
    notes: tuple[str, ...] = ()


def formats_for(model: ModelSpec, settings: EngineSettings, kernels: Kernels) -> Formats:
    """Formats of ``model`` as ``settings`` serve it on a GPU with ``kernels``.

    Weight-only formats (and fp8 or fp4 on a GPU without the unit) move few bytes and compute in 16 bit, as
    the engine's Marlin kernels do.
    """
    notes: list[str] = []
    fp8_kv = settings.kv_cache_dtype.startswith(("fp8", "e4m3", "e5m2"))
    return Formats(
        quantised=_quantised(effective_quantization(model, settings), kernels, notes),
        kv_bytes=1.0 if fp8_kv else 4.0 if settings.kv_cache_dtype == "float32" else 2.0,
        kv_dtype="fp8" if fp8_kv else "bf16",
        notes=tuple(notes),
    )


def _quantised(quantization: Quantization | None, kernels: Kernels, notes: list[str]) -> Format:
    if quantization is None or quantization.bits >= 16:
        return BF16
    method, bits = quantization.method, quantization.bits
    if method == "mxfp4":
        return Format(0.53125, 2.0, "bf16", "w4a16_mxfp4", "bf16")
    if "fp4" in method:
        if kernels.has("fp4"):
            return Format(0.5625, 0.5625, "nvfp4", "nvfp4", "fp4")
        notes.append("no fp4 unit on this GPU: weights in 4 bit, arithmetic in 16 bit")
        return Format(0.5625, 2.0, "bf16", "int4_wo", "bf16")
    if bits == 8 and method.startswith(FP8_METHODS):
        name = "fp8_block" if quantization.block_shape else "fp8"
        if kernels.has("fp8"):
            return Format(1.0, 1.0, name, name, "fp8")
        notes.append("no fp8 unit on this GPU: weights in 8 bit, arithmetic in 16 bit")
        return Format(1.0, 2.0, "bf16", "bf16", "bf16")
    notes.append(f"{method} GEMMs have no table: 16-bit constants on {bits}-bit weights")
    scales = 2.5 / quantization.group_size if quantization.group_size > 0 else 0.0
    return Format(bits / 8 + scales, 2.0, "bf16", "int4_wo", "bf16")
