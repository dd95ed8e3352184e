"""From a run's arrays to the metrics and tables that bench shares: same names, same definitions."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvplan.results.metrics import RequestTimes, Slo, Status, position_utilization, summarize
from kvplan.sched import core
from kvplan.sched.groups import blocks_at_end
from kvplan.sim.run import Run
from kvplan.trace.schema import Trace

_STATUS = np.full(9, Status.UNFINISHED, np.int8)
_STATUS[core.DONE] = Status.FINISHED
_STATUS[core.TOO_LONG] = Status.REJECTED_TOO_LONG
_STATUS[core.EMPTY] = Status.REJECTED_EMPTY
_STATUS[core.NO_ROOM] = Status.REJECTED_OOM
_STATUS[core.CANCELLED] = Status.CANCELLED
_STATUS[core.TIMED_OUT] = Status.TIMED_OUT

BLOCK_ID_BYTES = 4


def request_times(run: Run) -> RequestTimes:
    """Times as a client sees them: tokenising and HTTP (`Clock.ttft_s`) come on top of the engine's."""
    r, clock = run.requests, run.clock
    outside_s = clock.ttft_s + clock.ttft_per_token_s * r.prompt
    return RequestTimes(
        status=_STATUS[r.status],
        arrival_s=np.asarray(r.arrived_s),
        first_scheduled_s=np.asarray(r.first_scheduled_s),
        first_token_s=r.first_token_s + outside_s,
        finish_s=np.where(r.status == core.DONE, r.finish_s + outside_s, r.finish_s),
        input_tokens=np.asarray(r.prompt, np.int64),
        generated_tokens=np.asarray(r.outputs, np.int64),
    )


def inter_token_latencies(run: Run) -> tuple[Any, Any]:
    """(values in seconds, how many tokens each): bucket middles, 0.5 % from any true value."""
    k = np.flatnonzero(run.itl)
    return core.ITL_FLOOR_S * core.ITL_RATIO ** (k + 0.5), run.itl[k]


def summary(
    run: Run, trace: Trace, bytes_per_block: int, slos: tuple[Slo, ...] = (), allocation: str = "paged"
) -> dict[str, Any]:
    """The summary of one run under the keys of CLI.md; bytes are means over time, per rank."""
    rules, c = run.rules, run.count
    itl_s, itl_weights = inter_token_latencies(run)
    result: dict[str, Any] = {"block_size": rules.block_size}
    result |= summarize(request_times(run), itl_s, itl_weights, slos)
    if c["itl_count"]:  # exact where the buckets would round
        mean = c["itl_sum"] / c["itl_count"]
        result["mean_itl_ms"] = mean * 1e3
        result["std_itl_ms"] = float(np.sqrt(max(0.0, c["itl_sum2"] / c["itl_count"] - mean * mean))) * 1e3
    tokens = trace.input_tokens + trace.output_tokens
    reserve = int(run.requests.reserve.sum(dtype=np.int64))
    if reserve:  # contiguous baselines hold what they reserve
        result["position_utilization"] = int(tokens.sum()) / reserve
    else:
        result["position_utilization"] = position_utilization(tokens, rules.block_size)
    over = c["time_total"] or float("nan")
    block = rules.block_size
    usable = rules.num_blocks - 1
    used, entries, cached = c["s_used"] / over, c["s_table_blocks"] / over, c["s_cached"] / over
    unwritten = entries * block - c["s_live_tokens"] / over  # positions held by a table and not written
    reserved = allocation != "paged"
    result |= {
        "preemptions": int(c["preemptions"]),
        "recomputed_tokens": int(c["recomputed"]),
        "prefix_hit_tokens": int(c["hits"]),
        "prefix_query_tokens": int(c["queries"]),
        "preempted_hit_tokens": int(c["resumed_hits"]),
        "preempted_query_tokens": int(c["resumed_queries"]),
        "kv_utilization": used / usable if usable else float("nan"),
        "kv_effective_bytes": (used - unwritten / block) * bytes_per_block,
        "kv_shared_bytes": c["s_shared"] / over * bytes_per_block,
        "kv_cached_bytes": cached * bytes_per_block,
        "tail_waste_bytes": 0.0 if reserved else unwritten / block * bytes_per_block,
        "reserved_unused_bytes": unwritten / block * bytes_per_block if reserved else 0.0,
        "external_fragmentation_bytes": None if reserved else 0.0,  # needs addresses: not modelled
        "block_table_bytes": entries * BLOCK_ID_BYTES,
        "free_bytes": (usable - used - cached) * bytes_per_block,
        "copied_bytes": 0,
        "pool_bytes": usable * bytes_per_block,
        "num_gpu_blocks": rules.num_blocks,
        "mean_running": c["s_running"] / over,
        "mean_waiting": c["s_waiting"] / over,
        "queued_share": c["s_queued_time"] / over,
        "peak_running": int(c["peak_running"]),
        "peak_blocks": int(c["peak_used"]),
        "steps": int(c["steps"]),
        "rejected": int(c["rejected"]),
    }
    if rules.max_concurrency:
        result["saturated"] = False  # a closed loop offers no more than it gets done
    if run.interrupted:
        result["interrupted"] = True
    return result


def request_columns(run: Run, trace: Trace) -> dict[str, Any]:
    """Columns of the requests table; rejected, cancelled and unfinished requests stay in it."""
    t = request_times(run)
    labels = np.array([status.label for status in Status], object)
    reasons = np.full(len(trace), None, object)
    for i in np.flatnonzero(np.isin(t.status, _REJECTED)):
        reasons[i] = _reason(run, int(i))
    return {
        "request": np.arange(len(trace)),
        "id": trace.request_id,
        "status": labels[t.status].tolist(),
        "reason": reasons.tolist(),
        "arrival_s": t.arrival_s,
        "first_scheduled_s": t.first_scheduled_s,
        "first_token_s": t.first_token_s,
        "finish_s": t.finish_s,
        "input_tokens": trace.input_tokens,
        "output_tokens": trace.output_tokens,
        "generated_tokens": t.generated_tokens,
        "ttft_s": t.ttft_s,
        "tpot_s": t.tpot_s,
        "e2el_s": t.e2el_s,
        "preemptions": np.asarray(run.requests.preemptions),
        "prefix_hit_tokens": np.asarray(run.requests.hit),
        "priority": trace.priority,
        "tenant": np.array([name or None for name in trace.tenant_names], object)[trace.tenant_id].tolist(),
        "session_id": [s if s >= 0 else None for s in trace.session_id.tolist()],
        "turn": trace.turn,
    }


_REJECTED = (Status.REJECTED_OOM, Status.REJECTED_TOO_LONG, Status.REJECTED_EMPTY)


def _reason(run: Run, i: int) -> str:
    row, rules = run.requests[i], run.rules
    if row.status == core.EMPTY:
        return "a prompt of 0 tokens: recorded traces keep failed requests so"
    if row.status == core.TOO_LONG:
        return f"prompt of {row.prompt} tokens is not below max_model_len {rules.max_model_len}"
    need = -(-max(int(row.stop) - 1, int(row.reserve)) // rules.block_size)
    if rules.hybrid:
        need = blocks_at_end(run.groups, int(row.stop), rules.block_size)
    if need <= rules.num_blocks - 1:
        return f"never admitted: prompt of {row.prompt} tokens, {rules.max_num_batched_tokens} tokens a step"
    return f"needs {need} blocks of {rules.block_size} tokens, the pool has {rules.num_blocks - 1}"


def timeline_columns(run: Run) -> dict[str, Any]:
    """Columns of the timeline: the pool and the queue after each (kept) scheduling step, and in each pause.

    A row holds until the next one's time; the last one is the end of the run. What is cached during a pause
    is known to a block for each request that ended before it (`run.with_pauses`); all else is exact.
    """
    at = {name: run.rows[:, i] for i, name in enumerate(core.STEP_COLUMNS)}
    free = run.rules.num_blocks - 1 - at["used_blocks"] - at["cached_blocks"]
    whole = {name: column.astype(np.int64) for name, column in at.items() if name not in ("start_s", "end_s")}
    # A shared block is written once, however many tables name it.
    copies = at["table_blocks"] - at["used_blocks"]
    whole["live_tokens"] = (at["live_tokens"] - copies * run.rules.block_size).astype(np.int64)
    return {
        "time_s": at["start_s"],
        "free_blocks": free.astype(np.int64),
        **{
            name: whole[name]
            for name in (
                "step", "running", "waiting", "used_blocks", "cached_blocks", "live_tokens",
                "scheduled_tokens", "preemptions",
            )
        },
    }  # fmt: skip


def decision_columns(run: Run) -> dict[str, Any]:
    """Columns of the decisions table; list columns as (offsets, values)."""
    rows, first = run.decisions, int(core.N_SCALARS)
    columns: dict[str, Any] = {name: rows[:, i] for i, name in enumerate(core.DECISION_SCALARS)}
    ends = rows[:, first:]
    starts = np.zeros_like(ends)
    if len(rows):
        starts[:, 1:] = ends[:, :-1]
        starts[1:, 0] = ends[:-1, -1]
    for j, name in enumerate(core.DECISION_LISTS):
        lengths = ends[:, j] - starts[:, j]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        at = np.repeat(starts[:, j] - offsets[:-1], lengths) + np.arange(offsets[-1])
        values = run.items[at]
        if name == "preempted":  # by request number, the others in the order in which it happened
            owner = np.repeat(np.arange(len(rows)), lengths)
            values = values[np.lexsort((values, owner))]
        columns[name] = (offsets, values)
    return columns
