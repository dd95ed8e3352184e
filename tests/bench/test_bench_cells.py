"""Which cells a preset and flags make, and what a bad flag is told."""

from __future__ import annotations

from typing import Any

import pytest

from kvplan.bench.cells import Shape, Sweep, make_sweep, preset
from kvplan.errors import InputError

BASE = Sweep((Shape(8, 4096, dtype="float32", kv_dtype="float32"),), (1, 16))


def test_kv_bytes_of_the_cpu_cell_of_the_kernel_notes() -> None:
    """KERNELS.md section 5: batch 8, context 4096, 32/8 x 128: fp32 KV 268 MB, bf16 134 MB."""
    assert BASE.shapes[0].kv_bytes == 268_435_456
    assert Shape(8, 4096).kv_bytes == 134_217_728


@pytest.mark.parametrize("name", ["quick", "standard", "full"])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_presets_have_no_cell_twice_and_whole_groups(name: str, kind: str) -> None:
    sweep = preset(name, kind)
    assert len(set(sweep.shapes)) == len(sweep.shapes)
    assert all(shape.heads % shape.kv_heads == 0 for shape in sweep.shapes)
    assert 1 in sweep.block_sizes
    assert 16 in sweep.block_sizes


def test_presets_grow_and_standard_has_the_axes_of_the_kernel_notes() -> None:
    """KERNELS.md section 4: lengths, group, head dim, dtype and table order besides batch x context."""
    for kind in ("cpu", "cuda"):
        quick, standard, full = (preset(name, kind) for name in ("quick", "standard", "full"))
        assert len(quick.shapes) == 1 < len(standard.shapes) < len(full.shapes)
        for axis in ("lengths", "table", "head_dim", "kv_dtype", "heads", "batch_size", "context_len"):
            assert len({getattr(shape, axis) for shape in standard.shapes}) > 1, axis
    cells = len(preset("standard", "cuda").shapes) * len(preset("standard", "cuda").block_sizes)
    assert 50 <= cells <= 100  # "default preset ~60"


def test_a_flag_replaces_its_axis_and_cells_that_fall_together_are_one() -> None:
    sweep = make_sweep(
        preset("standard", "cpu"),
        block_sizes=[32, 32, 64],
        batch_sizes=[2],
        context_lens=[100, 200],
        table="random",
    )
    assert sweep.block_sizes == (32, 64)
    assert {shape.batch_size for shape in sweep.shapes} == {2}
    assert {shape.context_len for shape in sweep.shapes} == {100, 200}
    assert len(set(sweep.shapes)) == len(sweep.shapes)


@pytest.mark.parametrize(
    ("flags", "dtype", "kv_dtype"),
    [
        ({}, "float32", "float32"),
        ({"dtype": "bf16"}, "bfloat16", "bfloat16"),  # stored type follows
        ({"dtype": "half", "kv_cache_dtype": "auto"}, "float16", "float16"),
        ({"kv_cache_dtype": "fp8"}, "float32", "float8_e4m3fn"),
        ({"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2"}, "bfloat16", "float8_e5m2"),
    ],
)
def test_dtype_names_of_the_command_line(flags: dict[str, Any], dtype: str, kv_dtype: str) -> None:
    """CLI.md: KV dtype bf16 = bfloat16, fp16 = float16, fp8 = fp8_e4m3; half and float as in vLLM."""
    (shape,) = make_sweep(BASE, **flags).shapes
    assert (shape.dtype, shape.kv_dtype) == (dtype, kv_dtype)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"block_sizes": [0]}, "--block-size is 0; must be a whole number from 1 to 65,536."),
        ({"batch_sizes": [-1]}, "--batch-size is -1"),
        ({"context_lens": [0]}, "--context-len is 0"),
        ({"heads": 30}, "--heads 30 is no multiple of --kv-heads 8"),
        ({"kv_heads": 0}, "--kv-heads is 0"),
        ({"head_dim": 4}, "--head-dim is 4"),
        ({"dtype": "int4"}, "--dtype is 'int4'; must be one of float32, fp32"),
        ({"dtype": "fp8"}, "--dtype is 'fp8'"),
        ({"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype is 'nvfp4'"),
        ({"table": "sorted"}, "--table is 'sorted'; must be one of random, contiguous."),
    ],
)
def test_bad_flags_name_themselves_and_what_would_do(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        make_sweep(BASE, **flags)
    assert says in str(caught.value)


def test_unknown_preset() -> None:
    with pytest.raises(InputError, match="--preset is 'huge'; must be one of quick, standard, full"):
        preset("huge", "cpu")


def test_lognormal_lengths_keep_the_mean_and_repeat() -> None:
    """Mean of lognormal(mu, sigma) is exp(mu + sigma^2 / 2) = the context; the cut at 4 x takes about 5 %."""
    shape = Shape(4000, 1000, lengths="lognormal")
    lens = shape.seq_lens()
    assert lens == shape.seq_lens()
    assert 880 < sum(lens) / len(lens) < 1000
    assert max(lens) <= 4000
    assert sorted(lens)[len(lens) // 2] < 700  # skewed: the median is exp(-1/2) of the mean
