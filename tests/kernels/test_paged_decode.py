"""The Triton decode kernel in the interpreter against the float64 reference, all else poisoned."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="kernel tests need torch, which is absent here (extra: bench)")
pytest.importorskip("triton", reason="kernel tests need triton, which is absent here (extra: bench)")

import torch
from kernel_cases import TOLERANCE, make_case, relative_error

from kvplan.kernels import decode, reference, splits

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


@pytest.mark.parametrize("swap_ab", [False, True], ids=["plain", "swap"])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_work_plan(block_size: int, swap_ab: bool) -> None:
    """Given skewed lengths and a plan of equal shares, expected: the reference, split rows or not."""
    lens = [3, 900, 0, 130, 1]
    case = make_case(lens=lens, block_size=block_size)
    plan = splits.plan_work(lens, kv_heads=2, num_sms=4, tile=32)
    assert (plan.items[:, 3] >= 0).any()
    assert (plan.items[:, 3] < 0).any()
    out = torch.full_like(case.q, float("nan"))
    config = decode.DecodeConfig(swap_ab=swap_ab)
    found = decode.paged_decode(*case.inputs(), plan=plan, config=config, out=out)
    assert relative_error(found, reference.paged_decode(*case.inputs())) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("shuffled", [False, True], ids=["contiguous", "shuffled"])
@pytest.mark.parametrize("hnd", [False, True], ids=["nhd", "hnd"])
@pytest.mark.parametrize("block_size", [4, 48, 128])
def test_lengths_around_a_block(block_size: int, hnd: bool, shuffled: bool) -> None:
    """Given lengths 0, 1, B-1, B, B+1 in either memory order, expected: the reference."""
    lens = [0, 1, block_size - 1, block_size, block_size + 1]
    case = make_case(lens=lens, block_size=block_size, hnd=hnd, shuffled=shuffled, kv_heads=1)
    found = decode.paged_decode(*case.inputs(), num_splits=1, config=SMALL)
    assert relative_error(found, reference.paged_decode(*case.inputs())) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    "options",
    [{"window": 5}, {"window": 150}, {"soft_cap": 2.0}, {"sinks": True}, {"window": 40, "sinks": True}],
    ids=str,
)
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("swap_ab", [False, True], ids=["plain", "swap"])
def test_options(options: dict[str, Any], num_splits: int, swap_ab: bool) -> None:
    """Given windows, a soft cap, sinks, in one part and in several, expected: the reference."""
    case = make_case(lens=[0, 1, 170, 40], block_size=16, kv_heads=1)
    if "sinks" in options:
        options = options | {"sinks": torch.tensor([-2.0, 0.0, 3.0, 8.0])}
    config = decode.DecodeConfig(tile=32, swap_ab=swap_ab)
    found = decode.paged_decode(*case.inputs(), **options, num_splits=num_splits, config=config)
    assert not found[0].any()
    assert relative_error(found, reference.paged_decode(*case.inputs(), **options)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("kv", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)
@pytest.mark.parametrize("capability", [None, (9, 0)], ids=["by-hand", "native"])
def test_float8_with_scales(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, dtype: torch.dtype, kv: str
) -> None:
    """Given float8 caches and scales, unpacked by hand or by hardware, expected: the reference."""
    monkeypatch.setattr(decode, "device_traits", lambda _tensor: (1, capability))
    case = make_case(lens=[70, 33], block_size=16, dtype=dtype, kv_dtype=getattr(torch, kv))
    scales = {"k_scale": 0.25, "v_scale": 3.0}
    out = torch.empty(case.q.shape)
    found = decode.paged_decode(*case.inputs(), **scales, num_splits=1, config=SMALL, out=out)
    assert relative_error(found, reference.paged_decode(*case.inputs(), **scales)) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("dim", "group"), [(64, 16), (64, 3), (80, 1), (96, 5), (128, 2), (192, 4), (256, 7), (64, 20)]
)
@pytest.mark.parametrize("swap_ab", [False, True], ids=["plain", "swap"])
def test_head_dims_and_groups(dim: int, group: int, swap_ab: bool) -> None:
    """Given head dims 64 to 256 and 1 to 20 query heads a KV head, expected: the reference."""
    case = make_case(lens=[37, 20], block_size=16, kv_heads=1, group=group, dim=dim, dtype=torch.bfloat16)
    config = decode.DecodeConfig(tile=16, swap_ab=swap_ab)
    out = torch.empty(case.q.shape)
    found = decode.paged_decode(*case.inputs(), num_splits=1, config=config, out=out)
    assert relative_error(found, reference.paged_decode(*case.inputs())) < TOLERANCE[torch.bfloat16]


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Given a fixed number of splits, expected: bit-equal output alone and among other rows."""
    case = make_case(lens=[300, 17, 64], block_size=16, kv_heads=1)
    batched = decode.paged_decode(*case.inputs(), num_splits=3, config=SMALL)
    for row in range(3):
        at = slice(row, row + 1)
        alone = decode.paged_decode(
            case.q[at], case.k, case.v, case.table[at], case.lens[at], num_splits=3, config=SMALL
        )
        assert torch.equal(alone[0], batched[row])


def test_launch_does_not_depend_on_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given other lengths in the same tensors, expected: the same grid and constants (for CUDA graphs)."""
    launches = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_args, **constants: launches.append((grid, constants))

    monkeypatch.setattr(decode, "_decode_kernel", Recorder())
    monkeypatch.setattr(decode, "combine", lambda *_args, **constants: launches.append(constants))
    monkeypatch.setattr(decode, "device_traits", lambda _tensor: (132, (9, 0)))
    case = make_case(lens=[2000, 33], block_size=16, dim=16)
    for lens in ([2000, 33], [1, 0], [500, 33]):
        case.lens.copy_(torch.tensor(lens))
        decode.paged_decode(*case.inputs())
    assert launches[0][0][1] > 1
    assert launches[0] == launches[2] == launches[4]
    assert launches[1] == launches[3] == launches[5]


@pytest.mark.parametrize(
    ("lens", "entry", "error"),
    [
        ([70, 200], None, r"seq_lens\[1\] is 200; a table of 7 blocks of 16 holds 0 to 112 tokens"),
        ([-1, 5], None, r"seq_lens\[0\] is -1"),
        ([70, 5], (0, 4, 9), r"block_table\[0, 4\] is 9; the cache has blocks 0 to 8"),
        ([70, 5], (1, 0, -1), r"block_table\[1, 0\] is -1"),
    ],
)
def test_index_errors(lens: list[int], entry: tuple[int, int, int] | None, error: str) -> None:
    """Given a length or an id in use that is out of range, expected: IndexError before any launch."""
    case = make_case(lens=[70, 5], block_size=16)
    case.lens.copy_(torch.tensor(lens))
    if entry:
        case.table[entry[0], entry[1]] = entry[2]
    with pytest.raises(IndexError, match=error):
        decode.paged_decode(*case.inputs())


def test_type_and_stride_errors() -> None:
    """Given types or strides that the kernel does not take, expected: ValueError that says what was found."""
    q, k, v, table, lens = make_case(lens=[70, 5], block_size=16).inputs()
    with pytest.raises(ValueError, match=r"q must be bfloat16, float16 or float32, found torch\.float64"):
        decode.paged_decode(q.double(), k, v, table, lens)
    with pytest.raises(
        ValueError, match=r"caches must both be torch\.float32 or float8, found torch\.float16"
    ):
        decode.paged_decode(q, k.half(), v.half(), table, lens)
    with pytest.raises(ValueError, match="k_cache must be contiguous along its last dimension"):
        decode.paged_decode(q, k.transpose(2, 3).contiguous().transpose(2, 3), v, table, lens)
    with pytest.raises(ValueError, match="seq_lens must be contiguous along its last dimension"):
        decode.paged_decode(q, k, v, table, torch.stack([lens, lens], 1)[:, 0])
    with pytest.raises(ValueError, match=r"sinks must be float32 \[8\], found torch\.float32 \(7,\)"):
        decode.paged_decode(q, k, v, table, lens, sinks=torch.zeros(7))
    with pytest.raises(ValueError, match=r"out must have shape \(2, 8, 64\), found \(2, 64\)"):
        decode.paged_decode(q, k, v, table, lens, out=q[:, 0])
    plan = splits.plan_work([70, 5], 2, 4)
    with pytest.raises(ValueError, match=r"plan_tensor must be int32 \[\d+\] like plan\.packed"):
        decode.paged_decode(q, k, v, table, lens, plan=plan, plan_tensor=torch.zeros(3))
    with pytest.raises(ValueError, match="plan is for 1 rows, 2 KV heads, window 0; found 2, 2, 0"):
        decode.paged_decode(q, k, v, table, lens, plan=splits.plan_work([5], 2, 4))
