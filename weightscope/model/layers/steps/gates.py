"""Gates: factors from the query token, on a head's weighted sum or on the position bias."""

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from weightscope.model.config.config import ModelConfig, OneOf
from weightscope.model.layers import positions
from weightscope.model.layers.gathered import GATES
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.layouts import by_head, linear
from weightscope.model.layers.maps import Affine
from weightscope.model.layers.steps import Place, Reads, Step
from weightscope.model.rows.cells import LayerTensors


def gate_caveat(layer: Layer) -> str:
    """The caveat of an output gate, whether a step or the layout has read it."""
    return (
        "the output gate: what a head gathers is multiplied by "
        f"a {layer.gate_kind} of the query token (layer.gate)"
    )


@dataclass(frozen=True)
class Gate(Step):
    """A Linear of the query token, with an output for each dimension of a head or for each head."""

    name = "gate"
    place = Place.GATHERED

    module: str
    bias: bool | str = False  # or the config key that tells
    of_heads: str = ""  # tensor of a further bias, one for each head
    kind: Annotated[str, OneOf(*GATES)] = "sigmoid"

    def reads(self) -> Reads:
        return Reads(modules=(self.module,), tensors=tuple(filter(None, (self.of_heads,))))

    def apply(
        self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors
    ) -> Layer:
        h, r_v, _ = layer.w_o.shape
        stored = tensors.checkpoint.get(f"{tensors.prefix}{self.module}.weight")
        rows = h if stored and stored.shape[:1] == (h,) else h * r_v
        gate = by_head(*linear(tensors, config, self.module, (rows, config.d_model), self.bias), h)
        if self.of_heads:
            gate = replace(gate, bias=gate.bias + tensors.read(self.of_heads, (h,))[:, None])
        return replace(
            layer,
            gate=gate if layer.norm is None else gate.after_norm(layer.norm),
            gate_kind=self.kind,
        )

    def caveat(self, layer: Layer) -> str:
        return gate_caveat(layer)


@dataclass(frozen=True)
class BiasGate(Step):
    """A Linear of each head's part of the query token, the same for all; its outputs sum to two."""

    name = "bias_gate"
    place = Place.POSITIONS

    module: str
    factor: str  # tensor (1, H, 1, 1)

    def reads(self) -> Reads:
        return Reads(modules=(self.module,), tensors=(self.factor,))

    def apply(
        self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors
    ) -> Layer:
        h, r = config.n_heads, config.head_dim
        # (r, 2)
        of_head = tensors.read(self.module + ".weight", (8, r)).reshape(2, 4, r).sum(axis=1).T
        bias = tensors.read(self.module + ".bias", (8,)).reshape(2, 4).sum(axis=1)
        w = np.einsum("hg,ro->hgro", np.eye(h, dtype=of_head.dtype), of_head).reshape(h, h * r, 2)
        factor = tensors.read(self.factor, (1, h, 1, 1)).ravel()
        gate = positions.BiasFactor(Affine(w, np.tile(bias, (h, 1))), factor)
        return replace(
            layer, additive_gate=gate if layer.norm is None else gate.after_norm(layer.norm)
        )

    def caveat(self, layer: Layer) -> str:
        return "a factor of the query, which multiplies the position bias (layer.additive_gate)"
