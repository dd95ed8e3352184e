"""The CPU backend against the float64 reference, with everything that must not be read poisoned."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="kernel tests need torch, which is absent here (extra: bench)")

import numpy as np
import torch
from kernel_cases import make_case, relative_error

from kvplan.kernels import cpu, reference

# Sums are float32 whatever is stored: what is left is their rounding.
TOLERANCE = 2e-6


@pytest.mark.parametrize("block_size", [1, 16, 64, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_uneven_and_zero_lengths(block_size: int, group: int) -> None:
    """Given lengths 0, 1, around a block and 300, expected: the reference; zeros for the empty row."""
    lens = [0, 1, block_size - 1, block_size, block_size + 1, 300]
    case = make_case(lens=lens, block_size=block_size, group=group)
    found = torch.from_numpy(cpu.paged_decode(*case.inputs()))
    assert not found[0].any()
    assert relative_error(found, reference.paged_decode(*case.inputs())) < TOLERANCE


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_stored_types(name: str) -> None:
    """Given caches of every stored type with scales, expected: the reference on the same stored numbers."""
    case = make_case(lens=[70, 5], block_size=16, kv_dtype=getattr(torch, name))
    options = {"k_scale": 0.5, "v_scale": 3.0}
    found = torch.from_numpy(cpu.paged_decode(*case.inputs(), **options))
    assert relative_error(found, reference.paged_decode(*case.inputs(), **options)) < TOLERANCE


@pytest.mark.parametrize("options", [{"window": 40}, {"soft_cap": 2.0}, {"scale": 0.7}], ids=str)
def test_options(options: dict[str, float]) -> None:
    """Given a window, a soft cap or a scale, expected: the reference."""
    case = make_case(lens=[70, 40, 1, 200], block_size=16, hnd=True)
    found = torch.from_numpy(cpu.paged_decode(*case.inputs(), **options))
    assert relative_error(found, reference.paged_decode(*case.inputs(), **options)) < TOLERANCE


def test_sinks_and_many_parts() -> None:
    """Given sinks and one sequence long enough for many parts, expected: the reference, on 1 to 3 threads."""
    case = make_case(lens=[1500, 0, 3], block_size=16)
    sinks = torch.linspace(-2, 6, 8)
    expected = reference.paged_decode(*case.inputs(), sinks=sinks)
    for threads in (1, 2, 3):
        found = torch.from_numpy(cpu.paged_decode(*case.inputs(), sinks=sinks, threads=threads))
        assert relative_error(found, expected) < TOLERANCE


def test_numpy_and_large_scores() -> None:
    """Given numpy arrays and scores in the hundreds, expected: the reference (no overflow, no NaN)."""
    case = make_case(lens=[100, 31], block_size=16)
    found = cpu.paged_decode(*(tensor.numpy() for tensor in case.inputs()), scale=30.0)
    expected = reference.paged_decode(*case.inputs(), scale=30.0)
    assert found.dtype == np.float32
    assert relative_error(torch.from_numpy(found), expected) < 1e-4  # scores of 1e3 carry 1e-4 of rounding


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("lens", [-1, 5], r"seq_lens\[0\] is -1; a table of 7 blocks of 16 holds 0 to 112 tokens"),
        ("lens", [70, 113], r"seq_lens\[1\] is 113"),
        ("lens", [70, 6], None),
        ("table", (0, 4, 9999), r"block_table\[0, 4\] is 9999; the cache has blocks 0 to 8"),
        ("table", (1, 0, -1), r"block_table\[1, 0\] is -1"),
        ("table", (1, 1, -1), None),
    ],
)
def test_index_checks(field: str, value: object, error: str | None) -> None:
    """Given a bad length or a bad id in use, expected: IndexError that names it; none for ids not in use."""
    case = make_case(lens=[70, 5], block_size=16)
    if field == "lens":
        case.lens.copy_(torch.tensor(value))
    else:
        row, column, block = value  # type: ignore[misc]
        case.table[row, column] = block
    if error is None:
        cpu.paged_decode(*case.inputs())
    else:
        with pytest.raises(IndexError, match=error):
            cpu.paged_decode(*case.inputs())


def test_shape_and_type_errors() -> None:
    """Given inputs that do not fit, expected: ValueError that says what was found."""
    q, k, v, table, lens = make_case(lens=[70, 5], block_size=16).inputs()
    with pytest.raises(ValueError, match=r"q must be \[batch, heads, head_dim\], found shape \(2, 8\)"):
        cpu.paged_decode(q[..., 0], k, v, table, lens)
    with pytest.raises(ValueError, match="7 query heads are no multiple of 2 KV heads"):
        cpu.paged_decode(q[:, :7], k, v, table, lens)
    with pytest.raises(ValueError, match=r"block_table must be int32, found torch\.int64"):
        cpu.paged_decode(q, k, v, table.long(), lens)
    with pytest.raises(ValueError, match="contiguous along head_dim"):
        cpu.paged_decode(q, k.transpose(2, 3).contiguous().transpose(2, 3), v, table, lens)
    with pytest.raises(ValueError, match=r"caches must share one type of .*; found float64"):
        cpu.paged_decode(q, k.double(), v.double(), table, lens)
