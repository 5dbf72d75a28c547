"""One tensor in two checkpoints: counterparts by key, and blocks of the values of both."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from weightscope.checkpoint.blocks import Block, batches, blocks_of, row_width
from weightscope.checkpoint.checkpoint import Checkpoint, Tensor
from weightscope.heads.tensors.measure import why_unread
from weightscope.model.metrics.spectra import evenly_spread
from weightscope.model.rows.names import ConvertedTensor
from weightscope.pairs.deeds.deed import What

AT_ONCE = 1 << 16  # values computed with at once: what is made of them fits in a core's cache
SAMPLED_ROWS = 32  # rows of a matrix that are searched for a cast, a grid or a copy

Part = tuple["Pair", int, int]  # values [start, stop) of a pair


@dataclass(frozen=True)
class Pair:
    """A tensor and its counterpart; of a resized one, the rows that both have."""

    a: Tensor
    b: Tensor
    role: str = ""
    paired_by: str = ""  # "role" or "name"
    part: str = ""  # its role and place, where a file has it as a part of another tensor

    @property
    def names(self) -> tuple[str, str]:
        """Its names in both."""
        return self.a.name, self.b.name

    @property
    def is_converted(self) -> bool:
        """True if either is converted from how it is stored; it is then read whole."""
        return isinstance(self.a, ConvertedTensor) or isinstance(self.b, ConvertedTensor)

    @property
    def problem(self) -> What | None:
        """Why they cannot be compared; None where at most the number of rows differs."""
        a, b = self.a.shape, self.b.shape
        resized = len(a) == len(b) > 1 and a[1:] == b[1:] and 0 not in a + b
        if a != b and not resized:
            return What.RESHAPED
        return What.UNREAD if why_unread(self.a) or why_unread(self.b) else None

    def blocks(self) -> Iterator["Part"]:
        """Values [start, stop) of both, in the blocks of the one that has fewer."""
        common = min(prod(self.a.shape), prod(self.b.shape))
        for block in min(blocks_of(self.a), blocks_of(self.b), key=len):
            if block.start < common or not common:
                yield self, block.start, min(block.stop, common)

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Values [start, stop) of both, in their common dtype."""
        x, y = (Block(tensor, start, stop).values() for tensor in (self.a, self.b))
        common = np.result_type(x, y)
        return x.astype(common, copy=False), y.astype(common, copy=False)

    @property
    def is_stack(self) -> bool:
        """True for a stack of matrices, as experts are."""
        return len(self.a.shape) == 3

    @property
    def sides(self) -> tuple[bool, ...]:
        """The ways to see it as one matrix, turned or not: a stack's may share rows or columns."""
        return (False, True) if self.is_stack else (False,)

    def flat(self, turned: bool = False) -> tuple[int, int]:
        """The shape of the one matrix."""
        width = self.a.shape[-2 if turned else -1]
        return prod(self.a.shape) // width, width

    def pairs(self, turned: bool = False) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Blocks of rows of both; `turned`, of a stack whose matrices are transposed."""
        if turned:
            size = prod(self.a.shape[-2:])
            for start in range(0, prod(self.a.shape), size):
                x, y = self.read(start, start + size)
                yield x.reshape(self.a.shape[-2:]).T, y.reshape(self.a.shape[-2:]).T
            return
        for _, start, stop in self.blocks():
            x, y = self.read(start, stop)
            yield x.reshape(-1, self.a.shape[-1]), y.reshape(-1, self.a.shape[-1])

    def rows(self, turned: bool = False) -> Iterator[np.ndarray]:
        """The change, B - A, in blocks of rows, in float64."""
        for x, y in self.pairs(turned):
            yield y.astype(np.float64) - x


def few_rows_each(size: int, width: int) -> Iterator[slice]:
    """Slices of a block, a few rows each; one slice where rows are not whole."""
    step = max(1, AT_ONCE // width) * width if width and size % width == 0 else size
    yield from (slice(start, start + step) for start in range(0, size, step or 1))


def first_rows_of(part: Part) -> Part:
    """The first few rows of a block; all of one that is read whole."""
    pair, start, stop = part
    rows = next(few_rows_each(stop - start, row_width(pair.a.shape)), slice(0, 0))
    if 0 in (pair.a.piece, pair.b.piece):
        return part
    return pair, start, min(start + rows.stop, stop)


class Paired(NamedTuple):
    """The tensors that two checkpoints share, and those that only one of them has."""

    pairs: list[Pair]
    only_a: list[Tensor]
    only_b: list[Tensor]


def pair_up(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Paired:
    """Tensors with the same key are counterparts."""
    pairs = [Pair(tensor, b[key], paired_by="name") for key, tensor in a.items() if key in b]
    return Paired(
        pairs, [a[key] for key in a if key not in b], [b[key] for key in b if key not in a]
    )


def blocks_of_pairs(a: Checkpoint, b: Checkpoint, pairs: Sequence[Pair]) -> Iterator[Part]:
    """The blocks of all pairs; a server is asked for many at once."""
    for batch in batches(pairs, lambda pair: pair.a.nbytes + pair.b.nbytes):
        a.prefetch(pair.a.name for pair in batch)
        b.prefetch(pair.b.name for pair in batch)
        for pair in batch:
            yield from pair.blocks()


def first_rows(tensor: Tensor, most: int) -> np.ndarray:
    """At most this many of the first rows, (n, width) as stored."""
    width = row_width(tensor.shape) or prod(tensor.shape) or 1
    return Block(tensor, 0, min(prod(tensor.shape), most * width)).values().reshape(-1, width)


def whole(tensor: Tensor) -> np.ndarray:
    """All rows; a matrix in its own shape."""
    rows = first_rows(tensor, prod(tensor.shape))
    return rows.reshape(tensor.shape) if len(tensor.shape) == 2 else rows


def sample_rows(tensor: Tensor) -> list[np.ndarray]:
    """Evenly spread rows of a matrix, and columns if it has two axes: (n, width) float32 each."""
    rows = whole(tensor).astype(np.float32)
    sides = [rows, rows.T] if len(tensor.shape) == 2 else [rows]
    return [side[evenly_spread(len(side), SAMPLED_ROWS)] for side in sides]
