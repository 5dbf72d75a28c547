"""Rounding of float32 to 16 bits, to the nearest and ties to even."""

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
