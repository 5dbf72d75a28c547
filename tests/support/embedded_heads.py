"""The attention of a GPT-2 of two layers, and the same heads in another order."""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from safetensors.numpy import load_file

from tests.support.two_layers import FOLDER


@lru_cache(None)
def real() -> dict[str, np.ndarray]:
    """The attention of a trained GPT-2 of two layers of eight heads."""
    weights = load_file(FOLDER / "model.safetensors")
    return {
        name.removeprefix("transformer."): values.astype(np.float32)
        for name, values in weights.items()
        if "wte" not in name and "mlp" not in name
    }


def of_heads(part: int, heads: Iterable[int]) -> np.ndarray:
    """The columns of c_attn that are queries (0), keys (1) or values (2) of its heads."""
    return np.concatenate([np.arange(256 * part + 32 * h, 256 * part + 32 * h + 32) for h in heads])


def permuted(weights: dict[str, np.ndarray], layer: int, order: Sequence[int]) -> dict[str, np.ndarray]:
    """The same functions: head `order[h]` stands where head h stood."""
    copies = {name: values.copy() for name, values in weights.items()}
    stem = f"h.{layer}.attn."
    columns = np.concatenate([of_heads(part, order) for part in range(3)])
    copies[f"{stem}c_attn.weight"] = copies[f"{stem}c_attn.weight"][:, columns]
    copies[f"{stem}c_attn.bias"] = copies[f"{stem}c_attn.bias"][columns]
    copies[f"{stem}c_proj.weight"] = copies[f"{stem}c_proj.weight"][of_heads(0, order)]
    return copies
