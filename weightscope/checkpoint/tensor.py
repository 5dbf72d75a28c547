"""A tensor that is known by its header and read when asked for."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from weightscope.checkpoint.dtypes import BITS, decode
from weightscope.checkpoint.header import TensorEntry
from weightscope.checkpoint.local import LocalFile
from weightscope.errors import CheckpointError


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint, not yet read.

    Attributes
    ----------
    name, dtype : str
    shape : tuple of int
    """

    name: str
    entry: TensorEntry
    file: LocalFile

    @property
    def dtype(self) -> str:
        return self.entry.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def nbytes(self) -> int:
        return self.entry.stop - self.entry.start

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) along the first axis as float32; a view of the file where it holds float32.

        Raises
        ------
        CheckpointError
            The dtype is not a plain float, or a value read is NaN or infinite.
        """
        if not self.shape:
            raise CheckpointError("is a scalar; it has no rows", file=self.file.path, tensor=self.name)
        row_shape = self.shape[1:]
        row_bytes = prod(row_shape) * BITS[self.dtype] // 8
        raw = self.file.bytes_of(self.entry, start * row_bytes, stop * row_bytes)
        try:
            block = decode(raw, self.dtype).reshape(stop - start, *row_shape)
        except CheckpointError as error:
            raise CheckpointError(str(error), file=self.file.path, tensor=self.name) from None
        if not np.isfinite(block.sum(dtype=np.float64)):  # one cheap pass; located only when there is something to say
            self._refuse_if_not_finite(block, start)
        return block

    def _refuse_if_not_finite(self, block: np.ndarray, first_row: int) -> None:
        broken = np.argwhere(~np.isfinite(block))
        if len(broken):
            at = (int(broken[0][0]) + first_row, *map(int, broken[0][1:]))
            value = block[tuple(broken[0])]
            problem = f"holds {len(broken)} values that are not finite, the first {value} at {at}"
            raise CheckpointError(problem, file=self.file.path, tensor=self.name)

    def read(self) -> np.ndarray:
        """The whole tensor as float32, of its own shape; see `rows`."""
        return self.rows(0, self.shape[0])

    def blocks(self, n_rows: int) -> Iterator[tuple[int, np.ndarray]]:
        """Row blocks in order, each with the index of its first row; pages already passed are given back."""
        for start in range(0, self.shape[0], n_rows):
            yield start, self.rows(start, min(start + n_rows, self.shape[0]))
        self.file.forget(self.entry)
