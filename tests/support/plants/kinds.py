"""Kinds of change that the planted lineages lack: how each checkpoint is made, and the expected verdict.

Each is made of a base and a stranger: checkpoints of one config, of another seed each.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

import weightscope as ws
from tests.support.plants.derivations import (
    DERIVATIONS,
    averaged,
    by_rows,
    groups_to_nearest,
    random_for,
    updated,
)
from tests.support.plants.named_parts import Part, Weights, write_weights
from tests.support.plants.plant import Made, Plant

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


# The cases: what makes a suspect and its bases of a base and a stranger, the kinds to be named, and which came first

Maker = Callable[[Weights, Weights], tuple[Weights, list[Weights]]]
Case = tuple[Maker, tuple[str, ...], str]


def _case(make: Maker, *kinds: str, came: str = TOGETHER) -> Case:
    return make, kinds, came


def _of(change: Callable[[Weights], Weights], *kinds: str, came: str = TOGETHER) -> Case:
    """The base changed, compared with the base."""
    return _case(lambda base, _: (change(base), [base]), *kinds, came=came)


def _derived(name: str, *kinds: str, came: str = TOGETHER) -> Case:
    return _of(DERIVATIONS[name].change, *kinds, came=came)


def _then(first: str, change: Callable[[Weights], Weights], *kinds: str, came: str = TOGETHER) -> Case:
    """A derivation, then a change."""
    return _of(lambda base: change(DERIVATIONS[first].change(base)), *kinds, came=came)


def _summed(others: Callable[[Weights, Weights], list[Weights]], shares: list[float], dtype: str, *kinds: str,
            came: str = TOGETHER) -> Case:  # fmt: skip
    """A linear merge, stored in a dtype, compared with all that it was made of."""

    def make(base: Weights, stranger: Weights) -> tuple[Weights, list[Weights]]:
        parts = others(base, stranger)
        return replace(averaged(parts, shares), dtype=dtype), parts

    return _case(make, *kinds, came=came)


def _stored(dtype: str) -> Callable[[Weights], Weights]:
    return lambda weights: replace(weights, dtype=dtype)


def _only(change: Callable[[Weights], Weights], kept: Callable[[Part, Weights], bool]) -> Callable[[Weights], Weights]:
    """A change of the parts that `kept` takes."""
    return lambda base: base.but({p: w for p, w in change(base).parts.items() if kept(p, base)})


def _tuned(seed: int, share: float = 0.05) -> Callable[[Weights], Weights]:
    return partial(tuned, seed=seed, share=share)


def _grouped(bits: int, group: int, symmetric: bool) -> Case:
    grid = partial(groups_to_nearest, bits=bits, group=group, symmetric=symmetric)
    return _of(partial(by_rows, grid), "quantised", came=FIRST)


def _two_tunes(base: Weights) -> list[Weights]:
    return [tuned(base, 1, 0.3), tuned(base, 2, 0.3)]


GRIDS = ((2, 32, False), (2, 64, False), (3, 32, True), (3, 64, False), (2, 128, False), (5, 32, True), (6, 64, False))
BEGUN = "trained from an initialisation"
CASES: dict[str, Case] = {
    BEGUN: _case(lambda b, _: (learnt(initial(b, 7), 1), [initial(b, 7)]), "fine-tuned"),
    "two of one initialisation": _case(
        lambda b, _: (learnt(initial(b, 7), 1), [learnt(initial(b, 7), 2)]), "fine-tuned"),
    "80 % pruned": _of(partial(pruned, share=0.8), "pruned", came=FIRST),
    "50 % pruned": _of(partial(pruned, share=0.5), "pruned", came=FIRST),
    "2 of 4 pruned": _of(pruned_2_of_4, "pruned", came=FIRST),
    "30 % pruned, networks": _of(partial(pruned, share=0.3, parts=NETWORKS), "pruned", came=FIRST),
    "50 % pruned, then tuned": _of(lambda b: noisy(pruned(b, 0.5), 1, 0.05), "fine-tuned"),
    "90 % pruned": _of(partial(pruned, share=0.9), "pruned", came=FIRST),
    "rank cut to 3/4": _of(partial(rank_cut, kept=0.75), "rank cut", came=FIRST),
    "rank cut to 1/4": _of(partial(rank_cut, kept=0.25), "rank cut", came=FIRST),
    "rank cut of networks": _of(partial(rank_cut, kept=0.5, parts=NETWORKS), "rank cut", came=FIRST),
    "gains moved into weights": _of(gains_moved, "gains moved"),
    "vocabulary replaced": _of(lambda b: vocabulary_replaced(b, b.size("vocabulary") + 100), "vocabulary replaced"),
    "vocabulary replaced, same size": _of(
        lambda b: vocabulary_replaced(b, b.size("vocabulary")), "vocabulary replaced"),
    "tokenizer swapped": _of(tokens_reordered, "vocabulary reordered"),
    "another model's networks": _case(lambda b, s: (with_part(b, s, *NETWORKS), [b]), "feed-forward networks replaced"),
    "another model's attention": _case(lambda b, s: (with_part(b, s, *HEADS), [b])),
    "another model's embedding": _case(lambda b, s: (with_part(b, s, "tokens"), [b]), "vocabulary replaced"),
    **{f"{bits} bits in groups of {group}": _grouped(bits, group, symmetric) for bits, group, symmetric in GRIDS},
    "Q4_0 by gguf": _derived("Q4_0", "quantised", came=FIRST),
    "two layers tuned": _of(_only(_tuned(3), lambda part, _: part[0] in (1, 2)), "fine-tuned"),
    "one layer's query tuned": _of(_only(_tuned(3), lambda part, _: part == (1, "q.w")), "fine-tuned"),
    "slerp": _case(lambda b, _: (slerped(*_two_tunes(b)), _two_tunes(b)), "merge"),
    "slerp of strangers": _case(lambda b, s: (slerped(b, s), [b, s]), "merge"),
    "DARE": _case(lambda b, _: (dared(b, tuned(b, 1)), [b]), "fine-tuned in part"),
    "DARE, both given": _case(lambda b, _: (dared(b, tuned(b, 1)), [b, tuned(b, 1)]), "fine-tuned"),
    "task arithmetic without the base": _case(
        lambda b, _: (averaged([b, *_two_tunes(b)], [-1, 1, 1]), _two_tunes(b)), "merge", "or merged with more"),
    "two tunes of one base": _case(lambda b, _: (tuned(b, 1), [tuned(b, 2)]), "fine-tuned"),
    "the base of a tune": _case(lambda b, _: (b, [tuned(b, 1)]), "fine-tuned"),
    "LoRA of rank 8": _of(partial(updated, rank=8, share=0.1), "low-rank"),
    "LoRA subtracted": _case(lambda b, _: (b, [updated(b, rank=8, share=0.1)]), "low-rank"),
    "LLaMA-Pro": _of(expanded, "layers repeated", "heads removed"),
    "LLaMA-Pro undone": _case(lambda b, _: (b, [expanded(b)]), "layers"),
    "layers repeated, undone": _case(lambda b, _: (b, [DERIVATIONS["depth upscaled"].change(b)]), "layers removed"),
    "layers removed": _derived("middle layers removed", "layers removed", came=FIRST),
    "layers removed, then bfloat16": _then(
        "middle layers removed", _stored("bfloat16"), "layers removed", "cast", came=FIRST),
    "vocabulary extended": _derived("vocabulary extended", "vocabulary extended"),
    "vocabulary cut": _derived("vocabulary cut", "vocabulary cut"),
    "bfloat16": _of(_stored("bfloat16"), "cast", came=FIRST),
    "float16": _of(_stored("float16"), "cast", came=FIRST),
    "bfloat16, then tuned": _of(lambda b: tuned(rounded(b), 1), "fine-tuned"),
    "tuned, then bfloat16": _of(lambda b: replace(tuned(b, 1), dtype="bfloat16"), "fine-tuned", "cast"),
    "frozen embedding, trained anew": _case(lambda b, s: (with_part(s, b, "tokens"), [b])),
    "networks scaled by 1.1": _of(lambda b: b.but({p: 1.1 * w for p, w in b.within(*NETWORKS)}), "multiplied"),
    "sign of embedding": _of(lambda b: b.but({(None, "tokens"): -b.parts[None, "tokens"]})),
    "only gains tuned": _of(lambda b: b.but({p: w + 0.1 for p, w in b.parts.items() if w.ndim == 1}), "fine-tuned"),
    "only the last layer tuned": _of(
        _only(_tuned(5), lambda part, base: part[0] == base.size("layers") - 1), "fine-tuned"),
    "attention tuned": _of(partial(noisy, seed=3, share=0.1, parts=HEADS), "fine-tuned"),
    "networks tuned": _of(partial(noisy, seed=3, share=0.1, parts=NETWORKS), "fine-tuned"),
    "only the embedding tuned": _of(_only(_tuned(5), lambda part, _: part == (None, "tokens")), "fine-tuned"),
    "Q8_0 by gguf": _derived("Q8_0", "quantised", came=FIRST),
    "Q5_0 by gguf": _derived("Q5_0", "quantised", came=FIRST),
    "NF4": _derived("NF4", "quantised", came=FIRST),
    "8 bits in rows": _derived("8 bits, rows", "quantised", came=FIRST),
    "4 bits, then tuned": _then("4 bits, groups of 32", _tuned(1), "fine-tuned"),
    "tuned, then 4 bits": _of(lambda b: DERIVATIONS["4 bits, groups of 32"].change(tuned(b, 1)), "quantised"),
    "last layers removed": _derived("last layers removed", "layers removed", came=FIRST),
    "layers removed, then 8 bits": _then(
        "middle layers removed", DERIVATIONS["8 bits, rows"].change, "layers removed", "quantised", came=FIRST),
    "layers removed, then tuned": _then("middle layers removed", _tuned(1), "layers removed", "fine-tuned"),
    "pruned, then bfloat16": _of(lambda b: replace(pruned(b, 0.5), dtype="bfloat16"), "pruned", "cast", came=FIRST),
    "direction removed": _of(direction_removed, "direction removed", "low-rank", came=FIRST),
    "direction removed, then bfloat16": _of(
        lambda b: replace(direction_removed(b), dtype="bfloat16"), "direction removed", "low-rank", "cast",
        came=FIRST),
    "two layers swapped": _derived("two layers swapped", "reordered"),
    "heads permuted": _derived("heads permuted", "permuted"),
    "stream rotated": _derived("stream rotated", "rotated", "folded"),
    "norms folded": _derived("norms folded", "folded"),
    "neurons permuted": _derived("neurons permuted", "neurons permuted"),
    "neurons permuted, then tuned": _then("neurons permuted", _tuned(1), "fine-tuned", "neurons permuted"),
    "interpolated with a stranger": _case(lambda b, s: (averaged([b, s], [0.7, 0.3]), [b]), "fine-tuned"),
    "merge, bfloat16": _summed(lambda b, s: [b, s], [0.4, 0.6], "bfloat16", "merge", "cast", came=FIRST),
    "merge, float16": _summed(lambda b, s: [b, s], [0.4, 0.6], "float16", "merge", "cast", came=FIRST),
    "merge, float32": _summed(lambda b, s: [b, s], [0.4, 0.6], "float32", "merge"),
    "merge with a tune, bfloat16": _summed(
        lambda b, _: [b, tuned(b, 1)], [0.5, 0.5], "bfloat16", "merge", "cast", came=FIRST),
    "past a tune, bfloat16": _summed(
        lambda b, _: [b, tuned(b, 1)], [-0.5, 1.5], "bfloat16", "merge", "cast", came=FIRST),
    "merge of three, bfloat16": _summed(
        lambda b, s: [b, s, tuned(b, 1)], [0.4, 0.3, 0.3], "bfloat16", "merge", "cast"),
    "merge, bfloat16, then tuned": _case(
        lambda b, s: (_stored("bfloat16")(tuned(averaged([b, s], [0.4, 0.6]), 1, 0.01)), [b, s]), "merge", "cast"),
    "a base made of its merge": _case(
        lambda b, s: (replace(b, dtype="bfloat16"), [averaged([rounded(b), s], [2, -1]), s]), "merge", "cast"),
    "stranger": _case(lambda b, s: (s, [b]), came=NEITHER),
    "stranger, pruned": _case(lambda b, s: (pruned(s, 0.5), [b]), came=NEITHER),
    "stranger, 4 bits": _case(lambda b, s: (DERIVATIONS["Q4_0"].change(s), [b]), came=NEITHER),
    "a fresh initialisation": _case(lambda b, _: (initial(b, 9), [b]), came=NEITHER),
    "two fresh initialisations": _case(lambda b, _: (initial(b, 9), [initial(b, 10)]), came=NEITHER),
}  # fmt: skip


def plants_of(base: Weights, stranger: Weights) -> dict[str, Plant]:
    """Every case of a base and a stranger, by name."""

    def plant(name: str, make: Maker, kinds: tuple[str, ...], came: str) -> Plant:
        def write(folder: Path) -> Made:
            suspect, bases = make(base, stranger)
            named = {"suspect": suspect} | {f"base{i}": each for i, each in enumerate(bases)}
            for place, weights in named.items():
                write_weights(weights, folder / place)
            return Made(folder / "suspect", [folder / place for place in named if place != "suspect"])

        return Plant(name, write, {"lineage": kinds, "direction": came}, {"case": name, "planted": ", ".join(kinds)})

    return {name: plant(name, *case) for name, case in CASES.items()}


COLUMNS = ("case", "planted", "verdict", "verdict_back", "kinds", "named", "nothing_else", "direction", "called",
           "right")  # fmt: skip


def judged(plant: Plant, made: Made) -> dict[str, object]:
    """Cells of COLUMNS: `ws.lineage` there, and back where the suspect has one base."""
    there = ws.lineage(made.suspect, made.bases)
    back = ws.lineage(made.bases[0], made.suspect)
    kinds, planted = [kind.kind for kind in there.kinds], plant.expects["lineage"]
    called = {"derived": FIRST, "related": TOGETHER}.get(there.verdict, NEITHER)
    right = called == plant.expects["direction"] and back.verdict != "derived"
    return {
        "verdict": there.verdict, "verdict_back": back.verdict, "kinds": "; ".join(kinds),
        "named": int(all(any(word in kind for kind in kinds) for word in planted)),
        "nothing_else": int(all(any(word in kind for word in planted) for kind in kinds)),
        "direction": plant.expects["direction"], "called": called, "right": int(right),
    }  # fmt: skip
