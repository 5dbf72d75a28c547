"""Learned factors of scores, one for each head."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from weightscope.architectures.cells import LayerTensors
from weightscope.architectures.config import ModelConfig, OneOf
from weightscope.architectures.steps import Place, Reads, Step
from weightscope.attention.gathered import softplus
from weightscope.attention.layer import Layer
from weightscope.attention.maps import Latent
from weightscope.errors import CheckpointError

# What of a stored number t multiplies.
FACTORS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "exp(t)": np.exp, "t": np.asarray, "1/t": np.reciprocal, "exp(-t)": lambda t: np.exp(-t), "softplus(t)": softplus,
}  # fmt: skip


@dataclass(frozen=True)
class HeadFactors(Step):
    """Scores of each head are multiplied by a learned number, which W_Q takes in (Swin 2)."""

    name = "head_factors"
    place = Place.VECTORS
    exact = True

    tensor: str  # of a layer: (H,), (H, 1, 1) or (1, H, 1, 1)
    times: Annotated[str, OneOf(*FACTORS)] = "exp(t)"  # by what of its numbers t
    largest: float | None = None  # its bound

    def reads(self) -> Reads:
        return Reads(tensors=(self.tensor,))

    def apply(self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors) -> Layer:
        if isinstance(layer.q, Latent):
            raise CheckpointError(
                f"'{self.tensor}' multiplies queries that come out of a latent, which is not read",
                file=tensors.checkpoint.name,
            )
        h = config.n_heads
        stored = tensors.checkpoint.get(tensors.prefix + self.tensor)
        shape = {3: (h, 1, 1), 4: (1, h, 1, 1)}.get(len(stored.shape) if stored else 1, (h,))
        with np.errstate(all="ignore"):  # what is not finite is found where it is used
            factors = FACTORS[self.times](tensors.read(self.tensor, shape).reshape(h, 1))
        if self.largest is not None:
            factors = np.minimum(factors, np.float32(self.largest))
        norm = layer.q_norm
        if norm is not None and norm.shift is not None:
            norm = replace(norm, shift=norm.shift * factors)
        return replace(layer, q=layer.q.scaled(factors), q_norm=norm)
