"""Norm-based analysis of attention: a model is run once over sequences, and all that the paper reports is reduced.

Of a batch nothing is kept but sums, counts, extremes and a sample (norm-based-attention, section 5).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weightscope.attention.factored import Triangle, triangle
from weightscope.attention.layer import Layer
from weightscope.folder import Files
from weightscope.metrics.by_kind import MeanByKind, counts_by_kind, sums_by_kind
from weightscope.metrics.norms import output_triangles, value_norms
from weightscope.metrics.rank_correlation import RankCorrelation, Spearman
from weightscope.metrics.spectra import affine_singular_values
from weightscope.norms.statistics import MOMENTS, Moments, PairSample
from weightscope.progress import bar
from weightscope.runner.runner import Activations, Runner
from weightscope.tables import Column, Table, crossed
from weightscope.text.kinds import TokenKinds

SHARE, MOST = 0.01, 5000  # of the pairs of a kind that Fig. 3 shows: the paper's share, and about how many at most


@dataclass(frozen=True, eq=False, repr=False)
class NormAnalysis:
    """Lengths of the vectors that attention adds up, in L attention layers of H heads, by K kinds of token.

    Attributes
    ----------
    model : str
        Its name.
    layer_indices : (L,) int array
    kind_names : tuple of str
    n_sequences, n_tokens : int
        How many were run.
    f : Moments of (L, H)
        |f(x)| of every token (Table 1).
    x : Moments of (L,)
        |x| of every token, the residual stream as it enters the layer (Table 2).
    ranks : list of Spearman
        alpha against |f(x)| over all heads and pairs (i, j), by the kind of j (Table 3).
    singular_values : (L, H, r + 1) array
        Of f as a linear map on [x 1] (Fig. 2).
    pairs : list of (m, 2) arrays
        A sample of alpha and |f(x)| by kind (Fig. 3).
    alpha : (L, H, K) array
        alpha summed over a sequence's tokens of a kind; mean over queries, then over sequences (Figs 4a and 5a).
    alpha_f : (L, H, K) array
        The same of |alpha f(x)| (Fig. 5b).
    f_by_kind : (L, H, K) array
        Mean |f(x)| over all tokens of a kind (Fig. 4b); NaN for a kind that never occurs.
    gated : bool
        A gate multiplies what heads have gathered; f(x), and all of the above, leaves it out.
    seed : int
        Of the sample of pairs, and of the heads that Fig. 2 shows.
    """

    model: str
    layer_indices: np.ndarray
    kind_names: tuple[str, ...]
    n_sequences: int
    n_tokens: int
    f: Moments
    x: Moments
    ranks: list[Spearman]
    singular_values: np.ndarray
    pairs: list[np.ndarray]
    alpha: np.ndarray
    alpha_f: np.ndarray
    f_by_kind: np.ndarray
    gated: bool
    seed: int

    @cached_property
    def heads(self) -> Table:
        """A row a head: Table 1, the extreme singular values of f, and by kind what Figs 4 and 5 show."""
        columns = [
            *crossed(layer=self.layer_indices, head=range(self.alpha.shape[1])),
            *_moment_columns("|f|", "$|f(x)|$", self.f),
            Column("sigma_max", self.singular_values[..., 0].ravel(), meaning="largest stretch by $f$ on $[x 1]$"),
            Column("sigma_min", self.singular_values[..., -1].ravel(), meaning="smallest stretch by $f$ on $[x 1]$"),
            *self._kind_columns("alpha", self.alpha),
            *self._kind_columns("|alpha f|", self.alpha_f),
            *self._kind_columns("|f|", self.f_by_kind),
        ]
        return Table(columns, "Table 1: $|f(x)|$ of every head.")

    @cached_property
    def layers(self) -> Table:
        """A row a layer: Table 2, and by kind what Fig. 5 shows."""
        columns = [
            Column("layer", self.layer_indices),
            *_moment_columns("|x|", "$|x|$", self.x),
            *self._kind_columns("alpha", self.alpha.mean(axis=1)),
            *self._kind_columns("|alpha f|", self.alpha_f.mean(axis=1)),
        ]
        return Table(columns, "Table 2: $|x|$, the residual stream as it enters the layer.")

    @cached_property
    def kinds(self) -> Table:
        """A row a kind of token: Table 3."""
        return Table(
            [
                Column("kind", self.kind_names, "kind of token"),
                Column("pairs", [each.pairs for each in self.ranks]),
                Column("spearman", [each.rho for each in self.ranks], "Spearman of $alpha$ and $|f(x)|$"),
                Column("within", [each.error for each in self.ranks], "known to within"),
            ],
            "Table 3. Every pair of a query $i$ and a token $j$, in all heads and layers, by the kind of $j$; masked "
            "pairs do not count. Ranks are those of narrow bins; the last column bounds what that can cost.",
        )

    @cached_property
    def shares(self) -> Table:
        """A row a kind of token: of all attention weight, and of the length of all vectors added up, what it has."""
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
        """The last rows of Tables 1 and 2: pooled over all heads and layers, and the mean of the heads' own figures."""
        rows = [
            ("|f(x)|, all heads together", *self.f.pooled().table()),
            ("|f(x)|, mean of the heads", *self.f.table().mean(axis=(0, 1))),
            ("|x|, all layers together", *self.x.pooled().table()),
            ("|x|, mean of the layers", *self.x.table().mean(axis=0)),
        ]
        return Table.of_rows(("of", *MOMENTS), rows, "Tables 1 and 2, last rows.")

    def write(self, files: Files) -> None:
        """Write heads.csv, layers.csv, kinds.csv, shares.csv, summary.csv and norms.npz."""
        for name in ("heads", "layers", "kinds", "shares", "summary"):
            files.table(f"{name}.csv", getattr(self, name))
        files.npz(
            "norms.npz",
            layers=self.layer_indices, kinds=np.array(self.kind_names),
            f_moments=self.f.table(), x_moments=self.x.table(), singular_values=self.singular_values,
            alpha=self.alpha, alpha_f=self.alpha_f, f_by_kind=self.f_by_kind,
            pairs=np.concatenate(self.pairs), pairs_kind=np.repeat(np.arange(len(self.pairs)), [*map(len, self.pairs)]),
        )  # fmt: skip

    def _kind_columns(self, what: str, values: np.ndarray) -> list[Column]:
        """(..., K) values as a column a kind."""
        by_kind = values.reshape(-1, len(self.kind_names)).T
        return [Column(f"{what} {kind}", own) for kind, own in zip(self.kind_names, by_kind, strict=True)]

    def __repr__(self) -> str:
        n_layers, n_heads = self.alpha.shape[:2]
        return f"NormAnalysis({self.model}: {n_layers} layers of {n_heads} heads, {self.n_tokens:,} tokens)"


def _moment_columns(name: str, symbol: str, moments: Moments) -> list[Column]:
    values = moments.table().reshape(-1, len(MOMENTS)).T
    return [Column(f"{name} {own}", column, f"{own} {symbol}") for own, column in zip(MOMENTS, values, strict=True)]


def measure_norms(runner: Runner, sequences: Sequence[np.ndarray], kinds: TokenKinds, *, seed: int = 0) -> NormAnalysis:
    """Run a model over sequences and reduce what its attention layers show.

    Parameters
    ----------
    runner : Runner
    sequences : sequence of (n,) int arrays
    kinds : TokenKinds
    seed : int
        Of the sample of pairs, and of the heads that Fig. 2 shows.

    Raises
    ------
    CheckpointError
        The sequences are images, or the model's attention is not what its weights give; see `Runner.observe`.
    """
    layers, n = list(runner.layers.values()), len(sequences)
    totals = _Totals(runner, sequences, kinds, seed)
    runner.observe(sequences, totals)
    stretched = np.stack([singular_values(layer) for layer in bar(layers, "singular values of f", "layer")])
    return NormAnalysis(
        runner.model.title, np.array(list(runner.layers)), kinds.names, n, sum(map(len, sequences)),
        totals.f, totals.x, totals.ranks.results(), stretched,
        totals.sample.pairs(), totals.alpha / n, totals.alpha_f / n,
        np.stack([means.mean for means in totals.f_by_kind]), any(layer.modulated for layer in layers), seed,
    )  # fmt: skip


def singular_values(layer: Layer) -> np.ndarray:
    """Singular values of f of every head as a linear map on [x 1], (H, r + 1); no forward pass (Fig. 2)."""

    def triangle_of(factor: np.ndarray) -> Triangle:
        wide = factor.astype(np.float64)
        return triangle(wide, wide.T @ wide)

    heads = ((*layer.v.of(head.kv_head), np.asarray(layer.w_o[head.index])) for head in layer.heads)
    return np.stack([affine_singular_values(triangle_of(w_v), b_v, triangle_of(w_o.T)) for w_v, b_v, w_o in heads])


class _Totals:
    """The observer: everything is summed up, counted or sampled as it passes."""

    def __init__(self, runner: Runner, sequences: Sequence[np.ndarray], kinds: TokenKinds, seed: int) -> None:
        self.kinds, self.n_kinds, self.device = kinds, len(kinds.names), runner.device
        self.row = {index: row for row, index in enumerate(runner.layers)}
        self.on_device = {
            index: (layer.on(self.device), self.device.put(output_triangles(np.asarray(layer.w_o))))
            for index, layer in bar(runner.layers.items(), "lengths after W_O", "layer", total=len(runner.layers))
        }
        n_layers, n_heads = len(runner.layers), runner.model.config.n_heads
        self.f, self.x = Moments((n_layers, n_heads)), Moments((n_layers,))
        self.alpha, self.alpha_f = np.zeros((2, n_layers, n_heads, self.n_kinds))
        self.f_by_kind = [MeanByKind((n_heads,), self.n_kinds) for _ in runner.layers]
        self.ranks = RankCorrelation(self.n_kinds)
        pairs = n_layers * n_heads * sum(len(each) * counts_by_kind(kinds(each), self.n_kinds) for each in sequences)
        self.sample = PairSample(np.minimum(SHARE, MOST / np.maximum(pairs, 1)), 2 * MOST, seed)

    def __call__(self, seen: Activations) -> None:
        row, kinds = self.row[seen.layer.index], self.kinds(seen.tokens)  # (b, n)
        b, n, d = seen.x.shape
        x = seen.x.reshape(b * n, d)
        layer, triangles = self.on_device[seen.layer.index]
        norms = self.device.get(value_norms(layer.inner_values(self.device.put(x)), triangles))  # (H, b n)
        self.f.add(norms, row)
        self.x.add(np.sqrt(np.einsum("nd,nd->n", x, x)), row)
        norms = np.ascontiguousarray(norms.reshape(-1, b, n).transpose(1, 0, 2))  # (b, H, n)
        self.f_by_kind[row].add(norms, kinds)
        alpha = seen.attention.mean(axis=-2)  # (b, H, n); |alpha f| = alpha |f|, and |f| is the same for all queries
        self.alpha[row] += sums_by_kind(alpha, kinds, self.n_kinds).sum(axis=0, dtype=np.float64)
        self.alpha_f[row] += sums_by_kind(alpha * norms, kinds, self.n_kinds).sum(axis=0, dtype=np.float64)
        for head in range(norms.shape[1]):  # one at a time stays in the processor's cache
            self.ranks.add(seen.attention[:, head], norms[:, head], kinds)
        self.sample.add(seen.attention, norms, kinds)
