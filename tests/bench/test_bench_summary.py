"""What a sweep says by block size, and its columns on disk."""

from __future__ import annotations

from typing import Any

import pytest

from kvplan.bench.ceilings import Ceilings, higher
from kvplan.bench.device import CPU_LABEL, Device
from kvplan.bench.summary import shares_by_block_size, summary_rows, typed

DEVICE = Device("cpu", "some CPU", CPU_LABEL, "no CUDA device found", 2, 1 << 34, 1 << 25)
CEILINGS = Ceilings(16.0, "torch.sum", 15.0, 1 << 28, {"torch.sum": 16.0})


def row(block: int, share: float | None, setup: str = "A", **more: Any) -> dict[str, Any]:
    return {
        "setup": setup,
        "backend": "numba",
        "role": "kernel",
        "block_size": block,
        "status": "failed" if share is None else "ok",
        "share_of_read": share,
        "kv_gb_per_s": None if share is None else 16 * share,
        "slowdown_vs_one_block": None,
        "slowdown_vs_sdpa": None,
        **more,
    }


def test_block_sizes_within_two_percent_of_the_best_are_equally_good() -> None:
    """UX.md's example: 73 %, 94 % and 94 % at block sizes 1, 16 and 64 is 'block size 16 or 64'."""
    found = shares_by_block_size([row(1, 0.73), row(16, 0.938), row(64, 0.945)])
    assert found is not None
    assert found.best == (16, 64)
    assert found.shares == {1: 0.73, 16: 0.938, 64: 0.945}


def test_shares_are_medians_over_setups_where_every_block_size_was_measured() -> None:
    rows = [
        row(16, 0.5),
        row(64, 0.6),
        row(16, 0.7, "B"),
        row(64, 0.8, "B"),
        row(16, 0.9, "C"),
        row(64, None, "C"),
    ]
    found = shares_by_block_size(rows)
    assert found is not None
    assert found.setups == 2
    assert found.shares == {16: pytest.approx(0.6), 64: pytest.approx(0.7)}


def test_nothing_measured_is_none_not_a_figure() -> None:
    assert shares_by_block_size([row(16, None)]) is None
    assert shares_by_block_size([]) is None


def test_summary_counts_statuses_and_names_the_device() -> None:
    (found,) = summary_rows([row(16, 0.5), row(16, None, "B")], CEILINGS, DEVICE)
    assert (found["cells"], found["ok"], found["failed"]) == (2, 1, 1)
    assert found["median_share_of_read"] == 0.5
    assert found["median_slowdown_vs_sdpa"] is None
    assert found["device_label"] == "CPU RUN, not a GPU figure"


def test_column_types_do_not_depend_on_what_failed() -> None:
    good, bad = typed([row(16, 0.5)]), typed([row(16, None)])
    assert str(good.schema.field("share_of_read").type) == "double"
    assert good.schema.field("share_of_read").type == bad.schema.field("share_of_read").type
    assert str(bad.schema.field("block_size").type) == "int64"
    assert bad.column("share_of_read").to_pylist() == [None]


def test_the_higher_of_two_ceilings_counts() -> None:
    """A ceiling measured while something else ran would flatter every kernel."""
    other = Ceilings(12.0, "torch.amax", 17.0, 1 << 28, {"torch.amax": 12.0})
    found = higher(other, CEILINGS)
    assert (found.read_gb_per_s, found.read_method, found.copy_gb_per_s) == (16.0, "torch.sum", 17.0)
