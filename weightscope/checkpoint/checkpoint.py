"""A checkpoint: named tensors over one or more files, wherever those lie."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import takewhile
from pathlib import Path
from typing import Any

from weightscope.checkpoint.config import Config
from weightscope.checkpoint.header import TensorEntry
from weightscope.checkpoint.storage import Storage
from weightscope.checkpoint.tensor import StoredTensor, Tensor


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, and its config; nothing is read until a tensor is.

    A quantised weight is there under the name it had, and reads as what its parts amount to.

    Parameters
    ----------
    folder : Path
        Where config.json and the tokenizer are looked for.
    files : sequence of Storage
        The shards.
    tensors : dict of Tensor
        By name, over those files.
    config : Config
        config.json as it stands, or empty where there is none; the keys of a GGUF file.
    name : str
        How to call the checkpoint in messages.

    Attributes
    ----------
    noted : set of str or None
        Of an unchecked checkpoint the names of tensors in which NaN or infinity has been read; None where such values
        are refused.
    note : str
        What a person should know of how it is put together, in a sentence; empty where it is as it is stored.
    """

    def __init__(
        self, folder: Path, files: Sequence[Storage], tensors: Mapping[str, Tensor], config: Config, name: str
    ) -> None:
        self.folder, self.files, self.config, self.name = folder, files, config, name
        self.noted: set[str] | None = None
        self.note = ""
        self._tensors, self._in_order = tensors, sorted(tensors)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        return tensor if self.noted is None else tensor.unchecked(self.noted)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def names_under(self, prefix: str) -> list[str]:
        """The names that begin with `prefix`, in order, without a look at the others."""
        start = bisect_left(self._in_order, prefix)
        from_there = (self._in_order[i] for i in range(start, len(self._in_order)))
        return list(takewhile(lambda name: name.startswith(prefix), from_there))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.values())

    def with_config(self, values: dict[str, Any]) -> "Checkpoint":
        """The same tensors under another config."""
        return Checkpoint(self.folder, self.files, self._tensors, Config(values, self.config.file), self.name)

    def unchecked(self) -> "Checkpoint":
        """The same checkpoint, its tensors read as they are: NaN and infinity are handed over, and noted."""
        same = copy(self)
        same.noted = set()
        return same

    @property
    def bytes_fetched(self) -> int:
        """Bytes that have come over a network so far, headers included; 0 for a local checkpoint."""
        return sum(file.bytes_fetched for file in self.files)

    def bytes_to_read(self, names: Iterable[str]) -> int:
        """Stored bytes of the tensors of these names; names that the checkpoint does not have count nothing."""
        return sum(part.nbytes for part in self._parts(names))

    def bytes_to_fetch(self, names: Iterable[str]) -> int:
        """How many of those bytes are not on this machine yet; 0 for a local checkpoint."""
        return sum(file.bytes_to_fetch(entries) for file, entries in self._by_file(names))

    def prefetch(self, names: Iterable[str]) -> None:
        """Bring the tensors of these names to this machine in few, large, concurrent requests.

        Reading does the same one tensor at a time; a caller that knows what it will read next asks for all of it here.
        Names that the checkpoint does not have are skipped, so that whoever reads them can say what needed them.

        Raises
        ------
        CheckpointError
            The server does not give them, or gives something else.
        """
        for file, entries in self._by_file(names):
            file.prefetch(entries)

    def _parts(self, names: Iterable[str]) -> list[StoredTensor]:
        found = (self._tensors[name] for name in dict.fromkeys(names) if name in self._tensors)
        return [part for tensor in found for part in tensor.parts]

    def _by_file(self, names: Iterable[str]) -> list[tuple[Storage, list[TensorEntry]]]:
        entries: dict[int, list[TensorEntry]] = {id(file): [] for file in self.files}
        for part in self._parts(names):
            entries[id(part.file)].append(part.entry)
        return [(file, entries[id(file)]) for file in self.files if entries[id(file)]]
