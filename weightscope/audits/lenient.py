"""A model read as it is, NaNs and infinities included, so that an audit can say which heads they reach."""

from copy import copy

import numpy as np

from weightscope.checkpoint import Tensor
from weightscope.model import Model

BLOCK_VALUES = 4 << 20  # looked through at a time


def lenient(model: Model) -> Model:
    """The same model with no layer in memory, its values that are not finite handed over: they reach their heads."""
    other = copy(model)
    other.checkpoint = model.checkpoint.unchecked()
    other._last = None
    return other


def count_not_finite(tensor: Tensor) -> int:
    """How many values of a tensor are NaN or infinite."""
    if not tensor.shape:
        return 0
    rows = max(1, BLOCK_VALUES // max(1, int(np.prod(tensor.shape[1:]))))
    return sum(int(np.count_nonzero(~np.isfinite(block))) for _, block in tensor.unchecked().blocks(rows))
