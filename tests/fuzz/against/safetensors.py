"""Headers that the safetensors library reads too: no other file is accepted, and tensors have the same bytes.

No tensor is packed, so that none of the names has a second meaning.
"""

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize, safe_open

from tests.fuzz.against import READ, Reasons, opened, outcome
from tests.fuzz.checkpoints import repaired
from tests.fuzz.mutate import mutated_bytes, mutated_value
from tests.support.rounding import assert_same_bits
from weightscope.checkpoint.checkpoint import StoredTensor
from weightscope.checkpoint.storage import BITS

STRICTER: Reasons = {
    "appears twice": "a key twice",
    "characters; at most": "a name too long",
    "has a broken entry": "an entry with other keys, or that is a list",
    "sizes was expected": "more axes than NumPy has",
    "more elements than any file holds": "sizes beyond any file, and a zero",
    "leaves a gap": "an empty tensor that lies apart",
    "overlaps the tensor": "an empty tensor within another",
    "__metadata__ is not": "metadata that is null",
    "nests deeper": "nesting",
}
LAXER: Reasons = {}
SIZES = (0, 1, 2, 4, 4, 8, 3)
FLOATS = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
NAMES = ("a", "b", "layers.0.weight", "\x1b", "", "__metadata__", "é", "\U0001f600", "c", "d", "dtype", "shape")
METADATA: tuple[Any, ...] = ({"format": "pt"}, {}, None, [], "x", {"a": 1}, {"a": None}, {"a": "\ud800"}, {"": ""})
# The same JSON in another spelling, or JSON that only some parsers take.
SPELLINGS = (
    ('"dtype"', '"\\u0064type"'), (": ", "\t:\r\n"), (", ", ","), ("[0, ", "[-0, "), ("[0, ", "[0.0, "),
    ("[0, ", "[0e0, "), ("[0, ", "[00, "), ("[0, ", "[+0, "), ("[0, ", "[false, "), ("[", "[ "), ("]", ",]"),
    ("]", "]]"), ('{"dtype"', '{"dtype": null, "more"'),
    ('{"dtype"', '{"dtype": "F32", "dtype"'), ('{"dtype"', '{"more": 1, "dtype"'),
    ('"shape"', '"shape": [], "shape"'), ('"data_offsets"', '"data_offsets": [0, 0], "data_offsets"'),
    ("}}", "}, }"), ("}}", "}}  "), ("}}", "}}\0"), ("}}", "}}\f"), ("}}", "}} {}"), ("}}", "}}//"), ("{", " {"),
    ("{", "\ufeff{"), ('"F32"', '"f32"'), ('"F32"', '"F32 "'), ('"', "'"), ("/", "\\/"), ("1", "1e0"), ("1", "1.0"),
    ("8", "NaN"), ("[", "[NaN, "), ("4", "4_0"), ("]", ", 18446744073709551615]"), ("]", ", 9007199254740993]"),
    ('"a"', '"\\ud83d\\ude00"'), ('"a"', '"\\ud83d"'), ('"a"', '"\\u0000"'), ('"a"', '"a\x01"'), ('"a"', '"b"'),
    ('"b"', '"\\u0062"'), ('"b"', '"a\\u0300"'),
)  # fmt: skip


def mutant(rng: random.Random) -> bytes:
    """Tensors of any dtype, written in one of the ways that JSON allows, most often with something wrong."""
    names = rng.sample(NAMES[:-2], rng.randrange(1, 5)) + ["n" * 1001] * (rng.random() < 0.02)
    drawn = {name: {"dtype": rng.choice([*BITS]), "shape": rng.choices(SIZES, k=rng.randrange(4))} for name in names}
    header, body = repaired(drawn, rng)
    if rng.random() < 0.3:
        header = dict(rng.sample([*header.items()], len(header)))
    if rng.random() < 0.3:
        header["__metadata__"] = rng.choice(METADATA)
    for _ in range(rng.choice((0, 0, 0, 0, 0, 1, 2))):
        header = mutated_value(header, rng, NAMES)
    text = json.dumps(header, ensure_ascii=rng.random() < 0.5)
    for find, put in rng.sample(SPELLINGS, rng.choice((0, 0, 0, 1, 1, 2))):
        place = rng.choice([at for at in range(len(text)) if text.startswith(find, at)] or [len(text)])
        text = text[:place] + put + text[place + len(find) :]
    encoded = text.encode(errors="surrogatepass")
    content = struct.pack("<Q", len(encoded)) + encoded + body
    return mutated_bytes(content, rng, content) if rng.random() < 0.2 else content


def meet(folder: Path, content: bytes) -> str:
    """Open it with both, and compare every tensor: names, dtypes, shapes, bytes and values."""
    path = folder / "model.safetensors"
    (checkpoint, ours), theirs = opened(path, content), READ
    try:
        with safe_open(path, "np") as library:
            names = set(library.keys())
    except SafetensorError as error:
        theirs = f"safetensors: {error}"
    if checkpoint is not None and theirs == READ:
        stored = dict(deserialize(content))
        assert names == {*stored} == {*checkpoint}
        for name, entry in stored.items():
            tensor = checkpoint[name]
            assert isinstance(tensor, StoredTensor)
            assert (tensor.dtype, tensor.shape) == (entry["dtype"], tuple(entry["shape"]))
            raw = tensor.file.bytes_of(tensor.entry, 0, tensor.nbytes)
            assert raw.tobytes() == bytes(entry["data"]), name
            if (expected := _values(entry)) is not None:
                assert_same_bits(tensor.unchecked(set()).read(), expected)
    return outcome(ours, theirs, STRICTER, LAXER)


def _values(entry: dict[str, Any]) -> np.ndarray | None:
    """A tensor of floats as float32; None for other dtypes."""
    kind, content = entry["dtype"], bytes(entry["data"])
    if kind == "BF16":
        values = (np.frombuffer(content, "<u2").astype("<u4") << 16).view("<f4")
    elif kind in FLOATS:
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.frombuffer(content, FLOATS[kind]).astype("<f4")
    else:
        return None
    return values.reshape(entry["shape"])
