"""Quantised numbers as float32: one function a format, arrays in and arrays out.

W is always returned as it was before it was quantised, (out, in) as a Linear stores it, though GPTQ and AWQ keep it
transposed.
"""

from collections.abc import Callable

import numpy as np

CHUNK = 1024  # rows that are unpacked at a time, so that nothing but the result is of the result's size

# How AWQ's kernels want the eight columns of a word: nibble i holds column AWQ_ORDER[i] (AutoAWQ, packing_utils.py).
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


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
    """W[i, j] * scale[i // block[0], j // block[1]], in place.

    Parameters
    ----------
    w : float32 array of shape (out, in)
    scale : array of shape (ceil(out / block[0]), ceil(in / block[1]))
    block : (int, int)
    """
    for index, row in enumerate(scale):
        w[index * block[0] : (index + 1) * block[0]] *= np.repeat(row, block[1])[: w.shape[1]]
    return w


def unpack_columns(packed: np.ndarray, bits: int) -> np.ndarray:
    """Words that each hold 32 / bits neighbours of a row, the first in the lowest bits.

    Parameters
    ----------
    packed : uint32 array of shape (rows, words)

    Returns
    -------
    uint8 array of shape (rows, words * 32 / bits)
    """
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (packed[:, :, None] >> shifts & (2**bits - 1)).astype(np.uint8).reshape(len(packed), -1)


def gptq(
    qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, groups: np.ndarray, bits: int, zero_offset: int
) -> np.ndarray:
    """GPTQ: scale[g(k)] * (q[k] - zero[g(k)]), the words of q running along k (AutoGPTQ, qlinear_cuda_old.py).

    Parameters
    ----------
    qweight : uint32 array of shape (in * bits / 32, out)
    qzeros : uint32 array of shape (n_groups, out * bits / 32)
    scales : float32 array of shape (n_groups, out)
    groups : int array of shape (in,)
        g(k), the group of each input.
    bits : int
        2, 4 or 8.
    zero_offset : int
        1 where zeros are stored less one (the format called "gptq"), 0 where they are not ("gptq_v2").

    Returns
    -------
    float32 array of shape (out, in)
    """
    zeros = (unpack_columns(qzeros, bits) + np.uint8(zero_offset) & np.uint8(2**bits - 1)).astype(np.float32)
    w = np.empty((len(groups), scales.shape[1]), np.float32)  # (in, out)
    per_word = 32 // bits
    for start in range(0, len(qweight), CHUNK // per_word):
        words = qweight[start : start + CHUNK // per_word]
        rows = slice(start * per_word, (start + len(words)) * per_word)
        q = unpack_columns(np.ascontiguousarray(words.T), bits).T  # (rows, out)
        w[rows] = scales[groups[rows]] * (q - zeros[groups[rows]])
    return w.T


def awq(qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """AWQ, "gemm": scale[g(k)] * (q[k] - zero[g(k)]), four bits, the words of q running along the outputs.

    Parameters
    ----------
    qweight : uint32 array of shape (in, out / 8)
    qzeros : uint32 array of shape (n_groups, out / 8)
    scales : float32 array of shape (n_groups, out)

    Returns
    -------
    float32 array of shape (out, in)
    """
    in_order = np.argsort(AWQ_ORDER)

    def unpack(packed: np.ndarray) -> np.ndarray:
        return unpack_columns(packed, 4).reshape(len(packed), -1, 8)[:, :, in_order].reshape(len(packed), -1)

    zeros = unpack(qzeros).astype(np.float32)
    size = len(qweight) // len(scales)
    w = np.empty((len(qweight), scales.shape[1]), np.float32)  # (in, out)
    for group in range(len(scales)):
        rows = slice(group * size, (group + 1) * size)
        w[rows] = scales[group] * (unpack(qweight[rows]) - zeros[group])
    return w.T


def blockwise(codes: np.ndarray, table: np.ndarray, absmax: np.ndarray, block: int) -> np.ndarray:
    """bitsandbytes: table[code] * absmax of its block, blocks running through the flattened tensor.

    Parameters
    ----------
    codes : uint8 array of shape (n,)
    table : float32 array of shape (16,) or (256,)
    absmax : float32 array of shape (ceil(n / block),)
    block : int

    Returns
    -------
    float32 array of shape (n,)
    """
    values = table[codes]
    whole = len(values) // block * block
    values[:whole].reshape(whole // block, block)[:] *= absmax[: whole // block, None]
    values[whole:] *= absmax[-1:]  # of the last block, where it is not whole; the block may be larger than all
    return values


def high_nibble_first(packed: np.ndarray) -> np.ndarray:
    """Two four-bit codes a byte, as bitsandbytes keeps them; (n,) -> (2 n,)."""
    return np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)
