"""Whether one tensor is the other with less in it: rounded twice, or quantised."""

from typing import NamedTuple

import numpy as np

from weightscope.changes.pair import Pair
from weightscope.changes.recomputed import Cells, way_from
from weightscope.changes.rounding import CASTS
from weightscope.changes.tensor import Change
from weightscope.checkpoint import Tensor
from weightscope.checkpoint.blocks import Block
from weightscope.tensors.measure import BITS

SEARCHED = 2.0  # times the error of rounding to the nearest, at most, that a format makes which searches its codes
ROUNDED_BEFORE = {"F16": ("BF16",), "F8_E4M3": ("BF16", "F16"), "F8_E5M2": ("BF16", "F16")}


class Proof(NamedTuple):
    """What was done to a tensor, and what shows it."""

    deed: str
    detail: str = ""


def rounded_twice(pair: Pair) -> Proof | None:
    """Whether one is the other rounded to one float and then to the one that stores it: a copy of a copy."""
    for letter, older, newer in (("B", pair.a, pair.b), ("A", pair.b, pair.a)):
        for first in ROUNDED_BEFORE.get(newer.dtype, ()):
            then = CASTS[newer.dtype]
            with np.errstate(all="ignore"):
                blocks = (Pair(older, newer).read(start, stop) for _, start, stop in pair.blocks())
                if all(x.dtype == np.float32 and np.array_equal(then(CASTS[first](x)), y, True) for x, y in blocks):
                    return Proof(f"{letter} to {first}, then to {newer.dtype}", "each to nearest even")
    return None


def quantised(pair: Pair, change: Change) -> Proof | None:
    """Whether one is the other quantised: every value in its original's cell, or nearly where a format searches."""
    if len(pair.a.shape) < 2 or not np.isfinite(change.moved):
        return None
    for letter, older, newer in (("B", pair.a, pair.b), ("A", pair.b, pair.a)):
        with np.errstate(all="ignore"):
            way = way_from(older, newer, (), Cells())
        if way == "quantised":
            how = f"{letter} quantised" + (f" ({newer.dtype})" if newer.dtype not in BITS else "")
            return Proof(how, "every value in the cell of its original")
        if newer.ends() is not None:
            ratio = _searched(older, newer)
            if ratio <= SEARCHED:
                error = f"error {ratio:.2f} times that of rounding to the nearest in the worst row"
                return Proof(f"{letter} quantised by search ({newer.dtype})", f"{error}; not every value in its cell")
    return None


def _searched(older: Tensor, newer: Tensor) -> float:
    """The worst row's error over that of rounding each value to the nearest of its stored grid."""
    first, last, levels = newer.ends() or (newer, newer, 1)
    width, worst = newer.shape[-1], 0.0
    for _, start, stop in Pair(older, newer).blocks():
        x, y, low, high = (Block(each, start, stop).values().astype(np.float64) for each in (older, newer, first, last))
        if len(x) % width:
            return np.inf
        step = np.abs(high - low) / max(levels - 1, 1)
        apart = np.square(x - y).reshape(-1, width).sum(axis=1)
        usual = (np.square(step) / 12).reshape(-1, width).sum(axis=1)
        with np.errstate(all="ignore"):
            ratios = np.sqrt(np.where(apart > 0, apart / usual, 0.0))
        worst = max(worst, float(np.nan_to_num(ratios, nan=np.inf).max(initial=0.0)))
    return worst
