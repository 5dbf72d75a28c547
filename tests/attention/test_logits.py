"""No score is larger than its head's bound: neither an eager model's nor one of inputs that look for the largest."""

import numpy as np
import pytest

from tests.support.tiny_models import EACH_MECHANISM, NAMES, fixture
from weightscope.attention.layer import Layer
from weightscope.attention.logits import LogitBounds

ROUNDING = 1e-5  # scores are of float32


def bounds_of(name: str, index: int) -> tuple[str, np.ndarray]:
    """Why a fixture's layer has no bounds, and the bounds (H,)."""
    model = fixture(name).model
    bounds = LogitBounds(model.normed_layer(index), model.config.n_positions)
    return bounds.reason, np.array([bounds.of(head) for head in range(model.layer(index).n_heads)])


@pytest.mark.parametrize("name", NAMES)
def test_eager_scores_stay_within_their_bounds(name: str) -> None:
    tiny = fixture(name)
    for index in tiny.layers:
        reason, bounds = bounds_of(name, index)
        assert np.isnan(bounds).all() if reason else np.isfinite(bounds).all()
        for scores in (tiny.arrays[f"scores{index}"], tiny.model.layer(index).scores(tiny.arrays[f"x{index}"])):
            largest = np.abs(np.where(np.isfinite(scores), scores, 0)).max(axis=(1, 2))
            assert not (largest > (1 + ROUNDING) * bounds).any()


def climb(layer: Layer, head: int, apart: tuple[int, int], start: np.ndarray, steps: int = 60) -> float:
    """The largest |score| of a head that gradient ascent finds, of a query and a key at two positions: start (2, d)."""
    pair, best = start.astype(np.float64), 0.0
    d, step = pair.shape[1], 0.5
    positions = np.repeat(apart, d + 1)
    for _ in range(steps):
        pair *= 1e3 / np.abs(pair).max(axis=1, keepdims=True)  # so large that an epsilon does not matter
        moved = pair[:, None] + np.vstack((np.zeros(d), 0.1 * np.eye(d)))  # (2, 1 + d, d)
        # (1 + d, 1 + d): of the pair as it is, then moved along each axis
        scores = layer.scores(moved.reshape(-1, d), positions)[head, : d + 1, d + 1 :]
        best = max(best, float(np.abs(scores).max()))
        slopes = np.stack((scores[1:, 0], scores[0, 1:])) - scores[0, 0]  # (2, d)
        slopes *= np.sign(scores[0, 0]) / np.maximum(np.linalg.norm(slopes, axis=1, keepdims=True), 1e-30)
        pair += step * np.linalg.norm(pair, axis=1, keepdims=True) * slopes
        step *= 0.95
    return best


@pytest.mark.parametrize("name", EACH_MECHANISM)
def test_inputs_that_look_for_the_largest_score_stay_within_the_bound(name: str) -> None:
    tiny, rng = fixture(name), np.random.default_rng(0)
    for index in tiny.layers:
        layer, x = tiny.model.normed_layer(index), tiny.arrays[f"x{index}"]
        reason, bounds = bounds_of(name, index)
        for head in () if reason or layer.cross else range(layer.n_heads):
            for apart in ((len(x) - 1, len(x) - 1), (0, len(x) - 1), (len(x) - 1, 0)):
                largest = climb(layer, head, apart, rng.standard_normal((2, layer.q.shape[1])))
                assert largest <= (1 + ROUNDING) * bounds[head]
