"""Numbers from the config that multiply what enters attention, or its keys or values (Falcon-H1, MiMo-V2)."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weightscope.architectures.cells import LayerTensors
from weightscope.architectures.config import ModelConfig
from weightscope.architectures.steps import Place, Step
from weightscope.attention.layer import Layer
from weightscope.attention.maps import Affine, Latent
from weightscope.attention.norms import Norm
from weightscope.errors import CheckpointError


@dataclass(frozen=True)
class Multipliers(Step):
    """Each is a config key; empty where nothing is multiplied."""

    name = "multipliers"
    place = Place.INPUTS
    portable = True
    exact = True

    input: str = ""  # of what the norm before the layer gives
    key: str = ""
    value: str = ""

    def takes(self, config: ModelConfig, index: int) -> Any:
        return [config.get(name) for name in (self.input, self.key, self.value)]

    def on_norm(self, norm: Norm, config: ModelConfig) -> Norm:
        if not self.input:
            return norm
        factor = np.float32(config.number(self.input, smallest=-1e12))
        return replace(norm, gamma=factor * norm.gamma, beta=factor * norm.beta)

    def apply(self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors) -> Layer:
        return replace(layer, k=_multiplied(layer.k, self.key, config), v=_multiplied(layer.v, self.value, config))


def _multiplied(made: Affine | Latent, key: str, config: ModelConfig) -> Affine | Latent:
    """Keys or values multiplied by the number under a config key."""
    if not key:
        return made
    if isinstance(made, Latent):
        raise CheckpointError(f"'{key}' multiplies what comes out of a latent, which is not read", file=config.file)
    return made.scaled(np.full((1, 1), config.number(key, smallest=-1e12), np.float32))
