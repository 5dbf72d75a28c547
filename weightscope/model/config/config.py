"""A model's config, whatever names its file uses, and defaults of what may be left out."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from weightscope.checkpoint.config import Config, read_json
from weightscope.core.errors import CheckpointError

# Conditions on a cell's value, besides its type, in its annotation.

LARGEST_NUMBER = 1e12


@dataclass(frozen=True)
class Within:
    """A number from `smallest` to `largest`."""

    smallest: float
    largest: float


class OneOf(tuple[str, ...]):
    """A string that is one of several."""

    def __new__(cls, *choices: str) -> "OneOf":
        return super().__new__(cls, choices)


# A model's config, whichever names its file uses for the same thing.

# Meaning -> keys to try in order.
KEYS: dict[str, tuple[str, ...]] = {
    "n_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "d_model": ("hidden_size", "n_embd", "n_embed", "d_model", "dim"),
    "n_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "norm_eps": (
        "rms_norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "norm_epsilon",
        "norm_eps",
    ),
    "n_positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "vocab_size": ("vocab_size",),
    "initial_std": ("initializer_range", "init_std"),
    "loops": (),  # passes over the layers; a row of a looped model names its key
}
MOST_LAYERS = 10**4


@dataclass(frozen=True, eq=False)
class ModelConfig(Config):
    """A model's config with its sizes normalised over dialects; other values as in any `Config`."""

    model_type: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int  # width of a head's queries and keys
    # "layer_norm" or "rms_norm", or "none" where attention reads the residual stream as it is
    norm: str
    norm_eps: float
    layer_types: tuple[str, ...]  # every layer's kind, as transformers names them
    # rotary parameters (theta, fraction, kind, scaling) by layer type; empty without rotation
    rope: Mapping[str, Config] = field(repr=False)
    n_positions: int | None
    vocab_size: int | None
    loops: int = 1  # passes over the layers

    @property
    def tied(self) -> bool:
        """True unless the config says that the unembedding is not the token embedding."""
        return self.get("tie_word_embeddings", True) is True

    @property
    def initial_std(self) -> float | None:
        """Initial standard deviation of embeddings; None where the config has no sane one."""
        try:
            return self.number(*KEYS["initial_std"], smallest=1e-6, largest=100.0)
        except CheckpointError:
            return None


@dataclass(frozen=True)
class Every:
    """Layer types by a period: layer i is `then` if i % period is `phase` (may be negative)."""

    key: str | int  # the config's key for the period; or the period
    phase: int = -1
    then: str = "full_attention"
    otherwise: str = "sliding_attention"
    last: str = ""  # the last layer's type, where it is another

    def __call__(self, config: Config, n_layers: int) -> tuple[str, ...]:
        period = self.key if isinstance(self.key, int) else config.size(self.key)
        types = [
            self.then if i % period == self.phase % period else self.otherwise
            for i in range(n_layers)
        ]
        return (*types[:-1], self.last or types[-1])


def listed_sizes(config: "ModelConfig", layer: int) -> Mapping[str, Any]:
    """Values for one layer in `per_layer_config`, by the config's keys, such as other sizes."""
    listed = config.inside("per_layer_config")
    for key in listed:
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 9):
            raise config.error("per_layer_config", "an object by layers' numbers")
    return next((listed.inside(key) for key in listed if int(key) == layer), {})


LayerTypes = Callable[[Config, int], tuple[str, ...]]


def all_full(config: Config, n_layers: int) -> tuple[str, ...]:
    """Full attention in every layer."""
    return ("full_attention",) * n_layers


def same_layer(config: ModelConfig, layer: int) -> int:
    """Layer i has tensors of its own, under index i."""
    return layer


def stated(config: Config, n_layers: int) -> tuple[str, ...]:
    """Types that the config must list, as transformers' class has a rule of its own otherwise."""
    raise config.error("layer_types", "a list with every layer's type")


# Defaults of transformers' classes, which parts of a config may leave out: sizes and model_types.
#
# Old files do leave them out (LLaVA 1.5 names no sizes of its text model). `defaults.json` is made
# from those classes.

FILE = Path(__file__).with_name("defaults.json")


def class_says(model_type: object, what: str) -> dict[str, Any]:
    """Defaults of transformers' class of a model_type; empty for one that is not known.

    `what` is "sizes" (of its default config, by its own keys), "parts" (the model_types of the
    parts of a wrapper's default config, by the keys that lead there), "values" (taken where a
    config leaves them out), "names" (of sizes that the class knows, each with the one that it
    stores the size under) or "rope" (the rotary parameters of a config that has none; empty where
    they are plain).
    """
    return _defaults().get(model_type, {}).get(what, {}) if isinstance(model_type, str) else {}


def values_of(model_types: Iterable[str]) -> dict[str, Any]:
    """Values that transformers takes for keys left out, by model_types; the first type's win."""
    values: dict[str, Any] = {}
    for kind in reversed([*model_types]):
        values |= class_says(kind, "values")
    return values


@lru_cache(None)
def _defaults() -> dict[str, Any]:
    return read_json(FILE)
