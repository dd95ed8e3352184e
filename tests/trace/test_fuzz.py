"""Whatever bytes a file holds, reading it gives a trace or an InputError of printable lines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplan.errors import InputError
from kvplan.trace.profile import profile
from kvplan.trace.readers import FORMATS, read_trace
from kvplan.trace.write import native_lines

VALID = [
    b'{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    b'{"timestamp": 7, "input_length": 40, "output_length": 5, "id": "b", "tenant": "x", "session_id": 1}\n'
    b'{"timestamp": 9, "input_length": 9, "output_length": 0, "segments": [[1, 0, 9]], "output_stream": 3}\n',
    b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n",
    b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,4,2,6,API log\n",
    b"arrived_at,num_prefill_tokens,num_decode_tokens\n0.25,74,918\n1.5,7,2\n",
    b"session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms\n"
    b"0,117,0,0,2318,200,300\n0,117,1,2518,348,131,154\n",
    b'{"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 20, "output_length": 3, '
    b'"type": "text", "turn": 1, "hash_ids": [4, 5]}\n',
    b'{"id": "x", "block_size": 64, "hash_id_scope": "local", "requests": [{"t": 0.5, "type": "n", "in": 70, '
    b'"out": 3, "hash_ids": [1]}, {"t": 2, "type": "subagent", "requests": []}]}\n',
    b'{"timestamp": "3", "input_length": 20, "output_length": 3, "hash_ids": {"history": [4], "x": [5]}}\n',
    b'{"arrival_time_ns": 5, "sub_requests": '
    b'[{"input_toks": 3, "output_toks": 1, "input_tok_ids": [1, 2, 3]}]}\n',
    b'{"input_lens": [5, 6], "output_lens": [1, 2], "start_times": [0.5, 1.5]}\n',
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FEW = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check(path: Path, content: bytes, format: str | None = None) -> None:
    path.write_bytes(content)
    try:
        trace = read_trace(str(path), format)
    except InputError as error:
        message = str(error)
    else:
        message = ""
    assert all(line.isprintable() for line in message.split("\n")), repr(message)
    if message:
        return
    n = len(trace)
    assert n > 0
    assert len(trace.segment_offsets) == n + 1
    assert trace.segment_offsets[-1] == len(trace.segment_stream)
    assert (trace.input_tokens >= 0).all()
    assert (trace.segment_length > 0).all()
    sums = np.bincount(np.repeat(np.arange(n), np.diff(trace.segment_offsets)), trace.segment_length, n)
    assert ((sums == trace.input_tokens) | (np.diff(trace.segment_offsets) == 0)).all()
    assert not trace.has_times or (
        np.isfinite(trace.arrival_s).all() and (np.diff(trace.arrival_s) >= 0).all()
    )
    profile(trace)
    if trace.has_times:
        path.write_text("".join(native_lines(trace)))


@FEW
@given(content=st.binary(max_size=300), zipped=st.booleans())
def test_random_bytes(content: bytes, zipped: bool, tmp_path: Path) -> None:
    check(tmp_path / "f", gzip.compress(content) if zipped else content)


@FEW
@given(data=st.data())
def test_valid_files_with_bytes_changed(data: st.DataObject, tmp_path: Path) -> None:
    content = bytearray(data.draw(st.sampled_from(VALID)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        end = data.draw(st.integers(at, min(len(content), at + 8)))
        content[at:end] = data.draw(
            st.binary(max_size=4) | st.sampled_from([b"9" * 30, b"-", b'"', b"\n", b"null"])
        )
        if not content:
            break
    check(tmp_path / "f", bytes(content))


@FEW
@given(data=st.data())
def test_valid_rows_with_any_value_in_any_key(data: st.DataObject, tmp_path: Path) -> None:
    row = json.loads(data.draw(st.sampled_from([v for v in VALID if v[:1] == b"{"])).splitlines()[0])
    key = data.draw(st.sampled_from(sorted(row)))
    row[key] = data.draw(JSON)
    check(tmp_path / "f", json.dumps(row).encode() + b"\n")


@FEW
@given(data=st.data(), format=st.sampled_from(sorted(FORMATS)))
def test_any_format_forced_on_any_file(data: st.DataObject, format: str, tmp_path: Path) -> None:
    check(tmp_path / "f", data.draw(st.sampled_from(VALID)), format)


@pytest.mark.parametrize("content", VALID)
def test_the_valid_files_are_valid(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(content)
    assert len(read_trace(str(tmp_path / "f"))) >= 1


@pytest.mark.parametrize("content", VALID)
def test_a_gzip_cut_anywhere(content: bytes, tmp_path: Path) -> None:
    zipped = gzip.compress(content)
    for end in range(1, len(zipped), 3):
        check(tmp_path / "f", zipped[:end])
