"""HQQ: (code - zero) * scale, in groups of the flattened weight; settings are tensors too."""

from collections.abc import Mapping
from functools import cached_property
from math import prod

import numpy as np

from weightscope.checkpoint.checkpoint import StoredTensor
from weightscope.checkpoint.config import Config
from weightscope.checkpoint.packings.packed import FLOATS, DequantisedTensor, parts_of
from weightscope.core.errors import printable

# NumPy's type of a word, bits of a code, and codes in a word, by `packing`. The highest bits hold
# the first part of the rows. 3bit_32 leaves two bits free, and fills the last words with zeros.
WORDS = {
    "8bit_u8": ("u1", 8, 1),
    "4bit_u8": ("u1", 4, 2),
    "3bit_32": ("<u4", 3, 10),
    "2bit_u8": ("u1", 2, 4),
    "1bit_u8": ("u1", 1, 8),
}
# Most integers of each setting.
SETTINGS = {
    "shape": 2, "axis": 1, "packing": 16, "group_size": 1, "quant_scale": 1, "quant_zero": 1,
}  # fmt: skip
PARTS = (
    "scale", "zero", "shape", "axis", "group_size", "packing", "nbits", "quant_scale",
    "quant_zero", "unpack_view_dtype", "view_as_float", "compute_dtype", "offload_meta",
    "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip


def find(
    tensor: StoredTensor, stored: Mapping[str, StoredTensor], _: Config
) -> DequantisedTensor | None:
    """The weight of this tensor, if it is a `W_q`; HQQ's writer leaves config.json as it was."""
    if not tensor.name.endswith(".W_q"):
        return None
    module = tensor.name.removesuffix(".W_q")
    by_key = {"W_q": tensor, **parts_of(module, stored, *PARTS)}
    return HqqTensor(f"{module}.weight", by_key, Config({}, ""))


class HqqTensor(DequantisedTensor):
    """Rows (axis 1) or columns (axis 0) of groups; settings are tensors, read when needed."""

    dtype = "HQQ"  # type: ignore[assignment]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stated[0]

    @cached_property
    def stated(self) -> tuple[tuple[int, ...], int, str]:
        """The weight's shape, the columns of the grouped matrix, and the packing."""
        read = {key: self.integers(key, most) for key, most in SETTINGS.items()}
        shape = tuple(read["shape"])
        packing = bytes(n & 255 for n in read["packing"]).decode("ascii", "replace")
        if packing not in WORDS:
            raise self.refuse(f"is packed as '{printable(packing)}'; read are {', '.join(WORDS)}")
        if len(shape) != 2 or not all(0 < size < 2**40 for size in shape):
            raise self.refuse(f"has a stored shape {str(shape)[:80]}; two sizes were expected")
        if any(read["quant_scale"]) or any(read["quant_zero"]):
            problem = "has scales or zeros that are quantised themselves, which is not read"
            raise self.refuse(problem)
        (axis,), size = read["axis"] or (-1,), prod(shape)
        (group,) = read["group_size"] or (0,)
        if axis not in (0, 1) or group < 0 or (group and size % group):
            problem = f"is in groups of {group} along axis {axis}"
            raise self.refuse(f"{problem}, which a weight of shape {shape} has not")
        columns = shape[1]
        if group:
            columns = group if axis else size // group
        self.check_sizes(size, columns, axis, packing)
        return shape, columns, packing

    def check_sizes(self, size: int, columns: int, axis: int, packing: str) -> None:
        """Refuse words and scales that are too many or too few."""
        kind, _, per_word = WORDS[packing]
        rows, scales = size // columns, self.by_key["scale"].shape
        words = -(-rows // per_word) * columns
        grid = (rows, 1) if axis else (1, columns)
        if self.by_key["W_q"].nbytes != words * np.dtype(kind).itemsize:
            self.misshapen()
        if scales != self.by_key["zero"].shape:
            self.misshapen()
        if scales != grid and prod(scales) != 1:
            self.misshapen()

    def integers(self, key: str, most: int) -> list[int]:
        """The numbers of a setting; none where it is not stored."""
        part = self.by_key.get(key)
        if part is None:
            return []
        if part.dtype not in ("U8", "I32", "I64") or prod(part.shape) > most:
            problem = f"has {key} of dtype {part.dtype} and shape {part.shape}"
            raise self.refuse(f"{problem}; at most {most} integers were expected")
        kind = {"U8": "u1", "I32": "<i4", "I64": "<i8"}[part.dtype]
        return [int(n) for n in part.raw().view(kind)]

    def check(self) -> None:
        for key in ("scale", "zero"):
            if key not in self.by_key:
                raise self.refuse(f"has no {key}; HQQ needs one")
            if self.by_key[key].dtype not in FLOATS or len(self.by_key[key].shape) != 2:
                self.misshapen()
        for key in ("shape", "packing", "axis"):
            if key not in self.by_key:
                raise self.refuse(f"has no {key}: save it with hqq's safetensors or transformers")

    def codes(self) -> tuple[int, int, int]:
        return 0, 0xFF, 1 << WORDS[self.stated[2]][1]

    def dequantise(self) -> np.ndarray:
        shape, columns, packing = self.stated
        kind, bits, per_word = WORDS[packing]
        words = self.by_key["W_q"].raw().view(kind).reshape(-1, columns)
        w = np.empty((per_word, *words.shape), np.float32)
        for i in range(per_word):
            w[i] = words >> bits * (per_word - 1 - i) & (1 << bits) - 1
        w = w.reshape(-1, columns)[: prod(shape) // columns]
        w -= self.by_key["zero"].read()
        w *= self.by_key["scale"].read()
        return w.reshape(shape)
