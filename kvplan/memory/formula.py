"""The arithmetic of a paged KV cache and nothing else; no model, no engine, no GPU.

n is a length in tokens, B a block size in tokens. Every function takes plain integers and, since it uses
only integer operators, numpy integer arrays element by element.
"""

from __future__ import annotations

from collections.abc import Sequence


def kv_bytes(layers: int, n_tokens: int, kv_heads: int, head_dim: int, bytes_per_element: int) -> int:
    """Bytes of K and V of ``n_tokens``: ``M = 2·L·n·h_kv·d_h·b``."""
    return 2 * layers * n_tokens * kv_heads * head_dim * bytes_per_element


def blocks_for(n_tokens: int, block_size: int) -> int:
    """Blocks that hold ``n_tokens``: ``ceil(n / B)``."""
    return -(-n_tokens // block_size)


def allocated_tokens(n_tokens: int, block_size: int) -> int:
    """Token positions allocated for ``n_tokens``: ``A_B(n) = B·ceil(n / B)``."""
    return block_size * blocks_for(n_tokens, block_size)


def tail_waste_tokens(n_tokens: int, block_size: int) -> int:
    """Positions of the last block that stay empty: ``W_B(n) = A_B(n) - n``, in 0 .. B-1."""
    return allocated_tokens(n_tokens, block_size) - n_tokens


def utilization(lengths: Sequence[int], block_size: int) -> float:
    """Share of allocated positions that hold a token: ``U = Σn / ΣA_B(n)``; 1.0 for no request."""
    return share(sum(lengths), sum(allocated_tokens(n, block_size) for n in lengths))


def share(used: int, allocated: int) -> float:
    """``used / allocated``, and 1.0 where nothing was allocated."""
    return used / allocated if allocated else 1.0


def reserved_max_tokens(n_tokens: int, max_tokens: int) -> int:
    """Positions held when every request reserves ``max_tokens`` ahead (Orca's "Max")."""
    return n_tokens * 0 + max_tokens


def reserved_pow2_tokens(n_tokens: int) -> int:
    """Positions held when a request reserves the next power of two: 25 -> 32, 32 -> 32 (Orca's "Pow2").

    ``n_tokens`` lies in 1 .. 2^62.
    """
    filled = n_tokens - 1
    for shift in (1, 2, 4, 8, 16, 32):  # copy the highest set bit into all lower ones
        filled = filled | (filled >> shift)
    return filled + 1
