"""What an atlas keeps between runs, in the hidden folder of its results: fingerprints, directions, what was withdrawn.

Each file is written whole or not at all and followed by a digest of itself and of what it depends on.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

import weightscope
from weightscope.atlas.descent import Direction, direction_of
from weightscope.atlas.prints import Print
from weightscope.checkpoint.config import MAX_BYTES, parse_json, read_small
from weightscope.errors import CheckpointError
from weightscope.files import HIDDEN, new_file, writing
from weightscope.run_identity import RunIdentity, content_identity, keep_arrays, kept_arrays

FORMAT = 2  # of what is kept
LISTED, WITHDRAWN = "list.json", "withdrawn.json"


def _key(*texts: str) -> str:
    return sha256("\n".join(texts).encode("utf-8", "surrogatepass")).hexdigest()


class Store:
    """Fingerprints and directions of an atlas, by the names of checkpoints."""

    def __init__(self, out: Path, most: int, families: str | None = None) -> None:
        self.folder = out / HIDDEN / "atlas"
        rows = content_identity(Path(families)) if families else None
        facts = {"weightscope": weightscope.__version__, "format": FORMAT, "most": most, "families": rows}
        self._identity = RunIdentity.of(**facts).digest

    def __len__(self) -> int:
        return sum(1 for _ in self.folder.glob("print-*.npz"))

    def get(self, name: str) -> Print | None:
        """A checkpoint's fingerprint; None if there is none of this version and these options, or it was changed."""
        arrays = kept_arrays(self._print(name), self._of(name))
        with suppress(CheckpointError):
            return None if arrays is None else Print.of_arrays(arrays, name)
        return None

    def put(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        """Keep a fingerprint."""
        keep_arrays(self._print(name), arrays, self._of(name))

    def direction(self, *pair: str) -> Direction | None:
        """What is known of a pair, named by the states of both."""
        arrays = kept_arrays(self._pair(pair), self._of(*pair))
        with suppress(CheckpointError, KeyError):
            return None if arrays is None else direction_of(arrays["texts"].tolist())
        return None

    def put_direction(self, pair: Sequence[str], direction: Direction) -> None:
        """Keep what is known of a pair."""
        keep_arrays(self._pair(pair), {"texts": np.array(direction)}, self._of(*pair))

    def forget(self, name: str) -> None:
        """Remove a checkpoint's fingerprint."""
        with writing(self.folder, "removed"), suppress(FileNotFoundError):
            self._print(name).unlink()

    def withdraw(self, names: Iterable[str]) -> None:
        """Remove fingerprints, and remember, by digests of their names, that they are not to be made again."""
        digests = self.withdrawn
        for name in names:
            self.forget(name)
            digests.add(_key(name))
        self._write(WITHDRAWN, {"sha256": sorted(digests)})

    @property
    def withdrawn(self) -> set[str]:
        """Digests of the names that were withdrawn."""
        return set(self._read(WITHDRAWN).get("sha256", ()))

    @staticmethod
    def is_withdrawn(name: str, withdrawn: set[str]) -> bool:
        """Whether a checkpoint is among those that were withdrawn."""
        return _key(name) in withdrawn

    def remember(self, sources: Sequence[str], errors: dict[str, str]) -> None:
        """Remember the list of the last run and what was wrong with some of it."""
        self._write(LISTED, {"sources": list(sources), "errors": errors})

    @property
    def listed(self) -> tuple[list[str], dict[str, str]]:
        """The same, read again."""
        known = self._read(LISTED)
        return list(known.get("sources", ())), dict(known.get("errors", {}))

    def _print(self, name: str) -> Path:
        return self.folder / f"print-{_key(name)[:32]}.npz"

    def _pair(self, pair: Sequence[str]) -> Path:
        return self.folder / f"pair-{_key(*pair)[:32]}.npz"

    def _of(self, *names: str) -> bytes:
        """What the digest of a file covers besides its content."""
        return "\n".join([self._identity, *names]).encode("utf-8", "surrogatepass")

    def _read(self, name: str) -> dict[str, Any]:
        try:
            return parse_json(read_small(self.folder / name, MAX_BYTES), file=self.folder / name)
        except CheckpointError:
            return {}

    def _write(self, name: str, value: Any) -> None:
        with new_file(self.folder / name) as file:
            file.write(json.dumps(value).encode())
