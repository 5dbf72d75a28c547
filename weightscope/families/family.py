"""What a family of architectures is: a row of data."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from weightscope.attention.layer import Layer
from weightscope.attention.position_bias import BiasGate, Buckets, Slopes, WindowBias
from weightscope.attention.relative import RelativeValues
from weightscope.attention.temperature import Temperature
from weightscope.checkpoint.config import Config
from weightscope.families.cells import (
    NO_BIASES,
    Biases,
    Gate,
    Gguf,
    Images,
    Inputs,
    Memory,
    Outputs,
    QkNorm,
    StoredNorm,
)
from weightscope.families.config import KEYS, LayerTypes, ModelConfig, all_full, listed_sizes
from weightscope.families.grid_rope import GridRope
from weightscope.families.relative import Relative
from weightscope.families.rope import Rope
from weightscope.families.tensors import LayerTensors


class When:
    """Cells of a row that change when the config holds a value: `When("do_layer_norm_before", False, norm=None)`.

    `part__cell` reaches into a cell: `inputs__types=""`.
    """

    def __init__(self, key: str, value: object, **cells: Any) -> None:
        self.key, self.value, self.cells = key, value, cells


class In:
    """Cells of a row that are others in layers of a type: `In("sliding_attention", sinks="self_attn.sinks")`."""

    def __init__(self, layer_type: str, **cells: Any) -> None:
        self.layer_type, self.cells = layer_type, cells


def default_scale(config: ModelConfig, layer: int) -> float:
    """1 / sqrt(d'), the usual scale of attention scores."""
    return float(config.head_dim**-0.5)


def same_layer(config: ModelConfig, layer: int) -> int:
    """Layer i has tensors of its own, under index i."""
    return layer


Layout = Callable[[LayerTensors, "Family", ModelConfig], Layer]
Additive = Callable[[LayerTensors, ModelConfig, int], Slopes | Buckets | WindowBias]


@dataclass(frozen=True)
class Family:
    """One row of the table of architectures.

    Attributes
    ----------
    name : str
    model_types : tuple of str
        The `model_type` values of config.json that this row reads.
    prefixes : tuple of str
        What may stand before every tensor's name; the one that `inputs` or the first layer is found under is taken.
    layer : str
        A layer's name before its modules, with `{i}` for its index.
    layout : function of (LayerTensors, Family, ModelConfig) -> Layer
        Reads the projections of a layer and splits them by head.
    query, key, value, output : str
        Modules of the projections within a layer; the three former are equal where one tensor holds all.
    others, loose : tuple of str
        Further modules that the layout reads, and further tensors of a layer that belong to no module.
    beside : tuple of str
        Modules within attention that heads are no part of: a norm of what it gives, or what a caveat names.
    shared : tuple of str
        Tensors of the model that every layer reads.
    frozen : dict of function of ModelConfig
        What the model's tensors of these names hold if the row is to read it: they follow a formula.
    inputs : Inputs
    outputs : Outputs or None
        None where there are no logits of tokens, or what makes them is not linear (masked language models).
    norm : StoredNorm or None
        The norm that feeds attention; None where attention reads the layer's input as it is.
    memory : Memory or None
        The second input of cross-attention; None where keys and values are made of the stream.
    added : tuple of str
        "queries", "keys": to which of what they are made of positions are added, and not to what values are made of.
    closing : StoredNorm or None
        The norm that a layer's output has come out of (post-norm models).
    gate : Gate or None
        The gate of what heads have gathered, where it is a module of its own.
    sub_norm : StoredNorm or None
        A norm of what all heads have gathered, before W_O.
    heads_normed : bool
        An RMSNorm without parameters divides what each head has gathered, before a gate.
    biases : Biases
    qk_norm : QkNorm or None
    rope : Rope, GridRope or None
    additive : function of (LayerTensors, ModelConfig, layer index) giving a term by distance, or None
        The tensors are the model's, not the layer's.
    additive_gate : function of (LayerTensors, ModelConfig) giving what a query multiplies that term by, or None
    relative : function of (LayerTensors, LayerTensors, ModelConfig) giving keys of distances, or None
        Of the model's tensors and the layer's.
    relative_values : function of (LayerTensors, ModelConfig) giving values of distances, or None
    query_bias : str
        Tensor (H, r) that is added to queries; empty where there is none.
    scale : function of (ModelConfig, layer index) -> float
    temperature : function of (ModelConfig, layer index) -> Temperature or None, or None
        What multiplies queries by position.
    softcap : str
        Config key of the cap c in c tanh(score / c); empty where there is none.
    clip : tuple of str
        Config keys, outermost first, of the bound q, k and v are clipped to.
    sinks : str
        Tensor of learned sink logits in a layer; empty where there is none.
    outer_sinks : str
        Likewise, of logits that attention does not know of: what is left beside them multiplies what a head gathers.
    transposed : tuple of str
        Last parts of the names of modules whose weights are stored as (in, out).
    choosing : tuple of str
        Modules that choose which keys a query sees. They are part of the mask: scores are the model's where it sees.
    output_scale : str
        Tensor that multiplies the layer's output (LayerScale).
    kv_heads : int or tuple of str
        Number of key-value heads, or the config keys to try; none of them there means as many as query heads.
    head_dim : tuple of str
        Config keys that add up to a head's width; not all there means d / H.
    keys : dict of tuple of str
        Config keys of a size where they are none of the usual ones (`families.config.KEYS`), by meaning.
    value_dim : tuple of str
        Config keys that add up to the width of a head's values; none where it is that of queries and keys.
    latent_eps : float or None
        Of the norms of latents; None where it is the config's.
    differences : str
        The attention module, where its maps are subtracted from one another; empty where they are not.
    latents_scaled : bool
        What comes out of a latent of rank m is multiplied by sqrt(d / m).
    values_normed : bool
        An RMSNorm without parameters divides each head's values.
    multipliers : dict of str
        Config keys of what multiplies the projections' "input", the "key" or the "value".
    listed : str
        Config key of the layers' types, where the config lists them.
    derived : function of Config -> dict, or None
        Values of config keys that follow from those of others: the sizes of one stage, heads of a fixed width.
    sizes : function of (ModelConfig, layer index) -> dict
        Values of config keys that are others in one layer.
    in_layers : tuple of In
    layer_types : function of (Config, n_layers) -> tuple of str
        Every layer's type where the config does not list them.
    attention_types : tuple of str
        Types of layers that are attention; empty means all.
    stored_layer : function of (ModelConfig, layer index) -> int
        Under which index a layer's tensors stand.
    attentions : int
        How many layers of attention each layer of the model has.
    keys_of : function of (ModelConfig, layer index) -> int
        The layer whose keys and values a layer attends to, its own as a rule.
    tower : str
        "text", "vision", "audio", "encoder", "decoder" or "cross" in models of several stacks; each has a row then.
    nested : str
        Key of the part of config.json that describes this model, where it has such a part.
    leading : tuple of (str, int or str)
        In a model that sees images, what stands before the patches: kinds of token, and how many there are of each or
        the config key that says so.
    gguf : Gguf or None
        None where such files are not read. Rows made from this one have it too; the first of them reads the files.
    images : Images or None
        None in a model that sees none.
    in_transformers : dict of str
        Cells that are others in transformers' own model, where its modules have other names than the checkpoint's
        tensors.
    caveats : tuple of str
        What else the matrices leave out.
    refused : str
        Why a model so configured cannot be read; empty where it can.
    variants : tuple of When
        Applied in order.
    defaults : dict
        What config.json may leave out because it equals the architecture's default.
    origin : str
        How a row came about that is not the table's, or is used for what it does not list; empty otherwise.
    """

    name: str
    model_types: tuple[str, ...]
    prefixes: tuple[str, ...]
    layer: str
    layout: Layout
    query: str
    key: str
    value: str
    output: str
    inputs: Inputs
    norm: StoredNorm | None
    outputs: Outputs | None = None
    memory: Memory | None = None
    added: tuple[str, ...] = ()
    closing: StoredNorm | None = None
    others: tuple[str, ...] = ()
    loose: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    frozen: Mapping[str, Callable[[ModelConfig], np.ndarray]] = field(default_factory=dict)
    gate: Gate | None = None
    sub_norm: StoredNorm | None = None
    heads_normed: bool = False
    biases: Biases = NO_BIASES
    qk_norm: QkNorm | None = None
    rope: Rope | GridRope | None = None
    additive: Additive | None = None
    additive_gate: Callable[[LayerTensors, ModelConfig], BiasGate] | None = None
    relative: Relative | None = None
    relative_values: Callable[[LayerTensors, ModelConfig], RelativeValues] | None = None
    query_bias: str = ""
    scale: Callable[[ModelConfig, int], float] = default_scale
    temperature: Callable[[ModelConfig, int], Temperature | None] | None = None
    softcap: str = ""
    clip: tuple[str, ...] = ()
    sinks: str = ""
    outer_sinks: str = ""
    transposed: tuple[str, ...] = ()
    choosing: tuple[str, ...] = ()
    output_scale: str = ""
    kv_heads: int | tuple[str, ...] = ()
    head_dim: tuple[str, ...] = ()
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    value_dim: tuple[str, ...] = ()
    latent_eps: float | None = 1e-6
    differences: str = ""
    latents_scaled: bool = False
    values_normed: bool = False
    multipliers: Mapping[str, str] = field(default_factory=dict)
    listed: str = "layer_types"
    derived: Callable[[Config], Mapping[str, Any]] | None = None
    sizes: Callable[[ModelConfig, int], Mapping[str, Any]] = listed_sizes
    in_layers: tuple[In, ...] = ()
    layer_types: LayerTypes = all_full
    attention_types: tuple[str, ...] = ()
    stored_layer: Callable[[ModelConfig, int], int] = same_layer
    attentions: int = 1
    keys_of: Callable[[ModelConfig, int], int] = same_layer
    tower: str = ""
    nested: str = ""
    leading: tuple[tuple[str, int | str], ...] = ()
    gguf: Gguf | None = None
    images: Images | None = None
    in_transformers: Mapping[str, str] = field(default_factory=dict)
    caveats: tuple[str, ...] = ()
    refused: str = ""
    variants: tuple[When, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""

    @property
    def called(self) -> str:
        """Its name, and what a reader should know of the row."""
        return f"{self.name} ({self.origin})" if self.origin else self.name

    @property
    def modules(self) -> tuple[str, ...]:
        """Every module of a layer that the row reads, and `others`."""
        qk = (self.qk_norm.query, self.qk_norm.key) if self.qk_norm else ()
        stored = (self.norm, self.memory and self.memory.norm, self.sub_norm)
        norms = [norm.module for norm in stored if norm]
        gate = self.gate.module if self.gate else ""
        scale = self.output_scale.rpartition(".")[0]
        named = (self.query, self.key, self.value, self.output, *self.others, *norms, *qk, gate, scale)
        return tuple(dict.fromkeys(filter(None, named)))

    @property
    def of_keys(self) -> tuple[str, ...]:
        """The modules that make a layer's keys and values."""
        return tuple(filter(None, (self.key, self.value, self.qk_norm.key if self.qk_norm else "")))

    @property
    def lone(self) -> tuple[str, ...]:
        """Every tensor of a layer that belongs to none of its modules."""
        return (*self.loose, self.sinks, self.outer_sinks, self.gate.of_heads if self.gate else "")

    @property
    def size_keys(self) -> Mapping[str, tuple[str, ...]]:
        """Config keys of every size, by meaning: the usual ones, but for those that the row has of its own.

        First the one that the row has a default for: it is what the code reads, whatever else a file has.
        """
        keys = {**KEYS, **self.keys}
        return {
            meaning: tuple(sorted(names, key=lambda name: name not in self.defaults)) for meaning, names in keys.items()
        }

    def synonyms(self, keys: Collection[str]) -> set[str]:
        """All keys that have the meaning of one of these."""
        return {key for same in self.size_keys.values() if not set(same).isdisjoint(keys) for key in same}

    def norm_of(self, layer: int) -> StoredNorm | None:
        """The norm that feeds attention in one layer."""
        return None if self.norm is None or layer in self.norm.without else self.norm

    def stored_name(self, config: ModelConfig, layer: int) -> str:
        """A layer's name in the file, before its modules."""
        return self.layer.format(i=self.stored_layer(config, layer))

    def but(self, **changes: Any) -> "Family":
        """The same row with some cells changed; `part__cell` reaches into a cell, `defaults` are added to.

        A default takes the place of one that has the same meaning under another key: that is not what the code reads.
        """
        cells: dict[str, Any] = {}
        for name, value in changes.items():
            whole, _, part = name.partition("__")
            if part:
                value = replace(cells.get(whole, getattr(self, whole)), **{part: value})
            elif name == "defaults":
                said = self.synonyms(value)
                value = {key: usual for key, usual in self.defaults.items() if key not in said} | {**value}
            cells[whole] = value
        return replace(self, **cells)

    def completed(self, values: Mapping[str, Any], file: object) -> Config:
        """A config of these values with those that follow from them."""
        config = Config(values, file)
        return config if self.derived is None else Config({**values, **self.derived(config)}, file)

    def in_layer(self, layer_type: str) -> "Family":
        """The row as layers of a type have it."""
        row = self
        for other in self.in_layers:
            if other.layer_type == layer_type:
                row = row.but(**other.cells)
        return row

    def configured(self, values: Mapping[str, Any]) -> "Family":
        """The row as a config with these values makes it."""
        row = self
        for when in self.variants:
            if values.get(when.key) == when.value:
                row = row.but(**when.cells)
        return row
