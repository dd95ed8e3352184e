"""The columnar trace: what every reader and generator returns and every run consumes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NO_STREAM = -1
"""Content of its own: no other request can share it (output_stream, or a request without segments)."""


@dataclass(frozen=True)
class Provenance:
    """Where the requests come from. Recorded and constructed ones are never mixed unasked."""

    kind: str  # "recorded" or "constructed"
    source: str  # file name, or the generating flags
    format: str  # reader's name, or "random"
    sha256: str = ""
    seed: int | None = None


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival, one row each (n rows). Times are seconds.

    A format with a zero of its own (native, Mooncake) keeps it, so that step = timestamp / 1000 on the step
    clock; formats with dates count from the first arrival.

    Content: request i's prompt is the concatenation of segments
    ``segment_offsets[i] .. segment_offsets[i+1]``, each (stream, start, length): two tokens are equal
    when their stream and position are. A request with no segments has content of its own. Its answer is
    stream ``output_stream[i]`` from position 0 (NO_STREAM = its own). Streams are scoped by
    ``tenant_id``: equal streams of two tenants never match.

    ``arrival_s`` is NaN throughout for a trace without times (has_times is False). Missing
    ``cancel_after_s`` and ``deadline_s`` are NaN. ``session_id`` is -1 for a request outside any session;
    ``think_s`` is the pause before turn k when sessions run closed.
    """

    request_id: list[str]
    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    segment_offsets: Ints  # n + 1
    segment_stream: Ints
    segment_start: Ints
    segment_length: Ints
    output_stream: Ints
    tenant_id: Ints  # dense; tenant_names[tenant_id]
    tenant_names: list[str]
    priority: Ints
    samples: Ints
    cancel_after_s: Floats
    deadline_s: Floats
    session_id: Ints
    turn: Ints
    think_s: Floats
    provenance: Provenance
    notes: tuple[str, ...] = ()  # oddities stated, not mended

    def __len__(self) -> int:
        return len(self.input_tokens)

    @property
    def has_times(self) -> bool:
        return len(self) == 0 or not bool(np.isnan(self.arrival_s[0]))

    @property
    def has_content(self) -> bool:
        """Whether any request has segments, so that prefixes can be shared between requests."""
        return len(self.segment_stream) > 0
