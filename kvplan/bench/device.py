"""The device a figure was taken on, and the label that keeps a CPU figure from being read as a GPU figure."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvplan.errors import InputError

CPU_LABEL = "CPU RUN, not a GPU figure"
GPU_LABEL = "GPU"


@dataclass(frozen=True)
class Device:
    """What ran. ``label`` goes into every table, row and file; ``why`` says why a CPU was used."""

    kind: Literal["cpu", "cuda"]
    name: str
    label: str
    why: str
    cores: int  # CPU cores this process may use, or streaming multiprocessors
    memory_bytes: int
    cache_bytes: int  # last-level cache of the CPU or L2 of the GPU; 0 when unknown
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def described(self) -> str:
        """Label and name in one string, as Parquet metadata carries it."""
        return f"{self.label}: {self.name}"

    def as_dict(self) -> dict[str, Any]:
        """The JSON object ``device``."""
        return {**asdict(self), "is_gpu": self.kind == "cuda"}


def require_torch() -> Any:
    """The torch module. Raises InputError, saying what to install, where it is missing or broken."""
    try:
        import torch
    except (ImportError, OSError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        found = "which is not installed" if missing else f"which fails to import ({error})"
        raise InputError(f"bench needs torch, {found}: pip install 'kvplan[bench]'") from None
    return torch


def detect(requested: str = "auto") -> Device:
    """The device for ``--device auto|cuda|cpu``. Raises InputError without torch, or for an absent GPU."""
    if requested not in ("auto", "cuda", "cpu"):
        raise InputError(f"--device is {requested!r}; must be one of auto, cuda, cpu.")
    torch = require_torch()
    available = torch.cuda.is_available()
    if requested == "cuda" and not available:
        raise InputError("--device cuda: torch finds no CUDA device here; use --device cpu for a CPU figure.")
    if requested != "cpu" and available:
        if os.environ.get("TRITON_INTERPRET") == "1":
            raise InputError("TRITON_INTERPRET=1 would time an interpreter; unset it to measure a GPU.")
        return _cuda_device(torch)
    return _cpu_device("no CUDA device found" if not available else "--device cpu")


def _cuda_device(torch: Any) -> Device:
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    versions = _versions("triton")
    versions["cuda"] = str(torch.version.cuda or torch.version.hip)
    capability = ".".join(str(part) for part in torch.cuda.get_device_capability())
    versions["compute_capability"] = capability
    return Device(
        kind="cuda",
        name=found.name,
        label=GPU_LABEL,
        why="",
        cores=found.multi_processor_count,
        memory_bytes=found.total_memory,
        cache_bytes=int(getattr(found, "L2_cache_size", 0)),
        versions=versions,
    )


def _cpu_device(why: str) -> Device:
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    page_bytes = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    return Device(
        kind="cpu",
        name=_cpu_name(),
        label=CPU_LABEL,
        why=why,
        cores=cores,
        memory_bytes=pages * page_bytes,
        cache_bytes=_last_level_cache_bytes(),
        versions=_versions("numba"),
    )


def _versions(kernel_package: str) -> dict[str, str]:
    """Versions of what a figure depends on; a package that cannot be imported says so."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "numpy", kernel_package):
        try:
            module = sys.modules.get(name) or importlib.import_module(name)
            versions[name] = str(getattr(module, "__version__", "unknown"))
        except Exception as error:  # a broken install must not end the run that reports it
            versions[name] = f"not importable ({type(error).__name__})"
    return versions


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _last_level_cache_bytes() -> int:
    """The largest cache that core 0 sees, from sysfs; 0 where that is not told."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        digits, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "")
        if digits.isdigit():
            sizes.append(int(digits) * units.get(unit, 1))
    return max(sizes)


def free_memory_bytes(device: Device) -> int:
    """Memory that a run may still take on ``device``: the driver's word, or MemAvailable of Linux."""
    if device.kind == "cuda":
        import torch

        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return device.memory_bytes // 2
