"""Changes of a factor, a map and the spaces they act on between two checkpoints."""

from dataclasses import dataclass

import numpy as np
from scipy.linalg import solve_triangular

from weightscope.core.compute import lapack
from weightscope.core.results import ShowsShapes
from weightscope.model.layers.factored import Factored, coordinates, orthonormal, route_of, triangle


def principal_angles(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Principal angles of two column spaces in radians, ascending (Golub and Van Loan, 6.4.3).

    a (d, r), b (d, s) -> (r, s).
    """
    (q_a, _), (q_b, _) = orthonormal(a), orthonormal(b)
    inside = q_a.T @ q_b
    cosines = lapack.singular_values(inside)
    # arccos loses small angles: cos 1e-8 is 1 in float64. Their sines are the singular values of
    # b's part outside a, read off along its right singular vectors so that they are not squared.
    outside = q_b - q_a @ inside  # (d, s)
    vectors = lapack.eigh(outside.T @ outside)[1]
    sines = np.sort(np.linalg.norm(outside @ vectors, axis=0))[: len(cosines)]
    return np.arctan2(sines, cosines)


ROWS_OF_BOTH = 2048  # rows of a factor in two checkpoints that are float64 at a time
SURE = 1e-8  # largest rounding error of squared sines, as a share of the largest


@dataclass(frozen=True, eq=False, repr=False)
class Moved(ShowsShapes):
    """A factor in two checkpoints, A and B = A + D, (d, r) each, as the Gram matrix of [A D].

    All changes of its heads follow from that. Where D is small, they are as small: D itself is
    multiplied, not the difference of two products.
    """

    gram: np.ndarray  # (2r, 2r), float64

    @classmethod
    def of(cls, a: np.ndarray, b: np.ndarray) -> "Moved":
        """The move between two factors of any precision; a resized head's missing columns are
        zeros.
        """
        r = max(a.shape[1], b.shape[1])
        a, b = (w if w.shape[1] == r else np.pad(w, ((0, 0), (0, r - w.shape[1]))) for w in (a, b))
        total = np.zeros((2 * r, 2 * r))
        for start in range(0, len(a), ROWS_OF_BOTH):
            rows = slice(start, start + ROWS_OF_BOTH)
            both = np.concatenate((a[rows], b[rows]), axis=1, dtype=np.float64)
            both[:, r:] -= both[:, :r]
            total += both.T @ both
        return cls(total)

    @property
    def blocks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A'A, A'D and D'D, (r, r) each."""
        r = len(self.gram) // 2
        return self.gram[:r, :r], self.gram[:r, r:], self.gram[r:, r:]

    @property
    def after(self) -> np.ndarray:
        """B'B, (r, r)."""
        before, cross, change = self.blocks
        return before + cross + cross.T + change

    def times(self, before: np.ndarray, after: np.ndarray) -> "Moved":
        """The move from A T to B U, for (r, r) matrices T and U."""
        # [A T, B U - A T] = [A D] [[T, U - T], [0, U]]
        combined = np.block([[before, after - before], [np.zeros_like(before), after]])
        return Moved(combined.T @ self.gram @ combined)


def norms_of_product(left: Moved, right: Moved) -> tuple[float, float]:
    """|W_A|_F of W = L R', and |W_B - W_A|_F; exactly 0 where nothing has changed."""
    before, cross, change = left.blocks
    a, across, moved = right.blocks
    # W_B - W_A = [D_L A_L] [B_R D_R]', and |X Y'|^2 is the sum over <X'X, Y'Y>.
    of_left = np.block([[change, cross.T], [cross, before]])
    of_right = np.block([[right.after, across + moved], [across.T + moved, moved]])
    squares = (before * a).sum(), (of_left * of_right).sum()
    size, changed = np.sqrt(np.maximum(0.0, squares))  # np.maximum, which unlike max keeps a NaN
    return float(size), float(changed)


def relative_change(a: Factored, b: Factored) -> float:
    """|B - A|_F / |A|_F; infinite if only A is zero, 0 if both are, NaN if not finite.

    Unlike the changes of W_Q and of W_K, it does not see a change of basis within the head, which
    changes no score.
    """
    size, moved = norms_of_product(Moved.of(a.left, b.left), Moved.of(a.right, b.right))
    return relative(moved, size)


def relative_size(change: Factored, a: Factored) -> float:
    """|change|_F / |A|_F; infinite if only A is zero, 0 if both are, NaN if unknown."""
    return relative(change.frobenius(), a.frobenius())


def relative(moved: float, before: float) -> float:
    """The ratio; infinite if there was nothing before and something moved, 0 if nothing did."""
    if before == 0:
        return float("inf") if moved > 0 else float(moved)  # 0 or NaN
    return float(moved / before)


def moved_angles(moved: Moved, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Principal angles (r,), ascending, between a factor's column spaces in two checkpoints.

    a, b (d, r). From products alone where rounding leaves the sines, else (as within one space)
    from the factors.
    """
    before, cross, change = moved.blocks
    if not np.isfinite(moved.gram).all():
        return np.full(len(before), np.nan)
    roots = triangle(a, before), triangle(b, moved.after)
    if route_of(*roots) == "gram":
        if not change.any():
            return np.zeros(len(before))
        inverse = coordinates(roots[1], np.eye(len(before)))
        inside = solve_triangular(roots[0].r, cross, trans="T")  # Q_A'D
        outside = change - inside.T @ inside  # B outside of A's space is D outside of it
        squares = lapack.symmetric_eigenvalues(inverse.T @ outside @ inverse)
        rounding = np.finfo(np.float64).eps * (inverse**2).sum() * change.trace()
        if rounding <= SURE * squares[-1]:
            cosines = lapack.singular_values((roots[0].r + inside) @ inverse)
            return np.arctan2(np.sqrt(np.maximum(squares, 0.0)), cosines)
    return principal_angles(a, b)
