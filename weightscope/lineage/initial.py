"""Whether two checkpoints may share no more than the random numbers that they began with.

Models that are begun with one seed are alike until training has moved them far, and neither comes from the other. A
checkpoint before training is recognised by itself; of two trained ones the gains of norms tell, as far as they can:
they begin at one in every model, so that only what was learnt together is alike in them.
"""

from collections.abc import Collection, Mapping

from weightscope.errors import printable
from weightscope.lineage.parts import Part
from weightscope.lineage.shared_tensors import FEED_FORWARD, NORMS
from weightscope.lineage.sketches import Sketches
from weightscope.lineage.verdict import Related
from weightscope.model import Model
from weightscope.tensors.measure import why_unread
from weightscope.tensors.untrained_parts import LEAST_WIDE, off_random

EXPLAINED_OTHERWISE = ("norms folded", "gains moved", "same ", "stream", "merge")  # kinds that change gains themselves
LOOKS = (
    "as initialised (gains of one, biases of zero, spectra of random matrices), and whoever uses its seed begins there"
)
ONLY_BEGUN = (
    "They may share only an initialisation: gains of norms, which begin at one in every model, are not alike, so "
    "nothing shows that they learnt anything together."
)
MOSTLY = 0.9  # of the matrices: an embedding's row of padding is zero


def initial_ones(suspect: Sketches, first: Related, parts: Mapping[str, Part], kinds: Collection[str]) -> str:
    """What speaks for a shared initialisation, as a sentence; empty where nothing does."""
    if suspect.source is None or first.base.source is None:
        return ""
    begun = [printable(side.name) for side in (suspect, first.base) if is_initial(side.source)]
    if begun:
        which = "both are" if len(begun) == 2 else f"{begun[0]} is"
        return f"They share an initialisation: {which} {LOOKS}."
    apart = parts[NORMS].verdict == "unrelated" and parts[FEED_FORWARD].is_shared
    return ONLY_BEGUN if apart and not any(kind.startswith(EXPLAINED_OTHERWISE) for kind in kinds) else ""


def is_initial(model: Model | None) -> bool:
    """Whether a checkpoint is as initialised: one value in each gain and bias, spectra of random matrices."""
    if model is None:
        return False
    vectors, matrices = [], []
    for i in range(model.config.n_layers):
        for name in model.checkpoint.names_under(model.stem(i)):
            tensor = model.checkpoint[name]
            if tensor.dtype.startswith(("I", "U", "BOOL")) or why_unread(tensor) or 0 in tensor.shape:
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
