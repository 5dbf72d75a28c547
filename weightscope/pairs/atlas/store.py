"""Fingerprints, directions and withdrawn names that an atlas keeps between runs.

They lie in the hidden folder of its results. Each file is written whole or not at all, followed by
a digest of itself and of its inputs.
"""

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

import weightscope
from weightscope.checkpoint.config import MAX_BYTES, read_small
from weightscope.core.errors import CheckpointError, one_line
from weightscope.core.files import HIDDEN, new_file, writing
from weightscope.model.run_identity import RunIdentity, content_identity, keep_arrays, kept_arrays
from weightscope.pairs.atlas.descent import Direction, direction_of
from weightscope.pairs.atlas.prints import Print

FORMAT = 2  # version of the kept files
LARGEST_KEPT = 16 * MAX_BYTES  # size of a list of sources with their errors
LISTED, WITHDRAWN = "list.json", "withdrawn.json"


def _key(*texts: str) -> str:
    return sha256("\n".join(texts).encode("utf-8", "surrogatepass")).hexdigest()


class Store:
    """Fingerprints and directions of an atlas, by the names of checkpoints."""

    def __init__(self, out: Path, most: int, families: str | None = None) -> None:
        self.folder = out / HIDDEN / "atlas"
        rows = content_identity(Path(families)) if families else None
        facts = {
            "weightscope": weightscope.__version__,
            "format": FORMAT,
            "most": most,
            "families": rows,
        }
        self._identity = RunIdentity.of(**facts).digest

    def __len__(self) -> int:
        return sum(1 for _ in self.folder.glob("print-*.npz"))

    def get(self, name: str) -> Print | None:
        """A checkpoint's fingerprint; None without an intact one of this version and options."""
        arrays = kept_arrays(self._print(name), self._of(name))
        with suppress(CheckpointError):
            return None if arrays is None else Print.of_arrays(arrays, name)
        return None

    def put(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        """Keep a fingerprint."""
        keep_arrays(self._print(name), arrays, self._of(name))

    def direction(self, *pair: str) -> Direction | None:
        """The kept direction of a pair, named by the states of both."""
        arrays = kept_arrays(self._pair(pair), self._of(*pair))
        with suppress(CheckpointError, KeyError):
            return None if arrays is None else direction_of(arrays["texts"].tolist())
        return None

    def put_direction(self, pair: Sequence[str], direction: Direction) -> None:
        """Keep the direction of a pair."""
        keep_arrays(self._pair(pair), {"texts": np.array(direction)}, self._of(*pair))

    def withdraw(self, names: Iterable[str]) -> None:
        """Remove fingerprints, and remember digests of their names so they stay removed."""
        digests = self.withdrawn
        for name in names:
            with writing(self.folder, "removed"), suppress(FileNotFoundError):
                self._print(name).unlink()
            digests.add(_key(name))
        self._write(WITHDRAWN, {"sha256": sorted(digests)})

    @property
    def withdrawn(self) -> set[str]:
        """Digests of the names that were withdrawn."""
        digests = self._read(WITHDRAWN).get("sha256", [])
        if not _is_list_of_texts(digests):
            raise self._damaged(WITHDRAWN, "sha256 should be a list of texts")
        return set(digests)

    @staticmethod
    def is_withdrawn(name: str, withdrawn: set[str]) -> bool:
        """True if a checkpoint was withdrawn."""
        return _key(name) in withdrawn

    def remember(self, sources: Sequence[str], errors: dict[str, str]) -> None:
        """Remember the list of the last run and what was wrong with some of it."""
        self._write(LISTED, {"sources": list(sources), "errors": errors})

    @property
    def listed(self) -> tuple[list[str], dict[str, str]]:
        """The list of the last run, and its errors by source."""
        record = self._read(LISTED)
        sources, errors = record.get("sources", []), record.get("errors", {})
        are_texts = isinstance(errors, dict) and _is_list_of_texts([*errors.values()])
        if not _is_list_of_texts(sources) or not are_texts:
            needed = "sources should be a list of texts, and errors texts by source"
            raise self._damaged(LISTED, needed)
        return sources, errors

    def _print(self, name: str) -> Path:
        return self.folder / f"print-{_key(name)[:32]}.npz"

    def _pair(self, pair: Sequence[str]) -> Path:
        return self.folder / f"pair-{_key(*pair)[:32]}.npz"

    def _of(self, *names: str) -> bytes:
        """The inputs that a file's digest covers besides its content."""
        return "\n".join([self._identity, *names]).encode("utf-8", "surrogatepass")

    def _read(self, name: str) -> dict[str, Any]:
        """Read a file that `_write` wrote, {} without one; damage may hide withdrawn names."""
        if not os.path.lexists(self.folder / name):
            return {}
        try:
            value = json.loads(read_small(self.folder / name, LARGEST_KEPT))
        except (ValueError, RecursionError) as error:
            raise self._damaged(name, one_line(error)) from None
        if not isinstance(value, dict):
            raise self._damaged(name, f"it is a JSON {type(value).__name__}")
        return value

    def _damaged(self, name: str, problem: str) -> CheckpointError:
        how = "bring it back, or make the atlas in another folder"
        changed = f"was changed since the atlas was made ({problem})"
        return CheckpointError(f"{changed}; {how}", file=self.folder / name)

    def _write(self, name: str, value: Any) -> None:
        with new_file(self.folder / name) as file:
            file.write(json.dumps(value).encode())


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
