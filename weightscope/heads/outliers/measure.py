"""Measure outlier dimensions on sentences, and guess them from the weights alone.

Which of the stream's dimensions stand out is judged by medians: the outliers must not set the
standard themselves.

A score is S = q_m k_n' = (q_m W_K') x_n' + terms of the keys' bias, a sum over the dimensions j of
x_n: C = (q_m W_K') * x_n with q_m = x_m W_Q + b_Q (eq. 7). Means of C over queries and keys come
from d x r products; no array of all queries, keys and dimensions is made. Averages over tokens run
on the arrays' own device, by the array API standard.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from scipy.stats import spearmanr

from weightscope.core.compute.device import namespace, vecdot
from weightscope.core.formulas import plain
from weightscope.core.progress import bar
from weightscope.core.results import ShowsShapes, holds_arrays
from weightscope.core.tables import Column, Table, crossed
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.rotation import Rotation
from weightscope.model.metrics.lengths import MeanByKind, counts_by_kind
from weightscope.model.metrics.outliers import robust_z
from weightscope.model.model import Model
from weightscope.model.text.kinds import TokenKinds, token_kinds
from weightscope.model.text.sequences import Texts, sentence_sequences
from weightscope.runner.framing import framing_of
from weightscope.runner.runner import Activations, Runner, Study, open_runner

# robust z-score of a dimension's mean among a layer's; normally distributed means have none beyond
# it, and with tails as heavy as a Laplace distribution's, one dimension in 30,000 is
DIMENSION_Z = 10.0

DOMINANT = 2.0  # times the largest mean C of a dimension that is no outlier


def dimension_z(means: np.ndarray) -> np.ndarray:
    """Distance of each dimension's mean from its layer's others, in robust standard deviations.

    means (L, d) -> (L, d).
    """
    return np.stack([robust_z(row, 1e-12 * max(1e-12, float(np.abs(row).max()))) for row in means])


def outlier_dimensions(z: np.ndarray) -> np.ndarray:
    """Dimensions beyond `DIMENSION_Z` in some row, farthest out first: z (n, d)."""
    largest = np.nan_to_num(np.abs(z)).max(axis=0)  # (d,)
    order = np.argsort(-largest, kind="stable")
    return order[largest[order] > DIMENSION_Z]


def over_all(means: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Mean over all tokens (...) from means by kind (..., K) and counts (K,)."""
    return np.nansum(means * counts, axis=-1) / counts.sum()


@holds_arrays
class StreamMeans(ShowsShapes):
    """Means over tokens by their K kinds; NaN for a kind without tokens."""

    kind_names: tuple[str, ...]
    counts: np.ndarray  # (K,): tokens
    layer_indices: np.ndarray  # (L,): attention layers
    # (L + 1, d, K): the stream that enters each of them, the output of the layer before it; then
    # the last layer's output, before the final norm
    hidden: np.ndarray
    attention: np.ndarray  # (L, H, K): alpha from the average query that may attend to the token

    @property
    def scopes(self) -> tuple[str, ...]:
        """Sets of tokens that `means` and `z` are over: all, then each kind."""
        return ("all", *self.kind_names)

    @cached_property
    def means(self) -> np.ndarray:
        """Mean of every dimension over each scope's tokens, (L + 1, d, 1 + K) (Figs 1, 3)."""
        return np.concatenate((over_all(self.hidden, self.counts)[..., None], self.hidden), axis=-1)

    @cached_property
    def z(self) -> np.ndarray:
        """Robust z-scores of these means, (L + 1, d, 1 + K); see `dimension_z`."""
        scopes = np.moveaxis(self.means, -1, 0)  # (1 + K, L + 1, d)
        return np.stack([dimension_z(means) for means in scopes], axis=-1)

    @cached_property
    def outliers(self) -> np.ndarray:
        """Dimensions that stand out in some output, over all tokens or a kind; farthest out first.

        A mean over all tokens alone would hide a dimension that is large on one token of a
        sentence, as on [CLS].
        """
        return outlier_dimensions(np.moveaxis(self.z, 1, -1).reshape(-1, self.z.shape[1]))

    def table(self) -> Table:
        """Mean and robust z-score of every outlier dimension, by output and scope."""
        rows = crossed(output=range(len(self.means)), dimension=self.outliers, tokens=self.scopes)
        # (L + 1, outliers, 1 + K)
        means, z = self.means[:, self.outliers], self.z[:, self.outliers]
        return Table([*rows, Column("mean", means.ravel()), Column("robust_z", z.ravel())])

    def attention_table(self) -> Table:
        """Attention to one token of each kind, the mean over heads, by layer."""
        by_kind = zip(self.kind_names, self.attention.mean(axis=1).T, strict=True)
        columns = (Column(kind, alpha) for kind, alpha in by_kind)
        return Table([Column("layer", self.layer_indices), *columns])


def observe_stream(
    runner: Runner, sequences: Sequence[np.ndarray], kinds: TokenKinds
) -> StreamMeans:
    """Run a model and average its stream and its attention; see `measure_outliers`."""
    layers, n_kinds = list(runner.layers), len(kinds.names)
    hidden = [MeanByKind((runner.model.config.d_model,), n_kinds) for _ in range(len(layers) + 1)]
    attention = {i: MeanByKind((layer.n_heads,), n_kinds) for i, layer in runner.layers.items()}
    latest: list[Activations] = []

    def observe(seen: Activations) -> None:
        latest[:] = [seen]
        of_tokens = kinds(seen.tokens)
        hidden[layers.index(seen.layer.index)].add(seen.x.transpose(0, 2, 1), of_tokens)
        queries = np.maximum(mask_of(seen.attention).sum(axis=0), 1)  # (n,) queries of each key
        received = seen.attention.sum(axis=-2) / queries  # (b, H, n)
        attention[seen.layer.index].add(received, of_tokens)

    def observe_end(block: Any, args: Any, returned: Any) -> None:
        (seen,) = latest
        if seen.layer.index == layers[-1]:
            outputs = returned if isinstance(returned, tuple) else (returned,)
            stream = next(x for x in outputs if getattr(x, "shape", None) == seen.x.shape)
            hidden[-1].add(stream.cpu().numpy().transpose(0, 2, 1), kinds(seen.tokens))

    handle = runner.blocks[-1].register_forward_hook(observe_end)
    try:
        runner.observe(sequences, observe)
    finally:
        handle.remove()
    return StreamMeans(
        kinds.names,
        hidden[0].counts,
        np.array(layers),
        np.stack([mean.mean for mean in hidden]),
        np.stack([mean.mean for mean in attention.values()]),
    )


def mask_of(attention: np.ndarray) -> np.ndarray:
    """Mask (n, n) bool of attention (b, H, n, n): True where query m may attend to key n.

    A mask leaves exact zeros in every head and sequence.
    """
    return np.asarray(attention.any(axis=(0, 1)))


def mean_queries(queries: Any, mask: np.ndarray, rotation: Rotation | None = None) -> Any:
    """Mean query that each key meets: mean over m of q_m R(m - n), if m may attend to key n.

    queries (..., n, r), mask (n, n) -> (..., n, r).
    """
    shares = mask / np.maximum(mask.sum(axis=0), 1)  # (n, n), columns sum to 1
    weights = namespace(queries).asarray(shares, dtype=queries.dtype)
    if rotation is None:
        return weights.T @ queries
    angles = rotation.angles(np.arange(len(mask)))
    turned = rotation.turn(queries, angles, rotation.factor)
    return rotation.turn(weights.T @ turned, -angles, rotation.factor)


def summed_contributions(keys: Any, queries: Any, w_k: Any) -> Any:
    """C of eq. 7 summed over keys, each with its own query: sum over n of (q_n W_K')_j x_nj.

    It is (W_K * (X' Q))_j 1: keys (n, d), queries (H, n, r), w_k (G, d, r) -> (H, d).
    """
    (h, n, r), g, xp = queries.shape, w_k.shape[0], namespace(queries)
    side_by_side = xp.reshape(xp.permute_dims(queries, (1, 0, 2)), (n, h * r))
    together = keys.T @ side_by_side  # (d, H r), one large product
    by_head = xp.reshape(together, (-1, g, h // g, r))  # (d, G, H/G, r)
    summed = vecdot(by_head, xp.permute_dims(w_k, (1, 0, 2))[:, :, None, :])  # (d, G, H/G)
    return xp.reshape(summed, (-1, h)).T


def contributions_by_kind(
    keys: Any, queries: Any, w_k: Any, kinds: np.ndarray, n_kinds: int
) -> Any:
    """`summed_contributions` of the keys of each kind: kinds (n,) -> (n_kinds, H, d)."""
    xp, contributions = namespace(keys), []
    for kind in range(n_kinds):
        indices = xp.asarray(np.flatnonzero(kinds == kind))
        some_keys, some_queries = xp.take(keys, indices, axis=0), xp.take(queries, indices, axis=1)
        contributions.append(summed_contributions(some_keys, some_queries, w_k))
    return xp.stack(contributions)


@holds_arrays
class Contributions(ShowsShapes):
    """Means of C (eq. 7) by layer, head, dimension and kind of key, for each key's mean query.

    Without 1/sqrt(d'), as in the paper.
    """

    kind_names: tuple[str, ...]
    counts: np.ndarray  # (K,): keys
    layer_indices: np.ndarray  # (L,)
    by_kind: np.ndarray  # (L, H, d, K): NaN for kinds without tokens
    left_out: tuple[str, ...]  # terms of scores that differ between keys but are of no dimension

    @property
    def apart_from(self) -> str:
        """The terms left out, for a sentence that calls sums of C scores."""
        return f", apart from {'; '.join(self.left_out)}" if self.left_out else ""

    @cached_property
    def overall(self) -> np.ndarray:
        """The mean over all keys, (L, H, d): Figs 4 and 5."""
        return over_all(self.by_kind, self.counts)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Mean over heads of |C|, (L, d)."""
        return np.abs(self.overall).mean(axis=1)

    @cached_property
    def gaps(self) -> np.ndarray:
        """Contribution of each dimension to a kind's scores above the last kind's, (L, K - 1, d).

        C adds up to the score without its terms constant in the key, so a difference of sums of C
        is one of scores.
        """
        gaps = (self.by_kind[..., :-1] - self.by_kind[..., -1:]).mean(axis=1)  # (L, d, K - 1)
        return np.moveaxis(gaps, -1, 1)

    def table(self, dimensions: np.ndarray) -> Table:
        """Mean C of these dimensions in every head, by layer and kind of key (Table 1)."""
        rows = crossed(layer=self.layer_indices, dimension=dimensions, key=self.kind_names)
        by_head = np.moveaxis(self.by_kind[:, :, dimensions], 1, 0)  # (H, L, dimensions, K)
        columns = (Column(f"head {head}", c.ravel()) for head, c in enumerate(by_head))
        return Table([*rows, *columns])

    def dominant(self, dimensions: np.ndarray) -> Table:
        """Layers in which a dimension adds at least `DOMINANT` times what any other one does.

        One row per layer and dimension: mean C over heads and keys, and the largest of the
        dimensions not given, the control (Fig. 5).
        """
        means = self.overall.mean(axis=1)  # (L, d)
        largest = np.abs(np.delete(means, dimensions, axis=1)).max(axis=1, initial=0)  # (L,)
        rows = []
        for layer, mean, control in zip(range(len(means)), means, largest, strict=True):
            large = [j for j in dimensions.tolist() if abs(mean[j]) >= DOMINANT * control]
            for j in sorted(large, key=lambda j: -abs(mean[j])):
                raised = int((self.overall[layer, :, j] > 0).sum())
                rows.append((self.layer_indices[layer], j, mean[j], raised, control))
        columns = (
            "layer",
            "dimension",
            Column("mean_c", symbol="mean $C_j$", meaning="over heads and keys"),
            Column("heads_raised", symbol="heads that it raises", meaning="mean $C_j$ above 0"),
            Column("largest_other", symbol="largest other", meaning="$|C_j|$ of no outlier"),
        )
        caption = f"Dimensions that add {DOMINANT:g} times what any but an outlier adds, by layer."
        return Table.of_rows(columns, rows, caption)

    def preferences(self, dimensions: np.ndarray) -> Table:
        """Score of each kind of key above the last kind's, and its causes, by layer."""
        gaps = self.gaps.reshape(-1, self.gaps.shape[-1])  # (L (K - 1), d)
        rows = crossed(layer=self.layer_indices, key=self.kind_names[:-1])
        above = f"score above {plain(self.kind_names[-1])}"
        by_outliers = gaps[:, dimensions].sum(axis=-1)
        columns = [
            Column("score_above_other", gaps.sum(axis=-1), above),
            Column("of_outliers", by_outliers, "of it, outlier dimensions"),
            *(Column(f"of {j}", gaps[:, j]) for j in dimensions),
        ]
        return Table([*rows, *columns])


def observe_contributions(
    runner: Runner, sequences: Sequence[np.ndarray], kinds: TokenKinds
) -> Contributions:
    """Run a model and average C; see `measure_outliers`."""
    n_kinds, d, device = len(kinds.names), runner.model.config.d_model, runner.device
    layers = runner.layers
    sums = {i: np.zeros((n_kinds, layer.n_heads, d)) for i, layer in layers.items()}
    on_device = {i: (layer.on(device), device.put(key_maps(layer))) for i, layer in layers.items()}

    def observe(seen: Activations) -> None:
        kind_of_key = kinds(seen.tokens).ravel()
        layer, w_k = on_device[seen.layer.index]
        keys, queries = keys_and_queries(layer, device.put(seen.x), mask_of(seen.attention))
        summed = contributions_by_kind(keys, queries, w_k, kind_of_key, n_kinds)
        sums[seen.layer.index] += device.get(summed)

    runner.observe(sequences, observe)
    counts = counts_by_kind(kinds(np.concatenate(sequences)), n_kinds)
    with np.errstate(invalid="ignore"):
        by_kind = np.stack([np.moveaxis(summed, 0, -1) / counts for summed in sums.values()])
    reasons = dict.fromkeys(reason for layer in layers.values() for reason in left_out(layer))
    not_in_c = (*reasons, *runner.model.family.notes)
    return Contributions(kinds.names, counts, np.array(list(sums)), by_kind, not_in_c)


def key_maps(layer: Layer) -> np.ndarray:
    """W_K of every key-value head, (G, d, r)."""
    return np.stack([layer.k.of(group)[0] for group in range(layer.n_kv_heads)])


def keys_and_queries(layer: Layer, x: Any, mask: np.ndarray) -> tuple[Any, Any]:
    """The factors of C in one layer other than W_K: keys, and the mean query that each key meets.

    x (b, n, d), mask (n, n) -> (b n, d), (H, b n, r).

    Exact under rotation and under norms of queries and keys, whose per-token scalars go to the
    queries' side.
    """
    (b, n, d), xp = x.shape, namespace(x)
    flat = xp.reshape(x, (b * n, d))
    queries = layer.queries(flat)  # (H, b n, r)
    r = queries.shape[-1]
    queries = mean_queries(xp.reshape(queries, (-1, b, n, r)), mask, layer.rotation)
    queries = xp.reshape(queries, (-1, b * n, r))
    if layer.k_norm is not None:
        scalars, group = layer.scalars(flat)[1], layer.n_heads // layer.n_kv_heads
        scalars = xp.repeat(scalars, group, axis=0)  # (H, b n)
        queries[..., : layer.k_norm.dims] *= scalars[..., None]
    return layer.normalised(flat), queries


def left_out(layer: Layer) -> Iterator[str]:
    """Terms of a layer's scores that differ between keys and are in no C."""
    shifted = layer.k_norm is not None and layer.k_norm.shift is not None
    biased = shifted or any(layer.k.of(group)[1].any() for group in range(layer.n_kv_heads))
    if biased and (layer.rotation is not None or layer.k_norm is not None):
        yield "the keys' bias, which varies with the key under rotation or a norm of keys"
    if layer.gain is not None:
        yield "the effect of norms after rotation beyond their mean over a pair of dimensions"
    if layer.temperature is not None:
        yield "the factor that scales queries by their position"
    if layer.relative:
        yield "scores of queries and keys with embeddings of distances"
    if layer.additive is not None:
        yield "terms that depend on distance and are added to scores"
    if layer.softcap is not None:
        yield "the softcap: C adds up to the scores before it"
    if layer.clip is not None:
        yield "the clipping of keys"


@holds_arrays
class Guess(ShowsShapes):
    """Estimates for every dimension from the weights alone, without a run."""

    columns: np.ndarray  # (L, d): mean norm of W_QK's columns over heads, a pre-norm's gain folded
    # (L, d): |gamma| of the norm that produces attention's input: the layer's own, or in post-norm
    # models the one before it; NaN where there is none
    gains: np.ndarray
    # (L, d): mean over heads of |C| (eq. 7) for a token equal to that norm's beta, its mean output.
    # In pre-norm models, where W_QK acts on the input of the norm, only the query is known and this
    # is |b_QK|; 0 without biases.
    contributions: np.ndarray

    def agreement(self, stream: StreamMeans, measured: Contributions) -> Table:
        """Rank correlations over dimensions between guesses and measurements, by layer."""
        means = stream.means[:-1, :, 0]  # (L, d), over all tokens
        correlations = {
            "columns and |C|": rank_agreement(self.columns, measured.sizes),
            "extreme columns and |C|": rank_agreement(extremity(self.columns), measured.sizes),
            "gains and |mean|": rank_agreement(self.gains, means),
            "extreme gains and |mean|": rank_agreement(extremity(self.gains), means),
            "C at beta and |C|": rank_agreement(self.contributions, measured.sizes),
        }
        layers = Column("layer", measured.layer_indices)
        columns = (Column(name, rho, as_mathematics(name)) for name, rho in correlations.items())
        return Table([layers, *columns], "Spearman's correlation over dimensions.")

    def ranks_of(self, measured: Contributions, dimensions: np.ndarray) -> Table:
        """Ranks of some dimensions among all, 1 the largest, by measure, guess and layer."""
        ranked = {
            "|C|, measured": ranks(measured.sizes),
            "extreme column": ranks(extremity(self.columns)),
            "gain": ranks(self.gains),
            "C at beta": ranks(self.contributions),
        }
        columns = crossed(layer=measured.layer_indices, dimension=dimensions)
        for name, rank in ranked.items():
            columns.append(Column(name, rank[:, dimensions].ravel(), as_mathematics(name)))
        which = f"the outlier dimensions among {self.columns.shape[1]}"
        return Table(columns, f"Rank of {which}, 1 the largest, by measure and by guess.")


def as_mathematics(name: str) -> str:
    """The name of a column with its formulas marked."""
    marked = name.replace("|C|", "$|C|$").replace("|mean|", "$|mean|$")
    return marked.replace("C at beta", "$C$ at $beta$")


def guess(model: Model) -> Guess:
    """Read every attention layer's projections and norms."""
    layers = bar(model.attention_layers, "what weights tell", "layer")
    guesses = [_of_layer(model, index) for index in layers]
    return Guess(*map(np.stack, zip(*guesses, strict=True)))


def _of_layer(model: Model, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Columns, gains and contributions of one layer, (d,) each."""
    layer, norm = model.layer(index), model.stream_norm(index)
    queries = [layer.q.of(head) for head in range(layer.n_heads)]
    w_q, b_q = map(np.stack, zip(*queries, strict=True))
    w_k = key_maps(layer)
    if norm is None:
        gains, query, key = np.full(model.config.d_model, np.nan), b_q, np.ones_like(w_k[0, :, 0])
        if (pre_norm := model.family.norm_of(index)) is not None:
            stored = model.under(model.family.stored_name(model.config, index))
            gains = pre_norm.read(stored, model.config).gamma
    else:
        gains, key = norm.gamma, norm.beta
        query = key @ w_q + b_q  # (H, r)
    c = summed_contributions(key[None], query[:, None], w_k)  # (H, d)
    return column_norms(w_q, w_k).mean(axis=0), np.abs(gains), np.abs(c).mean(axis=0)


def column_norms(w_q: np.ndarray, w_k: np.ndarray) -> np.ndarray:
    """Norms of the columns of every head's W_QK: the weight of dimension j of a key.

    w_q (H, d, r), w_k (G, d, r) -> (H, d).
    """
    grams = np.einsum("hdr,hds->hrs", w_q, w_q, dtype=np.float64, optimize=True)  # (H, r, r)
    w_k = np.repeat(w_k, len(w_q) // len(w_k), axis=0).astype(np.float64)  # (H, d, r)
    return np.sqrt(np.maximum(((w_k @ grams) * w_k).sum(axis=-1), 0))


def extremity(values: np.ndarray) -> np.ndarray:
    """Distance of a size from its layer's others: |robust z-score| of its log, (L, d) -> (L, d).

    Training may shrink the gain of a dimension that has grown, so small gains are as telling as
    large ones.
    """
    return np.stack([np.abs(robust_z(np.log(np.maximum(row, 1e-30)))) for row in values])


def rank_agreement(guessed: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation over dimensions by layer: two (L, d) -> (L,); NaN if unknown.

    Only magnitudes are compared.
    """
    correlations = np.full(len(guessed), np.nan)
    for layer, (g, m) in enumerate(zip(np.abs(guessed), np.abs(measured), strict=True)):
        if np.ptp(g) > 0 and np.ptp(m) > 0:
            correlations[layer] = spearmanr(g, m).statistic
    return correlations


def ranks(values: np.ndarray) -> np.ndarray:
    """Rank of every dimension in its layer by magnitude, 1 the largest: (L, d) -> (L, d) int."""
    return np.argsort(np.argsort(-np.abs(values), axis=1, kind="stable"), axis=1, kind="stable") + 1


# Measured on sentences


NAMED = 6  # outlier dimensions in the lead and on the page; the files have all


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class OutlierAnalysis(Study):
    """Outlier dimensions of the stream, their effect on attention scores, and predictions."""

    FIGURE, PAGE = "figures:means_figure", "page:write_outliers_page"
    TABLES: ClassVar = {
        "stream.csv": lambda outliers: outliers.stream.table(),
        "attention.csv": lambda outliers: outliers.stream.attention_table(),
        "contributions.csv": lambda outliers: outliers.contributions.table(outliers.dimensions),
        "dominant.csv": lambda outliers: outliers.contributions.dominant(outliers.dimensions),
        "preferences.csv": lambda outliers: outliers.preferences,
        "guess.csv": lambda outliers: outliers.agreement,
        "outliers.npz": lambda outliers: outliers.arrays(),
    }

    stream: StreamMeans  # Figs 1 to 3
    contributions: Contributions  # Figs 4 and 5, and Table 1
    guess: Guess  # from the weights alone

    @property
    def dimensions(self) -> np.ndarray:
        """The outlier dimensions, the farthest first."""
        return self.stream.outliers

    @property
    def preferences(self) -> Table:
        """Score of each kind of key above the last kind's, and its causes, by layer."""
        return self.contributions.preferences(self.dimensions)

    @cached_property
    def agreement(self) -> Table:
        """Rank correlations over dimensions between guesses and measurements, by layer."""
        return self.guess.agreement(self.stream, self.contributions)

    @property
    def lead(self) -> str:
        """Summary: how many dimensions stand out, and their effect on scores."""
        c, dimensions, d = self.contributions, self.dimensions, self.stream.hidden.shape[1]
        gaps = np.nan_to_num(c.gaps)  # (L, K - 1, d)
        layer, kind = np.unravel_index(np.abs(gaps.sum(axis=-1)).argmax(), gaps.shape[:2])
        gap = gaps[layer, kind]
        j, total = int(np.abs(gap).argmax()), float(gap.sum())
        side = "above" if total >= 0 else "below"
        keys = f"In layer {c.layer_indices[layer]} {c.kind_names[kind]} keys"
        scale = f"(mean over heads, before 1/√d'{c.apart_from})"
        score = f"{keys} score {abs(total):.2f} {side} {c.kind_names[-1]} ones {scale}"
        says = f"{score}: of that, dimension {j} is {gap[j]:+.2f}"
        run_on = f"Run on {self.stream.counts.sum():,} tokens of {self.source}."
        if not len(dimensions):
            none = f"None of the {d} dimensions stands out by its mean over tokens"
            return f"{none}. {says}. {run_on}"
        which = ", ".join(map(str, dimensions[:NAMED]))
        if len(dimensions) > NAMED:
            which += " and others"
        them, outliers_are = f"{len(dimensions)} stand", "the outliers are"
        if len(dimensions) == 1:
            them, outliers_are = "one stands", "the outlier is"
        out = f"Of {d} dimensions of the residual stream, {them} out in some layer: {which}"
        return f"{out}. {says} and {outliers_are} {gap[dimensions].sum():+.2f}. {run_on}"

    @property
    def about(self) -> str:
        share = f"{len(self.dimensions)} of {self.stream.hidden.shape[1]} dimensions"
        return f"{self.model}: {share} stand out"

    def shown(self) -> list[Table]:
        """Table of what makes a kind of key preferred, by layer."""
        return [self.preferences]

    def arrays(self) -> dict[str, np.ndarray]:
        """The content of outliers.npz."""
        stream, contributions, guessed = self.stream, self.contributions, self.guess
        return {
            "kinds": np.array(stream.kind_names),
            "layers": stream.layer_indices,
            "dimensions": self.dimensions,
            "tokens": stream.counts,
            "keys": contributions.counts,
            "hidden": stream.hidden.astype(np.float32),
            "attention": stream.attention.astype(np.float32),
            "contributions": contributions.by_kind.astype(np.float32),
            "guessed_columns": guessed.columns,
            "guessed_gains": guessed.gains,
            "guessed_contributions": guessed.contributions,
        }


def study_outliers(
    model: Model,
    texts: Texts,
    n: int,
    sampled: int,
    longest: int,
    seed: int = 0,
    device: str = "cpu",
) -> OutlierAnalysis:
    """Run a model on n sentences of at most `longest` tokens; C is averaged over `sampled`."""
    framing = framing_of(model)
    sequences = sentence_sequences(framing, texts.texts, n, longest, seed)
    runner = open_runner(model, device=device)
    outliers = measure_outliers(runner, sequences, token_kinds(framing), sampled)
    return replace(outliers, source=texts.source)


def measure_outliers(
    runner: Runner, sequences: Sequence[np.ndarray], kinds: TokenKinds, sampled: int = 100
) -> OutlierAnalysis:
    """Run a model over sentences, and read its weights: sequences (n,)."""
    return OutlierAnalysis.of(
        runner,
        stream=observe_stream(runner, sequences, kinds),
        contributions=observe_contributions(runner, sequences[:sampled], kinds),
        guess=guess(runner.model),
    )
