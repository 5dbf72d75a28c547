"""A folder of fingerprints: which of them are most like a suspect, found from sums over heads."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from weightscope.ancestry.sketches import SUFFIX, Sketches, fingerprint, load
from weightscope.engine import Engine
from weightscope.errors import CheckpointError, printable
from weightscope.progress import bar
from weightscope.sources import Source

COMPARED = 8  # of a registry: the fingerprints whose heads are compared
BLOCK = 256  # fingerprints whose layers are compared at once


def prints_in(folder: Path) -> list[Path]:
    """The fingerprint files of a folder, by name; none where it is no folder, or a checkpoint's."""
    return sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []


def make_prints(
    sources: Sequence[Source], names: Sequence[str], out: Path, engine: Engine
) -> Iterator[tuple[str, str]]:
    """Write a fingerprint of every source into a folder; yield each name as it ends, with the problem if it failed."""
    out.mkdir(parents=True, exist_ok=True)
    waiting = list(zip(sources, names, strict=True))[::-1]
    while waiting or engine.busy:
        if waiting and engine.hungry:
            source, name = waiting.pop()
            engine.submit(name, _print_of, source)
            continue
        ended = engine.next()
        if ended.error is None and isinstance(ended.value, Sketches):
            ended.value.save(out / f"{ended.key}{SUFFIX}")
        elif not isinstance(ended.error, CheckpointError | None):
            raise ended.error
        yield ended.key, "" if ended.error is None else printable(" ".join(str(ended.error).split()))


def _print_of(source: Source) -> Sketches:
    """A fingerprint made by a worker."""
    return replace(fingerprint(source.open()), source=None)


def nearest(own: Sketches, files: Sequence[Path], most: int = COMPARED) -> list[Sketches]:
    """The fingerprints whose layers are most like a suspect's, by sums of their heads' sketches and by spectra."""
    scores = np.array([_score(own, load(file)) for file in bar(files, "fingerprints", "file")])  # (n, 2)
    chosen: list[int] = []
    for column in scores.T:
        chosen += [int(k) for k in np.argsort(-column, kind="stable")[:most] if k not in chosen]
    return [load(files[k]) for k in chosen]


def _score(own: Sketches, other: Sketches) -> tuple[float, float]:
    """How alike the most alike layers are: by sketches, and by spectra."""
    best = 0.0
    for route in ("direct", "tokens"):
        x, y = (layer_sums(side, route) for side in (own, other))
        if x.shape[-1] and x.shape[-1] == y.shape[-1]:
            best = max(best, float(np.mean((x @ y.T).max(axis=1))))
    spectra = [
        np.stack([side.spectra[side.of_layer(i)].mean(axis=0).ravel() for i in side.layers]) for side in (own, other)
    ]
    apart = np.abs(spectra[0][:, None] - spectra[1][None]).mean(axis=2).min(axis=1)
    return best, -float(apart.mean())


def layer_sums(sketches: Sketches, route: str) -> np.ndarray:
    """Sums over each layer's heads, which do not depend on their order, of length 1: (L, 2 K)."""
    values = getattr(sketches, route) * sketches.norms[..., None]
    sums = np.stack([values[sketches.of_layer(i)].sum(axis=0) for i in sketches.layers])  # (L, 2, K)
    sums /= np.maximum(np.linalg.norm(sums, axis=-1, keepdims=True), 1e-30)
    return np.asarray(sums.reshape(len(sums), -1) / np.sqrt(2), np.float32)
