"""torchao: (q - zero_point) * scale of its block; metadata name the class of a weight."""

import re
from collections.abc import Mapping

import numpy as np

from weightscope.checkpoint.checkpoint import StoredTensor
from weightscope.checkpoint.config import Config, parse_json
from weightscope.checkpoint.packings.packed import FLOATS, DequantisedTensor, parts_of
from weightscope.checkpoint.packings.scaled import FP8, decode_fp8

# Dtypes of qdata by class.
KINDS = {"Float8Tensor": FP8, "Int8Tensor": ("I8",), "IntxUnpackedToInt8Tensor": ("I8",)}
KEYS = ("qdata", "scale", "zero_point")
PART = re.compile(
    r"(.+)\._([^.]+?)_(qdata|scale|zero_point|scale_and_zero|per_tensor_scale|act_pre_scale)"
)


def find(
    tensor: StoredTensor, stored: Mapping[str, StoredTensor], _: Config
) -> DequantisedTensor | None:
    """The weight of this tensor, if its file's metadata name it and it is the first part."""
    match = PART.fullmatch(tensor.name)
    name = f"{match[1]}.{match[2]}" if match else ""
    if not match or name not in tensor.file.metadata:
        return None
    text = tensor.file.metadata[name].encode()
    metadata = parse_json(text, file=tensor.file.path, what=f"metadata of {name[:100]} ")
    described = Config(metadata, tensor.file.path)
    kind, joint = described.get("_type"), f"._{match[2]}_"
    if not isinstance(kind, str) or kind not in KINDS:
        problem = f"is packed as torchao's '{str(kind)[:40]}', which is not read"
        raise tensor.refuse(f"{problem}; read are {', '.join(KINDS)}")
    if match[3] == "qdata":
        by_key = parts_of(match[1], stored, *KEYS, joint=joint)
        stated = described.get("_tensor_data_names")
        missing = ["scale"]
        if isinstance(stated, list):
            missing = [key for key in stated if key in KEYS and key not in by_key]
        if missing:
            raise tensor.refuse(f"has no {missing[0]}, which the metadata of {name} list")
        settings = {"kind": kind, "block_size": described.inside("_data").get("block_size")}
        return TorchAoTensor(name, by_key, Config(settings, tensor.file.path))
    if f"{match[1]}{joint}qdata" not in stored:
        raise tensor.refuse("has no qdata; torchao's weights need one")
    return None


class TorchAoTensor(DequantisedTensor):
    """Integers or FP8 in blocks that share a scale and, if integers, a zero."""

    @property
    def dtype(self) -> str:
        kind = self.settings["kind"].removesuffix("Tensor")
        return f"torchao {kind} {self.by_key['qdata'].dtype}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.by_key["qdata"].shape

    def check(self) -> None:
        block, shape = self.settings["block_size"], self.shape
        if self.by_key["qdata"].dtype not in KINDS[self.settings["kind"]]:
            raise self.refuse(f"has qdata of dtype {self.by_key['qdata'].dtype}")
        fits = isinstance(block, list) and len(block) == len(shape)
        if not fits or not all(type(n) is int and n > 0 for n in block):
            problem = f"is in blocks of {str(block)[:80]}, says its metadata"
            raise self.refuse(f"{problem}, and has shape {shape}")
        scale = self.part("scale", FLOATS, len(shape))
        grid = tuple(size // side for size, side in zip(shape, block, strict=True))
        is_whole = shape == tuple(n * side for n, side in zip(grid, block, strict=True))
        if scale.shape != grid or not is_whole:
            problem = f"has scales of shape {scale.shape}"
            raise self.refuse(f"{problem}; blocks of {block} of {shape} were expected")
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
            if zero.dtype == "I8":
                zeros = zero.raw().view(np.int8).astype(np.float32)
            else:
                zeros = zero.read()
            w -= self.spread(zeros.reshape(zero.shape))
        w *= self.spread(self.by_key["scale"].read())
        return w

    def spread(self, values: np.ndarray) -> np.ndarray:
        """A value for each block as one for each weight."""
        for axis, side in enumerate(self.settings["block_size"]):
            values = np.repeat(values, side, axis) if values.shape[axis] > 1 else values
        return values
