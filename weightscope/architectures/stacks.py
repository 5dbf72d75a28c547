"""The attention stacks in a checkpoint, and where each one is."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

from weightscope.architectures.config import KEYS, inner_types
from weightscope.architectures.family import Family
from weightscope.architectures.table import FAMILIES
from weightscope.checkpoint import Checkpoint
from weightscope.checkpoint.config import Config
from weightscope.errors import CheckpointError

# Where a model stands within a checkpoint that wraps it: before which tensors' names, and in which part of a config.
#
# Language models that see, hear or are tuned carry their decoder under a name of the wrapper's choice, and its config
# under another. Both are told by what is there, not by what wrappers are known.

DEEPEST = 3  # objects within objects of a config that are looked into
SIZES = ("n_layers", "d_model", "n_heads")


def prefixes_of(checkpoint: Checkpoint, family: Family) -> list[str]:
    """Every beginning of names under which some layer has all the projections of a row, the row's own first.

    Where some have an embedding of tokens too, only those.
    """
    complete = complete_prefixes(checkpoint, family)
    with_tokens = [prefix for prefix in complete if prefix + family.inputs.tokens in checkpoint]
    return sorted(with_tokens or complete, key=lambda prefix: (prefix not in family.prefixes, prefix))


def complete_prefixes(checkpoint: Checkpoint, family: Family) -> list[str]:
    """Every beginning of names under which some layer has all the projections of a row."""
    modules = {family.heads.k, family.heads.v, family.heads.out}
    layer = re.escape(family.layer).replace(re.escape("{i}"), r"\d+")
    named = re.compile(rf"((?:.*\.)?){layer}({'|'.join(map(re.escape, modules))})(?:\.|_weight$)", re.ASCII)
    prefixes: dict[str, set[str]] = {}
    for name in checkpoint:
        if match := named.match(name):
            prefixes.setdefault(match[1], set()).add(match[2])
    return [prefix for prefix, seen in prefixes.items() if seen == modules]


def parts(config: Config) -> Iterator[tuple[str, Config]]:
    """The objects within a config that may describe a model, outer ones first, each with the keys that lead to it."""
    level: list[tuple[str, Mapping[str, object]]] = [("", config.raw)]
    for _ in range(DEEPEST):
        level = [
            (f"{path}.{key}" if path else key, value)
            for path, outer in level
            for key, value in outer.items()
            if isinstance(value, Mapping)
        ]
        yield from ((path, Config(value, config.file)) for path, value in level)


def part_of(checkpoint: Checkpoint, family: Family) -> Config:
    """The part of a checkpoint's config that describes the model of a row: all of it, unless that is a wrapper's.

    Raises
    ------
    CheckpointError
        Several parts might, and neither their model_type nor the tensors' sizes tells which does.
    """
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
    named = [(path, part) for path, part in inner if part.get("model_type") in family.types]
    keys = family.size_keys
    if not named and all(config.has(*keys[size]) for size in SIZES):
        return config
    fitting = (
        named
        if len(named) == 1
        else [candidate for candidate in named or inner if _fits(checkpoint, family, candidate[1])]
    )
    if len(fitting) > 1:
        paths = ", ".join(path for path, _ in fitting)
        raise CheckpointError(f"several parts could be the {family.name}'s: {paths}", file=config.file)
    return fitting[0][1] if fitting else config


def _fits(checkpoint: Checkpoint, family: Family, part: Config) -> bool:
    """Whether a part of a config has the sizes of the tensors: as many layers, and as wide."""
    keys = family.size_keys
    n_layers, d_model, n_heads = (next((part.get(key) for key in keys[size] if part.has(key)), None) for size in SIZES)
    if not isinstance(n_layers, int) or n_heads is None:
        return False
    return any(
        d_model in width_of(checkpoint, family, prefix)
        and checkpoint.names_under(prefix + family.layer.format(i=n_layers - 1))
        and not checkpoint.names_under(prefix + family.layer.format(i=n_layers))
        for prefix in prefixes_of(checkpoint, family)
    )


def width_of(checkpoint: Checkpoint, family: Family, prefix: str) -> set[int]:
    """The sizes of what attention writes into the stream in the first layer that does; one of them is the width."""
    layer, _, rest = f"{prefix}{family.layer}".partition("{i}")
    written = re.compile(rf"\d+{re.escape(rest + family.heads.out)}\.(weight|bias)", re.ASCII)
    first = (name for name in checkpoint.names_under(layer) if written.fullmatch(name, len(layer)))
    return {size for name in islice(first, 1) for size in checkpoint[name].shape}


def prefix_of(checkpoint: Checkpoint, family: Family) -> str:
    """What stands before every tensor's name of a row's model in a checkpoint.

    Raises
    ------
    CheckpointError
        There is no such model, or several.
    """
    inputs = family.inputs
    marks = tuple(filter(None, (family.layer.format(i=0), inputs.tokens, inputs.positions)))
    for prefix in family.prefixes:
        if any(checkpoint.names_under(prefix + mark) for mark in marks):
            return prefix
    if len(prefixes := prefixes_of(checkpoint, family)) == 1:
        return prefixes[0]
    if prefixes:
        several = ", ".join(prefix + marks[0] for prefix in prefixes)
        raise CheckpointError(f"has several models of family {family.name} ({several})", file=checkpoint.name)
    tried = ", ".join(prefix + marks[0] + "*" for prefix in family.prefixes)
    raise CheckpointError(f"has no layer of a {family.name} (looked for {tried})", file=checkpoint.name)


# The attention models that a checkpoint holds: which row reads each, which part of the config describes it, and which
# prefix its tensors' names have.
#
# Wrappers are not listed anywhere. The model_type identifies a part of the config (`inner_types` has those that a
# wrapper leaves out). Its tensors are recognised by the names that its row gives them, by its sizes, and by words that
# the part's keys share with the tensors' names.

LANGUAGE = ("text", "decoder")  # what a checkpoint of several stacks is opened by unless another is asked for
# Words that say the same in the keys of configs and in the names of tensors.
WORDS = {"language": "text", "llm": "text", "visual": "vision", "image": "vision", "vit": "vision", "speech": "audio"}
KINDS = {"text", "vision", "audio"}
# In the names of modules that only attention has, whichever family it is of.
ATTENTION = ("attn", "attention", "Attention", "q_proj", "query", "qkv")


@dataclass(frozen=True)
class Stack:
    """An attention model within a checkpoint.

    Attributes
    ----------
    name : str
        "text", "vision", "audio", "encoder", "decoder", "cross" ...; where several of a kind stand apart, where it is.
    family : Family or None
        The row that reads it, told where it stands; None where none does.
    model_type : str
    part : str
        The keys that lead to its part of the config, with dots between them; empty for all of it.
    prefix : str
        What stands before its tensors' names.
    refusal : str
        Why it is not read; empty where it is.
    n_layers, n_heads : int or None
        None where it is not read.
    """

    name: str
    family: Family | None = field(repr=False)
    model_type: str
    part: str
    prefix: str
    refusal: str = ""
    n_layers: int | None = None
    n_heads: int | None = None


class Fit(NamedTuple):
    """How well a row fits the tensors under a prefix; the larger in the first place where two differ fits better."""

    all_layers: bool  # there are no more layers than the config says
    affinity: int  # words that the part's keys and the prefix share, less the kinds that the prefix names and it is not
    shared_words: int
    tokens: bool  # the embedding of tokens is there
    listed: bool  # the prefix is one of the row's own
    outer: int  # minus the depth of the prefix


@dataclass
class _Found:
    """A row, the part of the config that may be its own, and the prefixes under which its tensors may be."""

    row: Family
    path: str
    model_type: str
    places: dict[str, Fit] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What it is a model of."""
        words = _words(self.path)
        kind_name = next((kind for kind in ("audio", "vision") if kind in words), "vision")
        return self.row.tower or ("text" if self.row.inputs.tokens else kind_name)

    @property
    def best(self) -> tuple[Fit, list[str]]:
        """The best fit, and the prefixes that have it."""
        most = max(self.places.values())
        return most, [prefix for prefix, score in self.places.items() if score == most]


def readable(families: Iterable[Family], checkpoint: Checkpoint) -> dict[str, Stack]:
    """The stacks that the rows read, by name, outer parts of the config first.

    One whose tensors may be in several places is not guessed, and is not among them.
    """
    open_, placed = list(_candidates(families, checkpoint)), list[tuple[_Found, str]]()
    order = {id(candidate): index for index, candidate in enumerate(open_)}
    while sure := [candidate for candidate in open_ if candidate.places and len(candidate.best[1]) == 1]:
        surest = max(sure, key=lambda one: (one.best[0], -order[id(one)]))
        prefix = surest.best[1][0]
        placed.append((surest, prefix))
        open_ = [candidate for candidate in open_ if candidate is not surest]
        for other in open_:
            if _claim(other.row, prefix) & _claim(surest.row, prefix):
                other.places.pop(prefix, None)
    placed.sort(key=lambda one: order[id(one[0])])
    named = [(name, *place) for name, place in zip(_names([candidate for candidate, _ in placed]), placed, strict=True)]
    described = {path for path, part, _ in described_parts(checkpoint.config) if path and part.has(*KEYS["n_heads"])}
    if described <= {candidate.path for candidate, _ in placed}:
        taken = set().union(*(_claim(candidate.row, prefix) for candidate, prefix in placed))
        named += [
            (twin.strip(".").removeprefix("model."), candidate, twin)
            for candidate, place in placed
            for twin in _twins(checkpoint, candidate, place)
            if not _claim(candidate.row, twin) & taken
        ]
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


def _twins(checkpoint: Checkpoint, found: _Found, own: str) -> Iterator[str]:
    """Where else there are the same tensors in as many layers: one part of the config may describe two towers."""

    def shapes(prefix: str) -> dict[str, tuple[int, ...]]:
        first = prefix + found.row.layer.split("{i}")[0]
        return {name.removeprefix(first): checkpoint[name].shape for name in checkpoint.names_under(first)}

    for prefix, fit in found.places.items():
        if prefix != own and fit.all_layers and fit.affinity >= 0 and shapes(prefix) == shapes(own):
            yield prefix


def choose(stacks: Mapping[str, Stack], tower: str | None) -> Stack | None:
    """The stack of that name or place, or the one that is language; None where that is none or several.

    Of several that are text the one is meant that makes logits of tokens, if one alone does.
    """
    if tower is None:
        stacks = {name: stack for name, stack in stacks.items() if stack.family and not stack.family.refused} or stacks
        kind = next((kind for kind in LANGUAGE if any(_is(name, kind) for name in stacks)), None)
        if kind is not None:
            return choose(stacks, kind)
        return next(iter(stacks.values())) if len(stacks) == 1 else None
    for fits in (
        lambda stack: stack.name == tower,
        lambda stack: _is(stack.name, tower),
        lambda stack: _is(stack.name, tower) and stack.family is not None and stack.family.outputs is not None,
        lambda stack: tower in (stack.part, stack.part.rpartition(".")[2], stack.prefix.rstrip(".")),
        lambda stack: tower in (_place(stack.part), stack.prefix.split(".")[0]),
    ):
        if len(fitting := [stack for stack in stacks.values() if fits(stack)]) == 1:
            return fitting[0]
    return None


def _is(name: str, kind: str) -> bool:
    """Whether a stack of this name is one of that kind, wherever it stands."""
    return name.rpartition(".")[2] == kind


def unread(stacks: Mapping[str, Stack], checkpoint: Checkpoint) -> dict[str, Stack]:
    """What else looks like attention in the checkpoint, by name: no row reads it."""
    heads: dict[str, str] = {}
    for name in checkpoint:
        head, _, rest = re.sub(r"\.\d+\.", ".\0", name, count=1).partition("\0")
        if name.endswith(".weight") and any(word in rest for word in ATTENTION):
            heads.setdefault(head, name)
    claimed = [stack.prefix + stack.family.layer.split("{i}")[0] for stack in stacks.values() if stack.family]
    left = {head: name for head, name in heads.items() if not any(claim.startswith(head) for claim in claimed)}
    described = [(path, _type(path, part, checkpoint.config)) for path, part in parts(checkpoint.config)]
    described = [(path, kind) for path, kind in described if kind and path not in {s.part for s in stacks.values()}]
    unread_stacks: dict[str, Stack] = {}
    for head, name in left.items():
        path, kind = max(described, key=lambda one: _affinity(one[0], head, set()), default=("", ""))
        if described and _affinity(path, head, set()) <= 0:
            path, kind = "", ""
        words = _words(head)
        label = next((word for word in ("audio", "vision") if word in words), "") or _place(path)
        stack_name = label if label and label not in stacks and label not in unread_stacks else head.rstrip(".")
        described_as = f"model_type '{kind}'" if kind else f"model_type '{checkpoint.config.get('model_type')}'"
        why = (
            f"no row can describe {kind}: it {FAMILIES.unsupported[kind]}"
            if kind in FAMILIES.unsupported
            else f"no row reads it ({described_as}; '{name}' ...)"
        )
        unread_stacks[stack_name] = Stack(stack_name, None, kind, path, head, why)
    return unread_stacks


def refuse_choice(names: Collection[str], what: str, checkpoint: Checkpoint, tower: str | None) -> CheckpointError:
    """What to say where there is no stack of the name that was asked for, or none was and several might be meant."""
    if tower is None:
        language = [name for name in names if name.rpartition(".")[2] in LANGUAGE] or names
        choices = " or ".join(f"`tower='{name}'`" for name in language)
        return CheckpointError(f"{what} has several towers: say {choices}", file=checkpoint.name)
    if len(names) < 2:
        return CheckpointError(f"{what} is not a model of towers; leave `tower` out", file=checkpoint.name)
    return CheckpointError(f"{what} has no tower '{tower}'; it has {' and '.join(names)}", file=checkpoint.name)


def _candidates(families: Iterable[Family], checkpoint: Checkpoint) -> Iterator[_Found]:
    """Every row whose model_type a part of the config has, that part, and where its tensors may be."""
    by_type: dict[str, list[Family]] = {}
    for row in families:
        for kind in row.types:
            by_type.setdefault(kind, []).append(row)
    seen = set()
    for path, part, kind in described_parts(checkpoint.config):
        for row in by_type.get(kind, ()):
            inner = bool(row.part) and part.has(row.part)
            inner_path = ".".join(filter(None, (path, row.part))) if inner else path
            if (id(row), inner_path) in seen:
                continue
            seen.add((id(row), inner_path))
            for same in chain((row,), _renamed(checkpoint, row, part)):  # only where it is not found
                candidate = _Found(same, inner_path, kind)
                candidate.places = _places(checkpoint, candidate, part.inside(row.part) if inner else part)
                if candidate.places:
                    yield candidate
                    break


def _renamed(checkpoint: Checkpoint, row: Family, part: Config) -> Iterator[Family]:
    """The row under another name of its list of layers, if the file has its modules in such a list."""
    row = row.configured({**row.config.defaults, **part})
    before, _, after = row.layer.partition("{i}")
    outer = before[: before[:-1].rfind(".") + 1]
    named = re.compile(
        rf"(?:.*\.)?{re.escape(outer)}([A-Za-z_]+)\.\d+{re.escape(after + row.heads.out)}\.weight", re.ASCII
    )
    lists = {match[1] for name in checkpoint if (match := named.fullmatch(name))}
    yield from (row.but(layer=f"{outer}{name}.{{i}}{after}") for name in sorted(lists) if f"{outer}{name}." != before)


def described_parts(config: Config) -> Iterator[tuple[str, Config, str]]:
    """Parts of a config with their model_type; the whole of it, too, as what a wrapper's part lacks a key for."""
    model_type = config.get("model_type")
    if isinstance(model_type, str):
        yield "", config, model_type
    inner = list(parts(config))
    for path, part in inner:
        if kind := _type(path, part, config):
            yield path, part, kind
    for path, kind in inner_types(model_type).items():
        if path not in {there for there, _ in inner}:
            yield "", config, kind


def _type(path: str, part: Config, whole: Config) -> str:
    """A part's model_type, or the one that its wrapper's class gives it."""
    kind = part.get("model_type")
    return kind if isinstance(kind, str) else inner_types(whole.get("model_type")).get(path, "")


def _places(checkpoint: Checkpoint, found: _Found, part: Config) -> dict[str, Fit]:
    """Prefixes under which the tensors of a row have the width that its part says, and how well each fits it."""
    row = found.row.configured({**found.row.config.defaults, **part})
    keys = row.size_keys
    try:
        part = row.completed({**row.config.defaults, **part}, part.file) if row.config.derived else part
    except CheckpointError:  # it is said where the stack is opened
        return {}
    width, count = (
        next((part.get(key) for key in keys[size] if part.has(key)), None) for size in ("d_model", "n_layers")
    )
    places: dict[str, Fit] = {}
    with_tokens = prefixes_of(checkpoint, row)
    for prefix in complete_prefixes(checkpoint, row):
        if prefix not in with_tokens and _affinity(found.path, prefix, {found.kind}) < 0:  # of another kind by its name
            continue
        if not isinstance(width, int) or width in width_of(checkpoint, row, prefix):
            places[prefix] = Fit(
                all_layers=isinstance(count, int) and not checkpoint.names_under(prefix + row.layer.format(i=count)),
                affinity=_affinity(found.path, prefix, {found.kind}),
                shared_words=len(_words(found.path) & _words(prefix)),
                tokens=prefix + row.inputs.tokens in checkpoint,
                listed=prefix in row.prefixes,
                outer=-prefix.count("."),
            )
    return places


def _claim(row: Family, prefix: str) -> set[str]:
    """The modules that a row takes for its own there: two softmaxes of one matrix of scores share the other two."""
    return {prefix + row.layer + module for module in (row.heads.v, row.heads.out)}


def _words(text: str) -> set[str]:
    return {WORDS.get(word, word) for word in re.split(r"[._\d]+", text.lower())} - {"", "config", "model"}


def _affinity(path: str, prefix: str, kinds: set[str]) -> int:
    """Words that a part's keys and a prefix share, less the kinds of model that the prefix names and it is not."""
    words, names = _words(path) | kinds, _words(prefix)
    return len(words & names) - len((names & KINDS) - words)


def _place(path: str) -> str:
    """The keys that lead to a part, as a name."""
    return ".".join(key.removesuffix("_config") for key in path.split("."))


def _names(found: list[_Found]) -> list[str]:
    """A name for each stack: its kind, or its place in the config if another stack has that kind."""
    names = []
    for candidate in found:
        alike = [rival for rival in found if rival.kind == candidate.kind]
        depth = candidate.path.count(".") + bool(candidate.path)
        outer = min(rival.path.count(".") + bool(rival.path) for rival in alike)
        alone = sum(rival.path.count(".") + bool(rival.path) == outer for rival in alike) == 1
        place = _place(candidate.path)
        there = [rival for rival in found if rival.path == candidate.path]
        if len(alike) == 1 or (depth == outer and alone) or not place:
            names.append(candidate.kind)
        else:
            names.append(place if len(there) == 1 or candidate.kind in _words(place) else f"{place}.{candidate.kind}")
    again = Counter(names)
    return [name if again[name] == 1 else f"{name}.{number}" for number, name in enumerate(names)]
