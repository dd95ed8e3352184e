"""A slow scheduler of vLLM V1 over the pools of `reference_groups`, full or hybrid, written to be read.

``simulate(settings, requests)`` runs a trace on the step clock and returns what each step decided.
Section numbers are those of SCHEDULER_RULES.md.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from tests.sched.reference_check import Ledger
from tests.sched.reference_groups import ChunkedLocal, FullAttention, KVCache, Mamba, SlidingWindow
from tests.sched.reference_model import Request, Settings, StepRecord
from tests.sched.reference_pool import BlockPool, Keys


@dataclass(frozen=True)
class Scheduled:
    request: Request
    first: int  # position of the first token computed
    tokens: int
    samples: bool  # the chunk ends at the newest token, so it yields one (1.2)


class WaitingQueue:
    """First come first served, or a heap by (priority, arrival, id); victims go to its head (4.4)."""

    def __init__(self, by_priority: bool) -> None:
        self.by_priority = by_priority
        self.fifo: deque[Request] = deque()
        self.heap: list[tuple[tuple[int, int, int], Request]] = []

    def __len__(self) -> int:
        return len(self.fifo) + len(self.heap)

    def __iter__(self) -> Iterator[Request]:
        """In the order of leaving."""
        return iter([request for _, request in sorted(self.heap)] if self.by_priority else self.fifo)

    def add(self, request: Request) -> None:
        if self.by_priority:
            heapq.heappush(self.heap, (request.rank, request))
        else:
            self.fifo.append(request)

    def put_back(self, request: Request) -> None:
        if self.by_priority:
            self.add(request)
        else:
            self.fifo.appendleft(request)

    def head(self) -> Request:
        return self.heap[0][1] if self.by_priority else self.fifo[0]

    def pop(self) -> Request:
        return heapq.heappop(self.heap)[1] if self.by_priority else self.fifo.popleft()

    def remove(self, request: Request) -> None:
        if self.by_priority:
            self.heap.remove((request.rank, request))
            heapq.heapify(self.heap)
        else:
            self.fifo.remove(request)


def attention(kind: str, settings: Settings) -> FullAttention:
    name, _, size = kind.partition(":")
    block_size = settings.block_size
    if name == "mamba":  # without prefix caching one state a request, in place: cache mode "none" (8.5)
        return Mamba(block_size) if settings.enable_prefix_caching else FullAttention(settings.max_model_len)
    if name == "window":
        return SlidingWindow(block_size, int(size))
    if name == "chunk":
        return ChunkedLocal(block_size, int(size))
    return FullAttention(block_size)


class Scheduler:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pool = BlockPool(settings.num_gpu_blocks, settings.has("unhashed blocks to the front"))
        self.cache = KVCache(
            groups=[attention(kind, settings) for kind in settings.groups],
            pool=self.pool,
            keys=Keys(settings.block_size),
            prefix_caching=settings.enable_prefix_caching,
            sparse=settings.prefix_cache_retention_interval == 0 and settings.has("sparse retention"),
            max_in_flight_tokens=settings.max_in_flight_tokens,
            max_model_len=settings.max_model_len,
        )
        self.running: list[Request] = []  # in order of admission
        self.waiting = WaitingQueue(settings.policy == "priority")

    @property
    def unfinished(self) -> bool:
        return bool(self.running or len(self.waiting))

    def add(self, request: Request) -> None:
        """Reject what can never run: a prompt without room for an output (3.5), or more than the pool."""
        end = min(request.ends, self.settings.max_model_len)
        too_long = request.prompt_tokens >= self.settings.max_model_len
        if too_long or not self.cache.can_ever_fit(end - 1):
            request.status = "rejected"
        else:
            request.status = "waiting"
            self.waiting.add(request)

    # ------------------------------------------------------------------------------------ schedule()

    def schedule(self, record: StepRecord) -> list[Scheduled]:
        """Choose who computes how many tokens in this step (2): first who runs, then who waits."""
        s = self.settings
        self.budget = s.max_num_batched_tokens
        self.threshold = s.long_prefill_token_threshold
        alone = len(self.running) + len(self.waiting) <= 1
        if alone and s.has("lone request exempt from threshold"):  # (2.3)
            self.threshold = 0
        self.tokens: dict[Request, int] = {}  # scheduled in this step, in order
        self.new_blocks: dict[Request, list[int]] = {}
        self.cache.new_states.clear()
        self.schedule_running(record)
        if not record.preempted:  # a step that preempts admits nobody (2.4)
            self.schedule_waiting(record)
        self.describe(record)
        return [self.advance(request, n) for request, n in self.tokens.items()]

    def limited(self, n: int) -> int:
        return min(n, self.threshold) if self.threshold > 0 else n

    def cut(self, request: Request, first: int, n: int) -> int:
        """With states in layers, a prefill chunk ends where one can be kept, or at the end (8.5)."""
        if not any(isinstance(kind, Mamba) for kind in self.cache.groups):
            return n
        if first >= max(request.prompt_tokens, request.num_tokens - 1):
            return n  # decode
        size, end = self.settings.block_size, first + n
        last = (request.num_tokens - 1) // size * size  # where a lookup of the same tokens would end (5.6)
        if end < last:
            aligned = end // size * size
            if aligned > first or size <= self.limited(self.settings.max_num_batched_tokens):
                end = aligned  # else no chunk can hold a block: go on within it
        stops = [last, (first // size + 1) * size if first % size else last]
        if first < request.junction < end:
            stops.append(first + (request.junction - first) // size * size)
        return max(min([end, *(stop for stop in stops if first < stop)]) - first, 0)

    def schedule_running(self, record: StepRecord) -> None:
        self.at = 0
        while self.at < len(self.running) and self.budget > 0:
            request = self.running[self.at]
            self.at += 1
            if request.placeholders > 0 and request.computed + 2 - request.placeholders >= request.ends:
                continue  # its output in flight is certain to be its last (1.3)
            n = self.limited(request.num_tokens + request.placeholders - request.computed)
            n = min(n, self.budget, self.settings.max_model_len - request.computed - 1)
            n = self.cut(request, request.computed, n)
            if n <= 0:
                continue
            new = self.cache.grow(request, n)
            while new is None:
                victim = self.preempt_one(record)
                if victim is request:
                    return  # the running loop stops for this step (4.2)
                new = self.cache.grow(request, n)
            self.tokens[request] = n
            self.new_blocks[request] = [block.id for group in new for block in group]
            self.budget -= n

    def preempt_one(self, record: StepRecord) -> Request:
        """Free the blocks of the latest admitted, or of the least urgent (4.2 to 4.5)."""
        victim = self.running[-1]
        if self.settings.policy == "priority":
            victim = max(self.running, key=lambda request: request.rank)
        place = self.running.index(victim)
        self.running.remove(victim)
        was_scheduled = victim in self.tokens
        if was_scheduled:
            for kind, table in zip(self.cache.groups, self.cache.tables[victim.index], strict=True):
                for block in table.blocks[victim.computed // kind.block_size :]:
                    block.promised = block.key is not None
            self.budget += self.tokens.pop(victim)
            del self.new_blocks[victim]
        by_place = self.settings.has("priority index moves back by list position")
        if was_scheduled or (by_place and place < self.at - 1):
            self.at -= 1
        self.cache.free(victim)
        victim.computed = 0
        victim.preemptions += 1
        victim.status = "waiting"
        self.waiting.put_back(victim)
        record.preempted.append(victim.index)
        return victim

    def schedule_waiting(self, record: StepRecord) -> None:
        s = self.settings
        passed: list[Request] = []  # victims whose output is still in flight (1.3)
        while self.budget > 0 and len(self.waiting) and len(self.running) < s.max_num_seqs:
            request = self.waiting.head()
            if request.placeholders > 0:
                passed.append(self.waiting.pop())
                continue
            hit = self.cache.lookup(request)
            request.junction = hit.junction  # of the latest try, even a failed one (8.7)
            n = self.limited(request.num_tokens - hit.tokens)
            if n > self.budget and not s.enable_chunked_prefill:
                break  # no skipping over the head (2.5)
            n = self.cut(request, hit.tokens, min(n, self.budget))
            if n <= 0:
                break
            reserve = s.scheduler_reserve_full_isl and s.has("reserve the full prompt")
            watermark = int(s.watermark * s.num_gpu_blocks) if self.running and s.has("watermark") else 0
            if not self.cache.admit(request, hit, n, reserve, watermark):
                break
            self.waiting.pop()
            self.running.append(request)
            request.status = "running"
            request.computed = request.delivered = hit.tokens
            self.tokens[request] = n
            self.budget -= n
            (record.resumed if request.preemptions else record.new).append(request.index)
            if s.enable_prefix_caching:  # counted at a successful admission only (3.4)
                if request.preemptions:
                    record.preempt_cache_query_tokens += request.num_tokens
                    record.preempt_cache_hit_tokens += hit.tokens
                else:
                    record.cache_query_tokens += request.num_tokens
                    record.cache_hit_tokens += hit.tokens
        for request in reversed(passed):
            self.waiting.put_back(request)

    def advance(self, request: Request, n: int) -> Scheduled:
        """The tokens count as computed from here on, the sampled one as a placeholder (1.2, 1.3)."""
        first = request.computed
        request.computed += n
        samples = request.computed == request.num_tokens + request.placeholders
        request.placeholders += samples
        return Scheduled(request, first, n, samples)

    # -------------------------------------------------------------------------- update_from_output()

    def update(self, batch: list[Scheduled], record: StepRecord) -> None:
        """Deliver the sampled tokens in the order of the batch; who ends frees its blocks (6.4, 7)."""
        for scheduled in batch:
            request = scheduled.request
            request.delivered += scheduled.tokens
            if not scheduled.samples:
                continue
            request.output_tokens += 1
            request.placeholders -= 1
            if request.output_tokens == 1:
                record.first_token.append(request.index)
            is_running = request.status == "running"
            if self.settings.async_scheduling and is_running:  # (1.3)
                self.cache.remember(request, request.computed - request.placeholders)
            if request.num_tokens >= min(request.ends, self.settings.max_model_len):
                record.finished.append(request.index)
                self.cache.free(request)
                request.status = "finished"
                (self.running if is_running else self.waiting).remove(request)

    # --------------------------------------------------------------------------------------- records

    def describe(self, record: StepRecord) -> None:
        record.sched_req = [request.index for request in self.tokens]
        record.sched_tok = list(self.tokens.values())
        record.running = [request.index for request in self.running]
        record.n_waiting = len(self.waiting)
        record.waiting_head = [request.index for request in self.waiting][:4]
        record.free_after_schedule = self.pool.free
        record.used_after_schedule = self.settings.num_gpu_blocks - 1 - self.pool.free

        def tables(indices: list[int]) -> list[int]:
            return [b.id for i in indices for table in self.cache.tables[i] for b in table.blocks]

        grown = [block for blocks in self.new_blocks.values() for block in blocks]
        record.alloc_block_ids = tables(record.new) + grown + tables(record.resumed)


def simulate(
    settings: Settings, requests: list[Request], check: bool = False, steps: int | None = None
) -> list[StepRecord]:
    """Run all requests to their end, a step at a time (1), or the first ``steps`` steps.

    ``check`` tests the invariants after every step. A request that can never fit is rejected (3.5).
    """
    scheduler = Scheduler(settings)
    ledger = Ledger(scheduler) if check else None
    to_come = deque(sorted(requests, key=lambda request: (request.arrival_step, request.index)))
    in_flight: deque[list[Scheduled]] = deque()
    records: list[StepRecord] = []
    step = 0
    while to_come or scheduler.unfinished:
        if not scheduler.unfinished:  # the engine does not step when nothing is unfinished (1.4)
            step = max(step, to_come[0].arrival_step)
        while to_come and to_come[0].arrival_step <= step:
            scheduler.add(to_come.popleft())
        if not scheduler.unfinished:
            continue
        record = StepRecord(step, free_before=scheduler.pool.free)
        batch = scheduler.schedule(record)
        if not (batch or scheduler.running or record.preempted or in_flight):
            scheduler.waiting.pop().status = "rejected"  # the head will never be admitted: not a hang
            continue
        if batch:
            in_flight.append(batch)
        if ledger:
            ledger.write(batch)
        if in_flight and not (settings.async_scheduling and batch and len(in_flight) < 2):
            scheduler.update(in_flight.popleft(), record)
        record.free_after_update = scheduler.pool.free
        record.free_head8 = list(islice(scheduler.pool.free_queue, 8))
        for column in (record.new, record.resumed, record.preempted, record.finished, record.first_token):
            column.sort()
        records.append(record)
        if ledger:
            ledger.check_invariants()
        step += 1
        if len(records) == steps:
            break
    return records
