"""Outlier dimensions and attention, measured (outlier-dimensions paper): means of the stream, of attention and of C."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightscope.attention.layer import Layer
from weightscope.device import namespace
from weightscope.errors import CheckpointError
from weightscope.metrics.by_kind import MeanByKind, counts_by_kind
from weightscope.metrics.outliers import dimension_z, outlier_dimensions
from weightscope.outlier_dimensions.contributions import asked_of_keys, contributions_by_kind
from weightscope.runner.runner import Activations, Runner
from weightscope.text.kinds import TokenKinds


def over_all(means: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Means by kind (..., n_kinds) and how many tokens each kind has -> the mean over all tokens, (...)."""
    return np.nansum(means * counts, axis=-1) / counts.sum()


@dataclass(frozen=True)
class Stream:
    """Means over tokens of the residual stream and of the attention that tokens receive, by their kind.

    A kind without tokens has NaN.

    Attributes
    ----------
    kinds : tuple of str
    counts : (n_kinds,) int array
        Tokens.
    layers : (L,) int array
        Attention layers.
    hidden : (L + 1, d, n_kinds) array
        The stream that enters each of them, the output of the layer before it; then the last layer's output, before
        any norm that is no part of a layer.
    attention : (L, H, n_kinds) array
        alpha from a mean query, of those that may attend to the token.
    """

    kinds: tuple[str, ...]
    counts: np.ndarray
    layers: np.ndarray
    hidden: np.ndarray
    attention: np.ndarray

    @property
    def means(self) -> np.ndarray:
        """Fig. 1: mean over all tokens of every dimension, (L + 1, d)."""
        return over_all(self.hidden, self.counts)

    @property
    def z(self) -> np.ndarray:
        """How far means stand out among a layer's dimensions, (L + 1, d, 1 + n_kinds); see `dimension_z`.

        Of the mean over all tokens first, then over those of each kind.
        """
        scopes = (self.means, *np.moveaxis(self.hidden, -1, 0))
        return np.stack([dimension_z(means) for means in scopes], axis=-1)

    @property
    def outliers(self) -> np.ndarray:
        """Dimensions that stand out in some layer's output, over all tokens or over those of a kind; farthest first.

        A mean over all tokens alone would hide a dimension that is large on one token of a sentence, as on [CLS].
        """
        z = self.z
        return outlier_dimensions(np.moveaxis(z, 1, -1).reshape(-1, z.shape[1]))


@dataclass(frozen=True)
class Contributions:
    """Means of C (eq. 7) of every layer, head and dimension by the kind of the key, from a mean query each.

    Without 1/sqrt(d'), as in the paper.

    Attributes
    ----------
    kinds : tuple of str
    counts : (n_kinds,) int array
        Keys.
    layers : (L,) int array
    by_kind : (L, H, d, n_kinds) array
        NaN for kinds without tokens.
    left_out : tuple of str
        What of the model's scores differs between keys and is no dimension's contribution.
    """

    kinds: tuple[str, ...]
    counts: np.ndarray
    layers: np.ndarray
    by_kind: np.ndarray
    left_out: tuple[str, ...]

    @property
    def overall(self) -> np.ndarray:
        """The mean over all keys, (L, H, d): Figs 4 and 5."""
        return over_all(self.by_kind, self.counts)

    @property
    def sizes(self) -> np.ndarray:
        """Mean over heads of |C|, (L, d)."""
        return np.abs(self.overall).mean(axis=1)


def score_gaps(found: Contributions) -> np.ndarray:
    """What each dimension adds to how much higher keys of a kind score than those of the last kind.

    C adds up to the score without its terms constant in the key, so a difference of sums of C is one of scores.

    Returns
    -------
    (L, n_kinds - 1, d) array
        Means over heads, before 1/sqrt(d'); NaN for kinds without tokens.
    """
    gaps = (found.by_kind[..., :-1] - found.by_kind[..., -1:]).mean(axis=1)  # (L, d, n_kinds - 1)
    return np.moveaxis(gaps, -1, 1)


def observe_stream(runner: Runner, sequences: Sequence[np.ndarray], kinds: TokenKinds) -> Stream:
    """Figs 1 to 3: run the model and average its stream and its attention.

    Parameters
    ----------
    runner : Runner
    sequences : sequence of (n,) int arrays
    kinds : TokenKinds

    Raises
    ------
    CheckpointError
        A layer does not compute what its weights say.
    """
    layers, n_kinds = list(runner.layers), len(kinds.names)
    d = runner.model.config.d_model
    hidden = [MeanByKind((d,), n_kinds) for _ in range(len(layers) + 1)]
    attention = {index: MeanByKind((layer.n_heads,), n_kinds) for index, layer in runner.layers.items()}
    latest: list[Activations] = []

    def see(seen: Activations) -> None:
        latest[:] = [seen]
        of_tokens = _kinds_of(seen, kinds)
        hidden[layers.index(seen.layer.index)].add(seen.x.transpose(0, 2, 1), of_tokens)
        received = seen.attention.sum(axis=-2) / np.maximum(who_sees(seen.attention).sum(axis=0), 1)  # (b, H, n)
        attention[seen.layer.index].add(received, of_tokens)

    def leave(returned: tuple[Any, ...]) -> None:
        (seen,) = latest
        if seen.layer.index == layers[-1]:
            stream = next(x for x in returned if getattr(x, "shape", None) == seen.x.shape)
            hidden[-1].add(stream.cpu().numpy().transpose(0, 2, 1), _kinds_of(seen, kinds))

    with _at_the_end(runner, leave):
        runner.observe(sequences, see)
    return Stream(
        kinds.names,
        hidden[0].counts,
        np.array(layers),
        np.stack([mean.mean for mean in hidden]),
        np.stack([mean.mean for mean in attention.values()]),
    )


def observe_contributions(runner: Runner, sequences: Sequence[np.ndarray], kinds: TokenKinds) -> Contributions:
    """Figs 4 and 5 and Table 1: run the model and average C.

    Parameters
    ----------
    runner : Runner
    sequences : sequence of (n,) int arrays
    kinds : TokenKinds

    Raises
    ------
    CheckpointError
        A layer does not compute what its weights say.
    """
    n_kinds, d = len(kinds.names), runner.model.config.d_model
    sums = {index: np.zeros((n_kinds, layer.n_heads, d)) for index, layer in runner.layers.items()}
    counts = counts_by_kind(kinds(np.concatenate(sequences)), n_kinds)
    device = runner.device
    there = {index: (layer.on(device), device.put(keys_of(layer))) for index, layer in runner.layers.items()}

    def see(seen: Activations) -> None:
        layer, w_k = there[seen.layer.index]
        keys, asked = factors(layer, device.put(seen.x), who_sees(seen.attention))
        of_keys = _kinds_of(seen, kinds).ravel()
        sums[seen.layer.index] += device.get(contributions_by_kind(keys, asked, w_k, of_keys, n_kinds))

    runner.observe(sequences, see)
    with np.errstate(invalid="ignore"):
        by_kind = np.stack([np.moveaxis(of_layer, 0, -1) / counts for of_layer in sums.values()])
    left_out = dict.fromkeys(reason for layer in runner.layers.values() for reason in _left_out(layer))
    return Contributions(kinds.names, counts, np.array(list(sums)), by_kind, (*left_out, *runner.model.family.caveats))


def keys_of(layer: Layer) -> np.ndarray:
    """W_K of every key-value head, (G, d, r)."""
    return np.stack([layer.k.of(group)[0] for group in range(layer.n_kv_heads)])


def factors(layer: Layer, x: Any, sees: np.ndarray) -> tuple[Any, Any]:
    """What C is made of in one layer beside W_K: keys, and the mean query that each of them meets.

    Exact under rotation and under norms of queries and keys, whose per-token scalars go to the queries' side.

    Parameters
    ----------
    layer : Layer
        On whatever device.
    x : (b, n, d) array, there
        The stream that enters it, of sequences of one length.
    sees : (n, n) bool array, on this machine
        Whether query m may attend to key n.

    Returns
    -------
    (b n, d), (H, b n, r) arrays
    """
    (b, n, d), xp = x.shape, namespace(x)
    flat = xp.reshape(x, (b * n, d))
    queries = layer.queries(flat)  # (H, b n, r)
    r = queries.shape[-1]
    asked = asked_of_keys(xp.reshape(queries, (-1, b, n, r)), sees, layer.rotation)
    asked = xp.reshape(asked, (-1, b * n, r))
    if layer.k_rms is not None:
        of_keys = xp.repeat(layer.scalars(flat)[1], layer.n_heads // layer.n_kv_heads, axis=0)  # (H, b n)
        asked[..., : layer.k_rms.dims] *= of_keys[..., None]
    return layer.normalised(flat), asked


def who_sees(attention: np.ndarray) -> np.ndarray:
    """(b, H, n, n) attention -> (n, n) bool: pairs of query and key to which some head gives weight.

    A mask leaves exact zeros in every head and sequence.
    """
    return np.asarray(attention.any(axis=(0, 1)))


def _left_out(layer: Layer) -> Iterator[str]:
    biased = any(layer.k.of(group)[1].any() for group in range(layer.n_kv_heads)) or layer.k_shift is not None
    if biased and (layer.rotation is not None or layer.k_rms is not None):
        yield "the keys' bias, which rotation or the norm of keys makes depend on the key"
    if layer.additive is not None:
        yield "the terms by distance that are added to scores"
    if layer.softcap is not None:
        yield "the softcap: C adds up to scores before it"
    if layer.clip is not None:
        yield "the clipping of keys"


def _kinds_of(seen: Activations, kinds: TokenKinds) -> np.ndarray:
    if seen.tokens is None:
        raise CheckpointError("kinds of token need text; these are images")
    return kinds(seen.tokens)


@contextmanager
def _at_the_end(runner: Runner, leave: Callable[[tuple[Any, ...]], None]) -> Iterator[None]:
    """Hand over what the last block returns, each time it is called."""

    def hook(block: Any, args: Any, returned: Any) -> None:
        leave(returned if isinstance(returned, tuple) else (returned,))

    handle = runner.blocks[-1].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
