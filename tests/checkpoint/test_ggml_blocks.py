"""ggml's blocks: NumPy's and numba's weights, the gguf package's and ggml's own are the same to the bit."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.rounding import assert_same_bits
from weightscope.checkpoint import ggml_blocks
from weightscope.checkpoint.ggml_blocks import LAYOUTS, NUMBERS, PLAIN, Codebook, dequantise, size_of
from weightscope.core.compute.fast import numba_may_run
from weightscope.core.errors import CheckpointError

WRITTEN = Path(__file__).parent / "fixtures" / "ggml_blocks.npz"  # by the script next to it
KINDS = sorted(LAYOUTS)


def readers() -> list[bool]:
    """Without numba, and with it where it is installed."""
    return [False] + [True] * numba_may_run()


@pytest.fixture(scope="module")
def written() -> dict[str, np.ndarray]:
    with np.load(WRITTEN) as arrays:
        return dict(arrays)


def needs_codebook(kind: str) -> None:
    if isinstance(LAYOUTS[kind], Codebook):
        pytest.importorskip("gguf", reason="the gguf package, which has the codebooks of I-quants, is not installed")


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_ggmls_quantiser_are_read_as_ggml_reads_them(kind: str, written: dict[str, np.ndarray]) -> None:
    needs_codebook(kind)
    theirs = written.get(f"{kind} by ggml")
    assert (theirs is None) == (kind == "Q8_1")  # ggml has no reader for it
    for fast in readers():
        ours = dequantise(written[kind], kind, fast)
        if theirs is not None:
            assert_same_bits(ours, theirs)
        assert np.corrcoef(ours, written["weights"])[0, 1] > (0.9999 if kind == "Q8_1" else 0.5)  # Q1_0: signs alone


@pytest.mark.parametrize("kind", KINDS)
def test_random_blocks_are_read_as_the_gguf_package_reads_them(kind: str) -> None:
    quants = pytest.importorskip("gguf").quants
    number = next(number for number, name in NUMBERS.items() if name == kind)
    try:
        traits = quants._type_traits[quants.GGMLQuantizationType(number)]
    except (ValueError, KeyError):
        pytest.skip(f"this version of the gguf package does not read {kind}")

    @given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 9))
    @settings(max_examples=20, deadline=None)
    def check(seed: int, n: int) -> None:
        raw = np.random.default_rng(seed).integers(0, 256, n * LAYOUTS[kind].bytes, dtype=np.uint8)
        with np.errstate(all="ignore"):
            theirs = traits.dequantize(raw[None])[0]
        for fast in readers():
            assert_same_bits(dequantise(raw, kind, fast), theirs)

    check()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "TQ1_0", "IQ2_S"])
def test_pieces_of_blocks_join_without_a_seam(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_codebook(kind)
    raw = np.random.default_rng(0).integers(0, 256, 23 * LAYOUTS[kind].bytes, dtype=np.uint8)
    expected = dequantise(raw, kind, False)
    monkeypatch.setattr(ggml_blocks, "AT_ONCE", 5 * LAYOUTS[kind].weights)
    for fast in readers():
        assert_same_bits(dequantise(raw, kind, fast), expected)
    assert dequantise(raw[:0], kind, False).shape == (0,)


def test_types_have_the_gguf_packages_numbers_and_sizes() -> None:
    constants = pytest.importorskip("gguf").constants
    for kind in constants.GGMLQuantizationType:
        assert NUMBERS[kind.value] == kind.name
        if kind.name != "Q8_1":  # 40 bytes there; 36 in ggml itself, as the script of the fixture asserts
            assert size_of(kind.name) == constants.GGML_QUANT_SIZES[kind]
    assert {*NUMBERS.values()} == {*LAYOUTS, *PLAIN}


def test_codebooks_without_the_gguf_package_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    ggml_blocks._entries.cache_clear()
    with pytest.raises(CheckpointError, match=r"I-quants: pip install gguf$"):
        dequantise(np.zeros(LAYOUTS["IQ2_XS"].bytes, np.uint8), "IQ2_XS", False)
