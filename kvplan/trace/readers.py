"""Read a trace file: recognised by its content, checked field by field, turned into columns."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvplan.errors import InputError
from kvplan.trace import azure, native
from kvplan.trace.columns import Columns, Place
from kvplan.trace.schema import Provenance, Trace

AddRow = Callable[[Columns, Place, dict[str, Any]], None]

# A format: how its rows are spelt, the keys or columns that tell it from others, and its reader.
JSONL_FORMATS: dict[str, tuple[tuple[str, ...], AddRow]] = {
    "native": (("timestamp", "input_length", "output_length"), native.add_row),
}
CSV_FORMATS: dict[str, tuple[tuple[str, ...], AddRow]] = {
    "azure": (azure.COLUMNS, azure.add_row),
}
ALIASES = {"mooncake": "native", "azure-2023": "azure", "azure-2024": "azure"}


def format_names() -> list[str]:
    return [*JSONL_FORMATS, *CSV_FORMATS, *ALIASES]


def read_trace(path: str, format: str | None = None) -> Trace:
    """Read a trace in any known format, plain or gzipped; ``-`` is stdin.

    ``format`` forces a reader. Raises InputError: one line with file, line, field, what was found and what
    would do.
    """
    wanted = _wanted(format)
    name = "stdin" if path == "-" else path
    raw = _read_bytes(path, name)
    lines = _lines(raw, name)
    first = next(((k, line) for k, line in enumerate(lines, 1) if line.strip()), None)
    if first is None:
        raise InputError(f"{name} is empty; must hold requests, one a line.")
    columns = Columns(name)
    if first[1].lstrip().startswith(("{", "[")):
        found, add = _jsonl_format(wanted, name, *first)
        for k, line in enumerate(lines, 1):
            if line.strip():
                place = Place(name, k)
                add(columns, place, _object(place, line))
    else:
        found, add = _csv_format(wanted, name, *first)
        for place, row in _csv_rows(name, lines, first[0]):
            add(columns, place, row)
    if not columns.ids:
        raise InputError(f"{name} holds no requests, only a header.")
    kind = "constructed" if b'"constructed"' in raw[:4096] else "recorded"
    return columns.trace(Provenance(kind, Path(name).name, found, hashlib.sha256(raw).hexdigest()))


def _wanted(format: str | None) -> str | None:
    if format is None:
        return None
    wanted = ALIASES.get(format, format)
    if wanted not in JSONL_FORMATS and wanted not in CSV_FORMATS:
        raise InputError(f"--trace-format is {format!r}; must be one of {', '.join(format_names())}.")
    return wanted


def _read_bytes(path: str, name: str) -> bytes:
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except FileNotFoundError:
        raise InputError(f"TRACE {path!r} does not exist.") from None
    except IsADirectoryError:
        raise InputError(f"TRACE {path!r} is a folder; name a file in it.") from None
    except (OSError, ValueError) as error:
        raise InputError(f"TRACE {path!r} cannot be read: {error}.") from None
    if raw[:2] == b"\x1f\x8b":
        try:
            return gzip.decompress(raw)
        except (EOFError, OSError, zlib.error):
            raise InputError(f"{name}: the gzip stream is cut short or damaged; fetch the file again.") from None
    return raw


def _lines(raw: bytes, name: str) -> list[str]:
    """Text lines; a byte order mark and CRLF are fine, other encodings than UTF-8 are not."""
    try:
        return raw.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        byte = raw[error.start]
        raise InputError(f"{name}:{line}: byte 0x{byte:02x} is not UTF-8 text; must be JSONL or CSV.") from None


def _object(place: Place, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        what = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise InputError(
            f"{place.file}:{place.line}: not a JSON object ({what}); must be one whole object a line."
        ) from None
    except ValueError:  # an integer of more digits than Python converts
        raise InputError(f"{place.file}:{place.line}: a number has thousands of digits; must be a size.") from None
    if not isinstance(row, dict):
        raise InputError(f"{place.file}:{place.line}: found {type(row).__name__}; must be one JSON object a line.")
    return row


def _jsonl_format(wanted: str | None, name: str, number: int, line: str) -> tuple[str, AddRow]:
    if wanted is not None:
        if wanted not in JSONL_FORMATS:
            raise InputError(f"{name}:{number}: found JSON; --trace-format {wanted} is a CSV format.")
        return wanted, JSONL_FORMATS[wanted][1]
    row = _object(Place(name, number), line)
    # The format whose keys are best met, so that one key that is missing is named, not the whole format.
    best = max(JSONL_FORMATS, key=lambda f: sum(key in row for key in JSONL_FORMATS[f][0]))
    keys, add = JSONL_FORMATS[best]
    if sum(key in row for key in keys) * 2 < len(keys):
        raise InputError(
            f"{name}:{number}: keys {', '.join(list(row)[:6]) or 'none'} are of no format known; "
            f"must be one of {', '.join(format_names())}."
        )
    return best, add


def _csv_format(wanted: str | None, name: str, number: int, line: str) -> tuple[str, AddRow]:
    header = [cell.strip() for cell in next(csv.reader([line.rstrip("\r")]), [])]
    for found, (needed, add) in CSV_FORMATS.items():
        if wanted in (None, found) and all(column in header for column in needed):
            return found, add
    shown = ", ".join(cell[:20] for cell in header[:6])
    raise InputError(
        f"{name}:{number}: columns {shown} are of no format known; must be one of {', '.join(format_names())}."
    )


def _csv_rows(name: str, lines: list[str], header_at: int) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Rows as dicts; the last line may lack its newline, but not cells."""
    header = [cell.strip() for cell in next(csv.reader([lines[header_at - 1].rstrip("\r")]))]
    for k, line in enumerate(lines[header_at:], header_at + 1):
        if not line.strip():
            continue
        try:
            cells = next(csv.reader([line.rstrip("\r")], strict=True))
        except csv.Error as error:
            raise InputError(f"{name}:{k}: not a CSV row ({error}); must be {len(header)} cells.") from None
        if len(cells) != len(header):
            raise InputError(f"{name}:{k}: {len(cells)} cells; must be {len(header)}: {', '.join(header)}.")
        yield Place(name, k), dict(zip(header, cells, strict=True))
