"""What this device's memory can do, measured in the same run: no datasheet figure stands below a share.

The read ceiling is the best of several ways to read a large buffer once, since a slow way would flatter
every kernel that is held against it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvplan.bench.device import Device, free_memory_bytes
from kvplan.bench.timing import Timing, time_cpu, time_cuda_eager

GPU_BUFFER_BYTES = 2 << 30
CPU_BUFFER_BYTES = 256 << 20


@dataclass(frozen=True)
class Ceilings:
    """Rates in GB/s (1e9). A copy counts the bytes it reads and the bytes it writes."""

    read_gb_per_s: float
    read_method: str
    copy_gb_per_s: float
    buffer_bytes: int
    measured_reads_gb_per_s: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """The JSON object ``ceilings``."""
        return asdict(self)


def higher(before: Ceilings, after: Ceilings) -> Ceilings:
    """The higher of two measurements, before and after a sweep: a disturbed one must not flatter a kernel."""
    read = max(before, after, key=lambda found: found.read_gb_per_s)
    return replace(read, copy_gb_per_s=max(before.copy_gb_per_s, after.copy_gb_per_s))


def measure_ceilings(device: Device, budget_s: float = 0.4) -> Ceilings:
    """Read and copy a buffer of 2 GiB on a GPU, 256 MiB on a CPU (less where memory is short)."""
    import torch

    wanted = GPU_BUFFER_BYTES if device.kind == "cuda" else CPU_BUFFER_BYTES
    size = min(wanted, free_memory_bytes(device) // 4)
    source = torch.ones(size // 4, dtype=torch.float32, device=device.kind)
    copy = torch.empty_like(source)
    nbytes = source.numel() * 4
    clock: Callable[..., Timing] = time_cuda_eager if device.kind == "cuda" else time_cpu
    copied = clock([functools.partial(copy.copy_, source)], budget_s=budget_s)
    del copy
    rates = {
        name: nbytes / clock([read], budget_s=budget_s).median_s / 1e9
        for name, read in _readers(source, device).items()
    }
    best = max(rates, key=lambda name: rates[name])
    return Ceilings(rates[best], best, 2 * nbytes / copied.median_s / 1e9, nbytes, rates)


def _readers(source: Any, device: Device) -> dict[str, Callable[[], Any]]:
    import torch

    readers: dict[str, Callable[[], Any]] = {
        "torch.sum": lambda: torch.sum(source),
        "torch.amax": lambda: torch.amax(source),
    }
    if device.kind == "cuda":
        try:
            from kvplan.bench.read_kernel import read_once

            read_once(source)
            readers["triton read"] = lambda: read_once(source)
        except Exception:  # no Triton or it cannot compile here: torch's own reductions remain
            pass
    return readers
