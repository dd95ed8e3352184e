"""What is timed: our kernels, the baselines that always run beside them, and peers that are installed.

A backend turns a cell's tensors into a *run*, a call without arguments that returns the output. The suite
checks that output against the float64 reference before it times anything, whoever made the backend.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from kvplan.bench.cells import SHORT_NAMES, Shape
from kvplan.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from kvplan.bench.tensors import Paged

Run = Callable[[], Any]
Role = Literal["kernel", "variant", "baseline", "peer"]


@dataclass(frozen=True)
class Backend:
    """One way to attend.

    ``prepare(paged)`` builds what may be built once a step (plans, layouts) and returns the run. ``refuses``
    gives the reason why it cannot do a cell, or None. ``block_size`` of a baseline is fixed by ``layout``:
    "paged" runs at every block size, "one block" at one block per row, "contiguous" without blocks.
    """

    name: str
    role: Role
    devices: tuple[str, ...]
    prepare: Callable[[Paged], Run]
    refuses: Callable[[Shape, int], str | None] = lambda shape, block_size: None
    layout: Literal["paged", "one block", "contiguous"] = "paged"
    one_block: bool = True  # a kernel also runs with one block a row, to say what paging costs
    module: str | None = None  # the package that must be importable


DEFAULT_KERNELS = {"cuda": ("triton", "triton plan"), "cpu": ("numba",)}
_REGISTRY: dict[str, Backend] = {}


def register(backend: Backend) -> Backend:
    """Make ``backend`` known to ``--backend``; a later one of the same name takes its place."""
    _REGISTRY[backend.name] = backend
    return backend


def unregister(name: str) -> None:
    """Forget a registered backend."""
    _REGISTRY.pop(name, None)


def names(*roles: Role) -> list[str]:
    """Registered names of these roles (all by default)."""
    return [name for name, backend in _REGISTRY.items() if not roles or backend.role in roles]


def importable(backend: Backend) -> bool:
    """Whether the package behind ``backend`` is installed; whether it also loads shows when it is used."""
    if backend.module is None:
        return True
    try:
        return importlib.util.find_spec(backend.module) is not None
    except (ImportError, ValueError):
        return False


def choose(requested: list[str], device_kind: str) -> list[Backend]:
    """The backends of a run, own kernel first; baselines are always there.

    Without a request: our kernels for the device and every installed peer. Raises InputError (flag
    --backend) for a name that is unknown, not for this device, or not installed.
    """
    chosen = []
    for name in dict.fromkeys(requested):
        if name not in _REGISTRY or _REGISTRY[name].role == "baseline":
            raise InputError(f"--backend is {name!r}; must be one of {', '.join(names('kernel', 'peer'))}.")
        backend = _REGISTRY[name]
        if device_kind not in backend.devices:
            here = ", ".join(b.name for b in _REGISTRY.values() if _offered(b, device_kind))
            raise InputError(f"--backend {name} does not run on {device_kind}; here there is {here}.")
        if not importable(backend):
            raise InputError(f"--backend {name}: package {backend.module} is not installed.")
        chosen.append(backend)
    if not chosen:
        own = [_REGISTRY[name] for name in DEFAULT_KERNELS[device_kind]]
        if not importable(own[0]):
            raise InputError(f"bench needs {own[0].module} on this device: pip install 'kvplan[bench]'")
        peers = [b for b in _REGISTRY.values() if b.role == "peer" and _offered(b, device_kind)]
        chosen = [*own, *peers]
    return [*chosen, *(b for b in _REGISTRY.values() if b.role == "baseline" and device_kind in b.devices)]


def _offered(backend: Backend, device_kind: str) -> bool:
    return backend.role != "baseline" and device_kind in backend.devices and importable(backend)


# ---- our kernels ------------------------------------------------------------------------------------


def _triton(paged: Paged, changes: dict[str, Any] | None = None, planned: bool = False) -> Run:
    """Our GPU kernel: by default a fixed grid, ``planned`` a work list made from the lengths on the host."""
    import torch

    from kvplan.kernels import decode, splits

    shape, q = paged.tokens.shape, paged.q
    sms, capability = decode.device_traits(q)
    config = decode.default_config(q.dtype, paged.k_cache.dtype, shape.head_dim, capability)
    config = replace(config, **(changes or {}))
    options: dict[str, Any] = {"max_seq_len": paged.tokens.longest}
    if planned:
        plan = splits.plan_work(paged.tokens.lens, shape.kv_heads, sms, tile=config.tile)
        options = {"plan": plan, "plan_tensor": torch.from_numpy(plan.packed).to(q.device)}

    def run(check: bool = False) -> Tensor:
        return decode.paged_decode(
            q,
            paged.k_cache,
            paged.v_cache,
            paged.block_table,
            paged.seq_lens,
            config=config,
            check=check,
            **options,
        )

    run(check=True)  # ids and lengths are checked once a step, not in each layer's call
    return run


# `--ablate`: one thing of the default changed at a time. "q as M" and "K as M" are the two forms of the dot.
TRITON_VARIANTS: dict[str, dict[str, Any]] = {
    "tile 32": {"tile": 32},
    "tile 64": {"tile": 64},
    "tile 128": {"tile": 128},
    "2 warps": {"warps": 2},
    "4 warps": {"warps": 4},
    "8 warps": {"warps": 8},
    "2 stages": {"stages": 2},
    "3 stages": {"stages": 3},
    "4 stages": {"stages": 4},
    "5 stages": {"stages": 5},
    "q as M": {"swap_ab": False},
    "K as M": {"swap_ab": True},
}


def variants(device_kind: str) -> list[Backend]:
    """Our GPU kernel with its tuning changed, for `--ablate`; InputError where there is no such kernel."""
    if device_kind != "cuda":
        raise InputError("--ablate varies the tuning of the GPU kernel; this run is on a CPU.")
    return [
        Backend(name, "variant", ("cuda",), functools.partial(_triton, changes=changes), _triton_refuses)
        for name, changes in TRITON_VARIANTS.items()
    ]


def _triton_refuses(shape: Shape, block_size: int) -> str | None:
    if shape.kv_dtype == shape.dtype or shape.kv_dtype.startswith("float8"):
        return None
    return f"{SHORT_NAMES[shape.kv_dtype]} KV under {SHORT_NAMES[shape.dtype]} queries is not built"


def _plan_refuses(shape: Shape, block_size: int) -> str | None:
    if shape.lengths == "equal":
        return "a work plan is for skewed lengths"
    return _triton_refuses(shape, block_size)


def _numba(paged: Paged) -> Run:
    import torch

    from kvplan.kernels import cpu

    def run() -> Tensor:
        out = cpu.paged_decode(paged.q, paged.k_cache, paged.v_cache, paged.block_table, paged.seq_lens)
        return torch.as_tensor(out)

    return run


def _numba_refuses(shape: Shape, block_size: int) -> str | None:
    return f"head_dim {shape.head_dim} is no multiple of 8" if shape.head_dim % 8 else None


def _reference(paged: Paged) -> Run:
    from kvplan.kernels import reference

    return lambda: reference.paged_decode(
        paged.q, paged.k_cache, paged.v_cache, paged.block_table, paged.seq_lens
    )


# ---- baselines --------------------------------------------------------------------------------------


def attend_packed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """PyTorch's attention with a group's query heads packed as rows of one KV head (no copy of K and V).

    ``q [batch, heads, head_dim]``, ``k``, ``v [batch, kv_heads, n, head_dim]``; returns q's shape.
    """
    from torch.nn.functional import scaled_dot_product_attention

    batch, heads, dim = q.shape
    packed = q.view(batch, k.shape[1], heads // k.shape[1], dim)
    return scaled_dot_product_attention(packed, k, v, attn_mask=mask).reshape(batch, heads, dim)


def _contiguous_sdpa(paged: Paged) -> Run:
    from kvplan.bench.tensors import make_padded

    k, v, mask = make_padded(paged.tokens)
    return lambda: attend_packed(paged.q, k, v, mask)


def _gather_sdpa(paged: Paged) -> Run:
    """Copy the blocks of each row together, then PyTorch's attention: paging without a paged kernel."""
    import torch

    from kvplan.bench.tensors import as_bytes

    tokens = paged.tokens
    width = -(-tokens.longest // paged.block_size)
    table = paged.readable_table()[:, :width].reshape(-1).long()
    uneven = min(tokens.lens) < tokens.longest
    slots = torch.arange(width * paged.block_size, device=table.device)
    valid = slots < paged.seq_lens[:, None]
    hidden = ~valid[:, :, None, None]
    compute = paged.q.dtype

    def run() -> Tensor:
        gathered = []
        for cache in (paged.k_cache, paged.v_cache):
            rows = as_bytes(cache)[table].view(cache.dtype).to(compute)
            rows = rows.view(tokens.shape.batch_size, -1, *cache.shape[2:])
            # NaN of unused slots must go: masked attention multiplies by zero.
            rows = rows.masked_fill(hidden, 0.0) if uneven else rows[:, : tokens.longest]
            gathered.append(rows.transpose(1, 2))
        mask = valid[:, None, None, :] if uneven else None
        return attend_packed(paged.q, gathered[0], gathered[1], mask)

    return run


# ---- peers ------------------------------------------------------------------------------------------


def _flashinfer(paged: Paged) -> Run:
    """FlashInfer's batch decode. Its plan is made once a step and reused by every layer: it is not timed."""
    import torch

    flashinfer = importlib.import_module("flashinfer")

    shape, device = paged.tokens.shape, paged.q.device
    counts = torch.tensor([-(-n // paged.block_size) for n in paged.tokens.lens], dtype=torch.int32)
    indptr = torch.zeros(len(counts) + 1, dtype=torch.int32)
    indptr[1:] = torch.cumsum(counts, 0)
    table = paged.block_table.cpu()
    indices = torch.cat([row[:count] for row, count in zip(table, counts.tolist(), strict=True)])
    last = (torch.tensor(paged.tokens.lens) - 1) % paged.block_size + 1
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=shape.heads // shape.kv_heads >= 4
    )
    wrapper.plan(
        indptr.to(device),
        indices.to(device),
        last.to(torch.int32).to(device),
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        paged.block_size,
        q_data_type=paged.q.dtype,
        kv_data_type=paged.k_cache.dtype,
    )
    return lambda: wrapper.run(paged.q, (paged.k_cache, paged.v_cache))


def _flash_attn(paged: Paged) -> Run:
    flash_attn = importlib.import_module("flash_attn")
    table, q = paged.readable_table(), paged.q[:, None]
    return lambda: flash_attn.flash_attn_with_kvcache(
        q, paged.k_cache, paged.v_cache, cache_seqlens=paged.seq_lens, block_table=table
    )[:, 0]


def _flash_attn_refuses(shape: Shape, block_size: int) -> str | None:
    if block_size % 256:
        return "flash-attn 2 takes block sizes that are multiples of 256"
    if shape.dtype != shape.kv_dtype or shape.dtype == "float32":
        return f"flash-attn 2 takes fp16 and bf16, not {SHORT_NAMES[shape.kv_dtype]} KV"
    return None


def _flashinfer_refuses(shape: Shape, block_size: int) -> str | None:
    return "flashinfer takes no fp32" if shape.dtype == "float32" else None


for _backend in (
    Backend("triton", "kernel", ("cuda",), _triton, _triton_refuses, module="triton"),
    Backend(
        "triton plan",
        "kernel",
        ("cuda",),
        functools.partial(_triton, planned=True),
        _plan_refuses,
        module="triton",
        one_block=False,
    ),
    Backend("numba", "kernel", ("cpu",), _numba, _numba_refuses, module="numba"),
    Backend("reference", "kernel", ("cpu", "cuda"), _reference),
    Backend("flashinfer", "peer", ("cuda",), _flashinfer, _flashinfer_refuses, module="flashinfer"),
    Backend("flash-attn", "peer", ("cuda",), _flash_attn, _flash_attn_refuses, module="flash_attn"),
    Backend("contiguous SDPA", "baseline", ("cpu", "cuda"), _contiguous_sdpa, layout="contiguous"),
    Backend("gather + SDPA", "baseline", ("cpu", "cuda"), _gather_sdpa),
):
    register(_backend)
