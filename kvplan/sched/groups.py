"""KV groups of a run: layers of one kind that share a block table, as the compiled core takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvplan.errors import InputError
from kvplan.sched import core

KINDS = {"full": core.FULL, "window": core.WINDOW, "chunk": core.CHUNK, "state": core.STATE}
STATE_WINDOW = 2  # to the cache a state is a window of two tokens: the next one reads the one before it


@dataclass(frozen=True)
class Group:
    """``kind``: full, window (the last ``size`` tokens), chunk (the chunk of ``size`` tokens) or state."""

    kind: str = "full"
    size: int = 0


FULL_ONLY = (Group(),)
MAX_GROUPS = 64


def is_hybrid(groups: Sequence[Group]) -> bool:
    """Anything but one group that keeps every token."""
    return tuple(groups) != FULL_ONLY


def parse_groups(text: str) -> tuple[Group, ...]:
    """``full``, ``swaonly:WINDOW``, or beside one full group ``swa:WINDOW:GROUPS``, ``chunk:SIZE:GROUPS``,
    ``mamba:GROUPS``. Raises `InputError` for anything else.
    """
    kind, *numbers = text.split(":")
    if kind == "full" and not numbers:
        return FULL_ONLY
    if kind == "mamba":
        numbers = ["1", *numbers]
    wanted = {"swa": ("window", 2), "chunk": ("chunk", 2), "swaonly": ("window", 1), "mamba": ("state", 2)}
    if kind in wanted and len(numbers) == wanted[kind][1]:
        size, count = [int(n) if n.isdecimal() and len(n) < 10 else 0 for n in (*numbers, "1")[:2]]
        if size >= 1 and 1 <= count <= MAX_GROUPS:
            size = 0 if kind == "mamba" else size
            return (Group(wanted[kind][0], size),) * count + (() if kind == "swaonly" else FULL_ONLY)
    raise InputError(
        f"--kv-groups is {text}; must be full, swa:WINDOW:GROUPS, chunk:SIZE:GROUPS, mamba:GROUPS or "
        f"swaonly:WINDOW, tokens from 1, at most {MAX_GROUPS} groups."
    )


def describe(groups: Sequence[Group]) -> str:
    """'5 of a window of 1,024 tokens, 1 of full attention'."""
    words = {"full": "full attention", "window": "a window of {:,} tokens", "chunk": "chunks of {:,} tokens"}
    words["state"] = "states"
    counts = {group: list(groups).count(group) for group in groups}
    return ", ".join(f"{n} of {words[group.kind].format(group.size)}" for group, n in counts.items())


def blocks_at_end(rows: Any, stop: int, block_size: int) -> int:
    """Blocks of all groups that a request holds when its last token but one is written."""
    held = 0
    for row in rows:
        if row.kind == core.FIXED:
            held += 1
            continue
        skipped = 0
        if row.kind in (core.WINDOW, core.STATE):
            skipped = max(stop - 2 - int(row.span) + 1, 0)
        elif row.kind == core.CHUNK:
            skipped = (stop - 2) // int(row.span) * int(row.span)
        held += -(-(stop - 1) // block_size) - skipped // block_size
    return held


def group_rows(
    groups: Sequence[Group],
    block_size: int,
    max_model_len: int,
    in_flight_tokens: int,
    dense: bool,
    prefix_caching: bool,
) -> Any:
    """GROUP record array in the order of the engine's groups.

    ``in_flight_tokens`` may be scheduled before the oldest batch returns: it widens what admission asks for
    windows (SCHEDULER_RULES 8.4). ``dense``: windows cache every full block (8.7). All groups have
    blocks of ``block_size`` tokens; without prefix caching a state takes one block for good (8.5).
    """
    rows = np.zeros(len(groups), core.GROUP).view(np.recarray)
    # Full attention is looked up first, then the other kinds in their order (8.6).
    kinds = sorted(dict.fromkeys(groups), key=lambda group: group.kind != "full")
    for row, group in zip(rows, groups, strict=True):
        row.kind = KINDS[group.kind]
        row.span = STATE_WINDOW if group.kind == "state" else group.size
        if group.kind == "state" and not prefix_caching:
            row.kind = core.FIXED
        row.lookup = kinds.index(group)
        row.keep = -1
        if group.kind in ("window", "state"):
            row.cap = -(-min(int(row.span) - 1 + in_flight_tokens, max_model_len) // block_size) + 1
            if not dense:
                row.keep = -(-(int(row.span) - 1) // block_size)
        elif group.kind == "chunk":
            row.cap = -(-min(group.size + in_flight_tokens, max_model_len) // block_size)
        else:
            row.cap = -(-max_model_len // block_size)
    return rows
