"""Fit the kernel constants from kernel tables: ``python -m kvplan.sim.fit_kernels TABLES [-o DIR]``.

``TABLES`` holds one folder a GPU with parquet files of GEMM, prefill attention, decode attention, MoE and
all-reduce times (NVIDIA aiconfigurator's format, latency in ms). Every law is fitted on four fifths of the
shapes and judged on the rest; the error written beside the constants is the held-out one. GPUs without tables
keep what the constants file holds. No serving run is read here.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

Array = NDArray[Any]
Columns = dict[str, Array]
Law = Callable[[Columns, Array], Array]

GPUS = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm")
SOURCE = "NVIDIA aiconfigurator @095f58a (2026-08-21), Apache-2.0, vLLM kernels"
DTYPES = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4"}
WEIGHT_BYTES = {
    "bf16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0,
    "nvfp4": 0.5625,
    "int4_wo": 0.53,
    "w4a16_mxfp4": 0.53125,
}
PEAK = {
    "bf16": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8",
    "nvfp4": "fp4",
    "int4_wo": "bf16",
    "w4a16_mxfp4": "bf16",
}
MIN_WEIGHT_BYTES = 2 << 20  # smaller matrices are noise and no served layer has them
MAX_ROWS = 4000  # a fit sees at most so many rows, evenly picked
CURVE_TOKENS = tuple(2**i for i in range(15))  # 1 to 16,384
ROUTING = "power_law_1.01"  # skewed routing, the measured distribution nearest to served prompts


# -------------------------------------------------------------------------------------------------- fitting


def fit_law(
    law: Law, rows: Columns, seconds: Array, start: Array, low: Array, high: Array, held: Array
) -> tuple[Array, float]:
    """Parameters of ``law`` that minimise a robust loss of log(law / seconds), and the held-out error.

    Levenberg-Marquardt on the logarithm of the parameters (all positive), residuals weighted as in soft-L1
    with scale 0.1, parameters kept within ``low`` and ``high``. ``held``: rows the fit does not see. Returns
    the mean absolute relative error on them (on all rows if none is held out).
    """
    train = np.flatnonzero(~held)
    if len(train) > MAX_ROWS:
        train = train[np.linspace(0, len(train) - 1, MAX_ROWS).astype(int)]
    sub = {name: values[train] for name, values in rows.items()}
    target = np.log(seconds[train])

    def residual(x: Array) -> Array:
        return np.asarray(np.log(law(sub, np.exp(x))) - target)

    x, floor, ceiling = np.log(start), np.log(low), np.log(high)
    damping, r = 1e-2, residual(x)
    cost = _soft_l1(r)
    for _ in range(80):
        jacobian = np.stack([(residual(x + step) - r) / 1e-5 for step in np.eye(len(x)) * 1e-5], axis=1)
        weight = 1.0 / np.sqrt(1.0 + (r / 0.1) ** 2)
        normal = jacobian.T @ (jacobian * weight[:, None])
        gradient = jacobian.T @ (weight * r)
        scale = np.diag(normal) + 1e-9
        trial = np.clip(x - np.linalg.solve(normal + damping * np.diag(scale), gradient), floor, ceiling)
        trial_r = residual(trial)
        trial_cost = _soft_l1(trial_r)
        if trial_cost < cost:
            done = cost - trial_cost < 1e-7 * cost
            x, r, cost, damping = trial, trial_r, trial_cost, max(damping / 3, 1e-9)
            if done:
                break
        else:
            damping *= 4
            if damping > 1e8:
                break
    test = np.flatnonzero(held) if held.any() else np.arange(len(seconds))
    predicted = law({name: values[test] for name, values in rows.items()}, np.exp(x))
    return np.exp(x), float(np.mean(np.abs(predicted / seconds[test] - 1.0)))


def _soft_l1(r: Array) -> float:
    return float(np.sum(np.sqrt(1.0 + (r / 0.1) ** 2) - 1.0))


def held_out(*keys: Array) -> Array:
    """One shape in five, picked by a checksum of its key so that the choice never changes."""
    labels = np.stack(keys, axis=1)
    shapes, inverse = np.unique(labels, axis=0, return_inverse=True)
    picked = np.array([zlib.crc32(repr([int(v) for v in shape]).encode()) % 5 == 0 for shape in shapes])
    return np.asarray(picked[np.ravel(inverse)])


def p_norm(a: Array, b: Array, p: float) -> Array:
    """``(a^p + b^p)^(1/p)`` without overflow."""
    high, low = np.maximum(a, b), np.minimum(a, b)
    return np.asarray(high * (1.0 + (low / high) ** p) ** (1.0 / p))


# --------------------------------------------------------------------------------------------------- tables


def read(folder: Path, stem: str) -> Columns:
    """Columns of the one table of that name in ``folder``; strings stay objects."""
    (path,) = folder.glob(f"{stem}_*.parquet")
    table = pq.read_table(path)
    return {name: np.asarray(table[name].to_numpy(zero_copy_only=False)) for name in table.column_names}


def pick(rows: Columns, mask: Array) -> Columns:
    return {name: values[mask] for name, values in rows.items()}


def fastest(rows: Columns, keys: tuple[str, ...]) -> Columns:
    """One row a shape: the engine picks the quickest of several kernels."""
    order = np.argsort(rows["latency"], kind="stable")
    labels = np.stack([rows[k][order].astype(np.int64) for k in keys], axis=1)
    _, first = np.unique(labels, axis=0, return_index=True)
    return pick(rows, order[np.sort(first)])


def fit_gemm(rows: Columns, dtype: str, peaks: dict[str, float]) -> dict[str, Any]:
    """Constants of ``c + p_norm(bytes/(e_w·BW), flops/(e_f·peak)) + 3·m·k/(e_q·BW)`` for one dtype."""
    wb, bw, peak = WEIGHT_BYTES[dtype], peaks["bw"], peaks[PEAK[dtype]]
    rows = fastest(rows, ("m", "n", "k"))
    size = rows["n"].astype(float) * rows["k"] * wb
    rows = pick(rows, (size >= MIN_WEIGHT_BYTES) & (rows["n"] >= 512) & (rows["k"] >= 512))
    x = {name: rows[name].astype(float) for name in ("m", "n", "k")}
    quantised = dtype != "bf16"

    def law(r: Columns, t: Array) -> Array:
        moved = r["n"] * r["k"] * wb + r["m"] * (r["k"] * wb + 2.0 * r["n"])
        time = p_norm(moved / (t[0] * bw), 2.0 * r["m"] * r["n"] * r["k"] / (t[1] * peak), t[3]) + t[2]
        return time + 3.0 * r["m"] * r["k"] / (t[4] * bw) if quantised else time

    start = np.array([0.8, 0.7, 5e-6, 2.0, 0.4])[: 5 if quantised else 4]
    low = np.array([0.2, 0.1, 1e-9, 1.0, 0.05])[: len(start)]
    high = np.array([1.1, 1.1, 3e-4, 8.0, 3.0])[: len(start)]
    found, error = fit_law(law, x, rows["latency"] * 1e-3, start, low, high, held_out(x["n"], x["k"]))
    e_q = round(float(found[4]), 3) if quantised else None
    return {
        "e_w": round(float(found[0]), 3), "e_f": round(float(found[1]), 3), "c_us": round(found[2] * 1e6, 2),
        "p": round(float(found[3]), 2), "e_q": e_q, "error": round(error, 3), "n": len(rows["m"]),
    }  # fmt: skip


def fit_decode(rows: Columns, bw: float) -> dict[str, Any]:
    """Decode attention, ``c + bytes of KV/(e·BW)``: one ``c`` from 16-bit rows, one ``e`` a KV dtype."""
    out: dict[str, Any] = {"e_kv": {}}
    for dtype, name, width in (("bfloat16", "bf16", 2.0), ("fp8", "fp8", 1.0)):
        group = rows["num_heads"] / rows["num_key_value_heads"]
        plain = rows["window_size"] == 0 if "window_size" in rows else np.ones(len(group), bool)
        keep = (rows["kv_cache_dtype"] == dtype) & plain & (rows["head_dim"] == 128)
        keep &= (group >= 4) & (group <= 16) & (rows["step"] >= 127)
        if not keep.any():
            out["e_kv"][name] = None
            continue
        r = pick(rows, keep)
        tokens = r["batch_size"].astype(float) * (r["step"] + 1.0)
        x = {"bytes": tokens * r["num_key_value_heads"] * 2.0 * 128.0 * width}
        held = held_out(r["num_heads"], r["num_key_value_heads"], r["batch_size"])

        def law(r: Columns, t: Array) -> Array:
            return t[0] + r["bytes"] / (t[1] * bw)

        found, error = fit_law(
            law,
            x,
            r["latency"] * 1e-3,
            np.array([12e-6, 0.8]),
            np.array([1e-6, 0.2]),
            np.array([1e-4, 1.2]),
            held,
        )
        out["e_kv"][name] = round(float(found[1]), 3)
        if name == "bf16":
            out.update(c_us=round(found[0] * 1e6, 1), error=round(error, 3), n=len(tokens))
    return out


def fit_prefill(rows: Columns, peak: float) -> dict[str, Any]:
    """Constants of prefill attention at head size 128, and its efficiency alone at other sizes."""
    out = fit_prefill_size(rows, peak, 128)
    sizes = [int(d) for d in np.unique(rows["head_dim"]) if d in (64, 192, 256)]
    out["e_a_by_head_dim"] = {}
    for size in sizes:
        if ((rows["head_dim"] == size) & (rows["kv_cache_dtype"] == "bfloat16")).any():
            out["e_a_by_head_dim"][str(size)] = fit_prefill_size(rows, peak, size, out)["e_a"]
    return out


def fit_prefill_size(
    rows: Columns, peak: float, head_dim: int, known: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Prefill attention: ``c + 4·heads·d·B·(n(n+1)/2 + n·I0/2)/(e·peak)``, lengths of 512 and more.

    ``known``: hold its ``c`` and ``I0`` and fit the efficiency only.
    """
    plain = rows["window_size"] == 0 if "window_size" in rows else np.ones(len(rows["isl"]), bool)
    keep = plain & (rows["kv_cache_dtype"] == "bfloat16") & (rows["head_dim"] == head_dim)
    keep &= rows["isl"] >= 512
    group = rows["num_heads"] / rows["num_key_value_heads"]
    r = pick(rows, keep & (rows["num_heads"] >= 4) & (group >= 4) & (group <= 16))
    n, b, heads = (r[name].astype(float) for name in ("isl", "batch_size", "num_heads"))
    flops = 4.0 * head_dim * heads * b
    x = {"pairs": flops * n * (n + 1) / 2, "tokens": flops * n / 2}

    def law(r: Columns, t: Array) -> Array:
        return t[1] + (r["pairs"] + r["tokens"] * t[2]) / (t[0] * peak)

    held = held_out(r["num_heads"], r["num_key_value_heads"], r["batch_size"])
    c, ramp, free = (known["c_us"] * 1e-6, known["I0"], 1.0001) if known else (1e-5, 800.0, 10.0)
    found, error = fit_law(
        law, x, r["latency"] * 1e-3, np.array([0.6, c, ramp]), np.array([0.1, c / free, ramp / free]),
        np.array([1.0, c * free, ramp * free]), held,
    )  # fmt: skip
    return {
        "e_a": round(float(found[0]), 3), "c_us": round(found[1] * 1e6, 1), "I0": round(float(found[2])),
        "error": round(error, 3), "n": len(n),
    }  # fmt: skip


def fit_all_reduce(rows: Columns) -> dict[str, dict[str, Any]]:
    """``a + 2(t-1)/t·bytes/bus`` by degree: slope from graph rows, the intercept of eager ones beside it."""
    out: dict[str, dict[str, Any]] = {}
    for degree in sorted({int(v) for v in rows["num_gpus"]}):
        mine = rows["num_gpus"] == degree
        graph = pick(rows, mine & (rows["backend"] == "vllm_graph"))
        wire = {"bytes": 2.0 * (degree - 1) / degree * graph["message_size"].astype(float)}

        def law(r: Columns, t: Array) -> Array:
            return t[0] + r["bytes"] / t[1]

        none = np.zeros(len(wire["bytes"]), bool)
        found, error = fit_law(
            law, wire, graph["latency"] * 1e-3, np.array([5e-6, 1.5e11]), np.array([1e-6, 1e9]),
            np.array([1e-4, 2e12]), none,
        )  # fmt: skip
        small = mine & (rows["backend"] == "vllm_eager") & (rows["message_size"] <= 65536)
        eager_us = float(np.median(rows["latency"][small])) * 1e3
        out[str(degree)] = {
            "graph_us": round(found[0] * 1e6, 1), "eager_us": round(eager_us, 1),
            "bus_gb_s": round(found[1] * 1e-9, 1), "error": round(error, 3),
        }  # fmt: skip
    return out


def fit_moe(rows: Columns, dtype: str, peaks: dict[str, float]) -> dict[str, Any]:
    """Constants of the expert GEMMs of all shapes, judged on model shapes not seen (if over four)."""
    names = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    rows = fastest(rows, names)
    # A rank's slice of 128 columns and more; thinner ones are not served.
    keep = (rows["inter_size"] / rows["moe_tp_size"] >= 128) & (rows["moe_ep_size"] <= 16)
    rows = pick(rows, keep & (rows["num_tokens"] <= 16384))
    x = {name: rows[name].astype(float) for name in names}
    wb, bw, peak = WEIGHT_BYTES[dtype], peaks["bw"], peaks[PEAK[dtype]]

    def law(r: Columns, t: Array) -> Array:
        f, e, k, ep = r["inter_size"] / r["moe_tp_size"], r["num_experts"], r["topk"], r["moe_ep_size"]
        routed = r["num_tokens"] * k / ep
        touched = e * (1.0 - (1.0 - k / e) ** r["num_tokens"]) / ep
        memory = 3.0 * r["hidden_size"] * f * wb * touched / (t[0] * bw)
        compute = 6.0 * routed * r["hidden_size"] * f / (t[1] * peak)
        moved = 2.0 * routed * (2.0 * r["hidden_size"] + 3.0 * f) / (t[4] * bw)
        return t[2] + p_norm(memory, compute, t[3]) + moved

    start, low = np.array([0.9, 0.3, 3e-5, 1.5, 0.6]), np.array([0.1, 0.02, 1e-6, 1.0, 0.05])
    high = np.array([1.3, 1.0, 3e-4, 6.0, 3.0])
    seconds = rows["latency"] * 1e-3

    def constants(found: Array, error: float, n: int) -> dict[str, Any]:
        values = dict(zip(("e_w", "e_f", "p", "e_act"), found[[0, 1, 3, 4]], strict=True))
        rounded = {name: round(float(value), 3) for name, value in values.items()}
        return {**rounded, "c_us": round(found[2] * 1e6, 1), "error": round(error, 3), "n": n}

    shape_keys = [x[name] for name in ("hidden_size", "inter_size", "topk", "num_experts")]
    shapes = np.unique(np.stack(shape_keys, axis=1), axis=0)
    held = held_out(*shape_keys) if len(shapes) > 4 else np.zeros(len(seconds), bool)
    return constants(*fit_law(law, x, seconds, start, low, high, held), len(seconds))


def expert_curves(rows: Columns) -> dict[str, dict[str, list[float]]]:
    """Microseconds by tokens (`CURVE_TOKENS`) of every measured shape: ``{shape: {"tp,ep": [...]}}``."""
    keys = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    rows = fastest(rows, ("num_tokens", *keys))
    rows = pick(rows, (rows["moe_tp_size"] * rows["moe_ep_size"] <= 8))
    labels, which = np.unique(np.stack([rows[k] for k in keys], axis=1), axis=0, return_inverse=True)
    curves: dict[str, dict[str, list[float]]] = {}
    for i, label in enumerate(labels):
        mine = pick(rows, np.ravel(which) == i)
        order = np.argsort(mine["num_tokens"])
        tokens, us = mine["num_tokens"][order].astype(float), mine["latency"][order] * 1e3
        if tokens[0] > 1 or tokens[-1] < CURVE_TOKENS[-1]:
            continue
        values = np.exp(np.interp(np.log(CURVE_TOKENS), np.log(tokens), np.log(us)))
        shape, split = "x".join(str(v) for v in label[:4]), f"{label[4]},{label[5]}"
        curves.setdefault(shape, {})[split] = [float(f"{v:.3g}") for v in values]
    return curves


def fit_gpu(folder: Path, peaks: dict[str, float], quick: bool = False) -> dict[str, Any]:
    """All constants of one GPU; ``quick`` leaves the experts out."""
    gemm = read(folder, "gemm_perf")
    out: dict[str, Any] = {"gemm": {}}
    for stored, dtype in DTYPES.items():
        mask = gemm["gemm_dtype"] == stored
        # Tables of block-scaled fp8 time a launch, not the kernel: 60 us and more at any size.
        if mask.any() and dtype != "fp8_block":
            out["gemm"][dtype] = fit_gemm(pick(gemm, mask), dtype, peaks)
    out["decode"] = fit_decode(read(folder, "generation_attention_perf"), peaks["bw"])
    out["prefill"] = fit_prefill(read(folder, "context_attention_perf"), peaks["bf16"])
    out["allreduce"] = fit_all_reduce(read(folder, "custom_allreduce_perf"))
    if not quick:
        moe = read(folder, "moe_perf")
        out["moe"], out["curves"] = {}, {}
        for stored, dtype in {**DTYPES, "int4_wo": "int4_wo", "w4a16_mxfp4": "w4a16_mxfp4"}.items():
            mask = (moe["moe_dtype"] == stored) & (moe["distribution"] == ROUTING)
            if mask.any():
                out["moe"][dtype] = fit_moe(pick(moe, mask), dtype, peaks)
                out["curves"][dtype] = expert_curves(pick(moe, mask))
    return out


def main() -> None:
    """Fit every GPU with tables and write the two data files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    folder = Path(str(resources.files("kvplan.sim").joinpath("data")))
    data = json.loads((folder / "kernel_constants.json").read_text("utf-8"))
    curves: dict[str, Any] = {"source": SOURCE, "unit": "us", "tokens": CURVE_TOKENS, "gpus": {}}
    for gpu in GPUS:
        fitted = fit_gpu(arguments.tables / gpu, data["gpus"][gpu]["peaks"])
        curves["gpus"][gpu] = fitted.pop("curves")
        for degree, row in fitted["allreduce"].items():
            old = data["gpus"][gpu]["allreduce"].get(degree, {})
            row.update({k: v for k, v in old.items() if k.startswith("large")})
        data["gpus"][gpu] = {**data["gpus"][gpu], **fitted, "source": SOURCE}
    output = arguments.output or folder
    (output / "kernel_constants.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (output / "expert_curves.json").write_text(json.dumps(curves) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
