"""GPTQ and AWQ: integers in 32-bit words, stored transposed, with a scale and a zero per group."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from weightscope.checkpoint.checkpoint import StoredTensor
from weightscope.checkpoint.config import Config
from weightscope.checkpoint.packings.packed import (
    FLOATS,
    DequantisedTensor,
    parts_of,
    unpack_columns,
)

GPTQ_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
# Order of the eight columns in a word of AWQ: nibble i holds column AWQ_ORDER[i] (AutoAWQ,
# packing_utils.py).
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
CHUNK = 1024  # rows unpacked at a time, so that only the result has the result's size


def find_gptq(
    tensor: StoredTensor, stored: Mapping[str, StoredTensor], settings: Config
) -> DequantisedTensor | None:
    """The weight of this tensor, if it is a `qweight`."""
    return _found(GptqTensor, tensor, stored, settings)


def find_awq(
    tensor: StoredTensor, stored: Mapping[str, StoredTensor], settings: Config
) -> DequantisedTensor | None:
    """The weight of this tensor, if it is a `qweight`."""
    return _found(AwqTensor, tensor, stored, settings)


def _found(
    kind: type[DequantisedTensor],
    tensor: StoredTensor,
    stored: Mapping[str, StoredTensor],
    settings: Config,
) -> DequantisedTensor | None:
    if not tensor.name.endswith(".qweight"):
        return None
    module = tensor.name.removesuffix(".qweight")
    by_key = {"qweight": tensor, **parts_of(module, stored, "qzeros", "scales", "g_idx")}
    return kind(f"{module}.weight", by_key, settings)


def gptq(
    qweight: np.ndarray,
    qzeros: np.ndarray,
    scales: np.ndarray,
    groups: np.ndarray,
    bits: int,
    zero_offset: int,
) -> np.ndarray:
    """GPTQ: scale[g(k)] * (q[k] - zero[g(k)]), words of q along k -> (out, in).

    qweight (in * bits / 32, out), qzeros (n_groups, out * bits / 32), scales (n_groups, out),
    groups (in,); AutoGPTQ, qlinear_cuda_old.py.
    """
    zero_codes = unpack_columns(qzeros, bits) + np.uint8(zero_offset) & np.uint8(2**bits - 1)
    zeros = zero_codes.astype(np.float32)
    w = np.empty((len(groups), scales.shape[1]), np.float32)  # (in, out)
    per_word = 32 // bits
    for start in range(0, len(qweight), CHUNK // per_word):
        words = qweight[start : start + CHUNK // per_word]
        rows = slice(start * per_word, (start + len(words)) * per_word)
        q = unpack_columns(np.ascontiguousarray(words.T), bits).T  # (rows, out)
        w[rows] = scales[groups[rows]] * (q - zeros[groups[rows]])
    return w.T


def awq(qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """AWQ, "gemm", 4 bits: scale[g(k)] * (q[k] - zero[g(k)]), words of q along out -> (out, in).

    qweight (in, out / 8), qzeros (n_groups, out / 8), scales (n_groups, out).
    """
    in_order = np.argsort(AWQ_ORDER)

    def unpack(packed: np.ndarray) -> np.ndarray:
        codes = unpack_columns(packed, 4)
        return codes.reshape(len(packed), -1, 8)[:, :, in_order].reshape(codes.shape)

    zeros = unpack(qzeros).astype(np.float32)
    size = len(qweight) // len(scales)
    w = np.empty((len(qweight), scales.shape[1]), np.float32)  # (in, out)
    for group in range(len(scales)):
        rows = slice(group * size, (group + 1) * size)
        w[rows] = scales[group] * (unpack(qweight[rows]) - zeros[group])
    return w.T


class GroupedTensor(DequantisedTensor):
    """Integers with a scale and a zero per group of inputs, named by g_idx or in order."""

    def check_groups(self) -> None:
        """Refuse inputs whose groups are not known."""
        inputs, n_groups = self.shape[1], self.by_key["scales"].shape[0]
        if "g_idx" in self.by_key:
            if self.part("g_idx", ("I32",), 1).shape != (inputs,):
                self.misshapen()
        elif not n_groups or -(-inputs // self.group_size) != n_groups:
            stated = str(self.settings.get("group_size"))[:40]
            counts = f"has {n_groups} groups for {inputs} inputs"
            raise self.refuse(f"{counts}, and config.json says {stated} inputs in a group")

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        inputs, size = max(self.shape[1], 1), self.settings.get("group_size")
        if type(size) is not int or not (size == -1 or size > 0):
            problem = f"is in groups of {str(size)[:40]}, says config.json"
            raise self.refuse(f"{problem}; a whole number was expected")
        return size if 0 < size < inputs else inputs

    def groups(self) -> np.ndarray:
        """The group of each input."""
        inputs, n_groups = self.shape[1], self.by_key["scales"].shape[0]
        if "g_idx" not in self.by_key:
            return np.arange(inputs) // self.group_size
        groups = self.by_key["g_idx"].raw().view("<i4")
        if inputs and not 0 <= groups.min() <= groups.max() < n_groups:
            problem = f"has a g_idx from {groups.min()} to {groups.max()}"
            raise self.refuse(f"{problem}; there are {n_groups} groups")
        return groups

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits of a code."""

    def codes(self) -> tuple[int, int, int]:
        return 0, 0xFF, 1 << self.bits


class GptqTensor(GroupedTensor):
    """GPTQ: integers packed along the inputs; a scale and a zero per group of inputs and output."""

    @property
    def bits(self) -> int:
        return self.settings.get("bits", 4)

    @property
    def dtype(self) -> str:
        return f"GPTQ int{self.bits}"

    @property
    def shape(self) -> tuple[int, ...]:
        words, outputs = self.by_key["qweight"].shape
        return outputs, words * 32 // self.bits

    @property
    def format(self) -> Any:
        """checkpoint_format, which files older than the second format leave out."""
        return self.settings.get("checkpoint_format") or self.settings.get("format") or "gptq"

    def check(self) -> None:
        if type(self.bits) is not int or self.bits not in {2, 4, 8}:
            raise self.refuse(f"is GPTQ of '{str(self.bits)[:20]}' bits; read are 2, 4 and 8")
        if not isinstance(self.format, str) or self.format not in GPTQ_ZERO_OFFSETS:
            known = " and ".join(GPTQ_ZERO_OFFSETS)
            raise self.refuse(f"is GPTQ in format '{str(self.format)[:40]}'; read are {known}")
        words = self.part("qweight", ("I32",), 2).shape
        zeros, scales = self.part("qzeros", ("I32",), 2).shape, self.part("scales", FLOATS, 2).shape
        outputs, inputs = self.shape
        n_groups = scales[0]
        if zeros != (n_groups, outputs * self.bits // 32) or scales[1] != outputs:
            self.misshapen()
        if words[1] * self.bits % 32:
            self.misshapen()
        if not 0 < n_groups <= max(inputs, 1):
            self.misshapen()
        if "g_idx" not in self.by_key and self.settings.get("desc_act"):
            problem = "has no g_idx, and config.json says desc_act"
            raise self.refuse(f"{problem}: the groups of its inputs are unknown")
        if inputs or "g_idx" in self.by_key:
            self.check_groups()

    @property
    def group_size(self) -> int:
        """Inputs that share a scale: if a file leaves it out, as many as its scales need."""
        if self.settings.get("group_size") is None:
            return -(-max(self.shape[1], 1) // self.by_key["scales"].shape[0])
        return super().group_size

    def dequantise(self) -> np.ndarray:
        scales = self.by_key["scales"].read()
        zeros, words = self.words("qzeros"), self.words("qweight")
        return gptq(words, zeros, scales, self.groups(), self.bits, GPTQ_ZERO_OFFSETS[self.format])


class AwqTensor(DequantisedTensor):
    """AWQ: integers packed along the outputs in AWQ_ORDER; a scale and a zero per group."""

    dtype = "AWQ int4"  # type: ignore[assignment]

    @property
    def shape(self) -> tuple[int, ...]:
        inputs, words = self.by_key["qweight"].shape
        return words * 8, inputs

    def check(self) -> None:
        bits, version = self.settings.get("bits", 4), self.settings.get("version", "gemm")
        if bits != 4 or str(version).lower() != "gemm":
            problem = f"is AWQ of {str(bits)[:20]} bits in version '{str(version)[:40]}'"
            raise self.refuse(f"{problem}; read is gemm of 4")
        words = self.part("qweight", ("I32",), 2).shape
        zeros = self.part("qzeros", ("I32",), 2).shape
        n_groups, outputs = self.part("scales", FLOATS, 2).shape
        if zeros != (n_groups, words[1]) or outputs != words[1] * 8:
            self.misshapen()
        if not n_groups or words[0] % n_groups:
            self.misshapen()

    def codes(self) -> tuple[int, int, int]:
        return 0, 0xFF, 16

    def dequantise(self) -> np.ndarray:
        return awq(self.words("qweight"), self.words("qzeros"), self.by_key["scales"].read())
