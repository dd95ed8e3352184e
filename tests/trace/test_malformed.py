"""Bad input gives one line that names file, line and field, and says what would do; never a traceback."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from kvplan.errors import InputError
from kvplan.trace.readers import FORMATS, read_trace

GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
AT = "2023-11-16 18:15:46.6805900"
AZURE = f"TIMESTAMP,ContextTokens,GeneratedTokens\n{AT},374,44\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
REPLAY = "session_id,arrival_time,round_idx,prefix_len,input_len,output_len\n"


def row(**changes: str) -> str:
    """A line of our JSONL with some values written as given, or left out when empty."""
    fields = {"timestamp": "1", "input_length": "600", "output_length": "5"} | changes
    return "{" + ", ".join(f'"{key}": {value}' for key, value in fields.items() if value) + "}\n"


def azure(line: str) -> str:
    return AZURE + line + "\n"


# What is in the file, the line blamed, and words that the message must hold.
JSONL = [
    ("missing key", GOOD + row(output_length=""), 2, "output_length missing; must be a whole number >= 0"),
    ("missing time", GOOD + row(timestamp=""), 2, "timestamp missing; must be a number >= 0"),
    ("misspelt key", row(output_length="", ouput_length="5"), 1, "output_length missing"),
    ("null length", GOOD + row(input_length="null"), 2, "input_length is null"),
    ("NaN time", GOOD + row(timestamp="NaN"), 2, "timestamp is NaN; must be a finite number >= 0"),
    ("NaN length", GOOD + row(input_length="NaN"), 2, "input_length is NaN; must be a whole number >= 1"),
    ("infinite time", GOOD + row(timestamp="Infinity"), 2, "timestamp is Infinity"),
    ("infinite length", GOOD + row(output_length="Infinity"), 2, "output_length is Infinity"),
    ("negative answer", GOOD + row(output_length="-1"), 2, "output_length is -1; must be a whole number >="),
    ("negative time", GOOD + row(timestamp="-5"), 2, "timestamp is -5"),
    ("no prompt", GOOD + row(input_length="0"), 2, "input_length is 0; must be a whole number >= 1"),
    ("length as text", GOOD + row(input_length='"600"'), 2, 'is "600"; must be a whole number >= 1'),
    ("time as text", GOOD + row(timestamp='"1"'), 2, 'timestamp is "1"; must be a number'),
    ("fraction of a token", GOOD + row(input_length="600.5"), 2, "input_length is 600.5"),
    ("true as a length", GOOD + row(output_length="true"), 2, "output_length is true"),
    ("true as a time", GOOD + row(timestamp="false"), 2, "timestamp is false"),
    ("list as a length", GOOD + row(output_length="[5]"), 2, "output_length is [5]"),
    ("1e18 tokens", GOOD + row(input_length=str(10**18)), 2, "must be a whole number <= 1,073,741,824"),
    ("number of 60 digits", GOOD + row(input_length="9" * 60), 2, "input_length is beyond 10^50"),
    ("number of 5,000 digits", GOOD + row(input_length="9" * 5000), 2, "thousands of digits"),
    ("time of 400 digits", GOOD + row(timestamp="9" * 400), 2, "timestamp is beyond 10^300"),
    ("times in ns", GOOD + row(timestamp=str(10**15)), 2, "days after the first; must be within a year"),
    ("duplicate ids", row(id='"a"') + GOOD + row(id='"a"'), 3, 'id is "a", as in line 1'),
    ("id is a list", GOOD + row(id="[1]"), 2, "id is [1]; must be text"),
    ("half of a surrogate pair", GOOD + row(id='"\\ud800"'), 2, "id is"),
    ("too few ids", GOOD + row(hash_ids="[1]"), 2, "hash_ids is 1 ids; must be 2: input_length 600"),
    ("too many ids", GOOD + row(hash_ids="[1, 2, 3]"), 2, "hash_ids is 3 ids; must be 2"),
    ("null among ids", GOOD + row(hash_ids="[1, null]"), 2, "hash_ids[1] is null"),
    ("true among ids", GOOD + row(hash_ids="[true, 2]"), 2, "hash_ids[0] is true"),
    ("fraction among ids", GOOD + row(hash_ids="[1, 2.5]"), 2, "hash_ids[1] is"),
    ("negative id", GOOD + row(hash_ids="[1, -2]"), 2, "hash_ids[1] is -2"),
    ("text among ids", GOOD + row(hash_ids='[1, "2"]'), 2, 'hash_ids[1] is "2"'),
    ("huge id", GOOD + row(hash_ids=f"[1, {2**63}]"), 2, "hash_ids[1] is 9223372036854775808"),
    ("ids are a number", GOOD + row(hash_ids="7"), 2, "hash_ids is 7; must be a list of whole numbers"),
    ("block size 0", GOOD + row(hash_ids="[1, 2]", block_size="0"), 2, "block_size is 0"),
    ("both contents", GOOD + row(hash_ids="[1, 2]", segments="[[1, 0, 600]]"), 2, "hash_ids is given beside"),
    ("segments too short", GOOD + row(segments="[[1, 0, 500]]"), 2, "is 500 tokens long; must be as long"),
    ("segment of two", GOOD + row(segments="[[1, 600]]"), 2, "segments[0] is [1, 600]"),
    ("segment of length 0", GOOD + row(segments="[[1, 0, 600], [1, 0, 0]]"), 2, "segments[1] length is 0"),
    ("negative start", GOOD + row(segments="[[1, -1, 600]]"), 2, "segments[0] start is -1"),
    ("segments are an object", GOOD + row(segments='{"a": 1}'), 2, "segments is"),
    ("n is 0", GOOD + row(n="0"), 2, "n is 0; must be a whole number >= 1"),
    ("negative deadline", GOOD + row(deadline_ms="-3"), 2, "deadline_ms is -3"),
    ("cancel as text", GOOD + row(cancel_after_ms='"soon"'), 2, 'cancel_after_ms is "soon"'),
    ("priority as text", GOOD + row(priority='"high"'), 2, 'priority is "high"'),
    ("turn is negative", GOOD + row(session_id="1", turn="-1"), 2, "turn is -1"),
    ("tenant is an object", GOOD + row(tenant="{}"), 2, "tenant is {}"),
    ("line is cut off", GOOD + GOOD[:40], 2, "not JSON"),
    ("first line is cut off", GOOD[:40] + "\n" + GOOD, 1, "not JSON"),
    ("line is a number", GOOD + "17\n", 2, "found 17; must be one JSON object a line"),
    ("line is a list", GOOD + "[1, 2]\n", 2, "found [1, 2]"),
    ("two objects on a line", GOOD + GOOD.strip() + GOOD, 2, "not JSON (Extra data"),
    ("single quotes", GOOD + "{'timestamp': 0}\n", 2, "not JSON"),
    ("nested too deeply", GOOD + '{"a":' * 100_000 + "\n", 2, "not JSON"),
    ("CSV in JSONL", GOOD + "0,600,5\n", 2, "not JSON"),
    ("keys of no format", '{"a": 1, "b": 2}\n', 1, "keys a, b are of no format known; must be one of"),
    ("an empty object", "{}\n", 1, "keys none are of no format known"),
    ("text without counts", '{"conversations": [{"from": "human", "value": "Hi"}]}\n', 1, "no token counts"),
    ("a list of texts", '[{"conversations": []},\n {"conversations": []}]\n', 1, "no token counts"),
    ("a list of rows", "[" + GOOD.strip() + "]\n", 1, "must be one object a line"),
    ("bench without details", '{"request_throughput": 1.0, "completed": 3}\n', 1, "input_lens missing"),
    ("text as a time", '{"timestamp": "0", "input_length": 5, "output_length": 1}\n', 1, 'is "0"; must be'),
]  # fmt: skip
CSV = [
    ("header only", AZURE.splitlines()[0] + "\n", None, "holds no requests, only a header"),
    ("no header", "2023-11-16 18:15:46.6805900,374,44\n", 1, "are of no format known"),
    ("split by semicolons", AZURE.replace(",", ";"), 1, "columns are split by ';'; must be split by commas"),
    ("split by tabs", AZURE.replace(",", "\t"), 1, "columns are split by a tab"),
    ("column missing", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,374\n", 1, "GeneratedTokens is missing"),
    ("column twice", AZURE.replace("\n", ",TIMESTAMP\n"), 1, '"TIMESTAMP" stands twice'),
    ("cell missing", azure(f"{AT},374"), 3, "2 cells; must be 3"),
    ("cell too many", azure(f"{AT},374,44,1"), 3, "4 cells; must be 3"),
    ("empty cell", azure(f"{AT},,44"), 3, 'ContextTokens is ""'),
    ("text in a count", azure(f"{AT},many,44"), 3, 'ContextTokens is "many"'),
    ("NaN count", azure(f"{AT},nan,44"), 3, 'ContextTokens is "nan"'),
    ("negative count", azure(f"{AT},374,-44"), 3, 'GeneratedTokens is "-44"'),
    ("underscored count", azure(f"{AT},1_000,44"), 3, 'ContextTokens is "1_000"'),
    ("Arabic digits", azure(f"{AT},٣٧٤,44"), 3, "ContextTokens is"),
    ("1e18 count", azure(f"{AT},{10**18},44"), 3, "must be a whole number <= 1,073,741,824"),
    ("time in seconds", azure("1700158546.68,374,44"), 3, 'TIMESTAMP is "1700158546.68"; must be a'),
    ("month 13", azure("2023-13-16 18:15:46.6805900,374,44"), 3, "must be a date and time that exist"),
    ("second 61", azure("2023-11-16 18:15:61.0,374,44"), 3, "TIMESTAMP is"),
    ("years apart", azure("2026-11-16 18:15:46.6805900,374,44"), 3, "must be within a year"),
    ("quote never closed", azure(f'"{AT},374,44'), 3, "not CSV"),
    ("BurstGPT time", BURSTGPT + "x,m,1,1,2,API\n", 2, 'Timestamp is "x"'),
    ("Vidur fraction", VIDUR + "0.0,1.5,2\n", 2, 'num_prefill_tokens is "1.5"'),
    ("Vidur infinite", VIDUR + "inf,1,2\n", 2, 'arrived_at is "inf"'),
    ("session without start", REPLAY + "0,1,3,5,5,5\n", 2, "round_idx is 3"),
]  # fmt: skip
BYTES = [
    ("an empty file", b"", None, "is empty"),
    ("blank lines", b"\n\n  \n", None, "is empty"),
    ("binary junk", bytes(range(128, 256)) * 4, 1, "is not UTF-8 text"),
    ("zero bytes", b"\0" * 100, 1, "of no format known"),
    ("Latin-1", GOOD.encode() + '{"id": "ä"}\n'.encode("latin-1"), 2, "byte 0xe4 is not UTF-8 text"),
    ("UTF-16", GOOD.encode("utf-16"), None, "is UTF-16 text"),
    ("Parquet", b"PAR1" + bytes(50), None, "is a Parquet file"),
    (
        "LFS pointer",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:41ac\n",
        None,
        "a Git LFS pointer",
    ),
    ("web page", b"<!DOCTYPE html>\n<html></html>\n", None, "is a web page"),
    ("zip", b"PK\x03\x04" + bytes(50), None, "is a zip archive"),
    ("zstd", b"\x28\xb5\x2f\xfd" + bytes(50), None, "is zstd data"),
    (
        "gzip cut short",
        gzip.compress((GOOD * 50).encode())[:-20],
        None,
        "gzip stream is cut short or damaged",
    ),
    ("gzip of nothing", gzip.compress(b""), None, "is empty"),
    ("gzip damaged", gzip.compress((GOOD * 50).encode())[:-8] + bytes(8), None, "cut short or damaged"),
    ("gzip head only", b"\x1f\x8b\x08", None, "cut short or damaged"),
]
CASES = [*((a, b.encode(), c, d) for a, b, c, d in [*JSONL, *CSV]), *BYTES]


@pytest.mark.parametrize(("name", "content", "line", "words"), CASES, ids=[case[0] for case in CASES])
def test_bad_file_is_one_line_that_names_the_place(
    name: str, content: bytes, line: int | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_trace(str(path))
    message, *hints = str(caught.value).split("\n")
    assert words in message, message
    assert message.startswith(f"{path}:{line}: " if line else f"{path}"), message
    assert len(message) < 400 + len(str(path))
    assert message.isprintable()
    assert all(hint.startswith("  ") for hint in hints)


def test_there_are_at_least_forty_malformed_inputs() -> None:
    assert len(CASES) >= 40


@pytest.mark.parametrize("path", ["nowhere.jsonl", "", "a\0b", "/"])
def test_a_file_that_cannot_be_read_is_named(path: str) -> None:
    with pytest.raises(InputError, match="TRACE"):
        read_trace(path)


def test_unknown_format_lists_those_known(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_trace(str(tmp_path), "parquet")
    assert all(name in str(caught.value) for name in FORMATS)


@pytest.mark.parametrize(("format", "content", "words"), [
    ("azure", GOOD, "found JSON"), ("native", AZURE, "found no JSON"), ("bailian", GOOD, "chat_id missing"),
    ("vidur", AZURE, "column num_prefill_tokens is missing"),
])  # fmt: skip
def test_forced_format_that_does_not_match(format: str, content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(content)
    with pytest.raises(InputError, match=words):
        read_trace(str(path), format)


def test_all_bad_rows_are_found_when_asked_for(tmp_path: Path) -> None:
    """Given rows 2 and 4 of five bad, then both are described and the other three are read."""
    path = tmp_path / "t.jsonl"
    bad = row(hash_ids="[5, null]"), row(segments="[[1, 0, 599], [2, 0, 2]]")
    path.write_text(GOOD + bad[0] + GOOD + bad[1] + GOOD)
    problems: list[str] = []
    trace = read_trace(str(path), problems=problems)
    assert [problem.split(": ")[0] for problem in problems] == [f"{path}:2", f"{path}:4"]
    assert len(trace) == 3
    assert trace.segment_stream.tolist() == [0, 1] * 3


@pytest.mark.parametrize("change", [
    lambda text: text.replace("\n", "\r\n"),  # CRLF
    lambda text: "\ufeff" + text,  # byte order mark
    lambda text: text.rstrip("\n"),  # no newline at the end
    lambda text: "\n" + text.replace("\n", "\n\n"),  # blank lines
])  # fmt: skip
@pytest.mark.parametrize("content", [GOOD + row(), AZURE + "2023-11-16 18:15:47.6805900,375,45\n"])
def test_harmless_variants_read_alike(change, content: str, tmp_path: Path) -> None:
    paths = tmp_path / "a", tmp_path / "b"
    paths[0].write_bytes(content.encode())
    paths[1].write_bytes(change(content).encode())
    plain, changed = (read_trace(str(path)) for path in paths)
    assert plain.input_tokens.tolist() == changed.input_tokens.tolist()
    assert plain.arrival_s.tolist() == changed.arrival_s.tolist()
    assert len(plain) == 2
