"""The share of each base in a merge: least squares over some weights, checked on others."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod, sqrt

import numpy as np

from weightscope.checkpoint.blocks import Block, row_width
from weightscope.checkpoint.checkpoint import Tensor
from weightscope.heads.tensors.measure import why_unread
from weightscope.model.metrics.spectra import evenly_spread
from weightscope.model.model import Model
from weightscope.pairs.lineage.verdict import Related

ROWS = 16  # rows of each tensor: half for the fit, half to check it
BETTER = 0.7  # factor by which another base has to shrink the distance on the rows of the check
EXACT = 1e-6  # distance that rounding explains: nothing is left for another base
LEAST_SHARE = 0.02  # smallest share that is reported


@dataclass(frozen=True)
class Shares:
    """A suspect as a weighted sum of bases; without weights if no second base improves the fit.

    Distances are over rows outside the fit, relative to the suspect's norm.
    """

    weights: dict[str, float]
    left: float = 1.0  # distance from the sum
    alone: float = 1.0  # distance from the nearest base
    by_tensor: float = 1.0  # distance from sums whose shares are free for each tensor


def shares_of(suspect: Model, related: Sequence[Related]) -> Shares:
    """Bases that sum to a suspect, by least squares over some rows of attention matrices."""
    bases = [
        (each.base.name, each.base.source, each.match)
        for each in related
        if each.base.source is not None
    ]
    if len(bases) < 2:
        return Shares({})
    grams = np.zeros((2, *(len(bases) + 1,) * 2))  # suspect last; for the fit, and for the check
    of_tensors: list[np.ndarray] = []
    for i, layer in enumerate(suspect.attention_layers):
        for tensor in suspect.attention_tensors(layer):
            counterparts = [
                _counterpart(suspect, layer, tensor, model, match.layers[i])
                for _, model, match in bases
            ]
            present = [each for each in counterparts if each is not None]
            if len(tensor.shape) < 2 or why_unread(tensor) or len(present) < len(bases):
                continue
            rows = [_rows_of_all([*present, tensor], half) for half in (0, 1)]
            of_tensors.append(np.stack([each @ each.T for each in rows]))
            grams += of_tensors[-1]
    names = [name for name, *_ in bases]
    shares = _selected(names, *grams)
    chosen = [names.index(name) for name in shares.weights]
    return replace(shares, by_tensor=_by_tensor(of_tensors, chosen))


def _by_tensor(grams: Sequence[np.ndarray], chosen: list[int]) -> float:
    """|y - sum w x| / |y| over the checks of all tensors, each with weights that fit it."""
    if not chosen:
        return 1.0
    left, size = 0.0, 0.0
    for fit, check in grams:
        left += _distance(check, chosen, _solved(fit, chosen)) ** 2 * check[-1, -1]
        size += float(check[-1, -1])
    return sqrt(left / max(size, 1e-30))


def _counterpart(
    suspect: Model, layer: int, tensor: Tensor, base: Model, place: int | None
) -> Tensor | None:
    """The tensor of the same name and shape in a base's layer."""
    if place is None:
        return None
    name = base.stem(base.attention_layers[place]) + tensor.name.removeprefix(suspect.stem(layer))
    counterpart = base.checkpoint.get(name)
    if counterpart is None or counterpart.shape != tensor.shape or why_unread(counterpart):
        return None
    return counterpart


def _rows_of_all(tensors: Sequence[Tensor], half: int) -> np.ndarray:
    return np.stack([_rows(tensor, half) for tensor in tensors])


def _rows(tensor: Tensor, half: int) -> np.ndarray:
    """Every other row of some evenly spread rows, joined."""
    width = row_width(tensor.shape) or prod(tensor.shape)
    count = prod(tensor.shape) // width
    picked = evenly_spread(count, ROWS)[half::2].tolist()
    rows = [Block(tensor, row * width, (row + 1) * width).values() for row in picked]
    return np.concatenate([np.empty(0), *rows]).astype(np.float64)


def _selected(names: Sequence[str], fit: np.ndarray, check: np.ndarray) -> Shares:
    """Add bases one or two at a time (A + B - base) while each makes the check much nearer."""
    chosen, weights, left = _nearest(fit, check, [], 1)
    alone = left
    while left > EXACT:
        sizes = [more for more in (1, 2) if len(chosen) + more <= len(names)]
        tried = (_nearest(fit, check, chosen, more) for more in sizes)
        better = next((each for each in tried if each[2] <= BETTER * left), None)
        if better is None:
            break
        chosen, weights, left = better
    if len(chosen) < 2:
        return Shares({})
    shares = {
        names[k]: float(w) for k, w in zip(chosen, weights, strict=True) if abs(w) >= LEAST_SHARE
    }
    if len(shares) < 2:
        shares = {}
    return Shares(shares, left, alone)


def _nearest(
    fit: np.ndarray, check: np.ndarray, chosen: list[int], more: int
) -> tuple[list[int], np.ndarray, float]:
    """The nearest sum of the chosen bases and this many more: bases, weights and distance."""
    rest = [k for k in range(len(fit) - 1) if k not in chosen]
    tried = []
    for added in combinations(rest, more):
        bases = [*chosen, *added]
        weights = _solved(fit, bases)
        tried.append((bases, weights, _distance(check, bases, weights)))
    return min(tried, key=lambda each: each[2])


def _solved(gram: np.ndarray, chosen: list[int]) -> np.ndarray:
    """Weights of the chosen bases; a single base has weight 1."""
    if len(chosen) == 1:
        return np.ones(1)
    inside, right = gram[np.ix_(chosen, chosen)], gram[chosen, -1]
    return np.linalg.lstsq(inside, right, rcond=1e-12)[0]


def _distance(gram: np.ndarray, chosen: list[int], weights: np.ndarray) -> float:
    """|y - sum w x| / |y|."""
    size = float(gram[-1, -1])
    if not size > 0:
        return 1.0
    signed = np.zeros(len(gram))
    signed[chosen], signed[-1] = -weights, 1.0
    return sqrt(max(0.0, float(signed @ gram @ signed)) / size)
