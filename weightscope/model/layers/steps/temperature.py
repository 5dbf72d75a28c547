"""Temperatures by position: queries are multiplied by a number that depends on where they are."""

from dataclasses import dataclass, replace

from weightscope.model.config.config import ModelConfig
from weightscope.model.config.rules import listed, with_parameters
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.positions import Logarithm, Power, Temperature
from weightscope.model.layers.steps import Place, Step
from weightscope.model.rows.cells import LayerTensors


@dataclass(frozen=True)
class OfPosition(Step):
    """A temperature of attention by the query's position."""

    place = Place.VECTORS
    portable = True

    def takes(self, config: ModelConfig, index: int) -> Temperature | None:
        """The temperature of a layer; None where it has none."""
        raise NotImplementedError

    def apply(
        self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors
    ) -> Layer:
        return replace(layer, temperature=self.takes(config, layer.index))

    def caveat(self, layer: Layer) -> str:
        if layer.temperature is None:
            return ""
        text = "the temperature of attention: scores of a query at position p are multiplied by"
        return f"{text} {layer.temperature}"


@dataclass(frozen=True)
class BeyondTraining(OfPosition):
    """Ministral 3: 1 + beta log(1 + floor(p / original_max_position_embeddings)).

    beta is llama_4_scaling_beta.
    """

    name = "temperature_beyond_training"

    def takes(self, config: ModelConfig, index: int) -> Temperature | None:
        given = config.rope[config.layer_types[index]]
        if not given.get("llama_4_scaling_beta"):
            return None
        period = given.number("original_max_position_embeddings", smallest=1)
        return Logarithm(given.number("llama_4_scaling_beta"), period)


@dataclass(frozen=True)
class WithoutRotation(OfPosition):
    """Llama 4: 1 + attn_scale log(1 + floor((p + 1) / floor_scale)) where nothing rotates."""

    name = "temperature_without_rotation"

    def takes(self, config: ModelConfig, index: int) -> Temperature | None:
        if listed(config, index) or not config.get("attn_temperature_tuning"):
            return None
        return Logarithm(
            config.number("attn_scale"),
            config.number("floor_scale", smallest=1),
            first=1,
            counted=True,
        )


@dataclass(frozen=True)
class ScalableSoftmax(OfPosition):
    """Beam: (1 + (p + 1) / 2048)^0.1 in layers that do not rotate."""

    name = "scalable_softmax"

    def takes(self, config: ModelConfig, index: int) -> Temperature | None:
        return None if with_parameters(config, index) else Power(0.1, 2048)
