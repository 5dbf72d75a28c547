"""What token 0 writes through attention, taken apart from what the others write, layer by layer while a model runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from weightscope.attention.layer import Layer
from weightscope.errors import CheckpointError
from weightscope.runner.runner import Activations, Runner
from weightscope.sinks.strength import sink_strength
from weightscope.sinks.updates import Stack, influence, mean_of_context, normalised_variance, spectral_ratio


class SinkUpdate(NamedTuple):
    """u_sink of one text in one layer."""

    coefficients: np.ndarray
    """(n, m): each head's attention to token 0, m = H; under an output gate u_sink itself, m = d."""
    directions: np.ndarray | None
    """(m, d): f_h(x_0) of each head; None under an output gate, which depends on the query."""

    def rows(self) -> np.ndarray:
        """u_sink,i of every position, (n, d)."""
        return self.coefficients if self.directions is None else self.coefficients @ self.directions


class Decomposition(NamedTuple):
    """Attention's output at every position, sink + others + bias (eq. 1)."""

    sink: SinkUpdate
    others: np.ndarray
    """(n, d)."""
    bias: np.ndarray
    """(d,): b_O. The values' bias is inside f(x) and shared out with the attention, as the model does it."""


def sink_update(layer: Layer, attention: np.ndarray, x: np.ndarray) -> SinkUpdate:
    """u_sink,i = u_0,i = sum_h alpha_i0h f_h(x_0) (eq. 1).

    Parameters
    ----------
    layer : Layer
    attention : (H, n, n) array
    x : (n, d) array
        The residual stream that enters the layer.
    """
    if layer.gate is None:
        return SinkUpdate(attention[:, :, 0].T, layer.values(x[:1])[:, 0])
    alone = np.zeros_like(attention)
    alone[:, :, 0] = attention[:, :, 0]  # the gate multiplies what is gathered, so what token 0 alone sends still adds
    return SinkUpdate(layer.output(alone, x) - layer.output_bias, None)


def decompose(seen: Activations) -> Iterator[Decomposition]:
    """Each text's attention output in one layer, taken apart."""
    bias = seen.layer.output_bias
    for (x, attention), output in zip(seen.each(), seen.output, strict=True):
        sink = sink_update(seen.layer, attention, x)
        yield Decomposition(sink, output - bias - sink.rows(), bias)


@dataclass
class LayerUpdates:
    """One layer's updates over all texts, as sums.

    Attributes
    ----------
    sink, context, others : Stack
        u_sink, u_ctx (the mean over context tokens) and u_others (their sum) of positions from 1 on.
    own : (d,) array
        Sum over texts of u_sink,0, what token 0 sends itself.
    strengths : list of (H,) arrays
        Of each text, the attention that the average query from 1 on gives token 0.
    bias : (d,) array
        b.
    """

    bias: np.ndarray
    own: np.ndarray
    sink: Stack = field(default_factory=Stack)
    context: Stack = field(default_factory=Stack)
    others: Stack = field(default_factory=Stack)
    strengths: list[np.ndarray] = field(default_factory=list)

    def add(self, seen: Activations) -> None:
        """Add a batch."""
        assert seen.tokens is not None
        for found, attention, first in zip(decompose(seen), seen.attention, seen.tokens[:, 0].tolist(), strict=True):
            coefficients, directions = found.sink
            self.own += SinkUpdate(coefficients[:1], directions).rows()[0]
            self.sink.add(coefficients[1:], directions, first)
            self.others.add(found.others[1:])
            self.context.add(mean_of_context(found.others))
            self.strengths.append(sink_strength(attention[:, 1:, :1])[:, 0])

    def measures(self) -> "LayerMeasures":
        """Eqs 2-6 of the layer."""
        mu = (self.sink.mean * self.sink.count + self.own) / (self.sink.count + len(self.strengths))  # eq. 2
        return LayerMeasures(
            mu=mu,
            strength=np.mean(self.strengths, axis=0),
            ratio=influence(self.sink, self.others),
            spectral_sink=spectral_ratio(self.sink),
            spectral_context=spectral_ratio(self.context),
            spectral_others=spectral_ratio(self.others),
            variance_sink=normalised_variance(self.sink),
            variance_context=normalised_variance(self.context),
            variance_others=normalised_variance(self.others),
            norm_sink=self.sink.mean_norm,
            norm_others=self.others.mean_norm,
            norm_bias=float(np.linalg.norm(self.bias)),
        )


@dataclass(frozen=True)
class LayerMeasures:
    """What eqs 2-6 say of one layer.

    Attributes
    ----------
    mu : (d,) float64 array
        mu_sink (eq. 2).
    strength : (H,) array
        Attention that the average query from position 1 on gives token 0, a head.
    ratio : float
        Eq. 3.
    spectral_sink, spectral_context, spectral_others : float
        Eq. 5 of u_sink, of u_ctx and of u_others.
    variance_sink, variance_context, variance_others : float
        Eq. 6, each against its own mean.
    norm_sink, norm_others : float
        E|u_sink| and E|u_others|, in units of the residual stream.
    norm_bias : float
        |b|.
    """

    mu: np.ndarray
    strength: np.ndarray
    ratio: float
    spectral_sink: float
    spectral_context: float
    spectral_others: float
    variance_sink: float
    variance_context: float
    variance_others: float
    norm_sink: float
    norm_others: float
    norm_bias: float


def measure_updates(runner: Runner, texts: Sequence[np.ndarray]) -> dict[int, LayerMeasures]:
    """Eqs 2-6 of every attention layer over texts.

    Beyond the model this holds two d x d float64 matrices a layer, the second moments of u_ctx and u_others.

    Parameters
    ----------
    runner : Runner
        Of a causal model.
    texts : sequence of (n,) int arrays
        Of two tokens or more; token 0 is the sink.

    Raises
    ------
    CheckpointError
        A text is too short, or the model is not causal.
    """
    if min(map(len, texts), default=0) < 2:
        raise CheckpointError("a text needs a token beside its first one", file=runner.model.name)
    found = {
        index: LayerUpdates(layer.output_bias, np.zeros(len(layer.output_bias)))
        for index, layer in runner.layers.items()
    }

    def observer(seen: Activations) -> None:
        refuse_unless_causal(seen, runner)
        found[seen.layer.index].add(seen)

    runner.observe(texts, observer, layers=sorted(runner.layers))
    return {index: updates.measures() for index, updates in found.items()}


def refuse_unless_causal(seen: Activations, runner: Runner) -> None:
    """Raise a CheckpointError where token 0 looks at later tokens: what it sends then depends on the text."""
    if seen.attention[:, :, 0, 1:].any():
        problem = "attention is not causal: token 0 depends on the rest of the text"
        raise CheckpointError(f"layer {seen.layer.index}: {problem}", file=runner.model.name)


def updates_of(runner: Runner, text: np.ndarray, layer: int) -> Decomposition:
    """One layer's attention output on one text, taken apart (the paper's Fig. 5)."""
    found: list[Decomposition] = []
    runner.observe([text], lambda seen: found.extend(decompose(seen)), layers=[layer])
    return found[0]
