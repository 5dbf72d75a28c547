"""A checkpoint seen through its family: embeddings, layers and heads, read when asked for."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from weightscope.checkpoint import Checkpoint, Tensor, open_checkpoint
from weightscope.errors import CheckpointError
from weightscope.factored import Factored
from weightscope.families import Family, LayerTensors, ModelConfig, family_of, read_config
from weightscope.folding import fold_layer_norm
from weightscope.metrics.sigma import sigma

BLOCK_BYTES = 16 << 20  # embedding rows are streamed in float32 blocks of about this size


def open_model(
    source: str | Path, revision: str | None = None, family: str | None = None, tower: str | None = None
) -> "Model":
    """Open a checkpoint as a model. Headers and config are read, no tensor data.

    Parameters
    ----------
    source : str or Path
        A folder, a .safetensors file, or a Hub id with optional `@revision`.
    revision : str, optional
        Branch, tag or commit on the Hub.
    family : str, optional
        Read the checkpoint as this family, whatever its config says.
    tower : {"text", "vision"}, optional
        Which half of a two-tower model.

    Raises
    ------
    CheckpointError
        The source is not there, is broken, or is of no known family.
    """
    checkpoint = open_checkpoint(source, revision)
    return Model(checkpoint, family_of(checkpoint, family))


class Model:
    """A checkpoint and its family.

    Attributes
    ----------
    checkpoint : Checkpoint
    family : Family
    config : ModelConfig
    """

    def __init__(self, checkpoint: Checkpoint, family: Family) -> None:
        self.checkpoint, self.family = checkpoint, family
        self.config = read_config(checkpoint.config, dict(family.defaults), file=checkpoint.folder / "config.json")
        self._last: Layer | None = None

    @cached_property
    def prefix(self) -> str:
        """What stands before every tensor's name in this checkpoint."""
        first = self.family.layer.format(i=0)
        for prefix in self.family.prefixes:
            if any(name.startswith((prefix + first, prefix + self.family.tokens)) for name in self.checkpoint):
                return prefix
        tried = ", ".join(prefix + first + "*" for prefix in self.family.prefixes)
        raise CheckpointError(f"has no layer of a {self.family.name} (looked for {tried})", file=self.checkpoint.name)

    def layer(self, index: int) -> "Layer":
        """One layer; its attention tensors are read here. The last one asked for is kept.

        Raises
        ------
        CheckpointError
            No such layer, or its tensors are missing, misshapen or not finite.
        """
        if not 0 <= index < self.config.n_layers:
            raise CheckpointError(f"no layer {index}: the model has {self.config.n_layers}", file=self.checkpoint.name)
        if self._last is None or self._last.index != index:
            self._last = Layer(self, index)
        return self._last

    def tensors(self, inner: str = "") -> LayerTensors:
        """The checkpoint's tensors under the model's prefix and `inner`."""
        config = self.config
        needed_by = f"{self.family.name} with width {config.d_model} and {config.n_heads} heads"
        return LayerTensors(self.checkpoint, self.prefix + inner, needed_by)

    @cached_property
    def embeddings(self) -> "Embeddings":
        """Token and position embeddings.

        Raises
        ------
        CheckpointError
            The checkpoint has no token embedding.
        """
        names = [prefix + self.family.tokens for prefix in self.family.prefixes]
        if not any(name in self.checkpoint for name in names):
            looked = f"no token embedding in this checkpoint (looked for {', '.join(names)})"
            raise CheckpointError(looked, file=self.checkpoint.name)
        return Embeddings(
            self.tensors().tensor(self.family.tokens, (None, self.config.d_model)), self.positions, self.config
        )

    @cached_property
    def positions(self) -> np.ndarray | None:
        """Learned position embeddings, float32 (n_positions, d), or None where the family has none."""
        if not self.family.positions:
            return None
        return self.tensors().read(self.family.positions, (None, self.config.d_model))


@dataclass(frozen=True)
class Embeddings:
    """What enters the first layer: a token's row plus a position's.

    Attributes
    ----------
    token_tensor : Tensor of shape (vocab, d)
        Unread.
    positions : float32 array of shape (n_positions, d), or None
    config : ModelConfig
    """

    token_tensor: Tensor
    positions: np.ndarray | None
    config: ModelConfig

    @property
    def n_tokens(self) -> int:
        return self.token_tensor.shape[0]

    @cached_property
    def tokens(self) -> np.ndarray:
        """Token embeddings, float32 (vocab, d): a read-only view of the file where it holds float32, else decoded."""
        return self.token_tensor.read()

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Token rows in blocks of about 16 MB, each with the index of its first row."""
        return self.token_tensor.blocks(max(1, BLOCK_BYTES // (4 * self.config.d_model)))

    def sigma(self, tokens: np.ndarray, positions: np.ndarray | None = None) -> np.ndarray:
        """sigma(e_t + p_p), the LayerNorm's divisor at the model's input (detokenization paper, eq. 3).

        Parameters
        ----------
        tokens, positions : int arrays that broadcast against each other
            Token ids and positions; without positions, of the token rows alone.

        Returns
        -------
        float32 array of the broadcast shape
        """
        rows = self.tokens[np.asarray(tokens)]  # (..., d)
        if positions is not None and self.positions is not None:
            rows = rows + self.positions[np.asarray(positions)]
        return sigma(rows, self.config.norm_eps)


class Layer:
    """One attention layer, its norm folded into the projections.

    Attributes
    ----------
    index : int
    output_bias : (d,) array
    sinks : (n_heads,) array or None
        Learned sink logits.
    """

    def __init__(self, model: Model, index: int) -> None:
        family, config = model.family, model.config
        tensors = model.tensors(family.layer.format(i=index))
        raw = family.layout(tensors, family, config)
        gamma = tensors.read(family.norm.module + ".weight", (config.d_model,))
        beta = tensors.read(family.norm.module + ".bias", (config.d_model,))
        self.index, self.config = index, config
        self.scale = family.scale(config, index)
        self.w_q, self.b_q = fold_layer_norm(raw.w_q, raw.b_q, gamma, beta)  # (H, d, r), (H, r)
        self.w_k, self.b_k = fold_layer_norm(raw.w_k, raw.b_k, gamma, beta)  # (G, d, r), (G, r)
        self.w_v, self.b_v = fold_layer_norm(raw.w_v, raw.b_v, gamma, beta)  # (G, d, r_v), (G, r_v)
        self.w_o, self.output_bias = raw.w_o, raw.b_o  # (H, r_v, d), (d,)
        self.sinks: np.ndarray | None = None

    def head(self, index: int) -> "Head":
        """One query head.

        Raises
        ------
        CheckpointError
            No such head.
        """
        if not 0 <= index < self.config.n_heads:
            raise CheckpointError(f"no head {index}: a layer has {self.config.n_heads}")
        return Head(self, index)

    def heads(self) -> "list[Head]":
        """All query heads of the layer."""
        return [self.head(index) for index in range(self.config.n_heads)]

    def scores(self, x: np.ndarray, positions: np.ndarray | None = None) -> np.ndarray:
        """The model's scaled pre-softmax attention scores, without the mask.

        Parameters
        ----------
        x : (n, d) array
            The residual stream that enters the layer.
        positions : (n,) int array, optional
            Their positions; 0 .. n-1 by default.

        Returns
        -------
        (n_heads, n, n) array
            Queries along the second axis, keys along the third.
        """
        z = x / sigma(x, self.config.norm_eps)[:, None]  # (n, d)
        q = z @ self.w_q + self.b_q[:, None]  # (H, n, r)
        k = z @ self.w_k + self.b_k[:, None]  # (H, n, r)
        return self.scale * (q @ k.transpose(0, 2, 1))

    def values(self, x: np.ndarray) -> np.ndarray:
        """f(x) = v(x) W_O of every head, so that the layer's output is sum_j alpha_ij f(x_j) + output_bias.

        Parameters
        ----------
        x : (n, d) array
            The residual stream that enters the layer.

        Returns
        -------
        (n_heads, n, d) array
        """
        z = x / sigma(x, self.config.norm_eps)[:, None]  # (n, d)
        return (z @ self.w_v + self.b_v[:, None]) @ self.w_o  # (H, n, d)


@dataclass(frozen=True)
class Head:
    """One query head of a layer, as bilinear and linear maps on x / sigma(x).

    score(i, j) = x_i qk x_j' / (sigma_i sigma_j) + qk_bias x_j' / sigma_j, up to terms constant in j and before `scale`
    (detokenization paper, eq. 14); f(x) = x vo / sigma(x) + vo_bias.
    """

    layer: Layer
    index: int

    @property
    def kv_head(self) -> int:
        """The key-value head it reads: its own index unless heads share keys and values."""
        return self.index * self.layer.config.n_kv_heads // self.layer.config.n_heads

    @property
    def scale(self) -> float:
        """What multiplies the score before the softmax, 1/sqrt(d') as a rule."""
        return self.layer.scale

    @property
    def caveats(self) -> tuple[str, ...]:
        """What of this head's score the matrices leave out."""
        return ()

    @property
    def qk(self) -> Factored:
        """W_QK = W_Q W_K', (d, d)."""
        return Factored(self.layer.w_q[self.index], self.layer.w_k[self.kv_head])

    def qk_at(self, delta: int) -> Factored:
        """W_QK at distance delta = i - j; without rotation it is `qk` at every distance."""
        return self.qk

    @property
    def qk_bias(self) -> np.ndarray:
        """b_QK = b_Q W_K', (d,)."""
        return self.layer.w_k[self.kv_head] @ self.layer.b_q[self.index]

    @property
    def vo(self) -> Factored:
        """W_VO = W_V W_O, (d, d)."""
        return Factored(self.layer.w_v[self.kv_head], self.layer.w_o[self.index].T)

    @property
    def vo_bias(self) -> np.ndarray:
        """b_V W_O, (d,)."""
        return self.layer.b_v[self.kv_head] @ self.layer.w_o[self.index]
