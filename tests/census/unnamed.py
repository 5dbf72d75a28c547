"""How many tensors of a checkpoint have a role, and where those are that have none."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import weightscope as ws
from weightscope.adopting.tiny_models import class_and_line
from weightscope.core.errors import CheckpointError
from weightscope.model.model import open_tensors
from weightscope.model.rows.names import Tensors

MOST_PLACES = 6  # named of those that lack a role


class Named(NamedTuple):
    """How many tensors a checkpoint has, how many of them have no role, and where they are."""

    tensors: int
    unnamed: int
    where: str = ""


def named(models: Sequence[ws.Model], folder: Path | None = None) -> Named:
    """What the models read of one checkpoint name together; without any, what a refused row names in `folder`."""
    opened = models[0] if models else None if folder is None else open_tensors(folder)
    if opened is None or not opened.tensors.readers:
        return Named(0, 0, "no stack is read")
    tensors = opened.tensors
    try:
        unnamed = [tensor.name for tensor in tensors if tensor.role == tensor.name]
    except CheckpointError as error:  # another stack's config, which no verdict is about
        return Named(0, 0, f"not listed: {class_and_line(error)}")
    return Named(len(tensors), len(unnamed), places(unnamed, tensors))


def places(names: Iterable[str], tensors: Tensors) -> str:
    """The modules that hold tensors of these names: within the layers that are read, and elsewhere."""
    stems = [reader.prefix + reader.family.layer for reader in tensors.readers]
    layers = [
        re.compile(re.escape(stem).replace(re.escape("{i}"), r"\d+") + r"([^.]+)") for stem in stems if "{i}" in stem
    ]
    inside: dict[str, None] = {}
    outside: dict[str, None] = {}
    for name in names:
        match = next(filter(None, (layer.match(name) for layer in layers)), None)
        inner = name.removeprefix(next((start for start in ("model.", "base_model.") if name.startswith(start)), ""))
        (inside if match else outside)[match[1] if match else inner.partition(".")[0]] = None
    parts = (("in layers: ", [*inside]), ("elsewhere: ", [*outside]))
    return "; ".join(kind + _few(modules) for kind, modules in parts if modules)


def _few(modules: Sequence[str]) -> str:
    more = len(modules) - MOST_PLACES
    return ", ".join(modules[:MOST_PLACES]) + (f" and {more} more" if more > 0 else "")
