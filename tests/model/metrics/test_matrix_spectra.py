"""Measures of a matrix next to a random one: SciPy's spectra, Spectrum's formula and Clauset's method, step by step."""

import numpy as np
import pytest
import scipy.linalg

from weightscope.model.metrics import matrix_spectra
from weightscope.model.metrics.matrix_spectra import (
    Sketch,
    beyond_edge,
    condition,
    power_law,
    random_edge,
    signal_to_noise,
    singular_values,
    sketched_singular_values,
)

RNG = np.random.default_rng(0)


def scipys(w: np.ndarray) -> np.ndarray:
    return scipy.linalg.svdvals(w.astype(np.float64))


def cut(w: np.ndarray, length: int) -> list[np.ndarray]:
    """The values in storage order in pieces that end anywhere."""
    flat = w.reshape(-1)
    return [flat[start : start + length] for start in range(0, len(flat), length)]


@pytest.mark.parametrize("shape", [(300, 40), (40, 300), (64, 64), (7, 2), (2, 900)], ids=str)
@pytest.mark.parametrize("length", [17, 10**6])
def test_singular_values_are_scipys(shape: tuple[int, int], length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_spectra, "GRAM_ROWS", 11)
    w = (RNG.standard_normal(shape) * np.exp(RNG.standard_normal(shape[1]))).astype(np.float32)
    np.testing.assert_allclose(singular_values(cut(w, length), shape), scipys(w), rtol=1e-9)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scales_that_float32_cannot_square(scale: float) -> None:
    w = (RNG.standard_normal((50, 30)) * scale).astype(np.float32)
    np.testing.assert_allclose(singular_values([w.reshape(-1)], w.shape), scipys(w), rtol=1e-9)


def test_null_directions_are_zero_and_not_noise() -> None:
    w = RNG.standard_normal((60, 5)) @ RNG.standard_normal((5, 40))
    s = singular_values([w.reshape(-1)], w.shape)
    np.testing.assert_allclose(s[:5], scipys(w)[:5], rtol=1e-9)
    assert (s[5:] == 0).all() and condition(s, w.shape) == np.inf


def test_a_broken_value_makes_every_singular_value_nan() -> None:
    w = RNG.standard_normal((6, 9))
    w[3, 4] = np.inf
    assert np.isnan(singular_values([w.reshape(-1)], w.shape)).all()


@pytest.mark.parametrize("shape", [(400, 100), (100, 400), (200, 200)], ids=str)
def test_permuted_entries_end_at_the_edge(shape: tuple[int, int]) -> None:
    """The edge is of a matrix with the same entries in any order; three directions on top of it are beyond."""
    noise = RNG.standard_normal(shape)
    s = scipys(noise)
    assert s[0] == pytest.approx(random_edge(s, shape), rel=0.03)
    left, right = (np.linalg.qr(RNG.standard_normal((size, 3)))[0] for size in shape)
    assert beyond_edge(scipys(noise + 4 * np.sqrt(max(shape)) * left @ right.T), shape) == 3


@pytest.mark.parametrize("shape", [(400, 100), (100, 400), (200, 200)], ids=str)
def test_signal_to_noise_is_spectrums(shape: tuple[int, int]) -> None:
    """The published formula (Hartford et al. 2024, section 3; cognitivecomputations/spectrum), written out."""
    w = RNG.standard_normal(shape) * np.exp(RNG.standard_normal(shape[1]))
    s = scipys(w)
    n, m = shape
    beta = n / m if n < m else m / n
    sigma = (np.percentile(s, 75) - np.percentile(s, 25)) / 1.349
    threshold = sigma * np.sqrt((1 + np.sqrt(beta)) ** 2)
    expected = s[s > threshold].sum() / s[s <= threshold].sum() / s.max()
    assert signal_to_noise(singular_values([w.reshape(-1)], shape), shape) == pytest.approx(expected, rel=1e-5)


def sketch_of(w: np.ndarray) -> Sketch:
    return sketched_singular_values(lambda: cut(w, 999), w.shape, float((w.astype(np.float64) ** 2).sum()))


def rank_error(s: np.ndarray, sketch: np.ndarray) -> float:
    """The largest difference between the shares of singular values below any value."""
    values = np.linspace(0, 1.01 * s[0], 3000)
    below = (np.searchsorted(np.sort(each), values) / len(s) for each in (s, sketch))
    return float(np.abs(next(below) - next(below)).max())


SPECTRA = {
    "random": lambda: RNG.standard_normal((500, 300)),
    "wide": lambda: RNG.standard_normal((200, 900)) * np.exp(RNG.standard_normal(900)),
    "heavy": lambda: np.linalg.qr(RNG.standard_normal((400, 400)))[0] * (40 / np.arange(1, 401) ** 0.9),
    "low rank": lambda: RNG.standard_normal((300, 5)) @ RNG.standard_normal((5, 400)),
    "identity": lambda: np.eye(200),
    "huge": lambda: RNG.standard_normal((300, 200)).astype(np.float32) * np.float32(1e30),
    "tiny": lambda: RNG.standard_normal((300, 200)).astype(np.float32) * np.float32(1e-30),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_a_sketch_is_within_its_estimated_error(name: str) -> None:
    """The estimate holds for these, the share is off by far less; converged values and the Frobenius norm are exact."""
    w = SPECTRA[name]()
    s, sketch = scipys(w), sketch_of(w)
    assert rank_error(s, sketch.s) <= min(sketch.rank_error, 0.05)
    assert sketch.s[0] == pytest.approx(s[0], rel=2e-3)
    assert np.linalg.norm(sketch.s) == pytest.approx(np.linalg.norm(s), rel=1e-6)


@pytest.mark.parametrize("w", [np.zeros((30, 40)), np.full((30, 40), np.nan)], ids=["zero", "NaN"])
def test_a_sketch_of_nothing(w: np.ndarray) -> None:
    np.testing.assert_equal(sketch_of(w).s, np.full(30, w[0, 0]))


def test_equal_singular_values_are_signal_alone() -> None:
    assert signal_to_noise(np.ones(30), (30, 30)) == np.inf and condition(np.ones(30), (30, 30)) == 1


def test_the_zero_matrix_has_no_measures() -> None:
    zero = np.zeros(30)
    for measure in (random_edge, beyond_edge, signal_to_noise, condition):
        assert np.isnan(measure(zero, (30, 30)))
    assert np.isnan(power_law(zero)).all()


def clausets(values: np.ndarray) -> tuple[float, float]:
    """Eq. 3.1 of Clauset, Shalizi and Newman 2009 for each xmin, and the supremum of section 3.3 at every value."""
    fits = []
    for xmin in values[:-1]:
        tail = values[values >= xmin]
        alpha = 1 + len(tail) / sum(np.log(x / xmin) for x in tail)
        empirical = [(tail < x).mean() for x in tail]
        fits.append((max(abs(e - 1 + (x / xmin) ** (1 - alpha)) for e, x in zip(empirical, tail, strict=True)), alpha))
    distance, alpha = min(fits)
    return alpha, distance


def test_the_power_law_is_clausets() -> None:
    values = np.sort(np.concatenate([RNG.pareto(2.5, 60) + 1, RNG.random(60)]))
    assert power_law(RNG.permutation(values)) == pytest.approx(clausets(values), rel=1e-9)


@pytest.mark.parametrize("values", [np.ones(50), np.arange(1.0, 10.0), np.zeros(40)], ids=["equal", "few", "zero"])
def test_what_has_no_tail_has_no_exponent(values: np.ndarray) -> None:
    assert np.isnan(power_law(values)).all()
