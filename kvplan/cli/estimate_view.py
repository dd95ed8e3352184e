"""How an estimate looks: the verdict, the bar, the table that proves it, what would help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from kvplan.cli import render
from kvplan.cli.numbers import GIB, byte_size, count, fixed, gib, gib_parts, percents
from kvplan.cli.render import Column, Terminal
from kvplan.errors import InputError
from kvplan.memory.capacity import Estimate, estimate
from kvplan.spec.engine import EngineSettings
from kvplan.spec.model import LayerKind

FIRST_LINE = 80  # columns that a first line may take
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "fp8_e4m3": "fp8"}
LAYER_WORDS = {
    LayerKind.FULL: "full",
    LayerKind.MLA: "latent (MLA)",
    LayerKind.STATE: "state",
    LayerKind.NONE: "without attention",
    LayerKind.SHARED: "sharing another's KV",
}


def verdict_line(e: Estimate, term: Terminal) -> str:
    """The answer and its figure, in one line."""
    v, length = e.verdict, e.engine.max_model_len
    if v.fits is None:
        return render.verdict("formula only", f"{count(e.layout.bytes_per_token)} B per token", None, term)
    if not v.fits:
        short = f"short by {gib(v.short_by_bytes)} GiB: " if v.short_by_bytes > 0 else ""
        figure = short + v.reason
        if len(figure) > FIRST_LINE - len("DOES NOT FIT  "):
            figure = figure.replace(", the budget is ", ", budget ").replace(", the pool is ", ", pool ")
        return render.verdict("does not fit", figure, False, term)
    figure = f"{fixed(e.max_concurrency)} requests of {count(length)} tokens"
    if e.layout.is_uniform:
        figure += " at once"
        if e.workload is not None:
            figure += f", about {count(e.workload.concurrency)} at {_of_source(e)}"
    else:
        allowed = fixed(e.available_kv_bytes / max(1, e.layout.exact_bytes(length)))
        their = "their " if len(figure) + len(allowed) <= 34 else ""  # first lines fit 80 columns
        figure += f" as vLLM admits them; {their}bytes allow {allowed}"
    return render.verdict("fits", figure, True, term)


def _of_source(e: Estimate) -> str:
    assert e.workload is not None
    return e.workload.source if e.workload.requests == 1 else "this trace's lengths"


def subject(e: Estimate) -> str:
    """What was asked: model, GPUs, how it is split, engine version."""
    s = e.engine.settings
    sizes = (
        ("TP", s.tensor_parallel_size),
        ("PP", s.pipeline_parallel_size),
        ("DP", s.data_parallel_size),
    )
    split = ", ".join(f"{name} {n}" for name, n in sizes if n > 1)
    where = f"{e.engine.ranks} x {e.gpu.name}" + (f" ({split})" if split else "")
    return f"{render.escape(short_name(e.model.name))} on {where}, {e.engine.label}"


def short_name(name: str) -> str:
    """The name without its owner."""
    return name.rsplit("/", 1)[-1]


def layers_in_words(e: Estimate) -> str:
    """'10 full layers, 52 of window 1,024'."""
    kinds = Counter((layer.kind, layer.window) for layer in e.model.layers)
    words: list[str] = []
    for (kind, window), n in sorted(kinds.items(), key=lambda item: item[1]):
        layers = "" if words else " layers"
        if kind in (LayerKind.SLIDING, LayerKind.CHUNKED):
            what = "window" if kind is LayerKind.SLIDING else "chunk"
            words.append(f"{n}{layers} of {what} {count(window)}")
        else:
            words.append(f"{n} {LAYER_WORDS[kind]}{layers}")
    return ", ".join(words)


def fits_view(e: Estimate, term: Terminal) -> list[str]:
    """Blocks of text below the verdict of a set-up that starts."""
    asked = f"{subject(e)}, per GPU:" if e.layout.is_uniform else f"{subject(e)}; {layers_in_words(e)}"
    blocks = [render.wrap(asked, term.width + 1), ""]
    if e.budget is not None and e.layout.is_uniform:
        blocks += [*_budget_table(e, term), ""]
    elif e.budget is not None:
        blocks += [*_budget_bar(e, term), ""]
    elif e.verdict.fits is not None:
        blocks += [f"  KV pool given: {gib(e.available_kv_bytes)} GiB, {blocks_in_words(e)}", ""]
    blocks += _hybrid(e, term) if not e.layout.is_uniform else _uniform(e)
    blocks += _caveats(e)
    if e.verdict.fits is None:
        length = e.engine.max_model_len
        blocks += [
            f"  per block  {byte_size(e.layout.bytes_per_block)}, {e.layout.block_size} tokens",
            f"  a request  {gib(e.needed_bytes_one_request)} GiB at {count(length)} tokens, "
            f"{count(e.layout.blocks_per_request(length))} blocks",
            "  A pool for it: --kv-cache-memory-bytes, or name a MODEL to count its weights.",
        ]
    offload = e.engine.settings.kv_offload_gib
    if offload:
        more = int(offload * GIB) // (e.layout.bytes_per_block * e.engine.ranks)
        blocks.append(f"  offload    {offload:g} GiB of CPU memory hold {count(more)} more blocks a GPU")
    if e.budget is not None and e.budget.graphs_outside_bytes:
        outside = e.budget.total_bytes - e.budget.budget_bytes
        if e.budget.graphs_outside_bytes > outside - GIB // 2:
            blocks.append(
                f"  Beware: graphs take about {gib(e.budget.graphs_outside_bytes)} GiB outside the budget, "
                f"which leaves {gib(outside)} for them."
            )
    return blocks


def _caveats(e: Estimate) -> list[str]:
    """What limits the verdict: a margin within the error, and max_num_seqs below what memory holds."""
    lines = []
    if e.budget is not None and 0 <= -e.verdict.short_by_bytes < e.budget.band_bytes:
        lines.append(
            f"  Close: {gib(-e.verdict.short_by_bytes)} GiB to spare, less than the "
            f"± {gib(e.budget.band_bytes)} of the pool."
        )
    if e.verdict.fits and e.max_concurrency > e.engine.max_num_seqs:
        lines.append(f"  max_num_seqs lets {count(e.engine.max_num_seqs)} requests run at once.")
    return lines


def assumed(e: Estimate, notes: Sequence[str], term: Terminal) -> list[str]:
    """What was assumed, wrapped and dim; nothing when nothing was."""
    engine = e.assumptions if e.verdict.fits is not None else ()  # the bare formula depends on none
    words = [render.escape(word) for word in (*notes, *engine)]
    if e.model.unverified:
        words.append(f"nobody could check: {', '.join(map(render.escape, e.model.unverified))}")
    if not words:
        return []
    return ["", render.dim(render.wrap("Assumed: " + "; ".join(words), term.width), term)]


def blocks_in_words(e: Estimate) -> str:
    """'13,559 blocks of 16 tokens, 2.50 MiB each'."""
    layout = e.layout
    if layout.block_size == 1:
        return f"{count(e.num_gpu_blocks)} tokens, {byte_size(layout.bytes_per_block)} each"
    return (
        f"{count(e.num_gpu_blocks)} blocks of {count(layout.block_size)} tokens, "
        f"{byte_size(layout.bytes_per_block)} each"
    )


def _budget_table(e: Estimate, term: Terminal) -> list[str]:
    b = e.budget
    assert b is not None
    marks = render.glyphs(term)
    pool = e.available_kv_bytes
    outside = b.total_bytes - b.budget_bytes
    rows = [
        (marks[0], "weights", b.weights.bytes, b.weights.why),
        (marks[1], "activation peak", b.activation.bytes, b.activation.why),
        (marks[1], "non-torch", b.non_torch.bytes, b.non_torch.why),
        (marks[1], "CUDA graphs", b.cuda_graphs.bytes, b.cuda_graphs.why),
        (marks[3], "KV pool", pool, blocks_in_words(e)),
        (
            marks[4],
            "outside budget",
            outside,
            _outside_why(e),
        ),
    ]
    sizes = [size for _, _, size, _ in rows]
    shown, total = _parts(e)
    shares = percents(sizes)
    body = [[g, part, s, p, why] for (g, part, _, why), s, p in zip(rows, shown, shares, strict=True)]
    read = "total_bytes" not in e.gpu.unverified
    body.append(["", "total", total, "100", "as the driver reports it" if read else "not a driver's reading"])
    columns = [
        Column("", "left"),
        Column("part", "left"),
        Column("GiB"),
        Column("%"),
        Column("why", "left", shrinks=True, min_width=20),
    ]
    bar = render.bar(
        [
            (0, b.weights.bytes),
            (1, b.engine_bytes),
            (3, max(0, pool)),
            (4, outside),
        ],
        term,
    )
    return [f"  {bar}", render.table(columns, body, term)]


def _parts(e: Estimate) -> tuple[list[str], str]:
    """(weights, activation, non-torch, graphs, KV pool, outside; their total) in GiB, as shown."""
    b = e.budget
    assert b is not None
    own = [b.weights.bytes, b.activation.bytes, b.non_torch.bytes, b.cuda_graphs.bytes]
    return gib_parts([*own, e.available_kv_bytes, b.total_bytes - b.budget_bytes], b.total_bytes)


def _outside_why(e: Estimate) -> str:
    fraction = e.engine.gpu_memory_utilization
    if e.engine.settings.engine == "tensorrt-llm":
        return f"1 - {e.engine.facts.fraction_name} {fraction:g}"
    return f"1 - {e.engine.facts.fraction_name} {fraction:.{2 if round(fraction, 2) == fraction else 3}f}"


def _budget_bar(e: Estimate, term: Terminal) -> list[str]:
    b = e.budget
    assert b is not None
    marks = render.glyphs(term)
    outside = b.total_bytes - b.budget_bytes
    pool = e.available_kv_bytes
    parts = [b.weights.bytes, b.engine_bytes, pool, outside]
    shown, _ = gib_parts(parts, b.total_bytes)
    bar = render.bar(list(zip((0, 1, 3, 4), (max(0, p) for p in parts), strict=True)), term)
    names = ("weights", "engine", "KV pool", "outside")
    legend = "   ".join(
        f"{marks[g]} {name} {size}" for g, name, size in zip((0, 1, 3, 4), names, shown, strict=True)
    )
    return [f"  {bar}", f"  {legend}   GiB"]


def _uniform(e: Estimate) -> list[str]:
    layout = e.layout
    dtype = SHORT_DTYPES.get(e.engine.kv_cache_dtype, e.engine.kv_cache_dtype)
    lines = [f"  per token  {byte_size(layout.bytes_per_token)} per GPU ({dtype}); no fixed cost per request"]
    if e.verdict.fits is not None:
        pool = f"  pool       {count(e.kv_cache_tokens)} tokens"
        if e.budget is not None:
            pool += f"; {_parts(e)[0][-2]} ± {gib(e.budget.band_bytes)} GiB expected"
        lines.append(pool)
    return lines + _workload_lines(e)


def _workload_lines(e: Estimate) -> list[str]:
    w = e.workload
    if w is None:
        return []
    if w.requests == 1:
        return [f"  workload   {fixed(w.concurrency)} requests of {count(w.mean_tokens)} tokens at once"]
    lines = [
        f"  trace mix  mean {count(w.mean_tokens)} tokens; {count(w.low)} to {count(w.high)} requests "
        "at once (p5, p95)"
    ]
    if w.too_long:
        lines.append(f"             {count(w.too_long)} requests are longer than max_model_len: refused")
    return lines


def _hybrid(e: Estimate, term: Terminal) -> list[str]:
    """Slope and fixed cost of the exact state beside what the engine holds and asks for."""
    layout, length = e.layout, e.engine.max_model_len
    slope = layout.bytes_per_token
    growing = slope * length // max(1, layout.context_shards)
    stages = [
        ("held (exact state)", layout.exact_bytes(length)),
        ("vLLM holds in decode", layout.held_blocks(length) * layout.bytes_per_block),
        ("vLLM asks for at admission", layout.needed_bytes(length)),
    ]
    rows = [
        [
            name,
            byte_size(slope),
            _mib(max(0, size - growing)),
            gib(size),
            fixed(e.available_kv_bytes / size if size else None) if e.verdict.fits is not None else "-",
        ]
        for name, size in stages
    ]
    columns = [
        Column(f"one request at {count(length)}", "left"),
        Column("slope/token"),
        Column("fixed"),
        Column("GiB"),
        Column("in the pool"),
    ]
    blocks = [render.table(columns, rows, term)]
    blocks += _workload_lines(e)
    blocks += ["", *_why_asked(e)]
    if e.verdict.fits is not None:
        blocks += _levers(e, term)
        if layout.derived_tokens:
            blocks.append(
                f"vLLM will print {count(e.kv_cache_tokens)} tokens: {fixed(e.max_concurrency)} x "
                f"{count(length)}, not a size of the pool."
            )
        if e.budget is not None:
            blocks.append(
                f"Expected: a KV pool of {gib(e.available_kv_bytes)} ± {gib(e.budget.band_bytes)} GiB."
            )
    return blocks


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"


def _why_asked(e: Estimate) -> list[str]:
    layout, engine, length = e.layout, e.engine, e.engine.max_model_len
    exact = max(1, layout.exact_bytes(length))
    ratio = layout.needed_bytes(length) / exact
    lines = [f"Why vLLM asks for {ratio:.1f} times what is held" if ratio >= 1.05 else "How vLLM lays it out"]
    widest = max(group.layers for group in layout.groups)
    padding = f" ({layout.padding_layers} padding)" if layout.padding_layers else ""
    pool = f"a pool of {count(e.num_gpu_blocks)} blocks" if e.num_gpu_blocks else "one pool of blocks"
    if len(layout.groups) > 1:
        lines.append(
            f"  {len(layout.groups)} groups of {widest} layers{padding} share {pool} of "
            f"{byte_size(layout.bytes_per_block)}."
        )
    windows = [g for g in layout.groups if g.kind in (LayerKind.SLIDING, LayerKind.CHUNKED)]
    if windows:
        g = windows[0]
        span = g.window - 1 if g.kind is LayerKind.SLIDING else g.window
        batches = layout.in_flight_tokens // engine.max_num_batched_tokens
        in_flight = f"{batches} x " if batches > 1 else ""
        asked = g.admitted_blocks(length, layout.in_flight_tokens)
        what = "window" if g.kind is LayerKind.SLIDING else "chunk"
        who = f"The {what} group" if len(windows) == 1 else f"Each of {len(windows)} {what} groups"
        lines.append(
            f"  {who} asks for {count(span)} + {in_flight}"
            f"{count(engine.max_num_batched_tokens)} in-flight tokens:"
        )
        lines.append(f"  {count(asked)} blocks, where {count(g.held_blocks(length))} are held afterwards.")
    states = [g for g in layout.groups if g.kind is LayerKind.STATE]
    if states:
        uses = ["one runs"]
        if engine.enable_prefix_caching:
            uses.append("one is kept for prefix caching")
        drafts = engine.settings.num_speculative_tokens
        if drafts:
            uses.append(f"{drafts} for drafted tokens")
        who = "The state group" if len(states) == 1 else f"Each of {len(states)} state groups"
        lines.append(
            f"  {who} takes {states[0].state_blocks} blocks of {count(layout.block_size)} tokens a request:"
        )
        lines.append(f"  {', '.join(uses)}.")
    return lines


def _levers(e: Estimate, term: Terminal) -> list[str]:
    """Engine flags that raise the concurrency of a hybrid, tried one by one."""
    settings = e.engine.settings
    tries: list[tuple[str, EngineSettings]] = []
    if any(g.kind in (LayerKind.SLIDING, LayerKind.CHUNKED) for g in e.layout.groups):
        if e.engine.max_num_batched_tokens > 2048:
            less = replace(settings, max_num_batched_tokens=2048)
            tries.append(("--max-num-batched-tokens 2048", less))
        if e.engine.async_scheduling:
            tries.append(("--no-async-scheduling", replace(settings, async_scheduling=False)))
    if any(g.kind is LayerKind.STATE for g in e.layout.groups) and e.engine.enable_prefix_caching:
        off = replace(settings, enable_prefix_caching=False)
        tries.append(("--no-enable-prefix-caching", off))
    rows = []
    for flag, changed in tries:
        try:
            after = estimate(e.model, e.gpu, changed)
        except InputError:  # the engine refuses the combination: no lever
            continue
        if after.max_concurrency > 1.01 * e.max_concurrency:
            rows.append([flag, f"{fixed(e.max_concurrency)} -> {fixed(after.max_concurrency)}"])
    if not rows:
        return []
    heads = [Column("Change", "left"), Column(f"requests at {count(e.engine.max_model_len)}", "left")]
    table = render.table(heads, rows, term)
    return ["", table.replace("  Change", "Change  ", 1)]
