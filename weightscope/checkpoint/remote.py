"""A safetensors file on the Hub: its header, and of its tensors only what is asked for."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from weightscope.checkpoint.blockcache import BlockCache
from weightscope.checkpoint.header import TensorEntry, header_length, parse_header
from weightscope.checkpoint.ranges import LARGEST_REQUEST, Range, RangedFile, coalesce
from weightscope.errors import CheckpointError

BLOCK = 8 << 20  # what is cached and, after a failure, fetched again; a tensor's last block is what is left of it
CONNECTIONS = 8
ENTRY_BYTES = 110  # of a header, for each tensor, besides its name
UNKNOWN_HEADER = 16_384  # enough for the header of a small model in one file


class RemoteFile:
    """One .safetensors file on a server, opened by its header.

    Parameters
    ----------
    source : RangedFile
    path : PurePosixPath
        Names the file in errors.
    cache : BlockCache
    identity : dict
        What tells the file from another; see `file_identity` of hub.py.
    names : iterable of str
        Tensors that an index says it has, from which the header's length is guessed, so that one request brings it.

    Attributes
    ----------
    tensors, metadata : dict
        What the checked header declares.

    Raises
    ------
    CheckpointError
        The server does not give the header, or the header is not right.
    """

    def __init__(
        self,
        source: RangedFile,
        path: PurePosixPath,
        cache: BlockCache,
        identity: dict[str, Any],
        names: Iterable[str] = (),
    ) -> None:
        self.path, self.identity = path, identity
        self._source, self._cache = source, cache
        guess = sum(len(name) + ENTRY_BYTES for name in names) or min(UNKNOWN_HEADER, source.size // 1000)
        self.tensors, self.metadata = parse_header(self._header(8 + guess), source.size, file=path)

    @property
    def bytes_fetched(self) -> int:
        """All bytes that came over the network for this file."""
        return self._source.bytes_fetched

    def _header(self, guess: int) -> bytes:
        size = self._source.size
        start = self._cache.get("header")
        if start is None:
            start = self._fetch_start(0, min(guess, size))
        stop = 8 + header_length(start, size, file=self.path)
        if len(start) < stop:
            start += self._fetch_start(len(start), stop)
        self._cache.put("header", start[:stop])
        return start[8:stop]

    def _fetch_start(self, start: int, stop: int) -> bytes:
        content = [b""]
        if start < stop:
            self._source.fetch([(start, stop)], lambda _, fetched: content.append(fetched))
        return b"".join(content)

    def bytes_of(self, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop) of one tensor, from the cache or the server.

        Raises
        ------
        CheckpointError
            The server does not give them, or there is no memory for them.
        """
        try:
            wanted = np.empty(stop - start, np.uint8)
        except MemoryError:
            raise CheckpointError(f"no memory for {stop - start} bytes of it", file=self.path) from None
        first, last = entry.start + start, entry.start + stop

        def put(block: Range, content: bytes) -> None:
            a, b = max(block[0], first), min(block[1], last)
            wanted[a - first : b - first] = np.frombuffer(content, np.uint8)[a - block[0] : b - block[0]]

        missing = []
        for block in _blocks(entry):
            if block[0] < last and first < block[1]:
                content = self._cache.get(_key(block))
                if content is None or len(content) != block[1] - block[0]:
                    missing.append(block)
                else:
                    put(block, content)
        self._fetch(missing, put)
        return wanted

    def bytes_to_fetch(self, entries: Iterable[TensorEntry]) -> int:
        """How many bytes of these tensors are not in the cache."""
        return sum(stop - start for start, stop in self._missing(entries))

    def prefetch(self, entries: Iterable[TensorEntry]) -> None:
        """Fetch what is not in the cache into it."""
        self._fetch(self._missing(entries), lambda block, content: None)

    def _missing(self, entries: Iterable[TensorEntry]) -> list[Range]:
        blocks = {block for entry in entries for block in _blocks(entry)}
        return sorted(block for block in blocks if not self._cache.has(_key(block), block[1] - block[0]))

    def _fetch(self, missing: list[Range], deliver: Callable[[Range, bytes], None]) -> None:
        def keep(block: Range, content: bytes) -> None:
            self._cache.put(_key(block), content)
            deliver(block, content)

        groups = coalesce(missing, LARGEST_REQUEST)
        if len(groups) <= 1:
            for group in groups:
                self._source.fetch(group, keep)
            return
        with ThreadPoolExecutor(min(CONNECTIONS, len(groups))) as pool:
            for _ in pool.map(lambda group: self._source.fetch(group, keep), groups):
                pass


def _blocks(entry: TensorEntry) -> list[Range]:
    """A tensor's blocks, always cut at the same places."""
    return list(pairwise([*range(entry.start, entry.stop, BLOCK), entry.stop]))


def _key(block: Range) -> str:
    return f"{block[0]}-{block[1]}"
