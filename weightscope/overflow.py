"""Finite weights too large to compute with: which they are, and the error that says so."""

from collections.abc import Iterable

import numpy as np

from weightscope.checkpoint import Tensor
from weightscope.errors import CheckpointError
from weightscope.model import Model

BLOCK_VALUES = 4 << 20  # of a tensor looked through at a time


def largest_weight(tensors: Iterable[Tensor]) -> tuple[float, str]:
    """The largest finite magnitude in some tensors, and the name of the tensor; (0, "") where there is none."""
    found = (0.0, "")
    for tensor in tensors:
        a_row = int(np.prod(tensor.shape[1:]))
        blocks = tensor.unchecked(set()).blocks(max(1, BLOCK_VALUES // max(1, a_row))) if tensor.shape else ()
        for _, block in blocks:
            finite = np.where(np.isfinite(block), np.abs(block), 0)
            found = max(found, (float(finite.max(initial=0)), tensor.name))
    return found


def overflow(model: Model, what: str, layer: int | None = None) -> CheckpointError:
    """The error that says that `what` left the range of its numbers, and which weights may have done it.

    Parameters
    ----------
    model : Model
    what : str
        What is not finite, such as "T^ee of head 3".
    layer : int, optional
        The layer it is computed from, beside the embeddings; none where it is of the embeddings alone.
    """
    tensors = [*model.embedding_tensors, *(model.attention_tensors(layer) if layer is not None else ())]
    value, name = largest_weight(tensors)
    problem = f"{what} overflows: its largest weight is {value:.3g}, in {name}"
    return CheckpointError(f"{problem}; read that tensor again from its source", file=model.checkpoint.name)
