"""Our JSONL, a superset of Mooncake's: one request a line, content as block ids or segments."""

from __future__ import annotations

from typing import Any

from kvplan.trace.columns import (
    MAX_ID,
    MISSING,
    Columns,
    Phrase,
    Place,
    block_ids,
    items,
    seconds,
    text,
    whole,
)

MOONCAKE_BLOCK_TOKENS = 512
MAX_BLOCK_TOKENS = 1 << 20
PLAIN = {"timestamp", "input_length", "output_length", "hash_ids"}


def reader(columns: Columns) -> Any:
    """Add one row: times are milliseconds on the file's own clock; `hash_ids` cover 512 tokens each.

    A Mooncake id is the segment (id, 0, up to 512), the last one may be partial; `block_size` beside
    `hash_ids` says another size. Keys that are not ours are left alone.
    """

    def add(place: Place, row: dict[str, Any]) -> None:
        get = row.get
        arrival_s = seconds(place, "timestamp", get("timestamp", MISSING), 1e-3)
        prompt = whole(place, "input_length", get("input_length", MISSING), low=1)
        answer = whole(place, "output_length", get("output_length", MISSING))
        ids, segments = get("hash_ids"), get("segments")
        if segments is not None:
            if ids is not None:
                raise place.error(
                    "hash_ids", Phrase("given beside segments"), "absent: one content is enough"
                )
            _segments(columns, place, segments, prompt)
        elif ids is not None:
            _blocks(columns, place, ids, get("block_size"), prompt)
        if row.keys() <= PLAIN:
            columns.add(place.line, arrival_s, prompt, answer)
            return
        session, turn, name = get("session_id"), get("turn"), get("id")
        extras = {
            column: check(place, key, row[key])
            for key, (column, check) in EXTRAS.items()
            if get(key) is not None
        }
        scope = [f"{key} {text(place, key, row[key])}" for key in SCOPES if get(key) is not None]
        if scope:
            extras["tenant"] = ", ".join([extras["tenant"], *scope] if "tenant" in extras else scope)
        columns.add(
            place.line,
            arrival_s,
            prompt,
            answer,
            request_id=None if name is None else text(place, "id", name),
            session=None if session is None else text(place, "session_id", session),
            turn=0 if turn is None else whole(place, "turn", turn),
            **extras,
        )
        if get("provenance") == "constructed":
            columns.constructed = True
            columns.seed = row["seed"] if type(get("seed")) is int else None

    return add


def _milliseconds(place: Place, name: str, value: Any) -> float:
    return seconds(place, name, value, 1e-3)


SCOPES = ("adapter", "content_version")
"""Content computed by another adapter or of another version is other content: a scope as a tenant is one."""

# Our keys beyond Mooncake's: the column that each fills, and its check.
EXTRAS: dict[str, tuple[str, Any]] = {
    "output_stream": ("output_stream", lambda place, name, value: whole(place, name, value, high=MAX_ID)),
    "tenant": ("tenant", text),
    "priority": ("priority", lambda place, name, value: whole(place, name, value, -(1 << 31), (1 << 31) - 1)),
    "n": ("samples", lambda place, name, value: whole(place, name, value, 1, 1 << 14)),
    "cancel_after_ms": ("cancel_after_s", _milliseconds),
    "deadline_ms": ("deadline_s", _milliseconds),
    "think_ms": ("think_s", _milliseconds),
}


def _segments(columns: Columns, place: Place, value: Any, prompt: int) -> None:
    total = 0
    for k, piece in enumerate(items(place, "segments", value)):
        name = f"segments[{k}]"
        if type(piece) is not list or len(piece) != 3:
            raise place.error(name, piece, "[stream, start, length]")
        stream = whole(place, f"{name} stream", piece[0], high=MAX_ID)
        start = whole(place, f"{name} start", piece[1], high=MAX_ID)
        length = whole(place, f"{name} length", piece[2], low=1)
        total += length
        columns.segment(stream, start, length)
    if total != prompt:
        raise place.error(
            "segments", Phrase(f"{total:,} tokens long"), f"as long as input_length, {prompt:,}"
        )


def _blocks(columns: Columns, place: Place, ids: Any, block_size: Any, prompt: int) -> None:
    size = MOONCAKE_BLOCK_TOKENS
    if block_size is not None:
        size = whole(place, "block_size", block_size, 1, MAX_BLOCK_TOKENS)
    block_ids(place, "hash_ids", ids)
    needed = -(-prompt // size)
    if len(ids) != needed:
        must = f"{needed:,}: input_length {prompt:,} in blocks of {size}"
        if block_size is None:
            must += ' (another size needs "block_size")'
        raise place.error("hash_ids", Phrase(f"{len(ids):,} ids"), must)
    columns.blocks(ids, size, prompt)
