"""Traces with content of other makes: chained or plain ids, sessions, token lists."""

from __future__ import annotations

from typing import Any

from kvplan.trace.columns import (
    MAX_TOKENS,
    MISSING,
    Columns,
    Phrase,
    Place,
    block_ids,
    items,
    seconds,
    seconds_cell,
    text,
    whole,
    whole_cell,
)

BAILIAN_BLOCK_TOKENS = 16
RAG_BLOCK_TOKENS = 512
MAX_LOCAL_ID = 1 << 40
RAG_PARTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")  # in prompt order
REPLAY = ("session_id", "arrival_time", "round_idx", "prefix_len", "input_len", "output_len")
PRIVATE_STREAMS = 1 << 61
"""Streams from here on are numbered by a reader, for content that the file does not identify."""


class Private:
    """Numbers for content that no other request has."""

    def __init__(self) -> None:
        self.next = PRIVATE_STREAMS

    def stream(self) -> int:
        self.next += 1
        return self.next


def bailian(columns: Columns) -> Any:
    """Bailian JSONL: seconds, ids of 16 tokens that name one block's content, not the chain.

    As segments (id, 0, 16) they match position by position along the prefix, which is what a prefix cache
    sees. A chat's session is that of its parent.
    """
    roots: dict[int, int] = {}
    private = Private()

    def add(place: Place, row: dict[str, Any]) -> None:
        get = row.get
        chat = whole(place, "chat_id", get("chat_id", MISSING), -(1 << 62), 1 << 62)
        parent = whole(place, "parent_chat_id", get("parent_chat_id", MISSING), -(1 << 62), 1 << 62)
        arrival_s = seconds(place, "timestamp", get("timestamp", MISSING), 1.0)
        prompt = whole(place, "input_length", get("input_length", MISSING), low=1)
        answer = whole(place, "output_length", get("output_length", MISSING))
        turn = whole(place, "turn", get("turn", 0))
        ids = block_ids(place, "hash_ids", get("hash_ids", MISSING))
        full, some = prompt // BAILIAN_BLOCK_TOKENS, -(-prompt // BAILIAN_BLOCK_TOKENS)
        if len(ids) not in (full, some):
            raise place.error(
                "hash_ids", Phrase(f"{len(ids):,} ids"), f"{some:,}: input_length {prompt:,} in blocks of 16"
            )
        if len(ids) == some:
            columns.blocks(ids, BAILIAN_BLOCK_TOKENS, prompt)
        else:
            columns.blocks(ids, BAILIAN_BLOCK_TOKENS, full * BAILIAN_BLOCK_TOKENS)
            columns.segment(private.stream(), 0, prompt - full * BAILIAN_BLOCK_TOKENS)
        root = roots[chat] = roots.get(parent, parent if parent >= 0 else chat)
        columns.add(place.line, arrival_s, prompt, answer, session=str(root), turn=turn)

    return add


def coding(columns: Columns) -> Any:
    """Agentic coding sessions: one session a line, times from its start, ids of `block_size` local to it.

    A sub-agent's requests share the session's ids; their times count from the sub-agent's start. They run
    beside the parent's, as a session of their own. Tokens past the last full block have no id.
    """
    columns.notes.append("times count from each session's own start, so all sessions start at 0")
    base = [0]
    private = Private()

    def add(place: Place, row: dict[str, Any]) -> None:
        size = whole(place, "block_size", row.get("block_size", MISSING), 1, 1 << 20)
        name = text(place, "id", row.get("id", MISSING))
        highest = [-1]

        def requests(holder: dict[str, Any], where: str, start_s: float, session: str) -> None:
            turn = 0
            for k, item in enumerate(items(place, f"{where}requests", holder.get("requests", MISSING))):
                at = f"{where}requests[{k}]"
                if type(item) is not dict:
                    raise place.error(at, item, "an object")
                time_s = start_s + seconds(place, f"{at}.t", item.get("t", MISSING), 1.0)
                if item.get("type") == "subagent":
                    requests(item, f"{at}.", time_s, f"{session}/{k}")
                    continue
                prompt = whole(place, f"{at}.in", item.get("in", MISSING))
                answer = whole(place, f"{at}.out", item.get("out", MISSING))
                ids = block_ids(place, f"{at}.hash_ids", item.get("hash_ids", MISSING), MAX_LOCAL_ID)
                if len(ids) != prompt // size:
                    must = f"{prompt // size:,}: {prompt:,} tokens in full blocks of {size}"
                    raise place.error(f"{at}.hash_ids", Phrase(f"{len(ids):,} ids"), must)
                if ids:
                    highest[0] = max(highest[0], max(ids))
                    columns.blocks(ids, size, len(ids) * size, base[0])
                if prompt % size:
                    columns.segment(private.stream(), 0, prompt % size)
                think = item.get("think_time")
                extras: dict[str, Any] = {}
                if think is not None and turn:
                    extras["think_s"] = seconds(place, f"{at}.think_time", think, 1.0)
                columns.add(place.line, time_s, prompt, answer, session=session, turn=turn, **extras)
                turn += 1

        requests(row, "", 0.0, name)
        base[0] += highest[0] + 1

    return add


def rag(columns: Columns) -> Any:
    """RAG JSONL: `timestamp` is text in seconds, `hash_ids` an object of lists of content ids.

    The file has no length for each id: from the front each gets 512 tokens as long as there are some left,
    the rest of the prompt is the request's own.
    """
    columns.notes.append(
        "parts have no lengths in the file: 512 tokens each from the front, so hits are rough"
    )
    private = Private()

    def add(place: Place, row: dict[str, Any]) -> None:
        stamp = row.get("timestamp", MISSING)
        if type(stamp) is str:
            arrival_s = seconds_cell(place, "timestamp", stamp, 1.0)
        else:
            arrival_s = seconds(place, "timestamp", stamp, 1.0)
        prompt = left = whole(place, "input_length", row.get("input_length", MISSING), low=1)
        answer = whole(place, "output_length", row.get("output_length", MISSING))
        parts = row.get("hash_ids", MISSING)
        if type(parts) is not dict:
            raise place.error("hash_ids", parts, f"an object of {', '.join(RAG_PARTS)}")
        for part in (*RAG_PARTS, *(key for key in parts if key not in RAG_PARTS)):
            for block in block_ids(place, f"hash_ids.{part}", parts.get(part) or []):
                if left:
                    length = min(left, RAG_BLOCK_TOKENS)
                    columns.segment(block, 0, length)
                    left -= length
        if left:
            columns.segment(private.stream(), 0, left)
        session = row.get("session_id")
        columns.add(
            place.line,
            arrival_s,
            prompt,
            answer,
            session=None if session is None else text(place, "session_id", session),
        )

    return add


def replay(columns: Columns) -> Any:
    """Closed-loop session replay: a prompt is `prefix_len` tokens of earlier turns and `input_len` new ones.

    `arrival_time` (ms) is the session's; a later turn starts after the one before has ended and the tool
    has run, so its time here is only the earliest possible one.
    """
    columns.notes.append(
        "arrival times are the sessions': later turns are placed as if turns before took no time"
    )
    private = Private()
    history: dict[str, list[tuple[int, int]]] = {}  # pieces (stream, length) of prompts and answers so far
    waits: dict[str, tuple[float, float]] = {}  # tool time so far, and of the last turn

    def add(place: Place, row: dict[str, str]) -> None:
        get = row.get
        session = get("session_id") or ""
        arrival_s = seconds_cell(place, "arrival_time", get("arrival_time"), 1e-3)
        turn = whole_cell(place, "round_idx", get("round_idx"))
        prefix = left = whole_cell(place, "prefix_len", get("prefix_len"))
        new = whole_cell(place, "input_len", get("input_len"))
        answer = whole_cell(place, "output_len", get("output_len"))
        wait_s = seconds_cell(place, "tool_wait_after_ms", get("tool_wait_after_ms", "0"), 1e-3)
        if not 1 <= prefix + new <= MAX_TOKENS:
            raise place.error("prefix_len + input_len", prefix + new, f"from 1 to {MAX_TOKENS:,}")
        if turn == 0:
            history[session], waits[session] = [], (0.0, 0.0)
        elif session not in history:
            raise place.error("round_idx", turn, "0 at the first row of a session")
        pieces = []
        for stream, length in history[session]:
            if left:
                pieces.append((stream, min(left, length)))
                left -= min(left, length)
        if left:
            columns.count("turns have a longer prefix than their session had tokens: the rest is their own")
            pieces.append((private.stream(), left))
        if new:
            pieces.append((private.stream(), new))
        for stream, length in pieces:
            columns.segment(stream, 0, length)
        output_stream = private.stream()
        before_s, think_s = waits[session]
        columns.add(
            place.line,
            arrival_s + before_s,
            prefix + new,
            answer,
            session=session,
            turn=turn,
            output_stream=output_stream,
            think_s=think_s,
        )
        history[session] = [*pieces, (output_stream, answer)] if answer else pieces
        waits[session] = (before_s + wait_s, wait_s)

    return add


def llmservingsim(columns: Columns) -> Any:
    """LLMServingSim JSONL: nanoseconds; plain rows and sessions of `sub_requests`; token lists if given."""

    def add(place: Place, row: dict[str, Any]) -> None:
        arrival_s = seconds(place, "arrival_time_ns", row.get("arrival_time_ns", MISSING), 1e-9)
        if row.get("sub_requests") is None:
            one(place, "", row, arrival_s, None, 0, 0.0)
            return
        name = row.get("session_id")
        session = f"line {place.line}" if name is None else text(place, "session_id", name)
        wait_s = think_s = 0.0
        for k, item in enumerate(items(place, "sub_requests", row["sub_requests"])):
            at = f"sub_requests[{k}]"
            if type(item) is not dict:
                raise place.error(at, item, "an object")
            one(place, f"{at}.", item, arrival_s + wait_s, session, k, think_s)
            think_s = seconds(place, f"{at}.tool_duration_ns", item.get("tool_duration_ns") or 0, 1e-9)
            wait_s += think_s

    def one(
        place: Place,
        at: str,
        item: dict[str, Any],
        arrival_s: float,
        session: str | None,
        turn: int,
        think_s: float,
    ) -> None:
        prompt = whole(place, f"{at}input_toks", item.get("input_toks", MISSING), low=1)
        answer = whole(place, f"{at}output_toks", item.get("output_toks", MISSING))
        tokens = item.get("input_tok_ids")
        if tokens is not None:
            block_ids(place, f"{at}input_tok_ids", tokens)
            if len(tokens) != prompt:
                raise place.error(
                    f"{at}input_tok_ids", Phrase(f"{len(tokens):,} tokens"), f"{prompt:,}, as input_toks"
                )
            columns.blocks(tokens, 1, prompt)
        extras: dict[str, Any] = {} if session is None else {"think_s": think_s}
        columns.add(place.line, arrival_s, prompt, answer, session=session, turn=turn, **extras)

    return add
