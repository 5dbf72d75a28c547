"""Decompositions of small float64 matrices by LAPACK, called so that threads run side by side.

NumPy's `linalg` keeps the interpreter to itself while LAPACK works on a matrix of up to 500 rows (numpy/numpy#7179),
and so do SciPy's functions on any: threads that decompose one each take turns, however many cores there are. SciPy
publishes where the routines are that it is linked to, in `scipy.linalg.cython_lapack`, and ctypes lets others go on
while it calls one.

Integers go in as 64 bits. SciPy can be built for either width, and where 32 are read they are the lower half, which
stands first on every machine that this package runs on.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np


def singular_values(a: np.ndarray) -> np.ndarray:
    """Singular values, descending.

    Parameters
    ----------
    a : (m, n) array, finite

    Returns
    -------
    float64 (min(m, n),) array

    Raises
    ------
    numpy.linalg.LinAlgError
        LAPACK did not converge, or a value is NaN.

    Examples
    --------
    >>> singular_values(np.array([[0.0, 2.0], [1.0, 0.0]]))
    array([2., 1.])
    """
    a, none, (m, n) = _copied(a), np.empty(1), a.shape
    s = np.empty(min(m, n))
    _run("dgesdd", ("N", m, n, a, m, s, none, 1, none, 1), (np.empty(8 * len(s), np.int64),))
    return s


def svd(a: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """u, s, vt with a = u diag(s) vt, s descending; see `singular_values`.

    Parameters
    ----------
    a : (n, n) array, finite

    Returns
    -------
    float64 (n, n), (n,) and (n, n) arrays
    """
    a, n, s = _copied(a), len(a), np.empty(len(a))
    u, vt = (np.empty((n, n), order="F") for _ in range(2))
    _run("dgesdd", ("A", n, n, a, n, s, u, n, vt, n), (np.empty(8 * n, np.int64),))
    return u, s, vt


def eigenvalues(a: np.ndarray) -> np.ndarray:
    """Eigenvalues of a matrix that need not be symmetric, in no order; errors as for `singular_values`.

    Parameters
    ----------
    a : (n, n) array, finite

    Returns
    -------
    complex128 (n,) array
    """
    a, n, none = _copied(a), len(a), np.empty(1)
    real, imaginary = np.empty(n), np.empty(n)
    _run("dgeev", ("N", "N", n, a, n, real, imaginary, none, 1, none, 1))
    return real + 1j * imaginary


def symmetric_eigenvalues(a: np.ndarray) -> np.ndarray:
    """Eigenvalues of a symmetric matrix, ascending; errors as for `singular_values`.

    Parameters
    ----------
    a : (n, n) array, finite

    Returns
    -------
    float64 (n,) array
    """
    a, n, values = _copied(a), len(a), np.empty(len(a))
    _run("dsyevd", ("N", "L", n, a, n, values), (np.empty(1, np.int64), 1))
    return values


def eigh(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues of a symmetric matrix, ascending, and its eigenvectors as columns; see `symmetric_eigenvalues`.

    Parameters
    ----------
    a : (n, n) array, finite

    Returns
    -------
    float64 (n,) and (n, n) arrays
    """
    vectors, n, values = _copied(a), len(a), np.empty(len(a))
    size = 3 + 5 * n  # of LAPACK's second workspace, as its manual has it
    _run("dsyevd", ("V", "L", n, vectors, n, values), (np.empty(size, np.int64), size))
    return values, vectors


def _copied(a: np.ndarray) -> np.ndarray:
    """LAPACK writes over what it is given, and goes down columns first."""
    return np.array(a, np.float64, order="F")


def _run(name: str, first: Sequence[Any], last: Sequence[Any] = ()) -> None:
    """Call a routine on its arguments before and after its workspace, once it has said how much of that it needs."""
    routine, info = _routine(name), ctypes.c_int64()

    def call(work: np.ndarray, size: int) -> None:
        routine(*map(_pointer, (*first, work, size, *last)), ctypes.byref(info))

    room = np.empty(1)
    call(room, -1)
    call(np.empty(int(room[0])), int(room[0]))
    if info.value:
        raise np.linalg.LinAlgError(f"LAPACK's {name} found no end: it did not converge, or a value is NaN")


def _pointer(argument: Any) -> Any:
    """Fortran takes everything by its address."""
    if isinstance(argument, np.ndarray):
        return ctypes.c_void_p(argument.ctypes.data)
    return ctypes.c_char_p(argument.encode()) if isinstance(argument, str) else ctypes.byref(ctypes.c_int64(argument))


@cache
def _routine(name: str) -> Callable[..., None]:
    """A LAPACK routine of those that SciPy is linked to."""
    from scipy.linalg import cython_lapack  # SciPy takes a while to import

    capsule, api = cython_lapack.__pyx_capi__[name], ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    signature = api.PyCapsule_GetName(capsule)
    return ctypes.CFUNCTYPE(None)(api.PyCapsule_GetPointer(capsule, signature))
