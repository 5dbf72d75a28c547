"""Remove directions from what a checkpoint's attention writes, and count which an audit finds.

    python -m analyses.experiments.planted_directions SOURCE... [--out out/planted-directions]

Directions are projected out of W_O in memory, before weights are rounded; (1 - strength) of what was written along them
is left. Half of the directions are random. The others are mixtures of the eight principal directions of what layers
write, because real edits cut out directions along which much is written. Every checkpoint is also judged as it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from types import SimpleNamespace

import numpy as np

import weightscope as ws
from analyses.study import sources_argument, study, titled, write
from weightscope.core.compute.cores import one_blas_thread
from weightscope.core.files import Files, Folder
from weightscope.core.progress import bar
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


def cases() -> list[dict[str, object]]:
    """What is planted: in every format all places and strengths; in bfloat16 ranks and kept norms of rows too."""
    plain = [
        {"format": form, "where": where, "share": share, "strength": strength, "direction": direction}
        for form in ("bfloat16", "8 bits", "4 bits")
        for where, share in WHERE
        for strength in STRENGTHS
        for direction in ("random", "strong")
    ]
    fully = [case for case in plain if case["format"] == "bfloat16" and case["strength"] == 1.0]
    return [*plain, *({**case, "rank": 3} for case in fully), *({**case, "rows_kept": True} for case in fully)]


def planted(source: str) -> list[dict[str, object]]:
    """A row for every case, and one without a direction for every format and side."""
    model = ws.open_model(source)
    d, centred = model.config.d_model, centred_norms(model)
    rows: list[dict[str, object]] = []
    for side in sides(model, model.attention_layers, everything=True):
        if len(side.layers) < 2:
            continue
        for name, rounded in FORMATS.items():
            weights = {i: [rounded(m.rows()) for m in matrices] for i, matrices in side.layers.items()}
            judged = judge(of_arrays(side, weights), d, centred)
            known = {"side": side.what, "format": name, "where": "nowhere"}
            rows.append({**known, "score": round(judged.score, 2), "found": len(judged.removed)})
    side = next(iter(sides(model, model.attention_layers, everything=False)))
    clean = {i: matrices[0].rows() for i, matrices in side.layers.items()}
    principal = np.linalg.eigh(np.sum([(w.T @ w) / np.linalg.norm(w) ** 2 for w in clean.values()], axis=0))[1][:, -8:]
    for number, case in enumerate(bar(cases(), model.name, "case")):
        rng = np.random.default_rng(number)
        rank, strength = int(str(case.get("rank", 1))), float(str(case["strength"]))
        basis = np.eye(d) if case["direction"] == "random" else principal
        cut = np.linalg.qr(basis @ rng.standard_normal((basis.shape[1], rank)))[0]
        chosen = layers_of(list(clean), str(case["where"]), float(str(case["share"])), rng)
        changed = {
            i: without(w, cut, strength, kept="rows_kept" in case) if i in chosen else w for i, w in clean.items()
        }
        judged = judge(of_arrays(side, {i: [FORMATS[str(case["format"])](w)] for i, w in changed.items()}), d, centred)
        cosines = [cosine(removed.least.directions, cut) for removed in judged.removed]
        best = int(np.argmax(cosines)) if cosines else None
        right = best is not None and set(judged.removed[best].layers) == chosen
        counts = {"found": len(cosines), "cosine": round(max(cosines, default=0.0), 4), "layers_right": right}
        rows.append({"side": side.what, **case, "score": round(judged.score, 2), **counts})
    return [{"model": model.name, **row} for row in rows]


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
            of_source = planted(source)
        write(files, title, COLUMNS, of_source)
        rows += of_source
    draw(files, rows)


if __name__ == "__main__":
    main()
