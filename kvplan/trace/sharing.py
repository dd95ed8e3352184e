"""How much of a trace has been seen before: prefix keys, and what a cache of a given size would hit.

Plain numpy, for looking at a trace before anything runs. A key names a block and everything before it, so
ids that name one block's content only (Bailian, RAG) match position by position. All prompts are looked up
from the front, lookup stops at the first miss, then the whole prompt is touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvplan.trace.schema import Ints, Trace
from kvplan.trace.sessions import PRIVATE_STREAMS


@dataclass(frozen=True)
class PrefixKeys:
    """Dense keys: request i has ``key[offsets[i] : offsets[i+1]]``; ``tokens`` is where each block ends."""

    key: Ints
    offsets: Ints
    tokens: Ints

    def __len__(self) -> int:
        return len(self.key)

    @property
    def distinct(self) -> int:
        return int(self.key.max()) + 1 if len(self.key) else 0


def id_size(trace: Trace) -> int:
    """Tokens of the ids that the trace's content consists of, 0 when it is not made of equal ids."""
    if not trace.has_content:
        return 0
    last = np.zeros(len(trace.segment_length), bool)
    ends = trace.segment_offsets[1:][np.diff(trace.segment_offsets) > 0] - 1
    last[ends] = True
    private = trace.segment_stream >= PRIVATE_STREAMS
    if private.all():
        return 0
    inner = trace.segment_length[~last & ~private]
    size = int(inner[0]) if len(inner) else int(trace.segment_length.max())
    # A private piece is the rest of a prompt; before it stands an id, whole like all others.
    fits = trace.segment_length[last & ~private] <= size
    return size if (inner == size).all() and fits.all() and not trace.segment_start.any() and size > 1 else 0


def prefix_keys(trace: Trace, block_size: int | None = None) -> PrefixKeys:
    """Keys of the prompts' full blocks of ``block_size``, or (None) of the file's ids, partial ones too."""
    stream, start, length, offsets = (
        trace.segment_stream,
        trace.segment_start,
        trace.segment_length,
        trace.segment_offsets,
    )
    if block_size is None:
        keep = stream < PRIVATE_STREAMS
    else:
        stream, start, length, offsets = _cut(*_joined(trace), block_size)
        keep = np.ones(len(stream), bool)
    rows = np.repeat(np.arange(len(trace)), np.diff(offsets))
    ends = np.cumsum(length)
    first = offsets[:-1][np.diff(offsets) > 0]
    before = np.zeros(len(trace), np.int64)
    before[np.diff(offsets) > 0] = ends[first] - length[first]
    tokens = ends - before[rows]
    hashes = _chain(stream, start, length, offsets, trace.tenant_id)
    if block_size is not None:
        keep &= tokens % block_size == 0
    _, key = np.unique(hashes[keep], return_inverse=True)
    counts = np.bincount(rows[keep], minlength=len(trace))
    return PrefixKeys(key.astype(np.int64), np.concatenate([[0], np.cumsum(counts)]), tokens[keep])


def _joined(trace: Trace) -> tuple[Ints, Ints, Ints, Ints]:
    """Segments with those that run on joined, so that a content has one spelling."""
    stream, start, length = trace.segment_stream, trace.segment_start, trace.segment_length
    n = len(stream)
    fresh = np.ones(n, bool)
    if n > 1:
        fresh[1:] = (stream[1:] != stream[:-1]) | (start[1:] != start[:-1] + length[:-1])
    fresh[trace.segment_offsets[:-1][np.diff(trace.segment_offsets) > 0]] = True
    at = np.flatnonzero(fresh)
    offsets = np.concatenate([[0], np.cumsum(fresh)])[trace.segment_offsets]
    return stream[at], start[at], np.add.reduceat(length, at) if n else length, offsets


def _cut(stream: Ints, start: Ints, length: Ints, offsets: Ints, size: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Segments cut at multiples of ``size`` tokens of their prompt."""
    ends = np.cumsum(length)
    before = np.concatenate([[0], ends])[offsets[:-1]]
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    high = ends - before[rows]
    low = high - length
    pieces = (high - 1) // size - low // size + 1
    which = np.repeat(np.arange(len(stream)), pieces)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    block = (low // size)[which] + nth
    a = np.maximum(low[which], block * size)
    b = np.minimum(high[which], (block + 1) * size)
    cut_offsets = np.concatenate([[0], np.cumsum(pieces)])[offsets]
    return stream[which], start[which] + a - low[which], b - a, cut_offsets


def _mix(h: Any, x: Any) -> Any:
    """One round of a 64-bit mixer (splitmix64's finaliser over h xor x)."""
    z = (h ^ x.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _chain(stream: Ints, start: Ints, length: Ints, offsets: Ints, tenant: Ints) -> Any:
    """Hash of each piece and all before it in its request: one pass a position, over all requests at once."""
    own = _mix(_mix(np.zeros(len(stream), np.uint64), stream), (start << 20) ^ length)
    counts = np.diff(offsets)
    order = np.argsort(-counts, kind="stable")
    sorted_counts = counts[order]
    head = _mix(np.full(len(counts), 0x243F6A8885A308D3, np.uint64), tenant)[order]
    at = offsets[:-1][order]
    out = np.empty(len(stream), np.uint64)
    active = len(order)
    for k in range(int(counts.max()) if len(counts) else 0):
        while active and sorted_counts[active - 1] <= k:
            active -= 1
        where = at[:active] + k
        head = _mix(head[:active], own[where])
        out[where] = head
    return out


def seen_before(keys: PrefixKeys) -> Any:
    """Blocks that a cache without limit hits: an earlier request had their key (bool per block)."""
    first = np.full(keys.distinct, len(keys), np.int64)
    at = np.arange(len(keys))
    np.minimum.at(first, keys.key, at)
    return first[keys.key] < at


def lru_hits(keys: PrefixKeys, capacity: int, last_block_first: bool = True) -> Ints:
    """Blocks that each request hits in one LRU cache of ``capacity`` blocks, requests in file order.

    A request's blocks are touched last block first, so that the end of a prompt is dropped before its
    beginning (vLLM's order of freeing); False: first block first.
    """
    n = len(keys.offsets) - 1
    touched = np.zeros(keys.distinct, np.int64) - 1  # time of each key's last touch
    order = np.empty(len(keys), np.int64)  # key touched at each time
    oldest = 0  # everything touched from this time on, and not since, is in the cache
    held = 0
    hits = np.zeros(n, np.int64)
    for i in range(n):
        a, b = int(keys.offsets[i]), int(keys.offsets[i + 1])
        if a == b:
            continue
        mine = keys.key[a:b]
        resident = touched[mine] >= oldest
        hits[i] = b - a if resident.all() else int(resident.argmin())
        held += b - a - int(np.count_nonzero(resident))
        if last_block_first:
            mine = mine[::-1]
        order[a:b] = mine
        touched[mine] = np.arange(a, b)
        while held > capacity:
            upto = min(b, oldest + 2 * (held - capacity) + 64)
            alive = touched[order[oldest:upto]] == np.arange(oldest, upto)
            dropped = np.cumsum(alive)
            if dropped[-1] < held - capacity:
                held -= int(dropped[-1])
                oldest = upto
            else:
                oldest += int(np.searchsorted(dropped, held - capacity)) + 1
                held = capacity
    return hits
