"""MLX's quantised weights: `weight` of packed words, `scales`, and `biases` or `global_scale`.

A row is a stream of codes of equal width, lowest bits first; `group_size` codes share a scale.
config.json has the settings under `quantization`: for all modules, and by name for those that
differ.

| mode | a weight is | scales |
| --- | --- | --- |
| affine | scale * code + bias, codes from 0 to 2^bits - 1 | as the weights were |
| mxfp4 | scale * E2M1 | E8M0 |
| nvfp4 | scale * E2M1, times global_scale / (448 * 6) where there is one | E4M3 |
| mxfp8 | scale * E4M3 | E8M0 |

Sums and products are rounded to float32, as in mlx.core.dequantize where its scales are float32.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from weightscope.checkpoint.checkpoint import StoredTensor
from weightscope.checkpoint.config import Config
from weightscope.checkpoint.packings.fp4 import E2M1, grid
from weightscope.checkpoint.packings.packed import FLOATS, DequantisedTensor, parts_of, unpacked
from weightscope.checkpoint.packings.scaled import decode_fp8, fp8_grid
from weightscope.core.errors import CheckpointError

KEY = "quantization"  # the key in config.json
PARTS = ("scales", "biases", "global_scale")
LARGEST_NVFP4 = np.float32(448 * 6)  # the largest scale times the largest value
CHUNK = 1 << 16  # weights unpacked at a time, which stay in the cache while they are scaled


class Mode(NamedTuple):
    """Bits that a mode allows, sizes of a group that shares a scale, and the dtype of scales."""

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
    """Packing of a module's weights."""

    bits: int
    group_size: int
    mode: str
    global_scale: bool  # True if all groups of a matrix share one more scale


def check(settings: Config) -> None:
    """Refuse bits, group sizes and modes that MLX has not."""
    packing_of(settings, f"'{KEY}'")
    for module in settings:
        if isinstance(settings[module], dict):
            packing_of(settings.inside(module), f"'{KEY}' of {module[:100]}")


def check_modules(stored: Mapping[str, StoredTensor], settings: Config) -> None:
    """Refuse settings of a module that no file has: the bits of another may be wrong."""
    for module in settings:
        if isinstance(settings[module], dict) and f"{module}.weight" not in stored:
            name = module[:100]
            problem = f"'{KEY}' has settings of {name}, and no file has {name}.weight"
            raise CheckpointError(problem, file=settings.file)


def packing_of(given: Config, what: str) -> Packing:
    """Packing of weights by the settings of all modules or of one."""
    name = given.get("mode", "affine")
    mode = MODES.get(name) if isinstance(name, str) else None
    if mode is None:
        problem = f"{what} has mode '{str(name)[:40]}'; read are {', '.join(MODES)}"
        raise CheckpointError(problem, file=given.file)
    for key, known in (("bits", mode.bits), ("group_size", mode.group_sizes)):
        value = given.get(key)
        if type(value) is not int or value not in known:
            numbers = ", ".join(map(str, known))
            problem = f"{what} has {key} {str(value)[:40]}; {name} has {numbers}"
            raise CheckpointError(problem, file=given.file)
    has_global_scale = bool(given.get("global_scale"))
    return Packing(given["bits"], given["group_size"], str(name), has_global_scale)


def find(
    tensor: StoredTensor, stored: Mapping[str, StoredTensor], settings: Config
) -> DequantisedTensor | None:
    """The weight of this tensor, if it is of packed words."""
    module, _, last = tensor.name.rpartition(".")
    if last != "weight":
        return None
    is_packed, given = tensor.dtype == "U32", settings.get(module)
    if isinstance(given, dict | bool) and bool(given) != is_packed:
        stated = "quantised" if given else "not quantised"
        raise tensor.refuse(f"has dtype {tensor.dtype}, and config.json says that it is {stated}")
    if not is_packed:
        return None
    of_module = settings.inside(module) if isinstance(given, dict) else settings
    packing = packing_of(of_module, f"'{KEY}'")
    by_key = {"weight": tensor, **parts_of(module, stored, *PARTS)}
    return MlxTensor(tensor.name, by_key, Config(packing._asdict(), settings.file))


def scaled(
    packed: np.ndarray, values: np.ndarray, scales: np.ndarray, biases: np.ndarray | None, size: int
) -> np.ndarray:
    """values[code] * scale + bias: bytes (n_bytes,), a scale and bias per `size` codes -> (n,)."""
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
    """A weight that MLX quantised; a mixture's has all experts (n_experts, out, in)."""

    @property
    def packing(self) -> Packing:
        return Packing(*(self.settings[key] for key in Packing._fields))

    @property
    def dtype(self) -> str:
        bits, group_size, mode, _ = self.packing
        return f"MLX int{bits} in groups of {group_size}" if mode == "affine" else f"MLX {mode}"

    def codes(self) -> tuple[int, int, int | tuple[float, ...]] | None:
        if self.packing.mode == "affine":
            return 0x00, 0xFF, 1 << self.packing.bits
        return fp8_grid() if self.packing.bits == 8 else grid(E2M1)

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
        if self.packing.global_scale or "global_scale" in self.by_key:
            if self.packing.mode != "nvfp4":
                raise self.refuse(f"has a global_scale; {self.dtype} has none")
            if self.part("global_scale", ("F32",), len(shape) - 2).shape != shape[:-2]:
                self.misshapen()

    def dequantise(self) -> np.ndarray:
        bits, size, mode, _ = self.packing
        stored, biases = self.by_key["scales"], None
        if kind := MODES[mode].scales:
            scales = decode_fp8(stored.raw(), kind)
        else:
            scales, biases = stored.read().reshape(-1), self.by_key["biases"].read().reshape(-1)
        if "global_scale" in self.by_key:
            factors = self.by_key["global_scale"].read().reshape(-1) / LARGEST_NVFP4  # (n_experts,)
            scales *= np.repeat(factors, scales.size // max(factors.size, 1))
        if mode == "affine":
            values = np.arange(1 << bits, dtype=np.float32)
        elif bits == 4:
            values = E2M1
        else:
            values = decode_fp8(np.arange(1 << bits), "F8_E4M3")
        w = scaled(self.by_key["weight"].raw(), values, scales, biases, size)
        return w.reshape(self.shape)
