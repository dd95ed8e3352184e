"""Joining the parts of sequences whose decode was cut along the length."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvplan.kernels.attend import split_tiles


@triton.jit
def _combine_kernel(
    out,
    part_out,
    part_lse,
    seq_lens,
    part_start,
    stride_out_row,
    stride_out_head,
    window,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """One program a query head: the parts' outputs weighed by 2 ** (lse - max lse).

    Parts of row r: part_start[r] .. part_start[r + 1] - 1 where a work list says so, else the first of
    NUM_SPLITS that its length fills. A row of one part was written by its part and is left alone.
    """
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if part_start is None:
        n = tl.load(seq_lens + row)
        _low, _first_tile, _tiles, parts = split_tiles(n, window, NUM_SPLITS, TILE, MIN_TILES)
        first = row * NUM_SPLITS
    else:
        first = tl.load(part_start + row).to(tl.int64)
        parts = (tl.load(part_start + row + 1) - first).to(tl.int32)
    if parts <= 1:
        return
    dims = tl.arange(0, DIM_PAD)
    top = float("-inf")
    for part in range(0, parts):
        top = tl.maximum(top, tl.load(part_lse + (first + part) * HEADS + head))
    total = 0.0
    acc = tl.zeros([DIM_PAD], tl.float32)
    for part in range(0, parts):
        at = (first + part) * HEADS + head
        weight = tl.exp2(tl.load(part_lse + at) - top)
        acc += weight * tl.load(part_out + at * DIM + dims, mask=dims < DIM, other=0.0)
        total += weight
    place = out + row * stride_out_row + head * stride_out_head + dims
    tl.store(place, (acc / total).to(out.dtype.element_ty), mask=dims < DIM)


def new_parts(like: Tensor, parts: int, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """Room for parts: outputs float32 ``[parts, heads, dim]``, base-2 log-sum-exps ``[parts, heads]``."""
    part_out = torch.empty((parts, heads, dim), dtype=torch.float32, device=like.device)
    return part_out, torch.empty((parts, heads), dtype=torch.float32, device=like.device)


def combine(
    out: Tensor,
    part_out: Tensor,
    part_lse: Tensor,
    seq_lens: Tensor,
    *,
    part_start: Tensor | None = None,
    window: int = 0,
    num_splits: int = 1,
    tile: int = 1,
    min_tiles: int = 1,
) -> None:
    """Write the joined parts of every row that has more than one to ``out [batch, heads, dim]``."""
    batch, heads, dim = out.shape
    _combine_kernel[(heads, batch)](
        out,
        part_out,
        part_lse,
        seq_lens,
        part_start,
        *out.stride()[:2],
        window,
        HEADS=heads,
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        NUM_SPLITS=num_splits,
        TILE=tile,
        MIN_TILES=min_tiles,
        num_warps=2,
    )
