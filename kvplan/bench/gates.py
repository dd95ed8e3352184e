"""Correctness gates of the kernels on this machine's device: run before any figure, shown by name.

Every gate holds a kernel against the float64 reference on poisoned tensors: NaN in unused slots and free
blocks, ids far outside the pool behind each row's end, rows of 0, 1, B - 1, B and B + 1 tokens.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvplan.bench import tensors
from kvplan.bench.cells import SHORT_NAMES, Shape
from kvplan.bench.kernel import one_line
from kvplan.kernels import reference

Decode = Callable[..., Any]


@dataclass(frozen=True)
class Variant:
    """One way to call paged decode. ``sinks`` and ``window`` as in `kvplan.kernels.reference`."""

    block_size: int = 16
    group: int = 4
    head_dim: int = 128
    dtype: str = "bfloat16"
    kv_dtype: str = ""  # the type of the queries unless said
    table: str = "random"
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    heads_first: bool = False  # HND memory: [block, head, slot, dim] seen through strides
    extra: dict[str, Any] = field(default_factory=dict)  # further arguments of the kernel

    @property
    def name(self) -> str:
        """What differs, in one line."""
        stored = self.kv_dtype or self.dtype
        kv = "" if stored == self.dtype else f", KV {SHORT_NAMES[stored]}"
        words = [f"decode {SHORT_NAMES[self.dtype]}{kv}, block {self.block_size}"]
        words += [f"group {self.group}", f"d {self.head_dim}"]
        words += [f"window {self.window}"] if self.window else []
        words += [f"soft cap {self.soft_cap:g}"] if self.soft_cap else []
        words += ["sinks"] if self.sinks else []
        words += ["HND"] if self.heads_first else []
        words += ["scales"] if (self.k_scale, self.v_scale) != (1.0, 1.0) else []
        words += ["contiguous table"] if self.table == "contiguous" else []
        words += [f"{key} {value}" for key, value in self.extra.items()]
        return ", ".join(words)


@dataclass(frozen=True)
class GateResult:
    """``error`` is the worst head's relative L2 error; None when it is not finite or nothing came out."""

    gate: str
    passed: bool
    error: float | None
    tolerance: float | None
    reason: str | None = None


def decode_variants(backend: str) -> Iterator[Variant]:
    """What a decode kernel must get right: every type, block size, group and head size, every option."""
    triton = backend == "triton"
    for dtype in ("bfloat16", "float16", "float32") if triton else ("float32",):
        yield from (Variant(block, dtype=dtype) for block in (1, 16, 64, 256))
    base = Variant(dtype="bfloat16" if triton else "float32")
    yield from (replace(base, group=group) for group in (1, 8, 16))
    yield from (replace(base, head_dim=dim) for dim in (64, 80, 256))
    yield replace(base, block_size=3)
    yield replace(base, table="contiguous")
    yield replace(base, heads_first=True)
    yield replace(base, window=100)
    yield replace(base, soft_cap=30.0)
    yield replace(base, sinks=True)
    yield replace(base, window=33, soft_cap=20.0, sinks=True, block_size=64)
    if not triton:
        yield replace(base, kv_dtype="bfloat16")
    for kv_dtype in ("float8_e4m3fn", "float8_e5m2"):
        yield replace(base, kv_dtype=kv_dtype)
        yield replace(base, kv_dtype=kv_dtype, k_scale=0.5, v_scale=2.0, block_size=64)
    if triton:
        yield from (replace(base, extra={"num_splits": splits}) for splits in (1, 2, 16))


def gate_lengths(block_size: int) -> list[int]:
    """Tokens a row: none, one, about a block, and some that end inside a tile of any size."""
    return [0, 1, max(1, block_size - 1), block_size, block_size + 1, 3 * block_size + 5, 777, 2049]


def run_decode_gate(decode: Decode, variant: Variant, device: str) -> GateResult:
    """Hold ``decode`` against the reference for one variant; an exception is a failed gate."""
    tolerance = tensors.TOLERANCES[variant.dtype]
    try:
        error = _decode_error(decode, variant, device)
    except Exception as failure:  # the gate's answer: a kernel that raises is not right
        return raised(variant.name, failure)
    return result(variant.name, error, tolerance)


def result(name: str, error: float, tolerance: float) -> GateResult:
    finite = math.isfinite(error)
    reason = None if finite else "NaN or a wrong shape"
    return GateResult(name, error <= tolerance, error if finite else None, tolerance, reason)


def raised(name: str, failure: Exception) -> GateResult:
    """The failed gate that an exception is."""
    return GateResult(name, False, None, None, one_line(failure))


def make_variant(variant: Variant, device: str) -> tuple[tensors.Paged, dict[str, Any]]:
    """The poisoned tensors of a variant, and the options that kernel and reference share."""
    lens = gate_lengths(variant.block_size)
    shape = Shape(
        batch_size=len(lens),
        context_len=max(lens),
        heads=2 * variant.group,
        kv_heads=2,
        head_dim=variant.head_dim,
        dtype=variant.dtype,
        kv_dtype=variant.kv_dtype or variant.dtype,
        seed=variant.block_size,
    )
    paged = tensors.make_paged(tensors.make_tokens(shape, device, lens), variant.block_size, variant.table)
    if variant.heads_first:
        paged = replace(
            paged,
            k_cache=paged.k_cache.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3),
            v_cache=paged.v_cache.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3),
        )
    options: dict[str, Any] = {
        "window": variant.window,
        "soft_cap": variant.soft_cap,
        "k_scale": variant.k_scale,
        "v_scale": variant.v_scale,
    }
    if variant.sinks:
        options["sinks"] = torch.linspace(-1.0, 3.0, shape.heads, device=device)
    return paged, options


def _decode_error(decode: Decode, variant: Variant, device: str) -> float:
    paged, options = make_variant(variant, device)
    out = torch.as_tensor(decode(*arguments(paged), **options, **variant.extra))
    return tensors.worst_error(out, reference.paged_decode(*arguments(paged), **options))


def arguments(paged: tensors.Paged) -> tuple[Tensor, ...]:
    return paged.q, paged.k_cache, paged.v_cache, paged.block_table, paged.seq_lens


def run_graph_gate() -> GateResult:
    """A CUDA graph captured at one set of lengths must be right after lengths and table change in place."""
    from kvplan.kernels import decode

    name = "decode in a CUDA graph, lengths and table changed after capture"
    try:
        paged, _ = make_variant(Variant(), "cuda")
        table, lens = paged.block_table.clone(), paged.seq_lens.clone()
        longest = paged.tokens.longest

        def run() -> Tensor:
            return decode.paged_decode(
                paged.q, paged.k_cache, paged.v_cache, table, lens, max_seq_len=longest, check=False
            )

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        # The same rows in another order: each replay reads lengths and table anew.
        table.copy_(paged.block_table.flip(0))
        lens.copy_(paged.seq_lens.flip(0))
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        expected = reference.paged_decode(paged.q, paged.k_cache, paged.v_cache, table, lens)
        return result(name, tensors.worst_error(out, expected), tensors.TOLERANCES["bfloat16"])
    except Exception as failure:
        return raised(name, failure)


def triton_config_variants() -> Iterator[Variant]:
    """Both forms of the dot (q or K as the tensor core's wide side), whichever the device's default is."""
    from kvplan.kernels.decode import DecodeConfig

    for swap_ab in (False, True):
        yield Variant(extra={"config": DecodeConfig(tile=64, warps=4, stages=3, swap_ab=swap_ab)})


def planned(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, **options: Any) -> Any:
    """Paged decode by a work plan, as skewed lengths take it."""
    from kvplan.kernels import decode, splits

    sms, capability = decode.device_traits(q)
    config = decode.default_config(q.dtype, k_cache.dtype, q.shape[2], capability)
    plan = splits.plan_work(
        lens.tolist(), k_cache.shape[2], sms, tile=config.tile, window=options.get("window", 0)
    )
    return decode.paged_decode(q, k_cache, v_cache, table, lens, plan=plan, **options)


def planned_variants() -> Iterator[Variant]:
    """The work list at block sizes below, at and above its tile, and with every option."""
    yield from (Variant(block) for block in (1, 16, 64, 256))
    yield Variant(16, window=100, soft_cap=20.0, sinks=True)
    yield Variant(16, kv_dtype="float8_e4m3fn", k_scale=0.5, v_scale=2.0)


def run_gates(backend: str, device: str) -> Iterator[GateResult]:
    """All gates of a backend ("triton" on cuda, "numba" on cpu), one result at a time.

    A kernel whose module cannot be imported is one failed gate that says so; the others go on.
    """
    decode = kernel_function("cpu" if backend == "numba" else "decode", "paged_decode")
    if isinstance(decode, GateResult):
        yield decode
    else:
        variants = list(decode_variants(backend))
        variants += triton_config_variants() if backend == "triton" else []
        for variant in variants:
            yield run_decode_gate(decode, variant, device)
        for variant in planned_variants() if backend == "triton" else ():
            found = run_decode_gate(planned, variant, device)
            yield replace(found, gate=found.gate.replace("decode", "decode by plan", 1))
    if backend == "triton":
        from kvplan.bench import gates_other

        yield from gates_other.run_other_gates(device)
    if device == "cuda":
        yield run_graph_gate()


def kernel_function(module: str, name: str) -> Any:
    """A kernel, or the failed gate that says why its module cannot be imported."""
    try:
        return getattr(importlib.import_module(f"kvplan.kernels.{module}"), name)
    except Exception as failure:  # an import that fails is a part's result, not the end of the check
        return raised(f"import kvplan.kernels.{module}", failure)
