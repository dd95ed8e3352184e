"""The Triton decode kernel in the interpreter against the float64 reference, all else poisoned."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="kernel tests need torch, which is absent here (extra: bench)")
pytest.importorskip("triton", reason="kernel tests need triton, which is absent here (extra: bench)")

import torch
from kernel_cases import TOLERANCE, make_case, relative_error

from kvplan.kernels import decode, reference

SMALL = decode.DecodeConfig(tile=32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_uneven_and_zero_lengths(block_size: int, group: int, dtype: torch.dtype) -> None:
    """Given lengths 0, 1, 31, 70, expected: the reference; zeros, not NaN, for the empty row."""
    case = make_case(lens=[31, 0, 70, 1], block_size=block_size, group=group, dtype=dtype)
    found = decode.paged_decode(*case.inputs(), num_splits=1, config=SMALL)
    assert found.dtype == dtype
    assert not found[1].any()
    assert relative_error(found, reference.paged_decode(*case.inputs())) < TOLERANCE[dtype]
