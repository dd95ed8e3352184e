"""kvplan models, kvplan gpus: what is known by name, where each value is from, and what nobody checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from kvplan.cli import render
from kvplan.cli.numbers import byte_size, count, fixed
from kvplan.cli.render import Column, Format
from kvplan.errors import InputError
from kvplan.spec.catalogue import (
    ModelEntry,
    find_gpu,
    find_model,
    gpus,
    model_entries,
    plain_name,
)
from kvplan.spec.gpu import GPU
from kvplan.spec.model import LayerKind, ModelSpec

models_app = typer.Typer(add_completion=False, rich_markup_mode=None)
gpus_app = typer.Typer(add_completion=False, rich_markup_mode=None)

KV_BYTES = 2  # figures of the list are for a 16-bit cache
UNVERIFIED = "?"
HELP = {"help_option_names": ["-h", "--help"]}
Query = Annotated[str | None, typer.Argument(metavar="[QUERY]", help="Part of a name", show_default=False)]
FormatOption = Annotated[Format, typer.Option(help="table, json, csv or markdown")]


@models_app.command(context_settings=HELP)
def models(query: Query = None, format: FormatOption = Format.TABLE) -> None:
    """The models known by name, with source; a figure with ? is not verified.

    One match, or a full name, shows every value.
    """
    entries = _matching_models(query)
    rows = [model_row(entry) for entry in entries]
    if format is not Format.TABLE:
        render.emit(rows, format)
    elif len(rows) == 1:
        render.write(model_details(rows[0], render.terminal()))
    else:
        render.write(models_table(rows, query, render.terminal()))


@gpus_app.command(context_settings=HELP)
def gpus_command(query: Query = None, format: FormatOption = Format.TABLE) -> None:
    """The GPUs known by name, with source; a figure with ? is not verified.

    One match, or a full name, shows every value.
    """
    rows = [gpu_row(gpu) for gpu in _matching_gpus(query)]
    if format is not Format.TABLE:
        render.emit(rows, format)
    elif len(rows) == 1:
        render.write(gpu_details(rows[0], render.terminal()))
    else:
        render.write(gpus_table(rows, query, render.terminal()))


# ---- what matches -----------------------------------------------------------------------------------


def _matching_models(query: str | None) -> list[ModelEntry]:
    """Entries whose name or alias contains ``query``; else the one that it resolves to."""
    entries = list(model_entries())
    if not query:
        return entries
    wanted = plain_name(query)
    found = []
    for entry in entries:
        names = (entry.id, *(alias for alias, _ in entry.aliases))
        if any(wanted == plain_name(name) for name in names):
            return [entry]
        if any(wanted in plain_name(name) or query.lower() in name.lower() for name in names):
            found.append(entry)
    if found:
        return found
    name = find_model(query).spec.name  # raises with near names
    return [entry for entry in entries if entry.id == name] or _no_entry("models", query)


def _matching_gpus(query: str | None) -> list[GPU]:
    known = list(gpus())
    if not query:
        return known
    wanted = re.sub(r"[^a-z0-9]", "", query.lower())
    names = {
        gpu.name: [re.sub(r"[^a-z0-9]", "", n.lower()) for n in (gpu.name, *gpu.aliases)] for gpu in known
    }
    exact = [gpu for gpu in known if wanted == names[gpu.name][0]]
    found = exact or [gpu for gpu in known if any(wanted in name for name in names[gpu.name])]
    return found if found and wanted else [find_gpu(query)]


def _no_entry(what: str, query: str) -> Any:
    raise InputError(f"QUERY {query!r} names no entry of the catalogue of {what}; omit it to list all.")


# ---- models -----------------------------------------------------------------------------------------


def model_row(entry: ModelEntry) -> dict[str, Any]:
    """One model as a row: values, then the confidence of each value, and the source of all."""
    row: dict[str, Any] = {"id": entry.id, "aliases": [alias for alias, _ in entry.aliases]}
    try:
        spec = entry.spec()
    except InputError as error:
        unknown = str(error).split(": ", 1)[-1]
        return row | {
            "architecture": entry.config["architectures"][0], "parameters": entry.published_parameters,
            "confidence": {"parameters": "published"}, "unverified": ["kv_bytes_per_token"],
            "assumptions": [unknown], "source": entry.source,
        }  # fmt: skip
    kinds = layer_kinds(spec)
    state = sum(_state_bytes(layer) for layer in spec.layers)
    values = {
        "architecture": spec.architecture,
        "parameters": spec.parameters.loaded if spec.parameters else None,
        "layers": kinds,
        "kv_bytes_per_token": KV_BYTES * (spec.kv_elements_per_token + sum(x.index_dim for x in spec.layers)),
        "state_bytes_per_request": state,
        "sliding_window": max((layer.window for layer in spec.layers), default=0) or None,
        "max_position_embeddings": spec.max_position_embeddings or None,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "experts": spec.moe.experts if spec.moe else None,
        "experts_per_token": spec.moe.experts_per_token if spec.moe else None,
        "dtype": spec.dtype,
        "quantization": spec.quantization.method if spec.quantization else None,
        "multimodal": spec.multimodal,
    }
    confidence = {key: _confidence(entry, key) for key, value in values.items() if value is not None}
    return row | values | {
        "confidence": confidence,
        "unverified": [key for key, word in confidence.items() if word == "not verified"],
        "assumptions": list(spec.assumptions),
        "source": entry.source,
    }  # fmt: skip


# What equality with the published parameter count confirms; other values stand in the source only.
SHAPE = ("architecture", "parameters", "layers", "kv_bytes_per_token", "hidden_size", "vocab_size", "experts")
GRADES = {"exact": "parameter count exact", "within 1%": "parameter count within 1 %"}


def _confidence(entry: ModelEntry, key: str) -> str:
    unread = " ".join(entry.unverified)
    if "all fields" in unread or (key in SHAPE and entry.grade is None):
        return "not verified"
    if key in SHAPE:
        return GRADES.get(entry.grade or "", f"parameter count: {(entry.grade or '').split(' (')[0]}")
    field = {"dtype": "torch_dtype"}.get(key, key)
    if field in unread or (key == "sliding_window" and "non-shape" in unread):
        return "not verified"
    return "read in the source"


def layer_kinds(spec: ModelSpec) -> dict[str, int]:
    """Layers by kind, e.g. {'sliding': 52, 'full': 10}."""
    kinds: dict[str, int] = {}
    for layer in spec.layers:
        kinds[layer.kind.value] = kinds.get(layer.kind.value, 0) + 1
    return kinds


def _state_bytes(layer: Any) -> int:
    if layer.kind is not LayerKind.STATE or layer.state is None:
        return 0
    state = layer.state
    ssm = state.ssm_elements * state.ssm_bytes_per_element
    return int(ssm + state.conv_elements * state.conv_bytes_per_element)


def _marked(row: dict[str, Any], key: str, text: str) -> str:
    return f"{text}{UNVERIFIED}" if key in row["unverified"] and text != "-" else text


def _parameters(row: dict[str, Any]) -> str:
    size = row.get("parameters")
    return "-" if not size else f"{size / 1e9:,.2f} B" if size >= 1e9 else f"{size / 1e6:,.0f} M"


def _kinds_text(row: dict[str, Any]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in row.get("layers", {}).items()) or "not laid out"


def _per_token(row: dict[str, Any]) -> str:
    size = row.get("kv_bytes_per_token")
    return "-" if size is None else byte_size(size)


def models_table(rows: Sequence[dict[str, Any]], query: str | None, term: render.Terminal) -> str:
    columns = [
        Column("model", "left"),
        Column("params"),
        Column("layers", "left", shrinks=True, min_width=9),
        Column("KV/token"),
        Column("context", optional=1),
    ]
    body = [
        [
            row["id"].split("/", 1)[-1],
            _marked(row, "parameters", _parameters(row)),
            _kinds_text(row),
            _marked(row, "kv_bytes_per_token", _per_token(row)),
            _marked(row, "max_position_embeddings", count(row["max_position_embeddings"]))
            if row.get("max_position_embeddings")
            else "-",
        ]
        for row in rows
    ]
    foot = (
        "KV per token of a 16-bit cache while inside every window. ? is not verified. One model in full: "
        "kvplan models NAME; all values: --format json"
    )
    return "\n".join(
        [_title(len(rows), "model", query), "", render.table(columns, body, term), "", _foot(foot, term)]
    )


def model_details(row: dict[str, Any], term: render.Terminal) -> str:
    """Every value of one model, with what stands behind it."""
    shown: dict[str, Callable[[Any], str]] = {
        "architecture": str,
        "parameters": count,
        "layers": lambda _: _kinds_text(row),
        "kv_bytes_per_token": lambda size: f"{byte_size(size)} at 16 bit",
        "state_bytes_per_request": lambda size: byte_size(size) if size else "",
        "sliding_window": count,
        "max_position_embeddings": count,
        "hidden_size": count,
        "vocab_size": count,
        "experts": lambda n: f"{n}, {row['experts_per_token']} a token",
        "dtype": str,
        "quantization": str,
    }
    figures = [
        (key.replace("_", " "), text, row["confidence"].get(key, "-"))
        for key, show in shown.items()
        if row.get(key) is not None and (text := render.escape(show(row[key])))
    ]
    kv = f"{_per_token(row)} of KV a token" if "kv_bytes_per_token" in row else "KV layout not known"
    head = f"{row['id']}  {_parameters(row)} parameters, {kv}"
    return _details(head, figures, row, term)


# ---- GPUs -------------------------------------------------------------------------------------------


def gpu_row(gpu: GPU) -> dict[str, Any]:
    values = {
        "total_bytes": gpu.total_bytes,
        "memory_bandwidth_gb_s": gpu.memory_bandwidth / 1e9,
        "peak_tflops": {dtype: round(value / 1e12, 1) for dtype, value in gpu.peak_flops.items()},
        "link_gb_s": gpu.link_bandwidth / 1e9,
        "nvlink": gpu.has_nvlink,
        "sm_count": gpu.sm_count or None,
        "l2_bytes": gpu.l2_bytes or None,
        "compute_capability": gpu.compute_capability,
    }
    checks = {"memory_bandwidth_gb_s": "memory_bandwidth", "peak_tflops": "peak_flops"}
    confidence = {}
    for key, value in values.items():
        if value is not None:
            field = checks.get(key, key)
            doubted = field in gpu.unverified
            checked = key in checks or key == "total_bytes"
            confidence[key] = (
                "not verified" if doubted else "found independently" if checked else "vendor figure"
            )
    return {
        "name": gpu.name, "aliases": list(gpu.aliases), "vendor": gpu.vendor, "arch": gpu.arch, **values,
        "confidence": confidence,
        "unverified": [key for key, word in confidence.items() if word == "not verified"],
        "source": f"memory: {gpu.source}; rates: vendor's sheet, dense",
    }  # fmt: skip


def gpus_table(rows: Sequence[dict[str, Any]], query: str | None, term: render.Terminal) -> str:
    columns = [
        Column("GPU", "left", shrinks=True, min_width=18),
        Column("memory GiB"),
        Column("GB/s"),
        Column("bf16 TFLOPS"),
        Column("fp8"),
        Column("link GB/s", optional=1),
        Column("SMs", optional=2),
    ]
    body = []
    for row in rows:
        flops = row["peak_tflops"]
        rates = [fixed(flops.get(dtype), 0) for dtype in ("bf16", "fp8")]
        body.append(
            [
                row["name"],
                _marked(row, "total_bytes", fixed(row["total_bytes"] / render.GIB)),
                _marked(row, "memory_bandwidth_gb_s", count(row["memory_bandwidth_gb_s"])),
                *(_marked(row, "peak_tflops", rate) for rate in rates),
                fixed(row["link_gb_s"], 0),
                str(row["sm_count"] or "-"),
            ]
        )
    foot = (
        "Memory as the driver reports it, TFLOPS dense, link in one direction. ? is not verified. "
        "One in full: kvplan gpus NAME; all values: --format json"
    )
    return "\n".join(
        [_title(len(rows), "GPU", query), "", render.table(columns, body, term), "", _foot(foot, term)]
    )


def gpu_details(row: dict[str, Any], term: render.Terminal) -> str:
    flops = ", ".join(f"{dtype} {value:,.0f}" for dtype, value in row["peak_tflops"].items()) or "-"
    shown = {
        "total_bytes": f"{row['total_bytes'] / render.GIB:.2f} GiB",
        "memory_bandwidth_gb_s": f"{row['memory_bandwidth_gb_s']:,.0f} GB/s",
        "peak_tflops": f"{flops} TFLOPS",
        "link_gb_s": f"{row['link_gb_s']:,.0f} GB/s each way, {'NVLink' if row['nvlink'] else 'no NVLink'}",
        "sm_count": str(row["sm_count"] or ""),
        "l2_bytes": byte_size(row["l2_bytes"]) if row["l2_bytes"] else "",
        "compute_capability": row["compute_capability"] or "",
    }
    heads = {
        "total_bytes": "memory",
        "memory_bandwidth_gb_s": "bandwidth",
        "peak_tflops": "peak",
        "link_gb_s": "link",
        "sm_count": "SMs",
        "l2_bytes": "L2",
        "compute_capability": "capability",
    }
    figures = [(heads[key], text, row["confidence"].get(key, "-")) for key, text in shown.items() if text]
    head = f"{row['name']}  {row['total_bytes'] / render.GIB:.2f} GiB, {row['vendor']} {row['arch']}"
    return _details(head, figures, row, term)


# ---- shared -----------------------------------------------------------------------------------------


def _details(head: str, figures: Sequence[Sequence[str]], row: dict[str, Any], term: render.Terminal) -> str:
    columns = [Column("value", "left"), Column("figure", "left", shrinks=True), Column("confidence", "left")]
    lines = [
        render.paint(head, "1", term),
        "",
        render.table(columns, [list(each) for each in figures], term),
        "",
    ]
    if row.get("assumptions"):
        lines += [render.wrap(render.escape(text), term.width) for text in row["assumptions"]]
    if row["aliases"]:
        lines.append(render.wrap(f"Also known as {', '.join(row['aliases'])}", term.width))
    lines.append(render.wrap(f"Source: {render.escape(row['source'])}", term.width))
    return "\n".join(lines)


def _title(found: int, what: str, query: str | None) -> str:
    plural = "" if found == 1 else "s"
    return f"{found} {what}{plural}" + (f" match {render.escape(query)!r}" if query else "")


def _foot(text: str, term: render.Terminal) -> str:
    return render.dim(render.wrap(text, term.width, ""), term)
