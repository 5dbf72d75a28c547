"""16-bit weights, converted to float32 only when used: a layer takes 2 bytes per weight, not 4."""

from dataclasses import dataclass
from typing import Any

import numpy as np

# Masks of the exponent's bits, all set in infinity and NaN only.
EXPONENT = {"float16": 0x7C00, "bfloat16": 0x7F80}
CHECKED_AT_ONCE = 1 << 18  # weights checked together, so that temporary arrays stay in the cache


@dataclass(frozen=True, eq=False, repr=False)
class Half:
    """16-bit weights, sliced, reshaped and transposed without a copy; `np.asarray` widens them."""

    stored: np.ndarray  # float16, or the bit patterns of bfloat16 as uint16

    def __repr__(self) -> str:
        return f"Half({self.precision}, {self.shape})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self.precision == "float16":
            widened = self.stored.astype(np.float32)
        else:  # a bfloat16 is the upper half of a float32
            bits = self.stored.astype("<u4")
            bits <<= 16  # in place: a third faster than np.left_shift with a dtype
            widened = bits.view("<f4")
        return widened if dtype is None else widened.astype(dtype, copy=False)

    def __getitem__(self, key: Any) -> "Half":
        return Half(self.stored[key])

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def precision(self) -> str:
        """float16 or bfloat16."""
        return "float16" if self.stored.dtype.kind == "f" else "bfloat16"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def T(self) -> "Half":  # noqa: N802 - as NumPy calls it
        return Half(self.stored.T)

    def reshape(self, *shape: Any) -> "Half":
        return Half(self.stored.reshape(*shape))

    def transpose(self, *axes: int) -> "Half":
        return Half(self.stored.transpose(*axes))

    def is_finite(self) -> bool:
        """True if no weight is NaN or infinite."""
        exponent = EXPONENT[self.precision]
        bits = self.stored.view("<u2").ravel()  # a view if contiguous
        for start in range(0, bits.size, CHECKED_AT_ONCE):
            if (bits[start : start + CHECKED_AT_ONCE] & exponent).max() >= exponent:
                return False
        return True


Weights = np.ndarray | Half
