"""No number without a passed check: the suite against kernels that are wrong in the ways kernels are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvplan.bench import backends, kernel  # noqa: E402
from kvplan.bench.backends import Backend, Run  # noqa: E402
from kvplan.bench.ceilings import Ceilings  # noqa: E402
from kvplan.bench.cells import Shape, Sweep  # noqa: E402
from kvplan.bench.device import CPU_LABEL, Device, detect  # noqa: E402
from kvplan.bench.tensors import Paged  # noqa: E402
from kvplan.errors import InputError  # noqa: E402
from kvplan.kernels import reference  # noqa: E402

SHAPE = Shape(2, 40, heads=4, kv_heads=2, head_dim=16, dtype="float32", kv_dtype="float32")
NUMBERS = ("median_ms", "p20_ms", "p80_ms", "kv_gb_per_s", "share_of_read", "slowdown_vs_sdpa")


@pytest.fixture(scope="module")
def device() -> Device:
    return replace(detect("cpu"), cache_bytes=0)  # no copies: these cells are tiny


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices on several threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def right(paged: Paged, lens: Any = None, table: Any = None) -> Any:
    return reference.paged_decode(
        paged.q,
        paged.k_cache,
        paged.v_cache,
        paged.block_table if table is None else table,
        paged.seq_lens if lens is None else lens,
    )


def wrong_head(paged: Paged) -> Run:
    def run() -> Any:
        out = right(paged)
        out[1, 3] = out[1, 2]
        return out

    return run


def last_token_missing(paged: Paged) -> Run:
    return lambda: right(paged, lens=paged.seq_lens - 1)


def reads_past_the_end(paged: Paged) -> Run:
    table = paged.readable_table()
    return lambda: right(paged, lens=paged.seq_lens + 1, table=table)


def blocks_swapped(paged: Paged) -> Run:
    table = paged.block_table.clone()
    table[0, :2] = paged.block_table[1, :2]
    return lambda: right(paged, table=table)


def leaves_a_row_unwritten(paged: Paged) -> Run:
    out = right(paged)

    def run() -> Any:
        out[0] = right(paged)[0]
        return out

    return run


def wrong_shape(paged: Paged) -> Run:
    return lambda: right(paged)[:1]


def raises(paged: Paged) -> Run:
    raise RuntimeError("out of registers\nand a long trace")


def own(prepare: Callable[[Paged], Run]) -> Backend:
    return Backend("under test", "kernel", ("cpu",), prepare)


def run(device: Device, *chosen: Backend, sweep: Sweep | None = None, **options: Any) -> kernel.SuiteResult:
    result = kernel.run_suite(sweep or Sweep((SHAPE,), (1, 16)), device, chosen, **options)
    kernel.add_shares(result.rows, Ceilings(10.0, "given", 8.0, 0, {}))
    return result


@pytest.mark.parametrize(
    "prepare",
    [wrong_head, last_token_missing, reads_past_the_end, blocks_swapped, leaves_a_row_unwritten, wrong_shape],
)
def test_a_wrong_kernel_yields_no_number(device: Device, prepare: Callable[[Paged], Run]) -> None:
    """Given a kernel wrong in one way, expected status failed, a reason, and none of the figures."""
    result = run(device, own(prepare))
    assert [row["status"] for row in result.rows] == ["failed"] * 3  # two block sizes and one block a row
    for row in result.rows:
        assert row["reason"].startswith("wrong result")
        assert all(row[name] is None for name in NUMBERS), row
    assert len(result.wrong) == 3
    assert [check["passed"] for check in result.checks] == [False] * 3


def test_a_kernel_that_raises_yields_no_number_and_one_line(device: Device) -> None:
    result = run(device, own(raises))
    assert {row["status"] for row in result.rows} == {"error"}
    assert result.rows[0]["reason"] == "RuntimeError: out of registers"
    assert all(result.rows[0][name] is None for name in NUMBERS)
    assert len(result.wrong) == 3


def test_a_right_kernel_gets_figures_that_follow_from_its_median(device: Device) -> None:
    result = run(device, own(lambda paged: lambda: right(paged)))
    assert not result.wrong
    for row in result.rows:
        assert row["status"] == "ok"
        assert row["kv_bytes"] == 2 * 80 * 2 * 16 * 4  # K and V x tokens x KV heads x dim x 4 bytes
        assert row["kv_gb_per_s"] == pytest.approx(row["kv_bytes"] / (row["median_ms"] / 1e3) / 1e9)
        assert row["share_of_read"] == pytest.approx(row["kv_gb_per_s"] / 10.0)
        assert row["share_of_copy"] == pytest.approx(row["kv_gb_per_s"] / 8.0)
        assert row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        assert row["device_label"] == CPU_LABEL
    one_block = next(row for row in result.rows if row["role"] == "baseline")
    assert one_block["slowdown_vs_one_block"] == 1.0
    first = result.rows[0]
    assert first["slowdown_vs_one_block"] == pytest.approx(first["median_ms"] / one_block["median_ms"])


def test_baselines_always_run_and_are_checked_too(device: Device) -> None:
    """Issue 6: contiguous SDPA, gather + SDPA, our kernel with one block a sequence; all are checked."""
    chosen = backends.choose(["numba"], "cpu")
    for lengths in ("equal", "lognormal"):
        for kv_dtype in ("float32", "bfloat16", "float8_e4m3fn"):
            shape = replace(SHAPE, lengths=lengths, kv_dtype=kv_dtype)
            result = run(device, *chosen, sweep=Sweep((shape,), (16,)))
            assert [row["backend"] for row in result.rows] == [
                "numba",
                "numba, one block a row",
                "contiguous SDPA",
                "gather + SDPA",
            ]
            assert {row["status"] for row in result.rows} == {"ok"}, result.rows
            assert all(check["passed"] for check in result.checks)
            assert len(result.checks) == 4
            sdpa = result.rows[2]
            assert sdpa["slowdown_vs_sdpa"] == 1.0
            assert sdpa["kv_cache_dtype"] == "float32"  # what it reads, not what the cell stores


def test_a_wrong_peer_has_no_number_but_is_not_our_fault(device: Device) -> None:
    peer = Backend("peer", "peer", ("cpu",), wrong_head)
    result = run(device, own(lambda paged: lambda: right(paged)), peer)
    rows = [row for row in result.rows if row["backend"] == "peer"]
    assert {row["status"] for row in rows} == {"failed"}
    assert all(row["median_ms"] is None for row in rows)
    assert not result.wrong


def test_a_cell_that_a_backend_refuses_says_why(device: Device) -> None:
    refusing = replace(
        own(wrong_head), refuses=lambda shape, block: "block 1 is not built" if block == 1 else None
    )
    rows = run(device, refusing).rows
    assert (rows[0]["status"], rows[0]["reason"]) == ("unsupported", "block 1 is not built")
    assert rows[1]["status"] == "failed"


def test_after_the_time_limit_cells_are_skipped_not_lost(device: Device) -> None:
    result = run(device, own(lambda paged: lambda: right(paged)), max_seconds=1e-9)
    assert [row["status"] for row in result.rows] == ["skipped"] * 3
    assert not result.wrong


def test_a_cell_larger_than_memory_is_skipped_with_its_size(device: Device) -> None:
    huge = Shape(4096, 1 << 20, dtype="float32", kv_dtype="float32")
    rows = run(device, own(wrong_head), sweep=Sweep((huge,), (16,))).rows
    assert rows[0]["status"] == "skipped"
    # K, V, twice in layouts and twice padded: 4096 x 2^20 x 8 KiB is 32 TiB, so at least 128 TiB
    assert "needs about 131,0" in rows[0]["reason"]


def test_small_cells_are_measured_on_copies_in_turn(device: Device) -> None:
    """Given a cache of 1 MiB and KV of 40,960 B, expected 64 copies (the cap) and the mark."""
    used: set[int] = set()

    def prepare(paged: Paged) -> Run:
        def go() -> Any:
            used.add(paged.k_cache.data_ptr())
            return right(paged)

        return go

    row = run(replace(device, cache_bytes=1 << 20), own(prepare), sweep=Sweep((SHAPE,), (16,))).rows[0]
    assert row["kv_under_4x_cache"]
    assert row["copies"] == 64
    assert len(used) > 32


def test_progress_counts_every_cell(device: Device) -> None:
    seen: list[tuple[int, int]] = []
    run(
        device,
        own(lambda paged: lambda: right(paged)),
        progress=lambda done, total, text: seen.append((done, total)),
    )
    assert seen == [(0, 3), (1, 3), (2, 3)]


@pytest.fixture
def registered() -> Iterator[str]:
    backends.register(own(wrong_head))
    yield "under test"
    backends.unregister("under test")


def test_backends_are_chosen_by_name_device_and_what_is_installed(registered: str) -> None:
    names = [backend.name for backend in backends.choose([registered, "numba"], "cpu")]
    assert names == ["under test", "numba", "contiguous SDPA", "gather + SDPA"]
    assert backends.choose([], "cpu")[0].name == "numba"
    on_gpu = [backend.name for backend in backends.choose(["triton", "triton plan"], "cuda")]
    assert on_gpu == ["triton", "triton plan", "contiguous SDPA", "gather + SDPA"]
    for name, says in (
        ("nonsense", "--backend is 'nonsense'; must be one of triton, triton plan, numba, reference, fl"),
        ("gather + SDPA", "--backend is 'gather + SDPA'"),
        ("triton", "--backend triton does not run on cpu; here there is numba, reference"),
    ):
        with pytest.raises(InputError) as caught:
            backends.choose([name], "cpu")
        assert says in str(caught.value)


def test_a_peer_that_is_not_installed_is_named() -> None:
    backends.register(Backend("absent", "peer", ("cpu",), raises, module="no_such_package_here"))
    try:
        with pytest.raises(InputError, match="--backend absent: package no_such_package_here is not inst"):
            backends.choose(["absent"], "cpu")
        assert "absent" not in [backend.name for backend in backends.choose([], "cpu")]
    finally:
        backends.unregister("absent")


def test_flash_attn_and_flashinfer_refuse_what_they_cannot_do() -> None:
    """FlashAttention 2: page % 256 == 0 (KERNELS.md section 2); neither takes fp32."""
    half = replace(SHAPE, dtype="bfloat16", kv_dtype="bfloat16")
    by_name = {backend.name: backend for backend in backends.choose(["reference"], "cpu")}
    assert "reference" in by_name
    flash, infer = (backends._REGISTRY[name] for name in ("flash-attn", "flashinfer"))
    assert flash.refuses(half, 16)
    assert flash.refuses(half, 256) is None
    assert flash.refuses(SHAPE, 256)
    assert infer.refuses(SHAPE, 16)
    assert infer.refuses(half, 16) is None


def test_ablation_runs_each_variant_once_at_one_block_size() -> None:
    """Given two block sizes, expected: kernels at both, one block a row once, variants at 16 only."""
    pytest.importorskip("triton")
    chosen = [*backends.choose(["triton", "triton plan"], "cuda"), *backends.variants("cuda")]
    jobs = kernel.jobs_of(SHAPE, (16, 64), chosen)
    assert [(job.name, job.block_size) for job in jobs[:5]] == [
        ("triton", 16),
        ("triton", 64),
        ("triton plan", 16),
        ("triton plan", 64),
        ("tile 32", 16),
    ]
    assert {job.block_size for job in jobs if job.role == "variant"} == {16}
    assert [job.name for job in jobs if job.one_block] == ["triton, one block a row"]
    assert [job.role for job in jobs] == sorted(
        (job.role for job in jobs), key=["kernel", "variant", "baseline", "peer"].index
    )
    with pytest.raises(
        InputError, match="--ablate varies the tuning of the GPU kernel; this run is on a CPU"
    ):
        backends.variants("cpu")


def test_not_finite_errors_are_null_in_rows(device: Device) -> None:
    row = run(device, own(reads_past_the_end)).rows[0]
    assert row["max_error"] is None
    assert "NaN" in row["reason"]
    assert not any(isinstance(value, float) and math.isnan(value) for value in row.values())
