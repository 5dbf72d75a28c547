"""GGUF files that the reader of the gguf package reads too: the same keys, tensors and weights of every type.

Its reader trusts counts and lengths, so that it may run for ever, which counts as a refusal.
"""

import random
import signal
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES

from tests.attacks import attacks
from tests.fuzz.against import READ, Reasons, opened, outcome
from tests.fuzz.gguf import COMMON, OWN, WORDS, drawn_value
from tests.fuzz.mutate import mutated_bytes
from tests.support.rounding import assert_same_bits
from weightscope.checkpoint.checkpoint import StoredTensor
from weightscope.checkpoint.gguf import STRING

STRICTER: Reasons = {
    "cut short": "a count, a text or a tensor beyond the end",
    "not UTF-8": "text that is not UTF-8",
    "list of type 9": "a list of lists",
    "versions 2 and 3": "a big-endian file",
    "dimensions": "more than four axes",
    "more elements than any file holds": "sizes whose product wraps",
    "overlaps the tensor before it": "two tensors in one place",
    "characters; at most": "a name too long",
    "has alignment": "an alignment beyond a megabyte",
}
LAXER: Reasons = {
    "Duplicate GGUF.": "a key of a name that the reader has for itself",
    "tuple index out of range": "a scalar in BF16",
}
SECONDS = 0.2
KINDS = [kind for kind in GGML_QUANT_SIZES if kind.name != "Q8_1"]  # 36 bytes a block in ggml, 40 in the package
OWN_FIELDS = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"}
KEYS = (*COMMON, *(b"llama." + name for name in OWN), b"a", b"GGUF.version", "é".encode())
NAMES = (
    b"token_embd.weight",
    b"blk.0.attn_q.weight",
    b"a",
    b"",
    b"\xff",
    "é".encode(),
    b"blk.0.ffn_up.weight",
    b"output.weight",
)
ALIGNMENT = b"general.alignment"
ALIGNMENTS = (0, 1, 2, 3, 8, 32, 48, 64, 4096, 2**20, 2**21, 2**31)
# Axes before the row, which is a few blocks, and other sizes.
LEADING: tuple[tuple[int, ...], ...] = ((), (3,), (2, 3), (1, 2, 2), (0,))
SIZES: tuple[tuple[int, ...], ...] = ((), (7,), (0,), (33, 2), (32, 1, 1, 1, 2), (2**62, 4), (2**32, 2**32))


def mutant(rng: random.Random) -> bytes:
    """A file of some keys, and of some tensors of any type that lie one after the other; often cut or overwritten."""
    keys = {b"general.architecture": (STRING, attacks.text(b"llama"))}
    for name in rng.sample(KEYS, rng.choice((0, 0, 1, 3))):
        keys[name] = drawn_value(rng)
    step = 32
    if rng.random() < 0.2:
        step = rng.choice(ALIGNMENTS)
        code = rng.choice((4, 4, 4, 5, 10))  # its type in the file
        keys[ALIGNMENT] = code, struct.pack("<Q", step)[: 8 if code == 10 else 4]
    step = min(step, 4096) or 1
    header, body = b"", b""
    names = rng.sample(NAMES, rng.randrange(5)) + [b"y" * 2000] * (rng.random() < 0.02)
    for name in names:
        kind = rng.choice(KINDS)
        per_block, n_bytes = GGML_QUANT_SIZES[kind]
        sizes = (per_block * rng.randrange(1, 4), *rng.choice(LEADING))
        if rng.random() < 0.1:
            sizes = rng.choice(SIZES)
        header += attacks.gguf_tensor(name, sizes, int(kind), len(body) + rng.choice((0,) * 30 + (1, step, 2**62)))
        size = prod(sizes) // per_block * n_bytes
        body += rng.randbytes(size) if size < 2**20 else b""
        body += bytes(-len(body) % step)
    header = b"".join(attacks.key(name, *value) for name, value in keys.items()) + header
    file = attacks.gguf(len(names), len(keys), header)
    file += bytes(-len(file) % step) + body
    return mutated_bytes(file, rng, rng.choice(WORDS[:-1]) + file) if rng.random() < 0.3 else file


def meet(folder: Path, content: bytes) -> str:
    """Open it with both, and compare every key and every tensor: type, shape, place and values."""
    path = folder / "model.gguf"
    (checkpoint, ours), theirs = opened(path, content), READ
    try:
        with at_most(SECONDS), np.errstate(all="ignore"):
            reader = gguf.GGUFReader(path)
    except Exception as error:  # whatever NumPy makes of wrong counts
        theirs = f"{type(error).__name__}: {error}"
    if checkpoint is not None and theirs == READ:
        assert {*checkpoint.config} == {*reader.fields} - OWN_FIELDS, {*checkpoint.config}
        for name, value in checkpoint.config.items():
            if value is not None:  # a list that is read on demand
                assert repr(value) == repr(reader.fields[name].contents()), name
        assert {*checkpoint} == {each.name for each in reader.tensors}, {*checkpoint}
        for each in reader.tensors:
            tensor = checkpoint[each.name]
            assert isinstance(tensor, StoredTensor)
            shape = tuple(reversed(each.shape.tolist()))
            mine = tensor.dtype, tensor.shape, tensor.entry.start, tensor.nbytes
            assert mine == (each.tensor_type.name, shape, each.data_offset, each.n_bytes), (mine, each)
            if (expected := _values(each)) is not None:
                assert_same_bits(tensor.unchecked(set()).read(), expected.reshape(shape))
    return outcome(ours, theirs, STRICTER, LAXER)


def _values(tensor: gguf.ReaderTensor) -> np.ndarray | None:
    """Its weights by the package; None where it has none, or is of a type that it does not dequantise."""
    if not tensor.n_elements:
        return None
    with np.errstate(all="ignore"):
        if tensor.tensor_type.name == "F64":
            return np.asarray(tensor.data, np.float32)
        try:
            return gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            return None


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """End with a TimeoutError what runs longer."""

    def ends(*_: Any) -> None:
        raise TimeoutError(f"runs longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, ends)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
