"""Measured serving runs as calibration input: a `vllm bench serve` result, or our own results folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvplan.errors import InputError
from kvplan.sim.calibrate import Measured
from kvplan.trace.generate import random_trace, with_arrivals
from kvplan.trace.schema import Provenance, Trace


def read_measured(path: Path) -> Measured:
    """A `vllm bench serve --save-result --save-detailed` JSON, or ``requests.parquet`` (or its folder).

    Raises `InputError` naming the field that is missing.
    """
    if path.is_dir():
        path = path / "requests.parquet"
    if not path.exists():
        raise InputError(f"{path} does not exist.")
    return _from_parquet(path) if path.suffix == ".parquet" else _from_json(path)


def _from_json(path: Path) -> Measured:
    try:
        data = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}.") from None
    if not isinstance(data, dict):
        raise InputError(f"{path} must hold one JSON object, as `vllm bench serve --save-result` writes.")
    for name in ("input_lens", "output_lens", "ttfts"):
        if not isinstance(data.get(name), list) or not data[name]:
            raise InputError(
                f"{path}: '{name}' is missing.\n  Run vllm bench serve with --save-result --save-detailed."
            )
    inputs, outputs = np.array(data["input_lens"]), np.array(data["output_lens"])
    ttft = np.array(data["ttfts"], float)
    if not len(inputs) == len(outputs) == len(ttft):
        raise InputError(f"{path}: input_lens, output_lens and ttfts differ in length.")
    decode_s = (
        np.array([sum(gaps) for gaps in data["itls"]]) if data.get("itls") else np.full(len(ttft), np.nan)
    )
    good = (outputs > 0) & (ttft > 0)
    tpot = np.where(good & (outputs > 1), decode_s / np.maximum(outputs - 1, 1), np.nan)
    trace = random_trace(len(inputs), 1, 1, seed=0)
    starts = data.get("start_times")
    concurrency = int(data.get("max_concurrency") or 0)
    if starts:
        times = np.array(starts, float)
        trace = replace(trace, arrival_s=times - times.min())
        concurrency = 0  # the client's own pacing is in the times
    else:
        rate = float(data.get("request_rate") or "inf")
        trace = with_arrivals(trace, rate, float(data.get("burstiness") or 1.0), 0)
    return Measured(
        _sorted(trace, inputs, np.maximum(outputs, 1), path),
        *_by_arrival(trace, np.where(good, ttft, np.nan), tpot),
        max_concurrency=concurrency,
        source=str(path),
    )


def _from_parquet(path: Path) -> Measured:
    import pyarrow.parquet as pq

    columns = pq.read_table(path).to_pydict()
    need = ("arrival_s", "input_tokens", "output_tokens", "ttft_s", "tpot_s")
    missing = [name for name in need if name not in columns]
    if missing:
        raise InputError(f"{path}: column '{missing[0]}' is missing; use the requests.parquet of a run.")
    arrival, inputs, outputs, ttft, tpot = (
        np.array([np.nan if v is None else v for v in columns[name]], float) for name in need
    )
    trace = replace(random_trace(len(inputs), 1, 1, seed=0), arrival_s=arrival - np.nanmin(arrival))
    whole = _sorted(trace, inputs.astype(np.int64), np.maximum(outputs, 1).astype(np.int64), path)
    return Measured(whole, *_by_arrival(trace, ttft, tpot), source=str(path))


def _sorted(trace: Trace, inputs: Any, outputs: Any, path: Path) -> Trace:
    order = np.argsort(trace.arrival_s, kind="stable")
    return replace(
        trace,
        arrival_s=trace.arrival_s[order],
        input_tokens=inputs[order].astype(np.int64),
        output_tokens=outputs[order].astype(np.int64),
        provenance=Provenance("recorded", str(path), "bench result"),
    )


def _by_arrival(trace: Trace, ttft: Any, tpot: Any) -> tuple[Any, Any]:
    order = np.argsort(trace.arrival_s, kind="stable")
    return ttft[order], tpot[order]
