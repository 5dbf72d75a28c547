"""What stands in a layer beside attention: its feed-forward network, and the norms around that; a row a family.

Only `circuitry` reads it, to see what becomes of a token on its way up without attention. Heads of families without a
row here, mixtures of experts among them, are named by their wiring alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightscope.families.family import StoredNorm, layer_norm, rms_norm


@dataclass(frozen=True)
class FeedForward:
    """One row.

    Attributes
    ----------
    up, down : str
        Modules of the two maps; with a gate, act(x gate) * (x up) is what `down` takes.
    norm : StoredNorm or None
        Before them; None in post-norm models.
    gate : str
    activation : str
        What the config may leave unsaid.
    bias : bool
        The maps have one.
    transposed : bool
        Weights are stored as (in, out), as GPT-2's are.
    after_attention : StoredNorm or None
        Of post-norm models, between attention and the maps; the layer's own closing norm follows them.
    causal : bool
        A token sees none that comes after it.
    """

    up: str
    down: str
    norm: StoredNorm | None
    gate: str = ""
    activation: str = "silu"
    bias: bool = False
    transposed: bool = False
    after_attention: StoredNorm | None = None
    causal: bool = True


_LLAMA = FeedForward(
    up="mlp.up_proj", down="mlp.down_proj", gate="mlp.gate_proj",
    norm=rms_norm("post_attention_layernorm"),
)  # fmt: skip
ROWS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3"), _LLAMA),
    "gpt2": FeedForward(
        up="mlp.c_fc", down="mlp.c_proj", norm=layer_norm("ln_2"),
        activation="gelu_new", bias=True, transposed=True,
    ),
    "bert": FeedForward(
        up="intermediate.dense", down="output.dense", norm=None, activation="gelu", bias=True, causal=False,
        after_attention=layer_norm("attention.output.LayerNorm"),
    ),
}  # fmt: skip


def _gelu(x: np.ndarray) -> np.ndarray:
    from scipy.special import erf

    return 0.5 * x * (1 + erf(x / np.sqrt(2)))


def _gelu_new(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x * x * x)))


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-np.clip(x, -80, None)))


ACTIVATIONS: dict[Any, Callable[[np.ndarray], np.ndarray]] = {
    "silu": _silu, "swish": _silu, "gelu": _gelu, "gelu_new": _gelu_new, "gelu_pytorch_tanh": _gelu_new,
    "relu": lambda x: np.maximum(x, 0),
}  # fmt: skip
