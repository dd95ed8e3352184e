"""Blocks and tokens of public start-up logs, given the KV memory each of them printed.

Source: ../shared/evidence/kv_sizing.jsonl. A figure is right when it lies between what the printed GiB minus
and plus half of its last digit give.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvplan.errors import InputError
from kvplan.memory.kvlayout import KVLayout, kv_layout
from kvplan.spec.engine import resolve
from tests.memory.kv_rows import (
    DECIDING_STAGE_GIB,
    GIB,
    INFERRED_FLAGS,
    MISSES,
    UNRESOLVED,
    model_of,
    rows,
    settings_of,
    version_of,
)


def sized_rows() -> list[dict[str, Any]]:
    """vLLM rows that print both the KV memory and what came of it."""
    return [
        row
        for row in rows()
        if row["engine"] == "vllm"
        and row["available_kv_gib"] is not None
        and (row["kv_cache_tokens"] is not None or row["num_gpu_blocks"] is not None)
    ]


def layout_of(row: dict[str, Any], version: str) -> KVLayout:
    model = model_of(row)
    assert model is not None
    changes = {"engine_version": version, **INFERRED_FLAGS.get(row["id"], {})}
    if changes.get("max_num_seqs") is None and row["max_num_batched_tokens"]:
        changes.setdefault("max_num_seqs", min(row["max_num_seqs"] or 256, row["max_num_batched_tokens"]))
    return kv_layout(model, resolve(settings_of(row, model, **changes), model, None))


def is_right(row: dict[str, Any], layout: KVLayout) -> bool:
    printed = DECIDING_STAGE_GIB.get(row["id"], row["available_kv_gib"])
    low, high = (layout.num_blocks(round((printed + half) * GIB)) for half in (-0.005, 0.005))
    tokens = row["kv_cache_tokens"]
    blocks = row["num_gpu_blocks"]
    return (blocks is None or low <= blocks <= high) and (
        tokens is None or layout.cache_tokens(low) <= tokens <= layout.cache_tokens(high)
    )


def verdicts() -> tuple[dict[str, tuple[dict, bool, bool]], list[dict]]:
    """{id: (row, uniform, right)} and the rows without a model. A row without a version may follow either
    rule of the token line (the newest, or that of 0.19)."""
    found, lost = {}, []
    for row in sized_rows():
        if model_of(row) is None:
            lost.append(row)
            continue
        versions = [version_of(row)] if version_of(row) else ["0.32.0", "0.19"]
        layouts = [layout_of(row, version) for version in versions]
        right = any(is_right(row, layout) for layout in layouts)
        found[row["id"]] = (row, layouts[0].is_uniform, right)
    return found, lost


def test_blocks_and_tokens_of_public_logs():
    """Given the KV memory: uniform models at least 98 % right, hybrids with a stated version at least 90 %;
    every miss is listed with its reason."""
    found, lost = verdicts()
    wrong = {row_id for row_id, (_, _, right) in found.items() if not right}
    assert wrong == set(MISSES), (wrong - set(MISSES), set(MISSES) - wrong)
    high = [v for v in found.values() if v[0]["confidence"] == "high"]
    uniform = [right for _, is_uniform, right in high if is_uniform]
    hybrid = [right for row, is_uniform, right in high if not is_uniform and version_of(row)]
    assert sum(uniform) >= 0.98 * len(uniform), f"{sum(uniform)} of {len(uniform)} uniform"
    assert sum(hybrid) >= 0.90 * len(hybrid), f"{sum(hybrid)} of {len(hybrid)} hybrids"
    assert (len(uniform), len(hybrid)) == (39, 6)  # no row silently drops out
    assert {row["id"] for row in lost if row["confidence"] == "high"} == set(UNRESOLVED)


def test_another_dtype_would_be_noticed():
    """The check can fail: with fp8 KV none of the uniform bf16 rows is right."""
    bf16 = [
        row
        for row in sized_rows()
        if row["kv_cache_dtype"] == "auto" and row["confidence"] == "high" and model_of(row) is not None
    ]
    assert len(bf16) >= 30
    for row in bf16:
        model = model_of(row)
        assert model is not None
        layout = kv_layout(model, resolve(settings_of(row, model, kv_cache_dtype="fp8"), model, None))
        assert not is_right(row, layout), row["id"]


def test_concurrency_of_public_logs():
    """`max_concurrency` as printed (two decimals), from the number of blocks where the log has that."""
    checked = 0
    for row in sized_rows():
        if row["confidence"] != "high" or not row["max_concurrency"] or not row["num_gpu_blocks"]:
            continue
        if model_of(row) is None:
            continue
        layout = layout_of(row, version_of(row) or "0.32.0")
        predicted = layout.max_concurrency(row["num_gpu_blocks"], row["max_concurrency_tokens"])
        assert predicted == pytest.approx(row["max_concurrency"], abs=0.006), row["id"]
        checked += 1
    assert checked >= 30


@pytest.mark.parametrize(
    ("row_id", "version"),
    [
        ("recipes12-qwen3coder480b-090", "0.10"),
        ("recipes12-qwen3coder480b-095", "0.10"),
        ("idx-llama33-70b-fp8kv-h100-refused", "0.20"),
    ],
)
def test_refused_starts(row_id, version):
    """Needed GiB at the asked length, and the engine's own "estimated maximum model length"."""
    row = next(row for row in rows() if row["id"] == row_id)
    layout = layout_of(row, version)
    need = layout.startup_bytes(row["needed_seq_len"]) / GIB
    assert need == pytest.approx(row["needed_kv_gib"], abs=0.006)
    assert need > row["available_kv_gib"]
    if row["estimated_max_model_len"]:
        low, high = (
            layout.longest_request(round((row["available_kv_gib"] + half) * GIB)) for half in (-0.005, 0.005)
        )
        assert low <= row["estimated_max_model_len"] <= high


def test_refused_start_of_a_pipeline_charged_all_layers():
    """vllm#32105, PP 8: the check of early 2026 wanted all 92 layers in the poorest stage's memory.

    The row names no model; its note says the shape is GLM-4.6's, which is what this uses.
    """
    row = next(row for row in rows() if row["id"] == "vllm32105-pp8")
    row = {**row, "model": "zai-org/GLM-4.6", "tp": 1}
    layout = layout_of(row, "0.14")
    assert layout.startup_bytes(row["needed_seq_len"]) / GIB == pytest.approx(row["needed_kv_gib"], abs=0.006)
    low, high = (layout.longest_request(round((row["available_kv_gib"] + d) * GIB)) for d in (-0.005, 0.005))
    assert low <= row["estimated_max_model_len"] <= high
    later = layout_of(row, "0.19")
    assert later.startup_bytes(row["needed_seq_len"]) < layout.startup_bytes(row["needed_seq_len"]) / 7


def test_compressed_attention_is_refused_by_name():
    """A shape without a rule is named, not computed as another (vllm#44376: 6.66 GiB for 30k tokens)."""
    from kvplan.spec.catalogue import find_model

    with pytest.raises(InputError, match="compress"):
        find_model("deepseek-ai/DeepSeek-V4-Flash")
