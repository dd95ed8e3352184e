"""The records of vLLM 0.32's own scheduler: load one, and replay its trace through the compiled core."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from kvplan.sched.core import Rules
from kvplan.sched.groups import FULL_ONLY, Group
from kvplan.sim.run import Run, simulate, steps_clock
from kvplan.sim.tables import decision_columns
from kvplan.trace.readers import read_trace
from kvplan.trace.schema import Trace
from tests.conftest import shared_path

# Record column: ours, where they differ.
RENAMED = {
    "pc_queries": "cache_query_tokens",
    "pc_hits": "cache_hit_tokens",
    "pc_preempt_queries": "preempt_cache_query_tokens",
    "pc_preempt_hits": "preempt_cache_hit_tokens",
}


@dataclass(frozen=True)
class Record:
    name: str
    meta: dict[str, Any]
    steps: dict[str, list[Any]]

    @property
    def rules(self) -> Rules:
        s = self.meta["settings"]
        return Rules(
            num_blocks=s["num_gpu_blocks"],
            block_size=s["block_size"],
            max_num_seqs=s["max_num_seqs"],
            max_num_batched_tokens=s["max_num_batched_tokens"],
            max_model_len=s["max_model_len"],
            chunked_prefill=s["enable_chunked_prefill"],
            long_prefill_token_threshold=s["long_prefill_token_threshold"],
            lone_request_exempt=True,
            prefix_caching=s["enable_prefix_caching"],
            priority=s["policy"] == "priority",
            watermark_blocks=self.meta["watermark_blocks"],
            reserve_full_isl=s["scheduler_reserve_full_isl"],
            unhashed_to_front=True,
            shift_by_position=True,
            asynchronous=s["async_scheduling"],
            max_concurrency=0,
            record=True,
        )

    @property
    def groups(self) -> tuple[Group, ...]:
        """``arch`` is full, swa:WINDOW:GROUPS, chunk:SIZE:GROUPS, swaonly:WINDOW or mamba:GROUPS."""
        arch, *numbers = self.meta["settings"].get("arch", "full").split(":")
        if arch == "full":
            return FULL_ONLY
        kind = {"swa": "window", "swaonly": "window", "chunk": "chunk", "mamba": "state"}[arch]
        size, *count = (int(number) for number in (["0"] if arch == "mamba" else []) + numbers)
        return (Group(kind, size),) * (count or [1])[0] + (() if arch == "swaonly" else FULL_ONLY)


def record_names(*sets: str) -> list[str]:
    """Names of the records whose set letter is among ``sets``."""
    folder = shared_path("oracle", "records")
    names = (path.name.removesuffix(".meta.json") for path in folder.glob("*.meta.json"))
    return sorted(name for name in names if name[0] in sets)


def load(name: str) -> Record:
    folder = shared_path("oracle", "records")
    meta = json.loads((folder / f"{name}.meta.json").read_text())
    return Record(name, meta, pq.read_table(folder / f"{name}.steps.parquet").to_pydict())


def native_trace(source: Path, target: Path, block_size: int = 512) -> Path:
    """The record's trace in our own format: step = timestamp / 1000 (TRACE_FORMATS.md)."""
    keys = {key: key for key in ("id", "input_length", "output_length", "priority", "segments", "hash_ids")}
    keys |= {"output_seed": "output_stream", "cache_salt": "tenant"}
    with source.open() as lines, target.open("w") as out:
        for line in lines:
            row = json.loads(line)
            native = {ours: row[theirs] for theirs, ours in keys.items() if row.get(theirs) is not None}
            native["timestamp"] = 1000 * row["arrival_step"]
            if "hash_ids" in native:
                native["block_size"] = block_size
            out.write(json.dumps(native) + "\n")
    return target


def replay(record: Record, folder: Path) -> tuple[Trace, Run]:
    name = record.meta["trace"]
    size = record.meta["settings"].get("hash_id_block", 512)
    path = native_trace(shared_path("oracle", "traces", name), folder / name, size)
    trace = read_trace(str(path))
    dense = record.meta["settings"].get("prefix_cache_retention_interval", 0) is None
    run = simulate(trace, record.rules, steps_clock(), groups=record.groups, dense_retention=dense)
    return trace, run


def differences(record: Record, run: Run) -> list[str]:
    """The first difference in each column; empty when every step is the same."""
    ours = decision_columns(run)
    found = []
    steps = len(record.steps["step"])
    if len(run.decisions) != steps:
        found.append(f"{len(run.decisions)} steps, recorded {steps}")
    for column, theirs in record.steps.items():
        if column == "alloc_block_ids" and not record.meta["settings"]["record_blocks"]:
            continue
        mine = ours[RENAMED.get(column, column)]
        if isinstance(mine, tuple):
            offsets, values = mine
            values = values.tolist()
            rows: list[Any] = [values[a:b] for a, b in pairwise(offsets)]
        else:
            rows = mine.tolist()
        for k, (a, b) in enumerate(zip(rows, theirs, strict=False)):
            if isinstance(a, list):
                b = list(b or [])
            if a != b:
                found.append(f"step {record.steps['step'][k]}, {column}: {a}, recorded {b}")
                break
    return found
