"""Rules of the KV layout that no record covers, on the catalogue's models and on shapes made for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan.errors import InputError
from kvplan.memory.capacity import estimate, pool_for
from kvplan.memory.formula import kv_bytes
from kvplan.memory.kvlayout import KVLayout, kv_layout
from kvplan.spec.catalogue import find_gpu, find_model, model_entries
from kvplan.spec.engine import EngineSettings, resolve
from kvplan.spec.model import Layer, LayerKind, ModelSpec

GIB = 1 << 30


def layout_of(name: str, **flags: object) -> KVLayout:
    model = find_model(name).spec
    return kv_layout(model, resolve(EngineSettings(**flags), model, find_gpu("h100")))  # type: ignore[arg-type]


def shape(layers: list[Layer]) -> ModelSpec:
    return ModelSpec("made", "", tuple(layers), 0, 0, 0, 0, 0)


def test_every_model_of_the_catalogue_is_laid_out_or_refused_by_name():
    """State <= held <= asked for, in bytes, at 512 tokens; only DeepSeek-V4 is refused."""
    gpu = find_gpu("h200")
    laid_out = 0
    refused: list[str] = []
    for entry in model_entries():
        try:
            model = entry.spec()
        except InputError as error:
            refused.append(str(error))
            continue
        e = estimate(model, gpu, EngineSettings(max_model_len=512))
        length = e.engine.max_model_len
        held = e.layout.held_blocks(length) * e.layout.bytes_per_block
        assert e.layout.exact_bytes(length) <= held <= e.needed_bytes_one_request, entry.id
        laid_out += 1
    assert laid_out >= 100
    assert all("DeepseekV4" in message for message in refused), refused


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 40),
    kv_heads=st.sampled_from((1, 2, 4, 8, 16)),
    head_dim=st.sampled_from((64, 80, 128, 192)),
    block_size=st.sampled_from((1, 8, 16, 64, 256)),
    length=st.integers(1, 100_000),
    available=st.integers(0, 80 * GIB),
)
def test_uniform_model_follows_the_formula(layers, kv_heads, head_dim, block_size, length, available):
    """One group: blocks = floor(available / (2·L·B·h·d·b)), a request takes ceil(n / B) of them."""
    layer = Layer(LayerKind.FULL, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=head_dim)
    model = shape([layer] * layers)
    flags = EngineSettings(block_size=block_size, max_model_len=length)
    layout = kv_layout(model, resolve(flags, model, None))
    block = kv_bytes(layers, block_size, kv_heads, head_dim, 2)
    assert layout.bytes_per_block == block
    assert layout.num_blocks(available) == available // block
    assert layout.blocks_per_request(length) == -(-length // block_size)
    longest = layout.longest_request(available, 1 << 20)
    assert longest == 0 or layout.startup_bytes(longest) <= available
    assert longest == 1 << 20 or layout.startup_bytes(longest + 1) > available


@settings(max_examples=40, deadline=None)
@given(
    full=st.integers(1, 12),
    sliding=st.integers(1, 60),
    window=st.sampled_from((128, 512, 1024, 4096)),
    tokens=st.lists(st.integers(1, 200_000), min_size=2, max_size=6),
)
def test_window_hybrid_never_shrinks_as_a_request_grows(full, sliding, window, tokens):
    """Asked-for blocks rise with length and are bounded in the window groups; every layer is in one group."""
    model = shape(
        [Layer(LayerKind.SLIDING, kv_heads=8, head_dim=128, v_head_dim=128, window=window)] * sliding
        + [Layer(LayerKind.FULL, kv_heads=8, head_dim=128, v_head_dim=128)] * full
    )
    layout = kv_layout(model, resolve(EngineSettings(max_model_len=200_000), model, None))
    assert sum(group.layers for group in layout.groups) == full + sliding
    assert max(group.layers for group in layout.groups) * 65536 == layout.bytes_per_block
    asked = [layout.blocks_per_request(n) for n in sorted(tokens)]
    assert asked == sorted(asked)
    for group in layout.groups:
        if group.kind is LayerKind.SLIDING:
            assert group.held_blocks(200_000) <= -(-window // 16) + 1


def test_pages_of_two_sizes_are_unified_by_longer_blocks():
    """MiMo-V2-Flash: window layers have 8 KV heads, full ones 4 (192 + 128 elements a head), so a full
    layer's block takes twice the tokens. By hand: 16·8·320·2 = 32·4·320·2 = 81,920 bytes a page; 39 window
    layers in ceil(39 / 9) = 5 groups."""
    layout = layout_of("XiaomiMiMo/MiMo-V2-Flash", max_model_len=32768)
    assert {(g.kind.value, g.block_size, g.page_bytes) for g in layout.groups} == {
        ("sliding", 16, 81_920),
        ("full", 32, 81_920),
    }
    assert len(layout.groups) == 6
    assert layout.bytes_per_block == 9 * 81_920


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("deepseek-v3", "auto", 61 * 576 * 2),  # KV_SIZING_RULES 3
        ("deepseek-v3", "fp8", 61 * 576),
        ("deepseek-v3", "fp8_ds_mla", 61 * 656),
        ("deepseek-v3.2", "fp8", 61 * (656 + 132)),
        ("glm-5.1", "auto", 78 * (1152 + 132)),
        ("llama-3.1-8b", "fp8_per_token_head", 32 * 8 * 2 * (128 + 4)),  # a 4-byte scale a head, K and V
    ],
)
def test_bytes_per_token(name, dtype, expected):
    assert layout_of(name, kv_cache_dtype=dtype, max_model_len=4096).bytes_per_token == expected


def test_mla_is_on_every_rank_and_context_parallel_multiplies_tokens():
    """Kimi-K2, KV_SIZING_RULES 3: TP changes nothing, decode context parallel 8 gives 8 times the tokens."""
    one, eight = (
        layout_of("kimi-k2-thinking", tensor_parallel_size=8, decode_context_parallel_size=d) for d in (1, 8)
    )
    assert one.bytes_per_token == eight.bytes_per_token == 70_272
    blocks = one.num_blocks(46 * GIB)
    assert eight.cache_tokens(blocks) == pytest.approx(8 * one.cache_tokens(blocks), rel=1e-3)


def test_async_scheduling_doubles_in_flight_tokens_from_0_26():
    """SCHEDULER_RULES 9. gemma-3-27b's window groups asked for 1,023 + 8,192 tokens, now 1,023 + 16,384."""
    asked = {}
    for version in ("0.19", "0.25", "0.26"):
        layout = layout_of("gemma-3-27b", engine_version=version, max_model_len=65536)
        asked[version] = layout.blocks_per_request(65536)
    assert asked == {"0.19": 4096 + 6 * 577, "0.25": 4096 + 6 * 577, "0.26": 4096 + 6 * 1089}


def test_exact_state_counts_a_window_only_as_far_as_it_is_filled():
    """Mistral-7B: 32 layers of window 4,096, 4 KiB a token each: 512 tokens hold 512, 32,768 hold 4,096."""
    layout = layout_of("mistralai/Mistral-7B-v0.1", max_model_len=32768)
    assert layout.bytes_per_token == 0
    assert layout.fixed_bytes_per_request == 32 * 4096 * 4096
    assert layout.exact_bytes(512) == 32 * 512 * 4096
    assert layout.exact_bytes(32768) == 32 * 4096 * 4096


def test_hybrid_manager_off_charges_windows_in_full():
    """vllm#39254: 62 layers of gemma-3-27b at full length, no window saving."""
    layout = layout_of("gemma-3-27b", disable_hybrid_kv_cache_manager=True, max_model_len=65536)
    assert layout.is_uniform
    assert layout.bytes_per_token == 62 * 8192


def test_uneven_pipeline_stages():
    """62 layers on 4 stages: 15, 16, 16, 15; the pool is the smallest over the stages."""
    layout = layout_of("gemma-3-27b", pipeline_parallel_size=4, max_model_len=8192)
    assert len(layout.stage_block_bytes) == 4
    available = [8 * GIB, 8 * GIB, 8 * GIB, 2 * GIB]
    assert layout.num_blocks(available) == min(
        have // block for have, block in zip(available, layout.stage_block_bytes, strict=True)
    )


def test_pool_for_a_simulation_equals_the_estimate():
    model, gpu = find_model("llama-3.1-8b").spec, find_gpu("h100")
    plan = pool_for(model, gpu, EngineSettings(max_model_len=8192))
    e = estimate(model, gpu, EngineSettings(max_model_len=8192))
    assert (plan.num_gpu_blocks, plan.bytes_per_block) == (e.num_gpu_blocks, 2 << 20)
    assert plan.verdict.fits
    given_pool = pool_for(model, gpu, EngineSettings(max_model_len=8192, num_gpu_blocks_override=2588))
    assert given_pool.num_gpu_blocks == 2588


def test_draft_layers_share_the_pool():
    """Qwen3.6-27B TP 2 with its MTP layer, fp8 KV: 17 layers a group, blocks of 1,600 tokens.

    Source: the note of evidence row club3090-642-qwen36-27b-int4.
    """
    layout = layout_of(
        "qwen3.6-27b",
        tensor_parallel_size=2,
        num_speculative_tokens=3,
        kv_cache_dtype="fp8",
        max_model_len=262144,
    )
    assert layout.block_size == 1600
    assert layout.bytes_per_block == 27_852_800
    assert layout.blocks_per_request(262144) == 164 + 3 * (2 + 3)


def test_a_shape_without_kv_is_refused():
    model = shape([Layer(LayerKind.NONE)])
    with pytest.raises(InputError, match="keeps no KV cache"):
        kv_layout(model, resolve(EngineSettings(max_model_len=10), model, None))


def test_mixed_pages_in_the_block_outermost_layout_are_refused():
    """No record shows how packed groups are cut; a guess would be a number without a source."""
    model = find_model("XiaomiMiMo/MiMo-V2-Flash").spec
    engine = resolve(EngineSettings(kv_cache_layout="BLNHC"), model, None)
    with pytest.raises(InputError, match="BLNHC"):
        kv_layout(model, engine)
    assert kv_layout(model, replace(engine, settings=EngineSettings())).bytes_per_block
