"""Architectures as data: a row a family, and a few layout functions."""

from weightscope.checkpoint import Checkpoint
from weightscope.families import gguf
from weightscope.families.config import ModelConfig
from weightscope.families.encoders import ENCODERS
from weightscope.families.family import Family
from weightscope.families.gpt import GPT_DECODERS
from weightscope.families.llama import LLAMA_DECODERS
from weightscope.families.reading import choose_family, own_part, read_config, refuse_endless_embeddings
from weightscope.families.tensors import LayerTensors
from weightscope.families.vision import VISION

__all__ = [
    "FAMILIES", "Family", "LayerTensors", "ModelConfig", "as_published", "family_of", "own_part", "read_config",
    "refuse_endless_embeddings",
]  # fmt: skip

FAMILIES: tuple[Family, ...] = (*GPT_DECODERS, *LLAMA_DECODERS, *ENCODERS, *VISION)


def family_of(checkpoint: Checkpoint, name: str | None = None, tower: str | None = None) -> Family:
    """The row that reads a checkpoint; see `choose_family`."""
    return choose_family(FAMILIES, checkpoint, name, tower)


def as_published(checkpoint: Checkpoint) -> Checkpoint:
    """A GGUF file as the checkpoint that it was converted from; see `gguf.as_published`."""
    return gguf.as_published(checkpoint, FAMILIES)
