"""Number formats of a served model: bytes moved and units used by each kind of GEMM."""

from __future__ import annotations

from dataclasses import dataclass

from kvplan.sim.constants import Kernels
from kvplan.spec.engine import EngineSettings
from kvplan.spec.model import LayerKind, ModelSpec

INT4 = {
    "awq",
    "awq_marlin",
    "gptq",
    "gptq_marlin",
    "compressed-tensors",
    "bitsandbytes",
    "auto-round",
    "moe_wna16",
}
FP8 = {
    "fp8",
    "modelopt",
    "modelopt_fp8",
    "fbgemm_fp8",
    "compressed-tensors",
    "quark",
    "ptpc_fp8",
    "experts_int8",
}
FP4 = {"modelopt_fp4", "nvfp4", "compressed-tensors"}
MXFP4 = {"mxfp4", "gpt_oss_mxfp4", "quark"}


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
    """Formats by kind of matrix; the output head and the router stay in 16 bit."""

    attention: Format
    mlp: Format
    experts: Format
    kv_bytes: float
    kv_dtype: str  # bf16 or fp8, as the attention constants are named
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, str]:
        return self.mlp.gemm, self.experts.moe


def formats_for(model: ModelSpec, settings: EngineSettings, kernels: Kernels) -> Formats:
    """Formats of ``model`` as ``settings`` serve it on a GPU with ``kernels``.

    ``--quantization`` wins over the checkpoint's own; weight-only formats (and fp8 or fp4 on a GPU without
    the unit) move few bytes and compute in 16 bit, as the engine's Marlin kernels do.
    """
    own = model.quantization
    method = (settings.quantization or (own.method if own else "") or "").lower()
    bits = own.bits if own else 16
    if settings.quantization and (own is None or own.method.lower() != method):
        bits = 4 if method in INT4 - {"compressed-tensors"} | FP4 | MXFP4 else 8
    group = own.group_size if own and own.group_size > 0 else 128
    block = bool(own and own.block_shape)
    notes: list[str] = []
    quantised = BF16
    if method in MXFP4 and bits == 4:
        quantised = Format(0.53125, 2.0, "bf16", "w4a16_mxfp4", "bf16")
    elif "fp4" in method or (method == "modelopt" and bits == 4):
        if kernels.has("fp4"):
            quantised = Format(0.5625, 0.5625, "nvfp4", "nvfp4", "fp4")
        else:
            quantised = Format(0.5625, 2.0, "bf16", "int4_wo", "bf16")
            notes.append("no fp4 unit on this GPU: weights in 4 bit, arithmetic in 16 bit")
    elif bits == 8 and method in FP8:
        name = "fp8_block" if block else "fp8"
        if kernels.has("fp8"):
            quantised = Format(1.0, 1.0, name, name, "fp8")
        else:
            quantised = Format(1.0, 2.0, "bf16", "bf16", "bf16")
            notes.append("no fp8 unit on this GPU: weights in 8 bit, arithmetic in 16 bit")
    elif method and bits < 16:
        quantised = Format(bits / 8 + 2.5 / group, 2.0, "bf16", "int4_wo", "bf16")
        notes.append(f"{method} GEMMs have no table: 16-bit constants on {bits}-bit weights")
    ignored = " ".join(own.ignored) if own else ""
    mla = any(layer.kind is LayerKind.MLA for layer in model.layers)
    keep_attention = "attn" in ignored or "attention" in ignored or quantised.moe == "w4a16_mxfp4"
    keep_attention |= mla and quantised.weight_bytes < 1
    keep_mlp = "mlp.gate_proj" in ignored or "shared_experts" in ignored or quantised.moe == "w4a16_mxfp4"
    fp8_kv = settings.kv_cache_dtype.startswith(("fp8", "e4m3", "e5m2"))
    kv_bytes = 1.0 if fp8_kv else 4.0 if model.dtype == "float32" and settings.dtype == "auto" else 2.0
    return Formats(
        attention=BF16 if keep_attention else quantised,
        mlp=BF16 if keep_mlp else quantised,
        experts=quantised,
        kv_bytes=kv_bytes,
        kv_dtype="fp8" if fp8_kv else "bf16",
        notes=tuple(notes),
    )
