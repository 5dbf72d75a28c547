"""Factors on what attention reads or writes: from the config, or learned per dimension or head."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np

from weightscope.core.errors import CheckpointError
from weightscope.model.config.config import ModelConfig, OneOf
from weightscope.model.layers.gathered import softplus
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.maps import Affine, Latent, Norm
from weightscope.model.layers.steps import Place, Reads, Step
from weightscope.model.rows.cells import LayerTensors

# Factors from a stored number t.
FACTORS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "exp(t)": np.exp,
    "t": np.asarray,
    "1/t": np.reciprocal,
    "exp(-t)": lambda t: np.exp(-t),
    "softplus(t)": softplus,
}


@dataclass(frozen=True)
class Multipliers(Step):
    """Config keys of factors on attention's input, its keys or its values (Falcon-H1, MiMo-V2)."""

    name = "multipliers"
    place = Place.INPUTS
    portable = True
    exact = True

    # config keys; empty where nothing is multiplied
    input: str = ""  # on the output of the norm before the layer
    key: str = ""
    value: str = ""

    def takes(self, config: ModelConfig, index: int) -> Any:
        return [config.get(name) for name in (self.input, self.key, self.value)]

    def on_norm(self, norm: Norm, config: ModelConfig) -> Norm:
        if not self.input:
            return norm
        factor = np.float32(config.number(self.input, smallest=-1e12))
        return replace(norm, gamma=factor * norm.gamma, beta=factor * norm.beta)

    def apply(
        self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors
    ) -> Layer:
        return replace(
            layer,
            k=_multiplied(layer.k, self.key, config),
            v=_multiplied(layer.v, self.value, config),
        )


def _multiplied(made: Affine | Latent, key: str, config: ModelConfig) -> Affine | Latent:
    """Keys or values times the number under a config key."""
    if not key:
        return made
    if isinstance(made, Latent):
        raise CheckpointError(
            f"'{key}' multiplies what comes out of a latent, which is not read", file=config.file
        )
    return made.scaled(np.full((1, 1), config.number(key, smallest=-1e12), np.float32))


@dataclass(frozen=True)
class LayerScale(Step):
    """Learned factors on attention's output, one per dimension, folded into W_O (CaiT, DINOv2)."""

    name = "layer_scale"
    place = Place.OUTPUT
    label = "LayerScale"
    exact = True

    tensor: str  # (d,), in each layer

    @property
    def output_module(self) -> str:
        return self.tensor.rpartition(".")[0]

    def reads(self) -> Reads:
        if self.output_module:
            return Reads(modules=(self.output_module,))
        return Reads(tensors=(self.tensor,))

    def apply(
        self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors
    ) -> Layer:
        scale = tensors.read(self.tensor, (config.d_model,))
        return replace(
            layer, w_o=np.asarray(layer.w_o) * scale, output_bias=layer.output_bias * scale
        )


@dataclass(frozen=True)
class HeadFactors(Step):
    """A learned factor on each head's scores, folded into W_Q (Swin 2)."""

    name = "head_factors"
    place = Place.VECTORS
    exact = True

    tensor: str  # (H,), (H, 1, 1) or (1, H, 1, 1), in each layer
    times: Annotated[str, OneOf(*FACTORS)] = "exp(t)"  # factor from its numbers t
    largest: float | None = None  # upper bound of the factor

    def reads(self) -> Reads:
        return Reads(tensors=(self.tensor,))

    def apply(
        self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors
    ) -> Layer:
        if isinstance(layer.q, Latent):
            raise CheckpointError(
                f"'{self.tensor}' multiplies queries that come out of a latent, which is not read",
                file=tensors.checkpoint.name,
            )
        h = config.n_heads
        stored = tensors.checkpoint.get(tensors.prefix + self.tensor)
        shape = {3: (h, 1, 1), 4: (1, h, 1, 1)}.get(len(stored.shape) if stored else 1, (h,))
        with np.errstate(all="ignore"):  # infinities are reported where they are used
            factors = FACTORS[self.times](tensors.read(self.tensor, shape).reshape(h, 1))
        if self.largest is not None:
            factors = np.minimum(factors, np.float32(self.largest))
        norm = layer.q_norm
        if norm is not None and norm.shift is not None:
            norm = replace(norm, shift=norm.shift * factors)
        return replace(layer, q=layer.q.scaled(factors), q_norm=norm)
