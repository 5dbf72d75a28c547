"""How the tensors changed that no head's map is made of: biases, norms, sinks, embeddings, unembedding."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isfinite, log, prod, sqrt

import numpy as np

from weightscope.architectures.layer import NO_WEIGHTS
from weightscope.audit.others import NAMED, ROWS, needed_tensors, other_tensors, shown_by_heads, squares_of
from weightscope.changes.all_tensors import TensorChanges, unpaired
from weightscope.changes.pair import pair_up
from weightscope.changes.tensor import UNKNOWN_SIZE, Change, first_pass
from weightscope.changes.thresholds import RESCALED, UNMOVED
from weightscope.checkpoint import Tensor
from weightscope.checkpoint.gguf import GgufFile
from weightscope.errors import counted
from weightscope.findings import Finding, Member, listed
from weightscope.model import Model
from weightscope.tables import Column, Table
from weightscope.tensors.findings import LARGEST_RMS


@dataclass(frozen=True)
class OtherChanges(TensorChanges):
    """How these tensors changed, and the part of it that a limit applies to."""

    # |B - A| / |A| by name, of a bias relative to the larger of its norm and its weight's; without tensors that heads
    # show as well, such as biases of queries.
    limited: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def moved(self) -> list[Change]:
        """Those that a limit applies to and that changed by more than float32's rounding, or contain NaN."""
        return [change for change in self.changes if change.name in self.limited and not change.change <= UNMOVED]

    def moved_most(self, n: int) -> Table:
        """Those that changed most, for people."""
        order = sorted(self.moved, key=lambda change: -np.nan_to_num(change.change, nan=np.inf))
        rows = [(change.name, change.change) for change in order[:n]]
        return Table.of_rows((Column("tensor"), Column("change", symbol="$‖ΔW‖/‖W‖$")), rows)

    @property
    def headline(self) -> str:
        """How many changed, and which most, in a sentence; empty where none did."""
        if not self.moved:
            return ""
        most = max(self.moved, key=lambda change: inf if np.isnan(change.change) else change.change)
        how_far = "by an unknown amount" if np.isnan(most.change) else f"by {most.change:.3g}"
        return f"{len(self.moved)} of {counted(len(self.limited), 'other tensor')} changed, {most.name} {how_far}."


def other_changes(a: Model, b: Model) -> OtherChanges:
    """How these tensors of two models changed, each read once in blocks; of two families those of the same name."""
    of_a, of_b = other_tensors(a), other_tensors(b)
    embedding = [model.prefix + model.family.inputs.tokens for model in (a, b)]
    tied = [
        ROWS in tensors and tensors[ROWS].name == name for tensors, name in zip((of_a, of_b), embedding, strict=True)
    ]
    if all(tied):
        del of_a[ROWS], of_b[ROWS]
    pairs, _, _ = pair_up(of_a, of_b)
    changes = [*map(_with_kind, first_pass(a.checkpoint, b.checkpoint, pairs))]
    if a.family.name == b.family.name:
        in_a, in_b = (_in_layers(model) if _names_alike(a, b) else {} for model in (a, b))
        needed_a, needed_b = needed_tensors(a) | in_a, needed_tensors(b) | in_b
        if all(tied):
            needed_a.pop(ROWS, None), needed_b.pop(ROWS, None)
        lost, new = pair_up(needed_a, of_b | in_b).only_a, pair_up(of_a | in_a, needed_b).only_b
        changes += unpaired(lost, new)
    return OtherChanges(changes, limited_changes(a, changes))


def _names_alike(a: Model, b: Model) -> bool:
    """Whether both files name tensors in one way: a GGUF file has names of its own for feed-forward networks."""
    return len({isinstance(file, GgufFile) for model in (a, b) for file in model.checkpoint.files[:1]}) < 2


def _in_layers(model: Model) -> dict[str, Tensor]:
    """Everything that layers store, by name without the prefix; buffers, which files may leave out, are not."""
    stems = {model.stem(i) for i, kind in enumerate(model.config.layer_types) if kind != "none"}
    stored = {name: stem for stem in stems for name in model.checkpoint.names_under(stem)}
    names = {name: name.removeprefix(stem) for name, stem in stored.items()}
    kept = (name for name, inner in names.items() if not _is_buffer(inner, model.checkpoint[name].shape))
    return {name.removeprefix(model.prefix): model.checkpoint[name] for name in kept}


def _is_buffer(inner: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of a layer is no weight: rotary frequencies, or a causal mask that is called a bias."""
    return NO_WEIGHTS.fullmatch(inner) is not None or (len(shape) == 4 and shape[:2] == (1, 1))


def _with_kind(change: Change) -> Change:
    """The change with its kind as far as one reading shows it."""
    if change.kind in UNKNOWN_SIZE or not change.values_changed:
        return change
    if not isfinite(change.moved):
        return replace(change, kind="not finite")
    return replace(change, kind="rounded" if change.casts else "changed")


def limited_changes(a: Model, changes: Iterable[Change]) -> dict[str, float]:
    """|B - A| / |A| by name of the tensors that heads do not show; of a bias relative to its weight if that is larger.

    A bias of next to nothing may double without effect, and its weight says how large it would have to be.
    """
    changes, shown = list(changes), shown_by_heads(a)
    squares = {change.name: change.squares for change in changes}
    limited: dict[str, float] = {}
    for change in changes:
        if change.kind in UNKNOWN_SIZE or change.name in shown:
            continue
        far = change.change
        weight = change.name.removesuffix("bias") + "weight"
        if change.name.endswith(".bias") and change.moved > 0 and weight in a.checkpoint:
            of_weight = squares[weight] if weight in squares else squares_of(a.checkpoint[weight])
            if of_weight > change.squares:
                far = sqrt(change.moved / of_weight)
        limited[change.name] = float(np.maximum(far, limited.get(change.name, 0.0)))  # NaN stays NaN
    return limited


def _root_size(change: Change) -> float:
    """The root of how many values a tensor has afterwards: the norm of as many ones."""
    return sqrt(prod(change.shapes[1]))


def find_rescaled(changes: Iterable[Change], label: str) -> Iterator[Finding]:
    """Tensors of a checkpoint that became zero, or whose norm became a thousand times as large or as small."""
    zero: list[tuple[Change, float]] = []
    scaled: list[tuple[Change, float]] = []
    for change in changes:
        before, after = sqrt(change.squares), sqrt(change.squares_b)
        if change.kind in UNKNOWN_SIZE or not isfinite(before + after):
            continue
        if before > after == 0:
            zero.append((change, 0.0))
        elif not 1 / RESCALED <= after / before <= RESCALED if before else after > LARGEST_RMS * _root_size(change):
            scaled.append((change, after / before if before else inf))
    for kind, tensors, measure in (("zero_tensor", zero, "norm"), ("out_of_scale", scaled, "norm_ratio")):
        if not tensors:
            continue
        names = listed([change.name for change, _ in tensors], NAMED)
        change, ratio = max(tensors, key=lambda each: abs(log(each[1])) if each[1] else 0.0)
        text = f"{names} of {label}: zero throughout, and not before."
        if kind == "out_of_scale":
            text = f"{names} of {label}: the norm of {change.name} is {ratio:.3g} times that before."
        members = tuple(Member("tensor", None, name=change.name, number=ratio) for change, ratio in tensors)
        yield Finding(kind=kind, measure=measure, number=ratio, usual=1.0, text=text, members=members)
