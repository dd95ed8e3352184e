"""Joins model, GPU and engine flags into an answer: how many blocks, does it start, what would help.

`estimate` is what `kvplan estimate` prints; `pool_for` is the part that a simulation needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

from kvplan.errors import InputError
from kvplan.memory.budget import Budget, Term, padded_vocab, stage_budget
from kvplan.memory.kvlayout import KVGroup, KVLayout, kv_layout
from kvplan.spec.catalogue import find_model
from kvplan.spec.engine import EngineSettings, Resolved, resolve
from kvplan.spec.gpu import GIB, GPU
from kvplan.spec.model import LayerKind, ModelSpec
from kvplan.spec.weights import effective_quantization, rank_shape, weight_bytes

DEFAULT_LORA_RANK = 16


@dataclass(frozen=True)
class Workload:
    """Requests at once for a length mix. ``low`` and ``high`` are the 5th and 95th percentile over random
    sets of its requests (equal for one length); ``too_long`` requests exceed max_model_len."""

    source: str
    requests: int
    mean_tokens: float
    mean_blocks: float
    concurrency: float
    low: float
    high: float
    too_long: int


@dataclass(frozen=True)
class Verdict:
    """Whether the engine starts. ``short_by_bytes`` is what the pool lacks, per rank, for one request at
    max_model_len or, where ``running_state_bytes`` is not 0, for the states of max_num_seqs requests."""

    fits: bool | None  # None: nothing to decide (the bare formula)
    reason: str
    short_by_bytes: int
    running_state_bytes: int = 0


@dataclass(frozen=True)
class Estimate:
    """All that is known about one model on one GPU type under one set of flags; bytes are per rank.

    ``budget`` is the pipeline stage that decides; None when the pool was given by hand or weights are
    unknown. ``num_gpu_blocks`` includes the null block, as the engine logs it.
    """

    model: ModelSpec
    gpu: GPU
    engine: Resolved
    layout: KVLayout
    budget: Budget | None
    available_kv_bytes: int
    num_gpu_blocks: int
    kv_cache_tokens: int
    max_concurrency: float
    needed_bytes_one_request: int
    estimated_max_model_len: int
    verdict: Verdict
    workload: Workload | None
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class PoolPlan:
    """The KV pool of one rank as a simulation needs it."""

    num_gpu_blocks: int  # null block included
    block_size: int
    bytes_per_block: int
    groups: tuple[KVGroup, ...]
    max_concurrency: float
    engine: Resolved
    verdict: Verdict
    assumptions: tuple[str, ...]


def pool_for(model: ModelSpec, gpu: GPU, settings: EngineSettings) -> PoolPlan:
    """The pool that ``model`` gets on ``gpu``. Raises `InputError` for what the engine refuses as input."""
    e = estimate(model, gpu, settings)
    return PoolPlan(
        e.num_gpu_blocks,
        e.layout.block_size,
        e.layout.bytes_per_block,
        e.layout.groups,
        e.max_concurrency,
        e.engine,
        e.verdict,
        e.assumptions,
    )


def estimate(
    model: ModelSpec,
    gpu: GPU,
    settings: EngineSettings,
    lengths: Sequence[int] | None = None,
    lengths_source: str = "",
) -> Estimate:
    """Split the GPU, lay out the KV cache, count blocks and requests, and say whether the engine starts.

    ``lengths`` (tokens, input + output) adds the concurrency at a real mix. Raises `InputError` for flags
    that the engine refuses before it looks at memory.
    """
    engine = resolve(settings, model, gpu)
    settings = engine.settings  # its dtype may be the card's, not the checkpoint's
    check_split(model, engine)
    layout = kv_layout(model, engine)
    assumptions = [*engine.assumptions, *layout.assumptions]
    budget: Budget | None = None
    if settings.kv_cache_memory_bytes is not None:
        available = settings.kv_cache_memory_bytes
        blocks = layout.num_blocks(available)
    elif settings.num_gpu_blocks_override is not None:
        blocks = settings.num_gpu_blocks_override
        available = blocks * layout.bytes_per_block
    elif not model.tensors:
        available = blocks = 0
    else:
        budgets = [
            stage_budget(model, gpu, engine, weights_term(model, settings, stage), stage)
            for stage in range(settings.pipeline_parallel_size)
        ]
        stage_blocks = [
            b.available_kv_bytes // size for b, size in zip(budgets, layout.stage_block_bytes, strict=True)
        ]
        deciding = stage_blocks.index(min(stage_blocks))
        budget, layout = budgets[deciding], replace(layout, deciding_stage=deciding)
        available, blocks = budget.available_kv_bytes, max(0, stage_blocks[deciding])
        assumptions += budget.notes
        if settings.max_loras:
            assumptions.append("size of LoRA slots from shape: not checked against a log")
        if len(budgets) > 1:
            assumptions.append(
                f"figures are of pipeline stage {deciding + 1} of {len(budgets)}, which decides"
            )
    needed = layout.needed_bytes(engine.max_model_len)
    return Estimate(
        model=model,
        gpu=gpu,
        engine=engine,
        layout=layout,
        budget=budget,
        available_kv_bytes=available,
        num_gpu_blocks=blocks,
        kv_cache_tokens=layout.cache_tokens(blocks),
        max_concurrency=layout.max_concurrency(blocks),
        needed_bytes_one_request=needed,
        estimated_max_model_len=layout.longest_request(available, max_len_limit(model, engine)),
        verdict=_verdict(model, engine, layout, budget, available, blocks),
        workload=None if lengths is None else _workload(lengths, lengths_source, engine, layout, blocks),
        assumptions=tuple(dict.fromkeys(assumptions)),
    )


def max_len_limit(model: ModelSpec, engine: Resolved) -> int:
    """The longest max_model_len worth naming: the model's own, else what was asked."""
    return max(model.max_position_embeddings, engine.max_model_len)


def weights_term(model: ModelSpec, settings: EngineSettings, stage: int) -> Term:
    """Weights of one rank of pipeline stage ``stage``, with the draft model's and the LoRA slots'."""
    found = weight_bytes(model, settings)
    size = found.stages[stage].bytes
    why, formula = _weights_why(model, settings, stage, size), found.formula
    last = settings.pipeline_parallel_size - 1
    if settings.speculative_model and stage == last:
        draft = find_model(settings.speculative_model).spec
        own = weight_bytes(draft, replace(settings, pipeline_parallel_size=1, speculative_model=None,
                                          num_speculative_tokens=0, quantization=None))  # fmt: skip
        why = f"model {size / GIB:,.2f} + draft {own.largest_bytes / GIB:,.2f}"
        size += own.largest_bytes
        formula += f" + draft model {own.formula}"
    if settings.max_loras:
        slots = lora_bytes(model, settings)
        why = (why if " + draft " in why else f"model {size / GIB:,.2f}") + f" + LoRA {slots / GIB:,.2f}"
        size += slots
        formula += f" + {settings.max_loras} LoRA slots {slots:,} B"
    return Term(size, why, found.source, formula)


def lora_bytes(model: ModelSpec, settings: EngineSettings) -> int:
    """16-bit A [rank, in] and B [out, rank] of every attention and MLP matrix, for each slot of a rank.

    Not checked against a log. Experts and embeddings carry no slot.
    """
    rank = settings.max_lora_rank or DEFAULT_LORA_RANK
    total = 0
    for tensor in model.tensors:
        if tensor.part in ("attention", "mlp", "state") and tensor.quantised:
            _, out, in_ = rank_shape(tensor, settings)
            total += len(tensor.layers) * rank * (out + in_) * 2
    return settings.max_loras * total // settings.pipeline_parallel_size


def _weights_why(model: ModelSpec, settings: EngineSettings, stage: int, size: int) -> str:
    ranks, stages = settings.tensor_parallel_size, settings.pipeline_parallel_size
    quantization = effective_quantization(model, settings)
    if ranks > 1:
        whole = weight_bytes(model, replace(settings, tensor_parallel_size=1)).stages[stage].bytes
        why = f"{whole / GIB:,.2f} / TP {ranks}"
        if size > 1.01 * whole / ranks:
            why += ", some parts on every rank"
    elif quantization is None and stages == 1:
        return weight_bytes(model, settings).formula.replace(" x ", " parameters x ", 1)
    else:
        why = f"{quantization.method}, {quantization.bits} bit" if quantization else "16 bit"
    return why + (f", stage {stage + 1} of {stages}" if stages > 1 else "")


def check_split(model: ModelSpec, engine: Resolved) -> None:
    """Refuse a TP size that the engine cannot split the model by, naming what does not divide."""
    tp = engine.settings.tensor_parallel_size
    causes = _split_causes(model, tp)
    if not causes:
        return
    usable = [n for n in range(1, 65) if not _split_causes(model, n)]
    shown = [str(n) for n in usable if n <= 16] or ["1"]
    listed = ", ".join(shown[:-1]) + f" or {shown[-1]}" if len(shown) > 1 else shown[0]
    raise InputError(f"-tp {tp} cannot split {' and '.join(causes)}.\n  Use {listed}.")


def _split_causes(model: ModelSpec, tp: int) -> list[str]:
    causes = []
    if model.heads % tp:
        causes.append(f"{model.heads} attention heads")
    kv_heads = {layer.kv_heads for layer in model.layers if layer.kv_heads and layer.kind != LayerKind.MLA}
    for heads in sorted(kv_heads):
        if heads % tp and tp % heads:
            causes.append(f"{heads} KV heads")
    if model.vocab_size and padded_vocab(model.vocab_size, 1) % tp:
        causes.append(f"a vocabulary of {model.vocab_size:,}")
    return causes


def _verdict(
    model: ModelSpec,
    engine: Resolved,
    layout: KVLayout,
    budget: Budget | None,
    available: int,
    blocks: int,
) -> Verdict:
    need = layout.startup_bytes(engine.max_model_len)
    short = need - available
    if budget is None and not available:
        return Verdict(None, "weights unknown: only the formula", 0)
    if budget is not None and available <= 0:
        if budget.weights.bytes > budget.budget_bytes:
            reason = (
                f"weights alone are {budget.weights.bytes / GIB:,.2f}, "
                f"the budget is {budget.budget_bytes / GIB:,.2f}"
            )
        else:
            reason = "nothing left for KV after weights and engine"
        return Verdict(False, reason, short)
    if short > 0:
        reason = f"one request needs {need / GIB:,.2f} GiB, the pool is {available / GIB:,.2f}"
        return Verdict(False, reason, short)
    has_state = any(group.kind is LayerKind.STATE for group in layout.groups)
    if has_state and engine.max_num_seqs > blocks:
        # Every running request holds a state block, and the engine checks that before it starts.
        reason = f"max_num_seqs {engine.max_num_seqs:,} exceeds {blocks:,} state blocks"
        running = engine.max_num_seqs * layout.bytes_per_block
        return Verdict(False, reason, running - available, running)
    return Verdict(True, "", short)


def _workload(
    lengths: Sequence[int], source: str, engine: Resolved, layout: KVLayout, blocks: int
) -> Workload:
    """How many requests of this mix are held at once when each takes the blocks of its whole length.

    The number that fills the pool is a renewal count: mean N / m, spread by the variation of the sum.
    """
    fitting = [n for n in lengths if n <= engine.max_model_len]
    if not fitting:
        raise InputError(f"every request of {source} is longer than max_model_len {engine.max_model_len:,}.")
    counts: dict[int, int] = {}
    for n in fitting:
        counts[n] = counts.get(n, 0) + 1
    total = len(fitting)
    size = {n: layout.blocks_per_request(n) for n in counts}
    mean = sum(size[n] * k for n, k in counts.items()) / total
    variance = sum((size[n] - mean) ** 2 * k for n, k in counts.items()) / total
    at_once = blocks / mean
    spread = 1.645 * sqrt(at_once * variance) / mean
    limit = float(engine.max_num_seqs)
    return Workload(
        source=source,
        requests=len(lengths),
        mean_tokens=sum(n * k for n, k in counts.items()) / total,
        mean_blocks=mean,
        concurrency=min(limit, at_once),
        low=min(limit, max(0.0, at_once - spread)),
        high=min(limit, at_once + spread),
        too_long=len(lengths) - total,
    )
