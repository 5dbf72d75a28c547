"""Low-rank products against the dense matrix they represent."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightscope.model.layers.factored import ROWS_AT_ONCE, ROWS_OF_BOTH, Factored, inner, inner_products


@st.composite
def factored(draw) -> Factored:
    d, r = draw(st.integers(2, 30)), draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    return Factored(rng.standard_normal((d, min(d, r))), rng.standard_normal((d, min(d, r))))


@settings(deadline=None)
@given(factored())
def test_everything_equals_the_dense_matrix(w: Factored) -> None:
    dense, r = w.dense(), w.rank_bound
    s = np.linalg.svd(dense, compute_uv=False)
    np.testing.assert_allclose(w.svdvals(), s[:r], atol=1e-9 * s[0])
    assert w.frobenius() == pytest.approx(np.linalg.norm(dense))
    assert w.stable_rank() == pytest.approx((s**2).sum() / s[0] ** 2)
    size = np.linalg.norm(dense)  # a trace can be far smaller than what is added up
    assert w.eigvals().sum() == pytest.approx(np.trace(dense), rel=0, abs=1e-9 * size)
    assert (w.eigvals() ** 2).sum() == pytest.approx(np.trace(dense @ dense), rel=0, abs=1e-9 * size**2)
    u, sigma, vt = w.svd()
    np.testing.assert_allclose(u * sigma @ vt, dense, atol=1e-9 * s[0])
    np.testing.assert_allclose(u.T @ u, np.eye(r), atol=1e-9)
    np.testing.assert_allclose(vt @ vt.T, np.eye(r), atol=1e-9)


@settings(deadline=None)
@given(factored(), st.integers(0, 10**6))
def test_the_spectrum_does_not_depend_on_the_gauge(w: Factored, seed: int) -> None:
    """W_Q R and W_K R^-T give the same W_QK, hence the same singular values."""
    r = w.rank_bound
    gauge = np.linalg.qr(np.random.default_rng(seed).standard_normal((r, r)))[0] * np.geomspace(1, 10, r)
    moved = Factored(w.left @ gauge, w.right @ np.linalg.inv(gauge).T)
    np.testing.assert_allclose(moved.svdvals(), w.svdvals(), atol=1e-9 * w.svdvals()[0])


def test_the_zero_matrix_has_no_stable_rank() -> None:
    assert np.isnan(Factored(np.zeros((4, 2)), np.ones((4, 2))).stable_rank())


@pytest.mark.parametrize("d", [1, ROWS_AT_ONCE, ROWS_AT_ONCE + 1, 3 * ROWS_AT_ONCE - 1, ROWS_OF_BOTH + 1])
def test_inner_products_by_blocks_equal_those_of_all_rows(d: int) -> None:
    a, b = np.random.default_rng(d).standard_normal((2, d, 4), np.float32)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    np.testing.assert_allclose(inner(a), wide_a.T @ wide_a, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(inner(a, b), wide_a.T @ wide_b, rtol=1e-12, atol=1e-12)
    expected = wide_a.T @ wide_a, wide_b[:, :3].T @ wide_b[:, :3], wide_a.T @ wide_b[:, :3]  # of two widths
    for gram in (None, expected[0]):
        for product, dense in zip(inner_products(a, b[:, :3], gram=gram), expected, strict=True):
            np.testing.assert_allclose(product, dense, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_the_norm_of_a_nonfinite_matrix_is_not_finite(broken: float) -> None:
    left = np.ones((5, 2))
    left[1, 1] = broken
    assert not np.isfinite(Factored(left, np.ones((4, 2))).frobenius())
    assert not np.isfinite(Factored(np.ones((4, 2)), left).frobenius())


KEYS = [
    (slice(3), slice(3)), (0, 1), (-1, slice(None)), (slice(None), 2), 4, slice(1, 9, 3), [0, 5], ([0, 5], 2),
    ([0, 5], slice(2)), (slice(2), [0, 5]), ([0, 5, 5], [1, 2, 3]), np.arange(6) > 3, (np.int64(2), np.int8(1)),
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_elements_are_those_of_the_dense_matrix(key: object) -> None:
    rng = np.random.default_rng(0)
    w = Factored(rng.normal(size=(6, 2)).astype(np.float32), rng.normal(size=(6, 2)).astype(np.float32))
    expected = w.dense()[key]
    assert np.shape(w[key]) == np.shape(expected) and np.asarray(w[key]).dtype == np.float32
    np.testing.assert_allclose(w[key], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "key", [(0, 1, 2), (0,), (), None, ..., (..., 0), 1.5, "0", (slice(2), None), True, [[0], [1]]]
)
def test_what_is_no_element_is_refused(key: object) -> None:
    with pytest.raises(
        IndexError, match=r"Factored\(4 x 3, rank <= 2\) takes a row, or a row and a column: w\[:3, :3\]"
    ):
        Factored(np.ones((4, 2)), np.ones((3, 2)))[key]


def test_an_element_beyond_the_matrix_is_refused_and_rows_end() -> None:
    w = Factored(np.ones((4, 2)), np.ones((3, 2)))
    with pytest.raises(IndexError, match="out of bounds"):
        w[0, 3]
    assert [row.shape for row in w] == [(3,)] * 4


def test_norm_and_trace_are_those_of_the_dense_matrix() -> None:
    rng = np.random.default_rng(0)
    w = Factored(rng.normal(size=(6, 2)), rng.normal(size=(6, 2)))
    assert w.norm() == w.frobenius() == pytest.approx(np.linalg.norm(w.dense()))
    assert w.trace() == pytest.approx(np.trace(w.dense())) == pytest.approx(w.eigvals().sum().real)
    with pytest.raises(ValueError, match=r"Factored\(4 x 3, rank <= 2\) has no trace: it is not square"):
        Factored(np.ones((4, 2)), np.ones((3, 2))).trace()
