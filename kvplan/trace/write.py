"""Write a trace as our JSONL, which other Mooncake readers read too where the content is ids."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from kvplan.errors import InputError
from kvplan.trace.native import MOONCAKE_BLOCK_TOKENS
from kvplan.trace.schema import NO_STREAM, Trace
from kvplan.trace.sessions import PRIVATE_STREAMS
from kvplan.trace.sharing import id_size


def native_lines(trace: Trace) -> Iterator[str]:
    """One line of JSON a request. Raises InputError for a trace without times: our format needs them."""
    if not trace.has_times:
        raise InputError(
            f"{trace.provenance.source} has no arrival times, our JSONL needs some.\n  Give --request-rate R."
        )
    size = id_size(trace)
    starts = trace.segment_offsets.tolist()
    for i in range(len(trace)):
        row: dict[str, Any] = {}
        if not _is_default_id(trace.request_id[i]):
            row["id"] = trace.request_id[i]
        row["timestamp"] = _ms(trace.arrival_s[i])
        row["input_length"] = int(trace.input_tokens[i])
        row["output_length"] = int(trace.output_tokens[i])
        a, b = starts[i], starts[i + 1]
        if a < b:
            row |= _content(trace, a, b, size)
        if trace.output_stream[i] != NO_STREAM:
            row["output_stream"] = int(trace.output_stream[i])
        if trace.tenant_names[trace.tenant_id[i]]:
            row["tenant"] = trace.tenant_names[trace.tenant_id[i]]
        if trace.priority[i]:
            row["priority"] = int(trace.priority[i])
        if trace.samples[i] != 1:
            row["n"] = int(trace.samples[i])
        for key, column in (("cancel_after_ms", trace.cancel_after_s), ("deadline_ms", trace.deadline_s)):
            if not math.isnan(column[i]):
                row[key] = _ms(column[i])
        if trace.session_id[i] >= 0:
            row["session_id"] = int(trace.session_id[i])
            row["turn"] = int(trace.turn[i])
        if trace.think_s[i]:
            row["think_ms"] = _ms(trace.think_s[i])
        if i == 0 and trace.provenance.kind == "constructed":
            row["provenance"] = "constructed"
            if trace.provenance.seed is not None:
                row["seed"] = trace.provenance.seed
        yield json.dumps(row, separators=(",", ":")) + "\n"


def _content(trace: Trace, a: int, b: int, size: int) -> dict[str, Any]:
    streams, lengths = trace.segment_stream[a:b].tolist(), trace.segment_length[a:b].tolist()
    if size and streams[-1] < PRIVATE_STREAMS and all(length == size for length in lengths[:-1]):
        content: dict[str, Any] = {"hash_ids": streams}
        if size != MOONCAKE_BLOCK_TOKENS:
            content["block_size"] = size
        return content
    begins = trace.segment_start[a:b].tolist()
    return {"segments": [list(piece) for piece in zip(streams, begins, lengths, strict=True)]}


def _is_default_id(name: str) -> bool:
    return name[:1] == "r" and name[1:].isdigit() and name.isascii()


def _ms(seconds: float) -> int | float:
    """Milliseconds to the nanosecond; whole ones as integers, as Mooncake writes them."""
    value = round(float(seconds) * 1e3, 6)
    return int(value) if value.is_integer() else value
