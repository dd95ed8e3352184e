"""What one layer keeps for a token or a request, in bytes of one rank (KV_SIZING_RULES 2, 3 and 7)."""

from __future__ import annotations

from kvplan.errors import InputError
from kvplan.spec.engine import Resolved
from kvplan.spec.model import Layer, LayerKind

BYTES_PER_ELEMENT = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_ds_mla": 1,
    "fp8_per_token_head": 1,
    "int8_per_token_head": 1,
}
SCALE_BYTES = 4  # one float32 per scaled group
INDEX_TILE = 128  # elements of an index key, and of an fp8_ds_mla latent, per scale


def bytes_per_element(dtype: str) -> int:
    """Bytes of one K or V element."""
    if dtype not in BYTES_PER_ELEMENT:
        raise InputError(
            f"--kv-cache-dtype {dtype!r} is not known; use one of {', '.join(BYTES_PER_ELEMENT)}."
        )
    return BYTES_PER_ELEMENT[dtype]


def token_bytes(layer: Layer, engine: Resolved) -> int:
    """Bytes one token keeps in an attention layer, on one rank (KV_SIZING_RULES 2 and 3)."""
    dtype = engine.kv_cache_dtype
    size = bytes_per_element(dtype)
    tp = engine.settings.tensor_parallel_size
    index = (layer.index_dim + SCALE_BYTES * -(-layer.index_dim // INDEX_TILE)) if layer.index_dim else 0
    if layer.kind is LayerKind.MLA:  # one latent on every rank: no factor 2, no split
        if dtype == "fp8_ds_mla" or (layer.index_dim and size == 1):
            scales = SCALE_BYTES * -(-layer.latent_dim // INDEX_TILE)
            return layer.latent_dim + scales + 2 * layer.rope_dim + index
        return (layer.latent_dim + layer.rope_dim) * size + index
    if dtype == "fp8_ds_mla":
        raise InputError("--kv-cache-dtype fp8_ds_mla is for MLA models only.")
    heads = max(1, layer.kv_heads // tp)  # with more ranks than heads each keeps a copy of one
    scales = 2 * SCALE_BYTES if dtype.endswith("_per_token_head") else 0
    return heads * ((layer.head_dim + layer.v_head_dim) * size + scales) + index


def state_bytes(layer: Layer, engine: Resolved) -> int:
    """Bytes of one request's state in one linear-attention or Mamba layer, on one rank."""
    state = layer.state
    if state is None:
        raise InputError(f"a {layer.kind.value} layer without its state's shape cannot be sized.")
    tp = engine.settings.tensor_parallel_size
    # Groups of B and C that do not divide over the ranks are copied until each rank has one.
    groups = tp if state.groups % tp else state.groups
    conv = state.conv_elements + (groups - state.groups) * state.group_elements
    columns = state.conv_columns + engine.settings.num_speculative_tokens
    conv = conv * columns // state.conv_columns if state.conv_columns else conv
    return state.ssm_elements // tp * state.ssm_bytes_per_element + conv // tp * state.conv_bytes_per_element
