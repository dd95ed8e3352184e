"""What every backend checks before it trusts an index. Works on torch tensors and numpy arrays alike."""

from __future__ import annotations

from typing import Any

import numpy as np


def check_cache_shapes(q: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any) -> None:
    """Raise ValueError unless shapes fit one another; reads no data, so it costs no device sync."""
    if len(q.shape) != 3:
        raise ValueError(f"q must be [batch, heads, head_dim], found shape {tuple(q.shape)}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if len(cache.shape) != 4:
            raise ValueError(
                f"{name} must be [num_blocks, block_size, kv_heads, head_dim], found {tuple(cache.shape)}"
            )
    if tuple(k_cache.shape[:3]) != tuple(v_cache.shape[:3]):
        raise ValueError(
            f"k_cache and v_cache must agree in [num_blocks, block_size, kv_heads], found "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if k_cache.shape[3] != q.shape[2]:
        raise ValueError(f"q has head_dim {q.shape[2]}, k_cache has {k_cache.shape[3]}")
    if k_cache.shape[2] == 0 or q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {k_cache.shape[2]} KV heads")
    check_table_shapes(block_table, seq_lens)


def check_table_shapes(block_table: Any, seq_lens: Any) -> None:
    """Raise ValueError unless ``block_table [batch, max_blocks]``, ``seq_lens [batch]`` fit, both int32."""
    if len(block_table.shape) != 2 or len(seq_lens.shape) != 1 or block_table.shape[0] != seq_lens.shape[0]:
        raise ValueError(
            f"block_table must be [batch, max_blocks] and seq_lens [batch], found "
            f"{tuple(block_table.shape)} and {tuple(seq_lens.shape)}"
        )
    for name, array in (("block_table", block_table), ("seq_lens", seq_lens)):
        if not str(array.dtype).endswith("int32"):
            raise ValueError(f"{name} must be int32, found {array.dtype}")


def check_extras(sinks: Any, out: Any, heads: int, out_shape: tuple[int, ...]) -> None:
    """Raise ValueError unless ``sinks``, if given, is float32 ``[heads]`` and ``out`` of ``out_shape``."""
    if sinks is not None and (tuple(sinks.shape) != (heads,) or not str(sinks.dtype).endswith("float32")):
        raise ValueError(f"sinks must be float32 [{heads}], found {sinks.dtype} {tuple(sinks.shape)}")
    if out is not None and tuple(out.shape) != out_shape:
        raise ValueError(f"out must have shape {out_shape}, found {tuple(out.shape)}")


def check_indices(block_table: Any, seq_lens: Any, num_blocks: int, block_size: int) -> None:
    """Raise IndexError naming the first length or block id in use that points outside the table or the cache.

    Only entries that a sequence uses are looked at: what lies behind its end may be anything. Work is
    batch x max_blocks; for tensors on a device one number comes back first, so a clean table costs one wait.
    """
    if not isinstance(block_table, np.ndarray):
        if block_table.is_cuda and not _any_bad(block_table, seq_lens, num_blocks, block_size).item():
            return
        block_table, seq_lens = block_table.cpu().numpy(), seq_lens.cpu().numpy()
    if seq_lens.size == 0:
        return
    most = block_table.shape[1] * block_size
    outside = (seq_lens < 0) | (seq_lens > most)
    if outside.any():
        row = int(outside.argmax())
        raise IndexError(
            f"seq_lens[{row}] is {seq_lens[row]}; a table of {block_table.shape[1]} blocks of "
            f"{block_size} holds 0 to {most} tokens"
        )
    bad = _bad_entries(np.arange(block_table.shape[1]), block_table, seq_lens, num_blocks, block_size)
    if bad.any():
        row, column = (int(index) for index in np.argwhere(bad)[0])
        raise IndexError(
            f"block_table[{row}, {column}] is {block_table[row, column]}; "
            f"the cache has blocks 0 to {num_blocks - 1}"
        )


def _bad_entries(columns: Any, block_table: Any, seq_lens: Any, num_blocks: int, block_size: int) -> Any:
    used = columns * block_size < seq_lens[:, None]
    return used & ((block_table < 0) | (block_table >= num_blocks))


def _any_bad(block_table: Any, seq_lens: Any, num_blocks: int, block_size: int) -> Any:
    import torch

    columns = torch.arange(block_table.shape[1], device=block_table.device)
    outside = (seq_lens < 0) | (seq_lens > block_table.shape[1] * block_size)
    return outside.any() | _bad_entries(columns, block_table, seq_lens, num_blocks, block_size).any()


def check_query_start(query_start: Any, seq_lens: Any, tokens: int, longest: int) -> None:
    """Raise IndexError unless chunks fill 0 .. tokens in order and fit their sequences and ``longest``."""
    starts, lens = (
        array if isinstance(array, np.ndarray) else array.cpu().numpy() for array in (query_start, seq_lens)
    )
    counts = np.diff(starts)
    if starts[0] != 0 or starts[-1] != tokens or (counts < 0).any():
        raise IndexError(
            f"query_start must rise from 0 to {tokens} (the tokens of q), found {starts.tolist()[:8]}"
        )
    bad = (counts > lens) | (counts > longest)
    if bad.any():
        row = int(bad.argmax())
        raise IndexError(
            f"row {row} has {counts[row]} new tokens, more than its length "
            f"{lens[row]} or max_query_len {longest}"
        )
