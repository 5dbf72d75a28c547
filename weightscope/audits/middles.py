"""What may stand between W_Q and W_K': rotations at a distance, their mean over a window, and parts apart."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from weightscope.attention.layer import Layer


def middles(layer: Layer, deltas: Sequence[int], window: int) -> dict[str, np.ndarray]:
    """The (r, r) matrices M of the forms W_Q M W_K' that are measured beside W_Q W_K' itself.

    Without a rotation there are none: W_QK is the same at every distance. With one, W_QK at distance 0 is measured
    anyway; beside it

    - `delta7` for each other distance asked for: R(7);
    - `mean64`: the mean of R(0) .. R(63), what is left of the score when the distance is anything in the window;
    - `free` and `turning`, where only some dimensions turn: W_QK's position-free part and the rest at distance 0.
      In multi-head latent attention these are the latent's part and the rotary key's.

    Parameters
    ----------
    layer : Layer
    deltas : sequence of int
        Distances i - j.
    window : int

    Returns
    -------
    dict of (r, r) arrays
        The factor that some rotations put on scores is left out; see `measure_layer`.
    """
    if layer.rotation is None:
        return {}
    identity = np.eye(layer.q.of(0)[0].shape[-1])
    rotation = replace(layer.rotation, factor=1.0)
    found = {f"delta{delta}": rotation.rotate_at(identity, delta) for delta in deltas if delta}
    found[f"mean{window}"] = np.mean([rotation.rotate_at(identity, delta) for delta in range(window)], axis=0)
    turns = np.isin(np.arange(len(identity)), rotation.turning)
    if not turns.all():
        found |= {"free": np.diag(1.0 - turns), "turning": np.diag(1.0 * turns)}
    return found
