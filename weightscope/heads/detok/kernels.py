"""Position curves of heads with positions in the scores: rotation, ALiBi, biases by distance.

Such heads have no T^p and T^pp. Position shows in the mean score of two tokens by their distance,
K(delta) = scale E[q] R(delta) E[k]' + bias(delta), and in how far the scores of single pairs of
tokens are from it (the band).
"""

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from scipy.special import softmax

from weightscope.checkpoint.config import Config
from weightscope.checkpoint.provenance import Provenance
from weightscope.core.errors import CheckpointError, counted
from weightscope.core.progress import bar
from weightscope.core.results import Result, ShowsShapes, holds_arrays
from weightscope.core.tables import Column, Table
from weightscope.heads.circuits.stream import frequent_inputs
from weightscope.heads.detok.first_layer import FirstLayer, position_terms
from weightscope.heads.detok.heads import counts_for
from weightscope.heads.detok.positions import FEWEST, PositionTerms, near_mass, recency, trends
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

MOST_TOKENS = 16_384  # tokens of the first layer, the most frequent ones, or drawn without counts
MOST_VALUES = 1 << 25  # values of their embeddings: 128 MiB
FEWER_TOKENS = 1024  # tokens of later layers, drawn by the same weights, where inputs are not known
AN_OCTAVE = 16  # further distances between one and its double
UNSTATED = 2048  # positions, where the config says none
LEAST_SPAN = 0.5  # nats of a mean score over near distances; less hardly moves attention
WIDE_ENOUGH = 0.5  # most error of a random spread with which trained heads can be told
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


class TokenWeights(NamedTuple):
    """Tokens that stand at query and key, and how often: weights (n,) that sum to 1."""

    ids: np.ndarray
    weights: np.ndarray
    origin: str  # description, in words


class ByPair(NamedTuple):
    """Pairs of dimensions of some heads, (h, P) each; NaN beyond the pairs that a head has."""

    wavelengths: np.ndarray  # tokens per turn; infinite where a dimension does not turn
    usage: np.ndarray  # product of the root mean squares of a pair's queries and keys
    by_position: np.ndarray  # amplitude of the pair's wave in the mean score
    by_content: np.ndarray  # standard deviation over tokens of what the pair adds


@holds_arrays
class PositionKernels(ShowsShapes, Result):
    """Mean scores by distance of all heads (h) of a model without position embeddings."""

    FIGURE = "figures:kernel_figure"
    PAGE = "page:write_kernel_page"
    TABLES: ClassVar = {
        "kernel.npz": lambda kernels: kernels.arrays,
        "kernel.csv": lambda kernels: kernels.curves,
        "trends.csv": lambda kernels: kernels.heads,
    }

    model: str
    layer: np.ndarray  # (h,), each head's layer
    head: np.ndarray  # (h,), its place there
    distances: np.ndarray  # (D,), i - j, ascending; negative where tokens see later ones
    mean: np.ndarray  # (h, D) scores before the softmax, scale and bias included
    band: np.ndarray  # (h, D) standard deviation over pairs of tokens; NaN without tokens
    pairs: ByPair
    context: int  # positions that the model was trained on
    windows: np.ndarray | None  # (h, 2 height - 1, 2 width - 1) biases by rows and columns
    tokens: str  # tokens that the first layer's mean is over, in words; empty if there are none
    followed: int  # tokens followed to later layers; 0 where bare embeddings are used
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
        """True if any pair of dimensions turns."""
        return bool(np.isfinite(self.pairs.wavelengths).any())

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays of kernel.npz."""
        names = ("layer", "head", "distances", "mean", "band")
        curves = {name: getattr(self, name) for name in names}
        windows = {} if self.windows is None else {"windows": self.windows}
        return curves | self.pairs._asdict() | {"context": np.array(self.context)} | windows

    @property
    def curves(self) -> Table:
        """One row per head and distance."""
        n = len(self.distances)
        deviation = "standard deviation over pairs of tokens"
        return Table(
            [
                Column("layer", np.repeat(self.layer, n)),
                Column("head", np.repeat(self.head, n)),
                Column("distance", np.tile(self.distances, len(self.head)), unit="tokens"),
                Column("mean", self.mean.ravel(), meaning="mean score over pairs of tokens"),
                Column("band", self.band.ravel(), meaning=deviation),
            ],
            "Mean score by distance $i - j$.",
        )

    @cached_property
    def near(self) -> np.ndarray:
        """Places of the distances 0, 1, 2 ... without a gap, up to `NEAR`."""
        start = int(np.searchsorted(self.distances, 0))
        return start + np.flatnonzero(self.distances[start:][:NEAR] < NEAR)

    @cached_property
    def heads(self) -> Table:
        """One row per head: the form of its kernel, and the wavelengths that it uses."""
        near = self.mean[:, self.near]  # (h, n)
        n, over_j = near.shape[1], near[:, ::-1]  # the nearest last
        attention = softmax(over_j, axis=1)
        peak = self.distances[self.mean.argmax(axis=1)]
        height = self.mean.max(axis=1) - np.median(near, axis=1)
        by_distance, by_tokens = near.var(axis=1), (self.band[:, self.near] ** 2).mean(axis=1)
        share = by_distance / np.maximum(by_distance + by_tokens, np.finfo(float).tiny)
        fitted = trends(over_j) if n >= FEWEST else [np.full(len(near), np.nan)] * len(TRENDS)
        over = f"over distances 0 to {n - 1}"
        previous, by_mean = attention[:, max(0, n - 2)], "by the mean score"
        of_j = "Spearman correlation of the mean score with j"
        columns = [
            Column("layer", self.layer),
            Column("head", self.head),
            Column("peak", peak, unit="tokens", meaning="distance with the highest mean score"),
            Column("peak_height", height, meaning=f"mean score there less the median {over}"),
            Column("span", np.ptp(near, axis=1), unit="nats", meaning=f"of the mean score {over}"),
            Column("previous", previous, meaning=f"attention to distance 1 {by_mean} alone"),
            Column("position_share", share, meaning="share of distance in the variance of scores"),
        ]
        for (name, meaning), values in zip(TRENDS, fitted, strict=True):
            columns.append(Column(name, values, meaning=meaning))
        columns += [
            Column("recency", [*map(recency, over_j)], meaning=of_j),
            Column(
                "near_mass",
                near_mass(attention),
                meaning=f"attention {by_mean} to the nearest tenth",
            ),
            *self._bands(),
        ]
        return Table(columns, f"Curves {over}, all pairs of tokens at each.")

    def _bands(self) -> list[Column]:
        """Columns for the shares of wavelengths in |q||k|, and for the strongest pair's."""
        if not self.rotates:
            return []
        waves, usage = self.pairs.wavelengths, np.nan_to_num(self.pairs.usage)  # (h, P)
        turns, context = np.isfinite(waves), self.context
        middle = (waves > FAST) & (waves <= context)
        beyond = (waves > context) & turns
        bands = {
            "fast_share": (waves <= FAST, f"pairs that turn once within {FAST} tokens"),
            "middle_share": (middle, f"slower pairs, up to {context:,} tokens"),
            "beyond_share": (beyond, f"pairs that turn less than once in {context:,}"),
            "still_share": (np.isinf(waves), "dimensions that do not turn"),
        }
        total = np.maximum(usage.sum(axis=1), np.finfo(float).tiny)
        columns = []
        for name, (in_band, dimensions) in bands.items():
            share = np.where(in_band, usage, 0).sum(axis=1) / total
            columns.append(Column(name, share, meaning=f"share of $|q||k|$ in {dimensions}"))
        strongest = np.where(turns, usage, -1.0).argmax(axis=1)
        wavelength = waves[np.arange(len(waves)), strongest]
        largest = "of the turning pair with the largest $|q||k|$"
        return [*columns, Column("wavelength", wavelength, unit="tokens", meaning=largest)]

    def most_positional(self, count: int = 6) -> list[int]:
        """Rows of the heads whose scores owe most to distance, most first."""
        order: list[int] = np.argsort(-self.heads["position_share"], kind="stable")[:count].tolist()
        return order

    def row(self, layer: int, head: int) -> int:
        """The row of a head; raises CheckpointError where it has none."""
        rows = np.flatnonzero((self.layer == layer) & (self.head == head))
        if len(rows):
            return int(rows[0])
        if why := self.refused.get(layer):
            raise CheckpointError(f"layer {layer} {why}")
        raise CheckpointError(f"no head {layer}.{head} with a curve over distance")

    def name(self, row: int) -> str:
        """LAYER.HEAD."""
        return f"{self.layer[row]}.{self.head[row]}"

    @property
    def headline(self) -> str:
        """The effect of distance alone, in a sentence or two."""
        heads, moved = self.heads, self.moved
        if not moved.any():
            which = "layer that looks trained" if self.untrained else "layer"
            far = f"by {LEAST_SPAN} nats over distances 0 to {len(self.near) - 1}"
            return f"In no {which} does distance move a head's mean score {far}."
        near = np.count_nonzero(moved & (heads["recency"] > 0))
        previous = np.count_nonzero(moved & (heads["peak"] == 1))
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
        """Mask of heads, (h,), in trained layers, whose mean scores distance moves."""
        return (self.heads["span"] >= LEAST_SPAN) & ~np.isin(self.layer, self.untrained)

    @property
    def cautions(self) -> tuple[str, ...]:
        """Caveats: untrained layers, approximate inputs, and parts of scores left out."""
        cautions = []
        if self.untrained:
            where = indexed("layer", self.untrained)
            cautions.append(
                f"The factors of {where} have the spectra of random matrices, as before training."
            )
        if self.tokens and (self.layer > self.layer.min()).any():
            if self.followed:
                cautions.append(
                    "Layers after the first read what layers before them wrote: their curves are "
                    f"means over {self.followed} random tokens, mostly frequent ones, that passed "
                    "through the model approximately (attention to far tokens is averaged)."
                )
            else:
                cautions.append(
                    "In layers after the first, bare token embeddings through the layer's own norm "
                    "replace the residual stream, and earlier layers' outputs are missing: in "
                    "the model their curves may be quite different."
                )
        cautions += [f"Layer {layer} {why}: no curve." for layer, why in self.refused.items()]
        return (*cautions, *self.left_out)

    @property
    def lead(self) -> str:
        """The headline, the tokens that means are over, and the caveats."""
        which = "Tokens of the first layer" if self.followed else "Tokens"
        over = f"{which}: {self.tokens}." if self.tokens else "The curves are the bias alone."
        return " ".join([self.headline, over, *self.cautions])

    def printed(self) -> list[str | Table]:
        """The headline, and the heads whose scores owe most to distance."""
        heads = self.shown()[0].take(self.most_positional(PRINTED))
        return [self.headline, Table(heads.columns)]

    def shown(self) -> list[Table]:
        """The main columns, one row per head."""
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
        "of the strongest sinusoid left after the line, in tokens; as long as the curve, it is a "
        "lower bound",
    ),
    ("sinusoid_share", "share of the curve's variance that it explains beyond the line"),
)


def positions(
    model: Model | str | Path,
    query: int | None = None,
    *,
    unscaled: bool = False,
    counts: Counts | str | Path | None = None,
) -> PositionTerms | PositionKernels:
    """Compute what position does to the scores of heads.

    Parameters
    ----------
    model : Model, str or Path
    query : int, optional
        The position that looks, of a model with position embeddings.
    unscaled : bool
        Read no token embedding, hence without sigma; of a model with position embeddings.
    counts : Counts, str or Path, optional
        Bigram counts, which weigh the tokens of a model without position embeddings.

    Returns
    -------
    PositionTerms or PositionKernels
        T^p and T^pp of the first layer's heads; without position embeddings the mean score by
        distance of every head.

    Raises
    ------
    CheckpointError
        An option is for models of the other kind, or no score depends on position.

    Examples
    --------
    >>> import weightscope as ws
    >>> terms = ws.positions("embedded")
    >>> terms.query, terms.nearest_head()
    (127, 3)
    """
    model = as_model(model)
    if model.positions is None and (query is not None or unscaled):
        problem = "has no position embedding, and scores by distance need no query and no sigma"
        raise CheckpointError(problem, file=model.checkpoint.name)
    if model.positions is None:
        return position_kernels(model, counts, frequent_inputs(model))
    if counts is not None:
        problem = "has position embeddings; counts are for models without"
        raise CheckpointError(problem, file=model.checkpoint.name)
    return position_terms(FirstLayer(model), query, unscaled)


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
        Inputs of layers after the first, as `circuits.stream` follows tokens; a layer without gets
        bare token embeddings.

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
    refused: dict[int, str] = {}
    by_layer: list[tuple[_Curves, ByPair]] = []
    left_out: dict[str, None] = {}  # in order, each once
    untrained: list[int] = []
    has_distances = False
    with bar(what="kernels", unit="layer", total=len(indices)) as done:
        for index in indices:
            layer = model.layer(index)
            if why := why_no_kernel(layer):
                refused[index] = why
            else:
                # Read here, because a tower whose layers are all refused may have no tokens
                if window is None and tokens is None:
                    tokens = tokens_of(model, counts)
                x = None if tokens is None else _inputs_of(model, index, tokens, inputs)
                by_layer.append(_of_layer(model, layer, distances, x))
                if as_initialised(layer):
                    untrained.append(index)
                left_out |= dict.fromkeys(_left_out(layer, model.config.layer_types[index]))
                has_distances |= layer.rotation is not None or layer.additive is not None
            done.update(1)
    if not has_distances:
        first, why = next(iter(refused.items()), (0, "sees no positions"))
        problem = f"no curve over distance: layer {first} {why}"
        raise CheckpointError(problem, file=model.checkpoint.name)
    fields = zip(*(curves for curves, _ in by_layer), strict=True)
    layers, heads, mean, band, windows = map(np.concatenate, fields)
    width = max(pairs.usage.shape[1] for _, pairs in by_layer)

    def padded(values: np.ndarray) -> np.ndarray:
        missing = width - values.shape[1]
        return np.pad(values, ((0, 0), (0, missing)), constant_values=np.nan)

    of_pairs = zip(*(pairs for _, pairs in by_layer), strict=True)
    pairs_of_all = ByPair(*(np.concatenate([*map(padded, field)]) for field in of_pairs))
    return PositionKernels(
        model.title,
        layers,
        heads,
        distances,
        mean,
        band,
        pairs_of_all,
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
    """True if all factors of a layer's heads have the second moments of Gaussian matrices.

    They have before training. Where a norm's gain is folded into W_Q and W_K, W_V and W_O decide.
    False for heads too narrow to be told.
    """
    factors = [(layer.v, layer.n_kv_heads)]
    if layer.q_norm is None and layer.k_norm is None:
        factors += [(layer.q, layer.n_heads), (layer.k, layer.n_kv_heads)]
    gain = np.ones(layer.d_model) if layer.norm is None else layer.norm.gamma.astype(np.float64)
    filled = (gain**2).sum() ** 2 / (gain**4).sum()  # dimensions that a random factor would fill
    spreads = [
        _random_spread([maps.of(head)[0] for head in range(n)], filled) for maps, n in factors
    ]
    spreads.append(_random_spread([w.T for w in np.asarray(layer.w_o)], layer.d_model))
    counts = [*(n for _, n in factors), layer.n_heads]
    width = layer.w_o.shape[1]
    errors = [spread_error(width * np.sqrt(n)) for n in counts]
    if max(errors) > WIDE_ENOUGH:
        return False
    return all(abs(spread - 1) < error for spread, error in zip(spreads, errors, strict=True))


def _random_spread(heads: Sequence[np.ndarray], width: float) -> float:
    """width (tr(G^2) / (tr G)^2 - 1/r), mean over factors (d, r); 1 if random on `width` rows."""
    spreads = []
    for w in heads:
        gram = (w.T @ w).astype(np.float64)
        trace = max(gram.trace(), np.finfo(float).tiny)
        spreads.append((gram**2).sum() / trace**2 - 1 / len(gram))
    return float(width * np.mean(spreads))


class _Curves(NamedTuple):
    """Fields of `PositionKernels` for one layer."""

    layer: np.ndarray
    head: np.ndarray
    mean: np.ndarray
    band: np.ndarray
    windows: np.ndarray


def _inputs_of(
    model: Model, index: int, tokens: TokenWeights, inputs: Mapping[int, np.ndarray]
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
    """The curves of a layer's heads, and their pairs of dimensions."""
    n_heads, window = layer.n_heads, window_of(layer)
    empty = np.empty((n_heads, 0))
    labels = np.full(n_heads, layer.index), np.arange(n_heads)
    if weighted is None:
        table = np.moveaxis(window.table * window.times, -1, 0) if window is not None else empty
        mean = biases(layer)(distances)
        curves = _Curves(*labels, mean, np.full_like(mean, np.nan), table)
        return curves, ByPair(empty, empty, empty, empty)
    with np.errstate(over="ignore", invalid="ignore"):  # found and named below
        kernel = mean_scores(layer, *weighted)
        mean, band = kernel.mean(distances), kernel.band(distances)
    if not (np.isfinite(mean).all() and np.isfinite(band).all()):
        raise overflow(model, "the mean score by distance", layer.index)
    with np.errstate(divide="ignore"):
        waves = np.broadcast_to(2 * np.pi / np.abs(kernel.frequencies), kernel.usage.shape)
    pairs = ByPair(waves, kernel.usage, kernel.by_position, kernel.by_content)
    return _Curves(*labels, mean, band, empty), pairs


def _left_out(layer: Layer, layer_type: str) -> list[str]:
    """Effects on the model's scores that the curves do not have, in sentences."""
    rotation, window, cap = layer.rotation, window_of(layer), layer.softcap
    texts = []
    if cap is not None:
        texts.append(f"Scores are bounded by {cap:g} tanh(s / {cap:g}) after the curves' sum.")
    if layer.temperature is not None:
        texts.append(
            f"Queries are multiplied by {layer.temperature} at position p: the curves are for "
            "a factor of 1."
        )
    if rotation is not None and rotation.stretched is not None:
        texts.append(
            f"Sequences over {rotation.longest:,} positions turn otherwise: the curves are for "
            "shorter ones."
        )
    if rotation is not None and rotation.axes is not None:
        texts.append(
            "Positions have several axes: the curves are of text, whose tokens are equally far on "
            "each."
        )
    if layer_type.startswith("sliding"):
        texts.append("Layers of sliding windows do not see as far as their curves go.")
    if window is not None and window.of_class is not None:
        texts.append("A class token has biases of its own, which are not in the curves.")
    return sorted(texts)


def tokens_of(model: Model, counts: Counts | str | Path | None = None) -> TokenWeights:
    """The tokens that means are over, by frequency if counts are at hand, else all alike."""
    n_tokens = model.embeddings.n_tokens
    most = min(MOST_TOKENS, MOST_VALUES // model.config.d_model)
    try:
        bigrams = counts_for(model, counts)
    except CheckpointError:
        if counts is not None:
            raise
        ids, which = np.arange(n_tokens), f"all {n_tokens:,}"
        if n_tokens > most:
            ids = np.sort(np.random.default_rng(0).choice(n_tokens, most, replace=False))
            which = f"{most:,} drawn from the {n_tokens:,}"
        origin = f"{which} of the vocabulary, all weighted alike, because no counts were at hand"
        return TokenWeights(ids, np.full(len(ids), 1 / len(ids)), origin)
    occurrences = bigrams.occurrences
    ids = np.sort(np.argsort(-occurrences, kind="stable")[:most])
    ids = ids[occurrences[ids] > 0]
    covered = occurrences[ids].sum()
    share = covered / occurrences.sum()
    which = f"the {len(ids):,} most frequent" if share < 1 else f"the {len(ids):,}"
    origin = f"{which} that occur ({share:.1%} of the text), by how often they do: {bigrams.origin}"
    return TokenWeights(ids, occurrences[ids] / covered, origin)


def entering(model: Model, index: int, rows: np.ndarray) -> np.ndarray:
    """Token rows (n, e) as a layer would read them if no layer before it wrote anything, (n, d).

    Where the stream has passed a norm when it enters the layer (post-norm models), they pass it
    too.
    """
    norm = model.stream_norm(index)
    if index == 0:
        rows = rows if norm is None or model.embeddings.norm is not None else norm(rows)
        return model.ends.into_stream(rows)
    stream = model.ends.into_stream(rows)
    return stream if norm is None else norm(stream)


def context_of(model: Model) -> int:
    """Positions that the model was first trained on, as far as its config says."""
    config: ModelConfig = model.config
    key = "original_max_position_embeddings"
    lengths = [
        rope.size(key)
        for rope in config.rope.values()
        if isinstance(rope, Config) and rope.has(key)
    ]
    return min([*lengths, config.n_positions or UNSTATED])


def both_ways(model: Model) -> bool:
    """True if tokens see later ones, by the census of transformers' attention."""
    additive = model.layer(model.attention_layers[0]).additive
    if isinstance(additive, Buckets):
        return not additive.causal
    row = title(model.family)
    kinds = {line["kind"] for line in lines(RECORD) if row in (line["row"] or "").split()}
    return kinds == {"self"}


def distances_up_to(last: int) -> np.ndarray:
    """0, 1, 2 ... at first, then `AN_OCTAVE` to each doubling, up to the last: (D,) ints."""
    steps = np.arange(max(0, int(AN_OCTAVE * np.log2(max(last, NEAR) / NEAR))) + 1)
    far = np.rint(NEAR * 2.0 ** (steps / AN_OCTAVE)).astype(int)
    return np.unique(np.concatenate((np.arange(min(NEAR, last + 1)), far[far <= last], [last])))
