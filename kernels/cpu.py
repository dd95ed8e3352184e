"""Paged decode on CPU cores (numba): the backend where there is no GPU. Its figures are CPU figures.

Order of work, for memory's sake: a tile of tokens is read front to back for *all* KV heads before the online
softmax, because in NHD memory one token's heads lie side by side. Work is cut along sequences and lengths so
that every core streams its own part; parts of one sequence are merged by their maxima and sums.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numba import njit

from kvplan.kernels.checks import check_cache_shapes, check_extras, check_indices
from kvplan.kernels.cpu_simd import E4M3_FACTOR, KINDS, LANES, SOURCE_STAMP, add_rows, dot_rows, exp2_below

TILE_TOKENS = 16
LOG2E = math.log2(math.e)


@cache
def _part_kernel(kind: int, groups: int) -> Callable[..., None]:
    """Compile the loop over one part of one sequence for a stored type and a register tile."""
    tokens = LANES // groups
    tile = TILE_TOKENS
    padded_tile = TILE_TOKENS + LANES
    stamp = SOURCE_STAMP

    @njit(nogil=True, cache=True)
    def run_part(
        q,
        k_address,
        v_address,
        strides,
        table,
        start,
        end,
        block_size,
        kv_heads,
        group,
        soft_cap,
        acc,
        m,
        norm,
    ):
        """Attend q [heads, dim] (pre-scaled to base 2) to tokens start..end-1; fill acc, m, norm."""
        heads, dim = q.shape
        chunks = dim // LANES
        assert stamp >= 0  # names the intrinsics' source in the disk cache's key
        scores = np.empty((heads, padded_tile), np.float32)
        k_rows = np.empty(2 * padded_tile, np.int64)
        v_rows = np.empty(2 * padded_tile, np.int64)
        k_block, k_slot, k_head, v_block, v_slot, v_head = strides
        q_at, acc_at, scores_at = q.ctypes.data, acc.ctypes.data, scores.ctypes.data
        k_rows_at, v_rows_at = k_rows.ctypes.data, v_rows.ctypes.data
        for first in range(start, end, tile):
            count = min(tile, end - first)
            padded = (count + tokens - 1) // tokens * tokens
            for i in range(padded + tile):
                # Padding repeats the last valid token, so that no unowned slot is ever read.
                position = min(first + i, end - 1)
                if i < padded:
                    position = min(position, first + count - 1)
                block = np.int64(table[position // block_size])
                slot = position % block_size
                k_rows[i] = k_address + block * k_block + slot * k_slot
                v_rows[i] = v_address + block * v_block + slot * v_slot
            for i in range(0, padded, tokens):
                for kv_head in range(kv_heads):
                    for g in range(0, group, groups):
                        head = kv_head * group + g
                        dot_rows(
                            kind,
                            groups,
                            tokens,
                            tile,
                            q_at + head * dim * 4,
                            k_rows_at + 8 * i,
                            kv_head * k_head,
                            scores_at + 4 * (head * padded_tile + i),
                            padded_tile,
                            chunks,
                        )
            wide = (count + LANES - 1) // LANES
            for head in range(heads):
                top = m[head]
                for i in range(count):
                    if soft_cap > 0:
                        scores[head, i] = soft_cap * math.tanh(scores[head, i] / soft_cap)
                    top = max(top, scores[head, i])
                for i in range(count, wide * LANES):
                    scores[head, i] = -np.inf
                total = exp2_below(scores_at + 4 * head * padded_tile, top, wide)
                for i in range(count, padded):
                    scores[head, i] = 0.0
                if top > m[head]:
                    shrink = np.float32(2.0) ** (m[head] - top)
                    norm[head] *= shrink
                    for d in range(dim):
                        acc[head, d] *= shrink
                    m[head] = top
                norm[head] += total
            for i in range(0, padded, tokens):
                for kv_head in range(kv_heads):
                    for g in range(0, group, groups):
                        head = kv_head * group + g
                        add_rows(
                            kind,
                            groups,
                            tokens,
                            tile,
                            acc_at + head * dim * 4,
                            v_rows_at + 8 * i,
                            kv_head * v_head,
                            scores_at + 4 * (head * padded_tile + i),
                            padded_tile,
                            chunks,
                        )

    return run_part


@njit(nogil=True, cache=True)
def _merge(part_start, acc, m, norm, sinks, v_scale, out):
    """Join each sequence's parts: weigh them by 2 ** (m - max m); the sink is a part without a value."""
    heads, dim = out.shape[1:]
    for row in range(out.shape[0]):
        for head in range(heads):
            top = np.float32(-np.inf)
            for part in range(part_start[row], part_start[row + 1]):
                top = max(top, m[part, head])
            if part_start[row] == part_start[row + 1]:
                out[row, head] = 0.0
                continue
            total = np.float32(0.0)
            if sinks.size > 0:
                top = max(top, sinks[head])
                total = np.float32(2.0) ** (sinks[head] - top)
            row_sum = np.zeros(dim, np.float32)
            for part in range(part_start[row], part_start[row + 1]):
                weight = np.float32(2.0) ** (m[part, head] - top)
                total += weight * norm[part, head]
                for d in range(dim):
                    row_sum[d] += weight * acc[part, head, d]
            for d in range(dim):
                out[row, head, d] = row_sum[d] * (v_scale / total)


def thread_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="paged-decode")


def _as_numpy(array: Any) -> tuple[np.ndarray, str]:
    """A numpy view of a CPU array or tensor, and the name of its stored type; bits where numpy lacks it."""
    name = str(array.dtype).removeprefix("torch.")
    if isinstance(array, np.ndarray):
        return array, name
    if array.device.type != "cpu":
        raise ValueError(f"the CPU backend needs CPU tensors, found one on {array.device}")
    array = array.detach()
    if name == "bfloat16" or name.startswith("float8"):
        import torch

        return array.view(torch.int16 if name == "bfloat16" else torch.uint8).numpy(), name
    return array.numpy(), name


def paged_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    scale: float | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Any = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    threads: int | None = None,
) -> np.ndarray:
    """One new token per sequence against its cached tokens, on CPU cores.

    Arguments as `kvplan.kernels.reference.paged_decode`, as numpy arrays or CPU tensors: ``q [batch, heads,
    head_dim]``; caches ``[num_blocks, block_size, kv_heads, head_dim]`` in float32, float16, bfloat16,
    float8_e4m3fn or float8_e5m2, any strides but 1 along ``head_dim``; ``head_dim`` a multiple of 8;
    ``block_table`` int32 ``[batch, max_blocks]``, ``seq_lens`` int32 ``[batch]``. Sums are float32.
    ``threads``: cores to use, all by default. Returns float32 numpy ``[batch, heads, head_dim]``.

    Raises ValueError for shapes or types that do not fit, IndexError for a length or a block id in use that
    points outside the table or the cache. A finite score is expected: infinities stored as float8 e4m3 do
    not exist, its NaN reads as 480.
    """
    check_cache_shapes(q, k_cache, v_cache, block_table, seq_lens)
    check_extras(sinks, None, q.shape[1], ())
    k, k_type = _as_numpy(k_cache)
    v, v_type = _as_numpy(v_cache)
    if k_type != v_type or k_type not in KINDS:
        raise ValueError(f"caches must share one type of {', '.join(KINDS)}; found {k_type} and {v_type}")
    kind, item_bytes = KINDS[k_type]
    batch, heads, dim = q.shape
    if dim % LANES or v.shape[3] != dim:
        raise ValueError(
            f"head_dim of K and V must be equal and a multiple of {LANES}, found {k.shape[3]}, {v.shape[3]}"
        )
    if k.strides[3] != item_bytes or v.strides[3] != item_bytes:
        raise ValueError("caches must be contiguous along head_dim")
    table, lens = _as_numpy(block_table)[0], _as_numpy(seq_lens)[0]
    num_blocks, block_size, kv_heads, _ = k.shape
    check_indices(table, lens, num_blocks, block_size)

    stored = E4M3_FACTOR if k_type == "float8_e4m3fn" else 1.0
    scale = dim**-0.5 if scale is None else scale
    raw_q = _as_numpy(q if isinstance(q, np.ndarray) else q.float())[0]
    scaled_q = np.ascontiguousarray(raw_q, np.float32) * np.float32(scale * k_scale * stored * LOG2E)
    threads = threads or thread_count()

    starts = np.maximum(lens - window, 0) if window > 0 else np.zeros_like(lens)
    tokens = int((lens - starts).sum())
    # About four parts a thread, so that a thread which is late delays the end by little.
    chunk = max(4 * TILE_TOKENS, -(-tokens // (4 * threads * TILE_TOKENS)) * TILE_TOKENS)
    parts, part_start = [], np.zeros(batch + 1, np.int64)
    for row in range(batch):
        for first in range(int(starts[row]), int(lens[row]), chunk):
            parts.append((row, first, min(first + chunk, int(lens[row]))))
        part_start[row + 1] = len(parts)
    acc = np.zeros((len(parts), heads, dim), np.float32)
    m = np.full((len(parts), heads), -np.inf, np.float32)
    norm = np.zeros((len(parts), heads), np.float32)

    group = heads // kv_heads
    run_part = _part_kernel(kind, 4 if group % 4 == 0 else 2 if group % 2 == 0 else 1)
    strides = tuple(int(s) for s in (*k.strides[:3], *v.strides[:3]))

    def work(index: int) -> None:
        row, first, last = parts[index]
        run_part(
            scaled_q[row],
            k.ctypes.data,
            v.ctypes.data,
            strides,
            table[row],
            first,
            last,
            block_size,
            kv_heads,
            group,
            np.float32(soft_cap * LOG2E),
            acc[index],
            m[index],
            norm[index],
        )

    if threads == 1 or len(parts) == 1:
        for index in range(len(parts)):
            work(index)
    else:
        list(_pool(threads).map(work, range(len(parts))))
    out = np.empty((batch, heads, dim), np.float32)
    no_sinks = np.empty(0, np.float32)
    sink_logits = no_sinks if sinks is None else _as_numpy(sinks)[0].astype(np.float32) * np.float32(LOG2E)
    _merge(part_start, acc, m, norm, sink_logits, np.float32(v_scale * stored), out)
    return out
