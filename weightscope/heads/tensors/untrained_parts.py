"""Find towers, projectors and heads outside the audited layers that are as initialised.

One matrix says little: 32 of 784 in nine real checkpoints have the second moments of a random one.
Constant gains and biases say more, but folding leaves them too. Both together were found in all of
nine real stacks of four layers that were drawn anew next to another model, in none of the nine as
published, and in two heads: the poolers of MiniLM and MPNet.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from math import prod

import numpy as np

from weightscope.checkpoint.checkpoint import Tensor
from weightscope.core.errors import counted
from weightscope.heads.tensors.findings import on_top, row_count
from weightscope.heads.tensors.measure import Everything, TensorFacts
from weightscope.model.metrics.spectra import spread_error
from weightscope.model.model import Model
from weightscope.report.findings import Finding, Member, finding

JUDGED_ROWS = 256  # of a matrix
LEAST_WIDE = 32  # of its smaller side
LOOKED_UP = re.compile(
    r"embed|position|token", re.IGNORECASE
)  # modules whose rows are looked up: formulas may fill them
PARAMETER = re.compile(r"\.(weight|bias|gamma|beta)$")


@finding(
    "untrained_head",
    "head as initialised",
    rank=70,
    look_next="Usual for a pooler that nothing reads, as in embedding models. A head that is used must be "
    "trained; one that was trained may have been lost and drawn anew.",
)
def untrained_parts(model: Model, everything: Everything) -> Iterator[Finding]:
    """Parts outside the audited layers with random matrices, and constant gains and biases."""
    layers = (model.prefix + model.family.layer).partition("{i}")[0]
    parts: dict[str, list[TensorFacts]] = defaultdict(list)
    for tensor in everything.facts:
        if (
            not tensor.name.startswith(layers)
            and PARAMETER.search(tensor.name)
            and tensor.kind == "f"
        ):
            parts[_part_of(tensor.name, layers)].append(tensor)
    for part, tensors in parts.items():
        vectors = [tensor for tensor in tensors if row_count(tensor) == 1]
        matrices = [
            t
            for t in tensors
            if _narrow_side(t) >= LEAST_WIDE and not LOOKED_UP.search(_module(t.name))
        ]
        if not matrices or not vectors or not all(tensor.constant for tensor in vectors):
            continue
        distances = [
            off_random(model.checkpoint[tensor.name].unchecked(set())) for tensor in matrices
        ]
        if not all(distance < 1 for distance in distances):  # NaN is not
            continue
        weights, constants = (
            counted(len(matrices), "weight"),
            counted(len(vectors), "gain or bias tensor"),
        )
        text = f"{part} is as initialised: {weights} with the spectra of random matrices, {constants} of one value each."
        kind = "untrained_head" if all(on_top(tensor.name) for tensor in tensors) else "untrained"
        members = tuple(
            Member("tensor", None, name=tensor.name, number=tensor.rms) for tensor in tensors
        )
        yield Finding(
            kind=kind, measure="off_random", number=max(distances), text=text, members=members
        )


def _module(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[2]


def _part_of(name: str, layers: str) -> str:
    """Part that a tensor belongs to: its name until it leaves the path to the layers."""
    steps, path = name.split("."), layers.split(".")
    shared = next(
        (i for i, (a, b) in enumerate(zip(steps, path, strict=False)) if a != b), len(path)
    )
    return ".".join(steps[: shared + 1])


def _narrow_side(tensor: TensorFacts) -> int:
    """Smaller side of the judged part of a matrix; 1 for a vector."""
    return min(tensor.shape[0], JUDGED_ROWS, prod(tensor.shape[1:])) if row_count(tensor) > 1 else 1


def off_random(tensor: Tensor) -> float:
    """Distance of a matrix from a random one, in units of its error: 0 to 1 if it may be random.

    tr(G^2) / (tr G)^2 is 1/k + 1/n for a (k, n) matrix of independent entries, the second term with
    an error of 2 / k.
    """
    block = next(iter(tensor.blocks(JUDGED_ROWS)))[1]
    w = block.reshape(len(block), -1).astype(np.float64)
    w = w.T if len(w) > w.shape[1] else w  # (k, n)
    gram = w @ w.T  # (k, k)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = ((gram**2).sum() / gram.trace() ** 2 - 1 / len(w)) * w.shape[1]
    return float(abs(ratio - 1) / spread_error(len(w)))
