"""Bounds of scores, queries, keys and values, and learned sink logits.

A sink is one more term in each softmax, which takes attention and gives nothing.
"""

from dataclasses import dataclass, replace
from typing import Any

from weightscope.checkpoint.config import Config
from weightscope.model.config.config import ModelConfig
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.steps import Place, Reads, Step
from weightscope.model.rows.cells import LayerTensors


@dataclass(frozen=True)
class Softcap(Step):
    """Scores s become c tanh(s / c) (Gemma 2)."""

    name = "softcap"
    place = Place.SCORES
    label = "softcap"
    portable = True

    key: str  # config key of c; there is no bound where the config has none

    def takes(self, config: ModelConfig, index: int) -> Any:
        return config.get(self.key)

    def apply(
        self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors
    ) -> Layer:
        cap = config.number(self.key, smallest=1e-6) if config.has(self.key) else None
        return replace(layer, softcap=cap)

    def caveat(self, layer: Layer) -> str:
        cap = layer.softcap
        return "" if cap is None else f"the softcap: scores s become {cap:g} tanh(s / {cap:g})"


@dataclass(frozen=True)
class Clip(Step):
    """Queries, keys and values are clipped to [-c, c] (MPT, OLMo)."""

    name = "clip"
    place = Place.SCORES
    label = "clipped"
    portable = True

    # config keys that lead to c, outermost first; 0 or nothing means no bound
    keys: tuple[str, ...]

    def takes(self, config: ModelConfig, index: int) -> Any:
        return [config.get(key) for key in self.keys]

    def apply(
        self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors
    ) -> Layer:
        part: Config = config
        for outer in self.keys[:-1]:
            part = part.inside(outer)
        return replace(layer, clip=part.number(self.keys[-1], default=0) or None)

    def caveat(self, layer: Layer) -> str:
        if layer.clip is None:
            return ""
        return f"queries, keys and values are clipped to [-{layer.clip:g}, {layer.clip:g}]"


@dataclass(frozen=True)
class SinkLogits(Step):
    """Learned sink logits of heads, in each layer."""

    tensor: str  # (H,)

    def reads(self) -> Reads:
        return Reads(tensors=(self.tensor,))


@dataclass(frozen=True)
class Sinks(SinkLogits):
    """Sink logits inside the softmax (gpt-oss)."""

    name = "sinks"
    place = Place.SCORES
    label = "sinks"

    def apply(
        self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors
    ) -> Layer:
        return replace(layer, sinks=tensors.read(self.tensor, (config.n_heads,)))

    def caveat(self, layer: Layer) -> str:
        return "the learned sink logit, one more term in each softmax (layer.sinks)"


@dataclass(frozen=True)
class OuterSinks(SinkLogits):
    """Sink logits outside the softmax: the mass they leave multiplies a head's weighted sum
    (Granite).
    """

    name = "outer_sinks"
    place = Place.GATHERED

    def apply(
        self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors
    ) -> Layer:
        return replace(layer, outer_sinks=tensors.read(self.tensor, (config.n_heads,)))

    def caveat(self, layer: Layer) -> str:
        return (
            "the learned sink logit, one more term in each softmax, which transformers "
            "leaves out of attention and multiplies what a head gathers by"
        )
