"""Traces that give lengths and times only: Azure, BurstGPT, Vidur and Sarathi, a bench's result."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from typing import Any

from kvplan.trace.columns import (
    MISSING,
    Columns,
    Phrase,
    Place,
    items,
    seconds,
    seconds_cell,
    whole,
    whole_cell,
)

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
VIDUR = ("num_prefill_tokens", "num_decode_tokens")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d):(\d\d(?:\.\d{1,9})?)(Z|[+-]\d\d:?\d\d)?")


def azure(columns: Columns) -> Any:
    """2023 (naive, seven digits), 2024 (six digits and an offset) and LMM (NumImages too); no content."""
    columns.dated = True
    minutes: dict[tuple[str, str, str | None], float] = {}
    base: list[datetime] = []

    def time_s(place: Place, cell: str | None) -> float:
        """Seconds from the first row's minute, so that all seven digits survive in a float."""
        if cell is None:
            raise place.error("TIMESTAMP", MISSING, "a time like 2023-11-16 18:15:46.6805900")
        match = _TIME.fullmatch(cell.strip())
        if match is None or float(match[3]) >= 60:
            raise place.error("TIMESTAMP", cell, "a time like 2023-11-16 18:15:46.6805900")
        key = (match[1], match[2], match[4])
        if key not in minutes:
            try:
                moment = datetime.fromisoformat(f"{match[1]}T{match[2]}{match[4] or '+00:00'}").astimezone(
                    UTC
                )
            except (ValueError, OverflowError):
                raise place.error("TIMESTAMP", cell, "a date and time that exist") from None
            base[:] = base or [moment]
            minutes[key] = (moment - base[0]).total_seconds()
        return minutes[key] + float(match[3])

    def add(place: Place, row: dict[str, str]) -> None:
        get = row.get
        columns.add(
            place.line,
            time_s(place, get("TIMESTAMP")),
            whole_cell(place, "ContextTokens", get("ContextTokens"), low=1),
            whole_cell(place, "GeneratedTokens", get("GeneratedTokens")),
        )

    return add


def burstgpt(columns: Columns) -> Any:
    """Version 1 and 2 (Session ID, Elapsed time). Failures are rows of zero tokens: kept and counted."""

    def add(place: Place, row: dict[str, str]) -> None:
        get = row.get
        prompt = whole_cell(place, "Request tokens", get("Request tokens"))
        answer = whole_cell(place, "Response tokens", get("Response tokens"))
        if prompt == 0:
            columns.count(
                "rows with a prompt of 0 tokens, failures in the recording: kept; an engine refuses them"
            )
        elif answer == 0:
            columns.count(
                "rows with an answer of 0 tokens though the prompt has some: failures in the recording"
            )
        columns.add(
            place.line,
            seconds_cell(place, "Timestamp", get("Timestamp"), 1.0),
            prompt,
            answer,
            session=get("Session ID") or None,
        )

    return add


def vidur(columns: Columns) -> Any:
    """Vidur and Sarathi: prefill and decode tokens, `arrived_at` in seconds or no time at all."""

    def add(place: Place, row: dict[str, str]) -> None:
        get = row.get
        columns.add(
            place.line,
            seconds_cell(place, "arrived_at", row["arrived_at"], 1.0) if "arrived_at" in row else math.nan,
            whole_cell(place, "num_prefill_tokens", get("num_prefill_tokens"), low=1),
            whole_cell(place, "num_decode_tokens", get("num_decode_tokens")),
        )

    return add


def bench_result(columns: Columns) -> Any:
    """`vllm bench serve --save-detailed` or SGLang's --output-details: one run, an array entry a request."""

    def add(place: Place, row: dict[str, Any]) -> None:
        if row.get("input_lens") is None or row.get("output_lens") is None:
            missing = "input_lens" if row.get("input_lens") is None else "output_lens"
            raise place.error(
                missing, MISSING, "there: run vllm bench with --save-detailed, SGLang with --output-details"
            )
        prompts, answers = (items(place, key, row[key]) for key in ("input_lens", "output_lens"))
        if len(prompts) != len(answers):
            raise place.error(
                "output_lens", Phrase(f"{len(answers):,} long"), f"as long as input_lens, {len(prompts):,}"
            )
        starts = row.get("start_times")
        if starts is not None and len(items(place, "start_times", starts)) != len(prompts):
            raise place.error(
                "start_times", Phrase(f"{len(starts):,} long"), f"as long as input_lens, {len(prompts):,}"
            )
        columns.dated = True  # a counter's seconds from an unknown zero
        for k in range(len(prompts)):
            prompt = whole(place, f"input_lens[{k}]", prompts[k])
            answer = whole(place, f"output_lens[{k}]", answers[k])
            if prompt == 0 or answer == 0:
                columns.count("requests of the bench failed (0 tokens): kept")
            arrival_s = math.nan if starts is None else seconds(place, f"start_times[{k}]", starts[k], 1.0)
            columns.add(place.line, arrival_s, prompt, answer)

    return add
