"""Claim: a config that cannot be used gives one line that names file, architecture and field."""

from __future__ import annotations

import copy
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplan.errors import InputError
from kvplan.spec.catalogue import model_entries
from kvplan.spec.hf_config import model_from_config, read_config
from kvplan.spec.model import ModelSpec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 8192,
}  # fmt: skip


def refusal(config: Any) -> str:
    with pytest.raises(InputError) as caught:
        model_from_config(config, "x", "here/config.json")
    first = str(caught.value).splitlines()[0]
    assert first.startswith("here/config.json"), first
    assert len(first) < 400
    return first


# Field, its bad value, what the message must name.
BAD: list[tuple[str, Any, str]] = [
    ("num_hidden_layers", None, "num_hidden_layers (or n_layer"),
    ("num_hidden_layers", 0, "num_hidden_layers is 0; must be a whole number >= 1"),
    ("num_hidden_layers", -3, "num_hidden_layers is -3"),
    ("num_hidden_layers", "32", "num_hidden_layers is '32'"),
    ("num_hidden_layers", 2.5, "num_hidden_layers is 2.5"),
    ("num_hidden_layers", math.nan, "num_hidden_layers is nan"),
    ("num_hidden_layers", math.inf, "num_hidden_layers is inf"),
    ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000; must be at most 10,000"),
    ("num_hidden_layers", [32], "num_hidden_layers is list"),
    ("num_hidden_layers", True, "num_hidden_layers is True"),
    ("hidden_size", None, "hidden_size"),
    ("hidden_size", 10**12, "must be at most"),
    ("hidden_size", 1e300, "hidden_size"),
    ("hidden_size", 4095, "hidden_size 4095 is no multiple of 32 heads"),
    ("num_attention_heads", None, "num_attention_heads"),
    ("num_attention_heads", {}, "num_attention_heads is dict"),
    ("num_key_value_heads", 0, "num_key_value_heads is 0"),
    ("num_key_value_heads", 64, "32 attention heads do not divide into 64 KV heads"),
    ("num_key_value_heads", 5, "do not divide into 5 KV heads"),
    ("head_dim", -128, "head_dim is -128"),
    ("head_dim", "big", "head_dim is 'big'"),
    ("vocab_size", None, "vocab_size"),
    ("vocab_size", math.nan, "vocab_size is nan"),
    ("intermediate_size", -1, "intermediate_size is -1"),
    ("max_position_embeddings", -1, "max_position_embeddings is -1"),
    ("tie_word_embeddings", "yes", "tie_word_embeddings is 'yes'; must be true or false"),
    ("layer_types", ["full_attention"], "layer_types has 1 entries; must have one per layer, 32"),
    ("layer_types", ["odd"] * 32, "layer_types names 'odd'"),
    ("layer_types", "full_attention", "layer_types is 'full_attention'; must be a list"),
    ("dtype", 16, "dtype is 16"),
    ("num_experts", -8, "num_experts is -8"),
    ("rope_scaling", "none", "rope_scaling is 'none'; must be an object"),
    ("quantization_config", "fp8", "quantization_config must be an object"),
    ("quantization_config", {"quant_method": "magic"}, "quant_method is 'magic'"),
    ("quantization_config", {"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
    ("quantization_config", {"quant_method": "compressed-tensors"}, "config_groups"),
    ("quantization_config", {"quant_method": "modelopt", "quant_algo": "FP3"}, "quant_algo is 'FP3'"),
    ("architectures", ["NewNetForCausalLM"], "NewNetForCausalLM: the architecture is not known here"),
    ("architectures", "LlamaForCausalLM", "architectures must be a list"),
    ("architectures", [], "architectures must be a list"),
    ("architectures", [7], "architectures must be a list"),
    ("architectures", ["MllamaForConditionalGeneration"], "cross-attention"),
]


@pytest.mark.parametrize(("field", "value", "names"), BAD)
def test_bad_field_is_named(field: str, value: Any, names: str) -> None:
    first = refusal({**LLAMA, field: value})
    assert names in first
    assert "LlamaForCausalLM" in first or field in ("architectures", "quantization_config")


@pytest.mark.parametrize("config", [None, [], "x", 3, {}, {"text_config": []}, {"text_config": {}}])
def test_not_a_model_config(config: Any) -> None:
    refusal(config)


def deci_blocks(group: Any, factor: Any) -> dict[str, Any]:
    return {"block_configs": [{"attention": {"n_heads_in_group": group}, "ffn": {"ffn_mult": factor}}] * 80}


DECI = "nvidia/Llama-3_3-Nemotron-Super-49B-v1"
# What each family cannot do without: taking it away must be refused, never filled by the dense formula.
NEEDED: list[tuple[str, str]] = [
    ("deepseek-ai/DeepSeek-V3", "kv_lora_rank"),
    ("deepseek-ai/DeepSeek-V3", "qk_nope_head_dim"),
    ("deepseek-ai/DeepSeek-V3", "v_head_dim"),
    ("deepseek-ai/DeepSeek-V3.2", "index_n_heads"),
    ("openai/gpt-oss-20b", "layer_types"),
    ("google/gemma-4-31B-it", "layer_types"),
    ("nvidia/Nemotron-H-8B-Base-8K", "hybrid_override_pattern"),
    ("nvidia/Nemotron-H-8B-Base-8K", "ssm_state_size"),
    ("nvidia/Llama-3_3-Nemotron-Super-49B-v1", "block_configs"),
    ("ibm-granite/granite-4.0-h-small", "layer_types"),
    ("ibm-granite/granite-4.0-h-small", "mamba_n_heads"),
    ("MiniMaxAI/MiniMax-M1-80k", "attn_type_list"),
    ("XiaomiMiMo/MiMo-V2-Flash", "hybrid_layer_pattern"),
    ("XiaomiMiMo/MiMo-V2-Flash", "swa_num_key_value_heads"),
    ("moonshotai/Kimi-K3", "linear_attn_config"),
    ("state-spaces/mamba-2.8b-hf", "state_size"),
    ("mistralai/Mixtral-8x7B-v0.1", "num_experts_per_tok"),
    ("Qwen/Qwen3-30B-A3B", "hidden_size"),
]


@pytest.mark.parametrize(("model", "field"), NEEDED)
def test_missing_field_is_refused_by_name(model: str, field: str) -> None:
    config = copy.deepcopy(next(entry for entry in model_entries() if entry.id == model).config)
    del config[field]
    first = refusal(config)
    assert field in first or field == "mamba_n_heads"
    assert config["architectures"][0] in first


@pytest.mark.parametrize(
    ("model", "change", "names"),
    [
        ("nvidia/Nemotron-H-8B-Base-8K", {"hybrid_override_pattern": "M-X*"}, "'X'"),
        ("nvidia/Nemotron-H-8B-Base-8K", {"hybrid_override_pattern": "M-M*"}, "has 4 blocks"),
        (DECI, {"block_configs": [{}] * 80}, "block_configs[0].attention"),
        (DECI, deci_blocks(7, 1), "n_heads_in_group is 7"),
        (DECI, deci_blocks(8, "x"), "ffn_mult is 'x'"),
        ("google/gemma-4-E2B-it", {"num_kv_shared_layers": 99}, "num_kv_shared_layers is 99 of 35"),
        ("moonshotai/Kimi-K3", {"linear_attn_config": {"full_attn_layers": [1]}}, "linear_attn_config needs"),
        ("MiniMaxAI/MiniMax-M3", {"sparse_attention_config": {"sparse_attention_freq": [1]}}, "does not fit"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", {"attention_chunk_size": "8k"}, "attention_chunk_size"),
    ],
)  # fmt: skip
def test_patterns_that_do_not_fit(model: str, change: dict[str, Any], names: str) -> None:
    config = next(entry for entry in model_entries() if entry.id == model).config
    assert names in refusal({**config, **change})


# ---- files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (b"", "config.json:1: not JSON"),
        (b'{"architectures": ["LlamaForCausalLM"], "hidden', "config.json:1: not JSON"),
        (b"{\n\n  oops\n}", "config.json:3: not JSON"),
        (b"[1, 2]", "must be a JSON object, is a list"),
        (b'"text"', "must be a JSON object, is a str"),
        (b"\xff\xfe\x00", "cannot be read as JSON"),
        (b"[" * 200_000, "JSON"),
        (b'{"a": ' * 50_000 + b"1" + b"}" * 50_000, "JSON"),
        (b"1" * 10_000, "JSON"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, content: bytes, names: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"config\.json") as caught:
        read_config(file)
    assert names in str(caught.value)


def test_huge_files_are_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as stream:
        stream.truncate(1 << 34)  # sparse: 16 GiB that nobody may read
    start = time.perf_counter()
    with pytest.raises(InputError, match="larger than 16 MiB"):
        read_config(file)
    assert time.perf_counter() - start < 1


def test_folders_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json in it"):
        read_config(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        read_config(tmp_path / "gone.json")


def test_infinity_reads(tmp_path: Path) -> None:
    """Nemotron-H writes time_step_limit: [0.0, Infinity]."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "time_step_limit": [0.0, math.inf]}))
    assert model_from_config(read_config(file), "x", "x").num_layers == 32


# ---- anything at all --------------------------------------------------------------------------------

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 300), st.just(10**30), st.floats(), st.text(max_size=5),
    st.lists(st.integers(0, 2), max_size=4), st.just({}), st.just({"factor": 2}), st.just([{}] * 32),
)  # fmt: skip
ENTRIES = {entry.config["architectures"][0]: entry.config for entry in model_entries()}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_change_of_any_config_reads_or_is_an_input_error(data: st.DataObject) -> None:
    config = dict(ENTRIES[data.draw(st.sampled_from(sorted(ENTRIES)))])
    for field in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        config[field] = data.draw(VALUES)
    try:
        spec = model_from_config(config, "x", "x")
    except InputError:
        return
    assert isinstance(spec, ModelSpec)
    assert spec.kv_elements_per_token >= 0
    assert spec.parameters is not None
    assert spec.parameters.loaded > 0
