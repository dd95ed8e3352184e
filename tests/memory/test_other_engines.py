"""SGLang and TensorRT-LLM: tokens from a printed pool, default fractions, and what is not modelled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplan.errors import InputError
from kvplan.memory.capacity import estimate
from kvplan.memory.kvlayout import kv_layout
from kvplan.spec.catalogue import find_gpu, find_model
from kvplan.spec.engine import EngineSettings, resolve
from tests.memory.kv_rows import GIB, model_of, rows

# Rows of ../shared/evidence/kv_sizing.jsonl; flags as the row or its note states them.
FLAGS = {
    "idx-sglang-qwen3-06b-16g": {},
    "idx-sglang-qwen3-06b-4g": {},
    "idx-sglang-llama31-8b-capped": {},
    "sglang11309-dsv32-pr": {"kv_cache_dtype": "fp8"},
    "sglang13466-kimi-k2": {},
    "trt-kimi-k25-fp8kv": {"kv_cache_dtype": "fp8"},
    "trt2268-qwen15-7b": {},
}


@pytest.mark.parametrize("row_id", FLAGS)
def test_tokens_of_public_logs(row_id):
    """Tokens lie within what the printed GiB, minus and plus half its last digit, give."""
    row = next(row for row in rows() if row["id"] == row_id)
    model = model_of(row)
    assert model is not None
    settings = EngineSettings(
        engine=row["engine"], block_size=row["block_size"], max_model_len=2048, **FLAGS[row_id]
    )
    layout = kv_layout(model, resolve(settings, model, None))
    low, high = (
        layout.cache_tokens(layout.num_blocks(round((row["available_kv_gib"] + half) * GIB)))
        for half in (-0.005, 0.005)
    )
    assert low <= row["kv_cache_tokens"] <= high


@pytest.mark.parametrize(("gpu", "fraction"), [("h100", 0.836), ("rtx4090", 0.847)])
def test_default_fraction_of_sglang(gpu, fraction):
    """Source: WEIGHTS_AND_CONFIGS section 3 (13,440 MiB of 80 GiB, 3,760 MiB of 24 GiB held back)."""
    model = find_model("llama-3.1-8b").spec
    engine = resolve(EngineSettings(engine="sglang", max_model_len=4096), model, find_gpu(gpu))
    assert engine.gpu_memory_utilization == pytest.approx(fraction, abs=5e-4)


def test_tensorrt_takes_nine_tenths_of_what_is_free():
    """BUDGET section 10: pool = 0.9 x (total - weights - 2.5 GiB)."""
    model, gpu = find_model("llama-3.1-8b").spec, find_gpu("h100")
    e = estimate(model, gpu, EngineSettings(engine="tensorrt-llm", max_model_len=4096))
    assert e.budget is not None
    free = gpu.total_bytes - e.budget.weights.bytes - 2.5 * GIB
    assert e.available_kv_bytes == pytest.approx(0.9 * free, rel=1e-6)
    assert e.layout.block_size == 32


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm"])
def test_hybrids_are_refused_by_name(engine):
    """Their windows and states are in pools of their own: no figure is better than a wrong one."""
    model, gpu = find_model("gemma-3-27b").spec, find_gpu("h100")
    with pytest.raises(InputError, match="sliding layers"):
        estimate(model, gpu, EngineSettings(engine=engine, max_model_len=4096))


def test_a_model_larger_than_the_gpu_does_not_fit():
    gpu = replace(find_gpu("h100"), total_bytes=10 * GIB)
    model = find_model("llama-3.1-8b").spec
    for engine in ("sglang", "tensorrt-llm"):
        e = estimate(model, gpu, EngineSettings(engine=engine, max_model_len=4096))
        assert e.verdict.fits is False
        assert e.num_gpu_blocks == 0
