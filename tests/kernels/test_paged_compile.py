"""Kernels compiled for GPUs that are not here, and what the compiler made of them read from the machine code.

Expected, from the kernels' design: 16-byte loads of K and V, tensor-core instructions, no spilled registers,
shared memory within what the GPU gives a block. Few configurations by default; all with ``--full-compile``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="kernel tests need torch, which is absent here (extra: bench)")
pytest.importorskip("triton", reason="kernel tests need triton, which is absent here (extra: bench)")

Compile = Callable[..., dict[str, Any]]
# Shared memory a block may have. CUDA C++ Programming Guide, compute capabilities; gfx942: 64 KiB LDS.
SHARED_LIMIT_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 942: 64 * 1024}

DEFAULT = [
    {"arch": 80, "dtype": "bfloat16", "block_size": 16},
    {"arch": 80, "dtype": "float16", "block_size": 64, "splits": 1},
    {"arch": 90, "dtype": "bfloat16", "block_size": 16},
    {"arch": 90, "dtype": "float16", "block_size": 1},
]
FULL = [
    {"arch": arch, "dtype": dtype, "block_size": block_size, "dim": dim, "group": group}
    for arch, dtype, block_size, dim, group in itertools.product(
        (80, 90), ("bfloat16", "float16"), (1, 16, 64, 128), (64, 128), (1, 8)
    )
]


def name_of(request: dict[str, Any]) -> str:
    return "-".join(f"sm_{value}" if key == "arch" else f"{key}={value}" for key, value in request.items())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "request_" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full-compile", default=False)
        metafunc.parametrize("request_", FULL if full else DEFAULT, ids=name_of)


def test_half_precision(request_: dict[str, Any], compile_kernels: Compile) -> None:
    """Given a bf16 or fp16 cache, expected: every K and V load is 16 bytes wide, tensor cores, no spill."""
    for kernel, made in compile_kernels(kernel="decode", **request_).items():
        assert made["stack_bytes"] == 0, kernel
        assert made["shared_bytes"] <= SHARED_LIMIT_BYTES[request_["arch"]], kernel
        if kernel == "_decode_kernel":
            # What is left of narrow loads reads lengths and block ids; 2 bytes would be halves one by one.
            assert made["loads"]["16"] >= 8
            assert made["loads"]["2"] == 0
            assert made["tensor_core"] > 0


@pytest.mark.parametrize("arch", [80, 90])
def test_float32_compiles(arch: int, compile_kernels: Compile) -> None:
    """Given float32, which is there for correctness, expected: it compiles and fits in shared memory."""
    made = compile_kernels(kernel="decode", arch=arch, dtype="float32", block_size=16)["_decode_kernel"]
    assert made["shared_bytes"] <= SHARED_LIMIT_BYTES[arch]
