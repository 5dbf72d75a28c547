"""Norm-based analysis of attention: a model run once over sequences, all that the paper reports reduced on the way.

Of a batch nothing is kept but sums, counts, extremes and a sample (norm-based-attention, section 5).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weightscope.attention.factored import triangle
from weightscope.attention.layer import Layer
from weightscope.folder import write_csv, write_npz
from weightscope.metrics.by_kind import MeanByKind, counts_by_kind
from weightscope.metrics.norms import Moments, given_to_kinds, output_triangles, value_norms
from weightscope.metrics.rank_correlation import RankCorrelation, Spearman
from weightscope.metrics.value_output import affine_singular_values
from weightscope.norms.pair_sample import PairSample
from weightscope.runner.runner import Activations, Runner
from weightscope.text.sequences import TokenKinds

SHARE, MOST = 0.01, 5000  # of the pairs of a kind that Fig. 3 shows: the paper's share, and about how many at most
MOMENTS = ("mean", "sd", "cv", "max", "min")


@dataclass(frozen=True)
class NormAnalysis:
    """What norm-based analysis finds, for L attention layers of H heads and K kinds of token.

    Attributes
    ----------
    layers : (L,) int array
        Indices of the layers.
    kinds : tuple of str
    sequences, tokens : int
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
    """

    layers: np.ndarray
    kinds: tuple[str, ...]
    sequences: int
    tokens: int
    f: Moments
    x: Moments
    ranks: list[Spearman]
    singular_values: np.ndarray
    pairs: list[np.ndarray]
    alpha: np.ndarray
    alpha_f: np.ndarray
    f_by_kind: np.ndarray
    gated: bool


def analyse_norms(runner: Runner, sequences: Sequence[np.ndarray], kinds: TokenKinds, *, seed: int = 0) -> NormAnalysis:
    """Run the model over sequences and reduce.

    Parameters
    ----------
    runner : Runner
    sequences : sequence of (n,) int arrays
    kinds : TokenKinds
    seed : int
        Of the sample of pairs.

    Raises
    ------
    CheckpointError
        The model's attention is not what its weights give; see `Runner.observe`.
    """
    seen = _Reduction(runner, sequences, kinds, seed)
    runner.observe(sequences, seen)
    n = len(sequences)
    return NormAnalysis(
        np.array(list(runner.layers)), kinds.names, n, sum(map(len, sequences)),
        seen.f, seen.x, seen.ranks.results(),
        np.stack([singular_values(layer) for layer in runner.layers.values()]),
        seen.sample.pairs(), seen.alpha / n, seen.alpha_f / n, np.stack([means.mean for means in seen.f_by_kind]),
        any(layer.gate is not None for layer in runner.layers.values()),
    )  # fmt: skip


def singular_values(layer: Layer) -> np.ndarray:
    """Singular values of f of every head as a linear map on [x 1], (H, r + 1); no forward pass (Fig. 2)."""

    def of(factor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        wide = factor.astype(np.float64)
        return wide, wide.T @ wide

    heads = ((head, *layer.v.of(head.kv_head)) for head in layer.heads())
    return np.stack(
        [
            affine_singular_values(triangle(*of(w_v)), b_v, triangle(*of(np.asarray(layer.w_o[head.index]).T)))
            for head, w_v, b_v in heads
        ]
    )


class _Reduction:
    """The observer: everything is summed up, counted or sampled as it passes."""

    def __init__(self, runner: Runner, sequences: Sequence[np.ndarray], kinds: TokenKinds, seed: int) -> None:
        self.kinds, self.n_kinds = kinds, len(kinds.names)
        self.place = {index: place for place, index in enumerate(runner.layers)}
        self.device = runner.device
        self.there = {
            index: (layer.on(self.device), self.device.put(output_triangles(np.asarray(layer.w_o))))
            for index, layer in runner.layers.items()
        }
        n_layers, n_heads = len(runner.layers), runner.model.config.n_heads
        self.f, self.x = Moments((n_layers, n_heads)), Moments((n_layers,))
        self.alpha, self.alpha_f = np.zeros((2, n_layers, n_heads, self.n_kinds))
        self.f_by_kind = [MeanByKind((n_heads,), self.n_kinds) for _ in runner.layers]
        self.ranks = RankCorrelation(self.n_kinds)
        pairs = n_layers * n_heads * sum(len(each) * counts_by_kind(kinds(each), self.n_kinds) for each in sequences)
        self.sample = PairSample(np.minimum(SHARE, MOST / np.maximum(pairs, 1)), 2 * MOST, seed)

    def __call__(self, seen: Activations) -> None:
        assert seen.tokens is not None, "kinds of token need tokens"
        place, kinds = self.place[seen.layer.index], self.kinds(seen.tokens)  # (b, n)
        b, n, d = seen.x.shape
        flat = seen.x.reshape(b * n, d)
        layer, triangles = self.there[seen.layer.index]
        norms = self.device.get(value_norms(layer.inner_values(self.device.put(flat)), triangles))  # (H, b n)
        self.f.add(norms, place)
        self.x.add(np.sqrt(np.einsum("nd,nd->n", flat, flat)), place)
        norms = np.ascontiguousarray(norms.reshape(-1, b, n).transpose(1, 0, 2))  # (b, H, n)
        self.f_by_kind[place].add(norms, kinds)
        alpha, alpha_f = given_to_kinds(seen.attention, norms, kinds, self.n_kinds)
        self.alpha[place] += alpha.sum(axis=0, dtype=np.float64)
        self.alpha_f[place] += alpha_f.sum(axis=0, dtype=np.float64)
        for head in range(norms.shape[1]):  # one at a time stays in the processor's cache
            self.ranks.add(seen.attention[:, head], norms[:, head], kinds)
        self.sample.add(seen.attention, norms, kinds)


def moment_rows(moments: Moments) -> np.ndarray:
    """mean, sd, cv, max and min along the last axis, (..., 5)."""
    return np.stack([moments.mean, moments.deviation, moments.variation, moments.largest, moments.smallest], axis=-1)


def summary_rows(found: NormAnalysis) -> list[tuple[str, np.ndarray]]:
    """The last rows of Tables 1 and 2: pooled over all heads and layers, and the mean of the heads' own figures."""
    return [
        ("|f(x)|, all heads together", moment_rows(found.f.pooled())),
        ("|f(x)|, mean of the heads", moment_rows(found.f).mean(axis=(0, 1))),
        ("|x|, all layers together", moment_rows(found.x.pooled())),
        ("|x|, mean of the layers", moment_rows(found.x).mean(axis=0)),
    ]


def write_norms(found: NormAnalysis, out: Path) -> None:
    """Write heads.csv, layers.csv, kinds.csv, summary.csv and norms.npz into `out`."""
    of_kinds = [f"{what} {kind}" for what in ("alpha", "|alpha f|", "|f|") for kind in found.kinds]
    by_kind = np.concatenate([found.alpha, found.alpha_f, found.f_by_kind], axis=-1)  # (L, H, 3 K)
    f, s = moment_rows(found.f), found.singular_values
    write_csv(
        out / "heads.csv",
        ("layer", "head", *(f"|f| {name}" for name in MOMENTS), "sigma_max", "sigma_min", *of_kinds),
        (
            (layer, head, *f[place, head], s[place, head, 0], s[place, head, -1], *by_kind[place, head])
            for place, layer in enumerate(found.layers)
            for head in range(f.shape[1])
        ),
    )
    x = moment_rows(found.x)
    layer_means = by_kind[..., : 2 * len(found.kinds)].mean(axis=1)  # over heads
    write_csv(
        out / "layers.csv",
        ("layer", *(f"|x| {name}" for name in MOMENTS), *of_kinds[: 2 * len(found.kinds)]),
        ((layer, *x[place], *layer_means[place]) for place, layer in enumerate(found.layers)),
    )
    write_csv(
        out / "kinds.csv",
        ("kind", "pairs", "spearman", "within"),
        ((kind, each.pairs, each.rho, each.error) for kind, each in zip(found.kinds, found.ranks, strict=True)),
    )
    write_csv(out / "summary.csv", ("of", *MOMENTS), ((name, *row) for name, row in summary_rows(found)))
    write_npz(
        out / "norms.npz",
        layers=found.layers, kinds=np.array(found.kinds), f_moments=f, x_moments=x,
        singular_values=s, alpha=found.alpha, alpha_f=found.alpha_f, f_by_kind=found.f_by_kind,
        pairs=np.concatenate(found.pairs), pairs_kind=np.repeat(np.arange(len(found.pairs)), [*map(len, found.pairs)]),
    )  # fmt: skip
