"""Every public format, with the traps its real files hold. Rows are small and made by hand unless shared."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from kvplan.errors import InputError
from kvplan.trace.readers import read_trace
from kvplan.trace.schema import NO_STREAM, Trace
from kvplan.trace.sharing import prefix_keys, seen_before
from tests.conftest import shared_path


def read(tmp_path: Path, text: str, format: str | None = None) -> Trace:
    path = tmp_path / "trace"
    path.write_text(text)
    return read_trace(str(path), format)


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def segments(trace: Trace, i: int) -> list[tuple[int, int, int]]:
    a, b = trace.segment_offsets[i], trace.segment_offsets[i + 1]
    columns = trace.segment_stream[a:b], trace.segment_start[a:b], trace.segment_length[a:b]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def shared_tokens(trace: Trace, block_size: int = 16) -> list[int]:
    """Prompt tokens of each request in full blocks whose whole prefix an earlier request had."""
    keys = prefix_keys(trace, block_size)
    hit = seen_before(keys)
    return [
        int(hit[a:b].sum()) * block_size for a, b in zip(keys.offsets[:-1], keys.offsets[1:], strict=True)
    ]


# ---- our own and Mooncake's ---------------------------------------------------------------------------


def test_mooncake_id_covers_512_tokens_and_the_last_may_be_partial(tmp_path: Path) -> None:
    row = {"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 2353]}
    trace = read(tmp_path, lines(row))
    assert segments(trace, 0) == [(46, 0, 512), (2353, 0, 88)]
    assert trace.arrival_s.tolist() == pytest.approx([27.482])
    assert trace.provenance.kind == "recorded"


def test_all_own_keys_are_read(tmp_path: Path) -> None:
    plain = {"timestamp": 0, "input_length": 40, "output_length": 3}
    full = plain | {
        "id": "a", "segments": [[5, 10, 30], [6, 0, 10]], "output_stream": 7, "tenant": "b", "priority": -2,
        "n": 4, "cancel_after_ms": 1500, "deadline_ms": 2500.5, "session_id": "s", "turn": 3, "think_ms": 250,
    }  # fmt: skip
    blocks = plain | {"hash_ids": [1, 2, 3], "block_size": 16, "unknown": {"left": "alone"}}
    trace = read(tmp_path, lines(full, blocks, plain))
    assert trace.request_id == ["a", "r1", "r2"]
    assert segments(trace, 0) == [(5, 10, 30), (6, 0, 10)]
    assert segments(trace, 1) == [(1, 0, 16), (2, 0, 16), (3, 0, 8)]
    assert segments(trace, 2) == []
    assert trace.output_stream.tolist() == [7, NO_STREAM, NO_STREAM]
    assert [trace.tenant_names[t] for t in trace.tenant_id] == ["b", "", ""]
    assert trace.priority.tolist() == [-2, 0, 0]
    assert trace.samples.tolist() == [4, 1, 1]
    assert trace.cancel_after_s[0] == 1.5
    assert trace.deadline_s[0] == 2.5005
    assert np.isnan(trace.deadline_s[1])
    assert trace.session_id.tolist() == [0, -1, -1]
    assert trace.turn.tolist() == [3, 0, 0]
    assert trace.think_s.tolist() == [0.25, 0, 0]


def test_unsorted_times_are_sorted_stably_with_their_content_and_said(tmp_path: Path) -> None:
    rows = [
        {"timestamp": t, "input_length": 10 + k, "output_length": 1, "segments": [[k, 0, 10 + k]]}
        for k, t in enumerate((5, 9, 5, 0))
    ]
    trace = read(tmp_path, lines(*rows))
    assert trace.request_id == ["r3", "r0", "r2", "r1"]
    assert [segments(trace, i)[0][0] for i in range(4)] == [3, 0, 2, 1]
    assert trace.input_tokens.tolist() == [13, 10, 12, 11]
    assert any("line 3" in note and "sorted" in note for note in trace.notes)


def test_constructed_traces_say_so_and_keep_their_seed(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 5, "output_length": 1, "provenance": "constructed", "seed": 11}
    trace = read(tmp_path, lines(row, row | {"provenance": None}))
    assert (trace.provenance.kind, trace.provenance.seed) == ("constructed", 11)


def test_epoch_times_count_from_the_first_arrival(tmp_path: Path) -> None:
    rows = [{"timestamp": 1_700_000_000_000 + ms, "input_length": 5, "output_length": 1} for ms in (0, 250)]
    assert read(tmp_path, lines(*rows)).arrival_s.tolist() == pytest.approx([0, 0.25])


def test_gzip_and_stdin_read_like_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
    plain = read(tmp_path, lines(row, row))
    (tmp_path / "z").write_bytes(gzip.compress(lines(row, row).encode()))
    zipped = read_trace(str(tmp_path / "z"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((tmp_path / "z").read_bytes())))
    piped = read_trace("-")
    for other in (zipped, piped):
        assert other.input_tokens.tolist() == plain.input_tokens.tolist()
        assert other.provenance.sha256 == plain.provenance.sha256
    assert piped.provenance.source == "stdin"


# ---- lengths and times --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:59.5000000,4,5\n2023-11-16 18:16:01.2500001,6,7\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:59.500000+00:00,4,5\n2024-05-10 02:01:01.2500001+02:00,6,7\n",
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\r\n"
        "2024-10-15 23:59:59.500000,1,4,5\r\n2024-10-16 00:00:01.2500001,0,6,7",
    ],
    ids=["2023", "2024 with offsets", "LMM, CRLF, over midnight"],
)
def test_azure(text: str, tmp_path: Path) -> None:
    trace = read(tmp_path, text)
    assert trace.input_tokens.tolist() == [4, 6]
    assert trace.output_tokens.tolist() == [5, 7]
    assert trace.arrival_s.tolist() == pytest.approx([0, 1.7500001], abs=1e-9)


BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


def test_burstgpt_keeps_and_counts_failures(tmp_path: Path) -> None:
    trace = read(tmp_path, f"{BURST}\n5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,0,0,0,API log\n")
    assert trace.input_tokens.tolist() == [472, 0]
    assert trace.arrival_s.tolist() == [5, 45]
    assert any(note.startswith("1 rows with a prompt of 0 tokens") for note in trace.notes)


def test_burstgpt_version_2_has_sessions(tmp_path: Path) -> None:
    head = BURST.replace("Timestamp,", "Timestamp,Session ID,Elapsed time,")
    trace = read(tmp_path, f"{head}\n5.0,a,1.5,GPT-4,10,2,12,API log\n6.5,,2,GPT-4,20,3,23,API log\n")
    assert trace.session_id.tolist() == [0, -1]
    assert trace.arrival_s.tolist() == [5, 6.5]


def test_vidur_with_and_without_times(tmp_path: Path) -> None:
    timed = read(
        tmp_path, "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0196738471894,374,44\n0.5,1,2\n"
    )
    assert timed.arrival_s[0] == 0.0196738471894
    bare = read(
        tmp_path, "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08061\n"
    )
    assert not bare.has_times
    assert bare.output_tokens.tolist() == [918]


@pytest.mark.parametrize("layout", ["one line", "indented"])
def test_bench_result(layout: str, tmp_path: Path) -> None:
    result = {
        "request_throughput": 2.0, "input_lens": [1024, 512, 100], "output_lens": [128, 64, 0],
        "ttfts": [0.1, 0.2, 0], "itls": [[], [], []], "start_times": [52.5, 50.0, 51.0],
    }  # fmt: skip
    trace = read(tmp_path, json.dumps(result, indent=2 if layout == "indented" else None))
    assert trace.input_tokens.tolist() == [512, 100, 1024]
    assert trace.arrival_s.tolist() == [0, 1, 2.5]
    assert any("failed" in note for note in trace.notes)
    del result["start_times"]
    assert not read(tmp_path, json.dumps(result)).has_times


# ---- content of other makes ---------------------------------------------------------------------------


def bailian(chat: int, parent: int, ids: list[int], n: int, **more: object) -> dict:
    row = {
        "chat_id": chat,
        "parent_chat_id": parent,
        "timestamp": chat / 2,
        "input_length": n,
        "type": "text",
    }
    return row | {"output_length": 9, "turn": 1, "hash_ids": ids} | more


def test_bailian_ids_match_along_the_prefix_not_as_a_set(tmp_path: Path) -> None:
    """Given the blocks of the first prompt in another order, then only the common front is shared."""
    rows = bailian(0, -1, [1, 2, 3], 40), bailian(1, 0, [1, 2, 3, 4], 64), bailian(2, -1, [1, 3, 2], 48)
    trace = read(tmp_path, lines(*rows))
    assert shared_tokens(trace) == [0, 32, 16]
    assert segments(trace, 0)[-1] == (3, 0, 8)
    assert trace.session_id.tolist() == [0, 0, 1]
    assert trace.arrival_s.tolist() == [0, 0.5, 1.0]


def test_bailian_ids_of_full_blocks_only(tmp_path: Path) -> None:
    """Then the rest of a prompt is its own: equal rests of two prompts do not match."""
    trace = read(tmp_path, lines(bailian(0, -1, [1, 2], 40), bailian(1, -1, [1, 2], 40)))
    assert shared_tokens(trace, 8) == [0, 32]
    assert [length for _, _, length in segments(trace, 0)] == [16, 16, 8]


def test_coding_sessions_have_local_ids_and_nested_agents(tmp_path: Path) -> None:
    def request(t: float, n: int, **more: object) -> dict:
        return {"t": t, "type": "n", "model": "m", "in": n, "out": 0, "hash_ids": list(range(n // 64))} | more

    nested = {"t": 5.0, "type": "subagent", "requests": [request(1.0, 64), request(2.0, 128)]}
    rows = [
        {"id": name, "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": requests}
        for name, requests in (("x", [request(0.0, 130), nested, request(9.0, 200, think_time=4.5)]),
                               ("y", [request(0.5, 130)]))
    ]  # fmt: skip
    trace = read(tmp_path, lines(*rows))
    assert trace.arrival_s.tolist() == [0, 0.5, 6, 7, 9]
    assert trace.session_id.tolist() == [0, 2, 1, 1, 0]
    assert trace.turn.tolist() == [0, 0, 0, 1, 1]
    assert trace.think_s.tolist() == [0, 0, 0, 0, 4.5]
    # Session y has the same numbers as x but other content; the sub-agent shares x's.
    assert shared_tokens(trace, 64) == [0, 0, 64, 128, 128]
    assert any("own start" in note for note in trace.notes)
    assert any("0 tokens" in note for note in trace.notes)


def test_rag_text_times_parts_in_prompt_order_and_a_blank_line(tmp_path: Path) -> None:
    def row(t: str, n: int, **parts: list[int]) -> dict:
        return {"timestamp": t, "input_length": n, "output_length": 9, "hash_ids": parts, "session_id": "s-1"}

    one = row("27", 1300, user_input=[9], sys_prompt=[1], passages_ids=[5, 6])
    two = row("27.5", 1300, user_input=[8], sys_prompt=[1], passages_ids=[6, 5])
    trace = read(tmp_path, lines(one) + "\n" + lines(two))
    assert segments(trace, 0) == [(1, 0, 512), (5, 0, 512), (6, 0, 276)]
    assert shared_tokens(trace) == [0, 512]
    assert trace.arrival_s.tolist() == [27, 27.5]
    assert trace.session_id.tolist() == [0, 0]


def test_replay_prompt_is_prefix_and_input_and_holds_earlier_answers(tmp_path: Path) -> None:
    text = (
        "session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms\n"
        "0,117,0,0,100,20,300\n0,117,1,120,30,10,154\n0,117,2,200,5,5,0\n1,120,0,0,100,20,0\n"
    )
    trace = read(tmp_path, text)
    order = [trace.request_id.index(f"r{i}") for i in range(4)]
    assert trace.input_tokens[order].tolist() == [100, 150, 205, 100]
    assert trace.arrival_s[order].tolist() == pytest.approx([0.117, 0.417, 0.571, 0.120])
    assert trace.think_s[order].tolist() == pytest.approx([0, 0.3, 0.154, 0])
    first, second, third, other = (segments(trace, i) for i in order)
    assert second[:2] == [first[0], (int(trace.output_stream[order[0]]), 0, 20)]
    assert third[:4] == [*second, (int(trace.output_stream[order[1]]), 0, 10)]
    assert other[0][0] != first[0][0]
    assert any(note.startswith("1 turns have a longer prefix") for note in trace.notes)


def test_replay_of_the_real_file() -> None:
    trace = read_trace(str(shared_path("traces", "tracelab_replay_multi_session_large.csv")))
    assert (len(trace), trace.input_tokens.sum()) == (303, 1_150_397)
    assert not any("longer prefix" in note for note in trace.notes)


def test_llmservingsim_plain_rows_and_sessions(tmp_path: Path) -> None:
    flat = {
        "input_toks": 32,
        "output_toks": 4,
        "arrival_time_ns": 2_500_000_000,
        "input_tok_ids": list(range(32)),
    }
    steps = [
        {"input_toks": 10, "output_toks": 1, "tool_duration_ns": 500_000_000},
        {"input_toks": 20, "output_toks": 2},
    ]
    session = {"session_id": "q", "arrival_time_ns": 0, "sub_requests": steps}
    trace = read(tmp_path, lines(flat, session, flat))
    assert trace.arrival_s.tolist() == [0, 0.5, 2.5, 2.5]
    assert trace.session_id.tolist() == [0, 0, -1, -1]
    assert trace.think_s.tolist() == [0, 0.5, 0, 0]
    assert shared_tokens(trace)[2:] == [0, 32]


def test_tenants_never_share(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 32, "output_length": 1, "segments": [[1, 0, 32]]}
    trace = read(tmp_path, lines(row, row | {"tenant": "b"}, row | {"tenant": "b"}))
    assert shared_tokens(trace) == [0, 0, 32]


def test_content_is_the_same_however_it_is_cut(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 48, "output_length": 1}
    trace = read(tmp_path, lines(
        row | {"segments": [[1, 0, 40], [2, 0, 8]]},
        row | {"segments": [[1, 0, 7], [1, 7, 33], [2, 0, 5], [2, 5, 3]]},
        row | {"segments": [[1, 0, 40], [2, 1, 8]]},
    ))  # fmt: skip
    assert shared_tokens(trace) == [0, 48, 32]


def test_format_is_forced_by_name(tmp_path: Path) -> None:
    text = lines({"timestamp": 0, "input_length": 5, "output_length": 1})
    assert read(tmp_path, text, "mooncake").provenance.format == "native"
    with pytest.raises(InputError, match="must be one of"):
        read(tmp_path, text, "moonshine")
