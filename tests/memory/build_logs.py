"""Make kvplan/memory/data/start_up_logs.json from ../shared/evidence/kv_sizing.jsonl.

    python -m tests.memory.build_logs            # writes the file

A shipped row is a question to the estimate (model, flags, card) and the figures that the engine printed.
Flags that a log does not state but its note infers are in the row's flags and named in `inferred`.
`test_validate.py` checks that the shipped file is what this script makes.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvplan.errors import InputError
from kvplan.spec.catalogue import find_model
from kvplan.spec.engine import EngineSettings
from tests.memory.kv_rows import (
    DECIDING_STAGE_GIB,
    INFERRED_FLAGS,
    MISSES,
    NAMES,
    TOTAL_GIB,
    UNRESOLVED,
    model_of,
    rows,
    settings_of,
    version_of,
)

TARGET = Path(__file__).resolve().parents[2] / "kvplan" / "memory" / "data" / "start_up_logs.json"

PRINTED = (
    "available_kv_gib", "num_gpu_blocks", "kv_cache_tokens", "needed_kv_gib", "needed_seq_len",
    "estimated_max_model_len",
)  # fmt: skip

# SGLang and TensorRT-LLM rows whose flags are known; the value is what the row's note says of its KV dtype.
OTHER_ENGINES = {
    "idx-sglang-qwen3-06b-16g": "auto",
    "idx-sglang-qwen3-06b-4g": "auto",
    "idx-sglang-llama31-8b-capped": "auto",
    "sglang11309-dsv32-pr": "fp8",
    "sglang13466-kimi-k2": "auto",
    "trt-kimi-k25-fp8kv": "fp8",
    "trt2268-qwen15-7b": "auto",
}

# Refused starts: what the row does not state and its note or its figures say.
REFUSED: dict[str, dict[str, Any]] = {
    "idx-llama33-70b-fp8kv-h100-refused": {"engine_version": "0.20"},
    "vllm32105-pp8": {"model": "zai-org/GLM-4.6", "engine_version": "0.14", "tensor_parallel_size": 1},
}


def kind_of(row: dict[str, Any]) -> str:
    """The group a row is reported in."""
    arch = row["arch_kind"] or "GQA"  # one row, CodeLlama-34B, leaves it out
    if "compressed" in arch:
        return "compressed hybrid"
    for word, kind in (("SWA", "sliding and chunked"), ("chunked", "sliding and chunked")):
        if word in arch:
            return kind
    if arch.startswith("hybrid"):
        return "Mamba and linear"
    if arch.startswith("MLA"):
        return "MLA"
    return "MoE" if arch.startswith("MoE") else "GQA and MHA"


def citation(source: str) -> str:
    """Project and thread, or project and file; no address."""
    text = re.sub(r"public repository log, id (\d+)[^)]*\)?", r"public start-up log \1", source)
    text = re.sub(r"^https?://(?:www\.)?", "", text).rstrip("/")
    text = re.sub(r" \(commit \w+, (.+)\)$", r", \1", text)
    return re.sub(r"^(?:vllm-project|sgl-project)/(?=(?:vllm|sglang)#)", "", text)


def question(row: dict[str, Any]) -> dict[str, Any]:
    """One shipped row."""
    refused = REFUSED.get(row["id"], {})
    named = {**row, "model": refused.get("model", row["model"])}
    model = model_of(named)
    found: dict[str, Any] = {
        "id": row["id"],
        "kind": kind_of(row),
        "engine": row["engine"],
        "engine_version": row["engine_version"],
        "model": None,
        "gpu": row["gpu"],
        "total_gib": TOTAL_GIB.get(row["id"], row["gpu_memory_gib"]),
        "flags": {},
        "inferred": [],
        "all_flags_stated": bool(
            version_of(row)
            and row["gpu_memory_utilization"]
            and row["max_num_seqs"]
            and row["max_num_batched_tokens"]
        ),
        "printed": {name: row[name] for name in PRINTED if row[name] is not None},
        "source": citation(row["source"]),
    }
    if row["id"] in DECIDING_STAGE_GIB:
        found["printed"]["deciding_stage_kv_gib"] = DECIDING_STAGE_GIB[row["id"]]
    if model is None:
        name = row["model"] or (row["inferred"] or {}).get("model")
        found["model"] = name
        found["not_covered"] = UNRESOLVED.get(row["id"]) or _why_unresolved(name)
        return found
    name = named["model"] or row["inferred"]["model"]
    found["model"] = NAMES.get(name, name)  # a format in the name says how the weights are stored
    if row["engine"] != "vllm":
        if row["id"] not in OTHER_ENGINES:
            found["not_covered"] = "flags not stated, or states in a pool of their own"
            return found
        found["flags"] = _flags(
            EngineSettings(
                engine=row["engine"],
                block_size=row["block_size"],
                max_model_len=2048,
                kv_cache_dtype=OTHER_ENGINES[row["id"]],
            )
        )
        found["flags"].pop("engine_version", None)
    else:
        inferred = {**INFERRED_FLAGS.get(row["id"], {}), **refused}
        changes = {key: value for key, value in inferred.items() if key != "model"}
        found["flags"] = _flags(settings_of(row, model, **changes))
        found["inferred"] = sorted(inferred)
        if not version_of(row) and "engine_version" not in inferred:
            found["flags"].pop("engine_version", None)
    if "mamba-ssm-cache-dtype float16" in (row["flags"] or []):
        found["ssm_bytes_per_element"] = 2
    if row["id"] in MISSES:
        found["remark"] = MISSES[row["id"]]
    printed = found["printed"]
    sized = "available_kv_gib" in printed and {"num_gpu_blocks", "kv_cache_tokens"} & set(printed)
    if not sized and "needed_kv_gib" not in printed:
        found["not_covered"] = "no KV memory printed beside its blocks or tokens"
    return found


def _why_unresolved(name: str | None) -> str:
    if name is None:
        return "the log names no model"
    try:
        find_model(NAMES.get(name, name))
    except InputError as error:
        if "compress" in str(error):
            return "compressed attention is refused by name"
    return "not in the catalogue"


def _flags(settings: EngineSettings) -> dict[str, Any]:
    """What differs from the bare default, and the version."""
    bare = EngineSettings()
    return {
        f.name: getattr(settings, f.name)
        for f in fields(settings)
        if f.name == "engine_version" or getattr(settings, f.name) != getattr(bare, f.name)
    }


def text() -> str:
    """The whole file, a row a line."""
    return "[\n" + ",\n".join(json.dumps(question(row), ensure_ascii=False) for row in rows()) + "\n]\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
