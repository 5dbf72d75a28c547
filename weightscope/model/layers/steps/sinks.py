"""Learned sink logits: one more term in each softmax, which takes attention and gives nothing."""

from dataclasses import dataclass, replace

from weightscope.model.config.config import ModelConfig
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.steps import Place, Reads, Step
from weightscope.model.rows.cells import LayerTensors


@dataclass(frozen=True)
class Sinks(Step):
    """Sink logits inside the softmax (gpt-oss)."""

    name = "sinks"
    place = Place.SCORES
    label = "sinks"

    tensor: str  # (H,), in each layer

    def reads(self) -> Reads:
        return Reads(tensors=(self.tensor,))

    def apply(
        self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors
    ) -> Layer:
        return replace(layer, sinks=tensors.read(self.tensor, (config.n_heads,)))

    def caveat(self, layer: Layer) -> str:
        return "the learned sink logit, one more term in each softmax (layer.sinks)"


@dataclass(frozen=True)
class OuterSinks(Step):
    """Sink logits outside the softmax: the mass they leave multiplies a head's weighted sum
    (Granite).
    """

    name = "outer_sinks"
    place = Place.GATHERED

    tensor: str  # (H,), in each layer

    def reads(self) -> Reads:
        return Reads(tensors=(self.tensor,))

    def apply(
        self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors
    ) -> Layer:
        return replace(layer, outer_sinks=tensors.read(self.tensor, (config.n_heads,)))

    def caveat(self, layer: Layer) -> str:
        return (
            "the learned sink logit, one more term in each softmax, which transformers "
            "leaves out of attention and multiplies what a head gathers by"
        )
