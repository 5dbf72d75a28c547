"""Changes of rank one: their direction, and whether they scale the matrix's own component.

Removing a direction v from a matrix A subtracts what A itself has along it: B - A = -s (A v) v', or
-s v (v'A) on the other side, with a strength s of 1 where nothing is left. An update of rank one,
as by a LoRA, has factors of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import NamedTuple

import numpy as np

from weightscope.core.errors import counted
from weightscope.pairs.deeds.thresholds import OWN, PARALLEL, WHOLLY
from weightscope.report.findings import Finding, Member, finding

PASSES = 3  # power iterations over the blocks; a matrix of rank one needs only the first

Pairs = Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]]


class Along(NamedTuple):
    """One side's direction of a change of nearly rank one, and both tensors along it."""

    direction: np.ndarray  # a unit vector
    before: float  # |A v|^2
    after: float  # |B v|^2
    both: float  # (A v)'(B v)

    @property
    def left(self) -> float:
        """|B v| / |A v|: 0 where the direction was removed."""
        return sqrt(self.after / self.before) if self.before else inf

    @property
    def strength(self) -> float:
        """s of the best B v = (1 - s) A v; NaN where A has nothing along it."""
        return 1 - self.both / self.before if self.before else np.nan

    @property
    def cosine(self) -> float:
        """Cosine of B v - A v and -A v: 1 where nothing but A's share along v is taken away."""
        moved = self.before + self.after - 2 * self.both
        if not (self.before and moved > 0):
            return 0.0
        return (self.before - self.both) / sqrt(self.before * moved)

    @property
    def is_removal(self) -> bool:
        """True if A's own component was subtracted, in part, wholly or more than once."""
        return self.cosine >= OWN


def first_directions(pairs: Pairs) -> tuple[float, Along, Along]:
    """The energy share of a change's first singular direction, its left and right vectors.

    pairs: blocks of rows of A and of B, (rows, n) each -> share, (m,), (n,).
    """
    v = np.zeros(0)
    for _ in range(PASSES):
        total, inside, rows, squares = 0.0, [], np.zeros(len(v)), np.zeros(3)
        for x, y in pairs():
            d = y.astype(np.float64) - x
            if not v.any():
                v = _unit(d[np.vecdot(d, d).argmax()])
                rows = np.zeros(len(v))
            inside.append(d @ v)
            rows = rows + inside[-1] @ d
            total += float(np.vecdot(d, d).sum())
            squares += _products(x @ v, y @ v)
        u = np.concatenate(inside)
        share = float(sum(part @ part for part in inside)) / (total or 1.0)
        v, right = _unit(rows), Along(v, *squares.tolist())
    u = _unit(u)
    of_a, of_b, start = np.zeros(len(v)), np.zeros(len(v)), 0
    for x, y in pairs():
        part = u[start : start + len(x)]
        of_a, of_b, start = of_a + part @ x, of_b + part @ y, start + len(x)
    return share, Along(u, *_products(of_a, of_b).tolist()), right


def _unit(vector: np.ndarray) -> np.ndarray:
    return vector / (float(np.linalg.norm(vector)) or 1.0)


def _products(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    return np.array([before @ before, after @ after, before @ after])


@dataclass(frozen=True)
class SharedDirection:
    """Changes along one direction, or removals along several, by number of tensor."""

    members: dict[int, Along]
    cosine: float  # the least of two directions that are called one
    groups: dict[int, int]  # number of each tensor's direction, from 1
    is_removal: bool = False

    @property
    def kind(self) -> str:
        """`direction removed in part`: the change in words; without `wholly`."""
        how = how_removed([along.strength for along in self.members.values()])
        if not self.is_removal:
            return "shared direction"
        return f"direction removed {how}".removesuffix(" wholly")

    @property
    def strengths(self) -> dict[int, float]:
        """The share of its component that each tensor lost, or its size now over that before."""
        return {
            i: along.strength if self.is_removal else along.left
            for i, along in self.members.items()
        }

    def label(self, member: int) -> str:
        """`removed 1`: what a tensor's direction is called."""
        return f"{'removed' if self.is_removal else 'shared'} {self.groups[member]}"

    @property
    def vectors(self) -> dict[str, np.ndarray]:
        """The mean direction of each group, a unit vector, by its label."""
        sums: dict[str, np.ndarray] = {}
        for member, along in self.members.items():
            so_far = sums.get(self.label(member), np.zeros(len(along.direction)))
            sign = -1 if so_far @ along.direction < 0 else 1
            sums[self.label(member)] = so_far + along.direction * sign
        return {label: _unit(vector) for label, vector in sums.items()}


def shared_directions(directions: Sequence[tuple[int, Along]]) -> Iterator[SharedDirection]:
    """Find directions that were removed from several tensors, or that their changes share.

    Removals of several directions are given together, since each shows by itself; other changes
    only along one.
    """
    # the side of each tensor that looks more like a removal
    best: dict[int, Along] = {}
    for number, along in directions:
        if along.is_removal and (number not in best or along.cosine > best[number].cosine):
            best[number] = along
    grouped, cosine = _grouped(list(best.items()))
    if len(best) > 1:
        members = {number: best[number] for group in grouped for number in group}
        groups = {number: place for place, group in enumerate(grouped, 1) for number in group}
        yield SharedDirection(members, cosine, groups, is_removal=True)
    taken = best if len(best) > 1 else {}
    shared, cosine = one_direction(
        [(number, along) for number, along in directions if number not in taken]
    )
    if shared:
        yield SharedDirection(shared, cosine, dict.fromkeys(shared, 1))


def _grouped(directions: Sequence[tuple[int, Along]]) -> tuple[list[dict[int, Along]], float]:
    """Changes by their direction, and the least cosine within a group."""
    groups: list[dict[int, Along]] = []
    least, left = 1.0, list(directions)
    while left:
        group, cosine = one_direction(left)
        if not group:
            return [*groups, *({number: along} for number, along in left)], least
        groups, least = [*groups, group], min(least, cosine)
        left = [(number, along) for number, along in left if number not in group]
    return groups, least


def one_direction(directions: Sequence[tuple[int, Along]]) -> tuple[dict[int, Along], float]:
    """The most changes that share a direction, by number, and their least cosine with the first."""
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
            best = {number: along for number, (along, _) in near.items()}
            least = min(cosine for _, cosine in near.values())
    return (best, least) if len(best) > 1 else ({}, 0.0)


def how_removed(strengths: Sequence[float]) -> str:
    """`wholly`, `in part`, `past zero` or `by reflection` if all are so; else `unevenly`."""
    ways = {_way(strength) for strength in strengths}
    return ways.pop() if len(ways) == 1 else "unevenly"


def _way(strength: float) -> str:
    """A name for a single strength; 2 turns the component round."""
    for exactly, words in ((1.0, "wholly"), (2.0, "by reflection")):
        if abs(strength - exactly) <= WHOLLY:
            return words
    return "in part" if strength < 1 else "past zero"


def described_strengths(strengths: Sequence[float]) -> str:
    """`strength 1.3`, or `strengths 0.2 to 1`."""
    ends = list(dict.fromkeys(f"{strength:.2g}" for strength in (min(strengths), max(strengths))))
    return f"strength{'s' * (len(ends) > 1)} {' to '.join(ends)}"


@finding(
    "shared_direction",
    "changes along one direction",
    severity="warning",
    rank=200,
    look_next="See which tokens lie along the direction: one edit was made in several places.",
)
def direction_finding(shared: SharedDirection, members: Sequence[Member], what: str) -> Finding:
    """The finding of one shared direction, `what` in words; `members` in the order of `shared`."""
    strengths = list(shared.strengths.values())
    if shared.is_removal:
        count = max(shared.groups.values())
        along = "one direction, the same in each" if count == 1 else counted(count, "direction")
        cosines = f" (cosines from {shared.cosine:.4f})" if count < len(members) else ""
        text = (
            f"What {what} had along {along}{cosines}, was removed {how_removed(strengths)}: "
            f"{described_strengths(strengths)}, where 1 leaves nothing and 2 reverses it."
        )
        farthest = max(strengths, key=lambda strength: abs(strength))
        return Finding(
            kind="removed_direction",
            measure="strength",
            number=farthest,
            usual=0.0,
            text=text,
            members=tuple(members),
        )
    left = max(strengths)
    text = (
        f"{what} changed along one direction, the same in each "
        f"(cosines from {shared.cosine:.4f}), as if something "
        f"were added along it; they are up to {left:.3g} times as large along it."
    )
    return Finding(
        kind="shared_direction",
        measure="size_left_along_it",
        number=left,
        usual=1.0,
        text=text,
        members=tuple(members),
    )
