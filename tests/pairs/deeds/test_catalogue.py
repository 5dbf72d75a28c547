"""What was done to an array is found by doing it: every deed of the catalogue, planted in random matrices."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.spatial

from tests.support.files import write
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.model.metrics.spectra import evenly_spread
from weightscope.pairs.deeds import catalogue
from weightscope.pairs.deeds.catalogue import find_deed
from weightscope.pairs.deeds.deed import Deed, Proof, What, sentence
from weightscope.pairs.deeds.orders import places_of
from weightscope.pairs.deeds.pair import Pair
from weightscope.pairs.deeds.thresholds import EXACT
from weightscope.pairs.deeds.views import SPREAD, Side, Sizes, View

RNG = np.random.default_rng(0)
W = (RNG.standard_normal((64, 64)) * np.exp(0.4 * RNG.standard_normal((64, 1)))).astype(np.float32)
SCALES = np.abs(W).max(axis=1, keepdims=True) / 127
BLOCKS = np.abs(W.reshape(4, 16, 4, 16)).max(axis=(1, 3)) / 448  # (4, 4)
BY_BLOCK = np.repeat(np.repeat(BLOCKS, 16, 0), 16, 1)
HALVES = np.arange(64).reshape(4, 2, 8).swapaxes(1, 2).reshape(-1)  # i and i + 8 of each head of 16 to neighbours


def deed_between(x: np.ndarray, y: np.ndarray, role: str, half: float = 0.0, **more: int) -> Deed | None:
    """The deed that makes y of x, stored with these half-steps or as float32."""
    sizes = Sizes(role, n_heads=4, n_kv_heads=4, head_dim=16, **more)
    before, after = (Side(each.reshape(len(each), -1).astype(np.float32)) for each in (x, y))
    if half:
        after = replace(after, half=np.full(after.values.shape, half, np.float32))
    views = [View(before, after)]
    if x.ndim > 1:
        views.append(View(before.turned, after.turned, columns=True))
    return find_deed(views, sizes)


def said(*case: Any, **more: int) -> str:
    """The deed in words; empty where none is known."""
    done = deed_between(*case, **more)
    return "" if done is None else sentence(done)


def zeros_from(place: int) -> np.ndarray:
    flat = W.reshape(-1).copy()
    flat[place:] = 0
    return flat.reshape(W.shape)


PLANTED: dict[str, tuple[str, Callable[[], np.ndarray]]] = {
    "rotary layout: halves to neighbours": ("q", lambda: W[HALVES]),
    "rotary layout: neighbours to halves": ("k", lambda: W[np.argsort(HALVES)]),
    "heads in another order": ("v", lambda: np.roll(W, 16, axis=0)),
    "heads in another order (columns)": ("o", lambda: np.roll(W, 16, axis=1)),
    "rows in another order": ("up", lambda: W[RNG.permutation(64)]),
    "experts in another order": ("router", lambda: W[RNG.permutation(64)]),
    "transposed": ("o", lambda: W.T.copy()),
    "negated": ("o", lambda: -W),
    "nibbles swapped: neighbours exchanged (columns)": ("down", lambda: W.reshape(-1, 2)[:, ::-1].reshape(W.shape)),
    "scaled by row: scales missing": ("up", lambda: W / SCALES),
    "scaled by row: scales inverted": ("up", lambda: W / SCALES**2),
    "scaled by row: scales applied twice": ("up", lambda: W * SCALES),
    "scaled by block: scales missing": ("up", lambda: W / BY_BLOCK),
    "scaled by block: scales inverted": ("up", lambda: W / BY_BLOCK**2),
    "scaled by row and by column: scales of the wrong axis or in another order": ("o", lambda: W / SCALES * SCALES.T),
    "dtype reinterpreted: F16 read as BF16": (
        "up", lambda: (W.astype(np.float16).view("<u2").astype("<u4") << 16).view("<f4")),
    "rows of the vocabulary shifted by 3": ("tokens", lambda: np.roll(W, 3, axis=0)),
    "zeros at the end: a truncated write": ("down", lambda: zeros_from(2000)),
    "zeroed": ("down", lambda: 0 * W),
    "gate and up exchanged": ("gate+up", lambda: np.roll(W, 32, axis=0)),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_deed_is_named(name: str) -> None:
    """T(A) = B for one T of the catalogue."""
    role, made = PLANTED[name]
    assert said(W, made().astype(np.float32), role) == name


# found by all values, or by the rows themselves
WHOLE = ("rows in another order", "experts in another order", "dtype reinterpreted: F16 read as BF16", "zeroed",
         "zeros at the end: a truncated write")  # fmt: skip


@pytest.mark.parametrize("name", [name for name in PLANTED if name not in WHOLE])
def test_deed_that_gives_all_but_a_row_is_named_so(name: str) -> None:
    """Which slip left the scales does not show."""
    role, made = PLANTED[name]
    y = made().astype(np.float32)
    y[5] += y.std() * RNG.standard_normal(64)
    words = f"{name.partition(': scales')[0]}, but for some values"
    assert said(W, y, role) == words
    where = "of the values" if "by column" in name else "in 1 of 64 rows"
    assert deed_between(W, y, role).detail.endswith(where)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.45])
def test_some_values_may_be_others_anywhere(share: float) -> None:
    others = RNG.random(W.shape) < share
    done = deed_between(W, np.where(others, RNG.standard_normal(W.shape), 2 * W), "up")
    assert (done.what, done.proof) == (What.ALL_BUT_SOME, Proof.MOST)
    assert f"others in {others.mean():.2g} of the values" in done.detail


@pytest.mark.parametrize("half", [0.0, 0.05])
def test_training_is_no_map_with_exceptions(half: float) -> None:
    """Most values changed for no reason that they share, in float32 and on a stored grid."""
    trained = W + 0.1 * RNG.standard_normal(W.shape)
    half_scaled = np.where(RNG.random(W.shape) < 0.6, trained, 1.5 * W)
    for y in (trained, half_scaled):
        y = np.rint(y / (2 * half)) * 2 * half if half else y
        assert "but for some values" not in said(W, y.astype(np.float32), "up", half)


def test_rotary_rows_turned_by_one_number_of_heads_and_back_by_another_are_named() -> None:
    """As a reader sees what a converter permuted by the wrong number of heads, and as one that undoes it wrongly."""
    by_1, by_2 = (np.arange(64).reshape(count, 2, -1).swapaxes(1, 2).reshape(-1) for count in (1, 2))
    by_2_and_back, back_by_1 = by_2[np.argsort(HALVES)], HALVES[np.argsort(by_1)]
    assert said(W, W[by_2_and_back], "k") == "rotary layout: to neighbours, by 2 heads instead of 4, and back"
    assert said(W, W[back_by_1], "k") == "rotary layout: back from neighbours, by 1 head instead of 4"


@pytest.mark.parametrize("kind", ["scales missing", "scales inverted"])
def test_scales_of_eight_bits_are_told_apart(kind: str) -> None:
    """Codes have rounding of their own, and a block's scale is the largest of all its rows."""
    codes = np.clip(np.rint(W / BY_BLOCK / 3.5), -128, 127)  # a block's largest value is 128
    made = codes if kind == "scales missing" else codes / BY_BLOCK
    assert (
        said(
            W,
            made.astype(np.float32),
            "up",
            half=np.float64(0.5) if kind == "scales missing" else 0.5 * float(BY_BLOCK.max()) ** -1,
        )
        == f"scaled by block: {kind}"
    )


def test_values_that_are_not_finite_are_found() -> None:
    """NaN and infinity alike."""
    for value in (np.nan, np.inf):
        made = W.copy()
        made[3, 7] = value
        assert said(W, made, "up") == "NaN or infinity"


@pytest.mark.parametrize("number", [1, -1, 2])
def test_offset_of_a_norm_is_named(number: int) -> None:
    """1 added, subtracted, or added twice."""
    gain = 1 + 0.2 * RNG.standard_normal(64).astype(np.float32)
    name = {1: "norm: 1 added", -1: "norm: 1 subtracted", 2: "norm: 1 added twice"}[number]
    assert said(gain, gain + np.float32(number), "norm.before") == name


def test_stacked_experts_in_another_order_are_named() -> None:
    """One tensor holds all experts, each with a number of rows."""
    moved = W.reshape(4, 16, 64)[[2, 0, 3, 1]].reshape(64, 64)
    assert said(W, moved, "expert.up", stacked=4) == "experts in another order"


def test_noise_has_no_name() -> None:
    """What no transformation explains is left to the words of a comparison."""
    assert said(W, W + 0.1 * RNG.standard_normal(W.shape).astype(np.float32), "up") == ""


def test_equal_rows_are_given_to_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree of one point, many times, answers each query with all of them; and equal rows have no order."""
    held: list[int] = []
    tree = scipy.spatial.cKDTree
    monkeypatch.setattr(scipy.spatial, "cKDTree", lambda points: held.append(len(points)) or tree(points))
    x, y = (np.random.default_rng(i).standard_normal((2000, 6)).astype(np.float32) for i in (0, 1))
    x[100:] = x[0]
    assert places_of(x, y, 1, EXACT) is None and places_of(y, x, 1, EXACT) is None
    assert not held
    y = x[:100][::-1]
    assert places_of(x[:100], y, 1, EXACT) is not None and held == [100]


# Tensors that are seen in parts

LARGE = RNG.standard_normal((192, 192)).astype(np.float32)
OUTSIDE = next((i, i) for i in range(192) if i not in evenly_spread(192, SPREAD))  # of rows and columns tried first
MAPS: dict[str, tuple[str, Callable[[], np.ndarray]]] = {
    "transposed": ("o", lambda: LARGE.T.copy()),
    "negated": ("o", lambda: -LARGE),
    "heads in another order": ("v", lambda: np.roll(LARGE, 48, axis=0)),
    "heads in another order (columns)": ("o", lambda: np.roll(LARGE, 48, axis=1)),
    "rows in another order": ("up", lambda: LARGE[RNG.permutation(192)]),
    "scaled by one number": ("up", lambda: np.float32(1.3) * LARGE),
}


def said_in_parts(x: np.ndarray, y: np.ndarray, role: str, folder: Path) -> str:
    paths = [folder / f"{name}.safetensors" for name in "ab"]
    for path, values in zip(paths, (x, y), strict=True):
        write(path, {"w": np.ascontiguousarray(values)})
    pair = Pair(*(open_checkpoint(path)["w"] for path in paths))
    done, _ = catalogue.deed_of(pair, Sizes(role, n_heads=4, n_kv_heads=4, head_dim=48))
    return "" if done is None else sentence(done)


@pytest.mark.parametrize("name", MAPS)
def test_deed_of_a_large_tensor_gives_every_value(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One value that a first look at some rows and columns does not see."""
    monkeypatch.setattr(catalogue, "LARGEST_WHOLE", 1 << 13)
    role, made = MAPS[name]
    y = made().astype(np.float32)
    assert said_in_parts(LARGE, y, role, tmp_path) == name
    y[OUTSIDE] += 1
    said_of_it = said_in_parts(LARGE, y, role, tmp_path)
    assert said_of_it == ("" if name == "rows in another order" else f"{name}, but for some values")


def test_rows_that_sums_do_not_tell_apart_are_given_up_soon() -> None:
    """Their sketches are one point, and a tree of one point compares each with each."""
    rows = np.zeros((40_000, 4), np.float32)
    rows[:, 0], rows[:, 1] = 1e30, np.arange(len(rows))
    start = time.process_time()
    assert places_of(rows, rows[::-1].copy(), 1, 1e-6) is None
    assert time.process_time() - start < 5
