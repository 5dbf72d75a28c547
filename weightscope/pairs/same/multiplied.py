"""Falcon-H1's multipliers, which llama.cpp's converter multiplies into the weights."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightscope.checkpoint.checkpoint import DerivedTensor, Tensor, WholeTensor
from weightscope.checkpoint.config import Config
from weightscope.model.config.reading import read_as
from weightscope.model.model import Model, TensorsOnly
from weightscope.model.opened import Opened
from weightscope.model.rows.gguf import MULTIPLIERS, without_multipliers

# Parts of names -> multipliers of the tensor, in the converter's order; the first part counts.
FACTORS: Mapping[str, Sequence[str]] = {
    "down_proj": ("mlp_multipliers.1",),
    "gate_proj": ("mlp_multipliers.0",),
    "k_proj": ("key_multiplier", "attention_in_multiplier"),
    "q_proj": ("attention_in_multiplier",),
    "v_proj": ("attention_in_multiplier",),
    "o_proj": ("attention_out_multiplier",),
    "out_proj": ("ssm_out_multiplier",),
    "in_proj": ("ssm_in_multiplier",),
    "lm_head": ("lm_head_multiplier",),
    "embed_tokens": ("embedding_multiplier",),
}


def in_one_convention(
    a: Model | TensorsOnly, b: Model | TensorsOnly
) -> tuple[Model | TensorsOnly, Model | TensorsOnly]:
    """Both, the one that has multipliers in its config with them in its weights, as the other."""
    folded = [_is_folded(each) for each in (a, b)]
    if folded == [False, True]:
        return multiplied(a), b
    if folded == [True, False]:
        return a, multiplied(b)
    return a, b


def _is_folded(model: Model | TensorsOnly) -> bool:
    """True if a file's converter multiplies them into the weights."""
    gguf = model.row.gguf if isinstance(model, Model) else None
    is_multiplied = gguf is not None and gguf.config is without_multipliers
    return is_multiplied and model.checkpoint.is_gguf


def multiplied(model: Model | TensorsOnly) -> Model | TensorsOnly:
    """The model with its multipliers in its weights, as GGUF files have them."""
    gguf = model.row.gguf if isinstance(model, Model) else None
    is_multiplied = gguf is not None and gguf.config is without_multipliers
    if not is_multiplied or model.checkpoint.is_gguf or not isinstance(model, Model):
        return model
    config, checkpoint = model.config, model.checkpoint
    numbers = dict(_numbers(config))
    inner = config.size("mamba_d_ssm", default=config.d_model * config.count("mamba_expand") or 1)
    state = config.count("mamba_n_groups") * config.count("mamba_d_state")
    by_part = np.array([numbers[f"ssm_multipliers.{i}"] for i in range(5)], np.float32)
    tensors: dict[str, Tensor] = {}
    for name, stored in checkpoint.items():
        keys = next((keys for part, keys in FACTORS.items() if part in name), ())
        factors, rows = [np.float32(numbers[key]) for key in keys], None
        if keys == FACTORS["in_proj"] and len(stored.shape) == 2:
            sizes = [inner, inner, state, state, stored.shape[0] - 2 * (inner + state)]
            rows = np.repeat(by_part, sizes)[:, None] if sizes[-1] >= 0 else None
        if any(factor != 1 for factor in factors) or (rows is not None and (rows != 1).any()):
            tensors[name] = MultipliedTensor(stored, tuple(factors), rows)
    same = checkpoint.with_tensors(tensors)
    same.config = Config({**checkpoint.config, **MULTIPLIERS}, checkpoint.config.file)
    opened = Opened(same, model.source, model.tokenizer, model.where)
    reading = model.reading
    made = Model(opened, read_as(same, reading.stated, model.prefix, reading.kind))
    made.called = model.called
    return made


def _numbers(config: Config) -> Iterator[tuple[str, float]]:
    """Each multiplier by its key, and a number's place in a list; 1 where there is none."""
    for key, usual in MULTIPLIERS.items():
        if not isinstance(usual, list):
            yield key, config.number(key, default=1.0, smallest=-1e12)
            continue
        stored = config.get(key)
        listed = stored if isinstance(stored, list) and len(stored) == len(usual) else usual
        given = Config({f"{key}.{i}": each for i, each in enumerate(listed)}, config.file)
        yield from ((name, given.number(name, smallest=-1e12)) for name in given)


@dataclass(frozen=True)
class MultipliedTensor(DerivedTensor, WholeTensor):
    """A tensor times numbers, one after the other, then its rows times one each."""

    factors: tuple[np.float32, ...]
    by_row: Any

    def read(self) -> np.ndarray:
        array = self.stored.read()
        for factor in self.factors:
            array = array * factor
        return array if self.by_row is None else array * self.by_row
