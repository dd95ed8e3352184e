"""How long one engine step lasts on the GPU, from the model's shape, the GPU and what is in the step.

Every term is a measured kernel law (see `constants`), evaluated once per run into two tables, over scheduled
tokens and over sampling rows, and a few coefficients for attention. The compiled loop then needs two table
reads and about ten multiplications a step. Nothing here is fitted to serving runs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from kvplan.sched.core import Clock
from kvplan.sim.constants import Kernels, Links, kernels_for, scaled
from kvplan.sim.formats import BF16, Format, Formats, formats_for
from kvplan.sim.gemms import activation_bytes_per_token, expert_layers, step_gemms
from kvplan.spec.engine import EngineSettings
from kvplan.spec.gpu import GPU
from kvplan.spec.model import LayerKind, ModelSpec

Seconds = NDArray[np.float64]

GRAPH_TOKENS = 512  # largest captured batch; above it kernels are launched one by one
GRID_TOKENS = 16  # above GRAPH_TOKENS the table is evaluated every 16 tokens and interpolated
STREAM_EFFICIENCY = 0.8  # share of bandwidth that element-wise kernels reach
SMALL_KERNELS = 8
"""Launches a layer beside GEMMs and attention: two norms with residual add, rotary embedding, cache write,
activation, quantised attention output, joining of split KV, one more. At 2.45 us each: the 20 us a layer
that others measured (20 to 28 us, the Vidur simulator's profiles)."""
HEAD_FIXED_S = 60e-6  # gather of rows, sampler launches
SAMPLE_BYTES_PER_LOGIT = 20  # one 16-bit read, then about four passes over 32-bit logits
CPU_S, CPU_PER_REQUEST_S = 0.5e-3, 10e-6  # schedule and prepare; guesses, visible only without async
UPDATE_S, UPDATE_PER_REQUEST_S = 0.2e-3, 8e-6
LAUNCH_GRAPH_S = 0.3e-3
LAUNCH_EAGER_S_PER_LAYER = 110e-6  # about 11 launches of 10 us
TTFT_S, TTFT_S_PER_TOKEN = 15e-3, 5e-6  # HTTP and tokenising: 15 ms + 5 ms per 1,000 prompt tokens


@dataclass(frozen=True)
class Calibration:
    """Factors found on one machine; 1.0 is "as measured elsewhere".

    ``time`` multiplies the whole step; ``weights``, ``flops``, ``kv`` and ``bus`` multiply efficiencies (more
    is faster); ``small`` multiplies the cost of small kernels.
    """

    time: float = 1.0
    bus: float = 1.0
    kv: float = 1.0
    flops: float = 1.0
    small: float = 1.0
    weights: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f.name for f in fields(self))


def clock_for(
    model: ModelSpec, gpu: GPU, settings: EngineSettings, calibration: Calibration | None = None
) -> Clock:
    """The clock of ``model`` on ``gpu`` under ``settings`` (resolved: no ``None`` where a number is needed).

    Tables have ``max_num_batched_tokens + 1`` and ``max_num_seqs + 1`` entries, in seconds. Formulas:
    per GEMM ``c + ((bytes/(e_w·BW))^p + (flops/(e_f·peak))^p)^(1/p)``; decode attention a fixed cost and
    bytes of KV; prefill attention by visible pairs; all-reduce a straight line in bytes; experts by how
    many are touched.
    """
    kernels = kernels_for(gpu)
    adjust = calibration or Calibration()
    if adjust != Calibration():
        factors = {n: getattr(adjust, n) for n in ("weights", "flops", "kv", "bus", "small")}
        kernels = scaled(kernels, **factors)
    formats = formats_for(model, settings, kernels)
    tokens = settings.max_num_batched_tokens or 8192
    rows = settings.max_num_seqs or 256
    linear = linear_table(model, settings, kernels, formats, tokens)
    head = head_table(model, settings, kernels, rows, formats)
    attention = _attention(model, settings, kernels, formats)
    launch = LAUNCH_EAGER_S_PER_LAYER * model.num_layers if settings.enforce_eager else LAUNCH_GRAPH_S
    t = adjust.time
    return Clock(
        linear_s=linear * t,
        head_s=head * t,
        decode_fixed_s=attention["decode_fixed_s"] * t,
        decode_kv_s=attention["decode_kv_s"] * t,
        decode_window_s=attention["decode_window_s"] * t,
        window=int(attention["window"]),
        prefill_fixed_s=attention["prefill_fixed_s"] * t,
        prefill_pair_s=attention["prefill_pair_s"] * t,
        prefill_token_s=attention["prefill_token_s"] * t,
        prefill_context_s=attention["prefill_context_s"] * t,
        cpu_s=CPU_S,
        cpu_per_request_s=CPU_PER_REQUEST_S,
        update_s=UPDATE_S,
        update_per_request_s=UPDATE_PER_REQUEST_S,
        launch_s=float(launch),
        ttft_s=TTFT_S,
        ttft_per_token_s=TTFT_S_PER_TOKEN,
        fixed_step_s=0.0,
    )


def stretched(clock: Clock, factor: float) -> Clock:
    """The clock with all GPU time multiplied: the two ends of a latency band."""
    gpu = (
        "linear_s", "head_s", "decode_fixed_s", "decode_kv_s", "decode_window_s",
        "prefill_fixed_s", "prefill_pair_s", "prefill_token_s", "prefill_context_s",
    )  # fmt: skip
    return clock._replace(**{name: getattr(clock, name) * factor for name in gpu})


# ---------------------------------------------------------------------------------------------- dense parts


def gemm_s(m: Seconds, n: float, k: float, form: Format, kernels: Kernels, fused: bool) -> Seconds:
    """Seconds of one GEMM of m x k by k x n.

    ``fused``: fp8 activations are quantised inside the kernel before (compiled engines do), so its launch is
    not paid. Its traffic stays: the tables only know the sum of both kernels. Fp4 and block-scaled fp8 keep a
    kernel of their own.
    """
    fit = kernels.gemm(form.gemm)
    moved = n * k * form.weight_bytes + m * (k * form.activation_bytes + 2.0 * n)
    memory = moved / (fit.weight_efficiency * kernels.bandwidth)
    compute = 2.0 * m * n * k / (fit.flop_efficiency * kernels.peak(form.peak))
    fused = fused and form.gemm == "fp8" and fit.quantize_efficiency > 0
    fixed = max(0.0, fit.fixed_s - kernels.small_kernel_s) if fused else fit.fixed_s
    seconds = p_norm(memory, compute, fit.p) + fixed
    if fit.quantize_efficiency:
        seconds = seconds + 3.0 * m * k / (fit.quantize_efficiency * kernels.bandwidth)
    return seconds


def p_norm(a: Seconds, b: Seconds, p: float) -> Seconds:
    """``(a^p + b^p)^(1/p)``: a maximum with a rounded corner."""
    high, low = np.maximum(a, b), np.minimum(a, b)
    return np.asarray(high * (1.0 + (low / np.maximum(high, 1e-30)) ** p) ** (1.0 / p))


def linear_table(
    model: ModelSpec, settings: EngineSettings, kernels: Kernels, formats: Formats, tokens: int
) -> Seconds:
    """Seconds by scheduled tokens, 0 to ``tokens``, of all but attention over the KV cache and the head."""
    grid, size = _token_grid(tokens, settings)
    total = np.zeros(len(grid))
    for n, k, form, times in step_gemms(model, settings, formats):
        total += times * gemm_s(size, n, k, form, kernels, fused=not settings.enforce_eager)
    total += _small_kernels(model, settings, kernels, size)
    if model.moe:
        total += expert_layers(model) * moe_s(size, model, settings, kernels, formats)
    total += _communication(model, settings, kernels, size)
    total[0] = 0.0
    return np.asarray(np.interp(np.arange(tokens + 1), grid, total))


def _token_grid(tokens: int, settings: EngineSettings) -> tuple[NDArray[np.int64], Seconds]:
    """Token counts at which the table is computed, and the batch each runs at after graph padding."""
    captured = min(GRAPH_TOKENS, tokens)
    low = np.arange(captured + 1)
    high = (
        np.unique(np.append(np.arange(captured + 1, tokens, GRID_TOKENS), tokens))
        if tokens > captured
        else low[:0]
    )
    grid = np.concatenate([low, high])
    size = grid.astype(np.float64)
    if not settings.enforce_eager:
        # Captured sizes: 1, 2, 4, then every 8 up to 256, then every 16.
        padded = np.where(low > 256, -(-low // 16) * 16, -(-low // 8) * 8)
        padded = np.where(low <= 4, np.array([0, 1, 2, 4, 4])[np.minimum(low, 4)], padded)
        size[: captured + 1] = padded
    return grid, size


def _fused_all_reduce(settings: EngineSettings, kernels: Kernels) -> bool:
    """Data-centre Blackwell: the engine joins all-reduce, residual add and norm in one kernel."""
    return settings.tensor_parallel_size > 1 and kernels.key == "b200_sxm" and not settings.enforce_eager


def _small_kernels(model: ModelSpec, settings: EngineSettings, kernels: Kernels, size: Seconds) -> Seconds:
    """Norms, rotary embedding, cache write, activation: a launch each and the bytes they stream."""
    launches = float(SMALL_KERNELS * model.num_layers)
    launches += 2.0 * sum(layer.kind in (LayerKind.STATE, LayerKind.MLA) for layer in model.layers)
    launches += expert_layers(model)  # top-k; its sort is inside the measured experts
    streamed = activation_bytes_per_token(model, settings)
    fused = launches - 2.0 * model.num_layers if _fused_all_reduce(settings, kernels) else launches
    count = np.where(size <= GRAPH_TOKENS, fused, launches)
    return np.asarray(
        count * kernels.small_kernel_s + size * streamed / (STREAM_EFFICIENCY * kernels.bandwidth)
    )


# ------------------------------------------------------------------------------------- experts, links, head


def moe_s(
    size: Seconds, model: ModelSpec, settings: EngineSettings, kernels: Kernels, formats: Formats
) -> Seconds:
    """Seconds of the routed experts of one layer for ``size`` tokens of each data-parallel rank.

    Measured times where this shape and split have them. Else by experts touched: ``E·(1 - (1 - k/E)^T)`` of
    all ranks' tokens T, shared by the expert-parallel ranks.
    """
    assert model.moe is not None
    world = settings.tensor_parallel_size * settings.data_parallel_size
    ep = world if settings.enable_expert_parallel else 1
    e, k, h = model.moe.experts, model.moe.experts_per_token, model.hidden_size
    f = model.moe.intermediate_size / (world / ep)
    form = formats.quantised
    tokens = size * settings.data_parallel_size
    curve = kernels.moe_curve(form.moe, (h, model.moe.intermediate_size, k, e), world // ep, ep)
    if curve:
        top = curve.tokens[-1]
        seconds = np.exp(
            np.interp(np.log(np.maximum(tokens, 1.0)), np.log(curve.tokens), np.log(curve.seconds))
        )
        return np.asarray(seconds * np.maximum(tokens / top, 1.0))
    fit = kernels.moe(form.moe)
    touched = e * (1.0 - (1.0 - k / e) ** tokens) / ep
    routed = tokens * k / ep
    projections = 3.0 if model.gated_mlp else 2.0
    memory = projections * h * f * form.weight_bytes * touched / (fit.weight_efficiency * kernels.bandwidth)
    compute = 2.0 * projections * routed * h * f / (fit.flop_efficiency * kernels.peak(form.peak))
    moved = 2.0 * routed * (2.0 * h + projections * f) / (fit.activation_efficiency * kernels.bandwidth)
    return p_norm(memory, compute, fit.p) + moved + fit.fixed_s


def _communication(model: ModelSpec, settings: EngineSettings, kernels: Kernels, size: Seconds) -> Seconds:
    """Two all-reduces a layer under TP; under DP all ranks' tokens gathered and scattered for experts."""
    tp, dp, pp = settings.tensor_parallel_size, settings.data_parallel_size, settings.pipeline_parallel_size
    h, layers = model.hidden_size, model.num_layers
    total = np.zeros(len(size))
    experts = expert_layers(model) if dp > 1 else 0
    graph = (size <= GRAPH_TOKENS) & (not settings.enforce_eager)
    if tp > 1:
        link = kernels.links(tp)
        total += (2 * layers - experts) * all_reduce_s(link, 2.0 * (tp - 1) / tp * size * h * 2.0, graph)
    if experts:
        link = kernels.links(tp * dp)
        total += 2 * experts * all_reduce_s(link, (dp - 1) * size * h * 2.0, graph)
    if pp > 1:
        link = kernels.links(2)
        total += (pp - 1) * (link.eager_s + size * h * 2.0 / link.bus_bytes_per_s)
    return total


def all_reduce_s(link: Links, wire_bytes: Seconds, graph: NDArray[np.bool_]) -> Seconds:
    """Seconds of one collective that puts ``wire_bytes`` on each GPU's links, inside a graph or not."""
    seconds = np.where(graph, link.graph_s, link.eager_s) + wire_bytes / link.bus_bytes_per_s
    if link.large_bus_bytes_per_s:
        seconds = np.minimum(seconds, link.large_s + wire_bytes / link.large_bus_bytes_per_s)
    return np.asarray(seconds)


def head_table(
    model: ModelSpec, settings: EngineSettings, kernels: Kernels, rows: int, formats: Formats
) -> Seconds:
    """Seconds by sampling rows: logits of those rows only, sampling, recurrent state read and written."""
    tp = settings.tensor_parallel_size
    r = np.arange(rows + 1, dtype=np.float64)
    seconds = gemm_s(r, model.vocab_size / tp, model.hidden_size, BF16, kernels, fused=True)
    seconds = seconds + HEAD_FIXED_S
    seconds += r * model.vocab_size * SAMPLE_BYTES_PER_LOGIT / (STREAM_EFFICIENCY * kernels.bandwidth)
    if tp > 1:
        link = kernels.links(tp)
        seconds += link.eager_s + (tp - 1) / tp * r * model.vocab_size * 2.0 / link.bus_bytes_per_s
    state_bytes = sum(
        layer.state.ssm_elements * layer.state.ssm_bytes_per_element
        + layer.state.conv_elements * layer.state.conv_bytes_per_element
        for layer in model.layers
        if layer.state
    )
    seconds += r * 2.0 * state_bytes / tp / (STREAM_EFFICIENCY * kernels.bandwidth)
    seconds[0] = 0.0
    return np.asarray(seconds)


# ------------------------------------------------------------------------------------------------ attention


def _attention(
    model: ModelSpec, settings: EngineSettings, kernels: Kernels, formats: Formats
) -> dict[str, float]:
    """The clock's attention coefficients, in seconds per token or per pair, summed over layers."""
    tp = settings.tensor_parallel_size
    out = dict.fromkeys(
        ("decode_fixed_s", "decode_kv_s", "decode_window_s", "prefill_fixed_s", "prefill_pair_s",
         "prefill_token_s", "prefill_context_s"), 0.0,
    )  # fmt: skip
    windows: Counter[int] = Counter()
    for layer, count in Counter(model.layers).items():
        if layer.kind in (LayerKind.NONE, LayerKind.STATE):
            continue
        fit = kernels.attention(formats.kv_dtype, layer.head_dim)
        read = fit.kv_efficiency * kernels.bandwidth
        compute = fit.prefill_efficiency * kernels.peak("bf16")
        heads = layer.heads / tp
        value_dim = layer.v_head_dim or layer.head_dim
        if layer.kind is LayerKind.MLA:
            kv_bytes = (layer.latent_dim + layer.rope_dim + layer.index_dim) * formats.kv_bytes
            absorbed = 2.0 * (2 * layer.latent_dim + layer.rope_dim) * heads / (0.5 * kernels.peak("bf16"))
            decode = max(kv_bytes / read, absorbed)
            expand = 2.0 * layer.latent_dim * heads * (layer.head_dim + value_dim) / compute
            context = kv_bytes / read + expand  # the latent is expanded to K and V again for every chunk
        else:
            kv_bytes = max(1.0, layer.kv_heads / tp) * (layer.head_dim + value_dim) * formats.kv_bytes
            decode = context = kv_bytes / read
        pair = 2.0 * heads * (layer.head_dim + value_dim) / compute
        out["decode_fixed_s"] += count * fit.decode_fixed_s
        out["prefill_fixed_s"] += count * fit.prefill_fixed_s
        out["prefill_token_s"] += count * pair * fit.ramp_tokens / 2.0
        if layer.window and layer.kind in (LayerKind.SLIDING, LayerKind.CHUNKED):
            windows[layer.window] += count
            out["decode_window_s"] += count * decode
            # A token sees at most a window. Wide windows seldom bind in a prompt, so they count as full.
            if layer.window <= 1024:
                out["prefill_token_s"] += count * pair * layer.window
                continue
        else:
            out["decode_kv_s"] += count * decode
        out["prefill_pair_s"] += count * pair
        out["prefill_context_s"] += count * context
    out["window"] = windows.most_common(1)[0][0] if windows else 0
    return out
