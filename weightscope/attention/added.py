"""Positions that are added to what queries and keys are made of, and not to values: DETR and its line.

Other models add positions once, to what enters the first layer. DETR hands them to every layer of attention (Carion et
al. 2020, "End-to-End Object Detection with Transformers", section A.3 and figure 10): queries and keys are made of
z + p, values of z alone. z is the stream, behind the layer's norm where it has one. A score is then

    (z_i + p_i) W_QK (z_j + p_j)' + b_QK (z_j + p_j)'

so that one W_QK meets content and positions alike.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from weightscope.attention.maps import Affine
from weightscope.errors import CheckpointError


@dataclass(frozen=True, eq=False, repr=False)
class Added:
    """What positions add to queries and keys: maps are linear, so that p has a part of each to itself.

    Attributes
    ----------
    of_queries, of_keys : Affine or None
        (H, e, s) and (G, e, s) maps of positions of width e; None where nothing is added. Where s is more than a head's
        width r, the further dimensions hold what meets positions alone: Conditional DETR (Meng et al. 2021, section
        3.3) appends positions to queries and keys instead of adding them.
    """

    of_queries: Affine | None = None
    of_keys: Affine | None = None

    def taken(self, *, cross: bool) -> dict[str, bool]:
        """Which arguments of `Layer.scores` hand positions to the layer."""
        queries, keys = self.of_queries is not None, self.of_keys is not None
        return {"added": queries or (keys and not cross), "added_to_memory": keys and cross}

    def to(
        self, q: np.ndarray, k: np.ndarray, added: ArrayLike | None, to_memory: ArrayLike | None, *, cross: bool,
        index: int,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Queries (H, n, r) and keys (G, m, r) with what positions add to them, (H, n, s) and (G, m, s).

        Raises
        ------
        CheckpointError
            The layer adds positions and none are given, or none and some are, or they have another shape.
        """
        for (name, takes), given in zip(self.taken(cross=cross).items(), (added, to_memory), strict=True):
            if takes and given is None:
                what = "adds positions to what its queries and keys are made of"
                raise CheckpointError(f"layer {index} {what}: say which, `{name}=`, or 0 for none")
            if given is not None and not takes:
                raise CheckpointError(f"layer {index} adds no such positions: leave `{name}` out")
        keys = to_memory if cross else added
        return _plus(q, self.of_queries, added, index), _plus(k, self.of_keys, keys, index)


def _plus(made: np.ndarray, of: Affine | None, given: ArrayLike | None, index: int) -> np.ndarray:
    """Queries or keys (heads, n, r), and what `of` makes of the positions given, (heads, n, s)."""
    if of is None or given is None:
        return made
    positions, wanted = np.asarray(given, dtype=made.dtype), (made.shape[1], of.shape[1])
    if positions.ndim and positions.shape != wanted:
        raise CheckpointError(f"layer {index} adds positions of shape {wanted}, and was given {positions.shape}")
    more = np.array(of(np.broadcast_to(positions, wanted)))
    more[..., : made.shape[2]] += made
    return more


NOTHING_ADDED = Added()
