"""Architectures as data: a row a family, and a few layout functions."""

from pathlib import Path

from weightscope.checkpoint import Checkpoint
from weightscope.families import gguf
from weightscope.families.config import ModelConfig
from weightscope.families.family import Family
from weightscope.families.own_rows import known_rows
from weightscope.families.reading import (
    as_asked,
    choose_family,
    list_stacks,
    own_part,
    read_config,
    refuse_endless_embeddings,
)
from weightscope.families.rows import FAMILIES
from weightscope.families.stacks import Stack
from weightscope.families.tensors import LayerTensors

__all__ = [
    "FAMILIES", "Family", "LayerTensors", "ModelConfig", "Stack", "as_published", "family_of", "own_part",
    "read_config", "refuse_endless_embeddings", "stacks_of",
]  # fmt: skip


def family_of(
    checkpoint: Checkpoint, name: str | None = None, tower: str | None = None, families: str | Path | None = None
) -> Family:
    """The row that reads a checkpoint; see `known_rows` and `choose_family`."""
    row = choose_family(known_rows(families), checkpoint, name, tower)
    return row if name is None else as_asked(row, checkpoint, name)


def stacks_of(checkpoint: Checkpoint) -> dict[str, Stack]:
    """The attention models that a checkpoint holds; see `list_stacks`."""
    return list_stacks(known_rows(), checkpoint)


def as_published(checkpoint: Checkpoint) -> Checkpoint:
    """A GGUF file as the checkpoint that it was converted from; see `gguf.as_published`."""
    return gguf.as_published(checkpoint, FAMILIES)
