"""Inputs for paged attention in which everything that must not be read is poisoned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# An id behind a table's end: far outside any cache here, yet a valid int32.
INVALID_BLOCK = 2**30
# Largest relative L2 error against float64. float32: rounding of the sums. float16, bfloat16: rounding of the
# weights and the output to 11 bits. bfloat16 is computed in float32 by the interpreter (which multiplies its
# bit patterns otherwise) and tests take its output in float32 (its store truncates): float32's bound.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-4, torch.bfloat16: 2e-6}


@dataclass(frozen=True)
class Case:
    q: Tensor  # [batch, heads, dim]
    k: Tensor  # [num_blocks, block_size, kv_heads, dim]
    v: Tensor
    table: Tensor  # int32 [batch, max_blocks]
    lens: Tensor  # int32 [batch]

    def inputs(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.table, self.lens


def make_case(
    *,
    lens: list[int],
    block_size: int,
    kv_heads: int = 2,
    group: int = 4,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    shuffled: bool = True,
    hnd: bool = False,
    seed: int = 0,
) -> Case:
    """Random values where a sequence has tokens; NaN in every other slot and block; invalid ids elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-n // block_size) for n in lens]
    num_blocks = sum(blocks) + 3
    ids = torch.randperm(num_blocks, generator=generator) if shuffled else torch.arange(num_blocks)
    table = torch.full((len(lens), max(blocks) + 2), INVALID_BLOCK, dtype=torch.int32)
    shape = (num_blocks, block_size, kv_heads, dim)
    k, v = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
    taken = 0
    for row, (n, count) in enumerate(zip(lens, blocks, strict=True)):
        mine = ids[taken : taken + count]
        taken += count
        table[row, :count] = mine.int()
        for cache in (k, v):
            values = torch.randn((n, kv_heads, dim), generator=generator)
            position = torch.arange(n)
            cache[mine[position // block_size], position % block_size] = values
    stored = kv_dtype or dtype
    k, v = k.to(stored), v.to(stored)
    if hnd:
        k, v = as_hnd(k), as_hnd(v)
    q = torch.randn((len(lens), kv_heads * group, dim), generator=generator).to(dtype)
    return Case(q, k, v, table, torch.tensor(lens, dtype=torch.int32))


def as_hnd(cache: Tensor) -> Tensor:
    """The same tensor over memory in which the slots of one head lie side by side."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.element_size()]
    return cache.view(bits).permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3).view(cache.dtype)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Relative L2 error; NaN anywhere in ``found`` gives NaN, which no bound lets pass."""
    return float((found.double() - expected).norm() / expected.norm())
