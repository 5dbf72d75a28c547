"""Changes of all tensors of two checkpoints, by kind and place, and of those outside heads."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isfinite, log, prod, sqrt
from typing import NamedTuple

import numpy as np

from weightscope.checkpoint.checkpoint import Tensor
from weightscope.core.errors import counted
from weightscope.core.files import Files
from weightscope.core.tables import Column, Table, column
from weightscope.heads.tensors.findings import (
    LARGEST_RMS,
    ROWS,
    described,
    needed_tensors,
    other_tensors,
    shown_by_heads,
    squares_of,
)
from weightscope.heads.tensors.measure import role_of, shown_shape
from weightscope.model.layers.read_layer import NO_WEIGHTS
from weightscope.model.model import Model, TensorsOnly
from weightscope.pairs.changes.counterparts import Counterparts, counterparts
from weightscope.pairs.deeds.blocks import plain_deed
from weightscope.pairs.deeds.catalogue import compare_pairs, deed_by_views
from weightscope.pairs.deeds.change import (
    SAME_SO_FAR,
    UNKNOWN_SIZE,
    Change,
    first_pass,
    unchanged,
    with_shown_casts,
)
from weightscope.pairs.deeds.deed import WORDS, Deed, What, called
from weightscope.pairs.deeds.directions import (
    SharedDirection,
    direction_finding,
    shared_directions,
)
from weightscope.pairs.deeds.pair import Pair, pair_up
from weightscope.pairs.deeds.thresholds import RESCALED, UNMOVED
from weightscope.report.findings import Finding, Member, indexed, listed, spans

NAMED = 4  # tensors in a sentence
ONLY_IN_ONE = {What.MISSING, What.NEW}
# kinds whose most usual detail is named, however many there are
ONE_DETAIL = {What.ROUNDED, What.QUANTISED, What.QUANTISED_IN_PART}
WORDS_OF_KINDS = [what for what in What if what in WORDS and what is not What.UNRELATED]


@dataclass(frozen=True)
class TensorChanges:
    """All tensors of two checkpoints, and how each changed."""

    # in the order of the first checkpoint, then those that only the last has
    changes: Sequence[Change]

    @cached_property
    def kinds(self) -> Counter[What]:
        """The number of tensors that changed in each way."""
        return Counter(change.kind for change in self.changes)

    @cached_property
    def shared(self) -> list[SharedDirection]:
        """Directions removed from several tensors, or shared by the changes of several."""
        along = [(i, along) for i, change in enumerate(self.changes) for along in change.along]
        return list(shared_directions(along))

    @property
    def lead(self) -> str:
        """A sentence or two on how many tensors changed, in what way and where."""
        same, total = self.kinds[What.IDENTICAL], len(self.changes)
        if same == total:
            return f"Every tensor is identical, {counted(total, 'tensor')} in all.{self._by_name()}"
        words_in_order = [*map(called, WORDS_OF_KINDS), SAME_SO_FAR, called(What.UNRELATED)]
        by_words: dict[str, list[Change]] = {words: [] for words in words_in_order}
        for change in self.changes:
            by_words.setdefault(change.called, []).append(change)
        parts = [
            f"{len(changes)} {words}{_in_common(changes)}"
            for words, changes in by_words.items()
            if changes
        ]
        return f"Of {counted(total, 'tensor')}: {', '.join(parts)}.{self._where()}{self._by_name()}"

    def _by_name(self) -> str:
        """A sentence on how many were paired by name alone."""
        count = sum(change.paired_by == "name" for change in self.changes)
        return f" {count} of them, which no row names, were paired by name." if count else ""

    def _where(self) -> str:
        """The layers that changed, as a sentence."""
        layers: dict[int, bool] = {}
        outside = 0
        for change in self.changes:
            numbers, changed = role_of(change.name)[1], change.kind is not What.IDENTICAL
            if numbers:
                layers[numbers[0]] = layers.get(numbers[0], False) or changed
            else:
                outside += changed
        moved = [layer for layer, changed in layers.items() if changed]
        parts = [f"{counted(outside, 'tensor')} outside the layers"] if outside and layers else []
        if moved and len(moved) < len(layers):
            parts.insert(0, f"{len(moved)} of {counted(len(layers), 'layer')}, {spans(moved)}")
        elif moved:
            parts.insert(0, "every layer")
        return f" They changed in {' and in '.join(parts)}." if parts else ""

    @cached_property
    def table(self) -> Table:
        """One row per tensor; its csv() is tensors.csv."""
        rows = [
            ChangeRow(
                tensor=c.name,
                role=c.role or role_of(c.name)[0],
                kind=c.kind.value,
                detail=c.detail,
                change=c.change,
                largest=c.largest,
                values_changed=c.values_changed,
                rows_changed=c.rows_changed,
                rank=np.nan if c.rank is None else float(c.rank),
                dtype_a=c.dtypes[0],
                dtype_b=c.dtypes[1],
                shape_a=shown_shape(c.shapes[0]),
                shape_b=shown_shape(c.shapes[1]),
                tensor_b=c.name_b,
                paired_by=c.paired_by,
            )
            for c in self.changes
        ]
        return Table.of(ChangeRow, rows)

    def moved_most(self, n: int, identical: int = 0) -> Table:
        """The tensors that changed most, then some that are identical, for people."""
        order = sorted(
            range(len(self.changes)),
            key=lambda i: -np.nan_to_num(self.changes[i].change, nan=np.inf),
        )
        shown = [i for i in order if self.changes[i].kind is not What.IDENTICAL][:n]
        shown += [i for i in order if self.changes[i].kind is What.IDENTICAL][:identical]
        table = self.table.select("tensor", "kind", "detail", "change", "rank").take(shown)
        names = [self.changes[i].shown_name for i in shown]
        kinds = [self.changes[i].shown_kind for i in shown]
        columns = [Column("tensor", names), Column("kind", kinds), *table.columns[2:]]
        filled = [column for column in columns if any(map(column.shown, column.values))]
        return Table(filled, "All are in tensors.csv.")

    @property
    def along_directions(self) -> Iterator[Finding]:
        """Shared directions as findings; each tensor has its strength."""
        for shared in self.shared:
            changes = [self.changes[i] for i in shared.members]
            members = [
                Member(
                    "tensor", None, layer=layer_of(change), name=change.shown_name, number=strength
                )
                for change, strength in zip(changes, shared.strengths.values(), strict=True)
            ]
            yield direction_finding(shared, members, in_places(changes))

    @cached_property
    def directions(self) -> Table | None:
        """One row per tensor changed along a shared direction; None without one."""
        rows = [
            AlongRow(
                direction=shared.label(i),
                tensor=self.changes[i].shown_name,
                layer=layer_of(self.changes[i]),
                strength=along.strength,
                left=along.left,
                cosine=along.cosine,
            )
            for shared in self.shared
            for i, along in shared.members.items()
        ]
        return Table.of(AlongRow, rows) if rows else None

    @property
    def direction_vectors(self) -> dict[str, np.ndarray] | None:
        """The unit vector of every direction by its label in `directions`; None without one."""
        return {
            label: vector for shared in self.shared for label, vector in shared.vectors.items()
        } or None

    def write(self, files: Files) -> None:
        """Write tensors.csv."""
        files.table("tensors.csv", self.table)


def layer_of(change: Change) -> int | None:
    """The first number in the tensor's name in B, or in A where B lacks the tensor."""
    return next(iter(role_of(change.name_b or change.name_a)[1]), None)


def in_places(changes: Sequence[Change]) -> str:
    """`h.*.attn.c_proj.weight in layers 1-4`: tensors by their names without numbers."""
    layers: dict[str, set[int]] = {}
    for change in changes:
        number = layer_of(change)
        layers.setdefault(role_of(change.name)[0], set()).update(
            () if number is None else (number,)
        )
    return listed(
        [
            f"{name} in {indexed('layer', where)}" if where else name
            for name, where in layers.items()
        ],
        NAMED,
    )


class AlongRow(NamedTuple):
    """A tensor changed along a shared direction, as a row of directions.csv."""

    direction: str = column("Its number among those that were removed, or that changes share.")
    tensor: str = column()
    layer: int | None = column(format=".0f")
    strength: float = column(
        "Of what the tensor had along it, how much was subtracted: 1 leaves nothing."
    )
    left: float = column("How much of its size along it is left.")
    cosine: float = column("Of the change along it and what was subtracted there: 1 for a removal.")


class ChangeRow(NamedTuple):
    """The change of a tensor, as a row of tensors.csv."""

    tensor: str = column("Its name in the first checkpoint; in the last where only that has it.")
    role: str = column("Its role; the name where no row knows it.")
    kind: str = column("What kind of change it is.")
    detail: str = column("The same in more detail.")
    change: float = column(
        "Frobenius norm of the change, relative to the tensor before.", symbol="$‖ΔW‖/‖W‖$"
    )
    largest: float = column("The largest change of a value.")
    values_changed: int = column(symbol="values changed")
    rows_changed: int = column(symbol="rows changed")
    rank: float = column("Of the change, where it is low.", format=".0f")  # NaN where it is not
    dtype_a: str = column(symbol="dtype before")
    dtype_b: str = column(symbol="dtype after")
    shape_a: str = column(symbol="shape before")
    shape_b: str = column(symbol="shape after")
    tensor_b: str = column("Its name in the last checkpoint.", symbol="tensor after")
    paired_by: str = column(
        "Role, or only the name where no row knows the tensor.", symbol="paired by"
    )


class OtherRow(NamedTuple):
    """The change of a tensor outside the heads, as a row of a page."""

    tensor: str = column()
    change: float = column(symbol="$‖ΔW‖/‖W‖$")


def _in_common(changes: Sequence[Change]) -> str:
    """Details that the changes of one kind share, in brackets, or their tensors."""
    if changes[0].kind in ONLY_IN_ONE:
        return f": {described([change.shown_name for change in changes])}"
    if changes[0].kind is What.TUNED:
        return f" ({spread(changes)})"
    ranks = sorted({change.rank for change in changes if change.rank is not None})
    if ranks:
        return f" (rank {spans(ranks)})"
    details = Counter(change.detail for change in changes if change.detail)
    few = len(details) == 1 or changes[0].kind in ONE_DETAIL
    return f" ({details.most_common(1)[0][0]})" if details and few else ""


def spread(changes: Sequence[Change]) -> str:
    """`relative change 0.26 to 0.48`, of those whose size before is known."""
    sizes = [change.change for change in changes if np.isfinite(change.change)]
    zero = len(changes) - len(sizes)
    parts = [f"relative change {between(sizes)}"] if sizes else []
    return ", ".join([*parts, *([f"{zero} from zero"] if zero else [])])


def between(values: Sequence[float]) -> str:
    """`0.26 to 0.48`, or one number where both are written alike."""
    return " to ".join(dict.fromkeys(f"{value:.2g}" for value in (min(values), max(values))))


def compare_tensors(a: Model | TensorsOnly, b: Model | TensorsOnly) -> TensorChanges:
    """Read every tensor of two checkpoints once, and again where the kind of change is unclear.

    Memory is a few blocks of a million values per core and, where a rank is looked for, two
    matrices of 144 columns.
    """
    entries = list(counterparts(a, b))
    pairs = [each.pair() or _as_unembedding(each, a, b) for each in entries]
    lone = [_lacking(each) for each, pair in zip(entries, pairs, strict=True) if pair is None]
    return TensorChanges([*changes_with_directions(a, b, [pair for pair in pairs if pair]), *lone])


def lone_tensors(
    entries: Iterable[Counterparts], a: Model | TensorsOnly, b: Model | TensorsOnly
) -> list[Change]:
    """Tensors without a counterpart, but for a head that is the other's tied embedding."""
    lone = [each for each in entries if each.a is None or each.b is None]
    return [_lacking(each) for each in lone if _as_unembedding(each, a, b) is None]


def _as_unembedding(
    only: Counterparts, a: Model | TensorsOnly, b: Model | TensorsOnly
) -> Pair | None:
    """Pair an unembedding that one checkpoint stores with the tied embedding of the other."""
    stored, tied = (only.a, b) if only.a else (only.b, a)
    if stored is None or stored.role != ROWS or not isinstance(tied, Model) or not tied.ends.tied:
        return None
    rows = needed_tensors(tied).get(ROWS)
    if rows is None or len(stored.as_stored().shape) != len(rows.shape):
        return None
    sides = (stored.as_stored(), rows) if only.a else (rows, stored.as_stored())
    return Pair(*sides, ROWS, "role", ROWS)


def _lacking(only: Counterparts) -> Change:
    """A tensor, or a part of one, that only one checkpoint has."""
    a, b = (None if side is None else side.as_stored() for side in (only.a, only.b))
    tensor = only.a or only.b
    assert tensor is not None
    part = only.label if tensor.undone is None else ""
    return replace(
        unchanged(a, b, What.MISSING if a else What.NEW),
        role=tensor.role * tensor.has_role,
        part=part,
    )


def changes_with_directions(
    a: Model | TensorsOnly, b: Model | TensorsOnly, pairs: Sequence[Pair]
) -> list[Change]:
    """Compare pairs; changes along a direction that several share get a kind of their own."""
    compared = TensorChanges(compare_pairs(a.checkpoint, b.checkpoint, pairs))
    # ranks above one are rounding
    shared = {i for each in compared.shared for i in each.members}
    return [
        replace(c, deed=Deed(What.ONE_DIRECTION, detail=c.detail, rank=1)) if i in shared else c
        for i, c in enumerate(compared.changes)
    ]


def unpaired(only_a: Sequence[Tensor], only_b: Sequence[Tensor]) -> list[Change]:
    """The tensors that only the first or only the last of two checkpoints has."""
    return [
        *(unchanged(t, None, What.MISSING) for t in only_a),
        *(unchanged(None, t, What.NEW) for t in only_b),
    ]


# Tensors that no head's map is made of: biases, norms, sinks, embeddings, unembedding.


@dataclass(frozen=True)
class OtherChanges(TensorChanges):
    """Changes of these tensors, and the part of them that a limit applies to."""

    # |B - A| / |A| by shown name, without tensors that heads show as well, such as biases of
    # queries. A bias is compared with the larger of its norm and its weight's.
    limited: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def moved(self) -> list[Change]:
        """Limited tensors that changed by more than float32's rounding, or contain NaN."""
        known = [change for change in self._limited if change.kind not in UNKNOWN_SIZE]
        return [change for change in known if not change.change <= UNMOVED]

    @property
    def _limited(self) -> list[Change]:
        return [change for change in self.changes if change.shown_name in self.limited]

    def moved_most(self, n: int, identical: int = 0) -> Table:
        """The tensors that changed most, then some that did not, for people."""
        order = sorted(self.moved, key=lambda change: -np.nan_to_num(change.change, nan=np.inf))
        still = [change for change in self._limited if change.change <= UNMOVED]
        shown = [*order[:n], *still[:identical]]
        return Table.of(OtherRow, [OtherRow(each.shown_name, each.change) for each in shown])

    @property
    def headline(self) -> str:
        """A sentence on how many changed, and which most; empty where none did."""
        if not self.moved:
            return ""
        most = max(self.moved, key=lambda change: inf if np.isnan(change.change) else change.change)
        how_far = "by an unknown amount" if np.isnan(most.change) else f"by {most.change:.3g}"
        total = sum(change.kind not in UNKNOWN_SIZE for change in self._limited)
        return (
            f"{len(self.moved)} of {counted(total, 'other tensor')} changed, {most.shown_name} "
            f"{how_far}."
        )


def other_changes(a: Model, b: Model) -> OtherChanges:
    """Compare these tensors of two models; across families, only tensors with equal names."""
    of_a, of_b = other_tensors(a), other_tensors(b)
    embedding = [model.prefix + model.family.inputs.tokens for model in (a, b)]
    tied = [
        ROWS in tensors and tensors[ROWS].name == name
        for tensors, name in zip((of_a, of_b), embedding, strict=True)
    ]
    if all(tied):
        del of_a[ROWS], of_b[ROWS]
    pairs, _, _ = pair_up(of_a, of_b)
    if any(tied):  # a head that only one stores is compared as the unembedding
        pairs = [replace(pair, part=ROWS) if pair.a is of_a.get(ROWS) else pair for pair in pairs]
    shown = with_shown_casts(pairs, first_pass(a.checkpoint, b.checkpoint, pairs))
    changes = [*map(_with_kind, shown)]
    if a.family.name == b.family.name:
        in_a, in_b = (_in_layers(model) if _names_alike(a, b) else {} for model in (a, b))
        needed_a, needed_b = needed_tensors(a) | in_a, needed_tensors(b) | in_b
        if all(tied):
            needed_a.pop(ROWS, None), needed_b.pop(ROWS, None)
        lost, new = pair_up(needed_a, of_b | in_b).only_a, pair_up(of_a | in_a, needed_b).only_b
        changes += unpaired(lost, new)
    return OtherChanges(changes, limited_changes(a, changes))


def _names_alike(a: Model, b: Model) -> bool:
    """True unless just one is a GGUF file, which names feed-forward tensors otherwise."""
    return a.checkpoint.is_gguf == b.checkpoint.is_gguf


def _in_layers(model: Model) -> dict[str, Tensor]:
    """The layers' tensors by name without the prefix; no buffers, which files may leave out."""
    stems = {model.stem(i) for i, kind in enumerate(model.config.layer_types) if kind != "none"}
    stored = {name: stem for stem in stems for name in model.checkpoint.names_under(stem)}
    names = {name: name.removeprefix(stem) for name, stem in stored.items()}
    kept = (
        name for name, inner in names.items() if not _is_buffer(inner, model.checkpoint[name].shape)
    )
    return {name.removeprefix(model.prefix): model.checkpoint[name] for name in kept}


def _is_buffer(inner: str, shape: tuple[int, ...]) -> bool:
    """Detect rotary frequencies, and causal masks that are called a bias."""
    return NO_WEIGHTS.fullmatch(inner) is not None or (len(shape) == 4 and shape[:2] == (1, 1))


def _with_kind(change: Change) -> Change:
    """The change with its kind as far as one reading shows it."""
    if change.kind in UNKNOWN_SIZE or not change.values_changed:
        return change
    if not isfinite(change.moved):
        return replace(change, deed=Deed(What.NOT_FINITE))
    done = plain_deed(change)
    if done is None and change.pair is not None and not change.is_matrix:
        done = deed_by_views(change.pair, change)
    return replace(change, deed=done or Deed(What.TUNED))


def limited_changes(a: Model, changes: Iterable[Change]) -> dict[str, float]:
    """|B - A| / |A| of tensors that heads do not show; of a bias, over its weight if larger.

    A bias of next to nothing may double without effect, and its weight says how large it would have
    to be. A tensor that B lacks changed by its whole norm, one that A lacks by infinity; rows that
    one lacks count as rows of usual norm.
    """
    changes, shown = list(changes), shown_by_heads(a)
    squares = {(change.name, change.part): change.squares for change in changes}
    limited: dict[str, float] = {}
    for change in changes:
        if change.kind is What.UNREAD or change.name in shown or is_lacking_buffer(change):
            continue
        far = inf if change.kind in UNKNOWN_SIZE else change.change
        if change.kind is What.MISSING:
            far = 1.0
        if change.rows_lacking:
            far = sqrt(far**2 + abs(change.rows_lacking) / change.shapes[0][0])
        weight = change.name.removesuffix("bias") + "weight"
        if change.name.endswith(".bias") and change.moved > 0 and weight in a.checkpoint:
            known = squares.get((weight, change.part.removesuffix(".bias")))
            of_weight = squares_of(a.checkpoint[weight]) if known is None else known
            if of_weight > change.squares:
                far = sqrt(change.moved / of_weight)
        name = change.shown_name
        limited[name] = float(np.maximum(far, limited.get(name, 0.0)))  # NaN stays NaN
    return limited


def is_lacking_buffer(change: Change) -> bool:
    """True for a buffer that one checkpoint leaves out."""
    return change.kind in ONLY_IN_ONE and _is_buffer(
        role_of(change.name)[0], max(change.shapes, key=len)
    )


def only_in_one(changes: Iterable[Change]) -> str:
    """The tensors and rows that only one checkpoint has, in sentences; empty without any."""
    changes = [change for change in changes if not is_lacking_buffer(change)]
    sentences = []
    for kind, where, sign in ((What.MISSING, "first", 1), (What.NEW, "last", -1)):
        lacking = [change.shown_name for change in changes if change.kind is kind]
        rows: dict[tuple[int, int], list[str]] = {}
        for change in changes:
            if sign * change.rows_lacking > 0:
                size = max(shape[0] for shape in change.shapes)
                rows.setdefault((sign * change.rows_lacking, size), []).append(change.shown_name)
        parts = [described(lacking)] if lacking else []
        parts += [
            f"{n:,} of {total:,} rows of {listed(names, NAMED)}"
            for (n, total), names in rows.items()
        ]
        sentences += [f"Only in the {where}: {'; '.join(parts)}."] if parts else []
    return " ".join(sentences)


def find_rescaled(changes: Iterable[Change], label: str) -> Iterator[Finding]:
    """Tensors that became zero, or whose norm grew or shrank a thousandfold."""
    zero: list[tuple[Change, float]] = []
    scaled: list[tuple[Change, float]] = []
    for change in changes:
        before, after = sqrt(change.squares), sqrt(change.squares_b)
        if change.kind in UNKNOWN_SIZE or not isfinite(before + after):
            continue
        # the norm of as many ones as the tensor has values afterwards
        ones = sqrt(prod(change.shapes[1]))
        if before > after == 0:
            zero.append((change, 0.0))
        elif (
            not 1 / RESCALED <= after / before <= RESCALED if before else after > LARGEST_RMS * ones
        ):
            scaled.append((change, after / before if before else inf))
    for kind, tensors, measure in (
        ("zero_tensor", zero, "norm"),
        ("out_of_scale", scaled, "norm_ratio"),
    ):
        if not tensors:
            continue
        names = listed([change.shown_name for change, _ in tensors], NAMED)
        change, ratio = max(tensors, key=lambda each: abs(log(each[1])) if each[1] else 0.0)
        text = f"{names} of {label}: zero throughout, and not before."
        if kind == "out_of_scale":
            text = (
                f"{names} of {label}: the norm of {change.shown_name} is {ratio:.3g} times that "
                "before."
            )
        members = tuple(
            Member("tensor", None, name=change.shown_name, number=ratio)
            for change, ratio in tensors
        )
        yield Finding(
            kind=kind, measure=measure, number=ratio, usual=1.0, text=text, members=members
        )
