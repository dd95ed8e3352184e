"""The compiled core equals the plain-Python scheduler on random workloads, step by step.

Given: random traces with shared prefixes, tenants, multi-turn content, priorities; random rules with scarce
pools, thresholds, watermarks, small budgets, both loops. Expected: every column of the decision log is equal,
invariants hold after every step (`check_invariants`), every request ends in one status, all blocks return.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplan.sched import core
from kvplan.sched.core import Rules
from kvplan.sim.run import simulate, steps_clock
from kvplan.sim.tables import decision_columns
from kvplan.trace.schema import NO_STREAM, Provenance, Trace
from tests.sched.reference import Request, Scheduler, Settings

EXAMPLES = int(os.environ.get("KVPLAN_EXAMPLES", "600"))


@st.composite
def workloads(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Requests as plain dicts: arrival, segments or none, answer, tenant, priority."""
    n = draw(st.integers(1, 24))
    spread = draw(st.integers(0, 40))
    streams = draw(st.integers(1, 5))
    rows: list[dict[str, Any]] = []
    for i in range(n):
        kind = draw(st.sampled_from(["own", "segments", "segments", "turn"]))
        answer = draw(st.integers(1, 30))
        row: dict[str, Any] = {
            "arrival": draw(st.integers(0, spread)),
            "answer": answer,
            "tenant": draw(st.integers(0, 1)),
            "priority": draw(st.integers(0, 2)),
            "stream": 1000 + i,
            "segments": None,
        }
        if kind == "own":
            row["prompt"] = draw(st.integers(1, 60))
            row["stream"] = NO_STREAM
        elif kind == "turn" and rows and rows[-1]["segments"]:
            before = rows[-1]  # a later turn holds the earlier prompt, a part of its answer, and more
            taken = draw(st.integers(1, before["answer"]))
            row["tenant"] = before["tenant"]
            row["segments"] = [
                *before["segments"],
                [before["stream"], 0, taken],
                [2000 + i, 0, draw(st.integers(1, 9))],
            ]
        else:
            row["segments"] = [[draw(st.integers(0, streams - 1)), 0, draw(st.integers(1, 40))]]
            if draw(st.booleans()):
                row["segments"].append(
                    [500 + draw(st.integers(0, 3)), draw(st.integers(0, 2)), draw(st.integers(1, 20))]
                )
        if row["segments"]:
            row["prompt"] = sum(length for _, _, length in row["segments"])
        rows.append(row)
    return sorted(rows, key=lambda row: row["arrival"])


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    return Rules(
        num_blocks=draw(st.integers(2, 60)),
        block_size=draw(st.sampled_from([1, 2, 4, 16])),
        max_num_seqs=draw(st.integers(1, 8)),
        max_num_batched_tokens=draw(st.integers(1, 64)),
        max_model_len=draw(st.sampled_from([20, 50, 1 << 20])),
        chunked_prefill=draw(st.sampled_from([True, True, True, False])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3, 10])),
        lone_request_exempt=draw(st.booleans()),
        prefix_caching=draw(st.sampled_from([True, True, False])),
        priority=draw(st.booleans()),
        watermark_blocks=draw(st.sampled_from([0, 0, 2])),
        reserve_full_isl=draw(st.booleans()),
        unhashed_to_front=draw(st.booleans()),
        shift_by_position=draw(st.booleans()),
        asynchronous=draw(st.booleans()),
        max_concurrency=0,
        record=True,
    )


def make_trace(rows: list[dict[str, Any]]) -> Trace:
    n = len(rows)
    counts = [len(row["segments"] or ()) for row in rows]
    pieces = np.asarray([p for row in rows for p in row["segments"] or ()], np.int64).reshape(-1, 3)
    nan = np.full(n, np.nan)

    def ints(values: Any) -> Any:
        return np.asarray(list(values), np.int64)

    return Trace(
        request_id=[f"r{i}" for i in range(n)],
        arrival_s=np.asarray([float(row["arrival"]) for row in rows]),
        input_tokens=ints(row["prompt"] for row in rows),
        output_tokens=ints(row["answer"] for row in rows),
        segment_offsets=ints(np.concatenate([[0], np.cumsum(counts)])),
        segment_stream=pieces[:, 0].copy(),
        segment_start=pieces[:, 1].copy(),
        segment_length=pieces[:, 2].copy(),
        output_stream=ints(row["stream"] for row in rows),
        tenant_id=ints(row["tenant"] for row in rows),
        tenant_names=["a", "b"],
        priority=ints(row["priority"] for row in rows),
        samples=np.ones(n, np.int64),
        cancel_after_s=nan,
        deadline_s=nan,
        session_id=np.full(n, -1),
        turn=np.zeros(n, np.int64),
        think_s=np.zeros(n),
        provenance=Provenance("constructed", "hypothesis", "random"),
    )


def make_requests(rows: list[dict[str, Any]], max_model_len: int) -> list[Request]:
    made = []
    for i, row in enumerate(rows):
        own = ("own", i)
        tokens = [(row["tenant"], s, at + k) for s, at, n in row["segments"] or () for k in range(n)]
        tokens = tokens or [(*own, k) for k in range(row["prompt"])]
        stream = (row["tenant"], row["stream"]) if row["stream"] != NO_STREAM else (*own, "answer")
        tokens += [(*stream, k) for k in range(row["answer"])]
        stop = min(row["prompt"] + row["answer"], max_model_len)
        made.append(Request(i, row["arrival"], tokens, row["prompt"], stop, row["priority"]))
    return made


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="slow without compilation")
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads(), rules())
def test_core_equals_reference(rows: list[dict[str, Any]], rules: Rules) -> None:
    own = {
        k: v for k, v in rules._asdict().items() if k not in ("max_concurrency", "record", "hybrid", "states")
    }
    reference = Scheduler(Settings(**own), make_requests(rows, rules.max_model_len))
    expected = reference.steps()

    run = simulate(make_trace(rows), rules, steps_clock())

    columns = decision_columns(run)
    assert len(run.decisions) == len(expected)
    for k, step in enumerate(expected):
        for name, value in asdict(step).items():
            mine = columns[name]
            if isinstance(mine, tuple):
                offsets, values = mine
                got: Any = values[offsets[k] : offsets[k + 1]].tolist()
            else:
                got = int(mine[k])
            assert got == value, f"row {k}, step {step.step}, {name}: {got}, reference {value}"
    done = np.isin(run.requests.status, [core.DONE, core.TOO_LONG, core.NO_ROOM])
    assert done.all(), "a request was lost"
    assert int(run.count["free"]) == rules.num_blocks - 1, "a block was left behind"
    assert [r.status == "finished" for r in reference.requests] == (run.requests.status == core.DONE).tolist()
