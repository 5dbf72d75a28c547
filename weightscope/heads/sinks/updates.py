"""Updates by token 0 through attention, and their likeness to a bias (sink-as-bias, eqs 1-6).

Attention writes y_i = u_sink,i + u_others,i + b (eq. 1) at position i: what token 0 sends there,
what tokens 1..i send together, and the output bias. If the sink were a bias, u_sink,i would be the
same vector for every i and text.

u_sink,i = sum_h alpha_i0h f_h(x_0) has H coefficients, the attention that each head gives token 0,
on H directions. In a causal model x_0 depends on token 0 alone. Texts that begin with the same
token share the directions: every sum over positions is kept in H coordinates, and no d x d matrix
of u_sink is ever formed.

u_ctx,i is the mean over the context tokens, u_others,i / i, as the caption of the paper's Fig. 3
has it. In eqs 3-6 positions i start at 1, as in eq. 4: position 0 has no context. mu_sink alone
includes position 0, as eq. 2 says.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from weightscope.core.errors import CheckpointError
from weightscope.core.results import ShowsShapes, holds_arrays
from weightscope.core.tables import Column, Table
from weightscope.heads.sinks.strength import sink_strength
from weightscope.model.layers.layer import Layer
from weightscope.runner.runner import Activations, Runner

SPREAD = (10, 90)  # percentiles over texts, each measured alone


class SinkUpdate(NamedTuple):
    """u_sink of one text in one layer."""

    # (n, m) each head's attention to token 0, m = H; under an output gate u_sink itself, m = d
    coefficients: np.ndarray
    # (m, d) f_h(x_0) of each head; None under an output gate, which depends on the query
    directions: np.ndarray | None

    def rows(self) -> np.ndarray:
        """u_sink,i of every position, (n, d)."""
        return self.coefficients if self.directions is None else self.coefficients @ self.directions


class Decomposition(NamedTuple):
    """Attention's output at every position, sink + others + bias (eq. 1)."""

    sink: SinkUpdate
    others: np.ndarray  # (n, d)
    bias: np.ndarray  # (d,) b_O; the values' bias is part of f(x), as in the model


def sink_update(layer: Layer, attention: np.ndarray, x: np.ndarray) -> SinkUpdate:
    """u_sink,i = u_0,i = sum_h alpha_i0h f_h(x_0) (eq. 1): attention (H, n, n), x (n, d)."""
    if not layer.modulated:
        return SinkUpdate(attention[:, :, 0].T, layer.values(x[:1])[:, 0])
    to_sink = np.zeros_like(attention)
    # Gates and norms multiply sums over tokens, so token 0's part stays additive
    to_sink[:, :, 0] = attention[:, :, 0]
    return SinkUpdate(layer.output(attention, x, to_sink) - layer.output_bias, None)


def decompose(seen: Activations) -> Iterator[Decomposition]:
    """Each text's attention output in one layer, taken apart."""
    bias = seen.layer.output_bias
    for (x, attention), output in zip(seen.each(), seen.output, strict=True):
        sink = sink_update(seen.layer, attention, x)
        yield Decomposition(sink, output - bias - sink.rows(), bias)


def mean_of_context(others: np.ndarray) -> np.ndarray:
    """u_ctx,i = u_others,i / i, the mean over tokens 1..i: (n, d) -> (n - 1, d)."""
    return others[1:] / np.arange(1, len(others), dtype=others.dtype)[:, None]


@dataclass(eq=False, repr=False)
class _Part(ShowsShapes):
    """Sums over rows of coefficients on the same directions, in float64."""

    directions: np.ndarray | None  # (m, d); None where coefficients are the vectors themselves
    total: np.ndarray  # (m,)
    second: np.ndarray  # (m, m), sum of c c'

    def on_directions(self, coefficients: np.ndarray) -> np.ndarray:
        return coefficients if self.directions is None else coefficients @ self.directions

    def factor(self) -> np.ndarray:
        """(k, d) matrix W with W'W the sum of u u'."""
        squares, vectors = np.linalg.eigh(self.second)
        return self.on_directions(np.sqrt(np.maximum(squares, 0))[:, None] * vectors.T)

    def sum_of_squares(self) -> float:
        if self.directions is None:
            return float(self.second.trace())
        return float((self.second * (self.directions @ self.directions.T)).sum())


@dataclass
class UpdateStack:
    """The matrix C of eq. 4, whose rows are updates of positions and texts, kept as sums."""

    count: int = 0  # rows
    _norms: float = 0.0
    _parts: dict[Hashable, _Part] = field(default_factory=dict)

    def add(
        self, coefficients: np.ndarray, directions: np.ndarray | None = None, of: Hashable = None
    ) -> None:
        """Add the rows u = coefficients @ directions: coefficients (n, m), directions (m, d)."""
        labels = None if directions is None else of  # plain vectors share one label
        if labels not in self._parts:
            m = coefficients.shape[1]
            wide = None if directions is None else directions.astype(np.float64)
            self._parts[labels] = _Part(wide, np.zeros(m), np.zeros((m, m)))
        part = self._parts[labels]
        part.total += coefficients.sum(axis=0, dtype=np.float64)
        part.second += coefficients.T @ coefficients
        self.count += len(coefficients)
        lengths = np.linalg.norm(part.on_directions(coefficients), axis=1)
        self._norms += float(lengths.sum(dtype=np.float64))

    @property
    def mean(self) -> np.ndarray:
        """E[u], (d,)."""
        totals = [part.on_directions(part.total) for part in self._parts.values()]
        return np.sum(totals, axis=0) / self.count

    @property
    def mean_norm(self) -> float:
        """E[|u|]."""
        return self._norms / self.count

    @property
    def mean_square(self) -> float:
        """E[|u|^2]."""
        return sum(part.sum_of_squares() for part in self._parts.values()) / self.count

    def squared_singular_values(self) -> np.ndarray:
        """sigma_k^2 of C, descending; only those that can be non-zero."""
        parts = list(self._parts.values())
        if len(parts) == 1 and parts[0].directions is None:
            return np.maximum(np.linalg.eigvalsh(parts[0].second)[::-1], 0)
        factor = np.concatenate([part.factor() for part in parts])  # (k, d)
        gram = factor @ factor.T if len(factor) < factor.shape[1] else factor.T @ factor
        return np.maximum(np.linalg.eigvalsh(gram)[::-1], 0)


def influence(sink: UpdateStack, others: UpdateStack) -> float:
    """Ratio = E|u_sink| / E|u_others| (eq. 3): 1 if token 0 writes as much as all others."""
    return sink.mean_norm / others.mean_norm


def spectral_ratio(updates: UpdateStack) -> float:
    """SpectralRatio = sigma_1^2 / sum_k sigma_k^2 (eq. 5): 1 if updates have one direction."""
    squares = updates.squared_singular_values()
    return float(squares[0] / squares.sum())


def normalised_variance(
    mean: np.ndarray, mean_square: float, mu: np.ndarray | None = None
) -> float:
    """R = E|u - mu|^2 / E|u|^2 (eq. 6): 0 if every update is mu, 1 if mu is 0; mean, mu (d,)."""
    # E|u - mu|^2 = E|u|^2 - |E u|^2 + |E u - mu|^2
    off = 0.0 if mu is None else np.square(mean - mu).sum()
    return float(1 + (off - mean @ mean) / mean_square)


class OneText(NamedTuple):
    """One layer's updates on one text, positions from 1 on."""

    ratio: float  # Ratio of u_sink (eq. 3)
    spectral: float  # SpectralRatio of u_sink (eq. 5)
    mean: np.ndarray  # (d,) E[u_sink]
    mean_square: float  # E[|u_sink|^2]


@dataclass(eq=False, repr=False)
class LayerUpdates(ShowsShapes):
    """One layer's updates over all texts, as sums."""

    bias: np.ndarray  # (d,) b
    own: np.ndarray  # (d,) sum over texts of u_sink,0, what token 0 sends itself
    # Positions from 1 on
    sink: UpdateStack = field(default_factory=UpdateStack)  # u_sink
    context: UpdateStack = field(default_factory=UpdateStack)  # u_ctx, the mean over context tokens
    others: UpdateStack = field(default_factory=UpdateStack)  # u_others, their sum
    # (H,) by text, the attention that the average query from 1 on gives token 0
    strengths: list[np.ndarray] = field(default_factory=list)
    texts: list[OneText] = field(default_factory=list)

    def add(self, seen: Activations, first_tokens: Sequence[int]) -> None:
        """Add a batch of texts, each with its first token."""
        texts = zip(decompose(seen), seen.attention, first_tokens, strict=True)
        for parts, attention, first in texts:
            coefficients, directions = parts.sink
            self.own += SinkUpdate(coefficients[:1], directions).rows()[0]
            self.sink.add(coefficients[1:], directions, first)
            self.others.add(parts.others[1:])
            self.context.add(mean_of_context(parts.others))
            self.strengths.append(sink_strength(attention[:, 1:, :1])[:, 0])
            mean_rest = np.linalg.norm(parts.others[1:], axis=1).mean(dtype=np.float64)
            alone = UpdateStack()
            alone.add(coefficients[1:], directions)
            ratio = alone.mean_norm / float(mean_rest)
            self.texts.append(OneText(ratio, spectral_ratio(alone), alone.mean, alone.mean_square))

    def mu(self) -> np.ndarray:
        """mu_sink, the mean of u_sink over all positions, 0 included (eq. 2), (d,)."""
        count = self.sink.count + len(self.strengths)
        return (self.sink.mean * self.sink.count + self.own) / count

    def spread(self) -> np.ndarray:
        """Ratio, SpectralRatio and R against mu_sink at the percentiles `SPREAD`, (2, 3)."""
        mu = self.mu()
        by_text = [
            (text.ratio, text.spectral, normalised_variance(text.mean, text.mean_square, mu))
            for text in self.texts
        ]
        return np.percentile(by_text, SPREAD, axis=0)


@holds_arrays
class UpdateMeasures(ShowsShapes):
    """Eqs 2-6 for L attention layers."""

    layers: Table  # one row per layer: eqs 3, 5 and 6, and mean norms
    mu: np.ndarray  # (L, d) mu_sink (eq. 2)
    strength: np.ndarray  # (L, H) attention that the average query from 1 on gives token 0


def measure_updates(runner: Runner, texts: Sequence[np.ndarray]) -> UpdateMeasures:
    """Eqs 2-6 of every attention layer over texts, (n,) each.

    Beyond the model this holds two d x d float64 matrices a layer, the second moments of u_ctx and
    u_others.
    """
    if min((len(text) if np.ndim(text) == 1 else 0 for text in texts), default=0) < 2:
        raise CheckpointError("a text needs at least two tokens", file=runner.model.name)
    layers = {
        index: LayerUpdates(layer.output_bias, np.zeros(len(layer.output_bias)))
        for index, layer in runner.layers.items()
    }

    def observer(seen: Activations) -> None:
        if seen.attention[:, :, 0, 1:].any():  # token 0's updates depend on the text
            problem = "attention is not causal: token 0 depends on the rest of the text"
            raise CheckpointError(f"layer {seen.layer.index}: {problem}", file=runner.model.name)
        layers[seen.layer.index].add(seen, [int(texts[index][0]) for index in seen.inputs])

    runner.observe(texts, observer, layers=sorted(layers))
    updates = list(layers.values())
    return UpdateMeasures(
        _measured(list(layers), updates),
        np.stack([layer.mu() for layer in updates]),
        np.stack([np.mean(layer.strengths, axis=0) for layer in updates]),
    )


OWN_MEAN = "share that varies (eq. 6), relative to their own mean"
ONE_DIRECTION = "share of the first singular direction (eq. 5)"
PARTS = (("sink", "sink"), ("context", "context mean"), ("others", "others' sum"))
SPREAD_OVER_TEXTS = ("ratio", "spectral_sink", "variance_sink_mu")
# Heading and meaning of each column; norms are in units of the residual stream.
HEADINGS: dict[str, tuple[str, str]] = {
    "layer": ("", ""),
    "ratio": ("Ratio", "$E|u_sink| / E|u_others|$ (eq. 3)"),
    **{f"spectral_{part}": (f"$SpectralRatio$, {words}", ONE_DIRECTION) for part, words in PARTS},
    **{f"variance_{part}": (f"$R$, {words}", OWN_MEAN) for part, words in PARTS},
    "variance_sink_mu": ("$R$, sink, against $mu_sink$", "eq. 6 with the mean of eq. 2"),
    "norm_sink": ("$E|u_sink|$", ""),
    "norm_others": ("$E|u_others|$", ""),
    "norm_bias": ("$|b|$", ""),
    **{
        f"{name}_{end}": ("", f"{percent}th percentile over texts")
        for name in SPREAD_OVER_TEXTS
        for percent, end in zip(SPREAD, ("low", "high"), strict=True)
    },
}


def layers_table(values: Mapping[str, np.ndarray]) -> Table:
    """One row per layer of the measures of eqs 3, 5 and 6, from (L,) values by name."""
    columns = [
        Column(name, values[name], symbol, meaning=meaning)
        for name, (symbol, meaning) in HEADINGS.items()
    ]
    return Table(columns)


def _measured(layers: Sequence[int], updates: Sequence[LayerUpdates]) -> Table:
    """Eqs 3, 5 and 6 of every layer.

    R is against the mean of the same updates; for the sink also against mu_sink, which includes
    position 0.
    """
    values: dict[str, Any] = {
        "layer": layers,
        "ratio": [influence(layer.sink, layer.others) for layer in updates],
    }
    for part, _ in PARTS:
        stacks = [getattr(layer, part) for layer in updates]
        values[f"spectral_{part}"] = [spectral_ratio(stack) for stack in stacks]
        values[f"variance_{part}"] = [
            normalised_variance(stack.mean, stack.mean_square) for stack in stacks
        ]
    values["variance_sink_mu"] = [
        normalised_variance(layer.sink.mean, layer.sink.mean_square, layer.mu())
        for layer in updates
    ]
    values["norm_sink"] = [layer.sink.mean_norm for layer in updates]
    values["norm_others"] = [layer.others.mean_norm for layer in updates]
    values["norm_bias"] = [float(np.linalg.norm(layer.bias)) for layer in updates]
    spread = np.stack([layer.spread() for layer in updates])  # (L, 2, 3)
    for which, name in enumerate(SPREAD_OVER_TEXTS):
        values[f"{name}_low"], values[f"{name}_high"] = spread[:, :, which].T
    return layers_table(values)


def updates_of(runner: Runner, text: np.ndarray, layer: int) -> Decomposition:
    """One layer's attention output on one text, taken apart (the paper's Fig. 5)."""
    parts: list[Decomposition] = []
    runner.observe([text], lambda seen: parts.extend(decompose(seen)), layers=[layer])
    return parts[0]
