"""Blocks of remote files, kept on disk: each with its digest, which is checked whenever it is used again."""

import contextlib
import hashlib
from pathlib import Path

from weightscope.errors import CheckpointError
from weightscope.regular import regular_file
from weightscope.writing import new_file

DIGEST_BYTES = hashlib.sha256().digest_size


class BlockCache:
    """The blocks of one file.

    They lie among the Hub's cached assets (HF_ASSETS_CACHE/weightscope/blocks, which may be deleted at any time), in a
    folder named for what the file's content is known by, so that a file that has changed finds no block of its former
    self. A disk that is full or cannot be written means no cache, not an
    error.

    Parameters
    ----------
    identity : tuple of str
        Endpoint, repository, file and etag.
    """

    def __init__(self, *identity: str) -> None:
        from huggingface_hub import constants

        folder = hashlib.sha256("\n".join(identity).encode("utf-8", "surrogatepass")).hexdigest()
        self._folder = Path(constants.HF_ASSETS_CACHE) / "weightscope" / "blocks" / folder

    def has(self, key: str, size: int) -> bool:
        """Whether a block of this size is there, its content unchecked."""
        try:
            return (self._folder / key).stat().st_size == size + DIGEST_BYTES
        except OSError:
            return False

    def get(self, key: str) -> bytes | None:
        """The block, or None where there is none or its content is not what was kept."""
        try:
            with regular_file(self._folder / key) as file:
                kept = file.read()
        except (OSError, CheckpointError):
            return None
        content, digest = kept[:-DIGEST_BYTES], kept[-DIGEST_BYTES:]
        return content if hashlib.sha256(content).digest() == digest else None

    def put(self, key: str, content: bytes) -> None:
        """Keep a block; it appears under its name complete or not at all."""
        with contextlib.suppress(CheckpointError), new_file(self._folder / key) as file:
            file.write(content)
            file.write(hashlib.sha256(content).digest())
