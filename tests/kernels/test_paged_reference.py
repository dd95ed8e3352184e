"""The reference itself: against torch's own attention on contiguous tensors, and by hand for the extras."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="kernel tests need torch, which is absent here (extra: bench)")

import torch
from kernel_cases import make_case, relative_error

from kvplan.kernels import reference


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("group", [1, 4])
def test_decode_equals_scaled_dot_product_attention(block_size: int, group: int) -> None:
    """Given one sequence in shuffled blocks, expected: torch's attention over its tokens in order."""
    case = make_case(lens=[75], block_size=block_size, group=group, dim=32)
    k = reference.gather(case.k, case.table[0], 0, 75)
    v = reference.gather(case.v, case.table[0], 0, 75)
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.q[0].double()[None, :, None],
        k.transpose(0, 1).repeat_interleave(group, 0)[None],
        v.transpose(0, 1).repeat_interleave(group, 0)[None],
    )[0, :, 0]
    assert relative_error(reference.paged_decode(*case.inputs())[0], expected) < 1e-12


def test_prefill_equals_causal_attention() -> None:
    """Given a chunk that is the whole sequence, expected: torch's causal attention."""
    case = make_case(lens=[37], block_size=16, group=2, dim=32)
    q = torch.randn(37, 4, 32, dtype=torch.float64)
    k = reference.gather(case.k, case.table[0], 0, 37).transpose(0, 1).repeat_interleave(2, 0)
    v = reference.gather(case.v, case.table[0], 0, 37).transpose(0, 1).repeat_interleave(2, 0)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], is_causal=True
    )[0].transpose(0, 1)
    start = torch.tensor([0, 37], dtype=torch.int32)
    found = reference.paged_prefill(q, case.k, case.v, case.table, case.lens, start)
    assert relative_error(found, expected) < 1e-12


def test_last_token_of_a_chunk_is_a_decode() -> None:
    """Given chunks of 5, 1 and 0 tokens over prefixes, expected: each chunk's last row equals decode."""
    case = make_case(lens=[40, 17, 9], block_size=16, dim=32)
    start = torch.tensor([0, 5, 6, 6], dtype=torch.int32)
    q = torch.randn(6, 8, 32)
    options = {"window": 11, "soft_cap": 3.0, "sinks": torch.randn(8)}
    chunk = reference.paged_prefill(q, case.k, case.v, case.table, case.lens, start, **options)
    decode = reference.paged_decode(q[[4, 5]], case.k, case.v, case.table[:2], case.lens[:2], **options)
    assert torch.equal(chunk[[4, 5]], decode)


def test_extras_by_hand() -> None:
    """Given two tokens with scores a and b, expected: softmax, window, cap, sink and scales by formula."""
    k = torch.tensor([[[[1.0]], [[3.0]]]])
    v = torch.tensor([[[[10.0]], [[20.0]]]])
    q, table, lens = torch.tensor([[[2.0]]]), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2]).int()
    a, b = torch.tensor([2.0, 6.0], dtype=torch.float64)

    def decode(**options: object) -> torch.Tensor:
        return reference.paged_decode(q, k, v, table, lens, scale=1.0, **options).squeeze()  # type: ignore[arg-type]

    assert decode() == pytest.approx(float((10 * a.exp() + 20 * b.exp()) / (a.exp() + b.exp())))
    assert decode(window=1) == pytest.approx(20.0)
    assert decode(v_scale=0.5, window=1) == pytest.approx(10.0)
    a2, b2 = (a / 2).exp(), (b / 2).exp()
    assert decode(k_scale=0.5) == pytest.approx(float((10 * a2 + 20 * b2) / (a2 + b2)))
    sink = torch.tensor([1.0])
    total = a.exp() + b.exp() + torch.tensor(1.0, dtype=torch.float64).exp()
    assert decode(sinks=sink) == pytest.approx(float((10 * a.exp() + 20 * b.exp()) / total))
    ac, bc = ((4 * torch.tanh(x / 4)).exp() for x in (a, b))
    assert decode(soft_cap=4.0) == pytest.approx(float((10 * ac + 20 * bc) / (ac + bc)))


def test_mla_reads_one_row_for_all_heads() -> None:
    """Given a latent cache, expected: decode with one KV head whose value is the key's first part."""
    cache = torch.randn(5, 16, 1, 24)
    table, lens = torch.tensor([[3, 1]], dtype=torch.int32), torch.tensor([21], dtype=torch.int32)
    q = torch.randn(1, 4, 24)
    whole = reference.paged_decode(q, cache, cache, table, lens, scale=0.3)
    found = reference.mla_decode(q, cache[:, :, 0], table, lens, scale=0.3, latent_dim=16)
    assert relative_error(found, whole[..., :16]) < 1e-12
