"""From a config and a row to the numbers of one model; from no known row to advice."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weightscope.architectures import gguf
from weightscope.architectures.config import MOST_LAYERS, ModelConfig, inner_types, names_of, sizes_of
from weightscope.architectures.dialects import renamed, standardised, writer_of
from weightscope.architectures.family import Family
from weightscope.architectures.stacks import (
    LANGUAGE,
    Stack,
    choose,
    described_parts,
    part_of,
    parts,
    prefixes_of,
    readable,
    refuse_choice,
    unread,
)
from weightscope.architectures.table import FAMILIES, known_rows, unproved
from weightscope.checkpoint import Checkpoint
from weightscope.checkpoint.config import Config, digest_of
from weightscope.errors import CheckpointError, nearest

# How many heads there are and how wide they are: in a model, and in one of its layers.


def head_sizes(config: Config, family: Family) -> tuple[int, int, int]:
    """Query heads, key-value heads, and the width of a head's queries and keys.

    Raises
    ------
    CheckpointError
        A size is absurd, or heads do not divide into groups, or the width into heads.
    """
    keys, kv_heads = family.size_keys, family.heads.kv_heads
    d_model, n_heads = config.size(*keys["d_model"]), config.size(*keys["n_heads"])
    n_kv_heads = kv_heads if isinstance(kv_heads, int) else config.size(*kv_heads, default=n_heads)
    if n_heads % n_kv_heads:
        raise CheckpointError(f"{n_heads} heads do not divide into {n_kv_heads} key-value heads", file=config.file)
    if family.heads.head_dim and all(config.has(key) for key in family.heads.head_dim):
        head_dim = sum(config.count(key) for key in family.heads.head_dim)
    elif d_model % n_heads:
        raise CheckpointError(f"width {d_model} does not divide into {n_heads} heads", file=config.file)
    else:
        head_dim = d_model // n_heads
    return n_heads, n_kv_heads, head_dim


def in_layer(config: ModelConfig, family: Family, index: int) -> tuple[ModelConfig, Family]:
    """A model's numbers and its row as one layer has them: heads and their widths may differ from layer to layer.

    Parameters as of `read_layer`, errors as of `head_sizes`.
    """
    row, sizes = family.in_layer(config.layer_types[index]), family.config.sizes(config, index)
    if row is family and not sizes:
        return config, family
    values = Config({**config.raw, **sizes}, config.file)
    n_heads, n_kv_heads, head_dim = head_sizes(values, row)
    return replace(config, raw=values.raw, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim), row


def attends(config: ModelConfig, family: Family, index: int) -> bool:
    """Whether a layer is attention to what enters it; in hybrid models others are not."""
    kinds = family.config.attention_types
    return (not kinds or config.layer_types[index] in kinds) and family.keys_of(config, index) == index


def borrows(config: ModelConfig, family: Family, index: int) -> bool:
    """Whether a layer is attention of what enters it to keys and values that an earlier layer has made."""
    source = family.keys_of(config, index)
    return source != index and attends(config, family, source)


def kind_of(config: ModelConfig, family: Family, index: int) -> str:
    """What a layer is, in words."""
    source = family.keys_of(config, index)
    layer_type = config.layer_types[index]
    return (
        layer_type
        if source == index
        else f"{layer_type} to keys and values that layer {source} has made of another stream"
    )


# From a config and a row to the numbers of one model; from no known row to advice.

# Alike names are no reason to read it as another family: half of such guesses are wrong. What is proved is right.
ADOPT = "`weightscope adopt SOURCE` looks for a row that reads it and proves it{lacking}; {ways}"
WAYS = (
    "`weightscope adopt SOURCE --with module:Class` does so with a class of your own, `weightscope draft SOURCE` drafts"
    " a row for `--families FILE`, and `weightscope inspect SOURCE --check` needs none"
)


def completed_part(config: Config, part: Config, family: Family) -> Config:
    """The part of a config that describes this model, with the architecture's defaults for what it leaves out.

    A key that is there and null means null, as it does to transformers. A size under one name leaves no default of
    another.
    """
    inherited: dict[str, Any] = {}
    own = f"{config.get('model_type')}.{family.part}"  # a class that is the wrapper's own
    if part.raw is not config.raw:  # a wrapper's part: it may leave its sizes to the architecture, too
        inherited = _left_out(part, family, inner_types(config.get("model_type")).get(family.part), own)
        if config.get("tie_word_embeddings") is True:
            inherited["tie_word_embeddings"] = True
    named = str(part.get("model_type") or inherited.get("model_type") or config.get("model_type"))
    kind = own if part.raw is not config.raw and names_of(own) else named
    said = Config(renamed(part, family, kind), part.file)
    stated = family.synonyms([key for key in said if said.has(key)])
    usual = {key: value for key, value in {**family.config.defaults, **inherited}.items() if key not in stated}
    values = {key: value for key, value in {**usual, **said}.items() if value is not None}
    completed = family.completed(values, config.file)
    return standardised(part, completed.raw, family.configured(completed), kind, writer_of(config))


def _left_out(part: Config, family: Family, wrapped: str | None, own: str) -> dict[str, Any]:
    """The model_type of a part of a wrapper's config, and the sizes that its class has by default."""
    kind = next(filter(None, (part.get("model_type"), wrapped)), family.types[0])
    return {"model_type": kind, **(sizes_of(own) or sizes_of(kind) or sizes_of(family.types[0]))}


def read_config(config: Config, family: Family) -> ModelConfig:
    """Normalise the values of a config.

    Parameters
    ----------
    config : Config
        From `completed_part`.
    family : Family
        As configured by it.

    Raises
    ------
    CheckpointError
        A size is missing, is not a positive integer, or is absurd; heads do not divide into groups, or the width into
        heads.
    """

    keys = family.size_keys

    def optional(meaning: str) -> int | None:
        return config.size(*keys[meaning]) if config.has(*keys[meaning]) else None

    listed = config.get(family.config.listed)
    usual = len(listed) if isinstance(listed, list) else None
    n_layers = config.size(*keys["n_layers"], default=usual, largest=MOST_LAYERS) * family.config.attentions
    d_model = config.size(*keys["d_model"])
    n_heads, n_kv_heads, head_dim = head_sizes(config, family)
    rules = family.config
    types = config.strings(rules.listed, n_layers) if rules.listed in config else rules.layer_types(config, n_layers)
    attending = {kind for kind in types if not family.config.attention_types or kind in family.config.attention_types}
    norm, eps = family.norms.before, 0.0
    if norm is not None and norm.eps is not None:
        eps = norm.eps
    elif norm is not None or config.has(*keys["norm_eps"]):
        eps = config.number(*keys["norm_eps"], largest=1.0)
    return ModelConfig(
        raw=config.raw,
        file=config.file,
        notes=config.notes,
        model_type=str(config.get("model_type")),
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        norm="none" if norm is None else "layer_norm" if norm.centred else "rms_norm",
        norm_eps=eps,
        layer_types=types,
        rope={kind: family.rope.parameters(config, kind) for kind in attending} if family.rope else {},
        n_positions=optional("n_positions"),
        vocab_size=optional("vocab_size"),
    )


@dataclass(frozen=True)
class Reading:
    """How a checkpoint is read as one model: decided once, and handed on.

    Attributes
    ----------
    row : Family
        As the table has it, told where the model is and marked if it was never proved for this kind of model.
    part : Config
        The part of config.json that describes the model, as the file has it.
    prefix : str or None
        What stands before its tensors' names; None where no tensors decided that.
    family : Family
        The row as the config makes it.
    config : ModelConfig
    """

    row: Family
    part: Config
    prefix: str | None
    family: Family
    config: ModelConfig


def read_as(checkpoint: Checkpoint, row: Family, prefix: str | None = None) -> Reading:
    """A checkpoint as a row reads it; errors as of `read_config`."""
    part = part_of(checkpoint, row)
    values = completed_part(checkpoint.config, part, row)
    family = row.configured(values)
    if row.proved_for and row.proved_for != digest_of(checkpoint.config):
        family = family.but(origin=f"{row.origin}, but not with this config")
    return Reading(row, part, prefix, family, read_config(values, family))


def labelled(reading: Reading, kind: object, named: str | None = None) -> Reading:
    """The reading marked as unproved if no comparison has shown that its row reads this kind of model.

    `kind` is the model_type of config.json; `named` is what the row was asked for by, whatever that is.
    """
    row, part = reading.row, reading.part.get("model_type")
    if row.origin or kind is None:
        return reading
    if named is not None and {*row.types}.isdisjoint((str(kind), str(part))):
        why = f"unproved: no proof that this row reads model_type '{str(kind)[:40]}'"
        origin = f"{why}; `weightscope adopt` looks for a row that it proves"
    else:
        origin = unproved(row, kind, part)
    return replace(reading, row=row.but(origin=origin), family=reading.family.but(origin=origin)) if origin else reading


def list_stacks(families: tuple[Family, ...], checkpoint: Checkpoint) -> dict[str, Stack]:
    """Every attention model in a checkpoint by name, those that no row reads after the others."""
    stacks = readable(families, checkpoint)
    return {name: _sized(checkpoint, stack) for name, stack in stacks.items()} | unread(stacks, checkpoint)


def _sized(checkpoint: Checkpoint, stack: Stack) -> Stack:
    """A stack that a row reads, with its sizes, or why they are none."""
    if stack.family is None:
        return stack
    try:
        reading = labelled(read_as(checkpoint, stack.family, stack.prefix), checkpoint.config.get("model_type"))
    except CheckpointError as error:
        return replace(stack, refusal=str(error))
    if reading.family.refused:
        return replace(stack, refusal=f"{reading.family.name} with {reading.family.refused}")
    sizes = reading.config
    return replace(stack, family=reading.row, n_layers=sizes.n_layers, n_heads=sizes.n_heads)


def as_published(checkpoint: Checkpoint) -> Checkpoint:
    """A GGUF file as the checkpoint that it was converted from; see `gguf.as_published`."""
    return gguf.as_published(checkpoint, FAMILIES.of_gguf)


def decide(
    checkpoint: Checkpoint, name: str | None = None, tower: str | None = None, families: str | Path | None = None
) -> Reading:
    """How a checkpoint is read: which row, which part of its config, which prefix."""
    kinds = {name} if name is not None else _kinds(checkpoint)
    rows = known_rows(families, kinds) if kinds else ()
    row, prefix = choose_family(rows or known_rows(families), checkpoint, name, tower)
    return labelled(read_as(checkpoint, row, prefix), checkpoint.config.get("model_type"), name)


def stacks_of(checkpoint: Checkpoint) -> dict[str, Stack]:
    """The attention models that a checkpoint holds; see `list_stacks`."""
    return list_stacks(known_rows(kinds=_kinds(checkpoint)), checkpoint)


def _kinds(checkpoint: Checkpoint) -> set[str]:
    """The model_types in a config; none where the config itself has none, and names of tensors are compared."""
    return {kind for _, _, kind in described_parts(checkpoint.config)} if "model_type" in checkpoint.config else set()


def choose_family(
    families: tuple[Family, ...], checkpoint: Checkpoint, name: str | None = None, tower: str | None = None
) -> tuple[Family, str | None]:
    """The row that reads a checkpoint: the one asked for by name, else the one its config's model_type names.

    With it the prefix of its tensors' names, where they decided which row it is.

    Parameters
    ----------
    families : tuple of Family
    checkpoint : Checkpoint
    name : str, optional
        A family's name or a model_type.
    tower : str, optional
        "text", "vision", "encoder", "decoder", "cross" ...; by default the one that is language.

    Raises
    ------
    CheckpointError
        No row reads it, or several do and `tower` does not say which. The message names `weightscope adopt`; where no
        model_type is said, which adopting needs, it names the family whose tensor names are nearest.
    """
    stacks = readable(families, checkpoint) if name is None else {}
    if (stack := choose(stacks, tower)) and stack.family:
        return stack.family, stack.prefix
    if tower and stacks and (stack := choose(unread(stacks, checkpoint), tower)):
        raise CheckpointError(f"its {stack.name} stack is not read: {stack.refusal}", file=checkpoint.name)
    if stacks:
        read = {stack.family.name for stack in stacks.values() if stack.family}
        what = read.pop() if len(read) == 1 else str(checkpoint.config.get("model_type"))
        raise refuse_choice(stacks, what, checkpoint, tower)
    wanted = checkpoint.config.get("model_type") if name is None else name
    rows = [row for row in families if wanted in row.types or (name is not None and name == row.name)]
    if not rows and name is not None:
        known = sorted({row.name for row in families})
        raise CheckpointError(f"no family is called '{name}'; known are {', '.join(known)}{nearest(name, known)}")
    if not rows:
        kinds = (wanted, *(part.get("model_type") for _, part in parts(checkpoint.config) if name is None))
        if (
            kind := next((kind for kind in kinds if isinstance(kind, str) and kind in FAMILIES.unsupported), None)
        ) is not None:
            raise CheckpointError(f"no row can describe {kind}: it {FAMILIES.unsupported[kind]}", file=checkpoint.name)
        problem = f"unknown model_type '{wanted}'" if wanted is not None else "has no model_type"
        inner = [f"{path} '{part['model_type']}'" for path, part in parts(checkpoint.config) if "model_type" in part]
        problem += f" (within it {', '.join(inner)})" if inner else ""
        missing = wanted is None and not checkpoint.config
        raise CheckpointError(
            ("no config.json says which model_type this is" if missing else problem)
            + (_nearest(families, checkpoint) if wanted is None else f"; {_adopting()}"),
            file=checkpoint.config.file if wanted is None and not missing else checkpoint.name,
        )
    towers = sorted({row.tower for row in rows})
    asked = tower or (next((kind for kind in (*LANGUAGE, "") if kind in towers), None) if len(rows) > 1 else None)
    fitting = [row for row in rows if asked in (None, row.tower)]
    if len(fitting) == 1:
        return fitting[0], None
    raise refuse_choice([*filter(None, towers)], rows[0].name, checkpoint, tower)


def _adopting() -> str:
    """What reads an unknown architecture, and what that still needs."""
    there = find_spec("torch") and find_spec("transformers")
    return ADOPT.format(lacking="" if there else " (pip install 'weightscope-attention[runner]')", ways=WAYS)


def _nearest(families: tuple[Family, ...], checkpoint: Checkpoint) -> str:
    """What to read a checkpoint as that says no model_type: the family that has most of its names, fewest missing."""
    family, balance, example = max((_likeness(row, checkpoint) for row in families), key=lambda found: found[1])
    if balance <= 0:
        return "; its tensors are named like no family that weightscope knows"
    tower = f" `tower='{family.tower}'`" if family.tower else ""
    named = f"its tensors ('{example}' ...) are named as in {family.name}"
    return f"; {named}: `family='{family.name}'`{tower} reads it so, unproved"


def _likeness(family: Family, checkpoint: Checkpoint) -> tuple[Family, int, str]:
    """(family, names found less twice the names missing, one that was found)."""
    values = {**family.config.defaults, **checkpoint.config}
    family = family.configured(values)
    layer = family.layer.format(i=0)
    norm, modules = family.norms.before, family.heads.projections
    names = {f"{layer}{module}.weight" for module in modules if module} | {
        f"{layer}{norm.module}.{norm.gain}" if norm and norm.module else "",
        family.inputs.tokens,
        family.inputs.positions,
    }
    if family.scores.qk_norm and family.scores.qk_norm.scope != "listed":
        qk = family.scores.qk_norm
        names |= {f"{layer}{module}.{qk.gain}" for module in (qk.query, qk.key)}
    for module, bias in ((family.heads.q, family.heads.bias.q), (family.heads.out, family.heads.bias.out)):
        if values.get(bias) if isinstance(bias, str) else bias:
            names.add(f"{layer}{module}.bias")
    names |= {layer + name for name in family.reads.tensors}
    names.discard("")
    present = {
        p: sorted(p + name for name in names if p + name in checkpoint)
        for p in (*family.prefixes, *prefixes_of(checkpoint, family))
    }
    best = max(present.values(), key=len)
    return family, len(best) - 2 * (len(names) - len(best)), best[0] if best else ""
