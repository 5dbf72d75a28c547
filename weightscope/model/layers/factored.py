"""A d x d matrix of low rank as two factors, left @ right.T; only `dense` multiplies them out.

With left = Q_L R_L and right = Q_R R_R, Q orthonormal, the matrix has the singular values of the r
x r core R_L R_R'. The triangles R come from a QR (accurate) or from the Cholesky factor of the Gram
matrix (fast); see `triangle`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weightscope.core.compute import lapack
from weightscope.core.compute.device import CPU, Device
from weightscope.core.results import SPECTRA, ShowsShapes, function_at, notebook
from weightscope.core.tables import Column, Table

# Cholesky of a Gram matrix squares the condition number: the smallest singular value is off by
# about eps / rcond^2 of itself, rcond the one of the triangle with unit columns. Here that is 1e-6.
LEAST_RCOND = 1.5e-5
# Rows of a factor converted to float64 at a time: half a megabyte at a head's usual width, which
# stays in the cache until the product, without a float64 copy of the whole factor.
ROWS_AT_ONCE = 512
MOST_DENSE = 1 << 24  # elements that NumPy may multiply out on its own: 4096 x 4096
# Rows of two factors side by side: more, as their product is four times as large and is written for
# every block.
ROWS_OF_BOTH = 4096


@dataclass(frozen=True, eq=False, repr=False)
class Factored:
    """The matrix left @ right.T, which multiplies like any matrix.

    Every method but `dense` takes O(d r^2) time and O(d r) memory, and computes in float64.

    Attributes
    ----------
    left, right : arrays of shape (d, r)

    Examples
    --------
    >>> import numpy as np
    >>> import weightscope as ws
    >>> w = ws.Factored(np.eye(4)[:, :2], 3 * np.eye(4)[:, :2])
    >>> w
    Factored(4 x 4, rank <= 2)
    >>> w.svdvals()
    array([3., 3.])
    >>> np.ones(4) @ w, w.T @ np.ones((4, 1))
    (array([3., 3., 0., 0.]), array([[3.],
           [3.],
           [0.],
           [0.]]))
    """

    left: np.ndarray
    right: np.ndarray

    def __post_init__(self) -> None:
        shapes = np.shape(self.left), np.shape(self.right)
        if [len(shape) for shape in shapes] != [2, 2] or shapes[0][1] != shapes[1][1]:
            raise ValueError(
                f"left has shape {shapes[0]} and right {shapes[1]}; expected (d, r) of the same r"
            )

    __array_ufunc__ = None  # so that NumPy leaves x @ w to this class

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The dense matrix, for `np.asarray` and its callers; a large one needs `dense()`."""
        if self.shape[0] * self.shape[1] > MOST_DENSE:
            raise TypeError(
                f"{self} is too large to become an array unasked; `.dense()` multiplies it out"
            )
        return np.asarray(self.dense(), dtype)

    def __repr__(self) -> str:
        return f"Factored({self.shape[0]} x {self.shape[1]}, rank <= {self.rank_bound})"

    def __matmul__(self, y: Any) -> Any:
        """w @ y for y of shape (d,) or (d, n); the product with another Factored is Factored."""
        if isinstance(y, Factored):
            if self.shape[1] != y.shape[0]:
                raise ValueError(f"{self} @ {y}: the second needs {self.shape[1]} rows")
            return Factored(self @ y.left, y.right)
        y = _numbers(y, f"{self} @ y")
        d = self.shape[1]
        if y.shape[-2:][:1] != (d,):  # the length of a vector, the rows of a matrix
            raise ValueError(f"{self} @ y: y has shape {y.shape}; expected ({d},) or ({d}, n)")
        return self.left @ (self.right.T @ y)

    def __rmatmul__(self, x: Any) -> np.ndarray:
        """x @ w for x of shape (d,) or (..., n, d)."""
        x = _numbers(x, f"x @ {self}")
        d = self.shape[0]
        if x.shape[-1:] != (d,):
            raise ValueError(f"x @ {self}: x has shape {x.shape}; expected ({d},) or (n, {d})")
        return np.asarray((x @ self.left) @ self.right.T)

    def __getitem__(self, key: Any) -> Any:
        """Elements, as of the dense matrix: w[0, 1], w[:3, :3], w[[0, 5]]; only they are computed.

        Raises
        ------
        IndexError
            The key is not a row, or a row and a column, each a whole number, a slice or a list.
        """
        rows, columns = key if isinstance(key, tuple) and len(key) == 2 else (key, slice(None))
        places = [np.asarray(part) for part in (rows, columns) if not isinstance(part, slice)]
        if (isinstance(key, tuple) and len(key) != 2) or not all(map(_is_index, places)):
            raise IndexError(f"{self} takes a row, or a row and a column: w[:3, :3]")
        left, right = self.left[rows], self.right[columns]
        if [place.ndim for place in places] == [1, 1]:  # pairs, as NumPy takes two lists
            return (left * right).sum(axis=1)
        return left @ right.T

    @property
    def T(self) -> "Factored":  # noqa: N802 - as NumPy calls it
        """The transpose."""
        return Factored(self.right, self.left)

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[0], self.right.shape[0]

    @property
    def rank_bound(self) -> int:
        """r: no more singular values than this are non-zero."""
        return int(self.left.shape[1])

    def dense(self) -> np.ndarray:
        """The whole (d, d) matrix."""
        return self.left @ self.right.T

    def svd(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Thin singular value decomposition by a QR of each factor and an SVD of the r x r core.

        Returns
        -------
        u : (d, r) array, s : (r,) array, vt : (r, d) array
            float64, singular values descending.
        """
        q_left, r_left = np.linalg.qr(self.left.astype(np.float64))
        q_right, r_right = np.linalg.qr(self.right.astype(np.float64))
        u, s, vt = np.linalg.svd(r_left @ r_right.T)  # (r, r) core
        return q_left @ u, s, vt @ q_right.T

    def leading(
        self, k: int | Callable[[np.ndarray], int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Singular vectors 1 .. k and all singular values, from triangles without whole orthonormal
        factors.

        Parameters
        ----------
        k : int, or function of the singular values

        Returns
        -------
        left : (d, k) array, s : (r,) array, right : (d, k) array
            float64; each vector pair is signed so that the left one's largest component is
            positive.
        """
        roots = triangle(self.left, inner(self.left)), triangle(self.right, inner(self.right))
        u, s, vt = lapack.svd(roots[0].r @ roots[1].r.T)  # (r, r) core
        shown = slice(k if isinstance(k, int) else k(s))
        left, right = (
            spanned(self.left, roots[0], u[:, shown]),
            spanned(self.right, roots[1], vt[shown].T),
        )
        signs = signs_of(left)
        return left * signs, s, right * signs

    def svdvals(self) -> np.ndarray:
        """Singular values, descending, shape (r,)."""
        r_left, r_right = (
            np.asarray(np.linalg.qr(f.astype(np.float64), mode="r"))
            for f in (self.left, self.right)
        )
        return np.linalg.svd(r_left @ r_right.T, compute_uv=False)

    def eigvals(self) -> np.ndarray:
        """The eigenvalues that can be non-zero, shape (r,), complex, largest magnitude first.

        left @ right.T and right.T @ left share them.
        """
        if self.shape[0] != self.shape[1]:
            raise ValueError(f"{self} has no eigenvalues: it is not square")
        values = np.linalg.eigvals(inner(self.right, self.left))
        return values[np.argsort(-np.abs(values), kind="stable")].astype(np.complex128)

    def frobenius(self) -> float:
        """Frobenius norm: |A B'|_F^2 = sum of (A'A) * (B'B); NaN or infinite if an element is."""
        with np.errstate(invalid="ignore", over="ignore"):
            squared = (inner(self.left) * inner(self.right)).sum()
        return float(np.sqrt(np.maximum(0.0, squared)))  # np.maximum, which unlike max keeps a NaN

    norm = frobenius

    def trace(self) -> float:
        """Sum of the diagonal, which is also the sum of `eigvals`."""
        if self.shape[0] != self.shape[1]:
            raise ValueError(f"{self} has no trace: it is not square")
        return float(np.einsum("dr,dr", self.left, self.right, dtype=np.float64))

    def stable_rank(self) -> float:
        """|W|_F^2 / sigma_1^2, between 1 and r; NaN for the zero matrix."""
        s = self.svdvals()
        return float((s**2).sum() / s[0] ** 2) if s[0] > 0 else float("nan")

    def plot_spectrum(self) -> Any:
        """A Matplotlib figure of the singular values, in the caller's style."""
        return function_at(SPECTRA)({"": self}, repr(self))

    def _repr_png_(self) -> bytes:
        return bytes(self.plot_spectrum()._repr_png_())

    def _repr_html_(self) -> str:
        return notebook(repr(self), spectra({"": self}), picture=self._repr_png_())


def _is_index(place: np.ndarray) -> bool:
    """True for a whole number or a list of them, and for a mask."""
    return place.dtype.kind in "iub"[: 2 + place.ndim] and place.ndim < 2


def _numbers(given: Any, product: str) -> np.ndarray:
    """The other operand of a product as an array; refuse one that does not hold numbers."""
    try:
        array = np.asarray(given)
    except ValueError:  # rows of several lengths
        array = np.empty(0, object)
    if not np.can_cast(array.dtype, np.clongdouble):
        kind = f"{type(given).__name__} of dtype {array.dtype}"
        raise ValueError(f"{product}: expected an array of numbers, not {kind}")
    return array


def spectra(maps: Mapping[str, Factored]) -> Table:
    """One row per matrix: its first singular values, norm and stable rank."""
    header: list[str | Column] = [
        "matrix",
        *(Column(f"sigma{i}", symbol=f"$σ_{i}$") for i in (1, 2)),
        Column("frobenius", symbol="$|W|_F$", meaning="Frobenius norm"),
        Column("stable_rank", symbol="stable rank", meaning="$|W|_F^2 / σ_1^2$"),
    ]
    rows = []
    for symbol, w in maps.items():
        s = np.append(w.svdvals(), [np.nan, np.nan])
        rows.append((symbol or str(w), s[0], s[1], w.frobenius(), w.stable_rank()))
    return Table.of_rows(header, rows)


def inner(a: Any, b: Any = None, device: Device = CPU) -> np.ndarray:
    """a'b in float64, shape (r, s); the Gram matrix a'a where there is no b: a (d, r), b (d, s)."""
    if device is not CPU:
        left, right = (device.xp.astype(x, device.xp.float64) for x in (a, a if b is None else b))
        return device.get(left.T @ right)
    total = np.zeros((a.shape[1], (a if b is None else b).shape[1]))
    for start in range(0, len(a), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        x = a[rows].astype(np.float64, copy=False)
        total += x.T @ (x if b is None else b[rows].astype(np.float64, copy=False))
    return total


def inner_products(
    a: Any, b: Any, device: Device = CPU, gram: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a'a, b'b and a'b in float64; `gram` is a'a where it is known: a (d, r), b (d, s).

    Else all come, on the CPU, from one symmetric product of both side by side.
    """
    if device is not CPU:
        known = inner(a, device=device) if gram is None else gram
        return known, inner(b, device=device), inner(a, b, device)
    r, s = a.shape[1], b.shape[1]
    total = np.zeros((r + s,) * 2)
    for start in range(0, len(a), ROWS_OF_BOTH):
        rows = slice(start, start + ROWS_OF_BOTH)
        both = np.concatenate((a[rows].T, b[rows].T), dtype=np.float64)  # as W_Q, W_K are stored
        if gram is None:
            total += both @ both.T
        else:
            total[r:, r:] += both[r:] @ both[r:].T
            total[:r, r:] += both[:r] @ both[r:].T
    return total[:r, :r] if gram is None else gram, total[r:, r:], total[:r, r:]


@dataclass(frozen=True, eq=False, repr=False)
class Triangle(ShowsShapes):
    """R of factor = Q R, and the route it was found by."""

    # (r, r) upper triangular up to the sign of its rows; R'R is the Gram matrix
    r: np.ndarray = field(repr=False)
    route: str  # "none" where the factor is not finite and `r` is NaN


def triangle(factor: np.ndarray, gram: np.ndarray) -> Triangle:
    """R of factor = Q R: from the Gram matrix where small singular values survive it, else by QR.

    factor (d, r), gram (r, r).
    """
    if not np.isfinite(gram).all():  # a NaN or infinity in a column reaches its diagonal element
        return Triangle(np.full_like(gram, np.nan), "none")
    # SciPy takes a while to import, and `import weightscope` must not
    from scipy.linalg.lapack import dtrcon

    try:
        upper = np.linalg.cholesky(gram).T
    except np.linalg.LinAlgError:  # a column is zero, or the columns are dependent up to rounding
        return Triangle(_qr_triangle(factor), "qr")
    # Cholesky is indifferent to the columns' lengths, so its error is too
    lengths = np.sqrt(gram.diagonal())
    rcond, _ = dtrcon(upper / lengths, norm="1", uplo="U")
    if rcond < LEAST_RCOND:
        return Triangle(_qr_triangle(factor), "qr")
    return Triangle(upper, "gram")


def orthonormal(factor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Q (d, r) and R (r, r) of factor = Q R in float64, by the fast route where it is accurate."""
    wide = factor.astype(np.float64)
    root = triangle(wide, wide.T @ wide)
    if root.route != "gram":
        q, r = np.linalg.qr(wide)
        return q, r
    return wide @ coordinates(root, np.eye(len(root.r))), root.r


def spanned(factor: np.ndarray, root: Triangle, inside: np.ndarray) -> np.ndarray:
    """Q @ inside of factor = Q R in float64, for few columns, without Q where R is enough.

    factor (d, r), inside (r, k).
    """
    if root.route != "gram":
        return np.asarray(np.linalg.qr(factor.astype(np.float64))[0] @ inside)
    return combined(factor, coordinates(root, inside))


def coordinates(root: Triangle, inside: np.ndarray) -> np.ndarray:
    """Coefficients (r, k) of a factor's columns for Q @ inside; (r, 0) if R is not enough.

    inside (r, k).
    """
    from scipy.linalg import solve_triangular

    return np.asarray(solve_triangular(root.r, inside)) if root.route == "gram" else inside[:, :0]


def combined(factor: np.ndarray, how: np.ndarray) -> np.ndarray:
    """factor @ how in float64, (d, k), a block of rows at a time; factor (d, r) of any dtype."""
    product = np.empty((len(factor), how.shape[1]))
    for start in range(0, len(factor), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        np.matmul(factor[rows].astype(np.float64, copy=False), how, out=product[rows])
    return product


def signs_of(vectors: np.ndarray) -> np.ndarray:
    """The sign of each column's largest component, (k,); singular vectors are defined up to it."""
    return np.asarray(np.sign(vectors[np.abs(vectors).argmax(axis=0), np.arange(vectors.shape[1])]))


def _qr_triangle(factor: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.qr(factor.astype(np.float64), mode="r"))


def route_of(*triangles: Triangle) -> str:
    """The route of a product: the slower of its factors' routes."""
    return max((t.route for t in triangles), key=("gram", "qr", "none").index)


def core_singular_values(
    left: Triangle, right: Triangle, middle: np.ndarray | None = None
) -> np.ndarray:
    """Singular values of left_factor @ middle @ right_factor.T, descending, (r,); NaN if not
    finite.

    middle (r, r).
    """
    core = left.r @ right.r.T if middle is None else left.r @ middle @ right.r.T  # (r, r)
    if "none" in (left.route, right.route):
        return np.full(len(core), np.nan)
    return lapack.singular_values(core)
