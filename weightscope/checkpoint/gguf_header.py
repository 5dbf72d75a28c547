"""The header of a GGUF file (ggml's own format, version 2 or 3), checked before a byte of data is believed.

Layout: magic, version, counts; keys and values; tensors by name with shape, type and offset; padding; the data. The
gguf package has a reader, which maps the file and believes what its counts say; this one reads and checks.
"""

import struct
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from typing import Any

from weightscope.checkpoint.header import MAX_OFFSET
from weightscope.errors import CheckpointError

MAX_HEADER_BYTES = 64_000_000  # vocabularies and their merges lie in the header: 20 MB for 256,000 tokens
MAX_KEYS = 10_000
MAX_TENSORS = 50_000
MAX_STRINGS = 1_000_000
MAX_NUMBERS = 1_000_000  # kept of lists, all together: a byte of one may cost thirty of memory
LONGEST_LIST = 10_000  # a longer one is skipped: vocabularies, which are not read here
MAX_DIMENSIONS = 4

# Value types by number: what struct calls them. 8 is a string, 9 an array.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufEntry:
    """One tensor: the number of its type, its shape as NumPy has it, and its offset within the data."""

    type: int
    shape: tuple[int, ...]
    offset: int


class _Cursor:
    """Reads a header from its start; nothing past its end is ever believed."""

    def __init__(self, text: bytes, file: object) -> None:
        self.text, self.file, self.at, self.strings, self.numbers = text, file, 0, 0, 0

    def refuse(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{problem} (at byte {self.at} of the header)", file=self.file)

    def skip(self, n: int) -> int:
        """Step over n bytes that have to be there; where they start."""
        start = self.at
        if n > len(self.text) - start:
            raise self.refuse("GGUF header is cut short or longer than is read")
        self.at += n
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

    def value(self, strings: bool = False) -> Any:
        """A value; a list too long to be of use is stepped over and is None, and so is one of strings unless asked."""
        kind = self.number("I")
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise self.refuse(f"GGUF header has a value of type {kind}, which the format does not define")
        kind, length = self.number("I"), self.number("Q")
        if kind in SCALARS:
            size = struct.calcsize("<" + SCALARS[kind])
            start = self.skip(length * size)
            if length > LONGEST_LIST:
                return None
            self.numbers += length
            if self.numbers > MAX_NUMBERS:
                raise self.refuse(f"GGUF header has lists of {self.numbers} numbers; at most {MAX_NUMBERS} are read")
            return list(struct.unpack_from(f"<{length}{SCALARS[kind]}", self.text, start))
        if kind != STRING:
            raise self.refuse(f"GGUF header has a list of type {kind}, which is not read")
        self.strings += length
        if self.strings > MAX_STRINGS:
            raise self.refuse(f"GGUF header has {self.strings} strings; at most {MAX_STRINGS} are read")
        if strings:
            return [self.string() for _ in range(length)]
        for _ in range(length):
            self.skip(self.number("Q"))
        return None


def parse_gguf(
    text: bytes, *, file: object, lists: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, GgufEntry], int]:
    """Keys, tensors and where the data start.

    Parameters
    ----------
    text : bytes
        The file's start, long enough to hold the header.
    file : path-like
        Named in errors.
    lists : collection of str
        Keys whose lists of strings are wanted.

    Raises
    ------
    CheckpointError
        It is no GGUF file of a version that is read, is cut short, or says what cannot be.
    """
    cursor = _Cursor(text, file)
    if text[:4] != b"GGUF":
        raise CheckpointError("is not a GGUF file", file=file)
    cursor.skip(4)
    version = cursor.number("I")
    if version not in {2, 3}:
        raise CheckpointError(f"is GGUF version {version}; versions 2 and 3 of little-endian files are read", file=file)
    n_tensors, n_keys = cursor.number("Q"), cursor.number("Q")
    if n_tensors > MAX_TENSORS or n_keys > MAX_KEYS:
        raise cursor.refuse(f"GGUF header has {n_tensors} tensors and {n_keys} keys")
    keys: dict[str, Any] = {}
    for _ in range(n_keys):
        name = cursor.string()
        if name in keys:
            raise cursor.refuse(f"GGUF header has key '{name[:100]}' twice")
        keys[name] = cursor.value(name in lists)
    tensors: dict[str, GgufEntry] = {}
    for _ in range(n_tensors):
        name, n_dimensions = cursor.string(), cursor.number("I")
        if n_dimensions > MAX_DIMENSIONS:
            raise cursor.refuse(f"GGUF tensor '{name[:100]}' has {n_dimensions} dimensions")
        sizes = [cursor.number("Q") for _ in range(n_dimensions)]
        if prod(size for size in sizes if size) * 8 > MAX_OFFSET:
            raise CheckpointError(f"has sizes {sizes}, more elements than any file holds", file=file, tensor=name)
        if name in tensors:
            raise CheckpointError("stands in the GGUF header twice", file=file, tensor=name)
        tensors[name] = GgufEntry(cursor.number("I"), tuple(reversed(sizes)), cursor.number("Q"))
    alignment = keys.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise CheckpointError(f"has alignment {str(alignment)[:40]}", file=file)
    return keys, tensors, -(-cursor.at // alignment) * alignment
