"""Positions stored as learned ones that hold a formula, which replaces what the model does with them (RoFormer)."""

from dataclasses import dataclass

import numpy as np

from weightscope.architectures.cells import LayerTensors
from weightscope.architectures.config import ModelConfig
from weightscope.architectures.distances import of_a_head
from weightscope.architectures.steps import Place, Step
from weightscope.attention.layer import Layer


@dataclass(frozen=True)
class FixedSinusoids(Step):
    """The angles by which a head turns are in a table: a layer is refused where they are not the usual ones."""

    name = "fixed_sinusoids"
    place = Place.INPUTS
    compares = True

    table: str  # of the model

    def apply(self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors) -> Layer:
        expected = of_a_head(config)
        if self.table in model and not np.allclose(model.read(self.table, expected.shape), expected, atol=1e-2):
            raise model.tensor(self.table, expected.shape).refuse("does not hold what roformer's formula gives")
        return layer
