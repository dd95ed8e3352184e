"""The recorded RTX 4090 run of vLLM 0.19 against the simulator: whole distributions and curves.

300 requests at about 10 a second into 2,588 blocks of 16: the queue only grows while requests arrive, and the
pool is full. Every request's times are known on one clock, and running, waiting and KV use once a second.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvplan.sched.core import STEP_COLUMNS
from kvplan.sim.rules import rules_for
from kvplan.sim.run import Run, simulate
from kvplan.sim.steptime import Calibration, clock_for
from kvplan.spec.catalogue import find_gpu, find_model
from kvplan.spec.engine import EngineSettings, Resolved, resolve
from kvplan.trace.schema import NO_STREAM, Provenance, Trace

STEM = "llmservingsim_bench_RTX4090_Llama-3.1-8B"
NUM_BLOCKS, BLOCK_SIZE = 2588, 16


@dataclass(frozen=True)
class Recorded:
    """Requests in the order they were queued, seconds from the first; curves at whole seconds."""

    trace: Trace
    first_token_s: Any
    last_token_s: Any
    curve_s: Any
    running: Any
    waiting: Any
    kv_share: Any


def read_recorded(folder: Path) -> Recorded:
    """Read requests, content ids and the one-second curve of the run in ``folder``."""
    requests = _lines(folder / f"{STEM}_requests.jsonl")
    content = {row["request_id"]: row for row in _lines(folder / f"{STEM}_prefix_ids.jsonl")}
    requests.sort(key=lambda row: row["queued_ts"])
    start = requests[0]["queued_ts"]
    n = len(requests)
    stream: list[int] = []
    length: list[int] = []
    offsets = [0]
    for i, row in enumerate(requests):
        ids = content[row["request_id"]]["hash_ids"]
        stream += ids
        length += [BLOCK_SIZE] * len(ids)
        rest = row["input_toks"] - BLOCK_SIZE * len(ids)
        if rest > 0:  # the part block, shared with nobody
            stream.append(-1 - i)
            length.append(rest)
        offsets.append(len(stream))
    _, dense = np.unique(np.array(stream), return_inverse=True)

    def column(name: str) -> Any:
        return np.array([row[name] for row in requests])

    trace = Trace(
        request_id=[row["request_id"] for row in requests],
        arrival_s=column("queued_ts") - start,
        input_tokens=column("input_toks"),
        output_tokens=column("output_toks"),
        segment_offsets=np.array(offsets),
        segment_stream=dense.astype(np.int64),
        segment_start=np.zeros(len(stream), np.int64),
        segment_length=np.array(length, np.int64),
        output_stream=np.full(n, NO_STREAM, np.int64),
        tenant_id=np.zeros(n, np.int64),
        tenant_names=[""],
        priority=np.zeros(n, np.int64),
        samples=np.ones(n, np.int64),
        cancel_after_s=np.full(n, np.nan),
        deadline_s=np.full(n, np.nan),
        session_id=np.full(n, -1, np.int64),
        turn=np.zeros(n, np.int64),
        think_s=np.zeros(n),
        provenance=Provenance("recorded", STEM, "llmservingsim"),
    )
    with (folder / f"{STEM}_timeseries.csv").open(newline="") as file:
        curve = list(csv.DictReader(file))

    def over(name: str) -> Any:
        return np.array([float(row[name]) for row in curve])

    return Recorded(
        trace,
        column("first_token_ts") - start,
        column("last_token_ts") - start,
        curve_s=over("t"),
        running=over("running"),
        waiting=over("waiting"),
        kv_share=over("kv_cache_pct") / 100,
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line]


def engine() -> Resolved:
    """The run's engine: vLLM 0.19 with its defaults on an RTX 4090 (2,048 tokens a step, 256 requests)."""
    model, gpu = find_model("meta-llama/Llama-3.1-8B").spec, find_gpu("RTX 4090")
    settings = EngineSettings(
        engine_version="0.19.0", max_model_len=32768, num_gpu_blocks_override=NUM_BLOCKS
    )
    return resolve(settings, model, gpu)


def simulate_recorded(recorded: Recorded, calibration: Calibration | None = None) -> Run:
    """The same requests on the modelled clock (class constants: the RTX 4090 has no kernel tables)."""
    e = engine()
    settings = replace(
        e.settings, max_num_batched_tokens=e.max_num_batched_tokens, max_num_seqs=e.max_num_seqs
    )
    model, gpu = find_model("meta-llama/Llama-3.1-8B").spec, find_gpu("RTX 4090")
    clock = clock_for(model, gpu, settings, calibration)
    return simulate(recorded.trace, rules_for(e, NUM_BLOCKS, BLOCK_SIZE), clock)


def compare(recorded: Recorded, run: Run, first: int = 0) -> dict[str, float]:
    """Signed relative errors of the figures, and mean differences of the curves.

    ``first``: leave out so many requests of the start (those a calibration saw). Engine-side time stamps, so
    the client's tokenising is not added. The very first request is left out always: a cold start.
    """
    keep = slice(max(1, first), None)
    arrival, tokens = recorded.trace.arrival_s, recorded.trace.output_tokens
    r = run.requests

    def figures(first_token_s: Any, last_token_s: Any) -> dict[str, float]:
        ttft = (first_token_s - arrival)[keep]
        tpot = ((last_token_s - first_token_s) / np.maximum(tokens - 1, 1))[keep]
        percentiles = {
            f"{name} p{q}": float(np.percentile(values, q))
            for name, values in (("TTFT", ttft), ("TPOT", tpot))
            for q in (50, 99)
        }
        makespan = float(last_token_s.max())
        return {"throughput": float(tokens.sum()) / makespan, "makespan": makespan, **percentiles}

    simulated, measured = (
        figures(r.first_token_s, r.finish_s),
        figures(recorded.first_token_s, recorded.last_token_s),
    )
    errors = {name: simulated[name] / measured[name] - 1.0 for name in measured}
    end = run.rows[:, STEP_COLUMNS.index("end_s")]
    at = np.minimum(np.searchsorted(end, recorded.curve_s), len(end) - 1)
    columns = {name: run.rows[at, STEP_COLUMNS.index(name)] for name in ("running", "waiting", "used_blocks")}
    errors["running, mean abs"] = float(np.abs(columns["running"] - recorded.running).mean())
    errors["waiting, mean abs"] = float(np.abs(columns["waiting"] - recorded.waiting).mean())
    share = columns["used_blocks"] / (NUM_BLOCKS - 1)
    errors["KV use, mean abs"] = float(np.abs(share - recorded.kv_share).mean())
    return errors
