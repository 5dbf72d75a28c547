"""Rounding of float32 to 16 bits, to the nearest and ties to even, and equality to the bit."""

import numpy as np


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """The values in float32, rounded to `dtype`: float32, float16 or bfloat16."""
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = values.astype("<f4").view("<u4")
        kept = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
        return kept.view("<f4")
    return values


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    """Equal as bits, or both NaN: what a processor makes of NaN's other bits is its own affair."""
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    numbers = ~np.isnan(a)
    np.testing.assert_array_equal(a[numbers].view(np.uint32), b[numbers].view(np.uint32))
