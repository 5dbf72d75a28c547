"""The residual stream and the attention that tokens receive, by kind of token (outlier-dimensions paper, Figs 1 to 3).

Which of the stream's dimensions stand out is judged by medians: the outliers must not set the standard themselves.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from weightscope.metrics.norms import MeanByKind
from weightscope.metrics.outliers import robust_z
from weightscope.results import ShowsShapes
from weightscope.runner.runner import Activations, Runner
from weightscope.tables import Column, Table, crossed
from weightscope.text.kinds import TokenKinds

# Robust z-score of a dimension's mean among a layer's dimensions. Normally distributed means have
# none beyond it; with tails as heavy as a Laplace distribution's, one dimension in 30,000 is.
DIMENSION_Z = 10.0


def dimension_z(means: np.ndarray) -> np.ndarray:
    """How far each dimension's mean is from the other dimensions' of the same layer, in robust standard deviations:
    means (L, d) -> (L, d)."""
    return np.stack([robust_z(row, 1e-12 * max(1e-12, float(np.abs(row).max()))) for row in means])


def outlier_dimensions(z: np.ndarray) -> np.ndarray:
    """Dimensions beyond `DIMENSION_Z` in some row, farthest out first: z (n, d)."""
    largest = np.nan_to_num(np.abs(z)).max(axis=0)  # (d,)
    order = np.argsort(-largest, kind="stable")
    return order[largest[order] > DIMENSION_Z]


def over_all(means: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Means by kind (..., K) and how many tokens each kind has -> the mean over all tokens, (...)."""
    return np.nansum(means * counts, axis=-1) / counts.sum()


@dataclass(frozen=True, eq=False, repr=False)
class Stream(ShowsShapes):
    """Means over tokens by their K kinds; NaN for a kind without tokens."""

    kind_names: tuple[str, ...]
    counts: np.ndarray  # (K,): Tokens
    layer_indices: np.ndarray  # (L,): Attention layers
    # (L + 1, d, K): The stream that enters each of them, the output of the layer before it; then the last layer's
    # output, before the final norm.
    hidden: np.ndarray
    attention: np.ndarray  # (L, H, K): alpha from the average query that may attend to the token

    @property
    def scopes(self) -> tuple[str, ...]:
        """What `means` and `z` are over: all tokens, then each kind."""
        return ("all", *self.kind_names)

    @cached_property
    def means(self) -> np.ndarray:
        """Mean of every dimension over the tokens of each scope, (L + 1, d, 1 + K) (Figs 1 and 3)."""
        return np.concatenate((over_all(self.hidden, self.counts)[..., None], self.hidden), axis=-1)

    @cached_property
    def z(self) -> np.ndarray:
        """How far these means stand out among a layer's dimensions, (L + 1, d, 1 + K); see `dimension_z`."""
        return np.stack([dimension_z(of_scope) for of_scope in np.moveaxis(self.means, -1, 0)], axis=-1)

    @cached_property
    def outliers(self) -> np.ndarray:
        """Dimensions that stand out in some layer's output, over all tokens or tokens of one kind; farthest out first.

        A mean over all tokens alone would hide a dimension that is large on one token of a sentence, as on [CLS].
        """
        return outlier_dimensions(np.moveaxis(self.z, 1, -1).reshape(-1, self.z.shape[1]))

    def table(self) -> Table:
        """Mean and robust z-score of every outlier dimension, by output and scope."""
        rows = crossed(output=range(len(self.means)), dimension=self.outliers, tokens=self.scopes)
        means, z = self.means[:, self.outliers], self.z[:, self.outliers]  # (L + 1, outliers, 1 + K)
        return Table([*rows, Column("mean", means.ravel()), Column("robust_z", z.ravel())])

    def attention_table(self) -> Table:
        """Attention to one token of each kind, the mean over heads, by layer."""
        by_kind = zip(self.kind_names, self.attention.mean(axis=1).T, strict=True)
        return Table([Column("layer", self.layer_indices), *(Column(kind, alpha) for kind, alpha in by_kind)])


def observe_stream(runner: Runner, sequences: Sequence[np.ndarray], kinds: TokenKinds) -> Stream:
    """Run a model and average its stream and its attention; see `measure_outliers`."""
    layers, n_kinds = list(runner.layers), len(kinds.names)
    hidden = [MeanByKind((runner.model.config.d_model,), n_kinds) for _ in range(len(layers) + 1)]
    attention = {index: MeanByKind((layer.n_heads,), n_kinds) for index, layer in runner.layers.items()}
    latest: list[Activations] = []

    def observe(seen: Activations) -> None:
        latest[:] = [seen]
        of_tokens = kinds(seen.tokens)
        hidden[layers.index(seen.layer.index)].add(seen.x.transpose(0, 2, 1), of_tokens)
        received = seen.attention.sum(axis=-2) / np.maximum(mask_of(seen.attention).sum(axis=0), 1)  # (b, H, n)
        attention[seen.layer.index].add(received, of_tokens)

    def observe_end(returned: tuple[Any, ...]) -> None:
        (seen,) = latest
        if seen.layer.index == layers[-1]:
            stream = next(x for x in returned if getattr(x, "shape", None) == seen.x.shape)
            hidden[-1].add(stream.cpu().numpy().transpose(0, 2, 1), kinds(seen.tokens))

    with _at_the_end(runner, observe_end):
        runner.observe(sequences, observe)
    return Stream(
        kinds.names,
        hidden[0].counts,
        np.array(layers),
        np.stack([mean.mean for mean in hidden]),
        np.stack([mean.mean for mean in attention.values()]),
    )


def mask_of(attention: np.ndarray) -> np.ndarray:
    """(b, H, n, n) attention -> (n, n) bool: whether query m may attend to key n.

    A mask leaves exact zeros in every head and sequence.
    """
    return np.asarray(attention.any(axis=(0, 1)))


@contextmanager
def _at_the_end(runner: Runner, observe_end: Callable[[tuple[Any, ...]], None]) -> Iterator[None]:
    """Pass on what the last block returns at every call."""

    def hook(block: Any, args: Any, returned: Any) -> None:
        observe_end(returned if isinstance(returned, tuple) else (returned,))

    handle = runner.blocks[-1].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
