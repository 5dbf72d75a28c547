"""A d x d matrix of low rank, kept as its two factors: left @ right.T, never formed except by `dense`."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Factored:
    """The matrix left @ right.T.

    Everything below costs O(d r^2) time and O(d r) memory and is computed in float64.

    Attributes
    ----------
    left, right : arrays of shape (d, r)
    """

    left: np.ndarray
    right: np.ndarray

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

    def svdvals(self) -> np.ndarray:
        """Singular values, descending, shape (r,)."""
        r_left, r_right = (np.asarray(np.linalg.qr(f.astype(np.float64), mode="r")) for f in (self.left, self.right))
        return np.linalg.svd(r_left @ r_right.T, compute_uv=False)

    def eigvals(self) -> np.ndarray:
        """The eigenvalues that can be non-zero, shape (r,), complex, largest magnitude first.

        left @ right.T and right.T @ left share them.
        """
        values = np.linalg.eigvals(self.right.T.astype(np.float64) @ self.left.astype(np.float64))
        return values[np.argsort(-np.abs(values), kind="stable")].astype(np.complex128)

    def frobenius(self) -> float:
        """Frobenius norm: |A B'|_F^2 is the sum of (A'A) * (B'B)."""
        left, right = self.left.astype(np.float64), self.right.astype(np.float64)
        return float(np.sqrt(max(0.0, ((left.T @ left) * (right.T @ right)).sum())))

    def stable_rank(self) -> float:
        """|W|_F^2 / sigma_1^2, between 1 and r; NaN for the zero matrix."""
        s = self.svdvals()
        return float((s**2).sum() / s[0] ** 2) if s[0] > 0 else float("nan")
