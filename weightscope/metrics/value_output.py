"""The value-output map f(x) = (x W_V + b_V) W_O of a head: as an affine map, and what it copies."""

import numpy as np

from weightscope.attention.factored import Triangle, core_singular_values


def affine_singular_values(
    value: Triangle, b_v: np.ndarray, output: Triangle, linear: np.ndarray | None = None
) -> np.ndarray:
    """Singular values of f as the linear map f~ on [x 1] (norm-based-attention paper, eqs 9-11 and Fig. 2).

    f~ = W~_V W~_O with W~_V = [[W_V, 0], [b_V, 1]] and W~_O = [[W_O, 0], [0, 1]]. With W_V = Q_V R_V and W_O' = Q_O R_O
    the orthonormal Q come out on both sides and an (r + 1) x (r + 1) core [[R_V R_O', 0], [b_V R_O', 1]] is left.

    Parameters
    ----------
    value, output : Triangle
        Of W_V (d, r) and of W_O' (d, r).
    b_v : (r,) array
    linear : (r,) array, optional
        The singular values of the linear part, where they are known already.

    Returns
    -------
    (r + 1,) array
        Descending; the map that keeps the 1 contributes one, so without a bias they are the linear part's and a 1.
    """
    if not b_v.any():
        return np.sort(np.append(core_singular_values(value, output) if linear is None else linear, 1.0))[::-1]
    r = len(b_v)
    if "none" in (value.route, output.route) or not np.isfinite(b_v).all():
        return np.full(r + 1, np.nan)
    core = np.zeros((r + 1, r + 1))
    core[:r, :r] = value.r @ output.r.T
    core[r, :r] = b_v.astype(np.float64) @ output.r.T
    core[r, r] = 1.0
    return np.linalg.svd(core, compute_uv=False)


def eigenvalues(cross: np.ndarray) -> np.ndarray:
    """The eigenvalues of W_V W_O that can be non-zero, from the (r, r) product W_O W_V; largest magnitude first.

    Parameters
    ----------
    cross : (r, r) array
        W_O W_V: a product and its reverse share the non-zero eigenvalues.

    Returns
    -------
    complex (r,) array
    """
    if not np.isfinite(cross).all():
        return np.full(len(cross), np.nan, np.complex128)
    values = np.linalg.eigvals(cross).astype(np.complex128)
    return values[np.lexsort((values.imag, values.real, -np.abs(values).round(12)))]


def copying_score(values: np.ndarray) -> np.ndarray:
    """Share of positive eigenvalue mass: sum of Re lambda over Re lambda > 0, divided by sum |lambda|.

    Near 1 for a head that writes what it reads with its sign kept along every direction, as a copying head does; 0 for
    one that only turns or inverts it. NaN for the zero map.

    Parameters
    ----------
    values : complex (..., r) array
    """
    return _share(np.maximum(values.real, 0).sum(axis=-1), values)


def eigenvalue_balance(values: np.ndarray) -> np.ndarray:
    """sum Re lambda / sum |lambda|, from -1 to 1: Elhage et al. 2021's summary of how far a head copies.

    Parameters
    ----------
    values : complex (..., r) array
    """
    return _share(values.real.sum(axis=-1), values)


def _share(part: np.ndarray, values: np.ndarray) -> np.ndarray:
    whole = np.abs(values).sum(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(whole > 0, part / whole, np.nan))
