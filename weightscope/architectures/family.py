"""What a family of architectures is: a row of data."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from weightscope.architectures.cells import (
    NO_BIASES,
    Biases,
    FeedForward,
    Gguf,
    Images,
    Inputs,
    LayerTensors,
    Memory,
    Outputs,
    QkNorm,
    StoredNorm,
)
from weightscope.architectures.config import KEYS, LayerTypes, ModelConfig, all_full, listed_sizes
from weightscope.architectures.rope import GridRope, Rope
from weightscope.architectures.step import Reads, Step
from weightscope.attention.layer import Layer
from weightscope.attention.positions import Buckets, Slopes, WindowBias
from weightscope.checkpoint.config import Config


class When:
    """Cells of a row that change when the config holds a value: `When("do_layer_norm_before", False, norm=None)`.

    `cell__part` reaches into a cell: `inputs__types=""`; `steps__gate` is the step of that name, None for none.
    """

    def __init__(self, key: str, value: object, **cells: Any) -> None:
        self.key, self.value, self.cells = key, value, cells

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether a config with these values is meant."""
        return bool(values.get(self.key) == self.value)

    @property
    def of_attention(self) -> dict[str, Any]:
        """The cells that are not of the feed-forward network."""
        return {name: cell for name, cell in self.cells.items() if name.partition("__")[0] not in ("mlp", "parallel")}


class Unless(When):
    """Cells of a row that change when the config holds any other value, or none: `Unless("mode", "rotary", ...)`."""

    def holds(self, values: Mapping[str, Any]) -> bool:
        return not super().holds(values)


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


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the table of architectures: cells for what many have, and steps for what few have."""

    name: str
    model_types: tuple[str, ...]  # the `model_type` values of config.json that the row reads

    # where: names of modules and tensors
    prefixes: tuple[str, ...]  # before every tensor's name; the one is taken that inputs or the first layer are under
    layer: str  # a layer's name before its modules, with `{i}` for its index
    stored_layer: Callable[[ModelConfig, int], int] = same_layer  # the index under which a layer's tensors are stored
    attentions: int = 1  # layers of attention in each layer of the model
    tower: str = ""  # "text", "vision", "encoder", "cross" ... in models of several stacks; each has a row then
    nested: str = ""  # key of the part of config.json that describes this model, where it has such a part
    inputs: Inputs
    outputs: Outputs | None = None  # None without logits of tokens, or where what makes them is not linear
    others: tuple[str, ...] = ()  # further modules of a layer that the layout reads
    loose: tuple[str, ...] = ()  # further tensors of a layer that belong to no module
    shared: tuple[str, ...] = ()  # tensors of the model that every layer reads
    # Modules within attention that are not read: norms of its output, what a caveat names.
    ignored: tuple[str, ...] = ()

    # heads: how projections lie in the file
    layout: Layout
    query: str  # its module; the same as of keys and values where one tensor holds all
    key: str
    value: str
    output: str
    biases: Biases = NO_BIASES
    kv_heads: int | tuple[str, ...] = ()  # their number, or config keys to try; as many as query heads without any
    head_dim: tuple[str, ...] = ()  # config keys that add up to a head's width; d / H unless all are there
    value_dim: tuple[str, ...] = ()  # likewise of a head's values; the width of queries and keys where there are none
    memory: Memory | None = None  # the second input of cross-attention

    # norms
    norm: StoredNorm | None  # before attention; None where attention reads the layer's input as it is
    closing: StoredNorm | None = None  # of post-norm models: the norm that a layer's output has come out of

    # positions
    rope: Rope | GridRope | None = None
    additive: Additive | None = None  # a term of scores by distance, read of the model's tensors

    # scores
    scale: Callable[[ModelConfig, int], float] = default_scale
    qk_norm: QkNorm | None = None

    # mlp
    mlp: FeedForward | None = None  # None where the network is not known
    parallel: bool = False  # attention and the network read the same stream

    # config
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # unusual keys of sizes, by meaning (config.KEYS)
    listed: str = "layer_types"  # key of the layers' types, where the config lists them
    layer_types: LayerTypes = all_full  # every layer's type where it does not
    attention_types: tuple[str, ...] = ()  # types of layers that are attention; empty means all
    sizes: Callable[[ModelConfig, int], Mapping[str, Any]] = listed_sizes  # values of keys that differ in one layer
    derived: Callable[[Config], Mapping[str, Any]] | None = None  # values of keys that follow from others
    defaults: Mapping[str, Any] = field(default_factory=dict)  # what config.json may leave out

    # formats
    gguf: Gguf | None = None  # rows made from this one have it too; the first of them reads such files
    transposed: tuple[str, ...] = ()  # last parts of the names of modules whose weights are stored as (in, out)
    images: Images | None = None  # None in a model that sees none
    leading: tuple[tuple[str, int | str], ...] = ()  # tokens before an image's patches: kinds, and numbers or their key
    in_transformers: Mapping[str, str] = field(default_factory=dict)  # cells that differ in transformers' own modules

    # steps, and what a config or a layer changes
    steps: tuple[Step, ...] = ()
    in_layers: tuple[In, ...] = ()
    variants: tuple[When, ...] = ()  # applied in order
    caveats: tuple[str, ...] = ()  # what else the matrices leave out
    refused: str = ""  # why a model so configured cannot be read
    proved_for: str = ""  # digest of the config that an adopted row was proved with
    origin: str = ""  # of a row that is not the table's, or reads what it does not list: where it comes from

    def __repr__(self) -> str:
        tower = f", {self.tower}" if self.tower else ""
        return f"Family({self.called}{tower})"

    @property
    def called(self) -> str:
        """Its name, and what a reader should know of the row."""
        return f"{self.name} ({self.origin})" if self.origin else self.name

    @property
    def reads(self) -> Reads:
        """What its steps read."""
        return sum((step.reads() for step in self.steps), Reads())

    @property
    def modules(self) -> tuple[str, ...]:
        """Every module of a layer that the row reads, and `others`."""
        qk = (self.qk_norm.query, self.qk_norm.key) if self.qk_norm else ()
        norms = [norm.module for norm in (self.norm, self.memory and self.memory.norm) if norm]
        named = (self.query, self.key, self.value, self.output, *self.others, *norms, *qk, *self.reads.modules)
        return tuple(dict.fromkeys(filter(None, named)))

    @property
    def output_module(self) -> str:
        """The module whose output attention adds to the stream: W_O, or a scale after it."""
        return next((step.output_module for step in self.steps if step.output_module), self.output)

    @property
    def of_keys(self) -> tuple[str, ...]:
        """The modules that make a layer's keys and values."""
        return tuple(filter(None, (self.key, self.value, self.qk_norm.key if self.qk_norm else "")))

    @property
    def lone(self) -> tuple[str, ...]:
        """Every tensor of a layer that belongs to none of its modules."""
        return (*self.loose, *self.reads.tensors)

    @property
    def size_keys(self) -> Mapping[str, tuple[str, ...]]:
        """Config keys of every size, by meaning: the usual ones, but for those that the row has of its own.

        First the one that the row has a default for: it is what the code reads, whatever else a file has.
        """
        keys = {**KEYS, **self.keys}
        return {
            meaning: tuple(sorted(names, key=lambda name: name not in self.defaults)) for meaning, names in keys.items()
        }

    @property
    def names(self) -> set[str]:
        """Every config key that the row reads a size from."""
        of_heads = (self.kv_heads, self.head_dim, self.value_dim)
        keys = (*self.size_keys.values(), *(names for names in of_heads if isinstance(names, tuple)), (self.listed,))
        return {key for names in keys for key in names}

    def synonyms(self, keys: Collection[str]) -> set[str]:
        """All keys that have the meaning of one of these."""
        return {key for same in self.size_keys.values() if not set(same).isdisjoint(keys) for key in same}

    def norm_of(self, layer: int) -> StoredNorm | None:
        """The norm that feeds attention in one layer."""
        return None if self.norm is None or layer in self.norm.without else self.norm

    def keys_of(self, config: ModelConfig, layer: int) -> int:
        """The layer whose keys and values a layer attends to: itself, unless a step says otherwise."""
        lenders = (step.keys_of(config, layer) for step in self.steps)
        return next((lender for lender in lenders if lender != layer), layer)

    def stored_name(self, config: ModelConfig, layer: int) -> str:
        """A layer's name in the file, before its modules."""
        return self.layer.format(i=self.stored_layer(config, layer))

    def but(self, **changes: Any) -> "Family":
        """The same row with some cells changed; `cell__part` reaches into a cell, `defaults` are added to.

        `steps__name` replaces the step of that name or adds it, None removes it. A part of a cell that is None is left.
        A default takes the place of one that has the same meaning under another key: that is not what the code reads.
        """
        cells: dict[str, Any] = {}
        for name, value in changes.items():
            cell, _, part = name.partition("__")
            current = cells.get(cell, getattr(self, cell))
            if cell == "steps" and part:
                value = _with_step(current, part, value)
            elif part:
                value = current and replace(current, **{part: value})
            elif name == "defaults":
                stated = self.synonyms(value)
                value = {key: usual for key, usual in self.defaults.items() if key not in stated} | {**value}
            cells[cell] = value
        return replace(self, **cells)

    def without_network(self) -> "Family":
        """The row of attention alone: its feed-forward network is not known."""
        kept = [
            type(when)(when.key, when.value, **attention) for when in self.variants if (attention := when.of_attention)
        ]
        return replace(self, mlp=None, parallel=False, variants=tuple(kept))

    def completed(self, values: Mapping[str, Any], file: object) -> Config:
        """A config of these values with those that follow from them."""
        config = Config(values, file)
        return config if self.derived is None else Config({**values, **self.derived(config)}, file)

    def in_layer(self, layer_type: str) -> "Family":
        """The row as layers of a type have it."""
        row = self
        for addition in self.in_layers:
            if addition.layer_type == layer_type:
                row = row.but(**addition.cells)
        return row

    def configured(self, values: Mapping[str, Any]) -> "Family":
        """The row as a config with these values makes it."""
        row = self
        for when in self.variants:
            if when.holds(values):
                row = row.but(**when.cells)
        return row


def _with_step(steps: tuple[Step, ...], name: str, step: Step | None) -> tuple[Step, ...]:
    """Steps with another of that name, in its place or at the end, or with none."""
    if step is not None and step.name != name:
        raise ValueError(f"steps__{name} was given the step '{step.name}'")
    if step is None:
        return tuple(kept for kept in steps if kept.name != name)
    if any(kept.name == name for kept in steps):
        return tuple(step if kept.name == name else kept for kept in steps)
    return (*steps, step)
