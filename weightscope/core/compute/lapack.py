"""Decompositions of small float64 matrices by LAPACK, in threads that run in parallel.

NumPy's `linalg` holds the lock while LAPACK works on a matrix of up to 500 rows (numpy/numpy#7179),
and SciPy's functions always do. Here ctypes calls LAPACK, and releases the lock;
`scipy.linalg.cython_lapack` publishes the addresses of the routines and their signatures. Where a
signature is not the expected one, NumPy does the work.

Integers are passed as 64 bits. Where SciPy's LAPACK reads 32, it reads the lower half: machines are
little-endian.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

# Parameters of each routine, all pointers: c(haracter), i(nteger), d(ouble).
SIGNATURES = {"dgesdd": "ciididdididiii", "dgeev": "ccididddididii", "dsyevd": "ccididdiiii"}
MATRIX = 2**31 // 5  # numbers of a matrix; its workspace has about four times as many


def singular_values(a: np.ndarray) -> np.ndarray:
    """Singular values, descending: a (m, n) -> (min(m, n),).

    Examples
    --------
    >>> singular_values(np.array([[0.0, 2.0], [1.0, 0.0]]))
    array([2., 1.])
    """
    a = _checked(a)
    if _routine("dgesdd") is None:
        return np.linalg.svd(a, compute_uv=False)
    none, (m, n) = np.empty(1), a.shape
    s = np.empty(min(m, n))
    _run("dgesdd", ("N", m, n, a, m, s, none, 1, none, 1), (np.empty(8 * len(s), np.int64),))
    return s


def svd(a: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """u, s, vt with a = u diag(s) vt, s descending: a (n, n) -> (n, n), (n,), (n, n)."""
    a = _checked(a, square=True)
    if _routine("dgesdd") is None:
        u, s, vt = np.linalg.svd(a)
        return u, s, vt
    n, s = len(a), np.empty(len(a))
    u, vt = (np.empty((n, n), order="F") for _ in range(2))
    _run("dgesdd", ("A", n, n, a, n, s, u, n, vt, n), (np.empty(8 * n, np.int64),))
    return u, s, vt


def eigenvalues(a: np.ndarray) -> np.ndarray:
    """Eigenvalues of any square matrix, in no order: a (n, n) -> (n,) complex."""
    a = _checked(a, square=True)
    if _routine("dgeev") is None:
        return np.linalg.eigvals(a).astype(np.complex128)
    n, none = len(a), np.empty(1)
    real, imaginary = np.empty(n), np.empty(n)
    _run("dgeev", ("N", "N", n, a, n, real, imaginary, none, 1, none, 1))
    return real + 1j * imaginary


def symmetric_eigenvalues(a: np.ndarray) -> np.ndarray:
    """Eigenvalues of a symmetric matrix, ascending: a (n, n) -> (n,)."""
    a = _checked(a, square=True)
    if _routine("dsyevd") is None:
        return np.linalg.eigvalsh(a)
    n, values = len(a), np.empty(len(a))
    _run("dsyevd", ("N", "L", n, a, n, values), (np.empty(1, np.int64), 1))
    return values


def eigh(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric a (n, n) -> ascending eigenvalues (n,), eigenvectors as columns (n, n)."""
    vectors = _checked(a, square=True)
    if _routine("dsyevd") is None:
        values, vectors = np.linalg.eigh(vectors)
        return values, vectors
    n, values = len(vectors), np.empty(len(vectors))
    size = 3 + 5 * n  # LAPACK's integer workspace, from its manual
    _run("dsyevd", ("V", "L", n, vectors, n, values), (np.empty(size, np.int64), size))
    return values, vectors


def _checked(a: np.ndarray, *, square: bool = False) -> np.ndarray:
    """A float64 copy in column-major order, which LAPACK overwrites and must not exceed.

    A ValueError for what is no matrix of real numbers, a LinAlgError where one is not finite.
    """
    a = np.asarray(a)
    is_matrix = a.ndim == 2 and a.size > 0 and a.dtype.kind in "fiub"
    if not is_matrix or (square and a.shape[0] != a.shape[1]):
        wanted = f"a {'square ' * square}matrix of at least one real number"
        raise ValueError(f"an array of {a.dtype} {a.shape}; {wanted} was expected")
    if a.size > MATRIX:
        limit = f"LAPACK's 32 bits count at most {MATRIX} numbers"
        raise ValueError(f"a matrix of {a.shape[0]} x {a.shape[1]}; {limit}")
    copied = np.array(a, np.float64, order="F")
    if not np.isfinite(copied).all():
        raise np.linalg.LinAlgError("a value of the matrix is not finite")
    return copied


def _run(name: str, first: Sequence[Any], last: Sequence[Any] = ()) -> None:
    """Call a routine with the arguments around its workspace, whose size it is asked for first."""
    routine, info = _routine(name), ctypes.c_int64()
    assert routine is not None

    def call(work: np.ndarray, size: int) -> None:
        routine(*map(_pointer, (*first, work, size, *last)), ctypes.byref(info))

    room = np.empty(1)
    call(room, -1)
    call(np.empty(int(room[0])), int(room[0]))
    if info.value:
        raise np.linalg.LinAlgError(f"LAPACK's {name} did not converge")


def _pointer(argument: Any) -> Any:
    """An argument's address, as Fortran takes every one."""
    if isinstance(argument, np.ndarray):
        return ctypes.c_void_p(argument.ctypes.data)
    if isinstance(argument, str):
        return ctypes.c_char_p(argument.encode())
    return ctypes.byref(ctypes.c_int64(argument))


@cache
def _routine(name: str) -> Callable[..., None] | None:
    """A routine of the LAPACK that SciPy is linked to; None if its signature is unexpected."""
    from scipy.linalg import cython_lapack  # SciPy takes a while to import

    capsule, api = cython_lapack.__pyx_capi__[name], ctypes.pythonapi
    api.PyCapsule_GetName.restype = ctypes.c_char_p
    api.PyCapsule_GetName.argtypes = [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    signature = api.PyCapsule_GetName(capsule)
    if _parameters(signature.decode()) != SIGNATURES[name]:
        return None
    return ctypes.CFUNCTYPE(None)(api.PyCapsule_GetPointer(capsule, signature))


def _parameters(signature: str) -> str:
    """A C signature as in SIGNATURES: "void (char *, int *)" -> "ci"; "?" for other types."""
    types = signature.removeprefix("void (").removesuffix(")").split(", ")
    letters = {"char *": "c", "int *": "i", "double *": "d"}
    plain = ("double *" if name.endswith("cython_lapack_d *") else name for name in types)
    return "".join(letters.get(name, "?") for name in plain)
