"""The scheduler, the block pool and the run loop: vLLM V1 step for step, compiled.

Numbers in brackets, as in [3.1], are sections of the rules this file follows (see tests/sched). All compiled
functions that call each other stay in this one module, since numba's disk cache watches only the caller's
file. State is a handful of record arrays: a NamedTuple with many columns costs 8x (every array in it is
copied at each call). Blocks are numbered 0..N-1; block 0 is the null block and never used [5.1]; row N of the
block table is the sentinel of the free queue.

Several KV groups (hybrid models [8]) share the pool: a slot's row of `table` holds their block tables one
after the other, all of the same length; 0 stands for a block that is no longer, or never was, needed. Group g
finds its contents in `first_block` at the key plus its own offset, so a block knows its group by its key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvplan.sched.jit import compiled

BLOCK = np.dtype(
    [
        ("next", np.int32),  # in the free queue
        ("prev", np.int32),
        ("ref", np.int32),  # block tables that name it; 0 = in the free queue
        ("key", np.int32),  # content of the full block, -1 = none
        ("twin_next", np.int32),  # ring of blocks with the same content, oldest first
        ("twin_prev", np.int32),
    ],
    align=True,
)
SLOT = np.dtype(
    [
        ("request", np.int32),  # -1 = spare
        ("prompt", np.int32),
        ("length", np.int32),  # prompt + outputs delivered so far
        ("stop", np.int32),  # length at which the request ends
        ("computed", np.int32),  # tokens whose KV is written or scheduled
        ("held", np.int32),  # blocks in its table
        ("cached", np.int32),  # leading blocks that carry a key
        ("event", np.int32),  # computed length from which `grow` must run
        ("tokens", np.int32),  # scheduled in this step
        ("grown", np.int32),  # blocks added in this step
        ("flight", np.int32),  # outputs sampled on the device, not yet delivered (async)
        ("passed", np.int32),  # leading blocks whose states were given back
        ("pending", np.int32),  # tokens in batches not yet delivered (async with windows)
        ("last_token_s", np.float64),
    ],
    align=True,
)
REQUEST = np.dtype(
    [
        ("arrival_s", np.float64),  # in the trace
        ("arrived_s", np.float64),  # at the engine (later than arrival_s in a closed loop)
        ("patience_s", np.float64),  # cancel or deadline after arrival; inf = never
        ("first_scheduled_s", np.float64),
        ("first_token_s", np.float64),
        ("last_token_s", np.float64),
        ("finish_s", np.float64),
        ("key_offset", np.int64),
        ("key_shared", np.int32),  # leading keys stored at key_offset ...
        ("key_fresh", np.int32),  # ... then consecutive numbers from here: content of its own
        ("prompt", np.int32),
        ("stop", np.int32),
        ("reserve", np.int32),  # tokens reserved at admission (contiguous baselines), 0 = paged
        ("rank", np.int32),  # place in (priority, arrival, file order)
        ("outputs", np.int32),
        ("preemptions", np.int32),
        ("hit", np.int32),  # prefix tokens found at the first admission
        ("lost", np.int32),  # computed tokens given up at the last preemption
        ("flight", np.int32),
        ("status", np.int32),
        ("impatience", np.int32),  # the status when patience ends: CANCELLED or TIMED_OUT
        ("junction", np.int32),  # tokens that one kind of group had cached at the last try, but not all [8.7]
        ("stuck", np.int32),  # outputs + 1 when it last ran out of blocks while alone
    ],
    align=True,
)
GROUP = np.dtype(
    [
        ("kind", np.int32),  # FULL, WINDOW, CHUNK, STATE or FIXED
        ("span", np.int32),  # window or chunk in tokens; 2 of a STATE
        ("cap", np.int32),  # most blocks asked for at admission [8.4]
        ("keep", np.int32),  # blocks cached before each boundary [8.7]; -1 = all
        ("lookup", np.int32),  # groups of equal kind and size are looked up together, in this order
        ("first", np.int32),  # first block of the hit of the latest lookup
        ("offset", np.int64),  # of its keys in `first_block`
    ],
    align=True,
)
_COUNTS = (
    "free running head tail n_waiting spare next live done new resumed preempted finished first batch "
    "skipped flights oldest cached_idle shared table_blocks live_tokens step items rows "
    "queries hits resumed_queries resumed_hits preemptions recomputed scheduled rejected expired "
    "steps peak_running peak_used itl_count sampled t_query t_hit t_rquery t_rhit free_before"
)  # fmt: skip
_SUMS = (
    "now gpu_free end0 end1 next_expiry last_release last_delivery time_total "
    "s_used s_shared s_cached s_live_tokens s_table_blocks s_running s_waiting s_queued_time "
    "itl_sum itl_sum2 kv_decode kv_window pairs context prefill decode_rows"
)  # fmt: skip
COUNT = np.dtype([(n, np.int64) for n in _COUNTS.split()] + [(n, np.float64) for n in _SUMS.split()])

# Constants are numpy integers: numba compiles a function anew for each literal argument it is called with.
# Request status.
PENDING, WAITING, ACTIVE, DONE, TOO_LONG, NO_ROOM, CANCELLED, TIMED_OUT, EMPTY = np.arange(9, dtype=np.int32)

# Kinds of groups: layers that keep every token, the last `span`, the chunk of `span` that is being written;
# one running state, with copies of it cached at block boundaries (a window of 2 tokens), or in one block for
# good [8.5].
FULL, WINDOW, CHUNK, STATE, FIXED = np.arange(5, dtype=np.int32)

# Rows of `lists`. A batch in flight has four rows; two batches can be in flight.
RUNNING, SPARE, NEW, RESUMED, PREEMPTED, FINISHED, FIRST, SKIPPED, BATCH = np.arange(9)
B_SLOT, B_REQUEST, B_TOKENS, B_SAMPLED = np.arange(4)
N_LISTS = int(BATCH) + 8

# Why `run` returned.
STEPS_DONE, ALL_DONE, LOG_FULL = range(3)

# Columns of a step row.
STEP_COLUMNS = [
    "start_s",
    "end_s",
    "step",
    "running",
    "waiting",
    "used_blocks",
    "cached_blocks",
    "shared_blocks",
    "table_blocks",
    "live_tokens",
    "scheduled_tokens",
    "preemptions",
    "finished",
]
# Columns of a decision row: scalars, then the ends of its lists in `items`.
DECISION_SCALARS = [
    "step",
    "n_waiting",
    "free_before",
    "free_after_schedule",
    "free_after_update",
    "used_after_schedule",
    "cache_query_tokens",
    "cache_hit_tokens",
    "preempt_cache_query_tokens",
    "preempt_cache_hit_tokens",
]
DECISION_LISTS = [
    "sched_req",
    "sched_tok",
    "new",
    "resumed",
    "preempted",
    "running",
    "waiting_head",
    "alloc_block_ids",
    "finished",
    "first_token",
    "free_head8",
]

N_SCALARS = np.int64(len(DECISION_SCALARS))
ITL_BUCKETS = 2560
ITL_FLOOR_S = 1e-6
ITL_RATIO = 1.01


class Rules(NamedTuple):
    """Engine settings as plain Python ints (one exact type each: numba compiles one signature)."""

    num_blocks: int  # with the null block
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    chunked_prefill: bool
    long_prefill_token_threshold: int
    lone_request_exempt: bool  # 0.32: the threshold spares a request that is alone [2.3]
    prefix_caching: bool
    priority: bool
    watermark_blocks: int
    reserve_full_isl: bool
    unhashed_to_front: bool  # from 0.26 [6.2]
    shift_by_position: bool  # from 0.29 [4.3]
    asynchronous: bool
    max_concurrency: int  # closed loop; 0 = open
    record: bool
    hybrid: bool = False  # anything but one group of full attention
    states: bool = False  # a group is of kind STATE


class Clock(NamedTuple):
    """What a step costs, in seconds; tables are indexed by scheduled tokens and by sampling rows."""

    linear_s: Any  # float64[tokens + 1]: GEMMs, MoE, communication, small kernels
    head_s: Any  # float64[rows + 1]: logits and sampling
    decode_fixed_s: float
    decode_kv_s: float  # per cached token read by one-token rows
    decode_window_s: float  # the same in windowed layers, contexts cut at `window`
    window: int
    prefill_fixed_s: float
    prefill_pair_s: float  # per (new token, visible token) pair of a chunk
    prefill_token_s: float
    prefill_context_s: float  # per already computed token of a chunk
    cpu_s: float  # schedule and prepare
    cpu_per_request_s: float
    update_s: float
    update_per_request_s: float
    launch_s: float
    ttft_s: float  # tokenise and HTTP: added to what a client sees, never to a step
    ttft_per_token_s: float
    fixed_step_s: float  # > 0: every step lasts this long (`--clock steps`)


class State(NamedTuple):
    block: Any  # BLOCK[num_blocks + 1]
    slot: Any  # SLOT[max_num_seqs]
    request: Any  # REQUEST[n]
    count: Any  # COUNT[1]
    table: Any  # int32[max_num_seqs, groups * blocks of the longest request]
    lists: Any  # int32[N_LISTS, max_num_seqs + 1]; the last column of a batch holds its size
    waiting: Any  # int32[n]: FCFS queue between head and tail, or a heap by rank
    keys: Any  # int32: stored keys of all requests
    first_block: Any  # int32[groups * keys]: oldest block with that content, -1 = none
    itl: Any  # int64[ITL_BUCKETS]
    rows: Any  # float64[capacity, STEP_COLUMNS]
    decisions: Any  # int64[capacity, scalars + lists]
    items: Any  # int32: the lists of the decisions
    group: Any  # GROUP[groups]
    stamp: Any  # int64[num_blocks] with states, else [1]: step + 1 in which a state was cached


# ---------------------------------------------------------------------------------------------- block pool


# The functions of the pool take the arrays they touch, not the State: they run once a block, and handing over
# all arrays of a State costs more than the work itself. `c` is the row of counters.


@compiled
def unlink(block, b):
    block[block[b].prev].next = block[b].next
    block[block[b].next].prev = block[b].prev


@compiled
def link_after(block, at, b):
    after = block[at].next
    block[b].prev = at
    block[b].next = after
    block[after].prev = b
    block[at].next = b


@compiled
def forget(block, first_block, b):
    """Take the block's content out of the table; the next oldest twin answers for it from now on."""
    key = block[b].key
    twin = block[b].twin_next
    if twin == b:
        first_block[key] = -1
    else:
        block[block[b].twin_prev].twin_next = twin
        block[twin].twin_prev = block[b].twin_prev
        if first_block[key] == b:
            first_block[key] = twin
    block[b].key = -1


@compiled
def remember(block, first_block, b, key):
    """Enter a full block's content; duplicates stand behind the older ones [5.5]."""
    block[b].key = key
    first = first_block[key]
    if first < 0:
        first_block[key] = b
        block[b].twin_next = b
        block[b].twin_prev = b
    else:
        last = block[first].twin_prev
        block[last].twin_next = b
        block[b].twin_prev = last
        block[b].twin_next = first
        block[first].twin_prev = b


@compiled
def take(block, first_block, c):
    """Pop the head of the free queue; content it still holds is evicted at this moment [6.1]."""
    b = block[block.shape[0] - 1].next
    unlink(block, b)
    if block[b].key >= 0:
        forget(block, first_block, b)
        c.cached_idle -= 1
    block[b].ref = 1
    c.free -= 1
    return b


@compiled
def touch(block, c, b):
    """Share a hit block; an idle one leaves the free queue [5.7]."""
    if block[b].ref == 0:
        unlink(block, b)
        c.free -= 1
        c.cached_idle -= 1
    elif block[b].ref == 1:
        c.shared += 1
    block[b].ref += 1


@compiled
def drop(block, c, table, low, high, unhashed_to_front):
    """Free high-1..low: unhashed to the front, hashed to the end [6.2]. Returns their number."""
    sentinel = np.int32(block.shape[0] - 1)
    front = sentinel
    dropped = np.int64(0)
    for k in range(high - 1, low - 1, -1):
        b = table[k]
        if b == 0:
            continue
        dropped += 1
        block[b].ref -= 1
        if block[b].ref == 1:
            c.shared -= 1
        elif block[b].ref == 0:
            c.free += 1
            hashed = block[b].key >= 0
            if hashed:
                c.cached_idle += 1
            if hashed or not unhashed_to_front:
                link_after(block, block[sentinel].prev, b)
            else:
                link_after(block, front, b)
                front = b
    c.table_blocks -= dropped
    return dropped


@compiled
def release(block, c, table, R, slot, group):
    """Free a slot's blocks, group by group, tail first."""
    width = table.shape[0] // group.shape[0]
    for g in range(group.shape[0]):
        dropped = drop(block, c, table, g * width, g * width + slot.held, R.unhashed_to_front)
        if group[g].kind >= STATE:
            c.live_tokens -= dropped * R.block_size
        else:  # but for what a window had given back before
            c.live_tokens -= slot.computed - (slot.held - dropped) * R.block_size
    slot.held = 0


@compiled
def key_of(row, keys, k):
    """Content key of full block k of a request (prompt and answer)."""
    if k < row.key_shared:
        return keys[row.key_offset + k]
    return row.key_fresh + k - row.key_shared


@compiled
def set_event(R, slot):
    event = slot.held * R.block_size + 1
    if R.prefix_caching:
        event = min(event, (slot.cached + 1) * R.block_size)
    slot.event = event


@compiled
def remember_full(block, first_block, keys, row, table, R, slot, full):
    """Enter a slot's blocks up to `full` into the content table when scheduled, not when computed [5.4]."""
    for k in range(slot.cached, full):
        remember(block, first_block, table[k], key_of(row, keys, k))
    if full > slot.cached:
        slot.cached = full
    set_event(R, slot)


@compiled
def grow(block, first_block, keys, row, table, R, c, slot, n):
    """Blocks for n more tokens of a slot; False when the pool has too few [4.1]."""
    total = slot.computed + n
    need = (total + R.block_size - 1) // R.block_size - slot.held
    if need > c.free:
        return False
    for k in range(slot.held, slot.held + need):
        table[k] = take(block, first_block, c)
    if need > 0:
        slot.held += need
        slot.grown += need
        c.table_blocks += need
    if R.prefix_caching:
        full = min(total, slot.length) // R.block_size
        remember_full(block, first_block, keys, row, table, R, slot, full)
    else:
        set_event(R, slot)
    return True


@compiled
def lookup(row, keys, first_block, full):
    """Leading blocks of the request found in the table, at most `full` [5.6]."""
    hits = np.int64(0)
    while hits < full and first_block[key_of(row, keys, hits)] >= 0:
        hits += 1
    return hits


@compiled
def idle_among(row, keys, first_block, block, hits):
    """How many of the hit blocks are free: a hit on such a block costs a free block [3.1]."""
    idle = np.int64(0)
    for k in range(hits):
        if block[first_block[key_of(row, keys, k)]].ref == 0:
            idle += 1
    return idle


# ------------------------------------------------------------------------------------------ several groups


@compiled
def skipped_blocks(kind, size, tokens, block_size):
    """Leading blocks of a group that no query after the first `tokens` tokens reads [8.4]."""
    if kind in (WINDOW, STATE):
        return max(tokens - size + 1, 0) // block_size
    if kind == CHUNK:
        return tokens // size * size // block_size
    return tokens * 0


@compiled
def drop_skipped(block, table, R, c, slot, group):
    """Give back the blocks that no later query reads, as far as the outputs have come back [8.4]."""
    width = table.shape[0] // group.shape[0]
    delivered = slot.computed - slot.pending
    for g in range(group.shape[0]):
        at = g * width
        high = at + min(skipped_blocks(group[g].kind, group[g].span, delivered, R.block_size), slot.held)
        low = high
        if group[g].kind == STATE:  # among blocks that were never taken
            low = min(high, at + slot.passed)
        else:
            while low > at and table[low - 1] != 0:
                low -= 1
        if low < high:
            dropped = drop(block, c, table, low, high, R.unhashed_to_front)
            c.live_tokens -= dropped * R.block_size
            table[low:high] = 0
    if R.states:
        slot.passed = max(slot.passed, min(skipped_blocks(STATE, 2, delivered, R.block_size), slot.held))


@compiled
def remember_groups(block, first_block, keys, row, table, R, slot, full, group, stamp, now):
    """`remember_full` for all groups; windows keep what a replay or a shared prefix asks for [8.7]."""
    width = table.shape[0] // group.shape[0]
    replay = (row.prompt - 1) // R.block_size
    junction = row.junction // R.block_size
    for g in range(group.shape[0]):
        at = g * width
        keep = group[g].keep
        offset = group[g].offset
        for k in range(slot.cached, full):
            if keep < 0 or 0 < replay - k <= keep or 0 < junction - k <= keep:
                b = table[at + k]
                if b != 0:
                    remember(block, first_block, b, np.int32(offset + key_of(row, keys, k)))
                    if group[g].kind == STATE:
                        stamp[b] = now
    slot.cached = max(slot.cached, full)


@compiled
def set_event_groups(R, slot, group):
    """As `set_event`, and not later than the next block that leaves a window."""
    set_event(R, slot)
    delivered = slot.computed - slot.pending
    for g in range(group.shape[0]):
        size = group[g].span
        if group[g].kind in (WINDOW, STATE):
            gone = skipped_blocks(group[g].kind, size, delivered, R.block_size)
            slot.event = min(slot.event, (gone + 1) * R.block_size + size - 1)
        elif group[g].kind == CHUNK:
            slot.event = min(slot.event, (delivered // size + 1) * size)


@compiled
def new_in_group(kind, held, blocks):
    """How many of the entries held..blocks-1 of a table get a block: of states only the last [8.5]."""
    if kind == FIXED:
        return np.int64(held == 0 and blocks > 0)
    if kind == STATE:
        return np.int64(blocks > held)
    return np.int64(max(blocks - held, 0))


@compiled
def new_blocks(group, held, blocks):
    """`new_in_group` of all groups."""
    need = np.int64(0)
    for g in range(group.shape[0]):
        need += new_in_group(group[g].kind, held, blocks)
    return need


@compiled
def lengthen(block, first_block, c, table, R, group, held, blocks):
    """Take entries held..blocks-1 of every group's table, group by group."""
    width = table.shape[0] // group.shape[0]
    for g in range(group.shape[0]):
        kind = group[g].kind
        at = g * width
        new = new_in_group(kind, held, blocks)
        first = at if kind == FIXED and new > 0 else at + blocks - new
        if kind >= STATE:
            table[at + held : at + blocks] = 0
            c.live_tokens += new * R.block_size
        for k in range(first, first + new):
            table[k] = take(block, first_block, c)
        c.table_blocks += new


@compiled
def grow_groups(block, first_block, keys, row, table, R, c, slot, n, group, stamp):
    """`grow` for all groups: what left the windows is given back first, also when it is not enough [8.1]."""
    drop_skipped(block, table, R, c, slot, group)
    total = slot.computed + n
    blocks = (total + R.block_size - 1) // R.block_size
    if new_blocks(group, slot.held, blocks) > c.free:
        return False
    if blocks > slot.held:
        lengthen(block, first_block, c, table, R, group, slot.held, blocks)
        slot.grown += blocks - slot.held
        slot.held = blocks
    if R.prefix_caching:
        full = min(total, slot.length) // R.block_size
        remember_groups(block, first_block, keys, row, table, R, slot, full, group, stamp, c.steps + 1)
    set_event_groups(R, slot, group)
    return True


@compiled
def has_content(row, keys, first_block, group, lookup, k):
    """Whether all groups that are looked up together hold the request's block k."""
    key = key_of(row, keys, k)
    for g in range(group.shape[0]):
        if group[g].lookup == lookup and first_block[group[g].offset + key] < 0:
            return False
    return True


@compiled
def lookup_kind(row, keys, first_block, group, lookup, bound, block_size):
    """Blocks of the longest hit of at most `bound` tokens in the groups of one kind [5.6, 8.6]."""
    at = 0
    while group[at].lookup != lookup:
        at += 1
    kind = group[at].kind
    size = group[at].span
    limit = np.int64(bound // block_size)
    if kind in (WINDOW, STATE):  # right to left to a whole window; a shorter run counts from block 0 on
        enough = (size - 1 + block_size - 1) // block_size
        end = first = limit
        while first > 0 and end - first < enough:
            first -= 1
            if not has_content(row, keys, first_block, group, lookup, first):
                end = first
    else:  # left to right; blocks before the chunk count as present
        end = first = np.int64(skipped_blocks(kind, size, bound, block_size))
        while end < limit and has_content(row, keys, first_block, group, lookup, end):
            end += 1
    for g in range(group.shape[0]):
        if group[g].lookup == lookup:
            group[g].first = first
    return end


@compiled
def lookup_groups(row, keys, first_block, group, R, num_tokens):
    """Leading blocks found in every group; notes where some kind had more [8.6, 8.7]."""
    kinds = 0
    for g in range(group.shape[0]):
        kinds = max(kinds, group[g].lookup + 1)
        group[g].first = 0
    row.junction = 0
    if not R.prefix_caching:
        return np.int64(0)
    beside_full = False  # full attention and one other kind: one pass is stable
    for g in range(group.shape[0]):
        beside_full = beside_full or group[g].kind == FULL
    bound = np.int64(num_tokens - 1)
    longest = np.int64(0)
    while True:
        before = bound
        for lookup in range(kinds):
            bound = R.block_size * lookup_kind(row, keys, first_block, group, lookup, bound, R.block_size)
            longest = max(longest, bound)
        if kinds == 1 or (kinds == 2 and beside_full) or bound == before:
            break
    hits = bound // R.block_size
    if longest > bound:
        row.junction = longest
    for g in range(group.shape[0]):  # what the next query does not read is not touched
        skipped = skipped_blocks(group[g].kind, group[g].span, bound, R.block_size)
        group[g].first = min(max(group[g].first, skipped), hits)
    return hits


@compiled
def idle_in_groups(row, keys, first_block, block, group, hits):
    """`idle_among` over all groups."""
    idle = np.int64(0)
    for g in range(group.shape[0]):
        for k in range(group[g].first, hits):
            if block[first_block[group[g].offset + key_of(row, keys, k)]].ref == 0:
                idle += 1
    return idle


@compiled
def whole_blocks(group, whole, hits):
    """New blocks of a whole sequence as admission counts them: of windows no more than their cap [8.4]."""
    need = np.int64(0)
    for g in range(group.shape[0]):
        need += new_in_group(group[g].kind, hits, min(whole, group[g].cap))
    return need


@compiled
def admit_groups(block, first_block, keys, row, table, R, c, hits, blocks, group):
    """Hit blocks of every group first, then new ones, group by group."""
    width = table.shape[0] // group.shape[0]
    entries = np.int64(0)
    for g in range(group.shape[0]):
        at = g * width
        first = group[g].first
        table[at : at + first] = 0
        for k in range(first, hits):
            b = first_block[group[g].offset + key_of(row, keys, k)]
            touch(block, c, b)
            table[at + k] = b
        entries += hits - first
    c.table_blocks += entries
    c.live_tokens += entries * R.block_size
    lengthen(block, first_block, c, table, R, group, hits, blocks)


@compiled
def is_new_state(row, keys, first_block, group, stamp, hits, now):
    """Whether the hit ends in a state that another request computes in this very step [5.4]."""
    if hits == 0:
        return False
    key = key_of(row, keys, hits - 1)
    for g in range(group.shape[0]):
        if group[g].kind == STATE and stamp[first_block[group[g].offset + key]] == now:
            return True
    return False


@compiled
def cut(row, R, length, first, n):
    """With states in layers, a prefill chunk ends where one can be cached, or at the prompt's end [8.5]."""
    if first >= max(row.prompt, length - 1):
        return n  # decode
    end = first + n
    last = (length - 1) // R.block_size * R.block_size
    if end < last:
        end = end // R.block_size * R.block_size
    junction = row.junction // R.block_size * R.block_size
    if first < junction and junction < end:
        return junction - first
    if first < last and last < end:
        return last - first
    return max(end - first, 0)


@compiled
def token_groups(group):
    """Groups that write a position for each token; states do not."""
    groups = 0
    for g in range(group.shape[0]):
        groups += group[g].kind < STATE
    return groups


@compiled
def never_fits(row, R, group):
    """Whether the pool cannot hold the request even alone: rejected, where the engine would hang."""
    usable = R.num_blocks - 1
    end = (max(row.stop - 1, row.reserve) + R.block_size - 1) // R.block_size
    if not R.hybrid:
        return end > usable
    prompt = (row.prompt + R.block_size - 1) // R.block_size
    held = np.int64(0)
    for g in range(group.shape[0]):
        if group[g].kind == FIXED:
            held += 1
        else:
            held += end - skipped_blocks(group[g].kind, group[g].span, np.int64(row.stop - 2), R.block_size)
    return held > usable or (R.reserve_full_isl and whole_blocks(group, prompt, 0) > usable)


# ------------------------------------------------------------------------------------------- waiting queue


@compiled
def heap_push(S, r):
    c = S.count[0]
    i = c.tail
    c.tail += 1
    while i > 0:
        parent = (i - 1) // 2
        if S.request[S.waiting[parent]].rank <= S.request[r].rank:
            break
        S.waiting[i] = S.waiting[parent]
        i = parent
    S.waiting[i] = r


@compiled
def heap_pop(S):
    c = S.count[0]
    c.tail -= 1
    r = S.waiting[c.tail]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= c.tail:
            break
        if child + 1 < c.tail and S.request[S.waiting[child + 1]].rank < S.request[S.waiting[child]].rank:
            child += 1
        if S.request[r].rank <= S.request[S.waiting[child]].rank:
            break
        S.waiting[i] = S.waiting[child]
        i = child
    if c.tail > 0:
        S.waiting[i] = r


@compiled
def enqueue(S, R, r):
    """An arrival joins the queue at its end, or a heap at its place."""
    c = S.count[0]
    S.request[r].status = WAITING
    c.n_waiting += 1
    if R.priority:
        heap_push(S, r)
    else:
        S.waiting[c.tail] = r
        c.tail += 1


@compiled
def requeue(S, R, r):
    """A preempted request goes back to the head (FCFS) or to its place (priority) [4.4]."""
    c = S.count[0]
    S.request[r].status = WAITING
    c.n_waiting += 1
    if R.priority:
        heap_push(S, r)
    else:
        c.head -= 1  # always room: each running request was taken from the head
        S.waiting[c.head] = r


@compiled
def candidate(S, R, p):
    """Position of the next request that may be admitted, from p on; -1 when there is none.

    Passed over: requests that ended while waiting (dropped), and victims whose last output is still in
    flight (kept, in order, at the head) [1.3].
    """
    c = S.count[0]
    if R.priority:
        while c.tail > 0:
            r = S.waiting[0]
            if S.request[r].status == WAITING and S.request[r].flight == 0:
                return 0
            heap_pop(S)
            if S.request[r].status == WAITING:
                S.lists[SKIPPED, c.skipped] = r
                c.skipped += 1
        return -1
    while p < c.tail:
        r = S.waiting[p]
        if S.request[r].status == WAITING and S.request[r].flight == 0:
            return p
        if S.request[r].status != WAITING and p == c.head:
            c.head += 1
        p += 1
    return -1


@compiled
def dequeue(S, R, p):
    c = S.count[0]
    c.n_waiting -= 1
    if R.priority:
        heap_pop(S)
        return
    for q in range(p, c.head, -1):
        S.waiting[q] = S.waiting[q - 1]
    c.head += 1


# ----------------------------------------------------------------------------------------------- scheduler


@compiled
def victim_index(S, R):
    """Latest admitted (FCFS); worst priority, then latest arrival [4.2].

    Requests that share an arrival time arrived in file order: two live ones never tie, as on a real clock.
    """
    c = S.count[0]
    if not R.priority:
        return c.running - 1
    worst = 0
    rank = -1
    for i in range(c.running):
        its = S.request[S.slot[S.lists[RUNNING, i]].request].rank
        if its > rank:
            rank = its
            worst = i
    return worst


@compiled
def vacate(S, s):
    c = S.count[0]
    S.slot[s].request = -1
    S.lists[SPARE, c.spare] = s
    c.spare += 1


@compiled
def preempt(S, R, v):
    """Take running[v] off its blocks and back to the waiting queue; outputs are kept [4.4]."""
    c = S.count[0]
    s = S.lists[RUNNING, v]
    slot = S.slot[s]
    r = slot.request
    row = S.request[r]
    for i in range(v, c.running - 1):
        S.lists[RUNNING, i] = S.lists[RUNNING, i + 1]
    c.running -= 1
    release(S.block, c, S.table[s], R, slot, S.group)
    row.outputs = slot.length - slot.prompt
    row.lost = slot.computed
    row.flight = slot.flight
    row.last_token_s = slot.last_token_s
    row.preemptions += 1
    c.preemptions += 1
    S.lists[PREEMPTED, c.preempted] = r
    c.preempted += 1
    requeue(S, R, r)
    vacate(S, s)


@compiled
def give_up_stuck(S, r):
    """A request that ran out of blocks while alone; the second time without a token more, it is rejected.

    With one full group this cannot happen (see `never_fits`); how much windows hold depends on the chunks.
    """
    c = S.count[0]
    row = S.request[r]
    if row.stuck == row.outputs + 1:
        c.n_waiting -= 1
        finish(c, row, NO_ROOM)
        c.rejected += 1
    row.stuck = row.outputs + 1


@compiled
def admit(S, R, r, hits, blocks, n):
    """Give a waiting request a slot, its hit blocks and new ones for its first n tokens."""
    c = S.count[0]
    row = S.request[r]
    c.spare -= 1
    s = S.lists[SPARE, c.spare]
    slot = S.slot[s]
    slot.request = r
    slot.prompt = row.prompt
    slot.length = row.prompt + row.outputs
    slot.stop = row.stop
    slot.computed = hits * R.block_size
    slot.cached = hits
    slot.flight = 0
    slot.pending = 0
    slot.passed = 0
    slot.grown = blocks
    slot.last_token_s = row.last_token_s
    block, first_block, keys, table = S.block, S.first_block, S.keys, S.table[s]
    slot.held = blocks
    if R.hybrid:
        group = S.group
        admit_groups(block, first_block, keys, row, table, R, c, hits, blocks, group)
        if R.prefix_caching:
            full = min(slot.computed + n, slot.length) // R.block_size
            now = c.steps + 1
            remember_groups(block, first_block, keys, row, table, R, slot, full, group, S.stamp, now)
        set_event_groups(R, slot, group)
    else:
        for k in range(hits):
            b = first_block[key_of(row, keys, k)]
            touch(block, c, b)
            table[k] = b
        for k in range(hits, blocks):
            table[k] = take(block, first_block, c)
        c.table_blocks += blocks
        c.live_tokens += slot.computed
        if R.prefix_caching:
            full = min(slot.computed + n, slot.length) // R.block_size
            remember_full(block, first_block, keys, row, table, R, slot, full)
        else:
            set_event(R, slot)
    S.lists[RUNNING, c.running] = s
    c.running += 1
    row.status = ACTIVE
    if row.preemptions == 0:
        row.hit = slot.computed
        row.first_scheduled_s = c.now
        if R.prefix_caching:
            c.t_query += slot.length
        c.t_hit += slot.computed
        S.lists[NEW, c.new] = r
        c.new += 1
    else:
        c.recomputed += max(0, row.lost - slot.computed)
        if R.prefix_caching:
            c.t_rquery += slot.length
        c.t_rhit += slot.computed
        S.lists[RESUMED, c.resumed] = r
        c.resumed += 1
    return s


@compiled
def schedule(S, R, batch):
    """One call of the scheduler; fills the batch's rows and the work sums of the step. Returns its tokens."""
    c = S.count[0]
    c.new = c.resumed = c.preempted = c.finished = c.first = 0
    c.t_query = c.t_hit = c.t_rquery = c.t_rhit = 0
    c.free_before = c.free
    budget = R.max_num_batched_tokens
    cap = R.long_prefill_token_threshold
    if R.lone_request_exempt and c.running + c.n_waiting <= 1:
        cap = 0
    members = S.lists[BATCH + 4 * batch + B_SLOT]
    running = S.lists[RUNNING]
    slots, requests, table = S.slot, S.request, S.table
    block, first_block, keys, group, stamp = S.block, S.first_block, S.keys, S.group, S.stamp
    size = 0

    # Running requests first, in the order of their admission [2.2].
    i = 0
    while i < c.running and budget > 0:
        s = running[i]
        slot = slots[s]
        i += 1
        if slot.flight > 0 and slot.computed + 2 - slot.flight >= slot.stop:
            continue  # certain to end with the output in flight [1.3]
        n = slot.length + slot.flight - slot.computed
        if cap > 0:
            n = min(n, cap)
        n = min(n, budget, R.max_model_len - slot.computed - 1)
        if R.states:
            n = cut(requests[slot.request], R, slot.length, slot.computed, n)
        if n <= 0:
            continue
        fits = True
        if slot.computed + n >= slot.event:
            row = requests[slot.request]
            if R.hybrid:
                fits = grow_groups(block, first_block, keys, row, table[s], R, c, slot, n, group, stamp)
            else:
                fits = grow(block, first_block, keys, row, table[s], R, c, slot, n)
        while not fits:
            v = victim_index(S, R)
            w = running[v]
            was_scheduled = slots[w].tokens > 0
            if was_scheduled:  # its tokens go back to the budget [4.3]
                budget += slots[w].tokens
                slots[w].tokens = 0
                at = 0
                while members[at] != w:
                    at += 1
                for j in range(at, size - 1):
                    members[j] = members[j + 1]
                size -= 1
            if was_scheduled or (R.shift_by_position and v < i - 1):
                i -= 1
            alone = c.running == 1
            preempt(S, R, v)
            if w == s:
                if alone:
                    give_up_stuck(S, S.lists[PREEMPTED, c.preempted - 1])
                break
            row = requests[slot.request]
            if R.hybrid:
                fits = grow_groups(block, first_block, keys, row, table[s], R, c, slot, n, group, stamp)
            else:
                fits = grow(block, first_block, keys, row, table[s], R, c, slot, n)
        if not fits:
            break
        slot.tokens = n
        budget -= n
        members[size] = s
        size += 1

    # Then the waiting ones, unless somebody was preempted in this step [2.4].
    if c.preempted == 0:
        c.skipped = 0
        p = c.head
        while budget > 0 and c.running < R.max_num_seqs:
            p = candidate(S, R, p)
            if p < 0:
                break
            r = S.waiting[p]
            row = requests[r]
            num_tokens = row.prompt + row.outputs
            # One token is always computed anew, so that a full hit leaves its last block out [5.6].
            full = (num_tokens - 1) // R.block_size if R.prefix_caching else 0
            if R.hybrid:
                hits = lookup_groups(row, keys, first_block, group, R, num_tokens)
            else:
                hits = lookup(row, keys, first_block, full)
            n = num_tokens - hits * R.block_size
            if cap > 0:
                n = min(n, cap)
            if n > budget and not R.chunked_prefill:
                break
            n = min(n, budget)
            if R.states:
                n = cut(row, R, num_tokens, hits * R.block_size, n)
                if n <= 0 or is_new_state(row, keys, first_block, group, stamp, hits, c.steps + 1):
                    break
            spare = c.free
            if R.hybrid:
                spare -= idle_in_groups(row, keys, first_block, block, group, hits)
            else:
                spare -= idle_among(row, keys, first_block, block, hits)
            if c.running > 0:
                spare -= R.watermark_blocks
            if R.reserve_full_isl:  # the whole sequence must fit now, though it is not all allocated [3.1]
                whole = (min(num_tokens, R.max_model_len) + R.block_size - 1) // R.block_size
                if R.hybrid:
                    if whole_blocks(group, whole, hits) > spare:
                        break
                elif whole - hits > spare:
                    break
            ask = max(min(hits * R.block_size + n, R.max_model_len), row.reserve)
            blocks = (ask + R.block_size - 1) // R.block_size
            if (new_blocks(group, hits, blocks) if R.hybrid else blocks - hits) > spare:
                break
            dequeue(S, R, p)
            p += 1
            s = admit(S, R, r, hits, blocks, n)
            slots[s].tokens = n
            budget -= n
            members[size] = s
            size += 1
        for j in range(c.skipped):
            heap_push(S, S.lists[SKIPPED, j])

    close_batch(S, R, batch, size)
    return R.max_num_batched_tokens - budget


@compiled
def close_batch(S, R, batch, size):
    """Advance the members; note who samples a token, and the work that the clock will price."""
    c = S.count[0]
    at = BATCH + 4 * batch
    members = S.lists[at + B_SLOT]
    requests = S.lists[at + B_REQUEST]
    tokens = S.lists[at + B_TOKENS]
    samples = S.lists[at + B_SAMPLED]
    members[R.max_num_seqs] = size
    slots = S.slot
    # Sums are kept in locals: the compiler cannot know that the counters are not part of a slot.
    n_sampled = n_decode = total = kv_decode = prefill = context = np.int64(0)
    pairs = 0.0
    for j in range(size):
        slot = slots[members[j]]
        n = slot.tokens
        before = slot.computed
        if n == 1:
            kv_decode += before + 1
            n_decode += 1
        else:
            pairs += float(n) * before + 0.5 * n * (n + 1.0)
            context += before
            prefill += n
        total += n
        slot.computed = before + n
        slot.tokens = 0
        sampled = before + n == slot.length + slot.flight
        if sampled:
            slot.flight += 1
            n_sampled += 1
        requests[j] = slot.request
        tokens[j] = n
        samples[j] = sampled
    c.batch = size
    c.sampled = n_sampled
    c.decode_rows = n_decode
    c.kv_decode = kv_decode
    c.pairs = pairs
    c.context = context
    c.prefill = prefill
    c.live_tokens += total * token_groups(S.group)
    c.scheduled += total
    if R.hybrid and R.asynchronous:
        for j in range(size):
            slots[members[j]].pending += tokens[j]


@compiled
def finish(c, row, status):
    row.status = status
    row.finish_s = c.now
    c.live -= 1
    c.done += 1
    c.last_release = c.now


@compiled
def note_itl(c, itl, gap_s, times):
    c.itl_count += times
    c.itl_sum += gap_s * times
    c.itl_sum2 += gap_s * gap_s * times
    bucket = 0
    if gap_s > ITL_FLOOR_S:
        bucket = min(int(np.log(gap_s / ITL_FLOOR_S) / np.log(ITL_RATIO)), ITL_BUCKETS - 1)
    itl[bucket] += times


@compiled
def deliver_late(S, r):
    """The output of a victim that was in flight: it may even end the request while it waits [1.3]."""
    c = S.count[0]
    row = S.request[r]
    if row.status != WAITING or row.flight == 0:  # cancelled or timed out meanwhile
        return
    row.flight -= 1
    row.outputs += 1
    if row.outputs == 1:
        row.first_token_s = c.now
        S.lists[FIRST, c.first] = r
        c.first += 1
    else:
        note_itl(c, S.itl, c.now - row.last_token_s, np.int64(1))
    row.last_token_s = c.now
    if row.prompt + row.outputs >= row.stop:
        c.n_waiting -= 1
        S.lists[FINISHED, c.finished] = r
        c.finished += 1
        finish(c, S.request[r], DONE)


@compiled
def deliver(S, R, batch):
    """Append the batch's sampled tokens at time `now`; requests that are complete leave [7.1]."""
    c = S.count[0]
    at = BATCH + 4 * batch
    members = S.lists[at + B_SLOT]
    requests = S.lists[at + B_REQUEST]
    samples = S.lists[at + B_SAMPLED]
    slots = S.slot
    now = c.now
    last_delivery = c.last_delivery
    cache_now = R.asynchronous and R.prefix_caching
    if R.hybrid and R.asynchronous:
        tokens = S.lists[at + B_TOKENS]
        for j in range(members[R.max_num_seqs]):
            if slots[members[j]].request == requests[j]:
                slots[members[j]].pending -= tokens[j]
    steady = np.int64(0)  # rows whose last token came with the last delivery share one gap
    for j in range(members[R.max_num_seqs]):
        if samples[j] == 0:
            continue
        s = members[j]
        r = requests[j]
        slot = slots[s]
        if slot.request != r:
            deliver_late(S, r)
            continue
        if slot.last_token_s == last_delivery:
            steady += 1
        elif slot.length > slot.prompt:
            note_itl(c, S.itl, now - slot.last_token_s, np.int64(1))
        if slot.length == slot.prompt:
            S.request[r].first_token_s = now
            S.lists[FIRST, c.first] = r
            c.first += 1
        slot.length += 1
        slot.flight -= 1
        slot.last_token_s = now
        if cache_now:  # before the end of the request is looked at [1.3]
            full = (slot.computed - slot.flight) // R.block_size
            if full > slot.cached and R.hybrid:  # the event stays: blocks may be about to leave a window
                row = S.request[r]
                block, first_block, keys, table = S.block, S.first_block, S.keys, S.table[s]
                never = np.int64(0)  # what was cached before a step may be read in it
                remember_groups(block, first_block, keys, row, table, R, slot, full, S.group, S.stamp, never)
            elif full > slot.cached:
                remember_full(S.block, S.first_block, S.keys, S.request[r], S.table[s], R, slot, full)
        if slot.length >= slot.stop:
            S.request[r].outputs = slot.length - slot.prompt
            release(S.block, c, S.table[s], R, slot, S.group)
            vacate(S, s)
            S.lists[FINISHED, c.finished] = r
            c.finished += 1
            finish(c, S.request[r], DONE)
    if steady > 0:
        note_itl(c, S.itl, now - last_delivery, steady)
    c.last_delivery = now
    if c.finished > 0:
        compact_running(S)


@compiled
def compact_running(S):
    c = S.count[0]
    kept = 0
    for i in range(c.running):
        s = S.lists[RUNNING, i]
        if S.slot[s].request >= 0:
            S.lists[RUNNING, kept] = s
            kept += 1
    c.running = kept


# ------------------------------------------------------------------------------------------------ the loop


@compiled
def arrive(S, R):
    """Let requests in whose time has come (and, in a closed loop, for whom a place is free)."""
    c = S.count[0]
    n = S.request.shape[0]
    while c.next < n and S.request[c.next].arrival_s <= c.now:
        if R.max_concurrency > 0 and c.live >= R.max_concurrency:
            break
        r = np.int32(c.next)
        c.next += 1
        row = S.request[r]
        row.arrived_s = row.arrival_s
        if R.max_concurrency > 0:
            row.arrived_s = max(row.arrival_s, c.last_release)
        c.live += 1
        if row.prompt < 1:  # there is nothing to compute a token from
            finish(c, row, EMPTY)
            c.rejected += 1
        elif row.prompt >= R.max_model_len:  # [3.5]
            finish(c, row, TOO_LONG)
            c.rejected += 1
        elif never_fits(row, R, S.group):
            finish(c, row, NO_ROOM)
            c.rejected += 1
        else:
            enqueue(S, R, r)
            c.next_expiry = min(c.next_expiry, row.arrived_s + row.patience_s)


@compiled
def expire(S, R):
    """End every live request whose cancel or deadline has passed; find the next such moment."""
    c = S.count[0]
    c.next_expiry = np.inf
    ended = False
    for i in range(c.running):
        s = S.lists[RUNNING, i]
        r = S.slot[s].request
        row = S.request[r]
        if row.arrived_s + row.patience_s <= c.now:
            slot = S.slot[s]
            row.outputs = slot.length - row.prompt
            release(S.block, c, S.table[s], R, slot, S.group)
            vacate(S, s)
            finish(c, row, row.impatience)
            c.expired += 1
            ended = True
        else:
            c.next_expiry = min(c.next_expiry, row.arrived_s + row.patience_s)
    if ended:
        compact_running(S)
    start = 0 if R.priority else c.head
    for p in range(start, c.tail):
        r = S.waiting[p]
        row = S.request[r]
        if row.status != WAITING:
            continue
        if row.arrived_s + row.patience_s <= c.now:
            c.n_waiting -= 1
            finish(c, row, row.impatience)
            c.expired += 1
        else:
            c.next_expiry = min(c.next_expiry, row.arrived_s + row.patience_s)


@compiled
def advance(c, usable, t):
    """Move the time on; every time-weighted mean of the run comes from here."""
    dt = t - c.now
    if dt <= 0.0:
        return
    c.s_used += (usable - c.free) * dt
    c.s_shared += c.shared * dt
    c.s_cached += c.cached_idle * dt
    c.s_live_tokens += c.live_tokens * dt
    c.s_table_blocks += c.table_blocks * dt
    c.s_running += c.running * dt
    c.s_waiting += c.n_waiting * dt
    if c.n_waiting > 0:
        c.s_queued_time += dt
    c.time_total += dt
    c.now = t


@compiled
def step_seconds(c, K, tokens):
    """Device time of the batch just closed: table by tokens, table by rows, attention terms."""
    if tokens == 0:
        return 0.0
    t = K.linear_s[min(tokens, K.linear_s.shape[0] - 1)] + K.head_s[min(c.sampled, K.head_s.shape[0] - 1)]
    if c.decode_rows > 0:
        t += K.decode_fixed_s + K.decode_kv_s * c.kv_decode + K.decode_window_s * c.kv_window
    if c.prefill > 0:
        t += K.prefill_fixed_s + K.prefill_pair_s * c.pairs + K.prefill_token_s * c.prefill
        t += K.prefill_context_s * c.context
    return t


@compiled
def window_tokens(S, batch, window):
    """Sum over one-token rows of their contexts cut at the window (after the step was closed)."""
    c = S.count[0]
    at = BATCH + 4 * batch
    total = 0.0
    for j in range(c.batch):
        if S.lists[at + B_TOKENS, j] == 1:
            total += min(S.slot[S.lists[at + B_SLOT, j]].computed, window)
    return total


@compiled
def put(S, value):
    c = S.count[0]
    S.items[c.items] = value
    c.items += 1


@compiled
def put_list(S, column, row, size):
    c = S.count[0]
    for j in range(size):
        put(S, S.lists[row, j])
    S.decisions[c.rows, column] = c.items


@compiled
def put_table(S, request):
    """Block ids a batch member got in this step (its whole table when it was admitted)."""
    c = S.count[0]
    for i in range(c.running):
        s = S.lists[RUNNING, i]
        if S.slot[s].request == request:
            held = S.slot[s].held
            width = S.table.shape[1] // S.group.shape[0]
            for g in range(S.group.shape[0]):
                end = min(held, 1) if S.group[g].kind == FIXED else held
                for k in range(held - S.slot[s].grown, end):
                    put(S, S.table[s, g * width + k])
            S.slot[s].grown = 0


@compiled
def put_waiting_head(S, R):
    """The next four of the queue; a heap is searched for them, since its array is only half sorted."""
    c = S.count[0]
    shown = 0
    above = -1
    while shown < 4:
        best = np.int32(-1)
        for p in range(0 if R.priority else c.head, c.tail):
            r = S.waiting[p]
            if S.request[r].status != WAITING:
                continue
            if not R.priority:
                if shown < 4:
                    put(S, r)
                    shown += 1
            elif S.request[r].rank > above and (best < 0 or S.request[r].rank < S.request[best].rank):
                best = r
        if best < 0:
            return
        put(S, best)
        above = S.request[best].rank
        shown += 1


@compiled
def record_schedule(S, R, batch):
    """First half of a decision row: what `schedule` decided and the blocks it handed out."""
    c = S.count[0]
    row = S.decisions[c.rows]
    row[0] = c.step
    row[1] = c.n_waiting
    row[2] = c.free_before
    row[3] = c.free
    row[5] = R.num_blocks - 1 - c.free
    row[6] = c.t_query
    row[7] = c.t_hit
    row[8] = c.t_rquery
    row[9] = c.t_rhit
    at = BATCH + 4 * batch
    first = N_SCALARS
    put_list(S, first, at + B_REQUEST, c.batch)
    put_list(S, first + 1, at + B_TOKENS, c.batch)
    put_list(S, first + 2, NEW, c.new)
    put_list(S, first + 3, RESUMED, c.resumed)
    put_list(S, first + 4, PREEMPTED, c.preempted)
    for i in range(c.running):
        put(S, S.slot[S.lists[RUNNING, i]].request)
    row[first + 5] = c.items
    put_waiting_head(S, R)
    row[first + 6] = c.items
    for j in range(c.new):
        put_table(S, S.lists[NEW, j])
    for j in range(c.batch - c.new - c.resumed):  # the running ones stand before those admitted
        put_table(S, S.lists[at + B_REQUEST, j])
    for j in range(c.resumed):
        put_table(S, S.lists[RESUMED, j])
    row[first + 7] = c.items


@compiled
def record_delivery(S):
    """Second half of a decision row, after the outputs of the call were processed."""
    c = S.count[0]
    row = S.decisions[c.rows]
    row[4] = c.free
    put_list(S, N_SCALARS + 8, FINISHED, c.finished)
    put_list(S, N_SCALARS + 9, FIRST, c.first)
    b = np.int32(S.block.shape[0] - 1)
    for _ in range(min(8, c.free)):
        b = S.block[b].next
        put(S, b)
    row[N_SCALARS + 10] = c.items


@compiled
def log_step(c, row, usable, start_s, tokens):
    """A row a step for the timeline: the pool and the queue as they stood while the step ran."""
    row[0] = start_s
    row[2] = c.step
    row[3] = c.running
    row[4] = c.n_waiting
    row[5] = usable - c.free
    row[6] = c.cached_idle
    row[7] = c.shared
    row[8] = c.table_blocks
    row[9] = c.live_tokens
    row[10] = tokens
    row[11] = c.preemptions
    c.steps += 1
    c.queries += c.t_query
    c.hits += c.t_hit
    c.resumed_queries += c.t_rquery
    c.resumed_hits += c.t_rhit
    c.peak_running = max(c.peak_running, c.running)
    c.peak_used = max(c.peak_used, usable - c.free)


@compiled
def drop_head(S, R):
    """Nothing runs and the head still cannot be admitted: it never will be. Reject it, do not hang."""
    p = candidate(S, R, S.count[0].head)
    r = S.waiting[p]
    dequeue(S, R, p)
    finish(S.count[0], S.request[r], NO_ROOM)
    S.count[0].rejected += 1


@compiled
def run(S, R, K, max_steps):
    """Run up to max_steps steps; resumable, all state is in the arrays. Returns why it stopped.

    Synchronous: schedule, run, deliver. Asynchronous: the next batch is scheduled before the output of the
    one on the device is processed, two in flight [1.3]; host time then hides behind device time.
    """
    c = S.count[0]
    n = S.request.shape[0]
    # No log may overflow: the run returns as soon as the worst case of one more step would not fit.
    last_row = S.rows.shape[0]
    worst = 8 * R.max_num_seqs + 32 + R.max_num_seqs * S.table.shape[1]
    last_item = S.items.shape[0] - worst if R.record else np.int64(0)
    for _ in range(max_steps):
        if c.rows >= last_row or c.items > last_item:
            return LOG_FULL
        if c.now >= c.next_expiry:
            expire(S, R)
        if c.next < n and S.request[c.next].arrival_s <= c.now:
            arrive(S, R)
        if c.running + c.n_waiting + c.flights == 0:
            if c.next >= n:
                return ALL_DONE
            t = S.request[c.next].arrival_s
            if K.fixed_step_s > 0:
                t = np.ceil(t / K.fixed_step_s) * K.fixed_step_s
            advance(c, R.num_blocks - 1, max(t, c.now))
            continue
        start_s = c.now
        batch = (c.oldest + c.flights) % 2
        tokens = schedule(S, R, batch)
        if tokens == 0 and c.running + c.preempted + c.flights == 0:
            if c.n_waiting > 0:
                drop_head(S, R)
            continue
        c.step = np.int64(start_s / K.fixed_step_s + 0.5) if K.fixed_step_s > 0 else c.step + 1
        log_step(c, S.rows[c.rows], R.num_blocks - 1, start_s, tokens)
        if R.record:
            record_schedule(S, R, batch)
        c.kv_window = window_tokens(S, batch, K.window) if K.window > 0 else 0.0
        device_s = step_seconds(c, K, tokens)
        host_s = K.cpu_s + K.cpu_per_request_s * c.batch
        update_s = K.update_s + K.update_per_request_s * c.batch
        if tokens > 0:
            end = max(max(c.now + host_s, c.gpu_free) + device_s, c.now + host_s + K.launch_s)
            if not R.asynchronous:
                end = c.now + host_s + K.launch_s + device_s
            c.gpu_free = end
            if batch == 0:
                c.end0 = end
            else:
                c.end1 = end
            c.flights += 1
        if R.asynchronous and tokens > 0 and c.flights < 2:
            advance(c, R.num_blocks - 1, c.now + (K.fixed_step_s if K.fixed_step_s > 0 else host_s))
        else:
            end = c.now + host_s
            if c.flights > 0:
                end = max(end, c.end0 if c.oldest == 0 else c.end1) + update_s
            advance(c, R.num_blocks - 1, c.now + K.fixed_step_s if K.fixed_step_s > 0 else end)
            if c.flights > 0:
                deliver(S, R, c.oldest)
                c.oldest = (c.oldest + 1) % 2
                c.flights -= 1
        S.rows[c.rows, 1] = c.now
        S.rows[c.rows, 12] = c.finished
        if R.record:
            record_delivery(S)
        c.rows += 1
    return STEPS_DONE
