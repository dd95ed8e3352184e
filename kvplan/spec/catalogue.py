"""The models and GPUs known by name. Data: spec/data/*.json (made by tests/spec/build_catalogue.py)."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from kvplan.errors import InputError
from kvplan.spec.gpu import GPU
from kvplan.spec.hf_config import model_from_config, read_config
from kvplan.spec.model import ModelSpec
from kvplan.spec.quantization import quantization_by_name

DEFAULT_MODEL = "meta-llama/Llama-3.1-8B-Instruct"
DEFAULT_GPU = "H100 SXM"

# Words that do not change what a model is, and formats that become --quantization (CLI.md, "Shared flags").
# Longest first, so that fp8-dynamic is not read as fp8.
FORMATS: tuple[tuple[str, str], ...] = (
    ("fp8-dynamic", "fp8"), ("awq-int4", "awq"), ("gptq-int4", "gptq"), ("quantized.w8a8", "w8a8"),
    ("quantized.w4a16", "w4a16"), ("w8a8", "w8a8"), ("w4a16", "w4a16"), ("nvfp4", "nvfp4"), ("awq", "awq"),
    ("fp8", "fp8"),
)  # fmt: skip
WORDS = ("instruct", "it", "chat", "text", "mtp", "hf")


@dataclass(frozen=True)
class ResolvedModel:
    """What a MODEL argument turned out to be.

    ``resolved_from`` is what the user wrote when it is not the entry's own name (or an alias of it);
    ``implied_quantization`` is a format that the name carries and the entry does not (a ``--quantization``
    value); ``notes`` say so in words.
    """

    spec: ModelSpec
    resolved_from: str | None = None
    implied_quantization: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelEntry:
    """One catalogue row as shipped, without building its layers."""

    id: str
    aliases: tuple[tuple[str, str | None], ...]  # name, quantisation that it stands for
    config: dict[str, Any]
    published_parameters: int | None
    vision_parameters: int
    extras_in_file: int  # buffers, second copies and scales that the published count includes
    multimodal: bool
    grade: str | None  # how well the parameter count agrees; None = not verified
    source: str
    unverified: tuple[str, ...]

    def spec(self) -> ModelSpec:
        """Build the model. Raises InputError when its architecture cannot be laid out."""
        config = dict(self.config)
        config["vision_parameters"] = self.vision_parameters
        spec = model_from_config(config, self.id, self.id)
        return replace(
            spec,
            source=self.source,
            unverified=self.unverified,
            multimodal=self.multimodal or spec.multimodal,
            aliases=tuple(name for name, _ in self.aliases),
        )


def _data(name: str) -> Any:
    return json.loads((Path(__file__).parent / "data" / name).read_text(encoding="utf-8"))


@cache
def model_entries() -> tuple[ModelEntry, ...]:
    """All rows, in the file's order."""
    return tuple(
        ModelEntry(
            row["id"],
            tuple((each, None) if isinstance(each, str) else (each[0], each[1]) for each in row["aliases"]),
            row["config"],
            row["published_parameters"],
            row["vision_parameters"],
            row["extras_in_file"],
            row.get("multimodal", False),
            row["grade"],
            row["source"],
            tuple(row["unverified"]),
        )
        for row in _data("models.json")
    )


def plain_name(name: str) -> str:
    """Lower case, without owner and the prefix Meta-: 'meta-llama/Meta-Llama-3-8B' is 'llama-3-8b'."""
    plain = name.strip().rsplit("/", 1)[-1].lower().replace("_", "-").replace(" ", "-")
    return plain.removeprefix("meta-")


def base_name(name: str) -> tuple[str, str | None]:
    """The name without tuning words and formats, wherever they stand, and the format that was dropped."""
    plain, found = plain_name(name), None
    for word, format in FORMATS:
        shorter = re.sub(rf"(^|-){re.escape(word)}(?=-|$)", "", plain)
        if shorter != plain:
            plain, found = shorter, found or format
    for word in WORDS:
        plain = re.sub(rf"(^|-){word}(?=-|$)", "", plain)
    return plain.strip("-"), found


@cache
def _names() -> tuple[dict[str, tuple[ModelEntry, str | None]], dict[str, tuple[ModelEntry, str | None]]]:
    """Exact plain names, and base names; among entries of one base name the unquantised comes first."""
    exact: dict[str, tuple[ModelEntry, str | None]] = {}
    base: dict[str, tuple[ModelEntry, str | None]] = {}
    entries = model_entries()
    for entry in entries:
        exact.setdefault(plain_name(entry.id), (entry, None))
    for entry in entries:
        for alias, quantization in entry.aliases:
            exact.setdefault(plain_name(alias), (entry, quantization))
    for own_format in (False, True):
        for entry in entries:
            for name, quantization in ((entry.id, None), *entry.aliases):
                short, format = base_name(name)
                if (format is not None) == own_format:
                    base.setdefault(short, (entry, quantization))
    return exact, base


def find_model(name_or_path: str, quantization: str | None = None) -> ResolvedModel:
    """The model behind a catalogue name, an alias, a config.json or a model folder.

    ``quantization`` is what the user gave as ``--quantization``; a format in the name yields to it.
    Raises InputError with near names when nothing is found.
    """
    path = Path(name_or_path)
    if name_or_path.endswith(".json") or path.is_dir() or path.is_file():
        spec = model_from_config(read_config(path), _name_of(path), str(path))
        return _with_quantization(ResolvedModel(spec), quantization)
    exact, base = _names()
    plain = plain_name(name_or_path)
    if plain in exact:
        entry, implied = exact[plain]
        return _with_quantization(ResolvedModel(entry.spec(), None, implied), quantization)
    short, implied = base_name(name_or_path)
    if short in base:
        entry, of_alias = base[short]
        implied = implied or of_alias
        spec = entry.spec()
        if spec.quantization is not None and implied and spec.quantization.bits == quantised_bits(implied):
            implied = None  # the entry is stored that way already
        taken = f", --quantization {implied}" if implied else ""
        note = f"{name_or_path} is not in the catalogue: taken as {entry.id}{taken}"
        return _with_quantization(ResolvedModel(spec, name_or_path, implied, (note,)), quantization)
    raise _unknown(name_or_path, [*exact])


def _with_quantization(found: ResolvedModel, given: str | None) -> ResolvedModel:
    """Put the format that counts into the spec: the flag, else the name's, else the checkpoint's own."""
    name = given if given is not None else found.implied_quantization
    implied = None if given is not None else found.implied_quantization
    if name is None or (given is None and name is None):
        return found
    asked = quantization_by_name(name)
    own = found.spec.quantization
    if own is not None and asked is not None and own.bits == asked.bits and own.method == asked.method:
        return replace(found, implied_quantization=implied)  # the checkpoint's description says more
    return replace(found, spec=replace(found.spec, quantization=asked), implied_quantization=implied)


def quantised_bits(name: str) -> int:
    """Bits of a weight under a ``--quantization`` value; 16 for none."""
    quantization = quantization_by_name(name)
    return quantization.bits if quantization else 16


def _name_of(path: Path) -> str:
    return (
        path.stem
        if path.suffix == ".json" and path.name != "config.json"
        else path.resolve().parent.name
        if (path.name == "config.json")
        else path.resolve().name
    )


def _unknown(name: str, known: list[str]) -> InputError:
    plain = plain_name(name)
    short, _ = base_name(name)
    near = difflib.get_close_matches(plain, known, n=3, cutoff=0.6)
    near += [each for each in difflib.get_close_matches(short, known, n=2, cutoff=0.7) if each not in near]
    query = re.split(r"[-.\d]", plain)[0]
    hint = (
        f"  Nearest: {', '.join(near)}. More: kvplan models {query}" if near else "  All names: kvplan models"
    )
    return InputError(
        f"MODEL {name!r} is neither in the catalogue nor a path; pass its config.json.\n{hint.rstrip()}"
    )


# ---- GPUs -------------------------------------------------------------------------------------------


@cache
def gpus() -> tuple[GPU, ...]:
    """All accelerators, in the file's order; sizes in bytes, rates in bytes/s and FLOP/s."""
    return tuple(
        GPU(
            name=row["name"],
            aliases=tuple(row["aliases"]),
            vendor=row["vendor"],
            arch=row["arch"],
            total_bytes=round(row["total_mib"] * (1 << 20)),
            memory_bandwidth=row["memory_gb_s"] * 1e9,
            peak_flops={dtype: value * 1e12 for dtype, value in row["tflops"].items()},
            link_bandwidth=row["link_gb_s"] * 1e9,
            has_nvlink="NVLink" in row["link_kind"],
            sm_count=row["sm_count"],
            l2_bytes=round(row["l2_mb"] * (1 << 20)),
            compute_capability=row["compute_capability"],
            source=row["total_source"],
            unverified=tuple(row["unverified"]),
        )
        for row in _data("gpus.json")
    )


def _gpu_key(name: str) -> str:
    """'NVIDIA GeForce RTX 4090', 'rtx-4090' and 'RTX4090' are one card."""
    lower = name.lower()
    for word in ("nvidia", "geforce", "amd", "instinct", "tesla", "intel(r)", "graphics"):
        lower = lower.replace(word, "")
    return re.sub(r"[^a-z0-9]", "", lower)


@cache
def _gpu_names() -> dict[str, GPU]:
    names: dict[str, GPU] = {}
    for gpu in gpus():
        names.setdefault(_gpu_key(gpu.name), gpu)
    for gpu in gpus():
        for alias in gpu.aliases:
            names.setdefault(_gpu_key(alias), gpu)
    return names


def find_gpu(name: str) -> GPU:
    """The accelerator of that name, alias, or nvidia-smi spelling. Raises InputError with near names."""
    names = _gpu_names()
    key = _gpu_key(name)
    if key in names:
        return names[key]
    near = list(
        dict.fromkeys(names[each].name for each in difflib.get_close_matches(key, names, n=4, cutoff=0.6))
    )
    hint = f"  Nearest: {', '.join(near)}. More: kvplan gpus" if near else "  All names: kvplan gpus"
    raise InputError(f"--gpu {name!r} is not in the catalogue; or give --gpu-memory-gib.\n{hint}")
