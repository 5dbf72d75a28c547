"""Position curves of heads whose positions are in the scores: rotary embeddings, ALiBi, biases by
distance.

Such heads have no T^p and T^pp. What position does shows in the mean score of two tokens by their
distance, K(delta) = scale E[q] R(delta) E[k]' + bias(delta), and in how far the scores of single
pairs of tokens are from it (the band).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from scipy.special import softmax

from weightscope.checkpoint.config import Config
from weightscope.checkpoint.provenance import Provenance
from weightscope.core.errors import CheckpointError, counted
from weightscope.core.progress import bar
from weightscope.core.results import Result, ShowsShapes
from weightscope.core.tables import Column, Table
from weightscope.heads.detok.heads import counts_for
from weightscope.heads.detok.positions import FEWEST, near_mass, recency, trends
from weightscope.model.config.config import ModelConfig
from weightscope.model.layers.kernel import (
    FAST,
    NEAR,
    biases,
    mean_scores,
    why_no_kernel,
    window_of,
)
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.positions import Buckets
from weightscope.model.metrics.spectra import spread_error
from weightscope.model.model import Model, as_model, overflow
from weightscope.model.rows.table import RECORD, lines, title
from weightscope.model.text.counts import Counts
from weightscope.report.findings import indexed

# of the first layer: the most frequent ones, or drawn where no counts are at hand
MOST_TOKENS = 16_384
MOST_VALUES = 1 << 25  # of their embeddings: 128 MiB
# of later layers, drawn by the same weights, where the stream is approximated by embeddings
FEWER_TOKENS = 1024
AN_OCTAVE = 16  # further distances between one and its double
UNSTATED = 2048  # positions, where the config says none
# nats of a mean score over near distances: below it distance hardly moves attention
LEAST_SPAN = 0.5
# error of a random factor's spread, above which narrow heads cannot be told from trained ones
WIDE_ENOUGH = 0.5
PRINTED = 10  # heads on a terminal
SHOWN = (
    "layer",
    "head",
    "peak",
    "span",
    "previous",
    "position_share",
    "slope",
    "near_mass",
    "fast_share",
    "beyond_share",
)


class Tokens(NamedTuple):
    """Tokens that stand at query and key, and how often: weights (n,) that sum to 1."""

    ids: np.ndarray
    weights: np.ndarray
    origin: str  # which ones, in words


class ByPair(NamedTuple):
    """What the pairs of dimensions of some heads (h) do; NaN beyond the pairs that a head has."""

    wavelengths: np.ndarray  # (h, P): tokens a turn; infinite where a dimension does not turn
    usage: np.ndarray  # (h, P): product of the root mean squares of a pair's queries and keys
    by_position: np.ndarray  # (h, P): amplitude of the pair's wave in the mean score
    by_content: np.ndarray  # (h, P): standard deviation over tokens of what the pair adds


@dataclass(frozen=True, eq=False, repr=False)
class PositionKernels(ShowsShapes, Result):
    """Mean scores by distance of all heads (h) of a model without position embeddings."""

    FIGURE = "heads.detok.figures:kernel_figure"
    PAGE = "heads.detok.page:write_kernel_page"
    TABLES: ClassVar = {
        "kernel.npz": lambda kernels: kernels.arrays,
        "kernel.csv": lambda kernels: kernels.curves,
        "trends.csv": lambda kernels: kernels.heads,
    }

    model: str
    layer: np.ndarray  # (h,): each head's layer, and its place there
    head: np.ndarray  # (h,)
    distances: np.ndarray  # (D,): i - j, ascending; negative where tokens see what comes after them
    mean: np.ndarray  # (h, D): scores before the softmax, scale and bias included
    # (h, D): standard deviation over pairs of tokens; NaN where there are no tokens
    band: np.ndarray
    pairs: ByPair
    context: int  # positions that the model was trained on
    windows: np.ndarray | None  # (h, 2 height - 1, 2 width - 1): biases by rows and columns
    tokens: str  # over which tokens the first layer's mean is, in words; empty where there are none
    # tokens whose pass through the model gives later layers' inputs; 0 where bare embeddings are
    # used
    followed: int
    refused: Mapping[int, str]  # layers without a kernel, and why
    left_out: tuple[str, ...]
    provenance: Provenance = field(default_factory=Provenance, repr=False)
    untrained: tuple[int, ...] = ()  # layers whose factors have the spectra of random matrices

    @property
    def about(self) -> str:
        """The checkpoint and its heads, in a few words."""
        return f"{self.model}: {counted(len(self.head), 'head')}"

    @property
    def rotates(self) -> bool:
        """Whether any pair turns."""
        return bool(np.isfinite(self.pairs.wavelengths).any())

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """What kernel.npz holds."""
        curves = {
            name: getattr(self, name) for name in ("layer", "head", "distances", "mean", "band")
        }
        windows = {} if self.windows is None else {"windows": self.windows}
        return curves | self.pairs._asdict() | {"context": np.array(self.context)} | windows

    @property
    def curves(self) -> Table:
        """One row per head and distance."""
        n = len(self.distances)
        return Table(
            [
                Column("layer", np.repeat(self.layer, n)),
                Column("head", np.repeat(self.head, n)),
                Column("distance", np.tile(self.distances, len(self.head)), unit="tokens"),
                Column("mean", self.mean.ravel(), meaning="mean score over pairs of tokens"),
                Column(
                    "band", self.band.ravel(), meaning="standard deviation over pairs of tokens"
                ),
            ],
            "Mean score by distance $i - j$.",
        )

    @cached_property
    def near(self) -> np.ndarray:
        """Where distances are 0, 1, 2 ... without a gap, up to `NEAR`."""
        start = int(np.searchsorted(self.distances, 0))
        return start + np.flatnonzero(self.distances[start:][:NEAR] < NEAR)

    @cached_property
    def heads(self) -> Table:
        """One row per head: what its kernel looks like, and which wavelengths its queries and keys
        use.
        """
        near = self.mean[:, self.near]  # (h, n)
        n, over_j = near.shape[1], near[:, ::-1]  # the nearest last
        peak, attention = self.mean.argmax(axis=1), softmax(over_j, axis=1)
        height = self.mean.max(axis=1) - np.median(near, axis=1)
        by_distance, by_tokens = near.var(axis=1), (self.band[:, self.near] ** 2).mean(axis=1)
        share = by_distance / np.maximum(by_distance + by_tokens, np.finfo(float).tiny)
        lines_of = trends(over_j) if n >= FEWEST else [np.full(len(near), np.nan)] * len(TRENDS)
        columns = [
            Column("layer", self.layer),
            Column("head", self.head),
            Column(
                "peak",
                self.distances[peak],
                unit="tokens",
                meaning="distance with the highest mean score",
            ),
            Column(
                "peak_height",
                height,
                meaning=f"mean score there less the median over distances 0 to {n - 1}",
            ),
            Column(
                "span",
                np.ptp(near, axis=1),
                unit="nats",
                meaning=f"of the mean score over distances 0 to {n - 1}",
            ),
            Column(
                "previous",
                attention[:, max(0, n - 2)],
                meaning="attention to distance 1 by the mean score alone",
            ),
            Column("position_share", share, meaning="share of distance in the variance of scores"),
            *(
                Column(name, values, meaning=text)
                for (name, text), values in zip(TRENDS, lines_of, strict=True)
            ),
            Column(
                "recency",
                [*map(recency, over_j)],
                meaning="Spearman correlation of the mean score with j",
            ),
            Column(
                "near_mass",
                near_mass(attention),
                meaning="attention by the mean score to the nearest tenth",
            ),
            *self._bands(),
        ]
        return Table(columns, f"Curves over distances 0 to {n - 1}, all pairs of tokens at each.")

    def _bands(self) -> list[Column]:
        """Shares of wavelengths in what queries and keys have."""
        if not self.rotates:
            return []
        waves, usage = self.pairs.wavelengths, np.nan_to_num(self.pairs.usage)  # (h, P)
        turns = np.isfinite(waves)
        bands = {
            "fast_share": (waves <= FAST, f"pairs that turn once within {FAST} tokens"),
            "middle_share": (
                (waves > FAST) & (waves <= self.context),
                f"slower pairs, up to {self.context:,} tokens",
            ),
            "beyond_share": (
                (waves > self.context) & turns,
                f"pairs that turn less than once in {self.context:,}",
            ),
            "still_share": (np.isinf(waves), "dimensions that do not turn"),
        }
        total = np.maximum(usage.sum(axis=1), np.finfo(float).tiny)
        strongest = np.where(turns, usage, -1.0).argmax(axis=1)
        return [
            *(
                Column(
                    name,
                    np.where(there, usage, 0).sum(axis=1) / total,
                    meaning=f"share of $|q||k|$ in {which}",
                )
                for name, (there, which) in bands.items()
            ),
            Column(
                "wavelength",
                waves[np.arange(len(waves)), strongest],
                unit="tokens",
                meaning="of the turning pair with the largest $|q||k|$",
            ),
        ]

    def most_positional(self, count: int = 6) -> list[int]:
        """Rows of the heads whose scores owe most to distance, most first."""
        order: list[int] = np.argsort(-self.heads["position_share"], kind="stable")[:count].tolist()
        return order

    def row(self, layer: int, head: int) -> int:
        """The row of a head; a CheckpointError where it has none."""
        rows = np.flatnonzero((self.layer == layer) & (self.head == head))
        if not len(rows):
            why = self.refused.get(layer)
            raise CheckpointError(
                f"layer {layer} {why}"
                if why
                else f"no head {layer}.{head} with a curve over distance"
            )
        return int(rows[0])

    def name(self, row: int) -> str:
        """LAYER.HEAD."""
        return f"{self.layer[row]}.{self.head[row]}"

    @property
    def headline(self) -> str:
        """What distance alone does, in a sentence."""
        heads, moved = self.heads, self.moved
        if not moved.any():
            which = "layer that looks trained" if self.untrained else "layer"
            far = f"by {LEAST_SPAN} nats over distances 0 to {len(self.near) - 1}"
            return f"In no {which} does distance move a head's mean score {far}."
        near, previous = (
            int(np.count_nonzero(moved & of)) for of in (heads["recency"] > 0, heads["peak"] == 1)
        )
        result = (
            f"Distance moves the mean scores of {np.count_nonzero(moved)} of {len(self.head)} "
            f"heads by {LEAST_SPAN} nats or more: {near} prefer near tokens, and {previous} have "
            "their peak at distance 1."
        )
        if not self.tokens:
            return result
        row = next(row for row in self.most_positional(len(moved)) if moved[row])
        return (
            f"{result} Distance matters most in head {self.name(row)}: it is "
            f"{heads['position_share'][row]:.0%} of the variance of the head's scores and moves "
            f"their mean by {heads['span'][row]:.1f} nats, highest at distance "
            f"{heads['peak'][row]}."
        )

    @property
    def moved(self) -> np.ndarray:
        """Which heads, of layers that look trained, have mean scores that distance moves: (h,)
        booleans.
        """
        return (self.heads["span"] >= LEAST_SPAN) & ~np.isin(self.layer, self.untrained)

    @property
    def cautions(self) -> tuple[str, ...]:
        """What the curves leave out, in sentences."""
        later = self.layer[self.layer > self.layer.min()]
        stand_in = (
            "Layers after the first read what layers before them wrote: their curves are means "
            f"over {self.followed} random tokens, mostly frequent ones, that passed through the "
            "model approximately (attention to far tokens is averaged)."
            if self.followed
            else "In layers after the first, bare token embeddings behind the layer's own norm stand in for the "
            "residual stream, without what the layers before wrote: in the model their curves may "
            "be quite different."
        )
        skipped = [f"Layer {layer} {why}: no curve." for layer, why in self.refused.items()]
        random = []
        if self.untrained:
            where = indexed("layer", self.untrained)
            random = [
                f"The factors of {where} have the spectra of random matrices, as before training."
            ]
        return (
            *random,
            *([stand_in] if self.tokens and len(later) else []),
            *skipped,
            *self.left_out,
        )

    @property
    def lead(self) -> str:
        """The same, over which tokens, and the caveats."""
        which = "Tokens of the first layer" if self.followed else "Tokens"
        over = f"{which}: {self.tokens}." if self.tokens else "The curves are the bias alone."
        return " ".join([self.headline, over, *self.cautions])

    def printed(self) -> list[str | Table]:
        """What a terminal shows: the heads whose scores owe most to distance."""
        table, most = self.shown()[0], self.most_positional(PRINTED)
        return [
            self.headline,
            Table([replace(column, values=column.values[most]) for column in table.columns]),
        ]

    def shown(self) -> list[Table]:
        """What each head does with distance."""
        names = {column.name for column in self.heads.columns}
        return [self.heads.select(*(name for name in SHOWN if name in names))]


TRENDS = (
    (
        "slope",
        "of the line fitted to the mean score, per position: positive where near tokens are "
        "preferred, as ALiBi's",
    ),
    ("linear_share", "share of the curve's variance that the line explains"),
    (
        "period",
        "of the strongest sinusoid beside the line, in tokens; as long as the curve, it is a lower "
        "bound",
    ),
    ("sinusoid_share", "share of the curve's variance that it explains beyond the line"),
)


def position_kernels(
    model: Model | str | Path,
    counts: Counts | str | Path | None = None,
    inputs: Mapping[int, np.ndarray] | None = None,
) -> PositionKernels:
    """Mean scores by distance of every head, over tokens weighted by how often they occur.

    Parameters
    ----------
    model : Model, str or Path
    counts : Counts, str or Path, optional
        Bigram counts; by default from the texts that come with weightscope. Where the tokenizer is
        not at hand, all tokens weigh the same.
    inputs : mapping of int to (n, d) array, optional
        What enters layers after the first, as `circuits.stream` follows tokens; a layer that is not
        given gets bare token embeddings.

    Raises
    ------
    CheckpointError
        The model has position embeddings, or no layer's scores are curves over distance.
    """
    model = as_model(model)
    if model.positions is not None:
        problem = "has position embeddings, hence T^p and T^pp rather than scores by distance"
        raise CheckpointError(problem, file=model.checkpoint.name)
    indices = model.attention_layers
    window = window_of(model.layer(indices[0])) if indices else None
    tokens, inputs = None, inputs or {}
    context = context_of(model)
    distances = distances_up_to(context - 1) if window is None else np.arange(window.sides[1])
    if window is not None or both_ways(model):
        distances = np.concatenate((-distances[:0:-1], distances))
    refused, by_layer, left_out, places, untrained = {}, [], dict[str, None](), False, []
    with bar(what="kernels", unit="layer", total=len(indices)) as done:
        for index in indices:
            layer = model.layer(index)
            if why := why_no_kernel(layer):
                refused[index] = why
            else:
                # a tower whose layers are all refused may have none
                if window is None and tokens is None:
                    tokens = tokens_of(model, counts)
                x = None if tokens is None else _standing_in(model, index, tokens, inputs)
                by_layer.append(_of_layer(model, layer, distances, x))
                untrained += [index] if as_initialised(layer) else []
                left_out |= dict.fromkeys(_left_out(layer, model.config.layer_types[index]))
                places |= layer.rotation is not None or layer.additive is not None
            done.update(1)
    if not places:
        which, why = next(iter(refused.items()), (0, "sees no positions"))
        raise CheckpointError(
            f"no curve over distance: layer {which} {why}", file=model.checkpoint.name
        )
    curves = (
        np.concatenate(parts) for parts in zip(*(of_layer for of_layer, _ in by_layer), strict=True)
    )
    layers, heads, mean, band, windows = curves
    return PositionKernels(
        model.title,
        layers,
        heads,
        distances,
        mean,
        band,
        _together([pairs for _, pairs in by_layer]),
        context,
        windows if windows.size else None,
        "" if tokens is None else tokens.origin,
        max(map(len, inputs.values()), default=0),
        refused,
        tuple(left_out),
        Provenance.of(model.checkpoint),
        tuple(untrained),
    )


def as_initialised(layer: Layer) -> bool:
    """Whether all factors of a layer's heads have the second moments of Gaussian matrices, as
    before training.

    Where a norm's gain is folded into W_Q and W_K, W_V and W_O decide. Narrow heads cannot be told.
    """
    factors = [(layer.v, layer.n_kv_heads)]
    if layer.q_norm is None and layer.k_norm is None:
        factors += [(layer.q, layer.n_heads), (layer.k, layer.n_kv_heads)]
    gain = np.ones(layer.d_model) if layer.norm is None else layer.norm.gamma.astype(np.float64)
    filled = (gain**2).sum() ** 2 / (gain**4).sum()  # dimensions that a random factor would fill
    spreads = [
        (_random_spread([maps.of(head)[0] for head in range(n)], filled), n) for maps, n in factors
    ]
    spreads.append(
        (_random_spread([w.T for w in np.asarray(layer.w_o)], layer.d_model), layer.n_heads)
    )
    width = layer.w_o.shape[1]
    errors = [spread_error(width * np.sqrt(n)) for _, n in spreads]
    if max(errors) > WIDE_ENOUGH:
        return False
    return all(abs(spread - 1) < error for (spread, _), error in zip(spreads, errors, strict=True))


def _random_spread(heads: Sequence[np.ndarray], width: float) -> float:
    """width (tr(G^2) / (tr G)^2 - 1/r), mean over factors (d, r): 1 where they are random and fill
    `width` rows.
    """
    spreads = []
    for w in heads:
        gram = (w.T @ w).astype(np.float64)
        spreads.append(
            (gram**2).sum() / max(gram.trace(), np.finfo(float).tiny) ** 2 - 1 / len(gram)
        )
    return float(width * np.mean(spreads))


class _Curves(NamedTuple):
    """Fields of `PositionKernels`, of one layer."""

    layer: np.ndarray
    head: np.ndarray
    mean: np.ndarray
    band: np.ndarray
    windows: np.ndarray


def _standing_in(
    model: Model, index: int, tokens: Tokens, inputs: Mapping[int, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """A layer's inputs or their substitute, (n, d), and weights (n,)."""
    ids, weights = tokens.ids, tokens.weights
    if index in inputs and index != 0:
        return inputs[index], np.full(len(inputs[index]), 1 / len(inputs[index]))
    if index != 0 and len(ids) > FEWER_TOKENS:
        ids = np.random.default_rng(0).choice(ids, FEWER_TOKENS, p=weights)
        weights = np.full(FEWER_TOKENS, 1 / FEWER_TOKENS)
    return entering(model, index, model.embeddings.rows(ids)), weights


def _of_layer(
    model: Model,
    layer: Layer,
    distances: np.ndarray,
    weighted: tuple[np.ndarray, np.ndarray] | None,
) -> tuple[_Curves, ByPair]:
    """The curves of a layer's heads, and what their pairs do."""
    n_heads, window = layer.n_heads, window_of(layer)
    empty = np.empty((n_heads, 0))
    labels = np.full(n_heads, layer.index), np.arange(n_heads)
    if weighted is None:
        table = np.moveaxis(window.table * window.times, -1, 0) if window is not None else empty
        mean = biases(layer)(distances)
        return _Curves(*labels, mean, np.full_like(mean, np.nan), table), ByPair(
            empty, empty, empty, empty
        )
    with np.errstate(over="ignore", invalid="ignore"):  # found and named below
        kernel = mean_scores(layer, *weighted)
        mean, band = kernel.mean(distances), kernel.band(distances)
    if not (np.isfinite(mean).all() and np.isfinite(band).all()):
        raise overflow(model, "the mean score by distance", layer.index)
    with np.errstate(divide="ignore"):
        waves = np.broadcast_to(2 * np.pi / np.abs(kernel.frequencies), kernel.usage.shape)
    return _Curves(*labels, mean, band, empty), ByPair(
        waves, kernel.usage, kernel.by_position, kernel.by_content
    )


def _together(layers: list[ByPair]) -> ByPair:
    """The pairs of all layers' heads, padded with NaN to the widest layer."""
    width = max(pairs.usage.shape[1] for pairs in layers)
    padded = [
        [
            np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=np.nan)
            for values in pairs
        ]
        for pairs in layers
    ]
    return ByPair(*(np.concatenate(parts) for parts in zip(*padded, strict=True)))


def _left_out(layer: Layer, kind: str) -> list[str]:
    """What the model does to scores that the curves do not have, in sentences."""
    rotation = layer.rotation
    texts = {
        f"Scores are bounded by {layer.softcap:g} tanh(s / {layer.softcap:g}) after the curves' "
        "sum."
        if layer.softcap is not None
        else "",
        f"Queries are multiplied by {layer.temperature} at position p: the curves are those of a "
        "factor of 1."
        if layer.temperature is not None
        else "",
        f"Sequences over {rotation.longest:,} positions turn otherwise: the curves are those of "
        "shorter ones."
        if rotation is not None and rotation.stretched is not None
        else "",
        "Positions have several axes: the curves are of text, whose tokens are equally far on each."
        if rotation is not None and rotation.axes is not None
        else "",
        "Layers of sliding windows do not see as far as their curves go."
        if kind.startswith("sliding")
        else "",
        "A class token has biases of its own, which are not in the curves."
        if (window := window_of(layer)) is not None and window.of_class is not None
        else "",
    }
    return sorted(filter(None, texts))


def tokens_of(model: Model, counts: Counts | str | Path | None = None) -> Tokens:
    """The tokens that means are over: by how often they occur where counts are at hand, else all
    the same.
    """
    n_tokens, most = (
        model.embeddings.n_tokens,
        min(MOST_TOKENS, MOST_VALUES // model.config.d_model),
    )
    try:
        bigrams = counts_for(model, counts)
    except CheckpointError:
        if counts is not None:
            raise
        ids = np.arange(n_tokens)
        if n_tokens > most:
            ids = np.sort(np.random.default_rng(0).choice(n_tokens, most, replace=False))
        which = (
            f"{len(ids):,} drawn from the {n_tokens:,}"
            if len(ids) < n_tokens
            else f"all {n_tokens:,}"
        )
        origin = f"{which} of the vocabulary, all weighted alike, because no counts were at hand"
        return Tokens(ids, np.full(len(ids), 1 / len(ids)), origin)
    occurrences = bigrams.occurrences
    ids = np.sort(np.argsort(-occurrences, kind="stable")[:most])
    ids = ids[occurrences[ids] > 0]
    covered = occurrences[ids].sum()
    share = covered / occurrences.sum()
    which = f"the {len(ids):,} most frequent" if share < 1 else f"the {len(ids):,}"
    origin = f"{which} that occur ({share:.1%} of the text), by how often they do: {bigrams.origin}"
    return Tokens(ids, occurrences[ids] / covered, origin)


def entering(model: Model, index: int, rows: np.ndarray) -> np.ndarray:
    """Token rows (n, e) as a layer would read them if nothing before it had written anything, (n,
    d).

    Where the stream has passed a norm when it enters the layer (post-norm models), they pass it
    too.
    """
    norm = model.stream_norm(index)
    if index == 0:
        rows = rows if norm is None or model.embeddings.norm is not None else norm(rows)
        return model.into_stream(rows)
    stream = model.into_stream(rows)
    return stream if norm is None else norm(stream)


def context_of(model: Model) -> int:
    """Positions that the model was first trained on, as far as its config says."""
    config: ModelConfig = model.config
    lengths = [
        given.size("original_max_position_embeddings")
        for given in config.rope.values()
        if isinstance(given, Config) and given.has("original_max_position_embeddings")
    ]
    return min([*lengths, config.n_positions or UNSTATED])


def both_ways(model: Model) -> bool:
    """Whether tokens see those that come after them, as the census of transformers' attention
    saw.
    """
    additive = model.layer(model.attention_layers[0]).additive
    if isinstance(additive, Buckets):
        return not additive.causal
    row = title(model.family)
    return {line["kind"] for line in lines(RECORD) if row in (line["row"] or "").split()} == {
        "self"
    }


def distances_up_to(last: int) -> np.ndarray:
    """0, 1, 2 ... at first, then `AN_OCTAVE` to each doubling, up to the last: (D,) ints."""
    octaves: Callable[[np.ndarray], np.ndarray] = lambda steps: NEAR * 2.0 ** (steps / AN_OCTAVE)  # noqa: E731
    far = np.rint(
        octaves(np.arange(max(0, int(AN_OCTAVE * np.log2(max(last, NEAR) / NEAR))) + 1))
    ).astype(int)
    return np.unique(np.concatenate((np.arange(min(NEAR, last + 1)), far[far <= last], [last])))
