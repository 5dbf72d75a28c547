"""A norm of values (Gemma 3n)."""

from dataclasses import dataclass, replace

from weightscope.architectures.cells import LayerTensors
from weightscope.architectures.config import ModelConfig
from weightscope.architectures.steps import Place, Step
from weightscope.attention.layer import Layer
from weightscope.attention.maps import Affine, InnerNorm


@dataclass(frozen=True)
class ValuesNormed(Step):
    """An RMSNorm without parameters divides each head's values."""

    name = "values_normed"
    place = Place.VECTORS
    portable = True

    def apply(self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors) -> Layer:
        # Values that come out of a latent have that latent's norm.
        return replace(layer, v_norm=InnerNorm(layer.v, config.norm_eps)) if isinstance(layer.v, Affine) else layer

    def caveat(self, layer: Layer) -> str:
        return "the norm of values: each head's value is divided by its size" if isinstance(layer.v, Affine) else ""
