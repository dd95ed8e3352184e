"""How a GPU's bench looks, from rows given by hand: the example figures of UX.md, no measurement."""

from __future__ import annotations

from typing import Any

from kvplan.bench.ceilings import Ceilings
from kvplan.bench.device import GPU_LABEL, Device
from kvplan.cli.bench_view import bench_text
from kvplan.cli.render import Terminal

H200 = Device("cuda", "NVIDIA H200", GPU_LABEL, "", 132, 150 << 30, 50 << 20, {"triton": "3.9.0"})
CEILINGS = Ceilings(4350.0, "triton read", 4300.0, 2 << 30, {"triton read": 4350.0})
SETUP = "64 x 8,192 tokens, 32/8 heads x 128, bf16, random table"


def row(backend: str, role: str, block: int | None, us: float | None, **more: Any) -> dict[str, Any]:
    rate = None if us is None else 2 * 64 * 8192 * 8 * 128 * 2 / us / 1e3
    return {
        "setup": SETUP,
        "backend": backend,
        "role": role,
        "block_size": block,
        "batch_size": 64,
        "context_len": 8192,
        "lengths": "equal",
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "table": "random",
        "status": "ok",
        "reason": None,
        "max_error": 2.1e-3,
        "timing": "CUDA graph",
        "kv_under_4x_cache": False,
        "median_ms": None if us is None else us / 1e3,
        "eager_median_ms": None if us is None else us / 1e3 + 0.01,
        "kv_gb_per_s": rate,
        "share_of_read": None if rate is None else rate / 4350,
        "slowdown_vs_one_block": None if us is None else us / 515,
        **more,
    }


ROWS = [
    row("triton", "kernel", 1, 673),
    row("triton", "kernel", 16, 525),
    row("triton", "kernel", 64, 523),
    row("triton, one block a row", "baseline", 8192, 515),
    row("contiguous SDPA", "baseline", None, 601),
    row("flashinfer", "peer", 16, 536),
]


def test_one_setup_looks_like_the_target() -> None:
    """UX.md, bench on a GPU: answer, device and ceilings, then a row a block size and its comparisons."""
    expected = """\
BLOCK SIZE 16 OR 64  94 % of the read ceiling; block size 1: 73 %

NVIDIA H200, Triton 3.9.0. Ceilings measured now: read 4,350, copy 4,300 GB/s.
64 x 8,192 tokens, 32/8 heads x 128, bf16, random table, CUDA graph.

  block                 us  eager us  KV GB/s  of ceiling  time/contig.  check
  1                    673       683    3,191        73 %        1.31 x  ok
  16                   525       535    4,090        94 %        1.02 x  ok
  64                   523       533    4,106        94 %        1.02 x  ok
  own, contiguous      515       525    4,170        96 %        1.00 x  ok
  contiguous SDPA      601       611    3,573        82 %        1.17 x  ok
  flashinfer, page 16  536       546    4,006        92 %        1.04 x  ok

Checked before timing: output = float64 reference."""
    assert bench_text(ROWS, H200, CEILINGS, Terminal()) == expected


def test_a_wrong_result_is_the_first_line_on_a_gpu() -> None:
    failed = row("triton", "kernel", 1, None, status="failed", reason="wrong result: NaN, or a wrong shape")
    lines = bench_text([failed, *ROWS[1:]], H200, CEILINGS, Terminal()).splitlines()
    assert lines[0] == "WRONG RESULT  1 cell has no number: the check before timing failed"
    assert "  1                      -         -        -           -             -  WRONG" in lines
    assert "No number for triton at block size 1: wrong result: NaN, or a wrong shape" in lines


def test_a_kernel_that_stopped_is_not_called_wrong() -> None:
    failed = row("triton", "kernel", 1, None, status="error", reason="RuntimeError: out of memory")
    lines = bench_text([failed, *ROWS[1:]], H200, CEILINGS, Terminal()).splitlines()
    assert lines[0] == "KERNEL FAILED  1 cell has no number: the kernel stopped with an error"


def test_many_setups_get_a_line_each_and_numbers_stay_whole() -> None:
    setups: list[dict[str, Any]] = []
    for batch in (1, 8, 32, 128):
        for each in ROWS:
            setups.append({**each, "setup": f"{batch} x 8,192", "batch_size": batch})
    text = bench_text(setups, H200, CEILINGS, Terminal())
    lines = text.splitlines()
    assert lines[0] == "BLOCK SIZE 16 OR 64  94 % of the read ceiling, median of 4; block size 1: 73 %"
    head = next(line for line in lines if line.startswith("  % of read ceiling"))
    assert head.split()[4:7] == ["1", "16", "64"]
    body = lines[lines.index(head) + 1]
    assert body.startswith("  1 x 8,192, 32/8 x 128, bf16  ")
    assert body.split()[-6:] == ["73", "94", "94", "96", "82", "92"]
    assert max(len(line) for line in lines) <= 80


def test_skewed_lengths_show_both_of_our_kernels_by_name() -> None:
    rows = [*ROWS[:3], row("triton plan", "kernel", 16, 520), row("tile 128", "variant", 16, 530), *ROWS[3:]]
    text = bench_text(rows, H200, CEILINGS, Terminal())
    labels = [line[2:22].strip() for line in text.splitlines() if line.startswith("  ")][1:]
    assert labels[:6] == [
        *("triton, 1", "triton, 16", "triton, 64", "triton plan, 16", "16, tile 128"),
        "triton, contiguous",
    ]
    assert text.startswith("BLOCK SIZE 16 OR 64  94 %")


def test_marked_cells_are_explained() -> None:
    rows = [{**each, "kv_under_4x_cache": True} for each in ROWS]
    text = bench_text(rows, H200, CEILINGS, Terminal())
    assert "KV under 4 x L2 (50 MiB): copies of it were read in turn." in text.splitlines()


def test_a_share_over_the_ceiling_is_called_what_it_is() -> None:
    """No kernel reads faster than memory: more than 100 % says that the ceiling is wrong."""
    text = bench_text([row("triton", "kernel", 16, 450), *ROWS[3:]], H200, CEILINGS, Terminal())
    note = "Over 100 %: the ceiling was disturbed, or the data was cached; run again."
    assert note in text.splitlines()
    assert len(note) <= 80
    assert "Over 100 %" not in bench_text(ROWS, H200, CEILINGS, Terminal())


def test_ascii_terminals_and_narrow_ones_lose_columns_not_digits() -> None:
    text = bench_text(ROWS, H200, CEILINGS, Terminal(width=70))
    assert "eager us" not in text
    assert "3,191" in text
