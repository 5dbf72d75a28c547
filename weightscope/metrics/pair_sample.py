"""A random sample of pairs, alpha_ij and |f(x_j)|, from a stream of them (norm-based-attention, Fig. 3)."""

import numpy as np


class PairSample:
    """Pairs kept with a group's probability each, by seed.

    Parameters
    ----------
    shares : (n_groups,) array
        Probability with which a pair of a group is kept.
    seed : int
    """

    def __init__(self, shares: np.ndarray, seed: int = 0) -> None:
        self.shares, self._rng = np.asarray(shares, np.float64), np.random.default_rng(seed)
        self._kept: list[list[np.ndarray]] = [[] for _ in self.shares]

    def add(self, first: np.ndarray, second: np.ndarray, groups: np.ndarray) -> None:
        """Draw among the pairs (first[b, h, i, j], second[b, h, j]).

        Parameters
        ----------
        first : (b, H, m, n) array
            Pairs with an exact 0, as masked attention weights are, do not count.
        second : (b, H, n) array
        groups : (b, n) int array
        """
        heads, queries = first.shape[1:3]
        for group, share in enumerate(self.shares):
            at, key = np.nonzero(groups == group)
            if not len(at):
                continue
            possible = len(at) * heads * queries
            drawn = self._rng.choice(possible, self._rng.binomial(possible, share), replace=False, shuffle=False)
            token, head, query = np.unravel_index(drawn, (len(at), heads, queries))
            pairs = np.stack((first[at[token], head, query, key[token]], second[at[token], head, key[token]]), axis=1)
            self._kept[group].append(pairs[pairs[:, 0] > 0])

    def pairs(self) -> list[np.ndarray]:
        """(m, 2) array of every group."""
        return [np.concatenate([np.zeros((0, 2), np.float32), *kept]) for kept in self._kept]
