"""Lengths of the vectors that attention adds up, against plain loops in float64."""

import numpy as np
import pytest

from weightscope.metrics.norms import given_to_kinds, output_triangles, value_norms

G, H, N, R, D = 2, 6, 7, 4, 16


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_lengths_are_those_of_the_vectors(rng: np.random.Generator) -> None:
    """|v R'| = |v W_O|, with three query heads to a key-value head."""
    v, w_o = rng.standard_normal((G, N, R)), rng.standard_normal((H, R, D))
    found = value_norms(v, output_triangles(w_o))
    for head in range(H):
        expected = [np.sqrt(sum(y * y for y in row @ w_o[head])) for row in v[head // (H // G)]]
        np.testing.assert_allclose(found[head], expected, rtol=1e-12)


def test_short_vectors_keep_their_digits(rng: np.random.Generator) -> None:
    """A direction that W_O shrinks by 1e-10 would be lost in a Gram matrix."""
    left, right = (np.linalg.qr(rng.standard_normal((size, size)))[0] for size in (R, D))
    w_o = left @ np.diag([1, 1, 1, 1e-10]) @ right[:R]
    found = value_norms(left[:, 3][None, None], output_triangles(w_o[None]))
    np.testing.assert_allclose(found, 1e-10, rtol=1e-4)


def test_a_change_of_basis_within_a_head_changes_no_length(rng: np.random.Generator) -> None:
    v, w_o, gauge = rng.standard_normal((1, N, R)), rng.standard_normal((1, R, D)), rng.standard_normal((R, R))
    np.testing.assert_allclose(
        value_norms(v @ gauge, output_triangles(np.linalg.inv(gauge) @ w_o)), value_norms(v, output_triangles(w_o))
    )


def test_what_is_given_to_kinds_is_the_sum_of_lengths(rng: np.random.Generator) -> None:
    """Rows of alpha need not sum to 1."""
    attention, f = rng.random((2, 3, N, N)), rng.standard_normal((2, 3, N, D))
    kinds = rng.integers(0, 3, (2, N))
    alpha, alpha_f = given_to_kinds(attention, np.linalg.norm(f, axis=-1), kinds, 3)
    expected = np.zeros((2, 2, 3, 3))
    for b, h, i, j in np.ndindex(2, 3, N, N):
        expected[0, b, h, kinds[b, j]] += attention[b, h, i, j] / N
        expected[1, b, h, kinds[b, j]] += np.linalg.norm(attention[b, h, i, j] * f[b, h, j]) / N
    np.testing.assert_allclose([alpha, alpha_f], expected, rtol=1e-12)
