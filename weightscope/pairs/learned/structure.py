"""Changes of full rank by adapters: DoRA scales rows too, LoKr is a Kronecker product."""

import numpy as np

STEPS = 12  # most steps of the search for a DoRA's factors, which converges within a few
NEAR = 1e-4  # |error| / |change| that is left at most, of weights in 32 bits
SHRINKS = 0.9  # remainder after a step over that before it; above, the search ends
FEWEST = 2  # rows and columns of a Kronecker product's factors
LARGEST = 1024  # the smaller side of matrices that are looked at


def dora_rank(before: np.ndarray, after: np.ndarray) -> int | None:
    """The rank r with after = diag(t) (before + B A), A of r rows; None if not below half.

    With the row space of A out of both, after is diag(t) before: the factors t and that space are
    found in turn.
    """
    w, v = before.astype(np.float64), after.astype(np.float64)
    most = min(w.shape) // 2
    if min(w.shape) > LARGEST or not most:
        return None
    with np.errstate(all="ignore"):
        factors, outside = np.vecdot(v, w) / np.vecdot(w, w), np.inf
    for _ in range(STEPS if np.isfinite(factors).all() else 0):
        energies, vectors = np.linalg.eigh((rest := v - factors[:, None] * w).T @ rest)
        largest = np.maximum(energies[::-1][: most + 1], energies[-1] * np.finfo(float).eps)
        few = w.shape[1] - 1 - int(np.argmax(largest[:-1] / largest[1:]))  # up to the widest gap
        before_it, outside = outside, float(np.maximum(energies[:few], 0).sum())
        if outside > SHRINKS * before_it:
            break
        x, y = w @ vectors[:, :few], v @ vectors[:, :few]  # the space that A does not read
        factors = np.vecdot(x, y) / np.vecdot(x, x)
    if not np.isfinite(factors).all() or np.ptp(factors) <= NEAR * abs(factors.mean()):
        return None
    s = np.linalg.svd(v - factors[:, None] * w, compute_uv=False)
    rank = int((s > NEAR * s[0]).sum())
    return rank if 0 < rank < most else None


def kronecker_shapes(d: np.ndarray) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Shapes of two matrices whose Kronecker product a change is, coarser first; else None."""
    sides = [_divisors(size) if min(d.shape) <= LARGEST else [] for size in d.shape]
    for m in sides[0]:
        for n in sides[1]:
            # (m, n, p, q)
            blocks = d.reshape(m, d.shape[0] // m, n, d.shape[1] // n).swapaxes(1, 2)
            sizes = np.linalg.norm(blocks, axis=(2, 3))
            largest = blocks[np.unravel_index(sizes.argmax(), sizes.shape)]
            few = blocks[:: max(1, m - 1), :: max(1, n - 1)]
            if all(_are_multiples(each, largest) for each in (few, blocks)):
                return (m, n), largest.shape  # type: ignore[return-value]
    return None


def _are_multiples(blocks: np.ndarray, block: np.ndarray) -> bool:
    """True if all blocks are multiples of this one."""
    shares = np.einsum("mnpq,pq->mn", blocks, block) / (block**2).sum()
    return bool(
        np.linalg.norm(blocks - shares[..., None, None] * block) <= NEAR * np.linalg.norm(blocks)
    )


def _divisors(size: int) -> list[int]:
    """The ways to divide an axis into parts of several rows."""
    return [each for each in range(FEWEST, size // FEWEST + 1) if size % each == 0]
