"""Keys of distances: the term of a pair by its definition."""

import numpy as np
import pytest

from weightscope.model.layers.positions import RelativeKeys
from weightscope.model.layers.steps.relative import interleaved_sinusoids, logarithmic


@pytest.mark.parametrize("of_keys", [False, True])
def test_a_pair_meets_the_key_of_its_distance(of_keys: bool) -> None:
    rng = np.random.default_rng(0)
    tokens, table, bias = rng.normal(size=(3, 5, 4)), rng.normal(size=(3, 40, 4)), rng.normal(size=(3, 4))
    positions = np.array([7, 0, 3, 12, 4])
    term = RelativeKeys(lambda distances: table[:, distances + 20], bias, of_keys)
    terms = term(tokens, positions[:, None] - positions)
    for h, i, j in np.ndindex(3, 5, 5):
        met = table[h, positions[i] - positions[j] + 20]
        assert terms[h, i, j] == pytest.approx((tokens[h, j if of_keys else i] + bias[h]) @ met)


def test_sinusoids_of_a_distance_and_its_opposite_share_their_cosines() -> None:
    there, back = interleaved_sinusoids(np.array([5, -5]), 6)
    np.testing.assert_allclose(there[1::2], back[1::2])
    np.testing.assert_allclose(there[0::2], -back[0::2])


def test_logarithmic_buckets_are_odd_and_grow() -> None:
    distances = np.arange(-200, 201)
    terms = logarithmic(distances, buckets=32, most=128)
    np.testing.assert_array_equal(terms, -terms[::-1])
    assert np.all(np.diff(terms) >= 0)
    np.testing.assert_array_equal(terms[200 - 16 : 200 + 17], np.arange(-16, 17))
