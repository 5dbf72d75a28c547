"""Layers an audit has finished, kept on disk so that a run killed at any moment can go on where it was."""

import hashlib
import io
import shutil
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from weightscope.errors import CheckpointError, counted
from weightscope.fingerprint import Fingerprint
from weightscope.folder import HIDDEN
from weightscope.regular import regular_file
from weightscope.writing import new_file, writing

DIGEST_BYTES = 32  # of SHA-256
UNREADABLE = (CheckpointError, OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error)


class FinishedLayers:
    """A folder with one file a finished layer, named for what the layers' numbers depend on.

    Every file appears whole under its name or not at all. Layers of other weights or options are thrown away, and never
    taken for this audit's.

    Parameters
    ----------
    out : Path
        Folder of the results; the layers lie in `.weightscope` within.
    fingerprint : Fingerprint
        Everything that a layer's numbers depend on.
    layers : sequence of int
        Those to measure.
    resume : bool
        Keep what an earlier run with this fingerprint has finished.

    Attributes
    ----------
    left : list of int
        Layers that are not finished.
    notice : str or None
        What a person should know of layers that were thrown away.

    Raises
    ------
    CheckpointError
        The folder cannot be written to.
    """

    def __init__(self, out: Path, fingerprint: Fingerprint, layers: Sequence[int], resume: bool) -> None:
        self._layers = list(layers)
        self.folder = out / HIDDEN / f"layers-{fingerprint.digest[:16]}"
        own = foreign = 0  # layers that are thrown away
        for folder in (out / HIDDEN).glob("layers-*"):
            finished = sum(map(zipfile.is_zipfile, folder.glob("layer-*.npz")))
            if folder != self.folder:
                foreign += finished
            elif not resume:
                own += finished
            else:
                continue
            with writing(folder, "removed"):
                shutil.rmtree(folder)
        self.notice = _notice(own, foreign, resume)
        self.left = [layer for layer in self._layers if self.get(layer) is None]

    def _file(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:04d}.npz"

    def get(self, layer: int) -> dict[str, np.ndarray] | None:
        """What was measured of a layer, or None where it is not finished; a file changed since does not count."""
        try:
            with regular_file(self._file(layer)) as file:
                content = file.read()
            whole, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
            if hashlib.sha256(whole).digest() != digest:
                return None
            with np.load(io.BytesIO(whole), allow_pickle=False) as stored:
                return dict(stored)
        except UNREADABLE:
            return None

    def put(self, layer: int, measured: Mapping[str, np.ndarray]) -> None:
        """Keep a finished layer: an .npz, and after it the digest by which a single flipped bit is known."""
        whole = io.BytesIO()
        np.savez(whole, allow_pickle=False, **measured)
        with new_file(self._file(layer)) as file:
            file.write(whole.getvalue() + hashlib.sha256(whole.getvalue()).digest())
        self.left.remove(layer)

    def all(self) -> dict[int, dict[str, np.ndarray]]:
        """What was measured of every layer, once none is left.

        Raises
        ------
        CheckpointError
            One that was finished is not there any more.
        """
        finished = {layer: measured for layer in self._layers if (measured := self.get(layer)) is not None}
        for layer in self._layers:
            if layer not in finished:  # where a folder could not be locked
                problem = f"layer {layer} was finished, and another audit of this folder has taken it away since"
                raise CheckpointError(f"{problem}; run one at a time", file=self.folder)
        return finished

    def clear(self) -> None:
        """Throw the layers away, once the results stand."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _notice(own: int, foreign: int, resume: bool) -> str | None:
    if own:
        return f"discards {counted(own, 'finished layer')} of an interrupted audit; `resume` would have kept them"
    others = counted(foreign, "finished layer")
    if foreign and resume:
        return f"starts afresh: discards {others} of other options or weights"
    if foreign:
        return f"discards {others} of an interrupted audit with other options or weights"
    return None
