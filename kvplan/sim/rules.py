"""From resolved engine settings to the plain numbers that the compiled core runs on."""

from __future__ import annotations

import math

from kvplan.sched.core import Rules
from kvplan.spec.engine import Resolved


def rules_for(
    engine: Resolved, num_blocks: int, block_size: int, *, max_concurrency: int = 0, record: bool = False
) -> Rules:
    """Rules of one run. ``num_blocks`` includes the null block, as the engine logs it.

    What differs by release is data (SCHEDULER_RULES section 9): the free queue's order and the watermark from
    0.26, the index shift under priority from 0.29, the lone-request exemption in 0.32. int(), float() and
    bool() because numba compiles anew for every other exact type.
    """
    settings, version = engine.settings, engine.version
    watermark = settings.watermark if version >= (0, 26) else 0.0
    return Rules(
        num_blocks=int(num_blocks),
        block_size=int(block_size),
        max_num_seqs=int(engine.max_num_seqs),
        max_num_batched_tokens=int(engine.max_num_batched_tokens),
        max_model_len=int(engine.max_model_len),
        chunked_prefill=bool(engine.enable_chunked_prefill),
        long_prefill_token_threshold=int(settings.long_prefill_token_threshold),
        lone_request_exempt=bool(version >= (0, 32)),
        prefix_caching=bool(engine.enable_prefix_caching),
        priority=settings.scheduling_policy == "priority",
        watermark_blocks=math.floor(watermark * num_blocks),
        reserve_full_isl=bool(engine.scheduler_reserve_full_isl),
        unhashed_to_front=bool(version >= (0, 26)),
        shift_by_position=bool(version >= (0, 29)),
        asynchronous=bool(engine.async_scheduling),
        max_concurrency=int(max_concurrency),
        record=bool(record),
    )
