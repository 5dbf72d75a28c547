"""How a checkpoint differs from another, in words: kinds of change, each with its layers and evidence."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from weightscope.changes.tensors import TensorChange, TensorChanges
from weightscope.errors import counted
from weightscope.findings import spans
from weightscope.lineage.structure import Kind
from weightscope.lineage.surgery import LayerPair, Surgery

MOSTLY = 0.5  # share of matrices that hold coarser values before a checkpoint is called cast
SOME = 0.25  # share on a grid before it is called quantised: fused or small matrices are often left out
EXPLAINED = 2.0  # times the rounding error: maps of two rounded factors stay below it
IN_ANOTHER_BASIS = 5.0  # the same if the basis of heads changed: rounding weighs more along weak directions
LEAST = 1e-4  # |S - B| / |B| that is called training
OF_A_ROTATION = 1e-3  # the same if the stream's rotation had to be found first
ROUNDED = "A to "  # how a change says that the base, rounded to a dtype, gives the suspect
BASE_QUANTISED = "quantised: the base"
RESIZED = {"heads grouped", "heads grouped: the base", "width cut", "width extended"}  # what changes every head anyway


def weight_kinds(surgery: Surgery, structure: set[str]) -> list[Kind]:
    """Kinds that weights show; `structure` names those that the match of layers already shows."""
    pairs = surgery.layers
    if not structure and _untouched(surgery):
        return [_same_values(surgery)]
    return [
        *_basis(surgery),
        *_where(pairs, "norms folded", lambda pair: pair.folded, _folded),
        *_where(pairs, "norms folded: the base", lambda pair: pair.base_folded, _folded),
        *_where(pairs, "gauge: basis of heads changed", lambda pair: pair.gauge, _gauge),
        *_where(pairs, "experts copied from one network", lambda pair: pair.copies > 1, _experts),
        *_where(pairs, "experts copied from one network: the base", lambda pair: pair.base_copies > 1, _base_experts),
        *_where(pairs, "neurons permuted", lambda pair: pair.neurons, _neurons),
        *_casts(surgery),
        *_grids(pairs),
        *_training(surgery, structure),
    ]


def _untouched(surgery: Surgery) -> bool:
    """Whether every tensor that both have equals the base's."""
    same = all(change.kind == "identical" for _, change in _all_changes(surgery))
    moved = any(
        pair.drift or pair.folded or pair.base_folded or pair.gauge or max(pair.copies, pair.base_copies) > 1
        for pair in surgery.layers
    )
    return surgery.basis.same and same and not moved


def _same_values(surgery: Surgery) -> Kind:
    changes, pairs = _all_changes(surgery), surgery.layers
    n, other = len(changes), Counter(change.dtypes for _, change in changes if change.dtypes[0] != change.dtypes[1])
    unpaired = len(surgery.lost) + len(surgery.gained) + sum(pair.unpaired for pair in pairs)
    more = f"; {unpaired} more are in only one of the two checkpoints" if unpaired else ""
    text = f"Every value of {counted(n, 'tensor')} equals the base's{more}"
    if other:
        (before, after), times = other.most_common(1)[0]
        text += f"; {other.total()} are stored in another format, {times} in {after} instead of {before}"
    name = "same values in another format" if other else "same bytes"
    return Kind(name, [pair.layer for pair in pairs], f"{text}.", n / (n + unpaired))


def _all_changes(surgery: Surgery) -> list[tuple[int | None, TensorChange]]:
    """Every compared tensor with the suspect's layer, or None outside layers."""
    inside = [(pair.layer, change) for pair in surgery.layers for change in pair.tensors]
    return [*inside, *((None, change) for change in surgery.outside)]


def _where(
    pairs: Sequence[LayerPair],
    name: str,
    shown: Callable[[LayerPair], bool],
    text: Callable[[Sequence[LayerPair]], str],
) -> Iterator[Kind]:
    """A kind, if some layers show it."""
    showing = [pair for pair in pairs if shown(pair)]
    if showing:
        yield Kind(name, [pair.layer for pair in showing], text(showing), len(showing) / len(pairs))


def _folded(those: Sequence[LayerPair]) -> str:
    return f"In {counted(len(those), 'layer')}, the norm's gain is constant and folded into the weights after it."


def _gauge(those: Sequence[LayerPair]) -> str:
    factors, maps = (float(np.median([getattr(pair, name) for pair in those])) for name in ("of_factors", "drift"))
    return f"The factors of heads changed by {factors:.2g} of their norm, their products by {maps:.2g}."


def _experts(those: Sequence[LayerPair]) -> str:
    return f"At least {min(pair.copies for pair in those)} experts per layer copy the base's feed-forward network."


def _base_experts(those: Sequence[LayerPair]) -> str:
    return (
        f"At least {min(pair.base_copies for pair in those)} experts of a layer of the base copy the suspect's network."
    )


def _neurons(those: Sequence[LayerPair]) -> str:
    return "Feed-forward matrices have the base's rows in another order."


def _basis(surgery: Surgery) -> Iterator[Kind]:
    """The stream in another basis, if that basis could be found."""
    basis, pairs = surgery.basis, surgery.layers
    if basis.rotation is not None:
        how = "a permutation" if basis.permuted else "a rotation"
        drift = float(np.median([pair.drift for pair in pairs]))
        text = f"After {how} of the stream, found from the embeddings, heads differ by {drift:.2g} of their norm."
        yield Kind(f"stream {'permuted' if basis.permuted else 'rotated'}", [pair.layer for pair in pairs], text)


def _casts(surgery: Surgery) -> Iterator[Kind]:
    """Values that a coarser float holds exactly."""
    changes = [change for _, change in _all_changes(surgery)]
    rounded = [
        change
        for change in changes
        if change.kind == "rounded" and change.detail.startswith(ROUNDED) and change.is_matrix
    ]
    casts = sum((pair.values.casts for pair in surgery.layers), Counter[str]())
    matrices = sum(pair.values.matrices for pair in surgery.layers)
    if (rounded or casts.total() > MOSTLY * matrices) and not _is_quantised(surgery.layers, "base_grids"):
        names = Counter(change.detail.removeprefix(ROUNDED) for change in rounded) or casts
        dtype = names.most_common(1)[0][0]
        count, total = (len(rounded), len(changes)) if rounded else (casts.total(), matrices)
        text = f"{count} of {total} tensors hold only {dtype} values; the base's do not."
        yield Kind(f"cast to {dtype}", [pair.layer for pair in surgery.layers], text, count / max(1, total))


def _grids(pairs: Sequence[LayerPair]) -> Iterator[Kind]:
    """Values on a quantisation grid, the suspect's or the base's."""
    for side, whose, named in (("grids", "", "quantised ({})"), ("base_grids", " of the base", BASE_QUANTISED)):
        if _is_quantised(pairs, side):
            found = [pair for pair in pairs if getattr(pair.values, side)]
            grids = sum((getattr(pair.values, side) for pair in found), Counter[str]())
            matrices = sum(pair.values.matrices for pair in pairs)
            grid, count = grids.most_common(1)[0]
            error = float(np.median([pair.values.grid_error for pair in found]))
            where = (
                f"{grids.total()} of {matrices} attention matrices{whose} lie on a grid, {count} on this one ({grid})"
            )
            text = f"{where}; its rounding error is {error:.2g} of their norm."
            yield Kind(named.format(grid), [pair.layer for pair in found], text, grids.total() / matrices)


def _is_quantised(pairs: Sequence[LayerPair], side: str) -> bool:
    on_grid = sum(getattr(pair.values, side).total() for pair in pairs)
    return on_grid > SOME * sum(pair.values.matrices for pair in pairs)


def _training(surgery: Surgery, structure: set[str]) -> Iterator[Kind]:
    """Low-rank updates, and training that moved weights in other ways."""
    pairs, changes = surgery.layers, _all_changes(surgery)
    outside = [(i, change) for i, change in changes if change.name_a not in surgery.attention]
    low = [(i, change) for i, change in outside if change.kind in ("low rank", "one direction")]
    ranks = [change.rank for _, change in low if change.rank] + [rank for pair in pairs for rank in pair.ranks]
    where = sorted({i for i, _ in low if i is not None} | {pair.layer for pair in pairs if pair.ranks})
    if ranks:
        text = f"{counted(len(ranks), 'matrix change')} of rank {spans(ranks)}."
        yield Kind("low-rank update", where, text, len(where) / max(1, len(pairs)))
    for finding in TensorChanges([change for _, change in changes]).along_one_direction:
        name = "direction removed" if finding.kind == "removed_direction" else "shared direction"
        named = {member.name for member in finding.members}
        along = sorted({i for i, change in changes if i is not None and change.name in named})
        yield Kind(f"{name} (low-rank update)", along, finding.text, len(along) / max(1, len(pairs)))
    floor = LEAST if surgery.basis.same else OF_A_ROTATION
    moved = {pair.layer for pair in pairs if not pair.only_ranks and not structure & RESIZED and _is_moved(pair, floor)}
    accounted = {
        pair.layer for pair in pairs if pair.gauge or pair.folded or pair.base_folded or pair.neurons or pair.only_ranks
    }
    rest: list[tuple[int | None, TensorChange]] = []
    if not any(_is_quantised(pairs, side) for side in ("grids", "base_grids")):
        rounding = max((pair.values.rounding for pair in pairs), default=0.0)
        rest = [(i, change) for i, change in outside if change.kind == "changed"
                  and change.change > max(floor, rounding) and i not in accounted]  # fmt: skip
        moved |= {i for i, _ in rest if i is not None}
    if moved:
        text = " ".join(_how_far([pair.drift for pair in pairs if pair.layer in moved and pair.drift > floor], rest))
        yield Kind("fine-tuned", sorted(moved), text, len(moved) / len(pairs))


def _how_far(drifts: Sequence[float], rest: Sequence[tuple[int | None, TensorChange]]) -> Iterator[str]:
    """How far apart heads are, and other tensors, in a sentence each."""
    if drifts:
        middle = f"{np.median(drifts):.2g} in the median layer"
        yield f"Heads differ by {min(drifts):.2g} to {max(drifts):.2g} of their norm, {middle}."
    if rest:
        sizes = [change.change for _, change in rest]
        where = "in layers" if all(i is not None for i, _ in rest) else "in layers and outside them"
        far = f"{min(sizes):.2g} to {max(sizes):.2g}" if len(sizes) > 1 else f"{sizes[0]:.2g}"
        yield f"{counted(len(rest), 'other tensor')} {where} differ by {far} of their norm."


def _is_moved(pair: LayerPair, floor: float) -> bool:
    """Whether a layer's heads moved further than rounding explains."""
    times = IN_ANOTHER_BASIS if pair.gauge else EXPLAINED
    return pair.drift > max(floor, times * pair.values.rounding)
