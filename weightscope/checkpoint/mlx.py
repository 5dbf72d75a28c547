"""Weights that MLX quantised: `weight` of packed 32-bit words, `scales`, and `biases` or `global_scale`.

A row is a stream of codes of equal width, lowest bits first; `group_size` codes share a scale. config.json has the
settings under `quantization`: of all modules, and by a module's name of those that differ.

| mode | a weight is | scales |
| --- | --- | --- |
| affine | scale * code + bias, codes from 0 to 2^bits - 1 | as the weights were |
| mxfp4 | scale * E2M1 | E8M0 |
| nvfp4 | scale * E2M1, times global_scale / (448 * 6) where there is one | E4M3 |
| mxfp8 | scale * E4M3 | E8M0 |

Sums and products are those of float32, as mlx.core.dequantize's where its scales are float32.
"""

from collections.abc import Mapping
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from weightscope.checkpoint.checkpoint import StoredTensor, Tensor
from weightscope.checkpoint.config import Config
from weightscope.checkpoint.quantised import FLOATS, DequantisedTensor, decode_fp8
from weightscope.errors import CheckpointError

KEY = "quantization"  # of config.json
PARTS = ("scales", "biases", "global_scale")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
LARGEST_NVFP4 = np.float32(448 * 6)  # the largest scale times the largest value
# Bits of the fields whose codes are looked up together, by bits of a code. A field ends in the byte where it begins or
# in the next. Wider ones were slower: their tables leave the cache.
FIELD = {1: 8, 2: 8, 3: 12, 4: 8, 5: 10, 6: 12, 7: 7, 8: 8}
CHUNK = 1 << 16  # weights unpacked at a time, which stay in the cache while they are scaled


class Mode(NamedTuple):
    """What the bits of a mode may be, how many codes may share a scale, and of which type scales are."""

    bits: tuple[int, ...]
    group_sizes: tuple[int, ...]
    scales: str  # a dtype of bytes; empty for floating-point numbers, with biases


MODES = {
    "affine": Mode((1, 2, 3, 4, 5, 6, 8), (32, 64, 128), ""),
    "mxfp4": Mode((4,), (32,), "F8_E8M0"),
    "nvfp4": Mode((4,), (16,), "F8_E4M3"),
    "mxfp8": Mode((8,), (32,), "F8_E8M0"),
}


class Packing(NamedTuple):
    """How the weights of a module are packed."""

    bits: int
    group_size: int
    mode: str


def unpacked_by_name(stored: Mapping[str, StoredTensor], config: Config) -> dict[str, Tensor]:
    """All tensors by name: packed weights under the names they had before, the rest as stored."""
    packings = _Packings(stored, config)
    tensors: dict[str, Tensor] = dict(stored)
    for name, tensor in stored.items():
        module = name.removesuffix(".weight")
        if module == name or (packing := packings.of(module, tensor)) is None:
            continue
        parts = {key: stored[part] for key in PARTS if (part := f"{module}.{key}") in stored}
        for key in parts:
            tensors.pop(f"{module}.{key}", None)
        tensors[name] = MlxTensor(name, {"weight": tensor, **parts}, {**packing._asdict()})
    return tensors


class _Packings:
    """The packing of every module, as config.json says it."""

    def __init__(self, stored: Mapping[str, StoredTensor], config: Config) -> None:
        text = config.get("text_config")
        levels = (config, text if isinstance(text, dict) else {})
        settings = next((level[KEY] for level in levels if level.get(KEY) is not None), None)
        self.file = config.file
        if not isinstance(settings, dict):
            raise CheckpointError(f"'{KEY}' is {str(settings)[:40]}; an object was expected", file=self.file)
        self.of_all = self._packing(settings, f"'{KEY}'")
        self.by_module = {
            module: self._packing({"mode": "affine", **given}, f"'{KEY}' of {module[:100]}")
            if isinstance(given, dict)
            else given
            for module, given in settings.items()
            if isinstance(given, dict | bool)
        }
        for module, packing in self.by_module.items():
            if isinstance(packing, Packing) and f"{module}.weight" not in stored:
                problem = f"'{KEY}' has settings of {module[:100]}, and no file has {module[:100]}.weight"
                raise CheckpointError(problem, file=self.file)

    def _packing(self, given: Mapping[str, Any], what: str) -> Packing:
        """Checked settings."""
        bits, group_size, name = given.get("bits"), given.get("group_size"), given.get("mode", "affine")
        mode = MODES.get(name) if isinstance(name, str) else None
        if mode is None:
            raise CheckpointError(f"{what} has mode '{str(name)[:40]}'; read are {', '.join(MODES)}", file=self.file)
        for key, value, known in (("bits", bits, mode.bits), ("group_size", group_size, mode.group_sizes)):
            if type(value) is not int or value not in known:
                numbers = ", ".join(map(str, known))
                raise CheckpointError(f"{what} has {key} {str(value)[:40]}; {name} has {numbers}", file=self.file)
        return Packing(bits, group_size, name)  # type: ignore[arg-type]

    def of(self, module: str, weight: StoredTensor) -> Packing | None:
        """The packing of a module's weight; None if that is not packed."""
        given = self.by_module.get(module, weight.dtype == "U32")
        if bool(given) != (weight.dtype == "U32"):
            stated = "quantised" if given else "not quantised"
            raise weight.refuse(f"has dtype {weight.dtype}, and config.json says that it is {stated}")
        return given if isinstance(given, Packing) else self.of_all if given else None


def unpacked(packed: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The value of each code: packed bytes (n_bytes,), values (2^bits,) -> (n_codes,).

    Examples
    --------
    >>> unpacked(np.array([0b10_00_11_01], np.uint8), np.float32([0, 1, 2, 3])).tolist()
    [1.0, 3.0, 0.0, 2.0]
    """
    bits = len(values).bit_length() - 1
    width = FIELD[bits]
    per_field = width // bits
    codes = np.arange(1 << width)[:, None] >> bits * np.arange(per_field) & (1 << bits) - 1
    return values[codes].take(_fields(packed, width), axis=0).reshape(-1)


def _fields(packed: np.ndarray, width: int) -> np.ndarray:
    """Integers of `width` bits, lowest bits first: (n_bytes,) -> (n_bytes * 8 / width,)."""
    if width == 8:
        return packed
    in_bytes = packed.reshape(-1, lcm(8, width) // 8)
    fields = np.empty((len(in_bytes), in_bytes.shape[1] * 8 // width), np.uint16)
    for i in range(fields.shape[1]):
        first, shift = divmod(i * width, 8)
        field = in_bytes[:, min(first + 1, in_bytes.shape[1] - 1)].astype(np.uint16) << 8
        field |= in_bytes[:, first]
        field >>= shift
        fields[:, i] = field & (1 << width) - 1
    return fields.reshape(-1)


def scaled(
    packed: np.ndarray, values: np.ndarray, scales: np.ndarray, biases: np.ndarray | None, size: int
) -> np.ndarray:
    """values[code] * scale + bias: packed bytes (n_bytes,), scales and biases, one for `size` codes -> (n,)."""
    bits = len(values).bit_length() - 1
    w = np.empty((len(scales), size), np.float32)
    step = CHUNK // size
    for start in range(0, len(w), step):
        groups, group_bytes = slice(start, start + step), size * bits // 8
        codes = packed[groups.start * group_bytes : groups.stop * group_bytes]
        np.multiply(unpacked(codes, values).reshape(-1, size), scales[groups, None], out=w[groups])
        if biases is not None:
            w[groups] += biases[groups, None]
    return w.reshape(-1)


class MlxTensor(DequantisedTensor):
    """A weight that MLX quantised; of a mixture all experts (n_experts, out, in)."""

    @property
    def packing(self) -> Packing:
        return Packing(**self.settings)

    @property
    def dtype(self) -> str:
        bits, group_size, mode = self.packing
        return f"MLX int{bits} in groups of {group_size}" if mode == "affine" else f"MLX {mode}"

    @property
    def shape(self) -> tuple[int, ...]:
        *leading, words = self.by_key["weight"].shape
        return (*leading, words * 32 // self.packing.bits)

    def check(self) -> None:
        mode, shape = MODES[self.packing.mode], self.by_key["weight"].shape
        if len(shape) < 2:
            self.misshapen()
        scales = self.part("scales", ("U8",) if mode.scales else FLOATS, len(shape))
        needed = (*shape[:-1], shape[-1] * 32 // self.packing.bits // self.packing.group_size)
        if shape[-1] * 32 % (self.packing.bits * self.packing.group_size) or scales.shape != needed:
            problem = f"has {shape[-1]} words in a row and scales of shape {scales.shape}"
            raise self.refuse(f"{problem}, which do not fit {self.dtype}")
        if not mode.scales and self.part("biases", FLOATS, len(shape)).shape != needed:
            self.misshapen()
        if mode.scales and "biases" in self.by_key:
            raise self.refuse(f"has biases; {self.dtype} has none")
        if "global_scale" in self.by_key:
            if self.packing.mode != "nvfp4":
                raise self.refuse(f"has a global_scale; {self.dtype} has none")
            if self.part("global_scale", ("F32",), len(shape) - 2).shape != shape[:-2]:
                self.misshapen()

    def dequantise(self) -> np.ndarray:
        bits, size, mode = self.packing
        stored, biases = self.by_key["scales"], None
        if kind := MODES[mode].scales:
            scales = decode_fp8(stored.raw(), kind)
        else:
            scales, biases = stored.read().reshape(-1), self.by_key["biases"].read().reshape(-1)
        if "global_scale" in self.by_key:
            factors = self.by_key["global_scale"].read().reshape(-1) / LARGEST_NVFP4  # (n_experts,)
            scales *= np.repeat(factors, scales.size // max(factors.size, 1))
        return scaled(self.by_key["weight"].raw(), _values(mode, bits), scales, biases, size).reshape(self.shape)


def _values(mode: str, bits: int) -> np.ndarray:
    """What each code stands for, before scales."""
    if mode == "affine":
        return np.arange(1 << bits, dtype=np.float32)
    return E2M1 if bits == 4 else decode_fp8(np.arange(1 << bits), "F8_E4M3")
