"""gpt-oss: stacked experts in MXFP4, two values in a byte, a scale for each 32, transposed."""

from collections.abc import Mapping

import numpy as np

from weightscope.checkpoint.checkpoint import StoredTensor
from weightscope.checkpoint.config import Config
from weightscope.checkpoint.packings.fp4 import E2M1, MX_BLOCK
from weightscope.checkpoint.packings.packed import DequantisedTensor, unpacked
from weightscope.checkpoint.packings.scaled import decode_exponents

BLOCKS, SCALES = "_blocks", "_scales"


def find(
    tensor: StoredTensor, stored: Mapping[str, StoredTensor], settings: Config
) -> DequantisedTensor | None:
    """The weight of this tensor of blocks."""
    if not tensor.name.endswith(BLOCKS) or tensor.dtype != "U8":
        return None
    name = tensor.name.removesuffix(BLOCKS)
    scales = {"scales": stored[name + SCALES]} if name + SCALES in stored else {}
    return Mxfp4Tensor(name, {"blocks": tensor, **scales}, settings)


class Mxfp4Tensor(DequantisedTensor):
    """Experts (E, out, n_blocks, 16 bytes) as transformers keeps them: (E, in, out)."""

    dtype = "MXFP4"  # type: ignore[assignment]

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, n_blocks, size = self.by_key["blocks"].shape
        return experts, n_blocks * size * 2, outputs

    def check(self) -> None:
        blocks, scales = self.part("blocks", ("U8",), 4), self.part("scales", ("U8",), 3)
        if scales.shape != blocks.shape[:3] or blocks.shape[3] * 2 != MX_BLOCK:
            self.misshapen()

    def dequantise(self) -> np.ndarray:
        scales, blocks = self.by_key["scales"], self.by_key["blocks"]
        experts, inputs, outputs = self.shape
        s, packed = scales.raw().reshape(scales.shape), blocks.raw().reshape(*blocks.shape[:2], -1)
        w = np.empty((experts, inputs, outputs), np.float32)
        for expert, codes, exponents in zip(w, packed, s, strict=True):
            values = unpacked(codes.reshape(-1), E2M1).reshape(outputs, -1, MX_BLOCK)
            values *= decode_exponents(exponents)[:, :, None]
            expert[:] = values.reshape(outputs, inputs).T
        return w
