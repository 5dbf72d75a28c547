"""Element types of safetensors, and how their bytes become float32."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from weightscope.errors import CheckpointError

# Bits per element of every dtype the format defines (safetensors 0.8).
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip

# The bits of the exponent: all of them are set in an infinity or a NaN, and in nothing else.
_EXPONENT = {"F16": 0x7C00, "BF16": 0x7F80}
_STORED_AS = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "BF16": "<u2"}


def decode(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Little-endian bytes as float32, without a copy where they already are.

    Parameters
    ----------
    raw : uint8 array of shape (n_bytes,)
    dtype : str
        A safetensors dtype: F32, F64, F16 or BF16.

    Returns
    -------
    float32 array of shape (n_elements,)
        A view of `raw` for F32; it is read-only where `raw` is.

    Raises
    ------
    CheckpointError
        The dtype does not hold weights that can be read as they are (integers, quantised floats).
    """
    check_readable(dtype)
    stored = raw.view(_STORED_AS[dtype])
    if dtype in _EXPONENT:
        return np.asarray(Narrow(stored))
    # A float64 past float32's range becomes inf, and whoever reads is told of that as of any NaN.
    with np.errstate(over="ignore", invalid="ignore"):
        return stored.astype(np.float32, copy=False)


@dataclass(frozen=True)
class Narrow:
    """Weights of 16 bits, kept so and seen as float32: a layer of them costs 2 bytes a weight until a head is used.

    It is cut, reshaped and transposed as an array is, without a copy; `np.asarray` makes the float32 array, of what
    has been cut out alone, with the axes in memory in the order they are stored in.

    Attributes
    ----------
    stored : array of any shape
        float16, or the bit patterns of bfloat16 as uint16.
    """

    stored: np.ndarray

    @classmethod
    def of(cls, raw: np.ndarray, dtype: str) -> "Narrow | None":
        """Little-endian bytes of F16 or BF16; None for any other dtype."""
        return cls(raw.view(_STORED_AS[dtype])) if dtype in _EXPONENT else None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self.stored.dtype.kind == "f":
            widened = self.stored.astype(np.float32)
        else:  # bfloat16 is the upper half of a float32
            bits = self.stored.astype("<u4")
            bits <<= 16
            widened = bits.view("<f4")
        return widened if dtype is None else widened.astype(dtype, copy=False)

    def __getitem__(self, key: Any) -> "Narrow":
        return Narrow(self.stored[key])

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def T(self) -> "Narrow":  # noqa: N802 - as NumPy calls it
        return Narrow(self.stored.T)

    def reshape(self, *shape: Any) -> "Narrow":
        return Narrow(self.stored.reshape(*shape))

    def transpose(self, *axes: int) -> "Narrow":
        return Narrow(self.stored.transpose(*axes))

    def is_finite(self) -> bool:
        """Whether no weight is NaN or infinite."""
        exponent = _EXPONENT["F16" if self.stored.dtype.kind == "f" else "BF16"]
        return not ((self.stored.view("<u2") & exponent) == exponent).any()


Weights = np.ndarray | Narrow


def check_readable(dtype: str) -> None:
    """Refuse a dtype that does not hold weights as they are."""
    if dtype not in _STORED_AS:
        known = ", ".join(_STORED_AS)
        raise CheckpointError(f"dtype {dtype} cannot be read as weights; readable are {known}")
