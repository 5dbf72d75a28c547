"""What results depend on, so that a later run, or another machine, can tell whether its own would be the same."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import weightscope
from weightscope.checkpoint.source import LARGEST_SMALL_FILE
from weightscope.checkpoint.storage import Storage
from weightscope.embedded import FOLDER
from weightscope.errors import CheckpointError
from weightscope.families.stored import as_data
from weightscope.model import Model
from weightscope.regular import regular_file

LIBRARIES = ("numpy", "scipy")  # another version changes last digits
DRAWN_WITH = (
    "matplotlib",
    "jinja2",
    "tokenizers",
)  # another version changes pages; without the last there are no tokens
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
PACKAGES = ("site-packages", "dist-packages")
FEW = 3  # files that a message names


@dataclass(frozen=True)
class Fingerprint:
    """Facts that results depend on. Two fingerprints are equal if all their facts are.

    Attributes
    ----------
    text : str
        The facts as JSON, keys in order.
    """

    text: str

    @classmethod
    def of(cls, **facts: Any) -> "Fingerprint":
        """Of any facts that JSON can hold."""
        return cls(json.dumps(facts, sort_keys=True))

    @classmethod
    def of_model(cls, model: Model, **facts: Any) -> "Fingerprint":
        """Of the numbers that a checkpoint's weights give, and of what else a computation was asked for.

        Weights are not read for it: a file is known by its name, size and time, a file on the Hub by its commit and
        etag.
        """
        checkpoint, family = model.checkpoint, model.family
        return cls.of(
            versions={"weightscope": weightscope.__version__} | {name: version(name) for name in LIBRARIES},
            family=[family.name, family.tower, model.prefix + family.layer],
            row=row_identity(model),
            config=_digest(json.dumps(dict(checkpoint.config), sort_keys=True, default=str).encode()),
            files=[_identity(file, checkpoint.folder) for file in checkpoint.files],
            **facts,
        )

    @property
    def facts(self) -> dict[str, Any]:
        """What it was made of."""
        return json.loads(self.text)

    @property
    def digest(self) -> str:
        """The fingerprint in 64 characters."""
        return _digest(self.text.encode())

    def also(self, **facts: Any) -> "Fingerprint":
        """With more facts."""
        return Fingerprint.of(**self.facts, **facts)

    def of_pages(self, model: Model, tokenizer_at: Path, **facts: Any) -> "Fingerprint":
        """With what a page shows beside numbers: the checkpoint's name, its tokens, and the libraries that draw.

        Its tokenizer is the one at `tokenizer_at`, a folder or a file.
        """
        apart = model.tokenizer != model.source
        tokenizer = tokenizer_identity(tokenizer_at)
        named = {"tokenizer_at": model.tokenizer} if apart else {}
        return self.also(name=model.name, tokenizer=tokenizer, drawn_with=_versions(DRAWN_WITH), **named, **facts)

    def refuse_other(self, found: "Fingerprint", name: str) -> None:
        """Refuse to work, on a worker, on something else than the machine that it works for.

        Raises
        ------
        CheckpointError
            `found`, on the worker, is another; the message says in what.
        """
        if found == self:
            return
        worker, machine = found.facts, self.facts
        for package, wanted in machine.get("versions", {}).items():
            own = worker["versions"][package]
            if own != wanted:
                raise CheckpointError(f"a worker has {package} {own}, the machine it works for has {wanted}")
        differing = [key for key in machine if worker[key] != machine[key]]
        on_worker, on_machine = (", ".join(_in_words(facts[key]) for key in differing) for facts in (worker, machine))
        raise CheckpointError(
            f"is not the same on a worker ({on_worker}) as on the machine it works for ({on_machine}); "
            "workers read a shared file system, or one commit of the Hub (SOURCE@COMMIT)",
            file=name,
        )


def row_identity(model: Model) -> list[str] | None:
    """Where a row is from that the table has not, and a digest of its cells; None for those of the table."""
    row = model.family
    return [row.origin, _digest(json.dumps(as_data(row), sort_keys=True).encode())] if row.origin else None


def _versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Of packages that may not be installed."""
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def file_identity(path: Path) -> dict[str, Any] | None:
    """Name, size and time of a file on this machine, or None where there is none."""
    if not path.is_file():
        return None
    status = path.stat()
    return {"name": path.name, "size": status.st_size, "modified": status.st_mtime_ns}


def weights_digest(model: Model) -> str:
    """SHA-256 of a checkpoint's weights: of a single file its own, of several that of their digests, a line each.

    Files on this machine are read through for it; the Hub's etag of a large file is its digest.
    """
    of_files = [
        str(file.identity.get("etag") or content_identity(Path(file.path)).get("sha256"))
        for file in model.checkpoint.files
    ]
    return of_files[0] if len(of_files) == 1 else _digest("\n".join(of_files).encode())


def weights_size(model: Model) -> int:
    """Bytes of a checkpoint's files of weights."""
    return sum(file.identity["size"] for file in model.checkpoint.files)


def tokenizer_identity(folder: Path) -> list[dict[str, Any]]:
    """The files of a folder that make a tokenizer, or the file that is one, known by their content."""
    files = [folder] if folder.is_file() else [folder / name for name in TOKENIZER_FILES]
    return [_small_identity(file) for file in files if file.is_file()]


def _small_identity(path: Path) -> dict[str, Any]:
    """Of a file that is read whole; one too large for that, or a GGUF file with its weights, by its size and time."""
    large = path.stat().st_size > LARGEST_SMALL_FILE
    return (file_identity(path) if large else None) or content_identity(path)


def _identity(file: Storage, folder: Path) -> dict[str, Any]:
    """A file of an installed package is known by its content: each machine has installed it at another time."""
    if folder == FOLDER or any(part in PACKAGES for part in folder.parts):
        return content_identity(Path(file.path))
    return dict(file.identity)


def content_identity(path: Path) -> dict[str, Any]:
    """Name, size and digest of a file on this machine."""
    try:
        with regular_file(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"name": path.name, "size": path.stat().st_size, "sha256": digest}
    except (OSError, CheckpointError) as error:  # whoever needs the file says so
        return {"name": path.name, "unreadable": str(error)}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _in_words(fact: Any) -> str:
    """A fact in a message."""
    match fact:
        case None:
            return "not there"
        case [{"name": _}, *_]:
            return ", ".join(map(_in_words, fact[:FEW])) + (", ..." if len(fact) > FEW else "")
        case {"name": name, "size": size, "commit": commit}:
            return f"{name} of {size} bytes at {commit}"
        case {"name": name, "size": size, "modified": nanoseconds}:
            return f"{name} of {size} bytes, {datetime.fromtimestamp(nanoseconds / 1e9, UTC):%Y-%m-%d %H:%M:%S}"
        case {"name": name, "size": size}:
            return f"{name} of {size} bytes"
    return str(fact)[:64]
