"""Statistics of more numbers than fit in memory, taken batch by batch: moments, and a random sample of pairs."""

import numpy as np

MOMENTS = ("mean", "sd", "cv", "max", "min")  # as the columns of tables are called


class Moments:
    """Mean, standard deviation and extremes, of several quantities at a time.

    Batches are merged by Chan, Golub and LeVeque's update, which loses nothing where the deviation is small beside the
    mean.

    Parameters
    ----------
    shape : tuple of int
        A quantity an element.

    Attributes
    ----------
    count, mean, smallest, largest : float64 arrays of that shape
    squares : float64 array of that shape
        Sum of squared deviations from the mean.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count, self.mean, self.squares = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.smallest, self.largest = np.full(shape, np.inf), np.full(shape, -np.inf)

    def add(self, values: np.ndarray, at: int | tuple[int, ...] = ()) -> None:
        """Take in (..., m) values, m of every quantity or, with `at`, of those at this index."""
        values = values.astype(np.float64)
        before, new = self.count[at], values.shape[-1]
        mean = values.mean(axis=-1)
        apart = mean - self.mean[at]
        self.squares[at] += ((values - mean[..., None]) ** 2).sum(axis=-1) + apart**2 * before * new / (before + new)
        self.mean[at] += apart * new / (before + new)
        self.count[at] += new
        self.smallest[at] = np.minimum(self.smallest[at], values.min(axis=-1))
        self.largest[at] = np.maximum(self.largest[at], values.max(axis=-1))

    def table(self) -> np.ndarray:
        """Mean, standard deviation, coefficient of variation, maximum and minimum (`MOMENTS`): (..., 5) float64."""
        with np.errstate(invalid="ignore", divide="ignore"):
            deviation = np.sqrt(self.squares / self.count)  # of all numbers, not of a sample
            return np.stack([self.mean, deviation, deviation / self.mean, self.largest, self.smallest], axis=-1)

    def pooled(self) -> "Moments":
        """The moments of all quantities' numbers together, of shape ()."""
        whole = Moments(())
        whole.count = self.count.sum()
        whole.mean = (self.mean * self.count).sum() / whole.count
        whole.squares = (self.squares + self.count * (self.mean - whole.mean) ** 2).sum()
        whole.smallest, whole.largest = self.smallest.min(), self.largest.max()
        return whole


class PairSample:
    """A random sample of the pairs alpha_ij and |f(x_j)|, by the kind of token j (norm-based-attention, Fig. 3).

    Parameters
    ----------
    shares : (n_kinds,) array
        Probability with which a pair of a kind is kept.
    room : int
        For so many pairs of a kind; what is drawn beyond them is dropped.
    seed : int
    """

    def __init__(self, shares: np.ndarray, room: int, seed: int = 0) -> None:
        self.shares, self._rng = np.asarray(shares, np.float64), np.random.default_rng(seed)
        # Made once: small arrays kept between the large ones of a forward pass would hold on to the heap around them.
        self._kept, self._sizes = np.empty((len(self.shares), room, 2), np.float32), [0] * len(self.shares)

    def add(self, attention: np.ndarray, norms: np.ndarray, kinds: np.ndarray) -> None:
        """Draw among the pairs of a batch.

        Parameters
        ----------
        attention : (b, H, m, n) array
            Pairs with an exact 0, as masked attention weights are, do not count.
        norms : (b, H, n) array
        kinds : (b, n) int array
        """
        heads, queries = attention.shape[1:3]
        for kind, share in enumerate(self.shares):
            at, key = np.nonzero(kinds == kind)
            if not len(at):
                continue
            possible = len(at) * heads * queries
            drawn = self._rng.choice(possible, self._rng.binomial(possible, share), replace=False, shuffle=False)
            token, head, query = np.unravel_index(drawn, (len(at), heads, queries))
            pairs = np.stack(
                (attention[at[token], head, query, key[token]], norms[at[token], head, key[token]]), axis=1
            )
            free = self._kept[kind, self._sizes[kind] :]
            pairs = pairs[pairs[:, 0] > 0][: len(free)]
            free[: len(pairs)] = pairs
            self._sizes[kind] += len(pairs)

    def pairs(self) -> list[np.ndarray]:
        """(m, 2) float32 array of every kind."""
        return [kept[:size] for kept, size in zip(self._kept, self._sizes, strict=True)]
