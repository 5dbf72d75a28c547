"""Directions of the stream that hardly anything is written along: one that was projected out of weights is among them.

A matrix that writes into the stream is W (n, d), row vectors x W. It writes the energy |W v|^2 along a unit vector v.
The Gram matrices W'W of several layers add up, and a direction removed from all of them has the least energy of the
sum. How far below the rest it lies is the question. Dimensions are scaled to one energy first, because trained streams
have dimensions that little is written into, and rounding to zero makes more.
"""

from collections.abc import Sequence
from math import comb, log10
from typing import NamedTuple

import numpy as np
from scipy.linalg import LinAlgError, cholesky, solve_triangular

GAPS = 24  # gaps between eigenvalues that one is compared with
RANKS = 8  # directions that may have been removed together
EIGENVALUES = RANKS + GAPS + 1
NARROW = 2 * EIGENVALUES  # dimensions that a stream needs, at least
BLOCK, STEPS = 16, 5  # of the Krylov space in which least eigenvectors are looked for
STRIP = 128  # rows of a Gram matrix that are changed at a time
WHOLE = 200  # dimensions up to which all eigenvectors are cheap
SHIFT = 1e-6  # of the mean energy: what float32 leaves of none
EMPTY = 1e-6  # of the mean energy: a dimension below it is one of padding, and is not scaled up
CONSTANT = 0.5  # of the mean energy, along the vector of ones: a norm that subtracts the mean never reads it
PENALTY = 10.0  # mean energies added along it then
SPREAD = 3.0  # times the median size of dimensions, or as many times less: beyond, one stands out of the vector of ones
OF_LAYER = 8  # least directions of a single layer
MEMBER = 0.5  # squared cosine with a layer's least directions that makes the layer share a direction
SHARED = 3  # layers that share one, at least
SEEDS = 4  # directions that layers are asked to share


class Least(NamedTuple):
    """The directions that some layers write least along."""

    score: float  # -log10 of the chance that gaps as those above have one as large
    directions: np.ndarray  # (d, k), orthonormal
    eigenvalues: np.ndarray  # (EIGENVALUES,) over the mean, dimensions scaled to one energy

    @property
    def ratio(self) -> float:
        """The least eigenvalue over the first above the gap."""
        return float(max(self.eigenvalues[0], 0.0) / self.eigenvalues[self.directions.shape[1]])


def gap_scores(eigenvalues: np.ndarray) -> np.ndarray:
    """How far each of the first gaps is out of line with those above it: (EIGENVALUES,) ascending -> (RANKS,).

    Of ordered exponential variables the k-th gap times k is exponential again (Renyi 1953), and one such gap over the
    sum of n others exceeds t with probability (1 + t)^-n. Gaps between eigenvalues, which repel each other, vary less.
    """
    logs = np.log(np.maximum(eigenvalues, SHIFT / 10))
    gaps = np.diff(logs) * np.arange(1, len(logs))
    above = np.array([gaps[k + 1 : k + 1 + GAPS].sum() for k in range(RANKS)])
    return GAPS * np.log10(1 + gaps[:RANKS] / np.maximum(above, 1e-12))


def scale_dimensions(gram: np.ndarray, centred: bool) -> np.ndarray:
    """Scale the dimensions of a Gram matrix to one energy, in place; what each was divided by, (d,), 0 where empty.

    With `centred`, norms subtract the mean from the stream, and nothing may be written along the vector of ones.
    """
    d = len(gram)
    gram *= np.float32(d / max(float(np.trace(gram, dtype=np.float64)), 1e-300))
    energies = np.diag(gram).copy()
    sizes = np.sqrt(np.where(energies < EMPTY, 0, energies))
    divide(gram, sizes)
    if centred:
        usual = float(np.median(sizes[sizes > 0])) if sizes.any() else 1.0
        ones = np.minimum(sizes, SPREAD * usual)  # after the division
        if float(ones @ gram @ ones) < CONSTANT * float(ones @ ones):
            lift_ones(gram, sizes)
    return sizes


def divide(gram: np.ndarray, sizes: np.ndarray) -> None:
    """Divide the dimensions of a Gram matrix by their sizes (d,), in place."""
    divisors = np.where(sizes > 0, sizes, 1)
    gram /= divisors
    gram /= divisors[:, None]
    empty = np.flatnonzero(sizes == 0)
    gram[empty] = gram[:, empty] = 0.0
    gram[empty, empty] = 1.0  # padding: as if something were written there


def lift_ones(gram: np.ndarray, sizes: np.ndarray) -> None:
    """Add energy along the vector of ones, in place, to dimensions that were divided by `sizes` (d,).

    A dimension much smaller than most is not scaled up in that vector, or it would be all of it.
    """
    usual = float(np.median(sizes[sizes > 0])) if sizes.any() else 1.0
    row = np.where(sizes > 0, usual / np.maximum(sizes, usual / SPREAD), 0).astype(np.float32)
    for start in range(0, len(gram), STRIP):  # no second matrix
        gram[start : start + STRIP] += np.float32(PENALTY / len(gram)) * row[start : start + STRIP, None] * row


def least_eigenvectors(gram: np.ndarray, count: int, steps: int = STEPS) -> tuple[np.ndarray, np.ndarray]:
    """The least eigenvalues (count,) and eigenvectors (d, count) of a float32 Gram matrix of mean energy one.

    From a block Krylov space of the inverse, which holds the least ones first.
    """
    d = len(gram)
    if d <= WHOLE:
        values, vectors = np.linalg.eigh(gram.astype(np.float64))
        return values[:count], vectors[:, :count]
    root = _root(gram)
    block = np.random.default_rng(d).standard_normal((d, BLOCK), dtype=np.float32)
    basis = np.empty((d, 0), np.float32)
    for _ in range(steps):
        block = solve_triangular(root, block, lower=True, check_finite=False)
        block = solve_triangular(root, block, lower=True, trans="T", check_finite=False)
        for _ in range(2):
            block = np.linalg.qr(block - basis @ (basis.T @ block))[0]
        basis = np.hstack([basis, block])
    inside = (basis.T @ (gram @ basis)).astype(np.float64)
    values, vectors = np.linalg.eigh((inside + inside.T) / 2)
    return values[:count], basis @ vectors[:, :count]


def _root(gram: np.ndarray) -> np.ndarray:
    """The Cholesky factor of a Gram matrix, shifted by no more than float32's rounding makes necessary."""
    diagonal = np.diag(gram).copy()
    for shift in (SHIFT, 100 * SHIFT, 1e4 * SHIFT, 1.0):
        gram[np.diag_indices(len(gram))] = diagonal + np.float32(shift)
        try:
            root: np.ndarray = cholesky(gram, lower=True, check_finite=False)
        except LinAlgError:
            continue
        gram[np.diag_indices(len(gram))] = diagonal
        return root
    raise AssertionError("a Gram matrix is positive definite but for its rounding")


def least_of(gram: np.ndarray, centred: bool) -> Least:
    """The directions below the gap that is most out of line, of the sum of some layers' Gram matrices (d, d).

    `gram` is overwritten.
    """
    sizes = scale_dimensions(gram, centred)
    values, vectors = least_eigenvectors(gram, EIGENVALUES)
    scores = gap_scores(values)
    rank = int(scores.argmax()) + 1
    noise = max(float(values[rank - 1]), SHIFT)  # a dimension that little is written into says little of a direction
    directions = np.linalg.qr(vectors[:, :rank] * (sizes / (sizes.astype(np.float64) ** 2 + noise))[:, None])[0]
    return Least(float(scores[rank - 1]), directions, values)


def sum_grams(grams: Sequence[np.ndarray]) -> np.ndarray:
    """Their sum, without a copy of all of them."""
    total = grams[0].copy()
    for gram in grams[1:]:
        total += gram
    return total


def agreeing(grams: Sequence[np.ndarray], centred: bool) -> list[tuple[int, ...]]:
    """Sets of layers, by place, whose own least directions have one in common, wherever the layers stand."""
    sizes = scale_dimensions(sum_grams(grams), centred)
    parts = []
    for gram in grams:
        matrix = gram.copy()
        divide(matrix, sizes)
        matrix *= np.float32(len(gram) / float(np.trace(matrix, dtype=np.float64)))
        if centred:  # along ones, every layer may write little
            lift_ones(matrix, sizes)
        parts.append(least_eigenvectors(matrix, OF_LAYER, steps=2)[1])
    stacked = np.hstack(parts)  # (d, L OF_LAYER)
    values, vectors = np.linalg.eigh(stacked.T @ stacked)
    sets = []
    for column in range(1, SEEDS + 1):
        if values[-column] < SHARED * MEMBER:
            break
        seed = stacked @ vectors[:, -column]
        shares = [float(((part.T @ seed) ** 2).sum() / (seed @ seed)) for part in parts]
        layers = tuple(i for i, share in enumerate(shares) if share >= MEMBER)
        if len(layers) >= SHARED:
            sets.append(layers)
    return list(dict.fromkeys(sets))


def choices(layers: int, out_of: int) -> float:
    """log10 of the number of sets with this many layers."""
    return log10(comb(out_of, layers))
