"""The cells of a kernel sweep: what is varied, by preset or by flag, and which cells that makes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from kvplan.errors import InputError

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
DTYPE_NAMES = {
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
KV_DTYPE_NAMES = {
    **DTYPE_NAMES,
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
SHORT_NAMES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8 e5m2",
}
TABLES = ("random", "contiguous")
LOGNORMAL_SIGMA = 1.0  # of the logarithm: p90 is 3.6 times the median
LOGNORMAL_LONGEST = 4  # in units of the mean, so that one row cannot be the whole cell


@dataclass(frozen=True)
class Shape:
    """One set-up of a decode step. ``kv_dtype`` is the stored type, ``dtype`` the type of the queries."""

    batch_size: int
    context_len: int  # tokens of every row, or their mean where lengths are lognormal
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    table: str = "random"
    lengths: str = "equal"  # or "lognormal"
    seed: int = 0

    def seq_lens(self) -> list[int]:
        """Tokens of each row; drawn lengths depend on the seed alone and sum to about batch x context."""
        if self.lengths == "equal":
            return [self.context_len] * self.batch_size
        draw = random.Random(self.seed)
        mu = math.log(self.context_len) - LOGNORMAL_SIGMA**2 / 2
        longest = LOGNORMAL_LONGEST * self.context_len
        return [
            max(1, min(longest, round(draw.lognormvariate(mu, LOGNORMAL_SIGMA))))
            for _ in range(self.batch_size)
        ]

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that a step must read: 2 x tokens x KV heads x head dim x bytes a number."""
        return 2 * sum(self.seq_lens()) * self.kv_heads * self.head_dim * DTYPE_BYTES[self.kv_dtype]

    @property
    def text(self) -> str:
        """As the output shows it: '8 x 4,096 tokens, 32/8 heads x 128, fp32'."""
        tokens = f"{self.batch_size} x {self.context_len:,} tokens"
        if self.lengths != "equal":
            tokens += " (mean, lognormal)"
        stored = "" if self.kv_dtype == self.dtype else f", KV {SHORT_NAMES[self.kv_dtype]}"
        heads = f"{self.heads}/{self.kv_heads} heads x {self.head_dim}"
        return f"{tokens}, {heads}, {SHORT_NAMES[self.dtype]}{stored}"


@dataclass(frozen=True)
class Sweep:
    """Shapes, each measured at every block size."""

    shapes: tuple[Shape, ...]
    block_sizes: tuple[int, ...]


def _gpu_standard() -> tuple[Shape, ...]:
    """The grid that the targets are stated on, then one step aside along every other axis."""
    centre = Shape(32, 8192)
    aside = [
        replace(centre, lengths="lognormal"),
        replace(centre, table="contiguous"),
        replace(centre, heads=8),  # multi-head: a group of 1
        replace(centre, heads=128),  # a group of 16
        replace(centre, head_dim=64),
        replace(centre, kv_dtype="float8_e4m3fn"),
    ]
    # The centre and its neighbours first: what a time limit cuts off is the rim.
    grid = [
        Shape(batch, context)
        for batch, context in (
            *product((32, 128), (8192, 2048)),
            *product((8, 1), (32768, 8192, 2048)),
            *product((128, 32, 8, 1), (512,)),
        )
    ]
    return (*grid[:4], *aside, *grid[4:])


def _gpu_full() -> tuple[Shape, ...]:
    grid = product(
        (1, 8, 32, 128, 256),
        (512, 2048, 8192, 32768),
        (1, 4, 8, 16),
        (64, 128),
        ("bfloat16", "float8_e4m3fn"),
        TABLES,
        ("equal", "lognormal"),
    )
    return tuple(
        Shape(batch, context, 8 * group, 8, dim, kv_dtype=kv_dtype, table=table, lengths=lengths)
        for batch, context, group, dim, kv_dtype, table, lengths in grid
    )


def _cpu_standard() -> tuple[Shape, ...]:
    centre = Shape(8, 4096, dtype="float32", kv_dtype="float32")
    return (
        centre,
        replace(centre, batch_size=1),
        replace(centre, context_len=512),
        replace(centre, table="contiguous"),
        replace(centre, lengths="lognormal"),
        replace(centre, heads=8),
        replace(centre, head_dim=64),
        replace(centre, kv_dtype="bfloat16"),
    )


def _cpu_full() -> tuple[Shape, ...]:
    grid = product((1, 8, 32), (512, 2048, 8192), (1, 4, 8), (64, 128), ("float32", "bfloat16"), TABLES)
    return tuple(
        Shape(batch, context, 8 * group, 8, dim, "float32", kv_dtype, table)
        for batch, context, group, dim, kv_dtype, table in grid
    )


def preset(name: str, device_kind: str) -> Sweep:
    """The sweep of ``--preset quick|standard|full`` for a kind of device. Raises InputError otherwise."""
    gpu = device_kind == "cuda"
    if name == "quick":
        shape = Shape(64, 8192) if gpu else Shape(8, 4096, dtype="float32", kv_dtype="float32")
        return Sweep((shape,), (1, 16, 64, 256) if gpu else (1, 16, 256))
    if name == "standard":
        return Sweep(_gpu_standard() if gpu else _cpu_standard(), (1, 16, 64, 256) if gpu else (1, 16, 256))
    if name == "full":
        shapes = _gpu_full() if gpu else _cpu_full()
        return Sweep(shapes, (1, 8, 16, 32, 64, 128, 256) if gpu else (1, 16, 64, 256))
    raise InputError(f"--preset is {name!r}; must be one of quick, standard, full.")


def make_sweep(
    base: Sweep,
    *,
    block_sizes: Sequence[int] = (),
    batch_sizes: Sequence[int] = (),
    context_lens: Sequence[int] = (),
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    dtype: str | None = None,
    kv_cache_dtype: str | None = None,
    table: str | None = None,
    seed: int = 0,
) -> Sweep:
    """``base`` with every axis that a flag names replaced by the flag's values.

    Raises InputError, naming the flag, for a value out of range or heads that do not divide.
    """
    _in_range("--block-size", block_sizes, 1, 65_536)
    _in_range("--batch-size", batch_sizes, 1, 65_536)
    _in_range("--context-len", context_lens, 1, 16_777_216)
    _in_range("--heads", () if heads is None else (heads,), 1, 1024)
    _in_range("--kv-heads", () if kv_heads is None else (kv_heads,), 1, 1024)
    _in_range("--head-dim", () if head_dim is None else (head_dim,), 8, 1024)
    if table is not None and table not in TABLES:
        raise InputError(f"--table is {table!r}; must be one of {', '.join(TABLES)}.")
    compute = _dtype("--dtype", dtype, DTYPE_NAMES)
    stored = _dtype("--kv-cache-dtype", None if kv_cache_dtype == "auto" else kv_cache_dtype, KV_DTYPE_NAMES)
    shapes: dict[Shape, None] = {}
    for shape in base.shapes:
        for batch, context in product(
            batch_sizes or (shape.batch_size,), context_lens or (shape.context_len,)
        ):
            new = replace(
                shape,
                batch_size=batch,
                context_len=context,
                heads=heads or shape.heads,
                kv_heads=kv_heads or shape.kv_heads,
                head_dim=head_dim or shape.head_dim,
                dtype=compute or shape.dtype,
                table=table or shape.table,
                seed=seed,
            )
            # A type of its own was not asked for: what is stored follows the type of the queries.
            follows = compute is not None and shape.kv_dtype == shape.dtype
            new = replace(new, kv_dtype=stored or (compute if compute and follows else shape.kv_dtype))
            if new.heads % new.kv_heads:
                raise InputError(
                    f"--heads {new.heads} is no multiple of --kv-heads {new.kv_heads}; "
                    f"each KV head serves a whole number of query heads."
                )
            shapes[new] = None
    return Sweep(tuple(shapes), tuple(dict.fromkeys(block_sizes)) or base.block_sizes)


def _in_range(flag: str, values: Sequence[int], low: int, high: int) -> None:
    for value in values:
        if not low <= value <= high:
            raise InputError(f"{flag} is {value}; must be a whole number from {low:,} to {high:,}.")


def _dtype(flag: str, text: str | None, names: dict[str, str]) -> str | None:
    if text is None:
        return None
    if text not in names:
        raise InputError(f"{flag} is {text!r}; must be one of {', '.join(names)}.")
    return names[text]
