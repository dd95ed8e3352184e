"""The compiled core with several KV groups equals the plain-Python scheduler on random workloads.

Given: random traces with shared prefixes, tenants, multi-turn content, priorities; random windows and
chunks beside full attention or alone, scarce pools, both loops, dense and sparse retention. Expected: every
column of the decision log is equal, all blocks return, and the counters of table entries and live tokens end
at zero.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplan.sched import core
from kvplan.sched.core import Rules
from kvplan.sched.groups import FULL_ONLY, Group
from kvplan.sim.run import simulate, steps_clock
from kvplan.sim.tables import decision_columns
from kvplan.trace.schema import NO_STREAM
from tests.sched.reference_scheduler import Request, Settings
from tests.sched.reference_scheduler import simulate as reference
from tests.sched.test_core_reference import make_trace, workloads

EXAMPLES = int(os.environ.get("KVPLAN_EXAMPLES", "400"))
NAMES = {"full": "full", "state": "mamba"}
LONGEST = 110  # prompt and answer of `workloads`, with a turn's history cut there


@st.composite
def groups(draw: st.DrawFn) -> tuple[Group, ...]:
    """One other kind, beside full attention (before or behind it) or alone."""
    kind = draw(st.sampled_from(["window", "window", "chunk", "state"]))
    size = 0 if kind == "state" else draw(st.sampled_from([1, 2, 5, 8, 16, 17, 40]))
    others = (Group(kind, size),) * draw(st.integers(1, 3))
    if kind == "state":  # the engine puts full attention behind
        return others + FULL_ONLY
    return draw(st.sampled_from([others + FULL_ONLY, FULL_ONLY + others, others[:1]]))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[dict[str, Any]], Settings, tuple[Group, ...]]:
    """A pool in which each request fits alone, so that neither side has to reject or hang."""
    rows = [row for row in draw(workloads()) if row["prompt"] + row["answer"] < LONGEST]
    kinds = draw(groups())
    size = draw(st.sampled_from([1, 2, 4, 16]))
    caching = draw(st.sampled_from([True, True, True, False]))
    cached_states = caching and kinds[0].kind == "state"  # chunks end at block boundaries
    longest = max((row["prompt"] + row["answer"] for row in rows), default=1)
    least = len(kinds) * (-(-longest // size) + 1) + 2
    return (
        rows,
        Settings(
            num_gpu_blocks=least + draw(st.integers(0, 60)),
            block_size=size,
            max_num_seqs=draw(st.integers(1, 8)),
            max_num_batched_tokens=draw(
                st.sampled_from([16, 64, 128] if cached_states else [1, 7, 16, 64, 128])
            ),
            max_model_len=draw(st.sampled_from([LONGEST, 1 << 20])),
            enable_chunked_prefill=draw(st.sampled_from([True, True, True, False])),
            long_prefill_token_threshold=draw(
                st.sampled_from([0, 0, 20] if cached_states else [0, 0, 3, 10])
            ),
            enable_prefix_caching=caching,
            policy=draw(st.sampled_from(["fcfs", "priority"])),
            async_scheduling=draw(st.booleans()),
            scheduler_reserve_full_isl=draw(st.booleans()),
            engine_version=draw(st.sampled_from(["0.32.0", "0.29.0", "0.22.0"])),
            groups=tuple(NAMES.get(group.kind, f"{group.kind}:{group.size}") for group in kinds),
            prefix_cache_retention_interval=draw(st.sampled_from([0, 0, None])),
        ),
        kinds,
    )


def rules_of(s: Settings) -> Rules:
    return Rules(
        num_blocks=s.num_gpu_blocks,
        block_size=s.block_size,
        max_num_seqs=s.max_num_seqs,
        max_num_batched_tokens=s.max_num_batched_tokens,
        max_model_len=s.max_model_len,
        chunked_prefill=s.enable_chunked_prefill,
        long_prefill_token_threshold=s.long_prefill_token_threshold,
        lone_request_exempt=s.version >= (0, 32),
        prefix_caching=s.enable_prefix_caching,
        priority=s.policy == "priority",
        watermark_blocks=0,
        reserve_full_isl=s.scheduler_reserve_full_isl and s.version >= (0, 19),
        unhashed_to_front=s.version >= (0, 26),
        shift_by_position=s.version >= (0, 29),
        asynchronous=s.async_scheduling,
        max_concurrency=0,
        record=True,
    )


def requests_of(rows: list[dict[str, Any]]) -> list[Request]:
    made = []
    for i, row in enumerate(rows):
        segments = [((row["tenant"], s), at, n) for s, at, n in row["segments"] or ()]
        stream = (row["tenant"], row["stream"]) if row["stream"] != NO_STREAM else ("own answer", i)
        made.append(
            Request(
                index=i,
                arrival_step=row["arrival"],
                segments=segments or [(("own", i), 0, row["prompt"])],
                output_stream=stream,
                max_tokens=row["answer"],
                priority=row["priority"],
                tenant=row["tenant"],
            )
        )
    return made


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="slow without compilation")
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_core_with_groups_equals_reference(
    case: tuple[list[dict[str, Any]], Settings, tuple[Group, ...]],
) -> None:
    rows, s, kinds = case
    if not rows or (not s.enable_chunked_prefill and s.max_num_batched_tokens < LONGEST):
        return  # without chunks a longer prompt is never admitted
    expected = reference(s, requests_of(rows))
    dense = s.prefix_cache_retention_interval is None or s.version < (0, 29)

    run = simulate(
        make_trace(rows),
        rules_of(s),
        steps_clock(),
        groups=kinds,
        in_flight_tokens=s.max_in_flight_tokens,
        dense_retention=dense,
    )

    columns = decision_columns(run)
    assert len(run.decisions) == len(expected)
    for k, step in enumerate(expected):
        for name, mine in columns.items():
            if isinstance(mine, tuple):
                offsets, values = mine
                got: Any = values[offsets[k] : offsets[k + 1]].tolist()
            else:
                got = int(mine[k])
            value = getattr(step, name)
            if name in ("new", "resumed", "finished", "first_token"):
                got = sorted(got)
            assert got == value, f"row {k}, step {step.step}, {name}: {got}, reference {value}"
    assert np.all(run.requests.status == core.DONE), "a request was lost"
    left = {name: int(run.count[name]) for name in ("free", "table_blocks", "live_tokens", "shared")}
    assert left == {"free": s.num_gpu_blocks - 1, "table_blocks": 0, "live_tokens": 0, "shared": 0}
