"""How checkpoints store quantised matrices: read from a config, and bytes of one matrix.

Formats and their overhead: BUDGET.md section 2 (per-tensor table) and WEIGHTS_AND_CONFIGS.md section 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvplan.errors import InputError
from kvplan.spec.model import Quantization

# vLLM's names and their accepted spellings; the value is what a model without its own description gets.
NAMED: dict[str, Quantization] = {
    "fp8": Quantization("fp8", 8),
    "fp8_block": Quantization("fp8", 8, block_shape=(128, 128)),
    "modelopt": Quantization("modelopt", 8),
    "modelopt_fp4": Quantization("modelopt_fp4", 4, 16),
    "awq": Quantization("awq", 4, 128, symmetric=False),
    "gptq": Quantization("gptq", 4, 128),
    "mxfp4": Quantization("mxfp4", 4, 32),
    "bitsandbytes": Quantization("bitsandbytes", 4, 64),
    "compressed-tensors": Quantization("compressed-tensors", 8),
    "compressed-tensors-w4a16": Quantization("compressed-tensors", 4, 128),
}
SPELLINGS = {
    "nvfp4": "modelopt_fp4", "awq_marlin": "awq", "gptq_marlin": "gptq", "w8a8": "compressed-tensors",
    "w4a16": "compressed-tensors-w4a16", "fp8_e4m3": "fp8", "fbgemm_fp8": "fp8", "quark": "fp8",
}  # fmt: skip
UNQUANTISED = ("none", "bf16", "bfloat16", "fp16", "float16", "auto")


def quantization_by_name(name: str) -> Quantization | None:
    """The format behind a ``--quantization`` value; None for "none" and the 16-bit types.

    Raises InputError for a name that is not known.
    """
    lower = name.strip().lower()
    if lower in UNQUANTISED:
        return None
    key = SPELLINGS.get(lower, lower)
    if key not in NAMED:
        known = ", ".join(sorted({*NAMED, *SPELLINGS}))
        raise InputError(f"--quantization {name!r} is not known; use one of: {known}.")
    return NAMED[key]


def read_quantization(config: Mapping[str, Any], text: Mapping[str, Any], source: str) -> Quantization | None:
    """The quantisation of a config.json: top level, or inside the text part; None when there is none.

    Raises InputError when a quantisation is declared whose format is not known.
    """
    found = config.get("quantization_config") or text.get("quantization_config")
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise InputError(f"{source}: quantization_config must be an object.")
    inner = found.get("quantization")
    if isinstance(inner, Mapping):  # ModelOpt's side file
        found = {**found, **inner}
    method = str(found.get("quant_method") or found.get("method") or "modelopt").lower()
    reader = _READERS.get(method)
    if reader is None:
        raise InputError(
            f"{source}: quantization_config.quant_method is {method!r}, which is not known here."
        )
    return reader(found, source)


def _ignored(found: Mapping[str, Any]) -> tuple[str, ...]:
    names = (
        found.get("ignore")
        or found.get("exclude_modules")
        or found.get("modules_to_not_convert")
        or found.get("not_converted")
        or found.get("llm_int8_skip_modules")
        or []
    )
    return tuple(str(name) for name in names) if isinstance(names, list | tuple) else ()


def _whole(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else otherwise


def _fp8(found: Mapping[str, Any], source: str) -> Quantization:
    block = found.get("weight_block_size")
    if block is None:
        return Quantization("fp8", 8, ignored=_ignored(found))
    if not (isinstance(block, list) and len(block) == 2 and all(_whole(b, 0) for b in block)):
        raise InputError(
            f"{source}: quantization_config.weight_block_size is {block!r}; must be two numbers."
        )
    return Quantization("fp8", 8, block_shape=(block[0], block[1]), ignored=_ignored(found))


def _integer(method: str) -> Any:
    def read(found: Mapping[str, Any], source: str) -> Quantization:
        bits = _whole(found.get("bits") or found.get("w_bit"), 4)
        group = found.get("group_size") or found.get("q_group_size")
        symmetric = not found.get("zero_point", method == "awq")
        return Quantization(
            method, bits, 0 if group == -1 else _whole(group, 128), None, symmetric, _ignored(found)
        )

    return read


def _compressed(found: Mapping[str, Any], source: str) -> Quantization:
    if "bits" in found:
        weights: Mapping[str, Any] = {"num_bits": found["bits"], "group_size": found.get("group_size"),
                                      "type": found.get("type")}  # fmt: skip
    else:
        weights = _group_weights(found, source)
    bits = _whole(weights.get("num_bits"), 8)
    block = weights.get("block_structure")
    shape = (block[0], block[1]) if isinstance(block, list) and len(block) == 2 else None
    method = "mxfp4" if bits == 4 and weights.get("type") == "float" else "compressed-tensors"
    if method == "mxfp4" and _whole(weights.get("group_size"), 32) == 16:
        method = "modelopt_fp4"
    return Quantization(
        method, bits, _whole(weights.get("group_size"), 0), shape,
        weights.get("symmetric") is not False, _ignored(found),
    )  # fmt: skip


def _group_weights(found: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    groups = found.get("config_groups")
    if isinstance(groups, Mapping):
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if isinstance(weights, Mapping):
                return weights
    raise InputError(f"{source}: quantization_config.config_groups has no weights.")


def _modelopt(found: Mapping[str, Any], source: str) -> Quantization:
    algo = str(found.get("quant_algo") or "").upper()
    if algo in ("NVFP4", "FP4"):
        return Quantization("modelopt_fp4", 4, _whole(found.get("group_size"), 16), ignored=_ignored(found))
    if algo == "FP8":
        return Quantization("modelopt", 8, ignored=_ignored(found))
    if "config_groups" in found:
        return _compressed(found, source)
    raise InputError(f"{source}: quantization_config.quant_algo is {algo!r}, which is not known here.")


def _bitsandbytes(found: Mapping[str, Any], source: str) -> Quantization:
    bits = 8 if found.get("load_in_8bit") or found.get("_load_in_8bit") else 4
    group = 0 if bits == 8 else 64
    return Quantization("bitsandbytes", bits, group, ignored=_ignored(found))


_READERS: dict[str, Any] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "awq": _integer("awq"),
    "gptq": _integer("gptq"),
    "auto-round": _integer("gptq"),
    "intel/auto-round": _integer("gptq"),
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": lambda found, source: Quantization("mxfp4", 4, 32, ignored=_ignored(found)),
    "bitsandbytes": _bitsandbytes,
}


def matrix_bytes(quantization: Quantization, out: int, in_: int, experts: int = 1) -> list[int]:
    """Bytes of each tensor that stores ``experts`` matrices [out, in]: the values, then scales and the like.

    The engine's formats after loading (BUDGET.md section 2). Integers of less than 8 bits are those of Marlin
    kernels: zero points even where they are all zero, and two orders of the input rows unless it is AWQ.
    """
    n = out * in_
    group = quantization.group_size or in_
    groups = -(-in_ // group)
    match quantization.method, quantization.bits:
        case "mxfp4", _:
            sizes = [n // 2, n // 32]
        case "modelopt_fp4", _:
            sizes = [n // 2, n // 16, 4]
        case "bitsandbytes", 4:
            sizes = [n // 2, 4 * -(-n // 64)]
        case method, bits if bits < 8:
            sizes = [n * bits // 8, 2 * out * groups, out * groups * bits // 8]
            if method != "awq":
                sizes += [4 * in_, 4 * in_]
        case _ if quantization.block_shape is not None:
            rows, columns = quantization.block_shape
            sizes = [n, 4 * -(-out // rows) * -(-in_ // columns)]
        case "compressed-tensors", _:
            sizes = [n, 4 * out]
        case _:
            sizes = [n, 4]
    return [experts * size for size in sizes]
