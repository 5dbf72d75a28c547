"""Both measures of how two heads fit, for all heads of two layers, from one product.

With orthonormal directions U of what head a writes and V of what head b reads, chosen along the singular directions of
W_VO(a) and of the matrix that V belongs to, and N = U'V, which is r x r:

    PK = sum_ij N_ij^2                  the sum of the squared cosines of the angles between the two spaces, from 0 to r
    CS^2 = sum_ij p_i N_ij^2 q_j        with p and q the shares of each direction in |W_VO(a)|_F^2 and in |W(b)|_F^2

Where query heads share what they read, q is a quadratic form Q on it, and CS^2 = tr(N' diag(p) N Q).
"""

from dataclasses import dataclass
from threading import local
from typing import Any

import numpy as np

from weightscope.circuitry.spaces import Spaces
from weightscope.device import CPU, Device
from weightscope.shapes import ShowsShapes

PRODUCT_BYTES = 16 << 20  # of one product: what is summed of it is still in the cache


@dataclass(frozen=True, eq=False, repr=False)
class Written(ShowsShapes):
    """What the heads of a layer write, as the rows that are multiplied with what others read.

    Attributes
    ----------
    rows : (H, n, d) float32 array of a device
    weights : (H, 2, n) float32 array
        PK and CS^2 are the sums of the rows' squared products with these weights.
    """

    rows: Any
    weights: np.ndarray

    @classmethod
    def whole(cls, spaces: Spaces, device: Device = CPU) -> "Written":
        """Every direction: all alike for PK, by their shares for CS."""
        weights = np.stack([np.ones_like(spaces.use[:, 0]), spaces.use[:, 0]], axis=1)
        return cls(device.put(spaces.directions), weights.astype(np.float32))


def pair_scores(written: Written, read: Spaces, device: Device = CPU, columns: Any = None) -> np.ndarray:
    """PK and CS^2 of all heads a of one layer with all heads b of a later one.

    Parameters
    ----------
    written : Written
    read : Spaces
        What the heads b read by queries, keys or values.
    device : Device, optional
    columns : array, optional
        `read.directions` on the device, where they are there already.

    Returns
    -------
    (2, H, H) array
    """
    xp = device.xp
    (h, r_a, d), (g, r_b, _) = written.rows.shape, read.directions.shape
    columns = xp.reshape(device.put(read.directions) if columns is None else columns, (g * r_b, d))
    use = device.put((read.use[:, 0] if read.form is None else read.form.reshape(g, -1, r_b * r_b)).astype(np.float32))
    found = []
    at_once = max(1, PRODUCT_BYTES // (4 * r_a * g * r_b))
    for start in range(0, h, at_once):
        n = min(at_once, h - start)
        weights = device.put(written.weights[start : start + n])
        product = _product(xp.reshape(written.rows[start : start + n, ...], (n * r_a, d)), columns, device)
        composed = None if read.form is None else _by_form(xp.reshape(product, (n, r_a, g, r_b)), weights, use, xp)
        product *= product
        sums = xp.reshape(weights @ xp.reshape(product, (n, r_a, g * r_b)), (n, 2, g, r_b))
        pk = xp.sum(sums[:, 0, ...], axis=-1)  # (n, G)
        if composed is None:
            composed = xp.sum(sums[:, 1, ...] * use, axis=-1)
        found.append(np.stack([np.repeat(device.get(pk), read.use.shape[1], axis=1), device.get(composed)]))
    return np.concatenate(found, axis=1)


def _by_form(product: Any, weights: Any, forms: Any, xp: Any) -> Any:
    """tr(N' diag(p) N Q) for every query head of a group: (n, r_a, G, r_b) and (G, S, r_b^2) -> (n, G S)."""
    n, _, g, r_b = product.shape
    scaled = product * xp.sqrt(weights[:, 1, :, None, None])
    inside = xp.permute_dims(scaled, (2, 0, 3, 1)) @ xp.permute_dims(scaled, (2, 0, 1, 3))  # (G, n, r_b, r_b)
    composed = xp.reshape(inside, (g, n, r_b * r_b)) @ xp.permute_dims(forms, (0, 2, 1))  # (G, n, S)
    return xp.reshape(xp.permute_dims(composed, (1, 0, 2)), (n, -1))


_scratch = local()


def _product(rows: Any, columns: Any, device: Device) -> Any:
    """rows @ columns.T; on this machine into memory that the thread keeps, since fresh pages cost a third as much."""
    if device is not CPU:
        return rows @ columns.T
    size = len(rows) * len(columns)
    if getattr(_scratch, "kept", np.empty(0)).size < size:
        _scratch.kept = np.empty(size, np.float32)
    return np.matmul(rows, columns.T, out=_scratch.kept[:size].reshape(len(rows), len(columns)))
