"""Architectures as data: a stanza of a TOML file for each, and a few functions that stanzas name."""

from weightscope.architectures.cells import LayerTensors
from weightscope.architectures.config import ModelConfig
from weightscope.architectures.family import Family
from weightscope.architectures.numbers import completed_part, read_config
from weightscope.architectures.reading import Reading, Stack, as_published, decide, read_as, stacks_of
from weightscope.architectures.table import FAMILIES

__all__ = [
    "FAMILIES", "Family", "LayerTensors", "ModelConfig", "Reading", "Stack", "as_published", "completed_part", "decide",
    "read_as", "read_config", "stacks_of",
]  # fmt: skip
