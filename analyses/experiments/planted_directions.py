"""Remove directions from what a checkpoint's attention writes, and count which an audit finds.

    python -m analyses.experiments.planted_directions SOURCE... [--out out/planted-directions]

Directions are projected out of W_O in memory, before weights are rounded; (1 - strength) of what was written along them
is left. Half of the directions are random. The others are mixtures of the eight principal directions of what layers
write, because real edits cut out directions along which much is written. Every checkpoint is also judged as it is.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

import weightscope as ws
from analyses.study import Row, judge_each, sources_argument, study, titled, write
from tests.support.plants.plant import Made, Plant
from weightscope.core.compute.cores import one_blas_thread
from weightscope.core.files import Files, Folder
from weightscope.heads.audit.removed_directions import FOUND, StreamMatrix, StreamSide, centred_norms, judge, sides
from weightscope.pairs.deeds.rounding import CASTS
from weightscope.report.pages.style import in_our_style, save, subplots

GROUP = 32  # weights that share a scale, as in GGUF's Q8_0 and Q4_0
COLUMNS = (
    "model", "side", "format", "where", "share", "strength", "rank", "direction", "rows_kept", "score", "found",
    "cosine", "layers_right",
)  # fmt: skip


def to_bits(bits: int) -> Callable[[np.ndarray], np.ndarray]:
    """Rounding of rows (n, d) to a grid of so many bits for every 32 inputs."""

    def rounded(rows: np.ndarray) -> np.ndarray:
        width = GROUP if len(rows) % GROUP == 0 else len(rows)
        groups = np.ascontiguousarray(rows.T).reshape(-1, width)
        step = np.abs(groups).max(axis=1, keepdims=True) / (2 ** (bits - 1) - 1)
        grid = np.rint(groups / np.where(step > 0, step, 1)) * step
        return np.ascontiguousarray(grid.reshape(rows.T.shape).T.astype(np.float32))

    return rounded


FORMATS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "as stored": lambda rows: rows, "float16": CASTS["F16"], "bfloat16": CASTS["BF16"], "8 bits": to_bits(8),
    "4 bits": to_bits(4),
}  # fmt: skip
WHERE = (("run", 0.4), ("run", 0.7), ("all", 1.0), ("anywhere", 0.4), ("anywhere", 0.7))
STRENGTHS = (1.0, 0.8, 0.5)


def cases() -> list[Row]:
    """What is planted: in every format all places and strengths; in bfloat16 ranks and kept norms of rows too."""
    plain: list[Row] = [
        {"format": form, "where": where, "share": share, "strength": strength, "direction": direction}
        for form in ("bfloat16", "8 bits", "4 bits")
        for where, share in WHERE
        for strength in STRENGTHS
        for direction in ("random", "strong")
    ]
    fully = [case for case in plain if case["format"] == "bfloat16" and case["strength"] == 1.0]
    return [*plain, *({**case, "rank": 3} for case in fully), *({**case, "rows_kept": True} for case in fully)]


class Cut(NamedTuple):
    """A side of a model in memory, and the directions that are gone from some of its layers, if any are."""

    side: StreamSide
    d: int
    centred: bool
    directions: np.ndarray | None = None  # (d, k)
    layers: Collection[int] = ()

    @classmethod
    def clean(cls, model: ws.Model, side: StreamSide, form: str, folder: Path) -> Made:
        """The side as it is, rounded."""
        weights = {i: [FORMATS[form](m.rows()) for m in matrices] for i, matrices in side.layers.items()}
        return Made(model.name, (), cls(of_arrays(side, weights), model.config.d_model, centred_norms(model)))


def plants_of(source: str) -> Iterator[Plant]:
    """Every case, and one without a direction for every format and side."""
    model = ws.open_model(source)
    for side in sides(model, model.attention_layers, everything=True):
        for form in FORMATS if len(side.layers) > 1 else ():
            known = {"model": model.name, "side": side.what, "format": form, "where": "nowhere"}
            yield Plant(f"{side.what}, {form}", partial(Cut.clean, model, side, form), cells=known)
    side = next(iter(sides(model, model.attention_layers, everything=False)))
    clean = {i: matrices[0].rows() for i, matrices in side.layers.items()}
    principal = np.linalg.eigh(np.sum([(w.T @ w) / np.linalg.norm(w) ** 2 for w in clean.values()], axis=0))[1][:, -8:]

    def planted(number: int, case: Row, folder: Path) -> Made:
        rng, d = np.random.default_rng(number), model.config.d_model
        basis = np.eye(d) if case["direction"] == "random" else principal
        cut = np.linalg.qr(basis @ rng.standard_normal((basis.shape[1], case.get("rank", 1))))[0]
        chosen = layers_of(list(clean), case["where"], case["share"], rng)
        kept = "rows_kept" in case
        changed = {i: without(w, cut, case["strength"], kept=kept) if i in chosen else w for i, w in clean.items()}
        made = of_arrays(side, {i: [FORMATS[case["format"]](w)] for i, w in changed.items()})
        return Made(model.name, (), Cut(made, d, centred_norms(model), cut, chosen))

    for number, case in enumerate(cases()):
        cells = {"model": model.name, "side": side.what, **case}
        yield Plant(f"case {number}", partial(planted, number, case), cells=cells)


def judged(plant: Plant, made: Made) -> Row:
    """What an audit finds; of a planted direction how near it is, and whether the layers are right."""
    cut: Cut = made.more
    judgement = judge(cut.side, cut.d, cut.centred)
    row: Row = {"score": round(judgement.score, 2), "found": len(judgement.removed)}
    if cut.directions is None:
        return row
    cosines = [cosine(removed.least.directions, cut.directions) for removed in judgement.removed]
    right = bool(cosines) and set(judgement.removed[int(np.argmax(cosines))].layers) == cut.layers
    return row | {"cosine": round(max(cosines, default=0.0), 4), "layers_right": right}


def of_arrays(side: StreamSide, weights: dict[int, list[np.ndarray]]) -> StreamSide:
    """The side with other weights, in memory: rows (n, d) by layer."""

    def matrix(like: StreamMatrix, rows: np.ndarray) -> StreamMatrix:
        tensor = SimpleNamespace(name=like.tensor.name, shape=rows.shape, nbytes=rows.nbytes, weights=lambda: rows)
        return StreamMatrix(tensor, axis=1)  # type: ignore[arg-type]  # all that is asked of a tensor

    pairs = {i: zip(side.layers[i], arrays, strict=True) for i, arrays in weights.items()}
    return replace(side, layers={i: [matrix(like, rows) for like, rows in pair] for i, pair in pairs.items()})


def layers_of(layers: Sequence[int], where: str, share: float, rng: np.random.Generator) -> set[int]:
    """A share of the layers, two at least, next to each other or anywhere."""
    count = max(2, ceil(share * len(layers)))
    if where == "anywhere":
        return set(rng.choice(layers, count, replace=False).tolist())
    first = int(rng.integers(len(layers) - count + 1))
    return set(layers[first : first + count])


def without(rows: np.ndarray, cut: np.ndarray, strength: float, *, kept: bool) -> np.ndarray:
    """Rows (n, d) without directions (d, k); with `kept` each dimension is scaled back to the norm that it had."""
    changed = rows - strength * (rows @ cut) @ cut.T
    if kept:
        changed *= np.linalg.norm(rows, axis=0) / np.maximum(np.linalg.norm(changed, axis=0), 1e-30)
    return changed.astype(np.float32)


def cosine(directions: np.ndarray, cut: np.ndarray) -> float:
    """The cosine of the largest angle between the removed directions and the reported ones."""
    if directions.shape[1] < cut.shape[1]:
        return 0.0
    return float(np.linalg.svd(cut.T @ directions, compute_uv=False).min())


def draw(files: Files, rows: Sequence[dict[str, object]]) -> None:
    """The share found against the false alarms, and how far what was planted is from what was not."""
    unplanted = [row for row in rows if row["where"] == "nowhere" and "write" in str(row["side"])]
    clean = np.array([row["score"] for row in unplanted], float)
    with in_our_style():
        figure, (roc, limit) = subplots(1, 2, figsize=(6.6, 2.6))
        for strength in STRENGTHS:
            scores = np.array([row["score"] for row in rows if row.get("strength") == strength], float)
            limits = np.sort(np.concatenate([scores, clean, [0.0, 20.0]]))[::-1]
            alarms, hits = ((values[:, None] >= limits).mean(axis=0) for values in (clean, scores))
            area = float((scores[:, None] > clean).mean() + (scores[:, None] == clean).mean() / 2)
            roc.plot(alarms, hits, drawstyle="steps-post", label=f"strength {strength:g}, area {area:.3f}")
            limit.plot(limits, hits, label=f"strength {strength:g}")
        limit.plot(limits, alarms, color="0.5", linestyle="--", label="nothing removed")
        limit.axvline(FOUND[True], color="0.3", linewidth=0.8)
        roc.set(xlabel="clean cases above the limit", ylabel="planted cases above it", xlim=(-0.02, 1))
        limit.set(xlabel="limit on the score", ylabel="share above the limit", xlim=(0, 16))
        for axis in (roc, limit):
            axis.legend()
        save(figure, files, "roc")


@study("planted-directions")
@sources_argument
def main(files: Folder, sources: tuple[str, ...]) -> None:
    """Write one table for every SOURCE, one row per case, and a figure of all."""
    rows = []
    for source, title in titled(sources):
        with one_blas_thread():
            of_source = judge_each(plants_of(source), judged, title)
        write(files, title, COLUMNS, of_source)
        rows += of_source
    draw(files, rows)


if __name__ == "__main__":
    main()
