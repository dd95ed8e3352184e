"""`--explain`: one line a step in the order of calculation; bracketed numbers refer to steps."""

from __future__ import annotations

from kvplan.cli import render
from kvplan.cli.estimate_view import SHORT_DTYPES, subject
from kvplan.cli.numbers import GIB, byte_size, count, fixed
from kvplan.cli.render import Column, Terminal
from kvplan.memory.capacity import Estimate
from kvplan.memory.kvlayout import KVGroup
from kvplan.memory.layer_bytes import bytes_per_element
from kvplan.spec.model import Layer, LayerKind


class Steps:
    """Numbered lines; `add` returns the number, for later steps to refer to."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str, str, str]] = []

    def add(self, text: str, result: str, source: str) -> int:
        self.rows.append((len(self.rows) + 1, text, result, source))
        return len(self.rows)


def explained(e: Estimate, term: Terminal) -> list[str]:
    """The calculation of ``e``, step by step."""
    steps = Steps()
    pool = _pool_steps(e, steps)
    block, per_request = (_uniform_steps if e.layout.is_uniform else _group_steps)(e, steps)
    _count_steps(e, steps, pool, block, per_request)
    return [f"{subject(e)}", "", _table(steps, term)]


def _pool_steps(e: Estimate, steps: Steps) -> int | None:
    b, engine = e.budget, e.engine
    if b is None:
        if e.verdict.fits is None:
            return None
        return steps.add("KV pool, as given", _gib(e.available_kv_bytes), "flag")
    total = steps.add(_total_in_words(e), _gib(b.total_bytes), "catalogue")
    given = engine.settings.gpu_memory_utilization is not None
    budget = (
        0
        if engine.settings.engine == "tensorrt-llm"
        else steps.add(
            f"budget     ({total}) x {engine.gpu_memory_utilization:g}",
            _gib(b.budget_bytes),
            "flag" if given else "default",
        )
    )
    weights = steps.add(f"weights    {b.weights.formula}", _gib(b.weights.bytes), b.weights.source)
    activation = steps.add(
        f"activation {b.activation.formula or b.activation.why}",
        _gib(b.activation.bytes),
        b.activation.source,
    )
    other = steps.add(
        f"non-torch  {b.non_torch.formula or b.non_torch.why}", _gib(b.non_torch.bytes), b.non_torch.source
    )
    graphs = steps.add(
        f"graphs     {b.cuda_graphs.formula or b.cuda_graphs.why}",
        _gib(b.cuda_graphs.bytes),
        b.cuda_graphs.source,
    )
    if engine.settings.engine == "tensorrt-llm":
        free = f"(({total}) - ({weights}) - ({activation}))"
        text = f"KV pool    {free} x {engine.gpu_memory_utilization:g}"
        return steps.add(text, _gib(e.available_kv_bytes), f"± {b.band_bytes / GIB:.2f}")
    return steps.add(
        f"KV pool    ({budget}) - ({weights}) - ({activation}) - ({other}) - ({graphs})",
        _gib(e.available_kv_bytes),
        f"± {b.band_bytes / GIB:.2f}",
    )


def _total_in_words(e: Estimate) -> str:
    return "total, not read off a driver" if "total_bytes" in e.gpu.unverified else "what the driver reports"


def _uniform_steps(e: Estimate, steps: Steps) -> tuple[int, int]:
    layout, tp = e.layout, e.engine.settings.tensor_parallel_size
    size = bytes_per_element(e.engine.kv_cache_dtype)
    layers = [layer for layer in e.model.layers if layer.kind in (LayerKind.FULL, LayerKind.MLA)]
    layer = layers[0]
    stages = e.engine.settings.pipeline_parallel_size
    of_stage = f" of {len(layers)}" if stages > 1 else ""
    shown = layout.groups[0].layers
    if layer.kind is LayerKind.MLA:
        latent = f"{layer.latent_dim} latent + {layer.rope_dim} rope"
        text = f"per token  {shown}{of_stage} layers x {_mla_bytes(layer, e, latent)}"
        source = "one copy on every rank"
    elif all(_same_shape(layer, other) for other in layers):
        heads = steps.add(
            f"KV heads   max(1, {layer.kv_heads} / TP {tp})", count(max(1, layer.kv_heads // tp)), "config"
        )
        dims = (
            f"2 x {layer.head_dim}"
            if layer.head_dim == layer.v_head_dim
            else f"({layer.head_dim} + {layer.v_head_dim})"
        )
        text = f"per token  {shown}{of_stage} layers x ({heads}) x {dims} x {size} B"
        source = "2 L h d b"
    else:
        text = f"per token  sum over {shown}{of_stage} layers of unequal shape, {size} B an element"
        source = "config"
    per_token = steps.add(text, f"{layout.bytes_per_token:,} B", source)
    block = steps.add(
        f"per block  {layout.block_size} x ({per_token})", byte_size(layout.bytes_per_block), "block_size"
    )
    length = e.engine.max_model_len
    sharded = f" / DCP {layout.context_shards}" if layout.context_shards > 1 else ""
    per_request = steps.add(
        f"a request  ceil({length:,}{sharded} / {layout.block_size})",
        count(layout.blocks_per_request(length)),
        "A_B(n) / B",
    )
    return block, per_request


def _mla_bytes(layer: Layer, e: Estimate, latent: str) -> str:
    size = bytes_per_element(e.engine.kv_cache_dtype)
    index = f" + index key {layer.index_dim} and scale" if layer.index_dim else ""
    if e.engine.kv_cache_dtype == "fp8_ds_mla" or (layer.index_dim and size == 1):
        return f"({latent.replace(' rope', ' rope x 2 B')} + scales{index})"
    return f"(({latent}) x {size} B{index})"


def _same_shape(a: Layer, b: Layer) -> bool:
    return (a.kv_heads, a.head_dim, a.v_head_dim, a.index_dim) == (
        b.kv_heads, b.head_dim, b.v_head_dim, b.index_dim,
    )  # fmt: skip


def _group_steps(e: Estimate, steps: Steps) -> tuple[int, int]:
    layout, engine = e.layout, e.engine
    length, in_flight = engine.max_model_len, layout.in_flight_tokens
    dtype = SHORT_DTYPES.get(engine.kv_cache_dtype, engine.kv_cache_dtype)
    per_token = steps.add(
        f"per token  layers that keep every token, {dtype}", f"{layout.bytes_per_token:,} B", "slope"
    )
    steps.add(
        "fixed      windows when full, and states", f"{layout.fixed_bytes_per_request:,} B", "a request"
    )
    largest = max(group.layers for group in layout.groups)
    page = max(group.page_bytes for group in layout.groups)
    block = steps.add(
        f"per block  {largest} layers x a page of {page:,} B",
        byte_size(layout.bytes_per_block),
        "largest group",
    )
    numbers = []
    for group, n in _alike(layout.groups):
        times = f"{n} x " if n > 1 else ""
        asked = n * group.admitted_blocks(length, in_flight)
        numbers.append(
            steps.add(f"asked by   {times}{_rule(group, length, in_flight)}", count(asked), "rule")
        )
    assert per_token
    per_request = steps.add(
        "a request  " + " + ".join(f"({n})" for n in numbers), count(layout.blocks_per_request(length)), "sum"
    )
    return block, per_request


def _alike(groups: tuple[KVGroup, ...]) -> list[tuple[KVGroup, int]]:
    """Groups that ask for the same, once, with how many there are (layer counts may differ by padding)."""
    seen: dict[tuple[object, ...], list[KVGroup]] = {}
    for group in groups:
        seen.setdefault((group.kind, group.block_size, group.window), []).append(group)
    return [(found[0], len(found)) for found in seen.values()]


def _rule(group: KVGroup, length: int, in_flight: int) -> str:
    b = group.block_size
    match group.kind:
        case LayerKind.SLIDING:
            return f"window: ceil(min({group.window} - 1 + {in_flight:,}, {length:,}) / {b}) + 1"
        case LayerKind.CHUNKED:
            return f"chunk: ceil(min({group.window} + {in_flight:,}, {length:,}) / {b})"
        case LayerKind.STATE:
            return f"state: {group.state_blocks} blocks whatever the length"
    return f"full: ceil({length:,} / {b})"


def _count_steps(e: Estimate, steps: Steps, pool: int | None, block: int, per_request: int) -> None:
    if pool is None:
        return
    layout, length = e.layout, e.engine.max_model_len
    blocks = steps.add(
        f"blocks     floor(({pool}) / ({block}))",
        count(e.num_gpu_blocks),
        "1 stays empty" if layout.null_block_counts else "whole blocks",
    )
    requests = steps.add(
        f"requests   ({blocks}) / ({per_request})", fixed(e.max_concurrency), "the engine's figure"
    )
    if layout.derived_tokens:
        text, source = f"tokens     floor(({requests}) x {length:,})", "vLLM >= 0.21"
    else:
        smallest = min(group.block_size for group in layout.groups)
        shards = f" x DCP {layout.context_shards}" if layout.context_shards > 1 else ""
        text = f"tokens     floor(({blocks}) / {len(layout.groups)} groups) x {smallest}{shards}"
        source = "vLLM <= 0.20" if e.engine.settings.engine == "vllm" else "the engine's line"
    steps.add(text, count(e.kv_cache_tokens), source)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.4f} GiB"


def _table(steps: Steps, term: Terminal) -> str:
    """The steps as a table; a text that is too long goes on in the next row, so nothing is cut."""
    results = max(render.cells(result) for _, _, result, _ in steps.rows)
    sources = max(render.cells(source) for _, _, _, source in steps.rows)
    room = max(30, term.width - 2 - 2 - 2 - 2 - results - 2 - sources)
    body = []
    for number, text, result, source in steps.rows:
        lines = render.wrap(text, room + 1, hanging="           ").splitlines()
        for k, line in enumerate(lines):
            last = k == len(lines) - 1
            body.append(["" if k else str(number), line, result if last else "", source if last else ""])
    columns = [Column(""), Column("per GPU", "left"), Column("result"), Column("source", "left", optional=1)]
    return render.table(columns, body, term)
