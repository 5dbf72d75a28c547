"""Runs a model and looks at the strongest sink of each of its heads (two-sink-mechanisms paper, section 4).

A head's updates u_j are looked at in the r coordinates of the space that its W_O spans, where norms and ranks are those
in the d of the residual stream. LayerScale is part of W_O; in a layer with a gate the updates are those before it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from weightscope.attention.layer import Layer
from weightscope.audit.measure import measure_layer
from weightscope.errors import CheckpointError
from weightscope.metrics.norms import output_triangles
from weightscope.metrics.spectra import stable_rank
from weightscope.progress import bar
from weightscope.provenance import Provenance
from weightscope.runner.runner import Activations, Runner
from weightscope.sinks import lemmas
from weightscope.sinks.inputs import Inputs
from weightscope.sinks.mechanisms import MEASURES, SinkMechanisms
from weightscope.sinks.strength import (
    event_share,
    least_epsilon,
    norms,
    similarity_between_tokens,
    similarity_through,
    sink_row,
    sink_strength,
    value_norm_ratio,
)


def own_coordinates(layer: Layer) -> Layer:
    """A layer whose values are u_j in the coordinates of an orthonormal basis of each head's output space.

    W_O' = Q R, so u = v W_O = v R' Q', and v R' has the lengths and angles of u: r numbers in place of d.
    """
    w_o = np.asarray(layer.w_o)  # (H, r, d)
    return replace(layer, w_o=output_triangles(w_o).astype(w_o.dtype))  # (H, r, r)


def sink_mechanisms(runner: Runner, inputs: Inputs) -> SinkMechanisms:
    """Run a model and measure what the strongest sink of each head does on each input."""
    for name, sequence in inputs.sequences.items():
        if sequence.ndim == 1 and len(sequence) < 2:
            raise CheckpointError(f"{name} has one token; sinks need several", file=runner.model.name)
    layers = list(runner.layers.values())
    observer = SinkObserver(layers, inputs)
    runner.observe(list(inputs.sequences.values()), observer)
    r = max(layer.q.of(0)[0].shape[-1] for layer in layers)
    spectra = np.zeros((len(layers), layers[0].n_heads, r))
    for place, layer in enumerate(bar(layers, "spectra", "layer")):
        values = measure_layer(layer, {})["qk_singular_values"]
        spectra[place, :, : values.shape[-1]] = values
    return replace(observer.result(runner.model.title, spectra), provenance=Provenance.of(runner.model.checkpoint))


class SinkObserver:
    """An observer that keeps a few numbers per head and input.
    layers: the layers it will be shown.
    """

    def __init__(self, layers: Sequence[Layer], inputs: Inputs) -> None:
        self.inputs, self.sequences = inputs, list(inputs.sequences.values())
        self.at = {layer.index: place for place, layer in enumerate(layers)}
        self.reduced = {layer.index: own_coordinates(layer) for layer in bar(layers, "lengths after W_O", "layer")}
        self.directions = {layer.index: key_directions(layer) for layer in bar(layers, "first directions", "layer")}
        self.arrays: dict[str, np.ndarray] = {}  # by the names of `SinkMechanisms` and of its measures

    def __call__(self, seen: Activations) -> None:
        where = (seen.inputs, self.at[seen.layer.index])
        b, n, d = seen.x.shape
        updates = self.reduced[seen.layer.index].values(seen.x.reshape(b * n, d))  # (H, b n, r)
        updates = updates.reshape(len(updates), b, n, -1).swapaxes(0, 1)  # (b, H, n, r)
        attention = seen.attention  # (b, H, n, n)
        strength = sink_strength(attention)  # (b, H, n)
        position = strength.argmax(axis=-1)  # (b, H)
        kinds = np.stack([self.inputs.tokens.kinds(self.sequences[index], n) for index in seen.inputs])  # (b, n)
        of_kind = np.eye(len(self.inputs.tokens.names), dtype=bool)[kinds]  # (b, n, K)
        after = seen.x + seen.output
        before = lemmas.token_variance(seen.x)  # (b,)
        shape, sums = rank_measures(attention, updates, position)
        for name, values in {
            "position": position,
            "kind": np.take_along_axis(kinds, position, axis=-1),
            "strength": strength.max(axis=-1),
            "epsilon": least_epsilon(attention, position),
            "share": event_share(attention, position),
            "ratio": value_norm_ratio(updates, position),
            "rank": shape,
            "norm_ratio": value_norm_ratio(seen.x[:, None], position),  # the norms of (b, 1, n, d)
            "inflow": strength @ of_kind.astype(float),  # (b, H, n) @ (b, n, K)
            "between_before": similarity_between_tokens(seen.x),
            "between_after": similarity_between_tokens(after),
            "through": similarity_through(seen.x, after),
            "variance_before": before,
            "variance_after": lemmas.token_variance(after),
            **norms_by_kind(seen.x, of_kind),
            **sums,
            **variance_measures(seen, updates, position, before),
            **routing_measures(seen, self.directions[seen.layer.index], position),
        }.items():
            kind = np.int32 if values.dtype.kind == "i" else np.float64
            whole = (len(self.sequences), len(self.at), *values.shape[1:])
            self.arrays.setdefault(name, np.zeros(whole, kind))[where] = values

    def result(self, model: str, qk_singular_values: np.ndarray) -> SinkMechanisms:
        """The result for a model of this name."""
        layers, arrays = np.array(list(self.at)), dict[str, Any](self.arrays)
        measures = {measure.name: arrays.pop(measure.name) for measure in MEASURES}
        return SinkMechanisms(
            model, self.inputs, layers, **arrays, qk_singular_values=qk_singular_values, measures=measures
        )


def key_directions(layer: Layer) -> np.ndarray:
    """v_1 of each head's W_QK = sum_k sigma_k u_k v_k', the direction that its keys read best: (H, d)."""
    return np.stack([head.qk.leading(1)[2][:, 0] for head in layer.heads])


def norms_by_kind(x: np.ndarray, of_kind: np.ndarray) -> dict[str, np.ndarray]:
    """Mean and largest norm of each kind of token, NaN where there is none: (b, n, d), (b, n, K) -> (b, K) twice."""
    length = np.where(of_kind, norms(x)[..., None], 0.0)  # (b, n, K)
    count = of_kind.sum(axis=1)  # (b, K)
    return {
        "norm_mean": np.where(count > 0, length.sum(axis=1) / np.maximum(count, 1), np.nan),
        "norm_largest": np.where(count > 0, length.max(axis=1), np.nan),
    }


def rank_measures(
    attention: np.ndarray, updates: np.ndarray, sink: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Stable rank of Y = A u, and Lemma 3 of it: lengths over |Y|, singular values over sigma_1(Y); (b, H) each."""
    singular, first = lemmas.first_direction(attention @ updates)
    written = np.sqrt(np.square(singular).sum(axis=-1))
    fit = lemmas.rank_one(attention, updates, sink)
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
            "along": lemmas.cosine(first, sink_row(updates, sink)),
            "cancelled": fit.cancelled,
        }


def variance_measures(
    seen: Activations, updates: np.ndarray, sink: np.ndarray, before: np.ndarray
) -> dict[str, np.ndarray]:
    """Lemma 4 for each head alone, in units of the variance V of the tokens before attention, and the sink's update
    against the stream: (b, H) each.

    V' = V + Var(Y) + 2 Cov(x, Y), and with y = o W_O the covariance is that of x W_O' and o: r coordinates a head.
    """
    layer, (b, n, d) = seen.layer, seen.x.shape
    v = layer.inner_values(seen.x.reshape(b * n, d))  # (G, b n, r_v)
    v = np.repeat(v.reshape(len(v), b, n, -1), layer.n_heads // len(v), axis=0).swapaxes(0, 1)  # (b, H, n, r_v)
    gathered = seen.attention @ v
    along = lemmas.centred(seen.x).astype(seen.x.dtype)[:, None] @ np.asarray(layer.w_o).swapaxes(1, 2)  # as gathered
    covariance = (along * lemmas.centred(gathered)).sum(axis=-1).mean(axis=-1)
    written_by_sink = (sink_row(v, sink)[:, :, None] @ np.asarray(layer.w_o))[:, :, 0]  # (b, H, d)
    of_written = lemmas.token_variance(seen.attention @ updates)
    self_attention = before[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "variance_change": (of_written + 2 * covariance) / self_attention,
            "variance_sink": lemmas.variance_of_weights(seen.attention, updates, sink) / self_attention,
            "variance_bound": lemmas.variance_bound(self_attention, seen.attention, updates, sink) / self_attention,
            "against_stream": lemmas.against_stream(seen.x[:, None], written_by_sink),
            "update_spread": lemmas.relative_spread(gathered),
        }


def routing_measures(seen: Activations, directions: np.ndarray, sink: np.ndarray) -> dict[str, np.ndarray]:
    """How queries find the sink: key norms, similarity of queries, and the sink token along v_1 of W_QK."""
    layer, (b, n, d) = seen.layer, seen.x.shape
    x = seen.x.reshape(b * n, d)

    def by_head(made: np.ndarray) -> np.ndarray:  # (heads, b n, r) -> (b, H, n, r)
        made = made.reshape(len(made), b, n, -1).swapaxes(0, 1)
        return np.repeat(made, layer.n_heads // made.shape[1], axis=1)

    read = layer.normalised(x)
    if layer.norm is not None and layer.norm.centred:
        read = read - read.mean(axis=-1, keepdims=True)
    sink_alignment, other_alignment = lemmas.alignment(read.reshape(b, n, d), directions, sink)
    return {
        "key_ratio": value_norm_ratio(by_head(layer.keys(x)), sink),
        "query_similarity": similarity_between_tokens(by_head(layer.queries(x))),
        "alignment": sink_alignment,
        "alignment_others": other_alignment,
    }
