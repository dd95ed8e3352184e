"""The facts of one accelerator that memory and step time need."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class GPU:
    """One accelerator. ``total_bytes`` is what the driver reports, never the sheet's "80 GB"."""

    name: str
    aliases: tuple[str, ...]
    vendor: str
    arch: str
    total_bytes: int
    memory_bandwidth: float  # bytes per second
    peak_flops: dict[str, float]  # dense FLOP/s by dtype: bf16, fp16, fp8, fp4
    link_bandwidth: float  # bytes per second, one direction, to peers (NVLink or PCIe)
    has_nvlink: bool
    sm_count: int
    l2_bytes: int
    compute_capability: str | None
    source: str = ""
    unverified: tuple[str, ...] = ()

    @property
    def total_gib(self) -> float:
        return self.total_bytes / GIB
