"""Origin of a result: the command, the version, the time, and digests of what was read.

The SHA-256 of a file's header costs nothing, since the header is read anyway. Weights are read in
pieces, by several threads, and some of them twice: a digest that others can check needs a file's
bytes in order, which is a second pass. So a whole file's digest is given where it is known (see
`Storage.sha256`), and for any file with `--digest`.
"""

import os
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

import weightscope
from weightscope.core.errors import CheckpointError, printable
from weightscope.core.progress import bar

if TYPE_CHECKING:  # commands import this module before they know what to do
    from weightscope.checkpoint.checkpoint import Checkpoint
    from weightscope.checkpoint.storage import Storage

COMMAND: ContextVar[str | None] = ContextVar("the command as it was typed", default=None)
EPOCH = "SOURCE_DATE_EPOCH"  # seconds since 1970, so that results can be made again


def now() -> str:
    """The time in UTC, or SOURCE_DATE_EPOCH's."""
    seconds = os.environ.get(EPOCH)
    try:
        time = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(int(seconds), UTC)
    except (ValueError, OverflowError, OSError):
        problem = f"{EPOCH} is '{printable(seconds)[:40]}'; it should be whole seconds since 1970"
        raise CheckpointError(problem) from None
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Provenance:
    """Origin of a result; a result made in Python has no command."""

    sources: tuple[dict[str, Any], ...] = ()  # one for each checkpoint read; see `source_of`
    command: str | None = field(default_factory=COMMAND.get)  # as it was typed, quoted for a shell
    date: str = field(default_factory=now)  # when the result was made (UTC)
    version: str = weightscope.__version__

    @classmethod
    def of(cls, *checkpoints: "Checkpoint") -> Self:
        """The provenance of what is computed just now from these checkpoints."""
        return cls().of_all(map(source_of, checkpoints))

    def of_all(self, sources: Iterable[dict[str, Any]]) -> Self:
        """A copy with these sources, each once."""
        unique: list[dict[str, Any]] = []
        for source in sources:
            if source and source not in unique:
                unique.append(source)
        return replace(self, sources=tuple(unique))

    def envelope(self, lead: str) -> dict[str, Any]:
        """Start of every result in JSON, and end of every page."""
        about = {"lead": lead, "version": self.version, "command": self.command, "date": self.date}
        return about | {"sources": list(self.sources)}


def source_of(checkpoint: "Checkpoint") -> dict[str, Any]:
    """A checkpoint's name as it was opened, and the known digests of its files."""
    files = [file_record(file) for file in checkpoint.files]
    for name, size, digest in checkpoint.config.stored:
        files.append({"name": printable(name), "size": size, "sha256": digest})
    return {"name": printable(checkpoint.given or checkpoint.name), "files": files}


def is_source(value: Any) -> bool:
    """Detect what `source_of` returns, in a file that was read: pages show it."""

    def is_file(file: Any) -> bool:
        if not isinstance(file, dict) or {*map(type, file.values())} - {str, int}:
            return False
        return isinstance(file.get("name"), str) and type(file.get("size")) is int

    has_files = isinstance(value, dict) and isinstance(value.get("files"), list)
    return has_files and isinstance(value.get("name"), str) and all(map(is_file, value["files"]))


def file_record(file: "Storage") -> dict[str, Any]:
    """A weight file's name, size, commit and etag on the Hub, and digests that are known."""
    record: dict[str, Any] = {"name": printable(file.path.name), "size": file.size}
    published = file.published or {}
    record |= {key: published[key] for key in published if key in ("commit", "etag")}
    record |= {"header_bytes": file.header.size, "header_sha256": file.header.sha256}
    known = {"samples_sha256": file.samples, "sha256": file.sha256}
    return record | {key: digest for key, digest in known.items() if digest}


def read_digests(checkpoint: "Checkpoint") -> None:
    """Make the digests of a checkpoint's files known; read whole what the Hub does not tell."""
    total = sum(file.size for file in checkpoint.files)
    with bar(what="digests", unit="B", total=total, unit_scale=True) as shown:
        for file in checkpoint.files:
            file.read_digest(shown.update)
