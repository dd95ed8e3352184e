"""The plain-Python scheduler makes every decision that vLLM 0.32's own scheduler made, at every step.

Source: ../shared/oracle, recorded from vLLM 0.32.0. Compared: requests and tokens in order, new, resumed,
preempted, finished, first tokens, the running list, the head of the queue, all free counts, hit tokens, block
ids and the head of the free queue. Hybrid pools (window, chunked local, Mamba) and async included.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.conftest import SHARED, shared_path
from tests.sched.reference_replay import first_difference, load, replay

# Records too slow to replay whole on every run: their first steps; KVPLAN_ALL_STEPS=1 replays all.
FIRST_STEPS = {
    "a_ample": 400,
    "a_ample_nocache": 400,
    "c_prefix_ample": 600,
    "d_long_2048": 300,
    "d_long_8192": 300,
    "d_long_nochunk": 300,
    "g_maxseqs4": 600,
    "h_mooncake1000_ample": 500,
    "j_chunk8192x3_d_scarce": 500,
    "j_swa1024x5_d_scarce": 500,
    "j_swa1024x5_d_scarce_async": 500,
}


def record_names() -> list[str]:
    if not SHARED.exists():
        return []
    folder = shared_path("oracle", "records")
    return sorted(path.name.removesuffix(".meta.json") for path in folder.glob("*.meta.json"))


@pytest.mark.parametrize("name", record_names())
def test_every_step_equals_the_record(name: str) -> None:
    record = load(name)
    limit = None if os.environ.get("KVPLAN_ALL_STEPS") else FIRST_STEPS.get(name)

    steps = replay(record, steps=limit)

    assert first_difference(record, steps, limit) is None


def test_all_36_records_are_there() -> None:
    """Given the folder of records; expected: the counts by set that the claim "N of N" rests on."""
    sets = Counter(name[0] for name in record_names())

    if not sets:
        pytest.skip("needs ../shared/oracle, which is absent here")
    assert sets == {"a": 2, "b": 3, "c": 3, "d": 4, "e": 3, "f": 6, "g": 1, "h": 1, "i": 1, "j": 11, "k": 1}


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("b_scarce", 400),
        ("e_prio_scarce_tok100_noreserve", 700),
        ("i_async_a_scarce", 400),
        ("j_swa128x1_c_scarce", 250),
        ("j_chunk512x3_c_scarce", 150),
        ("j_mamba3_c_bs64_dense", 400),
    ],
)
def test_invariants_hold_after_every_step(name: str, steps: int) -> None:
    """Given a record's first steps; expected: the invariants of ARCHITECTURE.md, and every token that a
    request reads is its own, against what the batches wrote where (`reference_check`)."""
    replay(load(name), check=True, steps=steps)
