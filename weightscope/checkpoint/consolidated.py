"""Meta's files of a model in parallel parts, consolidated.00.safetensors and so on, as one.

Each file has a part of each matrix and a copy of each vector. Which way a matrix was split is by
its name (fairscale's ColumnParallelLinear splits rows as they are stored, RowParallelLinear
columns); the embeddings' way is by their shape: Llama 1 and 2 split columns, Llama 3 rows.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from weightscope.checkpoint.checkpoint import StoredTensor, Tensor
from weightscope.checkpoint.storage import Storage
from weightscope.core.compute.half import Half, Weights
from weightscope.core.errors import CheckpointError

NAME = re.compile(r"consolidated\.\d\d\.safetensors", re.ASCII)
ROWS, COLUMNS = 0, 1
AXES = {
    **dict.fromkeys(("attention.wq", "attention.wk", "attention.wv", "output"), ROWS),
    **dict.fromkeys(("feed_forward.w1", "feed_forward.w3"), ROWS),
    **dict.fromkeys(("attention.wo", "feed_forward.w2"), COLUMNS),
}
EMBEDDINGS = "tok_embeddings.weight"
LAYER = re.compile(r"layers\.\d+\.")


def are_parts(names: Collection[str]) -> bool:
    """True if these files are two or more parts of one model."""
    return len(names) > 1 and all(map(NAME.fullmatch, names))


def check_numbers(names: Sequence[str], where: object) -> None:
    """Refuse parts with a gap; shapes show that the last ones are missing."""
    for number, name in enumerate(sorted(names)):
        if not name.startswith(expected := f"consolidated.{number:02d}."):
            missing = expected + name.rpartition(".")[2]
            raise CheckpointError(f"has {name}, and no {missing} before it", file=where)


def joined(files: Sequence[Storage]) -> dict[str, Tensor]:
    """All tensors; refused where the files' parts do not belong together."""
    tensors: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for file in files for name in file.tensors):
        lacking = [file for file in files if name not in file.tensors]
        if lacking:
            problem = f"is not in {lacking[0].path.name}; every part of a model has its part of it"
            held = next(file for file in files if name in file.tensors)
            raise CheckpointError(problem, file=held.path, tensor=name)
        stored = tuple(StoredTensor(name, file.tensors[name], file) for file in files)
        for part in stored[1:]:
            if (part.dtype, part.shape) != (stored[0].dtype, stored[0].shape):
                expected = f"{stored[0].dtype} {stored[0].shape} in {stored[0].file.path.name}"
                raise part.refuse(f"is {part.dtype} {part.shape}, and {expected}")
        tensors[name] = JoinedTensor(name, stored, _axis(stored[0]))
    return tensors


def _axis(part: StoredTensor) -> int | None:
    """The axis along which a matrix was split; None of a vector, which each file has."""
    if len(part.shape) < 2:
        return None
    if part.name == EMBEDDINGS:
        norm = part.file.tensors.get("norm.weight")
        is_whole = norm is None or part.shape[1:] == norm.shape
        return ROWS if is_whole else COLUMNS
    module = LAYER.sub("", part.name.removesuffix(".weight"), count=1)
    if len(part.shape) > 2 or module not in AXES:
        raise part.refuse("is in every part of the model, and nothing says how they are joined")
    return AXES[module]


@dataclass(frozen=True, eq=False)
class JoinedTensor(Tensor):
    """A tensor whose parts are in several files, joined as they are read."""

    name: str
    stored: tuple[StoredTensor, ...]
    axis: int | None  # None: each file has all of it
    noted: set[str] | None = field(default=None, compare=False)

    @property
    def file(self) -> Storage:  # type: ignore[override]
        return self.stored[0].file

    @property
    def dtype(self) -> str:
        return self.stored[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        shape = [*self.stored[0].shape]
        if self.axis is not None:
            shape[self.axis] *= len(self.stored)
        return tuple(shape)

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return self.stored

    def unchecked(self, noted: set[str]) -> Tensor:
        return replace(self, noted=noted)

    def _copy(self) -> StoredTensor:
        """The first of equal copies."""
        first, *copies = self.stored
        for copy in copies:
            if not np.array_equal(first.raw(), copy.raw()):
                problem = f"differs from its copy in {first.file.path.name}"
                raise copy.refuse(f"{problem}; all parts of a model have the same vectors")
        return first

    def read(self) -> np.ndarray:
        return self.rows(0, self.shape[0]) if self.shape else self._rows(0, 0)

    def rows(self, start: int, stop: int) -> np.ndarray:
        self.check_rows(start, stop)
        return self._rows(start, stop)

    def _rows(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop), read part by part into their places; a scalar has none."""
        if self.axis is None:
            part = self._copy().unchecked(set())
            return self.check_finite(part.rows(start, stop) if self.shape else part.read(), start)
        w = np.empty((stop - start, *self.shape[1:]), np.float32)
        size = self.stored[0].shape[self.axis]
        for i, stored in enumerate(self.stored):
            part, first = stored.unchecked(set()), i * size
            if self.axis == COLUMNS:
                w[:, first : first + size] = part.rows(start, stop)
            elif (low := max(start, first)) < (high := min(stop, first + size)):
                w[low - start : high - start] = part.rows(low - first, high - first)
        return self.check_finite(w, start)

    def weights(self) -> Weights:
        if self.axis is None:
            return self.read()
        weights = [part.unchecked(set()).weights() for part in self.stored]
        halves = [each.stored for each in weights if isinstance(each, Half)]
        if len(halves) < len(weights):
            return self.read()
        kept = Half(np.concatenate(halves, axis=self.axis))
        if not kept.is_finite():
            self.check_finite(np.asarray(kept))
        return kept
