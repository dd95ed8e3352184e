"""Paged prefill on a GPU (Triton): chunks of new tokens, causal, over a prefix that is already cached.

One program takes a run of one sequence's new tokens and one KV head; queries and that group's query heads
share the rows of the tile, row = query * group + head. Tiles that all its queries see whole run without a
mask; the diagonal, the end and windows run with one. Late runs see most tokens and start first.

Importing this module needs torch and triton; ``TRITON_INTERPRET=1`` as in `kvplan.kernels.decode`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvplan.kernels.attend import LOG2E, cap_scores, load_floats, load_page_ids
from kvplan.kernels.checks import check_cache_shapes, check_extras, check_indices, check_query_start
from kvplan.kernels.device import (
    E4M3_FACTOR,
    capturing,
    check_types,
    compute_type,
    device_traits,
    precision,
    stored_as,
)


@triton.jit
def _fold_tiles(
    q,
    k_head,
    v_head,
    table_row,
    stride_k_block,
    stride_k_slot,
    stride_v_block,
    stride_v_slot,
    first_tile,
    end_tile,
    query_position,
    n,
    window,
    m,
    norm,
    acc,
    score_scale,
    cap,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    E4M3_BITS: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold KV tiles first_tile .. end_tile - 1 into m, norm [ROWS], acc [ROWS, DIM_PAD] and return them.

    ``query_position [ROWS]`` is each row's place in its sequence. Block ids come one tile ahead, as in
    `kvplan.kernels.attend`.
    """
    dims = tl.arange(0, DIM_PAD)
    end = tl.minimum(end_tile * TILE, n)
    pages = load_page_ids(table_row, first_tile, end, PAGE, TILE)
    for tile in range(first_tile, end_tile):
        next_pages = load_page_ids(table_row, tile + 1, end, PAGE, TILE)
        position = tile * TILE + tl.arange(0, TILE)
        slot = position % PAGE
        k_rows = pages.to(tl.int64) * stride_k_block + slot * stride_k_slot
        v_rows = pages.to(tl.int64) * stride_v_block + slot * stride_v_slot
        mask = (position < n)[:, None] & (dims < DIM)[None, :]
        k = load_floats(k_head + k_rows[:, None] + dims[None, :], mask, E4M3_BITS, COMPUTE)
        v = load_floats(v_head + v_rows[:, None] + dims[None, :], mask, E4M3_BITS, COMPUTE)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * score_scale
        if HAS_CAP:
            scores = cap_scores(scores, cap)
        if MASKED:
            seen = position[None, :] <= query_position[:, None]
            if HAS_WINDOW:
                seen = seen & (position[None, :] > query_position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(m, tl.max(scores, 1))
        # A row whose window starts in a later tile has seen nothing yet: its maximum is still -inf.
        base = tl.where(top == float("-inf"), 0.0, top) if MASKED else top
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(m - base)
        norm = norm * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(COMPUTE), v, acc * shrink[:, None], input_precision=PRECISION)
        m = top
        pages = next_pages
    return m, norm, acc


@triton.jit
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    query_start,
    sinks,
    out,
    stride_q_token,
    stride_q_head,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_table,
    stride_out_token,
    stride_out_head,
    score_scale,
    cap,
    v_scale,
    window,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    E4M3_BITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    QUERIES: tl.constexpr = ROWS // GROUP_PAD
    run = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    start = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - start
    if run * QUERIES >= count:
        return
    n = tl.load(seq_lens + row)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PAD)
    query = run * QUERIES + rows // GROUP_PAD
    head_in_group = rows % GROUP_PAD
    head = kv_head * GROUP + head_in_group
    valid = ((query < count) & (head_in_group < GROUP))[:, None] & (dims < DIM)[None, :]
    token = (start + query).to(tl.int64)
    q_at = token[:, None] * stride_q_token + head[:, None] * stride_q_head + dims[None, :]
    queries = tl.load(q + q_at, mask=valid, other=0.0).to(COMPUTE)
    prefix = n - count
    query_position = prefix + query
    m = tl.full([ROWS], float("-inf"), tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    if HAS_SINKS:
        m = tl.load(sinks + head, mask=head_in_group < GROUP, other=0.0) * LOG2E
        norm = norm + 1.0

    first_position = prefix + run * QUERIES
    last_position = tl.minimum(first_position + QUERIES, n) - 1
    end_tile = last_position // TILE + 1
    table_row = block_table + row * stride_table
    k_head = k_cache + kv_head * stride_k_head
    v_head = v_cache + kv_head * stride_v_head
    if HAS_WINDOW:
        masked_from = tl.maximum(first_position - window + 1, 0) // TILE
    else:
        # All queries see the tiles that end at or before the first query.
        masked_from = (first_position + 1) // TILE
        m, norm, acc = _fold_tiles(
            queries, k_head, v_head, table_row, stride_k_block, stride_k_slot, stride_v_block, stride_v_slot,
            0, masked_from, query_position, n, window, m, norm, acc, score_scale, cap,
            PAGE, TILE, DIM, DIM_PAD, E4M3_BITS, False, False, HAS_CAP, COMPUTE, PRECISION,
        )  # fmt: skip
    m, norm, acc = _fold_tiles(
        queries, k_head, v_head, table_row, stride_k_block, stride_k_slot, stride_v_block, stride_v_slot,
        masked_from, end_tile, query_position, n, window, m, norm, acc, score_scale, cap,
        PAGE, TILE, DIM, DIM_PAD, E4M3_BITS, True, HAS_WINDOW, HAS_CAP, COMPUTE, PRECISION,
    )  # fmt: skip

    inverse = v_scale / tl.where(norm > 0, norm, 1.0)
    out_at = token[:, None] * stride_out_token + head[:, None] * stride_out_head + dims[None, :]
    tl.store(out + out_at, (acc * inverse[:, None]).to(out.dtype.element_ty), mask=valid)


@dataclass(frozen=True)
class PrefillConfig:
    """Tuning of one launch: ``rows`` of queries x heads a program, ``tile`` tokens of KV at a time."""

    rows: int = 128
    tile: int = 64
    warps: int = 8
    stages: int = 3


def default_config(dtype: torch.dtype, head_dim: int, capability: tuple[int, int] | None) -> PrefillConfig:
    """The configuration for a query type, a head size and a CUDA capability (None: AMD or interpreter)."""
    if dtype == torch.float32:  # exact float32 dots take no tensor core; kept small so that they fit
        return PrefillConfig(rows=16, tile=16, warps=4, stages=2)
    if capability is None:
        return PrefillConfig(rows=64, tile=32, warps=4, stages=1)
    if capability[0] < 9:  # 64 tokens of KV or 128 rows of 256 spill registers there
        return PrefillConfig(rows=128 if head_dim <= 128 else 64, tile=32, stages=3 if head_dim <= 128 else 2)
    return PrefillConfig() if head_dim <= 128 else PrefillConfig(tile=32, stages=2)


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    max_query_len: int | None = None,
    out: Tensor | None = None,
    config: PrefillConfig | None = None,
    check: bool = True,
) -> Tensor:
    """A chunk of new tokens per sequence, causal, over its cached prefix, on a GPU.

    ``q [tokens, heads, head_dim]``: all chunks one behind the other, row ``b`` owning ``q[query_start[b] :
    query_start[b + 1]]`` (int32 ``[batch + 1]``, from 0 to ``tokens``). ``seq_lens[b]`` counts prefix plus
    chunk, and the chunk's K and V are already in the cache (`kvplan.kernels.cache_ops.write_kv`). Types,
    strides and the other arguments as in `kvplan.kernels.decode.paged_decode`.

    ``max_query_len`` (tokens; default: all of q in one chunk) bounds the grid and must not be less than the
    longest chunk. Returns ``out``, by default in q's type, ``[tokens, heads, head_dim]``.

    ``check`` verifies lengths, ids in use and ``query_start`` (waits for the device twice; not while a CUDA
    graph is captured). ValueError and IndexError as in `paged_decode`.
    """
    check_cache_shapes(q, k_cache, v_cache, block_table, seq_lens)
    _sms, capability = device_traits(q)
    check_types(
        q, k_cache, v_cache, block_table, seq_lens=seq_lens, sinks=sinks, out=out, query_start=query_start
    )
    tokens, heads, dim = q.shape
    check_extras(sinks, out, heads, (tokens, heads, dim))
    batch = seq_lens.shape[0]
    num_blocks, page, kv_heads, _ = k_cache.shape
    if v_cache.shape[3] != dim:
        raise ValueError(f"k_cache has head_dim {dim}, v_cache {v_cache.shape[3]}: they must be equal")
    if tuple(query_start.shape) != (batch + 1,) or query_start.dtype != torch.int32:
        raise ValueError(
            f"query_start must be int32 [{batch + 1}], found {query_start.dtype} {tuple(query_start.shape)}"
        )
    longest = tokens if max_query_len is None else max_query_len
    if check and not capturing(q):
        check_indices(block_table, seq_lens, num_blocks, page)
        check_query_start(query_start, seq_lens, tokens, longest)
    out = torch.empty_like(q) if out is None else out
    if batch == 0 or tokens == 0:
        return out

    config = config or default_config(q.dtype, dim, capability)
    k_stored, e4m3_bits = stored_as(k_cache, capability)
    v_stored, _ = stored_as(v_cache, capability)
    factor = E4M3_FACTOR if e4m3_bits else 1.0
    group = heads // kv_heads
    group_pad = triton.next_power_of_2(group)
    rows = max(config.rows, group_pad)
    _prefill_kernel[(triton.cdiv(longest, rows // group_pad), kv_heads, batch)](
        q,
        k_stored,
        v_stored,
        block_table,
        seq_lens,
        query_start,
        sinks,
        out,
        *q.stride()[:2],
        *k_stored.stride()[:3],
        *v_stored.stride()[:3],
        block_table.stride(0),
        *out.stride()[:2],
        (dim**-0.5 if scale is None else scale) * k_scale * factor * math.log2(math.e),
        soft_cap * math.log2(math.e),
        v_scale * factor,
        window,
        GROUP=group,
        GROUP_PAD=group_pad,
        ROWS=rows,
        PAGE=page,
        TILE=config.tile,
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        E4M3_BITS=e4m3_bits,
        HAS_WINDOW=window > 0,
        HAS_CAP=soft_cap > 0,
        HAS_SINKS=sinks is not None,
        COMPUTE=compute_type(q, k_cache),
        PRECISION=precision(q),
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out
