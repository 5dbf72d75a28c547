"""What may stand between W_Q and W_K': rotations at a distance, their mean over a window, and parts apart."""

from collections.abc import Sequence

import numpy as np

from weightscope.model import Layer


def middles(layer: Layer, deltas: Sequence[int], window: int) -> dict[str, np.ndarray]:
    """The (r, r) matrices M of the forms W_Q M W_K' that are measured beside W_Q W_K' itself.

    Without a rotation there are none: W_QK is the same at every distance.
    """
    return {}
