"""Compare a head's factors W_Q, W_K, W_V and W_O: size, bias, weakest directions, likeness."""

from collections.abc import Sequence

import numpy as np

from weightscope.core.compute import lapack

ROUNDING = 1e-6  # relative size that float32 gives a zero singular value
PAIRS = ((0, 1), (2, 3), (0, 2), (1, 3))  # factors that are trained together, then others

Factors = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def factor_arrays(grams: Factors, biases: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Summaries of one head's factors, from Gram matrices (r, r) of W_Q, W_K, W_V and W_O'."""
    norms = np.sqrt([gram.trace() for gram in grams])
    with np.errstate(divide="ignore", invalid="ignore"):
        spreads = [(gram**2).sum() - gram.trace() ** 2 / len(gram) for gram in grams]
        return {
            "factor_norm": norms,
            "factor_bias": np.array([np.linalg.norm(bias.astype(np.float64)) for bias in biases]),
            "factor_floor": np.array([_floor(gram) for gram in grams]),
            "factor_spread": np.array(spreads) / norms**4,
            "factor_likeness": np.array([_likeness(grams[a], grams[b]) for a, b in PAIRS]),
        }


def column_energies(grams: Factors) -> dict[str, np.ndarray]:
    """Sums of squares (2, r) along the head's own dimensions: of W_Q and W_K, W_V and W_O'."""
    q, k, v, o = (gram.diagonal() for gram in grams)
    return {"qk_column_energies": np.stack([q, k]), "vo_column_energies": np.stack([v, o])}


def _floor(gram: np.ndarray) -> float:
    """A factor's smallest singular value over their root mean square, at least `ROUNDING`."""
    if not np.isfinite(gram).all() or gram.trace() <= 0:
        return np.nan
    smallest = float(lapack.symmetric_eigenvalues(gram).min()) * len(gram) / float(gram.trace())
    return float(np.sqrt(max(smallest, ROUNDING**2)))


def _likeness(a: np.ndarray, b: np.ndarray) -> float:
    """Squared cosine of two Gram matrices without their traces; NaN where their sizes differ."""
    if a.shape != b.shape:
        return np.nan
    a, b = (gram - np.eye(len(gram)) * gram.trace() / len(gram) for gram in (a, b))
    return float((a * b).sum() ** 2 / ((a**2).sum() * (b**2).sum()))


def row_arrays(
    squares: Sequence[np.ndarray], gains: Sequence[np.ndarray], bias: np.ndarray
) -> dict[str, np.ndarray]:
    """Summaries of a layer's factors, from sums of squares (d,) over heads and the norm's gains
    (d,).
    """
    floors, widths = [], []  # a width: the dimensions that a random factor would fill
    widest = max(map(len, squares))  # in cross-attention the memory may have another width
    energies = np.full((len(squares), widest), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        for energy, of_dimensions, gain in zip(energies, squares, gains, strict=True):
            plain = of_dimensions[gain != 0] / gain[gain != 0] ** 2
            energy[: len(gain)][gain != 0] = plain
            floors.append(np.sqrt(plain.min(initial=np.inf) * np.divide(len(plain), plain.sum())))
            widths.append((gain**2).sum() ** 2 / (gain**4).sum())
    return {
        "row_floor": np.array(floors),
        "factor_width": np.array(widths),
        "row_energies": energies,  # (4, d), without the gain; NaN where that is zero
        "output_bias_norm": np.array(np.linalg.norm(bias.astype(np.float64))),
    }


# The dimensions that a layer's factor uses most, and how alike they are in all layers of a model.
# All layers read from and write into one stream, so the energies of W_Q in its dimensions are alike
# from layer to layer; the same holds for the other factors. Along heads' dimensions layers have
# nothing in common.
LEAST = 1e-6  # times the median energy: the least that an energy counts as
FEWEST = 4  # layers that have something in common


def profiles(energies: np.ndarray, heads: int) -> np.ndarray:
    """Logs of energies (L, n) as unit vectors, without the means of heads and of their dimensions.

    Energies are seen as (L, heads, n / heads); NaN for a layer whose energies are not known. The
    means are the sizes of heads, and the effect of rotary positions on a dimension of every head.
    """
    has_energies = np.isfinite(energies).any(axis=1, keepdims=True)
    usual = np.nanmedian(np.where(has_energies, energies, 0.0), axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.maximum(energies, LEAST * usual[:, None]))
    logs = np.where(np.isfinite(energies), logs, np.nan).reshape(len(energies), heads, -1)
    known = np.isfinite(logs).mean(axis=(1, 2)) > 0.5
    result = np.full(energies.shape, np.nan)
    for i in np.flatnonzero(known & (usual > 0)):
        profile = np.where(np.isfinite(logs[i]), logs[i], np.log(usual[i]))
        of_dimensions, of_heads = profile.mean(axis=0), profile.mean(axis=1, keepdims=True)
        centred = (profile - of_dimensions - of_heads + profile.mean()).ravel()
        length = np.linalg.norm(centred)
        if length > 0:
            result[i] = centred / length
    return result


def share(rows: np.ndarray) -> float:
    """The share of profiles (L, n) along their common direction: 1 if equal, 1 / L if unrelated."""
    known = rows[np.isfinite(rows).all(axis=1)]
    return float(np.linalg.eigvalsh(known @ known.T)[-1]) / len(known) if len(known) else np.nan


def cosines(rows: np.ndarray, *more: np.ndarray) -> np.ndarray:
    """Cosines of layers' profiles, and of `more` rows, with the other layers' common direction.

    rows (L, n) -> (1 + more, L); NaN where too few layers are known.
    """
    result = np.full((1 + len(more), len(rows)), np.nan)
    is_known = np.isfinite(rows).all(axis=1)
    known = rows[is_known]
    if len(known) < FEWEST - 1:
        return result
    weights = np.empty((len(known), len(rows)))  # of known layers, without each layer
    values, vectors = np.linalg.eigh(known @ known.T)
    weights[:, ~is_known] = (vectors[:, -1] / np.sqrt(values[-1]))[:, None]
    weights[:, is_known] = _without_each(values, vectors)
    if len(known) < FEWEST:
        weights[:, is_known] = np.nan
    weights *= np.where(weights.sum(axis=0) < 0, -1.0, 1.0)
    for into, profile in zip(result, (rows, *more), strict=True):
        into[:] = ((profile @ known.T) * weights.T).sum(axis=1)
    return result


HALVINGS = 50  # of the interval of a root
NEAR = 1e-4  # of the interval


def _without_each(values: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """The top eigenvector, over the root of its value, of a matrix without its row and column i.

    values (n,), ascending, and vectors (n, n) of the whole matrix -> (n, n), a column for each i.
    Without i the values are the roots of sum_j v_ij^2 / (value_j - root), and the vector is
    (matrix - root)^-1 e_i (Golub 1973, "Some modified matrix eigenvalue problems", section 5).
    """
    n, top, second = len(values), -1, -2
    below = np.maximum(values[top] - values, 0.0)  # of each value below the top one
    below[:top] = np.maximum(below[:top], np.finfo(float).eps * values[top])
    parts = np.where(abs(vectors) < 1e-100, 1e-100, vectors)  # (i, j); so that there is a root
    low, high = np.zeros(n), np.full(n, below[second])
    for _ in range(HALVINGS):
        root = (low + high) / 2  # below the top value; at neither end
        is_low = (parts**2 / (root[:, None] - below)).sum(axis=1) > 0
        low, high = np.where(is_low, root, low), np.where(is_low, high, root)
    with np.errstate(divide="ignore"):
        shares = parts / (root[:, None] - below)
    for pole, distance in ((top, root), (second, below[second] - root)):
        is_near = distance < NEAR * below[second]  # where a difference has lost its digits
        shares[is_near, pole] = 0.0
        shares[is_near, pole] = -(shares * parts)[is_near].sum(axis=1) / parts[is_near, pole]
    without = vectors @ shares.T
    np.fill_diagonal(without, 0.0)
    return without / np.linalg.norm(without, axis=0) / np.sqrt(values[top] - root)
