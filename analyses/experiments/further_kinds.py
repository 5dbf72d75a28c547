"""Kinds of change that the planted lineages lack: how each checkpoint is made, and the expected verdict.

    python -m analyses.experiments.further_kinds BASE STRANGER --out out/further-kinds

BASE and STRANGER are checkpoints of one config, of another seed each. Every case makes a suspect and perhaps a base of
its own, asks `ws.lineage` there and back, and writes a row of kinds.csv: what was named, what had to be, and which came
first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import click
import numpy as np

import weightscope as ws
from analyses.experiments.derivations import (
    DERIVATIONS,
    averaged,
    by_rows,
    groups_to_nearest,
    random_for,
    updated,
)
from analyses.experiments.named_parts import Weights, read_weights, write_weights
from analyses.inputs import out_option
from weightscope.cli.command import EndsInOneLine
from weightscope.core.files import Folder, scratch_folder
from weightscope.core.tables import Table

HEADS, NETWORKS = ("q.w", "k.w", "v.w", "o.w"), ("gate.w", "up.w", "down.w")
FIRST, TOGETHER, NEITHER = "base first", "not shown", "strangers"  # the truth about direction


def pruned(weights: Weights, share: float, parts: Sequence[str] = (*HEADS, *NETWORKS)) -> Weights:
    """The smallest values of every matrix set to zero."""
    made = {part: np.where(np.abs(w) < np.quantile(np.abs(w), share), 0, w) for part, w in weights.within(*parts)}
    return weights.but(made)


def pruned_2_of_4(weights: Weights) -> Weights:
    """Two of every four neighbours set to zero, as NVIDIA's sparsity has it."""
    made = {}
    for part, w in weights.within(*HEADS, *NETWORKS):
        groups = np.ascontiguousarray(w.T).reshape(-1, 4).copy()
        np.put_along_axis(groups, np.argsort(np.abs(groups), axis=1)[:, :2], 0, axis=1)
        made[part] = groups.reshape(w.T.shape).T
    return weights.but(made)


def rank_cut(weights: Weights, kept: float, parts: Sequence[str] = (*HEADS, *NETWORKS)) -> Weights:
    """The smallest singular values dropped."""
    made = {}
    for part, w in weights.within(*parts):
        u, s, vt = np.linalg.svd(w.astype(np.float64), full_matrices=False)
        rank = max(1, int(kept * len(s)))
        made[part] = (u[:, :rank] * s[:rank]) @ vt[:rank]
    return weights.but(made)


def direction_removed(weights: Weights) -> Weights:
    """A direction projected out of all that layers write."""
    v = random_for(weights, 47).standard_normal(weights.size("width"))
    v /= np.linalg.norm(v)
    return weights.but({part: w - np.outer(w @ v, v) for part, w in weights.within("o.w", "down.w")})


def noisy(weights: Weights, seed: int, share: float, parts: Sequence[str] = (*HEADS, *NETWORKS)) -> Weights:
    """Noise of this share of each matrix, as training would leave."""
    rng = random_for(weights, 40, seed)
    return weights.but({p: w + share * w.std() * rng.standard_normal(w.shape) for p, w in weights.within(*parts)})


def tuned(weights: Weights, seed: int, share: float = 0.05) -> Weights:
    """All matrices, embeddings and gains moved."""
    rng = random_for(weights, 41, seed)
    return weights.but({p: w + share * w.std() * rng.standard_normal(w.shape)
                        for p, w in sorted(weights.parts.items(), key=str)})  # fmt: skip


def initial(weights: Weights, seed: int) -> Weights:
    """A fresh initialisation: matrices drawn anew, gains of one."""
    rng = random_for(weights, 42, seed)
    drawn = {p: 0.02 * rng.standard_normal(w.shape) if w.ndim == 2 else np.ones_like(w)
             for p, w in sorted(weights.parts.items(), key=str)}  # fmt: skip
    return weights.but(drawn)


def gains_moved(weights: Weights) -> Weights:
    """A half of every gain before attention and the network moved into the matrices that read it."""
    made = {}
    for i in weights.layers():
        for norm, readers in (("norm_1", "qkv"), ("norm_2", ("gate", "up"))):
            gain = weights.parts[i, f"{norm}.w"]
            moved = np.sqrt(np.abs(gain))
            made[i, f"{norm}.w"] = gain / moved
            made |= {(i, f"{r}.w"): moved[:, None] * weights.parts[i, f"{r}.w"] for r in readers}
    return weights.but(made)


def slerped(a: Weights, b: Weights, t: float = 0.5) -> Weights:
    """Spherical interpolation of every tensor, as mergekit's slerp."""
    made = {}
    for part, x in a.parts.items():
        y = b.parts[part]
        cosine = float((x * y).sum() / (np.linalg.norm(x) * np.linalg.norm(y)))
        angle = np.arccos(np.clip(cosine, -1, 1))
        if angle < 1e-4:
            made[part] = (1 - t) * x + t * y
        else:
            made[part] = (np.sin((1 - t) * angle) * x + np.sin(t * angle) * y) / np.sin(angle)
    return a.but(made)


def dared(base: Weights, tune: Weights, drop: float = 0.7) -> Weights:
    """The difference of a tuned model with most values dropped and the others rescaled (DARE)."""
    rng = random_for(base, 43)
    made = {}
    for part, x in sorted(base.parts.items(), key=str):
        kept = rng.random(x.shape) >= drop
        made[part] = np.where(kept, x + (tune.parts[part] - x) / (1 - drop), x)
    return base.but(made)


def vocabulary_replaced(weights: Weights, size: int) -> Weights:
    """Other embeddings, of another vocabulary's size."""
    rng = random_for(weights, 44)
    tables = {
        part: w.std() * rng.standard_normal((size, w.shape[1]))
        for part, w in weights.parts.items() if part in ((None, "tokens"), (None, "unembedding"))
    }  # fmt: skip
    return weights.but(tables).resized(vocabulary=size)


def tokens_reordered(weights: Weights) -> Weights:
    """The embedding's rows in another order, and a few fewer: what a swapped tokenizer makes."""
    rng = random_for(weights, 45)
    tokens = weights.parts[None, "tokens"]
    order = rng.permutation(len(tokens))[: len(tokens) * 9 // 10]
    return weights.but({(None, "tokens"): tokens[order]}).resized(vocabulary=len(order))


def with_part(weights: Weights, second: Weights, *parts: str) -> Weights:
    """Some parts taken from another model."""
    return weights.but({part: w for part, w in second.parts.items() if part[1] in parts})


def expanded(weights: Weights) -> Weights:
    """LLaMA-Pro: copies between layers that write nothing."""
    twice = DERIVATIONS["each layer twice"].change(weights)
    return twice.but({part: 0 * w for part, w in twice.within("o.w", "down.w") if part[0] % 2})  # type: ignore[operator]


@dataclass(frozen=True)
class Case:
    """A suspect and its bases, made of a base and a stranger; the words that kinds need, and the truth of direction."""

    make: Callable[[Weights, Weights], tuple[Weights, list[Weights]]]
    kinds: tuple[str, ...]
    direction: str = TOGETHER


def _of(change: Callable[[Weights], Weights], *kinds: str, direction: str = TOGETHER) -> Case:
    return Case(lambda base, _: (change(base), [base]), kinds, direction)


def _two(
    make: Callable[[Weights, Weights], tuple[Weights, list[Weights]]], *kinds: str, direction: str = TOGETHER
) -> Case:
    return Case(make, kinds, direction)


CASES: dict[str, Case] = {
    "trained from an initialisation": _two(lambda b, _: (learnt(initial(b, 7), 1), [initial(b, 7)]), "fine-tuned"),
    "two of one initialisation": _two(
        lambda b, _: (learnt(initial(b, 7), 1), [learnt(initial(b, 7), 2)]), "fine-tuned"
    ),
    "80 % pruned": _of(partial(pruned, share=0.8), "pruned", direction=FIRST),
    "50 % pruned": _of(partial(pruned, share=0.5), "pruned", direction=FIRST),
    "2 of 4 pruned": _of(pruned_2_of_4, "pruned", direction=FIRST),
    "30 % pruned, networks": _of(partial(pruned, share=0.3, parts=NETWORKS), "pruned", direction=FIRST),
    "50 % pruned, then tuned": _of(lambda b: noisy(pruned(b, 0.5), 1, 0.05), "fine-tuned"),
    "90 % pruned": _of(partial(pruned, share=0.9), "pruned", direction=FIRST),
    "rank cut to 3/4": _of(partial(rank_cut, kept=0.75), "rank cut", direction=FIRST),
    "rank cut to 1/4": _of(partial(rank_cut, kept=0.25), "rank cut", direction=FIRST),
    "rank cut of networks": _of(partial(rank_cut, kept=0.5, parts=NETWORKS), "rank cut", direction=FIRST),
    "gains moved into weights": _of(gains_moved, "gains moved"),
    "vocabulary replaced": _of(lambda b: vocabulary_replaced(b, b.size("vocabulary") + 100), "vocabulary replaced"),
    "vocabulary replaced, same size": _of(
        lambda b: vocabulary_replaced(b, b.size("vocabulary")), "vocabulary replaced"
    ),
    "tokenizer swapped": _of(tokens_reordered, "vocabulary reordered"),
    "another model's networks": _two(lambda b, s: (with_part(b, s, *NETWORKS), [b]), "feed-forward networks replaced"),
    "another model's attention": _two(lambda b, s: (with_part(b, s, *HEADS), [b])),
    "another model's embedding": _two(lambda b, s: (with_part(b, s, "tokens"), [b]), "vocabulary replaced"),
    **{
        f"{bits} bits in groups of {group}": _of(
            partial(by_rows, partial(groups_to_nearest, bits=bits, group=group, symmetric=sym)),
            "quantised",
            direction=FIRST,
        )
        for bits, group, sym in (
            (2, 32, False),
            (2, 64, False),
            (3, 32, True),
            (3, 64, False),
            (2, 128, False),
            (5, 32, True),
            (6, 64, False),
        )
    },
    "Q4_0 by gguf": _of(DERIVATIONS["Q4_0"].change, "quantised", direction=FIRST),
    "two layers tuned": _of(
        lambda b: b.but({p: w for p, w in tuned(b, 3).parts.items() if p[0] in (1, 2)}), "fine-tuned"
    ),
    "one layer's query tuned": _of(lambda b: b.but({(1, "q.w"): tuned(b, 3).parts[1, "q.w"]}), "fine-tuned"),
    "slerp": _two(
        lambda b, _: (slerped(tuned(b, 1, 0.3), tuned(b, 2, 0.3)), [tuned(b, 1, 0.3), tuned(b, 2, 0.3)]), "merge"
    ),
    "slerp of strangers": _two(lambda b, s: (slerped(b, s), [b, s]), "merge"),
    "DARE": _two(lambda b, _: (dared(b, tuned(b, 1)), [b]), "fine-tuned in part"),
    "DARE, both given": _two(lambda b, _: (dared(b, tuned(b, 1)), [b, tuned(b, 1)]), "fine-tuned"),
    "task arithmetic without the base": _two(
        lambda b, _: (
            averaged([b, tuned(b, 1, 0.3), tuned(b, 2, 0.3)], [-1, 1, 1]),
            [tuned(b, 1, 0.3), tuned(b, 2, 0.3)],
        ),
        "merge",
        "or merged with more",
    ),
    "two tunes of one base": _two(lambda b, _: (tuned(b, 1), [tuned(b, 2)]), "fine-tuned"),
    "the base of a tune": _two(lambda b, _: (b, [tuned(b, 1)]), "fine-tuned"),
    "LoRA of rank 8": _of(partial(updated, rank=8, share=0.1), "low-rank"),
    "LoRA subtracted": _two(lambda b, _: (b, [updated(b, rank=8, share=0.1)]), "low-rank"),
    "LLaMA-Pro": _of(expanded, "layers repeated", "heads removed"),
    "LLaMA-Pro undone": _two(lambda b, _: (b, [expanded(b)]), "layers"),
    "layers repeated, undone": _two(lambda b, _: (b, [DERIVATIONS["depth upscaled"].change(b)]), "layers removed"),
    "layers removed": _of(DERIVATIONS["middle layers removed"].change, "layers removed", direction=FIRST),
    "layers removed, then bfloat16": _of(
        lambda b: replace(DERIVATIONS["middle layers removed"].change(b), dtype="bfloat16"),
        "layers removed",
        "cast",
        direction=FIRST,
    ),
    "vocabulary extended": _of(DERIVATIONS["vocabulary extended"].change, "vocabulary extended"),
    "vocabulary cut": _of(DERIVATIONS["vocabulary cut"].change, "vocabulary cut"),
    "bfloat16": _of(lambda b: replace(b, dtype="bfloat16"), "cast", direction=FIRST),
    "float16": _of(lambda b: replace(b, dtype="float16"), "cast", direction=FIRST),
    "bfloat16, then tuned": _of(lambda b: tuned(rounded(b), 1), "fine-tuned"),
    "tuned, then bfloat16": _of(lambda b: replace(tuned(b, 1), dtype="bfloat16"), "fine-tuned", "cast"),
    "frozen embedding, trained anew": _two(lambda b, s: (with_part(s, b, "tokens"), [b])),
    "networks scaled by 1.1": _of(lambda b: b.but({p: 1.1 * w for p, w in b.within(*NETWORKS)}), "fine-tuned"),
    "sign of embedding": _of(lambda b: b.but({(None, "tokens"): -b.parts[None, "tokens"]})),
    "only gains tuned": _of(lambda b: b.but({p: w + 0.1 for p, w in b.parts.items() if w.ndim == 1}), "fine-tuned"),
    "only the last layer tuned": _of(
        lambda b: b.but({p: w for p, w in tuned(b, 5).parts.items() if p[0] == b.size("layers") - 1}), "fine-tuned"
    ),
    "attention tuned": _of(lambda b: noisy(b, 3, 0.1, HEADS), "fine-tuned"),
    "networks tuned": _of(lambda b: noisy(b, 3, 0.1, NETWORKS), "fine-tuned"),
    "only the embedding tuned": _of(
        lambda b: b.but({(None, "tokens"): tuned(b, 5).parts[None, "tokens"]}), "fine-tuned"
    ),
    "Q8_0 by gguf": _of(DERIVATIONS["Q8_0"].change, "quantised", direction=FIRST),
    "Q5_0 by gguf": _of(DERIVATIONS["Q5_0"].change, "quantised", direction=FIRST),
    "NF4": _of(DERIVATIONS["NF4"].change, "quantised", direction=FIRST),
    "8 bits in rows": _of(DERIVATIONS["8 bits, rows"].change, "quantised", direction=FIRST),
    "4 bits, then tuned": _of(lambda b: tuned(DERIVATIONS["4 bits, groups of 32"].change(b), 1), "fine-tuned"),
    "tuned, then 4 bits": _of(lambda b: DERIVATIONS["4 bits, groups of 32"].change(tuned(b, 1)), "quantised"),
    "last layers removed": _of(DERIVATIONS["last layers removed"].change, "layers removed", direction=FIRST),
    "layers removed, then 8 bits": _of(
        lambda b: DERIVATIONS["8 bits, rows"].change(DERIVATIONS["middle layers removed"].change(b)),
        "layers removed",
        "quantised",
        direction=FIRST,
    ),
    "layers removed, then tuned": _of(
        lambda b: tuned(DERIVATIONS["middle layers removed"].change(b), 1), "layers removed", "fine-tuned"
    ),
    "pruned, then bfloat16": _of(
        lambda b: replace(pruned(b, 0.5), dtype="bfloat16"), "pruned", "cast", direction=FIRST
    ),
    "direction removed": _of(direction_removed, "direction removed", "low-rank", direction=FIRST),
    "direction removed, then bfloat16": _of(
        lambda b: replace(direction_removed(b), dtype="bfloat16"),
        "direction removed",
        "low-rank",
        "cast",
        direction=FIRST,
    ),
    "two layers swapped": _of(DERIVATIONS["two layers swapped"].change, "reordered"),
    "heads permuted": _of(DERIVATIONS["heads permuted"].change, "permuted"),
    "stream rotated": _of(DERIVATIONS["stream rotated"].change, "rotated", "folded"),
    "norms folded": _of(DERIVATIONS["norms folded"].change, "folded"),
    "neurons permuted": _of(DERIVATIONS["neurons permuted"].change, "neurons permuted"),
    "neurons permuted, then tuned": _of(
        lambda b: tuned(DERIVATIONS["neurons permuted"].change(b), 1), "fine-tuned", "neurons permuted"
    ),
    "interpolated with a stranger": _two(lambda b, s: (averaged([b, s], [0.7, 0.3]), [b]), "fine-tuned"),
    **{
        f"merge, {dtype}": _two(
            lambda b, s, dtype=dtype: (replace(averaged([b, s], [0.4, 0.6]), dtype=dtype), [b, s]),
            *("merge", "cast")[: 1 if dtype == "float32" else 2],
            direction=direction,
        )
        for dtype, direction in (("bfloat16", FIRST), ("float16", FIRST), ("float32", TOGETHER))
    },
    "merge with a tune, bfloat16": _two(
        lambda b, _: (replace(averaged([b, tuned(b, 1)], [0.5, 0.5]), dtype="bfloat16"), [b, tuned(b, 1)]),
        "merge",
        "cast",
        direction=FIRST,
    ),
    "past a tune, bfloat16": _two(
        lambda b, _: (replace(averaged([b, tuned(b, 1)], [-0.5, 1.5]), dtype="bfloat16"), [b, tuned(b, 1)]),
        "merge",
        "cast",
        direction=FIRST,
    ),
    "merge of three, bfloat16": _two(
        lambda b, s: (
            replace(averaged([b, s, tuned(b, 1)], [0.4, 0.3, 0.3]), dtype="bfloat16"),
            [b, s, tuned(b, 1)],
        ),
        "merge",
        "cast",
    ),
    "merge, bfloat16, then tuned": _two(
        lambda b, s: (replace(tuned(averaged([b, s], [0.4, 0.6]), 1, 0.01), dtype="bfloat16"), [b, s]), "merge", "cast"
    ),
    "a base made of its merge": _two(
        lambda b, s: (replace(b, dtype="bfloat16"), [averaged([rounded(b), s], [2, -1]), s]), "merge", "cast"
    ),
    "stranger": _two(lambda b, s: (s, [b]), direction=NEITHER),
    "stranger, pruned": _two(lambda b, s: (pruned(s, 0.5), [b]), direction=NEITHER),
    "stranger, 4 bits": _two(lambda b, s: (DERIVATIONS["Q4_0"].change(s), [b]), direction=NEITHER),
    "a fresh initialisation": _two(lambda b, _: (initial(b, 9), [b]), direction=NEITHER),
    "two fresh initialisations": _two(lambda b, _: (initial(b, 9), [initial(b, 10)]), direction=NEITHER),
}


def learnt(weights: Weights, seed: int) -> Weights:
    """Matrices moved far, and gains that are no longer one."""
    rng = random_for(weights, 46, seed)
    gains = {p: w * np.exp(0.3 * rng.standard_normal(w.shape)) for p, w in sorted(weights.parts.items(), key=str)
             if w.ndim == 1}  # fmt: skip
    return tuned(weights, seed, 0.5).but(gains)


def rounded(weights: Weights) -> Weights:
    """Values as bfloat16 holds them."""
    bits = {p: np.ascontiguousarray(w, np.float32).view(np.uint32) for p, w in weights.parts.items()}
    return weights.but({p: ((b + 0x7FFF + ((b >> 16) & 1)) & 0xFFFF0000).view(np.float32) for p, b in bits.items()})


COLUMNS = (
    "case",
    "planted",
    "verdict",
    "verdict_back",
    "kinds",
    "named",
    "nothing_else",
    "direction",
    "called",
    "right",
)


def judged(name: str, case: Case, base: Weights, stranger: Weights) -> list[object]:
    """A row of the table: the case there, and back where it has one base."""
    suspect, bases = case.make(base, stranger)
    with scratch_folder() as scratch:
        folders = [f"{scratch}/{name}" for name in ("suspect", *(f"base{i}" for i in range(len(bases))))]
        for folder, weights in zip(folders, (suspect, *bases), strict=True):
            write_weights(weights, Path(folder))
        there = ws.lineage(folders[0], folders[1:])
        back = ws.lineage(folders[1], folders[0])
    kinds = [kind.kind for kind in there.kinds]
    named = all(any(planted in kind for kind in kinds) for planted in case.kinds)
    alone = all(any(planted in kind for planted in case.kinds) for kind in kinds)
    called = FIRST if there.verdict == "derived" else TOGETHER if there.verdict == "related" else NEITHER
    right = called == case.direction and back.verdict != "derived"
    verdicts = there.verdict, back.verdict
    return [name, ", ".join(case.kinds), *verdicts, "; ".join(kinds), int(named), int(alone), case.direction, called,
            int(right)]  # fmt: skip


@click.command("further-kinds", cls=EndsInOneLine)
@click.argument("base")
@click.argument("stranger")
@click.option("--only", multiple=True, help="Cases whose name contains this.")
@out_option("out/further-kinds")
def main(base: str, stranger: str, only: tuple[str, ...], out: Path) -> None:
    """Judge every case made of BASE and STRANGER."""
    first, second = read_weights(base), read_weights(stranger)
    rows = []
    for name, case in CASES.items():
        if not only or any(each in name for each in only):
            rows.append(judged(name, case, first, second))
            click.echo(" | ".join(map(str, rows[-1])))
    Folder(out).text("kinds.csv", Table.of_rows(COLUMNS, rows).csv())


if __name__ == "__main__":
    main()
