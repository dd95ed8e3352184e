"""gpu-check without a GPU: the refusal, a part that fails, and the text that a reader copies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kvplan.bench import gpu_check  # noqa: E402
from kvplan.bench.device import GPU_LABEL, Device  # noqa: E402
from kvplan.results.store import read_metadata, read_tables  # noqa: E402

H200 = Device(
    "cuda", "NVIDIA H200", GPU_LABEL, "", 132, 150 << 30, 50 << 20, {"torch": "2.11", "triton": "3.6"}
)
GATE = {"gate": "decode bf16, block 16", "passed": True, "error": 2.1e-3, "tolerance": 1.2e-2, "reason": None}
FAILED = {
    **GATE,
    "gate": "decode bf16, block 1",
    "passed": False,
    "error": None,
    "reason": "NaN or a wrong shape",
}

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")


@needs_no_gpu
def test_without_a_gpu_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvplan.bench.gpu_check", "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == "gpu-check needs a CUDA device and torch built for it; there is none here.\n"
    assert not (tmp_path / "out").exists()


@needs_no_gpu
def test_a_part_that_cannot_run_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    """Here the sweep's own process finds no GPU: its one line of error becomes the part's outcome."""
    part = gpu_check.run_sweep("kernel sweep", gpu_check.sweep_arguments(tmp_path), 120)
    assert part.outcome.startswith("exit code 2: error: --device cuda: torch finds no CUDA device here")
    assert gpu_check.run_sweep("late", [], 5).outcome == "not begun: no time left"


def test_gates_of_a_child_that_ends_early_are_kept(tmp_path: Path) -> None:
    """Here the child raises at its first gate (no GPU): the part says how it ended, nothing is invented."""
    if torch.cuda.is_available():
        pytest.skip("is about a machine without a GPU")
    gates, part = gpu_check.run_gates_part(tmp_path, 120)
    assert all(not gate["passed"] for gate in gates)
    assert len(gates) == len(list(tmp_path.joinpath("gates.jsonl").read_text().splitlines()))
    assert part.name == "gates"


def test_gates_go_to_parquet_with_the_device(tmp_path: Path) -> None:
    assert gpu_check.write_gates(tmp_path / "gates", [GATE, FAILED], H200).outcome == "ok"
    table = read_tables(tmp_path / "gates", ["gates"])["gates"]
    assert table.column("passed").to_pylist() == [True, False]
    assert table.column("error").to_pylist() == [2.1e-3, None]
    assert read_metadata(tmp_path / "gates" / "gates.parquet")["device"] == "GPU: NVIDIA H200"
    assert gpu_check.write_gates(tmp_path / "none", [], H200).outcome == "nothing to write"


def test_the_summary_has_every_part_failed_gates_and_tables_last() -> None:
    parts = [
        gpu_check.Part("gates", "ok"),
        gpu_check.Part("kernel sweep", "ok", "BLOCK SIZE 16  94 % of the read ceiling\n\n  the table\n"),
        gpu_check.Part("peer flashinfer", "exit code 2: error: no nvcc"),
    ]
    lines = gpu_check.summary_text(parts, [GATE, FAILED], ["flashinfer"], H200).splitlines()
    assert "GPU CHECK  NVIDIA H200: 1 of 2 gates passed" in lines
    assert "  peer flashinfer   exit code 2: error: no nvcc" in lines
    assert "  peer flash-attn   not installed" in lines
    assert "  FAIL        -  decode bf16, block 1: NaN or a wrong shape" in lines
    assert lines[-1] == "  the table"
    assert "torch 2.11, triton 3.6" in lines


def test_the_time_of_all_parts_is_within_ten_minutes() -> None:
    """Issue 6: at most ten minutes on one GPU."""
    assert gpu_check.TOTAL_SECONDS <= 600


def test_children_never_interpret_and_keep_their_cache_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    environment = gpu_check._environment()
    assert "TRITON_INTERPRET" not in environment
    assert environment["TRITON_CACHE_DIR"] == os.path.join(os.getcwd(), ".triton_cache")
