"""kvplan trace as users meet it: inspect, convert, generate."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from kvplan.cli.app import main
from kvplan.trace.readers import read_trace
from tests.conftest import shared_path

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50.99,396,109\n"
)
GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
COLUMNS = (
    "input_tokens", "output_tokens", "segment_offsets", "segment_stream", "segment_start", "segment_length",
    "output_stream", "priority", "samples", "session_id", "turn",
)  # fmt: skip


def test_inspect_shows_what_the_design_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """First line and the lines that rest on the trace alone (design of the terminal output)."""
    assert main(["trace", "inspect", str(shared_path("traces", "mooncake_conversation_trace.jsonl"))]) == 0
    out = capsys.readouterr().out
    assert out.startswith("RECORDED  12,031 requests in 58 min 57 s, Mooncake JSONL, ids of 512 tokens\n")
    for line in (
        "  input   12,035  6,909  27,367  85,400  126,195  144,793,823",
        "  output     343    350     597   1,119    2,000    4,122,048",
        "  sharing     36.6 % of blocks seen before (cache without limit)",
        "              LRU of 1k blocks 4.5 %, 10k 21.2 %, 50k 35.5 %, 100k 36.4 %",
        "  blocks      U at 16 = 0.99940, 64 = 0.99746, 256 = 0.98986",
        "  sha256 b8cbb061a852...",
    ):
        assert line in out.split("\n")
    assert max(map(len, out.split("\n"))) <= 80


def test_inspect_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text(AZURE)
    assert main(["trace", "inspect", str(tmp_path / "a.csv"), "--format", "json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["requests"] == 2
    assert facts["input_tokens"]["total"] == 770
    assert facts["sharing"] is None
    assert facts["bad_rows"] == []


def test_inspect_lists_every_bad_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(GOOD + '{"timestamp": 0}\n' + GOOD + "[]\n" + GOOD)
    assert main(["trace", "inspect", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.err.split("\n")[0] == "error: 2 rows are bad; good ones: 3."
    assert f"  {path}:2: input_length missing; must be a whole number >= 1." in printed.err.split("\n")
    assert f"  {path}:4: found []; must be one JSON object a line." in printed.err.split("\n")
    assert printed.out.startswith("RECORDED  3 requests")


def test_inspect_of_nothing_but_bad_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0}\n')
    assert main(["trace", "inspect", str(path)]) == 2
    assert "1 row is bad; good ones: 0." in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["mooncake_conversation_trace.jsonl", "tracelab_replay_multi_session_large.csv"]
)
def test_convert_keeps_everything(name: str, tmp_path: Path) -> None:
    source, target = shared_path("traces", name), tmp_path / "t.jsonl.gz"
    assert main(["trace", "convert", str(source), "-o", str(target), "--quiet"]) == 0
    one, two = read_trace(str(source)), read_trace(str(target))
    for column in COLUMNS:
        np.testing.assert_array_equal(getattr(one, column), getattr(two, column), err_msg=column)
    np.testing.assert_allclose(one.arrival_s, two.arrival_s, rtol=0, atol=1e-9)
    np.testing.assert_allclose(one.think_s, two.think_s, rtol=0, atol=1e-9)
    assert two.provenance.kind == "recorded"
    assert list(tmp_path.iterdir()) == [target]


def test_convert_of_mooncake_stays_mooncake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(GOOD)
    assert main(["trace", "convert", str(path)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(GOOD)


def test_convert_draws_times_only_when_asked_and_says_constructed(tmp_path: Path, capsys) -> None:
    path = tmp_path / "v.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n5,3\n7,2\n")
    assert main(["trace", "convert", str(path)]) == 2
    assert "no arrival times" in capsys.readouterr().err
    assert main(["trace", "convert", str(path), "--request-rate", "2", "--seed", "4"]) == 0
    first = json.loads(capsys.readouterr().out.split("\n")[0])
    assert (first["provenance"], first["seed"]) == ("constructed", 4)


def test_generate_is_repeatable_and_marked(tmp_path: Path) -> None:
    files = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"
    for file in files:
        args = ["--num-prompts", "50", "--random-range-ratio", "0.5", "--seed", "9", "--quiet"]
        assert main(["trace", "generate", "-o", str(file), *args]) == 0
    lines = [gzip.decompress(file.read_bytes()) for file in files]
    assert lines[0] == lines[1]
    trace = read_trace(str(files[0]))
    assert (len(trace), trace.provenance.kind, trace.provenance.seed) == (50, "constructed", 9)
    assert 512 <= trace.input_tokens.min() <= trace.input_tokens.max() <= 1536


@pytest.mark.parametrize(("args", "words"), [
    (["generate", "--num-prompts", "0"], "--num-prompts is 0"),
    (["generate", "--request-rate", "-1"], "--request-rate is -1"),
    (["generate", "--random-len-range", "1,0.8"], "--random-len-range is 1,0.8"),
    (["generate", "--random-len-range", "0.8,1", "--random-range-ratio", "0.1"], "both set the lengths"),
    (["inspect", "nowhere.jsonl"], "TRACE 'nowhere.jsonl' does not exist"),
    (["convert", "nowhere.jsonl", "--trace-format", "x"], "--trace-format is \"x\""),
])  # fmt: skip
def test_bad_flags_are_one_line(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *args]) == 2
    assert words in capsys.readouterr().err.split("\n")[0]


def test_a_failed_write_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "generate", "-o", str(tmp_path / "none" / "x.jsonl")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
