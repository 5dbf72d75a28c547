"""Digests of the files that a model was read from, as OpenSSF Model Signing computes them.

Each file has its SHA-256 and its path below the model's folder; the model has the SHA-256 over
those digests, as bytes, in the order of paths (model_signing/_signing/signing.py, Payload). Here
the files are those that were read: weights and config. A model card may change without a claim
becoming void.
"""

from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path, PurePath
from typing import Any

from weightscope.checkpoint.adapters.diffusion import is_adapter
from weightscope.checkpoint.provenance import read_digests, source_of
from weightscope.core.errors import CheckpointError
from weightscope.model.model import Model
from weightscope.pairs.lineage.sketches import stored
from weightscope.pairs.lineage.verdict import prints_in

MERGE = "merge the adapter for a claim or an SBOM"
SERIALIZATION = {"method": "files", "hash_type": "sha256"}  # as Model Signing names it


def digests_of(model: Model) -> dict[str, str]:
    """SHA-256 of each file that a model was read from, by name.

    Files on this machine are read whole, whatever the Hub's cache calls them.
    """
    refuse_several_folders(model)
    read_digests(model.checkpoint)
    files = source_of(model.checkpoint)["files"]
    digests = {PurePath(file["name"]).name: file["sha256"] for file in files}
    return {name: digests[name] for name in sorted(digests, key=_in_order)}


def digests_of_print(path: Path) -> tuple[dict[str, str], str]:
    """A fingerprint file's SHA-256 by name, and the digest of heads that it records."""
    about, _, file = stored(path)
    file.read_digest()
    return {path.name: file.sha256}, str(about.get("heads_sha256", ""))


def refuse_nameless(sources: Iterable[str]) -> None:
    """Refuse local sources whose files a claim cannot name; nothing of them is read."""
    for source in sources:
        if prints_in(source):
            how = "a claim or an SBOM names a file: give the .wsf file of each BASE"
            raise CheckpointError(f"is a folder of fingerprints; {how}", file=source)
        if is_adapter(source):
            raise CheckpointError(f"is an adapter: {MERGE}", file=source)


def refuse_several_folders(model: Model) -> None:
    """Refuse a model that is put together from several folders: a claim names the files of one."""
    if len({file.path.parent for file in model.checkpoint.files}) > 1:
        problem = f"is read from several folders, as an adapter on its base is: {MERGE}"
        raise CheckpointError(problem, file=model.checkpoint.name)


def _in_order(name: str) -> tuple[str, ...]:
    """Sort key of a path."""
    return PurePath(name).parts


def model_digest(digests: Mapping[str, str]) -> str:
    """The digest of a model: SHA-256 over its files' digests in the order of their paths."""
    in_order = sorted(digests, key=_in_order)
    return sha256(b"".join(bytes.fromhex(digests[name]) for name in in_order)).hexdigest()


def resources(digests: Mapping[str, str]) -> list[dict[str, Any]]:
    """Files as in-toto describes them."""
    return [{"name": name, "digest": {"sha256": digest}} for name, digest in digests.items()]
