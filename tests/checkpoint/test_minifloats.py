"""Every code of every small float, against ml_dtypes."""

import numpy as np
import pytest

from weightscope.checkpoint.packings.fp4 import E2M1, E2M3, E3M2
from weightscope.checkpoint.packings.scaled import decode_fp8
from weightscope.pairs.deeds.rounding import CASTS

ml_dtypes = pytest.importorskip("ml_dtypes")
BYTES = np.arange(256, dtype=np.uint8)
OURS = {
    "float4_e2m1fn": E2M1,
    "float6_e2m3fn": E2M3,
    "float6_e3m2fn": E3M2,
    "float8_e4m3fn": decode_fp8(BYTES, "F8_E4M3"),
    "float8_e5m2": decode_fp8(BYTES, "F8_E5M2"),
    "float8_e4m3fnuz": decode_fp8(BYTES, "F8_E4M3FNUZ"),
    "float8_e5m2fnuz": decode_fp8(BYTES, "F8_E5M2FNUZ"),
    "float8_e8m0fnu": decode_fp8(BYTES, "F8_E8M0"),
}


@pytest.mark.parametrize("name", OURS)
def test_every_code_has_the_value_of_ml_dtypes(name: str) -> None:
    values = OURS[name]
    expected = BYTES[: len(values)].view(getattr(ml_dtypes, name)).astype(np.float32)
    np.testing.assert_array_equal(values, expected)
    is_number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(values[is_number]), np.signbit(expected[is_number]))


@pytest.mark.parametrize(("cast", "name"), [("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2")])
def test_rounding_to_fp8_is_that_of_ml_dtypes(cast: str, name: str) -> None:
    """Between the largest numbers; ours clips beyond them."""
    kind = getattr(ml_dtypes, name)
    largest = float(ml_dtypes.finfo(kind).max)
    x = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    x = np.clip(np.ldexp(x, np.arange(-20, 12).repeat(2048)), -largest, largest)
    ties = (np.sort(x)[1:] + np.sort(x)[:-1]) / 2
    for values in (x, ties.astype(np.float32)):
        np.testing.assert_array_equal(CASTS[cast](values), values.astype(kind).astype(np.float32))
