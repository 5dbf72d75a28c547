"""Whether two checkpoints may share no more than the random numbers that they began with.

Models that are begun with one seed are alike until training has moved them far, and neither comes
from the other. A checkpoint before training is recognised by itself; of two trained ones the gains
of norms tell, as far as they can: they begin at one in every model, so that only what was learnt
together is alike in them.
"""

from collections.abc import Collection, Mapping, Sequence
from math import sqrt

import numpy as np

from weightscope.checkpoint.blocks import Block
from weightscope.core.errors import printable
from weightscope.heads.tensors.measure import why_unread
from weightscope.heads.tensors.untrained_parts import LEAST_WIDE, off_random
from weightscope.model.model import Model
from weightscope.pairs.deeds.pair import Pair
from weightscope.pairs.lineage.parts import Part
from weightscope.pairs.lineage.shared_tensors import FEED_FORWARD, NORMS
from weightscope.pairs.lineage.sketches import Sketches
from weightscope.pairs.lineage.verdict import Related

# kinds that change gains themselves
EXPLAINED_OTHERWISE = ("norms folded", "gains moved", "same ", "stream", "merge")
LOOKS = "as initialised (gains of one, biases of zero, spectra of random matrices), and whoever uses its seed begins there"
ONLY_BEGUN = (
    "They may share only an initialisation: gains of norms, which begin at one in every model, are not alike, so "
    "nothing shows that they learnt anything together."
)
MOSTLY = 0.9  # of the matrices: an embedding's row of padding is zero


def initial_ones(
    suspect: Sketches, first: Related, parts: Mapping[str, Part], kinds: Collection[str]
) -> str:
    """What speaks for a shared initialisation, as a sentence; empty where nothing does."""
    if suspect.source is None or first.base.source is None:
        return ""
    begun = [printable(side.name) for side in (suspect, first.base) if is_initial(side.source)]
    if begun:
        which = "both are" if len(begun) == 2 else f"{begun[0]} is"
        return f"They share an initialisation: {which} {LOOKS}."
    apart = parts[NORMS].verdict == "unrelated" and parts[FEED_FORWARD].is_shared
    return (
        ONLY_BEGUN
        if apart and not any(kind.startswith(EXPLAINED_OTHERWISE) for kind in kinds)
        else ""
    )


def learnt_alike(suspect: Sketches, related: Sequence[Related]) -> tuple[str, dict[str, float]]:
    """How alike what a suspect and other bases learnt is, where a base is as initialised: a
    sentence, and by base.
    """
    start = next(
        (
            each.base
            for each in related
            if each.match.route == "direct" and is_initial(each.base.source)
        ),
        None,
    )
    alike = {
        each.base.name: cosine
        for each in related
        if each.base is not start
        and (cosine := _learnt_cosine(suspect, each.base, start)) is not None
    }
    if start is None or not alike:
        return "", {}
    cosines = " and ".join(f"{cosine:.2f} with {printable(name)}" for name, cosine in alike.items())
    changes = f"With {printable(start.name)} taken out, the changes in the layers of {printable(suspect.name)}"
    return (
        f" {changes} have a cosine of {cosines} (1 if both learnt the same, 0 if nothing in common).",
        alike,
    )


def _learnt_cosine(suspect: Sketches, base: Sketches, start: Sketches | None) -> float | None:
    """The cosine of two checkpoints' changes from where they began, over the matrices of layers;
    None if not known.
    """
    models = [
        each.source
        for each in (suspect, base, start)
        if each is not None and each.source is not None
    ]
    if len(models) < 3:
        return None
    sums = np.zeros((2, 2))
    for i in range(models[0].config.n_layers):
        for name in models[0].checkpoint.names_under(models[0].stem(i)):
            tensors = [model.checkpoint.get(name) for model in models]
            known = [
                each
                for each in tensors
                if each is not None and len(each.shape) > 1 and not why_unread(each)
            ]
            if len(known) < 3 or len({each.shape for each in known}) > 1:
                continue
            for _, first, stop in Pair(known[0], known[1]).blocks():
                x, y, begun = (
                    Block(each, first, stop).values().astype(np.float64).ravel() for each in known
                )
                changes = np.stack([x - begun, y - begun])  # (2, n)
                sums += changes @ changes.T
    size = sqrt(sums[0, 0] * sums[1, 1])
    return float(sums[0, 1] / size) if size else None


def is_initial(model: Model | None) -> bool:
    """Whether a checkpoint is as initialised: one value in each gain and bias, spectra of random
    matrices.
    """
    if model is None:
        return False
    vectors, matrices = [], []
    for i in range(model.config.n_layers):
        for name in model.checkpoint.names_under(model.stem(i)):
            tensor = model.checkpoint[name]
            if (
                tensor.dtype.startswith(("I", "U", "BOOL"))
                or why_unread(tensor)
                or 0 in tensor.shape
            ):
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
