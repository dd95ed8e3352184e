"""Engine flags under vLLM's names, and what the engine makes of them by version and device.

Rules of defaults: SCHEDULER_RULES 2.8 and 9, BUDGET 3 to 5 (argument defaults and sources of the vLLM
releases named there). Every default that was filled in is recorded as an assumption in words.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from kvplan.errors import InputError
from kvplan.spec.gpu import GPU
from kvplan.spec.model import LayerKind, ModelSpec

NEWEST_VLLM = "0.32.0"

Version = tuple[int, int]

# Minor releases whose sources or start-up logs stand behind our tables; 0.9 is the first with engine V1 only.
KNOWN_VLLM: tuple[Version, ...] = tuple(
    (0, minor) for minor in (9, 10, 11, 12, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 29, 32)
)

KV_DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp8": "fp8_e4m3"}


@dataclass(frozen=True)
class EngineFacts:
    """How an engine is called, what it calls its share of the GPU, and its smallest unit of KV."""

    label: str
    fraction_name: str
    block_size: int  # tokens


ENGINES = {
    "vllm": EngineFacts("vLLM", "gpu_memory_utilization", 16),
    "sglang": EngineFacts("SGLang", "mem_fraction_static", 1),
    "tensorrt-llm": EngineFacts("TensorRT-LLM", "free_gpu_memory_fraction", 32),
}

# SGLang's prefill chunk and largest captured batch by GPU memory: (GiB below which, tokens, requests). Those
# of 4090 and H100 are known (WEIGHTS_AND_CONFIGS 3); the classes between and above are assumed.
SGLANG_CLASSES = ((35, 2048, 24), (60, 4096, 32), (160, 8192, 256), (float("inf"), 16384, 512))


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
    prefix_cache_retention_interval: int | str | None = None  # "none" = dense
    disable_hybrid_kv_cache_manager: bool | None = None
    kv_cache_layout: str = "LBNHC"
    speculative_model: str | None = None
    num_speculative_tokens: int = 0
    max_loras: int = 0
    max_lora_rank: int = 0
    kv_offload_gib: float = 0.0
    model_runner: str | None = None


@dataclass(frozen=True)
class Resolved:
    """Engine flags with every default filled in for one model on one GPU."""

    settings: EngineSettings
    version: Version  # the known release whose rules apply
    gpu_memory_utilization: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int  # asked for; state layers may raise it (see memory.kvlayout)
    dtype: str
    kv_cache_dtype: str  # never "auto"
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    async_scheduling: bool
    scheduler_reserve_full_isl: bool
    prefix_cache_retention_interval: int | None  # None = dense
    hybrid_kv_cache_manager: bool
    model_runner: str  # v1 or v2
    assumptions: tuple[str, ...]

    @property
    def facts(self) -> EngineFacts:
        """Names and units of the engine."""
        return ENGINES[self.settings.engine]

    @property
    def label(self) -> str:
        """'vLLM 0.32.0'; no version where its rules do not depend on one."""
        version = self.settings.engine_version
        return f"{self.facts.label} {version}" if self.settings.engine == "vllm" else self.facts.label

    @property
    def ranks(self) -> int:
        """GPUs of one replica: TP x PP x DP."""
        s = self.settings
        return s.tensor_parallel_size * s.pipeline_parallel_size * s.data_parallel_size

    @property
    def filled(self) -> EngineSettings:
        """The settings with the numbers that the engine runs with in place of ``None`` and ``auto``."""
        return replace(
            self.settings,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            kv_cache_dtype=self.kv_cache_dtype,
            dtype=self.dtype,
            async_scheduling=self.async_scheduling,
        )

    @property
    def max_in_flight_tokens(self) -> int:
        """Tokens that may be scheduled before the oldest step returns (KV_SIZING_RULES 5).

        From 0.26: batches in flight (PP size, or 2 with async scheduling) x max_num_batched_tokens.
        """
        if self.version < (0, 26):
            return self.max_num_batched_tokens
        stages = self.settings.pipeline_parallel_size
        batches = stages if stages > 1 else 2 if self.async_scheduling else 1
        return batches * self.max_num_batched_tokens


def parse_version(text: str) -> Version:
    """(major, minor) of '0.19.0', 'v0.26.1rc1.dev608', '0.32'; `InputError` for anything else."""
    match = re.match(r"v?(\d+)\.(\d+)", text)
    if match is None:
        raise InputError(f"--engine-version {text!r} is not a version; write it like {NEWEST_VLLM}.")
    return int(match[1]), int(match[2])


def known_version(text: str) -> tuple[Version, str | None]:
    """The nearest known release that is not newer than ``text``, and a note where that is another one."""
    asked = parse_version(text)
    older = [version for version in KNOWN_VLLM if version <= asked]
    if not older:
        oldest = KNOWN_VLLM[0]
        return oldest, f"vLLM {text} is older than any in our tables: rules of {oldest[0]}.{oldest[1]} used"
    version = older[-1]
    if version == asked:
        return version, None
    return version, f"vLLM {text} is not in our tables: rules of {version[0]}.{version[1]} used"


def resolve(settings: EngineSettings, model: ModelSpec, gpu: GPU | None) -> Resolved:
    """Fill in every default as the engine would.

    ``gpu`` None (a hand-given pool) leaves the smallest device class. Raises `InputError` for settings that
    the engine refuses at start-up.
    """
    if settings.engine != "vllm":
        return _resolve_other(settings, model, gpu)
    said: list[str] = []
    version, note = known_version(settings.engine_version)
    if note:
        said.append(note)
    max_model_len = _max_model_len(settings, model, said)
    async_scheduling = _or(settings.async_scheduling, version >= (0, 12))
    chunked = _or(settings.enable_chunked_prefill, True)
    batched, seqs = _batch_limits(settings, gpu, version, max_model_len, chunked, said)
    utilization = settings.gpu_memory_utilization
    if utilization is None:
        utilization = 0.92 if version >= (0, 22) else 0.90
        if settings.kv_cache_memory_bytes is None:
            said.append(f"gpu_memory_utilization {utilization:.2f}, the default of this version")
    retention = settings.prefix_cache_retention_interval
    kv_dtype = KV_DTYPE_ALIASES.get(settings.kv_cache_dtype, settings.kv_cache_dtype)
    dtype = model.dtype if settings.dtype == "auto" else settings.dtype
    if dtype == "float32" and settings.dtype == "auto":
        dtype = "bfloat16"
        said.append("dtype bfloat16: the engine loads a float32 checkpoint in 16 bit")
    if dtype == "bfloat16" and gpu is not None and _lacks_bfloat16(gpu):
        dtype = _without_bfloat16(settings, model, gpu, said)
        settings = replace(settings, dtype=dtype)
    # A log of 0.19 shows chunked-local groups in the hybrid manager; 0.32's source turns it off for them.
    has_chunks = version >= (0, 20) and any(layer.kind is LayerKind.CHUNKED for layer in model.layers)
    disabled = settings.disable_hybrid_kv_cache_manager
    if disabled is None and has_chunks:
        said.append("hybrid KV cache manager off: chunked-local layers are allocated as full attention")
    resolved = Resolved(
        settings=settings,
        version=version,
        gpu_memory_utilization=utilization,
        max_model_len=max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        block_size=_block_size(settings, model, said),
        dtype=dtype,
        kv_cache_dtype=dtype if kv_dtype == "auto" else kv_dtype,
        enable_prefix_caching=_or(settings.enable_prefix_caching, True),
        enable_chunked_prefill=chunked,
        async_scheduling=async_scheduling,
        scheduler_reserve_full_isl=_or(settings.scheduler_reserve_full_isl, version >= (0, 19)),
        prefix_cache_retention_interval=(
            None if retention == "none" or (retention is None and version < (0, 29)) else int(retention or 0)
        ),
        hybrid_kv_cache_manager=not _or(disabled, has_chunks),
        model_runner=settings.model_runner or _default_runner(model, version),
        assumptions=(),
    )
    _refuse_contradictions(resolved)
    if _small_batch(resolved):  # the pool was given by hand: a scheduler alone runs all the same
        said.append("vLLM itself would refuse this max_num_batched_tokens at start-up")
    if settings.model_runner is None and version >= (0, 20):
        said.append(f"model runner {resolved.model_runner.upper()}, this version's default for the model")
    return Resolved(**{**resolved.__dict__, "assumptions": (*said, *model.assumptions)})


def _lacks_bfloat16(gpu: GPU) -> bool:
    """NVIDIA's before Ampere (platforms/cuda.py of vLLM 0.9 and 0.32)."""
    capability = gpu.compute_capability
    return gpu.vendor.lower() == "nvidia" and capability is not None and float(capability) < 8


def _without_bfloat16(settings: EngineSettings, model: ModelSpec, gpu: GPU, said: list[str]) -> str:
    """float16, or float32 where the engine holds float16 to be unstable (config/model.py of 0.32)."""
    if settings.dtype == "bfloat16":
        raise InputError(
            f"--dtype bfloat16 needs compute capability 8.0; {gpu.name} has {gpu.compute_capability}.\n"
            "  Use --dtype float16."
        )
    unstable = model.architecture.startswith(("Gemma2For", "Gemma3For", "Glm4ForCausalLM"))
    dtype = "float32" if unstable else "float16"
    why = ", and the engine refuses float16 for this model" if unstable else ""
    said.append(f"dtype {dtype}: {gpu.name} has no bfloat16{why}")
    return dtype


def _resolve_other(settings: EngineSettings, model: ModelSpec, gpu: GPU | None) -> Resolved:
    """SGLang and TensorRT-LLM: what their pool depends on (BUDGET 10, WEIGHTS_AND_CONFIGS 3)."""
    said: list[str] = []
    facts = ENGINES[settings.engine]
    total_gib = math.ceil(gpu.total_gib) if gpu else 80
    _, chunk, graph_batch = next(row for row in SGLANG_CLASSES if total_gib < row[0])
    batched = settings.max_num_batched_tokens or chunk
    fraction = settings.gpu_memory_utilization
    if fraction is None and settings.engine == "sglang":
        tp_pp = settings.tensor_parallel_size * settings.pipeline_parallel_size
        reserved_mib = 512 + 1.5 * max(batched, 2048) + 2 * graph_batch + tp_pp / 8 * 1024
        if total_gib > 60:
            reserved_mib = max(reserved_mib, 10 * 1024)
        fraction = round(1 - reserved_mib / (total_gib * 1024), 3)
        said.append(f"mem_fraction_static {fraction}, SGLang's own default for this card and split")
    elif fraction is None:
        fraction = 0.9
        said.append("free_gpu_memory_fraction 0.9, the default")
    said.append(f"{facts.label}: only models of full or latent (MLA) attention are modelled, at any version")
    dtype = model.dtype if settings.dtype == "auto" else settings.dtype
    kv_dtype = KV_DTYPE_ALIASES.get(settings.kv_cache_dtype, settings.kv_cache_dtype)
    return Resolved(
        settings=settings,
        version=KNOWN_VLLM[-1],
        gpu_memory_utilization=fraction,
        max_model_len=_max_model_len(settings, model, said),
        max_num_seqs=settings.max_num_seqs or graph_batch,
        max_num_batched_tokens=batched,
        block_size=settings.block_size or facts.block_size,
        dtype=dtype,
        kv_cache_dtype=dtype if kv_dtype == "auto" else kv_dtype,
        enable_prefix_caching=_or(settings.enable_prefix_caching, True),
        enable_chunked_prefill=_or(settings.enable_chunked_prefill, True),
        async_scheduling=False,
        scheduler_reserve_full_isl=_or(settings.scheduler_reserve_full_isl, False),
        prefix_cache_retention_interval=None,
        hybrid_kv_cache_manager=True,
        model_runner="v1",
        assumptions=(*said, *model.assumptions),
    )


def _or(value: bool | None, default: bool) -> bool:
    return default if value is None else value


def _max_model_len(settings: EngineSettings, model: ModelSpec, said: list[str]) -> int:
    own = model.max_position_embeddings
    if settings.max_model_len is None:
        if own < 1:
            raise InputError("--max-model-len is missing, and the model does not state its own maximum.")
        said.append(f"max_model_len {own:,}, the model's own maximum")
        return own
    if 0 < own < settings.max_model_len:
        raise InputError(
            f"--max-model-len {settings.max_model_len:,} is above the model's own maximum, {own:,}."
        )
    return settings.max_model_len


def _batch_limits(
    settings: EngineSettings,
    gpu: GPU | None,
    version: Version,
    max_model_len: int,
    chunked: bool,
    said: list[str],
) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) of the API server: SCHEDULER_RULES 2.8."""
    total_gib = gpu.total_gib if gpu else 0.0
    is_a100 = gpu is not None and "a100" in gpu.name.lower()
    if total_gib >= 160 and version >= (0, 29):
        tokens, seqs, why = 16384, 1024, "server, >= 160 GiB"
    elif total_gib >= 70 and not is_a100:
        tokens, seqs, why = 8192, 1024, "server, >= 70 GiB"
    else:
        tokens, seqs, why = 2048, 256, "server, < 70 GiB or A100" if gpu else "server, no GPU named"
    if not chunked:
        tokens, why = max(tokens, max_model_len), why + ", chunked prefill off"
    batched = settings.max_num_batched_tokens or tokens
    running = settings.max_num_seqs or min(seqs, batched)
    filled = [
        f"{name} {value:,}"
        for name, value, given in (
            ("max_num_seqs", running, settings.max_num_seqs),
            ("max_num_batched_tokens", batched, settings.max_num_batched_tokens),
        )
        if given is None
    ]
    if filled:
        said.append(f"{', '.join(filled)} ({why})")
    return batched, running


def _block_size(settings: EngineSettings, model: ModelSpec, said: list[str]) -> int:
    if settings.block_size is not None:
        return settings.block_size
    if any(layer.index_dim for layer in model.layers):
        said.append("block_size 64: sparse attention needs it")
        return 64
    return 16


def _default_runner(model: ModelSpec, version: Version) -> str:
    """BUDGET 3: Qwen3 dense first, then Qwen and DeepSeek-V2 MoE, all dense models, then every model."""
    if version >= (0, 29):
        return "v2"
    if version >= (0, 25) and model.moe is None:
        return "v2"
    if version >= (0, 24) and model.architecture.startswith(("Qwen3Moe", "Qwen2Moe", "DeepseekV2")):
        return "v2"
    return "v2" if version >= (0, 21) and model.architecture == "Qwen3ForCausalLM" else "v1"


def _small_batch(r: Resolved) -> str | None:
    """Why the engine refuses max_num_batched_tokens, if it does."""
    if r.max_num_batched_tokens < r.max_num_seqs:
        return (
            f"--max-num-batched-tokens {r.max_num_batched_tokens:,} is below max_num_seqs "
            f"{r.max_num_seqs:,}.\n  Every running request needs one token a step."
        )
    if not r.enable_chunked_prefill and r.max_num_batched_tokens < r.max_model_len:
        return (
            f"--max-num-batched-tokens {r.max_num_batched_tokens:,} is below max_model_len "
            f"{r.max_model_len:,}.\n  Without chunked prefill a whole prompt must fit in one step."
        )
    return None


def _refuse_contradictions(r: Resolved) -> None:
    s = r.settings
    small = _small_batch(r)
    if small and s.num_gpu_blocks_override is None:
        raise InputError(small)
    if s.kv_cache_layout == "BLNHC" and r.version < (0, 29):
        raise InputError("--kv-cache-layout BLNHC exists from vLLM 0.29 on.")
    if s.watermark and r.version < (0, 26):
        raise InputError("--watermark exists from vLLM 0.26 on.")
    if s.tensor_parallel_size % s.decode_context_parallel_size:
        raise InputError(
            f"--decode-context-parallel-size {s.decode_context_parallel_size} must divide "
            f"-tp {s.tensor_parallel_size}."
        )
