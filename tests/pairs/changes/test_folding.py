"""A norm is folded where it keeps one value, and queries, keys and values all contain its gains."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.files import write
from weightscope.model.model import Model
from weightscope.pairs.changes.head import is_folded

D, HEADS = 32, 4
GAIN, PARTS = "model.layers.0.input_layernorm.weight", "qkvo"
Weights = dict[str, np.ndarray]


def drawn(seed: int = 0) -> Weights:
    """One layer of a Llama with gains from 0.7 to 1.3."""
    rng = np.random.default_rng(seed)
    weights = {f"model.layers.0.self_attn.{part}_proj.weight": rng.standard_normal((D, D)) for part in PARTS}
    return weights | {"model.embed_tokens.weight": rng.standard_normal((40, D)), GAIN: rng.uniform(0.7, 1.3, D)}


def opened(folder: Path, weights: Weights) -> Model:
    folder.mkdir()
    write(folder / "model.safetensors", {name: np.float32(w) for name, w in weights.items()})
    (folder / "config.json").write_text(
        f'{{"model_type": "llama", "hidden_size": {D}, "num_attention_heads": {HEADS}, "num_hidden_layers": 1, '
        '"vocab_size": 40, "intermediate_size": 8}'
    )
    return ws.open_model(folder)


def folded(weights: Weights, parts: str, constant: float = 1.0) -> Weights:
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in parts]
    return weights | {name: weights[name] * weights[GAIN] / constant for name in names} | {GAIN: np.full(D, constant)}


def trained(weights: Weights) -> Weights:
    """Gains that moved towards one, and matrices that moved with them."""
    return weights | {GAIN: 1 + 0.1 * (weights[GAIN] - 1)}


def rotated(weights: Weights) -> Weights:
    """Every matrix of attention in another basis of the stream."""
    turn = np.linalg.qr(np.random.default_rng(9).standard_normal((D, D)))[0]
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in PARTS]
    return weights | {name: turn.T @ weights[name] if "o_proj" in name else weights[name] @ turn for name in names}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda w: folded(w, "qkv"), True),
        (lambda w: folded(w, "qkv", constant=2.0), True),
        (lambda w: rotated(folded(w, "qkv")), True),
        (lambda w: folded(w, "qk"), False),
        (lambda w: folded(w, "v"), False),
        (lambda w: folded(w, ""), False),  # a gain that was set to one
        (lambda w: rotated(folded(w, "")), False),
        (trained, False),
        (lambda w: trained(folded(w, "qkv")), True),  # a gain of one stays one
        (lambda w: folded(drawn(seed=1), "") | {GAIN: np.ones(D)}, False),  # a stranger without gains
    ],
)
def test_folded_needs_one_value_and_queries_keys_and_values(
    change: Callable[[Weights], Weights], expected: bool, tmp_path: Path
) -> None:
    a, b = opened(tmp_path / "a", drawn()), opened(tmp_path / "b", change(drawn()))
    assert is_folded(a.layer(0), b.layer(0)) == expected
    assert not is_folded(b.layer(0), a.layer(0))
