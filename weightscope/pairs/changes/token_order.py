"""Match a suspect's tokens with a base's, where the stream's basis and the order of tokens changed.

With x = P y R, P a permutation of tokens and R a rotation, x and y have the same principal
components up to signs, and their coordinates the same distributions. Components are paired by
these, tokens by their nearest neighbours in the coordinates, and the rotation between coordinates
is fitted again until the pairs stay the same.
"""

from typing import NamedTuple

import numpy as np

from weightscope.model.model import Model

MOST_TOKENS = 4096  # tokens of the largest norms, which no rotation or permutation changes
COMPONENTS = 64  # principal components of embeddings, in which tokens are compared
LEVELS = 513  # quantiles by which distributions of coordinates are compared
ROUNDS = 12  # pairings and fits, at most
GROWS = 0.01  # share of rows by which a round must pair more than the last, or rounds end
# share of tokens that are each other's nearest, from which they are counterparts: strangers' reach
# 0.52
FOUND = 0.75
ROWS_EACH = 8  # at least, for each component: a rotation fits fewer rows whatever they are
FEWEST = 32  # pairs of rows that a rotation is fitted to
BEGUN_WITH = (8, 16, 32, 64)  # components by which rows are paired first
ENOUGH = 0.9  # share of rows from which no other beginning is tried
# noise, as a share of the embedding, with which a suspect's own copy has to be found
TRIED_WITH = 0.03
BLOCK = 2048  # rows whose distances to all others are computed at a time


class TokenOrder(NamedTuple):
    """Tokens of two checkpoints that are counterparts."""

    suspect: np.ndarray  # (n,) ids
    base: np.ndarray  # (n,) ids
    share: float  # mutual nearest neighbours among the tokens that were compared

    @property
    def is_found(self) -> bool:
        """True if more tokens pair than strangers' would."""
        return self.share >= FOUND


def match_tokens(suspect: Model, base: Model) -> TokenOrder:
    """Pair the tokens of two models of one width, whatever their basis and order."""
    ids = [strongest(model) for model in (suspect, base)]
    x, y = (
        model.ends.into_stream(model.embeddings.rows(each))
        for model, each in zip((suspect, base), ids, strict=True)
    )
    left, right, share = match_rows(x, y)
    return TokenOrder(ids[0][left], ids[1][right], share)


def would_show(model: Model) -> bool:
    """True if a noisy copy of the tokens in another basis and order would be found."""
    rows = model.ends.into_stream(model.embeddings.rows(strongest(model)))
    rng = np.random.default_rng(0)
    spread = TRIED_WITH * float(np.sqrt(np.mean(np.square(rows, dtype=np.float64))))
    copy = rows + spread * rng.standard_normal(rows.shape, np.float32)
    turn = np.linalg.qr(rng.standard_normal((rows.shape[1],) * 2))[0]
    left, right, share = match_rows(
        (copy[order := rng.permutation(len(copy))] @ turn).astype(np.float32), rows
    )
    return share >= FOUND and bool(np.mean(order[left] == right) >= FOUND)


def strongest(model: Model) -> np.ndarray:
    """The tokens with the largest norms, by id; all of a small vocabulary."""
    embeddings = model.embeddings
    if embeddings.n_tokens <= MOST_TOKENS:
        return np.arange(embeddings.n_tokens)
    norms = np.concatenate(
        [np.linalg.norm(model.ends.into_stream(rows), axis=1) for _, rows in embeddings.blocks()]
    )
    return np.sort(np.argsort(-norms, kind="stable")[:MOST_TOKENS])


def match_rows(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Indices of counterparts among rows of x (n, d) and y (m, d), and the share that has one.

    Leading components are the same after noise that turns the others into one another, so rows are
    paired by few first.
    """
    k = max(1, min(COMPONENTS, x.shape[1], len(x) // ROWS_EACH, len(y) // ROWS_EACH))
    a, b = coordinates(x, k), coordinates(y, k)
    best = np.empty(0, int), np.empty(0, int)
    for k in [k for k in BEGUN_WITH if k <= a.shape[1]]:
        turn = _paired_components(a[:, :k], b[:, :k])
        left, right = mutual_neighbours(a[:, :k] @ turn, b[:, :k])
        before = 0
        for _ in range(ROUNDS):
            if len(left) < max(FEWEST, a.shape[1]):
                break
            u, _, vt = np.linalg.svd(a[left].T @ b[right])
            left, right = mutual_neighbours(a @ (u @ vt), b)
            best = max(best, (left, right), key=lambda pair: len(pair[0]))
            if len(left) - before < GROWS * len(a):
                break
            before = len(left)
        if len(best[0]) > ENOUGH * len(a):
            break
    return *best, len(best[0]) / min(len(a), len(b))


def coordinates(rows: np.ndarray, k: int) -> np.ndarray:
    """Rows (n, d) along their first k principal components, over their root mean square: (n, k)."""
    from scipy.linalg import eigh

    centred = rows.astype(np.float64) - rows.mean(axis=0, dtype=np.float64)
    d = centred.shape[1]
    _, vectors = eigh(centred.T @ centred, subset_by_index=(d - k, d - 1))  # (d, k)
    seen = centred @ vectors[:, ::-1]
    return np.asarray(seen / (np.sqrt(np.mean(centred**2)) or 1.0))


def _paired_components(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The signed permutation (k, k) of components of a whose distributions are nearest to b's."""
    from scipy.optimize import linear_sum_assignment

    levels = np.linspace(0, 1, LEVELS)
    of_a, of_b = (np.quantile(side, levels, axis=0).T for side in (a, b))  # (k, LEVELS)
    # (k, k) each
    apart = [np.abs(sign[:, None] - of_b).mean(axis=2) for sign in (of_a, -of_a[:, ::-1])]
    rows, columns = linear_sum_assignment(np.minimum(*apart))
    turn = np.zeros((a.shape[1], b.shape[1]))
    turn[rows, columns] = np.where(apart[0][rows, columns] <= apart[1][rows, columns], 1.0, -1.0)
    return turn


def mutual_neighbours(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a and b that are each other's nearest."""
    x, y = a.astype(np.float32), b.astype(np.float32)
    sizes = np.vecdot(y, y)
    best = np.empty(len(x), int)
    nearest, distance = np.zeros(len(y), int), np.full(len(y), np.inf, np.float32)
    for start in range(0, len(x), BLOCK):
        part = x[start : start + BLOCK]
        apart = np.vecdot(part, part)[:, None] + sizes - 2 * part @ y.T  # (BLOCK, m)
        best[start : start + len(part)] = apart.argmin(axis=1)
        closest = apart.argmin(axis=0)
        least = apart[closest, np.arange(len(y))]
        nearest = np.where(least < distance, closest + start, nearest)
        distance = np.minimum(least, distance)
    left = np.flatnonzero(nearest[best] == np.arange(len(x)))
    return left, best[left]
