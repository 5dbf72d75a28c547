"""wsid1: one identity for the values of a model, whatever its files (docs/identity.md).

It needs NumPy alone, so that other projects can copy the file under this project's licence.

    >>> pairs = {"layer 0 q": np.eye(2), "tokens": np.ones((3, 2), np.float16)}
    >>> wsid({label: digest([array], array.shape) for label, array in pairs.items()})
    'wsid1:b38ef83a3ee4783bc27829e3299d970cbe65122ec83ed27209213dd82ab56925'
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from hashlib import sha256
from math import prod
from typing import Any, NamedTuple

import numpy as np

VERSION = "wsid1"
KINDS = ("bf16", "f16", "f32", "f64")  # a tensor has the SHA-256 of its values as each
ROUNDINGS = KINDS[:2]
BF16 = np.dtype([("bf16", "<u2")])  # bit patterns of bfloat16, which NumPy lacks
STEP = 1 << 17  # values at a time: what is made of them fits in a core's cache
LARGEST_BIAS = 1 << 18  # values; zeros in more are values as any
ZERO_BIAS = "a bias of zeros"
TIED = "tied: the values of tokens"
DERIVED = "some files store -exp(A_log), rounded"


class Digest(NamedTuple):
    """The values of one tensor.

    `sha256` has the values rounded to bf16 and f16, to nearest even, and as they are; `exact` the
    kinds among these that hold every value, from coarse to fine.
    """

    shape: tuple[int, ...]
    exact: tuple[str, ...]
    sha256: Mapping[str, str]

    @property
    def values(self) -> str:
        """Text that two tensors share if and only if they hold the same values."""
        return f"{_size(self.shape)} {self.exact[0]} {self.sha256[self.exact[0]]}"

    @property
    def line(self) -> str:
        """Everything in a line of the identity but the label."""
        hashes = " ".join(self.sha256[kind] for kind in KINDS if kind in self.sha256)
        return f"{_size(self.shape)} {'+'.join(self.exact)} {hashes}"


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def digest(blocks: Iterable[Any], shape: tuple[int, ...]) -> Digest:
    """The digest of a tensor, from its values in row-major order, in arrays of any size.

    Arrays of bfloat16 are viewed as `BF16`; integers and booleans are numbers.
    """
    hashes: dict[str, Any] = {}
    inexact: set[str] = set()
    for block in blocks:
        flat = np.ravel(block)
        for start in range(0, max(1, flat.size), STEP):
            for kind, bits, is_exact in _rounded(flat[start : start + STEP]):
                hashes.setdefault(kind, sha256()).update(np.ascontiguousarray(bits))
                if not is_exact:
                    inexact.add(kind)
    exact = [kind for kind in hashes if kind not in inexact]
    exact = [kind for kind in exact if kind in ROUNDINGS or kind == exact[0]]
    kept = {*ROUNDINGS, exact[0]}
    texts = {kind: made.hexdigest() for kind, made in hashes.items() if kind in kept}
    return Digest(tuple(shape), tuple(exact), texts)


def _rounded(values: np.ndarray) -> Iterator[tuple[str, np.ndarray, bool]]:
    """Each kind up to the values' own: its name, their bits as that kind, True if none changed."""
    if values.dtype == BF16:
        bits, half, is_exact = _half_of_bf16(values["bf16"])
        yield "bf16", bits, True
        yield "f16", half, is_exact
        return
    wide = values.astype("<f4", copy=False)
    word = _plain(wide.view("<u4"), 0x7F800000, 0x7FC00000)
    is_same = values.dtype in (np.float16, np.float32) or np.array_equal(
        wide.astype("<f8"), values.astype("<f8"), equal_nan=True
    )
    bf16 = word >> 16
    bf16 &= 1
    bf16 += 0x7FFF
    bf16 += word
    bf16 >>= 16
    bf16[bf16 == 0x8000] = 0  # small negative numbers give it
    half, is_exact = _half(word)
    yield "bf16", bf16.astype("<u2"), is_same and not (word & 0xFFFF).any()
    yield "f16", half, is_same and is_exact
    if values.dtype != np.float16:
        yield "f32", word, is_same
    if values.dtype not in (np.float16, np.float32):
        yield "f64", _plain(values.astype("<f8").view("<u8"), 0x7FF << 52, 0xFFF << 51), True


def _plain(bits: np.ndarray, infinity: int, nan: int) -> np.ndarray:
    """Bit patterns with one zero and one NaN."""
    sign = 1 << 8 * bits.itemsize - 1
    size = bits & (sign - 1)
    if size.size and (size.min() == 0 or size.max() > infinity):
        bits = np.where(size > infinity, nan, np.where(size == 0, 0, bits)).astype(bits.dtype)
    return bits


def _half(word: np.ndarray) -> tuple[np.ndarray, bool]:
    """The nearest float16 to float32, as bits, and True if none changed."""
    size = word & 0x7FFFFFFF
    half = size >> 13
    half &= 1
    half += 0xFFF
    half += size
    half >>= 13
    half -= 112 << 10
    half |= word >> 16 & 0x8000
    bits = half.astype("<u2")
    # below float16's normal numbers, or too large for it
    rest = np.flatnonzero(size - np.uint32(0x38800000) >= 0x0EFFF000)
    ends = word[rest].view("<f4")
    with np.errstate(over="ignore"):
        halves = ends.astype("<f2")
    bits[rest] = _plain(halves.view("<u2"), 0x7C00, 0x7E00)
    size[rest] = 0
    is_exact = not (size & 0x1FFF).any()
    return bits, is_exact and np.array_equal(halves.astype("<f4"), ends, equal_nan=True)


@cache
def _halves() -> tuple[np.ndarray, np.ndarray]:
    """The nearest float16 of each bfloat16, as bits, and True where it is another number."""
    bf16 = np.arange(1 << 16, dtype="<u4")
    half, _ = _half(_plain(bf16 << 16, 0x7F800000, 0x7FC00000))
    with np.errstate(invalid="ignore"):
        wide = half.view("<f2").astype("<f4")
    return half, (wide.view("<u4") != bf16 << 16) & (half != 0x7E00)


def _half_of_bf16(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
    """Bits of bfloat16 with one zero and one NaN, and the nearest float16, as of `_half`.

    Normal numbers in the range of float16 only move their bits.
    """
    halves, is_lost = _halves()
    half = bits & 0x7FFF
    rest = np.flatnonzero(half - np.uint16(0x3880) >= 0x0F00)
    half <<= 3
    half -= 112 << 10 & 0xFFFF
    half |= bits & 0x8000
    ends = bits[rest]
    plain = _plain(ends, 0x7F80, 0x7FC0)
    half[rest] = halves[plain]
    if plain is not ends:
        bits = bits.copy()
        bits[rest] = plain
    return bits, half, not is_lost[plain].any()


def wsid(digests: Mapping[str, Digest]) -> str:
    """The identity of a model: `wsid1:` and the SHA-256 of a line for each tensor.

    digests: by label, as docs/identity.md spells it, "layer 3 expert 5 gate" for instance.
    """
    kept = [label for label in digests if not left_out(label, digests)]
    lines = sorted(f"{label} {digests[label].line}\n".encode() for label in kept)
    return f"{VERSION}:{sha256(b''.join(lines)).hexdigest()}"


def left_out(label: str, digests: Mapping[str, Digest]) -> str:
    """Why a tensor is no part of the identity; empty if it is one."""
    mine, stack = digests[label], label.removesuffix("unembedding")
    if label.endswith(".bias") and _is_zero(mine):
        return ZERO_BIAS
    tokens = digests.get(f"{stack}tokens")
    if stack != label and tokens and tokens.values == mine.values:
        return TIED
    return DERIVED if label.endswith(" mixer.A_log") else ""


def _is_zero(tensor: Digest) -> bool:
    """True if all values are zero, which the SHA-256 of as many zeros shows."""
    size = prod(tensor.shape)
    if tensor.exact[0] != KINDS[0] or size > LARGEST_BIAS:
        return False
    return tensor.sha256[KINDS[0]] == sha256(bytes(2 * size)).hexdigest()
