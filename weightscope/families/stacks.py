"""The attention models that a checkpoint holds: which row reads each, in which part of the config it is described, and
before which tensors' names it stands.

Wrappers are not listed anywhere. A part of the config is told by its model_type (`inner_types` has those that a wrapper
leaves out), and its tensors by the names that its row gives them, by its sizes, and by the words that the part's keys
and the tensors' names share.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from weightscope.checkpoint import Checkpoint
from weightscope.checkpoint.config import Config
from weightscope.errors import CheckpointError
from weightscope.families.config import KEYS
from weightscope.families.defaults import inner_types
from weightscope.families.family import Family
from weightscope.families.nesting import parts, prefixes_of, width_of
from weightscope.families.rows.unread import UNREAD

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


@dataclass
class _Found:
    """A row, the part of the config that may be its own, and the prefixes under which its tensors may be."""

    row: Family
    path: str
    model_type: str
    places: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What it is a model of."""
        words = _words(self.path)
        said = next((kind for kind in ("audio", "vision") if kind in words), "vision")
        return self.row.tower or ("text" if self.row.inputs.tokens else said)

    @property
    def best(self) -> tuple[tuple[int, ...], list[str]]:
        """The highest score, and the prefixes that have it."""
        most = max(self.places.values())
        return most, [prefix for prefix, score in self.places.items() if score == most]


def readable(families: Iterable[Family], checkpoint: Checkpoint) -> dict[str, Stack]:
    """The stacks that the rows read, by name, outer parts of the config first.

    One whose tensors may be in several places is not guessed, and is not among them.
    """
    open_, placed = list(_candidates(families, checkpoint)), list[tuple[_Found, str]]()
    order = {id(found): at for at, found in enumerate(open_)}
    while sure := [found for found in open_ if found.places and len(found.best[1]) == 1]:
        found = max(sure, key=lambda one: (one.best[0], -order[id(one)]))
        prefix = found.best[1][0]
        placed.append((found, prefix))
        open_ = [other for other in open_ if other is not found]
        for other in open_:
            if _claim(other.row, prefix) & _claim(found.row, prefix):
                other.places.pop(prefix, None)
    placed.sort(key=lambda one: order[id(one[0])])
    named = [(name, *one) for name, one in zip(_names([found for found, _ in placed]), placed, strict=True)]
    described = {path for path, part, _ in _described(checkpoint.config) if path and part.has(*KEYS["n_heads"])}
    if described <= {found.path for found, _ in placed}:
        taken = set().union(*(_claim(found.row, prefix) for found, prefix in placed))
        named += [
            (twin.strip(".").removeprefix("model."), found, twin)
            for found, own in placed
            for twin in _twins(checkpoint, found, own)
            if not _claim(found.row, twin) & taken
        ]
    return {
        name: Stack(name, found.row.but(nested=found.path, prefixes=(prefix,)), found.model_type, found.path, prefix)
        for name, found, prefix in named
    }


def _twins(checkpoint: Checkpoint, found: _Found, own: str) -> Iterator[str]:
    """Where else there are the same tensors in as many layers: one part of the config may describe two towers."""

    def shapes(prefix: str) -> dict[str, tuple[int, ...]]:
        first = prefix + found.row.layer.split("{i}")[0]
        return {name.removeprefix(first): checkpoint[name].shape for name in checkpoint.names_under(first)}

    for prefix, (whole, near, *_) in found.places.items():
        if prefix != own and whole and near >= 0 and shapes(prefix) == shapes(own):
            yield prefix


def choose(stacks: Mapping[str, Stack], tower: str | None) -> Stack | None:
    """The stack of that name or place, or the one that is language; None where that is none or several.

    Of several that are text the one is meant that makes logits of tokens, if one alone does.
    """
    if tower is None:
        stacks = {name: one for name, one in stacks.items() if one.family and not one.family.refused} or stacks
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
    left = {head: name for head, name in heads.items() if not any(own.startswith(head) for own in claimed)}
    described = [(path, _type(path, part, checkpoint.config)) for path, part in parts(checkpoint.config)]
    described = [(path, kind) for path, kind in described if kind and path not in {s.part for s in stacks.values()}]
    found: dict[str, Stack] = {}
    for head, name in left.items():
        path, kind = max(described, key=lambda one: _affinity(one[0], head, set()), default=("", ""))
        if described and _affinity(path, head, set()) <= 0:
            path, kind = "", ""
        words = _words(head)
        said = next((word for word in ("audio", "vision") if word in words), "") or _place(path)
        own = said if said and said not in stacks and said not in found else head.rstrip(".")
        of = f"model_type '{kind}'" if kind else f"model_type '{checkpoint.config.get('model_type')}'"
        why = (
            f"no row can describe {kind}: it {UNREAD[kind]}"
            if kind in UNREAD
            else f"no row reads it ({of}; '{name}' ...)"
        )
        found[own] = Stack(own, None, kind, path, head, why)
    return found


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
        for kind in row.model_types:
            by_type.setdefault(kind, []).append(row)
    seen = set()
    for path, part, kind in _described(checkpoint.config):
        for row in by_type.get(kind, ()):
            inner = bool(row.nested) and part.has(row.nested)
            own = ".".join(filter(None, (path, row.nested))) if inner else path
            if (id(row), own) in seen:
                continue
            seen.add((id(row), own))
            for same in chain((row,), _renamed(checkpoint, row, part)):  # only where it is not found
                found = _Found(same, own, kind)
                found.places = _places(checkpoint, found, part.inside(row.nested) if inner else part)
                if found.places:
                    yield found
                    break


def _renamed(checkpoint: Checkpoint, row: Family, part: Config) -> Iterator[Family]:
    """The row with another name for its list of layers, where the modules of one stand in a list of that name."""
    row = row.configured({**row.defaults, **part})
    before, _, after = row.layer.partition("{i}")
    outer = before[: before[:-1].rfind(".") + 1]
    named = re.compile(
        rf"(?:.*\.)?{re.escape(outer)}([A-Za-z_]+)\.\d+{re.escape(after + row.output)}\.weight", re.ASCII
    )
    lists = {match[1] for name in checkpoint if (match := named.fullmatch(name))}
    yield from (row.but(layer=f"{outer}{name}.{{i}}{after}") for name in sorted(lists) if f"{outer}{name}." != before)


def _described(config: Config) -> Iterator[tuple[str, Config, str]]:
    """Parts of a config with their model_type; the whole of it, too, as what a wrapper's part lacks a key for."""
    own = config.get("model_type")
    if isinstance(own, str):
        yield "", config, own
    inner = list(parts(config))
    for path, part in inner:
        if kind := _type(path, part, config):
            yield path, part, kind
    for path, kind in inner_types(own).items():
        if path not in {there for there, _ in inner}:
            yield "", config, kind


def _type(path: str, part: Config, whole: Config) -> str:
    """A part's model_type, or the one that its wrapper's class gives it."""
    kind = part.get("model_type")
    return kind if isinstance(kind, str) else inner_types(whole.get("model_type")).get(path, "")


def _places(checkpoint: Checkpoint, found: _Found, part: Config) -> dict[str, tuple[int, ...]]:
    """Prefixes under which the tensors of a row have the width that its part says, and how well each fits it."""
    row = found.row.configured({**found.row.defaults, **part})
    keys = row.size_keys
    try:
        part = row.completed({**row.defaults, **part}, part.file) if row.derived else part
    except CheckpointError:  # it is said where the stack is opened
        return {}
    width, count = (
        next((part.get(key) for key in keys[size] if part.has(key)), None) for size in ("d_model", "n_layers")
    )
    places: dict[str, tuple[int, ...]] = {}
    for prefix in prefixes_of(checkpoint, row):
        if not isinstance(width, int) or width in width_of(checkpoint, row, prefix):
            whole = isinstance(count, int) and not checkpoint.names_under(prefix + row.layer.format(i=count))
            near = _affinity(found.path, prefix, {found.kind})
            known = prefix in row.prefixes
            places[prefix] = (int(whole), near, int(known), -prefix.count("."))
    return places


def _claim(row: Family, prefix: str) -> set[str]:
    """The modules that a row takes for its own there: two softmaxes of one matrix of scores share the other two."""
    return {prefix + row.layer + module for module in (row.value, row.output)}


def _words(text: str) -> set[str]:
    return {WORDS.get(word, word) for word in re.split(r"[._\d]+", text.lower())} - {"", "config", "model"}


def _affinity(path: str, prefix: str, kinds: set[str]) -> int:
    """Words that a part's keys and a prefix share, less the kinds of model that the prefix names and it is not."""
    said, names = _words(path) | kinds, _words(prefix)
    return len(said & names) - len((names & KINDS) - said)


def _place(path: str) -> str:
    """The keys that lead to a part, as a name."""
    return ".".join(key.removesuffix("_config") for key in path.split("."))


def _names(found: list[_Found]) -> list[str]:
    """A name for each: its kind, or where it stands where another outside of it, or beside it, is of that kind."""
    names = []
    for one in found:
        alike = [other for other in found if other.kind == one.kind]
        depth = one.path.count(".") + bool(one.path)
        outer = min(other.path.count(".") + bool(other.path) for other in alike)
        alone = sum(other.path.count(".") + bool(other.path) == outer for other in alike) == 1
        place = _place(one.path)
        there = [other for other in found if other.path == one.path]
        if len(alike) == 1 or (depth == outer and alone) or not place:
            names.append(one.kind)
        else:
            names.append(place if len(there) == 1 or one.kind in _words(place) else f"{place}.{one.kind}")
    again = Counter(names)
    return [name if again[name] == 1 else f"{name}.{number}" for number, name in enumerate(names)]
