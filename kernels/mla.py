"""Paged decode for multi-head latent attention on a GPU (Triton), in the absorbed form of DeepSeek.

All heads of a sequence read one shared row a token: 512 latent numbers, which are key and value at once, and
64 rope numbers, which are key only. So a tile is loaded once and used by two dots, and many heads share it:
rows of the tile are heads. Splits and joining as in `kvplan.kernels.decode`.

Importing this module needs torch and triton; ``TRITON_INTERPRET=1`` as in `kvplan.kernels.decode`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvplan.kernels.attend import load_floats, load_page_ids, split_tiles
from kvplan.kernels.checks import check_extras, check_indices, check_table_shapes
from kvplan.kernels.combine import combine, new_parts
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
def _mla_kernel(
    q,
    kv_cache,
    block_table,
    seq_lens,
    out,
    part_out,
    part_lse,
    stride_q_row,
    stride_q_head,
    stride_block,
    stride_slot,
    stride_table,
    stride_out_row,
    stride_out_head,
    score_scale,
    v_scale,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    E4M3_BITS: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    n = tl.load(seq_lens + row)
    _low, _first, part_tiles, parts = split_tiles(n, 0, NUM_SPLITS, TILE, MIN_TILES)
    if (split > 0) & (split >= parts):
        return

    heads = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    latent = tl.arange(0, LATENT)
    rope = tl.arange(0, ROPE)
    valid = heads < HEADS
    q_head = q + row * stride_q_row + heads[:, None] * stride_q_head
    q_latent = tl.load(q_head + latent[None, :], mask=valid[:, None], other=0.0).to(COMPUTE)
    q_rope = tl.load(q_head + LATENT + rope[None, :], mask=valid[:, None], other=0.0).to(COMPUTE)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, LATENT], tl.float32)

    table_row = block_table + row * stride_table
    first_tile = split * part_tiles
    end = tl.minimum((first_tile + part_tiles) * TILE, n)
    pages = load_page_ids(table_row, first_tile, end, PAGE, TILE)
    for tile in range(first_tile, tl.cdiv(end, TILE)):
        next_pages = load_page_ids(table_row, tile + 1, end, PAGE, TILE)
        position = tile * TILE + tl.arange(0, TILE)
        seen = position < end
        token = kv_cache + (pages.to(tl.int64) * stride_block + (position % PAGE) * stride_slot)[:, None]
        kv = load_floats(token + latent[None, :], seen[:, None], E4M3_BITS, COMPUTE)
        k_rope = load_floats(token + LATENT + rope[None, :], seen[:, None], E4M3_BITS, COMPUTE)
        scores = tl.dot(q_latent, tl.trans(kv), input_precision=PRECISION)
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision=PRECISION) * score_scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        top = tl.maximum(m, tl.max(scores, 1))
        weights = tl.exp2(scores - top[:, None])
        shrink = tl.exp2(m - top)
        norm = norm * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(COMPUTE), kv, acc * shrink[:, None], input_precision=PRECISION)
        m = top
        pages = next_pages

    result = acc * (v_scale / tl.where(norm > 0, norm, 1.0))[:, None]
    if parts <= 1:
        out_head = out + row * stride_out_row + heads[:, None] * stride_out_head
        tl.store(out_head + latent[None, :], result.to(out.dtype.element_ty), mask=valid[:, None])
    else:
        at = (row * NUM_SPLITS + split) * HEADS + heads
        tl.store(part_lse + at, m + tl.log2(norm), mask=valid)
        tl.store(part_out + at[:, None] * LATENT + latent[None, :], result, mask=valid[:, None])


@dataclass(frozen=True)
class MlaConfig:
    """Tuning of one launch: ``rows`` heads a program, ``tile`` tokens at a time."""

    rows: int = 16
    tile: int = 32
    warps: int = 4
    stages: int = 3


def default_config(
    dtype: torch.dtype, kv_dtype: torch.dtype, heads: int, capability: tuple[int, int] | None
) -> MlaConfig:
    """The configuration for query and cache types, heads on this GPU and a CUDA capability (None: not CUDA).

    An accumulator of 512 numbers a head is what limits rows: 64 spill registers below sm_100, whose tensor
    cores keep it in a memory of their own.
    """
    if dtype == torch.float32 or capability is None:
        return MlaConfig(tile=16, warps=8, stages=1)
    if heads >= 64 and capability[0] >= 10 and kv_dtype == dtype:
        return MlaConfig(rows=64, warps=8, stages=2)
    if heads > 16:
        return MlaConfig(rows=32, warps=8)
    return MlaConfig(warps=4 if kv_dtype == dtype else 8)


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    latent_dim: int = 512,
    kv_scale: float = 1.0,
    num_splits: int | None = None,
    max_seq_len: int | None = None,
    out: Tensor | None = None,
    config: MlaConfig | None = None,
    check: bool = True,
) -> Tensor:
    """One new token per sequence against its cached latent rows, on a GPU.

    ``q [batch, heads, latent + rope]`` (absorbed queries, 576 for DeepSeek) in bfloat16, float16 or float32;
    ``kv_cache [num_blocks, block_size, latent + rope]`` of q's type or float8, contiguous along the last
    dimension; latent and rope sizes powers of two. ``scale`` multiplies scores and must be given, see
    `kvplan.kernels.reference.mla_decode`; ``kv_scale`` turns stored numbers into true ones. ``block_table``,
    ``seq_lens`` and the other arguments as in `kvplan.kernels.decode.paged_decode`. Returns ``out``, by
    default in q's type, ``[batch, heads, latent_dim]``.

    ValueError for shapes, types or strides that do not fit, IndexError for a bad length or block id in use.
    """
    if q.dim() != 3 or kv_cache.dim() != 3 or q.shape[2] != kv_cache.shape[2]:
        raise ValueError(
            f"q must be [batch, heads, dim] and kv_cache [num_blocks, block_size, dim], found "
            f"{tuple(q.shape)} and {tuple(kv_cache.shape)}"
        )
    check_table_shapes(block_table, seq_lens)
    sms, capability = device_traits(q)
    check_types(q, kv_cache, kv_cache, block_table, seq_lens=seq_lens, out=out)
    batch, heads, dim = q.shape
    check_extras(None, out, heads, (batch, heads, latent_dim))
    num_blocks, page, _ = kv_cache.shape
    rope_dim = dim - latent_dim
    for name, size in (("latent_dim", latent_dim), ("rope size", rope_dim)):
        if size < 16 or size & (size - 1):
            raise ValueError(f"{name} must be a power of two from 16 on, found {size}")
    if check and not capturing(q):
        check_indices(block_table, seq_lens, num_blocks, page)
    out = q.new_empty((batch, heads, latent_dim)) if out is None else out
    if batch == 0:
        return out

    config = config or default_config(q.dtype, kv_cache.dtype, heads, capability)
    longest = block_table.shape[1] * page if max_seq_len is None else max_seq_len
    head_blocks = triton.cdiv(heads, config.rows)
    splits = choose_num_splits(batch, head_blocks, longest, sms) if num_splits is None else num_splits
    stored, e4m3_bits = stored_as(kv_cache, capability)
    factor = kv_scale * (E4M3_FACTOR if e4m3_bits else 1.0)
    part_out, part_lse = new_parts(q, batch * splits if splits > 1 else 0, heads, latent_dim)
    min_tiles = max(1, MIN_PART_TOKENS // config.tile)
    _mla_kernel[(head_blocks, splits, batch)](
        q,
        stored,
        block_table,
        seq_lens,
        out,
        part_out,
        part_lse,
        *q.stride()[:2],
        *stored.stride()[:2],
        block_table.stride(0),
        *out.stride()[:2],
        scale * factor * math.log2(math.e),
        factor,
        HEADS=heads,
        ROWS=config.rows,
        PAGE=page,
        TILE=config.tile,
        LATENT=latent_dim,
        ROPE=rope_dim,
        NUM_SPLITS=splits,
        MIN_TILES=min_tiles,
        E4M3_BITS=e4m3_bits,
        COMPUTE=compute_type(q, kv_cache),
        PRECISION=precision(q),
        num_warps=config.warps,
        num_stages=config.stages,
    )
    if splits > 1:
        combine(out, part_out, part_lse, seq_lens, num_splits=splits, tile=config.tile, min_tiles=min_tiles)
    return out
