"""A tensor that is known by its header and read when asked for."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from weightscope.checkpoint.dtypes import check_readable, decode, half
from weightscope.checkpoint.header import TensorEntry
from weightscope.checkpoint.storage import Storage
from weightscope.errors import CheckpointError
from weightscope.half import Weights


class Tensor(ABC):
    """One tensor of a checkpoint, not yet read.

    Attributes
    ----------
    name, dtype : str
    shape : tuple of int
    file : Storage
        The file it lies in, or the one with its first part.
    noted : set of str or None
        None: values that are not finite are refused. Otherwise they are handed over, and the tensor's name is put here.
    """

    name: str
    file: Storage
    noted: set[str] | None

    @property
    @abstractmethod
    def dtype(self) -> str: ...

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @property
    @abstractmethod
    def parts(self) -> "tuple[StoredTensor, ...]":
        """The tensors as they are stored: itself, or what a quantised one is put together from."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in its file."""
        return sum(part.entry.stop - part.entry.start for part in self.parts)

    @abstractmethod
    def read(self) -> np.ndarray:
        """The whole tensor as float32, of its own shape.

        Raises
        ------
        CheckpointError
            The dtype is not one that can be read as weights, or a value is NaN or infinite.
        """

    def weights(self) -> Weights:
        """The whole tensor as `read` gives it, but 16 bits a weight where it is stored so; errors as for `read`."""
        return self.read()

    @abstractmethod
    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) along the first axis as float32; errors as for `read`."""

    @abstractmethod
    def blocks(self, n_rows: int) -> Iterator[tuple[int, np.ndarray]]:
        """Blocks of at most `n_rows` rows in order, each with the index of its first row; errors as for `read`."""

    @abstractmethod
    def unchecked(self, noted: set[str]) -> "Tensor":
        """The same tensor, read as it is: NaN and infinity are handed over, and its name goes to `noted`."""

    def refuse(self, problem: str) -> CheckpointError:
        """The error that says `problem` of this tensor."""
        return CheckpointError(problem, file=self.file.path, tensor=self.name)

    def check_rows(self, start: int, stop: int) -> None:
        """Refuse rows that are not there."""
        if not self.shape:
            raise self.refuse("is a scalar; it has no rows")
        if not 0 <= start <= stop <= self.shape[0]:
            raise self.refuse(f"has {self.shape[0]} rows; rows {start} to {stop} were asked for")

    def check_finite(self, block: np.ndarray, first_row: int = 0) -> np.ndarray:
        """The block, unless something in it is NaN or infinite; the message says where the first is."""
        with np.errstate(invalid="ignore", over="ignore"):
            if np.isfinite(block.sum(dtype=np.float64)):  # one cheap pass; located only when there is something to say
                return block
        broken = np.argwhere(~np.isfinite(block))
        if len(broken) and self.noted is not None:
            self.noted.add(self.name)
        elif len(broken):
            first = tuple(map(int, broken[0]))
            at = (first[0] + first_row, *first[1:]) if first else ()
            raise self.refuse(f"holds {len(broken)} values that are not finite, the first {block[first]} at {at}")
        return block


class WholeTensor(Tensor):
    """A tensor whose rows are not kept together, so that some of them cost as much as all."""

    def rows(self, start: int, stop: int) -> np.ndarray:
        self.check_rows(start, stop)
        return self.read()[start:stop]

    def blocks(self, n_rows: int) -> Iterator[tuple[int, np.ndarray]]:
        self.check_rows(0, 0)
        whole = self.read()
        for start in range(0, len(whole), n_rows):
            yield start, whole[start : start + n_rows]


class DerivedTensor(Tensor):
    """What is made of a stored tensor as it is read, under its name; its dtype and shape too unless a subclass differs.

    Attributes
    ----------
    stored : Tensor
    """

    stored: Tensor

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.stored.name

    @property
    def file(self) -> Storage:  # type: ignore[override]
        return self.stored.file

    @property
    def dtype(self) -> str:
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def parts(self) -> "tuple[StoredTensor, ...]":
        return self.stored.parts


@dataclass(frozen=True)
class StoredTensor(Tensor):
    """A tensor that is stored as it is."""

    name: str
    entry: TensorEntry
    file: Storage
    noted: set[str] | None = field(default=None, compare=False)

    @property
    def dtype(self) -> str:
        return self.entry.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def parts(self) -> "tuple[StoredTensor, ...]":
        return (self,)

    def unchecked(self, noted: set[str]) -> Tensor:
        return replace(self, noted=noted)

    def raw(self, start: int | None = None, stop: int | None = None) -> np.ndarray:
        """The stored bytes, or bytes [start, stop) of them, as uint8."""
        return self.file.bytes_of(self.entry, start or 0, self.nbytes if stop is None else stop)

    def read(self) -> np.ndarray:
        self.check_readable()
        return self.check_finite(self.decode(self.raw()).reshape(self.shape))

    def weights(self) -> Weights:
        self.check_readable()
        raw = self.raw()
        kept = half(raw, self.dtype)
        if kept is not None and kept.is_finite():
            return kept.reshape(self.shape)
        whole = self.check_finite(self.decode(raw).reshape(self.shape))
        return whole if kept is None else kept.reshape(self.shape)

    def rows(self, start: int, stop: int) -> np.ndarray:
        self.check_readable()
        self.check_rows(start, stop)
        row_bytes = self.nbytes // max(self.shape[0], 1)
        raw = self.raw(start * row_bytes, stop * row_bytes)
        return self.check_finite(self.decode(raw).reshape(stop - start, *self.shape[1:]), start)

    def blocks(self, n_rows: int) -> Iterator[tuple[int, np.ndarray]]:
        self.check_readable()
        self.check_rows(0, 0)
        if not self.nbytes:  # rows of nothing may be many
            yield 0, self.read()
            return
        self.file.prefetch([self.entry])
        for start in range(0, self.shape[0], n_rows):
            yield start, self.rows(start, min(start + n_rows, self.shape[0]))

    def check_readable(self) -> None:
        """Refuse a dtype that does not hold weights, before a byte is read or fetched."""
        try:
            check_readable(self.dtype)
        except CheckpointError as error:
            raise self.refuse(str(error)) from None

    def decode(self, raw: np.ndarray) -> np.ndarray:
        """Stored bytes of whole rows as float32, flat."""
        return decode(raw, self.dtype)
