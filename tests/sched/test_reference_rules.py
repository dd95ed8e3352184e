"""Rules of SCHEDULER_RULES.md that no record notices when broken, each in a case small enough to do by hand.

Expected values follow from the section named in each test; `release` is the engine's (section 9).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.sched.reference_model import Request, Settings, StepRecord
from tests.sched.reference_scheduler import Scheduler, simulate


def engine(**changed: Any) -> Settings:
    small: dict[str, Any] = {
        "num_gpu_blocks": 8,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 1000,
    }
    return Settings(**{**small, **changed})


def request(index: int, prompt: int, answer: int, step: int = 0, stream: Any = None, **more: Any) -> Request:
    name = f"prompt {index}" if stream is None else stream
    return Request(index, step, [(name, 0, prompt)], f"answer {index}", answer, **more)


@pytest.mark.parametrize(
    ("release", "queue"),
    [("0.22.1", [3, 4, 5, 6, 7, 2, 1]), ("0.26.0", [2, 3, 4, 5, 6, 7, 1]), ("0.32.0", [2, 3, 4, 5, 6, 7, 1])],
)
def test_unhashed_blocks_return_to_the_front_from_0_26(release: str, queue: list[int]) -> None:
    """Given 6 tokens in block 1 (full, cached) and block 2 (partial); expected after the end: 6.2 and 9."""
    steps = simulate(engine(engine_version=release), [request(0, prompt=6, answer=1)])

    assert steps[-1].free_head8 == queue


@pytest.mark.parametrize(("release", "admitted"), [("0.18.1", [0, 1]), ("0.19.0", [0]), ("0.32.0", [0])])
def test_the_whole_prompt_must_fit_from_0_19(release: str, admitted: list[int]) -> None:
    """Given 7 free blocks: request 0 takes 3, the prompt of request 1 needs 5, its first chunk 2 (3.1, 9)."""
    requests = [request(0, prompt=10, answer=9), request(1, prompt=20, answer=1)]

    steps = simulate(engine(engine_version=release, max_num_batched_tokens=18), requests)

    assert steps[0].sched_req == admitted


@pytest.mark.parametrize(("release", "admitted"), [("0.22.1", [0, 1]), ("0.26.0", [0]), ("0.32.0", [0])])
def test_the_watermark_holds_back_admission_beside_others_from_0_26(
    release: str, admitted: list[int]
) -> None:
    """Given watermark int(0.25 x 8) = 2 and 7 free: request 0 runs alone and is exempt, 5 + 2 > 4 (3.3)."""
    requests = [request(0, prompt=9, answer=9), request(1, prompt=12, answer=1)]

    steps = simulate(engine(engine_version=release, watermark=0.25), requests)

    assert steps[0].sched_req == admitted


@pytest.mark.parametrize(("release", "chunks"), [("0.29.0", [4, 4, 2]), ("0.32.0", [10])])
def test_a_lone_request_is_exempt_from_the_threshold_in_0_32(release: str, chunks: list[int]) -> None:
    """Given threshold 4 and one prompt of 10 tokens; expected chunks: 2.3, 9."""
    settings = engine(engine_version=release, long_prefill_token_threshold=4)

    steps = simulate(settings, [request(0, prompt=10, answer=1)])

    assert [step.sched_tok for step in steps] == [[n] for n in chunks]


@pytest.mark.parametrize(
    ("release", "asynchronous", "tokens"),
    [("0.22.1", True, 64), ("0.26.0", True, 128), ("0.32.0", True, 128), ("0.32.0", False, 64)],
)
def test_tokens_in_flight_count_both_batches_from_0_26(release: str, asynchronous: bool, tokens: int) -> None:
    """Given max_num_batched_tokens 64; expected max_in_flight_tokens of the window cap: 8.4, 9."""
    settings = engine(engine_version=release, async_scheduling=asynchronous)

    assert settings.max_in_flight_tokens == tokens


@pytest.mark.parametrize("group", ["window:5", "chunk:6"])
@pytest.mark.parametrize(("blocks", "admitted"), [(6, [0, 1]), (5, [0])])
def test_a_window_caps_the_blocks_that_a_prompt_must_find(
    group: str, blocks: int, admitted: list[int]
) -> None:
    """Given blocks of 2, 4 tokens in flight: the cap of window 5 is cdiv(5 - 1 + 4, 2) + 1 = 5, of chunk 6
    cdiv(6 + 4, 2) = 5 (8.4). Request 0 holds a block. Expected: a prompt of 40 tokens is admitted beside it
    with 5 free blocks, not with 4."""
    settings = engine(
        num_gpu_blocks=blocks + 1,
        block_size=2,
        max_num_batched_tokens=4,
        groups=(group,),
        enable_prefix_caching=False,
    )

    steps = simulate(settings, [request(0, prompt=1, answer=2), request(1, prompt=40, answer=1)])

    assert steps[0].sched_req == admitted


def test_blocks_left_of_the_window_return_before_new_ones_are_counted() -> None:
    """Given window 3, 3 blocks of 2: requests 0 and 1 hold 2 and 1, none is free, and request 0 needs one
    for its fifth token. Expected: it gets its own block 0 back, nobody is preempted (8.4)."""
    settings = engine(num_gpu_blocks=4, block_size=2, groups=("window:3",))

    steps = simulate(settings, [request(0, prompt=4, answer=3), request(1, prompt=1, answer=2)], check=True)

    assert (steps[0].free_after_schedule, steps[1].sched_req, steps[1].preempted) == (0, [0, 1], [])


def test_same_prompts_share_in_the_same_step_but_wait_for_a_state() -> None:
    """Given two equal prompts of 9 tokens at once; expected: the second hits 8 tokens in the first's step,
    with Mamba layers one step later, when the state is there (5.4, 8.5)."""

    def run(groups: tuple[str, ...]) -> list[StepRecord]:
        requests = [request(i, prompt=9, answer=3, stream="same") for i in (0, 1)]
        return simulate(engine(num_gpu_blocks=40, groups=groups), requests)

    full, hybrid = run(("full",)), run(("mamba", "full"))

    assert (full[0].new, full[0].sched_tok, full[0].cache_hit_tokens) == ([0, 1], [9, 1], 8)
    assert (hybrid[0].new, hybrid[0].sched_tok) == ([0], [8])
    assert (hybrid[1].new, hybrid[1].sched_tok, hybrid[1].cache_hit_tokens) == ([1], [1, 1], 8)


def test_a_state_block_wider_than_any_chunk_is_filled_in_parts() -> None:
    """Given blocks of 4 and 3 tokens a step; expected: no chunk crosses a block's end (8.5)."""
    settings = engine(num_gpu_blocks=40, max_num_batched_tokens=3, groups=("mamba", "full"))

    steps = simulate(settings, [request(0, prompt=9, answer=1)])

    assert [step.sched_tok for step in steps] == [[3], [1], [3], [1], [1]]


def test_a_hit_needs_the_block_in_every_group_of_its_kind() -> None:
    """Given two window groups, the first of which lost block 1; expected: no hit, as the window of 9 needs
    two blocks, and a junction where full attention's own hit ends (8.6, 8.7)."""
    scheduler = Scheduler(engine(num_gpu_blocks=40, groups=("window:9", "window:9", "full")))
    first, second = (request(i, prompt=13, answer=1, stream="same") for i in (0, 1))
    scheduler.add(first)
    scheduler.update(scheduler.schedule(StepRecord(0)), StepRecord(0))
    whole = scheduler.cache.lookup(second)
    lost = scheduler.pool.find(0, second.keys[1])
    assert lost is not None

    scheduler.pool.forget(lost)
    shorter = scheduler.cache.lookup(second)

    assert (whole.tokens, shorter.tokens, shorter.junction) == (12, 0, 12)


def test_a_victim_waits_for_its_output_in_flight() -> None:
    """Given a victim at the head whose last output is not delivered; expected: it is passed over and stays
    the head, the next one is admitted (1.3)."""
    scheduler = Scheduler(engine(async_scheduling=True))
    victim, other = request(0, prompt=4, answer=5), request(1, prompt=4, answer=5)
    scheduler.add(victim)
    scheduler.add(other)
    victim.placeholders, victim.preemptions = 1, 1

    record = StepRecord(0)
    scheduler.schedule(record)

    assert (record.new, record.resumed, record.waiting_head) == ([1], [], [0])


@pytest.mark.parametrize(("release", "scheduled"), [("0.26.0", [1]), ("0.29.0", [1, 2]), ("0.32.0", [1, 2])])
def test_the_priority_index_moves_back_by_list_position_from_0_29(release: str, scheduled: list[int]) -> None:
    """Given 7 blocks held 3, 2, 2 by requests 0, 1, 2; in step 3 request 0, least urgent, is passed over, its
    last output in flight, and request 1 needs a block and preempts it. Expected: request 2, now one place
    down, is scheduled (from 0.29) or missed (before) (4.3, 9); request 0 ends while waiting (1.3)."""
    requests = [
        request(0, prompt=9, answer=3, priority=1),
        request(1, prompt=7, answer=9, step=1),
        request(2, prompt=5, answer=9, step=1),
    ]
    settings = engine(engine_version=release, policy="priority", async_scheduling=True)

    step = simulate(settings, requests, check=True, steps=4)[3]

    assert (step.preempted, step.sched_req, step.finished) == ([0], scheduled, [0])


def test_a_victim_that_was_scheduled_leaves_a_cached_block_never_computed() -> None:
    """Given 6 blocks of 4, chunks of 6: in step 2 request 0 is scheduled for tokens 12 to 17, which
    caches block 3 (5.4), then the more urgent request 1 preempts it (4.3). Expected: it resumes with a hit of
    16 tokens though 12 were ever computed. So says the text; a real device must not read block 3."""
    settings = engine(
        num_gpu_blocks=7,
        policy="priority",
        long_prefill_token_threshold=6,
        scheduler_reserve_full_isl=False,
        engine_version="0.29.0",
    )
    requests = [request(0, prompt=19, answer=1, priority=1), request(1, prompt=4, answer=2, step=1)]

    steps = simulate(settings, requests, check=True)

    assert [step.sched_tok for step in steps[:2]] == [[6], [6, 4]]
    assert (steps[2].sched_req, steps[2].preempted) == ([1], [0])
    assert (steps[3].resumed, steps[3].preempt_cache_hit_tokens) == ([0], 16)
