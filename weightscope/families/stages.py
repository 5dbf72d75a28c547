"""Stages of several widths: each is a stack of its own, since no stream leads through all of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weightscope.attention.gathered import sigmoid
from weightscope.attention.position_bias import WindowBias
from weightscope.checkpoint.config import Config
from weightscope.families.config import ModelConfig
from weightscope.families.grid_rope import sides_of
from weightscope.families.tensors import LayerTensors


@dataclass(frozen=True)
class Stage:
    """The sizes of one stage, by the lists that a config has of all.

    Attributes
    ----------
    index : int
    layers : str or int
        Config key of a list: layers of every stage; or how many this one has by the architecture's code.
    heads : str
        Likewise of heads; empty where all stages have as many.
    width : str
        Config key of the first stage's width, which doubles from stage to stage, or of a list; empty where all are of
        one width.
    more : dict of str
        Further keys that a stage has a value of, and the lists they are in.
    """

    index: int
    layers: str | int = "depths"
    heads: str = "num_heads"
    width: str = "embed_dim"
    more: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, config: Config) -> Mapping[str, Any]:
        """Values of the keys that a model without stages has.

        Raises
        ------
        CheckpointError
            There is no such stage.
        """
        layers = self.layers if isinstance(self.layers, int) else self._own(config, self.layers)
        found = {"num_hidden_layers": layers} | {key: self._own(config, listed) for key, listed in self.more.items()}
        if self.heads:
            found["num_attention_heads"] = self._own(config, self.heads)
        if self.width:
            listed = isinstance(config.get(self.width), list)
            found["hidden_size"] = self._own(config, self.width) if listed else config.size(self.width) << self.index
        return found

    def _own(self, config: Config, key: str) -> int:
        listed = config.get(key)
        if not isinstance(listed, list) or len(listed) <= self.index:
            raise config.error(key, f"a list with every stage's number, {self.index + 1} or more")
        return Config({key: listed[self.index]}, config.file).size(key)


@dataclass(frozen=True)
class WindowTable:
    """A table of biases by offset in a window, as it is stored: offset after offset, then those of a class token.

    Attributes
    ----------
    tensors : dict of str
        Of the model, with `{i}` for the layer where each has its own, and the config key that says whether it is there;
        empty where it always is. Several add up.
    side : str
        Config key of a window's side in patches; empty where the window is the image.
    class_token : bool
    """

    tensors: Mapping[str, str]
    side: str = ""
    class_token: bool = False

    def __call__(self, tensors: LayerTensors, config: ModelConfig, layer: int) -> WindowBias:
        """The term of one layer.

        Raises
        ------
        CheckpointError
            The image is not square: transformers resamples its table then.
        """
        if not self.side and len({*sides_of(config, "image_size")}) > 1:
            raise config.error("image_size", "a square image")
        side = config.size(self.side) if self.side else sides_of(config, "image_size")[0] // config.size("patch_size")
        offsets = 2 * side - 1
        shape = (offsets**2 + 3 * self.class_token, config.n_heads)
        there = [name.format(i=layer) for name, key in self.tensors.items() if not key or config.flag(key)]
        table = np.sum([tensors.read(name, shape) for name in there], axis=0)
        patches = table[: offsets**2].reshape(offsets, offsets, -1)
        return WindowBias(patches, table[offsets**2 :] if self.class_token else None)


@dataclass(frozen=True)
class WindowNetwork:
    """Biases by offset in a window that a small network makes of the offset's logarithm (Swin v2, section 3.3).

    Attributes
    ----------
    network : str
        Of the model, with `{i}` for the layer: two Linears with a ReLU between.
    stage : int
        How often the image was halved before.
    pretrained : str
        Config key of the windows' sides in training, a stage each; empty where they are those of the model.
    """

    network: str
    stage: int = 0
    pretrained: str = ""

    def __call__(self, tensors: LayerTensors, config: ModelConfig, layer: int) -> WindowBias:
        """The term of one layer: no window is larger than its image."""
        patches = [side // config.size("patch_size") >> self.stage for side in sides_of(config, "image_size")]
        side = min(config.size("window_size"), *patches)
        listed = config.get(self.pretrained)
        trained = listed[self.stage] if isinstance(listed, list) and len(listed) > self.stage else 0
        reach = (trained if type(trained) is int and trained > 1 else side) - 1
        along = 8 * np.arange(1 - side, side) / max(1, reach)
        along = np.sign(along) * np.log2(np.abs(along) + 1) / np.log2(8)
        offsets = np.stack(np.meshgrid(along, along, indexing="ij"), axis=-1)  # (2 side - 1, 2 side - 1, 2)
        name = self.network.format(i=layer)
        first = tensors.read(f"{name}.0.weight", (None, 2))
        hidden = np.maximum(offsets @ first.T + tensors.read(f"{name}.0.bias", (len(first),)), 0)
        table = hidden @ tensors.read(f"{name}.2.weight", (config.n_heads, len(first))).T
        return WindowBias(16 * sigmoid(table))
