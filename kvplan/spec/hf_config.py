"""From any published config.json to a `ModelSpec`; what cannot be read is refused by name, never guessed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvplan.errors import InputError
from kvplan.spec.architectures import (
    ARCHITECTURES,
    MODEL_TYPES,
    NESTED_DEFAULTS,
    REFUSED,
    Architecture,
)
from kvplan.spec.blueprint import tensors
from kvplan.spec.fields import LARGEST_OTHER, Fields
from kvplan.spec.layouts import LAYOUTS
from kvplan.spec.model import Layer, LayerKind, ModelSpec, MoE, ParameterCount
from kvplan.spec.quantization import read_quantization
from kvplan.spec.tensor import Split, Tensor

LARGEST_FILE_BYTES = 16 << 20
TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
TOWERS = ("vision_config", "audio_config", "vision_tower_config")


def read_config(path: Path) -> dict[str, Any]:
    """The object in a config.json, or in the one inside a model folder.

    Raises InputError when there is no such file, or it is not a JSON object; `Infinity` is accepted.
    """
    try:
        file = path / "config.json" if path.is_dir() else path
        if file.stat().st_size > LARGEST_FILE_BYTES:
            raise InputError(f"{file}: larger than 16 MiB; a config.json is a few KiB.")
        config = json.loads(file.read_text(encoding="utf-8"))
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path}: no such file, or no config.json in it.") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{file}:{error.lineno}: not JSON: {error.msg}.") from None
    except (OSError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({type(error).__name__}).") from None
    if not isinstance(config, dict):
        raise InputError(f"{file}: must be a JSON object, is a {type(config).__name__}.")
    side = file.with_name("hf_quant_config.json")
    if side.is_file() and side != file and "quantization_config" not in config:
        config["quantization_config"] = {"quant_method": "modelopt", **read_config(side)}
    return config


def model_from_config(config: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    """The model that ``config`` (an object like a published config.json) describes.

    Raises InputError naming the architecture and the field when the architecture is not known here or a
    field is missing or absurd. Class defaults that were applied are listed in ``assumptions``.
    """
    if not isinstance(config, Mapping):
        raise InputError(f"{source}: must be a JSON object, is a {type(config).__name__}.")
    text, nested = _text_part(config, source)
    class_name, arch = _architecture(config, text, source)
    defaults = dict(arch.defaults)
    if nested:
        defaults = {**NESTED_DEFAULTS.get(str(text.get("model_type")), {}), **defaults}
    fields = Fields(text, source, class_name, defaults)
    if class_name == "NemotronHForCausalLM" and not fields.has("num_hidden_layers"):
        blocks = fields.items("layers_block_type")
        fields.defaults["num_hidden_layers"] = len(blocks) if blocks else None
    notes: list[str] = []
    layers = LAYOUTS[arch.layout](fields, arch, notes)
    moe = _moe(fields)
    spec = ModelSpec(
        name=name,
        architecture=class_name,
        layers=tuple(layers),
        hidden_size=fields.int("hidden_size"),
        heads=max((layer.heads for layer in layers), default=0),
        vocab_size=fields.int("vocab_size"),
        intermediate_size=fields.int("intermediate_size", 4 * fields.int("hidden_size")),
        max_position_embeddings=_longest(fields, notes),
        dtype=fields.text("dtype") or str(config.get("torch_dtype") or config.get("dtype") or "bfloat16"),
        tie_word_embeddings=_tied(config, text, arch, fields),
        gated_mlp=arch.gated,
        moe=moe,
        mtp_layers=fields.optional_int("mtp_layers") or arch.mtp_layers,
        quantization=read_quantization(config, text, source),
        multimodal=any(config.get(part) for part in TOWERS),
        source=source,
    )
    if any(config.get(part) for part in TOWERS):
        notes.append("text part only; image and audio tokens keep K and V like text tokens")
    if not arch.checked:
        notes.append("weights by the shapes of the config class; no published count was at hand to check it")
    assumed = {key: value for key, value in fields.assumed.items() if key != "num_hidden_layers"}
    if assumed:
        listed = ", ".join(f"{key} {value}" for key, value in assumed.items())
        notes.insert(0, f"class defaults, absent in the config: {listed}")
    weights = _weights(config, fields, arch, spec)
    return replace(
        spec,
        layers=_mark_experts(spec.layers, weights),
        tensors=weights,
        parameters=count_parameters(weights),
        assumptions=tuple(notes),
    )


def _mark_experts(layers: tuple[Layer, ...], weights: tuple[Tensor, ...]) -> tuple[Layer, ...]:
    """The layers, those with routed experts marked."""
    routed = {i for tensor in weights if tensor.part == "experts" for i in tensor.layers}
    return tuple(replace(layer, is_moe=i in routed) for i, layer in enumerate(layers)) if routed else layers


def _weights(
    config: Mapping[str, Any], fields: Fields, arch: Architecture, spec: ModelSpec
) -> tuple[Tensor, ...]:
    """Every weight; towers, and what no formula here counts, as one entry each."""
    made = tensors(fields, arch, spec.layers, spec.moe, spec.tie_word_embeddings)
    tower = config.get("vision_parameters") or sum(vision_parameters(config.get(part)) for part in TOWERS)
    if tower:
        made += (Tensor("vision", "vision tower", tower, split=Split.OUT, stage="first"),)
    rest = (config.get("uncounted_parameters")) or 0
    if rest:
        made += (Tensor("other", "not counted by shape", rest, split=Split.OUT),)
    return made


def vision_parameters(tower: Any) -> int:
    """A vision transformer's size from its config: attention and MLP of its layers, within a few per cent.

    Patch embedding, positions, norms and the projector are left out. 0 for anything else.
    """
    if not isinstance(tower, Mapping):
        return 0
    depth, hidden, width = (
        next((v for k in names if isinstance(v := tower.get(k), int) and 0 < v < 1 << 20), 0)
        for names in (("num_hidden_layers", "depth"), ("hidden_size",), ("intermediate_size",))
    )
    return depth * (4 * hidden * hidden + 2 * hidden * (width or 4 * hidden))


def count_parameters(weights: tuple[Tensor, ...]) -> ParameterCount:
    """Elements by class, as the checkpoint stores them."""
    counts = {field.name: 0 for field in dataclass_fields(ParameterCount)}
    for tensor in weights:
        if not tensor.engine_only:
            counts[tensor.part] += tensor.total
    return ParameterCount(**counts)


def _text_part(config: Mapping[str, Any], source: str) -> tuple[Mapping[str, Any], bool]:
    """The part that describes the decoder, and whether it was nested."""
    for part in TEXT_PARTS:
        inner = config.get(part)
        if inner is None:
            continue
        if not isinstance(inner, Mapping):
            raise InputError(f"{source}: {part} must be an object, is a {type(inner).__name__}.")
        found, _ = _text_part(inner, source)
        return found, True
    return config, False


def _architecture(
    config: Mapping[str, Any], text: Mapping[str, Any], source: str
) -> tuple[str, Architecture]:
    named = config.get("architectures") or text.get("architectures")
    if named is not None and not (
        isinstance(named, list) and named and all(isinstance(each, str) for each in named)
    ):
        raise InputError(f"{source}: architectures must be a list of names, is {str(named)[:60]!r}.")
    if not named:
        kind = text.get("model_type") or config.get("model_type")
        if kind is None:
            raise InputError(f"{source}: neither architectures nor model_type is there: not a model config.")
        named = [MODEL_TYPES.get(str(kind), str(kind))]
    if named[0] in REFUSED:
        raise _refused(named[0], REFUSED[named[0]], source)
    inner = text.get("architectures") if text is not config else None
    within = inner if isinstance(inner, list) else [MODEL_TYPES.get(str(text.get("model_type")))]
    for each in (*named, *(within if text is not config else ())):
        if isinstance(each, str) and each in ARCHITECTURES:
            return each, ARCHITECTURES[each]
    raise _refused(named[0], "the architecture is not known here", source)


def _refused(name: str, reason: str, source: str) -> InputError:
    return InputError(f"{source}: {name}: {reason}; nothing is computed by the dense formula instead.")


def _moe(fields: Fields) -> MoE | None:
    experts = fields.optional_int("num_experts")
    if experts <= 1:
        return None
    width = fields.int("moe_intermediate_size", fields.int("intermediate_size", 0) or 0)
    if not width:
        raise fields.missing("moe_intermediate_size")
    shared = fields.optional_int("shared_expert_intermediate_size")
    count = fields.optional_int("n_shared_experts")
    return MoE(experts, fields.int("num_experts_per_tok"), width, shared or count * width)


def _longest(fields: Fields, notes: list[str]) -> int:
    """Longest context as engines derive it: old scalings stretch it, yarn its original; 0 = unknown."""
    if not fields.has("max_position_embeddings"):
        notes.append("max_position_embeddings is absent: give --max-model-len")
        return 0
    length = fields.int("max_position_embeddings")
    scaling = fields.section("rope_scaling") or fields.section("rope_parameters")
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not 1 < factor < 1e6:
        return length
    original = scaling.get("original_max_position_embeddings")
    if kind in ("linear", "dynamic") and not fields.text("model_type").startswith("gemma3"):
        length = int(length * factor)
    elif kind == "yarn" and isinstance(original, int) and 0 < original < LARGEST_OTHER:
        length = int(original * factor)
    return length


def _tied(config: Mapping[str, Any], text: Mapping[str, Any], arch: Architecture, fields: Fields) -> bool:
    for part in (text, config):
        value = part.get("tie_word_embeddings")
        if isinstance(value, bool):
            return value
        if value is not None:
            raise fields.wrong("tie_word_embeddings", value, "true or false")
    return arch.tied


def kinds(spec: ModelSpec) -> dict[LayerKind, int]:
    """How many layers of each kind, in order of first appearance."""
    counted: dict[LayerKind, int] = {}
    for layer in spec.layers:
        counted[layer.kind] = counted.get(layer.kind, 0) + 1
    return counted
