"""What a file of tensors offers, wherever it lies."""

from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any, Protocol

import numpy as np

from weightscope.checkpoint.header import TensorEntry


class Storage(Protocol):
    """A file whose header has been read and checked, and whose data can be had in pieces.

    Attributes
    ----------
    path : PurePath
        Names the file in errors.
    tensors : mapping of TensorEntry
        By name, in file order.
    bytes_fetched : int
        What has come over a network so far, headers included; 0 for a file on this machine.
    """

    @property
    def path(self) -> PurePath: ...

    @property
    def tensors(self) -> Mapping[str, TensorEntry]: ...

    @property
    def bytes_fetched(self) -> int: ...

    @property
    def identity(self) -> Mapping[str, Any]:
        """What tells its content from another's, without reading it: facts that JSON can hold."""
        ...

    def bytes_of(self, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop) of one tensor, a uint8 array of its own of shape (stop - start,)."""
        ...

    def bytes_to_fetch(self, entries: Iterable[TensorEntry]) -> int:
        """How many bytes of these tensors are not on this machine yet."""
        ...

    def prefetch(self, entries: Iterable[TensorEntry]) -> None:
        """Bring these tensors to this machine, several ranges at a time; what is there already is not fetched."""
        ...
