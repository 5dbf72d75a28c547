"""Outliers of a distribution, judged by medians, which outliers do not move.

Measures of heads are compared on a logarithmic scale, as value = median of the layer + difference
of the head: scaling a whole layer shows in the first part alone, an odd head in the second.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from weightscope.model.metrics.spectra import evenly_spread

NEIGHBOURS = 4  # layers that a layer is compared with, also at the ends; one of them may be odd
ROW_Z = 8.0  # robust z-score of a row's log norm beyond which training hardly met or swelled it
LEAST_SPREAD = 0.02  # spread of logs: values that agree to 2 % have no outliers


def known_median(values: np.ndarray) -> float:
    """The median of those values that are not NaN; NaN where none is, without NumPy's warning."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else float("nan")


def robust_z(values: np.ndarray, least_spread: float = LEAST_SPREAD) -> np.ndarray:
    """(x - median) / (1.4826 MAD) over all finite elements."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return np.full(values.shape, np.nan)
    median = np.median(finite)
    spread = max(least_spread, 1.4826 * float(np.median(np.abs(finite - median))))
    return (values - median) / spread


def log_measure(values: np.ndarray) -> np.ndarray:
    """ln of a positive measure; NaN where it is zero or not finite."""
    return np.log(np.where((values > 0) & np.isfinite(values), values, np.nan))


def layer_medians(logs: np.ndarray) -> np.ndarray:
    """Median over the heads of each layer, NaN for layers without a finite one: (L, H) -> (L,)."""
    finite = [row[np.isfinite(row)] for row in logs]
    return np.array([np.median(values) if len(values) else np.nan for values in finite])


def off_trend(medians: np.ndarray) -> np.ndarray:
    """Each layer's distance (L,) from its nearest finite neighbours' median (a Hampel filter)."""
    finite = np.flatnonzero(np.isfinite(medians))
    differences = np.full(len(medians), np.nan)
    for i, median in enumerate(medians):
        place = int(np.searchsorted(finite, i))
        near = finite[max(0, place - NEIGHBOURS) : place + NEIGHBOURS + 1]  # includes the nearest
        near = near[near != i]
        nearest = near[np.argsort(np.abs(near - i), kind="stable")][:NEIGHBOURS]
        if len(nearest):
            differences[i] = median - np.median(medians[nearest])
    return differences


def row_norms(block: np.ndarray) -> np.ndarray:
    """Euclidean norms of rows in float64, (n, d) -> (n,)."""
    return np.sqrt(np.einsum("nd,nd->n", block, block, dtype=np.float64))


def norm_outliers(norms: np.ndarray, z: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows with unusually small and large norms, by the robust z-score of log norm: norms (n,)."""
    scores = robust_z(np.log(np.maximum(norms, 1e-30)))
    order = np.argsort(scores, kind="stable")
    return order[scores[order] < -z], order[::-1][scores[order[::-1]] > z]


# Embedding rows that still look freshly initialised: same norm, random direction.
#
# A row drawn from normal(0, s) in d dimensions has a norm within s sqrt(d) (1 +- 1 / sqrt(2 d)),
# and its squared cosines with other rows are 1 / d on average, whatever those are. Trained rows
# share directions, so theirs are larger.
SAMPLING = 5.0  # standard deviations within which a norm may belong to a random row
TAIL = 8.0  # t of a probability exp(-t): a random row's cosines are larger in fewer cases
UNEVEN = 2.0  # times the spread of log norms by sampling, 1 / sqrt(2 d): rows differ in length
COMPARED = 512  # rows that others are compared with
ISOTROPIC = 1.2  # mean squared cosine in a group, times d: 1 for random rows, 30 in GPT-2
FEWEST = 8  # least rows of a group, and of the trained rows it is compared with
LEAST_SHARE = 0.01  # least share of all rows in either
BIMODAL = 0.5  # nats a row by which two Gaussians fit log norms better; 0 for a uniform law

Blocks = Callable[[], Iterable[tuple[int, np.ndarray]]]  # rows (k, d), each with its first's index


class JudgedRows(NamedTuple):
    """Rows of an embedding that training hardly met or swelled, judged by their norms."""

    undertrained: np.ndarray  # the shortest come first
    oversized: np.ndarray  # the longest come first
    usual: float  # median norm of the rows that are not undertrained
    initial: float | None  # median norm of the rows as initialisation left them; None without any


def judge_rows(norms: np.ndarray, blocks: Blocks, initial_std: float | None = None) -> JudgedRows:
    """Tell rows that training hardly met, or swelled, from the others: norms (n,).

    Rows that are zero or as initialisation left them are set aside first, however many they are.
    What remains is judged by the robust z-score of its log norms.
    """
    untrained = untrained_rows(norms, blocks, initial_std)
    trained = np.where(untrained | (norms == 0), np.nan, norms)
    if not np.isfinite(trained).any():
        return JudgedRows(np.empty(0, int), np.empty(0, int), float("nan"), None)
    low, high = norm_outliers(trained, ROW_Z)
    undertrained = np.concatenate([np.flatnonzero(untrained | (norms == 0)), low])
    undertrained = undertrained[np.argsort(norms[undertrained], kind="stable")]
    initial = float(np.median(norms[untrained])) if untrained.any() else None
    return JudgedRows(undertrained, high, known_median(trained), initial)


def undertrained_rows(embedding: np.ndarray, initial_std: float | None = None) -> np.ndarray:
    """Rows of an embedding that training hardly ever met, by index; see `judge_rows`: embedding (n,
    d).

    GPT-2's last position is one: its norm is 0.12, the others' median 3.37.
    """
    judged = judge_rows(row_norms(embedding), lambda: [(0, embedding)], initial_std)
    return np.sort(judged.undertrained)


def untrained_rows(
    norms: np.ndarray, blocks: Blocks, initial_std: float | None = None
) -> np.ndarray:
    """(n,) bool of rows that are as initialisation left them; none if all or no rows are.

    Judged against the norm that `initial_std` gives; where that is unknown or finds none, against
    the two groups that log norms fall into, if they clearly do. Where all rows look untrained
    nothing tells them apart, and none is named.
    """
    usable = np.isfinite(norms) & (norms > 0)
    few = max(FEWEST, LEAST_SHARE * len(norms))
    if usable.sum() <= few:
        return np.zeros(len(norms), bool)
    d = next(iter(blocks()))[1].shape[1]
    if initial_std is not None and (near := _as_long_as_drawn(norms, d, initial_std)).any():
        random = _random_among(near, usable, blocks)
        has_others = np.count_nonzero(usable & ~random) >= few
        if random.any() and has_others and _is_isotropic(random, blocks):
            return random
    boundary = two_groups(np.log(norms[usable]))
    if boundary is not None:
        shorter = usable & (np.log(np.where(usable, norms, 1)) <= boundary)
        longer = usable & ~shorter
        for group, rest in ((shorter, longer), (longer, shorter)):
            if np.log(norms[group]).std() * np.sqrt(2 * d) > UNEVEN:
                continue
            if not _is_isotropic(group, blocks):
                continue
            # training made the longer of two isotropic groups longer
            if group is shorter or not _is_isotropic(rest, blocks):
                return _random_among(group, usable, blocks)
    return np.zeros(len(norms), bool)


def _as_long_as_drawn(norms: np.ndarray, d: int, initial_std: float) -> np.ndarray:
    """(n,) bool of rows with norms of normal(0, std) rows; none at another group's edge."""
    with np.errstate(invalid="ignore"):
        z = (norms / (initial_std * np.sqrt(d)) - 1) * np.sqrt(2 * d)
        near = np.abs(z) < SAMPLING
    count = np.count_nonzero(near)
    is_edge = count > 0 and abs(np.median(z[near])) > 0.5 + SAMPLING / np.sqrt(count)
    return near & ~np.bool_(is_edge)


def two_groups(values: np.ndarray) -> float | None:
    """The boundary of two Gaussian groups of values (n,); None if they are not clear.

    Of all splits the likeliest, by the sum of w log(sigma / w) over both groups, w a group's share;
    it counts if it is likelier than one group by `BIMODAL` nats a value.
    """
    ordered = np.sort(values.astype(np.float64)) - np.mean(values)
    n = len(ordered)
    fewest = max(FEWEST, int(np.ceil(LEAST_SHARE * n)))
    if n < 2 * fewest:
        return None
    below = np.arange(fewest, n - fewest + 1)  # sizes of the lower group
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    squares = np.concatenate([[0.0], np.cumsum(ordered**2)])

    def cost(count: np.ndarray, total: np.ndarray, squared: np.ndarray) -> np.ndarray:
        variance = np.maximum(squared / count - (total / count) ** 2, 1e-6)  # 0.1 % is no spread
        share = count / n
        return share * (np.log(variance) / 2 - np.log(share))

    split = cost(below, sums[below], squares[below])
    split = split + cost(n - below, sums[-1] - sums[below], squares[-1] - squares[below])
    best = int(np.argmin(split))
    together = float(cost(np.array(n), sums[-1], squares[-1]))
    if not together - split[best] > BIMODAL:
        return None
    return float(np.sort(values)[below[best] - 1])


def _random_among(near: np.ndarray, usable: np.ndarray, blocks: Blocks) -> np.ndarray:
    """(n,) bool of rows whose cosines with the usable ones are no larger than a random row's."""
    among = _spread_out(usable)
    sample = _directions(blocks, among)  # (m, d)
    random, limit = np.zeros(len(near), bool), _most_of_a_random_row(sample)
    for first, block in blocks():
        indices = np.flatnonzero(near[first : first + len(block)])
        squared = (_unit(block[indices]) @ sample.T) ** 2  # (k, m)
        itself = (indices + first)[:, None] == among
        mean = np.where(itself, 0, squared).sum(axis=1) / (len(among) - itself.sum(axis=1))
        random[first + indices] = sample.shape[1] * mean < limit
    return random


def _most_of_a_random_row(sample: np.ndarray) -> float:
    """A bound on d times a random direction's mean squared cosine with a sample (m, d).

    That is d u S u', S the sample's second moment: sum of lambda_k chi^2_k, eigenvalues of sum 1,
    whose tail Laurent and Massart (2000, lemma 1) bound: 1 + 2 |lambda| sqrt(t) + 2 max(lambda) t
    with probability exp(-t) at most.
    """
    eigenvalues = np.linalg.eigvalsh(sample @ sample.T) / len(sample)
    return float(1 + 2 * np.linalg.norm(eigenvalues) * np.sqrt(TAIL) + 2 * eigenvalues[-1] * TAIL)


def _is_isotropic(group: np.ndarray, blocks: Blocks) -> bool:
    """True if the rows of a mask share no directions with each other."""
    directions = _directions(blocks, _spread_out(group))
    k, d = directions.shape
    squared = ((directions @ directions.T) ** 2).sum() - k  # without each row with itself
    return k < 2 or d * squared / (k * (k - 1)) < ISOTROPIC + 2 * SAMPLING / k


def _spread_out(mask: np.ndarray) -> np.ndarray:
    """At most `COMPARED` indices of a mask's rows, evenly spread."""
    indices = np.flatnonzero(mask)
    return indices[evenly_spread(len(indices), COMPARED)]


def _directions(blocks: Blocks, indices: np.ndarray) -> np.ndarray:
    """Rows as unit vectors, (k, d), by indices in order."""
    directions = []
    for first, block in blocks():
        within = indices[(indices >= first) & (indices < first + len(block))]
        directions.append(_unit(block[within - first]))
    return np.concatenate(directions)


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows.astype(np.float64) / row_norms(rows)[:, None]
