"""Positions that every layer adds, and positions in a table that must hold a formula."""

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from weightscope.model.config.config import ModelConfig, OneOf
from weightscope.model.layers.distances import of_a_head
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.maps import Affine
from weightscope.model.layers.positions import NOTHING_ADDED, Added
from weightscope.model.layers.steps import Place, Step
from weightscope.model.rows.cells import LayerTensors


@dataclass(frozen=True)
class AddedPositions(Step):
    """Positions added after the layer's norm; they pass the projections without their biases."""

    name = "added_positions"
    place = Place.INPUTS

    to: tuple[Annotated[str, OneOf("queries", "keys")], ...] = ("queries", "keys")

    def apply(
        self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors
    ) -> Layer:
        # the layout has read projections of positions (Conditional DETR)
        if layer.added is not NOTHING_ADDED:
            return layer
        maps = {"queries": layer.q, "keys": layer.k}
        unbiased = {
            side: Affine(made.stored, np.zeros_like(made.bias))
            for side, made in maps.items()
            if isinstance(made, Affine)
        }
        added = (unbiased[side] if side in self.to else None for side in maps)
        return replace(layer, added=Added(*added))

    def caveat(self, layer: Layer) -> str:
        return (
            "what positions add to scores: "
            "they are added to what queries and keys are made of (layer.added)"
        )


@dataclass(frozen=True)
class FixedSinusoids(Step):
    """A stored table of a head's rotation angles, refused where they are not the usual ones."""

    name = "fixed_sinusoids"
    place = Place.INPUTS
    compares = True
    exact = True

    table: str  # in the model, outside its layers

    def apply(
        self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors
    ) -> Layer:
        expected = of_a_head(config)
        if self.table in model and not np.allclose(
            model.read(self.table, expected.shape), expected, atol=1e-2
        ):
            raise model.tensor(self.table, expected.shape).refuse(
                "does not hold what roformer's formula gives"
            )
        return layer
