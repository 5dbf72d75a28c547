"""Every value of a checkpoint once, in blocks of bounded size, whatever a tensor's dtype and size."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TypeVar

import numpy as np

from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.checkpoint.dequantise import decode_fp8
from weightscope.checkpoint.gguf_file import GgufTensor
from weightscope.checkpoint.tensor import StoredTensor, Tensor, WholeTensor

BLOCK = 1 << 20  # values of a block: 4 MB as float32, which the cores' caches hold
SHORT = 16  # values: where a tensor's last axis has fewer, a row runs along the last axes together
AHEAD = 64 << 20  # bytes that are asked of a server at once
FP8 = ("F8_E4M3", "F8_E5M2", "F8_E8M0")
NATIVE = {
    "F64": "<f8", "BOOL": "u1", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4",
    "U64": "<u8", "I64": "<i8",
}  # fmt: skip


def row_width(shape: tuple[int, ...]) -> int:
    """Values of a row of a tensor; 0 where it has no rows worth judging: a vector, or rows longer than a block.

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


Item = TypeVar("Item")


@dataclass(frozen=True)
class Block:
    """Values [start, stop) of a tensor, counted in the order in which they are stored; unread.

    A block holds whole rows where the tensor has rows (see `row_width`).

    Attributes
    ----------
    tensor : Tensor
    start, stop : int
    """

    tensor: Tensor
    start: int
    stop: int

    def values(self) -> np.ndarray:
        """The values as they are, finite or not: float32, float64 where they are stored so, integers as integers.

        Returns
        -------
        (stop - start,) array

        Raises
        ------
        CheckpointError
            They cannot be read, or are of a dtype whose values are not known.
        """
        tensor, size = self.tensor.unchecked(set()), prod(self.tensor.shape)
        if isinstance(tensor, StoredTensor):
            return _native(tensor, tensor.raw(*(at * tensor.nbytes // max(size, 1) for at in (self.start, self.stop))))
        if isinstance(tensor, WholeTensor):
            return tensor.read().reshape(-1)[self.start : self.stop]
        row = size // tensor.shape[0]
        return tensor.rows(self.start // row, self.stop // row).reshape(-1)


def _native(tensor: StoredTensor, raw: np.ndarray) -> np.ndarray:
    """Stored bytes as the numbers they are."""
    if tensor.dtype in NATIVE:
        return raw.view(NATIVE[tensor.dtype])
    if tensor.dtype in FP8 and not isinstance(tensor, GgufTensor):
        return decode_fp8(raw, tensor.dtype)
    tensor.check_readable()
    return tensor.decode(raw)


def blocks_of(tensor: Tensor) -> list[Block]:
    """A tensor's blocks in order: one of it all where its rows are not kept together (GPTQ, AWQ, bitsandbytes, ...)."""
    size = prod(tensor.shape)
    if not size or isinstance(tensor, WholeTensor):
        return [Block(tensor, 0, size)]
    whole = row_width(tensor.shape) if isinstance(tensor, StoredTensor) else size // tensor.shape[0]
    step = max(1, BLOCK // whole) * whole if whole else BLOCK
    return [Block(tensor, start, stop) for start, stop in pairwise([*range(0, size, step), size])]


def streamed(checkpoint: Checkpoint, names: Iterable[str]) -> Iterator[Block]:
    """The blocks of these tensors in order; those of a file on a server come in few, large requests."""
    for batch in batches(names, lambda name: checkpoint[name].nbytes):
        checkpoint.prefetch(batch)
        for name in batch:
            yield from blocks_of(checkpoint[name])


def batches(items: Iterable[Item], size: Callable[[Item], int], enough: int = AHEAD) -> Iterator[list[Item]]:
    """Items in order, in lists of about as much as is enough; of bytes, what is worth one request to a server."""
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= enough:
            yield batch
            batch, total = [], 0
    yield batch
