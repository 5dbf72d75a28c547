"""A model's config, whichever names its file uses for the same thing, and what may be left out."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from weightscope.checkpoint.config import Config, read_json
from weightscope.core.errors import CheckpointError

# What an annotation of a cell may ask of a value, besides its type.

LARGEST_NUMBER = 1e12


@dataclass(frozen=True)
class Within:
    """A number from `smallest` to `largest`."""

    smallest: float
    largest: float


class OneOf(tuple[str, ...]):
    """A string that is one of these."""

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
}
MOST_LAYERS = 10**4


@dataclass(frozen=True, eq=False)
class ModelConfig(Config):
    """A model's config with its sizes normalised over dialects; other values are read as of any
    `Config`.
    """

    model_type: str
    # n_layers, d_model, n_heads, n_kv_heads, head_dim: head_dim is the width of a head's queries
    # and keys
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    # "layer_norm" or "rms_norm", or "none" where attention reads the residual stream as it is
    norm: str
    norm_eps: float
    layer_types: tuple[str, ...]  # every layer's kind, as transformers names them
    # rotary parameters (theta, fraction, kind, scaling) by layer type; empty without rotation
    rope: Mapping[str, Config] = field(repr=False)
    n_positions: int | None
    vocab_size: int | None

    @property
    def initial_std(self) -> float | None:
        """Of the normal distribution that embeddings began with; None where the config does not say
        it, or absurdly.
        """
        try:
            return self.number(*KEYS["initial_std"], smallest=1e-6, largest=100.0)
        except CheckpointError:
            return None


@dataclass(frozen=True)
class Every:
    """Layer types by a period: layer i is `then` when i % period is `phase` (counted from the end
    if negative).
    """

    key: str | int  # the config's key for the period; or the period
    phase: int = -1
    then: str = "full_attention"
    otherwise: str = "sliding_attention"
    last: str = ""  # the last layer's type, where it is another

    def __call__(self, config: Config, n_layers: int) -> tuple[str, ...]:
        """Every layer's type."""
        period = self.key if isinstance(self.key, int) else config.size(self.key)
        types = [
            self.then if i % period == self.phase % period else self.otherwise
            for i in range(n_layers)
        ]
        return (*types[:-1], self.last or types[-1])


def listed_sizes(config: "ModelConfig", layer: int) -> Mapping[str, Any]:
    """What `per_layer_config` says of one layer, by the config's keys: sizes that are others than
    the model's.
    """
    listed = config.inside("per_layer_config")
    if not all(
        isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 9 for key in listed
    ):
        raise config.error("per_layer_config", "an object by layers' numbers")
    return next((listed.inside(key) for key in listed if int(key) == layer), {})


LayerTypes = Callable[[Config, int], tuple[str, ...]]


def all_full(config: Config, n_layers: int) -> tuple[str, ...]:
    """Every layer attends to everything."""
    return ("full_attention",) * n_layers


def stated(config: Config, n_layers: int) -> tuple[str, ...]:
    """Only what the config lists: transformers' class has a rule of its own where it does not."""
    raise config.error("layer_types", "a list with every layer's type")


# What the parts of a config may leave out because transformers' classes have it by default: sizes,
# and model_types.
#
# Old files do leave it out (LLaVA 1.5 names no sizes of its text model). `defaults.json` is made of
# those classes.

FILE = Path(__file__).with_name("defaults.json")


def class_says(model_type: object, what: str) -> dict[str, Any]:
    """What transformers' class of a model_type says; empty for one that is not known.

    `what` is "sizes" (of its default config, by its own keys), "parts" (the model_types of the
    parts of a wrapper's default config, by the keys that lead there), "values" (taken where a
    config leaves them out), "names" (of sizes that the class knows, each with the one that it
    stores the size under) or "rope" (the rotary parameters of a config that has none; empty where
    they are plain).
    """
    return _defaults().get(model_type, {}).get(what, {}) if isinstance(model_type, str) else {}


def values_of(model_types: Iterable[str]) -> dict[str, Any]:
    """What the config of an architecture may leave out, and what transformers takes then; the first
    type's wins.
    """
    return {
        key: value
        for kind in reversed([*model_types])
        for key, value in class_says(kind, "values").items()
    }


@lru_cache(None)
def _defaults() -> dict[str, Any]:
    return read_json(FILE)
