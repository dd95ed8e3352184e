"""Gates of the kernels beside decode: chunked prefill, MLA decode, and the operations on the cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvplan.bench import tensors
from kvplan.bench.cells import SHORT_NAMES, Shape
from kvplan.bench.gates import GateResult, Variant, kernel_function, raised, result
from kvplan.bench.tensors import as_bytes
from kvplan.kernels import reference

# Chunks of a prefill batch as (cached prefix, new tokens): none, one, within a tile, over several.
CHUNKS = ((0, 1), (0, 17), (5, 16), (64, 64), (100, 1), (0, 0), (33, 200))
MLA_LATENT, MLA_ROPE = 512, 64  # DeepSeek's
MLA_SCALE = 192**-0.5  # of its heads before absorption


def run_other_gates(device: str) -> Iterator[GateResult]:
    """Prefill, MLA and cache operations on ``device``, one result at a time."""
    prefill = kernel_function("prefill", "paged_prefill")
    if isinstance(prefill, GateResult):
        yield prefill
    else:
        for variant in prefill_variants():
            name = variant.name.replace("decode", "prefill", 1)
            error = partial(prefill_error, prefill, variant, device)
            yield run_gate(name, error, tensors.TOLERANCES[variant.dtype])
    mla = kernel_function("mla", "mla_decode")
    if isinstance(mla, GateResult):
        yield mla
    else:
        for block_size, heads in ((1, 16), (16, 128), (64, 16)):
            name = f"MLA decode bf16, block {block_size}, {heads} heads, {MLA_LATENT} + {MLA_ROPE}"
            error = partial(mla_error, mla, block_size, heads, device)
            yield run_gate(name, error, tensors.TOLERANCES["bfloat16"])
    cache_ops = kernel_function("cache_ops", "write_kv")
    if isinstance(cache_ops, GateResult):
        yield cache_ops
        return
    for kv_dtype in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
        yield run_gate(f"write {SHORT_NAMES[kv_dtype]} KV", partial(write_error, kv_dtype, device), 0.0)
    yield run_gate("copy blocks", partial(copy_error, device), 0.0)
    yield run_gate("swap blocks out and in", partial(swap_error, device), 0.0)


def run_gate(name: str, error: Callable[[], float], tolerance: float) -> GateResult:
    """The result of a gate whose error is computed by a call; an exception is a failed gate."""
    try:
        return result(name, error(), tolerance)
    except Exception as failure:
        return raised(name, failure)


def prefill_variants() -> Iterator[Variant]:
    """Types, block sizes, groups and head sizes of prefill, and its options together."""
    base = Variant()
    yield from (replace(base, dtype=dtype) for dtype in ("bfloat16", "float16", "float32"))
    yield from (replace(base, block_size=block) for block in (1, 64, 256))
    yield from (replace(base, group=group) for group in (1, 8))
    yield from (replace(base, head_dim=dim) for dim in (64, 256))
    yield replace(base, window=40, soft_cap=20.0, sinks=True)
    yield replace(base, kv_dtype="float8_e4m3fn", k_scale=0.5, v_scale=2.0)


def prefill_error(prefill: Callable[..., Any], variant: Variant, device: str) -> float:
    """Worst head's relative error of one prefill call over `CHUNKS`."""
    shape = Shape(
        batch_size=len(CHUNKS),
        context_len=1,
        heads=2 * variant.group,
        kv_heads=2,
        head_dim=variant.head_dim,
        dtype=variant.dtype,
        kv_dtype=variant.kv_dtype or variant.dtype,
    )
    lens = [prefix + new for prefix, new in CHUNKS]
    paged = tensors.make_paged(tensors.make_tokens(shape, device, lens), variant.block_size, variant.table)
    start = torch.zeros(len(CHUNKS) + 1, dtype=torch.int32)
    start[1:] = torch.cumsum(torch.tensor([new for _, new in CHUNKS]), 0)
    generator = torch.Generator(device=device).manual_seed(1)
    q = torch.randn(int(start[-1]), shape.heads, shape.head_dim, generator=generator, device=device)
    arguments = (
        q.to(paged.q.dtype),
        paged.k_cache,
        paged.v_cache,
        paged.block_table,
        paged.seq_lens,
        start.to(device),
    )
    options: dict[str, Any] = {
        "window": variant.window,
        "soft_cap": variant.soft_cap,
        "k_scale": variant.k_scale,
        "v_scale": variant.v_scale,
    }
    if variant.sinks:
        options["sinks"] = torch.linspace(-1.0, 3.0, shape.heads, device=device)
    out = torch.as_tensor(prefill(*arguments, **options))
    return tensors.worst_error(out, reference.paged_prefill(*arguments, **options))


def mla_error(mla: Callable[..., Any], block_size: int, heads: int, device: str) -> float:
    """Worst head's relative error of one MLA decode call over rows of 0 to 2,049 tokens."""
    lens = [0, 1, max(1, block_size - 1), block_size, block_size + 1, 777, 2049]
    shape = Shape(len(lens), max(lens), heads, 1, MLA_LATENT + MLA_ROPE)
    paged = tensors.make_paged(tensors.make_tokens(shape, device, lens), block_size, "random")
    arguments = (paged.q, paged.k_cache[:, :, 0], paged.block_table, paged.seq_lens)
    out = torch.as_tensor(mla(*arguments, scale=MLA_SCALE, latent_dim=MLA_LATENT))
    expected = reference.mla_decode(*arguments, scale=MLA_SCALE, latent_dim=MLA_LATENT)
    return tensors.worst_error(out, expected)


def write_error(kv_dtype: str, device: str) -> float:
    """Share of bytes that differ from rounding to nearest, slots of -1 and all others untouched included."""
    from kvplan.kernels.cache_ops import write_kv

    scale = 2.0
    dtype = tensors.torch_dtype(kv_dtype)
    k, v = (_random(device, seed, 40, 2, 64) * 4 for seed in (1, 2))
    caches = [torch.full((8, 16, 2, 64), math.nan, dtype=dtype, device=device) for _ in range(2)]
    slots = torch.randperm(8 * 16, generator=torch.Generator().manual_seed(3))[:40].to(device)
    slots[5] = -1
    expected = [cache.clone() for cache in caches]
    kept = slots >= 0
    for cache, values in zip(expected, (k, v), strict=True):
        flat = as_bytes(cache).view(128, 2, 64)
        flat[slots[kept]] = as_bytes((values[kept] / scale).to(dtype))
    write_kv(k, v, caches[0], caches[1], slots, k_scale=scale, v_scale=scale)
    return max(_differing(found, right) for found, right in zip(caches, expected, strict=True))


def copy_error(device: str) -> float:
    """Share of bytes that differ after blocks 0, 5 were copied to 3, 0 (a chain: sources are read first)."""
    from kvplan.kernels.cache_ops import copy_blocks

    cache = _random(device, 1, 8, 16, 2, 64).to(torch.bfloat16)
    expected = cache.clone()
    expected[3], expected[0] = cache[0], cache[5]
    copy_blocks([cache], [0, 5], [3, 0])
    return _differing(cache, expected)


def swap_error(device: str) -> float:
    """Share of bytes that differ after blocks went to host memory and came back elsewhere."""
    from kvplan.kernels.cache_ops import swap_blocks

    cache = _random(device, 1, 8, 16, 2, 64).to(torch.bfloat16)
    host = torch.zeros((4, 16, 2, 64), dtype=torch.bfloat16, pin_memory=device == "cuda")
    expected = cache.clone()
    expected[6], expected[7] = cache[2], cache[3]
    swap_blocks(cache, host, [2, 3], [1, 0])
    swap_blocks(host, cache, [1, 0], [6, 7])
    if device == "cuda":
        torch.cuda.synchronize()
    return _differing(cache, expected)


def _random(device: str, seed: int, *size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator(device=device).manual_seed(seed), device=device)


def _differing(found: Tensor, expected: Tensor) -> float:
    """Share of bytes that differ; NaN equals the same NaN."""
    return float((found.view(torch.uint8) != expected.view(torch.uint8)).float().mean())
