"""Norm-based analysis of attention: one run of a model over sequences, reduced batch by batch.

From each batch, only sums, counts, extremes and a random sample of pairs are kept
(norm-based-attention, section 5).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np

from weightscope.core.progress import bar
from weightscope.core.tables import Column, Table, crossed
from weightscope.model.layers.factored import Triangle, triangle
from weightscope.model.layers.layer import Layer
from weightscope.model.metrics.lengths import (
    MeanByKind,
    counts_by_kind,
    output_triangles,
    sums_by_kind,
    value_norms,
)
from weightscope.model.metrics.rank_correlation import PairsPart, RankCorrelation, Spearman
from weightscope.model.metrics.spectra import affine_singular_values
from weightscope.model.model import Model
from weightscope.model.text.kinds import TokenKinds, token_kinds
from weightscope.model.text.sequences import Texts, paragraph_pairs
from weightscope.runner.framing import framing_of
from weightscope.runner.runner import Activations, Runner, Study, open_runner

MOMENTS = ("mean", "sd", "cv", "max", "min")  # names of the table columns


class RunningMoments:
    """Mean, standard deviation and extremes, of several quantities at a time.

    Batches are merged by Chan, Golub and LeVeque's update, which stays exact where the deviation is
    much smaller than the mean. shape: one element per quantity; squares: sum of squared deviations
    from the mean.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count, self.mean, self.squares = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.smallest, self.largest = np.full(shape, np.inf), np.full(shape, -np.inf)

    def add(self, values: np.ndarray, at: int | tuple[int, ...] = ()) -> None:
        """Add (..., m) values: m of every quantity, or of those at the index `at`."""
        values = values.astype(np.float64)
        before, new = self.count[at], values.shape[-1]
        mean = values.mean(axis=-1)
        apart = mean - self.mean[at]
        within = ((values - mean[..., None]) ** 2).sum(axis=-1)
        self.squares[at] += within + apart**2 * before * new / (before + new)
        self.mean[at] += apart * new / (before + new)
        self.count[at] += new
        self.smallest[at] = np.minimum(self.smallest[at], values.min(axis=-1))
        self.largest[at] = np.maximum(self.largest[at], values.max(axis=-1))

    def table(self) -> np.ndarray:
        """Mean, sd, coefficient of variation, maximum, minimum (`MOMENTS`): (..., 5) float64."""
        with np.errstate(invalid="ignore", divide="ignore"):
            deviation = np.sqrt(self.squares / self.count)  # the population's, not a sample's
            variation = deviation / self.mean
        columns = [self.mean, deviation, variation, self.largest, self.smallest]
        return np.stack(columns, axis=-1)

    def pooled(self) -> "RunningMoments":
        """The moments of all quantities' numbers together, of shape ()."""
        total = RunningMoments(())
        total.count = self.count.sum()
        total.mean = (self.mean * self.count).sum() / total.count
        total.squares = (self.squares + self.count * (self.mean - total.mean) ** 2).sum()
        total.smallest, total.largest = self.smallest.min(), self.largest.max()
        return total


class PairSample:
    """Random sample of the pairs alpha_ij and |f(x_j)|, by the kind of token j (Fig. 3).

    shares: (n_kinds,), the probability with which a pair of a kind is kept. room: the most pairs of
    a kind; further draws are dropped.
    """

    def __init__(self, shares: np.ndarray, room: int, seed: int = 0) -> None:
        self.shares, self._rng = np.asarray(shares, np.float64), np.random.default_rng(seed)
        # Made once: small arrays kept between the large ones of a forward pass would hold on to the
        # heap around them.
        self._kept = np.empty((len(self.shares), room, 2), np.float32)
        self._sizes = [0] * len(self.shares)

    def add(self, attention: np.ndarray, norms: np.ndarray, kinds: np.ndarray) -> None:
        """Draw among a batch's pairs: attention (b, H, m, n), norms (b, H, n), kinds (b, n)."""
        heads, queries = attention.shape[1:3]
        for kind, share in enumerate(self.shares):
            place, key = np.nonzero(kinds == kind)
            if not len(place):
                continue
            possible = len(place) * heads * queries
            count = self._rng.binomial(possible, share)
            drawn = self._rng.choice(possible, count, replace=False, shuffle=False)
            token, head, query = np.unravel_index(drawn, (len(place), heads, queries))
            sequence, j = place[token], key[token]
            alphas, lengths = attention[sequence, head, query, j], norms[sequence, head, j]
            pairs = np.stack((alphas, lengths), axis=1)
            free = self._kept[kind, self._sizes[kind] :]
            pairs = pairs[pairs[:, 0] > 0][: len(free)]
            free[: len(pairs)] = pairs
            self._sizes[kind] += len(pairs)

    def pairs(self) -> list[np.ndarray]:
        """(m, 2) float32 array of every kind."""
        return [kept[:size] for kept, size in zip(self._kept, self._sizes, strict=True)]


# The analysis

SHARE = 0.01  # share of a kind's pairs in Fig. 3, as in the paper
PAIRS_DRAWN = 5000  # about the largest number of a kind's pairs in Fig. 3


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class NormAnalysis(Study):
    """Lengths of the vectors that L layers of H heads add up, by K kinds of token."""

    FIGURE, PAGE = "figures:layer_figure", "page:write_norms_page"
    TABLES: ClassVar = {
        "heads.csv": attrgetter("heads"),
        "layers.csv": attrgetter("layers"),
        "kinds.csv": attrgetter("kinds"),
        "shares.csv": attrgetter("shares"),
        "summary.csv": attrgetter("summary"),
        "weights.csv": attrgetter("weights"),
        "mixing.csv": attrgetter("mixing"),
        "norms.npz": lambda norms: norms.arrays(),
    }

    layer_indices: np.ndarray  # (L,)
    kind_names: tuple[str, ...]
    n_sequences: int  # sequences that were run
    n_tokens: int
    f: RunningMoments  # (L, H): |f(x)| of every token (Table 1)
    x: RunningMoments  # (L,): |x| of every token as it enters the layer (Table 2)
    ranks: list[Spearman]  # alpha against |f(x)| over all heads, by the kind of j (Table 3)
    parts: list[PairsPart]  # alpha and |f(x)| of all pairs, then of tenths by alpha (section 5.3)
    # (L, 3) share of other tokens in what reaches a token: of alpha, of lengths, of lengths with
    # the residual stream; NaN if a gate changes what heads gather
    mixed: np.ndarray
    singular_values: np.ndarray  # (L, H, r + 1): spectra of f as a linear map on [x 1] (Fig. 2)
    pairs: list[np.ndarray]  # (m, 2): sample of alpha and |f(x)| by kind (Fig. 3)
    # (L, H, K): alpha summed over a sequence's tokens of a kind; mean over queries, then over
    # sequences (Figs 4a and 5a)
    alpha: np.ndarray
    alpha_f: np.ndarray  # (L, H, K): |alpha f(x)|, averaged like alpha (Fig. 5b)
    f_by_kind: np.ndarray  # (L, H, K): mean |f(x)| of a kind (Fig. 4b); NaN if it never occurs
    gated: bool  # True if a gate multiplies what heads gather; all of the above leave it out
    seed: int  # for the sample of pairs and the heads shown in Fig. 2

    @property
    def lead(self) -> str:
        """Summary: weight and length that special tokens and punctuation get, and the run."""
        *kinds, _ = zip(self.shares.rows(), self.ranks, strict=True)  # the last is all others
        takes, absent = [], []
        for (kind, weight, length), ranks in kinds:
            if ranks.pairs:
                gives = f"gives {length:.1%} of the length of what is added up"
                takes.append(f"{kind} takes {weight:.1%} of the attention weight and {gives}")
            else:
                absent.append(f"no token is {kind}")
        size = f"{self.n_sequences:,} sequences, {self.n_tokens:,} tokens"
        rest = f"the rest is all other tokens'. Run on {size}, from {self.source}."
        return "; ".join([*takes, *absent, rest])

    @property
    def about(self) -> str:
        n_layers, n_heads = self.alpha.shape[:2]
        return f"{self.model}: {n_layers} layers of {n_heads} heads, {self.n_tokens:,} tokens"

    def printed(self) -> list[str]:
        """The lead and Table 3."""
        return [self.lead, self.kinds.text()]

    def shown(self) -> list[Table]:
        """Tables of what each kind of token gets and gives."""
        return [self.shares, self.kinds]

    @cached_property
    def heads(self) -> Table:
        """One row per head: Table 1, extreme singular values of f, and Figs 4 and 5 by kind."""
        largest = self.singular_values[..., 0].ravel()
        smallest = self.singular_values[..., -1].ravel()
        columns = [
            *crossed(layer=self.layer_indices, head=range(self.alpha.shape[1])),
            *_moment_columns("|f|", "$|f(x)|$", self.f),
            Column("sigma_max", largest, meaning="largest stretch by $f$ on $[x 1]$"),
            Column("sigma_min", smallest, meaning="smallest stretch by $f$ on $[x 1]$"),
            *self._kind_columns("alpha", self.alpha),
            *self._kind_columns("|alpha f|", self.alpha_f),
            *self._kind_columns("|f|", self.f_by_kind),
        ]
        return Table(columns, "Table 1: $|f(x)|$ of every head.")

    @cached_property
    def layers(self) -> Table:
        """One row per layer: Table 2, and by kind what Fig. 5 shows."""
        columns = [
            Column("layer", self.layer_indices),
            *_moment_columns("|x|", "$|x|$", self.x),
            *self._kind_columns("alpha", self.alpha.mean(axis=1)),
            *self._kind_columns("|alpha f|", self.alpha_f.mean(axis=1)),
        ]
        return Table(columns, "Table 2: $|x|$, the residual stream as it enters the layer.")

    @cached_property
    def kinds(self) -> Table:
        """One row per kind of token: Table 3."""
        pairs, rho, error = zip(*((r.pairs, r.rho, r.error) for r in self.ranks), strict=True)
        return Table(
            [
                Column("kind", self.kind_names, "kind of token"),
                Column("pairs", pairs),
                Column("spearman", rho, "Spearman of $alpha$ and $|f(x)|$"),
                Column("within", error, "known to within"),
            ],
            "Table 3. Every pair of a query $i$ and a token $j$, in all heads and layers, by the "
            "kind of $j$; masked pairs do not count. Ranks come from narrow bins; the last column "
            "bounds the resulting error.",
        )

    @cached_property
    def shares(self) -> Table:
        """One row per kind of token: its shares of attention weight and of length added up."""
        weight, length = (values.mean(axis=(0, 1)) for values in (self.alpha, self.alpha_f))  # (K,)
        return Table(
            [
                Column("kind", self.kind_names, "kind of token"),
                Column("weight", weight / weight.sum(), "share of $alpha$", format=".1%"),
                Column("length", length / length.sum(), "share of $|alpha f(x)|$", format=".1%"),
            ],
            "Mean over queries, sequences, heads and layers.",
        )

    @cached_property
    def summary(self) -> Table:
        """Last rows of Tables 1 and 2: all heads and layers pooled, and their means."""
        rows = [
            ("|f(x)|, all heads together", *self.f.pooled().table()),
            ("|f(x)|, mean of the heads", *self.f.table().mean(axis=(0, 1))),
            ("|x|, all layers together", *self.x.pooled().table()),
            ("|x|, mean of the layers", *self.x.table().mean(axis=0)),
        ]
        return Table.of_rows(("of", *MOMENTS), rows, "Tables 1 and 2, last rows.")

    @cached_property
    def weights(self) -> Table:
        """One row for all pairs and for each tenth by weight: how lengths vary within it."""
        names = [str(number or "all") for number in range(len(self.parts))]
        start, end, mean, cv, at_one, ranks, by_kind = zip(*self.parts, strict=True)
        same = "the same at one $alpha$, to within 3 %; mean over pairs"
        shuffled = "the same with weights shuffled within each kind of token"
        columns = [
            Column("tenth", names, meaning="all pairs, or a tenth by weight, the smallest first"),
            Column("from", start, "$alpha$ from"),
            Column("to", end, "to"),
            Column("pairs", [rank.pairs for rank in ranks]),
            Column("|f| mean", mean, "mean $|f(x)|$"),
            Column("|f| cv", cv, "cv $|f(x)|$", meaning="of all: with any weight, the control"),
            Column("|f| cv at one", at_one, "cv at one $alpha$", meaning=same),
            Column("spearman", [rank.rho for rank in ranks], "Spearman of $alpha$ and $|f(x)|$"),
            Column("within", [rank.error for rank in ranks], "known to within"),
            Column("by_kind", by_kind, "by kind alone", meaning=shuffled),
        ]
        return Table(columns, "Weight and length of every pair, and of tenths of the pairs.")

    @cached_property
    def mixing(self) -> Table:
        """One row per layer: the share of other tokens in what reaches a token."""
        names = ("weight", "length", "with_residual")
        columns = (Column(*each, format=".1%") for each in zip(names, self.mixed.T, strict=True))
        caption = (
            "Mixing ratio (Kobayashi et al., 2021), mean over tokens: the share of other tokens in "
            "a token's weights; in the lengths of what they and itself add; with the residual "
            "stream added to itself."
        )
        return Table([Column("layer", self.layer_indices), *columns], caption)

    def arrays(self) -> dict[str, Any]:
        """The content of norms.npz."""
        kind_of_pair = np.repeat(np.arange(len(self.pairs)), [*map(len, self.pairs)])
        return {
            "layers": self.layer_indices,
            "kinds": np.array(self.kind_names),
            "f_moments": self.f.table(),
            "x_moments": self.x.table(),
            "singular_values": self.singular_values,
            "alpha": self.alpha,
            "alpha_f": self.alpha_f,
            "f_by_kind": self.f_by_kind,
            "pairs": np.concatenate(self.pairs),
            "pairs_kind": kind_of_pair,
        }

    def _kind_columns(self, what: str, values: np.ndarray) -> list[Column]:
        """Turn (..., K) values into one column per kind."""
        columns = zip(self.kind_names, values.reshape(-1, len(self.kind_names)).T, strict=True)
        return [Column(f"{what} {kind}", column) for kind, column in columns]


def _moment_columns(name: str, symbol: str, moments: RunningMoments) -> list[Column]:
    columns = zip(MOMENTS, moments.table().reshape(-1, len(MOMENTS)).T, strict=True)
    return [Column(f"{name} {moment}", column, f"{moment} {symbol}") for moment, column in columns]


def study_norms(
    model: Model, texts: Texts, n: int, longest: int, seed: int = 0, device: str = "cpu"
) -> NormAnalysis:
    """Run a model on n pairs of paragraphs of at most `longest` tokens."""
    framing = framing_of(model)
    pairs = paragraph_pairs(framing, texts.texts, n, longest, seed)
    norms = measure_norms(open_runner(model, device=device), pairs, token_kinds(framing), seed=seed)
    return replace(norms, source=texts.source)


def measure_norms(
    runner: Runner, sequences: Sequence[np.ndarray], kinds: TokenKinds, *, seed: int = 0
) -> NormAnalysis:
    """Run a model over sequences (n,) and reduce the output of its attention layers."""
    layers, n = list(runner.layers.values()), len(sequences)
    totals = _Totals(runner, sequences, kinds, seed)
    runner.observe(sequences, totals)
    spectra = [singular_values(layer) for layer in bar(layers, "singular values of f", "layer")]
    return NormAnalysis.of(
        runner,
        layer_indices=np.array(list(runner.layers)),
        kind_names=kinds.names,
        n_sequences=n,
        n_tokens=sum(map(len, sequences)),
        f=totals.f,
        x=totals.x,
        ranks=totals.ranks.results(),
        parts=totals.ranks.parts(),
        mixed=np.stack([moments.mean for moments in totals.mixed]),
        singular_values=np.stack(spectra),
        pairs=totals.sample.pairs(),
        alpha=totals.alpha / n,
        alpha_f=totals.alpha_f / n,
        f_by_kind=np.stack([means.mean for means in totals.f_by_kind]),
        gated=any(layer.modulated for layer in layers),
        seed=seed,
    )


def mixing_ratios(seen: Activations, values: np.ndarray) -> np.ndarray:
    """Shares of other tokens in what reaches each token, as in `NormAnalysis.mixed`: (3, b n).

    values (G, b n, r): v(x) of every key-value head. b_O belongs to no token.
    """
    layer, (b, n, d) = seen.layer, seen.x.shape
    diagonal = np.diagonal(seen.attention, axis1=-2, axis2=-1)  # (b, H, n)
    with np.errstate(invalid="ignore", divide="ignore"):  # without a softmax, sums may be 0
        weight = (1 - diagonal / seen.attention.sum(axis=-1)).mean(axis=1).ravel()  # (b n,)
    if layer.modulated:
        return np.stack([weight, *np.full((2, b * n), np.nan)])
    of_head = np.repeat(values, layer.n_heads // len(values), axis=0)  # (H, b n, r)
    weighted = of_head * diagonal.transpose(1, 0, 2).reshape(layer.n_heads, b * n, 1)
    side_by_side = weighted.transpose(1, 0, 2).reshape(b * n, -1)  # (b n, H r)
    itself = side_by_side @ np.asarray(layer.w_o).reshape(-1, d)
    mixed = np.linalg.norm((seen.output - layer.output_bias).reshape(b * n, d) - itself, axis=1)
    ratios = [weight]
    for kept in (itself, itself + seen.x.reshape(b * n, d)):
        ratios.append(mixed / (mixed + np.linalg.norm(kept, axis=1)))
    return np.stack(ratios)


def singular_values(layer: Layer) -> np.ndarray:
    """Singular values (H, r + 1) of every head's f on [x 1]; no forward pass (Fig. 2)."""

    def triangle_of(factor: np.ndarray) -> Triangle:
        wide = factor.astype(np.float64)
        return triangle(wide, wide.T @ wide)

    spectra = []
    for head in layer.heads:
        (w_v, b_v), w_o = layer.v.of(head.kv_head), np.asarray(layer.w_o[head.index])
        spectra.append(affine_singular_values(triangle_of(w_v), b_v, triangle_of(w_o.T)))
    return np.stack(spectra)


class _Totals:
    """The observer that sums, counts or samples every batch."""

    def __init__(
        self, runner: Runner, sequences: Sequence[np.ndarray], kinds: TokenKinds, seed: int
    ) -> None:
        self.kinds, self.n_kinds, self.device = kinds, len(kinds.names), runner.device
        self.row = {index: row for row, index in enumerate(runner.layers)}
        self.on_device = {}
        layers = bar(runner.layers.items(), "lengths after W_O", "layer", total=len(runner.layers))
        for index, layer in layers:
            triangles = self.device.put(output_triangles(np.asarray(layer.w_o)))
            self.on_device[index] = layer.on(self.device), triangles
        n_layers, n_heads = len(runner.layers), runner.model.config.n_heads
        self.f, self.x = RunningMoments((n_layers, n_heads)), RunningMoments((n_layers,))
        self.alpha, self.alpha_f = np.zeros((2, n_layers, n_heads, self.n_kinds))
        self.f_by_kind = [MeanByKind((n_heads,), self.n_kinds) for _ in runner.layers]
        self.ranks = RankCorrelation(self.n_kinds)
        self.mixed = [RunningMoments((3,)) for _ in runner.layers]
        in_head = sum(len(each) * counts_by_kind(kinds(each), self.n_kinds) for each in sequences)
        pairs = n_layers * n_heads * in_head
        shares = np.minimum(SHARE, PAIRS_DRAWN / np.maximum(pairs, 1))
        self.sample = PairSample(shares, 2 * PAIRS_DRAWN, seed)

    def __call__(self, seen: Activations) -> None:
        row, kinds = self.row[seen.layer.index], self.kinds(seen.tokens)  # (b, n)
        b, n, d = seen.x.shape
        x = seen.x.reshape(b * n, d)
        layer, triangles = self.on_device[seen.layer.index]
        values = layer.inner_values(self.device.put(x))
        self.mixed[row].add(mixing_ratios(seen, self.device.get(values)))
        norms = self.device.get(value_norms(values, triangles))  # (H, b n)
        self.f.add(norms, row)
        self.x.add(np.sqrt(np.einsum("nd,nd->n", x, x)), row)
        norms = np.ascontiguousarray(norms.reshape(-1, b, n).transpose(1, 0, 2))  # (b, H, n)
        self.f_by_kind[row].add(norms, kinds)
        # (b, H, n); |alpha f| = alpha |f|, and |f| is the same for all queries
        alpha = seen.attention.mean(axis=-2)
        weights = sums_by_kind(alpha, kinds, self.n_kinds)
        lengths = sums_by_kind(alpha * norms, kinds, self.n_kinds)
        self.alpha[row] += weights.sum(axis=0, dtype=np.float64)
        self.alpha_f[row] += lengths.sum(axis=0, dtype=np.float64)
        for head in range(norms.shape[1]):  # one head at a time stays in the processor's cache
            self.ranks.add(seen.attention[:, head], norms[:, head], kinds)
        self.sample.add(seen.attention, norms, kinds)
