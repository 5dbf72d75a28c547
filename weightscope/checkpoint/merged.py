"""Weights with a change of low rank added as they are read: a checkpoint under a LoRA adapter."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from weightscope.checkpoint.tensor import DerivedTensor, StoredTensor, Tensor, WholeTensor

ROWS = 1024  # of a product that are made at a time


@dataclass(frozen=True)
class LowRank:
    """The change s B A to a weight, by its factors.

    Attributes
    ----------
    a, b : Tensor
        (r, in) and (out, r).
    scale : float
    embedding : bool
        The weight is an embedding, whose rows are what A has as columns.
    transposed : bool
        The weight is stored as (in, out).
    """

    a: Tensor
    b: Tensor
    scale: float
    embedding: bool = False
    transposed: bool = False

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight, as it is stored."""
        out, columns = self.b.shape[0], self.a.shape[1]
        return (columns, out) if self.embedding or self.transposed else (out, columns)

    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """float64 (rows, r) and (r, columns) whose product is added to the weight as it is stored."""
        a, b = self.a.read().astype(np.float64), self.scale * self.b.read().astype(np.float64)
        return (a.T, b.T) if self.embedding or self.transposed else (b, a)


@dataclass(frozen=True)
class MergedTensor(DerivedTensor):
    """A weight of the base and the change to it: float32 of their sum in float64, not rounded to what is stored.

    Attributes
    ----------
    stored : Tensor
        The base's.
    change : LowRank
    """

    stored: Tensor
    change: LowRank
    noted: set[str] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.stored.shape != self.change.shape:
            problem = f"is for a weight of shape {self.change.shape}; '{self.stored.name}' has {self.stored.shape}"
            raise self.change.a.refuse(problem)

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return (*self.stored.parts, *self.change.a.parts, *self.change.b.parts)

    def unchecked(self, noted: set[str]) -> Tensor:
        change = replace(self.change, a=self.change.a.unchecked(set()), b=self.change.b.unchecked(set()))
        return replace(self, stored=self.stored.unchecked(set()), change=change, noted=noted)

    def read(self) -> np.ndarray:
        return self._added(self.stored.read(), 0)

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self._added(self.stored.rows(start, stop), start)

    def blocks(self, n_rows: int) -> Iterator[tuple[int, np.ndarray]]:
        for start, block in self.stored.blocks(n_rows):
            yield start, self._added(block, start)

    def _added(self, base: np.ndarray, first: int) -> np.ndarray:
        left, right = self.change.factors()
        total = np.empty(base.shape, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is found and named below
            for start in range(0, len(base), ROWS):
                rows = slice(start, start + ROWS)
                total[rows] = base[rows] + left[first + start : first + start + ROWS][: len(base[rows])] @ right
        return self.check_finite(total, first)


@dataclass(frozen=True)
class ChangeTensor(DerivedTensor, WholeTensor):
    """What was added to a weight, in float64 and without the weight; zeros for one that is as the base has it.

    Attributes
    ----------
    stored : Tensor
        Of the checkpoint under the adapter.
    """

    stored: Tensor
    noted: set[str] | None = field(default=None, compare=False)

    @property
    def dtype(self) -> str:
        return "F64"

    def unchecked(self, noted: set[str]) -> Tensor:
        return replace(self, stored=self.stored.unchecked(set()), noted=noted)

    def read(self) -> np.ndarray:
        if not isinstance(self.stored, MergedTensor):
            return np.zeros(self.shape)
        left, right = self.stored.change.factors()
        return self.check_finite(left @ right)
