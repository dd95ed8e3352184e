"""Our JSONL, a superset of Mooncake's: one request a line, content as block ids or segments."""

from __future__ import annotations

import math
from typing import Any

from kvplan.trace.columns import MAX_ID, MAX_TOKENS, MISSING, Columns, Place, seconds, text, whole
from kvplan.trace.schema import NO_STREAM

MOONCAKE_BLOCK_TOKENS = 512


def add_row(columns: Columns, place: Place, row: dict[str, Any]) -> None:
    """Check one object and add its request. Times are milliseconds; `hash_ids` cover 512 tokens each.

    A Mooncake id is the segment (id, 0, up to 512), the last one may be partial. Keys that are not ours are
    left alone. Raises InputError naming line and field.
    """
    get = row.get
    arrival_s = seconds(place, "timestamp", get("timestamp", MISSING), 1e-3)
    input_tokens = whole(place, "input_length", get("input_length", MISSING), low=1)
    output_tokens = whole(place, "output_length", get("output_length", MISSING))
    segments: list[tuple[int, int, int]] | None = None
    if get("segments") is not None:
        if get("hash_ids") is not None:
            raise place.error("hash_ids", row["hash_ids"], "absent beside segments: one content is enough")
        segments = _segments(place, row["segments"], input_tokens)
    elif get("hash_ids") is not None:
        segments = _blocks(place, row["hash_ids"], get("block_size"), input_tokens)
    if len(row) <= 4 and "output_stream" not in row and "id" not in row:  # plain Mooncake: nothing else to read
        columns.add(place.line, arrival_s, input_tokens, output_tokens, segments=segments)
        return
    stream = get("output_stream")
    cancel, deadline, session = get("cancel_after_ms"), get("deadline_ms"), get("session_id")
    columns.add(
        place.line,
        arrival_s,
        input_tokens,
        output_tokens,
        request_id=None if get("id") is None else text(place, "id", row["id"]),
        segments=segments,
        output_stream=NO_STREAM if stream is None else whole(place, "output_stream", stream, high=MAX_ID),
        tenant="" if get("tenant") is None else text(place, "tenant", row["tenant"]),
        priority=whole(place, "priority", row["priority"], -(1 << 31), 1 << 31) if get("priority") is not None else 0,
        samples=whole(place, "n", row["n"], 1, 1 << 16) if get("n") is not None else 1,
        cancel_after_s=math.nan if cancel is None else seconds(place, "cancel_after_ms", cancel, 1e-3),
        deadline_s=math.nan if deadline is None else seconds(place, "deadline_ms", deadline, 1e-3),
        session="" if session is None else text(place, "session_id", session),
        turn=whole(place, "turn", row["turn"]) if get("turn") is not None else 0,
    )


def _segments(place: Place, value: Any, input_tokens: int) -> list[tuple[int, int, int]]:
    if not isinstance(value, list):
        raise place.error("segments", value, "a list of [stream, start, length]")
    pieces = []
    for k, piece in enumerate(value):
        name = f"segments[{k}]"
        if not isinstance(piece, list) or len(piece) != 3:
            raise place.error(name, piece, "[stream, start, length]")
        pieces.append(
            (
                whole(place, f"{name} stream", piece[0], high=MAX_ID),
                whole(place, f"{name} start", piece[1], high=MAX_ID),
                whole(place, f"{name} length", piece[2], low=1),
            )
        )
    total = sum(length for _, _, length in pieces)
    if total != input_tokens:
        raise place.error("segments", f"{total} tokens long", f"as long as input_length, {input_tokens}")
    return pieces


def _blocks(place: Place, ids: Any, block_size: Any, input_tokens: int) -> list[tuple[int, int, int]]:
    size = MOONCAKE_BLOCK_TOKENS if block_size is None else whole(place, "block_size", block_size, 1, MAX_TOKENS)
    if not isinstance(ids, list):
        raise place.error("hash_ids", ids, "a list of whole numbers")
    needed = -(-input_tokens // size)
    if len(ids) != needed:
        raise place.error("hash_ids", f"{len(ids)} ids", f"{needed}: input_length {input_tokens} in blocks of {size}")
    for k, block in enumerate(ids):
        if type(block) is not int or not 0 <= block <= MAX_ID:
            raise place.error(f"hash_ids[{k}]", block, "a whole number >= 0")
    pieces = [(block, 0, size) for block in ids]
    pieces[-1] = (ids[-1], 0, input_tokens - (needed - 1) * size)
    return pieces
