"""The kernel suite: every cell is checked against the float64 reference, and only then timed.

A row is a cell and a backend. Its ``status`` is "ok", "failed" (wrong result), "error" (it raised),
"unsupported" (the backend refuses the cell) or "skipped" (memory or time); only "ok" rows carry numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from kvplan.bench import tensors
from kvplan.bench.backends import Backend
from kvplan.bench.ceilings import Ceilings
from kvplan.bench.cells import Shape, Sweep
from kvplan.bench.device import Device, free_memory_bytes
from kvplan.bench.timing import (
    CACHE_MULTIPLE,
    Run,
    Timing,
    copies_needed,
    time_cpu,
    time_cuda_eager,
    time_cuda_graph,
)

CONTIGUOUS = "contiguous SDPA"
CHECK_NAME = "output = float64 reference"
OUT_OF_TIME = "the time limit was reached before this cell"


@dataclass(frozen=True)
class Job:
    """One backend on one layout of a shape's tokens; ``block_size`` is None without blocks."""

    backend: Backend
    block_size: int | None
    one_block: bool = False  # our kernel with each row in one block: what paging costs is measured by it

    @property
    def name(self) -> str:
        return f"{self.backend.name}, one block a row" if self.one_block else self.backend.name

    @property
    def role(self) -> str:
        return "baseline" if self.one_block else self.backend.role


@dataclass
class SuiteResult:
    """``rows`` as they go into kernel.parquet and ``checks``, one for each output that was compared."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def wrong(self) -> list[dict[str, Any]]:
        """Rows of our kernels and baselines that failed or raised: the run's answer is then no."""
        return [r for r in self.rows if r["status"] in ("failed", "error") and r["role"] != "peer"]

    @property
    def measured(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["status"] == "ok"]


def jobs_of(shape: Shape, block_sizes: Sequence[int], backends: Sequence[Backend]) -> list[Job]:
    """What runs for one shape, in the order of the table: kernels by block size, then what they stand beside.

    Variants of a kernel and gather + SDPA run at one block size: 16 where that is swept, else the first.
    """
    one_size = 16 if 16 in block_sizes else block_sizes[0]
    longest = max(shape.seq_lens())
    jobs = []
    for backend in backends:
        if backend.role in ("baseline", "variant"):
            jobs.append(Job(backend, None if backend.layout == "contiguous" else one_size))
        else:
            jobs += [Job(backend, block) for block in block_sizes]
        if backend.role == "kernel" and backend.one_block:
            jobs.append(Job(backend, longest, one_block=True))
    order = {"kernel": 0, "variant": 1, "baseline": 2, "peer": 3}
    return sorted(jobs, key=lambda job: order[job.role])


def run_suite(
    sweep: Sweep,
    device: Device,
    backends: Sequence[Backend],
    *,
    max_seconds: float | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> SuiteResult:
    """Check and time every cell of ``sweep``. ``progress(done, total, text)`` is called before each cell.

    After ``max_seconds`` no further cell is begun; what is left is in the rows as skipped. Never raises for a
    backend's fault: the row says what happened. Shares of a ceiling are filled in by `add_shares`.
    """
    result = SuiteResult()
    started = time.monotonic()
    plan = [(shape, job) for shape in sweep.shapes for job in jobs_of(shape, sweep.block_sizes, backends)]
    done = 0
    for shape, group in groupby(plan, key=lambda item: item[0]):
        jobs = [job for _, job in group]
        why = None if _in_time(started, max_seconds) else OUT_OF_TIME
        tokens = expected = None
        if why is None:
            why = too_large(shape, sweep.block_sizes, device)
        if why is None:
            tokens = tensors.make_tokens(shape, device.kind)
            expected = tensors.expected_output(tokens)
        rows = []
        for job in jobs:
            if progress:
                progress(done, len(plan), f"{job.name} {shape.batch_size} x {shape.context_len}")
            done += 1
            if tokens is None:
                rows.append(_row(shape, job, device, status="skipped", reason=why or ""))
            elif not _in_time(started, max_seconds):
                rows.append(_row(shape, job, device, status="skipped", reason=OUT_OF_TIME))
            else:
                row, check = measure(job, tokens, expected, device)
                rows.append(row)
                result.checks += [check] if check else []
        add_slowdowns(rows)
        result.rows += rows
        del tokens, expected
    return result


def _in_time(started: float, max_seconds: float | None) -> bool:
    return max_seconds is None or time.monotonic() - started < max_seconds


def too_large(shape: Shape, block_sizes: Sequence[int], device: Device) -> str | None:
    """Why a shape's tensors do not fit, or None. Held at once: the tokens, a layout in blocks whose last
    blocks are partly empty, a padded or gathered copy in the compute type, and one more while it is made."""
    lens = shape.seq_lens()
    per_token = shape.kv_bytes / sum(lens)
    per_token_compute = 2 * shape.kv_heads * shape.head_dim * (4 if shape.dtype == "float32" else 2)
    padded_tokens = len(lens) * max(lens)
    paged_tokens = max(sum(-(-n // b) * b for n in lens) for b in (*block_sizes, max(lens)))
    needed = shape.kv_bytes + paged_tokens * per_token + 2 * padded_tokens * per_token_compute
    # Small cells are copied until they are four times the cache; those copies count too.
    copies = copies_needed(shape.kv_bytes, device.cache_bytes)
    needed += (copies - 1) * max(paged_tokens * per_token, padded_tokens * per_token_compute)
    free = free_memory_bytes(device)
    if needed <= 0.9 * free:
        return None
    return f"needs about {needed / 2**30:,.1f} GiB; {free / 2**30:,.1f} GiB is free"


def measure(
    job: Job, tokens: tensors.Tokens, expected: Any, device: Device
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """One row, and its check unless the backend refused: lay out, check, and only when right, time."""
    base = tokens.shape
    shape = job_shape(job, base)
    block = job.block_size or tokens.longest
    refusal = job.backend.refuses(shape, block)
    if refusal:
        return _row(base, job, device, status="unsupported", reason=refusal), None
    check: dict[str, Any] | None = None
    try:
        # One block a row is contiguous whatever the order of the blocks: rows lie whole.
        paged = tensors.make_paged(tokens, block, "contiguous" if job.one_block else shape.table)
        run = job.backend.prepare(paged)
        error = tensors.worst_error(_poisoned_first(run), expected)
        tolerance = tensors.TOLERANCES[shape.dtype]
        check = {
            "check": CHECK_NAME,
            "backend": job.name,
            "block_size": job.block_size,
            "batch_size": shape.batch_size,
            "context_len": shape.context_len,
            "error": error if math.isfinite(error) else None,
            "tolerance": tolerance,
            "passed": error <= tolerance,
            "device_label": device.label,
        }
        checked = {"max_error": check["error"], "tolerance": tolerance}
        if not check["passed"]:
            found = f"relative error {error:.1e}" if math.isfinite(error) else "NaN, or a wrong shape"
            reason = f"wrong result: {found}, allowed {tolerance:.0e}"
            return _row(base, job, device, status="failed", reason=reason, **checked), check
        copies = copies_needed(shape.kv_bytes, device.cache_bytes)
        runs = [run, *(job.backend.prepare(paged.copy()) for _ in range(copies - 1))]
        timed = _time(runs, device)
    except Exception as error:  # a backend's fault, out of memory included, is that row's result
        return _row(base, job, device, status="error", reason=one_line(error)), check
    rate = shape.kv_bytes / timed["median_ms"] / 1e6
    numbers = {
        **checked,
        **timed,
        "kv_gb_per_s": rate,
        "copies": copies,
    }
    return _row(base, job, device, status="ok", **numbers), check


def one_line(error: Exception) -> str:
    """An exception as a reason in a table: its type and first line, cut where a compiler's would go on."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first if len(first) <= 160 else first[:157] + '...'}"


def job_shape(job: Job, shape: Shape) -> Shape:
    """The shape as the job reads it: contiguous attention has no table and reads the compute type."""
    if job.backend.layout == "contiguous":
        return replace(shape, table="contiguous", kv_dtype=shape.dtype)
    return replace(shape, table="contiguous") if job.one_block else shape


def _poisoned_first(run: Run) -> Any:
    """The output of a second run, the first one's memory filled with NaN: what is not written shows."""
    out = run()
    out.fill_(math.nan)
    del out  # the allocator hands the same memory out again
    return run()


def _time(runs: Sequence[Run], device: Device) -> dict[str, Any]:
    """The timing columns: on a GPU by graph replay where the run can be captured, and eager beside it."""
    if device.kind == "cpu":
        return {"timing": "wall clock", **_milliseconds(time_cpu(runs)), "eager_median_ms": None}
    eager = time_cuda_eager(runs)
    try:
        graph = time_cuda_graph(runs, eager_s=eager.median_s)
    except Exception:  # not capturable: the eager time is all there is, and the column says so
        import torch

        torch.cuda.synchronize()
        return {"timing": "eager", **_milliseconds(eager), "eager_median_ms": eager.median_s * 1e3}
    return {"timing": "CUDA graph", **_milliseconds(graph), "eager_median_ms": eager.median_s * 1e3}


def _milliseconds(timing: Timing) -> dict[str, Any]:
    return {
        "median_ms": timing.median_s * 1e3,
        "p20_ms": timing.p20_s * 1e3,
        "p80_ms": timing.p80_s * 1e3,
        "repeats": timing.repeats,
    }


def _row(base: Shape, job: Job, device: Device, *, status: str, **numbers: Any) -> dict[str, Any]:
    """A row with every column: those without a value are None. Rows of one ``setup`` belong together."""
    shape = job_shape(job, base)
    return {
        "setup": f"{base.text}, {base.table} table",
        "backend": job.name,
        "role": job.role,
        "block_size": job.block_size,
        "batch_size": shape.batch_size,
        "context_len": shape.context_len,
        "lengths": shape.lengths,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "dtype": shape.dtype,
        "kv_cache_dtype": shape.kv_dtype,
        "table": shape.table,
        "kv_bytes": shape.kv_bytes,
        "kv_under_4x_cache": 0 < shape.kv_bytes < CACHE_MULTIPLE * device.cache_bytes,
        "status": status,
        "reason": None,
        "max_error": None,
        "tolerance": None,
        "timing": None,
        "median_ms": None,
        "p20_ms": None,
        "p80_ms": None,
        "repeats": None,
        "eager_median_ms": None,
        "copies": None,
        "kv_gb_per_s": None,
        "share_of_read": None,
        "share_of_copy": None,
        "slowdown_vs_one_block": None,
        "slowdown_vs_sdpa": None,
        "device": device.name,
        "device_label": device.label,
        **numbers,
    }


def add_shares(rows: Sequence[dict[str, Any]], ceilings: Ceilings) -> None:
    """Fill in what share of the measured read and copy rates each number is."""
    for row in rows:
        if row["kv_gb_per_s"] is not None:
            row["share_of_read"] = row["kv_gb_per_s"] / ceilings.read_gb_per_s
            row["share_of_copy"] = row["kv_gb_per_s"] / ceilings.copy_gb_per_s


def add_slowdowns(rows: Sequence[dict[str, Any]]) -> None:
    """Fill in, for the rows of one shape, time over that of our kernel with one block a row (what paging
    costs) and over contiguous SDPA. Peers are held against our kernel; left None where it has no number."""
    sdpa = next((r["median_ms"] for r in rows if r["backend"] == CONTIGUOUS), None)
    own = {
        row["backend"].partition(",")[0]: row["median_ms"]
        for row in rows
        if row["role"] == "baseline" and row["backend"].endswith("one block a row")
    }
    default_own = next(iter(own.values()), None)
    for row in rows:
        if row["median_ms"] is None:
            continue
        contiguous = own.get(row["backend"].partition(",")[0], default_own)
        row["slowdown_vs_one_block"] = row["median_ms"] / contiguous if contiguous else None
        row["slowdown_vs_sdpa"] = row["median_ms"] / sdpa if sdpa else None
