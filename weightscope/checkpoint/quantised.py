"""Quantised checkpoints: the tensors that one weight is stored as, presented as that weight.

Which tensors belong together is told by their names; config.json says what the names do not. What is not known is
refused by name, because integers taken for weights would give numbers that look like an answer.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, NoReturn

import numpy as np

from weightscope.checkpoint import dequantise
from weightscope.checkpoint.config import Config
from weightscope.checkpoint.header import MAX_DIMENSIONS
from weightscope.checkpoint.jsontext import parse_json
from weightscope.checkpoint.storage import Storage
from weightscope.checkpoint.tensor import StoredTensor, Tensor, WholeTensor
from weightscope.errors import CheckpointError

FP8 = ("F8_E4M3", "F8_E5M2")
FLOATS = ("F16", "BF16", "F32", "F64")
DEFAULT_BLOCK = [128, 128]  # of FP8, where config.json says nothing
READ = ("fp8", "fbgemm_fp8", "gptq", "awq", "bitsandbytes", "mxfp4", "compressed-tensors")
# MXFP4 quantises experts alone and FP8 formats keep weight and scale apart; these need no more than the tensors' names.
READ_FORMATS = ("float-quantized", "naive-quantized", "dense")  # of compressed-tensors
GPTQ_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
BNB_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")


def dequantised(stored: Mapping[str, StoredTensor], config: Config) -> dict[str, Tensor]:
    """The tensors by the names of the weights they make, everything that is not quantised as it stands.

    Raises
    ------
    CheckpointError
        The checkpoint is quantised in a way that is not known, or the parts of a weight do not fit together.
    """
    settings = _settings(config)
    tensors: dict[str, Tensor] = dict(stored)
    for name, tensor in stored.items():
        found = _weight_of(name, tensor, stored, settings)
        if found is not None:
            for part in found.parts:
                tensors.pop(part.name, None)
            tensors[found.name] = found
    return tensors


def _settings(config: Config) -> dict[str, Any]:
    """quantization_config, wherever config.json keeps it, of a method that is known."""
    text = config.get("text_config")
    for level in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            settings = level.get(key)
            if isinstance(settings, dict) and settings:
                method = settings.get("quant_method")
                if method not in READ:
                    known = ", ".join(READ)
                    problem = f"says quantised with '{str(method)[:40]}', which is not read; read are {known}"
                    raise CheckpointError(problem, file=config.file)
                if method == "compressed-tensors" and settings.get("format") not in READ_FORMATS:
                    found, known = str(settings.get("format"))[:40], ", ".join(READ_FORMATS)
                    problem = f"says compressed-tensors in format '{found}', which is not read; read are {known}"
                    raise CheckpointError(problem, file=config.file)
                return settings
    return {}


def _weight_of(
    name: str, tensor: StoredTensor, stored: Mapping[str, StoredTensor], settings: Mapping[str, Any]
) -> "DequantisedTensor | None":
    """The weight whose main part `tensor` is, or None where it is not quantised or not a main part."""
    module = name.rpartition(".")[0]
    if name.endswith(".qweight"):
        parts = {key: stored[f"{module}.{key}"] for key in ("qzeros", "scales", "g_idx") if f"{module}.{key}" in stored}
        method = settings.get("quant_method")
        if method == "gptq":
            return GptqTensor(f"{module}.weight", {"qweight": tensor, **parts}, dict(settings))
        if method == "awq":
            return AwqTensor(f"{module}.weight", {"qweight": tensor, **parts}, dict(settings))
        raise tensor.refuse("is packed, and config.json does not say whether by gptq or awq")
    if tensor.dtype in FP8:
        for key in ("_scale_inv", "_scale"):
            if name + key in stored:
                return Fp8Tensor(name, {"weight": tensor, "scale": stored[name + key]}, dict(settings))
    if f"{name}.absmax" in stored:
        keys = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", *BNB_STATES)
        parts = {key: stored[f"{name}.{key}"] for key in keys if f"{name}.{key}" in stored}
        return Bnb4Tensor(name, {"weight": tensor, **parts}, {})
    if tensor.dtype == "I8" and f"{module}.SCB" in stored and name.endswith(".weight"):
        parts = {key: stored[f"{module}.{key}"] for key in ("SCB", "weight_format") if f"{module}.{key}" in stored}
        return Bnb8Tensor(name, {"weight": tensor, **parts}, {})
    return None


@dataclass(frozen=True)
class DequantisedTensor(WholeTensor):
    """A weight over the tensors that it is stored as.

    Attributes
    ----------
    by_key : dict of StoredTensor
        Its parts by what they are, the main one first.
    settings : dict
        quantization_config.
    """

    name: str
    by_key: dict[str, StoredTensor]
    settings: dict[str, Any]
    noted: set[str] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        self.check()

    @property
    def file(self) -> Storage:  # type: ignore[override]
        return self.parts[0].file

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return tuple(self.by_key.values())

    def unchecked(self, noted: set[str]) -> Tensor:
        by_key = {
            key: replace(part, noted=set()) for key, part in self.by_key.items()
        }  # what shows in the weight counts
        return replace(self, by_key=by_key, noted=noted)

    @abstractmethod
    def check(self) -> None:
        """Refuse parts that are missing or whose dtypes and shapes do not fit together."""

    @abstractmethod
    def dequantise(self) -> np.ndarray:
        """The weight, float32, of `shape`."""

    def read(self) -> np.ndarray:
        for file in {id(part.file): part.file for part in self.parts}.values():
            file.prefetch([part.entry for part in self.parts if part.file is file])
        with np.errstate(over="ignore", invalid="ignore"):  # what comes of hostile scales is found and named below
            weight = self.dequantise()
        return self.check_finite(weight)

    def part(self, key: str, dtypes: tuple[str, ...], n_dimensions: int) -> StoredTensor:
        """A part that has to be there, of one of these dtypes."""
        part = self.by_key.get(key)
        if part is None:
            raise self.refuse(f"has no {key} beside it; {self.dtype} needs one")
        if part.dtype not in dtypes or len(part.shape) != n_dimensions:
            problem = (
                f"has {key} of dtype {part.dtype} and shape {part.shape}; {self.dtype} needs {' or '.join(dtypes)}"
            )
            raise self.refuse(f"{problem} of {n_dimensions} dimensions")
        return part

    def misshapen(self) -> NoReturn:
        """Refuse parts of shapes that do not go together."""
        shapes = ", ".join(f"{key} {part.shape}" for key, part in self.by_key.items())
        raise self.refuse(f"is in parts that do not fit together: {shapes}")

    def words(self, key: str) -> np.ndarray:
        """A part of 32-bit words."""
        part = self.by_key[key]
        return part.raw().view("<u4").reshape(part.shape)


class Fp8Tensor(DequantisedTensor):
    """FP8 times a scale: one for all, one a row, or one a block (DeepSeek's weight_scale_inv, which multiplies too)."""

    @property
    def dtype(self) -> str:
        return f"{self.by_key['weight'].dtype} x scale"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.by_key["weight"].shape

    def check(self) -> None:
        if self.by_key["scale"].dtype not in (*FLOATS, "F8_E8M0"):
            raise self.refuse(f"has a scale of dtype {self.by_key['scale'].dtype}")
        self.block()

    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        weight, scale = self.by_key["weight"], self.by_key["scale"]
        if prod(scale.shape) == 1:
            return max(1, weight.shape[0] if weight.shape else 1), max(1, prod(weight.shape[1:]))
        if len(weight.shape) != 2 or len(scale.shape) not in {1, 2}:
            self.misshapen()
        grid = scale.shape if len(scale.shape) == 2 else (scale.shape[0], 1)
        given = self.settings.get("weight_block_size") or DEFAULT_BLOCK
        if not (isinstance(given, list) and len(given) == 2 and all(type(n) is int and n > 0 for n in given)):
            raise self.refuse(f"is in blocks of {str(given)[:40]}, says config.json")
        block = [
            min(side, size) if -(-size // side) == n else size // max(n, 1)  # as stated, or else as the shapes have it
            for size, n, side in zip(weight.shape, grid, given, strict=True)
        ]
        if any(
            side * n < size or side * (n - 1) >= size for size, side, n in zip(weight.shape, block, grid, strict=True)
        ):
            self.misshapen()
        return block[0], block[1]

    def dequantise(self) -> np.ndarray:
        weight, scale = self.by_key["weight"], self.by_key["scale"]
        w = dequantise.decode_fp8(weight.raw(), weight.dtype).reshape(self.shape)
        s = dequantise.decode_fp8(scale.raw(), scale.dtype) if scale.dtype == "F8_E8M0" else scale.read()
        if s.size == 1:
            return w * s.reshape(())
        s = s.reshape(scale.shape if len(scale.shape) == 2 else (-1, 1))
        return dequantise.scale_blocks(w, s, self.block())


class GptqTensor(DequantisedTensor):
    """GPTQ: integers packed along the inputs, a scale and a zero a group of inputs and output."""

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
    def zero_offset(self) -> int:
        """From checkpoint_format, which files older than the second format leave out."""
        return GPTQ_ZERO_OFFSETS[self.settings.get("checkpoint_format") or self.settings.get("format") or "gptq"]

    def check(self) -> None:
        if type(self.bits) is not int or self.bits not in {2, 4, 8}:
            raise self.refuse(f"is GPTQ of '{str(self.bits)[:20]}' bits; read are 2, 4 and 8")
        stated = self.settings.get("checkpoint_format") or self.settings.get("format") or "gptq"
        if not isinstance(stated, str) or stated not in GPTQ_ZERO_OFFSETS:
            known = " and ".join(GPTQ_ZERO_OFFSETS)
            raise self.refuse(f"is GPTQ in format '{str(stated)[:40]}'; read are {known}")
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
            raise self.refuse("has no g_idx beside it, and config.json says desc_act: its inputs' groups are unknown")

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
        return dequantise.gptq(words, zeros, scales, self.groups(), self.bits, self.zero_offset)


class AwqTensor(DequantisedTensor):
    """AWQ: integers packed along the outputs in an order of their own, a scale and a zero a group and output."""

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
        return dequantise.awq(self.words("qweight"), self.words("qzeros"), self.by_key["scales"].read())


class Bnb4Tensor(DequantisedTensor):
    """bitsandbytes nf4 or fp4: codes into a table of 16, a scale a block, the scales perhaps quantised in turn."""

    @property
    def dtype(self) -> str:
        return f"bitsandbytes {'nf4' if BNB_STATES[0] in self.by_key else 'fp4'}"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.state["shape"])

    @cached_property
    def state(self) -> dict[str, Any]:
        """Shape and block sizes, which the format keeps as JSON in a tensor of its own; read when first needed."""
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
        if not any(key in self.by_key for key in BNB_STATES):
            raise self.refuse(f"has no {' or '.join(BNB_STATES)} beside it")
        state = next(key for key in BNB_STATES if key in self.by_key)
        self.part(state, ("U8",), 1)
        if self.by_key["weight"].dtype != "U8":
            raise self.refuse(
                f"is of dtype {self.by_key['weight'].dtype}; {self.dtype} as it is read here is kept in U8"
            )
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
        codes = dequantise.high_nibble_first(self.by_key["weight"].raw())[: prod(self.shape)]
        values = dequantise.blockwise(codes, self.by_key["quant_map"].read(), self.absmax(), state["blocksize"])
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
        return dequantise.blockwise(codes, table, scales, block) + np.float32(self.state["nested_offset"])


class Bnb8Tensor(DequantisedTensor):
    """bitsandbytes int8: W[i, j] * SCB[i] / 127."""

    dtype = "bitsandbytes int8"  # type: ignore[assignment]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.by_key["weight"].shape

    def check(self) -> None:
        if self.part("SCB", FLOATS, 1).shape != self.part("weight", ("I8",), 2).shape[:1]:
            self.misshapen()
        if "weight_format" in self.by_key and self.by_key["weight_format"].nbytes != 1:
            self.misshapen()

    def dequantise(self) -> np.ndarray:
        if "weight_format" in self.by_key and self.by_key["weight_format"].raw().any():  # 0 is row by row
            raise self.refuse("is int8 in the layout of a GPU, not row by row; save it again with a newer bitsandbytes")
        w = self.by_key["weight"].raw().view(np.int8).reshape(self.shape).astype(np.float32)
        w *= (self.by_key["SCB"].read() / 127)[:, None]
        return w
