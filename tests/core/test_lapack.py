"""LAPACK by its address: the same numbers as NumPy's, and other threads go on meanwhile."""

import sys
from collections.abc import Callable
from threading import Event, Thread

import numpy as np
import pytest

from weightscope.core.compute import lapack

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


def test_lapack_leaves_its_input_unchanged() -> None:
    for order in "CF":
        given = np.array(matrix(5), order=order)
        for decompose in EVERY:
            decompose(given)
            assert np.array_equal(given, matrix(5))


def test_nan_is_an_error() -> None:
    for decompose in EVERY:
        for value in (np.nan, np.inf, -np.inf):
            with pytest.raises(np.linalg.LinAlgError, match="not finite"):
                decompose(np.diag([1.0, value, 1.0]))


@pytest.mark.parametrize("decompose", EVERY)
def test_other_threads_run_during_lapack(
    decompose: Callable[[np.ndarray], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    decompose(matrix(2))  # SciPy is imported
    asked, begun, ended = [], Event(), Event()
    original = lapack._routine

    def watched(name: str) -> Callable[..., None]:
        def routine(*arguments: object) -> None:
            asked.append(name)
            if len(asked) == 2:  # the first call asks for the workspace
                begun.set()
            original(name)(*arguments)

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


@pytest.mark.parametrize("decompose", EVERY)
def test_numpy_does_the_work_where_a_signature_is_not_the_expected_one(
    decompose: Callable[[np.ndarray], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def parts() -> tuple[np.ndarray, ...]:
        result = decompose(matrix(5) + matrix(5).T)
        return result if isinstance(result, tuple) else (result,)

    expected = parts()
    monkeypatch.setattr(lapack, "SIGNATURES", dict.fromkeys(lapack.SIGNATURES, "cii"))
    monkeypatch.setattr(lapack, "_routine", lapack._routine.__wrapped__)
    assert lapack._routine("dgesdd") is None
    for ours, numpys in zip(expected, parts(), strict=True):  # signs and the order of eigenvalues may differ
        np.testing.assert_allclose(np.sort(np.abs(ours), axis=None), np.sort(np.abs(numpys), axis=None), atol=1e-12)


def test_a_signature_is_read_by_its_types() -> None:
    assert lapack._parameters("void (char *, int *, __pyx_t_5scipy_6linalg_13cython_lapack_d *)") == "cid"
    assert lapack._parameters("void (char *, long *, double *)") == "c?d"


NO_MATRICES = (
    np.array(3.0), np.ones(1), np.ones(4), np.ones((1, 1, 1)), np.ones((0, 0)), np.ones((0, 3)), np.ones((3, 0)),
    np.ones((2, 2), complex), np.full((2, 2), "1"), np.full((2, 2), 1, object), np.ones((2, 2), "M8[s]"),
    np.broadcast_to(1.0, (lapack.MATRIX, 2)),
)  # fmt: skip


@pytest.mark.parametrize("decompose", EVERY)
@pytest.mark.parametrize("given", NO_MATRICES, ids=lambda given: f"{given.dtype}{given.shape}")
def test_input_that_is_not_a_matrix_is_refused(decompose: Callable[[np.ndarray], object], given: np.ndarray) -> None:
    """LAPACK would write beyond the arrays it is given, or print."""
    with pytest.raises(ValueError, match=r"was expected|LAPACK's 32 bits"):
        decompose(given)


@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (1, 9)])
@pytest.mark.parametrize("decompose", [decompose for decompose in EVERY if decompose is not lapack.singular_values])
def test_matrix_that_is_not_square_is_refused(
    decompose: Callable[[np.ndarray], object], shape: tuple[int, int]
) -> None:
    with pytest.raises(ValueError, match="a square matrix"):
        decompose(np.ones(shape))


@pytest.mark.parametrize("seed", range(40))
def test_any_strides_and_types_give_numpys_numbers(seed: int) -> None:
    """Views backwards, transposed, with gaps or of no stride, of any byte order: the numbers alone count."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 9))
    matrix = rng.integers(-9, 9, (2 * n, 2 * n)).astype(rng.choice(["f2", "<f4", ">f8", "i1", ">i4", "f8"]))
    view = matrix[:: int(rng.choice([2, -2])), :: int(rng.choice([2, -2]))]
    view = [view, view.T, np.broadcast_to(view[0], (n, n)), np.asfortranarray(view), view.astype(bool)][seed % 5]
    plain = np.array(view.tolist(), np.float64)
    expected = np.linalg.svd(plain, compute_uv=False)
    np.testing.assert_allclose(lapack.singular_values(view), expected, atol=1e-12 * (1 + expected.max()))
    np.testing.assert_allclose(lapack.svd(view)[1], expected, atol=1e-12 * (1 + expected.max()))
    np.testing.assert_allclose(lapack.eigenvalues(view).sum(), np.trace(plain), atol=1e-10)
    symmetric = view + view.T
    values = np.linalg.eigvalsh(plain + plain.T if view.dtype != bool else symmetric.astype(float))
    np.testing.assert_allclose(lapack.symmetric_eigenvalues(symmetric), values, atol=1e-10)
    np.testing.assert_allclose(lapack.eigh(symmetric)[0], values, atol=1e-10)
