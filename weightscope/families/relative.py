"""How architectures make their keys of distances; see `attention.relative`."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from weightscope.attention.relative import RelativeKeys, RelativeValues
from weightscope.families.cells import layer_norm
from weightscope.families.config import ModelConfig
from weightscope.families.tensors import LayerTensors

# Of the model's tensors and a layer's.
Relative = Callable[[LayerTensors, LayerTensors, ModelConfig], tuple[RelativeKeys, ...]]


def interleaved_sinusoids(distances: np.ndarray, width: int) -> np.ndarray:
    """Sine and cosine of each frequency side by side, (D,) distances -> (D, width)."""
    angles = np.outer(distances, 10000.0 ** (-np.arange(0, width, 2) / width))
    return np.stack((np.sin(angles), np.cos(angles)), axis=-1).reshape(len(distances), -1)[:, :width]


@dataclass(frozen=True)
class Projected:
    """Transformer-XL's: sinusoids of distances, projected, met by queries with another bias than a token's key meets.

    Attributes
    ----------
    module : str
        The projection.
    content, position : str
        Biases of queries, (H, r) tensors: those that meet tokens' keys (in W_Q's bias already) and distances' keys.
    """

    module: str
    content: str
    position: str

    def __call__(
        self, model: LayerTensors, tensors: LayerTensors, config: ModelConfig
    ) -> tuple[RelativeKeys, ...]:  # fmt: skip
        d, h, r = config.d_model, config.n_heads, config.head_dim
        w = tensors.read(self.module + ".weight", (h * r, d)).reshape(h, r, d).transpose(0, 2, 1)
        bias = tensors.read(self.position, (h, r)) - tensors.read(self.content, (h, r))
        return (RelativeKeys(lambda distances: interleaved_sinusoids(distances, d) @ w, bias),)


@dataclass(frozen=True)
class Listed:
    """Shaw's: a learned key for each distance up to a bound on either side, the same for all heads.

    Attributes
    ----------
    module : str
        The table.
    before, after : str
        Config keys of the furthest key before the query and after it that has a row of its own.
    """

    module: str
    before: str
    after: str

    def __call__(
        self, model: LayerTensors, tensors: LayerTensors, config: ModelConfig
    ) -> tuple[RelativeKeys, ...]:  # fmt: skip
        before, after = config.count(self.before), config.count(self.after)
        table = tensors.read(self.module + ".weight", (before + after + 1, config.head_dim))
        return (RelativeKeys(lambda distances: table[np.clip(-distances, -before, after) + before][None]),)


@dataclass(frozen=True)
class SharedTable:
    """SpeechT5's: a learned key for each distance, the same in every layer and for all heads.

    Attributes
    ----------
    table : str
        Of the model: the keys of what lies `most` after the query, one nearer, ..., `most` - 1 before it.
    most : str
        Config key.
    """

    table: str
    most: str

    def __call__(
        self, model: LayerTensors, tensors: LayerTensors, config: ModelConfig
    ) -> tuple[RelativeKeys, ...]:  # fmt: skip
        most = config.count(self.most)
        table = model.read(self.table, (2 * most, config.head_dim))
        return (RelativeKeys(lambda distances: table[np.clip(distances, -most, most - 1) + most][None]),)


def _near(tensors: LayerTensors, config: ModelConfig, name: str) -> Callable[[np.ndarray], np.ndarray]:
    """VITS's table of what lies at most `window_size` after or before a token; nothing where it is further away."""
    most = config.count("window_size")
    table = np.pad(tensors.read(name, (1, 2 * most + 1, config.head_dim)), ((0, 0), (1, 1), (0, 0)))
    return lambda distances: table[:, np.clip(-distances, -most - 1, most + 1) + most + 1]


def near_keys(model: LayerTensors, tensors: LayerTensors, config: ModelConfig) -> tuple[RelativeKeys, ...]:
    """VITS's keys of distances."""
    return (RelativeKeys(_near(tensors, config, "attention.emb_rel_k")),)


def near_values(tensors: LayerTensors, config: ModelConfig) -> RelativeValues:
    """VITS's values of distances."""
    return RelativeValues(_near(tensors, config, "attention.emb_rel_v"))


def within_blocks(model: LayerTensors, tensors: LayerTensors, config: ModelConfig) -> tuple[RelativeKeys, ...]:
    """Granite Speech's: Shaw's keys, for as many distances as two tokens of one block may have and more."""
    most, block = config.size("max_pos_emb"), config.size("context_size")
    table = tensors.read("attn.rel_pos_emb.weight", (2 * most + 1, config.head_dim))
    block = min(block, most)
    return (RelativeKeys(lambda distances: table[np.clip(distances, -block, block) + most][None]),)


def halved_sinusoids(distances: np.ndarray, width: int) -> np.ndarray:
    """Sines of all frequencies, then cosines, (D,) distances -> (D, width)."""
    angles = np.outer(distances, 10000.0 ** (-np.arange(0, width, 2) / width))
    return np.concatenate((np.sin(angles), np.cos(angles)), axis=-1)


def of_xlnet(model: LayerTensors, tensors: LayerTensors, config: ModelConfig) -> tuple[RelativeKeys, ...]:
    """XLNet's, as Transformer-XL's; no further away than clamp_len where there is one."""
    d, h, r = config.d_model, config.n_heads, config.head_dim
    w = tensors.read("rel_attn.r", (d, h, r)).transpose(1, 0, 2)
    bias = tensors.read("rel_attn.r_r_bias", (h, r)) - tensors.read("rel_attn.r_w_bias", (h, r))
    furthest = config.number("clamp_len", default=-1, smallest=-1)

    def at(distances: np.ndarray) -> np.ndarray:
        return halved_sinusoids(np.clip(distances, -furthest, furthest) if furthest > 0 else distances, d) @ w

    return (RelativeKeys(at, bias),)


@dataclass(frozen=True)
class Disentangled:
    """DeBERTa's: a table of distances, projected to keys and to queries, as pos_att_type asks for.

    Attributes
    ----------
    table : str
        Of the model.
    key, query : str
        Projections of a layer.
    key_bias : bool
        The former has one.
    shared : tuple of str
        What stands for them where share_att_key says so: the projections of tokens.
    """

    table: str
    key: str
    query: str
    key_bias: bool = True
    shared: tuple[str, str] | None = None

    def __call__(
        self, model: LayerTensors, tensors: LayerTensors, config: ModelConfig
    ) -> tuple[RelativeKeys, ...]:  # fmt: skip
        d, h, r = config.d_model, config.n_heads, config.head_dim
        most = config.number("max_relative_positions", default=-1, smallest=-1)
        most = int(most) if most >= 1 else config.size("max_position_embeddings")
        buckets = int(config.number("position_buckets", default=-1, smallest=-1)) if self.shared else -1
        if buckets > 0 and not 2 <= buckets < 2 * (most - 1):  # no distances are left for logarithmic ones
            raise config.error("position_buckets", f"2 or more, and fewer than {2 * (most - 1)}: twice the distances")
        span = buckets if buckets > 0 else most
        rows = model.read(self.table + ".weight", (2 * span, d))
        if self.shared and "layer_norm" in str(config.get("norm_rel_ebd", "none")).lower():
            rows = layer_norm(self.table.rpartition(".")[0] + ".LayerNorm").read(model, config)(rows)

        def which(distances: np.ndarray) -> np.ndarray:
            near = distances if buckets <= 0 else logarithmic(distances, buckets, most)
            return np.clip(near + span, 0, 2 * span - 1)

        def projected(module: str, *, bias: bool) -> np.ndarray:
            b = tensors.read(module + ".bias", (h * r,)) if bias else 0.0
            w = tensors.read(module + ".weight", (h * r, d))
            return (rows @ w.T + b).reshape(2 * span, h, r).transpose(1, 0, 2)

        key, query, bias = self.key, self.query, self.key_bias
        if self.shared and config.get("share_att_key"):
            (key, query), bias = self.shared, True
        kinds = config.get("pos_att_type") or ()
        terms = []
        if "c2p" in kinds:
            keys = projected(key, bias=bias)
            terms.append(RelativeKeys(lambda distances: keys[:, which(distances)]))
        if "p2c" in kinds:
            queries = projected(query, bias=True)
            terms.append(RelativeKeys(lambda distances: queries[:, which(distances)], of_keys=True))
        return tuple(terms)


def logarithmic(distances: np.ndarray, buckets: int, most: int) -> np.ndarray:
    """DeBERTa-v2's buckets: small distances as they are, larger ones logarithmically, up to `most`."""
    middle = buckets // 2
    size = np.where(np.abs(distances) < middle, middle - 1, np.abs(distances)).astype(np.float32)
    steps = np.log(np.maximum(size, 1) / np.float32(middle)) / np.float32(np.log((most - 1) / middle)) * (middle - 1)
    return np.where(size <= middle, distances, (np.ceil(steps) + middle) * np.sign(distances)).astype(int)
