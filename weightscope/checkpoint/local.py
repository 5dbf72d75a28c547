"""A safetensors file on this machine: mapped, never copied whole.

Opening reads the header alone, so a 50 GB file opens in milliseconds and costs no memory until a tensor is read.
"""

import mmap
import os
from pathlib import Path

import numpy as np

from weightscope.checkpoint.header import TensorEntry, header_length, parse_header
from weightscope.errors import CheckpointError


class LocalFile:
    """One .safetensors file, memory-mapped.

    Parameters
    ----------
    path : Path

    Attributes
    ----------
    tensors : dict of TensorEntry
        What the checked header declares, in file order.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._size = os.fstat(file.fileno()).st_size
                prefix = file.read(8)
                text = file.read(header_length(prefix, self._size, file=path))
                self.tensors, self.metadata = parse_header(text, self._size, file=path)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"cannot be read ({error.strerror})", file=path) from None

    def bytes_of(self, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop) of one tensor as a read-only uint8 view of the map, shape (stop - start,).

        Raises
        ------
        CheckpointError
            The file has shrunk since it was opened: touching the lost pages would kill the process.
        """
        size = self.path.stat().st_size
        if size < entry.stop:
            raise CheckpointError(f"has shrunk from {self._size} to {size} bytes while in use", file=self.path)
        return np.frombuffer(self._map, np.uint8, stop - start, entry.start + start)

    def forget(self, entry: TensorEntry) -> None:
        """Give the tensor's file pages back to the system; reading it again maps them anew."""
        first = entry.start // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(self._map, "madvise") and entry.stop > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, entry.stop - first)
