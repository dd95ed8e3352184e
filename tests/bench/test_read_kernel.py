"""The read ceiling's kernel, without a GPU: interpreted it sums right, compiled it loads 16 bytes at a time.

Each mode has a process of its own, since Triton decides between them when the kernel is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

INTERPRET = """
import torch
from kvplan.bench.read_kernel import TILE, TILES_PER_PROGRAM, read_once
n = TILE * TILES_PER_PROGRAM + 5
print(read_once(torch.ones(n)).tolist(), n)
"""

COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvplan.bench.read_kernel import TILE, TILES_PER_PROGRAM, read_kernel
source = ASTSource(
    fn=read_kernel,
    signature=dict(source="*fp32", sums="*fp32", n_elements="i32", TILE="constexpr", TILES="constexpr"),
    constexprs={"TILE": TILE, "TILES": TILES_PER_PROGRAM},
    attrs={(i,): [["tt.divisibility", 16]] for i in range(3)},
)
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
print(ptx.count("ld.global.v4"), ptx.count("ld.global"))
"""


def run(script: str, interpret: bool, cache: os.PathLike[str]) -> str:
    pytest.importorskip("numpy")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache)} | ({"TRITON_INTERPRET": "1"} if interpret else {})
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    if "No module named 'triton'" in done.stderr:
        pytest.skip("needs triton")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_reads_every_element_once(tmp_path: os.PathLike[str]) -> None:
    """Given ones, expected each program's number of elements: a full program and one of 5."""
    assert run(INTERPRET, True, tmp_path).strip() == "[65536.0, 5.0] 65541"


def test_compiled_for_hopper_it_loads_16_bytes_and_nothing_less(tmp_path: os.PathLike[str]) -> None:
    """16 tiles of 4,096 float32 over 256 threads: 4 loads of 16 bytes a thread and tile."""
    wide, all_loads = (int(word) for word in run(COMPILE, False, tmp_path).split())
    assert wide == all_loads == 64
