"""The run loop around the compiled core: build the state, run it in chunks, hand back arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvplan.errors import InputError
from kvplan.sched import core
from kvplan.sched.core import Clock, Rules, State
from kvplan.sched.groups import FULL_ONLY, Group, group_rows, is_hybrid
from kvplan.sched.keys import Keys, make_keys
from kvplan.trace.schema import Trace

STEPS_PER_CALL = 4096
MAX_TIMELINE_ROWS = 200_000
"""A longer run keeps every 2nd, 4th, ... step row; means and peaks are exact all the same."""
MAX_KEYS = np.iinfo(np.int32).max
KEPT_PAUSE_S = 1.0
"""A pause of the server as long as this stays in the timeline of a longer run too."""


@dataclass(frozen=True)
class Run:
    """What a run left behind. ``requests`` is a REQUEST record array, a row a request of the trace."""

    rules: Rules
    clock: Clock
    requests: Any
    count: dict[str, float]  # the core's counters at the end
    rows: Any  # float64[steps and pauses, STEP_COLUMNS]; a pause is a row with nothing running or waiting
    row_stride: int  # 1 = every step is in `rows`
    itl: Any  # int64[ITL_BUCKETS]: gaps between tokens, bucket k holds [1e-6 * 1.01^k, 1e-6 * 1.01^(k+1))
    decisions: Any  # int64[steps, ...] when recorded, else no rows
    items: Any  # int32: the lists of `decisions`
    groups: Any  # GROUP record array
    wall_s: float
    interrupted: bool = False


def steps_clock() -> Clock:
    """Every step lasts one second: nothing depends on a cost model."""
    zero = np.zeros(1)
    times = dict.fromkeys(Clock._fields, 0.0)
    return Clock(**{**times, "linear_s": zero, "head_s": zero, "window": 0, "fixed_step_s": 1.0})  # type: ignore[arg-type]


def reserved_tokens(trace: Trace, stop: Any, allocation: str, max_model_len: int) -> Any:
    """Positions set aside at admission by the contiguous baselines; 0 for paged allocation.

    ``reserve-max[:LEN|longest]`` LEN, max_model_len or the trace's longest; ``reserve-pow2`` the next
    power of two of the request's own length; ``reserve-oracle`` its own length
    (PagedAttention paper, section 6.1).
    """
    kind, _, argument = allocation.partition(":")
    if kind == "paged" and not argument:
        return np.zeros(len(trace), np.int64)
    if kind == "reserve-max":
        if argument == "longest":
            length = int(stop.max()) if len(stop) else 0
        elif argument:
            if not argument.isdigit() or int(argument) < 1:
                raise InputError(
                    f"--allocation {allocation}: '{argument}' must be a whole number >= 1 or 'longest'."
                )
            length = int(argument)
        else:
            length = max_model_len
        return np.full(len(trace), length, np.int64)
    if kind == "reserve-pow2" and not argument:
        return 1 << np.ceil(np.log2(np.maximum(stop, 1))).astype(np.int64)
    if kind == "reserve-oracle" and not argument:
        return np.asarray(stop, np.int64)
    raise InputError(
        f"--allocation {allocation} is unknown.\n"
        "  Use paged, reserve-max[:LEN|longest], reserve-pow2 or reserve-oracle."
    )


def stop_lengths(trace: Trace, max_model_len: int) -> Any:
    """Length at which each request ends: prompt + answer, at most max_model_len.

    An answer of 0 tokens is run as 1: an engine always samples one.
    """
    return np.minimum(trace.input_tokens + np.maximum(trace.output_tokens, 1), max_model_len)


def build_state(trace: Trace, rules: Rules, keys: Keys, reserve: Any, groups: Any) -> State:
    """Fresh arrays for one run (the keys are shared). ``groups`` is a GROUP record array, a row a group."""
    n = len(trace)
    distinct = max(keys.distinct, 1)
    if len(groups) * distinct > MAX_KEYS:
        raise InputError(
            f"{distinct:,} different blocks in {len(groups)} KV groups are more than a run can number; "
            "use a larger block size or a shorter trace."
        )
    groups = groups.copy()
    groups.offset = np.arange(len(groups)) * distinct
    stop = stop_lengths(trace, rules.max_model_len)
    requests = np.zeros(n, core.REQUEST).view(np.recarray)
    requests.arrival_s = trace.arrival_s
    requests.arrived_s = trace.arrival_s
    cancel = np.where(np.isnan(trace.cancel_after_s), np.inf, trace.cancel_after_s)
    deadline = np.where(np.isnan(trace.deadline_s), np.inf, trace.deadline_s)
    requests.patience_s = np.minimum(cancel, deadline)
    requests.impatience = np.where(cancel <= deadline, core.CANCELLED, core.TIMED_OUT)
    for name in ("first_scheduled_s", "first_token_s", "last_token_s", "finish_s"):
        requests[name] = np.nan
    requests.key_offset = keys.offset
    requests.key_shared = keys.shared
    requests.key_fresh = keys.fresh
    requests.prompt = trace.input_tokens
    requests.stop = stop
    requests.reserve = reserve
    if rules.priority:
        order = np.lexsort((np.arange(n), trace.arrival_s, trace.priority))
        requests.rank[order] = np.arange(n)

    block = np.zeros(rules.num_blocks + 1, core.BLOCK).view(np.recarray)
    ids = np.arange(1, rules.num_blocks, dtype=np.int32)  # block 0 is the null block
    ring = np.concatenate([[rules.num_blocks], ids, [rules.num_blocks]])
    block.next[ring[:-1]] = ring[1:]
    block.prev[ring[1:]] = ring[:-1]
    block.key = -1

    slots = np.zeros(rules.max_num_seqs, core.SLOT).view(np.recarray)
    slots.request = -1
    lists = np.zeros((core.N_LISTS, rules.max_num_seqs + 1), np.int32)
    lists[core.SPARE, : rules.max_num_seqs] = np.arange(rules.max_num_seqs)[::-1]
    count = np.zeros(1, core.COUNT).view(np.recarray)
    c = count[0]
    c.free = rules.num_blocks - 1
    c.spare = rules.max_num_seqs
    if n:
        c.now = np.floor(trace.arrival_s[0])  # a lead-in without requests is not part of the run
    c.next_expiry = np.inf
    c.last_delivery = -1.0
    longest = int(max(stop.max() if n else 1, reserve.max() if n else 1))
    width = -(-longest // rules.block_size) + 1
    if not rules.hybrid:  # a table that keeps every block is not longer than the pool
        width = min(width, rules.num_blocks)
    width *= len(groups)
    capacity = STEPS_PER_CALL
    worst = 8 * rules.max_num_seqs + 32 + rules.max_num_seqs * width
    return State(
        block=block,
        slot=slots,
        request=requests,
        count=count,
        table=np.zeros((rules.max_num_seqs, width), np.int32),
        lists=lists,
        waiting=np.zeros(n + 1, np.int32),
        keys=keys.stored,
        first_block=np.full(len(groups) * distinct, -1, np.int32),
        itl=np.zeros(core.ITL_BUCKETS, np.int64),
        rows=np.zeros((capacity, len(core.STEP_COLUMNS))),
        decisions=np.zeros(
            (capacity if rules.record else 1, int(core.N_SCALARS) + len(core.DECISION_LISTS)), np.int64
        ),
        items=np.zeros(2 * worst + 65536 if rules.record else 1, np.int32),
        group=groups,
        stamp=np.zeros(rules.num_blocks if rules.states else 1, np.int64),
    )


def simulate(
    trace: Trace,
    rules: Rules,
    clock: Clock,
    *,
    keys: Keys | None = None,
    reserve: Any = None,
    groups: Sequence[Group] = FULL_ONLY,
    in_flight_tokens: int | None = None,
    dense_retention: bool = False,
    progress: Callable[[Any], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Run:
    """Replay a trace. ``progress`` is called with the counters about every 4,096 steps.

    ``groups``, ``in_flight_tokens`` (by default as the rules' loop has it) and ``dense_retention``: see
    `kvplan.sched.groups.group_rows`.
    ``stop`` is asked as often: when it says True the run ends with what there is (``interrupted``).
    """
    from time import perf_counter

    began = perf_counter()
    if not trace.has_times:
        raise InputError(
            f"{trace.provenance.source} has no arrival times.\n  Give --request-rate or --max-concurrency."
        )
    if keys is None:
        keys = keys_for(trace, rules)
    if reserve is None:
        reserve = np.zeros(len(trace), np.int64)
    if in_flight_tokens is None:
        in_flight_tokens = rules.max_num_batched_tokens * (2 if rules.asynchronous else 1)
    cached_states = rules.prefix_caching and any(group.kind == "state" for group in groups)
    rules = rules._replace(hybrid=is_hybrid(groups), states=cached_states)
    if cached_states:
        _check_chunks(rules)
    rows_of_groups = group_rows(
        groups, rules.block_size, rules.max_model_len, in_flight_tokens, dense_retention, rules.prefix_caching
    )
    state = build_state(trace, rules, keys, reserve, rows_of_groups)
    if len(trace) and clock.fixed_step_s == 0:
        state.count[0].now = trace.arrival_s[0]  # steps are counted from a whole second, time is not
    rows: list[Any] = []
    decisions: list[Any] = []
    items: list[Any] = []
    kept, stride, n_items, last = 0, 1, 0, None
    interrupted = False
    while True:
        why = core.run(state, rules, clock, STEPS_PER_CALL)
        c = state.count[0]
        used = int(c.rows)
        chunk = with_pauses(state.rows[:used], last, rules)
        last = state.rows[used - 1].copy() if used else last
        rows.append(thinned(chunk, stride))
        kept += len(rows[-1])
        if kept > MAX_TIMELINE_ROWS and not rules.record:
            rows = [thinned(np.concatenate(rows), 2)]
            kept, stride = len(rows[0]), stride * 2
        if rules.record:
            decided = state.decisions[:used].copy()
            decided[:, core.N_SCALARS :] += n_items
            decisions.append(decided)
            items.append(state.items[: int(c["items"])].copy())
            n_items += int(c["items"])
            c["items"] = 0
        c.rows = 0
        if progress is not None:
            progress(c)
        if why == core.ALL_DONE:
            break
        if stop is not None and stop():
            interrupted = True
            break
    final = state.count[0]
    if last is not None and not interrupted:
        rows.append(_pause(last, last[_END], int(final.cached_idle)))  # the end: all blocks are back
    return Run(
        rules=rules,
        clock=clock,
        requests=state.request,
        count={name: final[name].item() for name in core.COUNT.names or ()},
        rows=np.concatenate(rows),
        row_stride=stride,
        itl=state.itl,
        decisions=np.concatenate(decisions) if decisions else state.decisions[:0],
        items=np.concatenate(items) if items else state.items[:0],
        groups=state.group,
        wall_s=perf_counter() - began,
        interrupted=interrupted,
    )


def _check_chunks(rules: Rules) -> None:
    """Chunks end at block boundaries where states are cached: a smaller limit would never end a prompt."""
    for flag, limit in (
        ("--max-num-batched-tokens", rules.max_num_batched_tokens),
        ("--long-prefill-token-threshold", rules.long_prefill_token_threshold or rules.block_size),
    ):
        if limit < rules.block_size:
            raise InputError(
                f"{flag} {limit} is below the block of {rules.block_size} tokens, whose end keeps states."
            )


_START, _END, _RUNNING, _WAITING, _USED, _CACHED, _TABLE, _LIVE = map(
    core.STEP_COLUMNS.index,
    ("start_s", "end_s", "running", "waiting", "used_blocks", "cached_blocks", "table_blocks", "live_tokens"),
)


def _pause(row: Any, until_s: Any, cached: Any) -> Any:
    """Rows for the time after each of ``row`` in which nothing runs; step and preemptions stand still."""
    pause = np.zeros_like(np.atleast_2d(row))
    for name in ("step", "preemptions"):
        at = core.STEP_COLUMNS.index(name)
        pause[:, at] = row[..., at]
    pause[:, _START], pause[:, _END], pause[:, _CACHED] = row[..., _END], until_s, cached
    return pause


def with_pauses(rows: Any, last: Any, rules: Rules) -> Any:
    """The step rows, with a row for each pause between them; ``last`` is the row before the first.

    The core writes a row a step only. Blocks cached during a pause are those that hold content after the step
    before it: all it used but the partly filled ones, of which each running request has one at most.
    """
    if not len(rows):
        return rows
    before = rows[:-1] if last is None else np.concatenate([last[None], rows[:-1]])
    after = rows[1:] if last is None else rows
    at = np.flatnonzero(after[:, _START] > before[:, _END])
    if not len(at):
        return rows.copy()
    row = before[at]
    partly = np.minimum(row[:, _RUNNING], row[:, _TABLE] * rules.block_size - row[:, _LIVE])
    cached = row[:, _CACHED] + np.maximum(row[:, _USED] - partly, 0) if rules.prefix_caching else 0
    where = at + (1 if last is None else 0)
    return np.insert(rows, where, _pause(row, after[at, _START], cached), axis=0)


def thinned(rows: Any, stride: int) -> Any:
    """Every ``stride``-th row, and all long pauses: a timeline without them would show work in them."""
    if stride == 1:
        return rows
    idle = (rows[:, _RUNNING] == 0) & (rows[:, _WAITING] == 0)
    long = idle & (rows[:, _END] - rows[:, _START] >= KEPT_PAUSE_S)
    keep = np.arange(len(rows)) % stride == 0
    keep |= long
    keep[1:] |= long[:-1]  # where work goes on
    return rows[keep]


def keys_for(trace: Trace, rules: Rules) -> Keys:
    """Content keys at the rules' block size; none are made with prefix caching off."""
    if rules.prefix_caching:
        return make_keys(trace, stop_lengths(trace, rules.max_model_len), rules.block_size)
    n = len(trace)
    return Keys(np.zeros(0, np.int32), np.zeros(n, np.int64), np.zeros(n, np.int32), np.zeros(n, np.int32), 0)
