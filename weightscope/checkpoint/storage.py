"""A file of weights and, of a safetensors file, its header, checked before any data is trusted.

Layout: 8 bytes little-endian header length, the header as JSON, then the data that the header's
offsets refer to.
"""

import hashlib
import os
import re
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import prod
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from weightscope.checkpoint.config import MAX_BYTES, parse_json
from weightscope.checkpoint.formats import START, refuse_other_format
from weightscope.core.compute.half import Half
from weightscope.core.errors import CheckpointError
from weightscope.core.files import open_regular

WHOLE = 64 << 20  # bytes; a larger file is known by samples and its inode, not by all its content
READ = 1 << 20  # bytes read at a time for a digest
SAMPLE = 4096  # bytes
LARGEST_READ = 1 << 30  # bytes; systems return less than 2 GB at a time
ADVICE = 128 << 10  # bytes, often Linux's read-ahead: it reads no more of a longer range
ADVISED = 512 << 20  # bytes; data that is asked for too early pushes others out of memory
MAX_OFFSET = 2**63 - 1
SIZES = range(MAX_OFFSET + 1)
MAX_DIMENSIONS = 32

# Bits per element of every dtype the format defines (safetensors 0.8).
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
HALVES = ("F16", "BF16")
SHA256 = re.compile(r"[0-9a-f]{64}")
COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
ETAG = re.compile(r"[0-9A-Za-z_=+-]{1,128}")
_STORED_AS = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's dtype, shape and bytes [start, stop) of its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class HeaderDigest(NamedTuple):
    """A file's bytes before its data: how many, and their SHA-256."""

    size: int
    sha256: str

    @classmethod
    def of(cls, start: bytes) -> "HeaderDigest":
        """The digest of these bytes."""
        return cls(len(start), hashlib.sha256(start).hexdigest())


class Storage(Protocol):
    """A local or remote file whose header has been checked, and whose data is read in pieces."""

    @property
    def path(self) -> PurePath: ...  # named in errors

    @property
    def size(self) -> int: ...  # bytes

    @property
    def header(self) -> HeaderDigest: ...

    @property
    def published(self) -> Mapping[str, Any] | None: ...  # commit and etag, if on the Hub

    @property
    def sha256(self) -> str: ...  # digest of the whole file, if it was read whole or is the etag

    @property
    def samples(self) -> str: ...  # digest of header and samples of tensors, if these were read

    def read_digest(self, step: Callable[[int], object] = ...) -> None:
        """Make `sha256` known, reading the whole file if need be; `step` gets the bytes read."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorEntry]: ...  # in file order

    @property
    def metadata(self) -> Mapping[str, str]: ...  # from a safetensors file's header

    @property
    def bytes_fetched(self) -> int: ...  # over a network so far, header included

    @property
    def identity(self) -> Mapping[str, Any]: ...  # JSON values that tell its content from another's

    keeps: bool  # True if bytes from a network are cached on disk

    def bytes_of(self, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop) of one tensor, as a new uint8 array (stop - start,)."""
        ...

    def bytes_to_fetch(self, entries: Iterable[TensorEntry]) -> int:
        """Bytes of these tensors that are not on this machine yet."""
        ...

    def prefetch(self, entries: Iterable[TensorEntry]) -> None:
        """Fetch the missing bytes of these tensors, several ranges at a time."""
        ...


def is_same_file(x: Storage, y: Storage) -> bool:
    """True if two are one file by path, inode or a known digest; nothing is read."""
    if x.sha256 and y.sha256:
        return x.sha256 == y.sha256
    if x.published is not None or y.published is not None:
        return False
    with suppress(OSError):
        return x.size == y.size and Path(x.path).samefile(y.path)
    return False


def etag_digest(published: Mapping[str, Any] | None) -> str:
    """The etag of a file on the Hub if it is the file's SHA-256, as for LFS; else empty."""
    etag = str((published or {}).get("etag", ""))
    return etag if SHA256.fullmatch(etag) else ""


def file_identity(repository: str, commit: str, name: str, etag: str, size: int) -> dict[str, Any]:
    """Values that tell one file on the Hub from another, wherever it is read."""
    from huggingface_hub import constants

    place = {"endpoint": constants.ENDPOINT, "repository": repository, "commit": commit}
    return place | {"name": name, "etag": etag, "size": size}


def cached_identity(path: Path, size: int) -> dict[str, Any] | None:
    """The `file_identity` of a file in the Hub's cache, by its folders' names; else None.

    In the cache a file is a link to a blob named by its etag. A regular file there, or a folder of
    such a name in another place, says nothing of its content.
    """
    from huggingface_hub import constants

    match path.parts[-4:]:
        case (folder, "snapshots", commit, name) if (
            folder.startswith("models--") and path.is_symlink()
        ):
            blob, root = path.resolve(), Path(constants.HF_HUB_CACHE).resolve() / folder
            in_cache = path.parents[2].resolve() == root.resolve()
            is_cached = in_cache and blob.parent == (root / "blobs").resolve()
            if is_cached and COMMIT.fullmatch(commit) and ETAG.fullmatch(blob.name):
                repository = folder.removeprefix("models--").replace("--", "/")
                return file_identity(repository, commit, name, blob.name, size)
    return None


# Element types


def decode(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Little-endian bytes (n_bytes,) as float32 (n_elements,), copied only where necessary."""
    check_readable(dtype)
    stored = raw.view(_STORED_AS[dtype])
    if dtype in HALVES:
        return np.asarray(Half(stored))
    # float64 too large for float32 becomes inf, reported like NaN
    with np.errstate(over="ignore", invalid="ignore"):
        return stored.astype(np.float32, copy=False)


def half(raw: np.ndarray, dtype: str) -> Half | None:
    """Little-endian bytes of F16 or BF16, not converted; None for any other dtype."""
    return Half(raw.view(_STORED_AS[dtype])) if dtype in HALVES else None


def check_readable(dtype: str) -> None:
    """Refuse a dtype that cannot hold unquantised weights."""
    if dtype not in _STORED_AS:
        known = ", ".join(_STORED_AS)
        raise CheckpointError(f"dtype {dtype} cannot be read as weights; readable are {known}")


# The header


def header_length(prefix: bytes, file_size: int, *, file: object) -> int:
    """The header's length in bytes, from the first eight bytes of the file."""
    if len(prefix) < 8:
        problem = f"has {file_size} bytes; a safetensors file has at least 8"
        raise CheckpointError(problem, file=file)
    length = int.from_bytes(prefix[:8], "little")
    if length > MAX_BYTES:
        raise CheckpointError(f"header of {length} bytes; at most {MAX_BYTES} are read", file=file)
    if 8 + length > file_size:
        problem = f"header of {length} bytes, but the file has only {file_size}; is it cut short?"
        raise CheckpointError(problem, file=file)
    return length


def parse_header(
    text: bytes, file_size: int, *, file: object
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Tensors, in file order, and metadata of a header, checked as the safetensors library does."""
    entries = parse_json(text, file=file, what="header ")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError("__metadata__ is not a map of strings", file=file)

    data_start = 8 + len(text)
    tensors = {name: _entry(name, entry, data_start, file) for name, entry in entries.items()}
    tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)))
    expected = data_start
    for name, tensor in tensors.items():
        if tensor.start != expected:
            fault = "leaves a gap before it"
            if tensor.start < expected:
                fault = "overlaps the tensor before it"
            offset, due = tensor.start - data_start, expected - data_start
            problem = f"starts at offset {offset} and {fault}; {due} was due"
            raise CheckpointError(problem, file=file, tensor=name)
        expected = tensor.stop
    if expected != file_size:
        problem = f"tensors end at byte {expected}, but the file has {file_size}"
        problem += "; is it cut short?" if expected > file_size else ""
        raise CheckpointError(problem, file=file)
    _compare_with_library(text, file_size, tensors, file)
    return tensors, metadata


def _entry(name: str, entry: Any, data_start: int, file: object) -> TensorEntry:
    """One tensor's entry, every value checked."""

    def bad(problem: str) -> CheckpointError:
        return CheckpointError(problem, file=file, tensor=name)

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise bad("has a broken entry; dtype, shape and data_offsets were expected")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise bad(f"has dtype {str(dtype)[:40]}, which safetensors does not define")
    are_sizes = isinstance(shape, list) and all(type(n) is int and n in SIZES for n in shape)
    if not are_sizes or len(shape) > MAX_DIMENSIONS:
        wanted = f"a list of at most {MAX_DIMENSIONS} sizes"
        raise bad(f"has shape {str(shape)[:80]}; {wanted} was expected")
    are_offsets = isinstance(offsets, list) and all(type(n) is int and n in SIZES for n in offsets)
    if not are_offsets or len(offsets) != 2:
        raise bad(f"has data_offsets {str(offsets)[:80]}; two byte offsets were expected")
    # One size of 0 makes the product 0; the rest must still give an array that NumPy can address.
    if prod(size for size in shape if size) * 8 > MAX_OFFSET:
        raise bad(f"has shape {str(tuple(shape))[:80]}, more elements than any file holds")
    bits, (start, stop) = prod(shape) * BITS[dtype], offsets
    if bits % 8 or stop - start != bits // 8:
        needed = f"{dtype} of shape {tuple(shape)} needs {bits / 8:.15g}"
        raise bad(f"has {stop - start} bytes; {needed}")
    return TensorEntry(dtype, tuple(shape), data_start + start, data_start + stop)


def _compare_with_library(
    text: bytes, file_size: int, tensors: Mapping[str, TensorEntry], file: object
) -> None:
    """Refuse a header that the safetensors library reads differently.

    One file must not have two contents. The library maps the file that it opens, and a process that
    reads a map is killed when another cuts the file short. So it gets a sparse file in memory: this
    header, and a hole for the data.
    """
    try:
        memory = os.memfd_create("header") if hasattr(os, "memfd_create") else None
        with tempfile.TemporaryFile() if memory is None else os.fdopen(memory, "w+b") as copy:
            copy.write(len(text).to_bytes(8, "little") + text)
            copy.truncate(file_size)
            with safe_open(f"/dev/fd/{copy.fileno()}", "np") as library:
                theirs = {}
                for name in library.offset_keys():
                    piece = library.get_slice(name)
                    theirs[name] = piece.get_dtype(), tuple(piece.get_shape())
    except SafetensorError as error:
        problem = f"the safetensors library refuses the header ({error})"
        raise CheckpointError(problem, file=file) from None
    except OSError as error:
        problem = f"its header cannot be checked ({error.strerror})"
        raise CheckpointError(problem, file=file) from None
    ours = {name: (entry.dtype, entry.shape) for name, entry in tensors.items()}
    # Tensors without elements may lie anywhere.
    our_order = [name for name, (_, shape) in ours.items() if 0 not in shape]
    their_order = [name for name, (_, shape) in theirs.items() if 0 not in shape]
    if theirs != ours or their_order != our_order:
        problem = "the safetensors library finds other tensors in the header"
        raise CheckpointError(problem, file=file)


# Files on this machine


class OpenFile:
    """A regular file held open, so that another file put in its place later is not mistaken for it.

    Data are read, not mapped: mapping would save a copy (0.2 s per GB, little next to computing its
    spectra), but a process that reads a map is killed by SIGBUS when another cuts the file short. A
    read reports it as an error.
    """

    bytes_fetched = 0
    keeps = True
    header = HeaderDigest(0, "")
    metadata: Mapping[str, str] = MappingProxyType({})
    tensors: Mapping[str, TensorEntry] = MappingProxyType({})

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = open_regular(path)
        weakref.finalize(self, os.close, self._descriptor)
        status = os.fstat(self._descriptor)
        self.size, self._modified = status.st_size, status.st_mtime_ns  # bytes, nanoseconds
        self._whole = ""  # SHA-256 of all of it, once it was read for that

    @property
    def identity(self) -> dict[str, Any]:
        """The repository's file, if in the Hub's cache; else name, size, time and content."""
        if self.published is not None:
            return self.published
        # An archive with normalised times, or cp -p, gives other weights the same name and time.
        place = {} if self.size <= WHOLE else {"inode": os.fstat(self._descriptor).st_ino}
        stored = {"name": self.path.name, "size": self.size, "modified": self._modified}
        return stored | {"sha256": self._digest} | place

    @cached_property
    def published(self) -> dict[str, Any] | None:
        """The repository's file, for a file in the Hub's cache; None for any other."""
        return cached_identity(self.path, self.size) if self.path.is_symlink() else None

    @property
    def sha256(self) -> str:
        """SHA-256 of the whole file, where it was read whole or is its etag; else empty."""
        small = self.size <= WHOLE and "_digest" in vars(self)
        return self._whole or etag_digest(self.published) or (self._digest if small else "")

    @property
    def samples(self) -> str:
        """SHA-256 of a large file's header and samples, if it was read to know it again."""
        return self._digest if self.size > WHOLE and "_digest" in vars(self) else ""

    def read_digest(self, step: Callable[[int], object] = lambda count: None) -> None:
        """Read the whole file once for its SHA-256; refused where the Hub has another."""
        if self._whole:
            return
        digest = hashlib.sha256()
        for start in range(0, self.size, READ):
            digest.update(self.read(start, min(start + READ, self.size)))
            step(min(READ, self.size - start))
        self._whole, etag = digest.hexdigest(), etag_digest(self.published)
        if etag and etag != self._whole:
            problem = f"its SHA-256 is {self._whole}, on the Hub it is {etag}"
            cause = "the copy in the Hub's cache is damaged"
            raise CheckpointError(f"{problem}: {cause}", file=self.path)

    @cached_property
    def _digest(self) -> str:
        """SHA-256 of a small file; of a large one's header and two blocks of each tensor."""
        spans = [(start, min(start + READ, self.size)) for start in range(0, self.size, READ)]
        if self.size > WHOLE:
            entries = sorted((entry.start, entry.stop) for entry in self.tensors.values())
            spans = [(0, entries[0][0] if entries else WHOLE)]
            for start, stop in entries:
                thirds = ((stop - start) * i // 3 for i in (1, 2))
                spans += [(start + third, min(start + third + SAMPLE, stop)) for third in thirds]
        digest = hashlib.sha256()
        for span in spans:
            digest.update(self.read(*span))
        return digest.hexdigest()

    def read(self, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop) as a new uint8 array; refused once the file has changed."""
        try:
            buffer = np.empty(stop - start, np.uint8)
            view, done = memoryview(buffer), 0
            while done < len(view):
                piece = view[done : done + LARGEST_READ]
                count = os.preadv(self._descriptor, [piece], start + done)
                if count == 0:
                    break
                done += count
        except OSError as error:
            raise CheckpointError(f"cannot be read ({error.strerror})", file=self.path) from None
        except MemoryError:
            problem = f"no memory for {stop - start} bytes of it"
            raise CheckpointError(problem, file=self.path) from None
        status = os.fstat(self._descriptor)
        if done < len(view) or (status.st_size, status.st_mtime_ns) != (self.size, self._modified):
            problem = "has changed since it was opened"
            if status.st_size != self.size:
                problem += f": it had {self.size} bytes and has {status.st_size}"
            raise CheckpointError(problem, file=self.path)
        return buffer

    def bytes_of(self, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop) of one tensor; see `read`."""
        return self.read(entry.start + start, entry.start + stop)

    def bytes_to_fetch(self, entries: Iterable[TensorEntry]) -> int:
        """0: the file is local."""
        return 0

    def prefetch(self, entries: Iterable[TensorEntry]) -> None:
        """Ask the system to read these tensors from disk ahead, where it takes such advice."""
        if not hasattr(os, "posix_fadvise"):
            return
        steps = (step for entry in entries for step in range(entry.start, entry.stop, ADVICE))
        with suppress(OSError):  # reading reports what is wrong
            for start in islice(steps, ADVISED // ADVICE):
                os.posix_fadvise(self._descriptor, start, ADVICE, os.POSIX_FADV_WILLNEED)


class LocalFile(OpenFile):
    """One .safetensors file: its checked header is read, tensors are read on demand."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        start = self.read(0, min(START, self.size)).tobytes()
        try:
            length = header_length(start[:8], self.size, file=path)
        except CheckpointError:
            refuse_other_format(path, start, self.size)
            raise
        text = self.read(8, 8 + length).tobytes()
        self.header = HeaderDigest.of(start[:8] + text)
        self.tensors, self.metadata = parse_header(text, self.size, file=path)
