"""A random sample of pairs, alpha_ij and |f(x_j)|, from a stream of them (norm-based-attention, Fig. 3)."""

import numpy as np


class PairSample:
    """Pairs kept with a group's probability each, by seed.

    Parameters
    ----------
    shares : (n_groups,) array
        Probability with which a pair of a group is kept.
    room : int
        For so many pairs of a group; what is drawn beyond them is dropped.
    seed : int
    """

    def __init__(self, shares: np.ndarray, room: int, seed: int = 0) -> None:
        self.shares, self._rng = np.asarray(shares, np.float64), np.random.default_rng(seed)
        # Made once: small arrays kept between the large ones of a forward pass would hold on to the heap around them.
        self._kept, self._sizes = np.empty((len(self.shares), room, 2), np.float32), [0] * len(self.shares)

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
            free = self._kept[group, self._sizes[group] :]
            pairs = pairs[pairs[:, 0] > 0][: len(free)]
            free[: len(pairs)] = pairs
            self._sizes[group] += len(pairs)

    def pairs(self) -> list[np.ndarray]:
        """(m, 2) float32 array of every group."""
        return [kept[:size] for kept, size in zip(self._kept, self._sizes, strict=True)]
