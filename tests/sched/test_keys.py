"""Content keys: equal exactly when the content is, everything before it included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan.sched.keys import Keys, make_keys
from kvplan.trace.readers import read_trace
from kvplan.trace.schema import Trace
from tests.sched.test_core_reference import make_requests, make_trace, workloads


def key(keys: Keys, i: int, k: int) -> int:
    shared = int(keys.shared[i])
    return int(keys.stored[keys.offset[i] + k] if k < shared else keys.fresh[i] + k - shared)


@settings(max_examples=300, deadline=None)
@given(workloads(), st.sampled_from([1, 2, 4, 16]))
def test_keys_are_equal_when_the_tuples_are(rows: list[dict[str, Any]], size: int) -> None:
    """Against tuples of (tenant, stream, position) of the whole prefix, in plain Python."""
    requests = make_requests(rows, 1 << 30)
    trace = make_trace(rows)
    keys = make_keys(trace, np.asarray([r.stop for r in requests]), size)
    seen: dict[int, Any] = {}
    contents: dict[Any, int] = {}
    for i, request in enumerate(requests):
        for k in range((request.stop - 1) // size):
            content = tuple(request.tokens[: (k + 1) * size])
            number = key(keys, i, k)
            assert 0 <= number < keys.distinct
            assert seen.setdefault(number, content) == content, "two contents share a key"
            assert contents.setdefault(content, number) == number, "one content has two keys"


def trace_of(tmp_path: Path, rows: list[dict[str, Any]]) -> Trace:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"timestamp": 0, "output_length": 1, **row}) + "\n" for row in rows))
    return read_trace(str(path))


def shared_blocks(trace: Trace, size: int) -> int:
    keys = make_keys(trace, trace.input_tokens + trace.output_tokens, size)
    n = min((int(t) - 1) // size for t in trace.input_tokens + 1)
    return sum(key(keys, 0, k) == key(keys, 1, k) for k in range(n))


def test_ids_of_512_tokens_give_keys_of_any_block_size(tmp_path: Path) -> None:
    """Two prompts that share two Mooncake ids share 1,024 tokens: 64 blocks of 16, 8 of 128, 1 of 1,024."""
    rows = [{"input_length": 1300, "hash_ids": [1, 2, last]} for last in (3, 4)]
    for size, blocks in ((16, 64), (128, 8), (512, 2), (1024, 1), (2048, 0)):
        assert shared_blocks(trace_of(tmp_path, rows), size) == blocks


def test_a_partial_last_id_matches_the_start_of_the_whole_one(tmp_path: Path) -> None:
    rows = [{"input_length": 600, "hash_ids": [1, 2]}, {"input_length": 1024, "hash_ids": [1, 2]}]
    assert shared_blocks(trace_of(tmp_path, rows), 8) == 75


def test_ids_of_16_and_64_tokens(tmp_path: Path) -> None:
    for size in (16, 64):
        rows = [{"input_length": 3 * size, "block_size": size, "hash_ids": [7, 8, last]} for last in (1, 2)]
        assert shared_blocks(trace_of(tmp_path, rows), 16) == 2 * size // 16


def test_how_a_trace_cuts_its_segments_does_not_matter(tmp_path: Path) -> None:
    rows = [
        {"input_length": 64, "segments": [[5, 0, 64]]},
        {"input_length": 64, "segments": [[5, 0, 7], [5, 7, 30], [5, 37, 27]]},
    ]
    assert shared_blocks(trace_of(tmp_path, rows), 16) == 4


def test_the_same_tokens_after_another_start_are_other_content(tmp_path: Path) -> None:
    rows = [
        {"input_length": 48, "segments": [[1, 0, 16], [9, 0, 32]]},
        {"input_length": 48, "segments": [[2, 0, 16], [9, 0, 32]]},
    ]
    assert shared_blocks(trace_of(tmp_path, rows), 16) == 0


def test_tenants_never_share(tmp_path: Path) -> None:
    rows = [{"input_length": 64, "segments": [[5, 0, 64]], "tenant": name} for name in ("a", "b")]
    assert shared_blocks(trace_of(tmp_path, rows), 16) == 0


@pytest.mark.parametrize("key_name", ["adapter", "content_version"])
def test_a_key_that_lacks_any_part_never_hits(tmp_path: Path, key_name: str) -> None:
    """Adapter and content version scope content as a tenant does; absent is another value."""
    base = {"input_length": 64, "segments": [[5, 0, 64]], "tenant": "a"}
    for one, other in (("x", "y"), ("x", None)):
        rows = [base | {key_name: one}, base | {key_name: other}]
        assert shared_blocks(trace_of(tmp_path, rows), 16) == 0
    assert shared_blocks(trace_of(tmp_path, [base | {key_name: "x"}] * 2), 16) == 4
    rows = [base | {key_name: "x"}, base | {key_name: "x", "tenant": "b"}]
    assert shared_blocks(trace_of(tmp_path, rows), 16) == 0


def test_a_later_turn_finds_the_answer_of_the_earlier_one(tmp_path: Path) -> None:
    rows = [
        {"input_length": 32, "output_length": 33, "segments": [[1, 0, 32]], "output_stream": 50},
        {"input_length": 80, "segments": [[1, 0, 32], [50, 0, 33], [2, 0, 15]]},
    ]
    trace = trace_of(tmp_path, rows)
    keys = make_keys(trace, trace.input_tokens + trace.output_tokens, 16)
    assert [key(keys, 0, k) == key(keys, 1, k) for k in range(4)] == [True] * 4


def test_requests_without_content_share_nothing(tmp_path: Path) -> None:
    assert shared_blocks(trace_of(tmp_path, [{"input_length": 64}, {"input_length": 64}]), 16) == 0
