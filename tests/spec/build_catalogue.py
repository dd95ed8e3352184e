"""Make kvplan/spec/data/*.json from ../shared/facts.

    python tests/spec/build_catalogue.py            # writes the two files

The shipped files carry, per model, an object like its published config.json (only the keys that matter), the
published parameter count and the source; per GPU, what the driver reports and the sheet's rates.
`test_catalogue.py` checks that the shipped files are what this script makes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "kvplan" / "spec" / "data"

# Facts of a row that are copied as they are: they have the names of a published config.
SAME = (
    "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings", "torch_dtype",
    "max_position_embeddings", "sliding_window", "use_sliding_window", "sliding_window_pattern",
    "max_window_layers", "layer_types", "full_attention_interval", "linear_num_key_heads",
    "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
    "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_n_heads",
    "index_head_dim", "index_topk", "indexer_types", "conv_kernel", "num_kv_shared_layers",
    "hidden_size_per_layer_input", "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v",
    "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "hybrid_override_pattern",
    "layers_block_type", "mamba_d_state", "mamba_d_conv", "mamba_expand", "attention_chunk_size",
    "time_step_rank", "multi_query", "new_decoder_architecture", "attn_type_list", "mamba_n_heads",
    "mamba_d_head", "mamba_n_groups", "attn_layer_period", "attn_layer_offset", "mamba_dt_rank",
    "state_size", "linear_attn_config", "sparse_attention_config", "hybrid_layer_pattern",
    "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim", "compress_ratios", "o_lora_rank", "o_groups",
)  # fmt: skip
MOE = {
    "num_experts": "num_experts", "experts_per_token": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size", "shared_experts": "n_shared_experts",
    "shared_expert_intermediate_size": "shared_expert_intermediate_size",
    "first_dense_layers": "first_k_dense_replace", "interleave_moe_layer_step": "interleave_moe_layer_step",
    "expert_layer_period": "expert_layer_period", "moe_latent_size": "moe_latent_size",
}  # fmt: skip

GENERAL = "general knowledge, not read"
# Models of the evidence, or often asked for, that the facts have no row for: the shape of another row with
# changes, or a shape of its own. Marked unverified; test_weights.py checks those that logs weighed.
LIKE: list[tuple[str, str, dict[str, Any]]] = [
    ("meta-llama/Meta-Llama-3-8B", "meta-llama/Llama-3.1-8B", {"max_position_embeddings": 8192}),
    ("meta-llama/Meta-Llama-3-70B", "meta-llama/Llama-3.1-70B", {"max_position_embeddings": 8192}),
    ("codellama/CodeLlama-7b-hf", "meta-llama/Llama-2-7b-hf",
     {"vocab_size": 32016, "max_position_embeddings": 16384}),
    ("codellama/CodeLlama-34b-hf", "meta-llama/Llama-2-70b-hf",
     {"num_hidden_layers": 48, "intermediate_size": 22016, "max_position_embeddings": 16384}),
    ("ibm-granite/granite-3.1-8b-instruct", "ibm-granite/granite-3.3-8b-instruct", {"vocab_size": 49155}),
    ("ibm-granite/granite-3.1-2b-instruct", "ibm-granite/granite-3.3-2b-instruct", {"vocab_size": 49155}),
    ("google/gemma-7b", "google/gemma-2-9b-it",
     {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_size": 3072,
      "intermediate_size": 24576, "num_hidden_layers": 28, "num_attention_heads": 16,
      "num_key_value_heads": 16, "head_dim": 256, "vocab_size": 256000, "sliding_window": None}),
    ("Qwen/Qwen1.5-7B", "Qwen/Qwen2.5-7B-Instruct",
     {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
      "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 151936}),
    ("Qwen/Qwen1.5-MoE-A2.7B", "Qwen/Qwen2.5-7B-Instruct",
     {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_size": 2048,
      "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
      "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 8192,
      "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
      "shared_expert_intermediate_size": 5632}),
    ("Qwen/Qwen3-235B-A22B-Instruct-2507", "Qwen/Qwen3-235B-A22B", {"max_position_embeddings": 262144}),
    ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-30B-A3B", {"max_position_embeddings": 262144}),
    ("Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B", {"max_position_embeddings": 262144}),
    ("moonshotai/Kimi-K2-Instruct-0905", "moonshotai/Kimi-K2-Instruct", {"max_position_embeddings": 262144}),
    ("moonshotai/Kimi-K2-Thinking", "moonshotai/Kimi-K2.5",
     {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"}),
]  # fmt: skip
# Shapes read from raw config files of the facts folder.
RAW: dict[str, str] = {
    "microsoft/phi-2": "mlc-preset--phi-2.json",
    "CohereForAI/aya-23-8B": "mlc-preset--aya-23.json",
    "mistralai/Ministral-3-3B-Instruct-2512": "mlc-preset--ministral3_3b_2512.json",
    "zai-org/GLM-4.5V": "zai-org--GLM-4.5V.json",
    "stepfun-ai/Step-3.7-Flash": "stepfun-ai--Step-3.7-Flash.json",
    "llava-hf/llava-1.5-7b-hf": "mlc-preset--llava.json",
}
# Keys that the facts leave out: from the raw config of the same model, or known of its published config
# (each is confirmed by the parameter count, but rope_scaling, which only sizes a table).
YARN = {"rope_type": "deepseek_yarn", "factor": 40}
MISSING_KEYS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": {"intermediate_size_mlp": 16384},
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": {"intermediate_size_mlp": 16384},
    "MiniMaxAI/MiniMax-M3": {"dense_intermediate_size": 12288},
    "XiaomiMiMo/MiMo-V2-Flash": {"first_k_dense_replace": 1},
    "moonshotai/Kimi-K3": {"routed_expert_hidden_size": 3584},
    "google/gemma-4-E2B-it": {"use_double_wide_mlp": True},
    "zai-org/GLM-4.5": {"attention_bias": True, "use_qk_norm": True},
    "zai-org/GLM-4.6": {"attention_bias": True, "use_qk_norm": True},
    "zai-org/GLM-4.5-Air": {"attention_bias": True},
    "CohereLabs/c4ai-command-r-plus": {"use_qk_norm": True},
    "google/gemma-3-4b-it": {"rope_scaling": {"rope_type": "linear", "factor": 8}},
    "google/gemma-3-12b-it": {"rope_scaling": {"rope_type": "linear", "factor": 8}},
    "google/gemma-3-27b-it": {"rope_scaling": {"rope_type": "linear", "factor": 8}},
    "deepseek-ai/DeepSeek-V2-Lite": {"rope_scaling": YARN},
    "deepseek-ai/DeepSeek-V2": {"rope_scaling": YARN},
    "deepseek-ai/DeepSeek-V3": {"rope_scaling": YARN},
    "deepseek-ai/DeepSeek-R1": {"rope_scaling": YARN},
    "deepseek-ai/DeepSeek-V3.2": {"rope_scaling": YARN},
    "moonshotai/Kimi-K2-Instruct": {"rope_scaling": YARN},
    "moonshotai/Kimi-K2.5": {"rope_scaling": YARN},
    "moonshotai/Kimi-K2.6": {"rope_scaling": YARN},
    "moonshotai/Kimi-K2.7-Code": {"rope_scaling": YARN},
}
# Towers and other parts that a row explains but does not count by shape.
TOWERS = {
    "google/gemma-3n-E4B-it": 983281504, "google/gemma-3n-E2B-it": 983281504,
    "moonshotai/Kimi-K2.5": 471143920, "moonshotai/Kimi-K2.6": 471143920,
    "moonshotai/Kimi-K2.7-Code": 471143920,
}  # fmt: skip
# Other names of the same shape. A pair names the quantisation that the name stands for.
ALIASES: dict[str, list[str | list[str]]] = {
    "deepseek-ai/DeepSeek-R1": [
        "DeepSeek-R1-0528", ["DeepSeek-R1-0528-MXFP4-Preview", "mxfp4"],
        ["DeepSeek-R1-0528-FP4-V2", "modelopt_fp4"],
    ],
    "deepseek-ai/DeepSeek-V3": ["DeepSeek-V3-0324", "DeepSeek-V3.1"],
    "deepseek-ai/DeepSeek-V3.2": ["DeepSeek-V3.2-Exp"],
    "zai-org/GLM-4.6": ["GLM-4.7"],
    "MiniMaxAI/MiniMax-M1-80k": ["MiniMax-M1", "MiniMax-M1-40k"],
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ["Nemotron-3-Nano-30B-A3B", "Nemotron-3-Nano"],
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8": ["Nemotron-3-Super-120B-A12B", "Nemotron-3-Super"],
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": ["Nemotron-3-Ultra-550B-A55B", "Nemotron-3-Ultra"],
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1": ["Llama-3.3-Nemotron-Super-49B-v1", "Nemotron-Super-49B"],
    "Qwen/Qwen3-235B-A22B-Instruct-2507": ["Qwen3-235B-A22B-Thinking-2507"],
    "Qwen/Qwen3-30B-A3B-Instruct-2507": ["Qwen3-30B-A3B-Thinking-2507"],
    "Qwen/Qwen3-Next-80B-A3B-Instruct": ["Qwen3-Next-80B-A3B-Thinking", "Qwen3-Next"],
    "mistralai/Mistral-7B-Instruct-v0.3": ["Mistral-7B"],
    "mistralai/Mixtral-8x7B-v0.1": ["Mixtral-8x7B"],
    "mistralai/Mixtral-8x22B-v0.1": ["Mixtral-8x22B"],
    "mistralai/Mistral-Nemo-Instruct-2407": ["Mistral-Nemo"],
    "CohereLabs/c4ai-command-r-v01": ["command-r"],
    "CohereLabs/c4ai-command-r-plus": ["command-r-plus"],
    "CohereLabs/c4ai-command-a-03-2025": ["command-a"],
    "bigscience/bloom": ["bloom-176b"],
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": ["Llama-4-Scout"],
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": ["Llama-4-Maverick"],
}  # fmt: skip

# What the driver reports where gpus.json has no figure from torch: GiB, BUDGET.md section 1 (public logs).
DRIVER_GIB: dict[str, float] = {
    "A100-SXM4-40GB": 39.49, "A100-PCIE-80GB": 79.15, "H100 PCIe": 79.19, "L40S": 44.39, "H200 NVL": 139.8,
    "B300": 267.7, "RTX 3090": 23.58, "RTX 4090": 23.53, "RTX PRO 6000 Blackwell Server": 95.0,
}  # fmt: skip
GPU_ALIASES: dict[str, list[str]] = {
    "V100-SXM2-16GB": ["v100", "v100-16gb"],
    "V100-SXM2-32GB": ["v100-32gb"],
    "A100-SXM4-40GB": ["a100-40gb", "a100-40"],
    "A100-SXM4-80GB": ["a100", "a100-80gb", "a100-80", "a100-sxm"],
    "A100-PCIE-80GB": ["a100-pcie"],
    "RTX A6000": ["a6000"],
    "RTX 6000 Ada": ["rtx6000ada"],
    "RTX PRO 6000 Blackwell Server": ["rtxpro6000", "rtx-pro-6000-blackwell"],
    "RTX 3090": ["3090"],
    "RTX 4090": ["4090"],
    "RTX 5090": ["5090"],
    "H100 SXM": ["h100", "h100-80gb", "h100-sxm5"],
    "H200 SXM": ["h200", "h200-141gb"],
    "H20": ["h20-96gb"],
    "GH200 96GB": ["gh200"],
    "B200": ["b200-sxm"],
    "B300": ["b300-sxm"],
    "Rubin R200": ["r200"],
    "DGX Spark GB10": ["gb10", "dgx-spark", "spark", "gb10-dgx-spark"],
    "Jetson AGX Thor": ["thor"],
    "Gaudi 2": ["gaudi2"],
    "Gaudi 3": ["gaudi3"],
    "TPU v6e": ["trillium"],
}


def shape(row: dict[str, Any], facts: Path) -> dict[str, Any]:
    """A row of models.json as an object like the published config.json."""
    config: dict[str, Any] = {"architectures": [row["architecture"]]}
    config.update({key: row[key] for key in SAME if row.get(key) is not None})
    if row.get("kv_lora_rank"):
        config.pop("head_dim", None)  # hidden / heads: means nothing with latent attention
    for key, name in MOE.items():
        if (row.get("moe") or {}).get(key) is not None:
            config[name] = row["moe"][key]
    if row.get("mtp_layers"):
        config["mtp_num_hidden_layers"] = row["mtp_layers"]
    ssm = row.get("mamba_ssm_dtype") or row.get("mamba_ssm_cache_dtype") or row.get("mamba_ssm_dtype_engine")
    if ssm:
        config["mamba_ssm_dtype"] = ssm
    quantization = row.get("quantization_config")
    if quantization:
        config["quantization_config"] = {
            "quant_method" if k == "method" else k: v for k, v in quantization.items()
        }
    if row["architecture"] == "DeciLMForCausalLM":
        config["block_configs"] = deci_blocks(facts)
    config.update(MISSING_KEYS.get(row["id"], {}))
    return config


def deci_blocks(facts: Path) -> list[dict[str, Any]]:
    raw = json.loads((facts / "configs" / "nvidia--Llama-3_3-Nemotron-Super-49B-v1.json").read_text())
    blocks = []
    for block in raw["block_configs"]:
        attention, ffn = block["attention"], block["ffn"]
        blocks.append(
            {
                "attention": {"no_op": True}
                if attention["no_op"]
                else {k: attention[k] for k in ("n_heads_in_group",)},
                "ffn": {"no_op": True} if ffn["no_op"] else {"ffn_mult": ffn["ffn_mult"]},
            }
        )
    return blocks


def models(facts: Path) -> list[dict[str, Any]]:
    rows = json.loads((facts / "models.json").read_text())["models"]
    entries = []
    for row in rows:
        breakdown = row.get("params_breakdown") or {}
        entry = {
            "id": row["id"],
            "config": shape(row, facts),
            "published_parameters": row["params_published"],
            "vision_parameters": breakdown.get("vision") or TOWERS.get(row["id"], 0),
            "extras_in_file": (row.get("counted_extras") or 0) if row["id"] not in TOWERS else 0,
            "grade": row.get("verified_grade"),
            "source": row["source_config"],
            "unverified": row.get("unchecked_fields") or [],
        }
        if row.get("vision_tower"):
            entry["multimodal"] = True
        if row.get("note_params"):
            entry["extras_note"] = row["note_params"]
        entries.append(entry)
    by_id = {entry["id"]: entry for entry in entries}
    for name, like, changes in LIKE:
        base = by_id[like]
        config = {k: v for k, v in {**base["config"], **changes}.items() if v is not None}
        entries.append(
            {
                "id": name, "config": config, "published_parameters": None,
                "vision_parameters": base["vision_parameters"], "extras_in_file": 0, "grade": None,
                "source": f"{GENERAL}: shape of {like} with {', '.join(changes)} changed",
                "unverified": ["all fields"],
            }
        )  # fmt: skip
    for name, file in RAW.items():
        raw = json.loads((facts / "configs" / file).read_text())
        entries.append(
            {
                "id": name, "config": trimmed(raw), "published_parameters": None, "vision_parameters": 0,
                "extras_in_file": 0, "grade": None, "source": f"raw config.json ({file.split('--')[0]} copy)",
                "unverified": ["parameter count"],
            }
        )  # fmt: skip
    for entry in entries:
        entry["aliases"] = ALIASES.get(entry["id"], [])
    missing = set(ALIASES) - {entry["id"] for entry in entries}
    assert not missing, f"aliases of unknown entries: {missing}"
    return entries


def trimmed(raw: dict[str, Any]) -> dict[str, Any]:
    """Only numbers, names and lists that shape reads; texts of no use are left out."""
    drop = ("_id", "task_specific_params", "auto_map", "rope_parameters", "id2label", "label2id")
    return {
        key: trimmed(value) if isinstance(value, dict) else value
        for key, value in raw.items()
        if not key.endswith("token_id") and key not in drop and not key.startswith("_")
    }


def gpus(facts: Path) -> list[dict[str, Any]]:
    entries = []
    for row in json.loads((facts / "gpus.json").read_text())["gpus"]:
        unverified = []
        if row["torch_total_mib"]:
            total, source = row["torch_total_mib"], row["torch_total_source"]
        elif row["name"] in DRIVER_GIB:
            total, source = DRIVER_GIB[row["name"]] * 1024, "start-up logs of engines"
        elif row["memory_total_mib_smi"]:
            total = row["memory_total_mib_smi"]
            source = (
                f"nvidia-smi total, an engine sees 0.1-0.9 GiB less ({row['memory_total_mib_smi_source']})"
            )
            unverified.append("total_bytes")
        else:
            total, source = row["memory_gb_marketing"] * 1e9 / 2**20, "sheet size, no driver figure found"
            unverified.append("total_bytes")
        link = row["link"]["gb_s_one_direction"] or (row["pcie"] or {}).get("gb_s_one_direction") or 0
        flops = {k: v for k, v in row["tflops_dense"].items() if v and k != "int8_tops"}
        if row["tflops_dense"].get("int8_tops"):
            flops["int8"] = row["tflops_dense"]["int8_tops"]
        unverified += [
            name for key, name in (("bandwidth", "memory_bandwidth"), ("fp16", "peak_flops"))
            if not row["verified"].get(key)
        ]  # fmt: skip
        entries.append(
            {
                "name": row["name"], "aliases": row["aliases"] + GPU_ALIASES.get(row["name"], []),
                "vendor": row["vendor"], "arch": row["arch"], "total_mib": total, "total_source": source,
                "memory_gb_s": row["mem_bw_gb_s"], "tflops": flops, "link_gb_s": link,
                "link_kind": row["link"]["kind"] or "PCIe", "sm_count": row["sm_count"] or 0,
                "l2_mb": row["l2_mb"] or 0, "compute_capability": row["compute_capability"],
                "unverified": unverified, "notes": row["notes"],
            }
        )  # fmt: skip
    missing = (set(GPU_ALIASES) | set(DRIVER_GIB)) - {entry["name"] for entry in entries}
    assert not missing, f"facts of unknown GPUs: {missing}"
    return entries


def text_of(entries: list[dict[str, Any]]) -> str:
    """One entry a line, so that a change shows as one line."""
    lines = ",\n".join(json.dumps(entry, separators=(",", ":"), ensure_ascii=False) for entry in entries)
    return f"[\n{lines}\n]\n"


def main() -> None:
    facts = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT.parent / "shared" / "facts"
    DATA.mkdir(exist_ok=True)
    (DATA / "models.json").write_text(text_of(models(facts)), encoding="utf-8")
    (DATA / "gpus.json").write_text(text_of(gpus(facts)), encoding="utf-8")


if __name__ == "__main__":
    main()
