"""Digests of the files that a model was read from, as OpenSSF Model Signing computes them.

Each file has its SHA-256 and its path below the model's folder; the model has the SHA-256 over those digests, as bytes,
in the order of paths (model_signing/_signing/signing.py, Payload). Here the files are those that were read: weights and
config. A model card may change without a claim becoming void.
"""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import PurePath
from typing import Any

from weightscope.errors import CheckpointError
from weightscope.lineage.sketches import Sketches
from weightscope.provenance import read_digests, source_of

SERIALIZATION = {"method": "files", "hash_type": "sha256"}  # as Model Signing names it


def digests_of(sketches: Sketches) -> dict[str, str]:
    """SHA-256 of each file that a fingerprint was just made from, or of the fingerprint's own file, by name.

    Files on this machine are read whole, whatever the Hub's cache calls them.
    """
    files = sketches.read["files"]
    if sketches.source is not None:
        checkpoint = sketches.source.checkpoint
        if len({file.path.parent for file in checkpoint.files}) > 1:
            problem = "is read from several folders, as an adapter on its base is: merge the adapter for a claim"
            raise CheckpointError(problem, file=checkpoint.name)
        read_digests(checkpoint)
        files = source_of(checkpoint)["files"]
    digests = {PurePath(file["name"]).name: file["sha256"] for file in files}
    return {name: digests[name] for name in sorted(digests, key=_in_order)}


def _in_order(name: str) -> tuple[str, ...]:
    """What paths are sorted by."""
    return PurePath(name).parts


def model_digest(digests: Mapping[str, str]) -> str:
    """The digest of a model: SHA-256 over its files' digests in the order of their paths."""
    return sha256(b"".join(bytes.fromhex(digests[name]) for name in sorted(digests, key=_in_order))).hexdigest()


def resources(digests: Mapping[str, str]) -> list[dict[str, Any]]:
    """Files as in-toto describes them."""
    return [{"name": name, "digest": {"sha256": digest}} for name, digest in digests.items()]
