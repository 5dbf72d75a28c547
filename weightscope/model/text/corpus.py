"""Documents out of plain text, JSON lines and Parquet, one at a time and in bounded memory.

| file | a document is | ends in |
|---|---|---|
| plain text | the file | .txt, .text, .md, and any other file named outright |
| JSON lines | a line, its field "text" | .jsonl, .ndjson, .json |
| Parquet | a row, its column "text" | .parquet |

Text and JSON lines may be compressed (.gz, .bz2, .zst). Text is UTF-8, taken as it stands: no
newline is translated. A few hundred bytes can unpack to gigabytes; what is no text is refused
before it is in memory.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from weightscope.core.errors import CheckpointError
from weightscope.core.files import regular_file

Document = Iterable[str]  # a document is its text in parts: a long file is never in memory at once
Advance = Callable[[int], object]  # called with how many more bytes of a file have been read

FIELD = "text"
TEXT = (".txt", ".text", ".md")
JSON_LINES = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet",)
OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".bz2": bz2.BZ2File,
}
COMPRESSED = (*OPENERS, ".zst")
BLOCK = 1 << 20
ZSTD_BLOCK = 4 << 10  # compressed bytes per read: a few can expand to megabytes
ROWS = 256
LONGEST_DOCUMENT = 32 << 20  # bytes of a line or row, all in memory; the longest books have 5 MB
MOST_CHARACTERS = 1 << 28  # in all documents that a model is run on; they are in memory together
LARGEST_EXPANSION = 200  # times what is on disk; compressed text unpacks to ten times that
ALWAYS_UNPACKED = 64 << 20  # bytes, whatever the expansion


@dataclass(frozen=True)
class CorpusFile:
    """A file to read, its name in messages, and its bytes on disk."""

    path: Path
    name: str
    size: int


def corpus_files(paths: Iterable[str | Path]) -> list[CorpusFile]:
    """The files of a corpus, each once."""
    once: dict[Path, CorpusFile] = {}
    for path in map(Path, paths):
        if path.is_dir():
            folder = path.resolve()
            files = [(file, file.relative_to(folder.parent).as_posix()) for file in _walk(folder)]
            if not files:
                endings = ", ".join(TEXT + JSON_LINES + PARQUET)
                looked_for = f"{endings}; {', '.join(COMPRESSED)} of them"
                raise CheckpointError(
                    f"no text in this folder (looked for {looked_for})", file=folder
                )
        elif path.is_file():
            files = [(path, path.name)]
        else:
            problem = "not a" if path.exists() else "no such"
            raise CheckpointError(f"{path}: {problem} file or folder")
        for file, name in files:
            once.setdefault(file.resolve(), CorpusFile(file, name, file.stat().st_size))
    return list(once.values())


def documents(files: Iterable[CorpusFile], advance: Advance) -> Iterator[Document]:
    """Every document of the files, in order."""
    for file in files:
        ending = _ending(file.path)
        if ending in PARQUET:
            yield from _parquet_rows(file, advance)
        elif ending in JSON_LINES:
            yield from _json_lines(file.path, advance)
        else:
            yield _decoded(file.path, advance)


def read_documents(paths: Iterable[str | Path], most: int = 10_000) -> list[str]:
    """The first documents of a corpus, each as one string."""
    texts, left = [], MOST_CHARACTERS
    for document in islice(documents(corpus_files(paths), lambda _: None), most):
        parts = []
        for part in document:
            parts.append(part)
            left -= len(part)
            if left < 0:
                raise CheckpointError(
                    f"more than {MOST_CHARACTERS} characters of text; give fewer or shorter files"
                )
        texts.append("".join(parts))
    if not any(text.strip() for text in texts):
        raise CheckpointError("the given files contain no text")
    return texts


def _ending(path: Path) -> str:
    """The ending that says what a file holds, under its compression; Parquet has its own."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _walk(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise CheckpointError(f"cannot be read: {error.strerror}", file=error.filename) from error

    known, files = TEXT + JSON_LINES + PARQUET, []
    for parent, _, names in os.walk(folder, onerror=refuse):
        for file in (Path(parent, name) for name in names if not name.startswith(".")):
            if _ending(file) in known and file.is_file():
                files.append(file)
    return sorted(files)


def _decoded(path: Path, advance: Advance) -> Iterator[str]:
    """The text of a file, in parts of about a block."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    for block in chain(_blocks(path, advance), [b""]):
        undecoded = len(decoder.getstate()[0])  # bytes of a character that the last block cut
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            place = offset - undecoded + error.start
            raise CheckpointError(f"invalid UTF-8 at byte {place}", file=path) from error
        yield text.removeprefix("\ufeff") if offset == 0 else text  # a byte-order mark is not text
        offset += len(block)


def _json_lines(path: Path, advance: Advance) -> Iterator[Document]:
    for number, line in enumerate(_lines(path, _blocks(path, advance)), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            problem = f"invalid UTF-8 at byte {error.start} of the line"
            raise CheckpointError(problem, file=where) from error
        except (ValueError, RecursionError) as error:
            problem = f"not JSON ({error}); expected one object a line"
            raise CheckpointError(problem, file=where) from error
        text, actual = None, "no object"
        if isinstance(record, dict):
            text, actual = record.get(FIELD), f"an object with {', '.join(record) or 'nothing'}"
        if not isinstance(text, str):
            problem = f"{actual}; expected an object whose '{FIELD}' is a string"
            raise CheckpointError(problem, file=where)
        if b"\\u" in line and any("\ud800" <= character <= "\udfff" for character in text):
            problem = f"'{FIELD}' has half a surrogate pair, which is not text"
            raise CheckpointError(problem, file=where)
        yield (text,)


def _lines(path: Path, blocks: Iterable[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []
    number, size = 1, 0
    for block in blocks:
        first, *later = block.split(b"\n")
        rest.append(first)
        size += len(first)
        if size > LONGEST_DOCUMENT:
            problem = f"has more than {LONGEST_DOCUMENT} bytes in a line"
            raise CheckpointError(problem, file=f"{path}:{number}")
        if later:
            yield b"".join(rest)
            yield from later[:-1]
            rest, size = [later[-1]], len(later[-1])
            number += len(later)
    yield b"".join(rest)


def _parquet_rows(file: CorpusFile, advance: Advance) -> Iterator[Document]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        problem = "Parquet needs the pyarrow library: pip install pyarrow"
        raise CheckpointError(problem, file=file.path) from error

    row = unpacked = 0
    try:
        _check_column(parquet.read_schema(file.path), file.path)
        # a page at a time, not a row group; equal rows are in memory once
        buffered = {"buffer_size": BLOCK, "pre_buffer": False, "read_dictionary": [FIELD]}
        with parquet.ParquetFile(file.path, **buffered) as source:
            _check_expansion(_declared(source.metadata), file.size, file.path)
            rows = max(source.metadata.num_rows, 1)
            for batch in source.iter_batches(batch_size=ROWS, columns=[FIELD], use_threads=False):
                texts = batch.column(0).dictionary
                for index in batch.column(0).indices.to_pylist():
                    row += 1
                    if index is None:
                        continue
                    if len(texts[index].as_buffer()) > LONGEST_DOCUMENT:
                        problem = f"has more than {LONGEST_DOCUMENT} bytes in a row"
                        raise CheckpointError(problem, file=f"{file.path}:{row}")
                    text = texts[index].as_py()
                    unpacked += len(text)
                    _check_expansion(unpacked, file.size, file.path)
                    yield (text,)
                advance(file.size * row // rows - file.size * (row - len(batch)) // rows)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        problem = f"unreadable Parquet after row {row}: {error}"
        raise CheckpointError(problem, file=file.path) from error


def _declared(metadata: Any) -> int:
    """Unpacked bytes of the column's pages, as the file says."""
    unpacked = 0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if column.path_in_schema == FIELD:
                unpacked += column.total_uncompressed_size
    return unpacked


def _check_expansion(unpacked: int, packed: int, path: Path) -> None:
    if unpacked > ALWAYS_UNPACKED + LARGEST_EXPANSION * packed:
        problem = f"unpacks to more than {LARGEST_EXPANSION} times its size, which text never does"
        raise CheckpointError(problem, file=path)


def _check_column(schema: Any, path: Path) -> None:
    from pyarrow import types

    index = schema.get_field_index(FIELD)  # -1: none of that name, or more than one
    if index < 0:
        raise CheckpointError(f"no column '{FIELD}' (has {', '.join(schema.names)})", file=path)
    kind = schema.field(index).type
    value = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(value) or types.is_large_string(value)):
        raise CheckpointError(f"column '{FIELD}' holds {kind}; expected strings", file=path)


def _blocks(path: Path, advance: Advance) -> Iterator[bytes]:
    """The bytes of a file, decompressed, in blocks that are never empty."""
    broken: Sequence[type[Exception]] = (OSError, EOFError, zlib.error)
    try:
        with regular_file(path) as raw:
            if path.suffix.lower() == ".zst":
                zstandard = _zstandard(path)
                broken = (*broken, zstandard.ZstdError)
                blocks = _unzstd(raw, zstandard.ZstdDecompressor())
            else:
                opener = OPENERS.get(path.suffix.lower())
                stream = opener(raw) if opener else raw
                blocks = iter(lambda: stream.read(BLOCK), b"")
            read = unpacked = 0
            for block in blocks:
                yield block
                unpacked += len(block)
                advance(raw.tell() - read)
                read = raw.tell()
                _check_expansion(unpacked, read, path)
    except tuple(broken) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot be read: {reason}", file=path) from error


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError as error:
        problem = ".zst needs the zstandard library: pip install zstandard"
        raise CheckpointError(problem, file=path) from error
    return zstandard


def _unzstd(raw: IO[bytes], decompressor: Any) -> Iterator[bytes]:
    """Frame after frame. The library's own stream reader accepts a file that was cut short."""
    frame = None
    while block := raw.read(ZSTD_BLOCK):
        while block:
            frame = frame or decompressor.decompressobj()
            text = frame.decompress(block)
            yield from (text[start : start + BLOCK] for start in range(0, len(text), BLOCK))
            block = frame.unused_data
            if frame.eof:
                frame = None
    if frame is not None:
        raise EOFError("the last zstd frame is cut short")
