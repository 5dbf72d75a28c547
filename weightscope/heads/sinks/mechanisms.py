"""Mechanisms of attention sinks, by head and input (two-sink-mechanisms paper, section 4).

A head's updates u_j are looked at in the r coordinates of the space that its W_O spans, where norms
and ranks are those in the d of the residual stream. LayerScale is part of W_O; in a layer with a
gate the updates are those before it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from weightscope.core.errors import CheckpointError, counted
from weightscope.core.formulas import plain
from weightscope.core.progress import bar
from weightscope.core.tables import Column, Table
from weightscope.heads.audit.measure import measure_layer
from weightscope.heads.sinks.strength import (
    against_stream,
    alignment,
    centred,
    cosine,
    event_share,
    first_direction,
    least_epsilon,
    norms,
    of_sink_and_others,
    rank_one,
    relative_spread,
    similarity_between_tokens,
    similarity_through,
    sink_row,
    sink_strength,
    token_variance,
    unit_vectors,
    value_norm_ratio,
    variance_bound,
    variance_of_weights,
)
from weightscope.model.layers.layer import Layer
from weightscope.model.metrics.lengths import output_triangles
from weightscope.model.metrics.sinks import EVENT_SHARE, MECHANISMS, mechanism
from weightscope.model.metrics.spectra import spectral_gap, stable_rank
from weightscope.model.model import Model
from weightscope.model.text.kinds import Tokens, image_tokens, text_tokens
from weightscope.model.text.sequences import (
    CHARACTERS_A_TOKEN,
    Texts,
    paragraph_pairs,
    read_texts,
    token_windows,
)
from weightscope.model.text.tokenizer import shortened
from weightscope.runner.framing import framing_of
from weightscope.runner.runner import Activations, Runner, Study


class SinkInputs(NamedTuple):
    """Images or texts."""

    sequences: dict[str, np.ndarray]  # (channels, height, width) or (n,), by name
    tokens: Tokens  # the kinds of the tokens made from them
    note: str  # number, form and origin, in a sentence


def read_inputs(
    model: Model,
    text: Sequence[Path] = (),
    images: Path | None = None,
    *,
    n: int = 64,
    length: int = 256,
    seed: int = 0,
    own_first: bool = False,
) -> SinkInputs:
    """Read texts for a language model, images for a vision model; by default the package's."""
    if not model.family.inputs.tokens:
        if text or own_first:
            raise CheckpointError(f"{model.name} sees images, not texts")
        return _image_inputs(model, images, n, seed)
    if images is not None:
        raise CheckpointError(f"{model.name} reads texts, not images")
    texts = read_texts(text, characters=CHARACTERS_A_TOKEN * n * length)
    return _text_inputs(model, texts, n, length, seed, own_first)


def _image_inputs(model: Model, path: Path | None, n: int, seed: int) -> SinkInputs:
    """The first images of a folder, or scikit-learn's two photographs and crops."""
    from weightscope.runner.images import image_processor, photographs, read_images

    process = image_processor(model)
    if path is None:
        images, source = photographs(n, seed), "scikit-learn's two photographs and crops of them"
    else:
        images, source = read_images(path, n), f"images from {path}"
    note = f"Run on {len(images)} images: {source}; {process}."
    sequences = {name: process(image) for name, image in images.items()}
    return SinkInputs(sequences, image_tokens(model), note)


def _text_inputs(
    model: Model, texts: Texts, n: int, length: int, seed: int, own_first: bool
) -> SinkInputs:
    """Pairs of paragraphs if the tokenizer frames them so, else windows of one length."""
    framing = framing_of(model, own_first=own_first)
    length = min(length, model.config.n_positions or length)
    if framing.takes_pairs:
        sequences = paragraph_pairs(framing, texts.texts, n, length, seed)
        shape = f"at most {length} tokens each, pairs of paragraphs"
    else:
        sequences = token_windows(framing, texts.texts, n, length, seed)
        shape = f"{length} tokens each"
    if not sequences:
        raise CheckpointError(f"the texts are too short for inputs of {length} tokens")
    first = "their own first token"
    if not own_first:
        first = shortened(str(framing.tokenizer.tokens.get(int(sequences[0][0]))))
    note = f"Run on {len(sequences)} texts, {shape}, beginning with {first}, from {texts.source}."
    named = {f"text {index}": sequence for index, sequence in enumerate(sequences)}
    return SinkInputs(named, text_tokens(framing.tokenizer), note)


EPSILONS = (0.01, 0.1, 0.5)  # thresholds at which epsilon-sinks are counted (Definition 1)


class SinkMeasure(NamedTuple):
    """A number for a head and an input.

    Y = A u is what the head writes, |Y| its Frobenius norm, m the number of queries, s the sink,
    a_s its column of A; V is the variance of the tokens (eq. 17), V' that after this head alone has
    written to them.
    """

    name: str
    symbol: str
    meaning: str


MECHANISM_NAMES = dict(zip(MECHANISMS, ("NOP", "broadcast", "neither"), strict=True))
MEASURES = (
    SinkMeasure("written", "$|Y|$", "what the head writes, in units of the residual stream"),
    SinkMeasure(
        "distance",
        "$|Y - 1 u_s^⊤|/|Y|$",
        "distance from the sink's update written everywhere (Lemma 3)",
    ),
    SinkMeasure("bound", "$√(m) ε max_j |u_j - u_s|/|Y|$", "Lemma 3's bound on the distance"),
    SinkMeasure(
        "residual", "$|Y - a_s u_s^⊤|/|Y|$", "the part that does not come from the sink (eqs 8, 9)"
    ),
    SinkMeasure(
        "residual_bound", "$√(m) ε max_j |u_j|/|Y|$", "the bound on that part (eqs 10, 11)"
    ),
    SinkMeasure(
        "leading",
        "$|a_s||u_s|/σ₁(Y)$",
        "singular value of the sink's part over the largest of Y (eq. 12)",
    ),
    SinkMeasure("leading_bound", "$(1 - ε)√(m) |u_s|/σ₁(Y)$", "its lower bound (eq. 12)"),
    SinkMeasure(
        "along",
        "$|cos(v₁(Y), u_s)|$",
        "between Y's first right singular vector and the sink's update (eq. 12)",
    ),
    SinkMeasure(
        "cancelled",
        "$-2⟨S, R⟩/(|S|^2 + |R|^2)$",
        "of the sink's part $S = a_s u_s^⊤$ and the rest $R = Y - S$: 1 where they cancel (Lemma "
        "1)",
    ),
    SinkMeasure(
        "against_stream",
        "$-cos(x_i, u_s)$",
        "mean over queries: 1 where the sink's update removes the stream",
    ),
    SinkMeasure(
        "variance_change",
        "$V'/V - 1$",
        "how the head's update changes the tokens' variance (Lemma 4)",
    ),
    SinkMeasure(
        "variance_sink",
        "$Var(a_s)|u_s|²/V$",
        "what uneven attention to the sink adds to it (eq. 18)",
    ),
    SinkMeasure("variance_bound", "bound of $|V'/V - 1|$", "by Lemma 4 (eq. 20)"),
    SinkMeasure(
        "key_ratio", "$|k_s|$ / mean $|k_j|$", "the sink's key norm over the others' mean (A.2)"
    ),
    SinkMeasure(
        "query_similarity",
        "cosine of queries",
        "mean over pairs of different queries, before rotation (A.2)",
    ),
    SinkMeasure(
        "update_spread",
        "sd $|o_i|$ / mean $|o_i|$",
        "of what positions gather, $o = A v$, before $W_O$ (A.2)",
    ),
    SinkMeasure(
        "alignment",
        "$|cos(x_s, v₁(W_QK))|$",
        "the sink token along the first key direction of $W_QK$ (Lemma 2)",
    ),
    SinkMeasure(
        "alignment_others", "$|cos(x_j, v₁(W_QK))|$", "the same for the other tokens, on average"
    ),
    SinkMeasure(
        "read_ratio",
        "$|N(x_s)|$ / mean $|N(x_j)|$",
        "the same lengths behind the layer's norm $N$ and its gain",
    ),
    SinkMeasure(
        "query_key", "$cos(q_i, k_s)$", "mean over queries, after rotation (in images before)"
    ),
    SinkMeasure(
        "query_key_others",
        "$cos(q_i, k_j)$",
        "the same for the other keys that the query sees, on average",
    ),
    SinkMeasure(
        "logit_margin",
        "$s_(i s)$ - mean $s_(i j)$",
        "the sink's logit minus the mean logit of the other keys that the query sees, mean over "
        "queries, from the attention",
    ),
    SinkMeasure(
        "first_margin",
        "$σ₁ (q·u₁)(v₁·x_s)$ - mean $σ₁ (q·u₁)(v₁·x_j)$",
        "what the largest singular value of $W_QK$ makes of it before queries and keys are rotated "
        "(eqs 5, 6)",
    ),
)


# The result: a few dozen numbers per head and input; attention and values are not kept.

SINK_HEAD = 0.5  # a sink head has a sink event on at least this share of the inputs


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SinkMechanisms(Study):
    """The strongest sink of every head (L, H) on every input (I), for K kinds of token."""

    FIGURE, PAGE = "figures:sink_token_figure", "page:write_mechanisms_page"
    TABLES: ClassVar = {
        **{f"{name}.csv": attrgetter(name) for name in ("events", "heads", "layers")},
        "causal.csv": attrgetter("causal"),
        "sinks.npz": lambda sinks: sinks.arrays(),
    }

    inputs: SinkInputs
    layer_indices: np.ndarray  # (L,)
    # (I, L, H) each, of the sink
    position: np.ndarray  # place among the tokens
    kind: np.ndarray  # index into `kinds`
    strength: np.ndarray  # alpha_s, share of the attention of the average query (eq. 2)
    epsilon: np.ndarray  # least epsilon for which it is an epsilon-sink (Definition 1)
    share: np.ndarray  # share of the queries that give it half of their attention or more
    ratio: np.ndarray  # value norm over the mean of the others'
    rank: np.ndarray  # stable rank of the head's update A u
    # norm in the stream that enters the layer over the mean of the others': a massive activation
    # where it is large; a norm before W_QK keeps it from the scores
    norm_ratio: np.ndarray
    inflow: np.ndarray  # (I, L, H, K) share of the attention that each kind of token gets
    # (I, L) each, before and after the layer's attention output is added
    between_before: np.ndarray  # mean cosine of two tokens
    between_after: np.ndarray
    through: np.ndarray  # mean cosine of a token with itself across the addition
    variance_before: np.ndarray  # mean squared distance from the mean token (Lemma 4, eq. 17)
    variance_after: np.ndarray
    # (I, L, K) each, over tokens of a kind as they enter the layer; NaN where there are none
    norm_mean: np.ndarray
    norm_largest: np.ndarray
    # (L, H, r), at distance 0 under rotation; zeros beyond shorter spectra
    qk_singular_values: np.ndarray
    measures: Mapping[str, np.ndarray]  # (I, L, H) by the names of `MEASURES`
    causal: Table | None = None  # perplexity with sink heads changed, if it was measured

    @property
    def lead(self) -> str:
        """The result in a few sentences, and the inputs."""
        return " ".join([*self.sentences, self.inputs.note])

    @property
    def sentences(self) -> list[str]:
        """Sentences on the numbers of sink events and sink heads, and on the sinks' tokens."""
        n_inputs, n_layers, n_heads = self.event.shape
        events = int(self.event.sum())
        did = ""
        if events:
            counts = {name: (self.mechanism == name).sum() for name in MECHANISMS}
            by_mechanism = [f"{n:,} {MECHANISM_NAMES[name]}" for name, n in counts.items()]
            did = f"; {', '.join(by_mechanism)}"
        third = max(1, n_layers // 3)
        most = []
        for name, kind in (("first", self.kind[:, :third]), ("last", self.kind[:, -third:])):
            share = np.bincount(kind.ravel(), minlength=len(self.kinds)) / kind.size
            most.append(
                f"{self.kinds[share.argmax()]!r} in the {name} third of the layers "
                f"({share.max():.0%})"
            )
        return [
            f"{counted(n_inputs, 'input')}, {counted(n_layers, 'layer')} of "
            f"{counted(n_heads, 'head')}: {counted(events, 'sink event')} in {self.event.size:,} "
            f"({self.event.mean():.2%}){did}.",
            f"{self.sink_heads.sum()} of {n_layers * n_heads} heads are sink heads "
            f"(an event on {SINK_HEAD:.0%} of the inputs or more).",
            f"The strongest key of a head is most often of the kind {', and '.join(most)}.",
        ]

    @property
    def about(self) -> str:
        inputs, layers, heads = self.event.shape
        return f"{self.model}: {layers} layers of {heads} heads, {inputs} inputs"

    def printed(self) -> list[str]:
        """The inputs, then the result in sentences."""
        return [self.inputs.note, *self.sentences]

    def shown(self) -> list[Table]:
        """Sinks by layer, and the changes of sink heads if they were made."""
        return [self.layers] if self.causal is None else [self.layers, self.causal]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds of token."""
        return self.inputs.tokens.names

    @cached_property
    def event(self) -> np.ndarray:
        """Mask of sink events, (I, L, H): 90 % of queries give the sink half of their attention."""
        return self.share >= EVENT_SHARE

    @cached_property
    def mechanism(self) -> np.ndarray:
        """Mechanism of the sink of each event, (I, L, H) str; empty where there is no event."""
        return np.where(self.event, mechanism(self.ratio, self.rank), "")

    @cached_property
    def sink_heads(self) -> np.ndarray:
        """Heads with a sink event on half of the inputs or more, (L, H) bool."""
        return self.event.mean(axis=0) >= SINK_HEAD

    @cached_property
    def labels(self) -> np.ndarray:
        """The sink's token in words, (I, L, H) str objects."""
        labels = np.empty(self.position.shape, object)
        for index, sequence in enumerate(self.inputs.sequences.values()):
            for place in np.ndindex(labels.shape[1:]):
                position = int(self.position[index, *place])
                labels[index, *place] = self.inputs.tokens.label(sequence, position)
        return labels

    @cached_property
    def events(self) -> Table:
        """One row per input, layer and head, with or without a sink event."""
        sequence, layer, head = np.indices(self.position.shape)  # (I, L, H) each
        columns = {
            "input": np.array(list(self.inputs.sequences))[sequence],
            "layer": self.layer_indices[layer],
            "head": head,
            "position": self.position,
            "token": self.labels,
            "kind": np.array(self.kinds)[self.kind],
            "strength": self.strength,
            "epsilon": self.epsilon,
            "event_share": self.share,
            "ratio_out": self.ratio,
            "stable_rank": self.rank,
            "norm_ratio": self.norm_ratio,
            "mechanism": self.mechanism,
        }
        of_measures = {name: array.ravel() for name, array in self.measures.items()}
        named = [Column(name, values.ravel()) for name, values in columns.items()]
        return Table([*named, *_measure_columns(of_measures)])

    @cached_property
    def heads(self) -> Table:
        """One row per head; medians over the inputs with an event, or over all if there is none."""
        layer, head = (index.ravel() for index in np.indices(self.sink_heads.shape))
        is_kind = np.stack([self.kind == kind for kind in range(len(self.kinds))])
        kind_shares = is_kind.mean(axis=1)  # (K, L, H)
        mostly_at = np.array(self.kinds)[kind_shares.argmax(axis=0).ravel()]
        does = np.stack([self.mechanism == name for name in MECHANISMS]).mean(axis=1)  # (3, L, H)
        mostly = np.where(self.sink_heads, np.array(MECHANISMS)[does.argmax(axis=0)], "")
        chosen = self.event | ~self.event.any(axis=0)  # (I, L, H)
        half = "mean share of the queries that give the sink half of their attention or more"
        frequent = "the sink head's most frequent mechanism; empty for other heads"
        of_mechanism = "share of the inputs with an event of this mechanism"
        qk_rank = stable_rank(self.qk_singular_values).ravel()

        def median(values: np.ndarray) -> list[float]:
            return [
                float(np.median(values[:, i, h][chosen[:, i, h]]))
                for i, h in zip(layer, head, strict=True)
            ]

        return Table(
            [
                Column("layer", self.layer_indices[layer]),
                Column("head", head),
                Column(
                    "strength",
                    self.strength.mean(axis=0).ravel(),
                    meaning="mean of $alpha_s$ (eq. 2)",
                ),
                Column(
                    "epsilon",
                    np.median(self.epsilon, axis=0).ravel(),
                    meaning="median of the smallest epsilon",
                ),
                Column("event_share", self.share.mean(axis=0).ravel(), meaning=half),
                Column(
                    "events",
                    self.event.mean(axis=0).ravel(),
                    meaning="share of the inputs with a sink event",
                ),
                Column(
                    "kind",
                    mostly_at,
                    "sink",
                    meaning="the kind of token that is most often its sink",
                ),
                Column(
                    "kind_share",
                    kind_shares.max(axis=0).ravel(),
                    meaning="share of the inputs with a sink of that kind",
                ),
                Column("ratio_out", median(self.ratio), "ratio", meaning="$|u_s|$ / mean $|u_j|$"),
                Column("stable_rank", median(self.rank), "stable rank", meaning="of $A u$"),
                Column("norm_ratio", median(self.norm_ratio), meaning="$|x_s|$ / mean $|x_j|$"),
                *(
                    Column(name, values.ravel(), meaning=of_mechanism)
                    for name, values in zip(MECHANISMS, does, strict=True)
                ),
                Column("mechanism", mostly.ravel(), meaning=frequent),
                Column(
                    "qk_gap", spectral_gap(self.qk_singular_values).ravel(), "$σ₁/σ₂$ of $W_QK$"
                ),
                Column("qk_stable_rank", qk_rank, "stable rank of $W_QK$"),
                *self._epsilon_sinks(inputs=0),
                *_measure_columns({name: median(array) for name, array in self.measures.items()}),
            ]
        )

    @cached_property
    def layers(self) -> Table:
        """One row per layer; similarities, variances and norms are medians over inputs."""
        kinds, kind_shares, tokens, token_shares = [], [], [], []
        total = self.kind[:, 0].size
        for layer in range(len(self.layer_indices)):
            counts = np.bincount(self.kind[:, layer].ravel(), minlength=len(self.kinds))
            kinds.append(self.kinds[counts.argmax()])
            kind_shares.append(counts.max() / total)
            labels = Counter(self.labels[:, layer].ravel().tolist())
            token, count = labels.most_common(1)[0]
            tokens.append(token)
            token_shares.append(count / total)
        around = ("between_before", "between_after", "through", "variance_before", "variance_after")
        return Table(
            [
                Column("layer", self.layer_indices),
                Column("kind", kinds, "sink"),
                Column("kind_share", kind_shares, "its share"),
                Column("token", tokens),
                Column("token_share", token_shares, "the token's share"),
                Column(
                    "events",
                    self.event.mean(axis=(0, 2)),
                    meaning="share of inputs and heads with a sink event",
                ),
                *(Column(name, np.median(getattr(self, name), axis=0)) for name in around),
                *self._epsilon_sinks(inputs=(0, 2)),
                *self._norms_of_kinds(),
            ]
        )

    def _epsilon_sinks(self, inputs: int | tuple[int, ...]) -> list[Column]:
        """Share along axes `inputs` whose strongest key is an epsilon-sink (Definition 1)."""
        columns = []
        for e in EPSILONS:
            share = (self.epsilon <= e).mean(axis=inputs).ravel()
            meaning = (
                f"share in which every query gives the strongest key 1 - {e:g} of its attention or "
                "more (Definition 1)"
            )
            columns.append(Column(f"sink_at_{e:g}", share, f"{e:g}-sinks", meaning=meaning))
        return columns

    def _norms_of_kinds(self) -> list[Column]:
        """Median norms of every kind of token entering the layers (Fig. 14); NaN without any."""
        columns = []
        for kind, name in enumerate(self.kinds):
            some = ~np.isnan(self.norm_mean[:, 0, kind])  # inputs with tokens of this kind
            for statistic in ("mean", "largest"):
                values = np.full(len(self.layer_indices), np.nan)
                if some.any():
                    norms = getattr(self, f"norm_{statistic}")[some][..., kind]  # (inputs, L)
                    values = np.median(norms, axis=0)
                symbol = f"{statistic} $|x|$, {plain(name)}"
                column = f"norm_{statistic}_{name}"
                columns.append(Column(column, values, symbol, meaning="of an input's tokens"))
        return columns

    def arrays(self) -> dict[str, np.ndarray]:
        """The content of sinks.npz."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        arrays = {
            name: value
            for name, value in values.items()
            if isinstance(value, np.ndarray) and name != "layer_indices"
        }
        about = {"layers": self.layer_indices, "kinds": np.array(self.kinds)}
        return about | arrays | dict(self.measures)


def _measure_columns(values: Mapping[str, Any]) -> list[Column]:
    """A column for each of `MEASURES`."""
    return [
        Column(name, values[name], symbol, meaning=meaning) for name, symbol, meaning in MEASURES
    ]


# Measured while the model runs


def own_coordinates(layer: Layer) -> Layer:
    """A layer whose values are u_j in an orthonormal basis of each head's output space.

    W_O' = Q R, so u = v W_O = v R' Q', and v R' has the lengths and angles of u: r numbers in place
    of d.
    """
    w_o = np.asarray(layer.w_o)  # (H, r, d)
    return replace(layer, w_o=output_triangles(w_o).astype(w_o.dtype))  # (H, r, r)


def sink_mechanisms(runner: Runner, inputs: SinkInputs) -> SinkMechanisms:
    """Run a model and measure what the strongest sink of each head does on each input."""
    for name, sequence in inputs.sequences.items():
        if sequence.ndim == 1 and len(sequence) < 2:
            problem = f"{name} has one token; sinks need several"
            raise CheckpointError(problem, file=runner.model.name)
    layers = list(runner.layers.values())
    observer = SinkObserver(layers, inputs)
    runner.observe(list(inputs.sequences.values()), observer)
    r = max(layer.q.of(0)[0].shape[-1] for layer in layers)
    spectra = np.zeros((len(layers), layers[0].n_heads, r))
    for place, layer in enumerate(bar(layers, "spectra", "layer")):
        values = measure_layer(layer, {})["qk_singular_values"]
        spectra[place, :, : values.shape[-1]] = values
    return SinkMechanisms.of(runner, **observer.measured(), qk_singular_values=spectra)


class SinkObserver:
    """An observer that keeps a few numbers per head and input, for the layers given."""

    def __init__(self, layers: Sequence[Layer], inputs: SinkInputs) -> None:
        self.inputs, self.sequences = inputs, list(inputs.sequences.values())
        self.place = {layer.index: place for place, layer in enumerate(layers)}
        self.reduced = {}
        for layer in bar(layers, "lengths after W_O", "layer"):
            self.reduced[layer.index] = own_coordinates(layer)
        self.pairs = {}
        for layer in bar(layers, "first directions", "layer"):
            self.pairs[layer.index] = first_pairs(layer)
        # By the names of `SinkMechanisms` and of its measures
        self.arrays: dict[str, np.ndarray] = {}

    def __call__(self, seen: Activations) -> None:
        where = (seen.inputs, self.place[seen.layer.index])
        b, n, d = seen.x.shape
        updates = self.reduced[seen.layer.index].values(seen.x.reshape(b * n, d))  # (H, b n, r)
        updates = updates.reshape(len(updates), b, n, -1).swapaxes(0, 1)  # (b, H, n, r)
        attention = seen.attention  # (b, H, n, n)
        strength = sink_strength(attention)  # (b, H, n)
        position = strength.argmax(axis=-1)  # (b, H)
        by_input = [self.inputs.tokens.kinds(self.sequences[index], n) for index in seen.inputs]
        kinds = np.stack(by_input)  # (b, n)
        of_kind = np.eye(len(self.inputs.tokens.names), dtype=bool)[kinds]  # (b, n, K)
        length = np.where(of_kind, norms(seen.x)[..., None], 0.0)  # (b, n, K)
        count = of_kind.sum(axis=1)  # (b, K)
        after = seen.x + seen.output
        before = token_variance(seen.x)  # (b,)
        rank, lemma_3 = rank_measures(attention, updates, position)
        measured = {
            "position": position,
            "kind": np.take_along_axis(kinds, position, axis=-1),
            "strength": strength.max(axis=-1),
            "epsilon": least_epsilon(attention, position),
            "share": event_share(attention, position),
            "ratio": value_norm_ratio(updates, position),
            "rank": rank,
            "norm_ratio": value_norm_ratio(seen.x[:, None], position),  # the norms of (b, 1, n, d)
            "inflow": strength @ of_kind.astype(float),  # (b, H, n) @ (b, n, K)
            "between_before": similarity_between_tokens(seen.x),
            "between_after": similarity_between_tokens(after),
            "through": similarity_through(seen.x, after),
            "variance_before": before,
            "variance_after": token_variance(after),
            "norm_mean": np.where(count > 0, length.sum(axis=1) / np.maximum(count, 1), np.nan),
            "norm_largest": np.where(count > 0, length.max(axis=1), np.nan),
            **lemma_3,
            **variance_measures(seen, updates, position, before),
            **routing_measures(seen, self.pairs[seen.layer.index], position),
        }
        for name, values in measured.items():
            kind = np.int32 if values.dtype.kind == "i" else np.float64
            size = (len(self.sequences), len(self.place), *values.shape[1:])
            self.arrays.setdefault(name, np.zeros(size, kind))[where] = values

    def measured(self) -> dict[str, Any]:
        """The fields of `SinkMechanisms` that were measured."""
        measures = {measure.name: self.arrays[measure.name] for measure in MEASURES}
        arrays = {name: array for name, array in self.arrays.items() if name not in measures}
        return {
            "inputs": self.inputs,
            "layer_indices": np.array(list(self.place)),
            **arrays,
            "measures": measures,
        }


class FirstPair(NamedTuple):
    """The largest singular value of each head's W_QK = sum_k sigma_k u_k v_k', and its vectors."""

    sigma: np.ndarray  # (H,)
    query: np.ndarray  # (H, d) u_1, the direction of queries
    key: np.ndarray  # (H, d) v_1, the direction of keys


def first_pairs(layer: Layer) -> FirstPair:
    """sigma_1, u_1 and v_1 of every head."""
    left, sigmas, right = zip(*(head.qk.leading(1) for head in layer.heads), strict=True)
    largest = np.array([s[0] for s in sigmas])
    return FirstPair(largest, np.stack(left)[..., 0], np.stack(right)[..., 0])


def rank_measures(
    attention: np.ndarray, updates: np.ndarray, sink: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Stable rank of Y = A u, and Lemma 3, (b, H) each: over |Y|, or over sigma_1(Y)."""
    singular, first = first_direction(attention @ updates)
    written = np.sqrt(np.square(singular).sum(axis=-1))
    fit = rank_one(attention, updates, sink)
    largest = singular[..., 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        return stable_rank(singular), {
            "written": written,
            "distance": fit.distance / written,
            "bound": fit.bound / written,
            "residual": fit.residual / written,
            "residual_bound": fit.residual_bound / written,
            "leading": fit.leading / largest,
            "leading_bound": fit.leading_bound / largest,
            "along": cosine(first, sink_row(updates, sink)),
            "cancelled": fit.cancelled,
        }


def variance_measures(
    seen: Activations, updates: np.ndarray, sink: np.ndarray, before: np.ndarray
) -> dict[str, np.ndarray]:
    """Lemma 4 for each head alone over V, and the sink's update against the stream: (b, H) each.

    V is the variance of the tokens before attention. V' = V + Var(Y) + 2 Cov(x, Y), and with
    y = o W_O the covariance equals Cov(x W_O', o): r coordinates a head.
    """
    layer, (b, n, d) = seen.layer, seen.x.shape
    v = layer.inner_values(seen.x.reshape(b * n, d))  # (G, b n, r_v)
    v = np.repeat(v.reshape(len(v), b, n, -1), layer.n_heads // len(v), axis=0)
    v = v.swapaxes(0, 1)  # (b, H, n, r_v)
    gathered = seen.attention @ v  # (b, H, n, r_v)
    w_o = np.asarray(layer.w_o)
    along = centred(seen.x).astype(seen.x.dtype)[:, None] @ w_o.swapaxes(1, 2)  # (b, H, n, r_v)
    covariance = (along * centred(gathered)).sum(axis=-1).mean(axis=-1)
    written_by_sink = (sink_row(v, sink)[:, :, None] @ w_o)[:, :, 0]  # (b, H, d)
    of_written = token_variance(seen.attention @ updates)
    variance = before[:, None]
    bound = variance_bound(variance, seen.attention, updates, sink)
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "variance_change": (of_written + 2 * covariance) / variance,
            "variance_sink": variance_of_weights(seen.attention, updates, sink) / variance,
            "variance_bound": bound / variance,
            "against_stream": against_stream(seen.x[:, None], written_by_sink),
            "update_spread": relative_spread(gathered),
        }


def routing_measures(
    seen: Activations, first: FirstPair, sink: np.ndarray
) -> dict[str, np.ndarray]:
    """Lengths and angles by which queries find the sink, and Lemma 2's first way, (b, H) each."""
    layer, (b, n, d) = seen.layer, seen.x.shape
    x = seen.x.reshape(b * n, d)

    def by_head(made: np.ndarray) -> np.ndarray:  # (heads, b n, ...) -> (b, H, n, ...)
        made = made.reshape(len(made), b, n, *made.shape[2:]).swapaxes(0, 1)
        return np.repeat(made, layer.n_heads // made.shape[1], axis=1)

    read = layer.normalised(x)
    if layer.norm is not None and layer.norm.centred:
        read = read - read.mean(axis=-1, keepdims=True)
    tokens = read.reshape(b, n, d)
    sink_alignment, other_alignment = alignment(tokens, first.key, sink)
    q, k = layer.queries(x), layer.keys(x)
    placed = (q, k) if seen.tokens is None else layer.placed(q, k, np.tile(np.arange(n), b))
    visible = seen.attention > 0
    unit_q, unit_k = (unit_vectors(by_head(vectors)) for vectors in placed)
    cosines = unit_q @ unit_k.swapaxes(-1, -2)  # (b, H, n, n)
    of_queries, of_keys = map(by_head, layer.scalars(x))  # (b, H, n) norms inside attention
    from_queries = (tokens @ first.query.T).swapaxes(-1, -2) * of_queries  # (b, H, n) q u_1
    to_keys = (tokens @ first.key.T).swapaxes(-1, -2) * of_keys
    scaled = (layer.scale * first.sigma)[:, None, None]
    product = scaled * from_queries[..., None] * to_keys[..., None, :]  # (b, H, n, n)
    with np.errstate(divide="ignore"):
        logits = np.where(visible, np.log(seen.attention), 0.0)  # up to a constant of the query
    to_sink, to_others = of_sink_and_others(cosines, visible, sink)
    normed = x if layer.norm is None else layer.norm(x)
    return {
        "key_ratio": value_norm_ratio(by_head(k), sink),
        "query_similarity": similarity_between_tokens(by_head(q)),
        "alignment": sink_alignment,
        "alignment_others": other_alignment,
        "read_ratio": value_norm_ratio(normed.reshape(b, 1, n, d), sink),
        "query_key": to_sink,
        "query_key_others": to_others,
        "logit_margin": np.subtract(*of_sink_and_others(logits, visible, sink)),
        "first_margin": np.subtract(*of_sink_and_others(product, visible, sink)),
    }
