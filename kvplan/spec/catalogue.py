"""The models and GPUs known by name. Data: spec/data/*.json (made by tests/spec/build_catalogue.py)."""

from __future__ import annotations

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
from kvplan.spec.safetensors import loaded_bytes

DEFAULT_MODEL = "meta-llama/Llama-3.1-8B-Instruct"
DEFAULT_GPU = "H100 SXM"

# Words that do not change what a model is, and formats that become --quantization (CLI.md, "Shared flags").
# Longest first, so that fp8-dynamic is not read as fp8; the value is one of `quantization.NAMED`.
FORMATS: tuple[tuple[str, str], ...] = (
    ("fp8-dynamic", "compressed-tensors"),
    ("awq-int4", "awq"),
    ("gptq-int4", "gptq"),
    ("quantized.w8a8", "compressed-tensors"),
    ("quantized.w4a16", "w4a16"),
    ("w8a8", "compressed-tensors"),
    ("w4a16", "w4a16"),
    ("nvfp4", "modelopt_fp4"),
    ("awq", "awq"),
    ("fp8", "fp8"),
)
WORDS = ("instruct", "it", "chat", "text", "mtp", "hf")
_FORMAT = re.compile(rf"(?:^|-)({'|'.join(re.escape(word) for word, _ in FORMATS)})(?=-|$)")
_WORD = re.compile(rf"(?:^|-)(?:{'|'.join(WORDS)})(?=-|$)")


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
    plain = plain_name(name)
    found = _FORMAT.findall(plain)
    plain = _WORD.sub("", _FORMAT.sub("", plain))
    return plain.strip("-"), dict(FORMATS)[found[0]] if found else None


@cache
def _exact_names() -> dict[str, tuple[ModelEntry, str | None]]:
    """Entry, and the format an alias stands for, by plain name; an entry's own name wins over aliases."""
    names: dict[str, tuple[ModelEntry, str | None]] = {}
    entries = model_entries()
    for entry in entries:
        names.setdefault(plain_name(entry.id), (entry, None))
    for entry in entries:
        for alias, quantization in entry.aliases:
            names.setdefault(plain_name(alias), (entry, quantization))
    return names


@cache
def _base_names() -> dict[str, tuple[ModelEntry, str | None]]:
    """The same by base name; of several entries with one base name the unquantised counts."""
    names: dict[str, tuple[ModelEntry, str | None]] = {}
    quantised: dict[str, tuple[ModelEntry, str | None]] = {}
    for plain, found in _exact_names().items():
        short, format = base_name(plain)
        (names if format is None else quantised).setdefault(short, found)
    return {**quantised, **names}


def find_model(name_or_path: str, quantization: str | None = None) -> ResolvedModel:
    """The model behind a catalogue name, an alias, a config.json or a model folder.

    ``quantization`` is what the user gave as ``--quantization``; a format in the name yields to it. The
    spec carries the format that counts. Raises InputError with near names when nothing is found.
    """
    path = Path(name_or_path)
    known = plain_name(name_or_path) in _exact_names() or base_name(name_or_path)[0] in _base_names()
    if name_or_path.endswith(".json") or (_exists(path) and not (known and _has_no_config(path))):
        return ResolvedModel(_quantised(_local_model(path), quantization))
    plain = plain_name(name_or_path)
    if plain in _exact_names():
        entry, format = _exact_names()[plain]
        return _resolved(entry, format, None, quantization)
    short, format = base_name(plain)
    if short in _base_names():
        entry, of_alias = _base_names()[short]
        return _resolved(entry, format or of_alias, name_or_path, quantization)
    raise _unknown(name_or_path)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or a null byte
        return False


def _has_no_config(path: Path) -> bool:
    """A folder that only happens to be called like a model."""
    return path.is_dir() and not (path / "config.json").is_file()


def _local_model(path: Path) -> ModelSpec:
    """The model of a config.json or a folder; weight files beside it say how many bytes are loaded."""
    spec = model_from_config(read_config(path), _name_of(path), str(path))
    folder = path if path.is_dir() else path.parent
    stored = loaded_bytes(folder, spec) if path.is_dir() or path.name == "config.json" else None
    return replace(spec, stored_bytes=stored) if stored else spec


def _resolved(
    entry: ModelEntry, format: str | None, resolved_from: str | None, given: str | None
) -> ResolvedModel:
    """The entry in the format that counts: the flag, else the one in the name, else its own."""
    spec = entry.spec()
    own = spec.quantization
    if given is not None or format is None:
        notes = (f"{resolved_from} is taken as {entry.id}",) if resolved_from else ()
        return ResolvedModel(_quantised(spec, given), resolved_from, None, notes)
    asked = quantization_by_name(format)
    if own is not None and asked is not None and own.bits == asked.bits:
        implied = None  # stored that way already
    else:
        spec, implied = replace(spec, quantization=asked), asked.method if asked else format
    taken = f", --quantization {implied}" if implied else ""
    notes = (f"{resolved_from} is taken as {entry.id}{taken}",)
    return ResolvedModel(spec, resolved_from, implied, notes if resolved_from else ())


def _quantised(spec: ModelSpec, given: str | None) -> ModelSpec:
    """``spec`` under a ``--quantization`` flag; a checkpoint of the same width describes itself better."""
    if given is None:
        return spec
    asked = quantization_by_name(given)
    own = spec.quantization
    if own is not None and asked is not None and own.bits == asked.bits:
        return spec
    return replace(spec, quantization=asked)


def _name_of(path: Path) -> str:
    """A folder's name for the config.json in it, else the file's own."""
    full = path.resolve()
    if full.is_dir():
        return full.name
    return full.parent.name if full.name == "config.json" else full.stem


def _close(name: str, known: list[str]) -> list[str]:
    """Up to three of ``known`` that look like ``name``."""
    import difflib  # only errors need it

    return difflib.get_close_matches(name[:100], known, n=3, cutoff=0.6)


def _unknown(name: str) -> InputError:
    plain = plain_name(name)
    short, _ = base_name(plain)
    known = list(dict.fromkeys([*_base_names(), *_exact_names()]))
    near = _close(plain, known)
    near += [each for each in _close(short, known) if each not in near]
    query = re.split(r"[-.\d]", near[0] if near else plain)[0]
    hint = (
        f"  Nearest: {', '.join(near[:3])}. More: kvplan models {query}" if near else "  All: kvplan models"
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
    """The accelerator of that name, alias, or nvidia-smi spelling, its memory size appended or not.

    Raises InputError with near names.
    """
    names = _gpu_names()
    key = _gpu_key(name)
    if key in names:
        return names[key]
    sized = re.fullmatch(r"(.+?)[\s_-]+(\d{2,3})\s?gb", name.strip().lower())
    if sized and _gpu_key(sized[1]) in names:
        gpu = names[_gpu_key(sized[1])]
        if 0.9 < gpu.total_bytes / (int(sized[2]) * 1e9) < 1.12:
            return gpu
    near = list(dict.fromkeys(names[each].name for each in _close(key, list(names))))
    hint = f"  Nearest: {', '.join(near)}. More: kvplan gpus" if near else "  All names: kvplan gpus"
    raise InputError(f"--gpu {name!r} is not in the catalogue; or give --gpu-memory-gib.\n{hint}")
