"""Architectures as data: a stanza of a TOML file for each, and a few functions that stanzas name."""

from pathlib import Path

from weightscope.architectures import gguf
from weightscope.architectures.cells import LayerTensors
from weightscope.architectures.config import ModelConfig
from weightscope.architectures.family import Family
from weightscope.architectures.reading import (
    Reading,
    choose_family,
    completed_part,
    labelled,
    list_stacks,
    read_as,
    read_config,
)
from weightscope.architectures.stacks import Stack, described_parts
from weightscope.architectures.table import FAMILIES, known_rows
from weightscope.checkpoint import Checkpoint

__all__ = [
    "FAMILIES", "Family", "LayerTensors", "ModelConfig", "Reading", "Stack", "as_published", "completed_part", "decide",
    "read_as", "read_config", "stacks_of",
]  # fmt: skip


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


def as_published(checkpoint: Checkpoint) -> Checkpoint:
    """A GGUF file as the checkpoint that it was converted from; see `gguf.as_published`."""
    return gguf.as_published(checkpoint, FAMILIES.of_gguf)
