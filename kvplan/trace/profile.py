"""What a trace is: lengths, arrivals, sharing, block arithmetic, and what is odd about it."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvplan.trace.schema import Trace
from kvplan.trace.sharing import PrefixKeys, id_size, lru_hits, prefix_keys, seen_before

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
LRU_BLOCKS = (1_000, 10_000, 50_000, 100_000)
SEGMENT_BLOCK_TOKENS = 16
"""Blocks in which sharing is counted when the content is not made of ids of one size."""
COURSE_BINS = 60


def profile(trace: Trace) -> dict[str, Any]:
    """Facts of a trace of at least one request; seconds, tokens, shares from 0 to 1.

    ``sharing``: blocks of the prompts whose prefix an earlier request had (`unlimited`), or that an LRU cache
    of so many blocks still has; requests in order of arrival, lookup stops at the first miss. None without
    content. ``utilization``: sum n / sum A_B(n), n = input + output, by block size.
    """
    keys = _keys(trace)
    n = trace.input_tokens + trace.output_tokens
    p = trace.provenance
    return {
        "source": p.source,
        "format": p.format,
        "kind": p.kind,
        "seed": p.seed,
        "sha256": p.sha256,
        "requests": len(trace),
        "id_tokens": id_size(trace),
        "sessions": len(np.unique(trace.session_id[trace.session_id >= 0])),
        "tenants": len(trace.tenant_names),
        "input_tokens": _lengths(trace.input_tokens),
        "output_tokens": _lengths(trace.output_tokens),
        "arrivals": _arrivals(trace) if trace.has_times else None,
        "sharing": None if keys is None else _sharing(trace, keys),
        "utilization": {
            str(size): float(n.sum() / (size * -(-n // size)).sum()) if n.any() else None
            for size in BLOCK_SIZES
        },
        "odd": [*trace.notes, *_oddities(trace, keys)],
    }


def _lengths(tokens: Any) -> dict[str, float]:
    p50, p90, p99 = np.percentile(tokens, (50, 90, 99))
    return {
        "mean": float(tokens.mean()),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": int(tokens.max()),
        "total": int(tokens.sum()),
    }


def _arrivals(trace: Trace) -> dict[str, Any]:
    """Rates a second; ``gap_cv``: standard deviation of the gaps over their mean, 1 for a Poisson process."""
    times = trace.arrival_s - trace.arrival_s[0]
    span_s = float(times[-1])
    gaps = np.diff(times)
    instants = np.unique(times)
    course, _ = np.histogram(times, bins=COURSE_BINS, range=(0.0, span_s or 1.0))
    minutes = np.bincount((times // 60).astype(np.int64))
    whole = minutes[: int(span_s // 60)]  # the last minute is torn
    return {
        "span_s": span_s,
        "rate": len(times) / span_s if span_s else None,
        "busiest_minute_rate": float(whole.max()) / 60 if len(whole) else None,
        "gap_cv": float(gaps.std() / gaps.mean()) if span_s else None,
        "instants": len(instants),
        "instant_step_s": _step_s(instants),
        "course": [int(count) for count in course],
    }


def _step_s(instants: Any) -> float | None:
    """The step between instants if nine in ten are within a hundredth of it, or of a multiple of it."""
    if len(instants) < 3:
        return None
    gaps = np.diff(instants)
    step_s = float(np.median(gaps))
    regular = np.abs(gaps - np.rint(gaps / step_s) * step_s) <= 0.01 * step_s
    return float(f"{step_s:.3g}") if regular.mean() >= 0.9 else None


def _keys(trace: Trace) -> PrefixKeys | None:
    if not trace.has_content:
        return None
    return prefix_keys(trace, None if id_size(trace) else SEGMENT_BLOCK_TOKENS)


def _sharing(trace: Trace, keys: PrefixKeys) -> dict[str, Any] | None:
    blocks = len(keys)
    if not blocks:
        return None
    return {
        "block_tokens": id_size(trace) or SEGMENT_BLOCK_TOKENS,
        "blocks": blocks,
        "distinct_blocks": keys.distinct,
        "unlimited": float(seen_before(keys).sum() / blocks),
        "lru": {
            str(size): float(lru_hits(keys, size).sum() / blocks)
            for size in LRU_BLOCKS
            if size < keys.distinct
        },
    }


def _oddities(trace: Trace, keys: PrefixKeys | None) -> list[str]:
    odd = []
    if trace.has_times and len(trace) > 1:
        arrivals = _arrivals(trace)
        instants, step_s = arrivals["instants"], arrivals["instant_step_s"]
        if instants == 1:
            odd.append("all requests arrive at once: a batch, not a service load")
        elif instants < len(trace) / 2 and step_s is not None:
            cv = f"{arrivals['gap_cv']:.1f}"
            where = f"{instants:,} instants {step_s:g} s apart"
            odd.append(f"arrival times fall on {where}: a gap CV of {cv} is an artefact")
        first_s = float(trace.arrival_s[0])
        if first_s > 0.1 * arrivals["span_s"] and first_s > 60:
            odd.append(f"the first request arrives at {first_s:,.0f} s")
    if keys is not None:
        repeats = _whole_repeats(trace, keys)
        if repeats:
            odd.append(f"{repeats:,} rows repeat an earlier prompt whole")
    ones = int((trace.output_tokens == 1).sum())
    if ones > len(trace) / 2:
        odd.append(f"{ones:,} answers of 1 token")
    return odd


def _whole_repeats(trace: Trace, keys: PrefixKeys) -> int:
    """Rows whose prompt, to its last token, is that of an earlier row."""
    full = np.diff(keys.offsets) > 0
    last = keys.offsets[1:][full] - 1
    complete = keys.tokens[last] == trace.input_tokens[full]
    ends = keys.key[last][complete]
    return len(ends) - len(np.unique(ends))
