"""What a family of architectures is: a row of data, and the arrays its layout function returns."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weightscope.families.config import ModelConfig
from weightscope.families.tensors import LayerTensors


@dataclass(frozen=True)
class Projections:
    """One attention layer's affine maps, split by head, in row-vector form: q = z w_q + b_q.

    H query heads, G key-value heads, d the model's width; z is what the layer's norm hands over.

    Attributes
    ----------
    w_q : (H, d, r) array;  b_q : (H, r) array
    w_k : (G, d, r) array;  b_k : (G, r) array
    w_v : (G, d, r_v) array;  b_v : (G, r_v) array
    w_o : (H, r_v, d) array;  b_o : (d,) array
    """

    w_q: np.ndarray
    b_q: np.ndarray
    w_k: np.ndarray
    b_k: np.ndarray
    w_v: np.ndarray
    b_v: np.ndarray
    w_o: np.ndarray
    b_o: np.ndarray


@dataclass(frozen=True)
class LayerNorm:
    """A LayerNorm with gamma and beta, named by its module."""

    module: str


def default_scale(config: ModelConfig, layer: int) -> float:
    """1 / sqrt(d'), the usual scale of attention scores."""
    return float(config.head_dim**-0.5)


@dataclass(frozen=True)
class Family:
    """One row of the table of architectures.

    Attributes
    ----------
    name : str
    model_types : tuple of str
        The `model_type` values of config.json that this row reads.
    prefixes : tuple of str
        What may stand before every tensor's name; the one that `tokens` or the first layer is found under is taken.
    layer : str
        A layer's name before its modules, with `{i}` for its index.
    layout : function of (LayerTensors, Family, ModelConfig) -> Projections
    query, key, value, output : str
        Modules of the projections within a layer; the three former are equal where one tensor holds all.
    norm : LayerNorm
        The norm that feeds attention.
    scale : function of (ModelConfig, layer index) -> float
    tokens, positions : str
        Embedding tensors; positions is empty where there is no such tensor.
    config_keys : dict
        Keys of config.json by meaning, tried in order.
    defaults : dict
        What config.json may leave out because it equals the architecture's default.
    """

    name: str
    model_types: tuple[str, ...]
    prefixes: tuple[str, ...]
    layer: str
    layout: Callable[[LayerTensors, "Family", ModelConfig], Projections]
    query: str
    key: str
    value: str
    output: str
    norm: LayerNorm
    tokens: str
    positions: str = ""
    scale: Callable[[ModelConfig, int], float] = default_scale
    config_keys: tuple[tuple[str, tuple[str, ...]], ...] = ()
    defaults: tuple[tuple[str, Any], ...] = ()

    def but(self, **changes: Any) -> "Family":
        """The same row with some cells changed."""
        return replace(self, **changes)
