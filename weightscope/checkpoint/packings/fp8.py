"""FP8 values times scales: of DeepSeek and transformers, FBGEMM, compressed-tensors."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from weightscope.checkpoint.checkpoint import StoredTensor
from weightscope.checkpoint.config import Config
from weightscope.checkpoint.packings.packed import FLOATS, DequantisedTensor

FP8 = ("F8_E4M3", "F8_E5M2")


def find(tensor: StoredTensor, stored: Mapping[str, StoredTensor], settings: Config) -> DequantisedTensor | None:
    """The weight of this tensor, if it is FP8 and has a scale."""
    if tensor.dtype in FP8:
        for end in ("_scale_inv", "_scale"):
            if tensor.name + end in stored:
                return Fp8Tensor(tensor.name, {"weight": tensor, "scale": stored[tensor.name + end]}, settings)
    return None


def _e4m3(bits: np.ndarray) -> np.ndarray:
    """Four bits of exponent, bias 7, three of fraction; no infinities, all ones is NaN (OCP FP8)."""
    exponent, fraction = bits >> 3 & 15, bits & 7
    magnitude = np.where(exponent > 0, np.ldexp(1 + fraction / 8, exponent - 7), np.ldexp(fraction / 8, -6))
    magnitude[(bits & 127) == 127] = np.nan
    return np.where(bits & 128, -magnitude, magnitude)


def _e5m2(bits: np.ndarray) -> np.ndarray:
    """The upper byte of a float16."""
    return (bits << 8).astype("<u2").view("<f2").astype(np.float64)


def _e8m0(bits: np.ndarray) -> np.ndarray:
    """A power of two, bias 127; all ones is NaN."""
    return np.where(bits == 255, np.nan, np.ldexp(1.0, bits - 127))


_TABLES: dict[str, Callable[[np.ndarray], np.ndarray]] = {"F8_E4M3": _e4m3, "F8_E5M2": _e5m2, "F8_E8M0": _e8m0}


def decode_fp8(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Bytes of F8_E4M3, F8_E5M2 or F8_E8M0 as float32, by a table of all 256."""
    with np.errstate(invalid="ignore"):  # NaN is among the values
        table = _TABLES[dtype](np.arange(256, dtype=np.int64)).astype(np.float32)
    return table[raw]


def scale_blocks(w: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """W[i, j] * scale[i // block[0], j // block[1]], in place: w (out, in), block (int, int)."""
    for index, row in enumerate(scale):
        w[index * block[0] : (index + 1) * block[0]] *= np.repeat(row, block[1])[: w.shape[1]]
    return w


class Fp8Tensor(DequantisedTensor):
    """FP8 times a scale: one for all, one per row, or one per block (DeepSeek's weight_scale_inv multiplies too)."""

    @property
    def dtype(self) -> str:
        return f"{self.by_key['weight'].dtype} x scale"

    def check(self) -> None:
        if self.by_key["scale"].dtype not in (*FLOATS, "F8_E8M0"):
            raise self.refuse(f"has a scale of dtype {self.by_key['scale'].dtype}")
        self.block()

    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale: as config.json says, or for one scale in all or one per row the shape.

        Scales in blocks do not tell their blocks' size: 2 x 4 of them fit a weight (24, 64) in blocks of 12 x 16 and of
        16 x 16.
        """
        weight, scale = self.by_key["weight"], self.by_key["scale"]
        if prod(scale.shape) == 1:
            return max(1, weight.shape[0] if weight.shape else 1), max(1, prod(weight.shape[1:]))
        if len(weight.shape) != 2 or len(scale.shape) not in {1, 2} or 0 in (*weight.shape, *scale.shape):
            self.misshapen()
        grid = scale.shape if len(scale.shape) == 2 else (scale.shape[0], 1)
        if all(n in (1, size) for size, n in zip(weight.shape, grid, strict=True)):
            return weight.shape[0] // grid[0], weight.shape[1] // grid[1]
        stated = f"has {grid[0]} x {grid[1]} scales for a weight of {weight.shape[0]} x {weight.shape[1]}"
        given = self._stated_block()
        if given is None:
            problem = f"{stated}, and config.json does not give the block size"
            raise self.refuse(f"{problem}: quantization_config needs weight_block_size, as its quantiser was given")
        if not (isinstance(given, list) and len(given) == 2 and all(type(n) is int and n > 0 for n in given)):
            raise self.refuse(f"is in blocks of {str(given)[:40]}, says config.json")
        needed = tuple(-(-size // side) for size, side in zip(weight.shape, given, strict=True))
        if needed != grid:
            blocks = f"config.json says blocks of {given[0]} x {given[1]}"
            raise self.refuse(f"{stated}; {blocks}, which need {needed[0]} x {needed[1]}")
        return min(given[0], weight.shape[0]), min(given[1], weight.shape[1])

    def _stated_block(self) -> Any:
        """The block size in config.json, under the name of compressed-tensors too; None where groups differ."""
        if (stated := self.settings.get("weight_block_size")) is not None:
            return stated
        groups = self.settings.get("config_groups")
        groups = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
        weights = [group["weights"] for group in groups if isinstance(group.get("weights"), dict)]
        blocks = [settings.get("block_structure") for settings in weights]
        return blocks[0] if blocks and all(block == blocks[0] for block in blocks) else None

    def dequantise(self) -> np.ndarray:
        weight, scale = self.by_key["weight"], self.by_key["scale"]
        w = decode_fp8(weight.raw(), weight.dtype).reshape(self.shape)
        s = decode_fp8(scale.raw(), scale.dtype) if scale.dtype == "F8_E8M0" else scale.read()
        if s.size == 1:
            return w * s.reshape(())
        s = s.reshape(scale.shape if len(scale.shape) == 2 else (-1, 1))
        return scale_blocks(w, s, self.block())
