"""FP8 or INT8 values times scales: DeepSeek, transformers, FBGEMM, compressed-tensors, ModelOpt."""

from collections.abc import Mapping
from functools import cache
from math import prod
from typing import Any

import numpy as np

from weightscope.checkpoint.checkpoint import StoredTensor
from weightscope.checkpoint.config import Config
from weightscope.checkpoint.packings.packed import FLOATS, DequantisedTensor, stated_weights

FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


def find(
    tensor: StoredTensor, stored: Mapping[str, StoredTensor], settings: Config
) -> DequantisedTensor | None:
    """The weight of this tensor, if it is FP8 and has a scale."""
    if tensor.dtype in FP8:
        for end in ("_scale_inv", "_scale"):
            if tensor.name + end in stored:
                by_key = {"weight": tensor, "scale": stored[tensor.name + end]}
                if f"{tensor.name}_zero_point" in stored:
                    by_key["zero_point"] = stored[f"{tensor.name}_zero_point"]
                return ScaledTensor(tensor.name, by_key, settings)
    return None


def minifloats(exponents: int, fractions: int) -> np.ndarray:
    """All codes of a sign, an exponent and a fraction, none of them special -> (2^bits,) float32.

    (-1)^s 2^(e - bias) (1 + f), 2^(1 - bias) f where e is 0; bias 2^(exponents - 1) - 1.

    Examples
    --------
    >>> minifloats(2, 1)[:8].tolist()
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    """
    codes, steps = np.arange(1 << exponents + fractions), 1 << fractions
    exponent, fraction = codes // steps, codes % steps
    bias = (1 << exponents - 1) - 1
    steps_up = fraction + steps * (exponent > 0)
    sizes = np.ldexp(steps_up.astype(np.float32), np.maximum(exponent, 1) - bias - fractions)
    return np.concatenate([sizes, -sizes])


@cache
def _values(dtype: str) -> np.ndarray:
    """Values of all 256 bytes; FNUZ has a bias larger by one, and NaN in place of minus zero."""
    if dtype == "F8_E5M2":  # the upper byte of a float16
        return (np.arange(256) << 8).astype("<u2").view("<f2").astype(np.float32)
    if dtype == "F8_E8M0":  # powers of two, bias 127
        return np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
    values = minifloats(4, 3) if dtype.startswith("F8_E4M3") else minifloats(5, 2)
    if dtype.endswith("FNUZ"):
        values /= 2
        values[0x80] = np.nan
    else:
        values[[0x7F, 0xFF]] = np.nan  # OCP's E4M3 has no infinity
    return values


def decode_fp8(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Bytes of FP8 or of F8_E8M0 as float32, by a table of all 256."""
    return _values(dtype)[raw]


def decode_exponents(raw: np.ndarray) -> np.ndarray:
    """Bytes of MX scales, powers of two, as float32."""
    return decode_fp8(raw, "F8_E8M0")


def by_blocks(
    w: np.ndarray, scale: np.ndarray, block: tuple[int, int], zero: np.ndarray | None = None
) -> np.ndarray:
    """(W[i, j] - zero[b]) * scale[b] in place, w (out, in); b = i // block[0], j // block[1]."""
    for index, row in enumerate(scale):
        rows = w[index * block[0] : (index + 1) * block[0]]
        if zero is not None:
            rows -= np.repeat(zero[index], block[1])[: w.shape[1]]
        rows *= np.repeat(row, block[1])[: w.shape[1]]
    return w


# Bytes of the least and the largest finite number.
EXTREMES = {
    "F8_E4M3": (0xFE, 0x7E),
    "F8_E5M2": (0xFB, 0x7B),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), (0xFF, 0x7F)),
}


def fp8_grid(kind: str = "F8_E4M3") -> tuple[int, int, tuple[float, ...]]:
    """The bytes of its least and its largest number, and all numbers in order."""
    values = decode_fp8(np.arange(256, dtype=np.uint8), kind)
    return *EXTREMES[kind], tuple(np.unique(values[np.isfinite(values)]).tolist())


class ScaledTensor(DequantisedTensor):
    """FP8 or INT8 times a scale: one for all, per row, per group of a row, or per block."""

    @property
    def dtype(self) -> str:
        return f"{self.by_key['weight'].dtype} x scale"

    def codes(self) -> tuple[int, int, int | tuple[float, ...]] | None:
        kind = self.by_key["weight"].dtype
        if kind == "I8":
            return 0x80, 0x7F, 256
        return fp8_grid(kind) if kind in EXTREMES else None

    def check(self) -> None:
        weight, scale = self.by_key["weight"], self.by_key["scale"]
        stated = [str(weights.get("scale_dtype")) for weights in stated_weights(self.settings)]
        is_mx = self.settings.get("scale_fmt") == "ue8m0" or any("uint8" in text for text in stated)
        exponents = ("F8_E8M0", "U8") if is_mx else ("F8_E8M0",)
        if scale.dtype not in (*FLOATS, *exponents):
            raise self.refuse(f"has a scale of dtype {scale.dtype}")
        zero = self.by_key.get("zero_point")
        if zero is not None and zero.dtype not in (weight.dtype, *FLOATS):
            problem = f"has a zero_point of dtype {zero.dtype}"
            raise self.refuse(f"{problem}; {self.dtype} needs {weight.dtype}")
        if zero is not None and prod(zero.shape) != prod(scale.shape):
            self.misshapen()
        self.block()

    def grid(self) -> tuple[int, int]:
        """Number of scales along the rows and the columns."""
        scale = self.by_key["scale"].shape
        if len(scale) == 4 and scale[1] == scale[3] == 1:  # as ModelOpt keeps blocks
            scale = scale[::2]
        if len(scale) not in {1, 2}:
            self.misshapen()
        return scale[0], scale[1] if len(scale) == 2 else 1

    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale: as config.json says, or as a lone scale per row.

        Scales in blocks do not tell their blocks' size: 2 x 4 of them fit a weight (24, 64) in
        blocks of 12 x 16 and of 16 x 16.
        """
        weight, scale = self.by_key["weight"], self.by_key["scale"]
        if prod(scale.shape) == 1:
            return max(1, weight.shape[0] if weight.shape else 1), max(1, prod(weight.shape[1:]))
        if len(weight.shape) != 2 or 0 in (*weight.shape, *scale.shape):
            self.misshapen()
        grid = self.grid()
        if all(n in (1, size) for size, n in zip(weight.shape, grid, strict=True)):
            return weight.shape[0] // grid[0], weight.shape[1] // grid[1]
        shape = f"{weight.shape[0]} x {weight.shape[1]}"
        counts = f"has {grid[0]} x {grid[1]} scales for a weight of {shape}"
        blocks = self._stated_blocks()
        for block in blocks:
            is_pair = isinstance(block, list) and len(block) == 2
            if not is_pair or not all(type(n) is int and n > 0 for n in block):
                raise self.refuse(f"is in blocks of {str(block)[:40]}, says config.json")
        needed = [(-(-weight.shape[0] // rows), -(-weight.shape[1] // n)) for rows, n in blocks]
        fitting = [block for block, count in zip(blocks, needed, strict=True) if count == grid]
        if len(blocks) == 1 and not fitting:
            stated = f"config.json says blocks of {blocks[0][0]} x {blocks[0][1]}"
            raise self.refuse(f"{counts}; {stated}, which need {needed[0][0]} x {needed[0][1]}")
        if len(fitting) != 1:
            problem = f"{counts}, and config.json does not give the block size"
            advice = "quantization_config needs weight_block_size, as its quantiser was given"
            raise self.refuse(f"{problem}: {advice}")
        return min(fitting[0][0], weight.shape[0]), min(fitting[0][1], weight.shape[1])

    def _stated_blocks(self) -> list[Any]:
        """The block sizes in config.json, each once, under the names of compressed-tensors too."""
        if (stated := self.settings.get("weight_block_size")) is not None:
            return [stated]
        blocks: list[Any] = []
        for weights in stated_weights(self.settings):
            block = weights.get("block_structure")
            if block is None and weights.get("group_size") is not None:
                block = [1, weights["group_size"]]
            if block is not None and block not in blocks:
                blocks.append(block)
        return blocks

    def dequantise(self) -> np.ndarray:
        weight, scale, zero = (self.by_key.get(key) for key in ("weight", "scale", "zero_point"))
        assert weight is not None and scale is not None
        w = _numbers(weight).reshape(self.shape)
        s = decode_exponents(scale.raw()) if scale.dtype in ("F8_E8M0", "U8") else scale.read()
        z = None if zero is None else _numbers(zero)
        if s.size == 1:
            return (w if z is None else w - z.reshape(())) * s.reshape(())
        grid = self.grid()
        return by_blocks(w, s.reshape(grid), self.block(), None if z is None else z.reshape(grid))


def _numbers(part: StoredTensor) -> np.ndarray:
    """FP8, INT8 or floating-point numbers as float32."""
    if part.dtype in FP8:
        return decode_fp8(part.raw(), part.dtype)
    return part.raw().view(np.int8).astype(np.float32) if part.dtype == "I8" else part.read()
