"""A checkpoint: named tensors in one or more files, read on demand, always as finite float32."""

import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any

import numpy as np

from weightscope.checkpoint.config import Config
from weightscope.checkpoint.formats import ADAPTER, ADAPTER_WEIGHTS, SAFETENSORS
from weightscope.checkpoint.storage import Storage, TensorEntry, check_readable, decode, half
from weightscope.core.compute.half import Weights
from weightscope.core.errors import CheckpointError, counted, printable


class Tensor(ABC):
    """One tensor of a checkpoint. Reading refuses NaN and infinity, naming the first's place."""

    name: str
    file: Storage  # the first part's
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
        """`read`, but F16 and BF16 stay at 16 bits per weight."""
        return self.read()

    @abstractmethod
    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) along the first axis as float32."""

    def blocks(self, n_rows: int) -> Iterator[tuple[int, np.ndarray]]:
        """Blocks of at most `n_rows` rows in order, each with the index of its first row."""
        self.check_rows(0, 0)
        for start in range(0, self.shape[0], n_rows):
            yield start, self.rows(start, min(start + n_rows, self.shape[0]))

    @abstractmethod
    def unchecked(self, noted: set[str]) -> "Tensor":
        """A copy that reads NaN and infinity, and adds its name to `noted` if there is any."""

    def ends(self) -> "tuple[Tensor, Tensor, int | tuple[float, ...]] | None":
        """The first and last value that each stored block can hold, and the levels between them.

        Levels are a number where they are even, else their places; None without such blocks.

        Where the last axis of the first two is shorter than the tensor's, neighbours share one of
        their values.
        """
        return None

    def refuse(self, problem: str) -> CheckpointError:
        """An error about this tensor, to raise."""
        return CheckpointError(problem, file=self.file.path, tensor=self.name)

    @property
    def piece(self) -> int:
        """Rows that are read together at least; 0 for all."""
        return 1

    def check_rows(self, start: int, stop: int) -> None:
        """Refuse rows out of range."""
        if not self.shape:
            raise self.refuse("is a scalar; it has no rows")
        if not 0 <= start <= stop <= self.shape[0]:
            raise self.refuse(f"has {self.shape[0]} rows; rows {start} to {stop} were asked for")

    def check_finite(self, block: np.ndarray, first_row: int = 0) -> np.ndarray:
        """The block, unless it has NaN or infinity; the error counts them and gives a place."""
        with np.errstate(invalid="ignore", over="ignore"):
            if np.isfinite(block.sum(dtype=np.float64)):  # one cheap pass; places only if needed
                return block
        nonfinite = np.argwhere(~np.isfinite(block))
        if len(nonfinite) and self.noted is not None:
            self.noted.add(self.name)
        elif len(nonfinite):
            first = tuple(map(int, nonfinite[0]))
            index = (first[0] + first_row, *first[1:]) if first else ()
            are = "is" if len(nonfinite) == 1 else "are"
            held = f"{counted(len(nonfinite), 'value')} that {are} not finite"
            raise self.refuse(f"holds {held}, the first {block[first]} at {index}")
        return block


class WholeTensor(Tensor):
    """A tensor whose rows are not stored together: a few cost as much as all of them."""

    @property
    def piece(self) -> int:
        return 0

    def rows(self, start: int, stop: int) -> np.ndarray:
        self.check_rows(start, stop)
        return self.read()[start:stop]

    def blocks(self, n_rows: int) -> Iterator[tuple[int, np.ndarray]]:
        self.check_rows(0, 0)
        rows = self.read()
        for start in range(0, len(rows), n_rows):
            yield start, rows[start : start + n_rows]


@dataclass(frozen=True, eq=False)
class DerivedTensor(Tensor):
    """A tensor computed from a stored one as it is read, with its name, file and shape."""

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

    @property
    def noted(self) -> set[str] | None:  # type: ignore[override]
        return self.stored.noted

    def unchecked(self, noted: set[str]) -> Tensor:
        return replace(self, stored=self.stored.unchecked(noted))


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
        """The stored bytes as uint8, or bytes [start, stop)."""
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
        yield from super().blocks(n_rows)

    def check_readable(self) -> None:
        """Refuse a dtype that cannot hold weights, before a byte is read or fetched."""
        try:
            check_readable(self.dtype)
        except CheckpointError as error:
            raise self.refuse(str(error)) from None

    def decode(self, raw: np.ndarray) -> np.ndarray:
        """Stored bytes of whole rows as float32, flat."""
        return decode(raw, self.dtype)


# A checkpoint

# Names of a model's weights; an optimizer's state or training's arguments are none.
WEIGHTS = re.compile(
    r".*\.(safetensors|gguf)|.*(model|consolidated)[^/]*\.(bin|pth?|ckpt|h5|msgpack|onnx)", re.ASCII
)
NAMED = 4  # files in a sentence


@dataclass(frozen=True)
class WeightFiles:
    """Weight files of a folder: which were read, and which were not."""

    read: str = ""  # a file, or an index
    shards: tuple[str, ...] = ()  # the files of that index
    loaded: str = ""  # the file that transformers loads; empty where it would find nothing
    names: Collection[str] = field(default=(), repr=False)  # every file there
    # Tensors by a file that holds them, while the index takes them from a later one
    stale: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)

    @cached_property
    def unread(self) -> tuple[str, ...]:
        """Weight files that were not read: safetensors first, subfolders last."""
        files = {name for name in self.names if WEIGHTS.fullmatch(name)} | {self.loaded}
        files -= {self.read, *self.shards, ""}

        def order(name: str) -> tuple[int, bool, str]:
            return name.count("/"), not name.endswith(SAFETENSORS), name

        return tuple(sorted(files, key=order))

    @property
    def added(self) -> str:
        """The adapter that transformers adds where PEFT is installed; empty without one."""
        has_adapter = {ADAPTER, ADAPTER_WEIGHTS, "config.json"} <= {*self.names}
        return ADAPTER_WEIGHTS if has_adapter else ""

    @property
    def is_other(self) -> bool:
        """True if transformers loads other weights than were read."""
        return bool(self.added) or self.loaded not in ("", self.read)

    @property
    def sentence(self) -> str:
        """Files that were read and files that were not; empty if all were read."""
        return " ".join(filter(None, (self._beside, self._stale)))

    @property
    def _stale(self) -> str:
        """Tensors of its files that the index replaces; empty where it replaces none."""
        if not self.stale:
            return ""
        parts = []
        for file, names in self.stale.items():
            example = printable(names[0]) + " ..." * (len(names) > 1)
            parts.append(f"{counted(len(names), 'tensor')} of {printable(file)} ({example})")
        are = "is" if sum(map(len, self.stale.values())) == 1 else "are"
        return f"{', '.join(parts)} {are} stale: the index has another file for each."

    @property
    def _beside(self) -> str:
        if not self.unread:
            return ""
        names = ", ".join(map(printable, self.unread[:NAMED]))
        more = f" and {len(self.unread) - NAMED} more" if len(self.unread) > NAMED else ""
        loads = ", as transformers does"
        if self.added:
            loads = f"; with PEFT installed, transformers adds {self.added} to it"
        elif not self.loaded:
            loads = "; transformers would find no weights"
        elif self.loaded != self.read:
            loads = f"; transformers loads {printable(self.loaded)}"
        read = f"Weights were read from {printable(self.read)}{loads}."
        return f"{read} Not read, in the same place: {names}{more}."

    @property
    def telling(self) -> tuple[str, ...]:
        """Files that could be taken for this model's weights, and those stale in part."""
        rivals = (name for name in self.unread if name.endswith(SAFETENSORS) or name == self.loaded)
        return (*rivals, *self.stale)


class Checkpoint(Mapping[str, Tensor]):
    """Tensors by name and a config. Quantised weights are read under their former names."""

    noted: set[str] | None = None  # if unchecked: tensors with NaN or infinity read so far
    note: str = ""  # one sentence on how it was put together; empty where it is as stored
    given: str = ""  # its name as a person typed it: a path or repository
    weight_files: WeightFiles = WeightFiles()
    stored_names: Mapping[str, str] = MappingProxyType({})  # names in the file that differ here

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
    def is_gguf(self) -> bool:
        """True if llama.cpp's converter wrote it: names and settings are ggml's."""
        return bool(self.files) and self.files[0].path.suffix == ".gguf"

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.values())

    def with_config(self, values: dict[str, Any]) -> "Checkpoint":
        """A copy with another config."""
        same = copy(self)
        same.config = Config(values, self.config.file, stored=self.config.stored)
        return same

    def with_tensors(self, replaced: Mapping[str, Tensor]) -> "Checkpoint":
        """A copy with some tensors replaced."""
        same = copy(self)
        same._tensors = {**self._tensors, **replaced}
        return same

    def unchecked(self) -> "Checkpoint":
        """A copy that reads NaN and infinity; names of tensors with any go to `noted`."""
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
        """The part of those bytes that is not on this machine; 0 for a local checkpoint."""
        return sum(file.bytes_to_fetch(entries) for file, entries in self._by_file(names))

    def prefetch(self, names: Iterable[str]) -> None:
        """Fetch these tensors in few, large, concurrent requests; skip unknown names.

        Reading fetches one tensor at a time; callers that know what they will read ask for all of
        it here.
        """
        for file, entries in self._by_file(names):
            file.prefetch(entries)

    @contextmanager
    def prefetching(self, names: Iterable[str]) -> Iterator[None]:
        """Fetch these tensors while the block runs; an error comes up when they are read."""

        def fetch() -> None:
            with suppress(CheckpointError):
                self.prefetch(names)

        thread = Thread(target=fetch, daemon=True)
        thread.start()
        yield
        thread.join()

    def _parts(self, names: Iterable[str]) -> list[StoredTensor]:
        tensors = (self._tensors[name] for name in dict.fromkeys(names) if name in self._tensors)
        return [part for tensor in tensors for part in tensor.parts]

    def _by_file(self, names: Iterable[str]) -> list[tuple[Storage, list[TensorEntry]]]:
        entries: dict[int, list[TensorEntry]] = {id(file): [] for file in self.files}
        for part in self._parts(names):
            entries[id(part.file)].append(part.entry)
        return [(file, entries[id(file)]) for file in self.files if entries[id(file)]]
