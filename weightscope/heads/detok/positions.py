"""The position terms T^p and T^pp of every head (detokenization paper, section 4 and Fig. 3)."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import numpy as np

from weightscope.checkpoint.provenance import Provenance
from weightscope.core.compute.cores import in_threads
from weightscope.core.compute.device import CPU, Device, rows_that_fit
from weightscope.core.errors import counted
from weightscope.core.results import Result, ShowsShapes, holds_arrays
from weightscope.core.tables import Column, Table
from weightscope.model.layers.factored import Factored

SHOWN = ("head", "t_p_slope", "t_p_linear_share", "t_pp_period", "t_pp_sinusoid_share", "near_mass")
QUERY = 500  # the position i of the paper's Figs 3 and 4
FEWEST = 8  # positions that a trend needs
RUNS = 12  # runs of positions that a sentence lists
CLIFF = 2 / 3  # ratio of T^p at the last two positions, below which the last was hardly trained
SPREAD = 0.14  # standard deviation of a token's embedding over its dimensions, GPT-2's
SPREADS = (0.5, 1.0, 2.0)  # times the given spread: the range shown with it
BEYOND = 0.01  # of attention outside a band, from which position does not explain it
FAVOURED = 1.1  # times an even share of attention, from which a head favours near tokens


# sigma, the part of a LayerNorm that cannot be folded, over all tokens and positions

POSITIONS_A_BLOCK = 64  # a block of sigma is (64, vocab): 13 MB for GPT-2
BYTES_A_SIGMA = 48  # bytes on a device, where nothing is in place and whole rows are sorted
TOKENS_ON_THEIR_WAY = 100_000_000  # bytes of the blocks of tokens on the device meanwhile
BAND = (2.5, 97.5)  # percentiles of the spread shown over tokens: the central 95 %

TokenBlocks = Callable[[], Iterable[tuple[int, np.ndarray]]]
BlockOfSigma = tuple[np.ndarray, list[np.ndarray]]


@holds_arrays
class SigmaStatistics(ShowsShapes):
    """sigma(e_t + p_j) summarised over every token t and position j, all float64."""

    token_mean: np.ndarray  # (vocab,), mean over positions: c_t, the paper's divisor of e_t
    mean: np.ndarray  # (n_positions,), over tokens
    minimum: np.ndarray
    maximum: np.ndarray
    inverse_mean: np.ndarray  # (n_positions,), 1/sigma: scales a position's term to its mean
    inverse_low: np.ndarray  # (n_positions,), 2.5th and 97.5th percentile of 1/sigma
    inverse_high: np.ndarray

    @classmethod
    def of_no_norm(cls, n_tokens: int, n_positions: int) -> "SigmaStatistics":
        """The statistics if nothing divides the embeddings: sigma is 1 throughout."""
        return cls(np.ones(n_tokens), *(np.ones(n_positions) for _ in range(6)))


def sigma_statistics(
    token_blocks: TokenBlocks,
    n_tokens: int,
    positions: np.ndarray,
    eps: float,
    progress: Callable[[int], object] = lambda done: None,
    device: Device = CPU,
) -> SigmaStatistics:
    """Statistics of sigma over all tokens and positions, without ever holding the full table.

    token_blocks (n, d), positions (n_positions, d).

    Var(e + p) = Var(e) + Var(p) + 2 Cov(e, p), so a block of positions costs one matrix product, in
    float32: where e and -p nearly cancel, the error of sigma^2 is 1e-6 of Var(e) + Var(p). Each
    core's thread works on its own block; peak memory is one (64, vocab) float32 block a thread, 13
    MB for GPT-2, plus what `token_blocks` holds.
    """
    variances = [block.var(axis=1, dtype=np.float64) for _, block in token_blocks()]
    token_variance = (np.concatenate(variances) + eps).astype(np.float32)  # (V,)
    if device is CPU:
        blocks = _on_cores(token_blocks, token_variance, positions, eps)
    else:
        blocks = _on_device(device, token_blocks, token_variance, positions, eps)
    token_sum = np.zeros(n_tokens)
    sums = []
    for block_sum, statistics in blocks:
        token_sum += block_sum
        sums.append(statistics)
        progress(len(statistics[0]))
    of_positions = map(np.concatenate, zip(*sums, strict=True))
    return SigmaStatistics(token_sum / len(positions), *of_positions)


def _on_cores(
    token_blocks: TokenBlocks, token_variance: np.ndarray, positions: np.ndarray, eps: float
) -> Iterator[BlockOfSigma]:
    """sigma summed over each block of positions, (V,), and the statistics of each position."""

    def of_block(block: np.ndarray) -> BlockOfSigma:
        table = _sigma_table(block, token_blocks(), token_variance, eps)  # (b, V)
        return table.sum(axis=0, dtype=np.float64), _over_tokens(table)

    starts = range(0, len(positions), POSITIONS_A_BLOCK)
    return in_threads(of_block, [positions[start:][:POSITIONS_A_BLOCK] for start in starts])


def _of_positions(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose product with a token's is 2 Cov(e, p), (b, d), and Var(p), (b, 1)."""
    centred = positions - positions.mean(axis=1, keepdims=True)  # (b, d)
    variance = (centred**2).mean(axis=1, keepdims=True, dtype=np.float64).astype(np.float32)
    return centred * np.float32(2 / positions.shape[1]), variance


def _sigma_table(
    positions: np.ndarray,
    token_blocks: Iterable[tuple[int, np.ndarray]],
    token_variance: np.ndarray,
    eps: float,
) -> np.ndarray:
    """sigma(e_t + p_j) for a few positions and all tokens, float32 (b, V).

    `token_variance` includes eps.
    """
    scaled, position_variance = _of_positions(positions)
    table = np.empty((len(positions), len(token_variance)), np.float32)
    for first, block in token_blocks:
        np.matmul(scaled, block.T, out=table[:, first : first + len(block)])
    table += token_variance
    table += position_variance
    np.maximum(table, eps, out=table)  # rounding may take what cancels below eps
    return np.sqrt(table, out=table)


def _over_tokens(table: np.ndarray) -> list[np.ndarray]:
    """The statistics of each row of a sigma table in SigmaStatistics' order; `table` is used up."""
    mean = table.mean(axis=1, dtype=np.float64)
    minimum, maximum = table.min(axis=1), table.max(axis=1)
    inverse = np.reciprocal(table, out=table)
    inverse_mean = inverse.mean(axis=1, dtype=np.float64)
    low, high = _ends_of_band(table.shape[1])
    inverse.partition((low, high), axis=1)
    statistics = (mean, minimum, maximum, inverse_mean, inverse[:, low], inverse[:, high])
    return [np.asarray(values, np.float64) for values in statistics]


def _ends_of_band(n: int) -> tuple[int, int]:
    """Nearest ranks of the ends of `BAND` among n sorted values."""
    low, high = (round(percent / 100 * (n - 1)) for percent in BAND)
    return low, high


def _on_device(
    device: Device,
    token_blocks: TokenBlocks,
    token_variance: np.ndarray,
    positions: np.ndarray,
    eps: float,
) -> Iterator[BlockOfSigma]:
    """Compute `_on_cores` by the array API standard, with as many positions a block as fit."""
    xp, n = device.xp, len(token_variance)
    low, high = _ends_of_band(n)
    variance, least = device.put(token_variance), device.put(np.array(eps, np.float32))
    free, a_row = device.free_bytes(), BYTES_A_SIGMA * n
    a_block = rows_that_fit(free, TOKENS_ON_THEIR_WAY, a_row, len(positions))

    def mean(x: Any) -> Any:
        return xp.sum(x, axis=1, dtype=xp.float64) / n

    for start in range(0, len(positions), a_block):
        scaled, position_variance = map(device.put, _of_positions(positions[start:][:a_block]))
        blocks = device.put_ahead((block,) for _, block in token_blocks())
        products = [scaled @ rows.T for (rows,) in blocks]
        squared = xp.concat(products, axis=1) + variance + position_variance  # (b, V)
        table = xp.sqrt(xp.maximum(squared, least))
        inverse = xp.sort(1 / table, axis=1)
        statistics = mean(table), xp.min(table, axis=1), xp.max(table, axis=1), mean(inverse)
        band = inverse[:, low], inverse[:, high]
        token_sum = device.get(xp.sum(table, axis=0, dtype=xp.float64))
        yield token_sum, [device.get(s).astype(np.float64) for s in (*statistics, *band)]


@holds_arrays
class Spread(ShowsShapes):
    """A substitute for token embeddings: standard deviation s, uncorrelated with p_j."""

    s: float
    position_squares: np.ndarray  # (n_positions,) sigma(p_j)^2, the norm's eps included

    @property
    def sigma(self) -> SigmaStatistics:
        """sigma_j^2 = s^2 + sigma(p_j)^2, the same for every token; of no token by itself."""
        sigma = np.sqrt(self.s**2 + self.position_squares.astype(np.float64))
        return SigmaStatistics(np.empty(0), sigma, sigma, sigma, *3 * (1 / sigma,))


class Near(NamedTuple):
    """Attention to the nearest k = 1 .. n positions and its band, (n_heads, n) arrays."""

    alone: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, alone: np.ndarray, bands: Any) -> "Near":
        """Sum attention (n_heads, n) from the query backwards; the band is over all (s, ...)."""
        summed = np.cumsum(np.stack([alone, *bands])[..., ::-1], axis=-1)
        return cls(summed[0], summed.min(axis=0), summed.max(axis=0))

    def beyond(self, k: int, measured: Any) -> np.ndarray:
        """Distance of what heads give the nearest k, (n_heads,), from the band; 0 within it."""
        low, high = self.low[:, k - 1], self.high[:, k - 1]
        return np.maximum(0, np.maximum(low - measured, measured - high))


@holds_arrays
class PositionTerms(ShowsShapes, Result):
    """Position terms of all heads at one query position."""

    FIGURE = "figures:position_figure"
    TABLES: ClassVar[dict[str, Callable[["PositionTerms"], Any]]] = {
        "positions.npz": attrgetter("arrays"),
        "trends.csv": attrgetter("heads"),
    }

    query: int  # the position i
    scale: float  # factor of a score before the softmax, 1/sqrt(d')
    p_numerator: np.ndarray  # (n_heads, n_positions) b_QK p_j', no sigma in it
    pp_numerator: np.ndarray  # (n_heads, n_positions) p_i W_QK p_j', no sigma in it
    sigma: SigmaStatistics
    undertrained: np.ndarray  # positions whose embedding training hardly touched, in order
    causal: bool  # True if a token is known to see no later one
    provenance: Provenance = field(default_factory=Provenance, repr=False)
    spread: Spread | None = None  # substitute for token embeddings in sigma, if they are left out

    @property
    def t_p(self) -> np.ndarray:
        """T^p averaged over the tokens at j: (n_heads, n_positions)."""
        return self.p_numerator * self.sigma.inverse_mean

    @property
    def t_pp(self) -> np.ndarray:
        """T^pp averaged over the tokens at i and at j: (n_heads, n_positions)."""
        return self.pp_numerator * self.sigma.inverse_mean * self.sigma.inverse_mean[self.query]

    @cached_property
    def over_spreads(self) -> "tuple[PositionTerms, ...]":
        """The terms at half, one and two times the spread; empty if sigma is of real tokens."""
        if self.spread is None:
            return ()
        spreads = [replace(self.spread, s=times * self.spread.s) for times in SPREADS]
        return tuple(replace(self, sigma=spread.sigma, spread=spread) for spread in spreads)

    def attention(self) -> np.ndarray:
        """softmax_j((T^p + T^pp) / sqrt(d')) over j = 0 .. i, terms averaged over tokens."""
        from scipy.special import softmax  # SciPy takes a while to import

        return softmax((self.t_p + self.t_pp)[:, : self.query + 1] * self.scale, axis=-1)

    @cached_property
    def near(self) -> Near:
        """Attention to near positions; the band is over the spreads, or over sigma_i (Fig. 3)."""
        bands = [terms.attention() for terms in self.over_spreads]
        if self.spread is None:
            heads = range(len(self.p_numerator))
            for which in ("minimum", "maximum"):
                bands.append(np.stack([self.at_sigma(head, which).attention for head in heads]))
        return Near.of(self.attention(), bands)

    def at_sigma(self, head: int, which: str) -> "AtSigma":
        """T^pp, T^p + T^pp and its softmax for a head and one sigma_i (Fig. 3 but for upper left).

        Parameters
        ----------
        head : int
        which : {"mean", "minimum", "maximum"}
            The query's sigma_i among the tokens possible there: 1/sigma_i at its mean, as
            everywhere else, so that T^pp is its mean over tokens; or sigma_i at its minimum or
            maximum.
        """
        from scipy.special import softmax

        inverse = self.sigma.inverse_mean if which == "mean" else 1 / getattr(self.sigma, which)
        t_p = self.p_numerator[head, : self.query + 1]
        t_pp = self.pp_numerator[head, : self.query + 1] * inverse[self.query]
        pp = spread_over_tokens(t_pp, self.sigma)
        both = spread_over_tokens(t_p + t_pp, self.sigma)
        return AtSigma(pp, both, softmax(both.mean * self.scale))

    @property
    def cliff(self) -> float | None:
        """|T^p| of the last position over the one before, in the median head, if it is a cliff."""
        before, last = np.abs(self.t_p[:, -2:]).T  # (n_heads,) each
        positive = before > 0
        if not positive.any():
            return None
        ratio = float(np.median(last[positive] / before[positive]))
        return ratio if ratio < CLIFF else None

    @property
    def cautions(self) -> tuple[str, ...]:
        """Caveats on sigma, the mask, and positions that training hardly touched, in sentences."""
        cautions = []
        if self.spread is not None:
            low, _, high = (f"{times * self.spread.s:g}" for times in SPREADS)
            cautions.append(
                f"sigma_j^2 = s^2 + Var p_j with s = {self.spread.s:g} ({low} and {high} "
                "shown too) replaces the token embeddings: this holds where they are uncorrelated "
                "with position embeddings."
            )
        if not self.causal:
            cautions.append("Only positions up to the query are compared, as under a causal mask.")
        return (*cautions, *self._untrained)

    @property
    def _untrained(self) -> tuple[str, ...]:
        """Caveats on positions that training hardly touched."""
        if not len(self.undertrained):
            if self.cliff is None:
                return ()
            last = self.t_p.shape[1] - 1
            why = ""
            if self.causal:
                why = ": no later token attends to the last position, so it was trained less"
            return (
                f"T^p of the last position, {last}, is {self.cliff:.2f} times T^p of position "
                f"{last - 1} in the median head{why}.",
            )
        count, listed = len(self.undertrained), in_runs(self.undertrained)
        left_out = (
            f"{counted(count, 'position')} hardly ever trained ({listed}), left out of the trends."
        )
        if self.query not in self.undertrained:
            return (left_out,)
        trained = np.setdiff1d(np.arange(self.t_p.shape[1]), self.undertrained)
        return (
            f"Query position {self.query} was hardly ever trained: T^pp and attention come "
            f"from a row near its random start; the last trained position is {trained[-1]}.",
            left_out,
        )

    @cached_property
    def heads(self) -> Table:
        """One row per head: the quantities of the paper's section 4.

        Trends are read from the positions that the query may attend to and that were trained.
        """
        trained = np.setdiff1d(np.arange(self.query + 1), self.undertrained)
        t_p, t_pp = self.t_p[:, trained], self.t_pp[:, trained]
        lowest, highest = trained[t_p.argmin(axis=1)], trained[t_pp.argmax(axis=1)]
        falling = (np.diff(t_p) < 0).mean(axis=1)
        near, to_near = near_mass(self.attention()), "that position gives to the nearest tenth"
        columns = [
            Column("head", np.arange(len(t_p))),
            *_trend_columns("t_p", "$T^p$", t_p),
            *_trend_columns("t_pp", "$T^pp$", t_pp),
            *_trend_columns("total", "$T^p + T^pp$", t_p + t_pp),
            Column("t_p_lowest_at", lowest, "$T^p$ lowest at", meaning="position"),
            Column("t_p_falling", falling, "$T^p$ falls", meaning="share of its steps"),
            Column("t_pp_highest_at", highest, "$T^pp$ highest at", meaning="position"),
            Column("near_mass", near, "near mass", meaning=f"attention {to_near}"),
        ]
        if self.spread is not None:
            near = np.stack([near_mass(terms.attention()) for terms in self.over_spreads])
            low, high = near.min(axis=0), near.max(axis=0)
            over = "over half the spread, the spread and twice the spread"
            columns += [
                Column("near_mass_low", low, "from", meaning=f"lowest near mass {over}"),
                Column("near_mass_high", high, "to", meaning=f"highest near mass {over}"),
            ]
        caption = f"Trends of the position terms over $j$, at query position {self.query}."
        return Table(columns, caption)

    @property
    def headline(self) -> str:
        """The effect of position alone, in a sentence."""
        even = near_mass(np.full(self.query + 1, 1 / (self.query + 1)))
        near = np.count_nonzero(self.heads["near_mass"] > FAVOURED * even)
        most = self.nearest_head()
        mass = self.heads["near_mass"][most]
        if not near:
            return (
                f"Position alone makes no head favour near tokens: none gives more than {mass:.1%} "
                f"of its attention to the nearest tenth of them (chance: {even:.1%})."
            )
        by_spread = ""
        if self.spread is not None:
            low, high = (self.heads[f"near_mass_{end}"][most] for end in ("low", "high"))
            by_spread = f", {low:.0%} to {high:.0%} by spread"
        return (
            f"Position alone makes {near} of {len(self.heads)} heads favour near tokens; head "
            f"{most} gives {mass:.0%} of its attention to the nearest tenth of them (chance: "
            f"{even:.0%}{by_spread})."
        )

    @property
    def lead(self) -> str:
        """The headline and the caveats."""
        return " ".join([self.headline, *self.cautions])

    def shown(self) -> list[Table]:
        """The main columns, one row per head."""
        return [self.heads.select(*self.columns_shown)]

    @property
    def columns_shown(self) -> tuple[str, ...]:
        """Names of the columns that a page shows."""
        return SHOWN if self.spread is None else (*SHOWN, "near_mass_low", "near_mass_high")

    def plot(self, head: int | None = None, *options: Any, ax: Any = None) -> Any:
        """Draw Fig. 3 of the paper for a head, by default the one that looks nearest."""
        return super().plot(self.nearest_head() if head is None else head, *options, ax=ax)

    def nearest_head(self) -> int:
        """The head that position makes look nearest."""
        return int(np.argmax(self.heads["near_mass"]))

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays of positions.npz, with bare numerators if sigma is a spread's."""
        about = {"query": np.array(self.query), "undertrained": self.undertrained}
        if self.spread is None:
            t_p, t_pp = self.t_p, self.t_pp
            sigma = {f"sigma_{name}": value for name, value in asdict(self.sigma).items()}
        else:
            t_p, t_pp = self.p_numerator, self.pp_numerator
            sigma = {"spread": np.array(self.spread.s), "sigma": self.sigma.mean}
        return {"t_p": t_p, "t_pp": t_pp, **about, **sigma}


def _trend_columns(part: str, symbol: str, curves: np.ndarray) -> list[Column]:
    slope, linear, period, sinusoid = trends(curves)
    period_is = (
        f"of its strongest sinusoid, in positions; {curves.shape[1]}, the window's own "
        "length, is a lower bound"
    )
    columns = (
        ("slope", "slope", slope, "of the line fitted to it, per position"),
        ("linear_share", "linear share", linear, "of its variance"),
        ("period", "period", period, period_is),
        ("sinusoid_share", "sinusoid share", sinusoid, "of its variance"),
    )
    return [
        Column(f"{part}_{name}", values, f"{words} of {symbol}", meaning=meaning)
        for name, words, values, meaning in columns
    ]


def in_runs(indices: np.ndarray) -> str:
    """Sorted indices as text, with runs shortened: 3, 191-511."""
    runs = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)
    shown = []
    for run in runs[:RUNS]:
        if len(run):
            shown.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]))
    if len(runs) > RUNS:
        shown.append("...")
    return ", ".join(shown)


def position_numerators(
    qk: Factored, qk_bias: np.ndarray, positions: np.ndarray, query: int
) -> tuple[np.ndarray, np.ndarray]:
    """b_QK p_j' and p_i W_QK p_j' for every j, (n_positions,) each: T^p and T^pp without sigma."""
    return positions @ qk_bias, (positions @ qk.right) @ (positions[query] @ qk.left)


class Curve(NamedTuple):
    """A position term over j, (n,) arrays: its mean over tokens at j, and their 95 % band."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def spread_over_tokens(numerator: np.ndarray, sigma: SigmaStatistics) -> Curve:
    """numerator_j / sigma_j, (n,), with sigma_j spread over the tokens at j (Fig. 3's band).

    The numerator knows no token, so its mean and percentiles follow from 1/sigma_j times the
    numerator, with the ends swapped where it is negative.
    """
    n = len(numerator)
    ends = np.stack([numerator * sigma.inverse_low[:n], numerator * sigma.inverse_high[:n]])
    return Curve(numerator * sigma.inverse_mean[:n], ends.min(axis=0), ends.max(axis=0))


class AtSigma(NamedTuple):
    """A head's position terms over j <= i, with one sigma_i for the query."""

    pp: Curve  # T^pp
    both: Curve  # T^p + T^pp
    attention: np.ndarray  # its softmax


class Trends(NamedTuple):
    """The paper's description of position curves, as numbers; (n_curves,) arrays."""

    slope: np.ndarray  # slope in j of the least-squares line; positive for ALiBi's bias
    linear_share: np.ndarray  # share of the curve's variance that the line explains (R^2)
    # period in positions of the strongest sinusoid left without the line; NaN without one, and a
    # lower bound if it is the curve's length, the longest tried
    period: np.ndarray
    sinusoid_share: np.ndarray  # share of variance that the sinusoid explains beyond the line


def trends(curves: np.ndarray) -> Trends:
    """Split each curve, (n_curves, n), into a line as ALiBi's and a sinusoid (section 4).

    The sinusoid is fitted by least squares at every period of a dense grid, orthogonal to the line,
    so that periods that do not divide the length are found as they are. A constant curve has slope
    0 and no sinusoid. Memory: 32 n^2 bytes, 34 MB for GPT-2's 1,024 positions.
    """
    n = curves.shape[1]
    if n < FEWEST:
        raise ValueError(f"a trend needs at least {FEWEST} positions, not {n}")
    j = np.arange(n) - (n - 1) / 2
    line = np.stack([np.full(n, n**-0.5), j / np.linalg.norm(j)])  # (2, n), orthonormal
    y = curves.astype(np.float64)
    y -= y.mean(axis=1, keepdims=True)  # (c, n)
    remainder = y - (y @ line.T) @ line
    total, unexplained = (y**2).sum(axis=1), (remainder**2).sum(axis=1)  # (c,)
    # Curves that are not constant up to rounding
    varies = total > 1e-24 * n * np.abs(curves).max(axis=1, initial=1.0) ** 2
    waves = varies & (unexplained > 1e-12 * total)
    variance = np.where(varies, total, 1.0)

    # Periods from the length down to 4 positions, eight to each cycle more that fits
    periods = n / np.arange(1, n / 4, 0.125)
    explained = _explained_by_sinusoids(remainder, line, j, periods)  # (c, n_periods)
    return Trends(
        slope=np.where(varies, [row @ j / (j @ j) for row in y], 0.0),
        linear_share=np.where(varies, 1 - unexplained / variance, 0.0),
        period=np.where(waves, periods[explained.argmax(axis=1)], np.nan),
        sinusoid_share=np.where(waves, explained.max(axis=1) / variance, 0.0),
    )


def _explained_by_sinusoids(
    remainder: np.ndarray, line: np.ndarray, j: np.ndarray, periods: np.ndarray
) -> np.ndarray:
    """Sum of squares that a sinusoid of each period explains beyond the line, (curves, periods)."""
    angles = 2 * np.pi * j / periods[:, None]  # (p, n)
    sine, cosine = np.sin(angles), np.cos(angles)
    sine -= (sine @ line.T) @ line
    cosine -= (cosine @ line.T) @ line
    # Gram-Schmidt on the pair; near the longest period what the line leaves of the sine is short
    # but not zero.
    sine /= np.linalg.norm(sine, axis=1, keepdims=True)
    cosine -= (cosine * sine).sum(axis=1, keepdims=True) * sine
    cosine /= np.linalg.norm(cosine, axis=1, keepdims=True)
    return (remainder @ sine.T) ** 2 + (remainder @ cosine.T) ** 2


def recency(scores: np.ndarray) -> float:
    """Spearman correlation of scores (n,) with j; 1 if attention falls with distance throughout."""
    from scipy.stats import spearmanr  # SciPy's statistics take a while to import

    if np.ptp(scores) == 0:
        return 0.0
    return float(spearmanr(np.arange(len(scores)), scores).statistic)


def near_mass(attention: np.ndarray) -> np.ndarray:
    """Attention (..., n) to the nearest tenth of the positions; 0.1 if it is even."""
    return attention[..., -max(1, round(0.1 * attention.shape[-1])) :].sum(axis=-1)
