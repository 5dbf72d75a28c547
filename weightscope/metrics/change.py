"""How far a head has moved between two checkpoints, from its factors."""

import numpy as np

from weightscope.attention.factored import Factored
from weightscope.metrics.sketch import principal_angles


def difference(a: Factored, b: Factored) -> Factored:
    """B - A as a product of rank 2r: [L_B - L_A, L_A] [R_B, R_B - R_A]', exactly zero where nothing has changed."""
    return Factored(
        np.concatenate([b.left.astype(np.float64) - a.left, a.left], axis=1),
        np.concatenate([b.right, b.right.astype(np.float64) - a.right], axis=1),
    )


def relative_change(a: Factored, b: Factored) -> float:
    """|B - A|_F / |A|_F; infinite where A is zero and B is not, 0 where both are.

    Unlike the change of W_Q and W_K apart, it is blind to a change of basis within the head, which changes no score.
    """
    moved, before = difference(a, b).frobenius(), a.frobenius()
    if before == 0:
        return float("inf") if moved > 0 else 0.0
    return moved / before


def space_angles(a: Factored, b: Factored) -> dict[str, float]:
    """Largest and mean principal angle in radians between the left spaces and between the right spaces of two matrices.

    Returns
    -------
    dict of float
        left_angle, left_angle_mean, right_angle, right_angle_mean; NaN where a matrix is not finite.
    """
    found: dict[str, float] = {}
    for side, x, y in (("left", a.left, b.left), ("right", a.right, b.right)):
        known = bool(np.isfinite(x).all() and np.isfinite(y).all())
        angles = principal_angles(x, y) if known else np.array([np.nan])
        found |= {f"{side}_angle": float(angles.max()), f"{side}_angle_mean": float(angles.mean())}
    return found
