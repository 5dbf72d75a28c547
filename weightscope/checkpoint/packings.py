"""Weights as AutoRound, HQQ, transformers' BitNet and torchao pack them; `quantised` and `mlx` read other checkpoints.

| method | stored | a weight is |
| --- | --- | --- |
| auto-round | qweight, qzeros, scales | scale * (code - zero): GPTQ's and AWQ's order, codes of 2 to 8 bits in one stream |
| hqq | W_q, scale, zero, and settings as tensors | (code - zero) * scale, in groups of the flattened weight |
| bitnet | weight, weight_scale | (code - 1) / weight_scale; `autobitlinear` multiplies |
| torchao | parts named in each file's metadata | (q - zero_point) * scale of its block |
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from weightscope.checkpoint.checkpoint import StoredTensor, Tensor
from weightscope.checkpoint.config import Config, parse_json
from weightscope.checkpoint.mlx import KEY, unpacked, unpacked_by_name
from weightscope.checkpoint.quantised import AWQ_ORDER, FLOATS, FP8, DequantisedTensor, decode_fp8, dequantised, settings_of
from weightscope.checkpoint.storage import MAX_DIMENSIONS
from weightscope.errors import CheckpointError

Stored = Mapping[str, StoredTensor]


def weights_of(stored: Stored, config: Config) -> dict[str, Tensor]:
    """All tensors by name: quantised weights under the names they had before, the rest as stored."""
    text = config.get("text_config")
    if KEY in config or (isinstance(text, dict) and KEY in text):
        return unpacked_by_name(stored, config)
    settings = settings_of(config)
    method = settings.get("quant_method")
    if method is None and any(name.endswith(".W_q") for name in stored):
        method = "hqq"  # its own writer leaves config.json as it was
    read = METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        return dequantised(stored, config)
    tensors: dict[str, Tensor] = dict(stored)
    for weight in read(stored, settings, config):
        for part in weight.parts:
            tensors.pop(part.name, None)
        tensors[weight.name] = weight
    return tensors


def _parts(stored: Stored, module: str, keys: tuple[str, ...]) -> dict[str, StoredTensor]:
    """The tensors of a module among `keys`, by key."""
    return {key: stored[name] for key in keys if (name := f"{module}.{key}") in stored}


def _modules(stored: Stored, end: str) -> list[str]:
    """The modules that have a tensor of this name."""
    return [name.removesuffix(end) for name in stored if name.endswith(end)]


# AutoRound

# How much the stored zero is below the one that is meant, by packing_format; None: AWQ's order.
AUTO_ROUND = {"auto_round:auto_gptq": 1, "auto_round": 0, "auto_round:gptqmodel": 0, "auto_round:auto_awq": None}
BITS = range(2, 9)


def _of_auto_round(stored: Stored, settings: Mapping[str, Any], config: Config) -> Sequence[DequantisedTensor]:
    packing = settings.get("packing_format")
    if not isinstance(packing, str) or packing not in AUTO_ROUND:
        problem = f"says packed by AutoRound as '{str(packing)[:40]}', which is not read; read are {', '.join(AUTO_ROUND)}"
        raise CheckpointError(problem, file=config.file)
    layers = settings.get("extra_config")
    weights = []
    for module in _modules(stored, ".qweight"):
        layer = layers.get(module) if isinstance(layers, dict) else None
        size = (layer if isinstance(layer, dict) else {}).get("group_size") or settings.get("group_size")
        parts = _parts(stored, module, ("qweight", "qzeros", "scales", "g_idx"))
        kind = AutoRoundAwqTensor if AUTO_ROUND[packing] is None else AutoRoundTensor
        weights.append(kind(f"{module}.weight", parts, {"group_size": size, "offset": AUTO_ROUND[packing]}))
    return weights


def _codes(words: np.ndarray, bits: int) -> np.ndarray:
    """A row's codes, lowest bits first: (rows, words) of 32 bits -> (rows, words * 32 / bits), as float32."""
    packed = np.ascontiguousarray(words).view(np.uint8).reshape(-1)
    return unpacked(packed, np.arange(1 << bits, dtype=np.float32)).reshape(len(words), -1)


class AutoRoundTensor(DequantisedTensor):
    """Codes along the inputs, as GPTQ has them; the shapes say how many bits a code has."""

    @cached_property
    def bits(self) -> int:
        """Bits of a code, by the zeros of a group: one for each output."""
        zeros, scales = self.by_key["qzeros"].shape, self.by_key["scales"].shape
        return zeros[1] * 32 // max(scales[1], 1)

    @property
    def dtype(self) -> str:
        return f"AutoRound int{self.bits}" if {"qzeros", "scales"} <= {*self.by_key} else "AutoRound"

    @property
    def shape(self) -> tuple[int, ...]:
        words, outputs = self.by_key["qweight"].shape
        return outputs, words * 32 // self.bits

    def sizes(self) -> tuple[int, int, int]:
        """Outputs, inputs and groups, checked to fit together."""
        for key, dtypes in (("qweight", ("I32",)), ("qzeros", ("I32",)), ("scales", FLOATS)):
            if key not in self.by_key:
                raise self.refuse(f"has no {key}; AutoRound's packing needs one")
            if self.by_key[key].dtype not in dtypes or len(self.by_key[key].shape) != 2:
                self.misshapen()
        outputs, bits = self.by_key["scales"].shape[1], self.bits
        if bits not in BITS or self.by_key["qzeros"].shape[1] * 32 != outputs * bits:
            self.misshapen()
        return *self.shape, self.by_key["scales"].shape[0]  # type: ignore[return-value]

    def check(self) -> None:
        outputs, inputs, n_groups = self.sizes()
        words = self.by_key["qweight"].shape
        if (words[0] * 32, words[1]) != (inputs * self.bits, outputs) or self.by_key["qzeros"].shape[0] != n_groups:
            self.misshapen()
        self.check_groups(inputs, n_groups)

    def check_groups(self, inputs: int, n_groups: int) -> None:
        """Refuse inputs whose groups are not known."""
        if "g_idx" in self.by_key:
            if self.part("g_idx", ("I32",), 1).shape != (inputs,):
                self.misshapen()
        elif not n_groups or -(-inputs // self.group_size(inputs)) != n_groups:
            size = self.settings["group_size"]
            raise self.refuse(f"has {n_groups} groups of {inputs} inputs, and config.json says {str(size)[:40]} in a group")

    def group_size(self, inputs: int) -> int:
        """Inputs that share a scale."""
        size = self.settings["group_size"]
        if type(size) is not int or not (size == -1 or 0 < size):
            raise self.refuse(f"is in groups of {str(size)[:40]}, says config.json; a whole number was expected")
        return size if 0 < size < inputs else max(inputs, 1)

    def groups(self) -> np.ndarray:
        """The group of each input."""
        inputs, n_groups = self.shape[1], self.by_key["scales"].shape[0]
        if "g_idx" not in self.by_key:
            return np.arange(inputs) // self.group_size(inputs)
        groups = self.by_key["g_idx"].raw().view("<i4")
        if inputs and not 0 <= groups.min() <= groups.max() < n_groups:
            raise self.refuse(f"has a g_idx from {groups.min()} to {groups.max()}; there are {n_groups} groups")
        return groups

    def dequantise(self) -> np.ndarray:
        groups, scales = self.groups(), self.by_key["scales"].read().T  # (out, n_groups)
        zeros = _codes(self.words("qzeros"), self.bits).T + np.float32(self.settings["offset"])
        w = _codes(self.words("qweight").T, self.bits)  # (out, in)
        w -= zeros[:, groups]
        w *= scales[:, groups]
        return w


class AutoRoundAwqTensor(AutoRoundTensor):
    """Codes along the outputs, eight at a time in AWQ_ORDER."""

    @property
    def shape(self) -> tuple[int, ...]:
        inputs, words = self.by_key["qweight"].shape
        return words * 32 // self.bits, inputs

    def check(self) -> None:
        outputs, inputs, n_groups = self.sizes()
        if self.by_key["scales"].shape[1] != outputs or self.by_key["qzeros"].shape[0] != n_groups or outputs % 8:
            self.misshapen()
        self.check_groups(inputs, n_groups)

    def dequantise(self) -> np.ndarray:
        in_order = np.argsort(AWQ_ORDER)

        def columns(key: str) -> np.ndarray:
            codes = _codes(self.words(key), self.bits)
            return codes.reshape(len(codes), -1, 8)[:, :, in_order].reshape(codes.shape)

        groups = self.groups()
        w = columns("qweight")  # (in, out)
        w -= columns("qzeros")[groups]
        w *= self.by_key["scales"].read()[groups]
        return w.T


# HQQ

# How many bits each code is from the lowest, by `packing`, first rows first; 3bit_32 fills its last words with zeros.
HQQ_SHIFTS: dict[str, tuple[str, range]] = {
    "8bit_u8": ("u1", range(0, -1, -8)), "4bit_u8": ("u1", range(4, -1, -4)), "3bit_32": ("<u4", range(27, -1, -3)),
    "2bit_u8": ("u1", range(6, -1, -2)), "1bit_u8": ("u1", range(7, -1, -1)),
}  # fmt: skip
HQQ_PARTS = (
    "W_q", "scale", "zero", "shape", "axis", "group_size", "packing", "nbits", "quant_scale", "quant_zero",
    "unpack_view_dtype", "view_as_float", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config",
    "channel_wise", "optimize", "round_zero",
)  # fmt: skip


def _of_hqq(stored: Stored, settings: Mapping[str, Any], config: Config) -> Sequence[DequantisedTensor]:
    modules = _modules(stored, ".W_q")
    return [HqqTensor(f"{module}.weight", _parts(stored, module, HQQ_PARTS), {}) for module in modules]


class HqqTensor(DequantisedTensor):
    """Rows (axis 1) or columns (axis 0) of groups; its settings are tensors, read when first needed."""

    dtype = "HQQ"  # type: ignore[assignment]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stated[0]

    @cached_property
    def stated(self) -> tuple[tuple[int, ...], int, str]:
        """The weight's shape, how many columns the grouped matrix has, and the packing."""
        read = {key: self.integers(key) for key in ("shape", "axis", "packing", "group_size", "quant_scale", "quant_zero")}
        shape, packing = tuple(read["shape"] or ()), bytes(n & 255 for n in read["packing"] or ()).decode("latin-1")
        if packing not in HQQ_SHIFTS:
            raise self.refuse(f"is packed as '{packing[:40]}'; read are {', '.join(HQQ_SHIFTS)}")
        if len(shape) != 2 or not all(0 < size < 2**40 for size in shape):
            raise self.refuse(f"has a stored shape {str(shape)[:80]}; two sizes were expected")
        if any(read["quant_scale"] or ()) or any(read["quant_zero"] or ()):
            raise self.refuse("has scales or zeros that are quantised themselves, which is not read")
        (axis,), size = read["axis"] or (-1,), prod(shape)
        (group,) = read["group_size"] or (0,)
        if axis not in (0, 1) or group < 0 or (group and size % group):
            raise self.refuse(f"is in groups of {group} along axis {axis}, which a weight of shape {shape} has not")
        columns = shape[1] if not group else group if axis else size // group
        self.check_sizes(size, columns, axis, packing)
        return shape, columns, packing

    def check_sizes(self, size: int, columns: int, axis: int, packing: str) -> None:
        """Refuse words and scales that are too many or too few."""
        kind, shifts = HQQ_SHIFTS[packing]
        rows, scales = size // columns, self.by_key["scale"].shape
        words = -(-rows // len(shifts)) * columns
        grid = (rows, 1) if axis else (1, columns)
        if self.by_key["W_q"].nbytes != words * np.dtype(kind).itemsize or scales != self.by_key["zero"].shape:
            self.misshapen()
        if scales != grid and prod(scales) != 1:
            self.misshapen()

    def integers(self, key: str) -> list[int] | None:
        """The numbers of a setting; None where it is not stored."""
        part = self.by_key.get(key)
        if part is None:
            return None
        count = 16 if key == "packing" else 2 if key == "shape" else 1
        if part.dtype not in ("U8", "I32", "I64") or prod(part.shape) > count:
            raise self.refuse(f"has {key} of dtype {part.dtype} and shape {part.shape}; at most {count} integers were expected")
        return [int(n) for n in part.raw().view({"U8": "u1", "I32": "<i4", "I64": "<i8"}[part.dtype])]

    def check(self) -> None:
        for key in ("scale", "zero"):
            if key not in self.by_key:
                raise self.refuse(f"has no {key}; HQQ needs one")
            if self.by_key[key].dtype not in FLOATS or len(self.by_key[key].shape) > MAX_DIMENSIONS:
                self.misshapen()
        for key in ("shape", "packing", "axis"):
            if key not in self.by_key:
                raise self.refuse(f"has no {key}: save it with hqq's safetensors or transformers")

    def dequantise(self) -> np.ndarray:
        shape, columns, packing = self.stated
        kind, shifts = HQQ_SHIFTS[packing]
        words = self.by_key["W_q"].raw().view(kind).reshape(-1, columns)
        mask = (1 << shifts.start - shifts[1] if len(shifts) > 1 else 256) - 1
        w = np.empty((len(shifts), *words.shape), np.float32)
        for codes, shift in zip(w, shifts, strict=True):
            codes[:] = words >> shift & mask
        w = w.reshape(-1, columns)[: prod(shape) // columns]
        w -= self.by_key["zero"].read()
        w *= self.by_key["scale"].read()
        return w.reshape(shape)


# BitNet


def _of_bitnet(stored: Stored, settings: Mapping[str, Any], config: Config) -> Sequence[DequantisedTensor]:
    kind, mode = settings.get("linear_class", "bitlinear"), settings.get("quantization_mode", "offline")
    if kind not in ("bitlinear", "autobitlinear") or (kind == "autobitlinear" and mode != "offline"):
        problem = f"says BitNet of class '{str(kind)[:40]}' and mode '{str(mode)[:40]}'; read are packed weights ('offline')"
        raise CheckpointError(problem, file=config.file)
    return [
        BitNetTensor(name, {"weight": tensor, **scale}, {"multiplies": kind == "autobitlinear"})
        for name, tensor in stored.items()
        if tensor.dtype == "U8" and name.endswith(".weight")
        for scale in [_parts(stored, name.removesuffix(".weight"), ("weight_scale",))]
    ]


class BitNetTensor(DequantisedTensor):
    """Four ternary codes in a byte: the rows of the first quarter in the lowest bits, and so on."""

    dtype = "BitNet ternary"  # type: ignore[assignment]

    @property
    def shape(self) -> tuple[int, ...]:
        rows, inputs = self.by_key["weight"].shape
        return 4 * rows, inputs

    def check(self) -> None:
        if len(self.by_key["weight"].shape) != 2:
            self.misshapen()
        scale = self.by_key.get("weight_scale")
        if scale is None:
            raise self.refuse("has no weight_scale; BitNet ternary needs one")
        if scale.dtype not in FLOATS or prod(scale.shape) != 1:
            self.misshapen()

    def dequantise(self) -> np.ndarray:
        packed, scale = self.by_key["weight"].raw(), self.by_key["weight_scale"].read().reshape(())
        if (packed & packed >> 1 & 0b01010101).any():
            raise self.refuse("holds codes of 3; BitNet's are 0, 1 and 2")
        w = np.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)]).astype(np.float32).reshape(self.shape)
        w -= 1
        return np.multiply(w, scale, out=w) if self.settings["multiplies"] else np.divide(w, scale, out=w)


# torchao

TORCHAO = {"Float8Tensor": FP8, "Int8Tensor": ("I8",), "IntxUnpackedToInt8Tensor": ("I8",)}  # class: dtypes of qdata


def _of_torchao(stored: Stored, settings: Mapping[str, Any], config: Config) -> Sequence[DequantisedTensor]:
    weights = []
    for file in {id(tensor.file): tensor.file for tensor in stored.values()}.values():
        for name, text in file.metadata.items():
            described = parse_json(text.encode(), file=file.path, what=f"metadata of '{name[:100]}' ") if "{" in text else {}
            kind, module, last = described.get("_type"), *name.rpartition(".")[::2]
            if kind is None or kind == "Tensor":
                continue
            if not isinstance(kind, str) or kind not in TORCHAO:
                problem = f"is packed as torchao's '{str(kind)[:40]}', which is not read; read are {', '.join(TORCHAO)}"
                raise CheckpointError(problem, file=file.path, tensor=name)
            values = described.get("_data")
            keys = tuple(f"_{last}_{key}" for key in ("qdata", "scale", "zero_point", "act_pre_scale"))
            parts = {key.removeprefix(f"_{last}_"): part for key, part in _parts(stored, module, keys).items()}
            if "qdata" not in parts:
                raise CheckpointError(f"has no {module}.{keys[0]}; its metadata says {kind}", file=file.path, tensor=name)
            block = values.get("block_size") if isinstance(values, dict) else None
            weights.append(TorchAoTensor(name, parts, {"kind": kind, "block_size": block}))
    return weights


class TorchAoTensor(DequantisedTensor):
    """Integers or FP8 in blocks that share a scale and, of integers, a zero."""

    @property
    def dtype(self) -> str:
        return f"torchao {self.settings['kind'].removesuffix('Tensor')} {self.by_key['qdata'].dtype}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.by_key["qdata"].shape

    def check(self) -> None:
        block, shape = self.settings["block_size"], self.shape
        if self.by_key["qdata"].dtype not in TORCHAO[self.settings["kind"]]:
            raise self.refuse(f"has qdata of dtype {self.by_key['qdata'].dtype}")
        if not isinstance(block, list) or len(block) != len(shape) or not all(type(n) is int and n > 0 for n in block):
            raise self.refuse(f"is in blocks of {str(block)[:80]}, says its metadata, and has shape {shape}")
        scale = self.part("scale", FLOATS, len(shape))
        grid = tuple(size // side for size, side in zip(shape, block, strict=True))
        if scale.shape != grid or any(size % side for size, side in zip(shape, block, strict=True)):
            raise self.refuse(f"has scales of shape {scale.shape}; blocks of {block} of {shape} were expected")
        zero = self.by_key.get("zero_point")
        if zero is not None and (zero.dtype not in ("I8", *FLOATS) or zero.shape != grid):
            self.misshapen()

    def dequantise(self) -> np.ndarray:
        qdata, zero = self.by_key["qdata"], self.by_key.get("zero_point")
        if qdata.dtype in FP8:
            w = decode_fp8(qdata.raw(), qdata.dtype).reshape(self.shape)
        else:
            w = qdata.raw().view(np.int8).reshape(self.shape).astype(np.float32)
        if zero is not None:
            zeros = zero.raw().view(np.int8).astype(np.float32) if zero.dtype == "I8" else zero.read()
            w -= self.spread(zeros.reshape(zero.shape))
        w *= self.spread(self.by_key["scale"].read())
        return w

    def spread(self, values: np.ndarray) -> np.ndarray:
        """A value for each block as one for each weight."""
        for axis, side in enumerate(self.settings["block_size"]):
            values = np.repeat(values, side, axis) if values.shape[axis] > 1 else values
        return values


METHODS: dict[str, Callable[[Stored, Mapping[str, Any], Config], Sequence[DequantisedTensor]]] = {
    "auto-round": _of_auto_round,
    "hqq": _of_hqq,
    "bitnet": _of_bitnet,
    "torchao": _of_torchao,
}
