"""Faults planted in one layer after the other of a checkpoint, and in all, and which of them an audit finds.

Every fault is planted in the stored weights of a layer, in memory, and the layer is measured again. The findings are
compared with the unchanged checkpoint's, whose errors and warnings are false alarms if it is healthy. Ranks are
judged by the reference of other checkpoints, which leaves out the one at hand. A fault that fits no layer has 0 layers.
"""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

import weightscope as ws
from tests.support.plants.plant import Made, Plant
from weightscope.checkpoint.checkpoint import Checkpoint, DerivedTensor, Tensor, WholeTensor
from weightscope.core.progress import bar
from weightscope.heads.audit.audit import AuditOptions, measured_layer
from weightscope.heads.audit.duplicates import duplicates
from weightscope.heads.audit.factor_findings import factor_findings, looks_random, untrained
from weightscope.heads.audit.findings import embedding_rows, findings_of, head_findings
from weightscope.heads.audit.measure import Arrays, MeasuredHeads
from weightscope.heads.audit.reference import OWN, Reference, Standing
from weightscope.heads.tensors.findings import offset_findings, scale_findings
from weightscope.model.config.reading import read_as
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.maps import Affine
from weightscope.model.opened import Opened
from weightscope.report.findings import Findings

FACTORS = ("q", "k", "v")
OPTIONS = AuditOptions(deltas=(0,), directions=0)


def changed(layer: Layer, change: Callable[[np.ndarray], np.ndarray], names: tuple[str, ...]) -> Layer:
    """The layer with some of its stored factors q, k, v (A, d, r) and o (H, r, d) changed."""
    maps = {name: getattr(layer, name) for name in names if name != "o"}
    new = {name: replace(affine, stored=change(np.asarray(affine.stored))) for name, affine in maps.items()}
    return replace(layer, **new, **({"w_o": change(np.asarray(layer.w_o))} if "o" in names else {}))


def large_value_bias(layer: Layer) -> Layer:
    """A bias of 10,000 for every value."""
    return replace(layer, v=replace(layer.v, bias=layer.v.bias + np.float32(1e4)))


def noise(layer: Layer) -> Layer:
    """Noise of half a standard deviation on all four factors."""
    rng = np.random.default_rng(layer.index)
    return changed(
        layer,
        lambda w: w + (0.5 * w.std(dtype=np.float64) * rng.standard_normal(w.shape)).astype(w.dtype),
        (*FACTORS, "o"),
    )


def initialised_anew(layer: Layer) -> Layer:
    """All four factors drawn anew, with the standard deviation that they had."""
    rng = np.random.default_rng(layer.index)
    return changed(
        layer, lambda w: (w.std(dtype=np.float64) * rng.standard_normal(w.shape)).astype(w.dtype), (*FACTORS, "o")
    )


def swapped(layer: Layer) -> Layer:
    """Keys and values swapped."""
    return replace(layer, k=layer.v, v=layer.k)


def scaled_queries(layer: Layer) -> Layer:
    """W_Q times 30."""
    return changed(layer, lambda w: 30 * w, ("q",))


def of_another_layer(layer: Layer, donor: Layer) -> Layer:
    """Keys and values of another layer."""
    return replace(layer, k=donor.k, v=donor.v)


def collapsed_head(layer: Layer) -> Layer:
    """Queries of the first head cut to four directions."""

    def cut(w: np.ndarray) -> np.ndarray:
        u, s, vt = np.linalg.svd(w[0], full_matrices=False)
        return np.concatenate([((u[:, :4] * s[:4]) @ vt[:4])[None].astype(w.dtype), w[1:]])

    return changed(layer, cut, ("q",))


def copied_head(layer: Layer) -> Layer:
    """The last head becomes the first, moved by a tenth of its norm."""
    rng = np.random.default_rng(layer.index)

    def copied(w: np.ndarray) -> np.ndarray:
        noise = 0.1 * np.sqrt((w[0].astype(np.float64) ** 2).mean()) * rng.standard_normal(w[0].shape)
        return np.concatenate([w[:-1], (w[0] + noise)[None].astype(w.dtype)]) if len(w) > 1 else w

    return changed(layer, copied, (*FACTORS, "o"))


def copied_layer(layer: Layer, donor: Layer) -> Layer:
    """Another layer in its place."""
    return replace(donor, index=layer.index)


def o_transposed(layer: Layer) -> Layer:
    """W_O transposed, where it is square."""
    n_heads, r, d = layer.w_o.shape
    return replace(layer, w_o=np.asarray(layer.w_o).reshape(d, d).T.reshape(n_heads, r, d))


def squares_transposed(layer: Layer) -> Layer:
    """All factors that are square transposed."""

    def transposed(affine: Affine) -> Affine:
        matrix = _whole(affine)
        return _with(affine, matrix.T) if len(matrix) == matrix.shape[1] else affine

    return replace(o_transposed(layer), **{name: transposed(getattr(layer, name)) for name in FACTORS})


def q_k_exchanged(layer: Layer) -> Layer:
    """Queries and keys exchanged, with their biases."""
    return replace(layer, q=layer.k, k=layer.q)


def v_o_exchanged(layer: Layer) -> Layer:
    """Values and outputs exchanged as they are stored, with their biases."""
    n_heads, r, d = layer.w_o.shape
    value = replace(layer.v, bias=np.asarray(layer.output_bias, np.float32).reshape(layer.v.bias.shape))
    outputs = _whole(layer.v).reshape(n_heads, r, d)
    return replace(layer, v=_with(value, np.asarray(layer.w_o).reshape(d, d)), w_o=outputs)


def other_rotary_order(layer: Layer) -> Layer:
    """Rows of W_Q and W_K in the order of pairs where rotary positions pair halves, or the other way round."""
    rotation = layer.rotation
    if rotation is None:
        raise ValueError("has no rotary positions")
    m = len(rotation.frequencies)
    turning = np.arange(2 * m).reshape((m, 2) if rotation.interleaved else (2, m)).T.ravel()
    order = np.arange(layer.head_dim)
    order[rotation.start : rotation.start + 2 * m] = rotation.start + turning

    def reordered(affine: Affine) -> Affine:
        return replace(affine, stored=np.asarray(affine.stored)[..., order], bias=affine.bias[:, order])

    return replace(layer, q=reordered(layer.q), k=reordered(layer.k))


def tiled_heads(layer: Layer) -> Layer:
    """Query head h with the keys and values of h modulo their number, where consecutive heads share them."""
    order = np.arange(layer.n_heads).reshape(-1, layer.n_kv_heads).T.ravel()
    query = replace(layer.q, stored=np.asarray(layer.q.stored)[order], bias=layer.q.bias[order])
    return replace(layer, q=query, w_o=np.asarray(layer.w_o)[order])


def mantissas_cut(layer: Layer) -> Layer:
    """All four factors cut to three bits of mantissa, as in eight-bit floats."""

    def cut(w: np.ndarray) -> np.ndarray:
        mantissa, exponent = np.frexp(w)
        return np.ldexp(np.trunc(mantissa * 16) / 16, exponent).astype(w.dtype)

    return changed(layer, cut, (*FACTORS, "o"))


# Faults of tensors that no head's factor is made of: new values by name.

Values = dict[str, np.ndarray]
OF_NORM = re.compile(r"(norm|[._]ln)[^.]*\.(weight|bias)$", re.IGNORECASE)


def _norms(model: ws.Model, index: int) -> list[str]:
    """Gains and biases of a layer's norms, by name in the layer."""
    stem = model.stem(index)
    return [name.removeprefix(stem) for name in model.checkpoint.names_under(stem) if OF_NORM.search(name)]


def zero_gain(model: ws.Model, index: int) -> Values:
    """The gain of one norm zero, of those that attention does not read."""
    read = {tensor.name for tensor in model.attention_tensors(index)}
    names = [model.stem(index) + name for name in _norms(model, index) if name.endswith("weight")]
    norm = model.family.norm_of(index)
    offset = 0.0 if norm is None else norm.offset  # a gain of one is stored as one less this
    return {name: np.zeros_like(_read(model, name)) - offset for name in names if name not in read}


def norms_of_another_layer(model: ws.Model, index: int) -> Values:
    """Gains and biases of all norms of a layer, taken from another layer."""
    ours, theirs = model.stem(index), model.stem(_next(model, index))
    return {ours + name: _read(model, theirs + name) for name in _norms(model, index)}


def gains_less_one(model: ws.Model, index: int) -> Values:
    """Gains of all norms of a layer less one."""
    names = [model.stem(index) + name for name in _norms(model, index) if name.endswith("weight")]
    return {name: _read(model, name) - np.float32(1) for name in names}


def gains_plus_one(model: ws.Model, index: int) -> Values:
    """Gains of all norms of a layer plus one."""
    return {name: gain + np.float32(2) for name, gain in gains_less_one(model, index).items()}


def drawn_anew(model: ws.Model, index: int) -> Values:
    """All tensors of a layer's attention as at initialisation, and the gains of its network's norms."""
    rng, stem, norm = np.random.default_rng(index), model.stem(index), model.family.norm_of(index)
    offset = 0.0 if norm is None else norm.offset
    values: Values = {}
    for tensor in model.attention_tensors(index):
        w = tensor.read()
        drawn = w.std(dtype=np.float64) * rng.standard_normal(w.shape) if w.ndim > 1 else np.zeros(w.shape)
        values[tensor.name] = drawn.astype(np.float32)
    gains = (stem + name for name in _norms(model, index) if name.endswith("weight"))
    return values | {name: np.full_like(_read(model, name), 1 - offset) for name in gains}


def biases_dropped(model: ws.Model, index: int) -> Values:
    """Biases of queries, keys, values and output zero."""
    names = [tensor.name for tensor in model.attention_tensors(index) if tensor.name.endswith(".bias")]
    biases = {name: _read(model, name) for name in names if not OF_NORM.search(name)}
    return {name: np.zeros_like(bias) for name, bias in biases.items() if bias.any()}


def embeddings_drawn_anew(model: ws.Model, index: int) -> Values:
    """Rows of the token embedding drawn anew, with the standard deviation that they had."""
    if index != model.attention_layers[0] or model.prefix + model.family.inputs.tokens not in model.checkpoint:
        return {}
    rows = model.embeddings.token_tensor.read()
    drawn = np.random.default_rng(index).standard_normal(rows.shape, np.float32) * rows.std(dtype=np.float64)
    return {model.embeddings.token_tensor.name: drawn.astype(np.float32)}


def _read(model: ws.Model, name: str) -> np.ndarray:
    return model.checkpoint[name].read()


@dataclass(frozen=True)
class NewValues(DerivedTensor, WholeTensor):
    """A tensor of a checkpoint with other values."""

    stored: Tensor
    values: np.ndarray
    noted: set[str] | None = None

    def read(self) -> np.ndarray:
        return self.values

    def unchecked(self, noted: set[str]) -> Tensor:
        return replace(self, noted=noted)


def with_values(model: ws.Model, values: Values) -> ws.Model:
    """The model with other values in some tensors."""
    before = model.checkpoint
    tensors = dict(before.items()) | {name: NewValues(before[name], array) for name, array in values.items()}
    after = Checkpoint(before.folder, before.files, tensors, before.config, before.name)
    return ws.Model(Opened(after, model.source, model.tokenizer, model.where), read_as(after, model.row))


def _whole(affine: Affine) -> np.ndarray:
    """All heads of a factor as one matrix, (A, d, r) -> (d, A r)."""
    stored = np.asarray(affine.stored)
    return stored.transpose(1, 0, 2).reshape(stored.shape[1], -1)


def _with(affine: Affine, matrix: np.ndarray) -> Affine:
    """The factor with another matrix (d, A r)."""
    count, d, r = affine.shape
    return replace(affine, stored=matrix.reshape(d, count, r).transpose(1, 0, 2))


class Fault(NamedTuple):
    """A fault, and what should be found."""

    plant: Callable[..., Any]  # of a layer and perhaps its `_next`, a Layer; of a model and an index, `Values`
    kind: str = ""  # of the finding that names it; empty where none does
    fits: Callable[[Layer], bool] = lambda layer: True
    another: bool = False  # it takes a second layer
    everywhere: bool = True  # planted in all layers too
    tensors: bool = False  # it changes tensors that no head's factor is made of


def _squares(layer: Layer) -> bool:
    return bool(np.prod(layer.w_o.shape[:2]) == layer.d_model)


FAULTS = {
    "value bias of 10000": Fault(large_value_bias, "large_bias", everywhere=False),
    "noise of 0.5 standard deviations": Fault(noise, "noise_floor", everywhere=False),
    "K and V swapped": Fault(swapped, "swapped_factors", lambda layer: layer.k.shape == layer.v.shape),
    "Q times 30": Fault(scaled_queries, "unbalanced_factors", everywhere=False),
    "layer initialised anew": Fault(initialised_anew, "untrained_layer", everywhere=False),
    "K and V of another layer": Fault(of_another_layer, "mixed_factors", another=True, everywhere=False),
    "a head's queries cut to rank 4": Fault(collapsed_head, "rank_collapsed", everywhere=False),
    "a head copied, moved by 10 %": Fault(copied_head, "duplicate_heads", everywhere=False),
    "another layer in its place": Fault(copied_layer, "duplicate_heads", another=True, everywhere=False),
    "W_O transposed": Fault(o_transposed, "transposed_factors", _squares),
    "all square factors transposed": Fault(squares_transposed, "transposed_factors", _squares),
    "Q and K exchanged": Fault(q_k_exchanged, "swapped_factors", lambda layer: layer.q.shape == layer.k.shape),
    "V and O exchanged": Fault(
        v_o_exchanged, "swapped_factors", lambda layer: _squares(layer) and layer.n_kv_heads == layer.n_heads
    ),
    "gains of norms outside attention zero": Fault(zero_gain, "zero_tensor", tensors=True),
    "rotary rows in the other order": Fault(other_rotary_order, fits=lambda layer: layer.rotation is not None),
    "heads tiled, not grouped": Fault(tiled_heads, fits=lambda layer: 1 < layer.n_kv_heads < layer.n_heads),
    "norms of another layer": Fault(norms_of_another_layer, tensors=True),
    "gains of norms less one": Fault(gains_less_one, "norm_offset", tensors=True),
    "gains of norms plus one": Fault(gains_plus_one, "norm_offset", tensors=True),
    "attention and gains as initialised": Fault(drawn_anew, "untrained", tensors=True),
    "biases dropped": Fault(biases_dropped, "zero_tensor", tensors=True),
    "mantissas cut to 3 bits": Fault(mantissas_cut),
    "token embedding drawn anew": Fault(embeddings_drawn_anew, everywhere=False, tensors=True),
}


class Healthy(NamedTuple):
    """A model that faults are planted in, and what is found in it without any."""

    model: ws.Model
    layers: dict[int, Arrays]
    standing: Standing
    clean: Findings


def plants_of(source: str, faults: Collection[str] = tuple(FAULTS)) -> Iterator[Plant]:
    """Each fault in one layer after the other, and in all; cells of COLUMNS except what `judged` counts."""
    model = ws.open_model(source)
    layers: dict[int, Arrays] = {
        index: measured_layer(model.layer(index), [], OPTIONS)
        for index in bar(model.attention_layers, "measuring", "layer")
    }
    heads = MeasuredHeads(layers, model.config.d_model)
    standing = Standing(model, heads, Reference.load(OWN))
    alarms = sum(finding.severity != "note" for finding in findings_of(model.unchecked(), heads, standing))
    healthy = Healthy(model, layers, standing, _findings(model, layers, standing, {}))
    for name in faults:
        fault = FAULTS[name]
        tried = [index for index in model.attention_layers if _can_plant(fault, model, index)]
        places = {name: [[index] for index in tried]}
        if fault.everywhere:
            places[f"{name}, in all layers"] = [tried] if tried else []
        for where, together in places.items():
            cells = {"model": model.name, "fault": where, "layers": len(tried), "false_alarms": alarms}
            made = Made(source, (), (healthy, fault, together))
            yield Plant(where, lambda _, made=made: made, {"audit": fault.kind}, cells)  # type: ignore[misc]


def judged(plant: Plant, made: Made) -> dict[str, int]:
    """Layers in which the fault was named right, and in which there was any new warning."""
    (model, layers, standing, clean), fault, places = made.more
    named = warned = 0
    for together in bar(places, plant.name, "layer"):
        values: Values = {}
        if fault.tensors:
            values = {key: array for index in together for key, array in fault.plant(model, index).items()}
            broken_model = with_values(model, values)
            broken = {index: broken_model.layer(index) for index in together}
        else:
            broken_model, broken = model, {index: _planted_in(model, fault, index) for index in together}
        measured = layers | {index: measured_layer(layer, [], OPTIONS) for index, layer in broken.items()}
        findings = _findings(broken_model, measured, standing, broken, values)
        for index in together:
            of_layer = {key for key in values if key.startswith(model.stem(index)) or len(together) == 1}
            here, before = _warned(findings, index, of_layer), _warned(clean, index)
            named += not here.isdisjoint({fault.kind, f"{fault.kind}_layer"})  # of the model, or of the layer
            warned += bool(here - before)
    return {"named": named, "warned": warned}


def _can_plant(fault: Fault, model: ws.Model, index: int) -> bool:
    if fault.tensors:
        return bool(fault.plant(model, index))
    layer = model.layer(index)
    return _separate(layer) and fault.fits(layer)


def _planted_in(model: ws.Model, fault: Fault, index: int) -> Layer:
    layer: Layer = fault.plant(model.layer(index), *([model.layer(_next(model, index))] if fault.another else ()))
    return layer


def _separate(layer: Layer) -> bool:
    """Whether its factors are matrices of their own."""
    return all(isinstance(getattr(layer, factor), Affine) for factor in FACTORS)


def _next(model: ws.Model, index: int) -> int:
    """The next layer of attention; after the last, the first."""
    layers = model.attention_layers
    return layers[(layers.index(index) + 1) % len(layers)]


def _warned(findings: Findings, index: int, names: Collection[str] = ()) -> set[str]:
    """Kinds of the warnings and errors that concern a layer, or tensors with these names."""
    return {
        finding.kind
        for finding in findings
        if finding.severity != "note"
        and (
            index in {finding.layer, *(member.layer for member in finding.members)}
            or not {member.name for member in finding.members}.isdisjoint(names)
        )
    }


def _findings(
    model: ws.Model, layers: dict[int, Arrays], standing: Standing, broken: dict[int, Layer], new: Collection[str] = ()
) -> Findings:
    """Findings of broken layers among the others, and of tensors with new values."""
    heads = MeasuredHeads(layers, model.config.d_model)
    seen = SimpleNamespace(layer=lambda index: broken.get(index) or model.layer(index))
    alike = duplicates(seen, heads)  # type: ignore[arg-type]  # it asks for layers only
    findings = [*head_findings(heads, standing=standing), *factor_findings(model, heads), *alike]
    if new:
        layers_read = heads.layers.tolist()
        findings += [*scale_findings(model), *untrained(model, heads)]
        findings += () if looks_random(model, heads) else offset_findings(model, layers_read)
    embedded = {tensor.name for tensor in model.ends.input_tensors}
    return Findings([*findings, *(() if embedded.isdisjoint(new) else embedding_rows(model))])


COLUMNS = ("model", "fault", "layers", "named", "warned", "false_alarms")
