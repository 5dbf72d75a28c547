"""Find the fingerprints in a folder that are most like a suspect, from sums over heads."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weightscope.engine import Engine
from weightscope.errors import CheckpointError, one_line
from weightscope.files import writing
from weightscope.lineage.sketches import POINTS, SUFFIX, Sketches, fingerprint, load, stored
from weightscope.progress import bar
from weightscope.sources import Source

COMPARED = 8  # fingerprints of a registry whose heads are compared
OF_LAYERS = ("direct", "tokens", "spectra")


def prints_in(source: str | Path) -> list[Path]:
    """The fingerprint files in a folder, by name; none if it is not a folder, or holds a checkpoint."""
    folder = Path(source)
    is_registry = source != "" and folder.is_dir() and not (folder / "config.json").exists()
    return sorted(folder.glob(f"*{SUFFIX}")) if is_registry else []


def make_prints(
    sources: Sequence[Source], names: Sequence[str], out: Path, engine: Engine
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Write a fingerprint of every source into a folder; yield its name, its problem if it failed, what was read."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    waiting = list(zip(sources, names, strict=True))[::-1]
    while waiting or engine.busy:
        if waiting and engine.hungry:
            source, name = waiting.pop()
            engine.submit(name, _print_of, source)
            continue
        ended = engine.next()
        made = ended.value if ended.error is None and isinstance(ended.value, Sketches) else None
        if made is not None:
            made.save(out / f"{ended.key}{SUFFIX}")
        elif not isinstance(ended.error, CheckpointError | None):
            raise ended.error
        yield ended.key, "" if ended.error is None else one_line(ended.error), made.read if made else {"files": []}


def _print_of(source: Source) -> Sketches:
    """A fingerprint as a worker returns it."""
    return replace(fingerprint(source.open()), source=None)


class Nearest(NamedTuple):
    """What a folder of fingerprints has for a suspect."""

    bases: list[tuple[str, Sketches]]  # each with its file name
    unread: list[str]  # why others were skipped, beginning with their names


def nearest(suspect: Sketches, files: Sequence[Path], most: int = COMPARED) -> Nearest:
    """The fingerprints most like a suspect, by sums of sketches and by spectra; damaged files are skipped.

    Raises
    ------
    CheckpointError
        No file could be read; the message is about the first.
    """
    likeness, distance = np.full(len(files), -np.inf), np.full(len(files), np.inf)
    mine = {name: suspect.of_layers(name) for name in OF_LAYERS}
    problems: dict[int, CheckpointError] = {}
    with bar(files, "fingerprints", "file") as shown:
        for k, file in enumerate(shown):
            try:
                theirs = _of_layers(file)
            except CheckpointError as error:
                problems[k] = error
                continue
            likeness[k] = 0
            for name in ("direct", "tokens"):
                x, y = mine[name], theirs[name]
                if x.shape[1] and x.shape[1] == y.shape[1]:
                    likeness[k] = max(likeness[k], float((x @ y.T).max(axis=1).mean()))
            apart = np.abs(mine["spectra"][:, None] - theirs["spectra"][None]).mean(axis=2)
            distance[k] = apart.min(axis=1).mean()
    ranked = [np.argsort(by, kind="stable").tolist() for by in (-likeness, distance)]
    chosen = [k for order in ranked for k in [k for k in order if k not in problems][:most]]
    bases = []
    for k in dict.fromkeys(chosen):
        try:
            bases.append((str(files[k]), load(files[k])))
        except CheckpointError as error:
            problems[k] = error
    if not bases:
        raise problems[min(problems)]
    return Nearest(bases, [str(problems[k]) for k in sorted(problems)])


def _of_layers(path: Path) -> dict[str, np.ndarray]:
    """One row per layer of a fingerprint, without reading its heads."""
    names = [f"layers_{name}" for name in OF_LAYERS]
    rows = dict(zip(OF_LAYERS, stored(path, *names)[1], strict=True))
    if any(array.ndim != 2 or not len(array) for array in rows.values()) or rows["spectra"].shape[1] != 2 * POINTS:
        raise CheckpointError("is a damaged fingerprint: its layers have the wrong shape", file=path)
    for name in ("direct", "tokens"):
        rows[name] /= np.maximum(np.linalg.norm(rows[name], axis=1, keepdims=True), 1e-30)
    return rows
