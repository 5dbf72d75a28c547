"""Compare the bytes of tensors and files; what a digest of the Hub decides is not read."""

import ctypes
import sys
from itertools import product

import numpy as np

from weightscope.checkpoint.checkpoint import Checkpoint, StoredTensor, Tensor
from weightscope.checkpoint.storage import Storage, is_same_file

BYTES = 1 << 20  # compared at a time: both fit in a cache, and few calls are made

_memcmp = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None).memcmp
_memcmp.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t


def is_copy(x: StoredTensor, y: StoredTensor) -> bool:
    """True if two are one tensor of one file."""
    return x.entry == y.entry and is_same_file(x.file, y.file)


def equal_bytes(x: Tensor, y: Tensor) -> bool:
    """Compare the stored bytes of both; a file that both are in is not read."""
    if [(part.dtype, part.shape) for part in x.parts] != [
        (part.dtype, part.shape) for part in y.parts
    ]:
        return False
    return all(
        is_copy(p, q)
        or all(
            _is_equal(p.raw(i, min(i + BYTES, p.nbytes)), q.raw(i, min(i + BYTES, q.nbytes)))
            for i in range(0, p.nbytes, BYTES)
        )
        for p, q in zip(x.parts, y.parts, strict=True)
    )


def _is_equal(x: np.ndarray, y: np.ndarray) -> bool:
    """Compare bytes; NumPy would write an array of answers."""
    return len(x) == len(y) and _memcmp(x.ctypes.data, y.ctypes.data, len(x)) == 0


def same_files(x: Checkpoint, y: Checkpoint) -> bool:
    """True if files with equal tensors also have equal headers, gaps and config.json."""
    if x.config.stored != y.config.stored or [file.size for file in x.files] != [
        file.size for file in y.files
    ]:
        return False
    return all(map(_same_rest, x.files, y.files))


def _same_rest(x: Storage, y: Storage) -> bool:
    if is_same_file(x, y):
        return True
    if x.header != y.header or [*x.tensors.items()] != [*y.tensors.items()]:
        return False
    if x.header.size + sum(entry.stop - entry.start for entry in x.tensors.values()) == x.size:
        return True
    x.read_digest()
    y.read_digest()
    return x.sha256 == y.sha256


def read_known_digests(a: Checkpoint, b: Checkpoint) -> None:
    """Record the SHA-256 of local files that may equal files of the other checkpoint on the Hub.

    Reading a file here is cheaper than fetching it; one with another header is not looked at.
    """
    for x, y in product(a.files, b.files):
        is_on_hub_once = (x.published is None) != (y.published is None)
        if x.header == y.header and x.size == y.size and is_on_hub_once:
            here, there = (x, y) if x.published is None else (y, x)
            if there.sha256 and not here.sha256:
                here.read_digest()
