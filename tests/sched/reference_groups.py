"""Kinds of attention layers, and the block tables of all requests: a table a group (sections 3 to 5 and 8).

A group is a set of layers that share one block table. All groups draw from one pool (8.1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

from tests.sched.reference_pool import NULL, Block, BlockPool, Content, Keys, cdiv


class Request(Protocol):
    """What the cache asks of a request in the scheduler."""

    index: int
    prompt_tokens: int
    tenant: object
    content: Content
    keys: list[int]  # of its full blocks, as far as asked for
    computed: int  # with the batches in flight
    delivered: int  # without them
    junction: int

    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True)
class FullAttention:
    """Layers that keep every token."""

    block_size: int

    def skipped_tokens(self, computed: int) -> int:
        """Leading tokens that no later query reads."""
        return 0

    def most_blocks(self, tokens: int, max_in_flight_tokens: int) -> int:
        """Most blocks that a request of ``tokens`` tokens holds at once; caps the check of 3.1 (8.4)."""
        return cdiv(tokens, self.block_size)

    def hit(self, has: Callable[[int], bool], bound: int) -> tuple[int, int]:
        """Blocks first..end-1 of the longest cached prefix of at most ``bound`` tokens (5.6); null before."""
        end = 0
        while end < bound // self.block_size and has(end):
            end += 1
        return 0, end

    def keeps(self, k: int, boundaries: set[int] | None) -> bool:
        """Whether full block ``k`` enters the table of cached blocks."""
        return True

    def first_written(self, held: int, required: int) -> int:
        """The first block that a chunk writes of those it adds, ``held`` to ``required``; null before."""
        return held


@dataclass(frozen=True)
class SlidingWindow(FullAttention):
    """Layers whose query reads the ``window`` latest tokens, itself included (8.4)."""

    window: int

    @property
    def window_blocks(self) -> int:
        """Cached blocks that the next query needs before it."""
        return cdiv(self.window - 1, self.block_size)

    def skipped_tokens(self, computed: int) -> int:
        return max(computed - self.window + 1, 0)

    def most_blocks(self, tokens: int, max_in_flight_tokens: int) -> int:
        return cdiv(min(self.window - 1 + max_in_flight_tokens, tokens), self.block_size) + 1

    def hit(self, has: Callable[[int], bool], bound: int) -> tuple[int, int]:
        """From right to left to a whole window; a shorter run counts if it starts at block 0 (8.6)."""
        end = first = bound // self.block_size
        while first > 0 and end - first < self.window_blocks:
            first -= 1
            if not has(first):
                end = first
        return first, end

    def keeps(self, k: int, boundaries: set[int] | None) -> bool:
        """Sparse retention keeps the window before each boundary; None is dense, all blocks (8.7)."""
        if boundaries is None:
            return True
        return any(0 < p // self.block_size - k <= self.window_blocks for p in boundaries)


@dataclass(frozen=True)
class ChunkedLocal(FullAttention):
    """Layers whose query reads back to the start of its chunk of ``chunk`` tokens (8.4)."""

    chunk: int

    def skipped_tokens(self, computed: int) -> int:
        return computed // self.chunk * self.chunk

    def most_blocks(self, tokens: int, max_in_flight_tokens: int) -> int:
        return cdiv(min(self.chunk + max_in_flight_tokens, tokens), self.block_size)

    def hit(self, has: Callable[[int], bool], bound: int) -> tuple[int, int]:
        """Blocks before the chunk that holds the bound count as present (8.6)."""
        first = end = self.skipped_tokens(bound) // self.block_size
        while end < bound // self.block_size and has(end):
            end += 1
        return first, end


@dataclass(frozen=True)
class Mamba(SlidingWindow):
    """Layers with one running state, kept in the block of its latest token (8.5, cache mode "align").

    To the cache this is a window of two tokens: the next one reads the block of the one before it.
    """

    window: int = 2

    def most_blocks(self, tokens: int, max_in_flight_tokens: int) -> int:
        """The state and the next one; never binds, as a chunk takes one block however long it is."""
        return cdiv(tokens, self.block_size)

    def first_written(self, held: int, required: int) -> int:
        """A chunk writes one state, at its end."""
        return max(held, required - 1)


@dataclass
class Table:
    """One request's blocks in one group, in order of position."""

    blocks: list[Block] = field(default_factory=list)
    seen: int = 0  # leading full blocks that had their turn to enter the table of cached blocks
    dropped: int = 0  # leading blocks given back


@dataclass(frozen=True)
class Hit:
    """Of a lookup: tokens that need no computing, and their blocks in each group."""

    tokens: int
    blocks: list[list[Block]]
    junction: int = 0  # longest hit of any single kind where the joint hit is shorter, else 0 (8.7)


@dataclass
class KVCache:
    groups: list[FullAttention]
    pool: BlockPool
    keys: Keys
    prefix_caching: bool
    sparse: bool  # prefix_cache_retention_interval 0; else dense (8.7)
    max_in_flight_tokens: int
    max_model_len: int
    tables: dict[int, list[Table]] = field(default_factory=dict)  # of a request's index: a table a group
    new_states: set[Block] = field(default_factory=set)  # cached in this step, so not yet to be read (8.5)

    def lookup(self, request: Request) -> Hit:
        """The longest prefix cached in every group; at least one token is computed anew (5.6, 8.6)."""
        if not self.prefix_caching:
            return Hit(0, [[] for _ in self.groups])
        size = self.keys.block_size
        self.keys.extend(request.keys, request.content, request.tenant, request.num_tokens // size)

        def has(group: int, k: int) -> bool:
            return self.pool.find(group, request.keys[k]) is not None

        bound = request.num_tokens - 1
        longest = 0
        first = [0] * len(self.groups)
        order = sorted(range(len(self.groups)), key=lambda g: type(self.groups[g]) is not FullAttention)
        for kind, members in groupby(order, key=lambda g: self.groups[g]):
            ids = list(members)
            start, end = kind.hit(lambda k, ids=ids: all(has(g, k) for g in ids), bound)
            bound = end * size
            longest = max(longest, bound)
            for g in ids:
                first[g] = start
        end = bound // size
        blocks = []
        for g in range(len(self.groups)):
            found = [self.pool.find(g, request.keys[k]) for k in range(first[g], end)]
            blocks.append([NULL] * min(first[g], end) + [block for block in found if block is not None])
        return Hit(bound, blocks, longest if longest > bound else 0)

    def needed(self, request: Request, tokens: int, hit: Hit | None = None, capped: bool = False) -> int:
        """Free blocks that ``tokens`` tokens take: new ones, and hits that lie in the free queue (3, 4.1)."""
        need = 0
        for g, kind in enumerate(self.groups):
            blocks = cdiv(tokens, kind.block_size)
            if capped:
                blocks = min(blocks, kind.most_blocks(self.max_model_len, self.max_in_flight_tokens))
            if hit is None:
                held = len(self.tables[request.index][g].blocks)
            else:
                skipped = kind.skipped_tokens(hit.tokens) // kind.block_size
                held = max(skipped, len(hit.blocks[g]))
                need += sum(block is not NULL and block.references == 0 for block in hit.blocks[g][skipped:])
            need += max(blocks - kind.first_written(held, blocks), 0)
        return need

    def can_ever_fit(self, tokens: int) -> bool:
        """Whether the empty pool holds a request of ``tokens`` tokens at its end."""
        most = 0
        for kind in self.groups:
            blocks = cdiv(tokens, kind.block_size)
            most += min(
                blocks, 2 if isinstance(kind, Mamba) else kind.most_blocks(tokens, self.max_in_flight_tokens)
            )
        return most <= self.pool.num_gpu_blocks - 1

    def admit(self, request: Request, hit: Hit, n: int, reserve_full: bool, watermark: int) -> bool:
        """Give a waiting request the blocks of its first chunk, if they are free (3)."""
        room = self.pool.free - watermark
        if any(block in self.new_states for blocks in hit.blocks for block in blocks):
            return False  # another request computes that state in this very step (5.4)
        if (
            reserve_full
            and self.needed(request, min(request.num_tokens, self.max_model_len), hit, True) > room
        ):
            return False
        if self.needed(request, min(hit.tokens + n, self.max_model_len), hit) > room:
            return False
        tables = []
        for kind, found in zip(self.groups, hit.blocks, strict=True):
            skipped = kind.skipped_tokens(hit.tokens) // kind.block_size
            self.pool.touch(found[skipped:])  # before any new block is taken, in every group (5.7)
            blocks = [NULL] * skipped + found[skipped:]
            tables.append(Table(blocks, seen=len(blocks), dropped=skipped))
        self.tables[request.index] = tables
        self.extend(request, hit.tokens + n)
        self.remember(request, hit.tokens + n)
        return True

    def grow(self, request: Request, n: int) -> list[list[Block]] | None:
        """New blocks of each group for a running request's next ``n`` tokens; None if not free (4.1)."""
        self.drop_skipped(request, request.delivered)
        if self.needed(request, request.computed + n) > self.pool.free:
            return None
        new = self.extend(request, request.computed + n)
        self.remember(request, request.computed + n)
        return new

    def extend(self, request: Request, tokens: int) -> list[list[Block]]:
        new = []
        for kind, table in zip(self.groups, self.tables[request.index], strict=True):
            blocks, held = cdiv(tokens, kind.block_size), len(table.blocks)
            nulls = max(kind.first_written(held, blocks) - held, 0)
            new.append([NULL] * nulls + self.pool.pop(max(blocks - held - nulls, 0)))
            table.blocks += new[-1]
        return new

    def drop_skipped(self, request: Request, computed: int) -> None:
        """Give back whole blocks that no later query reads, tail first; null takes their place (8.4)."""
        for kind, table in zip(self.groups, self.tables[request.index], strict=True):
            end = min(kind.skipped_tokens(computed) // kind.block_size, len(table.blocks))
            dropped = table.blocks[table.dropped : end][::-1]
            table.blocks[table.dropped : end] = [NULL] * len(dropped)
            table.dropped = max(table.dropped, end)
            self.pool.release(dropped)

    def remember(self, request: Request, tokens: int) -> None:
        """Full blocks of known tokens enter the table when they are scheduled, not when computed (5.4)."""
        if not self.prefix_caching:
            return
        full = min(tokens, request.num_tokens) // self.keys.block_size
        self.keys.extend(request.keys, request.content, request.tenant, full)
        boundaries = {request.prompt_tokens - 1, request.junction} if self.sparse else None
        for g, (kind, table) in enumerate(zip(self.groups, self.tables[request.index], strict=True)):
            for k in range(table.seen, full):
                block = table.blocks[k]
                if block is not NULL and kind.keeps(k, boundaries):
                    self.pool.remember(block, g, request.keys[k])
                    if isinstance(kind, Mamba):
                        self.new_states.add(block)
            table.seen = max(table.seen, full)

    def free(self, request: Request) -> None:
        """All blocks of a request, tail first, group by group (6.2)."""
        for table in self.tables.pop(request.index, ()):
            self.pool.release(reversed(table.blocks))
