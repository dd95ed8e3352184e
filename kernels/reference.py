"""Paged attention by its definition: gather by block table, softmax, weighted sum, all in float64.

Slow on purpose and short enough to check by eye; every other backend is tested against it. Only slots that
a sequence owns are read, so poisoned slots, free blocks and table entries behind a sequence's end never
enter a result.

Conventions shared by all backends
- ``k_cache``, ``v_cache``: ``[num_blocks, block_size, kv_heads, head_dim]`` in any strides. NHD memory is the
  plain contiguous tensor; HND memory is ``hnd.permute(0, 2, 1, 3)``.
- ``block_table``: int32 ``[batch, max_blocks]``; token ``t`` of row ``b`` lies in block
  ``block_table[b, t // block_size]``, slot ``t % block_size``.
- ``seq_lens``: int32 ``[batch]``, tokens in the cache, the newest included. 0 gives a row of zeros.
- query head ``h`` reads KV head ``h // (heads // kv_heads)``.
- a score is ``scale * k_scale * (q . k)``; ``soft_cap > 0`` turns it into ``soft_cap * tanh(score /
  soft_cap)``; ``window > 0`` lets a query at position ``p`` see positions ``p - window + 1 .. p`` only;
  ``sinks[h]`` is one more logit in the softmax's denominator with no value behind it (gpt-oss).
"""

from __future__ import annotations

import torch
from torch import Tensor


def gather(cache: Tensor, table_row: Tensor, start: int, end: int) -> Tensor:
    """Tokens ``start .. end - 1`` of one sequence as float64 ``[end - start, ...]``, in order."""
    position = torch.arange(start, end, device=cache.device)
    block_size = cache.shape[1]
    return cache[table_row[position // block_size].long(), position % block_size].double()


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, soft_cap: float, sinks: Tensor | None) -> Tensor:
    """One query ``[heads, dim_k]`` over ``k [n, kv_heads, dim_k]``, ``v [n, kv_heads, dim_v]`` in float64."""
    heads, kv_heads = q.shape[0], k.shape[1]
    grouped = q.reshape(kv_heads, heads // kv_heads, -1)
    scores = torch.einsum("hgd,nhd->hgn", grouped, k) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().reshape(kv_heads, -1, 1)], dim=2)
    weights = torch.softmax(scores, dim=2)[:, :, : k.shape[0]]
    return torch.einsum("hgn,nhd->hgd", weights, v).reshape(heads, -1)


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """One new token per sequence against its cached tokens.

    ``q [batch, heads, head_dim]``, any float dtype; caches, ``block_table`` and ``seq_lens`` as in the
    module's conventions, caches in float or float8. ``scale`` defaults to ``head_dim ** -0.5``; ``k_scale``
    and ``v_scale`` turn stored numbers into true ones. Returns float64 ``[batch, heads, head_dim]``.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.zeros((*q.shape[:2], v_cache.shape[-1]), dtype=torch.float64, device=q.device)
    for row, n in enumerate(seq_lens.tolist()):
        if n == 0:
            continue
        start = max(0, n - window) if window > 0 else 0
        k = gather(k_cache, block_table[row], start, n) * k_scale
        v = gather(v_cache, block_table[row], start, n) * v_scale
        out[row] = attend(q[row].double(), k, v, scale=scale, soft_cap=soft_cap, sinks=sinks)
    return out


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """A chunk of new tokens per sequence, causal, over a prefix that is already cached.

    ``q [tokens, heads, head_dim]``: the chunks of all sequences one behind the other, row ``b`` owning
    ``q[query_start[b] : query_start[b + 1]]`` (int32 ``[batch + 1]``). ``seq_lens[b]`` counts cached prefix
    plus chunk, whose K and V are already in the cache, so the chunk's last query sits at position
    ``seq_lens[b] - 1``. Returns float64 ``[tokens, heads, head_dim]``.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.zeros((*q.shape[:2], v_cache.shape[-1]), dtype=torch.float64, device=q.device)
    starts = query_start.tolist()
    for row, n in enumerate(seq_lens.tolist()):
        first, last = starts[row], starts[row + 1]
        if last == first:
            continue
        k = gather(k_cache, block_table[row], 0, n) * k_scale
        v = gather(v_cache, block_table[row], 0, n) * v_scale
        for token in range(first, last):
            end = n - (last - token) + 1
            low = max(0, end - window) if window > 0 else 0
            out[token] = attend(
                q[token].double(), k[low:end], v[low:end], scale=scale, soft_cap=soft_cap, sinks=sinks
            )
    return out


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    latent_dim: int = 512,
) -> Tensor:
    """Multi-head latent attention in its absorbed form: all heads read one shared row per token.

    ``q [batch, heads, latent + rope]`` (576 for DeepSeek: 512 latent, 64 rope), ``kv_cache [num_blocks,
    block_size, latent + rope]``; the row is the key, its first ``latent_dim`` numbers are the value.
    ``scale`` must be given: it belongs to the head before absorption (DeepSeek-V3: ``192 ** -0.5``).
    Returns float64 ``[batch, heads, latent_dim]``.
    """
    out = torch.zeros((*q.shape[:2], latent_dim), dtype=torch.float64, device=q.device)
    for row, n in enumerate(seq_lens.tolist()):
        if n == 0:
            continue
        kv = gather(kv_cache, block_table[row], 0, n)[:, None, :]
        out[row] = attend(q[row].double(), kv, kv[..., :latent_dim], scale=scale, soft_cap=0.0, sinks=None)
    return out
