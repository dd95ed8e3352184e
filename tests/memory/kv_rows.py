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


# The line is stage 0's; the stage that decides has what the row's note says (75.23 - 9.60 and - 6.34 GiB).
DECIDING_STAGE_GIB = {
    "llmd-meta-llama-llama-3-1-8b-h100-80gb-tp1pp2dp1-8192": 65.63,
    "llmd-meta-llama-llama-3-1-8b-h100-80gb-tp1pp4dp1-8192": 68.89,
}

# Flags that the log does not state and the row's note infers from its figures.
INFERRED_FLAGS: dict[str, dict[str, Any]] = {
    "idx-glm47-nvfp4-tp4": {"kv_cache_dtype": "fp8"},
    "club3090-642-qwen36-27b-int4": {"kv_cache_dtype": "fp8", "num_speculative_tokens": 3},
    "idx-qwen36-27b-5060ti-tp4": {"num_speculative_tokens": 3},
    "idx-qwen38-27b-fp8-l40s-090": {"enable_prefix_caching": False, "max_num_seqs": 16},
    "idx-qwen38-27b-fp8-l40s-seqs16": {"enable_prefix_caching": False},
}

# Rows that stay wrong, with the reason.
MISSES = {
    "idx-deepseek-r1-h20-v0": "engine V0 padded the MLA entry of 576 elements to 640",
    "idx-gemma4-31b-fp8-tp2-pinned": "a draft model (MTP k=4) that is not named shares the pool",
    "idx-qwen3next-80b-w4a16-092": "its other flags are not stated",
    "idx-qwen35-122b-nvfp4-mtp-thor": "no version; twice the tokens of the four groups its shape gives",
    "idx-qwen35-122b-nvfp4-nomtp-thor": "no version; a block size that no rule here gives",
}

# High-confidence rows whose model nobody can resolve here.
UNRESOLVED = {
    "vllm12126-llama32-11b-vision": "cross-attention layers: not in the catalogue (engine V0)",
    "idx-ministral3-14b-tp2": "not in the catalogue",
    "idx-dsv4-flash-pro5000-tp8": "compressed attention is refused by name",
    "idx-zamba2-27b": "shared attention blocks: not in the catalogue",
}


# The card has twice the catalogue's namesake: the row's note derives 139.8 GiB from two utilisations.
TOTAL_GIB = {"recipes12-qwen3coder480b-090": 139.8, "recipes12-qwen3coder480b-095": 139.8}


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
