"""The checkpoints that cases begin with, in memory, and ways of writing one that keep its values."""

import json
import random
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

from tests.properties import wide
from tests.support.files import bfloat16, encode
from tests.support.tiny_models import FIXTURES as OF_ROWS
from tests.support.tiny_models import NAMES
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.model.model import Model, open_tensors

PACKINGS = Path(__file__).parents[1] / "fixtures"
OF_IDENTITY = ("llama", "llama4", "shards", "mlx", "meta", "model.gguf")  # containers of one model
SHIFTED = "mlx/shifted"  # stores gains from one on, as no plain file of its model_type does
PACKED = sorted({str(file.parent.relative_to(PACKINGS)) for file in PACKINGS.glob("*/*/config.json")} - {SHIFTED})
WIDE = tuple(f"wide/{name}" for name in wide.NAMES)
SOURCES = (
    *NAMES,
    *WIDE,
    *(name for name in PACKED if not name.startswith("identity/")),
    *(f"identity/{name}" for name in OF_IDENTITY),
)
OWN = re.compile(r"^(model|transformer|bert|roberta|electra|distilbert|gpt_neox|deberta|mpnet|esm)\.")
SETTINGS = ("quantization_config", "quantization")
Arrays = Mapping[str, np.ndarray]


class Original(NamedTuple):
    """A checkpoint: the values of its tensors by name; `stored` is a file or folder that holds them otherwise."""

    config: Mapping[str, Any]
    tensors: Arrays
    stored: Path | None = None
    dtypes: tuple[str, ...] = ("F32", "BF16", "F64")  # that hold every value


class Writing(NamedTuple):
    """A way of writing tensors. `order` seeds the order of tensors; `prefix` "bare" leaves the model's own out."""

    dtype: str = "F32"
    shards: int = 1
    order: int = 0
    prefix: str = ""


PLAIN = Writing()


@lru_cache(None)
def original(source: str) -> Original:
    """A fixture of tests/model/rows, its floats rounded to bfloat16; or the values of a packed one."""
    if source in NAMES:
        tensors = load_file(OF_ROWS / source / "model.safetensors")
        return Original(_config(OF_ROWS / source), {name: rounded(w) for name, w in tensors.items()})
    if source in WIDE:
        return Original(*wide.as_file(wide.wide(source.removeprefix("wide/"))), dtypes=("F32", "F64"))
    stored = PACKINGS / source
    plain = PACKINGS / "identity" / "llama" if source.startswith("identity/") else stored
    tensors = {name: np.array(tensor.read(), np.float32) for name, tensor in open_checkpoint(plain).items()}
    return Original(_config(plain), tensors, stored, ("F32", "F64"))


def _config(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return {key: value for key, value in config.items() if key not in SETTINGS}


def rounded(w: np.ndarray) -> np.ndarray:
    """Floats that bfloat16 holds, rounded towards zero, as float32; integers as they are."""
    if w.dtype.kind != "f":
        return w
    return (np.ascontiguousarray(w, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


@lru_cache(None)
def roles(source: str) -> dict[tuple[str | None, int | None], dict[str, str]]:
    """Names of tensors by role, for each stack and layer."""
    sound = original(source)
    plain = PACKINGS / "identity" / "llama" if source.startswith("identity/") else sound.stored
    found: dict[tuple[str | None, int | None], dict[str, str]] = {}
    with TemporaryDirectory() as folder:
        for tensor in open_tensors(plain or write(Path(folder) / "a", sound.config, sound.tensors)).tensors:
            found.setdefault((tensor.stack, tensor.layer), {})[tensor.role] = tensor.name
    return found


@lru_cache(None)
def between(source: str, index: int) -> bool:
    """True if a layer has steps of attention without tensors that a factor of its projections moves."""
    sound = original(source)
    with TemporaryDirectory() as folder:
        model = open_tensors(sound.stored or write(Path(folder) / "a", sound.config, sound.tensors))
        if not isinstance(model, Model) or index not in model.attention_layers:
            return False
        layer = model.layer(index)
        steps = (layer.clip, layer.v_norm, layer.gathered_norm, model.family.scores.qk_norm)
        return any(step is not None for step in steps)


def write(folder: Path, config: Mapping[str, Any], tensors: Arrays, writing: Writing = PLAIN) -> Path:
    """Write config.json and the tensors, in one file or several with their index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    if writing.order:
        random.Random(writing.order).shuffle(names)
    is_bare = writing.prefix == "bare"
    added = "" if is_bare else writing.prefix
    stored = {added + (OWN.sub("", name) if is_bare else name): _stored(tensors[name], writing.dtype) for name in names}
    if writing.shards == 1:
        (folder / "model.safetensors").write_bytes(encode(stored))
        return folder
    files = {name: f"model-{1 + i % writing.shards}.safetensors" for i, name in enumerate(stored)}
    for file in {*files.values()}:
        (folder / file).write_bytes(encode({name: w for name, w in stored.items() if files[name] == file}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def _stored(w: np.ndarray, dtype: str) -> Any:
    w = np.ascontiguousarray(w).reshape(w.shape)
    if w.dtype.kind != "f":
        return "I64", w.shape, w.astype(np.int64).tobytes()
    if dtype == "BF16":
        return bfloat16(w)
    return w.astype({"F32": np.float32, "F64": np.float64}[dtype])
