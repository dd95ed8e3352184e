"""Kernel constants by GPU: how near each kernel comes to the GPU's peak, and what it costs to start one.

The figures live in ``data``, made by ``fit_kernels.py`` from measured kernel tables.
An efficiency is a share of the peak stored beside it: the two are a pair and must not be mixed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from statistics import median
from typing import Any

from kvplan.spec.gpu import GPU

# GPUs whose kernels were measured: the catalogue's name and the name in the table.
MEASURED = {
    "A100-SXM4-80GB": "a100_sxm",
    "H100 SXM": "h100_sxm",
    "H200 SXM": "h200_sxm",
    "B200": "b200_sxm",
    "L40S": "l40s",
    "RTX PRO 6000 Blackwell Server": "rtx_pro_6000",
}


@dataclass(frozen=True)
class GemmFit:
    """``t = fixed + ((bytes/(e_w·BW))^p + (flops/(e_f·peak))^p)^(1/p) + 3·m·k/(e_q·BW)``."""

    weight_efficiency: float
    flop_efficiency: float
    fixed_s: float
    p: float
    quantize_efficiency: float  # 0: no separate kernel quantises the activations
    error: float  # mean absolute relative error on shapes the fit has not seen


@dataclass(frozen=True)
class MoeFit:
    """The same shape for grouped expert GEMMs, with the traffic of permuted activations added."""

    weight_efficiency: float
    flop_efficiency: float
    fixed_s: float
    p: float
    activation_efficiency: float
    error: float


@dataclass(frozen=True)
class MoeCurve:
    """Measured seconds of one layer's experts by tokens of all ranks; straight between points in log-log."""

    tokens: tuple[float, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class AttentionFit:
    """Decode is ``fixed + bytes/(e·BW)``; prefill ``fixed + flops·(1 + I0/n)/(e·peak)``."""

    decode_fixed_s: float
    kv_efficiency: float
    prefill_fixed_s: float
    prefill_efficiency: float
    ramp_tokens: float  # I0
    error: float


@dataclass(frozen=True)
class Links:
    """One all-reduce over t GPUs of ``bytes`` each is ``a + 2(t-1)/t · bytes/bus``.

    The engine's own kernel for small messages; a second law for large ones where that is faster.
    """

    graph_s: float
    eager_s: float
    bus_bytes_per_s: float
    large_s: float
    large_bus_bytes_per_s: float  # 0: no second law


@dataclass(frozen=True)
class Kernels:
    """All constants for one GPU, with the peaks they refer to.

    ``evidence``: ``measured`` (this GPU has kernel tables), ``class`` (constants of a sibling) or ``sheet``
    (median of all measured GPUs).
    """

    key: str
    evidence: str
    bandwidth: float
    peaks: dict[str, float]
    small_kernel_s: float  # shortest kernel seen: what a launch inside a graph costs
    table: dict[str, Any]
    notes: tuple[str, ...] = ()
    moe_factor: float = 1.0  # a calibration's factor on measured expert times

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s of ``dtype``; 16-bit when the GPU has no unit for it."""
        return self.peaks.get(dtype) or self.peaks["bf16"]

    def has(self, dtype: str) -> bool:
        return bool(self.peaks.get(dtype))

    def gemm(self, dtype: str) -> GemmFit:
        """Constants of a GEMM in bf16, fp8, fp8_block or nvfp4; other GPUs' where this one has none."""
        fits = self.table["gemm"]
        dtype = "fp8" if dtype == "fp8_block" else dtype  # its tables time a launch, not the kernel
        row = fits.get(dtype) or _nearest("gemm", dtype) or fits["bf16"]
        return GemmFit(
            row["e_w"], row["e_f"], row["c_us"] * 1e-6, row["p"], row.get("e_q") or 0.0, row["error"]
        )

    def moe(self, dtype: str) -> MoeFit:
        """Constants of expert GEMMs over all shapes; other GPUs' where this one has none."""
        row = self.table.get("moe", {}).get(self._moe_dtype(dtype)) or _nearest("moe", dtype)
        row = row or _nearest("moe", "bf16")
        assert row is not None  # bf16 is in the constants file
        return MoeFit(row["e_w"], row["e_f"], row["c_us"] * 1e-6, row["p"], row["e_act"], row["error"])

    def _moe_dtype(self, dtype: str) -> str:
        """Per-tensor fp8 experts on Hopper were timed with a kernel at a fifth of the bandwidth.

        Engines do not pick it by default: the block-scaled ones stand for them.
        """
        return "fp8_block" if dtype == "fp8" and self.key in ("h100_sxm", "h200_sxm") else dtype

    def moe_curve(self, dtype: str, shape: tuple[int, int, int, int], tp: int, ep: int) -> MoeCurve | None:
        """Measured times of experts of this very shape (hidden, inner, top-k, experts) and split, or None."""
        if self.evidence != "measured":
            return None
        data = load("expert_curves.json")
        name = "x".join(map(str, shape))
        us = data["gpus"].get(self.key, {}).get(self._moe_dtype(dtype), {}).get(name, {}).get(f"{tp},{ep}")
        if us is None:
            return None
        tokens = tuple(float(t) for t in data["tokens"])
        return MoeCurve(tokens, tuple(v * 1e-6 / self.moe_factor for v in us))

    def attention(self, kv_dtype: str, head_dim: int = 128) -> AttentionFit:
        """Constants of attention with a KV cache of ``bf16`` or ``fp8``, prefill at the nearest head size."""
        decode, prefill = self.table["decode"], self.table["prefill"]
        efficiency = decode["e_kv"].get(kv_dtype) or decode["e_kv"]["bf16"]
        sizes = {"128": prefill["e_a"], **prefill.get("e_a_by_head_dim", {})}
        compute = sizes[min(sizes, key=lambda size: abs(int(size) - head_dim))]
        return AttentionFit(
            decode["c_us"] * 1e-6, efficiency, prefill["c_us"] * 1e-6, compute, prefill["I0"],
            decode["error"],
        )  # fmt: skip

    def links(self, degree: int) -> Links:
        """Constants of an all-reduce over ``degree`` GPUs (the nearest measured degree).

        Over PCIe boxes differ widely and serving reaches less than the tables: see ``pcie_bus_source``.
        """
        rows = self.table["allreduce"]
        row = rows[min(rows, key=lambda k: abs(int(k) - degree))]
        bus_factor = 1.0 if self.table.get("nvlink", True) else load()["pcie_bus_factor"]
        return Links(
            row["graph_us"] * 1e-6, row["eager_us"] * 1e-6, row["bus_gb_s"] * bus_factor * 1e9,
            row.get("large_us", 0.0) * 1e-6, row.get("large_bus_gb_s", 0.0) * 1e9,
        )  # fmt: skip


@cache
def load(name: str = "kernel_constants.json") -> dict[str, Any]:
    """A data file as it is stored."""
    data: dict[str, Any] = json.loads(resources.files("kvplan.sim").joinpath("data", name).read_text("utf-8"))
    return data


def _nearest(table: str, dtype: str) -> dict[str, Any] | None:
    """Median over the measured GPUs of the constants of ``dtype``: what an unmeasured GPU is given."""
    rows = [g[table][dtype] for g in load()["gpus"].values() if dtype in g.get(table, {})]
    if not rows:
        return None
    keys = [k for k in rows[0] if k not in ("source", "n")]
    merged = {
        k: median(r[k] for r in rows if r.get(k) is not None) for k in keys if any(r.get(k) for r in rows)
    }
    return {"c_us": 0.0, "e_q": 0.0, **merged}


def kernels_for(gpu: GPU) -> Kernels:
    """Constants for ``gpu``: its own if measured, else those of its class on its own data-sheet peaks."""
    data = load()
    key = MEASURED.get(gpu.name)
    small_s = data["small_kernel_us"] * 1e-6
    if key:
        entry = data["gpus"][key]
        peaks = dict(entry["peaks"])
        return Kernels(key, "measured", peaks.pop("bw"), peaks, small_s, entry)
    key, note = _class_of(gpu)
    entry = data["gpus"].get(key) or data["classes"][key]
    peaks = {("fp4" if k == "nvfp4" else k): v for k, v in gpu.peak_flops.items() if v}
    peaks.setdefault("bf16", peaks.get("fp16", 0.0) or _guess_flops(gpu, entry))
    if gpu.has_nvlink and not entry.get("nvlink", True):
        entry = {**entry, "nvlink": True, "allreduce": data["gpus"]["h100_sxm"]["allreduce"]}
    elif not gpu.has_nvlink and entry.get("nvlink", True):
        entry = {**entry, "nvlink": False, "allreduce": data["gpus"]["rtx_pro_6000"]["allreduce"]}
    evidence = "sheet" if key == "h100_sxm" and gpu.arch != "Hopper" else "class"
    return Kernels(key, evidence, gpu.memory_bandwidth, peaks, small_s, entry, notes=(note,))


def _class_of(gpu: GPU) -> tuple[str, str]:
    """The measured GPU whose kernels are nearest, and the sentence that says so."""
    number = gpu.compute_capability or ""
    capability = float(number) if number.replace(".", "").isdigit() else 0.0
    if gpu.vendor.upper() != "NVIDIA" or capability == 0.0:
        key = "h100_sxm"
    elif gpu.arch == "Ada" and gpu.name.startswith("RTX 40"):
        key = "ada_geforce"
    elif gpu.arch == "Ada":
        key = "l40s"
    elif gpu.arch == "Hopper":
        key = "h200_sxm" if gpu.memory_bandwidth >= 4e12 else "h100_sxm"
    elif gpu.arch.startswith(("Blackwell", "Rubin")):
        key = "rtx_pro_6000" if capability >= 11 else "b200_sxm"
    else:
        key = "a100_sxm"
    return key, f"{gpu.name} has no kernel tables: constants of {key} on its data-sheet peaks"


def _guess_flops(gpu: GPU, entry: dict[str, Any]) -> float:
    """16-bit FLOP/s where no sheet has it: from fp8 or fp4, else the class's flops a byte."""
    for dtype, divisor in (("fp8", 2.0), ("fp4", 4.0)):
        if gpu.peak_flops.get(dtype):
            return gpu.peak_flops[dtype] / divisor
    return float(entry["peaks"]["bf16"] / entry["peaks"]["bw"] * gpu.memory_bandwidth)


def scaled(kernels: Kernels, **factors: float) -> Kernels:
    """Kernels with efficiencies multiplied: ``weights``, ``flops``, ``kv``, ``bus``, ``small``."""
    table = json.loads(json.dumps(kernels.table))
    for dtype_row in table["gemm"].values():
        dtype_row["e_w"] *= factors.get("weights", 1.0)
        dtype_row["e_f"] *= factors.get("flops", 1.0)
    for row in table.get("moe", {}).values():
        row["e_w"] *= factors.get("weights", 1.0)
        row["e_f"] *= factors.get("flops", 1.0)
    table["prefill"]["e_a"] *= factors.get("flops", 1.0)
    for size in table["prefill"].get("e_a_by_head_dim", {}):
        table["prefill"]["e_a_by_head_dim"][size] *= factors.get("flops", 1.0)
    table["decode"]["e_kv"] = {k: v * factors.get("kv", 1.0) for k, v in table["decode"]["e_kv"].items() if v}
    for row in table["allreduce"].values():
        row["bus_gb_s"] *= factors.get("bus", 1.0)
        row["large_bus_gb_s"] = row.get("large_bus_gb_s", 0.0) * factors.get("bus", 1.0)
    return replace(
        kernels,
        table=table,
        small_kernel_s=kernels.small_kernel_s * factors.get("small", 1.0),
        moe_factor=factors.get("weights", 1.0),
    )
