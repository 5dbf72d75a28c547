"""A few sums of a tensor with fixed signs: they estimate how far a copy is, without the original.

A quarter of the values is summed: the first 1,024 of each 4,096. A sum of an error E with random
signs has the mean 0 and the variance |E|^2, so the mean square of the differences of 16 sums is
|B - A|^2 within 35 % (Alon, Matias and Szegedy, 1996).
"""

from functools import cache
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from weightscope.core.compute.half import Half
from weightscope.pairs.identity.wsid import BF16

SUMS = 16
WIDTH = 1024  # values that share the sign of their row
GROUP = 4 * WIDTH  # values; the first WIDTH are a row
AT_ONCE = 16  # rows that are summed together
UNIT = 1000  # sums are kept in thousandths of the norm


class Sketch(NamedTuple):
    """The norm of a tensor, and its sums in thousandths of the norm."""

    norm: float
    sums: tuple[int, ...]

    def distance(self, copy: "Sketch") -> float:
        """The estimated |B - A| over |A|, at least what the norms show; A is this one."""
        mine, theirs = (np.array(each.sums, float) * each.norm for each in (self, copy))
        distance = float(np.sqrt(np.mean(np.square(theirs - mine)))) / UNIT
        distance = max(distance, abs(copy.norm - self.norm))
        return distance / self.norm if self.norm else float(copy.norm > 0)


class Sketching:
    """A sketch in the making."""

    def __init__(self) -> None:
        self.n_rows, self.squares = 0, 0.0
        self.sums = np.zeros(SUMS)
        self.left = np.empty(0, np.float32)  # values after the last whole group

    def add(self, block: np.ndarray) -> np.ndarray:
        """Add the next values in row-major order; the same block comes back."""
        flat = np.ravel(block)
        start = min(flat.size, -len(self.left) % GROUP)
        if start:
            self.left = np.concatenate([self.left.astype(flat.dtype), flat[:start]])
        if len(self.left) == GROUP:
            self._sum(self.left[None])
            self.left = flat[:0]
        stop = start + (flat.size - start) // GROUP * GROUP
        for first in range(start, stop, AT_ONCE * GROUP):
            self._sum(flat[first : min(first + AT_ONCE * GROUP, stop)].reshape(-1, GROUP))
        if stop < flat.size:
            self.left = flat[stop:]
        return block

    def _sum(self, groups: np.ndarray) -> None:
        rows = _wide(groups[:, :WIDTH])
        row_signs = _of_rows(self.n_rows, len(rows))
        by_row = rows @ _of_columns()[: rows.shape[1]]
        self.squares += float(np.vdot(rows, rows))
        self.sums += np.einsum("rs,rs->s", by_row, row_signs, dtype=np.float64)
        self.n_rows += len(rows)

    def finished(self) -> Sketch | None:
        """The sketch; None where values are not finite."""
        if len(self.left):
            self._sum(self.left[None])
        norm = float(np.sqrt(self.squares))
        if not np.isfinite(self.sums).all() or not np.isfinite(norm):
            return None
        sums = np.rint(UNIT * self.sums / norm) if norm else self.sums
        return Sketch(float(f"{norm:.6g}"), tuple(map(int, sums)))


def _wide(rows: np.ndarray) -> np.ndarray:
    if rows.dtype == BF16:
        return np.asarray(Half(rows["bf16"]))
    return np.ascontiguousarray(rows, "<f4")


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
