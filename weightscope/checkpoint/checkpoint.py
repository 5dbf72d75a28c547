"""A checkpoint: named tensors in one or more files, read on demand; and all of its values in blocks of bounded size."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise, takewhile
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from weightscope.checkpoint.beside import Beside
from weightscope.checkpoint.config import Config
from weightscope.checkpoint.gguf import GgufTensor
from weightscope.checkpoint.header import Storage, TensorEntry
from weightscope.checkpoint.quantised import decode_fp8
from weightscope.checkpoint.tensor import StoredTensor, Tensor, WholeTensor

BLOCK = 1 << 20  # values of a block: 4 MB as float32, which the cores' caches hold
SHORT = 16  # values: a last axis shorter than this is joined with the axes before it to make a row
AHEAD = 64 << 20  # bytes requested from a server at once
FP8 = ("F8_E4M3", "F8_E5M2", "F8_E8M0")
NATIVE = {
    "F64": "<f8", "BOOL": "u1", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4",
    "U64": "<u8", "I64": "<i8",
}  # fmt: skip

Item = TypeVar("Item")


class Checkpoint(Mapping[str, Tensor]):
    """Tensors by name and a config. Quantised weights have the names they had before and read dequantised."""

    noted: set[str] | None = None  # of an unchecked checkpoint: names of tensors with NaN or infinity read so far
    note: str = ""  # one sentence on how it was put together; empty where it is as stored
    given: str = ""  # what a person called it: a path or repository as typed
    beside: Beside = Beside()  # the weight files next to its own

    def __init__(
        self,
        folder: Path,  # where config.json and the tokenizer are
        files: Sequence[Storage],
        tensors: Mapping[str, Tensor],
        config: Config,  # config.json, or the keys of a GGUF file; empty where there is none
        name: str,  # in messages
    ) -> None:
        self.folder, self.files, self.config, self.name = folder, files, config, name
        self._tensors, self._in_order = tensors, sorted(tensors)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        return tensor if self.noted is None else tensor.unchecked(self.noted)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def names_under(self, prefix: str) -> list[str]:
        """The names that begin with `prefix`, sorted, found by bisection."""
        start = bisect_left(self._in_order, prefix)
        from_start = (self._in_order[i] for i in range(start, len(self._in_order)))
        return list(takewhile(lambda name: name.startswith(prefix), from_start))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.values())

    def with_config(self, values: dict[str, Any]) -> "Checkpoint":
        """The same tensors with another config."""
        same = copy(self)
        same.config = Config(values, self.config.file, stored=self.config.stored)
        return same

    def unchecked(self) -> "Checkpoint":
        """The same checkpoint, but NaN and infinity are read, and names of tensors with any go to `noted`."""
        same = copy(self)
        same.noted = set()
        return same

    @property
    def bytes_fetched(self) -> int:
        """Bytes fetched over a network so far, headers included; 0 for a local checkpoint."""
        return sum(file.bytes_fetched for file in self.files)

    def bytes_to_read(self, names: Iterable[str]) -> int:
        """Stored bytes of these tensors; unknown names count 0."""
        return sum(part.nbytes for part in self._parts(names))

    def bytes_to_fetch(self, names: Iterable[str]) -> int:
        """How many of those bytes are not on this machine yet; 0 for a local checkpoint."""
        return sum(file.bytes_to_fetch(entries) for file, entries in self._by_file(names))

    def prefetch(self, names: Iterable[str]) -> None:
        """Fetch these tensors in few, large, concurrent requests; unknown names are skipped, as reading reports them.

        Reading fetches one tensor at a time; callers that know what they will read ask for all of it here.
        """
        for file, entries in self._by_file(names):
            file.prefetch(entries)

    def _parts(self, names: Iterable[str]) -> list[StoredTensor]:
        tensors = (self._tensors[name] for name in dict.fromkeys(names) if name in self._tensors)
        return [part for tensor in tensors for part in tensor.parts]

    def _by_file(self, names: Iterable[str]) -> list[tuple[Storage, list[TensorEntry]]]:
        entries: dict[int, list[TensorEntry]] = {id(file): [] for file in self.files}
        for part in self._parts(names):
            entries[id(part.file)].append(part.entry)
        return [(file, entries[id(file)]) for file in self.files if entries[id(file)]]


# All values in blocks


@dataclass(frozen=True)
class Block:
    """Values [start, stop) of a tensor in storage order, not yet read; whole rows where the tensor has rows."""

    tensor: Tensor
    start: int
    stop: int

    def values(self) -> np.ndarray:
        """The values, finite or not: float32, float64 if stored so, integers as integers -> (stop - start,)."""
        tensor, size = self.tensor.unchecked(set()), prod(self.tensor.shape)
        if isinstance(tensor, StoredTensor):
            start, stop = (index * tensor.nbytes // max(size, 1) for index in (self.start, self.stop))
            return _native(tensor, tensor.raw(start, stop))
        if isinstance(tensor, WholeTensor):
            return tensor.read().reshape(-1)[self.start : self.stop]
        width = size // tensor.shape[0]
        return tensor.rows(self.start // width, self.stop // width).reshape(-1)


def _native(tensor: StoredTensor, raw: np.ndarray) -> np.ndarray:
    """Stored bytes as numbers of their own type where NumPy has it, else as float32."""
    if tensor.dtype in NATIVE:
        return raw.view(NATIVE[tensor.dtype])
    if tensor.dtype in FP8 and not isinstance(tensor, GgufTensor):
        return decode_fp8(raw, tensor.dtype)
    tensor.check_readable()
    return tensor.decode(raw)


def streamed(checkpoint: Checkpoint, names: Iterable[str]) -> Iterator[Block]:
    """The blocks of these tensors in order; those on a server are fetched in few, large requests."""
    for batch in batches(names, lambda name: checkpoint[name].nbytes):
        checkpoint.prefetch(batch)
        for name in batch:
            yield from blocks_of(checkpoint[name])


def blocks_of(tensor: Tensor) -> list[Block]:
    """A tensor's blocks in order; a single one if its rows are not stored together (GPTQ, AWQ, bitsandbytes, ...)."""
    size = prod(tensor.shape)
    if not size or isinstance(tensor, WholeTensor):
        return [Block(tensor, 0, size)]
    width = row_width(tensor.shape) if isinstance(tensor, StoredTensor) else size // tensor.shape[0]
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


def batches(items: Iterable[Item], size: Callable[[Item], int], enough: int = AHEAD) -> Iterator[list[Item]]:
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
