"""Parts of a large tensor: what they hold, and how often their values are taken."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.files import write
from weightscope.checkpoint.blocks import Block
from weightscope.checkpoint.checkpoint import Tensor
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.model.metrics.spectra import evenly_spread
from weightscope.pairs.deeds.pair import Pair
from weightscope.pairs.deeds.views import SPREAD, Side, parts_of, views_of

MXFP6 = Path(__file__).parents[2] / "fixtures" / "quark" / "mxfp6_e2m3"
MOST = 1 << 10  # values of a part


def pair_of(shape: tuple[int, ...], folder: Path) -> Pair:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float32)
    for name, values in (("a", x), ("b", x * np.float32(1.5))):
        write(folder / f"{name}.safetensors", {"w": values})
    return Pair(*(open_checkpoint(folder / f"{name}.safetensors")["w"] for name in "ab"))


def packed_pair() -> Pair:
    """Values on stored grids, with their half-steps."""
    tensors = open_checkpoint(MXFP6)
    name = "model.layers.0.mlp.{}_proj.weight"
    return Pair(tensors[name.format("up")], tensors[name.format("gate")])


def lines(tensor: Tensor) -> np.ndarray:
    return np.asarray(tensor.read()).reshape(-1, tensor.shape[-1] if len(tensor.shape) > 1 else 1)


@pytest.mark.parametrize("shape", [(200, 96), (96, 200), (70, 70), (5000,), (6, 40, 32), "packed"])
def test_parts_have_their_lines_and_the_spread_ones_in_order(shape, tmp_path: Path) -> None:
    pair = packed_pair() if shape == "packed" else pair_of(shape, tmp_path)
    wholes = [lines(tensor) for tensor in (pair.a, pair.b)]
    parts = [*parts_of(pair, views_of(pair, MOST), MOST)]
    assert len(parts) == -(-wholes[0].size // MOST)
    n_rows, width = wholes[0].shape
    cuts = [np.array_split(np.arange(n), len(parts)) for n in (n_rows, width)]
    for views, rows, columns in zip(parts, *cuts, strict=True):
        rows, columns = (
            np.union1d(own, evenly_spread(n, SPREAD)).astype(int) for own, n in ((rows, n_rows), (columns, width))
        )
        for side, whole in zip((views[0].x, views[0].y), wholes, strict=True):
            np.testing.assert_array_equal(side.values, whole[:, columns])
        if len(pair.a.shape) > 1:
            for side, whole in zip((views[1].x, views[1].y), wholes, strict=True):
                np.testing.assert_array_equal(side.values, whole[rows].T)
        sides: list[Side] = [side for view in views for side in (view.x, view.y)]
        assert all((side.half is None) is (shape != "packed") for side in sides)
        assert all(side.half is None or side.half.shape == side.values.shape for side in sides)


def test_spread_lines_are_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value of a part is taken once along its row and once along its column."""
    taken = [0]

    class Counted(np.ndarray):
        def __getitem__(self, key):
            values = super().__getitem__(key)
            taken[0] += values.size
            return np.asarray(values)

    read = Block.values
    monkeypatch.setattr(Block, "values", lambda block: read(block).view(Counted))
    pair = pair_of((400, 300), tmp_path)
    size, few = 2 * 400 * 300, 2 * SPREAD * (400 + 300)
    spread = views_of(pair, MOST)
    assert taken[0] == few
    for _ in parts_of(pair, spread, MOST):
        pass
    assert taken[0] == 2 * size + few
