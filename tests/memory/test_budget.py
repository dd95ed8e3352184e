"""The budget of a GPU against public start-up logs, term by term and as a whole.

Source: ../shared/evidence/kv_sizing.jsonl. Constants are fixed in kvplan/memory/budget.py with their
meaning; no row is looked up. Error = |predicted - logged| / (utilisation x total).
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import pytest

from kvplan.errors import InputError
from kvplan.memory.budget import Budget, activation_peak, graphs_inside, stage_budget
from kvplan.memory.capacity import estimate, weights_term
from kvplan.spec.catalogue import find_gpu, find_model
from kvplan.spec.engine import EngineSettings, resolve
from tests.memory.kv_rows import GIB, TOTAL_GIB, model_of, rows, settings_of, version_of


def scored() -> list[tuple[dict[str, Any], Budget]]:
    """Rows with version, utilisation, card and printed KV memory, beside the predicted budget of stage 0."""
    found = []
    for row in rows():
        if row["engine"] != "vllm" or row["available_kv_gib"] is None or not row["gpu"]:
            continue
        model = model_of(row)
        if model is None or not version_of(row) or not row["gpu_memory_utilization"]:
            continue
        gpu = find_gpu(row["gpu"])
        total = TOTAL_GIB.get(row["id"], row["gpu_memory_gib"])
        gpu = replace(gpu, total_bytes=round(total * GIB)) if total else gpu
        settings = settings_of(row, model)
        engine = resolve(settings, model, gpu)
        found.append((row, stage_budget(model, gpu, engine, weights_term(model, settings, 0), 0)))
    return found


def error_percent(row: dict[str, Any], budget: Budget) -> float:
    off = budget.available_kv_bytes / GIB - row["available_kv_gib"]
    return 100 * abs(off) / (budget.budget_bytes / GIB)


def test_available_memory_with_all_flags_stated():
    """Version, utilisation, max_num_seqs, max_num_batched_tokens stated: median <= 0.1 %, p90 <= 0.5 %."""
    errors = sorted(
        error_percent(row, budget)
        for row, budget in scored()
        if row["max_num_seqs"] and row["max_num_batched_tokens"]
    )
    assert len(errors) == 30
    assert statistics.median(errors) <= 0.05, errors
    assert errors[int(0.9 * len(errors))] <= 0.2, errors
    assert errors[-1] <= 0.4, errors


def test_available_memory_with_version_and_utilisation():
    """max_num_seqs and max_num_batched_tokens from the default table where not stated: 0.5 % and 3 %."""
    errors = sorted(error_percent(row, budget) for row, budget in scored())
    assert len(errors) == 38
    assert statistics.median(errors) <= 0.5
    assert errors[int(0.9 * len(errors))] <= 3.0, errors


def test_activation_peak_of_logs():
    """Within 0.02 GiB of what 0.15 to 0.19 logged; the first stage of a pipeline within 0.07."""
    checked = 0
    for row, budget in scored():
        if row["activation_peak_gib"] is None or version_of(row) < "0.15":
            continue
        limit = 0.071 if row["pp"] > 1 else 0.021
        assert abs(budget.activation.bytes / GIB - row["activation_peak_gib"]) <= limit, row["id"]
        checked += 1
    assert checked == 34


def test_cuda_graphs_of_logs():
    """The fitted line is within 0.42 GiB of the pools of 0.18 and 0.19, median 0.12."""
    off = sorted(
        abs((budget.cuda_graphs.bytes + budget.graphs_outside_bytes) / GIB - row["cuda_graph_gib"])
        for row, budget in scored()
        if row["cuda_graph_gib"] is not None and version_of(row) in ("0.18", "0.19")
    )
    assert len(off) == 31
    assert statistics.median(off) <= 0.12, off
    assert off[-1] <= 0.42, off


def test_last_stage_of_a_pipeline_decides():
    """Llama-3.1-8B PP 2 and PP 4: the row's notes give the last stage 65.63 and 68.89 GiB for KV."""
    for pp, available in ((2, 65.63), (4, 68.89)):
        row = next(
            r for r in rows() if r["id"].startswith(f"llmd-meta-llama-llama-3-1-8b-h100-80gb-tp1pp{pp}")
        )
        model = model_of(row)
        gpu = replace(find_gpu("h100"), total_bytes=round(row["gpu_memory_gib"] * GIB))
        settings = settings_of(row, model)
        engine = resolve(settings, model, gpu)
        stages = [stage_budget(model, gpu, engine, weights_term(model, settings, s), s) for s in range(pp)]
        poorest = min(stages, key=lambda b: b.available_kv_bytes)
        assert poorest.stage == pp - 1
        assert poorest.available_kv_bytes / GIB == pytest.approx(available, abs=0.08)


@pytest.mark.parametrize(
    ("version", "runner", "inside"),
    [("0.19", "v1", False), ("0.21", "v1", True), ("0.26", "v2", False), ("0.29", "v2", True)],
)
def test_graphs_are_inside_the_budget_by_version_and_runner(version, runner, inside):
    """BUDGET section 5: V1 runner from 0.21, runner V2 from 0.29."""
    model = find_model("llama-3.1-8b").spec
    engine = resolve(EngineSettings(engine_version=version, model_runner=runner), model, find_gpu("h100"))
    assert graphs_inside(engine) is inside


def test_sampler_by_version():
    """Qwen3-14B on an H100: 5.64 GiB in 0.16 and 2.23 in 0.17 (the sampler in Triton, vllm#33538)."""
    model, gpu = find_model("Qwen/Qwen3-14B").spec, find_gpu("h100")
    peaks = [
        activation_peak(model, gpu, resolve(EngineSettings(engine_version=v, max_model_len=8192), model, gpu))
        for v in ("0.16", "0.17")
    ]
    assert [peak.bytes / GIB for peak in peaks] == pytest.approx([5.64, 2.23], abs=0.01)


def test_engine_v0_is_refused():
    model, gpu = find_model("llama-3.1-8b").spec, find_gpu("h100")
    settings = EngineSettings(engine_version="0.8.5")
    engine = resolve(settings, model, gpu)
    with pytest.raises(InputError, match="V0"):
        stage_budget(model, gpu, engine, weights_term(model, settings, 0))


def test_a_card_without_bfloat16_loads_in_another_type():
    """vLLM 0.32, platforms/cuda.py and config/model.py: below compute capability 8.0 bfloat16 becomes
    float16, for Gemma 2 and 3 float32, which doubles weights and KV; asked for by name it is refused."""
    t4, l4 = find_gpu("t4"), find_gpu("l4")
    llama, gemma = find_model("llama-3.2-1b").spec, find_model("gemma-3-1b").spec
    short = EngineSettings(max_model_len=2048)
    assert estimate(llama, t4, short).engine.dtype == "float16"
    assert estimate(llama, l4, short).engine.dtype == "bfloat16"
    on_t4, on_l4 = estimate(gemma, t4, short), estimate(gemma, l4, short)
    assert on_t4.engine.dtype == "float32"
    assert on_t4.budget is not None
    assert on_l4.budget is not None
    assert on_t4.budget.weights.bytes == pytest.approx(
        2 * on_l4.budget.weights.bytes, rel=0.02
    )  # allocator blocks
    assert on_t4.layout.bytes_per_token == 2 * on_l4.layout.bytes_per_token
    assert any("has no bfloat16" in said for said in on_t4.assumptions)
    with pytest.raises(InputError, match=r"needs compute capability 8\.0"):
        estimate(llama, t4, replace(short, dtype="bfloat16"))
