"""A safetensors file on this machine, read piece by piece.

Opening reads the header alone, so a 50 GB file opens in milliseconds and costs no memory until a tensor is read.

Tensors are read, not mapped. A map saves the copy (10 GB/s against 3.5 for a file in the page cache, a difference of
0.2 s per GB beside the seconds that its spectra take), but whoever holds a view of a map is killed by SIGBUS when
another process cuts the file short, and no check made before can prevent that. A read says so instead. (The safetensors
library would map: it checks headers, and is shown a copy of them; see header.py.)
"""

import os
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from weightscope.checkpoint.header import TensorEntry, header_length, parse_header
from weightscope.checkpoint.hub import cached_identity
from weightscope.checkpoint.others import START, refuse_other
from weightscope.errors import CheckpointError
from weightscope.regular import open_regular

LARGEST_READ = 1 << 30  # systems return less than 2 GB at a time


class OpenFile:
    """A regular file held open, so that one put in its place later is not mistaken for it.

    Parameters
    ----------
    path : Path

    Attributes
    ----------
    path : Path
    size : int
        In bytes, when it was opened.
    """

    bytes_fetched = 0

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = open_regular(path)
        weakref.finalize(self, os.close, self._descriptor)
        self.size, self._modified = self._now()

    @property
    def identity(self) -> dict[str, Any]:
        """In the Hub's cache that of the repository's file; elsewhere name, size and time."""
        cached = cached_identity(self.path, self.size)
        return cached or {"name": self.path.name, "size": self.size, "modified": self._modified}

    def _now(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def read(self, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop) of the file, a uint8 array of its own.

        Raises
        ------
        CheckpointError
            The file cannot be read, or has changed since it was opened.
        """
        try:
            buffer = np.empty(stop - start, np.uint8)
            view, done = memoryview(buffer), 0
            while done < len(view):
                count = os.preadv(self._descriptor, [view[done : done + LARGEST_READ]], start + done)
                if count == 0:
                    break
                done += count
        except OSError as error:
            raise CheckpointError(f"cannot be read ({error.strerror})", file=self.path) from None
        except MemoryError:
            raise CheckpointError(f"no memory for {stop - start} bytes of it", file=self.path) from None
        size, modified = self._now()
        if done < len(view) or (size, modified) != (self.size, self._modified):
            shrunk = f": it had {self.size} bytes and has {size}" if size != self.size else ""
            raise CheckpointError(f"has changed since it was opened{shrunk}", file=self.path)
        return buffer

    def bytes_of(self, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop) of one tensor; see `read`."""
        return self.read(entry.start + start, entry.start + stop)

    def bytes_to_fetch(self, entries: Iterable[TensorEntry]) -> int:
        """None: the file is here."""
        return 0

    def prefetch(self, entries: Iterable[TensorEntry]) -> None:
        """Have the system read these tensors from the disk into its memory, where it takes such advice."""
        if not hasattr(os, "posix_fadvise"):
            return
        with suppress(OSError):  # advice alone: who reads will find what is wrong
            for entry in entries:
                os.posix_fadvise(self._descriptor, entry.start, entry.stop - entry.start, os.POSIX_FADV_WILLNEED)


class LocalFile(OpenFile):
    """One .safetensors file.

    Parameters
    ----------
    path : Path

    Attributes
    ----------
    tensors : dict of TensorEntry
        What the checked header declares, in file order.
    metadata : dict of str
        The header's `__metadata__`.

    Raises
    ------
    CheckpointError
        The file cannot be read or its header is not right.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        start = self.read(0, min(START, self.size)).tobytes()
        try:
            length = header_length(start[:8], self.size, file=path)
        except CheckpointError:
            refuse_other(path, start, self.size)
            raise
        text = self.read(8, 8 + length).tobytes()
        self.tensors, self.metadata = parse_header(text, self.size, file=path)
