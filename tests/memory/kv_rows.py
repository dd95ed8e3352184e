"""Rows of ../shared/evidence/kv_sizing.jsonl as questions to the estimate: which model, which flags."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from kvplan.errors import InputError
from kvplan.spec.catalogue import find_model
from kvplan.spec.engine import EngineSettings
from kvplan.spec.model import ModelSpec
from tests.conftest import shared_path

GIB = 1 << 30

# Served names and shapes given in words: what each row's own note or `inferred` says it is.
NAMES = {
    "Qwen3.6-27B-AutoRound-int4": "Qwen/Qwen3.6-27B",
    "Qwen3.6-27B NVFP4 (modelopt)": "Qwen/Qwen3.6-27B",
    "Qwen3.8-27B FP8": "Qwen/Qwen3.8-27B",
    "Qwen/Qwen3.5-9B (4-bit build)": "Qwen/Qwen3.5-9B",
    "Qwen3.5-122B-A10B int4 AutoRound": "Qwen/Qwen3.5-122B-A10B",
    "Qwen3.5-122B-A10B-NVFP4 (Sehyo)": "Qwen/Qwen3.5-122B-A10B",
    "Qwen3.5-122B-A10B-NVFP4 resharded": "Qwen/Qwen3.5-122B-A10B",
    "Qwen3-Next-80B-A3B W4A16": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "RedHatAI/gemma-4-31B FP8-block": "google/gemma-4-31B-it",
    "Qwen/Qwen2.5-7B (shape)": "Qwen/Qwen2.5-7B-Instruct",
    "meta-llama/Llama-3.1-8B (shape)": "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-8B (LoRA test)": "meta-llama/Llama-3.1-8B",
    "Qwen3 0.6B class (Qwen3ForCausalLM bf16)": "Qwen/Qwen3-0.6B",
    "Qwen/Qwen1.5-7B (sft)": "Qwen/Qwen1.5-7B",
}


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in shared_path("evidence", "kv_sizing.jsonl").open()]


def model_of(row: dict[str, Any]) -> ModelSpec | None:
    """The model of a row; None where the row names none or one that the catalogue lacks."""
    name = row["model"] or (row["inferred"] or {}).get("model")
    if name is None:
        return None
    try:
        model = find_model(NAMES.get(name, name)).spec
    except InputError:
        return None
    if "mamba-ssm-cache-dtype float16" in (row["flags"] or []):
        layers = tuple(
            replace(x, state=replace(x.state, ssm_bytes_per_element=2)) if x.state else x
            for x in model.layers
        )
        model = replace(model, layers=layers)
    return model


def version_of(row: dict[str, Any]) -> str | None:
    """'0.19' of '0.19.0', '0.21-era (Jun 2026)', '0.26.1rc1.dev608'; None where none is stated."""
    match = re.match(r"0\.([1-9]\d|[89])\b", row["engine_version"] or "")
    return match[0] if match and not row["engine_version"].startswith("0.1.") else None


def settings_of(row: dict[str, Any], model: ModelSpec, **changes: Any) -> EngineSettings:
    """Flags as the row states them; block size where it is a plain one, prefix caching where said."""
    flags = row["flags"] or []
    text = " ".join(flags)
    drafts = re.search(r"mtp\s*(?:[kn]=)?(\d)", text, re.IGNORECASE)
    shards = re.search(r"decode-context-parallel-size (\d+)", text)
    limit = model.max_position_embeddings
    length = row["max_model_len"] or row["max_concurrency_tokens"] or limit
    values: dict[str, Any] = {
        "engine_version": version_of(row) or "0.32.0",
        "tensor_parallel_size": row["tp"] or 1,
        "pipeline_parallel_size": row["pp"] or 1,
        "data_parallel_size": row["dp"] or 1,
        "decode_context_parallel_size": int(shards[1]) if shards else 1,
        "enable_expert_parallel": bool(row["ep"]),
        "gpu_memory_utilization": row["gpu_memory_utilization"],
        "max_model_len": min(length, limit) if limit else length,
        "max_num_seqs": row["max_num_seqs"],
        "max_num_batched_tokens": row["max_num_batched_tokens"],
        "kv_cache_dtype": row["kv_cache_dtype"] or "auto",
        "block_size": row["block_size"] if row["block_size"] in (8, 16, 32, 64, 128) else None,
        "enforce_eager": bool(row["enforce_eager"]),
        "enable_prefix_caching": False if "no-enable-prefix-caching" in flags else None,
        "async_scheduling": True if "async-scheduling" in flags else None,
        "num_speculative_tokens": int(drafts[1]) if drafts and model.mtp_layers else 0,
    }
    return EngineSettings(**{**values, **changes})
