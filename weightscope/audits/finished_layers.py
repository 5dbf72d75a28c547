"""Layers an audit has finished, kept on disk so that a run killed at any moment can go on where it was."""

import hashlib
import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weightscope.folder import write_json, write_npz, writing
from weightscope.wording import counted

FOLDER = ".audit"
MARK = ".audited"  # says which audit's results lie beside it, once all of them do
OWNER = "plan"  # in a layer's file, the digest of the plan that it belongs to
UNREADABLE = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error)


def digest_of(plan: Mapping[str, Any]) -> str:
    """A plan in 64 characters, to tell whether two are the same."""
    return _sha256(json.dumps(plan, sort_keys=True).encode())


class FinishedLayers:
    """A folder with one file a finished layer, each with the digest of the plan that it belongs to.

    Every file appears whole under its name or not at all. Layers of another plan (other weights, other options) are
    thrown away, and never taken for this one's.

    Parameters
    ----------
    out : Path
        Folder of the results; the work lies in `.audit` within.
    plan : mapping
        Everything a layer's numbers depend on.
    resume : bool
        Keep what an earlier run of the same plan has finished.

    Attributes
    ----------
    notice : str or None
        What a person should know of layers that were thrown away.

    Raises
    ------
    CheckpointError
        The folder cannot be written to.
    """

    def __init__(self, out: Path, plan: Mapping[str, Any], resume: bool) -> None:
        self.folder, self._digest = out / FOLDER, digest_of(plan)
        with writing(out):
            self.folder.mkdir(parents=True, exist_ok=True)
            (out / MARK).unlink(missing_ok=True)
            for abandoned in [*out.glob(".*.partial"), *self.folder.glob(".*.partial")]:  # of a run that was killed
                abandoned.unlink(missing_ok=True)
            owners = {file: _owner(file) for file in self.folder.glob("layer-*.npz")}
            thrown_away = [file for file, owner in owners.items() if not (resume and owner == self._digest)]
            for file in thrown_away:
                file.unlink(missing_ok=True)
        self.notice = self._notice([owners[file] for file in thrown_away if owners[file] is not None], resume)

    def _notice(self, thrown_away: list[str | None], resume: bool) -> str | None:
        own = thrown_away.count(self._digest)
        if own:
            return f"discards {counted(own, 'finished layer')} of an interrupted audit; --resume would have kept them"
        foreign = counted(len(thrown_away), "finished layer")
        if thrown_away and resume:
            return f"starts afresh: discards {foreign} of other options or weights"
        if thrown_away:
            return f"discards {foreign} of an interrupted audit with other options or weights"
        return None

    def _file(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:04d}.npz"

    def __contains__(self, layer: int) -> bool:
        return self.get(layer) is not None

    def get(self, layer: int) -> dict[str, np.ndarray] | None:
        """What was measured of a layer, or None where it is not finished.

        A file cut short since does not count, nor one that another audit has put in its place.
        """
        try:
            with np.load(self._file(layer), allow_pickle=False) as stored:
                if str(stored[OWNER]) != self._digest:
                    return None
                return {name: stored[name] for name in stored.files if name != OWNER}
        except UNREADABLE:
            return None

    def put(self, layer: int, measured: Mapping[str, np.ndarray]) -> None:
        """Keep a finished layer."""
        write_npz(self._file(layer), **measured, **{OWNER: np.array(self._digest)})


def _owner(file: Path) -> str | None:
    """The digest in a layer's file; None where it is no whole file."""
    try:
        with np.load(file, allow_pickle=False) as stored:
            return str(stored[OWNER])
    except UNREADABLE:
        return None


def mark_finished(out: Path, digest: str, files: Mapping[str, bytes]) -> None:
    """Say in the folder which audit its results are of, once all are written."""
    write_json(out / MARK, {"plan": digest, "files": {name: _sha256(content) for name, content in files.items()}})


def is_finished(out: Path, digest: str) -> bool:
    """The folder holds all results of this audit, and nobody has written over them since."""
    try:
        mark = json.loads((out / MARK).read_text(encoding="utf-8"))
        return mark["plan"] == digest and all(
            _sha256((out / name).read_bytes()) == expected for name, expected in mark["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
