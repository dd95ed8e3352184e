"""What a vLLM start-up log says: flags it was started with, and the memory figures it printed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvplan.errors import InputError

MAX_LOG_BYTES = 256 << 20

# Figures, by the name of the term: the first match counts (rank 0 prints first).
FIGURES: Mapping[str, tuple[str, ...]] = {
    "total_gib": (r"total_gpu_memory \(([\d.]+) ?GiB\)", r"total_gpu_memory\s+([\d.]+) ?GiB"),
    "gpu_memory_utilization": (
        r"gpu_memory_utilization \(([\d.]+)\)",
        r"gpu_memory_utilization\s+([\d.]+)\s*$",
    ),
    "weights_gib": (
        r"Model loading took ([\d.]+) Gi?B",
        r"Loading model weights took ([\d.]+) Gi?B",
        r"model weights take\s+([\d.]+) ?GiB",
    ),
    "non_torch_gib": (r"non_torch_memory (?:takes )?\s*([\d.]+) ?GiB",),
    "activation_gib": (r"PyTorch activation peak memory (?:takes )?\s*([\d.]+) ?GiB",),
    "cuda_graph_gib": (r"Graph capturing finished in [\d.]+ secs?, took (-?[\d.]+) GiB",),
    "available_kv_gib": (
        r"Available KV cache memory: (-?[\d.]+) GiB",
        r"memory reserved for KV Cache is (-?[\d.]+) ?GiB",
        r"available_kv_cache_memory\s+(-?[\d.]+) ?GiB",
    ),
    "num_gpu_blocks": (
        r"# (?:GPU|CUDA|cuda) blocks: ([\d,]+)",
        r"num_gpu_blocks(?: is|:|=) ?:? ?([\d,]+)",
    ),
    "kv_cache_tokens": (r"GPU KV cache size: ([\d,]+) tokens",),
    "max_concurrency": (r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x",),
    "max_concurrency_tokens": (r"Maximum concurrency for ([\d,]+) tokens per request",),
}

# Flags as the engine's configuration line spells them, and as `kvplan` does.
CONFIG_FLAGS = {
    "max_seq_len": "max_model_len",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "decode_context_parallel_size": "decode_context_parallel_size",
    "quantization": "quantization",
    "enforce_eager": "enforce_eager",
    "kv_cache_dtype": "kv_cache_dtype",
    "enable_prefix_caching": "enable_prefix_caching",
    "dtype": "dtype",
}
ARGUMENT_FLAGS = (
    "max_model_len", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
    "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_dtype",
    "quantization", "enforce_eager", "enable_prefix_caching", "enable_expert_parallel", "dtype",
    "async_scheduling", "kv_cache_memory_bytes", "num_gpu_blocks_override",
)  # fmt: skip


@dataclass(frozen=True)
class StartupLog:
    """``flags`` under kvplan's names (with "model" and "engine_version"); ``figures`` by names of FIGURES."""

    flags: Mapping[str, Any]
    figures: Mapping[str, float]


def read_startup_log(path: Path) -> StartupLog:
    """Read a vLLM start-up log; lines may carry any prefix (rank, container, time).

    Raises `InputError` where the file cannot be read or holds no memory figure.
    """
    try:
        if path.stat().st_size > MAX_LOG_BYTES:
            raise InputError(f"--from-log {path} is larger than 256 MiB; cut it to the start-up.")
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"--from-log {path}: {error.strerror or error}.") from None
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    figures = {name: value for name, tries in FIGURES.items() if (value := _first(text, tries)) is not None}
    if not figures:
        raise InputError(
            f"--from-log {path} prints no memory figure of vLLM, such as 'Available KV cache memory'."
        )
    return StartupLog(_flags(text, figures), figures)


def _first(text: str, patterns: tuple[str, ...]) -> float | None:
    for pattern in patterns:
        match = re.search(pattern, text, re.MULTILINE)
        if match:
            return float(match[1].replace(",", ""))
    return None


def _flags(text: str, figures: Mapping[str, float]) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    engine = re.search(r"Initializing a V\d+ LLM engine \(v([^)]+)\) with config: (.*)", text)
    if engine:
        flags["engine_version"] = engine[1]
        config = engine[2]
        model = re.search(r"\bmodel='([^']+)'", config)
        if model:
            flags["model"] = model[1]
        for theirs, ours in CONFIG_FLAGS.items():
            found = re.search(rf"\b{theirs}=(?:torch\.)?([\w.\-]+)", config)
            if found and found[1] != "None":
                flags[ours] = _value(found[1])
    version = re.search(r"vLLM API server version ([\d.][\w.+]*)", text)
    if version:
        flags.setdefault("engine_version", version[1])
    arguments = re.search(r"non-default args: \{(.*)\}", text)
    if arguments:
        for name in ("model", *ARGUMENT_FLAGS):
            found = re.search(rf"'{name}': (?:'([^']*)'|([\w.\-]+))", arguments[1])
            if found and (found[1] or found[2]) not in (None, "None"):
                flags[name] = _value(found[1] or found[2])
    batched = re.search(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)", text)
    if batched:
        flags["max_num_batched_tokens"] = int(batched[1])
    if re.search(r"Asynchronous scheduling is (enabled|disabled)", text):
        flags["async_scheduling"] = "Asynchronous scheduling is enabled" in text
    if "Using V2 Model Runner" in text:
        flags["model_runner"] = "v2"
    if "gpu_memory_utilization" in figures:
        flags["gpu_memory_utilization"] = figures["gpu_memory_utilization"]
    return flags


def _value(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
