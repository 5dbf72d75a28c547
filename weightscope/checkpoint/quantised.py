"""Quantised checkpoints: the stored tensors of one weight, presented as that weight in float32.

Tensors belong together by their names; config.json says what names do not. Unknown methods are refused: integers read
as weights would give plausible numbers. Every weight is (out, in), as a Linear stores it before quantisation, though
GPTQ and AWQ store it transposed.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, NoReturn

import numpy as np

from weightscope.checkpoint.checkpoint import StoredTensor, Tensor, WholeTensor
from weightscope.checkpoint.config import Config, parse_json
from weightscope.checkpoint.storage import MAX_DIMENSIONS, Storage
from weightscope.errors import CheckpointError

FP8 = ("F8_E4M3", "F8_E5M2")
FLOATS = ("F16", "BF16", "F32", "F64")
SETTINGS = ("quantization_config", "compression_config")  # keys of config.json, or of its text_config
PARTS = (
    ".qweight",
    "_scale_inv",
    "_scale",
    ".absmax",
    ".SCB",
    ".scales",
)  # ends of names that only quantised weights have
READ = ("fp8", "fbgemm_fp8", "gptq", "awq", "bitsandbytes", "mxfp4", "compressed-tensors")
BY_PACKINGS = ("auto-round", "hqq", "bitnet", "torchao")  # read by `packings`
READ_FORMATS = ("float-quantized", "naive-quantized", "dense")  # of compressed-tensors
GPTQ_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
BNB_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
# Order of the eight columns in a word of AWQ: nibble i holds column AWQ_ORDER[i] (AutoAWQ, packing_utils.py).
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
CHUNK = 1024  # rows unpacked at a time, so that only the result has the result's size


def dequantised(stored: Mapping[str, StoredTensor], config: Config) -> dict[str, Tensor]:
    """All tensors by name: quantised weights under the names they had before, the rest as stored."""
    settings = _settings(config)
    tensors: dict[str, Tensor] = dict(stored)
    for name, tensor in stored.items():
        weight = _weight_of(name, tensor, stored, settings)
        if weight is not None:
            for part in weight.parts:
                tensors.pop(part.name, None)
            tensors[weight.name] = weight
    return tensors


def settings_of(config: Config) -> Mapping[str, Any]:
    """The quantization_config, wherever config.json has it."""
    text = config.get("text_config")
    described = [level.get(key) for level in (config, text if isinstance(text, dict) else {}) for key in SETTINGS]
    return next((settings for settings in described if isinstance(settings, dict) and settings), {})


def _settings(config: Config) -> Mapping[str, Any]:
    """The quantization_config; an unknown method is refused."""
    settings = settings_of(config)
    if not settings:
        return {}
    method, layout = settings.get("quant_method"), settings.get("format")
    if method not in READ:
        problem = f"says quantised with '{str(method)[:40]}', which is not read; read are {', '.join(READ + BY_PACKINGS)}"
        raise CheckpointError(problem, file=config.file)
    if method == "compressed-tensors" and layout not in READ_FORMATS:
        problem = f"says compressed-tensors in format '{str(layout)[:40]}', which is not read"
        raise CheckpointError(f"{problem}; read are {', '.join(READ_FORMATS)}", file=config.file)
    return settings


def _weight_of(
    name: str, tensor: StoredTensor, stored: Mapping[str, StoredTensor], settings: Mapping[str, Any]
) -> "DequantisedTensor | None":
    """The weight whose main part is `tensor`; None if that is not quantised, or another part."""
    module = name.rpartition(".")[0]

    def parts(prefix: str, *keys: str) -> dict[str, StoredTensor]:
        return {key: stored[f"{prefix}.{key}"] for key in keys if f"{prefix}.{key}" in stored}

    if name.endswith(".qweight"):
        kinds = {"gptq": GptqTensor, "awq": AwqTensor}
        method = settings.get("quant_method")
        if method not in kinds:
            raise tensor.refuse("is packed, and config.json does not say whether by gptq or awq")
        by_key = {"qweight": tensor, **parts(module, "qzeros", "scales", "g_idx")}
        return kinds[method](f"{module}.weight", by_key, dict(settings))
    if tensor.dtype == "U32" and f"{module}.scales" in stored:
        raise tensor.refuse("is packed as MLX does, and config.json does not say how: it has no 'quantization'")
    if tensor.dtype in FP8:
        for key in ("_scale_inv", "_scale"):
            if name + key in stored:
                return Fp8Tensor(name, {"weight": tensor, "scale": stored[name + key]}, dict(settings))
    if f"{name}.absmax" in stored:
        keys = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", *BNB_STATES)
        return Bnb4Tensor(name, {"weight": tensor, **parts(name, *keys)}, {})
    if tensor.dtype == "I8" and f"{module}.SCB" in stored and name.endswith(".weight"):
        return Bnb8Tensor(name, {"weight": tensor, **parts(module, "SCB", "weight_format")}, {})
    return None


# Arithmetic: one function per format, arrays in and arrays out


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
    """W[i, j] * scale[i // block[0], j // block[1]], in place: w (out, in), block (int, int)."""
    for index, row in enumerate(scale):
        w[index * block[0] : (index + 1) * block[0]] *= np.repeat(row, block[1])[: w.shape[1]]
    return w


def unpack_columns(packed: np.ndarray, bits: int) -> np.ndarray:
    """Integers of 32-bit words, the first in the lowest bits: packed (rows, words) -> (rows, words * 32 / bits)."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (packed[:, :, None] >> shifts & (2**bits - 1)).astype(np.uint8).reshape(len(packed), -1)


def gptq(
    qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, groups: np.ndarray, bits: int, zero_offset: int
) -> np.ndarray:
    """GPTQ: scale[g(k)] * (q[k] - zero[g(k)]), words of q along k (AutoGPTQ, qlinear_cuda_old.py) -> (out, in).

    qweight (in * bits / 32, out), qzeros (n_groups, out * bits / 32), scales (n_groups, out), groups (in,).
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
    """AWQ, "gemm": scale[g(k)] * (q[k] - zero[g(k)]), four bits, words of q along the outputs -> (out, in).

    qweight (in, out / 8), qzeros (n_groups, out / 8), scales (n_groups, out).
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
    """bitsandbytes: table[code] * absmax of its block of the flattened tensor: codes (n,), table (16,) -> (n,)."""
    values = table[codes]
    end = len(values) // block * block  # of the last full block; `block` may exceed the tensor
    values[:end].reshape(end // block, block)[:] *= absmax[: end // block, None]
    values[end:] *= absmax[-1:]
    return values


def high_nibble_first(packed: np.ndarray) -> np.ndarray:
    """Two four-bit codes per byte, as bitsandbytes stores them: (n,) -> (2 n,)."""
    return np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)


# Weights


@dataclass(frozen=True)
class DequantisedTensor(WholeTensor):
    """A weight made of several stored tensors."""

    name: str
    by_key: dict[str, StoredTensor]  # the parts by role, the main one first
    settings: dict[str, Any]  # quantization_config
    noted: set[str] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        self.check()

    @property
    def file(self) -> Storage:  # type: ignore[override]
        return self.parts[0].file

    @property
    def shape(self) -> tuple[int, ...]:
        return self.by_key["weight"].shape

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return tuple(self.by_key.values())

    def unchecked(self, noted: set[str]) -> Tensor:
        # Only values of the weight that are not finite are noted, not those of its parts.
        by_key = {key: replace(part, noted=set()) for key, part in self.by_key.items()}
        return replace(self, by_key=by_key, noted=noted)

    @abstractmethod
    def check(self) -> None:
        """Refuse missing parts, and dtypes and shapes that do not fit together."""

    @abstractmethod
    def dequantise(self) -> np.ndarray:
        """The weight, float32, of `shape`."""

    def read(self) -> np.ndarray:
        for file in {id(part.file): part.file for part in self.parts}.values():
            file.prefetch([part.entry for part in self.parts if part.file is file])
        with np.errstate(over="ignore", invalid="ignore"):  # from hostile scales; checked below
            weight = self.dequantise()
        return self.check_finite(weight)

    def part(self, key: str, dtypes: tuple[str, ...], n_dimensions: int) -> StoredTensor:
        """A required part, of one of these dtypes."""
        part = self.by_key.get(key)
        if part is None:
            raise self.refuse(f"has no {key}; {self.dtype} needs one")
        if part.dtype not in dtypes or len(part.shape) != n_dimensions:
            problem = f"has {key} of dtype {part.dtype} and shape {part.shape}"
            raise self.refuse(f"{problem}; {self.dtype} needs {' or '.join(dtypes)} of {n_dimensions} dimensions")
        return part

    def misshapen(self) -> NoReturn:
        """Refuse parts whose shapes do not fit together."""
        shapes = ", ".join(f"{key} {part.shape}" for key, part in self.by_key.items())
        raise self.refuse(f"is in parts that do not fit together: {shapes}")

    def words(self, key: str) -> np.ndarray:
        """A part of 32-bit words."""
        part = self.by_key[key]
        return part.raw().view("<u4").reshape(part.shape)


class Fp8Tensor(DequantisedTensor):
    """FP8 times a scale: one for all, one per row, or one per block (DeepSeek's weight_scale_inv multiplies too)."""

    @property
    def dtype(self) -> str:
        return f"{self.by_key['weight'].dtype} x scale"

    def check(self) -> None:
        if self.by_key["scale"].dtype not in (*FLOATS, "F8_E8M0"):
            raise self.refuse(f"has a scale of dtype {self.by_key['scale'].dtype}")
        self.block()

    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale: as config.json says, or for one scale in all or one per row the shape.

        Scales in blocks do not tell their blocks' size: 2 x 4 of them fit a weight (24, 64) in blocks of 12 x 16 and of
        16 x 16.
        """
        weight, scale = self.by_key["weight"], self.by_key["scale"]
        if prod(scale.shape) == 1:
            return max(1, weight.shape[0] if weight.shape else 1), max(1, prod(weight.shape[1:]))
        if len(weight.shape) != 2 or len(scale.shape) not in {1, 2} or 0 in (*weight.shape, *scale.shape):
            self.misshapen()
        grid = scale.shape if len(scale.shape) == 2 else (scale.shape[0], 1)
        if all(n in (1, size) for size, n in zip(weight.shape, grid, strict=True)):
            return weight.shape[0] // grid[0], weight.shape[1] // grid[1]
        stated = f"has {grid[0]} x {grid[1]} scales for a weight of {weight.shape[0]} x {weight.shape[1]}"
        given = self._stated_block()
        if given is None:
            problem = f"{stated}, and config.json does not give the block size"
            raise self.refuse(f"{problem}: quantization_config needs weight_block_size, as its quantiser was given")
        if not (isinstance(given, list) and len(given) == 2 and all(type(n) is int and n > 0 for n in given)):
            raise self.refuse(f"is in blocks of {str(given)[:40]}, says config.json")
        needed = tuple(-(-size // side) for size, side in zip(weight.shape, given, strict=True))
        if needed != grid:
            blocks = f"config.json says blocks of {given[0]} x {given[1]}"
            raise self.refuse(f"{stated}; {blocks}, which need {needed[0]} x {needed[1]}")
        return min(given[0], weight.shape[0]), min(given[1], weight.shape[1])

    def _stated_block(self) -> Any:
        """The block size in config.json, under the name of compressed-tensors too; None where groups differ."""
        if (stated := self.settings.get("weight_block_size")) is not None:
            return stated
        groups = self.settings.get("config_groups")
        groups = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
        weights = [group["weights"] for group in groups if isinstance(group.get("weights"), dict)]
        blocks = [settings.get("block_structure") for settings in weights]
        return blocks[0] if blocks and all(block == blocks[0] for block in blocks) else None

    def dequantise(self) -> np.ndarray:
        weight, scale = self.by_key["weight"], self.by_key["scale"]
        w = decode_fp8(weight.raw(), weight.dtype).reshape(self.shape)
        s = decode_fp8(scale.raw(), scale.dtype) if scale.dtype == "F8_E8M0" else scale.read()
        if s.size == 1:
            return w * s.reshape(())
        s = s.reshape(scale.shape if len(scale.shape) == 2 else (-1, 1))
        return scale_blocks(w, s, self.block())


class GptqTensor(DequantisedTensor):
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
        if zeros != (n_groups, outputs * self.bits // 32) or scales[1] != outputs or words[1] * self.bits % 32:
            self.misshapen()
        if not 0 < n_groups <= max(inputs, 1):
            self.misshapen()
        if "g_idx" in self.by_key:
            if self.part("g_idx", ("I32",), 1).shape != (inputs,):
                self.misshapen()
        elif self.settings.get("desc_act"):
            raise self.refuse("has no g_idx, and config.json says desc_act: the groups of its inputs are unknown")

    def groups(self) -> np.ndarray:
        """The group of each input."""
        n_groups, inputs = self.by_key["scales"].shape[0], self.shape[1]
        if "g_idx" not in self.by_key:
            return np.arange(inputs) // -(-inputs // n_groups)
        groups = self.by_key["g_idx"].raw().view("<i4")
        if inputs and not 0 <= groups.min() <= groups.max() < n_groups:
            raise self.refuse(f"has a g_idx from {groups.min()} to {groups.max()}; there are {n_groups} groups")
        return groups

    def dequantise(self) -> np.ndarray:
        scales = self.by_key["scales"].read()
        zeros, words = self.words("qzeros"), self.words("qweight")
        return gptq(words, zeros, scales, self.groups(), self.bits, GPTQ_ZERO_OFFSETS[self.format])


class AwqTensor(DequantisedTensor):
    """AWQ: integers packed along the outputs in AWQ_ORDER; a scale and a zero per group and output."""

    dtype = "AWQ int4"  # type: ignore[assignment]

    @property
    def shape(self) -> tuple[int, ...]:
        inputs, words = self.by_key["qweight"].shape
        return words * 8, inputs

    def check(self) -> None:
        bits, version = self.settings.get("bits", 4), self.settings.get("version", "gemm")
        if bits != 4 or str(version).lower() != "gemm":
            raise self.refuse(f"is AWQ of {str(bits)[:20]} bits in version '{str(version)[:40]}'; read is gemm of 4")
        words, zeros = self.part("qweight", ("I32",), 2).shape, self.part("qzeros", ("I32",), 2).shape
        n_groups, outputs = self.part("scales", FLOATS, 2).shape
        if zeros != (n_groups, words[1]) or outputs != words[1] * 8 or not n_groups or words[0] % n_groups:
            self.misshapen()

    def dequantise(self) -> np.ndarray:
        return awq(self.words("qweight"), self.words("qzeros"), self.by_key["scales"].read())


class Bnb4Tensor(DequantisedTensor):
    """bitsandbytes nf4 or fp4: codes into a table of 16, a scale per block; the scales may be quantised too."""

    @property
    def dtype(self) -> str:
        return f"bitsandbytes {'nf4' if BNB_STATES[0] in self.by_key else 'fp4'}"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.state["shape"])

    @cached_property
    def state(self) -> dict[str, Any]:
        """Shape and block sizes, which the format stores as JSON in a tensor; read when first needed."""
        part = self.by_key[next(key for key in BNB_STATES if key in self.by_key)]
        state = parse_json(part.raw().tobytes(), file=part.file.path, what=f"quant_state of {self.name} ")

        def is_size(number: Any) -> bool:
            return type(number) is int and 0 < number < 2**40

        shape, blocks = state.get("shape"), [state.get("blocksize")]
        if "nested_absmax" in self.by_key:
            blocks.append(state.get("nested_blocksize"))
            if type(state.get("nested_offset")) not in {int, float}:
                raise self.refuse("has a quant_state without a number for nested_offset")
        if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(is_size, [*shape, *blocks])):
            raise self.refuse(f"has a quant_state of shape {str(shape)[:80]} and block sizes {str(blocks)[:80]}")
        n, block = prod(shape), state["blocksize"]
        packed, absmax = self.by_key["weight"].nbytes, prod(self.by_key["absmax"].shape)
        if packed != -(-n // 2) or absmax != -(-n // block):
            self.misshapen()
        return state

    def check(self) -> None:
        state = next((key for key in BNB_STATES if key in self.by_key), None)
        if state is None:
            raise self.refuse(f"has no {' or '.join(BNB_STATES)}")
        self.part(state, ("U8",), 1)
        if self.by_key["weight"].dtype != "U8":
            raise self.refuse(f"has dtype {self.by_key['weight'].dtype}; {self.dtype} is only read from U8")
        if self.part("quant_map", ("F32",), 1).shape != (16,):
            self.misshapen()
        nested = "nested_absmax" in self.by_key
        self.part("absmax", ("U8",) if nested else ("F32",), 1)
        if nested:
            self.part("nested_absmax", ("F32",), 1)
            if self.part("nested_quant_map", ("F32",), 1).shape != (256,):
                self.misshapen()

    def dequantise(self) -> np.ndarray:
        state = self.state
        codes = high_nibble_first(self.by_key["weight"].raw())[: prod(self.shape)]
        values = blockwise(codes, self.by_key["quant_map"].read(), self.absmax(), state["blocksize"])
        return values.reshape(self.shape)

    def absmax(self) -> np.ndarray:
        """The blocks' scales."""
        if "nested_absmax" not in self.by_key:
            return self.by_key["absmax"].read()
        codes, block = self.by_key["absmax"].raw(), self.state["nested_blocksize"]
        scales = self.by_key["nested_absmax"].read()
        if len(scales) != -(-len(codes) // block):
            self.misshapen()
        table = self.by_key["nested_quant_map"].read()
        return blockwise(codes, table, scales, block) + np.float32(self.state["nested_offset"])


class Bnb8Tensor(DequantisedTensor):
    """bitsandbytes int8: W[i, j] * SCB[i] / 127."""

    dtype = "bitsandbytes int8"  # type: ignore[assignment]

    def check(self) -> None:
        if self.part("SCB", FLOATS, 1).shape != self.part("weight", ("I8",), 2).shape[:1]:
            self.misshapen()
        if "weight_format" in self.by_key and self.by_key["weight_format"].nbytes != 1:
            self.misshapen()

    def dequantise(self) -> np.ndarray:
        if "weight_format" in self.by_key and self.by_key["weight_format"].raw().any():  # 0: row by row
            raise self.refuse("is int8 in a GPU's layout, not row by row; save it again with a newer bitsandbytes")
        w = self.by_key["weight"].raw().view(np.int8).reshape(self.shape).astype(np.float32)
        w *= (self.by_key["SCB"].read() / 127)[:, None]
        return w
