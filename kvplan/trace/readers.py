"""Read a trace file: recognised by its content, checked field by field, turned into columns."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import itertools
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvplan.errors import InputError
from kvplan.trace import lengths, native, sessions
from kvplan.trace.columns import Columns, Phrase, Place, harmless, shown
from kvplan.trace.schema import Provenance, Trace

AddRow = Callable[[Place, dict[str, Any]], None]
Line = tuple[int, bytes]


@dataclass(frozen=True)
class Format:
    """How a format is recognised (any of ``marks`` for JSON, all of them for CSV) and read."""

    title: str
    marks: tuple[str, ...]
    reader: Callable[[Columns], AddRow]


# The more particular ones first: the first whose marks are met is taken.
JSONL_FORMATS = {
    "coding": Format("agentic coding sessions", ("hash_id_scope", "requests"), sessions.coding),
    "bailian": Format("Bailian JSONL", ("chat_id", "parent_chat_id"), sessions.bailian),
    "llmservingsim": Format(
        "LLMServingSim JSONL", ("arrival_time_ns", "input_toks", "sub_requests"), sessions.llmservingsim
    ),
    "bench": Format(
        "bench result",
        ("input_lens", "output_lens", "request_throughput", "mean_ttft_ms"),
        lengths.bench_result,
    ),
    "rag": Format("RAG JSONL", (), sessions.rag),
    "native": Format("Mooncake JSONL", ("timestamp", "input_length", "output_length"), native.reader),
}
CSV_FORMATS = {
    "azure": Format("Azure CSV", lengths.AZURE, lengths.azure),
    "burstgpt": Format("BurstGPT CSV", lengths.BURSTGPT, lengths.burstgpt),
    "vidur": Format("Vidur or Sarathi CSV", lengths.VIDUR, lengths.vidur),
    "replay": Format("session replay CSV", sessions.REPLAY, sessions.replay),
}
FORMATS = JSONL_FORMATS | CSV_FORMATS
ALIASES = {
    "mooncake": "native",
    "azure-2023": "azure",
    "azure-2024": "azure",
    "azure-lmm": "azure",
    "sarathi": "vidur",
}
# Keys of data sets that hold text, not lengths.
TEXTS = {"conversations", "conversation", "messages", "prompt", "prompts", "text_input", "payload", "texts"}
MAGIC = {
    b"PAR1": "a Parquet file",
    b"PK\x03\x04": "a zip archive",
    b"\x28\xb5\x2f\xfd": "zstd data",
    b"BZh": "bzip2 data",
    b"\xfd7zXZ": "xz data",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"SQLite": "a database",
    b"version https://git-lfs": "a Git LFS pointer, not the data (git lfs pull fetches it)",
    b"<!DOCTYPE": "a web page",
    b"<html": "a web page",
}
MAX_PROBLEMS = 1000


def format_names() -> list[str]:
    return [*FORMATS, *ALIASES]


def read_trace(path: str, format: str | None = None, problems: list[str] | None = None) -> Trace:
    """Read a trace in any known format, plain or gzipped; ``-`` is stdin.

    ``format`` forces a reader. Raises InputError: one line with file, line, field, what was found and what
    would do. With ``problems`` a bad row is described there (up to a thousand) and left out instead.
    """
    wanted = _wanted(format)
    name = "stdin" if path == "-" else harmless(path)
    hint = "" if path == "-" else f"\n  All bad rows: kvplan trace inspect {name}"
    digest = hashlib.sha256()
    columns = Columns(name)
    with _open(path, name) as stream:
        lines = _lines(stream, name, digest)
        first = next(((k, line) for k, line in lines if line.strip()), None)
        if first is None:
            raise InputError(f"{name} is empty; must hold requests, one a line.")
        if first[1].lstrip()[:1] in (b"{", b"["):
            found, rows = _json_rows(wanted, name, first, lines)
        else:
            found, rows = _csv_rows(wanted, name, first, lines)
        add = FORMATS[found].reader(columns)
        place = Place(name)
        try:
            for line, read in rows:
                place.line = line
                try:
                    add(place, read())
                except InputError as error:
                    if problems is None:
                        raise InputError(f"{error}{hint}") from None
                    columns.drop_pending()
                    problems.append(str(error))
                    if len(problems) >= MAX_PROBLEMS:
                        break
        except OverflowError:
            raise InputError(f"{name}:{place.line}: ids too large in sum; must fit into 62 bits.") from None
    if not columns.lines and not problems:
        raise InputError(f"{name} holds no requests, only a header.")
    kind = "constructed" if columns.constructed else "recorded"
    source = name if path == "-" else harmless(Path(path).name)
    return columns.trace(Provenance(kind, source, found, digest.hexdigest(), columns.seed))


def _wanted(format: str | None) -> str | None:
    if format is None:
        return None
    wanted = ALIASES.get(format, format)
    if wanted not in FORMATS:
        raise InputError(f"--trace-format is {shown(format)}; must be one of {', '.join(format_names())}.")
    return wanted


# ---------------------------------------------------------------------------------------- bytes and lines


@contextmanager
def _open(path: str, name: str) -> Iterator[BinaryIO]:
    """The file's bytes, unzipped; stdin is left open."""
    with ExitStack() as opened:
        try:
            if path == "-":
                raw = sys.stdin.buffer
                stream = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw)  # type: ignore[type-var]
            else:
                stream = opened.enter_context(open(path, "rb"))
            head = stream.peek(32)[:32]
        except FileNotFoundError:
            raise InputError(f"TRACE '{name}' does not exist.") from None
        except IsADirectoryError:
            raise InputError(f"TRACE '{name}' is a folder; name a file in it.") from None
        except (OSError, ValueError) as error:
            raise InputError(f"TRACE '{name}' cannot be read: {error}.") from None
        for magic, what in MAGIC.items():
            if head.startswith(magic):
                raise InputError(f"{name} is {what}; must be JSONL or CSV in UTF-8, plain or gzipped.")
        yield gzip.open(stream) if head[:2] == b"\x1f\x8b" else stream  # type: ignore[misc]  # noqa: SIM115


def _lines(stream: Iterable[bytes], name: str, digest: Any) -> Iterator[Line]:
    """Numbered lines; a byte order mark at the start is dropped. The digest sees the unzipped bytes."""
    number = 0
    try:
        for number, line in enumerate(stream, 1):
            digest.update(line)
            yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    except (EOFError, OSError, zlib.error):
        raise InputError(
            f"{name}:{number + 1}: the gzip stream is cut short or damaged here; fetch the file again."
        ) from None


def _text(name: str, number: int, line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        byte = line[error.start]
        raise InputError(
            f"{name}:{number}: byte 0x{byte:02x} is not UTF-8 text; must be JSONL or CSV."
        ) from None


# ---------------------------------------------------------------------------------------------------- JSON


def _object(name: str, number: int, line: bytes) -> dict[str, Any]:
    text = _text(name, number, line)
    try:
        row = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        what = (
            f"{error.msg} at column {error.colno}"
            if isinstance(error, json.JSONDecodeError)
            else "nested too deeply"
        )
        raise InputError(f"{name}:{number}: not JSON ({what}); must be one whole object a line.") from None
    except ValueError:  # an integer of more digits than Python converts
        raise InputError(f"{name}:{number}: a number has thousands of digits; must be a size.") from None
    if type(row) is not dict:
        raise InputError(f"{name}:{number}: found {shown(row)}; must be one JSON object a line.")
    return row


Rows = Iterator[tuple[int, Callable[[], dict[str, Any]]]]


def _json_rows(wanted: str | None, name: str, first: Line, lines: Iterator[Line]) -> tuple[str, Rows]:
    """The format, and each row's line with a function that parses it (so that its error is its own)."""
    try:
        row = _object(name, *first)
    except InputError:
        document = _document(name, first, lines)
        row, lines = document, iter(())
        first = (first[0], json.dumps(document).encode())
    found = wanted or _json_format(name, first[0], row)
    if found not in JSONL_FORMATS:
        raise InputError(f"{name}:{first[0]}: found JSON; --trace-format {found} is a CSV format.")

    def rows() -> Rows:
        yield first[0], lambda: row
        for number, line in lines:
            if line.strip():
                yield number, lambda number=number, line=line: _object(name, number, line)  # type: ignore[misc]

    return found, rows()


def _document(name: str, first: Line, lines: Iterator[Line]) -> dict[str, Any]:
    """A file that is one JSON value over many lines. Raises the first line's error if it is not that."""
    wrong = InputError("")
    try:
        _object(name, *first)
    except InputError as error:
        wrong = error
    head = first[1].strip()
    if head not in (b"{", b"[", b"[{") and not head.startswith(b"["):
        # One line of JSONL that is torn: the rest of the file cannot mend it.
        raise wrong
    try:
        value = json.loads(_text(name, first[0], first[1] + b"".join(line for _, line in lines)))
    except (ValueError, RecursionError):
        raise wrong from None
    if type(value) is list and value and type(value[0]) is dict:
        if set(value[0]) & TEXTS:
            raise _text_only(name, first[0], value[0])
        raise InputError(
            f"{name}:{first[0]}: found a JSON list; must be one object a line (jq -c '.[]' makes that)."
        )
    if type(value) is not dict:
        raise wrong
    return value


def _json_format(name: str, number: int, row: dict[str, Any]) -> str:
    if type(row.get("hash_ids")) is dict:
        return "rag"
    for found, known in JSONL_FORMATS.items():
        if any(key in row for key in known.marks):
            return found
    if set(row) & TEXTS:
        raise _text_only(name, number, row)
    keys = shown(Phrase(", ".join(harmless(key) for key in list(row)[:6]) or "none"))
    raise InputError(
        f"{name}:{number}: keys {keys} are of no format known; must be one of {', '.join(format_names())}.\n"
        "  Our own: timestamp (ms), input_length, output_length, one object a line."
    )


def _text_only(name: str, number: int, row: dict[str, Any]) -> InputError:
    key = next(key for key in row if key in TEXTS)
    return InputError(
        f"{name}:{number}: found text ({key}) no token counts; must have input_length and output_length.\n"
        "  Count with the model's tokenizer and write one object a line; kvplan brings no tokenizer."
    )


# ----------------------------------------------------------------------------------------------------- CSV


def _cells(name: str, number: int, text: str) -> list[str]:
    if '"' not in text:
        return text.rstrip("\r\n").split(",")
    try:
        return next(csv.reader([text.rstrip("\r\n")], strict=True))
    except (csv.Error, StopIteration) as error:
        raise InputError(f"{name}:{number}: not CSV ({error}); must be cells split by commas.") from None


def _csv_rows(wanted: str | None, name: str, first: Line, lines: Iterator[Line]) -> tuple[str, Rows]:
    header = [cell.strip() for cell in _cells(name, first[0], _text(name, *first))]
    found = _csv_format(wanted, name, first[0], header)
    # Only the columns that a reader knows are looked at; the number of cells is checked all the same.
    width = len(header)
    names = shown(Phrase(harmless(", ".join(header))))
    if len(set(header)) < width:
        twice = next(cell for cell in header if header.count(cell) > 1)
        raise InputError(f"{name}:{first[0]}: column {shown(twice)} stands twice; must be there once.")

    def row(number: int, line: bytes) -> dict[str, str]:
        cells = _cells(name, number, _text(name, number, line))
        if len(cells) != width:
            raise InputError(f"{name}:{number}: {len(cells)} cells; must be {width}: {names}.")
        return dict(zip(header, cells, strict=True))

    def rows() -> Rows:
        for number, line in lines:
            if not line.isspace():
                yield number, lambda number=number, line=line: row(number, line)  # type: ignore[misc]

    return found, rows()


def _csv_format(wanted: str | None, name: str, number: int, header: list[str]) -> str:
    candidates = CSV_FORMATS if wanted is None else {wanted: FORMATS[wanted]}
    if wanted in JSONL_FORMATS:
        raise InputError(f"{name}:{number}: found no JSON; --trace-format {wanted} is a JSON format.")
    for found, known in candidates.items():
        if all(column in header for column in known.marks):
            return found
    best = max(candidates, key=lambda found: sum(column in header for column in candidates[found].marks))
    marks = candidates[best].marks
    missing = [column for column in marks if column not in header]
    if wanted is not None or len(missing) * 2 <= len(marks):
        raise InputError(
            f"{name}:{number}: column {missing[0]} is missing; must be there in {FORMATS[best].title}."
        )
    for mark, delimiter in ((";", "';'"), ("\t", "a tab"), ("|", "'|'")):
        split = [cell.strip() for cell in itertools.chain.from_iterable(cell.split(mark) for cell in header)]
        if any(all(column in split for column in known.marks) for known in CSV_FORMATS.values()):
            raise InputError(f"{name}:{number}: columns are split by {delimiter}; must be split by commas.")
    columns = shown(Phrase(", ".join(harmless(cell[:20]) for cell in header[:6])))
    raise InputError(
        f"{name}:{number}: columns {columns} are of no format known; "
        f"must be one of {', '.join(format_names())}."
    )
