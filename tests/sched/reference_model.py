"""What the reference scheduler takes and gives: settings by engine release, requests, a record a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.sched.reference_pool import Content

Version = tuple[int, ...]


@dataclass(frozen=True)
class Settings:
    """vLLM's own names; ``groups`` are "full", "window:W", "chunk:C" or "mamba", in the engine's order."""

    num_gpu_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    policy: str = "fcfs"
    async_scheduling: bool = False
    watermark: float = 0.0
    scheduler_reserve_full_isl: bool = True
    engine_version: str = "0.32.0"
    groups: tuple[str, ...] = ("full",)
    prefix_cache_retention_interval: int | None = 0

    @property
    def version(self) -> Version:
        return tuple(int(part) for part in self.engine_version.split("."))

    def has(self, rule: str) -> bool:
        return self.version >= FIRST_RELEASE[rule]

    @property
    def max_in_flight_tokens(self) -> int:
        """Tokens in batches under way at once (8.4)."""
        batches = 2 if self.async_scheduling and self.has("window cap counts batches in flight") else 1
        return batches * self.max_num_batched_tokens


# Section 9: the first release whose sources have the rule. All others hold in every release.
FIRST_RELEASE: dict[str, Version] = {
    "reserve the full prompt": (0, 19, 0),
    "unhashed blocks to the front": (0, 26, 0),
    "watermark": (0, 26, 0),
    "window cap counts batches in flight": (0, 26, 0),
    "sparse retention": (0, 29, 0),
    "priority index moves back by list position": (0, 29, 0),
    "lone request exempt from threshold": (0, 32, 0),
}


@dataclass(eq=False)
class Request:
    """``segments`` are (stream, start, length) of the prompt; ``output_stream`` is that of the answer."""

    index: int
    arrival_step: int
    segments: list[tuple[Any, int, int]]
    output_stream: Any
    max_tokens: int
    priority: int = 0
    tenant: Any = None

    status: str = "to come"  # waiting, running, finished, rejected
    output_tokens: int = 0
    computed: int = 0  # tokens whose KV is there, or under way in a batch
    delivered: int = 0  # of them, those whose batch has come back
    placeholders: int = 0  # sampled tokens in flight: scheduled, not delivered (1.3)
    preemptions: int = 0
    keys: list[int] = field(default_factory=list)
    junction: int = 0  # where its prefix was longer in some kind of layer than in all, else 0 (8.7)

    def __post_init__(self) -> None:
        self.content = Content([*self.segments, (self.output_stream, 0, self.max_tokens)])
        self.prompt_tokens = sum(length for _, _, length in self.segments)

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def ends(self) -> int:
        """Prompt and outputs at the latest end, before max_model_len (7.1)."""
        return self.prompt_tokens + self.max_tokens

    @property
    def rank(self) -> tuple[int, int, int]:
        return self.priority, self.arrival_step, self.index


@dataclass
class StepRecord:
    """The columns of ../shared/oracle (its README): indices of requests, tokens, blocks."""

    step: int
    sched_req: list[int] = field(default_factory=list)
    sched_tok: list[int] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    first_token: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    n_waiting: int = 0
    waiting_head: list[int] = field(default_factory=list)
    free_before: int = 0
    free_after_schedule: int = 0
    free_after_update: int = 0
    used_after_schedule: int = 0
    cache_query_tokens: int = 0
    cache_hit_tokens: int = 0
    preempt_cache_query_tokens: int = 0
    preempt_cache_hit_tokens: int = 0
    alloc_block_ids: list[int] = field(default_factory=list)
    free_head8: list[int] = field(default_factory=list)
