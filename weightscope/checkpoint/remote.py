"""A safetensors file on the Hub: only its header and the tensors that are needed are fetched, in cached blocks."""

import contextlib
import hashlib
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import numpy as np

from weightscope.checkpoint.http import LARGEST_REQUEST, Deliver, Range, RangedFile, coalesce, new_memory
from weightscope.checkpoint.storage import HeaderDigest, TensorEntry, etag_digest, header_length, parse_header
from weightscope.errors import CheckpointError
from weightscope.files import new_file, regular_file

BLOCK = 8 << 20  # bytes cached together, and fetched again after a failure; a tensor's last block is shorter
CONNECTIONS = 8
AHEAD = 400 << 20  # bytes of tensors kept in memory from fetching to reading: a layer of a 70B; others wait on disk
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

    def get(self, key: str) -> memoryview | None:
        """A block; None if it is missing or damaged."""
        try:
            with regular_file(self._folder / key) as file:
                stored = file.read()
        except (OSError, CheckpointError):
            return None
        content, digest = memoryview(stored)[:-DIGEST_BYTES], stored[-DIGEST_BYTES:]
        return content if hashlib.sha256(content).digest() == digest else None

    def put(self, key: str, content: bytes | memoryview) -> None:
        """Cache a block, whole or not at all."""
        with contextlib.suppress(CheckpointError), new_file(self._folder / key, synced=False) as file:
            file.write(content)
            file.write(hashlib.sha256(content).digest())


class Ahead:
    """Tensors of a checkpoint that were fetched and are not read yet."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, np.ndarray] = {}
        self._lock = threading.Lock()

    @property
    def room(self) -> int:
        """Bytes that may still be kept."""
        with self._lock:
            return AHEAD - sum(content.nbytes for content in self._kept.values())

    def put(self, contents: Mapping[Hashable, np.ndarray]) -> None:
        """Keep tensors' bytes."""
        with self._lock:
            self._kept |= contents

    def take(self, key: Hashable, start: int, stop: int) -> np.ndarray | None:
        """Bytes [start, stop) of a tensor, which is not kept after its last one; None if it is not here."""
        with self._lock:
            content = self._kept.get(key)
            if content is None or stop < len(content):
                return None if content is None else content[start:stop].copy()
            del self._kept[key]
        return content[start:]


class RemoteFile:
    """One .safetensors file on a server. `names` are the tensors that an index lists for it: they tell the length of
    the header roughly, so that one request brings it.
    """

    samples = ""  # an etag tells the file

    def __init__(
        self,
        source: RangedFile,
        path: PurePosixPath,  # named in errors
        cache: BlockCache,
        ahead: Ahead,  # of all files of the checkpoint
        identity: dict[str, Any],  # see `file_identity` of hub.py
        names: Iterable[str] = (),
    ) -> None:
        self.path, self.identity, self.published, self.size = path, identity, identity, source.size
        self.sha256 = etag_digest(identity)
        self._source, self._cache, self._ahead = source, cache, ahead
        self._last: tuple[Range | None, memoryview | None] = None, None  # rows of one block may be asked for one by one
        guess = sum(len(name) + ENTRY_BYTES for name in names) or min(UNKNOWN_HEADER, source.size // 1000)
        self.tensors, self.metadata = parse_header(self._header(8 + guess), source.size, file=path)

    @property
    def bytes_fetched(self) -> int:
        """All bytes fetched for this file."""
        return self._source.bytes_fetched

    def _header(self, guess: int) -> bytes:
        size = self._source.size
        cached = self._cache.get("header")
        start = self._fetch_start(0, min(guess, size)) if cached is None else bytes(cached)
        stop = 8 + header_length(start, size, file=self.path)
        if len(start) < stop:
            start += self._fetch_start(len(start), stop)
        self._cache.put("header", start[:stop])
        self.header = HeaderDigest.of(start[:stop])
        return start[8:stop]

    def read_digest(self, step: Callable[[int], object] = lambda count: None) -> None:
        """Fetch the whole file for its SHA-256, if its etag is not that."""
        if self.sha256:
            step(self.size)
            return
        digest = hashlib.sha256()

        def add(span: Range, content: memoryview) -> None:
            digest.update(content)
            step(len(content))

        for group in coalesce(list(pairwise([*range(0, self.size, BLOCK), self.size])), LARGEST_REQUEST):
            self._source.fetch(group, add)
        self.sha256 = digest.hexdigest()

    def _fetch_start(self, start: int, stop: int) -> bytes:
        content = [b""]
        if start < stop:
            self._source.fetch([(start, stop)], lambda _, fetched: content.append(bytes(fetched)))
        return b"".join(content)

    def bytes_of(self, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop) of one tensor, from memory, the cache or the server."""
        kept = self._ahead.take((self.path, entry), start, stop)
        if kept is not None:
            return kept
        try:
            wanted = np.empty(stop - start, np.uint8)
        except MemoryError:
            raise CheckpointError(f"no memory for {stop - start} bytes of it", file=self.path) from None
        first, last = entry.start + start, entry.start + stop
        missing = []
        for block in _blocks(entry):
            if block[0] < last and first < block[1]:
                last_read, content = self._last
                if block != last_read:
                    content = self._cache.get(_key(block))
                if content is None or len(content) != block[1] - block[0]:
                    missing.append(block)
                else:
                    self._last = block, content
                    _copy(block, content, first, wanted)
        self._fetch(missing, lambda block, content: _copy(block, content, first, wanted))
        return wanted

    def bytes_to_fetch(self, entries: Iterable[TensorEntry]) -> int:
        """How many bytes of these tensors are not cached."""
        return sum(stop - start for start, stop in self._missing(entries))

    def prefetch(self, entries: Iterable[TensorEntry]) -> None:
        """Fetch the blocks of these tensors that are not cached; whole tensors stay in memory until they are read."""
        entries = list(entries)
        missing = self._missing(entries)
        kept: dict[TensorEntry, np.ndarray] = {}
        room, absent = self._ahead.room, set(missing)
        for entry in entries:
            size = entry.stop - entry.start
            if size <= room and absent.issuperset(_blocks(entry)):
                with contextlib.suppress(MemoryError):
                    kept[entry], room = np.empty(size, np.uint8), room - size
        places = {
            block: memoryview(content)[block[0] - entry.start : block[1] - entry.start]
            for entry, content in kept.items()
            for block in _blocks(entry)
        }
        self._fetch(missing, lambda block, content: None, places)
        self._ahead.put({(self.path, entry): content for entry, content in kept.items()})

    def _missing(self, entries: Iterable[TensorEntry]) -> list[Range]:
        blocks = {block for entry in entries for block in _blocks(entry)}
        return sorted(block for block in blocks if not self._cache.has(_key(block), block[1] - block[0]))

    def _fetch(
        self, missing: Sequence[Range], deliver: Deliver, places: Mapping[Range, memoryview] = MappingProxyType({})
    ) -> None:
        def keep(block: Range, content: memoryview) -> None:
            self._cache.put(_key(block), content)
            deliver(block, content)

        def place(block: Range) -> memoryview:
            return places[block] if block in places else new_memory(block)

        groups = coalesce(missing, LARGEST_REQUEST)
        if len(groups) <= 1:
            for group in groups:
                self._source.fetch(group, keep, place)
            return
        with ThreadPoolExecutor(min(CONNECTIONS, len(groups))) as pool:
            for _ in pool.map(lambda group: self._source.fetch(group, keep, place), groups):
                pass


def _blocks(entry: TensorEntry) -> list[Range]:
    """A tensor's blocks, which always begin at the same places."""
    return list(pairwise([*range(entry.start, entry.stop, BLOCK), entry.stop]))


def _copy(block: Range, content: bytes | memoryview, first: int, wanted: np.ndarray) -> None:
    """Copy what a block has of the bytes that begin at `first` of the file to where they belong among them."""
    a, b = max(block[0], first), min(block[1], first + len(wanted))
    wanted[a - first : b - first] = np.frombuffer(content, np.uint8)[a - block[0] : b - block[0]]


def _key(block: Range) -> str:
    return f"{block[0]}-{block[1]}"
