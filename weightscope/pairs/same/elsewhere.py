"""Tensors of B that are A's from another layer, role or expert, or from another step's shard."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import compress

import numpy as np

from weightscope.checkpoint.checkpoint import Checkpoint, Tensor
from weightscope.checkpoint.formats import SAFETENSORS
from weightscope.checkpoint.storage import LocalFile
from weightscope.core.errors import CheckpointError
from weightscope.model.metrics.spectra import evenly_spread
from weightscope.model.model import Model, TensorsOnly
from weightscope.pairs.deeds.deed import Deed, Proof, What, deed
from weightscope.pairs.deeds.orders import places_of
from weightscope.pairs.deeds.pair import Pair, first_rows, whole
from weightscope.pairs.deeds.thresholds import EXACT
from weightscope.pairs.deeds.views import error_of, explained, tolerance_of, whole_view
from weightscope.pairs.same import DIFFERENT, SAME_FUNCTION
from weightscope.pairs.same.judge import Compared, Judged
from weightscope.pairs.same.mixture import is_free

MOST_UNREAD = 200  # files next to the ones that are read
ROWS = 4  # first rows that identify a tensor
VALUES = 256  # values in these rows, which rule out most tensors
AT_ONCE = 256  # tensors that are compared with all others at a time
SLACK = 1e-6  # share of squares that rounding may take

deed(What.ANOTHER_TENSOR, "{way}")
deed(What.SHARD, "a shard of another step")
deed(What.NOT_INDEXED, "in a file that is not read")


def find_elsewhere(judged: Sequence[Judged], parts: Sequence[Compared]) -> list[Judged]:
    """Verdicts, with the origin of each tensor that differs but is another one of A's."""
    lost: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, each in enumerate(judged):
        if each.is_unexplained:
            lost[parts[i].tensors.b.shape].append(i)
    by_shape: dict[tuple[int, ...], list[Compared]] = defaultdict(list)
    for part in parts:
        if part.tensors.a.shape in lost:
            by_shape[part.tensors.a.shape].append(part)
    result = list(judged)
    for shape, group in by_shape.items():
        for i, near in _candidates([(i, parts[i]) for i in lost[shape]], group):
            origin = _only_origin(parts[i], near)
            if origin is None:
                continue
            if not whole_view(Pair(origin.tensors.a, parts[i].tensors.b)).changed.any():
                result[i] = replace(result[i], done=_named(parts[i], origin))
    return result


def _first(tensor: Tensor) -> np.ndarray:
    return first_rows(tensor, ROWS).astype(np.float32)


def _few(first: np.ndarray) -> np.ndarray:
    values = first.reshape(-1)
    return values[evenly_spread(len(values), VALUES)].astype(np.float64)


def _tolerance(here: Compared) -> float:
    return max(tolerance_of(here.tensors), EXACT)


@np.errstate(all="ignore")
def _candidates(
    lost: Sequence[tuple[int, Compared]], group: Sequence[Compared]
) -> Iterator[tuple[int, Iterator[Compared]]]:
    """Each lost tensor of B with the tensors of A that a few values do not rule out."""
    theirs = np.array([_few(_first(each.tensors.a)) for each in group])  # (m, VALUES)
    squares = np.vecdot(theirs, theirs)
    for start in range(0, len(lost), AT_ONCE):
        some = lost[start : start + AT_ONCE]
        firsts = [_first(here.tensors.b) for _, here in some]
        ours, sizes = np.array(list(map(_few, firsts))), np.array(list(map(np.linalg.norm, firsts)))
        tolerances = np.array([_tolerance(here) for _, here in some])
        both = np.vecdot(ours, ours)[:, None] + squares
        apart = both - 2 * ours @ theirs.T
        near = apart <= SLACK * both + (1 + SLACK) * ((tolerances * sizes) ** 2)[:, None]
        for (i, _), is_near in zip(some, near, strict=True):
            yield i, compress(group, is_near)


def _only_origin(here: Compared, near: Iterable[Compared]) -> Compared | None:
    """The only tensor of A with the first rows of B's; None if there are several."""
    rows = _first(here.tensors.b)
    if not rows.any() or np.ptp(rows) == 0:  # constants are alike everywhere
        return None
    tolerance, origin = _tolerance(here), None
    for each in near:
        if each is here or error_of(_first(each.tensors.a), rows) > tolerance:
            continue
        if origin is not None and each.label != origin.label:
            return None
        origin = origin or each
    return origin


def _named(here: Compared, origin: Compared) -> Deed:
    """The other place that a tensor comes from."""
    done = Deed(What.ANOTHER_TENSOR, detail=f"A's {origin.label}", proof=Proof.VALUES)
    if here.a.layer != origin.a.layer:
        layer = origin.a.layer
        way = "another tensor" if layer is None else f"a tensor of another layer: layer {layer}"
        return replace(done, way=way, place=layer)
    if here.a.expert != origin.a.expert:
        number = origin.a.expert
        return replace(done, what=What.EXPERTS, way=f": expert {number}", place=number)
    pair = {here.a.role.rpartition(".")[2], origin.a.role.rpartition(".")[2]}
    if pair == {"gate", "up"}:
        return replace(done, what=What.FUSED, way="gate and up exchanged")
    return replace(done, way=f"another role's tensor: {origin.a.role}")


def name_shards(judged: Sequence[Judged], parts: Sequence[Compared]) -> list[Judged]:
    """Verdicts, with a shard as the deed where most tensors of one file, and no others, differ."""
    files = {
        "B": [each.tensors.b.file.path.name for each in parts],
        "A": [each.tensors.a.file.path.name for each in parts],
    }
    changed = [each.is_unexplained for each in judged]
    for letter, names in files.items():
        total, touched = Counter(names), Counter(compress(names, changed))
        if len(total) < 2 or len(touched) != 1:
            continue
        ((file, count),) = touched.items()
        if count >= 0.8 * total[file] and count > 1:
            words = f"{letter}'s {file} is of another step or model"
            shards = [Deed(What.SHARD, detail=f"{words}; {each.detail}") for each in judged]
            return [
                replace(each, done=shard) if is_changed else each
                for each, shard, is_changed in zip(judged, shards, changed, strict=True)
            ]
    return list(judged)


def name_unread(judged: Sequence[Judged], a: Checkpoint, b: Checkpoint) -> list[Judged]:
    """Verdicts, with a note on lacking tensors that are in a file that no index names."""
    result = list(judged)
    for letter, checkpoint in (("A", a), ("B", b)):
        lost = {
            each.name: i
            for i, each in enumerate(judged)
            if each.verdict == DIFFERENT and not (each.name_a if letter == "A" else each.name_b)
        }
        for file in _beside(checkpoint) if lost else ():
            words = f"{letter} has it in {file.path.name}, which its index does not name"
            for i in (lost[name] for name in file.tensors if name in lost):
                result[i] = replace(result[i], done=Deed(What.NOT_INDEXED, detail=words))
    return result


def _beside(checkpoint: Checkpoint) -> Iterator[LocalFile]:
    """The safetensors files of a folder that are not read, as far as they are whole."""
    for name in checkpoint.weight_files.unread[:MOST_UNREAD]:
        if name.endswith(SAFETENSORS):
            with suppress(CheckpointError):  # not on this machine, or damaged
                yield LocalFile(checkpoint.folder / name)


def reordered_experts(
    a: Model | TensorsOnly, judged: Sequence[Judged], parts: Sequence[Compared]
) -> list[Judged]:
    """Verdicts, where experts and the router's rows in one order compute the same function."""
    result = list(judged)
    by_layer: dict[int | None, list[int]] = defaultdict(list)
    for i, each in enumerate(judged):
        by_layer[each.layer].append(i)
    for layer in {each.layer for each in judged if each.what is What.EXPERTS}:
        mine = by_layer[layer]
        places = next((_places(parts[i]) for i in mine if judged[i].role == "router"), None)
        moved = [i for i in mine if judged[i].role.startswith(("router", "expert."))]
        if places is None or not is_free(a, places):
            continue
        if not all(_is_moved(judged[i], parts[i], places) for i in moved):
            continue
        for i in moved:
            if judged[i].verdict == DIFFERENT:
                done = Deed(What.EXPERTS, ", as the router's rows", judged[i].detail)
                result[i] = replace(judged[i], verdict=SAME_FUNCTION, done=done)
    return result


def _places(router: Compared) -> np.ndarray | None:
    """The expert of A that each expert of B is, by the router's rows; None without a match."""
    return places_of(*_arrays(router), 1, tolerance_of(router.tensors))


def _arrays(parts: Compared) -> tuple[np.ndarray, np.ndarray]:
    """Both tensors, with a row for each place of the first axis."""
    x, y = (
        whole(tensor).reshape(tensor.shape[0], -1) for tensor in (parts.tensors.a, parts.tensors.b)
    )
    return x, y


def _is_moved(judged: Judged, parts: Compared, places: np.ndarray) -> bool:
    """True if what belongs to experts is where the router's rows are."""
    if judged.expert is not None:
        before = places[judged.expert] if judged.expert < len(places) else -1
        if before == judged.expert:
            return judged.verdict != DIFFERENT
        return judged.what is What.EXPERTS and judged.done.place == before
    if {parts.tensors.a.shape[0], parts.tensors.b.shape[0]} != {len(places)}:
        return False
    view = whole_view(parts.tensors)
    block = np.arange(len(view.changed) // len(places))
    order = (places[:, None] * len(block) + block).reshape(-1)
    return bool(explained(view.x.at(order), view.y).all())
