"""A safetensors file on the Hub: only its header and the tensors that are needed are fetched, in cached blocks."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from weightscope.checkpoint.header import TensorEntry, header_length, parse_header
from weightscope.checkpoint.http import LARGEST_REQUEST, Range, RangedFile, coalesce
from weightscope.errors import CheckpointError
from weightscope.files import new_file, regular_file

BLOCK = 8 << 20  # bytes cached together, and fetched again after a failure; a tensor's last block is shorter
CONNECTIONS = 8
ENTRY_BYTES = 110  # of a header per tensor, besides its name
UNKNOWN_HEADER = 16_384  # enough for the header of a small model in one file
DIGEST_BYTES = hashlib.sha256().digest_size


class BlockCache:
    """Blocks of one file on disk, each with its SHA-256, which is checked at every use.

    They are among the Hub's cached assets (HF_ASSETS_CACHE/weightscope/blocks, which may be deleted at any time), in a
    folder named for `identity` (endpoint, repository, file, etag), so that a changed file does not find old blocks. On
    a disk that is full or read-only nothing is cached.
    """

    def __init__(self, *identity: str) -> None:
        from huggingface_hub import constants

        folder = hashlib.sha256("\n".join(identity).encode("utf-8", "surrogatepass")).hexdigest()
        self._folder = Path(constants.HF_ASSETS_CACHE) / "weightscope" / "blocks" / folder

    def has(self, key: str, size: int) -> bool:
        """Whether a block of this size is cached; its content is not checked."""
        try:
            return (self._folder / key).stat().st_size == size + DIGEST_BYTES
        except OSError:
            return False

    def get(self, key: str) -> bytes | None:
        """A block; None if it is missing or damaged."""
        try:
            with regular_file(self._folder / key) as file:
                stored = file.read()
        except (OSError, CheckpointError):
            return None
        content, digest = stored[:-DIGEST_BYTES], stored[-DIGEST_BYTES:]
        return content if hashlib.sha256(content).digest() == digest else None

    def put(self, key: str, content: bytes) -> None:
        """Cache a block, whole or not at all."""
        with contextlib.suppress(CheckpointError), new_file(self._folder / key) as file:
            file.write(content)
            file.write(hashlib.sha256(content).digest())


class RemoteFile:
    """One .safetensors file on a server. `names` are the tensors that an index lists for it: they tell the length of
    the header roughly, so that one request brings it.
    """

    def __init__(
        self,
        source: RangedFile,
        path: PurePosixPath,  # named in errors
        cache: BlockCache,
        identity: dict[str, Any],  # see `file_identity` of hub.py
        names: Iterable[str] = (),
    ) -> None:
        self.path, self.identity = path, identity
        self._source, self._cache = source, cache
        self._last: tuple[Range | None, bytes | None] = None, None  # rows of one block may be asked for one by one
        guess = sum(len(name) + ENTRY_BYTES for name in names) or min(UNKNOWN_HEADER, source.size // 1000)
        self.tensors, self.metadata = parse_header(self._header(8 + guess), source.size, file=path)

    @property
    def bytes_fetched(self) -> int:
        """All bytes fetched for this file."""
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
        """Bytes [start, stop) of one tensor, from the cache or the server."""
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
                kept, content = self._last
                if block != kept:
                    content = self._cache.get(_key(block))
                if content is None or len(content) != block[1] - block[0]:
                    missing.append(block)
                else:
                    self._last = block, content
                    put(block, content)
        self._fetch(missing, put)
        return wanted

    def bytes_to_fetch(self, entries: Iterable[TensorEntry]) -> int:
        """How many bytes of these tensors are not cached."""
        return sum(stop - start for start, stop in self._missing(entries))

    def prefetch(self, entries: Iterable[TensorEntry]) -> None:
        """Fetch the blocks of these tensors that are not cached."""
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
    """A tensor's blocks, which always begin at the same places."""
    return list(pairwise([*range(entry.start, entry.stop, BLOCK), entry.stop]))


def _key(block: Range) -> str:
    return f"{block[0]}-{block[1]}"
