"""Engine flags under vLLM's names, and their defaults by engine version.

Rules of defaults: SCHEDULER_RULES 2.8 and 9, BUDGET 3 (vLLM 0.32.0 argument defaults).
"""

from __future__ import annotations

from dataclasses import dataclass

NEWEST_VLLM = "0.32.0"


@dataclass(frozen=True)
class EngineSettings:
    """What the user said; ``None`` means "the engine's own default" (see `resolve`)."""

    engine: str = "vllm"
    engine_version: str = NEWEST_VLLM
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    decode_context_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    enforce_eager: bool = False
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    long_prefill_token_threshold: int = 0
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    scheduling_policy: str = "fcfs"
    async_scheduling: bool | None = None
    watermark: float = 0.0
    scheduler_reserve_full_isl: bool | None = None
    prefix_cache_retention_interval: int | None = 0  # None = dense
    disable_hybrid_kv_cache_manager: bool | None = None
    kv_cache_layout: str = "LBNHC"
    speculative_model: str | None = None
    num_speculative_tokens: int = 0
    max_loras: int = 0
    max_lora_rank: int = 0
    kv_offload_gib: float = 0.0
    model_runner: str | None = None
