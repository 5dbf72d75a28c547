"""A safetensors file of any bytes, in the order given."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Raw(NamedTuple):
    dtype: str  # as the format spells it, "BF16"
    shape: tuple[int, ...]
    content: bytes


def raw(array: np.ndarray) -> Raw:
    return Raw(f"F{8 * array.itemsize}", array.shape, array.tobytes())


def write(path: Path, tensors: Mapping[str, Raw]) -> None:
    header, end = {}, 0
    for name, each in tensors.items():
        start, end = end, end + len(each.content)
        header[name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": [start, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    text += b" " * (-len(text) % 8)
    contents = [each.content for each in tensors.values()]
    path.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *contents]))
