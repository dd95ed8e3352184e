"""Claim: every published config of the facts folder is read right, or refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvplan.errors import InputError
from kvplan.spec.hf_config import kinds, model_from_config, read_config
from tests.conftest import shared_path

# File: layers by kind and KV elements of one token, worked out by hand from the fields of that file
# (layers x KV heads x (head_dim of K + of V); MLA: layers x (latent + rope)), and parameters in 1e9 where
# the model's published size is well known (None: not checked here, the catalogue rows are in
# test_parameters.py).
READ: dict[str, tuple[dict[str, int], int, float | None]] = {
    "MiniMaxAI--MiniMax-M3.json": ({"full": 60}, 60 * 4 * 256, 426),
    "Qwen--Qwen3-32B-FP8-Static-PerTensor.json": ({"full": 64}, 64 * 8 * 256, 32.76),
    "Qwen--Qwen3-32B-FP8.json": ({"full": 64}, 64 * 8 * 256, 32.76),
    "Qwen--Qwen3-VL-8B-Instruct.json": ({"full": 36}, 36 * 8 * 256, 8.77),
    "Qwen--Qwen3.5-35B-A3B.json": ({"full": 10, "state": 30}, 10 * 2 * 512, 35.1),
    "XiaomiMiMo--MiMo-V2-Flash.json": (
        {"full": 9, "sliding": 39}, 9 * 4 * (192 + 128) + 39 * 8 * (192 + 128), 309,
    ),
    "deepseek-ai--DeepSeek-V3.2.json": ({"mla": 61}, 61 * (512 + 64), 671.9),
    "deepseek-ai--DeepSeek-V3.json": ({"mla": 61}, 61 * (512 + 64), 671),
    "facebook--bart-large-cnn.json": ({"full": 12}, 12 * 16 * 128, 0.406),
    "google--gemma-4-26B-A4B.json": ({"full": 5, "sliding": 25}, 5 * 2 * 1024 + 25 * 8 * 512, 25.8),
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct.json": (
        {"full": 12, "chunked": 36}, 48 * 8 * 256, 400.7,
    ),
    "meta-llama--Llama-4-Scout-17B-16E-Instruct.json": ({"full": 12, "chunked": 36}, 48 * 8 * 256, 107.8),
    "meta-llama--Meta-Llama-3.1-8B.json": ({"full": 32}, 32 * 8 * 256, 8.03),
    "mistralai--Mixtral-8x7B-v0.1.json": ({"full": 32}, 32 * 8 * 256, 46.7),
    "mlc-preset--aya-23.json": ({"full": 32}, 32 * 8 * 256, 8.03),
    "mlc-preset--baichuan.json": ({"full": 32}, 32 * 32 * 256, 7.51),
    "mlc-preset--chatglm.json": ({"full": 28}, 28 * 2 * 256, 6.24),
    "mlc-preset--deepseek_v2_lite.json": ({"mla": 27}, 27 * (512 + 64), 15.7),
    "mlc-preset--gemma2_9b.json": ({"full": 21, "sliding": 21}, 42 * 8 * 512, 9.24),
    "mlc-preset--gemma3_1b_it.json": ({"full": 4, "sliding": 22}, 26 * 1 * 512, 1.0),
    "mlc-preset--gpt2.json": ({"full": 12}, 12 * 12 * 128, 0.124),
    "mlc-preset--gpt_bigcode.json": ({"full": 24}, 24 * 1 * 256, 1.12),
    "mlc-preset--gpt_j.json": ({"full": 28}, 28 * 16 * 512, 6.05),
    "mlc-preset--internlm2_5_7b.json": ({"full": 32}, 32 * 8 * 256, 7.74),
    "mlc-preset--llama2_7b.json": ({"full": 32}, 32 * 32 * 256, 6.74),
    "mlc-preset--llava.json": ({"full": 32}, 32 * 32 * 256, 7.06),
    "mlc-preset--ministral3_3b_2512.json": ({"full": 26}, 26 * 8 * 256, 3.85),
    "mlc-preset--mistral_7b.json": ({"sliding": 32}, 32 * 8 * 256, 7.24),
    "mlc-preset--olmo2_32b.json": ({"full": 64}, 64 * 8 * 256, 32.2),
    "mlc-preset--phi-2.json": ({"full": 32}, 32 * 32 * 160, 2.78),
    "mlc-preset--phi-3_5.json": ({"full": 32}, 32 * 32 * 192, 3.82),
    "mlc-preset--qwen.json": ({"full": 24}, 24 * 16 * 256, 1.84),
    "mlc-preset--starcoder2.json": ({"sliding": 32}, 32 * 4 * 256, 7.17),
    "mlc-preset--tinyllama_1b_chat_v1.0.json": ({"full": 22}, 22 * 4 * 128, 1.1),
    "moonshotai--Kimi-K2.5.json": ({"mla": 61}, 61 * (512 + 64), 1026.9),
    "moonshotai--Kimi-K3.json": ({"mla": 24, "state": 69}, 24 * (512 + 64), 2780),
    "nvidia--Llama-3.1-70B-Instruct-FP8.json": ({"full": 80}, 80 * 8 * 256, 70.6),
    "nvidia--Llama-3_3-Nemotron-Super-49B-v1.json": ({"full": 49, "none": 31}, 49 * 8 * 256, 49.9),
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16.json": (
        {"full": 12, "state": 48, "none": 48}, 12 * 2 * 256, 549.3,
    ),
    "nvidia--Nemotron-H-56B-Base-8K.json": ({"full": 10, "state": 54, "none": 54}, 10 * 8 * 256, 56.3),
    "nvidia--Qwen3.5-122B-A10B-NVFP4.json": ({"full": 12, "state": 36}, 12 * 2 * 512, 122.6),
    "openai--gpt-oss-120b.json": ({"full": 18, "sliding": 18}, 36 * 8 * 128, 116.8),
    "openai--whisper-tiny.json": ({"full": 4}, 4 * 6 * 128, 0.0378),
    "stepfun-ai--Step-3.7-Flash.json": ({"full": 12, "sliding": 33}, 45 * 8 * 256, 196),
    "zai-org--GLM-4.5V.json": ({"full": 46}, 46 * 8 * 256, 107.7),
    "zai-org--GLM-5.2.json": ({"mla": 78}, 78 * (512 + 64), 743.4),
    "constructed/bloom.json": ({"full": 70}, 70 * 112 * 256, 176.2),
    "constructed/dbrx.json": ({"full": 40}, 40 * 8 * 256, 131.6),
    "constructed/falcon-40b.json": ({"full": 60}, 60 * 8 * 128, 41.3),
    "constructed/falcon-7b.json": ({"full": 32}, 32 * 1 * 128, 6.92),
    "constructed/gemma3-27b-nested-missing-keys.json": (
        {"full": 10, "sliding": 52}, 62 * 16 * 256, 27.4,
    ),
    "constructed/granite4-h-small.json": ({"full": 4, "state": 36}, 4 * 8 * 256, 32.2),
    "constructed/jamba-v0.1.json": ({"full": 4, "state": 28}, 4 * 8 * 256, 51.6),
    "constructed/llama-awq.json": ({"full": 32}, 32 * 8 * 256, 8.03),
    "constructed/llama-bnb-nf4.json": ({"full": 32}, 32 * 8 * 256, 8.03),
    "constructed/llama-gptq.json": ({"full": 32}, 32 * 8 * 256, 8.03),
    "constructed/llama-null-head_dim-and-sliding.json": ({"full": 32}, 32 * 32 * 256, 8.84),
    "constructed/mamba-2.8b-hf.json": ({"state": 64}, 0, 2.77),
    "constructed/minimax-m1-hybrid.json": ({"full": 10, "state": 70}, 10 * 8 * 256, 456.1),
    "constructed/mistral3-nested.json": ({"full": 40}, 40 * 8 * 256, 24.0),
    "constructed/mpt-7b.json": ({"full": 32}, 32 * 32 * 256, 6.65),
    "constructed/mpt-gqa-like.json": ({"full": 32}, 32 * 8 * 256, None),
    "constructed/opt-13b.json": ({"full": 40}, 40 * 40 * 256, 12.85),
    "constructed/t5-small.json": ({"full": 6}, 6 * 8 * 128, 0.0605),
}  # fmt: skip
REFUSED: dict[str, str] = {
    "deepseek-ai--DeepSeek-V4-Flash.json": "compress_ratios",
    "mlc-preset--rwkv5_3b.json": "RwkvForCausalLM",
    "Qwen--Qwen3-32B-FP8-Static-PerTensor.hf_quant_config.json": "not a model config",
    "nvidia--Llama-3.1-70B-Instruct-FP8.hf_quant_config.json": "not a model config",
    "nvidia--Qwen3.5-122B-A10B-NVFP4.hf_quant_config.json": "not a model config",
}


def config_file(name: str) -> Path:
    return shared_path("facts", "configs", name)


def test_every_file_is_in_the_tables() -> None:
    folder = config_file(".")
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.json")}
    assert found == {*READ, *REFUSED}


@pytest.mark.parametrize("name", READ)
def test_config_is_read_right(name: str) -> None:
    layers, elements, billions = READ[name]
    spec = model_from_config(read_config(config_file(name)), name, name)
    assert {kind.value: count for kind, count in kinds(spec).items()} == layers
    assert spec.kv_elements_per_token == elements
    assert spec.parameters is not None
    if billions is not None:  # 4 %: towers of raw configs are counted without patches and projectors
        assert spec.parameters.loaded / 1e9 == pytest.approx(billions, rel=0.04)


@pytest.mark.parametrize("name", REFUSED)
def test_config_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(InputError, match=REFUSED[name]) as caught:
        model_from_config(read_config(config_file(name)), name, name)
    assert name in str(caught.value)


# Details that published configs are known for (WEIGHTS_AND_CONFIGS.md section 4, KV_SIZING_RULES.md 3, 5, 7).


def spec_of(name: str):
    return model_from_config(read_config(config_file(name)), name, name)


def test_gemma3_without_a_pattern_uses_the_class_defaults_and_says_so() -> None:
    spec = spec_of("constructed/gemma3-27b-nested-missing-keys.json")
    assert [layer.kind.value for layer in spec.layers[:6]] == ["sliding"] * 5 + ["full"]
    assert {layer.window for layer in spec.layers} == {0, 1024}
    assert spec.tie_word_embeddings
    assert "sliding_window_pattern 6" in spec.assumptions[0]
    assert "vocab_size 262208" in spec.assumptions[0]


def test_gdn_state_is_the_logged_one() -> None:
    """Qwen3.6-27B: 3,207,168 B a layer (KV_SIZING_RULES 7) = 48 x 128 x 128 x 4 + 3 x 10,240 x 2."""
    from kvplan.spec.catalogue import find_model

    state = next(layer.state for layer in find_model("qwen3.6-27b").spec.layers if layer.state)
    assert (state.ssm_bytes_per_element, state.conv_bytes_per_element) == (4, 2)
    assert 4 * state.ssm_elements + 2 * state.conv_elements == 3_207_168


def test_sparse_index_keys_are_on_the_layers_that_keep_them() -> None:
    assert sum(layer.index_dim for layer in spec_of("deepseek-ai--DeepSeek-V3.2.json").layers) == 61 * 128
    glm = spec_of("zai-org--GLM-5.2.json")
    assert sum(layer.index_dim > 0 for layer in glm.layers) == 21  # "only 21 of 78 layers"


def test_sharing_layers_keep_nothing_and_keys_differ_from_values() -> None:
    from kvplan.spec.catalogue import find_model

    e2b = find_model("gemma-4-e2b").spec
    assert {kind.value: n for kind, n in kinds(e2b).items()} == {"sliding": 12, "full": 3, "shared": 20}
    swa = next(layer for layer in spec_of("XiaomiMiMo--MiMo-V2-Flash.json").layers if layer.window)
    assert (swa.kv_heads, swa.head_dim, swa.v_head_dim, swa.window) == (8, 192, 128, 128)


@pytest.mark.parametrize(
    ("name", "method", "bits", "group", "block"),
    [
        ("Qwen--Qwen3-32B-FP8.json", "fp8", 8, 0, (128, 128)),
        ("Qwen--Qwen3-32B-FP8-Static-PerTensor.json", "modelopt", 8, 0, None),
        ("moonshotai--Kimi-K2.5.json", "compressed-tensors", 4, 32, None),  # inside text_config
        ("moonshotai--Kimi-K3.json", "mxfp4", 4, 32, None),
        ("nvidia--Qwen3.5-122B-A10B-NVFP4.json", "modelopt_fp4", 4, 16, None),
        ("openai--gpt-oss-120b.json", "mxfp4", 4, 32, None),
        ("constructed/llama-awq.json", "awq", 4, 128, None),
        ("constructed/llama-gptq.json", "gptq", 4, 128, None),
        ("constructed/llama-bnb-nf4.json", "bitsandbytes", 4, 64, None),
    ],
)
def test_quantisation_is_found_where_publishers_put_it(
    name: str, method: str, bits: int, group: int, block: tuple[int, int] | None
) -> None:
    found = spec_of(name).quantization
    assert found is not None
    assert (found.method, found.bits, found.group_size, found.block_shape) == (method, bits, group, block)


def test_old_modelopt_keeps_its_quantisation_in_a_side_file(tmp_path: Path) -> None:
    base = "nvidia--Llama-3.1-70B-Instruct-FP8"
    assert spec_of(f"{base}.json").quantization is None
    for name, target in (
        (f"{base}.json", "config.json"),
        (f"{base}.hf_quant_config.json", "hf_quant_config.json"),
    ):
        (tmp_path / target).write_bytes(config_file(name).read_bytes())
    found = model_from_config(read_config(tmp_path), "local", "local").quantization
    assert found is not None
    assert (found.method, found.bits, found.ignored) == ("modelopt", 8, ("lm_head",))


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 4096),
        ({"type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "llama3", "factor": 8.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
    ],
)
def test_rope_scaling_stretches_the_context_as_engines_do(scaling: dict | None, length: int) -> None:
    config = json.loads(config_file("mlc-preset--llama2_7b.json").read_text())
    config |= {"max_position_embeddings": 4096, "rope_scaling": scaling}
    assert model_from_config(config, "x", "x").max_position_embeddings == length


def test_windows_are_read_as_their_class_means_them() -> None:
    """use_sliding_window false (Qwen2.5) is no window; true counts from max_window_layers on."""
    base = {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1024, "vocab_size": 1000,
        "max_position_embeddings": 4096, "sliding_window": 1024, "max_window_layers": 2,
    }  # fmt: skip
    off = model_from_config({**base, "use_sliding_window": False}, "x", "x")
    on = model_from_config({**base, "use_sliding_window": True}, "x", "x")
    assert [layer.window for layer in off.layers] == [0] * 4
    assert [layer.window for layer in on.layers] == [0, 0, 1024, 1024]


@pytest.mark.parametrize(
    ("name", "routed"),
    [
        ("deepseek-ai--DeepSeek-V3.json", 58),  # first_k_dense_replace 3 of 61
        ("meta-llama--Llama-4-Maverick-17B-128E-Instruct.json", 24),  # interleave_moe_layer_step 2
        ("constructed/jamba-v0.1.json", 16),  # expert_layer_period 2
        ("XiaomiMiMo--MiMo-V2-Flash.json", 47),  # moe_layer_freq
        ("nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16.json", 48),
        ("mlc-preset--llama2_7b.json", 0),
    ],
)
def test_layers_with_routed_experts_are_marked(name: str, routed: int) -> None:
    assert sum(layer.is_moe for layer in spec_of(name).layers) == routed
