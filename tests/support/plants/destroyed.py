"""Tensors destroyed: what `same` has to call different, in every container."""

from collections.abc import Callable
from functools import partial

import numpy as np

from tests.support.plants.families import LAYERS, Planted

Destroy = Callable[[np.ndarray], np.ndarray]


def rows_equal(w: np.ndarray) -> np.ndarray:
    return np.broadcast_to(w[:1], w.shape).copy()


def columns_equal(w: np.ndarray) -> np.ndarray:
    return np.broadcast_to(w[..., :1], w.shape).copy()


def two_values(w: np.ndarray) -> np.ndarray:
    """Two values of its size, drawn without regard to what was there."""
    return np.random.default_rng(7).choice(np.float32([-1, 1.5]), w.shape) * w.std()


def shuffled(w: np.ndarray) -> np.ndarray:
    return np.random.default_rng(8).permutation(w.reshape(-1)).reshape(w.shape)


DESTROYED: dict[str, Destroy] = {
    "zero": np.zeros_like,
    "constant": partial(np.full_like, fill_value=0.1),
    "one": np.ones_like,
    "rows equal": rows_equal,
    "columns equal": columns_equal,
    "1e-30": partial(np.full_like, fill_value=1e-30),
    "1e30": partial(np.full_like, fill_value=1e30),
    "two values": two_values,
    "shuffled": shuffled,
}
OTHER_LAYER = "another layer's"


def next_layer(planted: Planted, name: str) -> np.ndarray | None:
    """The same part of the next layer; None outside layers."""
    for layer in range(LAYERS):
        here, there = (planted.family.layer.format(i=i) for i in (layer, (layer + 1) % LAYERS))
        if name.startswith(here):
            return planted.tensors[name.replace(here, there, 1)].copy()
    return None


def destroyed(planted: Planted, deed: str, names: tuple[str, ...]) -> Planted:
    """The checkpoint with these tensors destroyed."""
    result = planted.copy()
    for name in names:
        w = planted.tensors[name]
        result.tensors[name] = DESTROYED[deed](w) if deed in DESTROYED else next_layer(planted, name)
    return result


def names_of(planted: Planted, deed: str) -> tuple[str, ...]:
    """The tensors that a deed can be done to."""
    prefix = planted.family.layer.partition("{")[0]
    return tuple(name for name in planted.tensors if deed != OTHER_LAYER or name.startswith(prefix))
