"""The gates that gpu-check runs, held here against the CPU kernel and against wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvplan.bench import gates, gates_other  # noqa: E402
from kvplan.bench.gates import Variant  # noqa: E402
from kvplan.kernels import cpu, reference  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices on several threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", ["triton", "numba"])
def test_gates_cover_every_axis_and_none_twice(backend: str) -> None:
    variants = list(gates.decode_variants(backend))
    names = [variant.name for variant in variants]
    assert len(set(names)) == len(names)
    assert {1, 16, 64, 256} <= {variant.block_size for variant in variants}
    assert {1, 4, 8, 16} <= {variant.group for variant in variants}
    assert {64, 128, 256} <= {variant.head_dim for variant in variants}
    assert {"float8_e4m3fn", "float8_e5m2"} <= {variant.kv_dtype for variant in variants}
    assert any(v.window and v.soft_cap and v.sinks for v in variants)
    assert any(v.heads_first for v in variants)
    if backend == "triton":
        assert {"bfloat16", "float16", "float32"} == {variant.dtype for variant in variants}


def test_rows_of_a_gate_include_none_one_and_about_a_block() -> None:
    assert gates.gate_lengths(16)[:5] == [0, 1, 15, 16, 17]
    assert gates.gate_lengths(1)[:5] == [0, 1, 1, 1, 2]


@pytest.mark.parametrize(
    "variant",
    [
        Variant(16, dtype="float32", head_dim=64),
        Variant(64, dtype="float32", window=33, soft_cap=20.0, sinks=True, head_dim=64),
        Variant(16, dtype="float32", heads_first=True, head_dim=64),
    ],
    ids=lambda variant: variant.name,
)
def test_the_cpu_kernel_passes(variant: Variant) -> None:
    found = gates.run_decode_gate(cpu.paged_decode, variant, "cpu")
    assert found.passed, found
    assert found.error is not None
    assert found.error < 2e-6


@pytest.mark.parametrize("ignored", ["window", "soft_cap", "sinks", "k_scale", "v_scale"])
def test_a_kernel_that_ignores_an_option_fails_its_gate(ignored: str) -> None:
    variant = Variant(
        16, dtype="float32", head_dim=32, window=50, soft_cap=5.0, sinks=True, k_scale=0.5, v_scale=2.0
    )

    def decode(*tensors: Any, **options: Any) -> Any:
        del options[ignored]
        return reference.paged_decode(*tensors, **options)

    found = gates.run_decode_gate(decode, variant, "cpu")
    assert not found.passed
    assert found.error is not None
    assert found.error > 0.01


def test_nan_and_exceptions_fail_with_a_reason() -> None:
    def nan(q: Any, *rest: Any, **options: Any) -> Any:
        return torch.full(q.shape, float("nan"))

    def broken(*tensors: Any, **options: Any) -> Any:
        raise ValueError("no such tile\nlong trace")

    variant = Variant(16, dtype="float32", head_dim=32)
    assert gates.run_decode_gate(nan, variant, "cpu").reason == "NaN or a wrong shape"
    found = gates.run_decode_gate(broken, variant, "cpu")
    assert (found.passed, found.reason) == (False, "ValueError: no such tile")


def test_prefill_and_mla_gates_pass_the_reference_and_fail_one_that_is_not_causal() -> None:
    variant = Variant(16, dtype="float32", head_dim=32, window=40, sinks=True)
    assert gates_other.prefill_error(reference.paged_prefill, variant, "cpu") == 0

    def not_causal(
        q: Any, k_cache: Any, v_cache: Any, table: Any, lens: Any, start: Any, **options: Any
    ) -> Any:
        rows = torch.repeat_interleave(torch.arange(len(lens)), (start[1:] - start[:-1]).long())
        return reference.paged_decode(q, k_cache, v_cache, table[rows], lens[rows], **options)

    assert gates_other.prefill_error(not_causal, variant, "cpu") > 0.1
    assert gates_other.mla_error(reference.mla_decode, 16, 4, "cpu") == 0

    def wrong_scale(*tensors: Any, scale: float, latent_dim: int) -> Any:
        return reference.mla_decode(*tensors, scale=576**-0.5, latent_dim=latent_dim)

    assert gates_other.mla_error(wrong_scale, 16, 4, "cpu") > 0.1


def test_cache_operations_pass_here_and_a_skipped_write_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes must be equal: float8 rounded to nearest and clamped, everything else untouched."""
    pytest.importorskip("triton")
    from kvplan.kernels import cache_ops

    for kv_dtype in ("float16", "float8_e4m3fn"):
        assert gates_other.write_error(kv_dtype, "cpu") == 0
    assert gates_other.copy_error("cpu") == 0
    assert gates_other.swap_error("cpu") == 0
    monkeypatch.setattr(cache_ops, "write_kv", lambda *tensors, **options: None)
    assert gates_other.write_error("float16", "cpu") > 0.2


def test_a_kernel_that_cannot_be_imported_is_one_failed_gate() -> None:
    found = gates.kernel_function("no_such_kernel", "run")
    assert isinstance(found, gates.GateResult)
    assert not found.passed
    assert found.reason is not None
    assert found.reason.startswith("ModuleNotFoundError: No module named 'kvplan.kernels.no_such")
