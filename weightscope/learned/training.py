"""How a tune was trained, as far as its changes show it: by a LoRA, whole, in a few rows, or along one direction."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from weightscope.changes.tensor import Change
from weightscope.findings import spans

MOSTLY = 0.9  # of the changed matrices in layers, for what they are to be said of the training
CONVERTED = ("rounded", "quantised")  # kinds of change that a conversion makes


@dataclass(frozen=True)
class Training:
    """What the changes say of the training."""

    kind: str  # "low rank", "one direction", "full", "few rows", "vectors", "conversion", "none" or "mixed"
    rank: int | None  # of a LoRA: the most common rank
    evidence: str  # in words


def training_of(changes: Sequence[Change], note: str = "") -> Training:
    """How a tune was trained: its changes, and what an adapter's own files say.

    A LoRA's change has its rank exactly up to rounding, whatever is merged; training all weights never gives a rank
    below half of a matrix. Reinforcement and supervised learning are not told apart (see docs/learned.md).
    """
    matrices = [each for each in changes if each.is_matrix and each.kind not in ("identical", "missing", "new")]
    in_layers = [each for each in matrices if each.role not in ("tokens", "unembedding", "positions")]
    kinds = Counter(each.kind for each in in_layers)
    total = sum(kinds.values())
    ranks = Counter(each.rank for each in in_layers if each.kind in ("low rank", "one direction") and each.rank)
    if note:
        return Training("low rank", ranks.most_common(1)[0][0] if ranks else None, note)
    if not any(each.kind != "identical" for each in changes):
        return Training("none", None, "no tensor changed")
    if not total:
        kind = "few rows" if any(each.kind == "few rows" for each in matrices) else "vectors"
        return Training(kind if not matrices or kind == "few rows" else "full", None, "no matrix in a layer changed")
    if kinds["one direction"] >= MOSTLY * total:
        evidence = f"{kinds['one direction']} of {total} changed matrices in layers changed along one direction"
        return Training("one direction", 1, evidence)
    low = kinds["low rank"] + kinds["one direction"]
    if low >= MOSTLY * total:
        evidence = f"the change of {low} of {total} changed matrices in layers has rank {spans(sorted(ranks))}"
        return Training("low rank", ranks.most_common(1)[0][0], evidence)
    if sum(kinds[kind] for kind in CONVERTED) >= MOSTLY * total:
        return Training("conversion", None, f"{total} matrices were rounded or quantised, which hides what was trained")
    if kinds["changed"] >= MOSTLY * total:
        evidence = f"the change of {kinds['changed']} of {total} changed matrices in layers has no low rank"
        return Training("full", None, evidence)
    parts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return Training("mixed", None, f"matrices in layers changed in several ways: {parts}")
