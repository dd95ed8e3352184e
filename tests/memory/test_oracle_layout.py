"""The KV layout against vLLM 0.32's own arithmetic, record by record of kv_cache_configs.jsonl."""

from __future__ import annotations

import json

import pytest

from kvplan.memory.kvlayout import KVGroup, kv_layout
from kvplan.spec.engine import EngineSettings, resolve
from kvplan.spec.model import Layer, LayerKind, ModelSpec, StateShape
from tests.conftest import shared_path

K = LayerKind


def full(kv_heads: int, head_dim: int) -> Layer:
    return Layer(K.FULL, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=head_dim)


def window(kind: LayerKind, kv_heads: int, head_dim: int, size: int) -> Layer:
    return Layer(kind, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=head_dim, window=size)


def mamba2(heads: int, dim: int, size: int, groups: int, ssm_bytes: int) -> Layer:
    conv = (heads * dim + 2 * groups * size) * 3
    return Layer(
        K.STATE,
        state=StateShape(
            heads * dim * size, conv, 3, ssm_bytes, 2, groups=groups, group_elements=2 * size * 3
        ),
    )


# Published shapes. The layers alternate as in the model, since the rarer kind is dealt in layer order.
GDN = Layer(K.STATE, state=StateShape(32 * 128 * 128, (2 * 16 * 128 + 32 * 128) * 3, 3, 2, 2))
MAMBA1 = Layer(K.STATE, state=StateShape(8192 * 16, 8192 * 3, 3, 2, 2))
MODELS: dict[str, list[Layer]] = {
    "Qwen3-32B": [full(8, 128)] * 64,
    "Llama-3.1-8B": [full(8, 128)] * 32,
    "Llama-3.1-70B": [full(8, 128)] * 80,
    "gpt-oss-120b": [window(K.SLIDING, 8, 64, 128), full(8, 64)] * 18,
    "gpt-oss-20b": [window(K.SLIDING, 8, 64, 128), full(8, 64)] * 12,
    "Mistral-7B-v0.1": [window(K.SLIDING, 8, 128, 4096)] * 32,
    "Gemma-3-27B": ([window(K.SLIDING, 16, 128, 1024)] * 5 + [full(16, 128)]) * 10
    + [window(K.SLIDING, 16, 128, 1024)] * 2,
    "Llama-4-Scout": ([window(K.CHUNKED, 8, 128, 8192)] * 3 + [full(8, 128)]) * 12,
    "DeepSeek-V3": [Layer(K.MLA, latent_dim=512, rope_dim=64)] * 61,
    "Qwen3-Next-80B": ([GDN] * 3 + [full(2, 256)]) * 12,
    "Jamba-1.5-mini": ([MAMBA1] * 4 + [full(8, 128)] + [MAMBA1] * 3) * 4,
    "Nemotron-H-8B": ([mamba2(128, 64, 128, 8, 4)] * 6 + [full(8, 128)]) * 4,
    "Granite-4.0-H-small": ([mamba2(128, 64, 128, 1, 2)] * 9 + [full(8, 128)]) * 4,
}
SPEC_NAMES = {
    K.FULL: "FullAttentionSpec",
    K.SLIDING: "SlidingWindowSpec",
    K.CHUNKED: "ChunkedLocalAttentionSpec",
    K.MLA: "MLAAttentionSpec",
    K.STATE: "MambaSpec",
}


def predicted(record: dict) -> dict:
    model = ModelSpec(
        name=record["model"],
        architecture="",
        layers=tuple(MODELS[record["model"]]),
        hidden_size=0,
        heads=0,
        vocab_size=0,
        intermediate_size=0,
        max_position_embeddings=0,
    )
    settings = EngineSettings(
        engine_version=record["vllm_version"],
        tensor_parallel_size=record["tp"],
        pipeline_parallel_size=record["pp"],
        kv_cache_dtype=record.get("mla_cache_dtype_str") or record["kv_dtype"],
        block_size=record["requested_block_size"],
        max_model_len=record["max_model_len"],
        enable_prefix_caching=record["prefix_caching"],
        max_num_batched_tokens=record["max_num_batched_tokens"],
        async_scheduling=record["async_scheduling"],
        kv_cache_layout=record["kv_cache_layout"],
        disable_hybrid_kv_cache_manager=not record["hybrid_manager"],
    )
    engine = resolve(settings, model, None)
    layout = kv_layout(model, engine)
    blocks = layout.num_blocks(record["available_bytes"])

    def shown(group: KVGroup) -> tuple:
        asked = group.admitted_blocks(record["max_model_len"], engine.max_in_flight_tokens)
        return (group.layers, SPEC_NAMES[group.kind], group.block_size, group.page_bytes, asked)

    return {
        "block_size": layout.block_size,
        "bytes_per_block": layout.bytes_per_block,
        "num_blocks": blocks,
        "num_groups": len(layout.groups),
        "groups": [shown(group) for group in layout.groups],
        "max_concurrency": round(layout.max_concurrency(blocks), 6),
        "kv_cache_size_tokens": layout.cache_tokens(blocks),
        "max_in_flight_tokens": engine.max_in_flight_tokens,
        "needed_bytes_one_request": layout.needed_bytes(record["max_model_len"]),
    }


def recorded(record: dict) -> dict:
    keys = (
        "block_size", "bytes_per_block", "num_blocks", "num_groups", "max_concurrency",
        "kv_cache_size_tokens", "max_in_flight_tokens", "needed_bytes_one_request",
    )  # fmt: skip
    names = ("n_layers", "spec", "block_size", "page_size_bytes", "blocks_per_request_at_max_len")
    groups = [tuple(group[name] for name in names) for group in record["groups"]]
    return {**{key: record[key] for key in keys}, "groups": groups}


def records() -> list[dict]:
    return [json.loads(line) for line in shared_path("oracle", "kv_cache_configs.jsonl").open()]


def test_layout_equals_the_engines_on_every_record():
    """Block size, bytes per block, blocks, groups, concurrency, token line, need: 71 of 71 records."""
    found = records()
    wrong = {i: (predicted(r), recorded(r)) for i, r in enumerate(found) if predicted(r) != recorded(r)}
    assert not wrong, f"{len(found) - len(wrong)} of {len(found)} equal; first: {next(iter(wrong.items()))}"
    assert len(found) == 71


@pytest.mark.parametrize(
    ("change", "value"),
    [("max_num_batched_tokens", 4096), ("prefix_caching", False), ("hybrid_manager", False), ("tp", 16)],
)
def test_a_wrong_flag_is_noticed(change, value):
    """The comparison can fail: another flag gives another layout on at least one record."""
    assert any(predicted({**r, change: value}) != recorded(r) for r in records() if r[change] != value)
