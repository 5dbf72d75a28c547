"""Rows for an architecture that the table does not list: made of names and shapes, proved against the eager model."""

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import numpy as np
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from weightscope.adoption.proposals import proposals
from weightscope.adoption.searching import Found, Search
from weightscope.adoption.switches import guarded
from weightscope.adoption.tiny import first_line
from weightscope.adoption.trial import Tiny, nearness, proved, tiny_models
from weightscope.checkpoint import Checkpoint
from weightscope.errors import CheckpointError
from weightscope.families import FAMILIES, Family, LayerTensors
from weightscope.families.layer import read_layer
from weightscope.families.nesting import prefixes_of
from weightscope.families.sizes import in_layer
from weightscope.model import Model

PROOF = f"transformers {transformers.__version__}"


@dataclass(frozen=True)
class Adopted:
    """What was found of a checkpoint.

    Attributes
    ----------
    rows : tuple of Family
        One of each stack that is proved.
    refused : dict of str
        Of every other stack, by the path of its attention modules, how near the nearest row came.
    """

    rows: tuple[Family, ...]
    refused: Mapping[str, str]


def adopt(checkpoint: Checkpoint, rows: Iterable[Family] = FAMILIES) -> Adopted:
    """The rows that read a checkpoint exactly: at two sizes, of two random models, near and far; one a stack.

    Parameters
    ----------
    checkpoint : Checkpoint
        Its names, shapes and config are looked at; no code that comes with it is run.
    rows : iterable of Family
        What proposals and cells are taken from.

    Raises
    ------
    CheckpointError
        transformers has no such architecture or cannot build a tiny one, or no row is exact; the message says how far
        the nearest came.
    """
    rows = tuple(rows)
    kind = checkpoint.config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        problem = f"{PROOF} has no architecture '{str(kind)[:40]}', and code that comes with a checkpoint is not run"
        raise CheckpointError(problem, file=checkpoint.name)
    try:
        made = CONFIG_MAPPING[kind]
        config, usual = made.from_dict(dict(checkpoint.config)), made().to_dict()
    except Exception as error:  # whatever transformers raises of a config
        raise CheckpointError(
            f"transformers cannot read it: {first_line(error)}", file=checkpoint.config.file
        ) from None
    found, refused = [], {}
    with tiny_models(config, checkpoint.name) as tinies:
        for stack in tinies[0].stacks:
            if any(stack not in tiny.stacks for tiny in tinies):
                refused[stack] = "it is seen at one size only"
                continue
            search = Search(tinies, stack, rows)
            best = search.run(_proposals(search, usual))
            row, refused[stack] = _kept(best, search, checkpoint, config.to_dict())
            if row is not None:
                found.append(row)
                del refused[stack]
    if not found:
        said = "; ".join(f"{stack}: {why}" if len(refused) > 1 else why for stack, why in refused.items())
        raise CheckpointError(f"no row reads it exactly; nearest: {said}", file=checkpoint.name)
    return Adopted(tuple(found), refused)


def _proposals(search: Search, usual: Mapping[str, Any]) -> list[Family]:
    """Rows of the table whose modules the stack's layers have."""
    derived, tiny = search.derived, search.tinies[0]
    part = derived.first.part
    own = dict(usual)
    for key in filter(None, part.split(".")):
        own = own.get(key) or {}
    stems = derived.first.stems.values()
    return proposals(tiny.checkpoint, stems, own, derived.left_out, search.rows, **derived.identity)


def _kept(
    best: Found | None, search: Search, checkpoint: Checkpoint, understood: dict[str, Any]
) -> tuple[Family | None, str]:
    """The row that was found, if it is proved and fits the checkpoint itself; or why it is not kept."""
    if best is None:
        return None, "its attention is made of no modules that a row can name"
    if best.said:
        return None, best.said
    row = guarded(_tidy(best.row, search), search.derived)
    if problem := proved(row, search.tinies, search.stack):
        return None, problem
    for placed in _placements(row, checkpoint):
        if problem := misfit(placed, checkpoint):
            continue
        if not (problem := misread(placed, checkpoint, understood)):
            return placed, ""
        for other in search.older(placed, checkpoint.config):
            if not misread(other, checkpoint, understood) and not proved(other, search.tinies, search.stack):
                return other, ""
    return None, f"the row that is exact of tiny models does not fit this file: {problem or 'no such layers'}"


def _tidy(row: Family, search: Search) -> Family:
    """The row with flags for its biases where there are any, and without defaults of keys that it does not read."""
    tiny = search.tinies[0]
    for other in search.flagged(row):
        row = row if search.tried(other).said else other
    needed = {}
    for key, value in row.defaults.items():
        if not _read_without(key, row, tiny, search.stack):
            needed[key] = value
    return replace(row, defaults=needed)


def _read_without(key: str, row: Family, tiny: Tiny, stack: str) -> bool:
    """Whether a row comes out right where neither the config nor the row itself says what a key is."""

    def without(values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {name: without(value) for name, value in values.items() if name != key}

    bare = replace(tiny, checkpoint=tiny.checkpoint.with_config(without(tiny.checkpoint.config.raw)))
    return not nearness(replace(row, defaults=without(row.defaults)), bare, stack).said


def _placements(row: Family, checkpoint: Checkpoint) -> Iterable[Family]:
    """The row with each prefix that its layers have in the checkpoint itself, those like the tiny model's first."""
    (own,) = row.prefixes
    found = prefixes_of(checkpoint, row)
    for prefix in sorted(found, key=lambda one: (not one.endswith(own), len(one))):
        yield row.but(prefixes=tuple(dict.fromkeys((prefix, own))))


class _Shapes(LayerTensors):
    """Tensors whose shapes are looked at and whose numbers are not read."""

    def read(self, name: str, shape: tuple[int | None, ...]) -> np.ndarray:
        return np.zeros(self.tensor(name, shape).shape, np.float32)

    weights = read


def misfit(row: Family, checkpoint: Checkpoint) -> str:
    """What of a row is not in a checkpoint: a tensor, or its shape; or what the file has of attention beside it."""
    try:
        model = Model(checkpoint, row.but(origin=f"adopted, proved against {PROOF}"))
        types = {model.config.layer_types[index]: index for index in reversed(model.attention_layers)}
        tensors = model.tensors()
        shapes = _Shapes(tensors.checkpoint, tensors.prefix, tensors.needed_by)
        for index in model.attention_layers:
            if not model.attention_tensors(index):
                return f"layer {index} is not there"
        for index in types.values():
            read_layer(tensors if row.frozen else shapes, model.family, model.config, index)
    except CheckpointError as error:
        return str(error).splitlines()[0]
    return "" if model.attention_layers else "it has no layer of attention"


def misread(row: Family, checkpoint: Checkpoint, understood: dict[str, Any]) -> str:
    """What a row takes from a checkpoint's own config otherwise than from that config as transformers has it.

    Older files have other keys (`rope_theta` for `rope_parameters`), which tiny models never show.
    """
    try:
        own, other = (_numbers(Model(one, row)) for one in (checkpoint, checkpoint.with_config(understood)))
    except CheckpointError as error:
        return str(error).splitlines()[0]
    differs = [what for what in own if str(own[what]) != str(other[what])]
    return f"transformers reads {differs[0]} of its config.json otherwise" if differs else ""


def _numbers(model: Model) -> dict[str, Any]:
    """All that a row takes from a config."""
    config, family, layers = model.config, model.family, model.attention_layers
    return {
        "sizes": [in_layer(config, family, i)[0].head_dim for i in layers] + [config.n_heads, config.n_kv_heads],
        "the layers": (config.n_layers, config.layer_types, layers),
        "the norm's eps": config.norm_eps,
        "the scale": [family.scale(config, i) for i in layers],
        "the rotation": [_turns(model.rotations[i]) for i in layers],
        "the temperature": [family.temperature(config, i) for i in layers] if family.temperature else None,
        "caps": [config.get(key) for key in (family.softcap, *family.clip)],
        "multipliers": [config.get(key) for key in family.multipliers.values()],
        "biases": [config.get(flag) if isinstance(flag, str) else flag for flag in astuple(family.biases)],
    }


def _turns(rotation: Any) -> Any:
    """A rotation's numbers in full."""
    if rotation is None:
        return None
    values = {one.name: getattr(rotation, one.name) for one in fields(rotation)}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}
