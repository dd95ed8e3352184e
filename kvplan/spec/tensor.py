"""One stored weight, as an engine fuses it: its shape, who gets how much of it, whether it is quantised."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Split(StrEnum):
    """How tensor parallelism cuts a tensor [out, in]."""

    NONE = "none"  # every rank has all of it
    OUT = "out"  # rows of the output: q/k/v, gate/up, biases of these
    IN = "in"  # columns of the input: o, down
    VOCAB = "vocab"  # embedding and head, padded to 64 a rank
    EXPERT_OUT = "expert out"  # w13 of the routed experts: by width, or by expert with expert parallelism
    EXPERT_IN = "expert in"  # w2


@dataclass(frozen=True)
class Tensor:
    """Weight [experts, out, in] that each of ``layers`` has once; no layers: outside of them.

    ``part`` is a field of `ParameterCount`. ``kv_out`` of the ``out`` rows belong to ``kv_heads`` KV heads,
    which are copied, not cut, when there are more ranks than heads. ``stage`` says which pipeline stage
    holds a tensor without layers. ``engine_only`` tensors are made at load and are no parameters.
    """

    part: str
    name: str  # as ignore lists of quantisation configs call the module
    out: int
    in_: int = 1
    split: Split = Split.NONE
    experts: int = 1
    stacked: int = 1  # matrices one above the other in `out` (gate and up), each padded by itself
    kv_heads: int = 0
    kv_out: int = 0
    quantised: bool = False  # a matrix that quantisation formats cover
    engine_only: bool = False
    bytes_per_element: int = 0  # 0 = the engine's compute type
    stage: str = "all"  # first, last, all; "mtp": only with speculation
    layers: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """Elements of one layer's copy."""
        return self.experts * self.out * self.in_

    @property
    def total(self) -> int:
        """Elements in the whole model."""
        return self.elements * (len(self.layers) or 1)
