"""A few sums of a tensor with fixed signs: they estimate how far a copy is, without the original.

A sum of an error E with random signs has the mean 0 and the variance |E|^2, so the mean square of
the differences of 16 sums is |B - A|^2 within 35 % (Alon, Matias and Szegedy, 1996).
"""

from functools import cache
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from weightscope.pairs.deeds.change import TELLING
from weightscope.pairs.identity.wsid import BF16

SUMS = 16
WIDTH = 1024  # values that share the sign of their row
AT_ONCE = 64  # rows that are made and summed together
UNIT = 1000  # sums are kept in thousandths of the norm


class Sketch(NamedTuple):
    """The norm of a tensor, and its sums in thousandths of the norm."""

    norm: float
    sums: tuple[int, ...]

    def distance(self, other: "Sketch") -> float:
        """The estimated |B - A| over |A|, at least what norms that differ show; A is this one."""
        mine, others = (np.array(each.sums, float) * each.norm for each in (self, other))
        distance = float(np.sqrt(np.mean(np.square(others - mine)))) / UNIT
        distance = max(distance, abs(other.norm - self.norm))
        return distance / self.norm if self.norm else float(other.norm > 0)


class Sketching:
    """A sketch in the making."""

    def __init__(self) -> None:
        self.place, self.squares = 0, 0.0
        self.first = np.zeros(0)  # values that nearly always show whether they were rounded
        self.sums = np.zeros(SUMS)

    def add(self, block: np.ndarray) -> np.ndarray:
        """Add the next values in row-major order; the same block comes back."""
        flat = np.ravel(block)
        start = 0
        if not self.place:
            self.first = _wide(flat[:TELLING])
        while start < flat.size:
            lead = self.place % WIDTH
            stop = start + AT_ONCE * WIDTH - lead
            values = _wide(flat[start:stop])
            row = self.place // WIDTH
            self.squares += float(values @ values)
            n_rows = -(-(lead + values.size) // WIDTH)
            if lead or values.size % WIDTH:
                values = np.pad(values, (lead, n_rows * WIDTH - lead - values.size))
            by_row = values.reshape(n_rows, WIDTH) @ _of_columns()
            self.sums += np.einsum("rs,rs->s", by_row, _of_rows(row, n_rows), dtype=np.float64)
            self.place += min(stop, flat.size) - start
            start = stop
        return block

    @property
    def sketch(self) -> Sketch | None:
        """The sketch; None where values are not finite."""
        norm = float(np.sqrt(self.squares))
        if not np.isfinite(self.sums).all() or not np.isfinite(norm):
            return None
        sums = np.rint(UNIT * self.sums / norm) if norm else self.sums
        return Sketch(norm, tuple(map(int, sums)))


def _wide(values: np.ndarray) -> np.ndarray:
    if values.dtype == BF16:
        bits = values["bf16"].astype("<u4")
        bits <<= 16
        return bits.view("<f4")
    return values.astype("<f4", copy=False)


@cache
def _of_columns() -> np.ndarray:
    """A sign for each place in a row and each sum, (WIDTH, SUMS): bits of SHA-256."""
    stream = b"".join(sha256(f"column {i}".encode()).digest() for i in range(WIDTH * SUMS // 256))
    return _signs(stream).reshape(WIDTH, SUMS)


@cache
def _of_some_rows(part: int) -> np.ndarray:
    """Signs of rows 16 * part to 16 * part + 15, (16, SUMS)."""
    return _signs(sha256(f"row {part}".encode()).digest()).reshape(16, SUMS)


def _of_rows(start: int, count: int) -> np.ndarray:
    first = start // 16
    parts = [_of_some_rows(part) for part in range(first, (start + count - 1) // 16 + 1)]
    return np.concatenate(parts)[start - 16 * first :][:count]


def _signs(stream: bytes) -> np.ndarray:
    return 1 - 2 * np.unpackbits(np.frombuffer(stream, np.uint8)).astype(np.float32)
