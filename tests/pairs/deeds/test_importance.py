"""Copies that a search with an importance matrix wrote are recomputed; a change within its bounds is not accepted."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support import ggml_search
from weightscope.checkpoint.checkpoint import Tensor
from weightscope.checkpoint.ggml_blocks import UNEVEN
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.model.rows.gguf import RestoredTensor, turned
from weightscope.pairs.deeds.deed import Proof, What
from weightscope.pairs.deeds.importance import BY_IMPORTANCE, WITH_IMPORTANCE
from weightscope.pairs.deeds.pair import Pair
from weightscope.pairs.deeds.quantised import _resembles_both_ways
from weightscope.pairs.deeds.views import Sizes
from weightscope.pairs.same import DIFFERENT, QUANTISED, UNDECIDED
from weightscope.pairs.same.judge import Compared, Judged, judge

gguf = pytest.importorskip("gguf")
GROUP = ggml_search.GROUP


def weights(rows: int = 96, width: int = 128, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (0.02 * rng.standard_normal((rows, width)) * np.exp(0.3 * rng.standard_normal((rows, 1)))).astype(np.float32)


def written(path: Path, w: np.ndarray, kind: str = "F32", importance: np.ndarray | None = None) -> Tensor:
    """A tensor of a GGUF file: plain, or searched with this importance; experts are stacked."""
    flat = w.reshape(-1, w.shape[-1])
    if importance is None:
        raw = gguf.quants.quantize(flat, gguf.GGMLQuantizationType[kind])
    else:
        pairs = zip(w.reshape(-1, *w.shape[-2:]), importance.reshape(-1, w.shape[-1]), strict=True)
        raw = np.concatenate([ggml_search.packed(*each, kind) for each in pairs])
    ggml_search.write(path, {"w.weight": (raw.reshape(*w.shape[:-1], -1), kind)})
    return open_checkpoint(path)["w.weight"]


def judged(a: Tensor, b: Tensor) -> Judged:
    named: Any = SimpleNamespace(name="w", role="up", layer=0, expert=None, stack=None)
    return judge(Compared("up", named, named, Pair(a, b), Sizes("up")))


def moved(w: np.ndarray, copy: Tensor, how: str, seed: int = 1) -> np.ndarray:
    """Weights that are no longer what the copy was made of."""
    rng, changed = np.random.default_rng(seed), w.astype(np.float64)
    ends = copy.ends()
    assert ends is not None
    first, last, levels = ends
    assert isinstance(levels, int)
    steps = (np.abs(last.read() - first.read()) / (levels - 1)).repeat(w.size // first.read().size).reshape(w.shape)
    if how == "noise":
        size = 0.005 if copy.dtype == "Q8_0" else 0.05
        changed += size * steps * rng.standard_normal(w.shape)
    if how == "value":  # from inside its cell out of it
        place = np.unravel_index(rng.integers(w.size), w.shape)
        off = (w - copy.read())[place]
        changed[place] += np.copysign(0.5, off) * steps[place]
    if how == "row":
        changed[..., 3, :] *= 1.1
    if how == "column":
        changed[..., 5] *= 1.1
    return changed.astype(np.float32)


@pytest.mark.parametrize("how", ["chosen", "one matters alone"])
@pytest.mark.parametrize("kind", WITH_IMPORTANCE)
def test_searched_copies_are_recomputed(kind: str, how: str, tmp_path: Path) -> None:
    w, importance = weights(256), ggml_search.importance_of(128)
    if how == "one matters alone":
        importance[7] *= 1e3
    a, b = written(tmp_path / "a.gguf", w), written(tmp_path / "b.gguf", w, kind, importance)
    for made, pair in (("B", (a, b)), ("A", (b, a))):
        each = judged(*pair)
        assert (each.verdict, each.deed, each.detail) == (
            QUANTISED,
            f"{made} quantised by search ({kind})",
            BY_IMPORTANCE,
        )
        assert each.done.proof is Proof.GRID


def test_each_expert_has_an_importance_of_its_own(tmp_path: Path) -> None:
    w = np.stack([weights(seed=seed) for seed in range(3)])
    importance = np.stack([ggml_search.importance_of(128, seed) for seed in range(3)])
    a, b = written(tmp_path / "a.gguf", w), written(tmp_path / "b.gguf", w, "Q4_0", importance)
    assert judged(a, b).what is What.SEARCHED


@pytest.mark.parametrize("how", ["noise", "value", "row", "column"])
@pytest.mark.parametrize("is_searched", [False, True], ids=["plain", "searched"])
@pytest.mark.parametrize("kind", [*WITH_IMPORTANCE, "Q8_0"])
def test_a_change_within_the_bounds_of_a_search_is_not_accepted(
    kind: str, is_searched: bool, how: str, tmp_path: Path
) -> None:
    if is_searched and kind == "Q8_0":
        return
    w = weights(256)
    b = written(tmp_path / "b.gguf", w, kind, ggml_search.importance_of(128) if is_searched else None)
    a = written(tmp_path / "a.gguf", moved(w, b, how))
    for pair in ((a, b), (b, a)):
        assert judged(*pair).verdict in (DIFFERENT, UNDECIDED)


def test_few_rows_leave_a_search_undecided(tmp_path: Path) -> None:
    """They give fewer equations than there are inputs whose importance is unknown."""
    w = weights(48)
    a = written(tmp_path / "a.gguf", w)
    b = written(tmp_path / "b.gguf", w, "Q4_0", ggml_search.importance_of(128))
    each = judged(a, b)
    assert (each.verdict, each.deed) == (UNDECIDED, "B perhaps quantised by search (Q4_0)")
    assert "of values in their cells" in each.detail


def uneven(w: np.ndarray, smaller: float) -> np.ndarray:
    """The bytes of an IQ4_NL copy, its codes the nearest on the stored grids; each third has a smaller scale."""
    x = w.reshape(len(w), -1, GROUP)
    largest = np.abs(x).max(axis=2)
    largest[:, ::3] *= smaller
    scale = (largest / max(UNEVEN)).astype(np.float16)
    levels = scale.astype(np.float32)[..., None, None] * np.float32(UNEVEN)
    codes = np.abs(x[..., None] - levels).argmin(axis=3).astype(np.uint8)
    packed = codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4
    return np.concatenate([scale[..., None].view(np.uint8), packed], axis=2).reshape(len(w), -1)


@pytest.mark.parametrize(("smaller", "deed"), [(1.0, "B quantised (IQ4_NL)"), (0.75, "B quantised by search (IQ4_NL)")])
def test_searched_scales_leave_values_in_their_cells_or_beyond_the_end(
    smaller: float, deed: str, tmp_path: Path
) -> None:
    w = weights(256, 192)
    ggml_search.write(tmp_path / "b.gguf", {"w.weight": (uneven(w, smaller), "IQ4_NL")})
    b = open_checkpoint(tmp_path / "b.gguf")["w.weight"]
    each = judged(written(tmp_path / "a.gguf", w), b)
    assert (each.verdict, each.deed) == (QUANTISED, deed)
    noise = 0.05 * 0.1 * np.abs(w).reshape(256, -1, GROUP).max(axis=2).repeat(GROUP, axis=1)
    changed = w + noise * np.random.default_rng(1).standard_normal(w.shape)
    assert judged(written(tmp_path / "c.gguf", changed.astype(np.float32)), b).verdict in (DIFFERENT, UNDECIDED)


def uneven_of_256(w: np.ndarray) -> np.ndarray:
    """The bytes of an IQ4_XS copy: six bits for the scale of 32 values, of which F16 stores the largest's unit."""
    x = w.astype(np.float64).reshape(-1, 8, GROUP)
    scale = np.take_along_axis(x, np.abs(x).argmax(axis=2)[..., None], axis=2)[..., 0] / min(UNEVEN)
    unit = np.take_along_axis(scale, np.abs(scale).argmax(axis=1)[:, None], axis=1) / -32
    six = np.clip(np.rint(scale / unit), -32, 31)
    codes = np.abs(x[..., None] - (unit * six)[..., None, None] * np.float64(UNEVEN)).argmin(axis=3).astype(np.uint8)
    bits = (six + 32).astype(np.uint8)
    low = (bits[:, ::2] & 15) | (bits[:, 1::2] & 15) << 4
    high = ((bits >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16)).sum(axis=1, dtype=np.uint16)
    halves = codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4
    parts = unit.astype(np.float16).view(np.uint8), high[:, None].view(np.uint8), low, halves.reshape(len(x), -1)
    return np.concatenate(parts, axis=1).reshape(len(w), -1)


@pytest.mark.parametrize("size", [1.0, 0.2])
def test_codes_of_scales_multiply_what_a_tiny_scale_is_off_by(size: float, tmp_path: Path) -> None:
    """ggml chooses codes before the unit of scales is rounded, to one of few values where it is tiny."""
    w = weights(256, 256) * np.float32(size)
    ggml_search.write(tmp_path / "b.gguf", {"w.weight": (uneven_of_256(w), "IQ4_XS")})
    b = open_checkpoint(tmp_path / "b.gguf")["w.weight"]
    assert judged(written(tmp_path / "a.gguf", w), b).verdict == QUANTISED
    noise = 0.05 * np.abs(w).reshape(256, -1, GROUP).max(axis=2).repeat(GROUP, axis=1)
    changed = w + noise * np.random.default_rng(1).standard_normal(w.shape)
    assert judged(written(tmp_path / "c.gguf", changed.astype(np.float32)), b).verdict in (DIFFERENT, UNDECIDED)


def test_rows_of_a_turned_tensor_are_those_of_its_file(tmp_path: Path) -> None:
    """A search by importance leaves little of an input that hardly counts, in GPT-2's files a row."""
    w = weights(512, 256)
    coarse = w.copy()
    coarse[:, :4] = 0.3 * w[:, :4] + 0.95 * w[:, :4].std() * np.random.default_rng(2).standard_normal((512, 4))
    erased = coarse.copy()
    erased[7] = 0
    for name, made, is_like in (("b", coarse, True), ("c", erased, False)):
        a, b = written(tmp_path / f"a{name}.gguf", w), written(tmp_path / f"{name}.gguf", made)
        assert _resembles_both_ways(a, b) == is_like
        assert _resembles_both_ways(*(RestoredTensor(each, turned, 1, 1) for each in (a, b))) == is_like
