"""Indexers: modules that choose which keys a query sees (DeepSeek-V3.2)."""

from dataclasses import dataclass

from weightscope.architectures.steps import Place, Reads, Step
from weightscope.attention.layer import Layer


@dataclass(frozen=True)
class Indexer(Step):
    """A part of the mask: scores are the model's where it sees, and its weights are not read."""

    name = "indexer"
    place = Place.MASK

    module: str = "self_attn.indexer"

    def reads(self) -> Reads:
        return Reads(ignored=(self.module,))

    def caveat(self, layer: Layer) -> str:
        return "an indexer chooses which keys a query sees: scores are the model's where it sees, as with any mask"
