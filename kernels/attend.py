"""The loop that all decode kernels share: a run of KV tiles against one group of query heads."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_floats(pointers, mask, E4M3_BITS: tl.constexpr, COMPUTE: tl.constexpr):
    """Load stored K or V and bring it to the type of the dot; with E4M3_BITS the pointers are to uint8.

    Bits of an e4m3 number moved into a half are that number / 256 (half's bias is 15, e4m3's 7): exact, and
    it needs no float8 instructions. The caller folds the 256 into its scale.
    """
    if E4M3_BITS:
        bits = tl.load(pointers, mask=mask, other=0).to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True).to(COMPUTE)
    return tl.load(pointers, mask=mask, other=0.0).to(COMPUTE)


@triton.jit
def cap_scores(scores, cap):
    """cap * tanh(scores / cap), with scores and cap both in base 2 (multiplied by log2 e)."""
    return cap - 2.0 * cap / (tl.exp2(scores * (2.0 * LOG2E / cap)) + 1.0)


@triton.jit
def load_page_ids(table_row, tile, end, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Block ids of a tile: one id where blocks hold whole tiles, else one per token. 0 behind the end."""
    if PAGE % TILE == 0:
        ids = tl.load(table_row + tile * TILE // PAGE, mask=tile * TILE < end, other=0)
    else:
        position = tile * TILE + tl.arange(0, TILE)
        ids = tl.load(table_row + position // PAGE, mask=position < end, other=0)
    return ids


@triton.jit
def attend_tiles(
    q,
    k_head,
    v_head,
    table_row,
    stride_k_block,
    stride_k_slot,
    stride_v_block,
    stride_v_slot,
    first_tile,
    low,
    end,
    m,
    norm,
    acc,
    score_scale,
    cap,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SWAP_AB: tl.constexpr,
    E4M3_BITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold tokens ``low .. end - 1``, from tile ``first_tile`` on, into ``m, norm, acc`` and return them.

    m is the largest base-2 score, norm the sum of 2 ** (score - m), acc that sum weighing the values; ``low``
    lies in the first tile or before it. Plain form: q and acc [ROWS, DIM_PAD], m and norm [ROWS].
    SWAP_AB computes the transpose, q and acc [DIM_PAD, ROWS], so that the long side (tokens, then DIM) is the
    M of the dot: wgmma wants M >= 64. Block ids are fetched one tile ahead: an address that waits for an id
    loaded in the same iteration would cost the software pipeline all its stages but one.
    """
    slots = tl.arange(0, TILE)
    dims = tl.arange(0, DIM_PAD)
    pages = load_page_ids(table_row, first_tile, end, PAGE, TILE)
    for tile in range(first_tile, tl.cdiv(end, TILE)):
        next_pages = load_page_ids(table_row, tile + 1, end, PAGE, TILE)
        position = tile * TILE + slots
        seen = position < end
        if HAS_WINDOW:
            seen = seen & (position >= low)
        # Unseen slots are not loaded at all: a NaN there times a weight of 0 would still be a NaN.
        mask = seen[:, None]
        if DIM != DIM_PAD:
            mask = mask & (dims < DIM)[None, :]
        slot = position % PAGE
        k_rows = pages.to(tl.int64) * stride_k_block + slot * stride_k_slot
        v_rows = pages.to(tl.int64) * stride_v_block + slot * stride_v_slot
        k = load_floats(k_head + k_rows[:, None] + dims[None, :], mask, E4M3_BITS, COMPUTE)
        v = load_floats(v_head + v_rows[:, None] + dims[None, :], mask, E4M3_BITS, COMPUTE)
        if SWAP_AB:
            scores = tl.dot(k, q, input_precision=PRECISION) * score_scale
            if HAS_CAP:
                scores = cap_scores(scores, cap)
            scores = tl.where(seen[:, None], scores, float("-inf"))
            top = tl.maximum(m, tl.max(scores, 0))
            weights = tl.exp2(scores - top[None, :])
            shrink = tl.exp2(m - top)
            norm = norm * shrink + tl.sum(weights, 0)
            acc = tl.dot(tl.trans(v), weights.to(COMPUTE), acc * shrink[None, :], input_precision=PRECISION)
        else:
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * score_scale
            if HAS_CAP:
                scores = cap_scores(scores, cap)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            top = tl.maximum(m, tl.max(scores, 1))
            weights = tl.exp2(scores - top[:, None])
            shrink = tl.exp2(m - top)
            norm = norm * shrink + tl.sum(weights, 1)
            acc = tl.dot(weights.to(COMPUTE), v, acc * shrink[:, None], input_precision=PRECISION)
        m = top
        pages = next_pages
    return m, norm, acc


@triton.jit
def split_tiles(n, window, NUM_SPLITS: tl.constexpr, TILE: tl.constexpr, MIN_TILES: tl.constexpr):
    """First token seen, first tile, tiles a part, and number of parts of a sequence of n tokens."""
    low = tl.where(window > 0, tl.maximum(n - window, 0), 0)
    first_tile = low // TILE
    end_tile = tl.cdiv(n, TILE)
    part_tiles = tl.maximum(tl.cdiv(end_tile - first_tile, NUM_SPLITS), MIN_TILES)
    return low, first_tile, part_tiles, tl.cdiv(end_tile - first_tile, part_tiles)


@triton.jit
def decode_part(
    row,
    kv_head,
    first_tile,
    low,
    end,
    first_part,
    part,
    q,
    k_cache,
    v_cache,
    block_table,
    sinks,
    out,
    part_out,
    part_lse,
    stride_q_row,
    stride_q_head,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_table,
    stride_out_row,
    stride_out_head,
    score_scale,
    cap,
    v_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SWAP_AB: tl.constexpr,
    E4M3_BITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend one row's query heads of one KV head to tokens low .. end - 1, from ``first_tile`` on.

    Writes the output where ``part`` is negative, else the part and its log-sum-exp. ``first_part`` says
    whether this is the row's first part, the one that holds the sink.
    """
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PAD)
    heads = kv_head * GROUP + rows
    if SWAP_AB:
        valid = (rows < GROUP)[None, :] & (dims < DIM)[:, None]
        within = heads[None, :] * stride_q_head + dims[:, None]
        acc = tl.zeros([DIM_PAD, ROWS], tl.float32)
    else:
        valid = (rows < GROUP)[:, None] & (dims < DIM)[None, :]
        within = heads[:, None] * stride_q_head + dims[None, :]
        acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    queries = tl.load(q + row * stride_q_row + within, mask=valid, other=0.0).to(COMPUTE)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        # The sink is a logit without a value: the first part starts its softmax with it.
        sink = tl.load(sinks + heads, mask=rows < GROUP, other=0.0) * LOG2E
        m = tl.where(first_part, sink, m)
        norm = tl.where(first_part, 1.0, norm)

    m, norm, acc = attend_tiles(
        queries,
        k_cache + kv_head * stride_k_head,
        v_cache + kv_head * stride_v_head,
        block_table + row * stride_table,
        stride_k_block,
        stride_k_slot,
        stride_v_block,
        stride_v_slot,
        first_tile,
        low,
        end,
        m,
        norm,
        acc,
        score_scale,
        cap,
        PAGE,
        TILE,
        DIM,
        DIM_PAD,
        SWAP_AB,
        E4M3_BITS,
        HAS_WINDOW,
        HAS_CAP,
        COMPUTE,
        PRECISION,
    )

    # A sequence without tokens has norm = 0 (1 with a sink) and acc = 0; its output is 0.
    inverse = v_scale / tl.where(norm > 0, norm, 1.0)
    result = acc * (inverse[None, :] if SWAP_AB else inverse[:, None])
    if part < 0:
        if SWAP_AB:
            place = heads[None, :] * stride_out_head + dims[:, None]
        else:
            place = heads[:, None] * stride_out_head + dims[None, :]
        tl.store(out + row * stride_out_row + place, result.to(out.dtype.element_ty), mask=valid)
    else:
        at = part * KV_HEADS * GROUP + heads
        tl.store(part_lse + at, m + tl.log2(norm), mask=rows < GROUP)
        parts_at = at[None, :] * DIM + dims[:, None] if SWAP_AB else at[:, None] * DIM + dims[None, :]
        tl.store(part_out + parts_at, result, mask=valid)
