"""Moving KV into and between blocks: write new tokens, copy blocks (copy-on-write), swap with host memory.

On a GPU (or in Triton's interpreter) tokens are written by one kernel for K and V; on plain CPU tensors torch
does the same. Stored numbers are ``value / scale``, rounded to nearest even, and for float8 clamped to its
range first, since float8_e4m3fn has no infinity to overflow into.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvplan.kernels.device import capturing, interpreting

# mantissa bits, exponent bias, largest finite value
FLOAT8 = {torch.float8_e4m3fn: (3, 7, 448.0), torch.float8_e5m2: (2, 15, 57344.0)}


@triton.jit
def float8_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """float32 to the bits of a float8, nearest even, clamped; NaN stays NaN.

    By integers, so that it is the same on every GPU (sm_80 and gfx942 cannot convert to e4m3) and in the
    interpreter (whose own conversion truncates).
    """
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    bits = magnitude.to(tl.uint32, bitcast=True)
    drop: tl.constexpr = 23 - MANTISSA
    odd = (bits >> drop) & 1
    normal = ((bits - ((127 - BIAS) << 23)) + ((1 << (drop - 1)) - 1) + odd) >> drop
    # Below the smallest normal the step is fixed: adding 1.5 * 2^23 rounds to whole steps, nearest even.
    step: tl.constexpr = 2.0 ** (BIAS - 1 + MANTISSA)
    subnormal = (magnitude * step + 12582912.0).to(tl.uint32, bitcast=True) & 0xFF
    smallest: tl.constexpr = 2.0 ** (1 - BIAS)
    result = tl.where(magnitude < smallest, subnormal, normal)
    result = tl.where(x != x, 0x7F, result)
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return (result | sign).to(tl.uint8)


@triton.jit
def _write_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_kc_block,
    stride_kc_slot,
    stride_kc_head,
    stride_vc_block,
    stride_vc_slot,
    stride_vc_head,
    k_factor,
    v_factor,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """One program a token: its K row, and where there is one its V row, into the slot; -1 writes nothing."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    block = slot // PAGE
    within = slot % PAGE
    heads = tl.arange(0, HEADS_PAD)[:, None]
    dims = tl.arange(0, DIM_PAD)[None, :]
    mask = (heads < HEADS) & (dims < DIM)
    value = tl.load(k + token * stride_k_token + heads * stride_k_head + dims, mask=mask).to(tl.float32)
    place = k_cache + block * stride_kc_block + within * stride_kc_slot + heads * stride_kc_head + dims
    if MANTISSA > 0:
        tl.store(place, float8_bits(value * k_factor, MANTISSA, BIAS, LARGEST), mask=mask)
    else:
        tl.store(place, (value * k_factor).to(k_cache.dtype.element_ty), mask=mask)
    if v is not None:
        value_v = tl.load(v + token * stride_v_token + heads * stride_v_head + dims, mask=mask).to(tl.float32)
        place_v = v_cache + block * stride_vc_block + within * stride_vc_slot + heads * stride_vc_head + dims
        if MANTISSA > 0:
            tl.store(place_v, float8_bits(value_v * v_factor, MANTISSA, BIAS, LARGEST), mask=mask)
        else:
            tl.store(place_v, (value_v * v_factor).to(v_cache.dtype.element_ty), mask=mask)


def _check_slot_range(slots: Tensor, cache: Tensor) -> None:
    most = cache.shape[0] * cache.shape[1]
    bad = (slots < -1) | (slots >= most)
    if bool(bad.any()):
        token = int(bad.nonzero()[0])
        raise IndexError(
            f"slots[{token}] is {int(slots[token])}; the cache has slots 0 to {most - 1}, and -1 skips"
        )


def stored(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """``values / scale`` as a cache of ``dtype`` holds them: nearest even, float8 clamped to its range."""
    scaled = values.float() * (1.0 / scale)
    if dtype in FLOAT8:
        largest = FLOAT8[dtype][2]
        scaled = scaled.clamp(-largest, largest)
    return scaled.to(dtype)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in FLOAT8 else tensor


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    check: bool = True,
) -> None:
    """Write new tokens' K and V to their slots.

    ``k``, ``v``: ``[tokens, kv_heads, head_dim]`` in any float type, contiguous along ``head_dim``; caches
    ``[num_blocks, block_size, kv_heads, head_dim]`` in float or float8, strides as in
    `kvplan.kernels.reference`; ``slots``: int64 ``[tokens]``, ``block * block_size + slot``, -1 for a token
    that is not to be stored (padding). Two tokens must not name one slot. Stored is ``k / k_scale``.

    ``check`` verifies the range of ``slots`` (on a GPU: one wait). ValueError: shapes or types that do not
    fit; IndexError: a slot outside the cache.
    """
    if k.shape != v.shape or k.dim() != 3 or tuple(k.shape[1:]) != tuple(k_cache.shape[2:]):
        raise ValueError(
            f"k and v must be [tokens, {', '.join(map(str, k_cache.shape[2:]))}] like the caches' rows, "
            f"found {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"caches must agree, found {tuple(k_cache.shape)} {k_cache.dtype} and {tuple(v_cache.shape)} "
            f"{v_cache.dtype}"
        )
    _write(k, v, k_cache, v_cache, slots, k_scale, v_scale, check)


def write_latent(
    rows: Tensor, kv_cache: Tensor, slots: Tensor, *, scale: float = 1.0, check: bool = True
) -> None:
    """Write new tokens' MLA rows: ``rows [tokens, dim]`` into ``kv_cache [num_blocks, block_size, dim]``.

    ``slots``, ``scale``, ``check`` and errors as in `write_kv`.
    """
    if rows.dim() != 2 or kv_cache.dim() != 3 or rows.shape[1] != kv_cache.shape[2]:
        raise ValueError(
            f"rows must be [tokens, dim] and kv_cache [num_blocks, block_size, dim], found "
            f"{tuple(rows.shape)} and {tuple(kv_cache.shape)}"
        )
    _write(rows[:, None], None, kv_cache[:, :, None], None, slots, scale, 1.0, check)


def _write(
    k: Tensor,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slots: Tensor,
    k_scale: float,
    v_scale: float,
    check: bool,
) -> None:
    tokens, heads, dim = k.shape
    if slots.dtype != torch.int64 or tuple(slots.shape) != (tokens,):
        raise ValueError(f"slots must be int64 [{tokens}], found {slots.dtype} {tuple(slots.shape)}")
    slots = slots.contiguous()
    for name, tensor in (("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor is not None and tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous along head_dim, found strides {tensor.stride()}")
    if check and not capturing(k):
        _check_slot_range(slots, k_cache)
    if tokens == 0:
        return
    page = k_cache.shape[1]
    if not k.is_cuda and not interpreting():
        kept = slots >= 0
        block, within = slots[kept] // page, slots[kept] % page
        _bits(k_cache)[block, within] = _bits(stored(k[kept], k_cache.dtype, k_scale))
        if v is not None and v_cache is not None:
            _bits(v_cache)[block, within] = _bits(stored(v[kept], v_cache.dtype, v_scale))
        return
    mantissa, bias, largest = FLOAT8.get(k_cache.dtype, (0, 0, 0.0))
    other, other_cache = (k, k_cache) if v is None or v_cache is None else (v, v_cache)
    _write_kernel[(tokens,)](
        k,
        v,
        _bits(k_cache),
        None if v_cache is None else _bits(v_cache),
        slots,
        *k.stride()[:2],
        *other.stride()[:2],
        *k_cache.stride()[:3],
        *other_cache.stride()[:3],
        1.0 / k_scale,
        1.0 / v_scale,
        PAGE=page,
        HEADS=heads,
        HEADS_PAD=triton.next_power_of_2(heads),
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        MANTISSA=mantissa,
        BIAS=bias,
        LARGEST=largest,
        num_warps=4,
    )


def _flat_blocks(cache: Tensor, name: str) -> Tensor:
    """The cache as ``[num_blocks, bytes or elements of a block]``, whatever the order inside a block."""
    size = cache[0].numel() if cache.shape[0] else 0
    dense, expected = sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True)), 1
    for stride, length in dense:
        if length > 1 and stride != expected:
            raise ValueError(f"a block of {name} must be dense in memory, found strides {cache.stride()}")
        expected *= length
    return torch.as_strided(_bits(cache), (cache.shape[0], size), (cache.stride(0), 1))


def _check_ids(ids: Sequence[int], num_blocks: int, name: str) -> None:
    for index, block in enumerate(ids):
        if not 0 <= block < num_blocks:
            raise IndexError(f"{name}[{index}] is {block}; the cache has blocks 0 to {num_blocks - 1}")


def copy_blocks(caches: Sequence[Tensor], source: Sequence[int], target: Sequence[int]) -> None:
    """Copy whole blocks within each cache (copy-on-write): block ``source[i]`` to block ``target[i]``.

    ``caches``: tensors ``[num_blocks, ...]`` whose blocks are dense in memory (all layers' K and V, say).
    All sources are read before any target is written. ValueError: unequal lists, a target named twice;
    IndexError: an id outside a cache.
    """
    if len(source) != len(target) or len(set(target)) != len(target):
        raise ValueError(f"{len(source)} sources need as many distinct targets, found {list(target)}")
    for number, cache in enumerate(caches):
        flat = _flat_blocks(cache, f"caches[{number}]")
        _check_ids(source, len(flat), "source")
        _check_ids(target, len(flat), "target")
        if source:
            at = torch.tensor([list(source), list(target)], device=cache.device)
            flat.index_copy_(0, at[1], flat.index_select(0, at[0]))


def swap_blocks(from_cache: Tensor, to_cache: Tensor, source: Sequence[int], target: Sequence[int]) -> int:
    """Copy blocks between a device's cache and host memory (either way); returns the number of copies made.

    Caches of one dtype and block shape, blocks dense in memory; the host's should be pinned, then copies are
    asynchronous on the current stream. Runs of consecutive ids on both sides go in one copy. ValueError:
    caches that differ or unequal lists; IndexError: an id outside its cache.
    """
    if from_cache.shape[1:] != to_cache.shape[1:] or from_cache.dtype != to_cache.dtype:
        raise ValueError(
            f"caches must have one block shape and type, found {tuple(from_cache.shape)} {from_cache.dtype} "
            f"and {tuple(to_cache.shape)} {to_cache.dtype}"
        )
    if from_cache.stride()[1:] != to_cache.stride()[1:]:
        raise ValueError(
            f"blocks must be laid out alike, found {from_cache.stride()} and {to_cache.stride()}"
        )
    if len(source) != len(target) or len(set(target)) != len(target):
        raise ValueError(f"{len(source)} sources need as many distinct targets, found {list(target)}")
    _check_ids(source, from_cache.shape[0], "source")
    _check_ids(target, to_cache.shape[0], "target")
    read, written = _flat_blocks(from_cache, "from_cache"), _flat_blocks(to_cache, "to_cache")
    start = copies = 0
    for end in range(1, len(source) + 1):
        same_run = end < len(source) and (source[end] - source[start], target[end] - target[start]) == (
            end - start,
            end - start,
        )
        if not same_run:
            count = end - start
            written[target[start] : target[start] + count].copy_(
                read[source[start] : source[start] + count], non_blocking=True
            )
            copies += 1
            start = end
    return copies
