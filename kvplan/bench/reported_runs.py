"""Published benchmark runs with enough settings to simulate: throughput beside throughput."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvplan.errors import InputError
from kvplan.memory.capacity import pool_for
from kvplan.sim.rules import rules_for
from kvplan.sim.run import simulate
from kvplan.sim.steptime import clock_for
from kvplan.sim.tables import request_times
from kvplan.spec.catalogue import find_gpu, find_model
from kvplan.spec.engine import EngineSettings
from kvplan.trace.generate import random_trace, with_arrivals

GPUS = {
    "H100-SXM-80GB": "H100 SXM", "H100": "H100 SXM", "H200-SXM-141GB": "H200 SXM", "H200": "H200 SXM",
    "B200": "B200", "RTX 4090 24GB": "RTX 4090", "A100-SXM-80GB": "A100-SXM4-80GB",
    "A100-PCIe-80GB": "A100-PCIE-80GB", "A100-80GB": "A100-SXM4-80GB", "A100-SXM (single)": "A100-SXM4-80GB",
    "MI300X": "MI300X", "MI325X": "MI325X", "MI355X": "MI355X", "DGX Spark GB10 128GB": "DGX Spark GB10",
}  # fmt: skip
ENGINES = {"vLLM": "vllm", "TensorRT-LLM": "trtllm", "SGLang": "sglang"}
MAX_PROMPTS = 4096


def why_not(row: dict[str, Any]) -> str | None:
    """Why a run cannot be simulated, or None."""
    if row["engine"] not in ENGINES:
        return f"engine {row['engine']}"
    if row["gpu"] not in GPUS:
        return f"GPU {row['gpu'].split(' (')[0]} is not identified"
    if row.get("confidence") == "low":
        return "its own collectors call it unusable"
    if not (row.get("input_len") and row.get("output_len")):
        return "lengths not stated"
    if not (row.get("num_prompts") or row.get("max_concurrency")):
        return "number of prompts not stated"
    if not (row.get("req_per_s") or row.get("output_tok_s")):
        return "throughput not stated"
    return None


def simulated_rate(row: dict[str, Any]) -> tuple[float, float]:
    """Requests a second: (simulated, measured). Raises `InputError` for an unknown or unfitting model."""
    weights = str(row.get("weights_dtype") or "")
    quantization = next((q for q in ("nvfp4", "fp8", "awq") if q in weights), None)
    found = find_model(row["model"].split(" (")[0], quantization)
    gpu = find_gpu(GPUS[row["gpu"]])
    version = str(row.get("version") or "")
    concurrency = int(row.get("max_concurrency") or 0)
    prompts = int(row.get("num_prompts") or 10 * concurrency)
    output = row["output_len"]
    if row.get("output_tok_s") and row.get("req_per_s"):
        output = row["output_tok_s"] / row["req_per_s"]  # what was really generated
    measured = row.get("req_per_s") or row["output_tok_s"] / output
    settings = EngineSettings(
        engine_version=version if version[:2] == "0." else "0.19.0",
        tensor_parallel_size=int(row.get("tp") or 1),
        quantization=found.implied_quantization or quantization,
        max_model_len=int(row.get("max_model_len") or row["input_len"] + row["output_len"] + 64),
        max_num_seqs=int(row["max_num_seqs"]) if row.get("max_num_seqs") else None,
        kv_cache_dtype="fp8" if row["engine"] == "TensorRT-LLM" and quantization else "auto",
        enforce_eager=row.get("cudagraph") is False,
        enable_prefix_caching=False,
        disable_hybrid_kv_cache_manager=True,
    )
    plan = pool_for(found.spec, gpu, settings)
    e = plan.engine
    resolved = replace(settings, max_num_batched_tokens=e.max_num_batched_tokens, max_num_seqs=e.max_num_seqs)
    ratio = str(row.get("range_ratio") or "")
    spread = (0.8, 1.0) if ratio.startswith("0.8") else (1.0, 1.0)
    if ratio == "0.8 (uniform 0.8L..L)":
        measured = row.get("req_per_s") or row["output_tok_s"] / (0.9 * row["output_len"])
        output = row["output_len"]
    trace = random_trace(min(prompts, MAX_PROMPTS), row["input_len"], round(output), seed=0, len_range=spread)
    rate = row.get("request_rate")
    trace = with_arrivals(trace, float(rate) if rate else float("inf"), 1.0, 0)
    rules = rules_for(e, plan.num_gpu_blocks, plan.block_size, max_concurrency=concurrency)
    times = request_times(simulate(trace, rules, clock_for(found.spec, gpu, resolved)))
    return len(trace) / float(np.nanmax(times.finish_s)), float(measured)


def reported_rows(path: Path) -> str:
    """A Markdown table of throughput errors by model and GPU, and why the rest was not simulated."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line]
    errors: dict[str, list[float]] = defaultdict(list)
    skipped: Counter[str] = Counter()
    for row in rows:
        reason = why_not(row)
        if reason is None:
            try:
                simulated, measured = simulated_rate(row)
            except InputError as error:
                reason = str(error).splitlines()[0]
            else:
                model = row["model"].rsplit("/", 1)[-1]
                key = f"{row['engine']} {model} {GPUS[row['gpu']]} TP{row.get('tp') or 1}"
                errors[key].append(simulated / measured - 1.0)
        if reason is not None:
            skipped[reason] += 1
    lines = ["| run | n | mean abs | bias | worst |", "|---|---|---|---|---|"]
    for name, values in sorted(errors.items(), key=lambda item: -np.abs(item[1]).mean()):
        e = 100 * np.array(values)
        lines.append(
            f"| {name} | {len(e)} | {np.abs(e).mean():.1f} | {e.mean():+.1f} | {e[np.abs(e).argmax()]:+.1f} |"
        )
    every = 100 * np.concatenate([np.array(v) for v in errors.values()] or [np.zeros(0)])
    within = float(np.mean(np.abs(every) <= 15)) if len(every) else 0.0
    median = np.median(np.abs(every))
    lines.append(f"\n{len(every)} runs, {within:.0%} within 15 %, median {median:.1f} %. Not simulated:")
    return "\n".join(lines + [f"- {count} x {reason}" for reason, count in skipped.most_common()])
