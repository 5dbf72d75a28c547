"""The reading of a checkpoint: its attention stacks, the row that reads each, and its place.

Language models that see, hear or are tuned carry their decoder under a name of the wrapper's
choice, and its config under another. Wrappers are not listed anywhere. The model_type identifies a
part of the config (`class_says` has those that a wrapper leaves out). Its tensors are recognised by
the names that its row gives them, by its sizes, and by words that the part's keys share with the
tensors' names.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.checkpoint.config import Config, digest_of
from weightscope.checkpoint.gguf import GgufFile
from weightscope.core.errors import CheckpointError, nearest
from weightscope.model.config.config import KEYS, ModelConfig, class_says
from weightscope.model.config.dialects import Settings, settings
from weightscope.model.rows import gguf
from weightscope.model.rows.family import Family
from weightscope.model.rows.original import KNOWN_BY
from weightscope.model.rows.original import as_published as original_as_published
from weightscope.model.rows.own_names import unwrapped
from weightscope.model.rows.table import FAMILIES, known_rows, unproved

if TYPE_CHECKING:
    from weightscope.model.rows.names import Tensors

DEEPEST = 3  # levels of objects within a config that are looked into
SIZES = ("n_layers", "d_model", "n_heads")
# Stacks that a checkpoint with several is opened by, unless another is asked for.
LANGUAGE = ("text", "decoder")
# Synonyms in keys of configs and names of tensors.
WORDS = {
    "language": "text",
    "llm": "text",
    "visual": "vision",
    "image": "vision",
    "vit": "vision",
    "speech": "audio",
}
KINDS = {"text", "vision", "audio"}
# Parts of names of modules that only attention has, in any family.
ATTENTION = ("attn", "attention", "Attention", "q_proj", "query", "qkv")
# Like names are no reason to read it as another family: half of such guesses are wrong.
ADOPT = "`weightscope adopt SOURCE` looks for a row that reads it and proves it{lacking}; {ways}"
WAYS = (
    "`weightscope adopt SOURCE --with module:Class` does so with a class of your own, "
    "`weightscope draft SOURCE` drafts a row for `--families FILE`, "
    "and `weightscope inspect SOURCE --check` needs none"
)
WITHOUT_TYPE = WAYS.replace("does so with", "looks for a row that reads it and proves it against")


@dataclass(frozen=True)
class Reading:
    """A checkpoint's reading as one model, decided once and handed on."""

    stated: Family  # the row as the table has it, with the model's place
    settings: Settings  # the meaning of the config to that row
    part: Config  # the part of config.json that describes the model, as the file has it
    prefix: str | None  # prefix of its tensors' names; None where no tensors decided it
    kind: object = None  # the model_type of config.json; None where the row is on trial
    asked: str | None = None  # the name or model_type that the row was asked for by
    # stacks that rows of the table read, if they were looked for
    stacks: "Mapping[str, Stack] | None" = field(default=None, repr=False)

    @property
    def config(self) -> ModelConfig:
        """The numbers of the model."""
        return self.settings.numbers

    @property
    def configured(self) -> Family:
        """The row as the config makes it."""
        return self.settings.family

    @cached_property
    def row(self) -> Family:
        """The row as the table has it, marked if it was never proved for this kind of model."""
        return self.stated.but(origin=self._unproved) if self._unproved else self.stated

    @cached_property
    def family(self) -> Family:
        """The row as the config makes it, marked likewise."""
        return self.configured.but(origin=self._unproved) if self._unproved else self.configured

    @cached_property
    def _unproved(self) -> str:
        """The reason where no comparison has shown that the row reads this kind of model."""
        part = self.part.get("model_type")
        if self.stated.origin or self.kind is None:
            return ""
        if self.asked is not None and {*self.stated.types}.isdisjoint((str(self.kind), str(part))):
            why = f"unproved: no proof that this row reads model_type '{str(self.kind)[:40]}'"
            return f"{why}; `weightscope adopt` looks for a row that it proves"
        return unproved(self.stated, self.kind, part)


@dataclass(frozen=True)
class Stack:
    """An attention model within a checkpoint."""

    # "text", "vision", "audio", "encoder", "decoder", "cross" ...; its place if several are alike
    name: str
    # the row that reads it, with the model's place; None where none does
    row: Family | None = field(repr=False)
    model_type: str
    part: str  # dotted keys that lead to its part of the config; empty for all of it
    prefix: str  # prefix of its tensors' names
    refusal: str = ""  # why it is not read; empty where it is
    reading: Reading | None = field(default=None, repr=False)  # None where it is not read

    @property
    def family(self) -> Family | None:
        """The row that reads it, marked if it was never proved for this kind of model."""
        return self.reading.row if self.reading else self.row

    @property
    def n_layers(self) -> int | None:
        """Number of layers; None where the stack is not read."""
        return None if self.reading is None else self.reading.config.n_layers

    @property
    def n_heads(self) -> int | None:
        """Number of heads; None where the stack is not read."""
        return None if self.reading is None else self.reading.config.n_heads


def decide(
    checkpoint: Checkpoint,
    name: str | None = None,
    tower: str | None = None,
    families: str | Path | None = None,
) -> Reading:
    """Choose the reading of a checkpoint: the row, the part of its config, the prefix.

    The row is the one asked for by name, else the one that its config's model_type names.

    Parameters
    ----------
    checkpoint : Checkpoint
    name : str, optional
        A family's name or a model_type.
    tower : str, optional
        "text", "vision", "encoder", "decoder", "cross" ...; by default the one that is language.
    families : path, optional
        A file of rows, which come before the table's.

    Raises
    ------
    CheckpointError
        No row reads it, or several do and `tower` does not choose one. The message names
        `weightscope adopt`; without a model_type, which adopting needs, it names the family
        whose tensor names are nearest.
    """
    stacks = readable(checkpoint, families) if name is None else {}
    stack, prefix = choose(stacks, tower), None
    if stack is not None and stack.row is not None:
        row, prefix = stack.row, stack.prefix
    elif stacks:
        if tower and (stack := choose(unread(stacks, checkpoint), tower)):
            raise CheckpointError(
                f"its {stack.name} stack is not read: {stack.refusal}", file=checkpoint.name
            )
        read = {stack.row.name for stack in stacks.values() if stack.row}
        what = read.pop() if len(read) == 1 else str(checkpoint.config.get("model_type"))
        raise _refuse_choice(stacks, what, checkpoint, tower)
    else:
        row = _row_named(checkpoint, name, tower, families)
    reading = read_as(checkpoint, row, prefix, checkpoint.config.get("model_type"), name)
    return replace(reading, stacks=stacks) if name is None and families is None else reading


def read_as(
    checkpoint: Checkpoint,
    row: Family,
    prefix: str | None = None,
    kind: object = None,
    asked: str | None = None,
) -> Reading:
    """A checkpoint as a row reads it."""
    part = part_of(checkpoint, row)
    meant = settings(checkpoint.config, part, row)
    if row.proved_for and row.proved_for != digest_of(checkpoint.config):
        origin = f"{row.origin}, but not with this config"
        meant = replace(meant, family=meant.family.but(origin=origin))
    meant.numbers  # noqa: B018 - checks every size
    return Reading(row, meant, part, prefix, kind, asked)


def stacks_of(checkpoint: Checkpoint, known: Reading | None = None) -> dict[str, Stack]:
    """Every attention model in a checkpoint by name, unread ones last.

    `known` is a reading of the checkpoint that was made already.
    """
    stacks = None if known is None else known.stacks
    if stacks is None:
        stacks = readable(checkpoint)
    read = {name: _read(checkpoint, stack, known) for name, stack in stacks.items()}
    return read | unread(stacks, checkpoint)


class Stacks(Mapping[str, Stack]):
    """The attention models of a checkpoint by name, with the one that a reading is of."""

    def __init__(self, checkpoint: Checkpoint, reading: Reading, prefix: str) -> None:
        self.checkpoint, self.reading, self.prefix = checkpoint, reading, prefix
        self._stacks = stacks_of(checkpoint, reading)

    def __getitem__(self, name: str) -> Stack:
        return self._stacks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stacks)

    def __len__(self) -> int:
        return len(self._stacks)

    def is_read(self, stack: Stack) -> bool:
        """True if the reading is of that stack, by whatever row."""
        read = self.reading.configured
        if (row := stack.row) is not None:
            return stack.prefix + row.layer + row.heads.q == self.prefix + read.layer + read.heads.q
        before_layers = (self.prefix + read.layer).partition("{i}")[0]
        return bool(before_layers) and stack.prefix.startswith(before_layers)

    @cached_property
    def others(self) -> dict[str, Stack]:
        """The stacks that are not read, by name."""
        return {name: stack for name, stack in self.items() if not self.is_read(stack)}

    @cached_property
    def tensors(self) -> "Tensors":
        """Every tensor under its role, of the stack that is read and of the others."""
        from weightscope.model.rows.names import Tensors

        read = [name for name in self if name not in self.others]
        tower = read[-1] if read else self.reading.configured.tower or "text"
        stacks = {tower: (self.reading.family, self.reading.config, self.prefix)}
        for name, stack in self.others.items():
            if stack.reading is not None:
                stacks[name] = stack.reading.configured, stack.reading.config, stack.prefix
        return Tensors(self.checkpoint, stacks)


def _read(checkpoint: Checkpoint, stack: Stack, known: Reading | None) -> Stack:
    """A stack of a row with its reading, or with the reason why it is not read."""
    assert stack.row is not None
    if known is not None and known.stated is stack.row:
        return replace(stack, reading=known)
    try:
        reading = read_as(checkpoint, stack.row, stack.prefix, checkpoint.config.get("model_type"))
    except CheckpointError as error:
        return replace(stack, refusal=str(error))
    if reading.configured.refused:
        return replace(stack, refusal=f"{stack.row.name} with {reading.configured.refused}")
    return replace(stack, reading=reading)


def as_published(checkpoint: Checkpoint) -> Checkpoint:
    """A converted file (GGUF, MLX) or one with its trainer's names as transformers has it."""
    checkpoint = unwrapped(checkpoint)
    file = checkpoint.files[0]
    if isinstance(file, GgufFile):
        return gguf.as_published(checkpoint, FAMILIES.of_gguf)
    if file.metadata.get("format") == "mlx":
        return gguf.as_before_mlx(checkpoint)
    for name, spelling in KNOWN_BY.items():
        if name in checkpoint:
            return original_as_published(checkpoint, spelling, FAMILIES.rows)
    return checkpoint


# The place of a row's model in a checkpoint: the prefix of its tensors and the part of the config.


def prefixes_of(checkpoint: Checkpoint, family: Family) -> list[str]:
    """Prefixes under which some layer has all the projections of a row, the row's own first.

    Only those with an embedding of tokens, where some have one.
    """
    complete = complete_prefixes(checkpoint, family)
    with_tokens = [prefix for prefix in complete if prefix + family.inputs.tokens in checkpoint]
    return sorted(
        with_tokens or complete, key=lambda prefix: (prefix not in family.prefixes, prefix)
    )


def complete_prefixes(checkpoint: Checkpoint, family: Family) -> list[str]:
    """Prefixes under which some layer has all the projections of a row."""
    modules = {family.heads.k, family.heads.v, family.heads.out}
    layer = re.escape(family.layer).replace(re.escape("{i}"), r"\d+")
    named = re.compile(
        rf"((?:.*\.)?){layer}({'|'.join(map(re.escape, modules))})(?:\.|_weight$)", re.ASCII
    )
    prefixes: dict[str, set[str]] = {}
    for name in checkpoint:
        if match := named.match(name):
            prefixes.setdefault(match[1], set()).add(match[2])
    return [prefix for prefix, seen in prefixes.items() if seen == modules]


def width_of(checkpoint: Checkpoint, family: Family, prefix: str) -> set[int]:
    """Sizes of W_O in the first layer that has one; they include the model's width."""
    layer, _, rest = f"{prefix}{family.layer}".partition("{i}")
    written = re.compile(rf"\d+{re.escape(rest + family.heads.out)}\.(weight|bias)", re.ASCII)
    first = (name for name in checkpoint.names_under(layer) if written.fullmatch(name, len(layer)))
    return {size for name in islice(first, 1) for size in checkpoint[name].shape}


def prefix_of(checkpoint: Checkpoint, family: Family) -> str:
    """The prefix of a row's only model in a checkpoint."""
    inputs = family.inputs
    marks = tuple(filter(None, (family.layer.format(i=0), inputs.tokens, inputs.positions)))
    for prefix in family.prefixes:
        if any(checkpoint.names_under(prefix + mark) for mark in marks):
            return prefix
    if len(prefixes := prefixes_of(checkpoint, family)) == 1:
        return prefixes[0]
    if prefixes:
        several = ", ".join(prefix + marks[0] for prefix in prefixes)
        raise CheckpointError(
            f"has several models of family {family.name} ({several})", file=checkpoint.name
        )
    problem = f"has no layer of a {family.name} (looked for {marks[0]}*, under any prefix)"
    raise CheckpointError(problem, file=checkpoint.name)


def parts(config: Config) -> Iterator[tuple[str, Config]]:
    """Objects within a config that may describe a model, outer ones first, by dotted keys."""
    level: list[tuple[str, Mapping[str, object]]] = [("", config.raw)]
    for _ in range(DEEPEST):
        level = [
            (f"{path}.{key}" if path else key, value)
            for path, outer in level
            for key, value in outer.items()
            if isinstance(value, Mapping)
        ]
        yield from ((path, Config(value, config.file)) for path, value in level)


def _described_parts(config: Config) -> list[tuple[str, Config, str]]:
    """Parts of a config with their model_type; the whole, too, for a wrapper's missing part."""
    model_type = config.get("model_type")
    described = [("", config, model_type)] if isinstance(model_type, str) else []
    types, inner = class_says(model_type, "parts"), [*parts(config)]
    described += [
        (path, part, kind) for path, part in inner if (kind := _kind_of(path, part, types))
    ]
    present = {path for path, _ in inner}
    return described + [("", config, kind) for path, kind in types.items() if path not in present]


def _kind_of(path: str, part: Config, types: Mapping[str, str]) -> str:
    """A part's model_type, or the one in `types` that its wrapper's class gives it."""
    kind = part.get("model_type")
    return kind if isinstance(kind, str) else types.get(path, "")


def part_of(checkpoint: Checkpoint, family: Family) -> Config:
    """The part of a checkpoint's config for a row's model: all of it, unless it is a wrapper's."""
    config = checkpoint.config
    outer, _, last = family.part.rpartition(".")
    within = config
    for key in outer.split(".") if outer else ():
        within = within.inside(key)
    if last in within:
        return within.inside(last)
    if config.get("model_type") in family.types:
        return config
    inner = list(parts(config))
    fitting = [(path, part) for path, part in inner if part.get("model_type") in family.types]
    if not fitting and all(config.has(*family.size_keys[size]) for size in SIZES):
        return config
    if len(fitting) != 1:
        fitting = [
            (path, part) for path, part in fitting or inner if _fits(checkpoint, family, part)
        ]
    if len(fitting) > 1:
        paths = ", ".join(path for path, _ in fitting)
        raise CheckpointError(
            f"several parts could be the {family.name}'s: {paths}", file=config.file
        )
    return fitting[0][1] if fitting else config


def _fits(checkpoint: Checkpoint, family: Family, part: Config) -> bool:
    """True if a part of a config has as many layers as the tensors, and their width."""
    keys = family.size_keys
    n_layers, d_model, n_heads = (
        next((part.get(key) for key in keys[size] if part.has(key)), None) for size in SIZES
    )
    if not isinstance(n_layers, int) or n_heads is None:
        return False
    return any(
        d_model in width_of(checkpoint, family, prefix)
        and checkpoint.names_under(prefix + family.layer.format(i=n_layers - 1))
        and not checkpoint.names_under(prefix + family.layer.format(i=n_layers))
        for prefix in prefixes_of(checkpoint, family)
    )


# The attention models in a checkpoint: the row that reads each, its part of the config, its prefix.


class Fit(NamedTuple):
    """The fit of a row to tensors under a prefix; the larger of two tuples fits better."""

    all_layers: bool  # there are no more layers than the config says
    affinity: int  # shared words of the part's keys and the prefix, less wrong kinds in the prefix
    shared_words: int
    tokens: bool  # the embedding of tokens is there
    listed: bool  # the prefix is one of the row's own
    outer: int  # minus the depth of the prefix


class Candidate(NamedTuple):
    """A row, the part of the config that it may read, and prefixes where its tensors may be."""

    row: Family
    path: str  # the keys that lead to the part
    model_type: str
    kind: str  # "text", "vision", "encoder" ...
    places: dict[str, Fit]

    def claims(self, prefix: str) -> set[str]:
        """Modules that are this model's alone; two softmaxes of one matrix share q and k."""
        return {
            prefix + self.row.layer + module for module in (self.row.heads.v, self.row.heads.out)
        }


def readable(checkpoint: Checkpoint, families: str | Path | None = None) -> dict[str, Stack]:
    """Stacks that rows read, by name, outer parts of the config first; `families`: further rows.

    A stack whose tensors may be in several places is left out.
    """
    left = dict(enumerate(_candidates(checkpoint, families)))
    placed: dict[int, tuple[Candidate, str]] = {}
    while best := {
        index: max(fits)
        for index, candidate in left.items()
        if (fits := [*candidate.places.values()]) and fits.count(max(fits)) == 1
    }:
        surest = max(best, key=lambda index: (best[index], -index))
        candidate = left.pop(surest)
        prefix = next(prefix for prefix, fit in candidate.places.items() if fit == best[surest])
        placed[surest] = candidate, prefix
        for rival in left.values():
            if rival.claims(prefix) & candidate.claims(prefix):
                rival.places.pop(prefix, None)
    in_order = [placed[index] for index in sorted(placed)]
    names = _names([candidate for candidate, _ in in_order])
    named = [(name, *place) for name, place in zip(names, in_order, strict=True)]
    if any(len(candidate.places) > 1 for candidate, _ in in_order):
        named += _twins(checkpoint, in_order)
    return {
        name: Stack(
            name,
            candidate.row.but(part=candidate.path, prefixes=(prefix,)),
            candidate.model_type,
            candidate.path,
            prefix,
        )
        for name, candidate, prefix in named
    }


def _candidates(checkpoint: Checkpoint, families: str | Path | None) -> Iterator[Candidate]:
    """Rows whose model_type a part of the config has, the part, and places of their tensors."""
    described, seen = _described_parts(checkpoint.config), set()
    rows = known_rows(families, {model_type for _, _, model_type in described})
    for path, part, model_type in described:
        for row in (row for row in rows if model_type in row.types):
            inner = bool(row.part) and part.has(row.part)
            place = ".".join(filter(None, (path, row.part))) if inner else path
            if (id(row), place) in seen:
                continue
            seen.add((id(row), place))
            sense = next(
                (sense for sense in ("audio", "vision") if sense in _words(place)), "vision"
            )
            kind = row.tower or ("text" if row.inputs.tokens else sense)
            section = part.inside(row.part) if inner else part
            # renamed where the row's own names are not there
            for named in chain((row,), _renamed(checkpoint, row, part)):
                if places := _places(checkpoint, named, place, kind, section):
                    yield Candidate(named, place, model_type, kind, places)
                    break


def _renamed(checkpoint: Checkpoint, row: Family, part: Config) -> Iterator[Family]:
    """The row under other names of its list of layers under which the file has its modules."""
    row = row.configured({**row.config.defaults, **part})
    before, _, after = row.layer.partition("{i}")
    outer = before[: before[:-1].rfind(".") + 1]
    named = re.compile(
        rf"(?:.*\.)?{re.escape(outer)}([A-Za-z_]+)\.\d+{re.escape(after + row.heads.out)}\.weight",
        re.ASCII,
    )
    lists = {match[1] for name in checkpoint if (match := named.fullmatch(name))}
    yield from (
        row.but(layer=f"{outer}{name}.{{i}}{after}")
        for name in sorted(lists)
        if f"{outer}{name}." != before
    )


def _places(
    checkpoint: Checkpoint, row: Family, path: str, kind: str, part: Config
) -> dict[str, Fit]:
    """Prefixes where a row's tensors have the width in its part, each with its fit."""
    row = row.configured({**row.config.defaults, **part})
    keys = row.size_keys
    try:
        part = (
            row.completed({**row.config.defaults, **part}, part.file)
            if row.config.derived
            else part
        )
    except CheckpointError:  # opening the stack reports it
        return {}
    width, count = (
        next((part.get(key) for key in keys[size] if part.has(key)), None)
        for size in ("d_model", "n_layers")
    )
    complete = complete_prefixes(checkpoint, row)
    with_tokens = {prefix for prefix in complete if prefix + row.inputs.tokens in checkpoint}
    places: dict[str, Fit] = {}
    for prefix in complete:
        affinity = _affinity(path, prefix, {kind})
        # its name says another kind
        if with_tokens and prefix not in with_tokens and affinity < 0:
            continue
        if not isinstance(width, int) or width in width_of(checkpoint, row, prefix):
            places[prefix] = Fit(
                all_layers=isinstance(count, int)
                and not checkpoint.names_under(prefix + row.layer.format(i=count)),
                affinity=affinity,
                shared_words=len(_words(path) & _words(prefix)),
                tokens=prefix in with_tokens,
                listed=prefix in row.prefixes,
                outer=-prefix.count("."),
            )
    return places


def _twins(
    checkpoint: Checkpoint, placed: list[tuple[Candidate, str]]
) -> list[tuple[str, Candidate, str]]:
    """Further models of the same shapes and number of layers, by name.

    One part of the config may describe two towers.
    """
    described = {
        path
        for path, part, _ in _described_parts(checkpoint.config)
        if path and part.has(*KEYS["n_heads"])
    }
    if not described <= {candidate.path for candidate, _ in placed}:
        return []
    taken = set().union(*(candidate.claims(prefix) for candidate, prefix in placed))

    def shapes(candidate: Candidate, prefix: str) -> dict[str, tuple[int, ...]]:
        first = prefix + candidate.row.layer.split("{i}")[0]
        return {
            name.removeprefix(first): checkpoint[name].shape
            for name in checkpoint.names_under(first)
        }

    return [
        (twin.strip(".").removeprefix("model."), candidate, twin)
        for candidate, prefix in placed
        for twin, fit in candidate.places.items()
        if twin != prefix and fit.all_layers and fit.affinity >= 0
        if shapes(candidate, twin) == shapes(candidate, prefix)
        and not candidate.claims(twin) & taken
    ]


def _names(candidates: list[Candidate]) -> list[str]:
    """A name for each stack: its kind, or its place in the config if its kind is not unique."""
    depths = [candidate.path.count(".") + bool(candidate.path) for candidate in candidates]
    names = []
    for candidate, depth in zip(candidates, depths, strict=True):
        kind, path = candidate.kind, candidate.path
        alike = [d for rival, d in zip(candidates, depths, strict=True) if rival.kind == kind]
        if (
            len(alike) == 1
            or (depth == min(alike) and alike.count(depth) == 1)
            or not (place := _place(path))
        ):
            names.append(kind)
        elif sum(rival.path == path for rival in candidates) == 1 or kind in _words(place):
            names.append(place)
        else:
            names.append(f"{place}.{kind}")
    again = Counter(names)
    return [name if again[name] == 1 else f"{name}.{number}" for number, name in enumerate(names)]


def choose(stacks: Mapping[str, Stack], tower: str | None) -> Stack | None:
    """The stack of a name or place, or the language one; None where that is none or several.

    Of several text stacks the one that makes logits of tokens is meant, if only one does.
    """
    if tower is None:
        stacks = {
            name: stack for name, stack in stacks.items() if stack.row and not stack.row.refused
        } or stacks
        kinds = {name.rpartition(".")[2] for name in stacks}
        tower = next((kind for kind in LANGUAGE if kind in kinds), None)
    if tower is None:
        return next(iter(stacks.values())) if len(stacks) == 1 else None
    for fits in (
        lambda stack: stack.name == tower,
        lambda stack: stack.name.rpartition(".")[2] == tower,
        lambda stack: (
            stack.name.rpartition(".")[2] == tower and stack.row is not None and stack.row.outputs
        ),
        lambda stack: (
            tower in (stack.part, stack.part.rpartition(".")[2], stack.prefix.rstrip("."))
        ),
        lambda stack: tower in (_place(stack.part), stack.prefix.split(".")[0]),
    ):
        if len(fitting := [stack for stack in stacks.values() if fits(stack)]) == 1:
            return fitting[0]
    return None


def unread(stacks: Mapping[str, Stack], checkpoint: Checkpoint) -> dict[str, Stack]:
    """Further tensors that look like attention, as stacks by name: no row reads them."""
    heads: dict[str, str] = {}
    for name in checkpoint:
        head, _, rest = re.sub(r"\.\d+\.", ".\0", name, count=1).partition("\0")
        if name.endswith(".weight") and any(word in rest for word in ATTENTION):
            heads.setdefault(head, name)
    claimed = [
        stack.prefix + stack.row.layer.split("{i}")[0] for stack in stacks.values() if stack.row
    ]
    left = {
        head: name
        for head, name in heads.items()
        if not any(claim.startswith(head) for claim in claimed)
    }
    read = {stack.part for stack in stacks.values()}
    types = class_says(checkpoint.config.get("model_type"), "parts")
    left_parts = [(path, part) for path, part in parts(checkpoint.config) if path not in read]
    described = [(path, _kind_of(path, part, types)) for path, part in left_parts]
    described = [(path, kind) for path, kind in described if kind]
    unread_stacks: dict[str, Stack] = {}
    for head, name in left.items():
        affinities = [_affinity(path, head, set()) for path, _ in described]
        path, kind = "", ""
        if max(affinities, default=0) > 0:
            path, kind = described[affinities.index(max(affinities))]
        sense = next((word for word in ("audio", "vision") if word in _words(head)), "")
        stack_name = sense or _place(path)
        if not stack_name or stack_name in stacks or stack_name in unread_stacks:
            stack_name = head.rstrip(".")
        described_as = f"model_type '{kind or checkpoint.config.get('model_type')}'"
        why = f"no row reads it ({described_as}; '{name}' ...)"
        if kind in FAMILIES.unsupported:
            why = f"no row can describe {kind}: it {FAMILIES.unsupported[kind]}"
        unread_stacks[stack_name] = Stack(stack_name, None, kind, path, head, why)
    return unread_stacks


def _words(text: str) -> set[str]:
    return {WORDS.get(word, word) for word in re.split(r"[._\d]+", text.lower())} - {
        "",
        "config",
        "model",
    }


def _affinity(path: str, prefix: str, kinds: set[str]) -> int:
    """Shared words of a part's keys and a prefix, less kinds in the prefix that it is not."""
    words, names = _words(path) | kinds, _words(prefix)
    return len(words & names) - len((names & KINDS) - words)


def _place(path: str) -> str:
    """The keys that lead to a part, as a name."""
    return ".".join(key.removesuffix("_config") for key in path.split("."))


# Advice where no row is known, or several are.


def _row_named(
    checkpoint: Checkpoint, name: str | None, tower: str | None, families: str | Path | None
) -> Family:
    """The row of a name, or of the config's model_type."""
    wanted = checkpoint.config.get("model_type") if name is None else name
    rows = (known_rows(families, {wanted}) if isinstance(wanted, str) else ()) or known_rows(
        families
    )
    fitting = [
        row for row in rows if wanted in row.types or (name is not None and name == row.name)
    ]
    if not fitting and name is not None:
        known = sorted({row.name for row in rows})
        raise CheckpointError(
            f"no family is called '{name}'; known are {', '.join(known)}{nearest(name, known)}"
        )
    if not fitting or (name is None and wanted in FAMILIES.unsupported):
        raise _refuse_unknown(rows, checkpoint)
    towers = sorted({row.tower for row in fitting})
    asked = tower or (
        next((kind for kind in (*LANGUAGE, "") if kind in towers), None)
        if len(fitting) > 1
        else None
    )
    chosen = [row for row in fitting if asked in (None, row.tower)]
    if len(chosen) == 1:
        return chosen[0]
    raise _refuse_choice([*filter(None, towers)], fitting[0].name, checkpoint, tower)


def _refuse_choice(
    names: Collection[str], what: str, checkpoint: Checkpoint, tower: str | None
) -> CheckpointError:
    """The error where no stack has the name asked for, or none was asked for among several."""
    if tower is None:
        language = [name for name in names if name.rpartition(".")[2] in LANGUAGE] or names
        choices = " or ".join(f"`tower='{name}'`" for name in language)
        return CheckpointError(f"{what} has several towers: say {choices}", file=checkpoint.name)
    if len(names) < 2:
        return CheckpointError(
            f"{what} is not a model of towers; leave `tower` out", file=checkpoint.name
        )
    return CheckpointError(
        f"{what} has no tower '{tower}'; it has {' and '.join(names)}", file=checkpoint.name
    )


def _refuse_unknown(rows: tuple[Family, ...], checkpoint: Checkpoint) -> CheckpointError:
    """The error for a model_type that no row reads, or for none."""
    config = checkpoint.config
    wanted, inner = config.get("model_type"), dict(parts(config))
    for kind in (wanted, *(part.get("model_type") for part in inner.values())):
        if isinstance(kind, str) and kind in FAMILIES.unsupported:
            return CheckpointError(
                f"no row can describe {kind}: it {FAMILIES.unsupported[kind]}", file=checkpoint.name
            )
    if wanted is not None:
        has_torch = find_spec("torch") and find_spec("transformers")
        lacking = "" if has_torch else " (pip install 'weightscope-attention[runner]')"
        advice = f"; {ADOPT.format(lacking=lacking, ways=WAYS)}"
    else:
        advice = f"{_nearest(rows, checkpoint)}; {WITHOUT_TYPE}"
    if wanted is None and not config:
        return CheckpointError(
            f"no config.json says which model_type this is{advice}", file=checkpoint.name
        )
    problem = f"unknown model_type '{wanted}'" if wanted is not None else "has no model_type"
    named = [f"{path} '{p['model_type']}'" for path, p in inner.items() if "model_type" in p]
    problem += f" (within it {', '.join(named)})" if named else ""
    file = config.file if wanted is None else checkpoint.name
    return CheckpointError(problem + advice, file=file)


def _nearest(families: tuple[Family, ...], checkpoint: Checkpoint) -> str:
    """Advice without a model_type: the family with most of its names, fewest missing."""
    family, balance, example = max(
        (_likeness(row, checkpoint) for row in families), key=lambda likeness: likeness[1]
    )
    if balance <= 0:
        return "; its tensors are named like no family that weightscope knows"
    tower = f" `tower='{family.tower}'`" if family.tower else ""
    named = f"its tensors ('{example}' ...) are named as in {family.name}"
    return f"; {named}: `family='{family.name}'`{tower} reads it so, unproved"


def _likeness(family: Family, checkpoint: Checkpoint) -> tuple[Family, int, str]:
    """(family, names present less twice the names missing, one that is present)."""
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
    for module, bias in (
        (family.heads.q, family.heads.bias.q),
        (family.heads.out, family.heads.bias.out),
    ):
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
