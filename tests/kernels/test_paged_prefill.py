"""The Triton prefill kernel in the interpreter against the float64 reference, all else poisoned."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="kernel tests need torch, which is absent here (extra: bench)")
pytest.importorskip("triton", reason="kernel tests need triton, which is absent here (extra: bench)")

import torch
from kernel_cases import TOLERANCE, Case, make_case, relative_error

from kvplan.kernels import prefill, reference

SMALL = prefill.PrefillConfig(rows=32, tile=32)
CHUNKS = [20, 0, 1, 33]  # new tokens of sequences of 20 (all new), 7, 65 and 70 tokens


def chunks_of(case: Case, counts: list[int], seed: int = 1) -> tuple[Any, ...]:
    """Prefill's inputs: the case's cache and one chunk of random queries a sequence."""
    start = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn((sum(counts), *case.q.shape[1:]), generator=generator).to(case.q.dtype)
    return q, case.k, case.v, case.table, case.lens, start


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(("block_size", "group"), [(1, 4), (16, 1), (16, 3), (64, 8)])
def test_chunks_over_prefixes(block_size: int, group: int, dtype: torch.dtype) -> None:
    """Given chunks with and without a prefix, one token and none, expected: the reference."""
    case = make_case(
        lens=[20, 7, 65, 70], block_size=block_size, kv_heads=1, group=group, dtype=dtype, dim=32
    )
    inputs = chunks_of(case, CHUNKS)
    found = prefill.paged_prefill(*inputs, config=SMALL)
    assert found.dtype == dtype
    assert relative_error(found, reference.paged_prefill(*inputs)) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "options",
    [{"window": 9}, {"window": 40, "soft_cap": 2.0}, {"sinks": True}, {"k_scale": 0.5, "v_scale": 2.0}],
    ids=str,
)
@pytest.mark.parametrize("kv", ["float32", "float8_e4m3fn", "float8_e5m2"])
def test_options(options: dict[str, Any], kv: str) -> None:
    """Given windows shorter and longer than a tile, caps, sinks, scales, float8, expected: the reference."""
    case = make_case(
        lens=[20, 7, 65, 70], block_size=16, kv_heads=1, kv_dtype=getattr(torch, kv), dim=32, hnd=True
    )
    if "sinks" in options:
        options = {"sinks": torch.linspace(-1, 3, 4)}
    inputs = chunks_of(case, CHUNKS)
    found = prefill.paged_prefill(*inputs, **options, config=SMALL, max_query_len=33)
    assert relative_error(found, reference.paged_prefill(*inputs, **options)) < TOLERANCE[torch.float32]


def test_head_dim_that_is_no_power_of_two() -> None:
    """Given head_dim 80 (Phi-2), expected: the reference; the padding of the tile is never stored."""
    case = make_case(lens=[20, 40], block_size=16, dim=80, dtype=torch.float16)
    inputs = chunks_of(case, [5, 9])
    found = prefill.paged_prefill(*inputs, config=SMALL)
    assert relative_error(found, reference.paged_prefill(*inputs)) < TOLERANCE[torch.float16]


@pytest.mark.parametrize(
    ("start", "error"),
    [
        ([0, 5, 13], r"query_start must rise from 0 to 14"),
        ([0, 15, 14], r"query_start must rise from 0 to 14"),
        ([0, 13, 14], r"row 0 has 13 new tokens, more than its length 12"),
    ],
)
def test_query_start_errors(start: list[int], error: str) -> None:
    """Given chunks that overrun q or their sequence, expected: IndexError that names them."""
    case = make_case(lens=[12, 40], block_size=16)
    inputs = (*chunks_of(case, [5, 9])[:5], torch.tensor(start, dtype=torch.int32))
    with pytest.raises(IndexError, match=error):
        prefill.paged_prefill(*inputs, config=SMALL)
