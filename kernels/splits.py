"""How decode work is cut along a sequence: a fixed number of splits, or a work list for skewed lengths.

Decode is a read of the KV cache, so a cut is good when every SM streams until the very end and merging costs
little. Plain Python, no torch: it runs on the host once per step, for all layers.
"""

from __future__ import annotations

MAX_SPLITS = 128
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
    costs = {n: split_cost_tokens(n, max_len, total, kv_heads, slots) for n in range(1, most + 1)}
    best = min(costs.values())
    return min(n for n, cost in costs.items() if cost <= best * 1.02)
