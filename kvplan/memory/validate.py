"""Our error against public start-up logs: the layout right or wrong, the pool near or far.

The rows are shipped (`data/start_up_logs.json`): what was configured, what the engine printed, where it was
published. Nothing here looks a row's answer up: each row is estimated as a user's command would be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvplan.errors import InputError
from kvplan.memory.budget import stage_budget
from kvplan.memory.capacity import weights_term
from kvplan.memory.kvlayout import KVLayout, kv_layout
from kvplan.spec.catalogue import find_gpu, find_model
from kvplan.spec.engine import ENGINES, NEWEST_VLLM, EngineSettings, parse_version, resolve
from kvplan.spec.gpu import GIB
from kvplan.spec.model import ModelSpec

ROUNDING_GIB = 0.005  # logs print GiB with two decimals
# What a token line means changed in 0.21: a log without a version may follow either rule.
UNSTATED_VERSIONS = (NEWEST_VLLM, "0.19")
NOT_STATED = "not stated"
KINDS = ("GQA and MHA", "MoE", "sliding and chunked", "Mamba and linear", "MLA", "compressed hybrid")
GROUPINGS = ("kind", "engine_version", "gpu")


@dataclass(frozen=True)
class LogRow:
    """One start-up: the question as a command would put it, and the figures printed."""

    id: str
    kind: str
    engine: str
    engine_version: str | None
    model: str | None
    gpu: str | None
    total_gib: float | None
    flags: Mapping[str, Any]
    inferred: Sequence[str]
    all_flags_stated: bool
    printed: Mapping[str, float]
    source: str
    not_covered: str = ""
    remark: str = ""
    ssm_bytes_per_element: int = 0

    @property
    def version_label(self) -> str:
        """'vLLM 0.19'; 'vLLM, not stated'."""
        label = ENGINES[self.engine].label if self.engine in ENGINES else self.engine
        if self.engine != "vllm":
            return label
        said = self.flags.get("engine_version")
        return (
            f"{label} {said}" if said and "engine_version" not in self.inferred else f"{label}, {NOT_STATED}"
        )


@dataclass(frozen=True)
class Outcome:
    """``right`` is None where the row is not covered; ``predicted`` has the figures beside ``printed``.

    ``pool_error_percent`` is (predicted - printed) KV memory in % of utilisation x total; None where the log
    does not state version, utilisation and card.
    """

    row: LogRow
    right: bool | None
    predicted: Mapping[str, float]
    pool_error_percent: float | None


@dataclass(frozen=True)
class Group:
    """Rows of one kind, version or card. Errors are of the KV pool, in % of the budget."""

    name: str
    rows: int
    right: int
    not_covered: int
    pool_rows: int
    median_percent: float | None
    p90_percent: float | None
    worst_percent: float | None
    bias_percent: float | None


def log_rows() -> list[LogRow]:
    """The shipped rows, in the file's order."""
    path = Path(__file__).parent / "data" / "start_up_logs.json"
    return [LogRow(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def check(row: LogRow) -> Outcome:
    """Estimate one row and compare."""
    if row.not_covered or row.model is None:
        return Outcome(row, None, {}, _pool_error(row))
    right, predicted = False, dict[str, float]()
    for version in _versions(row):
        layout = _layout(row, version)
        found, figures = (
            _refused_start(row, layout) if "needed_kv_gib" in row.printed else _sized(row, layout)
        )
        predicted = predicted or figures
        if found:
            right, predicted = True, figures
            break
    return Outcome(row, right, predicted, _pool_error(row))


def summarise(outcomes: Sequence[Outcome], by: str = "kind") -> list[Group]:
    """One `Group` a value of ``by`` (kind, engine_version or gpu)."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(_key(outcome.row, by), []).append(outcome)
    order = {kind: i for i, kind in enumerate(KINDS)}
    names = sorted(
        groups, key=lambda name: (NOT_STATED in name, order.get(name, 0), -len(groups[name]), name)
    )
    if by == "engine_version":
        names = sorted(groups, key=_version_order)
    return [_group(name, groups[name]) for name in names]


def pool_errors(outcomes: Sequence[Outcome], all_flags: bool = False) -> list[float]:
    """Absolute pool errors in %, ascending; ``all_flags``: only rows that state every flag that matters."""
    return sorted(
        abs(o.pool_error_percent)
        for o in outcomes
        if o.pool_error_percent is not None and (o.row.all_flags_stated or not all_flags)
    )


def quantile(ascending: Sequence[float], share: float) -> float | None:
    """The value below which ``share`` of a sorted list lies; the middle pair's mean for the median."""
    if not ascending:
        return None
    if share == 0.5 and len(ascending) % 2 == 0:
        middle = len(ascending) // 2
        return (ascending[middle - 1] + ascending[middle]) / 2
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]


def _group(name: str, outcomes: Sequence[Outcome]) -> Group:
    covered = [o for o in outcomes if o.right is not None]
    signed = [o.pool_error_percent for o in outcomes if o.pool_error_percent is not None]
    errors = pool_errors(outcomes)
    return Group(
        name,
        rows=len(covered),
        right=sum(bool(o.right) for o in covered),
        not_covered=len(outcomes) - len(covered),
        pool_rows=len(errors),
        median_percent=quantile(errors, 0.5),
        p90_percent=quantile(errors, 0.9),
        worst_percent=errors[-1] if errors else None,
        bias_percent=sum(signed) / len(signed) if signed else None,
    )


def _key(row: LogRow, by: str) -> str:
    if by == "engine_version":
        return row.version_label
    return (row.gpu or NOT_STATED) if by == "gpu" else row.kind


def _version_order(label: str) -> tuple[int, tuple[int, int], str]:
    stated = label.startswith("vLLM ")
    return (0 if stated else 1, parse_version(label[5:]) if stated else (0, 0), label)


def _versions(row: LogRow) -> tuple[str, ...]:
    if row.engine != "vllm":
        return ("unspecified",)
    said = row.flags.get("engine_version")
    return (said,) if said else UNSTATED_VERSIONS


def _model(row: LogRow) -> ModelSpec:
    assert row.model is not None
    model = find_model(row.model).spec
    size = row.ssm_bytes_per_element
    if not size:
        return model
    layers = tuple(
        replace(x, state=replace(x.state, ssm_bytes_per_element=size)) if x.state else x for x in model.layers
    )
    return replace(model, layers=layers)


def _settings(row: LogRow, version: str) -> EngineSettings:
    return EngineSettings(**{**row.flags, "engine": row.engine, "engine_version": version})


def _layout(row: LogRow, version: str) -> KVLayout:
    settings = _settings(row, version)
    batched = settings.max_num_batched_tokens
    if batched and settings.max_num_seqs is None:  # no card is named here: its smallest class
        settings = replace(settings, max_num_seqs=min(256, batched))
    model = _model(row)
    return kv_layout(model, resolve(settings, model, None))


def _sized(row: LogRow, layout: KVLayout) -> tuple[bool, dict[str, float]]:
    """Blocks and tokens of the printed pool: right within the rounding of its last digit."""
    printed = row.printed.get("deciding_stage_kv_gib", row.printed["available_kv_gib"])
    low, middle, high = (
        layout.num_blocks(round((printed + half) * GIB)) for half in (-ROUNDING_GIB, 0.0, ROUNDING_GIB)
    )
    blocks, tokens = row.printed.get("num_gpu_blocks"), row.printed.get("kv_cache_tokens")
    right = (blocks is None or low <= blocks <= high) and (
        tokens is None or layout.cache_tokens(low) <= tokens <= layout.cache_tokens(high)
    )
    return right, {"num_gpu_blocks": middle, "kv_cache_tokens": layout.cache_tokens(middle)}


def _refused_start(row: LogRow, layout: KVLayout) -> tuple[bool, dict[str, float]]:
    """The GiB that one request was said to need, and the engine's own estimate of the longest."""
    need = layout.startup_bytes(int(row.printed["needed_seq_len"])) / GIB
    available, longest = row.printed["available_kv_gib"], row.printed.get("estimated_max_model_len")
    low, middle, high = (
        layout.longest_request(round((available + half) * GIB)) for half in (-ROUNDING_GIB, 0.0, ROUNDING_GIB)
    )
    right = abs(need - row.printed["needed_kv_gib"]) <= 0.006 and (longest is None or low <= longest <= high)
    return right, {"needed_kv_gib": round(need, 2), "estimated_max_model_len": middle}


def _pool_error(row: LogRow) -> float | None:
    """Predicted less printed KV memory of the first stage, in % of the budget."""
    printed = row.printed.get("available_kv_gib")
    version = row.flags.get("engine_version")
    if printed is None or version is None or "engine_version" in row.inferred or row.engine != "vllm":
        return None
    if row.model is None or row.gpu is None or row.flags.get("gpu_memory_utilization") is None:
        return None
    try:
        gpu, model = find_gpu(row.gpu), _model(row)
    except InputError:
        return None
    if row.total_gib:
        gpu = replace(gpu, total_bytes=round(row.total_gib * GIB))
    settings = _settings(row, version)
    engine = resolve(settings, model, gpu)
    budget = stage_budget(model, gpu, engine, weights_term(model, settings, 0), 0)
    return 100 * (budget.available_kv_bytes / GIB - printed) / (budget.budget_bytes / GIB)
