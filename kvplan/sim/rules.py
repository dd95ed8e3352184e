"""From resolved engine settings to the plain numbers that the compiled core runs on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from kvplan.errors import InputError
from kvplan.sched.core import Rules
from kvplan.sched.groups import Group
from kvplan.spec.engine import Resolved
from kvplan.spec.model import LayerKind

GROUP_KINDS = {
    LayerKind.FULL: "full",
    LayerKind.MLA: "full",
    LayerKind.SLIDING: "window",
    LayerKind.CHUNKED: "chunk",
    LayerKind.STATE: "state",
}


class LaidOut(Protocol):
    """What is needed of a group of `kvplan.memory.kvlayout`."""

    @property
    def kind(self) -> LayerKind: ...
    @property
    def block_size(self) -> int: ...
    @property
    def window(self) -> int: ...


def groups_for(model_name: str, engine: Resolved, laid_out: Sequence[LaidOut]) -> tuple[Group, ...]:
    """The groups that the scheduler sees, in the engine's order.

    Raises `InputError` for groups whose blocks differ in tokens, and for a retention that is not known.
    """
    by_tokens = [group for group in laid_out if group.kind is not LayerKind.STATE]
    if not by_tokens:
        raise InputError(f"{model_name} keeps states only: simulate needs a group that grows with tokens.")
    if len({group.block_size for group in by_tokens}) > 1:
        sizes = ", ".join(str(group.block_size) for group in by_tokens)
        raise InputError(
            f"{model_name} has KV groups with blocks of {sizes} tokens; only groups of one block size are "
            "simulated.\n  --disable-hybrid-kv-cache-manager runs windowed layers as full attention."
        )
    groups = tuple(
        Group(kind, group.window if kind in ("window", "chunk") else 0)
        for group, kind in ((group, GROUP_KINDS[group.kind]) for group in laid_out)
    )
    check_retention(engine, groups)
    return groups


def check_retention(engine: Resolved, groups: Sequence[Group]) -> None:
    """Refuse an interval between retained blocks: only its two ends, 0 and none, are known."""
    if engine.prefix_cache_retention_interval and any(g.kind in ("window", "state") for g in groups):
        raise InputError(
            f"--prefix-cache-retention-interval {engine.prefix_cache_retention_interval}: simulate knows 0 "
            "(only what a replay or a shared prefix needs) and none (every block)."
        )


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
