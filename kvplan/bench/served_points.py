"""Published closed-loop serving points beside what the simulator says of them.

The points are means of TTFT and TPOT by model, GPU, engine, split, lengths and concurrency (aiconfigurator's
collection, mostly of the InferenceX protocol: lengths uniform in [0.8 L, L], 10 prompts a concurrent request,
no prefix cache). Not recorded, hence assumed: an fp8 KV cache for Llama on B200 and under TensorRT-LLM, 16
bit elsewhere; 0.95 of the memory for mixtures of experts (as public recipes say), else 0.9; asynchronous
scheduling; experts alone quantised in nvfp4 mixtures of experts.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvplan.memory.capacity import PoolPlan, pool_for
from kvplan.sched.core import Clock
from kvplan.sim.rules import rules_for
from kvplan.sim.run import simulate
from kvplan.sim.steptime import Calibration, clock_for
from kvplan.sim.tables import request_times
from kvplan.spec.catalogue import find_gpu, find_model
from kvplan.spec.engine import EngineSettings
from kvplan.spec.model import ModelSpec
from kvplan.spec.quantization import quantization_by_name
from kvplan.trace.generate import random_trace, with_arrivals

GPUS = {"h100_sxm": "H100 SXM", "h200_sxm": "H200 SXM", "b200_sxm": "B200"}
PROMPTS_PER_SLOT = 10
LEN_RANGE = (0.8, 1.0)
MISRECORDED = "nvidia/Llama-3.1-8B-Instruct-FP8"  # concurrency written per rank (21 rows)


@dataclass(frozen=True)
class Point:
    """One measured point; ``concurrency`` is of one data-parallel rank, ``precision`` "" where not stated."""

    row: str
    model: str
    gpu: str
    engine: str
    version: str
    precision: str
    tp: int  # of the attention
    dp: int
    expert_parallel: bool
    input_len: int
    output_len: int
    concurrency: int
    ttft_s: float
    tpot_s: float
    ambiguous: bool = False  # the row's two statements of its concurrency differ by more than its ranks

    @property
    def setup(self) -> tuple[object, ...]:
        """What one calibration would cover."""
        return self.model, self.gpu, self.engine, self.precision, self.tp, self.dp, self.expert_parallel


@dataclass(frozen=True)
class Predicted:
    """Simulated means; ``room`` is the pool over what the running requests hold at their ends."""

    ttft_s: float
    tpot_s: float
    room: float
    wall_s: float


def read_points(path: Path) -> list[Point]:
    """The aggregated (not disaggregated) points of H100, H200 and B200, in file order."""
    points = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["mode"] != "agg" or row["system"] not in GPUS or float(row["pp_size"] or 1) > 1:
                continue
            dp = max(1, int(float(row["attention_dp_size"] or 1)))
            batch = int(float(row["batch_size"]))
            said = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
            points.append(
                Point(
                    row=row["id"],
                    model=row["model_path"],
                    gpu=GPUS[row["system"]],
                    engine=row["backend"],
                    version=row["backend_version"],
                    precision=row["precision"],
                    # With data-parallel attention the tp column holds all GPUs.
                    tp=max(1, int(float(row["tp_size"])) // dp),
                    dp=dp,
                    expert_parallel=float(row["moe_ep_size"] or 1) > 1,
                    input_len=int(row["isl"]),
                    output_len=int(row["osl"]),
                    concurrency=batch,
                    ttft_s=float(row["silicon_ttft_ms"]) / 1e3,
                    tpot_s=float(row["silicon_tpot_ms"]) / 1e3,
                    ambiguous=said is not None and int(said[1]) != batch * dp,
                )
            )
    return points


def served_model(point: Point, precision: str) -> ModelSpec:
    """The checkpoint behind a point: the catalogue's own format, or the one the row names."""
    spec = find_model(point.model).spec
    own = spec.quantization
    if precision == "bf16":
        return replace(spec, quantization=None)
    asked = quantization_by_name(
        {"fp4": "nvfp4", "fp8": "fp8", "int4": "compressed-tensors-w4a16"}[precision]
    )
    assert asked is not None
    if own is not None and own.bits == asked.bits and ("fp4" in own.method) == ("fp4" in asked.method):
        return spec
    if spec.moe and precision == "fp4":
        # Published nvfp4 mixtures of experts quantise the experts only.
        asked = replace(asked, ignored=("*self_attn*", "*shared_expert*"))
    return replace(spec, quantization=asked)


def set_up(point: Point, precision: str) -> tuple[ModelSpec, PoolPlan, EngineSettings]:
    """Model, pool and resolved settings of a point. Windowed layers are pooled as full ones."""
    model = served_model(point, precision)
    fp8_kv = point.engine == "trtllm" or ("Llama" in point.model and point.gpu == "B200")
    version = point.version if point.engine == "vllm" and point.version[:2] == "0." else "0.19.0"
    settings = EngineSettings(
        engine_version=version,
        tensor_parallel_size=point.tp,
        data_parallel_size=point.dp,
        enable_expert_parallel=point.expert_parallel,
        max_model_len=point.input_len + point.output_len + 256,
        kv_cache_dtype="fp8" if fp8_kv else "auto",
        gpu_memory_utilization=0.95 if model.moe else 0.9,
        enable_prefix_caching=False,
        async_scheduling=True,
        disable_hybrid_kv_cache_manager=True,
    )
    plan = pool_for(model, find_gpu(point.gpu), settings)
    e = plan.engine
    resolved = replace(settings, max_num_batched_tokens=e.max_num_batched_tokens, max_num_seqs=e.max_num_seqs)
    return model, plan, resolved


def predict(point: Point, precision: str, calibration: Calibration | None = None) -> Predicted:
    """Simulate the closed loop of a point. Raises `InputError` where the model does not fit at all."""
    model, plan, settings = set_up(point, precision)
    clock = clock_for(model, find_gpu(point.gpu), settings, calibration)
    return run_loop(point, plan, clock)


def run_loop(point: Point, plan: PoolPlan, clock: Clock) -> Predicted:
    """The closed loop of ``point`` on a given pool and clock; lengths are drawn with seed 0."""
    c = point.concurrency
    trace = random_trace(PROMPTS_PER_SLOT * c, point.input_len, point.output_len, seed=0, len_range=LEN_RANGE)
    trace = with_arrivals(trace, float("inf"), 1.0, 0)
    rules = rules_for(plan.engine, plan.num_gpu_blocks, plan.block_size, max_concurrency=c)
    run = simulate(trace, rules, clock)
    times = request_times(run)
    held = c * 0.9 * (point.input_len + point.output_len) / plan.block_size
    done = ~np.isnan(times.tpot_s)
    return Predicted(
        float(times.ttft_s[done].mean()) if done.any() else float("nan"),
        float(times.tpot_s[done].mean()) if done.any() else float("nan"),
        plan.num_gpu_blocks / held,
        run.wall_s,
    )


def group_of(point: Point, precision: str, room: float) -> tuple[str, str]:
    """(kind, label) of a point. Kinds that are not judged against the targets start with "apart"."""
    name = point.model.rsplit("/", 1)[-1]
    label = f"{name} {point.gpu.split()[0]} {point.engine} {precision}"
    if point.model == MISRECORDED:
        return "apart: recorded per rank", label
    if point.ambiguous:
        return "apart: concurrency ambiguous", label
    if not point.precision:
        return "apart: precision not stated", f"{label}?"
    if "gpt-oss" in point.model:
        return "apart: hybrid pool", label + (" C=512" if point.concurrency >= 512 else "")
    if point.tp * point.dp > 8 or point.dp > 8:
        return "apart: more than 8 GPUs", label
    if room < 1:
        return "apart: beyond the pool", label
    if point.model.startswith("Qwen/Qwen3.5"):
        return "apart: linear-attention layers", label
    is_moe = find_model(point.model).spec.moe is not None
    return ("MoE and MLA" if is_moe else "dense") + f", {point.engine}", label
