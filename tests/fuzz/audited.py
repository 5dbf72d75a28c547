"""Checkpoints that open although something in them is wrong, audited and compared to the end: weights, adapters.

NumPy's warnings are not printed by commands, and are none here.
"""

import random
import struct
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
from safetensors.numpy import load, save

import weightscope as ws
from tests.fuzz import adapters
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.checkpoint.formats import ADAPTER, ADAPTER_WEIGHTS

# What a value, a row, a column or all of a tensor may become.
VALUES = (0.0, 1.0, -1.0, 1e-45, 1e-30, 1e19, 1e30, 3e38, np.inf, -np.inf, np.nan)


def silent(meet: Callable[[Path, bytes], str]) -> Callable[[Path, bytes], str]:
    def quietly(folder: Path, content: bytes) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return meet(folder, content)

    return quietly


@cache
def _base() -> tuple[dict[str, np.ndarray], Path]:
    weights = gpt2_weights(n_layers=2)
    return weights, write_checkpoint(Path(mkdtemp(prefix="fuzz-")), weights)


def weights(rng: random.Random) -> bytes:
    """Good shapes with values that no training gives, in a few tensors."""
    mutated = {name: values.copy() for name, values in _base()[0].items()}
    for name in rng.sample(list(mutated), rng.choice((1, 1, 2, 5, len(mutated)))):
        values = mutated[name]
        place = rng.choice((..., tuple(rng.randrange(size) for size in values.shape), rng.randrange(len(values))))
        with np.errstate(all="ignore"):
            values[place] = rng.choice(VALUES) if rng.random() < 0.5 else values[place] * np.float32(rng.choice(VALUES))
        with np.errstate(over="ignore"):
            mutated[name] = values.astype(rng.choice((np.float32, np.float32, np.float16, np.float64)))
    return save(mutated)


@silent
def meet_weights(folder: Path, content: bytes) -> str:
    """Audit it, and compare it with the good one."""
    (folder / "config.json").write_bytes((_base()[1] / "config.json").read_bytes())
    (folder / "model.safetensors").write_bytes(content)
    model, base = ws.open_model(folder), ws.open_model(_base()[1])
    mutated, good = load(content), _base()[0]
    if any(not np.array_equal(mutated[name], good[name]) for name in good):
        with suppress(ws.CheckpointError):
            assert ws.compare(base, model, all_tensors=True).largest_change() != 0
    return _audited(model, base)


@silent
def meet_adapter(folder: Path, content: bytes) -> str:
    """The same of an adapter and its base."""
    number, length = struct.unpack_from("<BI", content)
    (folder / ADAPTER).write_bytes(content[5 : 5 + length])
    (folder / ADAPTER_WEIGHTS).write_bytes(content[5 + length :])
    base = adapters.GOLDEN / adapters.KINDS[number] / "base"
    try:
        model = ws.open_model(folder, base=base)
    except ws.CheckpointError:
        return "refused"
    return _audited(model, ws.open_model(base))


def _audited(model: ws.Model, base: ws.Model) -> str:
    outcomes = []
    for result in (partial(ws.audit, model, all_tensors=True), partial(ws.compare, base, model, all_tensors=True)):
        try:
            answer = result()
        except ws.CheckpointError as error:
            assert str(error).isprintable()
            outcomes.append("refused")
        else:
            assert str(answer) and answer.as_json() is not None
            outcomes.append("findings" if answer.findings else "no finding")
    return f"audit {outcomes[0]}, comparison {outcomes[1]}"
