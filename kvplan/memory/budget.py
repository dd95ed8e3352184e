"""How vLLM splits a GPU: weights, activation peak, memory outside torch, CUDA graphs, KV pool.

    available = utilisation x total - weights - activation - non-torch - graph estimate

Formulas and constants: BUDGET 3 to 7 (from shapes, and from public start-up logs of vLLM 0.9 to 0.26); all
sizes are bytes of one rank. Weights come from `spec.weights`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvplan.errors import InputError
from kvplan.spec.engine import KNOWN_VLLM, Resolved, parse_version
from kvplan.spec.gpu import GIB, GPU
from kvplan.spec.model import LayerKind, ModelSpec
from kvplan.spec.weights import effective_quantization

MIB = 1 << 20
LOGIT_BYTES = 4

# Units of (sequences x vocabulary x 4 B) alive at the sampler's peak (BUDGET 3).
SAMPLER_UNITS_TORCH = 9.5  # 16-bit and fp32 logits, sorted values, int64 indices, sort work space; to 0.16
SAMPLER_UNITS_TRITON = 3.5  # logits in 16 and 32 bit, probabilities, exponential noise; V1 runner from 0.17
SAMPLER_UNITS_V2 = 0.5  # 16-bit logits only: the profile run skips the sampler

# Largest profiled item: tokens it takes and elements of its pixels, by architecture (BUDGET 3).
ENCODER_ITEMS = {
    "Gemma3ForConditionalGeneration": (256, 3 * 896 * 896),
    "Llama4ForConditionalGeneration": (2448, 17 * 3 * 336 * 336),
}


@dataclass(frozen=True)
class Term:
    """One part of the budget: its size, what it follows from in figures, and where the rule is from."""

    bytes: int
    why: str
    source: str
    formula: str = ""  # the whole sum, where ``why`` is short


@dataclass(frozen=True)
class Budget:
    """One rank of one pipeline stage. ``graphs_outside_bytes`` is graph memory that the budget ignores."""

    stage: int
    total_bytes: int
    budget_bytes: int
    weights: Term
    activation: Term
    non_torch: Term
    cuda_graphs: Term
    graphs_outside_bytes: int
    band_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def engine_bytes(self) -> int:
        """What the engine keeps beside weights and KV, inside the budget."""
        return self.activation.bytes + self.non_torch.bytes + self.cuda_graphs.bytes

    @property
    def available_kv_bytes(self) -> int:
        """Left for the KV pool; negative when the rest alone does not fit."""
        return self.budget_bytes - self.weights.bytes - self.engine_bytes


def stage_budget(model: ModelSpec, gpu: GPU, engine: Resolved, weights: Term, stage: int = 0) -> Budget:
    """The budget of a rank of pipeline stage ``stage``.

    Raises `InputError` for engine V0 (before 0.9), whose profile run is not modelled.
    """
    if parse_version(engine.settings.engine_version) < KNOWN_VLLM[0]:
        raise InputError(
            f"--engine-version {engine.settings.engine_version} is engine V0, whose memory profile is not "
            "modelled; give --kv-cache-memory-bytes."
        )
    graphs = cuda_graph_bytes(model, engine)
    inside = graphs if graphs_inside(engine) else 0
    budget = int(gpu.total_bytes * engine.gpu_memory_utilization)
    band, notes = _band(model, gpu, engine, budget, inside)
    tp = engine.settings.tensor_parallel_size
    if engine.settings.enforce_eager:
        graph_why = "none with enforce_eager"
    elif inside:
        graph_why = "inside the budget in this version"
    else:
        graph_why = f"about {graphs / GIB:.2f} GiB outside the budget in this version"
    return Budget(
        stage=stage,
        total_bytes=gpu.total_bytes,
        budget_bytes=budget,
        weights=weights,
        activation=activation_peak(model, gpu, engine, stage),
        non_torch=Term(
            non_torch_bytes(gpu, engine),
            f"CUDA context and NCCL at TP {tp}" if tp > 1 else "CUDA context",
            "logs of 0.9 to 0.19",
        ),
        cuda_graphs=Term(inside, graph_why, "logs of 0.19, ± 0.4 GiB"),
        graphs_outside_bytes=graphs - inside,
        band_bytes=band,
        notes=tuple(notes),
    )


def activation_peak(model: ModelSpec, gpu: GPU, engine: Resolved, stage: int = 0) -> Term:
    """Peak of the profile run: the sampler on the last stage or a layer's forward pass (BUDGET 3)."""
    s = engine.settings
    tp, last = s.tensor_parallel_size, s.pipeline_parallel_size - 1
    size = 4 if engine.dtype == "float32" else 2
    batched, hidden = engine.max_num_batched_tokens, model.hidden_size
    rows = min(engine.max_num_seqs, batched)
    vocab = padded_vocab(model.vocab_size, tp)
    unit = rows * vocab * LOGIT_BYTES
    units, rows_buffer = _sampler_units(engine)
    if engine.dtype == "float32":
        units -= 0.5
    sampler = 0
    if stage == last:
        sampler = int(units * unit) + (gpu.sm_count * vocab * LOGIT_BYTES if rows_buffer else 0)
        sampler += (batched + 2 * rows) * hidden * size
        if stage > 0:  # hidden states and residual that came from the stage before
            sampler += 2 * batched * hidden * size
    forward = _forward_bytes(model, engine, size)
    if stage != last:
        forward += 2 * batched * hidden * size
    scratch = _moe_scratch(model, engine, size)
    if engine.version <= (0, 11):  # freed between layers then
        forward, scratch = forward + scratch, 0
    encoder = _encoder_bytes(model, batched, hidden, size) if stage == 0 else 0
    cublas = (32 if _is_datacenter_hopper(gpu) else 8) * MIB
    if sampler > forward:
        why = f"sampler: {units:g} x {rows:,} seqs x {vocab:,} vocab x 4 B"
    else:
        why = f"a layer's forward pass over {batched:,} tokens"
    if scratch:
        why += f", MoE work area {scratch / GIB:.2f}"
    return Term(max(sampler, forward) + scratch + encoder + cublas, why, "shape, BUDGET 3")


def padded_vocab(vocab: int, tp: int) -> int:
    """Rows of the logits: the vocabulary padded up to 64 and to a whole number of rows a rank."""
    step = 64 * tp
    return -(-vocab // step) * step


def _sampler_units(engine: Resolved) -> tuple[float, bool]:
    """(units of logits alive at the peak, whether the Triton sampler keeps a row per SM)."""
    if engine.model_runner == "v2":
        tp = engine.settings.tensor_parallel_size if engine.version >= (0, 29) else 1
        return SAMPLER_UNITS_V2 / tp, False
    if engine.version >= (0, 17):
        return SAMPLER_UNITS_TRITON, True
    return SAMPLER_UNITS_TORCH, False


def _forward_bytes(model: ModelSpec, engine: Resolved, size: int) -> int:
    tp, batched = engine.settings.tensor_parallel_size, engine.max_num_batched_tokens
    has_dense = any(not layer.is_moe for layer in model.layers) or model.moe is None
    widths = [model.intermediate_size if has_dense else 0]
    if model.moe is not None:
        widths.append(model.moe.shared_intermediate_size)
    wide = max(widths)
    mlp = batched * (3 if model.gated_mlp else 2) * wide // tp * size + int(
        3.5 * batched * model.hidden_size * size
    )
    quantization = effective_quantization(model, engine.settings)
    if quantization is not None and quantization.bits == 8:
        mlp += batched * wide // tp  # the 8-bit copy of the activations
    attention = max(
        (
            (2 * layer.heads + 2 * layer.kv_heads) * layer.head_dim
            for layer in model.layers
            if layer.kind in (LayerKind.FULL, LayerKind.SLIDING, LayerKind.CHUNKED)
        ),
        default=0,
    )
    return max(mlp, batched * attention // tp * size + 3 * batched * model.hidden_size * size)


def _moe_scratch(model: ModelSpec, engine: Resolved, size: int) -> int:
    """Work area that the fused MoE kernel keeps; MXFP4 kernels need none."""
    if model.moe is None or _is_mxfp4(model, engine):
        return 0
    split = 1 if engine.settings.enable_expert_parallel else engine.settings.tensor_parallel_size
    width, hidden = model.moe.intermediate_size // split, model.hidden_size
    tokens = engine.max_num_batched_tokens * model.moe.experts_per_token
    return tokens * (max(2 * width, hidden) + max(width, hidden)) * size


def _is_mxfp4(model: ModelSpec, engine: Resolved) -> bool:
    quantization = effective_quantization(model, engine.settings)
    return quantization is not None and quantization.method == "mxfp4"


def _encoder_bytes(model: ModelSpec, batched: int, hidden: int, size: int) -> int:
    """Embeddings of the profiled images and their pixels; pixels only where an item's size is known."""
    if not model.multimodal:
        return 0
    tokens, pixels = ENCODER_ITEMS.get(model.architecture, (1, 0))
    return batched * hidden * size + batched // tokens * pixels * 2


def _is_datacenter_hopper(gpu: GPU) -> bool:
    return gpu.arch.lower() in ("hopper", "blackwell", "blackwell ultra") and gpu.total_gib >= 70


def non_torch_bytes(gpu: GPU, engine: Resolved) -> int:
    """Memory of the process outside the torch allocator: CUDA context, NCCL buffers (BUDGET 4)."""
    s = engine.settings
    if s.pipeline_parallel_size > 1 and s.tensor_parallel_size == 1:
        return int(0.07 * GIB)
    alone = 0.13 if engine.version <= (0, 17) else 0.25
    if s.tensor_parallel_size == 1:
        extra = 0.0
    elif not gpu.has_nvlink:
        extra = 0.1
    elif engine.version < (0, 17):
        extra = 0.8
    else:
        extra = 1.83 if s.tensor_parallel_size == 2 else 1.92
    return int((alone + extra) * GIB)


def graphs_inside(engine: Resolved) -> bool:
    """Whether the graph estimate is subtracted before the KV pool is sized (BUDGET 5)."""
    return engine.version >= (0, 29) or (engine.version >= (0, 21) and engine.model_runner == "v1")


def cuda_graph_bytes(model: ModelSpec, engine: Resolved) -> int:
    """Memory of the captured graphs: 0.37 + 0.0165 a layer + MoE terms, fitted on 0.19 (BUDGET 5)."""
    if engine.settings.enforce_eager:
        return 0
    gib = 0.37 + 0.0165 * model.num_layers / engine.settings.pipeline_parallel_size
    if model.moe is not None:
        gib += 0.35
        if _is_mxfp4(model, engine):
            gib += 0.72
    if engine.settings.tensor_parallel_size > 1:
        gib -= 0.10
    return int(gib * GIB)


def _band(model: ModelSpec, gpu: GPU, engine: Resolved, budget: int, graphs: int) -> tuple[int, list[str]]:
    """Half-width of what may be expected, and why it is wide (BUDGET 7)."""
    notes = []
    band = 0.003 * budget
    if engine.settings.tensor_parallel_size > 1 and engine.version != (0, 19):
        band += 0.022 * budget
        notes.append("NCCL memory at TP > 1 is known for 0.19 only")
    if engine.version >= (0, 20):
        band += 0.3 * GIB  # the profile counts runner buffers and allocator leftovers since
    if graphs:
        band += 0.4 * GIB
    kinds = {layer.kind for layer in model.layers}
    if LayerKind.STATE in kinds and engine.version >= (0, 26):
        band += 2 * GIB
        notes.append("graph estimates of state hybrids reach 2 to 5 GiB since 0.26")
    if any(layer.index_dim for layer in model.layers):
        band += 3 * GIB
        notes.append("work areas of sparse-attention indexers are not modelled")
    if gpu.vendor.lower() != "nvidia":
        band += 0.05 * budget
        notes.append(f"no {gpu.vendor} log stands behind these terms")
    return int(band), notes
