"""A mean over many items from a random sample of them, stratified, with an interval that holds."""

from dataclasses import dataclass

import numpy as np

from weightscope.errors import CheckpointError
from weightscope.shapes import ShowsShapes

FEWEST = 100  # items of a sample: the interval takes their means for normally distributed
A_STRATUM = 20  # of them
LEVEL = 0.95


@dataclass(frozen=True, eq=False, repr=False)
class Stratified(ShowsShapes):
    """Items drawn at random, without replacement, from strata of a population (Cochran 1977, chapter 5).

    Attributes
    ----------
    items : (n,) int array
        Ascending.
    stratum : (n,) int array
        Of each.
    sizes : (S,) int array
        How many items each stratum has in the population.
    """

    items: np.ndarray
    stratum: np.ndarray
    sizes: np.ndarray

    @classmethod
    def draw(cls, items: np.ndarray, by: np.ndarray, how_many: int, seed: int = 0) -> "Stratified":
        """A sample of `items`, each stratum those of them that are nearest each other in `by`.

        Parameters
        ----------
        items : (N,) int array
        by : (N,) array
            What strata are made by: the more a value depends on it, the narrower the interval.
        how_many : int
            All of them where there are no more.
        seed : int

        Raises
        ------
        CheckpointError
            Fewer than `FEWEST` are asked for.
        """
        if how_many < FEWEST:
            raise CheckpointError(f"a sample of {how_many} is too small for an interval that holds; {FEWEST} will do")
        rng, how_many = np.random.default_rng(seed), min(how_many, len(items))
        strata = np.array_split(items[np.argsort(by, kind="stable")], max(1, how_many // A_STRATUM))
        sizes = np.array([len(own) for own in strata])
        ends = np.round(np.cumsum(sizes) / max(len(items), 1) * how_many).astype(int)  # as large a part of each
        drawn = [rng.choice(own, n, replace=False) for own, n in zip(strata, np.diff(ends, prepend=0), strict=True)]
        chosen = np.concatenate(drawn)
        order = np.argsort(chosen)
        stratum = np.repeat(np.arange(len(strata)), [len(own) for own in drawn])
        return cls(chosen[order], stratum[order], sizes)

    def mean(self, values: np.ndarray) -> tuple[float, float, float]:
        """An estimate of the population's mean and the ends of its 95 % interval, from the (n,) values of the sample.

        A population that was drawn whole has an interval of no width; values that are NaN make all three NaN.
        """
        from scipy.special import stdtrit  # SciPy takes a while to import

        n, total = np.bincount(self.stratum, minlength=len(self.sizes)), self.sizes.sum()
        means = np.bincount(self.stratum, values, len(self.sizes)) / n  # (S,)
        squares = np.bincount(self.stratum, (values - means[self.stratum]) ** 2, len(self.sizes))
        variances = np.where(n < self.sizes, squares / np.maximum(n - 1, 1), 0.0)
        shares = self.sizes / total
        mean = float(shares @ means)
        error = np.sqrt((shares**2 * (1 - n / self.sizes) * variances / n).sum())
        reach = float(stdtrit(max(len(values) - len(n), 1), (1 + LEVEL) / 2) * error)
        return mean, mean - reach, mean + reach
