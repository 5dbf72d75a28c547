"""Numbers of a head's matrix: of its singular values, eigenvalues, symmetric part and f on [x 1].

Functions of a spectrum take singular values (..., r), descending, and give an array of shape (...).
The zero matrix and spectra that are not finite give NaN.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from math import sqrt

import numpy as np

from weightscope.core.compute import lapack
from weightscope.model.layers.factored import Triangle, core_singular_values

# Relative distance below which singular values share a block of directions: a perturbation of that
# size turns the vectors within it at will. Stored weights carry about as much: bfloat16 rounds by
# up to 0.4 %.
NEAR_EQUAL = 0.01


def spectral_gap(s: np.ndarray) -> np.ndarray:
    """sigma_1 / sigma_2; infinite for a matrix of rank one.

    A large one is the spectral spike by which a head can gate (two-sink-mechanisms paper, Lemma 2).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return s[..., 0] / s[..., 1] if s.shape[-1] > 1 else np.where(s[..., 0] > 0, np.inf, np.nan)


def frobenius(s: np.ndarray) -> np.ndarray:
    """sqrt(sum_i sigma_i^2)."""
    return np.sqrt((s**2).sum(axis=-1))


def stable_rank(s: np.ndarray) -> np.ndarray:
    """sum_i sigma_i^2 / sigma_1^2, from 1 to r."""
    return _divided((_unit(s) ** 2).sum(axis=-1), 1.0)


def effective_rank(s: np.ndarray) -> np.ndarray:
    """exp(-sum_i p_i ln p_i), p_i = sigma_i / sum_j sigma_j, 1 to r (Roy and Vetterli 2007)."""
    shares = _divided(s, s.sum(axis=-1, keepdims=True))  # (..., r)
    logs = np.log(np.where(shares > 0, shares, 1.0))  # 0 ln 0 = 0
    return np.exp(-(shares * logs).sum(axis=-1))


def participation_ratio(s: np.ndarray) -> np.ndarray:
    """(sum_i sigma_i^2)^2 / sum_i sigma_i^4, from 1 to r."""
    squares = _unit(s) ** 2
    return _divided(squares.sum(axis=-1) ** 2, (squares**2).sum(axis=-1))


def null_tolerance(s: np.ndarray, d: int) -> np.ndarray:
    """The largest singular value that rounding can leave: d eps sigma_1, eps of float64."""
    return d * np.finfo(np.float64).eps * s[..., 0]


def numerical_rank(s: np.ndarray, d: int) -> np.ndarray:
    """The number of singular values above `null_tolerance`; -1 if they are not finite."""
    above = (s > null_tolerance(s, d)[..., None]).sum(axis=-1)
    return np.where(np.isfinite(s).all(axis=-1), above, -1)


def condition_number(s: np.ndarray, d: int) -> np.ndarray:
    """sigma_1 over the smallest singular value above `null_tolerance` (norm-based-attention, Fig.
    2).
    """
    smallest = np.where(s > null_tolerance(s, d)[..., None], s, np.inf).min(axis=-1)
    return np.where(np.isfinite(smallest), _divided(s[..., 0], smallest), np.nan)


def near_equal_blocks(s: np.ndarray) -> list[tuple[int, int]]:
    """Runs [start, stop) of singular values so close that only their joint space has meaning.

    s (r,) -> (int, int).

    Neighbours are in one block when they differ by less than `NEAR_EQUAL` of the larger; the null
    space is left out.
    """
    kept = int(np.count_nonzero(s > 0))
    if not kept:
        return []
    cuts = [i for i in range(1, kept) if s[i - 1] - s[i] >= NEAR_EQUAL * s[i - 1]]
    return list(pairwise([0, *cuts, kept]))


def _unit(s: np.ndarray) -> np.ndarray:
    """sigma_i / sigma_1, so that no square over- or underflows; NaN for the zero matrix."""
    return _divided(s, s[..., :1])


def _divided(numerator: np.ndarray, denominator: np.ndarray | float) -> np.ndarray:
    denominator = np.asarray(denominator)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(denominator > 0, numerator / denominator, np.nan))


# Symmetric and antisymmetric parts need r x r products alone. For W = L R' with A = L'L, B = R'R
# and C = R'L:
# |W|_F^2 = <A, B> and tr W^2 = tr C^2.
STANDS_OUT = 2.0  # standard deviations above the mean, as in the paper
JITTER = (
    1e-13  # times the mean diagonal: keeps a Cholesky alive, moves eigenvalues by about as much
)


def symmetric_share(gram_left: np.ndarray, gram_right: np.ndarray, cross: np.ndarray) -> float:
    """|(W + W')/2|_F^2 / |W|_F^2 = (1 + tr W^2 / |W|_F^2) / 2, from 0 (antisymmetric) to 1.

    gram_left, gram_right (r, r), cross (r, r).

    The antisymmetric part has the rest: the two are orthogonal.
    """
    squared = float((gram_left * gram_right).sum())
    if not squared > 0:
        return float("nan")
    return float(np.clip((1 + (cross * cross.T).sum() / squared) / 2, 0.0, 1.0))


def directionality(rows: np.ndarray, columns: np.ndarray) -> float:
    """(r - c) / (r + c) of norms (d,) of rows and columns (Saponati et al.).

    r is the sum of the parts of rows' norms above their mean and `STANDS_OUT` standard deviations;
    c the same of columns. -1 where only columns stand out, 0 where neither does.
    """

    def beyond(norms: np.ndarray) -> float:
        return np.maximum(norms - norms.mean() - STANDS_OUT * norms.std(ddof=1), 0.0).sum()

    r, c = beyond(rows), beyond(columns)
    total = float(r + c)
    return float(r - c) / total if total != 0 else 0.0


def symmetric_eigenvalues(
    gram_left: np.ndarray, gram_right: np.ndarray, cross: np.ndarray
) -> np.ndarray:
    """Eigenvalues (2r,) of (W + W')/2 that can be non-zero, largest magnitude first.

    gram_left, gram_right, cross (r, r).

    (W + W')/2 = [L R] J [L R]' / 2 with J swapping the halves, so they are the eigenvalues of G'JG
    / 2, GG' being the Gram matrix of [L R]. Positive: tokens along that direction attend to their
    like; negative: to their opposite.
    """
    r = len(cross)
    trace_left, trace_right = gram_left.trace(), gram_right.trace()
    if not (np.isfinite(trace_left + trace_right) and np.isfinite(cross).all()):
        return np.full(2 * r, np.nan)
    if trace_left == 0 or trace_right == 0:
        return np.zeros(2 * r)
    # L t and R / t give the same W; equal lengths round best
    balance = np.sqrt(trace_right / trace_left)
    joint = np.block([[gram_left * balance, cross.T], [cross, gram_right / balance]])  # (2r, 2r)
    joint[np.diag_indices(2 * r)] += JITTER * joint.trace() / (2 * r)
    g = np.linalg.cholesky(joint)
    upper = g[:r].T @ g[r:]  # G'JG = G1'G2 + G2'G1
    values = lapack.symmetric_eigenvalues((upper + upper.T) / 2)
    return values[np.argsort(-np.abs(values), kind="stable")]


def affine_singular_values(
    value: Triangle, b_v: np.ndarray, output: Triangle, linear: np.ndarray | None = None
) -> np.ndarray:
    """Singular values of f as a linear map f~ on [x 1] (norm-based-attention, eqs 9-11, Fig. 2).

    b_v (r,), linear (r,) -> (r + 1,).

    f~ = W~_V W~_O with W~_V = [[W_V, 0], [b_V, 1]] and W~_O = [[W_O, 0], [0, 1]]. With W_V = Q_V
    R_V and W_O' = Q_O R_O the orthonormal Q come out on both sides and an (r + 1) x (r + 1) core
    [[R_V R_O', 0], [b_V R_O', 1]] is left.
    """
    r = len(b_v)
    if "none" in (value.route, output.route) or not np.isfinite(b_v).all():
        return np.full(r + 1, np.nan)
    if not b_v.any():
        linear = core_singular_values(value, output) if linear is None else linear
        return np.sort(np.append(linear, 1.0))[::-1]
    core = np.zeros((r + 1, r + 1))
    core[:r, :r] = value.r @ output.r.T
    core[r, :r] = b_v.astype(np.float64) @ output.r.T
    core[r, r] = 1.0
    return lapack.singular_values(core)


def eigenvalues(cross: np.ndarray) -> np.ndarray:
    """The eigenvalues (r,) of W_V W_O that can be non-zero, largest magnitude first.

    cross (r, r) -> (r,).
    """
    if not np.isfinite(cross).all():
        return np.full(len(cross), np.nan, np.complex128)
    values = lapack.eigenvalues(cross)
    return values[np.lexsort((values.imag, values.real, -np.abs(values).round(12)))]


def copying_score(values: np.ndarray) -> np.ndarray:
    """Share of positive eigenvalue mass: sum of positive Re lambda over sum of |lambda|.

    values (..., r).

    Near 1 for a head that passes every direction on with its sign kept, as a copying head does; 0
    for one that only turns or inverts it. NaN for the zero map.
    """
    return _share(np.maximum(values.real, 0).sum(axis=-1), values)


def eigenvalue_balance(values: np.ndarray) -> np.ndarray:
    """sum Re lambda / sum |lambda|, from -1 to 1: Elhage et al. 2021's measure of copying.

    values (..., r).
    """
    return _share(values.real.sum(axis=-1), values)


def _share(part: np.ndarray, values: np.ndarray) -> np.ndarray:
    total = np.abs(values).sum(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(total > 0, part / total, np.nan))


RANDOM_SHARE, RANDOM_Z = 0.05, 5.0


def spread_error(width: float) -> float:
    """Largest distance from 1 of d (tr(G^2) / (tr G)^2 - 1/r) for a random (d, r) matrix.

    Five times its error, 2 / width. G is the Gram matrix, (r, r); the width is r, times the root of
    the number of matrices in a mean.
    """
    return RANDOM_SHARE + RANDOM_Z * 2 / width


# The rank of any matrix up to noise, from blocks of its rows.
MOST_RANK = 128  # a rank above this, or above half the smaller side, is not called low
SPARE = 16  # columns of a sketch past the largest rank it is to tell
CORNER = 256  # rows and columns of a part that is looked at first
MARGIN = 1.5  # times the noise's expected spectral norm and energy

Blocks = Callable[[], Iterable[np.ndarray]]


def low_rank(blocks: Blocks, shape: tuple[int, int], noise: float) -> int | None:
    """The rank of a matrix up to noise, or None if not low: blocks (rows, n), shape (m, n).

    A matrix of independent errors of standard deviation e has a spectral norm of about e (sqrt(m) +
    sqrt(n)): singular values above that, with a margin, are counted. What the counted ones leave
    has to have no more energy than the errors. The blocks are gone through three times at most: a
    part of the first, which rules most matrices out, a random sketch of the row space (Halko,
    Martinsson and Tropp 2011, algorithm 4.1), and the matrix within that space, whose singular
    values are exact.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> w = rng.standard_normal((300, 3)) @ rng.standard_normal((3, 200))
    >>> low_rank(lambda: [w[:100], w[100:]], w.shape, 1e-12)
    3
    """
    m, n = shape
    most = min(MOST_RANK, min(m, n) // 2)
    first = _first_rows(blocks(), CORNER)
    rows, columns = evenly_spread(len(first), CORNER), evenly_spread(n, CORNER)
    part = first[np.ix_(rows, columns)].T.astype(np.float64)
    if _counted(np.linalg.svd(part, compute_uv=False), part.shape, noise) > most:
        return None
    rng = np.random.default_rng(n)
    width = min(most + SPARE, m, n)
    sketch = np.zeros((width, n))
    for block in blocks():
        sketch += rng.standard_normal((len(block), width)).T @ block
    basis = np.linalg.qr(sketch.T)[0]  # (n, width)
    gram, left = np.zeros((basis.shape[1],) * 2), 0.0
    for block in blocks():
        inside = block @ basis
        gram += inside.T @ inside
        left += float(((block - inside @ basis.T) ** 2).sum())
    values = np.sqrt(np.maximum(np.linalg.eigvalsh(gram)[::-1], 0.0))
    rank = _counted(values, shape, noise)
    left += float((values[rank:] ** 2).sum())
    return rank if 0 < rank <= most and left <= MARGIN * m * n * noise**2 else None


def _counted(values: np.ndarray, shape: tuple[int, ...], noise: float) -> int:
    floor = max(MARGIN * noise * sum(map(sqrt, shape)), 1e-7 * float(values.max(initial=0.0)))
    return int((values > floor).sum())


def _first_rows(blocks: Iterable[np.ndarray], least: int) -> np.ndarray:
    """The first blocks that have this many rows: fewer could not show a high rank."""
    rows = []
    for block in blocks:
        rows.append(block)
        if sum(map(len, rows)) >= least:
            break
    return np.concatenate(rows)


def evenly_spread(count: int, most: int) -> np.ndarray:
    """At most this many of the indices below `count`, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(most, count)).astype(int))
