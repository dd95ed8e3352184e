"""The compiled core makes every decision that vLLM 0.32's own scheduler made, at every step.

Source: ../shared/oracle, recorded from vLLM 0.32.0. Compared: requests and tokens in order, new, resumed,
preempted, finished, first tokens, the running list, the head of the queue, all free counts, hit tokens, block
ids and the head of the free queue.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import SHARED
from tests.sched.oracle import differences, load, record_names, replay

SYNCHRONOUS = ("a", "b", "c", "d", "e", "f", "g", "h", "k")
NAMES = record_names(*SYNCHRONOUS, "i", "j") if SHARED.exists() else ["absent"]


@pytest.mark.parametrize("name", NAMES)
def test_every_step_equals_the_record(name: str, tmp_path: Path) -> None:
    record = load(name)

    trace, run = replay(record, tmp_path)

    assert differences(record, run) == []
    assert int(run.count["preemptions"]) == record.meta["preemptions"]
    assert int(run.count["peak_running"]) == record.meta["peak_running"]
    assert int(run.count["free"]) == record.meta["end_free_blocks"]
    assert len(trace) == record.meta["n_requests"]


def test_all_25_full_attention_records_are_there() -> None:
    """24 synchronous, 1 asynchronous: the count that README states."""
    assert len(record_names(*SYNCHRONOUS)) == 24
    assert len(record_names("i")) == 1


def test_all_11_records_of_hybrid_pools_are_there() -> None:
    """Windows (dense, sparse, async), windows only, chunks, states (sparse, dense, without caching)."""
    kinds = [load(name).meta["settings"]["arch"].split(":")[0] for name in record_names("j")]
    assert {kind: kinds.count(kind) for kind in kinds} == {"swa": 5, "swaonly": 1, "chunk": 2, "mamba": 3}
