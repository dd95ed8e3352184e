"""Every weight of a model from its config: the shapes whose sum is the published parameter count.

Shapes are the engine's fused ones (BUDGET.md section 2): qkv in one tensor, gate and up in one, all experts
of a layer in two. Formulas are checked by the totals of the catalogue (tests/spec/test_parameters.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvplan.spec.architectures import Architecture
from kvplan.spec.fields import Fields
from kvplan.spec.layouts import nemotron_blocks
from kvplan.spec.mixers import attention, latent_attention, linear, mamba2, says, state_mixer, vector
from kvplan.spec.model import Layer, LayerKind, MoE
from kvplan.spec.tensor import Split, Tensor

ATTENTION = (LayerKind.FULL, LayerKind.SLIDING, LayerKind.CHUNKED, LayerKind.SHARED)
NOT_IN_LAYERS: tuple[int, ...] = ()


def tensors(
    fields: Fields, arch: Architecture, layers: Sequence[Layer], moe: MoE | None, tied: bool
) -> tuple[Tensor, ...]:
    """All weights of the text part; equal tensors of several layers are one entry.

    Raises InputError when the config lacks a size.
    """
    counted: dict[Tensor, list[int]] = {}
    for i, layer in enumerate(layers):
        for tensor in _layer(fields, arch, layer, moe, i):
            counted.setdefault(tensor, []).append(i)
    inside = [replace(tensor, layers=tuple(of)) for tensor, of in counted.items()]
    outside = [*_outside(fields, arch, tied), *_rotary(fields, arch, layers)]
    return (*inside, *outside, *_mtp(fields, arch, layers, moe))


# ---- one layer --------------------------------------------------------------------------------------


def _layer(fields: Fields, arch: Architecture, layer: Layer, moe: MoE | None, i: int) -> Iterator[Tensor]:
    hidden = fields.int("hidden_size")
    if arch.layout == "nemotron_h":
        yield from _nemotron_block(fields, arch, layer, moe, nemotron_blocks(fields)[i])
        return
    if layer.kind in ATTENTION:
        yield from attention(fields, arch, layer)
        if layer.index_dim:  # sparse attention over K and V (MiniMax-M3)
            yield from linear(
                "attention_replicated", "self_attn.indexer", layer.index_dim, hidden, Split.NONE
            )
    elif layer.kind is LayerKind.MLA:
        yield from latent_attention(fields, layer)
    elif layer.kind is LayerKind.STATE:
        yield from state_mixer(fields, arch, layer)
    norms = arch.norms
    if arch.layout == "falcon":
        norms = 2 if fields.flag("new_decoder_architecture") else 1
    if arch.layout == "deci":
        norms = (layer.kind is not LayerKind.NONE) + (_dense_width(fields, arch, i) > 0)
    yield vector("norms", "norms", norms * hidden * (2 if arch.norm_bias else 1))
    yield from _feed_forward(fields, arch, moe, i)
    if arch.layout == "gemma4":
        yield from _gemma_extras(fields, arch, moe)


# ---- feed-forward -----------------------------------------------------------------------------------


def _feed_forward(fields: Fields, arch: Architecture, moe: MoE | None, i: int) -> Iterator[Tensor]:
    hidden = fields.int("hidden_size")
    if moe is not None and is_moe_layer(fields, arch, i):
        yield from _experts(fields, arch, moe, hidden, fields.optional_int("moe_latent_size"))
        if fields.flag("enable_moe_block") or (arch.layout == "gemma4"):
            yield from _mlp(arch, fields, "mlp", _dense_width(fields, arch, i), hidden)
        return
    if arch.layout != "mamba":
        yield from _mlp(arch, fields, "mlp", _dense_width(fields, arch, i), hidden)


def _mlp(arch: Architecture, fields: Fields, name: str, width: int, hidden: int) -> Iterator[Tensor]:
    if not width:
        return
    bias = says(fields, arch.mlp_bias)
    yield from linear(
        "mlp", f"{name}.gate_up_proj", width * (2 if arch.gated else 1), hidden, Split.OUT, bias
    )
    yield from linear("mlp", f"{name}.down_proj", hidden, width, Split.IN, bias)


def _experts(fields: Fields, arch: Architecture, moe: MoE, hidden: int, latent: int = 0) -> Iterator[Tensor]:
    """Router, routed experts in two tensors, shared experts. ``latent``: experts work in a narrower space."""
    inside, gates = latent or hidden, 2 if arch.gated else 1
    bias = arch.mlp_bias is True  # gpt-oss: every expert matrix and the router have one
    yield Tensor("router", "mlp.router", moe.experts, hidden)
    if arch.router_bias or bias:
        yield vector("router", "mlp.router.bias", moe.experts)
    w13 = Tensor("experts", "mlp.experts.gate_up_proj", gates * moe.intermediate_size, inside,
                 Split.EXPERT_OUT, moe.experts, gates, quantised=True)  # fmt: skip
    w2 = replace(
        w13,
        stacked=1,
        name="mlp.experts.down_proj",
        out=inside,
        in_=moe.intermediate_size,
        split=Split.EXPERT_IN,
    )
    yield w13
    yield w2
    if bias:
        yield replace(w13, name="mlp.experts.gate_up_proj_bias", in_=1, quantised=False)
        yield replace(w2, name="mlp.experts.down_proj_bias", in_=1, quantised=False)
    if latent:
        yield from linear("mlp", "mlp.latent_proj", 2 * latent, hidden, Split.NONE)
    yield from _mlp(arch, fields, "mlp.shared_experts", moe.shared_intermediate_size, hidden)
    if arch.shared_gate and moe.shared_intermediate_size:
        yield vector("router", "mlp.shared_expert_gate", hidden)


def is_moe_layer(fields: Fields, arch: Architecture, i: int) -> bool:
    """Whether layer ``i`` has routed experts: each config family has its own way to say so."""
    kinds = fields.items("mlp_layer_types")
    if kinds:
        return bool(i < len(kinds) and kinds[i] == "sparse")
    frequency = fields.raw("moe_layer_freq")[1]
    if isinstance(frequency, list):
        return bool(i < len(frequency) and frequency[i])
    if i in (fields.items("mlp_only_layers") or ()):
        return False
    step = fields.int("interleave_moe_layer_step", fields.int("decoder_sparse_step", 1))
    if arch.layout == "jamba":
        return i % fields.int("expert_layer_period") == fields.optional_int("expert_layer_offset")
    first = fields.optional_int("first_k_dense_replace") or fields.optional_int("moe_layer_start_index")
    return i >= first and (i + 1) % step == 0


def _dense_width(fields: Fields, arch: Architecture, i: int) -> int:
    """Width of the dense MLP of layer ``i``; 0 when it has none."""
    if arch.layout == "deci":
        return _deci_width(fields, i)
    if arch.layout == "layer_types" and fields.has("mamba_num_heads"):  # Granite 4: the shared MLP is the MLP
        return fields.int("shared_expert_intermediate_size", fields.int("intermediate_size"))
    width = fields.int("dense_intermediate_size", 0) if fields.has("dense_intermediate_size") else 0
    width = width or fields.int("intermediate_size", 4 * fields.int("hidden_size"))
    if arch.layout == "qwen1":
        return width // 2  # Qwen 1 states the width of both halves
    if fields.flag("use_double_wide_mlp"):
        first_shared = fields.int("num_hidden_layers") - fields.optional_int("num_kv_shared_layers")
        return width * (2 if i >= first_shared else 1)
    return width


def _deci_width(fields: Fields, i: int) -> int:
    block = (fields.items("block_configs") or [])[i].get("ffn")
    if not isinstance(block, dict) or block.get("no_op"):
        return 0
    factor = block.get("ffn_mult")
    if not isinstance(factor, int | float) or not 0 < factor < 1000:
        raise fields.error(f"block_configs[{i}].ffn.ffn_mult is {factor!r}")
    width = int(2 * factor * fields.int("hidden_size") / 3)
    return -(-width // 256) * 256


def _nemotron_block(
    fields: Fields, arch: Architecture, layer: Layer, moe: MoE | None, kind: str
) -> Iterator[Tensor]:
    hidden = fields.int("hidden_size")
    yield vector("norms", "norms", hidden)
    if kind == "mamba":
        yield from mamba2(fields, hidden)
    elif kind == "attention":
        yield from attention(fields, arch, layer)
    elif kind == "moe":
        if moe is None:
            raise fields.missing("num_experts")
        yield from _experts(fields, arch, moe, hidden, fields.optional_int("moe_latent_size"))
    else:
        yield from _mlp(arch, fields, "mixer", fields.int("intermediate_size"), hidden)


def _gemma_extras(fields: Fields, arch: Architecture, moe: MoE | None) -> Iterator[Tensor]:
    """Per-layer embeddings of Gemma 3n and 4, and the small tensors around them."""
    hidden, per_layer = fields.int("hidden_size"), fields.optional_int("hidden_size_per_layer_input")
    yield vector("other", "layer_scalar", 1)
    if per_layer:
        yield from linear("other", "per_layer_input_gate", 2 * per_layer, hidden, Split.NONE)
        yield vector("norms", "post_per_layer_input_norm", hidden)
    if moe is not None:
        yield vector("router", "router.scale, expert norms", 4 * hidden + moe.experts)
    if arch.qk_norm == "head":  # Gemma 3n: LAuReL of rank 64, AltUp over 4 streams
        yield Tensor("other", "laurel", 2 * 64, hidden)
        yield vector("other", "altup", 7 * hidden + 80)


def _encoder(fields: Fields, arch: Architecture) -> Iterator[Tensor]:
    """The encoder of an encoder-decoder, and the decoder layers' attention to it."""
    hidden, inner = (
        fields.int("hidden_size"),
        fields.int("d_kv", 0) * fields.int("num_attention_heads")
        if (fields.has("d_kv"))
        else fields.int("hidden_size"),
    )
    decoders, width = (
        fields.int("num_hidden_layers"),
        fields.int("encoder_ffn_dim", fields.int("intermediate_size")),
    )
    layers = fields.int("encoder_layers", fields.int("num_layers", decoders))
    attention = 4 * hidden * inner
    yield Tensor("attention", "encoder_attn", decoders * attention, split=Split.OUT)
    yield Tensor("other", "encoder", layers * (attention + 2 * hidden * width), split=Split.OUT)
    if fields.has("max_source_positions"):
        yield Tensor("other", "encoder positions", fields.int("max_source_positions"), hidden)
        mel = fields.int("num_mel_bins", 80)
        yield Tensor("other", "encoder convolutions", 3 * hidden * (mel + hidden))


# ---- outside the layers -----------------------------------------------------------------------------


def _outside(fields: Fields, arch: Architecture, tied: bool) -> Iterator[Tensor]:
    hidden, vocab = fields.int("hidden_size"), fields.int("vocab_size")
    yield Tensor("embedding", "embed_tokens", vocab, hidden, Split.VOCAB, stage="first")
    if tied:  # one copy, but the last of several pipeline stages needs its own
        yield Tensor("lm_head", "embed_tokens", vocab, hidden, Split.VOCAB, engine_only=True, stage="tied")
    else:
        yield Tensor("lm_head", "lm_head", vocab, hidden, Split.VOCAB, stage="last")
    if arch.layout == "decoder":
        yield from _encoder(fields, arch)
    if arch.head_bias:
        yield vector("lm_head", "lm_head.bias", vocab, Split.VOCAB)
    if arch.position_rows_extra >= 0:
        rows = fields.int("max_position_embeddings") + arch.position_rows_extra
        yield replace(Tensor("embedding", "embed_positions", rows, hidden), stage="first")
    if arch.embedding_norm:
        yield replace(vector("norms", "embedding_norm", 2 * hidden), stage="first")
    if arch.final_norm:
        yield replace(vector("norms", "final_norm", hidden * (2 if arch.norm_bias else 1)), stage="last")
    per_layer, count = fields.optional_int("hidden_size_per_layer_input"), fields.int("num_hidden_layers")
    if per_layer:
        rows = fields.int("vocab_size_per_layer_input", min(vocab, 262144))
        yield Tensor(
            "embedding", "embed_tokens_per_layer", rows, count * per_layer, Split.VOCAB, stage="first"
        )
        yield Tensor("other", "per_layer_model_projection", count * per_layer, hidden, stage="first")
        yield vector("norms", "per_layer_projection_norm", per_layer)
        if arch.qk_norm == "head":
            yield Tensor("other", "altup_projections", 6 * hidden, hidden, stage="first")


def _rotary(fields: Fields, arch: Architecture, layers: Sequence[Layer]) -> Iterator[Tensor]:
    """Tables of cosines and sines that engines keep, a row per position (BUDGET.md section 2)."""
    if not arch.rotary or arch.position_rows_extra >= 0 or not fields.has("max_position_embeddings"):
        return
    scaling = fields.section("rope_scaling")
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor", 1)
    rows = fields.int("max_position_embeddings")
    linear = kind == "linear" and isinstance(factor, int | float)
    share = fields.raw("partial_rotary_factor")[1]
    share = share if isinstance(share, int | float) and 0 < share <= 1 else arch.rotary_share
    latent = next((layer for layer in layers if layer.kind is LayerKind.MLA), None)
    if latent is not None:
        size = 4 if "yarn" in str(kind) else 0
        yield Tensor("other", "rotary table", rows, latent.rope_dim, engine_only=True, bytes_per_element=size)
        return
    seen = {(layer.kind, layer.head_dim) for layer in layers if layer.kind in ATTENTION}
    full = [dim for of, dim in seen if of is not LayerKind.SLIDING]
    local = [dim for of, dim in seen if of is LayerKind.SLIDING]
    for dim in dict.fromkeys(full or local):
        stretched = int(rows * factor) if linear else rows
        yield Tensor("other", "rotary table", stretched, int(dim * share), engine_only=True)
    if full and local and (linear or arch.layout == "gemma4"):
        yield Tensor("other", "rotary table, windowed", rows, local[0], engine_only=True)


def _mtp(fields: Fields, arch: Architecture, layers: Sequence[Layer], moe: MoE | None) -> Iterator[Tensor]:
    """Multi-token-prediction layers: a decoder layer, a projection of twice the width, three norms."""
    count = (fields.optional_int("mtp_layers") or arch.mtp_layers) if arch.mtp_in_file else 0
    if not count:
        return
    hidden, last = fields.int("hidden_size"), len(layers) - 1
    size = 2 * hidden * hidden + 3 * hidden
    if arch.layout == "nemotron_h":
        attention = next(layer for layer in layers if layer.kind is LayerKind.FULL)
        for kind in ("attention", "moe"):
            size += sum(
                t.elements for t in _nemotron_block(fields, arch, attention, moe, kind) if not t.engine_only
            )
    else:
        of = next(
            (i for i in range(last, -1, -1) if layers[i].kind not in (LayerKind.STATE, LayerKind.NONE)), last
        )
        size += sum(t.elements for t in _layer(fields, arch, layers[of], moe, of) if not t.engine_only)
    if arch.mtp_own_embedding:
        size += 2 * fields.int("vocab_size") * hidden
    yield Tensor("mtp", "mtp", count * size, stage="mtp")
