"""What fuzzing begins with, besides the kept corpus: good files, and the attacks that are small."""

import json
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import weightscope as ws
from tests.fuzz import gguf
from tests.fuzz.checkpoints import INDEX, SEEDS
from tests.fuzz.oss.fuzz_claims import SOUND, WSID
from tests.fuzz.oss.fuzz_headers import SHARD
from tests.fuzz.oss.harness import BETWEEN
from tests.support.prints import sketches_of
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.core.errors import CheckpointError
from weightscope.model.rows.table import FAMILIES
from weightscope.pairs.claims.claim import statement
from weightscope.pairs.identity.identity import read_identity
from weightscope.pairs.lineage.sketches import SKETCH

STANZA = re.compile(r"^(?=\[\w+\]$)", re.M)


def headers() -> Iterable[bytes]:
    """The fuzzer's headers, configs and indexes, each with good ones of the other two, and a tiny GPT-2."""
    index = json.dumps(INDEX).encode().replace(b"model.safetensors", SHARD.encode())
    good, config = _header(SEEDS["model.safetensors"][0]), SEEDS["config.json"][0]
    for name in ("model.safetensors", "bitsandbytes.safetensors"):
        content, attacks = SEEDS[name]
        yield from (BETWEEN.join((_header(each), config)) for each in (content, *attacks))
    yield from (BETWEEN.join((good, each)) for each in SEEDS["config.json"][1])
    yield BETWEEN.join((good, config, index))
    with TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder), gpt2_weights(n_layers=1))
        weights, config = (path / name for name in ("model.safetensors", "config.json"))
        yield BETWEEN.join((_header(weights.read_bytes()), config.read_bytes()))


def ggufs() -> Iterable[bytes]:
    good, attacks = SEEDS["model.gguf"]
    yield from (good, *attacks)
    yield from (gguf.mutant(random.Random(seed)) for seed in range(100))


def rows() -> Iterable[bytes]:
    """Each stanza of the table as a file of its own."""
    for text in FAMILIES.texts.values():
        yield from (stanza.encode() for stanza in STANZA.split(text)[1:])


def claims() -> Iterable[bytes]:
    """A claim of a model about itself, an identity of few tensors, and a fingerprint of one head."""
    yield json.dumps(statement(ws.lineage("embedded", ["embedded"]))).encode()
    identity = json.loads(SOUND.read_text())
    identity["tensors"] = dict([*identity["tensors"].items()][::7])
    with TemporaryDirectory() as folder:
        path = Path(folder, "x.id.json")
        path.write_text(json.dumps(identity))
        try:
            read_identity(path)
        except CheckpointError as error:
            identity["wsid"] = str(error).partition(WSID)[2].partition(",")[0]
        yield json.dumps(identity).encode()
        path = Path(folder, "x.wsf")
        sketches_of(np.random.default_rng(0).standard_normal((1, 1, 2, SKETCH))).save(path)
        yield path.read_bytes()


def _header(content: bytes) -> bytes:
    return content[8 : 8 + int.from_bytes(content[:8], "little")]


SEEDS_OF: dict[str, Callable[[], Iterable[bytes]]] = {
    "headers": headers, "gguf": ggufs, "rows": rows, "claims": claims,
}  # fmt: skip
