"""The recorded scheduler's settings and traces, as the reference takes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq

from tests.conftest import shared_path
from tests.sched.reference_model import Request, Settings, StepRecord
from tests.sched.reference_scheduler import simulate

# Column of the record: ours, where they differ.
RENAMED = {
    "pc_queries": "cache_query_tokens",
    "pc_hits": "cache_hit_tokens",
    "pc_preempt_queries": "preempt_cache_query_tokens",
    "pc_preempt_hits": "preempt_cache_hit_tokens",
}
UNORDERED = ("new", "resumed", "preempted", "finished", "first_token")
KINDS = {"swa": "window", "swaonly": "window", "chunk": "chunk", "mamba": "mamba"}


@dataclass(frozen=True)
class Record:
    """One run of vLLM 0.32's own scheduler: ../shared/oracle/README.md."""

    name: str
    meta: dict[str, Any]
    steps: dict[str, list[Any]]


def load(name: str) -> Record:
    folder = shared_path("oracle", "records")
    meta = json.loads((folder / f"{name}.meta.json").read_text())
    return Record(name, meta, pq.read_table(folder / f"{name}.steps.parquet").to_pydict())


def settings_of(record: Record) -> Settings:
    """``arch`` is full, swa:WINDOW:GROUPS, chunk:SIZE:GROUPS, swaonly:WINDOW or mamba:GROUPS."""
    recorded = dict(record.meta["settings"])
    arch, *sizes = recorded["arch"].split(":")
    groups: tuple[str, ...] = ("full",)
    if arch == "swaonly":
        groups = (f"window:{sizes[0]}",)
    elif arch != "full":
        kind = ":".join([KINDS[arch], *sizes[:-1]])
        groups = (kind,) * int(sizes[-1]) + ("full",)
    names = Settings.__dataclass_fields__.keys() & recorded.keys()
    return Settings(**{name: recorded[name] for name in names}, groups=groups)


def requests_of(record: Record) -> list[Request]:
    return list(read_requests(record.meta["trace"], record.meta["settings"]["hash_id_block"]))


def read_requests(trace: str, id_tokens: int) -> Iterator[Request]:
    """A request without content is its own stream (TRACE_FORMATS.md, content as segments)."""
    with shared_path("oracle", "traces", trace).open() as lines:
        for index, line in enumerate(lines):
            row: dict[str, Any] = json.loads(line)
            segments: list[Any] = row.get("segments") or [(f"prompt {index}", 0, row["input_length"])]
            if "hash_ids" in row:
                left = row["input_length"]
                starts = range(0, left, id_tokens)
                segments = [
                    (i, 0, min(id_tokens, left - at)) for i, at in zip(row["hash_ids"], starts, strict=True)
                ]
            yield Request(
                index=index,
                arrival_step=row["arrival_step"],
                segments=[(stream, start, length) for stream, start, length in segments],
                output_stream=row.get("output_seed", f"answer {index}"),
                max_tokens=row["output_length"],
                priority=row.get("priority", 0),
                tenant=row.get("cache_salt"),
            )


def first_difference(record: Record, steps: list[StepRecord], limit: int | None = None) -> str | None:
    """The first step, and columns, in which a run and the record's first ``limit`` steps differ, or None."""
    length = len(record.steps["step"][:limit])
    columns = [name for name in record.steps if name != "step"]
    if not record.meta["settings"]["record_blocks"]:
        columns = [name for name in columns if name not in ("alloc_block_ids", "free_head8")]
    for at, recorded_step in enumerate(record.steps["step"][:limit]):
        if at == len(steps):
            break
        wrong = []
        for name in ["step", *columns]:
            recorded = record.steps[name][at]
            ours = getattr(steps[at], RENAMED.get(name, name))
            if (sorted(recorded) if name in UNORDERED else recorded) != ours:
                wrong.append(f"{name}: {ours}, recorded {recorded}")
        if wrong:
            return f"step {recorded_step}: " + "; ".join(wrong)
    return None if len(steps) == length else f"{len(steps)} steps, recorded {length}"


def replay(record: Record, check: bool = False, steps: int | None = None) -> list[StepRecord]:
    return simulate(settings_of(record), requests_of(record), check, steps)
