"""Safetensors files written by hand, byte for byte, so that no library stands between a test and the format."""

import json
import struct
from pathlib import Path

import numpy as np

NAMES = {"float32": "F32", "float64": "F64", "float16": "F16", "uint8": "U8", "int8": "I8", "int32": "I32"}


def encode(tensors: dict[str, np.ndarray | tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """A file of these arrays; what NumPy has no dtype for is given as (dtype, shape, bytes)."""
    header, body = {}, b""
    for name, tensor in tensors.items():
        if isinstance(tensor, np.ndarray):
            tensor = (NAMES[tensor.dtype.name], tensor.shape, tensor.tobytes())
        dtype, shape, content = tensor
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(content)]}
        body += content
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def write(path: Path, tensors: dict[str, np.ndarray | tuple[str, tuple[int, ...], bytes]]) -> Path:
    path.write_bytes(encode(tensors))
    return path


def write_shards(folder: Path, *shards: dict[str, np.ndarray]) -> Path:
    """A folder of shards and their index, named as the Hub's are."""
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write(folder / name, tensors)
        weight_map.update(dict.fromkeys(tensors, name))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def bfloat16(values: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    """The upper halves of float32 values."""
    upper = (values.astype("<f4").view("<u4") >> 16).astype("<u2")
    return "BF16", values.shape, upper.tobytes()
