"""From config fields to layers: one function a layout, named in the table of architectures.

Each returns one `Layer` per decoder layer and appends what had to be assumed to ``notes``.
Patterns and dimensions are those of the published config classes; rules that engines follow instead are
named where they differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvplan.spec.architectures import Architecture
from kvplan.spec.fields import Fields
from kvplan.spec.model import Layer, LayerKind, StateShape

BYTES_PER_ELEMENT = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}

Notes = list[str]
Layout = Callable[[Fields, Architecture, Notes], list[Layer]]
FULL, SLIDING, CHUNKED = LayerKind.FULL, LayerKind.SLIDING, LayerKind.CHUNKED


def attention_layer(fields: Fields, kv_heads: int | None = None) -> Layer:
    """One full-attention layer of this config; KV heads default to heads, head_dim to hidden / heads."""
    heads = fields.int("num_attention_heads")
    if kv_heads is None:
        kv_heads = fields.int("num_key_value_heads", heads)
    head_dim = fields.int("head_dim", 0 if fields.has("head_dim") else _even_head_dim(fields, heads))
    if kv_heads > heads or heads % kv_heads:
        raise fields.error(f"{heads} attention heads do not divide into {kv_heads} KV heads")
    return Layer(FULL, heads, kv_heads, head_dim, head_dim)


def _even_head_dim(fields: Fields, heads: int) -> int:
    hidden = fields.int("hidden_size")
    if hidden % heads:
        raise fields.error(f"head_dim is missing and hidden_size {hidden} is no multiple of {heads} heads")
    return hidden // heads


def _count(fields: Fields) -> int:
    return fields.int("num_hidden_layers")


def _window(fields: Fields, key: str = "sliding_window") -> int:
    """Tokens of the window; 0 when the config has none or says that it is not used."""
    return fields.optional_int(key) if fields.flag("use_sliding_window", True) else 0


def _windowed(layer: Layer, window: int, kind: LayerKind = SLIDING) -> Layer:
    return replace(layer, kind=kind, window=window) if window else layer


def uniform(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    if fields.items("layer_types"):
        return layer_types(fields, arch, notes)
    return [attention_layer(fields)] * _count(fields)


def window_all(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    if fields.items("layer_types"):
        return layer_types(fields, arch, notes)
    return [_windowed(attention_layer(fields), _window(fields))] * _count(fields)


def qwen2(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    """The window counts only where use_sliding_window says so, and from layer max_window_layers on."""
    if not fields.flag("use_sliding_window"):
        return [attention_layer(fields)] * _count(fields)
    if fields.items("layer_types"):
        return layer_types(fields, arch, notes)
    first = fields.optional_int("max_window_layers")
    layer, window = attention_layer(fields), _window(fields)
    return [_windowed(layer, window if i >= first else 0) for i in range(_count(fields))]


def phi3(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    if fields.optional_int("sliding_window"):
        window = fields.optional_int("sliding_window")
        notes.append(f"sliding_window {window:,} counted as full attention, as vLLM does")
    return [attention_layer(fields)] * _count(fields)


def alternate(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    """Gemma 2: every other layer is windowed, the first one is."""
    if fields.items("layer_types"):
        return layer_types(fields, arch, notes)
    layer, window = attention_layer(fields), _window(fields)
    return [_windowed(layer, 0 if i % 2 else window) for i in range(_count(fields))]


def pattern(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    """Every ``sliding_window_pattern``-th layer is full, the others are windowed."""
    if fields.items("layer_types"):
        return layer_types(fields, arch, notes)
    layer, window, every = attention_layer(fields), _window(fields), fields.int("sliding_window_pattern")
    return [_windowed(layer, window if (i + 1) % every else 0) for i in range(_count(fields))]


def llama4(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    """Three layers in chunks of attention_chunk_size, then one full without rotary positions."""
    layer, chunk = attention_layer(fields), fields.int("attention_chunk_size")
    rope = fields.items("no_rope_layers") or []
    if rope and len(rope) == _count(fields):
        return [_windowed(layer, chunk if uses_rope else 0, CHUNKED) for uses_rope in rope]
    if fields.items("layer_types"):
        return layer_types(fields, arch, notes)
    notes.append("3 chunked layers to 1 full (class default; the config gives no pattern)")
    return [_windowed(layer, chunk if (i + 1) % 4 else 0, CHUNKED) for i in range(_count(fields))]


def layer_types(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    """The explicit list of today's configs."""
    names = fields.items("layer_types", _count(fields))
    if names is None:
        raise fields.missing("layer_types")
    made: dict[str, Layer] = {}
    for name in names:
        if name not in made:
            made[name] = _layer_of_type(fields, arch, name)
    return [made[name] for name in names]


def _layer_of_type(fields: Fields, arch: Architecture, name: object) -> Layer:
    if name in ("full_attention", "attention"):
        return attention_layer(fields)
    if name == "sliding_attention":
        return _windowed(attention_layer(fields), fields.int("sliding_window"))
    if name == "chunked_attention":
        return _windowed(attention_layer(fields), fields.int("attention_chunk_size"), CHUNKED)
    if name == "linear_attention":
        return Layer(LayerKind.STATE, state=gated_delta_state(fields, arch))
    if name == "mamba":
        return Layer(LayerKind.STATE, state=mamba2_state(fields, arch))
    raise fields.error(f"layer_types names {name!r}, which is not known here")


def gdn(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    """Qwen3-Next and Qwen3.5: every full_attention_interval-th layer is full, the others gated delta rule."""
    if fields.items("layer_types"):
        return layer_types(fields, arch, notes)
    every = fields.int("full_attention_interval")
    full, state = attention_layer(fields), Layer(LayerKind.STATE, state=gated_delta_state(fields, arch))
    return [state if (i + 1) % every else full for i in range(_count(fields))]


def gated_delta_state(fields: Fields, arch: Architecture) -> StateShape:
    """One key-by-value matrix per value head, and the conv window over q, k and v."""
    k_heads, v_heads = fields.int("linear_num_key_heads"), fields.int("linear_num_value_heads")
    k_dim, v_dim = fields.int("linear_key_head_dim"), fields.int("linear_value_head_dim")
    columns = fields.int("linear_conv_kernel_dim") - 1
    conv = (2 * k_heads * k_dim + v_heads * v_dim) * columns
    return _state(fields, arch, v_heads * k_dim * v_dim, conv, columns)


def mamba2_state(fields: Fields, arch: Architecture) -> StateShape:
    heads, dim, groups = (fields.int(k) for k in ("mamba_num_heads", "mamba_head_dim", "mamba_groups"))
    size, columns = fields.int("mamba_state_size"), fields.int("mamba_conv_kernel") - 1
    state = _state(fields, arch, heads * dim * size, (heads * dim + 2 * groups * size) * columns, columns)
    return replace(state, groups=groups, group_elements=2 * size * columns)


def mamba1_state(fields: Fields, arch: Architecture) -> StateShape:
    inner = mamba1_inner(fields)
    size, columns = fields.int("mamba_state_size"), fields.int("mamba_conv_kernel") - 1
    return _state(fields, arch, inner * size, inner * columns, columns)


def mamba1_inner(fields: Fields) -> int:
    return fields.int("mamba_expand") * fields.int("hidden_size")


def _state(fields: Fields, arch: Architecture, ssm: int, conv: int, columns: int) -> StateShape:
    model_bytes = BYTES_PER_ELEMENT.get(fields.text("dtype", "bfloat16"), 2)
    named = fields.text("mamba_ssm_dtype", arch.ssm_dtype)
    return StateShape(ssm, conv, columns, BYTES_PER_ELEMENT.get(named, model_bytes), min(model_bytes, 2))


def mamba(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    return [Layer(LayerKind.STATE, state=mamba1_state(fields, arch))] * _count(fields)


def jamba(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    period, offset = fields.int("attn_layer_period"), fields.optional_int("attn_layer_offset")
    state, full = Layer(LayerKind.STATE, state=mamba1_state(fields, arch)), attention_layer(fields)
    return [full if i % period == offset else state for i in range(_count(fields))]


def bamba(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    """Bamba: the layers listed are attention, the others Mamba-2."""
    listed = fields.items("attn_layer_indices")
    if listed is None:
        raise fields.missing("attn_layer_indices")
    state, full = Layer(LayerKind.STATE, state=mamba2_state(fields, arch)), attention_layer(fields)
    return [full if i in listed else state for i in range(_count(fields))]


def nemotron_h(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    """Nemotron-H: a letter (or word) a block; MLP and MoE blocks are layers that keep nothing."""
    kinds = nemotron_blocks(fields)
    mamba_layer = Layer(LayerKind.STATE, state=mamba2_state(fields, arch)) if "mamba" in kinds else None
    none, full = Layer(LayerKind.NONE), attention_layer(fields) if "attention" in kinds else None
    by_kind = {"mamba": mamba_layer, "attention": full, "mlp": none, "moe": none}
    return [layer for kind in kinds if (layer := by_kind[kind]) is not None]


def nemotron_blocks(fields: Fields) -> list[str]:
    """Block kinds in order: mamba, attention, mlp or moe."""
    letters = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    text = fields.text("hybrid_override_pattern")
    blocks = [letters.get(c, c) for c in text] if text else fields.items("layers_block_type")
    if not blocks:
        raise fields.error("hybrid_override_pattern (or layers_block_type) is missing")
    unknown = [block for block in blocks if block not in letters.values()]
    if unknown:
        raise fields.error(f"the block pattern names {unknown[0]!r}, which is not known here")
    if fields.has("num_hidden_layers") and fields.int("num_hidden_layers") != len(blocks):
        raise fields.error(f"the block pattern has {len(blocks)} blocks, num_hidden_layers says otherwise")
    return [str(block) for block in blocks]


def minimax_m1(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    """MiniMax-M1: 1 is softmax attention, 0 lightning attention (a head_dim x head_dim state a head)."""
    kinds = fields.items("attn_type_list", _count(fields))
    if kinds is None:
        raise fields.missing("attn_type_list")
    full = attention_layer(fields)
    state = _state(fields, arch, full.heads * full.head_dim**2, 0, 0)
    linear = Layer(LayerKind.STATE, heads=full.heads, head_dim=full.head_dim, state=state)
    return [full if kind == 1 else linear for kind in kinds]


def minimax_m3(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    """Sparse layers keep an index key of sparse_index_dim beside K and V."""
    section = fields.section("sparse_attention_config")
    freq = section.get("sparse_attention_freq") or [0] * _count(fields)
    index_dim = section.get("sparse_index_dim", 0)
    if len(freq) != _count(fields) or not isinstance(index_dim, int):
        raise fields.error("sparse_attention_config does not fit num_hidden_layers")
    layer = attention_layer(fields)
    return [replace(layer, index_dim=index_dim if sparse else 0) for sparse in freq]


def mimo(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    """MiMo-V2: 1 is a windowed layer; these have their own KV heads, and V is narrower than K."""
    kinds = fields.items("hybrid_layer_pattern", _count(fields))
    if kinds is None:
        raise fields.missing("hybrid_layer_pattern")
    full = replace(attention_layer(fields), v_head_dim=fields.int("v_head_dim"))
    swa = Layer(
        SLIDING,
        fields.int("swa_num_attention_heads", full.heads),
        fields.int("swa_num_key_value_heads"),
        fields.int("swa_head_dim"),
        fields.int("swa_v_head_dim"),
        window=fields.int("sliding_window"),
    )
    return [swa if kind else full for kind in kinds]


def deci(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    """Nemotron-NAS: each block has its own number of KV heads, or no attention."""
    blocks = fields.items("block_configs", _count(fields))
    if blocks is None:
        raise fields.missing("block_configs")
    heads, layers = fields.int("num_attention_heads"), []
    for i, block in enumerate(blocks):
        part = block.get("attention") if isinstance(block, dict) else None
        if not isinstance(part, dict):
            raise fields.error(f"block_configs[{i}].attention is missing")
        group = part.get("n_heads_in_group")
        if part.get("no_op") or part.get("replace_with_linear"):
            layers.append(Layer(LayerKind.NONE))
        elif isinstance(group, int) and group > 0 and heads % group == 0:
            layers.append(attention_layer(fields, heads // group))
        else:
            raise fields.error(f"block_configs[{i}].attention.n_heads_in_group is {group!r}")
    return layers


def gemma4(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    """Gemma 3n and 4: full layers may have other heads; the last layers reuse an earlier layer's K and V."""
    layers = [
        _global(fields, layer) if layer.kind is FULL else layer for layer in layer_types(fields, arch, notes)
    ]
    shared = fields.optional_int("num_kv_shared_layers")
    if shared >= len(layers):
        raise fields.error(f"num_kv_shared_layers is {shared} of {len(layers)} layers")
    kept = len(layers) - shared
    return layers[:kept] + [replace(layer, kind=LayerKind.SHARED) for layer in layers[kept:]]


def _global(fields: Fields, layer: Layer) -> Layer:
    dim = fields.int("global_head_dim", layer.head_dim)
    kv_heads = fields.int("num_global_key_value_heads", layer.kv_heads)
    return replace(layer, kv_heads=kv_heads, head_dim=dim, v_head_dim=dim)


def mla(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    """DeepSeek's latent attention; sparse ones (DSA) keep an index key, GLM-5.2 only in its full indexers."""
    count = _count(fields)
    layer = _mla_layer(fields)
    index_dim = fields.optional_int("index_head_dim")
    indexers = fields.items("indexer_types", count) or ["full"] * count
    return [replace(layer, index_dim=index_dim if kind == "full" else 0) for kind in indexers]


def _mla_layer(fields: Fields) -> Layer:
    nope, rope = fields.int("qk_nope_head_dim"), fields.optional_int("qk_rope_head_dim")
    return Layer(
        LayerKind.MLA,
        heads=fields.int("num_attention_heads"),
        kv_heads=1,
        head_dim=nope + rope,
        v_head_dim=fields.int("v_head_dim"),
        latent_dim=fields.int("kv_lora_rank"),
        rope_dim=rope,
    )


def kimi_linear(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    """Kimi Linear and K3: layers listed (from 1) as full are MLA, the others gated delta (KDA)."""
    section = fields.section("linear_attn_config")
    full = section.get("full_attn_layers")
    sizes = [section.get(k) for k in ("num_heads", "head_dim", "short_conv_kernel_size")]
    if not isinstance(full, list) or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise fields.error(
            "linear_attn_config needs full_attn_layers, num_heads, head_dim and short_conv_kernel_size"
        )
    heads, dim, kernel = (int(size) for size in sizes if isinstance(size, int))
    columns = kernel - 1
    state = _state(
        fields, replace(arch, ssm_dtype="float32"), heads * dim * dim, 3 * heads * dim * columns, columns
    )
    linear = Layer(LayerKind.STATE, heads=heads, head_dim=dim, state=state)
    return [_mla_layer(fields) if i + 1 in full else linear for i in range(_count(fields))]


def falcon(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    """num_kv_heads counts only in the new decoder; in the old one multi_query means one KV head."""
    heads = fields.int("num_attention_heads")
    if fields.flag("new_decoder_architecture"):
        kv_heads = fields.int("num_kv_heads", fields.int("num_key_value_heads", heads))
    else:
        kv_heads = 1 if fields.flag("multi_query", True) else heads
    return [attention_layer(fields, kv_heads)] * _count(fields)


def multi_query(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    kv_heads = 1 if fields.flag("multi_query", True) else fields.int("num_attention_heads")
    return [attention_layer(fields, kv_heads)] * _count(fields)


def chatglm(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    heads = fields.int("num_attention_heads")
    grouped = fields.flag("multi_query_attention")
    kv_heads = fields.int(
        "multi_query_group_num" if grouped else "num_key_value_heads", 0 if grouped else heads
    )
    return [attention_layer(fields, kv_heads or fields.int("multi_query_group_num"))] * _count(fields)


def decoder(fields: Fields, arch: Architecture, notes: Notes) -> list[Layer]:
    """The decoder of an encoder-decoder: its own K and V; those of the encoder's output are only stated."""
    notes.append(
        "decoder self-attention only: cross-attention keeps K and V of the encoder's output, as many bytes "
        "per encoder position again"
    )
    return [attention_layer(fields, fields.int("num_attention_heads"))] * _count(fields)


LAYOUTS: dict[str, Layout] = {
    layout.__name__: layout
    for layout in (
        uniform, window_all, qwen2, phi3, alternate, pattern, llama4, layer_types, gdn, mamba, jamba, bamba,
        nemotron_h, minimax_m1, minimax_m3, mimo, deci, gemma4, mla, kimi_linear, falcon, multi_query,
        chatglm, decoder,
    )
}  # fmt: skip
LAYOUTS["qwen1"] = uniform
