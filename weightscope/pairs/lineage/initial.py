"""Detect checkpoints that may share only the random numbers they were initialised with.

Models that are begun with one seed are alike until training has moved them far, and neither comes
from the other. A checkpoint before training is recognised by itself; of two trained ones the gains
of norms tell, as far as they can: they begin at one in every model, so that only what was learnt
together is alike in them.
"""

from collections.abc import Collection, Mapping, Sequence
from math import sqrt

import numpy as np

from weightscope.checkpoint.blocks import Block
from weightscope.checkpoint.checkpoint import Tensor
from weightscope.core.errors import printable
from weightscope.heads.tensors.measure import why_unread
from weightscope.heads.tensors.untrained_parts import LEAST_WIDE, off_random
from weightscope.model.model import Model
from weightscope.pairs.deeds.pair import Pair
from weightscope.pairs.lineage.differences import FOLDS, SAME, Kind
from weightscope.pairs.lineage.parts import PartVerdict
from weightscope.pairs.lineage.shared_tensors import FEED_FORWARD, NORMS
from weightscope.pairs.lineage.sketches import Sketches
from weightscope.pairs.lineage.verdict import Related

TURNED = "stream rotated or permuted"  # kind if weights do not tell which of the two
# kinds that change gains themselves, or leave all as they are
EXPLAINED_OTHERWISE = {
    *FOLDS,
    *SAME,
    "gains moved into weights",
    "stream permuted",
    "stream rotated",
    TURNED,
    "merge",
    "merge of layers",
}
LOOKS = (
    "as initialised (gains of one, biases of zero, spectra of random matrices), and whoever uses "
    "its seed begins there"
)
ONLY_BEGUN = (
    "They may share only an initialisation: gains of norms, which begin at one in every model, are "
    "not alike, so nothing shows that they learnt anything together."
)
MOSTLY = 0.9  # share of matrices that look random; an embedding has a row of zeros for padding


def initial_ones(
    suspect: Sketches, first: Related, parts: Mapping[str, PartVerdict], kinds: Collection[Kind]
) -> str:
    """Evidence of a shared initialisation, as a sentence; empty without any."""
    if suspect.source is None or first.base.source is None:
        return ""
    begun = [printable(side.name) for side in (suspect, first.base) if is_initial(side.source)]
    if begun:
        which = "both are" if len(begun) == 2 else f"{begun[0]} is"
        return f"They share an initialisation: {which} {LOOKS}."
    apart = parts[NORMS].verdict == "unrelated" and parts[FEED_FORWARD].is_shared
    is_explained = any(kind.is_one_of(EXPLAINED_OTHERWISE) for kind in kinds)
    return ONLY_BEGUN if apart and not is_explained else ""


def learnt_alike(suspect: Sketches, related: Sequence[Related]) -> tuple[str, dict[str, float]]:
    """Likeness of what a suspect and others learnt from an untrained base: a sentence, numbers."""
    direct = (each.base for each in related if each.match.route == "direct")
    start = next((base for base in direct if is_initial(base.source)), None)
    if start is None:
        return "", {}
    by_base = {
        each.base.name: _learnt_cosine(suspect, each.base, start)
        for each in related
        if each.base is not start
    }
    learnt = {name: cosine for name, cosine in by_base.items() if cosine is not None}
    if not learnt:
        return "", {}
    cosines = [f"{cosine:.2f} with {printable(name)}" for name, cosine in learnt.items()]
    without_start = f"With {printable(start.name)} taken out"
    changes = f"the changes in the layers of {printable(suspect.name)}"
    scale = "(1 if both learnt the same, 0 if nothing in common)"
    sentence = f" {without_start}, {changes} have a cosine of {' and '.join(cosines)} {scale}."
    return sentence, learnt


def _learnt_cosine(suspect: Sketches, base: Sketches, start: Sketches) -> float | None:
    """Cosine of two checkpoints' changes from their start, over layers' matrices, or None."""
    models = [each.source for each in (suspect, base, start) if each.source is not None]
    if len(models) < 3:
        return None
    sums = np.zeros((2, 2))
    for i in range(models[0].config.n_layers):
        for name in models[0].checkpoint.names_under(models[0].stem(i)):
            tensors = [model.checkpoint.get(name) for model in models]
            readable = [each for each in tensors if each is not None and _is_readable_matrix(each)]
            if len(readable) < 3 or len({each.shape for each in readable}) > 1:
                continue
            for _, first, stop in Pair(readable[0], readable[1]).blocks():
                x, y, begun = (
                    Block(each, first, stop).values().astype(np.float64).ravel()
                    for each in readable
                )
                changes = np.stack([x - begun, y - begun])  # (2, n)
                sums += changes @ changes.T
    size = sqrt(sums[0, 0] * sums[1, 1])
    return float(sums[0, 1] / size) if size else None


def _is_readable_matrix(tensor: Tensor) -> bool:
    return len(tensor.shape) > 1 and not why_unread(tensor)


def is_initial(model: Model | None) -> bool:
    """Detect an untrained checkpoint: constant gains and biases, spectra of random matrices."""
    if model is None:
        return False
    vectors, matrices = [], []
    for i in range(model.config.n_layers):
        for name in model.checkpoint.names_under(model.stem(i)):
            tensor = model.checkpoint[name]
            is_counter = tensor.dtype.startswith(("I", "U", "BOOL"))
            if is_counter or why_unread(tensor) or 0 in tensor.shape:
                continue
            if len(tensor.shape) == 1:
                values = tensor.read()
                if not (values == values[0]).all():
                    return False
                vectors.append(name)
            elif len(tensor.shape) == 2 and min(tensor.shape) >= LEAST_WIDE:
                matrices.append(tensor)
    random = [off_random(tensor) < 1 for tensor in matrices]
    return bool(vectors and matrices) and sum(random) >= MOSTLY * len(random)
