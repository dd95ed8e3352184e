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
    if engine.settings.engine == "sglang":
        return _sglang_budget(gpu, engine, weights, stage)
    if engine.settings.engine == "tensorrt-llm":
        return _tensorrt_budget(gpu, engine, weights, stage)
    if parse_version(engine.settings.engine_version) < KNOWN_VLLM[0]:
        raise InputError(
            f"--engine-version {engine.settings.engine_version} is engine V0; its profile is not modelled.\n"
            "  The KV pool can be given: --kv-cache-memory-bytes N."
        )
    graphs = cuda_graphs(model, engine)
    outside = 0
    if graphs.bytes and not graphs_inside(engine):
        outside = graphs.bytes
        why = f"about {outside / GIB:.2f} GiB outside the budget"
        graphs = Term(0, why, graphs.source, why)
    budget = int(gpu.total_bytes * engine.gpu_memory_utilization)
    band, notes = _band(model, gpu, engine, budget, graphs.bytes)
    return Budget(
        stage=stage,
        total_bytes=gpu.total_bytes,
        budget_bytes=budget,
        weights=weights,
        activation=activation_peak(model, gpu, engine, stage),
        non_torch=non_torch(gpu, engine),
        cuda_graphs=graphs,
        graphs_outside_bytes=outside,
        band_bytes=band,
        notes=tuple(notes),
    )


def _sglang_budget(gpu: GPU, engine: Resolved, weights: Term, stage: int) -> Budget:
    """pool = mem_fraction_static x (total - non-torch) - weights; all else uses the rest (BUDGET 10)."""
    fraction = engine.gpu_memory_utilization
    outside_torch = non_torch(gpu, engine)
    budget = int(gpu.total_bytes * fraction)
    share = Term(
        int(outside_torch.bytes * fraction),
        f"{outside_torch.why}, x {fraction:g}",
        outside_torch.source,
        f"({outside_torch.formula}) x {fraction:g}",
    )
    rest = Term(0, f"outside the budget, in {1 - fraction:.3f} of the GPU", "rule")
    return Budget(
        stage=stage,
        total_bytes=gpu.total_bytes,
        budget_bytes=budget,
        weights=weights,
        activation=rest,
        non_torch=share,
        cuda_graphs=rest,
        graphs_outside_bytes=0,
        band_bytes=int(0.025 * budget),
        notes=("SGLang's pool is checked against one log from end to end",),
    )


TENSORRT_ENGINE_BYTES = int(2.5 * GIB)  # beside weights before the pool is cut; 2 to 3 GiB in two logs


def _tensorrt_budget(gpu: GPU, engine: Resolved, weights: Term, stage: int) -> Budget:
    """pool = free_gpu_memory_fraction x (total - weights - 2.5 GiB) (BUDGET 10)."""
    fraction = engine.gpu_memory_utilization
    free = max(0, gpu.total_bytes - weights.bytes - TENSORRT_ENGINE_BYTES)
    none = Term(0, "in the engine's 2.5 GiB", "logs")
    return Budget(
        stage=stage,
        total_bytes=gpu.total_bytes,
        budget_bytes=gpu.total_bytes - int(free * (1 - fraction)),
        weights=weights,
        activation=Term(TENSORRT_ENGINE_BYTES, "all but weights and KV: 2 to 3 GiB", "logs"),
        non_torch=none,
        cuda_graphs=none,
        graphs_outside_bytes=0,
        band_bytes=int(0.5 * GIB),
        notes=("TensorRT-LLM's free memory is known from two logs",),
    )


def activation_peak(model: ModelSpec, gpu: GPU, engine: Resolved, stage: int = 0) -> Term:
    """Peak of the profile run: the sampler on the last stage or a layer's forward pass (BUDGET 3)."""
    last = engine.settings.pipeline_parallel_size - 1
    size = _compute_bytes(engine)
    batched, hidden = engine.max_num_batched_tokens, model.hidden_size
    sampler, sampler_why, sampler_formula = (
        _sampler(model, gpu, engine, stage) if stage == last else (0, "", "")
    )
    forward, forward_why = _forward(model, engine)
    if stage != last:  # hidden states and residual for the next stage
        forward += 2 * batched * hidden * size
        forward_why += f" + 2 x {batched:,} x {hidden:,} x {size} B"
    scratch = _moe_scratch(model, engine)
    if engine.version <= (0, 11):  # freed between layers then
        forward, scratch = forward + scratch, 0
    encoder = _encoder_bytes(model, batched, size) if stage == 0 else 0
    cublas = (32 if _is_datacenter_hopper(gpu) else 8) * MIB
    wins = sampler > forward
    why = sampler_why if wins else f"forward pass over {batched:,} tokens"
    formula = sampler_formula if wins else forward_why
    if scratch:
        why += f"; MoE {scratch / GIB:.2f}"
        formula += f" + MoE work area {scratch:,} B"
    if encoder:
        formula += f" + encoder {encoder:,} B"
    formula += f" + cuBLAS {cublas // MIB} MiB"
    return Term(max(sampler, forward) + scratch + encoder + cublas, why, "shape", formula)


def _compute_bytes(engine: Resolved) -> int:
    return 4 if engine.dtype == "float32" else 2


def _sampler(model: ModelSpec, gpu: GPU, engine: Resolved, stage: int) -> tuple[int, str, str]:
    """(bytes, in short, in full) of logits and sampler buffers of the last stage."""
    size = _compute_bytes(engine)
    batched, hidden = engine.max_num_batched_tokens, model.hidden_size
    # Each running request has a row of logits, and one more for every token drafted for it.
    rows = min(engine.max_num_seqs * (1 + engine.settings.num_speculative_tokens), batched)
    vocab = padded_vocab(model.vocab_size, engine.settings.tensor_parallel_size)
    units, has_row_buffer = _sampler_units(engine)
    if engine.dtype == "float32":
        units -= 0.5
    total = int(units * rows * vocab * LOGIT_BYTES)
    short = f"sampler: {units:g} x {rows:,} x {vocab:,} x 4 B"
    full = f"sampler: {units:g} x {rows:,} rows of logits x {vocab:,} vocab x 4 B"
    if has_row_buffer:
        total += gpu.sm_count * vocab * LOGIT_BYTES
        full += f" + {gpu.sm_count} SMs x {vocab:,} x 4 B"
    # Hidden states and residual that came from the stage before.
    inputs = batched + 2 * rows + (2 * batched if stage > 0 else 0)
    total += inputs * hidden * size
    full += f" + {inputs:,} x {hidden:,} x {size} B"
    return total, short, full


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


def _forward(model: ModelSpec, engine: Resolved) -> tuple[int, str]:
    """(bytes, formula) of one layer's pass over a full batch: its MLP or, where larger, its attention."""
    size, tp = _compute_bytes(engine), engine.settings.tensor_parallel_size
    batched, hidden = engine.max_num_batched_tokens, model.hidden_size
    # The widest MLP that is no routed expert; a model of experts alone has none.
    wide = max((t.in_ for t in model.tensors if t.part == "mlp" and t.name.endswith("down_proj")), default=0)
    factor = 3 if model.gated_mlp else 2
    mlp = batched * factor * wide // tp * size + int(3.5 * batched * hidden * size)
    split = f" / TP {tp}" if tp > 1 else ""
    why = f"forward: {batched:,} tokens x ({factor} x {wide:,}{split} + 3.5 x {hidden:,}) x {size} B"
    quantization = effective_quantization(model, engine.settings)
    if quantization is not None and quantization.bits == 8:  # the 8-bit copy of the activations
        mlp += batched * wide // tp
        why += f" + {batched:,} x {wide:,}{split}"
    attention = max(
        (
            (2 * layer.heads + 2 * layer.kv_heads) * layer.head_dim
            for layer in model.layers
            if layer.kind in (LayerKind.FULL, LayerKind.SLIDING, LayerKind.CHUNKED)
        ),
        default=0,
    )
    heads = batched * attention // tp * size + 3 * batched * hidden * size
    if heads > mlp:
        return heads, f"forward: {batched:,} tokens x ({attention:,}{split} + 3 x {hidden:,}) x {size} B"
    return mlp, why


def _moe_scratch(model: ModelSpec, engine: Resolved) -> int:
    """Work area that the fused MoE kernel keeps; MXFP4 kernels need none."""
    if model.moe is None or _is_mxfp4(model, engine):
        return 0
    split = 1 if engine.settings.enable_expert_parallel else engine.settings.tensor_parallel_size
    width, hidden = model.moe.intermediate_size // split, model.hidden_size
    tokens = engine.max_num_batched_tokens * model.moe.experts_per_token
    return tokens * (max(2 * width, hidden) + max(width, hidden)) * _compute_bytes(engine)


def _is_mxfp4(model: ModelSpec, engine: Resolved) -> bool:
    quantization = effective_quantization(model, engine.settings)
    return quantization is not None and quantization.method == "mxfp4"


def _encoder_bytes(model: ModelSpec, batched: int, size: int) -> int:
    """Embeddings of the profiled images and their pixels; pixels only where an item's size is known."""
    if not model.multimodal:
        return 0
    tokens, pixels = ENCODER_ITEMS.get(model.architecture, (1, 0))
    return batched * model.hidden_size * size + batched // tokens * pixels * 2


def _is_datacenter_hopper(gpu: GPU) -> bool:
    return gpu.arch.lower() in ("hopper", "blackwell", "blackwell ultra") and gpu.total_gib >= 70


def non_torch(gpu: GPU, engine: Resolved) -> Term:
    """Memory of the process outside the torch allocator: CUDA context, NCCL buffers (BUDGET 4)."""
    s = engine.settings
    tp = s.tensor_parallel_size
    why = f"CUDA context and NCCL at TP {tp}" if tp > 1 else "CUDA context"
    alone = 0.13 if engine.version <= (0, 17) else 0.25
    if s.pipeline_parallel_size > 1 and tp == 1:
        alone, extra = 0.07, 0.0
    elif tp == 1:
        extra = 0.0
    elif not gpu.has_nvlink:
        extra = 0.1
    elif engine.version < (0, 17):
        extra = 0.8
    else:
        extra = 1.83 if tp == 2 else 1.92
    link = "NVLink" if gpu.has_nvlink else "no NVLink"
    formula = f"{why}: {alone} + {extra} ({link}) GiB" if extra else f"{why}: {alone} GiB"
    return Term(int((alone + extra) * GIB), why, "logs", formula)


def graphs_inside(engine: Resolved) -> bool:
    """Whether the graph estimate is subtracted before the KV pool is sized (BUDGET 5)."""
    return engine.version >= (0, 29) or (engine.version >= (0, 21) and engine.model_runner == "v1")


def cuda_graphs(model: ModelSpec, engine: Resolved) -> Term:
    """Memory of the captured graphs, wherever it is counted; a line fitted on logs of 0.19 (BUDGET 5)."""
    if engine.settings.enforce_eager:
        return Term(0, "none with enforce_eager", "flag")
    stages = engine.settings.pipeline_parallel_size
    gib = 0.37 + 0.0165 * model.num_layers / stages
    formula = f"0.37 + 0.0165 x {model.num_layers} layers" + (f" / PP {stages}" if stages > 1 else "")
    if model.moe is not None:
        gib, formula = gib + 0.35, formula + " + 0.35 (MoE)"
        if _is_mxfp4(model, engine):
            gib, formula = gib + 0.72, formula + " + 0.72 (MXFP4)"
    if engine.settings.tensor_parallel_size > 1:
        gib, formula = gib - 0.10, formula + " - 0.10 (TP)"
    return Term(int(gib * GIB), "inside the budget in this version", "logs", formula + " GiB")


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
    if "total_bytes" in gpu.unverified:
        band += 0.01 * budget
        notes.append(f"total memory of {gpu.name} is no driver's reading ({gpu.source})")
    if gpu.vendor.lower() != "nvidia":
        band += 0.05 * budget
        notes.append(f"no {gpu.vendor} log stands behind these terms")
    return int(band), notes
