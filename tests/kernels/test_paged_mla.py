"""The Triton MLA decode kernel in the interpreter against the float64 reference, all else poisoned."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="kernel tests need torch, which is absent here (extra: bench)")
pytest.importorskip("triton", reason="kernel tests need triton, which is absent here (extra: bench)")

import torch
from kernel_cases import TOLERANCE, make_case, relative_error

from kvplan.kernels import mla, reference


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("block_size", "splits"), [(1, 1), (16, 4), (64, 4)])
@pytest.mark.parametrize("heads", [16, 20])
def test_uneven_and_zero_lengths(heads: int, block_size: int, splits: int, dtype: torch.dtype) -> None:
    """Given lengths 0, 1 and around parts, heads that do and do not fill a tile, expected: the reference."""
    lens = [33, 0, 150, 1]
    case = make_case(lens=lens, block_size=block_size, kv_heads=1, group=heads, dim=80, dtype=dtype)
    cache = case.k[:, :, 0]
    inputs = (case.q, cache, case.table, case.lens)
    out = torch.full((4, heads, 64), float("nan"))
    found = mla.mla_decode(*inputs, scale=0.2, latent_dim=64, num_splits=splits, out=out)
    assert not found[1].any()
    expected = reference.mla_decode(*inputs, scale=0.2, latent_dim=64)
    assert relative_error(found, expected) < TOLERANCE[dtype]


def test_deepseek_shape_and_float8() -> None:
    """Given 576 = 512 + 64 and a float8 cache with a scale, expected: the reference on the stored numbers."""
    case = make_case(
        lens=[40, 17], block_size=64, kv_heads=1, group=16, dim=576, kv_dtype=torch.float8_e4m3fn
    )
    cache = case.k[:, :, 0]
    found = mla.mla_decode(case.q, cache, case.table, case.lens, scale=0.1, kv_scale=0.5)
    true_cache = cache.double() * 0.5
    expected = reference.mla_decode(case.q, true_cache, case.table, case.lens, scale=0.1)
    assert relative_error(found, expected) < TOLERANCE[torch.float32]


def test_errors() -> None:
    """Given sizes that do not fit and a bad id in use, expected: errors that name them."""
    case = make_case(lens=[40, 17], block_size=16, kv_heads=1, group=16, dim=80)
    cache = case.k[:, :, 0]
    with pytest.raises(ValueError, match="rope size must be a power of two from 16 on, found 48"):
        mla.mla_decode(case.q, cache, case.table, case.lens, scale=1.0, latent_dim=32)
    with pytest.raises(ValueError, match=r"kv_cache \[num_blocks, block_size, dim\], found"):
        mla.mla_decode(case.q[..., :64], cache, case.table, case.lens, scale=1.0, latent_dim=32)
    case.table[1, 1] = -3
    with pytest.raises(IndexError, match=r"block_table\[1, 1\] is -3"):
        mla.mla_decode(case.q, cache, case.table, case.lens, scale=1.0, latent_dim=64)
