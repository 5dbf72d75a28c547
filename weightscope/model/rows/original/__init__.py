"""A checkpoint under its trainer's names, such as Meta's or Megatron's, as transformers has it."""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weightscope.checkpoint.checkpoint import Checkpoint, Tensor
from weightscope.checkpoint.config import Config
from weightscope.checkpoint.packings.packed import renamed
from weightscope.core.errors import CheckpointError
from weightscope.core.files import regular_file
from weightscope.model.layers.layouts import separate
from weightscope.model.rows.family import Family
from weightscope.model.rows.gguf import RestoredTensor, Undo, keys_in_halves, queries_in_halves

FILE = Path(__file__).with_name("spellings.toml")
# Tensors by which a spelling is recognised.
KNOWN_BY = {
    "layers.0.attention.wq.weight": "meta",
    "decoder.layers.0.self_attention.linear_qkv.weight": "mcore",
}
SCALED = "use_scaled_rope"  # key of params.json in place of rope_scaling; it says no number
# Its numbers, as Meta's code has them (llama-models, models/llama3/model.py, apply_scaling).
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Width and layers of Llama 3.2 1B and 3B, whose published config.json has a factor of 32.
LLAMA_3_2 = {(2048, 16), (3072, 28)}
SCALED_POSITIONS = 131072  # of models that are scaled so
# Keys of params.json without a key of config.json of their own, or without effect.
READ = (
    "moe", "multiple_of", "ffn_dim_multiplier", "max_batch_size", "model_parallel_size", SCALED,
)  # fmt: skip
# Keys of params.json that may have one value alone.
DEFAULTS: dict[str, Any] = {
    "use_biases": False,
    "causal": True,
    "model_type": "transformer",
}


class Spelling(NamedTuple):
    """A stanza of spellings.toml."""

    types: Sequence[str]
    layer: str
    rotary: str
    roles: Mapping[str, str]
    params: Mapping[str, str] = {}


@lru_cache(None)
def spelling_of(name: str) -> Spelling:
    with regular_file(FILE) as file:
        return Spelling(**tomllib.loads(file.read().decode())[name])


def as_published(
    checkpoint: Checkpoint, name: str, rows: Callable[[frozenset[str]], Sequence[Family]]
) -> Checkpoint:
    """The checkpoint under the names, in the order and with the config of transformers."""
    spelling, config = spelling_of(name), checkpoint.config
    if config.get("model_type") is None or "dim" in config:
        config = config_of_params(checkpoint, spelling)
    kind = config.get("model_type")
    # another row may have these names for its own
    if not isinstance(kind, str) or kind not in spelling.types:
        return checkpoint
    row = next(row for row in rows(frozenset({kind})) if row.heads.layout is separate)
    row = row.configured({**row.config.defaults, **config})
    heads = config.size("num_attention_heads")
    counts = heads, config.size("num_key_value_heads", default=heads)
    tensors: dict[str, Tensor] = {}
    for tensor in checkpoint.values():
        for full, restored in _published(tensor, spelling, row, counts):
            if full in tensors:
                raise tensor.refuse(f"means {full}, which another tensor means, too")
            tensors[full] = restored
    published = Checkpoint(checkpoint.folder, checkpoint.files, tensors, config, checkpoint.name)
    published.weight_files = checkpoint.weight_files
    return published


def _published(
    tensor: Tensor, spelling: Spelling, row: Family, counts: tuple[int, int]
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of transformers in a tensor, by name; a fused one has several. Unknown names stay."""
    module, end = _module_of(tensor.name)
    role, layer, expert = _role_of(module, spelling)
    modules = {**{role: names[0] for role, names in row.also.items()}, **row.roles}
    kind, dot, rest = role.rpartition(".")
    letters = [f"{kind}{dot}{letter}" for letter in rest.split("+")]
    if role == "gate+up" and "gate" not in modules and "gate+up" not in modules:
        letters = ["up"]
    if not all(letter in modules for letter in letters):
        yield tensor.name, tensor
        return
    for letter in letters:
        within = modules[letter].partition(" as ")[0].replace("{e}", str(expert))
        prefix = "" if letter == "unembedding" else row.prefixes[0]  # as `Outputs.tokens` says
        stem = row.layer.format(i=layer) if layer is not None else ""
        full = f"{prefix}{stem}{within}.{end}"
        yield full, _restored(renamed(tensor, full), letter, len(letters) > 1, spelling, counts)


def _module_of(name: str) -> tuple[str, str]:
    """`a.b.weight` -> `a.b`, `weight`; `a.b.layer_norm_weight` (Transformer Engine) stays whole."""
    module, _, end = name.rpartition(".")
    if end.startswith("layer_norm_"):
        return name, end.removeprefix("layer_norm_")
    return module, end


@lru_cache(4)
def _patterns(roles: tuple[tuple[str, str], ...]) -> list[tuple[re.Pattern[str], str]]:
    patterns = []
    for name, role in roles:
        text = re.escape(name).replace(r"\{i\}", r"(?P<layer>\d{1,7})")
        text = text.replace(r"\{e\}", r"(?P<expert>\d{1,6})")
        patterns.append((re.compile(text, re.ASCII), role))
    return patterns


def _role_of(module: str, spelling: Spelling) -> tuple[str, int | None, int | None]:
    """The role of a module, its layer and its expert; an empty role where no spelling has it."""
    for pattern, role in _patterns(tuple(spelling.roles.items())):
        if match := pattern.fullmatch(module):
            indices = {key: int(digits) for key, digits in match.groupdict().items()}
            return role, indices.get("layer"), indices.get("expert")
    return "", None, None


def _restored(
    tensor: Tensor, role: str, is_part: bool, spelling: Spelling, counts: tuple[int, int]
) -> Tensor:
    """A tensor in transformers' order: rows of queries and keys, or the part of a fused one."""
    if is_part:
        return PartTensor(tensor, PARTS[role.rpartition(".")[2]], *counts)
    undo = None
    if spelling.rotary == "neighbours":
        undone: dict[str, Undo] = {"q": queries_in_halves, "k": keys_in_halves}
        undo = undone.get(role)
    return tensor if undo is None or not tensor.shape else RestoredTensor(tensor, undo, *counts)


# Parts of fused tensors: functions of an array and of head counts.


def _groups(rows: np.ndarray, n_heads: int, n_kv_heads: int) -> np.ndarray:
    """Rows by group of queries, key and value: (G, H / G + 2, r, ...)."""
    r = len(rows) // (n_heads + 2 * n_kv_heads)
    return rows.reshape(n_kv_heads, n_heads // n_kv_heads + 2, r, *rows.shape[1:])


def queries_of_groups(rows: np.ndarray, n_heads: int, n_kv_heads: int) -> np.ndarray:
    """Queries of all groups; a group has queries, a key and a value."""
    return _groups(rows, n_heads, n_kv_heads)[:, :-2].reshape(-1, *rows.shape[1:])


def keys_of_groups(rows: np.ndarray, n_heads: int, n_kv_heads: int) -> np.ndarray:
    """Keys of all groups."""
    return _groups(rows, n_heads, n_kv_heads)[:, -2].reshape(-1, *rows.shape[1:])


def values_of_groups(rows: np.ndarray, n_heads: int, n_kv_heads: int) -> np.ndarray:
    """Values of all groups."""
    return _groups(rows, n_heads, n_kv_heads)[:, -1].reshape(-1, *rows.shape[1:])


def first_half(rows: np.ndarray, n_heads: int, n_kv_heads: int) -> np.ndarray:
    """Gates of a fused network, which Megatron stores first."""
    return rows[: len(rows) // 2]


def second_half(rows: np.ndarray, n_heads: int, n_kv_heads: int) -> np.ndarray:
    """Inputs that the gates multiply."""
    return rows[len(rows) // 2 :]


PARTS: dict[str, Undo] = {
    "q": queries_of_groups,
    "k": keys_of_groups,
    "v": values_of_groups,
    "gate": first_half,
    "up": second_half,
}


@dataclass(frozen=True)
class PartTensor(RestoredTensor):
    """One of the matrices that a file fuses."""

    def __post_init__(self) -> None:
        rows, (_, total) = self.stored.shape[0] if self.stored.shape else 0, self.share
        if not rows or rows % total or self.n_heads % self.n_kv_heads:
            counts = f"{self.n_heads} heads of {self.n_kv_heads} keys and values"
            raise self.stored.refuse(f"has shape {self.stored.shape}, which {counts} do not divide")

    @property
    def share(self) -> tuple[int, int]:
        """Fused rows that are this part's: (n, total)."""
        if self.undo in (first_half, second_half):
            return 1, 2
        n = self.n_heads if self.undo is queries_of_groups else self.n_kv_heads
        return n, self.n_heads + 2 * self.n_kv_heads

    @property
    def shape(self) -> tuple[int, ...]:
        n, total = self.share
        return self.stored.shape[0] // total * n, *self.stored.shape[1:]


# params.json


def config_of_params(checkpoint: Checkpoint, spelling: Spelling) -> Config:
    """A config.json by params.json; unknown keys are refused."""
    params, nested = checkpoint.config, checkpoint.config.get("model")
    if isinstance(nested, dict):
        params = Config(nested, params.file)
    if "dim" not in params:
        names = next(name for name in KNOWN_BY if name in checkpoint)
        problem = f"has names as '{names}', and no config.json with a model_type"
        ways = " and no params.json" if spelling.params else ""
        problem += f"{ways}: the number of heads is not known"
        raise CheckpointError(problem, file=checkpoint.name)
    experts = params.inside("moe")
    known = {*spelling.params.values(), *READ, *DEFAULTS}
    for key, value in params.items():
        if value is not None and (key not in known or value != DEFAULTS.get(key, value)):
            problem = f"'{key[:40]}' is {str(value)[:40]}, which is not read of params.json"
            way = "add transformers' config.json to the folder to open it"
            raise CheckpointError(f"{problem}; {way}", file=params.file)
    values = {
        key: params[name] for key, name in spelling.params.items() if params.get(name) is not None
    }
    values["model_type"] = "mistral" if "hidden_dim" in params else "llama"
    if experts:
        values["model_type"] = "mixtral"
    values.setdefault("num_key_value_heads", params.size("n_heads"))
    if "rope_theta" not in values and "hidden_dim" in params and "sliding_window" not in values:
        problem = (
            "has no 'rope_theta': Mistral's code takes 1e6 then, and transformers' conversion 1e4"
        )
        raise CheckpointError(problem, file=params.file)
    values.setdefault("rope_theta", 10000.0)
    if params.get(SCALED) is not None and params.flag(SCALED):
        is_small = (values.get("hidden_size"), values.get("num_hidden_layers")) in LLAMA_3_2
        values["rope_scaling"] = SCALING | ({"factor": 32.0} if is_small else {})
        values.setdefault("max_position_embeddings", SCALED_POSITIONS)
    values.setdefault("intermediate_size", _inner_width(params))
    values["rms_norm_eps"] = params.number("norm_eps")
    window = values.get("sliding_window")
    if isinstance(window, str) and window.isascii() and window.isdigit():
        values["sliding_window"] = int(window)  # Mixtral's is a text
    values.setdefault("sliding_window", None)
    if experts:
        values |= {"num_local_experts": experts.size("num_experts")}
        values |= {"num_experts_per_tok": experts.size("num_experts_per_tok")}
    tokens = checkpoint.get("tok_embeddings.weight")
    # Meta's files have -1
    if values.get("vocab_size", -1) == -1 and tokens is not None and tokens.shape:
        values["vocab_size"] = tokens.shape[0]
    values.setdefault("tie_word_embeddings", "output.weight" not in checkpoint)
    config = Config(values, params.file, stored=checkpoint.config.stored)
    _check_widths(checkpoint, config)
    return config


def _inner_width(params: Config) -> int:
    """The network's width by Meta's rule: 8 d / 3 times a factor, rounded up to a multiple."""
    multiple = params.size("multiple_of", default=256)
    factor = params.number("ffn_dim_multiplier", default=1.0)
    width = int(factor * int(8 * params.size("dim") / 3))
    return multiple * ((width + multiple - 1) // multiple)


def _check_widths(checkpoint: Checkpoint, config: Config) -> None:
    """Refuse another model's params.json."""
    gate = checkpoint.get("layers.0.feed_forward.w1.weight")
    wanted = config.size("intermediate_size"), config.size("hidden_size")
    if gate is not None and gate.shape != wanted:
        problem = f"has shape {gate.shape}; params.json needs {wanted}"
        here, per_file = len(gate.parts), gate.parts[0].shape
        needed = wanted[0] // per_file[0] if per_file[1:] == wanted[1:] and per_file[0] else 0
        if needed > here and needed * per_file[0] == wanted[0]:
            problem += f": {here} of the model's {needed} parts {'is' if here == 1 else 'are'} here"
        raise gate.refuse(problem)
