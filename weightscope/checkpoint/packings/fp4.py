"""FP4 (E2M1) and FP6 (E2M3) values times scales of small blocks: NVFP4 and the MX formats."""

from functools import lru_cache
from math import prod

import numpy as np

from weightscope.checkpoint.packings.packed import DequantisedTensor
from weightscope.checkpoint.packings.scaled import decode_exponents, decode_fp8

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
EIGHTHS = np.arange(8, dtype=np.float32) / 8
E2M3 = np.concatenate([EIGHTHS, 1 + EIGHTHS, (1 + EIGHTHS) * 2, (1 + EIGHTHS) * 4])
MX_BLOCK, NV_BLOCK = 32, 16  # values that share a scale (OCP Microscaling; NVIDIA's NVFP4)
SIGNED = tuple(sorted({*map(float, E2M1), *map(float, -E2M1)}))
FP4_GRID = (0xFF, 0x77, SIGNED)  # bytes of -6 and 6, two in each
ROWS = 4096  # decoded at a time, so that only the result has the result's size


@lru_cache(None)
def _pairs() -> np.ndarray:
    """Both values of every byte, the lower four bits first -> (256, 2)."""
    signed = np.concatenate([E2M1, -E2M1])
    codes = np.arange(256)
    return np.stack([signed[codes & 15], signed[codes >> 4]], axis=1)


def decode_fp4(packed: np.ndarray) -> np.ndarray:
    """Bytes of two E2M1 values as float32: packed (rows, n) -> (rows, 2 n)."""
    return _pairs()[packed].reshape(len(packed), -1)


def decode_fp6(packed: np.ndarray) -> np.ndarray:
    """Three bytes of four E2M3 values, lowest bits first: (rows, 3 n) -> float32 (rows, 4 n)."""
    low, middle, high = (packed[:, i::3].astype(np.uint32) for i in range(3))
    words = low | middle << 8 | high << 16
    codes = words[:, :, None] >> np.array([0, 6, 12, 18], np.uint32) & 63  # (rows, n, 4)
    return np.concatenate([E2M3, -E2M3])[codes].reshape(len(packed), -1)


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
    def shape(self) -> tuple[int, ...]:
        *rows, packed = self.by_key["weight"].shape
        return *rows, packed * 8 // self.bits

    def codes(self) -> tuple[int, int, int | tuple[float, ...]] | None:
        return FP4_GRID if self.bits == 4 else None

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
        decode = decode_fp6 if self.bits == 6 else decode_fp4
        w = np.empty(self.shape, np.float32)
        for start in range(0, len(w), ROWS):
            rows = slice(start, start + ROWS)
            w[rows] = decode(packed[rows])
            blocks = w[rows].reshape(*s[rows].shape, -1)
            blocks *= s[rows][:, :, None]
        return w
