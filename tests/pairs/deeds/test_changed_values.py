"""A deed is named only if it gives every value that changed: some values are changed at random, and none may be."""

import json
from cProfile import Profile
from pathlib import Path
from pstats import Stats
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import weightscope as ws
from tests.support.plants.families import random_llama
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.pairs.deeds.catalogue import find_deed
from weightscope.pairs.deeds.deed import Deed, Proof, What, sentence
from weightscope.pairs.deeds.pair import Pair
from weightscope.pairs.deeds.rounding import CASTS
from weightscope.pairs.deeds.views import Side, Sizes, View
from weightscope.pairs.same.judge import Compared, judge

ROLES = ("q", "k", "v", "o", "q+k+v", "gate+up", "down", "tokens", "router", "positions", "expert.up", "q_b")
SHAPES = ((64, 64), (96, 32), (32, 96), (48, 16), (33, 20))
ERASED = {What.ZEROED, What.TRUNCATED, What.PRUNED}


def found(x: Side, y: Side, role: str) -> Deed | None:
    views = [View(x, y), View(x.turned, y.turned, columns=True)]
    return find_deed(views, Sizes(role, n_heads=4, n_kv_heads=2, head_dim=max(1, len(x.values) // 8), turned=4))


def touched(rng: np.random.Generator, shape: tuple[int, int], where: str, count: int) -> np.ndarray:
    """Some rows, columns, blocks of 4 x 8 or values of a matrix: (n, c) bool."""
    mask = np.zeros(shape, bool)
    if where == "rows":
        mask[rng.choice(shape[0], min(count, shape[0] - 1), replace=False)] = True
    elif where == "columns":
        mask[:, rng.choice(shape[1], min(count, shape[1] - 1), replace=False)] = True
    elif where == "blocks":
        for i, j in rng.integers(0, (shape[0] - 3, shape[1] - 7), (count, 2)):
            mask[i : i + 4, j : j + 8] = True
    else:
        mask.reshape(-1)[rng.choice(mask.size, count, replace=False)] = True
    return mask


def stored(values: np.ndarray, how: str) -> Side:
    """Values as a float, or on a grid of 16 levels for each 4 neighbours, stores them."""
    if how == "grid":
        blocks = values.reshape(len(values), -1, 4)
        step = np.maximum(np.abs(blocks).max(axis=-1, keepdims=True), 1e-9) / 7.5
        half = np.broadcast_to(step / 2, blocks.shape).reshape(values.shape).astype(np.float32)
        return Side((np.rint(blocks / step) * step).reshape(values.shape).astype(np.float32), half=half)
    return Side(values) if how == "F32" else Side(CASTS["BF16"](values), unit=2.0**-8)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.sampled_from(SHAPES), st.sampled_from(ROLES),
    st.sampled_from(["rows", "columns", "blocks", "values"]), st.integers(1, 12),
    st.sampled_from(["drawn", "shifted a little", "zero", "one value", "large"]),
    st.sampled_from(["F32", "BF16", "grid"]),
)  # fmt: skip
def test_values_changed_at_random_are_no_deed(
    seed: int, shape: tuple[int, int], role: str, where: str, count: int, how: str, kind: str
) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(shape) * np.exp(0.4 * rng.standard_normal((shape[0], 1)))).astype(np.float32)
    mask, drawn = touched(rng, shape, where, count), rng.standard_normal(shape)
    new = {"drawn": drawn, "shifted a little": x + 0.2 * drawn, "zero": 0 * drawn, "one value": 0 * drawn + drawn[0, 0],
           "large": 1e4 * drawn}[how]  # fmt: skip
    y = stored(np.where(mask, new, x).astype(np.float32), kind)
    deed = found(Side(x), y, role)
    are_zeros = not y.values[mask].any()
    assert deed is None or deed.what in {What.FEW_ROWS, *(ERASED if are_zeros else ())}, deed


@pytest.mark.parametrize("count", [1, 2, 12, 200])
@pytest.mark.parametrize("role", ["tokens", "q"])
def test_rows_that_changed_are_counted(count: int, role: str) -> None:
    """At any share."""
    rng = np.random.default_rng(count)
    x = rng.standard_normal((256, 32)).astype(np.float32)
    y = x.copy()
    y[5 : 5 + count] += 0.05 * rng.standard_normal((count, 32)).astype(np.float32)
    assert found(Side(x), Side(y), role) == Deed(What.FEW_ROWS, "rows", f"{count} of 256, from 5")


def test_a_deed_with_one_value_beside_it_is_named_with_it() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 64)).astype(np.float32)
    for what, y in {What.NEGATED: -x, What.SCALED: 3 * x, What.HEADS: np.roll(x, 8, axis=0)}.items():
        exact, shifted = y.copy(), y.copy()
        shifted[3, 5] += 0.01
        deeds = [found(Side(x), Side(each), "q") for each in (exact, shifted)]
        assert deeds[0] is not None and deeds[0].what is what
        assert deeds[1] is not None and (deeds[1].what, deeds[1].proof) == (What.ALL_BUT_SOME, Proof.MOST)
        assert deeds[1].detail.endswith("others in 1 of 64 rows")


@pytest.mark.parametrize("stored", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("shape", [(64, 64), (96, 32), (32, 96)])
@pytest.mark.parametrize("rank", [1, 8, 31])
def test_cut_to_a_lower_rank_is_named_either_way(rank: int, shape: tuple[int, int], stored: str) -> None:
    x = np.random.default_rng(rank).standard_normal(shape).astype(np.float32)
    u, s, vt = np.linalg.svd(x, full_matrices=False)  # float32, as writers compute it
    unit = {"F32": 2.0**-24, "BF16": 2.0**-8, "F16": 2.0**-11}[stored]
    cut = Side(CASTS[stored]((u[:, :rank] * s[:rank]) @ vt[:rank]), unit)
    for sides, made in (((Side(x), cut), "B"), ((cut, Side(x)), "A")):
        done = found(*sides, "down")
        assert done is not None and (done.what, done.made, done.proof) == (What.RANK_CUT, made, Proof.VALUES)
        assert done.detail == f"rank {rank} of {min(shape)}"


def test_no_cut_is_named_where_other_singular_values_went_or_values_moved() -> None:
    x = np.random.default_rng(0).standard_normal((64, 48)).astype(np.float32)
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    cut = (u[:, :30] * s[:30]) @ vt[:30]
    moved, scaled = cut.copy(), cut * 1.001
    moved[3, 5] += 0.01
    others = ((u[:, 10:] * s[10:]) @ vt[10:], moved, scaled, (u[:, :30] * s[:30] ** 1.01) @ vt[:30])
    for y in others:
        done = found(Side(x), Side(y), "down")
        assert done is None or done.what is not What.RANK_CUT


@pytest.mark.parametrize("angle", [0.6, 0.01])
@pytest.mark.parametrize("tail", [1.0, 9.0])
def test_a_projection_on_other_directions_is_no_cut(angle: float, tail: float) -> None:
    """Row vectors that are turned out of the space of the largest singular values."""
    rng = np.random.default_rng(1)
    u, v = (np.linalg.qr(rng.standard_normal((64, 64)))[0] for _ in range(2))
    x = (u * np.where(np.arange(64) < 8, 10.0, tail)) @ v.T
    turned = np.cos(angle) * v[:, :8] + np.sin(angle) * v[:, 8:16]
    y = (x @ turned @ turned.T).astype(np.float32)
    done = found(Side(x.astype(np.float32)), Side(y), "down")
    assert done is None or done.what is not What.RANK_CUT


@pytest.mark.parametrize("value", [1.0, 0.5, -2.0])
def test_zeros_are_no_bytes_in_another_order(value: float) -> None:
    x = np.full((16, 16), value, np.float32)
    done = found(Side(x), Side(np.zeros_like(x)), "down")
    assert done is not None and done.what is What.ZEROED
    more = found(Side(x), Side(x + np.eye(16, dtype=np.float32)), "down")
    assert more is None or more.what is not What.RANK_CUT


@pytest.mark.parametrize(("factor", "digits"), [(1.0001, "1.0001"), (0.9999, "0.9999"), (1.00003, "1.00003"),
                                                (1.25, "1.25")])  # fmt: skip
@pytest.mark.parametrize("axis", [0, 1])
def test_factor_of_a_row_is_told_from_one(factor: float, digits: str, axis: int) -> None:
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    y = x.copy()
    np.moveaxis(y, axis, 0)[3] *= np.float32(factor)
    done = found(Side(x), Side(y), "up")
    assert done is not None and done.detail.endswith(f"factor {digits}"), done


@pytest.mark.parametrize(("factor", "slip"), [(0.01, "applied twice"), (100.0, "missing")])
def test_the_direction_of_a_factor_tells_a_missing_scale_from_one_applied_twice(factor: float, slip: str) -> None:
    """Scales are below one, and rows of one size do not show which deed it was."""
    rng = np.random.default_rng(0)
    x = np.sign(rng.standard_normal((64, 64))).astype(np.float32)
    y = (x * factor * np.exp(0.1 * rng.standard_normal((64, 1)))).astype(np.float32)
    deed = found(Side(x), Side(y), "up")
    assert deed is not None and sentence(deed) == f"scaled by row: scales {slip}"


@pytest.mark.parametrize(("steps", "said"), [(-1, "one step of its grid, as of zero points one too high"),
                                             (2, "two steps of its grid, as of zero points two too low")])  # fmt: skip
def test_zero_points_that_are_off_by_whole_steps_are_named(steps: int, said: str) -> None:
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    y = stored(x, "grid")
    assert y.half is not None
    off = Side((y.values + 2 * steps * y.half).astype(np.float32), half=y.half)
    deeds = [found(*pair, "up") for pair in ((Side(x), off), (y, off), (off, Side(x)))]
    assert [each and sentence(each) for each in deeds] == [
        f"each value off by {said}{where}" for where in ("", "", " in A")
    ]


def test_two_neurons_negated_are_counted() -> None:
    x = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    y = x.copy()
    y[[3, 9]] *= -1
    deed = found(Side(x), Side(y), "up")
    assert deed is not None and sentence(deed) == "scaled in some rows" and deed.detail == "2 of 64, from 3, factor -1"


def test_a_tensor_that_nothing_explains_is_judged_in_few_steps(tmp_path: Path) -> None:
    """Counted in calls of functions, which no machine changes: a search without bounds took eight times as many."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((320, 320)).astype(np.float32)
    pairs = {"x": x, "y": x + 0.03 * rng.standard_normal(x.shape).astype(np.float32)}
    save_file(pairs, tmp_path / "model.safetensors")
    file = open_checkpoint(tmp_path / "model.safetensors")
    named: Any = SimpleNamespace(name="x", role="q", layer=0, expert=None, stack=None)
    parts = Compared("q", named, named, Pair(file["x"], file["y"]), Sizes("q", 5, 5, 64, 64))
    judge(parts)  # modules are imported
    profile = Profile()
    assert profile.runcall(judge, parts).deed == "other values"
    assert Stats(profile).total_calls < 40_000  # type: ignore[attr-defined]


Q, DOWN, TOKENS = (
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.embed_tokens.weight",
)
RNG = np.random.default_rng(0)


def some_rows(w: np.ndarray, count: int) -> None:
    w[5 : 5 + count] += 0.05 * RNG.standard_normal((count, w.shape[1]))


def zero_blocks(w: np.ndarray, count: int) -> None:
    for i in range(0, 8 * count, 8):
        w[i : i + 8, i : i + 8] = 0


def exchanged_blocks(w: np.ndarray, width: int) -> None:
    w[:width, : 2 * width] = np.roll(w[:width, : 2 * width], width, axis=1)


@pytest.mark.parametrize(("name", "change", "count", "deed", "detail"), [
    (TOKENS, some_rows, 1, "other values in some rows", "1 of 128, from 5"),
    (TOKENS, some_rows, 2, "other values in some rows", "2 of 128, from 5"),
    (Q, some_rows, 2, "other values in some rows", "2 of 64, from 5"),
    (DOWN, zero_blocks, 3, "some values zeroed", "192 of 6,144"),
    (DOWN, exchanged_blocks, 8, "other values in some rows", "8 of 64, from 0"),
])  # fmt: skip
def test_few_changed_values_are_neither_a_scale_nor_a_rotary_layout_nor_a_lora(
    name: str, change: Any, count: int, deed: str, detail: str, tmp_path: Path
) -> None:
    planted = random_llama()
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(planted.config))
        save_file(planted.tensors, tmp_path / folder / "model.safetensors", metadata={"format": "pt"})
        change(planted.tensors[name], count)
    (found,) = ws.same(tmp_path / "a", tmp_path / "b").differing
    assert (found.deed, found.detail) == (deed, detail)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38, -3e38, 1e-45])
@pytest.mark.parametrize("at", ["x", "y"])
def test_values_at_the_ends_of_float32_are_compared(value: float, at: str) -> None:
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    for places in ((slice(3, 5), slice(None)), (7, 9), (slice(None), slice(None))):
        sides = {"x": x.copy(), "y": x.copy()}
        sides[at][places] = value
        for role in ("q", "norm.before", "tokens"):
            assert found(Side(sides["x"]), Side(sides["y"]), role) != Deed("negated")


@pytest.mark.parametrize("kind", ["F32", "BF16"])
@pytest.mark.parametrize("is_zero", [False, True])
def test_a_row_and_a_column_are_not_a_lora(kind: str, is_zero: bool, tmp_path: Path) -> None:
    """They have rank two, whatever is in them."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((96, 80)).astype(np.float32)
    y = x.copy()
    y[:, 7] = 0 if is_zero else rng.standard_normal(96)
    y[3] += 0.1 * rng.standard_normal(80).astype(np.float32)
    stored_y = CASTS["BF16"](y) if kind == "BF16" else y
    files = []
    for name, values in (("x", x), ("y", stored_y)):
        save_file({name: np.ascontiguousarray(values)}, tmp_path / f"{name}.safetensors")
        files.append(open_checkpoint(tmp_path / f"{name}.safetensors")[name])
    named: Any = SimpleNamespace(name="x", role="up", layer=0, expert=None, stack=None)
    judged = judge(Compared("up", named, named, Pair(*files), Sizes("up")))
    assert judged.verdict == "different" and judged.deed.startswith("other values in some")
    if kind == "F32":
        assert (judged.done.way, judged.detail) == ("rows and columns", "1 of 96 rows and 1 of 80 columns")
