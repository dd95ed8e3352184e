"""Content keys: equal keys mean equal content including everything before it.

Full block k of a request is hashed into the hash of block k-1; the 64-bit results are interned into dense
ids, so that the prefix cache in the hot loop is an array lookup. With ten million distinct contents the
chance of any collision is below 1e-5. From the first block that holds a token of a stream only this request
uses, all later keys are its own: they get consecutive numbers, no hash and no table entry.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvplan.sched.jit import compiled, compiled_with_arrays
from kvplan.trace.schema import NO_STREAM, Trace


class Keys(NamedTuple):
    """Keys of all requests at one block size, shared read-only by all runs of a sweep.

    Request i's key of block k is ``stored[offset[i] + k]`` for k < shared[i], then
    ``fresh[i] + k - shared[i]``.
    """

    stored: Any  # int32
    offset: Any  # int64[n]
    shared: Any  # int32[n]
    fresh: Any  # int32[n]
    distinct: int  # how many different keys there are


@compiled
def mix(h, x):
    """One round of a 64-bit mixer (splitmix64's finaliser over h xor x)."""
    z = (h ^ x) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@compiled_with_arrays
def users_per_stream(offsets, stream, output_stream, n_streams):
    """0, 1 or 2 (= several) requests that use each stream; a request counts once."""
    users = np.zeros(n_streams, np.int8)
    last = np.full(n_streams, -1, np.int64)
    for i in range(len(offsets) - 1):
        for g in range(offsets[i], offsets[i + 1]):
            s = stream[g]
            if last[s] != i:
                last[s] = i
                users[s] = min(users[s] + 1, 2)
        s = output_stream[i]
        if s >= 0 and last[s] != i:
            last[s] = i
            users[s] = min(users[s] + 1, 2)
    return users


@compiled_with_arrays
def shared_blocks(offsets, stream, length, output_stream, users, n_tokens, block_size):
    """Per request: full blocks before the first token of a stream of its own."""
    n = len(offsets) - 1
    shared = np.zeros(n, np.int32)
    for i in range(n):
        tokens = np.int64(0)
        private = offsets[i] == offsets[i + 1]
        for g in range(offsets[i], offsets[i + 1]):
            if users[stream[g]] < 2:
                private = True
                break
            tokens += length[g]
        if not private and output_stream[i] >= 0 and users[output_stream[i]] >= 2:
            tokens = n_tokens[i]
        shared[i] = min(tokens, n_tokens[i]) // block_size
    return shared


@compiled
def intern(table_hash, table_id, h, next_id):
    """Dense id of a hash: an open-addressing table; a new hash gets next_id."""
    mask = np.uint64(len(table_hash) - 1)
    at = h & mask
    while table_id[at] >= 0:
        if table_hash[at] == h:
            return table_id[at]
        at = (at + np.uint64(1)) & mask
    table_hash[at] = h
    table_id[at] = next_id
    return next_id


@compiled_with_arrays
def fill_keys(
    offsets, stream, start, length, output_stream, shared, n_keys, block_size, stored, key_offset, fresh
):
    """Write all keys; returns how many distinct ones there are."""
    capacity = 16
    while capacity < 2 * len(stored):
        capacity *= 2
    table_hash = np.zeros(capacity, np.uint64)
    table_id = np.full(capacity, -1, np.int32)
    next_id = 0
    for i in range(len(offsets) - 1):
        g = offsets[i]
        last = offsets[i + 1]
        if g < last:
            s, at, left = stream[g], start[g], length[g]
        else:
            s, at, left = output_stream[i], np.int64(0), np.int64(1 << 62)
        h = np.uint64(0x243F6A8885A308D3)
        for k in range(shared[i]):
            want = np.int64(block_size)
            piece_stream, piece_start, piece = np.int64(-1), np.int64(0), np.int64(0)
            while want > 0:
                while left == 0:
                    g += 1
                    if g < last:
                        s, at, left = stream[g], start[g], length[g]
                    else:
                        s, at, left = output_stream[i], np.int64(0), np.int64(1 << 62)
                used = min(want, left)
                if s == piece_stream and at == piece_start + piece:
                    piece += used  # runs on: one piece, however the trace cut it
                else:
                    if piece > 0:
                        h = mix(
                            mix(mix(h, np.uint64(piece_stream)), np.uint64(piece_start)), np.uint64(piece)
                        )
                    piece_stream, piece_start, piece = s, at, used
                at += used
                left -= used
                want -= used
            h = mix(mix(mix(h, np.uint64(piece_stream)), np.uint64(piece_start)), np.uint64(piece))
            key = intern(table_hash, table_id, h, next_id)
            if key == next_id:
                next_id += 1
            stored[key_offset[i] + k] = key
    for i in range(len(offsets) - 1):
        fresh[i] = next_id
        next_id += n_keys[i] - shared[i]
    return next_id


def make_keys(trace: Trace, stop_tokens: Any, block_size: int) -> Keys:
    """Keys of every full block that can ever be written: (stop - 1) // block_size per request.

    ``stop_tokens``: int array, prompt + answer of each request. The last token of an answer never gets KV.
    """
    n = len(trace)
    n_tokens = np.maximum(np.asarray(stop_tokens, np.int64) - 1, 0)
    n_keys = n_tokens // block_size
    if trace.has_content:
        stream, output_stream, n_streams = _scope_streams(trace)
        users = users_per_stream(trace.segment_offsets, stream, output_stream, n_streams)
        shared = shared_blocks(
            trace.segment_offsets, stream, trace.segment_length, output_stream, users, n_tokens, block_size
        )
    else:
        stream, output_stream = trace.segment_stream, np.full(n, NO_STREAM, np.int64)
        shared = np.zeros(n, np.int32)
    offset = np.zeros(n, np.int64)
    np.cumsum(shared[:-1], out=offset[1:])
    stored = np.empty(int(shared.sum()), np.int32)
    fresh = np.empty(n, np.int32)
    count = fill_keys(
        trace.segment_offsets, stream, trace.segment_start, trace.segment_length, output_stream,
        shared, n_keys, block_size, stored, offset, fresh,
    )  # fmt: skip
    return Keys(stored, offset, shared, fresh, int(count))


def _scope_streams(trace: Trace) -> tuple[Any, Any, int]:
    """Streams renumbered densely, apart for each tenant: equal content of two tenants never matches."""
    owner = np.repeat(trace.tenant_id, np.diff(trace.segment_offsets))
    outputs = trace.output_stream
    has = outputs != NO_STREAM
    all_streams = np.concatenate([trace.segment_stream, outputs[has]])
    all_owners = np.concatenate([owner, trace.tenant_id[has]])
    if len(trace.tenant_names) > 1:
        _, streams = np.unique(all_streams, return_inverse=True)
        _, dense = np.unique(
            streams.astype(np.int64) * len(trace.tenant_names) + all_owners, return_inverse=True
        )
    else:
        _, dense = np.unique(all_streams, return_inverse=True)
    dense = dense.astype(np.int64)
    scoped = np.full(len(trace), NO_STREAM, np.int64)
    scoped[has] = dense[len(owner) :]
    return dense[: len(owner)], scoped, int(dense.max()) + 1 if len(dense) else 0
