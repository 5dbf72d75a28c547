"""All values of tensors in blocks of bounded size."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TypeVar

import numpy as np

from weightscope.checkpoint.checkpoint import Checkpoint, StoredTensor, Tensor
from weightscope.checkpoint.gguf import GgufTensor
from weightscope.checkpoint.packings.scaled import FP8, decode_fp8

BLOCK = 1 << 20  # values of a block: 4 MB as float32, which the cores' caches hold
SHORT = 16  # values; a shorter last axis is joined with the axes before it to make a row
AHEAD = 64 << 20  # bytes requested from a server at once
NATIVE = {
    "F64": "<f8", "BOOL": "u1", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4",
    "I32": "<i4", "U64": "<u8", "I64": "<i8",
}  # fmt: skip

Item = TypeVar("Item")


@dataclass(frozen=True)
class Block:
    """Values [start, stop) of a tensor in storage order, not yet read; whole rows if possible."""

    tensor: Tensor
    start: int
    stop: int

    def values(self) -> np.ndarray:
        """Values, finite or not, in their own type where NumPy has it -> (stop - start,)."""
        tensor, size = self.tensor.unchecked(set()), prod(self.tensor.shape)
        if isinstance(tensor, StoredTensor):
            start = self.start * tensor.nbytes // max(size, 1)
            stop = self.stop * tensor.nbytes // max(size, 1)
            return _native(tensor, tensor.raw(start, stop))
        if not tensor.piece:
            return tensor.read().reshape(-1)[self.start : self.stop]
        width = size // tensor.shape[0]
        return tensor.rows(self.start // width, self.stop // width).reshape(-1)


def _native(tensor: StoredTensor, raw: np.ndarray) -> np.ndarray:
    """Stored bytes as numbers of their own type where NumPy has it, else as float32."""
    if tensor.dtype in NATIVE:
        return raw.view(NATIVE[tensor.dtype])
    if tensor.dtype in (*FP8, "F8_E8M0") and not isinstance(tensor, GgufTensor):
        return decode_fp8(raw, tensor.dtype)
    tensor.check_readable()
    return tensor.decode(raw)


def streamed(checkpoint: Checkpoint, names: Iterable[str]) -> Iterator[Block]:
    """The blocks of these tensors in order, fetched from a server in few, large requests."""
    for batch in batches(names, lambda name: checkpoint[name].nbytes):
        checkpoint.prefetch(batch)
        for name in batch:
            yield from blocks_of(checkpoint[name])


def blocks_of(tensor: Tensor) -> list[Block]:
    """A tensor's blocks in order; one block if its rows are not stored together (GPTQ, AWQ ...)."""
    size = prod(tensor.shape)
    if not size or not tensor.piece:
        return [Block(tensor, 0, size)]
    if isinstance(tensor, StoredTensor):
        width = row_width(tensor.shape)
    else:
        width = size // tensor.shape[0] * tensor.piece
    step = max(1, BLOCK // width) * width if width else BLOCK
    return [Block(tensor, start, stop) for start, stop in pairwise([*range(0, size, step), size])]


def row_width(shape: tuple[int, ...]) -> int:
    """Values per row of a tensor; 0 for a vector, or where rows are longer than a block.

    Examples
    --------
    >>> row_width((50257, 768)), row_width((768, 3, 4, 4)), row_width((768,))
    (768, 16, 0)
    """
    width = 1
    for size in reversed(shape[1:]):
        width *= size
        if width >= SHORT:
            break
    return width if 1 < width <= BLOCK and 0 not in shape else 0


def batches(
    items: Iterable[Item], size: Callable[[Item], int], enough: int = AHEAD
) -> Iterator[list[Item]]:
    """Items in order, in lists whose sizes add up to about `enough`."""
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= enough:
            yield batch
            batch, total = [], 0
    yield batch
