"""What each published architecture is: one row of facts a class, named as in `architectures`.

Facts are how its layers alternate, which MLP, norms and biases it has, and the defaults of its config class
for keys that publishers leave out. Sources: the published config classes (transformers 5.24), checked by
parameter counts against the totals in the catalogue (tests/spec/test_parameters.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """Facts of one class.

    ``layout`` names a function of `layouts.LAYOUTS`. ``qkv_bias``/``o_bias``/``mlp_bias``: True, False, or
    the config key that says so. ``norms``: vectors of hidden size in a layer; ``norm_bias`` doubles them.
    ``qk_norm``: "" none, "head" one head wide, "all" as wide as q and k, "heads" per head and head wide.
    """

    layout: str = "uniform"
    tied: bool = False  # when the config does not say
    gated: bool = True
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    head_bias: bool = False
    norms: int = 2
    norm_bias: bool = False
    final_norm: bool = True
    qk_norm: str = ""
    qk_norm_key: str = ""  # config key that turns qk_norm on
    output_gate: bool = False  # q projection twice as wide (Qwen3-Next)
    shared_gate: bool = False  # a gate vector for the shared expert
    router_bias: str = ""  # "" or the kind: "score" one per expert
    position_rows_extra: int = -1  # learned positions: rows beyond max_position_embeddings; -1 = none
    embedding_norm: bool = False
    rotary: bool = True
    rotary_share: float = 1.0  # of head_dim, where the config does not say
    checked: bool = True  # whether a published parameter count confirmed the shapes of this class
    ssm_dtype: str = ""  # of the Mamba state when the config is silent; "" = the model's dtype
    mtp_layers: int = 0  # in the file although the config does not say
    mtp_in_file: bool = True
    mtp_own_embedding: bool = False  # the file repeats embedding and head for the MTP layer
    defaults: Mapping[str, Any] = field(default_factory=dict)  # class defaults, by name in fields.NAMES


LLAMA = Architecture(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias")
QWEN2 = Architecture(layout="qwen2", qkv_bias=True)
QWEN3 = Architecture(
    layout="qwen2",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="head",
    defaults={"head_dim": 128},
)
MISTRAL = Architecture(layout="window_all")
GEMMA2 = Architecture(
    layout="alternate", tied=True, norms=4, defaults={"sliding_window": 4096, "head_dim": 256}
)
GEMMA3 = Architecture(
    layout="pattern",
    tied=True,
    norms=4,
    qk_norm="head",
    defaults={
        "sliding_window_pattern": 6, "sliding_window": 4096, "head_dim": 256, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 262208, "max_position_embeddings": 131072,
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    },
)  # fmt: skip
GEMMA4 = Architecture(layout="gemma4", tied=True, norms=4, qk_norm="gemma4", defaults={"sliding_window": 512})
OLMO2 = Architecture(qk_norm="all")
COHERE = Architecture(
    tied=True, norms=1, qk_norm="heads", qk_norm_key="use_qk_norm", qkv_bias="attention_bias",
    o_bias="attention_bias",
)  # fmt: skip
GRANITE_HYBRID = Architecture(
    layout="layer_types", tied=True, ssm_dtype="", defaults={"mamba_conv_kernel": 4, "mamba_groups": 1}
)
GDN = Architecture(
    layout="gdn",
    qk_norm="head",
    output_gate=True,
    shared_gate=True,
    rotary_share=0.25,
    defaults={
        "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "head_dim": 256,
    },
)  # fmt: skip
MLA = Architecture(layout="mla", router_bias="score")
GLM4_MOE = Architecture(
    qkv_bias="attention_bias",
    qk_norm="head",
    qk_norm_key="use_qk_norm",
    router_bias="score",
    mtp_own_embedding=True,
)
OPT = Architecture(
    tied=True, gated=False, qkv_bias=True, o_bias=True, mlp_bias=True, norm_bias=True,
    position_rows_extra=2, rotary=False,
)  # fmt: skip
GPT2 = replace(OPT, position_rows_extra=0)
FALCON = Architecture(
    layout="falcon",
    defaults={"max_position_embeddings": 2048},
    tied=True,
    gated=False,
    norms=1,
    norm_bias=True,
    qkv_bias="bias",
    o_bias="bias",
    mlp_bias="bias",
)
MAMBA1 = Architecture(
    layout="mamba", tied=True, norms=1, rotary=False, defaults={"mamba_conv_kernel": 4, "mamba_expand": 2}
)
SEQ2SEQ = replace(OPT, layout="decoder")

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": LLAMA,
    "LlavaForConditionalGeneration": LLAMA,
    "InternLM2ForCausalLM": Architecture(),
    "InternLM3ForCausalLM": Architecture(),
    "BaichuanForCausalLM": Architecture(),
    "SmolLM3ForCausalLM": replace(LLAMA, tied=True),
    "GraniteForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Mistral3ForConditionalGeneration": MISTRAL,
    "MixtralForCausalLM": MISTRAL,
    "Starcoder2ForCausalLM": Architecture(
        layout="window_all", tied=True, gated=False, qkv_bias=True, o_bias=True, mlp_bias=True, norm_bias=True
    ),
    "Qwen2ForCausalLM": QWEN2,
    "Qwen2MoeForCausalLM": replace(QWEN2, shared_gate=True),
    "Qwen2VLForConditionalGeneration": QWEN2,
    "Qwen2_5_VLForConditionalGeneration": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3,
    "Qwen3VLForConditionalGeneration": QWEN3,
    "Qwen3VLMoeForConditionalGeneration": QWEN3,
    "Qwen3NextForCausalLM": replace(GDN, mtp_layers=1),
    "Qwen3_5ForConditionalGeneration": replace(GDN, shared_gate=True, ssm_dtype="float32"),
    "Qwen3_5MoeForConditionalGeneration": replace(GDN, ssm_dtype="float32"),
    "QWenLMHeadModel": Architecture(layout="qwen1", qkv_bias=True),
    "GemmaForCausalLM": Architecture(tied=True, defaults={"head_dim": 256}),
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Gemma3nForConditionalGeneration": Architecture(
        layout="gemma4", tied=True, norms=4, qk_norm="head", defaults={"sliding_window": 512, "head_dim": 256}
    ),
    "Gemma4ForConditionalGeneration": GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": GEMMA4,
    "Llama4ForConditionalGeneration": Architecture(
        layout="llama4",
        defaults={
            "attention_chunk_size": 8192,
            "interleave_moe_layer_step": 1,
            "n_shared_experts": 1,
            "head_dim": 128,
        },
    ),
    "PhiForCausalLM": Architecture(
        gated=False, norms=1, norm_bias=True, qkv_bias=True, o_bias=True, mlp_bias=True, head_bias=True
    ),
    "Phi3ForCausalLM": Architecture(layout="phi3"),
    "PhiMoEForCausalLM": Architecture(qkv_bias=True, o_bias=True, norm_bias=True, head_bias=True),
    "CohereForCausalLM": COHERE,
    "Cohere2ForCausalLM": replace(
        COHERE, layout="pattern", qk_norm="", defaults={"sliding_window_pattern": 4, "sliding_window": 4096}
    ),
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": replace(
        OLMO2, layout="pattern", defaults={"sliding_window_pattern": 4, "sliding_window": 4096}
    ),
    "GptOssForCausalLM": Architecture(
        layout="layer_types",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        defaults={"sliding_window": 128, "head_dim": 64},
    ),
    "DeepseekV2ForCausalLM": replace(MLA, router_bias=""),
    "DeepseekV3ForCausalLM": replace(MLA, mtp_own_embedding=True),
    "DeepseekV32ForCausalLM": replace(MLA, mtp_own_embedding=True),
    "GlmMoeDsaForCausalLM": MLA,
    "Glm4MoeLiteForCausalLM": replace(MLA, mtp_own_embedding=True),
    "KimiK25ForConditionalGeneration": MLA,
    "KimiK3ForConditionalGeneration": replace(MLA, layout="kimi_linear"),
    "KimiLinearForCausalLM": replace(MLA, layout="kimi_linear"),
    "Glm4MoeForCausalLM": GLM4_MOE,
    "Glm4vMoeForConditionalGeneration": replace(GLM4_MOE, qkv_bias="attention_bias"),
    "MiniMaxM1ForCausalLM": Architecture(layout="minimax_m1"),
    "MiniMaxText01ForCausalLM": Architecture(layout="minimax_m1"),
    "MiniMaxM2ForCausalLM": Architecture(qk_norm="all", router_bias="score", mtp_in_file=False),
    "MiniMaxM3ForCausalLM": Architecture(
        layout="minimax_m3", qk_norm="head", router_bias="score", mtp_in_file=False
    ),
    "MiMoV2FlashForCausalLM": Architecture(layout="mimo", router_bias="score", mtp_in_file=False),
    "Step3p7FlashForCausalLM": Architecture(layout="layer_types", mtp_in_file=False),
    "DeciLMForCausalLM": Architecture(layout="deci"),
    "NemotronHForCausalLM": Architecture(
        layout="nemotron_h",
        gated=False,
        norms=1,
        router_bias="score",
        ssm_dtype="float32",
        rotary=False,
        defaults={"mamba_conv_kernel": 4},
    ),
    "GraniteMoeHybridForCausalLM": GRANITE_HYBRID,
    "JambaForCausalLM": Architecture(
        layout="jamba",
        rotary=False,
        defaults={
            "mamba_conv_kernel": 4,
            "mamba_expand": 2,
            "mamba_state_size": 16,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
    ),
    "MambaForCausalLM": MAMBA1,
    "FalconMambaForCausalLM": MAMBA1,
    "FalconForCausalLM": FALCON,
    "OPTForCausalLM": OPT,
    "GPT2LMHeadModel": GPT2,
    "GPTBigCodeForCausalLM": replace(GPT2, layout="multi_query"),
    "GPTJForCausalLM": Architecture(gated=False, norms=1, norm_bias=True, mlp_bias=True, head_bias=True),
    "GPTNeoXForCausalLM": Architecture(
        gated=False, norm_bias=True, qkv_bias=True, o_bias=True, mlp_bias=True
    ),
    "BloomForCausalLM": replace(OPT, position_rows_extra=-1, embedding_norm=True),
    "MPTForCausalLM": Architecture(tied=True, gated=False, rotary=False),
    "DbrxForCausalLM": Architecture(),
    "ChatGLMModel": Architecture(layout="chatglm", qkv_bias="add_qkv_bias"),
    "BartForConditionalGeneration": SEQ2SEQ,
    "WhisperForConditionalGeneration": SEQ2SEQ,
    "T5ForConditionalGeneration": replace(
        SEQ2SEQ, qkv_bias=False, o_bias=False, mlp_bias=False, norm_bias=False, position_rows_extra=-1
    ),
}

# Other names of classes above: text-only or older releases of the same decoder.
SAME_AS: dict[str, str] = {
    "AquilaForCausalLM": "LlamaForCausalLM",
    "SolarForCausalLM": "LlamaForCausalLM",
    "XverseForCausalLM": "LlamaForCausalLM",
    "LlavaNextForConditionalGeneration": "LlavaForConditionalGeneration",
    "BaiChuanForCausalLM": "BaichuanForCausalLM",
    "MptForCausalLM": "MPTForCausalLM",
    "RWForCausalLM": "FalconForCausalLM",
    "CodeGenForCausalLM": "GPTJForCausalLM",
    "ChatGLMForConditionalGeneration": "ChatGLMModel",
    "Llama4ForCausalLM": "Llama4ForConditionalGeneration",
    "Gemma3nForCausalLM": "Gemma3nForConditionalGeneration",
    "Gemma4ForCausalLM": "Gemma4ForConditionalGeneration",
    "Qwen3_5ForCausalLM": "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
    "Qwen2_5OmniForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5OmniModel": "Qwen2ForCausalLM",
    "MiMoForCausalLM": "Qwen2ForCausalLM",
}
ARCHITECTURES |= {name: ARCHITECTURES[of] for name, of in SAME_AS.items()}

# Known from their config classes; no model of theirs is in the catalogue. Counts that are well known are
# checked in tests/spec/test_parameters.py, the others say that nobody did.
COUNTED = (
    "ExaoneForCausalLM", "OlmoForCausalLM", "OlmoeForCausalLM", "Glm4ForCausalLM", "StableLmForCausalLM",
    "SeedOssForCausalLM", "NemotronForCausalLM", "GraniteMoeForCausalLM", "BambaForCausalLM",
    "Ernie4_5_MoeForCausalLM",
)  # fmt: skip
ARCHITECTURES |= {
    name: replace(arch, checked=name in COUNTED)
    for name, arch in {
        "InternLMForCausalLM": Architecture(qkv_bias="bias", o_bias="bias"),
        "MiniCPMForCausalLM": replace(LLAMA, tied=True),
        "DeepseekForCausalLM": LLAMA,
        "ArceeForCausalLM": replace(LLAMA, gated=False),
        "GlmForCausalLM": Architecture(qkv_bias="attention_bias", defaults={"head_dim": 128}),
        "Glm4ForCausalLM": Architecture(qkv_bias="attention_bias", norms=4, defaults={"head_dim": 128}),
        "StableLmForCausalLM": Architecture(qkv_bias="use_qkv_bias", norm_bias=True),
        "NemotronForCausalLM": Architecture(gated=False, norm_bias=True),
        "ExaoneForCausalLM": Architecture(),
        "SeedOssForCausalLM": Architecture(qkv_bias="attention_bias", o_bias="attention_out_bias"),
        "Dots1ForCausalLM": Architecture(qkv_bias="attention_bias", qk_norm="head", router_bias="score"),
        "OlmoForCausalLM": Architecture(norms=0, final_norm=False),
        "OlmoeForCausalLM": OLMO2,
        "ApertusForCausalLM": Architecture(gated=False, qk_norm="head"),
        "Ernie4_5ForCausalLM": Architecture(qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias"),
        "Ernie4_5_MoeForCausalLM": Architecture(
            tied=True, qkv_bias="use_bias", o_bias="use_bias", router_bias="score"
        ),
        "GraniteMoeForCausalLM": LLAMA,
        "GraniteMoeSharedForCausalLM": LLAMA,
        "BambaForCausalLM": Architecture(
            layout="bamba", defaults={"mamba_conv_kernel": 4, "mamba_groups": 1}
        ),
    }.items()
}

# Known by name, but not how they lay out what they keep: refused with the reason, never guessed.
REFUSED: dict[str, str] = {
    "DeepseekV4ForCausalLM": "compressed attention (compress_ratios): how an engine stores its compressor "
    "state is not known here",
    "MllamaForConditionalGeneration": "cross-attention layers keep K and V of an image, not of the text",
    "Zamba2ForCausalLM": "Mamba layers that share attention blocks: the shapes are not known here",
    "RwkvForCausalLM": "RWKV: no engine handled here serves it",
}

# Class defaults of the text part, when a multimodal config gives it only in part.
NESTED_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "vocab_size": 32000, "max_position_embeddings": 2048,
    },
    "mistral": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 131072,
    },
}  # fmt: skip

# model_type (of the text part too), for configs without `architectures`.
MODEL_TYPES: dict[str, str] = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM", "qwen3_next": "Qwen3NextForCausalLM", "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM", "phi3": "Phi3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM", "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM", "opt": "OPTForCausalLM", "gpt2": "GPT2LMHeadModel",
    "falcon": "FalconForCausalLM", "granite": "GraniteForCausalLM", "starcoder2": "Starcoder2ForCausalLM",
    "llama4_text": "Llama4ForConditionalGeneration", "qwen3_5_text": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForConditionalGeneration", "gemma4_text": "Gemma4ForConditionalGeneration",
    "glm4": "Glm4ForCausalLM", "glm4_moe": "Glm4MoeForCausalLM", "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM", "olmo2": "Olmo2ForCausalLM", "internlm2": "InternLM2ForCausalLM",
    "phi": "PhiForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM", "bloom": "BloomForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM", "nemotron_h": "NemotronHForCausalLM", "jamba": "JambaForCausalLM",
}  # fmt: skip
