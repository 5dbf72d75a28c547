"""config.json, whichever names it uses for the same thing, as one set of checked numbers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weightscope.errors import CheckpointError

# Meaning -> keys to try in order.
KEYS: dict[str, tuple[str, ...]] = {
    "n_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "d_model": ("hidden_size", "n_embd", "n_embed", "d_model", "dim"),
    "n_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "n_positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "vocab_size": ("vocab_size",),
}
LARGEST = 10**7  # no size in a config is near this; more is a broken or hostile file
MOST_LAYERS = 10**4


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a model, normalised over config dialects.

    Attributes
    ----------
    model_type : str
    n_layers, d_model, n_heads, n_kv_heads, head_dim : int
        head_dim is the width of a head's queries and keys.
    norm : str
        "layer_norm" or "rms_norm", or "none" where attention reads the residual stream as it is.
    norm_eps : float
    layer_types : tuple of str
        Every layer's kind, as transformers names them.
    rope : mapping of layer type to mapping
        Rotary parameters (theta, fraction, kind, scaling) by layer type; empty without rotation.
    n_positions, vocab_size : int or None
    raw : mapping
        config.json as it stands, the architecture's defaults filled in.
    """

    model_type: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm: str
    norm_eps: float
    layer_types: tuple[str, ...]
    rope: Mapping[str, Mapping[str, Any]]
    n_positions: int | None
    vocab_size: int | None
    raw: Mapping[str, Any]


@dataclass(frozen=True)
class Numbers:
    """A config's values, each checked as it is read.

    Attributes
    ----------
    values : mapping
    file : path-like
        Named in errors.
    """

    values: Mapping[str, Any]
    file: object

    def error(self, key: str, wanted: str) -> CheckpointError:
        """What to raise when the value of `key` is not what was `wanted`."""
        return CheckpointError(f"'{key}' is {str(self.values.get(key))[:40]}; {wanted} was expected", file=self.file)

    def found(self, keys: tuple[str, ...]) -> str | None:
        """The first of `keys` that has a value."""
        return next((key for key in keys if self.values.get(key) is not None), None)

    def size(self, *keys: str, largest: int = LARGEST) -> int:
        """A positive whole number under the first of `keys` that is there.

        Raises
        ------
        CheckpointError
            None of them is, or it is something else.
        """
        key = self.found(keys) or keys[0]
        value = self.values.get(key)
        if type(value) is not int or not 1 <= value <= largest:
            raise self.error(key, f"a whole number from 1 to {largest}")
        return value

    def size_or(self, other: int, *keys: str) -> int:
        """As `size`, but `other` where none of `keys` has a value."""
        return self.size(*keys) if self.found(keys) else other

    def count(self, key: str) -> int:
        """A whole number that may be 0, and is where `key` has no value."""
        return 0 if self.values.get(key) in (None, 0) else self.size(key)

    def number(self, key: str, smallest: float = 0.0, largest: float = 1e12) -> float:
        """A finite number from `smallest` to `largest`."""
        value = self.values.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not smallest <= value <= largest:
            raise self.error(key, f"a number from {smallest:g} to {largest:g}")  # NaN fails both comparisons
        return float(value)

    def number_or(self, other: float, key: str, smallest: float = 0.0, largest: float = 1e12) -> float:
        """As `number`, but `other` where `key` has no value."""
        return other if self.values.get(key) is None else self.number(key, smallest, largest)

    def flag(self, key: str) -> bool:
        """True or false, or the nearest thing to it in old files: 1 or 0."""
        value = self.values.get(key)
        if value not in (True, False):
            raise self.error(key, "true or false")
        return bool(value)

    def strings(self, key: str, count: int) -> tuple[str, ...]:
        """The first `count` of a list of strings."""
        value = self.values.get(key)
        if not isinstance(value, list) or len(value) < count or not all(isinstance(item, str) for item in value):
            raise self.error(key, f"a list of at least {count} names")
        return tuple(value[:count])

    def inside(self, key: str) -> "Numbers":
        """The values of the object under `key`; empty where there is none."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return Numbers(value or {}, self.file)


@dataclass(frozen=True)
class Every:
    """Layer types by a period: layer i is `then` when i % period is `phase` (counted from the end if negative).

    Attributes
    ----------
    key : str
        The config's key for the period.
    phase : int
    then, otherwise : str
    """

    key: str
    phase: int
    then: str
    otherwise: str

    def __call__(self, numbers: Numbers, n_layers: int) -> tuple[str, ...]:
        """Every layer's type."""
        period = numbers.size(self.key)
        return tuple(self.then if i % period == self.phase % period else self.otherwise for i in range(n_layers))


LayerTypes = Callable[[Numbers, int], tuple[str, ...]]


def all_full(numbers: Numbers, n_layers: int) -> tuple[str, ...]:
    """Every layer attends to everything."""
    return ("full_attention",) * n_layers
