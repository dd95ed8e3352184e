"""What would make a set-up fit: each change tried by estimating again, in one unit (GiB per GPU)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from kvplan.errors import InputError
from kvplan.memory.capacity import Estimate, estimate
from kvplan.memory.layer_bytes import BYTES_PER_ELEMENT
from kvplan.spec.weights import effective_quantization

MAX_TP = 8  # one node


@dataclass(frozen=True)
class Change:
    """One thing to change: engine flags, or the weight format."""

    label: str
    arguments: tuple[str, ...]
    settings: tuple[tuple[str, object], ...]
    alters_answers: bool = False


@dataclass(frozen=True)
class Fix:
    """A change and what it does; bytes per rank. ``spare_bytes`` is negative where it is not enough."""

    changes: tuple[Change, ...]
    gpus: int
    gains_bytes: int
    spare_bytes: int
    longest_tokens: int
    at_once: float
    fits: bool

    @property
    def label(self) -> str:
        return ", ".join(change.label for change in self.changes)

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(word for change in self.changes for word in change.arguments)

    @property
    def alters_answers(self) -> bool:
        """Whether the model may answer differently (quantised weights or KV)."""
        return any(change.alters_answers for change in self.changes)


def find_fixes(e: Estimate) -> tuple[list[Fix], list[Fix]]:
    """(changes that make ``e`` fit, fewest GPUs first; single changes that are not enough alone)."""
    singles = [fix for change in _changes(e) if (fix := _try(e, (change,)))]
    enough = [fix for fix in singles if fix.fits]
    solved_by_tp = min((f.gpus for f in enough if f.gpus > e.engine.ranks), default=0)
    if solved_by_tp:  # more GPUs than needed are no news
        enough = [fix for fix in enough if fix.gpus <= solved_by_tp]
        singles = [fix for fix in singles if fix.gpus <= solved_by_tp]
    covered = {fix.gpus for fix in enough}
    pairs = [
        fix
        for a, b in combinations((f.changes[0] for f in singles if not f.fits), 2)
        if not {name for name, _ in a.settings} & {name for name, _ in b.settings}
        and (fix := _try(e, (a, b)))
        and fix.fits
        and fix.gpus not in covered
    ]
    for gpus in sorted({fix.gpus for fix in pairs}):  # one pair a GPU count: the least that is enough
        enough.append(
            min((f for f in pairs if f.gpus == gpus), key=lambda f: (f.alters_answers, f.spare_bytes))
        )
    enough.sort(key=lambda f: (f.gpus, f.alters_answers, -f.spare_bytes))
    short = sorted((f for f in singles if not f.fits and f.gains_bytes > 0), key=lambda f: -f.spare_bytes)
    seen: set[tuple[str, int]] = set()  # 256 and 16 requests often gain the same: the milder one is enough
    distinct = []
    for fix in short:
        key = (fix.changes[0].settings[0][0], fix.spare_bytes)
        if key not in seen:
            distinct.append(fix)
        seen.add(key)
    return enough, distinct


def spare_bytes(e: Estimate) -> int:
    """What is left of the pool after one request at max_model_len; negative is short by."""
    return -e.verdict.short_by_bytes


def _changes(e: Estimate) -> Iterator[Change]:
    s, engine = e.engine.settings, e.engine
    if s.num_gpu_blocks_override is not None:  # a pool counted in blocks holds as many tokens whatever else
        yield from _shorter(e)
        return
    quantization = effective_quantization(e.model, s)
    bits = quantization.bits if quantization else 16
    if bits > 4:
        yield Change("4-bit weights (awq)", ("--quantization", "awq"), (("quantization", "awq"),), True)
    if bits > 8:
        yield Change("fp8 weights", ("--quantization", "fp8"), (("quantization", "fp8"),), True)
    if BYTES_PER_ELEMENT[engine.kv_cache_dtype] > 1:
        yield Change("fp8 KV", ("--kv-cache-dtype", "fp8"), (("kv_cache_dtype", "fp8"),), True)
    tp = 2 * s.tensor_parallel_size
    while tp <= MAX_TP:
        yield Change(f"TP {tp}", ("-tp", str(tp)), (("tensor_parallel_size", tp),))
        tp *= 2
    if s.tensor_parallel_size >= MAX_TP and s.kv_cache_memory_bytes is None:  # a second node
        pp = 2 * s.pipeline_parallel_size
        yield Change(f"PP {pp}", ("-pp", str(pp)), (("pipeline_parallel_size", pp),))
    yield from _shorter(e)
    if engine.gpu_memory_utilization < 0.95:
        yield Change(
            "--gpu-memory-utilization 0.95",
            ("--gpu-memory-utilization", "0.95"),
            (("gpu_memory_utilization", 0.95),),
        )
    for name, value in (("max_num_seqs", 256), ("max_num_seqs", 16), ("max_num_batched_tokens", 2048)):
        if getattr(engine, name) > value:
            flag = "--" + name.replace("_", "-")
            yield Change(f"{flag} {value}", (flag, str(value)), ((name, value),))
    if e.budget is not None and e.budget.cuda_graphs.bytes:
        yield Change("--enforce-eager", ("--enforce-eager",), (("enforce_eager", True),))


def _shorter(e: Estimate) -> Iterator[Change]:
    length = e.estimated_max_model_len
    if 0 < length < e.engine.max_model_len:
        yield Change(
            f"--max-model-len {length}", ("--max-model-len", str(length)), (("max_model_len", length),)
        )


def _try(e: Estimate, changes: tuple[Change, ...]) -> Fix | None:
    """The outcome of ``changes``; None where the engine refuses the combination."""
    values = dict(pair for change in changes for pair in change.settings)
    try:
        after = estimate(e.model, e.gpu, replace(e.engine.settings, **values))  # type: ignore[arg-type]
    except InputError:
        return None
    spare = spare_bytes(after)
    return Fix(
        changes=changes,
        gpus=after.engine.ranks,
        gains_bytes=spare - spare_bytes(e),
        spare_bytes=spare,
        longest_tokens=after.estimated_max_model_len,
        at_once=after.max_concurrency,
        fits=bool(after.verdict.fits),
    )
