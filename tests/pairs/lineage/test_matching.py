"""Matching: the best path, the assignment, and what two checkpoints that share nothing give."""

from itertools import product

import numpy as np
import pytest

from tests.support.prints import sketches_of
from weightscope.pairs.lineage.matching import JUMP, SURE, align_layers, log_tail, matches
from weightscope.pairs.lineage.sketches import POINTS, SKETCH


def worth_of(likeness, path, least):
    """What a path is worth, step by step."""
    total = 0.0
    for i, j in enumerate(path):
        total += least if j is None else likeness[i, j]
        before = path[i - 1]
        goes_on = i == 0 or (j is None and before is None) or (None not in (j, before) and j == before + 1)
        total -= 0.0 if goes_on else JUMP
    return total


@pytest.mark.parametrize("seed", range(20))
def test_alignment_is_the_best_of_all_paths(seed):
    rng = np.random.default_rng(seed)
    likeness, least = rng.uniform(0, 0.3, (4, 3)), 0.12
    best = max(worth_of(likeness, path, least) for path in product([0, 1, 2, None], repeat=4))
    assert worth_of(likeness, align_layers(likeness, least), least) == pytest.approx(best)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 1, 2, 3], [3, 2, 1, 0], [0, 0, 1, 1]])
def test_layers_are_found_in_any_order(order):
    rng = np.random.default_rng(0)
    base = rng.standard_normal((4, 6, 2, SKETCH))
    moved = base[order] + 0.3 * rng.standard_normal((len(order), 6, 2, SKETCH))
    match = matches(sketches_of(moved), sketches_of(base))["direct"]
    assert match.layers == order
    assert match.is_sure


def test_heads_are_found_in_any_order():
    rng = np.random.default_rng(1)
    base = rng.standard_normal((3, 8, 2, SKETCH))
    order = rng.permutation(8)
    match = matches(sketches_of(base[:, order]), sketches_of(base))["direct"]
    assert all(np.array_equal(places, order) for places in match.heads)


def test_unrelated_sketches_are_as_alike_as_chance():
    """The half that judges has not seen the choice: z is standard normal over many pairs, and never sure."""
    z = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        a, b = (sketches_of(rng.standard_normal((4, 8, 2, SKETCH))) for _ in range(2))
        match = matches(a, b)["direct"]
        assert not match.is_sure
        z += [value * np.sqrt(SKETCH * 8) for value in match.likeness.ravel()]
    assert abs(np.mean(z)) < 4 / np.sqrt(len(z))
    assert np.std(z) == pytest.approx(1.0, abs=0.1)


def test_other_widths_are_not_compared_directly():
    values = np.random.default_rng(2).standard_normal((4, 4, 2, SKETCH))
    assert set(matches(sketches_of(values), sketches_of(values, d_model=32))) == {"spectra"}


@pytest.mark.parametrize("n_layers", [2, 5])
def test_unrelated_layers_all_nearest_to_one_layer_are_no_match(n_layers):
    """Spectra of a base's layers may fall at different slopes, one of them at the slope of most models."""
    falls, points = np.geomspace(1, 50, n_layers), np.linspace(0, 1, POINTS)
    base = -np.broadcast_to(falls[:, None, None, None] * points, (n_layers, 4, 2, POINTS))
    rng = np.random.default_rng(4)
    slopes = rng.uniform(0.8, 1.2, (12, 4, 2, 1))
    a, b = (rng.standard_normal((n, 4, 2, SKETCH)) for n in (12, n_layers))
    match = matches(sketches_of(a, spectra=-slopes * points), sketches_of(b, spectra=base))["spectra"]
    assert set(match.layers) == {0} and not match.is_sure


def test_spectra_match_layers_in_any_basis():
    rng = np.random.default_rng(3)
    spectra = -np.sort(rng.uniform(0, 3, (6, 4, 2, POINTS)))
    a, b = (rng.standard_normal((6, 4, 2, SKETCH)) for _ in range(2))
    noisy = spectra[[0, 2, 1, 3, 4, 5]] + 0.01 * rng.standard_normal(spectra.shape)
    match = matches(sketches_of(a, spectra=noisy), sketches_of(b, spectra=spectra))
    assert match["spectra"].layers == [0, 2, 1, 3, 4, 5]
    assert match["spectra"].is_sure and not match["direct"].is_sure


def test_log_tail_is_the_normal_tail():
    from scipy.stats import norm

    assert log_tail(SURE) == pytest.approx(norm.logsf(SURE))
