"""The step-time model: its terms against hand arithmetic, its limits, its cost."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import numpy as np
import pytest

from kvplan.errors import InputError
from kvplan.sim.constants import kernels_for, load
from kvplan.sim.envelope import envelope_for
from kvplan.sim.formats import BF16, formats_for
from kvplan.sim.gemms import expert_layers, step_gemms
from kvplan.sim.steptime import Calibration, all_reduce_s, clock_for, gemm_s, moe_s, p_norm, stretched
from kvplan.spec.catalogue import find_gpu, find_model, gpus
from kvplan.spec.engine import EngineSettings

SETTINGS = EngineSettings(max_num_batched_tokens=8192, max_num_seqs=256)
LLAMA = "meta-llama/Llama-3.1-8B"


def clock(model: str = LLAMA, gpu: str = "H100 SXM", calibration: Calibration | None = None, **flags):
    settings = replace(SETTINGS, **flags)
    return clock_for(find_model(model).spec, find_gpu(gpu), settings, calibration)


def test_clock_has_plain_numbers_and_tables_of_the_right_length():
    """What: types. numba compiles one signature only if every scalar is a Python float or int."""
    c = clock()
    assert c.linear_s.shape == (8193,)
    assert c.head_s.shape == (257,)
    assert c.linear_s.dtype == c.head_s.dtype == np.float64
    for name in c._fields[2:]:
        assert type(getattr(c, name)) is (int if name == "window" else float), name


def test_an_empty_step_costs_nothing_and_more_tokens_never_cost_less():
    c = clock()
    assert c.linear_s[0] == c.head_s[0] == 0.0
    # All-reduces change law at 512 tokens; on one GPU nothing may fall.
    assert (np.diff(c.linear_s[1:]) >= -1e-12).all()
    assert (np.diff(c.head_s[1:]) > 0).all()


def test_graph_padding_makes_steps_of_a_padded_size_equal():
    """vLLM captures 1, 2, 4, every 8 up to 256, every 16 up to 512 (recorded run's resolved config)."""
    t = clock().linear_s
    assert t[3] == t[4]
    assert t[9] == t[16] != t[17]
    assert t[257] == t[272] != t[273]
    eager = clock(enforce_eager=True).linear_s
    assert eager[9] < eager[16]


def test_decode_of_a_small_model_reads_its_weights_at_the_fitted_share_of_bandwidth():
    """Given Llama-3.1-8B on one H100; expected: matrices of 32 layers, 2 bytes each, over e_w x BW."""
    matrices = 32 * (6144 * 4096 + 4096 * 4096 + 28672 * 4096 + 4096 * 14336)
    entry = load()["gpus"]["h100_sxm"]
    read_s = 2 * matrices / (entry["gemm"]["bf16"]["e_w"] * entry["peaks"]["bw"])
    floors_s = 32 * (4 * entry["gemm"]["bf16"]["c_us"] + 8 * load()["small_kernel_us"]) * 1e-6
    assert clock().linear_s[1] == pytest.approx(read_s + floors_s, rel=0.01)


def test_gemm_law_at_its_two_ends():
    kernels = kernels_for(find_gpu("H100 SXM"))
    fit = kernels.gemm("bf16")
    one = gemm_s(np.array([1.0]), 8192, 8192, BF16, kernels, fused=True)[0]
    memory_s = 2 * 8192 * 8192 / (fit.weight_efficiency * 3.35e12)
    assert one == pytest.approx(memory_s + fit.fixed_s, rel=0.01)
    many = gemm_s(np.array([16384.0]), 8192, 8192, BF16, kernels, fused=True)[0]
    compute_s = 2 * 16384 * 8192 * 8192 / (fit.flop_efficiency * 989e12)
    assert many == pytest.approx(compute_s + fit.fixed_s, rel=0.02)


def test_p_norm_lies_between_the_larger_and_the_sum():
    a, b = np.array([3.0]), np.array([4.0])
    assert p_norm(a, b, 2.0)[0] == pytest.approx(5.0)
    assert p_norm(a, b, 1.0)[0] == pytest.approx(7.0)
    assert p_norm(a, b, 50.0)[0] == pytest.approx(4.0, rel=1e-3)


def test_decode_attention_reads_keys_and_values_once():
    """8 KV heads x 2 x 128 x 2 bytes x 32 layers a cached token; fp8 halves the bytes, not the efficiency."""
    kernels = kernels_for(find_gpu("H100 SXM"))
    plain, half = clock(), clock(kv_cache_dtype="fp8")
    token_bytes = 8 * 2 * 128 * 2 * 32
    e16, e8 = kernels.attention("bf16").kv_efficiency, kernels.attention("fp8").kv_efficiency
    assert plain.decode_kv_s == pytest.approx(token_bytes / (e16 * 3.35e12))
    assert half.decode_kv_s == pytest.approx(token_bytes / 2 / (e8 * 3.35e12))


def test_prefill_pairs_match_causal_attention_flops():
    """4·heads·d flops for each of n(n+1)/2 pairs: 2,048 tokens of Llama-3.1-8B are 1.1 TFLOP in 32 layers."""
    kernels = kernels_for(find_gpu("H100 SXM"))
    pairs = 2048 * 2049 / 2
    flops = 4 * 32 * 128 * pairs * 32
    expected = flops / (kernels.attention("bf16").prefill_efficiency * 989e12)
    assert clock().prefill_pair_s * pairs == pytest.approx(expected)


def test_tensor_parallel_cuts_weights_and_adds_all_reduces():
    one, four = (
        clock("meta-llama/Llama-3.1-70B", "B200"),
        clock("meta-llama/Llama-3.1-70B", "B200", tensor_parallel_size=4),
    )
    assert one.linear_s[1] / 4 < four.linear_s[1] < one.linear_s[1] / 2
    assert four.decode_kv_s == pytest.approx(one.decode_kv_s / 4)
    # More ranks than KV heads: each still holds one head.
    sixteen = clock("meta-llama/Llama-3.1-70B", "B200", tensor_parallel_size=16)
    assert sixteen.decode_kv_s == pytest.approx(one.decode_kv_s / 8)


def test_large_messages_take_the_faster_law():
    """8 x H100, 64 and 128 MiB: 0.316 and 0.561 ms (vllm-project/vllm pull request 42324, pynccl)."""
    link = kernels_for(find_gpu("H100 SXM")).links(8)
    for size_mib, measured_s in ((16, 0.087e-3), (64, 0.316e-3), (128, 0.561e-3)):
        wire = np.array([2 * 7 / 8 * size_mib * 2**20])
        assert all_reduce_s(link, wire, np.array([False]))[0] == pytest.approx(measured_s, rel=0.16)


def test_experts_of_a_measured_shape_take_their_measured_times():
    """gpt-oss-120b on 8 x H100, 64 tokens: 112 us a layer in the kernel table."""
    model, gpu = find_model("openai/gpt-oss-120b").spec, find_gpu("H100 SXM")
    settings = replace(SETTINGS, tensor_parallel_size=8)
    kernels = kernels_for(gpu)
    seconds = moe_s(np.array([64.0]), model, settings, kernels, formats_for(model, settings, kernels))
    assert seconds[0] == pytest.approx(112e-6, rel=0.01)
    assert expert_layers(model) == 36


def test_experts_without_a_table_follow_the_formula_and_grow():
    model = find_model("mistralai/Mixtral-8x7B-v0.1").spec
    gpu = find_gpu("RTX 4090")
    kernels = kernels_for(gpu)
    seconds = moe_s(
        np.array([1.0, 8.0, 64.0, 4096.0]), model, SETTINGS, kernels, formats_for(model, SETTINGS, kernels)
    )
    assert (np.diff(seconds) > 0).all()
    # One token touches 2 of 8 experts of 3 x 4096 x 14336 x 2 bytes: at best that over the bandwidth.
    assert seconds[0] > 2 * 3 * 4096 * 14336 * 2 / 1.008e12


def test_windowed_layers_go_into_the_second_kv_term():
    c = clock("openai/gpt-oss-120b")
    assert c.window == 128
    assert c.decode_window_s == pytest.approx(c.decode_kv_s)  # 18 layers of each kind


def test_matrix_products_cover_all_weights_of_the_layers():
    """Every weight of a dense decoder layer is in some product: elements equal the parameter count."""
    model = find_model(LLAMA).spec
    gemms = step_gemms(model, SETTINGS, formats_for(model, SETTINGS, kernels_for(find_gpu("H100 SXM"))))
    assert model.parameters is not None
    assert sum(g.n * g.k * g.times for g in gemms) == model.parameters.attention + model.parameters.mlp


def test_weight_only_formats_compute_in_16_bit():
    model, gpu = find_model(LLAMA).spec, find_gpu("A100-SXM4-80GB")
    for name, bytes_ in (("awq", 0.5), ("fp8", 1.0)):
        settings = replace(SETTINGS, quantization=name)
        formats = formats_for(model, settings, kernels_for(gpu))
        assert formats.quantised.peak == "bf16"
        assert formats.quantised.weight_bytes == pytest.approx(bytes_, abs=0.05)
        assert formats.notes


def test_bare_kv_shape_cannot_be_timed():
    model = replace(find_model(LLAMA).spec, tensors=())
    with pytest.raises(InputError, match="only the KV shape is known"):
        clock_for(model, find_gpu("H100 SXM"), SETTINGS)


@pytest.mark.parametrize("gpu", [g.name for g in gpus()])
def test_every_gpu_of_the_catalogue_gets_finite_times(gpu: str):
    c = clock(gpu=gpu)
    assert np.isfinite(c.linear_s).all()
    assert 0 < c.linear_s[1] < 1
    assert 0 < c.decode_kv_s < 1


def test_calibration_factors_do_what_they_say():
    base = clock()
    assert clock(calibration=Calibration(time=1.1)).linear_s[100] == pytest.approx(1.1 * base.linear_s[100])
    assert clock(calibration=Calibration(kv=2.0)).decode_kv_s == pytest.approx(base.decode_kv_s / 2)
    assert clock(calibration=Calibration(flops=2.0)).prefill_pair_s == pytest.approx(base.prefill_pair_s / 2)
    assert clock(calibration=Calibration(weights=1.2)).linear_s[1] < base.linear_s[1]
    assert clock(calibration=Calibration(small=2.0)).linear_s[1] > base.linear_s[1]
    two = {"tensor_parallel_size": 2}
    faster = clock(gpu="L40S", calibration=Calibration(bus=2.0), **two)
    assert faster.linear_s[4096] < clock(gpu="L40S", **two).linear_s[4096]
    assert stretched(base, 1.2).decode_kv_s == pytest.approx(1.2 * base.decode_kv_s)
    assert stretched(base, 1.2).cpu_s == base.cpu_s


def test_envelope_widens_where_evidence_ends():
    model = find_model(LLAMA).spec
    known = envelope_for(model, find_gpu("H100 SXM"), SETTINGS)
    sibling = envelope_for(model, find_gpu("L4"), SETTINGS)
    sheet = envelope_for(model, find_gpu("MI300X"), SETTINGS)
    assert known.tpot_median < sibling.tpot_median < sheet.tpot_median
    assert not known.warnings
    assert "no kernel tables" in " ".join(sibling.warnings)
    pcie = envelope_for(model, find_gpu("L40S"), replace(SETTINGS, tensor_parallel_size=2))
    assert "PCIe" in pcie.basis
    fitted = envelope_for(model, find_gpu("L4"), SETTINGS, Calibration(time=0.9))
    assert fitted.tpot_median < known.tpot_median
    assert "%" in known.text


def test_a_clock_is_built_in_under_50_ms():
    """Tables of 16,384 tokens; the first build reads the constants file and is not counted."""
    spec, gpu = find_model("moonshotai/Kimi-K2.5").spec, find_gpu("H200 SXM")
    settings = replace(SETTINGS, tensor_parallel_size=8, max_num_batched_tokens=16384)
    clock_for(spec, gpu, settings)
    best = min(_seconds(lambda: clock_for(spec, gpu, settings)) for _ in range(5))
    assert best < 0.05


def _seconds(run) -> float:
    began = perf_counter()
    run()
    return perf_counter() - began
