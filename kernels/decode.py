"""Paged decode on a GPU (Triton): one new token per sequence against its cached tokens.

One program takes one KV head of one part of one sequence, with all query heads of that group packed into the
rows of one tensor-core tile. A sequence that needs one part writes its output directly; others leave
parts with their log-sum-exp for `kvplan.kernels.combine`. The grid depends on shapes only, never on lengths,
so a CUDA graph captured once stays right.

Importing this module needs torch and triton. With ``TRITON_INTERPRET=1`` set before the import it runs on CPU
tensors, slowly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvplan.kernels.attend import decode_part, split_tiles
from kvplan.kernels.checks import check_cache_shapes, check_extras, check_indices
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
from kvplan.kernels.splits import MIN_PART_TOKENS, WorkPlan, choose_num_splits


@triton.jit
def _decode_kernel(
    seq_lens,
    window,
    q,
    k_cache,
    v_cache,
    block_table,
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
    NUM_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SWAP_AB: tl.constexpr,
    E4M3_BITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (kv_heads, NUM_SPLITS, batch); splits that a row's length does not fill return at once."""
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    n = tl.load(seq_lens + row)
    low, first_tile, part_tiles, parts = split_tiles(n, window, NUM_SPLITS, TILE, MIN_TILES)
    if (split > 0) & (split >= parts):
        return
    first = first_tile + split * part_tiles
    decode_part(
        row,
        tl.program_id(0),
        first,
        low,
        tl.minimum((first + part_tiles) * TILE, n),
        split == 0,
        tl.where(parts <= 1, -1, row * NUM_SPLITS + split),
        q,
        k_cache,
        v_cache,
        block_table,
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
        KV_HEADS,
        GROUP,
        ROWS,
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


@triton.jit
def _work_kernel(
    seq_lens,
    window,
    work,
    q,
    k_cache,
    v_cache,
    block_table,
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
    WORKERS: tl.constexpr,
    BATCH: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SWAP_AB: tl.constexpr,
    E4M3_BITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (kv_heads, WORKERS); each program works off its items of a `kvplan.kernels.splits.WorkPlan`."""
    worker = tl.program_id(1)
    for item in range(tl.load(work + worker), tl.load(work + worker + 1)):
        entry = work + WORKERS + 1 + BATCH + 1 + item * 4
        row = tl.load(entry).to(tl.int64)
        first = tl.load(entry + 1)
        n = tl.load(seq_lens + row)
        low = tl.where(window > 0, tl.maximum(n - window, 0), 0)
        decode_part(
            row,
            tl.program_id(0),
            first,
            low,
            tl.minimum(tl.load(entry + 2) * TILE, n),
            first == low // TILE,
            tl.load(entry + 3).to(tl.int64),
            q,
            k_cache,
            v_cache,
            block_table,
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
            KV_HEADS,
            GROUP,
            ROWS,
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


@dataclass(frozen=True)
class DecodeConfig:
    """Tuning of one launch: ``tile`` in tokens, whatever the block size; ``stages - 1`` tiles in flight."""

    tile: int = 64
    warps: int = 4
    stages: int = 3
    swap_ab: bool = False


def default_config(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, capability: tuple[int, int] | None
) -> DecodeConfig:
    """The configuration for query and cache types, a head size and a CUDA capability (None: not CUDA).

    Chosen so that two programs fit on an SM with at least two tiles of each in flight (`make kernels-check`
    prints registers and shared memory): what hides memory latency is bytes in flight on the SM, and two
    programs also cover one another's softmax.
    """
    if dtype == torch.float32:  # exact float32 dots take no tensor core; kept small so that they fit
        return DecodeConfig(tile=16, warps=4, stages=2)
    if capability is None:
        return DecodeConfig(tile=32, warps=4, stages=2)
    if head_dim > 128:
        return DecodeConfig(tile=32, warps=4, stages=3)
    # float8 is converted in registers, which feeds the plain form; wgmma would take it back to shared memory.
    swap_ab = capability[0] == 9 and kv_dtype == dtype
    return DecodeConfig(
        tile=64, warps=4, stages=4 if head_dim <= 64 or kv_dtype != dtype else 3, swap_ab=swap_ab
    )


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
    plan: WorkPlan | None = None,
    plan_tensor: Tensor | None = None,
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
    the table could hold). A fixed number makes the result independent of the batch. For skewed lengths give
    ``plan`` instead, made once a step by `kvplan.kernels.splits.plan_work` from lengths on the host;
    ``plan_tensor`` is its ``packed`` on the device (default: copied at each call; a CUDA graph needs one
    fixed tensor, refilled before replay). ``out``: where to write, any float type. Returns ``out``, by
    default in q's type, ``[batch, heads, head_dim]``.

    ``check`` verifies every length and block id in use on the device, which waits for the device once;
    serving checks once a step and passes False for its layers. Left out while a CUDA graph is captured.
    Raises ValueError for shapes, types or strides that do not fit, IndexError for a bad length or id.
    """
    check_cache_shapes(q, k_cache, v_cache, block_table, seq_lens)
    sms, capability = device_traits(q)
    batch, heads, dim = q.shape
    num_blocks, page, kv_heads, _ = k_cache.shape
    check_types(
        q, k_cache, v_cache, block_table, seq_lens=seq_lens, sinks=sinks, out=out, plan_tensor=plan_tensor
    )
    check_extras(sinks, out, heads, (batch, heads, dim))
    if v_cache.shape[3] != dim:
        raise ValueError(
            f"k_cache has head_dim {dim}, v_cache {v_cache.shape[3]}; see mla_decode for unequal ones"
        )
    if check and not capturing(q):
        check_indices(block_table, seq_lens, num_blocks, page)
    out = torch.empty_like(q) if out is None else out
    if batch == 0:
        return out

    config = config or default_config(q.dtype, k_cache.dtype, dim, capability)
    if plan is not None:
        if (plan.batch, plan.kv_heads, plan.window) != (batch, kv_heads, window):
            raise ValueError(
                f"plan is for {plan.batch} rows, {plan.kv_heads} KV heads, window {plan.window}; "
                f"found {batch}, {kv_heads}, {window}"
            )
        if plan_tensor is not None and (
            plan_tensor.dtype != torch.int32 or tuple(plan_tensor.shape) != plan.packed.shape
        ):
            raise ValueError(
                f"plan_tensor must be int32 {list(plan.packed.shape)} like plan.packed, found "
                f"{plan_tensor.dtype} {list(plan_tensor.shape)}"
            )
        config = replace(config, tile=plan.tile)
        plan_tensor = torch.from_numpy(plan.packed).to(q.device) if plan_tensor is None else plan_tensor
        splits, parts = 1, plan.capacity
    else:
        longest = block_table.shape[1] * page if max_seq_len is None else max_seq_len
        if window > 0:
            longest = min(longest, window)
        splits = choose_num_splits(batch, kv_heads, longest, sms) if num_splits is None else num_splits
        parts = batch * splits if splits > 1 else 0
    part_out, part_lse = new_parts(q, parts, heads, dim)
    k_stored, e4m3_bits = stored_as(k_cache, capability)
    v_stored, _ = stored_as(v_cache, capability)
    factor = E4M3_FACTOR if e4m3_bits else 1.0
    group = heads // kv_heads
    args = (
        q,
        k_stored,
        v_stored,
        block_table,
        sinks,
        out,
        part_out,
        part_lse,
        *q.stride()[:2],
        *k_stored.stride()[:3],
        *v_stored.stride()[:3],
        block_table.stride(0),
        *out.stride()[:2],
        (dim**-0.5 if scale is None else scale) * k_scale * factor * math.log2(math.e),
        soft_cap * math.log2(math.e),
        v_scale * factor,
    )
    constants = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "ROWS": max(16, triton.next_power_of_2(group)),
        "PAGE": page,
        "TILE": config.tile,
        "DIM": dim,
        "DIM_PAD": triton.next_power_of_2(dim),
        "SWAP_AB": config.swap_ab,
        "E4M3_BITS": e4m3_bits,
        "HAS_WINDOW": window > 0,
        "HAS_CAP": soft_cap > 0,
        "COMPUTE": compute_type(q, k_cache),
        "PRECISION": precision(q),
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
    if plan is not None and plan_tensor is not None:
        _work_kernel[(kv_heads, plan.workers)](
            seq_lens, window, plan_tensor, *args, WORKERS=plan.workers, BATCH=batch, **constants
        )
        part_start = plan_tensor[plan.workers + 1 : plan.workers + 2 + batch]
        combine(out, part_out, part_lse, seq_lens, part_start=part_start)
        return out
    min_tiles = max(1, MIN_PART_TOKENS // config.tile)
    _decode_kernel[(kv_heads, splits, batch)](
        seq_lens, window, *args, NUM_SPLITS=splits, MIN_TILES=min_tiles, **constants
    )
    if splits > 1:
        combine(
            out,
            part_out,
            part_lse,
            seq_lens,
            window=window,
            num_splits=splits,
            tile=config.tile,
            min_tiles=min_tiles,
        )
    return out
