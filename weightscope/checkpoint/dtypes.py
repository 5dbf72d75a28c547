"""Element types of safetensors, and how their bytes become float32."""

import numpy as np

from weightscope.errors import CheckpointError
from weightscope.half import Half

# Bits per element of every dtype the format defines (safetensors 0.8).
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip

HALVES = ("F16", "BF16")
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
    if dtype in HALVES:
        return np.asarray(Half(stored))
    # A float64 past float32's range becomes inf, and whoever reads is told of that as of any NaN.
    with np.errstate(over="ignore", invalid="ignore"):
        return stored.astype(np.float32, copy=False)


def half(raw: np.ndarray, dtype: str) -> Half | None:
    """Little-endian bytes of F16 or BF16 as they are; None for any other dtype."""
    return Half(raw.view(_STORED_AS[dtype])) if dtype in HALVES else None


def check_readable(dtype: str) -> None:
    """Refuse a dtype that does not hold weights as they are."""
    if dtype not in _STORED_AS:
        known = ", ".join(_STORED_AS)
        raise CheckpointError(f"dtype {dtype} cannot be read as weights; readable are {known}")
