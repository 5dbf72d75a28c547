"""Choose and read an atlas's sample of a checkpoint: all of attention, or some heads or layers.

A head's queries, keys and values are rows of their matrices, which lie together in the file. Its
part of the output projection is columns, which do not: there some rows are read, with the columns
of all heads, and the others count as zero. So W_VO is seen in `OUTPUT_ROWS` of the stream's
dimensions, the same ones of every checkpoint of a width.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np

from weightscope.checkpoint.checkpoint import DerivedTensor, StoredTensor, Tensor, WholeTensor
from weightscope.checkpoint.hub import CONNECTIONS
from weightscope.core.errors import CheckpointError
from weightscope.model.config.config import ModelConfig
from weightscope.model.config.dialects import in_layer
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.read_layer import read_layer
from weightscope.model.layers.steps import Reads
from weightscope.model.metrics.spectra import evenly_spread
from weightscope.model.model import Model
from weightscope.model.rows.cells import LayerTensors
from weightscope.model.rows.family import Family

MOST_WEIGHTS = 75_000_000  # weights read of a checkpoint: 150 MB at 16 bits each
OUTPUT_ROWS = 64  # rows of an output projection that are read
RUN = 16  # consecutive rows among them
SPLIT = ("separate", "stacked", "grouped")  # layouts whose heads are rows

Spans = tuple[tuple[int, int], ...]  # rows [start, stop)


class Sample(NamedTuple):
    """The layers and heads to read of a checkpoint."""

    layers: Sequence[int]
    # key-value heads of each layer, read with the first query head of each; None for all
    groups: Sequence[int] | None
    weights: int  # number of weights in all


class SampledLayer(NamedTuple):
    """A layer with the heads that were read."""

    layer: Layer
    heads: np.ndarray  # (n,) their indices in the checkpoint
    kv_heads: np.ndarray


@dataclass(frozen=True)
class _Rows(DerivedTensor, WholeTensor):
    """Some rows of a tensor."""

    stored: Tensor
    spans: Spans
    noted: set[str] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(stop - start for start, stop in self.spans), *self.stored.shape[1:]

    def read(self) -> np.ndarray:
        return np.concatenate([self.stored.rows(*span) for span in self.spans])

    def unchecked(self, noted: set[str]) -> Tensor:
        return replace(self, stored=self.stored.unchecked(noted), noted=noted)


@dataclass(frozen=True)
class _Columns(_Rows):
    """Some columns of a tensor, in some of its rows; zero in the others."""

    columns: Spans = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[0], sum(stop - start for start, stop in self.columns)

    def read(self) -> np.ndarray:
        values = np.zeros(self.shape, np.float32)
        for start, stop in self.spans:
            rows = self.stored.rows(start, stop)
            parts = [rows[:, slice(*columns)] for columns in self.columns]
            values[start:stop] = np.concatenate(parts, axis=1)
        return values


def sample_of(model: Model, most: int = MOST_WEIGHTS) -> Sample:
    """Choose what to read of a checkpoint, at most so many weights; only shapes decide.

    Raises
    ------
    CheckpointError
        A single layer has more, and its heads cannot be read apart.
    """
    layers = model.attention_layers
    sizes = [sum(prod(tensor.shape) for tensor in model.attention_tensors(i)) for i in layers]
    if sum(sizes) <= most:
        return Sample(layers, None, sum(sizes))
    config, d = model.config, model.config.d_model
    if all(_is_split(model, i) for i in layers):
        out = min(OUTPUT_ROWS, d) * config.n_heads * _value_dim(model)
        group = d * (2 * config.head_dim + _value_dim(model))
        count = max(1, min(config.n_kv_heads, (most // len(layers) - out) // group))
        of_layer = out + count * group
        kept = min(len(layers), most // of_layer)
        if kept:
            chosen = [layers[k] for k in evenly_spread(len(layers), kept)]
            groups = _nested(config.n_kv_heads)[:count]
            return Sample(chosen, groups, len(chosen) * of_layer)
    kept = most // max(sizes)
    if kept:
        places = evenly_spread(len(layers), kept).tolist()
        return Sample([layers[k] for k in places], None, sum(sizes[k] for k in places))
    size = f"a layer of its attention has {max(sizes):,} weights"
    problem = f"{size}; at most {most:,} are read of a checkpoint"
    raise CheckpointError(f"{problem}, and its heads cannot be read apart", file=model.name)


def read_sample(model: Model, sample: Sample) -> Iterator[SampledLayer]:
    """Read a sample's layers in order; single heads several at a time, without a cache."""
    for file in model.checkpoint.files:
        file.keeps = False
    if sample.groups is None:
        for index in sample.layers:
            layer = model.layer(index)
            heads = np.arange(layer.n_heads)
            yield SampledLayer(layer, heads, heads * layer.n_kv_heads // layer.n_heads)
        return
    groups = np.asarray(sample.groups)
    heads = groups * (model.config.n_heads // model.config.n_kv_heads)

    def of_layer(index: int) -> Layer:
        return _heads_of(model, index, groups.tolist())

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        for layer in pool.map(of_layer, sample.layers):
            yield SampledLayer(layer, heads, groups)


def _heads_of(model: Model, index: int, groups: Sequence[int]) -> Layer:
    """Read a layer as if it had only these key-value heads, each with its first query head."""
    config, family = _of_layer(model, index)
    replaced = _replaced(model, family, config, index, groups)
    tensors = LayerTensors(model.checkpoint.with_tensors(replaced), model.prefix, model.family.name)
    smaller = replace(config, n_heads=len(groups), n_kv_heads=len(groups))
    return read_layer(tensors, family, smaller, index)


def keys_are_values(model: Model, index: int) -> bool:
    """True if a layer has one matrix for both, so that positions order its value dimensions."""
    heads = _of_layer(model, index)[1].heads
    return heads.layout.__name__ == "separate" and heads.k == heads.v


def _of_layer(model: Model, index: int) -> tuple[ModelConfig, Family]:
    """One layer's numbers and row, without its dependence on the layer."""
    config, family = in_layer(model.config, model.family, index)
    return config, replace(family, in_=())


def _replaced(
    model: Model, family: Family, config: ModelConfig, index: int, groups: Sequence[int]
) -> dict[str, Tensor]:
    """The projections of a layer with the rows and columns of these heads, by name."""
    stem, h, g = model.stem(index), config.n_heads, config.n_kv_heads
    r, r_v = config.head_dim, _value_dim(model)
    shared = h // g

    def rows(first: int, step: int, width: int) -> list[tuple[int, int]]:
        return [(first + j * step, first + j * step + width) for j in groups]

    layout = family.heads.layout.__name__
    if layout == "separate":
        q, k, v = family.heads.q, family.heads.k, family.heads.v
        spans = {q: rows(0, shared * r, r), k: rows(0, r, r), v: rows(0, r_v, r_v)}
    elif layout == "stacked":
        parts = [rows(0, shared * r, r), rows(h * r, r, r), rows((h + g) * r, r, r)]
        spans = {family.heads.q: [span for part in parts for span in part]}
    else:
        parts = [rows(place * r, (shared + 2) * r, r) for place in (0, shared, shared + 1)]
        spans = {family.heads.q: [span for group in zip(*parts, strict=True) for span in group]}
    replaced: dict[str, Tensor] = {}
    for module, of_module in spans.items():
        for kind in ("weight", "bias"):
            name = f"{stem}{module}.{kind}"
            if name in model.checkpoint:
                replaced[name] = _Rows(model.checkpoint[name], tuple(of_module))
    out, d = f"{stem}{family.heads.out}.weight", config.d_model
    read: Spans = ((0, d),)
    if d > OUTPUT_ROWS:
        starts = evenly_spread(d - RUN + 1, OUTPUT_ROWS // RUN).tolist()
        read = tuple((start, start + RUN) for start in starts)
    columns = tuple(rows(0, shared * r_v, r_v))
    replaced[out] = _Columns(model.checkpoint[out], read, columns=columns)
    return replaced


def _value_dim(model: Model) -> int:
    """The width of a head's values."""
    return sum(map(model.config.size, model.family.heads.value_dim)) or model.config.head_dim


def _nested(count: int) -> list[int]:
    """The indices below `count` in an order whose beginnings are evenly spread."""
    bits = max(1, (count - 1).bit_length())
    mirrored = (int(format(k, f"0{bits}b")[::-1], 2) for k in range(1 << bits))
    return [k for k in mirrored if k < count]


def _is_split(model: Model, index: int) -> bool:
    """True if heads are rows of stored matrices and nothing else depends on the head."""
    config, family = _of_layer(model, index)
    sizes = config.n_heads, config.n_kv_heads, config.head_dim
    smaller = in_layer(replace(config, n_heads=1, n_kv_heads=1), family, index)[0]
    heads, qk_norm = family.heads, family.scores.qk_norm
    is_plain = (
        heads.layout.__name__ in SPLIT
        and family.reads == Reads()
        and family.memory is None
        and family.positions.bias is None
        and not (heads.transposed or heads.others or heads.loose or heads.shared)
        and (qk_norm is None or qk_norm.scope == "shared")
    )
    is_usual = sizes == (model.config.n_heads, model.config.n_kv_heads, model.config.head_dim)
    keeps_width = (smaller.n_heads, smaller.head_dim) == (1, config.head_dim)
    if not is_plain or not is_usual or not keeps_width:
        return False
    h, g, r, r_v, d = *sizes, _value_dim(model), config.d_model
    shapes = {heads.q: (h * r, d), heads.k: (g * r, d), heads.v: (g * r_v, d)}
    if heads.layout.__name__ != "separate":
        shapes = {heads.q: ((h + 2 * g) * r, d)}
    shapes |= {heads.out: (d, h * r_v)}
    for module, shape in shapes.items():
        tensor = model.checkpoint.get(f"{model.stem(index)}{module}.weight")
        if not isinstance(tensor, StoredTensor) or tensor.shape != shape:
            return False
    return True
