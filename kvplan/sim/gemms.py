"""The matrix products of one step on one rank, read off the model's weights."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvplan.errors import InputError
from kvplan.sim.formats import BF16, Format, Formats
from kvplan.spec.engine import EngineSettings
from kvplan.spec.model import ModelSpec
from kvplan.spec.tensor import Split, Tensor
from kvplan.spec.weights import covered_layers, effective_quantization, rank_shape

LINEAR_PARTS = ("attention", "attention_replicated", "mlp", "router", "state", "other")
MIN_INPUTS = 32  # narrower ones are convolution windows and biases


class Gemm(NamedTuple):
    """n outputs, k inputs, in one format, so many ``times`` a step on one rank."""

    n: int
    k: int
    format: Format
    times: int


def step_gemms(model: ModelSpec, settings: EngineSettings, formats: Formats) -> list[Gemm]:
    """Every product with a weight of a decoder layer except routed experts, equal ones added up.

    All pipeline stages together. Raises `InputError` for a model of which only the KV shape is known.
    """
    if not model.tensors:
        raise InputError(
            f"{model.name}: only the KV shape is known, so a step cannot be timed.\n"
            "  Name a model or its config.json, or use --clock steps."
        )
    quantization = effective_quantization(model, settings)
    counted: Counter[tuple[int, int, Format]] = Counter()
    for tensor in model.tensors:
        if not _is_linear(tensor):
            continue
        _, n, k = rank_shape(tensor, settings)
        for layers, covered in covered_layers(tensor, tensor.layers, quantization, model):
            counted[n, k, formats.quantised if covered else BF16] += layers
    return [Gemm(n, k, form, times) for (n, k, form), times in counted.items() if times]


def _is_linear(tensor: Tensor) -> bool:
    # An absorbed projection stands for one that is counted already.
    return (
        tensor.part in LINEAR_PARTS
        and bool(tensor.layers)
        and min(tensor.out, tensor.in_) >= MIN_INPUTS
        and tensor.experts == 1
        and not tensor.engine_only
        and tensor.stage != "mtp"
    )


def expert_layers(model: ModelSpec) -> int:
    """Layers with routed experts."""
    return len({i for t in model.tensors if t.part == "experts" and t.stage != "mtp" for i in t.layers})


def activation_bytes_per_token(model: ModelSpec, settings: EngineSettings) -> float:
    """Bytes that norms, rotary embedding, cache write and activation stream for one token on one rank.

    16 bytes a hidden element (two norms with residual: read and write twice each), the query, key and value
    read and written once, an MLP's inner width read twice and written once.
    """
    bytes_ = 16.0 * model.hidden_size * model.num_layers
    for tensor in model.tensors:
        if tensor.split is Split.OUT and _is_linear(tensor):
            _, n, _ = rank_shape(tensor, settings)
            bytes_ += (3.0 if tensor.part == "mlp" else 4.0) * n * len(tensor.layers)
    return bytes_
