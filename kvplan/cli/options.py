"""The flags that every command shares: model, hardware and engine, declared once as a table.

A command takes them all with one decorator and one parameter::

    @app.command()
    @shared_flags()
    def simulate(flags: Flags, trace: Annotated[str, typer.Argument()], ...) -> None:
        target = resolve_target(flags)   # .model, .gpu, .settings, .notes
        plan = pool_for(target.model, target.gpu, target.settings)

``shared_flags(omit=("block_size",))`` leaves a flag to the command itself (simulate's is repeatable), and
``shared_flags(model_argument=True)`` makes MODEL an argument instead of ``--model``.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

import typer

from kvplan.errors import InputError
from kvplan.spec.engine import ENGINES, NEWEST_VLLM, EngineSettings
from kvplan.spec.gpu import GIB, GPU
from kvplan.spec.model import Layer, LayerKind, ModelSpec


@dataclass(frozen=True)
class Flag:
    """One flag that takes a value. ``low`` and ``high`` bound numbers; ``choices`` lists words."""

    name: str  # of the field
    kind: type  # int, float or str
    help: str
    low: float = 1
    high: float = 1 << 40
    choices: tuple[str, ...] = ()
    short: str | None = None
    metavar: str | None = None

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    def parse(self, text: str) -> Any:
        """The value of ``text``; numbers may end in k, m, g (1000s) or K, M, G (1024s), as in vLLM."""
        if self.choices and text not in self.choices:
            listed = ", ".join(self.choices)
            line = f"{self.option} is {text!r}; must be one of"
            # An error line is not wrapped: a long list stands below it.
            fits = len(f"error: {line} {listed}.") <= 80
            raise InputError(f"{line} {listed}." if fits else f"{line}\n{_listed(listed)}.")
        if self.kind is str:
            return text
        match = re.fullmatch(r"([+-]?\d[\d_]*\.?\d*(?:[eE][+-]?\d+)?)([kmgKMG]?)", text.strip())
        value = float(match[1]) if match else math.nan
        if match and match[2]:
            power = "kmg".index(match[2].lower()) + 1
            value *= (1024 if match[2].isupper() else 1000) ** power
        whole = self.kind is int
        if not self.low <= value <= self.high or (whole and value != int(value)):
            numbers = "a whole number" if whole else "a number"
            raise InputError(
                f"{self.option} is {text}; must be {numbers} from {self.low:,} to {self.high:,}."
            )
        return int(value) if whole else value


@dataclass(frozen=True)
class Switch:
    """One on/off flag; ``None`` is "not said"."""

    name: str
    help: str
    negative: bool = True
    default: bool | None = None

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")


def _listed(words: str) -> str:
    return textwrap.fill(words, 79, initial_indent="  ", subsequent_indent="  ")


MAX_TOKENS = 1 << 31
BARE_MAX_MODEL_LEN = 4096
KV_DTYPES = (
    "auto", "bfloat16", "bf16", "float16", "fp16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla",
    "fp8_per_token_head", "int8_per_token_head",
)  # fmt: skip

ENGINE_FLAGS: tuple[Flag | Switch, ...] = (
    Flag("engine", str, "Serving engine", choices=tuple(ENGINES)),
    Flag("engine_version", str, f"Its version [{NEWEST_VLLM}]"),
    Flag("tensor_parallel_size", int, "Ranks that split each layer", high=1024, short="-tp"),
    Flag("pipeline_parallel_size", int, "Stages that split the layers", high=1024, short="-pp"),
    Flag("data_parallel_size", int, "Replicas of the attention part", high=4096, short="-dp"),
    Switch("enable_expert_parallel", "Spread experts over TP x DP", negative=False, default=False),
    Flag("decode_context_parallel_size", int, "Ranks that split a request's KV", high=1024),
    Flag("gpu_memory_utilization", float, "Share of the GPU the engine may use", low=0.01, high=1.0),
    Flag("max_model_len", int, "Longest request, input + output [the model's own]", high=MAX_TOKENS),
    Flag("max_num_seqs", int, "Requests that run at once", high=1 << 20),
    Flag("max_num_batched_tokens", int, "Tokens a step", high=1 << 26),
    Flag("block_size", int, "Tokens a block [16]", high=1 << 20),
    Flag(
        "dtype",
        str,
        "Compute type",
        choices=("auto", "bfloat16", "float16", "half", "float32", "float"),
    ),
    Flag("kv_cache_dtype", str, "Type of K and V", choices=KV_DTYPES),
    Flag("quantization", str, "Weight format, e.g. fp8, awq_marlin, modelopt_fp4"),
    Switch("enforce_eager", "No CUDA graphs", negative=False, default=False),
    Switch("enable_prefix_caching", "Share blocks of equal prefixes [on]"),
    Switch("enable_chunked_prefill", "Split long prompts over steps [on]"),
    Flag("long_prefill_token_threshold", int, "Longest chunk of one prompt", low=0, high=MAX_TOKENS),
    Flag("kv_cache_memory_bytes", int, "KV pool of a rank; skips the budget", high=1 << 50),
    Flag("num_gpu_blocks_override", int, "KV pool in blocks", high=1 << 36),
    Flag("scheduling_policy", str, "Order of admission", choices=("fcfs", "priority")),
    Switch("async_scheduling", "Two batches in flight [by version]"),
    Flag("watermark", float, "Share of blocks kept free at admission", low=0.0, high=1.0),
    Switch("scheduler_reserve_full_isl", "Admit only when the whole prompt fits [by version]"),
    Flag("prefix_cache_retention_interval", str, "Window and state blocks kept cached; none = all"),
    Switch("disable_hybrid_kv_cache_manager", "Allocate every layer as full attention [by model]"),
    Flag("kv_cache_layout", str, "Order of the KV tensor", choices=("LBNHC", "BLNHC")),
    Flag("speculative_model", str, "Draft model"),
    Flag("num_speculative_tokens", int, "Draft tokens a step", low=0, high=64),
    Flag("max_loras", int, "LoRA adapters on the GPU", low=0, high=4096),
    Flag("max_lora_rank", int, "Largest LoRA rank", low=0, high=4096),
    Flag("kv_offload_gib", float, "KV kept in CPU memory", low=0.0, high=1 << 20),
    Flag("model_runner", str, "Engine's model runner [by version]", choices=("v1", "v2")),
)

SHAPE_FLAGS: tuple[Flag, ...] = (
    Flag("layers", int, "Bare formula: layers", high=1 << 16),
    Flag("kv_heads", int, "Bare formula: KV heads", high=1 << 16),
    Flag("head_dim", int, "Bare formula: elements a head", high=1 << 16),
    Flag("heads", int, "Bare formula: query heads", high=1 << 16),
    Flag("hidden_size", int, "Bare formula: hidden size", high=1 << 24),
)

HARDWARE_FLAGS: tuple[Flag, ...] = (
    Flag("gpu", str, "Accelerator, as in `kvplan gpus` [h100]", metavar="NAME"),
    Flag("gpu_memory_gib", float, "Its memory, when it differs", low=0.1, high=65536.0),
)

VALUE_FLAGS: dict[str, Flag] = {
    flag.name: flag for flag in (*ENGINE_FLAGS, *SHAPE_FLAGS, *HARDWARE_FLAGS) if isinstance(flag, Flag)
}
SWITCHES: dict[str, Switch] = {flag.name: flag for flag in ENGINE_FLAGS if isinstance(flag, Switch)}
_SETTING_FIELDS = {f.name for f in fields(EngineSettings)}


@dataclass(frozen=True)
class Flags:
    """What the shared flags said, parsed; only what was given is in ``given``."""

    settings: EngineSettings
    model: str | None = None
    gpu: str | None = None
    gpu_memory_gib: float | None = None
    shape: Mapping[str, int] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)

    def with_values(self, values: Mapping[str, Any]) -> Flags:
        """The same flags with some values replaced (a cell of `--sweep`)."""
        return make_flags({**self.given, **values})


@dataclass(frozen=True)
class Target:
    """What is served on what, and what was said while working that out."""

    model: ModelSpec
    gpu: GPU
    settings: EngineSettings
    notes: tuple[str, ...] = ()
    resolved_from: str | None = None  # the name typed, where it is not the model's own
    bare: bool = False  # only the formula: no weights known


def make_flags(values: Mapping[str, Any]) -> Flags:
    """Build `Flags` from parsed values; raises `InputError` for flags that contradict each other."""
    given = {name: value for name, value in values.items() if value is not None}
    settings = {name: value for name, value in given.items() if name in _SETTING_FIELDS}
    if settings.get("engine", "vllm") != "vllm":
        settings.setdefault("engine_version", "unspecified")
    for name, aliases in _ALIASES.items():
        if name in settings:
            settings[name] = aliases.get(settings[name], settings[name])
    retention = settings.get("prefix_cache_retention_interval")
    if retention is not None and retention != "none":
        number = Flag("prefix_cache_retention_interval", int, "", low=0, high=MAX_TOKENS)
        settings["prefix_cache_retention_interval"] = number.parse(str(retention))
    flags = Flags(
        settings=EngineSettings(**settings),
        model=given.get("model"),
        gpu=given.get("gpu"),
        gpu_memory_gib=given.get("gpu_memory_gib"),
        shape={flag.name: given[flag.name] for flag in SHAPE_FLAGS if flag.name in given},
        given=given,
    )
    _refuse_contradictions(flags)
    return flags


_ALIASES: dict[str, dict[str, str]] = {"dtype": {"half": "float16", "float": "float32"}}


def _refuse_contradictions(flags: Flags) -> None:
    s = flags.settings
    if s.speculative_model and not s.num_speculative_tokens:
        raise InputError("--speculative-model needs --num-speculative-tokens N.")
    if s.max_lora_rank and not s.max_loras:
        raise InputError("--max-lora-rank needs --max-loras N.")
    if s.kv_cache_memory_bytes and s.num_gpu_blocks_override:
        raise InputError("--kv-cache-memory-bytes and --num-gpu-blocks-override both set the pool: use one.")
    if flags.shape:
        if flags.model is not None:
            dimensions = ", ".join(VALUE_FLAGS[name].option for name in flags.shape)
            raise InputError(f"MODEL {flags.model!r} and {dimensions} both give the shape: use one.")
        missing = [name for name in ("layers", "kv_heads", "head_dim") if name not in flags.shape]
        if missing:
            needed = " and ".join(VALUE_FLAGS[name].option for name in missing)
            raise InputError(f"the bare formula needs --layers, --kv-heads and --head-dim: {needed} missing.")


def shared_flags(
    omit: tuple[str, ...] = (), model_argument: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a Typer command all shared flags; they reach it as its parameter annotated ``Flags``."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command, eval_str=True)
        slot = next(p.name for p in own.parameters.values() if p.annotation is Flags)
        model: Any = (
            Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Catalogue name or config.json")]
            if model_argument
            else Annotated[str | None, typer.Option("--model", metavar="MODEL", help="Name or config.json")]
        )
        shared = [inspect.Parameter("model", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=model)]
        for flag in (*HARDWARE_FLAGS, *ENGINE_FLAGS, *SHAPE_FLAGS):
            if flag.name not in omit:
                shared.append(_parameter(flag))
        names = [parameter.name for parameter in shared]
        rest = [p.replace(kind=p.KEYWORD_ONLY) for p in own.parameters.values() if p.name != slot]

        @functools.wraps(command)
        def wrapper(**values: Any) -> Any:
            parsed: dict[str, Any] = {}
            for name in names:
                text = values.pop(name)
                flag = VALUE_FLAGS.get(name)
                parsed[name] = text if text is None or flag is None else flag.parse(text)
            return command(**{slot: make_flags(parsed)}, **values)

        parameters = [*(shared if model_argument else rest), *(rest if model_argument else shared)]
        wrapper.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _parameter(flag: Flag | Switch) -> inspect.Parameter:
    annotation: Any
    if isinstance(flag, Switch):
        names = flag.option + (f"/--no-{flag.option[2:]}" if flag.negative else "")
        annotation = Annotated[bool | None, typer.Option(names, help=flag.help, show_default=False)]
    else:
        words = [flag.option, *([f"{flag.short}"] if flag.short else [])]
        metavar = flag.metavar or {int: "N", float: "X"}.get(flag.kind, "NAME")
        if flag.choices and len(flag.choices) <= 4:
            metavar = "|".join(flag.choices)
        annotation = Annotated[str | None, typer.Option(*words, help=flag.help, metavar=metavar)]
    return inspect.Parameter(flag.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def resolve_target(flags: Flags) -> Target:
    """The model, the GPU and the engine flags that ``flags`` name, defaults included.

    Raises `InputError` for a name that is not known, with the nearest ones.
    """
    gpu, gpu_notes = resolve_gpu(flags)
    if flags.shape:
        settings, notes = flags.settings, gpu_notes
        if settings.max_model_len is None:
            settings = replace(settings, max_model_len=BARE_MAX_MODEL_LEN)
            notes = (*notes, f"max_model_len {BARE_MAX_MODEL_LEN:,}, for want of a model")
        return Target(bare_model(flags), gpu, settings, notes, bare=True)
    model, settings, notes, typed = resolve_model(flags)
    return Target(model, gpu, settings, (*notes, *gpu_notes), typed)


def resolve_gpu(flags: Flags) -> tuple[GPU, tuple[str, ...]]:
    """(the accelerator of ``--gpu``, notes); ``--gpu-memory-gib`` replaces what its driver reports.

    A card that is not in the catalogue needs ``--gpu-memory-gib``; its other facts are the default GPU's.
    """
    from kvplan.spec.catalogue import DEFAULT_GPU, find_gpu

    name, given_gib = flags.gpu or DEFAULT_GPU, flags.gpu_memory_gib
    if given_gib is None:
        return find_gpu(name), ()
    total_bytes = round(given_gib * GIB)
    try:
        gpu = find_gpu(name)
    except InputError:
        gpu = find_gpu(DEFAULT_GPU)
        note = f"{name} is not in the catalogue: all but its memory is taken from {gpu.name}"
        return replace(gpu, name=name, total_bytes=total_bytes, unverified=()), (note,)
    note = f"GPU memory {given_gib:g} GiB as given; {gpu.name} reports {gpu.total_gib:.2f}"
    unverified = tuple(name for name in gpu.unverified if name != "total_bytes")
    return replace(gpu, total_bytes=total_bytes, unverified=unverified), (note,)


def resolve_model(flags: Flags) -> tuple[ModelSpec, EngineSettings, tuple[str, ...], str | None]:
    """(model, settings, notes, the name typed when it is not the model's own).

    ``MODEL`` is a catalogue name, or a path to a config.json or its folder. A format in the name (-AWQ,
    -FP8) becomes ``--quantization`` unless that flag is given.
    """
    from kvplan.spec.catalogue import DEFAULT_MODEL, base_name, find_model

    found = find_model(flags.model or DEFAULT_MODEL, flags.settings.quantization)
    settings = flags.settings
    if found.implied_quantization and settings.quantization is None:
        settings = replace(settings, quantization=found.implied_quantization)
    # A tuned twin of the same shape (-Instruct, -it) changes no figure; a dropped format does.
    notes = found.notes if base_name(flags.model or DEFAULT_MODEL)[1] else ()
    return found.spec, settings, notes, found.resolved_from


def bare_model(flags: Flags) -> ModelSpec:
    """A model of nothing but `--layers --kv-heads --head-dim`: uniform full attention, weights unknown."""
    shape = flags.shape
    heads = shape.get("heads", shape["kv_heads"])
    layer = Layer(
        LayerKind.FULL,
        heads=heads,
        kv_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        v_head_dim=shape["head_dim"],
    )
    return ModelSpec(
        name=f"{shape['layers']} layers of {shape['kv_heads']} KV heads x {shape['head_dim']}",
        architecture="",
        layers=(layer,) * shape["layers"],
        hidden_size=shape.get("hidden_size", heads * shape["head_dim"]),
        heads=heads,
        vocab_size=0,
        intermediate_size=0,
        max_position_embeddings=0,
        source="flags",
    )
