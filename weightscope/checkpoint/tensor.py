"""Tensors: known by the header of their file, read on demand, always as finite float32."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from weightscope.checkpoint.header import Storage, TensorEntry, check_readable, decode, half
from weightscope.compute.half import Weights
from weightscope.errors import CheckpointError


class Tensor(ABC):
    """One tensor of a checkpoint. Reading refuses NaN and infinity with the name and place of the first."""

    name: str
    file: Storage  # of its first part
    noted: set[str] | None  # see `unchecked`; None: NaN and infinity are refused

    @property
    @abstractmethod
    def dtype(self) -> str: ...

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @property
    @abstractmethod
    def parts(self) -> "tuple[StoredTensor, ...]":
        """The stored tensors: itself, or what a quantised or derived tensor is made of."""

    @property
    def nbytes(self) -> int:
        """Bytes in its file."""
        return sum(part.entry.stop - part.entry.start for part in self.parts)

    @abstractmethod
    def read(self) -> np.ndarray:
        """The whole tensor as float32."""

    def weights(self) -> Weights:
        """As `read`, but F16 and BF16 stay at 16 bits per weight."""
        return self.read()

    @abstractmethod
    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) along the first axis as float32."""

    @abstractmethod
    def blocks(self, n_rows: int) -> Iterator[tuple[int, np.ndarray]]:
        """Blocks of at most `n_rows` rows in order, each with the index of its first row."""

    @abstractmethod
    def unchecked(self, noted: set[str]) -> "Tensor":
        """The same tensor, but NaN and infinity are read, and the tensor's name is added to `noted`."""

    def ends(self) -> "tuple[Tensor, Tensor, int] | None":
        """The first and the last value that each value's stored block can hold, and how many lie evenly between them,
        both included; None where no such blocks are stored.
        """
        return None

    def refuse(self, problem: str) -> CheckpointError:
        """An error about this tensor, to raise."""
        return CheckpointError(problem, file=self.file.path, tensor=self.name)

    def check_rows(self, start: int, stop: int) -> None:
        """Refuse rows out of range."""
        if not self.shape:
            raise self.refuse("is a scalar; it has no rows")
        if not 0 <= start <= stop <= self.shape[0]:
            raise self.refuse(f"has {self.shape[0]} rows; rows {start} to {stop} were asked for")

    def check_finite(self, block: np.ndarray, first_row: int = 0) -> np.ndarray:
        """The block, unless it has NaN or infinity; the error says how many and where the first is."""
        with np.errstate(invalid="ignore", over="ignore"):
            if np.isfinite(block.sum(dtype=np.float64)):  # one cheap pass; the place is looked for only if needed
                return block
        nonfinite = np.argwhere(~np.isfinite(block))
        if len(nonfinite) and self.noted is not None:
            self.noted.add(self.name)
        elif len(nonfinite):
            first = tuple(map(int, nonfinite[0]))
            index = (first[0] + first_row, *first[1:]) if first else ()
            raise self.refuse(f"holds {len(nonfinite)} values that are not finite, the first {block[first]} at {index}")
        return block


class WholeTensor(Tensor):
    """A tensor whose rows are not stored together, so that a few rows cost as much as all of them."""

    def rows(self, start: int, stop: int) -> np.ndarray:
        self.check_rows(start, stop)
        return self.read()[start:stop]

    def blocks(self, n_rows: int) -> Iterator[tuple[int, np.ndarray]]:
        self.check_rows(0, 0)
        rows = self.read()
        for start in range(0, len(rows), n_rows):
            yield start, rows[start : start + n_rows]


class DerivedTensor(Tensor):
    """A tensor computed from a stored one as it is read; name, file, dtype and shape are the stored one's."""

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
    """A tensor that is not quantised."""

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
        """The stored bytes as uint8, or bytes [start, stop) of them."""
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
        weights = self.check_finite(self.decode(raw).reshape(self.shape))
        return weights if kept is None else kept.reshape(self.shape)

    def rows(self, start: int, stop: int) -> np.ndarray:
        self.check_readable()
        self.check_rows(start, stop)
        row_bytes = self.nbytes // max(self.shape[0], 1)
        raw = self.raw(start * row_bytes, stop * row_bytes)
        return self.check_finite(self.decode(raw).reshape(stop - start, *self.shape[1:]), start)

    def blocks(self, n_rows: int) -> Iterator[tuple[int, np.ndarray]]:
        self.check_readable()
        self.check_rows(0, 0)
        if not self.nbytes:  # there may be very many empty rows
            yield 0, self.read()
            return
        self.file.prefetch([self.entry])
        for start in range(0, self.shape[0], n_rows):
            yield start, self.rows(start, min(start + n_rows, self.shape[0]))

    def check_readable(self) -> None:
        """Refuse a dtype that cannot hold weights, before a byte is read or fetched."""
        try:
            check_readable(self.dtype)
        except CheckpointError as error:
            raise self.refuse(str(error)) from None

    def decode(self, raw: np.ndarray) -> np.ndarray:
        """Stored bytes of whole rows as float32, flat."""
        return decode(raw, self.dtype)
