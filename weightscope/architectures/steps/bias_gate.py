"""A gate of the position bias (WavLM, section III.B)."""

from dataclasses import dataclass, replace

import numpy as np

from weightscope.architectures.cells import LayerTensors
from weightscope.architectures.config import ModelConfig
from weightscope.architectures.steps import Place, Reads, Step
from weightscope.attention import positions
from weightscope.attention.layer import Layer
from weightscope.attention.maps import Affine


@dataclass(frozen=True)
class BiasGate(Step):
    """A Linear of each head's part of the query token, the same for all heads, whose outputs add up to two."""

    name = "bias_gate"
    place = Place.POSITIONS

    module: str
    factor: str  # tensor (1, H, 1, 1)

    def reads(self) -> Reads:
        return Reads(modules=(self.module,), tensors=(self.factor,))

    def apply(self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors) -> Layer:
        h, r = config.n_heads, config.head_dim
        of_head = tensors.read(self.module + ".weight", (8, r)).reshape(2, 4, r).sum(axis=1).T  # (r, 2)
        bias = tensors.read(self.module + ".bias", (8,)).reshape(2, 4).sum(axis=1)
        w = np.einsum("hg,ro->hgro", np.eye(h, dtype=of_head.dtype), of_head).reshape(h, h * r, 2)
        factor = tensors.read(self.factor, (1, h, 1, 1)).ravel()
        gate = positions.BiasGate(Affine(w, np.tile(bias, (h, 1))), factor)
        return replace(layer, additive_gate=gate if layer.norm is None else gate.after_norm(layer.norm))

    def caveat(self, layer: Layer) -> str:
        return "a factor of the query, which multiplies the position bias (layer.additive_gate)"
