"""Grids of quantisation are seen in the values alone, with the error that they made; floats are no grid."""

from functools import partial

import numpy as np
import pytest

from tests.support.plants.derivations import ggml, groups_to_nearest, nf4, q4_k
from weightscope.pairs.deeds.rounding import CASTS, casts_between, grid_of, precision

ROUNDINGS = {
    "4 bits, symmetric": partial(groups_to_nearest, bits=4, group=32),
    "4 bits, minima": partial(groups_to_nearest, bits=4, group=64, symmetric=False),
    "3 bits, minima": partial(groups_to_nearest, bits=3, group=32, symmetric=False),
    "8 bits, rows": partial(groups_to_nearest, bits=8, group=0),
    "4 bits, rows": partial(groups_to_nearest, bits=4, group=0),
    "NF4": nf4,
    "Q4_K": q4_k,
    **{kind: partial(ggml, kind=kind) for kind in ("Q8_0", "Q4_0", "Q4_1", "Q5_0")},
}


@pytest.fixture(scope="module")
def values():
    rng = np.random.default_rng(0)
    return (rng.standard_normal((32, 512)) * rng.uniform(0.5, 2, (32, 1))).astype(np.float32)


@pytest.mark.parametrize("name", ROUNDINGS)
def test_grid_and_its_rounding_error_are_found(values, name):
    if "Q" in name and "K" not in name:
        pytest.importorskip("gguf")
    rounded = ROUNDINGS[name](values).astype(np.float32)
    grid = grid_of(rounded)
    assert grid is not None
    error = np.linalg.norm(rounded - values) / np.linalg.norm(values)
    assert 0.6 < grid[1] / error < 1.7


@pytest.mark.parametrize("cast", ["", "BF16", "F16"])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_plain_floats_lie_on_no_grid(values, cast, scale):
    x = scale * values
    assert grid_of(CASTS[cast](x) if cast else x) is None


def test_rows_with_one_large_value_lie_on_no_grid(values):
    spiked = 1e-3 * values
    spiked[:, 0] = 1.0
    assert grid_of(spiked) is None


def test_zeros_lie_on_no_grid():
    assert grid_of(np.zeros((4, 64), np.float32)) is None


@pytest.mark.parametrize("name", ["BF16", "F16", "F8_E4M3"])
def test_precision_is_the_coarsest_float_that_holds_the_values(values, name):
    assert precision(CASTS[name](values)) == name
    assert precision(values) == "F32"


def test_float64_is_rounded_as_pytorch_and_as_numpy_do(values):
    exact = values * (1 + 1e-9 * np.random.default_rng(1).standard_normal(values.shape))
    assert exact.dtype == np.float64 and precision(exact) == "F32" and precision(values.astype(np.float64)) == "F32"
    single = exact.astype(np.float32)
    for made, name in ((single, "F32"), (CASTS["F16"](single), "F16"), (exact.astype(np.float16), "F16"),
                       (CASTS["BF16"](single), "BF16")):  # fmt: skip
        assert name in casts_between(exact, made.astype(np.float64))
    moved = single.copy()
    moved[3, 5] += np.spacing(moved[3, 5])
    assert not casts_between(exact, moved.astype(np.float64))
    assert not casts_between(single, moved)


def test_pruned_or_copied_values_lie_on_no_grid():
    x = np.random.default_rng(2).standard_normal((16, 256)).astype(np.float32)
    assert grid_of(np.where(np.abs(x) < 1.7, 0, x)) is None  # pruned
    assert grid_of(np.tile(x[:, :16], 8)) is None


def test_float16_is_rounded_as_numpy_does():
    """Every bfloat16, the ties of small float16 numbers, and random floats; the sign of zero too."""
    every = (np.arange(1 << 16, dtype="<u4") << 16).view("<f4")
    steps = (np.arange(-4096, 4096) / 2 * 2.0**-24).astype(np.float32)
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, dtype=np.uint64).astype("<u4").view("<f4")
    for x in (every, every[np.abs(every) < 65504], steps, drawn, drawn[np.abs(drawn) < 65504], drawn[:0]):
        with np.errstate(all="ignore"):
            expected = x.astype(np.float16).astype(np.float32)
            np.testing.assert_array_equal(CASTS["F16"](x).view("<u4"), expected.view("<u4"))
