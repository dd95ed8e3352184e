"""A slow, plain-Python scheduler of vLLM V1's rules, written to be read; the compiled core must equal it.

Numbers in brackets are sections of the rules (SCHEDULER_RULES.md). Blocks and requests are objects, contents
are tuples of tokens, queues are lists: nothing is shared with the compiled core but the rules.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

Token = tuple[Any, ...]  # (tenant, stream, position)
Content = tuple[Any, ...]  # (content of the block before, tokens)


@dataclass(frozen=True)
class Settings:
    num_blocks: int  # with the null block
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int = 1 << 30
    chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    lone_request_exempt: bool = True
    prefix_caching: bool = True
    priority: bool = False
    watermark_blocks: int = 0
    reserve_full_isl: bool = True
    unhashed_to_front: bool = True
    shift_by_position: bool = True
    asynchronous: bool = False


@dataclass(eq=False)
class Block:
    id: int
    ref: int = 0
    content: Content | None = None


@dataclass(eq=False)
class Request:
    index: int
    arrival_step: int
    tokens: list[Token]  # prompt, then the whole answer to come
    prompt: int
    stop: int  # length at which it ends
    priority: int = 0
    length: int = 0  # prompt + outputs delivered
    computed: int = 0
    blocks: list[Block] = field(default_factory=list)
    cached: int = 0  # leading blocks with content
    placeholders: int = 0  # outputs in flight
    preemptions: int = 0
    status: str = "pending"

    @property
    def rank(self) -> tuple[int, int, int]:
        return self.priority, self.arrival_step, self.index


@dataclass
class Step:
    """What one call of the scheduler decided (columns of the records)."""

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


class Pool:
    """Reference-counted blocks; those that nobody names stand in the free queue, content and all [6]."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.blocks = [Block(i) for i in range(settings.num_blocks)]
        self.free = deque(self.blocks[1:])  # block 0 is the null block [5.1]
        self.table: dict[Content, list[Block]] = {}  # oldest first [5.5]

    def take(self) -> Block:
        block = self.free.popleft()
        self.forget(block)  # evicted at this moment [6.1]
        block.ref = 1
        return block

    def forget(self, block: Block) -> None:
        if block.content is not None:
            twins = self.table[block.content]
            twins.remove(block)
            if not twins:
                del self.table[block.content]
            block.content = None

    def remember(self, block: Block, content: Content) -> None:
        block.content = content
        self.table.setdefault(content, []).append(block)

    def touch(self, block: Block) -> None:
        if block.ref == 0:
            self.free.remove(block)
        block.ref += 1

    def release(self, blocks: list[Block]) -> None:
        """Tail first; what has no content goes to the front of the queue, the rest to its end [6.2]."""
        front = []
        for block in reversed(blocks):
            block.ref -= 1
            if block.ref > 0:
                continue
            if block.content is None and self.settings.unhashed_to_front:
                front.append(block)
            else:
                self.free.append(block)
        self.free.extendleft(reversed(front))


class Scheduler:
    """`schedule` fills a batch, `update` delivers its tokens; `steps` runs a trace on the step clock."""

    def __init__(self, settings: Settings, requests: list[Request]) -> None:
        self.settings = settings
        self.requests = requests
        self.pool = Pool(settings)
        self.running: list[Request] = []
        self.waiting: list[Request] = []

    # -- content -------------------------------------------------------------------------------------

    def content(self, request: Request, k: int) -> Content:
        size = self.settings.block_size
        before = self.content(request, k - 1) if k else None
        return before, tuple(request.tokens[k * size : (k + 1) * size])

    def cache(self, request: Request, tokens: int) -> None:
        """Enter full blocks when they are scheduled, not when they are computed [5.4]."""
        if not self.settings.prefix_caching:
            return
        full = tokens // self.settings.block_size
        for k in range(request.cached, full):
            self.pool.remember(request.blocks[k], self.content(request, k))
        request.cached = max(request.cached, full)

    def hits(self, request: Request) -> list[Block]:
        """Leading blocks in the table; one token is always computed anew [5.6]."""
        found: list[Block] = []
        if self.settings.prefix_caching:
            for k in range((request.length - 1) // self.settings.block_size):
                twins = self.pool.table.get(self.content(request, k))
                if not twins:
                    break
                found.append(twins[0])
        return found

    # -- one step ------------------------------------------------------------------------------------

    def schedule(self, step: Step) -> list[tuple[Request, bool]]:
        """The batch as (request, whether it samples a token)."""
        s = self.settings
        budget = s.max_num_batched_tokens
        threshold = s.long_prefill_token_threshold
        if s.lone_request_exempt and len(self.running) + len(self.waiting) <= 1:  # [2.3]
            threshold = 0
        scheduled: dict[Request, int] = {}
        grown: dict[Request, list[Block]] = {}

        i = 0
        while i < len(self.running) and budget > 0:  # [2.2]
            request = self.running[i]
            i += 1
            if request.placeholders and request.computed + 2 - request.placeholders >= request.stop:
                continue  # certain to end with the output in flight [1.3]
            n = request.length + request.placeholders - request.computed
            n = min(n, threshold) if threshold else n
            n = min(n, budget, s.max_model_len - request.computed - 1)
            if n <= 0:
                continue
            added = self.grow(request, n)
            while added is None:
                victim = max(self.running, key=lambda r: r.rank) if s.priority else self.running[-1]  # [4.2]
                place = self.running.index(victim)
                if victim in scheduled:  # its tokens go back to the budget [4.3]
                    budget += scheduled.pop(victim)
                    grown.pop(victim)
                    i -= 1
                elif s.shift_by_position and place < i - 1:
                    i -= 1
                self.preempt(victim, step)
                if victim is request:
                    break
                added = self.grow(request, n)
            if added is None:
                break
            scheduled[request] = n
            grown[request] = added
            budget -= n

        admitted: list[Request] = []
        passed: list[Request] = []
        while not step.preempted and budget > 0 and self.waiting and len(self.running) < s.max_num_seqs:
            if s.priority:
                self.waiting.sort(key=lambda r: r.rank)
            request = self.waiting[0]
            if request.placeholders:  # its last output is still in flight [1.3]
                passed.append(self.waiting.pop(0))
                continue
            hits = self.hits(request)
            n = request.length - len(hits) * s.block_size
            n = min(n, threshold) if threshold else n
            if n > budget and not s.chunked_prefill:
                break
            n = min(n, budget)
            idle = sum(block.ref == 0 for block in hits)
            room = len(self.pool.free) - idle - (s.watermark_blocks if self.running else 0)
            whole = self.blocks_for(min(request.length, s.max_model_len))
            if s.reserve_full_isl and whole - len(hits) > room:  # [3.1]
                break
            first = self.blocks_for(min(len(hits) * s.block_size + n, s.max_model_len))
            if first - len(hits) > room:  # [3.2]
                break
            self.waiting.pop(0)
            for block in hits:
                self.pool.touch(block)
            request.blocks = hits + [self.pool.take() for _ in range(first - len(hits))]
            request.computed = len(hits) * s.block_size
            request.cached = len(hits)
            self.cache(request, min(request.computed + n, request.length))
            request.status = "running"
            self.running.append(request)
            admitted.append(request)
            scheduled[request] = n
            budget -= n
            self.count_hits(request, step)
        self.waiting = passed + self.waiting

        news = [r for r in admitted if r.preemptions == 0]
        again = [r for r in admitted if r.preemptions > 0]
        step.sched_req = [r.index for r in scheduled]
        step.sched_tok = list(scheduled.values())
        step.new = [r.index for r in news]
        step.resumed = [r.index for r in again]
        tables = [b for r in news for b in r.blocks] + [b for got in grown.values() for b in got]
        step.alloc_block_ids = [b.id for b in tables + [b for r in again for b in r.blocks]]
        batch = []
        for request, n in scheduled.items():  # [1.2]
            request.computed += n
            samples = request.computed == request.length + request.placeholders
            request.placeholders += samples
            batch.append((request, samples))
        return batch

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.settings.block_size)

    def grow(self, request: Request, n: int) -> list[Block] | None:
        need = self.blocks_for(request.computed + n) - len(request.blocks)
        if need > len(self.pool.free):
            return None
        added = [self.pool.take() for _ in range(need)]
        request.blocks += added
        self.cache(request, min(request.computed + n, request.length))
        return added

    def preempt(self, victim: Request, step: Step) -> None:
        """All blocks at once; back to the head of the queue with its outputs [4.4]."""
        self.running.remove(victim)
        self.pool.release(victim.blocks)
        victim.blocks, victim.computed, victim.cached = [], 0, 0
        victim.preemptions += 1
        victim.status = "waiting"
        self.waiting.insert(0, victim)
        step.preempted.append(victim.index)

    def count_hits(self, request: Request, step: Step) -> None:
        if not self.settings.prefix_caching:
            return
        if request.preemptions == 0:
            step.cache_query_tokens += request.length
            step.cache_hit_tokens += request.computed
        else:
            step.preempt_cache_query_tokens += request.length
            step.preempt_cache_hit_tokens += request.computed

    def update(self, batch: list[tuple[Request, bool]], step: Step) -> None:
        """Deliver sampled tokens in the order of the batch; complete requests free their blocks [7]."""
        for request, samples in batch:
            if not samples:
                continue
            request.length += 1
            request.placeholders -= 1
            if request.length == request.prompt + 1:
                step.first_token.append(request.index)
            if self.settings.asynchronous and request.status == "running":
                self.cache(request, request.computed - request.placeholders)
            if request.length >= request.stop:
                step.finished.append(request.index)
                self.pool.release(request.blocks)
                request.blocks = []
                (self.running if request.status == "running" else self.waiting).remove(request)
                request.status = "finished"

    # -- a run ---------------------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        """Run to the end, one step a second; a row a step in which something is unfinished."""
        to_come = deque(sorted(self.requests, key=lambda r: (r.arrival_step, r.index)))
        flights: deque[list[tuple[Request, bool]]] = deque()
        record: list[Step] = []
        now = 0
        while to_come or self.running or self.waiting or flights:
            while to_come and to_come[0].arrival_step <= now:
                request = to_come.popleft()
                request.length = request.prompt
                too_long = request.prompt >= self.settings.max_model_len  # [3.5]
                if too_long or self.blocks_for(request.stop - 1) > self.settings.num_blocks - 1:
                    request.status = "rejected"
                else:
                    request.status = "waiting"
                    self.waiting.append(request)
            if not (self.running or self.waiting or flights):
                now = max(now, to_come[0].arrival_step) if to_come else now
                continue
            step = Step(now, free_before=len(self.pool.free))
            batch = self.schedule(step)
            if not batch and not (self.running or step.preempted or flights):
                self.waiting.pop(0).status = "rejected"  # it can never be admitted: not a hang
                continue
            queue = sorted(self.waiting, key=lambda r: r.rank) if self.settings.priority else self.waiting
            step.running = [r.index for r in self.running]
            step.n_waiting = len(self.waiting)
            step.waiting_head = [r.index for r in queue[:4]]
            step.free_after_schedule = len(self.pool.free)
            step.used_after_schedule = self.settings.num_blocks - 1 - len(self.pool.free)
            if batch:
                flights.append(batch)
            if flights and not (self.settings.asynchronous and batch and len(flights) < 2):
                self.update(flights.popleft(), step)
            step.free_after_update = len(self.pool.free)
            step.free_head8 = [b.id for b in list(self.pool.free)[:8]]
            step.preempted.sort()
            record.append(step)
            check_invariants(self)
            now += 1
        return record


def check_invariants(scheduler: Scheduler) -> None:
    """ARCHITECTURE.md: free xor referenced, counts equal tables, contents equal keys, nothing lost."""
    pool, live = scheduler.pool, scheduler.running
    free = set(map(id, pool.free))
    assert len(free) == len(pool.free), "a block stands twice in the free queue"
    named: dict[int, int] = {}
    for request in live:
        for block in request.blocks:
            named[id(block)] = named.get(id(block), 0) + 1
    for block in pool.blocks[1:]:
        assert (id(block) in free) == (block.ref == 0), (
            f"block {block.id} is neither free nor referenced, or both"
        )
        assert block.ref == named.get(id(block), 0), f"block {block.id}: reference count is not its tables"
        if block.content is not None:
            assert block in pool.table[block.content]
    for request in live:
        for k in range(request.cached):
            assert request.blocks[k].content == scheduler.content(request, k), "a block holds other content"
    assert len(free) + len(named) == len(pool.blocks) - 1
