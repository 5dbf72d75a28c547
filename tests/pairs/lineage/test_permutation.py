"""The permutation test of neurons, held to its published algorithm written a second time."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment
from scipy.stats import combine_pvalues, kstest, spearmanr

import weightscope as ws
from tests.support.plants.attacks import random_base
from tests.support.plants.derivations import DERIVATIONS
from tests.support.plants.named_parts import read_weights, write_weights
from weightscope.pairs.lineage.neurons import assigned, permutation_log_p, spearman_log_p


def published(a, b):
    """Zhu et al., MATCH: assign neurons by cosines of gate and of up weights, correlate the two, combine by Fisher."""
    values = []
    for i in a.layers():
        orders = []
        for name in ("gate.w", "up.w"):
            x, y = a.parts[i, name].T.astype(np.float64), b.parts[i, name].T.astype(np.float64)
            cosines = (x @ y.T) / np.outer(np.linalg.norm(x, axis=1), np.linalg.norm(y, axis=1))
            orders.append(linear_sum_assignment(-cosines)[1])
        values.append(max(spearmanr(*orders, alternative="greater").pvalue, 1e-300))
    return float(combine_pvalues(values, "fisher").pvalue)


@pytest.fixture
def pair(base, tmp_path):
    """A function that writes a change of the base, and returns both as models and as weights."""

    def make(change):
        weights = read_weights(base)
        changed = change(weights)
        write_weights(changed, tmp_path / "other")
        return ws.open_model(tmp_path / "other"), ws.open_model(base), changed, weights

    return make


def test_strangers_have_the_published_p(pair):
    suspect, base, a, b = pair(random_base)
    p = np.exp(permutation_log_p(suspect, base))
    assert p == pytest.approx(published(a, b), rel=1e-6) and 1e-3 < p <= 1


@pytest.mark.parametrize("name", ["copy", "neurons permuted", "drift 10 %", "rank 4, all"])
def test_descendants_have_a_small_p_in_any_order(pair, name):
    suspect, base, a, b = pair(DERIVATIONS[name].change)
    assert permutation_log_p(suspect, base) < np.log(1e-60) and published(a, b) < 1e-60


def test_other_shapes_are_not_tested(base, tmp_path):
    write_weights(DERIVATIONS["middle layers removed"].change(read_weights(base)), tmp_path / "cut")
    assert permutation_log_p(ws.open_model(tmp_path / "cut"), ws.open_model(base)) is None
    lineage = ws.lineage(tmp_path / "cut", base)
    assert lineage.by_neurons == {} and lineage.as_json()["bases"][0]["permutation_p"] is None


def test_p_is_uniform_for_rows_that_share_nothing():
    rng = np.random.default_rng(0)
    values = []
    for _ in range(400):
        x, y, z, w = rng.standard_normal((4, 40, 12))
        values.append(np.exp(spearman_log_p(assigned(x, y), assigned(z, w))))
    assert kstest(values, "uniform").pvalue > 0.001


def alike(weights, seed):
    """The weights with new networks, whose neurons have gate and up at a cosine of 0.8."""
    rng, parts = np.random.default_rng(seed), dict(weights.parts)
    for i in weights.layers():
        gate, other = rng.standard_normal((2, *weights.parts[i, "gate.w"].shape))
        parts[i, "gate.w"], parts[i, "up.w"] = gate.astype(np.float32), (0.8 * gate + 0.6 * other).astype(np.float32)
    return replace(weights, parts=parts)


def test_strangers_with_gate_and_up_alike_get_no_small_p(base, tmp_path):
    """Assignments by gate and by up are alike then, whatever the networks; networks of other layers show it."""
    ours, published_ps = [], []
    for seed in range(6):
        a, b = (alike(read_weights(base), each) for each in (seed, 100 + seed))
        for weights, name in ((a, "a"), (b, "b")):
            write_weights(weights, tmp_path / f"{name}{seed}")
        ours.append(permutation_log_p(*(ws.open_model(tmp_path / f"{name}{seed}") for name in "ab")))
        published_ps.append(published(a, b))
    assert np.median(published_ps) < 0.003
    assert np.exp(np.median(ours)) > 0.05 and min(ours) > np.log(1e-3)


def test_descendants_with_gate_and_up_alike_still_get_a_small_p(pair, tmp_path):
    _, _, a, _ = pair(lambda weights: alike(weights, 0))
    write_weights(a, tmp_path / "of")
    write_weights(DERIVATIONS["drift 10 %"].change(a), tmp_path / "tuned")
    assert permutation_log_p(ws.open_model(tmp_path / "tuned"), ws.open_model(tmp_path / "of")) < np.log(1e-20)
