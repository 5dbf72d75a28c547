"""Differential attention (Differential Transformer, eqs 1-4): one attention map minus another."""

from dataclasses import dataclass, replace
from math import exp

import numpy as np

from weightscope.core.errors import CheckpointError
from weightscope.model.config.config import ModelConfig
from weightscope.model.layers.gathered import DifferentialNorm
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.maps import Affine, Latent
from weightscope.model.layers.steps import Place, Reads, Step
from weightscope.model.rows.cells import LayerTensors

LAMBDAS = ("q1", "k1", "q2", "k2")


@dataclass(frozen=True)
class Differential(Step):
    """H heads as H / 2 differences: heads h and h + H/2 share values (width 2 r) and a part of W_O.

    DiffLlama: value j of a group is [v_j | v_(j + G/2)] for both halves of the groups; the first
    half of the heads gathers them, the second too, and lambda times that is subtracted. lambda =
    exp(lambda_q1 lambda_k1') - exp(lambda_q2 lambda_k2') + lambda_0 with lambda_0 = 0.8 - 0.6
    exp(-0.3 layer); what is left after its norm is multiplied by 1 - lambda_0. W_O has these
    factors.
    """

    name = "differential"
    place = Place.GATHERED

    module: str  # attention module that holds the vectors lambda_q1 ...

    def _vector(self, name: str) -> str:
        return f"{self.module}.lambda_{name}"

    def reads(self) -> Reads:
        return Reads(tensors=tuple(map(self._vector, LAMBDAS)))

    def apply(
        self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors
    ) -> Layer:
        h, g, r, d = layer.n_heads, layer.n_kv_heads, layer.head_dim, layer.d_model
        if h % 2 or g % 2:
            raise CheckpointError(
                f"{h} heads in {g} groups are not pairs, which are subtracted", file=config.file
            )
        initial = 0.8 - 0.6 * exp(-0.3 * layer.index)  # lambda_0
        q1, k1, q2, k2 = (
            tensors.read(self._vector(name), (r,)).astype(np.float64) for name in LAMBDAS
        )
        weight = float(np.exp(q1 @ k1) - np.exp(q2 @ k2) + initial)
        if isinstance(layer.v, Latent):
            raise TypeError("values that come out of a latent are not pairs")
        group = np.arange(g) % (g // 2)
        v_w, v_b = (
            np.concatenate((array[group], array[group + g // 2]), axis=-1)
            for array in (layer.v.w, layer.v.b)
        )
        w_o = np.asarray(layer.w_o).reshape(h // 2, 2 * r, d) * np.float32(1 - initial)
        return replace(
            layer,
            v=Affine(v_w, v_b),
            w_o=np.concatenate((w_o, np.float32(-weight) * w_o)),
            gathered_norm=DifferentialNorm(weight, config.norm_eps),
        )

    def caveat(self, layer: Layer) -> str:
        weight = (
            layer.gathered_norm.weight if isinstance(layer.gathered_norm, DifferentialNorm) else 0.0
        )
        return (
            "differential attention: head h + H/2 is subtracted from head h with weight "
            f"{weight:.3g}, which its W_O has; what the two gather is divided by the size of "
            "their difference"
        )
