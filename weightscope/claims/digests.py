"""Digests of the files that a model was read from, as OpenSSF Model Signing computes them.

Each file has its SHA-256 and its path below the model's folder; the model has the SHA-256 over those digests, as bytes,
in the order of paths (model_signing/_signing/signing.py, Payload). Here the files are those that were read: weights and
config. A model card may change without a claim becoming void.
"""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from weightscope.errors import CheckpointError
from weightscope.lineage.sketches import Sketches, stored
from weightscope.model import Model
from weightscope.provenance import read_digests, source_of

SERIALIZATION = {"method": "files", "hash_type": "sha256"}  # as Model Signing names it


class Print(NamedTuple):
    """A fingerprint's file, and the digests of the files that it says it was made of; empty if it lacks any."""

    file: str
    sha256: str
    made_of: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> "Print":
        """A file that is not opened yet."""
        about, _, file = stored(path)
        file.read_digest()
        return cls(path.name, file.sha256, _named_files(about))

    @classmethod
    def of(cls, sketches: Sketches) -> "Print":
        """The file that sketches were read from."""
        (file,) = sketches.read["files"]
        return cls(file["name"], file["sha256"], _named_files(sketches.about))


def _named_files(about: Mapping[str, Any]) -> dict[str, str]:
    """Digests of the files that a fingerprint says it was made of; empty if it lacks any."""
    files = about.get("files", [])
    return {file["name"]: file["sha256"] for file in files} if all("sha256" in file for file in files) else {}


def digests_of(source: Model | Print) -> dict[str, str]:
    """SHA-256 of each file that a model was read from, or of a fingerprint's file, by name.

    Files on this machine are read whole, whatever the Hub's cache calls them.
    """
    if isinstance(source, Print):
        return {source.file: source.sha256}
    refuse_several_folders(source)
    read_digests(source.checkpoint)
    digests = {PurePath(file["name"]).name: file["sha256"] for file in source_of(source.checkpoint)["files"]}
    return {name: digests[name] for name in sorted(digests, key=_in_order)}


def refuse_several_folders(model: Model) -> None:
    """Refuse a model that is put together from several folders: a claim names the files of one."""
    if len({file.path.parent for file in model.checkpoint.files}) > 1:
        problem = "is read from several folders, as an adapter on its base is: merge the adapter for a claim or an SBOM"
        raise CheckpointError(problem, file=model.checkpoint.name)


def _in_order(name: str) -> tuple[str, ...]:
    """What paths are sorted by."""
    return PurePath(name).parts


def model_digest(digests: Mapping[str, str]) -> str:
    """The digest of a model: SHA-256 over its files' digests in the order of their paths."""
    return sha256(b"".join(bytes.fromhex(digests[name]) for name in sorted(digests, key=_in_order))).hexdigest()


def resources(digests: Mapping[str, str]) -> list[dict[str, Any]]:
    """Files as in-toto describes them."""
    return [{"name": name, "digest": {"sha256": digest}} for name, digest in digests.items()]
