"""ggml's blocks as float32: the layout of every type in one table, unpacked with NumPy.

A block holds the codes of 32 to 256 weights and their scales. Most types are one line of `LAYOUTS`:
where the codes are, and which function reads the scales. A code means code - offset or, on an
uneven grid, an entry of `levels`:

    weight = scale * (code - offset) - minimum

Codes are stored in planes: n bytes hold the low bits of n weights, the next n bytes of n more, and
so on (`run` is n). The I-quants store vectors of 4 or 8 weights as numbers of entries of a
codebook, with signs; the gguf package has the codebooks. Values equal the gguf package's to the
bit, as each is rounded in the same order there.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import NamedTuple

import numpy as np

from weightscope.checkpoint.packings.scaled import minifloats
from weightscope.core.compute.fast import numba_may_run
from weightscope.core.errors import CheckpointError

# (n, G) scales of the groups of each block, and their minima, to subtract, if they have any
Scales = tuple[np.ndarray, np.ndarray | None]
NUMBA = "weightscope.checkpoint.ggml_numba"
WORTH_NUMBA = 1 << 23  # weights; fewer take NumPy milliseconds, importing numba half a second
AT_ONCE = 1 << 18  # weights unpacked at a time; arrays in between stay in a cache


class Plane(NamedTuple):
    """Bits of every code of a block."""

    start: int  # byte in the block
    bits: int
    run: int  # bytes that hold neighbours in their lowest bits; 1: a byte holds neighbours

    @property
    def in_order(self) -> bool:
        """True if the codes are one after another, several in a byte."""
        return self.run == 1

    def codes(self, blocks: np.ndarray, n: int) -> np.ndarray:
        """The codes, (B, n) as uint8, in order."""
        packed = np.ascontiguousarray(blocks[:, self.start : self.start + n * self.bits // 8])
        if self.bits == 8:
            return packed
        if self.bits == self.run == 1:
            return np.unpackbits(packed, axis=1, bitorder="little")
        per_byte, mask = 8 // self.bits, (1 << self.bits) - 1
        codes = np.empty((len(blocks), n), np.uint8)
        placed = codes.reshape(-1, per_byte, self.run)
        words = packed.reshape(-1).view(np.uint16)  # every plane has an even number of bytes
        for k in range(per_byte):
            shifted = (words >> np.uint16(self.bits * k)) & np.uint16(mask * 0x0101)
            placed[:, k] = shifted.view(np.uint8).reshape(-1, self.run)
        return codes


@dataclass(frozen=True)
class Layout:
    """A type of blocks."""

    weights: int  # in a block
    bytes: int
    low: Plane
    scales: Callable[[np.ndarray], Scales]
    high: Plane | None = None  # the bits above `low`
    offset: int = 0
    levels: tuple[int, ...] = ()

    def unpack(self, blocks: np.ndarray, out: np.ndarray) -> None:
        """Write the weights of blocks (B, bytes) into out (B, weights)."""
        codes = self.low.codes(blocks, self.weights)
        if self.high:
            codes |= self.high.codes(blocks, self.weights) << np.uint8(self.low.bits)
        signed = codes.view(np.int8)
        if self.levels:
            table = np.array(self.levels, np.int8).tobytes().ljust(256, b"\0")
            levels = codes.tobytes().translate(table)
            signed = np.frombuffer(levels, np.int8).reshape(codes.shape)
        elif self.offset:
            signed -= np.int8(self.offset)
        self._scaled(signed, blocks, out)

    def _scaled(self, codes: np.ndarray, blocks: np.ndarray, out: np.ndarray) -> None:
        scale, minimum = self.scales(blocks)
        np.copyto(out, codes)
        groups = out.reshape(len(blocks), scale.shape[1], -1)  # (B, G, weights / G)
        np.multiply(scale[:, :, None], groups, out=groups)
        if minimum is not None:
            np.subtract(groups, minimum[:, :, None], out=groups)


class Ternary(Layout):
    """TQ1_0: five weights a byte, as digits of base 3; the last bytes have four."""

    PARTS = ((0, 32, 5), (32, 16, 5), (48, 4, 4))  # start, bytes, digits

    def unpack(self, blocks: np.ndarray, out: np.ndarray) -> None:
        parts = []
        for start, n, digits in self.PARTS:
            packed = np.ascontiguousarray(blocks[:, start : start + n]).tobytes()
            tables = digits_of_bytes()[:digits]
            codes = [np.frombuffer(packed.translate(table), np.int8) for table in tables]
            part = np.stack([code.reshape(-1, n) for code in codes], axis=1)  # (B, digits, n)
            parts.append(part.reshape(len(blocks), -1))
        self._scaled(np.concatenate(parts, axis=1), blocks, out)


@cache
def digits_of_bytes() -> list[bytes]:
    """The ternary digits of a byte, from the first: tables of byte to -1, 0 or 1 as int8."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    multiples = powers * np.arange(256, dtype=np.uint8)  # modulo 256
    digits = ((multiples.astype(np.uint16) * 3) >> 8).astype(np.int8) - np.int8(1)
    return [row.tobytes() for row in digits]


# Scales


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """A float16 of each block, (B, 1)."""
    return blocks.view(np.float16)[:, start // 2, None].astype(np.float32)


def _words(blocks: np.ndarray, start: int, stop: int, kind: type) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, start:stop]).view(kind)


def one_half(start: int) -> Callable[[np.ndarray], Scales]:
    """One scale for a block."""
    return lambda blocks: (_half(blocks, start), None)


def half_and_minimum(blocks: np.ndarray) -> Scales:
    """One scale and a minimum, which is added."""
    return _half(blocks, 0), -_half(blocks, 2)


def one_single(blocks: np.ndarray) -> Scales:
    """One float32."""
    return _words(blocks, 0, 4, np.float32), None


def nibbles_of_16(blocks: np.ndarray) -> Scales:
    """Q2_K: scale and minimum of each 16 weights, four bits each."""
    packed = blocks[:, :16]
    low, high = (packed & 15).astype(np.float32), (packed >> 4).astype(np.float32)
    return _half(blocks, 80) * low, _half(blocks, 82) * high


def sixes_of_16(blocks: np.ndarray) -> Scales:
    """Q3_K: six bits for each 16 weights, four low ones in 8 bytes and two high ones in 4."""
    low, high = _words(blocks, 96, 104, np.uint64), _words(blocks, 104, 108, np.uint32)
    nibbles = [low & 0x0F0F0F0F0F0F0F0F, (low >> np.uint64(4)) & 0x0F0F0F0F0F0F0F0F]
    pairs = [(high >> np.uint32(2 * k)) & 0x03030303 for k in range(4)]
    below = np.concatenate(nibbles, axis=1)
    above = np.concatenate(pairs, axis=1) << np.uint32(4)
    codes = (below.view(np.uint8) | above.view(np.uint8)).view(np.int8) - np.int8(32)
    return _half(blocks, 108) * codes.astype(np.float32), None


def sixes_of_32(blocks: np.ndarray) -> Scales:
    """Q4_K and Q5_K: scale and minimum of each 32 weights, six bits each."""
    words = _words(blocks, 4, 16, np.uint32)
    a, b, c = words[:, :1], words[:, 1:2], words[:, 2:]
    last_scales = (c & 0x0F0F0F0F) | ((a >> 2) & 0x30303030)
    last_minima = ((c >> np.uint32(4)) & 0x0F0F0F0F) | ((b >> 2) & 0x30303030)
    scale = np.concatenate([a & 0x3F3F3F3F, last_scales], axis=1)
    minimum = np.concatenate([b & 0x3F3F3F3F, last_minima], axis=1)
    d, d_min = _half(blocks, 0), _half(blocks, 2)
    minima = minimum.view(np.uint8).astype(np.float32)
    return d * scale.view(np.uint8).astype(np.float32), d_min * minima


def bytes_of_16(blocks: np.ndarray) -> Scales:
    """Q6_K: a signed byte for each 16 weights."""
    return _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32), None


def sixes_of_uneven(blocks: np.ndarray) -> Scales:
    """IQ4_XS: six bits for each 32 weights, four low ones in 4 bytes and two high ones in 2."""
    low = blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15  # (B, 4, 2)
    high = _words(blocks, 2, 4, np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3  # (B, 8)
    codes = (low.reshape(-1, 8) | high.astype(np.uint8) << 4).view(np.int8) - np.int8(32)
    return _half(blocks, 0) * codes.astype(np.float32), None


def powers_of_two(blocks: np.ndarray) -> Scales:
    """MXFP4: an exponent for each 32 weights, halved since the levels are doubled."""
    e = blocks[:, :1].astype(np.uint32)
    bits = np.where(e < 2, np.uint32(0x00200000) << e, (e - 1) << np.uint32(23))
    return bits.view(np.float32), None


def small_floats(blocks: np.ndarray) -> Scales:
    """NVFP4: a float8 (E4M3, no sign) for each 16 weights, halved since the levels are doubled."""
    return _small_floats()[blocks[:, :4]], None


@cache
def _small_floats() -> np.ndarray:
    values = np.abs(minifloats(4, 3)) / 2
    values[127] = 0  # not a number, and read as 0
    return values


FLOAT4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # E2M1, doubled
UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


# Codebooks


class Vectors(NamedTuple):
    """Blocks of a codebook's type, as they are stored: B blocks of 256 / v vectors."""

    entries: np.ndarray  # (B, 256 / v) in the codebook
    signs: np.ndarray | None  # (B, 32) uint8: a bit for each of eight weights, 1 for a minus
    scale: np.ndarray  # (B, G)


@dataclass(frozen=True)
class Codebook:
    """A type of blocks whose vectors are entries of a codebook of the gguf package."""

    bytes: int
    vectors: Callable[[np.ndarray], Vectors]
    name: str  # type of the codebook in the gguf package
    weights: int = 256
    shifts: tuple[float, ...] = (0.0,)  # added to the entries, which are there once for each

    def entries(self) -> np.ndarray:
        """(entries, v) as float32."""
        return _entries(self.name, self.shifts)

    def unpack(self, blocks: np.ndarray, out: np.ndarray) -> None:
        """Write the weights of blocks (B, bytes) into out (B, 256)."""
        entries, signs, scale = self.vectors(blocks)
        book = self.entries()
        vectors = out.reshape(*entries.shape, book.shape[1])
        np.take(book, entries, axis=0, out=vectors, mode="clip")  # no entry is beyond
        groups = out.reshape(len(blocks), scale.shape[1], -1)
        np.multiply(scale[:, :, None], groups, out=groups)
        if signs is not None:
            eights = out.reshape(len(blocks), 32, 8)
            np.multiply(eights, signs_of_bytes()[signs], out=eights)


@cache
def _entries(name: str, shifts: tuple[float, ...]) -> np.ndarray:
    try:
        import gguf.quants
    except ImportError:
        needed = "the gguf package, which has the codebooks of ggml's I-quants"
        raise CheckpointError(f"needs {needed}: pip install gguf") from None
    kind = getattr(gguf.quants, name)
    kind.init_grid()
    return np.concatenate([kind.grid[0, 0] + np.float32(shift) for shift in shifts])


@cache
def signs_of_bytes() -> np.ndarray:
    """(256, 8): 1 or -1 by the bits of a byte."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return 1 - 2 * bits.astype(np.float32)


def _even_signs(codes: np.ndarray) -> np.ndarray:
    """Seven bits as a byte: the eighth makes the number of minuses even."""
    return _parity()[codes & 127]


@cache
def _parity() -> np.ndarray:
    codes = np.arange(128, dtype=np.uint8)
    return codes | (np.bitwise_count(codes) & 1) << 7


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """(B, n) bytes as (B, 2 n) numbers from 0 to 15."""
    return (packed[:, :, None] >> np.array([0, 4], np.uint8) & 15).reshape(len(packed), -1)


def _above(packed: np.ndarray, bits: int) -> np.ndarray:
    """Bits 8 and up of entries, `bits` each, (B, n 8 / bits) as uint16."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = packed[:, :, None] >> shifts & np.uint8((1 << bits) - 1)
    return codes.reshape(len(packed), -1).astype(np.uint16) << np.uint16(8)


def _quarter(d: np.ndarray, codes: np.ndarray) -> np.ndarray:
    return d * (np.float32(0.5) + codes.astype(np.float32)) * np.float32(0.25)


def _four_signs(words: np.ndarray) -> np.ndarray:
    """Seven bits for each eight weights in the low 28 bits of words (B, 8): (B, 32)."""
    shifts = np.array([0, 7, 14, 21], np.uint32)
    return _even_signs((words[:, :, None] >> shifts).reshape(len(words), -1))


def iq2_xxs(blocks: np.ndarray) -> Vectors:
    words = _words(blocks, 2, 66, np.uint32).reshape(-1, 8, 2)
    entries = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    scale = _quarter(_half(blocks, 0), words[:, :, 1] >> np.uint32(28))
    return Vectors(entries, _four_signs(words[:, :, 1]), scale)


def iq2_xs(blocks: np.ndarray) -> Vectors:
    codes = _words(blocks, 2, 66, np.uint16)
    scale = _quarter(_half(blocks, 0), _nibbles(blocks[:, 66:74]))
    return Vectors(codes & 511, _even_signs(codes >> 9), scale)


def iq2_s(blocks: np.ndarray) -> Vectors:
    entries = blocks[:, 2:34] | _above(blocks[:, 66:74], 2)
    scale = _quarter(_half(blocks, 0), _nibbles(blocks[:, 74:82]))
    return Vectors(entries, blocks[:, 34:66], scale)


def iq3_xxs(blocks: np.ndarray) -> Vectors:
    words = _words(blocks, 66, 98, np.uint32)
    codes = (words >> np.uint32(28)).astype(np.float32)
    scale = _half(blocks, 0) * (np.float32(0.5) + codes) * np.float32(0.5)
    return Vectors(blocks[:, 2:66], _four_signs(words), scale)


def iq3_s(blocks: np.ndarray) -> Vectors:
    entries = blocks[:, 2:66] | _above(blocks[:, 66:74], 1)
    scale = _half(blocks, 0) * (1 + 2 * _nibbles(blocks[:, 106:110])).astype(np.float32)
    return Vectors(entries, blocks[:, 74:106], scale)


def iq1_s(blocks: np.ndarray) -> Vectors:
    high = _words(blocks, 34, 50, np.uint16)  # (B, 8)
    threes = high[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7  # (B, 8, 4)
    above = threes << 8 | (high[:, :, None] >> 15) << 11
    scale = _half(blocks, 0) * (2 * (high >> 12 & 7) + 1).astype(np.float32)
    return Vectors(blocks[:, 2:34] | above.reshape(len(blocks), -1), None, scale)


def iq1_m(blocks: np.ndarray) -> Vectors:
    packed = _words(blocks, 48, 56, np.uint16)  # (B, 4); each has a quarter of the float16
    quarters = (packed & 0xF000) >> np.array([12, 8, 4, 0], np.uint16)
    d = np.bitwise_or.reduce(quarters, axis=1, keepdims=True).view(np.float16).astype(np.float32)
    codes = packed[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7  # (B, 4, 4)
    scale = d * (2 * codes + 1).reshape(-1, 16)
    high = _nibbles(blocks[:, 32:48]).astype(np.uint16)
    entries = blocks[:, :32] | (high & 7) << 8 | (high >> 3) << 11
    return Vectors(entries, None, scale.astype(np.float32))


TWO_HALVES = Plane(16, 4, 32)
LAYOUTS: dict[str, Layout | Codebook] = {
    "Q1_0": Layout(128, 18, Plane(2, 1, 1), one_half(0), levels=(-1, 1)),
    "Q2_0": Layout(64, 18, Plane(2, 2, 1), one_half(0), offset=1),
    "Q4_0": Layout(32, 18, Plane(2, 4, 16), one_half(0), offset=8),
    "Q4_1": Layout(32, 20, Plane(4, 4, 16), half_and_minimum),
    "Q5_0": Layout(32, 22, Plane(6, 4, 16), one_half(0), Plane(2, 1, 1), offset=16),
    "Q5_1": Layout(32, 24, Plane(8, 4, 16), half_and_minimum, Plane(4, 1, 1)),
    "Q8_0": Layout(32, 34, Plane(2, 8, 32), one_half(0)),
    "Q8_1": Layout(32, 36, Plane(4, 8, 32), one_half(0)),
    "Q2_K": Layout(256, 84, Plane(16, 2, 32), nibbles_of_16),
    "Q3_K": Layout(256, 110, Plane(32, 2, 32), sixes_of_16, Plane(0, 1, 32), offset=4),
    "Q4_K": Layout(256, 144, TWO_HALVES, sixes_of_32),
    "Q5_K": Layout(256, 176, Plane(48, 4, 32), sixes_of_32, Plane(16, 1, 32)),
    "Q6_K": Layout(256, 210, Plane(0, 4, 64), bytes_of_16, Plane(128, 2, 32), offset=32),
    "Q8_K": Layout(256, 292, Plane(4, 8, 32), one_single),
    "TQ1_0": Ternary(256, 54, Plane(0, 8, 32), one_half(52)),
    "TQ2_0": Layout(256, 66, Plane(0, 2, 32), one_half(64), offset=1),
    "MXFP4": Layout(32, 17, Plane(1, 4, 16), powers_of_two, levels=FLOAT4),
    "NVFP4": Layout(64, 36, Plane(4, 4, 8), small_floats, levels=FLOAT4),
    "IQ4_NL": Layout(32, 18, Plane(2, 4, 16), one_half(0), levels=UNEVEN),
    "IQ4_XS": Layout(256, 136, Plane(8, 4, 16), sixes_of_uneven, levels=UNEVEN),
    "IQ2_XXS": Codebook(66, iq2_xxs, "IQ2_XXS"),
    "IQ2_XS": Codebook(74, iq2_xs, "IQ2_XS"),
    "IQ2_S": Codebook(82, iq2_s, "IQ2_S"),
    "IQ3_XXS": Codebook(98, iq3_xxs, "IQ3_XXS"),
    "IQ3_S": Codebook(110, iq3_s, "IQ3_S"),
    "IQ1_S": Codebook(50, iq1_s, "IQ1_S", shifts=(0.125, -0.125)),
    "IQ1_M": Codebook(56, iq1_m, "IQ1_S", shifts=(0.125, -0.125)),
}


NUMBERS: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0",
}  # fmt: skip
PLAIN = {"F32": 4, "F16": 2, "F64": 8, "BF16": 2, "I8": 1, "I16": 2, "I32": 4, "I64": 8}  # bytes


def size_of(kind: str) -> tuple[int, int]:
    """Weights and bytes of a block."""
    return (1, PLAIN[kind]) if kind in PLAIN else (LAYOUTS[kind].weights, LAYOUTS[kind].bytes)


@cache
def group_of(kind: str) -> int:
    """Neighbours of a block that share a scale."""
    layout = LAYOUTS[kind]
    assert isinstance(layout, Layout)
    return layout.weights // layout.scales(np.zeros((1, layout.bytes), np.uint8))[0].shape[1]


Unpack = Callable[[np.ndarray, np.ndarray], None]  # blocks (B, bytes), out (B, weights)


def unpack_of(layout: Layout | Codebook, fast: bool) -> Unpack:
    """The function that unpacks blocks of a type: with numba if `fast`, else with NumPy."""
    unpack: Unpack = import_module(NUMBA).unpack_of(layout) if fast else layout.unpack
    return unpack


def dequantise(raw: np.ndarray, kind: str, fast: bool | None = None) -> np.ndarray:
    """Bytes of whole blocks as flat float32; `fast`: with numba, by default where it pays."""
    layout = LAYOUTS[kind]
    blocks = np.ascontiguousarray(raw).reshape(-1, layout.bytes)
    out = np.empty((len(blocks), layout.weights), np.float32)
    if fast is None:
        fast = (out.size >= WORTH_NUMBA or NUMBA in sys.modules) and numba_may_run()
    unpack = unpack_of(layout, fast)
    step = AT_ONCE // layout.weights
    with np.errstate(over="ignore", invalid="ignore"):  # hostile scales; the caller checks
        for start in range(0, len(blocks), step):
            unpack(blocks[start : start + step], out[start : start + step])
    return out.reshape(-1)
