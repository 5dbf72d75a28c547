"""Terms that positions add to scores, and positions by formula."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weightscope.model.config.config import ModelConfig
from weightscope.model.config.rope import sides_of
from weightscope.model.config.rules import default_scale
from weightscope.model.layers.gathered import sigmoid
from weightscope.model.layers.positions import Buckets, Slopes, WindowBias
from weightscope.model.rows.cells import LayerTensors

# Positions that follow a formula and are stored in no file.


def sinusoids(n: int, width: int, steps: int) -> np.ndarray:
    """Sines of n positions, then cosines, at 10000^(-j / steps) ("Attention is all you need", 3.5).

    Over `steps` of the width / 2 frequencies they fall to 1/10000: width / 2 in the paper, one less
    in tensor2tensor.
    """
    angles = np.outer(np.arange(n), 10000.0 ** (-np.arange(width // 2) / steps))
    rows = np.zeros((n, width), np.float32)
    rows[:, : 2 * (width // 2)] = np.concatenate((np.sin(angles), np.cos(angles)), axis=1)
    return rows


def of_the_paper(config: ModelConfig) -> np.ndarray:
    """CTRL: as in the paper, sines and cosines apart."""
    return sinusoids(config.n_positions or 0, config.d_model, config.d_model // 2)


def of_a_head(config: ModelConfig) -> np.ndarray:
    """RoFormer: sines and cosines of the angles by which a head's pairs turn."""
    return sinusoids(config.n_positions or 0, config.head_dim, config.head_dim // 2)


def of_tensor2tensor(config: ModelConfig) -> np.ndarray:
    """XGLM: two positions come first, and the padding token's row is zero."""
    rows = sinusoids((config.n_positions or 0) + 2, config.d_model, config.d_model // 2 - 1)
    padding = config.count("pad_token_id")
    if padding >= len(rows):
        raise config.error("pad_token_id", f"a number below {len(rows)}, the number of positions")
    rows[padding] = 0
    return rows[2:]


# Terms that positions add to scores by distance: ALiBi, T5's buckets, tables and networks of
# offsets in a window.

RELATIVE_BIAS = "encoder.relative_attention_bias.weight"  # MPNet's, one table for all layers
MPNET_BUCKETS = 32  # number its code asks for, however many the table has


def powers(heads: int) -> np.ndarray:
    """2^(-8/heads), its square, ...: ALiBi's slopes for a power of two heads, shape (heads,)."""
    return 2.0 ** (-8 * np.arange(1, heads + 1) / heads)


def alibi(tensors: LayerTensors, config: ModelConfig, layer: int) -> Slopes:
    """ALiBi's slopes for a power of two heads, then every other one of twice as many (BLOOM)."""
    most = 1 << (config.n_heads.bit_length() - 1)
    return Slopes(np.concatenate((powers(most), powers(2 * most)[::2]))[: config.n_heads])


def alibi_falcon(tensors: LayerTensors, config: ModelConfig, layer: int) -> Slopes:
    """Falcon adds BLOOM's slopes, rounded to bfloat16, before it scales the scores.

    The eager code of transformers (4.57 to 5.23 at least) adds them a second time with the mask,
    which its sdpa code and Falcon's own do not. `Layer.scores` is defined by the eager model and
    follows it; `position_bias` is once.
    """
    bits = alibi(tensors, config, layer).slopes.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return Slopes(rounded.view(np.float32) * default_scale(config, 0), times=2)


@dataclass(frozen=True)
class GeometricSlopes:
    """Slopes 2^-(steps x h / H + each x h + start) of head h, counted from 1, of H."""

    steps: float = 0.0
    each: float = 0.0
    start: float = 0.0

    def __call__(self, tensors: LayerTensors, config: ModelConfig, layer: int) -> Slopes:
        heads = np.arange(1, config.n_heads + 1)
        return Slopes(
            2.0 ** -(self.steps * heads / config.n_heads + self.each * heads + self.start)
        )


@dataclass(frozen=True)
class StoredSlopes:
    """Learned slopes, one for each head."""

    layer: str  # a layer's name
    tensor: str  # its tensor of slopes

    def __call__(self, tensors: LayerTensors, config: ModelConfig, layer: int) -> Slopes:
        return Slopes(tensors.read(self.layer.format(i=layer) + self.tensor, (config.n_heads,)))


def relative_buckets(tensors: LayerTensors, config: ModelConfig, layer: int) -> Buckets:
    """MPNet's relative bias, one table for all layers."""
    n_buckets = config.size("relative_attention_num_buckets")
    if n_buckets < MPNET_BUCKETS:
        raise config.error(
            "relative_attention_num_buckets", f"{MPNET_BUCKETS} or more, as in MPNet"
        )
    table = tensors.read(RELATIVE_BIAS, (n_buckets, config.n_heads))
    return Buckets(table[:MPNET_BUCKETS])


TABLE = "SelfAttention.relative_attention_bias"


@dataclass(frozen=True)
class Distances:
    """T5's buckets of distances; the table is the first layer's or each layer's own."""

    layer: str  # a layer's name
    causal: bool = False
    own: bool = False
    table: str = TABLE  # the table's module within a layer
    # config keys: number of buckets, and the distance from which everything is in the last
    sizes: tuple[str, str] = ("relative_attention_num_buckets", "relative_attention_max_distance")

    def __call__(self, tensors: LayerTensors, config: ModelConfig, layer: int) -> Buckets:
        n_buckets, furthest = (config.size(key) for key in self.sizes)
        if n_buckets < 4 or furthest <= n_buckets:
            raise config.error(self.sizes[0], "4 or more, and less than the largest distance")
        stem = self.layer.format(i=layer if self.own else 0)
        table = tensors.read(f"{stem}{self.table}.weight", (n_buckets, config.n_heads))
        return Buckets(table, furthest, causal=self.causal)


@dataclass(frozen=True)
class WindowTable:
    """A stored table of biases by offset in a window, then of a class token."""

    # names in the model (`{i}` is the layer) -> config key that says that the table is there, empty
    # where it always is; several add up
    tensors: Mapping[str, str]
    side: str = ""  # config key of a window's side in patches; empty where the window is the image
    class_token: bool = False

    def __call__(self, tensors: LayerTensors, config: ModelConfig, layer: int) -> WindowBias:
        if self.side:
            side = config.size(self.side)
        else:
            height, width = sides_of(config, "image_size")
            if height != width:  # transformers resamples the table then
                raise config.error("image_size", "a square image")
            side = height // config.size("patch_size")
        offsets = 2 * side - 1
        shape = (offsets**2 + 3 * self.class_token, config.n_heads)
        there = [
            name.format(i=layer)
            for name, key in self.tensors.items()
            if not key or config.flag(key)
        ]
        table = np.sum([tensors.read(name, shape) for name in there], axis=0)
        patches = table[: offsets**2].reshape(offsets, offsets, -1)
        return WindowBias(patches, table[offsets**2 :] if self.class_token else None)


@dataclass(frozen=True)
class WindowNetwork:
    """Biases by offset in a window, from a small network of its logarithm (Swin v2, sec. 3.3)."""

    network: str  # name in the model (`{i}` is the layer): two Linears, a ReLU between
    stage: int = 0  # number of times the image was halved before
    # config key of the windows' sides in training, a stage each; empty where the model's hold
    pretrained: str = ""

    def __call__(self, tensors: LayerTensors, config: ModelConfig, layer: int) -> WindowBias:
        """The term of one layer; no window is larger than its image."""
        patches = [
            side // config.size("patch_size") >> self.stage
            for side in sides_of(config, "image_size")
        ]
        side = min(config.size("window_size"), *patches)
        listed = config.get(self.pretrained)
        trained = listed[self.stage] if isinstance(listed, list) and len(listed) > self.stage else 0
        reach = (trained if type(trained) is int and trained > 1 else side) - 1
        along = 8 * np.arange(1 - side, side) / max(1, reach)
        along = np.sign(along) * np.log2(np.abs(along) + 1) / np.log2(8)
        # (2 side - 1, 2 side - 1, 2)
        offsets = np.stack(np.meshgrid(along, along, indexing="ij"), axis=-1)
        name = self.network.format(i=layer)
        first = tensors.read(f"{name}.0.weight", (None, 2))
        hidden = np.maximum(offsets @ first.T + tensors.read(f"{name}.0.bias", (len(first),)), 0)
        table = hidden @ tensors.read(f"{name}.2.weight", (config.n_heads, len(first))).T
        return WindowBias(16 * sigmoid(table))
