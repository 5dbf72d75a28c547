"""LAPACK by its address: the same numbers as NumPy's, and other threads go on meanwhile."""

import sys
from collections.abc import Callable
from threading import Event, Thread

import numpy as np
import pytest

from weightscope import lapack

SIZES = (1, 2, 5, 64, 128, 257)
EVERY = (lapack.singular_values, lapack.svd, lapack.eigenvalues, lapack.symmetric_eigenvalues, lapack.eigh)


def matrix(n: int) -> np.ndarray:
    return np.random.default_rng(n).standard_normal((n, n))


@pytest.mark.parametrize("n", SIZES)
def test_singular_values_are_numpys(n: int) -> None:
    np.testing.assert_allclose(lapack.singular_values(matrix(n)), np.linalg.svd(matrix(n), compute_uv=False))


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (130, 128)])
def test_singular_values_of_any_shape_are_numpys(shape: tuple[int, int]) -> None:
    a = np.random.default_rng(0).standard_normal(shape)
    np.testing.assert_allclose(lapack.singular_values(a), np.linalg.svd(a, compute_uv=False))


@pytest.mark.parametrize("n", SIZES)
def test_the_factors_are_orthogonal_and_their_product_is_the_matrix(n: int) -> None:
    u, s, vt = lapack.svd(matrix(n))
    np.testing.assert_allclose(u * s @ vt, matrix(n), atol=1e-12)
    np.testing.assert_allclose(u.T @ u, np.eye(n), atol=1e-12)
    np.testing.assert_allclose(vt @ vt.T, np.eye(n), atol=1e-12)
    assert (np.diff(s) <= 0).all()


@pytest.mark.parametrize("n", SIZES)
def test_eigenvalues_are_numpys(n: int) -> None:
    expected = np.linalg.eigvals(matrix(n)).astype(np.complex128)
    # Each is the nearest of the other's, so that no order has to be agreed on.
    apart = np.abs(lapack.eigenvalues(matrix(n))[:, None] - expected)
    assert max(apart.min(axis=0).max(), apart.min(axis=1).max()) < 1e-10


@pytest.mark.parametrize("n", SIZES)
def test_eigenvalues_of_a_symmetric_matrix_are_numpys(n: int) -> None:
    symmetric = matrix(n) + matrix(n).T
    np.testing.assert_allclose(lapack.symmetric_eigenvalues(symmetric), np.linalg.eigvalsh(symmetric), atol=1e-12 * n)


@pytest.mark.parametrize("n", SIZES)
def test_eigenvectors_are_orthogonal_and_make_the_matrix(n: int) -> None:
    symmetric = matrix(n) + matrix(n).T
    values, vectors = lapack.eigh(symmetric)
    np.testing.assert_allclose(vectors * values @ vectors.T, symmetric, atol=1e-12 * n)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(n), atol=1e-12)


def test_what_is_given_stays_as_it_is() -> None:
    for order in "CF":
        given = np.array(matrix(5), order=order)
        for decompose in EVERY:
            decompose(given)
            assert np.array_equal(given, matrix(5))


def test_a_nan_is_an_error_and_no_number() -> None:
    with pytest.raises(np.linalg.LinAlgError, match="dgesdd"):
        lapack.singular_values(np.full((3, 3), np.nan))


@pytest.mark.parametrize("decompose", EVERY)
def test_other_threads_go_on_meanwhile(
    decompose: Callable[[np.ndarray], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    decompose(matrix(2))  # SciPy is imported
    asked, begun, ended = [], Event(), Event()
    found = lapack._routine

    def watched(name: str) -> Callable[..., None]:
        def routine(*arguments: object) -> None:
            asked.append(name)
            if len(asked) == 2:  # the first call asks for the workspace
                begun.set()
            found(name)(*arguments)

        return routine

    def work() -> None:
        decompose(matrix(500))
        ended.set()

    monkeypatch.setattr(lapack, "_routine", watched)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # from here on a thread goes on only where another lets it
    try:
        thread = Thread(target=work)
        thread.start()
        begun.wait(60)
        assert not ended.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
