"""Architectures as data: a row a family, and a few layout functions."""

from weightscope.checkpoint import Checkpoint
from weightscope.errors import CheckpointError
from weightscope.families.config import ModelConfig, read_config
from weightscope.families.family import Family, LayerNorm, Projections
from weightscope.families.rows import FAMILIES
from weightscope.families.tensors import LayerTensors

__all__ = ["FAMILIES", "Family", "LayerNorm", "LayerTensors", "ModelConfig", "Projections", "family_of", "read_config"]


def family_of(checkpoint: Checkpoint, name: str | None = None) -> Family:
    """The row that reads a checkpoint: the one asked for by name, else the one its config's model_type names.

    Raises
    ------
    CheckpointError
        No row reads it. The message names the family whose tensor names are nearest, and how to try it.
    """
    by_name = {family.name: family for family in FAMILIES}
    if name is not None:
        if name not in by_name:
            raise CheckpointError(f"no family is called '{name}'; known are {', '.join(sorted(by_name))}")
        return by_name[name]
    model_type = checkpoint.config.get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    found = (
        "no config.json says which model_type this is" if model_type is None else f"unknown model_type '{model_type}'"
    )
    raise CheckpointError(f"{found}{_nearest(checkpoint)}", file=checkpoint.name)


def _nearest(checkpoint: Checkpoint) -> str:
    """What to try instead: the family with a layer-0 query tensor of a name that stands in the checkpoint."""
    for family in FAMILIES:
        for prefix in family.prefixes:
            query = prefix + family.layer.format(i=0) + family.query + ".weight"
            if query in checkpoint:
                return f"; tensor '{query}' is named as in {family.name}: try --family {family.name}"
    return "; its tensors are named like no family that weightscope knows"
