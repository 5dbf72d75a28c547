"""Layers an audit has finished, kept on disk so that a run killed at any moment can go on where it was."""

import hashlib
import json
import shutil
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weightscope.output import write_json, write_npz

FOLDER = ".audit"


def digest_of(plan: Mapping[str, Any]) -> str:
    """A plan in 64 characters, to tell whether two are the same."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


class FinishedLayers:
    """A folder with one file a finished layer, and the plan that they belong to.

    Every file appears whole under its name or not at all. Layers of another plan (other weights, other options) are
    thrown away.

    Parameters
    ----------
    out : Path
        Folder of the results; the work lies in `.audit` within.
    plan : mapping
        Everything a layer's numbers depend on.
    resume : bool
        Keep what an earlier run of the same plan has finished.
    """

    def __init__(self, out: Path, plan: Mapping[str, Any], resume: bool) -> None:
        self.folder = out / FOLDER
        digest = digest_of(plan)
        if not (resume and self._plan() == digest):
            shutil.rmtree(self.folder, ignore_errors=True)
            write_json(self.folder / "plan.json", {"sha256": digest})
        for abandoned in [*out.glob(".*.partial"), *self.folder.glob(".*.partial")]:  # of a run that was killed
            abandoned.unlink(missing_ok=True)

    def _plan(self) -> str | None:
        try:
            return str(json.loads((self.folder / "plan.json").read_text(encoding="utf-8"))["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _file(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:04d}.npz"

    def __contains__(self, layer: int) -> bool:
        return self.get(layer) is not None

    def get(self, layer: int) -> dict[str, np.ndarray] | None:
        """What was measured of a layer, or None where it is not finished; a file cut short since does not count."""
        try:
            with np.load(self._file(layer), allow_pickle=False) as stored:
                return {name: stored[name] for name in stored.files}
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error):
            return None

    def put(self, layer: int, measured: Mapping[str, np.ndarray]) -> None:
        """Keep a finished layer."""
        write_npz(self._file(layer), **measured)
