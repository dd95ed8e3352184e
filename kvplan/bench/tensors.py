"""The tensors of a cell, laid out so that a kernel which reads what it must not read is found out.

NaN fills unused slots of a sequence's last block and every block that no sequence owns; the block table holds
an id far outside the pool behind each sequence's end. The first and the last token of a row carry a quarter
of the softmax each, with a value of the size of the output, so that losing one token at an edge shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvplan.bench.cells import Shape

INVALID_BLOCK = 2**31 - 1
SPARE_BLOCKS = 4  # free blocks in the pool at least
SPARE_COLUMNS = 3  # of the block table behind the longest row's end
# Relative error allowed on one head's output vector, from the arithmetic in which q and P are rounded:
# fp32 sums reach 8e-7 and fp16 1.2e-4, bf16 2.2e-3 over a whole output; the worst head is a few times that.
TOLERANCES = {"float32": 1e-5, "float16": 1.5e-3, "bfloat16": 1.2e-2}


@dataclass(frozen=True)
class Tokens:
    """K and V of all sequences, one behind the other, before any layout: ``[tokens, kv_heads, head_dim]``."""

    shape: Shape
    lens: tuple[int, ...]
    q: Tensor  # [batch, heads, head_dim]
    k: Tensor
    v: Tensor

    @property
    def longest(self) -> int:
        return max(self.lens)

    def positions(self) -> tuple[Tensor, Tensor]:
        """Row and position within the row of every token, int64 ``[tokens]`` each."""
        device = self.q.device
        lens = torch.tensor(self.lens, device=device)
        row = torch.repeat_interleave(torch.arange(len(self.lens), device=device), lens)
        start = torch.cumsum(lens, 0) - lens
        return row, torch.arange(int(lens.sum()), device=device) - start[row]


@dataclass(frozen=True)
class Paged:
    """A decode step over blocks, as `kvplan.kernels.reference` defines the arguments."""

    tokens: Tokens
    block_size: int
    k_cache: Tensor  # [num_blocks, block_size, kv_heads, head_dim]
    v_cache: Tensor
    block_table: Tensor  # int32 [batch, max_blocks + SPARE_COLUMNS], INVALID_BLOCK behind each row's end
    seq_lens: Tensor  # int32 [batch]
    free_block: int  # a block that no row owns

    @property
    def q(self) -> Tensor:
        return self.tokens.q

    def readable_table(self) -> Tensor:
        """The table for code that reads it behind a row's end: a free block (of NaN) instead of nonsense."""
        return torch.where(self.block_table == INVALID_BLOCK, self.free_block, self.block_table)

    def copy(self) -> Paged:
        """The same step on K and V of its own."""
        return replace(self, k_cache=self.k_cache.clone(), v_cache=self.v_cache.clone())


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of one of `cells.DTYPE_BYTES`."""
    return getattr(torch, name)


def as_bytes(values: Tensor) -> Tensor:
    """One-byte types as plain bytes: torch indexes no float8."""
    return values.view(torch.uint8) if values.element_size() == 1 else values


def make_tokens(shape: Shape, device: str, lens: Sequence[int] | None = None) -> Tokens:
    """Random q, K and V by the shape's seed, K and V rounded to the stored type.

    ``lens`` (``[batch]``, 0 allowed) in place of the shape's own lengths.
    """
    lens = shape.seq_lens() if lens is None else list(lens)
    generator = torch.Generator(device=device).manual_seed(shape.seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=torch.float32)

    group = shape.heads // shape.kv_heads
    q = draw(shape.batch_size, shape.heads, shape.head_dim)
    stored = torch_dtype(shape.kv_dtype)
    k = _draw_stored(draw, sum(lens), shape, stored)
    v = _draw_stored(draw, sum(lens), shape, stored)
    # Make the edge tokens count: k along the group's mean query so that their score is about log(n).
    counts = torch.tensor(lens, device=device)
    ends = torch.cumsum(counts, 0)
    filled = counts > 0
    direction = q.reshape(shape.batch_size, shape.kv_heads, group, shape.head_dim).mean(2)[filled]
    n = counts[filled].float()[:, None, None]
    strength = group * torch.log(n + 1) / math.sqrt(shape.head_dim)
    for edge in ((ends - counts)[filled], ends[filled] - 1):
        as_bytes(k)[edge] = as_bytes((direction * strength).to(stored))
        as_bytes(v)[edge] = as_bytes((draw(*direction.shape) / torch.sqrt(n)).to(stored))
    return Tokens(shape, tuple(lens), q.to(torch_dtype(shape.dtype)), k, v)


def _draw_stored(draw: Any, count: int, shape: Shape, stored: torch.dtype) -> Tensor:
    """Draw in slices: a cell of many GiB must not need its float32 form whole as well."""
    out = torch.empty(count, shape.kv_heads, shape.head_dim, dtype=stored, device=draw(1).device)
    step = max(1, (64 << 20) // (shape.kv_heads * shape.head_dim))
    for first in range(0, count, step):
        size = min(step, count - first)
        out[first : first + size] = draw(size, shape.kv_heads, shape.head_dim).to(stored)
    return out


def make_paged(tokens: Tokens, block_size: int, table: str) -> Paged:
    """Lay ``tokens`` out in blocks; ``table`` is "random" (any order in the pool) or "contiguous"."""
    device = tokens.q.device
    blocks = [-(-n // block_size) for n in tokens.lens]
    owned = sum(blocks)
    num_blocks = owned + SPARE_BLOCKS
    if table == "random":
        generator = torch.Generator().manual_seed(tokens.shape.seed + 1)
        order = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    else:
        order = torch.arange(num_blocks, dtype=torch.int32)
    block_table = torch.full((len(blocks), max(blocks) + SPARE_COLUMNS), INVALID_BLOCK, dtype=torch.int32)
    first = 0
    for i, count in enumerate(blocks):
        block_table[i, :count] = order[first : first + count]
        first += count
    block_table = block_table.to(device)

    row, position = tokens.positions()
    slot = block_table[row, position // block_size].long() * block_size + position % block_size
    caches = []
    for values in (tokens.k, tokens.v):
        cache = torch.full(
            (num_blocks * block_size, *values.shape[1:]), math.nan, dtype=values.dtype, device=device
        )
        as_bytes(cache)[slot] = as_bytes(values)
        caches.append(cache.view(num_blocks, block_size, *values.shape[1:]))
    lens = torch.tensor(tokens.lens, dtype=torch.int32, device=device)
    return Paged(tokens, block_size, caches[0], caches[1], block_table, lens, int(order[owned]))


def make_padded(tokens: Tokens) -> tuple[Tensor, Tensor, Tensor | None]:
    """Contiguous K and V ``[batch, kv_heads, longest, head_dim]`` in the compute type, and a mask or None.

    Padding is zero, not NaN: PyTorch's attention multiplies masked positions by zero. The mask is bool
    ``[batch, 1, 1, longest]``, True where a token is.
    """
    shape = tokens.shape
    compute = torch_dtype(shape.dtype)
    equal = min(tokens.lens) == tokens.longest
    padded = []
    for values in (tokens.k, tokens.v):
        if equal:
            by_row = values.view(shape.batch_size, tokens.longest, shape.kv_heads, shape.head_dim)
        else:
            row, position = tokens.positions()
            size = (shape.batch_size, tokens.longest, shape.kv_heads, shape.head_dim)
            by_row = torch.zeros(size, dtype=values.dtype, device=values.device)
            as_bytes(by_row)[row, position] = as_bytes(values)
        padded.append(by_row.transpose(1, 2).to(compute).contiguous())
    mask = None
    if not equal:
        lens = torch.tensor(tokens.lens, device=tokens.q.device)
        mask = (torch.arange(tokens.longest, device=lens.device) < lens[:, None])[:, None, None, :]
    return padded[0], padded[1], mask


def expected_output(tokens: Tokens) -> Tensor:
    """Attention by its definition in float64 ``[batch, heads, head_dim]``, from the tokens before any layout,
    so that a fault of a layout shows as well as one of a kernel."""
    from kvplan.kernels.reference import attend

    out, first = [], 0
    for row, n in enumerate(tokens.lens):
        k, v = (values[first : first + n].double() for values in (tokens.k, tokens.v))
        scale = tokens.shape.head_dim**-0.5
        out.append(attend(tokens.q[row].double(), k, v, scale=scale, soft_cap=0.0, sinks=None))
        first += n
    return torch.stack(out)


def worst_error(out: Tensor, expected: Tensor) -> float:
    """The largest relative L2 error over (row, head) vectors; infinite for NaN, a wrong shape or a row of
    zeros that is not zero."""
    if tuple(out.shape) != tuple(expected.shape):
        return math.inf
    difference = (out.double() - expected.double()).norm(dim=-1)
    size = expected.double().norm(dim=-1)
    relative = torch.where(size > 0, difference / size.clamp_min(1e-300), difference * math.inf)
    relative = torch.where((size == 0) & (difference == 0), torch.zeros_like(relative), relative)
    worst = float(relative.max()) if relative.numel() else 0.0
    return worst if math.isfinite(worst) else math.inf
