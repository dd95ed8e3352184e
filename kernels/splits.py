"""How decode work is cut along a sequence: a fixed number of splits, or a work list for skewed lengths.

Decode is a read of the KV cache, so a cut is good when every SM streams until the very end and merging costs
little. No torch: it runs on the host once per step, for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

MAX_SPLITS = 128
# Numbers of splits that are tried: all small ones, then steps of at most a quarter.
CANDIDATES = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, MAX_SPLITS)
# Work that a program does besides its tokens (start, epilogue, its share of the merge), in tokens' time.
PROGRAM_OVERHEAD_TOKENS = 64
# Below this a part is mostly overhead.
MIN_PART_TOKENS = 128
# Share of the programs an SM set can hold that already saturates memory.
SATURATION = 0.5


def split_cost_tokens(num_splits: int, max_len: int, total_tokens: int, kv_heads: int, slots: int) -> float:
    """Estimated time of a decode call, in units of one token streamed by one of ``slots`` resident programs.

    Full waves run at memory speed; a last wave that fills less than SATURATION of the slots runs at the
    speed of its programs. Every program adds PROGRAM_OVERHEAD_TOKENS.
    """
    part = max(MIN_PART_TOKENS, -(-max_len // num_splits))
    programs = kv_heads * max(1, -(-total_tokens // part))
    waves, last = divmod(programs, slots)
    busy = total_tokens * kv_heads / (programs * part) if total_tokens else 0.0
    time = waves * part * busy
    if last:
        time += part * busy * max(last / slots, SATURATION) + part * (1 - busy)
    return (
        time
        + PROGRAM_OVERHEAD_TOKENS * -(-programs // slots)
        + (PROGRAM_OVERHEAD_TOKENS if num_splits > 1 else 0)
    )


@lru_cache(maxsize=4096)
def choose_num_splits(
    batch: int,
    kv_heads: int,
    max_len: int,
    num_sms: int,
    *,
    total_tokens: int | None = None,
    programs_per_sm: int = 2,
) -> int:
    """Number of parts for the longest sequence, 1 to 128: the cheapest by `split_cost_tokens`, ties to fewer.

    ``max_len`` and ``total_tokens`` (default: all sequences as long as the longest) count visible tokens;
    ``programs_per_sm`` is how many decode programs fit on one SM. Short sequences use fewer parts by
    themselves, see `kvplan.kernels.decode`.
    """
    if max_len <= MIN_PART_TOKENS or batch == 0:
        return 1
    total = batch * max_len if total_tokens is None else total_tokens
    slots = num_sms * programs_per_sm
    most = min(MAX_SPLITS, max_len // MIN_PART_TOKENS)
    costs = {n: split_cost_tokens(n, max_len, total, kv_heads, slots) for n in CANDIDATES if n <= most}
    best = min(costs.values())
    return min(n for n, cost in costs.items() if cost <= best * 1.02)


@dataclass(frozen=True)
class WorkPlan:
    """Equal shares of a batch's tiles, one a worker, for one KV head each; the same shares serve all heads.

    ``packed``, int32: where each worker's items begin ``[workers + 1]``, where each row's parts begin
    ``[batch + 1]``, then items ``[capacity, 4]``: row, first tile, end tile, part (-1: the row's only item,
    which writes the output itself). Its size depends on workers and batch only, so a CUDA graph can keep it.
    """

    packed: np.ndarray
    workers: int
    batch: int
    kv_heads: int
    tile: int
    window: int

    @property
    def capacity(self) -> int:
        """Most items, and so parts, that a plan of this size can have."""
        return self.workers + self.batch

    @property
    def items(self) -> np.ndarray:
        """Items in use ``[items, 4]``."""
        count = self.packed[self.workers]
        return self.packed[self.workers + self.batch + 2 :].reshape(-1, 4)[:count]


def plan_work(
    seq_lens: Sequence[int] | np.ndarray,
    kv_heads: int,
    num_sms: int,
    *,
    tile: int = 64,
    window: int = 0,
    programs_per_sm: int = 2,
) -> WorkPlan:
    """Cut a batch of skewed lengths (tokens, on the host) into equal shares for a grid that fills the GPU.

    Rows are laid end to end in tiles of ``tile`` tokens and cut at equal distances, as stream-K does, so no
    worker waits for one long sequence. A cut that would leave a piece under MIN_PART_TOKENS moves to the
    row's end. O(batch + workers), once a step for all layers.
    """
    lens = [int(n) for n in seq_lens]
    workers = max(1, num_sms * programs_per_sm // kv_heads)
    firsts = [max(n - window, 0) // tile if window > 0 else 0 for n in lens]
    ends = [-(-n // tile) for n in lens]
    total = sum(ends) - sum(firsts)
    least = max(1, MIN_PART_TOKENS // tile)
    items: list[list[int]] = []
    worker_start, part_start = [0], [0]
    left = total
    room = max(-(-left // workers), least)
    for row, (first, end) in enumerate(zip(firsts, ends, strict=True)):
        begin, at = len(items), first
        while at < end or len(items) == begin:
            take = min(end - at, room)
            if end - at - take < least:
                take = end - at
            items.append([row, at, at + take, -1])
            at += take
            left -= take
            room -= take
            if room < least and len(worker_start) < workers:
                worker_start.append(len(items))
                # Shared anew, so that moved cuts do not pile up on the last worker.
                room = max(-(-left // (workers - len(worker_start) + 1)), least)
        pieces = items[begin:]
        if len(pieces) > 1:
            for number, piece in enumerate(pieces):
                piece[3] = part_start[-1] + number
        part_start.append(part_start[-1] + (len(pieces) if len(pieces) > 1 else 0))
    worker_start += [len(items)] * (workers + 1 - len(worker_start))
    packed = np.zeros(workers + 1 + len(lens) + 1 + 4 * (workers + len(lens)), np.int32)
    packed[: workers + 1] = worker_start
    packed[workers + 1 : workers + 2 + len(lens)] = part_start
    packed[workers + 2 + len(lens) :].reshape(-1, 4)[: len(items)] = items if items else np.empty((0, 4))
    return WorkPlan(packed, workers, len(lens), kv_heads, tile, window)
