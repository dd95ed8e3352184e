"""Blocks, their content keys and the free queue, as slow as they are plain (sections 5 and 6 of the rules).

Section numbers in this and the other ``reference`` files are those of SCHEDULER_RULES.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class Run(NamedTuple):
    """Consecutive tokens of one stream; equal (stream, position) is an equal token."""

    stream: object
    start: int
    length: int


class Content:
    """The tokens of one request, prompt then answer, as runs of streams."""

    def __init__(self, runs: Iterable[tuple[object, int, int]]) -> None:
        self.runs = [Run(*run) for run in runs if run[2] > 0]
        self.first = [0]  # position of each run's first token
        for run in self.runs:
            self.first.append(self.first[-1] + run.length)

    def tokens(self, start: int, end: int) -> tuple[Run, ...]:
        """Positions start..end-1; runs that continue each other are joined: equal tokens, equal tuples."""
        found: list[Run] = []
        at = bisect_right(self.first, start) - 1
        while start < end:
            run = self.runs[at]
            skip = start - self.first[at]
            piece = Run(run.stream, run.start + skip, min(run.length - skip, end - start))
            last = found[-1] if found else None
            if last and last.stream == piece.stream and last.start + last.length == piece.start:
                found[-1] = Run(last.stream, last.start, last.length + piece.length)
            else:
                found.append(piece)
            start += piece.length
            at += 1
        return tuple(found)


class Key(NamedTuple):
    """Hash of a full block: its parent's, the tenant on the first block only, and its own tokens (5.2)."""

    parent: int
    tenant: object
    tokens: tuple[Run, ...]


class Keys:
    """Stands for the hash function: a small integer for every different chain of blocks."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.number: dict[Key, int] = {}
        self.of: list[Key] = []

    def extend(self, chain: list[int], content: Content, tenant: object, blocks: int) -> None:
        """Lengthen a request's chain of keys to ``blocks`` full blocks."""
        for k in range(len(chain), blocks):
            tokens = content.tokens(k * self.block_size, (k + 1) * self.block_size)
            key = Key(chain[-1] if chain else -1, None if chain else tenant, tokens)
            if key not in self.number:
                self.number[key] = len(self.of)
                self.of.append(key)
            chain.append(self.number[key])


@dataclass(eq=False)
class Block:
    id: int
    references: int = 0
    key: int | None = None  # while it is in the table of cached blocks
    group: int = 0  # of that key
    written: tuple[Run, ...] = ()  # what the model wrote there: for the invariants only
    promised: bool = False  # cached in a step that then unscheduled its request: never written (4.3, 5.4)


NULL = Block(0, references=1)  # stands for a block that is no longer, or never was, needed (5.1)


@dataclass
class BlockPool:
    """``num_gpu_blocks`` blocks, of which block 0 is the null block (5.1)."""

    num_gpu_blocks: int
    unhashed_to_front: bool
    free_queue: OrderedDict[int, Block] = field(default_factory=OrderedDict)
    # (group, key): blocks of that content, oldest first (5.5)
    cached: dict[tuple[int, int], list[Block]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.blocks = [NULL] + [Block(i) for i in range(1, self.num_gpu_blocks)]
        self.free_queue.update((block.id, block) for block in self.blocks[1:])

    @property
    def free(self) -> int:
        return len(self.free_queue)

    def find(self, group: int, key: int) -> Block | None:
        """The oldest block of this content that is still in the table (5.5)."""
        twins = self.cached.get((group, key))
        return twins[0] if twins else None

    def touch(self, blocks: Iterable[Block]) -> None:
        """A hit: one more reference; a free block leaves the queue and keeps its content (5.7)."""
        for block in blocks:
            if block is not NULL:
                if block.references == 0:
                    del self.free_queue[block.id]
                block.references += 1

    def pop(self, count: int) -> list[Block]:
        """Take blocks from the head; a cached one is evicted at that moment (6.1)."""
        taken = []
        for _ in range(count):
            _, block = self.free_queue.popitem(last=False)
            if block.key is not None:
                self.forget(block)
            block.references = 1
            block.written, block.promised = (), False
            taken.append(block)
        return taken

    def forget(self, block: Block) -> None:
        assert block.key is not None
        twins = self.cached[block.group, block.key]
        twins.remove(block)
        if not twins:
            del self.cached[block.group, block.key]
        block.key = None

    def remember(self, block: Block, group: int, key: int) -> None:
        block.group, block.key = group, key
        self.cached.setdefault((group, key), []).append(block)

    def release(self, blocks: Iterable[Block]) -> None:
        """Drop a reference of each, given tail first: unhashed to the front, hashed to the end (6.2)."""
        unhashed = []
        for block in blocks:
            if block is NULL:
                continue
            block.references -= 1
            if block.references == 0:
                if block.key is None and self.unhashed_to_front:
                    unhashed.append(block)
                else:
                    self.free_queue[block.id] = block
        for block in reversed(unhashed):  # the tail block ends up at the very head
            self.free_queue[block.id] = block
            self.free_queue.move_to_end(block.id, last=False)
