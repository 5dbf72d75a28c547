"""BitNet as transformers packs it: ternary codes, two bits each, and one scale."""

from collections.abc import Mapping
from math import prod

import numpy as np

from weightscope.checkpoint.checkpoint import StoredTensor
from weightscope.checkpoint.config import Config
from weightscope.checkpoint.packings.packed import FLOATS, DequantisedTensor, parts_of
from weightscope.core.errors import CheckpointError

DIVIDES, MULTIPLIES = "bitlinear", "autobitlinear"  # linear_class, by its use of the scale


def check(settings: Config) -> None:
    """Refuse weights that are made ternary as the model runs: those stored differ."""
    kind, mode = _kind(settings), settings.get("quantization_mode") or "offline"
    if kind not in (DIVIDES, MULTIPLIES) or (kind == MULTIPLIES and mode != "offline"):
        problem = f"says BitNet of class '{str(kind)[:40]}' and mode '{str(mode)[:40]}'"
        known = "packed weights, of mode 'offline'"
        raise CheckpointError(f"{problem}; read are {known}", file=settings.file)


def _kind(settings: Config) -> str:
    return settings.get("linear_class") or DIVIDES


def find(
    tensor: StoredTensor, stored: Mapping[str, StoredTensor], settings: Config
) -> DequantisedTensor | None:
    """The weight of this tensor, if it is packed."""
    if tensor.dtype != "U8" or not tensor.name.endswith(".weight"):
        return None
    by_key = {"weight": tensor, **parts_of(tensor.name, stored, "scale", joint="_")}
    return BitNetTensor(tensor.name, by_key, settings)


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
        scale = self.by_key.get("scale")
        if scale is None:
            raise self.refuse("has no weight_scale; BitNet ternary needs one")
        if scale.dtype not in FLOATS or prod(scale.shape) != 1:
            self.misshapen()

    def dequantise(self) -> np.ndarray:
        packed, scale = self.by_key["weight"].raw(), self.by_key["scale"].read().reshape(())
        if (packed & packed >> 1 & 0b01010101).any():
            raise self.refuse("holds codes of 3; BitNet's are 0, 1 and 2")
        codes = np.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)])
        w = codes.astype(np.float32).reshape(self.shape)
        w -= 1
        apply: np.ufunc = np.multiply if _kind(self.settings) == MULTIPLIES else np.divide
        with np.errstate(divide="ignore"):  # by a hostile scale of 0; the caller checks the result
            apply(w, scale, out=w)
        return w
