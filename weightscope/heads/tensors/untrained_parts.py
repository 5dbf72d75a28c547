"""Find towers, projectors and heads outside the audited layers that are as initialised.

One matrix says little: 32 of 784 in nine real checkpoints have the second moments of a random one.
Constant gains and biases say more, but folding leaves them too. Both together were found in all of
nine real stacks of four layers that were drawn anew next to another model, in none of the nine as
published, and in two heads: the poolers of MiniLM and MPNet.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from math import prod, sqrt

import numpy as np

from weightscope.checkpoint.checkpoint import Tensor
from weightscope.core.errors import counted
from weightscope.heads.tensors.findings import on_top, row_count
from weightscope.heads.tensors.measure import Everything, TensorFacts
from weightscope.model.metrics.spectra import spread_error
from weightscope.model.model import Model
from weightscope.report.findings import Finding, Member, Tried, finding

JUDGED_ROWS = 256  # rows of a matrix
LEAST_WIDE = 32  # columns of a matrix, or rows
BOUND = 3  # times the median size
DEVIATIONS = 6
# modules whose rows are looked up: formulas may fill them
LOOKED_UP = re.compile(r"embed|position|token", re.IGNORECASE)
PARAMETER = re.compile(r"\.(weight|bias|gamma|beta)$")

untrained_weights = finding(
    "untrained",
    "weights as initialised",
    severity="warning",
    rank=65,
    tried=Tried(planted=9, found=9, healthy=9),
    look_next="If they should be trained, check the names they were saved under: transformers "
    "initialises anew every tensor that it does not find under the name it expects.",
)
untrained_head = finding(
    "untrained_head",
    "head as initialised",
    rank=70,
    look_next="Usual for a pooler that nothing reads, as in embedding models. A head that is used "
    "must be trained; one that was trained may have been lost and drawn anew.",
)


def untrained_parts(model: Model, everything: Everything) -> Iterator[Finding]:
    """Parts outside the audited layers with random matrices, and constant gains and biases."""
    layers = (model.prefix + model.family.layer).partition("{i}")[0]
    parts: dict[str, list[TensorFacts]] = defaultdict(list)
    for tensor in everything.facts:
        is_float = tensor.kind == "f"
        if is_float and PARAMETER.search(tensor.name) and not tensor.name.startswith(layers):
            parts[_part_of(tensor.name, layers)].append(tensor)
    for part, tensors in parts.items():
        vectors = [tensor for tensor in tensors if row_count(tensor) == 1]
        matrices = [tensor for tensor in tensors if row_count(tensor) > 1 and _is_judged(tensor)]
        if not matrices or not vectors or not all(tensor.constant for tensor in vectors):
            continue
        stored = (model.checkpoint[tensor.name].unchecked(set()) for tensor in matrices)
        distances = [*map(off_random, stored)]
        if not all(distance < 1 for distance in distances):  # NaN is not
            continue
        weights = counted(len(matrices), "weight")
        constants = counted(len(vectors), "gain or bias tensor")
        is_head = all(on_top(tensor.name) for tensor in tensors)
        kind = untrained_head if is_head else untrained_weights
        yield kind(
            measure="off_random",
            number=max(distances),
            text=f"{part} is as initialised: {weights} with the spectra of random matrices, "
            f"{constants} of one value each.",
            members=tuple(Member("tensor", None, name=t.name, number=t.rms) for t in tensors),
        )


def _part_of(name: str, layers: str) -> str:
    """Part that a tensor belongs to: its name until it leaves the path to the layers."""
    steps, path = name.split("."), layers.split(".")
    pairs = enumerate(zip(steps, path, strict=False))
    shared = next((i for i, (step, expected) in pairs if step != expected), len(path))
    return ".".join(steps[: shared + 1])


def _is_judged(tensor: TensorFacts) -> bool:
    """True for a matrix that is not too narrow, and whose rows are not looked up."""
    module = tensor.name.rpartition(".")[0].rpartition(".")[2]
    narrow_side = min(tensor.shape[0], JUDGED_ROWS, prod(tensor.shape[1:]))
    return narrow_side >= LEAST_WIDE and not LOOKED_UP.search(module)


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


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix: stacked experts lie below one another."""
    ends = 2 if len(shape) == 3 else 1
    return prod(shape[:ends]), prod(shape[ends:])


def may_be_random(tensor: Tensor) -> bool:
    """False if the values of a matrix are not independent draws of any one distribution.

    Values are bounded first, which leaves independent ones independent; then squares of rows or of
    columns vary more than they would, or rows are more alike, by six deviations
    (p = 3e-6 or less: sums of squares have long tails).
    """
    block = next(iter(tensor.blocks(JUDGED_ROWS)))[1]
    w = block.reshape(matrix_of(block.shape))[:JUDGED_ROWS].astype(np.float64)
    w = w[np.ptp(w, axis=1) > 0]  # rows of padding
    w = w[:, np.ptp(w, axis=0) > 0] if len(w) else w
    if min(w.shape) < LEAST_WIDE:
        return True
    w -= np.median(w)
    most = BOUND * np.median(np.abs(w))
    w = np.clip(w, -most, most)
    w -= w.mean()
    with np.errstate(invalid="ignore", divide="ignore"):
        signs = _spread_of_sums(w), _spread_of_sums(w.T), _likeness(w)
    return not any(each > DEVIATIONS for each in signs)


def _spread_of_sums(w: np.ndarray) -> float:
    """The variance of sums of squares over rows, in deviations from independent values."""
    squares = w**2
    ratio = squares.sum(axis=1).var() / (w.shape[1] * squares.var())
    excess = ((squares - squares.mean()) ** 4).mean() / squares.var() ** 2 - 3
    return float((ratio - 1) / sqrt((2 + max(0, excess) / w.shape[1]) / len(w)))


def _likeness(w: np.ndarray) -> float:
    """The mean square of cosines of rows, in deviations from independent values."""
    w = w.T if len(w) > w.shape[1] else w  # (k, n)
    w = w / np.linalg.norm(w, axis=1, keepdims=True)
    cosines = (w @ w.T)[np.triu_indices(len(w), 1)] ** 2 * w.shape[1]
    return float((cosines.mean() - 1) / sqrt(max(2, cosines.var()) / len(cosines)))
