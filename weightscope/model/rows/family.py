"""A family of architectures as a row of data."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from weightscope.checkpoint.config import Config
from weightscope.model.config.config import KEYS, ModelConfig
from weightscope.model.config.rope import GridRope, Rope
from weightscope.model.layers.steps import Reads, Step
from weightscope.model.rows.cells import (
    FeedForward,
    FromConfig,
    Gguf,
    Heads,
    Images,
    Memory,
    Names,
    Norms,
    Outputs,
    Positions,
    RowInputs,
    Scores,
    StoredNorm,
    cell,
)


class When:
    """Cells that change if the config has a value: `When("pre_norm", False, norms__before=None)`.

    `group__cell` is a cell of a group; `steps__gate` is the step of that name, None for none.
    """

    def __init__(self, key: str, value: object, **cells: Any) -> None:
        self.key, self.value, self.cells = key, value, cells

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = object.__hash__

    def holds(self, values: Mapping[str, Any]) -> bool:
        """True if a config with these values is meant."""
        return bool(values.get(self.key) == self.value)

    @property
    def of_attention(self) -> dict[str, Any]:
        """Cells that do not belong to the feed-forward network."""
        return {
            name: cell
            for name, cell in self.cells.items()
            if name.partition("__")[0] not in ("mlp", "parallel")
        }


class Unless(When):
    """Cells that change if the config has no such value: `Unless("mode", "rotary", ...)`."""

    def holds(self, values: Mapping[str, Any]) -> bool:
        return not super().holds(values)


class In:
    """Cells that differ in layers of a type: `In("sliding_attention", sinks="self_attn.sinks")`."""

    def __init__(self, layer_type: str, **cells: Any) -> None:
        self.layer_type, self.cells = layer_type, cells

    def __eq__(self, other: object) -> bool:
        return isinstance(other, In) and vars(self) == vars(other)

    __hash__ = object.__hash__


def turning(rope: Rope | GridRope | None) -> dict[str, Any]:
    """The change of a row that gives it this rotation."""
    return {"positions__grid" if isinstance(rope, GridRope) else "positions__rope": rope}


def group(doc: str, default: Any = None, **more: Any) -> Any:
    """A field whose own fields are cells; a stanza states some of them and inherits the others."""
    return cell(doc, default, group=True, **more)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the table of architectures: cells for common parts, steps for rare mechanisms."""

    name: str = ""
    types: Names = ()  # the `model_type` values of config.json that the row reads
    # "text", "vision", "encoder", "cross" ... in models of several stacks; each has a row then
    tower: str = ""

    prefixes: Names = cell(
        "what stands before tensors' names: it is found, unless two models of a file fit; "
        "then the first of these",
        ("",),
    )
    layer: str = cell("a layer's name before its modules, with {i} for its index", "")
    part: str = cell(
        "key of the part of config.json that describes this stack, where there is one", ""
    )
    heads: Heads = group("the projections", Heads())
    norms: Norms = group("norms before and after attention", Norms())
    memory: Memory | None = cell(
        "true in cross-attention; or { norm = ... }, the layer's norm of its second input", None
    )
    inputs: RowInputs = group("what enters the first layer", RowInputs())
    outputs: Outputs | None = group(
        "how logits are made; false without logits of tokens, or where that is not linear"
    )
    positions: Positions = group("what positions do to scores", Positions())
    scores: Scores = group("how scores are made", Scores())
    mlp: FeedForward | None = group(
        "the feed-forward network; not inherited unless `mlp = true`", stated=True
    )
    mixer: Names = cell(
        "kind and module of a mixer without a softmax, in other layers or next to "
        'attention: "mamba2:mixer"; kinds are mamba, mamba2, delta, kda, conv, lightning, rglru, '
        "rwkv",
        (),
    )
    parallel: bool = cell("attention and the network read the same stream", False)
    also: Mapping[str, Names] = cell(
        "modules by role that nothing is computed from; not inherited unless `also = true`: "
        '{ router = "mlp.gate", "expert.{gate,up}" = "experts.{e}.{w1,w3}" }; '
        '"... as (in, out)" where stored so',
        make=dict,
    )
    config: FromConfig = group("what config.json calls things", FromConfig())
    images: Images | None = cell(
        "how photographs are prepared: transformers' image processor and its settings", None
    )
    in_transformers: Mapping[str, Any] = cell(
        "cells that differ in transformers' own model: { heads.q = ... }", make=dict
    )
    gguf: Gguf | None = group(
        "what a GGUF file changes; rows that start from this one read such files too", stated=True
    )
    notes: Names = cell("what else the matrices leave out", ())
    refused: str = cell("why such a model is not read", "")
    steps: tuple[Step, ...] = ()
    when: tuple[When, ...] = cell(
        "[{ key, is or is_not, cells ... }]: cells that change with a value of the config; "
        "applied in order",
        (),
    )
    in_: tuple[In, ...] = cell("[{ layers, cells ... }]: cells that differ in layers of a type", ())
    proved_for: str = ""  # digest of the config that an adopted row was proved with
    origin: str = ""  # the row's source, if not the table, or if not proved for this model_type

    def __repr__(self) -> str:
        tower = f", {self.tower}" if self.tower else ""
        return f"Family({self.called}{tower})"

    @property
    def called(self) -> str:
        """Its name, with its origin where that matters."""
        return f"{self.name} ({self.origin})" if self.origin else self.name

    @property
    def reads(self) -> Reads:
        """Names in a checkpoint that its steps read."""
        return sum((step.reads() for step in self.steps), Reads())

    @property
    def rope(self) -> Rope | GridRope | None:
        """Rotation of queries and keys, from `rope` or `grid`."""
        return self.positions.rope or self.positions.grid

    @property
    def modules(self) -> Names:
        """Every module of a layer that the row reads, and `heads.others`."""
        heads, qk_norm = self.heads, self.scores.qk_norm
        qk = (qk_norm.query, qk_norm.key) if qk_norm else ()
        norms = [
            norm.module for norm in (self.norms.before, self.memory and self.memory.norm) if norm
        ]
        named = (*heads.projections, *heads.others, *norms, *qk, *self.reads.modules)
        return tuple(dict.fromkeys(filter(None, named)))

    @property
    def stored_norms(self) -> dict[str, StoredNorm]:
        """Norms around attention and network and at both ends of the model, by their roles."""
        mlp, outputs = self.mlp, self.outputs
        named = {
            "norm.before": self.norms.before,
            "norm.after": self.norms.after,
            "norm.inputs": self.inputs.norm,
            "norm.memory": self.memory and self.memory.norm,
            "norm.mlp": mlp and mlp.norm,
            "norm.after_attention": mlp and mlp.after_attention,
            "norm.attention_output": mlp and mlp.attention_norm,
            "norm.mlp_output": mlp and mlp.output_norm,
            "norm.outputs": outputs and outputs.norm,
        }
        return {role: norm for role, norm in named.items() if norm}

    @property
    def roles(self) -> dict[str, str]:
        """The module of each role that the row names, one that holds several as "q+k+v".

        Modules of a layer are named within it; tokens, positions, types, unembedding, norm.inputs
        and norm.outputs within the model.
        """
        heads, inputs, outputs, mlp = self.heads, self.inputs, self.outputs, self.mlp
        named = [("q", heads.q), ("k", heads.k), ("v", heads.v), ("o", heads.out)]
        if self.scores.qk_norm:
            named += [("q_norm", self.scores.qk_norm.query), ("k_norm", self.scores.qk_norm.key)]
        if mlp:
            named += [("gate", mlp.gate), ("up", mlp.up), ("down", mlp.down)]
        shared: dict[str, list[str]] = {}
        for role, module in named:
            shared.setdefault(module, []).append(role)
        modules = {"+".join(roles): module for module, roles in shared.items()}
        modules |= {"tokens": inputs.tokens, "positions": inputs.positions, "types": inputs.types}
        if outputs:
            modules["unembedding"] = next(iter(outputs.tokens), "")
        modules |= {role: norm.module for role, norm in self.stored_norms.items()}
        return {role: module.removesuffix(".weight") for role, module in modules.items() if module}

    @property
    def output_module(self) -> str:
        """The module whose output attention adds to the stream: W_O, or a scale after it."""
        of_steps = (step.output_module for step in self.steps if step.output_module)
        return next(of_steps, self.heads.out)

    @property
    def of_keys(self) -> Names:
        """The modules that make a layer's keys and values."""
        qk_norm = self.scores.qk_norm
        return tuple(filter(None, (self.heads.k, self.heads.v, qk_norm.key if qk_norm else "")))

    @property
    def lone(self) -> Names:
        """Every tensor of a layer that belongs to none of its modules."""
        return (*self.heads.loose, *self.reads.tensors)

    @property
    def size_keys(self) -> Mapping[str, Names]:
        """Config keys of every size, by meaning: the usual ones unless the row has its own.

        A key that the row has a default for comes first: the code reads that one.
        """
        keys, defaults = {**KEYS, **self.config.keys}, self.config.defaults
        return {
            meaning: tuple(sorted(names, key=lambda name: name not in defaults))
            for meaning, names in keys.items()
        }

    @property
    def names(self) -> set[str]:
        """Config keys that the row reads a size from."""
        of_heads = (self.heads.kv_heads, self.heads.head_dim, self.heads.value_dim)
        keys = {self.config.listed}.union(*self.size_keys.values())
        return keys.union(*(names for names in of_heads if isinstance(names, tuple)))

    def synonyms(self, keys: Collection[str]) -> set[str]:
        """All keys that have the meaning of one of these."""
        alike = [same for same in self.size_keys.values() if not set(same).isdisjoint(keys)]
        return set().union(*alike)

    def norm_of(self, layer: int) -> StoredNorm | None:
        """The norm that feeds attention in one layer."""
        norm = self.norms.before
        return None if norm is None or layer in norm.without else norm

    def keys_of(self, config: ModelConfig, layer: int) -> int:
        """The layer whose keys and values a layer attends to: itself, unless a step differs."""
        lenders = (step.keys_of(config, layer) for step in self.steps)
        return next((lender for lender in lenders if lender != layer), layer)

    def stored_name(self, config: ModelConfig, layer: int) -> str:
        """A layer's name in the file, before its modules."""
        return self.layer.format(i=self.config.stored_layer(config, layer))

    def but(self, **changes: Any) -> "Family":
        """The row with some cells changed; `group__cell` is a cell of a group.

        `steps__name` replaces the step of that name or adds it, None removes it. `config__defaults`
        are added. A cell of a group that is None is left. `rope` and `grid` replace each other. A
        default replaces one with the same meaning under another key, which the code does not read.
        """
        fields: dict[str, Any] = {}
        for path, value in changes.items():
            name, _, part = path.partition("__")
            current = fields.get(name, getattr(self, name))
            if name == "steps" and part:
                value = _with_step(current, part, value)
            elif path == "config__defaults":
                stated = self.synonyms(value)
                kept = {key: usual for key, usual in current.defaults.items() if key not in stated}
                value = replace(current, defaults=kept | {**value})
            elif part:
                value = _with_part(current, part, value)
            fields[name] = value
        return replace(self, **fields)

    def without_network(self) -> "Family":
        """The row without its feed-forward network."""
        of_attention = [(when, when.of_attention) for when in self.when]
        kept = (type(when)(when.key, when.value, **cells) for when, cells in of_attention if cells)
        return replace(self, mlp=None, parallel=False, when=tuple(kept))

    def completed(self, values: Mapping[str, Any], file: object) -> Config:
        """A config of these values, with values that follow from them."""
        config = Config(values, file)
        if self.config.derived is None:
            return config
        return Config({**values, **self.config.derived(config)}, file)

    def in_layer(self, layer_type: str) -> "Family":
        """The row for layers of a type."""
        row = self
        for addition in self.in_:
            if addition.layer_type == layer_type:
                row = row.but(**addition.cells)
        return row

    def configured(self, values: Mapping[str, Any]) -> "Family":
        """The row as a config with these values makes it."""
        row = self
        for when in self.when:
            if when.holds(values):
                row = row.but(**when.cells)
        return row


def _with_part(cell: Any, path: str, value: Any) -> Any:
    """A cell with another value of one of its parts; None where there is no such cell."""
    if cell is None:
        return None
    part, _, inner = path.partition("__")
    if inner:
        value = _with_part(getattr(cell, part), inner, value)
    elif isinstance(cell, Positions) and part in ("rope", "grid"):
        cell = replace(cell, rope=None, grid=None)
    return replace(cell, **{part: value})


def _with_step(steps: tuple[Step, ...], name: str, step: Step | None) -> tuple[Step, ...]:
    """Steps with one replaced or added by name, or removed."""
    if step is not None and step.name != name:
        raise ValueError(f"steps__{name} was given the step '{step.name}'")
    if step is None:
        return tuple(kept for kept in steps if kept.name != name)
    if any(kept.name == name for kept in steps):
        return tuple(step if kept.name == name else kept for kept in steps)
    return (*steps, step)
