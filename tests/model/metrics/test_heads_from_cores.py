"""What r x r products say of a head, against the dense matrix."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weightscope as ws
from tests.support.weights import shared
from weightscope.model.layers.factored import core_singular_values, orthonormal, triangle
from weightscope.model.metrics.spectra import (
    affine_singular_values,
    copying_score,
    directionality,
    eigenvalue_balance,
    eigenvalues,
    symmetric_eigenvalues,
    symmetric_share,
)


@st.composite
def factors(draw) -> tuple[np.ndarray, np.ndarray]:
    r = draw(st.integers(1, 6))
    d = draw(st.integers(2 * r, 30))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    scale = 10.0 ** draw(st.integers(-3, 3))
    return scale * rng.standard_normal((d, r)), rng.standard_normal((d, r))


def products(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return left.T @ left, right.T @ right, right.T @ left


@settings(deadline=None)
@given(factors())
def test_symmetric_share_and_eigenvalues_are_those_of_the_dense_symmetric_part(pair) -> None:
    left, right = pair
    w = left @ right.T
    symmetric = (w + w.T) / 2
    assert symmetric_share(*products(left, right)) == pytest.approx(
        np.linalg.norm(symmetric) ** 2 / np.linalg.norm(w) ** 2
    )
    expected = np.linalg.eigvalsh(symmetric)
    expected = expected[np.argsort(-np.abs(expected), kind="stable")][: 2 * left.shape[1]]
    computed = symmetric_eigenvalues(*products(left, right))
    np.testing.assert_allclose(np.sort(computed), np.sort(expected), atol=1e-5 * np.abs(expected).max())
    assert computed[0] == pytest.approx(expected[0], rel=1e-9) or abs(computed[0]) == pytest.approx(
        abs(expected[1]), rel=1e-9
    )


def test_a_symmetric_matrix_is_all_symmetric_and_an_antisymmetric_one_not_at_all() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 20, 3))
    assert symmetric_share(*products(a, a)) == pytest.approx(1)
    assert (symmetric_eigenvalues(*products(a, a))[:3] > 0).all()
    assert (symmetric_eigenvalues(*products(a, -a))[:3] < 0).all()
    left, right = np.hstack([a, -b]), np.hstack([b, a])  # a b' - b a'
    assert symmetric_share(*products(left, right)) == pytest.approx(0, abs=1e-12)
    assert np.isnan(symmetric_share(*products(0 * a, b)))
    assert (symmetric_eigenvalues(*products(0 * a, b)) == 0).all()


@settings(deadline=None)
@given(factors(), st.booleans(), st.integers(0, 100))
def test_affine_singular_values_are_those_of_the_dense_map_with_its_border(pair, biased: bool, seed: int) -> None:
    """norm-based-attention, eqs 9-11: [[W_V W_O, 0], [b_V W_O, 1]]."""
    w_v, w_o = pair[0], pair[1].T
    d, r = w_v.shape
    b_v = np.random.default_rng(seed).standard_normal(r) if biased else np.zeros(r)
    dense = np.block([[w_v @ w_o, np.zeros((d, 1))], [(b_v @ w_o)[None], np.ones((1, 1))]])
    expected = np.linalg.svd(dense, compute_uv=False)
    computed = affine_singular_values(triangle(w_v, w_v.T @ w_v), b_v, triangle(w_o.T, w_o @ w_o.T))
    assert computed.shape == (r + 1,)
    np.testing.assert_allclose(computed, expected[: r + 1], rtol=1e-7, atol=1e-9 * expected[0])


@settings(deadline=None)
@given(factors())
def test_eigenvalues_of_a_product_are_those_of_its_reverse(pair) -> None:
    w_v, w_o = pair[0], pair[1].T
    computed = eigenvalues(w_o @ w_v)
    dense = w_v @ w_o
    size = np.linalg.norm(dense)  # a trace can be far smaller than what is added up
    assert computed.sum() == pytest.approx(np.trace(dense), rel=0, abs=1e-9 * size)
    assert (computed**2).sum() == pytest.approx(np.trace(dense @ dense), rel=0, abs=1e-9 * size**2)
    assert (np.diff(np.abs(computed)) <= 1e-9 * np.abs(computed).max()).all()


def test_copying_score_is_one_for_the_identity_and_zero_for_its_negative() -> None:
    q = np.linalg.qr(np.random.default_rng(0).standard_normal((12, 4)))[0]
    assert copying_score(eigenvalues(q.T @ q)) == pytest.approx(1)
    assert copying_score(eigenvalues(-q.T @ q)) == 0
    assert eigenvalue_balance(eigenvalues(-q.T @ q)) == pytest.approx(-1)
    turn = np.array([[0.0, -1.0], [1.0, 0.0]])
    assert copying_score(eigenvalues(turn)) == pytest.approx(0)  # a turn keeps no direction
    assert np.isnan(copying_score(np.zeros(3, complex)))


def ill_conditioned(smallest: float, d: int = 40, r: int = 6) -> np.ndarray:
    rng = np.random.default_rng(1)
    q, p = np.linalg.qr(rng.standard_normal((d, r)))[0], np.linalg.qr(rng.standard_normal((r, r)))[0]
    return q * np.geomspace(1, smallest, r) @ p


@pytest.mark.parametrize(("smallest", "route"), [(1e-2, "gram"), (1e-7, "qr"), (1e-12, "qr")])
def test_the_accurate_route_is_taken_and_said_where_the_fast_one_would_lose_small_values(smallest, route) -> None:
    left = ill_conditioned(smallest)
    right = np.linalg.qr(np.random.default_rng(2).standard_normal((40, 6)))[0]
    computed = triangle(left, left.T @ left)
    assert computed.route == route
    s = core_singular_values(computed, triangle(right, right.T @ right))
    np.testing.assert_allclose(s, np.geomspace(1, smallest, 6), rtol=1e-3 if smallest < 1e-9 else 1e-6)


@pytest.mark.parametrize("factor", [np.zeros((10, 3)), np.ones((10, 3)), np.eye(10)[:, :3] * [1, 0, 1]])
def test_dependent_columns_take_the_accurate_route(factor: np.ndarray) -> None:
    computed = triangle(factor, factor.T @ factor)
    assert computed.route == "qr"
    np.testing.assert_allclose(computed.r.T @ computed.r, factor.T @ factor, atol=1e-12)
    q, r = orthonormal(factor)
    np.testing.assert_allclose(q @ r, factor, atol=1e-12)
    np.testing.assert_allclose(q.T @ q, np.eye(3), atol=1e-12)


def test_a_factor_that_is_not_finite_has_no_spectrum() -> None:
    broken = np.ones((10, 3))
    broken[4, 1] = np.nan
    finite = np.random.default_rng(0).standard_normal((10, 3))
    computed = triangle(broken, broken.T @ broken)
    assert computed.route == "none"
    assert np.isnan(core_singular_values(computed, triangle(finite, finite.T @ finite))).all()
    assert np.isnan(affine_singular_values(computed, np.ones(3), triangle(finite, finite.T @ finite))).all()


def test_very_different_columns_do_not_need_the_accurate_route() -> None:
    """Cholesky does not mind the columns' lengths, so neither does the choice of the route."""
    factor = np.random.default_rng(3).standard_normal((50, 4)) * [1, 1e-3, 1e-6, 1e-9]
    computed = triangle(factor, factor.T @ factor)
    assert computed.route == "gram"
    np.testing.assert_allclose(
        np.linalg.svd(computed.r, compute_uv=False), np.linalg.svd(factor, compute_uv=False), rtol=1e-6
    )


def test_directionality_is_minus_one_where_columns_alone_stand_out() -> None:
    even, peaked = np.ones(100), np.ones(100)
    peaked[3] = 9
    assert directionality(even, peaked) == -1 and directionality(peaked, even) == 1
    assert directionality(peaked, peaked) == 0 == directionality(even, even)
    assert np.isnan(directionality(np.full(3, np.nan), even))


@pytest.mark.check
def test_gpt2s_symmetry_and_directionality_are_those_of_the_paper() -> None:
    """Whole layers, norms not folded: medians 0.15 (of 2 share - 1) and -0.58 (Saponati et al.)."""
    model = ws.open_model(shared("gpt2-attention"))
    shares, directions = [], []
    for i in range(12):
        w_q, w_k, _ = np.split(model.checkpoint[f"h.{i}.attn.c_attn.weight"].read().astype(np.float64), 3, axis=1)
        w = w_q @ w_k.T
        shares.append(symmetric_share(w_q.T @ w_q, w_k.T @ w_k, w_k.T @ w_q))
        directions.append(directionality(np.linalg.norm(w, axis=1), np.linalg.norm(w, axis=0)))
    assert 2 * np.median(shares) - 1 == pytest.approx(0.15, abs=0.005)
    assert np.median(directions) == pytest.approx(-0.58, abs=0.005)
    quartiles = np.percentile(directions, (25, 75)) - np.median(directions)
    np.testing.assert_allclose(quartiles, (-0.06, 0.13), atol=0.015)
