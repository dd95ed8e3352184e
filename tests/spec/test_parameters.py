"""Claim: KV shape and parameter count of every catalogue row are those of the facts.

Source of the expected values: facts/models.json (published safetensors totals, KV elements, layer kinds).
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from kvplan.errors import InputError
from kvplan.spec.catalogue import ModelEntry, model_entries
from kvplan.spec.hf_config import model_from_config
from kvplan.spec.model import LayerKind
from tests.conftest import shared_path

FULL = (LayerKind.FULL, LayerKind.MLA)
WINDOWED = (LayerKind.SLIDING, LayerKind.CHUNKED)
REFUSED = {"deepseek-ai/DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4-Pro"}  # KV layout not in the facts
# layer_kinds of the facts count layers that reuse another layer's KV by their attention type; we count them
# apart. Nemotron-NAS: the facts leave out its 31 layers without attention.
KINDS_DIFFER = {
    "google/gemma-3n-E4B-it", "google/gemma-3n-E2B-it", "google/gemma-4-E4B-it", "google/gemma-4-E2B-it",
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1",
}  # fmt: skip


@cache
def facts() -> dict[str, dict[str, Any]]:
    rows = json.loads(shared_path("facts", "models.json").read_text())["models"]
    return {row["id"]: row for row in rows}


def entries() -> list[ModelEntry]:
    return [entry for entry in model_entries() if entry.id in facts()]


def test_every_row_of_the_facts_is_in_the_catalogue() -> None:
    assert len(facts()) == 161
    assert {entry.id for entry in entries()} == set(facts())


def test_refused_rows_name_the_reason() -> None:
    refused = {}
    for entry in model_entries():
        try:
            entry.spec()
        except InputError as error:
            refused[entry.id] = str(error)
    assert refused.keys() == REFUSED
    assert all("compress_ratios" in reason for reason in refused.values())


def test_kv_elements_of_every_row() -> None:
    checked = 0
    for entry in entries():
        row = facts()[entry.id]
        if entry.id in REFUSED:
            continue
        layers = entry.spec().layers
        full = sum(layer.kv_elements_per_token for layer in layers if layer.kind in FULL)
        windowed = sum(layer.kv_elements_per_token for layer in layers if layer.kind in WINDOWED)
        index = sum(layer.index_dim for layer in layers if layer.kind is LayerKind.MLA)
        assert full + windowed == (row["kv_elems_per_token"] or 0), entry.id
        assert full == (row["kv_elems_full"] or 0), entry.id
        assert windowed == (row["kv_elems_windowed"] or 0), entry.id
        if row.get("indexer_k_elems_per_token"):
            assert index == row["indexer_k_elems_per_token"], entry.id
        checked += 1
    assert checked == 159


def test_layer_kinds_and_windows_of_every_row() -> None:
    checked = 0
    for entry in entries():
        kinds = facts()[entry.id].get("layer_kinds")
        if entry.id in REFUSED or not kinds:
            continue
        layers = entry.spec().layers
        windows = {layer.window for layer in layers if layer.kind in WINDOWED}
        assert windows == ({kinds["window"]} if kinds["window"] else set()), entry.id
        if entry.id in KINDS_DIFFER:
            continue
        counted = [
            sum(layer.kind in group for layer in layers)
            for group in (FULL, WINDOWED, (LayerKind.STATE, LayerKind.NONE))
        ]
        assert counted == [kinds["full"], kinds["windowed"], kinds["linear_or_no_attention"]], entry.id
        checked += 1
    assert checked == 152


def error_of(entry: ModelEntry) -> float:
    """Counted against published: loaded parameters, MTP, and what the file holds beside them (buffers,
    second copies of tied embeddings, fp8 scales: `counted_extras` of the facts)."""
    parameters = entry.spec().parameters
    assert parameters is not None
    assert entry.published_parameters is not None
    counted = parameters.loaded + parameters.mtp + entry.extras_in_file
    return counted / entry.published_parameters - 1


def test_parameters_of_every_verified_row_are_within_one_per_cent() -> None:
    errors = {entry.id: error_of(entry) for entry in entries() if entry.grade and entry.id not in REFUSED}
    worst = max(errors, key=lambda name: abs(errors[name]))
    assert len(errors) == 156  # 158 verified rows less the two refused ones
    assert abs(errors[worst]) < 0.01, (worst, errors[worst])
    exact = sum(abs(error) < 1e-6 for error in errors.values())
    assert exact >= 125, exact


def test_rows_that_the_facts_cannot_verify_stay_marked() -> None:
    """Baichuan2: the published figure is an estimate, 35 % low; Kimi-K3: no formula for all of its parts."""
    unverified = {entry.id: error_of(entry) for entry in entries() if not entry.grade}
    assert unverified.keys() == {
        "baichuan-inc/Baichuan2-7B-Chat", "baichuan-inc/Baichuan2-13B-Chat", "moonshotai/Kimi-K3",
    }  # fmt: skip
    assert abs(unverified["moonshotai/Kimi-K3"]) < 0.002


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "meta-llama/Llama-3.1-8B",
            {"embedding": "embed", "lm_head": "lm_head", "attention": "attn", "mlp": "mlp"},
        ),
        ("Qwen/Qwen3.5-35B-A3B", {"attention": "attn", "state": "linear", "mtp": "mtp", "vision": "vision"}),
        ("nvidia/Nemotron-H-56B-Base-8K", {"state": "mamba", "attention": "attn", "mlp": "mlp"}),
        ("google/gemma-4-26B-A4B-it", {"attention": "attn", "embedding": "embed", "mlp": "mlp"}),
    ],
)
def test_classes_agree_with_the_breakdown(name: str, parts: dict[str, str]) -> None:
    entry = next(entry for entry in entries() if entry.id == name)
    parameters = entry.spec().parameters
    for ours, theirs in parts.items():
        assert getattr(parameters, ours) == facts()[name]["params_breakdown"][theirs], ours


# Classes without a catalogue row: shape of one model of each, and its published count (general knowledge of
# the safetensors total; the last three are known to three digits only).
OTHERS: list[tuple[str, dict[str, Any], float, float]] = [
    ("ExaoneForCausalLM", {"num_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
     "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 102400}, 7_818_448_896, 0),
    ("OlmoForCausalLM", {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192,
     "num_attention_heads": 16, "vocab_size": 50304, "tie_word_embeddings": True}, 1_176_764_416, 0),
    ("OlmoeForCausalLM", {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 1024,
     "num_attention_heads": 16, "vocab_size": 50304, "num_experts": 64, "num_experts_per_tok": 8},
     6_919_161_856, 0),
    ("Glm4ForCausalLM", {"num_hidden_layers": 40, "hidden_size": 4096, "intermediate_size": 13696,
     "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151552,
     "attention_bias": True}, 9_400_279_040, 0),
    ("StableLmForCausalLM", {"num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 5632,
     "num_attention_heads": 32, "vocab_size": 100352, "use_qkv_bias": True}, 1_644_515_328, 0),
    ("SeedOssForCausalLM", {"num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 27648,
     "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 155136,
     "attention_bias": True}, 36_151_104_512, 0),
    ("GraniteMoeForCausalLM", {"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 512,
     "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 49155, "num_local_experts": 32,
     "num_experts_per_tok": 8, "tie_word_embeddings": True}, 1_334_628_352, 0),
    ("NemotronForCausalLM", {"num_hidden_layers": 32, "hidden_size": 3072, "intermediate_size": 9216,
     "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 256000},
     4.19e9, 0.005),
    ("BambaForCausalLM", {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
     "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_indices": [9, 18, 27],
     "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "vocab_size": 128256}, 9.78e9, 0.005),
    ("Ernie4_5_MoeForCausalLM", {"num_hidden_layers": 28, "hidden_size": 2560, "intermediate_size": 12288,
     "num_attention_heads": 20, "num_key_value_heads": 4, "moe_intermediate_size": 1536,
     "moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
     "vocab_size": 103424}, 21.8e9, 0.005),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shape", "published", "within"), OTHERS)
def test_counts_of_classes_without_a_row(
    name: str, shape: dict[str, Any], published: float, within: float
) -> None:
    config = {"architectures": [name], "max_position_embeddings": 4096, **shape}
    parameters = model_from_config(config, name, name).parameters
    assert parameters is not None
    assert parameters.loaded == pytest.approx(published, rel=within, abs=0)


def test_a_class_that_nobody_counted_says_so() -> None:
    shape = OTHERS[0][1]
    spec = model_from_config({"architectures": ["ArceeForCausalLM"], **shape}, "x", "x")
    assert any("no published count" in note for note in spec.assumptions)


def test_an_unknown_wrapper_of_a_known_decoder_reads_its_text_part() -> None:
    """InternVL: llm_config with an architecture of its own; LLaVA-like: text_config with a model_type."""
    shape = {**OTHERS[3][1], "max_position_embeddings": 4096}
    for part, inner in (
        ("llm_config", {"architectures": ["Glm4ForCausalLM"]}),
        ("text_config", {"model_type": "glm4"}),
    ):
        config = {"architectures": ["SomeVLForConditionalGeneration"], part: {**shape, **inner}}
        spec = model_from_config(config, "x", "x")
        assert (spec.architecture, spec.num_layers) == ("Glm4ForCausalLM", 40)
