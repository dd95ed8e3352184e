"""Weights of the part of a layer that mixes tokens: attention of every kind, linear attention, Mamba."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvplan.spec.architectures import Architecture
from kvplan.spec.fields import Fields
from kvplan.spec.layouts import mamba1_inner
from kvplan.spec.model import Layer, LayerKind
from kvplan.spec.tensor import Split, Tensor


def vector(part: str, name: str, size: int, split: Split = Split.NONE) -> Tensor:
    """A tensor of one dimension: norm, bias, gate."""
    return Tensor(part, name, size, split=split)


def linear(part: str, name: str, out: int, in_: int, split: Split, bias: bool = False) -> Iterator[Tensor]:
    """A matrix that quantisation formats cover, and its bias."""
    yield Tensor(part, name, out, in_, split, quantised=True)
    if bias:
        yield vector(part, name + ".bias", out, Split.OUT if split is Split.OUT else Split.NONE)


def says(fields: Fields, said: bool | str) -> bool:
    """A fact that the architecture states, or names the config key of."""
    return fields.flag(said) if isinstance(said, str) else said


def attention(fields: Fields, arch: Architecture, layer: Layer) -> Iterator[Tensor]:
    """q, k and v in one tensor, o, and what stands beside them (norms of q and k, sinks)."""
    hidden = fields.int("hidden_size")
    q = layer.heads * layer.head_dim * (2 if arch.output_gate else 1)
    # Gemma 4's full layers use K as V and store no v_proj; the engine makes the copy all the same.
    same_kv = (
        fields.flag("attention_k_eq_v") and layer.kind is LayerKind.FULL and fields.has("global_head_dim")
    )
    kv = layer.kv_heads * (layer.head_dim + layer.v_head_dim)
    stored = layer.kv_heads * layer.head_dim if same_kv else kv
    qkv = Tensor("attention", "self_attn.qkv_proj", q + stored, hidden, Split.OUT, kv_heads=layer.kv_heads,
                 kv_out=stored, quantised=True)  # fmt: skip
    yield qkv
    if same_kv:
        yield Tensor("attention", "self_attn.v_copy", kv - stored, hidden, Split.OUT, kv_heads=layer.kv_heads,
                     kv_out=kv - stored, quantised=True, engine_only=True)  # fmt: skip
    if says(fields, arch.qkv_bias):
        yield replace(qkv, name="self_attn.qkv_proj.bias", in_=1, quantised=False)
    yield from linear("attention", "self_attn.o_proj", hidden, layer.heads * layer.v_head_dim, Split.IN,
                       says(fields, arch.o_bias))  # fmt: skip
    if arch.qk_norm and (not arch.qk_norm_key or fields.flag(arch.qk_norm_key)):
        per_head = {"head": 2, "gemma4": 2, "heads": layer.heads + layer.kv_heads}
        if arch.qk_norm == "all":
            size = (layer.heads + layer.kv_heads) * layer.head_dim
        else:
            size = per_head[arch.qk_norm] * layer.head_dim
        yield vector("attention", "self_attn.qk_norm", size)
    if fields.text("model_type") == "gpt_oss":
        yield vector("attention", "self_attn.sinks", layer.heads)


def latent_attention(fields: Fields, layer: Layer) -> Iterator[Tensor]:
    """MLA: down-projections on every rank, up-projections cut by heads, the indexer of sparse attention."""
    hidden, heads, latent = fields.int("hidden_size"), layer.heads, layer.latent_dim
    nope = layer.head_dim - layer.rope_dim
    q_rank = fields.optional_int("q_lora_rank")
    q_in = q_rank or hidden
    if q_rank:
        yield from linear("attention_replicated", "self_attn.q_a_proj", q_rank, hidden, Split.NONE)
        yield vector("attention_replicated", "self_attn.q_a_layernorm", q_rank)
    yield from linear("attention", "self_attn.q_b_proj", heads * layer.head_dim, q_in, Split.OUT)
    yield from linear(
        "attention_replicated", "self_attn.kv_a_proj", latent + layer.rope_dim, hidden, Split.NONE
    )
    yield vector("attention_replicated", "self_attn.kv_a_layernorm", latent)
    yield from linear(
        "attention", "self_attn.kv_b_proj", heads * (nope + layer.v_head_dim), latent, Split.OUT
    )
    yield from linear("attention", "self_attn.o_proj", hidden, heads * layer.v_head_dim, Split.IN)
    # The absorbed forms that decode multiplies with, kept beside kv_b in 16 bit.
    yield Tensor("attention", "absorbed kv_b", heads * (nope + layer.v_head_dim), latent, Split.OUT,
                 engine_only=True)  # fmt: skip
    if layer.index_dim:
        index_heads = fields.int("index_n_heads")
        yield from linear("attention_replicated", "self_attn.indexer.wq_b", index_heads * layer.index_dim,
                           q_in, Split.NONE)  # fmt: skip
        yield from linear("attention_replicated", "self_attn.indexer.wk", layer.index_dim, hidden, Split.NONE)
        yield vector("attention_replicated", "self_attn.indexer.k_norm", 2 * layer.index_dim)
        yield Tensor("attention_replicated", "self_attn.indexer.weights_proj", index_heads, hidden)


def state_mixer(fields: Fields, arch: Architecture, layer: Layer) -> Iterator[Tensor]:
    """A layer with a fixed state: lightning, gated delta rule, Mamba 1 or 2."""
    hidden = fields.int("hidden_size")
    if arch.layout == "minimax_m1":
        width = layer.heads * layer.head_dim
        yield from linear("state", "self_attn.qkv_proj", 3 * width, hidden, Split.OUT)
        yield from linear("state", "self_attn.output_gate", width, hidden, Split.OUT)
        yield from linear("state", "self_attn.out_proj", hidden, width, Split.IN)
        yield vector("state", "self_attn.norm", width, Split.OUT)
    elif arch.layout == "kimi_linear":
        width = layer.heads * layer.head_dim
        yield from linear("state", "self_attn.qkv_proj", 3 * width, hidden, Split.OUT)
        yield from linear("state", "self_attn.gates", 2 * width, hidden, Split.OUT)
        yield from linear("state", "self_attn.o_proj", hidden, width, Split.IN)
    elif fields.has("linear_num_value_heads"):
        yield from _gated_delta(fields, hidden)
    elif arch.layout in ("mamba", "jamba"):
        yield from _mamba1(fields, hidden, norms=arch.layout == "jamba")
    else:
        yield from mamba2(fields, hidden)


def _gated_delta(fields: Fields, hidden: int) -> Iterator[Tensor]:
    heads, dim = fields.int("linear_num_value_heads"), fields.int("linear_value_head_dim")
    key = fields.int("linear_num_key_heads") * fields.int("linear_key_head_dim")
    value = heads * dim
    yield from linear("state", "linear_attn.in_proj_qkvz", 2 * key + 2 * value, hidden, Split.OUT)
    yield Tensor("state", "linear_attn.in_proj_ba", 2 * heads, hidden, Split.OUT)
    kernel = fields.int("linear_conv_kernel_dim")
    yield Tensor("state", "linear_attn.conv1d", 2 * key + value, kernel, Split.OUT)
    yield vector("state", "linear_attn.A_log, dt_bias", 2 * heads, Split.OUT)
    yield vector("state", "linear_attn.norm", dim)
    yield from linear("state", "linear_attn.out_proj", hidden, value, Split.IN)


def mamba2(fields: Fields, hidden: int) -> Iterator[Tensor]:
    """Mamba-2: one input projection for z, x, B, C and dt."""
    heads, groups = fields.int("mamba_num_heads"), fields.int("mamba_groups")
    inner = heads * fields.int("mamba_head_dim")
    conv = inner + 2 * groups * fields.int("mamba_state_size")
    yield from linear("state", "mamba.in_proj", inner + conv + heads, hidden, Split.OUT)
    yield Tensor("state", "mamba.conv1d", conv, fields.int("mamba_conv_kernel") + 1, Split.OUT)  # with bias
    yield vector("state", "mamba.A, D, dt_bias", 3 * heads, Split.OUT)
    yield vector("state", "mamba.norm", inner, Split.OUT)
    yield from linear("state", "mamba.out_proj", hidden, inner, Split.IN)


def _mamba1(fields: Fields, hidden: int, norms: bool) -> Iterator[Tensor]:
    inner, size = mamba1_inner(fields), fields.int("mamba_state_size")
    rank = fields.int("mamba_dt_rank", -(-hidden // 16))
    yield from linear("state", "mamba.in_proj", 2 * inner, hidden, Split.OUT)
    yield Tensor("state", "mamba.conv1d", inner, fields.int("mamba_conv_kernel") + 1, Split.OUT)
    yield from linear("state", "mamba.x_proj", rank + 2 * size, inner, Split.IN)
    yield from linear("state", "mamba.dt_proj", inner, rank, Split.OUT, bias=True)
    yield Tensor("state", "mamba.A, D", inner, size + 1, Split.OUT)
    yield from linear("state", "mamba.out_proj", hidden, inner, Split.IN)
    if norms:
        yield vector("state", "mamba.norms", rank + 2 * size)
