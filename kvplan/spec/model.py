"""The shape of a model as an engine sees it: a list of layers by what each keeps in the KV cache.

Real models are not uniform (sliding windows, Mamba layers, layers without attention), so there is no
single ``num_kv_heads``: whoever needs KV memory asks the layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvplan.spec.tensor import Tensor


class LayerKind(StrEnum):
    """What one decoder layer keeps for a request."""

    FULL = "full"  # K and V of every token
    SLIDING = "sliding"  # K and V of the last `window` tokens
    CHUNKED = "chunked"  # K and V since the last multiple of `window`
    MLA = "mla"  # one latent vector per token, the same on every TP rank
    STATE = "state"  # a fixed state per request (Mamba, linear attention)
    SHARED = "shared"  # attends to another layer's K and V, keeps none
    NONE = "none"  # no attention at all


@dataclass(frozen=True)
class StateShape:
    """Fixed state of one linear-attention or Mamba layer, elements per request before the TP split."""

    ssm_elements: int
    conv_elements: int  # for the plain conv window; one more column per speculative token
    conv_columns: int  # conv_kernel - 1, so that conv_elements / conv_columns is one column
    ssm_bytes_per_element: int = 4
    conv_bytes_per_element: int = 2
    groups: int = 0  # Mamba-2: groups of B and C, which are copied when TP does not divide them
    group_elements: int = 0  # conv elements of one such group, all columns


@dataclass(frozen=True)
class Layer:
    """One decoder layer. Head counts are those of the whole model, before any TP split."""

    kind: LayerKind
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0  # of K
    v_head_dim: int = 0  # of V
    window: int = 0  # tokens; SLIDING and CHUNKED only
    latent_dim: int = 0  # MLA: kv_lora_rank
    rope_dim: int = 0  # MLA: the decoupled rotary part
    index_dim: int = 0  # sparse-attention index key kept per token beside the latent
    state: StateShape | None = None
    is_moe: bool = False

    @property
    def kv_elements_per_token(self) -> int:
        """Elements kept per token while it is inside the window (`2·h_kv·d_h`; MLA: one copy)."""
        if self.kind is LayerKind.MLA:
            return self.latent_dim + self.rope_dim
        if self.kind in (LayerKind.FULL, LayerKind.SLIDING, LayerKind.CHUNKED):
            return self.kv_heads * (self.head_dim + self.v_head_dim)
        return 0


@dataclass(frozen=True)
class MoE:
    """Mixture of experts of the layers with ``is_moe``."""

    experts: int
    experts_per_token: int
    intermediate_size: int  # of one routed expert
    shared_intermediate_size: int = 0  # all shared experts together; 0 = none


@dataclass(frozen=True)
class ParameterCount:
    """Elements by class; classes differ in dtype and in how they are split over ranks."""

    embedding: int = 0
    lm_head: int = 0  # 0 when tied to the embedding
    attention: int = 0  # q/k/v/o of all layers, split by TP
    attention_replicated: int = 0  # MLA down-projections, index projections
    mlp: int = 0  # dense MLPs and shared experts
    experts: int = 0  # routed experts
    router: int = 0
    state: int = 0  # linear-attention and Mamba projections
    norms: int = 0
    vision: int = 0  # towers that stay in 16 bit
    mtp: int = 0  # in the file, loaded only for speculation
    other: int = 0

    @property
    def loaded(self) -> int:
        """Elements an engine keeps on the GPU without speculation."""
        return (
            self.embedding + self.lm_head + self.attention + self.attention_replicated + self.mlp
            + self.experts + self.router + self.state + self.norms + self.vision + self.other
        )  # fmt: skip


@dataclass(frozen=True)
class Quantization:
    """How the checkpoint stores its quantised matrices. ``method`` is vLLM's name."""

    method: str  # fp8, awq, gptq, compressed-tensors, mxfp4, modelopt_fp4, bitsandbytes, ...
    bits: int
    group_size: int = 0  # 0 = per channel or tensor
    block_shape: tuple[int, int] | None = None  # fp8 128x128 blocks
    symmetric: bool = True
    ignored: tuple[str, ...] = ()  # modules left in 16 bit, as the config lists them


@dataclass(frozen=True)
class ModelSpec:
    """A decoder (the text part of a multimodal model).

    ``dtype`` is the checkpoint's torch dtype name; ``assumptions`` lists class defaults that were
    applied because the publisher omits keys; ``unverified`` names fields nobody could check.
    """

    name: str
    architecture: str
    layers: tuple[Layer, ...]
    hidden_size: int
    heads: int
    vocab_size: int
    intermediate_size: int
    max_position_embeddings: int
    dtype: str = "bfloat16"
    tie_word_embeddings: bool = False
    gated_mlp: bool = True
    moe: MoE | None = None
    mtp_layers: int = 0
    quantization: Quantization | None = None
    parameters: ParameterCount | None = None  # None when only the bare formula was asked for
    tensors: tuple[Tensor, ...] = ()  # every weight; empty when only the bare formula was asked for
    stored_bytes: int = 0  # in the safetensors of a local folder, as far as engines load them; 0 = not read
    multimodal: bool = False
    source: str = ""
    assumptions: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    aliases: tuple[str, ...] = field(default=())

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_elements_per_token(self) -> int:
        """Sum over layers of what one token keeps while inside every window."""
        return sum(layer.kv_elements_per_token for layer in self.layers)
