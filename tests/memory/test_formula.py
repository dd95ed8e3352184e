"""The seed's arithmetic, checked on published figures and on worked examples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.memory import formula as f

GIB = 1 << 30
MIB = 1 << 20


def test_bytes_of_an_8b_gqa_model():
    """L=32, h_kv=8, d=128, b=2. Expected by hand: 2·32·8·128·2 = 131,072 B a token."""
    assert f.kv_bytes(32, 1, 8, 128, 2) == 131_072
    assert f.kv_bytes(1, 16, 8, 128, 2) == 64 * 1024  # one layer's share of a block of 16
    assert f.kv_bytes(32, 16, 8, 128, 2) == 2 * MIB  # an aggregate block of 16


def test_opt_13b_bytes_per_token():
    """Source: arXiv 2309.06180 section 3: 2 x 5120 x 40 x 2 B = 800 KB."""
    assert f.kv_bytes(40, 1, 40, 128, 2) == 819_200


@pytest.mark.parametrize(
    ("model", "layers", "hidden", "slots", "computed_gib", "published_gb"),
    [
        ("OPT-13B", 40, 5120, 15_700, 11.98, 12),
        ("OPT-66B", 64, 9216, 9_700, 21.3, 21),
        ("OPT-175B", 96, 12288, 60_100, 264.1, 264),
    ],
)
def test_published_slots_times_bytes_is_the_published_kv_memory(
    model, layers, hidden, slots, computed_gib, published_gb
):
    """Source: arXiv 2309.06180 Table 1 (max slots, KV memory); its KV "GB" are GiB."""
    gib = slots * f.kv_bytes(layers, 1, hidden // 128, 128, 2) / GIB
    assert gib == pytest.approx(computed_gib, abs=0.05), model
    assert abs(gib - published_gb) <= 0.5, model


def test_waste_of_500_reserved_requests_against_blocks_of_16():
    """500 requests of 1,500 tokens, 128 KiB a token. Expected by hand: 500·548·128 KiB = 33.447 GiB
    reserved at 2,048; 1,504 - 1,500 = 4 tokens, 500·4·128 KiB = 250 MiB in blocks of 16."""
    per_token = f.kv_bytes(32, 1, 8, 128, 2)
    reserved = sum(f.reserved_max_tokens(1500, 2048) - 1500 for _ in range(500)) * per_token
    assert reserved / GIB == pytest.approx(33.447, abs=5e-4)
    assert 500 * f.tail_waste_tokens(1500, 16) * per_token == 250 * MIB


def test_three_requests_reserved_at_2048():
    """120, 1,800 and 430 tokens. By hand: 2,350 used of 6,144 reserved; blocks of 16: 128 + 1,808 + 432."""
    lengths = (120, 1800, 430)
    assert sum(f.reserved_max_tokens(n, 2048) for n in lengths) == 6144
    assert [f.reserved_max_tokens(n, 2048) - n for n in lengths] == [1928, 248, 1618]
    assert [f.allocated_tokens(n, 16) for n in lengths] == [128, 1808, 432]
    assert f.utilization(lengths, 16) == 2350 / 2368


def test_33_tokens_take_three_blocks_with_15_positions_empty():
    assert f.blocks_for(33, 16) == 3
    assert f.tail_waste_tokens(33, 16) == 15


def test_five_lengths_of_the_seed():
    """37, 91, 128, 201, 511 (968 tokens): 2,560 positions reserved at 512, 992 in blocks of 16, 1,024 in
    blocks of 32. Expected shares 37.81, 97.58 and 94.53 %: 968 over each."""
    lengths = (37, 91, 128, 201, 511)
    reserved = sum(f.reserved_max_tokens(n, 512) for n in lengths)
    assert reserved == 2560
    assert sum(f.allocated_tokens(n, 16) for n in lengths) == 992
    assert sum(f.allocated_tokens(n, 32) for n in lengths) == 1024
    assert round(100 * f.share(sum(lengths), reserved), 2) == 37.81
    assert round(100 * f.utilization(lengths, 16), 2) == 97.58
    assert round(100 * f.utilization(lengths, 32), 2) == 94.53


def test_power_of_two_reservation():
    """Source of 25 -> 32: arXiv 2309.06180 section 6.1."""
    assert [f.reserved_pow2_tokens(n) for n in (1, 2, 3, 25, 32, 33, 2048, 2049)] == [
        1, 2, 4, 32, 32, 64, 2048, 4096,
    ]  # fmt: skip


def test_no_request_wastes_nothing():
    assert f.utilization((), 16) == 1.0


@given(n=st.integers(0, 2**40), block_size=st.integers(1, 4096))
def test_allocation_covers_the_length_by_less_than_one_block(n, block_size):
    allocated = f.allocated_tokens(n, block_size)
    assert allocated % block_size == 0
    assert n <= allocated < n + block_size
    assert f.tail_waste_tokens(n, block_size) == allocated - n


@given(st.integers(1, 2**62))
def test_power_of_two_is_the_smallest_that_holds_the_length(n):
    power = f.reserved_pow2_tokens(n)
    assert power.bit_count() == 1
    assert power // 2 < n <= power


def test_arrays_give_what_integers_give():
    lengths = np.array([1, 15, 16, 17, 33, 2047, 2048, 131_072], np.int64)
    for function in (lambda n: f.allocated_tokens(n, 16), lambda n: f.tail_waste_tokens(n, 16)):
        assert function(lengths).tolist() == [function(int(n)) for n in lengths]
    assert f.reserved_pow2_tokens(lengths).tolist() == [f.reserved_pow2_tokens(int(n)) for n in lengths]
    assert f.reserved_max_tokens(lengths, 4096).tolist() == [4096] * 8
