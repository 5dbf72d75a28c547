"""Lengths of the vectors that attention adds up, against plain loops in float64."""

import numpy as np
import pytest

from weightscope.model.metrics.lengths import output_triangles, value_norms

G, H, N, R, D = 2, 6, 7, 4, 16


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_lengths_are_those_of_the_vectors(rng: np.random.Generator) -> None:
    """|v R'| = |v W_O|, with three query heads to a key-value head."""
    v, w_o = rng.standard_normal((G, N, R)), rng.standard_normal((H, R, D))
    lengths = value_norms(v, output_triangles(w_o))
    for head in range(H):
        expected = [np.sqrt(sum(y * y for y in row @ w_o[head])) for row in v[head // (H // G)]]
        np.testing.assert_allclose(lengths[head], expected, rtol=1e-12)


def test_short_vectors_keep_their_digits(rng: np.random.Generator) -> None:
    """A direction that W_O shrinks by 1e-10 would be lost in a Gram matrix."""
    left, right = (np.linalg.qr(rng.standard_normal((size, size)))[0] for size in (R, D))
    w_o = left @ np.diag([1, 1, 1, 1e-10]) @ right[:R]
    lengths = value_norms(left[:, 3][None, None], output_triangles(w_o[None]))
    np.testing.assert_allclose(lengths, 1e-10, rtol=1e-4)


def test_a_change_of_basis_within_a_head_changes_no_length(rng: np.random.Generator) -> None:
    v, w_o, gauge = rng.standard_normal((1, N, R)), rng.standard_normal((1, R, D)), rng.standard_normal((R, R))
    np.testing.assert_allclose(
        value_norms(v @ gauge, output_triangles(np.linalg.inv(gauge) @ w_o)), value_norms(v, output_triangles(w_o))
    )
