"""Which dimensions a layer's factor uses most, and what the layers of a model have in common in that.

All layers read from and write into one stream, so the energies of W_Q in the dimensions of the stream are alike from
layer to layer, and so are those of the other factors. Along the heads' own dimensions layers have nothing in common.
"""

import numpy as np

LEAST = 1e-6  # of the median energy: what is below it counts as this much
FEWEST = 4  # layers that have something in common


def profiles(energies: np.ndarray, heads: int) -> np.ndarray:
    """Logs of energies (L, n) in the form (L, heads, n / heads) without the means of heads and of their dimensions.

    Of length one; NaN for a layer whose energies are not known. The means are the sizes of heads, and what rotary
    positions do to a dimension of every head.
    """
    usual = np.nanmedian(np.where(np.isfinite(energies).any(axis=1, keepdims=True), energies, 0.0), axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.maximum(energies, LEAST * usual[:, None]))
    logs = np.where(np.isfinite(energies), logs, np.nan).reshape(len(energies), heads, -1)
    known = np.isfinite(logs).mean(axis=(1, 2)) > 0.5
    result = np.full(energies.shape, np.nan)
    for i in np.flatnonzero(known & (usual > 0)):
        profile = np.where(np.isfinite(logs[i]), logs[i], np.log(usual[i]))
        profile = (profile - profile.mean(axis=0) - profile.mean(axis=1, keepdims=True) + profile.mean()).ravel()
        length = np.linalg.norm(profile)
        if length > 0:
            result[i] = profile / length
    return result


def share(rows: np.ndarray) -> float:
    """The share of profiles (L, n) along what they have in common: 1 where they are equal, 1 / L where unrelated."""
    known = rows[np.isfinite(rows).all(axis=1)]
    return float(np.linalg.eigvalsh(known @ known.T)[-1]) / len(known) if len(known) else np.nan


def cosines(rows: np.ndarray, *more: np.ndarray) -> np.ndarray:
    """Cosines of each layer's profile, and of `more` rows, with what the other layers' `rows` (L, n) have in common.

    (1 + more, L); NaN where too few layers are known.
    """
    result = np.full((1 + len(more), len(rows)), np.nan)
    known = np.flatnonzero(np.isfinite(rows).all(axis=1))
    gram, products = rows @ rows.T, [profile @ rows.T for profile in (rows, *more)]
    for i in range(len(rows)):
        rest = known[known != i]
        if len(rest) < FEWEST - 1:
            continue
        values, vectors = np.linalg.eigh(gram[np.ix_(rest, rest)])
        weights = vectors[:, -1] / np.sqrt(values[-1])  # of the layers in the direction of length one
        weights *= 1.0 if weights.sum() >= 0 else -1.0
        result[:, i] = [of_layers[i, rest] @ weights for of_layers in products]
    return result
