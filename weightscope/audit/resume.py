"""What an interrupted audit leaves on disk, so that a later run can continue: finished layers, one file each."""

import hashlib
import io
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from weightscope.audit.audit import AuditOptions
from weightscope.audit.measures import Arrays
from weightscope.audit.reference import OWN
from weightscope.audit.worker_validation import arrays_of
from weightscope.errors import CheckpointError, counted
from weightscope.files import HIDDEN, new_file, regular_file, writing
from weightscope.model import Model
from weightscope.run_identity import RunIdentity, content_identity
from weightscope.text.tokenizer import Tokenizer

DIGEST_BYTES = 32  # of SHA-256
UNREADABLE = (CheckpointError, OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error)


class FinishedLayers:
    """A folder with one file per finished layer, named for the `identity` of everything that its numbers depend on.

    Each file appears complete under its name or not at all. Layers of other weights or options are discarded; those of
    this identity are kept with `resume`.
    """

    left: list[int]  # layers that are not finished
    notice: str | None  # tells a person about discarded layers

    def __init__(self, out: Path, identity: RunIdentity, layers: Sequence[int], resume: bool) -> None:
        self._layers = list(layers)
        self._identity = identity.digest.encode()
        self.folder = out / HIDDEN / f"layers-{identity.digest[:16]}"
        discarded = foreign = 0  # finished layers of this identity and of others
        for folder in (out / HIDDEN).glob("layers-*"):
            finished = sum(map(_is_finished, folder.glob("layer-*.npz")))
            if folder != self.folder:
                foreign += finished
            elif not resume:
                discarded += finished
            else:
                continue
            with writing(folder, "removed"):
                shutil.rmtree(folder)
        self.notice = _notice(discarded, foreign, resume)
        self.left = [layer for layer in self._layers if self.get(layer) is None]

    def _file(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:04d}.npz"

    def get(self, layer: int) -> dict[str, np.ndarray] | None:
        """The arrays of a layer, or None where it is not finished or its file was changed since."""
        try:
            with regular_file(self._file(layer)) as file:
                content = file.read()
            arrays, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
            if self._digest(arrays) != digest:
                return None
            with np.load(io.BytesIO(arrays), allow_pickle=False) as stored:
                return arrays_of(dict(stored), layer)
        except UNREADABLE:
            return None

    def put(self, layer: int, measured: Mapping[str, np.ndarray]) -> None:
        """Keep a finished layer: an .npz, followed by its digest, which detects a single flipped bit."""
        arrays = io.BytesIO()
        np.savez(arrays, allow_pickle=False, **measured)
        with new_file(self._file(layer), synced=False) as file:
            file.write(arrays.getvalue() + self._digest(arrays.getvalue()))
        self.left.remove(layer)

    def _digest(self, arrays: bytes) -> bytes:
        """SHA-256 of the identity and a layer: one that is copied from another folder has another."""
        return hashlib.sha256(self._identity + arrays).digest()

    def all(self) -> "LayersOnDisk":
        """The arrays of every layer, once none is left."""
        for layer in self._layers:
            if not _is_finished(self._file(layer)):
                raise self.removed(layer)
        return LayersOnDisk(self, self._layers)

    def removed(self, layer: int) -> CheckpointError:
        """What happened to a finished layer that is not there; possible where a folder cannot be locked."""
        problem = f"layer {layer} was finished, and another audit of this folder has removed it since"
        return CheckpointError(f"{problem}; run one at a time", file=self.folder)

    def clear(self) -> None:
        """Remove the layers, once the results are written."""
        shutil.rmtree(self.folder, ignore_errors=True)


class LayersOnDisk(Mapping[int, Arrays]):
    """Finished layers, read whenever they are asked for; a worker on another machine is sent all of them."""

    def __init__(self, finished: FinishedLayers, layers: Sequence[int]) -> None:
        self._finished, self._layers = finished, layers

    def __getitem__(self, layer: int) -> Arrays:
        if layer not in self._layers:
            raise KeyError(layer)
        measured = self._finished.get(layer)
        if measured is None:
            raise self._finished.removed(layer)
        return measured

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _is_finished(path: Path) -> bool:
    """Whether a file looks like a finished layer; a pipe is not waited for."""
    try:
        with regular_file(path) as file:
            return zipfile.is_zipfile(file)
    except UNREADABLE:
        return False


def _notice(discarded: int, foreign: int, resume: bool) -> str | None:
    if discarded:
        return f"discards {counted(discarded, 'finished layer')} of an interrupted audit; `resume` would have kept them"
    layers = counted(foreign, "finished layer")
    if foreign and resume:
        return f"starts afresh: discards {layers} of other options or weights"
    if foreign:
        return f"discards {layers} of an interrupted audit with other options or weights"
    return None


def layers_identity(model: Model, options: AuditOptions) -> RunIdentity:
    """Everything that the numbers of a layer depend on: whether finished layers may be used again."""
    return RunIdentity.of_model(
        model,
        layers=options.layers_of(model),
        deltas=list(options.deltas),
        window=options.window,
        device=options.device,
    )


def results_identity(model: Model, options: AuditOptions) -> RunIdentity:
    """Everything that an audit's tables and page depend on: whether finished results may be kept."""
    asked = asdict(options) | {"layers": options.layers_of(model)}
    read = {"reference": content_identity(Path(options.reference or OWN))}
    read |= {name: content_identity(path) for name, path in options.lists.items()}
    return layers_identity(model, options).of_pages(model, Tokenizer.place_of(model), asked=asked, **read)
