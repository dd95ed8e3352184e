"""How vLLM lays a model's KV cache out in blocks: groups of layers that share one pool of equal blocks.

A block of the pool serves one group at a time, and each group of a request has its own block table, so a
request needs the sum over groups. Rules: SCHEDULER_RULES 8, KV_SIZING_RULES 2 to 7; all bytes are of one
rank. The layout is equal to the engine's own on every record of ../shared/oracle/kv_cache_configs.jsonl.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

from kvplan.errors import InputError
from kvplan.memory.formula import blocks_for
from kvplan.memory.layer_bytes import bytes_per_element, state_bytes, token_bytes
from kvplan.spec.catalogue import find_model
from kvplan.spec.engine import Resolved
from kvplan.spec.model import Layer, LayerKind, ModelSpec
from kvplan.spec.weights import pipeline_layers

STATE_ALIGNMENT = 16  # tokens; attention blocks of state hybrids are multiples of it


@dataclass(frozen=True)
class LayerPage:
    """What one layer keeps in one block: layers with equal pages can share a group."""

    kind: LayerKind
    block_size: int  # tokens
    page_bytes: int
    window: int = 0


@dataclass(frozen=True)
class KVGroup:
    """Layers that share a block table. ``state_blocks`` is what a request takes in a STATE group."""

    kind: LayerKind
    layers: int
    block_size: int
    page_bytes: int  # of one layer; of the widest where they differ
    window: int = 0
    state_blocks: int = 0

    def admitted_blocks(self, n_tokens: int, in_flight_tokens: int) -> int:
        """Blocks asked for at admission of a request that grows to ``n_tokens`` (KV_SIZING_RULES 5, 7)."""
        match self.kind:
            case LayerKind.STATE:
                return self.state_blocks
            case LayerKind.SLIDING:
                inside = min(self.window - 1 + in_flight_tokens, n_tokens)
                return blocks_for(inside, self.block_size) + 1
            case LayerKind.CHUNKED:
                return blocks_for(min(self.window + in_flight_tokens, n_tokens), self.block_size)
        return blocks_for(n_tokens, self.block_size)

    def held_blocks(self, n_tokens: int) -> int:
        """Blocks held while decoding at length ``n_tokens``: a window group has freed the older ones."""
        if self.kind is LayerKind.SLIDING:
            return min(
                blocks_for(n_tokens, self.block_size), blocks_for(self.window - 1, self.block_size) + 1
            )
        if self.kind is LayerKind.CHUNKED:
            return blocks_for(min(self.window, n_tokens), self.block_size)
        return self.admitted_blocks(n_tokens, 0)


@dataclass(frozen=True)
class ExactState:
    """What a request itself keeps on one rank: no block rounding, no padding, nothing in flight."""

    bytes_per_token: int  # of layers that keep every token
    state_bytes: int  # of linear-attention and Mamba layers
    windows: tuple[tuple[int, int], ...] = ()  # (window in tokens, bytes per token of its layers)

    @property
    def fixed_bytes(self) -> int:
        """Bytes whatever the length: states, and windows when full."""
        return self.state_bytes + sum(window * size for window, size in self.windows)

    def bytes_at(self, n_tokens: int) -> int:
        """Bytes of a request of ``n_tokens``."""
        inside = sum(min(window, n_tokens) * size for window, size in self.windows)
        return n_tokens * self.bytes_per_token + self.state_bytes + inside


@dataclass(frozen=True)
class KVLayout:
    """The groups of a model and the size of their common block, stage by stage of the pipeline."""

    groups: tuple[KVGroup, ...]
    stage_block_bytes: tuple[int, ...]  # bytes of one block on a rank of each pipeline stage
    block_size: int  # of the attention groups, as the engine logs it
    in_flight_tokens: int
    max_model_len: int
    context_shards: int  # decode context parallel: ranks that hold a request's tokens between them
    derived_tokens: bool  # the token line is concurrency x max_model_len (from 0.21)
    null_block_counts: bool  # the start-up check leaves one block aside
    startup_block_bytes: int  # what the check charges for a block: of all stages before 0.17
    stage_states: tuple[ExactState, ...]
    deciding_stage: int  # the stage that all figures of one rank are about
    padding_layers: int
    assumptions: tuple[str, ...] = ()

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block on a rank of the stage that decides."""
        return self.stage_block_bytes[self.deciding_stage]

    @property
    def bytes_per_token(self) -> int:
        """Slope: what each further token of a request adds for good on that rank."""
        return self.stage_states[self.deciding_stage].bytes_per_token

    @property
    def fixed_bytes_per_request(self) -> int:
        """What a request keeps whatever its length: windows when full, and states."""
        return self.stage_states[self.deciding_stage].fixed_bytes

    @property
    def is_uniform(self) -> bool:
        """One group that grows with every token: bytes per token say everything."""
        return len(self.groups) == 1 and self.groups[0].kind in (LayerKind.FULL, LayerKind.MLA)

    def blocks_per_request(self, n_tokens: int) -> int:
        """Blocks the engine asks for when it admits a request that may grow to ``n_tokens``."""
        share = self._share(n_tokens)
        return sum(group.admitted_blocks(share, self.in_flight_tokens) for group in self.groups)

    def held_blocks(self, n_tokens: int) -> int:
        """Blocks of a request of ``n_tokens`` in decode."""
        share = self._share(n_tokens)
        return sum(group.held_blocks(share) for group in self.groups)

    def needed_bytes(self, n_tokens: int) -> int:
        """Bytes that one admitted request of ``n_tokens`` needs on the rank that decides."""
        return self.blocks_per_request(n_tokens) * self.bytes_per_block

    def exact_bytes(self, n_tokens: int) -> int:
        """Bytes of the state itself: no block rounding, windows cut exactly, nothing in flight."""
        return self.stage_states[self.deciding_stage].bytes_at(self._share(n_tokens))

    def num_blocks(self, available_bytes: int | Sequence[int]) -> int:
        """Blocks of the pool, null block included: the smallest over stages (0 for a negative pool)."""
        per_stage = (
            [available_bytes] * len(self.stage_block_bytes)
            if isinstance(available_bytes, int)
            else list(available_bytes)
        )
        return max(
            0, min(have // block for have, block in zip(per_stage, self.stage_block_bytes, strict=True))
        )

    def max_concurrency(self, num_blocks: int, n_tokens: int | None = None) -> float:
        """Requests of ``n_tokens`` (max_model_len by default) that the pool admits at once."""
        return num_blocks / self.blocks_per_request(n_tokens or self.max_model_len)

    def cache_tokens(self, num_blocks: int) -> int:
        """The engine's line "GPU KV cache size", for the whole TP group (KV_SIZING_RULES 5 and 6)."""
        if self.derived_tokens:
            return int(self.max_concurrency(num_blocks) * self.max_model_len)
        smallest = min(group.block_size for group in self.groups)
        return num_blocks // len(self.groups) * smallest * self.context_shards

    def startup_bytes(self, n_tokens: int) -> int:
        """What the start-up check wants the pool to hold: one request of ``n_tokens`` and the null block."""
        blocks = self.blocks_per_request(n_tokens) + self.null_block_counts
        return blocks * self.startup_block_bytes

    def longest_request(self, available_bytes: int, limit: int | None = None) -> int:
        """The longest request the start-up check would accept in ``available_bytes``; 0 when none."""
        blocks = max(0, available_bytes) // self.startup_block_bytes - self.null_block_counts
        low, high = 0, limit or self.max_model_len
        while low < high:  # blocks_per_request never falls as a request grows
            middle = (low + high + 1) // 2
            if self.blocks_per_request(middle) <= blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def _share(self, n_tokens: int) -> int:
        return blocks_for(n_tokens, self.context_shards)


def kv_layout(model: ModelSpec, engine: Resolved) -> KVLayout:
    """Lay ``model``'s KV cache out as the engine would.

    Raises `InputError` for a layer whose kind has no rule here; nothing falls back to full attention.
    """
    said: list[str] = []
    pages = [_layer_page(layer, engine, said) for layer in _layers_with_kv(model, engine, said)]
    if all(page is None for page in pages):
        raise InputError(f"{model.name} keeps no KV cache: no layer of it has attention or state.")
    if engine.settings.engine != "vllm":
        _refuse_hybrid(model, engine, pages)
    pages = _manager_off(pages, engine)
    state_blocks = _state_blocks(engine)
    pages = _raise_block_size(pages, engine, said)
    pages = _unify_pages(pages, engine)
    members = _group_layers(pages)
    stages = [
        (stage.start, stage.stop)
        for stage in pipeline_layers(model.num_layers, engine.settings.pipeline_parallel_size)
    ]
    stages[-1] = (stages[-1][0], len(pages))  # layers that draft tokens sit on the last stage
    groups = []
    for indices in members:
        first = _page(pages, indices[0])
        widest = max(_page(pages, i).page_bytes for i in indices)
        is_state = first.kind is LayerKind.STATE
        # With prefix caching off a state is never kept at a block boundary: one block spans any length.
        block = engine.max_model_len if is_state and not engine.enable_prefix_caching else first.block_size
        groups.append(
            KVGroup(
                first.kind,
                max(sum(low <= i < high for i in indices) for low, high in stages),
                block,
                widest,
                first.window,
                state_blocks if is_state else 0,
            )
        )
    stage_block_bytes = tuple(
        max(sum(_page(pages, i).page_bytes for i in indices if low <= i < high) for indices in members)
        for low, high in stages
    )
    if min(stage_block_bytes) < 1:
        raise InputError(
            f"-pp {len(stages)} leaves a stage of {model.name} without any KV layer; use fewer stages."
        )
    layers = _layers_with_kv(model, engine, [])
    attention = [group.block_size for group in groups if group.kind is not LayerKind.STATE]
    largest = max(len(indices) for indices in members)
    return KVLayout(
        groups=tuple(groups),
        stage_block_bytes=stage_block_bytes,
        block_size=lcm(*attention) if attention else groups[0].block_size,
        in_flight_tokens=engine.max_in_flight_tokens,
        max_model_len=engine.max_model_len,
        context_shards=engine.settings.decode_context_parallel_size,
        derived_tokens=engine.settings.engine == "vllm" and engine.version >= (0, 21),
        null_block_counts=engine.settings.engine == "vllm" and engine.version >= (0, 26),
        startup_block_bytes=(sum if engine.version < (0, 17) else max)(stage_block_bytes),
        stage_states=tuple(_exact_state(layers[low:high], engine) for low, high in stages),
        deciding_stage=stage_block_bytes.index(max(stage_block_bytes)),
        padding_layers=largest * len(members) - sum(len(indices) for indices in members),
        assumptions=tuple(dict.fromkeys(said)),
    )


def _layers_with_kv(model: ModelSpec, engine: Resolved, said: list[str]) -> list[Layer]:
    """The decoder's layers, then those that draft tokens: a draft model's, or the model's own MTP layer."""
    s = engine.settings
    layers = list(model.layers)
    if s.num_speculative_tokens and s.speculative_model is not None:
        draft = find_model(s.speculative_model).spec
        said.append(f"the draft model {draft.name} shares the pool: not checked against a log")
        layers += draft.layers
    elif s.num_speculative_tokens:
        if not model.mtp_layers:
            raise InputError(
                f"--num-speculative-tokens {s.num_speculative_tokens} needs --speculative-model M.\n"
                f"  {model.name} has no multi-token-prediction layers."
            )
        layers.append(next(layer for layer in layers if layer.kind in (LayerKind.FULL, LayerKind.MLA)))
        said.append("one multi-token-prediction layer with full attention holds KV too")
    return layers


def _layer_page(layer: Layer, engine: Resolved, said: list[str]) -> LayerPage | None:
    if layer.kind in (LayerKind.NONE, LayerKind.SHARED):
        return None
    if layer.kind is LayerKind.STATE:
        return LayerPage(LayerKind.STATE, engine.block_size, state_bytes(layer, engine))
    if layer.index_dim and layer.kind is not LayerKind.MLA:
        said.append("index keys of sparse layers counted at 8 bit + one scale: not checked against a log")
    if layer.kind is LayerKind.MLA and layer.index_dim and bytes_per_element(engine.kv_cache_dtype) == 1:
        said.append("sparse MLA keeps fp8 latents as fp8_ds_mla (scales and a 16-bit rope part)")
    return LayerPage(
        layer.kind, engine.block_size, engine.block_size * token_bytes(layer, engine), layer.window
    )


def _page(pages: Sequence[LayerPage | None], i: int) -> LayerPage:
    page = pages[i]
    assert page is not None
    return page


def _refuse_hybrid(model: ModelSpec, engine: Resolved, pages: Sequence[LayerPage | None]) -> None:
    """SGLang and TensorRT-LLM keep windows and states in pools of their own; their split is not known."""
    others = {p.kind.value for p in pages if p and p.kind not in (LayerKind.FULL, LayerKind.MLA)}
    if others:
        raise InputError(
            f"--engine {engine.settings.engine}: {model.name} has {' and '.join(sorted(others))} layers, "
            f"which {engine.facts.label} keeps in a pool of their own; its size is not modelled."
        )


def _manager_off(pages: list[LayerPage | None], engine: Resolved) -> list[LayerPage | None]:
    """Without the hybrid manager a window layer beside full ones is allocated as full attention."""
    kinds = {page.kind for page in pages if page}
    if engine.hybrid_kv_cache_manager or len(kinds) == 1:
        return pages
    windows = (LayerKind.SLIDING, LayerKind.CHUNKED)
    return [
        replace(page, kind=LayerKind.FULL, window=0) if page and page.kind in windows else page
        for page in pages
    ]


def _state_blocks(engine: Resolved) -> int:
    """Blocks a request takes in each state group: 1, or 2 with states cached at block boundaries."""
    return (2 if engine.enable_prefix_caching else 1) + engine.settings.num_speculative_tokens


def _raise_block_size(
    pages: list[LayerPage | None], engine: Resolved, said: list[str]
) -> list[LayerPage | None]:
    """Raise attention blocks until one holds a state, then pad the states to it (KV_SIZING_RULES 7)."""
    states = [page for page in pages if page and page.kind is LayerKind.STATE]
    attention = [page for page in pages if page and page.kind is not LayerKind.STATE]
    if not states or not attention:
        return pages
    largest = max(page.page_bytes for page in states)
    align = max(STATE_ALIGNMENT, engine.block_size)
    per_token = max(page.page_bytes // page.block_size for page in attention)
    block = align * -(-largest // (align * per_token))
    if block != engine.block_size:
        said.append(f"block size raised to {block:,} so that a block holds a layer's state")
    return [
        None
        if page is None
        else replace(page, block_size=block, page_bytes=block * per_token)
        if page.kind is LayerKind.STATE
        else replace(page, block_size=block, page_bytes=block * (page.page_bytes // page.block_size))
        for page in pages
    ]


def _unify_pages(pages: list[LayerPage | None], engine: Resolved) -> list[LayerPage | None]:
    """Give layers of different kinds one page size: smaller pages take more tokens, or are padded."""
    real = [page for page in pages if page]
    if len({(page.kind, page.window) for page in real}) == 1:
        return pages  # one kind: one group, whose block is the sum of its layers' pages
    largest = max(page.page_bytes for page in real)
    if all(page.page_bytes == largest for page in real):
        return pages
    if engine.settings.kv_cache_layout == "BLNHC":
        raise InputError(
            "--kv-cache-layout BLNHC with layers of different page sizes is not modelled; use LBNHC."
        )
    return [
        page
        if page is None or page.page_bytes == largest
        else replace(page, block_size=page.block_size * (largest // page.page_bytes), page_bytes=largest)
        if largest % page.page_bytes == 0
        else replace(page, page_bytes=largest)
        for page in pages
    ]


def _group_layers(pages: Sequence[LayerPage | None]) -> list[list[int]]:
    """Layer indices of each group: buckets of equal pages, cut to the size of the rarest (KV_SIZING 5)."""
    real = [(i, page) for i, page in enumerate(pages) if page]
    if len({(page.kind, page.window) for _, page in real}) == 1:
        return [[i for i, _ in real]]
    buckets: dict[LayerPage, list[int]] = {}
    for i, page in real:
        buckets.setdefault(page, []).append(i)
    smallest, largest = min(map(len, buckets.values())), max(map(len, buckets.values()))
    size = largest if largest < 1.5 * smallest else smallest
    groups = []
    for indices in buckets.values():
        count = -(-len(indices) // size)
        groups += [indices[i::count] for i in range(count)]
    return groups


def _exact_state(layers: Sequence[Layer], engine: Resolved) -> ExactState:
    slope = states = 0
    windows: dict[int, int] = {}
    for layer in layers:
        match layer.kind:
            case LayerKind.FULL | LayerKind.MLA:
                slope += token_bytes(layer, engine)
            case LayerKind.SLIDING | LayerKind.CHUNKED:
                if engine.hybrid_kv_cache_manager:
                    windows[layer.window] = windows.get(layer.window, 0) + token_bytes(layer, engine)
                else:
                    slope += token_bytes(layer, engine)
            case LayerKind.STATE:
                states += state_bytes(layer, engine)
    return ExactState(slope, states, tuple(windows.items()))
