"""Bytes of weights in a local model folder, read from the headers of its safetensors files only."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from kvplan.errors import InputError
from kvplan.spec.model import ModelSpec

LARGEST_HEADER_BYTES = 100 << 20
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
BUFFERS = re.compile(r"rotary_emb\.|\.attn\.(masked_)?bias$|\.attention\.(masked_)?bias$|position_ids$")
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def loaded_bytes(folder: Path, spec: ModelSpec) -> int | None:
    """Bytes that an engine loads from ``folder`` at 16 bit; None when it holds no safetensors.

    Left out, as engines do (WEIGHTS_AND_CONFIGS.md section 1): MTP layers, old buffers, the second copy of a
    tied embedding. Float32 tensors count as 16 bit. Without the files themselves, the index's total_size.
    Raises InputError for a damaged header or index.
    """
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file() and len(files) < len(_shards(index)):
        return _total_size(index)
    if not files:
        return None
    return sum(
        _tensor_bytes(file, name, entry)
        for file in files
        for name, entry in _header(file).items()
        if name != "__metadata__" and not _left_out(name, spec)
    )


def _left_out(name: str, spec: ModelSpec) -> bool:
    layer = LAYER.search(name)
    if name.startswith("mtp.") or (layer is not None and int(layer[1]) >= max(spec.num_layers, 1)):
        return "vision" not in name and "visual" not in name and "encoder" not in name
    if spec.tie_word_embeddings and name.endswith("lm_head.weight"):
        return True
    return BUFFERS.search(name) is not None


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= LARGEST_HEADER_BYTES:
            raise InputError(f"{file}: not a safetensors file (a header of {length:,} bytes).")
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            raise InputError(
                f"{file}: the safetensors header is no JSON; is the download complete?"
            ) from None
    if not isinstance(header, dict):
        raise InputError(f"{file}: the safetensors header must be an object.")
    return header


def _tensor_bytes(file: Path, name: str, entry: Any) -> int:
    try:
        start, end = entry["data_offsets"]
        size, item = end - start, ITEM_BYTES.get(entry["dtype"], 1)
        if size < 0:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{file}: tensor {name[:80]!r} has no proper dtype and data_offsets.") from None
    return size // 2 if item == 4 and entry["dtype"] == "F32" and size > 1 << 20 else int(size)


def _index(index: Path) -> dict[str, Any]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(f"{index}: cannot be read as JSON.") from None
    if not isinstance(found, dict) or not isinstance(found.get("weight_map"), dict):
        raise InputError(f"{index}: weight_map is missing.")
    return found


def _shards(index: Path) -> set[str]:
    return {str(name) for name in _index(index)["weight_map"].values()}


def _total_size(index: Path) -> int:
    metadata = _index(index).get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(size, bool) or not isinstance(size, int | float) or not size > 0:
        raise InputError(f"{index}: metadata.total_size is missing or no number > 0.")
    return int(size)
