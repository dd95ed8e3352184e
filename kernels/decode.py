"""Paged decode on a GPU (Triton): one new token per sequence against its cached tokens.

One program takes one KV head of one part of one sequence, with all query heads of that group packed into the
rows of one tensor-core tile. A sequence that needs one part writes its output directly; others leave
unnormalised parts with their log-sum-exp for `_combine_kernel`. The grid depends on shapes only, never on
lengths, so a CUDA graph captured once stays right.

Importing this module needs torch and triton. With ``TRITON_INTERPRET=1`` set before the import it runs on CPU
tensors, slowly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvplan.kernels.attend import LOG2E, attend_tiles, split_tiles
from kvplan.kernels.checks import check_cache_shapes, check_indices
from kvplan.kernels.device import (
    E4M3_FACTOR,
    capturing,
    check_types,
    compute_type,
    device_traits,
    precision,
    stored_as,
)
from kvplan.kernels.splits import MIN_PART_TOKENS, choose_num_splits


@triton.jit
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    sinks,
    out,
    part_out,
    part_lse,
    stride_q_row,
    stride_q_head,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_table,
    stride_out_row,
    stride_out_head,
    score_scale,
    cap,
    v_scale,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SWAP_AB: tl.constexpr,
    E4M3_BITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    n = tl.load(seq_lens + row)
    low, first_tile, part_tiles, parts = split_tiles(n, window, NUM_SPLITS, TILE, MIN_TILES)
    if (split > 0) & (split >= parts):
        return

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PAD)
    heads = kv_head * GROUP + rows
    if SWAP_AB:
        valid = (rows < GROUP)[None, :] & (dims < DIM)[:, None]
        within = heads[None, :] * stride_q_head + dims[:, None]
        acc = tl.zeros([DIM_PAD, ROWS], tl.float32)
    else:
        valid = (rows < GROUP)[:, None] & (dims < DIM)[None, :]
        within = heads[:, None] * stride_q_head + dims[None, :]
        acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    queries = tl.load(q + row * stride_q_row + within, mask=valid, other=0.0).to(COMPUTE)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        # The sink is a logit without a value: the first part starts its softmax with it.
        first_part = split == 0
        sink = tl.load(sinks + heads, mask=rows < GROUP, other=0.0) * LOG2E
        m = tl.where(first_part, sink, m)
        norm = tl.where(first_part, 1.0, norm)

    first = first_tile + split * part_tiles
    m, norm, acc = attend_tiles(
        queries,
        k_cache + kv_head * stride_k_head,
        v_cache + kv_head * stride_v_head,
        block_table + row * stride_table,
        stride_k_block,
        stride_k_slot,
        stride_v_block,
        stride_v_slot,
        first,
        low,
        tl.minimum((first + part_tiles) * TILE, n),
        m,
        norm,
        acc,
        score_scale,
        cap,
        PAGE,
        TILE,
        DIM,
        DIM_PAD,
        SWAP_AB,
        E4M3_BITS,
        HAS_WINDOW,
        HAS_CAP,
        COMPUTE,
        PRECISION,
    )

    # A sequence without tokens has norm = 0 (1 with a sink) and acc = 0; its output is 0.
    inverse = v_scale / tl.where(norm > 0, norm, 1.0)
    result = acc * (inverse[None, :] if SWAP_AB else inverse[:, None])
    if parts <= 1:
        if SWAP_AB:
            place = heads[None, :] * stride_out_head + dims[:, None]
        else:
            place = heads[:, None] * stride_out_head + dims[None, :]
        tl.store(out + row * stride_out_row + place, result.to(out.dtype.element_ty), mask=valid)
    else:
        at = (row * KV_HEADS * GROUP + heads) * NUM_SPLITS + split
        tl.store(part_lse + at, m + tl.log2(norm), mask=rows < GROUP)
        parts_at = at[None, :] * DIM + dims[:, None] if SWAP_AB else at[:, None] * DIM + dims[None, :]
        tl.store(part_out + parts_at, result, mask=valid)


@triton.jit
def _combine_kernel(
    out,
    part_out,
    part_lse,
    seq_lens,
    stride_out_row,
    stride_out_head,
    window,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """One program a query head: the parts' outputs weighed by 2 ** (lse - max lse)."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    n = tl.load(seq_lens + row)
    _low, _first, _tiles, parts = split_tiles(n, window, NUM_SPLITS, TILE, MIN_TILES)
    if parts <= 1:
        return
    dims = tl.arange(0, DIM_PAD)
    at = (row * HEADS + head) * NUM_SPLITS
    top = float("-inf")
    for part in range(0, parts):
        top = tl.maximum(top, tl.load(part_lse + at + part))
    total = 0.0
    acc = tl.zeros([DIM_PAD], tl.float32)
    for part in range(0, parts):
        weight = tl.exp2(tl.load(part_lse + at + part) - top)
        acc += weight * tl.load(part_out + (at + part) * DIM + dims, mask=dims < DIM, other=0.0)
        total += weight
    place = out + row * stride_out_row + head * stride_out_head + dims
    tl.store(place, (acc / total).to(out.dtype.element_ty), mask=dims < DIM)


@dataclass(frozen=True)
class DecodeConfig:
    """Tuning of one launch: ``tile`` in tokens, whatever the block size; ``stages - 1`` tiles in flight."""

    tile: int = 64
    warps: int = 4
    stages: int = 3
    swap_ab: bool = False


def default_config(dtype: torch.dtype, head_dim: int, capability: tuple[int, int] | None) -> DecodeConfig:
    """The configuration for a query type, a head size and a CUDA capability (None: AMD or interpreter)."""
    if dtype == torch.float32:  # exact float32 dots take no tensor core; kept small so that they fit
        return DecodeConfig(tile=16, warps=4, stages=2)
    tile = 64 if head_dim <= 128 else 32
    if capability is None:
        return DecodeConfig(tile=32, warps=4, stages=2)
    return DecodeConfig(tile=tile, warps=4, stages=4 if head_dim <= 128 else 3, swap_ab=capability[0] == 9)


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    num_splits: int | None = None,
    max_seq_len: int | None = None,
    out: Tensor | None = None,
    config: DecodeConfig | None = None,
    check: bool = True,
) -> Tensor:
    """One new token per sequence against its cached tokens, on a GPU.

    ``q [batch, heads, head_dim]`` in bfloat16, float16 or float32, contiguous along ``head_dim``; caches
    ``[num_blocks, block_size, kv_heads, head_dim]`` of q's type or float8 (e4m3fn, e5m2; computed in
    float16), contiguous along ``head_dim``, other strides best multiples of 16 elements; any block size;
    ``block_table`` int32 ``[batch, max_blocks]`` contiguous along rows; ``seq_lens`` int32 ``[batch]``, 0
    gives zeros. ``scale, window, soft_cap, sinks, k_scale, v_scale`` as in `kvplan.kernels.reference`.

    ``num_splits`` parts a sequence, by default from the SM count and ``max_seq_len`` (tokens; default: what
    the table could hold). A fixed number makes the result independent of the batch. ``out``: where to write,
    any float type. Returns ``out``, by default in q's type, ``[batch, heads, head_dim]``.

    ``check`` verifies every length and block id in use on the device, which waits for the device once;
    serving checks once a step and passes False for its layers. Left out while a CUDA graph is captured.
    Raises ValueError for shapes, types or strides that do not fit, IndexError for a bad length or id.
    """
    check_cache_shapes(q, k_cache, v_cache, block_table, seq_lens)
    sms, capability = device_traits(q)
    batch, heads, dim = q.shape
    num_blocks, page, kv_heads, _ = k_cache.shape
    check_types(q, k_cache, v_cache, block_table)
    if v_cache.shape[3] != dim:
        raise ValueError(
            f"k_cache has head_dim {dim}, v_cache {v_cache.shape[3]}; see mla_decode for unequal ones"
        )
    if check and not capturing(q):
        check_indices(block_table, seq_lens, num_blocks, page)
    out = torch.empty_like(q) if out is None else out
    if batch == 0:
        return out

    config = config or default_config(q.dtype, dim, capability)
    longest = block_table.shape[1] * page if max_seq_len is None else max_seq_len
    if window > 0:
        longest = min(longest, window)
    splits = choose_num_splits(batch, kv_heads, longest, sms) if num_splits is None else num_splits
    k_stored, e4m3_bits = stored_as(k_cache, capability)
    v_stored, _ = stored_as(v_cache, capability)
    factor = E4M3_FACTOR if e4m3_bits else 1.0
    score_scale = (dim**-0.5 if scale is None else scale) * k_scale * factor * math.log2(math.e)
    part_out = q.new_empty((batch, heads, splits, dim) if splits > 1 else 1, dtype=torch.float32)
    part_lse = q.new_empty((batch, heads, splits) if splits > 1 else 1, dtype=torch.float32)
    group = heads // kv_heads
    shared = {
        "TILE": config.tile,
        "DIM": dim,
        "DIM_PAD": triton.next_power_of_2(dim),
        "NUM_SPLITS": splits,
        "MIN_TILES": max(1, MIN_PART_TOKENS // config.tile),
    }
    _decode_kernel[(kv_heads, splits, batch)](
        q,
        k_stored,
        v_stored,
        block_table,
        seq_lens,
        sinks,
        out,
        part_out,
        part_lse,
        *q.stride()[:2],
        *k_stored.stride()[:3],
        *v_stored.stride()[:3],
        block_table.stride(0),
        *out.stride()[:2],
        score_scale,
        soft_cap * math.log2(math.e),
        v_scale * factor,
        window,
        KV_HEADS=kv_heads,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)),
        PAGE=page,
        SWAP_AB=config.swap_ab,
        E4M3_BITS=e4m3_bits,
        HAS_WINDOW=window > 0,
        HAS_CAP=soft_cap > 0,
        HAS_SINKS=sinks is not None,
        COMPUTE=compute_type(q, k_cache),
        PRECISION=precision(q),
        **shared,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    if splits > 1:
        _combine_kernel[(heads, batch)](
            out, part_out, part_lse, seq_lens, *out.stride()[:2], window, HEADS=heads, **shared, num_warps=2
        )
    return out
