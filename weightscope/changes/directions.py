"""Whether changes are of rank one and share a direction, as where one was removed from several matrices."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np

from weightscope.changes.thresholds import PARALLEL, REMOVED
from weightscope.findings import Finding, Member

PASSES = 3  # over the blocks: a power iteration, which finds the direction of a matrix of rank one in the first

Pairs = Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]]


class Along(NamedTuple):
    """The direction of one side of a change from A to B that is nearly of rank one."""

    direction: np.ndarray  # a unit vector
    left: float  # |B v| / |A v|: 0 where the direction was removed


def first_directions(pairs: Pairs) -> tuple[float, Along, Along]:
    """The share of a change's energy in its first singular direction, that of the columns and that of the rows.

    pairs: blocks of rows of A and of B, (rows, n) each -> share, (m,), (n,).
    """
    v = np.zeros(0)
    for _ in range(PASSES):
        total, inside, rows, squares = 0.0, [], np.zeros(len(v)), np.zeros(2)
        for x, y in pairs():
            d = y.astype(np.float64) - x
            if not v.any():
                v = _unit(d[np.vecdot(d, d).argmax()])
                rows = np.zeros(len(v))
            inside.append(d @ v)
            rows = rows + inside[-1] @ d
            total += float(np.vecdot(d, d).sum())
            squares += float(((x @ v) ** 2).sum()), float(((y @ v) ** 2).sum())
        u, share = np.concatenate(inside), float(sum(part @ part for part in inside)) / (total or 1.0)
        v, right = _unit(rows), Along(v, _ratio(*squares.tolist()))
    u = _unit(u)
    of_a, of_b, start = np.zeros(len(v)), np.zeros(len(v)), 0
    for x, y in pairs():
        part = u[start : start + len(x)]
        of_a, of_b, start = of_a + part @ x, of_b + part @ y, start + len(x)
    return share, Along(u, _ratio(float(of_a @ of_a), float(of_b @ of_b))), right


def _unit(vector: np.ndarray) -> np.ndarray:
    return vector / (float(np.linalg.norm(vector)) or 1.0)


def _ratio(before: float, after: float) -> float:
    """The ratio of two lengths, from their squares."""
    return sqrt(after / before) if before else 0.0


def one_direction(directions: Sequence[tuple[int, Along]]) -> tuple[dict[int, Along], float]:
    """The most changes, by number, that share a direction, each with its own, and their least cosine with the first."""
    best: dict[int, Along] = {}
    least = 0.0
    for _, seed in directions:
        near = {}
        for number, along in directions:
            if len(along.direction) == len(seed.direction):
                cosine = abs(float(seed.direction @ along.direction))
                if cosine >= PARALLEL:
                    near[number] = along, cosine
        if len(near) > len(best):
            best, least = {number: along for number, (along, _) in near.items()}, min(c for _, c in near.values())
    return (best, least) if len(best) > 1 else ({}, 0.0)


def changes_along_one_direction(members: Mapping[Member, Along], cosine: float, what: str) -> Finding:
    """Changes of rank one that share a direction, of `what` in words."""
    left = max(along.left for along in members.values())
    removed = left <= REMOVED
    done = f"as if one direction were removed; at most {left:.2g} of their size along it is left"
    if not removed:
        done = f"as if something were added along one direction; they are up to {left:.3g} times as large along it"
    text = f"{what} changed along one direction, the same in each (cosines from {cosine:.4f}): {done}."
    return Finding(
        kind="removed_direction" if removed else "shared_direction", measure="size_left_along_it", number=left,
        usual=1.0, text=text, members=tuple(members),
    )  # fmt: skip
