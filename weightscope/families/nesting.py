"""Where a model stands within a checkpoint that wraps it: before which tensors' names, and in which part of a config.

Language models that see, hear or are tuned carry their decoder under a name of the wrapper's choice, and its config
under another. Both are told by what is there, not by what wrappers are known.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import islice

from weightscope.checkpoint import Checkpoint
from weightscope.checkpoint.config import Config
from weightscope.errors import CheckpointError
from weightscope.families.family import Family

DEEPEST = 3  # objects within objects of a config that are looked into
SIZES = ("n_layers", "d_model", "n_heads")


def prefixes_of(checkpoint: Checkpoint, family: Family) -> list[str]:
    """Every beginning of names under which some layer has all the projections of a row, the row's own first."""
    modules = {family.key, family.value, family.output}
    layer = re.escape(family.layer).replace(re.escape("{i}"), r"\d+")
    named = re.compile(rf"((?:.*\.)?){layer}({'|'.join(map(re.escape, modules))})(?:\.|_weight$)", re.ASCII)
    found: dict[str, set[str]] = {}
    for name in checkpoint:
        if match := named.match(name):
            found.setdefault(match[1], set()).add(match[2])
    complete = [prefix for prefix, seen in found.items() if seen == modules]
    with_tokens = [prefix for prefix in complete if prefix + family.inputs.tokens in checkpoint]
    return sorted(with_tokens or complete, key=lambda prefix: (prefix not in family.prefixes, prefix))


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
    outer, _, last = family.nested.rpartition(".")
    within = config
    for key in outer.split(".") if outer else ():
        within = within.inside(key)
    if last in within:
        return within.inside(last)
    if config.get("model_type") in family.model_types:
        return config
    inner = list(parts(config))
    named = [(path, part) for path, part in inner if part.get("model_type") in family.model_types]
    keys = family.size_keys
    if not named and all(config.has(*keys[size]) for size in SIZES):
        return config
    fitting = named if len(named) == 1 else [own for own in named or inner if _fits(checkpoint, family, own[1])]
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
    written = re.compile(rf"\d+{re.escape(rest + family.output)}\.(weight|bias)", re.ASCII)
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
    if len(found := prefixes_of(checkpoint, family)) == 1:
        return found[0]
    if found:
        several = ", ".join(prefix + marks[0] for prefix in found)
        raise CheckpointError(f"has several models of family {family.name} ({several})", file=checkpoint.name)
    tried = ", ".join(prefix + marks[0] + "*" for prefix in family.prefixes)
    raise CheckpointError(f"has no layer of a {family.name} (looked for {tried})", file=checkpoint.name)
