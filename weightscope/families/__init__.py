"""Architectures as data: a row a family, and a few layout functions."""

from weightscope.checkpoint import Checkpoint
from weightscope.families import gguf
from weightscope.families.config import ModelConfig
from weightscope.families.family import Family
from weightscope.families.reading import choose_family, list_stacks, own_part, read_config, refuse_endless_embeddings
from weightscope.families.rows import FAMILIES
from weightscope.families.stacks import Stack
from weightscope.families.tensors import LayerTensors

__all__ = [
    "FAMILIES", "Family", "LayerTensors", "ModelConfig", "Stack", "as_published", "family_of", "own_part",
    "read_config", "refuse_endless_embeddings", "stacks_of",
]  # fmt: skip


def family_of(checkpoint: Checkpoint, name: str | None = None, tower: str | None = None) -> Family:
    """The row that reads a checkpoint; see `choose_family`."""
    return choose_family(FAMILIES, checkpoint, name, tower)


def stacks_of(checkpoint: Checkpoint) -> dict[str, Stack]:
    """The attention models that a checkpoint holds; see `list_stacks`."""
    return list_stacks(FAMILIES, checkpoint)


def as_published(checkpoint: Checkpoint) -> Checkpoint:
    """A GGUF file as the checkpoint that it was converted from; see `gguf.as_published`."""
    return gguf.as_published(checkpoint, FAMILIES)
