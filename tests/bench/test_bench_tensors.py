"""The poisoned layout: what a kernel may read is right, what it may not read is NaN or far outside."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvplan.bench import tensors  # noqa: E402
from kvplan.bench.cells import Shape  # noqa: E402
from kvplan.kernels import reference  # noqa: E402


def shape_of(batch: int, dtype: str = "float32", kv_dtype: str = "float32", table: str = "random") -> Shape:
    return Shape(batch, 40, heads=4, kv_heads=2, head_dim=16, dtype=dtype, kv_dtype=kv_dtype, table=table)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=5).filter(any),
    st.sampled_from([1, 3, 16, 64]),
    st.sampled_from(["random", "contiguous"]),
    st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]),
)
def test_tokens_lie_where_the_table_says_and_all_else_is_poison(
    lens: list[int], block_size: int, table: str, kv_dtype: str
) -> None:
    tokens = tensors.make_tokens(shape_of(len(lens), kv_dtype=kv_dtype), "cpu", lens)
    paged = tensors.make_paged(tokens, block_size, table)
    seen = torch.zeros(paged.k_cache.shape[:2], dtype=torch.bool)
    first = 0
    for row, n in enumerate(lens):
        for position in range(n):
            block, slot = int(paged.block_table[row, position // block_size]), position % block_size
            assert not seen[block, slot], "one slot for two tokens"
            seen[block, slot] = True
            for cache, values in ((paged.k_cache, tokens.k), (paged.v_cache, tokens.v)):
                assert torch.equal(cache[block, slot].float(), values[first + position].float())
        tail = paged.block_table[row, -(-n // block_size) :]
        assert len(tail) >= tensors.SPARE_COLUMNS
        assert (tail == tensors.INVALID_BLOCK).all()
        first += n
    for cache in (paged.k_cache, paged.v_cache):
        assert cache.float()[~seen].isnan().all(), "an unowned slot is not poisoned"
        assert not cache.float()[seen].isnan().any()
    assert not seen[paged.free_block].any()
    assert (paged.readable_table() < paged.k_cache.shape[0]).all()


def test_a_random_table_is_not_in_order_and_a_contiguous_one_is() -> None:
    tokens = tensors.make_tokens(shape_of(4), "cpu")
    in_order = tensors.make_paged(tokens, 4, "contiguous").block_table[:, :10].flatten()
    assert in_order.tolist() == list(range(40))
    mixed = tensors.make_paged(tokens, 4, "random").block_table[:, :10].flatten()
    assert mixed.tolist() != sorted(mixed.tolist())


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_expected_output_is_the_reference_over_blocks(kv_dtype: str) -> None:
    """Two independent ways to the same float64 numbers: from the tokens, and by block table."""
    tokens = tensors.make_tokens(shape_of(4, kv_dtype=kv_dtype), "cpu", [1, 17, 64, 33])
    paged = tensors.make_paged(tokens, 16, "random")
    by_table = reference.paged_decode(
        paged.q, paged.k_cache, paged.v_cache, paged.block_table, paged.seq_lens
    )
    assert tensors.worst_error(tensors.expected_output(tokens), by_table) < 1e-12


@pytest.mark.parametrize("n", [40, 4096])
@pytest.mark.parametrize("lost", ["first", "last"])
def test_one_lost_token_at_an_edge_is_far_above_every_tolerance(n: int, lost: str) -> None:
    """The two edge tokens carry a quarter of the softmax each, so off-by-one faults cannot hide in bf16."""
    tokens = tensors.make_tokens(shape_of(2), "cpu", [n, n])
    keep = [i for i in range(2 * n) if i % n != (0 if lost == "first" else n - 1)]
    fewer = tensors.Tokens(tokens.shape, (n - 1, n - 1), tokens.q, tokens.k[keep], tokens.v[keep])
    error = tensors.worst_error(tensors.expected_output(fewer), tensors.expected_output(tokens))
    assert error > 5 * max(tensors.TOLERANCES.values())


def test_padded_copy_masks_the_padding() -> None:
    tokens = tensors.make_tokens(shape_of(2), "cpu", [3, 5])
    k, _, mask = tensors.make_padded(tokens)
    assert tuple(k.shape) == (2, 2, 5, 16)
    assert mask is not None
    assert mask[:, 0, 0].tolist() == [[True, True, True, False, False], [True] * 5]
    assert torch.equal(k[0, :, :3].transpose(0, 1), tokens.k[:3])
    assert (k[0, :, 3:] == 0).all()


def test_worst_error_sees_one_bad_head_among_many_and_nan_and_shape() -> None:
    expected = torch.randn(64, 32, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert tensors.worst_error(expected, expected) == 0
    off = expected.clone()
    off[3, 7] *= 1.5
    assert tensors.worst_error(off, expected) == pytest.approx(0.5)
    off[3, 7, 2] = math.nan
    assert tensors.worst_error(off, expected) == math.inf
    assert tensors.worst_error(expected[:1], expected) == math.inf
    zeros = torch.zeros(1, 1, 4)
    assert tensors.worst_error(zeros, zeros) == 0
    assert tensors.worst_error(zeros + 1e-9, zeros) == math.inf  # a row without tokens must be exactly zero
