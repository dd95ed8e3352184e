"""KV groups of a run: layers of one kind that share a block table, as the compiled core takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvplan.sched import core

KINDS = {"full": core.FULL, "window": core.WINDOW, "chunk": core.CHUNK}


@dataclass(frozen=True)
class Group:
    """``kind`` is full, window (the last ``size`` tokens are read) or chunk (the chunk of ``size`` tokens)."""

    kind: str = "full"
    size: int = 0


FULL_ONLY = (Group(),)


def is_hybrid(groups: Sequence[Group]) -> bool:
    """Anything but one group that keeps every token."""
    return tuple(groups) != FULL_ONLY


def group_rows(
    groups: Sequence[Group], block_size: int, max_model_len: int, in_flight_tokens: int, dense: bool
) -> Any:
    """GROUP record array in the order of the engine's groups.

    ``in_flight_tokens`` may be scheduled before the oldest batch returns: it widens what admission asks for
    windows (SCHEDULER_RULES 8.4). ``dense``: windows cache every full block (8.7). All groups have
    blocks of ``block_size`` tokens.
    """
    rows = np.zeros(len(groups), core.GROUP).view(np.recarray)
    # Full attention is looked up first, then the other kinds in their order (8.6).
    kinds = sorted(dict.fromkeys(groups), key=lambda group: group.kind != "full")
    for row, group in zip(rows, groups, strict=True):
        row.kind = KINDS[group.kind]
        row.size = group.size
        row.lookup = kinds.index(group)
        row.keep = -1
        if group.kind == "window":
            row.cap = -(-min(group.size - 1 + in_flight_tokens, max_model_len) // block_size) + 1
            if not dense:
                row.keep = -(-(group.size - 1) // block_size)
        elif group.kind == "chunk":
            row.cap = -(-min(group.size + in_flight_tokens, max_model_len) // block_size)
        else:
            row.cap = -(-max_model_len // block_size)
    return rows
