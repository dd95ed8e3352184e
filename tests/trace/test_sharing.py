"""What a prefix cache hits in the public traces, and the fast counts against a plain LRU.

Source of the public figures: reference answers of the design notes (TRACE_FORMATS): lookup from the front,
stop at the first miss, whole request touched, one global LRU, file order, last block touched first.
"""

from __future__ import annotations

import gzip
import json
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan.trace.profile import profile
from kvplan.trace.readers import read_trace
from kvplan.trace.schema import Trace
from kvplan.trace.sharing import PrefixKeys, id_size, lru_hits, prefix_keys, seen_before
from tests.conftest import shared_path


@pytest.fixture(scope="module")
def mooncake() -> Trace:
    return read_trace(str(shared_path("traces", "mooncake_conversation_trace.jsonl")))


@pytest.fixture(scope="module")
def mooncake_keys(mooncake: Trace) -> PrefixKeys:
    return prefix_keys(mooncake)


def test_mooncake_without_limit(mooncake: Trace, mooncake_keys: PrefixKeys) -> None:
    assert id_size(mooncake) == 512
    assert (int(seen_before(mooncake_keys).sum()), len(mooncake_keys)) == (105_710, 288_500)


@pytest.mark.parametrize(("blocks", "last_first", "first_first"), [
    (1_000, 0.04453, 0.04447), (10_000, 0.21160, 0.21116), (30_000, 0.32575, 0.32571),
    (50_000, 0.35456, 0.35456), (100_000, 0.36369, 0.36369),
])  # fmt: skip
def test_mooncake_lru(blocks: int, last_first: float, first_first: float, mooncake_keys: PrefixKeys) -> None:
    found = [lru_hits(mooncake_keys, blocks, order).sum() / len(mooncake_keys) for order in (True, False)]
    assert found == pytest.approx([last_first, first_first], abs=5.1e-6)


@pytest.mark.parametrize(("blocks", "percent"), [
    (160, 4.54), (640, 4.58), (2_048, 5.64), (8_192, 18.82), (16_384, 27.89), (10**9, 39.81),
])  # fmt: skip
def test_mooncake_second_half_by_tokens(
    blocks: int, percent: float, mooncake: Trace, mooncake_keys: PrefixKeys
) -> None:
    hits = lru_hits(mooncake_keys, blocks)
    last = np.maximum(mooncake_keys.offsets[:-1] + hits - 1, 0)
    tokens = np.where(hits > 0, mooncake_keys.tokens[last], 0)
    half = len(mooncake) // 2
    share = 100 * tokens[half:].sum() / mooncake.input_tokens[half:].sum()
    assert share == pytest.approx(percent, abs=0.0051)


def test_coding_sessions_each_with_a_cache_of_its_own() -> None:
    path = shared_path("traces", "agentic_coding_sessions_dev.jsonl.gz")
    trace = read_trace(str(path))
    keys = prefix_keys(trace)
    assert (int(seen_before(keys).sum()), len(keys)) == (8_928_888, 9_292_427)

    def count(items: list[Any]) -> int:
        return sum(count(item["requests"]) if item["type"] == "subagent" else 1 for item in items)

    with gzip.open(path) as stream:
        sizes = [count(json.loads(line)["requests"]) for line in stream]
    in_file_order = np.argsort([int(name[1:]) for name in trace.request_id])
    assert sum(sizes) == len(trace) == 5_567
    hits = {True: 0, False: 0}
    for rows in np.split(in_file_order, np.cumsum(sizes)[:-1]):
        parts = [keys.key[keys.offsets[i] : keys.offsets[i + 1]] for i in rows]
        _, key = np.unique(np.concatenate(parts), return_inverse=True)
        session = PrefixKeys(key, np.concatenate([[0], np.cumsum([len(part) for part in parts])]), key)
        for order in hits:
            hits[order] += int(lru_hits(session, 1_000, order).sum())
    assert hits[True] / len(keys) == pytest.approx(0.5224, abs=5.1e-5)
    assert hits[False] / len(keys) == pytest.approx(0.0986, abs=5.1e-5)


def plain_lru(requests: list[list[int]], capacity: int, last_block_first: bool) -> list[int]:
    """The definition, with an ordered dictionary."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = []
    for keys in requests:
        found = 0
        while found < len(keys) and keys[found] in cache:
            found += 1
        hits.append(found)
        for key in reversed(keys) if last_block_first else keys:
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


@settings(max_examples=150, deadline=None)
@given(
    paths=st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=30),
    capacity=st.integers(1, 25),
    last_block_first=st.booleans(),
)
def test_lru_equals_the_definition(paths: list[list[int]], capacity: int, last_block_first: bool) -> None:
    numbers: dict[tuple[int, ...], int] = {}
    requests = [
        [numbers.setdefault(tuple(path[: k + 1]), len(numbers)) for k in range(len(path))] for path in paths
    ]
    flat = np.array([key for keys in requests for key in keys], np.int64)
    keys = PrefixKeys(flat, np.concatenate([[0], np.cumsum([len(keys) for keys in requests])]), flat)
    assert lru_hits(keys, capacity, last_block_first).tolist() == plain_lru(
        requests, capacity, last_block_first
    )


def test_profile_of_mooncake(mooncake: Trace) -> None:
    """Figures as the design of the terminal output shows them."""
    facts = profile(mooncake)
    assert facts["arrivals"]["rate"] == pytest.approx(3.40, abs=0.005)
    assert facts["arrivals"]["busiest_minute_rate"] == pytest.approx(4.12, abs=0.005)
    assert facts["utilization"]["64"] == pytest.approx(0.99746, abs=5.1e-6)
    assert facts["odd"] == [
        "arrival times fall on 1,180 instants 3 s apart: a gap CV of 3.0 is an artefact",
        "118 rows repeat an earlier prompt whole",
    ]
