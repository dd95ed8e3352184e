"""What a launch needs to know of its device, and how types map to the kernels' dots."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

# e4m3 bits moved into a half are the number divided by this: half's exponent bias is 15, e4m3's is 7.
E4M3_FACTOR = 256.0


@triton.jit
def _probe():
    pass


def interpreting() -> bool:
    """Whether kernels were built for Triton's interpreter (CPU tensors), by TRITON_INTERPRET=1 at import."""
    return not isinstance(_probe, triton.JITFunction)


@cache
def _device(index: int) -> tuple[int, tuple[int, int] | None]:
    """Number of SMs, and the CUDA capability or None on AMD."""
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, None if torch.version.hip else (
        properties.major,
        properties.minor,
    )


def device_traits(tensor: Tensor) -> tuple[int, tuple[int, int] | None]:
    """SMs and capability of a tensor's GPU; (1, None) in the interpreter. Else ValueError for CPU tensors."""
    if tensor.is_cuda:
        return _device(tensor.device.index or 0)
    if not interpreting():
        raise ValueError("Triton kernels need GPU tensors (or TRITON_INTERPRET=1 before their import)")
    return 1, None


def stored_as(cache: Tensor, capability: tuple[int, int] | None) -> tuple[Tensor, bool]:
    """The cache as the kernel takes it, and whether as e4m3 bits to unpack by hand (no hardware for it)."""
    by_hand = cache.dtype == torch.float8_e4m3fn and (capability is None or capability < (8, 9))
    return (cache.view(torch.uint8), True) if by_hand else (cache, False)


def compute_type(q: Tensor, cache: Tensor) -> tl.dtype:
    """Type of the dots' operands; float8 KV goes through float16, which holds it exactly, fastest."""
    if q.dtype == torch.float32 or (interpreting() and q.dtype == torch.bfloat16):
        return tl.float32  # the interpreter multiplies bfloat16 bit patterns
    if cache.element_size() == 1:
        return tl.float16
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[q.dtype]


def precision(q: Tensor) -> str:
    """How float32 dots are done: exactly for float32 input; elsewhere it does not matter."""
    return "ieee" if q.dtype == torch.float32 else "tf32"


def capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, when the host must not wait for the device."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def check_types(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, **dense: Tensor | None
) -> None:
    """Raise ValueError unless types go together and rows are contiguous; reads no data.

    ``dense``: further tensors by name, None left out, that kernels read without a stride.
    """
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"q must be bfloat16, float16 or float32, found {q.dtype}")
    allowed = (q.dtype, torch.float8_e4m3fn, torch.float8_e5m2)
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in allowed:
        raise ValueError(
            f"caches must both be {q.dtype} or float8, found {k_cache.dtype} and {v_cache.dtype}"
        )
    rows = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, **dense}
    for name, tensor in rows.items():
        if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(
                f"{name} must be contiguous along its last dimension, found strides {tensor.stride()}"
            )
