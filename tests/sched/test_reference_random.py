"""Random workloads over random pools: the reference ends, loses no request, leaves no block behind.

Given: prompts that share prefixes, tenants, later turns, priorities; full, window, chunked and Mamba groups;
scarce pools, thresholds, both loops, old and new engine versions. Expected: the invariants of ARCHITECTURE.md
after every step (`reference_check`), every request finished or rejected, all blocks free at the end.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.sched.reference_model import Request, Settings
from tests.sched.reference_scheduler import simulate

EXAMPLES = int(os.environ.get("KVPLAN_EXAMPLES", "600")) // 4

POOLS = [
    ("full",),
    ("window:5",),
    ("window:9", "window:9", "full"),
    ("chunk:8", "chunk:8", "full"),
    ("mamba", "mamba", "full"),
    ("window:6", "chunk:8", "full"),
]


@st.composite
def engines(draw: st.DrawFn) -> Settings:
    return Settings(
        num_gpu_blocks=draw(st.integers(4, 90)),
        block_size=draw(st.sampled_from([1, 2, 4])),
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(1, 40)),
        max_model_len=draw(st.sampled_from([30, 200])),
        enable_chunked_prefill=draw(st.sampled_from([True, True, True, False])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3, 10])),
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        async_scheduling=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.1])),
        scheduler_reserve_full_isl=draw(st.booleans()),
        engine_version=draw(st.sampled_from(["0.11.2", "0.19.0", "0.22.1", "0.26.0", "0.29.0", "0.32.0"])),
        groups=draw(st.sampled_from(POOLS)),
        prefix_cache_retention_interval=draw(st.sampled_from([0, None])),
    )


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    made: list[Request] = []
    for i in range(draw(st.integers(1, 12))):
        tenant = draw(st.integers(0, 1))
        segments = [(f"system {draw(st.integers(0, 2))}", 0, draw(st.integers(1, 25)))]
        later_turn: bool = draw(st.booleans())
        if made and later_turn:  # a later turn: an earlier prompt, a part of its answer
            before = draw(st.sampled_from(made))
            tenant = before.tenant
            taken = draw(st.integers(1, before.max_tokens))
            segments = [*before.segments, (before.output_stream, 0, taken)]
        segments.append((f"question {i}", 0, draw(st.integers(1, 15))))
        made.append(
            Request(
                index=i,
                arrival_step=draw(st.integers(0, 20)),
                segments=segments,
                output_stream=f"answer {i}",
                max_tokens=draw(st.integers(1, 20)),
                priority=draw(st.integers(0, 2)),
                tenant=tenant,
            )
        )
    return made


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(engines(), workloads())
def test_every_run_ends_whole(engine: Settings, requests: list[Request]) -> None:
    limit = 5000

    records = simulate(engine, requests, check=True, steps=limit)

    assert len(records) < limit, "the run does not end"
    assert {request.status for request in requests} <= {"finished", "rejected"}
    finished = sorted(index for record in records for index in record.finished)
    assert finished == [request.index for request in requests if request.status == "finished"]
    if records:
        assert records[-1].free_after_update == engine.num_gpu_blocks - 1, "a block was left behind"
