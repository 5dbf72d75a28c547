"""bitsandbytes: nf4 and fp4 by a table of 16 values, int8 by rows."""

from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from weightscope.checkpoint.checkpoint import StoredTensor
from weightscope.checkpoint.config import Config, parse_json
from weightscope.checkpoint.packings.packed import FLOATS, DequantisedTensor, parts_of
from weightscope.checkpoint.storage import MAX_DIMENSIONS

BNB_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")


def find(
    tensor: StoredTensor, stored: Mapping[str, StoredTensor], settings: Config
) -> DequantisedTensor | None:
    """The weight of this tensor, if it has the scales of bitsandbytes."""
    name = tensor.name
    if f"{name}.absmax" in stored:
        keys = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", *BNB_STATES)
        return Bnb4Tensor(name, {"weight": tensor, **parts_of(name, stored, *keys)}, settings)
    module = name.removesuffix(".weight")
    if tensor.dtype == "I8" and module != name and f"{module}.SCB" in stored:
        parts = parts_of(module, stored, "SCB", "weight_format")
        return Bnb8Tensor(name, {"weight": tensor, **parts}, settings)
    return None


def blockwise(codes: np.ndarray, table: np.ndarray, absmax: np.ndarray, block: int) -> np.ndarray:
    """table[code] * absmax of its block of the flat tensor: codes (n,), table (16,) -> (n,)."""
    values = table[codes]
    end = len(values) // block * block  # end of the full blocks; `block` may exceed the tensor
    values[:end].reshape(end // block, block)[:] *= absmax[: end // block, None]
    values[end:] *= absmax[-1:]
    return values


def high_nibble_first(packed: np.ndarray) -> np.ndarray:
    """Two four-bit codes per byte, as bitsandbytes stores them: (n,) -> (2 n,)."""
    return np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)


class Bnb4Tensor(DequantisedTensor):
    """bitsandbytes nf4 or fp4: codes into a table of 16, a (quantised) scale per block."""

    @property
    def dtype(self) -> str:
        return f"bitsandbytes {'nf4' if BNB_STATES[0] in self.by_key else 'fp4'}"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.state["shape"])

    @cached_property
    def state(self) -> dict[str, Any]:
        """Shape and block sizes, stored as JSON in a tensor; read when first needed."""
        part = self.by_key[next(key for key in BNB_STATES if key in self.by_key)]
        text, what = part.raw().tobytes(), f"quant_state of {self.name} "
        state = parse_json(text, file=part.file.path, what=what)

        def is_size(number: Any) -> bool:
            return type(number) is int and 0 < number < 2**40

        shape, blocks = state.get("shape"), [state.get("blocksize")]
        if "nested_absmax" in self.by_key:
            blocks.append(state.get("nested_blocksize"))
            if type(state.get("nested_offset")) not in {int, float}:
                raise self.refuse("has a quant_state without a number for nested_offset")
        stated = f"shape {str(shape)[:80]} and block sizes {str(blocks)[:80]}"
        if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
            raise self.refuse(f"has a quant_state of {stated}")
        if not all(map(is_size, [*shape, *blocks])):
            raise self.refuse(f"has a quant_state of {stated}")
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
            problem = f"has dtype {self.by_key['weight'].dtype}"
            raise self.refuse(f"{problem}; {self.dtype} is only read from U8")
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
        table = self.by_key["quant_map"].read()
        return blockwise(codes, table, self.absmax(), state["blocksize"]).reshape(self.shape)

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
        layout = self.by_key.get("weight_format")
        if layout is not None and layout.raw().any():  # 0: row by row
            problem = "is int8 in a GPU's layout, not row by row"
            raise self.refuse(f"{problem}; save it again with a newer bitsandbytes")
        w = self.by_key["weight"].raw().view(np.int8).reshape(self.shape).astype(np.float32)
        w *= (self.by_key["SCB"].read() / 127)[:, None]
        return w
