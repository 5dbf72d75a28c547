"""compressed-tensors: integers packed in words, FP4 and FP6 in bytes, INT8 and FP8 as they are."""

from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

from weightscope.checkpoint.checkpoint import StoredTensor
from weightscope.checkpoint.config import LARGEST, Config
from weightscope.checkpoint.packings.fp4 import Fp4Tensor
from weightscope.checkpoint.packings.packed import (
    FLOATS,
    DequantisedTensor,
    parts_of,
    stated_weights,
    unpack_columns,
)
from weightscope.checkpoint.packings.scaled import FP8, ScaledTensor
from weightscope.core.errors import CheckpointError

FORMATS = (
    "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized",
    "mxfp8-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision",
    "dense",
)  # fmt: skip
OFFLINE = ("weight_input", "weight_output")  # transforms that the stored weights have taken in
BITS = range(1, 9)
ROWS = 1024  # unpacked at a time, so that only the result has the result's size
NO_ZEROS = "has no weight_zero_point, and config.json says that it is not symmetric"


def check(settings: Config) -> None:
    """Refuse formats that are not read, and transforms that only a running model applies."""
    groups = settings.inside("config_groups").values()
    of_groups = [group.get("format") for group in groups if isinstance(group, dict)]
    sparse = settings.inside("sparsity_config").get("format") or "dense"
    for layout in (settings.get("format"), *filter(None, of_groups), sparse):
        if layout not in FORMATS:
            problem = f"says compressed-tensors in format '{str(layout)[:40]}', which is not read"
            raise CheckpointError(f"{problem}; read are {', '.join(FORMATS)}", file=settings.file)
    for name, scheme in settings.inside("transform_config").inside("config_groups").items():
        applied = scheme.get("apply") if isinstance(scheme, dict) else None
        places = [each.get("location") for each in applied or () if isinstance(each, dict)]
        if not places or not {*map(str, places)} <= {*OFFLINE}:
            problem = f"says that a running model transforms activations ('{name[:40]}')"
            limit = "only transforms within the weights are read"
            raise CheckpointError(f"{problem}, as rotations do; {limit}", file=settings.file)


def find(
    tensor: StoredTensor, stored: Mapping[str, StoredTensor], settings: Config
) -> DequantisedTensor | None:
    """The weight whose packed or whole values are in this tensor."""
    module, _, last = tensor.name.rpartition(".")
    name = f"{module}.weight"
    keys = ("scale", "global_scale", "zero_point", "shape", "g_idx")
    named = parts_of(name, stored, *keys, joint="_")
    if last == "weight_packed" and tensor.dtype == "U8":
        if "zero_point" in named:
            raise tensor.refuse("has a weight_zero_point; FP4 and FP6 are read without one")
        by_key = {"weight": tensor}
        for key, role in {"scale": "scale", "global_scale": "divisor"}.items():
            if key in named:
                by_key[role] = named[key]
        return Fp4Tensor(name, by_key, settings)
    if last == "weight_packed":
        named.pop("global_scale", None)
        return PackedTensor(name, {"packed": tensor, **named}, settings)
    if last == "weight" and tensor.dtype in ("I8", *FP8):
        if "scale" not in named:
            problem = f"is {tensor.dtype} and has no weight_scale"
            raise tensor.refuse(f"{problem}; compressed-tensors needs one")
        if "g_idx" in named:
            limit = "groups in another order are read of packed integers only"
            raise tensor.refuse(f"has a weight_g_idx; {limit}")
        if tensor.dtype == "I8" and "zero_point" not in named and _has_zeros(_integers(settings)):
            raise tensor.refuse(NO_ZEROS)
        named.pop("global_scale", None)
        return ScaledTensor(name, {"weight": tensor, **named}, settings)
    return None


def _integers(settings: Config) -> list[Mapping[str, Any]]:
    """Settings of integers in config.json."""
    return [weights for weights in stated_weights(settings) if weights.get("type", "int") == "int"]


def _has_zeros(stated: list[Mapping[str, Any]]) -> bool:
    """True if config.json says that all weights have zero points."""
    return bool(stated) and not any(weights.get("symmetric", True) for weights in stated)


class WordLayout(NamedTuple):
    """Places of integers in words."""

    bits: int
    is_dense: bool  # values may cross words; else a word's last bits are left over

    def words(self, count: int) -> int:
        """Words that hold so many values."""
        return -(-count * self.bits // 32) if self.is_dense else -(-count // (32 // self.bits))

    def unpack(self, words: np.ndarray, count: int) -> np.ndarray:
        """The values of rows of words: (rows, words) -> uint8 (rows, count)."""
        if 32 % self.bits == 0:
            return unpack_columns(words, self.bits)[:, :count]
        each, per_word = np.arange(count), 32 // self.bits
        starts = each * self.bits
        if not self.is_dense:
            starts = each // per_word * 32 + each % per_word * self.bits
        word, shift = starts // 32, (starts % 32).astype(np.uint32)
        values = words[:, word] >> shift
        crossing = np.flatnonzero(shift + self.bits > 32)
        values[:, crossing] |= words[:, word[crossing] + 1] << 32 - shift[crossing]
        return (values & (2**self.bits - 1)).astype(np.uint8)


class PackedTensor(DequantisedTensor):
    """Integers of 1 to 8 bits packed along the inputs: scale[g(k)] * (q[k] - zero[g(k)]); zeros
    along the outputs.
    """

    @property
    def dtype(self) -> str:
        bits = {weights["num_bits"] for weights in _integers(self.settings)}
        return (
            f"compressed-tensors int{min(bits)}"
            if len(bits) == 1
            else "compressed-tensors integers"
        )

    def check(self) -> None:
        stated = _integers(self.settings)
        if not stated:
            missing = "config_groups with the number of bits"
            raise self.refuse(f"is packed, and config.json has no {missing}")
        for weights in stated:
            bits = weights.get("num_bits")
            if type(bits) is not int or bits not in BITS:
                raise self.refuse(f"is packed in '{str(bits)[:20]}' bits; 1 to 8 are read")
        outputs, _ = self.part("packed", ("I32",), 2).shape
        scale = self.by_key.get("scale")
        self.part("scale", FLOATS, 1 if scale is not None and len(scale.shape) == 1 else 2)
        rows, *n_groups = self.by_key["scale"].shape
        if rows not in (1, outputs) or not outputs or n_groups == [0]:
            self.misshapen()
        if n_groups not in ([], [1]) if rows == 1 else not n_groups:
            self.misshapen()
        if self.part("shape", ("I64", "I32"), 1).shape != (2,):
            self.misshapen()
        zero = self.by_key.get("zero_point")
        if zero is None and _has_zeros(stated):
            raise self.refuse(NO_ZEROS)
        if zero is not None and zero.dtype not in ("I32", "I8"):
            problem = f"has weight_zero_point of dtype {zero.dtype}"
            raise self.refuse(f"{problem}; {self.dtype} needs I32 or I8")
        if zero is not None and zero.dtype == "I8" and zero.shape != self.by_key["scale"].shape:
            self.misshapen()
        if "g_idx" in self.by_key:
            self.part("g_idx", ("I32", "I64"), 1)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.geometry[0]

    @cached_property
    def geometry(self) -> tuple[tuple[int, int], WordLayout]:
        """Shape, which the format stores as a tensor, and place of integers; read when needed."""
        part = self.by_key["shape"]
        outputs, inputs = map(int, part.raw().view("<i8" if part.dtype == "I64" else "<i4"))
        rows, words = self.by_key["packed"].shape
        if outputs != rows or not 0 < inputs <= LARGEST:
            problem = f"has a weight_shape of {outputs} x {inputs}"
            raise self.refuse(f"{problem}; there are {rows} rows of packed words")
        bits = sorted({weights["num_bits"] for weights in _integers(self.settings)})
        layouts = [WordLayout(each, True) for each in bits]
        layouts += [WordLayout(each, False) for each in bits if 32 % each]
        fitting = [layout for layout in layouts if layout.words(inputs) == words]
        if len(fitting) != 1:
            problem = f"has {words} words for {inputs} values"
            widths = f"of {' or '.join(map(str, bits))} bits each"
            count = "several packings" if fitting else "no packing"
            raise self.refuse(f"{problem}; {widths}, {count} fit")
        self._check_groups(outputs, inputs, fitting[0])
        return (outputs, inputs), fitting[0]

    def _check_groups(self, outputs: int, inputs: int, layout: WordLayout) -> None:
        """Refuse groups, zeros and indices that do not fit the shape or config.json."""
        n_groups = prod(self.by_key["scale"].shape[1:])
        stated = [each for each in _integers(self.settings) if each["num_bits"] == layout.bits]
        sizes = {weights.get("group_size") for weights in stated}
        if inputs % n_groups:
            self.misshapen()
        if n_groups > 1 and inputs // n_groups not in sizes:
            named = " or ".join(sorted({*map(str, sizes)}))[:40]
            problem = f"has groups of {inputs // n_groups} values"
            raise self.refuse(f"{problem}; config.json says groups of {named}")
        zero, packed_zeros = self.by_key.get("zero_point"), (layout.words(outputs), n_groups)
        if zero is not None and zero.dtype == "I32" and zero.shape != packed_zeros:
            self.misshapen()
        if "g_idx" in self.by_key and self.by_key["g_idx"].shape != (inputs,):
            self.misshapen()

    def groups(self) -> np.ndarray:
        """The group of each input."""
        n_groups, inputs = prod(self.by_key["scale"].shape[1:]), self.shape[1]
        in_order = np.arange(inputs) // (inputs // n_groups)
        part = self.by_key.get("g_idx")
        if part is None:
            return in_order
        groups = part.raw().view("<i4" if part.dtype == "I32" else "<i8")
        if (groups == -1).all():  # the writer's mark of an order that was never set
            return in_order
        if not 0 <= groups.min() <= groups.max() < n_groups:
            problem = f"has a g_idx from {groups.min()} to {groups.max()}"
            raise self.refuse(f"{problem}; there are {n_groups} groups")
        if (counts := np.bincount(groups, minlength=n_groups)).min() != counts.max():
            problem = f"has a g_idx with {counts.min()} to {counts.max()} inputs in a group"
            raise self.refuse(f"{problem}; each needs {inputs // n_groups}")
        return groups

    def codes(self) -> tuple[int, int, int]:
        return 0, 0xFF, 1 << self.geometry[1].bits

    def zeros(self, layout: WordLayout) -> np.ndarray:
        """The code of 0, by output and group, or one for all."""
        part, middle = self.by_key.get("zero_point"), np.float32(2 ** (layout.bits - 1))
        if part is None:
            return np.full((1, 1), middle)
        if part.dtype == "I8":
            plain = part.raw().view(np.int8).astype(np.float32) + middle
            return plain.reshape(self.by_key["scale"].shape[0], -1)
        words = np.ascontiguousarray(self.words("zero_point").T)  # (n_groups, words)
        return layout.unpack(words, self.shape[0]).T.astype(np.float32)

    def dequantise(self) -> np.ndarray:
        (outputs, inputs), layout = self.geometry
        scale, zeros, groups = self.by_key["scale"].read(), self.zeros(layout), self.groups()
        scale = scale.reshape(scale.shape[0], -1)
        words = self.words("packed")
        w = np.empty((outputs, inputs), np.float32)
        for start in range(0, outputs, ROWS):
            rows = slice(start, start + ROWS)
            s, z = (part[rows] if len(part) > 1 else part for part in (scale, zeros))  # by group
            s, z = (part[:, groups] if part.shape[1] > 1 else part for part in (s, z))
            np.multiply(layout.unpack(words[rows], inputs) - z, s, out=w[rows])
        return w
