"""The position terms of every head: T^p and T^pp at one query position (detokenization paper, Fig. 3)."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from weightscope.detokenization.first_layer import FirstLayer
from weightscope.detokenization.position_curves import (
    Trend,
    near_mass,
    position_numerators,
    recency,
    softmax,
    trends,
    undertrained_rows,
)
from weightscope.detokenization.sigma import SigmaStatistics
from weightscope.errors import CheckpointError
from weightscope.folder import write_csv, write_npz

PAPER_QUERY = 500


@dataclass(frozen=True)
class PositionTerms:
    """Position terms of all heads at one query position.

    Attributes
    ----------
    query : int
        The position i.
    scale : float
        What multiplies a score before the softmax, 1/sqrt(d').
    p_numerator, pp_numerator : (n_heads, n_positions) arrays
        b_QK p_j' and p_i W_QK p_j', no sigma in them.
    sigma : SigmaStatistics or None
        None where only the numerators can be had or were asked for.
    undertrained : int array
        Positions whose embedding training hardly touched.
    """

    query: int
    scale: float
    p_numerator: np.ndarray
    pp_numerator: np.ndarray
    sigma: SigmaStatistics | None
    undertrained: np.ndarray

    @property
    def t_p(self) -> np.ndarray:
        """T^p averaged over the tokens at j, or its numerator: (n_heads, n_positions)."""
        return self.p_numerator if self.sigma is None else self.p_numerator * self.sigma.inverse_mean

    @property
    def t_pp(self) -> np.ndarray:
        """T^pp averaged over the tokens at i and at j, or its numerator: (n_heads, n_positions)."""
        if self.sigma is None:
            return self.pp_numerator
        return self.pp_numerator * self.sigma.inverse_mean * self.sigma.inverse_mean[self.query]

    @property
    def attended(self) -> np.ndarray:
        """Positions 0 .. i that were trained: those a trend is read from."""
        return np.setdiff1d(np.arange(self.query + 1), self.undertrained)

    def attention(self) -> np.ndarray:
        """softmax_j((T^p + T^pp) / sqrt(d')) over j = 0 .. i, (n_heads, i + 1): Fig. 3, lower right."""
        return softmax((self.t_p + self.t_pp)[:, : self.query + 1] * self.scale)


def position_terms(first: FirstLayer, query: int | None = None, unscaled: bool = False) -> PositionTerms:
    """Compute the position terms of every head of the first layer.

    Parameters
    ----------
    first : FirstLayer
    query : int, optional
        The position i; the paper's 500 by default, or the last one of a shorter model.
    unscaled : bool
        Leave sigma out, so that no token embedding is needed.

    Raises
    ------
    CheckpointError
        The model has no learned positions, has fewer than `query`, or sigma is wanted and there is no token embedding.
    """
    model, positions = first.model, first.model.positions
    if positions is None:
        problem = f"a {model.family.name} has no position embedding, hence no T^p and T^pp"
        raise CheckpointError(problem, file=model.checkpoint.name)
    query = min(PAPER_QUERY, len(positions) - 1) if query is None else query
    if not 7 <= query < len(positions):
        problem = f"query position {query} is outside 7 .. {len(positions) - 1}, the model's positions"
        raise CheckpointError(problem, file=model.checkpoint.name)
    try:
        sigma = None if unscaled else first.sigma
    except CheckpointError as error:
        raise CheckpointError(f"{error}; sigma needs one. `weightscope positions --unscaled` works without") from None
    numerators = [position_numerators(head.qk, head.qk_bias, positions, query) for head in first.heads]
    t_p, t_pp = (np.stack(terms).astype(np.float64) for terms in zip(*numerators, strict=True))
    return PositionTerms(query, first.heads[0].scale, t_p, t_pp, sigma, undertrained_rows(positions))


@dataclass(frozen=True)
class HeadTrend:
    """One row of trends.csv: what section 4 of the paper claims of a head, as numbers.

    Attributes
    ----------
    head : int
    t_p, t_pp, total : Trend
        Of T^p, of T^pp and of their sum.
    recency : float
        Spearman correlation of the sum with j; 1 where attention falls with distance all the way.
    near_mass : float
        Attention that position alone gives to the nearest tenth of the positions; NaN without sigma.
    """

    head: int
    t_p: Trend
    t_pp: Trend
    total: Trend
    recency: float
    near_mass: float


def head_trends(terms: PositionTerms) -> list[HeadTrend]:
    """The trends of T^p, T^pp and their sum over the positions that the query may attend to."""
    kept = terms.attended
    curves = [curve[:, kept] for curve in (terms.t_p, terms.t_pp, terms.t_p + terms.t_pp)]
    near = np.full(len(curves[0]), np.nan) if terms.sigma is None else near_mass(terms.attention())
    of_heads = zip(*(trends(curve) for curve in curves), strict=True)
    return [
        HeadTrend(head, t_p, t_pp, total, recency(curves[2][head]), float(near[head]))
        for head, (t_p, t_pp, total) in enumerate(of_heads)
    ]


def write_positions(terms: PositionTerms, found: list[HeadTrend], out: Path) -> None:
    """Write positions.npz and trends.csv into `out`."""
    scaled = {} if terms.sigma is None else {f"sigma_{k}": v for k, v in asdict(terms.sigma).items()}
    write_npz(
        out / "positions.npz",
        t_p=terms.t_p,
        t_pp=terms.t_pp,
        query=np.array(terms.query),
        undertrained=terms.undertrained,
        **scaled,
    )
    measures = [field.name for field in fields(Trend)]
    parts = ("t_p", "t_pp", "total")
    header = ["head", *(f"{part}_{measure}" for part in parts for measure in measures), "recency", "near_mass"]
    write_csv(
        out / "trends.csv",
        header,
        (
            [t.head, *(getattr(getattr(t, part), m) for part in parts for m in measures), t.recency, t.near_mass]
            for t in found
        ),
    )
