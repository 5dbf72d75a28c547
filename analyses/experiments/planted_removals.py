"""Remove directions from what a checkpoint writes, with any strength, and count what `compare` and `audit` find.

    python -m analyses.experiments.planted_removals SOURCE... [--out out/planted-removals]

A direction is taken out of every W_O, every feed-forward network's output and the embedding, with one strength, with
strengths that differ by layer, or another direction for every layer. Weights are then rounded. `compare` has the
original; `audit` has not. Updates of rank one and noise, as large, are no removals.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from safetensors.numpy import save_file

import weightscope as ws
from analyses.study import Row, judge_each, sources_argument, study, titled, write
from tests.support.plants.plant import Made, Plant
from weightscope.core.files import Folder
from weightscope.heads.audit.removed_directions import removed_directions, sides
from weightscope.pairs.changes.all_tensors import compare_tensors
from weightscope.pairs.deeds.rounding import CASTS

FORMATS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"float32": lambda w: w, "bfloat16": CASTS["BF16"]}
STRENGTHS = ("0.1", "0.5", "0.8", "1", "1.3", "2", "kernel", "1, by layer")
OTHERS = ("rank one", "noise")  # changes that remove nothing
COLUMNS = ("model", "strength", "direction", "format", "tensors", "found", "cosine", "strength_error", "audit_found")
Writers = dict[str, tuple[int, int | None]]  # by name, the stream's axis and the layer


def writers(model: ws.Model) -> Writers:
    """Every matrix that writes into the stream."""
    written: Writers = {
        matrix.tensor.name: (matrix.axis, layer)
        for side in sides(model, model.attention_layers, everything=True) if side.writes
        for layer, matrices in side.layers.items() for matrix in matrices
    }  # fmt: skip
    tokens = model.prefix + (model.family.inputs.tokens or "")
    return written | ({tokens: (1, None)} if tokens in model.checkpoint else {})


def strength_of(strength: str, layer: int | None, depth: int) -> float:
    """The strength in a layer: a kernel rises to 1.2 in the middle; the embedding has its mean."""
    if strength != "kernel":
        return float(strength.split(",")[0])
    return 0.6 if layer is None else 0.2 + np.sin(np.pi * (layer + 0.5) / depth)


def edited(weights: dict[str, np.ndarray], where: Writers, strength: str, directions: np.ndarray) -> Iterator[str]:
    """Change matrices in place, each along the direction of its layer, (L, d); yield their names."""
    rng = np.random.default_rng(3)
    for name, (axis, layer) in where.items():
        w = weights[name].astype(np.float64)
        rows, v = w if axis else w.T, directions[layer or 0]  # (n, d)
        if strength in OTHERS:
            change = np.outer(rng.standard_normal(len(rows)), rng.standard_normal(rows.shape[1]))
            if strength == "noise":
                change = rng.standard_normal(rows.shape)
            rows += np.linalg.norm(rows @ v) / np.linalg.norm(change) * change
        else:
            rows -= strength_of(strength, layer, len(directions)) * np.outer(rows @ v, v)
        weights[name] = w.astype(np.float32)
        yield name


class Removal(NamedTuple):
    """The original, its matrices that write, and what is removed from them."""

    model: ws.Model
    where: Writers
    strength: str
    directions: np.ndarray  # (L, d)

    def write(self, original: dict[str, np.ndarray], form: str, folder: Path) -> Made:
        """Write the edited checkpoint."""
        weights = {**original}
        for name in list(edited(weights, self.where, self.strength, self.directions)):
            weights[name] = np.ascontiguousarray(FORMATS[form](weights[name]))
        save_file(weights, folder / "model.safetensors")
        Folder(folder).json("config.json", dict(self.model.checkpoint.config))
        return Made(folder, (), self)


def plants_of(source: str, title: str, formats: Sequence[str]) -> Iterator[Plant]:
    """Every strength, direction and format; the other changes in every format."""
    model = ws.open_model(source)
    where, depth, d = writers(model), model.config.n_layers, model.config.d_model
    original = {name: np.asarray(tensor.read()) for name, tensor in model.checkpoint.items()}
    outputs = [
        original[name] if axis else original[name].T for name, (axis, layer) in where.items() if layer is not None
    ]
    principal = np.linalg.eigh(sum(w.T @ w / np.linalg.norm(w) ** 2 for w in outputs))[1][:, -8:]
    cases = [(s, kind, form) for form in formats for kind in ("random", "strong") for s in STRENGTHS]
    cases += [(s, "", form) for form in formats for s in OTHERS]
    for number, (strength, kind, form) in enumerate(cases):
        basis, rng = principal if kind == "strong" else np.eye(d), np.random.default_rng(number)
        drawn = np.array([basis @ rng.standard_normal(basis.shape[1]) for _ in range(depth)])
        drawn = drawn if "by layer" in strength else np.repeat(drawn[:1], depth, axis=0)
        directions = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)  # (L, d)
        removal = Removal(model, where, strength, directions)
        cells = {"model": title, "strength": strength, "direction": kind, "format": form, "tensors": len(where)}
        yield Plant(f"{title}: {strength} {kind} {form}", partial(removal.write, original, form), cells=cells)


def judged(plant: Plant, made: Made) -> Row:
    """What `compare` finds, and the number of directions that `audit` finds without the original."""
    suspect = ws.open_model(made.suspect)
    alone = removed_directions(suspect, suspect.attention_layers, everything=True)[0]
    cosines = [np.abs(made.more.directions @ each.least.directions).max() for each in alone]
    return found(suspect, *made.more) | {"audit_found": sum(cosine >= 0.9 for cosine in cosines)}


def found(suspect: ws.Model, model: ws.Model, where: Writers, strength: str, directions: np.ndarray) -> Row:
    """How many of the tensors are said to have lost a direction, how far the direction is off, and the strength."""
    changes = compare_tensors(model, suspect)
    removed = [i for shared in changes.shared if shared.is_removal for i in shared.members]
    names = {changes.changes[i].name for i in removed}
    row: Row = {"found": len(names & {*where}), "cosine": "", "strength_error": ""}
    if not removed or strength in OTHERS:
        return row
    (shared,) = (shared for shared in changes.shared if shared.is_removal)
    layers = {i: where[changes.changes[i].name][1] for i in removed}
    off = [abs(strength_of(strength, layers[i], len(directions)) - shared.strengths[i]) for i in removed]
    cosines = [abs(float(shared.members[i].direction @ directions[layers[i] or 0])) for i in removed]
    return row | {"cosine": f"{min(cosines):.4f}", "strength_error": f"{max(off):.4f}"}


@study("planted-removals")
@sources_argument
@click.option("--format", "formats", multiple=True, type=click.Choice(list(FORMATS)), default=list(FORMATS))
def main(files: Folder, sources: tuple[str, ...], formats: tuple[str, ...]) -> None:
    """Write one table, a row per case and SOURCE."""
    rows = [row for source, title in titled(sources) for row in judge_each(plants_of(source, title, formats), judged)]
    write(files, "with-base", COLUMNS, rows)


if __name__ == "__main__":
    main()
