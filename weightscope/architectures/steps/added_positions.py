"""Positions that every layer adds to what queries and keys are made of, and not to values (DETR, section A.3)."""

from dataclasses import dataclass, replace

import numpy as np

from weightscope.architectures.cells import LayerTensors
from weightscope.architectures.config import ModelConfig
from weightscope.architectures.steps import Place, Step
from weightscope.attention.layer import Layer
from weightscope.attention.maps import Affine
from weightscope.attention.positions import NOTHING_ADDED, Added


@dataclass(frozen=True)
class AddedPositions(Step):
    """Positions added to the stream after the layer's norm: they pass through the projections, without their biases."""

    name = "added_positions"
    place = Place.INPUTS

    to: tuple[str, ...] = ("queries", "keys")

    def apply(self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors) -> Layer:
        if layer.added is not NOTHING_ADDED:  # the layout has read projections of positions (Conditional DETR)
            return layer
        maps = {"queries": layer.q, "keys": layer.k}
        unbiased = {
            side: Affine(made.stored, np.zeros_like(made.bias))
            for side, made in maps.items()
            if isinstance(made, Affine)
        }
        return replace(layer, added=Added(*(unbiased[side] if side in self.to else None for side in maps)))

    def caveat(self, layer: Layer) -> str:
        return "what positions add to scores: they are added to what queries and keys are made of (layer.added)"
