"""How far the heads of a layer moved, and which head is which where the same heads stand in another order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from weightscope.attention.head import Head
from weightscope.attention.layer import Layer
from weightscope.audits.lora import qk_difference, rank_of, vo_difference
from weightscope.audits.measure import Arrays
from weightscope.audits.measures import MAPS
from weightscope.metrics.spaces import relative_change, relative_size, space_angles
from weightscope.parallel import in_threads, one_blas_thread
from weightscope.shapes import ShowsShapes
from weightscope.tables import Column

SAME = 1e-5  # a relative change up to here is float32's rounding: the head is the same
ALIKE = 0.99  # correlation of sketches from which on two heads are compared exactly; equal spaces give 1
SKETCHES = ("q_sketch", "k_sketch", "v_sketch", "o_sketch")
OF_THE_LAYER = {"kv_head", "caveats", "qk_column_share"}  # measured, and without an axis of heads
# How far each map moved, by all that it is: the matrix, under rotation also a distance on, and the bias.
MOVED = ("qk_change", "qk_change_delta1", "qk_bias_change", "vo_change", "vo_bias_change")


@dataclass(frozen=True, eq=False, repr=False)
class Stage(ShowsShapes):
    """A layer in one checkpoint.

    Attributes
    ----------
    layer : Layer
    measured : dict of arrays
        As `measure_layer` gives them.
    order : (H,) int array
        Which of its heads stands for each head of the first checkpoint.
    added : (Layer, Layer) or None
        A layer that this one is a LoRA of, and what it adds to that; see `added_to`.
    """

    layer: Layer
    measured: Arrays
    order: np.ndarray
    added: tuple[Layer, Layer] | None = None

    def in_order(self) -> dict[str, np.ndarray]:
        """What was measured, heads in the first checkpoint's order."""
        return {name: values if name in OF_THE_LAYER else values[self.order] for name, values in self.measured.items()}


def stage(layer: Layer, measured: Arrays, base: Layer | None = None, added: Layer | None = None) -> Stage:
    """A layer whose heads are where they were; `base` and what was `added` to it, where it is a LoRA."""
    pair = None if base is None or added is None else (base, added)
    return Stage(layer, measured, np.arange(layer.n_heads), pair)


def layer_changes(a: Stage, b: Stage) -> dict[str, np.ndarray]:
    """How far every head of a layer moved: (H,) arrays, qk_change, qk_left_angle ... vo_bias_change."""
    added = b.added[1] if b.added is not None and b.added[0] is a.layer else None

    def head_changes(pair: tuple[int, int]) -> dict[str, float]:
        one, other = a.layer.head(pair[0]), b.layer.head(pair[1])
        return _head_changes(one, other, added.head(pair[0]) if added is not None and pair[0] == pair[1] else None)

    heads = list(in_threads(head_changes, _pairs(a, b)))
    return {name: np.array([head[name] for head in heads]) for name in heads[0]}


def _pairs(a: Stage, b: Stage) -> Sequence[tuple[int, int]]:
    return list(zip(a.order.tolist(), b.order.tolist(), strict=True))


def _head_changes(a: Head, b: Head, added: Head | None) -> dict[str, float]:
    moves = _moves(a, b)
    ranks = {f"{name}_change_rank": float("nan") for name in MAPS}
    if added is not None:
        exact = {"qk": qk_difference(a, added), "vo": vo_difference(a, added)}
        for name, change in exact.items():
            moves[f"{name}_change"] = relative_size(change, getattr(a, name))
            ranks[f"{name}_change_rank"] = rank_of(change)
        turned = qk_difference(a, added, 1) if a.layer.rotation is not None else exact["qk"]
        moves["qk_change_delta1"] = relative_size(turned, a.qk_at(1))
    changes: dict[str, float] = {}
    for name in MAPS:
        angles = space_angles(getattr(a, name), getattr(b, name))
        changes[f"{name}_change"] = moves.pop(f"{name}_change")
        changes |= {f"{name}_{angle}": value for angle, value in angles.items()}
    return changes | moves | ranks


def _moves(a: Head, b: Head) -> dict[str, float]:
    """The relative changes of a head, by the names in `MOVED`."""
    with np.errstate(invalid="ignore", over="ignore"):
        moves = {f"{name}_change": relative_change(getattr(a, name), getattr(b, name)) for name in MAPS}
        turns = a.layer.rotation is not None or b.layer.rotation is not None
        moves["qk_change_delta1"] = relative_change(a.qk_at(1), b.qk_at(1)) if turns else moves["qk_change"]
        for name in (f"{name}_bias" for name in MAPS):
            moves[f"{name}_change"] = _vector_change(getattr(a, name), getattr(b, name))
    return moves


def _vector_change(a: np.ndarray, b: np.ndarray) -> float:
    """|b - a| / |a| of two vectors; infinite where a is zero and b is not, 0 where both are."""
    before, moved = (float(np.linalg.norm(x)) for x in (a.astype(np.float64), b.astype(np.float64) - a))
    if before == 0:
        return float("inf") if moved > 0 else moved
    return moved / before


def unmoved(changes: Arrays) -> np.ndarray:
    """Which heads are the same but for rounding, whatever of them is looked at; what is unknown is not."""
    return np.all([changes[name] <= SAME for name in MOVED if name in changes], axis=0)


def followed(first: Stage, previous: Stage, current: Stage) -> tuple[Stage, Arrays, Arrays]:
    """The current stage with its heads in the order of the first's, and how far each moved.

    Heads are looked for in the first checkpoint and in the previous one; the order in which more of them are the same
    counts.

    Returns
    -------
    Stage
    changes, changes : dicts of (H,) arrays
        From the first and from the previous checkpoint.
    """
    since_first = layer_changes(first, current)
    since_previous = since_first if previous is first else layer_changes(previous, current)
    with one_blas_thread():
        ordered, found = _matched(first, current, since_first)
        if previous is not first:
            other, found_there = _matched(previous, current, since_previous)
            ordered = other if found_there > found else ordered
    if np.array_equal(ordered.order, current.order):
        return current, since_first, since_previous
    since_first = layer_changes(first, ordered)
    return ordered, since_first, since_first if previous is first else layer_changes(previous, ordered)


def _matched(a: Stage, b: Stage, changes: Arrays) -> tuple[Stage, int]:
    """`b` in the order in which its heads are those of `a`, and how many of them are the same."""
    same = unmoved(changes)
    left = np.flatnonzero(~same).tolist()  # places whose head is not found yet
    order, free = b.order.copy(), list(left)
    for h, candidates in zip(left, _alike(a, b, left), strict=True):
        one = a.layer.head(int(a.order[h]))
        for other in candidates:
            if other in free and _same(one, b.layer.head(int(b.order[other]))):
                order[h] = b.order[other]
                same[h] = True
                free.remove(other)
                break
    for h in np.flatnonzero(~same).tolist():  # moved: each keeps its place where that is free
        other = free.pop(free.index(h) if h in free else 0)
        order[h] = b.order[other]
    return replace(b, order=order), int(same.sum())


def _alike(a: Stage, b: Stage, left: Sequence[int]) -> list[list[int]]:
    """For each head that is left, the others among them whose sketches are alike; a space without one is like any."""
    alike = ~np.eye(len(left), dtype=bool)
    for name in SKETCHES:
        x, y = a.measured[name][a.order[left]], b.measured[name][b.order[left]]
        unknown = np.isnan(x).any(axis=1)[:, None] & np.isnan(y).any(axis=1)
        alike &= (x @ y.T >= ALIKE) | unknown
    return [[left[k] for k in np.flatnonzero(row).tolist()] for row in alike]


def _same(a: Head, b: Head) -> bool:
    return all(change <= SAME for change in _moves(a, b).values())


def change_column(name: str, values: np.ndarray, since: str = "") -> Column:
    """A column of changes or of angles, by its name: qk_change, vo_left_angle_mean; `since` ends the name."""
    map_name, what, *more = name.split("_")
    w = MAPS[map_name]
    if "rank" in more:
        meaning = "Of the change that a LoRA is, from its factors; empty where it is not known by factors."
        return Column(name + since, values, f"rank Δ{w}", meaning=meaning, format=".0f")
    if "change" in name:
        vector = what == "bias"
        subject = f"b_{map_name.upper()}" if vector else f"{w}(1)" if more else w
        norm = "Euclidean" if vector else "Frobenius"
        where = " At distance 1, where queries are rotated against keys." if more and not vector else ""
        meaning = f"{norm} norm of the change, over that before it.{where}"
        return Column(name + since, values, f"‖Δ{subject}‖/‖{subject}‖", meaning=meaning)
    symbol = f"{'mean' if 'mean' in more else 'largest'} {what} angle of {w}"
    return Column(name + since, values, symbol, "rad", f"Between the {what} spaces of {w} before and after.")
