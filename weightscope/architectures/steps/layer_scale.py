"""LayerScale: what attention gives is multiplied by a learned number for each dimension (CaiT, DINOv2)."""

from dataclasses import dataclass, replace

import numpy as np

from weightscope.architectures.cells import LayerTensors
from weightscope.architectures.config import ModelConfig
from weightscope.architectures.steps import Place, Reads, Step
from weightscope.attention.layer import Layer


@dataclass(frozen=True)
class LayerScale(Step):
    """W_O and its bias take the numbers in, so that heads leave nothing out."""

    name = "layer_scale"
    place = Place.OUTPUT
    label = "LayerScale"
    exact = True

    tensor: str  # (d,) of a layer

    @property
    def output_module(self) -> str:
        return self.tensor.rpartition(".")[0]

    def reads(self) -> Reads:
        return Reads(modules=(self.output_module,)) if self.output_module else Reads(tensors=(self.tensor,))

    def apply(self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors) -> Layer:
        scale = tensors.read(self.tensor, (config.d_model,))
        return replace(layer, w_o=np.asarray(layer.w_o) * scale, output_bias=layer.output_bias * scale)
