"""The position terms T^p and T^pp of every head (detokenization paper, section 4 and Fig. 3)."""

from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from weightscope.checkpoint.provenance import Provenance
from weightscope.core.errors import counted
from weightscope.core.files import Files
from weightscope.core.results import Result, ShowsShapes, function_at
from weightscope.core.tables import Column, Table
from weightscope.heads.detok.sigma import SigmaStatistics
from weightscope.model.layers.factored import Factored

SHOWN = ("head", "t_p_slope", "t_p_linear_share", "t_pp_period", "t_pp_sinusoid_share", "near_mass")
QUERY = 500  # the position i of the paper's Figs 3 and 4
FEWEST = 8  # positions that a trend needs
RUNS = 12  # of positions that a sentence lists
# of T^p at the position before: the last position has less where training hardly shaped it
CLIFF = 2 / 3
SPREAD = 0.14  # standard deviation of a token's embedding over its dimensions, GPT-2's
SPREADS = (0.5, 1.0, 2.0)  # times the spread that is given: the range that is shown beside it

FAVOURED = 1.1  # times an even share of attention, from which a head favours near tokens


@dataclass(frozen=True, eq=False, repr=False)
class Spread(ShowsShapes):
    """A stand-in for token embeddings that are not at hand: all of standard deviation s,
    uncorrelated with p_j.
    """

    s: float
    position_squares: np.ndarray  # (n_positions,): sigma(p_j)^2, the norm's eps included

    @property
    def sigma(self) -> SigmaStatistics:
        """sigma_j^2 = s^2 + sigma(p_j)^2, the same for every token; of no token by itself."""
        sigma = np.sqrt(self.s**2 + self.position_squares.astype(np.float64))
        return SigmaStatistics(np.empty(0), sigma, sigma, sigma, *3 * (1 / sigma,))


@dataclass(frozen=True, eq=False, repr=False)
class PositionTerms(ShowsShapes, Result):
    """Position terms of all heads at one query position."""

    FIGURE = "heads.detok.figures:position_figure"

    query: int  # the position i
    scale: float  # what multiplies a score before the softmax, 1/sqrt(d')
    p_numerator: np.ndarray  # (n_heads, n_positions): b_QK p_j', no sigma in it
    pp_numerator: np.ndarray  # (n_heads, n_positions): p_i W_QK p_j', no sigma in it
    sigma: SigmaStatistics
    undertrained: np.ndarray  # positions whose embedding training hardly touched, in order
    causal: bool  # whether a token is known to see none that comes after it
    provenance: Provenance = field(default_factory=Provenance, repr=False)
    spread: Spread | None = None  # what sigma is made of where token embeddings are left out

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
        """The same at half the spread, at the spread and at twice the spread; none where sigma is
        of real tokens.
        """
        if self.spread is None:
            return ()
        spreads = [replace(self.spread, s=times * self.spread.s) for times in SPREADS]
        return tuple(replace(self, sigma=spread.sigma, spread=spread) for spread in spreads)

    def attention(self) -> np.ndarray:
        """softmax_j((T^p + T^pp) / sqrt(d')) over j = 0 .. i, averaged over what tokens may stand
        at i and j.
        """
        from scipy.special import softmax  # SciPy takes a while to import

        return softmax((self.t_p + self.t_pp)[:, : self.query + 1] * self.scale, axis=-1)

    def at_sigma(self, head: int, which: str) -> "AtSigma":
        """T^pp, T^p + T^pp and the softmax of a head's sum, with one sigma_i for the query: Fig. 3
        but for upper left.

        Parameters
        ----------
        head : int
        which : {"mean", "minimum", "maximum"}
            Over the tokens that may stand at the query position: 1/sigma_i at its mean, as
            everywhere else, so that T^pp is its mean over tokens; or sigma_i at its minimum or
            maximum.
        """
        from scipy.special import softmax

        inverse = self.sigma.inverse_mean if which == "mean" else 1 / getattr(self.sigma, which)
        t_p, t_pp = (
            terms[head, : self.query + 1] for terms in (self.p_numerator, self.pp_numerator)
        )
        t_pp = t_pp * inverse[self.query]
        pp, both = (spread_over_tokens(t, self.sigma) for t in (t_pp, t_p + t_pp))
        return AtSigma(pp, both, softmax(both.mean * self.scale))

    @property
    def cliff(self) -> float | None:
        """|T^p| of the last position over |T^p| of the one before it, in the median head, where it
        has a cliff.
        """
        before, last = np.abs(self.t_p[:, -2:]).T  # (n_heads,) each
        ratio = (
            float(np.median(last[before > 0] / before[before > 0])) if (before > 0).any() else 1.0
        )
        return ratio if ratio < CLIFF else None

    @property
    def cautions(self) -> tuple[str, ...]:
        """Caveats on what is compared, and on positions that training hardly touched, in
        sentences.
        """
        one_way = "Only positions up to the query are compared, as under a causal mask."
        return (*self._stood_in, *([] if self.causal else [one_way]), *self._untrained)

    @property
    def _stood_in(self) -> tuple[str, ...]:
        """A caveat on a sigma without token embeddings."""
        if self.spread is None:
            return ()
        low, _, high = (
            f"{each.spread.s:g}" for each in self.over_spreads if each.spread is not None
        )
        return (
            f"sigma_j^2 = s^2 + Var p_j with s = {self.spread.s:g} ({low} and {high} shown beside "
            "it) stands in for token embeddings: it holds where these are uncorrelated with "
            "position embeddings.",
        )

    @property
    def _untrained(self) -> tuple[str, ...]:
        """Caveats on positions that training hardly touched."""
        if not len(self.undertrained):
            if self.cliff is None:
                return ()
            last = self.t_p.shape[1] - 1
            why = (
                ": no later token attends to the last position, so it was trained less"
                * self.causal
            )
            return (
                f"T^p of the last position, {last}, is {self.cliff:.2f} times that of position "
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
            f"Query position {self.query} was hardly ever trained: T^pp and attention are those of "
            f"a row near its random start; the last trained position is {trained[-1]}.",
            left_out,
        )

    @cached_property
    def heads(self) -> Table:
        """One row per head: the quantities of the paper's section 4.

        Trends are read from the positions that the query may attend to and that were trained.
        """
        trained = np.setdiff1d(np.arange(self.query + 1), self.undertrained)
        t_p, t_pp = self.t_p[:, trained], self.t_pp[:, trained]
        columns = [
            Column("head", np.arange(len(t_p))),
            *_trend_columns("t_p", "$T^p$", t_p),
            *_trend_columns("t_pp", "$T^pp$", t_pp),
            *_trend_columns("total", "$T^p + T^pp$", t_p + t_pp),
            Column(
                "t_p_lowest_at", trained[t_p.argmin(axis=1)], "$T^p$ lowest at", meaning="position"
            ),
            Column(
                "t_p_falling",
                (np.diff(t_p) < 0).mean(axis=1),
                "$T^p$ falls",
                meaning="share of its steps",
            ),
            Column(
                "t_pp_highest_at",
                trained[t_pp.argmax(axis=1)],
                "$T^pp$ highest at",
                meaning="position",
            ),
            Column(
                "near_mass",
                near_mass(self.attention()),
                "near mass",
                meaning="attention that position gives to the nearest tenth",
            ),
            *self._near_mass_by_spread(),
        ]
        return Table(
            columns, f"Trends of the position terms over $j$, at query position {self.query}."
        )

    def _near_mass_by_spread(self) -> list[Column]:
        """The range of near_mass over the spreads shown; nothing where sigma is of real tokens."""
        if self.spread is None:
            return []
        # (3, n_heads)
        masses = np.stack([near_mass(each.attention()) for each in self.over_spreads])
        which = "over half the spread, the spread and twice the spread"
        return [
            Column(
                "near_mass_low", masses.min(axis=0), "from", meaning=f"lowest near mass {which}"
            ),
            Column(
                "near_mass_high", masses.max(axis=0), "to", meaning=f"highest near mass {which}"
            ),
        ]

    @property
    def headline(self) -> str:
        """What position alone does, in a sentence."""
        even = near_mass(np.full(self.query + 1, 1 / (self.query + 1)))
        near, most = (
            np.count_nonzero(self.heads["near_mass"] > FAVOURED * even),
            self.nearest_head(),
        )
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
        """The same, and the caveats."""
        return " ".join([self.headline, *self.cautions])

    def shown(self) -> list[Table]:
        """What each head does with positions."""
        return [self.heads.select(*self.columns_shown)]

    @property
    def columns_shown(self) -> tuple[str, ...]:
        """Names of the columns that a page shows."""
        return SHOWN if self.spread is None else (*SHOWN, "near_mass_low", "near_mass_high")

    def plot(self, head: int | None = None) -> Any:
        """Fig. 3 of the paper for a head, by default the one that looks nearest: a matplotlib
        Figure.
        """
        return function_at(self.FIGURE)(self, self.nearest_head() if head is None else head)

    def nearest_head(self) -> int:
        """The head that position makes look nearest."""
        return int(np.argmax(self.heads["near_mass"]))

    def write_tables(self, files: Files) -> None:
        """Write positions.npz, of a spread the numerators without any sigma, and trends.csv."""
        about = {"query": np.array(self.query), "undertrained": self.undertrained}
        if self.spread is None:
            sigma = {f"sigma_{name}": value for name, value in asdict(self.sigma).items()}
            files.npz("positions.npz", t_p=self.t_p, t_pp=self.t_pp, **about, **sigma)
        else:
            sigma = {"spread": np.array(self.spread.s), "sigma": self.sigma.mean}
            files.npz(
                "positions.npz", t_p=self.p_numerator, t_pp=self.pp_numerator, **about, **sigma
            )
        files.table("trends.csv", self.heads)


def _trend_columns(part: str, symbol: str, curves: np.ndarray) -> list[Column]:
    slope, linear, period, sinusoid = trends(curves)
    period_is = (
        f"of its strongest sinusoid, in positions; {curves.shape[1]}, the window's own "
        "length, is a lower bound"
    )
    return [
        Column(
            f"{part}_slope",
            slope,
            f"slope of {symbol}",
            meaning="of the line fitted to it, per position",
        ),
        Column(
            f"{part}_linear_share", linear, f"linear share of {symbol}", meaning="of its variance"
        ),
        Column(f"{part}_period", period, f"period of {symbol}", meaning=period_is),
        Column(
            f"{part}_sinusoid_share",
            sinusoid,
            f"sinusoid share of {symbol}",
            meaning="of its variance",
        ),
    ]


def in_runs(indices: np.ndarray) -> str:
    """Sorted indices as text, with runs shortened: 3, 191-511."""
    runs = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)
    shown = [
        f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:RUNS] if len(run)
    ]
    return ", ".join([*shown, *(["..."] if len(runs) > RUNS else [])])


def position_numerators(
    qk: Factored, qk_bias: np.ndarray, positions: np.ndarray, query: int
) -> tuple[np.ndarray, np.ndarray]:
    """b_QK p_j' and p_i W_QK p_j' for every j: T^p and T^pp before any sigma divides them; qk (d,
    d), qk_bias (d,),
    positions (n_positions, d) -> (n_positions,), (n_positions,).
    """
    return positions @ qk_bias, (positions @ qk.right) @ (positions[query] @ qk.left)


class Curve(NamedTuple):
    """A position term over j: its mean over tokens at j, and the band that holds 95 % of them; (n,)
    arrays.
    """

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def spread_over_tokens(numerator: np.ndarray, sigma: SigmaStatistics) -> Curve:
    """numerator_j / sigma_j with sigma_j spread over the tokens that may stand at j (Fig. 3's
    band): numerator (n,).

    The numerator knows no token, so its mean and percentiles follow from 1/sigma_j times the
    numerator, with the ends swapped where it is negative.
    """
    n = len(numerator)
    ends = np.stack([numerator * sigma.inverse_low[:n], numerator * sigma.inverse_high[:n]])
    return Curve(numerator * sigma.inverse_mean[:n], ends.min(axis=0), ends.max(axis=0))


class AtSigma(NamedTuple):
    """A head's position terms with one sigma_i for the query: T^pp and T^p + T^pp over j <= i, and
    the softmax.
    """

    pp: Curve
    both: Curve
    attention: np.ndarray


class Trends(NamedTuple):
    """The paper's description of position curves, as numbers; (n_curves,) arrays."""

    # Of the least-squares line, per position: ALiBi's bias is a positive slope in j
    slope: np.ndarray
    linear_share: np.ndarray  # Share of the curve's variance that the line explains (R^2)
    # Period in positions of the strongest sinusoid that is left when the line is taken out; NaN
    # without one. The longest that is tried is the curve's own length: that one is a lower bound.
    period: np.ndarray
    # Share of the curve's variance which that one sinusoid explains beyond the line
    sinusoid_share: np.ndarray


def trends(curves: np.ndarray) -> Trends:
    """Split each curve into an ALiBi-like line and a sinusoid (detokenization paper, section 4):
    curves (n_curves, n).

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
    # not constant up to rounding
    varies = total > 1e-24 * n * np.abs(curves).max(axis=1, initial=1.0) ** 2
    waves = varies & (unexplained > 1e-12 * total)
    variance = np.where(varies, total, 1.0)

    # from the length down to 4 positions, eight to each cycle more that fits
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
    """Sum of squares that a sinusoid of each period takes out of what a line left: (n_curves,
    n_periods).
    """
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
    """Spearman correlation of a score with j: 1 where attention falls with distance all the way, 0
    without a trend;
    scores (n,).
    """
    from scipy.stats import spearmanr  # SciPy's statistics take a while to import

    if np.ptp(scores) == 0:
        return 0.0
    return float(spearmanr(np.arange(len(scores)), scores).statistic)


def near_mass(attention: np.ndarray) -> np.ndarray:
    """Attention (..., n) to the nearest tenth of the positions; a tenth where position does not
    matter.
    """
    return attention[..., -max(1, round(0.1 * attention.shape[-1])) :].sum(axis=-1)
