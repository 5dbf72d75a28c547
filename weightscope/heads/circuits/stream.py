"""The residual stream of random tokens where attention to far places is averaged.

Random tokens of the vocabulary follow each other, and then the same tokens again: in one sequence
mostly frequent ones, as in text, in the other any. Every token passes through norms, feed-forward
networks and attention. Heads bring it what neighbouring tokens and the first token hold, and the
average over all others, so later layers do not know what a head found elsewhere. This is an
approximate pass through the model. Tokens without any context do worse: deep layers treat each of
them as the first of a text. Attention windows are assumed to be wider than the sequences.

Heads of families without an `mlp` cell are named by their wiring alone: mixtures of experts, and
those that scale what joins the stream (Granite).
"""

from collections.abc import Callable, Iterator

import numpy as np

from weightscope.core.errors import CheckpointError
from weightscope.core.results import ShowsShapes, holds_arrays
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.maps import Norm
from weightscope.model.model import Model
from weightscope.model.rows.cells import FeedForward, StoredNorm


def _gelu(x: np.ndarray) -> np.ndarray:
    from scipy.special import erf

    return 0.5 * x * (1 + erf(x / np.sqrt(2)))


def _gelu_new(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x * x * x)))


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-np.clip(x, -80, None)))


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": _silu,
    "swish": _silu,
    "gelu": _gelu,
    "gelu_new": _gelu_new,
    "gelu_pytorch_tanh": _gelu_new,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "leaky_relu": lambda x: np.where(x > 0, x, x * np.float32(0.01)),
    "leaky_relu2": lambda x: np.where(x > 0, x, x * np.float32(0.01)) * np.abs(x),
}


FREQUENT, ANY = 0, 1  # places of the two sequences
N_TOKENS = 48  # tokens in each sequence, drawn at random, and said twice
# Vocabularies are roughly in the order of frequency: by Zipf's law with Mandelbrot's shift, a token
# occurs in text in proportion to 1 / (its id + the shift). Among 3, 30, 100, 200, 300, 500 ...
# 5000, this shift fits the tokenizers of six models best together, on the public-domain works that
# come with weightscope, by 0.8 to 2.5 nats per token better than equal frequencies. It was not
# chosen by how well heads are named.
ZIPF_SHIFT = 200
FEWEST_TOKENS = 4


@holds_arrays
class Stream(ShowsShapes):
    """Input of one layer and its attention, for 2 sequences of a first token and N others twice."""

    layer: Layer
    x: np.ndarray  # (2, n, d), n = 1 + 2 N; the first token is exact in a causal model
    attention: np.ndarray  # (2, H, n, n)

    @property
    def first_time(self) -> np.ndarray:
        """The frequent tokens where they are said first, (N, d)."""
        return self.x[FREQUENT, 1 : 1 + self.x.shape[1] // 2]


def why_no_stream(model: Model) -> str | None:
    """Reason why a checkpoint has no streams, or None."""
    row = model.family.mlp
    if row is None or not row.known:
        name = model.family.name
        return f"the place of the feed-forward network in {name} models is not known here"
    try:
        _ = model.embeddings, model.positions
    except CheckpointError as error:
        return str(error)
    inner = model.under(_layer_name(model, 0))
    for module in filter(None, (row.up, row.down, row.gate)):
        if module + ".weight" not in inner:
            return f"no {module} in this checkpoint"
    return None


def sample_tokens(model: Model, n: int, p: np.ndarray | None = None) -> np.ndarray:
    """`n` different tokens of the vocabulary, always the same; with probabilities p if given."""
    rows = model.embeddings.n_tokens
    return np.random.default_rng(0).choice(rows, min(n, rows), replace=False, p=p)


def frequencies(n_tokens: int) -> np.ndarray:
    """Estimated frequency of each token in text, by its id alone: (V,)."""
    p = 1 / (np.arange(n_tokens) + ZIPF_SHIFT)
    return np.asarray(p / p.sum())


def said_once(model: Model) -> np.ndarray:
    """The tokens of both sequences, (2, N); N is less if the model has few tokens or positions.

    Raises
    ------
    CheckpointError
        There are too few.
    """
    positions = model.embeddings.positions
    most = N_TOKENS if positions is None else min(N_TOKENS, (len(positions) - 1) // 2)
    if min(most, model.embeddings.n_tokens) < FEWEST_TOKENS:
        raise CheckpointError("has too few tokens or positions to follow", file=model.config.file)
    frequent = sample_tokens(model, most, frequencies(model.embeddings.n_tokens))
    return np.stack([frequent, sample_tokens(model, most)])


def streams(model: Model) -> Iterator[Stream]:
    """The stream that enters each layer, from the first attention layer to the last."""
    row = model.family.mlp
    assert row is not None  # `why_no_stream` has said so
    x = _inputs(model, sequences(model))
    last = max(model.attention_layers)
    for index in range(last + 1):
        attended = np.zeros_like(x)
        if index in model.attention_layers:
            layer = model.layer(index)
            attention = np.stack([attend(layer, sequence, causal=row.causal) for sequence in x])
            yield Stream(layer, x, attention)
            pairs = zip(attention, x, strict=True)
            attended = np.stack([layer.output(averaged(a), sequence) for a, sequence in pairs])
        if index < last:
            x = rest_of_layer(model, row, index, x, attended)


def frequent_inputs(model: Model) -> dict[int, np.ndarray]:
    """Inputs (n, d) of attention layers on frequent tokens; empty if they cannot be followed."""
    if why_no_stream(model) is not None:
        return {}
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # seen below
            inputs = {stream.layer.index: stream.x[FREQUENT, 1:] for stream in streams(model)}
    except CheckpointError:  # a later layer cannot be followed
        return {}
    return inputs if all(np.isfinite(x).all() for x in inputs.values()) else {}


def attend(
    layer: Layer,
    x: np.ndarray,
    *,
    causal: bool = False,
    seen: np.ndarray | None = None,
    positions: np.ndarray | None = None,
) -> np.ndarray:
    """Attention of every head (H, n, n) for x (n, d), learned sinks included; `seen` is a mask."""
    from scipy.special import softmax  # SciPy takes a while to import

    scores = layer.scores(x, positions)
    if causal:
        seen = np.tri(len(x), dtype=bool)
    if seen is not None:
        scores = np.where(seen, scores, -np.inf)
    if layer.sinks is None:
        return softmax(scores, axis=-1)
    sinks = np.broadcast_to(layer.sinks[:, None, None], (*scores.shape[:2], 1))
    return softmax(np.concatenate([scores, sinks], axis=-1), axis=-1)[..., :-1]


def averaged(attention: np.ndarray) -> np.ndarray:
    """Attention (H, n, n) that spreads what goes to far tokens as the average token does.

    Attention to the token itself, its neighbours and the first token stays.
    """
    place = np.arange(attention.shape[-1])
    known = (np.abs(place[:, None] - place) <= 1) | (place == 0)
    rest = np.where(known, 0, attention)
    usual = rest.sum(axis=1, keepdims=True)  # (H, 1, n)
    with np.errstate(invalid="ignore"):
        usual = np.nan_to_num(usual / usual.sum(axis=-1, keepdims=True))
    return np.where(known, attention, 0) + rest.sum(axis=-1, keepdims=True) * usual


def sequences(model: Model) -> np.ndarray:
    """The tokens that are followed, (2, n)."""
    once = said_once(model)
    return np.concatenate([np.full((len(once), 1), first_token(model)), once, once], axis=1)


def _inputs(model: Model, tokens: np.ndarray) -> np.ndarray:
    """Input of the first layer, (..., n, d), for sequences of tokens (..., n)."""
    embeddings = model.embeddings
    x = embeddings.rows(tokens)
    if embeddings.positions is not None:
        x = x + embeddings.positions[: tokens.shape[-1]]
    norm = model.stream_norm(0)
    if norm is not None and embeddings.norm is None:
        x = norm(x)
    return model.ends.into_stream(x).astype(np.float32)


def first_token(model: Model) -> int:
    """The token that a text begins with, if the config names it, else any."""
    named = named_first_token(model)
    return 0 if named is None else named


def named_first_token(model: Model) -> int | None:
    """The token that a text begins with, if the config names it and the vocabulary has it."""
    _, token = _first_named(model)
    return token if token is not None and token < model.embeddings.n_tokens else None


def lacking_first_token(model: Model) -> str:
    """Complain, in words, if the vocabulary lacks the token that texts begin with; else empty."""
    key, token = _first_named(model)
    n_tokens = model.embeddings.n_tokens
    if token is None or token < n_tokens:
        return ""
    return f"{key} of config.json is {token:,}, and the vocabulary has {n_tokens:,} tokens"


def _first_named(model: Model) -> tuple[str, int | None]:
    """The key that names a text's first token, and the token."""
    for key in ("bos_token_id", "cls_token_id", "eos_token_id"):
        token = model.config.get(key)
        if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
            return key, token
    return "", None


# A few tokens pass exactly: no attention is averaged, for there is nothing far away.


@holds_arrays
class ShortTexts(ShowsShapes):
    """Input of one layer and its attention, exact, for D sequences of n random tokens."""

    layer: Layer
    x: np.ndarray  # (D, n, d)
    attention: np.ndarray  # (D, H, n, n)
    hidden: np.ndarray | None  # (D, n, width) input of `down` in the layer before, if any


def why_not_exact(model: Model, last: int) -> str | None:
    """Reason why random tokens cannot be followed exactly up to a layer, or None."""
    if (lacking := why_no_stream(model)) is not None:
        return lacking
    row, inputs = model.family.mlp, model.family.inputs
    if row is None or not row.causal:
        return "attention is not causal: the first token is like any other"
    if inputs.more:
        return f"layer 0 sees more than tokens and positions: {inputs.more}"
    if without_attention := sorted({*range(last + 1)} - {*model.attention_layers}):
        return f"layer {without_attention[0]} is not attention of one input"
    return None


def short_sequences(model: Model, n: int, draws: int) -> np.ndarray:
    """Sequences of random tokens, always the same, (2 draws, n).

    The first half begin with the token that the config names as a text's first; where it names
    none, only the other half, (draws, n).
    """
    any_first = np.random.default_rng(0).integers(model.embeddings.n_tokens, size=(draws, n))
    if (first := named_first_token(model)) is None:
        return any_first
    named_first = any_first.copy()
    named_first[:, 0] = first
    return np.concatenate([named_first, any_first])


def follow_exactly(model: Model, tokens: np.ndarray, last: int) -> Iterator[ShortTexts]:
    """The stream that enters each layer up to `last`, for tokens (D, n)."""
    row = model.family.mlp
    assert row is not None  # `why_not_exact` has said so
    draws, n = tokens.shape
    positions, text = np.tile(np.arange(n), draws), np.repeat(np.arange(draws), n)
    seen = (text[:, None] == text) & (positions[:, None] >= positions)  # (D n, D n)
    x = _inputs(model, tokens).reshape(draws * n, -1)  # all texts at once: weights are read once
    hidden = None
    for index in range(last + 1):
        layer = model.layer(index)
        if layer.relative_values is not None or layer.outer_sinks is not None:
            problem = f"layer {index} adds values of distances, or weights its output by its scores"
            raise CheckpointError(problem, file=model.checkpoint.name)
        attention = attend(layer, x, seen=seen, positions=positions)  # (H, D n, D n)
        # (D, H, n, n)
        by_text = attention.reshape(-1, draws, n, draws, n)[:, range(draws), :, range(draws)]
        yield ShortTexts(layer, x.reshape(draws, n, -1), by_text, hidden)
        if index < last:
            x, hidden = _rest_and_hidden(model, row, index, x, layer.output(attention, x))
            hidden = hidden.reshape(draws, n, -1)


def attention_norm(model: Model, index: int) -> Norm | None:
    """The norm between a layer's attention and the stream, if the checkpoint has one."""
    row, tensors = model.family.mlp, model.under(_layer_name(model, index))
    stored = None if row is None else row.attention_norm
    if stored is None or f"{stored.module}.{stored.gain}" not in tensors:
        return None
    return stored.read(tensors, model.config)


def joining(model: Model, layer: Layer, written: np.ndarray) -> np.ndarray:
    """Direction, not length, in which what heads write, (..., d), joins the stream."""
    norm = attention_norm(model, layer.index)
    return written if norm is None else written * norm.gamma


def rest_of_layer(
    model: Model, row: FeedForward, index: int, before: np.ndarray, attended: np.ndarray
) -> np.ndarray:
    """A layer's output (..., d), from its input and what its attention gives."""
    return _rest_and_hidden(model, row, index, before, attended)[0]


def activation_of(model: Model, row: FeedForward) -> str:
    """The config's name for the activation of a feed-forward network."""
    named = map(model.config.get, row.activation_keys)
    return str(next(filter(None, named), row.activation))


def _rest_and_hidden(
    model: Model, row: FeedForward, index: int, before: np.ndarray, attended: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`rest_of_layer`, and the hidden units (..., width) that the network's `down` reads."""
    tensors, d = model.under(_layer_name(model, index)), model.config.d_model

    def normed(norm: StoredNorm | None, x: np.ndarray) -> np.ndarray:
        return x if norm is None else norm.read(tensors, model.config)(x)

    x = before + normed(row.attention_norm, attended)
    act = ACTIVATIONS.get(activation_of(model, row))
    if act is None:
        raise CheckpointError("has an activation that is not known here", file=model.config.file)

    biased = model.config.get(row.bias) if isinstance(row.bias, str) else row.bias

    def mapped(module: str, x: np.ndarray, n_in: int, n_out: int) -> np.ndarray:
        shape = (n_in, n_out) if row.transposed else (n_out, n_in)
        w = tensors.read(module + ".weight", shape)
        y = x @ (w if row.transposed else w.T)
        return y + tensors.read(module + ".bias", (n_out,)) if biased else y

    x = normed(row.after_attention, x)
    z = normed(row.norm, before if model.family.parallel else x)
    down = tensors.tensor(row.down + ".weight", (None, d) if row.transposed else (d, None))
    width = down.shape[0 if row.transposed else 1]
    if row.gate == row.up:
        gate, up = np.split(mapped(row.up, z, d, 2 * width), 2, axis=-1)
        inner = act(gate) * up
    else:
        up = mapped(row.up, z, d, width)
        inner = act(mapped(row.gate, z, d, width)) * up if row.gate else act(up)
    added = mapped(row.down, inner, width, d)
    x = normed(model.family.norms.after, x + normed(row.output_norm, added))
    return x.astype(before.dtype), inner


def down_column(model: Model, index: int, dimension: int) -> np.ndarray:
    """Weights, (width,), by which hidden units of a layer's network write into one dimension."""
    row, d = model.family.mlp, model.config.d_model
    assert row is not None
    shape = (None, d) if row.transposed else (d, None)
    w = model.under(_layer_name(model, index)).read(row.down + ".weight", shape)
    return np.array(w[:, dimension] if row.transposed else w[dimension])


def _layer_name(model: Model, index: int) -> str:
    return model.family.stored_name(model.config, index)
