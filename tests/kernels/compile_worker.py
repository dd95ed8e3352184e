"""Compiles kernels for GPUs that are not here and reports what the compiler made of them.

Run as a process of its own (the test process interprets, this one compiles): reads one JSON request a line,
answers one JSON line. The kernel's wrapper is called on CPU tensors with its kernels replaced by recorders,
so what is compiled is exactly what a launch would specialise on: strides, alignments, constants, warps.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kvplan.kernels.cache_ops
import kvplan.kernels.combine
import kvplan.kernels.decode
import kvplan.kernels.mla
import kvplan.kernels.prefill
import kvplan.kernels.splits

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
SHARED_PER_SM_KIB = {80: 164, 89: 100, 90: 228, 100: 228}
TRAITS = {80: (108, (8, 0)), 89: (128, (8, 9)), 90: (132, (9, 0)), 100: (148, (10, 0)), 942: (304, None)}


class Recorder:
    """Stands in a module for a kernel: ``kernel[grid](*args, **kwargs)`` only notes what was launched."""

    def __init__(self, kernel: Any, launches: dict[str, tuple[Any, tuple, dict]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.launches[self.kernel.fn.__name__] = (self.kernel, args, kwargs)

        return launch


def record(module: Any, call: Callable[[], Any]) -> dict[str, tuple[Any, tuple, dict]]:
    """The launches that ``call`` makes of the kernels defined in ``module`` and of the joining kernel."""
    launches: dict[str, tuple[Any, tuple, dict]] = {}
    kept = [
        (owner, name, value)
        for owner in (module, kvplan.kernels.combine)
        for name, value in vars(owner).items()
        if isinstance(value, triton.JITFunction) and value.fn.__module__ == owner.__name__
    ]
    try:
        for owner, name, kernel in kept:
            setattr(owner, name, Recorder(kernel, launches))
        call()
    finally:
        for owner, name, kernel in kept:
            setattr(owner, name, kernel)
    return launches


def compile_launch(kernel: Any, args: tuple, kwargs: dict, arch: int) -> Any:
    """Compile a recorded launch the way triton's own launcher would specialise it."""
    options = {key: kwargs[key] for key in ("num_warps", "num_stages") if key in kwargs}
    given = dict(zip(kernel.arg_names, args, strict=False))
    given.update({key: value for key, value in kwargs.items() if key not in options})
    signature, constants, attributes = {}, {}, {}
    for index, param in enumerate(kernel.params):
        value = given[param.name]
        aligned = False
        if param.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name], aligned = "*" + TYPES[value.dtype], True
        elif isinstance(value, int):
            signature[param.name] = "i32" if abs(value) < 2**31 else "i64"
            aligned = value % 16 == 0 and not param.do_not_specialize
        else:
            signature[param.name] = "fp32"
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    target = GPUTarget("hip", f"gfx{arch}", 64) if arch == 942 else GPUTarget("cuda", arch, 32)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=options)


def read_cuda(compiled: Any) -> dict[str, Any]:
    """Registers, stack, shared memory, and how often each instruction of interest stands in the SASS."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        run = lambda *command: subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: E731
        usage = run(TOOLS / "cuobjdump", "-res-usage", file.name)
        sass = run(TOOLS / "nvdisasm", "-c", file.name)
    counts: Counter[str] = Counter()
    for name in re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", sass, re.M):
        counts[name] += 1
    loads = Counter({16: 0, 8: 0, 4: 0, 2: 0, 1: 0})
    tensor_core = 0
    for name, count in counts.items():
        if name.startswith(("LDG", "LDGSTS")):
            size = (
                16
                if ".128" in name
                else 8
                if ".64" in name
                else 2
                if "16" in name
                else 1
                if "8" in name
                else 4
            )
            loads[size] += count
        if name.startswith("UTMALDG"):
            loads[16] += count
        if re.match(r"[HQI]G?MMA|UTC[HQ]MMA", name):
            tensor_core += count
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack_bytes": int(re.search(r"STACK:(\d+)", usage)[1]),
        "shared_bytes": compiled.metadata.shared,
        "loads": dict(loads),
        "tensor_core": tensor_core,
        "mma": sorted({name for name in counts if "MMA" in name}),
    }


def read_amd(compiled: Any) -> dict[str, Any]:
    text = compiled.asm["amdgcn"]
    return {
        "registers": int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1]),
        "stack_bytes": int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", text)[1]),
        "shared_bytes": compiled.metadata.shared,
        "loads": {16: len(re.findall(r"(?:global|buffer)_load_dwordx4", text))},
        "tensor_core": len(re.findall(r"v_mfma", text)),
        "mma": sorted(set(re.findall(r"v_mfma\w+", text))),
    }


def in_flight(found: dict[str, Any], kernel: Any, args: tuple, kwargs: dict, arch: int) -> dict[str, Any]:
    """Programs that fit on one SM, by registers, shared memory and threads, and their KV bytes in flight.

    A pipeline of ``num_stages`` holds num_stages - 1 tiles that are on their way.
    """
    threads = kwargs["num_warps"] * 32
    by_registers = 65536 // (-(-found["registers"] // 8) * 8 * threads)
    # A block also takes 1 KiB that the driver reserves (CUDA C++ Programming Guide, shared memory).
    by_shared = (SHARED_PER_SM_KIB[arch] * 1024) // (found["shared_bytes"] + 1024)
    programs = min(by_registers, by_shared, 2048 // threads)
    cache = next(arg for name, arg in zip(kernel.arg_names, args, strict=False) if name.endswith("_cache"))
    numbers = kwargs["LATENT"] + kwargs["ROPE"] if "LATENT" in kwargs else 2 * kwargs.get("DIM", 0)
    tile_bytes = kwargs["TILE"] * numbers * cache.element_size()
    return {
        "programs_per_sm": programs,
        "in_flight_bytes": programs * (kwargs.get("num_stages", 1) - 1) * tile_bytes,
    }


def traits_of(arch: int) -> Callable[[Any], tuple[int, tuple[int, int] | None]]:
    return lambda _tensor: TRAITS[arch]


def tensors(request: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """q, a cache, a block table and lengths of the shapes and types that a request asks for."""
    group, dim, kv_heads = request.get("group", 4), request.get("dim", 128), request.get("kv_heads", 8)
    dtype = getattr(torch, request["dtype"])
    kv_dtype = getattr(torch, request.get("kv_dtype", request["dtype"]))
    cache = torch.zeros((4, request["block_size"], kv_heads, dim)).to(kv_dtype)
    q = torch.zeros((2, kv_heads * group, dim), dtype=dtype)
    return q, cache, torch.zeros((2, 16), dtype=torch.int32), torch.zeros(2, dtype=torch.int32)


def decode_call(request: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
    """A decode launch by dtype, kv_dtype, group, dim, block_size, splits, window, soft_cap, sinks, plan."""
    module = kvplan.kernels.decode
    q, cache, table, lens = tensors(request)
    config = module.DecodeConfig(**request["config"]) if "config" in request else None
    sinks = torch.zeros(q.shape[1]) if request.get("sinks") else None
    options = {"num_splits": request.get("splits", 8), "config": config, "sinks": sinks}
    options |= {key: request[key] for key in ("window", "soft_cap") if key in request}
    if request.get("plan"):
        options["plan"] = kvplan.kernels.splits.plan_work([0, 0], cache.shape[2], 132)
    return module, lambda: module.paged_decode(q, cache, cache, table, lens, **options)


def prefill_call(request: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
    """A prefill launch by dtype, kv_dtype, group, dim, block_size, window, soft_cap, config."""
    module = kvplan.kernels.prefill
    q, cache, table, lens = tensors(request)
    start = torch.tensor([0, 1, 2], dtype=torch.int32)
    config = module.PrefillConfig(**request["config"]) if "config" in request else None
    options = {key: request[key] for key in ("window", "soft_cap") if key in request}
    return module, lambda: module.paged_prefill(
        q, cache, cache, table, lens, start, config=config, check=False, **options
    )


def write_call(request: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
    """A launch that writes tokens by dtype, kv_dtype, dim, block_size."""
    module = kvplan.kernels.cache_ops
    q, cache, _table, _lens = tensors(request | {"group": 1})
    module.interpreting = lambda: True  # take the kernel, not torch, on these CPU tensors
    return module, lambda: module.write_kv(q, q, cache, cache.clone(), torch.zeros(2, dtype=torch.int64))


def mla_call(request: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
    """An MLA decode launch (512 + 64) by dtype, kv_dtype, group (heads), block_size, splits, config."""
    module = kvplan.kernels.mla
    q, cache, table, lens = tensors({"group": 16} | request | {"kv_heads": 1, "dim": 576})
    config = module.MlaConfig(**request["config"]) if "config" in request else None
    options = {"scale": 0.07, "num_splits": request.get("splits", 8), "config": config}
    return module, lambda: module.mla_decode(q, cache[:, :, 0], table, lens, **options)


CALLS = {"mla": mla_call, "decode": decode_call, "prefill": prefill_call, "write": write_call}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    module, call = CALLS[request["kernel"]](request)
    arch = request["arch"]
    module.device_traits = traits_of(arch)
    launches = record(module, call)
    result = {}
    for name, (kernel, args, kwargs) in launches.items():
        # ptxas failures print the whole program; keep it out of the protocol.
        with contextlib.redirect_stdout(io.StringIO()):
            compiled = compile_launch(kernel, args, kwargs, arch)
        result[name] = read_amd(compiled) if arch == 942 else read_cuda(compiled)
        if name != "_combine_kernel" and "TILE" in kwargs and arch != 942:
            result[name] |= in_flight(result[name], kernel, args, kwargs, arch)
    return result


if __name__ == "__main__":
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:
            while error.__cause__ is not None:
                error = error.__cause__
            reply = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps(reply), flush=True)
