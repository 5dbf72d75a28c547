"""GGUF files (ggml's format, version 2 or 3): the checked header, and tensors as ggml has them.

Layout: magic, version, counts; keys and values; tensors by name with shape, type and offset;
padding; the data. The reader of the gguf package maps the file and trusts its counts, so the header
is read here; `ggml_blocks` dequantises.
"""

import re
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weightscope.checkpoint.checkpoint import StoredTensor, Tensor
from weightscope.checkpoint.config import LONGEST_KEY, Config
from weightscope.checkpoint.formats import START, refuse_other_format
from weightscope.checkpoint.ggml_blocks import (
    FLOAT4,
    LAYOUTS,
    NUMBERS,
    PLAIN,
    UNEVEN,
    Codebook,
    Layout,
    dequantise,
    group_of,
    size_of,
)
from weightscope.checkpoint.storage import MAX_OFFSET, HeaderDigest, OpenFile, TensorEntry
from weightscope.core.errors import CheckpointError

MAX_HEADER_BYTES = 64_000_000  # the header has the vocabulary and merges: 20 MB for 256,000 tokens
MAX_KEYS = 10_000
MAX_TENSORS = 50_000
MAX_STRINGS = 1_000_000
MAX_NUMBERS = 1_000_000  # in all lists together: a byte in a list may cost thirty bytes of memory
LONGEST_LIST = 10_000  # longer lists of numbers are skipped
MAX_DIMENSIONS = 4


class BlockGrid(NamedTuple):
    """Levels and scales of a type's blocks, besides their codes."""

    levels: int | tuple[int, ...]  # number of even ones, or all of them
    scales: tuple[slice, ...]  # bytes of a block for scales and minima; the others hold codes
    least: int = 0  # the first of even levels


SIGNED4 = tuple(sorted({*FLOAT4}))
GRIDS = {
    "Q4_0": BlockGrid(16, (slice(0, 2),), -8),
    "Q4_1": BlockGrid(16, (slice(0, 4),)),
    "Q5_0": BlockGrid(32, (slice(0, 2),), -16),
    "Q5_1": BlockGrid(32, (slice(0, 4),)),
    "Q8_0": BlockGrid(256, (slice(0, 2),), -128),
    "Q2_K": BlockGrid(4, (slice(0, 16), slice(80, 84))),
    "Q3_K": BlockGrid(8, (slice(96, 110),), -4),
    "Q4_K": BlockGrid(16, (slice(0, 16),)),
    "Q5_K": BlockGrid(32, (slice(0, 16),)),
    "Q6_K": BlockGrid(64, (slice(192, 210),), -32),
    "IQ4_NL": BlockGrid(UNEVEN, (slice(0, 2),)),
    "IQ4_XS": BlockGrid(UNEVEN, (slice(0, 8),)),
    "MXFP4": BlockGrid(SIGNED4, (slice(0, 1),)),
    "NVFP4": BlockGrid(SIGNED4, (slice(0, 4),)),
    "TQ1_0": BlockGrid(3, (slice(52, 54),), -1),
    "TQ2_0": BlockGrid(3, (slice(64, 66),), -1),
}

# Value types by number, as struct codes; 8 is a string, 9 an array.
SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
UINT32, STRING, ARRAY = 4, 8, 9
ALIGNMENT = "general.alignment"
ALIGNMENTS = [1 << n for n in range(21)]  # ggml refuses what is no power of two


class GgufEntry(NamedTuple):
    """A tensor as the header describes it."""

    type: int  # ggml's number
    shape: tuple[int, ...]  # in NumPy's order
    offset: int  # bytes within the data


class _Cursor:
    """Reads a header from start to end, and refuses counts and lengths beyond its end."""

    def __init__(self, text: bytes, file: object) -> None:
        self.text, self.file = text, file
        self.position, self.n_strings, self.n_numbers = 0, 0, 0

    def refuse(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{problem} (at byte {self.position} of the header)", file=self.file)

    def skip(self, n: int) -> int:
        """Skip n bytes, which must exist, and return their start."""
        start = self.position
        if n > len(self.text) - start:
            raise self.refuse("GGUF header is cut short or longer than is read")
        self.position += n
        return start

    def number(self, code: str) -> Any:
        layout = "<" + code
        return struct.unpack_from(layout, self.text, self.skip(struct.calcsize(layout)))[0]

    def string(self) -> str:
        length = self.number("Q")
        start = self.skip(length)
        try:
            return self.text[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self.refuse("GGUF header has a name that is not UTF-8") from None

    def name(self) -> str:
        """A key's or a tensor's name."""
        if len(name := self.string()) > LONGEST_KEY:
            problem = f"GGUF header has a name of {len(name)} characters"
            raise self.refuse(f"{problem}; at most {LONGEST_KEY} are read")
        return name

    def value(self, kind: int, wanted: bool = False) -> Any:
        """A value; lists of strings and long ones of numbers are skipped (None) unless `wanted`."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            problem = f"GGUF header has a value of type {kind}"
            raise self.refuse(f"{problem}, which the format does not define")
        kind, length = self.number("I"), self.number("Q")
        if kind in SCALARS:
            size = struct.calcsize("<" + SCALARS[kind])
            start = self.skip(length * size)
            if length > LONGEST_LIST and not wanted:
                return None
            self.n_numbers += length
            if self.n_numbers > MAX_NUMBERS:
                problem = f"GGUF header has lists of {self.n_numbers} numbers"
                raise self.refuse(f"{problem}; at most {MAX_NUMBERS} are read")
            return list(struct.unpack_from(f"<{length}{SCALARS[kind]}", self.text, start))
        if kind != STRING:
            raise self.refuse(f"GGUF header has a list of type {kind}, which is not read")
        self.n_strings += length
        if self.n_strings > MAX_STRINGS:
            problem = f"GGUF header has {self.n_strings} strings; at most {MAX_STRINGS} are read"
            raise self.refuse(problem)
        if wanted:
            return [self.string() for _ in range(length)]
        for _ in range(length):
            self.skip(self.number("Q"))
        return None


def parse_gguf(
    text: bytes, *, file: object, lists: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, GgufEntry], int]:
    """Keys (with the long lists named in `lists`), tensors, and the start of the data."""
    cursor = _Cursor(text, file)
    if text[:4] != b"GGUF":
        raise CheckpointError("is not a GGUF file", file=file)
    cursor.skip(4)
    version = cursor.number("I")
    if version not in {2, 3}:
        problem = f"is GGUF version {version}; versions 2 and 3 of little-endian files are read"
        raise CheckpointError(problem, file=file)
    n_tensors, n_keys = cursor.number("Q"), cursor.number("Q")
    if n_tensors > MAX_TENSORS or n_keys > MAX_KEYS:
        raise cursor.refuse(f"GGUF header has {n_tensors} tensors and {n_keys} keys")
    keys: dict[str, Any] = {}
    for _ in range(n_keys):
        name = cursor.name()
        if name in keys:
            raise cursor.refuse(f"GGUF header has key '{name[:100]}' twice")
        kind = cursor.number("I")
        keys[name] = cursor.value(kind, name in lists)
        if name == ALIGNMENT and kind != UINT32:
            raise cursor.refuse(f"GGUF header has {ALIGNMENT} of type {kind}; {UINT32} is expected")
    tensors: dict[str, GgufEntry] = {}
    for _ in range(n_tensors):
        name, n_dimensions = cursor.name(), cursor.number("I")
        if n_dimensions > MAX_DIMENSIONS:
            raise cursor.refuse(f"GGUF tensor '{name[:100]}' has {n_dimensions} dimensions")
        sizes = [cursor.number("Q") for _ in range(n_dimensions)]
        if prod(size for size in sizes if size) * 8 > MAX_OFFSET:
            problem = f"has sizes {sizes}, more elements than any file holds"
            raise CheckpointError(problem, file=file, tensor=name)
        if name in tensors:
            raise CheckpointError("appears twice in the GGUF header", file=file, tensor=name)
        tensors[name] = GgufEntry(cursor.number("I"), tuple(reversed(sizes)), cursor.number("Q"))
    alignment = keys.get(ALIGNMENT, 32)
    if alignment not in ALIGNMENTS:
        problem = f"has alignment {alignment}; a power of two up to {ALIGNMENTS[-1]} was expected"
        raise CheckpointError(problem, file=file)
    return keys, tensors, -(-cursor.position // alignment) * alignment


def _header_bytes(file: OpenFile) -> bytes:
    """The start of a file, long enough for the header; files of other formats are refused."""
    text = file.read(0, min(file.size, MAX_HEADER_BYTES)).tobytes()
    if not text.startswith(b"GGUF"):
        refuse_other_format(file.path, text[:START], file.size)
    return text


def header_of(path: Path, lists: Collection[str] = ()) -> dict[str, Any]:
    """The keys of a GGUF file, with the long lists that are named; needs no gguf package."""
    return parse_gguf(_header_bytes(OpenFile(path)), file=path, lists=lists)[0]


class GgufFile(OpenFile):
    """One GGUF file. `config` has its keys."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        text = _header_bytes(self)
        keys, entries, data_start = parse_gguf(text, file=path)
        self.header = HeaderDigest.of(text[:data_start])
        self.config = Config(keys, path)
        located = {name: self._locate(name, entry, data_start) for name, entry in entries.items()}
        self.tensors = located
        end = 0
        for name, place in sorted(located.items(), key=lambda item: (item[1].start, item[1].stop)):
            if place.start < end:
                raise CheckpointError("overlaps the tensor before it", file=path, tensor=name)
            end = max(end, place.stop)

    def _locate(self, name: str, entry: GgufEntry, data_start: int) -> TensorEntry:
        """A tensor's type and bytes, checked against the file's size."""

        def refuse(problem: str) -> CheckpointError:
            return CheckpointError(problem, file=self.path, tensor=name)

        kind = NUMBERS.get(entry.type)
        if kind is None:
            raise refuse(f"is of ggml type {entry.type}, which is not read")
        per_block, block_bytes = size_of(kind)
        row = entry.shape[-1] if entry.shape else 1
        if row % per_block:
            raise refuse(f"has rows of {row}, which blocks of {per_block} do not divide")
        n_bytes = prod(entry.shape) // per_block * block_bytes
        start = data_start + entry.offset
        if not 0 <= start <= start + n_bytes <= min(self.size, MAX_OFFSET):
            problem = f"ends at byte {start + n_bytes}, but the file has {self.size}"
            raise refuse(f"{problem}; is it cut short?")
        return TensorEntry(kind, entry.shape, start, start + n_bytes)


# Split files of llama-gguf-split and the gguf package; the first has tokenizer and architecture.

NAME_OF_PART = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)
NO, COUNT, ALL_TENSORS = "split.no", "split.count", "split.tensors.count"
MAX_PARTS = 1000  # each is held open


def open_parts(path: Path) -> list[GgufFile]:
    """A GGUF file, or all parts of one that was split, whichever of them is named.

    Raises
    ------
    CheckpointError
        A part is absent, empty or of another file.
    """
    file = _open_part(path)
    count = file.config.count(COUNT)
    if count <= 1:
        return [file]
    if count > MAX_PARTS:
        problem = f"is of a GGUF file in {count} parts; at most {MAX_PARTS} are opened"
        raise CheckpointError(problem, file=path)
    named, number = NAME_OF_PART.fullmatch(path.name), _number(file) + 1
    which = f"part {number} of {count} of a split GGUF file"
    if named is None or int(named["count"]) != count or int(named["no"]) != number:
        problem = f"is {which}, and its name does not say so (NAME-00001-of-{count:05}.gguf)"
        raise CheckpointError(f"{problem}: the others are not found", file=path)
    names = [f"{named['stem']}-{each:05}-of-{count:05}.gguf" for each in range(1, count + 1)]
    paths = [path.with_name(name) for name in names]
    absent = [each.name for each in paths if not each.is_file()]
    if absent:
        more = f" and {len(absent) - 1} more are" if len(absent) > 1 else " is"
        raise CheckpointError(f"is {which}; {absent[0]}{more} not in its folder", file=path)
    parts = [file if each == path else _open_part(each) for each in paths]
    seen: dict[str, Path] = {}
    for number, part in enumerate(parts):
        if part.config.get(COUNT) != count or _number(part) != number:
            problem = f"is not part {number + 1} of {count}, as its name says"
            raise CheckpointError(problem, file=part.path)
        for name in part.tensors:
            if name in seen:
                raise CheckpointError(f"is also in {seen[name].name}", file=part.path, tensor=name)
            seen[name] = part.path
    total = parts[0].config.get(ALL_TENSORS, len(seen))
    if total != len(seen):
        problem = f"says {ALL_TENSORS} {str(total)[:20]}, and the {count} parts have {len(seen)}"
        raise CheckpointError(problem, file=parts[0].path)
    return parts


def _open_part(path: Path) -> GgufFile:
    """Open one GGUF file; the name of an empty one says which part it is."""
    named = NAME_OF_PART.fullmatch(path.name)
    if named and path.is_file() and path.stat().st_size == 0:
        which = f"part {int(named['no'])} of {int(named['count'])} of a split GGUF file"
        problem = f"is empty (0 bytes): {which}; write or download it again"
        raise CheckpointError(problem, file=path)
    return GgufFile(path)


def _number(file: GgufFile) -> int:
    """The number of the part, from 0, that a file says it is."""
    number = file.config.get(NO, 0)
    return number if isinstance(number, int) else -1


def first_part(path: Path) -> Path:
    """The first part of a split GGUF file, by the name of any; else the file itself."""
    named = NAME_OF_PART.fullmatch(path.name)
    first = named and path.with_name(f"{named['stem']}-00001-of-{named['count']}.gguf")
    return first if first and first.is_file() else path


def of_one_split(paths: Sequence[Path]) -> bool:
    """True if files are parts of one split GGUF file, by their names."""
    named = [NAME_OF_PART.fullmatch(path.name) for path in paths]
    return all(named) and len({(each["stem"], each["count"]) for each in named if each}) == 1


@dataclass(frozen=True)
class GgufTensor(StoredTensor):
    """A tensor of one of ggml's types."""

    def ends(self) -> tuple[Tensor, Tensor, int | tuple[float, ...]] | None:
        if (grid := GRIDS.get(self.dtype)) is None:
            return None
        levels = grid.levels
        if isinstance(levels, int):
            least, largest = grid.least, grid.least + levels - 1
        else:
            least, largest = levels[0], levels[-1]
        stored = (self.name, self.entry, self.file, self.noted)
        return GridEnd(*stored, least), GridEnd(*stored, largest), levels

    def check_readable(self) -> None:
        layout = LAYOUTS.get(self.dtype)
        if layout is None:
            super().check_readable()
        elif isinstance(layout, Codebook):
            try:
                layout.entries()
            except CheckpointError as error:
                raise self.refuse(str(error)) from None

    def rows(self, start: int, stop: int) -> np.ndarray:
        if len(self.shape) == 1 and self.dtype not in PLAIN:  # a block has many rows of one element
            self.check_rows(start, stop)
            return self.read()[start:stop]
        return super().rows(start, stop)

    def decode(self, raw: np.ndarray) -> np.ndarray:
        if self.dtype in PLAIN:
            return super().decode(raw)
        return dequantise(raw, self.dtype) if len(raw) else np.empty(0, np.float32)


@dataclass(frozen=True)
class GridEnd(GgufTensor):
    """The first or last value that each group of neighbours can hold, one for each group."""

    level: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        *leading, width = self.entry.shape
        return *leading, width // group_of(self.dtype)

    def decode(self, raw: np.ndarray) -> np.ndarray:
        layout = LAYOUTS[self.dtype]
        assert isinstance(layout, Layout)
        with np.errstate(over="ignore", invalid="ignore"):  # as in `dequantise`
            scale, minimum = layout.scales(raw.reshape(-1, layout.bytes))
            ends = scale * np.float32(self.level)
            return (ends if minimum is None else ends - minimum).reshape(-1)
