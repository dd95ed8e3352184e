"""What must hold after every step (ARCHITECTURE.md), checked against what the model wrote where."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.sched.reference_pool import NULL, Block

if TYPE_CHECKING:
    from tests.sched.reference_scheduler import Scheduled, Scheduler


class Ledger:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def write(self, batch: list[Scheduled]) -> None:
        """The batch is computed: each token's KV goes to its slot in every group's table."""
        cache = self.scheduler.cache
        for request, first, end in ((b.request, b.first, b.first + b.tokens) for b in batch):
            for kind, table in zip(cache.groups, cache.tables[request.index], strict=True):
                size = kind.block_size
                for k in range(first // size, -(-end // size)):
                    block = table.blocks[k]
                    if block is not NULL:
                        block.promised = False
                        block.written = request.content.tokens(k * size, min(end, (k + 1) * size))

    def check_invariants(self) -> None:
        cache, pool = self.scheduler.cache, self.scheduler.pool
        named = Counter(b.id for tables in cache.tables.values() for table in tables for b in table.blocks)
        del named[NULL.id]
        for block in pool.blocks[1:]:
            free = block.id in pool.free_queue
            assert free == (block.references == 0), f"block {block.id} must be free or referenced, not both"
            assert block.references == named[block.id], f"block {block.id}: references are not its tables"
        assert pool.free + len(named) == len(pool.blocks) - 1, "free + used = total"
        for (group, key), twins in pool.cached.items():
            for block in twins:
                assert (block.group, block.key) == (group, key)
                if block.promised:
                    continue
                assert block.written == cache.keys.of[key].tokens, f"block {block.id} does not hold its key"
        for request in self.scheduler.running:
            self.check_reads(request.index)

    def check_reads(self, index: int) -> None:
        """Each token that a later query reads is there, the request's own, of its own tenant."""
        cache = self.scheduler.cache
        request = next(r for r in self.scheduler.running if r.index == index)
        for kind, table in zip(cache.groups, cache.tables[index], strict=True):
            size = kind.block_size
            for k in range(kind.skipped_tokens(request.computed) // size, -(-request.computed // size)):
                block: Block = table.blocks[k]
                own = request.content.tokens(k * size, min(request.computed, (k + 1) * size))
                assert block is not NULL, f"request {index}: block {k} is needed and gone"
                if block.promised:
                    continue
                assert block.written == own, f"request {index}: block {k} holds other content"
                if block.key is not None and k == 0:
                    assert cache.keys.of[block.key].tenant == request.tenant, "another tenant's content"
