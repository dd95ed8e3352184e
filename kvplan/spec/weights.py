"""Bytes of weights on one rank: every tensor's share, in its format, as the allocator hands it out.

Rules: BUDGET.md section 2. Within 0.006 GiB of what engines log for dense 16-bit and 8-bit models
(tests/spec/test_weights.py); int4 0.2 %, MXFP4 2.5 %.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from kvplan.errors import InputError
from kvplan.spec.engine import EngineSettings
from kvplan.spec.model import ModelSpec, Quantization
from kvplan.spec.quantization import matrix_bytes, quantization_by_name
from kvplan.spec.tensor import Split, Tensor

MIB = 1 << 20
VOCAB_PADDING = 64
BYTES = {"float32": 4, "float": 4}  # every other compute type is 16 bit


@dataclass(frozen=True)
class StageWeights:
    """One rank of one pipeline stage: its layers, bytes as allocated, and bytes by class of weight."""

    layers: range
    bytes: int
    parts: dict[str, int]


@dataclass(frozen=True)
class WeightBytes:
    """Weights of one rank of every pipeline stage; ``formula`` says in figures where they come from."""

    stages: tuple[StageWeights, ...]
    formula: str
    source: str
    notes: tuple[str, ...] = ()

    @property
    def largest_bytes(self) -> int:
        """The fullest stage's rank."""
        return max(stage.bytes for stage in self.stages)


def weight_bytes_per_rank(model: ModelSpec, settings: EngineSettings, stage: int = 0) -> int:
    """Bytes of weights on one rank of pipeline stage ``stage`` (see `weight_bytes`)."""
    return weight_bytes(model, settings).stages[stage].bytes


@lru_cache(maxsize=64)
def weight_bytes(model: ModelSpec, settings: EngineSettings) -> WeightBytes:
    """Weights per rank of ``model`` under the TP, PP, DP, EP, dtype and quantization of ``settings``.

    Raises InputError when nothing is known of the weights (bare dimensions) or PP exceeds the layers.
    """
    if not model.tensors:
        raise InputError(f"{model.name}: only the KV shape is known, not the weights.")
    quantization = effective_quantization(model, settings)
    element = compute_bytes(model, settings)
    speculates = settings.num_speculative_tokens > 0 and settings.speculative_model is None
    scale = _scale(model)
    stages = []
    for index, layers in enumerate(pipeline_layers(model.num_layers, settings.pipeline_parallel_size)):
        parts: dict[str, int] = {}
        for tensor in model.tensors:
            on_stage = _copies(tensor, layers, index, settings.pipeline_parallel_size, speculates)
            if not on_stage:
                continue
            for count, covered in covered_layers(tensor, on_stage, quantization, model):
                size = sum(
                    map(allocated, _stored(tensor, settings, element, quantization if covered else None))
                )
                parts[tensor.part] = parts.get(tensor.part, 0) + round(scale * count * size)
        stages.append(StageWeights(layers, sum(parts.values()), parts))
    notes = []
    if quantization is not model.quantization:
        notes.append(f"weights as --quantization {settings.quantization}")
    if scale != 1:
        notes.append(f"weights scaled by {scale:.4f}: the files hold {model.stored_bytes:,} B")
    formula = _formula(model, settings, quantization, element)
    source = "safetensors" if model.stored_bytes else "shape"
    return WeightBytes(tuple(stages), formula, source, tuple(notes))


def _scale(model: ModelSpec) -> float:
    """What the local files hold against the count by shape; 1 when they agree to 0.5 % or are not there."""
    if not model.stored_bytes:
        return 1.0
    counted = 0
    for tensor in model.tensors:
        if tensor.engine_only or tensor.stage == "mtp":
            continue
        for count, covered in covered_layers(tensor, tensor.layers or (-1,), model.quantization, model):
            quantization = model.quantization if covered else None
            counted += count * sum(_stored(tensor, EngineSettings(), 2, quantization, padded=False))
    ratio = model.stored_bytes / counted
    return 1.0 if abs(ratio - 1) < 0.005 else ratio


def compute_bytes(model: ModelSpec, settings: EngineSettings) -> int:
    """Bytes of an unquantised element; engines run float32 checkpoints in 16 bit unless told otherwise."""
    return BYTES.get(settings.dtype, 2)


def effective_quantization(model: ModelSpec, settings: EngineSettings) -> Quantization | None:
    """The flag where given, else the checkpoint's; a checkpoint of the same width describes itself better."""
    if settings.quantization is None:
        return model.quantization
    asked = quantization_by_name(settings.quantization)
    own = model.quantization
    if own is None or asked is None:
        return asked
    return own if own.bits == asked.bits or own.method == asked.method else asked


def pipeline_layers(layers: int, stages: int) -> list[range]:
    """Layers of each stage, as vLLM cuts: a remainder goes to the last stages but the very last."""
    if not 0 < stages <= layers:
        raise InputError(f"-pp {stages} cannot split {layers} layers; use at most {layers}.")
    sizes = [layers // stages] * stages
    for i in range(layers % stages):
        sizes[-2 - i if stages > 1 else -1] += 1
    ends = [sum(sizes[: i + 1]) for i in range(stages)]
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def allocated(size_bytes: int) -> int:
    """What torch's caching allocator takes for one tensor: 512 B steps, 2 MiB steps above 10 MiB.

    Above 10 MiB the rest of the last 2 MiB is given back only when it is larger than 1 MiB.
    """
    size = -(-size_bytes // 512) * 512
    if size < 10 * MIB:
        return size
    whole = -(-size // (2 * MIB)) * 2 * MIB
    return size if whole - size > MIB else whole


def _copies(tensor: Tensor, layers: range, stage: int, stages: int, speculates: bool) -> tuple[int, ...]:
    """The layers of this stage that have ``tensor``; (-1,) for one outside of the layers."""
    if tensor.layers:
        return tuple(i for i in tensor.layers if i in layers)
    last = stage == stages - 1
    here = {
        "first": stage == 0,
        "last": last,
        "all": True,
        "tied": stages > 1 and last,  # the embedding again, where the head is
        "mtp": last and speculates,
    }
    return (-1,) if here[tensor.stage] else ()


def covered_layers(
    tensor: Tensor, layers: tuple[int, ...], quantization: Quantization | None, model: ModelSpec
) -> Iterator[tuple[int, bool]]:
    """(number of layers, whether quantised), since ignore lists may name single layers."""
    if not tensor.quantised or quantization is None:
        yield len(layers), False
        return
    if quantization.method == "mxfp4" and model.moe is not None and tensor.part != "experts":
        yield len(layers), False  # the format is that of the experts
        return
    patterns = _ignore_pattern(quantization.ignored)
    skipped = sum(_is_ignored(tensor, i, patterns) for i in layers) if patterns else 0
    yield len(layers) - skipped, True
    if skipped:
        yield skipped, False


# What a fused tensor is called in ignore lists.
UNFUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "q_b_proj": ("q_proj",),
    "kv_a_proj": ("kv_a_proj_with_mqa",),
}


@lru_cache(maxsize=64)
def _ignore_pattern(rules: tuple[str, ...]) -> re.Pattern[str] | None:
    """One expression for regular expressions (re:), globs, and plain module names or their prefixes."""
    parts = []
    for rule in rules:
        if rule.startswith("re:"):
            parts.append(f"(?:{rule[3:]})")
        elif "*" in rule:
            parts.append(fnmatch.translate(rule))
        else:
            parts.append(rf"(?:.*\.)?{re.escape(rule)}(?:\..*)?$")
    try:
        return re.compile("|".join(parts)) if parts else None
    except re.error as error:
        raise InputError(
            f"quantization_config: an ignored module is no regular expression: {error}."
        ) from None


def _is_ignored(tensor: Tensor, layer: int, pattern: re.Pattern[str]) -> bool:
    module, _, last = tensor.name.rpartition(".")
    for leaf in (last, *UNFUSED.get(last, ())):
        path = f"{module}.{leaf}" if module else leaf
        shared = path.replace("shared_experts", "shared_expert")
        for name in {path, shared}:
            for root in ("model.layers", "model.language_model.layers", "language_model.model.layers"):
                if pattern.match(f"{root}.{layer}.{name}"):
                    return True
    return False


def _stored(
    tensor: Tensor,
    settings: EngineSettings,
    element: int,
    quantization: Quantization | None,
    padded: bool = True,
) -> Iterator[int]:
    """Bytes of each tensor that a rank stores for one layer's ``tensor``: the matrix and its scales."""
    experts, out, in_ = rank_shape(tensor, settings)
    if quantization is None:
        yield experts * out * in_ * (tensor.bytes_per_element or element)
        return
    if padded and quantization.method == "mxfp4" and tensor.split in (Split.EXPERT_OUT, Split.EXPERT_IN):
        out, in_ = _mxfp4_padded(tensor, out, in_)
    yield from matrix_bytes(quantization, out, in_, experts)


def _mxfp4_padded(tensor: Tensor, out: int, in_: int) -> tuple[int, int]:
    """Expert width up to 128 and hidden size up to 256, as Marlin-type kernels lay MXFP4 out."""
    if tensor.split is Split.EXPERT_OUT:
        return tensor.stacked * _up(out // tensor.stacked, 128), _up(in_, 256)
    return _up(out, 256), _up(in_, 128)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def rank_shape(tensor: Tensor, settings: EngineSettings) -> tuple[int, int, int]:
    """(experts, out, in) of one rank's share; cuts that do not divide are rounded up."""
    tp, dp = settings.tensor_parallel_size, settings.data_parallel_size
    experts, out, in_ = tensor.experts, tensor.out, tensor.in_
    if tensor.split is Split.OUT:
        own = tensor.kv_out * max(1, tensor.kv_heads // tp) // tensor.kv_heads if tensor.kv_heads else 0
        out = _cut(out - tensor.kv_out, tp) + own
    elif tensor.split is Split.IN:
        in_ = _cut(in_, tp)
    elif tensor.split is Split.VOCAB:
        out = _cut(_up(out, VOCAB_PADDING), tp)
    elif tensor.split in (Split.EXPERT_OUT, Split.EXPERT_IN):
        ranks = tp * dp
        if settings.enable_expert_parallel:
            experts = _cut(experts, ranks)
        elif tensor.split is Split.EXPERT_OUT:
            out = _cut(out, ranks)
        elif in_ > 1:
            in_ = _cut(in_, ranks)
    return experts, out, in_


def _cut(size: int, ranks: int) -> int:
    return -(-size // ranks)


def _formula(
    model: ModelSpec, settings: EngineSettings, quantization: Quantization | None, element: int
) -> str:
    """Elements times bytes before the split, for `--explain`."""
    covered = plain = 0
    for tensor in model.tensors:
        if tensor.engine_only or tensor.stage == "mtp":
            continue
        for count, quantised in covered_layers(tensor, tensor.layers or (-1,), quantization, model):
            if quantised:
                covered += count * tensor.elements
            else:
                plain += count * tensor.elements
    split = f", / TP {settings.tensor_parallel_size}" if settings.tensor_parallel_size > 1 else ""
    if settings.pipeline_parallel_size > 1:
        split += f", / PP {settings.pipeline_parallel_size}"
    if not covered or quantization is None:
        return f"{plain:,} x {element} B{split}"
    size = sum(matrix_bytes(quantization, 4096, 4096)) / 4096**2
    return f"{plain:,} x {element} B + {covered:,} x {size:.4g} B{split}"
