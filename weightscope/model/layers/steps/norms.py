"""Norms of weighted sums of values, before W_O, and of values."""

from dataclasses import dataclass, replace

import numpy as np

from weightscope.model.config.config import ModelConfig
from weightscope.model.layers import gathered
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.maps import Affine, InnerNorm
from weightscope.model.layers.steps import Place, Reads, Step
from weightscope.model.rows.cells import LayerTensors, StoredNorm


@dataclass(frozen=True)
class SubNorm(Step):
    """A norm over all heads' weighted sums of a token (BitNet), folded into W_O but for sigma."""

    name = "sub_norm"
    place = Place.GATHERED

    norm: StoredNorm

    def reads(self) -> Reads:
        return Reads(modules=(self.norm.module,))

    def apply(
        self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors
    ) -> Layer:
        h, r_v, d = layer.w_o.shape
        norm = self.norm.read(tensors, config, h * r_v)
        w_o, bias = norm.fold(np.array(layer.w_o).reshape(h * r_v, d), layer.output_bias)
        sizes = gathered.AllHeadsNorm(self.norm.unread(config))
        return replace(layer, w_o=w_o.reshape(h, r_v, d), output_bias=bias, gathered_norm=sizes)

    def caveat(self, layer: Layer) -> str:
        return (
            "a norm before W_O: what all heads gather for a token is divided by its size; "
            "gamma is folded in"
        )


@dataclass(frozen=True)
class HeadNorm(Step):
    """An RMSNorm without parameters of each head's weighted sum (Muse Spark)."""

    name = "head_norm"
    place = Place.GATHERED
    portable = True

    def apply(
        self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors
    ) -> Layer:
        return replace(layer, gathered_norm=gathered.EachHeadNorm(config.norm_eps))

    def caveat(self, layer: Layer) -> str:
        return "a norm before W_O: what a head gathers for a token is divided by its size"


@dataclass(frozen=True)
class ValuesNormed(Step):
    """An RMSNorm without parameters divides each head's values."""

    name = "values_normed"
    place = Place.VECTORS
    portable = True

    def apply(
        self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors
    ) -> Layer:
        if not isinstance(layer.v, Affine):  # values out of a latent have that latent's norm
            return layer
        return replace(layer, v_norm=InnerNorm(layer.v, config.norm_eps))

    def caveat(self, layer: Layer) -> str:
        if not isinstance(layer.v, Affine):
            return ""
        return "the norm of values: each head's value is divided by its size"
