"""Tensors of B that are A's from another layer, role or expert, or from another step's shard."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import compress

import numpy as np

from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.checkpoint.formats import SAFETENSORS
from weightscope.checkpoint.storage import LocalFile
from weightscope.core.errors import CheckpointError
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

deed(What.ANOTHER_TENSOR, "{way}")
deed(What.SHARD, "a shard of another step")
deed(What.NOT_INDEXED, "in a file that is not read")


def find_elsewhere(judged: Sequence[Judged], parts: Sequence[Compared]) -> list[Judged]:
    """Verdicts, with the origin of each tensor that differs but is another one of A's."""
    lost = [i for i, each in enumerate(judged) if each.is_unexplained]
    by_shape: dict[tuple[int, ...], list[Compared]] = defaultdict(list)
    wanted = {parts[i].tensors.b.shape for i in lost}
    for each in parts:
        if each.tensors.a.shape in wanted:
            by_shape[each.tensors.a.shape].append(each)
    firsts = {
        id(each): first_rows(each.tensors.a, ROWS).astype(np.float32)
        for group in by_shape.values()
        for each in group
    }
    result = list(judged)
    for i in lost:
        here = parts[i]
        rows = first_rows(here.tensors.b, ROWS).astype(np.float32)
        tolerance = tolerance_of(here.tensors)
        if not rows.any() or np.ptp(rows) == 0:  # constants are alike everywhere
            continue
        near = [
            each
            for each in by_shape[here.tensors.b.shape]
            if each is not here and error_of(firsts[id(each)], rows) <= max(tolerance, EXACT)
        ]
        if len({each.label for each in near}) != 1:
            continue
        if not whole_view(Pair(near[0].tensors.a, here.tensors.b)).changed.any():
            result[i] = replace(result[i], done=_named(here, near[0]))
    return result


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
    for layer in {each.layer for each in judged if each.what is What.EXPERTS}:
        mine = [i for i, each in enumerate(judged) if each.layer == layer]
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
