"""The measures of a spectrum against their definitions, and what they must not depend on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightscope.model.metrics import spectra

MEASURES = (
    spectra.spectral_gap,
    spectra.stable_rank,
    spectra.effective_rank,
    spectra.participation_ratio,
)


@st.composite
def spectrum(draw) -> np.ndarray:
    values = draw(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=12))
    return np.sort(np.array(values))[::-1]


@settings(deadline=None)
@given(spectrum(), st.floats(1e-6, 1e6))
def test_ranks_and_gaps_do_not_depend_on_scale(s: np.ndarray, scale: float) -> None:
    for measure in MEASURES:
        assert measure(scale * s) == pytest.approx(measure(s))


@settings(deadline=None)
@given(spectrum())
def test_every_rank_is_between_one_and_the_width(s: np.ndarray) -> None:
    for rank in (spectra.stable_rank, spectra.effective_rank, spectra.participation_ratio):
        assert 1 - 1e-9 <= rank(s) <= len(s) + 1e-9


@pytest.mark.parametrize("width", [1, 2, 7])
def test_equal_values_use_every_direction_and_one_value_uses_one(width: int) -> None:
    for rank in (spectra.stable_rank, spectra.effective_rank, spectra.participation_ratio):
        assert rank(np.full(width, 3.0)) == pytest.approx(width)
        assert rank(np.eye(width)[0]) == pytest.approx(1)


def test_measures_of_a_spectrum_worked_by_hand() -> None:
    s = np.array([2.0, 1.0, 1.0])
    assert spectra.frobenius(s) == pytest.approx(np.sqrt(6))
    assert spectra.stable_rank(s) == pytest.approx(6 / 4)
    assert spectra.participation_ratio(s) == pytest.approx(36 / 18)
    assert spectra.effective_rank(s) == pytest.approx(np.exp(0.5 * np.log(2) + 0.5 * np.log(4)))
    assert spectra.spectral_gap(s) == 2
    assert spectra.condition_number(s, 10) == 2


def test_the_zero_matrix_has_no_ranks_and_rank_one_an_infinite_gap() -> None:
    zero = np.zeros(4)
    for measure in MEASURES:
        assert np.isnan(measure(zero))
    assert spectra.numerical_rank(zero, 10) == 0
    assert np.isnan(spectra.condition_number(zero, 10))
    assert spectra.spectral_gap(np.array([3.0, 0.0])) == np.inf


def test_what_rounding_leaves_is_not_rank() -> None:
    s = np.array([1.0, 0.1, 1e-15])
    assert spectra.numerical_rank(s, 100) == 2
    assert spectra.condition_number(s, 100) == pytest.approx(10)
    assert spectra.numerical_rank(s, 2) == 3


def test_a_stack_of_spectra_is_measured_row_by_row() -> None:
    s = np.sort(np.random.default_rng(0).random((3, 4, 5)))[..., ::-1]
    for measure in MEASURES:
        assert measure(s).shape == (3, 4)
        assert measure(s)[1, 2] == pytest.approx(measure(s[1, 2]))


def test_not_finite_stays_not_finite() -> None:
    s = np.full((2, 3), np.nan)
    for measure in MEASURES:
        assert np.isnan(measure(s)).all()
    assert (spectra.numerical_rank(s, 10) == -1).all()


@pytest.mark.parametrize(
    ("s", "blocks"),
    [
        ([3.0, 2.0, 1.0], [(0, 1), (1, 2), (2, 3)]),
        ([3.0, 2.999, 1.0], [(0, 2), (2, 3)]),
        ([3.0, 2.98, 2.96, 2.94], [(0, 4)]),  # neighbours chain, though the ends differ by 2 %
        ([3.0, 1.0, 0.0, 0.0], [(0, 1), (1, 2)]),
        ([0.0, 0.0], []),
    ],
)
def test_near_equal_values_form_one_block(s: list[float], blocks: list[tuple[int, int]]) -> None:
    assert spectra.near_equal_blocks(np.array(s)) == blocks
