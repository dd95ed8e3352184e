"""Writing, copying and swapping blocks: every stored bit, and no bit elsewhere."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="kernel tests need torch, which is absent here (extra: bench)")
pytest.importorskip("triton", reason="kernel tests need triton, which is absent here (extra: bench)")

import torch
from kernel_cases import as_hnd

from kvplan.kernels import cache_ops


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.fixture(params=["kernel", "torch"])
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of writing: the kernel in the interpreter, and torch as on a CPU without it."""
    monkeypatch.setattr(cache_ops, "interpreting", lambda: request.param == "kernel")


LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("name", ["float32", "float16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("hnd", [False, True], ids=["nhd", "hnd"])
def test_write_kv(name: str, hnd: bool) -> None:
    """Given tokens, slots and one skipped token, expected: torch's rounding there and nothing elsewhere."""
    dtype = getattr(torch, name)
    k_cache, v_cache = (torch.full((5, 4, 3, 24), 7.0).to(dtype) for _ in range(2))
    if hnd:
        k_cache, v_cache = as_hnd(k_cache), as_hnd(v_cache)
    k, v = torch.randn(4, 3, 24) * 100, torch.randn(4, 3, 24)
    cache_ops.write_kv(k, v, k_cache, v_cache, torch.tensor([17, -1, 0, 6]), k_scale=0.5, v_scale=2.0)
    for cache, values, scale in ((k_cache, k, 0.5), (v_cache, v, 2.0)):
        expected = torch.full((20, 3, 24), 7.0)
        expected[[17, 0, 6]] = (values / scale)[[0, 2, 3]].clamp(
            -LARGEST.get(name, 1e9), LARGEST.get(name, 1e9)
        )
        assert torch.equal(bits(cache), bits(expected.reshape(5, 4, 3, 24).to(dtype)))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_conversion_of_every_half(name: str) -> None:
    """Given all finite float16 numbers, expected: torch's nearest-even float8 bits after clamping."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every[every.isfinite()].float()
    values = torch.cat([every, torch.zeros(-len(every) % 1024)]).reshape(1, -1, 1024)
    cache = torch.zeros((1, 1, values.shape[1], 1024), dtype=getattr(torch, name))
    other = torch.zeros_like(cache)
    cache_ops.write_kv(values, values, cache, other, torch.tensor([0]))
    expected = values.clamp(-LARGEST[name], LARGEST[name]).to(cache.dtype)
    assert torch.equal(bits(cache).flatten(), bits(expected).flatten())
    assert torch.equal(bits(other), bits(cache))


def test_float8_keeps_nan() -> None:
    """Given a NaN, expected: a NaN in the cache, so that a fault upstream is not hidden."""
    cache = torch.zeros((1, 1, 1, 16), dtype=torch.float8_e4m3fn)
    values = torch.full((1, 1, 16), float("nan"))
    cache_ops.write_kv(values, values, cache, cache.clone(), torch.tensor([0]))
    assert cache.float().isnan().all()


@pytest.mark.usefixtures("_path")
def test_write_latent() -> None:
    """Given MLA rows of 576 numbers, expected: them in their slots and zeros elsewhere."""
    cache = torch.zeros((3, 4, 576), dtype=torch.float16)
    rows = torch.randn(2, 576).half()
    cache_ops.write_latent(rows, cache, torch.tensor([11, 2]))
    expected = torch.zeros((12, 576), dtype=torch.float16)
    expected[[11, 2]] = rows
    assert torch.equal(cache.reshape(12, 576), expected)


def test_write_errors() -> None:
    """Given slots or shapes that do not fit, expected: an error that names them, and nothing written."""
    k = torch.ones(2, 3, 16)
    cache = torch.zeros((5, 4, 3, 16))
    with pytest.raises(IndexError, match=r"slots\[1\] is 20; the cache has slots 0 to 19"):
        cache_ops.write_kv(k, k, cache, cache, torch.tensor([0, 20]))
    with pytest.raises(IndexError, match=r"slots\[0\] is -2"):
        cache_ops.write_kv(k, k, cache, cache, torch.tensor([-2, 1]))
    with pytest.raises(ValueError, match=r"slots must be int64 \[2\], found torch.int32"):
        cache_ops.write_kv(k, k, cache, cache, torch.tensor([0, 1]).int())
    with pytest.raises(ValueError, match=r"k and v must be \[tokens, 3, 16\]"):
        cache_ops.write_kv(k[:, :2], k[:, :2], cache, cache, torch.tensor([0, 1]))
    assert not cache.any()


@pytest.mark.parametrize("hnd", [False, True], ids=["nhd", "hnd"])
def test_copy_blocks_reads_before_it_writes(hnd: bool) -> None:
    """Given 1 -> 2 and 2 -> 3 in one call, expected: block 3 gets what block 2 held before."""
    cache = torch.arange(4.0)[:, None, None, None].expand(4, 2, 3, 8).contiguous()
    cache = (as_hnd(cache) if hnd else cache).to(torch.float8_e4m3fn)
    cache_ops.copy_blocks([cache], [1, 2], [2, 3])
    assert cache.float()[:, 0, 0, 0].tolist() == [0, 1, 1, 2]
    assert torch.equal(cache.float(), cache.float()[:, :1, :1, :1].expand(4, 2, 3, 8))


def test_swap_blocks_merges_runs() -> None:
    """Given blocks 1 2 3 and 7, expected: a round trip through another pool in two copies each way."""
    device, host = torch.randn(8, 2, 3, 8), torch.zeros(6, 2, 3, 8)
    kept = device.clone()
    assert cache_ops.swap_blocks(device, host, [1, 2, 3, 7], [0, 1, 2, 5]) == 2
    assert torch.equal(host[[0, 1, 2, 5]], kept[[1, 2, 3, 7]])
    device.zero_()
    assert cache_ops.swap_blocks(host, device, [0, 1, 2, 5], [4, 5, 6, 0]) == 2
    assert torch.equal(device[[4, 5, 6, 0]], kept[[1, 2, 3, 7]])
    assert not device[[1, 2, 3, 7]].any()


def test_block_id_errors() -> None:
    """Given ids outside a cache or a target named twice, expected: an error that names them."""
    cache = torch.zeros(4, 2, 3, 8)
    with pytest.raises(IndexError, match=r"target\[0\] is 4; the cache has blocks 0 to 3"):
        cache_ops.copy_blocks([cache], [1], [4])
    with pytest.raises(ValueError, match="2 sources need as many distinct targets"):
        cache_ops.copy_blocks([cache], [1, 2], [3, 3])
    with pytest.raises(IndexError, match=r"source\[0\] is -1"):
        cache_ops.swap_blocks(cache, cache.clone(), [-1], [0])
    with pytest.raises(ValueError, match="one block shape and type"):
        cache_ops.swap_blocks(cache, cache.half(), [0], [0])
