"""FP4 (E2M1) and FP6 (E2M3, E3M2) times scales of small blocks: NVFP4 and the MX formats."""

from math import prod

import numpy as np

from weightscope.checkpoint.packings.packed import DequantisedTensor, unpacked
from weightscope.checkpoint.packings.scaled import decode_exponents, decode_fp8, minifloats

E2M1, E2M3, E3M2 = minifloats(2, 1), minifloats(2, 3), minifloats(3, 2)
MX_BLOCK, NV_BLOCK = 32, 16  # values that share a scale (OCP Microscaling; NVIDIA's NVFP4)
# Bytes of the least and of the largest code: two in each, or four in three
ENDS = {4: (0xFF, 0x77), 6: (0xFF, 0x7DF7DF)}
ROWS = 4096  # decoded at a time, so that only the result has the result's size


def grid(values: np.ndarray) -> tuple[int, int, tuple[float, ...]]:
    """The bytes of the ends of these values of all codes, and the values in order."""
    bits = len(values).bit_length() - 1
    return *ENDS[bits], tuple(np.unique(values).tolist())


class Fp4Tensor(DequantisedTensor):
    """NVFP4: code * scale / weight_global_scale, ModelOpt's * weight_scale_2; MX: powers of two."""

    @property
    def is_mx(self) -> bool:
        """True if the scales are exponents."""
        return self.by_key["scale"].dtype in ("U8", "F8_E8M0")

    @property
    def dtype(self) -> str:
        return ("MXFP6" if self.bits == 6 else "MXFP4") if self.is_mx else "NVFP4"

    @property
    def bits(self) -> int:
        """Four, or six if a row has three bytes for each four values of the scales' blocks."""
        packed, scale = self.by_key["weight"].shape[-1:], self.by_key["scale"].shape[-1:]
        return 6 if packed and scale and packed[0] == scale[0] * MX_BLOCK * 6 // 8 else 4

    @property
    def values(self) -> np.ndarray:
        """The value of each code."""
        return E2M3 if self.bits == 6 else E2M1

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, packed = self.by_key["weight"].shape
        return *rows, packed * 8 // self.bits

    def codes(self) -> tuple[int, int, tuple[float, ...]]:
        return grid(self.values)

    def check(self) -> None:
        if "scale" not in self.by_key:
            problem = "is packed in bytes and has no weight_scale"
            raise self.refuse(f"{problem}; NVFP4 and MXFP4 need one")
        self.part("weight", ("U8",), 2)
        scale = self.part("scale", ("U8", "F8_E8M0", "F8_E4M3"), 2)
        outputs, inputs = self.shape
        block = MX_BLOCK if self.is_mx else NV_BLOCK
        if not inputs or inputs % block or scale.shape != (outputs, inputs // block):
            self.misshapen()
        global_scales = [key for key in ("divisor", "factor") if key in self.by_key]
        if not self.is_mx and not global_scales:
            raise self.refuse("has no weight_global_scale or weight_scale_2; NVFP4 needs one")
        for key in global_scales:
            if self.is_mx or self.by_key[key].dtype != "F32" or prod(self.by_key[key].shape) != 1:
                self.misshapen()

    def dequantise(self) -> np.ndarray:
        weight, scale = self.by_key["weight"], self.by_key["scale"]
        s = decode_exponents(scale.raw()) if self.is_mx else decode_fp8(scale.raw(), scale.dtype)
        if "divisor" in self.by_key:
            s = s / self.by_key["divisor"].read().reshape(())
        elif "factor" in self.by_key:
            s = s * self.by_key["factor"].read().reshape(())
        s = s.reshape(scale.shape)
        packed = weight.raw().reshape(weight.shape)
        w = np.empty(self.shape, np.float32)
        for start in range(0, len(w), ROWS):
            rows = slice(start, start + ROWS)
            blocks = w[rows].reshape(*s[rows].shape, -1)
            values = unpacked(packed[rows].reshape(-1), self.values).reshape(blocks.shape)
            np.multiply(values, s[rows][:, :, None], out=blocks)
        return w


class Fp6E3m2Tensor(Fp4Tensor):
    """MXFP6 with three bits of exponent, where config.json says so."""

    @property
    def dtype(self) -> str:
        return "MXFP6 E3M2"

    @property
    def values(self) -> np.ndarray:
        return E3M2
