"""Identities of runs: equal if a later run, or another machine, would get the same results."""

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

import weightscope
from weightscope.checkpoint.opening import LARGEST_SMALL_FILE, TOKENIZER_FILES
from weightscope.checkpoint.storage import Storage
from weightscope.core.embedded import FOLDER
from weightscope.core.engine import unexpected
from weightscope.core.errors import CheckpointError
from weightscope.core.files import arrays_in, new_file, regular_file, without_objects
from weightscope.model.model import Model
from weightscope.model.rows.stanzas import stanza_of

LIBRARIES = ("numpy", "scipy")  # another version changes last digits
DRAWN_WITH = ("matplotlib", "jinja2", "tokenizers")  # another version changes pages
PACKAGES = ("site-packages", "dist-packages")
FEW = 3  # files named in a message


@dataclass(frozen=True)
class RunIdentity:
    """Facts that results depend on; equal if all facts are."""

    text: str  # the facts as JSON with sorted keys

    @classmethod
    def of(cls, **facts: Any) -> "RunIdentity":
        """The identity of a run by facts that JSON can represent."""
        return cls(json.dumps(facts, sort_keys=True))

    @classmethod
    def of_model(cls, model: Model, **facts: Any) -> "RunIdentity":
        """The identity of a run on one checkpoint with a computation's own options.

        A local file is identified by name, size, time and content (of a large file samples, and its
        inode), a file on the Hub by commit and etag.
        """
        checkpoint, family = model.checkpoint, model.family
        libraries = {name: version(name) for name in LIBRARIES}
        config = json.dumps(dict(checkpoint.config), sort_keys=True, default=str)
        return cls.of(
            versions={"weightscope": weightscope.__version__} | libraries,
            family=[family.name, family.tower, model.prefix + family.layer],
            row=row_identity(model),
            config=_digest(config.encode()),
            files=[_identity(file, checkpoint.folder) for file in checkpoint.files],
            **facts,
        )

    @property
    def facts(self) -> dict[str, Any]:
        """The facts."""
        return json.loads(self.text)

    @property
    def digest(self) -> str:
        """SHA-256 of the facts, as 64 characters."""
        return _digest(self.text.encode())

    def also(self, **facts: Any) -> "RunIdentity":
        """This identity with more facts."""
        return RunIdentity.of(**self.facts, **facts)

    def of_pages(self, model: Model, tokenizer_at: Path, **facts: Any) -> "RunIdentity":
        """This identity with all that pages depend on: name, tokenizer file or folder, drawing
        libraries.
        """
        if model.tokenizer != model.source:
            facts["tokenizer_at"] = model.tokenizer
        tokenizer, drawn_with = tokenizer_identity(tokenizer_at), _versions(DRAWN_WITH)
        return self.also(name=model.name, tokenizer=tokenizer, drawn_with=drawn_with, **facts)

    def refuse_other(self, on_this_worker: "RunIdentity", name: str) -> None:
        """Refuse, on a worker, a source that differs from the main machine's."""
        if on_this_worker == self:
            return
        worker, machine = on_this_worker.facts, self.facts
        for package, wanted in machine.get("versions", {}).items():
            installed = worker["versions"][package]
            if installed != wanted:
                raise CheckpointError(
                    f"a worker has {package} {installed}, the machine it works for has {wanted}"
                )
        differing = [key for key in machine if worker[key] != machine[key]]
        on_worker = ", ".join(_in_words(worker[key]) for key in differing)
        on_machine = ", ".join(_in_words(machine[key]) for key in differing)
        raise CheckpointError(
            f"is not the same on a worker ({on_worker}) as on the machine it works for "
            f"({on_machine}); workers read a shared file system, or one commit of the Hub "
            "(SOURCE@COMMIT)",
            file=name,
        )


PLAIN = "biufcU"  # kinds of NumPy array: numbers and text, no objects
DIGEST_BYTES = 32  # length of SHA-256
DAMAGED = (EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error)
UNREADABLE = (CheckpointError, OSError, MemoryError, *DAMAGED)


def keep_arrays(path: Path, arrays: Mapping[str, np.ndarray], identity: bytes) -> None:
    """Write an .npz and SHA-256 of identity and content, to detect damage and files of other runs.

    The file appears complete under its name or not at all.
    """
    content = io.BytesIO()
    np.savez(content, **without_objects(arrays))
    with new_file(path, synced=False) as file:
        file.write(content.getvalue() + hashlib.sha256(identity + content.getvalue()).digest())


def kept_arrays(path: Path, identity: bytes) -> dict[str, np.ndarray] | None:
    """Read the arrays of `keep_arrays`; None if missing, changed or of another identity."""
    try:
        with regular_file(path) as file:
            content = file.read()
        arrays, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
        if hashlib.sha256(identity + arrays).digest() != digest:
            return None
        return arrays_in(io.BytesIO(arrays))
    except UNREADABLE:
        return None


def arrays_of(answer: Any, what: str) -> dict[str, np.ndarray]:
    """A worker's answer, if it is a dictionary of plain arrays."""

    def is_plain(name: Any, array: Any) -> bool:
        is_name = isinstance(name, str) and name.isidentifier()
        return is_name and isinstance(array, np.ndarray) and array.dtype.kind in PLAIN

    if isinstance(answer, dict) and answer and all(is_plain(*item) for item in answer.items()):
        return answer
    raise unexpected(what, type(answer).__name__, "arrays by name")


def row_identity(model: Model) -> list[str] | None:
    """Origin and digest of a user's or adopted row; None for a built-in one."""
    row = model.family
    return [row.origin, _digest(stanza_of(row).encode())] if row.origin else None


def _versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Versions of packages; None for one that is not installed."""
    versions: dict[str, str | None] = {}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def file_identity(path: Path) -> dict[str, Any] | None:
    """Name, size and time of a local file; None if it does not exist."""
    if not path.is_file():
        return None
    status = path.stat()
    return {"name": path.name, "size": status.st_size, "modified": status.st_mtime_ns}


def weights_digest(model: Model) -> str:
    """SHA-256 of a checkpoint's file, or of the lines of the files' digests."""
    digests = [_digest_of(file) for file in model.checkpoint.files]
    return digests[0] if len(digests) == 1 else _digest("\n".join(digests).encode())


def weights_size(model: Model) -> int:
    """Bytes of a checkpoint's weight files."""
    return sum(file.size for file in model.checkpoint.files)


def tokenizer_identity(folder: Path) -> list[dict[str, Any]]:
    """Identities by content of a folder's tokenizer files, or of one file."""
    files = [folder] if folder.is_file() else [folder / name for name in TOKENIZER_FILES]
    return [_small_identity(file) for file in files if file.is_file()]


def _small_identity(path: Path) -> dict[str, Any]:
    """Identity by content, or by size and time if too large (GGUF with its weights)."""
    large = path.stat().st_size > LARGEST_SMALL_FILE
    return (file_identity(path) if large else None) or content_identity(path)


def _identity(file: Storage, folder: Path) -> dict[str, Any]:
    """Identity of a weight file; by content in an installed package, as install times differ."""
    if folder == FOLDER or any(part in PACKAGES for part in folder.parts):
        return {"name": file.path.name, "size": file.size, "sha256": _digest_of(file)}
    return dict(file.identity)


def _digest_of(file: Storage) -> str:
    """SHA-256 of a weight file, which is read whole unless its digest is known."""
    if not file.sha256:
        file.read_digest()
    return file.sha256


def content_identity(path: Path) -> dict[str, Any]:
    """Name, size and SHA-256 of a local file."""
    try:
        with regular_file(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"name": path.name, "size": path.stat().st_size, "sha256": digest}
    except (OSError, CheckpointError) as error:  # code that needs the file reports it
        return {"name": path.name, "unreadable": str(error)}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _when(nanoseconds: int) -> str:
    """A time in words; a file's may be outside Python's calendar."""
    try:
        return f"{datetime.fromtimestamp(nanoseconds / 1e9, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return f"{nanoseconds / 1e9:.3g} seconds after 1970"


def _in_words(fact: Any) -> str:
    """A fact for a message."""
    match fact:
        case None:
            return "not there"
        case [{"name": _}, *_]:
            return ", ".join(map(_in_words, fact[:FEW])) + (", ..." if len(fact) > FEW else "")
        case {"name": name, "size": size, "commit": commit}:
            return f"{name} of {size} bytes at {commit}"
        case {"name": name, "size": size, "modified": nanoseconds}:
            digest = f", SHA-256 {fact['sha256'][:8]}..." if "sha256" in fact else ""
            return f"{name} of {size} bytes, {_when(nanoseconds)}{digest}"
        case {"name": name, "size": size}:
            return f"{name} of {size} bytes"
    return str(fact)[:64]
