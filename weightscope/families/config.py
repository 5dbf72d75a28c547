"""config.json, whichever names it uses for the same thing, as one set of checked numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weightscope.errors import CheckpointError

# Meaning -> keys to try in order. A row of the table may put its own keys first.
KEYS: dict[str, tuple[str, ...]] = {
    "n_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "d_model": ("hidden_size", "n_embd", "d_model", "dim"),
    "n_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "n_positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "vocab_size": ("vocab_size",),
}
LARGEST = 10**7  # no size in a config is near this; more is a broken or hostile file


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a model, normalised over config dialects.

    Attributes
    ----------
    model_type : str
    n_layers, d_model, n_heads, n_kv_heads, head_dim : int
    norm_eps : float
    n_positions, vocab_size : int or None
    raw : mapping
        config.json as it stands, for what only one family needs.
    """

    model_type: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    n_positions: int | None
    vocab_size: int | None
    raw: Mapping[str, Any]


def read_config(raw: Mapping[str, Any], defaults: Mapping[str, Any], *, file: object) -> ModelConfig:
    """Normalise a config.json.

    Raises
    ------
    CheckpointError
        A size is missing, is not a positive integer, is absurd, or the width does not divide into the heads.
    """
    values = {**defaults, **{key: value for key, value in raw.items() if value is not None}}

    def look_up(meaning: str) -> tuple[str, Any]:
        found = next((key for key in KEYS[meaning] if key in values), KEYS[meaning][0])
        return found, values.get(found)

    def size(meaning: str) -> int:
        key, value = look_up(meaning)
        if type(value) is not int or not 1 <= value <= LARGEST:
            problem = f"'{key}' is {str(value)[:40]}; a whole number from 1 to {LARGEST} was expected"
            raise CheckpointError(problem, file=file)
        return value

    def optional_size(meaning: str) -> int | None:
        return None if look_up(meaning)[1] is None else size(meaning)

    eps_key, eps = look_up("norm_eps")
    if type(eps) not in (int, float) or not 0 <= eps < 1:
        raise CheckpointError(f"'{eps_key}' is {str(eps)[:40]}; a number from 0 to 1 was expected", file=file)
    d_model, n_heads = size("d_model"), size("n_heads")
    if d_model % n_heads:
        raise CheckpointError(f"width {d_model} does not divide into {n_heads} heads", file=file)
    return ModelConfig(
        model_type=str(raw.get("model_type")),
        n_layers=size("n_layers"),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=d_model // n_heads,
        norm_eps=float(eps),
        n_positions=optional_size("n_positions"),
        vocab_size=optional_size("vocab_size"),
        raw=values,
    )
